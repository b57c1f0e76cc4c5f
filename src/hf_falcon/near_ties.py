# Copyright 2026 The hf_falcon authors. Licensed under the Apache License, Version 2.0.
"""Near-ties: the greedy tokens that rounding could have decided, which a call's statistics report."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from .core.interfaces import register_part

# Units in the last place of the best logit, in the dtype of the logits.
_UNITS = 2


def install() -> None:
    """Makes calls with a drafter report near-ties."""
    register_part("near_ties", NearTies)


class Gaps(NamedTuple):
    """The fields of [`DraftStatistics`] that describe near-ties."""

    smallest_gap: float | None
    smallest_gap_token: int | None
    near_ties: list[int] | None


class NearTies:
    """
    The leads of the greedy tokens of one `generate` call over the second best. No step waits for the device before
    [`NearTies.result`].
    """

    def __init__(self) -> None:
        self._gaps: list[Tensor] = []
        self._largest: list[Tensor] = []

    def observe(self, logits: Tensor, scores: Tensor | None = None) -> None:
        """
        Records tokens in the order of the text.

        Args:
            logits (`torch.Tensor` of shape `(tokens, vocab_size)`): the target's own, not upcast.
            scores (`torch.Tensor` of the same shape, *optional*): the logits after the processors.
        """
        # The best two. `topk` takes several times as long on a CPU.
        scores = logits if scores is None else scores
        best, tokens = scores.max(dim=-1, keepdim=True)
        second = scores.scatter(-1, tokens, -torch.inf).amax(dim=-1)
        self._gaps.append((best[:, 0].float() - second.float()).to(logits.device))
        self._largest.append(logits.amax(dim=-1))

    def result(self) -> Gaps:
        """The smallest lead, its token and all near-ties; `None` for each if nothing was recorded."""
        if not self._gaps:
            return Gaps(None, None, None)
        # On the host: not every device has `frexp`.
        gaps, largest = torch.cat(self._gaps).cpu(), torch.cat(self._largest).cpu()
        # Two infinities are a tie.
        gaps = gaps.nan_to_num(nan=0.0, posinf=math.inf)
        # The unit in the last place of a number is `eps` times the largest power of two in it.
        exponent = torch.frexp(largest.float()).exponent - 1
        near = gaps <= _UNITS * torch.finfo(largest.dtype).eps * torch.exp2(exponent.float())
        token = int(gaps.argmin())
        return Gaps(float(gaps[token]), token, near.nonzero()[:, 0].tolist())
