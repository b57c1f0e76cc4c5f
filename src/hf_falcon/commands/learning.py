# Copyright 2026 The hf_falcon authors. Licensed under the Apache License, Version 2.0.
"""`--learn FOLDER` of `hf-falcon serve` and `hf-falcon chat`, and the folder in `hf-falcon doctor`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from ..json_files import read_json
from ..learning.learning_statistics import LearningStatistics
from ..learning.state import DRAFTER_NAME, REPORT_NAME


def learnt_report(folder: Path) -> dict[str, Any] | None:
    """
    What a learner has written about itself into its folder; `None` if the folder is of no learner.

    Raises:
        `ValueError`: if the file is damaged.
    """
    path = folder / REPORT_NAME
    if not path.is_file():
        return None
    found = read_json(path)
    if not isinstance(found, dict) or not LearningStatistics.__dataclass_fields__.keys() <= found.keys():
        raise ValueError(f"{path} is not the report of a learner: delete it, or give its folder `{DRAFTER_NAME}`.")
    return found


def learnt_drafter(folder: Path) -> Path:
    """
    The drafter in a learner's folder.

    Raises:
        `FileNotFoundError`: if it has none yet.
    """
    found = folder / DRAFTER_NAME
    if not (found / "config.json").is_file():
        raise FileNotFoundError(
            f"`drafter` is {str(folder)!r}, where a drafter learns that has not been saved yet: give the drafter "
            "that it began with, or come back later."
        )
    return found


def describe(report: dict[str, Any]) -> str:
    """A learner's report in a few lines."""
    fields = {name: report[name] for name in LearningStatistics.__dataclass_fields__}
    found = LearningStatistics(**fields)
    share = found.learning_seconds / max(1e-9, found.call_seconds)
    return (
        f"Learnt while serving: {found}. Learning took {found.learning_seconds:,.0f} s, {share:.0%} of the time of "
        f"calls, for {found.trained_tokens:,} predicted tokens."
    )
