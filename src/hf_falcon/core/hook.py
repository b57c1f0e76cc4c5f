# Copyright 2026 The hf_falcon authors. Licensed under the Apache License, Version 2.0.
"""The hook that makes `generate(assistant_model=drafter)` work: transformers has no plug-in point for it."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from transformers import GenerationConfig, GenerationMixin
from transformers.generation.configuration_utils import GenerationMode

# Set on the wrappers, so that two copies of this file (the installed package, code from the Hub) wrap once.
_MARK = "_is_falcon_hook"
# Its value: what the wrappers can do. The newer of two copies wraps, and must serve the drafters of every older one:
# each drafter brings its own decoding loop, so all that they share is how the hook finds and calls it.
_VERSION = 2
_disabled = False


def install() -> None:
    """
    Lets transformers' assisted decoding hand Falcon drafters to their own decoding loop; every other assistant goes
    on as before. Runs on import and when a drafter is made. Does nothing after [`disable`], or where another copy of
    this code, as new or newer, was first.
    """
    for name, wrap in _WRAPPERS.items():
        stock = getattr(GenerationMixin, name)
        installed = int(getattr(stock, _MARK, 0))
        if _disabled or installed >= _VERSION:
            continue
        if installed:
            stock = stock.__wrapped__
        # `wraps`, as `generate` reads the signature.
        wrapper = functools.wraps(stock)(wrap(stock))
        setattr(wrapper, _MARK, _VERSION)
        setattr(GenerationMixin, name, wrapper)


def enable() -> None:
    """Undoes [`disable`]."""
    global _disabled
    _disabled = False
    install()


def disable() -> None:
    """Gives transformers its own assisted decoding back, for every drafter, until [`enable`]."""
    global _disabled
    _disabled = True
    for name in _WRAPPERS:
        if getattr(getattr(GenerationMixin, name), _MARK, False):
            setattr(GenerationMixin, name, getattr(GenerationMixin, name).__wrapped__)


def _is_drafter(assistant: Any) -> bool:
    return assistant is not None and getattr(type(assistant), "is_falcon_drafter", False)


def _with_drafters(stock: Callable[..., Any]) -> Callable[..., Any]:
    def assisted_decoding(self: Any, *args: Any, **kwargs: Any) -> Any:
        assistant: Any = kwargs.get("assistant_model")
        if not _is_drafter(assistant):
            return stock(self, *args, **kwargs)
        for name in ("assistant_model", "assistant_tokenizer", "tokenizer", "inputs_tensor"):
            kwargs.pop(name, None)
        return assistant.assisted_decoding(self, *args, **kwargs)

    return assisted_decoding


def _without_limits(stock: Callable[..., Any]) -> Callable[..., Any]:
    """A drafter takes what plain decoding takes: several sequences a prompt, targets that keep a recurrent state."""

    def validate(self: Any, mode: GenerationMode, config: GenerationConfig, kwargs: dict[str, Any]) -> None:
        if mode == GenerationMode.ASSISTED_GENERATION and _is_drafter(kwargs.get("assistant_model")):
            mode = GenerationMode.SAMPLE if config.do_sample else GenerationMode.GREEDY_SEARCH
            # A drafter says better what target it is for; a tokenizer of its own is refused here.
            if "assistant_tokenizer" not in kwargs:
                kwargs = {name: value for name, value in kwargs.items() if name != "assistant_model"}
        stock(self, mode, config, kwargs)

    return validate


_WRAPPERS = {"_assisted_decoding": _with_drafters, "_validate_generation_mode": _without_limits}
