# Copyright 2026 The hf_falcon authors. Licensed under the Apache License, Version 2.0.
"""
Memory of weights in huge pages. A forward of a few rows reads every weight once, and with pages of 4 KiB much of that
time goes to looking addresses up, most of all in a virtual machine.
"""

from __future__ import annotations

import ctypes
import math
import sys
import threading
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.weak import WeakTensorKeyDictionary

_SETTINGS = Path("/sys/kernel/mm/transparent_hugepage")
# MADV_HUGEPAGE; and MADV_COLLAPSE of Linux 6.1 and later, which the module `mmap` does not have.
_ADVISE, _COLLAPSE = 14, 25
# Bytes of memory that an arena takes at once, and multiples of which its tensors begin at.
_CHUNK, _ALIGNED = 2**26, 64
# Bytes of a model that is copied to be moved, at most.
_LARGEST_COPY = 2**28
# The address of the first weight of each model that was moved, at that time. Copies of a model can share weights.
_moved = WeakTensorKeyDictionary()
_lock = threading.Lock()


def move_to_huge_pages(buffers: Iterable[tuple[int, int]]) -> int:
    """
    Asks Linux to bring memory into huge pages. Values and addresses stay the same, and whatever else is in the same
    huge page comes along. Memory stays as it is where this is impossible: on another system or an earlier kernel,
    where the administrator has switched huge pages off, and where too little memory is free.

    Args:
        buffers (iterable of two `int`): addresses and sizes in bytes.

    Returns:
        `int`: the number of bytes that are in huge pages now.
    """
    size = _huge_page()
    if size is None:
        return 0
    pages = sorted({page for start, count in buffers for page in range(start // size, -(-(start + count) // size))})
    advise = _madvise()
    return size * sum(advise(page * size, size, _COLLAPSE) == 0 for page in pages)


class Arena:
    """
    Memory for tensors that Linux gives in huge pages when they are first written. To move them there afterwards takes
    several times as long. Elsewhere it is ordinary memory. It is freed with the last of its tensors.
    """

    def __init__(self) -> None:
        self._rest = torch.empty(0, dtype=torch.uint8)

    def empty(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """
        A contiguous tensor whose values are not set.

        Args:
            shape (sequence of `int`), dtype (`torch.dtype`): those of the tensor.
        """
        count = math.prod(shape) * dtype.itemsize
        taken = -(-count // _ALIGNED) * _ALIGNED
        if self._rest.numel() < taken:
            size = _huge_page()
            self._rest = torch.empty(taken if size is None else max(taken, _CHUNK), dtype=torch.uint8)
            if size is not None:
                start, end = self._rest.data_ptr(), self._rest.data_ptr() + self._rest.numel()
                first, last = -(-start // size), end // size
                _madvise()(first * size, max(0, last - first) * size, _ADVISE)
        found, self._rest = self._rest[:count], self._rest[taken:]
        return found.view(dtype).view(tuple(shape))


def keep_in_huge_pages(model: nn.Module) -> None:
    """
    Moves the weights of a small model to huge pages, unless they are there. They are copied first, because the pages
    of a checkpoint's file, which they may be mapped from, cannot be moved: values stay the same, addresses do not.
    Weights that are not on the CPU, and those that processes share, stay where they are. No other thread may run the
    model meanwhile, except by a call that came here first.

    Args:
        model (`torch.nn.Module`): a drafter. Above 256 MiB it stays as it is.
    """
    with _lock:
        weights = [weight for weight in model.parameters() if _can_be_copied(weight)]
        if not weights or _moved.get(weights[0]) == weights[0].data_ptr() or _huge_page() is None:
            return
        if sum(weight.nbytes for weight in weights) <= _LARGEST_COPY:
            _copy(weights)
            move_to_huge_pages((weight.data_ptr(), weight.nbytes) for weight in weights)
        _moved[weights[0]] = weights[0].data_ptr()


def _can_be_copied(weight: Tensor) -> bool:
    # Vectors are small, and a packed weight is another type.
    is_own = type(weight) is nn.Parameter and weight.dim() > 1 and weight.device.type == "cpu"
    return is_own and not weight.is_shared() and not weight.is_inference()


# A copy that is made in inference mode could never be trained.
@torch.inference_mode(False)
@torch.no_grad()
def _copy(weights: Iterable[Tensor]) -> None:
    for weight in weights:
        weight.data = weight.data.clone()


def _madvise() -> Any:
    advise = ctypes.CDLL(None).madvise
    advise.argtypes = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int
    return advise


def _huge_page() -> int | None:
    """The size of a huge page in bytes, or `None` if there are none."""
    if sys.platform != "linux":
        return None
    try:
        is_off = "[never]" in (_SETTINGS / "enabled").read_text()
        return None if is_off else int((_SETTINGS / "hpage_pmd_size").read_text())
    except OSError:
        return None
