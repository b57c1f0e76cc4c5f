# Copyright 2026 The hf_falcon authors. Licensed under the Apache License, Version 2.0.
"""Loads a drafter of any method, from a folder or a repository of the Hub."""

from __future__ import annotations

import importlib
import os
from collections.abc import Callable
from typing import Any

import torch
from transformers import PreTrainedModel
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from ..core.drafter import DraftModel
from .checkpoints import read_fields
from .files import LOADING, pinned
from .lookup_drafter import LOOKUP, LookupDrafter
from .methods import Fields, architectures, is_dflash, is_eagle3, is_falcon
from .mtp import MTP, MtpDrafter


def _is_language_model(fields: Fields) -> bool:
    names = MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.get(str(fields.get("model_type")), ())
    classes = {names} if isinstance(names, str) else set(names)
    return "speculators_model_type" not in fields and not classes.isdisjoint(architectures(fields))


# Of each method: its name, whether the fields of a `config.json` are of this method, and the module and name of its
# class. `import hf_falcon` does not wait for the modules: they import models of transformers.
_METHODS: list[tuple[str, Callable[[Fields], bool], str, str]] = [
    ("Falcon", is_falcon, "hf_falcon.core.drafter", "FalconDraftModel"),
    ("EAGLE-3", is_eagle3, "hf_falcon.drafters.eagle3", "Eagle3DraftModel"),
    ("DFlash and DSpark", is_dflash, "hf_falcon.drafters.dflash", "DFlashDraftModel"),
    ("language models", _is_language_model, "hf_falcon.drafters.language_model", "CausalLMDrafter"),
]

# Methods that are not read: the beginning of their names in a `config.json`, and what hf_falcon has nothing for.
_UNREAD = {
    "peagle": "P-EAGLE: its pass drafts several tokens from a learnt hidden state (`mask_hidden`)",
    "dflash2": "DFlash 2: its layers have local convolutions, and it selects candidates by pairs",
    "xpress": "XPress: a refiner changes the logits of a block in several steps",
    "domino": "Domino: a recurrent projector corrects the logits of a DFlash block",
    "mtp": 'multi-token prediction by a layer of the target\'s kind; where the target has its own, the name is "mtp"',
}


class AutoDrafter:
    """
    Loads a drafter of any method that hf_falcon reads: Falcon's own, EAGLE-3, DFlash and DSpark in their original
    layouts and in the layout of the package `speculators`, and a smaller language model.
    """

    def __init__(self) -> None:
        raise TypeError("`AutoDrafter` is not constructed: call `AutoDrafter.from_pretrained(name)`.")

    @classmethod
    def from_pretrained(
        cls,
        pretrained_model_name_or_path: str | os.PathLike[str],
        dtype: str | torch.dtype | None = None,
        target: PreTrainedModel | None = None,
        **kwargs: Any,
    ) -> DraftModel:
        """
        Loads a drafter, in evaluation mode.

        Args:
            pretrained_model_name_or_path (`str` or `os.PathLike`):
                A folder, a repository of the Hub, "lookup" for prompt lookup alone, or "mtp", the target's own head.
            dtype (`str` or `torch.dtype`, *optional*):
                Dtype of the weights; give the target's. By default the dtype that they are stored in.
            target ([`~transformers.PreTrainedModel`], *optional*): the target, of which "mtp" is a part.
            kwargs: `cache_dir`, `force_download`, `local_files_only`, `proxies`, `revision`, `subfolder` and `token`,
                as in [`~transformers.PreTrainedModel.from_pretrained`], and arguments of the method's class.

        Returns:
            [`DraftModel`]: for `target.generate(assistant_model=drafter)`.

        Raises:
            `ValueError`: if the configuration is not of a method that is known, or if weights are missing, unexpected
                or of another shape; the message names them.
            `OSError`: if files are missing or damaged.
        """
        name = os.fspath(pretrained_model_name_or_path)
        # A path of these names is a folder.
        if pretrained_model_name_or_path == LOOKUP:
            return LookupDrafter()
        if pretrained_model_name_or_path == MTP:
            if target is None:
                raise ValueError(
                    f"`{MTP}` is the head of a target, and drafts where `target` is that model: it is not trained, "
                    "exported or pushed by itself."
                )
            return MtpDrafter(target)
        # What the class reads is of the commit that was chosen from.
        kwargs = pinned(name, **kwargs)
        kind = drafter_class(name, **{key: value for key, value in kwargs.items() if key in LOADING})
        return kind.from_pretrained(name, dtype=dtype, **kwargs).eval()


def is_drafter(fields: Fields) -> bool:
    """Whether the fields of a `config.json` are of a drafter that [`AutoDrafter`] loads."""
    return isinstance(fields, dict) and any(is_of(fields) for _, is_of, *_ in _METHODS)


def drafter_class(name: str, **loading: Any) -> type[DraftModel]:
    """
    The class of the drafter in a folder or a repository.

    Args:
        name (`str`): a folder, or a repository of the Hub.
        loading: see [`AutoDrafter.from_pretrained`].

    Raises:
        `ValueError`: if its `config.json` is not of a known method.
    """
    fields = read_fields(name, **loading)
    for _, is_of, module, kind in _METHODS:
        if is_of(fields):
            return getattr(importlib.import_module(module), kind)
    methods = ", ".join(method for method, *_ in _METHODS)
    found = fields.get("speculators_model_type") or fields.get("architectures") or fields.get("model_type")
    names = [str(fields.get("speculators_model_type")), str(fields.get("model_type")), *architectures(fields)]
    unread = [why for kind, why in _UNREAD.items() if any(each.lower().startswith(kind) for each in names)]
    missing = f" It is of a method that is not read, {unread[0]}. Use a drafter of another method." if unread else ""
    raise ValueError(f"`{name}` is {found!r:.200}, which is no drafter of a known method: {methods}.{missing}")
