# Copyright 2026 The hf_falcon authors. Licensed under the Apache License, Version 2.0.
"""What the probe finds for a target and a prompt, without a call of `generate`."""

from __future__ import annotations

import inspect
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache, LogitsProcessorList, PreTrainedModel, StoppingCriteriaList

from .core.hook import makes_own_cache
from .core.probe import Verdict, positions_of, verdict_of_call
from .core.target_parts import CACHE_NAME


def verdict_of_prompt(model: PreTrainedModel, input_ids: Tensor, attention_mask: Tensor | None = None) -> Verdict:
    """
    What is verified after a prompt with the target's own generation configuration; see [`verdict_of_call`].

    Args:
        model ([`PreTrainedModel`]): the target.
        input_ids, attention_mask (`torch.LongTensor` of shape `(batch, length)`): the prompt.
    """
    takes = inspect.signature(model.forward).parameters
    kwargs: dict[str, Any] = {"use_cache": True}
    if CACHE_NAME in takes and not model.config.is_encoder_decoder and not makes_own_cache(model):
        kwargs[CACHE_NAME] = DynamicCache(config=model.config.get_text_config(decoder=True))
    if attention_mask is not None and not bool(attention_mask.all()):
        kwargs["attention_mask"] = attention_mask
    if "position_ids" in takes:
        kwargs["position_ids"] = positions_of(torch.ones_like(input_ids) if attention_mask is None else attention_mask)
    return verdict_of_call(
        model, input_ids, LogitsProcessorList(), StoppingCriteriaList(), model.generation_config, kwargs
    )
