# Copyright 2026 The hf_falcon authors. Licensed under the Apache License, Version 2.0.
"""Configuration of the Falcon drafter."""

from __future__ import annotations

from os import PathLike
from typing import Any

from transformers import PreTrainedConfig, PreTrainedModel

from .interfaces import drafter_files


class FalconDraftConfig(PreTrainedConfig):
    r"""
    Configuration of a [`FalconDraftModel`], the semi-autoregressive drafter of Falcon (arXiv 2412.12639, section 3).

    [`FalconDraftConfig.from_target`] makes one for a target, with all fields that must equal the target's.

    Args:
        vocab_size (`int`, *optional*, defaults to 32000):
            Size of the target's vocabulary: [`FalconDraftModel.check_target`] requires both to be equal.
        hidden_size (`int`, *optional*, defaults to 576):
            Width of the drafter, and of the target's last hidden state, which the drafter reads and predicts.
        intermediate_size (`int`, *optional*, defaults to 1536):
            Width of the MLP of a decoder layer.
        num_attention_heads (`int`, *optional*, defaults to 9):
            Query heads of a decoder layer.
        num_key_value_heads (`int`, *optional*):
            Key and value heads (grouped-query attention). Defaults to `num_attention_heads`.
        head_dim (`int`, *optional*):
            Width of one head. Defaults to `hidden_size // num_attention_heads`.
        block_size (`int`, *optional*, defaults to 2):
            Tokens proposed by one draft pass (k in the paper).
        num_lstm_layers (`int`, *optional*, defaults to 2):
            LSTM layers that fuse feature and token embedding. 0 is one linear layer, as in EAGLE.
        num_hidden_layers (`int`, *optional*, defaults to 2):
            Decoder layers under the relaxed causal mask.
        block_anchor (`bool`, *optional*, defaults to `True`):
            Add a projection of the block's last fused input, the newest (feature, token) pair, to every position of
            the block, with separate weights for each place in it. Without it, attention must learn to read the newest
            pair, and positions have no information on how far ahead they predict. No weights at `block_size=1`.
        conditioning_size (`int`, *optional*, defaults to 0):
            Width of the MLP that makes each token of a block depend on the token before it in its branch. With 0,
            siblings share their children's distribution, as in the paper. No weights at `block_size=1`.
        feature_layers (`list[int]`, *optional*, defaults to `[]`):
            Layers of the target, counted from 0, whose outputs the drafter reads beside the feature (EAGLE-3). Drafted
            positions have no such outputs: train with `unroll_passes`, so that the drafter learns to predict without
            them.
        draft_vocab_size (`int`, *optional*):
            The number of the target's tokens that drafting scores; their ids are stored in the checkpoint (FR-Spec,
            EAGLE-3). With `None`, drafting scores all tokens.
        hidden_act (`str`, *optional*, defaults to `"silu"`):
            Activation of the MLP.
        attention_bias (`bool`, *optional*, defaults to `False`):
            Add biases to queries, keys and values (Qwen 2).
        use_qk_norm (`bool`, *optional*, defaults to `False`):
            Normalise each head of queries and keys (Qwen 3, Gemma 3).
        use_post_norms (`bool`, *optional*, defaults to `False`):
            Normalise the outputs of attention and MLP (Gemma 2 and 3).
        rms_norm_eps (`float`, *optional*, defaults to 1e-5):
            Epsilon of the norms.
        rope_theta (`float`, *optional*, defaults to 10000.0):
            Base of the rotary embedding.
        max_position_embeddings (`int`, *optional*, defaults to 2048):
            Longest context of the target.
        initializer_range (`float`, *optional*, defaults to 0.02):
            Standard deviation of the initial weights.
        logit_scale (`float`, *optional*, defaults to 1.0):
            The factor of the target's logits (Cohere's `logit_scale`, Granite's 1 / `logits_scaling`).
        logit_softcapping (`float`, *optional*):
            The soft cap of the target's logits (Gemma 2).
        target_model_type (`str`, *optional*):
            `model_type` of the target that the drafter was made for.
        target_name_or_path (`str`, *optional*):
            Name of that target.
        target_fingerprint (`str`, *optional*):
            [`weights_fingerprint`] of that target.
        target_embedding_fingerprint (`str`, *optional*):
            [`embedding_fingerprint`] of that target, which a quantised copy shares.
        weights_sha256 (`dict[str, str]`, *optional*):
            The sha256 of each weight file, by its name. [`FalconDraftModel.save_pretrained`] writes it. Other weight
            files are not loaded.
        kwargs (*optional*):
            Fields of [`PreTrainedConfig`], for example `eos_token_id` and `dtype`. Fields that a drafter does not need
            are left out. Fields that would load other files or code are refused.

    Raises:
        `ValueError`: for a field out of range or of another type; it names the field, its value and the allowed
            values.
    """

    model_type = "falcon_draft"

    def __init__(
        self,
        vocab_size: int = 32000,
        hidden_size: int = 576,
        intermediate_size: int = 1536,
        num_attention_heads: int = 9,
        num_key_value_heads: int | None = None,
        head_dim: int | None = None,
        block_size: int = 2,
        num_lstm_layers: int = 2,
        num_hidden_layers: int = 2,
        block_anchor: bool = True,
        conditioning_size: int = 0,
        feature_layers: list[int] | None = None,
        draft_vocab_size: int | None = None,
        hidden_act: str = "silu",
        attention_bias: bool = False,
        use_qk_norm: bool = False,
        use_post_norms: bool = False,
        rms_norm_eps: float = 1e-5,
        rope_theta: float = 10000.0,
        max_position_embeddings: int = 2048,
        initializer_range: float = 0.02,
        logit_scale: float = 1.0,
        logit_softcapping: float | None = None,
        target_model_type: str | None = None,
        target_name_or_path: str | None = None,
        target_fingerprint: str | None = None,
        target_embedding_fingerprint: str | None = None,
        weights_sha256: dict[str, str] | None = None,
        **kwargs: Any,
    ):
        self.vocab_size = vocab_size
        self.hidden_size = hidden_size
        self.intermediate_size = intermediate_size
        self.num_attention_heads = num_attention_heads
        self.num_key_value_heads = num_attention_heads if num_key_value_heads is None else num_key_value_heads
        self.block_size = block_size
        self.num_lstm_layers = num_lstm_layers
        self.num_hidden_layers = num_hidden_layers
        self.block_anchor = block_anchor
        self.conditioning_size = conditioning_size
        self.feature_layers = [] if feature_layers is None else feature_layers
        self.draft_vocab_size = draft_vocab_size
        self.hidden_act = hidden_act
        self.attention_bias = attention_bias
        self.use_qk_norm = use_qk_norm
        self.use_post_norms = use_post_norms
        self.rms_norm_eps = rms_norm_eps
        self.rope_theta = rope_theta
        self.max_position_embeddings = max_position_embeddings
        self.initializer_range = initializer_range
        self.logit_scale = logit_scale
        self.logit_softcapping = logit_softcapping
        self.target_model_type = target_model_type
        self.target_name_or_path = target_name_or_path
        self.target_fingerprint = target_fingerprint
        self.target_embedding_fingerprint = target_embedding_fingerprint
        self.weights_sha256 = {} if weights_sha256 is None else weights_sha256
        self.head_dim: Any = head_dim
        drafter_files().check_config(self, kwargs)
        self.feature_layers = list(self.feature_layers)
        if self.head_dim is None:
            self.head_dim = self.hidden_size // self.num_attention_heads
        # The drafter has no embedding of its own that could be tied.
        kwargs.pop("tie_word_embeddings", None)
        super().__init__(tie_word_embeddings=False, **kwargs)

    @classmethod
    def get_config_dict(
        cls, pretrained_model_name_or_path: str | PathLike[str], **kwargs: Any
    ) -> tuple[dict[str, Any], dict[str, Any]]:
        """See [`PreTrainedConfig.get_config_dict`]."""
        return drafter_files().read_config(super().get_config_dict, pretrained_model_name_or_path, **kwargs)

    @classmethod
    def from_dict(cls, config_dict: dict[str, Any], **kwargs: Any) -> Any:
        """See [`PreTrainedConfig.from_dict`]."""
        with drafter_files().reading("config.json"):
            return super().from_dict(config_dict, **kwargs)

    @classmethod
    def from_target(cls, target: PreTrainedConfig | PreTrainedModel, **overrides: Any) -> FalconDraftConfig:
        """
        The configuration of a drafter for `target`: its vocabulary, special tokens, sizes, name and fingerprints.

        The drafter of a large target should take little memory and time. Its MLPs are therefore at most as wide as
        2,048 or the hidden size, whichever is more, and it has at most 8 key and value heads.

        Args:
            target ([`PreTrainedModel`] or [`PreTrainedConfig`]):
                The target model, or its configuration alone. Only the model gives fingerprints of the weights.
            overrides:
                Fields of [`FalconDraftConfig`] with other values, for example `block_size`.

        Returns:
            [`FalconDraftConfig`]: the configuration of a new, untrained drafter.
        """
        return cls(**{**drafter_files().fields_for(target), **overrides})


def logit_processing(config: PreTrainedConfig) -> tuple[float, float | None]:
    """The factor of a target's logits, such as Cohere's `logit_scale`, and their soft cap."""
    text_config = config.get_text_config(decoder=True)
    scaling = field_of(text_config, "logits_scaling") or 1.0
    # HyperCLOVA X multiplies by what Granite divides by.
    scale = scaling if text_config.model_type.startswith("hyperclovax") else 1.0 / scaling
    for name in ("logit_scale", "lm_head_multiplier"):
        scale *= field_of(text_config, name) or 1.0
    return scale, field_of(text_config, "final_logit_softcapping")


def field_of(config: PreTrainedConfig, name: str) -> Any:
    """A field of a target's configuration; `None` if there is none, or one for each layer (Gemma 4)."""
    try:
        return getattr(config, name, None)
    except RuntimeError:
        return None
