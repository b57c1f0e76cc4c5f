# Copyright 2026 The hf_falcon authors. Licensed under the Apache License, Version 2.0.
"""A drafter loads as it was saved, and only so."""

import json

import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny_models import HIDDEN, SAME_EVERY_ROUND, new_drafter
from transformers import AutoConfig, AutoModel

from hf_falcon import DraftOptions, FalconDraftConfig, FalconDraftModel


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("changes", [{}, {"num_lstm_layers": 0, "draft_vocab_size": 20, "block_size": 3}])
def test_round_trip(target, tmp_path, dtype, changes):
    drafter = new_drafter(target, **changes).to(dtype)
    options = {"num_assistant_tokens": 7, "draft_tree": [[0], [1], [0, 0]], "draft_width": 3}
    for name, value in options.items():
        setattr(drafter.generation_config, name, value)
    drafter.save_pretrained(tmp_path)

    names = set(load_file(tmp_path / "model.safetensors"))
    assert names == set(drafter.state_dict())
    assert not any("embed_tokens" in name or "head" in name for name in names)
    found = {path.name for path in tmp_path.iterdir() if path.suffix != ".py"}
    assert found == {"config.json", "custom_generate", "generation_config.json", "model.safetensors"}

    config = AutoConfig.from_pretrained(tmp_path)
    assert type(config) is FalconDraftConfig
    assert config.to_diff_dict() == FalconDraftConfig.from_dict(drafter.config.to_dict()).to_diff_dict()
    features = torch.randn(1, 6, HIDDEN, dtype=dtype)
    blocks = torch.arange(6)[None] // 2
    for loader in (FalconDraftModel, AutoModel):
        loaded = loader.from_pretrained(tmp_path)
        assert type(loaded) is FalconDraftModel and loaded.dtype == dtype
        for name, tensor in drafter.state_dict().items():
            assert torch.equal(loaded.state_dict()[name], tensor), name
        assert torch.equal(loaded.eval()(features, features, blocks), drafter(features, features, blocks))
        given = {**SAME_EVERY_ROUND, **options}
        assert DraftOptions.from_generation_config(loaded.generation_config) == DraftOptions(**given)


def test_saved_in_float32_loaded_in_bfloat16(target, tmp_path):
    drafter = new_drafter(target, draft_vocab_size=20)
    drafter.save_pretrained(tmp_path)
    loaded = FalconDraftModel.from_pretrained(tmp_path, dtype=torch.bfloat16)
    assert loaded.dtype == torch.bfloat16 and loaded.draft_vocab_ids.dtype == torch.int64
    assert torch.equal(loaded.draft_vocab_ids, drafter.draft_vocab_ids)


def edited_checkpoint(folder, target, edit, **config_changes):
    new_drafter(target).save_pretrained(folder)
    file = folder / "model.safetensors"
    tensors = load_file(file)
    edit(tensors)
    save_file(tensors, file, metadata={"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    # As in checkpoints of before these were kept.
    del config["weights_sha256"]
    (folder / "config.json").write_text(json.dumps({**config, **config_changes}))
    return folder


@pytest.mark.parametrize(
    "edit, config_changes, message",
    [
        (lambda t: t.pop("layers.1.mlp.up_proj.weight"), {}, r"missing keys: \['layers.1.mlp.up_proj.weight'\]"),
        (lambda t: t.pop("feature_std"), {}, r"missing keys: \['feature_std'\]"),
        (lambda t: t.update(extra=torch.ones(1)), {}, r"unexpected keys: \['extra'\]"),
        (lambda t: None, {"num_hidden_layers": 3}, "missing keys: .*layers.2.self_attn.q_proj.weight"),
        (lambda t: None, {"num_hidden_layers": 1}, "unexpected keys: .*layers.1.self_attn.q_proj.weight"),
        (lambda t: None, {"draft_vocab_size": 9}, r"missing keys: \['draft_vocab_ids'\]"),
    ],
)
def test_incomplete_checkpoint(target, tmp_path, edit, config_changes, message):
    folder = edited_checkpoint(tmp_path, target, edit, **config_changes)
    with pytest.raises(ValueError, match=message) as error:
        FalconDraftModel.from_pretrained(folder)
    assert str(folder) in str(error.value) and "save it again" in str(error.value)
    with pytest.raises(ValueError, match=message):
        AutoModel.from_pretrained(folder)


@pytest.mark.parametrize("options", [{}, {"ignore_mismatched_sizes": True}])
def test_weights_of_another_shape(target, tmp_path, options):
    folder = edited_checkpoint(tmp_path, target, lambda tensors: tensors.update({"norm.weight": torch.ones(5)}))
    with pytest.raises(ValueError, match="mismatched keys: .*norm.weight.*5.*32.*save it again"):
        FalconDraftModel.from_pretrained(folder, **options)
