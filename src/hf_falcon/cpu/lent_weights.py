# Copyright 2026 The hf_falcon authors. Licensed under the Apache License, Version 2.0.
"""What compiled code multiplies with in place of the weights of linear layers. They have it only while it runs."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn

from .compact_weights import CompactWeight, LentWeight, compact
from .huge_pages import Arena, move_to_huge_pages
from .joined_weights import joined_weights
from .packing import PackedLinear
from .skinny_gemm import linears_of, skinny_gemm_pays


class LentWeights:
    """
    Linear layers, and the weights that compiled code reads in place of theirs: compact or joined ones.

    Args:
        with_blocks (`bool`): see [`can_have_blocks`].
    """

    def __init__(self, with_blocks: bool) -> None:
        self._with_blocks = with_blocks
        self._weights: dict[nn.Linear, LentWeight] = {}
        # The dtype of each layer's, and the number of its tensors.
        self._kinds: list[tuple[torch.dtype, int] | None] = []
        # The weights that the layers have now.
        self._lent: dict[nn.Linear, LentWeight] = {}
        self._lock = threading.Lock()
        self._users = 0

    def __contains__(self, linear: object) -> bool:
        return linear in self._weights

    def take(self, *models: nn.Module) -> bool:
        """
        Makes compact weights from the current weights of models, for all layers whose values allow it, and joins small
        ones of the others.

        Returns:
            `bool`: whether code that was compiled before cannot use them, because they are of other kinds.
        """
        # As for skinny products: only with the instructions that it was faster with.
        arena = Arena()
        found: dict[nn.Linear, LentWeight | None] = {
            linear: compact(linear.weight, arena) for linear in _linears_of(*models) if skinny_gemm_pays()
        }
        others = {linear for linear in _linears_of(*models) if found.get(linear) is None}
        for model in models:
            found |= joined_weights(model, others, arena, self._with_blocks)
        self._weights = {linear: weight for linear, weight in found.items() if weight is not None}
        move_to_huge_pages(buffer for weight in self._weights.values() for buffer in weight.memory)
        kinds = [None if weight is None else (weight.dtype, len(weight.tensors)) for weight in found.values()]
        before, self._kinds = self._kinds, kinds
        return self._kinds != before

    def drop(self) -> None:
        """Drops the weights that `take` made."""
        self._weights = {}

    @contextmanager
    def lent(self) -> Iterator[None]:
        """Inside, the layers have these weights. Several threads may be inside at the same time."""
        with self._lock:
            self._users += 1
            if self._users == 1:
                self._lent = self._weights
                for linear, weight in self._lent.items():
                    vars(linear)["lent"] = weight
        try:
            yield
        finally:
            with self._lock:
                self._users -= 1
                if self._users == 0:
                    for linear in self._lent:
                        # The passes of the same drafter for another target may have removed it already.
                        vars(linear).pop("lent", None)
                    self._lent = {}

    @property
    def depend_on_rows(self) -> bool:
        """Whether code that reads them is compiled for one number of rows."""
        return any(isinstance(weight, CompactWeight) for weight in self._weights.values())

    @property
    def are_current(self) -> bool:
        """Whether the layers' weights are unchanged; see [`WeightMark.is_of`]."""
        return all(weight.is_of(linear.weight) for linear, weight in self._weights.items())


def _linears_of(*models: nn.Module) -> Iterator[nn.Linear]:
    """Linear layers that use a lent weight if they have one."""
    for model in models:
        yield from linears_of(model)
        yield from (module for module in model.modules() if isinstance(module, PackedLinear))
