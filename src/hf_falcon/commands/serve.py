# Copyright 2026 The hf_falcon authors. Licensed under the Apache License, Version 2.0.
"""
`hf-falcon serve`: serves a target with its drafter by OpenAI's interface, with transformers' own server: chat
completions, completions and responses, also streamed. Ctrl-C, SIGTERM or SIGHUP ends it. There are no users or
passwords: listen on 127.0.0.1 only, or behind a proxy that has them.
"""

from __future__ import annotations

import json
import shlex
import signal
import sys

from transformers import PreTrainedTokenizerBase

from ..attaching import attach
from ..cpu.background_builds import build_in_background
from .models import TARGET_NAME, converted_target, within_context
from .serve_arguments import ServeArguments, parser
from .serving import TargetServer, check_packages
from .signals import ended_by_signals


def example_request(address: str, tokenizer: PreTrainedTokenizerBase) -> str:
    """A command line that asks the server at `address`."""
    question, path = "Why is the sky blue?", "completions"
    body: dict = {"prompt": question}
    if tokenizer.chat_template is not None:
        path, body = "chat/completions", {"messages": [{"role": "user", "content": question}]}
    words = ["curl", f"{address}/{path}", "-H", "Content-Type: application/json", "-d"]
    return shlex.join([*words, json.dumps({**body, "max_tokens": 64, "stream": True})])


def main(argv: list[str]) -> int:
    """Runs `hf-falcon serve`."""
    arguments = ServeArguments(**vars(parser().parse_args(argv)))
    # Before the models are loaded.
    check_packages()
    with arguments.listen() as listener:
        target, tokenizer, drafter = arguments.load()
        name = arguments.target or TARGET_NAME
        server = TargetServer(target, tokenizer, name)
        if drafter is not None:
            attach(target, drafter)
            # The first call of a drafter that may write some tokens learns what rounds cost.
            inputs = tokenizer("Hello", return_tensors="pt").to(target.device)
            server.generate(**inputs, max_new_tokens=within_context(target, inputs["input_ids"].shape[1], 64))
            if arguments.compile and not arguments.compiles_first(target):
                source = str(converted_target()) if arguments.target is None else None
                if build_in_background(target, drafter, source):
                    print("Compiling rounds in the background, between requests.", file=sys.stderr, flush=True)
        host, port = listener.getsockname()[:2]
        address = f"http://{f'[{host}]' if ':' in host else host}:{port}/v1"
        with_drafter = "without a drafter" if drafter is None else f"with the drafter {drafter.name_or_path}"
        try:
            with ended_by_signals(signal.default_int_handler):
                print(f"{name} {with_drafter}: {address}")
                print(f"Try it: {example_request(address, tokenizer)}", flush=True)
                with arguments.learning(target, drafter):
                    server.run(listener)
        # A process that a shell put into the background gets none: the server has stopped by itself then.
        except KeyboardInterrupt:
            pass
        print("\nStopped.", file=sys.stderr)
    return 0
