# Copyright 2026 The hf_falcon authors. Licensed under the Apache License, Version 2.0.
"""The example that counts the memory of targets and drafters, against the tensors of tiny ones."""

import argparse

import pytest
import torch
from example_scripts import example
from tiny_models import new_drafter, prompt, tiny_target

from hf_falcon.bench.memory import drafter_bytes, weight_bytes
from hf_falcon.commands import train
from hf_falcon.commands.train_arguments import DrafterArguments


@pytest.mark.parametrize("name", ["llama", "qwen2", "gemma3"])
def test_target_on_paper_is_the_target(name):
    """Also one with sliding windows, whose cache does not grow beyond them."""
    target = tiny_target(name)
    with torch.no_grad():
        cache = target(prompt(30), use_cache=True).past_key_values
    held = sum(layer.keys.nbytes + layer.values.nbytes for layer in cache.layers)
    assert example("memory_table").target_bytes(target.config, torch.float32, 30) == (weight_bytes(target), held)


@pytest.mark.parametrize("block_size", [1, 2])
def test_drafter_on_paper_is_the_drafter(block_size):
    script, target = example("memory_table"), tiny_target()
    drafter = new_drafter(target, num_lstm_layers=0, block_size=block_size, draft_vocab_size=30)
    drafter.generation_config.draft_tree = "static"
    grown = drafter_bytes(drafter, target, 600) - drafter_bytes(drafter, target, 300)
    assert grown == 300 * script.row_bytes(drafter.config, torch.float32)


@pytest.mark.parametrize(("name", "parameters"), [("7B, on paper", 6_738_415_616), ("70B, on paper", 70_553_706_496)])
def test_shapes_are_the_models(name, parameters):
    script = example("memory_table")
    shape, vocab_size = script.ON_PAPER[name]
    config = script.LlamaConfig(vocab_size=vocab_size, **vars(shape))
    weights, cache = script.target_bytes(config, torch.bfloat16, 10)
    assert weights == 2 * parameters
    assert cache == 10 * 2 * 2 * shape.num_hidden_layers * shape.num_key_value_heads * shape.head_dim
    # The drafter is what `hf-falcon train` makes.
    for size in (None, 16384):
        made = train._config(DrafterArguments(data=["tokens.safetensors"], draft_vocab_size=size), config)
        assert script.drafter_config(config, size).to_dict() == made.to_dict()


@pytest.mark.parametrize("draft_vocab_size", [None, 30])
def test_share_of_the_drafter(draft_vocab_size):
    """Weights, head, cache and tree: in hundredths of the target's weights."""
    script, target = example("memory_table"), tiny_target()
    drafter = new_drafter(target, num_lstm_layers=0, block_size=2, draft_vocab_size=draft_vocab_size)
    drafter.generation_config.draft_width = 3
    arguments = argparse.Namespace(dtype="float32", context=40, nodes=8, passes=4)
    # Two layers with keys and values of two heads of 8, in both models; a vocabulary of 64, a width of 32.
    row = 2 * 2 * 2 * 8 * 4
    head = 0 if draft_vocab_size is None else 30 * 32 * 4
    tree = 3 * 3 * 2 * row + 8 * row + 9 * 64 * 4
    added = weight_bytes(drafter) + head + 40 * row + tree
    assert script.sizes(arguments, target.config, drafter)[-1] == f"{100 * added / weight_bytes(target):.1f} %"


def table(workplace, monkeypatch, capsys, *more):
    """Runs the example with the tiny models and the first shape on paper; returns its rows."""
    words = ["--targets", workplace / "target", "--drafters", workplace / "drafter", "--dtype", "float32"]
    words += ["--context", "20", "--nodes", "4", "--passes", "2", "--max_new_tokens", "6", *more]
    monkeypatch.setattr("sys.argv", ["memory_table.py", *map(str, words)])
    script = example("memory_table")
    monkeypatch.setattr(script, "ON_PAPER", dict([next(iter(script.ON_PAPER.items()))]))
    script.main()
    printed = capsys.readouterr().out
    assert printed.startswith("MB, float32; 20 tokens of context, 4 nodes a tree\n\n| target | weights |")
    rows = [[cell.strip() for cell in row.strip("|").split("|")] for row in printed.splitlines()[2:]]
    assert len({len(row) for row in rows}) == 1 and len(rows) == 4
    return rows


def test_memory_table(workplace, monkeypatch, capsys):
    heading, _, tiny, paper = table(workplace, monkeypatch, capsys)
    assert len(heading) == 8 and all(cell for cell in tiny)
    assert paper[:2] == ["7B, on paper", f"{4 * 6738.415616:,.1f}"]


@pytest.mark.slow
def test_memory_of_decoding_is_measured(workplace, monkeypatch, capsys):
    heading, _, tiny, paper = table(workplace, monkeypatch, capsys, "--measure")
    assert heading[8:] == ["peak, plain", "peak, drafted"] and paper[8:] == ["", ""]
    # A process with torch in it.
    assert all(float(peak.replace(",", "")) > 50 for peak in tiny[8:])


def test_one_drafter_for_each_target(monkeypatch, capsys):
    monkeypatch.setattr("sys.argv", ["memory_table.py", "--targets", "a", "b", "--drafters", "c"])
    with pytest.raises(SystemExit):
        example("memory_table").main()
    assert "`--targets` has 2 and `--drafters` 1 names" in capsys.readouterr().err
