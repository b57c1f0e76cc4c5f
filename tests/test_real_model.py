# Copyright 2026 The hf_falcon authors. Licensed under the Apache License, Version 2.0.
"""
The demo target, SmolLM2-135M-Instruct, in fp32: assisted text equals plain text.

Runs on the prompts below, or on the first turns of the JSONL files named in `HF_FALCON_PROMPTS` (separated by
`os.pathsep`), as `HF_FALCON_PROMPTS=mt_bench.jsonl:gsm8k.jsonl pytest -m slow tests/test_real_model.py`.
`HF_FALCON_PROMPT_COUNT` takes that many of each file, 12 by default.
"""

import json
import os
import random
from pathlib import Path

import pytest
import torch
import transformers
from tiny_models import tiny_drafter
from transformers.generation.streamers import BaseStreamer

import hf_falcon
from hf_falcon import FalconCandidateGenerator
from hf_falcon.commands.models import encode, load_drafter, load_target, shipped_drafter

pytestmark = pytest.mark.slow

PROMPTS = [
    "Name three rivers of Europe and say where each of them ends.",
    "Write a Python function that returns the n-th Fibonacci number.",
]
NEW_TOKENS = 48


def prompts() -> list[str]:
    files = os.environ.get("HF_FALCON_PROMPTS")
    if not files:
        return PROMPTS
    count = int(os.environ.get("HF_FALCON_PROMPT_COUNT", "12"))
    lines = [line for file in files.split(os.pathsep) for line in Path(file).read_text().splitlines()[:count]]
    return [json.loads(line)["turns"][0] for line in lines]


@pytest.fixture(scope="module")
def models():
    try:
        target, tokenizer = load_target(None, dtype="float32", device="cpu")
    except OSError as error:
        pytest.skip(str(error))
    if os.path.isdir(shipped_drafter()):
        drafter = load_drafter(dtype="float32", device="cpu")
    else:
        drafter = tiny_drafter(target)
    return target, tokenizer, drafter


@pytest.fixture(scope="module")
def new_tokens() -> int:
    return 128 if os.environ.get("HF_FALCON_PROMPTS") else NEW_TOKENS


@pytest.mark.parametrize("do_sample", [False, True], ids=["greedy", "sampling"])
@pytest.mark.parametrize("text", prompts(), ids=lambda text: text[:24])
def test_text_equals_plain(text, do_sample, models, new_tokens):
    target, tokenizer, drafter = models
    messages = [{"role": "user", "content": text}]
    inputs = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_tensors="pt", return_dict=True)

    def generate(**kwargs):
        transformers.set_seed(0)
        settings = {"temperature": 0.7, "top_p": 0.9} if do_sample else {}
        settings |= {"do_sample": do_sample, "max_new_tokens": new_tokens}
        return target.generate(**inputs, **settings, return_dict_in_generate=True, **kwargs)

    output, expected = generate(assistant_model=drafter), generate()
    assert output.sequences.tolist() == expected.sequences.tolist()
    statistics = output.draft_statistics
    assert statistics.new_tokens == expected.sequences.shape[1] - inputs["input_ids"].shape[1]
    if os.path.isdir(shipped_drafter()) and not do_sample:
        assert statistics.tau > 0.5, "the shipped drafter is of use"


@pytest.mark.skipif(not torch.backends.mkldnn.is_available(), reason="packed weights need oneDNN")
@pytest.mark.parametrize("do_sample", [False, True], ids=["greedy", "sampling"])
@pytest.mark.parametrize("text", prompts(), ids=lambda text: text[:24])
def test_text_equals_plain_with_packed_weights(text, do_sample, models, new_tokens):
    target, _, drafter = models
    before = target.state_dict()["model.layers.0.mlp.up_proj.weight"].clone()
    with hf_falcon.packed_weights(target, drafter):
        test_text_equals_plain(text, do_sample, models, new_tokens)
    assert torch.equal(target.model.layers[0].mlp.up_proj.weight, before)


@pytest.mark.parametrize("text", prompts()[:4], ids=lambda text: text[:24])
def test_the_end_is_where_plain_ends(text, models):
    """EOS, stop strings and budgets that fall inside accepted paths, and what a streamer is given by then."""
    target, tokenizer, drafter = models
    inputs = encode(tokenizer, text, target.device)
    start = inputs["input_ids"].shape[1]
    tokens = target.generate(**inputs, do_sample=False, max_new_tokens=NEW_TOKENS)[0, start:].tolist()
    written = tokenizer.decode(tokens)
    ends = [{"eos_token_id": [tokenizer.eos_token_id, tokens[place]]} for place in range(5, 20, 3)]
    ends += [{"stop_strings": [written[place : place + 7]], "tokenizer": tokenizer} for place in range(20, 80, 12)]
    ends += [{"max_new_tokens": count} for count in (1, 2, 5)]
    for end in ends:
        given = []
        for assistant in ({"assistant_model": drafter}, {}):
            streamer = Tape()
            output = target.generate(
                **inputs, **assistant, **{"do_sample": False, "max_new_tokens": NEW_TOKENS, **end}, streamer=streamer
            )
            assert output[0].tolist() == streamer.tokens
            given.append(streamer.tokens)
        assert given[0] == given[1]
        assert "max_new_tokens" in end or len(given[0]) < start + NEW_TOKENS


class Tape(BaseStreamer):
    """Remembers the tokens that it is given."""

    def __init__(self):
        self.tokens: list[int] = []

    def put(self, value):
        self.tokens += value.flatten().tolist()

    def end(self):
        pass


def test_weights_are_in_fp32(models):
    assert models[0].dtype == torch.float32


def first_choices(generator, newest):
    """The likeliest token at each place of the next block, each after the likeliest ones before it."""
    chosen = [newest]
    for state in generator._block.unbind(1):
        if generator.session.is_conditional:
            state = generator.session.condition(state, chosen[-1][None])
        chosen.append(generator.head.to_target_ids(generator.head.logits(state).argmax(-1))[0])
    return torch.stack(chosen[1:])


def test_what_earlier_cuts_change(models):
    """
    In decoding, most committed positions of a drafter with k > 1 ran under earlier cuts into blocks than the one that
    drafting starts from. What that costs the shipped k = 2 drafter: how often its first choice is another, and how
    often it is the target's own.
    """
    folder = f"{shipped_drafter()}-k2"
    if not os.path.isdir(folder):
        pytest.skip(f"{folder} is in the source checkout only")
    target, tokenizer, _ = models
    drafter = load_drafter(folder, dtype="float32", device="cpu")
    same = right = right_at_once = total = 0
    shuffled = random.Random(0)
    for text in prompts():
        inputs = encode(tokenizer, text, target.device)
        tokens = target.generate(**inputs, do_sample=False, max_new_tokens=128)
        with torch.no_grad():
            features = target.base_model(tokens).last_hidden_state
            known = inputs["input_ids"].shape[1]
            piecewise = FalconCandidateGenerator(drafter, target)
            piecewise.commit(features[:, :known], tokens[:, 1 : known + 1])
            while (end := known + shuffled.choice((1, 2, 3))) < tokens.shape[1] - 2:
                piecewise.commit(features[:, known:end], tokens[:, known + 1 : end + 1])
                at_once = FalconCandidateGenerator(drafter, target)
                at_once.commit(features[:, :end], tokens[:, 1 : end + 1])
                first, expected = (first_choices(each, tokens[0, end]) for each in (piecewise, at_once))
                truth = tokens[0, end + 1 : end + 3]
                same, total = same + int((first == expected).sum()), total + len(truth)
                right, right_at_once = (
                    right + int((first == truth).sum()),
                    right_at_once + int((expected == truth).sum()),
                )
                known = end
    print(
        f"\nfirst choices that earlier cuts leave the same: {100 * same / total:.1f} %; that are the target's own: "
        f"{100 * right / total:.1f} %, without earlier cuts {100 * right_at_once / total:.1f} % ({total} choices)"
    )
    assert same / total > 0.8
