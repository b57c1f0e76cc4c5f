# Copyright 2026 The hf_falcon authors. Licensed under the Apache License, Version 2.0.
"""`hf-falcon evaluate`: how many of a drafter's tokens a target accepts, on files of prompts."""

from __future__ import annotations

import json
from contextlib import nullcontext
from dataclasses import fields
from pathlib import Path
from typing import Any

import torch
from tqdm.auto import tqdm
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from ..bench.divergence import first_divergence
from ..bench.prompts import read_turns
from ..bench.tables import aligned
from ..core.draft_options import DraftOptions
from ..cpu.compiling import uncompile_rounds
from ..cpu.row_invariant import row_invariant
from ..training.chat_templates import template_variables
from ..verdicts import verdict_of_prompt
from .evaluate_arguments import EvaluateArguments, parser
from .models import encode, load_drafter, load_target, note_other_variables, resolve_device, within_context


def measure_acceptance(
    target: PreTrainedModel,
    drafter: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    prompts: list[str],
    arguments: EvaluateArguments,
) -> dict[str, Any]:
    """Counts over all prompts, summed before they are divided: a long output weighs more than a short one."""
    counts = {"rounds": 0, "drafted_tokens": 0, "accepted_tokens": 0, "new_tokens": 0}
    by_depth: list[int] = []
    near_ties = 0
    divergences: list[dict[str, Any]] = []
    for number, prompt in enumerate(tqdm(prompts, unit="prompt", leave=False)):
        inputs = encode(tokenizer, prompt, target.device, template_variables(arguments.chat_template_kwargs))
        most = within_context(target, inputs["input_ids"].shape[1], arguments.max_new_tokens)
        options: dict[str, Any] = {"max_new_tokens": most, "do_sample": False}
        output = target.generate(**inputs, **options, assistant_model=drafter, return_dict_in_generate=True)
        found = output.draft_statistics
        if found is None:
            reason = verdict_of_prompt(target, inputs["input_ids"], inputs.get("attention_mask")).reason
            raise ValueError(
                f"{type(target).__name__} is decoded plainly, without the drafter, so there is no acceptance to "
                f"measure: {reason or 'see the warning above'}. Give another `target`."
            )
        for name in counts:
            counts[name] += found[name]
        by_depth += [0] * (len(found.accepted_by_depth) - len(by_depth))
        for depth, count in enumerate(found.accepted_by_depth):
            by_depth[depth] += count
        near_ties += len(found.near_ties)
        if arguments.check:
            start = inputs["input_ids"].shape[1]
            texts = [each[0, start:].tolist() for each in (target.generate(**inputs, **options), output.sequences)]
            diverging = first_divergence(target, inputs["input_ids"], *texts)
            if diverging is not None:
                divergences.append({"prompt": number, **diverging._asdict()})
    tau = counts["accepted_tokens"] / max(1, counts["rounds"])
    result: dict[str, Any] = {
        "prompts": len(prompts),
        **counts,
        "tokens_per_round": 1 + tau,
        "tau": tau,
        "alpha": counts["accepted_tokens"] / max(1, counts["new_tokens"]),
        "accepted_by_depth": [count / max(1, counts["rounds"]) for count in by_depth],
        "near_ties": near_ties,
    }
    if arguments.check:
        result |= {"identical": len(prompts) - len(divergences), "divergences": divergences}
    return result


def table(results: dict[str, dict[str, Any]]) -> str:
    """The results of [`measure_acceptance`] by data set, as aligned text."""
    cells = [["data", "prompts", "tokens/round", "tau", "alpha", "identical", "accepted by depth"]]
    for name, found in results.items():
        cells.append(
            [
                name,
                str(found["prompts"]),
                f"{found['tokens_per_round']:.2f}",
                f"{found['tau']:.2f}",
                f"{100 * found['alpha']:.1f} %",
                f"{found['identical']}/{found['prompts']}" if "identical" in found else "-",
                " ".join(f"{share:.2f}" for share in found["accepted_by_depth"]),
            ]
        )
    return aligned(cells)


def main(argv: list[str]) -> int:
    """
    Runs `hf-falcon evaluate`. With `--check` in float32, or with `--row_invariant`, returns 1 if any output differs.
    """
    arguments = EvaluateArguments(**vars(parser().parse_args(argv)))
    files = {path: [turns[0] for turns in read_turns(path, arguments.limit)] for path in arguments.data}
    device = resolve_device(arguments.device)
    target, tokenizer = load_target(arguments.target, arguments.dtype, device)
    if arguments.check:
        # Kept code rounds in its own way.
        uncompile_rounds(target)
    dtype = target.dtype
    drafter = load_drafter(arguments.drafter, dtype, device, target)
    note_other_variables(drafter, template_variables(arguments.chat_template_kwargs))
    if arguments.prompt_lookup_num_tokens is None and drafter.max_draft_passes != 0:
        arguments.prompt_lookup_num_tokens = 0
    for option in fields(DraftOptions):
        # Some options are not arguments: `verification` has no meaning in greedy decoding.
        value = getattr(arguments, option.name, None)
        if value is not None:
            setattr(drafter.generation_config, option.name, value)
    options = DraftOptions.from_generation_config(drafter.generation_config)
    with row_invariant(target) if arguments.row_invariant else nullcontext():
        results = {
            Path(path).stem: measure_acceptance(target, drafter, tokenizer, prompts, arguments)
            for path, prompts in files.items()
        }
    if arguments.json:
        print(json.dumps({"dtype": str(dtype).removeprefix("torch."), "options": vars(options), "data": results}))
    else:
        print(
            f"{options.draft_tree} tree of {options.num_assistant_tokens} nodes, at most {options.num_draft_passes} "
            f"passes, greedy, {arguments.max_new_tokens} tokens, {str(dtype).removeprefix('torch.')}"
        )
        print(table(results))
        print("tokens/round: tau + 1, the acceptance length. tau: accepted draft tokens a round; alpha: their share.")
        is_exact = dtype == torch.float32 or arguments.row_invariant
        if not is_exact and any(result.get("divergences") for result in results.values()):
            print(
                "Rounding decides between tokens that are almost equally likely. With --row_invariant, "
                "and in float32, no output may diverge."
            )
        for name, result in results.items():
            for each in result.get("divergences", ()):
                gap = "one of the outputs ends" if each["gap"] is None else f"logit gap {each['gap']:.3g}"
                print(f"{name}, prompt {each['prompt']}: diverges from plain decoding at token {each['token']}, {gap}")
    differs = arguments.check and any(result["identical"] < result["prompts"] for result in results.values())
    return 1 if differs and (dtype == torch.float32 or arguments.row_invariant) else 0
