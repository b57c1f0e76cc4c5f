# Copyright 2026 The hf_falcon authors. Licensed under the Apache License, Version 2.0.
"""Prompt lookup: places, votes and memory, against a search through all texts."""

import itertools
import math
import threading
from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny_models import new_target, tiny_target
from toy_drafter import toy_drafter

from hf_falcon import LookupDrafter
from hf_falcon.core.policy import Share
from hf_falcon.lookup import LookedUp, LookupMemory, TextLookup, TokenIndex, lookup_for

# The shares of the tests: by the length of a match, the odds are 1, 2, 3, ...
LENGTHS = (1, 2, 3, 4, 5, 8, 12, 20, 32)
texts = st.lists(st.integers(0, 3), min_size=1, max_size=60)


def odds_of(matched: int) -> float:
    return float(sum(matched >= length for length in LENGTHS))


def new_lookup(shortest: int = 1, memory: LookupMemory | None = None, vocab_size: int = 99) -> TextLookup:
    shares = [Share(odds / (1.0 + odds)) for odds in range(1, len(LENGTHS) + 1)]
    return TextLookup(shares, vocab_size, shortest, memory)


def matched_by_search(text: list[int], place: int, context: list[int]) -> int:
    pairs = zip(reversed(text[:place]), reversed(context))
    return min(32, sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], pairs)))


def places_by_search(text: list[int], context: list[int], lengths: tuple[int, ...], most: int) -> dict[int, int]:
    found: dict[int, int] = {}
    for length in lengths:
        run = context[-length:]
        ends = [end for end in range(length, len(text)) if len(run) == length and text[end - length : end] == run]
        for place in ends[::-1][:most]:
            found.setdefault(place, matched_by_search(text, place, context))
    return found


@given(text=texts, other=texts, chunk=st.integers(1, 9), most=st.integers(1, 4))
def test_places_are_those_of_a_search(text, other, chunk, most):
    lengths = (5, 2, 1)
    index = TokenIndex(lengths)
    for start in range(0, len(text), chunk):
        index.extend(text[start : start + chunk])
        known = text[: start + chunk]
        for context in (known, other):
            found = index.places(context, most)
            assert found == places_by_search(known, context, lengths, most)
            # Longer runs come first.
            runs = [next(length for length in lengths if matched >= length) for matched in found.values()]
            assert runs == sorted(runs, reverse=True)


def probability(text: list[int], memory: list[list[int]], path: tuple[int, ...], shortest: int) -> float:
    """The probability of a path behind a text, from what the votes are said to be."""
    lengths = tuple(length for length in (5, 2, 1) if length >= shortest)
    places = places_by_search(text, text, lengths, 16)
    # A text that repeats itself goes on so.
    matches = [(text[place:] * len(path), matched) for place, matched in places.items()]
    for other in memory:
        found = places_by_search(other, text, (4,), 16)
        matches += [(other[place:], matched) for place, matched in found.items()]
    product = 1.0
    for depth, token in enumerate(path):
        matches = [(follows, matched) for follows, matched in matches if len(follows) > depth]
        votes: Counter[int] = Counter()
        for follows, matched in matches:
            votes[follows[depth]] += odds_of(min(32, matched + depth))
        product *= votes[token] / max(1.0, len(votes) + votes.total())
        matches = [(follows, matched) for follows, matched in matches if follows[depth] == token]
    return product


def paths_of(found: LookedUp) -> list[tuple[int, ...]]:
    paths: list[tuple[int, ...]] = []
    for token, parent in zip(found.token_ids, found.parents):
        assert parent < len(paths)
        paths.append((*(paths[parent] if parent >= 0 else ()), token))
    return paths


@settings(deadline=None)
@given(
    text=texts,
    remembered=st.lists(texts, max_size=2),
    limit=st.integers(0, 12),
    max_depth=st.integers(0, 3),
    shortest=st.sampled_from([1, 2]),
)
def test_continuations_are_the_most_probable_ones(text, remembered, limit, max_depth, shortest):
    memory, kept = LookupMemory(1000), []
    for each in remembered:
        memory.add(each)
        kept = [other for other in kept if other != each[: len(other)]] + [each]
    lookup = new_lookup(shortest, memory)
    lookup.extend(text)
    found = lookup.find(limit, max_depth)
    every = {
        path: probability(text, kept, path, shortest)
        for depth in range(1, max_depth + 1)
        for path in itertools.product(range(4), repeat=depth)
    }
    every = {path: value for path, value in every.items() if value > 0.0}
    paths = paths_of(found)
    assert len(set(paths)) == len(paths) == min(limit, len(every))
    # Each as probable as it should be, and none left out that is more probable.
    assert [math.exp(each) for each in found.log_probs] == pytest.approx([every[path] for path in paths])
    assert sorted(every.values(), reverse=True)[: len(paths)] == pytest.approx([every[path] for path in paths])
    assert found.probability == pytest.approx(max(every.values()) if paths else 0.0)


def test_a_context_that_went_on_in_many_ways_foretells_little():
    sums = []
    # One, two and three different tokens behind the 1: all of them together are no more probable than one alone.
    for text in ([1, 2, 1], [1, 2, 1, 3, 1], [1, 2, 1, 3, 1, 4, 1]):
        lookup = new_lookup()
        lookup.extend(text)
        sums.append(sum(map(math.exp, lookup.find(8, 1).log_probs)))
    assert sums == pytest.approx([0.5, 0.5, 0.5])


def test_a_repetition_goes_on():
    lookup = new_lookup()
    lookup.extend([1, 2, 3, 1, 2, 3, 1, 2])
    assert paths_of(lookup.find(7, 7))[-1] == (3, 1, 2, 3, 1, 2, 3)


def test_nothing_is_found():
    lookup = new_lookup()
    assert lookup.find(5, 5) == ([], [], []) and lookup.find(5, 5).probability == 0.0
    lookup.extend([1, 2, 3, 4])
    assert lookup.find(5, 5) == ([], [], [])
    lookup.extend([2])
    assert lookup.find(0, 5) == lookup.find(5, 0) == ([], [], [])
    assert lookup.find(5, 2).token_ids == [3, 4]
    # One token is no match where two are asked for.
    lookup = new_lookup(shortest=2)
    lookup.extend([1, 2, 3, 4, 2])
    assert lookup.find(5, 5) == ([], [], [])


def test_outcomes_change_the_shares_of_their_length():
    shares = [Share(0.5) for _ in LENGTHS]
    lookup = TextLookup(shares, 99, 1)
    lookup.extend([1, 2, 3, 4, 9, 2, 3])
    lookup.find(9, 9)
    # Two tokens matched, then three; then the text goes on otherwise.
    lookup.extend([4, 9, 7, 1])
    assert [share.value > 0.5 for share in shares] == [False, True, True, False, *[False] * 5]
    assert [share.value < 0.5 for share in shares] == [False, False, False, True, *[False] * 5]
    # What nobody has asked for is no outcome.
    before = [share.value for share in shares]
    lookup.extend([2, 3, 4])
    assert [share.value for share in shares] == before


def test_lookups_of_a_target_share_what_they_learn():
    target, other, drafter = new_target(), new_target(), LookupDrafter()
    for _ in range(50):
        lookup = lookup_for(drafter, target)
        lookup.extend([1, 2, 3, 2])
        lookup.find(3, 3)
        lookup.extend([3])
    learnt, fresh = lookup_for(drafter, target), lookup_for(drafter, other)
    for each in (learnt, fresh):
        each.extend([5, 6, 5])
    assert learnt.find(1, 1).probability > 0.6 > fresh.find(1, 1).probability


def test_a_network_is_not_asked_for_single_tokens():
    for drafter, expected in ((LookupDrafter(), [6]), (toy_drafter(tiny_target()), [])):
        lookup = lookup_for(drafter, tiny_target())
        lookup.extend([5, 6, 5])
        assert lookup.find(1, 1).token_ids == expected


def test_tokens_of_another_vocabulary_are_left_out():
    memory = LookupMemory(100)
    memory.add([1, 2, 3, 4, 50, 1, 2, 3, 4, 7])
    for vocab_size, expected in ((99, {50, 7}), (50, {7})):
        lookup = new_lookup(memory=memory, vocab_size=vocab_size)
        lookup.extend([1, 2, 3, 4])
        assert set(lookup.find(9, 1).token_ids) == expected


@settings(deadline=None)
@given(added=st.lists(texts, max_size=12), limit=st.integers(1, 80))
def test_a_memory_is_bounded(added, limit):
    memory, kept = LookupMemory(limit), []
    for text in added:
        memory.add(text)
        text = text[-limit:]
        kept = [other for other in kept if other != text[: len(other)]] + [text]
        while sum(map(len, kept)) > limit:
            kept.pop(0)
        assert len(memory) == sum(map(len, kept)) <= limit
        assert [each.tokens for each in memory._texts] == kept


def test_what_was_used_longest_ago_leaves_first():
    memory = LookupMemory(18)
    first, second, third = [1, 2, 3, 4, 5, 6], [11, 12, 13, 14, 15, 16], [21, 22, 23, 24, 25, 26]
    for text in (first, second, third):
        memory.add(text)
    assert [match.token for match in memory.find([9, 1, 2, 3, 4], 5)] == [5]
    # Three tokens are no use of a text, nor is its end, behind which nothing stands.
    assert memory.find([12, 13, 14], 5) == memory.find([13, 14, 15, 16], 5) == []
    memory.add([31, 32, 33, 34, 35, 36])
    assert [text.tokens[0] for text in memory._texts] == [21, 1, 31]
    # A dialogue goes on: its earlier turns are in it.
    memory.add([*first, 7])
    assert [text.tokens for text in memory._texts][-1] == [*first, 7] and len(memory) <= 18


def test_the_texts_used_last_come_first():
    memory = LookupMemory(1000)
    for token in range(40):
        memory.add([1, 2, 3, 4, 5 + token])
    assert [match.token for match in memory.find([1, 2, 3, 4], 3)] == [44, 43, 42]
    assert [match.token for match in memory.find([1, 2, 3, 4], 3)] == [44, 43, 42]


@pytest.mark.parametrize("limit", [-1, 1.5, True, "9", None])
def test_limits_that_are_none(limit):
    with pytest.raises(ValueError, match=r"`memory` is .*: set it to a number of tokens of at least 1"):
        LookupMemory(limit)


def test_threads_share_a_memory():
    memory, errors = LookupMemory(200), []

    def use(number: int) -> None:
        try:
            for step in range(200):
                memory.add([number, step % 7, 2, 3, 4, step])
                for match in memory.find([step % 7, 2, 3, 4], 4):
                    assert match.text[match.place - 3 : match.place] == [2, 3, 4]
        except Exception as error:
            errors.append(error)

    threads = [threading.Thread(target=use, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert errors == []
    assert len(memory) == sum(len(text.tokens) for text in memory._texts) <= 200
