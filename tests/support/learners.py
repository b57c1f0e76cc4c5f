# Copyright 2026 The hf_falcon authors. Licensed under the Apache License, Version 2.0.
"""Tiny drafters that learn, and their calls."""

from typing import Any

import torch
from tiny_models import new_drafter, new_target, prompt
from torch import Tensor

from hf_falcon import Learner, LearningOptions

SIZES = {"block_size": 1, "num_lstm_layers": 0, "num_hidden_layers": 1, "scale": 0}
# What learns a lot in seconds, and only when it is told to.
FAST = {"learning_rate": 1e-2, "step_tokens": 64, "gate_steps": 4, "share": 0.0, "idle_share": 0.0}
FAST |= {"rejected": 0.25}
CALL = {"max_new_tokens": 24, "do_sample": False, "pad_token_id": 0}


class Clock:
    """A clock that a test sets."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def pair(**config: Any) -> tuple[Any, Any]:
    """A target, and a new drafter for it."""
    target = new_target("llama")
    return target, new_drafter(target, **{**SIZES, **config})


def learner(drafter: Any, target: Any, clock: Any = None, **options: Any) -> Learner:
    """A learner with the fast options, changed by `options`."""
    found = LearningOptions(**{**FAST, **options})
    return Learner(drafter, target, found) if clock is None else Learner(drafter, target, found, clock)


def call(target: Any, drafter: Any, seed: int, **options: Any) -> Tensor:
    """A call with a prompt of its own."""
    return target.generate(prompt(8, seed=seed), assistant_model=drafter, **{**CALL, **options})


def serve(target: Any, drafter: Any, seeds: range) -> None:
    """Some calls, each of which is plain decoding's."""
    for seed in seeds:
        assert torch.equal(call(target, drafter, seed), call(target, None, seed))


def tau(target: Any, drafter: Any, seeds: range) -> float:
    """Accepted draft tokens a round."""
    found = [call(target, drafter, seed, return_dict_in_generate=True).draft_statistics for seed in seeds]
    return sum(each.accepted_tokens for each in found) / sum(each.rounds for each in found)
