# Copyright 2026 The hf_falcon authors. Licensed under the Apache License, Version 2.0.
"""What drafters in the layout of the package `speculators` share."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers import initialization as init

from ..checkpoint_files import reading
from ..core.draft_session import check_embedding
from ..core.drafter import DraftModel
from ..core.modeling_falcon_draft import FalconRMSNorm, KeyValueCache
from .checkpoints import load_weights, network_weights, read_fields, read_options, read_weights
from .files import pinned
from .layers import RotaryEmbedding
from .speculators_config import SpeculatorsDraftConfig


class SpeculatorsDraftModel(DraftModel):
    """
    What drafters in the layout of the package `speculators` share: a projection of the target's hidden states, decoder
    layers, and a draft vocabulary. The names of the weights are those of the package. A subclass adds `make_layer`,
    `fields_of`, `parts_of`, and what [`DraftModel`] asks for.

    Args:
        config ([`SpeculatorsDraftConfig`]): its configuration.
        num_features (`int`): the target's hidden states that it reads.
        has_embedding (`bool`): whether it has an embedding of its own.
        has_head (`bool`): whether it has a head of its own.
    """

    config_class: Any = SpeculatorsDraftConfig
    base_model_prefix = "drafter"
    main_input_name = "features"
    supports_gradient_checkpointing = True
    predicts_features = False
    # Whether `run_layers` returns what the final norm returns, and not what it reads.
    norms_output = True

    lm_head: Any
    d2t: Tensor | None
    t2d: Tensor | None

    def __init__(self, config: SpeculatorsDraftConfig, num_features: int, has_embedding: bool, has_head: bool):
        super().__init__(config)
        sizes = config.transformer_layer_config
        self.fc = nn.Linear(num_features * config.target_hidden_size, sizes.hidden_size, bias=False)
        self.layers = nn.ModuleList(self.make_layer(index) for index in range(sizes.num_hidden_layers))
        self.norm = FalconRMSNorm(sizes.hidden_size, eps=sizes.rms_norm_eps)
        self.lm_head = nn.Linear(sizes.hidden_size, config.draft_vocab_size, bias=False) if has_head else None
        self.embed_tokens = nn.Embedding(config.vocab_size, sizes.hidden_size) if has_embedding else None
        is_reduced = config.draft_vocab_size != config.vocab_size
        # Token i of the draft vocabulary is token i + d2t[i] of the target's; t2d marks the tokens in it.
        self.register_buffer("d2t", torch.zeros(config.draft_vocab_size, dtype=torch.long) if is_reduced else None)
        self.register_buffer("t2d", torch.zeros(config.vocab_size, dtype=torch.bool) if is_reduced else None)
        kinds = getattr(sizes, "layer_types", None) or []
        self._is_sliding = [kind == "sliding_attention" for kind in kinds] or [False] * sizes.num_hidden_layers
        # See [`FalconDraftNetwork`].
        self.window: int | None = getattr(sizes, "sliding_window", None) if any(self._is_sliding) else None
        self.rotary = RotaryEmbedding(sizes)

    def make_layer(self, index: int) -> nn.Module:
        """The decoder layer with this number."""
        raise NotImplementedError(f"{type(self).__name__} has no `make_layer`.")

    def _init_weights(self, module: nn.Module) -> None:
        super()._init_weights(module)
        if module is self and self.d2t is not None and self.t2d is not None:
            init.zeros_(self.d2t)
            init.copy_(self.t2d, torch.arange(self.config.vocab_size) < self.config.draft_vocab_size)

    @classmethod
    def fields_of(cls, fields: dict[str, Any], weights: Mapping[str, Tensor]) -> dict[str, Any]:
        """
        The fields of `config_class` for a checkpoint in any layout of the method.

        Args:
            fields (`dict`): the fields of its `config.json`.
            weights (mapping of `str` to `torch.Tensor`): its weights, which may be on the meta device.
        """
        raise NotImplementedError(f"{cls.__name__} has no `fields_of`.")

    @classmethod
    def weight_names(cls, fields: dict[str, Any], names: Iterable[str]) -> dict[str, str]:
        """The names of the network's weights, by their names in a checkpoint; others are not read."""
        return {name: name for name in names}

    @classmethod
    def parts_of(cls, config: Any, weights: Mapping[str, Tensor]) -> dict[str, bool]:
        """The arguments of the class, beside its configuration, for a checkpoint with these weights."""
        raise NotImplementedError(f"{cls.__name__} has no `parts_of`.")

    @classmethod
    def config_of(
        cls, fields: dict[str, Any], weights: Mapping[str, Tensor], layer_ids: list[int] | None = None
    ) -> SpeculatorsDraftConfig:
        """
        The configuration of a checkpoint, in any layout of the method.

        Args:
            fields, weights: see `fields_of`.
            layer_ids (`list[int]`, *optional*): see `from_pretrained`.

        Raises:
            `ValueError`: for a field out of range.
        """
        with reading("config.json"):
            found = {name: value for name, value in cls.fields_of(fields, weights).items() if name != "model_type"}
            if layer_ids is not None:
                found[cls.config_class.layer_ids_field] = layer_ids
            return cls.config_class(**found)

    @classmethod
    def from_pretrained(
        cls,
        pretrained_model_name_or_path: Any,
        dtype: str | torch.dtype | None = None,
        layer_ids: list[int] | None = None,
        **kwargs: Any,
    ) -> Any:
        """
        Loads a drafter of the method, in any of its layouts, in evaluation mode.

        Args:
            pretrained_model_name_or_path, dtype, kwargs: see [`AutoDrafter.from_pretrained`].
            layer_ids (`list[int]`, *optional*):
                The hidden states of the target that it reads, if those in the file are wrong: the configuration's
                `aux_hidden_state_layer_ids`, or `eagle_aux_hidden_state_layer_ids`.

        Raises:
            `ValueError`, `OSError`: see [`AutoDrafter.from_pretrained`].
        """
        name = os.fspath(pretrained_model_name_or_path)
        kwargs = pinned(name, **kwargs)
        fields = read_fields(name, **kwargs)
        stored = read_weights(name, fields.get("weights_sha256"), **kwargs)
        config = cls.config_of(fields, stored, layer_ids)
        weights = {new: stored[old] for old, new in cls.weight_names(fields, stored).items()}
        weights = network_weights(name, weights, config)
        # An invalid value in a field of transformers may only fail when the network is built.
        with reading("config.json"), init.no_init_weights(), torch.device("meta"):
            drafter = cls(config, **cls.parts_of(config, weights))
        load_weights(drafter, name, weights, dtype)
        read_options(drafter, name, **kwargs)
        return drafter.eval()

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

    def check_target(self, target: PreTrainedModel) -> None:
        """See [`Drafter.check_target`]."""
        super().check_target(target)
        if self.embed_tokens is None:
            check_embedding(self, target)
        config = self.config
        families = {_family(name) for name in config.target_architectures}
        found = {_family(name) for name in (*(target.config.architectures or []), type(target).__name__)}
        if families and not families & found:
            raise ValueError(
                f"The drafter's `architectures` of its target are {config.target_architectures}, but the target is a "
                f"{type(target).__name__}: this drafter was made for {config.target_name_or_path or 'another target'}."
                " Use that target, or train a drafter for this one."
            )
        self.check_layers(target.config.get_text_config(decoder=True).num_hidden_layers)

    def check_layers(self, num_layers: int) -> None:
        """Raises a `ValueError` that names the field, if a target of `num_layers` layers is not the drafter's."""
        config = self.config
        ids = getattr(config, config.layer_ids_field)
        if max(ids) > num_layers:
            raise ValueError(
                f"The drafter's `{config.layer_ids_field}` are {ids}, but the target has {num_layers} layers: this "
                f"drafter was made for {config.target_name_or_path or 'another target'}."
            )

    def run_layers(
        self, fused: Tensor, anchors: Tensor, position_ids: Tensor, mask: Tensor, cache: KeyValueCache | None = None
    ) -> Tensor:
        """See [`FalconDraftNetwork.run_layers`]; returns the drafter's states."""
        batch, rows, _ = fused.shape
        cos, sin = self.rotary(position_ids, fused.dtype)
        sizes = self.config.transformer_layer_config
        # One mask for the query heads of each group; see [`FalconAttention`].
        mask = mask.repeat(1, 1, sizes.num_attention_heads // sizes.num_key_value_heads, 1)
        masks = mask.split(1, dim=1)
        hidden = fused.reshape(batch * rows, -1)
        for layer, is_sliding in zip(self.layers, self._is_sliding):
            hidden = layer(hidden, cos, sin, masks[-1] if is_sliding else masks[0], cache)
        return (self.norm(hidden) if self.norms_output else hidden).view(batch, rows, -1)


def _family(name: Any) -> str:
    """The family in the name of a class: "Llama" of "LlamaForCausalLM"."""
    return str(name).partition("For")[0].removesuffix("Model")
