# Copyright 2026 The hf_falcon authors. Licensed under the Apache License, Version 2.0.
"""
Private names of transformers that the package uses outside the core; core/hook.py has the others. The docstring of
each function says what happens if a version of transformers lacks the name.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from transformers import AttentionInterface, GenerationConfig, LogitsProcessor, PreTrainedModel
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from .core.hook import private_name

try:
    from transformers.integrations.sdpa_attention import sdpa_attention_forward
except ImportError:
    # Attention is then never replaced, which only costs time.
    sdpa_attention_forward = None


def takes_static_cache(model: PreTrainedModel) -> bool:
    """
    Whether a model's forward supports a static cache, which writes in place. If transformers has no such mark, no
    model counts as supporting it, and `generate` uses the slower default cache.
    """
    return getattr(model, "_can_compile_fullgraph", False)


def prompt_positions(model: PreTrainedModel, input_ids: Tensor, model_kwargs: dict[str, Any]) -> dict[str, Tensor]:
    """
    The argument of a prompt's positions, as `generate` adds it to the others. There is none where the model takes
    none, or if transformers lacks the name: the model then counts by itself.
    """
    prepare = getattr(model, "_prepare_position_ids_for_generation", None)
    if prepare is None or "position_ids" not in inspect.signature(model.forward).parameters:
        return {}
    return {"position_ids": prepare(input_ids, model_kwargs)}


def allowed_tokens_function(processor: LogitsProcessor) -> Callable[[int, Tensor], list[int]]:
    """
    The function that a [`~transformers.PrefixConstrainedLogitsProcessor`] asks for the allowed tokens of a row. If the
    processor keeps it under another name, an error says so.
    """
    return private_name(processor, "_prefix_allowed_tokens_fn", "apply `prefix_allowed_tokens_fn` to a batch")


def beams_of(processor: LogitsProcessor) -> int:
    """
    How many rows each prompt has for such a processor; 1 if transformers keeps no such number.
    """
    return getattr(processor, "_num_beams", 1)


def attention_function(name: str | None) -> Any:
    """The attention function of a name, or `None`; transformers' own where this package has replaced it meanwhile."""
    found = ALL_ATTENTION_FUNCTIONS.get(name)
    is_ours = str(getattr(found, "__module__", "")).partition(".")[0] == __name__.partition(".")[0]
    return sdpa_attention_forward if is_ours else found


def experts_implementation(config: Any) -> str | None:
    """
    How a mixture of experts multiplies; `None` if the target has none, or this version of transformers only one way.
    """
    return getattr(config, "_experts_implementation", None)


def add_field(parser: Any, field: Any) -> None:
    """
    Adds a field of a data class to a parser as [`~transformers.HfArgumentParser`] does, which has no public method for
    a single one. If transformers has none of this name, the commands that train end in an error that says so.
    """
    from transformers import HfArgumentParser

    private_name(HfArgumentParser, "_parse_dataclass_field", "read the arguments of Trainer")(parser, field)


def without_mark_of_origin(fields: dict[str, Any]) -> dict[str, Any]:
    """
    The fields of a generation configuration's file without the mark that they come from the model's configuration:
    with it transformers drops fields that it does not know. A version without this mark keeps them.
    """
    return {name: value for name, value in fields.items() if name != "_from_model_config"}


def leave_past_recording(layer: Any) -> None:
    """
    Undoes `Cache.activate_past_recording` for one layer, which transformers has no method for. If it stays on, the
    next forward without a crop fails in transformers 5.17. Layers without the attribute record nothing.
    """
    if getattr(layer, "record_past", False):
        layer.record_past = False


def pad_token(generation_config: GenerationConfig) -> Tensor | None:
    """
    The token that fills up the rows of a batch that ended early, as `generate` prepared it. If transformers does not
    prepare it under this name, it is the field `pad_token_id`.
    """
    prepared = getattr(generation_config, "_pad_token_tensor", None)
    if prepared is None and generation_config.pad_token_id is not None:
        return torch.tensor(generation_config.pad_token_id, device="cpu")
    return prepared


def replace_sdpa(old: Callable[..., Any] | None, new: Callable[..., Any]) -> bool:
    """
    Makes `new` the attention function "sdpa" of all models, if it is `old` now, and returns whether it did. Another
    library may have replaced it, and is left alone. The name is never absent in between: other threads look it up at
    the same time. Both have the interface of [`sdpa_attention_forward`].
    """
    if old is None or AttentionInterface().get("sdpa") is not old:
        return False
    AttentionInterface.register("sdpa", new)
    return True
