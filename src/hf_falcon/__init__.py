# Copyright 2026 The hf_falcon authors. Licensed under the Apache License, Version 2.0.
"""Falcon drafters for transformers: `target.generate(**inputs, assistant_model=drafter)`, same text, less time."""

import importlib
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"


def _is_command_line() -> bool:
    """Whether this process is `hf-falcon ...` or `python -m hf_falcon ...`."""
    program, words = (sys.argv or [""])[0], sys.orig_argv
    # Python calls a program "-m" until it has found the module, for which it imports this package.
    if program == "-m":
        return words[words.index("-m") + 1 :][:1] == [__name__] if "-m" in words else False
    return Path(program).stem in ("hf-falcon", "hf-falcon-script")


# Importing the package installs the drafters in transformers, for which it imports transformers and torch. On the
# command line, `hf_falcon.commands.main` does so when it runs a command: `hf-falcon --help` waits for neither.
if TYPE_CHECKING or not _is_command_line():
    from .public import *  # noqa: F403
    from .public import __all__ as __all__

if not TYPE_CHECKING:

    def __getattr__(name: str) -> Any:
        """On the command line: a public name, imported when it is first asked for."""
        if name == "__all__" or not name.startswith("_"):
            public = importlib.import_module(".public", __name__)
            if hasattr(public, name):
                return getattr(public, name)
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")

    def __dir__() -> list[str]:
        return sorted({*globals(), *importlib.import_module(".public", __name__).__all__})
