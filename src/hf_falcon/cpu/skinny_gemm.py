# Copyright 2026 The hf_falcon authors. Licensed under the Apache License, Version 2.0.
"""
Products of a few rows (the nodes of a tree, or the rows of a draft pass) with float32 weights, block by block. For a
product of several rows MKL would first copy a whole weight. Packed weights are faster still, but need a call of
`pack_weights`.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .compact_weights import LentWeight
from .packed_layouts import has_bfloat16_products, product_of_blocks

_CAPABILITY = torch.backends.cpu.get_cpu_capability()
# The numbers of rows for which this is faster, and the outputs of a block: the first width that divides a layer's
# outputs. With AVX-512, on a Xeon, 3 and 16 rows are slower, and both widths equally fast. With AVX2, on an EPYC, one
# row takes 0.6 of the time, 8 rows 0.7 and 24 rows 0.8.
_LEAST, _MOST, _WIDTHS = (4, 12, (32, 16)) if _CAPABILITY == "AVX512" else (1, 24, (16,))
_lock = threading.Lock()
_users: weakref.WeakKeyDictionary[nn.Module, int] = weakref.WeakKeyDictionary()


class _Here(threading.local):
    """Whether this thread is in a round. Other threads may run the same target at the same time."""

    in_a_round = False


_here = _Here()


class SkinnyLinear(nn.Linear):
    """
    The class of linear layers while trees are scored or drafted. For other threads it computes what an ordinary linear
    layer computes.
    """

    # Set while compiled code runs.
    lent: LentWeight | None = None

    def forward(self, input: Tensor) -> Tensor:
        if torch.compiler.is_compiling() and self.lent is not None and self.lent.suits(input):
            return self.lent.product(input, self.bias)
        rows = input.numel() // self.in_features
        # Code is only compiled for rounds.
        in_a_round = torch.compiler.is_compiling() or _here.in_a_round
        if not in_a_round or not _LEAST <= rows <= _MOST or input.dtype != torch.float32:
            return F.linear(input, self.weight, self.bias)
        width = next(width for width in _WIDTHS if self.out_features % width == 0)
        blocks = self.weight.view(-1, width, self.in_features).transpose(1, 2)
        output = product_of_blocks(input, blocks)
        return output if self.bias is None else output + self.bias


def skinny_gemm_pays() -> bool:
    """Whether products of a few rows are faster block by block: with MKL, and AVX2 or AVX-512."""
    return torch.backends.mkl.is_available() and _CAPABILITY in ("AVX2", "AVX512")


def linears_of(model: nn.Module) -> list[nn.Linear]:
    """The linear layers of a model that [`skinny_gemm`] speeds up."""
    if not skinny_gemm_pays():
        return []
    return [module for module in model.modules() if isinstance(module, nn.Linear) and _is_suited(module)]


@contextmanager
def skinny_gemm(model: nn.Module, linears: list[nn.Linear], rows: int | None = None) -> Iterator[None]:
    """
    Inside, forwards of a few rows are faster in this thread. Their values differ by rounding.

    Args:
        model (`torch.nn.Module`): a target, a drafter, or a head of its own.
        linears (`list[torch.nn.Linear]`): the layers that [`linears_of`] found in the model.
        rows (`int`, *optional*): the number of rows of all forwards inside, if it is known. No layer is changed if
            that number is not faster this way.
    """
    is_for_none = rows is not None and not _LEAST <= rows <= _MOST
    if not linears or is_for_none or torch.is_autocast_enabled("cpu"):
        yield
        return
    before = _here.in_a_round
    _enter(model, linears)
    try:
        _here.in_a_round = True
        yield
    finally:
        _here.in_a_round = before
        _leave(model, linears)


def _enter(model: nn.Module, linears: list[nn.Linear]) -> None:
    with _lock:
        _users[model] = _users.get(model, 0) + 1
        if _users[model] == 1:
            _change_class(linears, SkinnyLinear)


def _leave(model: nn.Module, linears: list[nn.Linear]) -> None:
    with _lock:
        _users[model] -= 1
        if _users[model] == 0:
            del _users[model]
            _change_class(linears, nn.Linear)


def _change_class(linears: list[nn.Linear], to: type[nn.Linear]) -> None:
    for linear in linears:
        # A module's own assignment searches its parameters first: a millisecond for 200 layers.
        object.__setattr__(linear, "__class__", to)


def _is_suited(linear: nn.Linear) -> bool:
    # A subclass, or a layer with a forward of its own, may compute something else.
    if type(linear) not in (nn.Linear, SkinnyLinear) or "forward" in vars(linear):
        return False
    weight = linear._parameters.get("weight")
    return (
        type(weight) is nn.Parameter
        and weight.device.type == "cpu"
        # In bfloat16 compiled code alone is faster.
        and (weight.dtype == torch.float32 or (weight.dtype == torch.bfloat16 and not has_bfloat16_products()))
        and weight.is_contiguous()
        and weight.shape[0] % _WIDTHS[-1] == 0
    )
