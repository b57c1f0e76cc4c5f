# Copyright 2026 The hf_falcon authors. Licensed under the Apache License, Version 2.0.
"""Language models as drafters: the text of plain decoding, and no token runs twice."""

import copy
import json
from contextlib import contextmanager

import pytest
import simulated_device
import torch
from device_cases import CHAIN, MODES, Simulated, check
from quick import one_in, quick
from safetensors.torch import load_file, save_file
from shrunken import tiny_model
from tiny_models import (
    RECURRENT,
    SAME_EVERY_ROUND,
    TARGETS,
    VOCAB,
    WITHOUT_TREES,
    hooks_of,
    new_target,
    prompt,
    random_tokens,
    tiny_target,
    tiny_tokenizer,
)
from transformers import AutoModelForImageTextToText, LlamaForCausalLM, StaticCache, pipeline
from utilities import changes_nothing

import hf_falcon
from hf_falcon import AutoDrafter, CausalLMDrafter
from hf_falcon.drafters import language_model_runs
from hf_falcon.drafters.language_model_runs import StateRun, TreeRun, run_of

SETTINGS = {"greedy": {"do_sample": False}, "sampled": {"do_sample": True, "top_k": 0, "temperature": 1.1}}
SCHEDULES = {
    "constant": {**SAME_EVERY_ROUND, "assistant_confidence_threshold": 0.0},
    "heuristic": {"num_assistant_tokens_schedule": "heuristic", "prompt_lookup_num_tokens": 8},
}
# One path of four tokens, every round.
PATH = {**SCHEDULES["constant"], "num_assistant_tokens": 4, "draft_width": 1, "draft_top_k": 1}
# Draft models that keep no cache of keys and values, or take no trees.
CHAINS = sorted(WITHOUT_TREES.keys() - {"bert", "openai-gpt"}) + list(RECURRENT)
NAMES = ("llama", "qwen2-mixed", "gemma2", "gemma3", "phi3-window", "cohere", "bloom", "gpt-neo", "mamba")


def generate(target, ids, assistant=None, seed=3, **settings):
    torch.manual_seed(seed)
    more = {} if assistant is None else {"assistant_model": assistant, "return_dict_in_generate": True}
    return target.generate(ids, **{"max_new_tokens": 22, "pad_token_id": 0, "do_sample": False, **more, **settings})


def drafter_of(name="llama", **changes):
    return CausalLMDrafter(new_target(name, **changes))


@contextmanager
def forwards(model):
    """The number of tokens of each forward inside."""
    counts = []

    def count(module, inputs, named):
        counts.append(named["input_ids"].shape[1])

    handle = model.register_forward_pre_hook(changes_nothing(count), with_kwargs=True)
    try:
        yield counts
    finally:
        handle.remove()


@pytest.mark.parametrize("name", [*TARGETS, *CHAINS, "lfm2", "qwen3_next"])
@torch.no_grad()
def test_logits_are_those_of_a_forward_over_the_text(name):
    """Also behind branches, behind what was accepted, and after a cut."""
    hybrid = name in ("lfm2", "qwen3_next")
    model = tiny_model(name).eval() if hybrid else tiny_target(name)
    run, text = run_of(model), prompt(9)[0].tolist()
    assert type(run) is (StateRun if hybrid or name in CHAINS else TreeRun)

    def expected(*more):
        return model(torch.tensor([[*text, *more]]), use_cache=False).logits[0, -1]

    def agree(found, *paths):
        for row, path in zip(found, paths, strict=True):
            torch.testing.assert_close(row, expected(*path), atol=2e-4, rtol=1e-3)

    agree(run.read(text), [])
    for _ in range(2):
        agree(run.draft(torch.tensor([5, 6, 7]), torch.tensor([0, 0, 0])), [5], [6], [7])
        agree(run.draft(torch.tensor([8, 9, 10]), torch.tensor([2, 0, 0])), [7, 8], [5, 9], [5, 10])
        agree(run.draft(torch.tensor([11, 12]), torch.tensor([2, 0])), [5, 10, 11], [7, 8, 12])
        run.keep([0, 2])
        text += [5, 10]
        agree(run.draft(torch.tensor([3]), torch.tensor([0])), [3])
        text += [13, 14]
        agree(run.read([13, 14]), [])
    run.cut(len(text) - 3)
    agree(run.read(text[run.length :]), [])
    run.cut(3)
    agree(run.read(text[run.length :]), [])


@pytest.mark.parametrize("name", NAMES[:-1])
def test_a_copy_of_the_target_is_always_right(name):
    target, drafter = tiny_target(name), CausalLMDrafter(new_target(name))
    run_of(drafter.model)
    with forwards(drafter.model) as counts:
        found = generate(target, prompt(11), drafter, max_new_tokens=31, **PATH)
    assert found.sequences.tolist() == generate(target, prompt(11), max_new_tokens=31).tolist()
    assert found.draft_statistics.tau == 4
    # A round is the accepted token that no pass ran and the target's own, then three drafted ones.
    assert counts[:9] == [12, 1, 1, 1, 2, 1, 1, 1, 2]
    assert sum(counts) <= found.sequences.shape[1]


@pytest.mark.parametrize("name", ["qwen2_5_vl", "glm4v"])
def test_models_whose_tokens_have_positions_of_several_kinds(name):
    """They take images, and keep the positions of an image from call to call."""
    target = tiny_model(name, AutoModelForImageTextToText)
    generate(target, prompt(3))
    drafter = CausalLMDrafter(copy.deepcopy(target))
    found = generate(target, prompt(11), drafter, max_new_tokens=21, **PATH)
    assert found.sequences.tolist() == generate(target, prompt(11), max_new_tokens=21).tolist()
    assert found.draft_statistics.tau == 4 and isinstance(run_of(drafter.model), TreeRun)


def test_accepted_branches_do_not_run_again():
    """Every token of the text runs once, the drafted ones with their pass."""
    target, drafter = tiny_target(), drafter_of()
    run_of(drafter.model)
    with forwards(drafter.model) as counts:
        found = generate(
            target, prompt(11), drafter, **{**PATH, "draft_width": 3, "draft_top_k": 3, "num_assistant_tokens": 40}
        )
    assert found.draft_statistics.tau > 1
    passes = [count for count in counts[1:] if count == 3]
    # The newest token of each round, and the one before it, which the last pass proposed and nobody ran.
    commits = [count for count in counts[1:] if count != 3]
    assert len(passes) + len(commits) == len(counts) - 1 and max(commits) <= 2


@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("settings", SETTINGS)
@pytest.mark.parametrize("name", quick(("gemma3", "bloom"), NAMES))
def test_texts_are_those_of_plain_decoding(name, settings, schedule, rows):
    target, drafter = tiny_target("llama"), CausalLMDrafter(tiny_target(name))
    ids = random_tokens(rows, 10)
    mask = torch.ones_like(ids)
    mask[-1, : 3 * (rows > 1)] = 0
    arguments = {"attention_mask": mask, **SETTINGS[settings]}
    found = generate(target, ids, drafter, **arguments, **SCHEDULES[schedule])
    assert found.sequences.tolist() == generate(target, ids, **arguments).tolist()
    assert found.draft_statistics is not None


@pytest.mark.parametrize("target", ["gemma3", "bloom", "lfm2"])
@pytest.mark.parametrize("name", ["llama", "bloom"])
def test_targets_of_all_kinds(target, name):
    model = tiny_model("lfm2", sizes={"vocab_size": VOCAB}).eval() if target == "lfm2" else tiny_target(target)
    drafter = CausalLMDrafter(tiny_target(name))
    if model.config.vocab_size != VOCAB:
        pytest.skip("the tiny model has another vocabulary")
    found = generate(model, prompt(10), drafter, **SCHEDULES["constant"])
    assert found.sequences.tolist() == generate(model, prompt(10)).tolist()
    assert found.draft_statistics is not None


def test_a_draft_model_without_trees_has_one_path_in_its_own_calls_alone(monkeypatch):
    """It may take trees later, such as after `torch.autocast`."""
    target, drafter = tiny_target(), CausalLMDrafter(tiny_target("bloom"))
    widths, draft = set(), StateRun.draft
    monkeypatch.setattr(
        StateRun, "draft", lambda self, ids, parents: widths.add(len(ids)) or draft(self, ids, parents)
    )
    for given, expected in (({}, 1), ({"draft_width": 2}, 2), ({}, 1)):
        widths.clear()
        generate(target, prompt(10), drafter, max_new_tokens=6, **SCHEDULES["constant"], **given)
        assert widths == {expected} and getattr(drafter.generation_config, "draft_width", None) is None


def test_static_caches():
    target, drafter = tiny_target(), drafter_of()
    expected = generate(target, prompt(10)).tolist()
    found = generate(target, prompt(10), drafter, cache_implementation="static", **PATH)
    assert found.sequences.tolist() == expected and found.draft_statistics.tau > 3
    cache = StaticCache(config=target.config, max_cache_len=64)
    assert generate(target, prompt(10), drafter, past_key_values=cache, **PATH).sequences.tolist() == expected


def test_a_text_that_continues_from_a_cache():
    """The target's cache has the first turn; the draft model reads both turns."""
    target, drafter = tiny_target(), drafter_of()
    first = target.generate(prompt(9), max_new_tokens=6, do_sample=False, return_dict_in_generate=True)
    ids = torch.cat((first.sequences, prompt(4, seed=1)), dim=1)
    found = generate(target, ids, drafter, past_key_values=first.past_key_values, **PATH)
    assert found.sequences.tolist() == generate(target, ids).tolist() and found.draft_statistics.tau > 3


@pytest.mark.parametrize("verification", ["speculative", "multi_root"])
def test_other_verifications(verification):
    """The target's own distribution is always accepted."""
    target, drafter = tiny_target(), drafter_of()
    tree = {"draft_tree": CHAIN[:3]} if verification == "speculative" else {}
    settings = {**SETTINGS["sampled"], **SCHEDULES["constant"], **tree, "verification": verification}
    found = generate(target, prompt(10), drafter, max_new_tokens=21, **settings)
    assert found.sequences.shape == (1, 31)
    assert found.draft_statistics.tau == 3 if tree else found.draft_statistics.tau > 0.5


def test_transformers_own_loop_takes_its_candidates():
    target, drafter = tiny_target(), drafter_of()
    for name, value in PATH.items():
        setattr(drafter.generation_config, name, value)
    generator = hf_falcon.FalconCandidateGenerator(drafter, target)
    text = generate(target, prompt(9), max_new_tokens=12)
    with generator, torch.no_grad():
        target(text[:, :9])
        assert generator.get_candidates(text[:, :10])[0].tolist() == text[:, :14].tolist()
        target(text[:, 9:14])
        assert generator.get_candidates(text[:, :15])[0].tolist() == text[:, :19].tolist()


@pytest.mark.parametrize("name", ["llama", "bloom"])
def test_an_error_in_the_middle_of_a_round_leaves_nothing_behind(name):
    target, drafter = tiny_target(), CausalLMDrafter(new_target(name))
    expected, forward, calls = generate(target, prompt(10)).tolist(), drafter.model.forward, []
    run_of(drafter.model)

    def fail(*args, **kwargs):
        calls.append(1)
        if len(calls) == 6:
            raise RuntimeError("in the middle")
        return forward(*args, **kwargs)

    drafter.model.forward = fail
    with pytest.raises(RuntimeError, match="in the middle"):
        generate(target, prompt(10), drafter, **PATH)
    del drafter.model.forward
    assert hooks_of(target) == hooks_of(drafter.model) == 0
    assert generate(target, prompt(10), drafter, **PATH).sequences.tolist() == expected
    assert generate(target, prompt(10)).tolist() == expected


def test_a_prompt_runs_once_in_chunks(monkeypatch):
    monkeypatch.setattr(language_model_runs, "_CHUNK", 8)
    target, drafter = tiny_target("gemma3"), drafter_of("gemma3")
    run_of(drafter.model)
    with forwards(drafter.model) as counts:
        found = generate(target, prompt(20), drafter, max_new_tokens=21, **PATH)
    assert counts[:7] == [8, 8, 5, 1, 1, 1, 2] and found.draft_statistics.tau == 4
    assert found.sequences.tolist() == generate(target, prompt(20), max_new_tokens=21).tolist()


def test_by_name(tmp_path):
    target, folder = LlamaForCausalLM(tiny_target().config).eval(), str(tmp_path / "small")
    drafter = drafter_of()
    drafter.generation_config.num_draft_passes = 3
    drafter.save_pretrained(folder)
    assert drafter.model.generation_config.to_dict() == new_target().generation_config.to_dict()
    loaded = AutoDrafter.from_pretrained(folder, dtype=torch.float32)
    assert isinstance(loaded, CausalLMDrafter) and not loaded.training and not loaded.model.training
    assert loaded.generation_config.num_draft_passes == 3 and loaded.name_or_path == folder
    with pytest.raises(TypeError, match=r"got \['trust_remote_code'\]: it takes `dtype`"):
        AutoDrafter.from_pretrained(folder, trust_remote_code=True)
    expected = generate(target, prompt(10)).tolist()
    found = generate(target, prompt(10), folder)
    assert found.sequences.tolist() == expected and found.draft_statistics is not None
    hf_falcon.attach(target, folder)
    found = generate(target, prompt(10), return_dict_in_generate=True)
    assert found.sequences.tolist() == expected and found.draft_statistics is not None
    hf_falcon.detach(target)


def test_weights_that_are_missing(tmp_path):
    tiny_target().save_pretrained(tmp_path)
    weights = load_file(tmp_path / "model.safetensors")
    del weights["model.layers.1.mlp.up_proj.weight"]
    save_file(weights, tmp_path / "model.safetensors", {"format": "pt"})
    with pytest.raises(
        ValueError, match=r"lacks 1 weights of a LlamaForCausalLM \(such as model.layers.1.mlp.up_proj"
    ):
        AutoDrafter.from_pretrained(tmp_path)


def test_a_drafter_of_eagle_1_is_named(tmp_path):
    tiny_target().save_pretrained(tmp_path)
    weights = load_file(tmp_path / "model.safetensors")
    weights = {name.removeprefix("model."): each for name, each in weights.items() if "norm" not in name}
    save_file(weights | {"fc.weight": torch.zeros(2, 4)}, tmp_path / "model.safetensors", {"format": "pt"})
    with pytest.raises(ValueError, match="as drafters of EAGLE-1 and EAGLE-2 have, which are not read"):
        AutoDrafter.from_pretrained(tmp_path)


@pytest.mark.parametrize("kind", [CausalLMDrafter, AutoDrafter])
def test_no_adapter_is_followed(tmp_path, monkeypatch, kind):
    """It names another model, whose weights would be loaded."""
    monkeypatch.setattr(hf_falcon.drafters.files, "is_peft_available", lambda: True)
    tiny_target().save_pretrained(tmp_path)
    (tmp_path / "adapter_config.json").write_text(json.dumps({"base_model_name_or_path": "somebody/model"}))
    with pytest.raises(ValueError, match="`adapter_config.json`: a drafter takes no adapter"):
        kind.from_pretrained(tmp_path)


def test_pipelines(tmp_path):
    tiny_target().save_pretrained(tmp_path)
    tiny_tokenizer().save_pretrained(tmp_path)
    texts = []
    for assistant in (None, str(tmp_path), tmp_path, CausalLMDrafter(tiny_target())):
        write = pipeline("text-generation", model=str(tmp_path), assistant_model=assistant, device="cpu")
        texts.append(write("abcdefghabcd", max_new_tokens=16, do_sample=False))
        assert getattr(write.assistant_model, "is_falcon_drafter", False) is (assistant is not None)
    assert all(text == texts[0] for text in texts)
    write = pipeline(
        "text-generation", str(tmp_path), assistant_model=str(tmp_path), assistant_tokenizer=tiny_tokenizer()
    )
    assert write("abcdefghabcd", max_new_tokens=16, do_sample=False) == texts[0]


def test_what_cannot_draft():
    target = tiny_target()
    for model in (None, torch.nn.Linear(2, 2), drafter_of(), target.model):
        with pytest.raises(TypeError, match=f"`model` is a {type(model).__name__}: give a causal language model"):
            CausalLMDrafter(model)
    with pytest.raises(TypeError, match="which keeps no cache"):
        CausalLMDrafter(tiny_target("openai-gpt"))
    with pytest.raises(TypeError, match="which has an encoder"):
        CausalLMDrafter(tiny_model("t5", auto_class=hf_falcon_t5()))
    other = drafter_of(vocab_size=48)
    with pytest.raises(ValueError, match="`vocab_size` is 48, but the target has 64.*`assistant_tokenizer`"):
        generate(target, prompt(10), other)
    with pytest.raises(TypeError, match="CausalLMDrafter"):
        hf_falcon.attach(target, tiny_target("qwen2"))


def hf_falcon_t5():
    from transformers import AutoModelForSeq2SeqLM

    return AutoModelForSeq2SeqLM


@pytest.mark.parametrize(
    "name, ids, settings",
    [("llama", random_tokens(2, 8), {}), ("mistral-window", prompt(8), {"cache_implementation": "static"})],
    ids=["rows", "static"],
)
def test_transformers_refusals_name_the_drafter(name, ids, settings):
    """A language model itself stays transformers' own assistant."""
    target, model = tiny_target(name), tiny_target("qwen2")
    with pytest.raises(ValueError, match=r"(?i)assisted (gen|decod).*hf_falcon.CausalLMDrafter\(assistant_model\)"):
        generate(target, ids, model, **settings)
    found = generate(target, prompt(8), model)
    assert found.sequences.tolist() == generate(target, prompt(8)).tolist()
    assert not hasattr(found, "draft_statistics")
    assert generate(target, ids, CausalLMDrafter(model), **settings).draft_statistics is not None


@pytest.mark.parametrize("mode, rows", one_in(4, MODES, [1, 2]))
def test_modes_on_a_device(mode, rows):
    settings = {**MODES[mode], **({"tokenizer": tiny_tokenizer()} if "stop_strings" in MODES[mode] else {})}
    with Simulated() as device:
        target = device.put(new_target())
        drafter = CausalLMDrafter(device.put(new_target(), 1))
        # Scores also cover rows that have ended, which plain decoding computes.
        assisted = mode != "dictionaries" or rows == 1
        check(device, target, drafter, random_tokens(rows, 9), assisted, **{**SCHEDULES["constant"], **settings})


@pytest.mark.parametrize("name", ["llama", "gemma3", "bloom"])
@pytest.mark.parametrize("rows", [1, 2])
def test_on_a_device(name, rows):
    target, model = new_target("llama"), new_target(name)
    with Simulated() as device:
        device.put(target), device.put(model, 1)
        drafter = CausalLMDrafter(model)
        check(device, target, drafter, random_tokens(rows, 9), **SCHEDULES["constant"])
        assert simulated_device.HOST not in {each.device for each in model.parameters()}


def test_a_draft_model_in_training_mode_draws_nothing():
    target, ids = tiny_target("llama"), prompt(9)
    model = new_target("gpt2", resid_pdrop=0.5, embd_pdrop=0.5).train()
    drafter = hf_falcon.CausalLMDrafter(model)
    texts = []
    for more in ({}, {"assistant_model": drafter, "num_assistant_tokens_schedule": "constant"}):
        torch.manual_seed(0)
        texts.append(target.generate(ids, do_sample=True, top_k=0, max_new_tokens=20, **more).tolist())
    assert texts[0] == texts[1]


@pytest.mark.parametrize("name", ["gpt2", "gpt-neo", "opt"])
def test_a_text_longer_than_the_draft_models_table(name):
    """Nothing is drafted behind it; the target may have a longer one."""
    target = tiny_target("llama")
    table = {"max_position_embeddings": 100, **({"n_positions": 100} if name == "gpt2" else {})}
    drafter = CausalLMDrafter(new_target(name, **table))
    for length in (12, 120):
        found = generate(target, prompt(length), drafter, max_new_tokens=60, **SCHEDULES["constant"])
        assert found.sequences.tolist() == generate(target, prompt(length), max_new_tokens=60).tolist()
        assert (found.draft_statistics.drafted_tokens > 0) == (length == 12)
