# Copyright 2026 The hf_falcon authors. Licensed under the Apache License, Version 2.0.
"""What a learner keeps on disk: each file is replaced in one step, so it is complete whenever the process dies."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor

from ..training.checkpoints import empty, publish, scratch_folder
from ..training.json_text import parse_json
from ..training.token_file import write_atomically
from .replay_buffer import CallRecord, RejectedPath

STATE_NAME, REPORT_NAME, PLOT_NAME = "learner.safetensors", "learning.json", "learning.png"
SAMPLES_NAME, DRAFTER_NAME = "samples.safetensors", "drafter"
_FORMAT_VERSION = 2
_WEIGHTS = ("trained", "start", "accepted")
_KEY = "hf_falcon"


@dataclass
class LearnerState:
    """
    The state of a learner.

    Args:
        trained (`dict[str, Tensor]`): weights of the student.
        start, accepted (`dict[str, Tensor]`):
            Those that learning began with, and the student's at its latest gain. The drafter has the latter, or what
            is halfway between both.
        optimizer (`dict[str, Tensor]`): tensors of the optimizer, named by the number of the parameter and their key.
        progress (`dict`): JSON values.
    """

    trained: dict[str, Tensor]
    start: dict[str, Tensor]
    accepted: dict[str, Tensor]
    optimizer: dict[str, Tensor]
    progress: dict[str, Any]

    def save(self, folder: Path) -> None:
        """Writes the file of a folder."""
        tensors: dict[str, Tensor] = {}
        for part in (*_WEIGHTS, "optimizer"):
            tensors |= {f"{part}/{name}": each.contiguous().cpu() for name, each in getattr(self, part).items()}
        text = json.dumps({"format_version": _FORMAT_VERSION, **self.progress}, sort_keys=True)
        write_atomically(folder / STATE_NAME, save(tensors, {_KEY: text}))

    @classmethod
    def load(cls, folder: Path) -> LearnerState | None:
        """
        Reads the file of a folder; `None` if there is none.

        Raises:
            `ValueError`: if it is no such file.
        """
        path = folder / STATE_NAME
        if not path.is_file():
            return None
        tensors, progress = _read(path)
        if progress.get("format_version") != _FORMAT_VERSION:
            raise ValueError(
                f"{path}: its `format_version` is {progress.get('format_version')!r}, this hf-falcon reads "
                f"{_FORMAT_VERSION}: give another folder, or install the hf-falcon that wrote it."
            )
        parts: dict[str, dict[str, Tensor]] = {part: {} for part in (*_WEIGHTS, "optimizer")}
        for name, tensor in tensors.items():
            part, _, own = name.partition("/")
            parts.setdefault(part, {})[own] = tensor
        return cls(parts["trained"], parts["start"], parts["accepted"], parts["optimizer"], progress)

    def check(self, folder: Path, weights: dict[str, Tensor]) -> None:
        """Raises a `ValueError` if it is not of a drafter with these weights."""
        for part in _WEIGHTS:
            found = {name: tuple(each.shape) for name, each in getattr(self, part).items()}
            expected = {name: tuple(each.shape) for name, each in weights.items()}
            differing = sorted(
                name for name in found.keys() | expected.keys() if found.get(name) != expected.get(name)
            )
            if differing:
                name = differing[0]
                raise ValueError(
                    f"`{folder / STATE_NAME}` is of another drafter: its `{name}` has shape {found.get(name)}, this "
                    f"drafter's has {expected.get(name)}. Give another folder, or the drafter that learnt there."
                )


def optimizer_tensors(optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    """The tensors of an optimizer's state."""
    found: dict[str, Tensor] = {}
    for number, values in optimizer.state_dict()["state"].items():
        found |= {f"{number}/{key}": value for key, value in values.items() if isinstance(value, Tensor)}
    return found


def load_optimizer(optimizer: torch.optim.Optimizer, tensors: dict[str, Tensor]) -> None:
    """Undoes [`optimizer_tensors`]. Tensors of an optimizer of other parameters are left out."""
    state: dict[int, dict[str, Tensor]] = {}
    for name, tensor in tensors.items():
        number, _, key = name.partition("/")
        state.setdefault(int(number), {})[key] = tensor
    optimizer.load_state_dict({**optimizer.state_dict(), "state": state})


def save_drafter(drafter: Any, folder: Path) -> None:
    """Writes a complete drafter into the folder `drafter` of a folder, in place of an earlier one."""
    scratch = scratch_folder(folder)
    empty(scratch)
    drafter.save_pretrained(scratch / DRAFTER_NAME)
    publish(scratch / DRAFTER_NAME, folder / DRAFTER_NAME)
    shutil.rmtree(scratch)


def save_report(folder: Path, report: dict[str, Any]) -> None:
    """Writes `learning.json`, for people and `hf-falcon doctor`."""
    write_atomically(folder / REPORT_NAME, (json.dumps(report, indent=2) + "\n").encode())


def save_samples(folder: Path, records: Iterable[CallRecord]) -> None:
    """Writes the texts of users, with their features."""
    tensors: dict[str, Tensor] = {}
    described = []
    for index, record in enumerate(records):
        record.wait()
        parts = [RejectedPath(0, record.token_ids, record.features), *record.rejected]
        for number, part in enumerate(parts):
            tensors[f"{index}/{number}/token_ids"] = part.token_ids.contiguous()
            tensors[f"{index}/{number}/features"] = part.features.contiguous()
        places = [path.place for path in record.rejected]
        described.append([record.prompt_length, record.prompt, record.uses, places])
    write_atomically(folder / SAMPLES_NAME, save(tensors, {_KEY: json.dumps({"records": described})}))


def load_samples(folder: Path) -> list[CallRecord]:
    """
    Reads what [`save_samples`] wrote; nothing if there is no such file.

    Raises:
        `ValueError`: if it is no such file.
    """
    path = folder / SAMPLES_NAME
    if not path.is_file():
        return []
    tensors, progress = _read(path)
    found = []
    try:
        for index, (prompt_length, prompt, uses, places) in enumerate(progress["records"]):
            parts = [
                (tensors[f"{index}/{number}/token_ids"], tensors[f"{index}/{number}/features"])
                for number in range(len(places) + 1)
            ]
            rejected = [RejectedPath(place, *part) for place, part in zip(places, parts[1:], strict=True)]
            found.append(CallRecord(*parts[0], prompt_length, prompt, rejected, uses=uses))
    except (KeyError, TypeError, ValueError) as error:
        raise ValueError(f"{path} holds no texts of a learner ({error}): delete it.") from error
    return found


def progress_in(folder: Path) -> dict[str, Any]:
    """
    What the state in a folder notes, without its tensors; empty without any.

    Raises:
        `ValueError`: if it is damaged; it names the file.
    """
    path = folder / STATE_NAME
    return _read(path, with_tensors=False)[1] if path.is_file() else {}


def _read(path: Path, with_tensors: bool = True) -> tuple[dict[str, Tensor], dict[str, Any]]:
    try:
        # Opened once: a learner may put another file in its place meanwhile.
        with safe_open(path, framework="pt") as file:
            tensors = {name: file.get_tensor(name) for name in file.keys()} if with_tensors else {}
            progress = parse_json((file.metadata() or {}).get(_KEY, "{}"))
    except (SafetensorError, ValueError) as error:
        raise ValueError(f"{path} is not a file of a learner ({error}): give another folder, or delete it.") from error
    if not isinstance(progress, dict):
        raise ValueError(f"{path}: its metadata is no object: give another folder, or delete it.")
    return tensors, progress
