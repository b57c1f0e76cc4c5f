# Copyright 2026 The hf_falcon authors. Licensed under the Apache License, Version 2.0.
"""`output_hidden_states` and `output_attentions`, in the shapes that plain decoding gives them."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from transformers import GenerationConfig
from transformers.utils import ModelOutput

# For each emitted token one tensor a layer.
Steps = tuple[tuple[Tensor, ...], ...]


class LayerOutputs:
    """
    What the target's layers gave for each emitted token; nothing, where the call does not ask for it.

    Args:
        generation_config ([`GenerationConfig`]): configuration of the call.
    """

    def __init__(self, generation_config: GenerationConfig):
        asked = [
            name
            for name in ("hidden_states", "attentions")
            if generation_config.return_dict_in_generate and getattr(generation_config, f"output_{name}")
        ]
        self.hidden_states: Steps | None = () if "hidden_states" in asked else None
        self.attentions: Steps | None = () if "attentions" in asked else None
        # What the target's forward is to be asked for.
        self.arguments = {f"output_{name}": True for name in asked}

    def add_step(self, outputs: ModelOutput) -> None:
        """Takes a forward that plain decoding runs just so: the prompt, or a single token."""
        if self.hidden_states is not None:
            self.hidden_states += (outputs.hidden_states,)
        if self.attentions is not None:
            self.attentions += (outputs.attentions,)

    def add_path(self, outputs: ModelOutput, path: Tensor, windows: Sequence[int | None]) -> None:
        """
        Takes a tree's forward: of its nodes those that were accepted, each with the keys of its own path alone.

        Args:
            outputs ([`ModelOutput`]): of a forward over all nodes.
            path (`torch.LongTensor` of shape `(kept,)`): nodes that belong in the cache, the root first.
            windows (sequence of `int` or `None`): keys that each layer keeps, at most.
        """
        if self.hidden_states is not None:
            rows = [states.index_select(1, path.to(states.device)).split(1, dim=1) for states in outputs.hidden_states]
            self.hidden_states += tuple(zip(*rows))
        if self.attentions is not None:
            # Attention that gives no weights gives no layers either.
            steps = [_attentions(*each, path) for each in zip(outputs.attentions, windows)]
            self.attentions += tuple(zip(*steps)) if steps else ((),) * path.shape[0]


def _attentions(weights: Tensor, window: int | None, path: Tensor) -> list[Tensor]:
    """Weights of shape `(1, heads, nodes, cached + nodes)` as those of one token after the other."""
    path = path.to(weights.device)
    cached = weights.shape[-1] - weights.shape[-2]
    keys = torch.cat((torch.arange(cached, device=path.device), cached + path))
    rows = weights.index_select(2, path).index_select(3, keys)
    found = []
    for place in range(path.shape[0]):
        end = cached + place + 1
        found.append(rows[:, :, place : place + 1, max(0, end - (window or end)) : end])
    return found
