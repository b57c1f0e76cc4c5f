# Copyright 2026 The hf_falcon authors. Licensed under the Apache License, Version 2.0.
"""The decision model."""

import math

import pytest
import torch

from hf_falcon.bench import methods
from hf_falcon.bench.decision import DecisionModel, known
from hf_falcon.core.costs import Costs
from hf_falcon.core.draft_options import DraftOptions
from hf_falcon.core.policy import AdaptivePolicy, acceptance_stats_of
from hf_falcon.core.tree import Branches


def branches(*log_probs, depth=1):
    count = torch.arange(len(log_probs))
    return Branches(count, count, torch.tensor(log_probs), depth)


def test_decision_model(tmp_path):
    found = known(branches(-0.5, -0.5, depth=3))
    torch.testing.assert_close(found, torch.tensor([-0.5, 0.0, 0.6931, 3.0]), rtol=0, atol=1e-4)
    assert known(branches(-0.1)).tolist() == pytest.approx([-0.1, 0.0, 0.0, 1.0])
    draws = torch.Generator().manual_seed(0)
    seen = torch.randn(4000, 4, generator=draws) * torch.tensor([2.0, 1.0, 0.5, 1.5])
    chances = (seen @ torch.tensor([1.0, 0.0, -2.0, 0.5]) - 1.0).sigmoid()
    model = DecisionModel.fit(seen, torch.bernoulli(chances, generator=draws))
    assert model.weights == pytest.approx([1.0, 0.0, -2.0, 0.5], abs=0.2) and model.bias == pytest.approx(-1, abs=0.2)
    model.save(tmp_path / "decision.json")
    assert DecisionModel.load(tmp_path / "decision.json") == model
    expected = torch.sigmoid(found @ torch.tensor(model.weights) + model.bias)
    torch.testing.assert_close(model(branches(-0.5, -0.5, depth=3)), expected)


@pytest.mark.parametrize(
    "text",
    [
        "no",
        "[]",
        None,
        b"\xff",
        '{"weights": [1]}',
        '{"weights": [1, 2, 3], "bias": 0}',
        '{"weights": [1, 2, 3, NaN], "bias": 0}',
    ],
)
def test_files_that_are_no_decision_model(tmp_path, text):
    if text is not None:
        (tmp_path / "decision.json").write_bytes(text if isinstance(text, bytes) else text.encode())
    with pytest.raises(ValueError, match="with examples/decision_model.py"):
        DecisionModel.load(tmp_path / "decision.json")


@pytest.mark.parametrize("says", [-1e3, 1e3])
def test_the_decision_model_decides(models, says):
    """Its method's passes, and no other's."""
    models.decision = DecisionModel([0.0] * 4, says)
    found, _ = methods.resolve(["falcon_classifier", "falcon_classifier@3", "falcon"], models)
    decisions = {}
    for name, given in found.items():
        costs = Costs({0: 1.0, 8: 1.4})
        costs.observe_target(1, 1.0)
        stats = acceptance_stats_of(given["assistant_model"], models.target)
        stats.drafted_rounds = 1
        policy = AdaptivePolicy(DraftOptions(num_assistant_tokens=8), stats, costs, 6)
        decisions[name] = policy.decide()
    even = branches(math.log(0.3), math.log(0.3))
    chosen = {
        name: each.check_pass(even, even.log_probs).continuation >= each.pass_threshold
        for name, each in decisions.items()
    }
    assert chosen == {"falcon_classifier": says > 0, "falcon_classifier@3": says > 0, "falcon": True}
