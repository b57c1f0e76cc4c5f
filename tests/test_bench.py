# Copyright 2026 The hf_falcon authors. Licensed under the Apache License, Version 2.0.
"""The benchmark: its metrics on made-up traces, its runs on tiny models, killed and continued."""

import json
from types import SimpleNamespace

import draft_fixtures
import pytest
import torch
from tiny_models import tiny_drafter, tiny_target, tiny_tokenizer

from hf_falcon import FalconCandidateGenerator
from hf_falcon.bench import methods, report
from hf_falcon.bench.medusa import MedusaLikeConfig, MedusaLikeModel
from hf_falcon.bench.metrics import first_difference, summarise
from hf_falcon.bench.prompts import read_turns
from hf_falcon.bench.runner import Benchmark
from hf_falcon.bench.scaled import Shape, scaled_drafter, scaled_target
from hf_falcon.bench.traces import TRACES_NAME, Trace, TraceFile
from hf_falcon.borrowed_head import BorrowedHead
from hf_falcon.commands import bench, train
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
    assert (falcon["tau"], falcon["alpha"]) == (3 / 5, 3 / 8)
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
    return methods.Models(target, tiny_drafter(target, block_size=1, num_lstm_layers=0))


@pytest.mark.parametrize("settings", [{}, {"do_sample": True, "temperature": 0.8}])
def test_every_method_answers_like_plain_decoding(models, tmp_path, settings):
    names = ["plain", "prompt_lookup", "eagle_like", "falcon_chain", "falcon_static", "falcon"]
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
        assert (row["tau"] is None) is (row["method"] in ("plain", "prompt_lookup"))
    assert [row["new_tokens"] for row in rows if row["method"] == "plain"] == [36, 12, 48]


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
    # The dialogue's first turn was measured; of the others each is, after the warm-up.
    assert len(calls) == 2 + 6
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
    assert methods.resolve(["draft_model"], models)[1] == {
        "draft_model": "no smaller language model is given as `draft_model`"
    }
    models.drafter = tiny_drafter(models.target, block_size=2)
    assert "give one with 1 and none as `eagle_like`" in methods.resolve(["eagle_like"], models)[1]["eagle_like"]
    with pytest.raises(ValueError, match="`methods` has 'fast': choose of plain, prompt_lookup"):
        methods.resolve(["fast"], models)


def test_static_tree_leaves_the_drafter_as_it_is(models):
    changed = methods.METHODS["falcon_static"](models)["assistant_model"]
    assert changed.generation_config.draft_tree == "static"
    assert getattr(models.drafter.generation_config, "draft_tree", None) is None
    assert changed.fusion is models.drafter.fusion


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
    return [
        *words,
        "--dtype",
        "float32",
        "--device",
        "cpu",
        "--max-new-tokens",
        "8",
        "--methods",
        "falcon,draft_model",
    ]


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
    fields += " identical_prompts node_budget passes time peak_memory_mb"
    assert set(fields.split()) <= set(found["runs"][1])
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
    ],
)
def test_wrong_bench_arguments(arguments, words, message):
    with pytest.raises(ValueError, match=message):
        bench.main([*arguments, *words])


# Peers.


def medusa_like(target, block_size=3, **fields):
    torch.manual_seed(0)
    sizes = {"block_size": block_size, "num_lstm_layers": 0, **fields}
    return MedusaLikeModel(MedusaLikeConfig.from_target(target, **sizes)).eval()


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

    head, drafter = BorrowedHead(drafter, target), drafter.train()
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
    words += " --architecture medusa_like --block_size 3 --report_to none --final_tau_prompts 0"
    words += " --target_dtype float32"
    assert train.main(words.split()) == 0
    trained = ["--medusa_like", str(tmp_path / "medusa"), "--methods", "medusa_like"]
    assert bench.main([*arguments, *trained]) == 0
    found = json.loads((tmp_path / "out" / "report.json").read_text())["runs"][1]
    assert (found["method"], found["identical_prompts"], found["passes"]) == ("medusa_like", 2, 1)


# Scale.

SHAPE = Shape(96, 160, 5, 12, 4, 32)


@pytest.mark.parametrize("shape", [SHAPE, Shape(64, 64, 2, 8, 8, 16), Shape(64, 64, 4, 4, 2, 8)])
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
    large_drafter = scaled_drafter(drafter, large, shape)
    settings = {"max_new_tokens": 30, "do_sample": False, "return_dict_in_generate": True}
    small = target.generate(tokens, assistant_model=drafter, **settings)
    scaled = large.generate(tokens, assistant_model=large_drafter, **settings)
    assert scaled.sequences.tolist() == small.sequences.tolist()
    assert scaled.draft_statistics.accepted_by_depth == small.draft_statistics.accepted_by_depth
    assert scaled.draft_statistics.drafted_tokens == small.draft_statistics.drafted_tokens


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
        scaled_drafter(draft_fixtures.tiny_drafter(target, num_lstm_layers=2), target, SHAPE)
