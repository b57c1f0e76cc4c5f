# Copyright 2026 The hf_falcon authors. Licensed under the Apache License, Version 2.0.
"""Configuration of an EAGLE-3 drafter, in the layout of the package `speculators`."""

from __future__ import annotations

import copy
import math
from typing import Any

from transformers import LlamaConfig, PreTrainedConfig, PreTrainedModel, Qwen3Config
from transformers.activations import ACT2FN

from ..core.checkpoint_files import weights_fingerprint
from ..core.configuration_falcon_draft import FalconDraftConfig

LAYER_CONFIGS: dict[str, type[PreTrainedConfig]] = {"llama": LlamaConfig, "qwen3": Qwen3Config}
# Frequencies of these kinds do not depend on the length of the context.
_ROPE_TYPES = ("default", "linear", "llama3", "yarn")
# The range of each size; far beyond any real model, the sizes come from a damaged or a hostile file.
_LAYER_RANGES = {
    "vocab_size": (1, 2**24),
    "hidden_size": (1, 2**17),
    "intermediate_size": (1, 2**20),
    "num_attention_heads": (1, 2**12),
    "num_key_value_heads": (1, 2**12),
    "head_dim": (2, 2**12),
    "num_hidden_layers": (1, 256),
    "max_position_embeddings": (1, 2**40),
}
_LAYER_KINDS = ("full_attention", "sliding_attention")
# The other fields of the decoder layers that are read. transformers makes an attribute of every field, and a hostile
# one could replace a method.
_LAYER_FIELDS = (
    "attention_bias",
    "bos_token_id",
    "eos_token_id",
    "hidden_act",
    "initializer_range",
    "layer_types",
    "max_window_layers",
    "mlp_bias",
    "pad_token_id",
    "partial_rotary_factor",
    "rms_norm_eps",
    "rope_parameters",
    "rope_scaling",
    "rope_theta",
    "sliding_window",
    "use_sliding_window",
)
_FLAGS = ("norm_before_residual", "norm_before_fc", "fc_norm", "norm_output")
# Draft tokens a round of serving engines, which draft chains.
_SPECULATIVE_TOKENS = 3
# Version of `speculators` whose layout is written.
_SPECULATORS_VERSION = "0.9.0"


class Eagle3DraftConfig(PreTrainedConfig):
    r"""
    Configuration of an [`Eagle3DraftModel`] (EAGLE-3, arXiv 2503.01840). It is saved in the layout of the package
    `speculators`, with its field names.

    Args:
        transformer_layer_config (`dict` or [`~transformers.PreTrainedConfig`]):
            Configuration of the decoder layers, `model_type` "llama" or "qwen3"; its `vocab_size` is the target's.
        draft_vocab_size (`int`, *optional*): tokens that the drafter scores. By default all of the target's.
        eagle_aux_hidden_state_layer_ids (`list[int]`, *optional*):
            The target's hidden states that the drafter reads: id n is the hidden state after n layers. By default 2,
            half of the target's layers, and all but 3.
        target_hidden_size (`int`, *optional*): width of the target's hidden states. Defaults to the drafter's.
        norm_before_residual (`bool`, *optional*, defaults to `False`):
            The residual of the first layer is the normalised hidden state.
        norm_before_fc (`bool`, *optional*, defaults to `False`): one norm over all of the target's hidden states.
        fc_norm (`bool`, *optional*, defaults to `False`): a norm over each of the target's hidden states.
        norm_output (`bool`, *optional*, defaults to `False`):
            The hidden state after the final norm is fed back, instead of the one before it.
        speculators_config (`dict`, *optional*): how serving engines use the checkpoint; names the target.
        target_fingerprint (`str`, *optional*): [`weights_fingerprint`] of the target that it was trained for.
        kwargs (*optional*): special tokens and dtype; other fields of the file are left out.

    Raises:
        `ValueError`: for a field out of range or of another type; it names the field, its value and the allowed
            values.
    """

    model_type = "eagle3_draft"

    def __init__(
        self,
        transformer_layer_config: dict[str, Any] | PreTrainedConfig | None = None,
        draft_vocab_size: int | None = None,
        eagle_aux_hidden_state_layer_ids: list[int] | None = None,
        target_hidden_size: int | None = None,
        norm_before_residual: bool = False,
        norm_before_fc: bool = False,
        fc_norm: bool = False,
        norm_output: bool = False,
        speculators_config: dict[str, Any] | None = None,
        target_fingerprint: str | None = None,
        **kwargs: Any,
    ):
        layer = _layer_config(transformer_layer_config)
        self.transformer_layer_config = layer
        for name in _LAYER_RANGES:
            setattr(self, name, getattr(layer, name))
        # Fields of [`FalconDraftConfig`] that always have one value here.
        self.block_size, self.num_lstm_layers, self.target_model_type = 1, 0, None
        self.draft_vocab_size = layer.vocab_size if draft_vocab_size is None else draft_vocab_size
        # An empty list is published, too, in place of none.
        ids = eagle_aux_hidden_state_layer_ids
        self.eagle_aux_hidden_state_layer_ids = None if ids == [] else ids
        self.target_hidden_size = layer.hidden_size if target_hidden_size is None else target_hidden_size
        self.norm_before_residual = norm_before_residual
        self.norm_before_fc = norm_before_fc
        self.fc_norm = fc_norm
        self.norm_output = norm_output
        self.speculators_config = speculators_config or {}
        self.target_fingerprint = target_fingerprint
        self._validate()
        super().__init__(
            bos_token_id=kwargs.pop("bos_token_id", None) or layer.bos_token_id,
            eos_token_id=kwargs.pop("eos_token_id", None) or layer.eos_token_id,
            pad_token_id=kwargs.pop("pad_token_id", None) or layer.pad_token_id,
            tie_word_embeddings=False,
            dtype=kwargs.pop("dtype", None),
        )

    @property
    def target_name_or_path(self) -> str | None:
        """The target that the drafter was trained for, if the file names it."""
        return self._verifier.get("name_or_path")

    @property
    def target_architectures(self) -> list[str]:
        """Classes of that target, if the file names them."""
        return list(self._verifier.get("architectures") or [])

    @property
    def feature_layers(self) -> list[int]:
        """
        The layers of the target whose outputs the drafter reads, counted from 0; -1 is the input of the first layer.

        Raises:
            `ValueError`: if the file does not name them, and no target was given yet.
        """
        if self.eagle_aux_hidden_state_layer_ids is None:
            raise ValueError(
                "`eagle_aux_hidden_state_layer_ids` is None: which layers are read follows from the target; call "
                "`drafter.check_target(target)` first."
            )
        return [layer - 1 for layer in self.eagle_aux_hidden_state_layer_ids]

    @property
    def num_features(self) -> int:
        """The number of the target's hidden states that the drafter reads."""
        ids = self.eagle_aux_hidden_state_layer_ids
        return 3 if ids is None else len(ids)

    def choose_layers(self, num_layers: int) -> None:
        """Chooses the hidden states of a target of `num_layers` layers, if the file does not name them."""
        if self.eagle_aux_hidden_state_layer_ids is None:
            self.eagle_aux_hidden_state_layer_ids = default_layers(num_layers)

    @classmethod
    def from_target(cls, target: PreTrainedConfig | PreTrainedModel, **overrides: Any) -> Eagle3DraftConfig:
        """
        The configuration of a drafter for `target`, of one decoder layer and with sizes as in
        [`FalconDraftConfig.from_target`].

        Args:
            target ([`PreTrainedModel`] or [`PreTrainedConfig`]): the target model, or its configuration alone.
            overrides: fields of [`Eagle3DraftConfig`], or of its layers, with other values; `num_hidden_layers`,
                `intermediate_size` and `num_key_value_heads`, for example.
        """
        config = target if isinstance(target, PreTrainedConfig) else target.config
        sizes = FalconDraftConfig.from_target(config)
        text_config = config.get_text_config(decoder=True)
        layer = {
            "model_type": "llama",
            "vocab_size": sizes.vocab_size,
            "hidden_size": sizes.hidden_size,
            "intermediate_size": sizes.intermediate_size,
            "num_attention_heads": sizes.num_attention_heads,
            "num_key_value_heads": sizes.num_key_value_heads,
            "head_dim": sizes.head_dim,
            "num_hidden_layers": 1,
            "hidden_act": "silu",
            "rms_norm_eps": sizes.rms_norm_eps,
            "max_position_embeddings": sizes.max_position_embeddings,
            "rope_parameters": {"rope_type": "default", "rope_theta": sizes.rope_theta},
            "bos_token_id": sizes.bos_token_id,
            "eos_token_id": sizes.eos_token_id,
            "pad_token_id": sizes.pad_token_id,
        }
        layer |= {name: overrides.pop(name) for name in list(overrides) if name in layer}
        fields: dict[str, Any] = {
            "eagle_aux_hidden_state_layer_ids": default_layers(text_config.num_hidden_layers),
            "target_hidden_size": text_config.hidden_size,
        }
        found = cls(layer, **{**fields, **overrides})
        found._take_target(config.name_or_path, list(config.architectures or [type(target).__name__]))
        if isinstance(target, PreTrainedModel):
            found.target_fingerprint = weights_fingerprint(target)
        return found

    def name_target(self, target: PreTrainedModel) -> None:
        """See [`FalconDraftConfig.name_target`]."""
        self._take_target(target.name_or_path, list(target.config.architectures or [type(target).__name__]))
        self.target_fingerprint = weights_fingerprint(target)

    def _take_target(self, name: str | None, architectures: list[str]) -> None:
        methods = [{"proposal_type": "greedy", "speculative_tokens": _SPECULATIVE_TOKENS}]
        defaults = {"algorithm": "eagle3", "default_proposal_method": "greedy", "proposal_methods": methods}
        verifier = {"name_or_path": name or None, "architectures": architectures}
        self.speculators_config = {**defaults, **self.speculators_config, "verifier": verifier}

    def to_dict(self) -> dict[str, Any]:
        """The fields of `config.json` in the layout of `speculators`."""
        return {
            "architectures": ["Eagle3Speculator"],
            "draft_vocab_size": self.draft_vocab_size,
            "dtype": str(self.dtype).removeprefix("torch.") if self.dtype is not None else None,
            "eagle_aux_hidden_state_layer_ids": self.eagle_aux_hidden_state_layer_ids,
            **{name: getattr(self, name) for name in _FLAGS},
            "speculators_config": copy.deepcopy(self.speculators_config),
            "speculators_model_type": "eagle3",
            "speculators_version": _SPECULATORS_VERSION,
            "target_fingerprint": self.target_fingerprint,
            "target_hidden_size": self.target_hidden_size,
            "tie_word_embeddings": False,
            "transformer_layer_config": self.transformer_layer_config.to_diff_dict(),
        }

    def to_diff_dict(self) -> dict[str, Any]:
        """As `to_dict`: `speculators` has other defaults than transformers."""
        return self.to_dict()

    @property
    def _verifier(self) -> dict[str, Any]:
        return self.speculators_config.get("verifier") or {}

    def _validate(self) -> None:
        for name in _FLAGS:
            if type(getattr(self, name)) is not bool:
                raise ValueError(f"`{name}` is {getattr(self, name)!r:.200}: set it to True or False.")
        if self.norm_before_fc and self.fc_norm:
            raise ValueError("`norm_before_fc` and `fc_norm` are both True: set one of them.")
        size = self.draft_vocab_size
        if type(size) is not int or not 1 <= size <= self.vocab_size:
            raise ValueError(
                f"`draft_vocab_size` is {size!r:.200}: set it between 1 and the target's `vocab_size` "
                f"({self.vocab_size})."
            )
        width = self.target_hidden_size
        if type(width) is not int or not 1 <= width <= 2**17:
            raise ValueError(f"`target_hidden_size` is {width!r:.200}: set it to an integer from 1 to {2**17}.")
        ids = self.eagle_aux_hidden_state_layer_ids
        if ids is not None and (
            not isinstance(ids, (list, tuple))
            or not 1 <= len(ids) <= 256
            or any(type(layer) is not int or not 0 <= layer <= 2**16 for layer in ids)
            or len(set(ids)) < len(ids)
        ):
            raise ValueError(
                f"`eagle_aux_hidden_state_layer_ids` is {ids!r:.200}: give different numbers of layers of the target, "
                "from 0 (its embedding) on."
            )
        if (1 + self.num_features) * self.target_hidden_size == self.hidden_size:
            raise ValueError(
                f"`hidden_size` is {self.hidden_size}, as wide as {1 + self.num_features} hidden states of the "
                "target: the drafter could not tell these from its own."
            )
        verifier = self.speculators_config.get("verifier") if isinstance(self.speculators_config, dict) else 0
        if verifier is not None and not isinstance(verifier, dict):
            raise ValueError(f"`speculators_config` is {self.speculators_config!r:.200}: give one with a `verifier`.")
        for name, kind in (("name_or_path", str), ("architectures", list)):
            if (verifier or {}).get(name) is not None and not isinstance((verifier or {})[name], kind):
                raise ValueError(f"`speculators_config.verifier.{name}` is {(verifier or {})[name]!r:.200}.")
        if self.target_fingerprint is not None and not isinstance(self.target_fingerprint, str):
            raise ValueError(f"`target_fingerprint` is {self.target_fingerprint!r:.200}: set it to a text or to None.")


def default_layers(num_layers: int) -> list[int]:
    """The target's hidden states that EAGLE-3 reads by default: an early, a middle and a late one."""
    return sorted({min(2, num_layers), max(1, num_layers // 2), max(1, num_layers - 3)})


def _layer_config(given: dict[str, Any] | PreTrainedConfig | None) -> PreTrainedConfig:
    """The configuration of the decoder layers, whose values were checked."""
    if isinstance(given, PreTrainedConfig):
        given = given.to_dict()
    if not isinstance(given, dict):
        raise ValueError(f"`transformer_layer_config` is {given!r:.200}: give the fields of the decoder layers.")
    kind = given.get("model_type", "qwen3")
    if kind not in LAYER_CONFIGS:
        raise ValueError(
            f"`transformer_layer_config.model_type` is {kind!r:.200}: drafters with layers of "
            f"{', '.join(LAYER_CONFIGS)} can be read."
        )
    fields = {name: value for name, value in given.items() if name in _LAYER_RANGES or name in _LAYER_FIELDS}
    rope = fields.get("rope_parameters")
    # Targets with two kinds of layers have parameters for each.
    if isinstance(rope, dict) and "sliding_attention" in rope:
        fields["rope_parameters"] = rope["sliding_attention"]
    # Before transformers makes lists of these lengths.
    _check_sizes({name: value for name, value in fields.items() if value is not None})
    config = LAYER_CONFIGS[kind](**copy.deepcopy(fields))
    _check_sizes({name: getattr(config, name) for name in _LAYER_RANGES})
    _check_values(config)
    return config


def _check_sizes(fields: dict[str, Any]) -> None:
    for name, (smallest, largest) in _LAYER_RANGES.items():
        value = fields.get(name, smallest)
        if type(value) is not int or not smallest <= value <= largest:
            raise ValueError(
                f"`transformer_layer_config.{name}` is {value!r:.200}: it must be an integer from {smallest} to "
                f"{largest}."
            )


def _check_values(config: PreTrainedConfig) -> None:
    if config.num_attention_heads % config.num_key_value_heads:
        raise ValueError(
            f"`transformer_layer_config.num_key_value_heads` is {config.num_key_value_heads}: it must divide "
            f"`num_attention_heads` ({config.num_attention_heads})."
        )
    if config.head_dim % 2:
        raise ValueError(
            f"`transformer_layer_config.head_dim` is {config.head_dim}: it must be even, as rotary embedding works on "
            "pairs."
        )
    if not isinstance(config.hidden_act, str) or config.hidden_act not in ACT2FN:
        raise ValueError(
            f"`transformer_layer_config.hidden_act` is {config.hidden_act!r:.200}: it must be an activation of "
            "transformers."
        )
    if not _is_positive(config.rms_norm_eps):
        raise ValueError(
            f"`transformer_layer_config.rms_norm_eps` is {config.rms_norm_eps!r:.200}: it must be a positive number."
        )
    window = getattr(config, "sliding_window", None)
    if window is not None and (type(window) is not int or not 1 <= window <= 2**40):
        raise ValueError(
            f"`transformer_layer_config.sliding_window` is {window!r:.200}: it must be a number of positions, or None."
        )
    kinds = getattr(config, "layer_types", None)
    if kinds is not None and (
        not isinstance(kinds, list)
        or len(kinds) != config.num_hidden_layers
        or any(kind not in _LAYER_KINDS for kind in kinds)
    ):
        raise ValueError(
            f"`transformer_layer_config.layer_types` is {kinds!r:.200}: it must be {' or '.join(_LAYER_KINDS)}, for "
            "each layer."
        )
    rope = config.rope_parameters or {}
    numbers = [value for name, value in rope.items() if name not in ("rope_type", "type", "truncate", "mrope_section")]
    if (
        rope.get("rope_type") not in _ROPE_TYPES
        or rope.get("partial_rotary_factor", 1.0) != 1.0
        or not all(value is None or _is_positive(value) for value in numbers)
    ):
        raise ValueError(
            f"`transformer_layer_config.rope_parameters` is {rope!r:.200}: drafters with rotary frequencies of type "
            f"{', '.join(_ROPE_TYPES)} can be read, over whole heads."
        )


def _is_positive(value: Any) -> bool:
    return type(value) in (int, float) and math.isfinite(value) and value > 0
