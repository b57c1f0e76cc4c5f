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
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import PreTrainedModel

from hf_falcon import FalconDraftModel
from hf_falcon.commands.models import load_drafter, load_target
from hf_falcon.core.candidate_generator import ContextHead
from hf_falcon.core.draft_session import TargetHead
from hf_falcon.training.csgd import draft_pass, shift_left
from hf_falcon.training.features import kept_features, target_features
from hf_falcon.training.token_file import TokenFile

STEPS, LEARNING_RATE = 100, 0.1


class Sample(NamedTuple):
    """
    What the drafter knows at some positions of a sample.

    Args:
        unseen (`torch.Tensor` of shape `(positions,)`): log-sum-exp of the logits of tokens that are new.
        seen (`torch.Tensor` of shape `(positions, tokens)`): logits of the others, filled up with -inf.
        equal (`torch.LongTensor` of the same shape): most equal tokens before an earlier occurrence; -1: none.
        right (`torch.Tensor` of shape `(positions,)`): logits of the target's choices.
        equal_right (`torch.LongTensor` of shape `(positions,)`): as `equal`, of these.
    """

    unseen: Tensor
    seen: Tensor
    equal: Tensor
    right: Tensor
    equal_right: Tensor


@torch.no_grad()
def observe(
    drafter: FalconDraftModel,
    target: PreTrainedModel,
    token_ids: Tensor,
    prompt_length: int,
    most: int,
    features: Tensor | None = None,
) -> Sample | None:
    """
    The first pass at each response token of a sample, after the tokens before it.

    Args:
        drafter, target: the models.
        token_ids (`torch.LongTensor` of shape `(1, length)`): the sample.
        prompt_length (`int`): tokens before the response.
        most (`int`): equal tokens that are told apart, at most.
        features (`torch.Tensor` of shape `(1, length, hidden_size)`, *optional*): the target's, if they were kept.

    Returns:
        [`Sample`], without the choices that the drafter does not score; `None` if none is left.
    """
    valid, blocks = torch.ones_like(token_ids, dtype=torch.bool), torch.arange(token_ids.shape[1])[None]
    head = TargetHead(drafter, target)
    if features is None:
        features = target_features(target, token_ids, valid)
    states = draft_pass(drafter, features, head.embed(shift_left(token_ids, 1)), blocks, valid)[0]
    choices = target.get_output_embeddings()(features)[0].argmax(dim=-1)
    # The bonus of n equal tokens is n + 1: what a token gains tells n.
    context = ContextHead(head, [float(n + 1) for n in range(most + 1)], drafter.config.vocab_size, drafter.device)
    logits, equal, right = [], [], []
    # The state of position i predicts token i + 2, after token i + 1.
    for i in range(prompt_length - 2, token_ids.shape[1] - 2):
        context.extend(token_ids[0, len(context) : i + 2])
        vocabulary = torch.arange(drafter.config.vocab_size) if context.vocab_ids is None else context.vocab_ids
        column = (vocabulary == choices[i + 1]).nonzero()
        if column.shape[0]:
            logits.append(context.logits(states[i : i + 1])[0].float())
            gained = context.prefer_repetitions(torch.zeros_like(logits[-1])[None], context.latest())[0]
            equal.append(gained.round().long() - 1)
            right.append(int(column))
    if not right:
        return None
    # The vocabulary grew on the way.
    size = len(logits[-1])
    scores = torch.stack([F.pad(each, (0, size - len(each)), value=-torch.inf) for each in logits])
    counts = torch.stack([F.pad(each, (0, size - len(each)), value=-1) for each in equal])
    is_seen, columns = counts >= 0, torch.tensor(right)[:, None]
    seen = scores.masked_fill(~is_seen, -torch.inf).topk(int(is_seen.sum(dim=1).max()))
    return Sample(
        scores.masked_fill(is_seen, -torch.inf).logsumexp(dim=1),
        seen.values,
        counts.gather(1, seen.indices),
        scores.gather(1, columns)[:, 0],
        counts.gather(1, columns)[:, 0],
    )


def loss(sample: Sample, bonuses: Tensor) -> Tensor:
    """The sum of the negative log-likelihoods of the target's choices."""
    # Index -1 is a bonus of 0.
    gains = F.pad(bonuses, (0, 1))
    seen = (sample.seen + gains[sample.equal]).logsumexp(dim=1)
    return (torch.logaddexp(sample.unseen, seen) - sample.right - gains[sample.equal_right]).sum()


def fit(samples: list[Sample], most: int) -> Tensor:
    """The bonuses of 0, 1, ... `most` equal tokens with the least loss."""
    bonuses = torch.zeros(most + 1, requires_grad=True)
    optimizer = torch.optim.Adam([bonuses], lr=LEARNING_RATE)
    count = sum(len(sample.right) for sample in samples)
    for _ in range(STEPS):
        optimizer.zero_grad()
        for sample in samples:
            (loss(sample, bonuses) / count).backward()
        optimizer.step()
    return bonuses.detach().clamp_min(0.0)


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
    drafter = load_drafter(arguments.drafter, arguments.dtype)
    data, samples = TokenFile.load(arguments.data), []
    kept = kept_features([arguments.data], [data], target)
    for index in range(arguments.first, min(arguments.first + arguments.samples, len(data))):
        token_ids, prompt_length = data.sample(index)
        row = token_ids[None, : arguments.max_length]
        features = None if kept is None else kept.sample(index)[None, : arguments.max_length].to(target.dtype)
        found = observe(drafter, target, row, prompt_length, arguments.most, features)
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
