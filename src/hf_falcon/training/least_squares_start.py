# Copyright 2026 The hf_falcon authors. Licensed under the Apache License, Version 2.0.
"""Weights that a new drafter learns from faster than from random ones: least-squares maps of the target's states."""

from __future__ import annotations

import torch
from torch import Tensor
from transformers import PreTrainedModel

from ..core.draft_session import embed
from ..core.drafter import FalconDraftModel
from ..drafters.eagle3 import Eagle3DraftModel
from .features import some_features
from .token_file import TokenFile

# Ridge of the least squares, as a share of the mean square of a hidden state.
_RIDGE = 0.05
# Of the scale that the target's head reads. Untrained states are mostly wrong, and at the full scale the first losses
# were several times those of a uniform distribution.
_SHARE_OF_SCALE = 0.3


@torch.no_grad()
def start_falcon(drafter: FalconDraftModel, target: PreTrainedModel, data: TokenFile) -> None:
    """
    Starts the linear fusion of a new drafter as the least-squares map from a feature and the next token to the feature
    that the drafter predicts. The decoder layers learn what it lacks. A drafter with an LSTM keeps its random weights.

    Args:
        drafter ([`FalconDraftModel`]): the drafter, with the statistics of the target's features.
        target ([`PreTrainedModel`]): its target.
        data ([`TokenFile`]): the training data.
    """
    if drafter.fusion.lstm is not None:
        return
    embedding, ahead = target.get_input_embeddings(), drafter.config.block_size
    inputs, outputs = [], []
    for token_ids, features in some_features(target, data):
        normalised = (features - drafter.feature_mean) / drafter.feature_std
        embeds = drafter.fusion.embedding_norm(embed(embedding, token_ids[1:], torch.device("cpu")).float())
        # Position i has feature i and token i + 1, and predicts feature i + k.
        pairs = len(token_ids) - ahead
        inputs.append(torch.cat((normalised[:pairs], embeds[:pairs]), dim=1))
        outputs.append(normalised[ahead:])
    drafter.fusion.linear.weight.copy_(_least_squares(torch.cat(inputs), torch.cat(outputs)).T)


@torch.no_grad()
def start_eagle3(drafter: Eagle3DraftModel, target: PreTrainedModel, data: TokenFile) -> None:
    """
    Starts the head of a new drafter with the target's rows, and `fc` as the least-squares map from the target's hidden
    states to its feature at the same position. What the drafter feeds back, an estimate of the next feature for the
    head, is then of the same kind as what it reads. (A map to the next feature gave fewer right choices at every
    depth.)

    Args:
        drafter ([`Eagle3DraftModel`]): the drafter, with its draft vocabulary.
        target ([`PreTrainedModel`]): its target, of the same hidden size.
        data ([`TokenFile`]): the training data.
    """
    rows = torch.cat([features for _, features in some_features(target, data, drafter.config.feature_layers)])
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
