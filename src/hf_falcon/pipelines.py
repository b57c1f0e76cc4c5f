# Copyright 2026 The hf_falcon authors. Licensed under the Apache License, Version 2.0.
"""Drafters in transformers' loaders: `pipeline("text-generation", model=..., assistant_model="user/drafter")`."""

from __future__ import annotations

import functools
import os
import sys
from collections.abc import Sequence
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType
from typing import Any, NoReturn

from transformers import AutoModelForCausalLM, GenerationMixin, PreTrainedModel

from .core.configuration_falcon_draft import FalconDraftConfig
from .core.drafter import FalconDraftModel
from .core.hook import DISABLED
from .drafters.auto import AutoDrafter, drafter_class, is_drafter
from .drafters.files import read_object
from .drafters.lookup_drafter import LOOKUP
from .drafters.mtp import MTP
from .drafters.vocabularies import tokenizer_of, vocab_size

_MODULE = "transformers.pipelines.base"


def install_in_pipelines() -> None:
    """
    Makes transformers' pipelines take a drafter, by name or as an object; other assistants load as before.
    Without this, a pipeline looks for the class of an assistant inside transformers only, and demands a tokenizer if
    the assistant is given by name or has other special tokens than the target. A drafter has no tokenizer: its tokens
    are the target's.

    A drafter by name is loaded in the target's dtype and on its device, with the token of the environment or of the
    login. The pipeline's arguments `token` and `revision` are for the target, and transformers does not pass them on.

    If transformers' pipelines are not imported yet, this happens on their import: they import libraries for images
    and sound, which `import hf_falcon` must not wait for.

    `AutoModelForCausalLM.from_pretrained(drafter)` then raises an error that names the class to use.
    """
    AutoModelForCausalLM.register(FalconDraftConfig, _NotACausalLM, exist_ok=True)
    if _MODULE in sys.modules:
        _wrap(sys.modules[_MODULE])
    elif not any(isinstance(finder, _WrapsOnImport) for finder in sys.meta_path):
        sys.meta_path.insert(0, _WrapsOnImport())


def _names_drafter(name: str | os.PathLike[str]) -> bool:
    try:
        return name in (LOOKUP, MTP) or is_drafter(read_object(os.fspath(name), "config.json") or {})
    except ValueError:
        # The configuration of another model may hold what a drafter's may not, such as infinity.
        return False


class _NotACausalLM(FalconDraftModel):
    """The answer of `AutoModelForCausalLM` for a drafter. Without it, transformers lists all classes that it knows."""

    def __init__(self, config: FalconDraftConfig):
        _refuse("The configuration")

    @classmethod
    def from_pretrained(cls, pretrained_model_name_or_path: Any, *args: Any, **kwargs: Any) -> NoReturn:
        _refuse(f"`{pretrained_model_name_or_path}`")


def _refuse(subject: str) -> NoReturn:
    raise TypeError(
        f"{subject} is of a Falcon drafter, not of a language model: load the drafter with "
        "`FalconDraftModel.from_pretrained` or `AutoModel.from_pretrained`, and give it to the target: "
        "`target.generate(**inputs, assistant_model=drafter)`."
    )


class _WrapsOnImport:
    """
    An import hook for one module. It finds the module as Python itself does, and wraps its function after the module
    has run. A search alone (`importlib.util.find_spec`) does not use it up.
    """

    def find_spec(self, name: str, path: Sequence[str] | None, module: ModuleType | None = None) -> ModuleSpec | None:
        spec = PathFinder.find_spec(name, path, module) if name == _MODULE else None
        if spec is not None and spec.loader is not None:
            run = spec.loader.exec_module

            def run_and_wrap(module: ModuleType) -> None:
                run(module)
                _wrap(module)
                if self in sys.meta_path:
                    sys.meta_path.remove(self)

            spec.loader.exec_module = run_and_wrap  # type: ignore[method-assign]
        return spec


def _wrap(pipelines: ModuleType) -> None:
    stock = getattr(pipelines, "load_assistant_model", None)
    # `load_assistant_model` has no underscore, but no documentation either. If a version of transformers lacks it, its
    # pipelines stay as they are, and take a drafter that has the target's special tokens, as an object.
    if stock is None or hasattr(stock, "_is_falcon_hook"):
        return

    @functools.wraps(stock)
    def load_assistant_model(model: PreTrainedModel, assistant_model: Any, assistant_tokenizer: Any) -> tuple:
        name = assistant_model if isinstance(assistant_model, (str, os.PathLike)) else None
        if name is not None and not getattr(GenerationMixin, DISABLED, False) and _names_drafter(name):
            try:
                assistant_model = AutoDrafter.from_pretrained(name, model.dtype, model).to(model.device)
            except OSError:
                # A language model that has no safetensors files is left to transformers.
                if not drafter_class(os.fspath(name)).reads_tokenizers:
                    raise
        if getattr(type(assistant_model), "is_falcon_drafter", False):
            # A language model as the drafter may have other tokens.
            reads = getattr(type(assistant_model), "reads_tokenizers", False)
            if reads and assistant_tokenizer is None:
                assistant_tokenizer = assistant_model.tokenizer
                if assistant_tokenizer is None and vocab_size(model) != vocab_size(assistant_model.model):
                    found = tokenizer_of(assistant_model.model)
                    assistant_tokenizer = None if isinstance(found, str) else found
            return assistant_model, assistant_tokenizer if reads else None
        return stock(model, assistant_model if name is None else os.fspath(name), assistant_tokenizer)

    load_assistant_model._is_falcon_hook = True  # type: ignore[attr-defined]
    pipelines.load_assistant_model = load_assistant_model  # type: ignore[attr-defined]
