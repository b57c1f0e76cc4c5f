# Copyright 2026 The hf_falcon authors. Licensed under the Apache License, Version 2.0.
"""The drafter: its two forwards agree, branches do not see each other, and it loads only as it was saved."""

import json
import logging
import math

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from tiny_models import HIDDEN, SAME_EVERY_ROUND, VOCAB, new_drafter, new_target, random_tokens, tiny_target
from transformers import AutoConfig, AutoModel, LlamaConfig

from hf_falcon import DraftOptions, FalconCandidateGenerator, FalconDraftConfig, FalconDraftModel
from hf_falcon.core import candidate_generator as candidate_generator_module
from hf_falcon.core import decoding
from hf_falcon.core import target_parts as borrowed_head
from hf_falcon.core.modeling_falcon_draft import block_ends, relaxed_causal_mask
from hf_falcon.core.target_parts import TargetHead, was_trained_for
from hf_falcon.training.features import target_features

SHAPES = [(k, layers) for k in (1, 2, 3, 4) for layers in (0, 1, 2)]
DYNAMIC = {"num_assistant_tokens": 24, "draft_width": 4, "draft_top_k": 3, "assistant_confidence_threshold": 0.0}


@pytest.fixture(scope="module")
def target():
    return tiny_target()


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
        return self.generator._block_features

    def propose(self, max_depth=100):
        with torch.no_grad():
            return self.generator.propose(self.tokens[:, : self.generator._committed + 1], max_depth)

    def whole(self, features, next_tokens):
        """The training forward, cut into blocks from the right."""
        length = features.shape[1]
        blocks = ((torch.arange(length) - length) // self.size)[None] + length
        positions = self.first_position + torch.arange(length)[None]
        with torch.no_grad():
            return self.drafter(features, self.generator.head.embed(next_tokens), blocks, positions)

    def check_branches(self, known):
        """Every block of every later pass, against the training forward over the whole branch that leads to it."""
        predictions = [self.generator._block_features, *self.predictions[-len(self.drafted) :]]
        for number, drafted in enumerate(self.drafted, start=1):
            for branch in range(drafted.blocks.shape[0]):
                features, tokens, block = [], [], branch
                for earlier in range(number, 0, -1):
                    found = self.drafted[earlier - 1]
                    tokens.insert(0, found.token_ids[block])
                    features.insert(0, found.features[block])
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


def close(actual, expected, tolerance=1e-5):
    torch.testing.assert_close(actual, expected, rtol=tolerance, atol=tolerance)


# The training forward and the incremental one.


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
@pytest.mark.parametrize("option", [{"conditioning_size": 24}, {"feature_layers": [1, 0]}])
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
    tokens, features = drafting.drafted[0].token_ids[:, 0], drafting.drafted[0].features[:, 1]
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
    monkeypatch.setattr(candidate_generator_module, "_PREFILL_ROWS", 6)
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
    monkeypatch.setattr(candidate_generator_module, "_PROMPT_ROWS", 7)
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
        for state, expected_state in zip(drafting.generator._lstm_state, at_once.generator._lstm_state):
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
    for state, expected in zip(drafting.generator._lstm_state, other.generator._lstm_state):
        assert torch.equal(state, expected)
    assert torch.equal(drafting.propose().token_ids, other.propose().token_ids)


@pytest.mark.parametrize("lstm_layers", [0, 2])
def test_a_branch_is_seen_by_its_descendants_alone(target, monkeypatch, lstm_layers):
    # The tree is static: the shape of what follows must not depend on the predictions.
    options = {"draft_tree": "static", "num_assistant_tokens": 24, "num_draft_passes": 3, "draft_top_k": 3}
    drafting = Drafting(target, monkeypatch, options=options, block_size=2, num_lstm_layers=lstm_layers)
    drafting.commit(0, 9)
    drafting.propose()
    before, parents = drafting.predictions[1:], [found.blocks for found in drafting.drafted]
    keys = [keys[:, :, :9].clone() for keys in drafting.generator._cache._keys]
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
    for layer, expected in enumerate(keys):
        assert torch.equal(drafting.generator._cache._keys[layer][:, :, :9], expected)


def test_a_drafter_that_overflows_still_drafts_a_tree(target):
    drafting = Drafting(target, block_size=2, options={"num_draft_passes": 2})
    drafting.commit(0, 9)
    drafting.generator._block_features[0, 1] = math.nan
    tree = drafting.propose()
    nodes = torch.arange(1, len(tree))
    assert len(tree) == 25 and (tree.parents[1:] < nodes).all()


def test_positions_after_padding_count_from_zero(target):
    drafting, shifted = Drafting(target, block_size=2), Drafting(target, block_size=2, first_position=7)
    # Rotary attention sees distances alone, so what the whole context shares changes nothing.
    close(drafting.commit(0, 9), shifted.commit(0, 9), 1e-4)


# Masks.


@pytest.mark.parametrize("block_size", [1, 2, 3])
def test_relaxed_causal_mask(block_size):
    torch.manual_seed(0)
    length = 8
    blocks = (torch.arange(length)[None] + torch.tensor([[0], [1], [2]])) // block_size
    valid = torch.arange(length)[None] < torch.tensor([[8], [6], [1]])
    mask, ends = relaxed_causal_mask(blocks, valid), block_ends(blocks)
    assert mask.shape == (3, 1, length, length)
    for b in range(3):
        for row in range(length):
            same = [c for c in range(length) if blocks[b, c] == blocks[b, row]]
            assert ends[b, row] == same[-1]
            for column in range(length):
                sees = column <= row or column in same
                assert mask[b, 0, row, column] == (row == column or (sees and bool(valid[b, column])))


def test_padding_changes_nothing(target):
    drafting = Drafting(target, block_size=3)
    blocks = (torch.arange(12)[None] + 1) // 3
    embeds = drafting.generator.head.embed(drafting.tokens[:, 1:13])
    valid = torch.arange(12)[None] < 8  # ends with a block
    with torch.no_grad():
        short = drafting.drafter(drafting.features[:, :8], embeds[:, :8], blocks[:, :8])
        padded = drafting.drafter(drafting.features[:, :12], embeds, blocks, attention_mask=valid)
    close(padded[:, :8], short)


# Saving and loading.


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("changes", [{}, {"num_lstm_layers": 0, "draft_vocab_size": 20, "block_size": 3}])
def test_round_trip(target, tmp_path, dtype, changes):
    drafter = new_drafter(target, **changes).to(dtype)
    options = {"num_assistant_tokens": 7, "draft_tree": [[0], [1], [0, 0]], "draft_width": 3}
    for name, value in options.items():
        setattr(drafter.generation_config, name, value)
    drafter.save_pretrained(tmp_path)

    names = set(load_file(tmp_path / "model.safetensors"))
    assert names == set(drafter.state_dict())
    assert not any("embed_tokens" in name or "head" in name for name in names)
    found = {path.name for path in tmp_path.iterdir() if path.suffix != ".py"}
    assert found == {"config.json", "custom_generate", "generation_config.json", "model.safetensors"}

    config = AutoConfig.from_pretrained(tmp_path)
    assert type(config) is FalconDraftConfig
    assert config.to_diff_dict() == FalconDraftConfig.from_dict(drafter.config.to_dict()).to_diff_dict()
    features = torch.randn(1, 6, HIDDEN, dtype=dtype)
    blocks = torch.arange(6)[None] // 2
    for loader in (FalconDraftModel, AutoModel):
        loaded = loader.from_pretrained(tmp_path)
        assert type(loaded) is FalconDraftModel and loaded.dtype == dtype
        for name, tensor in drafter.state_dict().items():
            assert torch.equal(loaded.state_dict()[name], tensor), name
        assert torch.equal(loaded.eval()(features, features, blocks), drafter(features, features, blocks))
        given = {**SAME_EVERY_ROUND, **options}
        assert DraftOptions.from_generation_config(loaded.generation_config) == DraftOptions(**given)


def test_saved_in_float32_loaded_in_bfloat16(target, tmp_path):
    drafter = new_drafter(target, draft_vocab_size=20)
    drafter.save_pretrained(tmp_path)
    loaded = FalconDraftModel.from_pretrained(tmp_path, dtype=torch.bfloat16)
    assert loaded.dtype == torch.bfloat16 and loaded.draft_vocab_ids.dtype == torch.int64
    assert torch.equal(loaded.draft_vocab_ids, drafter.draft_vocab_ids)


def edited_checkpoint(folder, target, edit, **config_changes):
    new_drafter(target).save_pretrained(folder)
    file = folder / "model.safetensors"
    tensors = load_file(file)
    edit(tensors)
    save_file(tensors, file, metadata={"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    # As in checkpoints of before these were kept.
    del config["weights_sha256"]
    (folder / "config.json").write_text(json.dumps({**config, **config_changes}))
    return folder


@pytest.mark.parametrize(
    "edit, config_changes, message",
    [
        (lambda t: t.pop("layers.1.mlp.up_proj.weight"), {}, r"missing keys: \['layers.1.mlp.up_proj.weight'\]"),
        (lambda t: t.pop("feature_std"), {}, r"missing keys: \['feature_std'\]"),
        (lambda t: t.update(extra=torch.ones(1)), {}, r"unexpected keys: \['extra'\]"),
        (lambda t: None, {"num_hidden_layers": 3}, "missing keys: .*layers.2.self_attn.q_proj.weight"),
        (lambda t: None, {"num_hidden_layers": 1}, "unexpected keys: .*layers.1.self_attn.q_proj.weight"),
        (lambda t: None, {"draft_vocab_size": 9}, r"missing keys: \['draft_vocab_ids'\]"),
    ],
)
def test_incomplete_checkpoint(target, tmp_path, edit, config_changes, message):
    folder = edited_checkpoint(tmp_path, target, edit, **config_changes)
    with pytest.raises(ValueError, match=message) as error:
        FalconDraftModel.from_pretrained(folder)
    assert str(folder) in str(error.value) and "save it again" in str(error.value)
    with pytest.raises(ValueError, match=message):
        AutoModel.from_pretrained(folder)


@pytest.mark.parametrize("options", [{}, {"ignore_mismatched_sizes": True}])
def test_weights_of_another_shape(target, tmp_path, options):
    folder = edited_checkpoint(tmp_path, target, lambda tensors: tensors.update({"norm.weight": torch.ones(5)}))
    with pytest.raises(ValueError, match="mismatched keys: .*norm.weight.*5.*32.*save it again"):
        FalconDraftModel.from_pretrained(folder, **options)


# Configuration.


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"block_size": 0}, "`block_size` is 0: set it to an integer from 1 to 64"),
        ({"block_size": 1.5}, "`block_size` is 1.5"),
        ({"block_size": True}, "`block_size` is True"),
        ({"feature_layers": [1, 1]}, "`feature_layers` is \\[1, 1\\]: give different layers"),
        ({"feature_layers": [-1]}, "`feature_layers` is \\[-1\\]: .* counted from 0"),
        ({"num_lstm_layers": -1}, "`num_lstm_layers` is -1: .* from 0 to 64"),
        ({"num_hidden_layers": 0}, "`num_hidden_layers` is 0"),
        ({"hidden_size": 0}, "`hidden_size` is 0"),
        ({"vocab_size": None}, "`vocab_size` is None"),
        ({"num_attention_heads": 6, "num_key_value_heads": 4}, "`num_key_value_heads` is 4: .* divisor"),
        ({"hidden_size": 33, "num_attention_heads": 4}, "`hidden_size` is 33.* set `head_dim`"),
        ({"head_dim": 7}, "`head_dim` is 7"),
        ({"draft_vocab_size": 0}, "`draft_vocab_size` is 0"),
        ({"draft_vocab_size": 32001}, "`draft_vocab_size` is 32001: set it between 1 and `vocab_size` .32000."),
    ],
)
def test_config_refuses(changes, message):
    with pytest.raises(ValueError, match=message):
        FalconDraftConfig(**changes)


@pytest.mark.parametrize("kind", ["codegen", "gemma4_text", "xlnet"])
def test_config_from_targets_without_some_fields(kind):
    """No special tokens, head sizes by layer, no limit of positions."""
    target = AutoConfig.for_model(kind)
    config = FalconDraftConfig.from_target(target)
    assert (config.hidden_size, config.vocab_size) == (target.hidden_size, target.vocab_size)
    assert config.head_dim >= 2 and config.max_position_embeddings >= 1
    assert kind != "codegen" or config.pad_token_id is None


def test_layers_that_the_target_lacks(target):
    with pytest.raises(ValueError, match=r"`feature_layers` is \[2\], but LlamaForCausalLM has 2 decoder layers"):
        FalconCandidateGenerator(new_drafter(target, feature_layers=[2]), target)


def test_config_from_target():
    target = new_target(bos_token_id=1, eos_token_id=2)
    config = FalconDraftConfig.from_target(target, block_size=3)
    assert (config.block_size, config.hidden_size, config.vocab_size) == (3, HIDDEN, VOCAB)
    assert (config.num_attention_heads, config.num_key_value_heads) == (4, 2)
    assert (config.bos_token_id, config.eos_token_id, config.pad_token_id) == (1, 2, 0)
    assert config.target_model_type == "llama" and len(config.target_fingerprint) == 16
    assert FalconDraftConfig.from_target(target.config).target_fingerprint is None


@pytest.mark.parametrize(
    ("target_sizes", "sizes"),
    [
        # SmolLM2-135M, Llama-3.2-1B, Llama-2-7B, Llama-3.1-8B, Llama-2-13B.
        ((576, 1536, 9, 3), (1536, 3)),
        ((2048, 8192, 32, 8), (2048, 8)),
        ((4096, 11008, 32, 32), (4096, 8)),
        ((4096, 14336, 32, 8), (4096, 8)),
        ((5120, 13824, 40, 40), (5120, 8)),
        # No divisor of 20 is nearer to 8.
        ((640, 2560, 20, 10), (2048, 5)),
    ],
)
def test_drafters_of_large_targets_are_narrower(target_sizes, sizes):
    names = ("hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads")
    target = LlamaConfig(**dict(zip(names, target_sizes)))
    config = FalconDraftConfig.from_target(target)
    assert (config.intermediate_size, config.num_key_value_heads) == sizes
    assert config.hidden_size == target.hidden_size and config.num_attention_heads == target.num_attention_heads
    as_wide = FalconDraftConfig.from_target(target, **{name: getattr(target, name) for name in names})
    assert [getattr(as_wide, name) for name in names] == list(target_sizes)


# The target.


@pytest.mark.parametrize("kind", ["llama", "gemma2", "granite", "cohere", "gpt2", "opt"])
def test_borrowed_head_gives_the_targets_logits(kind):
    target = new_target(kind, **({"final_logit_softcapping": 3.0} if kind == "gemma2" else {}))
    tokens = random_tokens(2, 9)
    features = target_features(target, tokens, torch.ones_like(tokens, dtype=torch.bool))
    with torch.no_grad():
        expected = target(tokens).logits
    head = TargetHead(new_drafter(target), target)
    close(head.logits(features), expected, 1e-4)
    assert torch.equal(head.to_target_ids(torch.arange(VOCAB)), torch.arange(VOCAB))
    close(head.embed(tokens), target.get_input_embeddings()(tokens).detach())

    drafter = new_drafter(target, draft_vocab_size=20)
    head = TargetHead(drafter, target)
    close(head.logits(features), expected[..., drafter.draft_vocab_ids], 1e-4)
    assert torch.equal(head.to_target_ids(torch.arange(20)), drafter.draft_vocab_ids)


@pytest.mark.parametrize(
    "kind, changes, message",
    [
        ("llama", {"hidden_size": 64}, "`hidden_size` is 32, but the target has 64"),
        ("llama", {"vocab_size": 65}, "`vocab_size` is 64, but the target has 65"),
        ("qwen2", {}, "`target_model_type` is 'llama', but the target has 'qwen2'"),
    ],
)
def test_wrong_target(target, kind, changes, message):
    drafter, wrong = new_drafter(target), new_target(kind, **changes)
    with pytest.raises(ValueError, match=f"{message}.*Use that target, or train a drafter for this one"):
        TargetHead(drafter, wrong)
    with pytest.raises(ValueError, match=message):
        wrong.generate(random_tokens(1, 4), assistant_model=drafter, max_new_tokens=4, do_sample=False)


def test_other_weights_warn_once_and_work(target, caplog):
    decoding.logger.warning_once.cache_clear()
    drafter, other, prompt = new_drafter(target), new_target(seed=9), random_tokens(1, 6)
    options = {"max_new_tokens": 8, "do_sample": False}

    def warnings(model):
        caplog.clear()
        with caplog.at_level(logging.WARNING):
            found = model.generate(prompt, assistant_model=drafter, **options)
        assert torch.equal(found, model.generate(prompt, **options))
        return [record for record in caplog.records if "weights are not those" in record.getMessage()]

    assert warnings(target) == [] and was_trained_for(drafter, target)
    assert not was_trained_for(drafter, other)
    assert len(warnings(other)) == 1
    assert warnings(other) == []


def test_weights_are_compared_once(target, monkeypatch):
    """It takes as long as a tenth of a step of a small target."""
    drafter, compared = new_drafter(target), []
    monkeypatch.setattr(decoding, "was_trained_for", lambda *models: compared.append(models) or True)
    for _ in range(2):
        target.generate(random_tokens(1, 6), assistant_model=drafter, max_new_tokens=4, do_sample=False)
    assert compared == [(drafter, target)]


@pytest.mark.parametrize("rows", [1, 2])
def test_a_call_that_can_draft_nothing_asks_nothing_of_the_drafter(rows, target, monkeypatch):
    """Neither of the first token nor of the last one: two tokens are plain decoding's, and take its time."""

    def refuse(*args, **kwargs):
        raise AssertionError("nothing is to be drafted")

    monkeypatch.setattr(FalconCandidateGenerator, "commit", refuse)
    monkeypatch.setattr(borrowed_head, "_parameters_of", refuse)
    drafter, prompt = new_drafter(target), random_tokens(rows, 6)
    for tokens in (1, 2):
        expected = target.generate(prompt, max_new_tokens=tokens, do_sample=False)
        found = target.generate(prompt, assistant_model=drafter, max_new_tokens=tokens, do_sample=False)
        assert torch.equal(found, expected)
    with pytest.raises(AssertionError, match="nothing is to be drafted"):
        target.generate(prompt, assistant_model=drafter, max_new_tokens=3, do_sample=False)


def test_a_copy_in_bfloat16_is_the_same_target(target):
    drafter, copy = new_drafter(target), new_target().to(torch.bfloat16)
    assert was_trained_for(drafter, copy)
    # And the other way round: made from the bfloat16 copy, used with the float32 model it came from or went to.
    assert was_trained_for(new_drafter(copy), copy.float()) and was_trained_for(new_drafter(copy), target)
