# Copyright 2026 The hf_falcon authors. Licensed under the Apache License, Version 2.0.
"""
Trees of draft tokens: fixed ones (Falcon, section 3.4) and best-first ones with a node budget (EAGLE-2, DDTree).

A tree grows by draft passes. A pass drafts blocks; a block gives one distribution for each of its `block_size` depths,
so all nodes of one depth of a block have their children from the same candidates. Both kinds of tree answer one
protocol: `start()` gives a round; `round.add` takes the candidates of a pass; `round.branches` says which paths the
next pass extends; `round.finish` gives the [`DraftTree`] to verify.
"""

from __future__ import annotations

import heapq
import itertools
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

Path = tuple[int, ...]


@dataclass
class DraftTree:
    """
    A tree of draft tokens in topological order. Node 0 is the root: the newest token, which the target itself chose.

    Args:
        token_ids (`torch.LongTensor` of shape `(nodes,)`): token of each node, in the target's vocabulary.
        parents (`torch.LongTensor` of shape `(nodes,)`): parent of each node; the root is its own.
        depths (`torch.LongTensor` of shape `(nodes,)`): distance from the root.
        visible (`torch.BoolTensor` of shape `(nodes, nodes)`): `True` where the row's node has the column's node as
            ancestor, or is it.
    """

    token_ids: Tensor
    parents: Tensor
    depths: Tensor
    visible: Tensor

    def __len__(self) -> int:
        return self.token_ids.shape[0]


@dataclass
class Branches:
    """
    Paths that the next draft pass extends.

    Args:
        blocks (`torch.LongTensor` of shape `(width,)`): the block of the pass before that each path runs through.
        token_ids (`torch.LongTensor` of shape `(width, block_size)`): its tokens in that block.
        log_probs (`torch.Tensor` of shape `(width,)`, *optional*): log-probability of each whole path.
    """

    blocks: Tensor
    token_ids: Tensor
    log_probs: Tensor | None = None


def ancestor_mask(parents: Tensor, depth: int) -> Tensor:
    """
    Who is an ancestor of whom: as many steps as the tree is deep, whatever the number of nodes.

    Args:
        parents (`torch.LongTensor` of shape `(nodes,)`): parent of each node; the root is its own.
        depth (`int`): greatest depth of a node.

    Returns:
        `torch.BoolTensor` of shape `(nodes, nodes)`: see [`DraftTree`].
    """
    nodes = torch.arange(parents.shape[0], device=parents.device)
    visible = torch.zeros(parents.shape[0], parents.shape[0], dtype=torch.bool, device=parents.device)
    ancestors = nodes
    for _ in range(depth + 1):
        visible[nodes, ancestors] = True
        ancestors = parents[ancestors]
    return visible


def single_node(root: Tensor) -> DraftTree:
    """The tree of the root alone, of shape `(1,)`: a step of plain decoding."""
    zero = torch.zeros(1, dtype=torch.long, device=root.device)
    return DraftTree(root, zero, zero, torch.ones(1, 1, dtype=torch.bool, device=root.device))


def validate_paths(paths: Iterable[Sequence[int]]) -> list[Path]:
    """
    Checks a static tree: each node a tuple of child ranks, from the root; rank 0 is the most probable child.

    Returns:
        `list[tuple[int, ...]]`: the paths, by depth, then by ranks.

    Raises:
        `ValueError`: for an empty tree, a path that stands twice, a negative rank, or a path without its parent.
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
        twice = next(path for path in nodes if nodes.count(path) > 1)
        raise ValueError(f"`draft_tree` has the path {twice} more than once: leave one.")
    return sorted(nodes, key=lambda path: (len(path), path))


def static_paths(num_nodes: int, max_depth: int, max_children: int) -> list[Path]:
    """
    A static tree: the `num_nodes` nodes that are most likely to be accepted when a child of rank r is the right one
    with probability 0.6 / (r + 1)^1.7. That falls as acceptance was measured to fall; only the order matters.

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
    A fixed tree, laid out once; a round that may only go less deep uses a slice of it.

    Args:
        paths (`list[tuple[int, ...]]`): see [`validate_paths`].
        block_size (`int`): tokens that one draft pass proposes.

    Raises:
        `ValueError`: if the paths are no tree.
    """

    def __init__(self, paths: Iterable[Sequence[int]], block_size: int, device: torch.device | str = "cpu"):
        nodes = validate_paths(paths)
        self.block_size = block_size
        self.max_depth = len(nodes[-1])
        self.num_passes = math.ceil(self.max_depth / block_size)
        self.max_children = 1 + max(path[-1] for path in nodes)
        index = {(): 0, **{path: i for i, path in enumerate(nodes, start=1)}}
        depths = [0] + [len(path) for path in nodes]
        self.parents = torch.tensor([0] + [index[path[:-1]] for path in nodes], device=device)
        self.depths = torch.tensor(depths, device=device)
        self.visible = ancestor_mask(self.parents, self.max_depth)
        # Nodes up to each depth: nodes are sorted by depth, so a shallower tree is a prefix.
        self.nodes_to_depth = [sum(depth <= d for depth in depths) for d in range(self.max_depth + 1)]
        # A block stands for each node at the end of a block that has children.
        inner = {path[:-1] for path in nodes}
        self._passes: list[_StaticPass] = []
        blocks: list[Path] = [()]
        for j in range(self.num_passes):
            below = [path for path in nodes if j * block_size < len(path) <= (j + 1) * block_size]
            starts = {block: b for b, block in enumerate(blocks)}
            ends = [path for path in below if len(path) == (j + 1) * block_size and path in inner]
            self._passes.append(
                _StaticPass(
                    blocks=torch.tensor([starts[path[: j * block_size]] for path in below], device=device),
                    offsets=torch.tensor([(len(path) - 1) % block_size for path in below], device=device),
                    ranks=torch.tensor([path[-1] for path in below], device=device),
                    end_blocks=torch.tensor([starts[path[: j * block_size]] for path in ends], device=device),
                    end_ranks=torch.tensor([path[j * block_size :] for path in ends], device=device),
                )
            )
            blocks = ends

    def start(self, max_depth: int) -> StaticRound:
        """A round that goes at most `max_depth` tokens deep."""
        return StaticRound(self, self._passes, min(max_depth, self.max_depth))


@dataclass
class _StaticPass:
    """Where each node of one pass takes its token from, and which paths the next pass extends."""

    blocks: Tensor
    offsets: Tensor
    ranks: Tensor
    end_blocks: Tensor
    end_ranks: Tensor


class StaticRound:
    """One round of a [`StaticTree`]."""

    def __init__(self, tree: StaticTree, passes: list[_StaticPass], max_depth: int):
        self._tree, self._passes, self._max_depth = tree, passes, max_depth
        self._tokens: list[Tensor] = []
        self._candidates: Tensor | None = None

    def add(self, log_probs: Tensor, token_ids: Tensor) -> None:
        """See [`DynamicRound.add`]; a static tree does not look at probabilities."""
        plan = self._passes[len(self._tokens)]
        self._candidates = token_ids
        self._tokens.append(token_ids[plan.blocks, plan.offsets, plan.ranks])

    def branches(self) -> Branches | None:
        """See [`DynamicRound.branches`]."""
        done = len(self._tokens)
        if self._candidates is None or done == len(self._passes) or done * self._tree.block_size >= self._max_depth:
            return None
        plan = self._passes[done - 1]
        offsets = torch.arange(self._tree.block_size, device=plan.end_ranks.device)
        return Branches(plan.end_blocks, self._candidates[plan.end_blocks[:, None], offsets, plan.end_ranks])

    def finish(self, root: Tensor) -> DraftTree:
        """See [`DynamicRound.finish`]."""
        deepest = min(self._max_depth, len(self._tokens) * self._tree.block_size)
        nodes = self._tree.nodes_to_depth[deepest]
        tokens = torch.cat([root, *self._tokens])[:nodes]
        tree = self._tree
        return DraftTree(tokens, tree.parents[:nodes], tree.depths[:nodes], tree.visible[:nodes, :nodes])


class DynamicTree:
    """
    The `num_nodes` most probable nodes of all that the passes draft (EAGLE-2's expand and rerank).

    Args:
        num_nodes (`int`): node budget, the root not counted.
        block_size (`int`): tokens that one draft pass proposes.
        num_passes (`int`): draft passes at most.
        max_children (`int`): candidates for one node's children.
        width (`int`): paths that a pass extends.
    """

    def __init__(
        self,
        num_nodes: int,
        block_size: int,
        num_passes: int,
        max_children: int,
        width: int,
        device: torch.device | str = "cpu",
    ):
        self.num_nodes = num_nodes
        self.block_size = block_size
        self.num_passes = num_passes
        self.max_depth = num_passes * block_size
        self.max_children = max_children
        self.width = width
        self.template = _block_template(block_size, num_nodes, max_children, str(device))

    def start(self, max_depth: int) -> DynamicRound:
        """A round that goes at most `max_depth` tokens deep."""
        return DynamicRound(self, min(max_depth, self.max_depth))


@dataclass
class _BlockTemplate:
    """
    The nodes of one block that can be among the `num_nodes` most probable, by depth: a node of ranks r1, r2, ... is
    less probable than (r1 + 1)(r2 + 1)... - 1 others.
    """

    ranks: Tensor  # (rows, block_size), 0 past the row's own depth
    depths: Tensor  # (rows,), from 1
    parents: Tensor  # (rows,), -1 at depth 1
    rows_to_depth: list[int]  # rows of at most that depth: a prefix, as rows are sorted by depth


@lru_cache(maxsize=32)
def _block_template(block_size: int, num_nodes: int, max_children: int, device: str) -> _BlockTemplate:
    rows: list[Path] = []
    level: list[Path] = [()]
    rows_to_depth = [0]
    for _ in range(block_size):
        level = [
            (*path, rank)
            for path, rank in itertools.product(level, range(max_children))
            if math.prod(r + 1 for r in (*path, rank)) <= num_nodes
        ]
        rows += level
        rows_to_depth.append(len(rows))
    index = {path: i for i, path in enumerate(rows)}
    return _BlockTemplate(
        ranks=torch.tensor([[*path, *[0] * (block_size - len(path))] for path in rows], device=device),
        depths=torch.tensor([len(path) for path in rows], device=device),
        parents=torch.tensor([index.get(path[:-1], -1) for path in rows], device=device),
        rows_to_depth=rows_to_depth,
    )


class DynamicRound:
    """One round of a [`DynamicTree`]: collects the candidates of the passes and keeps the most probable."""

    def __init__(self, tree: DynamicTree, max_depth: int):
        self._tree, self._max_depth = tree, max_depth
        self._passes = 0
        self._count = 0
        # Of the blocks of the coming pass: log-probability and index of the node that each one continues.
        self._block_scores: Tensor | None = None
        self._block_nodes: Tensor | None = None
        self._candidates: Tensor | None = None
        self._scores: list[Tensor] = []
        self._tokens: list[Tensor] = []
        self._parents: list[Tensor] = []
        self._depths: list[Tensor] = []

    def add(self, log_probs: Tensor, token_ids: Tensor) -> None:
        """
        Takes the candidates of a pass.

        Args:
            log_probs (`torch.Tensor` of shape `(blocks, block_size, max_children)`):
                Log-probabilities of the candidates, in descending order.
            token_ids (`torch.LongTensor` of the same shape): the candidates, in the target's vocabulary.
        """
        tree, template = self._tree, self._tree.template
        blocks = log_probs.shape[0]
        depth = min(tree.block_size, self._max_depth - self._passes * tree.block_size)
        rows = template.rows_to_depth[depth]
        if self._block_scores is None or self._block_nodes is None:
            self._block_scores = log_probs.new_zeros(blocks)
            self._block_nodes = token_ids.new_full((blocks,), -1)
        # Summed depth by depth, a child's score is its parent's plus a number not above 0, and so never above it.
        scores = self._block_scores[:, None].expand(blocks, rows)
        ranks, depths = template.ranks[:rows], template.depths[:rows]
        for offset in range(depth):
            further = scores + log_probs[:, offset][:, ranks[:, offset]]
            scores = torch.where(depths > offset, further, scores)
        offsets = depths - 1
        last_ranks = ranks.gather(1, offsets[:, None])[:, 0]
        first = self._count + rows * torch.arange(blocks, device=token_ids.device)
        parents = torch.where(
            template.parents[:rows] < 0, self._block_nodes[:, None], first[:, None] + template.parents[:rows]
        )
        self._candidates = token_ids
        self._scores.append(scores.reshape(-1))
        self._tokens.append(token_ids[:, offsets, last_ranks].reshape(-1))
        self._parents.append(parents.reshape(-1))
        self._depths.append((depths + self._passes * tree.block_size).expand(blocks, rows).reshape(-1))
        self._count += blocks * rows
        self._passes += 1

    def branches(self) -> Branches | None:
        """The most probable paths that end a block of the last pass, or `None` when no further pass is allowed."""
        tree, template = self._tree, self._tree.template
        if self._candidates is None or self._passes == tree.num_passes:
            return None
        if self._passes * tree.block_size >= self._max_depth:
            return None
        first, end = template.rows_to_depth[-2:]
        scores = self._scores[-1].view(-1, end)[:, first:]
        best = scores.reshape(-1).topk(min(tree.width, scores.numel()))
        blocks, rows = best.indices // (end - first), first + best.indices % (end - first)
        offsets = torch.arange(tree.block_size, device=rows.device)
        self._block_scores = best.values
        self._block_nodes = self._count - self._scores[-1].shape[0] + blocks * end + rows
        return Branches(blocks, self._candidates[blocks[:, None], offsets, template.ranks[rows]], best.values)

    def finish(self, root: Tensor) -> DraftTree:
        """
        The tree to verify.

        Args:
            root (`torch.LongTensor` of shape `(1,)`): the newest token.
        """
        # Nodes are numbered parents first, so a stable sort cuts no child from a parent of equal probability.
        order = torch.cat(self._scores).sort(descending=True, stable=True).indices
        chosen = order[: self._tree.num_nodes].sort().values
        place = torch.zeros(self._count + 1, dtype=torch.long, device=root.device)
        place[chosen] = torch.arange(1, chosen.shape[0] + 1, device=root.device)
        # Parent -1 reads the last place, which is 0: the root.
        parents = torch.cat((root.new_zeros(1), place[torch.cat(self._parents)[chosen]]))
        depths = torch.cat((root.new_zeros(1), torch.cat(self._depths)[chosen]))
        tokens = torch.cat((root, torch.cat(self._tokens)[chosen]))
        return DraftTree(tokens, parents, depths, ancestor_mask(parents, self._passes * self._tree.block_size))
