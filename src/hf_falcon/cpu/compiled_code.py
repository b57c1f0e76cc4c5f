# Copyright 2026 The hf_falcon authors. Licensed under the Apache License, Version 2.0.
"""Code that `torch.compile` makes ahead of time: nothing is compiled while text is generated."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from transformers import CompileConfig


class CompiledCode:
    """
    A function, compiled for what it is called with inside [`CompiledCode.compiling`]. Where a later call differs from
    that, in more than sizes that are marked as dynamic, it runs uncompiled.

    Args:
        function (`Callable`): what is compiled.
        compile_config ([`CompileConfig`]): backend, mode and options for `torch.compile`.
    """

    def __init__(self, function: Callable[..., Any], compile_config: CompileConfig):
        config = compile_config.to_dict() | {"fullgraph": True, "dynamic": False}
        mode, options = config.pop("mode"), dict(config.pop("options") or {})
        if config["backend"] == "inductor":
            if mode not in (None, "default"):
                # torch takes a mode or options, and these are what a mode stands for.
                options = torch._inductor.list_mode_options(mode) | options
            options = _options() | options
        # Tables of transformers' that any other model adds to are no reason to drop what is compiled.
        options["guard_filter_fn"] = torch.compiler.skip_guard_on_globals_unsafe
        self._run = torch.compile(_with_its_own_code(function), **config, options=options)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._run(*args, **kwargs)

    @contextmanager
    def compiling(self) -> Iterator[None]:
        """Inside, a call is compiled; elsewhere none is."""
        try:
            yield
        finally:
            self._run = torch._dynamo.run(self._run)


def _with_its_own_code(function: Callable[..., Any]) -> Callable[..., Any]:
    """
    A function that `torch.compile` compiles apart from others: it keeps what it compiled with the code, of which it
    takes a few versions only, and all models of transformers have the outermost code of their forwards in common.
    """

    def compiled_function(*args: Any, **kwargs: Any) -> Any:
        return function(*args, **kwargs)

    compiled_function.__code__ = compiled_function.__code__.replace()
    return compiled_function


def _options() -> dict[str, Any]:
    """For the loops of compact weights: to multiply and add at once, and no more sums in one than registers hold."""
    flag = "cpp.enable_floating_point_contract_flag"
    # Earlier versions of torch know yes and no.
    is_named = isinstance(torch._inductor.config.get_config_copy()[flag], str)
    return {flag: "fast" if is_named else True, "max_fusion_size": 16}
