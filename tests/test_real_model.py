# Copyright 2026 The hf_falcon authors. Licensed under the Apache License, Version 2.0.
"""
The demo target, SmolLM2-135M-Instruct, in fp32: assisted text equals plain text.

Runs on the prompts below, or on the first turns of the JSONL files named in `HF_FALCON_PROMPTS` (separated by
`os.pathsep`), as `HF_FALCON_PROMPTS=mt_bench.jsonl:gsm8k.jsonl pytest -m slow tests/test_real_model.py`.
`HF_FALCON_PROMPT_COUNT` takes that many of each file, 12 by default.
"""

import json
import os
from pathlib import Path

import pytest
import torch
import transformers
from tiny_models import tiny_drafter

from hf_falcon.commands.models import load_drafter, load_target, shipped_drafter

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


def test_weights_are_in_fp32(models):
    assert models[0].dtype == torch.float32
