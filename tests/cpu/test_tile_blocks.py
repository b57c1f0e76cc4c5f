# Copyright 2026 The hf_falcon authors. Licensed under the Apache License, Version 2.0.
"""Weights in blocks that compiled code multiplies by itself: the same products, without a call of oneDNN."""

import copy
import shutil
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from counting_compiler import Backend, compiled_by, drafter_of, generate
from tiny_models import prompt, tiny_target
from torch import nn
from transformers import CompileConfig

import hf_falcon
from hf_falcon.cpu import compiling, joined_weights, lent_weights, skinny_gemm, tile_blocks
from hf_falcon.cpu.compiled_rounds import CompiledRounds, compiled_rounds_of
from hf_falcon.cpu.huge_pages import Arena
from hf_falcon.cpu.joined_weights import one_product_each
from hf_falcon.cpu.programs import Program
from hf_falcon.cpu.skinny_gemm import skinny_gemm_pays
from hf_falcon.cpu.tile_blocks import TileBlocks, teach_compiler, tile_product, tiles_pay

needs_compiler = pytest.mark.skipif(shutil.which("g++") is None, reason="needs a C++ compiler")
needs_tiles = pytest.mark.skipif(not tiles_pay(), reason="needs AMX, and a version of torch that was tried")


@pytest.fixture
def with_tiles(monkeypatch):
    """As on a processor with AMX: blocks are made on any, and multiplied uncompiled."""
    monkeypatch.setattr(joined_weights, "tiles_pay", lambda: True)
    monkeypatch.setattr(lent_weights, "compact", lambda *_: None)


@pytest.fixture
def kept_if_slower(monkeypatch):
    """Compiled code is in use, whatever the times of a busy machine say."""
    monkeypatch.setattr(compiling, "_takes_less", lambda first, second, device: True)


def target_in_bfloat16(name="llama"):
    return copy.deepcopy(tiny_target(name)).bfloat16()


def joined_in(target, with_blocks=True):
    linears = [module for module in target.modules() if isinstance(module, nn.Linear)]
    return dict(joined_weights.joined_weights(target, linears, Arena(), with_blocks))


def some_weight(outputs, inputs):
    return torch.randn(outputs, inputs, generator=torch.Generator().manual_seed(outputs)).bfloat16()


@pytest.mark.parametrize("outputs", [64, 40, 7])
def test_product_is_the_layers(outputs):
    """Outputs that fill no block, too."""
    weight, input = some_weight(outputs, 48), some_weight(5, 48)[None]
    blocks = TileBlocks(weight, Arena())
    assert torch.equal(blocks.product(input), F.linear(input, weight))
    assert blocks.memory == (blocks.tensors[0].data_ptr(), -(-outputs // 32) * 32 * 48 * 2)


def test_values_lie_as_tiles_read_them():
    """One after another: of two inputs, the two values of each of 32 outputs."""
    weight = torch.arange(64 * 6).view(64, 6).bfloat16()
    block = TileBlocks(weight, Arena()).tensors[0][1].reshape(3, 32, 2)
    for pair, output, which in [(0, 0, 0), (0, 0, 1), (0, 5, 1), (2, 31, 0)]:
        assert block[pair, output, which] == weight[32 + output, 2 * pair + which]


@pytest.mark.parametrize("is_packed", [False, True], ids=["as it is", "packed"])
@pytest.mark.parametrize("name", ["llama", "qwen2"])
def test_parts_are_the_layers_products(name, is_packed, with_tiles):
    """Of all layers: those with the same input together, the others alone. Those of qwen2's attention have biases."""
    if is_packed and not torch.ops.mkldnn._is_mkldnn_bf16_supported():
        pytest.skip("oneDNN has no bfloat16 on this processor")
    target = target_in_bfloat16(name)
    if is_packed:
        hf_falcon.pack_weights(target)
    found = joined_in(target)
    assert found.keys() == {module for module in target.modules() if isinstance(module, nn.Linear)}
    attention, mlp = target.model.layers[0].self_attn, target.model.layers[0].mlp
    assert found[attention.q_proj].tensors is found[attention.v_proj].tensors
    assert found[mlp.gate_proj].tensors is found[mlp.up_proj].tensors is not found[mlp.down_proj].tensors
    for linear, weight in found.items():
        input = some_weight(5, linear.in_features)[None]
        with torch.no_grad():
            torch.testing.assert_close(weight.product(input, linear.bias), linear(input))
        assert weight.suits(input) and not weight.suits(input.float()) and weight.is_of(linear.weight)


def test_other_weights_get_none(with_tiles, monkeypatch):
    """Large ones, whose copy would take much memory, those of another dtype, and with an odd number of inputs."""
    target = target_in_bfloat16()
    layers = [layer.mlp for layer in target.model.layers]
    layers[0].down_proj.float()
    layers[1].down_proj = nn.Linear(33, 32, bias=False, dtype=torch.bfloat16)
    assert not joined_in(target).keys() & {layers[0].down_proj, layers[1].down_proj}
    monkeypatch.setattr(joined_weights, "_MOST_VALUES", layers[0].gate_proj.weight.numel())
    found = joined_in(target)
    # Together they are too large.
    assert found[layers[0].gate_proj].tensors is not found[layers[0].up_proj].tensors
    monkeypatch.setattr(joined_weights, "_MOST_VALUES", layers[0].gate_proj.weight.numel() - 1)
    assert layers[0].gate_proj not in joined_in(target)


@pytest.mark.parametrize("case", ["processor", "permission", "torch", "none"])
def test_where_they_pay(case, monkeypatch):
    """Nothing is made without AMX, where Linux does not allow it, and with a version of torch that was not tried."""
    tiles_pay.cache_clear()
    monkeypatch.setattr(torch.cpu, "_is_amx_tile_supported", lambda: case != "processor")
    monkeypatch.setattr(torch.cpu, "_init_amx", lambda: case != "permission")
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: "AVX512")
    monkeypatch.setattr(torch, "__version__", "2.99.0" if case == "torch" else "2.13.0+cpu")
    try:
        assert tiles_pay() == bool(joined_in(target_in_bfloat16())) == (case == "none")
    finally:
        tiles_pay.cache_clear()


def taken_by(target, compile_config):
    rounds = CompiledRounds(target, compile_config)
    rounds.take_weights()
    return [type(weight._joined) for weight in rounds._weights._weights.values()]


@pytest.mark.skipif(not skinny_gemm_pays(), reason="weights that are not packed are not replaced")
def test_not_for_another_compiler_nor_inside_row_invariant(with_tiles, monkeypatch):
    """It could not write their product, and uncompiled it is slow. Inside, each product rounds as uncompiled."""
    monkeypatch.setitem(skinny_gemm._ROWS, torch.bfloat16, range(2, 25))
    target = target_in_bfloat16()
    assert set(taken_by(target, CompileConfig())) == {TileBlocks}
    assert not taken_by(target, compiled_by(Backend()))
    with hf_falcon.row_invariant(target):
        assert not taken_by(target, CompileConfig())


def test_equal_products_are_computed_once():
    blocks, input = TileBlocks(some_weight(64, 32), Arena()), some_weight(3, 32)

    class Products(nn.Module):
        def forward(self, input, blocks):
            return tile_product()(input, blocks, 64)[:, :32], tile_product()(input, blocks, 64)[:, 32:]

    traced = torch.fx.symbolic_trace(Products())
    expected = traced(input, blocks.tensors[0])
    one_product_each()(traced.graph)
    traced.recompile()
    assert sum(node.target is tile_product() for node in traced.graph.nodes) == 1
    assert all(map(torch.equal, traced(input, blocks.tensors[0]), expected))


@pytest.mark.slow
@needs_compiler
@torch.no_grad()
@pytest.mark.parametrize("outputs", [96, 40])
def test_the_compilers_product(outputs):
    """
    For one row, for 16 and 48, for which the compiler would choose another kernel, and for any number. On a processor
    without AMX the compiler leaves the product uncompiled.
    """
    teach_compiler()
    weight = some_weight(outputs, 80) / 9
    blocks = TileBlocks(weight, Arena()).tensors[0]

    def product(input, blocks):
        return F.silu(tile_product()(input, blocks, outputs)) + 1

    def check(run, rows, is_any):
        input = some_weight(rows, 80)
        if is_any:
            torch._dynamo.maybe_mark_dynamic(input, 0)
        expected = (F.silu(F.linear(input.float(), weight.float())) + 1).bfloat16()
        torch.testing.assert_close(run(input, blocks), expected, atol=0.02, rtol=0.02)

    for rows in (1, 16, 33, 48):
        torch._dynamo.reset()
        check(torch.compile(product, fullgraph=True, dynamic=False), rows, is_any=False)
    torch._dynamo.reset()
    run = torch.compile(product, fullgraph=True)
    for rows in (16, 5, 48, 70):
        check(run, rows, is_any=True)


@pytest.mark.slow
@needs_compiler
@needs_tiles
@pytest.mark.parametrize("is_packed", [False, True], ids=["as it is", "packed"])
@torch.no_grad()
def test_rounds_of_a_target(is_packed, kept_if_slower, monkeypatch, tmp_path):
    """One program for all sizes, packed or not, with each layer's values, and none of the products calls oneDNN."""
    monkeypatch.setenv("HF_FALCON_CACHE", str(tmp_path))
    monkeypatch.setattr(tile_blocks, "os", SimpleNamespace(cpu_count=lambda: 3))
    target = target_in_bfloat16("qwen2")
    if is_packed:
        hf_falcon.pack_weights(target)
    with hf_falcon.compiled_rounds(target, (1, 16), drafter=drafter_of(target)):
        rounds = compiled_rounds_of(target)
        lent = rounds._weights._weights
        assert lent.keys() == {module for module in target.modules() if isinstance(module, nn.Linear)}
        assert all(isinstance(each._joined, TileBlocks) for each in lent.values())
        assert sorted(file.name[:8] for file in tmp_path.rglob("layer-*.pt2")) == ["layer-0-", "layer-1-"]
        run = compiling._run(target, 9, rounds)
        for size in (1, 5, 16, 21):
            rounds.sizes = [size]
            if size not in (1, 16):
                rounds._built(size)
            assert rounds.bind()
            found, expected = compiling._logits(run, size, rounds), compiling._logits(run, size, None)
            assert (found - expected).abs().max() < 0.03 * expected.abs().max()
        rounds.sizes = [1, 16]
        ran, call = [], Program.__call__
        monkeypatch.setattr(Program, "__call__", lambda self, tensors: ran.append(self) or call(self, tensors))
        generate(target, prompt(9), drafter_of(target))
        assert len(ran) >= len(target.model.layers)
