# Copyright 2026 The hf_falcon authors. Licensed under the Apache License, Version 2.0.
"""
Draws the README's chart, `docs/images/speedup.svg`, from the tables of `docs/benchmarks.md`.

    python docs/draw_speedups.py
"""

import re
from pathlib import Path

import matplotlib

matplotlib.use("svg")

import matplotlib.pyplot as plt

DOCS = Path(__file__).parent
# Row of a table, label of its bars, their colour.
METHODS = [
    ("bfloat16: prompt lookup, 8 tokens (transformers)", "prompt lookup (transformers)", "#b0b7c3"),
    ("bfloat16: falcon", "hf_falcon", "#5b8def"),
    ("bfloat16: falcon, packed and compiled", "hf_falcon, packed and compiled", "#1f3d7a"),
]
COLUMNS = ["MT-bench", "HumanEval", "GSM8K", "all"]


def speedups(page: str, method: str) -> list[float]:
    """The speed-ups of the first row for a method, in the order of `COLUMNS`."""
    row = re.search(rf"^\| {re.escape(method)} \| (.*)$", page, re.MULTILINE)
    if row is None:
        raise ValueError(f"benchmarks.md has no row {method!r}: rename it in METHODS.")
    return [float(cell) for cell in row.group(1).split(" | ")[: len(COLUMNS)]]


def main() -> None:
    """Writes the chart."""
    page = (DOCS / "benchmarks.md").read_text(encoding="utf-8")
    # Texts stay texts, and the same numbers give the same file.
    plt.rcParams.update({"svg.fonttype": "none", "svg.hashsalt": "speedups", "font.size": 10})
    figure, axes = plt.subplots(figsize=(8, 3.4))
    width = 0.8 / len(METHODS)
    for number, (method, label, colour) in enumerate(METHODS):
        places = [place + (number - (len(METHODS) - 1) / 2) * width for place in range(len(COLUMNS))]
        bars = axes.bar(places, speedups(page, method), width * 0.92, label=label, color=colour)
        axes.bar_label(bars, fmt="%.2f", fontsize=8, padding=2)
    axes.axhline(1, color="black", linewidth=0.8, linestyle="--")
    axes.set_xticks(range(len(COLUMNS)), COLUMNS)
    axes.set_ylabel("times as fast as plain generate")
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False, loc="upper center", bbox_to_anchor=(0.5, 1.2), ncols=len(METHODS))
    axes.text(
        0.5,
        -0.2,
        "SmolLM2-135M-Instruct, bfloat16, two CPU cores, 64 new tokens; 80 prompts a file",
        transform=axes.transAxes,
        ha="center",
        fontsize=8,
        color="#555555",
    )
    figure.savefig(DOCS / "images" / "speedup.svg", bbox_inches="tight", facecolor="white", metadata={"Date": None})


if __name__ == "__main__":
    main()
