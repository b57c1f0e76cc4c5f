# Copyright 2026 The hf_falcon authors. Licensed under the Apache License, Version 2.0.
"""Shapes of large targets, whose costs `hf-falcon bench --scaled` measures."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Shape:
    """
    The shape of a Llama-like model.

    Args:
        hidden_size, intermediate_size, num_hidden_layers, num_attention_heads, num_key_value_heads, head_dim (`int`):
            As in [`~transformers.LlamaConfig`].
    """

    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int


# Llama-3.2-1B, Llama-2-7B (and Vicuna's) and Llama-2-13B.
SHAPES = {
    "1b": Shape(2048, 8192, 16, 32, 8, 64),
    "7b": Shape(4096, 11008, 32, 32, 32, 128),
    "13b": Shape(5120, 13824, 40, 40, 40, 128),
}
