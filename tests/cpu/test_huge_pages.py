# Copyright 2026 The hf_falcon authors. Licensed under the Apache License, Version 2.0.
"""Weights in huge pages: the same values at the same addresses, and nothing happens where Linux has none."""

import copy
import re
from pathlib import Path

import pytest
import torch
from tiny_models import new_drafter, prompt, tiny_drafter, tiny_target
from torch import nn
from transformers import CompileConfig

import hf_falcon
from hf_falcon.cpu import backend, compiled_passes, huge_pages, lent_weights, packing
from hf_falcon.cpu.backend import CpuDrafter
from hf_falcon.cpu.compiled_passes import CompiledPasses
from hf_falcon.cpu.compiled_rounds import CompiledRounds
from hf_falcon.cpu.huge_pages import Arena, keep_in_huge_pages, move_to_huge_pages
from hf_falcon.cpu.packing import PackedLinear

SIZE = 1 << 21


@pytest.fixture
def settings(tmp_path, monkeypatch) -> Path:
    """A folder in the place of the kernel's settings, for huge pages of 2 MiB."""
    (tmp_path / "enabled").write_text("always [madvise] never\n")
    (tmp_path / "hpage_pmd_size").write_text(f"{SIZE}\n")
    monkeypatch.setattr(huge_pages, "_SETTINGS", tmp_path)
    return tmp_path


@pytest.fixture
def advised(monkeypatch) -> list[tuple[int, int, int]]:
    """The calls of `madvise`, of which the second fails."""
    calls = []

    class Library:
        def __init__(self, name):
            def madvise(*arguments):
                calls.append(arguments)
                return -1 if len(calls) == 2 else 0

            self.madvise = madvise

    monkeypatch.setattr(huge_pages.ctypes, "CDLL", Library)
    return calls


def test_values_and_addresses_stay():
    values = torch.arange(3 << 20)
    address, kept = values.data_ptr(), values.clone()
    moved = move_to_huge_pages([(address, values.nbytes)])
    assert values.data_ptr() == address and torch.equal(values, kept)
    if moved:
        found = re.findall(r"AnonHugePages: +(\d+) kB", Path("/proc/self/smaps").read_text())
        assert sum(map(int, found)) * 1024 >= moved


def test_each_page_once(settings, advised):
    buffers = [(5 * SIZE - 1, 2), (SIZE, 1), (2 * SIZE - 8, 8), (9 * SIZE, 2 * SIZE)]
    assert move_to_huge_pages(buffers) == 4 * SIZE
    assert [(start // SIZE, size) for start, size, _ in advised] == [(page, SIZE) for page in (1, 4, 5, 9, 10)]


@pytest.mark.parametrize("case", ["off", "missing", "other system"])
def test_nothing_happens_without_huge_pages(case, settings, advised, monkeypatch):
    if case == "off":
        (settings / "enabled").write_text("always madvise [never]\n")
    elif case == "missing":
        (settings / "hpage_pmd_size").unlink()
    else:
        monkeypatch.setattr(huge_pages.sys, "platform", "darwin")
    assert move_to_huge_pages([(SIZE, 1)]) == 0 and not advised


@pytest.mark.skipif(not torch.backends.mkldnn.is_available(), reason="packed weights need oneDNN")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_packed_weights_and_those_of_compiled_code_are_moved(dtype, monkeypatch):
    if dtype == torch.bfloat16 and not torch.ops.mkldnn._is_mkldnn_bf16_supported():
        pytest.skip("oneDNN has no bfloat16 on this processor")
    moved = []
    for module in (packing, lent_weights):
        monkeypatch.setattr(module, "move_to_huge_pages", lambda buffers: moved.extend(buffers))
    target = copy.deepcopy(tiny_target("llama")).to(dtype)
    hf_falcon.pack_weights(target)
    linears = [module for module in target.modules() if isinstance(module, PackedLinear)]
    assert sum(size for _, size in moved) >= sum(linear.weight.nbytes for linear in linears)
    assert len({address for address, _ in moved}) == len(linears)
    moved.clear()
    rounds = CompiledRounds(target, CompileConfig())
    rounds.take_weights()
    lent = rounds._weights._weights.values()
    # Joined or compact weights, where this processor has a use for them.
    assert moved == [buffer for weight in lent for buffer in weight.memory]


@pytest.fixture
def moved(monkeypatch) -> list[tuple[int, int]]:
    """The memory that is moved."""
    found = []
    monkeypatch.setattr(huge_pages, "move_to_huge_pages", lambda buffers: found.extend(buffers))
    return found


def test_the_matrices_of_a_drafter_are_copied_and_moved_once(settings, moved):
    model = nn.Sequential(nn.Linear(40, 48), nn.LayerNorm(48), nn.Linear(48, 16))
    matrices, vectors = [model[0].weight, model[2].weight], [model[0].bias, model[1].weight]
    kept = {name: value.clone() for name, value in model.state_dict().items()}
    before = [each.data_ptr() for each in (*matrices, *vectors)]
    with torch.inference_mode():
        keep_in_huge_pages(model)
        keep_in_huge_pages(model)
    assert moved == [(each.data_ptr(), each.nbytes) for each in matrices]
    stayed = [each.data_ptr() == address for each, address in zip((*matrices, *vectors), before)]
    assert stayed == [False, False, True, True]
    assert all(torch.equal(value, kept[name]) for name, value in model.state_dict().items())
    # The weights are the same parameters, and can be trained.
    assert model[0].weight is matrices[0]
    model(torch.randn(2, 40)).sum().backward()
    assert model[0].weight.grad is not None
    # A copy with other options has the same weights.
    keep_in_huge_pages(copy.copy(model))
    assert len(moved) == 2
    # New weights are moved again.
    model.double()
    keep_in_huge_pages(model)
    assert len(moved) == 4


@pytest.mark.parametrize("case", ["shared", "large", "meta", "no huge pages"])
def test_weights_that_stay_where_they_are(case, settings, moved, monkeypatch):
    model = nn.Linear(40, 48, device="meta" if case == "meta" else None)
    if case == "shared":
        model.share_memory()
    elif case == "large":
        monkeypatch.setattr(huge_pages, "_LARGEST_COPY", 40 * 48)
    elif case == "no huge pages":
        (settings / "hpage_pmd_size").unlink()
    address = model.weight.data_ptr()
    keep_in_huge_pages(model)
    assert model.weight.data_ptr() == address and not moved


def test_a_drafter_that_has_drafted_often_is_moved(settings, moved, monkeypatch):
    # The first call drafts more often.
    monkeypatch.setattr(backend, "_RUNS_BEFORE_MOVE", 2)
    target = tiny_target("llama")
    drafter, tokens = copy.deepcopy(tiny_drafter(target)), prompt(10)
    options = {"attention_mask": torch.ones_like(tokens), "max_new_tokens": 12, "do_sample": False}
    expected = target.generate(tokens, **options)
    for call in range(3):
        assert bool(moved) == (call == 2)
        output = target.generate(tokens, assistant_model=drafter, **options)
        assert output.tolist() == expected.tolist()
    matrices = [weight for weight in drafter.parameters() if weight.dim() > 1]
    assert moved == [(weight.data_ptr(), weight.nbytes) for weight in matrices]


def test_a_drafter_that_has_drafted_little_stays(settings, moved):
    target = tiny_target("llama")
    drafter, tokens = copy.deepcopy(tiny_drafter(target)), prompt(10)
    options = {"attention_mask": torch.ones_like(tokens), "max_new_tokens": 12, "do_sample": False}
    for _ in range(3):
        target.generate(tokens, assistant_model=drafter, **options)
    assert not moved


def test_a_drafter_that_drafts_in_another_call_is_not_moved(settings, moved, monkeypatch):
    target = tiny_target("llama")
    drafter = copy.deepcopy(tiny_drafter(target))
    first = CpuDrafter(drafter, target)
    monkeypatch.setattr(backend, "_RUNS_BEFORE_MOVE", 0)
    second = CpuDrafter(drafter, target)
    assert not moved
    del first, second
    CpuDrafter(drafter, target)
    assert moved


@pytest.mark.parametrize("draft_vocab_size", [None, 20])
def test_the_head_of_compiled_passes_is_moved_if_it_is_no_part_of_the_target(draft_vocab_size, monkeypatch):
    found = []
    monkeypatch.setattr(compiled_passes, "keep_in_huge_pages", found.append)
    target = tiny_target("llama")
    head = CompiledPasses(4, CompileConfig()).take(new_drafter(target, draft_vocab_size=draft_vocab_size), target)
    assert found == ([] if draft_vocab_size is None else [head.linear])


def test_an_arena(settings, advised):
    """Tensors of one chunk share memory, that Linux is asked for huge pages of before it is written."""
    arena = Arena()
    first, second = arena.empty((3, 5), torch.bfloat16), arena.empty([7], torch.float32)
    third = arena.empty((huge_pages._CHUNK + 1,), torch.uint8)
    assert (first.shape, first.dtype, second.shape, second.dtype) == ((3, 5), torch.bfloat16, (7,), torch.float32)
    assert first.is_contiguous() and second.data_ptr() - first.data_ptr() == 64 and third.data_ptr() % 64 == 0
    assert first.untyped_storage().data_ptr() == second.untyped_storage().data_ptr()
    for each in (first, second):
        assert torch.equal(each.fill_(2.0), torch.full_like(each, 2.0))
    assert len(advised) == 2 and all(advice == 14 for *_, advice in advised)
    for (start, length, _), held in zip(advised, (first, third)):
        begin = held.untyped_storage().data_ptr()
        end = begin + held.untyped_storage().nbytes()
        # Whole pages of this memory, and no other's.
        assert start % SIZE == length % SIZE == 0 and begin <= start and begin + SIZE > start
        assert start + length <= end < start + length + SIZE


def test_an_arena_where_there_are_no_huge_pages(tmp_path, monkeypatch):
    monkeypatch.setattr(huge_pages, "_SETTINGS", tmp_path)
    monkeypatch.setattr(huge_pages.ctypes, "CDLL", pytest.fail)
    assert Arena().empty((2, 3), torch.float32).fill_(1.0).sum() == 6
