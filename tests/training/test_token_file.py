# Copyright 2026 The hf_falcon authors. Licensed under the Apache License, Version 2.0.
"""The token file: what is written is read again, and anything else is refused."""

import pytest
import torch
from safetensors.torch import save_file

from hf_falcon.training import token_file as token_file_module
from hf_falcon.training.token_file import TokenFile


def some_tokens(vocab_size=100, metadata=None):
    samples = [torch.tensor([5, 6, 7]), torch.tensor([vocab_size - 1, 1])]
    return TokenFile.from_samples(samples, [1, 1], [0.0, -1.0], vocab_size, metadata)


@pytest.mark.parametrize(("vocab_size", "dtype"), [(1 << 16, torch.uint16), ((1 << 16) + 1, torch.int32)])
def test_token_file_round_trip(tmp_path, vocab_size, dtype):
    metadata = {"target": "t", "target_fingerprint": "f", "plan": {"seed": 1}}
    path = tmp_path / "tokens.safetensors"
    some_tokens(vocab_size, metadata).save(path)
    loaded = TokenFile.load(path)
    assert loaded.tokens.dtype == dtype and len(loaded) == 2
    token_ids, prompt_length = loaded.sample(1)
    assert token_ids.tolist() == [vocab_size - 1, 1] and token_ids.dtype == torch.int64 and prompt_length == 1
    assert loaded.metadata == {"format_version": 1, **metadata}
    assert [p.name for p in tmp_path.iterdir()] == [path.name]
    first = path.read_bytes()
    for _ in range(5):
        loaded.save(path)
        assert path.read_bytes() == first
    with pytest.raises(IndexError, match="dialogues 0 to 1"):
        loaded.sample(2)


def test_token_file_without_metadata(tmp_path):
    file = some_tokens()
    save_file({name: getattr(file, name) for name in token_file_module._DTYPES}, tmp_path / "plain")
    loaded = TokenFile.load(tmp_path / "plain")
    assert len(loaded) == 2 and loaded.metadata == {}


def test_concatenate():
    files = [
        some_tokens(100, {"target": "t", "a": 1, "data": "user/data"}),
        some_tokens(1 << 17, {"target": "t", "a": 2, "data": ["file.json", "user/data"]}),
    ]
    both = TokenFile.concatenate(files)
    assert [both.sample(i)[0].tolist() for i in range(4)] == [[5, 6, 7], [99, 1], [5, 6, 7], [(1 << 17) - 1, 1]]
    assert both.metadata == {"target": "t", "data": ["user/data", "file.json"]}
    assert [file.sources for file in (*files, both)] == [
        ["user/data"],
        ["file.json", "user/data"],
        both.metadata["data"],
    ]
    assert both.temperatures.tolist() == [0, -1, 0, -1]
    assert TokenFile.concatenate([files[0], files[0]]).tokens.dtype == torch.uint16
    with pytest.raises(ValueError, match="target_fingerprint"):
        TokenFile.concatenate([some_tokens(metadata={"target_fingerprint": x}) for x in "ab"])
    with pytest.raises(ValueError, match="empty"):
        TokenFile.concatenate([])


@pytest.mark.parametrize(
    ("name", "value", "complaint"),
    [
        ("tokens", torch.zeros(5), "`tokens` has dtype torch.float32"),
        ("tokens", torch.zeros(6, dtype=torch.int32), "`offsets` begins and ends with .0, 5.*0 to 6"),
        ("offsets", torch.tensor([0, 5, 5]), "`offsets` of dialogue 1 is 5"),
        ("offsets", torch.tensor([1, 3, 5]), "`offsets` begins and ends with .1, 5"),
        ("offsets", torch.tensor([0, 5]), "`prompt_lengths` has 2 entries for 1"),
        ("prompt_lengths", torch.tensor([1, 2], dtype=torch.int32), "`prompt_lengths` of dialogue 1 is 2"),
        ("prompt_lengths", torch.tensor([0, 1], dtype=torch.int32), "`prompt_lengths` of dialogue 0 is 0"),
        ("temperatures", torch.tensor([float("nan"), 0]), "`temperatures` of dialogue 0 is nan"),
    ],
)
def test_token_file_validation(tmp_path, name, value, complaint):
    file = some_tokens()
    tensors = {key: getattr(file, key) for key in token_file_module._DTYPES} | {name: value}
    save_file(tensors, tmp_path / "bad")
    with pytest.raises(ValueError, match=complaint) as error:
        TokenFile.load(tmp_path / "bad")
    assert str(tmp_path / "bad") in str(error.value)


def test_token_file_that_is_none(tmp_path):
    with pytest.raises(FileNotFoundError, match="hf-falcon prepare"):
        TokenFile.load(tmp_path / "absent")
    (tmp_path / "text").write_text("no safetensors at all")
    with pytest.raises(ValueError, match="not a safetensors file"):
        TokenFile.load(tmp_path / "text")
    save_file({"tokens": torch.zeros(1, dtype=torch.int32)}, tmp_path / "partial")
    with pytest.raises(ValueError, match="offsets, prompt_lengths, temperatures"):
        TokenFile.load(tmp_path / "partial")
