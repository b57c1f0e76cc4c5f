# Copyright 2026 The hf_falcon authors. Licensed under the Apache License, Version 2.0.
"""Hostile and damaged drafters: a clear error or a working model, never a crash, a hang or an execution."""

import json
import pickle
import random
import shutil
import time
import traceback
from pathlib import Path

import pytest
import torch
import transformers
from hostile import HUGE, Bomb, fuzzed_json, fuzzed_weights
from tiny_models import prompt, tiny_drafter, tiny_target
from transformers import AutoModel
from utilities import edit, peak_memory, start_peak

import hf_falcon
from hf_falcon import DraftOptions, FalconDraftConfig, FalconDraftModel

# What may come out of a file that nobody can read: an error of these, with a text that says what is wrong.
ERRORS = (ValueError, OSError)


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """A drafter's folder; tests work on copies."""
    folder = tmp_path_factory.mktemp("saved") / "drafter"
    tiny_drafter(tiny_target("llama"), num_assistant_tokens=9, draft_tree="dynamic").save_pretrained(folder)
    return folder


@pytest.fixture
def drafter_folder(saved, tmp_path):
    return Path(shutil.copytree(saved, tmp_path / "drafter"))


@pytest.mark.parametrize(
    "field, value",
    [
        ("vocab_size", HUGE),
        ("hidden_size", HUGE),
        ("hidden_size", "32"),
        ("intermediate_size", 2**60),
        ("num_attention_heads", -4),
        ("num_key_value_heads", 0),
        ("head_dim", HUGE),
        ("block_size", -2),
        ("block_size", HUGE),
        ("num_hidden_layers", HUGE),
        ("num_lstm_layers", HUGE),
        ("conditioning_size", HUGE),
        ("draft_vocab_size", HUGE),
        ("draft_vocab_size", "8"),
        ("feature_layers", 5),
        ("feature_layers", list(range(100_000))),
        ("feature_layers", [[0]]),
        ("block_anchor", "yes"),
        ("attention_bias", 1),
        ("use_qk_norm", None),
        ("use_post_norms", "no"),
        ("hidden_act", "os.system"),
        ("hidden_act", ["silu"]),
        ("rms_norm_eps", float("nan")),
        ("rope_theta", -1.0),
        ("rope_theta", True),
        ("logit_scale", float("inf")),
        ("logit_softcapping", 0),
        ("initializer_range", None),
        ("target_fingerprint", {"a": 1}),
        ("target_embedding_fingerprint", ["a"]),
        ("weights_sha256", {"../../somewhere/model.safetensors": "0"}),
        ("weights_sha256", {"model.bin": "0"}),
        ("weights_sha256", [1]),
        ("model_type", "llama"),
        ("transformers_weights", "../elsewhere.safetensors"),
        ("quantization_config", {"quant_method": "bitsandbytes"}),
        ("fusion_config", {"a": True}),
        ("attn_implementation", "somebody/kernel"),
        ("save_pretrained", "a text in a method's place"),
        ("__class__", "int"),
    ],
)
def test_config_is_refused(drafter_folder, field, value):
    edit(drafter_folder / "config.json", **{field: value})
    before, start = start_peak(), time.monotonic()
    for load in (FalconDraftConfig.from_pretrained, FalconDraftModel.from_pretrained):
        # The clear error names the field.
        with pytest.raises(ValueError, match=f"`{field}`"):
            load(drafter_folder)
    assert peak_memory() - before < 2**28 and time.monotonic() - start < 60


def test_a_config_that_asks_for_more_than_the_file_holds(drafter_folder):
    """Sizes that a real model has, but not this file: refused before they are memory."""
    edit(drafter_folder / "config.json", hidden_size=2**15, intermediate_size=2**17, num_hidden_layers=200)
    before = start_peak()
    with pytest.raises(ValueError, match="missing keys"):
        FalconDraftModel.from_pretrained(drafter_folder)
    edit(drafter_folder / "config.json", num_hidden_layers=1)
    with pytest.raises(ValueError, match="mismatched keys"):
        FalconDraftModel.from_pretrained(drafter_folder)
    assert peak_memory() - before < 2**28


@pytest.mark.parametrize(
    "changes",
    [
        {"num_assistant_tokens": HUGE},
        {"num_assistant_tokens": HUGE, "draft_tree": "static"},
        {"num_draft_passes": HUGE},
        {"draft_top_k": HUGE},
        {"draft_width": HUGE},
        {"draft_width": -1},
        {"draft_tree": 5},
        {"draft_tree": {"a": 1}},
        {"draft_tree": [0]},
        {"draft_tree": [[0]] * 100_000},
        {"draft_tree": [[0] * 5000]},
        {"assistant_confidence_threshold": "0.1"},
        {"prompt_lookup_num_tokens": HUGE},
        {"prompt_lookup_num_tokens": -1},
        {"context_bonuses": 0.5},
        {"context_bonuses": [-1.0]},
        {"context_bonuses": [float("nan")]},
        {"context_bonuses": [HUGE]},
        {"context_bonuses": [1.0] * 2000},
        {"draft_calibration": 0.5},
        {"draft_calibration": [1.0, 0.0]},
        {"draft_calibration": [float("nan")]},
        {"draft_calibration": ["1"]},
        {"draft_calibration": [1.0] * 2000},
        {"num_assistant_tokens_schedule": ["constant"]},
    ],
)
def test_drafting_options_are_refused(drafter_folder, changes):
    with pytest.raises(ValueError, match=f"`{list(changes)[-1]}`|`num_assistant_tokens`"):
        DraftOptions(**changes)
    # With the drafter already, not when it is first used.
    edit(drafter_folder / "generation_config.json", **changes)
    with pytest.raises(ValueError):
        FalconDraftModel.from_pretrained(drafter_folder)


def test_damaged_weights_are_refused_by_name(drafter_folder):
    file = drafter_folder / "model.safetensors"
    whole = file.read_bytes()
    for damaged in (whole[: len(whole) // 2], whole[:-1], b"", whole[:-1] + bytes([whole[-1] ^ 1])):
        file.write_bytes(damaged)
        with pytest.raises(OSError, match="`model.safetensors` .* damaged or was changed"):
            FalconDraftModel.from_pretrained(drafter_folder)
    # Checkpoints of before digests were kept: what is not whole is still refused by name.
    edit(drafter_folder / "config.json", weights_sha256=None)
    for damaged in (whole[: len(whole) // 2], whole[:-1], b""):
        file.write_bytes(damaged)
        with pytest.raises(OSError, match="`model.safetensors` .* not a whole safetensors file"):
            FalconDraftModel.from_pretrained(drafter_folder)


def test_an_index_may_not_leave_the_folder(drafter_folder):
    (drafter_folder / "model.safetensors").rename(drafter_folder.parent / "model.safetensors")
    index = drafter_folder / "model.safetensors.index.json"
    for text in ('{"metadata": {}, "weight_map": {"a": "../model.safetensors"}}', '{"weight_map": 5}', "[]", "{}"):
        index.write_text(text)
        with pytest.raises(ValueError, match=r"`model.safetensors.index.json` .* no index of safetensors files"):
            FalconDraftModel.from_pretrained(drafter_folder)
    index.write_text('{"metadata": {}, "weight_map": {"a": "not-there.safetensors"}}')
    with pytest.raises(OSError, match="not-there.safetensors"):
        FalconDraftModel.from_pretrained(drafter_folder)


@pytest.mark.parametrize("name", ["pytorch_model.bin", "model.safetensors"])
def test_no_pickle_is_read(drafter_folder, name):
    (drafter_folder / "model.safetensors").unlink()
    edit(drafter_folder / "config.json", weights_sha256=None)
    (drafter_folder / name).write_bytes(pickle.dumps(Bomb()))
    with pytest.raises(OSError, match=r"model\.safetensors"):
        FalconDraftModel.from_pretrained(drafter_folder)
    with pytest.raises(OSError, match=r"model\.safetensors"):
        FalconDraftModel.from_pretrained(drafter_folder, use_safetensors=False)


@pytest.fixture
def peft(monkeypatch):
    """As where peft is installed: transformers then looks for adapters, and follows them."""
    for module in (
        transformers.models.auto.auto_factory,
        transformers.integrations.peft,
        hf_falcon.drafters.files,
    ):
        monkeypatch.setattr(module, "is_peft_available", lambda: True)


@pytest.mark.parametrize("auto_class", [FalconDraftModel, AutoModel])
def test_no_adapter_is_followed(saved, drafter_folder, tmp_path, peft, auto_class):
    """An adapter names another model, whose weights would be loaded in place of those that were looked at."""
    adapter = {"peft_type": "LORA", "base_model_name_or_path": str(saved)}
    (drafter_folder / "adapter_config.json").write_text(json.dumps(adapter))
    (drafter_folder / "adapter_model.bin").write_bytes(pickle.dumps(Bomb()))
    with pytest.raises(ValueError, match="`adapter_config.json`: a drafter takes no adapter"):
        auto_class.from_pretrained(drafter_folder)
    # `AutoModel` follows an adapter that stands alone before it knows what for.
    (drafter_folder / "config.json").unlink()
    with pytest.raises(ValueError, match="takes no adapter"):
        auto_class.from_pretrained(drafter_folder)


def test_files_that_a_drafter_does_not_need_are_not_read(drafter_folder):
    """Nothing of them runs, and the drafter loads as without them."""
    add_strangers(random.Random(0), drafter_folder, STRANGERS)
    target, ids = tiny_target("llama"), prompt(12)
    expected = target.generate(ids, do_sample=False, max_new_tokens=8, pad_token_id=0).tolist()
    assert outcome(drafter_folder, target, ids, expected, FalconDraftModel) == "works"
    assert outcome(drafter_folder, target, ids, expected, AutoModel) == "works"


# Fuzzing.

# Files that others put into such a folder: each is there whole, damaged, or hostile.
ADAPTER = json.dumps({"peft_type": "LORA", "base_model_name_or_path": "../elsewhere", "auto_mapping": None})
TOKENIZER = json.dumps({"tokenizer_class": "PreTrainedTokenizerFast", "auto_map": {"AutoTokenizer": ["x.Y", None]}})
CODE = b"import pytest\npytest.fail('code was run')\n"
STRANGERS = [
    "adapter_config.json",
    "adapter_model.bin",
    "tokenizer.json",
    "tokenizer_config.json",
    "pytorch_model.bin",
]
STRANGERS += ["modeling_falcon_draft.py", "configuration_falcon_draft.py", "custom_generate/generate.py"]


def add_strangers(rng: random.Random, folder: Path, names: list[str]) -> None:
    """Writes files of `STRANGERS` into a drafter's folder."""
    for name in names:
        file = folder / name
        file.parent.mkdir(exist_ok=True)
        if file.suffix == ".json":
            file.write_bytes(fuzzed_json(rng, ADAPTER if name.startswith("adapter") else TOKENIZER))
        else:
            file.write_bytes(CODE if file.suffix == ".py" else pickle.dumps(Bomb()))


def outcome(folder: Path, target, ids, expected, auto_class=FalconDraftModel) -> str:
    """Loads and drafts: the name of the error, or "works"."""
    try:
        trust = {"trust_remote_code": False} if auto_class is AutoModel else {}
        drafter = auto_class.from_pretrained(folder, dtype=torch.float32, **trust)
        output = target.generate(ids, assistant_model=drafter, do_sample=False, max_new_tokens=8, pad_token_id=0)
    except ERRORS as error:
        assert str(error), repr(error)
        return type(error).__name__
    except Exception as error:
        # transformers' own, before it knows whose configuration it reads.
        files = [frame.filename for frame in traceback.extract_tb(error.__traceback__)]
        # The package's folder, and not its name: a clone's environment may be in a folder of that name.
        package = Path(hf_falcon.__file__).parent
        if auto_class is AutoModel and not any(package in Path(file).parents for file in files):
            return "AutoModel's own"
        raise
    assert output.tolist() == expected
    return "works"


def fuzz(saved: Path, folder: Path, seed: int, count: int) -> dict[str, int]:
    """Tries `count` mutated drafters; each must be an error of `ERRORS`, or draft what plain decoding gives."""
    rng = random.Random(seed)
    target, ids = tiny_target("llama"), prompt(12)
    expected = target.generate(ids, do_sample=False, max_new_tokens=8, pad_token_id=0).tolist()
    originals = {name: (saved / name).read_bytes() for name in ("config.json", "generation_config.json")}
    # As a file of before digests were kept: a changed one goes on to be read.
    config = {**json.loads(originals["config.json"]), "weights_sha256": None}
    originals["config.json"] = json.dumps(config).encode()
    originals["model.safetensors"] = (saved / "model.safetensors").read_bytes()
    folder.mkdir()
    found: dict[str, int] = {}
    before = start_peak()
    for number in range(count):
        for name, data in originals.items():
            (folder / name).write_bytes(data)
        for name in STRANGERS:
            (folder / name).unlink(missing_ok=True)
        add_strangers(rng, folder, rng.sample(STRANGERS, rng.choice([0, 0, 1, 3])))
        auto_class = rng.choice([FalconDraftModel, AutoModel])
        name = rng.choice(["config.json", "config.json", "generation_config.json", "model.safetensors"])
        mutate = fuzzed_weights if name == "model.safetensors" else fuzzed_json
        original = originals[name] if name == "model.safetensors" else originals[name].decode()
        mutated = mutate(rng, original)
        (folder / name).write_bytes(mutated)
        start = time.monotonic()
        try:
            result = outcome(folder, target, ids, expected, auto_class)
        except BaseException as error:
            told = f"seed {seed}, input {number}, {auto_class.__name__}: {name} {mutated[:3000]!r}"
            raise AssertionError(told) from error
        assert time.monotonic() - start < 60 and peak_memory() - before < 2**30, (seed, number)
        found[result] = found.get(result, 0) + 1
    return found


def test_fuzz(saved, tmp_path):
    found = fuzz(saved, tmp_path / "fuzzed", seed=0, count=200)
    # The mutations reach both ends.
    assert found["works"] >= 10 and found["ValueError"] >= 10 and found["OSError"] >= 10


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(1, 11))
def test_fuzz_at_length(saved, tmp_path, seed, request):
    if seed % 2:
        request.getfixturevalue("peft")
    found = fuzz(saved, tmp_path / "fuzzed", seed=seed, count=1000)
    assert found["works"] >= 50
