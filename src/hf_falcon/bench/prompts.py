# Copyright 2026 The hf_falcon authors. Licensed under the Apache License, Version 2.0.
"""Prompts of one or more turns: from files of dialogues, or from the Hub."""

from __future__ import annotations

import logging
from pathlib import Path

from ..training.dialogues import read_dialogues
from ..training.records import FORMS, Message
from ..training.skipped_records import SkippedRecords, skipped_table

logger = logging.getLogger(__name__)

# Data sets of the Hub by short name: repository, configuration, split, and the column that holds the prompt.
HUB_DATA = {
    "mt_bench": ("HuggingFaceH4/mt_bench_prompts", None, "train", "prompt"),
    "humaneval": ("openai/openai_humaneval", None, "test", "prompt"),
    "gsm8k": ("openai/gsm8k", "main", "test", "question"),
}


def read_turns(source: str, limit: int | None = None) -> list[list[str]]:
    """
    The users' turns of each dialogue.

    Args:
        source (`str`): what [`read_dialogues`] reads, or a short name of `HUB_DATA`. A plain text is a turn.
        limit (`int`, *optional*): number of dialogues, from the start; all by default.

    Raises:
        `ValueError`: naming the file, record and field that is wrong, if more than 5 % of the records are.
        `OSError`: if there is no such file or data set.
    """
    if not Path(source).exists() and source in HUB_DATA:
        return _from_hub(source)[:limit]
    skipped = SkippedRecords()
    found: list[list[str]] = []
    for dialogue in read_dialogues(source, skipped=skipped):
        turns = [dialogue.text] if dialogue.text is not None else _users(dialogue.messages)
        if turns:
            found.append(turns)
            if len(found) == limit:
                break
    skipped.check()
    if skipped.reasons:
        logger.warning(
            f"{source}: {skipped.count} of {skipped.read} records are skipped:\n{skipped_table(skipped.to_dict())}"
        )
    if not found:
        raise ValueError(f"{source}: has no prompts; each record must be an object with {FORMS}.")
    return found


def _users(messages: list[Message]) -> list[str]:
    return [message["content"] for message in messages if message["role"] == "user"]


def _from_hub(name: str) -> list[list[str]]:
    try:
        from datasets import load_dataset
    except ImportError as error:
        raise OSError(
            f"`data` {name!r} needs the package `datasets`. Run `pip install 'hf-falcon[bench]'`."
        ) from error
    repository, configuration, split, column = HUB_DATA[name]
    try:
        values = load_dataset(repository, configuration, split=split)[column]
    except OSError as error:
        raise OSError(f"`data` {name!r}: {error}\nWithout the Hub, give JSON-lines files with `turns`.") from error
    return [value if isinstance(value, list) else [value] for value in values]
