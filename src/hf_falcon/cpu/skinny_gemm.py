# Copyright 2026 The hf_falcon authors. Licensed under the Apache License, Version 2.0.
"""
Products of a few rows (the nodes of a tree, or the rows of a draft pass) with weights as they are. For a product of
several rows MKL, in float32, and oneDNN, in bfloat16, would first copy a whole weight. Without instructions for 16
bits torch takes nearly as long for each row as for one, also in prompts. Packed weights are faster still, but need a
call of `pack_weights`.
"""

from __future__ import annotations

import sys
import threading
import weakref
from collections.abc import Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, TypeGuard

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..core.target_parts import is_compiled
from .compact_weights import LentWeight, ordinary_linear, own_forward
from .packed_layouts import has_bfloat16_products, product_of_blocks

_CAPABILITY = torch.backends.cpu.get_cpu_capability()
# Whether products with weights in 16 bits are computed in float32.
WIDENS = torch.backends.mkl.is_available() and _CAPABILITY == "AVX2" and not has_bfloat16_products()
# The numbers of rows for which this is faster. In float32, with AVX-512, on a Xeon, 3 and 16 rows are slower; with
# AVX2, on an EPYC, one row takes 0.6 of the time, 8 rows 0.7 and 24 rows 0.8. In bfloat16, with AMX, on a Xeon, 4
# and 16 rows take 0.7 to 0.9 of the time, 32 as long as before. In both types of 16 bits, with AVX2, on the EPYC, 4
# rows are slower, 8 rows take 0.7 of the time, 16 rows 0.5 and 1,024 rows 0.2. Other processors were not measured.
_WIDENED_ROWS = range(6, sys.maxsize) if WIDENS else range(0)
_ROWS = {
    torch.float32: range(4, 13) if _CAPABILITY == "AVX512" else range(1, 25),
    torch.bfloat16: range(2, 25) if torch.cpu._is_amx_tile_supported() else _WIDENED_ROWS,
    torch.float16: _WIDENED_ROWS,
}
# The outputs of a block in float32: the first width that divides a layer's outputs. On the Xeon both are equally fast.
_WIDTHS = (32, 16) if _CAPABILITY == "AVX512" else (16,)
# Values of a weight that are widened to float32 at a time: 4 MB, which stay in the processor's cache.
_PIECE = 2**20
# From how many rows a widened piece is multiplied as a whole: on the EPYC 256 rows take 0.7 of the time. And how many
# are multiplied at a time, which bounds the memory of a long prompt in float32.
_ROWS_OF_A_WHOLE, _MOST_ROWS = 128, 2048
# The layers inside a gated MLP, by transformers' names.
_INNER = ("gate_proj", "up_proj")
_lock = threading.Lock()
_users: weakref.WeakKeyDictionary[nn.Module, int] = weakref.WeakKeyDictionary()


class _Here(threading.local):
    """
    Of this thread, as others may run the same target at the same time: whether it is inside [`skinny_gemm`], and where
    it widens weights.
    """

    is_inside = False
    piece: Tensor | None = None


_here = _Here()


class SkinnyLinear(nn.Linear):
    """
    The class of linear layers inside [`skinny_gemm`]. For other threads it computes what an ordinary linear layer
    computes, and its copies are ordinary layers.
    """

    # Set while compiled code runs.
    lent: LentWeight | None = None
    has_contiguous_output = True

    def forward(self, input: Tensor) -> Tensor:
        # Code is only compiled for rounds.
        is_compiling = torch.compiler.is_compiling()
        if is_compiling:
            if self.lent is not None and self.lent.suits(input):
                return self.lent.product(input, self.bias)
        elif not _here.is_inside:
            return F.linear(input, self.weight, self.bias)
        # As attributes they would be searched for, which adds up over the hundreds of products of a round.
        parameters, dtype = self._parameters, input.dtype
        weight, bias = parameters.get("weight"), parameters["bias"]
        if weight is None:
            # PEFT computes it anew in each forward.
            return F.linear(input, self.weight, bias)
        if input.numel() // self.in_features not in _ROWS.get(dtype, ()) or dtype != weight.dtype:
            return F.linear(input, weight, bias)
        if dtype != torch.float32:
            if WIDENS:
                # What is widened passes no gradient on.
                is_ordinary = is_compiling or torch.is_grad_enabled()
                return F.linear(input, weight, bias) if is_ordinary else widened_product(input, weight, bias)
            output = product_with_rows(input, weight, bias)
            return output.contiguous() if self.has_contiguous_output else output
        output = _product_by_blocks(input, weight)
        return output if bias is None else output + bias

    def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:
        return ordinary_linear(vars(self))


class InnerLinear(SkinnyLinear):
    """
    A linear layer inside a gated MLP. Its output may stay transposed in memory, because element-wise operations and a
    product follow: a copy would take half of what swapped operands gain.
    """

    has_contiguous_output = False


_SUITED = nn.Linear, SkinnyLinear, InnerLinear
# Linear layers, and their classes inside [`skinny_gemm`].
SkinnyLinears = dict[nn.Linear, type[SkinnyLinear]]


def product_with_rows(input: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """
    `torch.nn.functional.linear(input, weight, bias)` as the product of the weight with the rows: oneDNN copies the
    second of two matrices, here the rows. The output is transposed in memory.
    """
    rows = input.reshape(-1, input.shape[-1]).t()
    output = torch.mm(weight, rows) if bias is None else torch.addmm(bias[:, None], weight, rows)
    return output.t().view(*input.shape[:-1], -1)


def widened_product(input: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """
    `torch.nn.functional.linear(input, weight, bias)` for values in 16 bits, computed in float32: each sum is rounded
    once, at its end. The weight is widened in pieces of some outputs.
    """
    outputs, inputs = weight.shape
    number = input.numel() // inputs
    if number > _MOST_ROWS:
        parts = input.reshape(-1, inputs).split(_MOST_ROWS)
        return torch.cat([widened_product(part, weight, bias) for part in parts]).view(*input.shape[:-1], outputs)
    rows, width = input.float(), _WIDTHS[-1]
    multiply = F.linear if number >= _ROWS_OF_A_WHOLE else _product_by_blocks
    output = input.new_empty(*input.shape[:-1], outputs)
    height = max(_PIECE // inputs // width, 1) * width
    for start in range(0, outputs, height):
        piece = slice(start, start + height)
        product = multiply(rows, _widened(weight[piece]))
        output[..., piece] = product if bias is None else product + bias[piece]
    return output


def _product_by_blocks(input: Tensor, weight: Tensor) -> Tensor:
    outputs, inputs = weight.shape
    width = next(width for width in _WIDTHS if outputs % width == 0)
    return product_of_blocks(input, weight.view(-1, width, inputs).transpose(1, 2))


def _widened(values: Tensor) -> Tensor:
    """A contiguous tensor in float32, in memory of this thread, which the next one overwrites."""
    size = values.numel()
    if _here.piece is None or _here.piece.shape[0] < size:
        # What is made in inference mode cannot be written outside of it.
        with torch.inference_mode(False):
            _here.piece = torch.empty(size, dtype=torch.float32, device="cpu")
    return _here.piece[:size].view(values.shape).copy_(values)


def skinny_gemm_pays() -> bool:
    """Whether products of a few rows are faster block by block: with MKL, and AVX2 or AVX-512."""
    return torch.backends.mkl.is_available() and _CAPABILITY in ("AVX2", "AVX512")


def linears_of(model: nn.Module) -> SkinnyLinears:
    """The linear layers of a model that [`skinny_gemm`] speeds up, and their classes in rounds."""
    found: SkinnyLinears = {}
    if not skinny_gemm_pays():
        return found
    # A layer that the user compiled by itself keeps its classes: its code would be compiled anew, or not at all.
    modules = list(model.modules())
    compiled = {inner for module in modules if is_compiled(module) for inner in module.modules()}
    for module in modules:
        if module in compiled:
            continue
        if is_suited(module):
            found.setdefault(module, SkinnyLinear)
        children = [module._modules[name] if name in module._modules else None for name in _INNER]
        inner = [child for child in children if is_suited(child) and child not in compiled]
        if len(inner) == len(_INNER):
            found.update(dict.fromkeys(inner, InnerLinear))
    return found


@contextmanager
def skinny_gemm(model: nn.Module, linears: SkinnyLinears, rows: int | None = None) -> Iterator[None]:
    """
    Inside, forwards of a few rows are faster in this thread. Their values differ by rounding.

    Args:
        model (`torch.nn.Module`): a target, a drafter, or a head of its own.
        linears (`dict`): what [`linears_of`] found in the model.
        rows (`int`, *optional*): the number of rows of all forwards inside, if it is known. No layer is changed if
            that number is not faster this way.
    """
    is_for_none = rows is not None and linears and rows not in _ROWS[next(iter(linears)).weight.dtype]
    if not linears or is_for_none or torch.is_autocast_enabled("cpu"):
        yield
        return
    before = _here.is_inside
    _enter(model, linears)
    try:
        _here.is_inside = True
        yield
    finally:
        _here.is_inside = before
        _leave(model, linears)


def widening(model: nn.Module, linears: SkinnyLinears) -> AbstractContextManager[object]:
    """
    Inside, forwards of a prompt are faster in this thread where the processor has AVX2 and the model is in 16 bits,
    which it has no instructions for; else they are as ever. Values differ by rounding.

    Args:
        model (`torch.nn.Module`): the target.
        linears (`dict`): what [`linears_of`] found in it.
    """
    # A layer in float32 would change as well.
    pays = WIDENS and all(linear.weight.dtype != torch.float32 for linear in linears)
    return skinny_gemm(model, linears) if pays else nullcontext()


def _enter(model: nn.Module, linears: SkinnyLinears) -> None:
    with _lock:
        _users[model] = _users.get(model, 0) + 1
        if _users[model] == 1:
            _change_classes(linears)


def _leave(model: nn.Module, linears: Iterable[nn.Linear]) -> None:
    with _lock:
        _users[model] -= 1
        if _users[model] == 0:
            del _users[model]
            _change_classes(dict.fromkeys(linears, nn.Linear))


def _change_classes(classes: Mapping[nn.Linear, type[nn.Linear]]) -> None:
    for linear, to in classes.items():
        # A module's own assignment searches its parameters first: a millisecond for 200 layers.
        object.__setattr__(linear, "__class__", to)


def _pays_in(dtype: torch.dtype) -> bool:
    # In bfloat16 without products for it, compiled code alone may be faster.
    return bool(_ROWS.get(dtype)) or (dtype == torch.bfloat16 and not has_bfloat16_products())


def is_suited(linear: nn.Module | None) -> TypeGuard[nn.Linear]:
    """Whether a module is a linear layer whose products can be replaced."""
    # A subclass, or a layer with a forward of its own, may compute something else.
    if not isinstance(linear, nn.Linear) or type(linear) not in _SUITED or own_forward(linear) is not None:
        return False
    weight = linear._parameters.get("weight")
    return (
        type(weight) is nn.Parameter
        # As a parameter, or `None`.
        and "bias" in linear._parameters
        and weight.device.type == "cpu"
        and _pays_in(weight.dtype)
        # A sparse one has no such order.
        and weight.layout == torch.strided
        and weight.is_contiguous()
        and weight.shape[0] % _WIDTHS[-1] == 0
    )
