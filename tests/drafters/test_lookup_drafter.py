# Copyright 2026 The hf_falcon authors. Licensed under the Apache License, Version 2.0.
"""Prompt lookup alone: the texts of plain decoding, for every target, from its memory or from the text itself."""

import copy
import threading
from types import SimpleNamespace

import device_cases
import pytest
import simulated_device
import torch
from device_cases import MODES, Simulated, check, rounds
from quick import quick
from shrunken import tiny_model
from tiny_models import (
    ROPE_SCALED,
    TARGETS,
    VOCAB,
    hooks_of,
    new_target,
    prompt,
    random_tokens,
    tiny_drafter,
    tiny_target,
    tiny_tokenizer,
)
from transformers import PreTrainedModel, T5Config, T5ForConditionalGeneration, pipeline

import hf_falcon
from hf_falcon import AutoDrafter, DraftModel, FalconCandidateGenerator, LookupDrafter
from hf_falcon.chains import ChainRun
from hf_falcon.core import candidate_generator, decoding
from hf_falcon.core.policy import AdaptivePolicy

NEW_TOKENS = 30
CONSTANT = {"num_assistant_tokens_schedule": "constant"}


def plain(settings: dict) -> dict:
    """Those of a call without a drafter."""
    return {name: value for name, value in settings.items() if name not in DraftModel.draft_option_names}


def generate(target: PreTrainedModel, ids: torch.Tensor, drafter=None, **settings):
    torch.manual_seed(3)
    settings = {"max_new_tokens": NEW_TOKENS, "do_sample": False, "pad_token_id": 0, **settings}
    settings = plain(settings) if drafter is None else settings
    return target.generate(ids, assistant_model=drafter, return_dict_in_generate=True, **settings)


def informed(*sequences: torch.Tensor, wrong: int = 7) -> LookupDrafter:
    """A drafter whose memory has these texts, each with a wrong token at every `wrong`th place."""
    drafter = LookupDrafter(memory=10_000)
    for sequence in sequences:
        for text in sequence.tolist():
            # A match needs four right tokens.
            drafter.add([token if place % wrong else (token + 1) % VOCAB for place, token in enumerate(text, 1)])
    return drafter


def repeating(length: int = 5, times: int = 3) -> torch.Tensor:
    return prompt(length).repeat(1, times)


WAYS = {
    "greedy": {},
    "adaptive": {"num_assistant_tokens_schedule": "heuristic"},
    "sampled": {"do_sample": True, "top_k": 0},
    "processors": {"do_sample": True, "top_k": 5, "repetition_penalty": 1.3, "no_repeat_ngram_size": 3},
    "scores": {"output_scores": True, "output_hidden_states": True, "output_attentions": True},
    "one node": {"num_assistant_tokens": 1},
    "short paths": {"prompt_lookup_num_tokens": 2},
    "static tree": {"draft_tree": "static"},
    "own tree": {"draft_tree": [[0], [1], [0, 0]]},
    "speculative": {"do_sample": True, "verification": "speculative"},
    "multi root": {"do_sample": True, "verification": "multi_root"},
}


@pytest.mark.parametrize("name", quick(("llama", "gemma3", "gpt2", "mistral-window"), [*TARGETS, "llama-dynamic"]))
@pytest.mark.parametrize("way", WAYS)
def test_equals_plain(name, way):
    make = ROPE_SCALED.get(name, lambda: tiny_target(name))
    expected = generate(make(), prompt(9), **WAYS[way]).sequences
    drafter = informed(expected)
    output = generate(make(), prompt(9), drafter, **{**CONSTANT, **WAYS[way]})
    assert output.sequences.tolist() == expected.tolist()
    # With a schedule the machine's speed decides.
    if way != "adaptive" and name not in ROPE_SCALED:
        assert output.draft_statistics.accepted_tokens > 0


@pytest.mark.parametrize("way", ["greedy", "adaptive", "sampled", "processors"])
@pytest.mark.parametrize("name", ["llama", "gemma3"])
@pytest.mark.parametrize("static", [False, True], ids=["dynamic", "static"])
def test_batches_equal_plain(name, way, static):
    target, ids = tiny_target(name), random_tokens(3, 9)
    mask = torch.ones_like(ids)
    # Padding on the left.
    mask[1, :4], ids[1, :4] = 0, 0
    settings = {"attention_mask": mask, "eos_token_id": [4, 5], **WAYS[way]}
    settings |= {"cache_implementation": "static"} if static else {}
    expected = generate(target, ids, **settings).sequences
    output = generate(target, ids, informed(expected), **{**CONSTANT, **settings})
    assert output.sequences.tolist() == expected.tolist()
    if way != "adaptive":
        assert output.draft_statistics.accepted_tokens > 0
    # A batch from one prompt.
    settings = {"do_sample": True, "num_return_sequences": 2, **CONSTANT}
    expected = generate(target, prompt(9), **settings).sequences
    assert generate(target, prompt(9), informed(expected), **settings).sequences.tolist() == expected.tolist()


@pytest.mark.parametrize("do_sample", [False, True], ids=["greedy", "sampled"])
@pytest.mark.parametrize(
    "model_type",
    quick(("qwen3_next", "lfm2", "bloom"), ("qwen3_next", "falcon_h1", "mamba2", "lfm2", "bloom", "bart")),
)
def test_chains_equal_plain(model_type, do_sample, monkeypatch):
    """Targets with a state, and targets that take no tree."""
    runs = []

    class Recorded(ChainRun):
        def __init__(self, *args):
            super().__init__(*args)
            runs.append(self)

    monkeypatch.setattr(decoding, "part", {"chains": Recorded}.get)
    target, ids = tiny_model(model_type), prompt(11)
    settings = {"do_sample": do_sample, "attention_mask": torch.ones_like(ids)}
    expected = generate(target, ids, **settings).sequences
    for wrong in (5, 7, 999):
        output = generate(target, ids, informed(expected, wrong=wrong), **CONSTANT, **settings)
        assert output.sequences.tolist() == expected.tolist()
    assert output.draft_statistics.accepted_tokens > NEW_TOKENS // 2 and len(runs) == 3


@pytest.mark.parametrize("mode", quick([*MODES][1::2], MODES))
def test_modes_on_a_device(mode):
    with Simulated() as device:
        target = device.put(new_target())
        settings = {**MODES[mode], **({"tokenizer": tiny_tokenizer()} if "stop_strings" in MODES[mode] else {})}
        drafter = informed(
            device.host(device_cases.generate(device, target, repeating(), **plain(settings)).sequences)
        )
        drafter.generation_config.num_assistant_tokens_schedule = "constant"
        check(device, target, drafter, repeating(), **settings)


@pytest.mark.parametrize("rows", [1, 2])
def test_synchronisations_of_a_round(rows):
    """The draft is on the host: one brings the target's choices there."""
    target, drafter = new_target(), LookupDrafter()
    simulated_device.move(target)
    settings = {"eos_token_id": [VOCAB], "pad_token_id": 0, **CONSTANT}
    assert max(syncs for syncs, _ in rounds(target, drafter, repeating().repeat(rows, 1), **settings)) <= 1


@pytest.mark.parametrize("given", ["name", "attached", "attached by name", "auto", "object"])
def test_ways_to_give_it(given):
    target, ids = new_target(), repeating()
    expected = generate(target, ids).sequences
    drafter = {"name": "lookup", "auto": AutoDrafter.from_pretrained("lookup"), "object": LookupDrafter()}.get(given)
    if drafter is None:
        hf_falcon.attach(*((target,) if given == "attached" else (target, "lookup")))
        torch.manual_seed(3)
        output = target.generate(
            ids, max_new_tokens=NEW_TOKENS, do_sample=False, pad_token_id=0, return_dict_in_generate=True, **CONSTANT
        )
    else:
        output = generate(target, ids, drafter, **CONSTANT)
    assert output.sequences.tolist() == expected.tolist()
    assert output.draft_statistics.drafted_tokens > 0
    assert hooks_of(target) == 0


def test_targets_that_are_decoded_plainly():
    """An attached drafter breaks no call, whatever the target is."""
    torch.manual_seed(0)
    sizes = {"d_model": 32, "d_ff": 48, "d_kv": 8, "num_layers": 1, "num_heads": 4, "vocab_size": VOCAB}
    target = T5ForConditionalGeneration(T5Config(**sizes, decoder_start_token_id=0)).eval()
    settings = {"max_new_tokens": 8, "do_sample": False}
    expected = target.generate(prompt(9), **settings)
    assert target.generate(prompt(9), assistant_model="lookup", **settings).tolist() == expected.tolist()
    hf_falcon.attach(target)
    assert target.generate(prompt(9), **settings).tolist() == expected.tolist()


def test_a_pipeline_takes_its_name(tmp_path):
    tiny_target("llama").save_pretrained(tmp_path)
    tiny_tokenizer().save_pretrained(tmp_path)
    texts = []
    for drafter in (None, "lookup", LookupDrafter()):
        made = pipeline("text-generation", model=str(tmp_path), assistant_model=drafter, device="cpu")
        texts.append(made("abcdefghabcd", max_new_tokens=20, do_sample=False))
        assert drafter is None or isinstance(made.assistant_model, LookupDrafter)
    assert texts[0] == texts[1] == texts[2]


def test_nothing_of_the_target_is_kept(monkeypatch):
    """No features, no head, no session, and no pass."""
    target, made = tiny_target(), []

    class Recorded(FalconCandidateGenerator):
        def __init__(self, *args):
            super().__init__(*args)
            made.append(self)

        def update(self, tree, path, accepted, features, *args):
            assert features.numel() == 0
            super().update(tree, path, accepted, features, *args)
            assert self._uncommitted == []

    monkeypatch.setattr(decoding, "FalconCandidateGenerator", Recorded)
    output = generate(target, repeating(), LookupDrafter(), **CONSTANT)
    assert output.draft_statistics.drafted_tokens > 0
    assert [each.session for each in made] == [None]
    assert output.draft_statistics.time["drafter"] > 0.0


def test_a_call_without_passes_looks_up_alone(monkeypatch):
    """`num_draft_passes=0` of any drafter."""
    target, drafter = tiny_target(), tiny_drafter(tiny_target(), num_draft_passes=4, prompt_lookup_num_tokens=16)
    monkeypatch.setattr(drafter, "start_session", lambda *_: None)
    settings = {"num_draft_passes": 0, "draft_tree": "static"}
    output = generate(target, repeating(), drafter, **settings)
    assert output.sequences.tolist() == generate(target, repeating()).sequences.tolist()
    assert output.draft_statistics.drafted_tokens > 0
    output = generate(target, repeating(), drafter, **settings, prompt_lookup_num_tokens=0)
    assert output.draft_statistics.drafted_tokens == 0


def test_nothing_is_looked_up_without_the_package(monkeypatch):
    """Code from the Hub registers no lookup."""
    monkeypatch.setattr(candidate_generator, "part", lambda name: None)
    target = tiny_target()
    for drafter in (LookupDrafter(), tiny_drafter(target, prompt_lookup_num_tokens=16)):
        output = generate(target, repeating(), drafter, **CONSTANT)
        assert output.sequences.tolist() == generate(target, repeating()).sequences.tolist()
        assert (output.draft_statistics.drafted_tokens > 0) is (drafter.max_draft_passes != 0)


def test_lookups_that_do_not_pay_pause(monkeypatch):
    """With dear rounds, rounds are plain steps."""
    monkeypatch.setattr(AdaptivePolicy, "_node_costs", lambda self: torch.arange(40.0))
    output = generate(tiny_target(), repeating(), LookupDrafter())
    assert output.draft_statistics.drafted_tokens == 0
    monkeypatch.setattr(AdaptivePolicy, "_node_costs", lambda self: torch.zeros(40))
    output = generate(tiny_target(), repeating(), LookupDrafter())
    assert output.draft_statistics.drafted_tokens > 0


@pytest.mark.parametrize("output", [[torch.zeros(1, 5)], SimpleNamespace(audio=[torch.zeros(1, 5)])])
def test_speech_is_not_remembered(output, monkeypatch):
    monkeypatch.setattr(DraftModel, "assisted_decoding", lambda *args, **kwargs: output)
    drafter = LookupDrafter(memory=1000)
    assert drafter.assisted_decoding(tiny_target(), prompt(9)) is output and not len(drafter.lookup_memory)


def test_a_memory_remembers_calls():
    target, ids = tiny_target(), prompt(9)
    first = generate(target, ids, LookupDrafter(memory=1000), **CONSTANT)
    drafter = LookupDrafter(memory=1000)
    outputs = [generate(target, ids, drafter, **CONSTANT) for _ in range(3)]
    assert all(each.sequences.tolist() == first.sequences.tolist() for each in outputs)
    rounds = [each.draft_statistics.rounds for each in outputs]
    assert rounds[0] == first.draft_statistics.rounds and rounds[2] <= rounds[1] < rounds[0] / 3
    # The same text is kept once; by default nothing is.
    assert len(drafter.lookup_memory) == 9 + NEW_TOKENS
    assert LookupDrafter().lookup_memory is None


def test_padding_is_not_remembered():
    target, ids = tiny_target(), random_tokens(2, 9)
    mask = torch.ones_like(ids)
    mask[1, :4], ids[1, :4] = 0, 0
    drafter = LookupDrafter(memory=1000)
    generate(target, ids, drafter, attention_mask=mask)
    assert len(drafter.lookup_memory) == 9 + 5 + 2 * NEW_TOKENS


def test_a_memory_serves_any_drafter():
    target = tiny_target()
    expected = generate(target, prompt(9)).sequences
    drafter = tiny_drafter(target, prompt_lookup_num_tokens=16)
    without = generate(target, prompt(9), drafter)
    drafter.lookup_memory = informed(expected).lookup_memory
    try:
        output = generate(target, prompt(9), drafter)
    finally:
        del drafter.lookup_memory
    assert output.sequences.tolist() == without.sequences.tolist() == expected.tolist()
    assert output.draft_statistics.rounds < without.draft_statistics.rounds


def test_a_memory_of_another_vocabulary():
    target, drafter = tiny_target(), LookupDrafter(memory=1000)
    ids = prompt(9)
    drafter.add([*ids[0].tolist(), VOCAB + 5, VOCAB + 6])
    output = generate(target, ids, drafter, **CONSTANT)
    assert output.sequences.tolist() == generate(target, ids).sequences.tolist()


def test_files_are_read(tmp_path):
    drafter, tokenizer = LookupDrafter(memory=1000), tiny_tokenizer()
    (tmp_path / "notes.md").write_text("abcdefgh")
    drafter.read(tmp_path / "notes.md", tokenizer)
    assert [match.token for match in drafter.lookup_memory.find(tokenizer("bcde").input_ids, 3)] == tokenizer(
        "f"
    ).input_ids
    (tmp_path / "image.png").write_bytes(b"\x89PNG\xff")
    with pytest.raises(ValueError, match="image.png` is no text in UTF-8"):
        drafter.read(tmp_path / "image.png", tokenizer)
    with pytest.raises(FileNotFoundError):
        drafter.read(tmp_path / "missing.md", tokenizer)
    with pytest.raises(ValueError, match=r"`memory` is 0.*LookupDrafter\(memory=100_000\)"):
        LookupDrafter().read(tmp_path / "notes.md", tokenizer)
    with pytest.raises(ValueError, match="`memory` is -3"):
        LookupDrafter(memory=-3)


def test_threads_share_a_drafter():
    target, drafter, found = tiny_target(), LookupDrafter(memory=200), {}
    expected = {seed: generate(target, prompt(9, seed=seed)).sequences.tolist() for seed in range(4)}

    def run(seed: int) -> None:
        found[seed] = [
            target.generate(
                prompt(9, seed=seed),
                assistant_model=drafter,
                max_new_tokens=NEW_TOKENS,
                do_sample=False,
                pad_token_id=0,
                **CONSTANT,
            ).tolist()
            for _ in range(3)
        ]

    threads = [threading.Thread(target=run, args=(seed,)) for seed in expected]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == {seed: [text] * 3 for seed, text in expected.items()}


def test_transformers_own_loop_gets_no_candidates():
    target, ids = tiny_target(), repeating()
    generator = FalconCandidateGenerator(LookupDrafter(), target)
    with torch.no_grad(), generator:
        target(ids)
        assert generator.get_candidates(ids)[0].tolist() == ids.tolist()


def test_a_copy_has_a_memory_of_its_own():
    drafter = LookupDrafter(memory=100)
    drafter.add([5, 6, 7, 8])
    other = copy.deepcopy(drafter)
    assert len(other.lookup_memory) == 4
    other.add([1, 2, 3, 4, 9])
    assert len(drafter.lookup_memory) == 4 and len(other.lookup_memory) == 9
