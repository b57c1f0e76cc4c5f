# Copyright 2026 The hf_falcon authors. Licensed under the Apache License, Version 2.0.
"""
`hf-falcon instant`: makes a drafter for a target from some of its own responses, without data and without training.
`hf-falcon train --init_from` continues it.
"""

from __future__ import annotations

import shlex

from ..bench.prompts import read_turns
from ..training.instant import instant_drafter
from ..training.own_prompts import PROMPTS
from .card import write_card
from .instant_arguments import InstantArguments, parser
from .models import load_target, resolve_device


def main(argv: list[str]) -> int:
    """Runs `hf-falcon instant`."""
    arguments = InstantArguments(**vars(parser().parse_args(argv)))
    prompts = None
    if arguments.data is not None:
        prompts = [turns[0] for turns in read_turns(arguments.data, arguments.limit)]
    elif arguments.limit is not None:
        prompts = list(PROMPTS[: arguments.limit])
    target, tokenizer = load_target(arguments.target, arguments.dtype, resolve_device(arguments.device))
    drafter = instant_drafter(
        target,
        tokenizer,
        prompts,
        arguments.num_draft_layers,
        [] if arguments.feature_layers == [-1] else arguments.feature_layers,
        arguments.draft_vocab_size,
        arguments.max_new_tokens,
        arguments.seed,
    )
    drafter.save_pretrained(arguments.output)
    write_card(drafter.config, arguments.output)
    words = ["--target", arguments.target] if arguments.target else []
    command = shlex.join(["hf-falcon", "chat", *words, "--drafter", arguments.output])
    print(f"The drafter is in {arguments.output}. Try it: {command}")
    return 0
