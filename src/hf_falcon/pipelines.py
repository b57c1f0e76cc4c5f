# Copyright 2026 The hf_falcon authors. Licensed under the Apache License, Version 2.0.
"""Drafters in pipelines: `pipeline("text-generation", model=..., assistant_model="user/drafter")`."""

from __future__ import annotations

import functools
import sys
from collections.abc import Sequence
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType
from typing import Any

from transformers import AutoConfig, PreTrainedModel

from .core.configuration_falcon_draft import FalconDraftConfig
from .core.drafter import FalconDraftModel

_MODULE = "transformers.pipelines.base"


def install_in_pipelines() -> None:
    """
    Lets transformers' pipelines take a Falcon drafter, by name or as an object; every other assistant goes on as
    before. transformers itself finds an assistant's class among its own only, and wants a tokenizer with each that is
    named, or whose special tokens are not the target's. A drafter has none: its tokens are the target's.

    A drafter by name is loaded in the target's dtype and on its device, with the token of the environment or of the
    login: transformers does not hand on what a pipeline is given of `token` and `revision`, which are the target's.

    Where transformers' pipelines are not imported yet, this happens when they are: they bring libraries for images
    and sound, which `import hf_falcon` shall not wait for.
    """
    if _MODULE in sys.modules:
        _wrap(sys.modules[_MODULE])
    elif not any(isinstance(finder, _WrapsWhenImported) for finder in sys.meta_path):
        sys.meta_path.insert(0, _WrapsWhenImported())


class _WrapsWhenImported:
    """Finds one module as Python itself does, and wraps its function once it has run."""

    def find_spec(self, name: str, path: Sequence[str] | None, module: ModuleType | None = None) -> ModuleSpec | None:
        if name != _MODULE:
            return None
        sys.meta_path.remove(self)
        spec = PathFinder.find_spec(name, path, module)
        if spec is not None and spec.loader is not None:
            run = spec.loader.exec_module

            def run_and_wrap(module: ModuleType) -> None:
                run(module)
                _wrap(module)

            spec.loader.exec_module = run_and_wrap  # type: ignore[method-assign]
        return spec


def _wrap(pipelines: ModuleType) -> None:
    stock = getattr(pipelines, "load_assistant_model", None)
    # Another version of transformers may have none: then its pipelines stay as they are.
    if stock is None or hasattr(stock, "_is_falcon_hook"):
        return

    @functools.wraps(stock)
    def load_assistant_model(model: PreTrainedModel, assistant_model: Any, assistant_tokenizer: Any) -> tuple:
        if isinstance(assistant_model, str):
            config = AutoConfig.from_pretrained(assistant_model)
            if isinstance(config, FalconDraftConfig):
                assistant_model = FalconDraftModel.from_pretrained(assistant_model, dtype=model.dtype)
                assistant_model = assistant_model.to(model.device).eval()
        if getattr(type(assistant_model), "is_falcon_drafter", False):
            return assistant_model, None
        return stock(model, assistant_model, assistant_tokenizer)

    load_assistant_model._is_falcon_hook = True  # type: ignore[attr-defined]
    pipelines.load_assistant_model = load_assistant_model  # type: ignore[attr-defined]
