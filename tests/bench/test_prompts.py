# Copyright 2026 The hf_falcon authors. Licensed under the Apache License, Version 2.0.
"""Prompts of files and of data sets."""

from types import SimpleNamespace

import pytest

from hf_falcon.bench.prompts import read_turns


@pytest.mark.parametrize(
    "line, message",
    [
        ("nonsense", "line 2: no JSON object with `turns`"),
        ('{"turn": ["a"]}', "line 2: no JSON object with `turns`"),
        ('["turns"]', "line 2: no JSON object with `turns`"),
        ('{"turns": "a"}', "line 2: `turns` is 'a'; it must be a list of texts"),
        ('{"turns": []}', "line 2: `turns` is \\[\\]"),
        ('{"turns": ["a", 3]}', "line 2: `turns` is \\['a', 3\\]"),
    ],
)
def test_wrong_prompts(tmp_path, line, message):
    path = tmp_path / "prompts.jsonl"
    path.write_text(f'{{"turns": ["good"]}}\n{line}\n')
    with pytest.raises(ValueError, match=f"prompts.jsonl, {message}"):
        read_turns(str(path))


def test_prompts(tmp_path):
    path = tmp_path / "prompts.jsonl"
    path.write_text('{"turns": ["a", "b"]}\n\n{"turns": ["c"], "more": 1}\n')
    assert read_turns(str(path)) == [["a", "b"], ["c"]] and read_turns(str(path), 1) == [["a", "b"]]
    path.write_text("\n")
    with pytest.raises(ValueError, match="has no prompts"):
        read_turns(str(path))
    with pytest.raises(FileNotFoundError, match="`data` is 'elsewhere'.*or one of mt_bench, humaneval, gsm8k"):
        read_turns("elsewhere")


def test_prompts_of_the_hub(monkeypatch):
    asked = []

    def load_dataset(*arguments, split):
        asked.append((*arguments, split))
        return {"question": ["one", "two"]}

    monkeypatch.setitem(__import__("sys").modules, "datasets", SimpleNamespace(load_dataset=load_dataset))
    assert read_turns("gsm8k", 1) == [["one"]] and asked == [("openai/gsm8k", "main", "test")]
