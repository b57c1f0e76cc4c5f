# Copyright 2026 The hf_falcon authors. Licensed under the Apache License, Version 2.0.
"""Cache layers that grow in place: a round costs the same at any length of the context."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from transformers import Cache
from transformers.cache_utils import DynamicLayer

_SMALLEST = 256


class GrowingLayer(DynamicLayer):
    """
    A `DynamicLayer` that writes new rows behind the old ones instead of copying all of them into a new tensor.

    `keys` and `values` are views of buffers that grow by half where they are full, and are all of its state: what
    assigns to them, as cropping does, is free to.

    Args:
        layer ([`DynamicLayer`]): the layer that it stands in for, until [`GrowingLayer.give_back`].
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
        """The layer that this one stands in for, with all rows."""
        if self.is_initialized:
            if not self._layer.is_initialized:
                self._layer.lazy_initialization(self.keys, self.values)
            self._layer.keys, self._layer.values = self.keys, self.values
        return self._layer

    def _holds_all_rows(self) -> bool:
        """Whether the rows are still those in the buffers: anyone may have put other tensors there."""
        assert self._buffers is not None
        return all(
            states.data_ptr() == buffer.data_ptr() and states.shape[0] == buffer.shape[0]
            for states, buffer in zip((self.keys, self.values), self._buffers)
        )


def _buffer(rows: Tensor, new: Tensor, length: int, end: int) -> Tensor:
    """A buffer with room for more than `end` rows, the first `length` of them taken from `rows`."""
    capacity = max(_SMALLEST, end + end // 2)
    buffer = new.new_empty(*new.shape[:-2], capacity, new.shape[-1])
    if length:
        buffer[..., :length, :] = rows
    return buffer


def grow_in_place(cache: Cache) -> None:
    """Puts a [`GrowingLayer`] in the place of every plain `DynamicLayer` of a cache."""
    cache.layers = [GrowingLayer(layer) if type(layer) is DynamicLayer else layer for layer in cache.layers]


def give_back(cache: Cache) -> None:
    """Undoes [`grow_in_place`]: the cache has its own layers again, with all rows."""
    cache.layers = [layer.give_back() if isinstance(layer, GrowingLayer) else layer for layer in cache.layers]
