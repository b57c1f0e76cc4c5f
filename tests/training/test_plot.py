# Copyright 2026 The hf_falcon authors. Licensed under the Apache License, Version 2.0.
"""The plot of a training run."""

import sys

from training_runs import trainer

from hf_falcon.training.plot import TrainingPlot, draw


def test_nothing_to_plot():
    assert draw([]) is None and draw([{"step": 3, "train_loss": 1.0}]) is None


def test_the_plot_is_drawn_anew(target, tmp_path, monkeypatch):
    lengths = []
    monkeypatch.setattr("hf_falcon.training.plot.draw", lambda history: lengths.append(len(history)))
    trainer(target, tmp_path, TrainingPlot(), max_steps=3).train()
    assert lengths == [1, 4]  # the first checkpoint, and the end with its summary
    monkeypatch.setattr("hf_falcon.training.plot._SECONDS", -1)
    trainer(target, tmp_path, TrainingPlot(), max_steps=3).train()
    assert lengths[2:] == [1, 2, 3, 4]


def test_no_plot_without_matplotlib(target, tmp_path, monkeypatch, caplog):
    monkeypatch.setattr("hf_falcon.training.plot.draw", draw)
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    run = trainer(target, tmp_path, TrainingPlot(), max_steps=2)
    run.train()
    (warning,) = [r.getMessage() for r in caplog.records if r.name == "hf_falcon.training.plot"]
    assert "pip install 'hf-falcon[train]'" in warning and not (tmp_path / "training.png").exists()
