# Copyright 2026 The hf_falcon authors. Licensed under the Apache License, Version 2.0.
"""Packed weights side by side: the same products, computed once for all layers that read the same input."""

import copy
import shutil

import pytest
import torch
from counting_compiler import Backend, compiled_by, drafter_of, generate
from tiny_models import prompt, tiny_target
from torch import fx, nn

import hf_falcon
from hf_falcon.cpu import compiling, lent_weights, packed_layouts
from hf_falcon.cpu import joined_weights as joining
from hf_falcon.cpu.compiled_rounds import compiled_rounds_of
from hf_falcon.cpu.huge_pages import Arena
from hf_falcon.cpu.joined_weights import joined_weights, one_product_each
from hf_falcon.cpu.packed_layouts import OneDnnLayout, product_operator

pytestmark = pytest.mark.skipif(not torch.backends.mkldnn.is_available(), reason="packed weights need oneDNN")


@pytest.fixture(autouse=True)
def packed_by_onednn(monkeypatch):
    """In float32, too, which has no compact weights then."""
    monkeypatch.setattr(packed_layouts, "blocks_pay", lambda: False)
    monkeypatch.setattr(lent_weights, "skinny_gemm_pays", lambda: False)


@pytest.fixture
def kept_if_slower(monkeypatch):
    """Compiled code is in use, whatever the times of a busy machine say."""
    monkeypatch.setattr(compiling, "_takes_less", lambda first, second, device: True)


def packed_target(name="llama"):
    target = copy.deepcopy(tiny_target(name))
    hf_falcon.pack_weights(target)
    return target


def joined_in(target):
    linears = [module for module in target.modules() if isinstance(module, nn.Linear)]
    return dict(joined_weights(target, linears, Arena(), with_blocks=False))


@pytest.mark.parametrize("name", ["llama", "qwen2"])
def test_parts_are_the_layers_products(name):
    """Those of qwen2's attention have biases."""
    target = packed_target(name)
    found = joined_in(target)
    attention, mlp = target.model.layers[0].self_attn, target.model.layers[0].mlp
    together = [attention.q_proj, attention.k_proj, attention.v_proj, mlp.gate_proj, mlp.up_proj]
    assert found.keys() >= {*together} and not found.keys() & {attention.o_proj, mlp.down_proj, target.lm_head}
    for linear in together:
        input = torch.randn(1, 5, linear.in_features, generator=torch.Generator().manual_seed(0))
        torch.testing.assert_close(found[linear].product(input, linear.bias), linear(input))
        assert found[linear].suits(input) and not found[linear].suits(input.double())
        assert found[linear].is_of(linear.weight)


def test_large_weights_stay_apart(monkeypatch):
    """Their copy would take much memory."""
    target = packed_target()
    layer = target.model.layers[0]
    monkeypatch.setattr(joining, "_MOST_VALUES", layer.mlp.gate_proj.weight.numel() * 2 - 1)
    assert layer.mlp.gate_proj not in joined_in(target)


def test_layers_that_are_not_packed_stay_apart():
    target = packed_target()
    hf_falcon.unpack_weights(target.model.layers[0].self_attn)
    found = joined_in(target)
    assert target.model.layers[0].self_attn.q_proj not in found and target.model.layers[1].self_attn.q_proj in found


def test_text_equals_plain(kept_if_slower):
    target, backend = packed_target(), Backend()
    drafter, tokens = drafter_of(target), prompt(9)
    with hf_falcon.compiled_rounds(target, (1, 4, 8), compiled_by(backend)):
        rounds, ran = compiled_rounds_of(target), backend.ran
        assert target.model.layers[0].mlp.up_proj in rounds._weights
        assert generate(target, tokens, drafter) == generate(target, tokens)
        assert backend.ran > ran


def test_compiled_code_reads_them(monkeypatch):
    product = joining.JoinedWeight.product
    monkeypatch.setattr(joining.JoinedWeight, "product", lambda *given: product(*given) * 1.5)
    with pytest.raises(RuntimeError, match="rounds of 4 tokens give other values"):
        hf_falcon.compile_rounds(packed_target(), (4,), compiled_by(Backend()))


def test_equal_products_are_computed_once():
    input, other = torch.randn(4, 16), torch.randn(4, 16)
    layout = OneDnnLayout(torch.randn(32, 16))
    number, operator = layout.tensors[0], product_operator()

    class Products(nn.Module):
        def forward(self, input, other, number):
            first = operator(input, None, number, 32)[:, :8]
            again = operator(input, None, number, 32)[:, 8:]
            return first, again, operator(other, None, number, 32)

    traced = fx.symbolic_trace(Products())
    expected = traced(input, other, number)
    one_product_each()(traced.graph)
    traced.recompile()
    assert sum(node.target is operator for node in traced.graph.nodes) == 2
    for found, before in zip(traced(input, other, number), expected, strict=True):
        assert torch.equal(found, before)


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("g++") is None, reason="needs a C++ compiler")
@torch.no_grad()
def test_one_product_for_all_layers_that_read_one_input(monkeypatch, kept_if_slower):
    """By the default compiler: four products a layer instead of seven, and one of the LM head."""
    target, tokens = packed_target(), prompt(9)
    expected = generate(target, tokens)
    with hf_falcon.compiled_rounds(target, (8,)):
        rounds, counted, product = compiled_rounds_of(target), [], OneDnnLayout.product
        run = compiling._run(target, 9, rounds)
        monkeypatch.setattr(
            OneDnnLayout, "product", lambda self, *given: counted.append(self) or product(self, *given)
        )
        compiling._logits(run, 8, rounds)
        assert len(counted) == 4 * len(target.model.layers) + 1
        assert generate(target, tokens, drafter_of(target)) == expected
