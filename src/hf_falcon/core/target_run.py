# Copyright 2026 The hf_falcon authors. Licensed under the Apache License, Version 2.0.
"""The target during one `generate` call: it scores trees or chains, and keeps the accepted paths in its cache."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import Cache, GenerationConfig, PreTrainedModel

from .caches import RowSlots, SlotLayer, adopt_layers, give_back
from .hook import extend_model_kwargs, prefill
from .interfaces import part, target_acceleration
from .modeling_falcon_draft import additive_mask, hide_end
from .target_parts import (
    CACHE_NAME,
    SLIDING,
    FeatureTap,
    depth_boundaries,
    depth_left,
    first_step,
    inputs_beside_text,
    layer_kinds,
    rope_boundary,
)
from .tree import DraftTree, chain, to_device


class PromptFeatures(NamedTuple):
    """
    What a row's drafter reads of the prompt.

    Args:
        features (`torch.Tensor` of shape `(1, positions, ...)`):
            The target's features of the prompt's last tokens: of those that were not in the cache, without padding on
            the left.
        first_position (`int`): position of the first of them.
        padding (`int`): padding tokens before the prompt.
    """

    features: Tensor
    first_position: int
    padding: int


class NoLayerOutputs:
    """The outputs of the target's layers, which this call does not ask for. The installed package has others."""

    hidden_states = attentions = None

    def __init__(self, generation_config: GenerationConfig | None = None):
        # Of the target's forward.
        self.arguments: dict[str, Any] = {}

    def add_step(self, outputs: Any) -> None:
        """Adds the outputs of a forward that plain decoding runs in the same way: the prompt, or a single token."""

    def add_path(self, outputs: Any, path: Tensor, cache: Cache) -> None:
        """Adds the outputs of a tree's forward for the nodes of `path`, of shape `(kept,)`."""


class TargetRun:
    """
    The target during one `generate` call, for one row or several: prefills, scores trees and keeps accepted paths.

    Args:
        model ([`PreTrainedModel`]): the target.
        input_ids (`torch.LongTensor` of shape `(rows, length)`): the prompts.
        generation_config ([`GenerationConfig`]): configuration of the call.
        model_kwargs (`dict`): the model's arguments that `generate` prepared, a cache among them.
        feature_layers (sequence of `int`, *optional*): see [`FeatureTap`]; `None` for features of width 0.
    """

    takes_trees = True
    # Accepted tokens that are not in the cache yet, and their largest number; chains may have some, and read costs.
    deferred = most_deferred = 0
    costs: Any = None
    # What sees the rounds of the call; see the part "learning".
    observer: Any = None

    def __init__(
        self,
        model: PreTrainedModel,
        input_ids: Tensor,
        generation_config: GenerationConfig,
        model_kwargs: dict[str, Any],
        feature_layers: Sequence[int] | None = (),
    ):
        self.model = model
        self._tap = FeatureTap(model, feature_layers)
        self.cache: Cache = model_kwargs[CACHE_NAME]
        self._config = model.config.get_text_config(decoder=True)
        self._generation_config = generation_config
        self._model_kwargs = model_kwargs
        self._kinds = sorted(layer_kinds(model.config))
        self._rope_boundary, self._rope_never_settles = rope_boundary(self._config)
        self._boundaries = depth_boundaries(model)
        self._prompt_length = input_ids.shape[1]
        # Slots of the cache before the text's first token; and the nodes of the trees of the last forward.
        self._prefix, self._sizes = 0, [1] * input_ids.shape[0]
        self._slots = RowSlots([0] * input_ids.shape[0], model.device)
        # Slots of the prompt that hold padding, of shape `(rows, slots)`.
        self._hidden: Tensor | None = None
        # The first step of plain decoding after the prompt; and the difference between a position and its slot in the
        # cache, of shape `(rows, 1)`, or `(kinds, rows, 1)` where a token has positions of several kinds.
        self._first_step: dict[str, Any] = {}
        self._position_shift = torch.zeros(1, 1, dtype=torch.long, device="cpu")
        self.layer_outputs = (part("layer_outputs") or NoLayerOutputs)(generation_config)
        self._outputs: Any = None
        reads_layers = bool(feature_layers or self.layer_outputs.arguments)
        self.acceleration = target_acceleration(model, is_batch=len(self._slots) > 1, reads_layers=reads_layers)
        self._layers: list[SlotLayer] = []

    @property
    def length(self) -> int:
        """Slots of the longest row in the cache."""
        return self._slots.longest

    @property
    def prompt_embeds(self) -> Tensor | None:
        """The prompt, of shape `(1, length, hidden_size)`, where it was given as embeddings."""
        return self._model_kwargs.get("inputs_embeds")

    def prefill(self, input_ids: Tensor) -> tuple[Tensor, list[PromptFeatures]]:
        """
        Runs the prompts as plain decoding does.

        Returns:
            The logits after them, of shape `(rows, vocab_size)`, and each row's features.
        """
        with self._tap as tap, self.acceleration.reading():
            outputs = prefill(self.model, input_ids, self._generation_config, self._model_kwargs)
        self._first_step = first_step(self.model, input_ids, self._model_kwargs)
        mask, cache = self._model_kwargs.get("attention_mask"), outputs[CACHE_NAME]
        if mask is not None and not bool(mask.all()):
            # The mask is of the prompt; a prefix before it is visible.
            self._hidden = F.pad(~mask.bool(), (int(cache.get_seq_length()) - mask.shape[1], 0))
        self._adopt(cache)
        self._prefix = self.length - input_ids.shape[1]
        self.layer_outputs.add_step(outputs)
        # Positions continue from the prompt's, which padding, images or the caller may have shifted.
        positions = self._first_step.get("position_ids")
        if positions is not None:
            self._position_shift = positions[..., -1:].cpu() - self.length
        return outputs.logits[:, -1], prompt_features(tap.take(), input_ids, mask, self.length)

    def max_tree_depth(self, row: int = 0) -> int | None:
        """How deep a row's tree may go; see [`depth_left`]."""
        slot = self._slots.lengths[row]
        shift = int(self._position_shift[..., min(row, self._position_shift.shape[-2] - 1), :].max())
        limits = [depth_left(self._boundaries, slot + shift)]
        if self._rope_boundary is not None:
            # Plain decoding drops its cache by the slot, which padding makes greater: see `_fresh_start`.
            limits.append(depth_left([(self._rope_boundary, self._rope_never_settles)], slot))
        return min((limit for limit in limits if limit is not None), default=None)

    def score(self, trees: Sequence[DraftTree], texts: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
        """
        One forward over all nodes of all rows' trees.

        Args:
            trees (sequence of [`DraftTree`]): the tree of each row.
            texts (sequence of `torch.LongTensor` of shape `(1, length)`): the rows' tokens so far, each of which ends
                with the root; on the host.

        Returns:
            The logits after each node's own path, of shape `(rows, nodes, vocab_size)`, and the nodes' features, of
            shape `(rows, nodes, hidden_size)`; `nodes` is the size of the largest tree.
        """
        if len(texts) == 1 and (whole := self._fresh_start(texts[0])) is not None:
            with self._tap as tap:
                outputs = self.model(**whole, return_dict=True)
            self.layer_outputs.add_step(outputs)
            self._release()
            self._adopt(outputs[CACHE_NAME], new_tokens=1)
            return outputs.logits[:, -1:], tap.take()[:, -1:]
        self._sizes = [len(tree) for tree in trees]
        nodes, device, starts = max(self._sizes), self.model.device, self._slots.lengths
        size = self.acceleration.padded_size(nodes)
        padded = [tree.padded(size) for tree in trees]
        depths = torch.stack([tree.depths for tree in padded])
        places = torch.tensor(starts, device="cpu")[:, None] + depths
        positions = places + self._position_shift
        inputs = torch.cat((torch.stack([tree.token_ids for tree in padded]), positions.flatten(end_dim=-2)))
        inputs = to_device(inputs, device)
        visible = torch.stack([tree.visible for tree in padded])
        masks = {kind: self._mask(kind, places, visible) for kind in self._kinds}
        with self._tap as tap, self.acceleration.scoring(self.cache, masks.values()):
            outputs = self._outputs = self.model(
                # Positions may be floats: Qwen's with sound are.
                input_ids=inputs[: len(trees)].long(),
                attention_mask=masks if len(masks) > 1 else masks[self._kinds[0]],
                position_ids=inputs[len(trees) :].view(positions.shape),
                use_cache=True,
                return_dict=True,
                **{CACHE_NAME: self.cache},
                **inputs_beside_text(self._first_step, size),
                **self.layer_outputs.arguments,
            )
        return outputs.logits[:, :nodes], tap.take()[:, :nodes]

    def accept(self, paths: Sequence[Tensor]) -> None:
        """
        Keeps the nodes of each row's path in the cache. The next forward overwrites the others.

        Args:
            paths (sequence of `torch.LongTensor` of shape `(kept,)`):
                Nodes to keep, in ascending order, for each row; on the host. Without any, a row has ended: it keeps
                its first nodes (see `rest`), as far as the others have come.
        """
        self._keep_outputs(paths)
        counts, lengths = [path.shape[0] for path in paths], self._slots.lengths
        # A path ascends: if its last node is in its place, all are.
        if any(count and int(path[-1]) >= count for count, path in zip(counts, paths)):
            targets = torch.arange(max(counts), device="cpu").repeat(len(paths), 1)
            sources = targets.clone()
            for row, path in enumerate(paths):
                sources[row, : counts[row]] = path
            starts = torch.tensor(lengths, device="cpu")[:, None]
            moves = torch.stack((sources, targets)) + starts
            moves = moves[:, 0] if len(paths) == 1 else moves
            devices = {layer.device for layer in self._layers}
            on_devices = {device: to_device(moves, device).unbind(0) for device in devices}
            for layer in self._layers:
                layer.move(*on_devices[layer.device])
        end = max(map(sum, zip(lengths, counts)))
        rows = zip(counts, self._sizes, lengths)
        self._slots.advance([count or min(size, end - length) for count, size, length in rows])

    def select(self, rows: Sequence[int]) -> None:
        """Drops all rows but those at these indices."""
        indices = torch.tensor(rows, device="cpu")
        self._slots.select(rows)
        if self._position_shift.shape[-2] > 1:
            self._position_shift = self._position_shift[..., indices, :]
        for layer in self._layers:
            layer.select(indices)

    def finish(self, sequences: Tensor | None = None) -> Cache:
        """
        Gives the cache its own layers back, as plain decoding leaves them: a next turn may start from it, with or
        without a drafter. What a round that broke off has written is not among them.

        Args:
            sequences (`torch.LongTensor` of shape `(rows, length)`, *optional*):
                All rows, padded at their ends, on the host. If given, the cache gets the padding of rows that ended
                early; no row may have left it.
        """
        try:
            texts = () if sequences is None else sequences.split(1)
            while texts and (missing := self._slots.longest - self._slots.shortest) > 0:
                self.score([self.rest(row, text, missing) for row, text in enumerate(texts)], texts)
                self.accept([torch.empty(0, dtype=torch.long, device="cpu")] * len(texts))
        finally:
            self._release()
        return self.cache

    def rest(self, row: int, text: Tensor, nodes: int, padding: int | None = None) -> DraftTree:
        """
        What plain decoding runs next of a row that has ended: what is left of its text, and padding.

        Args:
            row (`int`): the row.
            text (`torch.LongTensor` of shape `(1, length)`): its text, on the host.
            nodes (`int`): tokens, at most.
            padding (`int`, *optional*): the token behind the text.
        """
        deepest = self.max_tree_depth(row)
        nodes = nodes if deepest is None else min(nodes, max(0, deepest) + 1)
        left = text[0, self._slots.lengths[row] - self._prefix :]
        return chain(F.pad(left, (0, nodes), value=padding or 0)[:nodes])

    def _adopt(self, cache: Cache, new_tokens: int = 0) -> None:
        """
        Adopts the cache that a forward returned: where rotary frequencies change, Phi3 returns another one. Of its
        tokens the last `new_tokens` are not kept yet.
        """
        self.cache = cache
        length, rows = int(cache.get_seq_length()), len(self._slots)
        self._slots = RowSlots([length] * rows, self.model.device, self._hidden)
        window = getattr(self._config, "sliding_window", None)
        self._layers = adopt_layers(cache, self._slots, window, self.acceleration.wants_static_shapes)
        self._slots.advance([-new_tokens] * rows)

    def _release(self) -> None:
        give_back(self.cache)
        self._layers = []

    def _fresh_start(self, text: Tensor) -> dict[str, Any] | None:
        """
        The arguments of a forward over the whole text, if plain decoding drops its cache here, as Phi3 does at its
        boundary.
        """
        if self._rope_boundary is None or self.length != self._rope_boundary:
            return None
        kwargs = extend_model_kwargs(self.model, self._model_kwargs, text.shape[1] - self._prompt_length)
        kwargs |= {CACHE_NAME: self.cache, "use_cache": True, **self.layer_outputs.arguments}
        tokens = to_device(text, self.model.device)
        inputs: dict[str, Any] = self.model.prepare_inputs_for_generation(tokens, next_sequence_length=1, **kwargs)
        return inputs if inputs.get(CACHE_NAME) is None else None

    def _keep_outputs(self, paths: Sequence[Tensor]) -> None:
        outputs, self._outputs = self._outputs, None
        if outputs is not None and self.layer_outputs.arguments:
            # Rows of a batch are decoded plainly if the call asks for these.
            [path] = paths
            self.layer_outputs.add_path(outputs, path, self.cache)

    def _mask(self, kind: str, places: Tensor, visible: Tensor) -> Tensor:
        """
        The mask of a forward.

        Args:
            kind (`str`): the kind of attention.
            places (`torch.LongTensor` of shape `(rows, nodes)`): each node's slot in plain decoding, on the host.
            visible (`torch.BoolTensor` of shape `(rows, nodes, nodes)`): see [`DraftTree`]; on the host.

        Returns:
            `torch.Tensor` of shape `(rows, 1, nodes, slots)`: additive, for the slots that the layer gives.
        """
        nodes, device, dtype, slots = visible.shape[1], self.model.device, self.model.dtype, self._slots
        layer = self._layer_of_kind(kind)
        count, first = layer.get_mask_sizes(nodes)
        cached = slots.longest - first
        is_even = slots.longest == slots.shortest
        if kind != SLIDING and slots.hidden is None and is_even:
            # All nodes see all cached slots, and static slots behind the tree hold nothing.
            mask = F.pad(to_device(additive_mask(visible, dtype), device), (cached, 0))
            return hide_end(mask, count - cached - nodes)[:, None]
        numbers = torch.arange(first, first + count, device=device)
        # Of shape (rows, 1, slots), or (rows, nodes, slots) with a window.
        before = (numbers < slots.next(1))[:, None]
        if slots.hidden is not None:
            padding = F.pad(slots.hidden, (0, max(0, first + count - slots.hidden.shape[1])))
            before = before & ~padding[:, None, first : first + count]
        if kind == SLIDING:
            # The window is the model's, not the cache layer's: a user's own cache may keep more than the window.
            oldest = places - self._config.sliding_window
            before = before & (numbers > to_device(oldest, device)[..., None])
            visible = visible & (places[:, None] > oldest[..., None])
        mask = before.repeat(1, nodes // before.shape[1], 1)
        own = (slots.next(nodes) - first)[:, None].expand(-1, nodes, -1)
        mask.scatter_(2, own, to_device(visible, device))
        return additive_mask(mask, dtype)[:, None]

    def _layer_of_kind(self, kind: str) -> Any:
        kinds = getattr(self._config, "layer_types", None)
        index = kinds.index(kind) if kinds is not None else 0
        return self.cache.layers[index]


def prompt_features(features: Tensor, input_ids: Tensor, mask: Tensor | None, length: int) -> list[PromptFeatures]:
    """
    Each row's features of its prompt.

    Args:
        features (`torch.Tensor` of shape `(rows, positions, ...)`): of the prompts' last tokens.
        input_ids (`torch.LongTensor` of shape `(rows, tokens)`): the prompts.
        mask (`torch.Tensor` of shape `(rows, slots)`, *optional*): the attention mask.
        length (`int`): slots in the cache.
    """
    tokens, positions = input_ids.shape[1], features.shape[1]
    padding = [0] * features.shape[0]
    if mask is not None and tokens and not bool(mask.all()):
        padding = (mask[:, -tokens:].cumsum(dim=1) == 0).sum(dim=1).tolist()
    found = []
    for row, count in enumerate(padding):
        # A row of padding alone keeps its last token.
        unread = min(max(0, count - max(0, tokens - positions)), positions - 1)
        first_position = max(0, length - (positions - unread) - count)
        found.append(PromptFeatures(features[row : row + 1, unread:], first_position, count))
    return found
