# Copyright 2026 The hf_falcon authors. Licensed under the Apache License, Version 2.0.
"""Key-value caches: the drafter's, the target's for one row, and the target's for rows of different lengths."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import Cache
from transformers.cache_utils import DynamicLayer

_SMALLEST = 256

# Extra slots of a new buffer.
_SPARE = 256


class DraftCache:
    """
    Preallocated keys and values of the drafter. They are written in place; a rollback changes `length` only.

    A pass writes its rows after the first `length` rows of every layer. [`DraftCache.advance`] keeps them; without it,
    the next pass overwrites them. Full buffers double in size, so a round takes the same time at any context length.
    """

    def __init__(self, num_layers: int, capacity: int = 256):
        self.length = 0
        self._capacity = capacity
        self._keys: list[Tensor | None] = [None] * num_layers
        self._values: list[Tensor | None] = [None] * num_layers

    def update(self, layer: int, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """
        Writes the rows of one pass and returns all rows so far.

        Args:
            layer (`int`): index of the decoder layer.
            keys, values (`torch.Tensor` of shape `(batch, kv_heads, rows, head_dim)`): the new rows.

        Returns:
            Views of shape `(batch, kv_heads, length + rows, head_dim)`.
        """
        end = self.length + keys.shape[2]
        self._keys[layer] = key_buffer = self._fit(self._keys[layer], keys, end)
        self._values[layer] = value_buffer = self._fit(self._values[layer], values, end)
        key_buffer[:, :, self.length : end] = keys
        value_buffer[:, :, self.length : end] = values
        return key_buffer[:, :, :end], value_buffer[:, :, :end]

    def room(self, rows: int) -> list[tuple[Tensor, Tensor]] | None:
        """
        Buffers for a pass that writes its rows itself instead of calling `update`; `None` before the first pass.

        Args:
            rows (`int`): rows of the pass.

        Returns:
            For each layer, the same views as from `update`. The last `rows` rows are for the pass to write.
        """
        end, layers = self.length + rows, []
        for layer, (keys, values) in enumerate(zip(self._keys, self._values)):
            if keys is None or values is None:
                return None
            self._keys[layer] = keys = self._fit(keys, keys, end)
            self._values[layer] = values = self._fit(values, values, end)
            layers.append((keys[:, :, :end], values[:, :, :end]))
        return layers

    def advance(self, rows: int) -> None:
        """Keeps the rows of the last pass."""
        self.length += rows

    def _fit(self, buffer: Tensor | None, rows: Tensor, needed: int) -> Tensor:
        if buffer is not None and buffer.shape[2] >= needed:
            return buffer
        while self._capacity < needed:
            self._capacity *= 2
        batch, heads, _, width = rows.shape
        grown = rows.new_empty(batch, heads, self._capacity, width)
        if buffer is not None:
            grown[:, :, : self.length] = buffer[:, :, : self.length]
        return grown


class GrowingLayer(DynamicLayer):
    """
    A `DynamicLayer` that appends new rows in place, instead of copying all rows into a new tensor.

    `keys` and `values` are views of buffers, which grow by half when they are full. They are the whole state of the
    layer: other code, such as cropping, may assign new tensors to them.

    Args:
        layer ([`DynamicLayer`]): the layer that this one replaces until [`GrowingLayer.give_back`].
    """

    def __init__(self, layer: DynamicLayer):
        super().__init__()
        self._layer = layer
        self._buffers: tuple[Tensor, Tensor] | None = None
        if layer.is_initialized:
            self.lazy_initialization(layer.keys, layer.values)
            self.keys, self.values = layer.keys, layer.values

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Appends `key_states` and `value_states` of shape `(batch, heads, new, head_dim)`; returns all rows."""
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        length = self.get_seq_length()
        end = length + key_states.shape[-2]
        if self._buffers is None or self._buffers[0].shape[-2] < end or not self._holds_all_rows():
            self._buffers = (
                _buffer(self.keys, key_states, length, end),
                _buffer(self.values, value_states, length, end),
            )
        for buffer, states in zip(self._buffers, (key_states, value_states)):
            buffer[..., length:end, :] = states
        self.keys, self.values = (buffer[..., :end, :] for buffer in self._buffers)
        return self.keys, self.values

    def give_back(self) -> DynamicLayer:
        """Returns the original layer, with all rows."""
        if self.is_initialized:
            if not self._layer.is_initialized:
                self._layer.lazy_initialization(self.keys, self.values)
            self._layer.keys, self._layer.values = self.keys, self.values
        return self._layer

    def _holds_all_rows(self) -> bool:
        """Whether `keys` and `values` are still views of the buffers. Other code may have assigned other tensors."""
        assert self._buffers is not None
        return all(
            states.data_ptr() == buffer.data_ptr() and states.shape[0] == buffer.shape[0]
            for states, buffer in zip((self.keys, self.values), self._buffers)
        )


def _buffer(rows: Tensor, new: Tensor, length: int, end: int) -> Tensor:
    """A buffer with room for more than `end` rows. The first `length` rows are copied from `rows`."""
    capacity = max(_SMALLEST, end + end // 2)
    buffer = new.new_empty(*new.shape[:-2], capacity, new.shape[-1])
    if length:
        buffer[..., :length, :] = rows
    return buffer


def grow_in_place(cache: Cache) -> None:
    """Replaces every plain `DynamicLayer` of a cache by a [`GrowingLayer`]."""
    cache.layers = [GrowingLayer(layer) if type(layer) is DynamicLayer else layer for layer in cache.layers]


def give_back(cache: Cache) -> None:
    """Undoes [`grow_in_place`]: restores the original layers, with all rows."""
    cache.layers = [layer.give_back() if isinstance(layer, GrowingLayer) else layer for layer in cache.layers]


class RowLengths:
    """
    The number of tokens of each row in the cache. All layers share one object.

    Args:
        lengths (`list[int]`): tokens of each row.
        device (`torch.device`): the device of the slots that it returns.
    """

    def __init__(self, lengths: list[int], device: torch.device):
        self.values = lengths
        self._device = device

    def slots(self, count: int) -> Tensor:
        """The next `count` slots of each row, of shape `(rows, count)`."""
        return torch.tensor(self.values, device=self._device)[:, None] + torch.arange(count, device=self._device)

    def advance(self, counts: Sequence[int]) -> None:
        """Keeps the first `counts` new tokens of each row."""
        self.values = [length + count for length, count in zip(self.values, counts)]


class RaggedLayer(DynamicLayer):
    """
    Keys and values of rows of different lengths.

    A forward writes the new states of each row after the row's own length. [`RaggedLayer.keep`] and
    [`RowLengths.advance`] then keep some of them. The layer keeps all states, also outside a sliding window: the mask
    applies the window.

    Args:
        layer ([`DynamicLayer`]): a layer that has run the prompt.
        slots (`list[torch.Tensor]`): for each row, the slots of the prompt without padding.
        lengths ([`RowLengths`]): lengths of the rows.
    """

    def __init__(self, layer: DynamicLayer, slots: list[Tensor], lengths: RowLengths):
        super().__init__()
        self.lazy_initialization(layer.keys, layer.values)
        self._lengths = lengths
        # A layer with a window has dropped the states before it.
        dropped = layer.get_seq_length() - layer.keys.shape[-2]
        self._buffers = [_Rows(states, slots, dropped) for states in (layer.keys, layer.values)]

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """
        Appends states of shape `(rows, heads, new, head_dim)` to the rows.

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
        """Drops all rows except the rows at these indices."""
        for buffer in self._buffers:
            buffer.select(rows)

    def padded(self, slots: list[Tensor], prompt_length: int, length: int) -> tuple[Tensor, Tensor]:
        """
        Keys and values in the layout of an ordinary layer, of shape `(rows, heads, length, head_dim)`. In the first
        `prompt_length` slots, the states of each row's prompt are in its `slots`, and padding is zero. The states of
        new tokens follow.
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
        # With two index tensors around a slice, the dimension of the slice comes last.
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
