# Copyright 2026 The hf_falcon authors. Licensed under the Apache License, Version 2.0.
"""Sampling for rows that are not at the same step: each draws what plain decoding of the whole batch draws for it."""

from __future__ import annotations

import torch
from torch import Tensor

# Steps that the fastest row may be ahead of the slowest: the noise of a step is kept until all rows have used it.
MOST_STEPS_AHEAD = 64


class StepNoise:
    """
    The noise of each step of a batch, as plain decoding draws it.

    For one sample a row, `torch.multinomial` takes the largest of p / q, with q drawn from the exponential
    distribution for all rows and tokens at once. Here q is drawn once a step, in the order of the steps, when the
    first row gets there; so the generator goes on from call to call as in plain decoding, too.
    """

    def __init__(self, rows: int):
        self._rows = rows
        self._first = 0
        self._steps: list[Tensor] = []

    def draw(self, probs: Tensor, row: int, step: int) -> Tensor:
        """
        Draws a row's token of a step.

        Args:
            probs (`torch.Tensor` of shape `(1, vocab_size)`): probabilities of the row.
            row (`int`): which of the rows it is.
            step (`int`): which token of the row it is, from 0; never one that was forgotten.

        Returns:
            `torch.LongTensor` of shape `(1,)`.

        Raises:
            `RuntimeError`: where `torch.multinomial` raises it: if probabilities are negative, infinite or no numbers.
        """
        if not bool((probs >= 0).all() & probs.isfinite().all()):
            raise RuntimeError("probability tensor contains either `inf`, `nan` or element < 0")
        while self._first + len(self._steps) <= step:
            self._steps.append(torch.empty_like(probs.expand(self._rows, -1).contiguous()).exponential_())
        return (probs / self._steps[step - self._first][row]).argmax(dim=-1)

    def forget(self, steps: int) -> None:
        """Forgets the noise of all steps before `steps`, which no row needs any more."""
        del self._steps[: max(0, steps - self._first)]
        self._first = max(self._first, steps)
