# Copyright 2026 The hf_falcon authors. Licensed under the Apache License, Version 2.0.
"""The costs that `hf-falcon tune` measured, in files: the loop begins from them."""

from __future__ import annotations

import hashlib
import json
import os
import tempfile
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import constants
from transformers import PreTrainedModel
from transformers import __version__ as transformers_version
from transformers.utils import logging

from .checkpoint_files import weights_fingerprint
from .core.costs import CostKey
from .core.interfaces import register_part
from .cpu.guessed_costs import guessed_costs
from .cpu.processor import processor_digest
from .json_files import read_json

logger = logging.get_logger(__name__)

# Of a file: its bytes, and the times of a forward that can have been measured.
_LARGEST_FILE, _SECONDS = 2**16, (1e-9, 3600.0)


def install() -> None:
    """Makes the loop begin from the costs that were measured for a target, or from a guess for this processor."""
    register_part("prior", prior)


def cache_folder() -> Path:
    """Where the package keeps what it found on this machine: `HF_FALCON_CACHE`, or a folder in the Hub's own."""
    given = os.environ.get("HF_FALCON_CACHE")
    return Path(os.path.expanduser(given)) if given else Path(constants.HF_HOME) / "hf_falcon"


def prior(target: PreTrainedModel, cost_key: CostKey) -> dict[int, float] | None:
    """The target's times by draft nodes: those that are kept, or a guess for this processor, or `None`."""
    return load(target, cost_key) or guessed_costs(cost_key)


def load(target: PreTrainedModel, cost_key: CostKey) -> dict[int, float] | None:
    """The times that are kept for a target, or `None`: also if the file holds anything that `save` does not write."""
    try:
        # The name of a file is a digest of the weights, too, which takes some milliseconds of a first call.
        if not _folder().is_dir():
            return None
        kept = read_json(_file(target, cost_key)[0], max_bytes=_LARGEST_FILE, max_depth=2)
        seconds = {int(size): float(value) for size, value in kept["seconds"].items()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None
    # The target will run with these sizes, and is asked for no larger ones.
    are_sizes = 0 in seconds and all(0 <= size <= cost_key.max_nodes for size in seconds)
    shortest, longest = _SECONDS
    return seconds if are_sizes and all(shortest <= value <= longest for value in seconds.values()) else None


def save(target: PreTrainedModel, cost_key: CostKey, seconds: dict[int, float]) -> None:
    """Keeps times for a target. Where nothing can be written they are measured again next time."""
    file, key = _file(target, cost_key)
    write_json(file, {**key, "seconds": seconds})


def write_json(file: Path, value: dict[str, Any]) -> None:
    """Writes a file as a whole or not at all. Where nothing can be written, nothing is."""
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        # Written in a folder of its own and renamed: no process reads half of it, and nothing is left of a failure.
        with tempfile.TemporaryDirectory(dir=file.parent) as folder:
            part = Path(folder, file.name)
            part.write_text(json.dumps(value, indent=2), encoding="utf-8")
            os.replace(part, file)
    except OSError as error:
        logger.debug(f"{file.name} is not kept: {error}")


def _file(target: PreTrainedModel, cost_key: CostKey) -> tuple[Path, dict[str, Any]]:
    """The file of a target's times, and the key that it holds."""
    key = {
        **cost_key._asdict(),
        "target": weights_fingerprint(target) or type(target).__name__,
        # A home folder may be shared by machines.
        "processor": processor_digest() if cost_key.device.startswith("cpu") else None,
        "torch": str(torch.__version__),
        "transformers": transformers_version,
    }
    digest = hashlib.sha256(json.dumps(key, sort_keys=True).encode()).hexdigest()[:16]
    return _folder() / f"{digest}.json", key


def _folder() -> Path:
    return cache_folder() / "costs"
