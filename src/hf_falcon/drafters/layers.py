# Copyright 2026 The hf_falcon authors. Licensed under the Apache License, Version 2.0.
"""Attention and rotary positions of drafters whose decoder layers are Llama's or Qwen3's."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from ..core.modeling_falcon_draft import FalconAttention
from ..core.tree import to_device


class LayerAttention(FalconAttention):
    """
    Self-attention with Llama's biases or Qwen3's norms of queries and keys.

    Args:
        config: configuration of the decoder layers.
        layer (`int`): number of the layer.
        has_norms (`bool`): whether queries and keys are normalised.
        input_size (`int`, *optional*): width of its input. Defaults to the hidden size.
    """

    def __init__(self, config: Any, layer: int, has_norms: bool, input_size: int | None = None):
        super().__init__(config, layer, config.attention_bias, has_norms, input_size)
        if config.attention_bias:
            self.o_proj = nn.Linear(self.heads * self.head_dim, config.hidden_size)


class RotaryEmbedding:
    """
    Rotary positions of decoder layers, as [`FalconAttention`] takes them.

    Args:
        config: configuration of the decoder layers. Its frequencies do not depend on the length of the context.
    """

    def __init__(self, config: Any):
        self._config = config
        # No buffers: the dtype of the model may change, and these may not.
        self._frequencies: dict[torch.device, Tensor] = {}
        self._scaling = 1.0

    def __call__(self, position_ids: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """
        Cosine and sine of all angles.

        Args:
            position_ids (`torch.LongTensor` of shape `(batch, rows)`): the positions.
            dtype (`torch.dtype`): dtype of the results.

        Returns:
            Two `torch.Tensor` of shape `(batch, rows, 1, head_dim)`.
        """
        angles = position_ids[..., None, None] * self._frequencies_on(position_ids.device)
        cos, sin = angles.cos(), angles.sin()
        if self._scaling != 1.0:
            cos, sin = cos * self._scaling, sin * self._scaling
        return cos.to(dtype), sin.to(dtype)

    def _frequencies_on(self, device: torch.device) -> Tensor:
        known = self._frequencies.get(device)
        if known is None:
            # Training may use what a call in inference mode has made.
            with torch.inference_mode(False), torch.no_grad(), torch.device("cpu"):
                rotary = LlamaRotaryEmbedding(self._config)
                # Negative for the first half of a head; see [`rotate`].
                known = to_device(torch.cat((-rotary.inv_freq, rotary.inv_freq)), device)
            self._scaling, self._frequencies[device] = rotary.attention_scaling, known
        return known
