# Copyright 2026 The hf_falcon authors. Licensed under the Apache License, Version 2.0.
"""The arguments of `hf-falcon info`."""

from __future__ import annotations

from dataclasses import dataclass, field

from .run_arguments import CommandParser

DESCRIPTION = """
`hf-falcon info REPOSITORY`: describes a drafter from its configuration, its card and the headers of its weight files,
without downloading weights.
"""


@dataclass
class InfoArguments:
    """Arguments of `hf-falcon info`; `help` describes each."""

    revision: str | None = field(default=None, metadata={"help": "Branch, tag or commit of a repository."})
    json: bool = field(default=False, metadata={"help": "Print one JSON object, nothing else."})


def parser() -> CommandParser:
    """The parser of `hf-falcon info`."""
    parser = CommandParser(InfoArguments, prog="hf-falcon info", description=DESCRIPTION)
    parser.add_argument("repository", help="Repository of the Hub, or a folder.")
    return parser
