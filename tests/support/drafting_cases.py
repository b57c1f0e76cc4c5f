# Copyright 2026 The hf_falcon authors. Licensed under the Apache License, Version 2.0.
"""Ways to draft for a prompt, and random samples of all their combinations."""

import itertools
import math
import random
from collections.abc import Iterator
from typing import NamedTuple

from tiny_models import EXTRAS

NEW_TOKENS = 34
# Ranks with gaps, leaves at every depth, and the deepest of them not on the first ranks.
OWN_PATHS = [[0], [2], [0, 0], [0, 1], [2, 1], [2, 1, 0], [2, 1, 2], [0, 1, 0], [2, 1, 2, 1], [2, 1, 2, 1, 0]]
# How much is known of the truth, and where in the tree it is; `None` is the random drafter's own draft.
DRAFTS: dict[str, dict | None] = {
    "random": None,
    "oracle": {"accuracy": 1.0},
    "scattered": {"accuracy": 1.0, "scattered": True},
    "half": {"accuracy": 0.7, "scattered": True},
}
# Drafts that put the whole truth into the tree.
ALL_IN_TREE = {("oracle", "dynamic"), ("oracle", "static"), ("scattered", "static"), ("scattered", "own")}
# The same tree every round; with what is found in the context; and what pays, as long as drafting costs nothing.
PACES: dict[str, dict] = {
    "constant": {},
    "lookup": {"prompt_lookup_num_tokens": 7},
    "heuristic": {"num_assistant_tokens_schedule": "heuristic", "prompt_lookup_num_tokens": 7},
}
SAMPLERS = {
    "temperature": {"temperature": 0.7, "top_k": 0},
    "top_k": {"top_k": 5, "temperature": 1.3},
    "top_p": {"top_p": 0.8, "top_k": 0},
    "min_p": {"min_p": 0.05, "top_k": 0},
    "repetition_penalty": {"repetition_penalty": 1.3},
    "no_repeat_ngram": {"no_repeat_ngram_size": 2},
}
GREEDY_PROCESSORS = ("repetition_penalty", "no_repeat_ngram")


class Case(NamedTuple):
    """One way of drafting for one prompt."""

    block_size: int
    num_lstm_layers: int
    extra: str
    tree: str
    nodes: int
    prompt_length: int
    draft: str
    pace: str = "constant"


VALUES = Case(
    block_size=(1, 2, 3, 4),
    num_lstm_layers=(0, 1, 2),
    extra=tuple(EXTRAS),
    tree=("dynamic", "static", "own"),
    nodes=(1, 2, 3, 6, 16, 64),
    prompt_length=(1, 2, 5, 8, 20, 40),
    draft=tuple(DRAFTS),
    pace=tuple(PACES),
)


def sampled_cases(name: str, count: int) -> Iterator[Case]:
    """Random cases in which every value of every factor comes as often as every other."""
    shuffled = random.Random(name)
    columns = [shuffled.sample(values * math.ceil(count / len(values)), count) for values in VALUES]
    return itertools.starmap(Case, zip(*columns))


def options_of(case: Case) -> dict:
    tree = OWN_PATHS if case.tree == "own" else case.tree
    # Narrow and wide alike: a small budget leaves no room for many paths anyway.
    sizes = {"num_assistant_tokens": case.nodes, "num_draft_passes": 3, "draft_width": 3}
    return {**sizes, "draft_tree": tree, **PACES[case.pace]}
