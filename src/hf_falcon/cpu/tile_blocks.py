# Copyright 2026 The hf_falcon authors. Licensed under the Apache License, Version 2.0.
"""
Blocks of a weight in bfloat16 for compiled code, on processors with products of tiles (Intel's AMX). Torch's compiler
writes their product into the program. A call of oneDNN instead leaves the program for Python, and then reads a small
weight at half of the speed.
"""

from __future__ import annotations

import os
from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from .huge_pages import Arena
from .packed_layouts import NAMESPACE

# Outputs of a block, and values of an output side by side: those of the compiler's kernel for tiles.
_WIDTH, _TOGETHER = 32, 2
# Rows of the same kernel.
_ROWS = 32
# The compiler's template for products is private to torch. It was tried in this version only.
_TRIED = "2.13."


class TileBlocks:
    """
    A weight in blocks of 32 outputs.

    Args:
        weight (`torch.Tensor` of shape `(out_features, in_features)`): in bfloat16, on the CPU. `in_features` is even.
        arena ([`Arena`]): where the blocks are.
    """

    def __init__(self, weight: Tensor, arena: Arena):
        self._out_features = weight.shape[0]
        filled = F.pad(weight, (0, 0, 0, -weight.shape[0] % _WIDTH))
        # Of each two inputs, the two values of each output.
        blocks = filled.unflatten(0, (-1, _WIDTH)).unflatten(2, (-1, _TOGETHER)).transpose(1, 2)
        shape = blocks.shape[0], weight.shape[1], _WIDTH
        self.tensors = [arena.empty(shape, weight.dtype).view(blocks.shape).copy_(blocks).view(shape)]

    def product(self, input: Tensor, bias: None = None) -> Tensor:
        """`torch.nn.functional.linear(input, weight)`. Uncompiled it is slow."""
        return tile_product()(input, self.tensors[0], self._out_features)

    @property
    def memory(self) -> tuple[int, int]:
        """See [`OneDnnLayout.memory`]."""
        return self.tensors[0].data_ptr(), self.tensors[0].nbytes


@cache
def tiles_pay() -> bool:
    """Whether compiled code multiplies blocks: with AMX, and a version of torch's compiler that was tried."""
    # An environment variable may forbid torch the instructions of a processor.
    has_amx = torch.cpu._is_amx_tile_supported() and torch.backends.cpu.get_cpu_capability() == "AVX512"
    # Linux has to allow the process to use tiles.
    return has_amx and str(torch.__version__).startswith(_TRIED) and torch.cpu._init_amx()


def can_be_blocks(weight: Tensor) -> bool:
    """Whether [`TileBlocks`] can be made of a weight."""
    return weight.dtype == torch.bfloat16 and weight.shape[1] % _TOGETHER == 0


@cache
def teach_compiler() -> None:
    """Tells torch's compiler how to write the product with blocks into a program."""
    # Loading the compiler takes long, and only compiling needs it.
    from torch._inductor import ir, lowering
    from torch._inductor.codegen.cpp_gemm_template import CppGemmTemplate
    from torch._inductor.codegen.cpp_micro_gemm import CppMicroGemmAMX, create_micro_gemm
    from torch._inductor.utils import has_free_symbols

    def lowered(input: Any, blocks: Any, out_features: int) -> Any:
        *others, inputs = input.get_size()
        rows = ir.ExternKernel.realize_input(lowering.view(input, [-1, inputs]))
        rows, blocks = ir.ExternKernel.require_contiguous(rows), ir.ExternKernel.realize_input(blocks)
        number, (count, _, width) = rows.get_size()[0], blocks.get_size()
        outputs = count * width
        # A multiple of these rows: for some other numbers the compiler would choose kernels that read other blocks.
        like = _ROWS if has_free_symbols([number]) else -(-number // _ROWS) * _ROWS
        # So many parts, each of some blocks, may run at once. The number of threads may change later.
        parts = min(os.cpu_count() or 1, int(count))
        types = {"input_dtype": torch.bfloat16, "input2_dtype": torch.bfloat16, "output_dtype": torch.float32}
        kernel = create_micro_gemm("micro_gemm", like, outputs, inputs, **types, num_threads=parts)
        if not isinstance(kernel, CppMicroGemmAMX) or kernel.register_blocking.block_n != width:
            return lowering.fallback_handler(tile_product(), add_to_fallback_set=False)(input, blocks, out_features)
        layout = ir.FixedLayout(torch.device("cpu"), rows.get_dtype(), [number, outputs])
        template = CppGemmTemplate([rows, blocks], layout, parts, kernel.register_blocking, should_block_weights=True)
        template.m = like
        output = template.generate().output_node()
        return lowering.view(lowering.slice_(output, 1, 0, out_features), [*others, out_features])

    lowering.register_lowering(tile_product(), type_promotion_kind=None)(lowered)


def tile_product() -> Any:
    """The operator of [`TileBlocks.product`]."""
    return getattr(torch.ops, NAMESPACE).tile_product.default


def _product(input: Tensor, blocks: Tensor, out_features: int) -> Tensor:
    count, inputs, width = blocks.shape
    values = blocks.view(count, -1, width, _TOGETHER).transpose(1, 2).reshape(count * width, inputs)
    return F.linear(input, values[:out_features])


def _shape_of_product(input: Tensor, blocks: Tensor, out_features: int) -> Tensor:
    return input.new_empty(*input.shape[:-1], out_features)


_library = torch.library.Library(NAMESPACE, "FRAGMENT")
_library.define("tile_product(Tensor input, Tensor blocks, int out_features) -> Tensor")
_library.impl("tile_product", _product, "CPU")
torch.library.register_fake(f"{NAMESPACE}::tile_product", _shape_of_product, lib=_library)
