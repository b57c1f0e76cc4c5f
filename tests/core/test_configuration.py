# Copyright 2026 The hf_falcon authors. Licensed under the Apache License, Version 2.0.
"""The configuration: what it refuses, and what it takes from a target."""

import pytest
from tiny_models import HIDDEN, VOCAB, new_target
from transformers import AutoConfig, LlamaConfig

from hf_falcon import FalconDraftConfig
from hf_falcon.checkpoint_files import embedding_fingerprint


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"block_size": 0}, "`block_size` is 0: set it to an integer from 1 to 64"),
        ({"block_size": 1.5}, "`block_size` is 1.5"),
        ({"block_size": True}, "`block_size` is True"),
        ({"feature_layers": [1, 1]}, "`feature_layers` is \\[1, 1\\]: give different layers"),
        ({"feature_layers": [-1]}, "`feature_layers` is \\[-1\\]: .* counted from 0"),
        ({"num_lstm_layers": -1}, "`num_lstm_layers` is -1: .* from 0 to 64"),
        ({"num_hidden_layers": 0}, "`num_hidden_layers` is 0"),
        ({"hidden_size": 0}, "`hidden_size` is 0"),
        ({"vocab_size": None}, "`vocab_size` is None"),
        ({"num_attention_heads": 6, "num_key_value_heads": 4}, "`num_key_value_heads` is 4: .* divisor"),
        ({"hidden_size": 33, "num_attention_heads": 4}, "`hidden_size` is 33.* set `head_dim`"),
        ({"head_dim": 7}, "`head_dim` is 7"),
        ({"draft_vocab_size": 0}, "`draft_vocab_size` is 0"),
        ({"draft_vocab_size": 32001}, "`draft_vocab_size` is 32001: set it between 1 and `vocab_size` .32000."),
    ],
)
def test_config_refuses(changes, message):
    with pytest.raises(ValueError, match=message):
        FalconDraftConfig(**changes)


@pytest.mark.parametrize("kind", ["codegen", "gemma4_text", "xlnet"])
def test_config_from_targets_without_some_fields(kind):
    """No special tokens, head sizes by layer, no limit of positions."""
    target = AutoConfig.for_model(kind)
    config = FalconDraftConfig.from_target(target)
    assert (config.hidden_size, config.vocab_size) == (target.hidden_size, target.vocab_size)
    assert config.head_dim >= 2 and config.max_position_embeddings >= 1
    assert kind != "codegen" or config.pad_token_id is None


def test_config_from_target():
    target = new_target(bos_token_id=1, eos_token_id=2)
    config = FalconDraftConfig.from_target(target, block_size=3)
    assert (config.block_size, config.hidden_size, config.vocab_size) == (3, HIDDEN, VOCAB)
    assert (config.num_attention_heads, config.num_key_value_heads) == (4, 2)
    assert (config.bos_token_id, config.eos_token_id, config.pad_token_id) == (1, 2, 0)
    assert config.target_model_type == "llama" and len(config.target_fingerprint) == 16
    assert FalconDraftConfig.from_target(target.config).target_fingerprint is None
    assert config.target_embedding_fingerprint == embedding_fingerprint(target) is not None
    assert FalconDraftConfig.from_target(target.config).target_embedding_fingerprint is None


@pytest.mark.parametrize(
    ("target_sizes", "sizes"),
    [
        # SmolLM2-135M, Llama-3.2-1B, Llama-2-7B, Llama-3.1-8B, Llama-2-13B.
        ((576, 1536, 9, 3), (1536, 3)),
        ((2048, 8192, 32, 8), (2048, 8)),
        ((4096, 11008, 32, 32), (4096, 8)),
        ((4096, 14336, 32, 8), (4096, 8)),
        ((5120, 13824, 40, 40), (5120, 8)),
        # No divisor of 20 is nearer to 8.
        ((640, 2560, 20, 10), (2048, 5)),
    ],
)
def test_drafters_of_large_targets_are_narrower(target_sizes, sizes):
    names = ("hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads")
    target = LlamaConfig(**dict(zip(names, target_sizes)))
    config = FalconDraftConfig.from_target(target)
    assert (config.intermediate_size, config.num_key_value_heads) == sizes
    assert config.hidden_size == target.hidden_size and config.num_attention_heads == target.num_attention_heads
    as_wide = FalconDraftConfig.from_target(target, **{name: getattr(target, name) for name in names})
    assert [getattr(as_wide, name) for name in names] == list(target_sizes)
