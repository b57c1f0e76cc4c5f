# Copyright 2026 The hf_falcon authors. Licensed under the Apache License, Version 2.0.
"""Checkpoint folders that are complete or absent."""

import os

import pytest

from hf_falcon.training.checkpoints import publish, publish_files


@pytest.mark.parametrize("move", [publish, publish_files])
def test_files_that_are_forced_to_disk_are_open_for_writing(tmp_path, monkeypatch, move):
    """Windows forces no others."""
    forced = []
    # It fails for a file that is open for reading.
    monkeypatch.setattr(os, "fsync", lambda file: forced.append(os.write(file, b"")))
    (tmp_path / "new").mkdir()
    (tmp_path / "new" / "model.safetensors").write_bytes(b"weights")
    move(tmp_path / "new", tmp_path / "place")
    assert forced == [0] and (tmp_path / "place" / "model.safetensors").read_bytes() == b"weights"
