# Copyright 2026 The hf_falcon authors. Licensed under the Apache License, Version 2.0.
"""EAGLE-3: the logits of the reference implementations, and the tokens of plain decoding."""

import itertools
from collections import Counter

import pytest
import simulated_device
import torch
from device_cases import MODES, Simulated, check, rounds
from distributions import surprise, text_probabilities
from eagle3_models import CASES, REFERENCES, new_eagle3, reference, reference_target, right_eagle3, write_original
from oracle import FreeDrafting, use_oracle
from quick import one_in, quick
from tiny_models import VOCAB, new_target, prompt, random_tokens, tiny_target, tiny_tokenizer
from torch import Tensor
from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM
from utilities import close

import hf_falcon
from hf_falcon import AutoDrafter, DraftedBlocks, DraftOptions, FalconCandidateGenerator
from hf_falcon.core import draft_session, policy
from hf_falcon.core.modeling_falcon_draft import additive_mask
from hf_falcon.drafters.eagle3 import Eagle3DraftModel

# Parity.


class AllRows:
    """A cache of a drafter's layers that keeps the rows of all passes."""

    def __init__(self):
        self._rows = {}

    def update(self, layer: int, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        before = self._rows.get(layer, (keys[:, :, :0], values[:, :, :0]))
        self._rows[layer] = tuple(torch.cat(pair, dim=2) for pair in zip(before, (keys, values)))
        return self._rows[layer]


@torch.no_grad()
def passes(drafter: Eagle3DraftModel, embedding: Tensor, hidden_states: Tensor, tokens: list[Tensor]) -> list[Tensor]:
    """
    The outputs of passes over all rows at once, as in training.

    Args:
        hidden_states: of the target, of shape `(1, rows, ...)`.
        tokens: the token that each row reads, for each pass.
    """
    rows = hidden_states.shape[1]
    given = torch.cat((torch.zeros(1, rows, drafter.config.target_hidden_size), hidden_states), dim=-1)
    places, cache, found = torch.arange(rows), AllRows(), []
    first = [places[:, None] >= places]
    if drafter.window is not None:
        first.append(first[0] & (places > places[:, None] - drafter.window))
    for number, row_tokens in enumerate(tokens):
        fused, _ = drafter.fuse(given, embedding[row_tokens][None])
        # Beside the first pass's rows, each row sees its own of the later passes.
        visible = torch.stack([torch.cat([mask, *[torch.eye(rows) > 0] * number], dim=1) for mask in first])
        mask = additive_mask(visible[None], torch.float32)
        given = drafter.run_layers(fused, places[None], (places + number)[None], mask, cache)
        found.append(given)
    return found


def logits_of(drafter: Eagle3DraftModel, states: Tensor) -> Tensor:
    with torch.no_grad():
        return drafter.lm_head(states if drafter.config.norm_output else drafter.norm(states))


@pytest.mark.parametrize("case", CASES)
def test_passes_have_the_logits_of_the_reference(case):
    drafter, tensors = AutoDrafter.from_pretrained(REFERENCES / case), reference(case)
    assert type(drafter) is Eagle3DraftModel and not drafter.training
    ids = tensors["input_ids"]
    embedding = tensors["target_embedding"] if drafter.embed_tokens is None else drafter.embed_tokens.weight
    tokens = [torch.cat((ids[0, number:], torch.zeros(number, dtype=torch.long))) for number in range(3)]
    for number, states in enumerate(passes(drafter, embedding, tensors["hidden_states"], tokens)):
        known = ids.shape[1] - number
        close(logits_of(drafter, states)[:, :known], tensors[f"logits_{number}"][:, :known])


class Rounds:
    """A candidate generator for the drafter of a reference, and what it was asked to draft."""

    def __init__(self, case: str, **options):
        self.drafter = AutoDrafter.from_pretrained(REFERENCES / case)
        options = {"num_assistant_tokens": 24, "draft_width": 4, "draft_top_k": 3, "num_draft_passes": 3, **options}
        options = DraftOptions(**options, assistant_confidence_threshold=0.0)
        self.generator = FalconCandidateGenerator(self.drafter, reference_target(case), options)
        self.session, tensors = self.generator.session, reference(case)
        self.hidden_states, self.ids = tensors["hidden_states"], tensors["input_ids"]
        unread = torch.randn(1, self.ids.shape[1], self.drafter.config.target_hidden_size)
        self.features = torch.cat((unread, self.hidden_states), dim=-1)

    def commit(self, start: int, end: int) -> Tensor:
        self.generator.commit(self.features[:, start:end], self.ids[:, start:end])
        return self.generator._block

    def embedding(self) -> Tensor:
        own = self.drafter.embed_tokens
        return self.generator.target.get_input_embeddings().weight if own is None else own.weight

    def on_path(self, known: int, path: list[int]) -> Tensor:
        """The state of the last pass over a path behind `known` positions."""
        tokens = [self.ids[0, :known]]
        for token in path:
            # The other rows of later passes have no influence.
            tokens.append(torch.zeros(known, dtype=torch.long).index_fill(0, torch.tensor([known - 1]), token))
        return passes(self.drafter, self.embedding(), self.hidden_states[:, :known], tokens)[-1][0, -1]


@torch.no_grad()
@pytest.mark.parametrize("case", CASES)
def test_rounds_have_the_logits_of_the_reference(case):
    """Positions come in several pieces, and each round drafts the reference's tokens beside others."""
    rounds, tensors = Rounds(case), reference(case)
    others = torch.tensor([3, 5, 7])
    for start, end in itertools.pairwise((0, 4, 5, 7, 10)):
        block = rounds.commit(start, end)
        close(rounds.generator.head.logits(block)[0, 0], tensors["logits_0"][0, end - 1])
        rounds.session.rewind()
        # The reference's path is the second of three, and then the first.
        tokens = torch.stack((others[0], rounds.ids[0, end], others[1]))[:, None]
        states = rounds.session.extend(
            DraftedBlocks(torch.zeros(3, dtype=torch.long), tokens, block.expand(3, -1, -1))
        )
        close(rounds.generator.head.logits(states)[1, 0], tensors["logits_1"][0, end - 1])
        if end + 1 < rounds.ids.shape[1]:
            blocks, tokens = torch.tensor([1, 0, 1]), torch.stack((rounds.ids[0, end + 1], others[2], others[0]))
            states = rounds.session.extend(DraftedBlocks(blocks, tokens[:, None], states[blocks]))
            close(rounds.generator.head.logits(states)[0, 0], tensors["logits_2"][0, end - 1])


@torch.no_grad()
@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("prefill", [512, 3], ids=["", "in chunks"])
def test_every_branch_is_computed_as_by_itself(case, prefill, monkeypatch):
    monkeypatch.setattr(draft_session, "_PREFILL_ROWS", prefill)
    rounds = Rounds(case)
    drafted, extend = [], rounds.session.extend

    def recorded(blocks: DraftedBlocks) -> Tensor:
        drafted.append((blocks, extend(blocks)))
        return drafted[-1][1]

    monkeypatch.setattr(rounds.session, "extend", recorded)
    for start, end in ((0, 7), (7, 8), (8, 11)):
        rounds.commit(start, end)
        drafted.clear()
        rounds.generator.propose(torch.cat((rounds.ids[:, :1], rounds.ids), dim=1)[:, : end + 1], max_depth=9)
        assert [len(blocks.blocks) for blocks, _ in drafted] == [3, 4]
        for number, (blocks, states) in enumerate(drafted):
            for branch in range(len(blocks.blocks)):
                path, block = [], branch
                for earlier, _ in reversed(drafted[: number + 1]):
                    path.insert(0, int(earlier.token_ids[block, 0]))
                    block = int(earlier.blocks[block])
                close(states[branch, 0], rounds.on_path(end, path), tolerance=2e-5)


def test_tokens_of_the_tree_are_the_most_probable_of_the_draft_vocabulary():
    rounds = Rounds("eagle3_original", num_draft_passes=1, draft_tree="static")
    rounds.commit(0, 6)
    tree = rounds.generator.propose(torch.cat((rounds.ids[:, :1], rounds.ids), dim=1)[:, :7], max_depth=1)
    d2t = rounds.drafter.d2t
    best = reference("eagle3_original")["logits_0"][0, 5].topk(len(tree) - 1).indices
    assert tree.token_ids[1:].tolist() == (best + d2t[best]).tolist()


# Generation.

NAMES = ("llama", "qwen3", "gemma3", "gemma2")
SETTINGS = {"greedy": {"do_sample": False}, "sampled": {"do_sample": True, "top_k": 0, "temperature": 1.1}}
SCHEDULES = {
    "constant": {},
    "heuristic": {"num_assistant_tokens_schedule": "heuristic", "prompt_lookup_num_tokens": 8},
}


def generate(target, ids, drafter=None, **settings):
    torch.manual_seed(7)
    settings = {"max_new_tokens": 16, "do_sample": False, "pad_token_id": 0, **settings}
    return target.generate(ids, assistant_model=drafter, return_dict_in_generate=True, **settings)


def check_equal(target, ids, drafter, **settings):
    """Drafts are verified, and the tokens are plain decoding's."""
    own = {name: value for name, value in settings.items() if name not in Eagle3DraftModel.draft_option_names}
    expected, output = generate(target, ids, **own), generate(target, ids, drafter, **settings)
    assert output.sequences.tolist() == expected.sequences.tolist()
    assert output.draft_statistics.drafted_tokens > 0
    return output.draft_statistics


@pytest.mark.parametrize("case", CASES)
def test_drafters_of_the_references_draft(case):
    drafter, target = AutoDrafter.from_pretrained(REFERENCES / case), reference_target(case)
    ids = 1 + random_tokens(1, 9) % 40
    for settings in SETTINGS.values():
        check_equal(target, ids, drafter, num_assistant_tokens_schedule="constant", **settings)


@pytest.fixture(params=["speculators", "original", "original with embedding", "pytorch_model.bin"])
def layout(request):
    """Writes a drafter in a layout, and reads it."""

    def read(drafter, folder):
        if request.param == "speculators":
            drafter.save_pretrained(folder)
        else:
            write_original(drafter, folder, binary=request.param.endswith(".bin"))
        return AutoDrafter.from_pretrained(folder)

    read.has_embedding = request.param == "original with embedding"
    return read


@pytest.mark.parametrize("name", NAMES)
def test_tokens_are_plain_decodings(name, layout, tmp_path):
    """By a drafter from the disk: a greedy sequence, and four that are sampled."""
    target = tiny_target(name)
    drafter = new_eagle3(target, has_embedding=layout.has_embedding, draft_vocab_size=40, fc_norm=True)
    found = layout(drafter, tmp_path)
    assert all(torch.equal(tensor, found.state_dict()[key]) for key, tensor in drafter.state_dict().items())
    found.generation_config = drafter.generation_config
    for rows, settings in zip((1, 4), SETTINGS.values()):
        check_equal(target, random_tokens(rows, 9), found, **settings)


@pytest.mark.parametrize("name, schedule, settings, rows", one_in(4, NAMES, SCHEDULES, SETTINGS, (1, 4)))
def test_schedules(name, schedule, settings, rows, monkeypatch):
    monkeypatch.setattr("hf_falcon.core.decoding.costs_of", lambda *args, **kwargs: FreeDrafting({64: 1.0}))
    target = tiny_target(name)
    drafter = new_eagle3(target, norm_output=True, norm_before_residual=True)
    check_equal(target, random_tokens(rows, 12), drafter, **SCHEDULES[schedule], **SETTINGS[settings])


@pytest.mark.parametrize("draft", [{"accuracy": 1.0}, {"accuracy": 0.7, "scattered": True}], ids=["oracle", "half"])
@pytest.mark.parametrize("name", quick(NAMES[:2], NAMES))
def test_accepted_drafts_continue_as_they_should(name, draft, monkeypatch):
    """An oracle's path is accepted: the drafter's cache, and its features, follow the accepted tokens."""
    target = tiny_target(name)
    ids, drafter = prompt(9), new_eagle3(target)
    truth = generate(target, ids, max_new_tokens=24).sequences
    made = use_oracle(monkeypatch, truth, **draft)
    output = generate(target, ids, drafter, max_new_tokens=24)
    assert output.sequences.tolist() == truth.tolist() and output.draft_statistics.accepted_tokens > 10
    # As a generator that commits all of the text at once.
    monkeypatch.undo()
    with torch.no_grad():
        done, new = made[0], FalconCandidateGenerator(drafter, target)
        known = done._next_position
        with hf_falcon.core.target_parts.FeatureTap(target, drafter.config.feature_layers) as tap:
            target(truth[:, :known])
        new.commit(tap.take(), truth[:, 1 : known + 1])
        close(done._block, new._block, tolerance=1e-4)


@pytest.mark.parametrize("draft_vocab_size", [None, 40])
@pytest.mark.parametrize("norm_output", [False, True])
def test_a_drafter_that_knows_the_target_is_right(draft_vocab_size, norm_output):
    """At every depth: each pass reads the token before, at its position, and the state before."""
    vocabulary = {} if draft_vocab_size is None else {"draft_vocab_size": draft_vocab_size}
    target, drafter = right_eagle3(norm_output=norm_output, **vocabulary)
    ids, passes, length = prompt(9), 5, 30
    truth = generate(target, ids, max_new_tokens=length).sequences[0, 9:].tolist()
    known = range(VOCAB) if drafter.d2t is None else drafter.draft_vocab_ids.tolist()
    chain = {"draft_top_k": 1, "num_draft_passes": passes, "num_assistant_tokens": passes}
    statistics = check_equal(target, ids, drafter, max_new_tokens=length, **chain)
    # Each round accepts the tokens up to the first that the drafter does not know, or that is one too many.
    rounds, place = 0, 1
    while place < length:
        drafted = truth[place : min(place + passes, length - 1)]
        place, rounds = place + 1 + len(list(itertools.takewhile(lambda token: token in known, drafted))), rounds + 1
    assert statistics.rounds == rounds
    for rows in (1, 3):
        statistics = check_equal(target, random_tokens(rows, 9), drafter, max_new_tokens=length)
        assert statistics.tokens_per_round > (3 if draft_vocab_size is None else 1.5)


@pytest.mark.parametrize("name", quick(("llama",), NAMES))
def test_bfloat16(name):
    target = new_target(name).bfloat16()
    drafter = new_eagle3(target).bfloat16()
    assert drafter.d2t is None and drafter.fc.weight.dtype == torch.bfloat16
    # Texts without near-ties.
    for seed in range(2):
        check_equal(target, prompt(9, seed), drafter, max_new_tokens=10)


def test_a_drafter_in_bfloat16_keeps_its_tables(tmp_path):
    target = tiny_target()
    drafter = new_eagle3(target, draft_vocab_size=40)
    drafter.save_pretrained(tmp_path)
    found = AutoDrafter.from_pretrained(tmp_path, dtype="bfloat16")
    assert found.dtype == torch.bfloat16 and found.norm.weight.dtype == torch.bfloat16
    assert found.d2t.dtype == torch.long and torch.equal(found.draft_vocab_ids, drafter.draft_vocab_ids)
    # Its states are bfloat16, the target's features float32.
    check_equal(target, prompt(9), found, num_assistant_tokens_schedule="constant")


def test_embeddings_as_prompt():
    target = tiny_target()
    embeds = target.get_input_embeddings()(prompt(9))
    settings = {"inputs_embeds": embeds, "max_new_tokens": 16, "do_sample": False, "pad_token_id": 0}
    expected = target.generate(**settings)
    for has_embedding in (False, True):
        drafter = new_eagle3(target, has_embedding=has_embedding)
        assert target.generate(**settings, assistant_model=drafter).tolist() == expected.tolist()


def test_a_multimodal_class():
    """Of its text model alone: the layers are found, and the family is the class's."""
    from transformers import Gemma3Config, Gemma3ForConditionalGeneration

    text = tiny_target("gemma3").config.to_dict()
    vision = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    vision |= {"image_size": 28, "patch_size": 14}
    torch.manual_seed(0)
    config = Gemma3Config(text_config=text, vision_config=vision, mm_tokens_per_image=4, image_token_index=60)
    target = Gemma3ForConditionalGeneration(config).eval()
    target.generation_config.eos_token_id = None
    drafter = new_eagle3(target)
    assert drafter.config.target_architectures == ["Gemma3ForConditionalGeneration"]
    check_equal(target, 1 + prompt(9) % 50, drafter)


# Verification by other rules.


@pytest.mark.slow
@pytest.mark.parametrize("draft_vocab_size", [6, 4])
def test_samples_are_distributed_as_plain_decodings(draft_vocab_size):
    """The second and the third token: those of the first tree."""
    target = new_target(vocab_size=6)
    ids = 1 + random_tokens(1, 9) % 5
    drafter = new_eagle3(target, draft_vocab_size=draft_vocab_size)
    settings = {"do_sample": True, "temperature": 2.0, "top_p": 0.95}
    options = {"verification": "speculative", "num_draft_passes": 2, "num_assistant_tokens": 6}
    processors = target._get_logits_processor(GenerationConfig(**settings), input_ids_seq_length=9, device="cpu")
    expected: Counter[tuple] = Counter()
    for text, chance in text_probabilities(target, ids, 3, processors).items():
        expected[text[1:]] += chance
    torch.manual_seed(0)
    found: Counter[tuple] = Counter()
    accepted = 0
    for _ in range(400):
        output = target.generate(
            ids, assistant_model=drafter, max_new_tokens=4, return_dict_in_generate=True, **settings, **options
        )
        found[tuple(output.sequences[0, 10:12].tolist())] += 1
        accepted += output.draft_statistics.accepted_tokens
    assert accepted > 100 and surprise(found, expected) < 4


@pytest.mark.parametrize("verification", ["speculative", "multi_root"])
def test_with_one_allowed_token_other_rules_are_greedy(verification):
    target, drafter = right_eagle3()
    for settings in ({}, {"draft_tree": "static"}):
        found = generate(
            target,
            prompt(9),
            drafter,
            do_sample=True,
            top_k=1,
            verification=verification,
            max_new_tokens=24,
            **settings,
        )
        assert found.sequences.tolist() == generate(target, prompt(9), max_new_tokens=24).sequences.tolist()
        assert found.draft_statistics.tokens_per_round > 2


# An accelerator, simulated.


@pytest.fixture
def device():
    with Simulated() as found:
        yield found


@pytest.mark.parametrize("mode", quick([*MODES][::2], MODES))
def test_modes_on_a_device(mode, device):
    target = new_target()
    drafter = new_eagle3(target, draft_vocab_size=40, has_embedding=mode == "sampled", norm_before_fc=True)
    settings = {**MODES[mode], **({"tokenizer": tiny_tokenizer()} if "stop_strings" in MODES[mode] else {})}
    check(device, device.put(target), device.put(drafter), prompt(9), **settings)


def test_a_drafter_on_another_device(device):
    target = new_target()
    drafter = new_eagle3(target, draft_vocab_size=40)
    check(device, device.put(target), device.put(drafter, 1), prompt(9))
    check(device, target, drafter, random_tokens(2, 9))


@pytest.mark.parametrize("rows", [1, 2])
@pytest.mark.parametrize("mode", ["greedy", "adaptive", "static tree", "prompt lookup"])
def test_synchronisations_of_a_round(mode, rows):
    """One brings the draft to the host, and one the target's choices."""
    target = new_target()
    drafter = new_eagle3(target, draft_vocab_size=40)
    simulated_device.move(target), simulated_device.move(drafter)
    settings = {"eos_token_id": [VOCAB], "pad_token_id": 0, **MODES[mode], "max_new_tokens": 20}
    found = rounds(target, drafter, random_tokens(rows, 9), **settings)
    assert max(syncs for syncs, _ in found) <= 2


# Targets.


def llama(**changes) -> LlamaForCausalLM:
    return LlamaForCausalLM(LlamaConfig(**{**tiny_target().config.to_dict(), **changes})).eval()


def test_a_target_of_another_family():
    drafter = new_eagle3(tiny_target("llama"))
    with pytest.raises(ValueError, match=r"`architectures` of its target are \['LlamaForCausalLM'\], but .* Qwen3For"):
        generate(tiny_target("qwen3"), prompt(9), drafter)
    drafter.config.speculators_config = {}
    check_equal(tiny_target("qwen3"), prompt(9), drafter)


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"vocab_size": 70}, "`vocab_size` is 64, but the target has 70"),
        ({"hidden_size": 48}, "`target_hidden_size` is 32, but the target has 48"),
        ({"num_hidden_layers": 1}, r"`eagle_aux_hidden_state_layer_ids` are \[2, 1\], but the target has 1 layers"),
    ],
)
def test_a_target_of_another_shape(changes, message):
    drafter = new_eagle3(tiny_target("llama"))
    with pytest.raises(ValueError, match=message):
        generate(llama(**changes), prompt(9), drafter)


def test_an_embedding_of_another_width():
    """A drafter that is narrower than its target cannot read the target's embedding."""
    target = tiny_target()
    sizes = {"hidden_size": 16, "num_attention_heads": 2, "num_key_value_heads": 2, "head_dim": 8}
    with pytest.raises(ValueError, match="embedding is 32 wide"):
        generate(target, prompt(9), new_eagle3(target, **sizes))
    check_equal(target, prompt(9), new_eagle3(target, has_embedding=True, **sizes))


def test_the_input_of_the_first_layer_is_read():
    target = tiny_target()
    drafter = new_eagle3(target, eagle_aux_hidden_state_layer_ids=[0, 2])
    assert drafter.config.feature_layers == [-1, 1]
    check_equal(target, prompt(9), drafter)


def test_layers_that_the_file_does_not_name():
    """They follow from the target; a target with too few is told so, and the next one is asked again."""
    drafter = AutoDrafter.from_pretrained(REFERENCES / "eagle3_original")
    assert drafter.config.eagle_aux_hidden_state_layer_ids is None
    with pytest.raises(ValueError, match="`eagle_aux_hidden_state_layer_ids` is None"):
        _ = drafter.config.feature_layers
    sizes = {"vocab_size": 48, "hidden_size": 16, "head_dim": 4}
    with pytest.raises(ValueError, match="a target of 4 layers has no 3 hidden states that are read by default"):
        drafter.check_target(llama(num_hidden_layers=4, **sizes))
    drafter.check_target(llama(num_hidden_layers=32, **sizes))
    assert drafter.config.eagle_aux_hidden_state_layer_ids == [2, 16, 29]


def test_other_weights_of_the_target_are_told_of(warnings_given):
    target, drafter = tiny_target(), new_eagle3(tiny_target())
    generate(target, prompt(9), drafter)
    assert not warnings_given()
    policy._acceptance_stats.clear()
    drafter.config.target_fingerprint = "0"
    generate(target, prompt(9), drafter)
    assert "weights are not those of" in warnings_given()[-1]


def test_it_generates_nothing_by_itself():
    with pytest.raises(TypeError, match="generates nothing by itself"):
        new_eagle3(tiny_target()).generate(prompt(5))
