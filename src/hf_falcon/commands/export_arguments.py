# Copyright 2026 The hf_falcon authors. Licensed under the Apache License, Version 2.0.
"""The arguments of `hf-falcon export`."""

from __future__ import annotations

from dataclasses import dataclass, field

from .run_arguments import CommandParser

DESCRIPTION = """
`hf-falcon export FOLDER OUTPUT`: writes an EAGLE-3 drafter in the layout of the package speculators, which serving
engines such as vLLM read.
"""


@dataclass
class ExportArguments:
    """Arguments of `hf-falcon export`; `help` describes each."""

    target: str | None = field(
        default=None,
        metadata={"help": "Name or folder of the target, for the file and its embedding. By default the drafter's."},
    )
    dtype: str | None = field(default=None, metadata={"help": "Dtype of the weights; by default as they are."})
    without_embedding: bool = field(
        default=False,
        metadata={"help": "Leave out the target's embedding. The file is smaller, and the engine must add it."},
    )


def parser() -> CommandParser:
    """The parser of `hf-falcon export`."""
    parser = CommandParser(ExportArguments, prog="hf-falcon export", description=DESCRIPTION)
    parser.add_argument("drafter", help="Folder or repository of the drafter.")
    parser.add_argument("output", help="Folder to write.")
    return parser
