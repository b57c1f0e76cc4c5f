# Copyright 2026 The hf_falcon authors. Licensed under the Apache License, Version 2.0.
"""Cache layers in slots hold what plain ones hold, for rows of different lengths, in little memory."""

import copy
import gc
import random
from typing import Any

import pytest
import torch
from tiny_models import new_drafter, new_target, prompt, random_tokens, tiny_drafter, tiny_target
from transformers import DynamicCache, StaticCache
from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer

from hf_falcon.core import caches, target_run
from hf_falcon.core.caches import STATIC_SLOTS, RowSlots, SlotLayer, adopt_layers, give_back
from hf_falcon.core.candidate_generator import ContextHead
from hf_falcon.core.interfaces import TargetAcceleration

WINDOW = 9


def states(count: int, rows: int = 1, heads: int = 2, width: int = 4) -> torch.Tensor:
    return torch.randn(rows, heads, count, width)


def filled_cache(kinds: list[str], length: int, rows: int = 1) -> DynamicCache:
    """A cache with a layer of each of these kinds, which holds `length` tokens."""
    cache = DynamicCache()
    cache.layers = [DynamicLayer() if kind == "full" else DynamicSlidingWindowLayer(WINDOW) for kind in kinds]
    for place in range(len(kinds)):
        # Keys are not as wide as values in some models.
        cache.update(states(length, rows), states(length, rows, width=4 + place % 2), place)
    return cache


@pytest.mark.parametrize("length", [1, 5, 300])
@pytest.mark.parametrize("rows", [1, 3])
def test_holds_what_plain_layers_hold(rows, length):
    """Each row keeps some of the tokens of a forward; a plain cache for this row alone gets these one by one."""
    draws = random.Random(length)
    torch.manual_seed(0)
    cache = filled_cache(["full", "window", "full"], length, rows)
    plain = [copy.deepcopy(cache) for _ in range(rows)]
    for row, each in enumerate(plain):
        each.batch_select_indices(torch.tensor([row]))
    own = list(cache.layers)
    slots = RowSlots([length] * rows, torch.device("cpu"))
    layers = adopt_layers(cache, slots, WINDOW)
    assert cache.layers == layers and len(layers) == 3
    for turn in range(60):
        new = draws.choice((1, 8, 60))
        kept = [draws.randint(1, new)] * rows if turn % 3 == 0 else [draws.randint(1, new) for _ in range(rows)]
        paths = [sorted(draws.sample(range(new), count)) for count in kept]
        sources = torch.tensor([path + list(range(len(path), max(kept))) for path in paths])
        targets = torch.arange(max(kept)).repeat(rows, 1)
        starts = torch.tensor(slots.lengths)[:, None]
        for place, layer in enumerate(layers):
            written = states(new, rows), states(new, rows, width=4 + place % 2)
            keys, values = layer.update(*written)
            assert (keys.shape[2], layer.offset) == layer.get_mask_sizes(new)
            for row, length in enumerate(slots.lengths):
                # All that plain decoding would attend to is there, in its place, with the new tokens behind it.
                theirs = plain[row].layers[place]
                seen = slice(length - layer.offset - theirs.keys.shape[2], length - layer.offset)
                assert torch.equal(keys[row, :, seen], theirs.keys[0])
                assert torch.equal(values[row, :, seen], theirs.values[0])
                assert torch.equal(keys[row, :, seen.stop : seen.stop + new], written[0][row])
            layer.move(sources + starts, targets + starts)
            for row, path in enumerate(paths):
                plain[row].layers[place].update(*(each[row : row + 1, :, path] for each in written))
        slots.advance(kept)
        assert all(layer.get_seq_length() == slots.longest for layer in layers)
    if rows == 1:
        give_back(cache)
        assert cache.layers == own
        for layer, expected in zip(own, plain[0].layers):
            assert torch.equal(layer.keys, expected.keys) and torch.equal(layer.values, expected.values)
            assert layer.get_seq_length() == expected.get_seq_length()


def test_writes_in_place():
    cache = filled_cache(["full"], 3)
    slots = RowSlots([3], torch.device("cpu"))
    [layer] = adopt_layers(cache, slots, None)
    place = layer.keys.data_ptr()
    for _ in range(50):
        layer.update(states(4), states(4))
        slots.advance([2])
    assert layer.keys.data_ptr() == place and layer.get_seq_length() == 103


def test_a_window_does_not_grow_with_the_text():
    slots = RowSlots([40, 40], torch.device("cpu"))
    [layer] = adopt_layers(filled_cache(["window"], 40, rows=2), slots, WINDOW)
    sizes = set()
    for _ in range(300):
        layer.update(states(5, 2), states(5, 2))
        slots.advance([3, 3])
        sizes.add(layer.keys.untyped_storage().nbytes())
    assert len(sizes) == 1 and layer.offset > 700


@pytest.mark.parametrize("stop", [None, KeyboardInterrupt])
@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize("name", ["llama", "mistral-window"])
def test_a_users_cache_keeps_its_layers(name, rows, stop):
    """Also where a call is interrupted: the next one, with or without a drafter, finds the cache as it knows it."""
    target, ids = tiny_target(name), random_tokens(rows, 6)
    cache = DynamicCache(config=target.config)
    kinds = [type(layer) for layer in cache.layers]
    options = {"max_new_tokens": 8, "do_sample": False, "past_key_values": cache, "pad_token_id": 0}

    def criterion(input_ids, scores, **kwargs):
        if stop is not None and input_ids.shape[1] > 9:
            raise stop
        return torch.zeros(input_ids.shape[0], dtype=torch.bool)

    settings: dict[str, Any] = {"stopping_criteria": [criterion]} if rows == 1 else {}
    text = ids
    try:
        text = target.generate(ids, assistant_model=tiny_drafter(target), **settings, **options)
    except KeyboardInterrupt:
        pass
    assert cache.layers and [type(layer) for layer in cache.layers] == kinds
    if stop is None:
        longer = torch.cat((text, random_tokens(rows, 3, seed=1)), dim=1)
        found = target.generate(longer, **options)
        options["past_key_values"] = DynamicCache(config=target.config)
        assert target.generate(ids, **options).tolist() == text.tolist()
        assert target.generate(longer, **options).tolist() == found.tolist()


@pytest.fixture
def older_objects_left_out():
    """The collector walks over new objects only; the others are so many that each walk would take seconds."""
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()


def held(unit: int) -> float:
    """Bytes of all tensors that can be keys and values, in multiples of `unit`."""
    gc.collect()
    storages = {}
    for each in gc.get_objects():
        if type(each) is torch.Tensor and each.dim() in (4, 5):
            storages[each.untyped_storage().data_ptr()] = each.untyped_storage().nbytes()
    return sum(size for size in storages.values() if size > 1e5) / unit


@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.usefixtures("older_objects_left_out")
def test_memory_of_keys_and_values(rows, monkeypatch):
    """At any time one layer more than plain decoding, and a tenth at most; also in a cache that is handed back."""
    sizes = {"num_hidden_layers": 16, "hidden_size": 64, "num_key_value_heads": 4, "max_position_embeddings": 4000}
    target = new_target("llama", **sizes)
    length, layer_bytes = 2100, 2 * rows * 2100 * 64 * 4
    ids = random_tokens(rows, length)
    found = []
    reserve = target_run.SlotLayer.__init__

    def watched(self, *args, **kwargs):
        reserve(self, *args, **kwargs)
        found.append(held(16 * layer_bytes))

    monkeypatch.setattr(SlotLayer, "__init__", watched)
    before = held(16 * layer_bytes)
    target.register_forward_hook(lambda *_: found.append(held(16 * layer_bytes)))
    cache = DynamicCache(config=target.config)
    drafter = new_drafter(target, num_lstm_layers=0, num_hidden_layers=1)
    settings = {"max_new_tokens": 6, "do_sample": False, "pad_token_id": 0, "eos_token_id": None}
    target.generate(ids, assistant_model=drafter, past_key_values=cache, **settings)
    # The drafter has one layer of the same shape.
    assert 0.9 < max(found) - before < 1.1 + 2 / 16 and len(found) > 17
    kept = {each.untyped_storage().data_ptr(): each for layer in cache.layers for each in (layer.keys, layer.values)}
    assert sum(each.untyped_storage().nbytes() for each in kept.values()) < 1.1 * 16 * layer_bytes


@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize("name", ["llama", "qwen2-mixed"])
def test_new_memory_is_written_before_it_is_read(name, rows, monkeypatch):
    target, ids = tiny_target(name), random_tokens(rows, 7)
    settings = {"max_new_tokens": 50, "do_sample": False, "pad_token_id": 0, "eos_token_id": None}
    expected = target.generate(ids, **settings)
    new_empty, filled = torch.Tensor.new_empty, []

    def of_nan(self, *size, **kwargs):
        memory = new_empty(self, *size, **kwargs)
        filled.append(memory.shape)
        return memory.fill_(torch.nan) if memory.is_floating_point() else memory

    scored, logits = [], ContextHead.logits

    def of_numbers(self, states):
        scored.append(bool(states.isfinite().all()))
        return logits(self, states)

    monkeypatch.setattr(torch.Tensor, "new_empty", of_nan)
    # What the drafter reads shows in its states: the text is the target's.
    monkeypatch.setattr(ContextHead, "logits", of_numbers)
    # So that buffers grow in many rounds.
    monkeypatch.setattr(caches, "_SPARE", 3)
    output = target.generate(ids, assistant_model=tiny_drafter(target), **settings)
    assert output.tolist() == expected.tolist()
    assert len(filled) > 10 and len(scored) > 10 and all(scored)


@pytest.mark.parametrize("new_tokens", [24, 1_000_000])
def test_static_slots_grow_in_steps(new_tokens, monkeypatch):
    """As compiled rounds want them: as many as the text needs, not as many as it may have."""

    class Static(TargetAcceleration):
        wants_static_shapes = True

    monkeypatch.setattr(target_run, "target_acceleration", lambda *args, **kwargs: Static())
    target, ids, shapes = tiny_target("llama"), prompt(9), set()
    expected = target.generate(ids, do_sample=False, max_new_tokens=12, pad_token_id=0)
    end = int(expected[0, -1])
    update = SlotLayer.update

    def watched(self, *args, **kwargs):
        found = update(self, *args, **kwargs)
        shapes.add(found[0].shape[2])
        return found

    monkeypatch.setattr(SlotLayer, "update", watched)
    settings = {"do_sample": False, "max_new_tokens": new_tokens, "eos_token_id": end, "pad_token_id": 0}
    found = target.generate(ids, assistant_model=tiny_drafter(target), **settings)
    first = (expected[0, 9:] == end).nonzero()[0, 0] + 10
    assert found.tolist() == expected[:, :first].tolist() and shapes == {STATIC_SLOTS}


@pytest.mark.parametrize("name", ["llama", "gemma3", "mistral-window"])
def test_a_static_cache_gets_its_rows_back(name):
    target, ids = tiny_target(name), prompt(9)
    texts = []
    for assistant in ({}, {"assistant_model": tiny_drafter(target)}):
        cache = StaticCache(config=target.config, max_cache_len=64)
        text = target.generate(ids, do_sample=False, max_new_tokens=9, past_key_values=cache, **assistant)
        longer = torch.cat((text, prompt(3, seed=2)), dim=1)
        texts.append(target.generate(longer, do_sample=False, max_new_tokens=9, past_key_values=cache).tolist())
    assert texts[0] == texts[1]
