# Copyright 2026 The hf_falcon authors. Licensed under the Apache License, Version 2.0.
"""What drafting gained in one `generate` call."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from transformers.generation.utils import GenerateDecoderOnlyOutput
from transformers.utils import ModelOutput

from .near_ties import NearTies


@dataclass
class DraftStatistics(ModelOutput):
    """
    What drafting gained in one `generate` call.

    Args:
        rounds (`int`):
            Forwards of the target, plain steps among them; in a batch, of each row. The prompt's own is none.
        drafted_tokens (`int`): draft tokens that the target verified, those found in the context among them.
        accepted_tokens (`int`): draft tokens that were emitted.
        new_tokens (`int`): tokens that were emitted.
        tau (`float`): accepted draft tokens a round, without the target's own token.
        alpha (`float`): accepted draft tokens over all new tokens.
        accepted_by_depth (`list[int]`): rounds in which a draft token of depth 1, 2, ... was accepted.
        time (`dict[str, float]`): seconds in "target", "drafter" and "other", the prompt included.
        smallest_gap (`float`, *optional*):
            The least that a token led the second best by, in logits after the processors. `None` when sampling, and
            for batches.
        smallest_gap_token (`int`, *optional*): which token that was, counted from the first new one, 0.
        near_ties (`list[int]`, *optional*):
            All tokens that led by no more than two units in the last place of the logits' dtype. Where the text is
            not plain decoding's, it most likely parts at one of them. In float32 there is hardly ever one.
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


@dataclass
class FalconGenerateOutput(GenerateDecoderOnlyOutput):
    """
    As [`~transformers.generation.GenerateDecoderOnlyOutput`], with

    Args:
        draft_statistics ([`DraftStatistics`], *optional*): `None` where plain decoding ran.
    """

    draft_statistics: DraftStatistics | None = None


class StatisticsRecorder:
    """Counts rounds and measures time during one `generate` call."""

    def __init__(self, device: torch.device):
        self._cuda = device.type == "cuda"
        self._start = time.perf_counter()
        self._seconds = {"target": 0.0, "drafter": 0.0}
        self._events: list[tuple[str, torch.cuda.Event, torch.cuda.Event]] = []
        self._drafted: list[int] = []
        self._accepted: list[int] = []

    @contextmanager
    def measure(self, part: str) -> Iterator[None]:
        """Adds the time inside to `part`. On CUDA events measure the device's time, without waiting for it."""
        if self._cuda:
            begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            begin.record()
            yield
            end.record()
            self._events.append((part, begin, end))
        else:
            begin_seconds = time.perf_counter()
            yield
            self._seconds[part] += time.perf_counter() - begin_seconds

    def add_round(self, drafted: int, accepted: int) -> None:
        """Records a round that verified `drafted` draft tokens and emitted `accepted` of them."""
        self._drafted.append(drafted)
        self._accepted.append(accepted)

    def result(self, new_tokens: int, near_ties: NearTies) -> DraftStatistics:
        """The statistics of the call, which emitted `new_tokens` tokens."""
        seconds = dict(self._seconds)
        if self._cuda:
            torch.cuda.synchronize()
            for part, begin, end in self._events:
                seconds[part] += begin.elapsed_time(end) / 1000
        rounds, accepted = len(self._accepted), sum(self._accepted)
        elapsed = time.perf_counter() - self._start
        return DraftStatistics(
            rounds=rounds,
            drafted_tokens=sum(self._drafted),
            accepted_tokens=accepted,
            new_tokens=new_tokens,
            tau=accepted / rounds if rounds else 0.0,
            alpha=accepted / new_tokens if new_tokens else 0.0,
            accepted_by_depth=[
                sum(count > depth for count in self._accepted) for depth in range(max(self._accepted, default=0))
            ],
            time={**seconds, "other": max(0.0, elapsed - sum(seconds.values()))},
            **near_ties.result()._asdict(),
        )
