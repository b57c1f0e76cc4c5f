# Copyright 2026 The hf_falcon authors. Licensed under the Apache License, Version 2.0.
"""Records that are left out because they cannot be read: counted by reason, and a limit for their share."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from ..bench.tables import aligned
from .records import RecordError

# Of each reason, the numbers that the table names.
_NUMBERS = 5
# After so many records a share is no accident of the first ones.
_ENOUGH = 10_000


@dataclass
class _Reason:
    count: int
    numbers: list[int]
    # The whole text of the first one.
    example: str


@dataclass
class SkippedRecords:
    """
    Counts the records that cannot be read.

    Args:
        max_share (`float`, *optional*, defaults to 0.05): the share of them that is tolerated.
        argument (`str`, *optional*): the argument that sets the share, if a user can.
    """

    max_share: float = 0.05
    argument: str | None = None
    read: int = 0
    reasons: dict[str, _Reason] = field(default_factory=dict)

    @property
    def count(self) -> int:
        return sum(reason.count for reason in self.reasons.values())

    def add(self, error: RecordError, number: int) -> None:
        """
        Counts a record, which is one of those that were `read`.

        Raises:
            `ValueError`: after 10,000 records, more than `max_share` cannot be read.
        """
        reason = self.reasons.setdefault(error.reason, _Reason(0, [], str(error)))
        reason.count += 1
        if len(reason.numbers) < _NUMBERS:
            reason.numbers.append(number)
        if self.read >= _ENOUGH:
            self.check()

    def check(self) -> None:
        """
        Compares the share with the limit, at the end of the data.

        Raises:
            `ValueError`: with the counts, and the first record of each reason.
        """
        if self.count > self.max_share * self.read:
            # One line, as all errors of the commands.
            found = ", ".join(f"{reason.count} because of {name}" for name, reason in self.reasons.items())
            limit, remedy = f"a share of {self.max_share:g}", ""
            if self.argument is not None:
                limit, remedy = f"`{self.argument}` ({self.max_share:g})", f", or raise `{self.argument}`"
            examples = " ".join(reason.example for reason in self.reasons.values())
            raise ValueError(
                f"{self.count} of {self.read} records cannot be read ({found}), more than {limit}. The first of each "
                f"kind: {examples} Correct or remove such records{remedy}."
            )

    def to_dict(self) -> dict[str, dict[str, Any]]:
        """Of each reason, how many `records` were left out, and the first of their `numbers`. JSON values."""
        found = sorted(self.reasons.items(), key=lambda item: (-item[1].count, item[0]))
        return {name: {"records": reason.count, "numbers": list(reason.numbers)} for name, reason in found}


def skipped_table(found: dict[str, dict[str, Any]]) -> str:
    """What [`SkippedRecords.to_dict`] gives, as aligned text."""
    rows = [["skipped because of", "records", "numbers"]]
    for name, reason in found.items():
        more = ", ..." if reason["records"] > len(reason["numbers"]) else ""
        rows.append([name, f"{reason['records']:,}", ", ".join(map(str, reason["numbers"])) + more])
    return aligned(rows)


def check_bad_share(value: float) -> None:
    """
    Checks the argument `max_bad_share`.

    Raises:
        `ValueError`: naming field, value and remedy.
    """
    if not 0 <= value <= 1:
        raise ValueError(f"`max_bad_share` is {value}: give a share from 0 to 1 (0.05 is 5 %).")
