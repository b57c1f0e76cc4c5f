# Copyright 2026 The hf_falcon authors. Licensed under the Apache License, Version 2.0.
"""
The EAGLE-3 drafter (arXiv 2503.01840): decoder layers over a fusion of several of the target's hidden states, and a
head of its own over a draft vocabulary.
"""

from __future__ import annotations

import os
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers import initialization as init
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.models.llama.modeling_llama import LlamaMLP, LlamaRotaryEmbedding
from transformers.models.qwen3.modeling_qwen3 import Qwen3MLP

from ..core.checkpoint_files import reading
from ..core.draft_session import BlockSession, check_embedding, embed
from ..core.drafter import DraftModel
from ..core.interfaces import DrafterAcceleration
from ..core.modeling_falcon_draft import FalconAttention, FalconRMSNorm, KeyValueCache
from .checkpoints import load_weights, read_fields, read_options
from .eagle3_config import Eagle3DraftConfig, default_layers
from .eagle3_files import read_eagle3


class Eagle3Attention(FalconAttention):
    """
    Self-attention with Llama's biases or Qwen3's norms of queries and keys.

    Args:
        config: configuration of the decoder layers.
        layer (`int`): number of the layer. The first reads the token's embedding beside the hidden state.
    """

    def __init__(self, config: Any, layer: int):
        super().__init__(config, layer)
        bias, width = config.attention_bias, config.hidden_size * (2 if layer == 0 else 1)
        self.q_proj = nn.Linear(width, self.heads * self.head_dim, bias=bias)
        self.k_proj = nn.Linear(width, self.kv_heads * self.head_dim, bias=bias)
        self.v_proj = nn.Linear(width, self.kv_heads * self.head_dim, bias=bias)
        self.o_proj = nn.Linear(self.heads * self.head_dim, config.hidden_size, bias=bias)
        self.q_norm = self.k_norm = None
        if config.model_type == "qwen3":
            self.q_norm = FalconRMSNorm(self.head_dim, eps=config.rms_norm_eps)
            self.k_norm = FalconRMSNorm(self.head_dim, eps=config.rms_norm_eps)

    def queries_and_keys(self, hidden: Tensor) -> Tensor:
        """See [`FalconAttention.queries_and_keys`]."""
        if self.q_norm is None or self.k_norm is None:
            return super().queries_and_keys(hidden)
        queries = self.q_norm(self.q_proj(hidden).unflatten(-1, (-1, self.head_dim)))
        keys = self.k_norm(self.k_proj(hidden).unflatten(-1, (-1, self.head_dim)))
        return torch.cat((queries, keys), dim=-2)


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
        self.self_attn = Eagle3Attention(sizes, layer)
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
        rows = states.reshape(-1, states.shape[-1])
        rows = rows if self._norm is None else self._norm(rows)
        return self.linear(rows.to(self.linear.weight.dtype)).view(*states.shape[:-1], -1)

    def to_target_ids(self, draft_ids: Tensor) -> Tensor:
        """See [`DraftHead.to_target_ids`]."""
        return draft_ids if self.vocab_ids is None else self.vocab_ids[draft_ids]


class Eagle3DraftModel(DraftModel):
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
    base_model_prefix = "drafter"
    main_input_name = "features"
    _no_split_modules = ["Eagle3Layer"]
    supports_gradient_checkpointing = True
    # Each token of a block depends on the one before: blocks have one token.
    conditioning = None
    predicts_features = False

    d2t: Tensor | None
    t2d: Tensor | None

    def __init__(self, config: Eagle3DraftConfig, has_embedding: bool = False):
        super().__init__(config)
        sizes = config.transformer_layer_config
        width = config.num_features * config.target_hidden_size
        self.input_norm = FalconRMSNorm(width, eps=sizes.rms_norm_eps) if config.norm_before_fc else None
        self.fc_norm = None
        if config.fc_norm:
            self.fc_norm = nn.ModuleList(
                FalconRMSNorm(config.target_hidden_size, eps=sizes.rms_norm_eps) for _ in range(config.num_features)
            )
        self.fc = nn.Linear(width, sizes.hidden_size, bias=False)
        self.layers = nn.ModuleList(Eagle3Layer(config, i) for i in range(sizes.num_hidden_layers))
        kinds = getattr(sizes, "layer_types", None) or []
        self._is_sliding = [kind == "sliding_attention" for kind in kinds] or [False] * sizes.num_hidden_layers
        # See [`FalconDraftNetwork`].
        self.window: int | None = getattr(sizes, "sliding_window", None) if any(self._is_sliding) else None
        self.norm = FalconRMSNorm(sizes.hidden_size, eps=sizes.rms_norm_eps)
        self.lm_head = nn.Linear(sizes.hidden_size, config.draft_vocab_size, bias=False)
        self.embed_tokens = nn.Embedding(config.vocab_size, sizes.hidden_size) if has_embedding else None
        is_reduced = config.draft_vocab_size != config.vocab_size
        # Token i of the draft vocabulary is token i + d2t[i] of the target's; t2d marks the tokens in it.
        self.register_buffer("d2t", torch.zeros(config.draft_vocab_size, dtype=torch.long) if is_reduced else None)
        self.register_buffer("t2d", torch.zeros(config.vocab_size, dtype=torch.bool) if is_reduced else None)
        # No buffers: the dtype of the model may change, and these may not.
        self._frequencies: dict[torch.device, Tensor] = {}
        self._rotary_scaling = 1.0
        self.post_init()

    def _init_weights(self, module: nn.Module) -> None:
        super()._init_weights(module)
        if module is self and self.d2t is not None and self.t2d is not None:
            init.zeros_(self.d2t)
            init.copy_(self.t2d, torch.arange(self.config.vocab_size) < self.config.draft_vocab_size)

    @property
    def draft_vocab_ids(self) -> Tensor | None:
        """Target ids of the draft vocabulary, of shape `(draft_vocab_size,)`; `None` for the whole vocabulary."""
        return None if self.d2t is None else torch.arange(self.d2t.shape[0], device=self.d2t.device) + self.d2t

    @torch.no_grad()
    def set_draft_vocabulary(self, token_ids: Tensor) -> None:
        """Takes the target ids of the draft vocabulary, of shape `(draft_vocab_size,)`, in ascending order."""
        if self.d2t is not None and self.t2d is not None:
            self.d2t.copy_(token_ids - torch.arange(len(token_ids)))
            self.t2d.zero_()[token_ids] = True

    @torch.no_grad()
    def start_from(self, target: PreTrainedModel, scale: Tensor) -> None:
        """
        Starts the head from the target's, and the final norm from the scale of what the target's head reads.

        Args:
            target ([`PreTrainedModel`]): the target.
            scale (`torch.Tensor` of shape `(hidden_size,)`): root mean square of each of the target's features.
        """
        rows = target.get_output_embeddings().weight.detach()
        ids = self.draft_vocab_ids
        self.lm_head.weight.copy_(rows if ids is None else rows[ids.to(rows.device)])
        self.norm.weight.copy_(scale)

    @classmethod
    def from_pretrained(
        cls,
        pretrained_model_name_or_path: Any,
        dtype: str | torch.dtype | None = None,
        layer_ids: list[int] | None = None,
        **kwargs: Any,
    ) -> Any:
        """
        Loads an EAGLE-3 drafter, in evaluation mode.

        Args:
            pretrained_model_name_or_path, dtype, kwargs: see [`AutoDrafter.from_pretrained`].
            layer_ids (`list[int]`, *optional*):
                The hidden states of the target that it reads, if those in the file are wrong: the field
                `eagle_aux_hidden_state_layer_ids` of [`Eagle3DraftConfig`].
        """
        name = os.fspath(pretrained_model_name_or_path)
        config, weights = read_eagle3(name, read_fields(name, **kwargs), layer_ids, **kwargs)
        # An invalid value in a field of transformers may only fail when the network is built.
        with reading("config.json"), init.no_init_weights(), torch.device("meta"):
            drafter = cls(config, has_embedding="embed_tokens.weight" in weights)
        load_weights(drafter, name, weights, dtype)
        read_options(drafter, name, **kwargs)
        return drafter.eval()

    def check_target(self, target: PreTrainedModel) -> None:
        """
        See [`Drafter.check_target`]. Of a drafter whose file does not name the layers that it reads, this also chooses
        them.
        """
        super().check_target(target)
        if self.embed_tokens is None:
            check_embedding(self, target)
        config, text_config = self.config, target.config.get_text_config(decoder=True)
        families = {_family(name) for name in config.target_architectures}
        found = {_family(name) for name in (*(target.config.architectures or []), type(target).__name__)}
        if families and not families & found:
            raise ValueError(
                f"The drafter's `architectures` of its target are {config.target_architectures}, but the target is a "
                f"{type(target).__name__}: this drafter was made for {config.target_name_or_path or 'another target'}."
                " Use that target, or train a drafter for this one."
            )
        if config.eagle_aux_hidden_state_layer_ids is None:
            wanted, found_layers = self.fc.in_features // config.target_hidden_size, text_config.num_hidden_layers
            if len(default_layers(found_layers)) != wanted:
                raise ValueError(
                    f"The drafter's `eagle_aux_hidden_state_layer_ids` are not in its config.json, and a target of "
                    f"{found_layers} layers has no {wanted} hidden states that are read by default: give them as "
                    "`layer_ids` to `from_pretrained`."
                )
            config.choose_layers(found_layers)
        if max(config.eagle_aux_hidden_state_layer_ids) > text_config.num_hidden_layers:
            raise ValueError(
                f"The drafter's `eagle_aux_hidden_state_layer_ids` are {config.eagle_aux_hidden_state_layer_ids}, but "
                f"the target has {text_config.num_hidden_layers} layers: this drafter was made for "
                f"{config.target_name_or_path or 'another target'}."
            )

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

    def run_layers(
        self, fused: Tensor, ends: Tensor, position_ids: Tensor, mask: Tensor, cache: KeyValueCache | None = None
    ) -> Tensor:
        """See [`FalconDraftNetwork.run_layers`]; returns the hidden states that are fed back."""
        batch, rows, _ = fused.shape
        angles = position_ids.reshape(batch, rows, 1, 1) * self._frequencies_on(position_ids.device)
        cos, sin = angles.cos(), angles.sin()
        if self._rotary_scaling != 1.0:
            cos, sin = cos * self._rotary_scaling, sin * self._rotary_scaling
        cos, sin = cos.to(fused.dtype), sin.to(fused.dtype)
        sizes = self.config.transformer_layer_config
        # One mask for the query heads of each group; see [`FalconAttention`].
        mask = mask.repeat(1, 1, sizes.num_attention_heads // sizes.num_key_value_heads, 1)
        masks = mask.split(1, dim=1)
        hidden = fused.reshape(batch * rows, -1)
        for layer, is_sliding in zip(self.layers, self._is_sliding):
            hidden = layer(hidden, cos, sin, masks[-1] if is_sliding else masks[0], cache)
        hidden = self.norm(hidden) if self.config.norm_output else hidden
        return hidden.view(batch, rows, -1)

    def condition(self, states: Tensor, previous_embeds: Tensor) -> Tensor:
        """As [`FalconDraftNetwork.condition`]: `states` themselves."""
        return states

    def _frequencies_on(self, device: torch.device) -> Tensor:
        known = self._frequencies.get(device)
        if known is None:
            # Training may use what a call in inference mode has made.
            with torch.inference_mode(False), torch.no_grad(), torch.device("cpu"):
                rotary = LlamaRotaryEmbedding(self.config.transformer_layer_config)
                # Negative for the first half of a head; see [`FalconAttention`].
                known = torch.cat((-rotary.inv_freq, rotary.inv_freq)).to(device)
            self._rotary_scaling, self._frequencies[device] = rotary.attention_scaling, known
        return known


def _family(name: Any) -> str:
    """The family in the name of a class: "Llama" of "LlamaForCausalLM"."""
    return str(name).partition("For")[0].removesuffix("Model")
