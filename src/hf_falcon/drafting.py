# Copyright 2026 The hf_falcon authors. Licensed under the Apache License, Version 2.0.
"""The drafting of one sequence, round by round: the drafter and the context propose, the pace says how much."""

from __future__ import annotations

import torch
from torch import Tensor

from .candidate_generator import FalconCandidateGenerator
from .costs import Stopwatch
from .pace import Pace, RoundTime
from .retrieval import ContextIndex
from .tree import DraftTree, DynamicRound, StaticRound
from .verification import TokenSequence

# Positions that a round adds, or little more.
_ROWS_OF_A_ROUND = 16


class Drafting:
    """
    The drafting of one sequence.

    Args:
        generator ([`FalconCandidateGenerator`]): the sequence's own.
        sequence ([`TokenSequence`]): the sequence, prompt and first new token.
        features (`torch.Tensor` of shape `(1, positions, ...)`):
            The target's features of the last `positions` tokens but that new one.
        first_position (`int`): position of the first of them.
        pace ([`Pace`]): says how much is drafted.
        padding (`int`, *optional*, defaults to 0): tokens at the start of the sequence that are no text.
        prompt_embeds (`torch.Tensor`, *optional*): see [`FalconCandidateGenerator.commit`].
    """

    def __init__(
        self,
        generator: FalconCandidateGenerator,
        sequence: TokenSequence,
        features: Tensor,
        first_position: int,
        pace: Pace,
        padding: int = 0,
        prompt_embeds: Tensor | None = None,
    ):
        self.generator = generator
        self.sequence = sequence
        self.pace = pace
        self._first_position = first_position
        self._padding = padding
        self._prompt_embeds = prompt_embeds
        self._index = ContextIndex()
        options = generator.options
        self._lookup = options.prompt_lookup_num_tokens if options.draft_tree == "dynamic" else 0
        # Features of the newest positions but one that the drafter has not seen; each goes with the token one step
        # ahead.
        self._unseen = [features]
        self._time = RoundTime()

    def propose(self, limit: int) -> DraftTree:
        """Drafts the tree of a round; see [`Drafting.draft`]."""
        return self.draft(limit).finish(self.root, self.pace.size)

    @property
    def root(self) -> Tensor:
        """The newest token, where the drafter is."""
        return self.sequence.root.to(self.generator.drafter.device)

    def draft(self, limit: int, share: int = 1) -> StaticRound | DynamicRound:
        """
        Drafts for a round, whose tree is still to be cut to a size.

        Args:
            limit (`int`): tokens that a path may have at most.
            share (`int`, *optional*, defaults to 1): sequences that draft one after the other in this round.
        """
        ids, generator, pace = self.sequence.input_ids, self.generator, self.pace
        if self._lookup:
            self._index.extend(ids[0, self._padding + len(self._index) :].tolist())
        guess = pace.guess(self._index.continuation(min(self._lookup, limit)))
        drafts, watch, self._time = limit > 0 and pace.drafts(guess), Stopwatch(), RoundTime()
        if drafts:
            new = sum(each.shape[1] for each in self._unseen)
            unseen = torch.cat(self._unseen, dim=1)
            generator.commit(unseen, ids[:, -new:], self._first_position, self._prompt_embeds)
            self._unseen = []
            seconds = watch.lap() * share
            # Many positions at once, the prompt or what a pause left, are no round's share.
            self._time.commit = seconds if new <= _ROWS_OF_A_ROUND else None
        tree_round = generator.draft(self.root, limit, pace, guess, drafts)
        self._time.drafting, self._time.passes = watch.lap() * share, generator.passes if drafts else None
        return tree_round

    def learn(
        self, tree: DraftTree, path: Tensor, accepted: int, features: Tensor, seconds: float, nodes: int | None = None
    ) -> None:
        """
        Takes what became of a tree.

        Args:
            tree ([`DraftTree`]): the tree.
            path (`torch.LongTensor` of shape `(emitted,)`): its nodes that were right, the root first.
            accepted (`int`): how many emitted tokens it had.
            features (`torch.Tensor` of shape `(1, emitted, ...)`): features of these nodes.
            seconds (`float`): what the target took.
            nodes (`int`, *optional*): nodes that it ran for the sequence; those of the tree if left out.
        """
        self._unseen.append(features)
        emitted = self.sequence.input_ids[0, self.sequence.input_ids.shape[1] - path.shape[0] :].tolist()
        self._time.target, self._time.nodes = seconds, nodes or len(tree)
        self.pace.observe(tree, path, emitted, accepted, self._time)
