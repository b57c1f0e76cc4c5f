# Copyright 2026 The hf_falcon authors. Licensed under the Apache License, Version 2.0.
"""
`hf-falcon chat`: a conversation in the terminal, with the speed and the acceptance of each reply.
Ctrl-C stops a reply. `/help` lists the commands of the chat; an empty line, `/exit` or Ctrl-D ends it.
"""

from __future__ import annotations

import os
import re
import sys
import time
from types import TracebackType

from transformers import PreTrainedModel, PreTrainedTokenizerBase

from ..training.chat_templates import chat_inputs
from .chat_arguments import ChatArguments, parser
from .generate import Reply, show
from .printable import printable
from .run_arguments import check_text
from .signals import ended_by_signals

_HELP = """/help    show this list
/clear   forget the conversation, and start again
/exit    end the chat; so do /quit, exit, quit, an empty line and Ctrl-D
Ctrl-C   stop the reply that is being written, or forget the line that is being typed"""


class StatusLine:
    """
    Reserves the last line of the terminal for a status, while text scrolls above it, as package managers do. Does
    nothing if stdout is not a terminal, or `TERM` is "dumb".
    """

    def __init__(self) -> None:
        self._on = sys.stdout.isatty() and os.environ.get("TERM", "dumb") != "dumb"
        self._drawn = 0.0

    def __enter__(self) -> StatusLine:
        # A line below the cursor, which is then not in the last one.
        self._write("\n\x1b[1A")
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, where: TracebackType | None) -> None:
        self._write("\x1b7\x1b[r\x1b[{rows};1H\x1b[2K\x1b8")

    def show(self, text: str) -> None:
        """Draws the status, ten times a second at most."""
        if time.perf_counter() - self._drawn > 0.1:
            # Saves the cursor, lets all lines but the last scroll, writes the last, and goes back.
            self._write("\x1b7\x1b[1;{above}r\x1b[{rows};1H\x1b[2K{text}\x1b8", text)
            self._drawn = time.perf_counter()

    def _write(self, sequence: str, text: str = "") -> None:
        if self._on:
            columns, rows = os.get_terminal_size(sys.stdout.fileno())
            if rows < 2:
                return
            sys.stdout.write(sequence.format(rows=rows, above=rows - 1, text=text[: columns - 1]))
            sys.stdout.flush()


def converse(
    target: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    drafter: PreTrainedModel | None,
    arguments: ChatArguments,
) -> list[dict[str, str]]:
    """
    Reads messages and answers each, with the whole conversation as context.

    Returns:
        `list[dict[str, str]]`: the conversation, in the form of a chat template.

    Raises:
        `ValueError`: if the target has no chat template.
    """
    if tokenizer.chat_template is None:
        raise ValueError("The target has no chat template: use a target for chats, or `hf-falcon generate`.")
    first = [] if arguments.system is None else [{"role": "system", "content": arguments.system}]
    messages = list(first)
    while True:
        try:
            text = input("\n> ").strip()
        except EOFError:
            break
        except KeyboardInterrupt:
            # While a line is being typed: forget the line.
            continue
        if text in ("", "exit", "quit", "/exit", "/quit"):
            break
        if text == "/clear":
            messages = list(first)
            print("The conversation is forgotten.", file=sys.stderr)
            continue
        # One word: "/etc/hosts is a file" is a message.
        if re.fullmatch(r"/\w*", text):
            known = text in ("/", "/help")
            print(_HELP if known else f"There is no command {text}.\n{_HELP}", file=sys.stderr)
            continue
        try:
            check_text("message", text)
        except ValueError as error:
            print(error, file=sys.stderr)
            continue
        messages.append({"role": "user", "content": text})
        try:
            text, gain = answer(target, tokenizer, drafter, messages, arguments)
        except ValueError as error:
            # Of this turn alone, as where the conversation has become longer than the target's context.
            messages.pop()
            print(printable(f"{error} `/clear` forgets the conversation."), file=sys.stderr)
            continue
        messages.append({"role": "assistant", "content": text})
        show("\n")
        print(f"[{gain}]", file=sys.stderr)
    return messages


def answer(
    target: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    drafter: PreTrainedModel | None,
    messages: list[dict[str, str]],
    arguments: ChatArguments,
) -> tuple[str, str]:
    """Writes the reply to a conversation. Returns the reply, up to an interrupt, and its speed and acceptance."""
    inputs = chat_inputs(tokenizer, messages, target.device, arguments.variables)
    with StatusLine() as status:

        def write(text: str) -> None:
            show(text)
            status.show(reply.gain)

        reply = Reply(target, drafter, tokenizer, write)
        try:
            reply.run(inputs, arguments.options())
        except KeyboardInterrupt:
            reply.stop()
            return reply.text.strip(), f"stopped: {reply.gain}"
    return reply.text.strip(), reply.gain


def main(argv: list[str]) -> int:
    """Runs `hf-falcon chat`."""
    arguments = ChatArguments(**vars(parser().parse_args(argv)))
    target, tokenizer, drafter = arguments.load()
    print("Ctrl-C stops a reply; /help lists the commands; /exit ends the chat.", file=sys.stderr)
    # Not a `KeyboardInterrupt`, which only stops a reply.
    with ended_by_signals(lambda number, _: sys.exit(128 + number)), arguments.learning(target, drafter):
        converse(target, tokenizer, drafter, arguments)
    return 0
