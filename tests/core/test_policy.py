# Copyright 2026 The hf_falcon authors. Licensed under the Apache License, Version 2.0.
"""How much is drafted: what pays, and nothing where nothing pays."""

import math
import random

import pytest
import torch
from oracle import FreeDrafting, use_oracle
from tiny_models import prompt, tiny_drafter, tiny_target

from hf_falcon import FalconCandidateGenerator
from hf_falcon.core.candidate_generator import LookupMatch
from hf_falcon.core.costs import CostKey, Costs
from hf_falcon.core.draft_options import DraftOptions
from hf_falcon.core.policy import AcceptanceStats, AdaptivePolicy, RoundTime, acceptance_stats_of
from hf_falcon.core.tree import Branches, DraftTree, DynamicRound, DynamicTree, single_node

CPU = torch.device("cpu")
NO_GUESS = LookupMatch([], 0)


def pace(experience=None, nodes=8, node_cost=0.05, pass_cost=0.1) -> AdaptivePolicy:
    costs = Costs({0: 1.0, nodes: 1.0 + nodes * node_cost})
    costs.draft_pass = costs.commit = pass_cost
    made = AdaptivePolicy(DraftOptions(num_assistant_tokens=nodes), experience or AcceptanceStats(), CPU, costs)
    made.guess(NO_GUESS)
    return made


@pytest.mark.parametrize("rate", [1.0, 1.7, 4.0])
def test_verifies_the_nodes_that_pay(rate):
    draws, experience = random.Random(0), AcceptanceStats()
    experience.rate = rate
    for _ in range(50):
        probs = sorted((draws.random() ** 3 for _ in range(8)), reverse=True)
        worth = [sum(probs[:count]) - rate * (1 + 0.05 * count) for count in range(9)]
        assert pace(experience).size(torch.tensor(probs).log()) == worth.index(max(worth))


def test_kept_calibration_is_where_learning_starts():
    experience = AcceptanceStats()
    experience.depth(1).observe(1.0)
    learnt = experience.depth(1).value
    options, costs = DraftOptions(draft_calibration=[0.5, 0.25]), Costs({0: 1.0, 8: 1.4})
    made = AdaptivePolicy(options, experience, CPU, costs)
    # What this process has learnt stays; the depth of which it knows nothing starts from what was kept.
    assert experience.depth(1).value == learnt
    assert made.correction(2) == pytest.approx(math.log(0.25)) and made.correction(3) == 0.0


def test_nothing_is_verified_where_nothing_pays():
    assert pace(node_cost=0.5).size(torch.tensor([0.1, 0.05]).log()) == 0


@pytest.mark.parametrize("pass_cost, expected", [(0.01, True), (0.9, False)])
def test_a_pass_must_pay(pass_cost, expected):
    branches = Branches(torch.arange(2), torch.arange(2), torch.tensor([0.5, 0.2]).log())
    assert pace(pass_cost=pass_cost).another_pass(branches, torch.tensor([0.5, 0.2]).log()) is expected


def test_a_likely_guess_needs_no_pass():
    branches, best = Branches(torch.arange(1), torch.arange(1), torch.tensor([0.9]).log()), torch.tensor([0.9]).log()
    sure = pace()
    assert sure.another_pass(branches, best)
    sure.guess(LookupMatch([5, 6], 32))
    assert not sure.another_pass(branches, best)


def run_rounds(made: AdaptivePolicy, rounds: int, accepted: int, drafter_seconds: float) -> int:
    """Plays rounds in which `accepted` tokens of a chain of 4 are right; returns how many were drafted."""
    drafted = 0
    for _ in range(rounds):
        guess = made.guess(NO_GUESS)
        if made.drafts(guess):
            drafted += 1
            tree = DraftTree(
                torch.arange(5), torch.tensor([0, 0, 1, 2, 3]), torch.arange(5), torch.ones(5, 5).tril() > 0
            )
            corrections = torch.tensor([0.0, *(made.correction(depth) for depth in range(1, 5))])
            tree.log_probs = torch.tensor([1.0, 0.9, 0.8, 0.7, 0.6]).log() + corrections.cumsum(dim=0)
            time = RoundTime(commit=drafter_seconds, drafting=3 * drafter_seconds, passes=3, target=1.2)
        else:
            tree, time = single_node(torch.zeros(1, dtype=torch.long)), RoundTime(target=1.0)
        right = accepted if len(tree) > 1 else 0
        made.observe(tree, torch.arange(right + 1), list(range(right + 1)), right, time)
    return drafted


def test_a_useless_drafter_rests():
    """What it costs to find out, and to look again now and then, is little."""
    made = pace(node_cost=0.02)
    at_first = run_rounds(made, 100, accepted=0, drafter_seconds=0.05)
    assert 2 <= at_first <= 20
    assert run_rounds(made, 1000, accepted=0, drafter_seconds=0.05) <= 12


def test_a_drafter_that_becomes_useful_is_used_again():
    made = pace(node_cost=0.02)
    run_rounds(made, 300, accepted=0, drafter_seconds=0.05)
    run_rounds(made, 300, accepted=3, drafter_seconds=0.05)
    assert run_rounds(made, 100, accepted=3, drafter_seconds=0.05) == 100


def test_a_drafter_that_becomes_useless_rests():
    made = pace(node_cost=0.02)
    assert run_rounds(made, 300, accepted=3, drafter_seconds=0.05) == 300
    assert run_rounds(made, 100, accepted=0, drafter_seconds=0.05) < 80
    assert run_rounds(made, 300, accepted=0, drafter_seconds=0.05) <= 12


def test_bad_luck_is_no_reason_to_rest():
    """A drafter that is right about one token in a round, at times none for several rounds, pays in the mean."""
    made, draws = pace(node_cost=0.02), random.Random(0)
    accepted = [draws.choice((0, 0, 0, 2, 3)) for _ in range(400)]
    drafted = sum(run_rounds(made, 1, accepted=each, drafter_seconds=0.07) for each in accepted)
    assert drafted > 390


def test_a_costly_drafter_rests():
    assert run_rounds(pace(node_cost=0.02), 200, accepted=1, drafter_seconds=0.5) < 30


def test_probabilities_are_corrected():
    """A drafter that is sure of itself and wrong is believed less; one that is right is believed."""
    sure = pace()
    assert sure.correction(1) == 0.0
    run_rounds(sure, 200, accepted=1, drafter_seconds=0.0)
    assert sure.correction(1) == 0.0 and sure.correction(2) < math.log(0.2)


def test_matches_are_learnt():
    experience = AcceptanceStats()
    made = pace(experience)
    before = experience.match(3).value
    root = single_node(torch.zeros(1, dtype=torch.long))
    for _ in range(100):
        made.guess(LookupMatch([7, 8, 9], 3))
        made.observe(root, torch.arange(1), [7], 0, RoundTime(target=1.0))
    assert (
        experience.match(3).value > max(before, 0.9) and experience.match(4).value == AcceptanceStats().match(4).value
    )
    for _ in range(100):
        made.guess(LookupMatch([7, 8, 9], 3))
        made.observe(root, torch.arange(1), [1], 0, RoundTime(target=1.0))
    assert experience.match(3).value < before


def test_what_never_happens_keeps_a_least_share():
    experience = AcceptanceStats()
    for share in (experience.match(2), experience.depth(1)):
        for _ in range(10_000):
            share.observe(0.0)
    made = pace(experience)
    assert made.guess(LookupMatch([4], 2)).first == pytest.approx(1e-3)
    assert made.correction(1) == pytest.approx(math.log(1e-3))


def test_a_guess_grows_less_likely():
    guess = pace().guess(LookupMatch([4, 5, 6], 2))
    assert guess.token_ids.tolist() == [4, 5, 6] and guess.first == pytest.approx(0.47)
    assert guess.log_probs.exp().tolist() == pytest.approx([0.47, 0.47 * 0.57, 0.47 * 0.57 * 0.73])


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


def test_a_path_joins_the_tree():
    draws, root = random.Random(1), torch.tensor([9])
    shared = 0
    for seed in range(200):
        levels, length = draws.randrange(4), draws.randrange(1, 7)
        before = paths_of(grown(levels, seed).finish(root))
        tokens = [draws.randrange(6) for _ in range(length)]
        # Half of them begin as a drafted path does.
        if draws.random() < 0.5:
            tokens = [*draws.choice(list(before)), *tokens][:length]
        log_probs = [-0.2 * (place + 1) for place in range(length)]
        tree_round = grown(levels, seed)
        tree_round.add_path(torch.tensor(tokens), torch.tensor(log_probs))
        path = {tuple(tokens[: place + 1]): log_probs[place] for place in range(length)}
        expected = dict(before)
        for nodes, value in path.items():
            shared += nodes in before
            expected[nodes] = max(before.get(nodes, -math.inf), value)
        found = paths_of(tree_round.finish(root))
        assert found == pytest.approx(expected)
        # The best of them are a tree, too: no node without its parent.
        small = paths_of(tree_round.finish(root, lambda best: min(3, len(best))))
        assert all(nodes[:-1] in small for nodes in small if nodes)
    assert shared > 50


def test_passes_are_tried_again():
    """What they bring is seen where there are some: bad luck must not end them for good."""
    experience, branches = (
        AcceptanceStats(),
        Branches(torch.arange(2), torch.arange(2), torch.tensor([0.5, 0.2]).log()),
    )
    experience.pass_worth = 0.01
    made, answers = pace(experience), []
    for _ in range(20):
        made.guess(NO_GUESS)
        answers.append(made.another_pass(branches, branches.log_probs))
    assert answers == [*[False] * 8, True] * 2 + [False] * 2
    # A further pass of the same round is not tried for its own sake.
    experience.single_passes = 8
    assert not made.another_pass(branches, branches.log_probs)


def test_other_circumstances_share_probabilities_and_nothing_else():
    usual = CostKey.of(tiny_target("llama"), 100, 8)
    experience = AcceptanceStats()
    assert experience.under(usual) is experience
    for other in ({"rows": 2}, {"packed": True}, {"compiled": (1, 8)}, {"packed": True, "compiled": (1, 8)}):
        found = experience.under(usual._replace(**other))
        assert found is not experience and found is experience.under(usual._replace(context=8192, **other))
        found.depth(1).observe(1.0)
        found.rate = 5.0
        assert experience.depths is found.depths and experience.matches is found.matches
        assert found.continued is experience.continued
    assert experience.rate == AcceptanceStats().rate


@pytest.mark.parametrize("block_size", [1, 2])
def test_drafts_all_it_can_where_that_is_free(block_size, monkeypatch):
    target, ids = tiny_target("llama"), prompt(9)
    expected = target.generate(ids, max_new_tokens=40, do_sample=False)
    monkeypatch.setattr("hf_falcon.core.decoding.Costs", FreeDrafting)
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
    """The drafter sees nothing then, but for its trials; the features it missed are there when it is tried again."""
    target, ids = tiny_target("llama"), prompt(9)

    class Costly(FreeDrafting):
        def __init__(self, seconds):
            super().__init__(seconds)
            self.draft_pass = self.commit = 0.9

    monkeypatch.setattr("hf_falcon.core.decoding.Costs", Costly)
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
