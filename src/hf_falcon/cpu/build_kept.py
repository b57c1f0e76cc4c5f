# Copyright 2026 The hf_falcon authors. Licensed under the Apache License, Version 2.0.
"""
The child process of `background_builds.py`: loads a target and its drafter from disk, compiles their rounds, and
offers the code to other processes. It needs the weights: in float32 the code depends on whether they fit fewer bytes.
"""

from __future__ import annotations

import importlib
import json
import sys
from typing import Any, NoReturn

import torch
from transformers import PreTrainedModel

from ..drafters.auto import AutoDrafter
from .compiling import compile_rounds
from .kept_programs import shelf_of
from .kept_rounds import offer_rounds
from .packing import pack_weights


def build(request: dict[str, Any]) -> None:
    """
    Builds and offers compiled code.

    Args:
        request (`dict`): "target", with the module and name of its "class", "name" of its folder or in the Hub's
            cache, "attention", "dtype", and whether its weights are "packed"; "state", the name of the shelf that the
            code is for; and "drafter", if there is one, with its "name", "draft_width", "dtype" and "packed".

    Raises:
        `ValueError`, `OSError`, `RuntimeError`: if a model cannot be loaded, is another one, or cannot be compiled.
    """
    target = _target(request["target"])
    if shelf_of(target).name != request["state"]:
        raise ValueError(
            f"the model in {request['target']['name']} is not the target as it is: its configuration, classes or "
            "functions were changed. Call `hf_falcon.compile_rounds(target)`."
        )
    compile_rounds(target, drafter=_drafter(request["drafter"], target) if "drafter" in request else None)
    offer_rounds(target)


def _target(wanted: dict[str, Any]) -> PreTrainedModel:
    module, name = wanted["class"]
    kind = getattr(importlib.import_module(module), name)
    # Of a repository, only what is in the Hub's cache: no code, and nothing that is new.
    target = kind.from_pretrained(
        wanted["name"],
        dtype=getattr(torch, wanted["dtype"]),
        attn_implementation=wanted["attention"],
        local_files_only=True,
        trust_remote_code=False,
    ).eval()
    if wanted["packed"]:
        pack_weights(target)
    return target


def _drafter(wanted: dict[str, Any], target: PreTrainedModel) -> Any:
    drafter = AutoDrafter.from_pretrained(wanted["name"], getattr(torch, wanted["dtype"]), target)
    drafter.generation_config.draft_width = wanted["draft_width"]
    if wanted["packed"]:
        pack_weights(drafter)
    return drafter


def main(argv: list[str]) -> NoReturn:
    """Runs the child process. The last line of an error is the reason."""
    torch.set_num_threads(1)
    try:
        build(json.loads(argv[0]))
    except Exception as error:
        sys.exit("\n" + " ".join(f"{type(error).__name__}: {error}".split()))
    sys.exit(0)
