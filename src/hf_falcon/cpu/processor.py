# Copyright 2026 The hf_falcon authors. Licensed under the Apache License, Version 2.0.
"""Which processor this is, and what it can do."""

import hashlib
import platform
from functools import cache
from pathlib import Path

import torch


@cache
def processor_digest() -> str:
    """A digest of the processor's kind, by all that Linux says of it."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
        kind = sorted({line for line in lines if line.startswith(("model name", "flags", "Features", "CPU part"))})
    except OSError:
        kind = [platform.processor()]
    return hashlib.sha256(repr((platform.machine(), kind)).encode()).hexdigest()[:32]


def has_bfloat16_instructions() -> bool:
    """
    Whether an x86 processor has instructions for products in bfloat16; of others it is not known, and `False`.
    oneDNN's own check is also true where they are only emulated, and so slower than in float32.
    """
    return torch.cpu._is_amx_tile_supported() or torch.cpu._is_avx512_bf16_supported()
