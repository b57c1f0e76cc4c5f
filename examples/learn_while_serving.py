# Copyright 2026 The hf_falcon authors. Licensed under the Apache License, Version 2.0.
"""
A drafter learns from a stream of calls. Prints how many draft tokens a round accepts on held-out prompts (trees of 8
nodes, no prompt lookup), and the speed-up over plain decoding with the time of learning counted.

    python examples/learn_while_serving.py --stream german --calls 40 --every 20 --held_out 8

Hardware: 2 CPU cores
Minutes: 10
Expected: more accepted tokens on the stream's held-out prompts after each line

The stream of issue size, a new drafter on dialogues, and the shipped one on German prompts:

    python examples/learn_while_serving.py --stream prompts.jsonl --drafter new --calls 600 --every 50 --share 0.15
    python examples/learn_while_serving.py --stream german --calls 160 --every 40 --other mt_bench --share 0.15
"""

import argparse
import random
import time
from itertools import product

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase, set_seed

from hf_falcon import FalconDraftConfig, FalconDraftModel, Learner, LearningOptions
from hf_falcon.bench.acceptance import Inputs, decode
from hf_falcon.bench.prompts import read_turns
from hf_falcon.commands.models import encode, load_drafter, load_target
from hf_falcon.training.features import feature_statistics
from hf_falcon.training.start import like_last_layer, start_falcon
from hf_falcon.training.token_file import TokenFile

# 10 forms of 20 topics.
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
]
# The tree of every comparison.
TREE = {"num_assistant_tokens": 8, "num_draft_passes": 3, "context_bonuses": ()}


def main() -> list[dict[str, float]]:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", help="a name or a folder; the demo's target by default")
    parser.add_argument("--drafter", help="a name or a folder, or `new` for one without training")
    parser.add_argument("--stream", default="german", help="`german`, or a JSON-lines file with `turns`")
    parser.add_argument("--other", help="more prompts, on which nothing should be lost: as `hf-falcon bench --data`")
    parser.add_argument("--calls", type=int, default=40)
    parser.add_argument("--held_out", type=int, default=8, help="prompts of the stream that are compared")
    parser.add_argument("--every", type=int, default=20, help="calls between two comparisons")
    parser.add_argument("--max_new_tokens", type=int, default=96)
    parser.add_argument("--share", type=float, default=0.15, help="time of learning, as a share of the calls'")
    parser.add_argument("--rejected", type=float, default=0.0, help="share of the learning from rejected tokens")
    parser.add_argument("--learning_rate", type=float, default=3e-4)
    parser.add_argument("--folder", help="keeps what was learnt")
    parser.add_argument("--dtype", default="auto")
    arguments = parser.parse_args()
    set_seed(0)
    target, tokenizer = load_target(arguments.target, arguments.dtype)
    texts = prompts(arguments.stream)[: arguments.calls + arguments.held_out]
    inputs = [encode(tokenizer, text, target.device) for text in texts]
    held_out, stream = inputs[: arguments.held_out], inputs[arguments.held_out :]
    others = (
        [encode(tokenizer, turns[0], target.device) for turns in read_turns(arguments.other, 40)]
        if (arguments.other)
        else []
    )
    if arguments.drafter == "new":
        drafter = new_drafter(target, tokenizer)
    else:
        drafter = load_drafter(arguments.drafter, target.dtype, target.device)
    options = LearningOptions(
        share=arguments.share,
        idle_share=0.0,
        rejected=arguments.rejected,
        learning_rate=arguments.learning_rate,
        folder=arguments.folder,
        # The stream's prompts are all used, and this script holds out its own, too.
        held_out=0.1,
    )
    rows: list[dict[str, float]] = []
    print(" calls    tau  other  speed-up  steps  megabytes")
    with Learner(drafter, target, options) as learner:
        for start in range(0, len(stream) + 1, arguments.every):
            with learner.paused():
                row = {
                    "calls": start,
                    "tau": decode(target, drafter, held_out, arguments.max_new_tokens, "", **TREE).tau,
                }
                if others:
                    row["other"] = decode(target, drafter, others, arguments.max_new_tokens, "", **TREE).tau
            chunk = stream[start : start + arguments.every]
            seconds = [run(target, each, drafter, arguments.max_new_tokens) for each in chunk]
            plain = [run(target, each, None, arguments.max_new_tokens) for each in chunk]
            row["speed_up"] = sum(plain) / sum(seconds) if chunk else float("nan")
            statistics = learner.statistics
            row |= {"steps": statistics.steps, "megabytes": statistics.memory / 2**20}
            rows.append(row)
            print(
                f"{row['calls']:6d}  {row['tau']:5.2f}  {row.get('other', 0.0):5.2f}  "
                f"{row['speed_up']:8.2f}  {row['steps']:5d}  {row['megabytes']:9.1f}",
                flush=True,
            )
        print(learner.statistics)
    return rows


def prompts(stream: str) -> list[str]:
    """The prompts of a stream, in an order that is always the same."""
    if stream != "german":
        return [turns[0] for turns in read_turns(stream)]
    found = [form.format(topic) for form, topic in product(FORMS, TOPICS)]
    random.Random(0).shuffle(found)
    return found


def run(target: PreTrainedModel, inputs: Inputs, drafter: FalconDraftModel | None, tokens: int) -> float:
    """Seconds of a call; with a drafter that learns, its learning is in the call."""
    start = time.perf_counter()
    target.generate(**inputs, assistant_model=drafter, max_new_tokens=tokens, do_sample=False)
    return time.perf_counter() - start


def new_drafter(target: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> FalconDraftModel:
    """A drafter that has copies of the target's last layers and no training; it is fitted to some answers."""
    questions = ["What is {}?", "Write a short story about {}.", "Give me some advice about {}.", "List facts on {}."]
    topics = ["the weather", "trains", "gardens", "music", "computers", "the sea", "bread", "schools"]
    samples, lengths = [], []
    for form, topic in product(questions, topics):
        inputs = encode(tokenizer, form.format(topic), target.device)
        lengths.append(inputs["input_ids"].shape[1])
        output = target.generate(**inputs, max_new_tokens=64, do_sample=False, assistant_model=None)
        samples.append(output[0].cpu())
    vocab_size = target.config.get_text_config(decoder=True).vocab_size
    data = TokenFile.from_samples(samples, lengths, [0.0] * len(samples), vocab_size)
    config = FalconDraftConfig.from_target(target, block_size=1, num_lstm_layers=0, num_hidden_layers=1)
    with torch.no_grad():
        found = FalconDraftModel(like_last_layer(config, target))
        found.set_feature_statistics(*feature_statistics(target, data))
        start_falcon(found, target, data)
    return found.to(target.device, target.dtype).eval()


if __name__ == "__main__":
    main()
