# Copyright 2026 The hf_falcon authors. Licensed under the Apache License, Version 2.0.
"""`hf-falcon export`: what it writes, and what it refuses."""

import json

import pytest
import torch
from safetensors.torch import load_file
from tiny_models import prompt, tiny_drafter, tiny_target, tiny_tokenizer

from hf_falcon import AutoDrafter
from hf_falcon.commands import main as entry
from hf_falcon.drafters.eagle3 import Eagle3DraftModel
from hf_falcon.drafters.eagle3_config import Eagle3DraftConfig


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """A target and an EAGLE-3 drafter for it, in folders."""
    folder = tmp_path_factory.mktemp("export")
    target = tiny_target()
    target.save_pretrained(folder / "target")
    tiny_tokenizer().save_pretrained(folder / "target")
    drafter = Eagle3DraftModel(Eagle3DraftConfig.from_target(target, draft_vocab_size=30))
    drafter.set_draft_vocabulary(torch.arange(0, 60, 2))
    drafter.generation_config.num_assistant_tokens = 5
    drafter.save_pretrained(folder / "drafter")
    return folder


def export(*words):
    assert entry.main(["export", *map(str, words)]) == 0


def test_the_layout_of_speculators(folders, tmp_path):
    export(folders / "drafter", tmp_path / "out", "--target", folders / "target")
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert config["speculators_model_type"] == config["speculators_config"]["algorithm"] == "eagle3"
    verifier = {"name_or_path": str(folders / "target"), "architectures": ["LlamaForCausalLM"]}
    assert config["speculators_config"]["verifier"] == verifier
    assert config["transformer_layer_config"]["model_type"] == "llama" and "model_type" not in config
    # Engines read other options from this file.
    options = json.loads((tmp_path / "out" / "generation_config.json").read_text())
    assert "num_assistant_tokens" not in options

    before, after = (load_file(f"{each}/model.safetensors") for each in (folders / "drafter", tmp_path / "out"))
    target = tiny_target()
    assert torch.equal(after.pop("embed_tokens.weight"), target.get_input_embeddings().weight)
    assert before.keys() == after.keys() and all(map(torch.equal, before.values(), after.values()))

    exported = AutoDrafter.from_pretrained(tmp_path / "out")
    expected, found = (
        target.generate(prompt(9), do_sample=False, max_new_tokens=20, **assistant)
        for assistant in ({}, {"assistant_model": exported})
    )
    assert torch.equal(found, expected)


def test_without_the_embedding_and_in_another_dtype(folders, tmp_path):
    export(folders / "drafter", tmp_path / "out", "--without_embedding", "--dtype", "bfloat16")
    weights = load_file(tmp_path / "out" / "model.safetensors")
    assert "embed_tokens.weight" not in weights and weights["fc.weight"].dtype == torch.bfloat16
    # The offsets of the draft vocabulary need all their bits.
    assert weights["d2t"].dtype == torch.int64


def test_refusals(folders, tmp_path, capsys):
    tiny_drafter(tiny_target()).save_pretrained(tmp_path / "falcon")
    assert entry.main(["export", str(tmp_path / "falcon"), str(tmp_path / "out")]) == 1
    assert "a layout for EAGLE-3" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()
    tiny_target("qwen2").save_pretrained(tmp_path / "target")
    tiny_tokenizer().save_pretrained(tmp_path / "target")
    words = ["export", str(folders / "drafter"), str(tmp_path / "out"), "--target", str(tmp_path / "target")]
    assert entry.main(words) == 1
    assert "`architectures`" in capsys.readouterr().err and not (tmp_path / "out").exists()
    (tmp_path / "file").write_text("")
    assert entry.main(["export", str(folders / "drafter"), str(tmp_path / "file")]) == 1
    assert "`output` is" in capsys.readouterr().err


@pytest.mark.parametrize("source", ["drafter", "target"])
def test_an_output_that_is_read(folders, capsys, source):
    before = (folders / source / "config.json").read_bytes()
    words = ["export", str(folders / "drafter"), f"{folders}/{source}/", "--target", str(folders / "target")]
    assert entry.main(words) == 1
    assert f"`output` is '{folders}/{source}/', the folder of the {source} itself" in capsys.readouterr().err
    assert (folders / source / "config.json").read_bytes() == before


def test_the_target_that_a_head_records_is_not_overwritten(folders, capsys, monkeypatch):
    drafter = AutoDrafter.from_pretrained(folders / "drafter")
    recorded = property(lambda config: str(folders / "target"))
    monkeypatch.setattr(Eagle3DraftConfig, "target_name_or_path", recorded)
    monkeypatch.setattr(AutoDrafter, "from_pretrained", lambda *args, **kwargs: drafter)
    assert entry.main(["export", str(folders / "drafter"), str(folders / "target")]) == 1
    assert f"`output` is '{folders}/target', the folder of the target itself" in capsys.readouterr().err


def test_a_head_that_has_no_embedding_and_names_no_target(folders, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr("hf_falcon.commands.export.load_target", lambda *_: pytest.fail("loads a target"))
    assert entry.main(["export", str(folders / "drafter"), str(tmp_path / "out")]) == 1
    assert "give its target as `target`, or `without_embedding`." in capsys.readouterr().err
