# Copyright 2026 The hf_falcon authors. Licensed under the Apache License, Version 2.0.
"""The arguments of `hf-falcon tune`."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from .run_arguments import CommandParser, at_least

DESCRIPTION = """
`hf-falcon tune`: the cost of a round on this machine, and the predicted speed-up of trees of each size.
"""


@dataclass
class TuneArguments:
    """
    Arguments of `hf-falcon tune`.

    Args:
        target, drafter (`str`, *optional*): names or folders; the models of the demo if left out.
        data (`list[str]`, *optional*): files as `hf-falcon prepare` reads them, whose answers are drafted; three
            built-in prompts if left out.
        limit (`int`, *optional*, defaults to 3): prompts of each file, from the start.
        max_new_tokens (`int`, *optional*, defaults to 64): tokens of an answer, at most.
        chat_template_kwargs (`dict` or `str`, *optional*): variables of the chat template, or their JSON
            (`{"enable_thinking": false}`).
        context (`int`, *optional*, defaults to 256): tokens before the round that is timed.
        seconds (`float`, *optional*, defaults to 20): seconds for which the target is timed.
        pack (`bool`, *optional*, defaults to `False`): pack the weights of both models first.
        compile (`bool`, *optional*, defaults to `False`): compile rounds first. On a CPU the compiled code is kept,
            and later processes use it without being asked.
        output (`str`, *optional*): folder of `tune.json` and `tune.png`; by default the drafter's folder. If the
            drafter is in a folder, its `generation_config.json` gets `draft_calibration` in any case.
    """

    target: str | None = field(default=None, metadata={"help": "Target, from the Hub or a folder."})
    drafter: str | None = field(default=None, metadata={"help": "Drafter, from the Hub or a folder."})
    data: list[str] | None = field(default=None, metadata={"help": "Files or data sets as in `hf-falcon prepare`."})
    limit: int = field(default=3, metadata={"help": "Prompts of each file, from the start."})
    max_new_tokens: int = field(default=64, metadata={"help": "Tokens of an answer, at most."})
    context: int = field(default=256, metadata={"help": "Tokens before the round that is timed."})
    seconds: float = field(default=20.0, metadata={"help": "Seconds for which the target is timed."})
    pack: bool = field(default=False, metadata={"help": "Pack the weights of both models first (`pack_weights`)."})
    compile: bool = field(
        default=False, metadata={"help": "Compile rounds first; later processes use the code (`compile_rounds`)."}
    )
    chat_template_kwargs: dict | str | None = field(
        default=None, metadata={"help": "Variables of the chat template, as JSON: '{\"enable_thinking\": false}'."}
    )
    dtype: str = field(default="auto", metadata={"help": "auto, float32, bfloat16 or float16."})
    device: str | None = field(default=None, metadata={"help": "By default cuda where there is one, else cpu."})
    output: str | None = field(default=None, metadata={"help": "Folder of tune.json and tune.png."})

    def __post_init__(self) -> None:
        from ..training.chat_templates import template_variables

        at_least(self, 1, "limit", "max_new_tokens", "context")
        template_variables(self.chat_template_kwargs)
        if not 0 < self.seconds < math.inf:
            raise ValueError(f"`seconds` is {self.seconds}; give a number above 0.")


def parser() -> CommandParser:
    """The parser of `hf-falcon tune`."""
    return CommandParser(TuneArguments, prog="hf-falcon tune", description=DESCRIPTION)
