# Copyright 2026 The hf_falcon authors. Licensed under the Apache License, Version 2.0.
"""
Weights of layers that read the same input, joined for compiled code: one product instead of two or three. With a few
rows, a product of a small weight takes hardly longer than its call. Where the compiler can write products into the
program itself, it does so for all small weights.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Iterator
from typing import Any

import torch
from torch import Tensor, fx, nn
from transformers import CompileConfig

from . import tile_blocks, uncompiled_sums
from .compact_weights import WeightMark
from .huge_pages import Arena
from .packed_layouts import OneDnnLayout, product_operator
from .packing import PackedLinear
from .tile_blocks import TileBlocks, can_be_blocks, tile_product, tiles_pay
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
        joined ([`OneDnnLayout`] or [`TileBlocks`]): the weights of all layers with this input, one after another.
        start (`int`): the first output of this layer.
    """

    def __init__(self, weight: Tensor, joined: OneDnnLayout | TileBlocks, start: int):
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


def can_have_blocks(compile_config: CompileConfig, is_row_invariant: bool = False) -> bool:
    """
    Whether joined weights may be [`TileBlocks`]: not for another compiler than torch's own, which cannot write their
    product, and not for a target inside [`row_invariant`], where it would round differently.
    """
    return compile_config.backend == "inductor" and not is_row_invariant


def joined_weights(
    model: nn.Module, linears: Collection[nn.Linear], arena: Arena, with_blocks: bool
) -> Iterator[tuple[nn.Linear, JoinedWeight]]:
    """
    Joins the small weights of layers that have the same input; gives each layer's part.

    Args:
        model (`torch.nn.Module`): the model.
        linears (collection of `torch.nn.Linear`): the layers that may get a part, and others.
        arena ([`Arena`]): where blocks are.
        with_blocks (`bool`): see [`can_have_blocks`]. Layers without siblings then get blocks of their own.
    """
    alone: dict[Any, None] = dict.fromkeys(linear for linear in model.modules() if linear in linears)
    siblings = [[getattr(parent, name, None) for name in names] for parent in model.modules() for names in _SIBLINGS]
    for group in [*siblings, *([linear] for linear in alone)]:
        members = [linear for linear in group if linear in alone]
        joined = _joined(members, arena, with_blocks and tiles_pay()) if len(members) == len(group) else None
        if joined is not None:
            start = 0
            for linear in members:
                alone.pop(linear, None)
                yield linear, JoinedWeight(linear.weight, joined, start)
                start += linear.out_features


def _joined(linears: list[nn.Linear], arena: Arena, with_blocks: bool) -> OneDnnLayout | TileBlocks | None:
    weights = [linear.weight for linear in linears]
    if len({(weight.shape[1], weight.dtype) for weight in weights}) > 1:
        return None
    if sum(weight.numel() for weight in weights) > _MOST_VALUES:
        return None
    if with_blocks and all(map(can_be_blocks, weights)):
        return TileBlocks(_side_by_side(weights), arena)
    are_packed = all(isinstance(each, PackedLinear) and isinstance(each.packed, OneDnnLayout) for each in linears)
    return OneDnnLayout(_side_by_side(weights)) if are_packed and len(weights) > 1 else None


def _side_by_side(weights: list[Tensor]) -> Tensor:
    return torch.cat([weight.detach().to_dense() for weight in weights])


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
                if node.target in (product_operator(), tile_product()):
                    first = found.setdefault(node.args, node)
                    if first is not node:
                        node.replace_all_uses_with(first)
                        graph.erase_node(node)
            if is_row_invariant:
                leave_sums_uncompiled(graph)

        def uuid(self) -> object:
            # The key of this pass in the compiler's cache on disk.
            files = __file__, uncompiled_sums.__file__, tile_blocks.__file__
            return get_hash_for_files(files, f"{is_row_invariant} {os.cpu_count()}")

    return OneProductEach()
