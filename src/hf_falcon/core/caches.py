# Copyright 2026 The hf_falcon authors. Licensed under the Apache License, Version 2.0.
"""The drafter's cache, the target's for one row, for rows of different lengths, and for layers that keep a state."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import Cache, DynamicCache
from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer, StaticLayer, StaticSlidingWindowLayer

from .tree import to_device

# Slots of a new buffer, at least.
_SMALLEST = 256

# Extra slots of a new buffer.
_SPARE = 256

# Static slots are a multiple of this number, so that calls of similar lengths have the same shapes.
STATIC_SLOTS = 512


class StackedRows:
    """
    Keys and values of several layers. Rows are written in place. Full buffers grow by half, so a round takes the same
    time at any context length.

    Keys and values are two buffers of shape `(layers, batch, heads, slots, head_dim)`, so that one copy moves the
    accepted rows of all layers; or, `apart`, two buffers a layer.

    Args:
        num_layers (`int`): the number of layers.
        static_slots (`int`, *optional*):
            Slots of the buffers. Layers then return all slots, so that shapes and addresses stay the same from round
            to round; if this many are not enough, the buffers grow all the same.
        apart (`bool`, *optional*, defaults to `False`):
            Whether each layer has buffers of its own. Compiled code that writes into several layers takes longer where
            they share one.
    """

    def __init__(self, num_layers: int, static_slots: int | None = None, apart: bool = False):
        self._num_layers, self._apart = num_layers, apart
        self.is_static = static_slots is not None
        self._slots = static_slots or 0
        # Keys of all layers, then their values; and for each layer, its part of both.
        self._buffers: list[Tensor] = []
        self._parts: list[tuple[Tensor, Tensor]] = []

    def write(self, layer: int, start: int, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """
        Writes new rows of a layer.

        Args:
            layer (`int`): index of the layer.
            start (`int`): the slot of the first new row.
            keys, values (`torch.Tensor` of shape `(batch, heads, rows, head_dim)`): the new rows.

        Returns:
            Views of all rows so far, of shape `(batch, heads, start + rows, head_dim)`; of all slots where these are
            static.
        """
        end = start + keys.shape[-2]
        self.reserve(end, keys, values)
        for part, states in zip(self._parts[layer], (keys, values)):
            part[:, :, start:end] = states
        return self.seen(layer, end)

    def room(self, layer: int, end: int) -> tuple[Tensor, Tensor]:
        """As `write`, for a forward that writes its rows itself, up to `end`."""
        self.reserve(end, *self._parts[layer])
        return self.seen(layer, end)

    def seen(self, layer: int, end: int) -> tuple[Tensor, Tensor]:
        """See the result of `write`. Static slots are the same tensors every time."""
        return self._parts[layer] if self.is_static else self.rows(layer, end)

    def seen_slots(self, end: int) -> int:
        """The number of slots that `write` returns once `end` rows are written."""
        return self._slots_for(end) if self.is_static else end

    def rows(self, layer: int, end: int) -> tuple[Tensor, Tensor]:
        """Views of the first `end` rows of a layer; see `write`."""
        keys, values = self._parts[layer]
        return keys[:, :, :end], values[:, :, :end]

    def reserve(self, end: int, keys: Tensor, values: Tensor) -> None:
        """Makes room for `end` rows of the shape and dtype of `keys` and `values`."""
        slots, old = self._slots_for(end), self._buffers
        if old and old[0].shape[-2] == slots:
            return
        self._slots = slots
        count, layers = (self._num_layers, ()) if self._apart else (1, (self._num_layers,))
        self._buffers = [
            # Zeros: a slot that no row sees may not hold NaN.
            states.new_zeros(*layers, *states.shape[:2], slots, states.shape[-1])
            for states in (keys, values)
            for _ in range(count)
        ]
        for buffer, before in zip(self._buffers, old):
            buffer[..., : before.shape[-2], :] = before
        of_keys, of_values = (self._buffers[:count], self._buffers[count:]) if self._apart else self._buffers
        self._parts = [(of_keys[layer], of_values[layer]) for layer in range(self._num_layers)]

    def _slots_for(self, end: int) -> int:
        return self._slots if end <= self._slots else max(_SMALLEST, end + end // 2)

    def keep(self, start: int, path: Tensor) -> None:
        """
        Moves the rows at `start + path` of all layers to the slots from `start` on.

        Args:
            start (`int`): the first slot.
            path (`torch.LongTensor` of shape `(kept,)`): rows to keep, on the host.
        """
        sources, end = to_device(start + path, self._buffers[0].device), start + path.shape[0]
        for buffer in self._buffers:
            # Gathered first, then written: source and destination rows overlap.
            buffer[..., start:end, :] = buffer.index_select(-2, sources)


class DraftCache(StackedRows):
    """
    Keys and values of the drafter, each layer's apart. A pass writes its rows after the first `length` rows of every
    layer. [`DraftCache.advance`] keeps them; without it, the next pass overwrites them. So a rollback changes `length`
    only.
    """

    def __init__(self, num_layers: int, static_slots: int | None = None):
        super().__init__(num_layers, static_slots, apart=True)
        self.length = 0

    def update(self, layer: int, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """Writes the rows of one pass; see [`StackedRows.write`]."""
        return self.write(layer, self.length, keys, values)

    def room_for(self, rows: int) -> list[tuple[Tensor, Tensor]] | None:
        """
        Buffers for a pass that writes its rows itself instead of calling `update`; `None` before the first pass.

        Args:
            rows (`int`): rows of the pass.

        Returns:
            For each layer, the same views as from `update`. The last `rows` rows are for the pass to write.
        """
        if not self._parts:
            return None
        return [self.room(layer, self.length + rows) for layer in range(self._num_layers)]

    def advance(self, rows: int) -> None:
        """Keeps the rows of the last pass."""
        self.length += rows


class StackedLayer(DynamicLayer):
    """
    A layer of the target's cache whose rows are in a [`StackedRows`], until [`StackedLayer.give_back`].

    Args:
        layer ([`DynamicLayer`]): the layer that this one replaces. It holds nothing meanwhile.
        stack ([`StackedRows`]): holds the rows of this layer, and of others of the same shape.
        index (`int`): the place of this layer in it.
    """

    def __init__(self, layer: DynamicLayer, stack: StackedRows, index: int):
        assert layer.keys is not None and layer.values is not None
        self.dtype, self.device, self.is_initialized = layer.dtype, layer.device, True
        self._layer, self._stack, self._index = layer, stack, index
        self._length = layer.get_seq_length()
        stack.write(index, 0, layer.keys, layer.values)
        layer.keys = layer.values = None

    @property
    def keys(self) -> Tensor:
        """All rows, of shape `(batch, heads, length, head_dim)`."""
        return self._stack.rows(self._index, self._length)[0]

    @property
    def values(self) -> Tensor:
        """See `keys`."""
        return self._stack.rows(self._index, self._length)[1]

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Appends `key_states` and `value_states` of shape `(batch, heads, new, head_dim)`; returns all rows."""
        start = self._length
        self._length += key_states.shape[-2]
        return self._stack.write(self._index, start, key_states, value_states)

    def room(self, new: int) -> tuple[Tensor, Tensor]:
        """As `update`, for a forward that writes its `new` rows itself."""
        self._length += new
        return self._stack.room(self._index, self._length)

    @property
    def has_static_slots(self) -> bool:
        """Whether `update` returns all slots, and always the same tensors."""
        return self._stack.is_static

    def crop(self, tokens_to_remove: int) -> None:
        """Drops the last `-tokens_to_remove` rows."""
        self._length += tokens_to_remove

    def get_seq_length(self) -> int:
        """The number of rows."""
        return self._length

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Length and offset of the keys that a forward of `query_length` tokens gets from `update`."""
        return self._stack.seen_slots(self._length + query_length), 0

    def give_back(self) -> DynamicLayer:
        """Returns the original layer, with all rows."""
        self._layer.keys, self._layer.values = self.keys, self.values
        return self._layer


def stack_layers(cache: Cache, static_slots: int | None = None, apart: bool = False) -> list[StackedRows]:
    """
    Replaces every plain `DynamicLayer` of a cache that has rows by a [`StackedLayer`].

    Args:
        cache ([`Cache`]): the cache.
        static_slots (`int`, *optional*), apart (`bool`, *optional*): see [`StackedRows`].

    Returns:
        `list[StackedRows]`: the stacks. Layers of the same shape share one.
    """
    stacks = []
    for alike in _alike({place: layer for place, layer in enumerate(cache.layers) if type(layer) is DynamicLayer}):
        stacks.append(stack := StackedRows(len(alike), static_slots, apart))
        for index, place in enumerate(alike):
            cache.layers[place] = StackedLayer(cache.layers[place], stack, index)
    return stacks


def give_back(cache: Cache) -> None:
    """Undoes [`stack_layers`]: restores the original layers, with all rows."""
    cache.layers = [layer.give_back() if isinstance(layer, StackedLayer) else layer for layer in cache.layers]


def drop_rows(cache: Cache, rows: int) -> None:
    """
    Drops the last `rows` rows of every layer. With 0, layers with a window drop what is outside it.

    Layers without any rows, such as cross-attention without an image, are left out: `Cache.crop` of transformers 5.17
    fails there.
    """
    for layer in cache.layers:
        if getattr(layer, "is_initialized", True):
            layer.crop(-rows)


class Rewind:
    """
    Takes a cache back to where it was before a forward.

    If every layer can drop its last rows, rejected tokens are dropped. A recurrent state has no rows: then everything
    goes back, and the tokens that belong in the cache must run again.

    Args:
        cache: a cache after its prompt: a [`DynamicCache`], or what a model uses in its place.
    """

    def __init__(self, cache: Any):
        self.cache = cache
        self._has_layers = type(cache) is DynamicCache
        # Whether rejected tokens can be dropped.
        self.drops_rows = self._has_layers and all(_drops_rows(layer) for layer in cache.layers)
        if self.drops_rows:
            # Layers with a window then keep the rows of a forward until they are cropped.
            cache.activate_past_recording()
            cache.crop(0)
        self._saved: Any = None

    def mark(self) -> None:
        """Marks the place to go back to. Each forward that may be undone needs its mark."""
        if not self._has_layers:
            self._saved = copy.deepcopy(self.cache)
        else:
            self._saved = [_state(layer, self.drops_rows) for layer in self.cache.layers]

    def undo(self) -> None:
        """Undoes all since the mark, also a forward that broke off; nothing without one."""
        saved, self._saved = self._saved, None
        if saved is None:
            return
        if isinstance(self.cache, list):
            self.cache[:] = saved
        elif not self._has_layers:
            # The caller may hold this cache.
            vars(self.cache).update(vars(saved))
        else:
            for layer, state in zip(self.cache.layers, saved):
                vars(layer).update(state)

    def keep(self, added: int, kept: int) -> bool:
        """
        Keeps the first `kept` of the `added` tokens of the forward since the mark.

        Returns:
            `bool`: whether they are in the cache now; otherwise it is as at the mark.
        """
        if self.drops_rows:
            drop_rows(self.cache, added - kept)
        elif kept < added:
            self.undo()
            return False
        self._saved = None
        return True


def _is_known(layer: Any) -> bool:
    """Whether a forward replaces the keys and values of a layer, and changes nothing in them."""
    # Layers that a model brings itself may do otherwise, and keep more than rows.
    return isinstance(layer, StackedLayer) or type(layer).__module__ == Cache.__module__


def _drops_rows(layer: Any) -> bool:
    return _is_known(layer) and getattr(layer, "is_croppable", False)


def _state(layer: Any, drops_rows: bool) -> dict[str, Any]:
    """What a layer holds, with copies of what a forward changes in place."""
    if isinstance(layer, StackedLayer):
        return {"_length": layer.get_seq_length()}
    state = {}
    for name, value in vars(layer).items():
        if drops_rows or (_is_known(layer) and name in ("keys", "values")):
            state[name] = dict(value) if isinstance(value, dict) else value
        else:
            state[name] = copy.deepcopy(value)
    return state


def unfold_static(cache: Cache, window: int | None) -> list[StaticLayer]:
    """
    Replaces the layers of a static cache by dynamic ones with the same rows, which can drop rejected branches.

    Args:
        cache ([`Cache`]): the cache.
        window (`int`, *optional*): the sliding window of the model.

    Returns:
        `list[StaticLayer]`: the layers that were replaced, for [`refill_static`]; empty for other caches.
    """
    static = [layer for layer in cache.layers if isinstance(layer, StaticLayer)]
    if len(static) < len(cache.layers):
        return []
    length = int(cache.get_seq_length())
    for place, layer in enumerate(static):
        dynamic = DynamicSlidingWindowLayer(window) if layer.is_sliding and window is not None else DynamicLayer()
        if layer.is_initialized:
            assert layer.keys is not None and layer.values is not None
            rows = min(length, layer.max_cache_len)
            dynamic.update(layer.keys[:, :, :rows], layer.values[:, :, :rows])
            if isinstance(dynamic, DynamicSlidingWindowLayer):
                dynamic.cumulative_length = length
        cache.layers[place] = dynamic
    return static


def refill_static(cache: Cache, static: list[StaticLayer]) -> None:
    """Undoes [`unfold_static`]: the layers hold what plain decoding with a static cache leaves there."""
    if not static:
        return
    for layer, dynamic in zip(static, cache.layers):
        if not dynamic.is_initialized:
            continue
        length, missing = dynamic.get_seq_length(), 0
        if isinstance(layer, StaticSlidingWindowLayer):
            # It keeps one row more, which no later token sees.
            missing = min(length, layer.max_cache_len) - dynamic.keys.shape[-2]
        layer.reset()
        layer.update(*(F.pad(states, (0, 0, missing, 0)) for states in (dynamic.keys, dynamic.values)))
        if isinstance(layer, StaticSlidingWindowLayer):
            layer.cumulative_length_int = length
    cache.layers = list(static)


class RowLengths:
    """
    The number of tokens of each row in the cache. All layers share one object.

    Args:
        lengths (`list[int]`): tokens of each row.
        device (`torch.device`): the device of the slots that it returns.
    """

    def __init__(self, lengths: list[int], device: torch.device):
        self._device = device
        self._slots: dict[tuple[int, torch.device], Tensor] = {}
        self.values = lengths

    @property
    def values(self) -> list[int]:
        """Tokens of each row."""
        return self._values

    @values.setter
    def values(self, lengths: list[int]) -> None:
        self._values = lengths
        self._slots.clear()

    def slots(self, count: int, device: torch.device | None = None) -> Tensor:
        """The next `count` slots of each row, of shape `(rows, count)`. They are made once a round, not by layer."""
        place = count, device or self._device
        if place not in self._slots:
            slots = torch.tensor(self._values)[:, None] + torch.arange(count)
            self._slots[place] = to_device(slots, place[1])
        return self._slots[place]

    def advance(self, counts: Sequence[int]) -> None:
        """Keeps the first `counts` new tokens of each row."""
        self.values = [length + count for length, count in zip(self._values, counts)]


class RaggedRows:
    """
    Keys and values of several layers for rows of different lengths, in two buffers of shape
    `(layers, rows, heads, slots, head_dim)`.

    Args:
        layers (`list[DynamicLayer]`): layers of the same shape that have run the prompt.
        slots (`list[torch.Tensor]`): for each row, the slots of the prompt without padding.
    """

    def __init__(self, layers: list[DynamicLayer], slots: list[Tensor]):
        longest = max(len(each) for each in slots)
        self._buffers: list[Tensor] = []
        for name in ("keys", "values"):
            states: Tensor = getattr(layers[0], name)
            buffer = states.new_zeros(len(layers), *states.shape[:2], longest + _SPARE, states.shape[-1])
            for part, layer in zip(buffer, layers):
                # A layer with a window has dropped the states before it.
                states, dropped = getattr(layer, name), layer.get_seq_length() - layer.keys.shape[-2]
                for row, each in enumerate(slots):
                    kept = each[each >= dropped]
                    part[row, :, len(each) - len(kept) : len(each)] = states[
                        row, :, (kept - dropped).to(states.device)
                    ]
            self._buffers.append(buffer)

    def write(self, layer: int, keys: Tensor, values: Tensor, slots: Tensor, end: int) -> tuple[Tensor, Tensor]:
        """Writes new states of a layer to `slots`; returns its states in the first `end` slots."""
        if self._buffers[0].shape[3] < end:
            self._buffers = [F.pad(buffer, (0, 0, 0, end + end // 2 - buffer.shape[3])) for buffer in self._buffers]
        rows = self._row_numbers()
        for part, states in zip((buffer[layer] for buffer in self._buffers), (keys, values)):
            # With two index tensors around a slice, the dimension of the slice comes last.
            part[rows, :, slots] = states.transpose(1, 2)
        return self.rows(layer, end)

    def rows(self, layer: int, end: int) -> tuple[Tensor, Tensor]:
        """Views of the states of a layer in the first `end` slots."""
        keys, values = self._buffers
        return keys[layer, :, :, :end], values[layer, :, :, :end]

    def keep(self, sources: Tensor, targets: Tensor) -> None:
        """Moves states of all layers from the slots `sources` to `targets`, both of shape `(rows, count)`."""
        rows, device = self._row_numbers(), self._buffers[0].device
        sources, targets = sources.to(device), targets.to(device)
        for buffer in self._buffers:
            buffer[:, rows, :, targets] = buffer[:, rows, :, sources]

    def select(self, rows: Tensor) -> None:
        """Drops all rows except the rows at these indices."""
        self._buffers = [buffer.index_select(1, rows.to(buffer.device)) for buffer in self._buffers]

    def padded(self, layer: int, slots: list[Tensor], prompt_length: int, length: int) -> list[Tensor]:
        """See [`RaggedLayer.padded`]."""
        found = []
        for part in (buffer[layer] for buffer in self._buffers):
            states = part.new_zeros(*part.shape[:2], length, part.shape[3])
            for row, each in enumerate(slots):
                end = len(each) + length - prompt_length
                states[row, :, each.to(part.device)] = part[row, :, : len(each)]
                states[row, :, prompt_length:] = part[row, :, len(each) : end]
            found.append(states)
        return found

    def _row_numbers(self) -> Tensor:
        return torch.arange(self._buffers[0].shape[1], device=self._buffers[0].device)[:, None]


class RaggedLayer(DynamicLayer):
    """
    Keys and values of rows of different lengths.

    A forward writes the new states of each row after the row's own length. [`RaggedRows.keep`] and
    [`RowLengths.advance`] then keep some of them. The layer keeps all states, also outside a sliding window: the mask
    applies the window.

    Args:
        stack ([`RaggedRows`]): holds the states of this layer, and of others.
        index (`int`): the place of this layer in it.
        lengths ([`RowLengths`]): lengths of the rows.
    """

    def __init__(self, stack: RaggedRows, index: int, lengths: RowLengths):
        super().__init__()
        self.is_initialized = True
        self._stack, self._index, self._lengths = stack, index, lengths
        self.keys, self.values = stack.rows(index, self.get_seq_length())

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """
        Appends states of shape `(rows, heads, new, head_dim)` to the rows.

        Returns:
            All states of the rows, of shape `(rows, heads, longest row + new, head_dim)`.
        """
        new = key_states.shape[-2]
        slots = self._lengths.slots(new, key_states.device)
        end = self.get_seq_length() + new
        self.keys, self.values = self._stack.write(self._index, key_states, value_states, slots, end)
        return self.keys, self.values

    def padded(self, slots: list[Tensor], prompt_length: int, length: int) -> list[Tensor]:
        """
        Keys and values in the layout of an ordinary layer, of shape `(rows, heads, length, head_dim)`. In the first
        `prompt_length` slots, the states of each row's prompt are in its `slots`, and padding is zero. The states of
        new tokens follow.
        """
        return self._stack.padded(self._index, slots, prompt_length, length)

    def get_seq_length(self) -> int:
        """Tokens of the longest row."""
        return max(self._lengths.values)


def ragged_layers(
    layers: list[DynamicLayer], slots: list[Tensor], lengths: RowLengths
) -> tuple[list[DynamicLayer], list[RaggedRows]]:
    """A [`RaggedLayer`] for each layer that has rows, and the stacks that hold their states."""
    ragged: dict[int, DynamicLayer] = dict(enumerate(layers))
    stacks = []
    for places in _alike(ragged):
        stacks.append(stack := RaggedRows([layers[place] for place in places], slots))
        ragged |= {place: RaggedLayer(stack, index, lengths) for index, place in enumerate(places)}
    return list(ragged.values()), stacks


def _alike(layers: dict[int, DynamicLayer]) -> list[list[int]]:
    """The places of the layers that have rows, by the shape of a row: layers of one shape can share a stack."""
    found: dict[Any, list[int]] = {}
    for place, layer in layers.items():
        if layer.get_seq_length() > 0:
            assert layer.keys is not None and layer.values is not None
            parts = (layer.keys, layer.values)
            form = tuple((*states.shape[:2], states.shape[-1], states.dtype, states.device) for states in parts)
            found.setdefault(form, []).append(place)
    return list(found.values())
