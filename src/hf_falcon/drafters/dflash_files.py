# Copyright 2026 The hf_falcon authors. Licensed under the Apache License, Version 2.0.
"""
DFlash and DSpark checkpoints, in the original layouts (z-lab's DFlash, DeepSpec's DSpark) and in that of the package
`speculators`.
"""

from __future__ import annotations

from typing import Any

# Values of the fields that the package leaves to its class of DSpark.
_DSPARK_DEFAULTS = {"sample_from_anchor": True, "markov_rank": 256}
# Fields of original configurations that change what is computed, and their values that change nothing.
_WITHOUT_EFFECT = {"input_embedding_scale": 1.0, "output_multiplier": 1.0, "final_logit_softcapping": 0.0}


def dflash_fields(fields: dict[str, Any]) -> dict[str, Any]:
    """
    The fields of [`DFlashDraftConfig`] for a DFlash or DSpark checkpoint.

    Args:
        fields (`dict`): the fields of its `config.json`.

    Raises:
        `ValueError`: for fields whose drafters cannot be read.
    """
    if "speculators_model_type" not in fields:
        return _of_original(fields)
    return {**(_DSPARK_DEFAULTS if fields["speculators_model_type"] == "dspark" else {}), **fields}


def _of_original(fields: dict[str, Any]) -> dict[str, Any]:
    """The fields of [`DFlashDraftConfig`] for an original configuration, which is one of a Qwen3."""
    nested = fields.get("dflash_config")
    # z-lab's fields of the method are in `dflash_config`, older ones beside it, as DeepSpec's are.
    given = {**fields, **(nested if isinstance(nested, dict) else {})}
    for name, plain in _WITHOUT_EFFECT.items():
        if given.get(name) is not None and given[name] != plain:
            raise ValueError(f"`{name}` is {given[name]!r:.200}: drafters with it cannot be read.")
    is_causal = given.get("is_causal", given.get("causal"))
    if is_causal:
        raise ValueError(
            f"`is_causal` is {is_causal!r:.200}: drafters whose rows do not see the later rows of their block cannot "
            "be read."
        )
    ids, layers = given.get("target_layer_ids"), given.get("num_target_layers")
    if isinstance(ids, list) and isinstance(layers, int) and layers - 1 in ids:
        raise ValueError(
            f"`target_layer_ids` is {ids!r:.200}: such a drafter reads the output of the target's last layer "
            f"({layers - 1}) behind the final norm, and cannot be read."
        )
    found: dict[str, Any] = {
        # Drafters for other targets may call themselves by the target's type.
        "transformer_layer_config": {**fields, "model_type": "qwen3"},
        "block_size": given.get("block_size"),
        "mask_token_id": given.get("mask_token_id"),
        "num_target_layers": layers,
        "sample_from_anchor": "Qwen3DSparkModel" in (fields.get("architectures") or ()),
        # By default, rows do not see later rows where there is a window.
        "sliding_window_non_causal": is_causal is False,
        "markov_rank": given.get("markov_rank") or 0,
        "markov_head_type": given.get("markov_head_type") or "vanilla",
    }
    if isinstance(ids, list) and all(isinstance(each, int) for each in ids):
        # Layers whose outputs are read, from -1 for the input of the first.
        found["aux_hidden_state_layer_ids"] = [layer + 1 for layer in ids]
    return found
