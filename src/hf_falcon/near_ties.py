# Copyright 2026 The hf_falcon authors. Licensed under the Apache License, Version 2.0.
"""
Near-ties: greedy tokens that lead the second best by no more than rounding.

A forward over several tokens rounds otherwise than one over a single token, as one of another batch size does. Where
the two best logits are that near to each other, each of them may come out first, and the texts part.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

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
