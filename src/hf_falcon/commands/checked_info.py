# Copyright 2026 The hf_falcon authors. Licensed under the Apache License, Version 2.0.
"""
Describes a checkpoint by the classes that would load it, and so with all their checks. It imports torch and
transformers: `hf-falcon info` does so for language models, and for what `plain_info.py` leaves to the checks.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from transformers import AutoConfig
from transformers import initialization as init

from ..core.configuration_falcon_draft import FalconDraftConfig
from ..core.drafter import FalconDraftModel
from ..drafters.auto import drafter_class
from ..drafters.checkpoints import read_fields
from ..drafters.files import pinned
from ..drafters.language_model import CausalLMDrafter
from ..public import AutoDrafter  # noqa: F401 - on the command line, nothing else has installed the checks
from .at_hand import at_hand
from .checkpoint_listing import Headers
from .plain_info import LANGUAGE_MODEL, METHODS, number_of_weights

# Describes a checkpoint; called with what reads the headers of its files.
Description = Callable[[Callable[[], Headers]], dict[str, Any]]


def opened(repository: str, revision: str | None) -> tuple[str | None, Description]:
    """
    Checks which method a checkpoint is of.

    Args:
        repository, revision: see [`describe`].

    Returns:
        The commit that was chosen from, `None` for a folder; and what describes the checkpoint.

    Raises:
        `ValueError`: if it is of no method that is known, or its `config.json` is damaged.
        `OSError`: if there is none.
    """
    revision = pinned(repository, revision=revision)["revision"]
    kind, fields = drafter_class(repository, revision=revision), read_fields(repository, revision=revision)

    def about(headers: Callable[[], Headers]) -> dict[str, Any]:
        if issubclass(kind, CausalLMDrafter):
            return _of_language_model(fields, headers())
        if issubclass(kind, FalconDraftModel):
            return _of_falcon(FalconDraftConfig.from_pretrained(repository, revision=revision))
        return _of_another(kind, fields, headers())

    return revision, about


def what_drafts_for(repository: str, revision: str | None) -> dict[str, str]:
    """See [`at_hand`]; for a repository."""
    revision = pinned(repository, revision=revision)["revision"]
    return at_hand(AutoConfig.from_pretrained(repository, revision=revision), repository)


def _of_falcon(config: FalconDraftConfig) -> dict[str, Any]:
    with torch.device("meta"), init.no_init_weights():
        parameters = FalconDraftModel(config).num_parameters()
    return {
        "method": "Falcon",
        "layout": "hf_falcon",
        "target": config.target_name_or_path,
        "target_model_type": config.target_model_type,
        "k": config.block_size,
        "vocab_size": config.vocab_size,
        "draft_vocab_size": config.draft_vocab_size,
        "feature_layers": config.feature_layers,
        "parameters": parameters,
    }


def _of_language_model(fields: dict[str, Any], headers: Headers) -> dict[str, Any]:
    return {
        "method": LANGUAGE_MODEL,
        "layout": "hf_falcon",
        "target": None,
        "target_model_type": None,
        "k": 1,
        "vocab_size": fields.get("vocab_size") or (fields.get("text_config") or {}).get("vocab_size") or 0,
        "draft_vocab_size": None,
        "feature_layers": [],
        "parameters": sum(math.prod(shape) for _, shape in headers.values()) if headers else None,
    }


def _of_another(kind: Any, fields: dict[str, Any], headers: Headers) -> dict[str, Any]:
    shapes = {name: torch.empty(shape, device="meta") for name, (_, shape) in headers.items()}
    config = kind.config_of(fields, shapes)
    ids = getattr(config, config.layer_ids_field)
    return {
        "method": METHODS[config.to_dict()["speculators_model_type"]],
        "layout": "speculators" if "speculators_model_type" in fields else "original",
        "target": config.target_name_or_path,
        "target_model_type": ", ".join(config.target_architectures) or None,
        "k": config.block_size,
        "vocab_size": config.vocab_size,
        "draft_vocab_size": None if config.draft_vocab_size == config.vocab_size else config.draft_vocab_size,
        "feature_layers": None if ids is None else config.feature_layers,
        "parameters": number_of_weights(headers),
    }
