# Copyright 2026 The hf_falcon authors. Licensed under the Apache License, Version 2.0.
"""`hf-falcon chat`: a conversation in the terminal. Ctrl-C stops a reply; an empty line, `exit` or Ctrl-D the chat."""

from __future__ import annotations

import sys
from dataclasses import dataclass, field

from transformers import HfArgumentParser, PreTrainedModel, PreTrainedTokenizerBase

from .generate import DecodingArguments, Reply, show


@dataclass
class ChatArguments(DecodingArguments):
    """Arguments of `hf-falcon chat`; `help` describes each."""

    system: str | None = field(default=None, metadata={"help": "A system message, before the conversation."})


def converse(
    target: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    drafter: PreTrainedModel | None,
    arguments: ChatArguments,
) -> list[dict[str, str]]:
    """
    Reads messages and answers them, the whole conversation before each.

    Returns:
        `list[dict[str, str]]`: the conversation, as a chat template takes it.

    Raises:
        `ValueError`: if the target has no chat template.
    """
    if tokenizer.chat_template is None:
        raise ValueError("The target has no chat template: use a target for chats, or `hf-falcon generate`.")
    messages = [] if arguments.system is None else [{"role": "system", "content": arguments.system}]
    while True:
        try:
            text = input("\n> ").strip()
        except EOFError:
            break
        except KeyboardInterrupt:
            # Of a line that is being typed: forget it.
            continue
        if text in ("", "exit"):
            break
        messages.append({"role": "user", "content": text})
        inputs = tokenizer.apply_chat_template(
            messages, add_generation_prompt=True, return_dict=True, return_tensors="pt"
        ).to(target.device)
        reply = Reply(target, drafter, tokenizer, show)
        try:
            reply.run(dict(inputs), arguments.options())
        except KeyboardInterrupt:
            reply.stop()
            reply.gain = "stopped"
        messages.append({"role": "assistant", "content": reply.text.strip()})
        print(f"\n[{reply.gain}]", file=sys.stderr)
    return messages


def main(argv: list[str]) -> int:
    """Runs `hf-falcon chat`."""
    parser = HfArgumentParser(ChatArguments, prog="hf-falcon chat", description=__doc__)
    arguments = ChatArguments(**vars(parser.parse_args(argv)))
    target, tokenizer, drafter = arguments.load()
    print("Ctrl-C stops a reply; an empty line, `exit` or Ctrl-D ends the chat.", file=sys.stderr)
    converse(target, tokenizer, drafter, arguments)
    return 0
