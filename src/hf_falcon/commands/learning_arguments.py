# Copyright 2026 The hf_falcon authors. Licensed under the Apache License, Version 2.0.
"""The arguments of a drafter that learns while it is used."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from ..learning.options import check_folder

if TYPE_CHECKING:
    from transformers import PreTrainedModel


@dataclass
class LearningArguments:
    """Arguments of commands whose drafter may learn; `help` describes each."""

    learn: str | None = field(
        default=None,
        metadata={"help": "Folder: the drafter learns from the texts, and keeps there what it has learnt."},
    )
    keep_samples: bool = field(
        default=False, metadata={"help": "Keep the texts in that folder, too: learning goes on with them."}
    )

    def check_learning(self, plain: bool) -> None:
        """
        Raises:
            `ValueError`: if nothing can learn; it names the fields and the remedy.
        """
        if self.learn is not None and plain:
            raise ValueError("`learn` is for a drafter, and with `plain` there is none: leave one of the two out.")
        if self.keep_samples and self.learn is None:
            raise ValueError("`keep_samples` is True and there is no `learn` folder to keep them in: give one.")
        if self.learn is not None:
            # Before models are loaded.
            check_folder("learn", self.learn)

    @contextmanager
    def learning(self, target: PreTrainedModel, drafter: PreTrainedModel | None) -> Iterator[None]:
        """Inside, the drafter learns from the calls of the target, if it is asked to; its progress goes to stderr."""
        if self.learn is None or drafter is None:
            yield
            return
        from ..learning.learner import start_learning
        from ..learning.options import LearningOptions

        options = LearningOptions(folder=self.learn, keep_samples=self.keep_samples)
        learner = start_learning(drafter, target, options)
        learner.log = lambda line: print(f"[learning: {line}]", file=sys.stderr, flush=True)
        try:
            yield
        finally:
            learner.close()
            learner.log(str(learner.statistics))
