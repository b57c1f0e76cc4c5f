# Copyright 2026 The hf_falcon authors. Licensed under the Apache License, Version 2.0.
"""The arguments of `hf-falcon prepare`."""

from __future__ import annotations

from ..training.prepare_arguments import PrepareArguments
from .run_arguments import CommandParser

DESCRIPTION = """
`hf-falcon prepare`: generates the target's responses to dialogues, and writes them as one token file.
"""


def parser() -> CommandParser:
    """The parser of `hf-falcon prepare`."""
    return CommandParser(PrepareArguments, prog="hf-falcon prepare", description=DESCRIPTION)
