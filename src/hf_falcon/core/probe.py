# Copyright 2026 The hf_falcon authors. Licensed under the Apache License, Version 2.0.
"""
The probe: what a target takes in a round. It runs a few tokens one by one, as a tree and as a chain, and compares.

What a few tokens cannot show, as it depends on the call or fails later in a text only, has a rule here.
"""

from __future__ import annotations

import copy
import inspect
import itertools
import math
import weakref
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers import (
    Cache,
    DynamicCache,
    GenerationConfig,
    LogitsProcessorList,
    PreTrainedConfig,
    PreTrainedModel,
    StaticCache,
    StoppingCriteriaList,
)

from .caches import ROW_LAYERS
from .hook import attention_implementation, extend_model_kwargs, makes_own_cache, plain_reason, prefill
from .interfaces import part
from .target_parts import (
    CACHE_NAME,
    CACHE_NAMES,
    FULL,
    SLIDING,
    TOKEN_TYPES,
    cached_tokens,
    decoder_of,
    extra_inputs,
    first_step,
    is_compiled,
    is_spread,
    keywords_of,
    layer_kinds,
    modules_of,
    peft_sets,
    quantised_layers,
    rope_boundary,
    structure_of,
)
from .target_run import TargetRun
from .tree import DraftTree, ancestor_mask, chain, to_device

TREES, CHAINS, PLAIN = "trees", "chains", "plain"
# Tokens of the probe's prompt, of which the first are padding where the call has padding; and the tokens behind it.
_PROMPT, _PADDING, _TOKENS = 8, 2, 4
# Nodes between a parent and its child in the probe's trees: what a target computes by slots is then far off.
_FILLERS = 16
# How far logits may differ, relative to how they scatter: by rounding in float32, or in fewer bits.
_TOLERANCE, _TOLERANCE_HALF = 1e-3, 0.07
# Verdicts that are kept of a target: those of its last adapters and kinds of calls.
_KEPT = 32
# Attention functions that take any additive mask; and modules of hooks that only collect, and of forwards in rounds.
MASKED_ATTENTION = ("eager", "sdpa")
_OWN_MODULES = (__name__.rpartition(".")[0].removesuffix(".core"), "transformers.utils.output_capturing")
_NO_CHAINS = "only the installed package verifies chains (`pip install hf-falcon`)"
_NO_BATCHES = "the batch has several rows, which only the installed package verifies (`pip install hf-falcon`)"
_NO_QUANTISED = "the target is quantised, which only the installed package tries (`pip install hf-falcon`)"
LAYER_OUTPUTS = ("output_hidden_states", "output_attentions")


class Verdict(NamedTuple):
    """
    What is verified in a round of a call.

    Args:
        way (`str`): `TREES`, `CHAINS` or `PLAIN`, where plain decoding runs.
        reason (`str`, *optional*): why no trees are verified; with `PLAIN`, it completes "plain decoding runs: ...".
    """

    way: str
    reason: str | None = None


# What the probe found, for each target as it stood.
_verdicts: weakref.WeakKeyDictionary[PreTrainedModel, dict[Hashable, Verdict]] = weakref.WeakKeyDictionary()


def verdict_of_call(
    model: PreTrainedModel,
    input_ids: Tensor,
    logits_processor: LogitsProcessorList,
    stopping_criteria: StoppingCriteriaList,
    generation_config: GenerationConfig,
    model_kwargs: Mapping[str, Any],
) -> Verdict:
    """
    What is verified in the rounds of a call: the rules decide first, then the probe.

    Args:
        model ([`PreTrainedModel`]): the target.
        input_ids, logits_processor, stopping_criteria, generation_config, model_kwargs: what `generate` prepared.
    """
    if (reason := _no_draft_reason(model, input_ids, generation_config, model_kwargs)) is not None:
        return Verdict(PLAIN, reason)
    rows = input_ids.shape[0]
    no_tree = _no_tree_reason(model, input_ids, model_kwargs)
    reason = None
    if no_tree is None and rows > 1:
        call = model, input_ids, logits_processor, stopping_criteria, generation_config, model_kwargs
        batches = part("batches")
        reason = _NO_BATCHES if batches is None else batches.refusal_of_call(*call)
    elif no_tree is not None:
        reason = _no_chain_reason(model, rows, generation_config, model_kwargs)
        reason = reason and f"{no_tree}, and {reason}"
    if reason is not None:
        return Verdict(PLAIN, reason)
    found = probe(model, rows, generation_config, model_kwargs, tries_trees=no_tree is None)
    if found.way != CHAINS:
        return found
    reason = _no_chain_reason(model, rows, generation_config, model_kwargs)
    return Verdict(PLAIN, f"{found.reason}, and {reason}") if reason else Verdict(CHAINS, no_tree or found.reason)


def probe(
    model: PreTrainedModel,
    rows: int,
    generation_config: GenerationConfig,
    model_kwargs: Mapping[str, Any],
    tries_trees: bool = True,
) -> Verdict:
    """
    What a target takes as it stands, with arguments of the call's kinds. It runs fewer than a dozen short forwards,
    once for each state of the target and kind of call. The installed package remembers large targets across processes.

    Args:
        model ([`PreTrainedModel`]): the target.
        rows (`int`): rows of the call.
        generation_config ([`GenerationConfig`]): configuration of the call.
        model_kwargs (`dict`): the model's arguments that `generate` prepared.
        tries_trees (`bool`, *optional*, defaults to `True`): whether no rule excludes trees.
    """
    known = _verdicts.setdefault(model, {})
    key = (tries_trees, rows > 1, _kinds_of(model_kwargs), _state_of(model))
    if key not in known:
        if len(known) >= _KEPT:
            known.pop(next(iter(known)), None)
        files, kinds = part("verdicts"), key[:3]
        if tries_trees and files is not None and files.knows(model, kinds):
            known[key] = Verdict(TREES)
        else:
            tried = rows if peft_sets(model, "adapter_names") else min(rows, 2)
            known[key] = _try_ways(model, tried, generation_config, model_kwargs, tries_trees)
            if files is not None and known[key].way == TREES:
                files.remember(model, kinds)
    return known[key]


def _kinds_of(model_kwargs: Mapping[str, Any]) -> Hashable:
    """The kinds of a call's arguments, as far as the probe has them as well; see [`_Trial._arguments`]."""
    names = ("attention_mask", "position_ids", *sorted(TOKEN_TYPES))
    dimensions = tuple(None if (value := model_kwargs.get(name)) is None else value.dim() for name in names)
    return dimensions, isinstance(model_kwargs.get(CACHE_NAME), Cache)


def _state_of(model: PreTrainedModel) -> Hashable:
    """What a verdict depends on beside the call. Libraries replace forwards of classes, too."""
    decoder, structure = decoder_of(model), structure_of(model)
    device = model.device.type
    return (
        attention_implementation(model.config.get_text_config(decoder=True)),
        model.dtype,
        model.device,
        model.training,
        torch.is_autocast_enabled(device) and torch.get_autocast_dtype(device),
        _identity(model, model.forward),
        _identity(model, decoder.forward),
        _identity(model, model.prepare_inputs_for_generation),
        frozenset(_by_identity(kind.forward) for kind in {kind for kind, *_ in structure} if hasattr(kind, "forward")),
        (structure, bool(torch.nn.modules.module._has_any_global_hook())),
        tuple(itertools.chain.from_iterable(changes_of(model, module) for module in modules_of(model))),
    )


def changes_of(model: PreTrainedModel, module: torch.nn.Module) -> Iterator[Hashable]:
    """A module's hooks, adapter and own forward; not ours and those of `output_hidden_states`: they change nothing."""
    for hook in (*module._forward_hooks.values(), *module._forward_pre_hooks.values()):
        # New objects in every call: PEFT's choice of an adapter for each row.
        if "adapter_names" in keywords_of(hook):
            yield "adapter_names"
        elif not str(getattr(getattr(hook, "func", hook), "__module__", "")).startswith(_OWN_MODULES):
            yield _identity(model, hook)
    if "_active_adapter" in vars(module):
        # Values that are 0 before training change nothing, and others may.
        yield tuple((each.data_ptr(), each.is_inference() or each._version) for each in module.parameters())
    forward = vars(module).get("forward")
    if forward is not None and not type(forward).__module__.startswith(_OWN_MODULES):
        yield _identity(model, forward)


def _identity(model: PreTrainedModel, method: Any) -> Hashable:
    """A function that holds neither the model nor a wrapper, such as PEFT's, whose adapter counts as well."""
    owner, function = getattr(method, "__self__", None), getattr(method, "__func__", method)
    adapter = None if owner is None or owner is model else str(getattr(owner, "active_adapter", None))
    return _by_identity(function), None if owner is None else _by_identity(owner), adapter


def _by_identity(value: Any) -> Hashable:
    # A data class has no hash, and an object with slots no weak reference: it is tried in every call.
    with suppress(TypeError):
        hash(found := weakref.ref(value))
        return found
    return object()


def _try_ways(
    model: PreTrainedModel,
    rows: int,
    generation_config: GenerationConfig,
    model_kwargs: Mapping[str, Any],
    tries_trees: bool,
) -> Verdict:
    with _left_alone(model):
        if (reason := _no_probe_reason(model)) is not None:
            return Verdict(PLAIN, reason)
        trial = _Trial(model, rows, generation_config, model_kwargs)
        try:
            expected = trial.one_by_one()
        # It says nothing about the target; a later call may have the memory.
        except (torch.OutOfMemoryError, MemoryError):
            raise
        # Whatever a model says to a text without what else it was given.
        except Exception as error:
            return Verdict(PLAIN, f"the target runs a text with its other inputs, not alone ({_named(error)})")
        no_tree = None
        if tries_trees:
            no_tree = trial.fault(trial.as_trees, expected, "a tree of tokens")
            if no_tree is None:
                return Verdict(TREES)
        if rows > 1:
            return Verdict(PLAIN, f"{no_tree}, and the batch has several rows")
        if (chains := part("chains")) is None:
            return Verdict(PLAIN, f"{no_tree}, and {_NO_CHAINS}")
        name = f"{_TOKENS} tokens in one forward"
        fault = chains.refusal_of_target(model) or trial.fault(trial.as_chains, expected, name)
    if fault is None:
        return Verdict(CHAINS, no_tree)
    return Verdict(PLAIN, fault if no_tree is None else f"{no_tree}, and {fault}")


class _Trial:
    """The probe's text, run in several ways. Each gives logits of shape `(compared tokens, rows, vocab_size)`."""

    def __init__(
        self, model: PreTrainedModel, rows: int, generation_config: GenerationConfig, model_kwargs: Mapping[str, Any]
    ):
        self._model, self._rows, self._given = model, rows, model_kwargs
        config = self._config = copy.copy(generation_config)
        config.prefill_chunk_size, config.return_dict_in_generate = None, False
        config.max_length = _PROMPT + _TOKENS
        needed = _PROMPT + _TOKENS + _FILLERS
        tokens = torch.tensor(list(itertools.islice(_ordinary_tokens(model.config), needed)), device="cpu")
        text, self._fillers = tokens.split((_PROMPT + _TOKENS, _FILLERS))
        # On the host, of shape `(rows, prompt and tokens)`.
        self._text = torch.stack([text.roll(row) for row in range(rows)])

    def fault(self, run: Callable[[], Tensor], expected: Tensor, name: str) -> str | None:
        """How a way differs from one token after the other; `None` if it does not."""
        try:
            found = run()
        except (torch.OutOfMemoryError, MemoryError):
            raise
        # Whatever a model says to an input that it does not take.
        except Exception as reason:
            return f"the target does not take {name} ({_named(reason)})"
        # Without tokens that are never written, with logits near minus infinity, and without what all logits share.
        written = (expected > -1e4).flatten(0, -2).all(dim=0)
        found, expected = found[..., written], expected[-found.shape[0] :, ..., written]
        errors = (found - expected).std(dim=-1) / expected.std(dim=-1)
        # In fewer bits a single expert that rounding chooses changes a token much.
        error = float(errors.max() if _is_exact(self._model) else max(errors.median(), errors.max() / 4))
        # NaN is a fault as well.
        if error < (_TOLERANCE if _is_exact(self._model) else _TOLERANCE_HALF):
            return None
        return f"the target computes {name} otherwise than one by one (by {error:.1e})"

    def one_by_one(self) -> Tensor:
        """As plain decoding runs."""
        prompt, kwargs = self._arguments()
        outputs = prefill(self._model, prompt, self._config, kwargs)
        found = []
        for end in range(_PROMPT + 1, _PROMPT + _TOKENS + 1):
            kwargs = extend_model_kwargs(self._model, kwargs, 1, outputs)
            kwargs |= {name: outputs[name] for name in CACHE_NAMES if name in outputs}
            tokens = to_device(self._text[:, :end], self._model.device)
            inputs = self._model.prepare_inputs_for_generation(tokens, next_sequence_length=1, **kwargs)
            outputs = self._model(**inputs, return_dict=True)
            found.append(outputs.logits[:, -1].float())
        return torch.stack(found)

    def as_trees(self) -> Tensor:
        """Two trees. Of the first a node is rejected, so that the second one shows what was kept."""
        behind, path = 1 + _FILLERS, [0, 1 + _FILLERS]
        first, second = self._text[:, _PROMPT:-1], self._text[:, -2:]
        rounds = [([self._branched(row) for row in rows], path) for rows in (first, second)]
        logits = self._scored(TargetRun, rounds)
        # The roots are where plain decoding has them, and would hide in a median what becomes of the others.
        return torch.cat([each[:, behind:].transpose(0, 1) for each in logits])

    def as_chains(self) -> Tensor:
        """A chain of which all but the root is rejected, then one that is accepted."""
        whole = chain(self._text[0, _PROMPT:])
        rounds = [([whole], [0]), ([chain(self._text[0, _PROMPT + 1 :])], list(range(_TOKENS - 1)))]
        return self._scored(part("chains"), rounds)[1].transpose(0, 1)

    def _scored(self, kind: Any, rounds: Sequence[tuple[list[DraftTree], list[int]]]) -> list[Tensor]:
        """Scores trees, one for each row, and keeps a path of each. Logits of shape `(rows, nodes, vocab_size)`."""
        prompt, kwargs = self._arguments()
        run, found, length = kind(self._model, prompt, self._config, kwargs), [], _PROMPT + 1
        try:
            run.prefill(prompt)
            for trees, kept in rounds:
                logits, _ = run.score(trees, [row[None, :length] for row in self._text])
                run.accept([torch.tensor(kept, device="cpu")] * len(trees))
                found.append(logits.float())
                length += len(kept)
        finally:
            run.finish()
        return found

    def _branched(self, tokens: Tensor) -> DraftTree:
        """A chain of tokens whose root has other children, too, which lie before the chain's second token."""
        token_ids = torch.cat((tokens[:1], self._fillers, tokens[1:]))
        parents = torch.zeros_like(token_ids)
        parents[2 + _FILLERS :] = torch.arange(1 + _FILLERS, len(token_ids) - 1, device="cpu")
        visible = ancestor_mask(parents, len(tokens) - 1)
        return DraftTree(
            token_ids, parents, visible.sum(dim=1) - 1, visible, torch.zeros_like(visible[0], dtype=torch.float)
        )

    def _arguments(self) -> tuple[Tensor, dict[str, Any]]:
        """The prompt, and arguments of the model of the same kinds as the call's."""
        given, prompt = self._given, self._text[:, :_PROMPT].to(self._model.device)
        kwargs: dict[str, Any] = {"use_cache": True}
        mask = torch.ones_like(prompt)
        if given.get("attention_mask") is not None:
            mask[0, :_PADDING] = 0
            kwargs["attention_mask"] = mask
        if isinstance(given.get(CACHE_NAME), Cache) and not makes_own_cache(self._model):
            kwargs[CACHE_NAME] = DynamicCache(config=self._model.config.get_text_config(decoder=True))
        if (positions := given.get("position_ids")) is not None:
            places = positions_of(mask)
            kwargs["position_ids"] = places.expand(*positions.shape[:-2], *places.shape)
        for name in TOKEN_TYPES:
            if given.get(name) is not None:
                kwargs[name] = torch.zeros_like(prompt)
        return prompt, kwargs


def positions_of(mask: Tensor) -> Tensor:
    """Positions as `generate` prepares them."""
    return (mask.long().cumsum(-1) - 1).masked_fill(mask == 0, 0)


def _ordinary_tokens(config: PreTrainedConfig) -> Iterator[int]:
    """
    Token ids over and over that stand for no image, padding or other special thing. They are spread over the middle of
    the vocabulary: near its ends there are bytes and reserved tokens, whose states rounding changes most.
    """
    text_config = config.get_text_config(decoder=True)
    special = {
        token
        for each in (config, text_config)
        for name, value in vars(each).items()
        if name.endswith(("token_id", "token_index"))
        for token in (value if isinstance(value, (list, tuple)) else [value])
    }
    quarter = text_config.vocab_size // 4
    return itertools.cycle(sorted({*range(quarter, 3 * quarter + 1, quarter // 32 + 1)} - special) or [0])


def _is_exact(model: PreTrainedModel) -> bool:
    """Whether the target computes in float32."""
    if model.dtype not in (torch.float32, torch.float64):
        return False
    try:
        return torch.get_float32_matmul_precision() == "highest"
    # torch refuses to say where the precision was set in its newer way.
    except RuntimeError:
        return False


def _named(error: Exception) -> str:
    text = str(error).strip()
    return f"{type(error).__name__}: {text.splitlines()[0]}" if text else type(error).__name__


@contextmanager
def _left_alone(model: PreTrainedModel) -> Iterator[None]:
    """
    Inside, forwards of the target leave nothing behind: neither random states, nor what some models keep of their last
    text, such as Qwen-VL's difference of positions or rotary frequencies that depend on the length.
    """
    device = model.device
    # MPS has one random state, without an index, and a backend of one's own may have none.
    has_states = device.type not in ("cpu", "mps") and hasattr(getattr(torch, device.type, None), "get_rng_state")
    found = {each.device.index for each in model.parameters() if each.device.type == device.type}
    indices = [index for index in found if index is not None] if has_states else []
    # A layer with weights notes how it has prepared them, and RWKV in a flag that it has; RecurrentGemma its state.
    kept = [each for each in model.modules() if isinstance(each, PreTrainedModel) or not each._parameters]
    kept += [each for each in model.modules() if hasattr(each, "recurrent_states")]
    kept = [each for each in kept if not isinstance(each, torch.jit.ScriptModule)]
    before = [({**vars(each)}, {**each._buffers}) for each in kept]
    # What is written in place: the state of a spectral norm, or what an observer of a quantisation has seen.
    small = [each for each in model.buffers() if each.numel() < 1 << 16 and not (each.is_inference() or each.is_meta)]
    written = [(each, each.clone()) for each in small]
    try:
        with torch.no_grad(), torch.random.fork_rng(indices, device_type=device.type if indices else "cuda"):
            yield
    finally:
        for buffer, values in written:
            if not torch.equal(buffer, values):
                buffer.resize_(values.shape).copy_(values)
        for module, (attributes, buffers) in zip(kept, before):
            module._buffers.update(buffers)
            for name, old in attributes.items():
                now = vars(module).get(name)
                if now is not old and (type(old) in (int, float) or torch.is_tensor(old) or torch.is_tensor(now)):
                    setattr(module, name, old)


def _no_probe_reason(model: PreTrainedModel) -> str | None:
    """The reason why nothing can be verified that is seen in the target's parts, and not in a few tokens."""
    if any(is_compiled(module) for module in (model, decoder_of(model))):
        return "the target is compiled by `torch.compile`, which hides its features"
    if peft_sets(model, "alora_offsets"):
        return "its activated adapter (aLoRA) counts the tokens of a forward"
    if any(is_spread(parameter) for parameter in model.parameters()) or (getattr(model, "tp_size", None) or 1) > 1:
        return "the target's weights are spread over several processes, which could decide differently"
    if not any(name in inspect.signature(model.forward).parameters for name in CACHE_NAMES):
        return f"the target takes no `{CACHE_NAME}`"
    refusal: Callable[[PreTrainedModel], str | None] | None = part("quantised")
    return refusal(model) if refusal is not None else _NO_QUANTISED if any(quantised_layers(model)) else None


# Rules.


def _no_draft_reason(
    model: PreTrainedModel, input_ids: Tensor, generation_config: GenerationConfig, model_kwargs: Mapping[str, Any]
) -> str | None:
    """The reason why nothing can be verified in this call, if there is one."""
    config = model.config.get_text_config(decoder=True)
    cache = model_kwargs.get(CACHE_NAME)
    if model.config.is_encoder_decoder:
        return "the target is an encoder-decoder model"
    limit = config.original_max_position_embeddings if config.model_type == "phi4_multimodal" else None
    if limit is not None and input_ids.shape[1] <= limit < (generation_config.max_length or 0):
        return f"once the text crosses {limit} tokens, the target drops its cache in every step"
    # BERT's kind. GPT-NeoX's configuration has the field as well, but GPT-NeoX is a decoder.
    if hasattr(config, "add_cross_attention") and not getattr(config, "is_decoder", True):
        return "the target is an encoder (`is_decoder` is False), which keeps no cache"
    if (reason := plain_reason(model, cache)) is not None:
        return reason
    if model.device.type == "meta":
        return "the target's embedding is offloaded, so its device is unknown"
    if model.dtype == torch.float32 and torch.is_autocast_enabled(model.device.type):
        fewer = str(torch.get_autocast_dtype(model.device.type)).removeprefix("torch.")
        return f"under autocast several tokens are rounded otherwise than one (load the target in {fewer} to draft)"
    if cache is not None and not isinstance(cache, (DynamicCache, StaticCache)):
        return f"the cache is a {type(cache).__name__} that cannot drop rejected branches (use a DynamicCache)"
    if getattr(cache, "offloading", False):
        return f"the cache is a {type(cache).__name__} that is offloaded (use a DynamicCache)"
    layers = getattr(cache, "layers", [])
    # Classes of transformers and of the model's own code are tried by the probe.
    for each in {type(each): each for each in (cache, *layers)}.values():
        if (changed := _own_method(each, ("transformers.", type(model).__module__))) is not None:
            return f"the cache has its own {changed}, and may keep something else than every token's keys and values"
    if any(getattr(layer, "is_sliding", False) for layer in layers):
        usual, most = DynamicCache(config=config).layers, (generation_config.max_length or 0) - 1
        if any(min(_kept(own), most) < min(_kept(each), most) for own, each in zip(layers, usual)):
            return "the cache keeps fewer tokens than the target's own windows"
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
    images = layers[crossing[0] : crossing[0] + 1] if crossing else []
    if crossing and (extra_inputs(model_kwargs) or any(layer.is_initialized for layer in images)):
        return "the target's cross-attention layers keep an image in the cache, which then cannot drop branches"
    wanted = [name for name in LAYER_OUTPUTS if getattr(generation_config, name)]
    if wanted and generation_config.return_dict_in_generate and part("layer_outputs") is None:
        return f"`{wanted[0]}` was asked for, which the installed package returns (`pip install hf-falcon`)"
    step = extra_inputs(first_step(model, input_ids, model_kwargs))
    later = extra_inputs(first_step(model, input_ids, extend_model_kwargs(model, model_kwargs, new_tokens=1)))
    counted = sorted(k for k, value in step.items() if isinstance(value, (int, float, str)) and later.get(k) != value)
    return f"{counted} of the target's inputs have other values in every step" if counted else None


def _kept(layer: Any) -> float:
    """Tokens that a layer of a cache keeps, at most."""
    return layer.get_max_length() if getattr(layer, "is_sliding", False) else math.inf


def _own_method(part: Any, modules: tuple[str, ...]) -> str | None:
    """The method of a cache or its layer that replaces one of a class of these modules, if there is one."""
    kinds = type(part).__mro__
    known = next(kind for kind in kinds if kind.__module__.startswith((*modules, "builtins")))
    for owner in (part, *itertools.takewhile(lambda kind: kind is not known, kinds)):
        for name, value in getattr(owner, "__dict__", {}).items():
            if (callable(value) or isinstance(value, property)) and hasattr(known, name) and name[:2] != "__":
                return f"`{type(part).__name__}.{name}`"
    return None


def _no_tree_reason(model: PreTrainedModel, input_ids: Tensor, model_kwargs: Mapping[str, Any]) -> str | None:
    """The reason why the target takes no tree in this call, but perhaps a chain, if there is one."""
    config = model.config.get_text_config(decoder=True)
    # They may look far back, and differ only then.
    if unknown := layer_kinds(model.config) - {FULL, SLIDING}:
        return f"the target has layers of kind {sorted(unknown)}, which follow no tree"
    # The probe has no image.
    if config.model_type == "git":
        return "the target puts its image before the text, where no token of it stands"
    attention = attention_implementation(config) or "eager"
    # It is not tried: kernels for masks of another kind read a tree's mask out of bounds, which ends the process.
    if attention not in MASKED_ATTENTION:
        return f"`attn_implementation` is {attention!r}, which takes no tree mask (use one of {MASKED_ATTENTION})"
    cache = model_kwargs.get(CACHE_NAME)
    if cache is None:
        return "the target makes a cache of its own, which may keep more than keys and values"
    if (changed := _own_method(cache, ("transformers.cache_utils",))) is not None:
        return f"the cache has its own {changed}, which may know nothing of a tree"
    # By exact type: a subclass may keep more than keys and values.
    odd = {type(layer).__name__ for layer in cache.layers if type(layer) not in ROW_LAYERS}
    if odd:
        return f"the cache has layers of type {sorted(odd)}, which may keep more than keys and values"
    # A forward of several tokens can pass on what is the same in every step.
    own = [
        name
        for name, value in extra_inputs(first_step(model, input_ids, model_kwargs)).items()
        if not (isinstance(value, (int, float, str)) or name in TOKEN_TYPES)
        and not (isinstance(value, (Tensor, list, tuple)) and value is model_kwargs.get(name))
    ]
    if own:
        return f"every new token of the target takes its own {sorted(own)}"
    given = extra_inputs(model_kwargs)
    if given and rope_boundary(config)[0] is not None:
        return f"the target was given {sorted(given)}, and its rotary frequencies depend on the context's length"
    takes = inspect.signature(model.forward).parameters
    missing = [name for name in ("position_ids", CACHE_NAME) if name not in takes]
    return f"the target takes no `{missing[0]}`, which a tree needs" if missing else None


def _no_chain_reason(
    model: PreTrainedModel, rows: int, generation_config: GenerationConfig, model_kwargs: Mapping[str, Any]
) -> str | None:
    """The reason why not even a chain can be verified in this call, if there is one."""
    if rows > 1:
        return "the batch has several rows"
    if (chains := part("chains")) is None:
        return _NO_CHAINS
    reason: str | None = chains.refusal_of_call(model, generation_config, model_kwargs)
    return reason
