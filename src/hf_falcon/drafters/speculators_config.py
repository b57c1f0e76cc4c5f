# Copyright 2026 The hf_falcon authors. Licensed under the Apache License, Version 2.0.
"""What the configurations of drafters in the layout of the package `speculators` share."""

from __future__ import annotations

import copy
import math
from typing import Any

import torch
from transformers import LlamaConfig, PreTrainedConfig, Qwen3Config
from transformers.activations import ACT2FN
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

LAYER_CONFIGS: dict[str, type[PreTrainedConfig]] = {"llama": LlamaConfig, "qwen3": Qwen3Config}
# Frequencies of these kinds do not depend on the length of the context.
_ROPE_TYPES = ("default", "linear", "llama3", "yarn")
# The range of each size; far beyond any real model, the sizes come from a damaged or a hostile file.
_LAYER_RANGES = {
    "vocab_size": (1, 2**24),
    "hidden_size": (1, 2**17),
    "intermediate_size": (1, 2**20),
    "num_attention_heads": (1, 2**8),
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
# Version of `speculators` whose layout is written.
_SPECULATORS_VERSION = "0.9.0"


class SpeculatorsDraftConfig(PreTrainedConfig):
    r"""
    What the configurations of drafters in the layout of the package `speculators` share: the decoder layers, the
    draft vocabulary, and the target. [`Eagle3DraftConfig`] and [`DFlashDraftConfig`] add the fields of a method, and
    call `_validate` once they have their fields.

    Args:
        transformer_layer_config (`dict` or [`~transformers.PreTrainedConfig`]):
            Configuration of the decoder layers, `model_type` "llama" or "qwen3"; its `vocab_size` is the target's.
        draft_vocab_size (`int`, *optional*): tokens that the drafter scores. By default all of the target's.
        target_hidden_size (`int`, *optional*): width of the target's hidden states. Defaults to the drafter's.
        speculators_config (`dict`, *optional*): how serving engines use the checkpoint; names the target.
        target_fingerprint (`str`, *optional*): [`weights_fingerprint`] of the target that it was trained for.
        chat_template_kwargs (`dict`, *optional*): variables of the chat template that it was trained with.
        kwargs (*optional*): special tokens and dtype; other fields of the file are left out.

    Raises:
        `ValueError`: for a field out of range or of another type; it names the field, its value and the allowed
            values.
    """

    # The field with the ids of the target's hidden states that the drafter reads.
    layer_ids_field = "aux_hidden_state_layer_ids"
    # transformers 5.17 would make a configuration without arguments, to compare with.
    has_no_defaults_at_init = True

    def __init__(
        self,
        transformer_layer_config: dict[str, Any] | PreTrainedConfig | None = None,
        draft_vocab_size: int | None = None,
        target_hidden_size: int | None = None,
        speculators_config: dict[str, Any] | None = None,
        target_fingerprint: str | None = None,
        chat_template_kwargs: dict[str, Any] | None = None,
        **kwargs: Any,
    ):
        layer = _layer_config(transformer_layer_config)
        self.transformer_layer_config = layer
        for name in _LAYER_RANGES:
            setattr(self, name, getattr(layer, name))
        self.draft_vocab_size = layer.vocab_size if draft_vocab_size is None else draft_vocab_size
        self.target_hidden_size = layer.hidden_size if target_hidden_size is None else target_hidden_size
        self.speculators_config = speculators_config or {}
        self.target_fingerprint = target_fingerprint
        self.chat_template_kwargs = chat_template_kwargs
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
        ids = getattr(self, self.layer_ids_field)
        if ids is None:
            raise ValueError(
                f"`{self.layer_ids_field}` is None: which layers are read follows from the target; call "
                "`drafter.check_target(target)` first."
            )
        return [layer - 1 for layer in ids]

    def to_dict(self) -> dict[str, Any]:
        """The fields of `config.json` in the layout of `speculators`."""
        return {
            "draft_vocab_size": self.draft_vocab_size,
            "dtype": str(self.dtype).removeprefix("torch.") if self.dtype is not None else None,
            self.layer_ids_field: getattr(self, self.layer_ids_field),
            "speculators_config": copy.deepcopy(self.speculators_config),
            "speculators_version": _SPECULATORS_VERSION,
            "target_fingerprint": self.target_fingerprint,
            "target_hidden_size": self.target_hidden_size,
            "tie_word_embeddings": False,
            "transformer_layer_config": self.transformer_layer_config.to_diff_dict(),
            **({} if self.chat_template_kwargs is None else {"chat_template_kwargs": self.chat_template_kwargs}),
        }

    def to_diff_dict(self) -> dict[str, Any]:
        """As `to_dict`: `speculators` has other defaults than transformers."""
        return self.to_dict()

    @property
    def _verifier(self) -> dict[str, Any]:
        return self.speculators_config.get("verifier") or {}

    def _validate(self) -> None:
        size = self.draft_vocab_size
        if type(size) is not int or not 1 <= size <= self.vocab_size:
            raise ValueError(
                f"`draft_vocab_size` is {size!r:.200}: set it between 1 and the target's `vocab_size` "
                f"({self.vocab_size})."
            )
        width = self.target_hidden_size
        if type(width) is not int or not 1 <= width <= 2**17:
            raise ValueError(f"`target_hidden_size` is {width!r:.200}: set it to an integer from 1 to {2**17}.")
        ids = getattr(self, self.layer_ids_field)
        if ids is not None and (
            not isinstance(ids, (list, tuple))
            or not 1 <= len(ids) <= 256
            or any(type(layer) is not int or not 0 <= layer <= 2**16 for layer in ids)
            or len(set(ids)) < len(ids)
        ):
            raise ValueError(
                f"`{self.layer_ids_field}` is {ids!r:.200}: give different numbers of layers of the target, from 0 "
                "(its embedding) on."
            )
        verifier = self.speculators_config.get("verifier") if isinstance(self.speculators_config, dict) else 0
        if verifier is not None and not isinstance(verifier, dict):
            raise ValueError(f"`speculators_config` is {self.speculators_config!r:.200}: give one with a `verifier`.")
        for name, kind in (("name_or_path", str), ("architectures", list)):
            if (verifier or {}).get(name) is not None and not isinstance((verifier or {})[name], kind):
                raise ValueError(f"`speculators_config.verifier.{name}` is {(verifier or {})[name]!r:.200}.")
        texts = [(verifier or {}).get("name_or_path"), *((verifier or {}).get("architectures") or [])]
        if not all(text is None or (isinstance(text, str) and text.isprintable()) for text in texts):
            raise ValueError(f"`speculators_config.verifier` is {verifier!r:.200}: its texts must be printable.")
        if self.target_fingerprint is not None and not isinstance(self.target_fingerprint, str):
            raise ValueError(f"`target_fingerprint` is {self.target_fingerprint!r:.200}: set it to a text or to None.")

    def _validate_flags(self, *names: str) -> None:
        for name in names:
            if type(getattr(self, name)) is not bool:
                raise ValueError(f"`{name}` is {getattr(self, name)!r:.200}: set it to True or False.")


def _layer_config(given: dict[str, Any] | PreTrainedConfig | None) -> PreTrainedConfig:
    """The configuration of the decoder layers, whose values were checked."""
    if isinstance(given, PreTrainedConfig):
        given = given.to_dict()
    if not isinstance(given, dict):
        raise ValueError(f"`transformer_layer_config` is {given!r:.200}: give the fields of the decoder layers.")
    kind = given.get("model_type", "qwen3")
    if not isinstance(kind, str) or kind not in LAYER_CONFIGS:
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
    is_known = rope.get("rope_type") in _ROPE_TYPES and rope.get("partial_rotary_factor", 1.0) == 1.0
    if not is_known or not _has_frequencies(config):
        raise ValueError(
            f"`transformer_layer_config.rope_parameters` is {rope!r:.200}: drafters with rotary frequencies of type "
            f"{', '.join(_ROPE_TYPES)} can be read, over whole heads."
        )


def _has_frequencies(config: PreTrainedConfig) -> bool:
    """Whether the parameters of rotary frequencies are numbers that give some."""
    try:
        with torch.device("cpu"):
            rotary = LlamaRotaryEmbedding(config)
    # A hostile value raises an error of any kind.
    except Exception:
        return False
    return bool(rotary.inv_freq.isfinite().all()) and _is_positive(rotary.attention_scaling)


def _is_positive(value: Any) -> bool:
    return type(value) in (int, float) and math.isfinite(value) and value > 0
