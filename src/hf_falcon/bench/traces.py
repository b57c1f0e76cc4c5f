# Copyright 2026 The hf_falcon authors. Licensed under the Apache License, Version 2.0.
"""The record of one call of `generate`, and the file in which a benchmark keeps these records."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

TRACES_NAME = "traces.jsonl"


@dataclass
class Trace:
    """
    One answer of one method.

    Args:
        method, data (`str`): the decoding method, and the data set of the prompt.
        prompt, turn (`int`): the number of the prompt in the data set, and of the turn in the prompt.
        tokens (`list[int]`): the new tokens.
        seconds (`list[float]`): time of each timed run.
        statistics (`dict`, *optional*): `draft_statistics` of the last run, where a drafter was used.
        gap (`float`, *optional*): at the first token that diverges from plain decoding, the logit of plain decoding's
            token minus the logit of this method's. `None` if none diverges.
        peak_memory_mb (`float`): peak memory, of the device on CUDA, else of the process since it began.
    """

    method: str
    data: str
    prompt: int
    turn: int
    tokens: list[int]
    seconds: list[float]
    statistics: dict[str, Any] | None
    gap: float | None
    peak_memory_mb: float

    @property
    def key(self) -> tuple[str, str, int, int]:
        return self.method, self.data, self.prompt, self.turn


class TraceFile:
    """
    Traces as JSON lines, after a first line with the settings. A trace is on disk as soon as it is added.

    Args:
        folder (`str` or `Path`): where the file is, or will be.
        settings (`dict`): all that the traces depend on, as JSON values.

    Raises:
        `ValueError`: if the folder holds traces that were made with other settings.
    """

    def __init__(self, folder: str | Path, settings: dict[str, Any]):
        self._path = Path(folder) / TRACES_NAME
        self._path.parent.mkdir(parents=True, exist_ok=True)
        self.traces: dict[tuple[str, str, int, int], Trace] = {}
        lines = self._path.read_bytes().splitlines(keepends=True) if self._path.exists() else []
        # A killed run can leave half a line.
        whole = [line for line in lines if line.endswith(b"\n")]
        if not whole:
            self._path.write_text(json.dumps(settings) + "\n", encoding="utf-8")
            return
        found = self._read(whole[0], dict)
        # As the file has them: tuples are lists there.
        for name, value in json.loads(json.dumps(settings)).items():
            if found.get(name) != value:
                raise ValueError(
                    f"{self._path} was measured with `{name}` {found.get(name)!r}, and this run has {value!r}: give "
                    "another `output`, or delete this one."
                )
        if len(whole) < len(lines):
            os.truncate(self._path, sum(map(len, whole)))
        for line in whole[1:]:
            trace = self._read(line, lambda fields: Trace(**fields))
            self.traces[trace.key] = trace

    def _read(self, line: bytes, make: Callable[[Any], Any]) -> Any:
        try:
            return make(json.loads(line))
        except (ValueError, TypeError) as error:
            raise ValueError(f"{self._path} cannot be read ({error}): delete it, or give another `output`.") from error

    def add(self, trace: Trace) -> None:
        """Writes a trace."""
        with self._path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(asdict(trace)) + "\n")
            file.flush()
            os.fsync(file.fileno())
        self.traces[trace.key] = trace
