# Copyright 2026 The hf_falcon authors. Licensed under the Apache License, Version 2.0.
"""Arguments of a run: from a YAML file, from the command line, or from both, checked the same way."""

from __future__ import annotations

import argparse
import copy
import dataclasses
import difflib
import inspect
import json
from collections.abc import Collection, Iterable, Iterator
from pathlib import Path
from types import NoneType
from typing import Any, Literal, NoReturn, get_args, get_origin, get_type_hints

import yaml

from ..bench.metrics import ALL_DATA
from ..learning.options import check_folder
from ..training.json_text import short

# By the name of what reads a value.
_KINDS = {"int": "an integer", "float": "a number", "string_to_bool": "true or false"}
# Bytes of a YAML file, of which PyYAML reads some 20,000 a second.
_LARGEST_FILE = 1 << 16
_TRAINER = "arguments of transformers' Trainer (see `transformers.TrainingArguments`)"
# Arguments of Trainer that most runs set: they are listed with the command's own.
_MOST_USED = {"output_dir", "num_train_epochs", "max_steps", "per_device_train_batch_size", "bf16", "seed"}
# Arguments that are files, folders or names on the Hub.
_PLACES = {
    "chat_template",
    "data",
    "decision",
    "draft_model",
    "drafter",
    "eagle_like",
    "exclude",
    "features_dir",
    "folder",
    "init_from",
    "learn",
    "lookup_text",
    "medusa_like",
    "output",
    "output_dir",
    "repository",
    "target",
    "vocabulary_data",
}


class _HelpFormatter(argparse.HelpFormatter):
    """
    Shows an argument's default, where there is a default that its help does not name, and one of its two spellings:
    `--max-new-tokens` is `--max_new_tokens`, too.
    """

    def _format_action_invocation(self, action: argparse.Action) -> str:
        shown = copy.copy(action)
        shown.option_strings = [name for name in action.option_strings if "-" not in name[2:]]
        return super()._format_action_invocation(shown if shown.option_strings else action)

    def _get_help_string(self, action: argparse.Action) -> str:
        text = action.help or ""
        if "default" in text.lower() or any(action.default is none for none in (None, False, argparse.SUPPRESS)):
            return text
        return text if action.default in ("", []) else f"{text} (default: %(default)s)"


class CommandParser(argparse.ArgumentParser):
    """
    The parser of all commands: each field of dataclasses is an argument, in two spellings. An error is one line, where
    argparse prints all arguments first. Only what reads arguments of transformers' Trainer imports transformers.

    Args:
        types (iterable of dataclasses, or a dataclass): what is read. A flag, which is false by default, takes no
            value, except beside Trainer's arguments, which may (`--bf16 true`). Trainer's are listed last.
        kwargs: see [`argparse.ArgumentParser`].
    """

    def __init__(self, types: Any = (), **kwargs: Any) -> None:
        super().__init__(**{"formatter_class": _HelpFormatter, **kwargs})
        self.dataclass_types: list[Any] = [types] if dataclasses.is_dataclass(types) else list(types)
        has_flags = not any(map(_is_of_trainer, self.dataclass_types))
        for kind in self.dataclass_types:
            if _is_of_trainer(kind):
                self._add_trainer(kind)
            else:
                for field, of in _fields(kind):
                    self._add_field(field, of, has_flags)

    def _add_field(self, field: dataclasses.Field, kind: Any, has_flags: bool) -> None:
        names = dict.fromkeys((f"--{field.name}", f"--{field.name.replace('_', '-')}"))
        options: dict[str, Any] = dict(field.metadata)
        default = field.default if field.default_factory is dataclasses.MISSING else field.default_factory()
        if default is dataclasses.MISSING:
            options["required"] = True
        else:
            options["default"] = default
        if kind is bool and has_flags:
            self.add_argument(*names, action="store_true", **options)
            return
        if NoneType in get_args(kind):
            # An object (`dict | str`) is text on the command line.
            (kind,) = {*get_args(kind)} - {NoneType, dict}
        if get_origin(kind) is Literal:
            options |= {"type": str, "choices": get_args(kind)}
        elif get_origin(kind) is list:
            # Values of a flag that is repeated add up.
            action = "store" if options.get("default") else "extend"
            options |= {"type": get_args(kind)[0], "nargs": "+", "action": action}
        elif kind is bool:
            options |= {"type": string_to_bool, "nargs": "?", "const": True}
        else:
            options["type"] = kind
        self.add_argument(*names, **options)

    def _add_trainer(self, kind: Any) -> None:
        """The arguments of a subclass of transformers' `TrainingArguments`."""
        from ..private_names import add_field

        group = self.add_argument_group(_TRAINER)
        for field, of in _fields(kind):
            owner = next(each for each in kind.__mro__ if field.name in inspect.get_annotations(each))
            is_listed_last = owner.__module__.startswith("transformers.") and field.name not in _MOST_USED
            field.type = of
            add_field(group if is_listed_last else self, field)

    def error(self, message: str) -> NoReturn:
        raise ValueError(f"{message} (`{self.prog} --help` describes every argument).")

    def _get_value(self, action: argparse.Action, arg_string: str) -> Any:
        if not arg_string and action.dest in _PLACES:
            # Else an empty path is the current folder, and an empty name the default.
            raise ValueError(f"`{action.dest}` is '': give a path or a name, or leave the argument out.")
        try:
            return super()._get_value(action, arg_string)
        except argparse.ArgumentError as error:
            name = getattr(action.type, "__name__", str(action.type))
            kind = _KINDS.get(name, f"a {name}")
            raise ValueError(f"`{action.dest}` is {arg_string!r}: give {kind}.") from error

    def _check_value(self, action: argparse.Action, value: Any) -> None:
        if action.choices is not None and value not in action.choices:
            raise ValueError(f"`{action.dest}` is {value!r}: choose one of {', '.join(map(str, action.choices))}.")


def check_names(data: list[str]) -> None:
    """
    Raises a `ValueError` if two files of `data`, whose results go by their names, have the same name, or if one has
    the name under which the results of several are added up.
    """
    names = [Path(source).stem for source in data]
    if len(set(names)) < len(names):
        raise ValueError(f"`data` is {data}: two files have the same name; rename one of them.")
    if len(names) > 1 and ALL_DATA in names:
        raise ValueError(f"`data` is {data}: results of all files go by the name {ALL_DATA!r}; rename that file.")


def check_output(name: str, folder: str, **read: str | None) -> None:
    """
    Refuses a folder that cannot be written to, before the work whose result belongs there, or that is one of the
    folders which a command reads.

    Args:
        name (`str`): the argument that `folder` is of.
        folder (`str`): the folder, which need not be there yet.
        read (`str` or `None`): names of the Hub and folders, by the argument that they are of.

    Raises:
        `ValueError`: naming the argument, its value and the remedy.
    """
    check_folder(name, folder)
    for source, place in read.items():
        if place is not None and Path(place).is_dir() and Path(place).resolve() == Path(folder).resolve():
            raise ValueError(f"`{name}` is {folder!r}, the folder of the {source} itself: give another one.")


def check_seed(seed: int) -> None:
    """Raises a `ValueError` for a seed that the random sources do not take."""
    if not 0 <= seed < 2**32:
        raise ValueError(f"`seed` is {seed}; give an integer from 0 to {2**32 - 1}.")


def check_text(name: str, text: str) -> None:
    """
    Refuses a text from bytes that are no UTF-8, which no tokenizer reads.

    Raises:
        `ValueError`: naming the argument `name`, its value and the remedy.
    """
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise ValueError(f"`{name}` is {short(text)}, which is no UTF-8: give a text in UTF-8.") from error


def string_to_bool(text: str) -> bool:
    """
    The value of a flag that takes one.

    Raises:
        `argparse.ArgumentTypeError`: for another text.
    """
    known = {"yes": True, "true": True, "t": True, "y": True, "1": True}
    known |= {"no": False, "false": False, "f": False, "n": False, "0": False}
    if text.lower() not in known:
        raise argparse.ArgumentTypeError(f"{text!r} is neither true nor false")
    return known[text.lower()]


def _is_of_trainer(kind: Any) -> bool:
    return any(base.__module__.startswith("transformers.") for base in kind.__mro__)


def _fields(kind: Any) -> Iterator[tuple[dataclasses.Field, Any]]:
    """Of a dataclass, each field that is an argument, and its type."""
    hints = get_type_hints(kind)
    return ((field, hints[field.name]) for field in dataclasses.fields(kind) if field.init)


def at_least(arguments: Any, least: int, *names: str) -> None:
    """
    Refuses numbers that are too small, in the fields `names` of a command's arguments; `None` is not checked.

    Raises:
        `ValueError`: naming field, value and remedy.
    """
    for name in names:
        value = getattr(arguments, name)
        if value is not None and value < least:
            raise ValueError(f"`{name}` is {value}; give {least} or more.")


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
    parser = CommandParser(types, prog=prog, description=description, allow_abbrev=False)
    parser.add_argument("--config", help="YAML file with any of these arguments; the command line wins over it.")
    # argparse's own usage names every argument: a page of its own before the list that explains them.
    required = [f"--{action.dest} {action.dest.upper()}" for action in parser._actions if action.required]
    parser.usage = " ".join([prog, *required, "[--config CONFIG] [--ARGUMENT VALUE ...]"])
    flags = [flag[2:] for action in parser._actions for flag in action.option_strings if flag.startswith("--")]

    first = CommandParser(prog=prog, add_help=False, allow_abbrev=False)
    first.add_argument("--config")
    path = first.parse_known_args(argv)[0].config
    given = {word.partition("=")[0].lstrip("-").replace("-", "_") for word in argv if word.startswith("--")}
    words = argv if path is None else [*_words_of_file(path, parser, given), f"--config={path}", *argv]
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


class _Loader(yaml.SafeLoader):
    """Refuses aliases: a few lines of them stand for more values than a memory holds."""

    def compose_node(self, parent: Any, index: Any) -> Any:
        if self.check_event(yaml.AliasEvent):
            raise yaml.YAMLError(f"`*{self.peek_event().anchor}` is an alias: write the value itself.")
        return super().compose_node(parent, index)


def _read(path: str) -> str:
    size = Path(path).stat().st_size
    if size > _LARGEST_FILE:
        raise ValueError(f"it has {size} bytes, more than {_LARGEST_FILE}.")
    return Path(path).read_text(encoding="utf-8")


def _words_of_file(path: str, parser: CommandParser, given: Collection[str]) -> list[str]:
    """The command line that says the same as a YAML file, without lists that are `given` on the command line."""
    if not Path(path).is_file():
        raise FileNotFoundError(f"`config` is {path!r}, which is not a file: give a YAML file of arguments.")
    try:
        values = yaml.load(_read(path), _Loader)
    except (yaml.YAMLError, ValueError) as error:
        raise ValueError(f"{path} is not YAML: {error}") from error
    except RecursionError as error:
        raise ValueError(f"{path} is nested too deeply: it must hold lines of `name: value`.") from error
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
        elif isinstance(value, list) and action.nargs != "+":
            raise ValueError(f"{path}: `{name}` is {short(value)}: give a single value.")
        elif action.nargs == "+" and name in given:
            # Values of both would add up.
            continue
        elif isinstance(value, list):
            # An empty one is what most are by default.
            if value or action.default != []:
                words += [f"--{name}", *map(str, value)]
        elif isinstance(value, dict):
            try:
                words.append(f"--{name}={json.dumps(value)}")
            # A date or a binary, as value or key.
            except TypeError as error:
                raise ValueError(f"{path}: `{name}` is {short(value)}: give texts and numbers.") from error
        else:
            words.append(f"--{name}={value}")
    return words


def _nearest(name: str, known: Collection[str], prefix: str = "") -> str:
    nearest = difflib.get_close_matches(name.replace("-", "_"), known, n=1, cutoff=0.5)
    return f"did you mean `{prefix}{nearest[0]}`?" if nearest else "`--help` lists all of them."
