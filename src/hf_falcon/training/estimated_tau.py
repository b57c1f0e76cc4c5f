# Copyright 2026 The hf_falcon authors. Licensed under the Apache License, Version 2.0.
"""
Estimates of tau (accepted draft tokens a round) from the accuracy by depth, without decoding.

Both estimates assume that hits at different depths are independent, and include only the depths that were measured.
Real text has easy and hard passages, so hits are correlated, and decoding usually accepts more.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Sequence

# Ranks between which accuracy is measured: among the first 1, 3 and 8 choices.
TOP = (1, 3, 8)


def estimated_tau_chain(accuracy: Sequence[Sequence[float]]) -> float:
    """
    Estimated tau of a chain of the drafter's first choices: the sum over depths d of `top1_1 * ... * top1_d`, the
    probability that the first d choices are the target's.

    Args:
        accuracy (`(depths, 3)` floats): top-1, top-3 and top-8 accuracy at depth 1, 2, ...
    """
    return sum(math.prod(top1 for top1, *_ in accuracy[:depth]) for depth in range(1, len(accuracy) + 1))


def estimated_tau_tree(accuracy: Sequence[Sequence[float]], nodes: int) -> float:
    """
    Estimated tau of a tree: the sum of the `nodes` greatest products `p_1(r_1) * ... * p_d(r_d)` over all paths of
    ranks `r_1, ..., r_d` (Sequoia's optimal tree for these probabilities). `p_d(r)`, the probability that the choice
    of rank r at depth d is the target's, is top-1 for the first rank, (top-3 - top-1) / 2 for each of the next two and
    (top-8 - top-3) / 5 for each of the next five.

    Args:
        accuracy (`(depths, 3)` floats): top-1, top-3 and top-8 accuracy at depth 1, 2, ...
        nodes (`int`): node budget.
    """
    by_rank = []
    for found in accuracy:
        chances, before, ranks = [], 0.0, 0
        for hits, top in zip(found, TOP):
            chances += [(hits - before) / (top - ranks)] * (top - ranks)
            before, ranks = hits, top
        by_rank.append(chances)

    # A child is never more probable than its parent, so the most probable nodes come out of the heap in order.
    heap, tau = [(-1.0, 0)], 0.0
    for taken in range(nodes + 1):
        if not heap:
            break
        chance, depth = heapq.heappop(heap)
        # The first is the root, the target's own token.
        tau -= chance if taken else 0.0
        if depth < len(by_rank):
            for step in by_rank[depth]:
                heapq.heappush(heap, (chance * step, depth + 1))
    return tau
