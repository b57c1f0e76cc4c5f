# Copyright 2026 The hf_falcon authors. Licensed under the Apache License, Version 2.0.
"""Keys and values of unrolled training passes."""

from __future__ import annotations

import torch
from torch import Tensor


class TrainingCache:
    """
    Keys and values of one unrolled training pass, after the keys and values of the passes before it; concatenation
    lets gradients flow. A second update of a layer replaces the first: gradient checkpointing runs layers again.

    Args:
        earlier ([`TrainingCache`], *optional*): the cache of the pass before.
    """

    def __init__(self, earlier: TrainingCache | None = None):
        self._earlier = earlier
        self._rows: dict[int, tuple[Tensor, Tensor]] = {}

    def update(self, layer: int, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """As [`DraftCache.update`]; every row is kept."""
        if self._earlier is not None:
            earlier_keys, earlier_values = self._earlier._rows[layer]
            keys = torch.cat((earlier_keys, keys), dim=2)
            values = torch.cat((earlier_values, values), dim=2)
        self._rows[layer] = (keys, values)
        return keys, values
