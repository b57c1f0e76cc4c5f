# Copyright 2026 The hf_falcon authors. Licensed under the Apache License, Version 2.0.
"""
Measures whether a drafter makes anything slower: short and long answers, on a quiet machine and beside busy processes,
the first call of a process and the second. Prints the tokens a second of each drafter over those of plain decoding.

    python examples/never_slower.py --data mt_bench.jsonl humaneval.jsonl gsm8k.jsonl --output never-slower.jsonl

Hardware: 2 CPU cores, Linux
Minutes: 60 with --lengths 16 64; 1 with --limit 1 --busy 0 --lengths 16
Expected: nothing below 1, beyond what repetitions differ by, which is a tenth and more; 2 to 5 beside other processes

Each prompt and drafter has a new process: a fork of one that has loaded everything and has computed nothing. The same
command goes on after an interruption.
"""

import argparse
import itertools
import json
import multiprocessing
import random
import statistics
import time
from pathlib import Path

import torch
from tqdm import tqdm

from hf_falcon.bench.busy import busy_processes
from hf_falcon.bench.prompts import read_turns
from hf_falcon.bench.tables import aligned
from hf_falcon.commands.models import encode, load_drafter, load_target
from hf_falcon.core.modeling_falcon_draft import FalconDraftNetwork

# Plain decoding, and a drafter that predicts nothing.
PLAIN, RANDOM = "plain", "random"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", help="target, from the Hub or a folder; the demo's if left out")
    parser.add_argument("--drafters", nargs="*", default=[], help="more drafters, or all with --target: name=FOLDER")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--data", nargs="+", required=True, help="JSON-lines files; their first turns are the prompts")
    parser.add_argument("--limit", type=int, default=4, help="prompts of each file")
    parser.add_argument("--busy", nargs="+", type=int, default=[0, 1, 2], help="other processes that compute")
    parser.add_argument("--lengths", nargs="+", type=int, default=[16, 64, 256], help="new tokens of an answer")
    parser.add_argument("--output", required=True, type=Path, help="JSON lines, one for each process")
    arguments = parser.parse_args()
    threads = torch.get_num_threads()
    # A process whose threads have computed cannot be forked.
    torch.set_num_threads(1)
    target, tokenizer = load_target(arguments.target, arguments.dtype)
    drafters = load_drafters(arguments, target)
    prompts = [
        encode(tokenizer, turns[0], target.device)
        for file in arguments.data
        for turns in read_turns(file, arguments.limit)
    ]
    # Neighbours are of different files.
    random.Random(0).shuffle(prompts)
    turns = list(itertools.product(arguments.busy, arguments.lengths, range(len(prompts))))
    wanted = {(*turn, name) for turn in turns for name in drafters}
    lines = arguments.output.read_text().splitlines() if arguments.output.exists() else []
    # A file may have results of other settings, too.
    settings = {name: getattr(arguments, name) for name in ("target", "dtype", "data", "limit", "drafters")}
    settings["threads"] = threads
    measured = [line for line in map(json.loads, lines) if key(line) in wanted and line["settings"] == settings]
    done = set(map(key, measured))
    progress = tqdm(total=len(wanted), unit="process")
    for busy, length, prompt in turns:
        names = list(drafters)
        # Nothing is always the first or the last.
        random.Random(f"{busy} {length} {prompt}").shuffle(names)
        with busy_processes(busy):
            for name in names:
                progress.update()
                if (busy, length, prompt, name) in done:
                    continue
                calls = [prompts[prompt], prompts[(prompt + 1) % len(prompts)]]
                tokens, seconds = in_new_process(run, target, drafters[name], calls, length, threads)
                line = {"busy": busy, "length": length, "prompt": prompt, "drafter": name}
                line |= {"tokens": tokens, "seconds": seconds, "settings": settings}
                measured.append(line)
                with arguments.output.open("a") as file:
                    file.write(json.dumps(line) + "\n")
    progress.close()
    print(aligned(table(measured, list(drafters))))


def load_drafters(arguments, target):
    """By name. `None` is plain decoding; `random` has the sizes of the first Falcon drafter."""
    folders = {} if arguments.target else {"default": None}
    folders |= {name: folder for name, _, folder in (word.partition("=") for word in arguments.drafters)}
    drafters = {name: load_drafter(each, arguments.dtype, target.device, target) for name, each in folders.items()}
    for drafter in drafters.values():
        drafter.check_target(target)
    found = {PLAIN: None, "lookup": "lookup", **drafters}
    first = next((each for each in drafters.values() if isinstance(each, FalconDraftNetwork)), None)
    if first is not None:
        torch.manual_seed(0)
        found[RANDOM] = type(first)(first.config).to(target.dtype).eval()
    return found


def in_new_process(function, *arguments):
    """What the function returns in a fork of this process."""
    context = multiprocessing.get_context("fork")
    here, there = context.Pipe(duplex=False)
    process = context.Process(target=lambda: there.send(function(*arguments)))
    process.start()
    there.close()
    try:
        return here.recv()
    finally:
        process.join()


def run(target, drafter, calls, length, threads):
    """New tokens and seconds of each call."""
    torch.set_num_threads(threads)
    tokens, seconds = [], []
    for inputs in calls:
        start = time.perf_counter()
        output = target.generate(**inputs, assistant_model=drafter, max_new_tokens=length, do_sample=False)
        seconds.append(time.perf_counter() - start)
        tokens.append(output.shape[1] - inputs["input_ids"].shape[1])
    return tokens, seconds


def table(measured, names):
    """
    A row for each number of busy processes and each length, with the first call and the second of each drafter: the
    median of the prompts. On a busy machine a process can be ten times slower than the one before it, with any drafter
    and with none, and would decide a sum.
    """
    names = [name for name in names if name != PLAIN]
    rows = [["busy", "new tokens", *(f"{name}, {call}" for name in names for call in ("first", "second"))]]
    for busy, length in sorted({(each["busy"], each["length"]) for each in measured}):
        found = {(each["prompt"], each["drafter"]): each for each in measured if key(each)[:2] == (busy, length)}
        row = [str(busy), str(length)]
        for name, call in itertools.product(names, (0, 1)):
            pairs = [(found[prompt, PLAIN], each) for (prompt, who), each in found.items() if who == name]
            row.append(f"{statistics.median(speed(each, call) / speed(plain, call) for plain, each in pairs):.2f}")
        rows.append(row)
    return rows


def key(line):
    """What a process was for: busy processes, length, prompt, drafter."""
    return line["busy"], line["length"], line["prompt"], line["drafter"]


def speed(line, call):
    """Tokens a second."""
    return line["tokens"][call] / line["seconds"][call]


if __name__ == "__main__":
    main()
