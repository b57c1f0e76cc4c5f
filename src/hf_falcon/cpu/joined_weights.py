# Copyright 2026 The hf_falcon authors. Licensed under the Apache License, Version 2.0.
"""
Packed weights of layers that read the same input, joined for compiled code: one product instead of two or three. With
a few rows, a product of a small weight takes hardly longer than its call.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, fx, nn

from . import uncompiled_sums
from .compact_weights import WeightMark
from .packed_layouts import OneDnnLayout, product_operator
from .packing import PackedLinear
from .uncompiled_sums import leave_sums_uncompiled

# Layers with the same input, by transformers' names.
_SIBLINGS = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))
# The joined weight is a copy. Above this number of values it would gain little and take much memory.
_MOST_VALUES = 1 << 22


class JoinedWeight(WeightMark):
    """
    A layer's part of a joined weight. Each layer asks for the product with the whole joined weight, and takes its
    part; [`one_product_each`] removes the repetitions.

    Args:
        weight (`torch.Tensor` of shape `(out_features, in_features)`): the layer's weight.
        joined ([`OneDnnLayout`]): the weights of all layers with this input, one after another.
        start (`int`): the first output of this layer.
    """

    def __init__(self, weight: Tensor, joined: OneDnnLayout, start: int):
        super().__init__(weight)
        self.dtype = weight.dtype
        self._joined, self._start, self._end = joined, start, start + weight.shape[0]
        self.memory, self.tensors = [joined.memory], joined.tensors

    def suits(self, input: Tensor) -> bool:
        """See [`LentWeight.suits`]."""
        return input.dtype == self.dtype

    def product(self, input: Tensor, bias: Tensor | None) -> Tensor:
        """See [`LentWeight.product`]."""
        output = self._joined.product(input, None)[..., self._start : self._end]
        return output if bias is None else output + bias


def joined_weights(model: nn.Module) -> Iterator[tuple[nn.Linear, JoinedWeight]]:
    """Joins the small packed weights of layers that have the same input; gives each layer's part."""
    for parent in model.modules():
        for names in _SIBLINGS:
            linears = [child for name in names if isinstance(child := getattr(parent, name, None), PackedLinear)]
            if len(linears) == len(names) and _can_be_joined(linears):
                joined = OneDnnLayout(torch.cat([linear.weight.to_dense() for linear in linears]))
                start = 0
                for linear in linears:
                    yield linear, JoinedWeight(linear.weight, joined, start)
                    start += linear.out_features


def _can_be_joined(linears: list[PackedLinear]) -> bool:
    return (
        all(isinstance(linear.packed, OneDnnLayout) for linear in linears)
        and len({(linear.in_features, linear.weight.dtype) for linear in linears}) == 1
        and sum(linear.weight.numel() for linear in linears) <= _MOST_VALUES
    )


def one_product_each(is_row_invariant: bool = False) -> Any:
    """
    A pass for `torch.compile`: compiled code computes each product once that its graph has several times. For a target
    inside [`row_invariant`] it leaves sums uncompiled, too.
    """
    # Loading torch's compiler takes long, and only `compile_rounds` needs it.
    from torch._inductor.custom_graph_pass import CustomGraphPass, get_hash_for_files

    class OneProductEach(CustomGraphPass):
        def __call__(self, graph: fx.Graph) -> None:
            found: dict[tuple[object, ...], fx.Node] = {}
            for node in graph.nodes:
                if node.target is product_operator():
                    first = found.setdefault(node.args, node)
                    if first is not node:
                        node.replace_all_uses_with(first)
                        graph.erase_node(node)
            if is_row_invariant:
                leave_sums_uncompiled(graph)

        def uuid(self) -> object:
            # The key of this pass in the compiler's cache on disk.
            return get_hash_for_files((__file__, uncompiled_sums.__file__), str(is_row_invariant))

    return OneProductEach()
