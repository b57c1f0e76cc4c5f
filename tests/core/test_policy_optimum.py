# Copyright 2026 The hf_falcon authors. Licensed under the Apache License, Version 2.0.
"""
How near the policy comes to the optimum: rounds of a simulated text are played on the cost curves of a GPU and of a
CPU, and the tokens in the time of a plain step are compared with those of the best fixed tree, found by enumeration.
"""

import itertools
import random
from dataclasses import dataclass

import pytest
import torch

from hf_falcon.core.costs import Costs
from hf_falcon.core.draft_options import DraftOptions
from hf_falcon.core.policy import (
    AcceptanceStats,
    AdaptivePolicy,
    DraftDecision,
    PassCheck,
    RoundOutcome,
    RoundTime,
)
from hf_falcon.core.tree import DraftTree, DynamicRound, DynamicTree

PASSES, NODES, CHILDREN, WIDTH = 6, 64, 4, 4
TREE = DynamicTree(NODES, PASSES, CHILDREN, WIDTH)
ROUNDS = 400


@dataclass
class Machine:
    """What a round costs, in plain steps: the target's time by nodes, and the drafter's by passes."""

    seconds: dict[int, float]
    draft_pass: float
    # Decisions are made before the round.
    ahead: bool

    def cost(self, nodes: int, passes: int) -> float:
        return Costs(self.seconds).target(NODES)[nodes] + self.draft_pass * passes


MACHINES = {
    "GPU": Machine({0: 1.0, 64: 1.0}, 0.06, ahead=True),
    "small target on a GPU": Machine({0: 1.0, 64: 1.05}, 0.2, ahead=True),
    "CPU": Machine({0: 1.0, 1: 1.15, 3: 1.3, 7: 1.5, 15: 2.1, 31: 3.4, 64: 6.4}, 0.09, ahead=False),
    "CPU without vectors": Machine({0: 1.0, 1: 1.9, 64: 58.0}, 0.1, ahead=False),
}
# The probability of the drafter's first choice, in easy and in hard passages, and the share of the rest that its other
# choices have.
DRAFTERS = {
    "strong": (0.97, 0.6, 0.7),
    "fair": (0.9, 0.4, 0.7),
    "weak": (0.5, 0.15, 0.5),
    "useless": (0.02, 0.01, 0.01),
}


class Text:
    """A text of easy and hard passages, with the probabilities that a calibrated drafter gives to its tokens."""

    def __init__(self, drafter: str, seed: int):
        *self._first_choices, self._others = DRAFTERS[drafter]
        self._draws, self._is_hard = random.Random(seed), False

    def next_round(self) -> None:
        if self._draws.random() < 0.1:
            self._is_hard = not self._is_hard
        self._seed = self._draws.random()

    def level(self, depth: int, rows: int) -> torch.Tensor:
        """Log-probabilities of the candidates of a level, the same whenever the round asks for it."""
        draws = random.Random(f"{self._seed} {depth}")
        found = []
        for _ in range(rows):
            first = self._first_choices[self._is_hard] ** draws.uniform(0.3, 2.0)
            others = [(1.0 - first) * self._others * share for share in (0.57, 0.29, 0.14)]
            found.append(sorted((first, *others), reverse=True))
        return torch.tensor(found).log()


def grow(tree_round: DynamicRound, text: Text, decision: DraftDecision) -> None:
    """Adds the level of a pass."""
    depth, branches = tree_round.depth, tree_round.branches()
    log_probs = text.level(depth, 1 if branches is None else len(branches.rows))
    tree_round.add(log_probs + decision.correction(depth + 1), torch.arange(log_probs.numel()).view_as(log_probs))


def best_fixed_rate(machine: Machine, drafter: str) -> float:
    """Tokens in the time of a plain step with the best of all fixed numbers of passes and nodes, 0 included."""
    text = Text(drafter, seed=1)
    # By passes and nodes; the target's own token comes on top.
    tokens = torch.zeros(PASSES, NODES)
    for _ in range(ROUNDS):
        text.next_round()
        tree_round = TREE.start(PASSES)
        for passes in range(PASSES):
            grow(tree_round, text, DraftDecision())
            probs = tree_round.best().exp()
            tokens[passes] += torch.nn.functional.pad(probs, (0, NODES - len(probs))).cumsum(dim=0)
    rates = [
        (1.0 + float(tokens[passes - 1, nodes - 1]) / ROUNDS) / machine.cost(nodes, passes)
        for passes in range(1, PASSES + 1)
        for nodes in range(1, NODES + 1)
    ]
    return max(1.0, *rates)


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


def right_path(tree: DraftTree, probs: list[float], draws: random.Random) -> list[int]:
    """A path that is right as often as the drafter says."""
    parents, path = tree.parents.tolist(), [0]
    while True:
        children = [each for each in range(1, len(parents)) if parents[each] == path[-1]]
        point = draws.random() * probs[path[-1]]
        reached = list(itertools.accumulate(probs[each] for each in children))
        if not children or point >= reached[-1]:
            return path
        path.append(next(each for each, end in zip(children, reached) if point < end))


def rate_of_policy(machine: Machine, drafter: str) -> float:
    """Tokens in the time of a plain step with the policy, after as many rounds in which it learns."""
    options = DraftOptions(num_assistant_tokens=NODES, num_draft_passes=PASSES, draft_width=WIDTH)
    policy = AdaptivePolicy(options, AcceptanceStats(), Costs(machine.seconds), block_size=1, ahead=machine.ahead)
    text, draws = Text(drafter, seed=2), random.Random(0)
    tokens = cost = 0.0
    for number in range(2 * ROUNDS):
        text.next_round()
        decision = policy.decide()
        tree, checks, passes = draft(decision, text)
        # The drafter's own probabilities, before they were corrected.
        corrections = torch.tensor([0.0, *(decision.correction(depth) for depth in range(1, PASSES + 1))])
        log_probs = torch.zeros(1) if tree.log_probs is None else tree.log_probs
        probs = (log_probs - corrections.cumsum(dim=0)[tree.depths]).exp().tolist()
        path = right_path(tree, probs, draws)
        time = RoundTime(target=machine.cost(len(tree) - 1, 0), nodes=len(tree))
        if decision.draft:
            time.commit, time.drafting, time.passes = machine.draft_pass, machine.draft_pass * (passes - 1), passes - 1
        policy.update(RoundOutcome(decision, tree, torch.tensor(path), len(path) - 1, checks=checks, time=time))
        if number >= ROUNDS:
            tokens += sum(probs)
            cost += machine.cost(len(tree) - 1, passes)
    return tokens / cost


@pytest.mark.parametrize("drafter", DRAFTERS)
@pytest.mark.parametrize("machine", MACHINES)
def test_near_the_optimum(machine, drafter):
    """No fixed tree is more than a twentieth better. A policy that looks at each round may be better than all."""
    assert rate_of_policy(MACHINES[machine], drafter) >= 0.95 * best_fixed_rate(MACHINES[machine], drafter)


def test_what_the_optimum_is():
    """The enumeration tells machines apart: large trees where nodes are free, and none where each costs a step."""
    assert best_fixed_rate(MACHINES["GPU"], "fair") > 2.5 > best_fixed_rate(MACHINES["CPU"], "fair") > 1.5
    assert best_fixed_rate(MACHINES["CPU without vectors"], "fair") == 1.0
