# Copyright 2026 The hf_falcon authors. Licensed under the Apache License, Version 2.0.
"""Products of a few rows while a target scores a tree: the same values, in rounds only, in this thread only."""

import copy
import threading

import pytest
import torch
from tiny_models import prompt, tiny_drafter, tiny_target
from torch import nn

import hf_falcon
from hf_falcon.cpu import skinny_gemm as module
from hf_falcon.cpu.skinny_gemm import InnerLinear, SkinnyLinear, linears_of, skinny_gemm, skinny_gemm_pays

pytestmark = pytest.mark.skipif(not skinny_gemm_pays(), reason="needs MKL, and AVX2 or AVX-512")
LEAST, MOST = module._ROWS[torch.float32][0], module._ROWS[torch.float32][-1]


def kinds(model) -> set[type]:
    return {type(each) for each in model.modules() if isinstance(each, nn.Linear)}


@pytest.fixture
def linear() -> nn.Linear:
    torch.manual_seed(0)
    return nn.Linear(40, 48)


@pytest.fixture
def blocks_used(monkeypatch) -> list[int]:
    """Rows of the products that were done by blocks."""
    used, original = [], module.product_of_blocks

    def recorded(input, blocks):
        used.append(input.numel() // input.shape[-1])
        return original(input, blocks)

    monkeypatch.setattr(module, "product_of_blocks", recorded)
    return used


@pytest.mark.parametrize("outputs", [16, 48, 64])
@pytest.mark.parametrize("bias", [False, True], ids=["", "bias"])
@torch.no_grad()
def test_values_are_those_of_the_ordinary_layer(outputs, bias, blocks_used):
    torch.manual_seed(0)
    layer = nn.Linear(40, outputs, bias=bias)
    for rows in range(1, MOST + 4):
        states = torch.randn(1, rows, 40)
        expected = layer(states)
        with skinny_gemm(layer, linears_of(layer)):
            found = layer(states)
        torch.testing.assert_close(found, expected)
        assert found.is_contiguous() and (LEAST <= rows <= MOST or torch.equal(found, expected))
    assert blocks_used == list(range(LEAST, MOST + 1))


@pytest.mark.parametrize(
    "rows, touched", [(None, True), (LEAST - 1, False), (LEAST, True), (MOST, True), (MOST + 1, False)]
)
def test_layers_are_touched_where_it_pays(rows, touched, linear):
    with skinny_gemm(linear, linears_of(linear), rows):
        assert (type(linear) is SkinnyLinear) == touched
    assert type(linear) is nn.Linear


@torch.no_grad()
def test_all_is_as_it_was_afterwards(linear):
    linears = linears_of(linear)
    with pytest.raises(KeyError), skinny_gemm(linear, linears):
        with skinny_gemm(linear, linears):
            assert type(linear) is SkinnyLinear
        # The inner one leaves it to the outer one.
        assert type(linear) is SkinnyLinear
        assert [*linears_of(linear)] == [linear]
        raise KeyError
    assert type(linear) is nn.Linear and not module._users
    assert not module._here.is_inside


@torch.no_grad()
def test_other_threads_have_ordinary_layers(linear, blocks_used):
    states, found = torch.randn(8, 40), []
    expected = linear(states)
    with skinny_gemm(linear, linears_of(linear)):
        other = threading.Thread(target=lambda: found.append(linear(states)))
        other.start()
        other.join()
        assert not blocks_used
        linear(states)
        assert blocks_used == [8]
    assert torch.equal(found[0], expected)


@pytest.fixture
def swapped(monkeypatch) -> None:
    """In bfloat16, as with AMX."""
    monkeypatch.setattr(module, "WIDENS", False)
    monkeypatch.setitem(module._ROWS, torch.bfloat16, range(2, 25))


@pytest.fixture
def widened(monkeypatch) -> None:
    """In 16 bits, as with AVX2. Pieces of a weight are of 32 outputs or fewer; many rows are few here."""
    monkeypatch.setattr(module, "WIDENS", True)
    monkeypatch.setattr(module, "_PIECE", 40 * 47)
    monkeypatch.setattr(module, "_ROWS_OF_A_WHOLE", 25)
    monkeypatch.setattr(module, "_MOST_ROWS", 30)
    for dtype in (torch.bfloat16, torch.float16):
        monkeypatch.setitem(module._ROWS, dtype, range(6, 101))


@pytest.mark.parametrize("bias", [False, True], ids=["", "bias"])
@torch.no_grad()
def test_in_bfloat16_rows_and_weight_are_swapped(bias, swapped):
    mlp = nn.ModuleDict(
        {name: nn.Linear(40, 48, bias=bias) for name in ("gate_proj", "up_proj", "down_proj")}
    ).bfloat16()
    assert linears_of(mlp) == dict(zip(mlp.values(), (InnerLinear, InnerLinear, SkinnyLinear)))
    for rows in (1, 2, 24, 25):
        states = torch.randn(1, rows, 40).bfloat16()
        expected = [layer(states) for layer in mlp.values()]
        with skinny_gemm(mlp, linears_of(mlp)):
            found = [layer(states) for layer in mlp.values()]
        torch.testing.assert_close(found, expected)
        # Only the layers inside leave their outputs as they are.
        assert [each.is_contiguous() for each in found] == [rows in (1, 25), rows in (1, 25), True]


@pytest.mark.parametrize("way, name", [("swapped", "product_with_rows"), ("widened", "widened_product")])
def test_text_in_bfloat16(way, name, request, monkeypatch):
    """All shapes fit, in the target's rounds and in the drafter's passes."""
    request.getfixturevalue(way)
    used, product = set(), getattr(module, name)
    monkeypatch.setattr(module, name, lambda input, *rest: used.add(input.shape[1]) or product(input, *rest))
    target = copy.deepcopy(tiny_target("llama")).bfloat16()
    drafter, tokens = copy.deepcopy(tiny_drafter(target)), prompt(10)
    output = target.generate(
        tokens, attention_mask=torch.ones_like(tokens), assistant_model=drafter, max_new_tokens=12, do_sample=False
    )
    assert output.shape == (1, 22) and used
    assert kinds(target) == kinds(drafter) == {nn.Linear}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("bias", [False, True], ids=["", "bias"])
@torch.no_grad()
def test_16_bits_are_widened(bias, dtype, widened, blocks_used):
    layer = nn.Linear(40, 80, bias=bias).to(dtype)
    bias = None if layer.bias is None else layer.bias.float()
    for texts, length in ((1, 5), (2, 3), (2, 12), (1, 25), (2, 35), (1, 101)):
        states = torch.randn(texts, length, 40).to(dtype)
        ordinary = layer(states)
        with skinny_gemm(layer, linears_of(layer)):
            found = layer(states)
        assert found.dtype == dtype and found.is_contiguous()
        if length in (5, 101):
            assert torch.equal(found, ordinary)
        else:
            # One rounding, of a sum in float32, whose order may decide between two neighbours.
            exact = nn.functional.linear(states.float(), layer.weight.float(), bias)
            torch.testing.assert_close(found.float(), exact, rtol=torch.finfo(dtype).eps / 2 + 1e-6, atol=1e-6)
    # The last 10 of 70 rows, too; 25 and 30 rows are multiplied as a whole.
    assert {*blocks_used} == {6, 24, 10}


@pytest.mark.parametrize("name, rows", [("llama", 1), ("llama", 2), ("bloom", 1)])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
def test_prompts_are_widened_in_16_bits_alone(dtype, name, rows, widened, blocks_used):
    target = copy.deepcopy(tiny_target(name)).to(dtype)
    # As many rows as products by blocks have in float32, too.
    tokens = torch.cat([prompt(MOST // rows, seed) for seed in range(rows)])

    def generate():
        blocks_used.clear()
        target.generate(
            tokens, attention_mask=torch.ones_like(tokens), assistant_model="lookup", max_new_tokens=1, do_sample=False
        )
        return MOST in blocks_used

    # The first call of a kind also runs a text of its own.
    generate()
    assert generate() == (dtype != torch.float32)
    if dtype != torch.float32 and name == "llama":
        with hf_falcon.row_invariant(target):
            generate()
            assert not generate()
    assert kinds(target) == {nn.Linear}


def test_no_prompt_is_widened_where_a_layer_is_in_float32(widened):
    model = nn.ModuleList([nn.Linear(40, 48).bfloat16(), nn.Linear(48, 32)])
    with module.widening(model, linears_of(model)):
        assert kinds(model) == {nn.Linear}
    model.bfloat16()
    with module.widening(model, linears_of(model)):
        assert kinds(model) == {SkinnyLinear}
    assert kinds(model) == {nn.Linear}


@torch.no_grad()
def test_each_thread_widens_for_itself(widened):
    layers, states = [nn.Linear(40, 64).bfloat16() for _ in range(2)], torch.randn(8, 40).bfloat16()
    expected, found = [layer(states) for layer in layers], {}

    def multiply(place):
        layer = layers[place]
        with torch.no_grad(), torch.inference_mode(place == 0), skinny_gemm(layer, linears_of(layer)):
            found[place] = [layer(states) for _ in range(200)]

    threads = [threading.Thread(target=multiply, args=(place,)) for place in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for place in range(2):
        for each in found[place]:
            torch.testing.assert_close(each, expected[place])


@torch.no_grad()
def test_what_inference_mode_widened_does_not_stay(linear, widened):
    layer, states = linear.bfloat16(), torch.randn(8, 40).bfloat16()
    module._here.piece = None
    with skinny_gemm(layer, linears_of(layer)):
        with torch.inference_mode():
            found = layer(states)
        assert torch.equal(layer(states), found)


@pytest.mark.parametrize("is_compiling", [True, False])
def test_nothing_is_widened_in_compiled_code_and_with_gradients(is_compiling, linear, widened, monkeypatch):
    monkeypatch.setattr(module, "widened_product", None)
    monkeypatch.setattr("torch.compiler.is_compiling", lambda: is_compiling)
    layer, states = linear.bfloat16(), torch.randn(8, 40).bfloat16()
    with torch.set_grad_enabled(not is_compiling), skinny_gemm(layer, linears_of(layer)):
        found = layer(states)
    assert torch.equal(found, nn.functional.linear(states, layer.weight, layer.bias))
    assert found.requires_grad != is_compiling


@pytest.mark.parametrize("has_bfloat16_products", [True, False])
def test_only_plain_layers_on_the_cpu(has_bfloat16_products, monkeypatch):
    """In bfloat16 they are those that compiled code speeds up."""
    monkeypatch.setattr(module, "has_bfloat16_products", lambda: has_bfloat16_products)
    monkeypatch.setitem(module._ROWS, torch.bfloat16, range(0))

    class Doubling(nn.Linear):
        def forward(self, input):
            return 2 * super().forward(input)

    layers = {
        "plain": nn.Linear(8, 16),
        "sub": Doubling(8, 16),
        "own": nn.Linear(8, 16),
        "bf16": nn.Linear(8, 16, dtype=torch.bfloat16),
        "narrow": nn.Linear(8, 17),
        "meta": nn.Linear(8, 16, device="meta"),
    }
    layers["own"].forward = lambda input: input
    layers["biased"] = nn.Linear(8, 16)
    bias = layers["biased"].bias.data
    del layers["biased"].bias
    layers["biased"].bias = bias
    layers["transposed"] = nn.Linear(16, 16)
    layers["transposed"].weight.data = layers["transposed"].weight.data.t()
    model = nn.ModuleDict(layers)
    assert [*linears_of(model)] == [layers["plain"], *([] if has_bfloat16_products else [layers["bf16"]])]
    hf_falcon.pack_weights(layers["plain"].eval())
    assert layers["plain"] not in linears_of(model)


@torch.no_grad()
def test_autocast_has_its_own_products(linear, blocks_used):
    with torch.autocast("cpu", torch.bfloat16), skinny_gemm(linear, linears_of(linear)):
        assert linear(torch.randn(8, 40)).dtype == torch.bfloat16
    assert not blocks_used


@pytest.mark.parametrize("rows", [1, 2])
def test_generation_scores_trees_by_blocks(rows, blocks_used):
    target = copy.deepcopy(tiny_target("llama"))
    assert kinds(target) == {nn.Linear} and linears_of(target)
    drafter = copy.deepcopy(tiny_drafter(target))
    tokens = torch.cat([prompt(10, seed) for seed in range(rows)])
    options = {"max_new_tokens": 12, "do_sample": False}
    expected = target.generate(tokens, attention_mask=torch.ones_like(tokens), **options)
    assert not blocks_used
    starts, used_by_target = [], []
    target.register_forward_pre_hook(lambda *arguments: starts.append(len(blocks_used)))
    target.register_forward_hook(lambda *arguments: used_by_target.extend(blocks_used[starts[-1] :]))
    drafter.generation_config.num_assistant_tokens = 8 // rows - 1
    output = target.generate(tokens, attention_mask=torch.ones_like(tokens), assistant_model=drafter, **options)
    assert output.tolist() == expected.tolist()
    # Not the prompt, which plain decoding reads by ordinary products. The probe's trees are larger than the call's.
    assert set(used_by_target) & set(range(LEAST, 9)) and 10 * rows not in used_by_target
    # The drafter's passes, too.
    assert len(blocks_used) > len(used_by_target)
    assert kinds(target) == kinds(drafter) == {nn.Linear}
