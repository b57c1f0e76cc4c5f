# Copyright 2026 The hf_falcon authors. Licensed under the Apache License, Version 2.0.
"""
Speculative sampling over a tree: candidates are drawn from the drafter, without replacement, and accepted by the ratio
of the two models' probabilities (SpecInfer, arXiv 2305.09781; recursive rejection sampling, arXiv 2402.14160).

Let p be the target's distribution after a node, processed as the call wants it, and q the one that the node's
children were drawn from. The first child x is accepted with probability min(1, p(x) / q(x)). If it is not, p becomes
the positive part of p - q, normalised, q loses x, and the next child is asked. What all of them leave of p gives the
token. So every token is distributed as p, whatever q is; but it is not the one that the same seed gives without a
drafter. Which draws are nodes must not depend on what was drawn, so the tree has a fixed shape.

(A candidate that is no draw but the drafter's best token would be accepted with probability p(x), and p lose x if it
is not. All together that is one draw from p: what exact verification does.)
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor
from transformers import (
    EpsilonLogitsWarper,
    EtaLogitsWarper,
    LogitsProcessorList,
    MinPLogitsWarper,
    PreTrainedModel,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
    TypicalLogitsWarper,
)

from .candidate_generator import FalconCandidateGenerator
from .draft_options import DraftOptions
from .modeling_falcon_draft import FalconDraftModel
from .tree import DraftTree, DynamicTree, StaticTree, validate_paths
from .verification import TokenSequence, walk

# These read nothing but the scores, and shape the drafter's distribution as they do the target's. Processors that read
# the text are left out, as every node has another text: without them q is a little worse, and the output the same.
_WARPERS = (
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
    MinPLogitsWarper,
    TypicalLogitsWarper,
    EpsilonLogitsWarper,
    EtaLogitsWarper,
)


class SamplingCandidateGenerator(FalconCandidateGenerator):
    """
    Proposes trees whose nodes are drawn: the child of rank r is draw r of its parent's. A dynamic tree becomes the
    static one of as many nodes.

    Args:
        drafter, target, options: see [`FalconCandidateGenerator`].
        processors ([`LogitsProcessorList`]): those of the call; the drafter's distribution is warped by its warpers.

    Raises:
        `ValueError`: for a tree that leaves out a draw.
    """

    def __init__(
        self,
        drafter: FalconDraftModel,
        target: PreTrainedModel,
        options: DraftOptions,
        processors: LogitsProcessorList,
    ):
        if options.draft_tree == "dynamic":
            options = replace(options, draft_tree="static")
        self._warpers = [each for each in processors if isinstance(each, _WARPERS)]
        super().__init__(drafter, target, options)

    def verify(self, tree: DraftTree, logits: Tensor, sequence: TokenSequence) -> tuple[Tensor, int]:
        """See [`verify`]; accepts drawn candidates by the ratio of probabilities."""
        tokens, rows = (
            tree.token_ids.tolist(),
            {node: row for row, node in enumerate(tree.parents[1:].unique().tolist())},
        )

        def choose(node: int, children: list[int]) -> Tensor:
            target = sequence.process(logits[node][None])[0].softmax(dim=-1)
            if tree.proposals is None or not children:
                return _draw(target)
            proposal = torch.zeros_like(target)
            drafted = tree.proposals[rows[node]].to(target)
            proposal[slice(None) if self.head.vocab_ids is None else self.head.vocab_ids.to(target.device)] = drafted
            return accept_one(target, proposal, [tokens[child] for child in children])

        return walk(tree, sequence, choose)

    def _build_tree(self) -> StaticTree | DynamicTree:
        tree = self.options.draft_tree
        paths = [] if isinstance(tree, str) else validate_paths(tree)
        for path in paths:
            before = (*path[:-1], path[-1] - 1)
            if path[-1] > 0 and before not in paths:
                raise ValueError(
                    f"`draft_tree` has the path {path} without {before}: with `verification` 'speculative' the "
                    "children of a node are draws, and none may be left out. Add it."
                )
        return super()._build_tree()

    def _candidates(self, features: Tensor) -> tuple[Tensor, ...]:
        """
        Draws for features of shape `(..., hidden_size)`: their log-probabilities and their tokens, of shape
        `(..., max_children)`, and the distributions that they are of, of shape `(..., draft_vocab_size)`.
        """
        scores = self.head.logits(features).float()
        rows = scores.flatten(0, -2)
        for warper in self._warpers:
            rows = warper(None, rows)
        # A drafter that overflows proposes nothing.
        log_probs = rows.log_softmax(dim=-1).nan_to_num(nan=-torch.inf, neginf=-torch.inf).view_as(scores)
        # The largest of these are draws without replacement, in their order. What cannot be drawn comes last.
        noise = torch.empty_like(log_probs).exponential_().clamp_min_(torch.finfo(log_probs.dtype).tiny)
        drawn = (log_probs - noise.log()).topk(self._tree.max_children, dim=-1).indices
        return log_probs.gather(-1, drawn), self.head.to_target_ids(drawn), log_probs.exp()


def accept_one(target: Tensor, proposal: Tensor, candidates: list[int]) -> Tensor:
    """
    Draws from `target` by asking candidates that were drawn from `proposal`, without replacement, in their order.

    Args:
        target, proposal (`torch.Tensor` of shape `(vocab_size,)`): probabilities.
        candidates (`list[int]`): the drawn tokens; those without any probability were not, and come last.

    Returns:
        `torch.LongTensor` of shape `(1,)`: one of the candidates, or another token where none was accepted.
    """
    for token in candidates:
        wanted, offered = torch.stack((target[token], proposal[token])).tolist()
        # The sum of what is left of the proposal may be 0, and its shares not a number.
        if not offered > 0:
            break
        rest = (target - proposal).clamp(min=0)
        left = float(rest.sum())
        # Where nothing is left the two are equal, but for rounding.
        if left == 0 or _happens(wanted / offered):
            return torch.tensor([token], device=target.device)
        target = rest / left
        proposal = proposal.index_fill(0, torch.tensor([token], device=target.device), 0.0)
        proposal = proposal / proposal.sum()
    return _draw(target)


def _happens(probability: float) -> bool:
    return float(torch.rand(())) < probability


def _draw(probs: Tensor) -> Tensor:
    return torch.multinomial(probs[None], num_samples=1)[0]
