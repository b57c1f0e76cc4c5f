# Copyright 2026 The hf_falcon authors. Licensed under the Apache License, Version 2.0.
"""
What `generate` hands back, with every target and every kind of cache, as transformers checks it for its own decoding:
types, shapes, and the content of the cache.
"""

import pytest
import torch
from oracle import use_oracle
from quick import one_in
from tiny_models import TARGETS, VOCAB, prompt, tiny_drafter, tiny_target
from transformers.generation.utils import GenerateDecoderOnlyOutput

NEW_TOKENS = 14
LENGTH = 11
FULL_OUTPUT = {"return_dict_in_generate": True, "output_scores": True, "output_logits": True}


def run(target, seed=0, ids=None, **kwargs):
    torch.manual_seed(seed)
    given = {"do_sample": False, "max_new_tokens": NEW_TOKENS, "pad_token_id": 0, **kwargs}
    return target.generate(prompt(LENGTH) if ids is None else ids, **given)


@pytest.mark.parametrize("name, do_sample", one_in(2, TARGETS, [False, True]))
def test_returned_dictionary(name, do_sample, monkeypatch):
    target = tiny_target(name)
    expected = run(target, do_sample=do_sample, **FULL_OUTPUT)
    use_oracle(monkeypatch, expected.sequences, accuracy=0.7, scattered=True)
    found = run(target, do_sample=do_sample, assistant_model=tiny_drafter(target), **FULL_OUTPUT)
    assert isinstance(found, GenerateDecoderOnlyOutput)
    assert set(found) - {"draft_statistics"} == set(expected)
    assert found.draft_statistics.accepted_tokens > 0
    assert found.sequences.shape == (1, LENGTH + NEW_TOKENS) and found.sequences.dtype == torch.long
    assert found.sequences.tolist() == expected.sequences.tolist()
    for scores in (found.scores, found.logits):
        assert isinstance(scores, tuple) and [each.shape for each in scores] == [(1, VOCAB)] * NEW_TOKENS
    ours, theirs = found.past_key_values, expected.past_key_values
    assert type(ours) is type(theirs) and ours.get_seq_length() == theirs.get_seq_length()
    for layer, other in zip(ours.layers, theirs.layers, strict=True):
        assert type(layer) is type(other)
        for states, others in ((layer.keys, other.keys), (layer.values, other.values)):
            # Layers with a window may hold more than it; what counts is its end.
            count = min(states.shape[-2], others.shape[-2])
            assert count == states.shape[-2] or layer.is_sliding
            torch.testing.assert_close(states[..., -count:, :], others[..., -count:, :], atol=1e-3, rtol=1e-3)


@pytest.mark.parametrize("do_sample", [False, True])
@pytest.mark.parametrize(
    "cache",
    [None, "dynamic", "offloaded", "static", "hybrid", "sliding_window", "offloaded_static"],
)
@pytest.mark.parametrize("name", ["llama", "mistral-window", "gemma2"])
def test_kinds_of_cache(name, cache, do_sample):
    """A kind that plain decoding cannot have here, assisted decoding cannot have either, and says the same."""
    target = tiny_target(name)
    kwargs = {"cache_implementation": cache, "do_sample": do_sample, "disable_compile": True}
    results = []
    for assistant in ({}, {"assistant_model": tiny_drafter(target)}):
        try:
            results.append(run(target, **kwargs, **assistant).tolist())
        except Exception as error:
            results.append((type(error), str(error)))
    assert results[0] == results[1]
    assert cache not in (None, "dynamic", "static") or isinstance(results[0], list)


@pytest.mark.parametrize(
    "name, schedule, block_size", one_in(2, ["llama", "gemma3", "opt"], ["constant", "heuristic"], [1, 2])
)
def test_calls_do_not_change_options(name, schedule, block_size):
    """transformers' own heuristic writes what it learns to the assistant's configuration; nothing here does."""
    target = tiny_target(name)
    drafter = tiny_drafter(target, block_size=block_size, num_assistant_tokens_schedule=schedule)
    before = drafter.generation_config.to_dict(), target.generation_config.to_dict(), drafter.config.to_dict()
    expected = run(target).tolist()
    for _ in range(3):
        assert run(target, assistant_model=drafter).tolist() == expected
    assert before == (
        drafter.generation_config.to_dict(),
        target.generation_config.to_dict(),
        drafter.config.to_dict(),
    )


@pytest.mark.parametrize("name", ["llama", "qwen2-mixed"])
def test_prompt_lookup_of_a_repeating_prompt(name):
    """What the prompt says twice is found in it, and is still the target's to decide."""
    target = tiny_target(name)
    ids = prompt(6).repeat(1, 5)
    drafter = tiny_drafter(target, prompt_lookup_num_tokens=8)
    assert run(target, ids=ids, assistant_model=drafter).tolist() == run(target, ids=ids).tolist()
