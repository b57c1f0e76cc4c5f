# Copyright 2026 The hf_falcon authors. Licensed under the Apache License, Version 2.0.
"""EAGLE-3 checkpoints, in the original layout (SafeAILab, SpecForge) and in that of the package `speculators`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol


class Shaped(Protocol):
    """A tensor, or what the header of a file says of it."""

    @property
    def shape(self) -> tuple[int, ...]: ...


# Old names of fields.
_OLD_NAMES = {"fc_norm": "use_aux_norm"}
# Fields of an original configuration that are not of its decoder layers.
_NOT_OF_LAYERS = ("architectures", "auto_map", "draft_vocab_size", "eagle_config", "target_hidden_size", "model_type")


def eagle3_fields(fields: dict[str, Any], weights: Mapping[str, Shaped]) -> dict[str, Any]:
    """
    The fields of [`Eagle3DraftConfig`] for an EAGLE-3 checkpoint.

    Args:
        fields (`dict`): the fields of its `config.json`.
        weights (mapping of `str` to `torch.Tensor`): its weights, or their shapes, under their names in the layout of
            `speculators`.

    Raises:
        `ValueError`: for fields whose drafters cannot be read.
    """
    return dict(fields) if "speculators_model_type" in fields else _of_original(fields, weights)


def original_name(name: str) -> str:
    """The name of an original weight in the layout of `speculators`."""
    return name.removeprefix("model.").replace("midlayer.", "layers.0.", 1)


def _of_original(fields: dict[str, Any], weights: Mapping[str, Shaped]) -> dict[str, Any]:
    """The fields of [`Eagle3DraftConfig`] for an original configuration, which is one of a Llama or Qwen3."""
    layer = {name: value for name, value in fields.items() if name not in _NOT_OF_LAYERS}
    # Drafters for other targets may call themselves by the target's type; their layers show what they are.
    has_norms = "layers.0.self_attn.q_norm.weight" in weights
    layer["model_type"] = "qwen3" if has_norms else "llama"
    layer["num_hidden_layers"] = 1 + max(
        (int(name.split(".")[1]) for name in weights if name.startswith("layers.") and name.split(".")[1].isdecimal()),
        default=0,
    )
    if "t2d" in weights and len(weights["t2d"].shape) == 1:
        layer["vocab_size"] = weights["t2d"].shape[0]
    nested = fields.get("eagle_config")
    nested = nested if isinstance(nested, dict) else {}
    ids = nested.get("eagle_aux_hidden_state_layer_ids", fields.get("eagle_aux_hidden_state_layer_ids"))
    if nested.get("use_aux_hidden_state", True) is False:
        raise ValueError(
            "`eagle_config.use_aux_hidden_state` is False: the drafter reads the target's last hidden state alone, as "
            "EAGLE-1 does, and cannot be read."
        )
    found: dict[str, Any] = {
        "transformer_layer_config": layer,
        "draft_vocab_size": fields.get("draft_vocab_size"),
        "target_hidden_size": fields.get("target_hidden_size"),
    }
    if isinstance(ids, list):
        # Two conventions are published: numbers of layers whose output is read, which begin with 1, and hidden states,
        # which begin with 2.
        shift = 1 if ids[:1] == [1] else 0
        found["eagle_aux_hidden_state_layer_ids"] = [layer + shift for layer in ids]
    for name in ("norm_before_residual", "norm_before_fc", "fc_norm", "norm_output"):
        value = fields.get(name, fields.get(_OLD_NAMES.get(name, "")))
        if value is not None:
            found[name] = value
    return found
