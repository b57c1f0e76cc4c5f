# Copyright 2026 The hf_falcon authors. Licensed under the Apache License, Version 2.0.
"""
Measures drafting for batches: for each number of rows, plain and drafted decoding of the same prompts, in turns.

    python examples/batches.py --data mt_bench.jsonl humaneval.jsonl --limit 6 --rows 1 4

Hardware: 2 CPU cores
Minutes: 3
Expected: a batch gains less than one sequence, since its rows share what a plain step leaves unused

`--drafter` takes what `assistant_model` takes: a drafter, a smaller language model, or `lookup`.
"""

import argparse
import time

import torch

from hf_falcon.bench.prompts import read_turns
from hf_falcon.bench.tables import aligned
from hf_falcon.commands.models import load_drafter, load_target


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", help="target, from the Hub or a folder; the demo's if left out")
    parser.add_argument("--drafter", help="its drafter; if left out the demo's, or `lookup` with --target")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--device")
    parser.add_argument("--data", nargs="+", required=True, help="JSON-lines files; their first turns are the prompts")
    parser.add_argument("--limit", type=int, default=6, help="prompts of each file")
    parser.add_argument("--rows", nargs="+", type=int, default=[1, 4], help="rows of a batch")
    parser.add_argument("--max_new_tokens", type=int, default=64)
    arguments = parser.parse_args()
    target, tokenizer = load_target(arguments.target, arguments.dtype, arguments.device)
    source = arguments.drafter or ("lookup" if arguments.target else None)
    drafter = load_drafter(source, arguments.dtype, target.device, target)
    prompts = [turns[0] for file in arguments.data for turns in read_turns(file, arguments.limit)]
    if max(arguments.rows) > len(prompts):
        parser.error(f"--rows has {max(arguments.rows)}, and there are {len(prompts)} prompts: raise --limit")
    tokenizer.padding_side = "left"
    if tokenizer.pad_token is None:
        tokenizer.pad_token = tokenizer.eos_token
    table = [["rows", "batches", "plain, tokens/s", "drafted, tokens/s", "ratio", "slowest batch", "identical"]]
    for rows in arguments.rows:
        table.append(measure(arguments, target, tokenizer, drafter, prompts, rows))
    print(aligned(table))


def measure(arguments, target, tokenizer, drafter, prompts, rows):
    """A row of the table. Plain decoding of the first batch warms up before it; drafting, too."""
    batches = [prompts[start : start + rows] for start in range(0, len(prompts) - rows + 1, rows)]
    tokens, seconds, ratios, identical = {None: 0, drafter: 0}, {None: 0.0, drafter: 0.0}, [], 0
    for number, batch in enumerate([batches[0], *batches]):
        chats = [[{"role": "user", "content": prompt}] for prompt in batch]
        inputs = tokenizer.apply_chat_template(
            chats, add_generation_prompt=True, padding=True, return_tensors="pt", return_dict=True
        ).to(target.device)
        found = {}
        # Each is the first of its pair in every second one.
        for assistant in (None, drafter) if number % 2 else (drafter, None):
            start = time.perf_counter()
            output = target.generate(
                **inputs,
                assistant_model=assistant,
                max_new_tokens=arguments.max_new_tokens,
                do_sample=False,
                pad_token_id=tokenizer.pad_token_id,
            )
            took, new = time.perf_counter() - start, output[:, inputs["input_ids"].shape[1] :].cpu()
            count = int((new != tokenizer.pad_token_id).sum())
            found[assistant] = new, count / took
            if number > 0:
                tokens[assistant] += count
                seconds[assistant] += took
        if number > 0:
            ratios.append(found[drafter][1] / found[None][1])
            identical += torch.equal(found[drafter][0], found[None][0])
    speeds = [tokens[assistant] / seconds[assistant] for assistant in (None, drafter)]
    ratio = f"{speeds[1] / speeds[0]:.2f}"
    found = (str(rows), str(len(batches)), *(f"{speed:.1f}" for speed in speeds))
    return [*found, ratio, f"{min(ratios):.2f}", f"{identical}/{len(batches)}"]


if __name__ == "__main__":
    main()
