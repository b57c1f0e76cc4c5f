# Copyright 2026 The hf_falcon authors. Licensed under the Apache License, Version 2.0.
"""Targets that take no tree: chains of tokens, and accepted tokens that are deferred until a state can be kept."""

import copy
import random

import pytest
import torch
import transformers
from oracle import FreeDrafting, use_oracle
from quick import quick
from shrunken import VOCAB, tiny_model
from tiny_models import SAME_EVERY_ROUND
from transformers import DynamicCache
from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer

from hf_falcon import FalconDraftConfig, FalconDraftModel
from hf_falcon.chains import ChainRun, Rewind
from hf_falcon.core import decoding
from hf_falcon.core.caches import RowSlots, SlotLayer
from hf_falcon.core.target_parts import CACHE_NAME
from hf_falcon.core.tree import DraftTree, ancestor_mask, chain

# Linear attention, convolutions, both kinds of layer in one, Mamba 2, states that are no cache of transformers, caches
# that a model makes itself; ALiBi, positions of the model's own, windows that follow the slots, chosen keys.
RECURRENT = ("qwen3_next", "falcon_h1", "mamba2", "rwkv", "minimax", "deepseek_v4")
OTHERS = ("lfm2", "bloom", "bart", "gpt_neo", "llama4_text", "glm_moe_dsa")
PROMPT_LENGTH, NEW_TOKENS = 11, 40


@pytest.fixture(scope="module")
def model_of():
    made = {}

    def get(model_type):
        if model_type not in made:
            made[model_type] = tiny_model(model_type)
        return made[model_type]

    return get


@pytest.fixture
def runs(monkeypatch):
    """The runs of chains of all later calls."""
    made = []

    class Recorded(ChainRun):
        def __init__(self, *args):
            super().__init__(*args)
            self.rounds = []
            made.append(self)

        def score(self, trees, texts):
            self.rounds.append((self.deferred, len(trees[0])))
            return super().score(trees, texts)

    monkeypatch.setattr(decoding, "part", {"chains": Recorded}.get)
    return made


def prompt(length=PROMPT_LENGTH, seed=1):
    return torch.randint(3, VOCAB, (1, length), generator=torch.Generator().manual_seed(seed))


def drafter_of(target, block_size=2, **options):
    config = FalconDraftConfig.from_target(target, block_size=block_size, num_hidden_layers=1, num_lstm_layers=0)
    drafter = FalconDraftModel(config).eval()
    for option, value in {**SAME_EVERY_ROUND, "assistant_confidence_threshold": 0.0, **options}.items():
        setattr(drafter.generation_config, option, value)
    return drafter


def generate(target, ids, do_sample=False, **kwargs):
    torch.manual_seed(0)
    return target.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        **{"max_new_tokens": NEW_TOKENS, "return_dict_in_generate": True, "pad_token_id": 0, **kwargs},
        do_sample=do_sample,
        temperature=0.8 if do_sample else None,
    )


@pytest.mark.parametrize("do_sample", [False, True], ids=["greedy", "sampled"])
@pytest.mark.parametrize("accuracy", [0.6, 1.0])
@pytest.mark.parametrize("model_type", quick(("qwen3_next", "mamba2", "minimax", "lfm2", "bloom"), RECURRENT + OTHERS))
def test_equal_to_plain_decoding(model_type, accuracy, do_sample, model_of, runs, monkeypatch):
    target = model_of(model_type)
    expected = generate(target, prompt(), do_sample, output_logits=True)
    use_oracle(monkeypatch, expected.sequences, accuracy=accuracy)
    found = generate(target, prompt(), do_sample, output_logits=True, assistant_model=drafter_of(target))
    assert found.sequences.tolist() == expected.sequences.tolist()
    for ours, theirs in zip(found.logits, expected.logits, strict=True):
        torch.testing.assert_close(ours, theirs, atol=1e-3, rtol=1e-3)
    assert found.draft_statistics.accepted_tokens > NEW_TOKENS // 4
    [run] = runs
    deferred = [count for count, _ in run.rounds]
    # Layers without a state drop what is rejected at once; where all is right, nothing is deferred.
    assert (max(deferred) > 0) == (model_type in RECURRENT and accuracy < 1)
    assert max(deferred) < ChainRun.most_deferred + drafter_of(target).generation_config.num_assistant_tokens + 1


@pytest.mark.parametrize(
    "model_type", quick(("qwen3_next", "lfm2"), ("qwen3_next", "lfm2", "falcon_h1", "bloom", "deepseek_v4", "mamba2"))
)
def test_the_cache_is_as_plain_decoding_leaves_it(model_type, model_of, monkeypatch):
    target = model_of(model_type)
    first = generate(target, prompt())
    use_oracle(monkeypatch, first.sequences, accuracy=0.6)
    found = generate(target, prompt(), assistant_model=drafter_of(target))
    assert [type(layer) for layer in found.past_key_values.layers] == [
        type(layer) for layer in first.past_key_values.layers
    ]
    longer = torch.cat((first.sequences, prompt(5, seed=2)), dim=1)
    name = "cache_params" if model_type == "mamba2" and CACHE_NAME != "cache" else CACHE_NAME
    expected = generate(target, longer, **{name: copy.deepcopy(first.past_key_values)}).sequences
    # The next turn, plainly and with the drafter.
    plainly = generate(target, longer, **{name: copy.deepcopy(found.past_key_values)}).sequences
    assert plainly.tolist() == expected.tolist()
    use_oracle(monkeypatch, expected, accuracy=0.6)
    drafted = generate(target, longer, **{name: found.past_key_values}, assistant_model=drafter_of(target))
    assert drafted.sequences.tolist() == expected.tolist()


def test_a_cache_of_the_model_itself_stays_the_callers(model_of, monkeypatch):
    """Where the model brings its cache, the caller's object holds the text after the call."""
    target = model_of("minimax")
    first = generate(target, prompt())
    longer = torch.cat((first.sequences, prompt(5, seed=2)), dim=1)
    expected = generate(target, longer, past_key_values=copy.deepcopy(first.past_key_values))
    use_oracle(monkeypatch, expected.sequences, accuracy=0.6)
    cache = copy.deepcopy(first.past_key_values)
    found = generate(target, longer, past_key_values=cache, assistant_model=drafter_of(target))
    assert found.sequences.tolist() == expected.sequences.tolist()
    assert cache.get_seq_length(1) == expected.past_key_values.get_seq_length(1)
    for ours, theirs in zip(cache.linear_cache, expected.past_key_values.linear_cache, strict=True):
        assert len(ours) == len(theirs) and (len(ours) == 0 or torch.allclose(ours, theirs, atol=1e-3, rtol=1e-3))


class Broken(Exception):
    pass


@pytest.mark.parametrize("place", ["streamer", "target", "every forward"])
@pytest.mark.parametrize("model_type", ["qwen3_next", "lfm2", "gpt_neo"])
def test_a_round_that_breaks_off(model_type, place, model_of, monkeypatch):
    """The user's cache then holds a beginning of the text, from which plain decoding goes on."""
    target = model_of(model_type)
    expected = generate(target, prompt()).sequences
    use_oracle(monkeypatch, expected, accuracy=0.6)
    cache, drafter = DynamicCache(config=target.config.get_text_config(decoder=True)), drafter_of(target)
    left = [10**9]

    def count(*_):
        left[0] -= 1
        if left[0] == 0 or (left[0] < 0 and place == "every forward"):
            raise Broken

    handle, streamer = None, None
    kinds = None
    if place == "every forward":
        kinds = [type(layer) for layer in cache.layers]
        handle = target.register_forward_pre_hook(count)
    elif place == "target":
        # In the middle of a forward: some layers have run.
        handle = (
            target.get_decoder().layers[-1].register_forward_pre_hook(count)
            if model_type != "gpt_neo"
            else (target.get_decoder().h[-1].register_forward_pre_hook(count))
        )
    else:
        streamer = type("Streamer", (), {"put": count, "end": lambda self: None})()
    # The target is probed before, so that the call runs its own text only.
    generate(target, prompt(), assistant_model=drafter, past_key_values=copy.deepcopy(cache), max_new_tokens=1)
    left[0] = 17 if place == "streamer" else 9
    with pytest.raises(Broken):
        generate(target, prompt(), past_key_values=cache, assistant_model=drafter, streamer=streamer)
    if handle is not None:
        handle.remove()
    assert kinds is None or [type(layer) for layer in cache.layers[: len(kinds)]] == kinds
    known = cache.get_seq_length()
    assert PROMPT_LENGTH <= known < expected.shape[1]
    again = generate(target, expected[:, : known + 1], past_key_values=cache, max_new_tokens=8)
    assert again.sequences.tolist() == expected[:, : known + 9].tolist()


def test_deferred_tokens_enter_the_cache_by_cost(model_of, runs, monkeypatch):
    """Where a token more costs nothing they may stay outside; where it costs time they enter sooner."""
    target = model_of("qwen3_next")
    expected = generate(target, prompt()).sequences
    use_oracle(monkeypatch, expected, accuracy=0.6)
    alone = {}

    class Linear(FreeDrafting):
        slope = 0.0

        def target(self, most):
            return [1.0 + self.slope * nodes for nodes in range(most + 1)]

    monkeypatch.setattr(decoding, "costs_of", lambda *args, **kwargs: Linear({0: 1.0, 127: 1.0}))
    for slope in (0.0, 0.15):
        Linear.slope = slope
        options = {"num_assistant_tokens_schedule": "heuristic"}
        found = generate(target, prompt(), assistant_model=drafter_of(target, **options))
        assert found.sequences.tolist() == expected.tolist()
        rounds = runs[-1].rounds
        alone[slope] = [deferred for deferred, nodes in rounds if deferred and nodes == 1]
    assert all(deferred >= ChainRun.most_deferred for deferred in alone[0.0])
    assert alone[0.15] and min(alone[0.15]) <= ChainRun.most_deferred // 2


@pytest.mark.parametrize("model_type", ["jamba", "mamba"])
def test_a_target_that_forgets_its_state_is_decoded_plainly(model_type, model_of, warnings_given):
    target = model_of(model_type)
    expected = generate(target, prompt()).sequences
    found = generate(target, prompt(), assistant_model=drafter_of(target))
    assert found.sequences.tolist() == expected.tolist()
    assert found.draft_statistics is None
    assert "otherwise than one by one" in warnings_given()[0]


@pytest.mark.parametrize(
    "model_type, arguments, reason",
    [
        ("zamba2", {}, "`time_step_limit`"),
        ("bloom", {"output_attentions": True}, "`output_attentions` was asked for"),
        ("bloom", {"cache_implementation": "static"}, "static cache"),
        ("bloom", {"num_return_sequences": 2, "do_sample": True}, "several rows"),
    ],
)
def test_decoded_plainly(model_type, arguments, reason, model_of, warnings_given):
    target = model_of(model_type)
    expected = generate(target, prompt(), **arguments).sequences
    found = generate(target, prompt(), **arguments, assistant_model=drafter_of(target))
    assert found.sequences.tolist() == expected.tolist()
    assert found.draft_statistics is None
    assert reason in warnings_given()[0]


def test_weights_that_the_first_forward_rescales(monkeypatch):
    """RWKV divides weights in its first forward, and notes that it has: the probe may be the first."""
    target, other = (tiny_model("rwkv", rescale_every=1) for _ in range(2))
    expected = generate(target, prompt(), output_logits=True)
    use_oracle(monkeypatch, expected.sequences, accuracy=0.8)
    found = generate(other, prompt(), output_logits=True, assistant_model=drafter_of(other))
    for ours, theirs in zip(found.logits, expected.logits, strict=True):
        torch.testing.assert_close(ours, theirs, atol=1e-3, rtol=1e-3)
    assert found.draft_statistics.accepted_tokens > 0


KINDS = ["sliding_attention", "compressed_sparse_attention", "heavily_compressed_attention"]


@pytest.mark.parametrize(
    "case, reason", [("window", "share a mask"), ("padding", "positions are shifted"), ("positions", "are shifted")]
)
def test_compressed_layers(case, reason, warnings_given, monkeypatch):
    rates = {"compressed_sparse_attention": 2, "heavily_compressed_attention": 16}
    kinds = {"layer_types": KINDS, "num_hidden_layers": 3} if case == "window" else {}
    target, ids = tiny_model("deepseek_v4", compress_rates=rates, **kinds), prompt(60)
    mask = torch.ones_like(ids)
    mask[:, : 7 * (case == "padding")] = 0
    settings = {"attention_mask": mask, "do_sample": False, "max_new_tokens": NEW_TOKENS, "pad_token_id": 0}
    if case == "positions":
        settings["position_ids"] = torch.arange(60)[None] // 2
    expected = target.generate(ids, **settings)
    use_oracle(monkeypatch, expected, accuracy=0.8)
    found = target.generate(ids, assistant_model=drafter_of(target), **settings)
    assert found.tolist() == expected.tolist()
    assert reason in warnings_given()[0]


def test_sparse_layers_with_shifted_positions(warnings_given, monkeypatch):
    sizes = {"index_block_size": 4, "index_topk_blocks": 3, "index_n_heads": 2, "num_hidden_layers": 2}
    target, ids = tiny_model("minimax_m3_vl_text", layer_types=["minimax_m3_sparse"] * 2, **sizes), prompt(60)
    settings = {"do_sample": False, "max_new_tokens": NEW_TOKENS, "pad_token_id": 0}
    settings["position_ids"] = torch.arange(60)[None] // 2
    expected = target.generate(ids, **settings)
    use_oracle(monkeypatch, expected, accuracy=0.8)
    found = target.generate(ids, assistant_model=drafter_of(target), **settings)
    assert found.tolist() == expected.tolist() and "positions are shifted" in warnings_given()[0]


def test_a_target_that_drops_its_cache_in_every_step(warnings_given):
    target = tiny_model("phi4_multimodal", original_max_position_embeddings=20)
    expected = generate(target, prompt()).sequences
    found = generate(target, prompt(), assistant_model=drafter_of(target))
    assert found.sequences.tolist() == expected.tolist()
    assert "crosses 20 tokens, the target drops its cache" in warnings_given()[0]


def test_a_decoder_with_the_states_of_an_encoder():
    """Whisper's, which puts another cache in place of the call's."""
    target = tiny_model("whisper")
    states = torch.randn(1, 6, target.config.d_model, generator=torch.Generator().manual_seed(0))
    settings = {"encoder_outputs": (states,), "do_sample": False, "max_new_tokens": 20}
    expected = target.generate(prompt(), **settings)
    assert target.generate(prompt(), assistant_model=drafter_of(target), **settings).tolist() == expected.tolist()


# Trees would be wrong in the first, and longer than the table of positions in the second.
SLOTS = {
    "llama4_text": {
        "layer_types": ["full_attention"] * 2,
        "floor_scale": 32,
        "attn_scale": 9.0,
        "no_rope_layers": [0, 0],
    },
    "gpt_neo": {"attention_types": [[["global"], 2]], "max_position_embeddings": PROMPT_LENGTH + NEW_TOKENS},
}


@pytest.mark.parametrize("model_type", SLOTS)
def test_layers_that_count_slots(model_type, runs, monkeypatch):
    target = tiny_model(model_type, **SLOTS[model_type])
    expected = generate(target, prompt()).sequences
    use_oracle(monkeypatch, expected, accuracy=0.8)
    found = generate(target, prompt(), assistant_model=drafter_of(target, num_assistant_tokens=16))
    assert found.sequences.tolist() == expected.tolist()
    assert found.draft_statistics.accepted_tokens > NEW_TOKENS // 4 and runs


def test_positions_that_leave_out_padding_tokens(warnings_given, monkeypatch):
    """In a chain, the tokens behind a padding token would be one position off."""
    target = tiny_model("trocr", use_learned_position_embeddings=False)
    [positions] = [module for module in target.modules() if hasattr(module, "create_position_ids_from_input_ids")]
    for positions.padding_idx in range(VOCAB):
        expected = generate(target, prompt()).sequences
        if positions.padding_idx in expected[0, PROMPT_LENGTH:-5]:
            break
    use_oracle(monkeypatch, expected, accuracy=1.0)
    found = generate(target, prompt(), assistant_model=drafter_of(target))
    assert found.sequences.tolist() == expected.tolist()
    assert "counts positions itself" in warnings_given()[0]


@pytest.mark.slow
def test_flex_attention(runs, monkeypatch):
    target = tiny_model("llama", head_dim=16)
    eager = generate(target, prompt()).sequences
    target.set_attn_implementation("flex_attention")
    expected = generate(target, prompt()).sequences
    if expected.tolist() != eager.tolist():
        pytest.skip("plain decoding with torch's flex_attention is wrong on this processor (seen on AVX2)")
    use_oracle(monkeypatch, expected, accuracy=0.8)
    found = generate(target, prompt(), assistant_model=drafter_of(target))
    assert found.sequences.tolist() == expected.tolist()
    if not transformers.__version__.startswith("5.17."):
        assert found.draft_statistics.accepted_tokens > 0 and runs


@pytest.mark.parametrize("verification", ["speculative", "multi_root"])
def test_chains_are_verified_exactly(verification, model_of, runs):
    target = model_of("qwen3_next")
    expected = generate(target, prompt(), do_sample=True).sequences
    options = {"verification": verification, "draft_tree": [(0,), (1,), (0, 0)]}
    found = generate(target, prompt(), do_sample=True, assistant_model=drafter_of(target, **options))
    assert found.sequences.tolist() == expected.tolist() and runs


def test_likeliest_path():
    parents = torch.tensor([0, 0, 0, 1, 2, 4])
    visible = ancestor_mask(parents, 3)
    # The longest path counts more than the first token.
    probs = torch.tensor([1.0, 0.5, 0.45, 0.1, 0.4, 0.3])
    tree = DraftTree(torch.arange(6), parents, visible.sum(dim=1) - 1, visible, probs.log())
    path = tree.likeliest_path()
    assert path.token_ids.tolist() == [0, 2, 4, 5]
    assert path.parents.tolist() == [0, 0, 1, 2] and path.depths.tolist() == [0, 1, 2, 3]
    assert path.visible.equal(torch.ones(4, 4, dtype=torch.bool).tril())
    torch.testing.assert_close(path.log_probs.exp(), probs[[0, 2, 4, 5]])
    assert path.likeliest_path() is path
    assert chain(torch.tensor([7])).likeliest_path().token_ids.tolist() == [7]


class Odd(DynamicLayer):
    """A layer that keeps a sum beside its rows, and changes it in place."""

    def __init__(self):
        super().__init__()
        self.sum = torch.zeros(1)

    def update(self, keys, values, *args, **kwargs):
        self.sum += keys.sum()
        return super().update(keys, values)


@pytest.mark.parametrize("seed", quick(range(3), range(30)))
@pytest.mark.parametrize("kinds", ["rows", "window", "odd"])
def test_rewind(kinds, seed):
    """Any sequence of forwards that are kept in full, in part or undone leaves what the kept rows alone leave."""
    generator = random.Random(seed)

    def new_cache():
        cache = DynamicCache()
        window = DynamicSlidingWindowLayer(6)
        cache.layers = {"rows": [DynamicLayer()], "window": [DynamicLayer(), window], "odd": [DynamicLayer(), Odd()]}[
            kinds
        ]
        return cache

    def add(cache, rows):
        for layer in cache.layers:
            layer.update(rows.clone(), rows.clone())

    def rows(count):
        return torch.randint(9, (1, 1, count, 2)).float()

    torch.manual_seed(seed)
    cache, plain = new_cache(), new_cache()
    start = rows(8)
    add(cache, start)
    add(plain, start)
    rewind = Rewind(cache, RowSlots([8], start.device))
    assert rewind.drops_tokens == (kinds != "odd")
    for _ in range(12):
        new = rows(generator.randint(1, 5))
        rewind.mark()
        add(cache, new)
        count, kept = new.shape[2], generator.randint(0, new.shape[2])
        if kept == 0:
            rewind.undo()
        elif rewind.keep(count, kept):
            for each in new[:, :, :kept].split(1, dim=2):
                add(plain, each)
        else:
            assert kinds == "odd" and kept < count
    rewind.finish()
    for ours, theirs in zip(cache.layers, plain.layers, strict=True):
        assert ours.get_seq_length() == theirs.get_seq_length()
        assert ours.keys.equal(theirs.keys) and ours.values.equal(theirs.values)
        assert getattr(ours, "sum", None) == getattr(theirs, "sum", None)


@pytest.mark.parametrize(("model_type", "rows"), [("llama", 1), ("llama", 2), ("bloom", 1)])
def test_a_stream_ends_once_the_cache_is_complete(model_type, rows, model_of):
    class Streamer:
        def put(self, tokens):
            pass

        def end(self):
            seen.append((type(cache.layers[0]).__name__, cache.get_seq_length()))

    target = model_of(model_type)
    ids = torch.arange(4, 4 + rows * PROMPT_LENGTH).view(rows, -1) % VOCAB
    found = []
    for drafter in (None, FalconDraftModel(FalconDraftConfig.from_target(target)).eval()):
        seen: list = []
        cache = DynamicCache(config=target.config)
        options = {"max_new_tokens": 12, "do_sample": False, CACHE_NAME: cache, "eos_token_id": None}
        target.generate(ids, assistant_model=drafter, streamer=Streamer(), **options)
        found.append(seen)
    assert found[0] == found[1] and len(found[0]) == 1


def test_the_cache_of_the_caller_grows_beside_cross_attention():
    """GPT-2 puts it into one of two caches, and returns that."""
    torch.manual_seed(0)
    sizes = {
        "n_layer": 2,
        "n_head": 4,
        "n_embd": 32,
        "vocab_size": VOCAB,
        "n_positions": 128,
        "initializer_range": 0.3,
    }
    ends = {"eos_token_id": None, "bos_token_id": None, "pad_token_id": 0}
    config = transformers.GPT2Config(**sizes, **ends, add_cross_attention=True)
    target = transformers.GPT2LMHeadModel(config).eval()
    ids, seen = torch.arange(4, 4 + PROMPT_LENGTH)[None], torch.randn(1, 5, 32)
    found = []
    for assistant in ({}, {"assistant_model": "lookup"}):
        cache = DynamicCache(config=config)
        options = {"encoder_hidden_states": seen, CACHE_NAME: cache, "max_new_tokens": NEW_TOKENS, "do_sample": False}
        found.append((target.generate(ids, **options, **assistant).tolist(), [each.keys for each in cache.layers]))
    assert found[0][0] == found[1][0]
    for plain, drafted in zip(found[0][1], found[1][1]):
        torch.testing.assert_close(drafted, plain, rtol=0, atol=1e-4)


def test_memory_that_runs_out_while_layers_are_replaced_leaves_the_cache_whole(model_of, monkeypatch):
    target, stock, made = model_of("bloom"), SlotLayer.__init__, []

    def fails_second(self, *args, **kwargs):
        made.append(self)
        if len(made) == 2:
            raise torch.OutOfMemoryError("full")
        stock(self, *args, **kwargs)

    cache = DynamicCache(config=target.config)
    drafter = FalconDraftModel(FalconDraftConfig.from_target(target)).eval()
    options = {"max_new_tokens": 8, "do_sample": False, "assistant_model": drafter}
    target.generate(torch.arange(4, 4 + PROMPT_LENGTH)[None], **options)
    monkeypatch.setattr(SlotLayer, "__init__", fails_second)
    with pytest.raises(torch.OutOfMemoryError, match="full"):
        target.generate(torch.arange(4, 4 + PROMPT_LENGTH)[None], **options, **{CACHE_NAME: cache})
    assert {type(each) for each in cache.layers} == {DynamicLayer}
