# Copyright 2026 The hf_falcon authors. Licensed under the Apache License, Version 2.0.
"""
The target's decoder, compiled for trees of a few sizes: of what a forward of a few tokens takes, much is the
interpreter and small operations.
"""

from __future__ import annotations

import itertools
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from transformers import Cache, CompileConfig, PreTrainedModel
from transformers.cache_utils import DynamicLayer
from transformers.utils import output_capturing

from .compact_weights import CompactWeight, compact
from .few_rows import linears_of
from .grouped_attention import form_ahead
from .packed_layouts import blocks_pay
from .packing import PackedLinear


class TreeRows(DynamicLayer):
    """
    What a compiled forward has as a layer of its cache: all rows, of which it writes those of the tree.

    Args:
        keys, values (`torch.Tensor` of shape `(1, heads, rows, head_dim)`): the rows; the tree's are the last.
        nodes (`int`): how many these are.
    """

    def __init__(self, keys: Tensor, values: Tensor, nodes: int):
        super().__init__()
        self.dtype, self.device, self.is_initialized = keys.dtype, keys.device, True
        self.keys, self.values, self._nodes = keys, values, nodes

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Writes `key_states` and `value_states` of shape `(1, heads, nodes, head_dim)`; returns all rows."""
        self.keys[..., -self._nodes :, :] = key_states
        self.values[..., -self._nodes :, :] = value_states
        return self.keys, self.values

    def get_seq_length(self) -> int:
        """Rows before the tree's."""
        return self.keys.shape[-2] - self._nodes


class _Here(threading.local):
    """The round that this thread is in: its cache, and the nodes of its tree."""

    cache: Cache | None = None
    nodes: int = 0


class CompiledRounds:
    """
    A target's decoder and LM head, compiled for trees of a few sizes. They run in rounds alone, of any thread; to all
    others the target is as it was.

    Args:
        decoder ([`PreTrainedModel`]): the part of the target whose output its LM head reads.
        head (`torch.nn.Module`): the LM head.
        compile_config ([`CompileConfig`]): backend, mode and options for `torch.compile`.
    """

    def __init__(self, decoder: PreTrainedModel, head: nn.Module, compile_config: CompileConfig):
        # Tokens of a tree, the root among them, that it is used for, in ascending order; smaller trees are filled up.
        self.sizes: list[int] = []
        # Whether it is faster than the decoder itself, of each size that was tried.
        self.is_faster: dict[int, bool] = {}
        self._decoder, self._plain = decoder, decoder.forward
        self._head = head
        self._config = compile_config
        # One graph a size; kernels for any number of rows are slower.
        self._compiled: dict[int, Callable[..., Any]] = {}
        self._compiled_heads: dict[int, Callable[..., Tensor]] = {}
        # What compiled code reads of linear layers in place of their weights.
        self._compact: dict[nn.Linear, CompactWeight] = {}
        self._dtypes: dict[nn.Linear, torch.dtype] = {}
        # Those that the layers have in the rounds that run now.
        self._lent: dict[nn.Linear, CompactWeight] = {}
        config = decoder.config.get_text_config(decoder=True)
        heads = config.num_attention_heads
        self._group = heads // (getattr(config, "num_key_value_heads", None) or heads)
        self._here = _Here()
        self._lock = threading.Lock()
        self._users = 0

    def size_for(self, nodes: int) -> int | None:
        """
        The size that a tree of `nodes` nodes is to be filled up to, or `None` where it is to run as it is. A single
        token, a plain step, is not filled up.
        """
        return next((size for size in self.sizes if size >= nodes and (size == 1 or nodes > 1)), None)

    @contextmanager
    def round(self, cache: Cache, masks: Iterable[Tensor]) -> Iterator[None]:
        """
        Inside, this thread's forward of a tree runs compiled.

        Args:
            cache ([`Cache`]): the target's, with rows in it.
            masks (iterable of `torch.Tensor` of shape `(1, 1, nodes, slots)`): the masks that the forward gets.
        """
        here = self._here
        here.cache = cache
        for mask in masks:
            here.nodes = mask.shape[2]
            # Lengths alone change from round to round.
            for form in (mask, form_ahead(mask, self._group)):
                if form is not None:
                    torch._dynamo.maybe_mark_dynamic(form, 3)
        self._enter()
        try:
            yield
        finally:
            here.cache = None
            self._leave()

    @contextmanager
    def compiling(self, size: int) -> Iterator[None]:
        """Inside, a forward of `size` tokens is compiled; elsewhere nothing is."""
        config = self._config.to_dict() | {"fullgraph": True, "dynamic": False}
        mode, options = config.pop("mode"), dict(config.pop("options") or {})
        if config["backend"] == "inductor":
            if mode not in (None, "default"):
                # torch takes a mode or options, and these are what a mode stands for.
                options = torch._inductor.list_mode_options(mode) | options
            options = _options() | options
        # Tables of transformers' that any other model adds to are no reason to drop what is compiled.
        options["guard_filter_fn"] = torch.compiler.skip_guard_on_globals_unsafe
        made = [(self._compiled, self._plain), (self._compiled_heads, self._plain_head)]
        for compiled, forward in made:
            compiled[size] = torch.compile(_with_its_own_code(forward), **config, options=options)
        try:
            yield
        finally:
            # Where a round differs from what was compiled for it runs uncompiled.
            for compiled, _ in made:
                compiled[size] = torch._dynamo.run(compiled[size])

    def compact_weights(self) -> None:
        """Takes the weights of linear layers as they are now, in fewer bytes where their values allow that."""
        # As blocks of float32, this is for the instructions that it was found faster with.
        found = {linear: compact(linear.weight) for linear in _linears_of(self._decoder, self._head) if blocks_pay()}
        self._compact = {linear: weight for linear, weight in found.items() if weight is not None}
        dtypes = {linear: weight.dtype for linear, weight in self._compact.items()}
        if dtypes != self._dtypes:
            # Code that was compiled for others does not fit them.
            self.is_faster.clear()
        self._dtypes = dtypes

    def drop_weights(self) -> None:
        """Undoes `compact_weights`; what was compiled stays."""
        self._compact = {}

    def _enter(self) -> None:
        with self._lock:
            self._users += 1
            if self._users == 1:
                self._decoder.forward = self._forward
                self._lent = self._compact
                if self._head in self._lent:
                    vars(self._head)["forward"] = self._head_forward
                for linear, weight in self._lent.items():
                    vars(linear)["compact"] = weight

    def _leave(self) -> None:
        with self._lock:
            self._users -= 1
            if self._users == 0:
                del self._decoder.forward
                if self._head in self._lent:
                    del vars(self._head)["forward"]
                for linear in self._lent:
                    del vars(linear)["compact"]

    def _forward(self, *args: Any, **kwargs: Any) -> Any:
        cache, nodes = self._here.cache, self._here.nodes
        given = kwargs.pop("past_key_values", None)
        if cache is None or given is not cache:
            # Another thread's, or a forward that is none of a tree.
            return self._plain(*args, past_key_values=given, **kwargs)
        rows = Cache(layers=[TreeRows(*_room(layer, nodes), nodes) for layer in given.layers])
        outputs = self._compiled[nodes](*args, past_key_values=rows, **kwargs)
        outputs.past_key_values = given
        return outputs

    def _head_forward(self, input: Tensor) -> Tensor:
        if self._here.cache is None or input.numel() != self._here.nodes * input.shape[-1]:
            return self._plain_head(input)
        return self._compiled_heads[self._here.nodes](input)

    def _plain_head(self, input: Tensor) -> Tensor:
        return type(self._head).forward(self._head, input)

    @property
    def are_exact(self) -> bool:
        """
        Whether no part of the decoder has hooks or another forward, which compiled code would pass over, and weights
        are those that it reads.
        """
        own = vars(self._decoder).get("forward", self._forward) == self._forward
        if self._head in self._compact:
            own = own and vars(self._head).get("forward", self._head_forward) == self._head_forward
        inner = itertools.chain.from_iterable(part.modules() for part in self._decoder.children())
        return (
            own
            and not any("forward" in vars(module) or any(map(_acts, _hooks(module))) for module in inner)
            and all(weight.is_of(linear.weight) for linear, weight in self._compact.items())
        )


def _linears_of(decoder: PreTrainedModel, head: nn.Module) -> Iterator[nn.Linear]:
    """Linear layers that look for a compact weight, each once."""
    for model in (decoder, head):
        yield from linears_of(model)
        yield from (module for module in model.modules() if isinstance(module, PackedLinear))


def _hooks(module: nn.Module) -> Iterator[Callable[..., Any]]:
    return itertools.chain(module._forward_hooks.values(), module._forward_pre_hooks.values())


def _acts(hook: Callable[..., Any]) -> bool:
    """Those of transformers are there once a call has asked for layers' outputs, and are for such calls alone."""
    return getattr(hook, "__module__", None) != output_capturing.__name__


def _with_its_own_code(forward: Callable[..., Any]) -> Callable[..., Any]:
    """
    A function that `torch.compile` compiles apart from others: it keeps what it compiled with the code, of which it
    takes a few versions only, and all models of transformers have the outermost code of their forwards in common.
    """

    def tree_forward(*args: Any, **kwargs: Any) -> Any:
        return forward(*args, **kwargs)

    tree_forward.__code__ = tree_forward.__code__.replace()
    return tree_forward


def _options() -> dict[str, Any]:
    """For the loops of compact weights: to multiply and add at once, and no more sums in one than registers hold."""
    flag = "cpp.enable_floating_point_contract_flag"
    # Earlier versions of torch know yes and no.
    is_named = isinstance(torch._inductor.config.get_config_copy()[flag], str)
    return {flag: "fast" if is_named else True, "max_fusion_size": 16}


def _room(layer: DynamicLayer, nodes: int) -> tuple[Tensor, Tensor]:
    """The rows that a layer of a cache attends to, with room at their end for those of `nodes` nodes."""
    empty = (states.new_empty(*states.shape[:-2], nodes, states.shape[-1]) for states in (layer.keys, layer.values))
    rows = layer.update(*empty)
    for states in rows:
        torch._dynamo.maybe_mark_dynamic(states, 2)
    return rows


# Those of targets that `compile_rounds` was called for.
compiled: weakref.WeakKeyDictionary[PreTrainedModel, CompiledRounds] = weakref.WeakKeyDictionary()


def compiled_rounds_of(model: PreTrainedModel) -> CompiledRounds | None:
    """Those of a target, where it has any and nothing stands in their way."""
    rounds = compiled.get(model)
    return rounds if rounds is not None and rounds.are_exact else None
