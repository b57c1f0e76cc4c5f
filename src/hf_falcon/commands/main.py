# Copyright 2026 The hf_falcon authors. Licensed under the Apache License, Version 2.0.
"""`hf-falcon COMMAND [arguments]`: picks the command, and turns a user's mistake into one clear line."""

import difflib
import importlib
import os
import sys
from importlib.metadata import PackageNotFoundError, version

from safetensors import SafetensorError

from .printable import printable

COMMANDS = {
    "demo": "generate the same text with and without a drafter, and compare",
    "prepare": "turn dialogues into the token file that a drafter is trained on",
    "instant": "make a drafter for any target in minutes, without data and without training",
    "train": "train a drafter for a target",
    "adapt": "continue the training of a drafter on a fine-tune's own responses, for some minutes",
    "export": "write an EAGLE-3 drafter in the layout that serving engines read",
    "evaluate": "measure how many draft tokens a target accepts, on files of prompts",
    "doctor": "find out why few draft tokens are accepted, and what to do",
    "tune": "measure the cost of a round on this machine, and predict the gain of trees of each size",
    "bench": "measure the speed-up of a drafter and of other decoding methods",
    "generate": "generate a text with a drafter",
    "chat": "chat with a target in the terminal, with a drafter",
    "serve": "serve a target with its drafter, by OpenAI's interface",
    "push": "push a drafter with its code and its card to the Hub",
    "info": "describe a drafter on the Hub or in a folder, or what can draft for a target",
}

# These commands import torch and transformers themselves, where they need them.
_IMPORTS_LATER = {"info"}

# The help of these commands lists arguments of transformers' Trainer, which transformers knows.
_PARSED_LATER = {"train"}

# Errors whose message tells a user enough: wrong arguments and files, a Hub that does not answer, too little memory, a
# package or a compiler that is missing, a full disk. Of any other error, which is a bug, the traceback is shown.
_EXPECTED = (ValueError, OSError, FloatingPointError, RuntimeError, ImportError, SafetensorError)


def usage() -> str:
    """The text of `hf-falcon --help`."""
    lines = "\n".join(f"  {name:<10}{summary}" for name, summary in COMMANDS.items())
    return (
        "usage: hf-falcon [--help] [--version] COMMAND ...\n\n"
        "Falcon speculative decoding for Hugging Face transformers.\n\n"
        f"commands:\n{lines}\n\n"
        "`hf-falcon COMMAND --help` lists the arguments of a command. An error is one line; with HF_FALCON_DEBUG=1 in "
        "the\nenvironment, its traceback is shown."
    )


def main(argv: list[str] | None = None) -> int:
    """
    Runs a command.

    Args:
        argv (`list[str]`, *optional*):
            The arguments without the program's name; those of the process by default.

    Returns:
        `int`: The exit status: the command's own; 1 after an error, 2 where no command of that name exists, 130 after
        an interrupt. An expected error is printed as one line, or raised with `HF_FALCON_DEBUG=1` in the environment.
    """
    _prepare_streams()
    try:
        status = _run(sys.argv[1:] if argv is None else argv)
    except BrokenPipeError:
        status = 1
    try:
        sys.stdout.flush()
    except OSError as error:
        # If the reader has ended, as `hf-falcon ... | head` does, nobody misses the rest.
        if not isinstance(error, BrokenPipeError):
            print(f"hf-falcon: error: stdout cannot be written: {error.strerror}.", file=sys.stderr)
        # Python would flush again at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        status = 1
    return status


def _prepare_streams() -> None:
    """Streams that are closed become empty, and a character that their encoding lacks is no error."""
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, mode, encoding="utf-8"))
    for stream, errors in ((sys.stdin, "surrogateescape"), (sys.stdout, "replace")):
        # A test or a notebook has streams of its own.
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors=errors)


def _run(argv: list[str]) -> int:
    """See `main`."""
    if not argv:
        print(usage(), file=sys.stderr)
        return 2
    name, *arguments = argv
    try:
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
        if name not in _PARSED_LATER and not {"-h", "--help"}.isdisjoint(arguments):
            # Prints the help, and exits.
            importlib.import_module(f"hf_falcon.commands.{name}_arguments").parser().parse_args(arguments)
        # On the command line `import hf_falcon` has not done so: the lines above need neither torch nor transformers.
        if name not in _IMPORTS_LATER:
            importlib.import_module("hf_falcon.public")
        # Only the chosen command's dependencies are imported.
        return importlib.import_module(f"hf_falcon.commands.{name}").main(arguments)
    except KeyboardInterrupt:
        # The terminal shows "^C" in the line where the command was.
        print("\nInterrupted.", file=sys.stderr)
        return 130
    except BrokenPipeError:
        raise
    except _EXPECTED as error:
        if os.environ.get("HF_FALCON_DEBUG") == "1":
            raise
        # Messages of libraries have several lines, and some have none.
        message = printable(str(error)) or type(error).__name__
        print(f"hf-falcon {name}: error: {message}", file=sys.stderr)
        return 1


def installed_version() -> str:
    """The version of the installed package; "unknown" where the source is used without installing it."""
    try:
        return version("hf-falcon")
    except PackageNotFoundError:
        return "unknown"
