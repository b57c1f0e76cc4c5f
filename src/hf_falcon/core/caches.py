# Copyright 2026 The hf_falcon authors. Licensed under the Apache License, Version 2.0.
"""
The target's cache during a call, for any number of rows, and the drafter's cache.

A slot is a place in the cache, as plain decoding numbers it: padding and the rows of a prefix have slots, too. The
prompt's slots are those that its forward filled. Each row then goes on by itself, so rows may have different lengths.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import Cache
from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer, StaticLayer, StaticSlidingWindowLayer

from .tree import to_device

# Spare slots of a buffer that grows: this many, or this share of the slots in use. Growing copies the buffer.
_SPARE, _SPARE_SHARE = 128, 16
# Static slots are a multiple of this number, so that calls of similar lengths have the same shapes.
STATIC_SLOTS = 512


class SlotBuffer:
    """
    Keys and values of one layer, of shape `(rows, heads, slots, head_dim)`, in buffers that grow in small steps.

    Args:
        is_static (`bool`, *optional*, defaults to `False`):
            Whether readers get all slots, also unused ones, so that shapes and addresses stay the same from round to
            round until the buffers grow.
    """

    def __init__(self, is_static: bool = False):
        self.is_static = is_static
        # `(1 or 2, rows, heads, slots, head_dim)`: keys and values together, or apart where their shapes differ.
        self.blocks: list[Tensor] = []
        # The buffers of keys and of values, with all slots.
        self.parts: tuple[Tensor, ...] = ()

    @property
    def size(self) -> int:
        """Slots, used or not."""
        return self.parts[0].shape[2] if self.parts else 0

    def size_for(self, end: int) -> int:
        """Slots once `end` of them are used."""
        if end <= self.size:
            return self.size
        if self.is_static:
            return STATIC_SLOTS * math.ceil(end / STATIC_SLOTS)
        return end + max(_SPARE, end // _SPARE_SHARE)

    def reserve(self, end: int, states: Sequence[Tensor]) -> None:
        """Makes room for `end` slots, for keys and values of the shape and dtype of `states`."""
        if end <= self.size:
            return
        size = self.size_for(end)
        if not self.blocks:
            keys, values = (each[:, :, :0] for each in states)
            together = keys.shape == values.shape and keys.dtype == values.dtype
            self.blocks = [torch.stack((keys, values))] if together else [keys[None], values[None]]
        # One after the other: the old block is freed before the next one grows.
        self.parts = ()
        try:
            for place, old in enumerate(self.blocks):
                self.blocks[place] = new = old.new_empty(*old.shape[:3], size, old.shape[4])
                if used := old.shape[3]:
                    new[..., :used, :] = old
                # A slot that no row sees may not hold NaN. What a single row reads was written.
                if self.is_static or old.shape[1] > 1:
                    new[..., used:, :] = 0
        finally:
            # Where memory is short the states are still there.
            self._split()

    def seen(self, end: int) -> tuple[Tensor, Tensor]:
        """Keys and values of the first `end` slots; of all, if they are static."""
        keys, values = self.parts
        return (keys, values) if self.is_static else (keys.narrow(2, 0, end), values.narrow(2, 0, end))

    def seen_slots(self, end: int) -> int:
        """The number of slots that `seen` gives once `end` are used."""
        return self.size_for(end) if self.is_static else end

    def select(self, rows: Tensor) -> None:
        """Drops all rows but those at these indices."""
        self.blocks = [block.index_select(1, rows) for block in self.blocks]
        self._split()

    def move(self, sources: Tensor, targets: Tensor) -> None:
        """
        Copies the states of each row from the slots `sources` to `targets`, of shape `(rows, count)`, or `(count,)`
        for a single row.
        """
        for block in self.blocks:
            # Gathered first, then written: sources and targets overlap.
            if sources.dim() == 1:
                block.index_copy_(3, targets, block.index_select(3, sources))
            else:
                rows = torch.arange(block.shape[1], device=block.device)[:, None]
                block[:, rows, :, targets] = block[:, rows, :, sources]

    def _split(self) -> None:
        self.parts = tuple(block[place] for block in self.blocks for place in range(block.shape[0]))


class DraftCache:
    """
    Keys and values of the drafter. A pass writes its positions after the first `length` of every layer.
    [`DraftCache.advance`] keeps them; without it, the next pass overwrites them. So a rollback changes `length` only.

    Args:
        num_layers (`int`): the number of layers.
        is_static (`bool`, *optional*, defaults to `False`): see [`SlotBuffer`].
    """

    def __init__(self, num_layers: int, is_static: bool = False):
        self.length = 0
        self.is_static = is_static
        self._layers = [SlotBuffer(is_static) for _ in range(num_layers)]

    def update(self, layer: int, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """
        Writes the positions of one pass.

        Args:
            layer (`int`): index of the layer.
            keys, values (`torch.Tensor` of shape `(1, heads, new, head_dim)`): the new positions.

        Returns:
            Views of all positions, of shape `(1, heads, length + new, head_dim)`; of all slots where they are static.
        """
        buffer, end = self._layers[layer], self.length + keys.shape[2]
        buffer.reserve(end, (keys, values))
        for part, states in zip(buffer.parts, (keys, values)):
            part[:, :, self.length : end] = states
        return buffer.seen(end)

    def room_for(self, new: int) -> list[tuple[Tensor, Tensor]] | None:
        """
        For a pass that writes its `new` positions itself instead of calling `update`: for each layer the same views,
        of which the last `new` are for the pass to write. `None` before the first pass.
        """
        end = self.length + new
        for buffer in self._layers:
            if not buffer.size:
                return None
            buffer.reserve(end, buffer.parts)
        return [buffer.seen(end) for buffer in self._layers]

    def seen_slots(self, end: int) -> int:
        """See [`SlotBuffer.seen_slots`]."""
        return self._layers[0].seen_slots(end)

    def advance(self, new: int) -> None:
        """Keeps the positions of the last pass."""
        self.length += new


class RowSlots:
    """
    How many slots each row of the target's cache uses, and which of them are hidden. All layers share one object.

    A forward writes its tokens behind the slots in use. [`RowSlots.advance`] keeps some of them; without it, the next
    forward overwrites them. So what is rejected, or breaks off, needs no rollback.

    Args:
        lengths (sequence of `int`): slots that each row uses.
        device (`torch.device`): the device of the tensors that it returns.
        hidden (`torch.BoolTensor` of shape `(rows, slots)`, *optional*):
            The slots of a prompt that no token sees: padding, wherever it stands.
    """

    def __init__(self, lengths: Sequence[int], device: torch.device, hidden: Tensor | None = None):
        self._device = device
        self._next: dict[tuple[int, torch.device], Tensor] = {}
        self._set_lengths(lengths)
        self.hidden = None if hidden is None else to_device(hidden, device)

    def __len__(self) -> int:
        """The number of rows."""
        return len(self.lengths)

    def next(self, count: int, device: torch.device | None = None) -> Tensor:
        """The next `count` slots of each row, of shape `(rows, count)`. They are made once a round, not by layer."""
        place = count, device or self._device
        if place not in self._next:
            slots = torch.tensor(self.lengths, device="cpu")[:, None] + torch.arange(count, device="cpu")
            self._next[place] = to_device(slots, place[1])
        return self._next[place]

    def advance(self, counts: Sequence[int]) -> None:
        """Keeps the first `counts` new tokens of each row."""
        self._set_lengths([length + count for length, count in zip(self.lengths, counts)])

    def select(self, rows: Sequence[int]) -> None:
        """Drops all rows but those at these indices."""
        self._set_lengths([self.lengths[row] for row in rows])
        if self.hidden is not None:
            self.hidden = self.hidden[to_device(torch.tensor(rows, device="cpu"), self.hidden.device)]

    def _set_lengths(self, lengths: Sequence[int]) -> None:
        self.lengths = list(lengths)
        # Slots of the longest and of the shortest row: every layer reads them in every round.
        self.longest, self.shortest = max(lengths), min(lengths)
        self._next.clear()


class SlotLayer(DynamicLayer):
    """
    A layer of the target's cache during a call, for rows of different lengths.

    A layer with a window keeps the slots that some row still sees, and few more.

    Args:
        layer ([`CacheLayerMixin`]): the layer that this one replaces. It holds nothing meanwhile, unless it is static.
        slots ([`RowSlots`]): the slots of the rows.
        window (`int`, *optional*): the model's sliding window, for a static layer; others know their own.
        is_static (`bool`, *optional*, defaults to `False`): see [`SlotBuffer`].
    """

    def __init__(self, layer: Any, slots: RowSlots, window: int | None = None, is_static: bool = False):
        self.dtype, self.device, self.is_initialized = layer.keys.dtype, layer.keys.device, True
        self.is_sliding = layer.is_sliding
        self.replaced, self._slots = layer, slots
        # Tokens that the layer lets a token see, itself included.
        self.sliding_window: int | None = None
        # The same, or one more, if the layer is to hold one more in the end.
        self._window: int | None = None
        if isinstance(layer, StaticSlidingWindowLayer):
            self.sliding_window, self._window = window, max(window or 0, layer.max_cache_len + 1)
        elif self.is_sliding:
            self.sliding_window = self._window = layer.sliding_window
        length = slots.longest
        used = min(length, layer.keys.shape[2])
        # The slot that comes first in the buffer.
        self.offset = length - used
        # Slots behind the last forward's tokens.
        self._end = length
        self._buffer = SlotBuffer(is_static)
        keys, values = layer.keys[:, :, :used], layer.values[:, :, :used]
        self._buffer.reserve(used, (keys, values))
        for part, states in zip(self._buffer.parts, (keys, values)):
            part[:, :, :used] = states
        if not isinstance(layer, StaticLayer):
            layer.keys = layer.values = None

    @property
    def keys(self) -> Tensor:
        """What the last forward read; see `update`."""
        return self._buffer.seen(self._end - self.offset)[0]

    @property
    def values(self) -> Tensor:
        """See `keys`."""
        return self._buffer.seen(self._end - self.offset)[1]

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """
        Writes states of shape `(rows, heads, new, head_dim)` behind the slots in use.

        Returns:
            Keys and values of all slots from `offset` on, of shape `(rows, heads, slots, head_dim)`.
        """
        new, slots = key_states.shape[2], self._slots
        seen = self.room(new)
        states = zip(self._buffer.parts, (key_states, value_states))
        # Under autocast a step may compute in another dtype than the prompt.
        if slots.longest == slots.shortest:
            # Every layer of every round comes here.
            for part, written in states:
                part.narrow(2, slots.longest - self.offset, new).copy_(written)
        else:
            places = slots.next(new, key_states.device)
            places = places - self.offset if self.offset else places
            rows = torch.arange(len(slots), device=key_states.device)[:, None]
            for part, written in states:
                # With two index tensors around a slice, the dimension of the slice comes last.
                part[rows, :, places] = written.transpose(1, 2).to(part.dtype)
        return seen

    def room(self, new: int) -> tuple[Tensor, Tensor]:
        """As `update`, for a forward that writes its `new` tokens itself."""
        self._end = self._slots.longest + new
        self._forget(self._end)
        self._buffer.reserve(self._end - self.offset, self._buffer.parts)
        return self._buffer.seen(self._end - self.offset)

    @property
    def has_static_slots(self) -> bool:
        """Whether `update` returns all slots."""
        return self._buffer.is_static

    def get_seq_length(self) -> int:
        """Slots of the longest row."""
        return self._slots.longest

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """The number of slots that a forward of `query_length` tokens reads, and the first of them."""
        end = self._slots.longest + query_length
        self._forget(end)
        return self._buffer.seen_slots(end - self.offset), self.offset

    def move(self, sources: Tensor, targets: Tensor) -> None:
        """See [`SlotBuffer.move`]."""
        if self.offset:
            sources, targets = sources - self.offset, targets - self.offset
        self._buffer.move(sources, targets)

    def select(self, rows: Tensor) -> None:
        """Drops all rows but those at these indices."""
        self._buffer.select(rows.to(self.device))

    def give_back(self) -> Any:
        """The layer that this one replaced, as plain decoding leaves it after as many tokens as all rows have."""
        layer, length = self.replaced, self._slots.shortest
        keys, values = (part[:, :, : length - self.offset] for part in self._buffer.parts)
        if isinstance(layer, StaticLayer):
            layer.reset()
            if keys.shape[0] != layer.keys.shape[0]:
                # Rows have left it, so nobody reads it any more.
                return layer
            if isinstance(layer, StaticSlidingWindowLayer):
                keys, values = keys[:, :, -layer.max_cache_len :], values[:, :, -layer.max_cache_len :]
            layer.update(keys, values)
            if isinstance(layer, StaticSlidingWindowLayer):
                layer.cumulative_length_int = length
            return layer
        if isinstance(layer, DynamicSlidingWindowLayer):
            first = 1 - layer.sliding_window
            keys, values, layer.cumulative_length = keys[:, :, first:], values[:, :, first:], length
        layer.keys, layer.values = keys, values
        return layer

    def _forget(self, end: int) -> None:
        """Moves the slots that some row still sees to the front of a buffer that lacks room up to slot `end`."""
        if self._window is None or end - self.offset <= self._buffer.size:
            return
        oldest = max(self.offset, self._slots.shortest - self._window + 1)
        if oldest > self.offset:
            used = slice(oldest - self.offset, self._slots.longest - self.offset)
            for part in self._buffer.parts:
                part[:, :, : used.stop - used.start] = part[:, :, used].clone()
            self.offset = oldest


# By exact type: a subclass may keep more than keys and values.
ROW_LAYERS = (DynamicLayer, DynamicSlidingWindowLayer, StaticLayer, StaticSlidingWindowLayer)


def adopt_layers(cache: Cache, slots: RowSlots, window: int | None, is_static: bool = False) -> list[SlotLayer]:
    """
    Replaces every layer of keys and values that has any by a [`SlotLayer`], one after the other, so that no more than
    one layer is held twice; static layers stay beside the new ones.

    Args:
        cache ([`Cache`]): the cache after its prompt.
        slots ([`RowSlots`]): the slots of its rows.
        window (`int`, *optional*): the sliding window of the model.
        is_static (`bool`, *optional*, defaults to `False`): see [`SlotBuffer`].

    Returns:
        `list[SlotLayer]`: the new layers.
    """
    found = []
    for place, layer in enumerate(cache.layers):
        if type(layer) in ROW_LAYERS and layer.is_initialized and layer.get_seq_length() > 0:
            found.append(SlotLayer(layer, slots, window, is_static))
            cache.layers[place] = found[-1]
    return found


def give_back(cache: Cache) -> None:
    """Undoes [`adopt_layers`]; see [`SlotLayer.give_back`]."""
    cache.layers = [layer.give_back() if isinstance(layer, SlotLayer) else layer for layer in cache.layers]
