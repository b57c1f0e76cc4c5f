# Copyright 2026 The hf_falcon authors. Licensed under the Apache License, Version 2.0.
"""The drafter's two forwards agree, its branches do not see each other, and rejected ones leave no trace."""

import math

import pytest
import torch
import torch.nn.functional as F
from tiny_models import EXTRAS, HIDDEN, new_drafter, prompt, random_tokens, tiny_drafter
from utilities import close

from hf_falcon import DraftOptions, DraftTree, FalconCandidateGenerator
from hf_falcon.core import candidate_generator, draft_session
from hf_falcon.core import drafter as drafter_module
from hf_falcon.core.policy import AcceptanceStats, DraftDecision, DraftPolicy
from hf_falcon.core.tree import ancestor_mask
from hf_falcon.training.features import target_features

SHAPES = [(k, layers) for k in (1, 2, 3, 4) for layers in (0, 1, 2)]
DYNAMIC = {"num_assistant_tokens": 24, "draft_width": 4, "draft_top_k": 3, "assistant_confidence_threshold": 0.0}


class Drafting:
    """A candidate generator over one sequence, which records what each draft pass was given and predicted."""

    def __init__(self, target, monkeypatch=None, first_position=0, options=None, length=40, **drafter_changes):
        self.drafter = new_drafter(target, **drafter_changes)
        self.size = self.drafter.config.block_size
        options = DraftOptions(**{**DYNAMIC, "num_draft_passes": 3, **(options or {})})
        self.generator = FalconCandidateGenerator(self.drafter, target, options)
        self.first_position = first_position
        self.tokens = random_tokens(1, length + 1)
        valid = torch.ones_like(self.tokens, dtype=torch.bool)
        self.features = target_features(target, self.tokens, valid, self.drafter.config.feature_layers)
        self.predictions, self.drafted = [], []
        if monkeypatch is not None:
            self._record(monkeypatch)

    def _record(self, monkeypatch):
        run_layers = self.drafter.run_layers

        def recorded_layers(fused, ends, positions, mask, cache=None):
            predicted = run_layers(fused, ends, positions, mask, cache)
            if cache is not None:
                self.predictions.append(predicted.view(-1, self.size, HIDDEN) if self.drafted else predicted)
            return predicted

        monkeypatch.setattr(self.drafter, "run_layers", recorded_layers)
        grow = self.generator._grow

        def recorded_grow(*args):
            drafted = grow(*args)
            self.drafted += [] if drafted is None else [drafted]
            return drafted

        monkeypatch.setattr(self.generator, "_grow", recorded_grow)

    def commit(self, start, end):
        with torch.no_grad():
            self.generator.commit(
                self.features[:, start:end], self.tokens[:, start + 1 : end + 1], self.first_position
            )
        return self.generator._block

    def propose(self, max_depth=100):
        with torch.no_grad():
            return self.generator.propose(
                self.tokens[:, : self.generator._next_position - self.first_position + 1], max_depth
            )

    def whole(self, features, next_tokens):
        """The training forward, cut into blocks from the right."""
        length = features.shape[1]
        blocks = ((torch.arange(length) - length) // self.size)[None] + length
        positions = self.first_position + torch.arange(length)[None]
        with torch.no_grad():
            return self.drafter(features, self.generator.head.embed(next_tokens), blocks, positions)

    def check_branches(self, known):
        """Every block of every later pass, against the training forward over the whole branch that leads to it."""
        predictions = [self.generator._block, *self.predictions[-len(self.drafted) :]]
        for number, drafted in enumerate(self.drafted, start=1):
            for branch in range(drafted.blocks.shape[0]):
                features, tokens, block = [], [], branch
                for earlier in range(number, 0, -1):
                    found = self.drafted[earlier - 1]
                    tokens.insert(0, found.token_ids[block])
                    features.insert(0, found.states[block])
                    block = int(found.blocks[block])
                    predicted = predictions[earlier - 1][block]
                    before = self.drafted[earlier - 2].token_ids[block, -1] if earlier > 1 else self.tokens[0, known]
                    previous = torch.cat((before[None], tokens[0][:-1]))
                    with torch.no_grad():
                        expected = self.drafter.condition(predicted, self.generator.head.embed(previous))
                    close(features[0], expected)
                expected = self.whole(
                    torch.cat((self.features[:, :known], widened(torch.cat(features)[None], self.features)), dim=1),
                    torch.cat((self.tokens[:, 1 : known + 1], torch.cat(tokens)[None]), dim=1),
                )
                close(predictions[number][branch], expected[0, -self.size :])


def widened(predicted, features):
    """Predictions as wide as `features`: to the drafter, no outputs of the target's layers are outputs of zero."""
    return F.pad(predicted, (0, features.shape[-1] - predicted.shape[-1]))


@pytest.mark.parametrize("block_size, lstm_layers", SHAPES)
@pytest.mark.parametrize("anchor", [True, False])
def test_forwards_agree(target, monkeypatch, block_size, lstm_layers, anchor):
    drafting = Drafting(
        target, monkeypatch, block_size=block_size, num_lstm_layers=lstm_layers, block_anchor=anchor, first_position=3
    )
    known = 13  # the first block is short for k = 2, 3 and 4
    expected = drafting.whole(drafting.features[:, :known], drafting.tokens[:, 1 : known + 1])
    close(drafting.commit(0, known), expected[:, -block_size:])
    # Not only the last block: later rounds read all of these rows from the cache.
    close(drafting.predictions[0], expected)

    drafting.propose()
    assert [len(found.blocks) for found in drafting.drafted] == [min(3**block_size, 4), 4]
    drafting.check_branches(known)


@pytest.mark.parametrize("block_size, lstm_layers", [(2, 0), (3, 2), (4, 1)])
@pytest.mark.parametrize("option", [option for option in EXTRAS.values() if option])
def test_forwards_agree_with_options(target, monkeypatch, block_size, lstm_layers, option):
    drafting = Drafting(target, monkeypatch, block_size=block_size, num_lstm_layers=lstm_layers, **option)
    expected = drafting.whole(drafting.features[:, :13], drafting.tokens[:, 1:14])
    close(drafting.commit(0, 13), expected[:, -block_size:])
    drafting.propose()
    assert len(drafting.drafted) == 2
    drafting.check_branches(13)


@pytest.mark.parametrize("conditioning_size", [0, 24])
def test_siblings_share_their_children_only_without_conditioning(target, monkeypatch, conditioning_size):
    drafting = Drafting(target, monkeypatch, block_size=2, conditioning_size=conditioning_size)
    drafting.commit(0, 13)
    drafting.propose()
    tokens, features = drafting.drafted[0].token_ids[:, 0], drafting.drafted[0].states[:, 1]
    sibling = int((tokens != tokens[0]).nonzero()[0])
    assert torch.equal(features[0], features[sibling]) is (conditioning_size == 0)


@pytest.mark.parametrize("heads, kv_heads, head_dim", [(4, 4, None), (4, 1, None), (3, 1, 10)])
@pytest.mark.parametrize("layers", [1, 3])
def test_forwards_agree_in_other_shapes(target, monkeypatch, heads, kv_heads, head_dim, layers):
    drafting = Drafting(
        target,
        monkeypatch,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        head_dim=head_dim,
        num_hidden_layers=layers,
        block_size=2,
        draft_vocab_size=20,
        options={"draft_tree": "static"},
    )
    expected = drafting.whole(drafting.features[:, :9], drafting.tokens[:, 1:10])
    close(drafting.commit(0, 9), expected[:, -2:])
    drafting.propose()
    assert drafting.drafted
    drafting.check_branches(9)


@pytest.mark.parametrize("block_size", [1, 2, 3, 4])
@pytest.mark.parametrize("known", [1, 2, 3, 5, 8, 17, 40])
def test_a_long_prompt_is_committed_in_chunks(target, monkeypatch, block_size, known):
    monkeypatch.setattr(draft_session, "_PREFILL_ROWS", 6)
    drafting = Drafting(target, block_size=block_size)
    found = drafting.commit(0, known)
    if known < block_size:
        assert found is None and len(drafting.propose()) == 1
        return
    expected = drafting.whole(drafting.features[:, :known], drafting.tokens[:, 1 : known + 1])
    close(found, expected[:, -block_size:])


@pytest.mark.parametrize("block_size, num_lstm_layers", [(1, 0), (2, 1), (3, 2)])
def test_of_a_long_prompt_the_end_is_read(target, monkeypatch, block_size, num_lstm_layers):
    shape = {"block_size": block_size, "num_lstm_layers": num_lstm_layers}
    end = Drafting(target, first_position=23, **shape)
    expected = [end.commit(23, 30), end.commit(30, 40)]
    monkeypatch.setattr(drafter_module, "_PROMPT_POSITIONS", 7)
    long = Drafting(target, **shape)
    # What comes after the prompt is read in any case.
    found = [long.commit(0, 30), long.commit(30, 40)]
    for each, other in zip(found, expected, strict=True):
        assert torch.equal(each, other)


def commit_in_pieces(drafting, pieces):
    start = 0
    for piece in pieces:
        found = drafting.commit(start, start + piece)
        drafting.propose()  # as in decoding: what it drafted must leave no trace
        start += piece
    return found, start


@pytest.mark.parametrize(
    "block_size, pieces, changes",
    [
        (1, [5, 1, 3, 2, 1, 4], {}),
        # Pieces of whole blocks are cut as the whole sequence is.
        (2, [5, 2, 4, 2], {}),
        (3, [7, 3, 6, 3], {}),
        (4, [6, 4, 4, 8], {}),
        # Without an anchor the keys and values of the first layer do not depend on the cut.
        (2, [5, 1, 3, 2, 1, 1], {"num_hidden_layers": 1, "block_anchor": False}),
        (3, [1, 1, 1, 1, 2, 5, 1], {"num_hidden_layers": 1, "block_anchor": False}),
        (4, [2, 1, 3, 2, 1, 4], {"num_hidden_layers": 1, "block_anchor": False}),
    ],
)
def test_committing_in_pieces_is_exact_where_the_cut_does_not_matter(target, block_size, pieces, changes):
    drafting = Drafting(target, block_size=block_size, **changes)
    found, known = commit_in_pieces(drafting, pieces)
    expected = drafting.whole(drafting.features[:, :known], drafting.tokens[:, 1 : known + 1])
    close(found, expected[:, -block_size:])


@pytest.mark.parametrize("block_size", [2, 3, 4])
def test_what_earlier_cuts_change(target, record_property, block_size):
    """
    In decoding, most committed positions were computed under earlier cuts. The features and the LSTM state are the
    same, and so is all of the newest block but what it reads from the cache: a small difference, not zero.
    """
    differences, drifts = [], []
    for seed in range(8):
        drafting = Drafting(target, block_size=block_size, seed=seed)
        torch.manual_seed(seed)
        found, known = commit_in_pieces(drafting, [5, *torch.randint(1, 2 * block_size, (6,)).tolist()])
        at_once = Drafting(target, block_size=block_size, seed=seed)
        expected = at_once.commit(0, known)
        for state, expected_state in zip(
            drafting.generator.session._lstm_state, at_once.generator.session._lstm_state
        ):
            close(state, expected_state)
        spread = drafting.drafter.feature_std
        differences.append(((found - expected) / spread).pow(2).mean())
        drifts.append(((expected - drafting.drafter.feature_mean) / spread).pow(2).mean())
    relative = math.sqrt(sum(differences) / sum(drifts))
    record_property("relative_difference", relative)
    print(f"k={block_size}: earlier cuts change the prediction by {100 * relative:.1f} % (random drafter)")
    assert 1e-4 < relative < 0.5


def test_rejected_branches_leave_no_trace(target):
    drafting, other = Drafting(target, block_size=2), Drafting(target, block_size=2)
    drafting.commit(0, 9), other.commit(0, 9)
    first, second = drafting.propose(), drafting.propose()
    assert torch.equal(first.token_ids, second.token_ids) and torch.equal(first.parents, second.parents)
    drafting.propose(max_depth=3)
    assert torch.equal(drafting.commit(9, 12), other.commit(9, 12))
    for state, expected in zip(drafting.generator.session._lstm_state, other.generator.session._lstm_state):
        assert torch.equal(state, expected)
    assert torch.equal(drafting.propose().token_ids, other.propose().token_ids)


def _committed(drafting: Drafting, length: int) -> list[torch.Tensor]:
    """Keys and values of the first `length` positions in the drafter's cache."""
    return [part[:, :, :length] for layer in drafting.generator.session._cache._layers for part in layer.parts]


@pytest.mark.parametrize("lstm_layers", [0, 2])
def test_a_branch_is_seen_by_its_descendants_alone(target, monkeypatch, lstm_layers):
    # The tree is static: the shape of what follows must not depend on the predictions.
    options = {"draft_tree": "static", "num_assistant_tokens": 24, "num_draft_passes": 3, "draft_top_k": 3}
    drafting = Drafting(target, monkeypatch, options=options, block_size=2, num_lstm_layers=lstm_layers)
    drafting.commit(0, 9)
    drafting.propose()
    before, parents = drafting.predictions[1:], [found.blocks for found in drafting.drafted]
    cached = [states.clone() for states in _committed(drafting, 9)]
    width = len(parents[0])
    assert width > 2 and len(parents[1]) > 1

    for changed in range(width):
        drafting.drafted.clear(), drafting.predictions.clear()
        fuse, calls = drafting.drafter.fuse, []

        def changed_fuse(*args, fuse=fuse, calls=calls, changed=changed):
            fused, state = fuse(*args)
            calls.append(None)
            if len(calls) == 1:
                fused = fused.clone()
                fused[changed] += torch.randn(2, HIDDEN)
            return fused, state

        monkeypatch.setattr(drafting.drafter, "fuse", changed_fuse)
        drafting.propose()
        monkeypatch.setattr(drafting.drafter, "fuse", fuse)
        affected = torch.arange(width) == changed
        for expected, found, blocks in zip(before, drafting.predictions, [None, parents[1]]):
            affected = affected if blocks is None else affected[blocks]
            differs = (found - expected).abs().amax(dim=(1, 2))
            assert (differs[affected] > 1e-2).all() and (differs[~affected] < 1e-6).all()
    assert all(map(torch.equal, _committed(drafting, 9), cached))


def test_a_drafter_that_overflows_still_drafts_a_tree(target):
    drafting = Drafting(target, block_size=2, options={"num_draft_passes": 2})
    drafting.commit(0, 9)
    drafting.generator._block[0, 1] = math.nan
    tree = drafting.propose()
    nodes = torch.arange(1, len(tree))
    assert len(tree) == 25 and (tree.parents[1:] < nodes).all()


def test_positions_after_padding_count_from_zero(target):
    drafting, shifted = Drafting(target, block_size=2), Drafting(target, block_size=2, first_position=7)
    # Rotary attention sees distances alone, so what the whole context shares changes nothing.
    close(drafting.commit(0, 9), shifted.commit(0, 9), 1e-4)


def test_layers_that_the_target_lacks(target):
    with pytest.raises(ValueError, match=r"`feature_layers` is \[2\], but LlamaForCausalLM has 2 decoder layers"):
        FalconCandidateGenerator(new_drafter(target, feature_layers=[2]), target)


def test_what_waits_for_a_first_commit_is_not_copied_in_every_round(target, monkeypatch):
    """While drafting is paused; and it does not grow without end."""
    monkeypatch.setattr(candidate_generator, "_MOST_UNCOMMITTED", 16)
    drafter = tiny_drafter(target)
    generator = FalconCandidateGenerator(drafter, target)

    class Paused(DraftPolicy):
        def decide(self, likely=0.0):
            return DraftDecision(draft=False)

    policy = Paused(DraftOptions(), AcceptanceStats())
    width, ids = target.config.hidden_size, prompt(20)
    generator.start(torch.zeros(1, 19, width), 0, 0, policy)
    pieces = []
    for _ in range(40):
        generator.draft(ids, 4)
        pieces.append(len(generator._uncommitted))
        generator._uncommitted.append(torch.zeros(1, 1, width))
        generator._waiting += 1
    assert max(pieces) > 10 and sum(each.shape[1] for each in generator._uncommitted) <= 2 * 16 + 1


@torch.no_grad()
def test_a_chain_is_the_path_of_which_most_tokens_are_expected(target, monkeypatch):
    parents, depths = torch.tensor([0, 0, 0, 1, 2]), torch.tensor([0, 1, 1, 2, 2])
    tree = DraftTree(torch.tensor([5, 11, 12, 13, 14]), parents, depths, ancestor_mask(parents, 2))
    # The first path is as deep as the second one.
    tree.log_probs = torch.tensor([1.0, 0.1, 0.9, 0.09, 0.8]).log()
    ids = prompt(9)
    with FalconCandidateGenerator(tiny_drafter(target), target) as generator:
        monkeypatch.setattr(generator, "propose", lambda *args: tree)
        target(ids[:, :-1])
        candidates, _ = generator.get_candidates(ids)
    assert candidates.tolist() == [[*ids[0].tolist(), 12, 14]]


@torch.no_grad()
def test_a_prompt_of_embeddings_that_is_shorter_than_the_text_behind_it(target):
    """Where drafting begins late, after more tokens than the prompt has."""
    generator = FalconCandidateGenerator(tiny_drafter(target), target)
    width, policy = target.config.hidden_size, DraftPolicy(DraftOptions(), AcceptanceStats())
    generator.start(torch.randn(1, 10, width), 0, 0, policy, prompt_embeds=torch.randn(1, 3, width))
    assert len(generator.propose(random_tokens(1, 8), 4)) > 1
