# Copyright 2026 The hf_falcon authors. Licensed under the Apache License, Version 2.0.
"""The drafters that `hf-falcon train` can train: ours, EAGLE-3, and one to compare them with."""

from __future__ import annotations

from ..bench.medusa import MedusaLikeModel
from ..core.drafter import DraftModel, FalconDraftModel
from ..drafters.eagle3 import Eagle3DraftModel

ARCHITECTURES: dict[str, type[DraftModel]] = {
    "falcon": FalconDraftModel,
    "eagle3": Eagle3DraftModel,
    "medusa_like": MedusaLikeModel,
}
