# Copyright 2026 The hf_falcon authors. Licensed under the Apache License, Version 2.0.
"""Accepted tokens: estimated from probabilities, and counted in decoded prompts."""

import pytest
from tiny_models import new_drafter, new_target, random_tokens

from hf_falcon.training.estimated_tau import estimated_tau_chain, estimated_tau_tree
from hf_falcon.training.final_tau import decoded_tau


def test_estimated_tau_of_a_chain():
    assert estimated_tau_chain([(0.5, 0.6, 0.7), (0.4, 0.5, 0.6), (0.1, 0.2, 0.3)]) == pytest.approx(0.5 + 0.2 + 0.02)
    assert estimated_tau_chain([]) == 0


@pytest.mark.parametrize("nodes", [1, 2, 5, 12, 72, 10**4])
def test_estimated_tau_of_a_tree(nodes):
    accuracy = [(0.5, 0.7, 0.8), (0.4, 0.5, 0.9)]
    ranks = [[0.5, 0.1, 0.1] + [0.02] * 5, [0.4, 0.05, 0.05] + [0.08] * 5]
    paths = ranks[0] + [first * second for first in ranks[0] for second in ranks[1]]
    expected = sum(sorted(paths, reverse=True)[:nodes])
    assert estimated_tau_tree(accuracy, nodes) == pytest.approx(expected)
    if nodes >= len(paths):
        assert expected == pytest.approx(0.8 + 0.8 * 0.9)


def test_decoded_tau(target):
    prompts = [random_tokens(6, seed=seed) for seed in (3, 4)]
    found = decoded_tau(target, new_drafter(target), prompts, max_new_tokens=20)
    options = {"max_new_tokens": 20, "do_sample": False, "return_dict_in_generate": True}
    each = [target.generate(p[None], assistant_model=new_drafter(target), **options).draft_statistics for p in prompts]
    rounds, accepted = sum(s.rounds for s in each), sum(s.accepted_tokens for s in each)
    assert found == {"final_tau": accepted / rounds, "final_alpha": accepted / sum(s.new_tokens for s in each)}


def test_decoded_tau_where_the_positions_of_a_target_end():
    """A prompt that leaves no room is left out."""
    target = new_target("gpt2", n_positions=16, max_position_embeddings=16)
    short, full = random_tokens(10, seed=3), random_tokens(16, seed=4)
    alone = decoded_tau(target, new_drafter(target), [short], max_new_tokens=6)
    assert decoded_tau(target, new_drafter(target), [full, short], max_new_tokens=20) == alone
    assert decoded_tau(target, new_drafter(target), [full]) == {}
