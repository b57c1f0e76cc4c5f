# Copyright 2026 The hf_falcon authors. Licensed under the Apache License, Version 2.0.
"""The drafters that `hf-falcon train` can train: ours, and one to compare it with."""

from __future__ import annotations

from ..bench.medusa import MedusaLikeModel
from ..core.drafter import FalconDraftModel

ARCHITECTURES: dict[str, type[FalconDraftModel]] = {"falcon": FalconDraftModel, "medusa_like": MedusaLikeModel}
