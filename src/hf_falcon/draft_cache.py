# Copyright 2026 The hf_falcon authors. Licensed under the Apache License, Version 2.0.
"""Key-value caches of the drafter's decoder layers."""

from __future__ import annotations

import torch
from torch import Tensor


class DraftCache:
    """
    Preallocated keys and values of the drafter, written in place and rolled back by moving a length.

    A pass writes its rows behind `length` in every layer; [`DraftCache.advance`] keeps them, and a smaller `length`
    forgets them. The buffers double when they are full, so a round costs the same at any context length.
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
        Where a pass may write its rows by itself, in place of `update`; `None` before the first pass.

        Args:
            rows (`int`): rows of the pass.

        Returns:
            For each layer, views as those of `update`, of which the last `rows` rows have any values.
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
        """Keeps the rows that every layer has just written."""
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


class TrainingCache:
    """
    Keys and values of one unrolled training pass, behind those of the passes before it, joined by concatenation so
    that gradients flow. To update a layer twice is to update it once: gradient checkpointing runs layers again.

    Args:
        earlier ([`TrainingCache`], *optional*): that of the pass before.
    """

    def __init__(self, earlier: TrainingCache | None = None):
        self._earlier = earlier
        self._rows: dict[int, tuple[Tensor, Tensor]] = {}

    def update(self, layer: int, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """Same contract as [`DraftCache.update`]; every row is kept."""
        if self._earlier is not None:
            earlier_keys, earlier_values = self._earlier._rows[layer]
            keys = torch.cat((earlier_keys, keys), dim=2)
            values = torch.cat((earlier_values, values), dim=2)
        self._rows[layer] = (keys, values)
        return keys, values
