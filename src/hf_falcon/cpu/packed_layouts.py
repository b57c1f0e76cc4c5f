# Copyright 2026 The hf_falcon authors. Licensed under the Apache License, Version 2.0.
"""Layouts of a linear layer's weight in memory. A product of a few rows then takes as long as one read of it."""

from __future__ import annotations

import itertools
import weakref
from functools import cached_property
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils._pytree import tree_map_only
from torch.utils.weak import WeakIdKeyDictionary

from ..core.target_parts import some_values

# The number of rows that oneDNN chooses its layout for. Any number above one gives the same layout. The layout for one
# row is slow for several.
_ROWS = 8
# Outputs of a block: the first of these that divides the number of outputs, or the last. Of 64, 48, 32 and 16 these
# two were the fastest for eight rows, and 48 for one.
_BLOCKS = (48, 32)
_CANNOT_BE_CHANGED = "Packed weights cannot be changed: call `hf_falcon.unpack_weights(model)` first."
_layouts: weakref.WeakValueDictionary[int, OneDnnLayout] = weakref.WeakValueDictionary()
# A weight keeps its number. Code that was compiled for it then still works after it is packed again.
_numbers = WeakIdKeyDictionary()
_next_number = itertools.count()


def has_bfloat16_products() -> bool:
    """Whether this processor has the instructions that oneDNN's products in bfloat16 need."""
    return torch.backends.mkldnn.is_available() and torch.ops.mkldnn._is_mkldnn_bf16_supported()


class OneDnnLayout:
    """
    oneDNN's own layout, which `torch.compile` with freezing uses, too.

    Args:
        weight (`torch.Tensor` of shape `(out_features, in_features)`): float32 or bfloat16, on the CPU.
    """

    def __init__(self, weight: Tensor):
        self._weight = torch.ops.mkldnn._reorder_linear_weight(weight.detach(), _ROWS)
        self._out_features, self._size = weight.shape[0], weight.nbytes
        number: int = _numbers.setdefault(weight, next(_next_number))
        _layouts[number] = self
        # A tensor, because code is compiled anew for another number, but not for a tensor of another value.
        self.tensors = [torch.tensor(number)]

    def product(self, input: Tensor, bias: Tensor | None) -> Tensor:
        """`torch.nn.functional.linear(input, weight, bias)`."""
        if torch.compiler.is_compiling():
            # `torch.compile` does not support oneDNN's tensors. Compiled code looks the layout up by its number.
            return product_operator()(input, bias, self.tensors[0], self._out_features)
        # The overload itself: the search for it takes as long as a part of a small product.
        return torch.ops.mkldnn._linear_pointwise.default(input, self._weight, bias, "none", [], "")

    def to_dense(self) -> Tensor:
        """The weight, to the bit."""
        return self._weight.to_dense()

    @property
    def memory(self) -> tuple[int, int]:
        """The address of the values, and their size in bytes."""
        return torch.ops.mkldnn.data_ptr(self._weight), self._size


class BlockLayout:
    """
    Blocks of outputs, each transposed: `(blocks, in_features, outputs)`. A product is then a batch of small products
    with the same rows. MKL computes these without a copy; of the whole weight it would first make one.

    Args:
        weight (`torch.Tensor` of shape `(out_features, in_features)`): float32, on the CPU.
    """

    def __init__(self, weight: Tensor):
        self._out_features = weight.shape[0]
        width = next((width for width in _BLOCKS if self._out_features % width == 0), _BLOCKS[-1])
        filled = F.pad(weight.detach(), (0, 0, 0, -self._out_features % width))
        self.tensors = [filled.unflatten(0, (-1, width)).transpose(1, 2).contiguous()]

    def product(self, input: Tensor, bias: Tensor | None) -> Tensor:
        """`torch.nn.functional.linear(input, weight, bias)`."""
        output = product_of_blocks(input, self.tensors[0])
        if output.shape[-1] != self._out_features:
            output = output[..., : self._out_features]
        return output if bias is None else output + bias

    def to_dense(self) -> Tensor:
        """The weight, to the bit."""
        return self.tensors[0].transpose(1, 2).flatten(0, 1)[: self._out_features].contiguous()

    @property
    def memory(self) -> tuple[int, int]:
        """See [`OneDnnLayout.memory`]."""
        return self.tensors[0].data_ptr(), self.tensors[0].nbytes


def _product(input: Tensor, bias: Tensor | None, number: Tensor, out_features: int) -> Tensor:
    return _layouts[int(number)].product(input, bias)


def _shape_of_product(input: Tensor, bias: Tensor | None, number: Tensor, out_features: int) -> Tensor:
    return input.new_empty(*input.shape[:-1], out_features)


# Of the operators that compiled code calls.
NAMESPACE = "hf_falcon_cpu"
_library = torch.library.Library(NAMESPACE, "DEF")
_library.define("product(Tensor input, Tensor? bias, Tensor number, int out_features) -> Tensor")
_library.impl("product", _product, "CPU")
torch.library.register_fake(f"{NAMESPACE}::product", _shape_of_product, lib=_library)


def product_operator() -> Any:
    """The operator of [`OneDnnLayout.product`] in compiled code."""
    return getattr(torch.ops, NAMESPACE).product.default


def product_of_blocks(input: Tensor, blocks: Tensor) -> Tensor:
    """
    The product of rows with a weight in blocks of outputs.

    Args:
        input (`torch.Tensor` of shape `(..., in_features)`): the rows.
        blocks (`torch.Tensor` of shape `(blocks, in_features, width)`): the blocks, transposed.

    Returns:
        `torch.Tensor` of shape `(..., blocks * width)`.
    """
    count, size, width = blocks.shape
    output = torch.bmm(input.reshape(-1, size).expand(count, -1, -1), blocks)
    return output.transpose(0, 1).reshape(*input.shape[:-1], count * width)


class PackedWeight(Tensor):
    """
    A weight in one of these layouts. It has the shape and dtype of the weight, operations read the weight's values to
    the bit, and it cannot be changed.

    Args:
        packed ([`OneDnnLayout`] or [`BlockLayout`]): the layout that holds the values.
        weight (`torch.Tensor` of shape `(out_features, in_features)`): the weight that was packed.
    """

    packed: OneDnnLayout | BlockLayout

    @staticmethod
    def __new__(cls, packed: OneDnnLayout | BlockLayout, weight: Tensor) -> PackedWeight:
        self = Tensor._make_wrapper_subclass(cls, weight.shape, dtype=weight.dtype, device=weight.device)
        self.packed = packed
        return self

    def to_dense(self, *args: Any, **kwargs: Any) -> Tensor:
        """The weight as an ordinary tensor, to the bit."""
        return self.packed.to_dense()

    @property
    def data(self) -> Tensor:
        """See [`torch.Tensor.data`]. Libraries that merge an adapter set it, which would change nothing here."""
        return self.detach()

    @data.setter
    def data(self, value: Tensor) -> None:
        raise RuntimeError(_CANNOT_BE_CHANGED)

    @cached_property
    def some_values(self) -> Tensor:
        """See [`some_values`]. They are read once, because a packed weight never changes."""
        return some_values(self.to_dense()).clone()

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if func is torch.ops.aten.detach.default:
            return cls(args[0].packed, args[0])
        if func._schema.is_mutable:
            raise RuntimeError(_CANNOT_BE_CHANGED)
        args, kwargs = tree_map_only(cls, lambda weight: weight.to_dense(), (args, kwargs or {}))
        return func(*args, **kwargs)

    def __repr__(self, **kwargs: Any) -> str:  # type: ignore[override]
        return f"PackedWeight({self.to_dense()!r})"


def layout_of(weight: Tensor) -> OneDnnLayout | BlockLayout:
    """
    Packs a weight for products of a few rows.

    Args:
        weight (`torch.Tensor` of shape `(out_features, in_features)`): float32 or bfloat16, on the CPU.
    """
    return BlockLayout(weight) if weight.dtype == torch.float32 and blocks_pay() else OneDnnLayout(weight)


def blocks_pay() -> bool:
    """Whether float32 weights are packed in blocks: with MKL and AVX-512, as on the Xeon where they were faster."""
    return torch.backends.mkl.is_available() and torch.backends.cpu.get_cpu_capability() == "AVX512"
