# Copyright 2026 The hf_falcon authors. Licensed under the Apache License, Version 2.0.
"""The arguments of `hf-falcon bench`."""

from __future__ import annotations

from dataclasses import dataclass, field

from ..bench.method_names import FALCON, METHOD_NAMES
from ..bench.metrics import PLAIN
from ..bench.prompts import HUB_DATA
from ..bench.shapes import SHAPES
from .generate_arguments import check_sampling
from .run_arguments import CommandParser, at_least, check_names

# What a report says of the models and the machine, by these names.
REPORTED = ["target", "drafter", "draft_model", "target_weights", "dtype", "device", "threads"]
REPORTED += ["hf_falcon", "torch", "transformers", "row_invariant", "busy_processes", "chat_template_kwargs"]

DESCRIPTION = """`hf-falcon bench`: compares decoding methods on the same target, prompts and machine, in one run."""


@dataclass
class BenchArguments:
    """Arguments of `hf-falcon bench`; `help` describes each."""

    data: list[str] = field(
        metadata={"help": f"Files or data sets as in `hf-falcon prepare`, or names of the Hub: {', '.join(HUB_DATA)}."}
    )
    target: str | None = field(default=None, metadata={"help": "Target, from the Hub or a folder."})
    drafter: str | None = field(default=None, metadata={"help": "Drafter, from the Hub or a folder."})
    eagle_like: str | None = field(
        default=None, metadata={"help": "Drafter of `eagle_like`; by default `drafter`, if it is of that kind."}
    )
    medusa_like: str | None = field(
        default=None,
        metadata={
            "help": "Drafter of `medusa_like`, from `train --architecture medusa_like`; by default the one for the "
            "demo's target."
        },
    )
    drafters: list[str] = field(
        default_factory=list,
        metadata={"help": "NAME=FOLDER: further drafters; each is a method of that name."},
    )
    draft_model: str | None = field(
        default=None,
        metadata={
            "help": "Smaller language model: `draft_model` is our loop with it, `assisted` is transformers' own."
        },
    )
    decision: str | None = field(
        default=None, metadata={"help": "File of examples/decision_model.py, for `falcon_classifier`."}
    )
    methods: str = field(
        default="plain,prompt_lookup,falcon",
        metadata={
            "help": f"Separated by commas, from {', '.join(METHOD_NAMES)}. `falcon@8` is `falcon` with 8 nodes a "
            "tree; the same holds for all methods that draft trees."
        },
    )
    node_budgets: list[int] = field(
        default_factory=list,
        metadata={"help": "Also `falcon` with each of these numbers of nodes."},
    )
    scaled: str | None = field(
        default=None,
        metadata={
            "help": f"One of {', '.join(SHAPES)}: put the functions of the target and of its drafters into networks "
            "of this size."
        },
    )
    max_new_tokens: int = field(default=128, metadata={"help": "New tokens an answer, at most."})
    limit: int | None = field(default=None, metadata={"help": "Prompts of each file, from the start."})
    max_turns: int | None = field(default=None, metadata={"help": "Turns of a prompt, from the first."})
    temperature: float = field(default=0.0, metadata={"help": "0 is greedy decoding."})
    repeats: int = field(default=1, metadata={"help": "Timed runs of each answer; the median counts."})
    chat_template_kwargs: dict | str | None = field(
        default=None, metadata={"help": "Variables of the chat template, as JSON: '{\"enable_thinking\": false}'."}
    )
    row_invariant: bool = field(
        default=False,
        metadata={"help": "Decode where rows do not depend on their number: in 16 bits, on a CPU, all are identical."},
    )
    busy_processes: int = field(
        default=0, metadata={"help": "Other processes that compute meanwhile: what is left on a machine in use."}
    )
    dtype: str = field(default="auto", metadata={"help": "auto, float32, bfloat16 or float16."})
    device: str | None = field(default=None, metadata={"help": "By default cuda where there is one, else cpu."})
    output: str = field(default="bench", metadata={"help": "Folder of the traces and the report."})

    def __post_init__(self) -> None:
        from ..training.chat_templates import template_variables

        at_least(self, 1, "max_new_tokens", "repeats", "limit", "max_turns")
        at_least(self, 0, "busy_processes")
        template_variables(self.chat_template_kwargs)
        check_sampling(self.temperature, None)
        if self.scaled is not None and self.scaled not in SHAPES:
            raise ValueError(f"`scaled` is {self.scaled!r}; choose one of {', '.join(SHAPES)}.")
        if any(budget < 1 for budget in self.node_budgets):
            raise ValueError(f"`node_budgets` is {self.node_budgets}; give numbers of 1 or more.")
        check_names(self.data)
        for place, given in enumerate(self.drafters):
            name, _, folder = given.partition("=")
            if any(other.startswith(f"{name}=") for other in self.drafters[:place]):
                raise ValueError(f"`drafters` has the name {name!r} more than once; give each another.")
            # A report has names of its own for the models and the machine.
            if not folder or not name.isidentifier() or name in METHOD_NAMES or name in REPORTED:
                raise ValueError(
                    f"`drafters` has {given!r}; write NAME=FOLDER, the name of letters, digits and _, and no method's "
                    f"or {', '.join(REPORTED)}."
                )

    @property
    def method_names(self) -> list[str]:
        """The names of all methods to measure, plain decoding first."""
        names = [PLAIN, *(name.strip() for name in self.methods.split(",") if name.strip())]
        names += [given.partition("=")[0] for given in self.drafters]
        names += [f"{FALCON}@{budget}" for budget in self.node_budgets]
        return list(dict.fromkeys(names))


def parser() -> CommandParser:
    """The parser of `hf-falcon bench`."""
    return CommandParser(BenchArguments, prog="hf-falcon bench", description=DESCRIPTION)
