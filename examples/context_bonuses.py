# Copyright 2026 The hf_falcon authors. Licensed under the Apache License, Version 2.0.
"""
Fits the drafting option `context_bonuses` to a drafter: what a token that occurred earlier in the text gains, by the
number of equal tokens before it. Fits on every other sample, and prints the loss of the rest without and with bonuses.
The samples should be the target's own greedy responses that the drafter was not trained on.

    hf-falcon prepare --data prompts.jsonl --output held_out.safetensors --temperatures 0 --max_new_tokens 128
    python examples/context_bonuses.py --data held_out.safetensors

The drafter must propose one token a pass, without an LSTM. Features that `prepare` kept beside the file are read.
"""

import argparse

import torch

from hf_falcon.commands.models import load_drafter, load_target
from hf_falcon.training.context_bonuses import fit, loss, observe
from hf_falcon.training.features import kept_features
from hf_falcon.training.token_file import TokenFile


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", required=True, help="token file of held-out responses")
    parser.add_argument("--target", help="target, from the Hub or a folder")
    parser.add_argument("--drafter", help="drafter, from the Hub or a folder")
    parser.add_argument("--samples", type=int, default=64, help="samples, from the start of the file")
    parser.add_argument("--first", type=int, default=0, help="the first of these samples")
    parser.add_argument("--dtype", default="float32", help="dtype of the target and the drafter")
    parser.add_argument("--max_length", type=int, default=256, help="tokens of a sample, at most")
    parser.add_argument("--most", type=int, default=4, help="equal tokens that are told apart, at most")
    arguments = parser.parse_args()
    target, _ = load_target(arguments.target, arguments.dtype, "cpu")
    drafter = load_drafter(arguments.drafter, arguments.dtype, target.device)
    data, samples = TokenFile.load(arguments.data), []
    kept = kept_features([arguments.data], [data], target)
    for index in range(arguments.first, min(arguments.first + arguments.samples, len(data))):
        token_ids, prompt_length = data.sample(index)
        row = token_ids[None, : arguments.max_length]
        features = None if kept is None else kept.sample(index)[None, : arguments.max_length].to(target.dtype)
        (found,) = observe(drafter, target, row, prompt_length, arguments.most, features)
        samples += [] if found is None else [found]
    bonuses = fit(samples[::2], arguments.most)
    rest = samples[1::2]
    count = sum(len(sample.right) for sample in rest)
    with torch.no_grad():
        before, after = (sum(loss(each, b) for each in rest) / count for b in (torch.zeros_like(bonuses), bonuses))
    print(f"context_bonuses: {[round(bonus, 1) for bonus in bonuses.tolist()]}")
    print(f"negative log-likelihood of {count} other tokens: {before:.3f} without, {after:.3f} with")


if __name__ == "__main__":
    main()
