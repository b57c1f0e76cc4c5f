# Copyright 2026 The hf_falcon authors. Licensed under the Apache License, Version 2.0.
"""EAGLE-3 checkpoints: both layouts, what is saved, and files that are damaged, hostile or of another drafter."""

import hashlib
import json
import pickle
import random
import shutil
import time
import zipfile
from pathlib import Path

import pytest
import torch
from eagle3_models import CASES, REFERENCES, new_eagle3, write_original
from hostile import HUGE, fuzzed_json, fuzzed_weights
from safetensors.torch import load_file, save_file
from tiny_models import prompt, tiny_target
from transformers import GenerationConfig
from utilities import edit, peak_memory, start_peak

import hf_falcon
from hf_falcon import AutoDrafter
from hf_falcon.drafters.eagle3 import Eagle3DraftModel
from hf_falcon.drafters.eagle3_config import Eagle3DraftConfig, default_layers

OPTIONS = {"num_assistant_tokens": 9, "draft_top_k": 3, "verification": "speculative"}
ORIGINALS = [case for case in CASES if case.startswith("eagle3_original")]


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """Folders of one drafter in both layouts, with drafting options; tests work on copies."""
    folder = tmp_path_factory.mktemp("saved")
    drafter = new_eagle3(tiny_target(), draft_vocab_size=40, num_attention_heads=4)
    for name, value in OPTIONS.items():
        setattr(drafter.generation_config, name, value)
    drafter.save_pretrained(folder / "speculators")
    write_original(drafter, folder / "original")
    write_original(drafter, folder / "binary", binary=True)
    return folder


@pytest.fixture
def copied(saved, tmp_path):
    """A function that copies one of these folders."""
    return lambda name: Path(shutil.copytree(saved / name, tmp_path / name))


def load(folder: Path, **kwargs) -> Eagle3DraftModel:
    return AutoDrafter.from_pretrained(folder, **kwargs)


def refused(folder: Path, match: str, error: type[Exception] = ValueError, **kwargs) -> None:
    """Within bounds of memory and time."""
    before, start = start_peak(), time.monotonic()
    with pytest.raises(error, match=match):
        load(folder, **kwargs)
    assert peak_memory() - before < 2**28 and time.monotonic() - start < 60


# Layouts.


def test_layouts_are_the_same_drafter(saved):
    drafters = [load(saved / name) for name in ("speculators", "original", "binary")]
    first = drafters[0]
    for other in drafters[1:]:
        assert other.state_dict().keys() == first.state_dict().keys()
        assert all(torch.equal(tensor, other.state_dict()[name]) for name, tensor in first.state_dict().items())
        layer, expected = (each.config.transformer_layer_config.to_dict() for each in (other, first))
        assert {name: layer[name] for name in ("hidden_size", "rope_parameters", "head_dim")} == {
            name: expected[name] for name in ("hidden_size", "rope_parameters", "head_dim")
        }
        for name in ("draft_vocab_size", "eagle_aux_hidden_state_layer_ids", "target_hidden_size", "norm_output"):
            assert getattr(other.config, name) == getattr(first.config, name)
    # The original layout names no target.
    assert first.config.target_architectures == ["LlamaForCausalLM"] and first.config.target_fingerprint
    assert drafters[1].config.target_architectures == [] and drafters[1].config.target_name_or_path is None


def test_names_are_those_of_the_package(saved):
    """Of weights and fields: what the package's own files have, and what the drafter was trained for beside it."""
    config = json.loads((saved / "speculators" / "config.json").read_text())
    reference = json.loads((REFERENCES / "eagle3_llama" / "config.json").read_text())
    assert reference.keys() - config.keys() == {"auto_map", "embed_requires_grad", "transformers_version"}
    assert config.keys() - reference.keys() == {"dtype", "target_fingerprint", "tie_word_embeddings"}
    assert config["speculators_config"].keys() == reference["speculators_config"].keys()
    layer, expected = (each["transformer_layer_config"] for each in (config, reference))
    assert {"hidden_size", "num_attention_heads", "rope_parameters", "model_type", "vocab_size"} <= layer.keys()
    assert layer.keys() - expected.keys() <= {"dtype", "transformers_version"}
    weights = load_file(REFERENCES / "eagle3_llama" / "model.safetensors")
    assert load_file(saved / "speculators" / "model.safetensors").keys() == weights.keys() - {"embed_tokens.weight"}


@pytest.mark.parametrize(
    "ids, expected",
    [([1, 3, 4], [2, 4, 5]), ([2, 4, 5], [2, 4, 5]), ([1, 46, 90], [2, 47, 91]), ([], None), (None, None)],
)
@pytest.mark.parametrize("nested", [True, False])
def test_both_conventions_of_layer_ids(copied, nested, ids, expected):
    """Numbers of layers whose output is read begin with 1, and hidden states with 2."""
    folder = copied("original")
    weights = load_file(folder / "model.safetensors")
    # A drafter of three hidden states.
    weights["fc.weight"] = weights["fc.weight"].repeat(1, 2)[:, :96].contiguous()
    save_file(weights, folder / "model.safetensors")
    if nested:
        edit(folder / "config.json", eagle_config={"eagle_aux_hidden_state_layer_ids": ids})
    else:
        edit(folder / "config.json", eagle_config={}, eagle_aux_hidden_state_layer_ids=ids)
    found = load(folder).config
    assert found.eagle_aux_hidden_state_layer_ids == expected
    assert expected is None or found.feature_layers == [number - 1 for number in expected]
    # What the file says may be wrong.
    assert load(folder, layer_ids=[3, 4, 7]).config.eagle_aux_hidden_state_layer_ids == [3, 4, 7]


@pytest.mark.parametrize("layers, expected", [(32, [2, 16, 29]), (28, [2, 14, 25]), (8, [2, 4, 5]), (2, [1, 2])])
def test_default_layers(layers, expected):
    assert default_layers(layers) == expected


def test_flags_of_an_original_layout(tmp_path):
    """Also under the older name of one."""
    drafter = new_eagle3(tiny_target(), fc_norm=True, norm_before_residual=True, norm_output=True)
    found = load(write_original(drafter, tmp_path / "new"))
    assert found.config.fc_norm and found.config.norm_before_residual and found.config.norm_output
    assert load(write_original(drafter, tmp_path / "old", fc_norm=None, use_aux_norm=True)).config.fc_norm


def test_qwen3_layers_show_in_the_weights(tmp_path):
    """Whatever type an original configuration names: drafters name the type of their target."""
    drafter = new_eagle3(tiny_target("qwen3"), model_type="qwen3")
    for kind in ("qwen3", "llama"):
        found = load(write_original(drafter, tmp_path / kind, model_type=kind))
        assert found.config.transformer_layer_config.model_type == "qwen3" and found.layers[0].self_attn.q_norm


def test_names_with_a_prefix_and_copies_of_the_target(copied):
    folder = copied("original")
    weights = {f"model.{name}": tensor for name, tensor in load_file(folder / "model.safetensors").items()}
    weights |= {"rotary_emb.inv_freq": torch.ones(4), "verifier_norm.weight": torch.ones(32)}
    save_file(weights, folder / "model.safetensors")
    assert torch.equal(load(folder).fc.weight, weights["model.fc.weight"])


def test_several_files(copied):
    """As large drafters are published."""
    drafter = load(copied("speculators"))
    folder = Path(drafter.name_or_path)
    for file in folder.iterdir():
        file.unlink()
    drafter.save_pretrained(folder, max_shard_size="20KB")
    assert len(list(folder.glob("model-*.safetensors"))) > 1
    assert all(torch.equal(each, load(folder).state_dict()[name]) for name, each in drafter.state_dict().items())


# Saving.


@pytest.mark.parametrize("case", CASES)
def test_round_trip(case, tmp_path):
    """A reference is saved in the layout of the package, and is the same drafter then."""
    drafter = load(REFERENCES / case)
    for name, value in OPTIONS.items():
        setattr(drafter.generation_config, name, value)
    drafter.save_pretrained(tmp_path)
    found = load(tmp_path)
    assert found.state_dict().keys() == drafter.state_dict().keys()
    for name, tensor in drafter.state_dict().items():
        assert torch.equal(tensor, found.state_dict()[name]) and tensor.dtype == found.state_dict()[name].dtype
    for name in ("name_or_path", "transformers_version", "_commit_hash"):
        drafter.config.__dict__.pop(name, None), found.config.__dict__.pop(name, None)
    assert found.config.to_dict() == {**drafter.config.to_dict(), "dtype": "float32"}
    assert {name: getattr(found.generation_config, name) for name in OPTIONS} == OPTIONS


def test_options_are_read_with_the_drafter(saved):
    options = load(saved / "speculators").generation_config
    assert {name: getattr(options, name) for name in OPTIONS} == OPTIONS
    # An original layout may have a file of the target there.
    other = load(saved / "original").generation_config
    assert getattr(other, "draft_top_k", None) is None


def test_a_targets_generation_config_is_no_option(copied):
    folder = copied("original")
    GenerationConfig(do_sample=True, temperature=0.6, top_p=0.9, eos_token_id=[3]).save_pretrained(folder)
    target, ids = tiny_target(), prompt(9)
    settings = {"max_new_tokens": 12, "pad_token_id": 0}
    assert target.generate(ids, assistant_model=load(folder), **settings).tolist() == (
        target.generate(ids, **settings).tolist()
    )


@pytest.mark.parametrize("dtype", [None, "auto", "bfloat16", torch.float16, "float64", "torch.bfloat16"])
def test_dtypes(saved, dtype):
    found = load(saved / "original", dtype=dtype)
    expected = torch.float32 if dtype in (None, "auto") else getattr(torch, str(dtype).removeprefix("torch."))
    assert {each.dtype for each in found.parameters()} == {expected} and found.dtype == expected
    assert all(each.requires_grad for each in found.parameters())


@pytest.mark.parametrize("dtype", ["float99", "int8", "float8_e4m3fn", torch.int64, 5])
def test_other_dtypes(saved, dtype):
    with pytest.raises(ValueError, match="`dtype` is .*: give one of float32, bfloat16"):
        load(saved / "original", dtype=dtype)


# Refusals.


def change(folder: Path, changes: dict) -> None:
    """Changes fields: of `transformer_layer_config` with a dot before the name, and everywhere with their layout."""
    config = json.loads((folder / "config.json").read_text())
    for name, value in changes.items():
        inner = config.get("transformer_layer_config", config) if name.startswith(".") else config
        inner[name.lstrip(".")] = value
    (folder / "config.json").write_text(json.dumps(config))


@pytest.mark.parametrize(
    "field, value",
    [
        (".vocab_size", HUGE),
        (".vocab_size", "64"),
        (".hidden_size", HUGE),
        (".intermediate_size", 2**60),
        (".num_attention_heads", -4),
        (".num_attention_heads", 0),
        (".num_key_value_heads", 3),
        (".num_key_value_heads", 0),
        (".head_dim", HUGE),
        (".head_dim", 7),
        (".num_hidden_layers", HUGE),
        (".num_hidden_layers", True),
        (".max_position_embeddings", -1),
        (".hidden_act", "os.system"),
        (".rms_norm_eps", 0.0),
        (".rms_norm_eps", float("nan")),
        (".layer_types", ["chunked_attention"]),
        (".layer_types", ["full_attention"] * 5),
        (".sliding_window", 0),
        (".model_type", "mamba"),
        (".model_type", ["llama"]),
        (".rope_parameters", {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}),
        (".rope_parameters", {"rope_type": "longrope", "rope_theta": 1e4, "factor": 2.0}),
        (".rope_parameters", {"rope_type": "default", "rope_theta": -1.0}),
        (".rope_parameters", {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5}),
        (".rope_parameters", {"rope_type": "linear", "rope_theta": 1e4, "factor": "x"}),
        ("transformer_layer_config", None),
        ("transformer_layer_config", [1]),
        ("draft_vocab_size", HUGE),
        ("draft_vocab_size", 0),
        ("draft_vocab_size", "40"),
        ("target_hidden_size", -1),
        ("target_hidden_size", HUGE),
        ("eagle_aux_hidden_state_layer_ids", [1, 1]),
        ("eagle_aux_hidden_state_layer_ids", [-1, 2]),
        ("eagle_aux_hidden_state_layer_ids", ["a", 2]),
        ("eagle_aux_hidden_state_layer_ids", list(range(100_000))),
        ("eagle_aux_hidden_state_layer_ids", 5),
        ("norm_before_residual", "yes"),
        ("norm_before_fc", 1),
        ("fc_norm", None),
        ("norm_output", [True]),
        ("speculators_config", [1]),
        ("speculators_config", {"verifier": 3}),
        ("speculators_config", {"verifier": {"architectures": "Llama"}}),
        ("speculators_config", {"verifier": {"name_or_path": 1}}),
        ("target_fingerprint", {"a": 1}),
        ("speculators_model_type", "medusa"),
    ],
)
def test_config_is_refused(copied, field, value):
    folder = copied("speculators")
    change(folder, {field: value})
    refused(folder, f"[`.]{field.lstrip('.')}`|{value!r}" if field == "speculators_model_type" else field.lstrip("."))


@pytest.mark.parametrize(
    "changes, match",
    [
        ({"vocab_size": HUGE, "draft_vocab_size": HUGE}, "draft_vocab_size"),
        ({"hidden_size": 2**17, "intermediate_size": 2**20}, "mismatched keys"),
        ({"num_attention_heads": "x"}, "num_attention_heads"),
        ({"rope_scaling": {"type": "dynamic", "factor": 2.0}}, "dynamic"),
        ({"rope_scaling": {"rope_type": "longrope"}}, "rope|cannot be read"),
        ({"rope_scaling": 5}, "cannot be read"),
        ({"rope_theta": "x"}, "rope|cannot be read"),
        ({"eagle_config": {"use_aux_hidden_state": False}}, "`eagle_config.use_aux_hidden_state` is False"),
        ({"eagle_config": {"eagle_aux_hidden_state_layer_ids": [1, None]}}, "eagle_aux|cannot be read"),
        ({"target_hidden_size": 48}, "mismatched keys.*fc.weight"),
        ({"draft_vocab_size": None}, "mismatched keys|unexpected keys"),
        (
            {"architectures": ["LlamaForCausalLM"], "draft_vocab_size": 40, "model_type": "gpt2"},
            "no drafter of a known",
        ),
    ],
)
def test_original_config_is_refused(copied, changes, match):
    folder = copied("original")
    edit(folder / "config.json", **changes)
    refused(folder, match)


def test_fields_in_the_place_of_methods_are_left_out(copied):
    folder = copied("speculators")
    names = ("save_pretrained", "to_dict", "get_text_config", "__class__", "_attn_implementation", "to_diff_dict")
    hostile = {name: "a text in a method's place" for name in names}
    change(folder, {**hostile, **{f".{name}": value for name, value in hostile.items()}, "quantization_config": {}})
    drafter = load(folder)
    drafter.save_pretrained(folder)
    assert callable(drafter.config.transformer_layer_config.to_dict) and callable(drafter.config.save_pretrained)


def test_hidden_states_that_cannot_be_told_apart():
    fields = {"transformer_layer_config": {"model_type": "llama", "hidden_size": 64, "num_attention_heads": 4}}
    with pytest.raises(ValueError, match="`hidden_size` is 64, as wide as 4 hidden states"):
        Eagle3DraftConfig(**fields, target_hidden_size=16)
    with pytest.raises(ValueError, match="`norm_before_fc` and `fc_norm` are both True"):
        Eagle3DraftConfig(**fields, norm_before_fc=True, fc_norm=True)


def test_sizes_that_the_file_does_not_have(copied):
    """Refused before they are memory."""
    folder = copied("speculators")
    change(folder, {".hidden_size": 2**15, ".intermediate_size": 2**20, ".num_hidden_layers": 250, ".head_dim": 128})
    refused(folder, "missing keys")
    change(folder, {".num_hidden_layers": 1})
    refused(folder, "mismatched keys")


def rewrite(folder: Path, change) -> None:
    """Changes the weights of a folder."""
    weights = load_file(folder / "model.safetensors")
    change(weights)
    save_file({name: each.contiguous() for name, each in weights.items()}, folder / "model.safetensors")


@pytest.mark.parametrize("name", ["speculators", "original"])
@pytest.mark.parametrize(
    "change, match",
    [
        (lambda w: w.pop("fc.weight"), r"missing keys: \['fc.weight'\]"),
        (lambda w: w.update({"fc.bias": torch.ones(32)}), r"unexpected keys: \['fc.bias'\]"),
        (
            lambda w: w.update({"fc.weight": torch.ones(32, 9)}),
            r"mismatched keys: .*'fc.weight', \(32, 9\), \(32, 64\)",
        ),
        (lambda w: w.update({"norm.weight": torch.ones(32, dtype=torch.int8)}), "`norm.weight` .* is torch.int8"),
        (lambda w: w.update({"fc.weight": w["fc.weight"].to(torch.float8_e4m3fn)}), "`fc.weight` .* is torch.float8"),
        (lambda w: w.pop("d2t"), "missing keys: .*'d2t'"),
        (lambda w: w["d2t"].__setitem__(3, 100), "`d2t` .* twice, or outside the target's vocabulary of 64"),
        (lambda w: w["d2t"].__setitem__(0, -1), "`d2t` .* twice, or outside"),
        (lambda w: w["d2t"].__setitem__(1, w["d2t"][0] - 1), "`d2t` .* twice, or outside"),
        (lambda w: w.update(d2t=w["d2t"][:, None]), r"`d2t` .* has shape \(40, 1\)"),
        (lambda w: w.update(d2t=w["d2t"].float()), "`d2t` .* dtype torch.float32"),
        (lambda w: w.update(d2t=torch.zeros(0, dtype=torch.long)), "`d2t`"),
        (lambda w: w.update(d2t=w["d2t"][:9]), "`d2t` and `t2d` .* name different tokens"),
        (lambda w: w.update(t2d=~w["t2d"]), "`d2t` and `t2d` .* name different tokens"),
        (lambda w: w.update(t2d=w["t2d"][:50]), "draft_vocab_size|`d2t`"),
        (lambda w: w.update({"layers.5.mlp.up_proj.weight": torch.ones(2, 2)}), "keys: .*layers.*mlp.up_proj.weight"),
    ],
)
def test_weights_are_refused_by_name(copied, name, change, match):
    folder = copied(name)
    rewrite(folder, change)
    refused(folder, match)


def test_a_table_that_would_fill_the_memory(copied):
    """A column, to which a row of places is added, would be a square."""
    folder = copied("original")
    rewrite(folder, lambda weights: weights.update(d2t=torch.zeros(300_000, 1, dtype=torch.int32)))
    refused(folder, "`d2t` .* has shape")


def test_a_missing_table_is_made_from_the_other(copied):
    folder = copied("original")
    expected = load(folder)
    rewrite(folder, lambda weights: weights.pop("t2d"))
    assert torch.equal(load(folder).t2d, expected.t2d) and torch.equal(load(folder).d2t, expected.d2t)


def test_tables_of_a_whole_vocabulary_are_left_out(copied):
    folder = copied("original")
    whole = {"lm_head.weight": torch.ones(64, 32), "d2t": torch.zeros(64).long(), "t2d": torch.ones(64).bool()}
    rewrite(folder, lambda weights: weights.update(whole))
    edit(folder / "config.json", draft_vocab_size=64)
    assert load(folder).d2t is None and load(folder).draft_vocab_ids is None


@pytest.mark.parametrize("name", ["speculators", "original"])
def test_damaged_weights_are_refused_by_name(copied, name):
    file = copied(name) / "model.safetensors"
    whole = file.read_bytes()
    for damaged in (whole[: len(whole) // 2], whole[:-1], b"", b"\0" * 100):
        file.write_bytes(damaged)
        refused(file.parent, "`model.safetensors` .* is not a whole safetensors file", OSError)
    file.unlink()
    refused(file.parent, "no `model.safetensors`", OSError)


def test_a_damaged_pickle_is_refused_by_name(copied):
    file = copied("binary") / "pytorch_model.bin"
    whole = file.read_bytes()
    for damaged in (whole[: len(whole) // 2], whole[:-30], b"", b"\0" * 100, b"PK\x03\x04" + b"\0" * 100):
        file.write_bytes(damaged)
        refused(file.parent, "`pytorch_model.bin` .* cannot be read .* Convert it to safetensors")


class Writer:
    """Unpickling it writes a file."""

    def __init__(self, file: Path):
        self.file = file

    def __reduce__(self):
        return Path.write_text, (self.file, "a pickle was run")


@pytest.mark.parametrize("kind", ["plain", "beside tensors", "torch.save", "old torch.save"])
def test_no_code_of_a_pickle_is_run(copied, tmp_path, kind):
    folder, mark = copied("binary"), tmp_path / "mark"
    tensors = torch.load(folder / "pytorch_model.bin", weights_only=True)
    file = folder / "pytorch_model.bin"
    if kind == "plain":
        file.write_bytes(pickle.dumps(Writer(mark)))
    elif kind == "beside tensors":
        torch.save({**tensors, "more": Writer(mark)}, file)
    else:
        torch.save(Writer(mark), file, _use_new_zipfile_serialization=kind == "torch.save")
    refused(folder, "`pytorch_model.bin` .* other code in it is not run")
    assert not mark.exists()
    # The file is one that runs.
    pickle.loads(pickle.dumps(Writer(mark)))
    assert mark.exists()


@pytest.mark.parametrize(
    "content",
    [
        [torch.ones(2)],
        {"fc.weight": 5},
        {"fc.weight": "text"},
        {5: torch.ones(2)},
        torch.ones(2),
        {"state_dict": {"fc.weight": torch.ones(2)}},
    ],
    ids=str,
)
def test_other_objects_in_a_pickle(copied, content):
    folder = copied("binary")
    torch.save(content, folder / "pytorch_model.bin")
    refused(folder, "`pytorch_model.bin` .* holds more than tensors")


def test_tensors_that_are_larger_than_the_pickle(copied):
    folder = copied("binary")
    file = folder / "pytorch_model.bin"
    weights = torch.load(file, weights_only=True)
    for endless in (
        # One value, 2^40 times.
        torch.zeros(1).expand(2**20, 2**20),
        torch.empty(2**20, 2**20, device="meta"),
        torch.sparse_coo_tensor(torch.zeros(2, 1).long(), torch.ones(1), (2**20, 2**20), check_invariants=False),
    ):
        torch.save({**weights, "fc.weight": endless}, file)
        refused(folder, "`pytorch_model.bin` .* tensors larger than the file")
    # The same for a file that is small because it is compressed.
    torch.save({**weights, "fc.weight": torch.zeros(2**22)}, file)
    with zipfile.ZipFile(file) as opened, zipfile.ZipFile(folder / "small", "w", zipfile.ZIP_DEFLATED) as small:
        for name in opened.namelist():
            small.writestr(name, opened.read(name))
    (folder / "small").rename(file)
    assert file.stat().st_size < 2**20
    refused(folder, "`pytorch_model.bin` .* cannot be read .*it is compressed")


def test_a_pickle_beside_safetensors_is_not_read(copied, tmp_path):
    folder = copied("original")
    (folder / "pytorch_model.bin").write_bytes(pickle.dumps(Writer(tmp_path / "mark")))
    load(folder)
    assert not (tmp_path / "mark").exists()


@pytest.mark.parametrize("name", ["speculators", "original", "binary"])
def test_no_adapter_is_followed(copied, monkeypatch, name):
    monkeypatch.setattr(hf_falcon.drafters.files, "is_peft_available", lambda: True)
    folder = copied(name)
    (folder / "adapter_config.json").write_text(json.dumps({"base_model_name_or_path": "somebody/model"}))
    refused(folder, "`adapter_config.json`: a drafter takes no adapter")


def test_an_index_may_not_leave_the_folder(copied):
    folder = copied("speculators")
    (folder / "model.safetensors").rename(folder.parent / "model.safetensors")
    for text in ('{"metadata": {}, "weight_map": {"a": "../model.safetensors"}}', '{"weight_map": 5}', "[]"):
        (folder / "model.safetensors.index.json").write_text(text)
        refused(folder, "`model.safetensors.index.json` .* no index of safetensors files")


@pytest.mark.parametrize("name, file", [("original", "model.safetensors"), ("binary", "pytorch_model.bin")])
def test_listed_files_only_are_read(copied, name, file):
    """Where config.json lists digests, whatever is read is one of them."""
    folder = copied(name)
    digest = hashlib.sha256((folder / file).read_bytes()).hexdigest()
    edit(folder / "config.json", weights_sha256={"model.safetensors": digest})
    if name == "original":
        load(folder)
        edit(folder / "config.json", weights_sha256={"model.safetensors": "0"})
        refused(folder, f"`{file}` .* damaged or was changed", OSError)
        edit(folder / "config.json", weights_sha256={"model-00001-of-00002.safetensors": digest})
    refused(folder, f"`{file}` .* is not in the list of config.json", OSError)
    for wrong in ([1], {file: 5}, {"../model.safetensors": digest}):
        edit(folder / "config.json", weights_sha256=wrong)
        refused(folder, "`weights_sha256` is")


def test_wrong_drafting_options_are_refused(copied):
    folder = copied("original")
    (folder / "generation_config.json").write_text('{"draft_top_k": 100000000}')
    refused(folder, "`draft_top_k` is 100000000")


def test_unknown_arguments(saved):
    with pytest.raises(TypeError, match=r"got \['device_map'\]: it takes `dtype`, cache_dir"):
        load(saved / "original", device_map="cpu")


# Fuzzing.


def outcome(folder: Path, target, ids, expected) -> str:
    """Loads and drafts: the name of the error, or "works"."""
    try:
        drafter = load(folder, dtype=torch.float32)
        output = target.generate(ids, assistant_model=drafter, do_sample=False, max_new_tokens=6, pad_token_id=0)
    except (ValueError, OSError) as error:
        assert str(error), repr(error)
        return type(error).__name__
    assert output.tolist() == expected
    return "works"


def fuzz(saved: Path, folder: Path, seed: int, count: int) -> dict[str, int]:
    """Tries `count` mutated drafters; each must be an error, or draft what plain decoding gives."""
    rng = random.Random(seed)
    target, ids = tiny_target("llama"), prompt(12)
    expected = target.generate(ids, do_sample=False, max_new_tokens=6, pad_token_id=0).tolist()
    found: dict[str, int] = {}
    before = start_peak()
    for number in range(count):
        layout = rng.choice(["speculators", "original", "binary"])
        shutil.rmtree(folder, ignore_errors=True)
        shutil.copytree(saved / layout, folder)
        files = sorted(folder.iterdir())
        file = rng.choice([*files, *(each for each in files if each.name == "config.json")])
        whole = file.read_bytes()
        if file.suffix == ".json":
            mutated = fuzzed_json(rng, whole.decode())
            if layout == "speculators" and file.name == "config.json" and rng.random() < 0.5:
                fields = json.loads(whole)
                inner = fuzzed_json(rng, json.dumps(fields["transformer_layer_config"]))
                outer = json.dumps({**fields, "transformer_layer_config": "HERE"}).encode()
                mutated = outer.replace(b'"HERE"', inner)
        elif file.suffix == ".safetensors":
            mutated = fuzzed_weights(rng, whole)
        else:
            mutated = bytearray(whole)
            for _ in range(rng.randint(1, 8)):
                mutated[rng.randrange(len(mutated))] = rng.randrange(256)
        file.write_bytes(mutated)
        start = time.monotonic()
        try:
            result = outcome(folder, target, ids, expected)
        except BaseException as error:
            told = f"seed {seed}, input {number}, {layout}: {file.name} {bytes(mutated[:3000])!r}"
            raise AssertionError(told) from error
        assert time.monotonic() - start < 60 and peak_memory() - before < 2**30, (seed, number)
        found[result] = found.get(result, 0) + 1
    return found


def test_fuzz(saved, tmp_path):
    found = fuzz(saved, tmp_path / "fuzzed", seed=0, count=150)
    # The mutations reach both ends.
    assert found["works"] >= 10 and found["ValueError"] >= 10 and found["OSError"] >= 5


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(1, 9))
def test_fuzz_at_length(saved, tmp_path, seed):
    found = fuzz(saved, tmp_path / "fuzzed", seed=seed, count=800)
    assert found["works"] >= 50
