# Copyright 2026 The hf_falcon authors. Licensed under the Apache License, Version 2.0.
"""The first diverging token of two outputs of the same prompt, and the logit gap there."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from transformers import PreTrainedModel

from .metrics import first_difference


class Divergence(NamedTuple):
    """
    Where two outputs diverge.

    Args:
        token (`int`): the first diverging token, counted from 0.
        gap (`float`, *optional*):
            The target's logit of the first output's token there, minus the logit of the other's. `None` where one
            output ends earlier, with no other difference.
    """

    token: int
    gap: float | None


@torch.no_grad()
def first_divergence(
    target: PreTrainedModel, prompt_ids: Tensor, tokens: Sequence[int], others: Sequence[int]
) -> Divergence | None:
    """
    Compares two outputs.

    Args:
        target ([`PreTrainedModel`]): the target, which computes the logits after the common tokens.
        prompt_ids (`torch.LongTensor` of shape `(1, length)`): the prompt.
        tokens, others (sequence of `int`): the new tokens of both outputs.

    Returns:
        [`Divergence`], or `None` where both are equal.
    """
    place = first_difference(tokens, others)
    if place is None:
        return None
    if place >= min(len(tokens), len(others)):
        return Divergence(place, None)
    context = torch.cat((prompt_ids, prompt_ids.new_tensor([tokens[:place]])), dim=1)
    logits = target(context, logits_to_keep=1).logits[0, -1].float()
    return Divergence(place, float(logits[tokens[place]] - logits[others[place]]))
