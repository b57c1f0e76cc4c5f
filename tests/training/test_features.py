# Copyright 2026 The hf_falcon authors. Licensed under the Apache License, Version 2.0.
"""Features of the target: their statistics, and files of them."""

import re
import shutil
from collections import namedtuple

import pytest
import torch
from safetensors import SafetensorError
from tiny_models import new_target
from training_runs import token_file

from hf_falcon.training import features
from hf_falcon.training.features import (
    StoredFeatures,
    feature_statistics,
    identity,
    kept_features,
    kept_folder,
    record_features,
    save_features,
    some_features,
    target_features,
)
from hf_falcon.training.token_file import TokenFile
from hf_falcon.training.trainer import (
    DraftSamples,
    collate,
)


def test_feature_statistics(target):
    data = token_file()
    mean, std = feature_statistics(target, data)
    rows = torch.cat([target_features(target, *whole(data, i))[0][:-1] for i in range(len(data))])
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


def test_a_full_disk_leaves_nothing_half_written(tmp_path, monkeypatch):
    def fill(tensors, path):
        path.write_bytes(b"half")
        raise SafetensorError("No space left on device")

    monkeypatch.setattr(features, "save_file", fill)
    with pytest.raises(SafetensorError):
        save_features(tmp_path / "batch-00000.safetensors", {0: torch.zeros(1, 2)})
    assert not list(tmp_path.iterdir())


def keep(folder, target, data, layers=()):
    """Features as `hf-falcon prepare` keeps them: several files, the samples in any order."""
    folder.mkdir()
    for number, batch in enumerate(torch.randperm(len(data)).split(3)):
        rows = {}
        for index in batch.tolist():
            rows[index] = target_features(target, *whole(data, index), layers)[0].bfloat16()
            rows[index][-1] = 0
        save_features(folder / f"batch-{number:05d}.safetensors", rows)
    record_features(folder, identity(target, data, layers))


def test_features_of_several_files(target, tmp_path, caplog):
    files, paths = [token_file(), token_file(seed=6)], [str(tmp_path / name) for name in ("a", "b")]
    assert kept_features(paths, files, target) is None and not caplog.messages
    keep(kept_folder(paths[0]), target, files[0], [1])
    assert kept_features(paths, files, target) is None and "b has none" in caplog.text
    keep(kept_folder(paths[1]), target, files[1], [0, 1])
    found = kept_features(paths, files, target, [1])
    assert found.has([1]) and not found.has([0])
    joined = TokenFile.concatenate(files)
    for index in range(len(joined)):
        expected = target_features(target, *whole(joined, index), [1])[0]
        torch.testing.assert_close(found.sample(index)[:-1].float(), expected[:-1], rtol=1e-2, atol=1e-2)
    # The start of a drafter reads a layer that the drafter does not.
    for mine, theirs in zip(
        some_features(target, joined, [1], stored=kept_features(paths, files, target)),
        some_features(target, joined, [1]),
        strict=True,
    ):
        torch.testing.assert_close(mine, theirs, rtol=1e-2, atol=1e-2)
    with pytest.raises(ValueError, match="a.features` holds features of.*give another folder"):
        kept_features(paths, files, target, [0])


def test_a_damaged_file_of_features(target, tmp_path):
    data = token_file()
    keep(tmp_path / "kept", target, data)
    path = tmp_path / "kept" / "batch-00001.safetensors"
    whole_file = path.read_bytes()
    for damage in (lambda: path.write_bytes(whole_file[:50]), lambda: save_features(path, {3: torch.zeros(1, 2)})):
        damage()
        with pytest.raises(ValueError, match="batch-00001.safetensors` holds no features .* delete it"):
            StoredFeatures(tmp_path / "kept", target, data)
    # Missing samples are computed.
    path.unlink()
    stored = StoredFeatures(tmp_path / "kept", target, data)
    for index in range(len(data)):
        expected = target_features(target, *whole(data, index))[0]
        torch.testing.assert_close(stored.sample(index)[:-1].float(), expected[:-1], rtol=1e-2, atol=1e-2)


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


def test_features_of_float16_targets_are_told_apart():
    first, again, other = (identity(new_target(seed=seed).half(), token_file(), []) for seed in (0, 0, 8))
    assert first == again != other


def test_no_room_for_features(target, tmp_path, monkeypatch):
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage(10**6, 10**6 - 1000, 1000))
    with pytest.raises(
        OSError, match=f"{re.escape(str(tmp_path))}` has .* GB free and the features need .* leave out"
    ):
        StoredFeatures(tmp_path, target, token_file())
    assert not list(tmp_path.glob("*.safetensors"))
