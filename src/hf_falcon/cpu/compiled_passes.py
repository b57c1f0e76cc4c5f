# Copyright 2026 The hf_falcon authors. Licensed under the Apache License, Version 2.0.
"""
A drafter's passes, compiled for a few rows. Uncompiled, the interpreter and small operations take most of a pass.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import CompileConfig, PreTrainedModel

from ..core.caches import DraftCache
from ..core.draft_session import TargetHead
from ..core.modeling_falcon_draft import FalconDraftNetwork, hide_end
from .compact_linears import CompactLinears
from .compact_weights import WeightMark
from .compiled_code import CompiledCode, captures_graphs, mark_rows, write_rows


class PassRows:
    """
    The cache of a compiled pass: all rows of each layer. The pass writes the last rows.

    Args:
        layers (list of two `torch.Tensor` of shape `(1, kv_heads, cached + rows, head_dim)`): keys and values.
        rows (`int`): rows of the pass.
        slots (`torch.LongTensor` of shape `(rows,)`, *optional*):
            The rows of the pass, if they are not the last: of a cache with static slots.
    """

    def __init__(self, layers: list[tuple[Tensor, Tensor]], rows: int, slots: Tensor | None = None):
        self._layers, self._rows, self._slots = layers, rows, slots

    def update(self, layer: int, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """See [`DraftCache.update`]."""
        write_rows(self._layers[layer], (keys, values), self._rows, self._slots)
        return self._layers[layer]


class CompiledPasses:
    """
    The passes of a drafter for one target, compiled for a number of rows: its decoder layers, and the logits.

    Args:
        rows (`int`): the number of rows. Passes of fewer rows are padded; passes of more rows run uncompiled.
        compile_config ([`CompileConfig`]): backend, mode and options for `torch.compile`.
    """

    def __init__(self, rows: int, compile_config: CompileConfig):
        self.rows = rows
        # Whether they are faster than uncompiled passes; `None` before the comparison.
        self.is_faster: bool | None = None
        # Embedding and LM head, for many calls of `generate`; `None` while the passes are not in use.
        self.head: CompiledHead | None = None
        self._config = compile_config
        self._weights = CompactLinears()

    @contextmanager
    def compiling(self) -> Iterator[None]:
        """Inside, a pass is compiled. Outside, no pass is."""
        self._decode, self._logits = CompiledCode(_decode, self._config), CompiledCode(_logits, self._config)
        with self._decode.compiling(), self._logits.compiling():
            yield

    def take(self, drafter: FalconDraftNetwork, target: PreTrainedModel) -> CompiledHead:
        """Prepares the current weights of a drafter and of its target's LM head."""
        self.head = head = CompiledHead(drafter, target, self)
        if self._weights.take(drafter, head.linear):
            self.is_faster = None
        return head

    def drop(self) -> None:
        """Undoes `take`. Compiled code is kept."""
        self.head = None
        self._weights.drop()

    def are_of(self, drafter: FalconDraftNetwork, target: PreTrainedModel) -> bool:
        """Whether the weights of both are unchanged; see [`WeightMark.is_of`]."""
        return self.head is not None and self.head.is_of(drafter, target) and self._weights.are_current

    def run_layers(
        self,
        drafter: FalconDraftNetwork,
        fused: Tensor,
        ends: Tensor,
        position_ids: Tensor,
        mask: Tensor,
        cache: DraftCache,
    ) -> Tensor:
        """See [`FalconDraftNetwork.run_layers`]; for one sequence."""
        count, missing = fused.shape[1], self.rows - fused.shape[1]
        layers = cache.room_for(self.rows) if missing >= 0 else None
        if layers is None:
            return drafter.run_layers(fused, ends, position_ids, mask, cache)
        if missing:
            fused, position_ids = F.pad(fused, (0, 0, 0, missing)), F.pad(position_ids, (0, missing))
            ends = torch.cat((ends, torch.arange(count, self.rows, device=ends.device)[None]), dim=1)
            # No row sees the padding rows, and they see all cached rows.
            mask = hide_end(mask, layers[0][0].shape[2] - mask.shape[3])
            mask = F.pad(mask, (0, 0, 0, missing))
        if captures_graphs(fused.device):
            # The tree holds copies of what captured graphs returned in the pass before.
            torch.compiler.cudagraph_mark_step_begin()
        # Only lengths change from pass to pass.
        torch._dynamo.maybe_mark_dynamic(mask, 3)
        for states in (states for layer in layers for states in layer):
            mark_rows(states, cache.is_static)
        slots = None
        if cache.is_static:
            slots = torch.arange(cache.length, cache.length + self.rows, device=fused.device)
        with self._weights.lent():
            predicted = self._decode(drafter, fused, ends, position_ids, mask, PassRows(layers, self.rows, slots))
        return predicted[:, :count]

    def logits(self, head: CompiledHead, features: Tensor) -> Tensor | None:
        """See [`TargetHead.logits`]; of shape `(rows, draft_vocab_size)`, or `None` for too many rows."""
        rows = features.reshape(-1, features.shape[-1])
        missing = self.rows - rows.shape[0]
        if missing < 0:
            return None
        with self._weights.lent():
            return self._logits(head, F.pad(rows, (0, 0, 0, missing)))[: rows.shape[0]]


class CompiledHead(TargetHead):
    """
    A [`TargetHead`] whose logits of a few rows are compiled.

    Args:
        drafter, target: see [`TargetHead`].
        passes ([`CompiledPasses`]): the owner of the compiled code.
    """

    def __init__(self, drafter: FalconDraftNetwork, target: PreTrainedModel, passes: CompiledPasses):
        super().__init__(drafter, target)
        self._passes = passes
        self._source = WeightMark(_head_weight(target))

    def is_of(self, drafter: FalconDraftNetwork, target: PreTrainedModel) -> bool:
        """Whether this is still the target's LM head, by a sample of its values."""
        source, mine = _head_weight(target), self.linear.weight
        return self._source.is_of(source) and (mine.dtype, mine.device) == (drafter.norm.weight.dtype, source.device)

    def logits(self, features: Tensor) -> Tensor:
        """See [`TargetHead.logits`]."""
        logits = self._passes.logits(self, features)
        return super().logits(features) if logits is None else logits.view(*features.shape[:-1], -1)


def _head_weight(target: PreTrainedModel) -> Tensor:
    head: Any = target.get_output_embeddings()
    return head.weight


def _decode(
    drafter: FalconDraftNetwork, fused: Tensor, ends: Tensor, position_ids: Tensor, mask: Tensor, rows: PassRows
) -> Tensor:
    return drafter.run_layers(fused, ends, position_ids, mask, rows)


def _logits(head: TargetHead, rows: Tensor) -> Tensor:
    return TargetHead.logits(head, rows)
