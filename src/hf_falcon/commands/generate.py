# Copyright 2026 The hf_falcon authors. Licensed under the Apache License, Version 2.0.
"""`hf-falcon generate`: a text for a prompt, shown as it is written."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from transformers import HfArgumentParser, PreTrainedModel, PreTrainedTokenizerBase, TextStreamer, set_seed

from ..core.statistics import DraftStatistics
from ..cpu.compiling import compile_rounds
from ..cpu.packing import pack_weights
from .models import encode, load_drafter, load_target, resolve_device, resolve_dtype


@dataclass
class DecodingArguments:
    """Arguments of `hf-falcon generate` and `hf-falcon chat`; `help` describes each."""

    target: str | None = field(
        default=None, metadata={"help": "Target, from the Hub or a folder. By default SmolLM2-135M-Instruct."}
    )
    drafter: str | None = field(
        default=None, metadata={"help": "Drafter, from the Hub or a folder. By default the one that comes along."}
    )
    plain: bool = field(default=False, metadata={"help": "Decode without the drafter."})
    max_new_tokens: int = field(default=512, metadata={"help": "New tokens of a text, at most."})
    do_sample: bool = field(default=False, metadata={"help": "Sample, instead of the most probable token."})
    temperature: float = field(default=1.0, metadata={"help": "Temperature of sampling."})
    top_p: float = field(default=1.0, metadata={"help": "Sample from the tokens that have this much probability."})
    seed: int | None = field(default=None, metadata={"help": "Seed of sampling."})
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
        if self.max_new_tokens < 1:
            raise ValueError(f"`max_new_tokens` is {self.max_new_tokens}; give 1 or more.")
        if self.seed is not None:
            set_seed(self.seed)

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
            compile_rounds(target, drafter=drafter)
        return target, tokenizer, drafter

    def options(self) -> dict[str, Any]:
        """What `generate` is called with."""
        sampling = {"temperature": self.temperature, "top_p": self.top_p} if self.do_sample else {}
        return {"max_new_tokens": self.max_new_tokens, "do_sample": self.do_sample, **sampling}


@dataclass
class GenerateArguments(DecodingArguments):
    """Arguments of `hf-falcon generate`; `help` describes each."""

    prompt: str = field(default="", metadata={"help": "What to answer or to go on from; from stdin if left out."})


class _Writer(TextStreamer):
    """Hands on each piece of text, keeps all of it, and counts tokens; a drafted one needs no forward of its own."""

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
    One text, streamed while it is made. After an interrupt and `stop`, `text` holds what there was of it.

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
        """What was written so far."""
        return self._writer.text

    @property
    def tokens(self) -> int:
        """Tokens so far, special ones among them."""
        return self._writer.tokens

    @property
    def gain(self) -> str:
        """The speed and the acceptance so far, in words."""
        tokens, drafted = self._writer.tokens, self._writer.drafted
        seconds = self._seconds or time.perf_counter() - self._start
        speed = f"{tokens} tokens, {tokens / seconds:.1f} tokens/s"
        if self._drafter is None or (self._seconds is not None and self._statistics is None):
            return speed
        # The first token comes with the prompt's forward, which is no round.
        tau, alpha = drafted / max(1, tokens - drafted - 1), drafted / max(1, tokens)
        if self._statistics is not None:
            tau, alpha = self._statistics.tau or 0.0, self._statistics.alpha or 0.0
        return f"{speed}, tau {tau:.2f}, {100 * alpha:.0f} % of them drafted"

    def stop(self) -> None:
        """Writes what an interrupt left unwritten: a streamer holds back the last word until it is whole."""
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
    """Runs `hf-falcon generate`: the text goes to stdout, its speed to stderr."""
    parser = HfArgumentParser(GenerateArguments, prog="hf-falcon generate", description=__doc__)
    arguments = GenerateArguments(**vars(parser.parse_args(argv)))
    prompt = arguments.prompt or sys.stdin.read()
    if not prompt.strip():
        raise ValueError("`prompt` is empty: give `--prompt TEXT`, or a text on stdin.")
    target, tokenizer, drafter = arguments.load()
    reply = Reply(target, drafter, tokenizer, show)
    reply.run(encode(tokenizer, prompt, target.device), arguments.options())
    print()
    print(f"[{reply.gain}]", file=sys.stderr)
    return 0
