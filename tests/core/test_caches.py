# Copyright 2026 The hf_falcon authors. Licensed under the Apache License, Version 2.0.
"""Cache layers that grow in place hold what plain ones hold."""

import random

import pytest
import torch
from tiny_models import prompt, tiny_drafter, tiny_target
from transformers import DynamicCache
from transformers.cache_utils import DynamicLayer

from hf_falcon.core.caches import GrowingLayer, give_back, grow_in_place


def rows(count: int, batch: int = 1) -> torch.Tensor:
    return torch.randn(batch, 2, count, 4)


@pytest.mark.parametrize("filled", [0, 5, 300])
def test_holds_what_a_plain_layer_holds(filled):
    draws = random.Random(filled)
    torch.manual_seed(0)
    plain, begun = DynamicLayer(), DynamicLayer()
    if filled:
        states = rows(filled), rows(filled)
        for layer in (plain, begun):
            layer.update(*states)
    growing = GrowingLayer(begun)
    for _ in range(60):
        states = rows(draws.choice((1, 8, 60))), rows(1)
        states = states[0], torch.randn_like(states[0])
        for found, expected in zip(growing.update(*states), plain.update(*states)):
            assert torch.equal(found, expected)
        if draws.random() < 0.5:
            dropped = draws.randrange(1, plain.get_seq_length())
            for layer in (plain, growing):
                layer.crop(-dropped)
        assert growing.get_seq_length() == plain.get_seq_length()
        assert growing.get_mask_sizes(3) == plain.get_mask_sizes(3)
    returned = growing.give_back()
    assert returned is begun and torch.equal(returned.keys, plain.keys) and torch.equal(returned.values, plain.values)


def test_writes_in_place():
    layer = GrowingLayer(DynamicLayer())
    layer.update(rows(3), rows(3))
    place = layer.keys.data_ptr()
    for _ in range(50):
        layer.update(rows(4), rows(4))
        layer.crop(-2)
    assert layer.keys.data_ptr() == place and layer.get_seq_length() == 103


def test_rows_that_others_put_there():
    """What assigns `keys` and `values`, as selecting rows of a batch does, is not overruled by the buffers."""
    plain, growing = DynamicLayer(), GrowingLayer(DynamicLayer())
    torch.manual_seed(0)
    states, more = (rows(3, batch=2), rows(3, batch=2)), (rows(2), rows(2))
    for layer in (plain, growing):
        layer.update(*states)
        layer.batch_select_indices(torch.tensor([1]))
        layer.update(*more)
    assert torch.equal(growing.keys, plain.keys) and torch.equal(growing.values, plain.values)
    for layer in (plain, growing):
        layer.reset()
        layer.update(*more)
    assert torch.equal(growing.keys, plain.keys)


def test_a_cache_gets_its_layers_back():
    cache = DynamicCache()
    cache.update(rows(3), rows(3), 0)
    own = list(cache.layers)
    grow_in_place(cache)
    assert all(type(layer) is GrowingLayer for layer in cache.layers)
    cache.update(rows(2), rows(2), 0)
    give_back(cache)
    assert cache.layers == own and cache.get_seq_length() == 5


@pytest.mark.parametrize("stop", [None, KeyboardInterrupt])
def test_a_users_cache_keeps_its_layers(stop):
    """Also where a call is interrupted: the next one, with or without a drafter, finds the cache as it knows it."""
    target, ids, cache = tiny_target("llama"), prompt(6), DynamicCache()
    options = {"max_new_tokens": 8, "do_sample": False, "past_key_values": cache}

    def criterion(input_ids, scores, **kwargs):
        if stop is not None and input_ids.shape[1] > 9:
            raise stop
        return torch.zeros(input_ids.shape[0], dtype=torch.bool)

    try:
        target.generate(ids, assistant_model=tiny_drafter(target), stopping_criteria=[criterion], **options)
    except KeyboardInterrupt:
        pass
    assert cache.layers and all(type(layer) is DynamicLayer for layer in cache.layers)
