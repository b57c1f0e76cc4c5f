# Copyright 2026 The hf_falcon authors. Licensed under the Apache License, Version 2.0.
"""The arguments of `hf-falcon doctor`."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from .generate_arguments import check_sampling
from .run_arguments import CommandParser, at_least, check_names

DESCRIPTION = """
`hf-falcon doctor`: why few draft tokens are accepted, with the evidence and the remedy of each cause; or, with
`--exactness`, which modules of the target give a token other bits when several tokens run together.
"""


@dataclass
class DoctorArguments:
    """
    Arguments of `hf-falcon doctor`.

    Args:
        target, drafter (`str`, *optional*): names or folders; the models of the demo if left out. With another target
            and no drafter, the command says what can draft for it.
        data (`list[str]`, *optional*): what `hf-falcon prepare` reads, or `mt_bench`, `humaneval`, `gsm8k` of the Hub;
            the first turn is the prompt. Built-in prompts if left out; otherwise the acceptance is compared with
            theirs.
        limit (`int`, *optional*, defaults to 6): prompts of each file, from the start.
        max_new_tokens (`int`, *optional*, defaults to 64): tokens of an answer, at most.
        temperature (`float`, *optional*): the temperature that you sample with; by default that of the target's
            generation configuration, if it samples.
        chat_template (`str`, *optional*): Jinja file with another chat template to compare with, for example the one
            that the drafter was trained with.
        chat_template_kwargs (`dict` or `str`, *optional*): variables of the chat template, or their JSON
            (`{"enable_thinking": false}`).
        exactness (`bool`, *optional*, defaults to `False`):
            Compare forwards over several tokens with forwards over one instead, module by module, outside and inside
            [`row_invariant`]. Nothing is drafted.
    """

    target: str | None = field(default=None, metadata={"help": "Target, from the Hub or a folder."})
    drafter: str | None = field(default=None, metadata={"help": "Drafter, from the Hub or a folder."})
    data: list[str] | None = field(
        default=None,
        metadata={
            "help": "Files or data sets as in `hf-falcon prepare`, or names of the Hub; the first turn is the prompt."
        },
    )
    limit: int = field(default=6, metadata={"help": "Prompts of each file, from the start."})
    max_new_tokens: int = field(default=64, metadata={"help": "Tokens of an answer, at most."})
    temperature: float | None = field(
        default=None, metadata={"help": "Temperature that you sample with; the target's own if left out."}
    )
    chat_template: str | None = field(
        default=None, metadata={"help": "Jinja file with another chat template to compare with."}
    )
    chat_template_kwargs: dict | str | None = field(
        default=None, metadata={"help": "Variables of the chat template, as JSON: '{\"enable_thinking\": false}'."}
    )
    dtype: str = field(default="auto", metadata={"help": "auto, float32, bfloat16 or float16."})
    device: str | None = field(default=None, metadata={"help": "By default cuda where there is one, else cpu."})
    exactness: bool = field(
        default=False,
        metadata={"help": "Show instead which modules of the target compute other values for several tokens."},
    )
    json: bool = field(default=False, metadata={"help": "Print the result as one JSON object, nothing else."})

    def __post_init__(self) -> None:
        from ..training.chat_templates import template_variables

        at_least(self, 1, "limit", "max_new_tokens")
        check_names(self.data or [])
        template_variables(self.chat_template_kwargs)
        if self.temperature == 0:
            raise ValueError("`temperature` is 0.0; give a number above 0, or leave it out (greedy).")
        check_sampling(self.temperature, None)
        if self.chat_template is not None and not Path(self.chat_template).is_file():
            raise FileNotFoundError(
                f"`chat_template` is {self.chat_template!r}, which is not a file: give a Jinja file."
            )


def parser() -> CommandParser:
    """The parser of `hf-falcon doctor`."""
    return CommandParser(DoctorArguments, prog="hf-falcon doctor", description=DESCRIPTION)
