# Copyright 2026 The hf_falcon authors. Licensed under the Apache License, Version 2.0.
"""`hf-falcon prepare`: generates the target's responses to dialogues, and writes them as one token file."""

from __future__ import annotations

import sys
from pathlib import Path

from ..learning.options import check_folder
from ..training.dialogues import find_data
from ..training.prepare import prepare, process_state, read_excluded
from ..training.prepare_arguments import PrepareArguments
from ..training.skipped_records import skipped_table
from .models import load_target
from .prepare_arguments import parser


def main(argv: list[str]) -> int:
    """
    Runs `hf-falcon prepare`; its arguments are the fields of [`PrepareArguments`].

    Returns:
        `int`: 0 when the token file is complete, 130 when interrupted.
    """
    arguments = PrepareArguments(**vars(parser().parse_args(argv)))
    # A missing file is reported before a target is downloaded and loaded.
    find_data(arguments.data)
    read_excluded(arguments.exclude)
    check_folder("output", Path(arguments.output).parent)
    state = process_state()
    # Each of several processes has a device of its own.
    device = state.device if arguments.device is None and state.num_processes > 1 else arguments.device
    model, tokenizer = load_target(arguments.target, arguments.dtype, device)
    try:
        file = prepare(arguments, model, tokenizer)
    except KeyboardInterrupt:
        print("\nInterrupted. Finished batches are kept; the same command continues from them.", file=sys.stderr)
        return 130
    responses = len(file.tokens) - int(file.prompt_lengths.sum())
    state.print(f"{arguments.output}: {len(file)} samples, {len(file.tokens)} tokens, {responses} of them responses.")
    if skipped := file.metadata.get("skipped"):
        state.print(skipped_table(skipped))
    state.destroy_process_group()
    return 0
