# Copyright 2026 The hf_falcon authors. Licensed under the Apache License, Version 2.0.
"""The benchmark: its metrics on made-up traces, its runs on tiny models, killed and continued."""

import functools
import json
import math
from types import SimpleNamespace

import draft_fixtures
import pytest
import torch
from tiny_models import SAME_EVERY_ROUND, prompt, tiny_drafter, tiny_target, tiny_tokenizer
from transformers import CompileConfig, GenerationMixin

from hf_falcon import FalconCandidateGenerator, FalconDraftConfig
from hf_falcon.bench import methods, report, runner, scaled
from hf_falcon.bench.decision import DecisionModel, known
from hf_falcon.bench.medusa import MedusaLikeConfig, MedusaLikeModel
from hf_falcon.bench.memory import drafter_bytes, weight_bytes
from hf_falcon.bench.metrics import first_difference, summarise
from hf_falcon.bench.prompts import read_turns
from hf_falcon.bench.runner import Benchmark, longest_context
from hf_falcon.bench.scaled import SHAPES, Shape, scaled_drafter, scaled_target
from hf_falcon.bench.traces import TRACES_NAME, Trace, TraceFile
from hf_falcon.commands import bench, train
from hf_falcon.core.candidate_generator import LookupMatch
from hf_falcon.core.costs import Costs
from hf_falcon.core.draft_options import DraftOptions
from hf_falcon.core.policy import AdaptivePolicy, acceptance_stats_of
from hf_falcon.core.target_parts import TargetHead
from hf_falcon.core.tree import Branches
from hf_falcon.cpu.compiled_rounds import compiled_rounds_of
from hf_falcon.cpu.packing import is_packed
from hf_falcon.training.csgd import DistillationWeights, DraftBatch, draft_loss
from hf_falcon.training.features import target_features
from hf_falcon.training.token_file import TokenFile


def trace(
    method="plain", data="a", prompt=0, tokens=(1, 2, 3, 4), seconds=(2.0,), statistics=None, **changes
) -> Trace:
    values = {"turn": 0, "gap": None, "peak_memory_mb": 10.0, **changes}
    return Trace(method, data, prompt, tokens=list(tokens), seconds=list(seconds), statistics=statistics, **values)


def drafted(rounds, accepted, new, by_depth, target=1.0, drafter=0.5, other=0.25):
    time = {"target": target, "drafter": drafter, "other": other}
    found = {"rounds": rounds, "accepted_tokens": accepted, "new_tokens": new, "accepted_by_depth": by_depth}
    return {**found, "time": time}


@pytest.mark.parametrize(
    "tokens, others, place",
    [([1, 2], [1, 2], None), ([1, 2], [1, 3], 1), ([1, 2], [1], 1), ([], [4], 0), ([5], [4, 5], 0)],
)
def test_first_difference(tokens, others, place):
    assert first_difference(tokens, others) == place


def test_metrics():
    traces = [
        trace(seconds=(4.0, 2.0, 3.0)),
        trace("falcon", seconds=(1.5,), statistics=drafted(2, 2, 4, [1, 1]), peak_memory_mb=12.0),
        trace(prompt=1, seconds=(6.0,)),
        trace("falcon", prompt=1, seconds=(2.0,), statistics=drafted(3, 1, 4, [1], target=3.0)),
    ]
    plain, falcon = summarise(traces, exact=True)
    assert (plain["method"], plain["speedup"], plain["tau"], plain["time"]) == ("plain", 1.0, None, None)
    assert plain["tokens_per_second"] == pytest.approx(8 / 9)
    assert (falcon["num_prompts"], falcon["new_tokens"], falcon["identical_prompts"]) == (2, 8, 2)
    # Medians of 3 and 6 seconds against 1.5 and 2; a share of each prompt's time, not a mean of ratios.
    assert falcon["speedup"] == pytest.approx(9 / 3.5)
    assert falcon["speedup_spread"] == pytest.approx([2.25, 2.75])
    assert (falcon["tokens_per_round"], falcon["tau"], falcon["alpha"]) == (1 + 3 / 5, 3 / 5, 3 / 8)
    assert falcon["accepted_by_depth"] == [2 / 5, 1 / 5]
    assert falcon["time"] == {"target": 4.0, "drafter": 1.0, "other": 0.5}
    assert falcon["peak_memory_mb"] == 12.0


def test_a_shorter_text_is_no_speedup():
    traces = [trace(), trace("other", tokens=(1, 2), seconds=(1.0,))]
    assert summarise(traces, exact=False)[1]["speedup"] == 1.0


@pytest.mark.parametrize("exact", [True, False])
def test_a_method_that_differs_is_reported_as_such(exact):
    traces = [
        trace(),
        trace("other", tokens=(1, 2, 9, 4), seconds=(1.0,), gap=0.125),
        trace(prompt=1),
        trace("other", prompt=1, seconds=(1.0,)),
    ]
    plain, other = rows = summarise(traces, exact)
    assert (other["identical_prompts"], other["num_prompts"]) == (1, 2)
    assert (other["median_first_difference"], other["median_logit_gap"]) == (2, 0.125)
    assert other["speedup"] == (None if exact else 2.0)
    assert (other["speedup_spread"] is None) is exact and plain["speedup"] == 1.0
    assert ("differs" in report.table(rows).splitlines()[3]) is exact
    assert ("differs" in report.markdown({}, rows, {}, exact).split("| other |")[1].split("\n")[0]) is exact


def test_rows_for_each_data_set_and_for_all():
    traces = [
        trace(m, data, seconds=(s,))
        for data, times in {"a": (2, 1), "b": (6, 1)}.items()
        for m, s in zip(("plain", "fast"), times)
    ]
    rows = {(row["method"], row["data"]): row["speedup"] for row in summarise(traces, exact=True)}
    assert rows["fast", "a"] == 2 and rows["fast", "b"] == 6 and rows["fast", "all"] == 4
    # What plain decoding has no counterpart of counts nowhere.
    assert summarise([trace("fast")], exact=True) == []


def test_samples_may_be_others():
    traces = [trace(), trace("other", tokens=(1, 2, 9, 4), seconds=(1.0,)), trace("other@3", tokens=(7, 2, 9, 4))]
    assert [row["speedup"] for row in summarise(traces, exact=True, other_samples=("other",))] == [1.0, 2.0, 1.0]
    assert [row["speedup"] for row in summarise(traces, exact=True, other_samples=("another",))] == [1.0, None, None]


def test_report_is_drawn():
    rows = summarise([trace(), trace("falcon", statistics=drafted(2, 2, 4, [1, 1]))], exact=True)
    assert report.picture(rows).startswith(b"\x89PNG")
    text = report.markdown({"device": "a machine"}, rows, {"draft_model": "none is given"}, exact=True)
    assert "device: a machine" in text and "Not run: `draft_model`, because none is given." in text


# Files.


def test_trace_file_survives_a_kill(tmp_path):
    file = TraceFile(tmp_path, {"dtype": "float32"})
    file.add(trace())
    file.add(trace("falcon"))
    path = tmp_path / TRACES_NAME
    path.write_bytes(path.read_bytes()[:-7])
    file = TraceFile(tmp_path, {"dtype": "float32"})
    assert list(file.traces) == [("plain", "a", 0, 0)]
    file.add(trace("falcon"))
    assert TraceFile(tmp_path, {"dtype": "float32"}).traces == {t.key: t for t in (trace(), trace("falcon"))}
    with pytest.raises(ValueError, match="`dtype` 'float32', and this run has 'bfloat16': give another `output`"):
        TraceFile(tmp_path, {"dtype": "bfloat16"})


@pytest.mark.parametrize(
    "line, message",
    [
        ("nonsense", "line 2: no JSON object with `turns`"),
        ('{"turn": ["a"]}', "line 2: no JSON object with `turns`"),
        ('["turns"]', "line 2: no JSON object with `turns`"),
        ('{"turns": "a"}', "line 2: `turns` is 'a'; it must be a list of texts"),
        ('{"turns": []}', "line 2: `turns` is \\[\\]"),
        ('{"turns": ["a", 3]}', "line 2: `turns` is \\['a', 3\\]"),
    ],
)
def test_wrong_prompts(tmp_path, line, message):
    path = tmp_path / "prompts.jsonl"
    path.write_text(f'{{"turns": ["good"]}}\n{line}\n')
    with pytest.raises(ValueError, match=f"prompts.jsonl, {message}"):
        read_turns(str(path))


def test_prompts(tmp_path):
    path = tmp_path / "prompts.jsonl"
    path.write_text('{"turns": ["a", "b"]}\n\n{"turns": ["c"], "more": 1}\n')
    assert read_turns(str(path)) == [["a", "b"], ["c"]] and read_turns(str(path), 1) == [["a", "b"]]
    path.write_text("\n")
    with pytest.raises(ValueError, match="has no prompts"):
        read_turns(str(path))
    with pytest.raises(FileNotFoundError, match="`data` is 'elsewhere'.*or one of mt_bench, humaneval, gsm8k"):
        read_turns("elsewhere")


def test_prompts_of_the_hub(monkeypatch):
    asked = []

    def load_dataset(*arguments, split):
        asked.append((*arguments, split))
        return {"question": ["one", "two"]}

    monkeypatch.setitem(__import__("sys").modules, "datasets", SimpleNamespace(load_dataset=load_dataset))
    assert read_turns("gsm8k", 1) == [["one"]] and asked == [("openai/gsm8k", "main", "test")]


# Runs.

DATA = {"first": [["abc", "de"], ["fgh"]], "second": [["ijk"]]}
SETTINGS = {"max_new_tokens": 12, "do_sample": False}


@pytest.fixture
def models():
    target = tiny_target("llama")
    return methods.Models(target, {"falcon": tiny_drafter(target, block_size=1, num_lstm_layers=0)})


@pytest.mark.parametrize("settings", [{}, {"do_sample": True, "temperature": 0.8}])
def test_every_method_answers_like_plain_decoding(models, tmp_path, settings):
    names = "plain prompt_lookup eagle_like falcon_chain falcon_static falcon_dynamic falcon_no_decision".split()
    names += "falcon_no_cost_model falcon_no_lookup falcon falcon@3 plain_packed falcon_packed".split()
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


SAMPLING = ["falcon_speculative", "falcon_multi_root", "falcon_speculative@3"]


@pytest.mark.parametrize("temperature", ["0", "0.8"])
def test_bench_of_samples(arguments, tmp_path, temperature):
    """Samples that are others by their method count, and greedy decoding is the same by all of them."""
    words = ["--methods", ",".join(SAMPLING), "--temperature", temperature, "--max_turns", "1"]
    assert bench.main([*arguments, *words]) == 0
    runs, _ = bench_runs(tmp_path)
    for name in SAMPLING:
        row = runs[name, "prompts"]
        assert row["speedup"] > 0 and row["tau"] is not None and row["new_tokens"] == 16
        assert (row["identical_prompts"] == 2) is (temperature == "0")


def branches(*log_probs, depth=1):
    count = torch.arange(len(log_probs))
    return Branches(count, count, torch.tensor(log_probs), depth)


def test_decision_model(tmp_path):
    found = known(branches(-0.5, -0.5, depth=3))
    torch.testing.assert_close(found, torch.tensor([-0.5, 0.0, 0.6931, 3.0]), rtol=0, atol=1e-4)
    assert known(branches(-0.1)).tolist() == pytest.approx([-0.1, 0.0, 0.0, 1.0])
    draws = torch.Generator().manual_seed(0)
    seen = torch.randn(4000, 4, generator=draws) * torch.tensor([2.0, 1.0, 0.5, 1.5])
    chances = (seen @ torch.tensor([1.0, 0.0, -2.0, 0.5]) - 1.0).sigmoid()
    model = DecisionModel.fit(seen, torch.bernoulli(chances, generator=draws))
    assert model.weights == pytest.approx([1.0, 0.0, -2.0, 0.5], abs=0.2) and model.bias == pytest.approx(-1, abs=0.2)
    model.save(tmp_path / "decision.json")
    assert DecisionModel.load(tmp_path / "decision.json") == model
    expected = torch.sigmoid(found @ torch.tensor(model.weights) + model.bias)
    torch.testing.assert_close(model(branches(-0.5, -0.5, depth=3)), expected)


@pytest.mark.parametrize(
    "text",
    ["no", "[]", '{"weights": [1]}', '{"weights": [1, 2, 3], "bias": 0}', '{"weights": [1, 2, 3, NaN], "bias": 0}'],
)
def test_files_that_are_no_decision_model(tmp_path, text):
    (tmp_path / "decision.json").write_text(text)
    with pytest.raises(ValueError, match="with examples/decision_model.py"):
        DecisionModel.load(tmp_path / "decision.json")


@pytest.mark.parametrize("says", [-1e3, 1e3])
def test_the_decision_model_decides(models, says):
    """Its method's passes, and no other's."""
    models.decision = DecisionModel([0.0] * 4, says)
    found, _ = methods.resolve(["falcon_classifier", "falcon_classifier@3", "falcon"], models)
    paces = {}
    for name, given in found.items():
        costs = Costs({0: 1.0, 8: 1.4})
        experience = acceptance_stats_of(given["assistant_model"], models.target)
        paces[name] = AdaptivePolicy(DraftOptions(num_assistant_tokens=8), experience, torch.device("cpu"), costs)
        paces[name].guess(LookupMatch([], 0))
    even = branches(math.log(0.3), math.log(0.3))
    chosen = {name: pace.another_pass(even, even.log_probs) for name, pace in paces.items()}
    assert chosen == {"falcon_classifier": says > 0, "falcon_classifier@3": says > 0, "falcon": True}


def test_bench_with_a_decision_model(arguments, tmp_path, capsys):
    words = [*arguments, "--max_turns", "1", "--methods", "falcon_classifier"]
    assert bench.main(words) == 0
    assert "`falcon_classifier` is left out: no decision model is given" in capsys.readouterr().out
    DecisionModel([1.0, 0.0, 0.0, 0.0], 0.0).save(tmp_path / "decision.json")
    words += ["--decision", str(tmp_path / "decision.json"), "--output", str(tmp_path / "new" / "out")]
    assert bench.main(words) == 0
    row = bench_runs(tmp_path / "new")[0]["falcon_classifier", "prompts"]
    assert row["identical_prompts"] == 2 and row["tau"] is not None
    # By another model it is another measurement.
    DecisionModel([0.5, 0.0, 0.0, 0.0], 0.0).save(tmp_path / "decision.json")
    with pytest.raises(ValueError, match="give another `output`"):
        bench.main(words)


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
    found, absent = methods.resolve(["draft_model", "medusa_like", "plain_compiled", "lookahead"], models)
    assert not found
    assert absent["draft_model"] == "no smaller language model is given as `draft_model`"
    assert absent["medusa_like"] == "no drafter is given as `medusa_like`"
    assert absent["plain_compiled"] == "static cache and torch.compile are measured on CUDA only, and this is cpu"
    assert "`GenerationMixin.greedy_search`" in absent["lookahead"]
    # What that says of transformers is so.
    assert not hasattr(GenerationMixin, "greedy_search")
    models.drafters["falcon"] = tiny_drafter(models.target, block_size=2)
    assert "give one with 1 and none as `eagle_like`" in methods.resolve(["eagle_like"], models)[1]["eagle_like"]


@pytest.mark.parametrize(
    "name, message",
    [
        ("fast", "`methods` has 'fast': choose from plain, plain_compiled, "),
        ("plain@8", "`methods` has 'plain@8', but `plain` has no trees: leave out '@8'"),
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


def test_longest_context():
    tokenizer = tiny_tokenizer()
    turns = tokenizer("ab\n\n\n\ncd").input_ids
    assert longest_context(tokenizer, {"a": [["ab", "cd"], ["efghij"]]}, 10) == len(turns) + 2 * 10
    assert longest_context(tokenizer, {"a": [["ab"]], "b": [["c" * 30]]}, 10) == 40


def test_speedup_against_node_budget():
    def row(method, data, budget, speedup):
        return {"method": method, "data": data, "node_budget": budget, "speedup": speedup}

    rows = [
        row("plain", "all", None, 1.0),
        row("falcon", "all", 8, 1.5),
        row("falcon@16", "all", 16, 1.2),
        row("falcon@4", "all", 4, 1.3),
        row("falcon@4", "a", 4, 9.0),
        row("k2@4", "all", 4, None),
        row("medusa_like", "all", 12, 1.1),
    ]
    found = report.speedup_by_budget(rows, "all")
    assert found == {"falcon": [(4, 1.3), (8, 1.5), (16, 1.2)], "medusa_like": [(12, 1.1)]}


@pytest.mark.parametrize("draft_vocab_size", [None, 30])
def test_drafter_memory(draft_vocab_size):
    target = draft_fixtures.tiny_target()
    drafter = draft_fixtures.tiny_drafter(target, num_lstm_layers=0, block_size=1, draft_vocab_size=draft_vocab_size)
    drafter.generation_config.draft_tree = "static"
    found = drafter_bytes(drafter, target, 300)
    weights = sum(parameter.nbytes for parameter in drafter.parameters())
    # Two layers of 300 and some keys and values in a buffer of 512, in a quarter of the heads and two of eight.
    cache = 2 * 2 * 512 * 16 * 4
    head = 0 if draft_vocab_size is None else 30 * 32 * 4
    # Means and deviations, ids, the tree, and the newest features.
    assert weights + cache + head < found < weights + cache + head + 6000
    assert drafter_bytes(drafter, target, 600) - found == cache
    assert weight_bytes(target) == sum(p.nbytes for p in target.parameters())


@pytest.fixture
def arguments(tmp_path):
    """A target with a tokenizer, its drafter and prompts, on the disk."""
    target = tiny_target("llama")
    target.save_pretrained(tmp_path / "target")
    tiny_tokenizer().save_pretrained(tmp_path / "target")
    tiny_drafter(target, block_size=1, num_lstm_layers=0).save_pretrained(tmp_path / "drafter")
    (tmp_path / "prompts.jsonl").write_text('{"turns": ["abc", "de"]}\n{"turns": ["fgh"]}\n')
    given = {"data": "prompts.jsonl", "target": "target", "drafter": "drafter", "output": "out"}
    words = [word for name, value in given.items() for word in (f"--{name}", str(tmp_path / value))]
    return [*words, *"--dtype float32 --device cpu --max-new-tokens 8 --methods falcon,draft_model".split()]


def test_bench_command(arguments, tmp_path, capsys):
    assert bench.main([*arguments, "--max_turns", "1"]) == 0
    printed = capsys.readouterr().out
    assert "`draft_model` is left out: no smaller language model" in printed
    assert [line.split()[-1] for line in printed.splitlines() if line.startswith(("plain", "falcon"))] == [
        "2/2",
        "2/2",
    ]
    found = json.loads((tmp_path / "out" / "report.json").read_text())
    assert found["environment"]["dtype"] == "float32" and found["environment"]["device"]
    assert [(run["method"], run["data"], run["num_prompts"]) for run in found["runs"]] == [
        ("plain", "prompts", 2),
        ("falcon", "prompts", 2),
    ]
    fields = "method data num_prompts new_tokens tokens_per_second speedup speedup_spread tau alpha accepted_by_depth"
    fields += " identical_prompts node_budget passes time peak_memory_mb drafter_memory_mb drafter_memory_share"
    assert set(fields.split()) <= set(found["runs"][1])
    assert found["runs"][0]["drafter_memory_mb"] is None and found["runs"][1]["drafter_memory_mb"] > 0
    assert "Drafter, its cache and tree:" in printed
    assert (found["runs"][0]["node_budget"], found["runs"][1]["node_budget"], found["runs"][1]["passes"]) == (
        None,
        12,
        4,
    )
    assert (tmp_path / "out" / "report.png").read_bytes().startswith(b"\x89PNG")
    assert "| falcon |" in (tmp_path / "out" / "report.md").read_text()
    # Other prompts are another measurement.
    with pytest.raises(ValueError, match="give another `output`"):
        bench.main(arguments)


def bench_runs(tmp_path):
    """The rows of the report, by method and data."""
    found = json.loads((tmp_path / "out" / "report.json").read_text())
    return {(run["method"], run["data"]): run for run in found["runs"]}, found["environment"]


def test_bench_measures_node_budgets_and_drafters_of_a_name(arguments, tmp_path):
    target = tiny_target("llama")
    tiny_drafter(target, block_size=2).save_pretrained(tmp_path / "k2")
    (tmp_path / "more.jsonl").write_text('{"turns": ["ijk"]}\n')
    words = f"--data {tmp_path}/more.jsonl --node-budgets 3 --node_budgets 5 7 --drafters k2={tmp_path}/k2"
    assert bench.main([*arguments, *words.split(), "--max_new_tokens", "6"]) == 0
    runs, environment = bench_runs(tmp_path)
    names = ["plain", "falcon", "k2", "falcon@3", "falcon@5", "falcon@7"]
    assert list(runs) == [(name, data) for name in names for data in ("prompts", "more", "all")]
    budgets = {name: runs[name, "all"]["node_budget"] for name in names}
    assert budgets == {"plain": None, "falcon": 12, "k2": 12, "falcon@3": 3, "falcon@5": 5, "falcon@7": 7}
    # Each answer has six tokens: the later --max_new_tokens counts.
    assert {run["new_tokens"] for (_, data), run in runs.items() if data == "all"} == {4 * 6}
    assert all(run["identical_prompts"] == run["num_prompts"] for run in runs.values())
    assert environment["k2"].endswith("k2") and environment["k2_fingerprint"] != environment["drafter_fingerprint"]
    assert "| falcon@3 |" in (tmp_path / "out" / "report.md").read_text()


def test_bench_in_a_larger_shape(arguments, tmp_path, monkeypatch, capsys):
    monkeypatch.setitem(SHAPES, "1b", SHAPE)
    tiny_drafter(tiny_target("llama"), block_size=2).save_pretrained(tmp_path / "lstm")
    words = f"--scaled 1b --max_turns 1 --eagle_like {tmp_path}/drafter --drafters lstm={tmp_path}/lstm"
    assert bench.main([*arguments, *words.split(), "--methods", "falcon,eagle_like"]) == 0
    runs, environment = bench_runs(tmp_path)
    assert list(runs) == [(name, "prompts") for name in ("plain", "falcon", "eagle_like")]
    assert all(run["scaled"] == "1b" and run["identical_prompts"] == 2 for run in runs.values())
    assert environment["target"] == f"1B-shaped network that computes the function of {tmp_path}/target"
    printed, text = capsys.readouterr().out, (tmp_path / "out" / "report.md").read_text()
    assert "`lstm` is left out: The drafter has `num_lstm_layers` 1" in printed
    assert "speed-up, 1B-shaped network" in printed and "All rows are of a 1B-shaped network" in text
    # The same function, and so the same tokens and acceptance.
    assert bench.main([*arguments, "--max_turns", "1", "--output", str(tmp_path / "small" / "out")]) == 0
    small, _ = bench_runs(tmp_path / "small")
    for name in ("new_tokens", "tau", "accepted_by_depth"):
        assert small["falcon", "prompts"][name] == runs["falcon", "prompts"][name]
    assert small["falcon", "prompts"]["scaled"] is None


def test_medusa_like_comes_along_for_the_demos_target(monkeypatch, tmp_path):
    target = tiny_target("llama")
    medusa_like(target).save_pretrained(tmp_path)
    monkeypatch.setattr(bench, "load_target", lambda *args: (target, tiny_tokenizer()))
    monkeypatch.setattr(bench, "load_drafter", lambda *args: tiny_drafter(target))

    def loaded(folder, *words):
        monkeypatch.setattr(bench, "shipped_folder", lambda name: folder)
        arguments = bench.BenchArguments(["prompts.jsonl"], *words)
        return bench._load(arguments, torch.float32, torch.device("cpu"))[0]

    assert isinstance(loaded(str(tmp_path)).drafters["medusa_like"], MedusaLikeModel)
    for models in (loaded(None), loaded(str(tmp_path), "another/target")):
        assert "examples/train_peers.sh trains one" in methods.resolve(["medusa_like"], models)[1]["medusa_like"]


def test_bench_says_that_all_was_measured_before(arguments, tmp_path, capsys):
    line = f"All answers were measured before: delete {tmp_path / 'out' / TRACES_NAME} to measure it again."
    for measured in (False, True):
        assert bench.main(arguments) == 0
        assert (line in capsys.readouterr().out) is measured
    # Another method is not; the others are not measured again.
    traces = (tmp_path / "out" / TRACES_NAME).read_text()
    assert bench.main([*arguments, "--node_budgets", "3"]) == 0
    assert line not in capsys.readouterr().out
    assert (tmp_path / "out" / TRACES_NAME).read_text().startswith(traces)


def test_bench_fails_where_float32_differs(arguments, monkeypatch, capsys):
    monkeypatch.setitem(methods.METHODS, "falcon", lambda models: {"repetition_penalty": 1e-6})
    assert bench.main(arguments) == 1
    assert "differs" in capsys.readouterr().out


@pytest.mark.parametrize(
    "words, message",
    [
        (["--repeats", "0"], "`repeats` is 0"),
        (["--limit", "0"], "`limit` is 0"),
        (["--temperature", "-1"], "`temperature` is -1.0"),
        (["--methods", "falcon,nothing"], "`methods` has 'nothing'"),
        (["--node_budgets", "4", "0"], "`node_budgets` is \\[4, 0\\]"),
        (["--scaled", "70b"], "`scaled` is '70b'; choose one of 1b, 7b, 13b"),
        (["--drafters", "k2"], "`drafters` has 'k2'; write NAME=FOLDER"),
        (["--drafters", "falcon=runs/k2"], "`drafters` has 'falcon=runs/k2'"),
        (["--drafters", "k2=a", "--drafters", "k2=b"], "`drafters` has the name 'k2' more than once"),
        (["--data", "elsewhere/prompts.jsonl"], "two files have the same name"),
    ],
)
def test_wrong_bench_arguments(arguments, words, message):
    with pytest.raises(ValueError, match=message):
        bench.main([*arguments, *words])


# Peers.


def medusa_like(target, block_size=3, **fields):
    torch.manual_seed(0)
    sizes = {"block_size": block_size, "num_lstm_layers": 0, **fields}
    drafter = MedusaLikeModel(MedusaLikeConfig.from_target(target, **sizes)).eval()
    for name, value in {**SAME_EVERY_ROUND, "num_draft_passes": 1}.items():
        setattr(drafter.generation_config, name, value)
    return drafter


@pytest.mark.parametrize("length", [2, 7])
def test_medusa_heads_read_the_newest_feature(length):
    target = draft_fixtures.tiny_target()
    drafter = medusa_like(target)
    generator = FalconCandidateGenerator(drafter, target)
    features = torch.randn(1, length, 32)
    with torch.no_grad():
        generator.commit(features, draft_fixtures.random_tokens(1, length))
        outputs = drafter.heads(features[0, -1]).view(3, 32)
        expected = drafter.norm(features[0, -1] + torch.nn.functional.silu(outputs))
    if length < 3:
        assert generator._block_features is None
    else:
        torch.testing.assert_close(generator._block_features[0], expected)


def test_medusa_like_generates_and_learns(tmp_path):
    target = draft_fixtures.tiny_target()
    medusa_like(target, draft_vocab_size=30).save_pretrained(tmp_path)
    drafter = MedusaLikeModel.from_pretrained(tmp_path)
    settings = {"max_new_tokens": 20, "do_sample": False, "return_dict_in_generate": True}
    tokens = draft_fixtures.random_tokens(1, 9)
    output = target.generate(tokens, assistant_model=drafter, **settings)
    assert output.sequences.tolist() == target.generate(tokens, **settings).sequences.tolist()
    # One pass, so no node is deeper than there are heads.
    assert 0 < output.draft_statistics.drafted_tokens and len(output.draft_statistics.accepted_by_depth) <= 3

    head, drafter = TargetHead(drafter, target), drafter.train()
    ids = draft_fixtures.random_tokens(2, 24)
    valid = torch.ones_like(ids, dtype=torch.bool)
    batch = DraftBatch(target_features(target, ids, valid), ids, valid, valid, torch.arange(2))
    optimizer = torch.optim.AdamW(drafter.parameters(), lr=1e-2)
    losses = []
    for step in range(60):
        result = draft_loss(drafter, head, batch, torch.Generator().manual_seed(step), DistillationWeights())
        optimizer.zero_grad()
        result.loss.backward()
        optimizer.step()
        losses.append(result.loss.item())
    assert losses[-1] < 0.6 * losses[0] and all(p.grad is not None for p in drafter.parameters())


def test_medusa_like_is_trained_by_the_same_command(arguments, tmp_path):
    samples = [draft_fixtures.random_tokens(20, seed=seed) for seed in range(12)]
    TokenFile.from_samples(samples, [4] * 12, [0.0] * 12, draft_fixtures.VOCAB).save(tmp_path / "tokens.safetensors")
    words = (
        f"--data {tmp_path}/tokens.safetensors --target {tmp_path}/target --output_dir {tmp_path}/medusa --max_steps 2"
    )
    words += " --architecture medusa_like --block_size 3 --report_to none --target_dtype float32"
    assert train.main(words.split()) == 0
    trained = ["--medusa_like", str(tmp_path / "medusa"), "--methods", "medusa_like"]
    assert bench.main([*arguments, *trained]) == 0
    found = json.loads((tmp_path / "out" / "report.json").read_text())["runs"][1]
    assert (found["method"], found["identical_prompts"], found["passes"]) == ("medusa_like", 2, 1)


# Scale.

SHAPE = Shape(96, 160, 5, 12, 4, 32)


# The drafter of the last is narrower than its target.
@pytest.mark.parametrize(
    "shape", [SHAPE, Shape(64, 64, 2, 8, 8, 16), Shape(64, 64, 4, 4, 2, 8), Shape(64, 2304, 2, 16, 16, 8)]
)
@pytest.mark.parametrize("block_size", [1, 2])
def test_scaled_models_are_the_same_functions(shape, block_size):
    target = draft_fixtures.tiny_target(head_dim=8)
    large = scaled_target(target, shape)
    assert large.config.hidden_size == shape.hidden_size
    assert large.model.layers[0].self_attn.q_proj.weight.shape == (
        shape.num_attention_heads * shape.head_dim,
        shape.hidden_size,
    )
    tokens = draft_fixtures.random_tokens(1, 30)
    with torch.no_grad():
        torch.testing.assert_close(large(tokens).logits, target(tokens).logits, rtol=1e-4, atol=1e-4)

    drafter = draft_fixtures.tiny_drafter(target, num_lstm_layers=0, block_size=block_size, draft_vocab_size=30)
    drafter.generation_config.num_assistant_tokens = 5
    large_drafter = scaled_drafter(drafter, large)
    sizes = FalconDraftConfig.from_target(large.config)
    for name in ("hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads", "head_dim"):
        assert getattr(large_drafter.config, name) == getattr(sizes, name)
    assert_same_drafting(drafter, target, large_drafter, large)


def test_scaled_medusa_like_is_the_same_function():
    target = draft_fixtures.tiny_target(head_dim=8)
    drafter, large = medusa_like(target, draft_vocab_size=30), scaled_target(target, SHAPE)
    with torch.no_grad():
        drafter.norm.weight.uniform_(0.5, 1.5)
        drafter.feature_mean.normal_(0.0, 0.5)
    assert_same_drafting(drafter, target, scaled_drafter(drafter, large), large)


def assert_same_drafting(drafter, target, large_drafter, large):
    tokens = draft_fixtures.random_tokens(1, 30)
    settings = {"max_new_tokens": 30, "do_sample": False, "return_dict_in_generate": True}
    small = target.generate(tokens, assistant_model=drafter, **settings)
    scaled = large.generate(tokens, assistant_model=large_drafter, **settings)
    assert scaled.sequences.tolist() == small.sequences.tolist()
    assert scaled.draft_statistics.accepted_by_depth == small.draft_statistics.accepted_by_depth
    assert scaled.draft_statistics.drafted_tokens == small.draft_statistics.drafted_tokens


def test_what_does_not_fit_into_memory(monkeypatch):
    target = draft_fixtures.tiny_target(head_dim=8)
    drafter = draft_fixtures.tiny_drafter(target, num_lstm_layers=0)
    large = scaled_target(target, SHAPE)
    monkeypatch.setattr(scaled.psutil, "virtual_memory", lambda: SimpleNamespace(available=100))
    # Not even asked for.
    monkeypatch.setattr(torch.nn.Module, "to_empty", None)
    message = "The scaled LlamaForCausalLM takes 6.5 GB in bfloat16, and cpu has 0.0 GB free: choose a smaller shape"
    with pytest.raises(ValueError, match=message):
        scaled_target(target.to(torch.bfloat16), Shape(4096, 11008, 16, 32, 32, 128))
    with pytest.raises(ValueError, match="The scaled FalconDraftModel takes 0.0 GB in float32"):
        scaled_drafter(drafter, large)


def test_what_cannot_be_scaled():
    target = draft_fixtures.tiny_target(head_dim=8)
    with pytest.raises(ValueError, match="only Llama models"):
        scaled_target(draft_fixtures.tiny_target("gpt2"), SHAPE)
    with pytest.raises(ValueError, match="does not fit"):
        scaled_target(target, Shape(16, 160, 5, 12, 4, 32))
    with pytest.raises(ValueError, match="do not fit into the heads"):
        scaled_target(target, Shape(64, 64, 2, 1, 1, 8))
    with pytest.raises(ValueError, match="does not divide the shape's, 12"):
        scaled_target(target, Shape(64, 64, 2, 8, 4, 12))
    with pytest.raises(ValueError, match="`num_lstm_layers` 2"):
        scaled_drafter(draft_fixtures.tiny_drafter(target, num_lstm_layers=2), target)
