# Copyright 2026 The hf_falcon authors. Licensed under the Apache License, Version 2.0.
"""`hf-falcon COMMAND [arguments]`: picks the command, and turns a user's mistake into one clear line."""

import difflib
import importlib
import os
import sys
from importlib.metadata import PackageNotFoundError, version

COMMANDS = {
    "demo": "generate the same text with and without the drafter, and compare",
    "prepare": "turn dialogues into the token file that a drafter is trained on",
    "train": "train a drafter for a target",
    "evaluate": "measure tau and alpha of a drafter on files of prompts",
    "tune": "measure what a round costs on this machine, and what trees of each size would gain",
    "bench": "measure the speed-up of a drafter, and of other ways to decode",
    "generate": "generate a text with a drafter",
    "chat": "chat with a target in the terminal, with a drafter",
    "push": "push a drafter with its code and its card to the Hub",
    "info": "say what a drafter of the Hub or of a folder is",
}


def usage() -> str:
    """The text of `hf-falcon --help`."""
    lines = "\n".join(f"  {name:<10}{summary}" for name, summary in COMMANDS.items())
    return (
        "usage: hf-falcon [--help] [--version] COMMAND ...\n\n"
        "Falcon speculative decoding for Hugging Face transformers.\n\n"
        f"commands:\n{lines}\n\n"
        "`hf-falcon COMMAND --help` lists the arguments of a command."
    )


def main(argv: list[str] | None = None) -> int:
    """
    Runs a command.

    Args:
        argv (`list[str]`, *optional*):
            The arguments without the program's name; those of the process by default.

    Returns:
        `int`: The exit status: that of the command; 1 after a user's mistake that a command found, 2 after a wrong
        command line, 130 after an interrupt. With `HF_FALCON_DEBUG=1` in the environment, the exception of a
        mistake is raised instead.
    """
    argv = sys.argv[1:] if argv is None else argv
    if not argv:
        print(usage(), file=sys.stderr)
        return 2
    name, *arguments = argv
    if name in ("-h", "--help"):
        print(usage())
        return 0
    if name == "--version":
        print(f"hf-falcon {installed_version()}")
        return 0
    if name not in COMMANDS:
        nearest = difflib.get_close_matches(name, COMMANDS, n=1, cutoff=0.5)
        remedy = f"did you mean `{nearest[0]}`?" if nearest else f"choose one of {', '.join(COMMANDS)}."
        print(f"hf-falcon: error: unknown command `{name}`; {remedy}", file=sys.stderr)
        return 2

    try:
        # Only the chosen command's dependencies are imported.
        return importlib.import_module(f"hf_falcon.commands.{name}").main(arguments)
    except KeyboardInterrupt:
        return 130
    except (ValueError, OSError, FloatingPointError) as error:
        if os.environ.get("HF_FALCON_DEBUG") == "1":
            raise
        print(f"hf-falcon {name}: error: {error}", file=sys.stderr)
        return 1


def installed_version() -> str:
    """The version of the installed package; "unknown" where the source is used without installing it."""
    try:
        return version("hf-falcon")
    except PackageNotFoundError:
        return "unknown"
