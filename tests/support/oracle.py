# Copyright 2026 The hf_falcon authors. Licensed under the Apache License, Version 2.0.
"""A candidate generator that knows what the target will say, so that as much is accepted as a test wants."""

import functools
import random
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from hf_falcon import FalconCandidateGenerator, StaticTree
from hf_falcon.core.costs import Costs


class OracleCandidateGenerator(FalconCandidateGenerator):
    """
    Runs all of the drafter and builds the tree as ever, but puts the true continuation among the candidates.

    Args:
        truth (`list[int]`): the whole sequence that plain decoding gives, the prompt included.
        accuracy (`float`): how often the true token is among the candidates of a depth.
        scattered (`bool`):
            The true token takes a random rank among its siblings. A static tree has its path at a random leaf.
            Otherwise it is the first candidate, so that everything is accepted that the tree has room for.
        seed (`int`): of the random ranks and the other candidates.
    """

    def __init__(self, *args: Any, truth: list[int], accuracy: float, scattered: bool, seed: int):
        super().__init__(*args)
        self._truth, self._accuracy, self._scattered = truth, accuracy, scattered
        self._random = random.Random(seed)
        self._depth = 0
        self._ranks: list[int] = []

    @property
    def tree_depth(self) -> int:
        """Depth that the true path reaches if it takes first ranks only, or in a static tree any path."""
        return min(self._tree.max_depth, self.options.num_assistant_tokens)

    def draft(self, *args: Any, **kwargs: Any):
        self._depth = 0
        self._ranks = self._path_of_ranks() if self._scattered else []
        return super().draft(*args, **kwargs)

    def _path_of_ranks(self) -> list[int]:
        """Ranks of the true tokens by depth."""
        tree = self._tree
        if not isinstance(tree, StaticTree):
            # Two nodes of equal probability at some depths: more would not fit into small budgets.
            return [self._random.choice((0, 0, 1)) for _ in range(tree.max_depth)]
        ranks = [0] + torch.cat([level.ranks for level in tree.levels]).tolist()
        node, path = self._random.choice((tree.depths == tree.max_depth).nonzero()[:, 0].tolist()), []
        while node:
            path.append(ranks[node])
            node = int(tree.parents[node])
        return path[::-1]

    def _candidates(self, states: Tensor) -> tuple[Tensor, Tensor]:
        log_probs, token_ids = super()._candidates(states)
        if states.dim() == 2:  # one token of a block at a time
            log_probs, token_ids = log_probs[:, None], token_ids[:, None]
        blocks, size, children = token_ids.shape
        newest = self._next_position
        for offset in range(size):
            self._depth += 1
            place = newest + self._depth + self._padding
            rank = self._ranks[self._depth - 1] if self._depth <= len(self._ranks) else 0
            rank = min(rank, children - 1)
            true = self._truth[place] if place < len(self._truth) else 0
            # Equally likely down to the true token's rank, and unlikely below.
            log_probs[:, offset] = -10.0
            log_probs[:, offset, : rank + 1] = -0.1 * (rank + 1)
            known = self._random.random() < self._accuracy
            for block in range(blocks):
                others = [token for token in range(self.head.draft_vocab_size) if token != true]
                chosen = self._random.sample(others, children)
                if known:
                    chosen[rank] = true
                token_ids[block, offset] = torch.tensor(chosen)
        return log_probs.view(*states.shape[:-1], children), token_ids.view(*states.shape[:-1], children)


class FreeDrafting(Costs):
    """Drafting costs next to nothing, and no clock is read."""

    commit = draft_pass = 0.01

    def __init__(self, prior, sizes=()):
        super().__init__({0: 1.0, max(prior): 1.1})
        self.largest, self.steps_due = max(prior), 0

    def observe_target(self, nodes, seconds):
        pass

    def observe_drafting(self, commit_seconds, pass_seconds, passes):
        pass

    def observe_prompt(self, seconds):
        pass


def use_oracle(monkeypatch, truth: Tensor, accuracy: float = 1.0, scattered: bool = False, seed: int = 0) -> list:
    """
    Makes the decoding loop draft with an oracle from now on.

    Args:
        truth (`torch.LongTensor` of shape `(1, length)`): what plain decoding gives.

    Returns:
        `list`: gets the generator of every later `generate` call.
    """
    made: list[OracleCandidateGenerator] = []

    @functools.wraps(OracleCandidateGenerator)
    def make(*args: Any) -> OracleCandidateGenerator:
        made.append(
            OracleCandidateGenerator(*args, truth=truth[0].tolist(), accuracy=accuracy, scattered=scattered, seed=seed)
        )
        return made[-1]

    monkeypatch.setattr("hf_falcon.core.decoding.FalconCandidateGenerator", make)
    return made


def use_batch_oracle(monkeypatch, truth: Tensor, accuracies: Iterable[float]) -> None:
    """
    Makes the next batch draft with oracles.

    Args:
        truth (`torch.LongTensor` of shape `(rows, length)`): what plain decoding gives.
        accuracies (`Iterable[float]`): how often each row's oracle is right.
    """
    makers = iter(
        functools.partial(OracleCandidateGenerator, truth=row, accuracy=accuracy, scattered=False, seed=0)
        for row, accuracy in zip(truth.tolist(), accuracies)
    )
    monkeypatch.setattr("hf_falcon.core.decoding.FalconCandidateGenerator", lambda *args: next(makers)(*args))
