# Copyright 2026 The hf_falcon authors. Licensed under the Apache License, Version 2.0.
"""Statistics print as one line, and say how many tokens a round brings."""

import pytest
from tiny_models import prompt, tiny_drafter, tiny_target

from hf_falcon import DraftStatistics


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
