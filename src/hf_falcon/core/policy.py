# Copyright 2026 The hf_falcon authors. Licensed under the Apache License, Version 2.0.
"""
How much to draft: a fixed tree each round, or what pays (the decision model of improved MCSD; Sequoia; DDTree).

What pays: of all ways to write a text, the fastest has the most tokens for its time. With r tokens in the time of a
plain step, the best rate there is, a round is worth its expected tokens less r times its cost; what adds to that is
done. So a node is verified if its probability is more than r times what it adds to the target's time, a pass is
drafted if what it may add is more than r times its cost, and where drafting costs more than it brings nothing is
drafted for a while. Probabilities are the drafter's own, corrected by what became of them.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor
from transformers import PreTrainedModel

from .costs import CostKey, Costs
from .draft_options import DraftOptions
from .tree import Branches, DraftTree

# Share of continuations that go on right, by the length of the match, which grows with every token that was right;
# as found in the target's own responses. `(length, share)`; shares are learnt on, starting here.
_MATCHES = ((2, 0.47), (3, 0.57), (4, 0.73), (5, 0.78), (8, 0.86), (12, 0.89), (20, 0.94), (32, 0.98))
# Observations that a first guess counts for, how fast old ones are forgotten, and the least share.
_PRIOR, _KEEP, _LEAST = 8.0, 0.995, 1e-3
# The same for tokens of whole trees: a drafter that is of no use is to rest soon.
_PRIOR_OF_TREES, _KEEP_OF_TREES = 4.0, 0.95
# Weight of a new round in a running mean.
_NEW, _NEW_RATE = 0.15, 0.05
# Rounds without drafting once it does not pay: at first, and at most, doubling; and rounds of the trial after them.
_SHORTEST_PAUSE, _LONGEST_PAUSE, _TRIAL = 16, 256, 2
# Drafted rounds in a row without a second pass: what a pass brings and costs is seen where there is one only.
_LONGEST_SINGLE = 8
_ONE_ROW_AS_IT_IS = (1, False, ())
# From this probability of its first token on, a continuation tells more of a round's outcome than drafting does.
_LIKELY = 0.3


class LookupMatch(NamedTuple):
    """
    What followed when the context last ended like this.

    Args:
        token_ids (`list[int]`): the tokens that followed then; none where the context never ended like this before.
        matched (`int`): how many tokens at the end of the context were the same.
    """

    token_ids: list[int]
    matched: int


class LookupPath(NamedTuple):
    """
    A path from the root that the tree is to have: its tokens (`(length,)`) and the log-probability of each with all
    before it (`(length,)`).
    """

    token_ids: Tensor
    log_probs: Tensor

    @property
    def first(self) -> float:
        """Probability of its first token."""
        return math.exp(self.log_probs[0]) if len(self.log_probs) else 0.0


class _Share:
    """A share that is learnt from observations, from a first guess on."""

    def __init__(self, guess: float, prior: float = _PRIOR, keep: float = _KEEP):
        # In one piece: other threads read and write it.
        self._counts, self._keep = (guess * prior, prior), keep

    def observe(self, hit: float, trial: float = 1.0) -> None:
        hits, trials = self._counts
        self._counts = self._keep * hits + hit, self._keep * trials + trial

    @property
    def value(self) -> float:
        hits, trials = self._counts
        # Never near 0: logarithms are taken of this.
        return max(_LEAST, hits / trials)


class AcceptanceStats:
    """
    What the rounds of one drafter with one target taught: shares and means, never tokens. It outlives the call and is
    shared by threads: the choices that follow from it change the time that a text takes, and nothing else.
    """

    def __init__(self) -> None:
        self.matches = [_Share(share) for _, share in _MATCHES]
        # How often a child of an accepted node was right, over the probability that the drafter gave to all of them.
        self.depths: list[_Share] = []
        # Worth that a pass adds, over the probability of the paths that it continues.
        self.pass_worth = 0.5
        # That probability. The drafter's own was found to be as good as a classifier's.
        self.continued: Callable[[Branches], Tensor] = _total_probability
        # Tokens that the tree of a drafted round promises, and how many of those that were promised were right: a mean
        # of what was accepted is as noisy as few rounds are, and drafting would rest for a run of bad luck.
        self.promised, self.kept = 1.0, _Share(1.0, _PRIOR_OF_TREES, _KEEP_OF_TREES)
        # Cost of drafting them and of verifying more than the root.
        self.cost = 0.3
        # Tokens in the time of a plain step.
        self.rate = 1.2
        self.pause, self.paused_for, self.trial = _SHORTEST_PAUSE, 0, 0
        # Drafted rounds since one had a second pass.
        self.single_passes = 0
        self.costs: dict[CostKey, Costs] = {}
        # Whether the drafter was trained for the target's weights; `None` before that was looked at. It is looked at
        # once: weights that are changed later give no warning, and exact outputs as ever.
        self.is_fit: bool | None = None
        self._others: dict[tuple[int, bool, tuple[int, ...]], AcceptanceStats] = {}

    def under(self, cost_key: CostKey) -> AcceptanceStats:
        """With that many rows, and the target packed or compiled so: the same probabilities, other costs."""
        way = cost_key.rows, cost_key.packed, cost_key.compiled
        if way == _ONE_ROW_AS_IT_IS:
            return self
        known = self._others.get(way)
        if known is None:
            known = self._others[way] = AcceptanceStats()
            known.matches, known.depths, known.costs = self.matches, self.depths, self.costs
            known.continued = self.continued
        return known

    @property
    def accepted(self) -> float:
        """Tokens to be expected of a drafted round's tree."""
        return self.promised * self.kept.value

    def match(self, length: int) -> _Share:
        """Of continuations of a match of `length` tokens."""
        return self.matches[max(0, sum(length >= shortest for shortest, _ in _MATCHES) - 1)]

    def depth(self, depth: int) -> _Share:
        """Of nodes at `depth`, from 1."""
        if len(self.depths) < depth:
            self.expect([1.0] * depth)
        return self.depths[depth - 1]

    def expect(self, calibration: Sequence[float]) -> None:
        """Takes first guesses for the depths of which nothing is known yet."""
        self.depths.extend(map(_Share, calibration[len(self.depths) :]))


def _total_probability(branches: Branches) -> Tensor:
    assert branches.log_probs is not None
    return branches.log_probs.exp().sum()


_acceptance_stats: weakref.WeakKeyDictionary[
    PreTrainedModel, weakref.WeakKeyDictionary[PreTrainedModel, AcceptanceStats]
]
_acceptance_stats = weakref.WeakKeyDictionary()


def acceptance_stats_of(drafter: PreTrainedModel, target: PreTrainedModel) -> AcceptanceStats:
    """What this process has learnt of a drafter with a target."""
    return _acceptance_stats.setdefault(target, weakref.WeakKeyDictionary()).setdefault(drafter, AcceptanceStats())


@dataclass
class RoundTime:
    """
    Seconds of a round, by part; `passes` counts draft passes after the first block, `None` without any drafting.
    `commit` is `None` where it says nothing of other rounds. `nodes` counts those that the target ran.
    """

    commit: float | None = None
    drafting: float = 0.0
    passes: int | None = None
    target: float = 0.0
    nodes: int = 1


class DraftPolicy:
    """
    Drafts the tree that the options say, every round.

    Args:
        options ([`DraftOptions`]): options of the call.
        experience ([`AcceptanceStats`]): what is known of the drafter.
        device (`torch.device`): where trees are grown.
    """

    def __init__(self, options: DraftOptions, experience: AcceptanceStats, device: torch.device):
        self._options = options
        self._experience = experience
        self._device = device
        self._continuation = LookupMatch([], 0)

    def guess(self, continuation: LookupMatch) -> LookupPath:
        """Weighs a continuation that was found in the context, for this round."""
        self._continuation = continuation
        log_probs, total = [], 0.0
        for place in range(len(continuation.token_ids)):
            total += math.log(self._experience.match(continuation.matched + place).value)
            log_probs.append(total)
        tokens = torch.tensor(continuation.token_ids, dtype=torch.long, device=self._device)
        return LookupPath(tokens, torch.tensor(log_probs, device=self._device))

    def drafts(self, guess: LookupPath) -> bool:
        """Whether the drafter is to run this round."""
        return True

    def correction(self, depth: int) -> float:
        """What to add to the drafter's log-probabilities at `depth`, from 1; not above 0."""
        return 0.0

    def another_pass(self, branches: Branches, best: Tensor) -> bool:
        """
        Whether to draft another pass.

        Args:
            branches ([`Branches`]): the paths that it would continue.
            best (`torch.Tensor` of shape `(count,)`): log-probabilities of the best nodes so far, in descending order.
        """
        threshold = self._options.assistant_confidence_threshold
        if threshold <= 0 or branches.log_probs is None:
            return True
        return bool(branches.log_probs.max() >= math.log(threshold))

    def size(self, best: Tensor) -> int:
        """How many of the best nodes to verify; see `another_pass`."""
        return int(self.worth(best).argmax())

    def worth(self, best: Tensor) -> Tensor:
        """What it is worth to verify the best 0, 1, 2, ... nodes, of shape `(count + 1,)`: here, all of them."""
        return torch.arange(best.shape[0] + 1, device=best.device)

    def observe(self, tree: DraftTree, path: Tensor, emitted: list[int], accepted: int, time: RoundTime) -> None:
        """
        Learns from a round.

        Args:
            tree ([`DraftTree`]): the tree.
            path (`torch.LongTensor` of shape `(emitted,)`): its nodes that were right, the root first.
            emitted (`list[int]`): the tokens that the target wrote.
            accepted (`int`): how many of them were in the tree.
            time ([`RoundTime`]): what it took.
        """
        continuation = self._continuation
        for place, (found, true) in enumerate(zip(continuation.token_ids, emitted)):
            self._experience.match(continuation.matched + place).observe(found == true)
            if found != true:
                break


class AdaptivePolicy(DraftPolicy):
    """
    Drafts and verifies what pays.

    Args:
        costs ([`Costs`]): what a round costs here.
    """

    def __init__(self, options: DraftOptions, experience: AcceptanceStats, device: torch.device, costs: Costs):
        super().__init__(options, experience, device)
        experience.expect(options.draft_calibration)
        self._costs = costs
        self._target = costs.target(options.num_assistant_tokens)
        self._target_costs = torch.tensor(self._target, device=device)
        self._guess = LookupPath(torch.empty(0), torch.empty(0))
        # Worth of the tree before the pass that runs, and the probability of the paths that this pass continues.
        self._before: tuple[float, float] | None = None

    def guess(self, continuation: LookupMatch) -> LookupPath:
        """See [`DraftPolicy.guess`]."""
        self._guess = super().guess(continuation)
        self._before = None
        return self._guess

    def drafts(self, guess: LookupPath) -> bool:
        """See [`DraftPolicy.drafts`]."""
        known = self._experience
        cost = known.rate * known.cost
        if known.accepted > cost:
            known.pause, known.paused_for, known.trial = _SHORTEST_PAUSE, 0, 0
            return known.accepted * (1.0 - guess.first) > cost
        if known.trial > 0 and guess.first < _LIKELY:
            known.trial -= 1
            return True
        known.paused_for += 1
        if known.paused_for > known.pause:
            known.pause, known.paused_for, known.trial = min(2 * known.pause, _LONGEST_PAUSE), 0, _TRIAL
        return False

    def correction(self, depth: int) -> float:
        """See [`DraftPolicy.correction`]."""
        return math.log(min(1.0, self._experience.depth(depth).value))

    def another_pass(self, branches: Branches, best: Tensor) -> bool:
        """See [`DraftPolicy.another_pass`]."""
        if branches.log_probs is None:
            return True
        known = self._experience
        continued, worth = torch.stack((known.continued(branches), self.worth(best).max())).tolist()
        if self._before is not None:
            gained = (worth - self._before[0]) / max(self._before[1], 1e-6)
            known.pass_worth += _NEW * (min(gained, 1.0) - known.pass_worth)
        is_second = self._before is None
        self._before = worth, continued
        # Where the guess is right a pass adds nothing to it.
        pays = continued * known.pass_worth * (1.0 - self._guess.first) > known.rate * self._costs.draft_pass
        if is_second and self._guess.first < _LIKELY:
            known.single_passes = 0 if pays else known.single_passes + 1
            if known.single_passes > _LONGEST_SINGLE:
                known.single_passes, pays = 0, True
        return pays

    def worth(self, best: Tensor) -> Tensor:
        """See [`DraftPolicy.worth`]: the tokens that are to be expected beyond the root's own, less what they cost."""
        tokens = torch.nn.functional.pad(best.exp().cumsum(dim=0), (1, 0))
        return tokens - self._experience.rate * self._target_costs[: tokens.shape[0]]

    def observe(self, tree: DraftTree, path: Tensor, emitted: list[int], accepted: int, time: RoundTime) -> None:
        """See [`DraftPolicy.observe`]."""
        super().observe(tree, path, emitted, accepted, time)
        known, costs = self._experience, self._costs
        verifying = self._target[time.nodes - 1]
        costs.observe_target(verifying, time.target)
        cost = verifying
        if time.passes is not None:
            costs.observe_drafting(time.commit, time.drafting, time.passes)
            drafting = costs.commit + costs.draft_pass * time.passes
            cost += drafting
            if self._guess.first < _LIKELY:
                promised, shares = _promises(tree, path)
                if promised > 0.0:
                    known.kept.observe(accepted, promised)
                known.promised += _NEW * (promised - known.promised)
                known.cost += _NEW * (drafting + verifying - 1.0 - known.cost)
                if not self._continuation.token_ids:
                    self._observe_probabilities(shares, accepted)
        # Text that the context foretells is fast, and no measure of how fast new text may become.
        if self._guess.first < _LIKELY:
            known.rate = max(1.0, known.rate + _NEW_RATE * (len(emitted) - known.rate * cost))

    def _observe_probabilities(self, shares: list[float], accepted: int) -> None:
        """Compares, at each node that was right, the probability of all its children with what became of them."""
        for depth, share in enumerate(shares, start=1):
            if share > 0.0:
                # Back to what the drafter said, before it was corrected.
                known = self._experience.depth(depth)
                known.observe(float(depth <= accepted), share / math.exp(self.correction(depth)))


def _promises(tree: DraftTree, path: Tensor) -> tuple[float, list[float]]:
    """
    Draft tokens that are right by a dynamic tree's own probabilities, and of each node of `path` the probability of
    all its children.
    """
    if len(tree) == 1:
        return 0.0, []
    assert tree.log_probs is not None
    probs = tree.log_probs.exp()
    children = torch.zeros_like(probs).index_add_(0, tree.parents[1:], probs[1:])
    promised, *shares = torch.cat((probs[1:].sum()[None], children[path] / probs[path])).tolist()
    return promised, shares
