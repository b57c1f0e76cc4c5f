# Copyright 2026 The hf_falcon authors. Licensed under the Apache License, Version 2.0.
"""The token file: what is written is read again, and anything else is refused."""

import errno
import hashlib
import json
import os
import struct

import pytest
import torch
from safetensors.torch import save_file
from utilities import peak_memory, start_peak

from hf_falcon.training import token_file as token_file_module
from hf_falcon.training.token_file import TokenFile, write_atomically


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
    assert loaded.sha256 == hashlib.sha256(loaded.tokens.numpy().tobytes()).hexdigest()
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
        ("offsets", torch.tensor([0, 2**63 - 1, 5]), "`offsets` of dialogue 1 is 5"),
        ("offsets", torch.tensor([0, -(2**63), 5]), "`offsets` of dialogue 0 is -9.22"),
        ("offsets", torch.tensor([0]), "`offsets` begins and ends with .0, 0.*0 to 5"),
        ("offsets", torch.tensor([], dtype=torch.int64), "`offsets` begins and ends with nothing"),
        ("offsets", torch.tensor([[0, 3, 5]]), "`offsets` has dtype torch.int64 and shape .1, 3."),
        ("offsets", torch.tensor([1, 3, 5]), "`offsets` begins and ends with .1, 5"),
        ("offsets", torch.tensor([0, 5]), "`prompt_lengths` has 2 entries for 1"),
        ("prompt_lengths", torch.tensor([1, 2], dtype=torch.int32), "`prompt_lengths` of dialogue 1 is 2"),
        ("prompt_lengths", torch.tensor([0, 1], dtype=torch.int32), "`prompt_lengths` of dialogue 0 is 0"),
        ("prompt_lengths", torch.tensor([2**31 - 1, 1], dtype=torch.int32), "`prompt_lengths` of dialogue 0 is 2.1"),
        ("prompt_lengths", torch.tensor([1, -(2**31)], dtype=torch.int32), "`prompt_lengths` of dialogue 1 is -2.1"),
        ("temperatures", torch.tensor([float("nan"), 0]), "`temperatures` of dialogue 0 is nan"),
        ("temperatures", torch.tensor([0, float("inf")]), "`temperatures` of dialogue 1 is inf"),
        ("temperatures", torch.tensor([0, -float("inf")]), "`temperatures` of dialogue 1 is -inf"),
        ("temperatures", torch.tensor([-0.5, 0]), "`temperatures` of dialogue 0 is -0.5"),
    ],
)
def test_token_file_validation(tmp_path, name, value, complaint):
    file = some_tokens()
    tensors = {key: getattr(file, key) for key in token_file_module._DTYPES} | {name: value}
    save_file(tensors, tmp_path / "bad")
    with pytest.raises(ValueError, match=complaint) as error:
        TokenFile.load(tmp_path / "bad")
    assert str(tmp_path / "bad") in str(error.value)


def test_offsets_that_wrap():
    """Each differs from the one before by a positive number, as int64 counts."""
    offsets = torch.tensor([0, 2**63 - 1, -(2**63), -2, 5])
    assert (offsets.diff() > 0).all()
    lengths, temperatures = torch.ones(4, dtype=torch.int32), torch.zeros(4)
    with pytest.raises(ValueError, match="`offsets` of dialogue 1 is -9.22.*: each must be greater"):
        TokenFile(torch.zeros(5, dtype=torch.int32), offsets, lengths, temperatures)


def test_token_file_that_is_none(tmp_path):
    with pytest.raises(FileNotFoundError, match="hf-falcon prepare"):
        TokenFile.load(tmp_path / "absent")
    (tmp_path / "text").write_text("no safetensors at all")
    with pytest.raises(ValueError, match="not a safetensors file"):
        TokenFile.load(tmp_path / "text")
    save_file({"tokens": torch.zeros(1, dtype=torch.int32)}, tmp_path / "partial")
    with pytest.raises(ValueError, match="offsets, prompt_lengths, temperatures"):
        TokenFile.load(tmp_path / "partial")


def rewritten(path, metadata):
    """The tokens with another text as metadata."""
    file = some_tokens()
    save_file({name: getattr(file, name) for name in token_file_module._DTYPES}, path, {"hf_falcon": metadata})


@pytest.mark.parametrize(
    ("metadata", "complaint"),
    [
        ("[" * 100_000, "`hf_falcon` of its metadata is refused: lists and objects are nested more than 32 deep"),
        ('{"a": ' * 40 + "1" + "}" * 40, "nested more than 32 deep"),
        ('{"format_version": ' + "9" * 5000 + "}", "a number has more than 1,000 digits"),
        ("{", "`hf_falcon` of its metadata is refused: not JSON"),
        ("{} {}", "follows the end"),
        ("[]", r"`hf_falcon` of its metadata is \[\]: it must be an object"),
        ('{"format_version": 2}', "`format_version` is 2, this hf-falcon reads 1: upgrade"),
        ('{"format_version": "1"}', "`format_version` is '1'"),
        ('{"format_version": null}', "`format_version` is None"),
        ('{"format_version": true}', "`format_version` is True"),
        ('{"format_version": NaN}', "`format_version` is nan"),
        ('{"data": 5}', "`data` of its metadata is 5: it must be names"),
        ('{"data": ["a", {}]}', r"`data` of its metadata is \['a', \{\}\]"),
        ('{"data": "\\u001b[2J"}{', r"not JSON: '\{' follows the end"),
        ('{"plan": [1]}', r"`plan` of its metadata is \[1\]: it must be an object"),
        ('{"target_fingerprint": {"a": 1}}', "`target_fingerprint` of its metadata is .* it must be a text"),
        ('{"chat_template_sha256": 0}', "`chat_template_sha256` of its metadata is 0"),
    ],
)
def test_metadata_of_another_kind(tmp_path, metadata, complaint):
    rewritten(tmp_path / "bad", metadata)
    with pytest.raises(ValueError, match=complaint) as error:
        TokenFile.load(tmp_path / "bad")
    assert str(tmp_path / "bad") in str(error.value) and len(str(error.value)) < 1000


@pytest.mark.parametrize("metadata", ['{"target_fingerprint": null}', '{"data": "a", "x": NaN}', '{"plan": {}}'])
def test_metadata_that_is_read(tmp_path, metadata):
    rewritten(tmp_path / "good", metadata)
    loaded = TokenFile.load(tmp_path / "good")
    assert len(TokenFile.concatenate([loaded, some_tokens()])) == 4


def with_header(path, header, data=b"", length=None):
    text = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text) if length is None else length) + text + data)


def test_headers_of_token_files(tmp_path):
    """A header is refused before it, or a tensor, takes memory."""
    path = tmp_path / "bad"
    for length in (1 << 21, 1 << 62, (1 << 64) - 1):
        with_header(path, {}, length=length)
        with pytest.raises(ValueError, match=f"its header has {length} bytes, more than 1048576"):
            TokenFile.load(path)
    with_header(path, {str(i): {"dtype": "U8", "shape": [0], "data_offsets": [0, 0]} for i in range(100_000)})
    before = start_peak()
    with pytest.raises(ValueError, match="its header has"):
        TokenFile.load(path)
    assert peak_memory() - before < 2**20
    rows = {name: {"dtype": "I32", "shape": [1], "data_offsets": [0, 4]} for name in token_file_module._DTYPES}
    with_header(path, rows, bytes(4))
    with pytest.raises(ValueError, match="not a safetensors file of tokens"):
        TokenFile.load(path)
    fields = {"dtype": "F8_E8M0", "shape": [4], "data_offsets": [0, 4]}
    spans = {"offsets": [4, 12], "prompt_lengths": [12, 12], "temperatures": [12, 12]}
    dtypes = {"offsets": "I64", "prompt_lengths": "I32", "temperatures": "F32"}
    header = {"tokens": fields} | {
        name: {"dtype": dtypes[name], "shape": [(end - start) // 8], "data_offsets": [start, end]}
        for name, (start, end) in spans.items()
    }
    with_header(path, header, bytes(12))
    with pytest.raises(ValueError, match="`tokens` has dtype F8_E8M0"):
        TokenFile.load(path)


def test_tokens_outside_the_vocabulary(tmp_path):
    file = some_tokens(1 << 17)
    file.check_vocabulary(1 << 17, "all.safetensors")
    expected = "all.safetensors: `tokens` of dialogue 1 has token 131071, but the target's `vocab_size` is 131071"
    with pytest.raises(ValueError, match=expected):
        file.check_vocabulary((1 << 17) - 1, "all.safetensors")
    file.tokens[2] = -1
    with pytest.raises(ValueError, match="`tokens` of dialogue 0 has token -1"):
        file.check_vocabulary(1 << 17, "all.safetensors")


def test_a_full_disk_leaves_no_half_file(tmp_path, monkeypatch):
    def full(descriptor):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space left"):
        write_atomically(tmp_path / "report.json", b"{}")
    assert not list(tmp_path.iterdir())
