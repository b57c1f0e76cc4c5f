# Copyright 2026 The hf_falcon authors. Licensed under the Apache License, Version 2.0.
"""Embeddings, LM head and weights of the target, as a drafter uses them."""

import logging

import pytest
import torch
from tiny_models import VOCAB, new_drafter, new_target, random_tokens
from transformers import AutoConfig, AutoModelForCausalLM
from utilities import close

from hf_falcon import FalconCandidateGenerator
from hf_falcon.checkpoint_files import was_trained_for
from hf_falcon.core import decoding, draft_session
from hf_falcon.core.draft_session import TargetHead
from hf_falcon.core.target_parts import structure_of
from hf_falcon.drafters import falcon_files
from hf_falcon.training.features import target_features

OTHERS = {
    # A multiplier, where Granite has a divisor of the same name.
    "hyperclovax": {"logits_scaling": 0.25, "head_dim": 8},
    "falcon_h1": {"lm_head_multiplier": 3.0, "mamba_d_ssm": 32, "mamba_n_heads": 4, "mamba_d_head": 8},
}


@pytest.mark.parametrize("kind", ["llama", "gemma2", "granite", "cohere", "gpt2", "opt", *OTHERS])
def test_the_target_head_gives_the_targets_logits(kind):
    if kind in OTHERS:
        sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
        sizes |= {"vocab_size": VOCAB, "num_key_value_heads": 2, "tie_word_embeddings": False}
        config = AutoConfig.for_model(kind, **sizes, **OTHERS[kind])
        target = AutoModelForCausalLM.from_config(config).eval()
    else:
        target = new_target(kind, **({"final_logit_softcapping": 3.0} if kind == "gemma2" else {}))
    tokens = random_tokens(2, 9)
    features = target_features(target, tokens, torch.ones_like(tokens, dtype=torch.bool))
    with torch.no_grad():
        expected = target(tokens).logits
    head = TargetHead(new_drafter(target), target)
    close(head.logits(features), expected, 1e-4)
    assert torch.equal(head.to_target_ids(torch.arange(VOCAB)), torch.arange(VOCAB))
    close(head.embed(tokens), target.get_input_embeddings()(tokens).detach())

    drafter = new_drafter(target, draft_vocab_size=20)
    head = TargetHead(drafter, target)
    close(head.logits(features), expected[..., drafter.draft_vocab_ids], 1e-4)
    assert torch.equal(head.to_target_ids(torch.arange(20)), drafter.draft_vocab_ids)


@pytest.mark.parametrize(
    "kind, changes, message",
    [
        ("llama", {"hidden_size": 64}, "`hidden_size` is 32, but the target has 64"),
        ("llama", {"vocab_size": 65}, "`vocab_size` is 64, but the target has 65"),
        ("qwen2", {}, "`target_model_type` is 'llama', but the target has 'qwen2'"),
    ],
)
def test_wrong_target(target, kind, changes, message):
    drafter, wrong = new_drafter(target), new_target(kind, **changes)
    with pytest.raises(ValueError, match=f"{message}.*Use that target, or train a drafter for this one"):
        TargetHead(drafter, wrong)
    with pytest.raises(ValueError, match=message):
        wrong.generate(random_tokens(1, 4), assistant_model=drafter, max_new_tokens=4, do_sample=False)


def test_other_weights_warn_once_and_work(target, caplog):
    decoding.logger.warning_once.cache_clear()
    drafter, other, prompt = new_drafter(target), new_target(seed=9), random_tokens(1, 6)
    options = {"max_new_tokens": 8, "do_sample": False}

    def warnings(model):
        caplog.clear()
        with caplog.at_level(logging.WARNING):
            found = model.generate(prompt, assistant_model=drafter, **options)
        assert torch.equal(found, model.generate(prompt, **options))
        return [record for record in caplog.records if "weights are not those" in record.getMessage()]

    assert warnings(target) == [] and was_trained_for(drafter, target)
    assert not was_trained_for(drafter, other)
    assert len(warnings(other)) == 1
    assert warnings(other) == []


def test_weights_are_compared_once(target, monkeypatch):
    """It takes as long as a tenth of a step of a small target."""
    drafter, compared = new_drafter(target), []
    monkeypatch.setattr(falcon_files, "weights_difference", lambda *models: compared.append(models))
    for _ in range(2):
        target.generate(random_tokens(1, 6), assistant_model=drafter, max_new_tokens=4, do_sample=False)
    assert compared == [(drafter, target)]


@pytest.mark.parametrize("rows", [1, 2])
def test_a_call_that_can_draft_nothing_asks_nothing_of_the_drafter(rows, target, monkeypatch):
    """Neither of the first token nor of the last one: two tokens are plain decoding's, and take its time."""

    def refuse(*args, **kwargs):
        raise AssertionError("nothing is to be drafted")

    monkeypatch.setattr(FalconCandidateGenerator, "commit", refuse)
    monkeypatch.setattr(draft_session, "head_parameters", refuse)
    drafter, prompt = new_drafter(target), random_tokens(rows, 6)
    for tokens in (1, 2):
        expected = target.generate(prompt, max_new_tokens=tokens, do_sample=False)
        found = target.generate(prompt, assistant_model=drafter, max_new_tokens=tokens, do_sample=False)
        assert torch.equal(found, expected)
    with pytest.raises(AssertionError, match="nothing is to be drafted"):
        target.generate(prompt, assistant_model=drafter, max_new_tokens=3, do_sample=False)


def test_the_structure_changes_where_adapters_are_switched_off():
    target = new_target()
    linear = target.model.layers[0].mlp.up_proj
    # As PEFT's layers have them.
    linear._active_adapter, linear._disable_adapters = ["default"], False
    before = structure_of(target)
    linear._disable_adapters = True
    assert structure_of(target) != before


def test_a_copy_in_bfloat16_is_the_same_target(target):
    drafter, copy = new_drafter(target), new_target().to(torch.bfloat16)
    assert was_trained_for(drafter, copy)
    # And the other way round: made from the bfloat16 copy, used with the float32 model it came from or went to.
    assert was_trained_for(new_drafter(copy), copy.float()) and was_trained_for(new_drafter(copy), target)
