# Copyright 2026 The hf_falcon authors. Licensed under the Apache License, Version 2.0.
"""A drafter like Medusa (arXiv 2401.10774), for comparison: its structure, with our training and decoding."""

from __future__ import annotations

from typing import Any, NoReturn

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..core.configuration_falcon_draft import FalconDraftConfig
from ..core.draft_session import TargetHead
from ..core.drafter import FalconDraftModel
from ..core.interfaces import DraftedBlocks, DrafterAcceleration
from ..core.modeling_falcon_draft import KeyValueCache, LSTMState


class MedusaLikeConfig(FalconDraftConfig):
    """Configuration of a [`MedusaLikeModel`]; the fields are those of [`FalconDraftConfig`]."""

    model_type = "falcon_medusa_like"

    # Without this, transformers would generate an `__init__` from the fields of this class, which has none.
    def __init__(self, **kwargs: Any):
        super().__init__(**kwargs)


class MedusaSession:
    """
    The [`DraftSession`] of a [`MedusaLikeModel`]: a block follows from the newest feature alone.

    Args:
        drafter ([`MedusaLikeModel`]): the drafter.
        head ([`TargetHead`]): its head.
        acceleration ([`DrafterAcceleration`]): how the heads run.
    """

    is_conditional = False

    def __init__(self, drafter: MedusaLikeModel, head: TargetHead, acceleration: DrafterAcceleration):
        self._drafter, self._head, self._acceleration = drafter, head, acceleration

    def commit(
        self, features: Tensor, next_token_ids: Tensor, first_position: int = 0, prompt_embeds: Tensor | None = None
    ) -> Tensor:
        """See [`DraftSession.commit`]; no token is read."""
        with self._acceleration.drafting(self._head):
            return self._drafter.predict(features[:, -1].to(self._drafter.device))

    def rewind(self) -> None:
        """See [`DraftSession.rewind`]."""

    def extend(self, drafted: DraftedBlocks) -> NoReturn:
        """See [`DraftSession.extend`]; there is no second pass."""
        raise NotImplementedError("A drafter like Medusa runs one draft pass a round: its `max_draft_passes` is 1.")

    def condition(self, states: Tensor, previous_token_ids: Tensor) -> Tensor:
        """See [`DraftSession.condition`]."""
        return states


class MedusaLikeModel(FalconDraftModel):
    """
    `config.block_size` independent heads on the target's newest feature, each one residual block: head j predicts the
    feature j places ahead, which the target's LM head reads. No token, no attention, one pass.
    """

    config_class = MedusaLikeConfig
    # The heads read features of the target, not their own predictions.
    max_draft_passes = 1

    def __init__(self, config: MedusaLikeConfig):
        super().__init__(config)
        del self.fusion
        self.anchor = None
        self.layers = nn.ModuleList()
        self.heads = nn.Linear(config.hidden_size, config.block_size * config.hidden_size)
        self.post_init()

    def start_session(self, head: TargetHead, acceleration: DrafterAcceleration) -> MedusaSession:
        """See [`Drafter.start_session`]."""
        return MedusaSession(self, head, acceleration)

    def fuse(
        self, features: Tensor, inputs_embeds: Tensor, state: LSTMState | None = None
    ) -> tuple[Tensor, LSTMState | None]:
        """See [`FalconDraftModel.fuse`]; the tokens are not read."""
        return self._normalise(features), None

    def run_layers(
        self, fused: Tensor, anchors: Tensor, position_ids: Tensor, mask: Tensor, cache: KeyValueCache | None = None
    ) -> Tensor:
        """See [`FalconDraftModel.run_layers`]; each position reads the end of its block alone."""
        ends, to_end = anchors // self.config.block_size, anchors % self.config.block_size
        batch = torch.arange(ends.shape[0], device=fused.device)[:, None]
        return self._residual_blocks(fused)[batch, ends, self.config.block_size - 1 - to_end]

    def predict(self, features: Tensor) -> Tensor:
        """
        Predicts the features that follow single features.

        Args:
            features (`torch.Tensor` of shape `(batch, hidden_size)`): features of the target.

        Returns:
            `torch.Tensor` of shape `(batch, block_size, hidden_size)`.
        """
        return self._residual_blocks(self._normalise(features))

    def _residual_blocks(self, fused: Tensor) -> Tensor:
        """The outputs of all heads, of shape `(..., block_size, hidden_size)`."""
        heads = F.silu(self.heads(fused).unflatten(-1, (self.config.block_size, -1)))
        return self.norm(fused[..., None, :] + heads) * self.feature_std + self.feature_mean
