# Copyright 2026 The hf_falcon authors. Licensed under the Apache License, Version 2.0.
"""Static caches: decoding is assisted, texts are plain decoding's, and the cache is as plain decoding leaves it."""

import pytest
import torch
from tiny_models import TARGETS, prompt, random_tokens, tiny_drafter, tiny_target
from transformers import StaticCache
from transformers.cache_utils import StaticLayer

NEW_TOKENS = 14
# Shorter and longer than the windows of the targets that have one.
LENGTHS = (3, 12)
NAMES = [name for name in TARGETS if tiny_target(name)._can_compile_fullgraph]


def generate(target, ids, **settings):
    settings = {"do_sample": False, "max_new_tokens": NEW_TOKENS, "return_dict_in_generate": True, **settings}
    torch.manual_seed(0)
    return target.generate(ids, **settings)


@pytest.mark.parametrize("length", LENGTHS)
@pytest.mark.parametrize("name", NAMES)
def test_is_assisted(name, length):
    target, ids = tiny_target(name), prompt(length)
    plain = generate(target, ids, cache_implementation="static")
    found = generate(target, ids, cache_implementation="static", assistant_model=tiny_drafter(target))
    assert found.sequences.tolist() == plain.sequences.tolist()
    assert found.draft_statistics is not None


@pytest.mark.parametrize(
    "settings", [{"do_sample": True}, {"num_return_sequences": 3, "do_sample": True}, {"repetition_penalty": 1.3}]
)
@pytest.mark.parametrize("rows", [1, 2])
def test_other_modes(rows, settings):
    target, ids = tiny_target("gemma3"), random_tokens(rows, 9)
    mask = torch.ones_like(ids)
    # Padding on the left.
    mask[-1, :2], ids[-1, :2] = 0, 0
    settings = {"cache_implementation": "static", "attention_mask": mask, **settings}
    plain = generate(target, ids, **settings)
    found = generate(target, ids, assistant_model=tiny_drafter(target), **settings)
    assert found.sequences.tolist() == plain.sequences.tolist()
    assert found.draft_statistics is not None


@pytest.mark.parametrize("name", ["llama", "gemma3", "mistral-window"])
@pytest.mark.parametrize("length", LENGTHS)
def test_a_cache_of_ones_own_serves_further_turns(name, length):
    """Turns with and without a drafter alternate: each finds the cache that plain decoding would have left."""
    target = tiny_target(name)
    drafter = tiny_drafter(target)
    expected = found = prompt(length)
    plain_cache, cache = (StaticCache(config=target.config, max_cache_len=96) for _ in range(2))
    for turn, assistant in enumerate((drafter, None, drafter, drafter)):
        expected = generate(target, expected, past_key_values=plain_cache).sequences
        given = {} if assistant is None else {"assistant_model": assistant}
        output = generate(target, found, past_key_values=cache, **given)
        found = output.sequences
        assert found.tolist() == expected.tolist()
        assert output.past_key_values is cache and all(isinstance(layer, StaticLayer) for layer in cache.layers)
        assert int(cache.get_seq_length()) == int(plain_cache.get_seq_length())
        more = random_tokens(1, 2, seed=turn)
        expected, found = torch.cat((expected, more), dim=1), torch.cat((found, more), dim=1)


def test_an_interrupted_call_gives_the_layers_back():
    target = tiny_target("llama")
    cache = StaticCache(config=target.config, max_cache_len=64)
    own = list(cache.layers)

    def stop(input_ids, scores, **kwargs):
        if input_ids.shape[1] > 9:
            raise KeyboardInterrupt
        return torch.zeros(input_ids.shape[0], dtype=torch.bool)

    with pytest.raises(KeyboardInterrupt):
        generate(
            target,
            prompt(6),
            past_key_values=cache,
            assistant_model=tiny_drafter(target),
            stopping_criteria=[stop],
        )
    assert cache.layers == own and int(cache.get_seq_length()) > 6
