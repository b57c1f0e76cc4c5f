# Copyright 2026 The hf_falcon authors. Licensed under the Apache License, Version 2.0.
"""DFlash and DSpark: the logits of the reference implementations, and the tokens of plain decoding."""

import json
import math
import shutil
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import simulated_device
import torch
import torch.nn.functional as F
from device_cases import MODES, Simulated, check, rounds
from oracle import FreeDrafting, use_oracle
from quick import one_in, quick
from safetensors.torch import load_file, save_file
from tiny_models import SAME_EVERY_ROUND, VOCAB, new_target, prompt, random_tokens, tiny_target
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM, LogitsProcessor, PreTrainedModel
from utilities import close, edit

from hf_falcon import AutoDrafter, DraftOptions, FalconCandidateGenerator
from hf_falcon.core.caches import DraftCache
from hf_falcon.core.interfaces import DrafterAcceleration
from hf_falcon.core.modeling_falcon_draft import additive_mask
from hf_falcon.core.target_parts import FeatureTap
from hf_falcon.drafters.dflash import DFlashDraftModel, DFlashSession
from hf_falcon.drafters.dflash_config import DFlashDraftConfig

REFERENCES = Path(__file__).parent / "references"
CASES = sorted(folder.name for folder in REFERENCES.glob("d[fs]*") if folder.name != "dspark_rnn")
# The target's vocabulary, width and layers in the references.
SIZES = {"vocab_size": 48, "hidden_size": 16, "num_hidden_layers": 8}

NAMES = ("llama", "qwen3", "gemma3", "cohere")
DSPARK = {"markov_rank": 6, "sample_from_anchor": True}
WINDOW = {"layer_types": ["sliding_attention", "full_attention"], "use_sliding_window": True, "sliding_window": 5}
# Of drafters: fields of their configurations.
KINDS: dict[str, dict[str, Any]] = {
    "dflash": {},
    "own head": {"has_head": True, "draft_vocab_size": 40},
    "window": {"layer": WINDOW, "has_embedding": True},
    "dspark": DSPARK,
    "gated": {**DSPARK, "markov_head_type": "gated", "draft_vocab_size": 40},
    "markov": {"markov_rank": 6},
}
SETTINGS = {"greedy": {"do_sample": False}, "sampled": {"do_sample": True, "top_k": 0, "temperature": 1.1}}
SCHEDULES = {
    "constant": {},
    "heuristic": {"num_assistant_tokens_schedule": "heuristic", "prompt_lookup_num_tokens": 8},
}


@cache
def reference(case: str) -> dict[str, Tensor]:
    """The tensors of a reference; see make_drafter_references.py."""
    return load_file(REFERENCES / case / "reference.safetensors")


def reference_target(case: str) -> PreTrainedModel:
    """A target for the drafter of a reference: of its sizes, with its embedding and head."""
    config = {"intermediate_size": 24, "num_attention_heads": 4, "num_key_value_heads": 2, "pad_token_id": 0}
    torch.manual_seed(0)
    target = LlamaForCausalLM(LlamaConfig(**SIZES, **config, bos_token_id=None, eos_token_id=None)).eval()
    target.get_input_embeddings().weight.data = reference(case)["target_embedding"].clone()
    if "target_lm_head" in reference(case):
        target.get_output_embeddings().weight.data = reference(case)["target_lm_head"].clone()
    return target


def new_dflash(
    target: PreTrainedModel,
    seed: int = 1,
    scale: float = 0.3,
    has_embedding: bool = False,
    has_head: bool = False,
    layer: dict[str, Any] | None = None,
    **fields: Any,
) -> DFlashDraftModel:
    """
    A drafter for one test, with fields of its configuration and of its layers, and random weights, large enough that
    every one of them matters. It drafts the same tree every round.
    """
    torch.manual_seed(seed)
    hidden, count = target.config.hidden_size, target.config.num_hidden_layers
    sizes = {"vocab_size": target.config.vocab_size, "hidden_size": hidden, "intermediate_size": 48, "head_dim": 8}
    sizes |= {"num_attention_heads": 4, "num_key_value_heads": 2, "num_hidden_layers": 2, "model_type": "qwen3"}
    verifier = {"name_or_path": "a-user/a-target", "architectures": [type(target).__name__]}
    given = {"aux_hidden_state_layer_ids": [1, count], "mask_token_id": sizes["vocab_size"] - 1, "block_size": 4}
    given |= {"speculators_config": {"verifier": verifier}, "target_hidden_size": hidden}
    config = DFlashDraftConfig({**sizes, **(layer or {})}, **{**given, **fields})
    drafter = DFlashDraftModel(config, has_embedding, has_head).eval()
    with torch.no_grad():
        for name, parameter in drafter.named_parameters():
            parameter.normal_(float("norm" in name), 1.0 if name.endswith(("tokens.weight", "w1.weight")) else scale)
    drafter.set_draft_vocabulary(torch.randperm(config.vocab_size)[: config.draft_vocab_size].sort().values)
    for name, value in SAME_EVERY_ROUND.items():
        setattr(drafter.generation_config, name, value)
    return drafter


def session_of(drafter: DFlashDraftModel, target: PreTrainedModel) -> DFlashSession:
    return drafter.start_session(drafter.make_head(target), DrafterAcceleration(drafter))


def generate(target, ids, drafter=None, **settings):
    torch.manual_seed(7)
    settings = {"max_new_tokens": 16, "do_sample": False, "pad_token_id": 0, **settings}
    return target.generate(ids, assistant_model=drafter, return_dict_in_generate=True, **settings)


def check_equal(target, ids, drafter, **settings):
    """Drafts are verified, and the tokens are plain decoding's."""
    own = {name: value for name, value in settings.items() if name not in DFlashDraftModel.draft_option_names}
    expected, output = generate(target, ids, **own), generate(target, ids, drafter, **settings)
    assert output.sequences.tolist() == expected.sequences.tolist()
    assert output.draft_statistics.drafted_tokens > 0
    return output.draft_statistics


class Followers(LogitsProcessor):
    """Allows three tokens behind each token, and says so to the drafter."""

    def allowed_tokens(self, prefix_ids):
        return [(5 * int(prefix_ids[-1]) + offset) % VOCAB for offset in (1, 2, 9)]

    def __call__(self, input_ids, scores):
        mask = torch.full_like(scores, -torch.inf)
        tokens = Followers.allowed_tokens(self, input_ids[0])
        mask[:, tokens] = scores[:, tokens]
        return mask


class SilentFollowers(Followers):
    allowed_tokens = None


@pytest.mark.parametrize("setting", SETTINGS)
@pytest.mark.parametrize("kind", ["dflash", "own head", "dspark", "gated"])
def test_a_block_has_allowed_tokens(kind, setting):
    target = tiny_target("llama")
    drafter, accepted = new_dflash(target, **KINDS[kind]), []
    for processor in (Followers(), SilentFollowers()):
        options = {**SETTINGS[setting], "logits_processor": [processor], "max_new_tokens": 40}
        accepted.append(check_equal(target, prompt(9), drafter, **options).accepted_tokens)
    assert accepted[0] > accepted[1]


# Parity.


@torch.no_grad()
@pytest.mark.parametrize("pieces", [(9,), (4, 1, 4), (1,) * 9], ids=str)
@pytest.mark.parametrize("case", CASES)
def test_blocks_have_the_states_and_logits_of_the_reference(case, pieces):
    """However the text is committed, and with any token before the newest."""
    drafter, target, tensors = AutoDrafter.from_pretrained(REFERENCES / case), reference_target(case), reference(case)
    assert type(drafter) is DFlashDraftModel and not drafter.training
    session, known = session_of(drafter, target), tensors["hidden_states"].shape[1]
    features = torch.cat((torch.randn(1, known, SIZES["hidden_size"]), tensors["hidden_states"]), dim=-1)
    tokens = random_tokens(1, known) % 48
    tokens[0, -1] = tensors["block_ids"][0, 0]
    for piece, next_tokens in zip(features.split(pieces, dim=1), tokens.split(pieces, dim=1)):
        states = session.commit(piece, next_tokens)
    # Rows that propose a token.
    size, hidden = drafter.config.block_size, SIZES["hidden_size"]
    assert size == (4 if case.startswith("dspark") else 3)
    close(states[..., :hidden], tensors["block_hidden_states"][:, -size:])
    expected = tensors["logits"][:, -size:]
    assert session.is_conditional is ("markov_bias" in tensors)
    if session.is_conditional:
        states = session.condition(states[0], tensors["previous_ids"][0, -size:])[None]
        expected = expected + tensors["markov_bias"][:, -size:]
    close(drafter.make_head(target).logits(states), expected)
    # The states are not changed by a later block, nor that block by rows of this one.
    session.rewind()
    again = session_of(drafter, target)
    again.commit(features, tokens)
    close(session.commit(features[:, :1], tokens[:, :1]), again.commit(features[:, :1], tokens[:, :1]))


@torch.no_grad()
def test_positions_count_from_the_first_feature():
    """Rotary positions are relative."""
    target = tiny_target()
    drafter = new_dflash(target, layer=WINDOW)
    features, tokens = torch.randn(1, 8, 3 * 32), random_tokens(1, 8)
    found = session_of(drafter, target).commit(features, tokens, first_position=50)
    close(found, session_of(drafter, target).commit(features, tokens), 1e-4)


def test_a_recurrent_head_is_refused():
    with pytest.raises(ValueError, match="`markov_head_type` is 'rnn': the state of a recurrent head depends on all"):
        AutoDrafter.from_pretrained(REFERENCES / "dspark_rnn")


# Heads and embeddings.


@torch.no_grad()
@pytest.mark.parametrize("name", ["llama", "gemma2", "granite", "cohere"])
def test_the_targets_head_has_its_post_processing(name):
    """Without a head of its own, a true feature has the target's logits. Its own head has none of the target's."""
    target, ids = tiny_target(name), prompt(9)
    with FeatureTap(target) as tap:
        expected = target(ids).logits
    features = tap.take()
    for kind, bias in ({}, 0.0), ({"markov_rank": 3}, 1.5):
        drafter = new_dflash(target, **kind)
        if drafter.markov_head is not None:
            drafter.markov_head.markov_w2.weight.fill_(0.5)
            features = F.pad(features, (0, 3), value=1.0)
        close(drafter.make_head(target).logits(features), expected + bias, 1e-4)
    drafter = new_dflash(target, has_head=True)
    drafter.lm_head.weight.copy_(target.get_output_embeddings().weight)
    plain = features[..., : target.config.hidden_size] @ target.get_output_embeddings().weight.T
    close(drafter.make_head(target).logits(features[..., : target.config.hidden_size]), plain, 1e-4)


@pytest.mark.parametrize("name", ["llama", "gemma3"])
def test_embeddings_are_without_the_targets_factor(name):
    target, ids = tiny_target(name), random_tokens(2, 5)
    weight = target.get_input_embeddings().weight
    assert torch.equal(target.get_input_embeddings()(ids), weight[ids]) is (name == "llama")
    assert torch.equal(new_dflash(target).make_head(target).embed(ids), weight[ids])
    drafter = new_dflash(target, has_embedding=True)
    assert torch.equal(drafter.make_head(target).embed(ids), drafter.embed_tokens.weight[ids])


# Generation.


@pytest.mark.parametrize("case", CASES)
def test_drafters_of_the_references_draft(case):
    drafter, target = AutoDrafter.from_pretrained(REFERENCES / case), reference_target(case)
    ids = 1 + random_tokens(1, 9) % 40
    for settings in SETTINGS.values():
        check_equal(target, ids, drafter, num_assistant_tokens_schedule="constant", **settings)


def padded(rows: int) -> dict[str, Tensor]:
    """Prompts of several lengths, padded on the left."""
    ids = random_tokens(rows, 11)
    for row in range(rows):
        ids[row, : 3 * row % 10] = 0
    return {"inputs": ids, "attention_mask": (ids != 0).long()}


@pytest.mark.parametrize("name, kind, schedule", one_in(4, NAMES, KINDS, SCHEDULES))
def test_tokens_are_plain_decodings(name, kind, schedule, monkeypatch):
    """Greedy and sampled, for one sequence and for four."""
    monkeypatch.setattr("hf_falcon.core.decoding.costs_of", lambda *args, **kwargs: FreeDrafting({64: 1.0}))
    target = tiny_target(name)
    drafter = new_dflash(target, **KINDS[kind])
    for settings in SETTINGS.values():
        for rows in (1, 4):
            inputs = padded(rows)
            settings = {"max_new_tokens": 14, **settings, **SCHEDULES[schedule]}
            check_equal(target, inputs["inputs"], drafter, attention_mask=inputs["attention_mask"], **settings)


def fit(target: PreTrainedModel, drafter: DFlashDraftModel, texts: Tensor, start: int, steps: int = 120) -> None:
    """
    Trains a drafter by heart.

    Args:
        texts (`torch.LongTensor` of shape `(batch, length)`): texts of the target.
        start: the first position that anchors a block.
    """
    config, (count, length) = drafter.config, texts.shape
    with torch.no_grad(), FeatureTap(target, config.feature_layers) as tap:
        target(texts)
    anchors = torch.arange(start, length - 1).repeat(count)[:, None]
    row_of = torch.arange(count).repeat_interleave(length - 1 - start)
    features, text = tap.take()[row_of], F.pad(texts, (0, config.block_rows + 1), value=-100)[row_of]
    places, rows, positions = torch.arange(config.block_size), torch.arange(config.block_rows), torch.arange(length)
    labels, previous = text.gather(1, anchors + 1 + places), text.gather(1, anchors + places).clamp(min=0)
    block = F.pad(text.gather(1, anchors), (0, config.block_rows - 1), value=config.mask_token_id)
    visible = torch.cat((positions < anchors, torch.ones(len(anchors), config.block_rows).bool()), dim=1)
    mask = additive_mask(visible, torch.float32)[:, None, None].repeat(1, 1, config.block_rows, 1)
    head, optimizer = drafter.make_head(target), torch.optim.Adam(drafter.parameters(), lr=1e-2)
    for _ in range(steps):
        layers = DraftCache(config.num_hidden_layers)
        drafter.read_context(features, positions.expand(len(anchors), -1), layers)
        layers.advance(length)
        states = drafter.to_states(drafter.run_layers(head.embed(block), None, anchors + rows, mask, layers))
        logits = head.logits(drafter.condition(states, previous))
        loss = F.cross_entropy(logits.flatten(0, 1), labels.flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    drafter.eval()


@pytest.mark.parametrize("kind", ["dflash", "dspark", "gated"])
@pytest.mark.parametrize("name", quick(NAMES[:1], NAMES))
def test_a_drafter_that_knows_the_text_is_right(name, kind):
    """It was trained with all blocks of a text at once: it reads the same positions, tokens and rows as then."""
    target, ids, new = tiny_target(name), random_tokens(2, 6), 25
    fields = {"has_head": True, **KINDS[kind], "draft_vocab_size": VOCAB}
    drafter = new_dflash(target, scale=0.1, **fields)
    fit(target, drafter, generate(target, ids, max_new_tokens=new).sequences, start=6)
    size = drafter.config.block_size
    chain = {"max_new_tokens": new, "draft_top_k": 1, "num_assistant_tokens": size}
    for rows in ids[:1], ids[1:]:
        statistics = check_equal(target, rows, drafter, **chain)
        # The first token is the prompt's. Then each round has a whole block and the target's own token.
        assert statistics.rounds == math.ceil((new - 1) / (size + 1))
        assert statistics.accepted_tokens == new - 1 - statistics.rounds
    assert check_equal(target, ids, drafter, **chain).tokens_per_round > size
    assert check_equal(target, ids[:1], drafter, max_new_tokens=new).tokens_per_round > size


@pytest.mark.parametrize("kind", ["dflash", "dspark"])
@pytest.mark.parametrize("draft", [{"accuracy": 1.0}, {"accuracy": 0.7, "scattered": True}], ids=["oracle", "half"])
def test_accepted_drafts_continue_as_they_should(kind, draft, monkeypatch):
    """An oracle's path is accepted: the drafter's cache follows the accepted tokens."""
    target, ids = tiny_target("qwen3"), prompt(9)
    drafter = new_dflash(target, layer=WINDOW, **KINDS[kind])
    truth = generate(target, ids, max_new_tokens=24).sequences
    made = use_oracle(monkeypatch, truth, **draft)
    output = generate(target, ids, drafter, max_new_tokens=24)
    assert output.sequences.tolist() == truth.tolist() and output.draft_statistics.accepted_tokens > 10
    # As a generator that commits all of the text at once.
    monkeypatch.undo()
    with torch.no_grad():
        done, new = made[0], FalconCandidateGenerator(drafter, target)
        known = done._next_position
        with FeatureTap(target, drafter.config.feature_layers) as tap:
            target(truth[:, :known])
        new.commit(tap.take(), truth[:, 1 : known + 1])
        close(done._block, new._block, tolerance=1e-4)


def test_bfloat16():
    target = new_target().bfloat16()
    for fields in ({}, DSPARK):
        check_equal(target, prompt(9), new_dflash(target, **fields).bfloat16(), max_new_tokens=10)


def test_embeddings_as_prompt():
    target = tiny_target()
    embeds = target.get_input_embeddings()(prompt(9))
    settings = {"inputs_embeds": embeds, "max_new_tokens": 16, "do_sample": False, "pad_token_id": 0}
    expected = target.generate(**settings)
    assert target.generate(**settings, assistant_model=new_dflash(target)).tolist() == expected.tolist()


def test_a_drafter_of_another_width():
    """It needs an embedding and a head of its own."""
    target = tiny_target()
    layer = {"hidden_size": 16, "num_attention_heads": 2}
    check_equal(target, prompt(9), new_dflash(target, has_embedding=True, has_head=True, layer=layer))
    with pytest.raises(ValueError, match="embedding is 32 wide"):
        generate(target, prompt(9), new_dflash(target, has_head=True, layer=layer))


# One pass a round.


def test_a_round_has_one_pass(monkeypatch):
    target = tiny_target()
    drafter = new_dflash(target)
    monkeypatch.setattr(DFlashSession, "extend", lambda *args: pytest.fail("a second pass ran"))
    for options in ({"num_draft_passes": 6}, {"num_draft_passes": 2, "draft_tree": "static"}):
        for rows in (1, 2):
            statistics = check_equal(target, random_tokens(rows, 9), drafter, **options)
            assert len(statistics.accepted_by_depth) <= drafter.config.block_size
    generator = FalconCandidateGenerator(drafter, target, DraftOptions(num_draft_passes=6))
    assert generator.options.num_draft_passes == 1 and generator.max_depth == 3
    check_equal(target, prompt(9), drafter, draft_tree=[[0], [0, 0], [1], [0, 0, 0]])
    with pytest.raises(ValueError, match="`draft_tree` is 4 deep, but the drafter proposes 3 tokens a round"):
        generate(target, prompt(9), drafter, draft_tree=[[0], [0, 0], [0, 0, 0], [0, 0, 0, 0]])


def test_multi_root_is_refused():
    target = tiny_target()
    drafter = new_dflash(target, **DSPARK)
    with pytest.raises(ValueError, match="`verification` is 'multi_root'.* set it to 'exact' or 'speculative'"):
        generate(target, prompt(9), drafter, verification="multi_root", do_sample=True)
    # Greedy decoding and batches are verified as with "exact".
    check_equal(target, prompt(9), drafter, verification="multi_root")
    check_equal(target, random_tokens(2, 9), drafter, verification="multi_root", do_sample=True)


@pytest.mark.parametrize("kind", ["dflash", "gated"])
def test_speculative_sampling(kind):
    """With one allowed token it is greedy."""
    target = tiny_target()
    drafter, settings = new_dflash(target, **KINDS[kind]), {"verification": "speculative", "do_sample": True}
    found = generate(target, prompt(9), drafter, **settings, top_k=1)
    assert found.sequences.tolist() == generate(target, prompt(9)).sequences.tolist()
    assert generate(target, prompt(9), drafter, **settings).draft_statistics.drafted_tokens > 0


# An accelerator, simulated.


@pytest.mark.parametrize("mode", quick(("greedy", "adaptive", "own tree"), MODES))
def test_modes_on_a_device(mode):
    target = new_target()
    with Simulated() as device:
        drafter = new_dflash(target, draft_vocab_size=40, has_head=mode == "greedy", **DSPARK)
        settings = {name: value for name, value in MODES[mode].items() if name != "stop_strings"}
        check(device, device.put(target), device.put(drafter), prompt(9), **settings)


def test_a_drafter_on_another_device():
    target = new_target()
    drafter = new_dflash(target, **DSPARK)
    with Simulated() as device:
        check(device, device.put(target), device.put(drafter, 1), prompt(9))
        check(device, target, drafter, random_tokens(2, 9))


@pytest.mark.parametrize("kind", ["window", "gated"])
def test_synchronisations_of_a_round(kind):
    """One brings the draft to the host, and one the target's choices."""
    target = new_target()
    drafter = new_dflash(target, **KINDS[kind])
    simulated_device.move(target), simulated_device.move(drafter)
    found = rounds(target, drafter, prompt(9), eos_token_id=[VOCAB], pad_token_id=0)
    assert max(syncs for syncs, _ in found) <= 2


# Files.


def copied(case: str, folder: Path, **changes: Any) -> Path:
    """The checkpoint of a reference, with other fields."""
    shutil.copytree(REFERENCES / case, folder, dirs_exist_ok=True)
    edit(folder / "config.json", **changes)
    return folder


@pytest.mark.parametrize("case", CASES)
def test_a_saved_drafter_is_the_same(case, tmp_path):
    drafter = AutoDrafter.from_pretrained(REFERENCES / case)
    drafter.generation_config.num_assistant_tokens = 7
    drafter.save_pretrained(tmp_path)
    found = AutoDrafter.from_pretrained(tmp_path)
    assert type(found) is DFlashDraftModel and found.config.to_dict() == drafter.config.to_dict()
    assert found.state_dict().keys() == drafter.state_dict().keys()
    assert all(torch.equal(found.state_dict()[name], tensor) for name, tensor in drafter.state_dict().items())
    assert found.generation_config.num_assistant_tokens == 7
    # In the layout of `speculators`.
    fields, kind = json.loads((tmp_path / "config.json").read_text()), case.partition("_")[0]
    assert fields["speculators_model_type"] == kind and fields["block_size"] == 4
    if "original" not in case:
        published = json.loads((REFERENCES / case / "config.json").read_text())
        shared = fields.keys() & published.keys() - {"enable_confidence_head", "target_hidden_size"}
        shared -= {"transformer_layer_config"}
        assert {name: fields[name] for name in shared} == {name: published[name] for name in shared}


@pytest.mark.parametrize(
    "case, expected",
    [
        ("dflash", {"feature_layers": [1, 3, 4], "block_size": 3, "draft_vocab_size": 20}),
        ("dflash_full_vocabulary", {"sliding_window_non_causal": True, "draft_vocab_size": 48}),
        ("dflash_original", {"feature_layers": [1, 3, 4], "block_size": 3, "num_target_layers": 8}),
        ("dspark_original", {"feature_layers": [-1, 3, 4], "block_size": 4, "markov_rank": 6}),
    ],
)
def test_fields_of_each_layout(case, expected):
    drafter = AutoDrafter.from_pretrained(REFERENCES / case, dtype="bfloat16")
    assert {name: getattr(drafter.config, name) for name in expected} == expected
    assert drafter.config.mask_token_id == 47 and drafter.fc.weight.dtype == torch.bfloat16
    assert (drafter.lm_head is None) is (case in ("dflash_full_vocabulary", "dflash_original"))
    assert (drafter.embed_tokens is None) is (case != "dspark_original")
    assert drafter.d2t is None or drafter.d2t.dtype == torch.long
    assert AutoDrafter.from_pretrained(REFERENCES / case, layer_ids=[1, 2, 3]).config.feature_layers == [0, 1, 2]


def test_older_places_of_fields(tmp_path):
    """z-lab's block size is in `dflash_config` in newer files; DeepSpec's DFlash has no Markov head."""
    nested = {"target_layer_ids": [1, 3, 4], "mask_token_id": 47, "block_size": 6}
    folder = copied("dflash_original", tmp_path / "zlab", block_size=None, dflash_config=nested, is_causal=False)
    config = AutoDrafter.from_pretrained(folder).config
    assert config.block_size == 5 and config.sliding_window_non_causal
    folder = copied("dspark_original", tmp_path / "deepspec", markov_rank=0, markov_head_type=None)
    weights = load_file(folder / "model.safetensors")
    save_file({n: w for n, w in weights.items() if "markov" not in n}, folder / "model.safetensors")
    drafter = AutoDrafter.from_pretrained(folder)
    assert drafter.markov_head is None and drafter.config.block_size == 4
    check_equal(reference_target("dspark_original"), 1 + random_tokens(1, 9) % 40, drafter)


@pytest.mark.parametrize(
    "case, changes, message",
    [
        ("dflash", {"block_size": 1}, "`block_size` is 1: set it to an integer from 2"),
        ("dflash", {"block_size": 10**9}, "`block_size` is 1000000000"),
        ("dflash", {"block_size": "4"}, "`block_size` is '4'"),
        ("dflash", {"mask_token_id": None}, "`mask_token_id` is None: set it to an integer from 0 to 47"),
        ("dflash", {"mask_token_id": 48}, "`mask_token_id` is 48"),
        ("dflash", {"mask_token_id": True}, "`mask_token_id` is True"),
        ("dflash", {"aux_hidden_state_layer_ids": None}, "`aux_hidden_state_layer_ids` is None"),
        ("dflash", {"aux_hidden_state_layer_ids": [2, 2]}, r"`aux_hidden_state_layer_ids` is \[2, 2\]"),
        ("dflash", {"aux_hidden_state_layer_ids": list(range(1000))}, "`aux_hidden_state_layer_ids` is"),
        ("dflash", {"sample_from_anchor": 1}, "`sample_from_anchor` is 1: set it to True or False"),
        ("dflash", {"sliding_window_non_causal": None}, "`sliding_window_non_causal` is None"),
        ("dflash", {"draft_vocab_size": 10**9}, "`draft_vocab_size` is 1000000000"),
        ("dflash", {"target_hidden_size": 10**9}, "`target_hidden_size` is 1000000000"),
        ("dflash", {"num_target_layers": -1}, "`num_target_layers` is -1"),
        ("dflash", {"transformer_layer_config": {"model_type": "gemma3"}}, "model_type` is 'gemma3'"),
        ("dflash", {"transformer_layer_config": {"num_hidden_layers": 10**9}}, "num_hidden_layers` is 1000000000"),
        ("dflash", {"speculators_model_type": "dflash2"}, "'dflash2', which is no drafter of a known method"),
        ("dspark", {"markov_rank": 10**9}, "`markov_rank` is 1000000000"),
        ("dspark", {"markov_rank": -1}, "`markov_rank` is -1"),
        ("dspark", {"markov_head_type": "hyper"}, "`markov_head_type` is 'hyper': it must be one of vanilla, gated"),
        ("dspark_original", {"target_layer_ids": None}, "`aux_hidden_state_layer_ids` is None"),
        ("dspark_original", {"target_layer_ids": [1, 7]}, r"`target_layer_ids` is \[1, 7\]: .* last layer \(7\)"),
        ("dspark_original", {"architectures": ["Gemma4DSparkModel"]}, "no drafter of a known method: .*DFlash"),
        ("dflash_original", {"architectures": ["DFlash2DraftModel"]}, "no drafter of a known method"),
        ("dflash_original", {"block_size": None}, "`block_size` is None"),
        ("dflash_original", {"is_causal": True}, "`is_causal` is True"),
        ("dflash_original", {"output_multiplier": 0.2}, "`output_multiplier` is 0.2: drafters with it"),
        ("dflash_original", {"dflash_config": [1]}, "`aux_hidden_state_layer_ids` is None"),
        ("dflash", {"self": 1}, "`config.json` cannot be read"),
        ("dspark", {"markov_head_type": []}, r"`markov_head_type` is \[\]"),
        # Weights.
        ("dflash", {"aux_hidden_state_layer_ids": [2, 4]}, r"mismatched keys: .*fc.weight.*\(16, 48\).*\(16, 32\)"),
        ("dflash", {"draft_vocab_size": 21}, "mismatched keys: .*d2t"),
        ("dflash", {"speculators_model_type": "dspark"}, "missing keys: .*markov_head.markov_w1.weight"),
        ("dspark", {"speculators_model_type": "dflash", "markov_rank": 0}, "unexpected keys: .*markov_head.markov_w1"),
        ("dspark", {"markov_head_type": "gated"}, "missing keys: .*markov_head.gate_proj.bias"),
        ("dflash_original", {"num_hidden_layers": 3, "layer_types": None}, "missing keys: .*layers.2.input_layernorm"),
        ("dflash", {"target_hidden_size": 8}, "missing keys: .*embed_tokens.weight"),
    ],
)
def test_files_that_are_refused(case, changes, message, tmp_path):
    with pytest.raises(ValueError, match=message):
        AutoDrafter.from_pretrained(copied(case, tmp_path, **changes))


def test_fields_that_are_left_out(tmp_path):
    """transformers makes an attribute of every field, and one could replace a method."""
    folder = copied("dspark", tmp_path, to_dict=1, from_pretrained=2, __class__=3, enable_confidence_head=[])
    drafter = AutoDrafter.from_pretrained(folder)
    assert drafter.config.to_dict() == AutoDrafter.from_pretrained(REFERENCES / "dspark").config.to_dict()


@pytest.mark.parametrize(
    "change, message",
    [
        (lambda weights: weights.pop("hidden_norm.weight"), r"missing keys: \['hidden_norm.weight'\]"),
        (lambda weights: weights.update(extra=torch.ones(1)), r"unexpected keys: \['extra'\]"),
        (lambda weights: weights["d2t"].add_(48), "`d2t` of .* outside the target's vocabulary of 48"),
        (lambda weights: weights["t2d"].fill_(True), "`d2t` and `t2d` of .* name different tokens"),
    ],
)
def test_weights_that_are_refused(change, message, tmp_path):
    folder = copied("dflash", tmp_path)
    weights = load_file(folder / "model.safetensors")
    change(weights)
    save_file(weights, folder / "model.safetensors")
    with pytest.raises(ValueError, match=message):
        AutoDrafter.from_pretrained(folder)


# Targets.


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"vocab_size": 70}, "`vocab_size` is 64, but the target has 70"),
        ({"hidden_size": 48}, "`target_hidden_size` is 32, but the target has 48"),
        ({"num_hidden_layers": 1}, r"`aux_hidden_state_layer_ids` are \[1, 2\], but the target has 1 layers"),
        ({"num_hidden_layers": 3}, "`num_target_layers` is 2, but the target has 3 layers.*made for a-user/a-target"),
    ],
)
def test_a_target_of_another_shape(changes, message):
    drafter = new_dflash(tiny_target("llama"), num_target_layers=2)
    with pytest.raises(ValueError, match=message):
        generate(new_target("llama", **changes), prompt(9), drafter)


def test_a_target_of_another_family():
    drafter = new_dflash(tiny_target("llama"))
    with pytest.raises(ValueError, match=r"`architectures` of its target are \['LlamaForCausalLM'\], but .* Qwen3For"):
        generate(tiny_target("qwen3"), prompt(9), drafter)
