# Copyright 2026 The hf_falcon authors. Licensed under the Apache License, Version 2.0.
"""How much is drafted: what pays, and nothing where nothing pays."""

import math
import random
from dataclasses import replace

import pytest
import torch
from oracle import FreeDrafting, use_oracle
from tiny_models import prompt, tiny_drafter, tiny_target

from hf_falcon import FalconCandidateGenerator
from hf_falcon.core.costs import CostKey, Costs
from hf_falcon.core.draft_options import DraftOptions
from hf_falcon.core.policy import (
    AcceptanceStats,
    AdaptivePolicy,
    DraftDecision,
    DraftPolicy,
    PassCheck,
    PlainPolicy,
    RoundOutcome,
    RoundTime,
    acceptance_stats_of,
)
from hf_falcon.core.tree import Branches, DraftTree, DynamicRound, DynamicTree, chain

PATHS = Branches(torch.arange(2), torch.arange(2), torch.tensor([0.5, 0.2]).log())


def adaptive(stats=None, nodes=8, node_cost=0.05, pass_cost=0.1, **options) -> AdaptivePolicy:
    costs = Costs({0: 1.0, nodes: 1.0 + nodes * node_cost})
    costs._pass.value = costs._commit.value = pass_cost
    # As after some rounds.
    costs.observe_target(1, 1.0)
    costs.largest = nodes
    if stats is None:
        stats = AcceptanceStats()
        stats.drafted_rounds = 1
    options = DraftOptions(num_assistant_tokens=nodes, **options)
    return AdaptivePolicy(options, stats, costs, block_size=2)


def continues(decision: DraftDecision, branches: Branches = PATHS) -> bool:
    """Whether a second pass is drafted after these paths."""
    check = decision.check_pass(branches, branches.log_probs)
    return decision.probe_pass or check.continuation >= decision.pass_threshold


@pytest.mark.parametrize("rate", [1.0, 1.7, 4.0])
def test_verifies_the_nodes_that_pay(rate):
    draws, stats = random.Random(0), AcceptanceStats()
    stats.rate = rate
    for _ in range(50):
        probs = sorted((draws.random() ** 3 for _ in range(8)), reverse=True)
        gain = [sum(probs[:count]) - rate * (1 + 0.05 * count) for count in range(9)]
        assert adaptive(stats).decide().size(torch.tensor(probs).log()) == gain.index(max(gain))


def test_padding_gains_nothing():
    """In a batch the rows' gains are added: a row that has no nodes left must not ask for more of them."""
    padded = torch.tensor([0.5, 0.0, 0.0]).log()
    assert DraftPolicy(DraftOptions(), AcceptanceStats()).decide().expected_gain(padded).tolist() == [0, 1, 1, 1]
    assert adaptive().decide().expected_gain(padded).argmax() == 1
    assert PlainPolicy(DraftOptions(), AcceptanceStats()).decide().expected_gain(padded[1:]).tolist() == [0, 0, 0]


def test_kept_calibration_is_where_the_statistics_start():
    stats = AcceptanceStats()
    stats.depth(1).observe(1.0)
    known = stats.depth(1).value
    costs = Costs({0: 1.0, 8: 1.4})
    costs.observe_target(1, 1.0)
    policy = AdaptivePolicy(DraftOptions(draft_calibration=[0.5, 0.25]), stats, costs, block_size=1)
    # What this process has observed stays; the depth without an observation starts from what was kept.
    assert stats.depth(1).value == known
    decision = policy.decide()
    assert decision.correction(2) == pytest.approx(math.log(0.25))
    assert decision.correction(3) == decision.correction(4) == 0.0


@pytest.mark.parametrize("calibration, paused", [([], True), ([1.0, 1.0], False)])
def test_a_calibrated_drafter_is_believed_for_longer(calibration, paused):
    """Two rounds of which nothing was right pause another one."""
    stats, costs = AcceptanceStats(), Costs({0: 1.0, 8: 1.4})
    costs.observe_target(1, 1.0)
    policy = AdaptivePolicy(DraftOptions(draft_calibration=calibration), stats, costs, block_size=1)
    tree = chain(torch.arange(3))
    tree.log_probs = torch.tensor([1.0, 0.7, 0.5]).log()
    for _ in range(2):
        time = RoundTime(commit=0.25, drafting=0.25, passes=1, target=1.4, nodes=3)
        policy.update(RoundOutcome(policy.decide(), tree, torch.tensor([0]), 0, time=time))
    assert policy.decide().draft is not paused
    # What was observed counts from then on, in every call.
    share = stats.accepted_share.value
    AdaptivePolicy(DraftOptions(draft_calibration=calibration), stats, costs, block_size=1)
    assert stats.accepted_share.value == share


def test_nothing_is_verified_where_nothing_pays():
    assert adaptive(node_cost=0.5).decide().size(torch.tensor([0.1, 0.05]).log()) == 0


@pytest.mark.parametrize("pass_cost, expected", [(0.01, True), (0.9, False)])
def test_a_pass_must_pay(pass_cost, expected):
    assert continues(adaptive(pass_cost=pass_cost).decide()) is expected


def test_a_likely_lookup_needs_no_pass():
    branches = Branches(torch.arange(1), torch.arange(1), torch.tensor([0.9]).log())
    policy = adaptive()
    assert continues(policy.decide(), branches) and not continues(policy.decide(likely=0.98), branches)


@pytest.mark.parametrize(
    "node_cost, pass_cost, fewest",
    [(0.0, 0.0, 2), (0.05, 0.1, 3), (0.2, 0.1, 5), (0.42, 0.1, 55), (2.0, 0.1, 64)],
    ids=["free", "cheap", "dear", "half a step for each node", "nothing gains"],
)
def test_the_prompt_is_read_for_as_many_tokens_as_pay_for_it(node_cost, pass_cost, fewest):
    policy = adaptive(AcceptanceStats(), node_cost=node_cost, pass_cost=pass_cost)
    assert [tokens for tokens in range(100) if policy.begins(tokens)] == list(range(fewest, 100))
    # The options alone decide.
    assert DraftPolicy(DraftOptions(), AcceptanceStats()).begins(1)


def test_a_drafter_that_gains_more_than_expected_reads_the_prompt_for_fewer_tokens():
    stats = AcceptanceStats()
    stats.rate, policy = 1.5, adaptive(stats, node_cost=0.42)
    assert not policy.begins(16)
    stats.drafted_rounds = 20
    assert policy.begins(16) and not policy.begins(3)


@pytest.mark.parametrize("seconds, fewest", [(0.2, 1), (5.0, 12)], ids=["cheap", "dear"])
def test_a_prompt_that_was_read_shows_what_reading_costs(seconds, fewest):
    stats = AcceptanceStats()
    stats.drafted_rounds, policy = 1, adaptive(stats)
    time = RoundTime(reading=seconds, is_first=True, drafting=0.0, passes=0, target=1.0)
    for _ in range(8):
        tree = chain(torch.zeros(1, dtype=torch.long))
        policy.update(RoundOutcome(policy.decide(), tree, torch.arange(1), 0, time=time))
    # With what such a drafter gains at first.
    stats.rate, stats.drafted_rounds = 1.0, 0
    assert [tokens for tokens in range(100) if policy.begins(tokens)] == list(range(fewest, 100))


@pytest.mark.parametrize("threshold, expected", [(0.0, True), (0.4, True), (0.6, False)])
def test_a_constant_policy_asks_the_likeliest_path(threshold, expected):
    options = DraftOptions(assistant_confidence_threshold=threshold)
    decision = DraftPolicy(options, AcceptanceStats()).decide()
    assert continues(decision) is expected
    assert continues(decision, Branches(torch.arange(2), torch.arange(2)))
    assert decision.size(torch.tensor([0.5, 0.1, 0.01]).log()) == 3


def run_rounds(policy: AdaptivePolicy, rounds: int, accepted: int, drafter_seconds: float) -> int:
    """Plays rounds in which `accepted` tokens of a chain of 4 are right; returns how many were drafted."""
    drafted = 0
    for _ in range(rounds):
        decision = policy.decide()
        if decision.draft:
            drafted += 1
            tree = DraftTree(
                torch.arange(5), torch.tensor([0, 0, 1, 2, 3]), torch.arange(5), torch.ones(5, 5).tril() > 0
            )
            corrections = torch.tensor([0.0, *(decision.correction(depth) for depth in range(1, 5))])
            tree.log_probs = torch.tensor([1.0, 0.9, 0.8, 0.7, 0.6]).log() + corrections.cumsum(dim=0)
            time = RoundTime(commit=drafter_seconds, drafting=3 * drafter_seconds, passes=3, target=1.2, nodes=5)
        else:
            tree, time = chain(torch.zeros(1, dtype=torch.long)), RoundTime(target=1.0)
        right = accepted if len(tree) > 1 else 0
        policy.update(RoundOutcome(decision, tree, torch.arange(right + 1), right, time=time))
    return drafted


def test_drafting_with_a_useless_drafter_pauses():
    """Finding out, and probing again now and then, costs little."""
    policy = adaptive(node_cost=0.02)
    at_first = run_rounds(policy, 100, accepted=0, drafter_seconds=0.05)
    assert 2 <= at_first <= 20
    # Each loses 0.35 tokens.
    assert run_rounds(policy, 1000, accepted=0, drafter_seconds=0.05) <= 40


def test_a_drafter_that_becomes_useful_is_used_again():
    policy = adaptive(node_cost=0.02)
    run_rounds(policy, 300, accepted=0, drafter_seconds=0.05)
    run_rounds(policy, 300, accepted=3, drafter_seconds=0.05)
    # Plain steps give the unit of the costs.
    assert run_rounds(policy, 100, accepted=3, drafter_seconds=0.05) >= 97


def test_drafting_with_a_drafter_that_becomes_useless_pauses():
    policy = adaptive(node_cost=0.02)
    assert run_rounds(policy, 300, accepted=3, drafter_seconds=0.05) >= 290
    assert run_rounds(policy, 100, accepted=0, drafter_seconds=0.05) < 80
    assert run_rounds(policy, 300, accepted=0, drafter_seconds=0.05) <= 20


def test_drafting_does_not_pause_after_bad_luck():
    """A drafter that is right about one token in a round, at times none for several rounds, pays in the mean."""
    policy, draws = adaptive(node_cost=0.02), random.Random(0)
    accepted = [draws.choice((0, 0, 0, 2, 3)) for _ in range(400)]
    drafted = sum(run_rounds(policy, 1, accepted=each, drafter_seconds=0.07) for each in accepted)
    assert drafted > 390


def test_drafting_with_a_costly_drafter_pauses():
    assert run_rounds(adaptive(node_cost=0.02), 200, accepted=1, drafter_seconds=0.5) < 30


def test_probabilities_are_calibrated():
    """A drafter that is sure and wrong has its probabilities lowered; those of a right one stay."""
    policy = adaptive()
    assert policy.decide().correction(1) == 0.0
    run_rounds(policy, 200, accepted=1, drafter_seconds=0.0)
    assert policy.decide().correction(1) == 0.0 and policy.decide().correction(2) < math.log(0.2)


def test_the_gain_of_a_pass_is_observed():
    tree = chain(torch.zeros(1, dtype=torch.long))
    stats = AcceptanceStats()
    for _ in range(100):
        policy = adaptive(stats)
        checks = [PassCheck(0.8, 0.5), PassCheck(0.4, 0.5 + 0.8 * 0.25)]
        time = RoundTime(commit=0.1, drafting=0.1, passes=1, target=1.0)
        policy.update(RoundOutcome(policy.decide(), tree, torch.arange(1), 0, checks=checks, time=time))
    assert stats.pass_gain == pytest.approx(0.25, abs=1e-3)


def test_what_never_happens_keeps_a_least_share():
    stats = AcceptanceStats()
    for _ in range(10_000):
        stats.depth(1).observe(0.0)
    assert adaptive(stats).decide().correction(1) == pytest.approx(math.log(1e-3))


def test_likely_text_is_not_the_drafters():
    """Where what was looked up decides the outcome, the round says nothing of the drafter's cost and credit."""
    for likely, expected in ((0.0, 1), (0.2, 1), (0.9, 0)):
        stats = AcceptanceStats()
        policy = adaptive(stats)
        policy.decide()
        tree, time = chain(torch.zeros(1, dtype=torch.long)), RoundTime(0.1, 0.1, 1, 1.0)
        policy.update(RoundOutcome(DraftDecision(likely=likely), tree, torch.arange(1), 0, time=time))
        assert stats.drafted_rounds == expected


def grown(levels: int, seed: int) -> DynamicRound:
    """A round of a dynamic tree with random candidates."""
    draws = random.Random(seed)
    tree_round = DynamicTree(num_nodes=100, max_depth=5, max_children=3, width=2).start(5)
    rows = 1
    for _ in range(levels):
        log_probs = torch.tensor([sorted((-draws.random() for _ in range(3)), reverse=True) for _ in range(rows)])
        tokens = torch.tensor([draws.sample(range(6), 3) for _ in range(rows)])
        tree_round.add(log_probs, tokens)
        branches = tree_round.branches()
        rows = branches.rows.shape[0] if branches else 0
    return tree_round


def paths_of(tree: DraftTree) -> dict[tuple[int, ...], float]:
    """Every node as the tokens that lead to it, with its log-probability."""
    found: dict[tuple[int, ...], float] = {}
    if len(tree) == 1:
        return {(): 0.0}
    for node in range(len(tree)):
        on_path = tree.visible[node].nonzero()[:, 0]
        assert tree.depths[on_path].tolist() == list(range(len(on_path)))
        found[tuple(tree.token_ids[on_path[1:]].tolist())] = float(tree.log_probs[node])
    assert len(found) == len(tree)
    return found


def test_nodes_join_the_tree():
    draws, root = random.Random(1), torch.tensor([9])
    shared = 0
    for seed in range(200):
        levels, count = draws.randrange(4), draws.randrange(1, 9)
        before = paths_of(grown(levels, seed).finish(root))
        # Nodes of a tree of their own. Half of them begin where a drafted path does.
        paths = {(): 0.0}
        for _ in range(count):
            path = (*draws.choice(list(paths)), draws.randrange(6))
            if draws.random() < 0.5:
                path = draws.choice(list(before)) or path
            for length in range(1, len(path) + 1):
                paths.setdefault(path[:length], paths[path[: length - 1]] - draws.random())
        nodes = [path for path in paths if path]
        tree_round = grown(levels, seed)
        parents = [nodes.index(path[:-1]) if path[:-1] else -1 for path in nodes]
        tree_round.add_nodes([path[-1] for path in nodes], parents, [paths[path] for path in nodes])
        expected = dict(before)
        for path in nodes:
            shared += path in before
            expected[path] = max(before.get(path, -math.inf), paths[path])
        found = paths_of(tree_round.finish(root))
        assert found == pytest.approx(expected)
        # The best of them are a tree, too: no node without its parent.
        small = paths_of(tree_round.finish(root, 3))
        assert all(nodes[:-1] in small for nodes in small if nodes)
    assert shared > 50


def test_passes_are_probed_again():
    """The gain of a pass is observed only where one runs: bad luck must not end passes for good."""
    stats, answers = AcceptanceStats(), []
    stats.pass_gain = 0.01
    policy, tree = adaptive(stats), chain(torch.zeros(1, dtype=torch.long))
    for _ in range(20):
        decision = policy.decide()
        answers.append(continues(decision))
        checks = [decision.check_pass(PATHS, PATHS.log_probs)]
        time = RoundTime(commit=0.1, drafting=0.0, passes=0, target=1.0)
        policy.update(RoundOutcome(decision, tree, torch.arange(1), 0, checks=checks, time=time))
    assert answers == [*[False] * 8, True] * 2 + [False] * 2


def test_other_costs_share_probabilities_and_nothing_else():
    usual = CostKey.of(tiny_target("llama"), 100, 8)
    stats = AcceptanceStats()
    assert stats.under(usual) is stats
    for other in ({"rows": 2}, {"packed": True}, {"compiled": (1, 8)}, {"packed": True, "compiled": (1, 8)}):
        found = stats.under(usual._replace(**other))
        assert found is not stats and found is stats.under(usual._replace(context=8192, **other))
        found.depth(1).observe(1.0)
        found.rate = 5.0
        assert stats.depths is found.depths and stats.continuation is found.continuation
    assert stats.rate == AcceptanceStats().rate


@pytest.mark.parametrize("block_size", [1, 2])
def test_drafts_all_it_can_where_that_is_free(block_size, monkeypatch):
    target, ids = tiny_target("llama"), prompt(9)
    expected = target.generate(ids, max_new_tokens=40, do_sample=False)
    monkeypatch.setattr("hf_falcon.core.costs.Costs", FreeDrafting)
    use_oracle(monkeypatch, expected)
    drafter = tiny_drafter(
        target, block_size, num_assistant_tokens_schedule="heuristic", num_assistant_tokens=20, num_draft_passes=8
    )
    acceptance_stats_of(drafter, target).costs.clear()
    options = {"assistant_model": drafter, "max_new_tokens": 40, "do_sample": False, "return_dict_in_generate": True}
    output = target.generate(ids, **options)
    assert output.sequences.tolist() == expected.tolist()
    assert output.draft_statistics.tau > 3


def test_plain_decoding_where_drafting_never_pays(monkeypatch):
    """The drafter reads nothing but in probes; the features that it has missed are there when it is probed again."""
    target, ids = tiny_target("llama"), prompt(9)

    class Costly(FreeDrafting):
        commit = draft_pass = 0.9

    monkeypatch.setattr("hf_falcon.core.costs.Costs", Costly)
    commits = []
    commit = FalconCandidateGenerator.commit

    def counted(self, features, next_token_ids, *args):
        commits.append(features.shape[1])
        assert features.shape[1] == next_token_ids.shape[1]
        return commit(self, features, next_token_ids, *args)

    monkeypatch.setattr(FalconCandidateGenerator, "commit", counted)
    drafter = tiny_drafter(target, num_assistant_tokens_schedule="heuristic", num_assistant_tokens=6)
    acceptance_stats_of(drafter, target).costs.clear()
    expected = target.generate(ids, max_new_tokens=150, do_sample=False)
    output = target.generate(
        ids, assistant_model=drafter, max_new_tokens=150, do_sample=False, return_dict_in_generate=True
    )
    assert output.sequences.tolist() == expected.tolist()
    assert 1 < len(commits) < 25 and max(commits[1:]) > 10
    assert sum(commits) <= expected.shape[1] - 1


@pytest.mark.parametrize("tokens, reads", [(16, False), (80, True)])
def test_a_short_answer_is_written_without_the_drafter_where_its_pass_over_the_prompt_does_not_pay(
    tokens, reads, monkeypatch
):
    target, ids = tiny_target("llama"), prompt(9)

    class Steep(FreeDrafting):
        commit = draft_pass = 0.1

        def target(self, max_nodes):
            return [1.0 + 0.42 * nodes for nodes in range(max_nodes + 1)]

    monkeypatch.setattr("hf_falcon.core.costs.Costs", Steep)
    expected = target.generate(ids, max_new_tokens=tokens, do_sample=False)
    use_oracle(monkeypatch, expected)
    drafter = tiny_drafter(target, num_assistant_tokens_schedule="heuristic", num_assistant_tokens=6)
    acceptance_stats_of(drafter, target).costs.clear()
    options = {"assistant_model": drafter, "max_new_tokens": tokens, "do_sample": False}
    output = target.generate(ids, **options, return_dict_in_generate=True)
    assert output.sequences.tolist() == expected.tolist()
    assert (acceptance_stats_of(drafter, target).drafted_rounds > 0) is reads


def test_reading_a_text_for_a_probe_is_paid_by_later_calls():
    """In the same call it is no reason not to probe: it was read."""
    stats = AcceptanceStats()
    stats.drafted_rounds = 1
    policy = adaptive(stats)
    assert policy.decide().draft
    time = RoundTime(reading=40.0, is_first=True, drafting=0.0, passes=0, target=1.0)
    tree = chain(torch.zeros(1, dtype=torch.long))
    # Each row of a batch has a prompt.
    for _ in range(2):
        policy.update(RoundOutcome(policy.decide(), tree, torch.arange(1), 0, time=time))
    assert policy.decide().draft and not adaptive(stats).decide().draft
    stats.credit += 40.0
    # What a pause left is a part of the next probe.
    later = replace(time, reading=1.0, is_first=False)
    policy.update(RoundOutcome(policy.decide(), tree, torch.arange(1), 0, time=later))
    assert not adaptive(stats).decide().draft
    # A hundredth of the time.
    assert 3000 < sum(run_rounds(adaptive(stats), 1, 0, 0.05) == 0 for _ in range(5000))


def test_a_drafter_that_overflows_once():
    stats = AcceptanceStats()
    stats.drafted_rounds = 1
    policy, tree = adaptive(stats), chain(torch.zeros(1, dtype=torch.long))
    before = stats.pass_gain
    checks = [PassCheck(0.8, 0.5), PassCheck(0.4, 0.7), PassCheck(math.nan, math.nan)]
    time = RoundTime(commit=0.1, drafting=0.1, passes=2, target=1.0)
    policy.update(RoundOutcome(policy.decide(), tree, torch.arange(1), 0, checks=checks, time=time))
    assert before != stats.pass_gain < 1.0 and stats.continuations == [0.8, 0.4]
    assert policy.decide().pass_threshold < math.inf


def test_an_interrupted_first_tree_does_not_end_drafting():
    """The policy itself chooses what is timed: with such costs no tree runs, and only plain steps are timed."""
    stats = AcceptanceStats()
    stats.drafted_rounds = 1
    costs = Costs({0: 1.0, 8: 1.2})
    policy = AdaptivePolicy(DraftOptions(num_assistant_tokens=8), stats, costs, block_size=1)
    costs.observe_target(1, 1.0)
    costs.observe_target(3, 60.0)
    probs = torch.tensor([0.8, 0.5, 0.3]).log()
    assert policy.decide().size(probs) == 0
    for _ in range(2100):
        time = RoundTime(commit=0.05, drafting=0.0, passes=0, target=1.0)
        tree = chain(torch.zeros(1, dtype=torch.long))
        policy.update(RoundOutcome(policy.decide(), tree, torch.arange(1), 0, time=time))
    assert policy.decide().size(probs) > 0
