# Copyright 2026 The hf_falcon authors. Licensed under the Apache License, Version 2.0.
"""Prompts of files and of data sets."""

import json
from types import SimpleNamespace

import pytest

from hf_falcon.bench.prompts import read_turns


@pytest.mark.parametrize(
    "line, message",
    [
        ("nonsense " * 3, "record 2 is not JSON"),
        ('{"turn": ["a"]}', "record 2: .* has none of .*`turns`"),
        ('["turns"]', r"record 2 is \['turns'\]"),
        ('{"turns": "a"}', "record 2: `turns` is 'a': it must be a list of texts"),
        ('{"turns": []}', r"record 2: `turns` is \[\]"),
        ('{"turns": ["a", 3]}', r"record 2: `turns\[1\]` is 3"),
    ],
)
def test_wrong_prompts(tmp_path, caplog, line, message):
    path = tmp_path / "prompts.jsonl"
    good = '{"turns": ["good"]}\n'
    path.write_text(f"{good}{line}\n")
    expected = f"1 of 2 records cannot be read .*, more than a share of 0.05.*prompts.jsonl, {message}"
    with pytest.raises(ValueError, match=expected) as error:
        read_turns(str(path))
    # No command that reads prompts has such an argument.
    assert "max_bad_share" not in str(error.value)
    # One among many is left out.
    path.write_text(f"{good}{line}\n{good * 20}")
    assert read_turns(str(path)) == [["good"]] * 21
    assert "1 of 22 records are skipped" in caplog.text


def test_prompts(tmp_path):
    path = tmp_path / "prompts.jsonl"
    path.write_text('{"turns": ["a", "b"]}\n\n{"turns": ["c"], "more": 1}\n')
    assert read_turns(str(path)) == [["a", "b"], ["c"]] and read_turns(str(path), 1) == [["a", "b"]]
    messages = [{"role": "system", "content": "s"}, {"role": "user", "content": "d"}]
    path.write_text(json.dumps({"messages": messages}) + '\n{"prompt": "e", "completion": "f"}\n{"text": "g"}')
    assert read_turns(str(path)) == [["d"], ["e"], ["g"]]
    path.write_text("\n")
    with pytest.raises(ValueError, match="has no prompts"):
        read_turns(str(path))
    with pytest.raises(FileNotFoundError, match="`data` is 'elsewhere.jsonl', and there is no such file"):
        read_turns("elsewhere.jsonl")


def test_prompts_of_the_hub(monkeypatch):
    asked = []

    def load_dataset(*arguments, split):
        asked.append((*arguments, split))
        return {"question": ["one", "two"]}

    monkeypatch.setitem(__import__("sys").modules, "datasets", SimpleNamespace(load_dataset=load_dataset))
    assert read_turns("gsm8k", 1) == [["one"]] and asked == [("openai/gsm8k", "main", "test")]
