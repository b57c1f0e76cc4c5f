# Copyright 2026 The hf_falcon authors. Licensed under the Apache License, Version 2.0.
"""
The decision model of improved MCSD: a small classifier that predicts from the draft whether another pass pays.

It is here to be compared with the drafting policy (`core/policy.py`), which does not use it: it did no better.
"""

from __future__ import annotations

import json
import math
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

from ..core.tree import Branches

KNOWN = (
    "log-probability of the best path",
    "its lead over the second path",
    "entropy of the paths",
    "depth",
)
_DECAY = 1e-3


def known(branches: Branches) -> Tensor:
    """The inputs of the model, from the paths that a pass would continue, of shape `(4,)`; `KNOWN` names them."""
    log_probs = branches.log_probs
    assert log_probs is not None
    shares = log_probs.softmax(dim=0)
    gap = log_probs[0] - log_probs[min(1, len(log_probs) - 1)]
    return torch.stack((log_probs[0], gap, torch.special.entr(shares).sum(), log_probs.new_tensor(branches.depth)))


@dataclass
class DecisionModel:
    """
    A logistic regression.

    Args:
        weights (`list[float]`): one weight for each input, in the order of `KNOWN`.
        bias (`float`): the constant term.

    Raises:
        `ValueError`: for another number of weights, and for numbers that are not finite.
    """

    weights: list[float]
    bias: float

    def __post_init__(self) -> None:
        numbers = [*self.weights, self.bias] if isinstance(self.weights, list) else []
        finite = all(isinstance(number, (int, float)) and math.isfinite(number) for number in numbers)
        if len(numbers) != len(KNOWN) + 1 or not finite:
            raise ValueError(
                f"A decision model has {len(KNOWN)} `weights` and a `bias`, all finite, and this one has "
                f"{self.weights!r} and {self.bias!r}: fit it again with examples/decision_model.py."
            )

    def __call__(self, branches: Branches) -> Tensor:
        """Probability that a token of the next pass would be accepted."""
        found = known(branches)
        return (found @ found.new_tensor(self.weights) + self.bias).sigmoid()

    @classmethod
    def fit(cls, known: Tensor, right: Tensor) -> DecisionModel:
        """
        Fits the model.

        Args:
            known (`torch.Tensor` of shape `(passes, 4)`): the inputs before each pass.
            right (`torch.Tensor` of shape `(passes,)`): 1 where a token of the pass was accepted, else 0.
        """
        mean, std = known.mean(dim=0), known.std(dim=0) + 1e-6
        layer = torch.nn.Linear(known.shape[1], 1)
        optimizer = torch.optim.LBFGS(layer.parameters(), max_iter=100, line_search_fn="strong_wolfe")

        def loss() -> Tensor:
            optimizer.zero_grad()
            logits = layer((known - mean) / std)[:, 0]
            value = F.binary_cross_entropy_with_logits(logits, right) + _DECAY * layer.weight.square().sum()
            value.backward()
            return value

        optimizer.step(loss)
        weights = layer.weight.detach()[0] / std
        return cls(weights.tolist(), float(layer.bias.detach()[0] - weights @ mean))

    @classmethod
    def load(cls, path: str | Path) -> DecisionModel:
        """Reads a file of `save`."""
        try:
            return cls(**json.loads(Path(path).read_text(encoding="utf-8")))
        except (TypeError, OSError, UnicodeDecodeError, json.JSONDecodeError) as error:
            raise ValueError(
                f"`decision` is '{path}', no decision model ({error}): fit one with examples/decision_model.py."
            ) from None

    def save(self, path: str | Path) -> None:
        """Writes a JSON file."""
        Path(path).write_text(json.dumps(asdict(self)), encoding="utf-8")
