# Copyright 2026 The hf_falcon authors. Licensed under the Apache License, Version 2.0.
"""Weights in fewer bytes: the same values to the bit, or none; compiled rounds read them while they are current."""

import copy
import shutil
from types import SimpleNamespace

import pytest
import torch
from counting_compiler import Backend, compiled_by, drafter_of, generate
from gguf import GGMLQuantizationType
from gguf.quants import dequantize, quantize
from quick import one_in
from tiny_models import prompt, tiny_target

import hf_falcon
from hf_falcon.cpu import compact_weights, lent_weights
from hf_falcon.cpu import skinny_gemm as skinny_gemm
from hf_falcon.cpu.compact_weights import WeightMark, compact
from hf_falcon.cpu.compiled_rounds import compiled_rounds_of
from hf_falcon.cpu.huge_pages import Arena
from hf_falcon.cpu.lent_weights import LentWeights
from hf_falcon.cpu.packed_layouts import BlockLayout, PackedWeight

GRIDS = ["Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0"]
OUTPUTS, INPUTS = 48, 96


def weights(kind: str) -> torch.Tensor:
    """Values as a file of `kind` gives them: great and small ones, zeros and groups of one value among them."""
    values = torch.randn(OUTPUTS, INPUTS, generator=torch.Generator().manual_seed(0)) * 0.02
    values[1] *= 1e3
    values[2] *= 1e-4
    values[3, :40] = 0.0
    values[4, :32] = 0.25
    return values.bfloat16().float() if kind == "bfloat16" else on_grid(values, kind)


def on_grid(values: torch.Tensor, kind: str) -> torch.Tensor:
    kind = getattr(GGMLQuantizationType, kind)
    return torch.from_numpy(dequantize(quantize(values.numpy(), kind), kind))


@pytest.fixture(params=[False, True], ids=["AVX-512", "AVX2"])
def codes(request, monkeypatch):
    """The dtype of codes on a grid. With AVX2, pairs of values in bfloat16 share a word."""
    dtype = torch.bfloat16 if request.param else torch.uint8
    monkeypatch.setattr(compact_weights, "_CODES", dtype)
    monkeypatch.setattr(compact_weights, "_IN_PAIRS", request.param)
    return dtype


@pytest.mark.parametrize("packed", [False, True], ids=["", "packed"])
@pytest.mark.parametrize("kind", [*GRIDS, "bfloat16"])
def test_values_stay_the_same_to_the_bit(kind, packed, codes):
    values = weights(kind)
    found = compact(PackedWeight(BlockLayout(values), values) if packed else values)
    assert found.dtype == (torch.bfloat16 if kind == "bfloat16" else codes)
    # Each input by itself, and nothing is added to it but zeros.
    assert torch.equal(found.product(torch.eye(INPUTS), None).T, values)


@pytest.mark.parametrize("sums", [4, 12])
@pytest.mark.parametrize("kind", [*GRIDS, "bfloat16"])
def test_products(kind, sums, codes, monkeypatch):
    """Ten rows: also in turns, the last of which is not full."""
    monkeypatch.setattr(compact_weights, "_SUMS", sums)
    values, bias = weights(kind), torch.randn(OUTPUTS)
    states = torch.randn(5, 2, INPUTS).transpose(0, 1)
    expected = torch.nn.functional.linear(states, values, bias)
    # Some rows of the weight are a thousand times the others.
    torch.testing.assert_close(compact(values).product(states, bias), expected, rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("kind", [*GRIDS, "bfloat16"])
@pytest.mark.parametrize("row", [0, OUTPUTS - 1])
def test_one_value_beside_its_grid(kind, row):
    values = weights(kind)
    values[row, 5] = torch.nextafter(values[row, 5], torch.tensor(torch.inf))
    assert compact(values) is None


@pytest.fixture(params=[False, True], ids=["", "bfloat16"])
def has_bfloat16_products(request, monkeypatch):
    monkeypatch.setattr(compact_weights, "has_bfloat16_products", lambda: request.param)
    monkeypatch.setattr(skinny_gemm, "has_bfloat16_products", lambda: request.param)
    return request.param


@pytest.mark.parametrize("rows", [1, 16])
def test_bfloat16_without_instructions_for_it(has_bfloat16_products, rows):
    values, bias = weights("bfloat16").bfloat16(), torch.randn(OUTPUTS).bfloat16()
    states = torch.randn(rows, INPUTS).bfloat16()
    found = compact(values)
    if has_bfloat16_products:
        assert found is None
        return
    assert found.suits(states) and not found.suits(states.float())
    assert not found.suits(states[:1].expand(17, -1))
    assert torch.equal(found.product(torch.eye(INPUTS).bfloat16(), None).T, values)
    output = found.product(states, bias)
    assert output.dtype == torch.bfloat16
    # The sum is in float32, and is rounded once. Some rows of the weight are a thousand times the others.
    exact = states.double() @ values.double().T + bias.double()
    torch.testing.assert_close(output.double(), exact, rtol=2**-8, atol=1e-4)


@pytest.mark.parametrize(
    "values",
    [torch.randn(48, 96), weights("Q4_1")[:40], weights("Q4_1").half(), torch.full((16, 32), torch.nan)],
    ids=["float32", "outputs", "dtype", "nan"],
)
def test_weights_that_stay_as_they_are(values):
    assert compact(values) is None


def test_groups_that_do_not_fit():
    """bfloat16 has none."""
    assert compact(weights("Q8_0")[:, :80].contiguous()) is None
    assert compact(weights("bfloat16")[:, :80].contiguous()) is not None


@pytest.mark.parametrize(
    "change",
    [
        lambda linear: linear.weight.data.mul_(2.0),
        lambda linear: linear.load_state_dict({"weight": torch.zeros(OUTPUTS, INPUTS)}),
        lambda linear: linear.double(),
        lambda linear: setattr(linear, "weight", torch.nn.Parameter(linear.weight.detach().clone())),
    ],
    ids=["data", "load_state_dict", "to", "replaced"],
)
def test_changes_are_noticed(change):
    linear = torch.nn.Linear(INPUTS, OUTPUTS, bias=False)
    linear.weight = torch.nn.Parameter(weights("Q8_0"))
    found = compact(linear.weight)
    assert found.is_of(linear.weight)
    with torch.no_grad():
        change(linear)
    assert not found.is_of(linear.weight)


@pytest.fixture
def backend(monkeypatch):
    monkeypatch.setattr(lent_weights, "skinny_gemm_pays", lambda: True)
    monkeypatch.setattr(skinny_gemm, "skinny_gemm_pays", lambda: True)
    monkeypatch.setattr("hf_falcon.cpu.compiling._is_faster", _without_timing)
    return Backend()


_is_faster = hf_falcon.cpu.compiling._is_faster


def _without_timing(*arguments):
    _is_faster(*arguments)
    return True


@pytest.fixture
def target():
    """Of values that fit into bfloat16."""
    return copy.deepcopy(tiny_target("llama")).bfloat16().float()


@pytest.mark.parametrize("packed", [False, True], ids=["", "packed"])
def test_text_equals_plain(target, backend, packed):
    drafter, tokens = drafter_of(target), prompt(9)
    if packed:
        hf_falcon.pack_weights(target)
    before = [vars(module).keys() for module in target.modules()]
    with hf_falcon.compiled_rounds(target, (1, 4, 8), compiled_by(backend)):
        linears = [module for module in target.modules() if isinstance(module, torch.nn.Linear)]
        assert all(each in compiled_rounds_of(target)._weights for each in linears)
        ran = backend.ran
        assert generate(target, tokens, drafter) == generate(target, tokens)
        # The LM head's, too.
        assert backend.ran > ran and backend.compiled == 6
        assert [vars(module).keys() for module in target.modules()] == before
        rounds = compiled_rounds_of(target)
    # What was compiled is kept, and no copy of the weights.
    assert not any(each in rounds._weights for each in linears)
    with hf_falcon.compiled_rounds(target, (1, 4, 8), compiled_by(backend)):
        assert generate(target, tokens, drafter) == generate(target, tokens)
        assert all(each in rounds._weights for each in linears)


def test_a_target_in_bfloat16(target, backend, has_bfloat16_products):
    """Compiling itself compares its values with those of code that is not compiled."""
    target = target.bfloat16()
    drafter = drafter_of(target)
    with hf_falcon.compiled_rounds(target, (8,), compiled_by(backend)):
        rounds, ran = compiled_rounds_of(target), backend.ran
        linears = [module for module in target.modules() if isinstance(module, torch.nn.Linear)]
        assert [each in rounds._weights for each in linears] == [not has_bfloat16_products] * len(linears)
        generate(target, prompt(9), drafter)
        assert backend.ran > ran


def test_an_lm_head_with_another_forward(target, backend):
    """As offloading gives it: the decoder still runs compiled."""
    head, drafter, tokens = target.lm_head, drafter_of(target), prompt(9)
    head.forward = lambda states: torch.nn.functional.linear(states, head.weight) * 0.9
    hf_falcon.compile_rounds(target, (8,), compiled_by(backend))
    ran = backend.ran
    assert generate(target, tokens, drafter) == generate(target, tokens)
    assert backend.ran > ran and backend.compiled == 1


def test_compiled_code_reads_them(target, backend, monkeypatch):
    def others(weight, arena):
        found = compact(weight, arena)
        found.tensors[0].mul_(1.5)
        return found

    monkeypatch.setattr(lent_weights, "compact", others)
    with pytest.raises(RuntimeError, match="rounds of 4 tokens give other values"):
        hf_falcon.compile_rounds(target, (4,), compiled_by(backend))


def test_more_rows_than_they_are_for(target, backend, monkeypatch):
    monkeypatch.setattr(compact_weights.CompactWeight, "product", None)
    assert hf_falcon.compile_rounds(target, (17,), compiled_by(backend)) == [17]


@pytest.mark.parametrize("scale, packed", one_in(2, [0.5, 0.7], [False, True]))
def test_weights_that_change(target, backend, packed, scale):
    drafter, tokens = drafter_of(target), prompt(9)
    if packed:
        hf_falcon.pack_weights(target)
    hf_falcon.compile_rounds(target, (8,), compiled_by(backend))
    target.load_state_dict({name: values * scale for name, values in target.state_dict().items()})
    ran = backend.ran
    assert generate(target, tokens, drafter) == generate(target, tokens)
    assert backend.ran == ran
    if packed:
        hf_falcon.pack_weights(target)
    compiled = backend.compiled
    hf_falcon.compile_rounds(target, (8,), compiled_by(backend))
    # Half of what fits into bfloat16 fits into it, and is read by the same code.
    assert (backend.compiled == compiled) == (scale == 0.5)
    ran = backend.ran
    assert generate(target, tokens, drafter) == generate(target, tokens)
    assert backend.ran > ran


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("g++") is None, reason="needs a C++ compiler")
@pytest.mark.parametrize("kind", ["Q4_1", "bfloat16"])
def test_text_equals_plain_by_the_default_compiler(kind, monkeypatch):
    monkeypatch.setattr("hf_falcon.cpu.compiling._is_faster", _without_timing)
    target = copy.deepcopy(tiny_target("llama"))
    for linear in (module for module in target.modules() if isinstance(module, torch.nn.Linear)):
        narrow = kind == "bfloat16" or linear.in_features % 32
        linear.weight.data = linear.weight.data.bfloat16().float() if narrow else on_grid(linear.weight.data, kind)
    drafter = drafter_of(target)
    with hf_falcon.compiled_rounds(target, (1, 4, 8)):
        for length in (1, 9, 30):
            assert generate(target, prompt(length), drafter) == generate(target, prompt(length))


def test_pairs_of_values_are_in_one_word():
    """In the lower bits one of the first eight outputs, above it one of the others."""
    values = torch.randn(32, 3, 5).bfloat16()
    lanes = compact_weights._in_lanes(values, Arena()).view(torch.int16).int() & 0xFFFF
    low, high = lanes.chunk(2, dim=-1)
    found = compact_weights._in_pairs(values, Arena())
    assert found.is_contiguous() and found.shape == (2, 3, 5, 8) and found.dtype == torch.float32
    assert torch.equal(found.view(torch.int32), low | high << 16)


def test_a_weight_on_another_device_is_another_one():
    weight = torch.nn.Parameter(torch.randn(64, 64))
    mark = WeightMark(weight)
    assert mark.is_of(weight)
    mark._marked = mark._marked.to("meta")
    assert not mark.is_of(weight)


def test_code_for_weights_of_another_kind_is_not_used(monkeypatch):
    made = [SimpleNamespace(dtype=torch.bfloat16, tensors=[0] * count, memory=[]) for count in (3, 3, 1)]
    monkeypatch.setattr(lent_weights, "skinny_gemm_pays", lambda: True)
    monkeypatch.setattr(lent_weights, "compact", lambda *_: made[0])
    lent, target = LentWeights(with_blocks=False), tiny_target()
    changes = []
    while made:
        changes.append(lent.take(target.lm_head))
        del made[0]
    assert changes == [True, False, True]
