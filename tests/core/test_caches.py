# Copyright 2026 The hf_falcon authors. Licensed under the Apache License, Version 2.0.
"""Cache layers whose rows are in one stack hold what plain ones hold."""

import copy
import random

import pytest
import torch
from tiny_models import prompt, tiny_drafter, tiny_target
from transformers import DynamicCache
from transformers.cache_utils import DynamicLayer

from hf_falcon.core.caches import StackedLayer, give_back, stack_layers


def rows(count: int, heads: int = 2) -> torch.Tensor:
    return torch.randn(1, heads, count, 4)


def filled_cache(lengths: list[int], **shape: int) -> DynamicCache:
    """A cache with a layer of each of these lengths."""
    cache = DynamicCache()
    for layer, length in enumerate(lengths):
        cache.update(rows(length, **shape), rows(length, **shape), layer)
    return cache


@pytest.mark.parametrize("apart", [False, True], ids=["together", "apart"])
@pytest.mark.parametrize("filled", [1, 5, 300])
def test_holds_what_plain_layers_hold(filled, apart):
    draws = random.Random(filled)
    torch.manual_seed(0)
    plain = filled_cache([filled, filled])
    stacked = copy.deepcopy(plain)
    own = list(stacked.layers)
    [stack] = stack_layers(stacked, apart=apart)
    storages = {layer.keys.untyped_storage().data_ptr() for layer in stacked.layers}
    assert len(storages) == (2 if apart else 1)
    assert all(type(layer) is StackedLayer for layer in stacked.layers)
    for _ in range(60):
        count = draws.choice((1, 8, 60))
        start = plain.get_seq_length()
        for layer in range(2):
            states = rows(count), rows(count)
            assert all(map(torch.equal, stacked.update(*states, layer), plain.update(*states, layer)))
        path = torch.tensor(sorted(draws.sample(range(count), draws.randint(1, count))))
        stack.keep(start, path)
        for layer, expected in zip(stacked.layers, plain.layers):
            layer.crop(len(path) - count)
            kept = torch.cat((torch.arange(start), start + path))
            expected.keys, expected.values = expected.keys[:, :, kept], expected.values[:, :, kept]
            assert torch.equal(layer.keys, expected.keys) and torch.equal(layer.values, expected.values)
            assert layer.get_seq_length() == expected.get_seq_length()
            assert layer.get_mask_sizes(3) == expected.get_mask_sizes(3)
    give_back(stacked)
    assert stacked.layers == own
    for layer, expected in zip(stacked.layers, plain.layers):
        assert torch.equal(layer.keys, expected.keys) and torch.equal(layer.values, expected.values)


def test_writes_in_place():
    cache = filled_cache([3])
    stack_layers(cache)
    [layer] = cache.layers
    place = layer.keys.data_ptr()
    for _ in range(50):
        layer.update(rows(4), rows(4))
        layer.crop(-2)
    assert layer.keys.data_ptr() == place and layer.get_seq_length() == 103


def test_layers_of_the_same_shape_share_a_stack():
    cache = filled_cache([3, 3, 3])
    cache.update(rows(3, heads=4), rows(3, heads=4), 3)
    other = cache.layers[3].keys
    assert len(stack_layers(cache)) == 2
    assert torch.equal(cache.layers[3].keys, other)
    cache.update(rows(2, heads=4), rows(2, heads=4), 3)
    give_back(cache)
    assert [layer.keys.shape[1:3] for layer in cache.layers] == [(2, 3), (2, 3), (2, 3), (4, 5)]


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
