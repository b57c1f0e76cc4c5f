# Copyright 2026 The hf_falcon authors. Licensed under the Apache License, Version 2.0.
"""What tests of several modules do to files and ask of the process."""

import json
import resource
import sys
from pathlib import Path


def edit(file: Path, **changes) -> None:
    file.write_text(json.dumps({**json.loads(file.read_text()), **changes}))


def peak_memory() -> int:
    """Bytes, of this process so far."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
