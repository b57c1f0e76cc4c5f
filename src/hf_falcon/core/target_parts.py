# Copyright 2026 The hf_falcon authors. Licensed under the Apache License, Version 2.0.
"""The parts of a target that a drafter reads: features, embedding and LM head."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from .checkpoint_files import weights_fingerprint
from .modeling_falcon_draft import FalconDraftNetwork


class FeatureTap:
    """
    Collects the target's features, the last hidden states after its final norm, from every forward of this thread.

    It is a context manager: the forward hooks exist only inside, also after an error.

    Args:
        model ([`PreTrainedModel`]): the target.
        layers (sequence of `int`, *optional*): layers whose outputs are appended to the features.
    """

    def __init__(self, model: PreTrainedModel, layers: Sequence[int] = ()):
        self._decoder = decoder_of(model)
        self._layers = _decoder_layers(model, layers)
        self._thread = threading.get_ident()
        self._outputs: list[Tensor] = []
        self._collected: list[Tensor] = []
        self._handles: list[Any] = []

    def __enter__(self) -> FeatureTap:
        self._handles = [self._decoder.register_forward_hook(self._collect)]
        self._handles += [layer.register_forward_hook(self._collect_layer) for layer in self._layers]
        return self

    def __exit__(self, *exception: Any) -> None:
        for handle in self._handles:
            handle.remove()

    @property
    def is_empty(self) -> bool:
        """Whether no forward ran since the last `take`."""
        return not self._collected

    def take(self) -> Tensor:
        """Features of all positions since the last call, of shape `(batch, positions, (1 + layers) * hidden_size)`."""
        collected, self._collected = self._collected, []
        return collected[0] if len(collected) == 1 else torch.cat(collected, dim=1)

    def _collect(self, module: Any, inputs: Any, output: Any) -> None:
        # Another thread may generate with the same target at the same time.
        if threading.get_ident() == self._thread:
            features = output[0] if isinstance(output, tuple) else output.last_hidden_state
            outputs, self._outputs = self._outputs, []
            if outputs:
                features = torch.cat([features, *(each.to(features.device) for each in outputs)], dim=-1)
            self._collected.append(features)

    def _collect_layer(self, module: Any, inputs: Any, output: Any) -> None:
        if threading.get_ident() == self._thread:
            self._outputs.append(output[0] if isinstance(output, tuple) else output)


def decoder_of(model: PreTrainedModel) -> PreTrainedModel:
    """The part of a causal language model that computes the LM head's input."""
    # OPT's language model calls the decoder inside its base model directly; ModernBERT's `decoder` is its LM head.
    decoder = model.get_decoder()
    decoder = decoder if isinstance(decoder, PreTrainedModel) else model.base_model
    # Mllama's and Kosmos-2.5's decoders are language models themselves.
    return decoder if decoder.get_output_embeddings() is None else getattr(decoder, "model", decoder)


def _decoder_layers(model: PreTrainedModel, wanted: Sequence[int]) -> list[nn.Module]:
    """
    Some of a model's decoder layers.

    Raises:
        `ValueError`: if the model has no such layer.
    """
    count = model.config.get_text_config(decoder=True).num_hidden_layers
    lists = [each for each in decoder_of(model).children() if isinstance(each, nn.ModuleList) and len(each) == count]
    if wanted and (not lists or max(wanted) >= count):
        raise ValueError(
            f"`feature_layers` is {list(wanted)}, but {type(model).__name__} has {count if lists else 'no'} decoder "
            "layers in one list, counted from 0: give other layers, or leave it out."
        )
    return [lists[0][layer] for layer in wanted]


class TargetHead:
    """
    Embedding and LM head of a target, for the drafter's vocabulary, with the target's own post-processing.

    One object serves one `generate` call or one training run. The drafter itself stores no part of a target.

    Args:
        drafter ([`FalconDraftModel`]): the drafter.
        target ([`PreTrainedModel`]): the target, a causal language model.
        dtype (`torch.dtype`, *optional*, defaults to the drafter's): dtype of the head.

    Raises:
        `ValueError`: if the drafter was made for a target of another kind or shape.
    """

    def __init__(self, drafter: FalconDraftNetwork, target: PreTrainedModel, dtype: torch.dtype | None = None):
        check_target(drafter, target)
        config = drafter.config
        self._output: Any = target.get_output_embeddings()
        self._embedding = target.get_input_embeddings()
        # The drafter may still move: its device is read when it is needed.
        self._example = drafter.norm.weight
        self._dtype = dtype or self._example.dtype
        self._known_ids = None if config.draft_vocab_size is None else drafter.draft_vocab_ids
        self.draft_vocab_size: int = config.draft_vocab_size or self._output.weight.shape[0]
        self._scale = config.logit_scale
        self._softcap = config.logit_softcapping

    @cached_property
    def linear(self) -> nn.Linear:
        """The LM head as a linear layer. It is made at its first use, because not all calls draft."""
        weight, bias = _parameters_of(self._output)
        if self._known_ids is not None:
            rows = self._known_ids.to(weight.device)
            weight, bias = weight[rows], None if bias is None else bias[rows]
        size, hidden_size = weight.shape
        linear = nn.Linear(hidden_size, size, bias=bias is not None, device="meta")
        linear.weight = nn.Parameter(weight.detach().to(self._example.device, self._dtype), requires_grad=False)
        if bias is not None:
            linear.bias = nn.Parameter(bias.detach().to(self._example.device, self._dtype), requires_grad=False)
        return linear

    @cached_property
    def vocab_ids(self) -> Tensor | None:
        """Target ids of the draft vocabulary, of shape `(draft_vocab_size,)`; `None` for the whole vocabulary."""
        return None if self._known_ids is None else self._known_ids.to(self.linear.weight.device)

    def embed(self, token_ids: Tensor) -> Tensor:
        """
        The target's embeddings of `token_ids` of shape `(...)`, of shape `(..., hidden_size)` and on the drafter's
        device.
        """
        weight = self._embedding.weight
        with torch.no_grad():
            # The weight of an offloaded embedding has no device, and accelerate moves the tokens.
            embeds = self._embedding(token_ids if weight.is_meta else token_ids.to(weight.device))
        return embeds.to(self._example.device)

    def logits(self, features: Tensor) -> Tensor:
        """
        The logits that the target's own forward computes from `features`, for the draft vocabulary.

        Args:
            features (`torch.Tensor` of shape `(..., hidden_size)`): true or predicted features.

        Returns:
            `torch.Tensor` of shape `(..., draft_vocab_size or vocab_size)`.
        """
        # One matrix: for a batch of strided rows the product would copy the weight.
        rows = features.reshape(-1, features.shape[-1]).to(self.linear.weight.dtype)
        logits = self.linear(rows).view(*features.shape[:-1], -1)
        if self._scale != 1.0:
            logits = logits * self._scale
        if self._softcap is not None:
            logits = torch.tanh(logits / self._softcap) * self._softcap
        return logits

    def to_target_ids(self, draft_ids: Tensor) -> Tensor:
        """Converts ids of the draft vocabulary to ids of the target's vocabulary."""
        return draft_ids if self.vocab_ids is None else self.vocab_ids[draft_ids]


def _parameters_of(output: Any) -> tuple[Tensor, Tensor | None]:
    """Weight and bias of an LM head as ordinary tensors, also if it is packed, or offloaded by accelerate."""
    weight, bias = output.weight, getattr(output, "bias", None)
    hook = getattr(output, "_hf_hook", None)
    if weight.is_meta and hook is not None:
        hook.pre_forward(output)
        weight, bias = output.weight.detach(), getattr(output, "bias", None)
        hook.post_forward(output, None)
    return weight.to_dense(), bias


def check_target(drafter: FalconDraftNetwork, target: PreTrainedModel) -> None:
    """
    Checks that a drafter can draft for a target.

    Raises:
        `ValueError`: if it cannot; it names the field that differs, both values, and the remedy.
    """
    config = drafter.config
    text_config = target.config.get_text_config(decoder=True)
    output = target.get_output_embeddings()
    if output is None or not hasattr(output, "weight"):
        raise ValueError(
            f"{type(target).__name__} has no LM head for a drafter to use (`get_output_embeddings()` is "
            f"{type(output).__name__}): use a causal language model whose head is a linear layer."
        )
    found = {
        "target_model_type": text_config.model_type,
        "vocab_size": text_config.vocab_size,
        "hidden_size": output.weight.shape[-1],
    }
    for field, value in found.items():
        expected = getattr(config, field)
        if expected is not None and value != expected:
            raise ValueError(
                f"The drafter's `{field}` is {expected!r}, but the target has {value!r}: this drafter was made for "
                f"{config.target_name_or_path or 'another target'}. Use that target, or train a drafter for this one."
            )
    if target.get_input_embeddings().weight.shape[-1] != config.hidden_size:
        raise ValueError(
            f"The target's embedding is {target.get_input_embeddings().weight.shape[-1]} wide and its last hidden "
            f"state {config.hidden_size}: a drafter needs both to be equal."
        )


def was_trained_for(drafter: FalconDraftNetwork, target: PreTrainedModel) -> bool:
    """Whether the drafter was trained for the target's weights; `True` if their fingerprints are not known."""
    expected = drafter.config.target_fingerprint
    actual = weights_fingerprint(target) if expected is not None else None
    return expected is None or actual is None or actual == expected
