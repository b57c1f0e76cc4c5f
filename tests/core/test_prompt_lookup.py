# Copyright 2026 The hf_falcon authors. Licensed under the Apache License, Version 2.0.
"""Continuations found in the context: against a search through all of it."""

import random

import pytest

from hf_falcon.core.candidate_generator import PromptLookup

LENGTHS = (8, 5, 4, 3, 2)


def search(tokens: list[int], limit: int) -> tuple[list[int], int]:
    """The newest earlier place where the longest of the looked-up ends stands, and how far the match goes back."""
    end = len(tokens)
    for length in LENGTHS:
        for place in range(end - 1, length - 1, -1):
            if tokens[place - length : place] == tokens[end - length :]:
                matched = next(
                    (n for n in range(min(place, 32)) if tokens[place - 1 - n] != tokens[end - 1 - n]), None
                )
                text = tokens[place:]
                while len(text) < limit:
                    text += tokens[place:]
                return text[:limit], min(place, 32) if matched is None else matched
    return [], 0


@pytest.mark.parametrize("alphabet", [2, 4, 9])
@pytest.mark.parametrize("chunk", [1, 7])
def test_finds_what_a_search_finds(alphabet, chunk):
    draws = random.Random(alphabet)
    tokens = [draws.randrange(alphabet) for _ in range(150)]
    index = PromptLookup()
    for start in range(0, len(tokens), chunk):
        index.extend(tokens[start : start + chunk])
        known = tokens[: start + chunk]
        assert len(index) == len(known)
        for limit in (1, 4, 40):
            assert tuple(index.find(limit)) == search(known, limit)


def test_a_repetition_goes_on():
    index = PromptLookup()
    index.extend([1, 2, 3, 1, 2, 3, 1, 2])
    assert index.find(7).token_ids == [3, 1, 2, 3, 1, 2, 3]


def test_nothing_is_found():
    index = PromptLookup()
    assert index.find(5) == ([], 0)
    index.extend([1, 2, 3, 4, 1])
    assert index.find(5) == ([], 0)
    index.extend([2])
    assert index.find(0) == ([], 0) and index.find(2) == ([3, 4], 2)
