# Copyright 2026 The hf_falcon authors. Licensed under the Apache License, Version 2.0.
"""The signals that end a command from outside, which then saves what was learnt."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any


@contextmanager
def ended_by_signals(end: Callable[[int, Any], Any]) -> Iterator[None]:
    """
    Inside, SIGTERM and SIGHUP call `end`. By default the process would end without saving what was learnt.

    Args:
        end (`Callable`): a handler of SIGTERM, which raises. It is called once: nothing interrupts the saving.
    """

    def end_once(number: int, frame: Any) -> None:
        for each in before:
            signal.signal(each, signal.SIG_IGN)
        end(number, frame)

    # How services are ended.
    handlers: dict[int, Callable[[int, Any], Any]] = {signal.SIGTERM: end_once}
    # What a terminal that is closed sends, often twice; not on Windows, and ignored under `nohup`. A server that runs
    # has a handler of SIGTERM of its own, and none of SIGHUP.
    if hasattr(signal, "SIGHUP") and signal.getsignal(signal.SIGHUP) != signal.SIG_IGN:
        handlers[signal.SIGHUP] = lambda *_: signal.raise_signal(signal.SIGTERM)
    before = {number: signal.signal(number, handler) for number, handler in handlers.items()}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
