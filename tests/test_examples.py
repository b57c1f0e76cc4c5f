# Copyright 2026 The hf_falcon authors. Licensed under the Apache License, Version 2.0.
"""The example scripts, on a tiny target."""

import contextlib
import importlib.util
import io
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from tiny_models import VOCAB, prompt, tiny_target, tiny_tokenizer

from hf_falcon.commands import main as entry
from hf_falcon.training.token_file import TokenFile

EXAMPLES = Path(__file__).parents[1] / "examples"


def example(name):
    """An example script as a module."""
    spec = importlib.util.spec_from_file_location(name, EXAMPLES / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def workplace(tmp_path_factory):
    """A target with its tokenizer, a token file and prompts, in a folder."""
    folder = tmp_path_factory.mktemp("workplace")
    tiny_target("llama").save_pretrained(folder / "target")
    tiny_tokenizer().save_pretrained(folder / "target")
    samples = [prompt(12 + seed % 7, seed)[0] for seed in range(40)]
    TokenFile.from_samples(samples, [4] * 40, [0.0] * 40, VOCAB).save(folder / "tokens.safetensors")
    (folder / "prompts.jsonl").write_text('{"turns": ["Why?"]}\n')
    return folder


def test_compare_recipes(workplace, tmp_path, monkeypatch, capsys):
    script = example("compare_recipes")
    names = ["A: the same, distillation weight 1", script.STARTED, script.AVERAGED]
    monkeypatch.setattr(script, "RECIPES", {name: script.RECIPES[name] for name in names})
    small = "--draft_vocab_size 40 --eval_samples 4 --target_dtype float32 --learning_rate 1e-2 --use_cpu"
    monkeypatch.setattr(script, "TRAINING", f"{script.TRAINING} {small} --bf16 false")
    monkeypatch.setattr(script, "SPACING", 2)
    commands = []

    def run(*words):
        commands.append(words[0])
        with contextlib.redirect_stdout(io.StringIO()) as printed:
            assert entry.main(list(words)) == 0
        return printed.getvalue()

    monkeypatch.setattr(script, "run", run)
    words = ["--data", workplace / "tokens.safetensors", "--prompts", workplace / "prompts.jsonl", "--target"]
    words += [workplace / "target", "--output_dir", tmp_path, "--max_steps", "6", "--max_new_tokens", "8"]
    monkeypatch.setattr("sys.argv", ["compare_recipes.py", *map(str, words)])
    script.main()
    table = capsys.readouterr().out.splitlines()
    assert [line.split(" | ")[0] for line in table[2:]] == [f"| {name}" for name in names]
    assert commands.count("train") == 4 and commands.count("evaluate") == 6

    # Layers of the target, but the other weights of any new drafter.
    new, started = (load_file(tmp_path / "01" / name / "model.safetensors") for name in ("new", "started"))
    theirs = tiny_target("llama").get_decoder().layers.state_dict()
    for name, weights in started.items():
        layer = theirs.get(name.removeprefix("layers."))
        assert torch.equal(weights, new[name] if layer is None else layer), name
    assert len(theirs) == sum(name.startswith("layers.") for name in started)

    # The same training as that of A, and of its weights the average.
    assert torch.equal(*(load_file(tmp_path / n / "model.safetensors")["norm.weight"] for n in ("00", "02")))
    taken = [load_file(tmp_path / "02" / f"checkpoint-{step}" / "model.safetensors") for step in (2, 4, 6)]
    averaged = load_file(tmp_path / "02" / "averaged" / "model.safetensors")
    for name in ("norm.weight", "fusion.linear.weight"):
        first, second, last = (weights[name] for weights in taken)
        torch.testing.assert_close(averaged[name], 0.64 * first + 0.16 * second + 0.2 * last)
    assert torch.equal(averaged["draft_vocab_ids"], taken[0]["draft_vocab_ids"])

    # Nothing is done twice.
    commands.clear()
    script.main()
    assert capsys.readouterr().out.splitlines() == table and commands == []
