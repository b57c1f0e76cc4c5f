# Copyright 2026 The hf_falcon authors. Licensed under the Apache License, Version 2.0.
"""
What learning costs calls between which there is no idle time: pairs of calls, one of them with learning, with the
default options. Prints tokens a second of both, with the time of learning between the calls counted.

    python examples/learning_cost.py --pairs 30

Hardware: 2 CPU cores
Minutes: 2
Expected: about 0.96, as learning takes 4 % of the time of the calls
"""

import argparse
import time

from transformers import set_seed

from hf_falcon import Learner, LearningOptions
from hf_falcon.commands.models import encode, load_drafter, load_target

QUESTIONS = ["What is {}?", "Write a short story about {}.", "Give me some advice about {}.", "List facts on {}."]
TOPICS = ["the weather", "trains", "gardens", "music", "computers", "the sea", "bread", "schools"]


def main() -> float:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", help="a name or a folder; the demo's target by default")
    parser.add_argument("--drafter", help="a name or a folder")
    parser.add_argument("--pairs", type=int, default=30)
    parser.add_argument("--max_new_tokens", type=int, default=64)
    parser.add_argument("--dtype", default="auto")
    arguments = parser.parse_args()
    set_seed(0)
    target, tokenizer = load_target(arguments.target, arguments.dtype)
    drafter = load_drafter(arguments.drafter, target.dtype, target.device)
    prompts = [encode(tokenizer, form.format(topic), target.device) for topic in TOPICS for form in QUESTIONS]
    tokens, seconds = {True: 0, False: 0}, {True: 0.0, False: 0.0}

    def run(index: int, learns: bool) -> None:
        inputs = prompts[index % len(prompts)]
        start = time.perf_counter()
        output = target.generate(
            **inputs, assistant_model=drafter, max_new_tokens=arguments.max_new_tokens, do_sample=False
        )
        seconds[learns] += time.perf_counter() - start
        tokens[learns] += output.shape[1] - inputs["input_ids"].shape[1]

    with Learner(drafter, target, LearningOptions(idle_share=0.0)) as learner:
        for index in range(-3, arguments.pairs):
            # The first three warm up.
            if index == 0:
                tokens, seconds = dict.fromkeys(tokens, 0), dict.fromkeys(seconds, 0.0)
            # Each is the first of its pair in every second one.
            for learns in (True, False) if index % 2 else (False, True):
                if learns:
                    run(index, True)
                else:
                    with learner.paused():
                        run(index, False)
        speeds = {learns: tokens[learns] / seconds[learns] for learns in tokens}
        ratio = speeds[True] / speeds[False]
        print(f"{speeds[True]:.1f} tokens a second with learning, {speeds[False]:.1f} without: {ratio:.3f}")
        print(learner.statistics)
    return ratio


if __name__ == "__main__":
    main()
