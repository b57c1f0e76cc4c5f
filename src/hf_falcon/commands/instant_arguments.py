# Copyright 2026 The hf_falcon authors. Licensed under the Apache License, Version 2.0.
"""The arguments of `hf-falcon instant`."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from ..learning.options import check_folder
from .run_arguments import CommandParser, at_least, check_seed

DESCRIPTION = """
`hf-falcon instant`: makes a drafter for a target from some of its own responses, without data and without training.
`hf-falcon train --init_from` continues it.
"""


@dataclass
class InstantArguments:
    """Arguments of `hf-falcon instant`; `help` describes each. See [`instant_drafter`]."""

    output: str = field(metadata={"help": "Folder of the drafter to write."})
    target: str | None = field(default=None, metadata={"help": "Target, from the Hub or a folder."})
    data: str | None = field(
        default=None,
        metadata={"help": "JSON-lines file with `turns`: prompts like those of your use, in place of the package's."},
    )
    limit: int | None = field(default=None, metadata={"help": "Prompts, from the start; all by default."})
    max_new_tokens: int = field(default=96, metadata={"help": "Tokens of a response, at most."})
    num_draft_layers: int = field(default=2, metadata={"help": "Layers of the target to copy, the last ones."})
    feature_layers: list[int] | None = field(
        default=None,
        metadata={"help": "Layers of the target that the drafter reads beside the last; two by default, -1 for none."},
    )
    draft_vocab_size: int | None = field(
        default=None, metadata={"help": "Tokens that the drafter scores; by default at most 16,384."}
    )
    seed: int = field(default=0, metadata={"help": "Seed of the sampled responses."})
    dtype: str = field(default="auto", metadata={"help": "auto, float32, bfloat16 or float16."})
    device: str | None = field(default=None, metadata={"help": "By default cuda where there is one, else cpu."})

    def __post_init__(self) -> None:
        at_least(self, 1, "num_draft_layers", "draft_vocab_size")
        at_least(self, 8, "limit")
        check_seed(self.seed)
        at_least(self, 4, "max_new_tokens")
        folder = Path(self.output)
        if folder.is_file() or (folder.is_dir() and any(folder.iterdir()) and not is_drafter(folder)):
            raise ValueError(
                f"`output` is {self.output!r}, which holds a trained drafter or other files: give a new folder."
            )
        check_folder("output", self.output)


def is_drafter(folder: Path) -> bool:
    """Whether a folder holds a Falcon drafter that was not trained."""
    from ..core.drafter import FalconDraftModel

    file = folder / "config.json"
    if (folder / "provenance.json").exists():
        return False
    return file.is_file() and f'"{FalconDraftModel.config_class.model_type}"' in file.read_text(encoding="utf-8")


def parser() -> CommandParser:
    """The parser of `hf-falcon instant`."""
    return CommandParser(InstantArguments, prog="hf-falcon instant", description=DESCRIPTION)
