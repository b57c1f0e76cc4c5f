# Copyright 2026 The hf_falcon authors. Licensed under the Apache License, Version 2.0.
"""
`hf-falcon info REPOSITORY`: describes a drafter from its configuration, its card and the headers of its weight files,
without downloading weights; of a language model, which can be a target, it also says what can draft for it here.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import HfApi
from huggingface_hub.errors import EntryNotFoundError
from transformers import AutoConfig
from transformers import initialization as init
from transformers.utils import SAFE_WEIGHTS_NAME, WEIGHTS_NAME

from ..checkpoint_files import printable
from ..core.configuration_falcon_draft import FalconDraftConfig
from ..core.drafter import FalconDraftModel
from ..drafters.auto import drafter_class
from ..drafters.checkpoints import read_fields
from ..drafters.files import pinned, stored_tensors
from ..drafters.language_model import CausalLMDrafter
from ..drafters.lookup_drafter import LOOKUP
from .at_hand import at_hand
from .card import read_card, tau_of
from .info_arguments import InfoArguments, parser

# The methods' names, by `speculators_model_type`.
_METHODS = {"eagle3": "EAGLE-3", "dflash": "DFlash", "dspark": "DSpark"}
_LANGUAGE_MODEL = "language model"
_LAYOUTS = {"hf_falcon": "", "original": ", original layout", "speculators": ", layout of the package speculators"}
# Of each tensor of a checkpoint its dtype, in the words of safetensors, and its shape.
Headers = dict[str, tuple[str, tuple[int, ...]]]


def describe(repository: str, revision: str | None = None) -> dict[str, Any]:
    """
    Describes a drafter.

    Args:
        repository (`str`): a folder, or a repository of the Hub.
        revision (`str`, *optional*): branch, tag or commit of a repository.

    Returns:
        `dict`: "method", "layout", "target", "target_model_type" or the target's class, "k", "vocab_size",
        "draft_vocab_size" (`None` for all tokens), "feature_layers" (the target's layers whose outputs are read,
        counted from 0; -1 is the input of the first; `None` if they follow from the target), "parameters", "bytes" of
        the weight files, "tau" by data set and "license". "parameters" is `None` for weights in `pytorch_model.bin`,
        and the last two are `None` if the card lacks them.
    """
    revision = pinned(repository, revision=revision)["revision"]
    kind, fields = drafter_class(repository, revision=revision), read_fields(repository, revision=revision)
    if Path(repository).is_dir():
        sizes = {file.name: file.stat().st_size for file in Path(repository).iterdir() if file.is_file()}
        file = Path(repository, "README.md")
        card = read_card(file) if file.is_file() else None
        commit = None
    else:
        found = HfApi().model_info(repository, revision=revision, files_metadata=True)
        sizes, commit = {each.rfilename: each.size or 0 for each in found.siblings or ()}, found.sha
        try:
            card = read_card(Path(HfApi().hf_hub_download(repository, "README.md", revision=commit)))
        except EntryNotFoundError:
            card = None
    if issubclass(kind, CausalLMDrafter):
        about = _of_language_model(fields, _headers(repository, _weight_files(sizes), commit))
    elif issubclass(kind, FalconDraftModel):
        about = _of_falcon(FalconDraftConfig.from_pretrained(repository, revision=revision))
    else:
        about = _of_another(kind, fields, _headers(repository, _weight_files(sizes), commit))
    return {
        **about,
        "bytes": sum(sizes[name] for name in _weight_files(sizes)),
        "tau": None if card is None else tau_of(card) or None,
        "license": None if card is None or card.license is None else printable(str(card.license)),
    }


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
        "method": _LANGUAGE_MODEL,
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
    # Tables of tokens are integers, and some checkpoints have a copy of the target's head.
    weights = [
        math.prod(shape)
        for name, (dtype, shape) in headers.items()
        if dtype.startswith(("F", "BF")) and not name.startswith("verifier_")
    ]
    ids = getattr(config, config.layer_ids_field)
    return {
        "method": _METHODS[config.to_dict()["speculators_model_type"]],
        "layout": "speculators" if "speculators_model_type" in fields else "original",
        "target": config.target_name_or_path,
        "target_model_type": ", ".join(config.target_architectures) or None,
        "k": config.block_size,
        "vocab_size": config.vocab_size,
        "draft_vocab_size": None if config.draft_vocab_size == config.vocab_size else config.draft_vocab_size,
        "feature_layers": None if ids is None else config.feature_layers,
        "parameters": sum(weights) if headers else None,
    }


def _weight_files(files: Iterable[str]) -> list[str]:
    """The files that are read of a checkpoint, in their order of preference: one, several, or a pickled one."""
    for pattern in (SAFE_WEIGHTS_NAME, "model-*-of-*.safetensors", WEIGHTS_NAME):
        if found := [name for name in files if fnmatchcase(name, pattern)]:
            return found
    return []


def _headers(repository: str, files: Iterable[str], commit: str | None) -> Headers:
    """What the headers of safetensors files say of their tensors. Of a file on the Hub, only the header is read."""
    found: Headers = {}
    for name in files:
        if name == WEIGHTS_NAME:
            continue
        if commit is None:
            stored = stored_tensors([Path(repository, name)])
            found |= {tensor: (each.dtype, each.shape) for tensor, each in stored.items()}
        else:
            metadata = HfApi().parse_safetensors_file_metadata(repository, name, revision=commit)
            found |= {tensor: (each.dtype, tuple(each.shape)) for tensor, each in metadata.tensors.items()}
    return found


def main(argv: list[str]) -> int:
    """Runs `hf-falcon info`."""
    found = vars(parser().parse_args(argv))
    repository = found.pop("repository")
    arguments = InfoArguments(**found)
    if repository == LOOKUP:
        raise ValueError(
            '"lookup" is prompt lookup alone: it has no files, and is for any target. A folder is "./lookup".'
        )
    info = describe(repository, arguments.revision)
    if info["method"] == _LANGUAGE_MODEL:
        revision = pinned(repository, revision=arguments.revision)["revision"]
        info["at_hand"] = at_hand(AutoConfig.from_pretrained(repository, revision=revision), repository)
    if arguments.json:
        print(json.dumps(info))
        return 0
    tau = "not in the card" if info["tau"] is None else ", ".join(f"{v} ({k})" for k, v in info["tau"].items())
    drafted = "all" if info["draft_vocab_size"] is None else f"{info['draft_vocab_size']:,}"
    size = "" if info["parameters"] is None else f"{info['parameters']:,} weights, "
    rows = {
        "method": info["method"] + _LAYOUTS[info["layout"]],
        "target": f"{info['target'] or 'not named'} ({info['target_model_type'] or 'of any kind'})",
        "k": f"{info['k']} (tokens that one pass drafts)",
        "vocabulary": f"drafts {drafted} of {info['vocab_size']:,} tokens",
        "reads": "the text alone" if info["method"] == _LANGUAGE_MODEL else _read(info["feature_layers"]),
        "size": f"{size}{info['bytes'] / 1e6:,.1f} MB",
        "tau": tau,
        "license": info["license"] or "not in the card",
    }
    for name, text in rows.items():
        print(f"{name:<12}{text}")
    if "at_hand" in info:
        print("\nAs a target, what can draft for it here:")
        for name, text in info["at_hand"].items():
            print(f"{name:<15}{text}")
    return 0


def _read(layers: list[int] | None) -> str:
    """The hidden states of the target that a drafter reads, in words."""
    if layers is None:
        return "hidden states of three layers, which follow from the target"
    if not layers:
        return "the last hidden state"
    outputs = ", ".join(str(layer) for layer in layers if layer >= 0)
    first = ["the input of layer 0"] if -1 in layers else []
    return " and ".join([*first, *([f"the outputs of layers {outputs}"] if outputs else [])])
