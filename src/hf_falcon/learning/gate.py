# Copyright 2026 The hf_falcon authors. Licensed under the Apache License, Version 2.0.
"""The gate: whether other weights accept more of the held-out texts than those that draft now, and how far to go."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ..training.estimated_tau import estimated_tau_tree

# Nodes of the tree of the estimate, as many as in the comparisons of `docs/recipes.md`.
_NODES = 8
# Held-out texts without which nothing is replaced.
FEWEST_TEXTS = 4
# Share of the student's gain with which half of its way is enough. A trained drafter keeps 72 to 92 % there, an
# instant one, which has a long way to go, 43 to 57 % (SmolLM2-135M).
_ENOUGH = 2 / 3


@dataclass
class Verdict:
    """
    A comparison.

    Args:
        before, after (`float`): estimated tau of the weights that draft now, and of the others.
        error (`float`): standard error of their difference.
        replaces (`bool`): whether the others are to be used: their lead exceeds its standard error.
    """

    before: float
    after: float
    error: float
    replaces: bool


def estimated_tau(scores: Sequence[Tensor]) -> float:
    """
    Estimated tau of a tree of 8 nodes.

    Args:
        scores (sequence of `torch.Tensor` of shape `(depths, 4)`): of each text, see [`Student.score`].
    """
    return _tau(torch.stack(list(scores)).sum(dim=0)) if scores else 0.0


def compare(before: Sequence[Tensor], after: Sequence[Tensor]) -> Verdict:
    """
    Compares the scores of the same held-out texts. The error is the jackknife's, over texts: neighbouring tokens of a
    text are right or wrong together.
    """
    first, second = torch.stack(list(before)).double(), torch.stack(list(after)).double()
    count, totals = len(first), (first.sum(dim=0), second.sum(dim=0))
    found = _tau(totals[0]), _tau(totals[1])
    gain = found[1] - found[0]
    without = [_tau(totals[1] - second[i]) - _tau(totals[0] - first[i]) for i in range(count)]
    mean = sum(without) / count
    error = ((count - 1) / count * sum((each - mean) ** 2 for each in without)) ** 0.5
    return Verdict(*found, error, count >= FEWEST_TEXTS and gain > 0 and gain > error)


def is_enough(start: Sequence[Tensor], halfway: Sequence[Tensor], end: Sequence[Tensor]) -> bool:
    """
    Whether weights in the middle, between those that learning began with and the student's, have most of the student's
    gain. They have forgotten much less of what the texts of the stream do not have (WiSE-FT, arXiv 2109.01903).

    Args:
        start, halfway, end (sequences of `torch.Tensor`): scores of the same held-out texts with the three.
    """
    first, between, last = estimated_tau(start), estimated_tau(halfway), estimated_tau(end)
    return between - first >= _ENOUGH * (last - first)


def _tau(score: Tensor) -> float:
    shares = score[:, :3] / score[:, 3:].clamp_min(1)
    return estimated_tau_tree(shares.tolist(), _NODES)
