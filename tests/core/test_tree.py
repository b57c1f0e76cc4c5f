# Copyright 2026 The hf_falcon authors. Licensed under the Apache License, Version 2.0.
"""Trees: whatever the sizes, closed under parents, in topological order, within the budget, and the most probable."""

import itertools
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hf_falcon import DraftTree, DynamicTree, StaticTree, static_paths
from hf_falcon.core.tree import ancestor_mask, chain
from hf_falcon.static_trees import validate_paths

ROOT = torch.tensor([7])
VOCAB = 1000
EXAMPLES = settings(max_examples=100, deadline=None)
sizes = st.fixed_dictionaries(
    {
        "k": st.integers(1, 4),
        "passes": st.integers(1, 3),
        "nodes": st.integers(1, 40),
        "children": st.integers(1, 5),
        "width": st.integers(1, 6),
        "max_depth": st.integers(1, 12),
        "scores": st.sampled_from(["distinct", "ties", "impossible"]),
    }
)


class Candidates:
    """
    Stands in for a drafter of blocks of k tokens, all of whose candidates follow from the branch that leads to the
    block; `k=1` stands for a conditional drafter, too, whose every token knows its branch.
    """

    def __init__(self, k: int, children: int, scores: str = "distinct"):
        self.k, self.children, self.scores = k, children, scores

    def __call__(self, branch: tuple[int, ...]) -> tuple[torch.Tensor, torch.Tensor]:
        generator = torch.Generator().manual_seed(hash(branch) % (1 << 31))
        scores = torch.randn(self.k, VOCAB, generator=generator).mul(3).log_softmax(dim=-1)
        if self.scores == "ties":
            scores = scores.round()
        if self.scores == "impossible":
            scores = scores.masked_fill(torch.rand(self.k, VOCAB, generator=generator) < 0.999, -torch.inf)
        best = scores.topk(self.children, dim=-1)
        return best.values, best.indices


def draft(tree, candidates, max_depth: int) -> DraftTree:
    """A round as the candidate generator runs it."""
    tree_round = tree.start(max_depth)
    branches: list[tuple[int, ...]] = [()]
    while True:
        depth = len(branches[0])
        made = [candidates(branch[: depth // candidates.k * candidates.k]) for branch in branches]
        values, tokens = (torch.stack([each[depth % candidates.k] for each in part]) for part in zip(*made))
        tree_round.add(values, tokens)
        found = tree_round.branches()
        if found is None:
            return tree_round.finish(ROOT)
        assert found.token_ids.shape == found.rows.shape
        branches = [(*branches[row], token) for row, token in zip(found.rows.tolist(), found.token_ids.tolist())]


def all_nodes(candidates, depth: int) -> dict[tuple[int, ...], float]:
    """Every path of tokens with its log-probability."""
    found: dict[tuple[int, ...], float] = {}
    level = {(): torch.tensor(0.0)}
    for d in range(depth):
        below = {}
        for path, score in level.items():
            values, tokens = candidates(path[: d // candidates.k * candidates.k])
            for value, token in zip(values[d % candidates.k], tokens[d % candidates.k].tolist()):
                below[(*path, token)] = score + value
        found.update({path: score.item() for path, score in below.items()})
        level = below
    return found


def paths(tree: DraftTree) -> list[tuple[int, ...]]:
    """The path of tokens that leads to each node, by parents alone."""
    found: list[tuple[int, ...]] = [()]
    for node in range(1, len(tree)):
        found.append((*found[int(tree.parents[node])], int(tree.token_ids[node])))
    return found


def check(tree: DraftTree, max_depth: int) -> None:
    n = len(tree)
    parents, depths = tree.parents.tolist(), tree.depths.tolist()
    assert tree.token_ids.shape == tree.parents.shape == tree.depths.shape == (n,) and tree.visible.shape == (n, n)
    assert (int(tree.token_ids[0]), parents[0], depths[0]) == (int(ROOT), 0, 0)
    for node in range(1, n):
        assert 0 <= parents[node] < node and depths[node] == depths[parents[node]] + 1 <= max_depth
    assert len(set(paths(tree))) == n  # siblings hold distinct tokens
    for node in range(n):
        ancestors, ancestor = {node}, node
        while ancestor:
            ancestor = parents[ancestor]
            ancestors.add(ancestor)
        assert set(tree.visible[node].nonzero()[:, 0].tolist()) == ancestors


@EXAMPLES
@given(sizes)
def test_dynamic_tree(size):
    k, children, width = size["k"], size["children"], size["width"]
    candidates = Candidates(k, children, size["scores"])
    tree = DynamicTree(size["nodes"], k * size["passes"], children, width)
    found = draft(tree, candidates, size["max_depth"])
    depth = min(size["max_depth"], k * size["passes"])
    check(found, depth)
    # All that could be drafted: a level continues at most `width` nodes.
    rows, available = 1, 0
    for _ in range(depth):
        available += rows * children
        rows = min(width, rows * children)
    assert len(found) - 1 == min(size["nodes"], available)


@EXAMPLES
@given(sizes.map(lambda size: size | {"children": min(size["children"], 3)}))
def test_dynamic_tree_is_the_most_probable(size):
    k, children = size["k"], size["children"]
    passes = 1 if children**k > 30 else min(size["passes"], 2)
    depth = min(size["max_depth"], k * passes)
    candidates = Candidates(k, children, size["scores"])
    found = draft(DynamicTree(size["nodes"], k * passes, children, width=1000), candidates, depth)
    scores = all_nodes(candidates, depth)
    best = sorted(scores.values(), reverse=True)[: size["nodes"]]
    # Where scores tie, which of the nodes is kept is open, their probability is not.
    assert sorted((scores[path] for path in paths(found)[1:]), reverse=True) == best


def test_a_level_continues_the_most_probable_paths():
    candidates = Candidates(2, 3)
    tree_round = DynamicTree(20, 6, 3, width=4).start(6)
    values, tokens = candidates(())
    tree_round.add(values[:1], tokens[:1])
    first = tree_round.branches()
    assert first.rows.tolist() == [0, 0, 0] and first.log_probs.tolist() == values[0].tolist()
    tree_round.add(values[1:].expand(3, 3), tokens[1:].expand(3, 3))
    scores = {path: score for path, score in all_nodes(candidates, 2).items() if len(path) == 2}
    found = tree_round.branches()
    assert found.log_probs.tolist() == sorted(scores.values(), reverse=True)[:4]
    paths_found = zip(first.token_ids[found.rows].tolist(), found.token_ids.tolist())
    assert [scores[path] for path in paths_found] == found.log_probs.tolist()


@EXAMPLES
@given(sizes)
def test_generated_static_tree(size):
    k, children, nodes = size["k"], size["children"], size["nodes"]
    depth = k * size["passes"]
    listed = static_paths(nodes, depth, children)
    assert validate_paths(listed) == listed
    # Counted up only as far as it matters: 5^12 nodes are more than enough.
    available = sum(children**d for d in range(1, depth + 1))
    assert len(listed) == min(nodes, available)
    assert max(map(len, listed)) <= depth and max(path[-1] for path in listed) < children
    # With a path come those that are at least as likely whatever the shares of the ranks: the elder siblings.
    for path in listed:
        assert path[-1] == 0 or (*path[:-1], path[-1] - 1) in listed
    assert set(static_paths(max(1, nodes // 2), depth, children)) <= set(listed)
    check_static(listed, k, size["max_depth"], size["scores"])


@st.composite
def closed_paths(draw):
    listed = [(draw(st.integers(0, 3)),)]
    for _ in range(draw(st.integers(0, 15))):
        parent = draw(st.sampled_from([(), *listed]))
        path = (*parent, draw(st.integers(0, 3)))
        if len(path) <= 9 and path not in listed:
            listed.append(path)
    return draw(st.permutations(listed))


@EXAMPLES
@given(closed_paths(), st.integers(1, 4), st.integers(1, 12))
def test_static_tree_of_ones_own(listed, k, max_depth):
    check_static(listed, k, max_depth, "distinct")


def check_static(listed, k, max_depth, scores):
    tree = StaticTree(listed)
    assert tree.max_depth == max(map(len, listed))
    assert tree.max_children == 1 + max(rank for path in listed for rank in path)
    candidates = Candidates(k, tree.max_children, scores)
    found = draft(tree, candidates, max_depth)
    check(found, max_depth)
    # Each path of ranks, followed through the candidates of its own branch.
    expected = set()
    for ranks in listed:
        path: tuple[int, ...] = ()
        for depth, rank in enumerate(ranks):
            path += (int(candidates(path[: depth // k * k])[1][depth % k, rank]),)
        if len(ranks) <= max_depth:
            expected.add(path)
    assert set(paths(found)[1:]) == expected and len(found) == 1 + len(expected)


def test_a_shallower_static_tree_is_a_slice():
    tree, candidates = StaticTree(static_paths(20, 6, 3)), Candidates(2, 3)
    whole = draft(tree, candidates, 6)
    for depth in range(1, 7):
        part = draft(tree, candidates, depth)
        kept = int((whole.depths <= depth).sum())
        assert torch.equal(part.token_ids, whole.token_ids[:kept]) and torch.equal(part.parents, whole.parents[:kept])
        assert torch.equal(part.visible, whole.visible[:kept, :kept])


def test_static_paths_are_the_most_likely():
    listed = static_paths(12, 4, 3)
    chance = {path: math.prod(0.6 / (rank + 1) ** 1.7 for rank in path) for path in ranked(4, 3)}
    assert sorted(map(chance.get, listed), reverse=True) == sorted(chance.values(), reverse=True)[:12]


def ranked(depth, children):
    return [path for d in range(1, depth + 1) for path in itertools.product(range(children), repeat=d)]


@pytest.mark.parametrize(
    "listed, message",
    [
        ([], "`draft_tree` has no paths"),
        ([(0,), (1, 0)], r"has the path \(1, 0\) without its parent \(1,\): add the parent"),
        ([(0, 0)], r"without its parent \(0,\)"),
        ([(0,), (1,), (0,)], r"has the path \(0,\) more than once"),
        ([(0,), (-1,)], r"has the path \(-1,\): .* at least 0"),
        ([(0,), ()], r"has the path \(\)"),
        ([(0,), (0.5,)], r"has the path \(0.5,\)"),
        ([(True,)], r"has the path \(True,\)"),
    ],
)
def test_refused_paths(listed, message):
    with pytest.raises(ValueError, match=message):
        validate_paths(listed)
    with pytest.raises(ValueError, match=message):
        StaticTree(listed)


def test_paths_are_sorted_by_depth():
    assert validate_paths([[1], [0, 1], [0], [0, 0]]) == [(0,), (1,), (0, 0), (0, 1)]


def test_root_alone():
    check(chain(ROOT), 0)
    assert torch.equal(ancestor_mask(torch.tensor([0]), 0), torch.ones(1, 1, dtype=torch.bool))


def test_the_likeliest_path_of_a_tree_without_probabilities_is_its_deepest():
    parents = torch.tensor([0, 0, 0, 1, 2, 4])
    tree = DraftTree(torch.arange(7, 13), parents, torch.tensor([0, 1, 1, 2, 2, 3]), ancestor_mask(parents, 3))
    found = tree.likeliest_path()
    check(found, 3)
    assert found.token_ids.tolist() == [7, 9, 11, 12] and found.log_probs is None
