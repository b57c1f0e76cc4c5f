# Copyright 2026 The hf_falcon authors. Licensed under the Apache License, Version 2.0.
"""Rounds of simulated texts on simulated machines: the policy decides, a clock of the simulation measures."""

import itertools
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch

from hf_falcon.core.costs import Costs
from hf_falcon.core.draft_options import DraftOptions
from hf_falcon.core.policy import AcceptanceStats, AdaptivePolicy, DraftDecision, PassCheck, RoundOutcome, RoundTime
from hf_falcon.core.tree import DraftTree, DynamicRound, DynamicTree

PASSES, NODES, CHILDREN, WIDTH = 6, 64, 4, 4
TREE = DynamicTree(NODES, PASSES, CHILDREN, WIDTH)
OPTIONS = DraftOptions(num_assistant_tokens=NODES, num_draft_passes=PASSES, draft_width=WIDTH)


def interpolated(times: dict[int, float], nodes: int) -> float:
    """The value at `nodes`, on the straight lines between `times`."""
    sizes = sorted(times)
    upper = next(size for size in sizes if size >= nodes)
    if upper == nodes:
        return times[upper]
    lower = max(size for size in sizes if size < nodes)
    return times[lower] + (times[upper] - times[lower]) * (nodes - lower) / (upper - lower)


@dataclass
class Machine:
    """
    What a round costs, in plain steps: the target's time by draft nodes, and the drafter's by passes.

    `prior` is what the costs begin from; `ahead` says whether decisions are made before the round; `slower` is what
    all is multiplied with, `noise` the deviation of a timing's logarithm, `spikes` the share of interrupted rounds.
    """

    times: dict[int, float]
    draft_pass: float
    prior: dict[int, float]
    ahead: bool = False
    slower: float = 1.0
    noise: float = 0.0
    spikes: float = 0.0

    def cost(self, nodes: int, passes: int) -> float:
        return self.slower * (interpolated(self.times, nodes) + self.draft_pass * passes)

    def timed(self, seconds: float, draws: random.Random) -> float:
        """A timing of what takes `seconds` in the mean."""
        spike = draws.uniform(2.0, 6.0) if draws.random() < self.spikes else 1.0
        return seconds * draws.lognormvariate(0.0, self.noise) * spike


@dataclass
class Drafter:
    """
    The probability of the first choice, in easy and in hard passages, the share of the rest that the other choices
    have, and how often choices are right over their probability.
    """

    easy: float
    hard: float
    others: float
    right: float = 1.0


class Text:
    """A text of easy and hard passages, with the probabilities that a drafter gives to its tokens."""

    def __init__(self, drafter: Drafter, seed: int):
        self._drafter, self._draws, self._is_hard = drafter, random.Random(seed), False

    def next_round(self) -> None:
        if self._draws.random() < 0.1:
            self._is_hard = not self._is_hard
        self._seed = self._draws.random()

    def level(self, depth: int, rows: int) -> torch.Tensor:
        """Log-probabilities of the candidates of a level, the same whenever the round asks for it."""
        draws, found = random.Random(f"{self._seed} {depth}"), []
        for _ in range(rows):
            first = (self._drafter.hard if self._is_hard else self._drafter.easy) ** draws.uniform(0.3, 2.0)
            others = [(1.0 - first) * self._drafter.others * share for share in (0.57, 0.29, 0.14)]
            found.append(sorted((first, *others), reverse=True))
        return torch.tensor(found).log()


def grow(tree_round: DynamicRound, text: Text, decision: DraftDecision) -> None:
    """Adds the level of a pass."""
    depth, branches = tree_round.depth, tree_round.branches()
    log_probs = text.level(depth, 1 if branches is None else len(branches.rows))
    tree_round.add(log_probs + decision.correction(depth + 1), torch.arange(log_probs.numel()).view_as(log_probs))


def draft(decision: DraftDecision, text: Text) -> tuple[DraftTree, list[PassCheck], int]:
    """The tree of a round, the questions that were asked after its passes, and their number."""
    tree_round, checks = TREE.start(PASSES), []
    goes_on = decision.draft
    while goes_on:
        grow(tree_round, text, decision)
        passes = tree_round.depth
        checks.append(decision.check_pass(tree_round.paths(passes), tree_round.best()))
        if decision.passes is not None:
            goes_on = passes < decision.passes
        else:
            goes_on = passes < PASSES and (
                (decision.probe_pass and passes == 1) or checks[-1].continuation >= decision.pass_threshold
            )
    size = decision.size(tree_round.best())
    return tree_round.finish(torch.zeros(1, dtype=torch.long), size), checks, tree_round.depth


def right_path(tree: DraftTree, probs: list[float], right: float, draws: random.Random) -> list[int]:
    """A path that is right as often as the drafter says, times `right`."""
    parents, path = tree.parents.tolist(), [0]
    while True:
        children = [each for each in range(1, len(parents)) if parents[each] == path[-1]]
        point = draws.random() * probs[path[-1]]
        reached = list(itertools.accumulate(right * probs[each] for each in children))
        if not children or point >= reached[-1]:
            return path
        path.append(next(each for each, end in zip(children, reached) if point < end))


class Process:
    """
    A process that answers with one drafter.

    Args:
        machine (`Callable[[int], Machine]`): the machine after some number of tokens of this process.
        drafter ([`Drafter`]): the drafter.
        seed (`int`, *optional*, defaults to 0): of the text and the timings.
        calibration (sequence of `float`, *optional*): the drafting option `draft_calibration`.
    """

    def __init__(
        self,
        machine: Callable[[int], Machine],
        drafter: Drafter,
        seed: int = 0,
        calibration: Sequence[float] = (),
    ):
        self.machine, self.drafter = machine, drafter
        self.options = replace(OPTIONS, draft_calibration=calibration)
        self.stats, self.costs = AcceptanceStats(), Costs(machine(0).prior)
        self._text, self._draws = Text(drafter, seed + 1000), random.Random(seed)
        self._tokens = 0
        self.sizes: list[int] = []

    def answer(self, tokens: int) -> float:
        """Writes an answer. Returns the time that plain decoding takes for it over the time that it took."""
        policy = AdaptivePolicy(self.options, self.stats, self.costs, block_size=1, ahead=self.machine(0).ahead)
        plain = took = emitted = 0.0
        while emitted < tokens:
            machine = self.machine(self._tokens)
            self._text.next_round()
            decision = policy.decide()
            tree, checks, passes = draft(decision, self._text)
            # The drafter's own probabilities, before they were corrected.
            corrections = torch.tensor([0.0, *(decision.correction(depth) for depth in range(1, PASSES + 1))])
            log_probs = torch.zeros(1) if tree.log_probs is None else tree.log_probs
            probs = (log_probs - corrections.cumsum(dim=0)[tree.depths]).exp().tolist()
            path = right_path(tree, probs, self.drafter.right, self._draws)
            nodes = len(tree) - 1
            time = RoundTime(target=machine.timed(machine.cost(nodes, 0), self._draws), nodes=len(tree))
            if decision.draft:
                one = machine.slower * machine.draft_pass
                time.commit = machine.timed(one, self._draws)
                time.drafting, time.passes = machine.timed(one * (passes - 1), self._draws), passes - 1
            policy.update(RoundOutcome(decision, tree, torch.tensor(path), len(path) - 1, checks=checks, time=time))
            self.sizes.append(nodes if decision.draft else -1)
            self._tokens += len(path)
            emitted += len(path)
            plain += machine.slower * len(path)
            took += machine.cost(nodes, passes)
        return plain / took


def best_fixed_rate(machine: Machine, drafter: Drafter, rounds: int = 400) -> float:
    """Tokens in the time of a plain step with the best of all fixed numbers of passes and nodes, 0 included."""
    text = Text(drafter, seed=1)
    # By passes and nodes; the target's own token comes on top.
    tokens = torch.zeros(PASSES, NODES)
    for _ in range(rounds):
        text.next_round()
        tree_round = TREE.start(PASSES)
        for passes in range(PASSES):
            grow(tree_round, text, DraftDecision())
            probs = tree_round.best().exp()
            tokens[passes] += torch.nn.functional.pad(probs, (0, NODES - len(probs))).cumsum(dim=0)
    rates = [
        (1.0 + drafter.right * float(tokens[passes - 1, nodes - 1]) / rounds)
        * machine.slower
        / machine.cost(nodes, passes)
        for passes in range(1, PASSES + 1)
        for nodes in range(1, NODES + 1)
    ]
    return max(1.0, *rates)
