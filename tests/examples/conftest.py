# Copyright 2026 The hf_falcon authors. Licensed under the Apache License, Version 2.0.
"""Fixtures of the examples' tests."""

import json
import shutil

import pytest
from example_scripts import TEMPLATE
from tiny_models import VOCAB, prompt, tiny_drafter, tiny_target, tiny_tokenizer
from transformers import AutoTokenizer

from hf_falcon.training.token_file import TokenFile


@pytest.fixture(scope="module")
def workplace(tmp_path_factory):
    """A target with its tokenizer, a token file and prompts, in a folder."""
    folder = tmp_path_factory.mktemp("workplace")
    tiny_target("llama").save_pretrained(folder / "target")
    tiny_tokenizer().save_pretrained(folder / "target")
    samples = [prompt(12 + seed % 7, seed)[0] for seed in range(40)]
    TokenFile.from_samples(samples, [4] * 40, [0.0] * 40, VOCAB).save(folder / "tokens.safetensors")
    (folder / "prompts.jsonl").write_text('{"turns": ["Why?"]}\n')
    dialogues = [{"messages": [{"role": "user", "content": f"abc{i}"}]} for i in range(12)]
    (folder / "dialogues.jsonl").write_text("".join(json.dumps(dialogue) + "\n" for dialogue in dialogues))
    shutil.copytree(folder / "target", folder / "chat")
    (folder / "chat" / "chat_template.jinja").write_text(TEMPLATE)
    tiny_drafter(tiny_target("llama")).save_pretrained(folder / "drafter")
    return folder


@pytest.fixture
def models(workplace, monkeypatch):
    """A function that has an example use the tiny models."""

    def give(script):
        drafter = tiny_drafter(tiny_target("llama"))
        monkeypatch.setattr(script, "load_target", lambda *_: (tiny_target("llama"), chat_tokenizer()))
        monkeypatch.setattr(script, "load_drafter", lambda *_: drafter)
        return tiny_target("llama"), chat_tokenizer(), drafter

    def chat_tokenizer():
        return AutoTokenizer.from_pretrained(workplace / "chat")

    return give
