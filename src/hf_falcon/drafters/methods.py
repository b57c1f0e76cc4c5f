# Copyright 2026 The hf_falcon authors. Licensed under the Apache License, Version 2.0.
"""Which method a drafter is of, by the fields of its `config.json`; without torch and transformers."""

from __future__ import annotations

from typing import Any

Fields = dict[str, Any]


def is_falcon(fields: Fields) -> bool:
    """Whether the fields of a `config.json` are of a Falcon drafter."""
    return fields.get("model_type") == "falcon_draft"


def is_eagle3(fields: Fields) -> bool:
    """Whether they are of an EAGLE-3 drafter, in any layout."""
    if "speculators_model_type" in fields:
        return fields["speculators_model_type"] == "eagle3"
    # The first ones published name the class of their layers only.
    return any("eagle3" in name.lower() for name in architectures(fields)) or (
        "draft_vocab_size" in fields and fields.get("model_type") == "llama"
    )


def is_dflash(fields: Fields) -> bool:
    """Whether they are of a DFlash or DSpark drafter, in any layout."""
    if "speculators_model_type" in fields:
        return fields["speculators_model_type"] in ("dflash", "dspark")
    return not {"DFlashDraftModel", "Qwen3DSparkModel"}.isdisjoint(architectures(fields))


def architectures(fields: Fields) -> list[str]:
    """The names of classes in the fields of a `config.json`."""
    names = fields.get("architectures")
    return [str(name) for name in names] if isinstance(names, list) else []
