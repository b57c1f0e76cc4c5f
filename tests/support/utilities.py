# Copyright 2026 The hf_falcon authors. Licensed under the Apache License, Version 2.0.
"""Small functions of several tests: JSON and files of whole models, measured memory, compared values."""

import importlib
import json
import resource
import sys
from contextlib import suppress
from pathlib import Path

import torch
from torch.serialization import get_unsafe_globals_in_checkpoint, safe_globals


def edit(file: Path, **changes) -> None:
    file.write_text(json.dumps({**json.loads(file.read_text()), **changes}))


def start_peak() -> int:
    """Bytes that this process has now. On Linux `peak_memory` then forgets what was before."""
    # Where it cannot be written, the peak is that of the whole process.
    with suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5")
    return peak_memory()


def peak_memory() -> int:
    """Bytes that this process had at most since `start_peak`."""
    if sys.platform == "linux":
        lines = Path("/proc/self/status").read_text().splitlines()
        return next(int(line.split()[1]) for line in lines if line.startswith("VmHWM")) * 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


def changes_nothing(hook):
    """Marks a hook that only counts, or breaks a call off: the probe then need not try its target anew."""
    hook.__module__ = "hf_falcon.tests"
    return hook


def close(actual, expected, tolerance=1e-5):
    torch.testing.assert_close(actual, expected, rtol=tolerance, atol=tolerance)


def load_model(file):
    """A whole model that `torch.save` wrote. Only classes of these packages are made, and no other code is run."""
    names = [name.rsplit(".", 1) for name in get_unsafe_globals_in_checkpoint(file)]
    assert {module.split(".")[0] for module, _ in names} <= {"torch", "transformers", "hf_falcon"}
    file.seek(0)
    with safe_globals([getattr(importlib.import_module(module), name) for module, name in names]):
        return torch.load(file, weights_only=True)
