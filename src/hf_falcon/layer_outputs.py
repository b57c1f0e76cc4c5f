# Copyright 2026 The hf_falcon authors. Licensed under the Apache License, Version 2.0.
"""The outputs of the target's layers: `output_hidden_states` and `output_attentions` with a drafter."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import Cache, GenerationConfig
from transformers.utils import ModelOutput

from .core.interfaces import register_part
from .core.tree import to_device


def install() -> None:
    """Makes calls with a drafter return the outputs of layers."""
    register_part("layer_outputs", LayerOutputs)


# For each emitted token one tensor a layer; `None` for a layer that the call does not ask for.
Steps = tuple[tuple[Tensor | None, ...], ...]


class LayerOutputs:
    """
    The outputs of the target's layers for each emitted token; empty where the call does not ask for them.

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
        # Arguments of the target's forward. They may be the numbers of some layers.
        self.arguments = {f"output_{name}": getattr(generation_config, f"output_{name}") for name in asked}

    def add_step(self, outputs: ModelOutput) -> None:
        """Adds the outputs of a forward that plain decoding runs in the same way: the prompt, or a single token."""
        if self.hidden_states is not None:
            self.hidden_states += (outputs.hidden_states,)
        if self.attentions is not None:
            self.attentions += (outputs.attentions,)

    def add_path(self, outputs: ModelOutput, path: Tensor, cache: Cache) -> None:
        """
        Adds the outputs of a tree's forward for its accepted nodes, each with the keys of its own path alone.

        Args:
            outputs ([`ModelOutput`]): of a forward over all nodes.
            path (`torch.LongTensor` of shape `(kept,)`): nodes that belong in the cache, the root first.
            cache ([`Cache`]): the target's cache, whose layers know how many keys they keep.
        """
        # Of a layer that the call does not ask for.
        missing = [None] * path.shape[0]
        if self.hidden_states is not None:
            rows = [
                missing if states is None else states.index_select(1, to_device(path, states.device)).split(1, dim=1)
                for states in outputs.hidden_states
            ]
            self.hidden_states += tuple(zip(*rows))
        if self.attentions is not None:
            # An attention function without weights gives no layers either.
            steps = [
                missing if weights is None else _attentions(weights, layer, path)
                for weights, layer in zip(outputs.attentions, cache.layers)
            ]
            self.attentions += tuple(zip(*steps)) if steps else ((),) * path.shape[0]


def _attentions(weights: Tensor, layer: Any, path: Tensor) -> list[Tensor]:
    """
    Weights of shape `(1, heads, nodes, cached + nodes)` as plain decoding gives them, one token after the other. A
    static layer of the cache gives all its slots, also those that nothing is in yet.
    """
    window = getattr(layer, "sliding_window", None)
    slots = getattr(getattr(layer, "replaced", layer), "max_cache_len", 0)
    path = to_device(path, weights.device)
    cached = weights.shape[-1] - weights.shape[-2]
    keys = torch.cat((torch.arange(cached, device=path.device), cached + path))
    rows = weights.index_select(2, path).index_select(3, keys)
    found = []
    for place in range(path.shape[0]):
        end = cached + place + 1
        row = rows[:, :, place : place + 1, max(0, end - (window or end)) : end]
        found.append(F.pad(row, (0, max(0, slots - row.shape[-1]))))
    return found
