# Copyright 2026 The hf_falcon authors. Licensed under the Apache License, Version 2.0.
"""
A drafter's passes, compiled for a few rows. Uncompiled, the interpreter and small operations take most of a pass.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Protocol, runtime_checkable

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import CompileConfig, PreTrainedModel

from ..core.caches import DraftCache
from ..core.modeling_falcon_draft import KeyValueCache, hide_end
from .compact_weights import WeightMark
from .compiled_code import BuiltCode, CompiledCode, captures_graphs, mark_rows, write_rows
from .huge_pages import keep_in_huge_pages
from .joined_weights import can_have_blocks
from .kept_programs import Shelf
from .lent_weights import LentWeights
from .programs import TensorHolder, kind_of


@runtime_checkable
class CompilableDrafter(Protocol):
    """A drafter whose passes can be compiled: its session is a [`BlockSession`]. See [`FalconDraftNetwork`]."""

    config: Any
    window: int | None

    def fuse(self, features: Tensor, inputs_embeds: Tensor, state: Any = None) -> tuple[Tensor, Any]: ...

    def run_layers(
        self, fused: Tensor, anchors: Tensor, position_ids: Tensor, mask: Tensor, cache: KeyValueCache | None = None
    ) -> Tensor: ...


class PassRows(TensorHolder):
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

    def tensors(self) -> list[Tensor]:
        """See [`TensorHolder`]."""
        return [states for layer in self._layers for states in layer] + ([] if self._slots is None else [self._slots])

    def with_tensors(self, tensors: list[Tensor], rows: int) -> PassRows:
        """See [`TensorHolder`]."""
        count = 2 * len(self._layers)
        return PassRows(list(zip(tensors[:count:2], tensors[1:count:2])), self._rows, *tensors[count:])

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
        shelf ([`Shelf`], *optional*): where the programs of the passes are. Without one `torch.compile` is used.
    """

    def __init__(self, rows: int, compile_config: CompileConfig, shelf: Shelf | None = None):
        self.rows, self.shelf = rows, shelf
        # Whether they are faster than uncompiled passes; `None` before the comparison.
        self.is_faster: bool | None = None
        # The drafter's head, for many calls of `generate`; `None` while the passes are not in use.
        self.head: CompiledHead | None = None
        self._config = compile_config
        self._weights = LentWeights(can_have_blocks(compile_config))

    @contextmanager
    def compiling(self) -> Iterator[None]:
        """Inside, a pass is compiled, by two calls where there is a shelf. Outside, no pass is."""
        self._make_code()
        with self._decode.compiling(), self._logits.compiling():
            yield

    def load(self, drafter: Any) -> bool:
        """Loads programs that an earlier process built, after [`CompiledPasses.take`]; returns whether it did."""
        known = None if self.shelf is None else self.shelf.note(f"passes-{self.rows}")
        if known is None or self.head is None:
            return False
        self._make_code()
        linear = self.head.linear
        with self._weights.lent():
            if known["is_faster"] and not (
                self._decode.load({drafter: kind_of(drafter)}) and self._logits.load({linear: kind_of(linear)})
            ):
                return False
        self.is_faster = bool(known["is_faster"])
        return True

    def keep(self) -> None:
        """Notes whether the passes are faster, for later processes."""
        if self.shelf is not None:
            self.shelf.take_note(f"passes-{self.rows}", {"is_faster": self.is_faster})

    def bind(self) -> bool:
        """See [`CompiledRounds.bind`]."""
        if self.shelf is None:
            return True
        with self._weights.lent():
            return self._decode.bind({}) and self._logits.bind({})

    def _make_code(self) -> None:
        self._decode: Any
        self._logits: Any
        if self.shelf is None:
            self._decode, self._logits = CompiledCode(_decode, self._config), CompiledCode(_logits, self._config)
        else:
            self._decode = BuiltCode(_decode, self.shelf, f"decode-{self.rows}")
            self._logits = BuiltCode(self._logits_of, self.shelf, f"logits-{self.rows}")

    def _logits_of(self, linear: nn.Linear, rows: Tensor) -> Tensor:
        return _logits(self._plain(), rows)

    def take(self, drafter: Any, target: PreTrainedModel) -> CompiledHead:
        """Prepares the current weights of a drafter and of its head, which may be the target's."""
        self.head = head = CompiledHead(drafter, target, self)
        # A call that runs when the passes are dropped goes on with it, and holds it.
        self._plain = weakref.ref(head.plain)
        if head.vocab_ids is not None:
            # A copy of some of the target's rows, or the drafter's own.
            keep_in_huge_pages(head.linear)
        if self._weights.take(drafter, head.linear):
            self.is_faster = None
        return head

    def drop(self) -> None:
        """Undoes `take`. Compiled code is kept."""
        self.head = None
        self._weights.drop()
        if self.shelf is not None and hasattr(self, "_decode"):
            self._decode.unbind()
            self._logits.unbind()

    def are_of(self, drafter: Any, target: PreTrainedModel) -> bool:
        """Whether the weights of both are unchanged; see [`WeightMark.is_of`]."""
        is_of = self.head is not None and self.head.is_of(drafter, target) and self._weights.are_current
        return is_of and self.bind()

    def run_layers(
        self,
        drafter: CompilableDrafter,
        fused: Tensor,
        anchors: Tensor,
        position_ids: Tensor,
        mask: Tensor,
        cache: DraftCache,
    ) -> Tensor:
        """See [`FalconDraftNetwork.run_layers`]; for one sequence."""
        count, missing = fused.shape[1], self.rows - fused.shape[1]
        layers = cache.room_for(self.rows) if missing >= 0 else None
        if layers is None:
            return drafter.run_layers(fused, anchors, position_ids, mask, cache)
        if missing:
            fused, position_ids = F.pad(fused, (0, 0, 0, missing)), F.pad(position_ids, (0, missing))
            # Each padding row is a block.
            own = torch.arange(count, self.rows, device=anchors.device)[None] * drafter.config.block_size
            anchors = torch.cat((anchors, own), dim=1)
            # No row sees the padding rows, and they see all cached rows.
            mask = hide_end(mask, layers[0][0].shape[2] - mask.shape[3])
            mask = F.pad(mask, (0, 0, 0, missing))
        # The stride of the only sequence says nothing, but compiled code expects the usual one.
        fused = fused.flatten(0, 1)[None]
        if captures_graphs(fused.device):
            # The tree holds copies of what captured graphs returned in the pass before.
            torch.compiler.cudagraph_mark_step_begin()
        if self.shelf is None:
            # Only lengths change from pass to pass.
            torch._dynamo.maybe_mark_dynamic(mask, 3)
            for states in (states for layer in layers for states in layer):
                mark_rows(states, cache.is_static)
        slots = None
        if cache.is_static:
            slots = torch.arange(cache.length, cache.length + self.rows, device=fused.device)
        with self._weights.lent():
            predicted = self._decode(drafter, fused, anchors, position_ids, mask, PassRows(layers, self.rows, slots))
        return predicted[:, :count]

    def logits(self, head: Any, states: Tensor) -> Tensor | None:
        """See [`DraftHead.logits`]; of shape `(rows, draft_vocab_size)`. `None` for too many rows, or another head."""
        rows = states.reshape(-1, states.shape[-1])
        missing = self.rows - rows.shape[0]
        current = self.head
        if missing < 0 or current is None or current.plain is not head:
            return None
        with self._weights.lent():
            rows_or_more = F.pad(rows, (0, 0, 0, missing))
            return self._logits(head if self.shelf is None else head.linear, rows_or_more)[: rows.shape[0]]


class CompiledHead:
    """
    A drafter's head whose logits of a few rows are compiled; see [`DraftHead`].

    Args:
        drafter, target: see [`Drafter.make_head`].
        passes ([`CompiledPasses`]): the owner of the compiled code.

    Attributes:
        plain ([`DraftHead`]): the head itself.
    """

    def __init__(self, drafter: Any, target: PreTrainedModel, passes: CompiledPasses):
        self.plain = drafter.make_head(target)
        self.linear: nn.Linear = self.plain.linear
        self.draft_vocab_size: int = self.plain.draft_vocab_size
        self.vocab_ids: Tensor | None = self.plain.vocab_ids
        self._passes = passes
        # The linear layer may be a copy of the target's rows.
        self._marks = [WeightMark(weight) for weight in self._weights(target)]

    def is_of(self, drafter: Any, target: PreTrainedModel) -> bool:
        """Whether this is still the head of both, by a sample of its values."""
        are_same = all(mark.is_of(weight) for mark, weight in zip(self._marks, self._weights(target)))
        mine = self.linear.weight
        return are_same and (mine.dtype, mine.device) == (drafter.dtype, drafter.device)

    def embed(self, token_ids: Tensor) -> Tensor:
        """See [`TargetHead.embed`]."""
        return self.plain.embed(token_ids)

    def logits(self, states: Tensor) -> Tensor:
        """See [`DraftHead.logits`]."""
        logits = self._passes.logits(self.plain, states)
        return self.plain.logits(states) if logits is None else logits.view(*states.shape[:-1], -1)

    def to_target_ids(self, draft_ids: Tensor) -> Tensor:
        """See [`DraftHead.to_target_ids`]."""
        return self.plain.to_target_ids(draft_ids)

    def for_tokens(self, token_ids: Tensor) -> Any:
        """See [`DraftHead.for_tokens`]."""
        return self.plain.for_tokens(token_ids)

    def _weights(self, target: PreTrainedModel) -> list[Tensor]:
        output: Any = target.get_output_embeddings()
        return [output.weight, self.linear.weight]


def _decode(
    drafter: CompilableDrafter, fused: Tensor, anchors: Tensor, position_ids: Tensor, mask: Tensor, rows: PassRows
) -> Tensor:
    return drafter.run_layers(fused, anchors, position_ids, mask, rows)


def _logits(head: Any, rows: Tensor) -> Tensor:
    return head.logits(rows)
