# Copyright 2026 The hf_falcon authors. Licensed under the Apache License, Version 2.0.
"""Other processes that compute: a machine that is never quiet."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

# It ends by itself when the process that started it is killed.
_BUSY = "import os\nparent = os.getppid()\nprint(flush=True)\nwhile os.getppid() == parent:\n    sum(range(100_000))"


@contextmanager
def busy_processes(count: int) -> Iterator[list[subprocess.Popen[bytes]]]:
    """
    Inside, `count` other processes compute without a pause, each on one core and at the usual priority.

    Args:
        count (`int`): the number of processes; 0 leaves the machine as it is.
    """
    processes: list[subprocess.Popen[bytes]] = []
    try:
        for _ in range(count):
            processes.append(subprocess.Popen([sys.executable, "-c", _BUSY], stdout=subprocess.PIPE))
        for process in processes:
            assert process.stdout is not None
            process.stdout.readline()
        yield processes
    finally:
        for process in processes:
            process.kill()
        for process in processes:
            process.communicate()
