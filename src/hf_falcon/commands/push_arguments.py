# Copyright 2026 The hf_falcon authors. Licensed under the Apache License, Version 2.0.
"""The arguments of `hf-falcon push`."""

from __future__ import annotations

from dataclasses import dataclass, field

from .run_arguments import CommandParser

DESCRIPTION = """
`hf-falcon push FOLDER REPOSITORY`: a drafter and its card to the Hub, in one commit; a Falcon drafter with its code.
The record (provenance.json, with the paths of files) and the curves of its training come along if the folder has them.
"""


@dataclass
class PushArguments:
    """Arguments of `hf-falcon push`; `help` describes each. The token comes from `hf auth login`, or `HF_TOKEN`."""

    private: bool = field(default=False, metadata={"help": "Make a new repository private."})
    revision: str | None = field(default=None, metadata={"help": "Branch to push to."})
    create_pr: bool = field(default=False, metadata={"help": "Open a pull request instead."})
    message: str = field(default="Upload drafter", metadata={"help": "Message of the commit."})
    license: str | None = field(
        default=None, metadata={"help": "Licence in a card that this command writes, such as apache-2.0."}
    )


def parser() -> CommandParser:
    """The parser of `hf-falcon push`."""
    parser = CommandParser(PushArguments, prog="hf-falcon push", description=DESCRIPTION)
    parser.add_argument("folder", help="Folder of the drafter.")
    parser.add_argument("repository", help="Repository to push to, user/name; created if there is none.")
    return parser
