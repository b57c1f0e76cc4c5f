# Copyright 2026 The hf_falcon authors. Licensed under the Apache License, Version 2.0.
"""What one `generate` call returns beside its text: statistics."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from transformers.generation.utils import GenerateDecoderOnlyOutput
from transformers.utils import ModelOutput

from .costs import Stopwatch


@dataclass(repr=False)
class DraftStatistics(ModelOutput):
    """
    The gain of drafting in one `generate` call. `print` shows it in one line.

    Args:
        rounds (`int`):
            Forwards of the target after the prompt's, plain steps among them. In a batch each row has its own rounds.
        drafted_tokens (`int`): draft tokens that the target verified, tokens of prompt lookup among them.
        accepted_tokens (`int`): draft tokens that were emitted.
        new_tokens (`int`): tokens that were emitted.
        tau (`float`): accepted draft tokens a round, without the target's own token.
        alpha (`float`): accepted draft tokens over all new tokens.
        accepted_by_depth (`list[int]`): rounds in which a draft token of depth 1, 2, ... was accepted.
        time (`dict[str, float]`): seconds in "target", "drafter" and "other", the prompt included.
        smallest_gap (`float`, *optional*):
            The smallest lead of a token over the second best, in logits after the processors. `None` when sampling,
            and for batches.
        smallest_gap_token (`int`, *optional*): the index of that token; the first new token has index 0.
        near_ties (`list[int]`, *optional*):
            The indices of all tokens with a lead of at most two units in the last place of the logits' dtype. If the
            text differs from plain decoding's, it most likely diverges at one of them. In float32 they are very rare.
        learning (`dict`, *optional*): how far a drafter that learns while it serves has come; `None` for others.
    """

    rounds: int | None = None
    drafted_tokens: int | None = None
    accepted_tokens: int | None = None
    new_tokens: int | None = None
    tau: float | None = None
    alpha: float | None = None
    accepted_by_depth: list[int] | None = None
    time: dict[str, float] | None = None
    smallest_gap: float | None = None
    smallest_gap_token: int | None = None
    near_ties: list[int] | None = None
    learning: dict[str, Any] | None = None

    @property
    def tokens_per_round(self) -> float | None:
        """Tokens a round, the target's own among them: tau + 1, which serving engines call acceptance length."""
        return None if self.tau is None else self.tau + 1

    def __repr__(self) -> str:
        if self.rounds is None or self.tau is None or self.alpha is None or self.time is None:
            return "DraftStatistics(empty)"
        tokens = "1 token" if self.new_tokens == 1 else f"{self.new_tokens} tokens"
        rounds = "1 round" if self.rounds == 1 else f"{self.rounds} rounds"
        parts = ", ".join(f"{name} {seconds:.2f}" for name, seconds in self.time.items())
        return (
            f"DraftStatistics({tokens} in {rounds}: {self.tau + 1:.2f} tokens a round, {self.alpha:.0%} drafted; "
            f"{sum(self.time.values()):.2f} s: {parts})"
        )


@dataclass
class FalconGenerateOutput(GenerateDecoderOnlyOutput):
    """
    As [`~transformers.generation.GenerateDecoderOnlyOutput`], with

    Args:
        draft_statistics ([`DraftStatistics`], *optional*): `None` if plain decoding ran.
    """

    draft_statistics: DraftStatistics | None = None


class StatisticsRecorder:
    """Counts rounds and measures time during one `generate` call."""

    def __init__(self) -> None:
        self._start = time.perf_counter()
        self._watches: dict[str, list[Stopwatch]] = {"target": [], "drafter": []}
        self._drafted: list[int] = []
        self._accepted: list[int] = []

    @contextmanager
    def measure(self, part: str, device: torch.device) -> Iterator[Stopwatch]:
        """Adds the time inside, on `device`, to `part`. Gives the stopwatch, whose lap ends with the context."""
        watch = Stopwatch(device)
        yield watch
        watch.lap()
        self._watches[part].append(watch)

    def add_round(self, drafted: int, accepted: int) -> None:
        """Records a round that verified `drafted` draft tokens and emitted `accepted` of them."""
        self._drafted.append(drafted)
        self._accepted.append(accepted)

    def result(self, new_tokens: int, near_ties: Any) -> DraftStatistics:
        """The statistics of the call, which emitted `new_tokens` tokens."""
        laps = {part: [watch.seconds(wait=True) or () for watch in of] for part, of in self._watches.items()}
        seconds = {part: sum(map(sum, of)) for part, of in laps.items()}
        rounds, accepted, depths = len(self._accepted), sum(self._accepted), range(max(self._accepted, default=0))
        elapsed = time.perf_counter() - self._start
        return DraftStatistics(
            rounds=rounds,
            drafted_tokens=sum(self._drafted),
            accepted_tokens=accepted,
            new_tokens=new_tokens,
            tau=accepted / rounds if rounds else 0.0,
            alpha=accepted / new_tokens if new_tokens else 0.0,
            accepted_by_depth=[sum(count > depth for count in self._accepted) for depth in depths],
            time={**seconds, "other": max(0.0, elapsed - sum(seconds.values()))},
            **({} if near_ties is None else near_ties.result()._asdict()),
        )
