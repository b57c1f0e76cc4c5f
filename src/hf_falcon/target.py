# Copyright 2026 The hf_falcon authors. Licensed under the Apache License, Version 2.0.
"""The target of one `generate` call: its features, its tree attention and its cache."""

from __future__ import annotations

import inspect
import threading
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor, nn
from transformers import Cache, DynamicCache, GenerationConfig, PreTrainedConfig, PreTrainedModel
from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer

from .compiled_rounds import CompiledRounds, compiled_rounds_of
from .few_rows import few_rows, linears_of
from .grouped_attention import grouped_attention
from .growing_cache import give_back, grow_in_place
from .layer_outputs import LayerOutputs
from .modeling_falcon_draft import additive_mask
from .tree import DraftTree, star

FULL, SLIDING = "full_attention", "sliding_attention"
# Attention functions that take any additive mask.
_MASKED_ATTENTION = ("eager", "sdpa")
_CACHE_LAYERS = (DynamicLayer, DynamicSlidingWindowLayer)
# What `generate` hands on for a plain text prompt. Anything else (images, token types) is not ours to shift.
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


def why_no_tree(
    model: PreTrainedModel, input_ids: Tensor, generation_config: GenerationConfig, model_kwargs: Mapping[str, Any]
) -> str | None:
    """
    Why trees cannot be verified in this call, in words that finish "plain decoding runs, because ...".

    Returns:
        `str`, or `None` where they can.
    """
    config = model.config.get_text_config(decoder=True)
    cache = model_kwargs.get("past_key_values")
    if model.config.is_encoder_decoder:
        return "the target is an encoder-decoder model"
    # BERT and its kin; GPT-NeoX's configuration says the same, and means nothing by it.
    if hasattr(config, "add_cross_attention") and not getattr(config, "is_decoder", True):
        return "the target is an encoder (`is_decoder` is False), which keeps no cache"
    if config.model_type == "git":
        return "the target makes room for images in its mask, even where there are none"
    if _uses_alibi(config):
        return "the target uses ALiBi positions, which cannot follow a tree"
    if model.device.type == "meta":
        return "the target's embedding is offloaded, so that its device cannot be told"
    if any(_is_compiled(module) for module in (model, decoder_of(model))):
        return "the target is compiled by `torch.compile`, and so keeps its features to itself"
    if any(isinstance(module, torch.ao.nn.quantized.dynamic.Linear) for module in model.modules()):
        return (
            "the target's linear layers quantise all rows of a forward by one scale, so that each changes the others"
        )
    inputs = inspect.signature(model.forward).parameters
    missing = [name for name in ("position_ids", "past_key_values") if name not in inputs]
    if missing:
        return f"the target takes no `{missing[0]}`, which a tree needs"
    unknown = layer_kinds(model.config) - {FULL, SLIDING}
    if unknown or getattr(model, "_is_stateful", False):
        return f"the target has layers of kind {sorted(unknown) or 'recurrent'}, which cannot be rolled back"
    attention = getattr(config, "_attn_implementation", None) or "eager"
    if attention not in _MASKED_ATTENTION:
        return f"`attn_implementation` is {attention!r}, which takes no tree mask (use one of {_MASKED_ATTENTION})"
    if not isinstance(cache, DynamicCache) or getattr(cache, "offloading", False):
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


def _moves_positions(model: PreTrainedModel, input_ids: Tensor, model_kwargs: Mapping[str, Any]) -> bool:
    """Whether a step of plain decoding has positions of the model's own, or shifted ones, not those of `generate`."""
    prepared = model_kwargs.get("position_ids")
    if prepared is None:
        return False
    # A step has tokens, whatever the prompt has.
    arguments = {name: value for name, value in model_kwargs.items() if name != "inputs_embeds"}
    tokens = input_ids if input_ids.shape[1] > 0 else input_ids.new_zeros(input_ids.shape[0], 1)
    step = model.prepare_inputs_for_generation(tokens, next_sequence_length=1, **arguments)
    taken = step.get("position_ids")
    # Where Phi3's frequencies change the step is the whole text anew.
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
    The context length from which rotary frequencies depend on the length itself, and whether they go on to change
    with every token there (`dynamic`), or have changed once (`longrope`).
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


class FeatureTap:
    """
    Collects the target's features, the last hidden states after its final norm, from every forward of this thread.

    A context manager: the hooks are there only inside, whatever happens.

    Args:
        model ([`PreTrainedModel`]): the target.
        layers (sequence of `int`, *optional*): layers whose outputs are collected, too, behind the features.
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
    """The part of a causal language model whose output its LM head reads."""
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
            "layers that can be counted, from 0: use others, or leave it out."
        )
    return [lists[0][layer] for layer in wanted]


class TargetRun:
    """
    The target during one `generate` call: prefills, scores trees and keeps accepted paths.

    Args:
        model ([`PreTrainedModel`]): the target.
        input_ids (`torch.LongTensor` of shape `(1, length)`): the prompt.
        generation_config ([`GenerationConfig`]): configuration of the call.
        model_kwargs (`dict`): what `generate` prepared, with a [`DynamicCache`] in it.
        feature_layers (sequence of `int`, *optional*): see [`FeatureTap`].
    """

    def __init__(
        self,
        model: PreTrainedModel,
        input_ids: Tensor,
        generation_config: GenerationConfig,
        model_kwargs: dict[str, Any],
        feature_layers: Sequence[int] = (),
    ):
        self.model = model
        self._tap = FeatureTap(model, feature_layers)
        self._linears = linears_of(model)
        self.cache: Cache = model_kwargs["past_key_values"]
        self._config = model.config.get_text_config(decoder=True)
        self._generation_config = generation_config
        self._model_kwargs = model_kwargs
        self._kinds = sorted(layer_kinds(model.config))
        self._rope_boundary, self._rope_never_settles = rope_boundary(self._config)
        padding = model_kwargs.get("attention_mask")
        # Cached slots that hold padding stay hidden; without padding there is nothing to look at.
        self._hidden_slots = None if padding is None or bool(padding.all()) else ~padding[0].bool()
        self._num_hidden = 0 if self._hidden_slots is None else int(self._hidden_slots.sum())
        # What a position is more than its slot in the cache.
        self._position_shift = 0
        self.layer_outputs = LayerOutputs(generation_config)
        self._outputs: Any = None
        # What single layers give does not come out of a compiled decoder.
        looks_inside = bool(feature_layers or self.layer_outputs.arguments)
        self.compiled: CompiledRounds | None = None if looks_inside else compiled_rounds_of(model)
        # Tokens in the cache that stay there, whatever happens to a round.
        self._kept: int | None = None

    @property
    def length(self) -> int:
        """Tokens in the cache."""
        return self.cache.get_seq_length()

    @property
    def compiled_sizes(self) -> tuple[int, ...]:
        """Tokens of the trees that run compiled, the root among them; smaller ones are filled up."""
        return () if self.compiled is None else tuple(self.compiled.sizes)

    @property
    def prompt_embeds(self) -> Tensor | None:
        """The prompt, of shape `(1, length, hidden_size)`, where it was given as embeddings."""
        return self._model_kwargs.get("inputs_embeds")

    def prefill(self, input_ids: Tensor) -> tuple[Tensor, Tensor]:
        """
        Runs the prompt as plain decoding does.

        Returns:
            The logits after it, of shape `(1, vocab_size)`, and the features of its positions that were not in the
            cache yet, of shape `(1, positions, hidden_size)`.
        """
        with self._tap as tap:
            outputs = self.model._prefill(
                input_ids,
                self._generation_config,
                self._model_kwargs,
                is_first_iteration=not self._generation_config.is_assistant,
            )
        self._adopt(outputs.past_key_values)
        self.layer_outputs.add_step(outputs)
        # Positions go on from the prompt's last one, where padding or the caller has put it.
        positions = self._model_kwargs.get("position_ids")
        self._position_shift = 0 if positions is None else int(positions[..., -1].max()) + 1 - self.length
        return outputs.logits[:, -1], tap.take()

    def max_tree_depth(self) -> int | None:
        """How deep a tree may go before a node would see other rotary frequencies than plain decoding gives it."""
        if self._rope_boundary is None:
            return None
        position = self.length + self._position_shift
        if position > self._rope_boundary and not self._rope_never_settles:
            return None
        return max(0, self._rope_boundary - 1 - position)

    def score(self, tree: DraftTree, input_ids: Tensor) -> tuple[Tensor, Tensor]:
        """
        One forward over all nodes of a tree.

        Args:
            tree ([`DraftTree`]): the tree of the round.
            input_ids (`torch.LongTensor` of shape `(1, length)`): the sequence so far, which ends with the root.

        Returns:
            The logits after each node's own path, of shape `(nodes, vocab_size)`, and the nodes' features, of shape
            `(1, nodes, hidden_size)`.
        """
        if self._starts_anew(input_ids):
            inputs = self.model.prepare_inputs_for_generation(
                input_ids, use_cache=True, **self.layer_outputs.arguments
            )
            with self._tap as tap:
                outputs = self._outputs = self.model(**inputs, return_dict=True)
            self._adopt(outputs.past_key_values)
            return outputs.logits[0, -1:], tap.take()[:, -1:]
        return self._forward(tree)

    def _forward(self, tree: DraftTree) -> tuple[Tensor, Tensor]:
        start, nodes = self.length, len(tree)
        compiled = None
        if self.compiled is not None and (size := self.compiled.size_for(nodes)) is not None:
            compiled, tree = self.compiled, tree.filled(size)
        masks = {kind: self._mask(kind, tree, start) for kind in self._kinds}
        with ExitStack() as stack:
            tap = stack.enter_context(self._tap)
            stack.enter_context(grouped_attention(masks.values()))
            # Compiled code is for layers that have been touched, whatever its rows.
            stack.enter_context(few_rows(self.model, self._linears, len(tree) if compiled is None else None))
            if compiled is not None:
                stack.enter_context(compiled.round(self.cache, masks.values()))
            outputs = self._outputs = self.model(
                input_ids=tree.token_ids[None],
                attention_mask=masks if len(masks) > 1 else masks[self._kinds[0]],
                position_ids=(start + self._position_shift + tree.depths)[None],
                past_key_values=self.cache,
                use_cache=True,
                return_dict=True,
                **self.layer_outputs.arguments,
            )
        if nodes < len(tree):
            self.cache.crop(nodes - len(tree))
        return outputs.logits[0, :nodes], tap.take()[:, :nodes]

    def keep(self, path: Tensor, nodes: int) -> None:
        """
        Keeps the nodes of `path` of the `nodes` nodes just scored, and drops the others.

        Args:
            path (`torch.LongTensor` of shape `(kept,)`): nodes to keep, in order.
            nodes (`int`): nodes that the last forward added.
        """
        self._keep_outputs(path, nodes)
        kept, sources, found = path.shape[0], path, None
        # Nodes that stand where they belong need not move. To look is to wait for the device, where that is not a CPU.
        moves = path.device.type != "cpu" or path.tolist() != list(range(kept))
        for layer in self.cache.layers:
            if not layer.is_initialized or not moves:
                continue
            first = layer.keys.shape[-2] - nodes
            if found != (first, layer.keys.device):
                found = (first, layer.keys.device)
                sources = (path + first).to(layer.keys.device)
            for states in (layer.keys, layer.values):
                # Gathered first, then written: source and destination rows overlap.
                states[..., first : first + kept, :] = states.index_select(-2, sources)
        self.cache.crop(kept - nodes)
        self._kept = self.length

    def _keep_outputs(self, path: Tensor, nodes: int) -> None:
        outputs, self._outputs = self._outputs, None
        if nodes == 1:
            self.layer_outputs.add_step(outputs)
        elif self.layer_outputs.arguments:
            kept = {kind: getattr(self._layer_of_kind(kind), "sliding_window", None) for kind in self._kinds}
            kinds = getattr(self._config, "layer_types", None) or self._kinds * self._config.num_hidden_layers
            self.layer_outputs.add_path(outputs, path, [kept[kind] for kind in kinds])

    def rehearse(self, nodes: int) -> Tensor:
        """
        Scores the root and `nodes` draft nodes of no meaning, and forgets them: for timing.

        Returns:
            `torch.Tensor` of shape `(1 + nodes, vocab_size)`: their logits.
        """
        logits, _ = self._forward(star(nodes, self.model.device))
        self.cache.crop(-(nodes + 1))
        return logits

    def finish(self) -> Cache:
        """The cache as plain decoding would leave it: a next turn may start from it, with or without a drafter."""
        for layer in self.cache.layers:
            # A round that broke off leaves its tree there, and one that did so in the target in some layers only.
            if self._kept is not None and layer.get_seq_length() > self._kept:
                layer.crop(self._kept - layer.get_seq_length())
        give_back(self.cache)
        for layer in self.cache.layers:
            if getattr(layer, "record_past", False):
                # transformers has no call for it. Left on, 5.17 fails at the next forward without a crop.
                layer.record_past = False
        return self.cache

    def _adopt(self, cache: Cache) -> None:
        """Takes the cache that a forward returned: where rotary frequencies change, Phi3 returns another one."""
        if cache is not self.cache:
            give_back(self.cache)
        self.cache = cache
        # Layers with a window drop nothing of a tree before they are cropped.
        cache.activate_past_recording()
        cache.crop(0)
        grow_in_place(cache)
        self._kept = self.length

    def _starts_anew(self, input_ids: Tensor) -> bool:
        """Whether plain decoding drops its cache here and runs all anew, as Phi3 does with its long frequencies."""
        # With padding the context reaches the boundary later than the cache does, and nothing is to be computed anew.
        if self._rope_boundary is None or self.length != self._rope_boundary or self._num_hidden > 0:
            return False
        inputs = self.model.prepare_inputs_for_generation(
            input_ids, next_sequence_length=1, past_key_values=self.cache, use_cache=True
        )
        return inputs.get("past_key_values") is None

    def _mask(self, kind: str, tree: DraftTree, start: int) -> Tensor:
        """Additive mask of shape `(1, 1, nodes, cached + nodes)`; a node's slot is the one plain decoding gives it."""
        nodes, device = len(tree), tree.token_ids.device
        layer = self._layer_of_kind(kind)
        kv_length, kv_offset = layer.get_mask_sizes(nodes)
        cached = kv_length - nodes
        slots = torch.arange(kv_offset, kv_offset + cached, device=device)
        before = torch.ones(nodes, cached, dtype=torch.bool, device=device)
        inside = tree.visible
        if kind == SLIDING:
            # The window is the model's, not the cache layer's: a user's own cache may keep more than the window.
            oldest = start + tree.depths - self._config.sliding_window
            before = slots[None] > oldest[:, None]
            inside = inside & (start + tree.depths[None] > oldest[:, None])
        if self._hidden_slots is not None:
            padded = torch.zeros(start, dtype=torch.bool, device=device)
            padded[: self._hidden_slots.shape[0]] = self._hidden_slots
            before = before & ~padded[slots]
        return additive_mask(torch.cat((before, inside), dim=1), self.model.dtype)[None, None]

    def _layer_of_kind(self, kind: str) -> Any:
        kinds = getattr(self._config, "layer_types", None)
        index = kinds.index(kind) if kinds is not None else 0
        return self.cache.layers[index]
