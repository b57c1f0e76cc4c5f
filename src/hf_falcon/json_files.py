# Copyright 2026 The hf_falcon authors. Licensed under the Apache License, Version 2.0.
"""JSON files that a stranger may have written are read in bounded time and memory, without torch and transformers."""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

# A longer integer is in no file of ours, and takes time that grows with the square of its digits.
_MOST_DIGITS = 4300


def read_json(path: str | Path, *, max_bytes: int = 16 * 2**20, max_depth: int = 32) -> Any:
    """
    Reads a JSON file of a stranger, in bounded time and memory.

    Args:
        path (`str` or `Path`): the file.
        max_bytes (`int`, *optional*, defaults to 16 MiB): bytes of the file, at most.
        max_depth (`int`, *optional*, defaults to 32): lists and objects inside each other, at most.

    Returns:
        The value. All its numbers are finite, its integers fit into 64 bits, and its texts can be encoded.

    Raises:
        `ValueError`: if the file is no JSON in UTF-8, or beyond these limits; it names the file, and what was found.
        `OSError`: if the file cannot be opened.
    """
    file = Path(path)
    try:
        # The reader of a pipe or a device could wait forever.
        if file.exists() and not file.is_file():
            raise ValueError("it is no regular file")
        with file.open("rb") as opened:
            data = opened.read(max_bytes + 1)
        if len(data) > max_bytes:
            raise ValueError(f"it has more than {max_bytes:,} bytes")
        value = json.loads(data.decode("utf-8"), parse_int=_integer)
        _refuse_values(value, max_depth)
    except (ValueError, RecursionError) as error:
        reason = f"it has more than {max_depth} levels" if isinstance(error, RecursionError) else error
        raise ValueError(
            f"`{file.name}` in {file.parent} cannot be read ({reason}): download it again, or write it again."
        ) from error
    return value


def read_own_object(path: str | Path) -> dict[str, Any]:
    """
    Reads a JSON file of our own, which may have numbers that are not finite.

    Args:
        path (`str` or `Path`): the file.

    Returns:
        `dict`

    Raises:
        `ValueError`: if the file holds no JSON object, as after a disk was full; it names the file.
        `OSError`: if the file cannot be opened.
    """
    try:
        value = json.loads(Path(path).read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path} cannot be read ({error}): delete it, or write it again.") from error
    if not isinstance(value, dict):
        raise ValueError(f"{path} holds a {type(value).__name__}, not an object: delete it, or write it again.")
    return value


def _integer(digits: str) -> int:
    if len(digits) > _MOST_DIGITS:
        raise ValueError(f"it has an integer of {len(digits):,} digits")
    return int(digits)


def _refuse_values(value: Any, max_depth: int) -> None:
    """Refuses what [`read_json`] does not return; the error names the nearest field."""
    # The containers around a value, each where the walk is in it. A list of all values would take more memory.
    around: list[Iterator[tuple[Any, Any]]] = [iter([(None, value)])]
    while around:
        for name, each in around[-1]:
            where = "a value" if name is None else f"`{printable(name)}`"
            if isinstance(each, (dict, list)):
                if len(around) > max_depth:
                    raise ValueError(f"{where} has more than {max_depth} levels")
                around.append(iter(each.items()) if isinstance(each, dict) else zip(itertools.repeat(name), each))
                break
            if (isinstance(each, float) and not math.isfinite(each)) or (isinstance(each, int) and abs(each) >= 2**64):
                raise ValueError(f"{where} is {each!r:.80}, which is no finite number of 64 bits")
            for text in (name, each):
                if isinstance(text, str) and not text.isascii():
                    # Raises for half of a surrogate pair, which no file and no terminal takes.
                    text.encode("utf-8")
        else:
            around.pop()


def printable(text: str, most: int = 200) -> str:
    """A text of a stranger's file for a message: at most `most` characters, and none that a terminal acts on."""
    shown = "".join(each if each.isprintable() else ascii(each)[1:-1] for each in text[:most])
    return shown + "..." * (len(text) > most)
