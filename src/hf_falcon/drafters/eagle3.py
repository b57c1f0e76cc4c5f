# Copyright 2026 The hf_falcon authors. Licensed under the Apache License, Version 2.0.
"""
The EAGLE-3 drafter (arXiv 2503.01840): decoder layers over a fusion of several of the target's hidden states, and a
head of its own over a draft vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.models.llama.modeling_llama import LlamaMLP
from transformers.models.qwen3.modeling_qwen3 import Qwen3MLP

from ..core.draft_session import BlockSession, embed
from ..core.interfaces import DrafterAcceleration
from ..core.modeling_falcon_draft import FalconRMSNorm, KeyValueCache
from .eagle3_config import Eagle3DraftConfig, default_layers
from .eagle3_files import eagle3_fields, original_name
from .layers import LayerAttention
from .speculators_model import SpeculatorsDraftModel


class Eagle3Layer(GradientCheckpointingLayer):
    """A decoder layer. The first one reads `[embedding, hidden state]`, each normalised by itself."""

    def __init__(self, config: Eagle3DraftConfig, layer: int):
        super().__init__()
        sizes = config.transformer_layer_config
        self.is_first = layer == 0
        self.norm_before_residual = config.norm_before_residual
        self.input_layernorm = FalconRMSNorm(sizes.hidden_size, eps=sizes.rms_norm_eps)
        if self.is_first:
            self.hidden_norm = FalconRMSNorm(sizes.hidden_size, eps=sizes.rms_norm_eps)
        width = sizes.hidden_size * (2 if self.is_first else 1)
        self.self_attn = LayerAttention(sizes, layer, has_norms=sizes.model_type == "qwen3", input_size=width)
        self.post_attention_layernorm = FalconRMSNorm(sizes.hidden_size, eps=sizes.rms_norm_eps)
        self.mlp = LlamaMLP(sizes) if sizes.model_type == "llama" else Qwen3MLP(sizes)

    def forward(self, hidden: Tensor, cos: Tensor, sin: Tensor, mask: Tensor, cache: KeyValueCache | None) -> Tensor:
        if self.is_first:
            embeds, residual = hidden.chunk(2, dim=-1)
            normed = self.hidden_norm(residual)
            if self.norm_before_residual:
                residual = normed
            inputs = torch.cat((self.input_layernorm(embeds), normed), dim=-1)
        else:
            residual, inputs = hidden, self.input_layernorm(hidden)
        hidden = residual + self.self_attn(inputs, cos, sin, mask, cache)
        return hidden + self.mlp(self.post_attention_layernorm(hidden))


class Eagle3Head:
    """
    The drafter's own head, with its own embedding or the target's; see [`DraftHead`].

    Args:
        drafter ([`Eagle3DraftModel`]): the drafter.
        target ([`PreTrainedModel`]): its target.
    """

    def __init__(self, drafter: Eagle3DraftModel, target: PreTrainedModel):
        drafter.check_target(target)
        self.linear: nn.Linear = drafter.lm_head
        self.draft_vocab_size: int = drafter.config.draft_vocab_size
        self._norm = None if drafter.config.norm_output else drafter.norm
        own = drafter.embed_tokens
        self._embedding = target.get_input_embeddings() if own is None else own
        self.vocab_ids = drafter.draft_vocab_ids

    def parameters(self) -> list[Tensor]:
        """The parameters that its logits depend on."""
        return [self.linear.weight] if self._norm is None else [self.linear.weight, self._norm.weight]

    def embed(self, token_ids: Tensor) -> Tensor:
        """Embeddings of `token_ids` of shape `(...)`, of shape `(..., hidden_size)` and on the drafter's device."""
        return embed(self._embedding, token_ids, self.linear.weight.device)

    def logits(self, states: Tensor) -> Tensor:
        """See [`DraftHead.logits`]."""
        # One matrix: for a batch of strided rows the product would copy the weight.
        flat = states.reshape(-1, states.shape[-1])
        flat = flat if self._norm is None else self._norm(flat)
        return self.linear(flat.to(self.linear.weight.dtype)).view(*states.shape[:-1], -1)

    def to_target_ids(self, draft_ids: Tensor) -> Tensor:
        """See [`DraftHead.to_target_ids`]."""
        return draft_ids if self.vocab_ids is None else self.vocab_ids[draft_ids]

    def for_tokens(self, token_ids: Tensor) -> None:
        """See [`DraftHead.for_tokens`]. The head has weights for the draft vocabulary alone."""


class Eagle3DraftModel(SpeculatorsDraftModel):
    """
    The EAGLE-3 drafter.

    At position i it reads hidden states of the target and the embedding of token `t_{i+1}`; its head scores `t_{i+2}`.
    A further pass reads the drafter's own hidden state in place of the target's. The names of the weights are those of
    the package `speculators`.

    Args:
        config ([`Eagle3DraftConfig`]): its configuration. The weights are new; [`AutoDrafter`] loads trained weights.
        has_embedding (`bool`, *optional*, defaults to `False`): whether it has an embedding of its own.
    """

    config_class = Eagle3DraftConfig
    _no_split_modules = ["Eagle3Layer"]
    # Each token of a block depends on the one before: blocks have one token.
    conditioning = None

    def __init__(self, config: Eagle3DraftConfig, has_embedding: bool = False):
        super().__init__(config, config.num_features, has_embedding, has_head=True)
        sizes = config.transformer_layer_config
        width = config.num_features * config.target_hidden_size
        self.input_norm = FalconRMSNorm(width, eps=sizes.rms_norm_eps) if config.norm_before_fc else None
        self.fc_norm = None
        if config.fc_norm:
            self.fc_norm = nn.ModuleList(
                FalconRMSNorm(config.target_hidden_size, eps=sizes.rms_norm_eps) for _ in range(config.num_features)
            )
        self.norms_output = config.norm_output
        self.post_init()

    def make_layer(self, index: int) -> Eagle3Layer:
        """See [`SpeculatorsDraftModel.make_layer`]."""
        return Eagle3Layer(self.config, index)

    @classmethod
    def fields_of(cls, fields: dict[str, Any], weights: Mapping[str, Tensor]) -> dict[str, Any]:
        """See [`SpeculatorsDraftModel.fields_of`]. An original layout does not say all in its `config.json`."""
        return eagle3_fields(fields, {new: weights[old] for old, new in cls.weight_names(fields, weights).items()})

    @classmethod
    def weight_names(cls, fields: dict[str, Any], names: Iterable[str]) -> dict[str, str]:
        """See [`SpeculatorsDraftModel.weight_names`]."""
        is_original = "speculators_model_type" not in fields
        return {name: original_name(name) if is_original else name for name in names}

    @classmethod
    def parts_of(cls, config: Any, weights: Mapping[str, Tensor]) -> dict[str, bool]:
        """See [`SpeculatorsDraftModel.parts_of`]."""
        return {"has_embedding": "embed_tokens.weight" in weights}

    def check_layers(self, num_layers: int) -> None:
        """
        See [`SpeculatorsDraftModel.check_layers`]. Of a drafter whose file does not name the layers that it reads,
        this also chooses them.
        """
        config = self.config
        if config.eagle_aux_hidden_state_layer_ids is None:
            wanted = self.fc.in_features // config.target_hidden_size
            if len(default_layers(num_layers)) != wanted:
                raise ValueError(
                    f"The drafter's `eagle_aux_hidden_state_layer_ids` are not in its config.json, and a target of "
                    f"{num_layers} layers has no {wanted} hidden states that are read by default: give them as "
                    "`layer_ids` to `from_pretrained`."
                )
            config.choose_layers(num_layers)
        super().check_layers(num_layers)

    def make_head(self, target: PreTrainedModel) -> Eagle3Head:
        """See [`Drafter.make_head`]."""
        return Eagle3Head(self, target)

    def start_session(self, head: Eagle3Head, acceleration: DrafterAcceleration) -> BlockSession:
        """See [`Drafter.start_session`]."""
        return BlockSession(self, head, acceleration)

    def fuse(self, features: Tensor, inputs_embeds: Tensor, state: None = None) -> tuple[Tensor, None]:
        """
        Lays hidden states and embeddings side by side.

        Args:
            features (`torch.Tensor` of shape `(batch, length, (1 + num_features) * target_hidden_size)`):
                The target's last hidden state, which is not read, and the hidden states of `config.feature_layers`; or
                of shape `(batch, length, hidden_size)`, outputs of `run_layers`.
            inputs_embeds (`torch.Tensor` of shape `(batch, length, hidden_size)`): embeddings of the tokens `t_{i+1}`.
            state (*optional*): not used.

        Returns:
            `torch.Tensor` of shape `(batch, length, 2 * hidden_size)`, and `None`.
        """
        hidden = features.to(self.fc.weight.dtype)
        if features.shape[-1] != self.config.hidden_size:
            hidden = hidden[..., self.config.target_hidden_size :]
            if self.input_norm is not None:
                hidden = self.input_norm(hidden)
            if self.fc_norm is not None:
                parts = hidden.chunk(len(self.fc_norm), dim=-1)
                hidden = torch.cat([norm(part) for norm, part in zip(self.fc_norm, parts)], dim=-1)
            hidden = self.fc(hidden)
        return torch.cat((inputs_embeds.to(hidden.dtype), hidden), dim=-1), None

    def condition(self, states: Tensor, previous_embeds: Tensor) -> Tensor:
        """As [`FalconDraftNetwork.condition`]: `states` themselves."""
        return states
