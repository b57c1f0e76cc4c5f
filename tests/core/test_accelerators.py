# Copyright 2026 The hf_falcon authors. Licensed under the Apache License, Version 2.0.
"""
Decoding on an accelerator: in every mode the text of plain decoding there. And what a round asks of the device: few
synchronisations, and few launches beside the target's own. By default on a simulated device; the tests marked `gpu`
run on CUDA.
"""

import copy
from typing import Any

import pytest
import simulated_device
import torch
from accelerate import dispatch_model
from device_cases import CHAIN, MODES, NEW_TOKENS, Cuda, Simulated, check, generate, rounds
from quick import quick
from tiny_models import (
    ROPE_PHI3,
    VOCAB,
    new_drafter,
    new_target,
    prompt,
    random_tokens,
    tiny_drafter,
    tiny_target,
    tiny_tokenizer,
)
from transformers import DynamicCache, PreTrainedModel, StaticCache
from transformers.generation.streamers import BaseStreamer

from hf_falcon.core.policy import acceptance_stats_of
from hf_falcon.core.target_parts import CACHE_NAME


@pytest.fixture(params=["simulated", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request):
    with Simulated() if request.param == "simulated" else Cuda() as found:
        yield found


def models(device, name="llama", dtype=torch.float32, **drafter) -> tuple[PreTrainedModel, PreTrainedModel]:
    """A target and a drafter of one's own on the device."""
    target = copy.deepcopy(tiny_target(name)).to(dtype)
    shape = {"block_size": 2, "num_lstm_layers": 0, **drafter}
    options = {name: shape.pop(name) for name in list(shape) if name not in ("block_size", "num_lstm_layers", "extra")}
    assistant = copy.deepcopy(tiny_drafter(tiny_target(name), **shape, **options)).to(dtype)
    return device.put(target), device.put(assistant)


DRAFTERS: dict[str, dict[str, Any]] = {
    "k = 1": {"block_size": 1},
    "k = 3": {"block_size": 3},
    "LSTM": {"num_lstm_layers": 2},
    "conditioning": {"extra": "conditioning"},
    "feature layers": {"extra": "layers"},
}


@pytest.mark.parametrize("mode", MODES)
def test_modes(mode, device):
    target, drafter = models(device)
    settings = {**MODES[mode], **({"tokenizer": tiny_tokenizer()} if "stop_strings" in MODES[mode] else {})}
    check(device, target, drafter, prompt(9), **settings)


@pytest.mark.parametrize("mode", ["greedy", "sampled"])
@pytest.mark.parametrize("shape", DRAFTERS)
def test_drafters(shape, mode, device):
    check(device, *models(device, **DRAFTERS[shape]), prompt(9), **MODES[mode])


def test_a_draft_vocabulary(device):
    target = copy.deepcopy(tiny_target("llama"))
    drafter = new_drafter(target, draft_vocab_size=30)
    check(device, device.put(target), device.put(drafter), prompt(9))


@pytest.mark.parametrize("mode", ["greedy", "sampled", "adaptive", "static tree", "static cache"])
@pytest.mark.parametrize("name", ["llama", "gemma3"])
def test_batches(name, mode, device):
    target, drafter = models(device, name)
    ids, mask = random_tokens(3, 9), torch.ones(3, 9, dtype=torch.long)
    mask[1, :4], ids[1, :4] = 0, 0
    settings = {"attention_mask": device.tensor(mask), "eos_token_id": [17, 33], "pad_token_id": 0, **MODES[mode]}
    check(device, target, drafter, ids, **settings)


def test_rows_that_draft_nothing(device):
    """A row of one token less than the others has no room for drafts at its end."""
    target, drafter = models(device)
    check(device, target, drafter, random_tokens(3, 9), max_new_tokens=3)
    acceptance_stats_of(drafter, target).expected_tokens = 0.0
    settings = {"max_new_tokens": 6, "num_assistant_tokens_schedule": "heuristic"}
    expected = generate(device, target, random_tokens(3, 9), max_new_tokens=6)
    found = generate(device, target, random_tokens(3, 9), assistant_model=drafter, **settings)
    assert device.host(found.sequences).tolist() == device.host(expected.sequences).tolist()


@pytest.mark.parametrize("name", ["gemma3", "qwen2-mixed", "mistral-window", "granite", "llama-dynamic", *ROPE_PHI3])
def test_targets(name, device):
    target, drafter = models(device, name)
    check(device, target, drafter, prompt(18), max_new_tokens=24)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_half_precision(dtype, device):
    """A text without near-ties is the same in half precision, too."""
    target, drafter = models(device, dtype=dtype)
    for seed in range(3):
        check(device, target, drafter, prompt(9, seed), max_new_tokens=12)


def test_speculative_sampling(device):
    target, drafter = models(device)
    settings = {"assistant_model": drafter, "do_sample": True, "verification": "speculative"}
    for draft_tree in ("static", CHAIN):
        output = generate(device, target, prompt(9), top_k=4, draft_tree=draft_tree, **settings)
        logits = target(output.sequences).logits[0, 8:-1]
        allowed = device.host(logits.topk(4).indices)
        written = device.host(output.sequences)[0, 9:]
        assert (allowed == written[:, None]).any(dim=1).all() and output.draft_statistics.drafted_tokens > 0
    # One token is allowed: the greedy one.
    greedy = generate(device, target, prompt(9))
    output = generate(device, target, prompt(9), top_k=1, **settings)
    assert device.host(output.sequences).tolist() == device.host(greedy.sequences).tolist()


def test_several_roots(device):
    target, drafter = models(device)
    settings = {"assistant_model": drafter, "do_sample": True, "verification": "multi_root", "top_k": 1}
    output = generate(device, target, prompt(9), **settings)
    greedy = generate(device, target, prompt(9))
    assert device.host(output.sequences).tolist() == device.host(greedy.sequences).tolist()
    output = generate(device, target, prompt(9), **{**settings, "top_k": 8, "temperature": 2.0})
    assert output.sequences.shape == (1, 9 + NEW_TOKENS) and output.draft_statistics.accepted_tokens > 0


@pytest.mark.parametrize("rows", [1, 2])
def test_streamers(rows, device):
    class Streamer(BaseStreamer):
        def __init__(self):
            self.tokens, self.ended = [], False

        def put(self, value):
            assert value.device.type == "cpu"
            self.tokens += value.flatten().tolist()

        def end(self):
            self.ended = True

    target, drafter = models(device)
    streamers = Streamer(), Streamer()
    generate(device, target, random_tokens(rows, 9), streamer=streamers[0])
    generate(device, target, random_tokens(rows, 9), streamer=streamers[1], assistant_model=drafter)
    assert streamers[0].tokens == streamers[1].tokens and streamers[1].ended


def test_a_tree_of_paths_is_as_deep_as_on_a_cpu(device):
    paths = [[0] * depth for depth in range(1, 6)]
    target, drafter = models(device, block_size=1, draft_tree=paths, num_draft_passes=2)
    output = generate(device, target, prompt(9), assistant_model=drafter)
    assert output.draft_statistics.drafted_tokens > 3 * output.draft_statistics.rounds


def test_embeddings_as_prompt(device):
    target, drafter = models(device)
    embeds = target.get_input_embeddings()(device.tensor(prompt(9)))
    settings = {"inputs_embeds": embeds, "max_new_tokens": NEW_TOKENS, "do_sample": False}
    expected = target.generate(**settings)
    found = target.generate(**settings, assistant_model=drafter)
    assert device.host(found).tolist() == device.host(expected).tolist()


@pytest.mark.parametrize("kind", [DynamicCache, StaticCache])
def test_a_cache_that_is_continued(kind, device):
    target, drafter = models(device)
    length = {"max_cache_len": 64} if kind is StaticCache else {}
    caches = [kind(config=target.config, **length) for _ in range(2)]
    texts = [prompt(9), prompt(9)]
    for _ in range(2):
        for place, assistant in enumerate(({}, {"assistant_model": drafter})):
            output = generate(device, target, texts[place], past_key_values=caches[place], **assistant)
            texts[place] = torch.cat((device.host(output.sequences), prompt(2, 5)), dim=1)
        assert texts[0].tolist() == texts[1].tolist()


def test_a_criterion_of_ones_own_gets_tokens_of_the_device(device):
    target, drafter = models(device)
    places = set()

    def criterion(input_ids, scores, **kwargs):
        places.add(input_ids.device.type)
        return input_ids[:, -1] == 7

    check(device, target, drafter, prompt(9), stopping_criteria=[criterion], max_new_tokens=20)
    assert places == {device.name}


@pytest.mark.parametrize("extra", ["nothing", "conditioning", "layers"])
def test_a_drafter_on_another_device(extra, device):
    if device.count < 2:
        pytest.skip("needs two devices")
    target = device.put(copy.deepcopy(tiny_target("llama")))
    drafter = device.put(copy.deepcopy(tiny_drafter(tiny_target("llama"), 2, 0, extra)), 1)
    for mode in ("greedy", "sampled"):
        check(device, target, drafter, prompt(9), **MODES[mode])
    check(device, target, drafter, random_tokens(2, 9))


@pytest.mark.parametrize("extra", ["nothing", "layers"])
def test_a_target_on_two_devices(extra, device):
    if device.count < 2:
        pytest.skip("needs two devices")
    target = copy.deepcopy(tiny_target("llama"))
    drafter = device.put(copy.deepcopy(tiny_drafter(tiny_target("llama"), 2, 0, extra)))
    device.put(target.model.layers[1], 1), device.put(target.model.norm, 1), device.put(target.lm_head, 1)
    for part in (target.model.embed_tokens, target.model.rotary_emb, target.model.layers[0]):
        device.put(part)
    first = dict.fromkeys(("model.embed_tokens", "model.rotary_emb", "model.layers.0"), f"{device.name}:0")
    second = dict.fromkeys(("model.layers.1", "model.norm", "lm_head"), f"{device.name}:1")
    dispatch_model(target, first | second, skip_keys=CACHE_NAME, force_hooks=True)
    for mode in ("greedy", "sampled"):
        check(device, target, drafter, prompt(9), **MODES[mode])
    check(device, target, drafter, random_tokens(2, 9))


# Budgets.


def on_simulated_device(**drafter):
    """A target that accepts some of its drafter's tokens, and does not end soon."""
    target = new_target("llama")
    return simulated_device.move(target), simulated_device.move(new_drafter(target, num_lstm_layers=0, **drafter))


OTHER_MODES = ["threshold", "static tree", "own tree", "prompt lookup", "bonuses", "static cache"]


@pytest.mark.parametrize(
    "mode, rows",
    [("greedy", 1), ("greedy", 2), ("adaptive", 1), ("adaptive", 2)]
    + [(mode, 2) for mode in OTHER_MODES]
    + [pytest.param(mode, 1, marks=pytest.mark.slow) for mode in OTHER_MODES],
)
def test_synchronisations_of_a_round(mode, rows):
    """One brings the draft to the host, and one the target's choices: of all rows together."""
    settings = {"eos_token_id": [VOCAB], "pad_token_id": 0, **MODES[mode], "max_new_tokens": 20}
    found = rounds(*on_simulated_device(block_size=1), random_tokens(rows, 9), **settings)
    assert max(syncs for syncs, _ in found) <= 2


@pytest.mark.parametrize("rows", [1, 2])
def test_synchronisations_of_a_sampled_token(rows):
    new_tokens = 20
    settings = {"do_sample": True, "temperature": 0.5, "max_new_tokens": new_tokens}
    found = rounds(*on_simulated_device(block_size=1), random_tokens(rows, 9), **settings)
    assert sum(syncs for syncs, _ in found) <= 2 * len(found) + rows * new_tokens


# A drafter of the shape of the shipped ones, and a tree of 8 nodes after 3 passes.
SHIPPED = {"num_lstm_layers": 0, "num_hidden_layers": 2, "draft_vocab_size": 30}
TREE = {"num_assistant_tokens": 8, "num_draft_passes": 3, "num_assistant_tokens_schedule": "constant"}
TREE |= {"assistant_confidence_threshold": 0.0, "prompt_lookup_num_tokens": 0}
TREE |= {"context_bonuses": [0.5, 0.8, 1.8, 2.8, 5.0]}


def launches_of_a_round(layers, rows=1, block_size=1, **tree) -> int:
    """Launches beside the target's forward in a round that keeps a branch: the most of all rounds."""
    target = new_target("llama", num_hidden_layers=layers)
    drafter = new_drafter(target, block_size=block_size, **SHIPPED)
    simulated_device.move(target), simulated_device.move(drafter)
    return max(launches for _, launches in rounds(target, drafter, random_tokens(rows, 9), **{**TREE, **tree}))


@pytest.mark.parametrize("block_size", quick([2], [1, 2]))
def test_launches_of_a_round(block_size):
    """At most 0.3 of a plain step's, for a target of 30 layers such as SmolLM2; a kept branch moves in each layer."""
    target = simulated_device.move(new_target("llama", num_hidden_layers=30))
    plain = [launches for _, launches in rounds(target, None, prompt(9), max_new_tokens=7)]
    assert launches_of_a_round(30, block_size=block_size) <= 0.3 * min(plain)


@pytest.mark.parametrize("rows", quick([2], [1, 2]))
def test_launches_hardly_grow_with_the_targets_layers(rows):
    """A branch that is kept moves in each layer by itself, so that no two layers are ever held twice."""
    assert launches_of_a_round(9, rows) - launches_of_a_round(2, rows) <= 5 * 7 + 10


def test_launches_grow_with_passes_and_not_with_nodes():
    passes = [launches_of_a_round(2, num_draft_passes=number) for number in (2, 3, 4)]
    # A pass is about as many launches as two layers of the target.
    assert 150 < passes[1] - passes[0] < 250 and passes[2] - passes[1] == pytest.approx(passes[1] - passes[0], abs=20)
    assert launches_of_a_round(2, num_assistant_tokens=24) == pytest.approx(passes[1], abs=10)
