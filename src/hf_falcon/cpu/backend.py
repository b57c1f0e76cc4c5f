# Copyright 2026 The hf_falcon authors. Licensed under the Apache License, Version 2.0.
"""The CPU's backend: it plugs packed, compiled and skinny products into the target's forwards and the drafter's."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Hashable, Iterable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from functools import cached_property, partial

from torch import Tensor, nn
from torch.utils.weak import WeakTensorKeyDictionary
from transformers import Cache, PreTrainedModel

from ..core.configuration_falcon_draft import field_of
from ..core.interfaces import Drafter, DrafterAcceleration, DraftHead, TargetAcceleration, register_part
from ..core.target_parts import structure_of
from .busy_cores import busy_cores
from .compiled_code import captures_graphs
from .compiled_rounds import CompiledRounds
from .grouped_attention import grouped_attention
from .huge_pages import keep_in_huge_pages
from .kept_rounds import passes_for, rounds_for
from .packing import is_packed
from .row_invariant import is_row_invariant
from .skinny_gemm import SkinnyLinears, is_suited, linears_of, skinny_gemm, widening

# The layers of each target that run faster in rounds, as long as its structure stays.
_linears: weakref.WeakKeyDictionary[PreTrainedModel, tuple[Hashable, SkinnyLinears]] = weakref.WeakKeyDictionary()
# Runs of a drafter's layers or head after which its weights move to huge pages: the move took 0.1 to 0.2 s, and a run
# gained 0.1 to 0.5 ms by it.
_RUNS_BEFORE_MOVE = 512


class CpuTarget(TargetAcceleration):
    """
    The target's forwards on a CPU; see [`TargetAcceleration`].

    Args:
        target ([`PreTrainedModel`]): the target.
        compiled ([`CompiledRounds`], *optional*): its compiled forwards, if the call may use them.
    """

    def __init__(self, target: PreTrainedModel, compiled: CompiledRounds | None):
        self._target = target
        self._linears = {} if is_row_invariant(target) else _linears_of_target(target)
        self._shares_keys = _shares_keys(target)
        self.compiled = compiled
        if target.device.type == "cpu":
            busy_cores.begin(self)

    @property
    def sizes(self) -> tuple[int, ...]:  # type: ignore[override]
        return () if self.compiled is None else tuple(self.compiled.sizes)

    @property
    def wants_static_shapes(self) -> bool:  # type: ignore[override]
        return self.compiled is not None and captures_graphs(self._target.device)

    @cached_property
    def is_packed(self) -> bool:  # type: ignore[override]
        return is_packed(self._target)

    def padded_size(self, nodes: int) -> int:
        size = None if self.compiled is None else self.compiled.size_for(nodes)
        return nodes if size is None else size

    def reading(self) -> AbstractContextManager[object]:
        return widening(self._target, self._linears)

    @contextmanager
    def scoring(self, cache: Cache, masks: Iterable[Tensor]) -> Iterator[None]:
        masks = list(masks)
        rows, nodes = masks[0].shape[0], masks[0].shape[2]
        runs_compiled = self.compiled is not None and self.compiled.size_for(nodes) == nodes
        with ExitStack() as stack:
            if self._shares_keys:
                stack.enter_context(grouped_attention(masks))
            # Compiled code expects the swapped layers, for any number of rows.
            stack.enter_context(skinny_gemm(self._target, self._linears, None if runs_compiled else rows * nodes))
            if self.compiled is not None and runs_compiled:
                stack.enter_context(self.compiled.round(cache, masks))
            yield


class _Use:
    """What calls have done with a drafter's weights: those that run now, and the runs of its layers or head so far."""

    def __init__(self) -> None:
        self.running: weakref.WeakSet[CpuDrafter] = weakref.WeakSet()
        self.runs = 0


# By a drafter's first weight: copies with other options share their weights.
_uses = WeakTensorKeyDictionary()


class CpuDrafter(DrafterAcceleration):
    """
    The drafter's passes on a CPU; see [`DrafterAcceleration`].

    Args:
        drafter (`torch.nn.Module`): the drafter.
        target ([`PreTrainedModel`]): the target that it drafts for.
    """

    def __init__(self, drafter: nn.Module, target: PreTrainedModel):
        super().__init__(drafter)
        weight = next(drafter.parameters(), None)
        self._use = use = _Use() if weight is None else _uses.setdefault(weight, _Use())
        # A drafter that drafts in another thread must not move. Weights that were unpacked may have to, again.
        if use.runs >= _RUNS_BEFORE_MOVE and not use.running:
            keep_in_huge_pages(drafter)
            use.runs = 0
        use.running.add(self)
        self._passes = passes_for(drafter, target)
        self.head = None if self._passes is None else self._passes.head
        self._linears = linears_of(drafter)
        self._head_linears: tuple[nn.Linear, SkinnyLinears] | None = None

    @contextmanager
    def drafting(self, head: DraftHead) -> Iterator[None]:
        self._use.runs += 1
        linear = head.linear
        with skinny_gemm(self.drafter, self._linears):
            if linear is None:
                yield
                return
            if self._head_linears is None or self._head_linears[0] is not linear:
                self._head_linears = linear, linears_of(linear)
            with skinny_gemm(linear, self._head_linears[1]):
                yield

    @property
    def wants_static_shapes(self) -> bool:  # type: ignore[override]
        return self._passes is not None and captures_graphs(self.drafter.device)

    @property
    def run_layers(self) -> Callable[..., Tensor]:
        return super().run_layers if self._passes is None else partial(self._passes.run_layers, self.drafter)


class CpuBackend:
    """The accelerations of a call. On devices other than a CPU only code of [`compile_rounds`] runs differently."""

    def for_target(self, target: PreTrainedModel, is_batch: bool, reads_layers: bool) -> CpuTarget:
        # A compiled decoder does not give the outputs of single layers.
        is_plain = is_batch or reads_layers
        return CpuTarget(target, None if is_plain else rounds_for(target))

    def for_drafter(self, drafter: Drafter, target: PreTrainedModel) -> DrafterAcceleration:
        # A drafter needs no network.
        return CpuDrafter(drafter, target) if isinstance(drafter, nn.Module) else DrafterAcceleration(drafter)


def _linears_of_target(target: PreTrainedModel) -> SkinnyLinears:
    """See [`linears_of`], which takes longer than to see that nothing has changed."""
    structure = structure_of(target), target.device.type
    known = _linears.get(target)
    # Weights may have other shapes, or be elsewhere, without being other objects.
    if known is None or known[0] != structure or not all(map(is_suited, known[1])):
        _linears[target] = known = structure, linears_of(target)
    return known[1]


def _shares_keys(target: PreTrainedModel) -> bool:
    """Whether several query heads of a target share keys and values, unless its configuration rules that out."""
    config = target.config.get_text_config(decoder=True)
    heads = field_of(config, "num_attention_heads")
    return heads is None or field_of(config, "num_key_value_heads") != heads


def install() -> None:
    """Registers this backend for every later call of this process."""
    register_part("backend", CpuBackend())
