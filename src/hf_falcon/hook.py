# Copyright 2026 The hf_falcon authors. Licensed under the Apache License, Version 2.0.
"""The hook that makes `generate(assistant_model=drafter)` work: transformers has no plug-in point for it."""

from __future__ import annotations

import functools
from typing import Any

from transformers import GenerationMixin

# Set on the wrapper, so that two copies of this file (the installed package, code from the Hub) wrap once.
_MARK = "_is_falcon_hook"
# Its value: what the wrapper can do. The newer of two copies wraps, and must serve the drafters of every older one:
# each drafter brings its own decoding loop, so all that they share is how the hook finds and calls it.
_VERSION = 1
_disabled = False


def install() -> None:
    """
    Lets transformers' assisted decoding hand Falcon drafters to their own decoding loop; every other assistant goes
    on as before. Runs on import and when a drafter is made. Does nothing after [`disable`], or where another copy of
    this code, as new or newer, was first.
    """
    stock = GenerationMixin._assisted_decoding
    installed = int(getattr(stock, _MARK, 0))
    if _disabled or installed >= _VERSION:
        return
    if installed:
        stock = stock.__wrapped__

    # `wraps`, as `generate` reads the signature.
    @functools.wraps(stock)
    def assisted_decoding(self: Any, *args: Any, **kwargs: Any) -> Any:
        assistant = kwargs.get("assistant_model")
        if assistant is None or not getattr(type(assistant), "is_falcon_drafter", False):
            return stock(self, *args, **kwargs)
        for name in ("assistant_model", "assistant_tokenizer", "tokenizer", "inputs_tensor"):
            kwargs.pop(name, None)
        return assistant.assisted_decoding(self, *args, **kwargs)

    setattr(assisted_decoding, _MARK, _VERSION)
    GenerationMixin._assisted_decoding = assisted_decoding


def enable() -> None:
    """Undoes [`disable`]."""
    global _disabled
    _disabled = False
    install()


def disable() -> None:
    """Gives transformers its own assisted decoding back, for every drafter, until [`enable`]."""
    global _disabled
    _disabled = True
    if getattr(GenerationMixin._assisted_decoding, _MARK, False):
        GenerationMixin._assisted_decoding = GenerationMixin._assisted_decoding.__wrapped__
