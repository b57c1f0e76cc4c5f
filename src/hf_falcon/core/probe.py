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
from contextlib import contextmanager
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
    generation,
)
from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer, StaticLayer, StaticSlidingWindowLayer

from .checkpoint_files import is_spread
from .hook import attention_implementation, extend_model_kwargs, makes_own_cache, prefill
from .target_parts import (
    CACHE_NAMES,
    FULL,
    SLIDING,
    TOKEN_TYPES,
    cached_tokens,
    decoder_layers,
    decoder_of,
    extra_inputs,
    first_step,
    is_compiled,
    layer_kinds,
    quantised_layers,
    rope_boundary,
    structure_of,
)
from .target_run import ChainRun, TargetRun
from .tree import DraftTree, ancestor_mask, chain, to_device

TREES, CHAINS, PLAIN = "trees", "chains", "plain"

# Tokens of the probe's prompt, of which the first are padding where the call has padding; and the tokens behind it.
_PROMPT, _PADDING, _TOKENS = 8, 2, 4
# Nodes between a parent and its child in the probe's trees: a target that goes by slots, and not by positions and
# masks, then computes something else altogether, which shows in 16 bits as well.
_FILLERS = 16
# How far logits may differ, relative to their size: by rounding in float32, or in fewer bits.
_TOLERANCE, _TOLERANCE_HALF = 1e-3, 0.1
# Verdicts that are kept of a target: those of its last adapters and kinds of calls.
_KEPT = 32

# Attention functions that take any additive mask.
_MASKED_ATTENTION = ("eager", "sdpa")

_CACHE_LAYERS = (DynamicLayer, DynamicSlidingWindowLayer, StaticLayer, StaticSlidingWindowLayer)

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
    if (reason := _no_draft_reason(model, input_ids, model_kwargs)) is not None:
        return Verdict(PLAIN, reason)
    rows = input_ids.shape[0]
    no_tree = _no_tree_reason(model, input_ids, model_kwargs)
    reason = None
    if no_tree is None and rows > 1:
        reason = _no_batch_reason(
            model, input_ids, logits_processor, stopping_criteria, generation_config, model_kwargs
        )
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


def verdict_of_prompt(model: PreTrainedModel, input_ids: Tensor, attention_mask: Tensor | None = None) -> Verdict:
    """
    What is verified after a prompt with the target's own generation configuration; see [`verdict_of_call`].

    Args:
        model ([`PreTrainedModel`]): the target.
        input_ids, attention_mask (`torch.LongTensor` of shape `(batch, length)`): the prompt.
    """
    takes = inspect.signature(model.forward).parameters
    kwargs: dict[str, Any] = {"use_cache": True}
    if CACHE_NAMES[0] in takes and not model.config.is_encoder_decoder and not makes_own_cache(model):
        kwargs[CACHE_NAMES[0]] = DynamicCache(config=model.config.get_text_config(decoder=True))
    if attention_mask is not None and not bool(attention_mask.all()):
        kwargs["attention_mask"] = attention_mask
    if "position_ids" in takes:
        kwargs["position_ids"] = _positions(torch.ones_like(input_ids) if attention_mask is None else attention_mask)
    return verdict_of_call(
        model, input_ids, LogitsProcessorList(), StoppingCriteriaList(), model.generation_config, kwargs
    )


def probe(
    model: PreTrainedModel,
    rows: int,
    generation_config: GenerationConfig,
    model_kwargs: Mapping[str, Any],
    tries_trees: bool = True,
) -> Verdict:
    """
    What a target takes as it stands, with arguments of the call's kinds. It runs fewer than a dozen short forwards,
    once for each state of the target and kind of call.

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
            del known[next(iter(known))]
        known[key] = _try_ways(model, min(rows, 2), generation_config, model_kwargs, tries_trees)
    return known[key]


def _kinds_of(model_kwargs: Mapping[str, Any]) -> Hashable:
    """The kinds of a call's arguments, as far as the probe has them as well; see [`_Trial._arguments`]."""
    names = ("attention_mask", "position_ids", *sorted(TOKEN_TYPES))
    dimensions = tuple(None if (value := model_kwargs.get(name)) is None else value.dim() for name in names)
    return dimensions, isinstance(model_kwargs.get("past_key_values"), Cache)


def _state_of(model: PreTrainedModel) -> Hashable:
    """What a verdict depends on beside the call. It takes microseconds: it walks over two layers, not over all."""
    decoder, layers = decoder_of(model), decoder_layers(model)
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
        tuple(is_compiled(module) for module in (model, decoder, *layers)),
        structure_of(model),
    )


def _identity(model: PreTrainedModel, method: Any) -> Hashable:
    """A function that holds neither the model nor a wrapper, such as PEFT's, whose adapter counts as well."""
    owner, function = getattr(method, "__self__", None), getattr(method, "__func__", method)
    adapter = None if owner is None or owner is model else str(getattr(owner, "active_adapter", None))
    return weakref.ref(function), None if owner is None else weakref.ref(owner), adapter


def _try_ways(
    model: PreTrainedModel,
    rows: int,
    generation_config: GenerationConfig,
    model_kwargs: Mapping[str, Any],
    tries_trees: bool,
) -> Verdict:
    if (reason := _no_probe_reason(model)) is not None:
        return Verdict(PLAIN, reason)
    with _left_alone(model):
        trial = _Trial(model, rows, generation_config, model_kwargs)
        try:
            expected = trial.one_by_one()
        # It says nothing about the target; a later call may have the memory.
        except torch.OutOfMemoryError:
            raise
        # Whatever a model says to a text without what else it was given.
        except Exception as error:
            return Verdict(PLAIN, f"the target runs a text with its other inputs, not alone ({_named(error)})")
        no_tree = None
        if tries_trees:
            no_tree = _no_tree_in_parts(model) or trial.fault(trial.as_trees, expected, "a tree of tokens")
            if no_tree is None:
                return Verdict(TREES)
        if rows > 1:
            return Verdict(PLAIN, f"{no_tree}, and the batch has several rows")
        fault = _no_chain_in_parts(model) or trial.fault(trial.as_chains, expected, f"{_TOKENS} tokens in one forward")
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
        config.prefill_chunk_size = None
        config.return_dict_in_generate = False
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
        except torch.OutOfMemoryError:
            raise
        # Whatever a model says to an input that it does not take.
        except Exception as reason:
            return f"the target does not take {name} ({_named(reason)})"
        expected = expected[-found.shape[0] :]
        errors = (found - expected).norm(dim=-1) / expected.norm(dim=-1)
        # In fewer bits a single expert that rounding chooses changes a token much.
        error = float(errors.max() if _is_exact(self._model) else errors.median())
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
            for name in CACHE_NAMES:
                if name in outputs:
                    kwargs[name] = outputs[name]
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
        return self._scored(ChainRun, rounds)[1].transpose(0, 1)

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
        device, given = self._model.device, self._given
        prompt = self._text[:, :_PROMPT].to(device)
        kwargs: dict[str, Any] = {"use_cache": True}
        mask = torch.ones_like(prompt)
        if given.get("attention_mask") is not None:
            mask[0, :_PADDING] = 0
            kwargs["attention_mask"] = mask
        if isinstance(given.get("past_key_values"), Cache) and not makes_own_cache(self._model):
            kwargs["past_key_values"] = DynamicCache(config=self._model.config.get_text_config(decoder=True))
        if (positions := given.get("position_ids")) is not None:
            places = _positions(mask)
            kwargs["position_ids"] = places.expand(*positions.shape[:-2], *places.shape)
        for name in TOKEN_TYPES:
            if given.get(name) is not None:
                kwargs[name] = torch.zeros_like(prompt)
        return prompt, kwargs


def _positions(mask: Tensor) -> Tensor:
    """Positions as `generate` prepares them."""
    return (mask.long().cumsum(-1) - 1).masked_fill(mask == 0, 0)


def _ordinary_tokens(config: PreTrainedConfig) -> Iterator[int]:
    """Token ids over and over that stand for no image, padding or other special thing."""
    text_config = config.get_text_config(decoder=True)
    special = {
        token
        for each in (config, text_config)
        for name, value in vars(each).items()
        if name.endswith(("token_id", "token_index"))
        for token in (value if isinstance(value, (list, tuple)) else [value])
    }
    ordinary = itertools.islice((token for token in range(text_config.vocab_size) if token not in special), 64)
    return itertools.cycle(list(ordinary) or [0])


def _is_exact(model: PreTrainedModel) -> bool:
    """Whether the target computes in float32."""
    device = model.device.type
    if model.dtype not in (torch.float32, torch.float64) or torch.is_autocast_enabled(device):
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
    kind = device.type if indices else "cuda"
    # A layer with weights may note how it has prepared them, which holds on.
    kept = [each for each in model.modules() if isinstance(each, PreTrainedModel) or not each._parameters]
    before = [({**vars(each)}, {**each._buffers}) for each in kept]
    try:
        with torch.no_grad(), torch.random.fork_rng(indices, device_type=kind):
            yield
    finally:
        for module, (attributes, buffers) in zip(kept, before):
            module._buffers.update(buffers)
            for name, value in attributes.items():
                now = vars(module).get(name)
                if now is not value and (isinstance(value, (Tensor, int, float)) or isinstance(now, Tensor)):
                    setattr(module, name, value)


def _no_probe_reason(model: PreTrainedModel) -> str | None:
    """The reason why nothing can be verified that is seen in the target's parts, and not in a few tokens."""
    if any(is_compiled(module) for module in (model, decoder_of(model))):
        return "the target is compiled by `torch.compile`, which hides its features"
    if any(is_spread(parameter) for parameter in model.parameters()) or (getattr(model, "tp_size", None) or 1) > 1:
        return "the target's weights are spread over several processes, which could decide differently"
    if not any(name in inspect.signature(model.forward).parameters for name in CACHE_NAMES):
        return f"the target takes no `{CACHE_NAMES[0]}`"
    # Layers of the same kind and name are quantised alike.
    kinds = {
        (type(layer), type(getattr(layer, "weight", None)), name.rpartition(".")[2]): layer
        for name, layer in quantised_layers(model)
    }
    for layer in kinds.values():
        if (effect := _effect_of_quantisation(layer, model.device, model.dtype)) is not None:
            return f"the target's quantised layers ({type(layer).__name__}) {effect}"
    return None


def _no_tree_in_parts(model: PreTrainedModel) -> str | None:
    """The reason why the target's forward cannot take a tree, if there is one."""
    takes = inspect.signature(model.forward).parameters
    missing = [name for name in ("position_ids", "past_key_values") if name not in takes]
    return f"the target takes no `{missing[0]}`, which a tree needs" if missing else None


def _no_chain_in_parts(model: PreTrainedModel) -> str | None:
    """The reason why chains may differ for some tokens, if there is one."""
    # In transformers, Mamba 2's layers apply these limits to several tokens, but not to a single one.
    limits = [tuple(module.time_step_limit) for module in model.modules() if hasattr(module, "time_step_limit")]
    narrow = [limit for limit in limits if limit != (0.0, math.inf)]
    if not narrow:
        return None
    return f"its recurrent layers have the `time_step_limit` {narrow[0]}, which holds for several tokens only"


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


# Rules.


def _no_draft_reason(model: PreTrainedModel, input_ids: Tensor, model_kwargs: Mapping[str, Any]) -> str | None:
    """The reason why nothing can be verified in this call, if there is one."""
    config = model.config.get_text_config(decoder=True)
    cache = model_kwargs.get("past_key_values")
    if model.config.is_encoder_decoder:
        return "the target is an encoder-decoder model"
    # BERT's kind. GPT-NeoX's configuration has the field as well, but GPT-NeoX is a decoder.
    if hasattr(config, "add_cross_attention") and not getattr(config, "is_decoder", True):
        return "the target is an encoder (`is_decoder` is False), which keeps no cache"
    if model.device.type == "meta":
        return "the target's embedding is offloaded, so its device is unknown"
    if cache is not None and not isinstance(cache, (DynamicCache, StaticCache)):
        return f"the cache is a {type(cache).__name__} that cannot drop rejected branches (use a DynamicCache)"
    if getattr(cache, "offloading", False):
        return f"the cache is a {type(cache).__name__} that is offloaded (use a DynamicCache)"
    # Classes of transformers and of the model's own code are tried by the probe.
    for part in {type(part): part for part in (cache, *getattr(cache, "layers", ()))}.values():
        if (changed := _own_method(part, ("transformers.", type(model).__module__))) is not None:
            return f"the cache has its own {changed}, and may keep something else than every token's keys and values"
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
    if crossing and (extra_inputs(model_kwargs) or any(layer.is_initialized for layer in layers)):
        return "the target's cross-attention layers keep an image in the cache, which then cannot drop branches"
    return None


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
    attention = attention_implementation(config) or "eager"
    # It is not tried: kernels for masks of another kind read a tree's mask out of bounds, which ends the process.
    if attention not in _MASKED_ATTENTION:
        return f"`attn_implementation` is {attention!r}, which takes no tree mask (use one of {_MASKED_ATTENTION})"
    cache = model_kwargs.get("past_key_values")
    if cache is None:
        return "the target makes a cache of its own, which may keep more than keys and values"
    if (changed := _own_method(cache, ("transformers.cache_utils",))) is not None:
        return f"the cache has its own {changed}, which may know nothing of a tree"
    # By exact type: a subclass may keep more than keys and values.
    odd = {type(layer).__name__ for layer in cache.layers if type(layer) not in _CACHE_LAYERS}
    if odd:
        return f"the cache has layers of type {sorted(odd)}, which may keep more than keys and values"
    # A tree's forward can pass on what is the same in every step.
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
    return None


def _no_chain_reason(
    model: PreTrainedModel, rows: int, generation_config: GenerationConfig, model_kwargs: Mapping[str, Any]
) -> str | None:
    """The reason why not even a chain can be verified in this call, if there is one."""
    if rows > 1:
        return "the batch has several rows"
    if isinstance(model_kwargs.get("past_key_values"), StaticCache):
        return "a static cache cannot drop rejected tokens"
    if rope_boundary(model.config.get_text_config(decoder=True))[0] is not None:
        return "its rotary frequencies depend on the length of the text"
    wanted = [name for name in ("output_hidden_states", "output_attentions") if getattr(generation_config, name)]
    if generation_config.return_dict_in_generate and wanted:
        return f"`{wanted[0]}` was asked for, which a chain has in another form"
    return None


def _no_batch_reason(
    model: PreTrainedModel,
    input_ids: Tensor,
    logits_processor: LogitsProcessorList,
    stopping_criteria: StoppingCriteriaList,
    generation_config: GenerationConfig,
    model_kwargs: Mapping[str, Any],
) -> str | None:
    """The reason why the rows of a batch cannot advance independently in this call, if there is one."""
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
    if extras := sorted(extra_inputs(first_step(model, input_ids, model_kwargs)).keys() - {"output_router_logits"}):
        return f"the batch has several rows, and every new token of the target takes {extras}"
    if model_kwargs.get("inputs_embeds") is not None:
        return "the batch has several rows and is given as `inputs_embeds`"
    outputs = ("output_scores", "output_logits", "output_hidden_states", "output_attentions")
    wanted = [name for name in outputs if getattr(generation_config, name)]
    if generation_config.return_dict_in_generate and wanted:
        return f"the batch has several rows, and `{wanted[0]}` was asked for, which covers rows that have ended"
    return None
