# Copyright 2026 The hf_falcon authors. Licensed under the Apache License, Version 2.0.
"""What the processor can do."""

import torch


def has_bfloat16_instructions() -> bool:
    """
    Whether an x86 processor has instructions for products in bfloat16; of others it is not known, and `False`.
    oneDNN's own check is also true where they are only emulated, and so slower than in float32.
    """
    return torch.cpu._is_amx_tile_supported() or torch.cpu._is_avx512_bf16_supported()
