# Copyright 2026 The hf_falcon authors. Licensed under the Apache License, Version 2.0.
"""The target of one `generate` call for a batch: one forward scores a tree for each row."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import Cache, GenerationConfig, PreTrainedModel

from .few_rows import few_rows, linears_of
from .grouped_attention import grouped_attention
from .modeling_falcon_draft import additive_mask
from .ragged_cache import RaggedLayer, RowLengths
from .target import SLIDING, FeatureTap, layer_kinds
from .tree import DraftTree, star


class BatchedTargetRun:
    """
    The target during one `generate` call for a batch; see [`TargetRun`] for a single row.

    Args:
        model ([`PreTrainedModel`]): the target.
        generation_config ([`GenerationConfig`]): configuration of the call.
        model_kwargs (`dict`): what `generate` prepared, with an empty [`DynamicCache`] in it.
        feature_layers (sequence of `int`, *optional*): see [`FeatureTap`].
    """

    # Batches run as they are.
    compiled_sizes: tuple[int, ...] = ()

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
        self._linears = linears_of(model)
        self._config = model.config.get_text_config(decoder=True)
        self._generation_config = generation_config
        self._model_kwargs = model_kwargs
        self._kinds = sorted(layer_kinds(model.config))
        self._own_layers: list[Any] = self.cache.layers
        # Slots of the prompts that are no padding, for each row of the batch, and slots of a prompt.
        self._slots: list[Tensor] = []
        self._prompt_length = 0
        self._lengths = RowLengths([], model.device)
        # What to add to a token's place in its row for the position that plain decoding gives it.
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
            outputs = self.model._prefill(input_ids, self._generation_config, self._model_kwargs)
        features = tap.take()
        mask = self._model_kwargs.get("attention_mask")
        mask = torch.ones_like(input_ids) if mask is None else mask
        self._slots = [row.nonzero()[:, 0] for row in mask]
        self._prompt_length = input_ids.shape[1]
        self._lengths = RowLengths([len(slots) for slots in self._slots], self.model.device)
        positions = self._model_kwargs.get("position_ids")
        self._offsets = torch.zeros(input_ids.shape[0], dtype=torch.long, device=self.model.device)
        if positions is not None:
            self._offsets += positions[:, -1].to(self.model.device) + 1 - self._lengths.slots(1)[:, 0]
        self.cache = outputs.past_key_values
        self._own_layers = self.cache.layers
        self.cache.layers = [RaggedLayer(layer, self._slots, self._lengths) for layer in self._own_layers]
        rows = [features[row, slots.to(features.device)][None] for row, slots in enumerate(self._slots)]
        return outputs.logits[:, -1], rows

    def score(self, trees: Sequence[DraftTree]) -> tuple[Tensor, Tensor]:
        """
        One forward over the nodes of all rows' trees; smaller trees are filled up with nodes that nobody reads.

        Args:
            trees (sequence of [`DraftTree`]): one for each row.

        Returns:
            The logits after each node's own path, of shape `(rows, nodes, vocab_size)`, and the nodes' features, of
            shape `(rows, nodes, hidden_size)`; `nodes` is the size of the largest tree.
        """
        rows, nodes, device = len(trees), max(map(len, trees)), self.model.device
        tokens = torch.zeros(rows, nodes, dtype=torch.long, device=device)
        depths = torch.ones_like(tokens)
        # A filling node sees itself, as a node that sees nothing has no attention.
        visible = torch.eye(nodes, dtype=torch.bool, device=device).repeat(rows, 1, 1)
        for row, tree in enumerate(trees):
            size = len(tree)
            tokens[row, :size], depths[row, :size] = tree.token_ids, tree.depths
            visible[row, :size, :size] = tree.visible
        places = self._lengths.slots(1) + depths
        masks = {kind: self._mask(kind, places, visible) for kind in self._kinds}
        faster = few_rows(self.model, self._linears, rows * nodes)
        with self._tap as tap, grouped_attention(masks.values()), faster:
            outputs = self.model(
                input_ids=tokens,
                attention_mask=masks if len(masks) > 1 else masks[self._kinds[0]],
                position_ids=places + self._offsets[:, None],
                past_key_values=self.cache,
                use_cache=True,
                return_dict=True,
            )
        return outputs.logits, tap.take()

    def keep(self, paths: Sequence[Tensor]) -> None:
        """
        Keeps the nodes of each row's path (`(kept,)`, in order) of what was just scored, and drops the others.
        """
        counts = [len(path) for path in paths]
        moves = torch.arange(max(counts), device=self.model.device).repeat(len(paths), 1)
        for row, path in enumerate(paths):
            moves[row, : counts[row]] = path
        targets = self._lengths.slots(moves.shape[1])
        starts = self._lengths.slots(1)
        if bool((starts + moves != targets).any()):
            for layer in self.cache.layers:
                layer.keep(starts + moves, targets)
        self._lengths.advance(counts)

    def select(self, rows: Sequence[int]) -> None:
        """Goes on with the rows at these indices only."""
        indices = torch.tensor(rows, device=self.model.device)
        self._lengths.values = [self._lengths.values[row] for row in rows]
        self._offsets = self._offsets[indices]
        for layer in self.cache.layers:
            layer.select(indices)

    def rehearse(self, nodes: int) -> None:
        """Scores a root and `nodes` draft nodes of no meaning in each row, and forgets them: for timing."""
        self.score([star(nodes, self.model.device)] * len(self.lengths))

    def finish(self, sequences: Tensor | None) -> Cache:
        """
        Gives the cache back.

        Args:
            sequences (`torch.LongTensor` of shape `(rows, length)`, *optional*): what was generated, with padding
                behind what ended early. If given, the cache is as plain decoding leaves it: every token of every row
                but the last ones. All rows must still be there.
        """
        layers, self.cache.layers = self.cache.layers, self._own_layers
        if sequences is None:
            return self.cache
        length = sequences.shape[1] - 1
        self.cache.layers = layers
        self._run_rest(sequences[:, :-1])
        self.cache.layers = self._own_layers
        for own, layer in zip(self._own_layers, layers):
            own.keys, own.values = layer.padded(self._slots, self._prompt_length, length)
            if own.is_sliding:
                own.cumulative_length = length
                own.keys, own.values = (each[:, :, -own.sliding_window + 1 :] for each in (own.keys, own.values))
        return self.cache

    def _run_rest(self, sequences: Tensor) -> None:
        """Runs what rows of `sequences` that ended early have behind their end."""
        ends = [len(slots) + sequences.shape[1] - self._prompt_length for slots in self._slots]
        missing = [end - length for end, length in zip(ends, self.lengths)]
        if max(missing) == 0:
            return
        chains = []
        for row, count in enumerate(missing):
            # A row with nothing missing runs a token that is not kept.
            tokens = sequences[row, sequences.shape[1] - max(count, 1) :].to(self.model.device)
            nodes = torch.arange(len(tokens), device=self.model.device)
            chains.append(DraftTree(tokens, (nodes - 1).clamp(min=0), nodes, nodes[:, None] >= nodes))
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
