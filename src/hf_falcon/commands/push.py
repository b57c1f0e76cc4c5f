# Copyright 2026 The hf_falcon authors. Licensed under the Apache License, Version 2.0.
"""
`hf-falcon push FOLDER REPOSITORY`: a drafter and its card to the Hub, in one commit; a Falcon drafter with its code.
"""

from __future__ import annotations

import shutil
from pathlib import Path

from ..core.drafter import FalconDraftModel
from ..drafters.auto import AutoDrafter
from ..drafters.files import upload
from .card import MARK, render_card
from .models import no_progress_bars
from .push_arguments import PushArguments, parser

# Files that a training leaves beside a drafter, and that are published with it.
_EXTRAS = ("provenance.json", "training.png")


def main(argv: list[str]) -> int:
    """Runs `hf-falcon push`; prints the address of the commit."""
    found = vars(parser().parse_args(argv))
    folder, repository = Path(found.pop("folder")), found.pop("repository")
    arguments = PushArguments(**found)
    if not folder.is_dir():
        raise FileNotFoundError(
            f"`{folder}` is not a folder: give the folder of a drafter, as `hf-falcon train` writes it."
        )
    # Loaded, and not only copied: a drafter that cannot be loaded is not pushed.
    with no_progress_bars(folder):
        drafter = AutoDrafter.from_pretrained(str(folder))
    file = folder / "README.md"
    is_falcon = isinstance(drafter, FalconDraftModel)
    card = file.read_text(encoding="utf-8") if file.is_file() else MARK if is_falcon else None
    if card is not None and MARK in card and is_falcon:
        card = str(render_card(drafter.config, folder, repository, arguments.license))
    elif arguments.license is not None:
        raise ValueError(
            f"`license` is {arguments.license!r}, and this command writes no card here: write the licence into the "
            f"metadata of `{file}`."
        )

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
