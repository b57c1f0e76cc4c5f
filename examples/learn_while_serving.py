# Copyright 2026 The hf_falcon authors. Licensed under the Apache License, Version 2.0.
"""
A drafter learns from a stream of calls. Prints how many draft tokens a round accepts on held-out prompts (trees of 8
nodes, no prompt lookup), and the speed-up over plain decoding with the time of learning counted.

    python examples/learn_while_serving.py --stream german --calls 100 --every 50 --held_out 8 --max_new_tokens 64 \
        --steps_a_call 0.75

Hardware: 2 CPU cores
Minutes: 20
Expected: more accepted tokens on the stream's held-out prompts after 100 calls than before

The streams of docs/learning.md, an instant drafter on dialogues, and the shipped one on German prompts:

    python examples/learn_while_serving.py --stream prompts.jsonl --drafter new --calls 600 --every 100 --held_out 40 \
        --steps_a_call 0.75 --learning_rate 1e-3 --plain_every 9 --folder learnt --output curve.jsonl
    python examples/learn_while_serving.py --stream german --calls 200 --every 50 --held_out 40 --other mt_bench \
        --max_new_tokens 64 --steps_a_call 0.75 --plain_every 9 --folder german --output german.jsonl

With `--folder` and `--output`, the same command resumes after an interruption.
"""

import argparse
import json
import random
import time
from itertools import product
from pathlib import Path

import torch
import torch.nn.functional as F
from transformers import PreTrainedModel, set_seed

from hf_falcon import FalconDraftModel, Learner, LearningOptions, instant_drafter
from hf_falcon.bench.acceptance import Inputs, decode
from hf_falcon.bench.prompts import read_turns
from hf_falcon.commands.models import encode, load_drafter, load_target

# 10 forms of 24 topics.
FORMS = [
    "Erkläre einem Kind, was {} ist.",
    "Schreibe eine kurze Geschichte über {}.",
    "Nenne fünf Tatsachen über {}.",
    "Welche Vorteile und Nachteile hat {}?",
    "Schreibe einen Brief an einen Freund über {}.",
    "Fasse in drei Sätzen zusammen, warum {} wichtig ist.",
    "Stelle drei Fragen zum Thema {} und beantworte sie.",
    "Schreibe ein Gedicht über {}.",
    "Was sollte ein Anfänger über {} wissen?",
    "Vergleiche {} früher und heute.",
]
TOPICS = [
    "das Wetter",
    "die Eisenbahn",
    "das Fahrrad",
    "der Wald",
    "die Schule",
    "das Brot",
    "die Musik",
    "der Computer",
    "das Meer",
    "die Medizin",
    "der Garten",
    "die Zeitung",
    "das Theater",
    "der Strom",
    "die Stadt",
    "das Papier",
    "der Mond",
    "die Brücke",
    "das Salz",
    "der Winter",
    "das Feuer",
    "der Kaffee",
    "die Post",
    "das Museum",
]
# Prompts that are compared in one batch, and their tree.
BATCH = 8
TREE = {"num_assistant_tokens": 8, "num_draft_passes": 3, "context_bonuses": ()}


def main() -> list[dict[str, float]]:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", help="a name or a folder; the demo's target by default")
    parser.add_argument("--drafter", help="a name or a folder, or `new` for an instant one")
    parser.add_argument("--stream", default="german", help="`german`, or a JSON-lines file with `turns`")
    parser.add_argument("--other", help="more prompts, on which nothing should be lost: as `hf-falcon bench --data`")
    parser.add_argument("--calls", type=int, default=40)
    parser.add_argument("--held_out", type=int, default=8, help="prompts of the stream that are compared")
    parser.add_argument("--every", type=int, default=20, help="calls between two comparisons")
    parser.add_argument("--max_new_tokens", type=int, default=96)
    parser.add_argument("--share", type=float, default=0.15, help="time of learning, as a share of the calls'")
    parser.add_argument(
        "--steps_a_call", type=float, help="steps of the optimizer after each call, instead of a share"
    )
    parser.add_argument("--plain_every", type=int, default=1, help="calls, of which one is decoded plainly, too")
    parser.add_argument("--rejected", type=float, default=0.0, help="share of the learning from rejected tokens")
    parser.add_argument("--learning_rate", type=float, default=3e-4)
    parser.add_argument("--folder", help="keeps what was learnt, and the texts")
    parser.add_argument("--output", help="gets a JSON line of each comparison")
    parser.add_argument("--dtype", default="auto")
    arguments = parser.parse_args()
    set_seed(0)
    target, tokenizer = load_target(arguments.target, arguments.dtype)
    texts = prompts(arguments.stream)[: arguments.calls + arguments.held_out]
    inputs = [encode(tokenizer, text, target.device) for text in texts]
    held_out, stream = batches(inputs[: arguments.held_out]), inputs[arguments.held_out :]
    others = [] if arguments.other is None else [turns[0] for turns in read_turns(arguments.other, 40)]
    others = batches([encode(tokenizer, text, target.device) for text in others])
    if arguments.drafter == "new":
        drafter = instant_drafter(target, tokenizer)
    else:
        drafter = load_drafter(arguments.drafter, target.dtype, target.device)
    options = LearningOptions(
        share=arguments.share if arguments.steps_a_call is None else 0.0,
        idle_share=0.0,
        rejected=arguments.rejected,
        learning_rate=arguments.learning_rate,
        folder=arguments.folder,
        keep_samples=arguments.folder is not None,
        # The stream's prompts are all used, and this script holds out its own, too.
        held_out=0.1,
    )
    output = None if arguments.output is None else Path(arguments.output)
    rows: list[dict[str, float]] = []
    if output is not None and output.exists():
        rows = [json.loads(line) for line in output.read_text(encoding="utf-8").splitlines()]
    if rows and arguments.folder is None:
        raise SystemExit(
            f"{arguments.output} has rows of a drafter that was not kept: give its `folder`, or delete it."
        )
    if rows and rows[-1]["calls"] != (len(rows) - 1) * arguments.every:
        raise SystemExit(f"{arguments.output} was written with another `every`: give that one, or delete it.")
    print(" calls    tau  other  speed-up  steps  megabytes")
    with Learner(drafter, target, options) as learner:
        for done in range(0, len(stream) + 1, arguments.every):
            if done < len(rows) * arguments.every:
                continue
            row: dict[str, float] = {"calls": done}
            chunk = stream[max(0, done - arguments.every) : done]
            steps = arguments.steps_a_call or 0.0
            seconds = plain = 0.0
            for number, each in enumerate(chunk):
                took = run(target, each, drafter, arguments.max_new_tokens, learner, steps)
                if number % arguments.plain_every == 0:
                    # At once, for whatever else the machine does then slows both.
                    seconds += took
                    plain += run(target, each, None, arguments.max_new_tokens)
            if chunk:
                row["speed_up"] = plain / seconds
            with learner.paused():
                row["tau"] = decode(target, drafter, held_out, arguments.max_new_tokens, "", **TREE).tau
                if others:
                    row["other"] = decode(target, drafter, others, arguments.max_new_tokens, "", **TREE).tau
            statistics = learner.statistics
            row |= {"steps": statistics.steps, "megabytes": statistics.memory / 2**20}
            row |= {"call_seconds": statistics.call_seconds, "learning_seconds": statistics.learning_seconds}
            rows.append(row)
            print(
                f"{row['calls']:6d}  {row['tau']:5.2f}  {row.get('other', 0.0):5.2f}  "
                f"{row.get('speed_up', 0.0):8.2f}  {row['steps']:5d}  {row['megabytes']:9.1f}",
                flush=True,
            )
            learner.save()
            if output is not None:
                with output.open("a", encoding="utf-8") as file:
                    file.write(json.dumps(row) + "\n")
        print(learner.statistics)
    return rows


def prompts(stream: str) -> list[str]:
    """The prompts of a stream, in an order that is always the same."""
    if stream != "german":
        return [turns[0] for turns in read_turns(stream)]
    found = [form.format(topic) for form, topic in product(FORMS, TOPICS)]
    random.Random(0).shuffle(found)
    return found


def batches(prompts: list[Inputs]) -> list[Inputs]:
    """Batches of prompts of like length, padded on the left: they take less time than one prompt after the other."""
    prompts, found = sorted(prompts, key=lambda each: each["input_ids"].shape[1]), []
    for start in range(0, len(prompts), BATCH):
        batch = prompts[start : start + BATCH]
        longest = batch[-1]["input_ids"].shape[1]
        found.append(
            {
                name: torch.cat([F.pad(each[name], (longest - each[name].shape[1], 0)) for each in batch])
                for name in ("input_ids", "attention_mask")
            }
        )
    return found


def run(
    target: PreTrainedModel,
    inputs: Inputs,
    drafter: FalconDraftModel | None,
    tokens: int,
    learner: Learner | None = None,
    steps: float = 0.0,
) -> float:
    """Seconds of a call, with what is learnt after it: so many steps, on average."""
    start = time.perf_counter()
    target.generate(**inputs, assistant_model=drafter, max_new_tokens=tokens, do_sample=False)
    if learner is not None and steps:
        due = int(learner.statistics.calls * steps) - learner.statistics.steps
        learner.learn(max(0, due))
    return time.perf_counter() - start


if __name__ == "__main__":
    main()
