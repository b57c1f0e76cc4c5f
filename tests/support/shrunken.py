# Copyright 2026 The hf_falcon authors. Licensed under the Apache License, Version 2.0.
"""Any architecture of transformers with tiny random weights: its default configuration, with small sizes in it."""

from collections.abc import Mapping
from typing import Any

import torch
from tiny_models import HIDDEN, VOCAB
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel

WINDOW = 8
_PARAMETERS_AT_MOST = 30_000_000
# Fields that say how large a model is, by the names that configurations give them.
_SIZES: dict[str, Any] = {
    **dict.fromkeys(("vocab_size", "vocab_size_per_layer_input"), VOCAB),
    **dict.fromkeys(("hidden_size", "n_embd", "d_model", "word_embed_proj_dim", "backbone_hidden_size"), HIDDEN),
    **dict.fromkeys(("intermediate_size", "ffn_dim", "n_inner", "ffn_hidden_size", "decoder_ffn_dim"), 48),
    **dict.fromkeys(("num_hidden_layers", "n_layer", "n_layers", "num_layers", "decoder_layers"), 2),
    **dict.fromkeys(("num_attention_heads", "n_head", "n_heads", "num_heads", "decoder_attention_heads"), 4),
    **dict.fromkeys(("num_key_value_heads", "num_kv_heads", "num_global_key_value_heads"), 2),
    **dict.fromkeys(("head_dim", "global_head_dim", "swa_head_dim", "attention_head_dim", "kv_channels"), 8),
    **dict.fromkeys(("max_position_embeddings", "n_positions", "max_seq_len"), 128),
    **dict.fromkeys(("sliding_window", "window_size", "attention_window_size", "attention_chunk_size"), WINDOW),
    # Experts.
    **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts"), 4),
    **dict.fromkeys(("num_experts_per_tok", "moe_topk", "moe_k", "num_experts_per_token"), 2),
    **dict.fromkeys(("moe_intermediate_size", "shared_expert_intermediate_size", "shared_intermediate_size"), 16),
    **dict.fromkeys(("expert_ffn_hidden_size", "moe_shared_expert_intermediate_size"), 16),
    **dict.fromkeys(("n_group", "topk_group", "n_shared_experts", "first_k_dense_replace", "num_dense_layers"), 1),
    # Attention through a latent space.
    **dict.fromkeys(("kv_lora_rank", "q_lora_rank", "o_lora_rank"), 16),
    **dict.fromkeys(("qk_rope_head_dim", "qk_nope_head_dim", "v_head_dim", "index_head_dim"), 8),
    "index_n_heads": 16,
    "index_topk": 4,
    "rotary_dim": 4,
    # Recurrent layers.
    **dict.fromkeys(("state_size", "mamba_d_state", "ssm_state_size"), 8),
    "mamba_n_heads": 8,
    "mamba_d_head": 8,
    "mamba_num_heads": 8,
    "mamba_head_dim": 8,
    "n_mamba_heads": 2,
    "lru_width": HIDDEN,
    **dict.fromkeys(("linear_num_key_heads", "linear_num_value_heads"), 2),
    **dict.fromkeys(("linear_key_head_dim", "linear_value_head_dim"), 8),
    # Images and sound, which no prompt here has.
    **dict.fromkeys(("image_size", "patch_size", "spatial_patch_size"), 8),
    "depth": 1,
    "num_mel_bins": 8,
    "hidden_size_per_layer_input": 8,
    "num_kv_shared_layers": 0,
    # Large enough that a token depends on its whole context, and that greedy output does not repeat itself.
    **dict.fromkeys(("initializer_range", "init_std"), 0.3),
    "tie_word_embeddings": False,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
    # Encoders that can be decoders are.
    "is_decoder": True,
}
_ROPE = {"rope_type": "default", "rope_theta": 10000.0}
# What cannot be told from the names of fields.
_SPECIAL: dict[str, dict[str, Any]] = {
    "bamba": {"attn_layer_indices": [1]},
    "blt": {"encoder_hash_byte_group_vocab": 16},
    "cohere_compass_text": {"rope_parameters": {"full_attention": _ROPE, "sliding_attention": _ROPE}},
    "dbrx": {
        "attn_config": {"kv_n_heads": 2, "rope_theta": 10000.0, "clip_qkv": 8.0},
        "ffn_config": {"ffn_hidden_size": 48, "moe_num_experts": 4, "moe_top_k": 2},
    },
    **dict.fromkeys(
        ("qwen2_vl_text", "qwen2_5_vl_text", "glm4v_text", "paddleocr_vl_text", "glm_ocr_text"),
        {"rope_parameters": {**_ROPE, "mrope_section": [2, 1, 1]}},
    ),
    "glm4v_moe_text": {"rope_parameters": {**_ROPE, "partial_rotary_factor": 0.5, "mrope_section": [1, 1, 0]}},
    "qwen2_vl_vision": {"embed_dim": HIDDEN, "hidden_size": HIDDEN},
    "dots1": {"n_shared_experts": 1},
    "electra": {"embedding_size": HIDDEN},
    "mpt": {"use_cache": True},
    "rembert": {"input_embedding_size": HIDDEN, "output_embedding_size": HIDDEN},
    "dots3_note_text": {"per_layer_config": {}, "head_dim": 16, "shared_experts_intermediate_size": 16},
    "falcon_h1": {"mamba_d_ssm": 64},
    "gemma3n_text": {"activation_sparsity_pattern": [0.5, 0.0], "laurel_rank": 4},
    "gemma4_text": {"per_layer_config": {}},
    "gemma4_unified_text": {"per_layer_config": {}},
    "gpt_neo": {"attention_types": [[["global", "local"], 1]]},
    "granitemoehybrid": {"layer_types": ["linear_attention", "full_attention"]},
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1},
    "lfm2": {"layer_types": ["conv", "full_attention"]},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"]},
    "longcat_flash": {"head_dim": 8},
    "mamba2": {"num_heads": 8},
    "qwen4_exp_text": {
        **{"indexer_n_heads": 16, "indexer_kv_heads": 1, "indexer_head_dim": 8},
        **{"indexer_budget": 8, "indexer_compress_ratio": 2, "hc_lowrank": 4, "ple_embed_dim": 8},
    },
    "recurrent_gemma": {"num_hidden_layers": 3},
    "reformer": {"axial_pos_embds": False, "attn_layers": ["local", "lsh"], "feed_forward_size": 48, "num_buckets": 2},
    "xlstm": {"hidden_size": 128, "embedding_dim": 128, "num_heads": 2, "num_blocks": 2},
    "xmod": {"default_language": "en_XX"},
    "zamba": {"layers_block_type": ["linear_attention", "hybrid"], "attention_hidden_size": 2 * HIDDEN}
    | {"attention_head_dim": 16, "num_key_value_heads": 4, "mamba_dt_rank": 4},
    "zamba2": {"layers_block_type": ["linear_attention", "hybrid"], "attention_hidden_size": 2 * HIDDEN}
    | {"attention_head_dim": 16, "num_key_value_heads": 4, "n_mamba_heads": 8, "mamba_headdim": 8, "adapter_rank": 4},
    "zaya": {"num_experts_per_tok": 1, "router_hidden_size": 16},
}


def tiny_config(model_type: str, sizes: Mapping[str, Any] = {}, **changes: Any) -> PreTrainedConfig:
    """
    The default configuration of a model type with small sizes, and parts of it likewise.

    Args:
        model_type (`str`): the type.
        sizes (`dict`, *optional*): further fields, by name, that are set wherever a part of it has them.
        changes: fields of the configuration; those of its parts are dictionaries.
    """
    base = AutoConfig.for_model(model_type)
    fields = {**_small_fields(base, sizes), **_SPECIAL.get(model_type, {})}
    for name, value in changes.items():
        fields[name] = fields[name] | value if isinstance(fields.get(name), dict) else value
    return type(base)(**fields)


def _small_fields(config: PreTrainedConfig, sizes: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of a configuration that make it small."""
    given = config.to_dict()
    names = {*given, *getattr(config, "attribute_map", {})}
    fields = {name: size for name, size in {**_SIZES, **sizes}.items() if name in names}
    for name in getattr(config, "sub_configs", {}):
        part = getattr(config, name, None)
        if isinstance(part, PreTrainedConfig):
            fields[name] = {"model_type": part.model_type, **_small_fields(part, sizes)}
            fields[name] |= _SPECIAL.get(part.model_type, {})
    if "kv_lora_rank" in names:
        # These heads have a width of two parts, and keys for each of them.
        fields.pop("head_dim", None)
        fields["num_key_value_heads"] = 4
    kinds = given.get("layer_types")
    if kinds:
        # Each kind once at least.
        fields["layer_types"] = (list(dict.fromkeys(kinds)) * 2)[: max(2, len(set(kinds)))]
        for name in ("num_hidden_layers", "n_layer", "num_layers"):
            if name in fields:
                fields[name] = len(fields["layer_types"])
    return fields


def tiny_model(model_type: str, auto_class: Any = AutoModelForCausalLM, **changes: Any) -> PreTrainedModel:
    """
    A random model of a type that `auto_class` knows, in float32; `changes` as for [`tiny_config`].

    Raises:
        `ValueError`: if it does not become small.
    """
    config = tiny_config(model_type, **changes)
    with torch.device("meta"):
        size = sum(parameter.numel() for parameter in auto_class.from_config(config).parameters())
    if size > _PARAMETERS_AT_MOST:
        raise ValueError(f"has {size / 1e6:.0f} million parameters")
    torch.manual_seed(0)
    model = auto_class.from_config(config, dtype=torch.float32).eval()
    model.generation_config.eos_token_id = None
    return model
