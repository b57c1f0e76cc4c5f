# Copyright 2026 The hf_falcon authors. Licensed under the Apache License, Version 2.0.
"""The rows of a benchmark as tables and a picture."""

from __future__ import annotations

import io
from typing import Any

from .tables import aligned

Row = dict[str, Any]


def scale(name: str) -> str:
    """The name of a scaled network in reports."""
    return f"{name.upper()}-shaped network"


def memory(row: Row) -> str:
    """The memory of a row's drafter, in a sentence."""
    return (
        f"Drafter, its cache and tree: {row['drafter_memory_mb']:.1f} MB, "
        f"{100 * row['drafter_memory_share']:.1f} % of the target's weights."
    )


def operations(row: Row) -> str:
    """What a row's rounds ask of the device, in a sentence."""
    if row.get("operations") is None:
        return "No round was run that could be counted."
    waits = "" if row["synchronisations"] is None else f", and waits for the device {row['synchronisations']:g} times"
    return (
        f"Beside the target's forward, a round launches {row['operations']:.0f} operations: "
        f"{100 * row['operations_share']:.0f} % of a plain step's{waits}."
    )


def table(rows: list[Row]) -> str:
    """The speed-up of each method on each data set, as aligned text."""
    methods = list(dict.fromkeys(row["method"] for row in rows))
    data = list(dict.fromkeys(row["data"] for row in rows))
    by_key = {(row["method"], row["data"]): row for row in rows}
    scaled = rows[0].get("scaled")
    title = "speed-up" if scaled is None else f"speed-up, {scale(scaled)}"
    cells = [[title, *data, "slowest", "tokens/round", "tau", "identical"]]
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
                _number(last.get("slowest_speedup")),
                "" if tau is None else f"{tau + 1:.2f}",
                "" if tau is None else f"{tau:.2f}",
                f"{last['identical_prompts']}/{last['num_prompts']}" if last else "",
            ]
        )
    return aligned(cells)


def markdown(environment: dict[str, Any], rows: list[Row], absent: dict[str, str], exact: bool) -> str:
    """The whole report, in Markdown."""
    lines = ["# Benchmark", "", *(f"- {name}: {value}" for name, value in environment.items()), ""]
    scaled = rows[0].get("scaled") if rows else None
    if scaled is not None:
        lines += [
            f"All rows are of a {scale(scaled)} that computes the function of a small target; its other weights are "
            "zero. It has the acceptance of the small target, and the time and memory of the large shape (which has "
            "at least as many layers as the small target).",
            "",
        ]
    head = [
        "method",
        "data",
        "prompts",
        "tokens/s",
        "speed-up",
        "middle half",
        "slowest",
        "tokens/round",
        "tau",
        "alpha",
        "identical",
        "diverges at",
        "gap",
        "nodes",
        "drafter MB",
        "of target",
        "operations",
        "of a step",
        "waits",
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
                    _number(row["slowest_speedup"]),
                    "" if row["tau"] is None else f"{row['tau'] + 1:.2f}",
                    _number(row["tau"]),
                    "" if row["alpha"] is None else f"{100 * row['alpha']:.1f} %",
                    f"{row['identical_prompts']}/{row['num_prompts']}",
                    "" if row["median_first_difference"] is None else f"{row['median_first_difference']:.0f}",
                    _number(row["median_logit_gap"]),
                    "" if row.get("node_budget") is None else str(row["node_budget"]),
                    "" if row.get("node_budget") is None else f"{row['drafter_memory_mb']:.1f}",
                    "" if row.get("node_budget") is None else f"{100 * row['drafter_memory_share']:.1f} %",
                    "" if row.get("operations") is None else f"{row['operations']:.0f}",
                    "" if row.get("operations") is None else f"{100 * row['operations_share']:.0f} %",
                    "" if row.get("synchronisations") is None else f"{row['synchronisations']:g}",
                ]
            )
        )
    lines += [
        "",
        "Speed-up: the time of plain decoding over the time of the method, for as many tokens, all prompts together; "
        "middle half: the quartiles over answers. Tokens/round: tau + 1, the acceptance length; tau: draft tokens "
        "accepted a round; alpha: their share of all tokens. Diverges at, gap: over the answers that differ from "
        "plain decoding's, the median of the first diverging token, and of the logit gap there (the logit of plain "
        "decoding's token minus the logit of the method's). Nodes: draft tokens of a tree, at most. Drafter MB, of "
        "target: the memory of the drafter (its weights, its copy of the LM head, its cache at the longest context "
        "and its tree), and its share of the target's weights. Operations, of a step, waits: what a round launches on "
        "the device beside the target's forward, its share of what a plain step launches with the forward, and how "
        "often the host waits for a device other than a CPU; medians over the rounds of the first prompt, counted in "
        "a run of their own.",
    ]
    if exact:
        lines.append("A method whose tokens differ gets no speed-up.")
    lines += [f"Not run: `{name}`, because {why}." for name, why in absent.items()]
    return "\n".join(lines) + "\n"


def picture(rows: list[Row]) -> bytes:
    """
    The picture of the report, a PNG file: speed-up by data set and method, acceptance by depth, the time of a round by
    part, speed-up against node budget.

    Raises:
        `ImportError`: without matplotlib.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator

    figure = Figure(figsize=(13, 8.5), layout="constrained")
    if rows[0].get("scaled") is not None:
        figure.suptitle(f"{scale(rows[0]['scaled'])} that computes a small target's function")
    (speed, depths), (times, budgets) = figure.subplots(2, 2)
    methods = list(dict.fromkeys(row["method"] for row in rows))
    data = list(dict.fromkeys(row["data"] for row in rows))
    colours = {method: f"C{number}" for number, method in enumerate(methods)}
    width = 0.8 / len(methods)
    for number, method in enumerate(methods):
        found = {row["data"]: row["speedup"] or 0.0 for row in rows if row["method"] == method}
        places = [place + (number - (len(methods) - 1) / 2) * width for place in range(len(data))]
        speed.bar(places, [found.get(name, 0.0) for name in data], width, label=method, color=colours[method])
    speed.axhline(1.0, color="black", linewidth=0.8)
    speed.set_xticks(range(len(data)), data)
    speed.set_title("speed-up over plain decoding")
    speed.legend(fontsize=8, ncols=4, loc="upper center", bbox_to_anchor=(0.5, -0.06))

    drafting = [row for row in rows if row["data"] == data[-1] and row["accepted_by_depth"]]
    for row in drafting:
        shares, method = row["accepted_by_depth"], row["method"]
        depths.plot(range(1, len(shares) + 1), shares, "o-", label=method, color=colours[method])
    depths.xaxis.set_major_locator(MaxNLocator(integer=True))
    depths.set_title(f"rounds with an accepted token of that depth, {data[-1]}")
    depths.set_xlabel("depth")

    left = [0.0] * len(drafting)
    for part in ("target", "drafter", "other"):
        shares = [row["time"][part] / (sum(row["time"].values()) or 1.0) for row in drafting]
        times.barh([row["method"] for row in drafting], shares, left=left, label=part)
        left = [before + share for before, share in zip(left, shares)]
    times.set_title(f"share of the time, {data[-1]}")

    for method, points in speedup_by_budget(rows, data[-1]).items():
        budgets.plot(*zip(*points), "o-", label=method, color=colours.get(method))
    budgets.axhline(1.0, color="black", linewidth=0.8)
    budgets.set_title(f"speed-up against draft tokens of a tree, {data[-1]}")
    budgets.set_xlabel("node budget")
    for panel in (depths, times, budgets):
        if panel.get_legend_handles_labels()[0]:
            panel.legend(fontsize=8)

    file = io.BytesIO()
    FigureCanvasAgg(figure).print_png(file)
    return file.getvalue()


def speedup_by_budget(rows: list[Row], data: str) -> dict[str, list[tuple[int, float]]]:
    """Node budgets and speed-ups of each method that drafts trees; `falcon@8` counts as `falcon`."""
    found: dict[str, list[tuple[int, float]]] = {}
    for row in rows:
        if row["data"] == data and row.get("node_budget") is not None and row["speedup"] is not None:
            point = (row["node_budget"], row["speedup"])
            found.setdefault(row["method"].partition("@")[0], []).append(point)
    return {method: sorted(points) for method, points in found.items()}


def _line(cells: list[str]) -> str:
    return f"| {' | '.join(cells)} |"


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:.2f}"
