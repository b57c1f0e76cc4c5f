# Copyright 2026 The hf_falcon authors. Licensed under the Apache License, Version 2.0.
"""
Trees of draft tokens; dynamic trees, best first with a node budget (EAGLE-2, DDTree).

A tree grows level by level: `start()` returns a round; `round.add` takes the candidates of a level; `round.branches`
returns the nodes that the next level continues; `round.finish` returns the [`DraftTree`] to verify. One draft pass
gives the candidates of `block_size` levels. The installed package has static trees, with the same interface.

Levels grow on the drafter's device, which the host does not wait for. [`collect`] then brings all candidates to the
host in one transfer, and the finished tree is on the host.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor


@dataclass
class DraftTree:
    """
    A tree of draft tokens in topological order, on the host. Node 0 is the root: the newest token, which the target
    itself chose.

    Args:
        token_ids (`torch.LongTensor` of shape `(nodes,)`): token of each node, in the target's vocabulary.
        parents (`torch.LongTensor` of shape `(nodes,)`): parent of each node; the root is its own.
        depths (`torch.LongTensor` of shape `(nodes,)`): distance from the root.
        visible (`torch.BoolTensor` of shape `(nodes, nodes)`): `True` if the column's node is the row's node, or an
            ancestor of it.
        log_probs (`torch.Tensor` of shape `(nodes,)`, *optional*): log-probability of each node's path; the root's
            is 0.
        proposals (`torch.Tensor` of shape `(inner nodes, draft_vocab_size)`, *optional*): for each node with children
            that were drawn at random, the distribution that they were drawn from; on the drafter's device.
    """

    token_ids: Tensor
    parents: Tensor
    depths: Tensor
    visible: Tensor
    log_probs: Tensor | None = None
    proposals: Tensor | None = None

    def __len__(self) -> int:
        return self.token_ids.shape[0]

    def likeliest_path(self) -> DraftTree:
        """The path of which the most tokens are expected to be accepted, by `log_probs`; without, the deepest one."""
        if len(self) == 1 or int(self.depths[-1]) == len(self) - 1:
            return self
        expected = self.depths if self.log_probs is None else (self.visible * self.log_probs.exp()).sum(dim=1)
        [nodes] = self.visible[expected.argmax()].nonzero(as_tuple=True)
        path = chain(self.token_ids[nodes])
        path.log_probs = None if self.log_probs is None else self.log_probs[nodes]
        return path

    def padded(self, nodes: int) -> DraftTree:
        """The tree, padded to `nodes` nodes; a padding node sees the root and itself."""
        more = nodes - len(self)
        if more == 0:
            return self
        visible = F.pad(self.visible, (0, more, 0, more))
        visible[:, 0] = True
        visible.fill_diagonal_(True)
        token_ids, parents = F.pad(self.token_ids, (0, more)), F.pad(self.parents, (0, more))
        # Padding nodes have the root's depth, because the largest position changes the outputs of some models.
        return DraftTree(token_ids, parents, F.pad(self.depths, (0, more)), visible)


@dataclass
class Branches:
    """
    Nodes of the last level that the next one continues.

    Args:
        rows (`torch.LongTensor` of shape `(width,)`): the parent of each node, as a row of the last candidates.
        token_ids (`torch.LongTensor` of shape `(width,)`): tokens of the nodes.
        log_probs (`torch.Tensor` of shape `(width,)`, *optional*): log-probabilities of the nodes' paths, in
            descending order.
        depth (`int`, *optional*): level of the nodes, from 1.
    """

    rows: Tensor
    token_ids: Tensor
    log_probs: Tensor | None = None
    depth: int = 0


def ancestor_mask(parents: Tensor, depth: int) -> Tensor:
    """
    Marks the ancestors of each node, in steps that reach twice as far each.

    Args:
        parents (`torch.LongTensor` of shape `(nodes,)`): parent of each node; the root is its own.
        depth (`int`): greatest depth of a node.

    Returns:
        `torch.BoolTensor` of shape `(nodes, nodes)`: see [`DraftTree`].
    """
    visible, reach = torch.eye(parents.shape[0], dtype=torch.bool, device="cpu"), 1
    # `visible` has the ancestors that are less than `reach` levels above; `above` is the one that is `reach` levels.
    above = parents
    while reach <= depth:
        visible = visible | visible[above]
        above, reach = above[above], 2 * reach
    return visible


def chain(token_ids: Tensor) -> DraftTree:
    """The tree of one path, whose root is the first of `token_ids` of shape `(nodes,)`; of a plain step, the root."""
    nodes = torch.arange(token_ids.shape[0], device="cpu")
    return DraftTree(token_ids, (nodes - 1).clamp(min=0), nodes, nodes[:, None] >= nodes)


class DynamicTree:
    """
    The `num_nodes` most probable nodes of all drafted nodes (EAGLE-2's expand and rerank).

    Args:
        num_nodes (`int`): node budget, without the root.
        max_depth (`int`): the largest number of levels.
        max_children (`int`): candidates for the children of one node.
        width (`int`): nodes of a level that the next level continues.
    """

    def __init__(self, num_nodes: int, max_depth: int, max_children: int, width: int):
        self.num_nodes = num_nodes
        self.max_depth = max_depth
        self.max_children = max_children
        self.width = width

    def start(self, max_depth: int) -> DynamicRound:
        """A round that goes at most `max_depth` tokens deep."""
        return DynamicRound(self, min(max_depth, self.max_depth))


class DynamicRound:
    """One round of a [`DynamicTree`]: it collects the candidates of all levels and keeps the most probable nodes."""

    def __init__(self, tree: DynamicTree, max_depth: int):
        self._tree, self._max_depth = tree, max_depth
        # Of each level, flat: log-probabilities and tokens of the candidates, and those that the next level continues.
        self._scores: list[Tensor] = []
        self._tokens: list[Tensor] = []
        self._continued: list[Tensor] = []
        self._row_scores: Tensor | None = None
        # Of all candidates, on the host once they are there: log-probabilities, tokens, and parents; -1 is the root.
        self._collected: tuple[Tensor, Tensor, Tensor] | None = None
        # Depth of the deepest node that was added by `add_nodes`.
        self._added_depth = 0

    def add(self, log_probs: Tensor, token_ids: Tensor) -> None:
        """
        Adds the candidates of a level: first the root's, then the candidates of each node in `branches`.

        Args:
            log_probs (`torch.Tensor` of shape `(rows, max_children)`): log-probabilities, in descending order.
            token_ids (`torch.LongTensor` of the same shape): the candidates, in the target's vocabulary.
        """
        # A log-probability is at most 0, so a child's score is at most its parent's.
        scores = log_probs if self._row_scores is None else self._row_scores[:, None] + log_probs
        self._scores.append(scores.reshape(-1))
        self._tokens.append(token_ids.reshape(-1))

    def branches(self) -> Branches | None:
        """The most probable nodes of the last level, or `None` if no further level is allowed."""
        depth = len(self._scores)
        if depth in (0, self._max_depth):
            return None
        best = self._most_probable(depth)
        self._continued.append(best.indices)
        self._row_scores = best.values
        rows = best.indices // self._tree.max_children
        return Branches(rows, self._tokens[-1][best.indices], best.values, depth)

    @property
    def depth(self) -> int:
        """Levels so far."""
        return len(self._scores)

    def paths(self, depth: int) -> Branches:
        """The paths that the level behind `depth` would continue; see `branches`."""
        best = self._most_probable(depth)
        return Branches(best.indices, best.indices, best.values, depth)

    def best(self, depth: int | None = None) -> Tensor:
        """Log-probabilities of the most probable nodes of `depth` levels, at most `num_nodes`, in descending order."""
        if self._collected is not None and depth is None:
            scores = self._collected[0]
        elif self._scores:
            scores = torch.cat(self._scores[:depth])
        else:
            return torch.empty(0, device="cpu")
        return scores.topk(min(self._tree.num_nodes, scores.shape[0])).values

    def candidates(self) -> list[Tensor]:
        """What [`collect`] brings to the host: nothing if it is there."""
        if self._collected is not None or not self._scores:
            return []
        return [torch.cat(self._scores), torch.cat(self._tokens + self._continued)]

    def take(self, candidates: list[Tensor]) -> None:
        """Takes `candidates` on the host."""
        if not candidates:
            none = torch.empty(0, dtype=torch.long, device="cpu")
            self._collected = self._collected or (none.float(), none, none)
            return
        scores, numbers = candidates
        # A drafter that overflows must not break the order that the tree is cut by.
        scores = scores.nan_to_num(nan=-torch.inf)
        counts = [each.shape[0] for each in self._scores]
        self._scores = list(scores.split(counts))
        tokens, continued = numbers[: sum(counts)], numbers[sum(counts) :]
        # The nodes that have candidates are the root and, of each level, the continued ones. A level behind which
        # nothing was drafted may have branches that no level continues.
        widths = [1, *(each.shape[0] for each in self._continued[: len(counts) - 1])]
        firsts = [-1, *itertools.accumulate(counts[:-1], initial=0)][: len(widths)]
        nodes = torch.tensor([first for first, width in zip(firsts, widths) for _ in range(width)], device="cpu")
        nodes[1:] += continued[: nodes.shape[0] - 1]
        children = [count // width for count, width in zip(counts, widths) for _ in range(width)]
        self._collected = scores, tokens, nodes.repeat_interleave(torch.tensor(children, device="cpu"))

    def add_nodes(self, token_ids: Sequence[int], parents: Sequence[int], log_probs: Sequence[float]) -> None:
        """
        Adds nodes that the drafter did not draft (prompt lookup), after all levels. A node that exists already keeps
        the greater of both log-probabilities.

        Args:
            token_ids (sequence of `int`): the tokens of the nodes.
            parents (sequence of `int`): the node before each, which comes earlier; -1 for the root.
            log_probs (sequence of `float`): log-probability of the path up to each node.
        """
        collect([self])
        assert self._collected is not None
        scores, tokens, before = (each.tolist() for each in self._collected)
        known = {child: number for number, child in enumerate(zip(before, tokens))}
        # Of the root, and of each node that is added: its number and its depth.
        numbers, depths = [-1], [0]
        for token, parent, log_prob in zip(token_ids, parents, log_probs):
            child = numbers[parent + 1], token
            number = known.setdefault(child, len(tokens))
            if number == len(tokens):
                before.append(child[0])
                tokens.append(token)
                scores.append(log_prob)
            else:
                scores[number] = max(scores[number], log_prob)
            numbers.append(number)
            depths.append(depths[parent + 1] + 1)
        self._added_depth = max(depths)
        tokens, before = torch.tensor((tokens, before), dtype=torch.long, device="cpu")
        self._collected = torch.tensor(scores, dtype=torch.float32, device="cpu"), tokens, before

    def finish(self, root: Tensor, size: int | None = None) -> DraftTree:
        """
        The tree to verify.

        Args:
            root (`torch.LongTensor` of shape `(1,)`): the newest token, on the host.
            size (`int`, *optional*): nodes to keep, the most probable ones; `num_nodes` by default.
        """
        collect([self])
        assert self._collected is not None
        scores, tokens, parents = self._collected
        count = min(scores.shape[0], self._tree.num_nodes if size is None else size)
        if count == 0:
            return chain(root)
        # Parents have smaller numbers, so a stable sort keeps a parent before a child of the same probability.
        best = scores.sort(descending=True, stable=True)
        chosen = best.indices[:count].sort().values
        place = torch.zeros(scores.shape[0] + 1, dtype=torch.long, device="cpu")
        place[chosen] = torch.arange(1, count + 1, device="cpu")
        # Parent -1 reads the last entry of `place`, which is 0: the root.
        parents = F.pad(place[parents[chosen]], (1, 0))
        visible = ancestor_mask(parents, max(len(self._scores), self._added_depth))
        token_ids = torch.cat((root, tokens[chosen]))
        return DraftTree(token_ids, parents, visible.sum(dim=1) - 1, visible, F.pad(scores[chosen], (1, 0)))

    def _most_probable(self, depth: int) -> torch.return_types.topk:
        scores = self._scores[depth - 1]
        return scores.topk(min(self._tree.width, scores.shape[0]))


def collect(rounds: Sequence[Any]) -> None:
    """Brings the candidates of some rounds to the host, in one transfer. A round that is there stays as it is."""
    parts = [each.candidates() for each in rounds]
    found = to_host(*itertools.chain.from_iterable(parts))
    for each, part in zip(rounds, parts):
        each.take([found.pop(0) for _ in part])


def to_device(tensor: Tensor, device: torch.device) -> Tensor:
    """Copies a tensor of the host to a device. The host does not wait, unlike for `tensor.to(device)`."""
    # MPS would read the memory after it may have been freed.
    return tensor.to(device, non_blocking=device.type != "mps")


def to_host(*tensors: Tensor) -> list[Tensor]:
    """
    Copies tensors of 32 or 64 bits a value to the host, in one transfer if they are on another device: the host waits
    once.
    """
    if all(each.device.type == "cpu" for each in tensors):
        return list(tensors)
    words = [(each if each.dim() == 1 else each.reshape(-1)).view(torch.int32) for each in tensors]
    found = torch.cat(words).cpu().split([each.shape[0] for each in words])
    # A copy of a part starts where any dtype may start.
    return [part.clone().view(each.dtype).view_as(each) for part, each in zip(found, tensors)]
