# Copyright 2026 The hf_falcon authors. Licensed under the Apache License, Version 2.0.
"""Drafters in pipelines: `pipeline("text-generation", model=..., assistant_model="user/drafter")`."""

from __future__ import annotations

import functools
from typing import Any

from transformers import AutoConfig, PreTrainedModel
from transformers.pipelines import base

from .configuration_falcon_draft import FalconDraftConfig
from .modeling_falcon_draft import FalconDraftModel


def install_in_pipelines() -> None:
    """
    Lets transformers' pipelines take a Falcon drafter, by name or as an object; every other assistant goes on as
    before. transformers itself finds an assistant's class among its own only, and wants a tokenizer with each that is
    named, or whose special tokens are not the target's. A drafter has none: its tokens are the target's.

    A drafter by name is loaded in the target's dtype and on its device, with the token of the environment or of the
    login: transformers does not hand on what a pipeline is given of `token` and `revision`, which are the target's.
    """
    stock = base.load_assistant_model
    if hasattr(stock, "_is_falcon_hook"):
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
    base.load_assistant_model = load_assistant_model
