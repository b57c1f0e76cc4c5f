# Copyright 2026 The hf_falcon authors. Licensed under the Apache License, Version 2.0.
"""A benchmark's rows as a table and a picture."""

from __future__ import annotations

import io
from typing import Any

from ..commands.report import aligned

Row = dict[str, Any]


def table(rows: list[Row]) -> str:
    """The one table that matters first: how much faster each method is on each data set."""
    methods = list(dict.fromkeys(row["method"] for row in rows))
    data = list(dict.fromkeys(row["data"] for row in rows))
    by_key = {(row["method"], row["data"]): row for row in rows}
    cells = [["speed-up", *data, "tau", "identical"]]
    for method in methods:
        found = [by_key.get((method, name)) for name in data]
        last = found[-1] or {}
        tau = last.get("tau")
        cells.append(
            [
                method,
                *(
                    "" if row is None else "differs" if row["speedup"] is None else f"{row['speedup']:.2f}"
                    for row in found
                ),
                "" if tau is None else f"{tau:.2f}",
                f"{last['identical_prompts']}/{last['num_prompts']}" if last else "",
            ]
        )
    return aligned(cells)


def markdown(environment: dict[str, Any], rows: list[Row], absent: dict[str, str], exact: bool) -> str:
    """The whole report."""
    lines = ["# Benchmark", "", *(f"- {name}: {value}" for name, value in environment.items()), ""]
    head = [
        "method",
        "data",
        "prompts",
        "tokens/s",
        "speed-up",
        "middle half",
        "tau",
        "alpha",
        "identical",
        "parts at",
        "gap",
    ]
    lines += [_line(head), _line(["---"] * len(head))]
    for row in rows:
        spread = row["speedup_spread"]
        lines.append(
            _line(
                [
                    row["method"],
                    row["data"],
                    str(row["num_prompts"]),
                    f"{row['tokens_per_second']:.1f}",
                    "differs" if row["speedup"] is None else f"{row['speedup']:.2f}",
                    "" if spread is None else f"{spread[0]:.2f} to {spread[1]:.2f}",
                    _number(row["tau"]),
                    "" if row["alpha"] is None else f"{100 * row['alpha']:.1f} %",
                    f"{row['identical_prompts']}/{row['num_prompts']}",
                    "" if row["median_first_difference"] is None else f"{row['median_first_difference']:.0f}",
                    _number(row["median_logit_gap"]),
                ]
            )
        )
    lines += [
        "",
        "Speed-up: plain decoding's time over the method's, for as many tokens, all prompts together; middle half: "
        "the quartiles over answers. tau: draft tokens accepted a round; alpha: their share of all tokens. Parts at, "
        "gap: medians over answers that are not plain decoding's, of the first token that differs, and of how much "
        "more plain decoding's logit of its own token is than that of the other.",
    ]
    if exact:
        lines.append("A method whose tokens differ in float32 gets no speed-up.")
    lines += [f"Not run: `{name}`, because {why}." for name, why in absent.items()]
    return "\n".join(lines) + "\n"


def picture(rows: list[Row]) -> bytes:
    """
    The report's picture, a PNG file: speed-up by data set and method, acceptance by depth, where a round's time goes.

    Raises:
        `ImportError`: without matplotlib.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(15, 4.5), layout="constrained")
    speed, depths, times = figure.subplots(1, 3)
    methods = list(dict.fromkeys(row["method"] for row in rows))
    data = list(dict.fromkeys(row["data"] for row in rows))
    width = 0.8 / len(methods)
    for number, method in enumerate(methods):
        found = {row["data"]: row["speedup"] or 0.0 for row in rows if row["method"] == method}
        places = [place + (number - (len(methods) - 1) / 2) * width for place in range(len(data))]
        speed.bar(places, [found.get(name, 0.0) for name in data], width, label=method)
    speed.axhline(1.0, color="black", linewidth=0.8)
    speed.set_xticks(range(len(data)), data)
    speed.set_title("speed-up over plain decoding")
    speed.legend(fontsize=8)

    drafting = [row for row in rows if row["data"] == data[-1] and row["accepted_by_depth"]]
    for row in drafting:
        depths.plot(range(1, len(row["accepted_by_depth"]) + 1), row["accepted_by_depth"], "o-", label=row["method"])
    depths.set_title("rounds with an accepted token of that depth")
    depths.set_xlabel("depth")
    if drafting:
        depths.legend(fontsize=8)

    left = [0.0] * len(drafting)
    for part in ("target", "drafter", "other"):
        shares = [row["time"][part] / (sum(row["time"].values()) or 1.0) for row in drafting]
        times.barh([row["method"] for row in drafting], shares, left=left, label=part)
        left = [before + share for before, share in zip(left, shares)]
    times.set_title("where the time goes")
    if drafting:
        times.legend(fontsize=8)

    file = io.BytesIO()
    FigureCanvasAgg(figure).print_png(file)
    return file.getvalue()


def _line(cells: list[str]) -> str:
    return f"| {' | '.join(cells)} |"


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:.2f}"
