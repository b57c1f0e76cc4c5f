# Copyright 2026 The hf_falcon authors. Licensed under the Apache License, Version 2.0.
"""Models of a larger shape that compute the same functions."""

from types import SimpleNamespace

import pytest
import torch
from bench_runs import SHAPE, medusa_like
from eagle3_models import new_eagle3
from tiny_models import (
    new_drafter,
    new_target,
    random_tokens,
)

from hf_falcon import FalconDraftConfig
from hf_falcon.bench import scaled
from hf_falcon.bench.scaled import Shape, scaled_drafter, scaled_target


# The drafter of the last is narrower than its target.
@pytest.mark.parametrize(
    "shape", [SHAPE, Shape(64, 64, 2, 8, 8, 16), Shape(64, 64, 4, 4, 2, 8), Shape(64, 2304, 2, 16, 16, 8)]
)
@pytest.mark.parametrize("block_size", [1, 2])
def test_scaled_models_are_the_same_functions(shape, block_size):
    target = new_target(head_dim=8)
    large = scaled_target(target, shape)
    assert large.config.hidden_size == shape.hidden_size
    assert large.model.layers[0].self_attn.q_proj.weight.shape == (
        shape.num_attention_heads * shape.head_dim,
        shape.hidden_size,
    )
    tokens = random_tokens(1, 30)
    with torch.no_grad():
        torch.testing.assert_close(large(tokens).logits, target(tokens).logits, rtol=1e-4, atol=1e-4)

    drafter = new_drafter(target, num_lstm_layers=0, block_size=block_size, draft_vocab_size=30)
    drafter.generation_config.num_assistant_tokens = 5
    large_drafter = scaled_drafter(drafter, large)
    sizes = FalconDraftConfig.from_target(large.config)
    for name in ("hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads", "head_dim"):
        assert getattr(large_drafter.config, name) == getattr(sizes, name)
    assert_same_drafting(drafter, target, large_drafter, large)


def test_scaled_medusa_like_is_the_same_function():
    target = new_target(head_dim=8)
    drafter, large = medusa_like(target, draft_vocab_size=30), scaled_target(target, SHAPE)
    with torch.no_grad():
        drafter.norm.weight.uniform_(0.5, 1.5)
        drafter.feature_mean.normal_(0.0, 0.5)
    assert_same_drafting(drafter, target, scaled_drafter(drafter, large), large)


def assert_same_drafting(drafter, target, large_drafter, large):
    tokens = random_tokens(1, 30)
    settings = {"max_new_tokens": 30, "do_sample": False, "return_dict_in_generate": True}
    small = target.generate(tokens, assistant_model=drafter, **settings)
    scaled = large.generate(tokens, assistant_model=large_drafter, **settings)
    assert scaled.sequences.tolist() == small.sequences.tolist()
    assert scaled.draft_statistics.accepted_by_depth == small.draft_statistics.accepted_by_depth
    assert scaled.draft_statistics.drafted_tokens == small.draft_statistics.drafted_tokens


def test_what_does_not_fit_into_memory(monkeypatch):
    target = new_target(head_dim=8)
    drafter = new_drafter(target, num_lstm_layers=0)
    large = scaled_target(target, SHAPE)
    monkeypatch.setattr(scaled.psutil, "virtual_memory", lambda: SimpleNamespace(available=100))
    # Not even asked for.
    monkeypatch.setattr(torch.nn.Module, "to_empty", None)
    message = "The scaled LlamaForCausalLM takes 6.5 GB in bfloat16, and cpu has 0.0 GB free: choose a smaller shape"
    with pytest.raises(ValueError, match=message):
        scaled_target(target.to(torch.bfloat16), Shape(4096, 11008, 16, 32, 32, 128))
    with pytest.raises(ValueError, match="The scaled FalconDraftModel takes 0.0 GB in float32"):
        scaled_drafter(drafter, large)


def test_what_cannot_be_scaled():
    target = new_target(head_dim=8)
    with pytest.raises(ValueError, match="only Llama models"):
        scaled_target(new_target("gpt2"), SHAPE)
    with pytest.raises(ValueError, match="does not fit"):
        scaled_target(target, Shape(16, 160, 5, 12, 4, 32))
    with pytest.raises(ValueError, match="do not fit into the heads"):
        scaled_target(target, Shape(64, 64, 2, 1, 1, 8))
    with pytest.raises(ValueError, match="does not divide the shape's, 12"):
        scaled_target(target, Shape(64, 64, 2, 8, 4, 12))
    with pytest.raises(ValueError, match="`num_lstm_layers` 2"):
        scaled_drafter(new_drafter(target, num_lstm_layers=2), target)
    with pytest.raises(ValueError, match="`use_qk_norm` True"):
        scaled_drafter(new_drafter(target, num_lstm_layers=0, use_qk_norm=True), target)


def test_only_falcon_drafters_are_scaled():
    target = new_target(head_dim=8)
    with pytest.raises(ValueError, match="The drafter is a Eagle3DraftModel: only Falcon drafters can be scaled"):
        scaled_drafter(new_eagle3(target), scaled_target(target, SHAPE))
