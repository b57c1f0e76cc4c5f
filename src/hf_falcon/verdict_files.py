# Copyright 2026 The hf_falcon authors. Licensed under the Apache License, Version 2.0.
"""Targets that the probe found to take trees, in files: the first call of a later process need not try them again."""

from __future__ import annotations

import hashlib
import json
import sys
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel
from transformers import __version__ as transformers_version
from transformers.utils import logging

from . import __version__
from .core.hook import attention_implementation
from .core.interfaces import register_part
from .core.probe import changes_of
from .core.target_parts import decoder_of, is_compiled, quantised_layers, structure_of
from .cost_files import cache_folder, write_json
from .cpu.code_digest import code_digest
from .private_names import attention_function

logger = logging.get_logger(__name__)

# Weights from which the probe takes long enough to be remembered.
_FEWEST_WEIGHTS = 2**24


def install() -> None:
    """Makes the probe remember targets across processes."""
    register_part("verdicts", KnownTargets())


class KnownTargets:
    """
    Remembers which targets take trees.

    Only a target as transformers makes it is remembered: with the classes' own methods, and without hooks of others,
    adapters, quantised or compiled layers. The name of its file is a digest of all that the verdict depends on: the
    source files of its classes, the functions that its modules run in this process, its configuration, dtype, device
    and attention, the kinds of arguments, and the versions.
    """

    def knows(self, model: PreTrainedModel, kinds: Any) -> bool:
        """Whether this target was found to take trees, with arguments of these `kinds`."""
        file = _file(model, kinds)
        try:
            return file is not None and file.is_file()
        except OSError:
            return False

    def remember(self, model: PreTrainedModel, kinds: Any) -> None:
        """Remembers that this target takes trees. Where nothing can be written it is tried again next time."""
        file = _file(model, kinds)
        if file is not None:
            write_json(file, {"target": type(model).__name__, "takes": "trees"})


def _file(model: PreTrainedModel, kinds: Any) -> Path | None:
    """The file of a target; `None` for one that is not remembered."""
    if not _is_stock(model):
        return None
    try:
        config = json.dumps(model.config.to_dict(), sort_keys=True, default=_text_of_dtype)
    except TypeError:
        # It has values that no text tells apart: such a target is tried in each process.
        return None
    attention, decoder = attention_implementation(model.config.get_text_config(decoder=True)), decoder_of(model)
    kinds_of_modules = {type(module) for module in model.modules() if not isinstance(module, PreTrainedModel)}
    parts = (
        [_digest_of_source(type(module)) for module in (model, decoder)],
        code_digest(kinds_of_modules, [type(decoder).forward, attention_function(attention)]),
        config,
        attention,
        _matmul_precision(),
        model.dtype,
        model.device.type,
        kinds,
        [[str(each) for each in kind] for kind in structure_of(model)],
        (__version__, transformers_version, torch.__version__, torch.backends.cpu.get_cpu_capability()),
    )
    return cache_folder() / "targets" / f"{hashlib.sha256(repr(parts).encode()).hexdigest()[:32]}.json"


def _text_of_dtype(value: Any) -> str:
    if isinstance(value, torch.dtype):
        return str(value)
    raise TypeError


def _matmul_precision() -> str | None:
    try:
        return torch.get_float32_matmul_precision()
    except RuntimeError:
        # It was set in torch's newer way.
        return None


def _is_stock(model: PreTrainedModel) -> bool:
    decoder, kind = decoder_of(model), type(model)
    if not (kind.__module__.startswith("transformers.models.") and type(decoder).__module__ == kind.__module__):
        return False
    if model.training or torch.is_autocast_enabled(model.device.type) or model.num_parameters() < _FEWEST_WEIGHTS:
        return False
    # A method that was replaced on the object, on its class by another library, or by an adapter.
    for owner, name in ((model, "forward"), (decoder, "forward"), (model, "prepare_inputs_for_generation")):
        function = getattr(getattr(owner, name), "__func__", None)
        own = getattr(type(owner), name)
        if name in vars(owner) or function is not own or not own.__module__.startswith("transformers."):
            return False
    for module in model.modules():
        if is_compiled(module) or any(True for _ in changes_of(model, module)):
            return False
    return not any(quantised_layers(model)) and not getattr(model, "_hf_peft_config_loaded", False)


def _digest_of_source(kind: type) -> str:
    """Of the file that a class is written in. A frozen application has none; the versions then speak for it."""
    try:
        return hashlib.sha256(Path(sys.modules[kind.__module__].__file__ or "").read_bytes()).hexdigest()
    except OSError:
        return kind.__module__
