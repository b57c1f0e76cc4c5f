# Copyright 2026 The hf_falcon authors. Licensed under the Apache License, Version 2.0.
"""The arguments of `hf-falcon generate`."""

from __future__ import annotations

import sys
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from ..training.prepare_arguments import LEAST_TEMPERATURE, is_temperature
from .run_arguments import CommandParser, at_least, check_seed

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

DESCRIPTION = """`hf-falcon generate`: the answer to a prompt, shown while it is generated."""


@dataclass
class ModelArguments:
    """Arguments of `hf-falcon generate`, `hf-falcon chat` and `hf-falcon serve`; `help` describes each."""

    target: str | None = field(
        default=None, metadata={"help": "Target, from the Hub or a folder. By default SmolLM2-135M-Instruct."}
    )
    drafter: str | None = field(
        default=None,
        metadata={
            "help": "Drafter, from the Hub or a folder; `lookup` is prompt lookup alone, for any target. By default "
            "the one for SmolLM2-135M-Instruct."
        },
    )
    plain: bool = field(default=False, metadata={"help": "Decode without the drafter."})
    dtype: str = field(
        default="auto", metadata={"help": "auto (the fastest on the device), float32, bfloat16 or float16."}
    )
    device: str | None = field(default=None, metadata={"help": "By default cuda where there is one, else cpu."})
    pack: bool = field(default=False, metadata={"help": "Pack the weights of both for a CPU (`pack_weights`)."})
    compile: bool = field(
        default=False, metadata={"help": "Compile rounds first, unless they are kept (`compile_rounds`)."}
    )

    def __post_init__(self) -> None:
        if self.compile and self.plain:
            raise ValueError("`compile` is for rounds, and with `plain` there are none: leave one of the two out.")

    def compiles_first(self, target: PreTrainedModel) -> bool:
        """Whether rounds are compiled before anything else."""
        return self.compile

    def load(self) -> tuple[PreTrainedModel, PreTrainedTokenizerBase, PreTrainedModel | None]:
        """The target, its tokenizer and the drafter, `None` for plain decoding; packed and compiled as asked for."""
        from ..cpu.compiling import compile_rounds
        from ..cpu.kept_rounds import offers_packed_rounds
        from ..cpu.packing import pack_weights
        from .models import load_drafter, load_target, resolve_device

        device = resolve_device(self.device)
        target, tokenizer = load_target(self.target, self.dtype, device)
        drafter = None if self.plain else load_drafter(self.drafter, target.dtype, device, target)
        # What `hf-falcon tune --compile --pack` kept.
        compiles = self.compiles_first(target)
        if self.pack or (drafter is not None and not compiles and offers_packed_rounds(target)):
            for model in filter(None, (target, drafter)):
                pack_weights(model)
        if compiles:
            print("Compiling rounds, which can take minutes.", file=sys.stderr, flush=True)
            compile_rounds(target, drafter=drafter)
        return target, tokenizer, drafter


@dataclass
class DecodingArguments(ModelArguments):
    """Arguments of `hf-falcon generate` and `hf-falcon chat`; `help` describes each."""

    max_new_tokens: int = field(default=512, metadata={"help": "New tokens of a text, at most."})
    do_sample: bool = field(default=False, metadata={"help": "Sample; by default the most probable token is chosen."})
    temperature: float | None = field(
        default=None, metadata={"help": "Sample at this temperature; 0 chooses the most probable token."}
    )
    top_p: float | None = field(
        default=None, metadata={"help": "Sample from the most probable tokens that have this probability together."}
    )
    seed: int | None = field(default=None, metadata={"help": "Seed of sampling."})
    chat_template_kwargs: dict | str | None = field(
        default=None, metadata={"help": "Variables of the chat template, as JSON: '{\"enable_thinking\": false}'."}
    )

    def __post_init__(self) -> None:
        from ..training.chat_templates import template_variables

        super().__post_init__()
        at_least(self, 1, "max_new_tokens")
        self.chat_template_kwargs = self.variables = template_variables(self.chat_template_kwargs)
        check_sampling(self.temperature, self.top_p)
        if self.temperature == 0 and (self.do_sample or self.top_p is not None):
            raise ValueError(
                "`temperature` is 0, which does not sample: leave out `do_sample` and `top_p`, or raise it."
            )
        # A temperature has no other use.
        self.do_sample = self.do_sample or bool(self.temperature) or self.top_p is not None
        if self.seed is not None:
            check_seed(self.seed)
            from transformers import set_seed

            set_seed(self.seed)

    def load(self) -> tuple[PreTrainedModel, PreTrainedTokenizerBase, PreTrainedModel | None]:
        """See [`ModelArguments.load`]; says where the drafter was trained with other `chat_template_kwargs`."""
        from .models import note_other_variables

        target, tokenizer, drafter = super().load()
        note_other_variables(drafter, self.variables)
        return target, tokenizer, drafter

    def options(self) -> dict[str, Any]:
        """The keyword arguments of `generate`."""
        options: dict[str, Any] = {"max_new_tokens": self.max_new_tokens, "do_sample": self.do_sample}
        if self.do_sample:
            options["temperature"] = 1.0 if self.temperature is None else self.temperature
            options["top_p"] = 1.0 if self.top_p is None else self.top_p
        return options


def check_sampling(temperature: float | None, top_p: float | None) -> None:
    """
    Checks the arguments of sampling; `None` is not checked.

    Raises:
        `ValueError`: naming field, value and remedy.
    """
    if temperature is not None and not is_temperature(temperature):
        raise ValueError(
            f"`temperature` is {temperature}; give 0 (the most probable token), or {LEAST_TEMPERATURE} or more."
        )
    if top_p is not None and not 0 < top_p <= 1:
        raise ValueError(f"`top_p` is {top_p}; give a number above 0 and at most 1.")


@dataclass
class GenerateArguments(DecodingArguments):
    """Arguments of `hf-falcon generate`; `help` describes each."""

    prompt: str = field(default="", metadata={"help": "Text to answer or continue; read from stdin if left out."})
    lookup_text: list[str] = field(
        default_factory=list, metadata={"help": "Text files whose words are drafted where the answer repeats them."}
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.lookup_text and self.plain:
            raise ValueError("`lookup_text` is for drafts, and with `plain` there are none: leave one of the two out.")


def parser() -> CommandParser:
    """The parser of `hf-falcon generate`."""
    return CommandParser(GenerateArguments, prog="hf-falcon generate", description=DESCRIPTION)
