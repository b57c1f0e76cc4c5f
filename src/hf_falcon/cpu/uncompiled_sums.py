# Copyright 2026 The hf_falcon authors. Licensed under the Apache License, Version 2.0.
"""
The sums of norms in compiled code inside `row_invariant`, computed as uncompiled code computes them. Compiled code
adds in another order, which shows where a few values are much larger than the others.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, fx

_namespace = "hf_falcon_sums"
_library = torch.library.Library(_namespace, "DEF")
_library.define("mean(Tensor input, int[]? dim, bool keepdim) -> Tensor")


def _mean(input: Tensor, dim: list[int] | None, keepdim: bool) -> Tensor:
    return torch.ops.aten.mean.dim(input, dim, keepdim)


_library.impl("mean", _mean, "CPU")
torch.library.register_fake(f"{_namespace}::mean", _mean, lib=_library)


def leave_sums_uncompiled(graph: fx.Graph) -> None:
    """Replaces the means of a graph by calls of torch's own, which `torch.compile` does not generate code for."""
    operator: Any = getattr(torch.ops, _namespace).mean.default
    for node in graph.nodes:
        if node.target is torch.ops.aten.mean.dim and not node.kwargs:
            dim, keepdim = [*node.args[1:], False][:2]
            node.target, node.args = operator, (node.args[0], dim, keepdim)
