# Copyright 2026 The hf_falcon authors. Licensed under the Apache License, Version 2.0.
"""`hf-falcon tune`: the cost of a round on this machine, and the predicted speed-up of trees of each size."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch
from transformers.utils import GENERATION_CONFIG_NAME

from ..bench.prompts import read_turns
from ..bench.tables import aligned
from ..bench.tuning import fastest_count, picture, tune
from ..cpu.compiling import compile_rounds
from ..cpu.kept_rounds import offer_rounds
from ..cpu.packing import pack_weights
from ..json_files import read_own_object
from ..learning.options import check_folder
from ..private_names import without_mark_of_origin
from ..training.chat_templates import template_variables
from ..training.token_file import write_atomically
from .models import encode, load_network, load_target, note_other_variables, resolve_device, within_context
from .tune_arguments import TuneArguments, parser

_PROMPTS = ["Why is the sky blue?", "Write a Python function that merges two sorted lists.", "What is 17 * 23 + 4?"]


def main(argv: list[str]) -> int:
    """Runs `hf-falcon tune`."""
    arguments = TuneArguments(**vars(parser().parse_args(argv)))
    own = _own_folder(arguments)
    folder = Path(arguments.output) if arguments.output is not None else own or Path("tune")
    check_folder("output", folder)
    if own is not None:
        # `draft_calibration` belongs there.
        check_folder("drafter", own)
    texts = _PROMPTS
    if arguments.data:
        texts = [turns[0] for path in arguments.data for turns in read_turns(path, arguments.limit)]
    device = resolve_device(arguments.device)
    target, tokenizer = load_target(arguments.target, arguments.dtype, device)
    dtype = target.dtype
    drafter = load_network(arguments.drafter, dtype, device, target)
    if arguments.pack:
        pack_weights(target)
        pack_weights(drafter)
    if arguments.compile:
        print("Compiling rounds, for this and later processes.", file=sys.stderr, flush=True)
        compile_rounds(target, drafter=drafter)
        offer_rounds(target)
    variables = template_variables(arguments.chat_template_kwargs)
    note_other_variables(drafter, variables)
    prompts = [encode(tokenizer, text, device, variables) for text in texts]
    longest = max(inputs["input_ids"].shape[1] for inputs in prompts)
    most = within_context(target, longest, arguments.max_new_tokens)
    found = tune(target, drafter, prompts, arguments.context, most, arguments.seconds)

    times = found.seconds
    print(aligned([["nodes", *map(str, times)], ["ms", *(f"{1e3 * value:.1f}" for value in times.values())]]))
    for count, (plain, tree) in found.seconds_by_threads.items():
        print(f"{count} threads: {1e3 * plain:.1f} ms without nodes, {1e3 * tree:.1f} ms with {max(1, found.nodes)}")
    if found.seconds_by_threads and (count := fastest_count(found.seconds_by_threads)) != torch.get_num_threads():
        print(f"Fewer threads are faster here: set `OMP_NUM_THREADS={count}`.")
    print(f"first block {1e3 * found.commit:.1f} ms, each further pass {1e3 * found.draft_pass:.1f} ms")
    tau = float(found.expected[found.passes - 1, found.nodes])
    print(
        f"predicted: {found.speedups.max():.2f} times plain decoding with {found.nodes} nodes and {found.passes} "
        f"passes a round; {1 + tau:.2f} tokens a round (tau {tau:.2f}) by the drafter's own probabilities"
    )
    shares = " ".join(f"{share:.2f}" for share in found.draft_calibration)
    print(f"accepted tokens over the drafter's own probability, by depth: {shares}")
    folder.mkdir(parents=True, exist_ok=True)
    write_atomically(folder / "tune.json", json.dumps(found.to_dict(), indent=2).encode())
    try:
        write_atomically(folder / "tune.png", picture(found.speedups))
    except ImportError:
        print("No tune.png: matplotlib is not installed. Run `pip install 'hf-falcon[bench]'`.")
    if own is not None:
        keep_calibration(own, found.draft_calibration, drafter)
    print(f"More in {folder / 'tune.json'}. `generate` uses the target's times from now on.")
    return 0


def _own_folder(arguments: TuneArguments) -> Path | None:
    """The drafter's folder; `None` for the drafter of the demo and one of the Hub."""
    return Path(arguments.drafter) if arguments.drafter and Path(arguments.drafter).is_dir() else None


def keep_calibration(folder: Path, calibration: list[float], drafter: Any) -> None:
    """Writes `draft_calibration` into the generation configuration of the drafter in `folder`; the rest stays."""
    file = folder / GENERATION_CONFIG_NAME
    if file.exists():
        kept = read_own_object(file)
    else:
        # What a language model reads from its configuration where it has no such file, such as its last token.
        model = getattr(drafter, "model", None)
        kept = {} if model is None else json.loads(model.generation_config.to_json_string())
    kept = without_mark_of_origin(kept)
    write_atomically(file, (json.dumps({**kept, "draft_calibration": calibration}, indent=2) + "\n").encode())
