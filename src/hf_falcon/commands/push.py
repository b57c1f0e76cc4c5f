# Copyright 2026 The hf_falcon authors. Licensed under the Apache License, Version 2.0.
"""`hf-falcon push FOLDER REPOSITORY`: a drafter, its code and its card to the Hub, in one commit."""

from __future__ import annotations

import shutil
from dataclasses import dataclass, field
from pathlib import Path

from ..core.checkpoint_files import upload
from ..core.drafter import FalconDraftModel
from .card import MARK, render_card
from .models import no_progress_bars
from .run_arguments import CommandParser

# What a training leaves beside a drafter that others may want to see.
_EXTRAS = ("provenance.json", "training.png")


@dataclass
class PushArguments:
    """Arguments of `hf-falcon push`; `help` describes each. The token is that of `hf auth login`, or `HF_TOKEN`."""

    private: bool = field(default=False, metadata={"help": "Make the repository private, if it is new."})
    revision: str | None = field(default=None, metadata={"help": "Branch to push to."})
    create_pr: bool = field(default=False, metadata={"help": "Open a pull request instead."})
    message: str = field(default="Upload drafter", metadata={"help": "Message of the commit."})
    license: str | None = field(
        default=None, metadata={"help": "Licence of a card that is made here, such as apache-2.0."}
    )


def main(argv: list[str]) -> int:
    """Runs `hf-falcon push`; prints the address of the commit."""
    parser = CommandParser(PushArguments, prog="hf-falcon push", description=__doc__)
    parser.add_argument("folder", help="Folder of the drafter.")
    parser.add_argument("repository", help="Repository to push to, user/name; made if it is not there.")
    found = vars(parser.parse_args(argv))
    folder, repository = Path(found.pop("folder")), found.pop("repository")
    arguments = PushArguments(**found)
    if not folder.is_dir():
        raise FileNotFoundError(f"`{folder}` is not a folder: give that of a drafter, as `hf-falcon train` writes it.")
    # Loaded, not only copied: what cannot be loaded is not pushed.
    with no_progress_bars(folder):
        drafter = FalconDraftModel.from_pretrained(str(folder))
    file = folder / "README.md"
    card = file.read_text(encoding="utf-8") if file.is_file() else MARK
    if MARK in card:
        card = str(render_card(drafter.config, folder, repository, arguments.license))

    def save(place: str) -> None:
        with no_progress_bars(folder):
            drafter.save_pretrained(place)
        for name in _EXTRAS:
            if (folder / name).is_file():
                shutil.copy(folder / name, place)

    address = upload(
        save,
        repository,
        card=card,
        commit_message=arguments.message,
        private=arguments.private or None,
        revision=arguments.revision,
        create_pr=arguments.create_pr,
    )
    print(address)
    return 0
