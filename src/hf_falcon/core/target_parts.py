# Copyright 2026 The hf_falcon authors. Licensed under the Apache License, Version 2.0.
"""A target: its features, its layers, its inputs, and the positions that trees may not reach."""

from __future__ import annotations

import inspect
import threading
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import Cache, GenerationMixin, PreTrainedConfig, PreTrainedModel

from .hook import extend_model_kwargs

FULL, SLIDING = "full_attention", "sliding_attention"
# What models call their cache; `generate` has the first of the names. In transformers 5.24 it became `cache`.
_IS_RENAMED = "cache" in inspect.signature(GenerationMixin.prepare_inputs_for_generation).parameters
CACHE_NAMES = ("cache", "state") if _IS_RENAMED else ("past_key_values", "cache_params", "state")
CACHE_NAME = CACHE_NAMES[0]
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
TOKEN_TYPES = {"token_type_ids", "mm_token_type_ids", "moe_mm_token_type_ids"}
# The argument, and the field of a configuration, by which a model returns what its router decides.
_ROUTER = "output_router_logits"
# What configurations call the number of positions that a model has a table of, or was trained with.
_LENGTH_NAMES = ("max_position_embeddings", "max_target_positions", "n_positions", "max_seq_len")
# What tells which adapters of a layer act.
_ADAPTERS = ("_active_adapter", "_disable_adapters")
# Values of a matrix that identify it.
_SAMPLED_VALUES = 16


class FeatureTap:
    """
    Collects the target's features, the last hidden states after its final norm, from every forward of this thread.

    It is a context manager: the forward hooks exist only inside, also after an error.

    Args:
        model ([`PreTrainedModel`]): the target.
        layers (sequence of `int`, *optional*):
            Layers whose outputs are appended to the features, in this order; -1 is the input of the first layer.
            `None` keeps no features: they have width 0.
    """

    def __init__(self, model: PreTrainedModel, layers: Sequence[int] | None = ()):
        self._decoder = decoder_of(model)
        self._keeps = layers is not None
        layers = layers or ()
        self._layers = wanted_layers(model, [max(layer, 0) for layer in layers])
        # Whether the layer's input is collected, and not its output.
        self._takes_input = [layer < 0 for layer in layers]
        self._thread = 0
        # Outputs of the layers of the forward that runs, by their place in `layers`.
        self._outputs: dict[int, Tensor] = {}
        self._collected: list[Tensor] = []
        self._handles: list[Any] = []

    def __reduce__(self) -> Any:
        # A copy of the target that is made in mid-call keeps the hooks. They collect nothing.
        return _closed_tap, ()

    def __enter__(self) -> FeatureTap:
        self._handles = [self._decoder.register_forward_hook(self._collect)]
        for place, (layer, takes_input) in enumerate(zip(self._layers, self._takes_input)):
            if takes_input:
                hook = partial(self._collect_input, place)
                self._handles.append(layer.register_forward_pre_hook(hook, with_kwargs=True))
            else:
                self._handles.append(layer.register_forward_hook(partial(self._collect_output, place)))
        self._thread = threading.get_ident()
        return self

    def __exit__(self, *exception: Any) -> None:
        self._thread = 0
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
            if not self._keeps:
                features = features.new_empty((*features.shape[:-1], 0))
            outputs, self._outputs = self._outputs, {}
            # Of a prompt Gemma 4 computes only the last tokens in the layers that share keys and values.
            parts = [outputs[place][:, -features.shape[1] :].to(features.device) for place in sorted(outputs)]
            self._collected.append(torch.cat([features, *parts], dim=-1) if parts else features)

    def _collect_output(self, place: int, module: Any, inputs: Any, output: Any) -> None:
        if threading.get_ident() == self._thread:
            self._outputs[place] = output[0] if isinstance(output, tuple) else output

    # Torch looks up anew whether a hook gets `named`: another thread may have removed it.
    def _collect_input(self, place: int, module: Any, inputs: Any, named: Any = None) -> None:
        if threading.get_ident() == self._thread:
            self._outputs[place] = inputs[0] if inputs else named["hidden_states"]


def peft_sets(model: PreTrainedModel, name: str) -> bool:
    """Whether PEFT has set this for the call's rows: "alora_offsets", or "adapter_names" (then no row may leave)."""
    hooks = (hook for module in modules_of(model) for hook in tuple(module._forward_pre_hooks.values()))
    return any(name in keywords_of(hook) for hook in hooks)


def keywords_of(hook: Any) -> Mapping[str, Any]:
    """What is given to a hook that is a partial function."""
    return hook.keywords if isinstance(hook, partial) else {}


def _closed_tap() -> FeatureTap:
    tap = object.__new__(FeatureTap)
    tap._thread = 0
    return tap


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


def wanted_layers(model: PreTrainedModel, wanted: Sequence[int]) -> list[nn.Module]:
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
    # These read a token's slot in the cache: GPT-Neo for its window and its positions, Llama 4 for a query's scale.
    if text_config.model_type in ("gpt_neo", "llama4_text"):
        return {"attention by slots"}
    kinds = getattr(text_config, "layer_types", None)
    if kinds is not None:
        return set(kinds)
    if getattr(text_config, "sliding_window", None) is not None:
        return {SLIDING}
    return {"chunked_attention"} if getattr(text_config, "attention_chunk_size", None) is not None else {FULL}


def cached_tokens(cache: Cache | None) -> int:
    """Tokens in a cache; 0 where it has recurrent layers only, which do not count."""
    attends = cache is not None and any(hasattr(layer, "get_seq_length") for layer in getattr(cache, "layers", ()))
    # A cache without layers yet is empty.
    return int(cache.get_seq_length()) if cache is not None and attends else 0


def first_step(model: PreTrainedModel, input_ids: Tensor, model_kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """What plain decoding passes to the model in the first step after a prompt of any kind: its arguments, by name."""
    kwargs = extend_model_kwargs(model, model_kwargs, new_tokens=1)
    token_ids = F.pad(input_ids, (0, 1))
    step: dict[str, Any] = model.prepare_inputs_for_generation(token_ids, next_sequence_length=1, **kwargs)
    # The loss that balances experts reads a mask of padding, which a tree's mask is not. No token depends on the loss.
    config = model.config.get_text_config(decoder=True)
    is_asked = step.get(_ROUTER) or getattr(config, _ROUTER, False)
    if is_asked and _ROUTER in inspect.signature(model.forward).parameters:
        step[_ROUTER] = False
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
        name: value.expand(-1, nodes) if name in TOKEN_TYPES and value.shape[-1] == 1 else value
        for name, value in extra_inputs(step).items()
    }


def extra_inputs(arguments: Mapping[str, Any]) -> dict[str, Any]:
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
    # Other modules than linear layers may have the one or the other; PEFT's wrap a layer.
    names = "in_features", "out_features"
    if hasattr(layer, "base_layer") or not all(isinstance(getattr(layer, name, None), int) for name in names):
        return False
    weight = getattr(layer, "weight", None)
    # Quantised weights are integers, subclasses of tensors, or tensors under other names. torch's own subclasses are
    # of layers that are spread over devices.
    is_own = hasattr(weight, "__tensor_flatten__") and not type(weight).__module__.startswith("torch.")
    return not isinstance(weight, Tensor) or is_own or not weight.is_floating_point() or weight.itemsize < 2


def is_spread(weight: Any) -> bool:
    """Whether a weight is a DTensor, of which each process has a part. Not every build of torch has that class."""
    return type(weight).__module__.startswith("torch.distributed.")


def some_values(matrix: Tensor) -> Tensor:
    """A sample of a matrix's values, spread over the whole matrix, that identifies the matrix."""
    flat = matrix.detach().reshape(-1)
    return flat[:: max(1, flat.numel() // _SAMPLED_VALUES)][:_SAMPLED_VALUES]


def is_compiled(module: nn.Module) -> bool:
    """Whether a module's forward is compiled in place; its parts' hooks are not called then, or only sometimes."""
    compiled_forward = hasattr(vars(module).get("forward"), "_torchdynamo_orig_callable")
    return compiled_forward or getattr(module, "_compiled_call_impl", None) is not None


def modules_of(model: nn.Module) -> list[nn.Module]:
    """A model's modules, each once. Every call asks, and `Module.modules` hands each up through all levels."""
    found, known = [model], {model}
    for module in found:
        for each in module._modules.values():
            if each is not None and each not in known:
                known.add(each)
                found.append(each)
    return found


def structure_of(model: PreTrainedModel) -> tuple[tuple[Any, ...], ...]:
    """
    The kinds of a model's modules and weights, which change when any of them is quantised, packed, adapted or compiled
    in place: first the class of a module, each time. It is the module's own class, also while another thread's round
    has replaced it by a faster one. The parameters of a scripted module are no dict.
    """
    found = []
    for module in modules_of(model):
        own = next(each for each in type(module).__mro__ if not each.__module__.startswith("hf_falcon."))
        weight = module._parameters["weight"] if "weight" in module._parameters else None
        kind = None if weight is None else (weight.dtype, weight.layout)
        adapters = str([vars(module).get(name) for name in _ADAPTERS])
        found.append((own, type(weight), kind, adapters, is_compiled(module)))
    return tuple(found)


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


def longest_text(config: PreTrainedConfig) -> int | None:
    """The positions that a model has a table of, or was trained with, if its configuration says so."""
    return next((n for name in _LENGTH_NAMES if isinstance(n := getattr(config, name, None), int) and n > 0), None)


def depth_boundaries(model: PreTrainedModel) -> list[tuple[int, bool]]:
    """
    The positions from which a target computes otherwise or not at all: where its table of positions ends, and where
    its rotary frequencies change.

    Returns:
        `list[tuple[int, bool]]`: positions, and whether a tree is also wrong behind them; see [`depth_left`].
    """
    config = model.config.get_text_config(decoder=True)
    boundary, never_settles = rope_boundary(config)
    found = [] if boundary is None else [(boundary, never_settles)]
    length = longest_text(config)
    # Behind the end plain decoding fails, unless the length is only that of training, as with rotary frequencies.
    return found if length is None else [*found, (length, False)]


def depth_left(boundaries: Sequence[tuple[int, bool]], position: int) -> int | None:
    """
    How deep a tree may go before a node reaches a position that plain decoding may not reach, or reach otherwise.

    Args:
        boundaries (sequence of `tuple[int, bool]`): see [`depth_boundaries`].
        position (`int`): the position of the root, in the target's own positions.

    Returns:
        `int`, or `None` without a limit.
    """
    limits = [max(0, end - 1 - position) for end, never_settles in boundaries if position <= end or never_settles]
    return min(limits, default=None)
