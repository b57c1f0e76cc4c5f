# Copyright 2026 The hf_falcon authors. Licensed under the Apache License, Version 2.0.
"""`hf-falcon generate`: the answer to a prompt, shown while it is generated."""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase, TextStreamer, set_seed

from ..core.draft_statistics import DraftStatistics
from ..cpu.compiling import compile_rounds
from ..cpu.packing import pack_weights
from ..drafters.lookup_drafter import file_tokens
from ..lookup import LookupMemory
from ..training.chat_templates import template_variables
from .models import encode, load_drafter, load_target, note_other_variables, resolve_device, resolve_dtype
from .run_arguments import CommandParser, at_least


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
        default=False, metadata={"help": "Compile rounds first, which takes minutes (`compile_rounds`)."}
    )

    def __post_init__(self) -> None:
        if self.compile and self.plain:
            raise ValueError("`compile` is for rounds, and with `plain` there are none: leave one of the two out.")

    def load(self) -> tuple[PreTrainedModel, PreTrainedTokenizerBase, PreTrainedModel | None]:
        """The target, its tokenizer and the drafter, `None` for plain decoding; packed and compiled as asked for."""
        device = resolve_device(self.device)
        dtype = resolve_dtype(self.dtype, device)
        target, tokenizer = load_target(self.target, dtype, device)
        drafter = None if self.plain else load_drafter(self.drafter, dtype, device)
        if self.pack:
            for model in filter(None, (target, drafter)):
                pack_weights(model)
        if self.compile:
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
            set_seed(self.seed)

    def load(self) -> tuple[PreTrainedModel, PreTrainedTokenizerBase, PreTrainedModel | None]:
        """See [`ModelArguments.load`]; says where the drafter was trained with other `chat_template_kwargs`."""
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
    if temperature is not None and not 0 <= temperature < math.inf:
        raise ValueError(f"`temperature` is {temperature}; give 0 (the most probable token) or more.")
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


class _Writer(TextStreamer):
    """Passes on each piece of text, keeps all of it, and counts tokens. A drafted token has no forward of its own."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, write: Callable[[str], None]) -> None:
        super().__init__(tokenizer, skip_prompt=True, skip_special_tokens=True)
        self.text, self._write = "", write
        self.tokens, self.drafted, self._forwards = 0, 0, 0

    def after_forward(self, *_: Any) -> None:
        """A forward hook of the target."""
        self._forwards += 1

    def put(self, value: torch.Tensor) -> None:
        if not self.next_tokens_are_prompt:
            self.tokens += 1
            self.drafted += self._forwards == 0
            self._forwards = 0
        super().put(value)

    def on_finalized_text(self, text: str, stream_end: bool = False) -> None:
        self.text += text
        self._write(text)


class Reply:
    """
    One text, streamed while it is generated. After an interrupt and `stop`, `text` holds the text so far.

    Args:
        target, drafter, tokenizer: see [`DecodingArguments.load`].
        write (`Callable[[str], None]`): takes each piece of text.
    """

    def __init__(
        self,
        target: PreTrainedModel,
        drafter: PreTrainedModel | None,
        tokenizer: PreTrainedTokenizerBase,
        write: Callable[[str], None],
    ) -> None:
        self._target, self._drafter = target, drafter
        self._writer = _Writer(tokenizer, write)
        self._start = time.perf_counter()
        self._seconds: float | None = None
        self._statistics: DraftStatistics | None = None

    @property
    def text(self) -> str:
        """The text so far."""
        return self._writer.text

    @property
    def tokens(self) -> int:
        """Tokens so far, special tokens included."""
        return self._writer.tokens

    @property
    def gain(self) -> str:
        """The speed and the acceptance so far, in words. Tokens a round are tau + 1, the acceptance length."""
        tokens, drafted = self._writer.tokens, self._writer.drafted
        seconds = self._seconds or time.perf_counter() - self._start
        speed = f"{tokens} tokens, {tokens / seconds:.1f} tokens/s"
        if self._drafter is None or (self._seconds is not None and self._statistics is None):
            return speed
        # The first token comes from the prompt's forward, which is not a round.
        tau, alpha = drafted / max(1, tokens - drafted - 1), drafted / max(1, tokens)
        if self._statistics is not None:
            tau, alpha = self._statistics.tau or 0.0, self._statistics.alpha or 0.0
        return f"{speed}, {tau + 1:.2f} tokens a round, {100 * alpha:.0f} % drafted"

    def stop(self) -> None:
        """After an interrupt, writes the last word: a streamer holds it back until it is complete."""
        self._writer.end()

    def run(self, inputs: dict[str, torch.Tensor], options: dict[str, Any]) -> None:
        """Writes the text."""
        self._start = time.perf_counter()
        hook = self._target.register_forward_hook(self._writer.after_forward)
        try:
            output = self._target.generate(
                **inputs,
                **options,
                assistant_model=self._drafter,
                streamer=self._writer,
                return_dict_in_generate=True,
            )
        finally:
            hook.remove()
        self._seconds = time.perf_counter() - self._start
        self._statistics = getattr(output, "draft_statistics", None)


def show(text: str) -> None:
    """Writes a piece of text to stdout at once."""
    sys.stdout.write(text)
    sys.stdout.flush()


def main(argv: list[str]) -> int:
    """Runs `hf-falcon generate`: the text goes to stdout, its speed to stderr. Ctrl-C stops the text."""
    parser = CommandParser(GenerateArguments, prog="hf-falcon generate", description=__doc__)
    arguments = GenerateArguments(**vars(parser.parse_args(argv)))
    prompt = arguments.prompt or sys.stdin.read()
    if not prompt.strip():
        raise ValueError("`prompt` is empty: give `--prompt TEXT`, or a text on stdin.")
    target, tokenizer, drafter = arguments.load()
    texts = [tokens for file in arguments.lookup_text if (tokens := file_tokens(file, tokenizer))]
    if drafter is not None and texts:
        drafter.lookup_memory = LookupMemory(sum(map(len, texts)))
        for tokens in texts:
            drafter.lookup_memory.add(tokens)
    reply = Reply(target, drafter, tokenizer, show)
    inputs, status, stopped = encode(tokenizer, prompt, target.device, arguments.variables), 0, ""
    try:
        reply.run(inputs, arguments.options())
    except KeyboardInterrupt:
        reply.stop()
        status, stopped = 130, "stopped: "
    print(flush=True)
    print(f"[{stopped}{reply.gain}]", file=sys.stderr)
    return status
