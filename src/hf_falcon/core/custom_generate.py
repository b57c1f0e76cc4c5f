# Copyright 2026 The hf_falcon authors. Licensed under the Apache License, Version 2.0.
"""
`target.generate(**inputs, custom_generate=repository, trust_remote_code=True)`: decoding with the drafter of a
repository. This file is `custom_generate/generate.py` in the repository.
"""

from __future__ import annotations

import inspect
import weakref
from typing import Any

import torch
from transformers import AutoModel, PreTrainedModel

# The arguments for reading a repository that `generate` passes on.
_LOADING = ("revision", "token", "cache_dir", "force_download", "local_files_only", "proxies")
# The last drafter of each target. It is loaded once, and freed with its target.
_drafters: weakref.WeakKeyDictionary[PreTrainedModel, tuple[Any, PreTrainedModel]] = weakref.WeakKeyDictionary()


def generate(model: PreTrainedModel, **kwargs: Any) -> Any:
    """
    `model.generate(assistant_model=drafter, **kwargs)` with the repository's drafter, in the target's dtype and on its
    device. `revision`, `token`, `cache_dir`, `force_download`, `local_files_only` and `proxies` are for loading it.

    Args:
        model ([`PreTrainedModel`]): the target, whose `generate` was called.
        kwargs: the arguments of that call. An `assistant_model` among them replaces the repository's drafter.
    """
    loading = {name: kwargs.pop(name) for name in _LOADING if name in kwargs}
    drafter = kwargs.pop("assistant_model", None)
    if drafter is None:
        drafter = _load(model, _repository(), loading)
    return model.generate(assistant_model=drafter, **kwargs)


# Later calls use it outside of inference mode, too.
@torch.inference_mode(False)
def _load(model: PreTrainedModel, repository: str, loading: dict[str, Any]) -> PreTrainedModel:
    wanted = (repository, loading.get("revision"), str(model.dtype), str(model.device))
    known, drafter = _drafters.get(model, (None, None))
    if drafter is None or known != wanted or loading.get("force_download"):
        # This file only runs if the user trusts the repository's code.
        drafter = AutoModel.from_pretrained(repository, dtype=model.dtype, trust_remote_code=True, **loading)
        drafter = drafter.to(model.device).eval()
        _drafters[model] = (wanted, drafter)
    return drafter


def _repository() -> str:
    """The `custom_generate` of the call, from its frame: transformers does not pass on where it found this file."""
    frame = inspect.currentframe()
    while frame is not None:
        found = frame.f_locals.get("custom_generate") if frame.f_code.co_name == "generate" else None
        if isinstance(found, str):
            return found
        frame = frame.f_back
    raise ValueError(
        "The drafter's repository is not known here: call `target.generate(**inputs, custom_generate=repository, "
        "trust_remote_code=True)`, or load the drafter and give it as `assistant_model`."
    )
