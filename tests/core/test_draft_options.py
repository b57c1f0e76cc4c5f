# Copyright 2026 The hf_falcon authors. Licensed under the Apache License, Version 2.0.
"""Drafting options, and how they are read from a generation configuration."""

from dataclasses import fields

import pytest
import torch
from tiny_models import new_drafter, random_tokens, tiny_target
from transformers import GenerationConfig

from hf_falcon import DraftOptions, FalconCandidateGenerator
from hf_falcon.core.tree import DynamicTree
from hf_falcon.static_trees import StaticTree, static_paths

COUNTS = {"num_assistant_tokens": 1, "num_draft_passes": 0, "draft_top_k": 1, "draft_width": 1}


@pytest.mark.parametrize("name", COUNTS)
@pytest.mark.parametrize("value", [None, -3, 1.5, "4", True])
def test_counts_out_of_range(name, value):
    least = COUNTS[name]
    value = least - 1 if value is None else value
    with pytest.raises(ValueError, match=f"`{name}` is {value!r}: set it to an integer of at least {least}"):
        DraftOptions(**{name: value})
    assert getattr(DraftOptions(**{name: least}), name) == least


@pytest.mark.parametrize("value", [-0.1, 1.1, "0.5", float("nan")])
def test_threshold_out_of_range(value):
    with pytest.raises(ValueError, match="`assistant_confidence_threshold` is .*: set it between 0 and 1"):
        DraftOptions(assistant_confidence_threshold=value)


def test_unknown_tree():
    with pytest.raises(ValueError, match="`draft_tree` is 'greedy': set it to 'dynamic', 'static' or a list of paths"):
        DraftOptions(draft_tree="greedy")


def test_what_a_generation_config_leaves_out_keeps_its_default():
    assert DraftOptions.from_generation_config(None) == DraftOptions()
    # A plain `GenerationConfig` knows nothing of drafting; what it has in common with assisted decoding is unset.
    assert DraftOptions.from_generation_config(GenerationConfig()) == DraftOptions()
    assert DraftOptions.from_generation_config(GenerationConfig(draft_width=None)) == DraftOptions()


@pytest.mark.parametrize(
    "given",
    [
        {"num_assistant_tokens": 3, "num_draft_passes": 2, "draft_top_k": 4, "draft_width": 5, "draft_tree": "static"},
        {"assistant_confidence_threshold": 0.0},
        {"draft_tree": [[0], [0, 1]]},
    ],
)
def test_read_from_a_generation_config(given):
    found = DraftOptions.from_generation_config(GenerationConfig(**given))
    assert found == DraftOptions(**given)
    assert {field.name for field in fields(DraftOptions)} >= set(given)
    with pytest.raises(ValueError, match="`draft_width` is 0"):
        DraftOptions.from_generation_config(GenerationConfig(**{**given, "draft_width": 0}))


@pytest.mark.parametrize(
    "given, kind, nodes, depth, children",
    [
        ({}, DynamicTree, 12, 8, 8),
        # There are never more candidates than nodes, or than the drafter knows tokens.
        ({"num_assistant_tokens": 3, "num_draft_passes": 1}, DynamicTree, 3, 2, 3),
        ({"num_assistant_tokens": 60, "draft_top_k": 50}, DynamicTree, 60, 8, 20),
        ({"draft_tree": "static", "num_assistant_tokens": 9}, StaticTree, 9, None, None),
        ({"draft_tree": [[1], [1, 0], [1, 0, 2]]}, StaticTree, 3, 3, 3),
    ],
)
def test_options_make_the_tree(given, kind, nodes, depth, children):
    target = tiny_target()
    drafter = new_drafter(target, draft_vocab_size=20)
    for name, value in given.items():
        setattr(drafter.generation_config, name, value)
    generator = FalconCandidateGenerator(drafter, target)
    tree = generator._tree
    if given.get("draft_tree") == "static":
        expected = static_paths(9, 8, 8)
        depth, children = max(map(len, expected)), 1 + max(path[-1] for path in expected)
    assert type(tree) is kind and (generator.max_depth, tree.max_children) == (depth, children)

    # What it drafts has the size asked for, in tokens that the drafter knows.
    drafter.generation_config.assistant_confidence_threshold = 0.0
    generator = FalconCandidateGenerator(drafter, target)
    with torch.no_grad():
        generator.commit(torch.randn(1, 5, 32), random_tokens(1, 5))
        found = generator.propose(torch.tensor([[5]]), 100)
    assert len(found) == 1 + nodes
    assert set(found.token_ids[1:].tolist()) <= set(drafter.draft_vocab_ids.tolist())


def test_a_rank_that_the_drafter_has_no_token_for():
    target = tiny_target()
    options = DraftOptions(draft_tree=[[0], [20]])
    with pytest.raises(ValueError, match="`draft_tree` has child rank 20, but the drafter knows 20 tokens"):
        FalconCandidateGenerator(new_drafter(target, draft_vocab_size=20), target, options)


def test_threshold_saves_passes():
    target = tiny_target()
    depths = []
    for threshold in (0.0, 1.0):
        options = DraftOptions(num_assistant_tokens=60, draft_top_k=2, assistant_confidence_threshold=threshold)
        generator = FalconCandidateGenerator(new_drafter(target, block_size=2), target, options)
        with torch.no_grad():
            generator.commit(torch.randn(1, 5, 32), random_tokens(1, 5))
            depths.append(int(generator.propose(torch.tensor([[5]]), 100).depths.max()))
    assert depths[0] > 2 and depths[1] == 2
