# Copyright 2026 The hf_falcon authors. Licensed under the Apache License, Version 2.0.
"""The arguments of `hf-falcon demo`."""

from __future__ import annotations

from dataclasses import dataclass, field

from .run_arguments import CommandParser, at_least, check_text

DESCRIPTION = """
`hf-falcon demo`: the same text with and without the drafter, side by side, and the time that the drafter saves.
"""


@dataclass
class DemoArguments:
    """Arguments of `hf-falcon demo`; `help` describes each."""

    target: str | None = field(
        default=None, metadata={"help": "Target, from the Hub or a folder. By default SmolLM2-135M-Instruct."}
    )
    drafter: str | None = field(
        default=None,
        metadata={"help": "Drafter, from the Hub or a folder. By default the one for SmolLM2-135M-Instruct."},
    )
    prompt: list[str] | None = field(
        default=None, metadata={"help": "Your own prompts, in place of the three of the demo."}
    )
    max_new_tokens: int = field(default=128, metadata={"help": "New tokens a prompt, at most."})
    num_assistant_tokens: int | None = field(
        default=None,
        metadata={"help": "Draft tokens that the target verifies a round, in place of the drafter's own."},
    )
    repeats: int = field(default=2, metadata={"help": "Timed runs of each kind; the median counts."})
    dtype: str = field(
        default="auto", metadata={"help": "auto (the fastest on the device), float32, bfloat16 or float16."}
    )
    device: str | None = field(default=None, metadata={"help": "By default cuda where there is one, else cpu."})
    json: bool = field(default=False, metadata={"help": "Print the measurements as one JSON object, nothing else."})

    def __post_init__(self) -> None:
        at_least(self, 1, "max_new_tokens", "repeats", "num_assistant_tokens")
        for prompt in self.prompt or ():
            check_text("prompt", prompt)


def parser() -> CommandParser:
    """The parser of `hf-falcon demo`."""
    return CommandParser(DemoArguments, prog="hf-falcon demo", description=DESCRIPTION)
