# Copyright 2026 The hf_falcon authors. Licensed under the Apache License, Version 2.0.
"""
A digest of the code that runs in modules, and not of the files that it came from: code that was replaced in this
process, in a class or in the module of Python that a forward is in, gives another digest.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator
from contextlib import suppress
from types import CodeType, FunctionType
from typing import Any

# Packages whose versions say what is in them; nobody replaces single functions there.
_KNOWN = ("builtins", "torch", __name__.partition(".")[0])


def code_digest(classes: Iterable[type], functions: Iterable[object] = ()) -> str:
    """
    A digest of the methods of some classes and of other functions, and of all functions that these name. It is the
    same in all processes of one version of Python.
    """
    seen: dict[FunctionType, None] = {}
    for kind in sorted(classes, key=lambda each: (each.__module__, each.__qualname__)):
        for owner in kind.__mro__:
            if not _is_known(owner):
                _add(vars(owner).values(), seen)
    _add(functions, seen)
    return hashlib.sha256("".join(sorted(map(_text, seen))).encode()).hexdigest()[:32]


def _add(values: Iterable[Any], seen: dict[FunctionType, None]) -> None:
    """Adds the functions among some values, and those that they name."""
    for value in values:
        if isinstance(value, (staticmethod, classmethod)):
            value = value.__func__
        if isinstance(value, FunctionType) and value not in seen and not _is_known(value):
            seen[value] = None
            _add(_named(value), seen)


def _named(function: FunctionType) -> Iterator[Any]:
    """What a function may call: globals by their names, and what it was closed over, as a decorator's is."""
    for code in _codes(function.__code__):
        yield from (function.__globals__[name] for name in code.co_names if name in function.__globals__)
    for cell in function.__closure__ or ():
        # A cell may be empty.
        with suppress(ValueError):
            yield cell.cell_contents


def _codes(code: CodeType) -> Iterator[CodeType]:
    yield code
    for each in code.co_consts:
        if isinstance(each, CodeType):
            yield from _codes(each)


def _text(function: FunctionType) -> str:
    parts = [(code.co_code, code.co_names, *map(_constant, code.co_consts)) for code in _codes(function.__code__)]
    return f"{function.__module__}.{function.__qualname__} {parts}\n"


def _constant(value: object) -> object:
    if isinstance(value, CodeType):
        return value.co_name
    # The order of a set of texts is another one in each process.
    return sorted(map(repr, value)) if isinstance(value, frozenset) else value


def _is_known(value: Any) -> bool:
    return str(value.__module__).partition(".")[0] in _KNOWN
