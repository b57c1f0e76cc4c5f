# Copyright 2026 The hf_falcon authors. Licensed under the Apache License, Version 2.0.
"""Continuations found in the context itself, as prompt lookup and REST find them, for the tree to take in."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

# Lengths of the ends of the context that are looked up, the longest first: a longer match is likelier to go on.
_LENGTHS = (8, 5, 4, 3, 2)
# A match is not followed back further than this.
_LONGEST_MATCH = 32


class Continuation(NamedTuple):
    """
    What followed when the context last ended like this.

    Args:
        token_ids (`list[int]`): the tokens that followed then; none where the context never ended like this before.
        matched (`int`): how many tokens at the end of the context were the same.
    """

    token_ids: list[int]
    matched: int


class ContextIndex:
    """Where each short run of tokens was last seen in a context that grows. A token costs the same at any length."""

    def __init__(self) -> None:
        self._tokens: list[int] = []
        # The place behind the last occurrence of every run.
        self._places: dict[tuple[int, ...], int] = {}
        # The place behind the longest run that ends the context and that it had before.
        self._place: int | None = None

    def __len__(self) -> int:
        return len(self._tokens)

    def extend(self, token_ids: Iterable[int]) -> None:
        """Takes the context's next tokens."""
        for token in token_ids:
            self._tokens.append(token)
            end, self._place = len(self._tokens), None
            for length in _LENGTHS:
                if length <= end:
                    run = tuple(self._tokens[end - length :])
                    if self._place is None:
                        self._place = self._places.get(run)
                    self._places[run] = end

    def continuation(self, limit: int) -> Continuation:
        """What followed where the context was like its end before: `limit` tokens at most."""
        place, end = self._place, len(self._tokens)
        if place is None or limit < 1:
            return Continuation([], 0)
        matched = 0
        while (
            matched < min(place, _LONGEST_MATCH)
            and self._tokens[place - 1 - matched] == self._tokens[end - 1 - matched]
        ):
            matched += 1
        # A text that repeats itself goes on repeating: behind its end the continuation is read from its own beginning.
        return Continuation([self._tokens[place + offset % (end - place)] for offset in range(limit)], matched)
