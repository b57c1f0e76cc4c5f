# Copyright 2026 The hf_falcon authors. Licensed under the Apache License, Version 2.0.
"""`attach` and `detach` with a drafter that learns."""

from __future__ import annotations

import os

from transformers import PreTrainedModel

from ..core import hook
from .learner import Learner, learner_of
from .options import LearningOptions


def attach(
    target: PreTrainedModel,
    drafter: PreTrainedModel | str | os.PathLike[str],
    learn: bool | str | os.PathLike[str] | LearningOptions = False,
) -> None:
    hook.attach(target, drafter)
    if learn is not False:
        start_learning(target, hook.attached_drafter(target), learn)


def start_learning(
    target: PreTrainedModel, drafter: PreTrainedModel, learn: bool | str | os.PathLike[str] | LearningOptions
) -> Learner:
    """
    Makes a drafter learn from the calls of a target; in place of an earlier learner.

    Args:
        target, drafter: the models.
        learn: see [`attach`].

    Raises:
        `ValueError`: see [`Learner`].
    """
    if (earlier := learner_of(drafter)) is not None:
        earlier.close()
    options = learn
    if not isinstance(options, LearningOptions):
        options = LearningOptions(folder=None if isinstance(learn, bool) else learn)
    return Learner(drafter, target, options)


def detach(target: PreTrainedModel) -> None:
    learner = learner_of(hook.attached_drafter(target))
    if learner is not None:
        learner.close()
    hook.detach(target)
