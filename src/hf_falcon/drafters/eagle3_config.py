# Copyright 2026 The hf_falcon authors. Licensed under the Apache License, Version 2.0.
"""Configuration of an EAGLE-3 drafter, in the layout of the package `speculators`."""

from __future__ import annotations

from typing import Any

from transformers import PreTrainedConfig, PreTrainedModel

from ..checkpoint_files import weights_fingerprint
from ..core.configuration_falcon_draft import FalconDraftConfig
from .speculators_config import SpeculatorsDraftConfig

_FLAGS = ("norm_before_residual", "norm_before_fc", "fc_norm", "norm_output")
# Draft tokens a round of serving engines, which draft chains.
_SPECULATIVE_TOKENS = 3


class Eagle3DraftConfig(SpeculatorsDraftConfig):
    r"""
    Configuration of an [`Eagle3DraftModel`] (EAGLE-3, arXiv 2503.01840). It is saved in the layout of the package
    `speculators`, with its field names.

    Args:
        transformer_layer_config, kwargs: see [`SpeculatorsDraftConfig`].
        eagle_aux_hidden_state_layer_ids (`list[int]`, *optional*):
            The target's hidden states that the drafter reads: id n is the hidden state after n layers. By default 2,
            half of the target's layers, and all but 3.
        norm_before_residual (`bool`, *optional*, defaults to `False`):
            The residual of the first layer is the normalised hidden state.
        norm_before_fc (`bool`, *optional*, defaults to `False`): one norm over all of the target's hidden states.
        fc_norm (`bool`, *optional*, defaults to `False`): a norm over each of the target's hidden states.
        norm_output (`bool`, *optional*, defaults to `False`):
            The hidden state after the final norm is fed back, instead of the one before it.

    Raises:
        `ValueError`: for a field out of range or of another type; it names the field, its value and the allowed
            values.
    """

    model_type = "eagle3_draft"
    layer_ids_field = "eagle_aux_hidden_state_layer_ids"

    def __init__(
        self,
        transformer_layer_config: dict[str, Any] | PreTrainedConfig | None = None,
        eagle_aux_hidden_state_layer_ids: list[int] | None = None,
        norm_before_residual: bool = False,
        norm_before_fc: bool = False,
        fc_norm: bool = False,
        norm_output: bool = False,
        **kwargs: Any,
    ):
        super().__init__(transformer_layer_config, **kwargs)
        # An empty list is published, too, in place of none.
        ids = eagle_aux_hidden_state_layer_ids
        self.eagle_aux_hidden_state_layer_ids = None if ids == [] else ids
        # Fields of [`FalconDraftConfig`] that always have one value here.
        self.block_size, self.num_lstm_layers, self.target_model_type = 1, 0, None
        self.norm_before_residual = norm_before_residual
        self.norm_before_fc = norm_before_fc
        self.fc_norm = fc_norm
        self.norm_output = norm_output
        self._validate()

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
        """Takes the name and the fingerprint of `target`, which the drafter has been trained for."""
        self._take_target(target.name_or_path, list(target.config.architectures or [type(target).__name__]))
        self.target_fingerprint = weights_fingerprint(target)

    def _take_target(self, name: str | None, architectures: list[str]) -> None:
        methods = [{"proposal_type": "greedy", "speculative_tokens": _SPECULATIVE_TOKENS}]
        defaults = {"algorithm": "eagle3", "default_proposal_method": "greedy", "proposal_methods": methods}
        verifier = {"name_or_path": name or None, "architectures": architectures}
        self.speculators_config = {**defaults, **self.speculators_config, "verifier": verifier}

    def to_dict(self) -> dict[str, Any]:
        """See [`SpeculatorsDraftConfig.to_dict`]."""
        return {
            **super().to_dict(),
            "architectures": ["Eagle3Speculator"],
            **{name: getattr(self, name) for name in _FLAGS},
            "speculators_model_type": "eagle3",
        }

    def _validate(self) -> None:
        super()._validate()
        self._validate_flags(*_FLAGS)
        if self.norm_before_fc and self.fc_norm:
            raise ValueError("`norm_before_fc` and `fc_norm` are both True: set one of them.")
        if (1 + self.num_features) * self.target_hidden_size == self.hidden_size:
            raise ValueError(
                f"`hidden_size` is {self.hidden_size}, as wide as {1 + self.num_features} hidden states of the "
                "target: the drafter could not tell these from its own."
            )


def default_layers(num_layers: int) -> list[int]:
    """The target's hidden states that EAGLE-3 reads by default: an early, a middle and a late one."""
    return sorted({min(2, num_layers), max(1, num_layers // 2), max(1, num_layers - 3)})
