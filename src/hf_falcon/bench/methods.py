# Copyright 2026 The hf_falcon authors. Licensed under the Apache License, Version 2.0.
"""The ways to decode that a benchmark knows, each as the arguments that it gives to `generate`."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from transformers import PreTrainedModel

from ..modeling_falcon_draft import FalconDraftModel


@dataclass
class Models:
    """
    What methods decode with.

    Args:
        target ([`PreTrainedModel`]): the target.
        drafter ([`FalconDraftModel`]): its drafter.
        eagle_like ([`FalconDraftModel`], *optional*): a drafter of one token a pass without an LSTM.
        medusa_like ([`MedusaLikeModel`], *optional*): a drafter in the manner of Medusa.
        draft_model ([`PreTrainedModel`], *optional*): a smaller language model with the target's tokenizer.
    """

    target: PreTrainedModel
    drafter: FalconDraftModel
    eagle_like: FalconDraftModel | None = None
    medusa_like: FalconDraftModel | None = None
    draft_model: PreTrainedModel | None = None


class NotAvailable(ValueError):
    """A method cannot run here; the message says why and what it needs."""


def _falcon(models: Models) -> dict[str, Any]:
    return {"assistant_model": models.drafter}


def _falcon_static(models: Models) -> dict[str, Any]:
    return {"assistant_model": _with_options(models.drafter, draft_tree="static", assistant_confidence_threshold=0.0)}


def _falcon_chain(models: Models) -> dict[str, Any]:
    return {"assistant_model": _with_options(models.drafter, draft_top_k=1)}


def _eagle_like(models: Models) -> dict[str, Any]:
    drafter = models.eagle_like or models.drafter
    config = drafter.config
    if config.block_size != 1 or config.num_lstm_layers != 0:
        raise NotAvailable(
            f"the drafter has `block_size` {config.block_size} and {config.num_lstm_layers} LSTM layers: give one "
            "with 1 and none as `eagle_like`"
        )
    return {"assistant_model": _with_options(drafter, draft_tree="static", assistant_confidence_threshold=0.0)}


def _medusa_like(models: Models) -> dict[str, Any]:
    if models.medusa_like is None:
        raise NotAvailable("no drafter is given as `medusa_like`")
    return {"assistant_model": _with_options(models.medusa_like, draft_tree="static")}


def _early_exit(models: Models) -> dict[str, Any]:
    layers = models.target.config.get_text_config(decoder=True).num_hidden_layers
    return {"assistant_early_exit": max(1, 2 * layers // 3)}


def _draft_model(models: Models) -> dict[str, Any]:
    if models.draft_model is None:
        raise NotAvailable("no smaller language model is given as `draft_model`")
    return {"assistant_model": models.draft_model}


METHODS: dict[str, Callable[[Models], dict[str, Any]]] = {
    "plain": lambda models: {},
    "prompt_lookup": lambda models: {"prompt_lookup_num_tokens": 3},
    "prompt_lookup_8": lambda models: {"prompt_lookup_num_tokens": 8},
    "early_exit": _early_exit,
    "draft_model": _draft_model,
    "eagle_like": _eagle_like,
    "medusa_like": _medusa_like,
    "falcon_chain": _falcon_chain,
    "falcon_static": _falcon_static,
    "falcon": _falcon,
}


def resolve(names: list[str], models: Models) -> tuple[dict[str, dict[str, Any]], dict[str, str]]:
    """
    The arguments of each method.

    Returns:
        Those of the methods that can run, by name, and why the others cannot.

    Raises:
        `ValueError`: for a name that is no method's.
    """
    found, absent = {}, {}
    for name in names:
        if name not in METHODS:
            raise ValueError(f"`methods` has {name!r}: choose of {', '.join(METHODS)}.")
        try:
            found[name] = METHODS[name](models)
        except NotAvailable as error:
            absent[name] = str(error)
    return found, absent


def _with_options(drafter: FalconDraftModel, **options: Any) -> FalconDraftModel:
    """The same drafter, weights and all, with other drafting options."""
    other = copy.copy(drafter)
    other.generation_config = copy.deepcopy(drafter.generation_config)
    for name, value in options.items():
        setattr(other.generation_config, name, value)
    return other
