# Copyright 2026 The hf_falcon authors. Licensed under the Apache License, Version 2.0.
"""`make gpu`, rehearsed to its end with tiny models: on the CPU, on the simulated device, and after interruptions."""

import importlib.util
import json
import shutil
import subprocess
from pathlib import Path

import pytest
import simulated_device
import torch
from bench_runs import SHAPE
from tiny_models import tiny_drafter, tiny_target, tiny_tokenizer
from transformers import PreTrainedModel

from hf_falcon.bench.shapes import SHAPES
from hf_falcon.commands import bench

ROOT = Path(__file__).parents[2]


@pytest.fixture
def script():
    specification = importlib.util.spec_from_file_location("measure_gpu", ROOT / "docs" / "measure_gpu.py")
    module = importlib.util.module_from_spec(specification)
    specification.loader.exec_module(module)
    return module


@pytest.fixture
def words(tmp_path, monkeypatch):
    """Tiny models, one prompt, and a page of the test's own."""
    monkeypatch.setenv("HF_FALCON_CACHE", str(tmp_path / "cache"))
    monkeypatch.setitem(SHAPES, "1b", SHAPE)
    target = tiny_target("llama")
    target.save_pretrained(tmp_path / "target")
    tiny_tokenizer().save_pretrained(tmp_path / "target")
    tiny_drafter(target, block_size=1, num_lstm_layers=0).save_pretrained(tmp_path / "drafter")
    (tmp_path / "prompts.jsonl").write_text('{"turns": ["abcdefgh"]}\n')
    shutil.copy(ROOT / "docs" / "gpu.md", tmp_path / "gpu.md")
    given = {"output": "runs", "target": "target", "drafter": "drafter", "data": "prompts.jsonl", "page": "gpu.md"}
    found = [word for name, value in given.items() for word in (f"--{name}", str(tmp_path / value))]
    return [*found, "--limit", "1", "--max_new_tokens", "16", "--scaled", "1b"]


@pytest.fixture(autouse=True)
def quick(script, monkeypatch):
    """Without a second run of pytest, and without compiling: other tests compile."""
    given = subprocess.CompletedProcess([], 0, "....\n== 7 passed, 9 deselected in 1.00s ==\n", "")
    monkeypatch.setattr(script.subprocess, "run", lambda *args, **kwargs: given)
    monkeypatch.setattr(script, "METHODS", "plain,prompt_lookup,falcon")
    monkeypatch.setattr(script, "SECONDS", 0.2)
    monkeypatch.setattr(script, "CONTEXT", 20)


TITLES = ["Tests", "Speed in bfloat16", "Speed in float32", "Time of a forward", "A network of 1b size"]


@pytest.mark.slow
def test_to_its_end(script, words, tmp_path, capsys):
    assert script.main([*words, "--device", "cpu"]) == 0
    page = (tmp_path / "gpu.md").read_text()
    before = (ROOT / "docs" / "gpu.md").read_text().partition(script.BEGIN)[0]
    assert page.startswith(before) and page.rstrip().endswith(script.END)
    assert [line[4:] for line in page.splitlines() if line.startswith("### ")] == TITLES
    assert "`pytest -m gpu`: 7 passed, 9 deselected in 1.00s." in page and "rehearsal without a GPU" in page
    assert page.count("| falcon | ") == 3 and page.count("% of a plain step's") == 3
    assert page.count("| draft nodes | 0 | 1 |") == 1 and "each further pass" in page
    assert "Not measured" not in page and "All is measured: see" in capsys.readouterr().out
    assert (tmp_path / "images" / "gpu.png").read_bytes()[:4] == b"\x89PNG"
    # Once more: nothing is left to run, and the page is the same.
    assert script.main([*words, "--device", "cpu"]) == 0
    assert "== " not in capsys.readouterr().out and (tmp_path / "gpu.md").read_text() == page


def test_a_piece_that_fails_is_run_again(script, words, tmp_path, monkeypatch, capsys):
    """After a failure, after an interruption, and where the time is over."""
    run = bench.main

    def failing(words):
        if "float32" in words:
            raise RuntimeError("CUDA out of memory")
        return run(words)

    def interrupted(words):
        raise KeyboardInterrupt

    arguments = [*words, "--device", "cpu", "--scaled", "none"]
    assert script.main([*arguments, "--minutes", "-1"]) == 2
    assert "Left: tests, bfloat16, float32, times. Run the same command" in capsys.readouterr().out
    monkeypatch.setattr(script.bench, "main", interrupted)
    with pytest.raises(KeyboardInterrupt):
        script.main(arguments)
    assert "== tests" in capsys.readouterr().out
    monkeypatch.setattr(script.bench, "main", failing)
    assert script.main(arguments) == 1
    printed = capsys.readouterr().out
    assert "== tests" not in printed and "== bfloat16" in printed and "All is measured but float32." in printed
    assert "Not measured: RuntimeError: CUDA out of memory." in (tmp_path / "gpu.md").read_text()
    monkeypatch.setattr(script.bench, "main", run)
    assert script.main(arguments) == 0
    printed = capsys.readouterr().out
    assert "== float32" in printed and "== bfloat16" not in printed and "== times" not in printed


@pytest.mark.slow
def test_on_the_simulated_device(script, words, tmp_path, monkeypatch):
    """The larger network is left out, whose weights are made on the device itself."""
    monkeypatch.setattr(PreTrainedModel, "to", lambda self, *args, **kwargs: simulated_device.move(self))
    with simulated_device.device():
        assert script.main([*words, "--device", "sim:0", "--scaled", "none"]) == 0
    page = (tmp_path / "gpu.md").read_text()
    assert "Not measured" not in page and "waits for the device 2 times" in page
    runs = json.loads((tmp_path / "runs" / "float32" / "report.json").read_text())["runs"]
    assert all(row["identical_prompts"] == row["num_prompts"] for row in runs)


def test_without_a_gpu_it_says_what_to_do(script):
    if torch.cuda.is_available():
        pytest.skip("there is a GPU")
    with pytest.raises(SystemExit, match="no CUDA device here.*make gpu GPU_ARGS"):
        script.main([])
