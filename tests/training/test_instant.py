# Copyright 2026 The hf_falcon authors. Licensed under the Apache License, Version 2.0.
"""Instant drafters: made from a target's own responses, without data and without training."""

import json
import random
import re
import string

import pytest
import torch
from tiny_models import ALL_TARGETS, VOCAB, new_target, prompt, tiny_tokenizer
from transformers import BartConfig, BartForConditionalGeneration

import hf_falcon
from hf_falcon.commands.models import load_drafter
from hf_falcon.training.context_bonuses import Sample, calibration
from hf_falcon.training.features import MemoryFeatures, target_features
from hf_falcon.training.instant import instant_drafter
from hf_falcon.training.own_prompts import PROMPTS
from hf_falcon.training.prepare import _word_runs, responses_in_memory

TEXTS = ["".join(random.Random(n).choices(string.ascii_letters, k=3 * n)) for n in range(1, 20)]
# Of Gemma 3's layers the last two are of one kind.
KINDS = {
    "llama": {},
    "qwen2": {},
    "gemma3": {"layer_types": ["sliding_attention"] * 2 + ["full_attention"] * 2},
}


def deep(kind, **fields):
    return new_target(kind, **{"num_hidden_layers": 4, **KINDS.get(kind, {}), **fields})


def make(target, **arguments):
    defaults = {"prompts": TEXTS, "max_new_tokens": 24, "progress": False}
    return instant_drafter(target, tiny_tokenizer(), **{**defaults, **arguments})


def generated(target, **arguments):
    return target.generate(prompt(9), do_sample=False, max_new_tokens=24, **arguments)


@pytest.mark.parametrize("kind", KINDS)
def test_the_saved_drafter_copies_layers_and_drafts_exactly(kind, tmp_path):
    target = deep(kind)
    drafter = make(target)
    assert drafter.config.num_hidden_layers == 2 and drafter.config.feature_layers == [1]
    copied = drafter.layers[1].self_attn.q_proj.weight
    torch.testing.assert_close(copied, target.model.layers[3].self_attn.q_proj.weight)
    drafter.save_pretrained(tmp_path)
    again = load_drafter(str(tmp_path), torch.float32, "cpu")
    options = json.loads((tmp_path / "generation_config.json").read_text())
    assert len(options["context_bonuses"]) == 5 and len(options["draft_calibration"]) == 3
    again.generation_config.num_assistant_tokens_schedule = "constant"
    found = generated(target, assistant_model=again, return_dict_in_generate=True)
    assert found.sequences.equal(generated(target))
    assert found.draft_statistics.drafted_tokens > 0


def test_it_drafts_what_the_target_writes():
    """Where the token alone says what follows, the map finds it: nearly all is accepted, and nothing of a new one."""
    target = deep("llama", hidden_size=VOCAB, num_attention_heads=4, tie_word_embeddings=False)
    with torch.no_grad():
        for layer in target.model.layers:
            layer.self_attn.o_proj.weight.mul_(0.02)
            layer.mlp.down_proj.weight.mul_(0.02)
        target.model.embed_tokens.weight.copy_(torch.eye(VOCAB))
        # After token n comes token n + 5.
        target.lm_head.weight.copy_(4 * torch.eye(VOCAB).roll(5, dims=0))
    drafter = make(target, max_new_tokens=70, num_draft_layers=1)
    new = hf_falcon.FalconDraftModel(drafter.config).eval()
    taus = []
    for each in (drafter, new):
        each.generation_config.num_assistant_tokens_schedule = "constant"
        each.generation_config.num_assistant_tokens = each.generation_config.num_draft_passes = 3
        each.generation_config.prompt_lookup_num_tokens = 0
        each.generation_config.context_bonuses = []
        found = generated(target, assistant_model=each, return_dict_in_generate=True)
        assert found.sequences.equal(generated(target))
        taus.append(found.draft_statistics.accepted_tokens / found.draft_statistics.rounds)
    assert taus[0] > 1.5 > 0.5 > taus[1], taus


def test_the_same_seed_gives_the_same_drafter():
    first, second, other = (make(deep("llama"), seed=seed) for seed in (0, 0, 1))
    states = [each.state_dict() for each in (first, second, other)]
    assert all(tensor.equal(states[1][name]) for name, tensor in states[0].items())
    assert not states[0]["fusion.linear.weight"].equal(states[2]["fusion.linear.weight"])
    assert first.generation_config.context_bonuses == second.generation_config.context_bonuses


def test_a_draft_vocabulary_has_the_tokens_that_the_target_writes():
    target = deep("llama")
    drafter = make(target, draft_vocab_size=40, feature_layers=[])
    data, _ = responses_in_memory(target, tiny_tokenizer(), TEXTS, 24, progress=False)
    counts = torch.bincount(data.tokens.long(), minlength=VOCAB)
    ids = drafter.draft_vocab_ids
    assert len(ids) == 40 and drafter.config.feature_layers == []
    assert set(counts.topk(10).indices.tolist()) <= set(ids.tolist())
    assert generated(target, assistant_model=drafter).equal(generated(target))


@pytest.mark.parametrize("layers", [1, 3, 9])
def test_layers_that_are_copied(layers):
    target = deep("llama")
    drafter = make(target, num_draft_layers=layers)
    assert drafter.config.num_hidden_layers == min(layers, 3)
    assert generated(target, assistant_model=drafter).equal(generated(target))


def test_fewer_layers_are_copied_where_the_last_ones_are_of_different_kinds():
    # All layers of a drafter have the same rotary frequencies. The window is longer than the responses.
    kinds = ["full_attention", "full_attention", "full_attention", "sliding_attention"]
    rotary = {kind: {"rope_type": "default", "rope_theta": theta} for kind, theta in zip(kinds[2:], (1e6, 3.0))}
    target = new_target("gemma3", num_hidden_layers=4, layer_types=kinds, sliding_window=128, rope_parameters=rotary)
    with torch.no_grad():
        for layer in target.model.layers:
            layer.post_attention_layernorm.weight.add_(3)
    drafter = make(target)
    assert drafter.config.num_hidden_layers == 1
    # Those of layers with a window.
    assert drafter.config.rope_theta == 3.0
    assert generated(target, assistant_model=drafter).equal(generated(target))


@pytest.mark.parametrize("kind", ["phi3", "gpt2", "mamba"])
def test_targets_without_copies_are_refused_before_they_respond(kind, monkeypatch):
    target = ALL_TARGETS[kind]()
    monkeypatch.setattr(type(target), "generate", lambda *args, **kwargs: pytest.fail("it responds"))
    with pytest.raises(ValueError, match=rf"^`target` is a {type(target).__name__}: .*cannot be copied.*\"lookup\""):
        make(target)


def test_an_encoder_decoder_is_refused():
    sizes = {name: 32 for name in ("d_model", "encoder_ffn_dim", "decoder_ffn_dim")}
    config = BartConfig(vocab_size=VOCAB, encoder_layers=1, decoder_layers=1, **sizes)
    with pytest.raises(ValueError, match="BartForConditionalGeneration: an encoder-decoder"):
        make(BartForConditionalGeneration(config))


@pytest.mark.parametrize(
    "arguments, message",
    [
        ({"num_draft_layers": 0}, "^`num_draft_layers` is 0: give 1 or more"),
        ({"prompts": ["a"] * 7}, "^`prompts` has 7 texts .*at least 8"),
        ({"prompts": [""] * 9}, "^`prompts` has 0 texts of 1 to 512 tokens"),
        ({"max_new_tokens": 1}, "`max_new_tokens` is 1: give at least 8 texts and 4 tokens"),
    ],
)
def test_wrong_arguments(arguments, message):
    with pytest.raises(ValueError, match=message):
        make(deep("llama"), **arguments)


def test_a_target_whose_tokenizer_is_not_found(tmp_path):
    target = deep("llama")
    target.save_pretrained(tmp_path / "target")
    target.name_or_path = str(tmp_path / "target")
    with pytest.raises(ValueError, match=r"^`tokenizer` is not given, and .*give the target's tokenizer"):
        instant_drafter(target, prompts=TEXTS, progress=False)
    tiny_tokenizer().save_pretrained(tmp_path / "target")
    drafter = instant_drafter(target, prompts=TEXTS, max_new_tokens=12, progress=False)
    assert generated(target, assistant_model=drafter).equal(generated(target))


def test_responses_and_their_features_are_those_of_the_target():
    target, tokenizer = deep("llama"), tiny_tokenizer()
    # Groups of a few, of both temperatures.
    data, rows = responses_in_memory(target, tokenizer, TEXTS, 12, [1], batch_size=4, progress=False)
    assert len(data) == len(rows) == len(TEXTS) and sorted(set(data.temperatures.tolist())) == pytest.approx(
        [0.0, 0.7]
    )
    for index, text in enumerate(TEXTS):
        token_ids, prompt_length = data.sample(index)
        assert token_ids[:prompt_length].tolist() == tokenizer(text)["input_ids"]
        if data.temperatures[index] == 0.0:
            ids = token_ids[None, :prompt_length]
            plain = target.generate(ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=12)
            assert plain[0].equal(token_ids)
        expected = target_features(target, token_ids[None], torch.ones(1, len(token_ids), dtype=torch.bool), [1])[0]
        torch.testing.assert_close(rows[index][:-1].float(), expected[:-1], rtol=0.02, atol=0.02)


def test_features_in_memory():
    rows = [torch.arange(12.0).view(2, 6)]
    found = MemoryFeatures(rows, [3, 5], 2)
    assert found.has([5]) and not found.has([4])
    assert found.sample(0).equal(rows[0]) and found.sample(0, []).equal(rows[0][:, :2])
    assert found.sample(0, [5, 3]).equal(rows[0][:, [0, 1, 4, 5, 2, 3]])


def test_a_calibration_compares_probabilities_with_what_came():
    """Two choices of probability one half: of one position the target's choice is among them, of three it is not."""
    positions = 400
    best = torch.tensor([[0.0, 0.0, -50.0, -50.0]]).expand(positions, 4)
    right = torch.tensor([0.0, -90.0, -90.0, -90.0]).repeat(positions // 4)
    nothing = torch.full((positions, 1), -torch.inf)
    none = torch.full((positions, 1), -1)
    sample = Sample(best.logsumexp(dim=1), nothing, none, right, none[:, 0], best)
    # A calibration of 1 counts as 20 observations.
    assert calibration([sample], torch.zeros(2)) == pytest.approx((20 + 100) / (20 + 400))
    assert calibration([], torch.zeros(2)) == 1.0


def test_the_prompts_are_varied_and_of_no_evaluation_file():
    assert len(set(PROMPTS)) == len(PROMPTS) >= 90
    # No text is a variant of another one.
    runs = [_word_runs(text) for text in PROMPTS]
    shared = [(i, j) for i, first in enumerate(runs) for j, other in enumerate(runs[:i]) if first & other]
    assert shared == []
    assert sum(bool(re.search(r"def |function|class |script|program", text)) for text in PROMPTS) >= 12
    assert sum(bool(re.search(r"How (much|many)|how (much|many)|average|perimeter", text)) for text in PROMPTS) >= 8
