# Copyright 2026 The hf_falcon authors. Licensed under the Apache License, Version 2.0.
"""Acceptance and speed over the calls of a learner, and their plot."""

from __future__ import annotations

import io
from collections.abc import Sequence

from .recorder import CallCounts

# Entries, at most: two neighbours become one then.
_MOST_ENTRIES = 512


class History:
    """
    Counts over calls, of bounded length.

    Args:
        entries (sequence of `list`, *optional*): earlier ones: calls, tokens, rounds, accepted tokens and seconds.
        calls_an_entry (`int`, *optional*, defaults to 1): calls of a full entry.
    """

    def __init__(self, entries: Sequence[Sequence[float]] = (), calls_an_entry: int = 1):
        self.entries: list[list[float]] = [list(entry) for entry in entries]
        self.calls_an_entry = calls_an_entry

    def add(self, counts: CallCounts) -> None:
        """Takes a call."""
        new = [1, counts.tokens, counts.rounds, counts.accepted, counts.seconds]
        if self.entries and self.entries[-1][0] < self.calls_an_entry:
            self.entries[-1] = _sum(self.entries[-1], new)
            return
        if len(self.entries) >= _MOST_ENTRIES:
            pairs = zip(self.entries[::2], self.entries[1::2])
            self.entries = [_sum(*pair) for pair in pairs] + self.entries[len(self.entries) // 2 * 2 :]
            self.calls_an_entry *= 2
        self.entries.append(new)

    def total(self) -> CallCounts:
        """The counts of all calls."""
        _, tokens, rounds, accepted, seconds = map(sum, zip(*self.entries)) if self.entries else [0] * 5
        return CallCounts(int(tokens), int(rounds), int(accepted), seconds)


def draw(entries: Sequence[Sequence[float]]) -> bytes | None:
    """
    The plot as a PNG file: accepted draft tokens a round above, tokens a second below.

    Args:
        entries (sequence of `list`): see [`History`].

    Returns:
        `bytes`, or `None` before the first call.

    Raises:
        `ImportError`: without matplotlib.
    """
    # Not pyplot, which has figures and a backend for the whole process.
    from matplotlib.figure import Figure

    if not entries:
        return None
    figure = Figure(figsize=(9, 7), layout="constrained")
    taus, speeds = figure.subplots(2, sharex=True)
    calls, places = 0.0, []
    for entry in entries:
        calls += entry[0]
        places.append(calls)
    marker = "." if len(entries) < 3 else ""
    taus.plot(places, [entry[3] / max(1, entry[2]) for entry in entries], marker=marker)
    taus.set_ylabel("accepted draft tokens a round")
    speeds.plot(places, [entry[1] / max(1e-9, entry[4]) for entry in entries], marker=marker)
    speeds.set_ylabel("tokens a second")
    speeds.set_xlabel("call")
    for axes in (taus, speeds):
        axes.grid(alpha=0.3)
        axes.set_ylim(bottom=0)
    file = io.BytesIO()
    figure.savefig(file, format="png", dpi=100)
    return file.getvalue()


def _sum(first: Sequence[float], second: Sequence[float]) -> list[float]:
    return [a + b for a, b in zip(first, second)]
