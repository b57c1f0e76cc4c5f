# Copyright 2026 The hf_falcon authors. Licensed under the Apache License, Version 2.0.
"""A target: its features, its layers, and the reason where plain decoding runs in place of drafting."""

from __future__ import annotations

import inspect
import math
import threading
import weakref
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from types import NoneType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import (
    Cache,
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

from .hook import attention_implementation, extend_model_kwargs, is_stateful

FULL, SLIDING, REFERENCE_SLIDING = "full_attention", "sliding_attention", "reference_sliding_attention"

# Attention functions that take any additive mask.
_MASKED_ATTENTION = ("eager", "sdpa")

# What models call their cache.
CACHE_NAMES = ("past_key_values", "cache_params", "state")

_CACHE_LAYERS = (DynamicLayer, DynamicSlidingWindowLayer, StaticLayer, StaticSlidingWindowLayer)

# Arguments of the model in a step of plain decoding that a round has of its own, or does without.
_TEXT_INPUTS = {
    "input_ids",
    "attention_mask",
    "inputs_embeds",
    "position_ids",
    "cache_position",
    *CACHE_NAMES,
    "use_cache",
    "logits_to_keep",
    "output_attentions",
    "output_hidden_states",
    "return_dict",
}

# What each token is: of shape `(batch, 1)` in a step, and the same in every step.
_TOKEN_TYPES = {"token_type_ids", "mm_token_type_ids", "moe_mm_token_type_ids"}

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
        self._layers = _wanted_layers(model, [max(layer, 0) for layer in layers])
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


def decoder_layers(model: PreTrainedModel) -> list[nn.Module]:
    """All of a causal language model's decoder layers; none if they are not in one list."""
    count = model.config.get_text_config(decoder=True).num_hidden_layers
    lists = [each for each in decoder_of(model).children() if isinstance(each, nn.ModuleList) and len(each) == count]
    return list(lists[0]) if lists else []


def _wanted_layers(model: PreTrainedModel, wanted: Sequence[int]) -> list[nn.Module]:
    """
    Some of a model's decoder layers.

    Raises:
        `ValueError`: if the model has no such layer.
    """
    layers = decoder_layers(model)
    if wanted and max(wanted) >= len(layers):
        raise ValueError(
            f"`feature_layers` is {list(wanted)}, but {type(model).__name__} has {len(layers) or 'no'} decoder "
            "layers in one list, counted from 0: give other layers, or leave it out."
        )
    return [layers[layer] for layer in wanted]


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
    The reason why nothing can be verified in this call; it completes "plain decoding runs: ...".

    Returns:
        `str`, or `None` where trees or chains can.
    """
    config = model.config.get_text_config(decoder=True)
    cache = model_kwargs.get("past_key_values")
    if model.config.is_encoder_decoder:
        return "the target is an encoder-decoder model"
    # BERT's kind. GPT-NeoX's configuration has the field as well, but GPT-NeoX is a decoder.
    if hasattr(config, "add_cross_attention") and not getattr(config, "is_decoder", True):
        return "the target is an encoder (`is_decoder` is False), which keeps no cache"
    if model.device.type == "meta":
        return "the target's embedding is offloaded, so its device is unknown"
    if any(_is_compiled(module) for module in (model, decoder_of(model))):
        return "the target is compiled by `torch.compile`, which hides its features"
    if (reason := _quantisation_reason(model)) is not None:
        return reason
    if not any(name in inspect.signature(model.forward).parameters for name in CACHE_NAMES):
        return f"the target takes no `{CACHE_NAMES[0]}`"
    if not isinstance(cache, (DynamicCache, StaticCache, NoneType)) or getattr(cache, "offloading", False):
        return f"the cache is a {type(cache).__name__} that cannot drop rejected branches (use a DynamicCache)"
    mask, embeds = model_kwargs.get("attention_mask"), model_kwargs.get("inputs_embeds")
    past = cached_tokens(cache)
    tokens = (input_ids if embeds is None else embeds).shape[1]
    if mask is not None and (mask.dim() != 2 or mask.shape[1] not in (tokens, past + tokens) or mask.shape[1] <= past):
        return (
            f"`attention_mask` has shape {tuple(mask.shape)}, for {past} tokens in the cache and a prompt of {tokens}"
        )
    if streams := sorted(name for name, value in model_kwargs.items() if isinstance(value, Iterator)):
        return f"every new token of the target takes the next part of {streams}"
    crossing = getattr(config, "cross_attention_layers", None) or ()
    layers = getattr(cache, "layers", [])[crossing[0] : crossing[0] + 1] if crossing else []
    if crossing and (_extras(model_kwargs) or any(layer.is_initialized for layer in layers)):
        return "the target's cross-attention layers keep an image in the cache, which then cannot drop branches"
    return None


def cached_tokens(cache: Cache | None) -> int:
    """Tokens in a cache; 0 where it has recurrent layers only, which do not count."""
    attends = cache is not None and any(hasattr(layer, "get_seq_length") for layer in cache.layers)
    # A cache without layers yet is empty.
    return int(cache.get_seq_length()) if cache is not None and attends else 0


def chain_reason(model: PreTrainedModel, input_ids: Tensor, model_kwargs: Mapping[str, Any]) -> str | None:
    """
    The reason why the target takes no tree in this call, but a chain: a single path, with the target's own mask and
    positions.

    Returns:
        `str`, or `None` where it takes trees.
    """
    config = model.config.get_text_config(decoder=True)
    if config.model_type == "git":
        return "the target's mask has room for images, even without any"
    if _uses_alibi(config):
        return "the target uses ALiBi positions, which follow no tree"
    inputs = inspect.signature(model.forward).parameters
    missing = [name for name in ("position_ids", "past_key_values") if name not in inputs]
    if missing:
        return f"the target takes no `{missing[0]}`, which a tree needs"
    unknown = layer_kinds(model.config) - {FULL, SLIDING}
    if unknown or is_stateful(model):
        return f"the target has layers of kind {sorted(unknown) or 'recurrent'}, which follow no tree"
    attention = attention_implementation(config) or "eager"
    if attention not in _MASKED_ATTENTION:
        return f"`attn_implementation` is {attention!r}, which takes no tree mask (use one of {_MASKED_ATTENTION})"
    cache = model_kwargs.get("past_key_values")
    if cache is None:
        return "the target makes a cache of its own, which may keep more than keys and values"
    # By exact type: a subclass may keep more than keys and values.
    odd = {type(layer).__name__ for layer in cache.layers if type(layer) not in _CACHE_LAYERS}
    if odd:
        return f"the cache has layers of type {sorted(odd)}, which may keep more than keys and values"
    step = first_step(model, input_ids, model_kwargs)
    if step.get("position_ids") is None and model_kwargs.get("position_ids") is not None:
        return "the target does not take the `position_ids` that `generate` prepares"
    # A tree's forward can pass on what is the same in every step.
    own = [
        name
        for name, value in _extras(step).items()
        if not (isinstance(value, (int, float, str)) or name in _TOKEN_TYPES)
        and not (isinstance(value, (Tensor, list, tuple)) and value is model_kwargs.get(name))
    ]
    if own:
        return f"every new token of the target takes its own {sorted(own)}"
    given = _extras(model_kwargs)
    if given and rope_boundary(config)[0] is not None:
        return f"the target was given {sorted(given)}, and its rotary frequencies depend on the context's length"
    return None


def unsupported_chain_reason(
    model: PreTrainedModel, generation_config: GenerationConfig, model_kwargs: Mapping[str, Any]
) -> str | None:
    """
    The reason why not even a chain can be verified in this call; see [`unsupported_reason`].

    Returns:
        `str`, or `None` where one can.
    """
    cache = model_kwargs.get("past_key_values")
    if isinstance(cache, StaticCache):
        return "a static cache cannot drop rejected tokens"
    if REFERENCE_SLIDING in layer_kinds(model.config):
        return f"in layers of kind {REFERENCE_SLIDING!r} several tokens see padding that a single one does not"
    if rope_boundary(model.config.get_text_config(decoder=True))[0] is not None:
        return "its rotary frequencies depend on the length of the text"
    wanted = [name for name in ("output_hidden_states", "output_attentions") if getattr(generation_config, name)]
    if generation_config.return_dict_in_generate and wanted:
        return f"`{wanted[0]}` was asked for, which a chain has in another form"
    # In transformers, Mamba 2's layers apply these limits to several tokens, but not to a single one.
    limits = [module.time_step_limit for module in model.modules() if hasattr(module, "time_step_limit")]
    narrow = [limit for limit in limits if tuple(limit) != (0.0, math.inf)]
    if narrow:
        return f"its recurrent layers have the `time_step_limit` {narrow[0]}, which holds for several tokens only"
    return None


def first_step(model: PreTrainedModel, input_ids: Tensor, model_kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """What plain decoding passes to the model in the first step after a prompt of any kind: its arguments, by name."""
    kwargs = extend_model_kwargs(model, model_kwargs, new_tokens=1)
    token_ids = F.pad(input_ids, (0, 1))
    step: dict[str, Any] = model.prepare_inputs_for_generation(token_ids, next_sequence_length=1, **kwargs)
    return step


def inputs_beside_text(step: Mapping[str, Any], nodes: int) -> dict[str, Any]:
    """
    The arguments of a round's forward beside its text, as a step of plain decoding has them.

    Args:
        step (`dict`): see [`first_step`].
        nodes (`int`): tokens of the round.
    """
    return {
        # Older versions of transformers pass the types of the whole text, which a model then reads in a prompt only.
        name: value.expand(-1, nodes) if name in _TOKEN_TYPES and value.shape[-1] == 1 else value
        for name, value in _extras(step).items()
    }


def _extras(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Those of a model's arguments that are no part of a text."""
    # A multimodal model gets an empty dict of its encoders' outputs with a text alone.
    return {
        name: value
        for name, value in arguments.items()
        if name not in _TEXT_INPUTS and value is not None and not (isinstance(value, dict) and not value)
    }


def quantised_layers(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """The names and the linear layers of a model whose weights are quantised, by any library."""
    return ((name, module) for name, module in model.named_modules() if is_quantised(module))


def is_quantised(layer: nn.Module) -> bool:
    """Whether a layer is linear, and its weight is not an ordinary matrix of numbers of 16 bits or more."""
    weight = getattr(layer, "weight", None)
    # Other modules than linear layers may have the one or the other.
    if not all(isinstance(getattr(layer, name, None), int) for name in ("in_features", "out_features")):
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
    input_ids: Tensor,
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
    if extras := sorted(_extras(first_step(model, input_ids, model_kwargs))):
        return f"the batch has several rows, and every new token of the target takes {extras}"
    if model_kwargs.get("inputs_embeds") is not None:
        return "the batch has several rows and is given as `inputs_embeds`"
    outputs = ("output_scores", "output_logits", "output_hidden_states", "output_attentions")
    wanted = [name for name in outputs if getattr(generation_config, name)]
    if generation_config.return_dict_in_generate and wanted:
        return f"the batch has several rows, and `{wanted[0]}` was asked for, which covers rows that have ended"
    return None
