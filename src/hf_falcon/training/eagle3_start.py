# Copyright 2026 The hf_falcon authors. Licensed under the Apache License, Version 2.0.
"""The start of an EAGLE-3 drafter: from the target's head, and from a least-squares map of its hidden states."""

from __future__ import annotations

import torch
from torch import Tensor
from transformers import PreTrainedModel

from ..drafters.eagle3 import Eagle3DraftModel
from .features import some_features
from .token_file import TokenFile

# Ridge of the least squares, as a share of the mean square of a hidden state.
_RIDGE = 0.05
# Of the scale that the target's head reads. Untrained states are mostly wrong, and at the full scale the first losses
# were several times those of a uniform distribution.
_SHARE_OF_SCALE = 0.3


@torch.no_grad()
def start_eagle3(drafter: Eagle3DraftModel, target: PreTrainedModel, data: TokenFile) -> None:
    """
    Gives a new drafter weights that it learns from faster than from random ones: the head has the target's rows, and
    `fc` is the least-squares map from the target's hidden states to its feature at the same position. What the
    drafter feeds back, an estimate of the next feature for the head, is then of the same kind as what it reads. (A map
    to the next feature gave fewer right choices at every depth.)

    Args:
        drafter ([`Eagle3DraftModel`]): the drafter, with its draft vocabulary.
        target ([`PreTrainedModel`]): its target, of the same hidden size.
        data ([`TokenFile`]): the training data.
    """
    rows = torch.cat(some_features(target, data, drafter.config.feature_layers))
    width = drafter.config.target_hidden_size
    features, hidden = rows.split((width, rows.shape[1] - width), dim=1)
    scale = features.square().mean(dim=0).sqrt().clamp_min(1e-4)
    drafter.fc.weight.copy_(_least_squares(hidden, features / scale).T)
    drafter.norm.weight.copy_(_SHARE_OF_SCALE * scale)
    head = target.get_output_embeddings().weight.detach()
    ids = drafter.draft_vocab_ids
    drafter.lm_head.weight.copy_(head if ids is None else head[ids.to(head.device)])


def _least_squares(inputs: Tensor, outputs: Tensor) -> Tensor:
    """
    The map of a ridge regression.

    Args:
        inputs (`torch.Tensor` of shape `(rows, inputs)`), outputs (`torch.Tensor` of shape `(rows, outputs)`): pairs.

    Returns:
        `torch.Tensor` of shape `(inputs, outputs)`.
    """
    # A few of a target's hidden values are larger than all others by orders of magnitude.
    scale = inputs.square().mean(dim=0).sqrt().clamp_min(1e-6)
    scaled = (inputs / scale).double()
    squares = scaled.T @ scaled
    squares.diagonal().add_(_RIDGE * len(scaled))
    found = torch.linalg.solve(squares, scaled.T @ outputs.double())
    return (found / scale[:, None]).float()
