# Copyright 2026 The hf_falcon authors. Licensed under the Apache License, Version 2.0.
"""`hf-falcon info REPOSITORY`: describes a drafter from its configuration and card, without downloading weights."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import HfApi, ModelCard
from huggingface_hub.errors import EntryNotFoundError
from transformers import initialization as init

from ..core.configuration_falcon_draft import FalconDraftConfig
from ..core.drafter import FalconDraftModel
from .run_arguments import CommandParser


@dataclass
class InfoArguments:
    """Arguments of `hf-falcon info`; `help` describes each."""

    revision: str | None = field(default=None, metadata={"help": "Branch, tag or commit of a repository."})
    json: bool = field(default=False, metadata={"help": "Print one JSON object, nothing else."})


def describe(repository: str, revision: str | None = None) -> dict[str, Any]:
    """
    Describes a drafter.

    Args:
        repository (`str`): a folder, or a repository of the Hub.
        revision (`str`, *optional*): branch, tag or commit of a repository.

    Returns:
        `dict`: "target", "target_model_type", "k", "vocab_size", "draft_vocab_size", "parameters", "bytes" of the
        weight files, "tau" by data set and "license". The last two are `None` if the card lacks them.
    """
    config = FalconDraftConfig.from_pretrained(repository, revision=revision)
    with torch.device("meta"), init.no_init_weights():
        parameters = FalconDraftModel(config).num_parameters()
    if Path(repository).is_dir():
        sizes = {file.name: file.stat().st_size for file in Path(repository).iterdir() if file.is_file()}
        file = Path(repository, "README.md")
        card = ModelCard.load(file) if file.is_file() else None
    else:
        # Files and card of one commit.
        found = HfApi().model_info(repository, revision=revision, files_metadata=True)
        sizes = {each.rfilename: each.size or 0 for each in found.siblings or ()}
        try:
            card = ModelCard(Path(HfApi().hf_hub_download(repository, "README.md", revision=found.sha)).read_text())
        except EntryNotFoundError:
            card = None
    results = [] if card is None else card.data.eval_results or []
    return {
        "target": config.target_name_or_path,
        "target_model_type": config.target_model_type,
        "k": config.block_size,
        "vocab_size": config.vocab_size,
        "draft_vocab_size": config.draft_vocab_size,
        "parameters": parameters,
        "bytes": sum(size for name, size in sizes.items() if name.endswith(".safetensors")),
        "tau": {each.dataset_name: each.metric_value for each in results if each.metric_type == "tau"} or None,
        "license": None if card is None else card.data.license,
    }


def main(argv: list[str]) -> int:
    """Runs `hf-falcon info`."""
    parser = CommandParser(InfoArguments, prog="hf-falcon info", description=__doc__)
    parser.add_argument("repository", help="Repository of the Hub, or a folder.")
    found = vars(parser.parse_args(argv))
    repository = found.pop("repository")
    arguments = InfoArguments(**found)
    info = describe(repository, arguments.revision)
    if arguments.json:
        print(json.dumps(info))
        return 0
    tau = "not in the card" if info["tau"] is None else ", ".join(f"{v} ({k})" for k, v in info["tau"].items())
    drafted = "all" if info["draft_vocab_size"] is None else f"{info['draft_vocab_size']:,}"
    rows = {
        "target": f"{info['target'] or 'not named'} ({info['target_model_type'] or 'of any kind'})",
        "k": f"{info['k']} (tokens that one pass drafts)",
        "vocabulary": f"drafts {drafted} of {info['vocab_size']:,} tokens",
        "size": f"{info['parameters']:,} weights, {info['bytes'] / 1e6:,.1f} MB",
        "tau": tau,
        "license": info["license"] or "not in the card",
    }
    for name, text in rows.items():
        print(f"{name:<12}{text}")
    return 0
