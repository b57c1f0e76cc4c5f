# Copyright 2026 The hf_falcon authors. Licensed under the Apache License, Version 2.0.
"""
A digest of the code that modules run. Unlike a digest of its files, it changes when a process replaces a method, or a
function that a method calls.
"""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Iterable, Iterator
from contextlib import suppress
from types import CodeType, FunctionType, MethodType
from typing import Any

# Packages whose versions say what is in them.
_KNOWN = ("builtins", "torch", __name__.partition(".")[0])
# The class has no public name.
_CachedFunction = type(functools.cache(len))


def code_digest(classes: Iterable[type], functions: Iterable[object] = ()) -> str:
    """
    A digest of the methods of some classes and of other functions, of what these were closed over, and of all
    functions that they name. It is the same in all processes of one version of Python.

    Functions of torch are left out, and what code reads elsewhere: in tables, in numbers of its module, or in other
    modules (`module.function`).
    """
    return hashlib.sha256("".join(sorted(map(_text, _reached(classes, functions)))).encode()).hexdigest()[:32]


def functions_of(classes: Iterable[type], functions: Iterable[object] = ()) -> frozenset[FunctionType]:
    """The functions that [`code_digest`] is of, as they are in this process now. It takes less than a millisecond."""
    # A partial function may be made anew each time; what it calls is among them.
    return frozenset(each for each in _reached(classes, functions) if isinstance(each, FunctionType))


def _reached(classes: Iterable[type], functions: Iterable[object]) -> set[Any]:
    seen: set[Any] = set()
    for kind in classes:
        for owner in kind.__mro__:
            if not _is_known(owner):
                _add(vars(owner).values(), seen)
    _add(functions, seen)
    return seen


def _add(values: Iterable[Any], seen: set[Any]) -> None:
    """Adds the functions and partial functions among some values, and all that these name."""
    for value in values:
        if isinstance(value, functools.partial) or (isinstance(value, FunctionType) and not _is_known(value)):
            if value not in seen:
                seen.add(value)
                _add(_named(value), seen)
        else:
            _add(_inside(value), seen)


def _inside(value: Any) -> Iterator[Any]:
    """The functions that another object calls."""
    if isinstance(value, (staticmethod, classmethod, MethodType)):
        yield value.__func__
    elif isinstance(value, property):
        yield value.fget
    elif isinstance(value, functools.cached_property):
        yield value.func
    elif isinstance(value, functools.partialmethod):
        yield functools.partial(value.func, *value.args, **value.keywords)
    elif isinstance(value, _CachedFunction):
        yield value.__wrapped__


def _named(function: Any) -> Iterator[Any]:
    """What a function may call: globals by their names, what it was closed over, as a decorator's is, and defaults."""
    if isinstance(function, FunctionType):
        for code in _codes(function.__code__):
            yield from (function.__globals__[name] for name in code.co_names if name in function.__globals__)
    yield from _held(function)


def _held(function: Any) -> Iterator[Any]:
    if isinstance(function, functools.partial):
        yield from (function.func, *function.args, *function.keywords.values())
        return
    yield from function.__defaults__ or ()
    yield from (function.__kwdefaults__ or {}).values()
    for cell in function.__closure__ or ():
        # A cell may be empty.
        with suppress(ValueError):
            yield cell.cell_contents


def _codes(code: CodeType) -> Iterator[CodeType]:
    yield code
    for each in code.co_consts:
        if isinstance(each, CodeType):
            yield from _codes(each)


def _text(function: Any) -> str:
    held = [*map(_constant, _held(function))]
    if isinstance(function, functools.partial):
        return f"partial {held}\n"
    parts = [
        (
            each.co_code,
            (each.co_names, each.co_varnames, each.co_freevars, each.co_cellvars),
            (each.co_argcount, each.co_posonlyargcount, each.co_kwonlyargcount, each.co_flags),
            *map(_constant, each.co_consts),
        )
        for each in _codes(function.__code__)
    ]
    return f"{function.__module__}.{function.__qualname__} {parts} {held}\n"


def _constant(value: object) -> object:
    # The order of a set of texts is another one in each process, and so are the addresses of objects.
    if isinstance(value, (frozenset, tuple)):
        found = [repr(_constant(each)) for each in value]
        return sorted(found) if isinstance(value, frozenset) else found
    if isinstance(value, slice):
        return repr(value)
    return value if isinstance(value, (bool, int, float, complex, str, bytes, type(None))) else type(value).__name__


def _is_known(value: Any) -> bool:
    return str(value.__module__).partition(".")[0] in _KNOWN
