# Copyright 2026 The hf_falcon authors. Licensed under the Apache License, Version 2.0.
"""Features of the target: their statistics, and files of them."""

import re
import shutil
from collections import namedtuple

import pytest
import torch
from tiny_models import new_target
from training_runs import token_file

from hf_falcon.training import features
from hf_falcon.training.features import StoredFeatures, feature_statistics, target_features
from hf_falcon.training.trainer import (
    DraftSamples,
    collate,
)


def test_feature_statistics(target):
    data = token_file()
    mean, std = feature_statistics(target, data)
    rows = torch.cat([target_features(target, *whole(data, i))[0] for i in range(len(data))])
    torch.testing.assert_close(mean, rows.mean(0), rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(std, rows.std(0), rtol=1e-4, atol=1e-5)


def whole(data, index):
    token_ids = data.sample(index)[0][None]
    return token_ids, torch.ones_like(token_ids, dtype=torch.bool)


@pytest.mark.parametrize("layers", [[], [1, 0]])
def test_stored_features(target, tmp_path, monkeypatch, layers):
    monkeypatch.setattr(features, "_SHARD_TOKENS", 40)
    data = token_file()
    stored = StoredFeatures(tmp_path, target, data, layers)
    shards = sorted(tmp_path.glob("*.safetensors"))
    assert len(shards) == 3
    for index in range(len(data)):
        expected = target_features(target, *whole(data, index), layers)[0]
        found = stored.sample(index)
        assert found.dtype == torch.bfloat16 and found.shape == expected.shape
        torch.testing.assert_close(found.float(), expected, rtol=1e-2, atol=1e-2)
    samples = DraftSamples(data, [0, 1], 8, stored)
    assert torch.equal(collate([samples[0], samples[1]])["features"][1], stored.sample(1)[:8])

    # A missing shard is computed again, the others are not touched.
    before = [shard.stat().st_mtime_ns for shard in shards]
    again = shards[1].read_bytes()
    shards[1].unlink()
    StoredFeatures(tmp_path, target, data, layers)
    assert shards[1].read_bytes() == again
    assert [shards[i].stat().st_mtime_ns for i in (0, 2)] == [before[0], before[2]]


@pytest.mark.parametrize("other", ["target", "tokens", "layers"])
def test_stored_features_of_something_else(target, tmp_path, other):
    StoredFeatures(tmp_path, target, token_file())
    arguments = {
        "target": (new_target(seed=8), token_file()),
        "tokens": (target, token_file(seed=6)),
        "layers": (target, token_file(), [0]),
    }[other]
    with pytest.raises(ValueError, match=f"{re.escape(str(tmp_path))}` holds features of.*give another folder"):
        StoredFeatures(tmp_path, *arguments)


def test_no_room_for_features(target, tmp_path, monkeypatch):
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage(10**6, 10**6 - 1000, 1000))
    with pytest.raises(
        OSError, match=f"{re.escape(str(tmp_path))}` has .* GB free and the features need .* leave out"
    ):
        StoredFeatures(tmp_path, target, token_file())
    assert not list(tmp_path.glob("*.safetensors"))
