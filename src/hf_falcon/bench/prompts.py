# Copyright 2026 The hf_falcon authors. Licensed under the Apache License, Version 2.0.
"""Prompts of one or more turns: from JSON-lines files, or from the Hub."""

from __future__ import annotations

from pathlib import Path

from ..training.json_text import parse_json, short

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
        source (`str`): a JSON-lines file whose lines have `turns`, or a short name of `HUB_DATA`.
        limit (`int`, *optional*): number of dialogues, from the start; all by default.

    Raises:
        `ValueError`: naming the file, line and field that is wrong.
        `OSError`: if there is no such file or data set.
    """
    if not Path(source).exists() and source in HUB_DATA:
        return _from_hub(source)[:limit]
    if not Path(source).is_file():
        raise FileNotFoundError(
            f"`data` is {source!r}: give a JSON-lines file with `turns`, or one of {', '.join(HUB_DATA)}."
        )
    dialogues = []
    for number, line in enumerate(Path(source).read_text(encoding="utf-8").splitlines(), start=1):
        if not line.strip():
            continue
        try:
            turns = parse_json(line)["turns"]
        except (ValueError, LookupError, TypeError) as error:
            raise ValueError(f"{source}, line {number}: no JSON object with `turns` ({error}).") from error
        if not isinstance(turns, list) or not turns or not all(isinstance(turn, str) for turn in turns):
            raise ValueError(f"{source}, line {number}: `turns` is {short(turns)}; it must be a list of texts.")
        dialogues.append(turns)
    if not dialogues:
        raise ValueError(f"{source}: has no prompts; each line must be a JSON object with `turns`.")
    return dialogues[:limit]


def _from_hub(name: str) -> list[list[str]]:
    try:
        from datasets import load_dataset
    except ImportError as error:
        raise OSError(f"`data` {name!r} needs the package `datasets`. Run `pip install hf-falcon[bench]`.") from error
    repository, configuration, split, column = HUB_DATA[name]
    try:
        values = load_dataset(repository, configuration, split=split)[column]
    except OSError as error:
        raise OSError(f"`data` {name!r}: {error}\nWithout the Hub, give JSON-lines files with `turns`.") from error
    return [value if isinstance(value, list) else [value] for value in values]
