# Copyright 2026 The hf_falcon authors. Licensed under the Apache License, Version 2.0.
"""Tiny drafters that learn, and their calls."""

import copy
from functools import cache
from typing import Any

import torch
from tiny_models import new_drafter, new_target, prompt
from torch import Tensor

from hf_falcon import Learner, LearningOptions
from hf_falcon.learning.recorder import CallCounts
from hf_falcon.learning.replay_buffer import CallRecord

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


@cache
def _records_of_calls() -> list[tuple[list[CallRecord], CallCounts]]:
    """What a learner records of the first 40 calls of a new pair. They are made once a process."""
    target, drafter = pair()
    recorded = []
    with learner(drafter, target) as found:
        end_call = found.end_call

        def end(records: list[CallRecord], counts: CallCounts) -> None:
            recorded.append((copy.deepcopy(records), copy.deepcopy(counts)))
            end_call(records, counts)

        found.end_call = end
        serve(target, drafter, range(40))
    return recorded


def replay_calls(found: Learner, calls: int) -> None:
    """Gives the learner of a new pair the records of `serve(target, drafter, range(calls))`: of 40 calls, at most."""
    for records, counts in copy.deepcopy(_records_of_calls()[:calls]):
        found.begin_call()
        found.end_call(records, counts)


def tau(target: Any, drafter: Any, seeds: range) -> float:
    """Accepted draft tokens a round."""
    found = [call(target, drafter, seed, return_dict_in_generate=True).draft_statistics for seed in seeds]
    return sum(each.accepted_tokens for each in found) / sum(each.rounds for each in found)
