# Copyright 2026 The hf_falcon authors. Licensed under the Apache License, Version 2.0.
"""Arguments of a run: from a YAML file, from the command line, or from both, checked the same way."""

from __future__ import annotations

import argparse
import dataclasses
import difflib
import json
from collections.abc import Collection, Iterable
from pathlib import Path
from typing import Any, NoReturn

import yaml
from transformers import HfArgumentParser
from transformers.hf_argparser import string_to_bool

_KINDS = {int: "an integer", float: "a number", string_to_bool: "true or false"}


class _Parser(HfArgumentParser):
    """Says what is wrong in one line; argparse would print its usage, of several hundred lines, before it."""

    def error(self, message: str) -> NoReturn:
        raise ValueError(f"{message} (`{self.prog} --help` describes every argument).")

    def _get_value(self, action: argparse.Action, arg_string: str) -> Any:
        try:
            return super()._get_value(action, arg_string)
        except argparse.ArgumentError as error:
            kind = _KINDS.get(action.type, f"a {getattr(action.type, '__name__', action.type)}")
            raise ValueError(f"`{action.dest}` is {arg_string!r}: give {kind}.") from error

    def _check_value(self, action: argparse.Action, value: Any) -> None:
        if action.choices is not None and value not in action.choices:
            raise ValueError(f"`{action.dest}` is {value!r}: choose one of {', '.join(map(str, action.choices))}.")


def parse_run(argv: list[str], types: Iterable[Any], prog: str, description: str | None) -> tuple[Any, ...]:
    """
    Reads dataclasses from the file that `--config` names, if any, and the command line, which wins.

    Args:
        argv (`list[str]`): the command line.
        types (iterable of dataclasses): what is read. Their fields are the file's keys and the command's flags.
        prog, description (`str`): for `--help`.

    Returns:
        One instance of each type.

    Raises:
        `ValueError`: for an unknown key or flag, naming the nearest known one; for a value of the wrong type, naming
            field, value and what to give.
    """
    parser = _Parser(types, prog=prog, description=description, allow_abbrev=False)
    parser.add_argument("--config", help="YAML file with any of these arguments; the command line wins over it.")
    # argparse's own usage names every argument: a page of its own before the list that explains them.
    required = [f"--{action.dest} {action.dest.upper()}" for action in parser._actions if action.required]
    parser.usage = " ".join([prog, *required, "[--config CONFIG] [--ARGUMENT VALUE ...]"])
    flags = [flag[2:] for action in parser._actions for flag in action.option_strings if flag.startswith("--")]

    first = _Parser(prog=prog, add_help=False, allow_abbrev=False)
    first.add_argument("--config")
    path = first.parse_known_args(argv)[0].config
    words = argv if path is None else [*_words_of_file(path, parser), f"--config={path}", *argv]
    found, unknown = parser.parse_known_args(words)
    if unknown:
        name = unknown[0].partition("=")[0]
        if not name.startswith("-"):
            raise ValueError(f"Unexpected word {name!r}: an argument is written `--name value`.")
        raise ValueError(f"Unknown argument `{name}`: {_nearest(name.lstrip('-'), flags, '--')}")
    return tuple(
        cls(**{field.name: getattr(found, field.name) for field in dataclasses.fields(cls) if field.init})
        for cls in parser.dataclass_types
    )


def _words_of_file(path: str, parser: _Parser) -> list[str]:
    """The command line that says the same as a YAML file."""
    if not Path(path).is_file():
        raise FileNotFoundError(f"`config` is {path!r}, which is not a file: give a YAML file of arguments.")
    try:
        values = yaml.safe_load(Path(path).read_text(encoding="utf-8"))
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ValueError(f"{path} is not YAML: {error}") from error
    if not isinstance(values, dict):
        raise ValueError(f"{path} holds a {type(values).__name__}: it must hold lines of `name: value`.")
    fields = {field.name for cls in parser.dataclass_types for field in dataclasses.fields(cls) if field.init}
    actions = {action.dest: action for action in reversed(parser._actions) if action.dest in fields}
    words = []
    for name, value in values.items():
        if name not in actions:
            raise ValueError(f"{path}: unknown key `{name}`: {_nearest(str(name), fields)}")
        action = actions[name]
        if value is None:
            if action.default is not None:
                raise ValueError(f"{path}: `{name}` has no value: give one, or leave the line out.")
        elif isinstance(value, list):
            if action.nargs != "+":
                raise ValueError(f"{path}: `{name}` is {value!r}: give a single value.")
            words += [f"--{name}", *map(str, value)]
        else:
            words.append(f"--{name}={json.dumps(value) if isinstance(value, dict) else value}")
    return words


def _nearest(name: str, known: Collection[str], prefix: str = "") -> str:
    nearest = difflib.get_close_matches(name.replace("-", "_"), known, n=1, cutoff=0.5)
    return f"did you mean `{prefix}{nearest[0]}`?" if nearest else "`--help` lists all of them."
