# Copyright 2026 The hf_falcon authors. Licensed under the Apache License, Version 2.0.
"""JSON from others: nested to a limit, with numbers of a limited length, and shortened where an error shows it."""

from __future__ import annotations

import json
import reprlib
from typing import Any

# Deeper than the records of any known data set.
MAX_DEPTH = 32
# No number of a data set has more digits, and Python's own limit (4,300) can be lifted.
MAX_DIGITS = 1000

_SHORT = reprlib.Repr()
_SHORT.maxlevel, _SHORT.maxdict, _SHORT.maxlist, _SHORT.maxstring, _SHORT.maxother = 4, 4, 4, 80, 80


def decode_json(text: str, position: int = 0) -> tuple[Any, int]:
    """
    Decodes the JSON value that begins at `position`. Strings may hold control characters.

    Returns:
        `tuple`: the value, and the position after it.

    Raises:
        `json.JSONDecodeError`: the text is not JSON, or ends too early.
        `ValueError`: the value is nested too deeply, or has a number that is too long. Names the limit.
    """
    try:
        value, end = _DECODER.raw_decode(text, position)
    except RecursionError:
        value = end = None
    if end is None or not _is_shallow(value, MAX_DEPTH):
        raise ValueError(f"lists and objects are nested more than {MAX_DEPTH} deep")
    return value, end


def parse_json(text: str) -> Any:
    """
    The value that a whole text holds.

    Raises:
        `ValueError`: the text is not JSON, or exceeds a limit of [`decode_json`].
    """
    text = text.strip()
    try:
        value, end = decode_json(text)
    except json.JSONDecodeError as error:
        raise ValueError(f"not JSON: {error}") from error
    if end != len(text):
        raise ValueError(f"not JSON: {short(text[end:])} follows the end")
    return value


def short(value: Any) -> str:
    """A value for an error's text: at most 80 characters, none of them a control character."""
    text = _SHORT.repr(value)
    return text if len(text) <= 80 else text[:77] + "..."


def _is_shallow(value: Any, levels: int) -> bool:
    values = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return levels > 0 and all(_is_shallow(each, levels - 1) for each in values if isinstance(each, (dict, list)))


def _integer(digits: str) -> int:
    if len(digits) > MAX_DIGITS:
        raise ValueError(f"a number has {len(digits)} digits, more than {MAX_DIGITS}")
    return int(digits)


_DECODER = json.JSONDecoder(strict=False, parse_int=_integer)
