# Copyright 2026 The hf_falcon authors. Licensed under the Apache License, Version 2.0.
"""
Memory of weights in huge pages. A forward of a few rows reads every weight once, and with pages of 4 KiB much of that
time goes to looking addresses up, most of all in a virtual machine.
"""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Iterable
from pathlib import Path

_SETTINGS = Path("/sys/kernel/mm/transparent_hugepage")
# MADV_COLLAPSE of Linux 6.1 and later, which the module `mmap` does not have.
_COLLAPSE = 25


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
    advise = ctypes.CDLL(None).madvise
    advise.argtypes = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int
    return size * sum(advise(page * size, size, _COLLAPSE) == 0 for page in pages)


def _huge_page() -> int | None:
    """The size of a huge page in bytes, or `None` if there are none."""
    if sys.platform != "linux":
        return None
    try:
        is_off = "[never]" in (_SETTINGS / "enabled").read_text()
        return None if is_off else int((_SETTINGS / "hpage_pmd_size").read_text())
    except OSError:
        return None
