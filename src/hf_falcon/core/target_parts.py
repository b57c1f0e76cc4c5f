# Copyright 2026 The hf_falcon authors. Licensed under the Apache License, Version 2.0.
"""A target: its features, its layers, and the reason where plain decoding runs in place of drafting."""

from __future__ import annotations

import inspect
import threading
import weakref
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from transformers import (
    DynamicCache,
    GenerationConfig,
    LogitsProcessorList,
    PreTrainedConfig,
    PreTrainedModel,
    StaticCache,
    StoppingCriteriaList,
    generation,
)
from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer, StaticLayer, StaticSlidingWindowLayer

from .hook import attention_implementation, is_stateful

FULL, SLIDING = "full_attention", "sliding_attention"

# Attention functions that take any additive mask.
_MASKED_ATTENTION = ("eager", "sdpa")

_CACHE_LAYERS = (DynamicLayer, DynamicSlidingWindowLayer, StaticLayer, StaticSlidingWindowLayer)

# Arguments of the model that `generate` prepares for a text prompt. A tree cannot shift others (images, token types).
_KNOWN_INPUTS = {
    "attention_mask",
    "inputs_embeds",
    "position_ids",
    "cache_position",
    "past_key_values",
    "use_cache",
    "logits_to_keep",
    "output_attentions",
    "output_hidden_states",
    "return_dict",
}

# Processors and criteria that treat each row by itself and keep no state; by exact type, as a subclass may differ.
_ROWWISE_PROCESSORS = {
    generation.EpsilonLogitsWarper,
    generation.EtaLogitsWarper,
    generation.ExponentialDecayLengthPenalty,
    generation.ForcedBOSTokenLogitsProcessor,
    generation.ForcedEOSTokenLogitsProcessor,
    generation.InfNanRemoveLogitsProcessor,
    generation.LogitNormalization,
    generation.MinLengthLogitsProcessor,
    generation.MinNewTokensLengthLogitsProcessor,
    generation.MinPLogitsWarper,
    generation.NoBadWordsLogitsProcessor,
    generation.NoRepeatNGramLogitsProcessor,
    generation.PrefixConstrainedLogitsProcessor,
    generation.RepetitionPenaltyLogitsProcessor,
    generation.SequenceBiasLogitsProcessor,
    generation.SuppressTokensAtBeginLogitsProcessor,
    generation.SuppressTokensLogitsProcessor,
    generation.TemperatureLogitsWarper,
    generation.TopHLogitsWarper,
    generation.TopKLogitsWarper,
    generation.TopPLogitsWarper,
    generation.TypicalLogitsWarper,
    generation.WatermarkLogitsProcessor,
}

_ROWWISE_CRITERIA = {
    generation.EosTokenCriteria,
    generation.MaxLengthCriteria,
    generation.MaxTimeCriteria,
    generation.StopStringCriteria,
}

# What quantised layers do to their inputs; see `_effect_of_quantisation`.
_effects: weakref.WeakKeyDictionary[nn.Module, str | None] = weakref.WeakKeyDictionary()


class FeatureTap:
    """
    Collects the target's features, the last hidden states after its final norm, from every forward of this thread.

    It is a context manager: the forward hooks exist only inside, also after an error.

    Args:
        model ([`PreTrainedModel`]): the target.
        layers (sequence of `int`, *optional*):
            Layers whose outputs are appended to the features, in this order; -1 is the input of the first layer.
    """

    def __init__(self, model: PreTrainedModel, layers: Sequence[int] = ()):
        self._decoder = decoder_of(model)
        self._layers = _decoder_layers(model, [max(layer, 0) for layer in layers])
        # Whether the layer's input is collected, and not its output.
        self._takes_input = [layer < 0 for layer in layers]
        self._thread = threading.get_ident()
        # Outputs of the layers of the forward that runs, by their place in `layers`.
        self._outputs: dict[int, Tensor] = {}
        self._collected: list[Tensor] = []
        self._handles: list[Any] = []

    def __enter__(self) -> FeatureTap:
        self._handles = [self._decoder.register_forward_hook(self._collect)]
        for place, (layer, takes_input) in enumerate(zip(self._layers, self._takes_input)):
            if takes_input:
                hook = partial(self._collect_input, place)
                self._handles.append(layer.register_forward_pre_hook(hook, with_kwargs=True))
            else:
                self._handles.append(layer.register_forward_hook(partial(self._collect_output, place)))
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
            outputs, self._outputs = self._outputs, {}
            if outputs:
                parts = [outputs[place].to(features.device) for place in range(len(self._layers))]
                features = torch.cat([features, *parts], dim=-1)
            self._collected.append(features)

    def _collect_output(self, place: int, module: Any, inputs: Any, output: Any) -> None:
        if threading.get_ident() == self._thread:
            self._outputs[place] = output[0] if isinstance(output, tuple) else output

    def _collect_input(self, place: int, module: Any, inputs: Any, named: Any) -> None:
        if threading.get_ident() == self._thread:
            self._outputs[place] = inputs[0] if inputs else named["hidden_states"]


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


def layer_kinds(config: PreTrainedConfig) -> set[str]:
    """The kinds of attention of a model's layers, in the words of its configuration's `layer_types`."""
    text_config = config.get_text_config(decoder=True)
    kinds = getattr(text_config, "layer_types", None)
    if kinds is not None:
        return set(kinds)
    if text_config.model_type == "gpt_neo":
        # Its local layers cut their window themselves, by the slots of the cache.
        return {{"global": FULL}.get(kind, kind) for kind in text_config.attention_layers}
    if getattr(text_config, "sliding_window", None) is not None:
        return {SLIDING}
    return {"chunked_attention"} if getattr(text_config, "attention_chunk_size", None) is not None else {FULL}


def unsupported_reason(
    model: PreTrainedModel, input_ids: Tensor, generation_config: GenerationConfig, model_kwargs: Mapping[str, Any]
) -> str | None:
    """
    The reason why trees cannot be verified in this call; it completes "plain decoding runs: ...".

    Returns:
        `str`, or `None` where they can.
    """
    config = model.config.get_text_config(decoder=True)
    cache = model_kwargs.get("past_key_values")
    if model.config.is_encoder_decoder:
        return "the target is an encoder-decoder model"
    # BERT's kind. GPT-NeoX's configuration has the field as well, but GPT-NeoX is a decoder.
    if hasattr(config, "add_cross_attention") and not getattr(config, "is_decoder", True):
        return "the target is an encoder (`is_decoder` is False), which keeps no cache"
    if config.model_type == "git":
        return "the target's mask has room for images, even without any"
    if _uses_alibi(config):
        return "the target uses ALiBi positions, which cannot follow a tree"
    if model.device.type == "meta":
        return "the target's embedding is offloaded, so its device is unknown"
    if any(_is_compiled(module) for module in (model, decoder_of(model))):
        return "the target is compiled by `torch.compile`, which hides its features"
    if (reason := _quantisation_reason(model)) is not None:
        return reason
    inputs = inspect.signature(model.forward).parameters
    missing = [name for name in ("position_ids", "past_key_values") if name not in inputs]
    if missing:
        return f"the target takes no `{missing[0]}`, which a tree needs"
    unknown = layer_kinds(model.config) - {FULL, SLIDING}
    if unknown or is_stateful(model):
        return f"the target has layers of kind {sorted(unknown) or 'recurrent'}, which cannot be rolled back"
    attention = attention_implementation(config) or "eager"
    if attention not in _MASKED_ATTENTION:
        return f"`attn_implementation` is {attention!r}, which takes no tree mask (use one of {_MASKED_ATTENTION})"
    if not isinstance(cache, (DynamicCache, StaticCache)) or getattr(cache, "offloading", False):
        return f"the cache is a {type(cache).__name__} that cannot drop rejected branches (use a DynamicCache)"
    # By exact type: a subclass may keep more than keys and values.
    odd = {type(layer).__name__ for layer in cache.layers if type(layer) not in _CACHE_LAYERS}
    if odd:
        return f"the cache has layers of type {sorted(odd)}, which cannot drop rejected branches"
    mask, embeds = model_kwargs.get("attention_mask"), model_kwargs.get("inputs_embeds")
    past, tokens = cache.get_seq_length(), (input_ids if embeds is None else embeds).shape[1]
    if mask is not None and (mask.dim() != 2 or mask.shape[1] not in (tokens, past + tokens) or mask.shape[1] <= past):
        return (
            f"`attention_mask` has shape {tuple(mask.shape)}, for {past} tokens in the cache and a prompt of {tokens}"
        )
    # A multimodal model gets an empty dict of its encoders' outputs with a text alone.
    empty = {name for name, value in model_kwargs.items() if value is None or (isinstance(value, dict) and not value)}
    extra = sorted(model_kwargs.keys() - empty - _KNOWN_INPUTS)
    if extra:
        return f"the target was given {extra} beside its text"
    if _moves_positions(model, input_ids, model_kwargs):
        return "the target does not take its `position_ids` as `generate` prepares them"
    return None


def quantised_layers(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """The names and the linear layers of a model whose weights are quantised, by any library."""
    return ((name, module) for name, module in model.named_modules() if is_quantised(module))


def is_quantised(layer: nn.Module) -> bool:
    """Whether a layer is linear, and its weight is not an ordinary matrix of numbers of 16 bits or more."""
    weight = getattr(layer, "weight", None)
    if not isinstance(getattr(layer, "in_features", None), int):
        return False
    # Quantised weights are integers, subclasses of tensors, or tensors under other names. torch's own subclasses are
    # of layers that are spread over devices.
    is_own = hasattr(weight, "__tensor_flatten__") and not type(weight).__module__.startswith("torch.")
    return not isinstance(weight, Tensor) or is_own or not weight.is_floating_point() or weight.itemsize < 2


def _quantisation_reason(model: PreTrainedModel) -> str | None:
    """The reason why quantised layers rule trees out, if they do; see [`unsupported_reason`]."""
    # Layers of the same kind and name are quantised alike.
    kinds = {
        (type(layer), type(getattr(layer, "weight", None)), name.rpartition(".")[2]): layer
        for name, layer in quantised_layers(model)
    }
    for layer in kinds.values():
        if layer not in _effects:
            _effects[layer] = _effect_of_quantisation(layer, model.device, model.dtype)
        if _effects[layer] is not None:
            return f"the target's quantised layers ({type(layer).__name__}) {_effects[layer]}"
    return None


@torch.no_grad()
def _effect_of_quantisation(layer: Any, device: torch.device, dtype: torch.dtype) -> str | None:
    """What a quantised layer does to its inputs that rules trees out, found by running it on a few rows."""
    large = torch.zeros((1, 1, layer.in_features), dtype=dtype, device=device)
    large[..., ::32] = 4
    others = (large == 0).to(dtype)

    def output(row: Tensor, crowd: Tensor | None = None) -> Tensor:
        rows = row if crowd is None else torch.cat((row, crowd.expand(1, 15, -1)), dim=1)
        return layer(rows)[0, 0].float()

    def contribution(row: Tensor) -> Tensor:
        # No layer has to take zeros, which have no scale.
        return (output(row) - output(-row)).norm() / 2

    # All rows share a scale (dynamic int8), a large value in any row exempts its column from quantisation (LLM.int8,
    # above 6), or many rows run another kernel than few. In `row`, a scale of its own loses the values below half of
    # the step that 8 bits have beside the large ones.
    below_half = others * (0.45 * 4 / 127)
    row = large + below_half
    if not (output(row, torch.full_like(row, 1e4)) - output(row)).norm() <= contribution(below_half) / 2:
        return "give a row another result beside other rows"
    # Every row has a scale of its own. Differences within rounding then move inputs to the next of 256 values or less,
    # and tokens differ much more often than they do by rounding: in float32 as well as in bfloat16.
    nudge = others / 128
    if not (output(large + others + nudge) - output(large + others)).norm() >= contribution(nudge) / 2:
        return "round their inputs to 8 bits, so that tokens would often differ from plain decoding's"
    return None


def _moves_positions(model: PreTrainedModel, input_ids: Tensor, model_kwargs: Mapping[str, Any]) -> bool:
    """Whether the model replaces or shifts the positions that `generate` prepares for a step of plain decoding."""
    prepared = model_kwargs.get("position_ids")
    if prepared is None:
        return False
    # A step has tokens, even if the prompt has none.
    arguments = {name: value for name, value in model_kwargs.items() if name != "inputs_embeds"}
    tokens = input_ids if input_ids.shape[1] > 0 else input_ids.new_zeros(input_ids.shape[0], 1)
    step = model.prepare_inputs_for_generation(tokens, next_sequence_length=1, **arguments)
    taken = step.get("position_ids")
    # Where Phi3's frequencies change, the step is the whole text.
    return taken is None or not torch.equal(taken[..., -1:], prepared[..., -1:])


def _is_compiled(module: nn.Module) -> bool:
    """Whether a module's forward is compiled in place; its parts' hooks are not called then, or only sometimes."""
    compiled_forward = hasattr(vars(module).get("forward"), "_torchdynamo_orig_callable")
    return compiled_forward or getattr(module, "_compiled_call_impl", None) is not None


def _uses_alibi(config: PreTrainedConfig) -> bool:
    nested = getattr(config, "attn_config", None)
    return bool(
        getattr(config, "alibi", False)
        or getattr(nested, "alibi", False)
        or config.model_type == "bloom"
        or getattr(config, "position_embedding_type", None) == "alibi"
    )


def rope_boundary(config: PreTrainedConfig) -> tuple[int | None, bool]:
    """
    The context length from which rotary frequencies depend on the length itself, and whether they change with every
    further token (`dynamic`) or only once (`longrope`).
    """
    parameters = getattr(config, "rope_parameters", None) or {}
    for rope in (parameters, *[p for p in parameters.values() if isinstance(p, dict)]):
        kind = rope.get("rope_type")
        if kind in ("dynamic", "longrope"):
            original = rope.get("original_max_position_embeddings") or getattr(
                config, "original_max_position_embeddings", None
            )
            return original or config.max_position_embeddings, kind == "dynamic"
    return None, False


def unsupported_batch_reason(
    model: PreTrainedModel,
    logits_processor: LogitsProcessorList,
    stopping_criteria: StoppingCriteriaList,
    generation_config: GenerationConfig,
    model_kwargs: Mapping[str, Any],
) -> str | None:
    """
    The reason why the rows of a batch cannot advance independently in this call; see [`unsupported_reason`].

    Returns:
        `str`, or `None` where they can.
    """
    parts = ((logits_processor, _ROWWISE_PROCESSORS), (stopping_criteria, _ROWWISE_CRITERIA))
    odd = [type(each).__name__ for given, known in parts for each in given if type(each) not in known]
    if odd:
        return f"the batch has several rows, and {odd[0]} may look at all of them at once"
    kinds = {type(each) for each in stopping_criteria}
    if generation.EosTokenCriteria not in kinds and kinds - {generation.MaxLengthCriteria}:
        return "the batch has several rows, and without an `eos_token_id` rows that have ended continue"
    if rope_boundary(model.config.get_text_config(decoder=True))[0] is not None:
        return "the batch has several rows, and the target's rotary frequencies depend on the longest"
    if model_kwargs["past_key_values"].get_seq_length() > 0:
        return "the batch has several rows and continues from a cache"
    mask = model_kwargs.get("attention_mask")
    if mask is not None and not bool(mask.any(dim=-1).all()):
        return "the batch has a row that is all padding"
    positions = model_kwargs.get("position_ids")
    if positions is not None and positions.dim() > 2:
        return "the batch has several rows, and the target has positions of several kinds"
    if model_kwargs.get("inputs_embeds") is not None:
        return "the batch has several rows and is given as `inputs_embeds`"
    outputs = ("output_scores", "output_logits", "output_hidden_states", "output_attentions")
    wanted = [name for name in outputs if getattr(generation_config, name)]
    if generation_config.return_dict_in_generate and wanted:
        return f"the batch has several rows, and `{wanted[0]}` was asked for, which covers rows that have ended"
    return None
