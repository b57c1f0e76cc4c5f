# Copyright 2026 The hf_falcon authors. Licensed under the Apache License, Version 2.0.
"""Near-ties: which greedy tokens rounding could have decided."""

import copy
import math

import pytest
import torch
from oracle import use_oracle
from tiny_models import prompt, tiny_drafter, tiny_target

from hf_falcon import DraftStatistics
from hf_falcon.near_ties import NearTies

NEW_TOKENS = 30
DICT = {"return_dict_in_generate": True}
GREEDY = {"max_new_tokens": NEW_TOKENS, "do_sample": False, **DICT}


@pytest.mark.parametrize("dtype, unit", [(torch.bfloat16, 2**-3), (torch.float16, 2**-6), (torch.float32, 2**-19)])
def test_gaps_are_measured_in_units_in_the_last_place(dtype, unit):
    """From 16 to 32 these are the distances of neighbouring numbers."""
    ties = NearTies()
    ties.observe(torch.tensor([[1.0, 20.0, 20 - 3 * unit], [20.0, 1.0, 20 - 2 * unit]], dtype=dtype))
    ties.observe(torch.tensor([[20 - unit, 20.0, 20 - unit]], dtype=dtype))
    assert ties.result() == (unit, 2, [1, 2])


def test_scores_decide_and_logits_say_how_fine():
    logits = torch.tensor([[16.0, 8.0, 4.0]], dtype=torch.bfloat16)
    ties = NearTies()
    # A bias brings the second to within two units of the first, infinities tie, and a forced token leads by no end.
    for second in (16 - 0.25, 16 - 0.26):
        ties.observe(logits, torch.tensor([[16.0, second, 4.0]]))
    ties.observe(logits, torch.tensor([[math.inf, math.inf, 4.0]]))
    ties.observe(logits, torch.tensor([[3.0, -math.inf, -math.inf]]))
    assert ties.result() == (0.0, 2, [0, 2])


def test_nothing_recorded():
    assert NearTies().result() == (None, None, None)


@pytest.mark.parametrize("settings", [{}, {"repetition_penalty": 1.3}, {"output_scores": True}], ids=str)
@pytest.mark.parametrize("draft", ["random", "oracle"])
def test_statistics_know_the_smallest_gap(draft, settings, monkeypatch):
    target = tiny_target("llama")
    expected = target.generate(prompt(9), **GREEDY, **{**settings, "output_scores": True})
    if draft == "oracle":
        use_oracle(monkeypatch, expected.sequences)
    found = target.generate(prompt(9), assistant_model=tiny_drafter(target), **GREEDY, **settings).draft_statistics
    best = torch.cat(expected.scores).topk(2).values
    gaps = best[:, 0] - best[:, 1]
    assert found.smallest_gap == pytest.approx(float(gaps.min()), abs=1e-4)
    assert found.smallest_gap_token == int(gaps.argmin())
    assert found.near_ties == []


@pytest.mark.parametrize("draft", ["random", "oracle"])
def test_ties_are_found_at_their_places(draft, monkeypatch):
    target = copy.deepcopy(tiny_target("llama"))
    once = target.generate(prompt(9), **GREEDY).sequences[0, 9:].tolist()
    tied = once[3]
    other = next(token for token in range(64) if token not in once)
    with torch.no_grad():
        target.lm_head.weight[other] = target.lm_head.weight[tied]
    expected = target.generate(prompt(9), **GREEDY).sequences
    places = [place for place, token in enumerate(expected[0, 9:].tolist()) if token in (tied, other)]
    assert 0 < len(places) < NEW_TOKENS
    if draft == "oracle":
        use_oracle(monkeypatch, expected)
    output = target.generate(prompt(9), assistant_model=tiny_drafter(target), **GREEDY)
    assert output.draft_statistics.near_ties == places
    assert output.draft_statistics.smallest_gap == pytest.approx(0.0, abs=1e-5)


def test_a_sample_has_no_gaps():
    target = tiny_target("llama")
    found = target.generate(
        prompt(9), assistant_model=tiny_drafter(target), do_sample=True, max_new_tokens=8, **DICT
    ).draft_statistics
    assert (found.smallest_gap, found.smallest_gap_token, found.near_ties) == (None, None, None)


def test_statistics_print_as_one_line():
    statistics = DraftStatistics(
        rounds=25,
        drafted_tokens=200,
        accepted_tokens=39,
        new_tokens=64,
        tau=1.56,
        alpha=39 / 64,
        accepted_by_depth=[20, 12, 7],
        time={"target": 0.6, "drafter": 0.2, "other": 0.04},
        near_ties=list(range(64)),
    )
    line = "64 tokens in 25 rounds: 2.56 tokens a round, 61% drafted; 0.84 s: target 0.60, drafter 0.20, other 0.04"
    assert str(statistics) == repr(statistics) == f"DraftStatistics({line})"
    assert statistics.tokens_per_round == pytest.approx(2.56)
    # All fields are there as before.
    assert statistics["near_ties"] == statistics.near_ties and dict(statistics)["tau"] == 1.56


def test_statistics_without_rounds():
    assert str(DraftStatistics()) == "DraftStatistics(empty)"
    assert DraftStatistics().tokens_per_round is None
    target = tiny_target("llama")
    output = target.generate(
        prompt(9),
        assistant_model=tiny_drafter(target),
        max_new_tokens=1,
        do_sample=False,
        return_dict_in_generate=True,
    )
    assert str(output.draft_statistics).startswith("DraftStatistics(1 token in 0 rounds: 1.00 tokens a round, 0%")
