# Copyright 2026 The hf_falcon authors. Licensed under the Apache License, Version 2.0.
"""Tables as aligned text."""

from __future__ import annotations


def aligned(cells: list[list[str]]) -> str:
    """Rows of cells in columns, the first one to the left, with a line below the first row."""
    widths = [max(map(len, column)) for column in zip(*cells)]
    lines = [
        "  ".join([line[0].ljust(widths[0]), *(cell.rjust(width) for cell, width in zip(line[1:], widths[1:]))])
        for line in cells
    ]
    lines.insert(1, "-" * len(lines[0]))
    return "\n".join(lines)
