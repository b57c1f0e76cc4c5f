# Copyright 2026 The hf_falcon authors. Licensed under the Apache License, Version 2.0.
"""JSON from others: nested to a limit, with numbers of a limited length, and shortened where an error shows it."""

from __future__ import annotations

import gc
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
    # JSON has no cycles to collect, and looking for them takes ten times as long as decoding.
    collects = gc.isenabled()
    gc.disable()
    try:
        value, end = _DECODER.raw_decode(text, position)
        if _is_shallow(value):
            return value, end
    except RecursionError:
        pass
    finally:
        if collects:
            gc.enable()
    raise ValueError(f"lists and objects are nested more than {MAX_DEPTH} deep")


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


def _is_shallow(value: Any) -> bool:
    level = [value]
    for _ in range(MAX_DEPTH + 1):
        nested = [each for each in level if type(each) in (dict, list)]
        if not nested:
            return True
        level = [each for one in nested for each in (one.values() if type(one) is dict else one)]
    return False


def _integer(digits: str) -> int:
    if len(digits) > MAX_DIGITS:
        raise ValueError(f"a number has more than {MAX_DIGITS:,} digits")
    return int(digits)


_DECODER = json.JSONDecoder(strict=False, parse_int=_integer)
