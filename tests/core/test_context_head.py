# Copyright 2026 The hf_falcon authors. Licensed under the Apache License, Version 2.0.
"""What the drafter's head scores in one sequence: bonuses for repetitions, and tokens that its vocabulary lacks."""

import random

import pytest
import torch
from quick import one_in
from tiny_models import new_drafter, new_target, prompt, random_tokens, tiny_target
from utilities import close

from hf_falcon import DraftOptions, FalconCandidateGenerator
from hf_falcon.core import candidate_generator
from hf_falcon.core.candidate_generator import ContextHead
from hf_falcon.core.draft_session import TargetHead

BONUSES = [0.5, 1.0, 2.5, 4.0]
VOCAB = 64


def search(tokens: list[int], latest: list[int], bonuses: list[float]) -> dict[int, float]:
    """The bonus of every token of a text, by its place with the most equal tokens before it."""
    found: dict[int, float] = {}
    for place, token in enumerate(tokens):
        matched = 0
        while (
            matched < min(place, len(latest), len(bonuses) - 1) and tokens[place - 1 - matched] == latest[-1 - matched]
        ):
            matched += 1
        found[token] = max(found.get(token, 0.0), bonuses[matched])
    return found


def head_of(drafter, target, bonuses=BONUSES, **changes) -> ContextHead:
    return ContextHead(TargetHead(drafter, target), bonuses, VOCAB, torch.device("cpu"), **changes)


@pytest.mark.parametrize("bonuses", [[0.5], [0.0, 1.0], BONUSES, [3.0, 0.5, 1.0]])
@pytest.mark.parametrize("latest", [1, 3, 6])
@pytest.mark.parametrize("chunk", [1, 5])
def test_bonuses_are_what_a_search_finds(bonuses, latest, chunk):
    target = tiny_target()
    context = head_of(new_drafter(target), target, bonuses, latest=latest)
    draws = random.Random(0)
    tokens = [draws.randrange(5) for _ in range(60)]
    for start in range(0, len(tokens), chunk):
        context.extend(torch.tensor(tokens[start : start + chunk]))
    assert len(context) == len(tokens)
    newest = context.latest()
    order = max(latest, len(bonuses) - 1)
    assert newest.tolist() == [tokens[: -order - 1 : -1]]
    # The branches of a pass go on differently.
    branches = torch.tensor([[7], [tokens[-3]], [tokens[4]]])
    suffixes = torch.cat((branches, newest[:, :-1].expand(3, -1)), dim=1)
    logits = torch.randn(3, VOCAB)
    gained = context.prefer_repetitions(logits, suffixes) - logits
    for branch, found in zip(branches[:, 0].tolist(), gained):
        expected = torch.zeros(VOCAB)
        for token, bonus in search(tokens, [*tokens, branch], bonuses).items():
            expected[token] = bonus
        close(found, expected)


def test_the_first_tokens_of_a_text():
    target = tiny_target()
    context = head_of(new_drafter(target), target)
    logits = torch.randn(1, VOCAB)
    # Nothing occurred earlier, and there are fewer tokens than bonuses.
    assert torch.equal(context.prefer_repetitions(logits, context.latest()), logits)
    context.extend(torch.tensor([9]))
    assert context.latest().tolist() == [[9, -1, -1]]
    gained = context.prefer_repetitions(logits, context.latest()) - logits
    assert gained.nonzero().tolist() == [[0, 9]] and float(gained[0, 9]) == pytest.approx(0.5)


def test_without_bonuses_it_is_the_head():
    target = tiny_target()
    head = TargetHead(new_drafter(target, draft_vocab_size=30), target)
    context = ContextHead(head, [], VOCAB, torch.device("cpu"))
    context.extend(torch.arange(VOCAB))
    states = torch.randn(2, 3, 32)
    assert torch.equal(context.logits(states), head.logits(states)) and context.vocab_ids is head.vocab_ids
    logits = torch.randn(2, 30)
    assert context.prefer_repetitions(logits, context.latest().expand(2, -1)) is logits


@pytest.mark.parametrize("name", ["llama", "gemma2", "granite"])
def test_tokens_that_the_vocabulary_lacks_are_scored_as_the_target_does(name):
    target = new_target(name)
    drafter = new_drafter(target, draft_vocab_size=30)
    context, whole = head_of(drafter, target), TargetHead(new_drafter(target), target)
    known = set(drafter.draft_vocab_ids.tolist())
    unknown = [token for token in range(VOCAB) if token not in known]
    states = torch.randn(2, 32)
    for seen in (unknown[:2], unknown[1:7]):
        context.extend(torch.tensor([*seen, min(known)]))
    scored = context.vocab_ids.tolist()
    assert sorted(scored) == sorted([*known, *unknown[:7]])
    assert context.to_target_ids(torch.arange(37)).tolist() == scored
    with torch.no_grad():
        close(context.logits(states), whole.logits(states)[:, scored])
        plain = context.logits(states)
    # Their bonuses reach them, too.
    gained = context.prefer_repetitions(plain, context.latest().expand(2, -1)) - plain
    assert (gained[:, 30:] >= 0.5 - 1e-4).all()


def test_a_vocabulary_grows_to_a_limit(monkeypatch):
    monkeypatch.setattr(candidate_generator, "_EXTRA_TOKENS", 4)
    monkeypatch.setattr(candidate_generator, "_CONTEXT_TOKENS", 8)
    target = tiny_target()
    context = head_of(new_drafter(target, draft_vocab_size=30), target)
    context.extend(torch.arange(VOCAB))
    context.extend(torch.arange(VOCAB))
    assert context.vocab_ids.shape[0] == 34 and len(context) == 2 * VOCAB
    logits = torch.zeros(1, 34)
    gained = context.prefer_repetitions(logits, context.latest())[0].nonzero()[:, 0]
    assert 1 <= len(gained) <= 8


def test_a_head_with_weights_for_its_own_vocabulary_stays_as_it_is():
    class OwnHead(TargetHead):
        def for_tokens(self, token_ids):
            return None

    target = tiny_target()
    head = OwnHead(new_drafter(target, draft_vocab_size=30), target)
    context = ContextHead(head, BONUSES, VOCAB, torch.device("cpu"))
    context.extend(torch.arange(VOCAB))
    assert context.vocab_ids.tolist() == head.vocab_ids.tolist()
    logits = torch.zeros(1, 30)
    assert (context.prefer_repetitions(logits, context.latest()) >= 0.5).all()


@pytest.mark.parametrize("block_size", [1, 2])
def test_a_repetition_becomes_likely(block_size):
    """A path of the tree follows what the text repeats, also in the middle of a block and behind the first pass."""
    target = tiny_target()
    drafter = new_drafter(target, block_size=block_size, num_lstm_layers=0, draft_vocab_size=30)
    tokens = torch.tensor([[*range(40, 50), *range(1, 9), *range(40, 44)]])
    found = {}
    for bonuses in ([], [0.0, 30.0]):
        options = DraftOptions(
            num_assistant_tokens=8,
            num_draft_passes=4 // block_size,
            assistant_confidence_threshold=0.0,
            prompt_lookup_num_tokens=0,
            context_bonuses=bonuses,
        )
        generator = FalconCandidateGenerator(drafter, target, options)
        with torch.no_grad():
            generator.commit(torch.randn(1, 21, 32, generator=torch.Generator().manual_seed(0)), tokens[:, 1:])
            tree = generator.propose(tokens, 4)
        deepest = int(tree.depths.argmax())
        found[len(bonuses)] = tree.token_ids[tree.visible[deepest]].tolist()
    assert found[2] == [43, 44, 45, 46, 47] and found[0] != found[2]


MODES = {
    "greedy": {},
    "sampled": {"do_sample": True, "temperature": 0.7},
    "adaptive": {"num_assistant_tokens_schedule": "heuristic", "prompt_lookup_num_tokens": 8},
    "static": {"draft_tree": "static"},
    "one bonus": {"context_bonuses": [3.0]},
}


@pytest.mark.parametrize(
    "mode, rows, sizes",
    one_in(2, MODES, [1, 3], [{"block_size": 1}, {"block_size": 2}, {"block_size": 2, "conditioning_size": 24}]),
)
def test_texts_are_plain_decodings(mode, rows, sizes):
    target = tiny_target()
    drafter = new_drafter(target, draft_vocab_size=30, num_lstm_layers=0, **sizes)
    settings = {"do_sample": False, "max_new_tokens": 24, "pad_token_id": 0, **MODES[mode]}
    own = {name: value for name, value in settings.items() if name not in drafter.draft_option_names}
    ids = torch.cat((random_tokens(rows, 9), random_tokens(rows, 9)), dim=1)
    torch.manual_seed(0)
    expected = target.generate(ids, **own)
    torch.manual_seed(0)
    options = {"context_bonuses": BONUSES, "num_assistant_tokens_schedule": "constant", **settings}
    found = target.generate(ids, assistant_model=drafter, **options)
    assert found.tolist() == expected.tolist()


@pytest.mark.parametrize("draft_vocab_size", [None, 30])
@pytest.mark.parametrize("bonuses", [[], BONUSES])
def test_a_target_whose_head_leaves_out_tokens(draft_vocab_size, bonuses):
    """It reads them, such as the codes of an image, and never writes them."""
    target = new_target("llama")
    head = target.lm_head
    target.lm_head = torch.nn.Linear(head.in_features, 48, bias=False)
    target.lm_head.weight.data = head.weight.data[:48].clone()
    drafter = new_drafter(target, draft_vocab_size=draft_vocab_size, num_lstm_layers=0)
    if draft_vocab_size is not None:
        drafter.set_draft_vocabulary(torch.arange(draft_vocab_size))
    settings = {"do_sample": False, "max_new_tokens": 24, "pad_token_id": 0}
    ids = torch.cat((random_tokens(1, 9), torch.tensor([[50, 60]]), random_tokens(1, 9)), dim=1)
    expected = target.generate(ids, **settings)

    def allowed(row, tokens):
        return list(range(48))

    allowed.is_stateless = True
    for constraint in ({}, {"prefix_allowed_tokens_fn": allowed}):
        options = {"num_assistant_tokens_schedule": "constant", "return_dict_in_generate": True, **constraint}
        output = target.generate(ids, assistant_model=drafter, context_bonuses=bonuses, **options, **settings)
        assert output.sequences.tolist() == expected.tolist() and output.draft_statistics.drafted_tokens > 0


@pytest.mark.parametrize("verification", ["speculative", "multi_root"])
def test_other_verifications_run_with_bonuses(verification):
    target = tiny_target()
    drafter = new_drafter(target, draft_vocab_size=30, num_lstm_layers=0)
    torch.manual_seed(0)
    output = target.generate(
        prompt(9),
        assistant_model=drafter,
        do_sample=True,
        max_new_tokens=24,
        eos_token_id=None,
        verification=verification,
        context_bonuses=BONUSES,
        return_dict_in_generate=True,
    )
    assert output.sequences.shape[1] == 33 and output.draft_statistics.drafted_tokens > 0


@pytest.mark.parametrize("bonuses", [0.5, "1", [-1.0], [float("nan")], [True], ["1"], [1.0] * 10, [100.0]])
def test_wrong_bonuses(bonuses):
    with pytest.raises(ValueError, match="`context_bonuses` is .*: set it to a list of at most 9 numbers"):
        DraftOptions(context_bonuses=bonuses)
