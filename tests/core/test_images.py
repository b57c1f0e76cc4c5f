# Copyright 2026 The hf_falcon authors. Licensed under the Apache License, Version 2.0.
"""Prompts with an image: the model prefills them as ever, and rounds go on from the first new token as text."""

import copy

import pytest
import torch
from compatibility import CHAINS, PLAIN, TREES, padded
from image_inputs import WITH_IMAGES, classify_with_image, image_model, image_prompt, other_image
from oracle import use_oracle
from quick import quick
from shrunken import tiny_model
from tiny_models import SAME_EVERY_ROUND, VOCAB, tiny_target
from tiny_models import prompt as prompt_of_text
from transformers import AutoModelForMultimodalLM, DynamicCache

from hf_falcon import FalconDraftConfig, FalconDraftModel
from hf_falcon.core.probe import verdict_of_call
from hf_falcon.core.target_parts import CACHE_NAME
from hf_falcon.core.target_run import TargetRun

# Positions of three kinds, a bidirectional image, tokens of the image among those of the text, positions from 1.
QUICK = ("qwen2_5_vl", "gemma3", "llava", "smolvlm", "paligemma")
NEW_TOKENS = 20


@pytest.mark.parametrize("model_type", quick(QUICK, WITH_IMAGES))
def test_with_an_image(model_type):
    row = classify_with_image(model_type)
    assert row.remark or row.result == TREES
    assert model_type not in QUICK or row.result == TREES


def test_an_image_before_the_text_takes_no_tree():
    """The probe has no image, so trees are right there. With one, each node would see other tokens than its own."""
    row = classify_with_image("git")
    assert row.result in (CHAINS, PLAIN) and row.remark


def make_drafter(model) -> FalconDraftModel:
    drafter = FalconDraftModel(FalconDraftConfig.from_target(model, block_size=2, num_hidden_layers=1)).eval()
    for name, value in {**SAME_EVERY_ROUND, "assistant_confidence_threshold": 0.0}.items():
        setattr(drafter.generation_config, name, value)
    return drafter


def generate(model, prompt, **kwargs):
    torch.manual_seed(0)
    given = {"max_new_tokens": NEW_TOKENS, "do_sample": False, "pad_token_id": 0, "return_dict_in_generate": True}
    return model.generate(**prompt, **{**given, **kwargs})


def check(model, prompt, monkeypatch, drafts=True, **kwargs):
    """Compares a call with a drafter that is often right and without it. Returns both outputs."""
    expected = generate(model, prompt, **kwargs)
    with monkeypatch.context() as patch:
        if drafts:
            use_oracle(patch, expected.sequences, accuracy=0.8, scattered=True)
        output = generate(model, prompt, assistant_model=make_drafter(model), **kwargs)
    assert output.sequences.tolist() == expected.sequences.tolist()
    assert (output.draft_statistics is not None) == drafts
    assert not drafts or output.draft_statistics.accepted_tokens > 0
    return output, expected


@pytest.fixture(scope="module")
def qwen():
    return image_model("qwen2_vl")


def test_the_image_is_read(qwen):
    prompt = image_prompt(qwen)
    assert generate(qwen, prompt).sequences.tolist() != generate(qwen, other_image(prompt)).sequences.tolist()


@pytest.mark.parametrize("padding", [False, True])
def test_a_prompt_that_ends_with_its_image(padding, qwen, monkeypatch):
    """Its last token has other positions of each kind."""
    prompt = image_prompt(qwen)
    end = int((prompt["input_ids"] == qwen.config.image_token_id).nonzero()[-1, 1]) + 1
    prompt = {
        name: value[:, :end] if value.shape[0] == 1 and end < value.shape[1] else value
        for name, value in prompt.items()
    }
    prompt = padded(prompt) if padding else prompt
    check(qwen, prompt, monkeypatch, attention_mask=(prompt["input_ids"] != 0).long())


def test_outputs(qwen, monkeypatch):
    kwargs = {name: True for name in ("output_logits", "output_scores", "output_hidden_states", "output_attentions")}
    qwen.set_attn_implementation("eager")
    output, expected = check(qwen, image_prompt(qwen), monkeypatch, **kwargs)
    qwen.set_attn_implementation("sdpa")
    for name in ("logits", "scores", "hidden_states", "attentions"):
        torch.testing.assert_close(output[name], expected[name], rtol=1e-3, atol=1e-3)


def test_streamer(qwen):
    class Tokens(list):
        def put(self, tokens):
            self.extend(tokens.flatten().tolist())

        def end(self):
            self.append("end")

    prompt, streamed = image_prompt(qwen), Tokens()
    output = generate(qwen, prompt, assistant_model=make_drafter(qwen), streamer=streamed)
    assert streamed == [*output.sequences[0].tolist(), "end"]


@pytest.mark.parametrize("model_type", ["qwen2_vl", "gemma3"])
def test_a_second_turn_continues_from_the_cache(model_type, monkeypatch):
    model = image_model(model_type)
    prompt = image_prompt(model)
    found = []
    for drafts in (False, True):
        assistant = {"assistant_model": make_drafter(model)} if drafts else {}
        first = generate(model, prompt, **assistant)
        text = torch.randint(3, VOCAB - 16, (1, 5), generator=torch.Generator().manual_seed(1))
        turn = {"input_ids": torch.cat((first.sequences, text), dim=1), "past_key_values": first.past_key_values}
        found.append(generate(model, turn, **assistant))
    expected, output = found
    assert output.sequences.tolist() == expected.sequences.tolist()
    assert output.draft_statistics is not None
    assert output.past_key_values.get_seq_length() == expected.past_key_values.get_seq_length()


def test_placeholders_beyond_the_vocabulary(monkeypatch):
    """The drafter has no embedding for them, and prompt lookup must not put them into a tree."""
    model = image_model("gemma3")
    prompt = image_prompt(model)
    # The text repeats what came before the image, with its first new token.
    ids = prompt["input_ids"]
    start = int((ids == model.config.image_token_id).nonzero()[0, 1])
    ids = torch.cat((ids, ids[:, : start - 1]), dim=1)
    beyond = VOCAB + 9
    prompt["input_ids"] = ids.masked_fill(ids == model.config.image_token_id, beyond)
    prompt["token_type_ids"] = (prompt["input_ids"] == beyond).long()
    model.config.image_token_id = beyond

    def allowed(row, tokens):
        return [int(ids[0, start - 1])] if len(tokens) == ids.shape[1] else range(VOCAB)

    drafted = []
    score = TargetRun.score

    def record(self, trees, texts):
        drafted.extend(trees[0].token_ids.tolist())
        return score(self, trees, texts)

    monkeypatch.setattr(TargetRun, "score", record)
    expected = generate(model, prompt, prefix_allowed_tokens_fn=allowed)
    drafter = make_drafter(model)
    drafter.generation_config.prompt_lookup_num_tokens = 4
    # The first call probes the target.
    generate(model, prompt, assistant_model=drafter, max_new_tokens=1)
    drafted.clear()
    output = generate(model, prompt, prefix_allowed_tokens_fn=allowed, assistant_model=drafter)
    assert output.sequences.tolist() == expected.sequences.tolist()
    # What prompt lookup proposes in place of the image.
    assert VOCAB - 1 in drafted[:10]
    assert max(drafted) < VOCAB


def test_a_batch_with_images(monkeypatch):
    """Rows advance by themselves where a step has nothing beside its text."""
    model = image_model("llava")
    prompt = image_prompt(model)
    rows = {
        name: torch.cat((value, value.flip(-1) if name == "pixel_values" else value)) for name, value in prompt.items()
    }
    expected = generate(model, rows)
    output = generate(model, rows, assistant_model=make_drafter(model))
    assert output.sequences.tolist() == expected.sequences.tolist()
    assert output.draft_statistics.drafted_tokens > 0
    assert len(set(map(tuple, expected.sequences.tolist()))) == 2


@pytest.mark.parametrize("model_type", ["qwen2_vl", "paligemma"])
def test_a_batch_in_plain_decoding(model_type, warnings_given):
    model = image_model(model_type)
    prompt = image_prompt(model)
    rows = {name: torch.cat((value, value)) for name, value in prompt.items()}
    expected = generate(model, rows)
    output = generate(model, rows, assistant_model=make_drafter(model))
    assert output.sequences.tolist() == expected.sequences.tolist()
    assert output.draft_statistics is None
    assert {"qwen2_vl": "positions of several kinds", "paligemma": "['token_type_ids']"}[
        model_type
    ] in warnings_given()[0]


@pytest.mark.parametrize("model_type, reason", [("idefics", "not alone"), ("mllama", "cross-attention layers")])
def test_every_token_looks_at_the_image(model_type, reason):
    row = classify_with_image(model_type)
    assert row.result == PLAIN
    assert reason in row.remark


def test_a_cache_without_layers(monkeypatch):
    """Mllama's cross-attention layers have none in it yet."""
    model = image_model("mllama")
    check(model, {"input_ids": image_prompt(model)["input_ids"]}, monkeypatch, past_key_values=None)
    text = prompt_of_text(9)
    expected = generate(model, {"input_ids": text})
    output = generate(
        model, {"input_ids": text, "past_key_values": DynamicCache()}, assistant_model=make_drafter(model)
    )
    assert output.sequences.tolist() == expected.sequences.tolist()


@pytest.mark.parametrize("model_type", ["gemma3", "qwen2_vl"])
def test_a_static_cache(model_type, monkeypatch):
    model = image_model(model_type)
    check(model, image_prompt(model), monkeypatch, cache_implementation="static", disable_compile=True)


def test_sound(monkeypatch):
    """Each step of plain decoding passes the same mask of the sound."""
    model = tiny_model(
        "qwen2_audio", AutoModelForMultimodalLM, sizes={"audio_token_index": 63, "max_source_positions": 16}
    )
    sound = torch.randn(1, 8, 32, generator=torch.Generator().manual_seed(0))
    ids = torch.cat((prompt_of_text(5) % 60 + 3, torch.full((1, 8), 63), prompt_of_text(5, seed=1) % 60 + 3), dim=1)
    prompt = {"input_ids": ids, "input_features": sound, "feature_attention_mask": torch.ones(1, 32, dtype=torch.long)}
    check(model, prompt, monkeypatch)


def test_a_stream_is_not_consumed():
    """Voxtral's update of its arguments takes a part of the sound from an iterator."""
    target = tiny_target("llama")
    given = {CACHE_NAME: DynamicCache(config=target.config), "input_features_generator": iter([1, 2])}
    verdict = verdict_of_call(target, prompt_of_text(9), [], [], target.generation_config, given)
    assert verdict.way == PLAIN and "['input_features_generator']" in verdict.reason
    assert next(given["input_features_generator"]) == 1


def test_changing_rotary_frequencies(monkeypatch, warnings_given):
    """Where the frequencies change, plain decoding may run the whole text again, without its image."""
    rope = {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 2.0}
    model = image_model("llava", text_config={"rope_parameters": rope, "max_position_embeddings": 256})
    prompt = image_prompt(model)
    check(model, prompt, monkeypatch, drafts=False)
    assert "its rotary frequencies depend" in warnings_given()[0]
    check(model, {"input_ids": prompt["input_ids"][:, :5]}, monkeypatch)


def test_images_in_the_cache(monkeypatch, warnings_given):
    """Also without a mask, and in a second turn, which has no image."""
    model = image_model("mllama")
    prompt = image_prompt(model)
    del prompt["cross_attention_mask"]
    first, _ = check(model, prompt, monkeypatch, drafts=False)
    text = torch.nn.functional.pad(first.sequences, (0, 3), value=5)
    sequences = []
    for assistant in ({}, {"assistant_model": make_drafter(model)}):
        turn = {"input_ids": text, "past_key_values": copy.deepcopy(first.past_key_values)}
        sequences.append(generate(model, turn, **assistant).sequences.tolist())
    assert sequences[0] == sequences[1]
    assert "keep an image in the cache" in warnings_given()[0]
