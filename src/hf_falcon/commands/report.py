# Copyright 2026 The hf_falcon authors. Licensed under the Apache License, Version 2.0.
"""The measurements of the demo and their summary: plain Python, no model."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from ..bench.tables import aligned


@dataclass
class Row:
    """
    The measurements of one prompt.

    Args:
        name (`str`): The prompt's name.
        tokens (`int`): New tokens of plain decoding.
        assisted_tokens (`int`): New tokens with the drafter; they can differ by rounding, except in float32.
        plain_seconds (`float`): Median time of plain decoding.
        assisted_seconds (`float`): Median time with the drafter.
        tau (`float`): Accepted draft tokens a round.
        alpha (`float`): Accepted draft tokens as a share of all new tokens.
        identical (`bool`): Whether both gave the same tokens where they are compared.
    """

    name: str
    tokens: int
    assisted_tokens: int
    plain_seconds: float
    assisted_seconds: float
    tau: float
    alpha: float
    identical: bool

    @property
    def comparable_seconds(self) -> float:
        """Time with the drafter for as many tokens as plain decoding gave: a shorter output is no speed-up."""
        return self.assisted_seconds * self.tokens / self.assisted_tokens

    @property
    def tokens_per_round(self) -> float:
        """The acceptance length: accepted draft tokens and the target's own token."""
        return self.tau + 1

    @property
    def speedup(self) -> float:
        return self.plain_seconds / self.comparable_seconds


def overall_speedup(rows: list[Row]) -> float:
    """Time of plain decoding over time with the drafter, all prompts together."""
    return sum(row.plain_seconds for row in rows) / sum(row.comparable_seconds for row in rows)


def summary(rows: list[Row]) -> dict[str, Any]:
    """The object that `--json` prints."""
    names = ["name", "tokens", "plain_seconds", "assisted_seconds", "speedup", "tokens_per_round", "tau", "alpha"]
    names.append("identical")
    return {
        "prompts": [{name: getattr(row, name) for name in names} for row in rows],
        "speedup": overall_speedup(rows),
        "identical": all(row.identical for row in rows),
    }


def table(rows: list[Row]) -> str:
    """The measurements as aligned text, one line a prompt."""
    head = [
        "prompt",
        "tokens",
        "plain s",
        "assisted s",
        "plain tok/s",
        "assisted tok/s",
        "speed-up",
        "tokens/round",
        "tau",
        "identical",
    ]
    cells = [head] + [
        [
            row.name,
            str(row.tokens) if row.tokens == row.assisted_tokens else f"{row.tokens}/{row.assisted_tokens}",
            f"{row.plain_seconds:.2f}",
            f"{row.assisted_seconds:.2f}",
            f"{row.tokens / row.plain_seconds:.1f}",
            f"{row.assisted_tokens / row.assisted_seconds:.1f}",
            f"{row.speedup:.2f}",
            f"{row.tokens_per_round:.2f}",
            f"{row.tau:.2f}",
            "yes" if row.identical else "NO",
        ]
        for row in rows
    ]
    return aligned(cells)


def run_order(repeats: int) -> list[bool]:
    """Whether each run is assisted. The order alternates, so that a drift of the machine favours neither."""
    return [
        assisted for repeat in range(repeats) for assisted in ((False, True) if repeat % 2 == 0 else (True, False))
    ]
