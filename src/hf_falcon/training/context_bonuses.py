# Copyright 2026 The hf_falcon authors. Licensed under the Apache License, Version 2.0.
"""Fits the drafting options `context_bonuses` and `draft_calibration` to a drafter, from the target's responses."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import PreTrainedModel

from ..core.candidate_generator import ContextHead
from ..core.draft_session import TargetHead
from ..core.drafter import FalconDraftModel
from .csgd import draft_pass, shift_left
from .features import target_features
from .training_cache import TrainingCache

_STEPS, _LEARNING_RATE = 100, 0.1
# Choices whose probability a calibration compares with what came: about the children of a node.
_CHILDREN = 4
# Observations that a calibration of 1 counts as.
_PRIOR = 20.0


class Sample(NamedTuple):
    """
    What the drafter knows at some positions of a sample.

    Args:
        unseen (`torch.Tensor` of shape `(positions,)`): log-sum-exp of the logits of tokens that are new.
        seen (`torch.Tensor` of shape `(positions, tokens)`): logits of the others, filled up with -inf.
        equal (`torch.LongTensor` of the same shape): most equal tokens before an earlier occurrence; -1: none.
        right (`torch.Tensor` of shape `(positions,)`): logits of the target's choices.
        equal_right (`torch.LongTensor` of shape `(positions,)`): as `equal`, of these.
        best (`torch.Tensor` of shape `(positions, choices)`): the highest logits of tokens that are new.
    """

    unseen: Tensor
    seen: Tensor
    equal: Tensor
    right: Tensor
    equal_right: Tensor
    best: Tensor


@torch.no_grad()
def observe(
    drafter: FalconDraftModel,
    target: PreTrainedModel,
    token_ids: Tensor,
    prompt_length: int,
    most: int,
    features: Tensor | None = None,
    passes: int = 1,
) -> list[Sample | None]:
    """
    The draft passes at each response token of a sample, after the tokens before it. A later pass reads what the pass
    before it predicted, and the right tokens.

    Args:
        drafter, target: the models.
        token_ids (`torch.LongTensor` of shape `(1, length)`): the sample.
        prompt_length (`int`): tokens before the response.
        most (`int`): equal tokens that are told apart, at most.
        features (`torch.Tensor` of shape `(1, length, size)`, *optional*): the target's, if they were kept, with the
            outputs of the drafter's `feature_layers`.
        passes (`int`, *optional*, defaults to 1): draft passes.

    Returns:
        For each pass a [`Sample`], without the choices that the drafter does not score; `None` if none is left.
    """
    valid = torch.ones_like(token_ids, dtype=torch.bool)
    blocks = torch.arange(token_ids.shape[1], device=token_ids.device)[None]
    head = TargetHead(drafter, target)
    if features is None:
        features = target_features(target, token_ids, valid, drafter.config.feature_layers)
    own = features[..., : drafter.config.hidden_size]
    embeds = head.embed(shift_left(token_ids, 1))
    choices = target.get_output_embeddings()(own.to(target.dtype))[0].argmax(dim=-1)
    given, cache, found = features, None, []
    for index in range(1, passes + 1):
        cache = TrainingCache(cache)
        states = draft_pass(drafter, given, embeds, blocks, valid, index, cache)
        found.append(_observed(drafter, head, token_ids[0], states[0], choices, prompt_length, most))
        given = torch.cat((own[:, :1], states[:, :-1]), dim=1)
    return found


def _observed(
    drafter: FalconDraftModel,
    head: TargetHead,
    token_ids: Tensor,
    states: Tensor,
    choices: Tensor,
    prompt_length: int,
    most: int,
) -> Sample | None:
    # The bonus of n equal tokens is n + 1: what a token gains tells n.
    context = ContextHead(head, [float(n + 1) for n in range(most + 1)], drafter.config.vocab_size, drafter.device)
    sizes, equal, right, places = [], [], [], []
    tokens, device = token_ids.cpu(), drafter.device
    # The state of position i predicts token i + 2, after token i + 1.
    for i in range(max(0, prompt_length - 2), tokens.shape[0] - 2):
        context.extend(tokens[len(context) : i + 2])
        vocabulary = context.vocab_ids
        size = drafter.config.vocab_size if vocabulary is None else len(vocabulary)
        column = choices[i + 1 : i + 2] if vocabulary is None else (vocabulary == choices[i + 1]).nonzero()
        if column.numel():
            nothing = torch.zeros(1, size, device=device)
            equal.append(context.prefer_repetitions(nothing, context.latest())[0].round().long() - 1)
            sizes.append(size)
            right.append(int(column))
            places.append(i)
    if not right:
        return None
    # The vocabulary grew on the way: a token that came later was not scored.
    scores = context.logits(states[torch.tensor(places, device=device)])
    size = scores.shape[1]
    is_later = torch.arange(size, device=device) >= torch.tensor(sizes, device=device)[:, None]
    scores = scores.masked_fill(is_later, -torch.inf)
    counts = torch.stack([F.pad(each, (0, size - len(each)), value=-1) for each in equal])
    is_seen, columns = counts >= 0, torch.tensor(right, device=device)[:, None]
    seen = scores.masked_fill(~is_seen, -torch.inf).topk(int(is_seen.sum(dim=1).max()))
    unseen = scores.masked_fill(is_seen, -torch.inf)
    return Sample(
        unseen.logsumexp(dim=1),
        seen.values,
        counts.gather(1, seen.indices),
        scores.gather(1, columns)[:, 0],
        counts.gather(1, columns)[:, 0],
        unseen.topk(min(_CHILDREN, size)).values,
    )


def loss(sample: Sample, bonuses: Tensor) -> Tensor:
    """The sum of the negative log-likelihoods of the target's choices."""
    # Index -1 is a bonus of 0.
    gains = F.pad(bonuses, (0, 1))
    seen = (sample.seen + gains[sample.equal]).logsumexp(dim=1)
    return (torch.logaddexp(sample.unseen, seen) - sample.right - gains[sample.equal_right]).sum()


def fit(samples: Sequence[Sample], most: int) -> Tensor:
    """The bonuses of 0, 1, ... `most` equal tokens with the least loss."""
    with torch.enable_grad():
        bonuses = torch.zeros(most + 1, requires_grad=True)
        optimizer = torch.optim.Adam([bonuses], lr=_LEARNING_RATE)
        count = sum(len(sample.right) for sample in samples)
        for _ in range(_STEPS):
            optimizer.zero_grad()
            for sample in samples:
                (loss(sample, bonuses) / count).backward()
            optimizer.step()
    return bonuses.detach().clamp_min(0.0)


@torch.no_grad()
def calibration(samples: Sequence[Sample], bonuses: Tensor) -> float:
    """
    How often the target's choice is among the drafter's first choices, over the probability that the drafter gives
    these: one number of `draft_calibration`.

    Args:
        samples (sequence of [`Sample`]): of one depth, and not of the responses that the drafter was fitted to.
        bonuses (`torch.Tensor`): the bonuses.
    """
    gains, hits, expected = F.pad(bonuses, (0, 1)), _PRIOR, _PRIOR
    for sample in samples:
        seen = sample.seen + gains[sample.equal]
        total = torch.logaddexp(sample.unseen, seen.logsumexp(dim=1))
        first = torch.cat((seen, sample.best), dim=1).topk(min(_CHILDREN, seen.shape[1] + sample.best.shape[1])).values
        hits += float((sample.right + gains[sample.equal_right] >= first[:, -1]).sum())
        expected += float((first.logsumexp(dim=1) - total).exp().sum())
    return hits / expected
