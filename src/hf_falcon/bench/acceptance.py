# Copyright 2026 The hf_falcon authors. Licensed under the Apache License, Version 2.0.
"""Measures the acceptance of a drafter: by decoding prompts, and by its first choices along texts that are known."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor
from tqdm.auto import tqdm
from transformers import PreTrainedModel

from ..core.drafter import DraftModel
from ..core.interfaces import DraftedBlocks, DraftSession, drafter_acceleration
from ..core.target_parts import FeatureTap
from ..core.tree import to_device

# The inputs of `generate` for one prompt.
Inputs = dict[str, Tensor]


class Text(NamedTuple):
    """
    A prompt and what the target answered.

    Args:
        token_ids (`torch.LongTensor` of shape `(1, length)`): the prompt, followed by the answer.
        prompt_length (`int`): tokens of the prompt.
    """

    token_ids: Tensor
    prompt_length: int

    @property
    def answer(self) -> Tensor:
        """The tokens of the answer, of shape `(1, new_tokens)`."""
        return self.token_ids[:, self.prompt_length :]


@dataclass
class Acceptance:
    """
    The rounds of some prompts, summed before they are divided: a long answer weighs more than a short one.

    Args:
        of_prompts (`list[tuple[int, int]]`): rounds and accepted draft tokens of each prompt.
        new_tokens, drafted_tokens (`int`): see [`DraftStatistics`]; of all prompts.
        by_depth (`list[int]`): rounds in which a draft token of depth 1, 2, ... was accepted.
        texts (`list[Text]`): the prompts and their answers.
    """

    of_prompts: list[tuple[int, int]] = field(default_factory=list)
    new_tokens: int = 0
    drafted_tokens: int = 0
    by_depth: list[int] = field(default_factory=list)
    texts: list[Text] = field(default_factory=list)

    @property
    def rounds(self) -> int:
        """Rounds of all prompts."""
        return sum(rounds for rounds, _ in self.of_prompts)

    @property
    def accepted_tokens(self) -> int:
        """Accepted draft tokens of all prompts."""
        return sum(accepted for _, accepted in self.of_prompts)

    @property
    def tau(self) -> float:
        """Accepted draft tokens a round."""
        return self.accepted_tokens / max(1, self.rounds)

    @property
    def alpha(self) -> float:
        """Accepted draft tokens over all new tokens."""
        return self.accepted_tokens / max(1, self.new_tokens)

    @property
    def acceptance_by_depth(self) -> list[float]:
        """How often a draft token of depth 1, 2, ... was accepted in the rounds that accepted the depth before."""
        return [count / before for before, count in zip([self.rounds, *self.by_depth], self.by_depth)]

    @property
    def standard_error(self) -> float:
        """
        Standard error of tau: the larger one of two estimates. One takes rounds as independent; the other takes
        prompts as independent, as easy and hard prompts differ (ratio estimator).
        """
        rounds, tau = self.rounds, self.tau
        if rounds == 0:
            return 0.0
        # The mean square of the accepted tokens of a round, from the counts of at least 1, 2, ...
        square = sum((2 * depth - 1) * count for depth, count in enumerate(self.by_depth, start=1)) / rounds
        of_rounds = math.sqrt(max(0.0, square - tau**2) / rounds)
        prompts = len(self.of_prompts)
        if prompts < 2:
            return of_rounds
        residuals = sum((accepted - tau * count) ** 2 for count, accepted in self.of_prompts)
        return max(of_rounds, math.sqrt(prompts / (prompts - 1) * residuals) / rounds)

    @classmethod
    def total(cls, parts: Sequence[Acceptance]) -> Acceptance:
        """All prompts of several measurements together."""
        depths = max((len(part.by_depth) for part in parts), default=0)
        return cls(
            [each for part in parts for each in part.of_prompts],
            sum(part.new_tokens for part in parts),
            sum(part.drafted_tokens for part in parts),
            [sum(part.by_depth[depth] for part in parts if depth < len(part.by_depth)) for depth in range(depths)],
            [text for part in parts for text in part.texts],
        )

    def to_dict(self) -> dict[str, Any]:
        """The counts and shares as JSON values."""
        return {
            "prompts": len(self.of_prompts),
            "rounds": self.rounds,
            "drafted_tokens": self.drafted_tokens,
            "accepted_tokens": self.accepted_tokens,
            "new_tokens": self.new_tokens,
            "tokens_per_round": 1 + self.tau,
            "tau": self.tau,
            "tau_standard_error": self.standard_error,
            "alpha": self.alpha,
            "acceptance_by_depth": self.acceptance_by_depth,
        }


def decode(
    target: PreTrainedModel,
    drafter: DraftModel,
    prompts: Sequence[Inputs],
    max_new_tokens: int,
    description: str,
    **options: Any,
) -> Acceptance:
    """
    Decodes prompts, greedily unless `options` say otherwise. The result depends on the drafter and not on the speed of
    the machine: every round drafts a tree of the drafter's own size, without prompt lookup.

    Args:
        target, drafter: the models.
        prompts (sequence of `dict[str, torch.Tensor]`): the inputs of `generate`, one prompt each.
        max_new_tokens (`int`): tokens of an answer, at most.
        description (`str`): for the progress bar.
        options: further arguments of `generate`.

    Raises:
        `ValueError`: if the target is decoded plainly.
    """
    found = Acceptance()
    options = {
        "do_sample": False,
        "num_assistant_tokens_schedule": "constant",
        "prompt_lookup_num_tokens": 0,
        **options,
    }
    for inputs in tqdm(prompts, desc=description, unit="prompt", leave=False):
        output = target.generate(
            **inputs,
            assistant_model=drafter,
            max_new_tokens=max_new_tokens,
            return_dict_in_generate=True,
            **options,
        )
        statistics = output.draft_statistics
        if statistics is None:
            raise ValueError(
                f"{type(target).__name__} is decoded plainly, without the drafter, so there is no acceptance to "
                "measure: see the warning above. Give another `target`."
            )
        one = Acceptance(
            [(statistics.rounds, statistics.accepted_tokens)],
            statistics.new_tokens,
            statistics.drafted_tokens,
            statistics.accepted_by_depth,
            [Text(output.sequences, inputs["input_ids"].shape[1])],
        )
        found = Acceptance.total([found, one])
    return found


@dataclass
class FirstChoices:
    """
    The drafter's first choices along some texts.

    Args:
        hits (`list[bool]`): for each position, whether the first choice is the target's token.
        by_depth (`list[tuple[int, int]]`):
            For depth 1, 2, ... of a chain of first choices: how many are right, of how many whose chain was right so
            far.
    """

    hits: list[bool] = field(default_factory=list)
    by_depth: list[tuple[int, int]] = field(default_factory=list)

    @property
    def accuracy(self) -> float:
        """Share of the first choices that are the target's tokens."""
        return sum(self.hits) / max(1, len(self.hits))

    @property
    def accuracy_by_depth(self) -> list[float]:
        """The same for depth 1, 2, ... where all choices before are right; only depths that were seen."""
        return [right / count for right, count in self.by_depth if count]


@torch.inference_mode()
def first_choices(
    target: PreTrainedModel,
    drafter: DraftModel,
    texts: Sequence[Text],
    description: str,
    depth: int = 1,
    layers: Sequence[int] | None = None,
    before_norm: bool = False,
) -> FirstChoices:
    """
    Compares the drafter's first choices with the target's own, at every position of known answers. The texts stay the
    same whatever the drafter reads, so two ways to read the target can be compared position by position.

    Args:
        target, drafter: the models.
        texts (sequence of [`Text`]): the texts.
        description (`str`): for the progress bar.
        depth (`int`, *optional*, defaults to 1): how deep a chain of first choices is followed.
        layers (sequence of `int`, *optional*):
            Layers of the target whose outputs are read, as in [`Drafter`]; the drafter's own by default.
        before_norm (`bool`, *optional*, defaults to `False`):
            Whether the last hidden state is read before the target's final norm, and not after it.
    """
    layers = list((drafter.config.feature_layers or ()) if layers is None else layers)
    if drafter.max_draft_passes is not None:
        depth = min(depth, drafter.max_draft_passes * drafter.config.block_size)
    acceleration = drafter_acceleration(drafter, target)
    head = acceleration.head or drafter.make_head(target)
    # A drafter that reads the text alone reads all of it.
    first = 0 if drafter.config.feature_layers is None else 1
    found = FirstChoices(by_depth=[(0, 0)] * depth)
    for text in tqdm(texts, desc=description, unit="text", leave=False):
        features, choices = _read(target, text.token_ids, layers, before_norm)
        token_ids = to_device(text.token_ids, drafter.device)
        session, start, length = drafter.start_session(head, acceleration), text.prompt_length, token_ids.shape[1]
        states = session.commit(features[:, :start], token_ids[:, first : start + 1])
        for place in range(start + 1, length):
            chain = _Chain(session, head, token_ids, place)
            right = chain.follow(states, choices, min(depth, length - place))
            found.hits.append(right > 0)
            # Every depth up to the first wrong choice was tried.
            for level in range(min(right + 1, depth, length - place)):
                hits, count = found.by_depth[level]
                found.by_depth[level] = hits + (level < right), count + 1
            states = session.commit(features[:, place - 1 : place], token_ids[:, place : place + 1])
    return found


def _read(
    target: PreTrainedModel, token_ids: Tensor, layers: list[int], before_norm: bool
) -> tuple[Tensor, list[int]]:
    """The target's features of a text, and its choice of the token behind each position."""
    text_config = target.config.get_text_config(decoder=True)
    last = [text_config.num_hidden_layers - 1] if before_norm else []
    with FeatureTap(target, [*layers, *last]) as tap:
        logits = target(token_ids, use_cache=False).logits
    features = tap.take()
    if before_norm:
        width = text_config.hidden_size
        features = torch.cat((features[..., -width:], features[..., width:-width]), dim=-1)
    return features, logits[0].argmax(dim=-1).tolist()


class _Chain(NamedTuple):
    """The drafter's first choices from one position on."""

    session: DraftSession
    head: Any
    token_ids: Tensor
    place: int

    def follow(self, states: Tensor | None, choices: list[int], depth: int) -> int:
        """
        How many first choices in a row are right, up to `depth`. The first one is compared with the target's choice
        here, further ones with the text.
        """
        right, blocks = 0, torch.zeros(1, dtype=torch.long, device=self.token_ids.device)
        while states is not None:
            kept, size = [], states.shape[1]
            for offset in range(size):
                place, state = self.place + right, states[:, offset]
                if self.session.is_conditional:
                    state = self.session.condition(state, self.token_ids[0, place - 1 : place])
                choice = int(self.head.to_target_ids(self.head.logits(state).argmax(dim=-1)))
                true = choices[place - 1] if right == 0 else int(self.token_ids[0, place])
                if choice != true:
                    return right
                right += 1
                if right == depth:
                    return right
                kept.append(state)
            if right == size:
                self.session.rewind()
            end = self.place + right
            drafted = DraftedBlocks(blocks, self.token_ids[:, end - size : end], torch.stack(kept, dim=1))
            states = self.session.extend(drafted)
        return 0
