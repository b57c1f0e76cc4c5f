# Copyright 2026 The hf_falcon authors. Licensed under the Apache License, Version 2.0.
"""
Lookahead decoding (arXiv 2402.02057), for comparison: its n-gram pool and its Jacobi window, with our decoding loop.

The target's forward runs one tree in each round. Its verification branch are the n-grams of the pool that begin with
the newest token. Its lookahead branch is the window: the first level is one path behind the newest token, and from
each place of that path hangs a column of the other levels, so that a token sees the first level up to its column, and
its own column. That is the paper's mask. The target's choices at the ends of the columns are the window's next level,
and complete an n-gram in each column.
"""

from __future__ import annotations

import copy
import math
import random
import threading
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from ..core.tree import to_device
from ..drafters.lookup_drafter import LookupDrafter
from ..lookup import LookedUp

# Log-probability of a window's token, and of an n-gram's. A target that takes no trees verifies the most probable
# path, which is to be an n-gram.
_WINDOW, _NGRAM = math.log(1e-4), 0.0


class NgramPool:
    """
    The n-grams that were seen last.

    Args:
        length (`int`): tokens of an n-gram.
        most (`int`): n-grams that begin with the same token, at most: the newest.
    """

    def __init__(self, length: int, most: int):
        self.length, self._most = length, most
        # What follows each first token, the oldest first.
        self._followers: dict[int, dict[tuple[int, ...], None]] = {}

    def add(self, ngram: Sequence[int]) -> None:
        """Adds an n-gram as the newest."""
        followers, rest = self._followers.setdefault(ngram[0], {}), tuple(ngram[1:])
        followers.pop(rest, None)
        followers[rest] = None
        if len(followers) > self._most:
            del followers[next(iter(followers))]

    def behind(self, token: int) -> list[tuple[int, ...]]:
        """The n-grams that begin with `token`, without it; the newest first."""
        return list(reversed(self._followers.get(token, {})))


class JacobiWindow:
    """
    The tokens of the latest Jacobi steps, at the places behind the newest token. It grows by a level in each step, and
    loses a column, until it has all levels.

    Args:
        guesses (sequence of `int`): the first level before any step: `columns + num_levels - 2` tokens.
        num_levels (`int`): levels of a complete window: one less than an n-gram has tokens.

    Attributes:
        levels (`list[list[int]]`): the tokens of each level, the oldest first. The first column of the oldest level is
            the newest token of the text, so that this level has one token less.
    """

    def __init__(self, guesses: Sequence[int], num_levels: int):
        self.levels, self._num_levels = [list(guesses)], num_levels

    @property
    def columns(self) -> int:
        """Columns that it has now."""
        return len(self.levels[0]) + 1

    def cut(self, max_depth: int) -> bool:
        """Drops the columns that go deeper than `max_depth` tokens. Returns whether one is left."""
        columns = max(0, max_depth + 2 - len(self.levels))
        first, *others = self.levels
        self.levels = [first[: max(0, columns - 1)], *(level[:columns] for level in others)]
        return columns > 0

    def step(self, newest: int, choices: Sequence[int]) -> list[list[int]]:
        """
        A Jacobi step.

        Args:
            newest (`int`): the newest token when the window was run.
            choices (sequence of `int`): what the target chose at the end of each column.

        Returns:
            An n-gram for each column; none before the window is complete.
        """
        firsts, *others = [newest, *self.levels[0]], *self.levels[1:], choices
        if len(self.levels) < self._num_levels:
            # All levels move one place on, as the text does.
            self.levels = [each[1:] for each in (*self.levels, list(choices))]
            return []
        # Each level takes the place of the one before, whose tokens were one place nearer.
        self.levels = [list(others[0][1:]), *(list(each) for each in others[1:])]
        return [list(ngram) for ngram in zip(firsts, *others)]


class LookaheadBranches:
    """
    Both branches of one sequence of a `generate` call, in the form of a [`TextLookup`].

    Args:
        window (`int`): columns of the window.
        ngram (`int`): tokens of an n-gram.
        guesses (`int`): n-grams that are verified in a round, at most.
    """

    def __init__(self, window: int, ngram: int, guesses: int):
        self._pool, self._columns = NgramPool(ngram, guesses), window
        self._window: JacobiWindow | None = None
        self._text: list[int] = []
        # The tree of the last round, without its root, and the nodes that end the window's columns. The root is -1.
        self._nodes: list[int] = []
        self._ends: list[int] = []
        # The tokens that the last forward of the target read, and its choices at the ends.
        self._scored: tuple[Tensor, Tensor] | None = None
        self._thread = threading.get_ident()

    def extend(self, token_ids: Sequence[int]) -> None:
        """Takes the text's next tokens: first the prompt, then what a round emitted."""
        if self._scored is not None and self._window is not None:
            (read, choices), newest = self._scored, self._text[-1]
            # It may have read another tree: a path, or what the call's processors allow.
            if read.tolist() == [newest, *self._nodes]:
                for ngram in self._window.step(newest, choices.tolist()):
                    self._pool.add(ngram)
        self._ends, self._scored = [], None
        for token in token_ids:
            self._text.append(token)
            if len(self._text) >= self._pool.length:
                self._pool.add(self._text[-self._pool.length :])

    def find(self, limit: int, max_depth: int) -> LookedUp:
        """See [`TextLookup.find`]. The drafter's own `limit` is the size of the largest tree."""
        found, numbers = LookedUp([], [], []), dict[tuple[int, int], int]()

        def add(parent: int, token: int, log_prob: float) -> int:
            number = numbers.setdefault((parent, token), len(numbers))
            if number == len(found.token_ids):
                found.token_ids.append(token)
                found.parents.append(parent)
                found.log_probs.append(log_prob)
            return number

        for ngram in self._pool.behind(self._text[-1]):
            node = -1
            for token in ngram[:max_depth]:
                node = add(node, token, _NGRAM)
        num_levels = self._pool.length - 1
        # It takes a round for each level, and has as many tokens behind each other, before it gives an n-gram.
        if self._window is None and max_depth >= 2 * num_levels:
            # As the authors' code: tokens of the prompt. A seed of its own, so that samples are plain decoding's.
            guesses = random.Random(0).choices(self._text, k=self._columns + num_levels - 2)
            self._window = JacobiWindow(guesses, num_levels)
        if self._window is not None and not self._window.cut(max_depth):
            self._window = None
        if self._window is not None:
            (first, *others), stem = self._window.levels, -1
            for column in range(self._window.columns):
                stem = add(stem, first[column - 1], _WINDOW) if column else stem
                node = stem
                for level in others:
                    node = add(node, level[column], _WINDOW)
                self._ends.append(node)
        self._nodes = found.token_ids
        return found

    def read(self, target: PreTrainedModel, args: Any, kwargs: dict[str, Any], outputs: Any) -> None:
        """A forward hook of the target: takes its choices at the ends of the columns. The host does not wait."""
        rows = len(self._nodes) + 1
        if threading.get_ident() != self._thread or not self._ends or outputs.logits.shape[1] < rows:
            return
        ends = to_device(torch.tensor(self._ends, device="cpu") + 1, outputs.logits.device)
        # Faster than `argmax` on a CPU, and the same.
        self._scored = kwargs["input_ids"][0, :rows], outputs.logits[0, ends].max(dim=-1).indices


class LookaheadDrafter(LookupDrafter):
    """
    Lookahead decoding, for any target and without a network. The pool has the n-grams of the window's columns, of the
    prompt and of the new text. A window's token that is right is accepted as an n-gram's is. Calls with several rows
    are decoded without drafts; a target that takes no trees has the n-grams of the text alone.

    Args:
        window (`int`): columns of the window, W in the paper.
        ngram (`int`): tokens of an n-gram, N in the paper; at least 2.
        guesses (`int`): n-grams that are kept for each first token, and verified in a round, at most; G in the paper.

    Raises:
        `ValueError`: for a size that is too small.
    """

    def __init__(self, window: int, ngram: int, guesses: int):
        for name, value, least in (("window", window, 1), ("ngram", ngram, 2), ("guesses", guesses, 1)):
            if value < least:
                raise ValueError(f"`{name}` is {value}: set it to an integer of at least {least}.")
        super().__init__()
        self._sizes = window, ngram, guesses
        self._branches: LookaheadBranches | None = None
        # No tree is larger than this, so all nodes are verified: a tree without its window would be another method.
        options = self.generation_config
        options.num_assistant_tokens_schedule = "constant"
        nodes = (window + ngram + guesses) * (ngram - 1)
        options.num_assistant_tokens = options.prompt_lookup_num_tokens = nodes

    def start_lookup(self, target: PreTrainedModel) -> LookaheadBranches | None:
        """The lookup of the call's sequence; see [`lookup_for`]."""
        return self._branches

    def assisted_decoding(self, target: PreTrainedModel, input_ids: Tensor, *args: Any, **kwargs: Any) -> Any:
        """See [`DraftModel.assisted_decoding`]."""
        # A drafter for this call: others may run at the same time.
        drafter = copy.copy(self)
        if input_ids.shape[0] > 1:
            return super(LookaheadDrafter, drafter).assisted_decoding(target, input_ids, *args, **kwargs)
        drafter._branches = LookaheadBranches(*self._sizes)
        hook = target.register_forward_hook(drafter._branches.read, with_kwargs=True)
        try:
            return super(LookaheadDrafter, drafter).assisted_decoding(target, input_ids, *args, **kwargs)
        finally:
            hook.remove()
