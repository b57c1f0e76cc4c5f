# Copyright 2026 The hf_falcon authors. Licensed under the Apache License, Version 2.0.
"""A drafter like Medusa (arXiv 2401.10774), for comparison: its structure, with our training and decoding."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..core.configuration_falcon_draft import FalconDraftConfig
from ..core.drafter import FalconDraftModel
from ..core.modeling_falcon_draft import KeyValueCache, LSTMState


class MedusaLikeConfig(FalconDraftConfig):
    """Configuration of a [`MedusaLikeModel`]; the fields are those of [`FalconDraftConfig`]."""

    model_type = "falcon_medusa_like"

    # Without this, transformers would generate an `__init__` from the fields of this class, which has none.
    def __init__(self, **kwargs: Any):
        super().__init__(**kwargs)


class MedusaLikeModel(FalconDraftModel):
    """
    `config.block_size` independent heads on the target's newest feature, each one residual block: head j predicts the
    feature j places ahead, which the target's LM head reads. No token, no attention, one pass (`num_draft_passes` 1).
    """

    config_class = MedusaLikeConfig

    def __init__(self, config: MedusaLikeConfig):
        super().__init__(config)
        del self.fusion
        self.anchor = None
        self.layers = nn.ModuleList()
        self.heads = nn.Linear(config.hidden_size, config.block_size * config.hidden_size)
        self.generation_config.num_draft_passes = 1
        self.post_init()

    def fuse(
        self, features: Tensor, inputs_embeds: Tensor, state: LSTMState | None = None
    ) -> tuple[Tensor, LSTMState | None]:
        """See [`FalconDraftModel.fuse`]; the tokens are not read."""
        return self._normalise(features), None

    def run_layers(
        self, fused: Tensor, ends: Tensor, position_ids: Tensor, mask: Tensor, cache: KeyValueCache | None = None
    ) -> Tensor:
        """See [`FalconDraftModel.run_layers`]; each position reads the end of its block alone."""
        place = self.config.block_size - 1 - (ends - torch.arange(fused.shape[1], device=fused.device))
        batch = torch.arange(ends.shape[0], device=fused.device)[:, None]
        heads = F.silu(self.heads(fused).unflatten(-1, (self.config.block_size, -1)))
        return self.norm(fused[batch, ends] + heads[batch, ends, place]) * self.feature_std + self.feature_mean
