# Copyright 2026 The hf_falcon authors. Licensed under the Apache License, Version 2.0.
"""The target during one `generate` call: it scores trees, and keeps the accepted paths in its cache."""

from __future__ import annotations

import copy
import math
import weakref
from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import Cache, DynamicCache, GenerationConfig, PreTrainedModel
from transformers.cache_utils import StaticLayer

from .caches import (
    STATIC_SLOTS,
    RaggedLayer,
    RaggedRows,
    Rewind,
    RowLengths,
    StackedLayer,
    StackedRows,
    drop_rows,
    give_back,
    ragged_layers,
    refill_static,
    stack_layers,
    unfold_static,
)
from .costs import Costs
from .hook import attention_implementation, extend_model_kwargs, is_user_defined, leave_past_recording, prefill
from .interfaces import target_acceleration
from .modeling_falcon_draft import additive_mask, hide_end
from .statistics import LayerOutputs
from .target_parts import (
    CACHE_NAMES,
    SLIDING,
    FeatureTap,
    cached_tokens,
    first_step,
    inputs_beside_text,
    layer_kinds,
    rope_boundary,
)
from .tree import DraftTree, chain, to_device

# Slots for the tree of a round, if it is no larger than most.
_TREE_SLOTS = 128
# Tokens of the prompt and behind it that show whether a target can run a chain, and how far their logits may differ.
_TRIED_PROMPT, _TRIED_TOKENS = 8, 5
_TOLERANCE, _TOLERANCE_HALF = 1e-3, 0.1


class TargetRun:
    """
    The target during one `generate` call: prefills, scores trees and keeps accepted paths.

    Args:
        model ([`PreTrainedModel`]): the target.
        input_ids (`torch.LongTensor` of shape `(1, length)`): the prompt.
        generation_config ([`GenerationConfig`]): configuration of the call.
        model_kwargs (`dict`): the model's arguments that `generate` prepared, a [`DynamicCache`] among them.
        feature_layers (sequence of `int`, *optional*): see [`FeatureTap`].
    """

    # See [`ChainRun`].
    deferred = most_deferred = 0

    def __init__(
        self,
        model: PreTrainedModel,
        input_ids: Tensor,
        generation_config: GenerationConfig,
        model_kwargs: dict[str, Any],
        feature_layers: Sequence[int] = (),
    ):
        self.model = model
        self._tap = FeatureTap(model, feature_layers)
        self.cache: Cache = model_kwargs["past_key_values"]
        self._config = model.config.get_text_config(decoder=True)
        self._generation_config = generation_config
        self._model_kwargs = model_kwargs
        self._kinds = sorted(layer_kinds(model.config))
        self._rope_boundary, self._rope_never_settles = rope_boundary(self._config)
        padding = model_kwargs.get("attention_mask")
        # Cached slots that hold padding stay hidden.
        self._hidden_slots = None if padding is None or bool(padding.all()) else ~padding[0].bool()
        self._num_hidden = 0 if self._hidden_slots is None else int(self._hidden_slots.sum())
        # The first step of plain decoding after the prompt; and the difference between a position and its slot in the
        # cache, of shape `(1, 1)`, or `(kinds, 1, 1)` where a token has positions of several kinds.
        self._first_step: dict[str, Any] = {}
        self._position_shift = torch.zeros(1, 1, dtype=torch.long)
        self.layer_outputs = LayerOutputs(generation_config)
        self._outputs: Any = None
        reads_layers = bool(feature_layers or self.layer_outputs.arguments)
        self.acceleration = target_acceleration(model, reads_layers=reads_layers)
        self._stacks: list[StackedRows] = []
        self._static: list[StaticLayer] = []
        # Nodes that the last forward added, with padding. They are dropped at once: a layer with a window that is
        # cropped twice drops rows that are still in the window.
        self._added = 0
        # Tokens in the cache that stay there if a round breaks off.
        self._kept: int | None = None

    @property
    def length(self) -> int:
        """Tokens in the cache."""
        return self.cache.get_seq_length()

    @property
    def prompt_embeds(self) -> Tensor | None:
        """The prompt, of shape `(1, length, hidden_size)`, where it was given as embeddings."""
        return self._model_kwargs.get("inputs_embeds")

    def prefill(self, input_ids: Tensor) -> tuple[Tensor, Tensor]:
        """
        Runs the prompt as plain decoding does.

        Returns:
            The logits after it, of shape `(1, vocab_size)`, and the features of its positions that were not in the
            cache yet, of shape `(1, positions, hidden_size)`.
        """
        with self._tap as tap:
            outputs = prefill(
                self.model,
                input_ids,
                self._generation_config,
                self._model_kwargs,
                is_first_iteration=not self._generation_config.is_assistant,
            )
        self._first_step = first_step(self.model, input_ids, self._model_kwargs)
        self._adopt(outputs.past_key_values)
        self.layer_outputs.add_step(outputs)
        # Positions continue from the prompt's, which padding, images or the caller may have shifted.
        positions = self._first_step.get("position_ids")
        if positions is not None:
            self._position_shift = positions[..., -1:].cpu() - self.length
        return outputs.logits[:, -1], tap.take()

    def max_tree_depth(self) -> int | None:
        """How deep a tree may go before a node would see other rotary frequencies than plain decoding gives it."""
        if self._rope_boundary is None:
            return None
        position = self.length + int(self._position_shift.max())
        if position > self._rope_boundary and not self._rope_never_settles:
            return None
        return max(0, self._rope_boundary - 1 - position)

    def score(self, tree: DraftTree, input_ids: Tensor) -> tuple[Tensor, Tensor]:
        """
        One forward over all nodes of a tree.

        Args:
            tree ([`DraftTree`]): the tree of the round.
            input_ids (`torch.LongTensor` of shape `(1, length)`): the sequence so far, which ends with the root; on
                the host.

        Returns:
            The logits after each node's own path, of shape `(nodes, vocab_size)`, and the nodes' features, of shape
            `(1, nodes, hidden_size)`.
        """
        if self._starts_anew(input_ids):
            inputs = self.model.prepare_inputs_for_generation(
                to_device(input_ids, self.model.device), use_cache=True, **self.layer_outputs.arguments
            )
            with self._tap as tap:
                outputs = self._outputs = self.model(**inputs, return_dict=True)
            self._adopt(outputs.past_key_values)
            self._added = 1
            return outputs.logits[0, -1:], tap.take()[:, -1:]
        return self._forward(tree)

    def _forward(self, tree: DraftTree) -> tuple[Tensor, Tensor]:
        start, nodes = self.length, len(tree)
        tree = tree.padded(self.acceleration.padded_size(nodes))
        masks = {kind: self._mask(kind, tree, start) for kind in self._kinds}
        positions = start + self._position_shift + tree.depths
        inputs = torch.cat((tree.token_ids[None], positions.flatten(end_dim=-2)))
        inputs = to_device(inputs, self.model.device)
        with self._tap as tap, self.acceleration.scoring(self.cache, masks.values()):
            outputs = self._outputs = self.model(
                # Positions may be floats: Qwen's with sound are.
                input_ids=inputs[:1].long(),
                attention_mask=masks if len(masks) > 1 else masks[self._kinds[0]],
                position_ids=inputs[1:].view(positions.shape),
                past_key_values=self.cache,
                use_cache=True,
                return_dict=True,
                **inputs_beside_text(self._first_step, len(tree)),
                **self.layer_outputs.arguments,
            )
        self._added = len(tree)
        return outputs.logits[0, :nodes], tap.take()[:, :nodes]

    def accept(self, path: Tensor) -> None:
        """
        Keeps the nodes of `path` of the nodes just scored, and drops the others.

        Args:
            path (`torch.LongTensor` of shape `(kept,)`): nodes to keep, in ascending order, on the host.
        """
        nodes = self._added
        self._keep_outputs(path, nodes)
        kept, start = path.shape[0], self.length - nodes
        # The path ascends: if its last row is in its place, all are.
        if path[-1] >= kept:
            for stack in self._stacks:
                stack.keep(start, path)
            for layer in self.cache.layers:
                if layer.is_initialized and not isinstance(layer, StackedLayer):
                    _keep_rows(layer, path, nodes)
        drop_rows(self.cache, nodes - kept)
        self._kept = self.length

    def _keep_outputs(self, path: Tensor, nodes: int) -> None:
        outputs, self._outputs = self._outputs, None
        if nodes == 1:
            self.layer_outputs.add_step(outputs)
        elif self.layer_outputs.arguments:
            kept = {kind: getattr(self._layer_of_kind(kind), "sliding_window", None) for kind in self._kinds}
            kinds = getattr(self._config, "layer_types", None) or self._kinds * self._config.num_hidden_layers
            self.layer_outputs.add_path(outputs, path, [kept[kind] for kind in kinds])

    def finish(self) -> Cache:
        """The cache as plain decoding would leave it: a next turn may start from it, with or without a drafter."""
        for layer in self.cache.layers:
            # A round that broke off leaves its tree there; in some layers only, if it broke off inside the target.
            if self._kept is not None and layer.get_seq_length() > self._kept:
                layer.crop(self._kept - layer.get_seq_length())
        self._release()
        return self.cache

    def _adopt(self, cache: Cache) -> None:
        """Adopts the cache that a forward returned: where rotary frequencies change, Phi3 returns another one."""
        if cache is not self.cache:
            self._release()
        self.cache = cache
        self._static = unfold_static(cache, getattr(self._config, "sliding_window", None))
        # Layers with a window then keep the rows of a tree until they are cropped.
        cache.activate_past_recording()
        cache.crop(0)
        self._stacks = stack_layers(cache, self._static_slots(), self.acceleration.wants_layers_apart)
        self._kept = self.length

    def _static_slots(self) -> int | None:
        """Slots that hold the whole text and a tree, where compiled code wants static shapes."""
        if not self.acceleration.wants_static_shapes:
            return None
        return STATIC_SLOTS * math.ceil(((self._generation_config.max_length or 0) + _TREE_SLOTS) / STATIC_SLOTS)

    def _release(self) -> None:
        """Gives the cache its own layers back."""
        give_back(self.cache)
        for layer in self.cache.layers:
            leave_past_recording(layer)
        refill_static(self.cache, self._static)

    def _starts_anew(self, input_ids: Tensor) -> bool:
        """Whether plain decoding drops its cache here and runs the whole text again, as Phi3 does at its boundary."""
        # With padding the context reaches the boundary later than the cache does, and the cache is kept.
        if self._rope_boundary is None or self.length != self._rope_boundary or self._num_hidden > 0:
            return False
        inputs = self.model.prepare_inputs_for_generation(
            input_ids, next_sequence_length=1, past_key_values=self.cache, use_cache=True
        )
        return inputs.get("past_key_values") is None

    def _mask(self, kind: str, tree: DraftTree, start: int) -> Tensor:
        """Additive mask of shape `(1, 1, nodes, cached + nodes)`; a node's slot is the one plain decoding gives it."""
        nodes, device, dtype = len(tree), self.model.device, self.model.dtype
        layer = self._layer_of_kind(kind)
        kv_length, kv_offset = layer.get_mask_sizes(nodes)
        # Static slots behind the tree hold nothing.
        unused = kv_length - start - nodes if isinstance(layer, StackedLayer) else 0
        cached = kv_length - nodes - unused
        if kind != SLIDING and self._hidden_slots is None:
            # All nodes see all cached slots.
            mask = F.pad(to_device(additive_mask(tree.visible, dtype), device), (cached, 0))
            return hide_end(mask, unused).unflatten(0, (1, 1, -1))
        slots = torch.arange(kv_offset, kv_offset + cached, device=device)
        before = torch.ones(nodes, cached, dtype=torch.bool, device=device)
        inside = tree.visible
        if kind == SLIDING:
            # The window is the model's, not the cache layer's: a user's own cache may keep more than the window.
            oldest = start + tree.depths - self._config.sliding_window
            before = slots[None] > to_device(oldest, device)[:, None]
            inside = inside & (start + tree.depths[None] > oldest[:, None])
        if self._hidden_slots is not None:
            padded = torch.zeros(start, dtype=torch.bool, device=device)
            padded[: self._hidden_slots.shape[0]] = self._hidden_slots
            before = before & ~padded[slots]
        mask = additive_mask(torch.cat((before, to_device(inside, device)), dim=1), dtype)
        return hide_end(mask, unused).unflatten(0, (1, 1, -1))

    def _layer_of_kind(self, kind: str) -> Any:
        kinds = getattr(self._config, "layer_types", None)
        index = kinds.index(kind) if kinds is not None else 0
        return self.cache.layers[index]


def _keep_rows(layer: Any, path: Tensor, nodes: int) -> None:
    """As [`StackedRows.keep`], for the last `nodes` rows of a layer of its own, such as one with a window."""
    start, end = layer.keys.shape[-2] - nodes, layer.keys.shape[-2] - nodes + path.shape[0]
    sources = to_device(path + start, layer.keys.device)
    for states in (layer.keys, layer.values):
        states[..., start:end, :] = states.index_select(-2, sources)


class ChainRun:
    """
    The target during one `generate` call, where it takes no tree: a round scores one path of tokens, prepared as
    `generate` prepares a step, with the model's own mask and positions.

    Where a layer keeps a recurrent state, rejected tokens cannot be dropped from it. The cache then goes back to where
    it was before the forward, and the accepted tokens are deferred: the next forward runs them again, before its path.
    They enter the cache with the first forward of which every token is accepted.

    Args:
        model, input_ids, generation_config, model_kwargs, feature_layers: see [`TargetRun`].
    """

    # Tokens that may be deferred before they enter the cache.
    most_deferred = 16

    def __init__(
        self,
        model: PreTrainedModel,
        input_ids: Tensor,
        generation_config: GenerationConfig,
        model_kwargs: dict[str, Any],
        feature_layers: Sequence[int] = (),
    ):
        self.model = model
        self._tap = FeatureTap(model, feature_layers)
        self._generation_config = generation_config
        # They describe the tokens in the cache.
        self._model_kwargs = model_kwargs
        self._cache_name = next((name for name in CACHE_NAMES if name in model_kwargs), CACHE_NAMES[0])
        self._rewind: Rewind | None = None
        self._outputs: Any = None
        self.layer_outputs = LayerOutputs(generation_config)
        # The outputs of layers are hidden from compiled code; it has no tree here to run either.
        self.acceleration = target_acceleration(model, reads_layers=True)
        # Tokens in the cache, and deferred ones.
        self.length = 0
        # What forwards cost, for the decision when deferred tokens enter the cache.
        self.costs: Costs | None = None
        # Accepted tokens that are not in the cache.
        self.deferred = 0
        # What running deferred tokens again has cost since they were first deferred, in plain steps.
        self._spent = 0.0
        # Tokens that the last forward ran, the deferred ones among them.
        self._added = 0
        # The text that the cache and the deferred tokens are of.
        self._tokens = input_ids.cpu()
        self._path = self._tokens

    @property
    def cache(self) -> Any:
        """The target's cache."""
        return self._model_kwargs.get(self._cache_name) if self._rewind is None else self._rewind.cache

    @property
    def prompt_embeds(self) -> Tensor | None:
        """See [`TargetRun.prompt_embeds`]."""
        return self._model_kwargs.get("inputs_embeds")

    def prefill(self, input_ids: Tensor) -> tuple[Tensor, Tensor]:
        """See [`TargetRun.prefill`]."""
        embeds, past = self.prompt_embeds, self.cache
        self.length = input_ids.shape[1]
        if embeds is not None:
            self.length = embeds.shape[1] + (cached_tokens(past) if isinstance(past, Cache) else 0)
        with self._tap as tap:
            outputs = self._outputs = prefill(
                self.model,
                input_ids,
                self._generation_config,
                self._model_kwargs,
                is_first_iteration=not self._generation_config.is_assistant,
            )
        # Not every model returns the cache that it was given.
        self._cache_name = next((name for name in CACHE_NAMES if name in outputs), self._cache_name)
        cache = outputs.get(self._cache_name, self._model_kwargs.get(self._cache_name))
        if type(cache) is DynamicCache:
            stack_layers(cache)
        self._rewind = Rewind(cache)
        # GIT puts its image before the prompt.
        return outputs.logits[:, -1], tap.take()[:, -self.length :]

    def max_tree_depth(self) -> int | None:
        """0 where the deferred tokens had better enter the cache, by a forward without draft tokens."""
        if self.deferred >= self.most_deferred:
            return 0
        if self.deferred == 0 or self.costs is None:
            return None
        # As in the problem of renting or buying: no more than twice what the best moment would have cost. Such a
        # forward brings one token, which drafting brings in half a plain step.
        price = self.costs.target(self.deferred)[-1] - 0.5
        return 0 if self._spent >= price else None

    def score(self, tree: DraftTree, input_ids: Tensor) -> tuple[Tensor, Tensor]:
        """
        One forward over the deferred tokens and a path.

        Args:
            tree ([`DraftTree`]): a single path: each node is the parent of the next one.
            input_ids: see [`TargetRun.score`].

        Returns:
            See [`TargetRun.score`].
        """
        assert self._rewind is not None
        self._added = self.deferred + len(tree)
        if self._added > 1 or is_user_defined(self.cache):
            self._rewind.mark()
        self._path = torch.cat((input_ids, tree.token_ids[None, 1:]), dim=1)
        logits, features = self._forward(self._path, self._added)
        if self.deferred and self.costs is not None:
            times = self.costs.target(self._added - 1)
            self._spent += times[-1] - times[len(tree) - 1]
        return logits[0, -len(tree) :], features[:, -len(tree) :]

    def _forward(self, tokens: Tensor, added: int) -> tuple[Tensor, Tensor]:
        """Runs the last `added` tokens of a text whose others are in the cache."""
        kwargs = extend_model_kwargs(self.model, self._model_kwargs, added, self._outputs)
        kwargs[self._cache_name] = self.cache
        inputs = self.model.prepare_inputs_for_generation(
            to_device(tokens, self.model.device), next_sequence_length=added, **kwargs
        )
        if "logits_to_keep" in inputs:
            inputs["logits_to_keep"] = added
        with self._tap as tap:
            self._outputs = self.model(**inputs, return_dict=True)
        return self._outputs.logits, tap.take()

    def accept(self, path: Tensor) -> None:
        """See [`TargetRun.accept`]."""
        assert self._rewind is not None
        kept = self.deferred + path.shape[0]
        self.length += path.shape[0]
        self._tokens = self._path[:, : self._path.shape[1] - self._added + kept]
        if self._rewind.keep(self._added, kept):
            self._model_kwargs = extend_model_kwargs(self.model, self._model_kwargs, kept, self._outputs)
            self.deferred, self._spent = 0, 0.0
        else:
            self.deferred = kept

    def finish(self) -> Any:
        """See [`TargetRun.finish`]."""
        if self._rewind is None:
            return self.cache
        # A round that broke off.
        self._rewind.undo()
        if self.deferred and (self._generation_config.return_dict_in_generate or is_user_defined(self.cache)):
            self._forward(self._tokens, self.deferred)
        if isinstance(self.cache, Cache):
            give_back(self.cache)
            for layer in self.cache.layers:
                leave_past_recording(layer)
        return self.cache


# For each target, how it attends, and the fault that was found in its chains.
_chain_faults: weakref.WeakKeyDictionary[PreTrainedModel, tuple[Any, str | None]] = weakref.WeakKeyDictionary()


def chain_fault(
    model: PreTrainedModel, generation_config: GenerationConfig, model_kwargs: Mapping[str, Any]
) -> str | None:
    """
    Tries once whether a target gives the same logits for several tokens in one forward as for one after the other:
    some models forget their recurrent state there.

    Args:
        model ([`PreTrainedModel`]): the target.
        generation_config ([`GenerationConfig`]): configuration of the call.
        model_kwargs (`dict`): the model's arguments that `generate` prepared.

    Returns:
        `str`, or `None` without a fault; it completes "plain decoding runs: ...".
    """
    form = (attention_implementation(model.config), model.dtype, model.device)
    known, fault = _chain_faults.get(model, (None, None))
    if known != form:
        try:
            fault = _try_chains(model, generation_config, model_kwargs)
        # Whatever a model says to a text without what else it was given.
        except Exception as error:
            fault = f"the target runs a text with its other inputs, not alone ({type(error).__name__}: {error})"
        _chain_faults[model] = form, fault
    return fault


@torch.no_grad()
def _try_chains(
    model: PreTrainedModel, generation_config: GenerationConfig, model_kwargs: Mapping[str, Any]
) -> str | None:
    config = copy.copy(generation_config)
    config.prefill_chunk_size = None
    config.return_dict_in_generate = False
    text_config = model.config.get_text_config(decoder=True)
    tokens = torch.arange(_TRIED_PROMPT + _TRIED_TOKENS)[None] % text_config.vocab_size
    prompt = tokens[:, :_TRIED_PROMPT].to(model.device)

    def start() -> ChainRun:
        kwargs: dict[str, Any] = {"use_cache": True}
        if model_kwargs.get("past_key_values") is not None:
            kwargs["past_key_values"] = DynamicCache(config=text_config)
        if model_kwargs.get("attention_mask") is not None:
            kwargs["attention_mask"] = torch.ones_like(prompt)
        if (positions := model_kwargs.get("position_ids")) is not None:
            places = torch.arange(_TRIED_PROMPT, device=positions.device)
            kwargs["position_ids"] = places.expand(*positions.shape[:-1], -1)
        run = ChainRun(model, prompt, config, kwargs)
        run.prefill(prompt)
        return run

    def score(run: ChainRun, end: int, nodes: int, kept: int) -> Tensor:
        logits, _ = run.score(chain(tokens[0, end - 1 : end - 1 + nodes]), tokens[:, :end])
        run.accept(torch.arange(kept))
        return logits

    single, several = start(), start()
    first = _TRIED_PROMPT + 1
    expected = torch.cat([score(single, first + step, 1, 1) for step in range(_TRIED_TOKENS)])
    # A forward of which most tokens are rejected, then one over all.
    score(several, first, _TRIED_TOKENS, 1)
    found = score(several, first + 1, _TRIED_TOKENS - 1, _TRIED_TOKENS - 1)
    expected, found = expected[1:].float(), found.float()
    error = float((found - expected).norm() / expected.norm())
    # NaN is a fault as well.
    if error < (_TOLERANCE if model.dtype == torch.float32 else _TOLERANCE_HALF):
        return None
    return f"the target computes {_TRIED_TOKENS} tokens in one forward otherwise than one by one (by {error:.1e})"


class BatchedTargetRun:
    """
    The target during one `generate` call for a batch; see [`TargetRun`] for a single row.

    Args:
        model ([`PreTrainedModel`]): the target.
        generation_config ([`GenerationConfig`]): configuration of the call.
        model_kwargs (`dict`): the model's arguments that `generate` prepared, an empty [`DynamicCache`] among them.
        feature_layers (sequence of `int`, *optional*): see [`FeatureTap`].
    """

    # See [`ChainRun`].
    most_deferred = 0

    def __init__(
        self,
        model: PreTrainedModel,
        generation_config: GenerationConfig,
        model_kwargs: dict[str, Any],
        feature_layers: Sequence[int] = (),
    ):
        self.model = model
        self.cache: Cache = model_kwargs["past_key_values"]
        self._tap = FeatureTap(model, feature_layers)
        self.acceleration = target_acceleration(model, is_batch=True)
        self._config = model.config.get_text_config(decoder=True)
        self._generation_config = generation_config
        self._model_kwargs = model_kwargs
        self._kinds = sorted(layer_kinds(model.config))
        self._own_layers: list[Any] = self.cache.layers
        # For each row of the batch the slots of its prompt without padding; and the slots of a prompt.
        self._slots: list[Tensor] = []
        self._prompt_length = 0
        self._lengths = RowLengths([], model.device)
        self._stacks: list[RaggedRows] = []
        self._static: list[StaticLayer] = []
        # The difference between a token's position in plain decoding and its place in its row.
        self._offsets = torch.empty(0)

    @property
    def length(self) -> int:
        """Tokens of the longest row in the cache."""
        return max(self.lengths)

    @property
    def lengths(self) -> list[int]:
        """Tokens of each row in the cache."""
        return self._lengths.values

    def prefill(self, input_ids: Tensor) -> tuple[Tensor, list[Tensor]]:
        """
        Runs the prompts as plain decoding does.

        Returns:
            The logits after them, of shape `(rows, vocab_size)`, and each row's features, of shape
            `(1, its tokens, hidden_size)`, without its padding.
        """
        with self._tap as tap:
            outputs = prefill(self.model, input_ids, self._generation_config, self._model_kwargs)
        features = tap.take()
        mask = self._model_kwargs.get("attention_mask")
        mask = torch.ones_like(input_ids) if mask is None else mask
        self._slots = [row.nonzero()[:, 0] for row in mask.cpu()]
        self._prompt_length = input_ids.shape[1]
        self._lengths = RowLengths([len(slots) for slots in self._slots], self.model.device)
        positions = first_step(self.model, input_ids, self._model_kwargs).get("position_ids")
        self._offsets = torch.zeros(input_ids.shape[0], dtype=torch.long, device=self.model.device)
        if positions is not None:
            self._offsets += positions[:, -1].to(self.model.device) - self._lengths.slots(1)[:, 0]
        self.cache = outputs.past_key_values
        self._static = unfold_static(self.cache, getattr(self._config, "sliding_window", None))
        self._own_layers = self.cache.layers
        self.cache.layers, self._stacks = ragged_layers(self._own_layers, self._slots, self._lengths)
        rows = [features[row, slots.to(features.device)][None] for row, slots in enumerate(self._slots)]
        return outputs.logits[:, -1], rows

    def score(self, trees: Sequence[DraftTree]) -> tuple[Tensor, Tensor]:
        """
        One forward over the nodes of all rows' trees; smaller trees are padded.

        Args:
            trees (sequence of [`DraftTree`]): one for each row.

        Returns:
            The logits after each node's own path, of shape `(rows, nodes, vocab_size)`, and the nodes' features, of
            shape `(rows, nodes, hidden_size)`; `nodes` is the size of the largest tree.
        """
        rows, nodes, device = len(trees), max(map(len, trees)), self.model.device
        tokens = torch.zeros(rows, nodes, dtype=torch.long)
        depths = torch.ones_like(tokens)
        # A padding node sees itself: attention over nothing is not defined.
        visible = torch.eye(nodes, dtype=torch.bool).repeat(rows, 1, 1)
        for row, tree in enumerate(trees):
            size = len(tree)
            tokens[row, :size], depths[row, :size] = tree.token_ids, tree.depths
            visible[row, :size, :size] = tree.visible
        tokens, depths = to_device(torch.stack((tokens, depths)), device)
        places, visible = self._lengths.slots(1) + depths, to_device(visible, device)
        masks = {kind: self._mask(kind, places, visible) for kind in self._kinds}
        with self._tap as tap, self.acceleration.scoring(self.cache, masks.values()):
            outputs = self.model(
                input_ids=tokens,
                attention_mask=masks if len(masks) > 1 else masks[self._kinds[0]],
                position_ids=places + self._offsets[:, None],
                past_key_values=self.cache,
                use_cache=True,
                return_dict=True,
            )
        return outputs.logits, tap.take()

    def accept(self, paths: Sequence[Tensor]) -> None:
        """
        Keeps the nodes of each row's path in the cache, and drops the other nodes that were just scored.

        Args:
            paths (sequence of `torch.LongTensor` of shape `(kept,)`): nodes to keep, in order, for each row.
        """
        counts = [len(path) for path in paths]
        targets = torch.arange(max(counts)).repeat(len(paths), 1)
        sources = targets.clone()
        for row, path in enumerate(paths):
            sources[row, : counts[row]] = path
        if not sources.equal(targets):
            starts = self._lengths.slots(1)
            sources, targets = to_device(torch.stack((sources, targets)), starts.device) + starts
            for stack in self._stacks:
                stack.keep(sources, targets)
        self._lengths.advance(counts)

    def select(self, rows: Sequence[int]) -> None:
        """Drops all rows but those at these indices."""
        indices = to_device(torch.tensor(rows), self.model.device)
        self._lengths.values = [self._lengths.values[row] for row in rows]
        self._offsets = self._offsets[indices]
        for stack in self._stacks:
            stack.select(indices)

    def finish(self, sequences: Tensor | None) -> Cache:
        """
        Returns the cache to the call.

        Args:
            sequences (`torch.LongTensor` of shape `(rows, length)`, *optional*):
                The generated rows, padded at their ends. If given, the cache is as plain decoding leaves it, with
                every token of every row but the last ones. All rows must still be in the cache.
        """
        layers = self.cache.layers
        if sequences is not None:
            self._run_rest(sequences[:, :-1])
        self.cache.layers = self._own_layers
        for own, layer in zip(self._own_layers, layers):
            if sequences is None or not isinstance(layer, RaggedLayer):
                continue
            length = sequences.shape[1] - 1
            own.keys, own.values = layer.padded(self._slots, self._prompt_length, length)
            if own.is_sliding:
                own.cumulative_length = length
                own.keys, own.values = (each[:, :, -own.sliding_window + 1 :] for each in (own.keys, own.values))
        refill_static(self.cache, self._static)
        return self.cache

    def _run_rest(self, sequences: Tensor) -> None:
        """Runs the padding of the rows of `sequences` that ended early."""
        ends = [len(slots) + sequences.shape[1] - self._prompt_length for slots in self._slots]
        missing = [end - length for end, length in zip(ends, self.lengths)]
        if max(missing) == 0:
            return
        chains = []
        for row, count in enumerate(missing):
            # A row that misses nothing runs a token that is not kept.
            chains.append(chain(sequences[row, sequences.shape[1] - max(count, 1) :].cpu()))
        self.score(chains)
        self._lengths.advance(missing)

    def _mask(self, kind: str, places: Tensor, visible: Tensor) -> Tensor:
        """
        Additive mask of shape `(rows, 1, nodes, longest row + nodes)`, for nodes at `places` (`(rows, nodes)`) in
        their rows that see each other as `visible` (`(rows, nodes, nodes)`) says.
        """
        nodes = places.shape[1]
        slots = torch.arange(max(self.lengths) + nodes, device=places.device)
        mask = (slots < self._lengths.slots(1))[:, None].repeat(1, nodes, 1)
        if kind == SLIDING:
            mask &= slots > (places - self._config.sliding_window)[..., None]
            visible = visible & (places[:, None] > places[..., None] - self._config.sliding_window)
        mask.scatter_(2, self._lengths.slots(nodes)[:, None].expand_as(visible), visible)
        return additive_mask(mask, self.model.dtype)[:, None]
