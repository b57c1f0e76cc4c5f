# Copyright 2026 The hf_falcon authors. Licensed under the Apache License, Version 2.0.
"""What one call of `generate` did, and the file that a benchmark keeps of these."""

from __future__ import annotations

import json
import os
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

TRACES_NAME = "traces.jsonl"


@dataclass
class Trace:
    """
    One answer.

    Args:
        method, data (`str`): how it was decoded, and the data set that its prompt is from.
        prompt, turn (`int`): which prompt of the data set, and which turn of it.
        tokens (`list[int]`): the new tokens.
        seconds (`list[float]`): time of each timed run.
        statistics (`dict`, *optional*): `draft_statistics` of the last run, where a drafter was used.
        gap (`float`, *optional*): where the tokens part from those of plain decoding, how much more plain decoding's
            logit of its own token is than that of the other. `None` where they do not part.
        peak_memory_mb (`float`): most memory in use: of the device on CUDA, else of the process since it began.
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
    Traces as JSON lines behind a first line that says what was measured; every trace is on the disk once it is added.

    Args:
        folder (`str` or `Path`): where the file is, or will be.
        settings (`dict`): what the traces depend on. JSON values.

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
        found = json.loads(whole[0])
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
            trace = Trace(**json.loads(line))
            self.traces[trace.key] = trace

    def add(self, trace: Trace) -> None:
        """Keeps a trace."""
        with self._path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(asdict(trace)) + "\n")
            file.flush()
            os.fsync(file.fileno())
        self.traces[trace.key] = trace
