# Copyright 2026 The hf_falcon authors. Licensed under the Apache License, Version 2.0.
"""Checkpoint folders that are complete or absent, whenever the process dies."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

from transformers.trainer_utils import sort_checkpoints

# In the run's folder, so that renaming moves a checkpoint to its place. No search for checkpoints finds this name.
_SCRATCH = ".unfinished"


def scratch_folder(run_folder: str | Path) -> Path:
    """The folder in which a run's checkpoints are written."""
    return Path(run_folder, _SCRATCH)


def empty(scratch: Path) -> None:
    """Creates an empty scratch folder: an interrupted run can leave files in it."""
    shutil.rmtree(scratch, ignore_errors=True)
    scratch.mkdir(parents=True)


def publish(folder: Path, place: Path) -> None:
    """
    Forces the files of a folder to disk and moves it to its place in one step.

    Args:
        folder (`Path`): the complete folder, below [`scratch_folder`].
        place (`Path`): its final place. A folder of that name is removed.
    """
    _flush(folder)
    removed = _set_aside(place, folder.parent) if place.exists() else None
    os.rename(folder, place)
    if removed is not None:
        shutil.rmtree(removed)


def publish_files(folder: Path, place: Path) -> None:
    """Moves all files of a folder into another folder. Each replaces a file of the same name in one step."""
    _flush(folder)
    for file in [path for path in folder.rglob("*") if path.is_file()]:
        target = place / file.relative_to(folder)
        target.parent.mkdir(exist_ok=True)
        os.replace(file, target)


def prune(run_folder: str | Path, limit: int | None, kept: set[str]) -> None:
    """
    Deletes the oldest checkpoints of a run.

    Args:
        run_folder (`str` or `Path`): the run's folder, with a scratch folder in it.
        limit (`int`, *optional*): checkpoints to keep; `None` or 0 keeps all.
        kept (`set[str]`): paths of checkpoints that are never deleted.
    """
    checkpoints = sort_checkpoints(str(run_folder))
    spare = [checkpoint for checkpoint in checkpoints if checkpoint not in kept]
    surplus = len(checkpoints) - limit if limit else 0
    for checkpoint in spare[: max(0, surplus)]:
        # Renamed first: deleting takes a while, and half a checkpoint would be taken for a checkpoint.
        shutil.rmtree(_set_aside(Path(checkpoint), scratch_folder(run_folder)))


def _flush(folder: Path) -> None:
    for file in folder.rglob("*"):
        if file.is_file():
            with file.open("r+b") as opened:  # Windows writes back only what may be written.
                os.fsync(opened.fileno())


def _set_aside(folder: Path, scratch: Path) -> Path:
    """Moves a folder into the scratch folder, to be deleted there."""
    removed = scratch / f"removed-{folder.name}"
    os.rename(folder, removed)
    return removed
