# Copyright 2026 The hf_falcon authors. Licensed under the Apache License, Version 2.0.
"""The sizes of a new Falcon drafter for a target."""

from __future__ import annotations

import copy
from typing import Any

from transformers import PreTrainedConfig, PreTrainedModel

from ..checkpoint_files import fingerprints
from ..core.configuration_falcon_draft import field_of, logit_processing

# With the sizes of a large target, most of a drafter's weights would be in MLPs, and many of the rest in the
# projections of keys and values.
_WIDEST_DEFAULT_MLP = 2048

_MOST_DEFAULT_KEY_VALUE_HEADS = 8


def fields_for(target: PreTrainedConfig | PreTrainedModel) -> dict[str, Any]:
    """See [`FalconDraftConfig.from_target`]; the fields of [`FalconDraftConfig`] by their names."""
    config = target if isinstance(target, PreTrainedConfig) else target.config
    text_config = config.get_text_config(decoder=True)
    # Only sizes under Llama's names are copied. Targets with other names (GPT-2, OPT) get the usual sizes.
    hidden_size = text_config.hidden_size
    heads = field_of(text_config, "num_attention_heads") or max(1, hidden_size // 64)
    head_dim = field_of(text_config, "head_dim")
    if head_dim is None and hidden_size % heads != 0:
        head_dim = 2 * max(1, hidden_size // heads // 2)
    intermediate_size = field_of(text_config, "intermediate_size")
    if not isinstance(intermediate_size, int):
        intermediate_size = 4 * hidden_size
    kv_heads = field_of(text_config, "num_key_value_heads") or heads
    if kv_heads > _MOST_DEFAULT_KEY_VALUE_HEADS:
        kv_heads = max(n for n in range(1, _MOST_DEFAULT_KEY_VALUE_HEADS + 1) if heads % n == 0)
    logit_scale, logit_softcapping = logit_processing(config)
    # XLNet's is -1: no limit.
    longest = field_of(text_config, "max_position_embeddings") or 0
    fields: dict[str, Any] = {
        "vocab_size": text_config.vocab_size,
        "hidden_size": hidden_size,
        "intermediate_size": min(intermediate_size, max(hidden_size, _WIDEST_DEFAULT_MLP)),
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": head_dim,
        "rms_norm_eps": field_of(text_config, "rms_norm_eps") or 1e-5,
        "rope_theta": _rope_theta(text_config),
        "max_position_embeddings": longest if longest > 0 else 2048,
        "logit_scale": logit_scale,
        "logit_softcapping": logit_softcapping,
        **{name: copy.copy(field_of(text_config, name)) for name in ("bos_token_id", "eos_token_id", "pad_token_id")},
        "target_model_type": text_config.model_type,
        "target_name_or_path": config.name_or_path or None,
    }
    if isinstance(target, PreTrainedModel):
        fields |= fingerprints(target)
    return fields


def _rope_theta(text_config: PreTrainedConfig) -> float:
    parameters = getattr(text_config, "rope_parameters", None) or {}
    # Models with two kinds of layers keep one set of parameters for each.
    by_layer_kind = parameters.get("full_attention")
    theta = (by_layer_kind or parameters).get("rope_theta")
    return float(theta if theta is not None else getattr(text_config, "rope_theta", None) or 10000.0)
