# Copyright 2026 The hf_falcon authors. Licensed under the Apache License, Version 2.0.
"""Weight files are only loaded if config.json lists their digests."""

import json

import pytest
from safetensors.torch import load_file
from tiny_models import tiny_drafter, tiny_target

from hf_falcon import FalconDraftModel


@pytest.fixture
def folder(tmp_path):
    tiny_drafter(tiny_target("llama")).save_pretrained(tmp_path / "drafter")
    return tmp_path / "drafter"


def edit_config(folder, **changes):
    file = folder / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **changes}))


def test_a_variant_that_is_not_listed_is_refused(folder):
    (folder / "model.fp16.safetensors").write_bytes((folder / "model.safetensors").read_bytes())
    with pytest.raises(OSError, match=r"`model\.fp16\.safetensors` .* is not in the list .*model\.safetensors"):
        FalconDraftModel.from_pretrained(folder, variant="fp16")
    FalconDraftModel.from_pretrained(folder)
    # Checkpoints from before digests were kept have no list.
    edit_config(folder, weights_sha256=None)
    FalconDraftModel.from_pretrained(folder, variant="fp16")


def test_a_variant_that_was_saved_is_listed(folder):
    drafter = FalconDraftModel.from_pretrained(folder)
    drafter.save_pretrained(folder, variant="fp16")
    assert set(drafter.config.weights_sha256) == {"model.safetensors", "model.fp16.safetensors"}
    FalconDraftModel.from_pretrained(folder, variant="fp16")


def test_shards_that_are_not_listed_are_refused(folder):
    drafter = FalconDraftModel.from_pretrained(folder)
    sharded = folder.parent / "sharded"
    drafter.save_pretrained(sharded, max_shard_size="20KB")
    shards = sorted(file.name for file in sharded.glob("*.safetensors"))
    assert len(shards) > 1 and set(FalconDraftModel.from_pretrained(sharded).config.weights_sha256) == set(shards)
    listed = json.loads((sharded / "config.json").read_text())["weights_sha256"]
    edit_config(sharded, weights_sha256={name: listed[name] for name in shards[1:]})
    with pytest.raises(OSError, match=f"`{shards[0]}` .* is not in the list"):
        FalconDraftModel.from_pretrained(sharded)
    assert load_file(sharded / shards[0])
