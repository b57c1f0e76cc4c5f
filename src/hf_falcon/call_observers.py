# Copyright 2026 The hf_falcon authors. Licensed under the Apache License, Version 2.0.
"""What is around every call with a drafter, from its beginning to its end; several observers of a call."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any

from transformers import PreTrainedModel

from .core.interfaces import register_part

Around = Callable[[Any, PreTrainedModel], AbstractContextManager[Any]]
_around: list[Around] = []


def observe_calls(around: Around) -> None:
    """
    Enters a context manager at the beginning of every later call with a drafter, and leaves it at the end, also after
    an error.

    Args:
        around (`Callable`): called with the drafter and the target, it returns the context manager. Its value is the
            call's observer, a [`CallRecorder`], or `None`.
    """
    _around.append(around)
    register_part("learning", _observed)


@contextmanager
def _observed(drafter: Any, target: PreTrainedModel) -> Iterator[Any]:
    with ExitStack() as stack:
        found = [stack.enter_context(around(drafter, target)) for around in _around]
        yield next((observer for observer in found if observer is not None), None)
