# Copyright 2026 The hf_falcon authors. Licensed under the Apache License, Version 2.0.
"""
The function of a small model in the shape of a large one: the cost of a large target, with real acceptance.

Added dimensions are zero, and the weights of norms are rescaled for them. The output weights of added heads and
neurons are zero, and added layers add zero. Every product is computed all the same.
"""

from __future__ import annotations

import copy
import math
from dataclasses import fields
from typing import Any

import psutil
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedModel

from ..checkpoint_files import embedding_fingerprint, weights_fingerprint
from ..core.configuration_falcon_draft import FalconDraftConfig
from ..core.drafter import DraftModel, FalconDraftModel
from .medusa import MedusaLikeModel
from .memory import weight_bytes
from .shapes import Shape

# Fields of a drafter's configuration for parts that are not scaled.
_UNSCALABLE = (
    "num_lstm_layers",
    "conditioning_size",
    "feature_layers",
    "attention_bias",
    "use_qk_norm",
    "use_post_norms",
)


@torch.no_grad()
def scaled_target(target: PreTrainedModel, shape: Shape) -> PreTrainedModel:
    """
    A Llama model of another shape with the function of `target`, on its device and in its dtype.

    Raises:
        `ValueError`: if `target` is no Llama model or does not fit into the shape, or the memory is not enough.
    """
    config = target.config
    if config.model_type != "llama" or config.attention_bias or config.mlp_bias:
        raise ValueError(f"The target is a {config.model_type!r} model: only Llama models without biases are scaled.")
    layers = max(shape.num_hidden_layers, config.num_hidden_layers)
    new = copy.deepcopy(config)
    for name, value in vars(shape).items():
        setattr(new, name, value)
    new.num_hidden_layers = layers
    new.rms_norm_eps = config.rms_norm_eps * config.hidden_size / shape.hidden_size
    with torch.device("meta"):
        large = AutoModelForCausalLM.from_config(new, dtype=target.dtype)
    _check_memory(large, target.device)
    large = large.to_empty(device=target.device).eval()
    # Buffers, such as rotary frequencies, are computed and not copied.
    large.model.rotary_emb = type(target.model.rotary_emb)(new).to(target.device)
    for parameter in large.parameters():
        parameter.zero_()
    _fill(large.get_input_embeddings().weight, target.get_input_embeddings().weight)
    _fill(large.get_output_embeddings().weight, target.get_output_embeddings().weight)
    _fill_norm(large.model.norm, target.model.norm)
    # Spread evenly among the layers that add zero.
    for number, layer in enumerate(target.model.layers):
        _fill_layer(large.model.layers[number * layers // config.num_hidden_layers], layer, shape, config.head_dim)
    large.generation_config = copy.deepcopy(target.generation_config)
    return large


@torch.no_grad()
def scaled_drafter(drafter: DraftModel, target: PreTrainedModel) -> FalconDraftModel:
    """
    A drafter for the scaled `target` with the function of `drafter`, in the sizes of a new drafter for that target.

    Raises:
        `ValueError`: if `drafter` is no Falcon drafter, has parts that cannot be scaled or does not fit into these
            sizes, or the memory is not enough.
    """
    if not isinstance(drafter, FalconDraftModel):
        raise ValueError(f"The drafter is a {type(drafter).__name__}: only Falcon drafters can be scaled.")
    config = drafter.config
    for name in _UNSCALABLE:
        if getattr(config, name):
            raise ValueError(f"The drafter has `{name}` {getattr(config, name)}, and cannot be scaled.")
    sizes = FalconDraftConfig.from_target(target.config, num_hidden_layers=config.num_hidden_layers)
    shape = Shape(**{field.name: getattr(sizes, field.name) for field in fields(Shape)})
    new = copy.deepcopy(config)
    for name, value in vars(shape).items():
        setattr(new, name, value)
    new.rms_norm_eps = config.rms_norm_eps * config.hidden_size / shape.hidden_size
    new.target_fingerprint = weights_fingerprint(target)
    new.target_embedding_fingerprint = embedding_fingerprint(target)
    with torch.device("meta"):
        large = type(drafter)(new).to(drafter.dtype)
    _check_memory(large, drafter.device)
    large = large.to_empty(device=drafter.device).eval()
    for parameter in large.parameters():
        parameter.zero_()
    width, wide = config.hidden_size, shape.hidden_size
    if isinstance(drafter, MedusaLikeModel):
        for name, tensor in drafter.heads.named_parameters():
            for new_part, part in zip(large.heads.get_parameter(name).split(wide), tensor.split(width)):
                _fill(new_part, part)
    else:
        _fill_norm(large.fusion.embedding_norm, drafter.fusion.embedding_norm)
        _fill(large.fusion.linear.weight[:, :wide], drafter.fusion.linear.weight[:, :width])
        _fill(large.fusion.linear.weight[:, wide:], drafter.fusion.linear.weight[:, width:])
    if drafter.anchor is not None:
        for new_part, part in zip(large.anchor.weight.split(wide), drafter.anchor.weight.split(width)):
            _fill(new_part, part)
    for new_layer, layer in zip(large.layers, drafter.layers):
        _fill_layer(new_layer, layer, shape, config.head_dim)
    _fill_norm(large.norm, drafter.norm)
    large.feature_mean.zero_()[:width] = drafter.feature_mean
    large.feature_std.fill_(1.0)[:width] = drafter.feature_std
    if config.draft_vocab_size is not None:
        large.draft_vocab_ids.copy_(drafter.draft_vocab_ids)
    large.generation_config = copy.deepcopy(drafter.generation_config)
    return large


def _check_memory(model: PreTrainedModel, device: torch.device) -> None:
    """Raises an error before weights are allocated that do not fit."""
    needed = weight_bytes(model)
    free = torch.cuda.mem_get_info(device)[0] if device.type == "cuda" else psutil.virtual_memory().available
    if needed > free:
        raise ValueError(
            f"The scaled {type(model).__name__} takes {needed / 1e9:.1f} GB in "
            f"{str(model.dtype).removeprefix('torch.')}, and {device} has {free / 1e9:.1f} GB free: choose a smaller "
            "shape or `dtype`, or a larger machine."
        )


def _fill(large: Tensor, small: Tensor) -> None:
    """Writes a matrix into the upper left corner of another."""
    if any(new < old for new, old in zip(large.shape, small.shape)):
        raise ValueError(f"A matrix of {tuple(small.shape)} does not fit into one of {tuple(large.shape)}.")
    large[tuple(slice(size) for size in small.shape)] = small


def _fill_norm(large: Any, small: Any) -> None:
    """Added zeros make the mean of squares smaller; epsilon is scaled with it, and the weight makes up for both."""
    ratio = small.weight.shape[0] / large.weight.shape[0]
    _fill(large.weight, (small.weight.double() * math.sqrt(ratio)).to(small.weight.dtype))


def _fill_layer(large: Any, small: Any, shape: Shape, head_dim: int) -> None:
    for name in ("input_layernorm", "post_attention_layernorm"):
        _fill_norm(getattr(large, name), getattr(small, name))
    for name in ("gate_proj", "up_proj", "down_proj"):
        _fill(getattr(large.mlp, name).weight, getattr(small.mlp, name).weight)
    _fill_attention(large.self_attn, small.self_attn, shape, head_dim)


def _fill_attention(large: Any, small: Any, shape: Shape, head_dim: int) -> None:
    """
    Puts each head into a larger head, whose rotary frequencies include its own. Where the groups of the shape are
    smaller, a group of query heads gets several copies of its key and value head.
    """
    if shape.head_dim % head_dim:
        raise ValueError(f"`head_dim` {head_dim} does not divide the shape's, {shape.head_dim}.")
    step = shape.head_dim // head_dim
    half = torch.arange(head_dim // 2, device=small.q_proj.weight.device) * step
    places = torch.cat((half, half + shape.head_dim // 2))
    heads = small.q_proj.weight.shape[0] // head_dim
    kv_heads = small.k_proj.weight.shape[0] // head_dim
    group, new_group = heads // kv_heads, shape.num_attention_heads // shape.num_key_value_heads
    copies = math.ceil(group / new_group)
    if kv_heads * copies > shape.num_key_value_heads:
        raise ValueError(f"{heads} heads over {kv_heads} key-value heads do not fit into the heads of {shape}.")
    for head in range(heads):
        kv_head, place = divmod(head, group)
        new_kv_head = kv_head * copies + place // new_group
        new_head = new_kv_head * new_group + place % new_group
        for name, old, new in (("q_proj", head, new_head), ("k_proj", kv_head, new_kv_head)):
            # The scores are divided by the root of the larger size.
            factor = math.sqrt(step) if name == "q_proj" else 1.0
            weight = getattr(small, name).weight[old * head_dim : (old + 1) * head_dim]
            getattr(large, name).weight[new * shape.head_dim + places, : weight.shape[1]] = weight * factor
        # Values are not rotated: the first places will do.
        value = small.v_proj.weight[kv_head * head_dim : (kv_head + 1) * head_dim]
        first = new_kv_head * shape.head_dim
        large.v_proj.weight[first : first + head_dim, : value.shape[1]] = value
        output = small.o_proj.weight[:, head * head_dim : (head + 1) * head_dim]
        first = new_head * shape.head_dim
        large.o_proj.weight[: output.shape[0], first : first + head_dim] = output
