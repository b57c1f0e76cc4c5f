# Copyright 2026 The hf_falcon authors. Licensed under the Apache License, Version 2.0.
"""A tiny target and tiny drafters for it, with weights large enough that every one of them matters."""

import torch
from tiny_models import SAME_EVERY_ROUND
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from hf_falcon import FalconDraftConfig, FalconDraftModel

HIDDEN, VOCAB = 32, 64
SHAPES = {
    "llama": {"num_key_value_heads": 2, "intermediate_size": 48},
    "qwen2": {"num_key_value_heads": 2, "intermediate_size": 48},
    "gemma2": {"num_key_value_heads": 2, "intermediate_size": 48, "head_dim": 8, "final_logit_softcapping": 3.0},
    "granite": {"num_key_value_heads": 2, "intermediate_size": 48, "logits_scaling": 4.0},
    "cohere": {"num_key_value_heads": 2, "intermediate_size": 48, "logit_scale": 0.25},
    "gpt2": {},
    "opt": {"ffn_dim": 48, "word_embed_proj_dim": HIDDEN},
}


def tiny_target(kind: str = "llama", seed: int = 0, **changes) -> PreTrainedModel:
    torch.manual_seed(seed)
    sizes = {
        "vocab_size": VOCAB,
        "hidden_size": HIDDEN,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "max_position_embeddings": 256,
        "initializer_range": 0.3,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "pad_token_id": 0,
    }
    if kind == "gpt2":
        names = {"hidden_size": "n_embd", "num_hidden_layers": "n_layer", "num_attention_heads": "n_head"}
        sizes = {names.get(name, name): value for name, value in sizes.items()}
    config = AutoConfig.for_model(kind, **{**sizes, **SHAPES[kind], **changes})
    return AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()


def tiny_drafter(target: PreTrainedModel, seed: int = 1, scale: float = 0.3, **changes) -> FalconDraftModel:
    """A drafter with random weights and feature statistics; `scale=0` keeps the weights it is made with."""
    torch.manual_seed(seed)
    config = FalconDraftConfig.from_target(target, **{"intermediate_size": 48, **changes})
    drafter = FalconDraftModel(config).eval()
    for name, value in SAME_EVERY_ROUND.items():
        setattr(drafter.generation_config, name, value)
    if config.draft_vocab_size is not None:
        drafter.draft_vocab_ids.copy_(torch.randperm(config.vocab_size)[: config.draft_vocab_size].sort().values)
    if scale:
        with torch.no_grad():
            for parameter in drafter.parameters():
                parameter.normal_(1.0 if parameter.dim() == 1 else 0.0, scale)
            drafter.feature_mean.normal_(0.0, 0.5)
            drafter.feature_std.uniform_(0.5, 1.5)
    return drafter


def random_tokens(*shape: int, seed: int = 2) -> torch.Tensor:
    return torch.randint(3, VOCAB, shape, generator=torch.Generator().manual_seed(seed))
