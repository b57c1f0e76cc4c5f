# Copyright 2026 The hf_falcon authors. Licensed under the Apache License, Version 2.0.
"""Speculative sampling: tokens are distributed as the target's own, whatever the drafter is."""

import copy
import itertools
import math
from collections import Counter
from collections.abc import Callable
from types import SimpleNamespace

import pytest
import torch
from distributions import surprise, text_probabilities
from quick import one_in
from tiny_models import new_drafter, new_target, prompt, random_tokens, tiny_drafter, tiny_target
from torch import Tensor
from transformers import GenerationConfig, LogitsProcessorList, StoppingCriteriaList, TemperatureLogitsWarper

from hf_falcon import DraftOptions, StaticTree
from hf_falcon import sampling as speculative
from hf_falcon.core.verification import TokenSequence
from hf_falcon.sampling import SamplingCandidateGenerator, accept_one, verify_speculative

VOCAB = 4


class Chances:
    """Runs a random function in all ways that it can go, each with its probability."""

    def __init__(self, monkeypatch):
        monkeypatch.setattr(speculative, "_happens", self.happens)
        monkeypatch.setattr(speculative, "_draw", lambda probs: torch.tensor([self.draw(probs.tolist())]))

    def happens(self, probability: float) -> bool:
        probability = min(1.0, probability)
        return bool(self.draw([1.0 - probability, probability]))

    def draw(self, probs: list[float]) -> int:
        """One of the outcomes that have a probability; another one in another run."""
        if len(self._taken) == self._place:
            possible = [outcome for outcome, probability in enumerate(probs) if probability > 0]
            self._taken.append(possible)
        self._place += 1
        outcome = self._taken[self._place - 1][0]
        self._weight *= probs[outcome]
        return outcome

    def distribution(self, run: Callable[[], tuple]) -> dict[tuple, float]:
        found: Counter[tuple] = Counter()
        self._taken: list[list[int]] = []
        while True:
            self._place, self._weight = 0, 1.0
            result = run()
            found[result] += self._weight
            while self._taken and len(self._taken[-1]) == 1:
                self._taken.pop()
            if not self._taken:
                return dict(found)
            self._taken[-1].pop(0)


@pytest.fixture
def chances(monkeypatch):
    return Chances(monkeypatch)


def random_probs(*shape: int, seed: int, sharpness: float = 1.5) -> Tensor:
    noise = torch.randn(*shape, VOCAB, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    return (sharpness * noise).softmax(dim=-1)


def drawn(chances: Chances, proposal: Tensor, count: int) -> list[int]:
    """Draws without replacement, with all their probabilities."""
    left, tokens = proposal.tolist(), []
    for _ in range(count):
        total = sum(left)
        # As the largest perturbed scores are: what cannot be drawn comes last.
        token = chances.draw([share / total for share in left]) if total > 0 else 0
        while token in tokens:
            token += 1
        tokens.append(token)
        left[token] = 0.0
    return tokens


P, Q = random_probs(seed=0), random_probs(seed=1)
PAIRS = {
    "good": (P, 0.9 * P + 0.1 * Q),
    "bad": (P, Q),
    "worst": (torch.tensor([0.7, 0.3, 0.0, 0.0]), torch.tensor([0.0, 0.0, 0.5, 0.5])),
    "equal": (P, P),
    "warped target": (torch.tensor([0.0, 0.6, 0.0, 0.4]), Q),
    "warped drafter": (P, torch.tensor([0.0, 0.25, 0.75, 0.0])),
    "certain drafter": (P, torch.tensor([0.0, 0.0, 1.0, 0.0])),
    "no drafter": (P, torch.zeros(4)),
}


@pytest.mark.parametrize("count", [1, 2, 3, 4])
@pytest.mark.parametrize("pair", PAIRS)
def test_a_token_is_distributed_as_the_targets(pair, count, chances):
    """Exactly: over all draws of candidates, all acceptances, and all tokens where none is accepted."""
    target, proposal = (each.double() for each in PAIRS[pair])
    found = chances.distribution(lambda: (int(accept_one(target, proposal, drawn(chances, proposal, count))),))
    for token in range(VOCAB):
        assert found.get((token,), 0.0) == pytest.approx(float(target[token]), abs=1e-6)
    assert sum(found.values()) == pytest.approx(1.0)


@pytest.mark.parametrize("pair, least", [("equal", 1.0), ("good", 0.9)])
def test_what_a_good_drafter_draws_is_accepted(pair, least, chances):
    """More often than the target's own draw is the token that the drafter thinks best, or any single one."""
    target, proposal = PAIRS[pair]

    def run() -> tuple:
        (token,) = drawn(chances, proposal, 1)
        return (int(accept_one(target, proposal, [token])) == token,)

    found = chances.distribution(run)
    assert found[True,] > least - 1e-9 and found[True,] > float(target.max())


def test_proposals_without_draws_are_not_asked():
    target = torch.tensor([0.5, 0.5, 0.0, 0.0])
    torch.manual_seed(0)
    for proposal in (torch.zeros(4), torch.full((4,), math.nan)):
        assert {int(accept_one(target, proposal, [2, 3])) for _ in range(20)} == {0, 1}


class Tables:
    """A target and a drafter of `VOCAB` tokens whose distributions depend on the two newest tokens."""

    def __init__(self, closeness: float, vocab_ids: Tensor | None = None):
        self.target = random_probs(VOCAB, VOCAB, seed=2)
        self.drafter = closeness * self.target + (1 - closeness) * random_probs(VOCAB, VOCAB, seed=3)
        self.vocab_ids = vocab_ids
        if vocab_ids is not None:
            known = torch.zeros(VOCAB).index_fill(0, vocab_ids, 1.0)
            self.drafter = self.drafter * known / (self.drafter * known).sum(dim=-1, keepdim=True)

    def logits(self, tokens: list[int]) -> Tensor:
        return self.target[tokens[-2], tokens[-1]].log()


CHAIN, FULL = [[0], [0, 0]], [[0], [1], [2], [3]]
WIDE = [[0], [1], [0, 0], [0, 1], [1, 0]]
TREES = {"one": [[0]], "chain": CHAIN, "two": FULL[:2], "three": FULL[:3], "all": FULL, "wide": WIDE}
PROMPT = [1, 2]


def walked(chances: Chances, tables: Tables, tree: StaticTree) -> tuple[int, ...]:
    """The tokens of a round, and those of plain decoding after them up to three."""
    tokens, proposals = [PROMPT[-1]], []
    paths = {0: PROMPT}
    children: dict[int, list[int]] = {}
    for node in range(1, len(tree.parents)):
        children.setdefault(int(tree.parents[node]), []).append(node)
    for parent, nodes in sorted(children.items()):
        proposal = tables.drafter[paths[parent][-2], paths[parent][-1]]
        proposals.append(proposal if tables.vocab_ids is None else proposal[tables.vocab_ids])
        for node, token in zip(nodes, drawn(chances, proposal, len(nodes))):
            paths[node] = [*paths[parent], token]
            tokens.append(token)
    made = tree.start(tree.max_depth).finish(torch.tensor(tokens[:1]))
    made.token_ids, made.parents, made.proposals = torch.tensor(tokens), tree.parents, torch.stack(proposals)
    settings = GenerationConfig(do_sample=True, max_length=len(PROMPT) + 3)
    stop = StoppingCriteriaList([lambda ids, scores: torch.tensor([ids.shape[1] == len(PROMPT) + 3])])
    sequence = TokenSequence(torch.tensor([PROMPT]), LogitsProcessorList(), stop, settings)
    logits = torch.stack([tables.logits(paths[node]) for node in range(len(tokens))])
    path, accepted = verify_speculative(made, logits, sequence, SimpleNamespace(vocab_ids=tables.vocab_ids))
    emitted = sequence.input_ids[0, len(PROMPT) :].tolist()
    assert len(emitted) == len(path) and accepted in (len(path), len(path) - 1)
    assert [tokens[node] for node in path[1:]] == emitted[: len(path) - 1]
    while len(emitted) < 3:
        emitted.append(chances.draw(tables.logits([*PROMPT, *emitted]).exp().tolist()))
    return tuple(emitted)


DRAFTERS = {"bad": Tables(0.0), "good": Tables(0.9), "of few tokens": Tables(0.5, torch.tensor([2, 0, 3]))}


@pytest.mark.parametrize("name, drafter", one_in(3, TREES, DRAFTERS))
def test_a_tree_is_walked_as_the_target_would(name, drafter, chances):
    """All texts of three tokens have plain decoding's probabilities, exactly."""
    tables, tree = DRAFTERS[drafter], StaticTree(TREES[name])
    found = chances.distribution(lambda: walked(chances, tables, tree))
    for text in itertools.product(range(VOCAB), repeat=3):
        tokens, expected = list(PROMPT), 1.0
        for token in text:
            expected *= float(tables.logits(tokens)[token].exp())
            tokens.append(token)
        assert found[text] == pytest.approx(expected, abs=1e-6), text


# With real models, by many samples.


SETTINGS = {"do_sample": True, "temperature": 2.0, "top_p": 0.95, "repetition_penalty": 1.2}


@pytest.mark.parametrize(
    "block_size, extra",
    [pytest.param(*each, marks=pytest.mark.slow) for each in ((1, "nothing"), (2, "nothing"), (2, "conditioning"))]
    + [(2, "bonuses")],
)
def test_samples_are_distributed_as_plain_decodings(block_size, extra, monkeypatch):
    """The second and the third token: those of the first tree."""
    target = new_target(vocab_size=6)
    ids = 1 + random_tokens(1, 9) % 5
    sizes = {"block_size": block_size, "conditioning_size": 24 if extra == "conditioning" else 0}
    options = {"verification": "speculative", "num_draft_passes": 2, "num_assistant_tokens": 6}
    if extra == "bonuses":
        # The prompt has tokens that the draft vocabulary lacks.
        sizes |= {"draft_vocab_size": 4}
        options |= {"context_bonuses": [0.5, 1.0, 2.0]}
    drafter = new_drafter(target, num_lstm_layers=0, **sizes)
    for name, value in options.items():
        setattr(drafter.generation_config, name, value)

    def by_later_tokens(**changes) -> Counter[tuple]:
        config = GenerationConfig(**{**SETTINGS, **changes})
        found: Counter[tuple] = Counter()
        processors = target._get_logits_processor(config, input_ids_seq_length=9, device="cpu")
        for text, chance in text_probabilities(target, ids, 3, processors).items():
            found[text[1:]] += chance
        return found

    torch.manual_seed(0)
    found: Counter[tuple] = Counter()
    settings = {"assistant_model": drafter, "max_new_tokens": 4, "eos_token_id": None, "return_dict_in_generate": True}
    accepted, asked = 0, []

    def counted(target: Tensor, proposal: Tensor, candidates: list[int]) -> Tensor:
        asked.append(len(candidates))
        return accept_one(target, proposal, candidates)

    monkeypatch.setattr(speculative, "accept_one", counted)
    for _ in range(400):
        output = target.generate(ids, **settings, **SETTINGS)
        found[tuple(output.sequences[0, 10:12].tolist())] += 1
        accepted += output.draft_statistics.accepted_tokens
    assert accepted > 100 and len(asked) >= 400 and max(asked) > 1
    assert surprise(found, by_later_tokens()) < 4
    # A difference would have been seen.
    assert surprise(found, by_later_tokens(temperature=1.2)) > 6


def test_greedy_decoding_is_exact():
    target, ids = tiny_target("llama"), prompt(9)
    drafter = tiny_drafter(target, verification="speculative")
    expected = target.generate(ids, max_new_tokens=20, do_sample=False)
    output = target.generate(ids, assistant_model=drafter, max_new_tokens=20, do_sample=False)
    assert output.tolist() == expected.tolist()


@pytest.mark.parametrize("draft_vocab_size", [None, 30])
def test_candidates_are_drawn_without_replacement(draft_vocab_size):
    """In their order, from the distribution that is given with them, warped as the target's."""
    target = tiny_target()
    drafter = new_drafter(target, draft_vocab_size=draft_vocab_size)
    processors = target._get_logits_processor(GenerationConfig(**{**SETTINGS, "top_k": 3}), 9, device="cpu")
    options = DraftOptions(draft_tree=[[0], [1], [2], [3]])
    generator = SamplingCandidateGenerator(drafter, target, options, processors)
    features = torch.randn(32, generator=torch.Generator().manual_seed(0)).expand(500, 2, 32)
    torch.manual_seed(0)
    log_probs, tokens, proposals = generator._candidates(generator.context.logits(features))
    assert log_probs.shape == tokens.shape == (500, 2, 4) and proposals.shape == (500, 2, draft_vocab_size or 64)
    probs = dict(
        zip(generator.head.to_target_ids(torch.arange(proposals.shape[-1])).tolist(), proposals[0, 0].tolist())
    )
    likely = [token for token, chance in probs.items() if chance > 0]
    logits = generator.head.logits(features[0, :1])
    warped = (logits / 2.0).topk(3).values.softmax(dim=-1)
    assert 1 < len(likely) <= 3 and max(probs.values()) == pytest.approx(float(warped.max()), rel=0.06)
    found = Counter(tuple(row[: len(likely)]) for row in tokens.flatten(0, 1).tolist())
    expected = {}
    for order in itertools.permutations(likely):
        left, chance = 1.0, 1.0
        for token in order:
            chance *= probs[token] / left
            left -= probs[token]
        expected[order] = chance
    assert surprise(found, expected) < 4
    # What the warpers leave no probability is no draw, and says so.
    assert (log_probs[..., len(likely) :] == -math.inf).all() and log_probs[..., : len(likely)].isfinite().all()


def test_every_node_has_the_proposal_it_was_drawn_from():
    target = tiny_target()
    for sizes in ({"block_size": 1, "num_lstm_layers": 0}, {"block_size": 2}, {"conditioning_size": 24}):
        drafter = new_drafter(target, **sizes)
        options = DraftOptions(draft_tree=[[0], [1], [1, 0], [1, 0, 0], [1, 0, 1]])
        processors = target._get_logits_processor(GenerationConfig(do_sample=True, top_k=2), 9, device="cpu")
        torch.manual_seed(0)
        with torch.no_grad():
            generator = SamplingCandidateGenerator(drafter, target, options, processors)
            generator.commit(torch.randn(1, 5, 32), random_tokens(1, 5))
            for depth, nodes in ((0, 1), (1, 3), (2, 4), (9, 6)):
                tree = generator.propose(torch.tensor([[5]]), depth)
                assert len(tree) == nodes
        for row, node in enumerate((0, 2, 3)):
            children = (tree.parents[1:] == node).nonzero()[:, 0] + 1
            assert set(tree.token_ids[children].tolist()) <= set(tree.proposals[row].nonzero()[:, 0].tolist())
        assert tree.proposals.shape[0] == 3 and not torch.equal(tree.proposals[0], tree.proposals[1])


@pytest.mark.parametrize("warper", [{"top_k": 0}, {"eta_cutoff": 1e-3}])
def test_a_drafter_that_overflows(warper):
    target, ids = tiny_target("llama"), prompt(9)
    drafter = copy.deepcopy(tiny_drafter(target, verification="speculative"))
    torch.nn.init.constant_(drafter.norm.weight, math.inf)
    output = target.generate(ids, assistant_model=drafter, max_new_tokens=8, do_sample=True, **warper)
    assert output.shape == (1, 17)


def test_a_warper_that_reads_the_text_is_not_applied_to_drafts():
    class Cooling(TemperatureLogitsWarper):
        def __call__(self, input_ids, scores):
            return scores / (1.0 + input_ids.shape[1] / 100)

    target, ids = tiny_target("llama"), prompt(9)
    options = {"max_new_tokens": 8, "do_sample": True, "logits_processor": [Cooling(1.0)]}
    output = target.generate(ids, assistant_model=tiny_drafter(target, verification="speculative"), **options)
    assert output.shape == (1, 17)


def test_a_draw_without_a_node():
    target = tiny_target("llama")
    drafter = tiny_drafter(target, verification="speculative", draft_tree=[[0], [0, 1]])
    with pytest.raises(ValueError, match=r"has the path \(0, 1\) without \(0, 0\): with `verification` 'speculative'"):
        target.generate(prompt(9), assistant_model=drafter, max_new_tokens=8, do_sample=True)


def test_a_wrong_option():
    with pytest.raises(
        ValueError, match="`verification` is 'typical': set it to one of 'exact', 'speculative', 'multi_root'"
    ):
        DraftOptions(verification="typical")
