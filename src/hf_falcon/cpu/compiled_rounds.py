# Copyright 2026 The hf_falcon authors. Licensed under the Apache License, Version 2.0.
"""
The target's decoder layers, compiled for trees of a few sizes. Uncompiled, the interpreter and small operations take
much of a forward of a few tokens.
"""

from __future__ import annotations

import itertools
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from transformers import Cache, CompileConfig, PreTrainedModel
from transformers.cache_utils import DynamicLayer
from transformers.utils import output_capturing

from ..core.caches import SlotLayer
from ..core.configuration_falcon_draft import field_of
from ..core.hook import attention_implementation
from ..core.target_parts import CACHE_NAME, decoder_layers, decoder_of, is_compiled
from ..private_names import attention_function
from .code_digest import functions_of
from .compact_weights import own_forward
from .compiled_code import BuiltCode, CompiledCode, captures_graphs, mark_rows, write_rows
from .compiled_passes import CompiledPasses
from .grouped_attention import form_ahead
from .joined_weights import can_have_blocks
from .kept_programs import Shelf
from .lent_weights import LentWeights
from .packed_layouts import has_bfloat16_products
from .programs import TensorHolder, kind_of, traits_of
from .row_invariant import RowInvariantForward, is_row_invariant
from .skinny_gemm import linears_of

# The largest number of parameters of decoder layers that are compiled together. A forward of a larger decoder takes so
# long that the calls of its layers hardly matter.
_SMALL = 1 << 30


class TreeRows(DynamicLayer):
    """
    A layer of the cache of a compiled forward: all rows. The forward writes the rows of the tree.

    Args:
        keys, values (`torch.Tensor` of shape `(1, heads, rows, head_dim)`): the rows; the tree's are the last.
        nodes (`int`): the number of rows of the tree.
        slots (`torch.LongTensor` of shape `(nodes,)`, *optional*):
            The tree's rows, if they are not the last: of a buffer with static slots.
    """

    def __init__(self, keys: Tensor, values: Tensor, nodes: int, slots: Tensor | None = None):
        super().__init__()
        self.dtype, self.device, self.is_initialized = keys.dtype, keys.device, True
        self.keys: Tensor = keys
        self.values: Tensor = values
        self._nodes, self.slots = nodes, slots

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Writes `key_states` and `value_states` of shape `(1, heads, nodes, head_dim)`; returns all rows."""
        rows = self.keys, self.values
        write_rows(rows, (key_states, value_states), self._nodes, self.slots)
        return rows

    def get_seq_length(self) -> int:
        """Rows before the tree's."""
        return self.keys.shape[-2] - self._nodes


class LayerCache(Cache, TensorHolder):
    """
    The cache that one decoder layer gets. It does not read the number that the layer gives, because code that reads a
    number is compiled for each layer anew.

    Args:
        layers (list of [`TreeRows`]): the rows of all layers.
        index (`int`): the number of the layer.
    """

    def __init__(self, layers: list[TreeRows], index: int):
        super().__init__(layers=layers)
        self._rows = layers[index]

    def tensors(self) -> list[Tensor]:
        """See [`TensorHolder`]."""
        return [self._rows.keys, self._rows.values, *([] if self._rows.slots is None else [self._rows.slots])]

    def with_tensors(self, tensors: list[Tensor], rows: int) -> LayerCache:
        """See [`TensorHolder`]."""
        keys, values, *slots = tensors
        return LayerCache([TreeRows(keys, values, rows, *slots)], 0)

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """See [`TreeRows.update`]."""
        return self._rows.update(key_states, value_states)

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """See [`TreeRows.get_seq_length`]."""
        return self._rows.get_seq_length()


class _Here(threading.local):
    """
    The round that this thread is in: its cache, and the nodes of its tree. In the forward of the decoder also the
    cache that the decoder gets, and those that its layers get instead.
    """

    cache: Cache | None = None
    nodes: int = 0
    rows: Cache | None = None
    of_layers: Sequence[LayerCache] = ()


class RoundForward:
    """
    The forward of a module in rounds. A copy of the module that another thread makes meanwhile has the module's own.

    Args:
        module (`torch.nn.Module`): the module.
        forward (`Callable`): what is called.
    """

    def __init__(self, module: nn.Module, forward: Callable[..., Any]):
        self._module, self._forward = module, forward

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._forward(*args, **kwargs)

    def __reduce__(self) -> tuple[Any, ...]:
        # A copy has no attributes yet when this is called for it.
        return getattr, (self._module, "forward")


class CompiledRounds:
    """
    A target's decoder and LM head, compiled for trees of a few sizes. The compiled code runs in rounds only, in any
    thread; all other forwards of the target run as before.

    On a CPU each decoder layer is compiled by itself. Layers of one kind share their code, so compiling takes a
    fraction of the time that it takes for a whole decoder. A call of a program takes some microseconds; but where
    programs cannot be built, each call of a layer takes a quarter of a millisecond, so a small decoder in bfloat16 is
    compiled as a whole. Captured graphs are of the whole decoder, and so is the code of a decoder whose layers are not
    in one list.

    Args:
        target ([`PreTrainedModel`]): the target.
        compile_config ([`CompileConfig`]): backend, mode and options for `torch.compile`.
        shelf ([`Shelf`], *optional*): where the programs of its layers are. Without one `torch.compile` is used.
    """

    def __init__(self, target: PreTrainedModel, compile_config: CompileConfig, shelf: Shelf | None = None):
        # The sizes in use, in ascending order: tokens of a tree, its root included. Smaller trees are padded.
        self.sizes: list[int] = []
        # Whether compiled code is faster, for each size that was tried.
        self.is_faster: dict[int, bool] = {}
        self.is_row_invariant = is_row_invariant(target)
        self._decoder = decoder = decoder_of(target)
        self._plain = decoder.forward
        self._head = target.get_output_embeddings()
        layers = decoder_layers(target)
        is_whole = captures_graphs(target.device) or (shelf is None and _pays_as_a_whole(target, layers))
        self._layers = [] if is_whole else layers
        self.shelf = shelf if self._layers else None
        self._traits = list(map(traits_of, self._layers))
        self._functions = self._functions_now()
        # Whether they were loaded without a call of `compile_rounds`.
        self.is_kept = False
        # The forwards of modules in rounds.
        self._forwards = {decoder: RoundForward(decoder, self._forward)}
        for index, layer in enumerate(self._layers):
            self._forwards[layer] = RoundForward(layer, partial(self._layer_forward, layer, index))
        self._forward_of_head = RoundForward(self._head, self._head_forward)
        self._config = compile_config
        # One graph for each size: kernels for any number of rows are slower. But a program whose products do not
        # depend on the number of rows is as fast for any number.
        self._compiled: dict[int, CompiledCode | BuiltCode] = {}
        self._compiled_heads: dict[int, CompiledCode | BuiltCode] = {}
        self._weights = LentWeights(can_have_blocks(compile_config, self.is_row_invariant))
        # The compiled passes of drafters for this target: the passes in use, and all compiled passes by their key.
        self.passes: weakref.WeakKeyDictionary[nn.Module, CompiledPasses] = weakref.WeakKeyDictionary()
        self.made: weakref.WeakKeyDictionary[nn.Module, dict[tuple[object, ...], CompiledPasses]]
        self.made = weakref.WeakKeyDictionary()
        config = decoder.config.get_text_config(decoder=True)
        heads = field_of(config, "num_attention_heads") or 1
        self._group = heads // (field_of(config, "num_key_value_heads") or heads)
        self._here = _Here()
        self._lock = threading.Lock()
        self._users = 0

    def size_for(self, nodes: int) -> int | None:
        """
        The size that a tree of `nodes` nodes is padded to, or `None` if it runs uncompiled. A single token, a plain
        step, is not padded.
        """
        return next((size for size in self.sizes if size >= nodes and (size == 1 or nodes > 1)), None)

    @contextmanager
    def round(self, cache: Cache, masks: Iterable[Tensor]) -> Iterator[None]:
        """
        Inside, a forward of a tree runs compiled in this thread.

        Args:
            cache ([`Cache`]): the target's cache, which is not empty.
            masks (iterable of `torch.Tensor` of shape `(1, 1, nodes, slots)`): the masks that the forward gets.
        """
        here = self._here
        here.cache = cache
        if captures_graphs(self._decoder.device):
            # What captured graphs returned in the round before may be overwritten.
            torch.compiler.cudagraph_mark_step_begin()
        for mask in masks:
            here.nodes = mask.shape[2]
            # Only lengths change from round to round.
            for form in (mask, form_ahead(mask, self._group)):
                if form is not None:
                    torch._dynamo.maybe_mark_dynamic(form, 3)
        self._enter()
        try:
            with self._weights.lent():
                yield
        finally:
            here.cache = None
            self._leave()

    @contextmanager
    def compiling(self, size: int) -> Iterator[None]:
        """Inside, forwards of [`CompiledRounds.examples`] are compiled. Outside, no forward is."""
        if self.shelf is not None:
            code, head = self._built(size)
            with code.compiling(), head.compiling():
                yield
            return
        function = _plain_layer if self._layers else self._plain
        self._compiled[size] = CompiledCode(function, self._config, self.is_row_invariant)
        self._compiled_heads[size] = CompiledCode(_plain_layer, self._config, self.is_row_invariant)
        # Each layer may be of another kind.
        limit = max(len(self._layers), torch._dynamo.config.recompile_limit)
        with (
            torch._dynamo.config.patch(recompile_limit=limit),
            _without_hooks(self._decoder),
            self._compiled[size].compiling(),
            self._compiled_heads[size].compiling(),
        ):
            yield

    def examples(self, size: int) -> list[int]:
        """The numbers of tokens of two forwards that compile a size, or of one."""
        if self.shelf is None:
            return [size]
        return [size, size + 3 if self._is_for_any_size(size) else size]

    @contextmanager
    def checking(self, size: int, check: Callable[[Any, Any], None]) -> Iterator[None]:
        """See [`BuiltCode.checking`]; for the programs of a size."""
        code, head = self._built(size)
        with code.checking(check), head.checking(check):
            yield

    def load(self) -> bool:
        """Loads programs that an earlier process built; returns whether there are any."""
        known = None if self.shelf is None else self.shelf.note("rounds")
        if known is None:
            return False
        with self._weights.lent():
            layers = {layer: kind_of(layer) for layer in self._layers}
            heads = {self._head: kind_of(self._head)} if self._head in self._weights else {}
            for size, is_faster in known.items():
                code, head = self._built(int(size))
                if not is_faster or (head.load(heads) and code.load(layers)):
                    self.is_faster[int(size)] = bool(is_faster)
        return bool(self.is_faster)

    def keep(self) -> None:
        """Notes which sizes are faster, for later processes."""
        if self.shelf is not None:
            self.shelf.take_note("rounds", {str(size): is_faster for size, is_faster in self.is_faster.items()})

    def bind(self) -> bool:
        """Takes the current tensors of the layers for the programs; returns whether these are for the layers."""
        if self.shelf is None:
            return True
        if list(map(traits_of, self._layers)) != self._traits:
            return False
        tensors: dict[nn.Module, list[Tensor]] = {}
        with self._weights.lent():
            return all(
                code.bind(tensors)
                for codes in (self._compiled, self._compiled_heads)
                for code in {id(codes[size]): codes[size] for size in self.sizes}.values()
                if isinstance(code, BuiltCode)
            )

    def _built(self, size: int) -> tuple[BuiltCode, BuiltCode]:
        """The programs of a size, of the layers and of the head; they may not be there yet."""
        assert self.shelf is not None
        is_for_any = self._is_for_any_size(size)
        for sizes, name in ((self._compiled, "layer"), (self._compiled_heads, "head")):
            sizes.setdefault(size, BuiltCode(_plain_layer, self.shelf, f"{name}-{0 if is_for_any else size}"))
        if is_for_any:
            for sizes in (self._compiled, self._compiled_heads):
                same = [code for other, code in sizes.items() if other > 1]
                # Also of the other forward that compiles it.
                sizes |= dict.fromkeys([size, size + 3], same[0])
        return self._compiled[size], self._compiled_heads[size]  # type: ignore[return-value]

    def _is_for_any_size(self, size: int) -> bool:
        """Whether the program of a size is for all numbers of tokens. That of a single one is simpler."""
        are_lent = all(linear in self._weights for linear in linears_of(self._decoder))
        return size > 1 and not self._weights.depend_on_rows and are_lent

    def take_weights(self) -> None:
        """Makes what compiled code reads from the current weights of linear layers; see [`LentWeights.take`]."""
        if self._weights.take(self._decoder, self._head):
            self.is_faster.clear()

    def drop_weights(self) -> None:
        """Drops these weights, and stops the use of drafters' compiled passes. Compiled code is kept."""
        self._weights.drop()
        for code in (*self._compiled.values(), *self._compiled_heads.values()):
            if isinstance(code, BuiltCode):
                code.unbind()
        for passes in self.passes.values():
            passes.drop()
        self.passes.clear()

    def _enter(self) -> None:
        with self._lock:
            self._users += 1
            if self._users == 1:
                for module, forward in self._forwards.items():
                    vars(module)["forward"] = forward
                if self._head in self._weights:
                    vars(self._head)["forward"] = self._forward_of_head

    def _leave(self) -> None:
        with self._lock:
            self._users -= 1
            if self._users == 0:
                for module in self._forwards:
                    # Targets that share a decoder share its modules.
                    vars(module).pop("forward", None)
                if vars(self._head).get("forward") is self._forward_of_head:
                    del vars(self._head)["forward"]

    def _forward(self, *args: Any, **kwargs: Any) -> Any:
        cache, nodes = self._here.cache, self._here.nodes
        if cache is None or kwargs.get(CACHE_NAME) is not cache:
            # A forward of another thread, or one that scores no tree.
            return self._plain(*args, **kwargs)
        given = kwargs[CACHE_NAME]
        start = given.get_seq_length()
        slots = torch.arange(start, start + nodes, device=self._decoder.device)
        layers = [_tree_rows(layer, nodes, slots, self.shelf is None) for layer in given.layers]
        rows = Cache(layers=layers)
        if self._layers:
            here = self._here
            here.rows, here.of_layers = rows, [LayerCache(layers, index) for index in range(len(layers))]
            try:
                outputs = self._plain(*args, **kwargs | {CACHE_NAME: rows})
            finally:
                here.rows, here.of_layers = None, ()
        else:
            outputs = self._compiled[nodes](*args, **kwargs | {CACHE_NAME: rows})
        outputs[CACHE_NAME] = given
        return outputs

    def _layer_forward(self, layer: nn.Module, index: int, *args: Any, **kwargs: Any) -> Any:
        here = self._here
        if here.rows is None or index >= len(here.of_layers):
            return _plain_layer(layer, *args, **kwargs)
        # The layer gets its own cache in place of the decoder's.
        own = here.of_layers[index]
        args = tuple(own if value is here.rows else value for value in args)
        kwargs = {name: own if value is here.rows else value for name, value in kwargs.items()}
        return self._compiled[here.nodes](layer, *args, **kwargs)

    def _head_forward(self, input: Tensor) -> Tensor:
        if self._here.cache is None or input.numel() != self._here.nodes * input.shape[-1]:
            return self._plain_head(input)
        return self._compiled_heads[self._here.nodes](self._head, input)

    def _plain_head(self, input: Tensor) -> Tensor:
        return type(self._head).forward(self._head, input)

    def are_of(self, layers: list[nn.Module]) -> bool:
        """Whether they are for these decoder layers; a decoder that is compiled as a whole may have others."""
        return not self._layers or self._layers == layers

    @property
    def are_exact(self) -> bool:
        """
        Whether compiled code computes what the decoder computes: no part of it has hooks or a forward of its own,
        which compiled code would skip, or an adapter, which can be switched off and on, none is compiled by itself, it
        has the same layers, its weights are unchanged, and no function that it calls was replaced.
        """
        own = all(own_forward(module) in (None, mine) for module, mine in self._forwards.items())
        if self._layers:
            lists = (list(each) for each in self._decoder.children() if isinstance(each, nn.ModuleList))
            own = own and self._layers in lists
        if self._head in self._weights:
            own = own and own_forward(self._head) in (None, self._forward_of_head)
        inner = [module for part in self._decoder.children() for module in part.modules()]
        own = own and not any(
            "_active_adapter" in vars(module) or is_compiled(module) for module in (*inner, *self._head.modules())
        )
        # Compiled code has the forwards of `row_invariant`, if it is for targets inside.
        known = (type(None), RowInvariantForward) if self.is_row_invariant else (type(None),)
        return (
            own
            and not any(
                (module not in self._forwards and not isinstance(own_forward(module), known))
                or any(map(_acts, _hooks(module)))
                for module in inner
            )
            and self._weights.are_current
            and self._functions == self._functions_now()
            and not torch.nn.modules.module._has_any_global_hook()
        )

    def _functions_now(self) -> frozenset[Any]:
        decoder = self._decoder
        # Of the decoder itself its forward is enough: there are hundreds of other methods.
        kinds = {type(module) for module in decoder.modules() if module is not decoder}
        attention = attention_implementation(decoder.config.get_text_config(decoder=True))
        return functions_of(kinds, [type(decoder).forward, attention_function(attention)])


def _pays_as_a_whole(target: PreTrainedModel, layers: Iterable[nn.Module]) -> bool:
    # Loops over compact weights, which the other dtypes have, would be generated for each layer anew, for minutes.
    if target.dtype != torch.bfloat16 or not has_bfloat16_products():
        return False
    return sum(parameter.numel() for layer in layers for parameter in layer.parameters()) <= _SMALL


def _plain_layer(layer: nn.Module, *args: Any, **kwargs: Any) -> Any:
    return type(layer).forward(layer, *args, **kwargs)


@contextmanager
def _without_hooks(decoder: nn.Module) -> Iterator[None]:
    """
    Inside, no module of the decoder has transformers' own hooks, which `torch.compile` cannot read; see [`_acts`].
    Hooks of calls in other threads stay.
    """
    hooks = [module._forward_hooks for module in decoder.modules()]
    taken = [{number: hook for number, hook in list(each.items()) if not _acts(hook)} for each in hooks]
    for each, own in zip(hooks, taken):
        for number in own:
            del each[number]
    try:
        yield
    finally:
        for each, own in zip(hooks, taken):
            each.update(own)


def _hooks(module: nn.Module) -> Iterator[Callable[..., Any]]:
    return itertools.chain(module._forward_hooks.values(), module._forward_pre_hooks.values())


def _acts(hook: Callable[..., Any]) -> bool:
    """
    Whether a hook may change outputs. transformers' own hooks do not: they exist once a call has asked for the outputs
    of layers, and act in such calls only.
    """
    return getattr(hook, "__module__", None) != output_capturing.__name__


def _tree_rows(layer: SlotLayer, nodes: int, slots: Tensor, are_marked: bool) -> TreeRows:
    """
    The slots that a layer of a cache attends to, with room for `nodes` nodes at `slots`. They are marked for
    `torch.compile`, which programs do without.
    """
    keys, values = layer.room(nodes)
    is_static = layer.has_static_slots
    for states in (keys, values) if are_marked else ():
        mark_rows(states, is_static)
    return TreeRows(keys, values, nodes, slots.to(keys.device) - layer.offset if is_static else None)


# The compiled rounds of each target that `compile_rounds` was called for.
compiled: weakref.WeakKeyDictionary[PreTrainedModel, CompiledRounds] = weakref.WeakKeyDictionary()


def compiled_rounds_of(model: PreTrainedModel) -> CompiledRounds | None:
    """The compiled rounds of a target, or `None` if it has none or they would compute other values."""
    rounds = compiled.get(model)
    if rounds is None or rounds.is_row_invariant != is_row_invariant(model):
        return None
    return rounds if rounds.are_exact and rounds.bind() else None


def compiled_passes_of(drafter: Any, target: PreTrainedModel) -> CompiledPasses | None:
    """The compiled passes of a drafter for a target, or `None` if there are none or a weight has changed."""
    rounds = compiled.get(target)
    passes = None if rounds is None else rounds.passes.get(drafter)
    return passes if passes is not None and passes.are_of(drafter, target) else None
