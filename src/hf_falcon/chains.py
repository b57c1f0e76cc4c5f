# Copyright 2026 The hf_falcon authors. Licensed under the Apache License, Version 2.0.
"""Verification of chains, for targets that take no trees: most of them keep a recurrent state."""

from __future__ import annotations

import copy
import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import Cache, DynamicCache, EncoderDecoderCache, GenerationConfig, PreTrainedModel, StaticCache

from .core.caches import RowSlots, SlotLayer, adopt_layers, give_back
from .core.costs import Costs
from .core.hook import extend_model_kwargs, is_user_defined, prefill
from .core.interfaces import register_part, target_acceleration
from .core.probe import LAYER_OUTPUTS
from .core.target_parts import (
    CACHE_NAME,
    CACHE_NAMES,
    SLIDING,
    FeatureTap,
    cached_tokens,
    depth_boundaries,
    depth_left,
    layer_kinds,
    rope_boundary,
)
from .core.target_run import NoLayerOutputs, PromptFeatures, prompt_features
from .core.tree import DraftTree, to_device
from .private_names import leave_past_recording

_REFERENCE_SLIDING = "reference_sliding_attention"
# DeepSeek V4's and MiniMax M3's: of shifted positions several tokens see fewer or more slots than a single one.
_HIDING = {"heavily_compressed_attention", "minimax_m3_sparse"}


def install() -> None:
    """Makes the loop verify chains where a target takes no trees."""
    register_part("chains", ChainRun)


class ChainRun:
    """
    The target during one `generate` call, where it takes no tree: a round scores one path of tokens, prepared as
    `generate` prepares a step, with the model's own mask and positions.

    Where a layer keeps a recurrent state, rejected tokens cannot be dropped from it. The cache then goes back to where
    it was before the forward, and the accepted tokens are deferred: the next forward runs them again, before its path.
    They enter the cache with the first forward of which every token is accepted.

    Args:
        model, input_ids, generation_config, model_kwargs, feature_layers: see [`TargetRun`]; of one row.
    """

    takes_trees = False
    # Tokens that may be deferred before they enter the cache.
    most_deferred = 16

    def __init__(
        self,
        model: PreTrainedModel,
        input_ids: Tensor,
        generation_config: GenerationConfig,
        model_kwargs: dict[str, Any],
        feature_layers: Sequence[int] | None = (),
    ):
        self.model = model
        self._tap = FeatureTap(model, feature_layers)
        self._generation_config = generation_config
        self._boundaries = depth_boundaries(model)
        # They describe the tokens in the cache.
        self._model_kwargs = model_kwargs
        self._cache_name = next((name for name in CACHE_NAMES if name in model_kwargs), CACHE_NAME)
        self._rewind: Rewind | None = None
        self._outputs: Any = None
        self.layer_outputs = NoLayerOutputs()
        # The outputs of layers are hidden from compiled code; it has no tree here to run either.
        self.acceleration = target_acceleration(model, reads_layers=True)
        # Tokens in the cache, and deferred ones.
        self.length = 0
        # What forwards cost, for the decision when deferred tokens enter the cache.
        self.costs: Costs | None = None
        # Accepted tokens that are not in the cache.
        self.deferred = 0
        # What running deferred tokens again has cost since they were first deferred, in plain steps.
        self._spent = 0.0
        # Tokens that the last forward ran, the deferred ones among them.
        self._added = 0
        # The text that the cache and the deferred tokens are of.
        self._tokens = input_ids.cpu()
        self._path = self._tokens

    @property
    def cache(self) -> Any:
        """The target's cache."""
        return self._model_kwargs.get(self._cache_name) if self._rewind is None else self._rewind.cache

    @property
    def prompt_embeds(self) -> Tensor | None:
        """See [`TargetRun.prompt_embeds`]."""
        return self._model_kwargs.get("inputs_embeds")

    def prefill(self, input_ids: Tensor) -> tuple[Tensor, list[PromptFeatures]]:
        """See [`TargetRun.prefill`]."""
        embeds, past = self.prompt_embeds, self.cache
        self.length = input_ids.shape[1]
        if embeds is not None:
            self.length = embeds.shape[1] + (cached_tokens(past) if isinstance(past, Cache) else 0)
        with self._tap as tap, self.acceleration.reading():
            outputs = self._outputs = prefill(self.model, input_ids, self._generation_config, self._model_kwargs)
        # Not every model returns the cache that it was given.
        self._cache_name = next((name for name in CACHE_NAMES if name in outputs), self._cache_name)
        cache = outputs.get(self._cache_name, self._model_kwargs.get(self._cache_name))
        slots = RowSlots([cached_tokens(_growing(cache)) if isinstance(cache, Cache) else 0], self.model.device)
        self._rewind = Rewind(cache, slots)
        mask = self._model_kwargs.get("attention_mask")
        # GIT puts its image before the prompt.
        features = prompt_features(tap.take()[:, -self.length :], input_ids, mask, self.length)
        # The caller may have given a cache, and only what comes behind it.
        self.length = max(self.length, slots.longest)
        return outputs.logits[:, -1], features

    def max_tree_depth(self, row: int = 0) -> int | None:
        """As [`TargetRun.max_tree_depth`]; 0 where a forward without draft had better cache the deferred tokens."""
        left = depth_left(self._boundaries, self.length)
        if self.deferred >= self.most_deferred:
            return 0
        if self.deferred == 0 or self.costs is None:
            return left
        # As in the problem of renting or buying: no more than twice what the best moment would have cost. Such a
        # forward brings one token, which drafting brings in half a plain step.
        price = self.costs.target(self.deferred)[-1] - 0.5
        return 0 if self._spent >= price else left

    def score(self, trees: Sequence[DraftTree], texts: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
        """
        One forward over the deferred tokens and a path.

        Args:
            trees (sequence of [`DraftTree`]): one, of a single path: each node is the parent of the next one.
            texts: see [`TargetRun.score`].

        Returns:
            See [`TargetRun.score`].
        """
        assert self._rewind is not None
        [tree], [text] = trees, texts
        self._added = self.deferred + len(tree)
        if self._added > 1 or is_user_defined(self.cache):
            self._rewind.mark()
        self._path = torch.cat((text, tree.token_ids[None, 1:]), dim=1)
        logits, features = self._forward(self._path, self._added)
        if self.deferred and self.costs is not None:
            times = self.costs.target(self._added - 1)
            self._spent += times[-1] - times[len(tree) - 1]
        return logits[:, -len(tree) :], features[:, -len(tree) :]

    def _forward(self, tokens: Tensor, added: int) -> tuple[Tensor, Tensor]:
        """Runs the last `added` tokens of a text whose others are in the cache."""
        kwargs = extend_model_kwargs(self.model, self._model_kwargs, added, self._outputs)
        kwargs[self._cache_name] = self.cache
        inputs = self.model.prepare_inputs_for_generation(
            to_device(tokens, self.model.device), next_sequence_length=added, **kwargs
        )
        if "logits_to_keep" in inputs:
            inputs["logits_to_keep"] = added
        with self._tap as tap:
            self._outputs = self.model(**inputs, return_dict=True)
        return self._outputs.logits, tap.take()

    def accept(self, paths: Sequence[Tensor]) -> None:
        """See [`TargetRun.accept`]."""
        assert self._rewind is not None
        [path] = paths
        kept = self.deferred + path.shape[0]
        self.length += path.shape[0]
        self._tokens = self._path[:, : self._path.shape[1] - self._added + kept]
        if self._rewind.keep(self._added, kept):
            self._model_kwargs = extend_model_kwargs(self.model, self._model_kwargs, kept, self._outputs)
            self.deferred, self._spent = 0, 0.0
        else:
            self.deferred = kept

    def finish(self, sequences: Tensor | None = None) -> Any:
        """See [`TargetRun.finish`]."""
        if self._rewind is None:
            # Memory may have run out while layers were replaced.
            if type(self.cache) is DynamicCache:
                give_back(self.cache)
            return self.cache
        # A round that broke off.
        self._rewind.undo()
        try:
            # Without sequences nobody gets the cache, or a forward may have failed.
            if self.deferred and sequences is not None:
                self._forward(self._tokens, self.deferred)
                self._rewind.keep(self.deferred, self.deferred)
        finally:
            self._rewind.finish()
        return self.cache

    @staticmethod
    def refusal_of_call(
        model: PreTrainedModel, generation_config: GenerationConfig, model_kwargs: Mapping[str, Any]
    ) -> str | None:
        """The reason why no chain can be verified in a call, if there is one."""
        if isinstance(model_kwargs.get(CACHE_NAME), StaticCache):
            return "a static cache cannot drop rejected tokens"
        # Unlimited-OCR's, far behind the prompt.
        kinds, positions = layer_kinds(model.config), model_kwargs.get("position_ids")
        if _REFERENCE_SLIDING in kinds:
            return f"in layers of kind {_REFERENCE_SLIDING!r} several tokens see padding that a single one does not"
        # DeepSeek V4's. All its layers share a mask of the width of one of them; a single token sees compressed slots
        # whatever its position is.
        if SLIDING in kinds and any("compressed" in kind for kind in kinds):
            return f"its layers of kind {SLIDING!r} share a mask with compressed ones, which keep fewer slots"
        hiding = sorted(kinds & _HIDING)
        if hiding and positions is not None and int(positions.max()) + 1 != positions.shape[-1]:
            return f"layers of kind {hiding[0]!r} hide slots from several tokens whose positions are shifted"
        if rope_boundary(model.config.get_text_config(decoder=True))[0] is not None:
            return "its rotary frequencies depend on the length of the text"
        wanted = [name for name in LAYER_OUTPUTS if getattr(generation_config, name)]
        if generation_config.return_dict_in_generate and wanted:
            return f"`{wanted[0]}` was asked for, which a chain has in another form"
        return None

    @staticmethod
    def refusal_of_target(model: PreTrainedModel) -> str | None:
        """The reason why chains may differ for some tokens that no probe has, if there is one."""
        # In transformers, Mamba 2's layers apply these limits to several tokens, but not to a single one.
        limits = [tuple(module.time_step_limit) for module in model.modules() if hasattr(module, "time_step_limit")]
        narrow = [limit for limit in limits if limit != (0.0, math.inf)]
        if narrow:
            return f"its recurrent layers have the `time_step_limit` {narrow[0]}, which holds for several tokens only"
        # Kosmos-2 and TrOCR do: in a forward with a padding token, the tokens behind it are one position off.
        if any(hasattr(module, "create_position_ids_from_input_ids") for module in model.modules()):
            return "it counts positions itself, without padding tokens, which may be among several tokens"
        return None


class Rewind:
    """
    Takes a cache back to where it was before a forward over a chain.

    If every layer can drop its last tokens, rejected tokens are dropped. A recurrent state has no slots: then
    everything goes back, and the tokens that belong in the cache must run again.

    Args:
        cache: a cache after its prompt: a [`DynamicCache`], or what a model uses in its place.
        slots ([`RowSlots`]): the slots of its layers of keys and values, which this object advances.
    """

    def __init__(self, cache: Any, slots: RowSlots):
        self.cache = cache
        self._slots = slots
        self._layered = _growing(cache)
        self._has_layers = type(self._layered) is DynamicCache
        # The layers that are not in slots.
        self._others: list[Any] = []
        if self._has_layers:
            # The cache's own layers know their window.
            adopt_layers(self._layered, slots, None)
            self._others = [layer for layer in self._layered.layers if not isinstance(layer, SlotLayer)]
        # Whether rejected tokens can be dropped.
        self.drops_tokens = self._has_layers and all(_drops_tokens(layer) for layer in self._others)
        if self.drops_tokens:
            # Convolutions then keep the inputs of a forward until they are cropped.
            for layer in self._others:
                if hasattr(layer, "activate_past_recording"):
                    layer.activate_past_recording()
                    layer.crop(0)
        self._saved: Any = None

    def mark(self) -> None:
        """Marks the place to go back to. Each forward that may be undone needs its mark."""
        if not self._has_layers:
            self._saved = copy.deepcopy(self.cache)
        else:
            self._saved = [copied_state(layer, vars(layer), self.drops_tokens) for layer in self._others]

    def undo(self) -> None:
        """Undoes all since the mark, also a forward that broke off; nothing without one."""
        saved, self._saved = self._saved, None
        if saved is None:
            return
        if isinstance(self.cache, list):
            self.cache[:] = saved
        elif not self._has_layers:
            # The caller may hold this cache.
            vars(self.cache).update(vars(saved))
        else:
            for layer, state in zip(self._others, saved):
                vars(layer).update(state)

    def keep(self, added: int, kept: int) -> bool:
        """
        Keeps the first `kept` of the `added` tokens of the forward since the mark.

        Returns:
            `bool`: whether they are in the cache now; otherwise it is as at the mark.
        """
        if self.drops_tokens:
            for layer in self._others:
                # Layers without any tokens, such as cross-attention without an image, cannot be cropped.
                if getattr(layer, "is_initialized", True):
                    layer.crop(kept - added)
        elif kept < added:
            self.undo()
            return False
        self._saved = None
        self._slots.advance([kept])
        return True

    def finish(self) -> None:
        """Gives the cache its own layers back."""
        if self._has_layers:
            give_back(self._layered)
        for layer in self._others:
            leave_past_recording(layer)


def _growing(cache: Any) -> Any:
    """A cache without cross-attention's states, which do not change."""
    return cache.self_attention_cache if type(cache) is EncoderDecoderCache else cache


def _is_known(layer: Any) -> bool:
    """Whether a forward replaces the keys and values of a layer, and changes nothing in them."""
    # Layers that a model brings itself may do otherwise, and keep more than keys and values.
    return type(layer).__module__ == Cache.__module__


def _drops_tokens(layer: Any) -> bool:
    # A layer with a window cannot bring back what a forward has moved out of it.
    return _is_known(layer) and getattr(layer, "is_croppable", False) and not getattr(layer, "is_sliding", False)


def copied_state(layer: Any, values: Mapping[str, Any], drops_tokens: bool = False) -> dict[str, Any]:
    """
    The `values` that a layer of a cache holds, with copies of what a forward changes in place: of nothing but
    dictionaries, if the layer `drops_tokens`.
    """
    state = {}
    for name, value in values.items():
        if drops_tokens or (_is_known(layer) and name in ("keys", "values")):
            state[name] = dict(value) if isinstance(value, dict) else value
        else:
            state[name] = copy.deepcopy(value)
    return state
