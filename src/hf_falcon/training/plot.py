# Copyright 2026 The hf_falcon authors. Licensed under the Apache License, Version 2.0.
"""The plot of a training run: loss and accuracies over steps."""

from __future__ import annotations

import io
import logging
import math
import os
import re
import time
from collections.abc import Sequence
from typing import Any

from transformers import TrainerCallback

from .token_file import write_atomically

logger = logging.getLogger(__name__)

PLOT_NAME = "training.png"
_SECONDS = 30


class TrainingPlot(TrainerCallback):
    """
    Draws `training.png` in the run's folder: at each checkpoint and evaluation, if the last plot is at least half a
    minute old (drawing takes about a second), and at the end.
    """

    def __init__(self) -> None:
        self._is_possible = True
        self._drawn = -math.inf

    def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if time.monotonic() - self._drawn > _SECONDS:
            self.on_train_end(args, state, control)

    on_evaluate = on_save

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if not state.is_world_process_zero or not self._is_possible:
            return
        try:
            png = draw(state.log_history)
        except ImportError:
            self._is_possible = False
            logger.warning(f"No {PLOT_NAME}: matplotlib is not installed. Run `pip install 'hf-falcon[train]'`.")
            return
        if png is not None:
            write_atomically(os.path.join(args.output_dir, PLOT_NAME), png)
        self._drawn = time.monotonic()


def draw(log_history: Sequence[dict[str, float]]) -> bytes | None:
    """
    The plot as a PNG file: loss parts above, top-1 accuracy by depth and estimated tau below; training in thin lines,
    held-out samples in thick ones.

    Args:
        log_history (sequence of `dict`): what Trainer logged, each entry with its `step`.

    Returns:
        `bytes`, or `None` before the first loss is logged.

    Raises:
        `ImportError`: without matplotlib.
    """
    from matplotlib.figure import Figure

    if not any("loss" in row or "eval_loss" in row for row in log_history):
        return None
    # Not pyplot, which has figures and a backend for the whole process.
    figure = Figure(figsize=(9, 11), layout="constrained")
    losses, accuracies, taus = figure.subplots(3, sharex=True)
    for place, name in enumerate(("loss", "regression", "distillation")):
        _lines(losses, log_history, name, f"C{place}")
    losses.set_ylabel("loss")
    losses.set_yscale("log")
    depths = {int(found[1]) for row in log_history for name in row if (found := re.fullmatch(_TOP1, name))}
    for depth in sorted(depths):
        _lines(accuracies, log_history, f"top1_depth{depth}", f"C{depth - 1}")
    accuracies.set_ylabel("top-1 accuracy")
    for place, name in enumerate(("estimated_tau_chain", "estimated_tau_tree", "final_tau")):
        _lines(taus, log_history, name, f"C{place}")
    taus.set_ylabel("tau, accepted draft tokens a round\n(tokens a round are tau + 1)")
    taus.set_xlabel("step")
    for axes in (losses, accuracies, taus):
        axes.grid(alpha=0.3)
        if axes.get_legend_handles_labels()[0]:
            axes.legend()
    file = io.BytesIO()
    figure.savefig(file, format="png", dpi=100)
    return file.getvalue()


_TOP1 = r"(?:eval_)?top1_depth(\d+)"


def _lines(axes: Any, log_history: Sequence[dict[str, float]], name: str, colour: str) -> None:
    for key, style in ((name, {"linewidth": 0.8, "alpha": 0.7}), (f"eval_{name}", {"linewidth": 2.0, "marker": "o"})):
        points = [(row["step"], row[key]) for row in log_history if key in row]
        if points:
            label = name if key == name else f"{name}, held out"
            # A single point needs a marker to be seen.
            axes.plot(*zip(*points), label=label, color=colour, **{"marker": "." if len(points) == 1 else "", **style})
