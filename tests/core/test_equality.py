# Copyright 2026 The hf_falcon authors. Licensed under the Apache License, Version 2.0.
"""The tokens are the same as those of plain `generate`, for every target, drafter and tree."""

import functools
import itertools
import math

import pytest
import torch
from drafting_cases import (
    ALL_IN_TREE,
    DRAFTS,
    GREEDY_PROCESSORS,
    NEW_TOKENS,
    SAMPLERS,
    VALUES,
    Case,
    options_of,
    sampled_cases,
)
from oracle import FreeDrafting, use_oracle
from quick import one_in, quick
from tiny_models import ROPE_PHI3, ROPE_SCALED, TARGETS, prompt, tiny_drafter, tiny_target
from transformers import PreTrainedModel

from hf_falcon.core.policy import acceptance_stats_of


def fresh_target(name: str) -> PreTrainedModel:
    """Dynamic frequencies outlive a `generate` call, so that plain decoding does not repeat itself either."""
    return ROPE_SCALED[name]() if name in ROPE_SCALED else tiny_target(name)


@functools.cache
def plain(name: str, prompt_length: int, settings: tuple = (), seed: int = 0) -> torch.Tensor:
    # Making the target seeds the generator, too.
    target = fresh_target(name)
    torch.manual_seed(seed)
    return target.generate(prompt(prompt_length), max_new_tokens=NEW_TOKENS, **{"do_sample": False, **dict(settings)})


def check(monkeypatch, name: str, case: Case, settings: tuple = (), seed: int = 0) -> None:
    """Compares assisted with plain generation, and what was accepted with what the draft knew."""
    target = fresh_target(name)
    drafter = tiny_drafter(target, case.block_size, case.num_lstm_layers, case.extra, **options_of(case))
    expected = plain(name, case.prompt_length, settings, seed)
    draft = DRAFTS[case.draft]
    monkeypatch.setattr("hf_falcon.core.costs.Costs", FreeDrafting)
    acceptance_stats_of(drafter, target).costs.clear()
    made = [] if draft is None else use_oracle(monkeypatch, expected, seed=seed, **draft)
    torch.manual_seed(seed)
    output = target.generate(
        prompt(case.prompt_length),
        assistant_model=drafter,
        max_new_tokens=NEW_TOKENS,
        return_dict_in_generate=True,
        **{"do_sample": False, **dict(settings)},
    )
    monkeypatch.undo()
    assert output.sequences.tolist() == expected.tolist(), (name, case, seed)
    # The cache is what plain decoding leaves: everything but the last token.
    assert output.past_key_values.get_seq_length() == expected.shape[1] - 1
    statistics = output.draft_statistics
    all_in_tree = (case.draft, case.tree) in ALL_IN_TREE
    if case.schedule != "constant" and case.tree == "dynamic":
        # What is looked up takes nodes from the draft.
        assert statistics.rounds + statistics.accepted_tokens == statistics.new_tokens - 1
    elif all_in_tree and name not in ROPE_SCALED:
        # Rounds of as many tokens as the tree is deep and the target's own. None is drafted before a block is known.
        steps = max(0, case.block_size - case.prompt_length)
        assert statistics.rounds <= steps + math.ceil((NEW_TOKENS - 1) / (made[0].tree_depth + 1))
    elif case.draft == "scattered" and case.nodes > 2 and name not in ROPE_SCALED:
        assert statistics.accepted_tokens > 0


@pytest.mark.parametrize("name", quick(("llama", "gemma3", "gpt2"), TARGETS))
def test_plain_output_varies(name):
    """Equality says little about targets that repeat one token."""
    for length in VALUES.prompt_length[2:]:
        new = plain(name, length)[0, length:].tolist()
        assert len(new) == NEW_TOKENS
        assert len(set(new)) > 5


@pytest.mark.parametrize("name", TARGETS)
def test_greedy_equals_plain(name, monkeypatch):
    # As many as the longest column of values has, so that each value comes.
    for case in sampled_cases(name, 6):
        check(monkeypatch, name, case)


@pytest.mark.parametrize("name, sampler", one_in(6, TARGETS, SAMPLERS))
def test_sample_equals_plain_under_the_same_seed(name, sampler, monkeypatch):
    settings = SAMPLERS[sampler]
    for seed, case in enumerate(sampled_cases(f"{name} {sampler}", 1)):
        check(monkeypatch, name, case, (("do_sample", True), *settings.items()), seed=seed)
        if sampler in GREEDY_PROCESSORS:
            check(monkeypatch, name, case, tuple(settings.items()))


@pytest.mark.parametrize("name", ["llama-dynamic", *ROPE_PHI3])
def test_changing_rotary_frequencies(name, monkeypatch):
    """The context grows past the length from which the frequencies depend on it, or starts beyond it."""
    for case in sampled_cases(name, 12):
        check(monkeypatch, name, case)


@pytest.mark.slow
@pytest.mark.parametrize("tree", VALUES.tree)
@pytest.mark.parametrize("num_lstm_layers", VALUES.num_lstm_layers)
@pytest.mark.parametrize("block_size", VALUES.block_size)
@pytest.mark.parametrize("name", [*TARGETS, *ROPE_SCALED])
def test_greedy_equals_plain_for_all(name, block_size, num_lstm_layers, tree, monkeypatch):
    lengths, extras = itertools.cycle(VALUES.prompt_length), itertools.cycle(("nothing", "nothing", *VALUES.extra))
    schedules = itertools.cycle(("constant", "heuristic", "constant", "lookup", "heuristic"))
    for nodes, draft in itertools.product((1, 6, 64), DRAFTS):
        case = Case(block_size, num_lstm_layers, next(extras), tree, nodes, next(lengths), draft, next(schedules))
        check(monkeypatch, name, case)


@pytest.mark.slow
@pytest.mark.parametrize("sampler", SAMPLERS)
@pytest.mark.parametrize("name", [*TARGETS, *ROPE_SCALED])
def test_sample_equals_plain_for_all(name, sampler, monkeypatch):
    settings = (("do_sample", True), *SAMPLERS[sampler].items())
    for seed, case in enumerate(sampled_cases(f"{name} {sampler} all", 24)):
        check(monkeypatch, name, case, settings, seed=seed)
