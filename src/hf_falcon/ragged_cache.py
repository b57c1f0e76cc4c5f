# Copyright 2026 The hf_falcon authors. Licensed under the Apache License, Version 2.0.
"""
Cache layers whose rows have different lengths: the sequences of a batch get ahead of each other.

The tokens of a row lie behind each other from slot 0 on, without its padding, so a slot is a token's place in its row.
What lies behind a row's length is free: a tree is written there, and the accepted path is moved to its front. So holes
are only ever at a row's end, and no buffer is longer than the longest row and one tree.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import DynamicLayer

# Slots that a buffer is made larger than it has to be.
_SPARE = 256


class RowLengths:
    """
    How many tokens each row has in the cache; shared by all its layers.

    Args:
        lengths (`list[int]`): tokens of each row.
        device (`torch.device`): where the slots are told.
    """

    def __init__(self, lengths: list[int], device: torch.device):
        self.values = lengths
        self._device = device

    def slots(self, count: int) -> Tensor:
        """The next `count` slots of each row, of shape `(rows, count)`."""
        return torch.tensor(self.values, device=self._device)[:, None] + torch.arange(count, device=self._device)

    def advance(self, counts: Sequence[int]) -> None:
        """Keeps the first `counts` of what was written to each row."""
        self.values = [length + count for length, count in zip(self.values, counts)]


class RaggedLayer(DynamicLayer):
    """
    Keys and values of rows of different lengths.

    A forward writes each row's new states behind its own length; [`RaggedLayer.keep`] and [`RowLengths.advance`] say
    what stays. Windows are the mask's concern: a layer keeps all that it is given.

    Args:
        layer ([`DynamicLayer`]): a layer that has run the prompt.
        slots (`list[torch.Tensor]`): for each row the slots of the prompt that are no padding.
        lengths ([`RowLengths`]): lengths of the rows.
    """

    def __init__(self, layer: DynamicLayer, slots: list[Tensor], lengths: RowLengths):
        super().__init__()
        self.lazy_initialization(layer.keys, layer.values)
        self._lengths = lengths
        # Where there is a window, a layer has dropped what lies before it.
        dropped = layer.get_seq_length() - layer.keys.shape[-2]
        self._buffers = [_Rows(states, slots, dropped) for states in (layer.keys, layer.values)]

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """
        Writes states of shape `(rows, heads, new, head_dim)` behind the rows.

        Returns:
            All states of the rows, of shape `(rows, heads, longest row + new, head_dim)`.
        """
        slots = self._lengths.slots(key_states.shape[-2]).to(key_states.device)
        end = max(self._lengths.values) + key_states.shape[-2]
        self.keys, self.values = (
            buffer.write(states, slots, end) for buffer, states in zip(self._buffers, (key_states, value_states))
        )
        return self.keys, self.values

    def keep(self, sources: Tensor, targets: Tensor) -> None:
        """Moves states from the slots `sources` to the slots `targets`, both of shape `(rows, count)`."""
        for buffer in self._buffers:
            buffer.move(sources, targets)

    def select(self, rows: Tensor) -> None:
        """Keeps the rows at these indices only."""
        for buffer in self._buffers:
            buffer.select(rows)

    def padded(self, slots: list[Tensor], prompt_length: int, length: int) -> tuple[Tensor, Tensor]:
        """
        Keys and values as a layer without ragged rows has them, of shape `(rows, heads, length, head_dim)`: those of
        each row's prompt in its `slots` of the first `prompt_length`, zeros in the padding, the others behind.
        """
        keys, values = (buffer.padded(slots, prompt_length, length) for buffer in self._buffers)
        return keys, values

    def get_seq_length(self) -> int:
        """Tokens of the longest row."""
        return max(self._lengths.values)


class _Rows:
    """One buffer of shape `(rows, heads, slots, head_dim)`."""

    def __init__(self, states: Tensor, slots: list[Tensor], dropped: int):
        longest = max(len(each) for each in slots)
        self._states = states.new_zeros(*states.shape[:2], longest + _SPARE, states.shape[3])
        for row, each in enumerate(slots):
            kept = each.to(states.device)[each.to(states.device) >= dropped]
            self._states[row, :, len(each) - len(kept) : len(each)] = states[row, :, kept - dropped]

    def write(self, new: Tensor, slots: Tensor, end: int) -> Tensor:
        if self._states.shape[2] < end:
            grown = self._states.new_zeros(*self._states.shape[:2], end + end // 2, self._states.shape[3])
            grown[:, :, : self._states.shape[2]] = self._states
            self._states = grown
        # An index, a slice and an index: the slice comes last in what they select.
        self._states[self._row_numbers(), :, slots] = new.transpose(1, 2)
        return self._states[:, :, :end]

    def move(self, sources: Tensor, targets: Tensor) -> None:
        sources, targets = sources.to(self._states.device), targets.to(self._states.device)
        rows = self._row_numbers()
        self._states[rows, :, targets] = self._states[rows, :, sources]

    def select(self, rows: Tensor) -> None:
        self._states = self._states.index_select(0, rows.to(self._states.device))

    def padded(self, slots: list[Tensor], prompt_length: int, length: int) -> Tensor:
        states = self._states.new_zeros(*self._states.shape[:2], length, self._states.shape[3])
        for row, each in enumerate(slots):
            end = len(each) + length - prompt_length
            states[row, :, each.to(states.device)] = self._states[row, :, : len(each)]
            states[row, :, prompt_length:] = self._states[row, :, len(each) : end]
        return states

    def _row_numbers(self) -> Tensor:
        return torch.arange(self._states.shape[0], device=self._states.device)[:, None]
