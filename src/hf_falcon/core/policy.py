# Copyright 2026 The hf_falcon authors. Licensed under the Apache License, Version 2.0.
"""
How much a round drafts: a fixed tree, or what pays (the decision model of improved MCSD; Sequoia; DDTree).

The fastest way to write a text emits the most tokens per unit of time. Let r be the number of tokens that decoding
emits in the time of a plain step. A round then gains its expected tokens minus r times its cost, and whatever adds to
this gain is done: a node is verified if its probability exceeds r times its share of the target's time, a pass is
drafted if the gain that it may add exceeds r times its cost, and drafting pauses while it costs more than it gains.
Probabilities are the drafter's own, calibrated by the outcomes of earlier rounds.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor
from transformers import PreTrainedModel

from .costs import CostKey, Costs
from .draft_options import DraftOptions
from .tree import Branches, DraftTree

# Observations that an initial share counts for, the factor by which old observations count less, and the least share.
_PRIOR, _DECAY, _LEAST = 8.0, 0.995, 1e-3
# The same for the accepted share of whole trees: drafting with a useless drafter is to pause soon. With a calibrated
# one, whose probabilities were compared with its target's choices, bad luck proves little.
_PRIOR_OF_TREES, _PRIOR_OF_CALIBRATED, _DECAY_OF_TREES = 1.0, 4.0, 0.95
# Weight of a new round in a running mean.
_NEW, _NEW_RATE = 0.15, 0.05
# Tokens that drafting may lose before it pauses, and that a plain step adds to them: a dearer probe is rarer.
_CREDIT, _PROBE_SHARE = 0.3, 0.01
# The share of an unknown drafter's tokens that counts as right, and tokens that drafting begins for in any case.
_TYPICAL_SHARE, _ENOUGH_TOKENS = 0.65, 64
# Drafted rounds in a row without a second pass: the gain and the cost of a pass are observed only where one runs.
_LONGEST_SINGLE = 8
# From this probability on, a looked-up token decides a round's outcome more than drafting does.
_LIKELY = 0.3
# Nodes that a tree may have before any tree was timed.
_FIRST_NODES = 5


class Share:
    """
    A share that is estimated from observations, which count less the older they are.

    Args:
        initial (`float`): the share before any observation.
        prior (`float`, *optional*, defaults to 8): observations that `initial` counts for.
        decay (`float`, *optional*, defaults to 0.995): factor on the weight of all earlier observations.
    """

    def __init__(self, initial: float, prior: float = _PRIOR, decay: float = _DECAY):
        # One tuple: other threads read and write it.
        self._counts, self._decay = (initial * prior, prior), decay

    def observe(self, hits: float, trials: float = 1.0) -> None:
        """Adds `hits` out of `trials`."""
        known_hits, known_trials = self._counts
        self._counts = self._decay * known_hits + hits, self._decay * known_trials + trials

    @property
    def value(self) -> float:
        """The estimate; never near 0, as its logarithm is taken."""
        hits, trials = self._counts
        return max(_LEAST, hits / trials)


class AcceptanceStats:
    """
    What the rounds of one drafter with one target have shown: shares and means, never tokens. They outlive the call,
    and threads share them: decisions that follow from them change the time that a text takes, and nothing else.
    """

    def __init__(self) -> None:
        # How often a child of an accepted node was right, over the probability that the drafter gave to all of them.
        self.depths: list[Share] = []
        # Gain that a pass adds, over the probability of the paths that it continues.
        self.pass_gain = 0.5
        # Gives that probability. The drafter's own was found to be as good as a classifier's.
        self.continuation: Callable[[Branches], Tensor] = total_probability
        # Expected accepted tokens of a drafted round's tree, and the share of them that was accepted: a mean of
        # accepted tokens alone is as noisy as few rounds are, and would pause drafting after a run of bad luck.
        self.expected_tokens, self.accepted_share = 0.0, Share(1.0, _PRIOR_OF_TREES, _DECAY_OF_TREES)
        # Cost of drafting them and of verifying more than the root, in plain steps.
        self.cost = 0.0
        # Drafted rounds that these means are of.
        self.drafted_rounds = 0
        # Tokens in the time of a plain step; at first a modest drafter's: trees that are too large cost most.
        self.rate = 1.2
        # Tokens that drafting may lose before it pauses.
        self.credit = _CREDIT
        # Means of the probability that a further pass continues a right path, after 1, 2, ... passes.
        self.continuations: list[float] = []
        # Drafted rounds since one had a second pass.
        self.single_passes = 0
        self.costs: dict[CostKey, Costs] = {}
        # Whether the target's weights were compared with those that the drafter was trained for: the first call does.
        self.is_compared = False
        self._others: dict[tuple[int, bool, tuple[int, ...]], AcceptanceStats] = {}

    def under(self, key: CostKey) -> AcceptanceStats:
        """The statistics for this batch size and these packed or compiled weights: same probabilities, other costs."""
        way = key.rows, key.packed, key.compiled
        if way == (1, False, ()):
            return self
        known = self._others.get(way)
        if known is None:
            known = self._others[way] = AcceptanceStats()
            known.depths, known.costs, known.continuation = self.depths, self.costs, self.continuation
        return known

    @property
    def accepted_tokens(self) -> float:
        """Draft tokens that a drafted round is expected to have accepted."""
        return self.expected_tokens * self.accepted_share.value

    def depth(self, depth: int) -> Share:
        """The calibration of nodes at `depth`, from 1."""
        if len(self.depths) < depth:
            missing = depth - len(self.depths)
            self.depths.extend(Share(1.0, _PRIOR_OF_TREES) for _ in range(missing))
        return self.depths[depth - 1]

    def continuation_after(self, passes: int) -> float:
        """The mean of what was observed after `passes` passes, from 1. Before any observation a pass is tried."""
        return self.continuations[passes - 1] if passes <= len(self.continuations) else 1.0

    def observe_continuation(self, passes: int, probability: float) -> None:
        """Takes the probability after `passes` passes that a further one continues a right path."""
        if passes > len(self.continuations):
            self.continuations.append(probability)
        self.continuations[passes - 1] += _NEW * (probability - self.continuations[passes - 1])

    def start_from(self, calibration: Sequence[float]) -> None:
        """Sets the calibration of the depths that have no observation yet, and trusts it until trees were drafted."""
        self.depths.extend(map(Share, calibration[len(self.depths) :]))
        if calibration and self.drafted_rounds == 0:
            self.accepted_share = Share(1.0, _PRIOR_OF_CALIBRATED, _DECAY_OF_TREES)


def total_probability(branches: Branches) -> Tensor:
    """Probability that one of some paths is right."""
    assert branches.log_probs is not None
    return branches.log_probs.exp().sum()


def likeliest_path(branches: Branches) -> Tensor:
    """Probability of the most probable of some paths."""
    assert branches.log_probs is not None
    return branches.log_probs.max().exp()


_acceptance_stats: weakref.WeakKeyDictionary[
    PreTrainedModel, weakref.WeakKeyDictionary[PreTrainedModel, AcceptanceStats]
] = weakref.WeakKeyDictionary()


def acceptance_stats_of(drafter: PreTrainedModel, target: PreTrainedModel) -> AcceptanceStats:
    """The statistics that this process has of a drafter with a target."""
    return _acceptance_stats.setdefault(target, weakref.WeakKeyDictionary()).setdefault(drafter, AcceptanceStats())


@dataclass(frozen=True)
class DraftDecision:
    """
    What one round drafts and verifies. The policy makes it before the round; nothing is asked of the policy meanwhile.

    Args:
        draft (`bool`): whether the drafter runs.
        likely (`float`):
            Probability of the most probable token that was looked up. With 0 no looked-up token joins the tree.
        calibration (`tuple[float, ...]`):
            What is added to the drafter's log-probabilities at depth 1, 2, ...; nothing beyond.
        pass_threshold (`float`): a further pass is drafted if `continuation` is at least this.
        continuation (`Callable[[Branches], torch.Tensor]`): the probability that a further pass continues a right
        path.
        probe_pass (`bool`): whether a second pass is drafted whatever `continuation` is, to observe its gain.
        passes (`int`, *optional*): how many passes are drafted, the first included; `None` decides after each pass.
        node_costs (`torch.Tensor` of shape `(nodes + 1,)`, *optional*):
            What verifying 0, 1, 2, ... draft nodes costs, in tokens. `None` verifies all nodes.
    """

    draft: bool = True
    likely: float = 0.0
    calibration: tuple[float, ...] = ()
    pass_threshold: float = 0.0
    continuation: Callable[[Branches], Tensor] = likeliest_path
    probe_pass: bool = False
    passes: int | None = None
    node_costs: Tensor | None = None

    def correction(self, depth: int) -> float:
        """What is added to the drafter's log-probabilities at `depth`, from 1; not above 0."""
        return self.calibration[depth - 1] if depth <= len(self.calibration) else 0.0

    def expected_gain(self, log_probs: Tensor) -> Tensor:
        """
        The gain of verifying the best 0, 1, 2, ... nodes, in tokens.

        Args:
            log_probs (`torch.Tensor` of shape `(count,)`):
                Log-probabilities of the most probable nodes, in descending order; `-inf` for a node that is padding.

        Returns:
            `torch.Tensor` of shape `(count + 1,)`.
        """
        probs = log_probs.exp() if self.node_costs is not None else (log_probs > -torch.inf).float()
        gain = torch.nn.functional.pad(probs.cumsum(dim=0), (1, 0))
        return gain if self.node_costs is None else gain - self.node_costs[: gain.shape[0]]

    def size(self, log_probs: Tensor) -> int:
        """How many of the best nodes are verified; see `expected_gain`."""
        if self.node_costs is None:
            return log_probs.shape[0]
        return int(self.expected_gain(log_probs).argmax())

    def check_pass(self, branches: Branches, log_probs: Tensor) -> PassCheck:
        """
        Looks at the tree after a pass.

        Args:
            branches ([`Branches`]): the paths that a further pass would continue.
            log_probs (`torch.Tensor` of shape `(count,)`): see `expected_gain`.
        """
        if branches.log_probs is None:
            return PassCheck(math.inf, 0.0)
        if self.node_costs is None:
            # A constant policy that always drafts on need not look.
            return PassCheck(float(self.continuation(branches)) if self.pass_threshold > 0 else math.inf, 0.0)
        return PassCheck(*torch.stack((self.continuation(branches), self.expected_gain(log_probs).max())).tolist())


@dataclass(frozen=True)
class PassCheck:
    """
    The tree after a pass.

    Args:
        continuation (`float`): probability that a further pass would continue a right path.
        gain (`float`): greatest expected gain of the nodes so far, in tokens.
    """

    continuation: float
    gain: float


@dataclass
class RoundTime:
    """
    Seconds of a round, by part.

    Args:
        commit (`float`, *optional*): of the commit and the first block; `None` where it says nothing of other rounds.
        drafting (`float`, *optional*): of the passes after these; `None` where the device was not done yet.
        passes (`int`, *optional*): how many these are; `None` without any drafting.
        target (`float`, *optional*): of the target's forward; `None` where the device was not done yet.
        nodes (`int`): nodes that the target ran.
        reading (`float`): of a commit of a prompt, or of what a pause left.
        is_first (`bool`): whether that was the first commit, of the prompt.
    """

    commit: float | None = None
    drafting: float | None = None
    passes: int | None = None
    target: float | None = None
    nodes: int = 1
    reading: float = 0.0
    is_first: bool = False


@dataclass
class RoundOutcome:
    """
    What became of a round.

    Args:
        decision ([`DraftDecision`]): the policy's decision.
        tree ([`DraftTree`]): the tree that was verified.
        path (`torch.LongTensor` of shape `(emitted,)`): its nodes that were right, the root first.
        accepted (`int`): emitted tokens that were draft tokens.
        checks (`list[PassCheck]`): the tree after each pass that could be followed by another.
        time ([`RoundTime`]): what the round took.
    """

    decision: DraftDecision
    tree: DraftTree
    path: Tensor
    accepted: int
    checks: list[PassCheck] = field(default_factory=list)
    time: RoundTime = field(default_factory=RoundTime)


class DraftPolicy:
    """
    Drafts the tree that the options describe, every round.

    Args:
        options ([`DraftOptions`]): options of the call.
        stats ([`AcceptanceStats`]): statistics of the drafter.
        ahead (`bool`, *optional*, defaults to `False`):
            Whether the number of passes is decided before the round, and not after each pass. On an accelerator the
            question would wait for the device.
    """

    def __init__(self, options: DraftOptions, stats: AcceptanceStats, ahead: bool = False):
        self._options = options
        self._stats = stats
        self._ahead = ahead

    @property
    def most_nodes(self) -> int:
        """Draft nodes that are verified, at most."""
        return self._options.num_assistant_tokens

    def begins(self, max_depth: int) -> bool:
        """Whether the drafter reads the prompt, to draft for `max_depth` more tokens at most."""
        return True

    def decide(self, likely: float = 0.0) -> DraftDecision:
        """
        Decides what the next round drafts and verifies.

        Args:
            likely (`float`, *optional*, defaults to 0): probability of the most probable token that was looked up.
        """
        return DraftDecision(
            likely=likely,
            pass_threshold=self._options.assistant_confidence_threshold,
            passes=self._options.num_draft_passes if self._ahead else None,
        )

    def update(self, outcome: RoundOutcome) -> None:
        """Takes a round's outcome. The options alone decide here, so nothing is learnt from it."""


class PlainPolicy(DraftPolicy):
    """Drafts nothing: for calls that are too short to draft."""

    def decide(self, likely: float = 0.0) -> DraftDecision:
        """See [`DraftPolicy.decide`]."""
        return DraftDecision(draft=False)


class AdaptivePolicy(DraftPolicy):
    """
    Drafts and verifies what pays.

    Args:
        options, stats, ahead: see [`DraftPolicy`].
        costs ([`Costs`]): what a round costs here.
        block_size (`int`): tokens of a draft pass.
        most_deferred (`int`, *optional*, defaults to 0): tokens that the target may run again in a round.
    """

    def __init__(
        self,
        options: DraftOptions,
        stats: AcceptanceStats,
        costs: Costs,
        block_size: int,
        ahead: bool = False,
        most_deferred: int = 0,
    ):
        super().__init__(options, stats, ahead)
        stats.start_from(options.draft_calibration)
        self._costs = costs
        self._max_depth = options.num_draft_passes * block_size
        self._most_nodes = options.num_assistant_tokens + most_deferred
        self._version = -1
        # What reading prompts for probes cost, in tokens. Later calls pay for it, not more probes in this one.
        self._spent = 0.0
        self._read_costs()

    def begins(self, max_depth: int) -> bool:
        """See [`DraftPolicy.begins`]; not if drafting would gain less than reading the prompt costs."""
        # The tokens of a round with 0, 1, 2, ... nodes, in a chain.
        tokens = (1.0 - _TYPICAL_SHARE ** torch.arange(1, self._most_nodes + 2, device="cpu")) / (1.0 - _TYPICAL_SHARE)
        rates = tokens / (self._target_times + self._costs.commit + self._costs.draft_pass)
        rate = max(float(rates.max()), self._stats.rate if self._stats.drafted_rounds > 0 else 1.0)
        return max_depth >= _ENOUGH_TOKENS or max_depth * (1.0 - 1.0 / rate) > self._costs.prompt

    def _read_costs(self) -> None:
        """Takes the target's time for 0, 1, 2, ... draft nodes or deferred tokens, in plain steps."""
        if self._version != self._costs.version:
            self._version = self._costs.version
            self._target_times = torch.tensor(self._costs.target(self._most_nodes), device="cpu")

    def decide(self, likely: float = 0.0) -> DraftDecision:
        """See [`DraftPolicy.decide`]."""
        stats = self._stats
        if self._costs.steps_due and likely < _LIKELY:
            return DraftDecision(draft=False, node_costs=torch.zeros(1, device="cpu"))
        self._read_costs()
        # Where what was looked up is right a pass adds nothing to it.
        gain = stats.pass_gain * (1.0 - likely)
        # The first round of an unknown drafter has one pass: passes may be dear, and the drafter useless.
        is_known = stats.drafted_rounds > 0
        threshold = stats.rate * self._costs.draft_pass / gain if gain > 0 and is_known else math.inf
        probe_pass = is_known and stats.single_passes >= _LONGEST_SINGLE and likely < _LIKELY
        return DraftDecision(
            draft=self._should_draft(likely),
            likely=likely,
            calibration=tuple(math.log(min(1.0, stats.depth(depth).value)) for depth in range(1, self._max_depth + 1)),
            pass_threshold=threshold,
            continuation=stats.continuation,
            probe_pass=probe_pass,
            passes=self._passes_ahead(threshold, 2 if probe_pass else 1) if self._ahead else None,
            node_costs=self._node_costs(),
        )

    @property
    def most_nodes(self) -> int:
        """At most about twice as many as in a tree that was timed: costs may rise steeply."""
        return 2 * self._costs.largest + _FIRST_NODES - 1

    def _node_costs(self) -> Tensor:
        """In tokens."""
        costs = self._stats.rate * self._target_times
        costs[self.most_nodes + 1 :] = math.inf
        return costs

    def _passes_ahead(self, threshold: float, least: int) -> int:
        """The number of passes, by the mean of what earlier rounds showed after each pass."""
        passes, most = 1, self._options.num_draft_passes
        while passes < most and self._stats.continuation_after(passes) >= threshold:
            passes += 1
        return min(max(passes, least), most)

    def _should_draft(self, likely: float) -> bool:
        """Whether drafting pays, or is probed; `likely` as in [`DraftDecision`]."""
        stats = self._stats
        cost = stats.rate * stats.cost
        if stats.accepted_tokens > cost:
            return stats.accepted_tokens * (1.0 - likely) > cost
        return stats.credit + self._spent > 0.0 and likely < _LIKELY

    def update(self, outcome: RoundOutcome) -> None:
        """See [`DraftPolicy.update`]."""
        stats, costs, time, decision = self._stats, self._costs, outcome.time, outcome.decision
        # Where the context foretells the text, the outcome says little of the drafter and of text that is new.
        is_new_text = decision.likely < _LIKELY
        if time.target is not None:
            costs.observe_target(time.nodes, time.target)
            self._read_costs()
        cost = verifying = float(self._target_times[time.nodes - 1])
        if time.passes is not None:
            if time.drafting is not None:
                costs.observe_drafting(time.commit, time.drafting, time.passes)
            drafting = costs.commit + costs.draft_pass * time.passes
            cost += drafting
            if time.is_first and time.reading > 0.0:
                costs.observe_prompt(time.reading)
            if stats.drafted_rounds > 0 and stats.accepted_tokens <= stats.rate * stats.cost:
                spent = stats.rate * costs.plain_steps(time.reading)
                stats.credit, self._spent = stats.credit - spent, self._spent + spent * time.is_first
            self._update_passes(outcome, is_new_text)
            if is_new_text:
                expected, shares = _expected_tokens(outcome.tree, outcome.path)
                if expected > 0.0:
                    stats.accepted_share.observe(outcome.accepted, expected)
                stats.drafted_rounds += 1
                new, extra = max(_NEW, 1.0 / stats.drafted_rounds), drafting + verifying - 1.0
                stats.expected_tokens += new * (expected - stats.expected_tokens)
                stats.cost += new * (extra - stats.cost)
                gain = expected * stats.accepted_share.value - stats.rate * extra
                stats.credit = min(_CREDIT, stats.credit + gain)
                if decision.likely == 0.0:
                    self._update_calibration(shares, outcome)
        elif is_new_text:
            stats.credit = min(_CREDIT, stats.credit + _PROBE_SHARE)
        if is_new_text:
            stats.rate = max(1.0, stats.rate + _NEW_RATE * (outcome.path.shape[0] - stats.rate * cost))

    def _update_passes(self, outcome: RoundOutcome, is_new_text: bool) -> None:
        """Updates the gain of a pass from each pass that another one followed."""
        stats, decision = self._stats, outcome.decision
        # A drafter may overflow: a mean would stay NaN.
        checks = [check for check in outcome.checks if not math.isnan(check.continuation + check.gain)]
        for before, after in zip(checks, checks[1:]):
            gained = (after.gain - before.gain) / max(before.continuation, 1e-6)
            stats.pass_gain += _NEW * (min(gained, 1.0) - stats.pass_gain)
        for passes, check in enumerate(checks, start=1):
            stats.observe_continuation(passes, check.continuation)
        if checks and is_new_text:
            has_second = decision.probe_pass or checks[0].continuation >= decision.pass_threshold
            if decision.passes is not None:
                has_second = decision.passes > 1
            stats.single_passes = 0 if has_second else stats.single_passes + 1

    def _update_calibration(self, shares: list[float], outcome: RoundOutcome) -> None:
        """Compares, at each right node, the probability of all its children with the outcome."""
        for depth, share in enumerate(shares, start=1):
            if share > 0.0:
                # The drafter's own probability, before it was corrected.
                own = share / math.exp(outcome.decision.correction(depth))
                self._stats.depth(depth).observe(float(depth <= outcome.accepted), own)


def _expected_tokens(tree: DraftTree, path: Tensor) -> tuple[float, list[float]]:
    """
    The expected accepted tokens of a dynamic tree by its own probabilities, and for each node of `path` the
    probability of all its children.
    """
    if len(tree) == 1:
        return 0.0, []
    assert tree.log_probs is not None
    probs = tree.log_probs.exp()
    children = torch.zeros_like(probs).index_add_(0, tree.parents[1:], probs[1:])
    expected, *shares = torch.cat((probs[1:].sum()[None], children[path] / probs[path])).tolist()
    return expected, shares
