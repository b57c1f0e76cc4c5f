# Copyright 2026 The hf_falcon authors. Licensed under the Apache License, Version 2.0.
"""
Weights that compiled code reads in one or two bytes a value and multiplies in float32, exact to the bit. A product of
a few rows takes as long as one read of its weight, and few float32 weights use all of their bits: most checkpoints are
in bfloat16, and the values of a quantised file are on a grid. Weights in bfloat16 are read in the same way where the
processor has no products for them.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable, Mapping
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .huge_pages import Arena
from .packed_layouts import PackedWeight, has_bfloat16_products

_HAS_AVX512 = torch.backends.cpu.get_cpu_capability() == "AVX512"
# Outputs side by side: float32 values in one vector of AVX-512, or in two of AVX2.
_LANES = 16
# The largest number of rows of a product. With AVX-512, MKL is faster with more rows in float32. With AVX2, 16 rows
# take three quarters of MKL's time, in bfloat16 a third of the time that they take otherwise; no more were tried.
_MOST_ROWS = {torch.float32: 12 if _HAS_AVX512 else 16, torch.bfloat16: 16}
# The dtype of codes. With AVX2, compiled code converts uint8 so slowly that one byte a value takes five times as long
# as two. bfloat16 holds the codes, which are below 256, exactly.
_CODES = torch.uint8 if _HAS_AVX512 else torch.bfloat16
# Whether two values in bfloat16 share a word, from which a shift and a mask take them. With AVX2 this is faster than
# the instructions that widen them: 8 rows take three quarters of the time.
_IN_PAIRS = not _HAS_AVX512 and sys.byteorder == "little"
# The number of rows in one loop: those whose sums fit into the registers.
_SUMS = 12 if _HAS_AVX512 else 4
# The number of values of a weight that are compared to detect a change.
_SAMPLES = 64
# Inputs that share a grid in GGUF's files.
_GROUP = 32
# The grids of Q4_0, Q5_0, Q8_0, Q4_1 and Q5_1. For each: the step, computed from the least and the greatest value of a
# group, and the code of zero, or `None` if the least value has code 0. The least and the greatest value determine the
# step, because the files' codes use the whole range.
_GRIDS: list[tuple[Callable[[Tensor, Tensor], Tensor], int | None]] = [
    (lambda low, high: _farther(low, high) / -8, 8),
    (lambda low, high: _farther(low, high) / -16, 16),
    (lambda low, high: _farther(low, high).abs() / 127, 128),
    (lambda low, high: (high - low) / 15, None),
    (lambda low, high: (high - low) / 31, None),
]


class LentWeight(Protocol):
    """What compiled code multiplies with in place of a linear layer's weight."""

    dtype: torch.dtype
    # Addresses of the values, and their sizes in bytes.
    memory: list[tuple[int, int]]
    # What compiled code gets of it.
    tensors: list[Tensor]

    def suits(self, input: Tensor) -> bool:
        """Whether a product with `input` of shape `(..., in_features)` is faster than torch's own."""

    def product(self, input: Tensor, bias: Tensor | None) -> Tensor:
        """`torch.nn.functional.linear(input, weight, bias)`, written for `torch.compile`."""

    def is_of(self, weight: Tensor) -> bool:
        """See [`WeightMark.is_of`]."""


def ordinary_linear(state: Mapping[str, Any]) -> tuple[Any, ...]:
    """
    What a layer whose class is replaced is copied and pickled as: an ordinary layer, without what it has in rounds.

    Args:
        state (mapping of `str`): the layer's attributes. Layers with a forward of their own keep their class.
    """
    kept = {name: value for name, value in state.items() if name not in ("lent", "forward")}
    return object.__new__, (nn.Linear,), kept


def own_forward(module: nn.Module) -> Any:
    """
    The forward of a module that is not its class's, or `None`. A copy that was made while the module had one for
    rounds has its class's forward as an attribute, which is removed: it would hide the forward of a later class.
    """
    forward = vars(module).get("forward")
    if (getattr(forward, "__func__", None), getattr(forward, "__self__", None)) != (type(module).forward, module):
        return forward
    vars(module).pop("forward", None)
    return None


class WeightMark:
    """
    Detects whether a weight was replaced or changed. It refers to the weight, and keeps a sample of its values.

    Args:
        weight (`torch.Tensor`): the weight.
    """

    def __init__(self, weight: Tensor):
        self._weight, self._marked = weakref.ref(weight), _sample_of(weight).clone()

    def is_of(self, weight: Tensor) -> bool:
        """
        Whether `weight` is the marked one, with the same sampled values. A merged adapter, for example, changes it.
        """
        if self._weight() is not weight:
            return False
        sample = _sample_of(weight)
        marked = self._marked
        return (sample.dtype, sample.device) == (marked.dtype, marked.device) and torch.equal(sample, marked)


class CompactWeight(WeightMark):
    """
    A linear layer's weight in one or two bytes a value. Code from `torch.compile` converts the values to float32 as it
    multiplies them, and adds the products in float32.

    Args:
        weight (`torch.Tensor` of shape `(out_features, in_features)`): the weight.
        codes (`torch.Tensor` of shape `(out_features, groups, in_features / groups)`): its values in bfloat16, or
            the places of its values on the grid of their group.
        arena ([`Arena`]): where it is.
        grid (two `torch.Tensor` of shape `(out_features, groups, 1)`, *optional*): steps and offsets. A value is
            `code * step + offset`; the product `code * step` is exact.
    """

    def __init__(self, weight: Tensor, codes: Tensor, arena: Arena, grid: tuple[Tensor, Tensor] | None = None):
        super().__init__(weight)
        self._weight_dtype = weight.dtype
        # Of the codes, also where two of them share a word.
        self.dtype = codes.dtype
        self._in_pairs = _IN_PAIRS and codes.dtype == torch.bfloat16
        # The codes, and the steps and offsets of a grid.
        self.tensors = [_in_pairs(codes, arena) if self._in_pairs else _in_lanes(codes, arena)]
        self.tensors += [_in_lanes(each, arena) for each in grid or ()]
        self.memory = [(each.data_ptr(), each.nbytes) for each in self.tensors]

    def suits(self, input: Tensor) -> bool:
        """See [`LentWeight.suits`]."""
        return input.dtype == self._weight_dtype and input.numel() <= _MOST_ROWS[input.dtype] * input.shape[-1]

    def product(self, input: Tensor, bias: Tensor | None) -> Tensor:
        """See [`LentWeight.product`]."""
        blocks, groups, size, _ = self.tensors[0].shape
        rows = input.reshape(-1, groups * size).float()
        count = rows.shape[0]
        turns = -(-count // _SUMS)
        sums = -(-count // turns)
        rows = F.pad(rows, (0, 0, 0, sums * turns - count)).contiguous()
        # The strides make the compiler store rows that are not computed yet, instead of computing them again in the
        # innermost loop.
        rows = rows.as_strided((sums, turns, groups, size, 1), (turns * groups * size, groups * size, size, 1, 0))
        parts = self._parts()
        # One sum for each row of a turn, and part. The compiler fuses them into one loop, which reads a block of the
        # weight from memory in the first turn, and from the nearest cache in the others.
        output = torch.stack([(part[:, None] * row).sum((2, 3)) for row in rows.unbind() for part in parts])
        output = output.unflatten(0, (sums, len(parts))).permute(0, 3, 2, 1, 4).reshape(sums * turns, -1)[:count]
        output = output.reshape(*input.shape[:-1], output.shape[-1])
        return (output if bias is None else output + bias).to(input.dtype)

    def _parts(self) -> list[Tensor]:
        """The weight in float32, of shape `(blocks, groups, size, 16)`, or the two halves of its last dimension."""
        codes, *grid = self.tensors
        if self._in_pairs:
            bits = codes.view(torch.int32)
            parts = [(bits << 16).view(torch.float32), (bits & -65536).view(torch.float32)]
        else:
            parts = [codes.float()]
        if not grid:
            return parts
        steps, offsets = (values.chunk(len(parts), dim=-1) for values in grid)
        return [part * step + offset for part, step, offset in zip(parts, steps, offsets)]


def compact(weight: Tensor, arena: Arena | None = None) -> CompactWeight | None:
    """
    A weight in one or two bytes a value, or `None` if its values need all bits of float32, if its shape does not allow
    it, or if the processor has products in bfloat16 and the weight is in it.

    Args:
        weight (`torch.Tensor` of shape `(out_features, in_features)`): a linear layer's, on the CPU, packed or not.
        arena ([`Arena`], *optional*): where to write it; several weights are to share one.
    """
    if weight.dtype not in _MOST_ROWS or weight.shape[0] % _LANES:
        return None
    if weight.dtype == torch.bfloat16 and has_bfloat16_products():
        return None
    values, arena = weight.detach().to_dense(), arena or Arena()
    if weight.dtype == torch.bfloat16:
        return CompactWeight(weight, values[:, None], arena)
    if weight.shape[1] % _GROUP == 0:
        for grid in _GRIDS:
            if (found := _on_grid(values.unflatten(1, (-1, _GROUP)), *grid)) is not None:
                return CompactWeight(weight, found[0], arena, found[1:])
    narrow = values.bfloat16()
    return CompactWeight(weight, narrow[:, None], arena) if torch.equal(narrow.float(), values) else None


def _on_grid(
    groups: Tensor, step_of: Callable[[Tensor, Tensor], Tensor], zero: int | None
) -> tuple[Tensor, Tensor, Tensor] | None:
    """Codes, steps and offsets of values of shape `(outputs, groups, 32)`, or `None` if they are not on this grid."""
    found = []
    # The first few rows already rule the grid out for most weights.
    for rows in groups.split(64):
        low, high = rows.aminmax(dim=-1, keepdim=True)
        # The files store steps in float16.
        steps = step_of(low, high).half().float()
        offsets = low if zero is None else steps * -zero
        codes = ((rows - offsets) / steps).round_().nan_to_num_(0.0).clamp_(0, 255)
        if not torch.equal(codes * steps + offsets, rows):
            return None
        found.append((codes.to(_CODES), steps, offsets))
    codes, steps, offsets = map(torch.cat, zip(*found))
    return codes, steps, offsets


def _farther(low: Tensor, high: Tensor) -> Tensor:
    """Whichever of `low` and `high` is farther from zero."""
    return torch.where(high > -low, high, low)


def _in_lanes(values: Tensor, arena: Arena) -> Tensor:
    """From shape `(outputs, groups, size)` to `(outputs / 16, groups, size, 16)`."""
    lanes = values.unflatten(0, (-1, _LANES)).permute(0, 2, 3, 1)
    return arena.empty(lanes.shape, lanes.dtype).copy_(lanes)


def _in_pairs(values: Tensor, arena: Arena) -> Tensor:
    """
    As `_in_lanes`, of pairs of bfloat16 values, of shape `(outputs / 16, groups, size, 8)`: a word has one of the
    first eight values in its lower bits, and one of the others above. The words have the dtype float32, because
    compiled code copies vectors of integers as it reads them; it never computes with these numbers.
    """
    pairs = values.unflatten(0, (-1, 2, _LANES // 2)).permute(0, 3, 4, 2, 1)
    return arena.empty(pairs.shape, pairs.dtype).copy_(pairs).view(torch.float32).squeeze(-1)


def _sample_of(weight: Tensor) -> Tensor:
    """A sample of a weight's values, from many columns; empty for a packed weight, which cannot change."""
    if isinstance(weight, PackedWeight):
        return torch.empty(0)
    return weight.detach().reshape(-1)[:: max(1, weight.numel() // _SAMPLES - 1)]
