# Copyright 2026 The hf_falcon authors. Licensed under the Apache License, Version 2.0.
"""
`hf-falcon info REPOSITORY`: describes a drafter from its configuration, its card and the headers of its weight files,
without downloading weights; of a language model, which can be a target, it also says what can draft for it here.
"""

from __future__ import annotations

import importlib
import json
from typing import Any

from ..json_files import printable
from .card import tau_of
from .checkpoint_listing import CheckpointListing
from .info_arguments import InfoArguments, parser
from .plain_info import LANGUAGE_MODEL, plain_description

_LAYOUTS = {"hf_falcon": "", "original": ", original layout", "speculators": ", layout of the package speculators"}
# The name that stands for prompt lookup in place of a drafter's.
_LOOKUP = "lookup"


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
    about = None
    try:
        listing = CheckpointListing(repository, revision)
        about = plain_description(listing.fields(), listing.headers())
    # Whatever is wrong with a file or the connection, the checks say it in their words.
    except Exception:
        pass
    if about is None:
        revision, about_of = _checked().opened(repository, revision)
        listing = CheckpointListing(repository, revision)
    card = listing.card()
    return {
        **(about_of(listing.headers) if about is None else about),
        "bytes": listing.weight_bytes,
        "tau": None if card is None else tau_of(card) or None,
        "license": None if card is None or card.license is None else printable(str(card.license)),
    }


def _checked() -> Any:
    """[`checked_info`], which imports torch and transformers."""
    return importlib.import_module(f"{__package__}.checked_info")


def main(argv: list[str]) -> int:
    """Runs `hf-falcon info`."""
    found = vars(parser().parse_args(argv))
    repository = found.pop("repository")
    arguments = InfoArguments(**found)
    if repository == _LOOKUP:
        raise ValueError(
            '"lookup" is prompt lookup alone: it has no files, and is for any target. A folder is "./lookup".'
        )
    info = describe(repository, arguments.revision)
    if info["method"] == LANGUAGE_MODEL:
        info["at_hand"] = _checked().what_drafts_for(repository, arguments.revision)
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
        "reads": "the text alone" if info["method"] == LANGUAGE_MODEL else _read(info["feature_layers"]),
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
