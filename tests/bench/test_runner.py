# Copyright 2026 The hf_falcon authors. Licensed under the Apache License, Version 2.0.
"""Runs of the benchmark on tiny models, killed and continued, and its methods."""

import functools

import pytest
import torch
from bench_runs import trace
from eagle3_models import new_eagle3
from tiny_models import (
    new_target,
    prompt,
    tiny_drafter,
    tiny_tokenizer,
)
from transformers import CompileConfig

from hf_falcon import CausalLMDrafter
from hf_falcon.bench import methods, runner
from hf_falcon.bench.decision import DecisionModel
from hf_falcon.bench.method_names import METHOD_NAMES
from hf_falcon.bench.metrics import first_difference, summarise
from hf_falcon.bench.runner import Benchmark, longest_context
from hf_falcon.bench.traces import TraceFile
from hf_falcon.cpu.compiled_rounds import compiled_rounds_of
from hf_falcon.cpu.packing import is_packed

# Runs.

DATA = {"first": [["abc", "de"], ["fgh"]], "second": [["ijk"]]}
SETTINGS = {"max_new_tokens": 12, "do_sample": False}


def test_the_help_names_every_method():
    assert METHOD_NAMES == tuple(methods.METHODS)


def test_both_loops_with_a_draft_model(models):
    """Ours and transformers' own, each by its name, and each text as without a draft model."""
    models.draft_model = new_target("qwen2")
    found, absent = methods.resolve(["draft_model", "assisted"], models)
    assert not absent and isinstance(found["draft_model"]["assistant_model"], CausalLMDrafter)
    assert found["assisted"] == {"assistant_model": models.draft_model}
    arguments = {"max_new_tokens": 8, "do_sample": False, "pad_token_id": 0}
    expected = models.target.generate(prompt(9), **arguments).tolist()
    for each in found.values():
        assert models.target.generate(prompt(9), **arguments, **each).tolist() == expected
    models.draft_model, models.draft_drafter = new_target(vocab_size=48), None
    _, absent = methods.resolve(["draft_model", "assisted"], models)
    assert "`vocab_size` is 48" in absent["draft_model"] and "other tokens" in absent["assisted"]


@pytest.mark.parametrize(
    "settings", [{}, pytest.param({"do_sample": True, "temperature": 0.8}, marks=pytest.mark.slow)]
)
def test_every_method_answers_like_plain_decoding(models, tmp_path, settings):
    names = "plain prompt_lookup lookup lookup@3 eagle_like falcon_chain falcon_static falcon_dynamic".split()
    names += "lookahead falcon_no_decision falcon_no_cost_model falcon_no_lookup falcon falcon@3".split()
    names += "plain_packed falcon_packed".split()
    found, absent = methods.resolve(names, models)
    assert list(found) == names and not absent
    file = TraceFile(tmp_path, {})
    Benchmark(models.target, tiny_tokenizer(), found, {**SETTINGS, **settings}, repeats=2).run(DATA, file)
    assert len(file.traces) == len(names) * 4
    assert all(len(each.seconds) == 2 and min(each.seconds) > 0 for each in file.traces.values())
    rows = summarise(file.traces.values(), exact=True)
    # transformers' own prompt lookup draws other numbers when it samples.
    for row in rows:
        if not settings or row["method"] != "prompt_lookup":
            assert row["identical_prompts"] == row["num_prompts"] and row["speedup"] > 0
        assert (row["tau"] is None) is (row["method"] in ("plain", "prompt_lookup", "plain_packed"))
    assert [row["new_tokens"] for row in rows if row["method"] == "plain"] == [36, 12, 48]


def test_every_method_takes_a_drafter_of_another_method(models, tmp_path):
    models.drafters["falcon"] = new_eagle3(models.target, draft_vocab_size=40)
    names = "plain eagle_like falcon_chain falcon_dynamic falcon falcon@3 falcon_packed falcon_multi_root".split()
    found, absent = methods.resolve(names, models)
    assert list(found) == names and not absent
    file = TraceFile(tmp_path, {})
    benchmark = Benchmark(models.target, tiny_tokenizer(), found, SETTINGS, repeats=1)
    benchmark.run({"one": [["abc"]]}, file)
    for row in summarise(file.traces.values(), exact=True):
        assert row["identical_prompts"] == row["num_prompts"] and (row["tau"] is None) is (row["method"] == "plain")
    assert all(each.operations > 0 for each in benchmark.operations("abc").values())
    assert models.drafters["falcon"].generation_config.num_assistant_tokens == 12


def test_packed_methods_decode_with_packed_weights(models, tmp_path, monkeypatch):
    """And leave the others theirs."""
    found, _ = methods.resolve(["plain", "falcon", "plain_packed", "falcon_packed"], models)
    packed, generate = [], type(models.target).generate

    def recorded(self, *args, **kwargs):
        drafter = kwargs.get("assistant_model")
        packed.append((is_packed(self), drafter is not None and is_packed(drafter)))
        return generate(self, *args, **kwargs)

    monkeypatch.setattr(type(models.target), "generate", recorded)
    benchmark = Benchmark(models.target, tiny_tokenizer(), found, SETTINGS, repeats=1)
    benchmark.run({"one": [["abc"]]}, TraceFile(tmp_path, {}))
    assert packed == [(False, False)] * 4 + [(True, False)] * 2 + [(True, True)] * 2
    assert not is_packed(models.target) and not is_packed(models.drafters["falcon"])


@pytest.mark.slow
def test_compiled_methods_decode_with_compiled_rounds(models, tmp_path, monkeypatch):
    """And leave the others theirs."""
    names = ["plain", "falcon", "falcon_packed", "falcon_compiled", "falcon_packed_compiled"]
    found, _ = methods.resolve(names, models)
    seen, generate = [], type(models.target).generate

    def recorded(self, *args, **kwargs):
        seen.append((is_packed(self), compiled_rounds_of(self) is not None))
        return generate(self, *args, **kwargs)

    as_it_is = functools.partial(runner.compiled_rounds, compile_config=CompileConfig(backend="eager", mode=None))
    monkeypatch.setattr(runner, "compiled_rounds", as_it_is)
    monkeypatch.setattr(type(models.target), "generate", recorded)
    file = TraceFile(tmp_path, {})
    Benchmark(models.target, tiny_tokenizer(), found, SETTINGS, repeats=1).run({"one": [["abc"]]}, file)
    ways = [(False, False), (False, False), (True, False), (False, True), (True, True)]
    assert seen == [way for way in ways for _ in range(2)]
    assert len({tuple(each.tokens) for each in file.traces.values()}) == 1
    assert compiled_rounds_of(models.target) is None


def test_methods_take_turns_in_going_first(models, tmp_path):
    found, _ = methods.resolve(["plain", "falcon"], models)
    file = TraceFile(tmp_path, {})
    Benchmark(models.target, tiny_tokenizer(), found, SETTINGS, repeats=1).run(DATA, file)
    order = [key[:3] for key in file.traces if key[3] == 0]
    assert [key[0] for key in order] == ["plain", "falcon", "falcon", "plain", "plain", "falcon"]


def test_a_killed_run_continues(models, tmp_path, monkeypatch):
    found, _ = methods.resolve(["plain", "falcon"], models)
    calls, generate = [], type(models.target).generate

    def until(limit):
        def counted(self, *args, **kwargs):
            calls.append(kwargs["input_ids"].tolist())
            if len(calls) > limit:
                raise KeyboardInterrupt
            return generate(self, *args, **kwargs)

        monkeypatch.setattr(type(models.target), "generate", counted)

    def run():
        calls.clear()
        file = TraceFile(tmp_path / "killed", {})
        Benchmark(models.target, tiny_tokenizer(), found, SETTINGS, repeats=1).run(DATA, file)
        return file.traces

    until(5)
    with pytest.raises(KeyboardInterrupt):
        run()
    until(100)
    traces = run()
    # The dialogue's first turn was measured, and its second by one method; of the others each is, after the warm-up.
    assert len(calls) == 2 + 5
    whole = TraceFile(tmp_path / "whole", {})
    Benchmark(models.target, tiny_tokenizer(), found, SETTINGS, repeats=1).run(DATA, whole)
    assert {key: each.tokens for key, each in traces.items()} == {k: e.tokens for k, e in whole.traces.items()}


def test_the_progress_bar_counts_the_answers_of_this_runs_methods(models, tmp_path, monkeypatch):
    bars = []

    class Bar(runner.tqdm):
        def __init__(self, **kwargs):
            super().__init__(**kwargs)
            bars.append(self)

    monkeypatch.setattr(runner, "tqdm", Bar)
    file = TraceFile(tmp_path, {})
    # Of an earlier run, with more methods.
    for method in ("plain", "falcon", "lookup"):
        file.add(trace(method))
    benchmark = Benchmark(models.target, tiny_tokenizer(), {"plain": {}}, SETTINGS, repeats=1)
    benchmark.run({"a": [["abc"], ["de"]]}, file)
    assert [(bar.initial, bar.total, bar.n) for bar in bars] == [(1, 2, 2)]


def test_answers_are_fed_back(models, tmp_path, monkeypatch):
    prompts, generate = [], type(models.target).generate

    def recorded(self, input_ids, **kwargs):
        prompts.append(input_ids[0].tolist())
        return generate(self, input_ids, **kwargs)

    monkeypatch.setattr(type(models.target), "generate", recorded)
    file, tokenizer = TraceFile(tmp_path, {}), tiny_tokenizer()
    Benchmark(models.target, tokenizer, {"plain": {}}, SETTINGS, repeats=1).run({"a": [["abc", "de"]]}, file)
    answer = tokenizer.decode(file.traces["plain", "a", 0, 0].tokens, skip_special_tokens=True)
    assert prompts[-1] == tokenizer(f"abc\n\n{answer}\n\nde").input_ids


def test_the_gap_is_that_of_plain_decodings_logits(models, tmp_path, monkeypatch):
    found = {"plain": {}, "other": {"repetition_penalty": 1e-6}}
    file = TraceFile(tmp_path, {})
    Benchmark(models.target, tiny_tokenizer(), found, SETTINGS, repeats=1).run({"a": [["abc"]]}, file)
    plain, other = file.traces["plain", "a", 0, 0], file.traces["other", "a", 0, 0]
    place = first_difference(plain.tokens, other.tokens)
    assert plain.gap is None and other.gap >= 0
    prompt = tiny_tokenizer()("abc", return_tensors="pt").input_ids
    context = torch.cat((prompt, torch.tensor([plain.tokens[:place]], dtype=torch.int64)), dim=1)
    with torch.no_grad():
        logits = models.target(context).logits[0, -1]
    assert other.gap == pytest.approx(float(logits[plain.tokens[place]] - logits[other.tokens[place]]), abs=1e-5)


def test_methods_that_cannot_run(models):
    found, absent = methods.resolve(["draft_model", "assisted", "medusa_like"], models)
    assert not found
    assert absent["draft_model"] == absent["assisted"] == "no smaller language model is given as `draft_model`"
    assert absent["medusa_like"] == "no drafter is given as `medusa_like`"
    models.drafters["falcon"] = tiny_drafter(models.target, block_size=2)
    assert "give one with 1 and none as `eagle_like`" in methods.resolve(["eagle_like"], models)[1]["eagle_like"]


@pytest.mark.parametrize(
    "name, message",
    [
        ("fast", "`methods` has 'fast': choose from plain, plain_compiled, "),
        ("plain@8", "`methods` has 'plain@8', but `plain` has no trees: leave out '@8'"),
        ("lookahead@8", "the trees of `lookahead` have the sizes of its window and its n-grams: leave out '@8'"),
        ("falcon@", "give a number of nodes after the @, as in `falcon@8`"),
        ("falcon@0", "`methods` has 'falcon@0': give a number"),
        ("falcon@x", "`methods` has 'falcon@x': give a number"),
    ],
)
def test_names_that_are_no_methods(models, name, message):
    with pytest.raises(ValueError, match=message):
        methods.resolve([name], models)


FIXED = {
    "num_assistant_tokens": 8,
    "num_draft_passes": 3,
    "num_assistant_tokens_schedule": "constant",
    "prompt_lookup_num_tokens": 0,
}


@pytest.mark.parametrize(
    "name, changes",
    [
        ("falcon_static", {**FIXED, "draft_tree": "static"}),
        ("falcon_chain", {**FIXED, "draft_top_k": 1, "num_assistant_tokens": 4, "num_draft_passes": 4}),
        ("falcon_dynamic", FIXED),
        ("falcon_no_decision", {**FIXED, "assistant_confidence_threshold": 0.0}),
        ("falcon_no_cost_model", {**FIXED, "prompt_lookup_num_tokens": 32}),
        ("falcon_no_lookup", {"prompt_lookup_num_tokens": 0}),
        ("falcon_speculative", {**FIXED, "draft_tree": "static", "verification": "speculative"}),
        ("falcon_multi_root", {**FIXED, "verification": "multi_root"}),
        ("falcon_multi_root@5", {**FIXED, "num_assistant_tokens": 5, "verification": "multi_root"}),
        ("falcon_classifier", {"num_assistant_tokens_schedule": "heuristic"}),
        ("falcon@5", {"num_assistant_tokens": 5}),
        ("eagle_like@5", {**FIXED, "num_assistant_tokens": 5, "draft_tree": "static"}),
    ],
)
def test_methods_leave_the_drafter_as_it_is(models, name, changes):
    drafter = models.drafters["falcon"]
    drafter.generation_config.assistant_confidence_threshold = 0.1
    models.decision = DecisionModel([0.0] * 4, 0.0)
    before = drafter.generation_config.to_dict()
    changed = methods.resolve([name], models)[0][name]["assistant_model"]
    assert changed.generation_config.to_dict() == {**before, **changes}
    assert drafter.generation_config.to_dict() == before and changed.fusion is drafter.fusion


def test_a_drafter_of_a_name_is_a_method(models):
    models.drafters["k2"] = tiny_drafter(models.target, block_size=2)
    found, _ = methods.resolve(["k2", "k2@3"], models)
    assert found["k2"]["assistant_model"] is models.drafters["k2"]
    options = found["k2@3"]["assistant_model"].generation_config
    assert options.num_assistant_tokens == 3 and found["k2@3"]["assistant_model"].config.block_size == 2


def test_compiled_decoding_has_one_cache_for_all_prompts(models, monkeypatch):
    models.longest_context = 40
    monkeypatch.setattr(type(models.target), "device", torch.device("cuda"))
    (compiled,) = methods.resolve(["plain_compiled"], models)[0].values()
    assert compiled == {"cache_implementation": "static", "max_cache_len": 40}
    monkeypatch.undo()
    # Not compiled here; the cache is as it is there.
    output = models.target.generate(prompt(9), max_new_tokens=5, **compiled, return_dict_in_generate=True)
    assert output.past_key_values.layers[0].max_cache_len == 40


def test_compiled_plain_steps_on_a_cpu(models):
    """Of our loop, which compiled code needs: every step is one token, and none is drafted."""
    arguments = methods.resolve(["plain_compiled", "plain_packed_compiled"], models)[0]
    for each in arguments.values():
        output = models.target.generate(prompt(9), max_new_tokens=5, **each, return_dict_in_generate=True)
        assert output.draft_statistics.rounds == 4 and output.draft_statistics.drafted_tokens == 0
        plain = models.target.generate(prompt(9), max_new_tokens=5)
        assert output.sequences.tolist() == plain.tolist()


def test_longest_context():
    tokenizer = tiny_tokenizer()
    turns = tokenizer("ab\n\n\n\ncd").input_ids
    assert longest_context(tokenizer, {"a": [["ab", "cd"], ["efghij"]]}, 10) == len(turns) + 2 * 10
    assert longest_context(tokenizer, {"a": [["ab"]], "b": [["c" * 30]]}, 10) == 40
