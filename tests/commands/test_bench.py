# Copyright 2026 The hf_falcon authors. Licensed under the Apache License, Version 2.0.
"""`hf-falcon bench`."""

import json
from contextlib import contextmanager

import pytest
import torch
from bench_runs import SHAPE, medusa_like
from eagle3_models import new_eagle3, write_original
from tiny_models import (
    tiny_drafter,
    tiny_target,
    tiny_tokenizer,
)

from hf_falcon.bench import methods, runner
from hf_falcon.bench.busy import busy_processes
from hf_falcon.bench.decision import DecisionModel
from hf_falcon.bench.medusa import MedusaLikeModel
from hf_falcon.bench.shapes import SHAPES
from hf_falcon.bench.traces import TRACES_NAME
from hf_falcon.commands import bench
from hf_falcon.cpu.row_invariant import is_row_invariant

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


def test_bench_with_row_invariant(arguments, tmp_path, monkeypatch):
    """In 16 bits every method's tokens are plain decoding's, those of compiled rounds, too."""
    inside = []

    @contextmanager
    def compiled(target, drafter):
        # Code that is compiled outside does not run inside.
        inside.append(is_row_invariant(target))
        yield

    monkeypatch.setattr(runner, "compiled_rounds", compiled)
    words = ["--max_turns", "1", "--dtype", "bfloat16", "--methods", "falcon,prompt_lookup,falcon_compiled"]
    assert bench.main([*arguments, *words, "--row_invariant"]) == 0
    runs, report = bench_runs(tmp_path)
    assert {name for name, _ in runs} >= {"plain", "falcon", "falcon_compiled"} and inside and all(inside)
    assert all(row["identical_prompts"] == row["num_prompts"] for row in runs.values())
    # The answers of the other way of decoding are other measurements.
    with pytest.raises(ValueError, match="give another `output`"):
        bench.main([*arguments, *words])


def test_bench_on_a_busy_machine(arguments, tmp_path, monkeypatch):
    """The processes run while answers are measured, and end with the benchmark, also by an error."""
    began, alive = [], []

    @contextmanager
    def seen(count):
        with busy_processes(count) as processes:
            began.extend(processes)
            yield processes

    def run(self, data, file):
        alive.extend(process.poll() is None for process in began)
        raise RuntimeError("the end")

    monkeypatch.setattr(bench, "busy_processes", seen)
    with monkeypatch.context() as patch, pytest.raises(RuntimeError, match="the end"):
        patch.setattr(bench.Benchmark, "run", run)
        bench.main([*arguments, "--busy_processes", "2", "--output", str(tmp_path / "ended")])
    assert alive == [True, True] and all(process.poll() is not None for process in began)
    words = [*arguments, "--max_turns", "1", "--busy_processes", "1"]
    assert bench.main(words) == 0
    assert json.loads((tmp_path / "out" / "report.json").read_text())["environment"]["busy_processes"] == 1
    # A quiet machine is another measurement.
    with pytest.raises(ValueError, match="give another `output`"):
        bench.main(words[:-2])


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


def test_bench_of_an_eagle3_drafter(arguments, tmp_path, monkeypatch):
    """As the drafter of all methods, and beside a Falcon drafter."""
    folder = str(write_original(new_eagle3(tiny_target("llama")), tmp_path / "eagle3"))
    words = f"--max_turns 1 --methods falcon,eagle_like,falcon_packed --eagle_like {folder} --drafters eagle3={folder}"
    for number, more in enumerate(([], ["--drafter", folder, "--output", str(tmp_path / "all" / "out")])):
        assert bench.main([*arguments, *words.split(), *more]) == 0
        runs, environment = bench_runs(tmp_path / "all" if number else tmp_path)
        assert list(runs) == [
            (name, "prompts") for name in ("plain", "falcon", "eagle_like", "falcon_packed", "eagle3")
        ]
        assert all(run["identical_prompts"] == 2 for run in runs.values())
        assert runs["eagle3", "prompts"]["drafter_memory_mb"] > 0 and runs["eagle3", "prompts"]["tau"] is not None
        assert (environment["drafter_fingerprint"] == environment["eagle3_fingerprint"]) is (number == 1)
    monkeypatch.setitem(SHAPES, "1b", SHAPE)
    with pytest.raises(ValueError, match="only Falcon drafters can be scaled"):
        bench.main([*arguments, "--scaled", "1b", "--drafter", folder, "--output", str(tmp_path / "scaled")])


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
        return bench._load(arguments, torch.device("cpu"))[0]

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
        (["--busy_processes", "-1"], "`busy_processes` is -1"),
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
