# Copyright 2026 The hf_falcon authors. Licensed under the Apache License, Version 2.0.
"""Small functions of several tests: a JSON file is edited, memory is measured, values are compared."""

import json
import resource
import sys
from pathlib import Path

import torch


def edit(file: Path, **changes) -> None:
    file.write_text(json.dumps({**json.loads(file.read_text()), **changes}))


def peak_memory() -> int:
    """Bytes, of this process so far."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


def close(actual, expected, tolerance=1e-5):
    torch.testing.assert_close(actual, expected, rtol=tolerance, atol=tolerance)
