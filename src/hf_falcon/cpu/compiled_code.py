# Copyright 2026 The hf_falcon authors. Licensed under the Apache License, Version 2.0.
"""Functions that `torch.compile` compiles ahead of time. Nothing is compiled while text is generated."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import CompileConfig

from .joined_weights import one_product_each
from .kept_programs import Shelf
from .programs import CannotBeBuilt, Program, build, flattened, kind_of, tensors_of
from .row_invariant import RowInvariantForward
from .tile_blocks import teach_compiler, tiles_pay


class CompiledCode:
    """
    A function that is compiled for the arguments of its call inside [`CompiledCode.compiling`]. A later call runs
    uncompiled if its arguments differ in more than the sizes that are marked as dynamic.

    Args:
        function (`Callable`): the function to compile.
        compile_config ([`CompileConfig`]): backend, mode and options for `torch.compile`.
        is_row_invariant (`bool`, *optional*, defaults to `False`):
            Whether it is for a target inside [`row_invariant`]: it then rounds as uncompiled code does.
    """

    def __init__(self, function: Callable[..., Any], compile_config: CompileConfig, is_row_invariant: bool = False):
        config = compile_config.to_dict() | {"fullgraph": True, "dynamic": False}
        mode, options = config.pop("mode"), dict(config.pop("options") or {})
        if config["backend"] == "inductor":
            if mode not in (None, "default"):
                # torch accepts a mode or options, not both: these are the options of the mode.
                options = torch._inductor.list_mode_options(mode) | options
            options = _options(is_row_invariant) | options
        options["guard_filter_fn"] = _kept_guards
        self._run = torch.compile(_with_its_own_code(function), **config, options=options)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._run(*args, **kwargs)

    @contextmanager
    def compiling(self) -> Iterator[None]:
        """Inside, a call is compiled. Outside, no call is."""
        try:
            yield
        finally:
            self._run = torch._dynamo.run(self._run)


class BuiltCode:
    """
    A function of a module that is compiled ahead of time, in programs that stay on disk; see [`Program`]. A call runs
    uncompiled if its arguments differ from those of the two calls inside [`BuiltCode.compiling`] in more than the
    sizes in which these two differ.

    Args:
        function (`Callable`): the function. Its first argument is the module.
        shelf ([`Shelf`]): where the programs are.
        name (`str`): the name of the function there.
    """

    def __init__(self, function: Callable[..., Any], shelf: Shelf, name: str):
        self._function, self._shelf, self._name = function, shelf, name
        # By the kind of module.
        self._programs: dict[str, Program] = {}
        # Weak, as the modules are of models that the code is kept for.
        self._kinds: weakref.WeakKeyDictionary[nn.Module, str] = weakref.WeakKeyDictionary()
        # The programs of modules, and the modules' tensors of now.
        self._bound: weakref.WeakKeyDictionary[nn.Module, tuple[Program, list[Tensor]]] = weakref.WeakKeyDictionary()
        # Arguments of the first calls, while code is compiled.
        self._examples: dict[nn.Module, tuple[tuple[Any, ...], dict[str, Any]]] | None = None
        self._check: Callable[[Any, Any], None] | None = None

    def __call__(self, module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        if self._examples is not None:
            self._see(module, args, kwargs)
        elif (bound := self._bound.get(module)) is not None:
            (program, own), tensors = bound, list[Tensor]()
            try:
                is_for_it = flattened([args, kwargs], tensors) == program.remainder and program.fits(tensors)
            except CannotBeBuilt:
                is_for_it = False
            if is_for_it:
                found = program([*own, *tensors])
                if self._check is None:
                    return found
                self._check(found, expected := self._function(module, *args, **kwargs))
                return expected
        return self._function(module, *args, **kwargs)

    @contextmanager
    def checking(self, check: Callable[[Any, Any], None]) -> Iterator[None]:
        """
        Inside, `check` gets what the program returns in each call, and what the function does. Every layer gets the
        right inputs, so rounding does not add up over the layers.
        """
        self._check = check
        try:
            yield
        finally:
            self._check = None

    @contextmanager
    def compiling(self) -> Iterator[None]:
        """Inside, the second call for a module compiles its program, if no module of its kind has one. Both calls run
        uncompiled. Every module is called once before the first is called again."""
        self._examples = {}
        try:
            yield
        finally:
            self._examples = None

    def load(self, kinds: Mapping[nn.Module, str]) -> bool:
        """Loads the programs of modules, which are of these kinds; returns whether they are all there."""
        for module, kind in kinds.items():
            self._kinds[module] = kind
            if kind not in self._programs:
                program = self._shelf.load(f"{self._name}-{kind}")
                if program is None:
                    return False
                self._programs[kind] = program
        return True

    def bind(self, tensors: dict[nn.Module, list[Tensor]]) -> bool:
        """
        Takes the current tensors of all modules; returns whether the programs can read them.

        Args:
            tensors (`dict[torch.nn.Module, list[torch.Tensor]]`): those of modules that are known; others are added.
        """
        bound: weakref.WeakKeyDictionary[nn.Module, tuple[Program, list[Tensor]]] = weakref.WeakKeyDictionary()
        for module, kind in self._kinds.items():
            if module not in tensors:
                tensors[module] = tensors_of(module)
            program, own = self._programs.get(kind), tensors[module]
            if program is None or not program.suits(own):
                return False
            bound[module] = program, own
        self._bound = bound
        return True

    def unbind(self) -> None:
        """Undoes `bind`: the tensors can be freed."""
        self._bound = weakref.WeakKeyDictionary()

    def _see(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        assert self._examples is not None
        kind = self._kinds[module] = kind_of(module)
        if module not in self._examples:
            self._examples[module] = args, kwargs
        elif kind not in self._programs:
            peers = [other for other in self._examples if self._kinds[other] == kind and other is not module]
            examples = [self._examples[module], (args, kwargs)]
            options = {
                **_options(is_row_invariant=False),
                "cpp.dynamic_threads": True,
                "aot_inductor.compile_wrapper_opt_level": "O0",
            }

            def write(file: Path) -> dict[str, Any]:
                try:
                    return build(self._function, module, examples, options, file, peers[-1:])
                except CannotBeBuilt:
                    raise
                except Exception as error:
                    raise CannotBeBuilt(f"{type(error).__name__}: {error}") from error

            self._programs[kind] = self._shelf.save(f"{self._name}-{kind}", write)


def captures_graphs(device: torch.device) -> bool:
    """
    Whether compiled code runs as captured graphs (CUDA graphs), which need static shapes and addresses. On a CPU,
    attention over unused slots would only take time.
    """
    return device.type == "cuda"


def write_rows(rows: tuple[Tensor, Tensor], new: tuple[Tensor, Tensor], count: int, slots: Tensor | None) -> None:
    """
    Writes the `count` new keys and values of a compiled forward into `rows`, both of shape
    `(1, heads, rows, head_dim)`: at the end, or at `slots`.
    """
    for states, latest in zip(rows, new):
        if slots is None:
            states[:, :, -count:] = latest
        else:
            states.index_copy_(2, slots, latest)


def mark_rows(states: Tensor, are_static: bool) -> None:
    """Marks keys or values of shape `(1, heads, rows, head_dim)` for compiled code: the rows may be any number."""
    torch._dynamo.maybe_mark_dynamic(states, 2)
    if are_static:
        # A captured graph reads and writes them where they are, and is captured anew for other buffers.
        torch._dynamo.mark_static_address(states, guard=False)


def _with_its_own_code(function: Callable[..., Any]) -> Callable[..., Any]:
    """
    Gives a function a code object of its own. `torch.compile` stores compiled versions with the code object, and only
    a few for each; the forwards of all models of transformers share the same outermost code object.
    """

    def compiled_function(*args: Any, **kwargs: Any) -> Any:
        return function(*args, **kwargs)

    compiled_function.__code__ = compiled_function.__code__.replace()
    return compiled_function


def _kept_guards(entries: Sequence[Any]) -> list[bool]:
    """
    Drops guards of `torch.compile` that would only keep code from being used: those on global tables of transformers,
    which other models add entries to, and those on which object the forward of a linear layer inside
    [`row_invariant`] is. Each layer has its own there, and layers share code; its class and its number of rows count.
    """
    kept = torch.compiler.skip_guard_on_globals_unsafe(entries)
    own = (isinstance(each.value, RowInvariantForward) and each.guard_type == "CLOSURE_MATCH" for each in entries)
    return [keep and not is_own for keep, is_own in zip(kept, own)]


def _options(is_row_invariant: bool) -> dict[str, Any]:
    """
    Options for the loops of compact weights: fused multiply-add, and at most as many sums a loop as registers. For
    joined weights a pass over the graph. And inside [`row_invariant`] each operation rounds as it does uncompiled.
    """
    flag = "cpp.enable_floating_point_contract_flag"
    known = torch._inductor.config.get_config_copy()
    # In earlier versions of torch the flag is a `bool`.
    options: dict[str, Any] = {flag: "fast" if isinstance(known[flag], str) else True, "max_fusion_size": 16}
    if tiles_pay() and not is_row_invariant:
        teach_compiler()
        # A product has a part for each core; without this also a thread of its own for each part.
        options["cpp.dynamic_threads"] = True
    # Earlier versions of torch do not have it: what is compiled then rounds differently, and does not run inside.
    if is_row_invariant and "emulate_precision_casts" in known:
        options["emulate_precision_casts"] = True
    return options | {"post_grad_custom_pre_pass": one_product_each(is_row_invariant)}
