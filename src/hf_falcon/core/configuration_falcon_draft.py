# Copyright 2026 The hf_falcon authors. Licensed under the Apache License, Version 2.0.
"""Configuration of the Falcon drafter."""

from __future__ import annotations

import copy
import math
from os import PathLike
from typing import Any

import torch
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.activations import ACT2FN

from .checkpoint_files import LOADING, are_digests, embedding_fingerprint, read_object, reading, weights_fingerprint

# The version of the format of config.json and the weights. It increases when older code would misread newer files.
FORMAT = 1

# The range of each size. The largest values are far beyond any real model: they come from a damaged or a hostile file.
_RANGES = {
    "vocab_size": (1, 2**24),
    "hidden_size": (1, 2**17),
    "intermediate_size": (1, 2**20),
    "num_attention_heads": (1, 2**8),
    "num_key_value_heads": (1, 2**12),
    "block_size": (1, 64),
    "num_lstm_layers": (0, 64),
    "num_hidden_layers": (1, 256),
    "conditioning_size": (0, 2**20),
    "max_position_embeddings": (1, 2**40),
}

_LARGEST_HEAD_DIM = 2**12

_MOST_FEATURE_LAYERS = 256

# transformers would load other files or code because of these fields. A drafter has none of them.
_REFUSED_FIELDS = (
    "quantization_config",
    "fusion_config",
    "per_layer_config",
    "transformers_weights",
    "configuration_files",
    "distributed_config",
)

_ATTENTION = (None, "eager", "sdpa")

# The fields of every transformers configuration that a drafter needs. Other fields (labels, sharding plans, ...) are
# left out, because a hostile value can harm: for a number of labels, for example, transformers makes as many names.
_BASE_FIELDS = {
    "architectures",
    "auto_map",
    "bos_token_id",
    "dtype",
    "eos_token_id",
    "name_or_path",
    "output_attentions",
    "output_hidden_states",
    "pad_token_id",
    "return_dict",
    "transformers_version",
}

# With the sizes of a large target, most of a drafter's weights would be in MLPs, and many of the rest in the
# projections of keys and values.
_WIDEST_DEFAULT_MLP = 2048

_MOST_DEFAULT_KEY_VALUE_HEADS = 8


class FalconDraftConfig(PreTrainedConfig):
    r"""
    Configuration of a [`FalconDraftModel`], the semi-autoregressive drafter of Falcon (arXiv 2412.12639, section 3).

    [`FalconDraftConfig.from_target`] makes one for a target, with all fields that must equal the target's.

    Args:
        vocab_size (`int`, *optional*, defaults to 32000):
            Size of the target's vocabulary. transformers requires both to be equal.
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
        draft_format (`int`, *optional*, defaults to the newest that this code knows):
            Version of the format. A newer version is refused.
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
        draft_format: int = FORMAT,
        **kwargs: Any,
    ):
        if type(draft_format) is not int or not 1 <= draft_format <= FORMAT:
            raise ValueError(
                f"`draft_format` is {draft_format!r}, and this version of hf_falcon reads up to {FORMAT}: "
                "`pip install -U hf-falcon`, or in a process that does not import hf_falcon load the drafter with its "
                "own code, `AutoModel.from_pretrained(..., trust_remote_code=True)`."
            )
        self._validate_other_fields(kwargs)
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
        self.draft_format = draft_format
        self._validate_sizes(head_dim)
        self._validate_values()
        self.feature_layers = list(self.feature_layers)
        self.head_dim = hidden_size // num_attention_heads if head_dim is None else head_dim
        # The drafter has no embedding of its own that could be tied.
        kwargs.pop("tie_word_embeddings", None)
        super().__init__(tie_word_embeddings=False, **kwargs)

    def _validate_sizes(self, head_dim: int | None) -> None:
        for field, (smallest, largest) in _RANGES.items():
            value = getattr(self, field)
            if type(value) is not int or not smallest <= value <= largest:
                raise ValueError(f"`{field}` is {_shown(value)}: set it to an integer from {smallest} to {largest}.")
        if self.num_attention_heads % self.num_key_value_heads != 0:
            raise ValueError(
                f"`num_key_value_heads` is {self.num_key_value_heads}: set it to a divisor of `num_attention_heads` "
                f"({self.num_attention_heads})."
            )
        if head_dim is None and self.hidden_size % self.num_attention_heads != 0:
            raise ValueError(
                f"`hidden_size` is {self.hidden_size}, which `num_attention_heads` ({self.num_attention_heads}) does "
                "not divide: set `head_dim`."
            )
        width = self.hidden_size // self.num_attention_heads if head_dim is None else head_dim
        if type(width) is not int or not 2 <= width <= _LARGEST_HEAD_DIM or width % 2 != 0:
            raise ValueError(
                f"`head_dim` is {_shown(width)}: set it to an even integer of at most {_LARGEST_HEAD_DIM}, as "
                "rotary embedding works on pairs."
            )
        size = self.draft_vocab_size
        if size is not None and not (type(size) is int and 1 <= size <= self.vocab_size):
            raise ValueError(
                f"`draft_vocab_size` is {_shown(size)}: set it between 1 and `vocab_size` "
                f"({self.vocab_size}), or to None for all tokens."
            )

    def _validate_values(self) -> None:
        layers = self.feature_layers
        if (
            not isinstance(layers, (list, tuple))
            or len(layers) > _MOST_FEATURE_LAYERS
            or any(type(layer) is not int or layer < 0 for layer in layers)
            or len(set(layers)) < len(layers)
        ):
            raise ValueError(
                f"`feature_layers` is {_shown(layers)}: give different layers of the target, counted from 0."
            )
        for field in ("block_anchor", "attention_bias", "use_qk_norm", "use_post_norms"):
            value = getattr(self, field)
            if type(value) is not bool:
                raise ValueError(f"`{field}` is {_shown(value)}: set it to True or False.")
        if not isinstance(self.hidden_act, str) or self.hidden_act not in ACT2FN:
            raise ValueError(f"`hidden_act` is {_shown(self.hidden_act)}: set it to an activation of transformers.")
        for field in ("rms_norm_eps", "rope_theta", "logit_softcapping", "initializer_range", "logit_scale"):
            value = getattr(self, field)
            if field == "logit_softcapping" and value is None:
                continue
            positive = field in ("rms_norm_eps", "rope_theta", "logit_softcapping")
            if type(value) not in (int, float) or not math.isfinite(value) or (positive and value <= 0):
                raise ValueError(f"`{field}` is {_shown(value)}: set it to a {'positive ' * positive}finite number.")
            # An integer can be too large for a tensor.
            setattr(self, field, float(value))
        for field in (
            "target_model_type",
            "target_name_or_path",
            "target_fingerprint",
            "target_embedding_fingerprint",
        ):
            value = getattr(self, field)
            # Messages have these texts in them.
            if value is not None and not (isinstance(value, str) and value.isprintable()):
                raise ValueError(f"`{field}` is {_shown(value)}: set it to a text of printable characters or to None.")
        digests = self.weights_sha256
        if not are_digests(digests):
            raise ValueError(f"`weights_sha256` is {_shown(digests)}: save the drafter again with `save_pretrained`.")

    def _validate_other_fields(self, fields: dict[str, Any]) -> None:
        """Refuses fields that name files, code or methods: transformers makes an attribute of every field."""
        kind = fields.get("model_type", self.model_type)
        if kind != self.model_type:
            raise ValueError(
                f"`model_type` is {_shown(kind)}, not {self.model_type!r}: this configures another model. "
                "Give the folder or the repository of a Falcon drafter."
            )
        for field, value in fields.items():
            refused = (field in _REFUSED_FIELDS and value is not None) or callable(getattr(type(self), field, None))
            if refused or field.startswith("__"):
                raise ValueError(f"`{field}` is {_shown(value)}: a drafter has no such field, leave it out.")
        for field in [name for name in fields if hasattr(type(self), name) and name not in _BASE_FIELDS]:
            del fields[field]
        for field in ("dtype", "torch_dtype"):
            value = fields.get(field)
            kind = getattr(torch, value, None) if isinstance(value, str) else value
            if value is not None and not isinstance(kind, torch.dtype):
                raise ValueError(f"`{field}` is {_shown(value)}: set it to a dtype of torch, such as 'bfloat16'.")
        for field in ("attn_implementation", "_attn_implementation"):
            if fields.get(field) not in _ATTENTION:
                raise ValueError(f"`{field}` is {_shown(fields[field])}: a drafter has 'sdpa' only, leave it out.")

    @classmethod
    def get_config_dict(
        cls, pretrained_model_name_or_path: str | PathLike[str], **kwargs: Any
    ) -> tuple[dict[str, Any], dict[str, Any]]:
        """See [`PreTrainedConfig.get_config_dict`]."""
        loading = {name: kwargs[name] for name in LOADING if kwargs.get(name) is not None}
        # transformers would read a file of any size and depth, and go on to the files that this field names.
        found = read_object(str(pretrained_model_name_or_path), "config.json", **loading) or {}
        if "configuration_files" in found:
            files = _shown(found["configuration_files"])
            raise ValueError(f"`configuration_files` is {files}: a drafter has no such field, leave it out.")
        with reading("config.json"):
            fields, others = super().get_config_dict(pretrained_model_name_or_path, **kwargs)
        # Without the file, transformers would use the defaults.
        if not fields:
            raise OSError(
                f"`{pretrained_model_name_or_path}` has no `config.json`: give the folder or the repository of a "
                "Falcon drafter."
            )
        return fields, others

    @classmethod
    def from_dict(cls, config_dict: dict[str, Any], **kwargs: Any) -> Any:
        """See [`PreTrainedConfig.from_dict`]."""
        with reading("config.json"):
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
        config = target if isinstance(target, PreTrainedConfig) else target.config
        text_config = config.get_text_config(decoder=True)
        # Only sizes under Llama's names are copied. Targets with other names (GPT-2, OPT) get the usual sizes.
        hidden_size = text_config.hidden_size
        heads = _field(text_config, "num_attention_heads") or max(1, hidden_size // 64)
        head_dim = _field(text_config, "head_dim")
        if head_dim is None and hidden_size % heads != 0:
            head_dim = 2 * max(1, hidden_size // heads // 2)
        intermediate_size = _field(text_config, "intermediate_size")
        if not isinstance(intermediate_size, int):
            intermediate_size = 4 * hidden_size
        kv_heads = _field(text_config, "num_key_value_heads") or heads
        if kv_heads > _MOST_DEFAULT_KEY_VALUE_HEADS:
            kv_heads = max(n for n in range(1, _MOST_DEFAULT_KEY_VALUE_HEADS + 1) if heads % n == 0)
        logit_scale, logit_softcapping = logit_processing(config)
        # XLNet's is -1: no limit.
        longest = _field(text_config, "max_position_embeddings") or 0
        fields: dict[str, Any] = {
            "vocab_size": text_config.vocab_size,
            "hidden_size": hidden_size,
            "intermediate_size": min(intermediate_size, max(hidden_size, _WIDEST_DEFAULT_MLP)),
            "num_attention_heads": heads,
            "num_key_value_heads": kv_heads,
            "head_dim": head_dim,
            "rms_norm_eps": _field(text_config, "rms_norm_eps") or 1e-5,
            "rope_theta": _rope_theta(text_config),
            "max_position_embeddings": longest if longest > 0 else 2048,
            "logit_scale": logit_scale,
            "logit_softcapping": logit_softcapping,
            "bos_token_id": copy.copy(_field(text_config, "bos_token_id")),
            "eos_token_id": copy.copy(_field(text_config, "eos_token_id")),
            "pad_token_id": copy.copy(_field(text_config, "pad_token_id")),
            "target_model_type": text_config.model_type,
            "target_name_or_path": config.name_or_path or None,
        }
        if isinstance(target, PreTrainedModel):
            fields["target_fingerprint"] = weights_fingerprint(target)
            fields["target_embedding_fingerprint"] = embedding_fingerprint(target)
        return cls(**{**fields, **overrides})

    def name_target(self, target: PreTrainedModel) -> None:
        """Takes the name and the fingerprints of `target`, which the drafter has been trained for."""
        self.target_name_or_path = target.name_or_path or None
        self.target_fingerprint = weights_fingerprint(target)
        self.target_embedding_fingerprint = embedding_fingerprint(target)


def logit_processing(config: PreTrainedConfig) -> tuple[float, float | None]:
    """The factor of a target's logits (Cohere's `logit_scale`, Granite's 1 / `logits_scaling`), and their soft cap."""
    text_config = config.get_text_config(decoder=True)
    scaling = _field(text_config, "logits_scaling")
    scale = 1.0 / scaling if scaling else _field(text_config, "logit_scale") or 1.0
    return scale, _field(text_config, "final_logit_softcapping")


def _shown(value: Any) -> str:
    """A value for an error message, at most 200 characters of it."""
    text = repr(value)
    return text if len(text) <= 200 else f"{text[:200]}..."


def _field(config: PreTrainedConfig, name: str) -> Any:
    """A field of a target's configuration; `None` if there is none, or one for each layer (Gemma 4)."""
    try:
        return getattr(config, name, None)
    except RuntimeError:
        return None


def _rope_theta(text_config: PreTrainedConfig) -> float:
    parameters = getattr(text_config, "rope_parameters", None) or {}
    # Models with two kinds of layers keep one set of parameters for each.
    by_layer_kind = parameters.get("full_attention")
    theta = (by_layer_kind or parameters).get("rope_theta")
    return float(theta if theta is not None else getattr(text_config, "rope_theta", None) or 10000.0)
