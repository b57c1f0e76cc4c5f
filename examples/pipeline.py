# Copyright 2026 The hf_falcon authors. Licensed under the Apache License, Version 2.0.
"""
The same sampled answer from a text-generation pipeline, with and without a drafter.

    python examples/pipeline.py "Why is the sky blue?"

Hardware: two CPU cores, after `make setup`.
Minutes: under one.
Expected: one answer, the seconds of both, "the same text: True".

With models of your own, name them: `pipeline("text-generation", model="your/target", assistant_model="your/drafter")`.
"""

import sys
import time

from transformers import pipeline, set_seed

import hf_falcon  # noqa: F401  makes pipelines take drafters
from hf_falcon.commands.models import converted_target, shipped_drafter


def main() -> None:
    chat = [{"role": "user", "content": " ".join(sys.argv[1:]) or "Why is the sky blue?"}]
    answers = []
    for drafter in (None, shipped_drafter()):
        write = pipeline("text-generation", model=str(converted_target()), assistant_model=drafter)
        # The first call of a drafter learns what rounds cost.
        write(chat, max_new_tokens=8)
        set_seed(0)
        start = time.perf_counter()
        answers.append(write(chat, max_new_tokens=128, return_full_text=False)[0]["generated_text"])
        print(f"{'plain' if drafter is None else 'drafted'}: {time.perf_counter() - start:.1f} s")
    print(f"the same text: {answers[0] == answers[1]}\n\n{answers[1]}")


if __name__ == "__main__":
    main()
