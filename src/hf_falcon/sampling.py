# Copyright 2026 The hf_falcon authors. Licensed under the Apache License, Version 2.0.
"""
Two opt-in ways to verify samples: speculative sampling, and trees with several roots (biased). Code from the Hub has
neither.
"""

from __future__ import annotations

import copy
from dataclasses import replace
from typing import Any

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
from transformers.utils import logging

from .core.candidate_generator import ContextHead, FalconCandidateGenerator
from .core.decoding import decode
from .core.draft_options import DraftOptions
from .core.draft_statistics import StatisticsRecorder
from .core.interfaces import DraftedBlocks, Drafter, RowsDecoder, register_part
from .core.target_run import TargetRun
from .core.tree import DraftTree, DynamicTree, to_device
from .core.verification import Batch, TokenSequence, verify, walk
from .static_trees import validate_paths

logger = logging.get_logger(__name__)

# These read the scores alone, and are applied to the drafter's distribution as to the target's; by exact type, as a
# subclass may differ. Processors that read the text are left out, as every node has another text: without them q fits
# p a little worse, and the output is the same.
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
        processors ([`LogitsProcessorList`]): the call's; the warpers among them warp the drafter's distribution.

    Raises:
        `ValueError`: for a tree that leaves out a draw.
    """

    def __init__(
        self,
        drafter: Drafter,
        target: PreTrainedModel,
        options: DraftOptions,
        processors: LogitsProcessorList,
    ):
        if options.draft_tree == "dynamic":
            options = replace(options, draft_tree="static")
        self._warpers = [each for each in processors if type(each) in _WARPERS]
        super().__init__(drafter, target, options)

    def _build_tree(self) -> Any:
        tree = self.options.draft_tree
        paths = [] if isinstance(tree, str) else validate_paths(tree)
        known = set(paths)
        for path in paths:
            before = (*path[:-1], path[-1] - 1)
            if path[-1] > 0 and before not in known:
                raise ValueError(
                    f"`draft_tree` has the path {path} without {before}: with `verification` 'speculative' the "
                    "children of a node are draws, and none may be left out. Add it."
                )
        return super()._build_tree()

    def _candidates(self, logits: Tensor) -> tuple[Tensor, ...]:
        """
        Draws by `logits` of shape `(..., vocabulary)`: their log-probabilities and their tokens, of shape
        `(..., max_children)`, and the distributions that they are of, of the shape of `logits`.
        """
        rows = logits.flatten(0, -2)
        # A drafter that overflows proposes nothing. Some warpers would refuse its logits.
        is_broken = ~rows.amax(dim=-1, keepdim=True).isfinite()
        rows = rows.masked_fill(is_broken, 0.0)
        for warper in self._warpers:
            rows = warper(None, rows)
        log_probs = rows.log_softmax(dim=-1).masked_fill(is_broken, -torch.inf).view_as(logits)
        # The largest of these are draws without replacement, in their order. What cannot be drawn comes last.
        noise = torch.empty_like(log_probs).exponential_().clamp_min_(torch.finfo(log_probs.dtype).tiny)
        drawn = (log_probs - noise.log()).topk(self._tree.max_children, dim=-1).indices
        return log_probs.gather(-1, drawn), self.context.to_target_ids(drawn), log_probs.exp()


def verify_speculative(
    tree: DraftTree, logits: Tensor, sequence: TokenSequence, head: ContextHead
) -> tuple[Tensor, int]:
    """
    Verifies a tree of drawn candidates: each is accepted by the ratio of probabilities.

    Args:
        tree, logits, sequence: see [`verification.verify`].
        head ([`ContextHead`]): the head whose vocabulary `tree.proposals` are distributions over.

    Returns:
        See [`verification.verify`].
    """
    tokens = tree.token_ids.tolist()
    rows = {node: row for row, node in enumerate(tree.parents[1:].unique().tolist())}

    def choose(node: int, children: list[int]) -> Tensor:
        target = sequence.process(logits[node][None])[0].softmax(dim=-1)
        if tree.proposals is None or not children:
            return _draw(target)
        proposal = torch.zeros_like(target)
        drafted = tree.proposals[rows[node]].to(target)
        proposal[slice(None) if head.vocab_ids is None else head.vocab_ids.to(target.device)] = drafted
        return accept_one(target, proposal, [tokens[child] for child in children])

    return walk(tree, sequence, choose)


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
        rest = (target - proposal).clamp(min=0)
        wanted, offered, left = torch.stack((target[token], proposal[token], rest.sum())).tolist()
        # The rest of the proposal may sum to 0, and its shares be NaN.
        if not offered > 0:
            break
        # Where nothing is left the two are equal, but for rounding.
        if left == 0 or _happens(wanted / offered):
            return to_device(torch.tensor([token], device="cpu"), target.device)
        target = rest / left
        proposal = proposal.index_fill(0, to_device(torch.tensor([token], device="cpu"), target.device), 0.0)
        proposal = proposal / proposal.sum()
    return _draw(target)


def _happens(probability: float) -> bool:
    return float(torch.rand((), device="cpu")) < probability


def _draw(probs: Tensor) -> Tensor:
    return torch.multinomial(probs[None], num_samples=1)[0]


class MultiRootCandidateGenerator(FalconCandidateGenerator):
    """
    Proposes trees with several roots. They stand one level below the last token that is certain, so the last block of
    known positions is drafted from, not committed: each root goes with the last of them.

    Args:
        drafter, target, options: see [`FalconCandidateGenerator`]; every tree is a dynamic one.
    """

    def __init__(self, drafter: Drafter, target: PreTrainedModel, options: DraftOptions):
        super().__init__(drafter, target, replace(options, draft_tree="dynamic"))

    def propose_roots(
        self, input_ids: Tensor, features: Tensor, roots: Tensor, log_probs: Tensor, max_depth: int
    ) -> DraftTree:
        """
        Drafts the trees of a round.

        Args:
            input_ids (`torch.LongTensor` of shape `(1, length)`): the sequence up to the token before the roots.
            features (`torch.Tensor` of shape `(1, block_size, ...)`): of the last known positions, not committed.
            roots (`torch.LongTensor` of shape `(roots,)`): the tokens after the last, on the host.
            log_probs (`torch.Tensor` of shape `(roots,)`): their log-probabilities; 0 for the token that was drawn.
            max_depth (`int`): tokens that a path may have at most behind its root.

        Returns:
            [`DraftTree`]: trees with roots of depth 0, each its own parent.
        """
        self._checks, self._passes = [], 0
        self._read_context(input_ids)
        tree_round = self._tree.start(max_depth + 1)
        tree_round.add(to_device(log_probs[None], self._device), to_device(roots[None], self._device))
        branches = tree_round.branches()
        if branches is not None and self._next_position is not None:
            width = branches.token_ids.shape[0]
            token_ids = input_ids[:, input_ids.shape[1] - self._block_size + 1 :]
            known = to_device(self._known(token_ids), self._device).expand(width, -1)
            self._latest = torch.cat((branches.token_ids[:, None], self._latest[:, :-1].expand(width, -1)), dim=1)
            drafted = DraftedBlocks(
                torch.zeros_like(branches.rows),
                torch.cat((known, branches.token_ids[:, None]), dim=1),
                features.to(self._device).expand(width, -1, -1),
            )
            self._decision = self.policy.decide()
            self._draft_passes(tree_round, drafted)
        tree = tree_round.finish(roots[:1])
        # Without the node above the roots, whose token is known.
        own = torch.arange(len(tree) - 1, device="cpu")
        parents = torch.where(tree.depths[1:] == 1, own, tree.parents[1:] - 1)
        return DraftTree(tree.token_ids[1:], parents, tree.depths[1:] - 1, tree.visible[1:, 1:])

    def _build_tree(self) -> DynamicTree:
        tree = super()._build_tree()
        assert isinstance(tree, DynamicTree)
        return DynamicTree(tree.num_nodes + 1, tree.max_depth + 1, tree.max_children, tree.width)


def decode_multi_root(run: TargetRun, generator: MultiRootCandidateGenerator, batch: Batch) -> StatisticsRecorder:
    """See [`decoding.decode`]; for a batch of one row."""
    statistics, [sequence] = StatisticsRecorder(), batch.rows
    # Tokens are streamed once their root is chosen.
    streamer, sequence.streamer = sequence.streamer, None
    generator.is_late = sequence.is_late
    size, streamed = generator.drafter.config.block_size, sequence.token_ids.shape[1]
    with statistics.measure("target", run.model.device):
        logits, [prompt] = run.prefill(batch.prompts)
        held = prompt.features
    sequence.emit(int(sequence.choose(logits)))
    while True:
        certain = sequence.token_ids.shape[1] - (not sequence.finished)
        if streamer is not None:
            for token in sequence.token_ids[0, streamed:certain].split(1):
                streamer.put(token)
        streamed = certain
        if sequence.finished:
            return statistics
        deepest = run.max_tree_depth()
        # The caller's criteria may let a text be longer than its configuration does.
        left = max(0, sequence.tokens_left - 1)
        limit = left if deepest is None else min(left, deepest)
        rivals, log_probs = _rivals(sequence, logits, generator.options.draft_top_k - 1 if limit > 0 else 0)
        forks = {int(fork.root): fork for fork in (sequence, *rivals)}
        with statistics.measure("drafter", generator.drafter.device):
            known, ready = sequence.token_ids[:, :-1], held.shape[1] - size
            if ready > 0:
                generator.commit(
                    held[:, :ready],
                    generator.new_tokens(known[:, : known.shape[1] - size + 1], ready),
                    run.length - held.shape[1],
                )
                held = held[:, ready:]
            tree = generator.propose_roots(known, held, torch.tensor(list(forks), device="cpu"), log_probs, limit)
        with statistics.measure("target", run.model.device):
            [scored], features = run.score([tree], [sequence.token_ids])
        best, path, accepted = sequence, tree.parents[:0], -1
        # The token that the target drew comes first, and stays where no other is followed by more.
        for root in (tree.depths == 0).nonzero()[:, 0]:
            fork = forks[int(tree.token_ids[root])]
            nodes = tree.visible[:, root].nonzero()[:, 0]
            found, count = verify(_subtree(tree, nodes), scored[to_device(nodes, scored.device)], fork)
            if count > accepted:
                best, path, accepted = fork, nodes[found], count
        run.accept([path])
        held = torch.cat((held, features[:, to_device(path, features.device)]), dim=1)
        logits = scored[int(path[-1])][None]
        vars(sequence).update(vars(best))
        statistics.add_round(len(tree) - 1, accepted)


def _rivals(sequence: TokenSequence, logits: Tensor, count: int) -> tuple[list[TokenSequence], Tensor]:
    """
    The sequence with each of the `count` likeliest other tokens instead of its newest, which `logits`, of shape
    `(1, vocab_size)`, led to; and their log-probabilities, 0 for the newest token first.
    """
    before = copy.copy(sequence)
    before.token_ids, before._input_ids = sequence.token_ids[:, :-1], sequence.input_ids[:, :-1]
    log_probs = copy.copy(before).process(logits).log_softmax(dim=-1)[0]
    log_probs = log_probs.index_fill(0, to_device(sequence.root, log_probs.device), -torch.inf)
    found, kept = [], [0.0]
    for log_prob, token in zip(*(each.tolist() for each in log_probs.topk(min(count, len(log_probs))))):
        # What the processors leave no probability is never to be written.
        if log_prob == -torch.inf:
            break
        fork = copy.copy(before)
        fork.emit(token)
        # A text that ends here has nothing behind it to be preferred for.
        if not fork.finished:
            found.append(fork)
            kept.append(log_prob)
    return found, torch.tensor(kept, device="cpu")


def _subtree(tree: DraftTree, nodes: Tensor) -> DraftTree:
    """The tree of some nodes: of one root, and all below it."""
    place = torch.zeros(len(tree), dtype=torch.long, device="cpu")
    place[nodes] = torch.arange(len(nodes), device="cpu")
    return DraftTree(
        tree.token_ids[nodes], place[tree.parents[nodes]], tree.depths[nodes], tree.visible[nodes][:, nodes]
    )


def install() -> None:
    """Registers both for every later call of this process."""
    register_part("speculative", _speculative)
    register_part("multi_root", _multi_root)


def _speculative(
    drafter: Drafter, target: PreTrainedModel, options: DraftOptions, logits_processor: LogitsProcessorList
) -> RowsDecoder:
    generator = SamplingCandidateGenerator(drafter, target, options, logits_processor)

    def verify_draws(tree: DraftTree, logits: Tensor, sequence: TokenSequence) -> tuple[Tensor, int]:
        # The head of the round: one that knows the allowed tokens takes the place of the first.
        return verify_speculative(tree, logits, sequence, generator.context)

    return lambda run, batch, drops_rows: decode(run, [generator], batch, drops_rows, verify_draws)


def _multi_root(
    drafter: Drafter, target: PreTrainedModel, options: DraftOptions, logits_processor: LogitsProcessorList
) -> RowsDecoder:
    if drafter.max_draft_passes is not None:
        raise ValueError(
            f"`verification` is 'multi_root', which drafts behind several tokens at once, but a "
            f"{type(drafter).__name__} drafts behind one token: set it to 'exact' or 'speculative'."
        )
    logger.warning_once("`verification` is 'multi_root': samples are biased, not distributed as plain decoding's.")
    roots = MultiRootCandidateGenerator(drafter, target, options)
    return lambda run, batch, drops_rows: decode_multi_root(run, roots, batch)
