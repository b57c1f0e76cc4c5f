# Copyright 2026 The hf_falcon authors. Licensed under the Apache License, Version 2.0.
"""The network of the Falcon drafter: a fusion of feature and token, then decoder layers with a relaxed causal mask."""

from __future__ import annotations

from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers import initialization as init
from transformers.activations import ACT2FN
from transformers.modeling_layers import GradientCheckpointingLayer

from .configuration_falcon_draft import FalconDraftConfig

LSTMState = tuple[Tensor, Tensor]


class KeyValueCache(Protocol):
    """The interface of a cache for a decoder layer."""

    def update(self, layer: int, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]: ...


def relaxed_causal_mask(block_ids: Tensor, valid: Tensor | None = None) -> Tensor:
    """
    The attention mask of a sequence in blocks: a position sees its whole block, in both directions, and all earlier
    blocks (Falcon, section 3.2).

    Args:
        block_ids (`torch.LongTensor` of shape `(batch, length)`): block of each position, never decreasing.
        valid (`torch.BoolTensor` of shape `(batch, length)`, *optional*): `False` hides a padding position.

    Returns:
        `torch.BoolTensor` of shape `(batch, 1, length, length)`: `True` where the row sees the column.
    """
    visible = block_ids[:, :, None] >= block_ids[:, None, :]
    if valid is not None:
        # A padding row sees itself: the softmax of a row without any position is undefined.
        itself = torch.eye(block_ids.shape[1], dtype=torch.bool, device=block_ids.device)
        visible = visible & (valid[:, None, :] | itself)
    return visible[:, None]


def additive_mask(visible: Tensor, dtype: torch.dtype) -> Tensor:
    """0 where `visible`, the lowest value of `dtype` elsewhere. All attention kernels read this form the same way."""
    zero = torch.zeros((), dtype=dtype, device=visible.device)
    return torch.where(visible, zero, torch.finfo(dtype).min)


def hide_end(mask: Tensor, slots: int) -> Tensor:
    """An additive mask with `slots` more slots at its end, which no row sees."""
    return F.pad(mask, (0, slots), value=torch.finfo(mask.dtype).min) if slots else mask


def block_anchors(block_ids: Tensor, block_size: int) -> Tensor:
    """
    What each position reads of the last one of its block, which has a projection for each distance to it: the place
    of that projection among all, the last position times `block_size`, plus the distance.

    Args:
        block_ids (`torch.LongTensor` of shape `(batch, length)`): block of each position, never decreasing.
        block_size (`int`): positions of a block.

    Returns:
        `torch.LongTensor` of shape `(batch, length)`.
    """
    ends = torch.searchsorted(block_ids.contiguous(), block_ids.contiguous(), right=True) - 1
    return ends * block_size + ends - torch.arange(block_ids.shape[1], device=block_ids.device)


def _frequencies(head_dim: int, theta: float, device: torch.device) -> Tensor:
    """Rotary frequencies of both halves of a head, of shape `(head_dim,)`; negative for the first, see `rotate`."""
    half = head_dim // 2
    # In float32, as bfloat16 cannot hold large positions. Training may use what a call in inference mode has made.
    with torch.inference_mode(False), torch.no_grad():
        frequencies = theta ** (torch.arange(half, device=device, dtype=torch.float32) / -half)
        return torch.cat((-frequencies, frequencies))


def rotate(states: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotates the pairs of the values i and i + head_dim / 2 of each head; `sin` of the first half is negated."""
    return torch.addcmul(states * cos, states.roll(states.shape[-1] // 2, dims=-1), sin)


class FalconRMSNorm(nn.RMSNorm):
    """`nn.RMSNorm` that also uses the fused kernel if the weight has another dtype than the input (autocast)."""

    def forward(self, hidden: Tensor) -> Tensor:
        return F.rms_norm(hidden, self.normalized_shape, self.weight.to(hidden.dtype), self.eps)


class FalconAttention(nn.Module):
    """
    Grouped-query self-attention with rotary positions.

    Args:
        config ([`FalconDraftConfig`]): the sizes.
        layer (`int`): number of the layer.
        has_bias (`bool`): whether queries, keys and values have biases.
        has_norms (`bool`): whether each head of queries and keys is normalised.
        input_size (`int`, *optional*): width of its input. Defaults to the hidden size.
    """

    def __init__(
        self,
        config: FalconDraftConfig,
        layer: int,
        has_bias: bool = False,
        has_norms: bool = False,
        input_size: int | None = None,
    ):
        super().__init__()
        self.layer = layer
        self.heads = config.num_attention_heads
        self.kv_heads = config.num_key_value_heads
        self.head_dim = config.head_dim
        width = input_size or config.hidden_size
        self.q_proj = nn.Linear(width, self.heads * self.head_dim, bias=has_bias)
        self.k_proj = nn.Linear(width, self.kv_heads * self.head_dim, bias=has_bias)
        self.v_proj = nn.Linear(width, self.kv_heads * self.head_dim, bias=has_bias)
        self.o_proj = nn.Linear(self.heads * self.head_dim, config.hidden_size, bias=False)
        self.q_norm = FalconRMSNorm(self.head_dim, eps=config.rms_norm_eps) if has_norms else None
        self.k_norm = FalconRMSNorm(self.head_dim, eps=config.rms_norm_eps) if has_norms else None

    def queries_and_keys(self, hidden: Tensor) -> Tensor:
        """The heads of the queries, then those of the keys, side by side."""
        if self.q_norm is None:
            return torch.cat((self.q_proj(hidden), self.k_proj(hidden)), dim=-1)
        queries = self.q_norm(self.q_proj(hidden).unflatten(-1, (-1, self.head_dim)))
        return torch.cat((queries, self.keys(hidden)), dim=-2)

    def keys(self, hidden: Tensor) -> Tensor:
        """Keys before their rotation, of shape `(..., kv_heads, head_dim)`, for `hidden` of shape `(..., width)`."""
        keys = self.k_proj(hidden).unflatten(-1, (-1, self.head_dim))
        return keys if self.k_norm is None else self.k_norm(keys)

    def forward(self, hidden: Tensor, cos: Tensor, sin: Tensor, mask: Tensor, cache: KeyValueCache | None) -> Tensor:
        batch, length, _, _ = cos.shape
        # Queries and keys are rotated together.
        rotated = self.queries_and_keys(hidden).view(batch, length, -1, self.head_dim)
        rotated = rotate(rotated, cos, sin).transpose(1, 2)
        queries, keys = rotated.split((self.heads, self.kv_heads), dim=1)
        values = self.v_proj(hidden).view(batch, length, self.kv_heads, self.head_dim).transpose(1, 2)
        if cache is not None:
            keys, values = cache.update(self.layer, keys, values)
        # The query heads of a group become rows of one head. Grouped-query attention then copies no key or value.
        queries = queries.reshape(batch, self.kv_heads, -1, self.head_dim)
        mixed = F.scaled_dot_product_attention(queries, keys, values, attn_mask=mask)
        mixed = mixed.reshape(batch, self.heads, length, self.head_dim).transpose(1, 2)
        return self.o_proj(mixed.reshape(batch * length, self.heads * self.head_dim))


class FalconMLP(nn.Module):
    """Gated MLP."""

    def __init__(self, config: FalconDraftConfig):
        super().__init__()
        self.gate_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.up_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.down_proj = nn.Linear(config.intermediate_size, config.hidden_size, bias=False)
        self.activation = ACT2FN[config.hidden_act]

    def forward(self, hidden: Tensor) -> Tensor:
        return self.down_proj(self.activation(self.gate_proj(hidden)) * self.up_proj(hidden))


class FalconDecoderLayer(GradientCheckpointingLayer):
    """
    Pre-norm decoder layer.

    Args:
        config ([`FalconDraftConfig`]): the sizes.
        layer (`int`): number of the layer.
        has_bias, has_qk_norm (`bool`): see [`FalconAttention`].
        has_post_norms (`bool`): whether the outputs of attention and MLP are normalised, too.
    """

    def __init__(
        self,
        config: FalconDraftConfig,
        layer: int,
        has_bias: bool = False,
        has_qk_norm: bool = False,
        has_post_norms: bool = False,
    ):
        super().__init__()
        self.input_layernorm = FalconRMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.self_attn = FalconAttention(config, layer, has_bias, has_qk_norm)
        # Before the MLP: the name is Llama's.
        self.post_attention_layernorm = FalconRMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.mlp = FalconMLP(config)
        self.attention_post_norm = self.mlp_post_norm = None
        if has_post_norms:
            self.attention_post_norm = FalconRMSNorm(config.hidden_size, eps=config.rms_norm_eps)
            self.mlp_post_norm = FalconRMSNorm(config.hidden_size, eps=config.rms_norm_eps)

    def forward(self, hidden: Tensor, cos: Tensor, sin: Tensor, mask: Tensor, cache: KeyValueCache | None) -> Tensor:
        mixed = self.self_attn(self.input_layernorm(hidden), cos, sin, mask, cache)
        hidden = hidden + (mixed if self.attention_post_norm is None else self.attention_post_norm(mixed))
        mixed = self.mlp(self.post_attention_layernorm(hidden))
        return hidden + (mixed if self.mlp_post_norm is None else self.mlp_post_norm(mixed))


class FalconFusion(nn.Module):
    """
    Joins the feature of a position with the embedding of the token one step ahead: LSTM layers over the sequence
    (Falcon, section 3.2), or one linear layer when `num_lstm_layers` is 0 (EAGLE).
    """

    def __init__(self, config: FalconDraftConfig):
        super().__init__()
        # Targets' embeddings differ in scale by orders of magnitude. The model's buffers normalise features.
        self.embedding_norm = FalconRMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.lstm: nn.LSTM | None = None
        if config.num_lstm_layers == 0:
            self.linear = nn.Linear(2 * config.hidden_size, config.hidden_size, bias=False)
        else:
            self.lstm = nn.LSTM(
                2 * config.hidden_size, config.hidden_size, num_layers=config.num_lstm_layers, batch_first=True
            )
            # The outputs of a new LSTM are far smaller than 1, and would have no effect in the residual stream.
            self.output_norm = FalconRMSNorm(config.hidden_size, eps=config.rms_norm_eps)

    def forward(self, features: Tensor, embeds: Tensor, state: LSTMState | None) -> tuple[Tensor, LSTMState | None]:
        pairs = torch.cat((features, self.embedding_norm(embeds)), dim=-1)
        if self.lstm is None:
            return self.linear(pairs), None
        hidden, state = self.lstm(pairs, state)
        return self.output_norm(hidden), state


class FalconLayerReader(nn.Module):
    """Projects the outputs of several of the target's layers to the width of one feature (EAGLE-3)."""

    def __init__(self, config: FalconDraftConfig):
        super().__init__()
        # The layers' outputs differ in scale by orders of magnitude.
        self.norms = nn.ModuleList(
            FalconRMSNorm(config.hidden_size, eps=config.rms_norm_eps) for _ in config.feature_layers
        )
        self.linear = nn.Linear(len(config.feature_layers) * config.hidden_size, config.hidden_size, bias=False)

    def forward(self, outputs: Tensor) -> Tensor:
        parts = outputs.chunk(len(self.norms), dim=-1)
        return self.linear(torch.cat([norm(part) for norm, part in zip(self.norms, parts)], dim=-1))


class FalconConditioning(nn.Module):
    """
    Corrects the prediction of a position by the token before it: a gated MLP on both, added to the prediction. The
    tokens of a block are then drafted one after another, and depend on their branch, at the cost of the LM head alone
    (TreeFlash; comparable to DSpark's Markov head).
    """

    def __init__(self, config: FalconDraftConfig):
        super().__init__()
        self.embedding_norm = FalconRMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.gate_proj = nn.Linear(2 * config.hidden_size, config.conditioning_size, bias=False)
        self.up_proj = nn.Linear(2 * config.hidden_size, config.conditioning_size, bias=False)
        self.down_proj = nn.Linear(config.conditioning_size, config.hidden_size, bias=False)
        self.activation = ACT2FN[config.hidden_act]

    def forward(self, normalised: Tensor, embeds: Tensor) -> Tensor:
        pairs = torch.cat((normalised, self.embedding_norm(embeds)), dim=-1)
        return normalised + self.down_proj(self.activation(self.gate_proj(pairs)) * self.up_proj(pairs))


class FalconDraftNetwork(PreTrainedModel):
    """
    The drafter's network (Falcon, arXiv 2412.12639, section 3).

    At position i it reads the target's feature `f_i` and the embedding of token `t_{i+1}`, and predicts `f_{i+k}`,
    where k is `config.block_size`. The target's own LM head computes the logits of `t_{i+k+1}` from this prediction.
    Embedding and LM head belong to the target ([`TargetHead`]) and are never stored in the drafter.

    Args:
        config ([`FalconDraftConfig`]): its configuration. The weights are new.
    """

    config_class: type[FalconDraftConfig] = FalconDraftConfig
    base_model_prefix = "drafter"
    main_input_name = "features"
    _no_split_modules = ["FalconDecoderLayer"]
    supports_gradient_checkpointing = True
    # Whether the outputs are features of the target, for the target's head. Other drafters have a head of their own.
    predicts_features = True
    # Positions that a layer with a sliding window sees. With one, masks have a second head for these layers.
    window: int | None = None

    feature_mean: Tensor
    feature_std: Tensor
    draft_vocab_ids: Tensor

    def __init__(self, config: FalconDraftConfig):
        super().__init__(config)
        self.layer_reader = FalconLayerReader(config) if config.feature_layers else None
        self.fusion = FalconFusion(config)
        self.anchor = None
        if config.block_anchor and config.block_size > 1:
            self.anchor = nn.Linear(config.hidden_size, config.block_size * config.hidden_size, bias=False)
        kind = config.attention_bias, config.use_qk_norm, config.use_post_norms
        self.layers = nn.ModuleList(FalconDecoderLayer(config, i, *kind) for i in range(config.num_hidden_layers))
        self.norm = FalconRMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.conditioning = None
        if config.conditioning_size > 0 and config.block_size > 1:
            self.conditioning = FalconConditioning(config)
        self.register_buffer("feature_mean", torch.zeros(config.hidden_size))
        self.register_buffer("feature_std", torch.ones(config.hidden_size))
        if config.draft_vocab_size is not None:
            self.register_buffer("draft_vocab_ids", torch.arange(config.draft_vocab_size))
        # No buffer: the dtype of the model may change, and this one may not.
        self._frequencies: dict[torch.device, Tensor] = {}
        self.post_init()

    @torch.no_grad()
    def set_draft_vocabulary(self, token_ids: Tensor) -> None:
        """Takes the target ids of the draft vocabulary, of shape `(draft_vocab_size,)`, in ascending order."""
        self.draft_vocab_ids.copy_(token_ids)

    def _init_weights(self, module: nn.Module) -> None:
        super()._init_weights(module)
        if module is self:
            init.zeros_(self.feature_mean)
            init.ones_(self.feature_std)
            if self.config.draft_vocab_size is not None:
                init.copy_(self.draft_vocab_ids, torch.arange(self.config.draft_vocab_size))

    def forward(
        self,
        features: Tensor,
        inputs_embeds: Tensor,
        block_ids: Tensor,
        position_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
    ) -> Tensor:
        """
        Predicts over whole sequences, in any blocks, as a pass of training does.

        Args:
            features (`torch.Tensor` of shape `(batch, length, (1 + layers) * hidden_size)`):
                The target's features `f_i`, followed by the outputs of its `config.feature_layers` at these positions.
            inputs_embeds (`torch.Tensor` of shape `(batch, length, hidden_size)`): embeddings of the tokens `t_{i+1}`.
            block_ids (`torch.LongTensor` of shape `(batch, length)`): block of each position, never decreasing.
            position_ids (`torch.LongTensor` of shape `(batch, length)`, *optional*): defaults to 0, 1, 2, ...
            attention_mask (`torch.Tensor` of shape `(batch, length)`, *optional*): 0 hides a padding position.

        Returns:
            `torch.Tensor` of shape `(batch, length, hidden_size)`: predictions of `f_{i+k}`.
        """
        fused, _ = self.fuse(features, inputs_embeds)
        if position_ids is None:
            position_ids = torch.arange(features.shape[1], device=features.device).expand(features.shape[:2])
        valid = None if attention_mask is None else attention_mask.bool()
        mask = additive_mask(relaxed_causal_mask(block_ids, valid), fused.dtype)
        return self.run_layers(fused, block_anchors(block_ids, self.config.block_size), position_ids, mask)

    def fuse(
        self, features: Tensor, inputs_embeds: Tensor, state: LSTMState | None = None
    ) -> tuple[Tensor, LSTMState | None]:
        """
        Fuses features and embeddings, recurrently where there is an LSTM.

        Args:
            features, inputs_embeds (`torch.Tensor` of shape `(batch, length, ...)`):
                See `forward`. Predicted features are `hidden_size` wide, because they include no outputs of layers.
            state (*optional*): LSTM state after the position before the first one.

        Returns:
            The fused inputs, of shape `(batch, length, hidden_size)`, and the state after the last position (`None`
            without an LSTM).
        """
        hidden_size = self.config.hidden_size
        if self.layer_reader is None or features.shape[-1] == hidden_size:
            normalised = self._normalise(features)
        else:
            normalised = self._normalise(features[..., :hidden_size])
            normalised = normalised + self.layer_reader(features[..., hidden_size:].to(normalised.dtype))
        return self.fusion(normalised, inputs_embeds.to(normalised.dtype), state)

    def run_layers(
        self, fused: Tensor, anchors: Tensor, position_ids: Tensor, mask: Tensor, cache: KeyValueCache | None = None
    ) -> Tensor:
        """
        Runs the decoder layers over fused inputs.

        Args:
            fused (`torch.Tensor` of shape `(batch, rows, hidden_size)`): outputs of `fuse`.
            anchors (`torch.LongTensor` of shape `(batch, rows)`): see [`block_anchors`].
            position_ids (`torch.LongTensor` of shape `(batch, rows)`): positions i.
            mask (`torch.Tensor` of shape `(batch, 1, rows, cached + rows)`): additive attention mask.
            cache (*optional*): the keys and values of earlier rows. The new ones are written into it.

        Returns:
            `torch.Tensor` of shape `(batch, rows, hidden_size)`: predictions of the features `f_{i+k}`.
        """
        batch, rows, width = fused.shape
        # One matrix: a product of three dimensions takes twice as many operations.
        hidden = fused.reshape(batch * rows, width)
        if self.anchor is not None:
            # Each place in a block has its own projection, which encodes how far ahead the position predicts.
            projections = self.anchor(hidden).view(batch, -1, width)
            hidden = hidden + projections.gather(1, anchors[..., None].expand(-1, -1, width)).view(batch * rows, width)
        angles = position_ids.reshape(batch, rows, 1, 1) * self._frequencies_on(position_ids.device)
        cos, sin = angles.cos().to(hidden.dtype), angles.sin().to(hidden.dtype)
        # One mask for the query heads of each group; see [`FalconAttention`].
        mask = mask.repeat(1, 1, self.config.num_attention_heads // self.config.num_key_value_heads, 1)
        for layer in self.layers:
            hidden = layer(hidden, cos, sin, mask, cache)
        return torch.addcmul(self.feature_mean, self.norm(hidden), self.feature_std).view(batch, rows, -1)

    def condition(self, predicted: Tensor, previous_embeds: Tensor) -> Tensor:
        """
        Corrects each predicted feature by the token before the token that it predicts.

        Args:
            predicted (`torch.Tensor` of shape `(..., hidden_size)`): predictions of `f_{i+k}`.
            previous_embeds (`torch.Tensor` of the same shape): embeddings of the tokens `t_{i+k}`.

        Returns:
            `torch.Tensor` of the same shape; `predicted` itself if `config.conditioning_size` is 0.
        """
        if self.conditioning is None:
            return predicted
        corrected = self.conditioning(self._normalise(predicted), previous_embeds.to(self.norm.weight.dtype))
        return corrected * self.feature_std + self.feature_mean

    def _frequencies_on(self, device: torch.device) -> Tensor:
        known = self._frequencies.get(device)
        if known is None:
            known = _frequencies(self.config.head_dim, self.config.rope_theta, device)
            if not torch.compiler.is_compiling():
                self._frequencies[device] = known
        return known

    def _normalise(self, features: Tensor) -> Tensor:
        return (features.to(self.norm.weight.dtype) - self.feature_mean) / self.feature_std
