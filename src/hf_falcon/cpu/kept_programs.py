# Copyright 2026 The hf_falcon authors. Licensed under the Apache License, Version 2.0.
"""
Compiled programs on disk, for later processes of this machine. They are code, so they are loaded only from folders
that nobody but their owner can write to, and only if a file has the digest that was written down for it.
"""

from __future__ import annotations

import hashlib
import json
import os
import platform
import stat
import sys
import tempfile
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel
from transformers import __version__ as transformers_version
from transformers.utils import logging

from .. import __version__
from ..core.hook import attention_implementation
from ..cost_files import cache_folder
from ..json_files import read_json
from ..private_names import attention_function, experts_implementation
from .code_digest import code_digest
from .packing import is_packed
from .processor import processor_digest
from .programs import CannotBeBuilt, Program
from .tile_blocks import tiles_pay

logger = logging.get_logger(__name__)

# Of the descriptions; of a program some megabytes are usual.
_LARGEST_DESCRIPTION, _LARGEST_PROGRAM = 2**20, 2**29
# The note that code is used without being asked for.
_OFFER = "offer"
# Folders of other states that are looked at to say what differs.
_MOST_OTHERS = 64


class Shelf:
    """
    The programs of one state of a model: its architecture, shapes, dtype, packing, this processor and the versions.

    Args:
        state (`dict`): what the programs depend on.
    """

    def __init__(self, state: dict[str, Any]):
        self.state = state
        # The same in all processes.
        self.name = hashlib.sha256(json.dumps(state, sort_keys=True).encode()).hexdigest()[:32]
        self._folder = cache_folder() / "compiled" / self.name

    def exists(self) -> bool:
        """Whether anything is kept for this state."""
        try:
            return (self._folder / "state.json").is_file()
        except OSError:
            return False

    def offer(self) -> None:
        """From now on later processes use what is kept for this state without being asked."""
        self.take_note(_OFFER, {})

    @property
    def is_offered(self) -> bool:
        """Whether `offer` was called for this state, in any process."""
        return self.note(_OFFER) is not None

    def load(self, name: str) -> Program | None:
        """The program of that name, or `None`: also, with a warning, if its file is damaged or may be another's."""
        description = self.note(name)
        if description is None:
            return None
        try:
            file = self._folder / f"{name}.{str(description['sha256'])[:16]}.pt2"
            self._check_owner(file)
            if file.stat().st_size > _LARGEST_PROGRAM or _sha256(file) != description["sha256"]:
                raise ValueError("the file has changed since it was written")
            return Program(file, description)
        except Exception as error:
            self._refuse(f"{name}: {error}")
            return None

    def save(self, name: str, write: Callable[[Path], dict[str, Any]]) -> Program:
        """
        Keeps a program. Where nothing can be written, or others can write, it is for this process only.

        Args:
            name (`str`): its name.
            write (`Callable`): writes the package to a path and returns its description.

        Raises:
            [`CannotBeBuilt`]: if this process cannot load it.
        """
        with tempfile.TemporaryDirectory() as scratch:
            part = Path(scratch, "program.pt2")
            description = write(part)
            sha256 = _sha256(part)
            try:
                # Torch reads the file once, and unpacks it in the temporary folder: that may be full, or run nothing.
                program = Program(part, description)
            except Exception as error:
                raise CannotBeBuilt(f"the program cannot be loaded ({error})") from error
            try:
                self._make_folder()
                self._write(f"{name}.{sha256[:16]}.pt2", part.read_bytes())
                self.take_note(name, {**description, "sha256": sha256})
            except OSError as error:
                logger.warning_once(f"Compiled code is not kept in {self._folder}: {error}.")
        return program

    def note(self, name: str) -> dict[str, Any] | None:
        """What was noted under that name, or `None`."""
        file = self._folder / f"{name}.json"
        try:
            if not file.is_file():
                return None
            self._check_owner(file)
            kept = read_json(file, max_bytes=_LARGEST_DESCRIPTION, max_depth=32)
            if _digest_of(kept["value"]) != kept["sha256"]:
                raise ValueError("the file has changed since it was written")
            return kept["value"]
        except (OSError, ValueError, KeyError, TypeError) as error:
            self._refuse(f"{name}: {error}")
            return None

    def take_note(self, name: str, value: dict[str, Any]) -> None:
        """Keeps something that fits into JSON. Where nothing can be written, nothing is."""
        try:
            self._make_folder()
            self._write(f"{name}.json", json.dumps({"sha256": _digest_of(value), "value": value}).encode())
        except OSError as error:
            logger.warning_once(f"Compiled code is not kept in {self._folder}: {error}.")

    def differences(self) -> list[str]:
        """What is different in the states of the same model that code is offered for, if none is for this one."""
        found: set[str] = set()
        try:
            folders = sorted(self._folder.parent.iterdir())[:_MOST_OTHERS]
        except OSError:
            return []
        for folder in folders:
            if not (folder / f"{_OFFER}.json").is_file():
                continue
            try:
                other = read_json(folder / "state.json", max_bytes=_LARGEST_DESCRIPTION, max_depth=32)
            except (OSError, ValueError, KeyError, TypeError):
                continue
            if isinstance(other, dict) and other.get("config") == self.state["config"]:
                found |= {name for name, value in self.state.items() if other.get(name) != value}
        return sorted(found)

    def _refuse(self, reason: str) -> None:
        reason = " ".join(reason.split())[:200]
        logger.warning_once(
            f"Compiled code in {self._folder} is not used ({reason}). Delete that folder, or set `HF_FALCON_CACHE` to "
            "one of your own, and run `hf-falcon tune --compile` to compile anew."
        )

    def _make_folder(self) -> None:
        if not hasattr(os, "getuid"):
            raise OSError("on this system the owner of a file is not checked")
        for folder in (self._folder.parent, self._folder):
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            _check_owner(folder)
        if not (self._folder / "state.json").is_file():
            self._write("state.json", json.dumps(self.state).encode())

    def _write(self, name: str, data: bytes) -> None:
        # Renamed as a whole: no process reads half of it.
        handle, part = tempfile.mkstemp(dir=self._folder)
        try:
            with os.fdopen(handle, "wb") as stream:
                stream.write(data)
            os.replace(part, self._folder / name)
        except OSError:
            Path(part).unlink(missing_ok=True)
            raise

    def _check_owner(self, file: Path) -> None:
        for each in (self._folder.parent, self._folder, file):
            _check_owner(each)


def shelf_of(target: PreTrainedModel, drafter: Any = None, packed: bool | None = None) -> Shelf:
    """
    Where the programs of a target are, or those of a drafter's passes for it.

    Args:
        target ([`PreTrainedModel`]): the target.
        drafter ([`DraftModel`], *optional*): the drafter.
        packed (`bool`, *optional*): of packed weights or not; as the models are, if left out.
    """
    models = [target] if drafter is None else [target, drafter]
    # Packing replaces the class of linear layers; the state says by itself whether they are packed.
    kinds = {nn.Linear if isinstance(part, nn.Linear) else type(part) for model in models for part in model.modules()}
    configs = [model.config.get_text_config(decoder=True) for model in models]
    attention = [attention_implementation(config) for config in configs]
    # The forward of a whole model is not compiled here.
    compiled = [kind for kind in kinds if not issubclass(kind, PreTrainedModel)]
    return Shelf(
        {
            "config": [_config_of(model) for model in models],
            "source": sorted({_source_of(kind.__module__) for kind in kinds}),
            "code": code_digest(compiled, map(attention_function, attention)),
            "attention": attention,
            "experts": [experts_implementation(config) for config in configs],
            "dtype": [str(model.dtype) for model in models],
            "packing": [is_packed(model) if packed is None else packed for model in models],
            **_machine(),
        }
    )


def _config_of(model: PreTrainedModel) -> str:
    # Where it was loaded from does not matter.
    config = {name: value for name, value in model.config.to_dict().items() if name != "_name_or_path"}
    try:
        text = json.dumps(config, sort_keys=True, default=str)
    except TypeError:
        # Keys of several types have no order.
        text = repr(config)
    return f"{type(model).__name__} {hashlib.sha256(text.encode()).hexdigest()[:32]}"


@cache
def _machine() -> dict[str, Any]:
    """The processor, where code depends on it the number of cores, and the versions."""
    own = [hashlib.sha256(file.read_bytes()).hexdigest() for file in sorted(Path(__file__).parent.glob("*.py"))]
    return {
        "processor": processor_digest(),
        "capability": torch.backends.cpu.get_cpu_capability(),
        "cores": os.cpu_count() if tiles_pay() else None,
        "python": platform.python_version(),
        "torch": str(torch.__version__),
        "transformers": transformers_version,
        "hf_falcon": [__version__, hashlib.sha256(repr(own).encode()).hexdigest()[:32]],
    }


@cache
def _source_of(module: str) -> str:
    """The name of a module of Python, and a digest of its file."""
    try:
        digest = hashlib.sha256(Path(sys.modules[module].__file__ or "").read_bytes()).hexdigest()[:16]
    except (OSError, KeyError, AttributeError):
        # A frozen application has no files; the versions then speak for them.
        digest = ""
    return f"{module} {digest}"


def _check_owner(file: Path) -> None:
    """
    Raises:
        `OSError`: if somebody else could have written to a file or folder.
    """
    found = file.lstat()
    if stat.S_ISLNK(found.st_mode):
        raise OSError(f"{file.name} is a link")
    if not hasattr(os, "getuid") or found.st_uid != os.getuid():
        raise OSError(f"{file.name} belongs to another user")
    if found.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        raise OSError(f"others may write to {file.name}: take that permission away")


def _digest_of(value: Any) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()


def _sha256(file: Path) -> str:
    return hashlib.sha256(file.read_bytes()).hexdigest()
