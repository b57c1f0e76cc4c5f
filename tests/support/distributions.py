# Copyright 2026 The hf_falcon authors. Licensed under the Apache License, Version 2.0.
"""Whether samples are distributed as they should be."""

import math
from collections import Counter
from collections.abc import Callable

import pytest
import torch
from torch import Tensor


def surprise(found: Counter[tuple], expected: dict[tuple, float]) -> float:
    """Pearson's statistic, in standard deviations above what chance gives; rare outcomes are counted together."""
    total = sum(found.values())
    assert sum(expected.values()) == pytest.approx(1.0, abs=1e-4)
    if not set(found) <= set(expected):
        return math.inf
    rare = [outcome for outcome, chance in expected.items() if chance * total < 5]
    cells = [(found[o], chance * total) for o, chance in expected.items() if chance * total >= 5]
    cells.append((sum(found[o] for o in rare), sum(expected[o] for o in rare) * total))
    statistic = sum((seen - wanted) ** 2 / wanted for seen, wanted in cells if wanted > 0)
    return (statistic - len(cells) + 1) / math.sqrt(2 * len(cells) - 2)


@torch.no_grad()
def text_probabilities(target, ids: Tensor, count: int, processors: Callable) -> dict[tuple, float]:
    """Of all continuations of `count` tokens that have a probability."""
    if count == 0:
        return {(): 1.0}
    probs = processors(ids, target(ids).logits[:, -1]).softmax(dim=-1)[0]
    found = {}
    for token in probs.nonzero()[:, 0]:
        rest = text_probabilities(target, torch.cat((ids, token[None, None]), dim=1), count - 1, processors)
        found |= {(int(token), *text): float(probs[token]) * chance for text, chance in rest.items()}
    return found
