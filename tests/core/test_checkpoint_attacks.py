# Copyright 2026 The hf_falcon authors. Licensed under the Apache License, Version 2.0.
"""Files of a drafter's folder that are refused, in words that name the file, before they take time or memory."""

import json
import re
import shutil
import struct
import time
from pathlib import Path

import pytest
import torch
from hostile import safetensors_header
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from tiny_models import new_drafter, prompt, tiny_target
from transformers import AutoModel
from utilities import edit, peak_memory, start_peak

import hf_falcon
from hf_falcon import AutoDrafter, FalconDraftModel

IDS = "draft_vocab_ids"


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """Folders of drafters, by what is special of them; without digests, so that changed weights are read."""
    folder = tmp_path_factory.mktemp("saved")
    drafter = new_drafter(tiny_target("llama"), draft_vocab_size=40)
    drafter.save_pretrained(folder / "vocabulary")
    drafter.save_pretrained(folder / "shards", max_shard_size="20KB")
    for each in folder.iterdir():
        edit(each / "config.json", weights_sha256=None)
    return folder


@pytest.fixture
def copied(saved, tmp_path):
    return lambda name: Path(shutil.copytree(saved / name, tmp_path / name, dirs_exist_ok=True))


def rewrite(folder: Path, **changes) -> None:
    file = folder / "model.safetensors"
    save_file({**load_file(file), **changes}, file, metadata={"format": "pt"})


def refused(folder: Path, match: str, error=ValueError) -> None:
    for load in (FalconDraftModel, AutoModel, AutoDrafter):
        with pytest.raises(error, match=match):
            load.from_pretrained(folder)


# The draft vocabulary.


@pytest.mark.parametrize(
    "change",
    [
        lambda ids: ids.index_fill(0, ids.argmax(), 64),
        lambda ids: ids.index_fill(0, ids.argmax(), 2**62),
        lambda ids: ids.index_fill(0, ids.argmin(), -1),
        lambda ids: ids.flip(0).contiguous(),
        lambda ids: ids.index_fill(0, torch.tensor([1]), int(ids[0])),
        lambda ids: torch.zeros_like(ids),
    ],
    ids=["too large", "far too large", "negative", "descending", "twice", "one token"],
)
def test_draft_vocabulary_is_refused(copied, change):
    folder = copied("vocabulary")
    rewrite(folder, **{IDS: change(load_file(folder / "model.safetensors")[IDS])})
    refused(folder, r"`draft_vocab_ids` in `model\.safetensors` of .* no ascending ids of the target's 64 tokens")


@pytest.mark.parametrize("dtype", [torch.float32, torch.int32, torch.bool, torch.uint8])
def test_a_draft_vocabulary_of_another_dtype_is_refused(copied, dtype):
    folder = copied("vocabulary")
    rewrite(folder, **{IDS: load_file(folder / "model.safetensors")[IDS].to(dtype)})
    refused(folder, r"`draft_vocab_ids` in `model\.safetensors` of .* is \w+, not I64")


@given(st.lists(st.integers(-3, 70) | st.integers(-(2**63), 2**63 - 1), max_size=3), st.integers(0, 60))
@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_a_draft_vocabulary_works_or_is_refused(saved, tmp_path_factory, values, place):
    folder = tmp_path_factory.getbasetemp() / "vocabulary"
    shutil.copytree(saved / "vocabulary", folder, dirs_exist_ok=True)
    ids = load_file(folder / "model.safetensors")[IDS]
    new = torch.cat((ids[:place], torch.tensor(values, dtype=torch.long), ids[place + len(values) :]))[: len(ids)]
    rewrite(folder, **{IDS: new})
    is_valid = new.unique().equal(new) and 0 <= int(new[0]) and int(new[-1]) < 64
    try:
        drafter = FalconDraftModel.from_pretrained(folder)
    except ValueError as error:
        assert "`draft_vocab_ids`" in str(error) and not is_valid
    else:
        assert is_valid
        options = {"do_sample": False, "max_new_tokens": 6, "pad_token_id": 0}
        target = tiny_target("llama")
        output = target.generate(prompt(12), assistant_model=drafter, **options)
        assert output.tolist() == target.generate(prompt(12), **options).tolist()


@pytest.mark.parametrize("dtype", [torch.int8, torch.float8_e4m3fn, torch.int64, torch.bool])
def test_weights_of_another_dtype_are_refused(copied, dtype):
    folder = copied("vocabulary")
    rewrite(folder, **{"norm.weight": torch.ones(32, dtype=dtype)})
    refused(folder, r"`norm\.weight` in `model\.safetensors` of .*: quantised drafters cannot be read")


# Headers.


def test_headers_are_refused(copied):
    """Lengths that the file does not have, and a header that a parser would make gigabytes of."""
    folder = copied("vocabulary")
    file = folder / "model.safetensors"
    whole = file.read_bytes()
    before = start_peak()
    for size in (0, 2**24, 2**24 + 1, 99_000_000, 2**63, 2**64 - 1):
        file.write_bytes(struct.pack("<Q", size) + whole[8:])
        refused(folder, r"`model\.safetensors` .* not a whole safetensors file", OSError)
    # One that is there, in a file with a hole.
    with file.open("wb") as opened:
        opened.write(struct.pack("<Q", 99_000_000) + b'{"a":')
        opened.truncate(100_000_000)
    refused(folder, r"its header says that it has 99,000,000 bytes", OSError)
    assert peak_memory() - before < 2**27


@pytest.mark.parametrize(
    "change",
    [
        {"shape": [2**40, 2**40]},
        {"shape": [-1]},
        {"shape": [8], "data_offsets": [2**63, 2**63 + 32]},
        {"data_offsets": [0, 2**62]},
        {"data_offsets": [64, 0]},
        {"dtype": "X99"},
        {"shape": "8"},
    ],
    ids=str,
)
def test_tensors_outside_the_file_are_refused(copied, change):
    folder = copied("vocabulary")
    file = folder / "model.safetensors"
    header, data = safetensors_header(file.read_bytes())
    header["norm.weight"] |= change
    text = json.dumps(header).encode()
    file.write_bytes(struct.pack("<Q", len(text)) + text + data)
    before = start_peak()
    refused(folder, r"`model\.safetensors` .* not a whole safetensors file", OSError)
    assert peak_memory() - before < 2**27


def test_names_of_weights_do_not_reach_the_terminal_as_they_are(copied):
    """Hundreds of thousands of names, of any length and with any character, are a message that can be read."""
    folder = copied("vocabulary")
    more = {f"\x1b[2J\u202e{'x' * 300}{n}": torch.zeros(0) for n in range(2000)}
    rewrite(folder, **more)
    with pytest.raises(ValueError, match="unexpected keys: .* and 1,980 more") as found:
        FalconDraftModel.from_pretrained(folder)
    assert str(found.value).isprintable() and len(str(found.value)) < 10_000


# JSON files.

BROKEN = [b"", b"{", b"[]", b"5", b"null", b'{"a": NaN}', b"[" * 100_000, b"\xff", b" " * 5_000_000 + b"{}"]


@pytest.mark.parametrize("name", ["config.json", "generation_config.json", "model.safetensors.index.json"])
@pytest.mark.parametrize("content", BROKEN, ids=lambda content: repr(content[:12]))
def test_broken_files_are_refused(copied, name, content):
    """No default takes the place of what cannot be read."""
    folder = copied("shards" if "index" in name else "vocabulary")
    (folder / name).write_bytes(content)
    start = time.monotonic()
    loaders = [FalconDraftModel, AutoDrafter]
    # transformers reads `config.json` itself before it knows whose it is.
    for load in loaders if name == "config.json" else [*loaders, AutoModel]:
        with pytest.raises(ValueError, match=f"`{re.escape(name)}`"):
            load.from_pretrained(folder)
    assert time.monotonic() - start < 30


def test_broken_options_of_another_method_are_refused(copied):
    """A drafter by name, too."""
    folder = copied("vocabulary")
    (folder / "generation_config.json").write_bytes(b'{"num_assistant_tokens": 4')
    with pytest.raises(ValueError, match="`generation_config.json`"):
        tiny_target("llama").generate(prompt(5), assistant_model=str(folder), max_new_tokens=4)
    (folder / "config.json").write_bytes(b"[" * 100_000)
    with pytest.raises(ValueError, match="`config.json`"):
        tiny_target("llama").generate(prompt(5), assistant_model=str(folder), max_new_tokens=4)


@pytest.mark.parametrize(
    "changes",
    [
        {"metadata": None},
        {"metadata": [1]},
        {"metadata": {"dtype": "os.system"}},
        {"metadata": {"dtype": [1]}},
        {"weight_map": None},
        {"weight_map": {}},
        {"weight_map": ["model-00001-of-00002.safetensors"]},
        {"weight_map": {"a": 5}},
        {"weight_map": {"a": ["b.safetensors"]}},
        {"weight_map": {"a": "../model.safetensors"}},
        {"weight_map": {"a": "/etc/model.safetensors"}},
        {"weight_map": {"a": "a\\b.safetensors"}},
        {"weight_map": {"a": "\x1b[2J.safetensors"}},
        {"weight_map": {"a": "pytorch_model.bin"}},
    ],
    ids=str,
)
def test_an_index_is_refused(copied, changes):
    folder = copied("shards")
    edit(folder / "model.safetensors.index.json", **changes)
    refused(folder, r"`model\.safetensors\.index\.json` .* no index of safetensors files")


VALUES = st.recursive(
    st.none() | st.integers() | st.text(max_size=5) | st.sampled_from(["model-00001-of-00002.safetensors", "float16"]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5) | st.just("dtype"), inner),
    max_leaves=5,
)


@given(VALUES | st.dictionaries(st.sampled_from(["weight_map", "metadata", "x"]), VALUES), st.booleans())
@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_any_index_is_read_or_refused(saved, tmp_path_factory, value, keeps):
    folder = tmp_path_factory.getbasetemp() / "shards"
    shutil.copytree(saved / "shards", folder, dirs_exist_ok=True)
    file = folder / "model.safetensors.index.json"
    whole = json.loads(file.read_text())
    file.write_text(json.dumps({**whole, **value} if keeps and isinstance(value, dict) else value))
    try:
        FalconDraftModel.from_pretrained(folder, dtype="auto")
    except (ValueError, OSError) as error:
        assert "model.safetensors.index.json" in str(error) or "missing keys" in str(error)


@given(
    st.sampled_from(["norm.weight", IDS, "fusion.linear.weight"]),
    st.dictionaries(st.sampled_from(["dtype", "shape", "data_offsets"]), VALUES | st.lists(st.integers(), max_size=3)),
    st.none() | st.integers(0, 2**64 - 1) | st.integers(0, 3000),
)
@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_any_header_is_read_or_refused(saved, tmp_path_factory, name, changes, size):
    folder = tmp_path_factory.getbasetemp() / "headers"
    shutil.copytree(saved / "vocabulary", folder, dirs_exist_ok=True)
    file = folder / "model.safetensors"
    header, data = safetensors_header(file.read_bytes())
    header[name] = {**header.get(name, {}), **changes}
    text = json.dumps(header).encode()
    file.write_bytes(struct.pack("<Q", len(text) if size is None else size) + text + data)
    try:
        FalconDraftModel.from_pretrained(folder)
    except (ValueError, OSError) as error:
        assert str(error).isprintable() and len(str(error)) < 10_000


def test_an_index_without_metadata_is_refused(copied):
    folder = copied("shards")
    file = folder / "model.safetensors.index.json"
    file.write_text(json.dumps({"weight_map": json.loads(file.read_text())["weight_map"]}))
    refused(folder, r"`model\.safetensors\.index\.json` .* and `metadata`")


def test_no_other_configuration_is_followed(copied):
    """transformers would read the file that this field names in place of config.json."""
    folder = copied("vocabulary")
    (folder / "config.4.0.0.json").write_text((folder / "config.json").read_text())
    edit(folder / "config.json", configuration_files=["config.4.0.0.json"])
    for load in (FalconDraftModel, AutoDrafter):
        with pytest.raises(ValueError, match="`configuration_files`"):
            load.from_pretrained(folder)


# What is beside the files.


@pytest.mark.parametrize("content", [b"{}", b'{"base_model_name_or_path": "../vocabulary"}'])
def test_an_adapter_beside_shards_is_refused(copied, monkeypatch, content):
    for module in ("models.auto.auto_factory", "integrations.peft"):
        monkeypatch.setattr(f"transformers.{module}.is_peft_available", lambda: True)
    monkeypatch.setattr(hf_falcon.drafters.files, "is_peft_available", lambda: True)
    folder = copied("shards")
    (folder / "adapter_config.json").write_bytes(content)
    refused(folder, "`adapter_config.json`: a drafter takes no adapter")


def test_tokenizer_files_and_templates_are_not_read(copied):
    """A drafter has the target's tokens: whatever is in such files, nothing reads them."""
    folder = copied("vocabulary")
    names = ["tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json", "vocab.json"]
    for name in [*names, "merges.txt", "tokenizer.model", "chat_template.jinja", "chat_template.json"]:
        (folder / name).write_bytes(b"{" * 1000 + b"{% for i in range(10**9) %}")
    (folder / "additional_chat_templates").mkdir()
    (folder / "additional_chat_templates" / "x.jinja").symlink_to("/dev/zero")
    target, options = tiny_target("llama"), {"do_sample": False, "max_new_tokens": 6, "pad_token_id": 0}
    expected = target.generate(prompt(12), **options).tolist()
    for drafter in (FalconDraftModel.from_pretrained(folder), AutoModel.from_pretrained(folder), str(folder)):
        assert target.generate(prompt(12), assistant_model=drafter, **options).tolist() == expected
