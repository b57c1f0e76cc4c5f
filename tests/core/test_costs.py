# Copyright 2026 The hf_falcon authors. Licensed under the Apache License, Version 2.0.
"""What a round costs: measured, kept, and followed from round to round."""

import json

import pytest
import torch
from oracle import FreeDrafting
from tiny_models import TARGETS, prompt, tiny_drafter, tiny_target

from hf_falcon.core import costs
from hf_falcon.core.costs import CostKey, Costs


@pytest.fixture
def clock(monkeypatch):
    """A clock that only the test moves."""

    class Clock:
        now = 0.0

        def perf_counter(self):
            return self.now

    clock = Clock()
    monkeypatch.setattr(costs, "time", clock)
    return clock


def test_measures_the_median_time_of_each_size(clock):
    ran = []

    def forward(nodes):
        ran.append(nodes)
        # Cold at first, then once interrupted, and once alone on a machine that others share.
        clock.now += (1e-3 + 1e-4 * nodes) * (3.0, 1.0, 2.0, 0.5 if nodes == 7 else 1.0, 1.0)[ran.count(nodes) - 1]

    found = costs.measure(forward, 12, torch.device("cpu"))
    assert list(found) == [0, 1, 3, 5, 7, 11, 12]
    assert ran[:7] == [0, 7, 12, 1, 3, 5, 11] and sorted(ran) == sorted([*found] * 5)
    assert found == pytest.approx({nodes: 1e-3 + 1e-4 * nodes for nodes in found})


def test_small_trees_are_timed_most(clock):
    """Where the time is short, every size gets a part of it."""
    ran = []

    def forward(nodes):
        ran.append(nodes)
        clock.now += 0.04 * (1 + nodes / 8)

    costs.measure(forward, 32, torch.device("cpu"), seconds=2.0)
    counts = [ran.count(nodes) for nodes in (0, 7, 15, 32)]
    assert counts == sorted(counts, reverse=True) and counts[0] >= 2 * counts[-1] > 0


@pytest.mark.parametrize("seconds, sizes", [(0.5, [0, 3]), (2.5, [0, 1, 3]), (3.5, [0, 1, 3]), (9.0, [0, 1, 3])])
def test_measuring_ends_in_time(clock, seconds, sizes):
    """The ends of the curve are measured in any case."""

    def forward(nodes):
        clock.now += 1.0

    assert costs.measure(forward, 3, torch.device("cpu"), seconds) == dict.fromkeys(sizes, 1.0)
    assert clock.now <= max(2.0, seconds + 1.0)


def test_a_large_tree_that_takes_long(clock):
    """As in bfloat16 without instructions for it: a small tree is timed, too, or none would seem to pay."""

    def forward(nodes):
        clock.now += 0.02 if nodes < 8 else 0.5

    assert costs.measure(forward, 32, torch.device("cpu"), tokens=16) == {0: 0.02, 7: 0.02, 32: 0.5}


def test_interpolates():
    found = Costs({0: 2.0, 4: 3.0, 8: 6.0})
    assert found.target(10) == pytest.approx([1, 1.125, 1.25, 1.375, 1.5, 1.875, 2.25, 2.625, 3.0, 3.375, 3.75])
    assert Costs({0: 2.0}).target(2) == [1.0, 1.0, 1.0]
    assert Costs({0: 2.0, 1: 1.0, 2: 3.0}).target(2) == [1.0, 1.0, 1.5]
    # The machine was busy while the trees of 2 and of 4 nodes were timed.
    assert Costs({0: 1.0, 2: 4.0, 4: 3.0, 6: 2.0, 8: 2.5}).target(8) == [1.0, 1.5, *[2.0] * 5, 2.25, 2.5]


def test_filled_trees_cost_what_the_full_one_does():
    seconds = {0: 1.0, 1: 1.4, 3: 1.3, 7: 1.5, 11: 2.5, 15: 2.2, 23: 4.0}
    found = costs.in_steps(seconds, (1, 8, 16))
    expected = {0: 1.0} | dict.fromkeys(range(1, 8), 1.3) | dict.fromkeys(range(8, 16), 2.2) | {23: 4.0}
    assert found == expected
    assert costs.in_steps(seconds, ()) == seconds
    # A single token is not filled up, and of a size that no measured tree is filled up to nothing is known.
    assert costs.in_steps({0: 1.0, 2: 3.0, 3: 2.0}, (4, 6)) == {0: 1.0, 1: 2.0, 2: 2.0, 3: 2.0}
    assert Costs(found).target(16) == pytest.approx([1.0, *[1.3] * 7, *[2.2] * 8, 2.2 + 1.8 / 8])


def test_follows_the_machine():
    """Twice as slow a machine, and drafting with it: the pass costs what it did, in plain steps."""
    found = Costs({0: 1.0, 8: 1.5})
    for _ in range(200):
        found.observe_target(1.5, seconds=3.0)
        found.observe_drafting(commit_seconds=0.2, pass_seconds=0.6, passes=3)
    assert found.commit == pytest.approx(0.1, rel=1e-3) and found.draft_pass == pytest.approx(0.1, rel=1e-3)
    before = found.commit
    found.observe_drafting(commit_seconds=None, pass_seconds=0.6, passes=3)
    assert found.commit == before


def test_an_interruption_says_little():
    found = Costs({0: 1.0})
    found.observe_target(1.0, seconds=1000.0)
    found.observe_drafting(1000.0, 1000.0, passes=1)
    assert found._plain_seconds < 1.2 and found.draft_pass < 0.3


def cost_key(target, context=100, max_nodes=8):
    return CostKey.of(target, context, max_nodes)


def test_kept_on_disk(tmp_path, monkeypatch):
    monkeypatch.setenv("HF_FALCON_CACHE", str(tmp_path / "own"))
    target, other = tiny_target("llama"), tiny_target("qwen2")
    seconds = {0: 0.5, 8: 1.25}
    assert costs.load(target, cost_key(target)) is None
    costs.save(target, cost_key(target), seconds)
    assert costs.load(target, cost_key(target)) == seconds
    assert costs.load(target, cost_key(target, context=2048)) == seconds
    for key in (cost_key(target, context=2049), cost_key(target, max_nodes=9)):
        assert costs.load(target, key) is None
    assert costs.load(other, cost_key(other)) is None
    [file] = (tmp_path / "own" / "costs").iterdir()
    for broken in ("", "{}", "[1]", '{"seconds": {"0": "x"}}', '{"seconds": {"1": 1.0}}', '{"seconds": {"0": -1}}'):
        file.write_text(broken)
        assert costs.load(target, cost_key(target)) is None


def test_no_place_to_keep_them(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("HF_FALCON_CACHE", str(tmp_path / "file"))
    target = tiny_target("llama")
    costs.save(target, cost_key(target), {0: 1.0})
    assert costs.load(target, cost_key(target)) is None


def test_measured_once_and_kept(tmp_path, monkeypatch):
    """The first call measures; another target object of the same weights reads what was measured."""
    monkeypatch.setenv("HF_FALCON_CACHE", str(tmp_path))
    made = []
    monkeypatch.setattr(
        "hf_falcon.core.costs.measure",
        lambda forward, nodes, device, tokens: made.append(nodes) or {0: 1.0, nodes: 1.0},
    )
    monkeypatch.setattr("hf_falcon.core.costs.still_valid", lambda seconds, forward, device: True)
    options = {"num_assistant_tokens_schedule": "heuristic", "num_assistant_tokens": 6}
    llama = TARGETS["llama"]()
    for target in (llama, llama, TARGETS["llama"](), TARGETS["qwen2"]()):
        target.generate(prompt(5), assistant_model=tiny_drafter(target, **options), max_new_tokens=12, do_sample=False)
    assert made == [6, 6]
    kept = [json.loads(file.read_text()) for file in (tmp_path / "costs").iterdir()]
    assert len(kept) == 2 and all(each["max_nodes"] == 6 for each in kept)


def test_a_short_call_does_not_measure(tmp_path, monkeypatch):
    """It would take longer than the call; costs that are kept are used as they are."""
    monkeypatch.setenv("HF_FALCON_CACHE", str(tmp_path))
    target = TARGETS["llama"]()
    key = CostKey.of(target, 5, 6)
    forwards: list[int] = []
    known: dict[CostKey, Costs] = {}
    assert costs.costs_of(target, key, known, forwards.append, tokens=9) is None
    assert not forwards and not known
    costs.save(target, key, {0: 1.0, 6: 1.5})
    assert costs.costs_of(target, key, known, forwards.append, tokens=9).seconds == {0: 1.0, 6: 1.5}
    assert not forwards and list(known) == [key]


def test_measuring_ends_with_the_call(clock):
    """No longer than the tokens that are left would take plainly."""

    def forward(nodes):
        clock.now += 0.01

    costs.measure(forward, 32, torch.device("cpu"), tokens=20)
    assert 0.2 <= clock.now < 0.22


def test_costs_stand_still_while_timings_scatter():
    """In bfloat16 the size of a tree decides how logits round: timing alone must not change decisions."""
    found = Costs({0: 1.0, 8: 1.5})
    for seconds in (0.08, 0.12) * 50:
        found.observe_drafting(seconds, seconds, passes=1)
        assert (found.commit, found.draft_pass) == (0.1, 0.1)
    for _ in range(100):
        found.observe_drafting(0.4, 0.4, passes=1)
    assert 0.25 < found.draft_pass < 0.6 and found.draft_pass == found.commit


@pytest.mark.parametrize(
    "kept, true",
    [
        ({0: 1.0, 7: 1.5, 32: 3.0}, True),
        ({0: 0.1, 7: 0.15, 32: 9.0}, True),
        ({0: 1.0, 7: 2.5}, False),
        ({0: 1.0, 3: 2.2, 7: 1.5, 32: 3.0}, False),
        ({0: 1.0, 5: 1.0, 31: 1.6}, False),
        ({0: 3.0}, True),
    ],
)
def test_kept_times_of_a_busy_moment_do_not_hold(kept, true, monkeypatch):
    """Only how much longer several nodes take than one counts: the machine is faster now, or slower."""
    now = [0.0]

    def forward(nodes):
        now[0] += 2.0 if nodes == 0 else 3.0

    monkeypatch.setattr(costs.time, "perf_counter", lambda: now[0])
    assert costs.still_valid(kept, forward, torch.device("cpu")) == true


def test_times_that_do_not_hold_are_measured_anew(tmp_path, monkeypatch):
    monkeypatch.setenv("HF_FALCON_CACHE", str(tmp_path))
    target = TARGETS["llama"]()
    drafter = tiny_drafter(target, num_assistant_tokens_schedule="heuristic", num_assistant_tokens=6)
    costs.save(target, costs.CostKey.of(target, 5, 6), {0: 1.0, 6: 50.0})
    monkeypatch.setattr("hf_falcon.core.costs.measure", lambda forward, nodes, device, tokens: {0: 1.0, nodes: 1.5})
    target.generate(prompt(5), assistant_model=drafter, max_new_tokens=12, do_sample=False)
    assert costs.load(target, costs.CostKey.of(target, 5, 6)) == {0: 1.0, 6: 1.5}


def test_the_prompts_commit_is_no_rounds(tmp_path, monkeypatch):
    """The first commit has the whole prompt; what it takes is not held against the rounds that follow."""
    seen = []

    class Recorded(FreeDrafting):
        def observe_drafting(self, commit_seconds, pass_seconds, passes):
            seen.append(commit_seconds)

    monkeypatch.setattr("hf_falcon.core.costs.Costs", Recorded)
    target = TARGETS["llama"]()
    drafter = tiny_drafter(target, num_assistant_tokens_schedule="heuristic", num_assistant_tokens=6)
    target.generate(prompt(40), assistant_model=drafter, max_new_tokens=12, do_sample=False)
    assert len(seen) > 2 and seen[0] is None and all(seconds > 0 for seconds in seen[1:])


def test_a_dry_run_leaves_no_trace():
    """Measuring runs the target on nonsense; text and cache are as without it."""
    target, ids = tiny_target("qwen2-mixed"), prompt(30)
    options = {"max_new_tokens": 20, "do_sample": False, "return_dict_in_generate": True}
    expected = target.generate(ids, **options)
    drafter = tiny_drafter(target, num_assistant_tokens_schedule="heuristic", num_assistant_tokens=40)
    found = target.generate(ids, assistant_model=drafter, **options)
    assert found.sequences.tolist() == expected.sequences.tolist()
    for layer, reference in zip(found.past_key_values.layers, expected.past_key_values.layers):
        torch.testing.assert_close(layer.keys[..., -5:, :], reference.keys[..., -5:, :])
