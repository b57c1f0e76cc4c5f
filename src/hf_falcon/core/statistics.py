# Copyright 2026 The hf_falcon authors. Licensed under the Apache License, Version 2.0.
"""Statistics of one `generate` call: rounds, accepted tokens, times and near-ties."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor
from transformers.generation.utils import GenerateDecoderOnlyOutput
from transformers.utils import ModelOutput

# Units in the last place of the best logit, in the dtype of the logits.
_UNITS = 2


class Gaps(NamedTuple):
    """See [`DraftStatistics`]."""

    smallest_gap: float | None
    smallest_gap_token: int | None
    near_ties: list[int] | None


class NearTies:
    """By how much the greedy tokens of one `generate` call led. Nothing waits for the device before the end."""

    def __init__(self) -> None:
        self._gaps: list[Tensor] = []
        self._units: list[Tensor] = []

    def observe(self, logits: Tensor, scores: Tensor | None = None) -> None:
        """
        Records tokens in the order of the text.

        Args:
            logits (`torch.Tensor` of shape `(tokens, vocab_size)`): the target's own, not upcast.
            scores (`torch.Tensor` of the same shape, *optional*): what processors made of them.
        """
        # The best, and the best of the others: as `topk` finds them in several times as long on a CPU.
        scores = logits if scores is None else scores
        best, tokens = scores.max(dim=-1, keepdim=True)
        second = scores.scatter(-1, tokens, -torch.inf).amax(dim=-1)
        self._gaps.append((best[:, 0].float() - second.float()).to(logits.device))
        # The largest power of two in a number is what its last place counts from.
        exponent = torch.frexp(logits.amax(dim=-1).float()).exponent - 1
        self._units.append(torch.finfo(logits.dtype).eps * torch.exp2(exponent.float()))

    def result(self) -> Gaps:
        """What was recorded; `None` three times where that is nothing."""
        if not self._gaps:
            return Gaps(None, None, None)
        # Two infinities are a tie.
        gaps = torch.cat(self._gaps).nan_to_num(nan=0.0, posinf=math.inf)
        near = gaps <= _UNITS * torch.cat(self._units)
        token = int(gaps.argmin())
        return Gaps(float(gaps[token]), token, near.nonzero()[:, 0].tolist())


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
