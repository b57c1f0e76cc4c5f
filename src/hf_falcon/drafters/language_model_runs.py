# Copyright 2026 The hf_falcon authors. Licensed under the Apache License, Version 2.0.
"""
The forwards of a language model that drafts for one sequence. Its cache has the text, and behind it the drafted
tokens, of which the accepted ones become text without running again.
"""

from __future__ import annotations

import copy
import inspect
from collections import deque
from collections.abc import Sequence
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import (
    DynamicCache,
    GenerationConfig,
    LogitsProcessorList,
    PreTrainedModel,
    StoppingCriteriaList,
)

from ..chains import copied_state
from ..core.caches import RowSlots, SlotLayer, adopt_layers
from ..core.hook import extend_model_kwargs, makes_own_cache
from ..core.modeling_falcon_draft import additive_mask
from ..core.probe import CHAINS, TREES, verdict_of_call
from ..core.target_parts import CACHE_NAME, CACHE_NAMES, FULL, SLIDING, layer_kinds, longest_text
from ..core.tree import to_device
from ..private_names import prompt_positions

# Tokens of one forward over a text. Masks are tokens * context.
_CHUNK = 512
# States of a text that are kept for the way back.
_ENDS = 4


class LanguageModelRun(Protocol):
    """
    The forwards of a language model over one sequence.

    Attributes:
        length (`int`): tokens of the text in the cache; drafted tokens are not among them.
    """

    length: int

    def read(self, token_ids: Sequence[int]) -> Tensor:
        """Runs the text's next tokens. Returns the logits after the last, of shape `(1, vocab_size)`."""

    def draft(self, token_ids: Tensor, parents: Tensor) -> Tensor:
        """
        Runs one pass over drafted tokens.

        Args:
            token_ids (`torch.LongTensor` of shape `(width,)`): the tokens.
            parents (`torch.LongTensor` of shape `(width,)`): the token of the pass before that each one follows.

        Returns:
            `torch.Tensor` of shape `(width, vocab_size)`: the logits after each of them.
        """

    def keep(self, path: Sequence[int]) -> None:
        """Makes drafted tokens the text's next ones: token `path[i]` of pass i. All other drafted tokens go."""

    def cut(self, length: int) -> None:
        """Drops all drafted tokens, and the text behind its first `length` tokens, or more of it."""


def run_of(model: PreTrainedModel) -> LanguageModelRun:
    """The run of a model, by what the probe finds that it takes."""
    way = way_of(model)
    return TreeRun(model) if way == TREES else StateRun(model, takes_several=way == CHAINS)


def way_of(model: PreTrainedModel) -> str:
    """
    What a language model takes in one forward: a tree, a chain, or surely one token only; see [`Verdict`]. The probe
    keeps what it finds.
    """
    prompt = torch.ones(1, 2, dtype=torch.long, device=model.device)
    arguments: dict[str, Any] = {"attention_mask": prompt, "use_cache": True}
    if not makes_own_cache(model):
        arguments[CACHE_NAME] = DynamicCache(config=model.config.get_text_config(decoder=True))
    arguments |= prompt_positions(model, prompt, arguments)
    call = LogitsProcessorList(), StoppingCriteriaList(), GenerationConfig(), arguments
    return verdict_of_call(model, prompt, *call).way


def most_positions(model: PreTrainedModel) -> int | None:
    """How many positions a language model has a table of; `None` where frequencies go on behind its training's."""
    config = model.config.get_text_config(decoder=True)
    return None if getattr(config, "rope_parameters", None) else longest_text(config)


class TreeRun:
    """
    The run of a model that takes trees: a pass is one forward over all its paths, with a mask. It is a
    [`LanguageModelRun`].

    Args:
        model ([`PreTrainedModel`]): the language model.
    """

    def __init__(self, model: PreTrainedModel):
        self.length = 0
        self._model, self._device = model, model.device
        self._config = model.config.get_text_config(decoder=True)
        self._kinds = sorted(layer_kinds(model.config))
        # Without the configuration all layers keep all slots: a window is in the mask.
        self._cache = DynamicCache()
        self._slots = RowSlots([0], self._device)
        self._layers: list[SlotLayer] = []
        # The number of tokens of each pass, and the drafted tokens that each one of the last pass sees.
        self._widths: list[int] = []
        self._lineage: Tensor | None = None
        # The positions of the drafted tokens.
        self._positions = torch.empty(0, dtype=torch.long, device=self._device)
        takes = inspect.signature(model.forward).parameters
        self._only_last = {"logits_to_keep": 1} if "logits_to_keep" in takes else {}

    def read(self, token_ids: Sequence[int]) -> Tensor:
        """See [`LanguageModelRun.read`]."""
        tokens = to_device(torch.tensor([token_ids], device="cpu"), self._device)
        return self.read_inputs(input_ids=tokens)

    def read_inputs(self, **inputs: Tensor) -> Tensor:
        """
        As `read`.

        Args:
            inputs (`torch.Tensor` of shape `(1, new, ...)`): arguments of the model that have a value for each token.
        """
        self._drop_drafted()
        length = next(iter(inputs.values())).shape[1]
        for start in range(0, length, _CHUNK):
            chunk = {name: value[:, start : start + _CHUNK] for name, value in inputs.items()}
            new = min(_CHUNK, length - start)
            positions = torch.arange(self.length, self.length + new, device=self._device)
            visible = torch.ones(new, new, dtype=torch.bool, device=self._device).tril()
            logits = self._forward(positions, visible, {**chunk, **self._only_last})
            self.length += new
        return logits[-1:]

    def draft(self, token_ids: Tensor, parents: Tensor, **inputs: Tensor) -> Tensor:
        """See [`LanguageModelRun.draft`]; `inputs` as in `read_inputs`."""
        width = token_ids.shape[0]
        lineage = torch.eye(width, dtype=torch.bool, device=self._device)
        if self._lineage is not None:
            lineage = torch.cat((self._lineage[parents], lineage), dim=1)
        positions = torch.full_like(token_ids, self.length + len(self._widths))
        logits = self._forward(positions, lineage, {"input_ids": token_ids[None], **inputs})
        self._lineage, self._positions = lineage, torch.cat((self._positions, positions))
        self._widths.append(width)
        return logits

    def keep(self, path: Sequence[int]) -> None:
        """See [`LanguageModelRun.keep`]."""
        starts = [sum(self._widths[:place]) for place in range(len(path))]
        nodes = [start + row for start, row in zip(starts, path)]
        self._drop_drafted()
        if nodes != list(range(len(nodes))):
            moves = torch.tensor([nodes, list(range(len(nodes)))], device="cpu") + self.length
            for layer in self._layers:
                layer.move(*to_device(moves, layer.device).unbind(0))
        self.length += len(nodes)

    def cut(self, length: int) -> None:
        """See [`LanguageModelRun.cut`]."""
        self._drop_drafted()
        self.length = length

    def _drop_drafted(self) -> None:
        self._widths, self._lineage, self._positions = [], None, self._positions[:0]

    def _forward(self, positions: Tensor, visible: Tensor, inputs: dict[str, Any]) -> Tensor:
        """
        One forward; its tokens are written behind all that are in the cache.

        Args:
            positions (`torch.LongTensor` of shape `(new,)`): positions of the tokens.
            visible (`torch.BoolTensor` of shape `(new, slots)`):
                Which of the last slots a token sees; all before them are visible.
            inputs (`dict`): the tokens, and more arguments of the model.

        Returns:
            The logits after each token, of shape `(new, vocab_size)`.
        """
        drafted = sum(self._widths)
        self._slots.advance([self.length + drafted - self._slots.longest])
        masks = {kind: self._mask(kind, positions, visible) for kind in self._kinds}
        outputs = self._model(
            attention_mask=masks if len(masks) > 1 else masks[self._kinds[0]],
            position_ids=positions[None],
            use_cache=True,
            return_dict=True,
            **{CACHE_NAME: self._cache},
            **inputs,
        )
        if not self._layers:
            self._slots.advance([positions.shape[0]])
            self._layers = adopt_layers(self._cache, self._slots, None)
        return outputs.logits[0]

    def _mask(self, kind: str, positions: Tensor, visible: Tensor) -> Tensor:
        """The additive mask of a forward, of shape `(1, 1, new, slots)`; see `_forward`."""
        end = self.length + self._positions.shape[0] + positions.shape[0]
        visible = F.pad(visible, (end - visible.shape[1], 0), value=True)
        if kind == SLIDING:
            text = torch.arange(self.length, device=self._device)
            slots = torch.cat((text, self._positions, positions))
            visible = visible & (slots > positions[:, None] - self._config.sliding_window)
        else:
            assert kind == FULL
        return additive_mask(visible, self._model.dtype)[None, None]


class StateRun:
    """
    The run of a model that takes no trees, because it keeps a recurrent state or counts positions itself: it runs one
    token after the other, as plain decoding does, and goes back to states that it has saved. It is a
    [`LanguageModelRun`].

    Args:
        model ([`PreTrainedModel`]): the language model.
        takes_several (`bool`): whether it takes several tokens of a text in one forward.
    """

    def __init__(self, model: PreTrainedModel, takes_several: bool):
        self.length = 0
        self._model, self._device, self._takes_several = model, model.device, takes_several
        self._text: list[int] = []
        # The arguments of the model after its first tokens, the number of these, and the name of its cache.
        self._arguments: dict[str, Any] = {}
        self._first, self._cache_name = 0, CACHE_NAME
        # The states after the text, and after each token of each pass; and which of them the cache has now.
        self._states: list[list[Any]] = []
        self._current: Any = None
        # The lengths of the text after the last reads, and the states there.
        self._ends: deque[tuple[int, Any]] = deque(maxlen=_ENDS)

    @property
    def _cache(self) -> Any:
        return self._arguments.get(self._cache_name)

    def read(self, token_ids: Sequence[int]) -> Tensor:
        """See [`LanguageModelRun.read`]."""
        if self._states:
            self.keep([])
            self._go_to(self._states[0][0])
        tokens = list(token_ids)
        self._text = self._text[: self.length] + tokens
        if not self._arguments:
            logits = self._start()
        else:
            step = len(tokens) if self._takes_several else 1
            for end in range(self.length + step, len(self._text) + 1, step):
                logits = self._step(self._text[:end], step)
        self.length = len(self._text)
        self._states = [[self._save()]]
        self._ends.append((self.length, self._current))
        return logits[-1:]

    def draft(self, token_ids: Tensor, parents: Tensor) -> Tensor:
        """See [`LanguageModelRun.draft`]."""
        logits, states, before = [], [], self._states[-1]
        depth = len(self._states) - 1
        # Of the tokens in the state only the number counts.
        text = self._text[: self.length] + [0] * depth
        for token, parent in zip(token_ids.tolist(), parents.tolist()):
            self._go_to(before[parent])
            logits.append(self._step([*text, token], 1)[-1:])
            states.append(self._save())
        self._states.append(states)
        return torch.cat(logits)

    def keep(self, path: Sequence[int]) -> None:
        """See [`LanguageModelRun.keep`]."""
        if self._states:
            self._text = self._text[: self.length] + [0] * len(path)
            self._states = [[self._states[len(path)][path[-1] if path else 0]]]
        self.length += len(path)

    def cut(self, length: int) -> None:
        """See [`LanguageModelRun.cut`]. The state goes back to the end of an earlier `read`, or to nothing."""
        while self._ends and self._ends[-1][0] > length:
            self._ends.pop()
        if self._ends:
            self.length, state = self._ends[-1]
            self._states = [[state]]
        else:
            self.length, self._arguments, self._states, self._current = 0, {}, [], None

    def _start(self) -> Tensor:
        """Runs the first tokens as plain decoding runs a prompt."""
        prompt = to_device(torch.tensor([self._text], device="cpu"), self._device)
        arguments: dict[str, Any] = {"attention_mask": torch.ones_like(prompt), "use_cache": True}
        arguments |= prompt_positions(self._model, prompt, arguments)
        # Without a cache the model makes its own.
        inputs = self._model.prepare_inputs_for_generation(prompt, is_first_iteration=True, **arguments)
        outputs = self._model(**inputs, return_dict=True)
        self._cache_name = next((name for name in CACHE_NAMES if name in outputs), self._cache_name)
        self._arguments = {**arguments, self._cache_name: outputs.get(self._cache_name)}
        self._first = len(self._text)
        return outputs.logits[0]

    def _step(self, text: list[int], new: int) -> Tensor:
        """Runs the last `new` tokens of a text whose others are in the cache."""
        self._current = None
        arguments = extend_model_kwargs(self._model, self._arguments, len(text) - self._first)
        arguments[self._cache_name] = self._cache
        tokens = to_device(torch.tensor([text], device="cpu"), self._device)
        inputs = self._model.prepare_inputs_for_generation(tokens, next_sequence_length=new, **arguments)
        outputs = self._model(**inputs, return_dict=True)
        self._arguments[self._cache_name] = outputs.get(self._cache_name, self._cache)
        return outputs.logits[0]

    def _save(self) -> Any:
        """The state now."""
        cache = self._cache
        if type(cache) is DynamicCache:
            self._current = [copied_state(layer, vars(layer)) for layer in cache.layers]
        else:
            self._current = copy.deepcopy(cache)
        return self._current

    def _go_to(self, state: Any) -> None:
        """Makes a saved state the cache's. It stays as it is, for other paths that start from it."""
        if state is self._current:
            return
        cache = self._cache
        if type(cache) is DynamicCache:
            for layer, values in zip(cache.layers, state):
                vars(layer).update(copied_state(layer, values))
        else:
            self._arguments[self._cache_name] = copy.deepcopy(state)
        self._current = state
