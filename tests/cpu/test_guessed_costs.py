# Copyright 2026 The hf_falcon authors. Licensed under the Apache License, Version 2.0.
"""Costs before any round, in 16 bits on a processor without instructions for them."""

import pytest
from tiny_models import new_target, tiny_target

from hf_falcon import cost_files
from hf_falcon.core.costs import CostKey, costs_of
from hf_falcon.cpu import guessed_costs

KEY = CostKey(1, 8, 2048, "sdpa", "torch.bfloat16", "cpu", 1, False, ())


@pytest.fixture
def slow_processor(monkeypatch):
    monkeypatch.setattr(guessed_costs, "has_bfloat16_instructions", lambda: False)
    monkeypatch.setattr(guessed_costs, "WIDENS", False)
    monkeypatch.setattr("platform.machine", lambda: "x86_64")


def times(key):
    return costs_of(tiny_target("llama"), key, {}).target(8)


@pytest.mark.parametrize("dtype", ["torch.bfloat16", "torch.float16"])
def test_costs_grow_with_each_token(slow_processor, dtype):
    found = times(KEY._replace(dtype=dtype))
    assert found[0] == 1.0 and found[1] == pytest.approx(1.2) and found[8] == pytest.approx(2.6)
    # The unit is a plain step of all rows.
    assert times(KEY._replace(dtype=dtype, rows=4))[1] == pytest.approx((1 + 0.2 * 7) / (1 + 0.2 * 3))


def test_costs_grow_less_from_where_weights_are_widened(slow_processor, monkeypatch):
    monkeypatch.setattr(guessed_costs, "WIDENS", True)
    found = times(KEY)
    assert found[0] == 1.0 and found[1] == pytest.approx(1.42) and found[8] == pytest.approx(3.04)
    assert found[8] - found[7] == pytest.approx(0.055)


@pytest.mark.parametrize(
    "changes", [{"dtype": "torch.float32"}, {"device": "NVIDIA H100"}, {"packed": True}, {"compiled": (1, 8)}], ids=str
)
def test_other_costs_begin_from_the_plain_guess(slow_processor, changes):
    assert guessed_costs.guessed_costs(KEY._replace(**changes)) is None


@pytest.mark.parametrize("machine, has_products", [("x86_64", True), ("aarch64", False)])
def test_other_processors(monkeypatch, machine, has_products):
    monkeypatch.setattr(guessed_costs, "has_bfloat16_instructions", lambda: has_products)
    monkeypatch.setattr("platform.machine", lambda: machine)
    assert guessed_costs.guessed_costs(KEY) is None and times(KEY)[1] == 1.0


def test_what_was_measured_comes_first(slow_processor, monkeypatch, tmp_path):
    monkeypatch.setenv("HF_FALCON_CACHE", str(tmp_path))
    target = new_target("llama").bfloat16()
    key = CostKey.of(target, 100, 8)
    cost_files.save(target, key, {0: 1.0, 8: 1.1})
    assert costs_of(target, key, {}).target(8)[8] == pytest.approx(1.1)
