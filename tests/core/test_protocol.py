# Copyright 2026 The hf_falcon authors. Licensed under the Apache License, Version 2.0.
"""The protocol between the decoding loop and a drafter, with the drafter of docs/drafters.md and others as small."""

from types import SimpleNamespace

import pytest
import simulated_device
import torch
from device_cases import MODES, Simulated, check, rounds
from eagle3_models import right_eagle3
from tiny_models import VOCAB, new_target, prompt, random_tokens, tiny_target, tiny_tokenizer
from toy_drafter import BigramConfig, BigramDrafter, toy_drafter
from transformers import GenerationConfig

import hf_falcon
from hf_falcon import AutoDrafter, DraftModel, DraftOptions, FalconCandidateGenerator, StaticTree
from hf_falcon.core.interfaces import DrafterAcceleration
from hf_falcon.cpu.backend import CpuBackend

SETTINGS = {
    "greedy": {},
    "sampled": {"do_sample": True, "top_k": 0},
    "adaptive": {"num_assistant_tokens_schedule": "heuristic", "prompt_lookup_num_tokens": 8},
    "static tree": {"draft_tree": "static"},
    "own tree": {"draft_tree": [[0], [1], [0, 0], [0, 1], [0, 0, 2]]},
    "streamed features": {"output_hidden_states": True, "output_attentions": True},
}


def generate(target, ids, drafter=None, **settings):
    torch.manual_seed(5)
    settings = {"max_new_tokens": 24, "do_sample": False, "pad_token_id": 0, **settings}
    if drafter is None:
        settings = {name: value for name, value in settings.items() if name not in DraftModel.draft_option_names}
    return target.generate(ids, assistant_model=drafter, return_dict_in_generate=True, **settings)


@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize("mode", SETTINGS)
def test_tokens_are_plain_decodings(mode, rows):
    target = tiny_target("qwen3")
    output = generate(target, random_tokens(rows, 12), toy_drafter(target), **SETTINGS[mode])
    assert output.sequences.tolist() == generate(target, random_tokens(rows, 12), **SETTINGS[mode]).sequences.tolist()
    if rows > 1 and "output_hidden_states" in SETTINGS[mode]:
        # Such a batch is decoded plainly.
        assert output.draft_statistics is None
    else:
        assert output.draft_statistics.drafted_tokens > 0


def test_the_toy_learns():
    """A target whose tokens follow from the token before repeats itself, and the drafter knows what comes then."""
    target, _ = right_eagle3()
    output = generate(target, prompt(9), toy_drafter(target), max_new_tokens=40)
    assert output.sequences.tolist() == generate(target, prompt(9), max_new_tokens=40).sequences.tolist()
    assert output.draft_statistics.tokens_per_round > 2 and len(output.draft_statistics.accepted_by_depth) > 2


@pytest.mark.parametrize("verification", ["speculative", "multi_root"])
def test_other_rules_of_verification(verification):
    target, _ = right_eagle3()
    settings = {"do_sample": True, "verification": verification, "max_new_tokens": 30}
    output = generate(target, prompt(9), toy_drafter(target), top_k=1, **settings)
    assert output.sequences.tolist() == generate(target, prompt(9), max_new_tokens=30).sequences.tolist()
    assert output.draft_statistics.tokens_per_round > 1.5
    assert generate(target, prompt(9), toy_drafter(target), temperature=2.0, **settings).sequences.shape == (1, 39)


@pytest.mark.parametrize("mode", MODES)
def test_modes_on_a_device(mode):
    with Simulated() as device:
        target = new_target()
        settings = {**MODES[mode], **({"tokenizer": tiny_tokenizer()} if "stop_strings" in MODES[mode] else {})}
        check(device, device.put(target), device.put(toy_drafter(target)), prompt(9), **settings)


@pytest.mark.parametrize("rows", [1, 2])
def test_synchronisations_of_a_round(rows):
    """One brings the draft to the host, and one the target's choices."""
    target = new_target()
    drafter = toy_drafter(target)
    simulated_device.move(target), simulated_device.move(drafter)
    settings = {"eos_token_id": [VOCAB], "pad_token_id": 0}
    assert max(syncs for syncs, _ in rounds(target, drafter, random_tokens(rows, 9), **settings)) <= 2


class Recorded:
    """A session that notes each call, and checks it."""

    is_conditional = False

    def __init__(self, session, feature_size):
        self.session, self.feature_size = session, feature_size
        self.calls, self.known, self.width = [], 0, 0

    def commit(self, features, next_token_ids, first_position=0, prompt_embeds=None):
        new = features.shape[1]
        assert features.shape == (1, new, self.feature_size) and next_token_ids.shape == (1, new) and new > 0
        assert next_token_ids.dtype == torch.long and prompt_embeds is None
        self.calls.append("commit")
        self.known, self.width = self.known + new, 1
        return self.session.commit(features, next_token_ids, first_position, prompt_embeds)

    def rewind(self):
        self.calls.append("rewind")
        self.width = 1

    def extend(self, drafted):
        width = len(drafted.blocks)
        assert drafted.token_ids.shape == (width, 1) and drafted.states.shape == (width, 1, VOCAB)
        assert 0 <= int(drafted.blocks.min()) and int(drafted.blocks.max()) < self.width
        self.calls.append("extend")
        self.width = width
        return self.session.extend(drafted)

    def condition(self, states, previous_token_ids):
        raise AssertionError("its states do not depend on the token before")


@pytest.mark.parametrize("layers", [[], [1], [-1, 0]])
@pytest.mark.parametrize("rows", [1, 2])
def test_calls_of_a_session(layers, rows):
    """Every position is committed once, with the features that were asked for; each round of passes begins anew."""
    target, drafter, made = tiny_target(), toy_drafter(tiny_target()), []
    drafter.config.feature_layers = layers

    def start_session(head, acceleration):
        made.append(Recorded(BigramDrafter.start_session(drafter, head, acceleration), 32 * (1 + len(layers))))
        return made[-1]

    drafter.start_session = start_session
    output = generate(target, random_tokens(rows, 9), drafter)
    assert output.sequences.tolist() == generate(target, random_tokens(rows, 9)).sequences.tolist()
    assert len(made) == rows
    for session in made:
        # All but the newest token, which has no feature yet, and the tokens of the last round.
        text, committed = output.sequences.shape[1], session.known
        assert text - 1 - drafter.generation_config.num_draft_passes <= committed < text
        calls = session.calls
        assert calls[0] == "commit" and "extend" in calls
        for before, call in zip(calls, calls[1:]):
            assert call != "extend" or before in ("rewind", "extend")
            assert call != "rewind" or before == "commit"


def test_positions_and_tokens_of_commits():
    """Token i + 1 comes with the feature of position i."""
    target, drafter, seen = tiny_target(), toy_drafter(tiny_target()), []
    ids = prompt(9)

    def start_session(head, acceleration):
        session = BigramDrafter.start_session(drafter, head, acceleration)
        commit = session.commit

        def recorded(features, next_token_ids, first_position=0, prompt_embeds=None):
            seen.append((features, next_token_ids))
            return commit(features, next_token_ids, first_position, prompt_embeds)

        session.commit = recorded
        return session

    drafter.start_session = start_session
    text = generate(target, ids, drafter).sequences
    features, tokens = (torch.cat(each, dim=1) for each in zip(*seen))
    known = features.shape[1]
    assert tokens.tolist() == text[:, 1 : known + 1].tolist()
    with torch.no_grad():
        expected = target.model(text[:, :known]).last_hidden_state
    torch.testing.assert_close(features, expected, rtol=1e-4, atol=1e-4)


class Silent:
    """A session that knows too little to draft, ever."""

    is_conditional = False

    def commit(self, *args, **kwargs):
        return None

    def rewind(self):
        raise AssertionError("nothing was drafted")

    extend = condition = rewind


def test_a_session_that_drafts_nothing():
    target, drafter = tiny_target(), toy_drafter(tiny_target())
    drafter.start_session = lambda head, acceleration: Silent()
    for lookup in (0, 8):
        output = generate(target, prompt(9), drafter, prompt_lookup_num_tokens=lookup)
        assert output.sequences.tolist() == generate(target, prompt(9)).sequences.tolist()
        assert (output.draft_statistics.drafted_tokens > 0) is (lookup > 0)


class ChainHead:
    """Scores so that token t is followed by t + 1; states are tokens, or the place in the block where it is known."""

    linear = vocab_ids = None
    draft_vocab_size = VOCAB

    def logits(self, states):
        return 9.0 * torch.nn.functional.one_hot((states[..., 0].long() + 1) % VOCAB, VOCAB)

    def to_target_ids(self, draft_ids):
        return draft_ids


class ChainSession:
    """Blocks of three tokens, each of which depends on the token before."""

    is_conditional = True

    def __init__(self):
        self.conditions = 0

    def commit(self, features, next_token_ids, first_position=0, prompt_embeds=None):
        return torch.full((1, 3, 1), -99.0)

    def rewind(self):
        pass

    def extend(self, drafted):
        assert drafted.token_ids.shape[1] == 3
        # What led to the tokens is the token before each of them.
        assert torch.equal(drafted.states[:, 1:, 0].long(), drafted.token_ids[:, :-1])
        return torch.full((len(drafted.blocks), 3, 1), -99.0)

    def condition(self, states, previous_token_ids):
        assert states.shape == (len(previous_token_ids), 1) and (states == -99.0).all()
        self.conditions += 1
        return previous_token_ids[:, None].float()


class ChainDrafter:
    """A drafter that is no network, for candidate generators."""

    device = torch.device("cpu")
    max_draft_passes = None

    def __init__(self):
        self.config = SimpleNamespace(block_size=3, feature_layers=[])
        self.generation_config = GenerationConfig()

    def check_target(self, target):
        pass

    def make_head(self, target):
        return ChainHead()

    def start_session(self, head, acceleration):
        return ChainSession()


@torch.no_grad()
@pytest.mark.parametrize("tree", ["static", [[0, 0, 0, 0, 0, 0], [0], [0, 0], [0, 0, 0], [0, 0, 0, 0], [0] * 5]])
def test_conditional_blocks_of_a_drafter_that_is_no_network(tree):
    drafter, target = ChainDrafter(), tiny_target()
    options = DraftOptions(draft_tree=tree, draft_top_k=1, num_assistant_tokens=6, num_draft_passes=2)
    generator = FalconCandidateGenerator(drafter, target, options)
    generator.commit(torch.zeros(1, 4, 32), torch.tensor([[5, 6, 7, 40]]))
    drafted = generator.propose(torch.tensor([[1, 5, 6, 7, 40]]), max_depth=6)
    assert drafted.token_ids.tolist() == [40, 41, 42, 43, 44, 45, 46]
    assert generator.session.conditions == 6
    assert type(generator._acceleration) is DrafterAcceleration
    # Transformers' own loop takes the path.
    assert type(CpuBackend().for_drafter(drafter, target)) is DrafterAcceleration


def test_a_limit_of_passes(monkeypatch):
    """A drafter that runs one pass is never asked for another, whatever the options are."""
    target, drafter = tiny_target(), toy_drafter(tiny_target(), num_draft_passes=5)
    monkeypatch.setattr(BigramDrafter, "max_draft_passes", 1)

    def start_session(head, acceleration):
        session = BigramDrafter.start_session(drafter, head, acceleration)
        session.extend = None
        return session

    drafter.start_session = start_session
    for settings in ({}, {"draft_tree": "static"}, {"num_assistant_tokens_schedule": "heuristic"}):
        output = generate(target, prompt(9), drafter, **settings)
        assert output.sequences.tolist() == generate(target, prompt(9)).sequences.tolist()
    with pytest.raises(ValueError, match="`draft_tree` is 2 deep, but the drafter proposes 1 tokens a round"):
        generate(target, prompt(9), drafter, draft_tree=[[0], [0, 0]])
    with pytest.raises(ValueError, match="`verification` is 'multi_root'"):
        generate(target, prompt(9), drafter, do_sample=True, verification="multi_root")


def test_a_drafter_of_an_own_class_is_saved_and_loaded(tmp_path):
    target, drafter = tiny_target(), toy_drafter(tiny_target(), num_assistant_tokens=7)
    torch.nn.init.normal_(drafter.prior)
    drafter.save_pretrained(tmp_path)
    found = BigramDrafter.from_pretrained(tmp_path)
    assert torch.equal(found.prior, drafter.prior) and found.generation_config.num_assistant_tokens == 7
    assert found.config.vocab_size == VOCAB
    with pytest.raises(ValueError, match=r"\['BigramDrafter'\], which is no drafter of a known method"):
        AutoDrafter.from_pretrained(tmp_path)
    output = generate(target, prompt(9), found)
    assert output.sequences.tolist() == generate(target, prompt(9)).sequences.tolist()
    assert output.draft_statistics.drafted_tokens > 0


def test_a_target_of_another_vocabulary():
    drafter = BigramDrafter(BigramConfig(vocab_size=9))
    with pytest.raises(ValueError, match="`vocab_size` is 9, but the target has 64"):
        generate(tiny_target(), prompt(9), drafter)


def test_attach_takes_a_drafter_of_an_own_class():
    target = new_target()
    expected = generate(target, prompt(9)).sequences
    hf_falcon.attach(target, toy_drafter(target))
    output = target.generate(
        prompt(9), max_new_tokens=24, do_sample=False, pad_token_id=0, return_dict_in_generate=True
    )
    assert output.sequences.tolist() == expected.tolist() and output.draft_statistics.rounds > 0


def test_what_a_subclass_has_to_add():
    class Empty(DraftModel):
        config_class = BigramConfig

    drafter = Empty(BigramConfig(vocab_size=VOCAB))
    for call in (lambda: drafter.make_head(tiny_target()), lambda: drafter.start_session(None, None)):
        with pytest.raises(NotImplementedError, match="Empty has no `(make_head|start_session)`"):
            call()


def test_trees_of_the_protocol_are_the_loops():
    """A tree of an own shape is asked for by ranks that the head has."""
    target = tiny_target()
    with pytest.raises(ValueError, match="`draft_tree` has child rank 64, but the drafter knows 64 tokens"):
        generate(target, prompt(9), toy_drafter(target), draft_tree=[[0], [64]])
    assert StaticTree([[0], [1]], torch.device("cpu")).max_children == 2
