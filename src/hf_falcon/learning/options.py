# Copyright 2026 The hf_falcon authors. Licensed under the Apache License, Version 2.0.
"""The options of a learner."""

from __future__ import annotations

import math
import os
from dataclasses import dataclass
from pathlib import Path


@dataclass
class LearningOptions:
    """
    What a drafter that learns while it serves may use. The defaults are such that a user does not notice the learning.

    > Parameters that limit the time

    Args:
        share (`float`, *optional*, defaults to 0.04):
            Time of learning between calls, as a share of the time of the calls. 0 learns only while idle.
        idle_share (`float`, *optional*, defaults to 0.5):
            Share of the time without calls that a thread of low priority learns in. 0 learns only between calls.
        idle_after (`float`, *optional*, defaults to 0.5): seconds after a call before that thread begins.
        steps_a_minute (`float`, *optional*): steps of the optimizer a minute, at most, on average.
        threads (`int`, *optional*, defaults to 1): threads of torch that learning while idle uses.
        during_calls (`bool`, *optional*, defaults to `False`): whether learning may begin while a call runs.

    > Parameters that limit the memory

    Args:
        memory (`float`, *optional*, defaults to 256.0):
            Megabytes of features that are kept in memory. Those of the oldest calls are dropped.
        longest (`int`, *optional*, defaults to 1024): new tokens of a call that are kept, at most.

    > Parameters that control the learning

    Args:
        learning_rate (`float`, *optional*, defaults to 3e-4): of Muon for matrices, and of AdamW for the rest.
        step_tokens (`int`, *optional*, defaults to 512):
            Predicted tokens of a step. A step of Muon takes as long as the gradients of some 400 tokens.
        uses (`int`, *optional*, defaults to 8): how often a text is learnt from, at most.
        rejected (`float`, *optional*, defaults to 0.0):
            Share of the learning that is from texts that end with rejected draft tokens: the target has computed its
            choices there, too. For the demo's target such a prediction costs ten times as much as one of the text.
            That of the place where a token was rejected is learnt in any case.
        held_out (`float`, *optional*, defaults to 0.2):
            Share of the prompts that are not learnt from. New weights are used if they accept more of them.
        gate_steps (`int`, *optional*, defaults to 16): steps between two such comparisons.
        seed (`int`, *optional*, defaults to 0): seed of all random draws.

    > Parameters of what is kept on disk

    Args:
        folder (`str` or `os.PathLike`, *optional*):
            Weights, optimizer and progress are saved here, and learning goes on from what is here. By default all is
            lost with the process.
        save_minutes (`float`, *optional*, defaults to 5.0): minutes between two saves.
        keep_samples (`bool`, *optional*, defaults to `False`): whether the users' texts are saved, too.

    Raises:
        `ValueError`: for a value out of range.
    """

    share: float = 0.04
    idle_share: float = 0.5
    idle_after: float = 0.5
    steps_a_minute: float | None = None
    threads: int = 1
    during_calls: bool = False
    memory: float = 256.0
    longest: int = 1024
    learning_rate: float = 3e-4
    step_tokens: int = 512
    uses: int = 8
    rejected: float = 0.0
    held_out: float = 0.2
    gate_steps: int = 16
    seed: int = 0
    folder: str | os.PathLike[str] | None = None
    save_minutes: float = 5.0
    keep_samples: bool = False

    def __post_init__(self) -> None:
        for name in ("share", "idle_share", "rejected"):
            self._check(name, 0 <= getattr(self, name) <= 1, "a number from 0 to 1")
        self._check("held_out", 0 < self.held_out < 1, "a number above 0 and below 1: without it nothing is compared")
        for name in ("threads", "longest", "step_tokens", "uses", "gate_steps"):
            self._check(name, getattr(self, name) >= 1, "at least 1")
        for name in ("memory", "learning_rate", "save_minutes"):
            self._check(name, 0 < getattr(self, name) < math.inf, "a number above 0")
        self._check("idle_after", 0 <= self.idle_after < math.inf, "0 or more seconds")
        steps = self.steps_a_minute
        self._check("steps_a_minute", steps is None or 0 < steps < math.inf, "a number above 0, or None")
        if self.keep_samples and self.folder is None:
            raise ValueError("`keep_samples` is True and there is no `folder` to keep them in: give one.")
        if self.folder is not None:
            check_folder("folder", self.folder)

    def _check(self, name: str, is_right: bool, rule: str) -> None:
        if not is_right:
            raise ValueError(f"`{name}` is {getattr(self, name)}: give {rule}.")


def check_folder(name: str, folder: str | os.PathLike[str]) -> None:
    """
    Raises:
        `ValueError`: if nothing can be written to a folder, which need not be there yet; it names the argument.
    """
    path = Path(folder).absolute()
    nearest = next((each for each in (path, *path.parents) if os.path.lexists(each)), path)
    if not nearest.is_dir() or not os.access(nearest, os.W_OK | os.X_OK):
        raise ValueError(f"`{name}` is {str(folder)!r}, but nothing can be written in {nearest}: give another folder.")
