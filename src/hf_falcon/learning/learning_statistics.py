# Copyright 2026 The hf_falcon authors. Licensed under the Apache License, Version 2.0.
"""How far a learner has come."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass
class LearningStatistics:
    """
    How far a learner has come. Acceptance is the estimated tau of a tree of 8 nodes on held-out texts.

    Args:
        calls (`int`): calls that it watched.
        tokens_seen (`int`): new tokens in them.
        tau (`float`): accepted draft tokens a round in all of them, prompt lookup included.
        trained_tokens (`int`): predicted tokens that were learnt from; some several times.
        steps (`int`): steps of the optimizer.
        replacements, refusals (`int`): comparisons after which the drafter got new weights, and others.
        acceptance_before, acceptance_now (`float`, *optional*): of the weights that it began with, and of those that
            draft; `None` before the first comparison.
        learning_seconds, call_seconds (`float`): time of learning, and of calls.
        texts, held_out_texts (`int`): texts in memory.
        memory (`int`): bytes of these.
    """

    calls: int
    tokens_seen: int
    tau: float
    trained_tokens: int
    steps: int
    replacements: int
    refusals: int
    acceptance_before: float | None
    acceptance_now: float | None
    learning_seconds: float
    call_seconds: float
    texts: int
    held_out_texts: int
    memory: int

    def __str__(self) -> str:
        now = "not compared yet"
        if self.acceptance_before is not None and self.acceptance_now is not None:
            now = f"{self.acceptance_before:.2f} before, {self.acceptance_now:.2f} now"
        return (
            f"{self.tokens_seen:,} tokens in {self.calls:,} calls, {self.steps:,} steps, accepted on held-out texts: "
            f"{now}; {self.replacements} of {self.replacements + self.refusals} comparisons replaced the weights"
        )
