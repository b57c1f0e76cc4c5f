# Copyright 2026 The hf_falcon authors. Licensed under the Apache License, Version 2.0.
"""Tree attention without copies of keys and values: what it gives, and what it leaves alone."""

from types import SimpleNamespace

import pytest
import torch
from tiny_models import prompt, tiny_drafter, tiny_target
from transformers import AttentionInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from hf_falcon.cpu import grouped_attention as module
from hf_falcon.cpu.grouped_attention import grouped_attention, grouped_sdpa


def inputs(heads: int = 6, kv_heads: int = 2, rows: int = 5, slots: int = 12, batch: int = 1, width: int = 4):
    torch.manual_seed(0)
    query = torch.randn(batch, heads, rows, 4)
    key, value = torch.randn(batch, kv_heads, slots, 4), torch.randn(batch, kv_heads, slots, width)
    hidden = torch.rand(batch, 1, rows, slots) < 0.4
    hidden[..., 0] = False
    mask = torch.zeros(hidden.shape).masked_fill(hidden, torch.finfo(torch.float32).min)
    return SimpleNamespace(num_key_value_groups=heads // kv_heads), query, key, value, mask


@pytest.fixture
def attended(monkeypatch):
    """Heads of the keys that torch's own attention gets, call by call."""
    heads, stock = [], torch.nn.functional.scaled_dot_product_attention

    def spy(query, key, *args, **kwargs):
        heads.append(key.shape[1])
        return stock(query, key, *args, **kwargs)

    monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", spy)
    return heads


@pytest.mark.parametrize("changes", [{}, {"batch": 3}, {"rows": 1}, {"width": 8}, {"kv_heads": 1}, {"kv_heads": 6}])
@pytest.mark.parametrize("scaling", [None, 0.3])
def test_gives_what_transformers_gives(changes, scaling):
    arguments = inputs(**changes)
    expected, _ = sdpa_attention_forward(*arguments, scaling=scaling)
    with grouped_attention([arguments[-1]]):
        found, weights = ALL_ATTENTION_FUNCTIONS["sdpa"](*arguments, scaling=scaling, is_causal=True)
    assert weights is None and found.is_contiguous()
    torch.testing.assert_close(found, expected)


def test_copies_no_keys(attended):
    arguments = inputs()
    with grouped_attention([arguments[-1]]):
        grouped_sdpa(*arguments)
        assert attended == [2]
        # Another mask of the same values is not of this forward.
        grouped_sdpa(*arguments[:-1], arguments[-1].clone())
        grouped_sdpa(*arguments[:-1], None)
        assert attended[1] == 6 and len(attended) == 3


@pytest.mark.parametrize("argument", [{"dropout": 0.5}, {"position_bias": torch.zeros(1, 6, 5, 12)}, {"softcap": 9.0}])
def test_leaves_to_transformers_what_it_does_not_know(monkeypatch, argument):
    calls = []
    monkeypatch.setattr(module, "sdpa_attention_forward", lambda *args, **kwargs: calls.append(kwargs))
    arguments = inputs()
    with grouped_attention([arguments[-1]]):
        grouped_sdpa(*arguments, **argument)
    assert [call.keys() >= argument.keys() for call in calls] == [True]


def test_one_form_of_the_mask_serves_all_layers(monkeypatch):
    arguments, repeats = inputs(), []
    stock = torch.Tensor.repeat
    monkeypatch.setattr(torch.Tensor, "repeat", lambda self, *sizes: repeats.append(sizes) or stock(self, *sizes))
    with grouped_attention([arguments[-1]]):
        for _ in range(3):
            grouped_sdpa(*arguments)
    assert len(repeats) == 1


def test_is_undone():
    with grouped_attention([]):
        with pytest.raises(KeyboardInterrupt), grouped_attention([]):
            raise KeyboardInterrupt
        assert ALL_ATTENTION_FUNCTIONS["sdpa"] is grouped_sdpa
    assert ALL_ATTENTION_FUNCTIONS["sdpa"] is sdpa_attention_forward


def test_another_sdpa_stays():
    def own(*args, **kwargs):
        return sdpa_attention_forward(*args, **kwargs)

    AttentionInterface.register("sdpa", own)
    try:
        with grouped_attention([]):
            assert ALL_ATTENTION_FUNCTIONS["sdpa"] is own
        assert ALL_ATTENTION_FUNCTIONS["sdpa"] is own
    finally:
        AttentionInterface.register("sdpa", sdpa_attention_forward)


@pytest.mark.parametrize("name", ["llama", "gemma3", "mistral-window"])
def test_trees_of_real_layers_attend_so(attended, name):
    target, ids = tiny_target(name), prompt(6)
    drafter = tiny_drafter(target, num_assistant_tokens=5)
    expected = target.generate(ids, max_new_tokens=20, do_sample=False)
    config = target.config.get_text_config()
    # In each round a tree, whatever time it takes. The first call also tries the target.
    options = {"assistant_model": drafter, "num_assistant_tokens_schedule": "constant"}
    for _ in range(2):
        attended.clear()
        assert target.generate(ids, max_new_tokens=20, do_sample=False, **options).equal(expected)
    # The drafter's own layers have as many; only the prompt's forward may have copied.
    assert attended.count(config.num_attention_heads) <= config.num_hidden_layers < len(attended)
    assert ALL_ATTENTION_FUNCTIONS["sdpa"] is sdpa_attention_forward
