# Copyright 2026 The hf_falcon authors. Licensed under the Apache License, Version 2.0.
"""The arguments of `hf-falcon serve`."""

from __future__ import annotations

import socket
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from .generate_arguments import ModelArguments
from .learning_arguments import LearningArguments
from .run_arguments import CommandParser

if TYPE_CHECKING:
    from transformers import PreTrainedModel

DESCRIPTION = """
`hf-falcon serve`: serves a target with its drafter by OpenAI's interface, with transformers' own server: chat
completions, completions and responses, also streamed. Ctrl-C, SIGTERM or SIGHUP ends it. There are no users or
passwords: listen on 127.0.0.1 only, or behind a proxy that has them.
"""


@dataclass
class ServeArguments(LearningArguments, ModelArguments):
    """Arguments of `hf-falcon serve`; `help` describes each."""

    host: str = field(default="127.0.0.1", metadata={"help": "Address to listen on."})
    port: int = field(default=8000, metadata={"help": "Port to listen on; 0 takes a free one."})
    compile: bool = field(
        default=False,
        metadata={
            "help": "Compile rounds (`compile_rounds`): on a CPU by a process in the background, between requests, "
            "unless the code is kept on this machine; on other devices first, which takes minutes."
        },
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        self.check_learning(self.plain)
        if not self.host:
            # The system would listen on every address.
            raise ValueError("`host` is '': give an address, such as 127.0.0.1 or, for every one, 0.0.0.0.")
        if not 0 <= self.port < 2**16:
            raise ValueError(f"`port` is {self.port}; give 0 (a free port) to {2**16 - 1}.")

    def compiles_first(self, target: PreTrainedModel) -> bool:
        """See [`ModelArguments.compiles_first`]. On a CPU the server does not wait."""
        return self.compile and target.device.type != "cpu"

    def listen(self) -> socket.socket:
        """
        A socket at the address.

        Raises:
            `OSError`: naming the fields, the reason and the remedy.
        """
        family = socket.AF_INET6 if ":" in self.host else socket.AF_INET
        try:
            return socket.create_server((self.host, self.port), family=family)
        # A name that is no host's can be another error.
        except (OSError, TypeError, UnicodeError) as error:
            reason = getattr(error, "strerror", None) or error
            raise OSError(
                f"Cannot listen on `host` {self.host!r}, `port` {self.port} ({reason}): give others."
            ) from error


def parser() -> CommandParser:
    """The parser of `hf-falcon serve`."""
    return CommandParser(ServeArguments, prog="hf-falcon serve", description=DESCRIPTION)
