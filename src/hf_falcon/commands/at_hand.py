# Copyright 2026 The hf_falcon authors. Licensed under the Apache License, Version 2.0.
"""What can draft for a target on this machine: its own heads, an instant drafter, a smaller model, prompt lookup."""

from __future__ import annotations

import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import scan_cache_dir
from huggingface_hub.errors import CacheNotFound
from transformers import AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel

from ..drafters import mtp
from ..json_files import read_json
from ..training import instant

# Bytes of a tokenizer's file, at most.
_LARGEST_TOKENIZER = 64 * 2**20
# A model with more than this share of the target's bytes costs more than it gains.
_SMALLER = 0.5


def at_hand(config: PreTrainedConfig, name: str, target: PreTrainedModel | None = None) -> dict[str, str]:
    """
    Ways to draft for a target, without a drafter that was trained for it.

    Args:
        config ([`PreTrainedConfig`]): the target's configuration.
        name (`str`): the target's folder, or its name on the Hub.
        target ([`PreTrainedModel`], *optional*): the target; by default one without weights is made.

    Returns:
        `dict[str, str]`: what there is to say of "own heads", "instant", "smaller model" and "lookup".
    """
    found = {"own heads": "none"}
    if target is None:
        try:
            with torch.device("meta"):
                target = AutoModelForCausalLM.from_config(config)
        # Not a causal language model, or code that is not trusted.
        except Exception as error:
            reason = str(error).splitlines()[0] if str(error) else type(error).__name__
            found["instant"] = f"not known, as no model is made from the configuration: {reason}"
    if target is not None:
        why = instant.refusal(target)
        command = shlex.join(["hf-falcon", "instant", "--target", name, "--output", "instant-drafter"])
        found["instant"] = f"in about the time of 100 short answers: `{command}`" if why is None else f"no: {why}"
    if heads := getattr(config.get_text_config(decoder=True), "num_mtp_layers", None):
        found["own heads"] = _own_heads(heads, target)
    smaller = smaller_models(name)
    found["smaller model"] = (
        "none with its tokenizer in the Hub's cache"
        if not smaller
        else ", ".join(f"{each} ({size / 1e6:,.0f} MB)" for each, size in smaller.items()) + ": `assistant_model`"
    )
    found["lookup"] = 'always, best where answers repeat their prompt: `assistant_model="lookup"`'
    return found


def _own_heads(layers: int, target: PreTrainedModel | None) -> str:
    if layers > 1:
        use = "transformers' `use_mtp=True`"
    elif target is not None and (why := mtp.refusal(target)) is not None:
        return f"no: {why}"
    else:
        use = f'`assistant_model="{mtp.MTP}"`'
    return f"{layers} for several tokens, if the checkpoint has the weights: {use}"


def smaller_models(name: str) -> dict[str, int]:
    """
    Causal language models in the Hub's cache that have the tokenizer of a target, and at most half of its bytes.

    Args:
        name (`str`): the target's folder, or its name on the Hub.

    Returns:
        `dict[str, int]`: the bytes of the weights of each, by name, the smallest first.
    """
    folders = dict(_cached())
    own = folders.pop(name, Path(name))
    vocabulary, size = _vocabulary(own), _weight_bytes(own)
    if vocabulary is None or not size:
        return {}
    found = {}
    for other, folder in folders.items():
        bytes_of = _weight_bytes(folder)
        if 0 < bytes_of <= _SMALLER * size and _is_causal(folder) and _vocabulary(folder) == vocabulary:
            found[other] = bytes_of
    return dict(sorted(found.items(), key=lambda each: each[1]))


def _cached() -> Iterator[tuple[str, Path]]:
    """The models in the Hub's cache, each with the folder of its newest snapshot."""
    try:
        repositories = scan_cache_dir().repos
    except CacheNotFound:
        return
    for repository in repositories:
        if repository.repo_type == "model" and repository.revisions:
            newest = max(repository.revisions, key=lambda revision: revision.last_modified)
            yield repository.repo_id, newest.snapshot_path


def _is_causal(folder: Path) -> bool:
    fields = _read(folder / "config.json")
    names = fields.get("architectures")
    return (
        isinstance(names, list)
        and any(str(each).endswith("ForCausalLM") for each in names)
        # A head of EAGLE-3.
        and "draft_vocab_size" not in fields
    )


def _vocabulary(folder: Path) -> Any:
    """The tokens of a folder's tokenizer, by id; `None` where there is no `tokenizer.json`."""
    fields = _read(folder / "tokenizer.json")
    model = fields.get("model")
    return model.get("vocab") if isinstance(model, dict) else None


def _weight_bytes(folder: Path) -> int:
    return sum(file.stat().st_size for file in folder.glob("*.safetensors")) if folder.is_dir() else 0


def _read(file: Path) -> dict[str, Any]:
    """A stranger's file may hold anything."""
    try:
        found = read_json(file, max_bytes=_LARGEST_TOKENIZER) if file.is_file() else {}
    except (OSError, ValueError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}
