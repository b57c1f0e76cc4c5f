# Copyright 2026 The hf_falcon authors. Licensed under the Apache License, Version 2.0.
"""The arguments of `hf-falcon evaluate`."""

from __future__ import annotations

from dataclasses import dataclass, field

from .run_arguments import CommandParser, at_least, check_names

DESCRIPTION = """`hf-falcon evaluate`: how many of a drafter's tokens a target accepts, on files of prompts."""


@dataclass
class EvaluateArguments:
    """
    Arguments of `hf-falcon evaluate`.

    > Parameters that control what is measured

    Args:
        data (`list[str]`): what `hf-falcon prepare` reads, or `mt_bench`, `humaneval`, `gsm8k` of the Hub; the first
            turn is the prompt.
        target, drafter (`str`, *optional*): names or folders; those of the demo if left out.
        max_new_tokens (`int`, *optional*, defaults to 128): new tokens a prompt, at most.
        limit (`int`, *optional*): prompts of each file, from the start.
        check (`bool`, *optional*, defaults to `False`):
            also decode plainly, and report at which token, and by what gap of logits, outputs diverge from it.
        chat_template_kwargs (`dict` or `str`, *optional*): variables of the chat template, or their JSON
            (`{"enable_thinking": false}`).
        row_invariant (`bool`, *optional*, defaults to `False`):
            decode both ways inside [`row_invariant`], where in 16 bits on a CPU no output may diverge.

    > Parameters that control the drafting, in place of the drafter's own

    The result depends on the drafter and not on the machine: by default it drafts a tree of one size every round, and
    prompt lookup is off, unless the drafter is "lookup".

    Args:
        num_assistant_tokens, num_draft_passes, draft_top_k, draft_width, draft_tree, assistant_confidence_threshold,
            num_assistant_tokens_schedule, prompt_lookup_num_tokens, context_bonuses (*optional*):
            see [`DraftOptions`]; `draft_top_k` 1 drafts a chain, `context_bonuses` 0 has no bonuses.
    """

    data: list[str] = field(
        metadata={
            "help": "Files or data sets as in `hf-falcon prepare`, or names of the Hub; the first turn is the prompt."
        }
    )
    target: str | None = field(default=None, metadata={"help": "Target, from the Hub or a folder."})
    drafter: str | None = field(default=None, metadata={"help": "Drafter, from the Hub or a folder."})
    max_new_tokens: int = field(default=128, metadata={"help": "New tokens a prompt, at most."})
    limit: int | None = field(default=None, metadata={"help": "Prompts of each file."})
    check: bool = field(default=False, metadata={"help": "Also decode plainly, and report where outputs diverge."})
    row_invariant: bool = field(
        default=False, metadata={"help": "Decode where rows do not depend on their number: in 16 bits, on a CPU."}
    )
    num_assistant_tokens: int | None = field(default=None, metadata={"help": "Node budget of a tree."})
    num_draft_passes: int | None = field(default=None, metadata={"help": "Draft passes a round, at most."})
    draft_top_k: int | None = field(default=None, metadata={"help": "Children of a node, at most; 1 is a chain."})
    draft_width: int | None = field(default=None, metadata={"help": "Paths that a pass extends, at most."})
    draft_tree: str | None = field(default=None, metadata={"help": "'dynamic' or 'static'."})
    assistant_confidence_threshold: float | None = field(
        default=None, metadata={"help": "Stop drafting below this probability."}
    )
    num_assistant_tokens_schedule: str = field(
        default="constant", metadata={"help": "'constant', or 'heuristic': the size that pays on this machine."}
    )
    prompt_lookup_num_tokens: int | None = field(
        default=None, metadata={"help": "Tokens of prompt lookup, at most; by default 0, which is off."}
    )
    context_bonuses: list[float] | None = field(
        default=None, metadata={"help": "Bonuses on the logits of tokens that the text repeats; 0 is off."}
    )
    chat_template_kwargs: dict | str | None = field(
        default=None, metadata={"help": "Variables of the chat template, as JSON: '{\"enable_thinking\": false}'."}
    )
    dtype: str = field(default="auto", metadata={"help": "auto, float32, bfloat16 or float16."})
    device: str | None = field(default=None, metadata={"help": "By default cuda where there is one, else cpu."})
    json: bool = field(default=False, metadata={"help": "Print the result as one JSON object, nothing else."})

    def __post_init__(self) -> None:
        from ..training.chat_templates import template_variables

        at_least(self, 1, "limit", "max_new_tokens", "num_assistant_tokens")
        check_names(self.data)
        template_variables(self.chat_template_kwargs)
        if self.context_bonuses == [0]:
            self.context_bonuses = []


def parser() -> CommandParser:
    """The parser of `hf-falcon evaluate`."""
    return CommandParser(EvaluateArguments, prog="hf-falcon evaluate", description=DESCRIPTION)
