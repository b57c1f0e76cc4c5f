# Copyright 2026 The hf_falcon authors. Licensed under the Apache License, Version 2.0.
"""What a round asks of a device, beside the target's forward: operations to launch, and answers to wait for."""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import PreTrainedModel

# The host waits for these.
_WAITS = {"aten::_local_scalar_dense", "aten::nonzero", "aten::equal", "aten::is_nonzero", "aten::masked_select"}
_INDEXING = {"aten::index", "aten::index_put", "aten::index_put_"}
_COPIES = {"aten::_to_copy", "aten::copy_"}


@dataclass
class RoundOperations:
    """
    What a round asks of the device, as the median over rounds.

    Args:
        operations (`float`): operations that are launched; of a plain step with the target's forward, else without.
        synchronisations (`float`, *optional*): how often the host waits for the device; `None` on a CPU.
    """

    operations: float
    synchronisations: float | None


class OperationCounter(TorchDispatchMode):
    """
    Counts the operations on a device, and how often the host waits for it.

    Args:
        device (`torch.device`): the device. On a CPU every operation counts, and nothing waits.
    """

    def __init__(self, device: torch.device):
        super().__init__()
        self._device = device.type
        self.operations = self.synchronisations = 0
        self.is_paused = False

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        found = function(*args, **kwargs)
        if not self.is_paused:
            self._count(function._schema.name, args, kwargs, found)
        return found

    def _count(self, name: str, args: Any, kwargs: Any, found: Any) -> None:
        given = [each for each in tree_leaves((args, kwargs)) if isinstance(each, Tensor)]
        made = [each for each in tree_leaves(found) if isinstance(each, Tensor)]
        if not any(each.device.type == self._device for each in (*given, *made)):
            return
        self.operations += 1
        if name in _COPIES:
            crosses = len({each.device.type for each in (*given, *made)}) > 1
            is_blocking = not (kwargs.get("non_blocking") or (name == "aten::copy_" and len(args) > 2 and args[2]))
            # A copy to the host waits even so, before anything reads it.
            self.synchronisations += crosses and (is_blocking or made[0].device.type == "cpu")
        elif self._device != "cpu":
            has_mask = name in _INDEXING and any(
                each.dtype == torch.bool for each in tree_leaves(args[1]) if isinstance(each, Tensor)
            )
            self.synchronisations += name in _WAITS or has_mask


def count_round(
    target: PreTrainedModel, generate: Callable[[], object], with_forward: bool = False
) -> RoundOperations | None:
    """
    Counts what the rounds of a call ask of the device.

    Args:
        target ([`PreTrainedModel`]): the target.
        generate (`Callable[[], object]`): a call of its `generate`, for a single sequence.
        with_forward (`bool`, *optional*, defaults to `False`): whether the target's own forward counts.

    Returns:
        [`RoundOperations`], or `None` for a call without a round.
    """
    counter = OperationCounter(target.device)
    # The counts at the beginning of each forward.
    marks: list[tuple[int, int]] = []

    def begin(*arguments: Any) -> None:
        marks.append((counter.operations, counter.synchronisations))
        counter.is_paused = not with_forward

    def end(*arguments: Any) -> None:
        counter.is_paused = False

    hooks = [target.register_forward_pre_hook(begin), target.register_forward_hook(end)]
    try:
        with counter:
            generate()
    finally:
        for hook in hooks:
            hook.remove()
    # The first forward is the prompt's.
    rounds = [(after[0] - before[0], after[1] - before[1]) for before, after in itertools.pairwise(marks[1:])]
    if not rounds:
        return None
    operations, synchronisations = (statistics.median(each) for each in zip(*rounds))
    return RoundOperations(operations, None if target.device.type == "cpu" else synchronisations)
