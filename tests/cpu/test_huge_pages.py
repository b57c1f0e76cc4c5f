# Copyright 2026 The hf_falcon authors. Licensed under the Apache License, Version 2.0.
"""Weights in huge pages: the same values at the same addresses, and nothing happens where Linux has none."""

import copy
import re
from pathlib import Path

import pytest
import torch
from tiny_models import tiny_target
from transformers import CompileConfig

import hf_falcon
from hf_falcon.cpu import huge_pages, lent_weights, packing
from hf_falcon.cpu.compiled_rounds import CompiledRounds
from hf_falcon.cpu.huge_pages import move_to_huge_pages
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
