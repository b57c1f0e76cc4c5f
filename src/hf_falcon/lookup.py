# Copyright 2026 The hf_falcon authors. Licensed under the Apache License, Version 2.0.
"""
Prompt lookup: where the latest tokens occurred earlier, the tokens that followed them are candidates (prompt lookup
decoding; REST; SuffixDecoding). Several earlier places give a tree of continuations. Code from the Hub has none.
"""

from __future__ import annotations

import heapq
import itertools
import math
import threading
import weakref
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

from transformers import PreTrainedModel

from .core.interfaces import Drafter, register_part
from .core.policy import Share

# Lengths of the runs of tokens that a sequence is searched for, the longest first, and places of a run, at most: the
# newest ones. The sizes do not matter much: half and twice the places change the accepted tokens by 1 %.
_LENGTHS, _PLACES = (5, 2, 1), 16
# The length of the runs that remembered texts are searched for. Others' texts have most short runs.
_REMEMBERED_LENGTH = 4
# Tokens that a match is compared with, at most.
_LONGEST_MATCH = 32
# How often the token behind a single earlier place was right, by the length of the match: measured on responses of
# SmolLM2-135M-Instruct. `(length, share)`; each target's shares are updated from here.
_SHARES = (
    (1, 0.28),
    (2, 0.53),
    (3, 0.67),
    (4, 0.72),
    (5, 0.81),
    (8, 0.86),
    (12, 0.93),
    (20, 0.96),
    (32, 0.98),
)
# The index in `_SHARES` of each length of a match.
_SHARE_OF = [max(0, sum(length >= shortest for shortest, _ in _SHARES) - 1) for length in range(_LONGEST_MATCH + 1)]
# A vote counts no more than this.
_MOST_ODDS = 200.0


class TokenIndex:
    """
    A text that grows, and the places behind each of its runs of some lengths. A token costs the same at any length of
    the text.

    Args:
        lengths (sequence of `int`): the lengths, the longest first.
    """

    def __init__(self, lengths: Sequence[int]):
        self.tokens: list[int] = []
        # Of each length: the last place of each run, and the place of the same run before each place, or 0.
        self._chains: list[tuple[int, dict[tuple[int, ...], int], list[int]]] = [
            (length, {}, [0]) for length in lengths
        ]

    def extend(self, token_ids: Iterable[int]) -> None:
        """Adds the text's next tokens."""
        for token in token_ids:
            self.tokens.append(token)
            end = len(self.tokens)
            for length, last, before in self._chains:
                run = tuple(self.tokens[-length:])
                before.append(last.get(run, 0))
                if length <= end:
                    last[run] = end

    def has(self, run: tuple[int, ...]) -> bool:
        """Whether the text has a run of the first of the lengths."""
        return run in self._chains[0][1]

    def places(self, context: Sequence[int], most: int) -> dict[int, int]:
        """
        The places behind which the text may go on as `context` does.

        Args:
            context (sequence of `int`): tokens; it may be the text itself.
            most (`int`): places for each length, at most: the newest.

        Returns:
            `dict[int, int]`: for each place, the tokens before it that are equal to those that end `context`, counted
            up to 32. The places of longer runs come first, and the newer ones of each run.
        """
        found: dict[int, int] = {}
        for length, last, before in self._chains:
            place = last.get(tuple(context[-length:]), 0)
            if place == len(self.tokens):
                # Nothing follows there.
                place = before[place]
            for _ in range(most):
                if place == 0:
                    break
                if place not in found:
                    found[place] = self._matched(place, context, length)
                place = before[place]
        return found

    def _matched(self, place: int, context: Sequence[int], least: int) -> int:
        matched, most = least, min(place, len(context), _LONGEST_MATCH)
        while matched < most and self.tokens[place - 1 - matched] == context[-1 - matched]:
            matched += 1
        return matched


class Match(NamedTuple):
    """
    An earlier place that the sequence goes on from.

    Args:
        text (`list[int]`): the text of the place.
        end (`int`): its length.
        place (`int`): the place, below `end`.
        matched (`int`): tokens before the place that are equal to the latest ones.
        period (`int`): what leads back from `end`: a text that repeats itself is expected to go on so. 0 if nothing
            follows there.
    """

    text: list[int]
    end: int
    place: int
    matched: int
    period: int

    @property
    def token(self) -> int:
        """The token at the place."""
        return self.text[self.place]

    def next(self) -> Match | None:
        """The match one token further, or `None` at the end of a text."""
        place = self.place + 1
        if place == self.end:
            place -= self.period
        matched = min(self.matched + 1, _LONGEST_MATCH)
        return None if place == self.end else Match(self.text, self.end, place, matched, self.period)


class LookupMemory:
    """
    Texts that are looked up beside the sequence itself, such as those of earlier calls. Threads may share it.

    Args:
        limit (`int`): tokens of all texts together, at most. The texts that were used longest ago leave first: a text
            is used where four tokens in a row of it end a sequence. About 0.2 KB for each token.

    Raises:
        `ValueError`: if the limit is no positive integer.
    """

    def __init__(self, limit: int):
        if isinstance(limit, bool) or not isinstance(limit, int) or limit < 1:
            raise ValueError(f"`memory` is {limit!r}: set it to a number of tokens of at least 1.")
        self._limit, self._size = limit, 0
        # In the order of their last use.
        self._texts: dict[TokenIndex, None] = {}
        self._lock = threading.Lock()

    def __len__(self) -> int:
        """Tokens of all texts."""
        return self._size

    def __getstate__(self) -> dict[str, Any]:
        # A copy has a lock of its own.
        with self._lock:
            return {**vars(self), "_texts": {**self._texts}, "_lock": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state, _lock=threading.Lock())

    def add(self, token_ids: Sequence[int]) -> None:
        """
        Adds a text. It replaces texts that it begins with, such as the earlier turns of a dialogue; of a text beyond
        the limit the end is kept.

        Args:
            token_ids (sequence of `int`): its tokens.
        """
        text = TokenIndex([_REMEMBERED_LENGTH])
        text.extend(token_ids[-self._limit :])
        with self._lock:
            for known in list(self._texts):
                if known.tokens == text.tokens[: len(known.tokens)]:
                    self._drop(known)
            while self._size + len(text.tokens) > self._limit:
                self._drop(next(iter(self._texts)))
            self._texts[text] = None
            self._size += len(text.tokens)

    def find(self, context: Sequence[int], most: int) -> list[Match]:
        """
        Where the end of `context` occurs in the texts.

        Args:
            context (sequence of `int`): tokens.
            most (`int`): places, at most: of the texts that were used or added last.
        """
        run = tuple(context[-_REMEMBERED_LENGTH:])
        with self._lock:
            # A few texts of thousands have the run.
            texts = [text for text in reversed(self._texts) if text.has(run)]
        found: list[Match] = []
        used: list[TokenIndex] = []
        for text in texts:
            places, end = text.places(context, most - len(found)), len(text.tokens)
            found += [Match(text.tokens, end, place, matched, 0) for place, matched in places.items()]
            used += [text] * bool(places)
            if len(found) >= most:
                break
        with self._lock:
            for text in reversed(used):
                if text in self._texts:
                    self._texts[text] = self._texts.pop(text)
        return found

    def _drop(self, text: TokenIndex) -> None:
        del self._texts[text]
        self._size -= len(text.tokens)


class LookedUp(NamedTuple):
    """
    Continuations of a sequence: a tree without its root, best first.

    Args:
        token_ids (`list[int]`): the tokens of its nodes.
        parents (`list[int]`): the node before each, which has a smaller number; -1 for the sequence's end.
        log_probs (`list[float]`): log-probability of the path up to each node, in descending order.
    """

    token_ids: list[int]
    parents: list[int]
    log_probs: list[float]

    @property
    def probability(self) -> float:
        """Probability of the most probable token; 0 without any."""
        return math.exp(self.log_probs[0]) if self.log_probs else 0.0


class TextLookup:
    """
    Looks up how one sequence of a `generate` call goes on. Each match votes for the token at its place, with the odds
    that a match of its length was right before. A token behind none of the places has as many votes as there are
    different tokens behind them (Witten and Bell 1991): a context that went on in many ways foretells little. So a
    token's probability grows with its places and with the length of their matches, and falls with every other token.

    Args:
        shares (`list[Share]`): how often matches of the lengths in `_SHARES` are right; updated.
        vocab_size (`int`): tokens of the target's vocabulary.
        shortest (`int`): tokens of the shortest match.
        memory ([`LookupMemory`], *optional*): more texts that are looked up.
    """

    def __init__(self, shares: list[Share], vocab_size: int, shortest: int, memory: LookupMemory | None = None):
        self._shares, self._vocab_size, self._memory = shares, vocab_size, memory
        self._index = TokenIndex([length for length in _LENGTHS if length >= shortest])
        # Those of the sequence's end, the longest first.
        self._matches: list[Match] = []

    def extend(self, token_ids: list[int]) -> None:
        """Takes the sequence's next tokens. Those behind a `find` are its outcome."""
        for token in token_ids:
            if not self._matches:
                break
            best = self._matches[0]
            self._shares[_SHARE_OF[best.matched]].observe(best.token == token)
            self._matches = _continued([match for match in self._matches if match.token == token])
        self._index.extend(token_ids)

    def find(self, limit: int, max_depth: int) -> LookedUp:
        """The most probable continuations: `limit` tokens at most, on paths of `max_depth` tokens at most."""
        self._matches = self._find_matches()
        odds = [min(_MOST_ODDS, share.value / max(1e-9, 1.0 - share.value)) for share in self._shares]
        token_ids: list[int] = []
        parents: list[int] = []
        log_probs: list[float] = []
        # Nodes that may come next, the most probable one first: the tree has each node's parent already.
        open_nodes: list[tuple[float, int, int, int, int, list[Match]]] = []
        order = itertools.count()

        def branch(parent: int, depth: int, log_prob: float, matches: list[Match]) -> None:
            followers: dict[int, list[Match]] = {}
            for match in matches:
                # A text of another target may have tokens that this one lacks.
                if match.token < self._vocab_size:
                    followers.setdefault(match.token, []).append(match)
            votes = {token: sum(odds[_SHARE_OF[each.matched]] for each in by) for token, by in followers.items()}
            total = len(votes) + sum(votes.values())
            for token, count in votes.items():
                score = log_prob + math.log(count / total)
                heapq.heappush(open_nodes, (-score, next(order), parent, depth, token, followers[token]))

        if limit > 0 and max_depth > 0:
            branch(-1, 1, 0.0, self._matches)
        while open_nodes and len(token_ids) < limit:
            cost, _, parent, depth, token, matches = heapq.heappop(open_nodes)
            token_ids.append(token)
            parents.append(parent)
            log_probs.append(-cost)
            if depth < max_depth:
                branch(len(token_ids) - 1, depth + 1, -cost, _continued(matches))
        return LookedUp(token_ids, parents, log_probs)

    def _find_matches(self) -> list[Match]:
        text, end = self._index.tokens, len(self._index.tokens)
        places = self._index.places(text, _PLACES)
        found = [Match(text, end, place, matched, end - place) for place, matched in places.items()]
        if self._memory is not None:
            found += self._memory.find(text, _PLACES)
        # Of equal length the first: the newest place.
        return sorted(found, key=lambda match: -match.matched)


def _continued(matches: Iterable[Match]) -> list[Match]:
    """The matches one token further."""
    return [further for match in matches if (further := match.next()) is not None]


# Of each target, the shares of all its lookups.
_shares: weakref.WeakKeyDictionary[PreTrainedModel, list[Share]] = weakref.WeakKeyDictionary()


def lookup_for(drafter: Drafter, target: PreTrainedModel) -> Any:
    """
    The lookup of one sequence: a [`TextLookup`], unless the drafter has a `start_lookup`, which makes its own from the
    target, or `None`.

    Args:
        drafter ([`Drafter`]): the drafter. Its `lookup_memory`, if it has one, is looked up, too. A network knows
            better than a single token's earlier places what follows it, and a drafter without passes does not.
        target ([`PreTrainedModel`]): the target that it drafts for.
    """
    start = getattr(drafter, "start_lookup", None)
    if start is not None:
        return start(target)
    shares = _shares.setdefault(target, [Share(share) for _, share in _SHARES])
    vocab_size = target.config.get_text_config(decoder=True).vocab_size
    shortest = 1 if drafter.max_draft_passes == 0 else 2
    return TextLookup(shares, vocab_size, shortest, getattr(drafter, "lookup_memory", None))


def install() -> None:
    """Registers the lookup for every later call of this process."""
    register_part("lookup", lookup_for)
