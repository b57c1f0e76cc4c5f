# Copyright 2026 The hf_falcon authors. Licensed under the Apache License, Version 2.0.
"""The arguments of `hf-falcon chat`."""

from __future__ import annotations

from dataclasses import dataclass, field

from .generate_arguments import DecodingArguments
from .learning_arguments import LearningArguments
from .run_arguments import CommandParser, check_text

DESCRIPTION = """
`hf-falcon chat`: a conversation in the terminal, with the speed and the acceptance of each reply.
Ctrl-C stops a reply. `/help` lists the commands of the chat; an empty line, `/exit` or Ctrl-D ends it.
"""


@dataclass
class ChatArguments(LearningArguments, DecodingArguments):
    """Arguments of `hf-falcon chat`; `help` describes each."""

    system: str | None = field(default=None, metadata={"help": "A system message, before the conversation."})

    def __post_init__(self) -> None:
        super().__post_init__()
        self.check_learning(self.plain)
        check_text("system", self.system or "")


def parser() -> CommandParser:
    """The parser of `hf-falcon chat`."""
    return CommandParser(ChatArguments, prog="hf-falcon chat", description=DESCRIPTION)
