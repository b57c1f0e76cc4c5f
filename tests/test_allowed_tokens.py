# Copyright 2026 The hf_falcon authors. Licensed under the Apache License, Version 2.0.
"""Constrained decoding: the tokens of plain decoding, and no draft token that the processors of the call forbid."""

import sys
from types import SimpleNamespace

import pytest
import torch
from eagle3_models import new_eagle3
from quick import one_in
from tiny_models import SAME_EVERY_ROUND, VOCAB, new_target, prompt, random_tokens, tiny_drafter, tiny_target
from transformers import LogitsProcessor

from hf_falcon import CausalLMDrafter, LookupDrafter
from hf_falcon.core import decoding
from hf_falcon.grammar_processors import IndexTokens, asker

SETTINGS = {
    "greedy": {"do_sample": False},
    "sampled": {"do_sample": True, "top_k": 0, "temperature": 1.2},
    "speculative": {"do_sample": True, "top_k": 0, "verification": "speculative"},
}
OPTIONS = {**SAME_EVERY_ROUND, "num_assistant_tokens": 6, "assistant_confidence_threshold": 0.0}
DRAFTERS = {
    "falcon": lambda target: tiny_drafter(target, 2, 0),
    "conditional": lambda target: tiny_drafter(target, 2, 1, "conditioning"),
    "bonuses": lambda target: tiny_drafter(target, 2, 0, context_bonuses=[0.5, 1.0, 2.0]),
    "static": lambda target: tiny_drafter(target, 2, 0, draft_tree="static"),
    "eagle3": lambda target: new_eagle3(target, draft_vocab_size=40),
    "language model": lambda target: CausalLMDrafter(new_target("llama", seed=3)),
}


def followers(token: int) -> list[int]:
    """What may follow a token: few of all tokens, and not EOS."""
    return [(5 * token + offset) % (VOCAB - 1) for offset in (1, 2, 9)]


class Chain(LogitsProcessor):
    """Keeps a state, and says what it allows without a change of it. It refuses what plain decoding would not ask."""

    def __init__(self, eos: int | None = None):
        self.length, self.eos = 0, eos
        self.asked: list[list[int]] = []

    def allowed(self, token: int) -> list[int]:
        return followers(token) + ([] if self.eos is None else [self.eos])

    def __call__(self, input_ids, scores):
        assert input_ids.shape[1] == (self.length + 1 if self.length else input_ids.shape[1])
        self.length = input_ids.shape[1]
        mask = torch.full_like(scores, -torch.inf)
        tokens = self.allowed(int(input_ids[0, -1]))
        mask[:, tokens] = scores[:, tokens]
        return mask

    def allowed_tokens(self, prefix_ids):
        # Plain decoding has asked for all but the newest token.
        drafted = prefix_ids.tolist()[self.length :]
        for before, token in zip(prefix_ids.tolist()[self.length - 1 :], drafted):
            assert token in self.allowed(before) and token != self.eos
        self.asked.append(drafted)
        return self.allowed(int(prefix_ids[-1]))


class Silent(Chain):
    allowed_tokens = None


def generate(target, ids, drafter=None, processor=None, seed=3, **settings):
    torch.manual_seed(seed)
    more = {"assistant_model": drafter, **OPTIONS} if drafter is not None else {}
    more |= {} if processor is None else {"logits_processor": [processor]}
    settings = {"max_new_tokens": 24, "pad_token_id": 0, "return_dict_in_generate": True, **more, **settings}
    if drafter is None:
        settings.pop("verification", None)
    return target.generate(ids, **settings)


@pytest.fixture
def trees(monkeypatch):
    """All trees of a call, with the newest token of each."""
    seen = []
    verify_rows = decoding.verify_rows

    def spy(drafted, *args):
        seen.extend(drafted)
        return verify_rows(drafted, *args)

    monkeypatch.setattr(decoding, "verify_rows", spy)
    return seen


@pytest.mark.parametrize("kind, setting", one_in(2, DRAFTERS, ["greedy", "sampled"]))
def test_the_tokens_are_those_of_plain_decoding_and_more_of_them_are_drafted(kind, setting):
    target = tiny_target("llama")
    drafter, accepted = DRAFTERS[kind](target), {Chain: 0, Silent: 0}
    for seed in range(3):
        ids = random_tokens(1, 9, seed=seed)
        expected = generate(target, ids, None, Chain(), seed, **SETTINGS[setting]).sequences.tolist()
        for form in accepted:
            processor = form()
            output = generate(target, ids, drafter, processor, seed, **SETTINGS[setting])
            assert output.sequences.tolist() == expected
            accepted[form] += output.draft_statistics.accepted_tokens
            assert bool(processor.asked) == (form is Chain)
    # Of a random drafter, every third token is right where three are allowed.
    assert accepted[Chain] > accepted[Silent]


def test_speculative_sampling_draws_allowed_tokens_only():
    target = tiny_target("llama")
    drafter, accepted = DRAFTERS["falcon"](target), {Chain: 0, Silent: 0}
    for seed in range(4):
        for form in accepted:
            output = generate(target, prompt(9), drafter, form(), seed, **SETTINGS["speculative"])
            accepted[form] += output.draft_statistics.accepted_tokens
            tokens = output.sequences[0].tolist()
            assert all(token in followers(before) for before, token in zip(tokens[8:], tokens[9:]))
    assert accepted[Chain] > accepted[Silent]


def test_no_tree_has_a_forbidden_token_before_an_allowed_one(trees):
    target, ids = tiny_target("llama"), prompt(9)
    generate(target, ids, DRAFTERS["falcon"](target), Chain(), num_assistant_tokens=2, draft_top_k=3, do_sample=False)
    assert sum(len(tree) - 1 for tree in trees) > 8
    for tree in trees:
        tokens, parents = tree.token_ids.tolist(), tree.parents.tolist()
        assert all(token in followers(tokens[parent]) for token, parent in zip(tokens[1:], parents[1:]))


@pytest.mark.parametrize("drafter", [LookupDrafter(), None], ids=["lookup", "falcon"])
def test_what_is_looked_up_is_allowed(trees, drafter):
    """The prompt repeats what the processor forbids."""
    target = tiny_target("llama")
    drafter = drafter or tiny_drafter(target, 2, 0)
    rows = random_tokens(1, 6, seed=1).repeat(1, 4)
    expected = generate(target, rows, None, Chain(), do_sample=False).sequences.tolist()
    lookup = {"prompt_lookup_num_tokens": 6, "draft_top_k": 3, "num_assistant_tokens": 3}
    output = generate(target, rows, drafter, Chain(), do_sample=False, **lookup)
    assert output.sequences.tolist() == expected
    nodes = [
        (tree.token_ids[parent], token)
        for tree in trees
        for token, parent in zip(tree.token_ids[1:].tolist(), tree.parents[1:].tolist())
    ]
    assert all(token in followers(int(before)) for before, token in nodes)
    trees.clear()
    generate(target, rows, drafter, Silent(), do_sample=False, **lookup)
    tokens = [tree.token_ids[1:].tolist() for tree in trees]
    assert any(each and each[0] not in followers(int(tree.token_ids[0])) for each, tree in zip(tokens, trees))


def test_nothing_is_asked_behind_eos():
    """The processor itself fails where it is; and texts end where plain texts end."""
    target, ended = tiny_target("llama"), 0
    for seed in range(6):
        ids, settings = random_tokens(1, 7, seed=seed), {"eos_token_id": VOCAB - 1, **SETTINGS["sampled"]}
        expected = generate(target, ids, None, Chain(VOCAB - 1), seed, **settings).sequences.tolist()
        output = generate(target, ids, DRAFTERS["falcon"](target), Chain(VOCAB - 1), seed, **settings)
        assert output.sequences.tolist() == expected
        ended += expected[0][-1] == VOCAB - 1
    assert ended > 0


@pytest.mark.parametrize("answer", ["fails", "out of range", "nothing", "all", "mask", "short mask", "contradicts"])
def test_an_answer_of_any_kind_changes_no_token(answer, monkeypatch):
    target, ids, warned = tiny_target("llama"), prompt(9), []
    monkeypatch.setattr("hf_falcon.allowed_tokens.logger.warning_once", warned.append)

    class Odd(Chain):
        def allowed_tokens(self, prefix_ids):
            self.asked.append(prefix_ids.tolist())
            if answer == "fails":
                raise RuntimeError("no state")
            mask = torch.zeros(VOCAB + 5, dtype=torch.bool)
            mask[followers(int(prefix_ids[-1]))] = True
            return {
                "out of range": [VOCAB + 3],
                "nothing": [],
                "all": None,
                "mask": mask,
                "short mask": mask[:20],
                "contradicts": torch.tensor([VOCAB - 2]),
            }[answer]

    expected = generate(target, ids, None, Chain(), do_sample=False).sequences.tolist()
    processor = Odd()
    output = generate(target, ids, DRAFTERS["falcon"](target), processor, do_sample=False)
    assert output.sequences.tolist() == expected and output.draft_statistics.rounds > 1
    fails = answer in ("fails", "out of range")
    assert len(warned) == fails and (len(processor.asked) == 1) == fails
    assert not fails or "`allowed_tokens` of a logits processor failed" in warned[0]


@pytest.mark.parametrize("setting", ["greedy", "sampled"])
@pytest.mark.parametrize("is_stateless", [False, True])
def test_a_batch_with_allowed_tokens_of_each_row(setting, is_stateless):
    """A function of the call is asked about drafts only if it says that it keeps no state."""
    target, ids = tiny_target("llama"), random_tokens(3, 8, seed=2)
    asked = []

    def allowed(row, input_ids):
        asked.append((row, input_ids.tolist()))
        return [(each + row) % VOCAB for each in followers(int(input_ids[-1]))]

    allowed.is_stateless = is_stateless
    options = {"prefix_allowed_tokens_fn": allowed, **SETTINGS[setting]}
    expected = generate(target, ids, **options).sequences.tolist()
    plain = {(row, tuple(tokens)) for row, tokens in asked}
    asked.clear()
    output = generate(target, ids, DRAFTERS["falcon"](target), **options)
    assert output.sequences.tolist() == expected and output.draft_statistics.rounds > 0
    drafted = {(row, tuple(tokens)) for row, tokens in asked}
    assert bool(drafted - plain) == is_stateless and drafted >= plain


def test_a_batch_with_a_processor_of_ones_own_is_decoded_plainly():
    """It may look at all rows at once."""

    class Rows(Chain):
        def __call__(self, input_ids, scores):
            return torch.cat([Chain()(row[None], score[None]) for row, score in zip(input_ids, scores)])

    target, ids, processor = tiny_target("llama"), random_tokens(2, 8, seed=2), Rows()
    expected = generate(target, ids, None, Rows(), do_sample=False).sequences.tolist()
    output = generate(target, ids, DRAFTERS["falcon"](target), processor, do_sample=False)
    assert output.sequences.tolist() == expected and not processor.asked


class FakeMatcher:
    """As xgrammar's: the tokens of `followers`, from token 3 on, and the end after EOS."""

    def __init__(self, grammar):
        self.tokens = [3]

    def accept_token(self, token):
        is_right = token in (*followers(self.tokens[-1]), VOCAB - 1)
        self.tokens += [token] * is_right
        return is_right

    def rollback(self, count):
        del self.tokens[len(self.tokens) - count :]

    def is_terminated(self):
        return self.tokens[-1] == VOCAB - 1

    def fill_next_token_bitmask(self, words):
        assert not self.is_terminated()
        bits = [token in followers(self.tokens[-1]) for token in range(VOCAB)]
        for word in range(VOCAB // 32):
            value = sum(bit << place for place, bit in enumerate(bits[32 * word : 32 * word + 32]))
            words[0, word] = value - 2**32 if value >= 2**31 else value


class FakeIndex:
    """As that of outlines-core; a state is the last token."""

    def get_initial_state(self):
        return 3

    def get_next_state(self, state, token):
        return token if token in followers(state) else None

    def get_allowed_tokens(self, state):
        return followers(state)


@pytest.mark.parametrize("package", ["xgrammar", "outlines with xgrammar", "outlines"])
def test_processors_of_xgrammar_and_outlines_answer_apart_from_their_state(package, monkeypatch):
    """With stand-ins for the packages, by the public attributes that are read."""
    fake = SimpleNamespace(
        GrammarMatcher=FakeMatcher, allocate_token_bitmask=lambda rows, size: torch.zeros(rows, size // 32).int()
    )
    monkeypatch.setitem(sys.modules, "xgrammar", fake)
    grammar = SimpleNamespace(tokenizer_info=SimpleNamespace(vocab_size=VOCAB))
    name, module, fields = {
        "xgrammar": ("LogitsProcessor", "xgrammar.contrib.hf", {"compiled_grammars": [grammar]}),
        "outlines with xgrammar": (
            "XGrammarLogitsProcessor",
            "outlines.backends.xgrammar",
            {"compiled_grammar": grammar},
        ),
        "outlines": ("OutlinesCoreLogitsProcessor", "outlines.backends.outlines_core", {"index": FakeIndex()}),
    }[package]
    processor = type(name, (), {"__module__": module, **fields})()
    ask = asker(processor, 2)
    assert ask is not None
    first = followers(3)[1]

    def answer(*tokens):
        found = ask(torch.tensor([8, 8, *tokens]))
        return None if found is None else found.nonzero()[:, 0].tolist()

    # Longer, back, another branch, a text that the grammar has not, and from the beginning.
    assert answer(first) == sorted(followers(first))
    assert answer(first, followers(first)[0]) == sorted(followers(followers(first)[0]))
    assert answer() == sorted(followers(3)) and answer(followers(3)[2]) == sorted(followers(followers(3)[2]))
    assert answer(first, 0) is None and answer(first, VOCAB - 1) is None
    assert answer() == sorted(followers(3))
    # A subclass may differ.
    assert asker(type("Other", (type(processor),), {"__module__": module})(), 2) is None


def test_an_index_is_asked_once_for_each_token():
    class Counting(FakeIndex):
        asked = 0

        def get_next_state(self, state, token):
            self.asked += 1
            return super().get_next_state(state, token)

    index, tokens = Counting(), [3]
    ask = IndexTokens(index, 1)
    for _ in range(30):
        tokens.append(followers(tokens[-1])[0])
        assert ask(torch.tensor(tokens)).nonzero()[:, 0].tolist() == sorted(followers(tokens[-1]))
        # Another branch.
        assert ask(torch.tensor([*tokens[:-1], followers(tokens[-2])[1]])) is not None
    assert index.asked <= 90
