# Copyright 2026 The hf_falcon authors. Licensed under the Apache License, Version 2.0.
"""A drafter's decoder layers started from its target's last ones."""

from __future__ import annotations

import torch
from transformers import PreTrainedModel

from ..modeling_falcon_draft import FalconDraftModel
from ..target import decoder_layers


@torch.no_grad()
def start_from_target_layers(drafter: FalconDraftModel, target: PreTrainedModel) -> None:
    """
    Copies the weights of the target's last decoder layers to the drafter's, in their order.

    Raises:
        `ValueError`: if the target's layers lack a weight of the drafter's, or have it in another shape.
    """
    count = target.config.get_text_config(decoder=True).num_hidden_layers
    last = range(max(0, count - len(drafter.layers)), count)
    for mine, theirs in zip(drafter.layers, decoder_layers(target, last)):
        found = dict(theirs.named_parameters())
        for name, weight in mine.named_parameters():
            if name not in found or found[name].shape != weight.shape:
                shape = tuple(found[name].shape) if name in found else "not there"
                raise ValueError(
                    f"`init_layers_from_target` needs layers like the drafter's, but in {type(theirs).__name__} "
                    f"`{name}` is {shape} and in the drafter {tuple(weight.shape)}: leave it out."
                )
            weight.copy_(found[name])
