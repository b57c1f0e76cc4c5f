# Copyright 2026 The hf_falcon authors. Licensed under the Apache License, Version 2.0.
"""`hf-falcon generate`: the answer to a prompt, shown while it is generated."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from typing import Any

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase, TextStreamer

from ..core.draft_statistics import DraftStatistics
from ..drafters.lookup_drafter import file_tokens
from ..lookup import LookupMemory
from .generate_arguments import GenerateArguments, parser
from .models import encode, within_context
from .run_arguments import check_text


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
        """
        Writes the text, up to the end of the target's context.

        Raises:
            `ValueError`: see [`within_context`].
        """
        most = within_context(self._target, inputs["input_ids"].shape[1], options["max_new_tokens"])
        options = {**options, "max_new_tokens": most}
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
    arguments = GenerateArguments(**vars(parser().parse_args(argv)))
    prompt = arguments.prompt or sys.stdin.read()
    if not prompt.strip():
        raise ValueError("`prompt` is empty: give `--prompt TEXT`, or a text on stdin.")
    check_text("prompt", prompt)
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
