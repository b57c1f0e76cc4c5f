# Copyright 2026 The hf_falcon authors. Licensed under the Apache License, Version 2.0.
"""Which quantised targets compute a token as plain decoding does, whatever other tokens are beside it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from .core.interfaces import register_part
from .core.target_parts import is_quantised, quantised_layers

# Libraries whose linear layers take their inputs as they are.
_ORDINARY = ("torch", "transformers", "peft", "hf_falcon")


def install() -> None:
    """Makes the probe try quantised targets."""
    register_part("quantised", refusal_of_target)


def refusal_of_target(model: PreTrainedModel) -> str | None:
    """The reason why nothing can be verified with a quantised target, if there is one."""
    # Layers of the same kind and name are quantised alike.
    kinds = {
        (type(layer), type(getattr(layer, "weight", None)), name.rpartition(".")[2]): layer
        for name, layer in (*quantised_layers(model), *_unknown_layers(model))
    }
    for layer in kinds.values():
        try:
            effect = _effect_of_quantisation(layer, model.device, model.dtype)
        except Exception:
            # A layer of one's own may take other inputs.
            if is_quantised(layer):
                raise
            continue
        if effect is not None:
            return f"the target's quantised layers ({type(layer).__name__}) {effect}"
    return None


def _unknown_layers(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Linear layers of classes that may quantise their inputs alone, as torchao's for a training that knows of it."""
    for name, module in model.named_modules():
        is_known = type(module).__module__.partition(".")[0] in _ORDINARY or hasattr(module, "base_layer")
        if isinstance(module, nn.Linear) and not is_known:
            yield name, module


@torch.no_grad()
def _effect_of_quantisation(layer: Any, device: torch.device, dtype: torch.dtype) -> str | None:
    """What a quantised layer does to its inputs that rules trees out, found by running it on a few rows."""
    large = torch.zeros((1, 1, layer.in_features), dtype=dtype, device=device)
    large[..., ::32] = 4
    others = (large == 0).to(dtype)
    # Values all over the steps of a scale that never changes: a nudge moves some of them by a whole step.
    spread = others * torch.linspace(0.5, 1.5, layer.in_features, dtype=dtype, device=device)

    def output(row: Tensor, crowd: Tensor | None = None) -> Tensor:
        rows = row if crowd is None else torch.cat((row, crowd.expand(1, 15, -1)), dim=1)
        return layer(rows)[0, 0].float()

    def contribution(row: Tensor) -> Tensor:
        # No layer has to take zeros, which have no scale.
        return (output(row) - output(-row)).norm() / 2

    # All rows share a scale (dynamic int8), a large value in any row exempts its column from quantisation (LLM.int8,
    # above 6), or many rows run another kernel than few. In `row`, a scale of its own loses the values below half of
    # the step that 8 bits have beside the large ones.
    below_half = others * (0.45 * 4 / 127)
    row = large + below_half
    if not (output(row, torch.full_like(row, 1e4)) - output(row)).norm() <= contribution(below_half) / 2:
        return "give a row another result beside other rows"
    # Every row has a scale of its own. Differences within rounding then move inputs to the next of 256 values or less,
    # and tokens differ much more often than they do by rounding: in float32 as well as in bfloat16.
    nudge = others / 128
    found, expected = (output(large + spread + nudge) - output(large + spread)).norm(), contribution(others) / 128
    if not 0 < expected / 2 <= found <= expected * 1.5:
        return "round their inputs to 8 bits, so that tokens would often differ from plain decoding's"
    return None
