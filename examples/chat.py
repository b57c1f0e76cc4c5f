# Copyright 2026 The hf_falcon authors. Licensed under the Apache License, Version 2.0.
"""
A chat with history: each turn reuses the cache of the turn before, so the target reads only the new tokens.

    python examples/chat.py "Name a fruit." "And a vegetable?"

Hardware: two CPU cores, after `make setup`.
Minutes: under one.
Expected: an answer to each message, and the share of its tokens that were drafted. In the terminal: `hf-falcon chat`.
"""

import sys

import torch

from hf_falcon.commands.models import load_drafter, load_target
from hf_falcon.core.target_parts import CACHE_NAME


def main() -> None:
    target, tokenizer = load_target()
    drafter = load_drafter()
    messages: list[dict[str, str]] = []
    cache, seen = None, None
    for question in sys.argv[1:] or ["Name a fruit.", "And a vegetable?"]:
        messages.append({"role": "user", "content": question})
        inputs = tokenizer.apply_chat_template(
            messages, add_generation_prompt=True, return_dict=True, return_tensors="pt"
        ).to(target.device)
        ids = inputs["input_ids"]
        # It holds all tokens but the last. Where a template writes the reply otherwise than the target, start anew.
        if cache is not None and not torch.equal(ids[:, : seen.shape[1] - 1], seen[:, :-1]):
            cache = None
        output = target.generate(
            **inputs,
            assistant_model=drafter,
            max_new_tokens=128,
            do_sample=False,
            return_dict_in_generate=True,
            **{CACHE_NAME: cache},
        )
        cache, seen = output[CACHE_NAME], output.sequences
        reply = tokenizer.decode(seen[0, ids.shape[1] :], skip_special_tokens=True)
        messages.append({"role": "assistant", "content": reply})
        print(f"> {question}\n{reply}\n[{100 * output.draft_statistics.alpha:.0f} % drafted]\n")


if __name__ == "__main__":
    main()
