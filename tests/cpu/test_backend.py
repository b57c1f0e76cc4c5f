# Copyright 2026 The hf_falcon authors. Licensed under the Apache License, Version 2.0.
"""The CPU's backend replaces transformers' attention only where it pays, and never travels with the core."""

from pathlib import Path

import pytest
import torch
from tiny_models import new_target, prompt, tiny_drafter, tiny_target
from transformers import AttentionInterface, LlamaConfig, LlamaForCausalLM

import hf_falcon
from hf_falcon.private_names import sdpa_attention_forward

SOURCE = Path(hf_falcon.__file__).parent.parent


@pytest.mark.parametrize("kv_heads", [4, 2])
def test_attention_is_replaced_for_grouped_queries_only(kv_heads):
    """With as many key heads as query heads, transformers copies nothing."""
    config = LlamaConfig(
        **{**tiny_target("llama").config.to_dict(), "num_attention_heads": 4, "num_key_value_heads": kv_heads}
    )
    torch.manual_seed(0)
    target = LlamaForCausalLM(config).eval()
    replaced = set()
    target.model.register_forward_hook(
        lambda *_: replaced.add(AttentionInterface()["sdpa"] is not sdpa_attention_forward)
    )
    target.generate(prompt(9), assistant_model=tiny_drafter(target), max_new_tokens=8, do_sample=False, pad_token_id=0)
    # The prompt's forward is no round.
    assert replaced == ({False} if kv_heads == 4 else {False, True})
    assert AttentionInterface()["sdpa"] is sdpa_attention_forward


def test_a_target_whose_head_is_resized_in_place_gets_its_layers_anew():
    """transformers keeps the layer and the parameter of a tied head."""
    target = new_target("llama", tie_word_embeddings=True)
    settings = {"max_new_tokens": 20, "do_sample": False}
    target.generate(prompt(9), assistant_model="lookup", **settings)
    head = target.lm_head.weight
    target.resize_token_embeddings(target.config.vocab_size + 1)
    assert target.lm_head.weight is head
    with torch.no_grad():
        head[-1] = 0.0
    found = target.generate(prompt(9), assistant_model="lookup", **settings)
    assert found.tolist() == target.generate(prompt(9), **settings).tolist()
