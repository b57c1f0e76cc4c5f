# Copyright 2026 The hf_falcon authors. Licensed under the Apache License, Version 2.0.
"""Static trees (Falcon, section 3.4): the same nodes in every round."""

from __future__ import annotations

import heapq
import math
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from .core.draft_options import MOST_CANDIDATES, MOST_ROWS_OF_A_PASS, DraftOptions, check_product
from .core.interfaces import register_part
from .core.tree import Branches, DraftTree, ancestor_mask, collect

Path = tuple[int, ...]


def install() -> None:
    """Makes drafting take static trees."""
    register_part("static", static_tree_of)


def static_tree_of(
    options: DraftOptions, drafter: Any, draft_vocab_size: int, limits: tuple[int, int, int]
) -> StaticTree:
    """
    The tree of the option `draft_tree`.

    Args:
        options ([`DraftOptions`]): options of the call.
        drafter ([`Drafter`]): the drafter.
        draft_vocab_size (`int`): tokens that its head scores.
        limits (`tuple[int, int, int]`): the most nodes, levels and children of a node, for "static".

    Raises:
        `ValueError`: for a tree that the drafter cannot draft.
    """
    if isinstance(options.draft_tree, str):
        return checked_tree(static_paths(*limits), drafter)
    tree = checked_tree(options.draft_tree, drafter)
    block_size, most = drafter.config.block_size, drafter.max_draft_passes
    if most is not None and tree.max_depth > most * block_size:
        raise ValueError(
            f"`draft_tree` is {tree.max_depth} deep, but the drafter proposes {most * block_size} tokens a "
            "round: use paths of at most that length."
        )
    if tree.max_children > draft_vocab_size:
        raise ValueError(
            f"`draft_tree` has child rank {tree.max_children - 1}, but the drafter knows "
            f"{draft_vocab_size} tokens: use ranks below that."
        )
    return tree


def checked_tree(paths: Iterable[Sequence[int]], drafter: Any) -> StaticTree:
    """A [`StaticTree`] that a drafter can draft in a round. Raises a `ValueError` for one that is too large."""
    tree = StaticTree(paths, drafter.device)
    continued = [1, *(level.extended_ranks.shape[0] for level in tree.levels)]
    rows = {
        "nodes with children in a level of `draft_tree`": max(continued),
        "`block_size`": drafter.config.block_size,
    }
    check_product("positions drafted in a pass", MOST_ROWS_OF_A_PASS, rows)
    candidates = {"nodes with children of `draft_tree`": sum(continued), "largest rank": tree.max_children}
    check_product("candidates of a round", MOST_CANDIDATES, candidates)
    return tree


def validate_paths(paths: Iterable[Sequence[int]]) -> list[Path]:
    """
    Checks a static tree: each node a tuple of child ranks, from the root; rank 0 is the most probable child.

    Returns:
        `list[tuple[int, ...]]`: the paths, by depth, then by ranks.

    Raises:
        `ValueError`: for an empty tree, a repeated path, a negative rank, or a path without its parent.
    """
    nodes = [tuple(path) for path in paths]
    if not nodes:
        raise ValueError("`draft_tree` has no paths: give at least `[(0,)]`.")
    known = set(nodes)
    for path in nodes:
        if not path or any(isinstance(rank, bool) or not isinstance(rank, int) or rank < 0 for rank in path):
            raise ValueError(f"`draft_tree` has the path {path}: a path is one or more child ranks of at least 0.")
        if len(path) > 1 and path[:-1] not in known:
            raise ValueError(f"`draft_tree` has the path {path} without its parent {path[:-1]}: add the parent.")
    if len(known) != len(nodes):
        twice = next(path for path, count in Counter(nodes).items() if count > 1)
        raise ValueError(f"`draft_tree` has the path {twice} more than once: leave one.")
    return sorted(nodes, key=lambda path: (len(path), path))


def static_paths(num_nodes: int, max_depth: int, max_children: int) -> list[Path]:
    """
    A static tree of the nodes with the highest acceptance, if the child of rank r is accepted with probability
    0.6 / (r + 1)^1.7. Measured acceptance falls with the rank in this way; only the order of nodes matters.

    Args:
        num_nodes (`int`): nodes of the tree without the root. The tree has fewer if no more fit.
        max_depth (`int`): the largest number of levels.
        max_children (`int`): the largest number of children of one node.

    Returns:
        `list[tuple[int, ...]]`: see [`validate_paths`].
    """
    costs = [-math.log(0.6 / (rank + 1) ** 1.7) for rank in range(max_children)]
    heap: list[tuple[float, Path]] = [(costs[0], (0,))]
    chosen: list[Path] = []
    while heap and len(chosen) < num_nodes:
        cost, path = heapq.heappop(heap)
        chosen.append(path)
        rank = path[-1]
        if rank + 1 < max_children:
            heapq.heappush(heap, (cost - costs[rank] + costs[rank + 1], (*path[:-1], rank + 1)))
        if len(path) < max_depth:
            heapq.heappush(heap, (cost + costs[0], (*path, 0)))
    return validate_paths(chosen)


class StaticTree:
    """
    A fixed tree. Its mask and indices are computed once; a round with less depth uses a slice of them.

    Args:
        paths (`list[tuple[int, ...]]`): see [`validate_paths`].
        device (`torch.device`, *optional*, defaults to `"cpu"`): the drafter's device.

    Raises:
        `ValueError`: if the paths do not form a tree.
    """

    def __init__(self, paths: Iterable[Sequence[int]], device: torch.device | str = "cpu"):
        nodes = validate_paths(paths)
        self.max_depth = len(nodes[-1])
        self.max_children = 1 + max(path[-1] for path in nodes)
        index = {(): 0, **{path: i for i, path in enumerate(nodes, start=1)}}
        depths = [0] + [len(path) for path in nodes]
        self.parents = torch.tensor([0] + [index[path[:-1]] for path in nodes], device="cpu")
        self.depths = torch.tensor(depths, device="cpu")
        self.visible = ancestor_mask(self.parents, self.max_depth)
        # The number of nodes up to each depth. Nodes are sorted by depth, so a shallower tree is a prefix.
        self.nodes_to_depth = [sum(depth <= d for depth in depths) for d in range(self.max_depth + 1)]
        self.levels: list[StaticLevel] = []
        inner_nodes = {path[:-1] for path in nodes}
        extended: list[Path] = [()]
        for depth in range(1, self.max_depth + 1):
            rows = {path: row for row, path in enumerate(extended)}
            level = [path for path in nodes if len(path) == depth]
            extended = [path for path in level if path in inner_nodes]
            self.levels.append(
                StaticLevel(
                    rows=torch.tensor([rows[path[:-1]] for path in level], device="cpu"),
                    ranks=torch.tensor([path[-1] for path in level], device="cpu"),
                    extended_rows=torch.tensor([rows[path[:-1]] for path in extended], device=device),
                    extended_ranks=torch.tensor([path[-1] for path in extended], device=device),
                )
            )

    def start(self, max_depth: int) -> StaticRound:
        """A round that goes at most `max_depth` tokens deep."""
        return StaticRound(self, min(max_depth, self.max_depth))


@dataclass
class StaticLevel:
    """
    For each node of a level, the row and rank of its token among the candidates, on the host; the same for its inner
    nodes, on the drafter's device.
    """

    rows: Tensor
    ranks: Tensor
    extended_rows: Tensor
    extended_ranks: Tensor


class StaticRound:
    """One round of a [`StaticTree`]."""

    def __init__(self, tree: StaticTree, max_depth: int):
        self._tree, self._max_depth = tree, max_depth
        self._candidates: list[Tensor] = []
        self._proposals: list[Tensor] = []
        self._is_collected = False

    def add(self, log_probs: Tensor, token_ids: Tensor, *proposals: Tensor) -> None:
        """
        See [`DynamicRound.add`]. A static tree does not use probabilities. It keeps `proposals`, the distributions
        that the candidates were drawn from, of shape `(rows, draft_vocab_size)`.
        """
        self._candidates.append(token_ids)
        # The rows of all levels together are the nodes with children, in their order.
        self._proposals += proposals

    def branches(self) -> Branches | None:
        """See [`DynamicRound.branches`]."""
        depth = len(self._candidates)
        if depth in (0, self._max_depth):
            return None
        level = self._tree.levels[depth - 1]
        tokens = self._candidates[-1][level.extended_rows, level.extended_ranks]
        return Branches(level.extended_rows, tokens, depth=depth)

    def best(self, depth: int | None = None) -> Tensor:
        """See [`DynamicRound.best`]. A static tree ranks no nodes."""
        return torch.empty(0, device="cpu")

    def candidates(self) -> list[Tensor]:
        """See [`DynamicRound.candidates`]."""
        return [] if self._is_collected else self._candidates

    def take(self, candidates: list[Tensor]) -> None:
        """See [`DynamicRound.take`]."""
        if not self._is_collected:
            self._candidates, self._is_collected = candidates, True

    def finish(self, root: Tensor, size: int | None = None) -> DraftTree:
        """See [`DynamicRound.finish`]. The size of a static tree is fixed."""
        collect([self])
        tree = self._tree
        nodes = tree.nodes_to_depth[len(self._candidates)]
        levels = [each[level.rows, level.ranks] for each, level in zip(self._candidates, tree.levels)]
        proposals = torch.cat(self._proposals) if self._proposals else None
        return DraftTree(
            torch.cat([root, *levels]),
            tree.parents[:nodes],
            tree.depths[:nodes],
            tree.visible[:nodes, :nodes],
            proposals=proposals,
        )
