# Copyright 2026 The hf_falcon authors. Licensed under the Apache License, Version 2.0.
"""
How the threads of an operation wait for each other while other processes use the cores, too.

GNU's OpenMP, which torch has on Linux, lets a thread that has finished its part loop for up to a millisecond. On a
quiet machine nothing is faster. Beside other processes the loop uses up the thread's turn on its core: the next
operation then waits until the core is given back. A thread that sleeps instead gets the core as soon as there is work.

OpenMP reads its settings once, when torch is loaded. But where a process has more threads than cores, it lets them
loop a hundred times at most (GCC's manual of libgomp, `GOMP_SPINCOUNT`). So while this process waits for cores, it
keeps further threads, which have run one operation and do nothing. Results are the same bits, because each operation
has as many threads as before.
"""

from __future__ import annotations

import logging
import os
import sys
import threading
import time
import weakref
from contextlib import suppress
from pathlib import Path

import torch

logger = logging.getLogger(__name__)

# Whoever sets one of these has decided how threads wait.
_SETTINGS = "OMP_WAIT_POLICY", "GOMP_SPINCOUNT"
_THREADS = Path("/proc/self/task")
# Seconds between two looks; a look takes 20 microseconds.
_INTERVAL = 0.1
# The share of the time that one of the threads waits for a core: 0.00 and 0.01 on a quiet machine of two cores, 0.22
# to 0.53 beside one and two processes, however the threads wait for each other.
_BUSY = 0.1
# Further threads that each have a group of threads of OpenMP, at most. With more cores than that there is room.
_MOST_GROUPS = 4
# torch gives a thread this many elements at least.
_ELEMENTS = 2**15


class BusyCores:
    """
    Keeps further threads while calls run and this process waits for cores. One object serves all calls of a process.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._calls: weakref.WeakSet[object] = weakref.WeakSet()
        self._watcher: threading.Thread | None = None
        # What the latest look said. The next call begins with it.
        self._is_busy = False
        # Set where the further threads end.
        self._ended = threading.Event()
        self._ended.set()

    def begin(self, call: object) -> None:
        """A call begins, and lasts as long as the object `call`."""
        if groups() == 0:
            return
        with self._lock:
            self._calls.add(call)
            if self._watcher is None:
                watcher = threading.Thread(target=self._watch, name="hf_falcon-busy-cores", daemon=True)
                # Where no thread can be started, as at the end of the interpreter, the call runs without it.
                with suppress(RuntimeError):
                    watcher.start()
                    self._watcher = watcher
                    self._adapt()

    def _watch(self) -> None:
        before, waited = time.monotonic(), waiting_times()
        while True:
            time.sleep(_INTERVAL)
            now, waiting = time.monotonic(), waiting_times()
            longest = max((seconds - waited.get(name, seconds) for name, seconds in waiting.items()), default=0.0)
            with self._lock:
                if not self._calls:
                    self._watcher = None
                    self._ended.set()
                    return
                self._is_busy = longest > _BUSY * (now - before)
                self._adapt()
            before, waited = now, waiting

    def _adapt(self) -> None:
        if not self._is_busy:
            self._ended.set()
        elif self._ended.is_set():
            logger.debug("Other processes use the cores: threads that wait for each other sleep.")
            self._ended = threading.Event()
            with suppress(RuntimeError):
                for _ in range(groups()):
                    stay = threading.Thread(
                        target=_stay, args=(self._ended,), name="hf_falcon-busy-cores", daemon=True
                    )
                    stay.start()


def _stay(ended: threading.Event) -> None:
    # OpenMP gives a thread that runs an operation a group of its own, which the thread has until it ends.
    torch.ones(torch.get_num_threads() * _ELEMENTS, device="cpu").add_(1)
    ended.wait()


def groups() -> int:
    """
    The number of groups of threads of OpenMP that make more threads than cores; 0 where operations have one thread, or
    few threads for many cores, where the user has decided how threads wait, and on systems other than Linux.
    """
    threads = torch.get_num_threads()
    if sys.platform != "linux" or threads == 1 or any(name in os.environ for name in _SETTINGS):
        return 0
    # OpenMP counts the process and, for each group, its threads but one.
    needed = (len(os.sched_getaffinity(0)) - 1) // (threads - 1)
    return needed if needed <= _MOST_GROUPS else 0


def waiting_times() -> dict[str, float]:
    """How many seconds each thread of this process has waited for a core, by the thread's number."""
    found = {}
    for thread in _THREADS.iterdir() if _THREADS.is_dir() else ():
        try:
            found[thread.name] = int((thread / "schedstat").read_text().split()[1]) / 1e9
        except (OSError, IndexError):
            # The thread has ended, or the kernel does not count.
            continue
    return found


busy_cores = BusyCores()
if sys.platform != "win32":
    # A fork has none of these threads, and the lock as it was.
    os.register_at_fork(after_in_child=busy_cores.__init__)  # type: ignore[misc]
