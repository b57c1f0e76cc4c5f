# Copyright 2026 The hf_falcon authors. Licensed under the Apache License, Version 2.0.
"""What rounds are thought to cost, before any was timed, where a processor has no instructions for 16 bits."""

from __future__ import annotations

import platform

from ..core.costs import CostKey
from .processor import has_bfloat16_instructions
from .skinny_gemm import WIDENS

# Plain steps that a further token takes. On an Intel Xeon without these instructions 8 tokens of SmolLM2-135M-Instruct
# take 2.6 plain steps in bfloat16 and 3.8 in float16.
_TOKEN = 0.2
# With AVX2, on an AMD EPYC, the same; and from where widened weights are faster, the first token and a further one.
_TOKEN_AVX2, _FIRST_WIDENED, _TOKEN_WIDENED = 0.42, 2.6, 0.055
_HALF, _X86 = ("torch.bfloat16", "torch.float16"), ("x86_64", "AMD64")


def guessed_costs(cost_key: CostKey) -> dict[int, float] | None:
    """
    The target's time for 0, 1, ... draft nodes on such a processor, where it grows with each token; `None` elsewhere:
    costs then begin from [`default_prior`], as they do in code from the Hub, which lacks this file.

    Args:
        cost_key ([`CostKey`]): what the times depend on.

    Returns:
        `dict[int, float]`, *optional*: the times, relative to that of a single token.
    """
    is_stock = cost_key.device == "cpu" and not cost_key.packed and not cost_key.compiled
    if not is_stock or cost_key.dtype not in _HALF or platform.machine() not in _X86 or has_bfloat16_instructions():
        return None
    tokens = {nodes: cost_key.rows * (nodes + 1) for nodes in range(max(cost_key.max_nodes, 1) + 1)}
    return {nodes: _plain_steps(count) for nodes, count in tokens.items()}


def _plain_steps(tokens: int) -> float:
    if not WIDENS:
        return 1.0 + _TOKEN * (tokens - 1)
    return min(1.0 + _TOKEN_AVX2 * (tokens - 1), _FIRST_WIDENED + _TOKEN_WIDENED * (tokens - 1))
