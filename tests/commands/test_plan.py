# Copyright 2026 The hf_falcon authors. Licensed under the Apache License, Version 2.0.
"""`hf-falcon train --plan`: what a run would take, against what it takes."""

import os
import re
import shutil

import pytest
import torch
from tiny_models import new_drafter, new_target, tiny_target
from torch.utils.flop_counter import FlopCounterMode
from training_runs import WEIGHTS, arguments, draft_batch, seeded, token_file, trainer

from hf_falcon import FalconDraftConfig, FalconDraftModel
from hf_falcon.commands import plan, train
from hf_falcon.training.csgd import (
    TrainingHeads,
    draft_loss,
)
from hf_falcon.training.features import kept_folder, record_features
from hf_falcon.training.token_file import TokenFile


def test_plan(workplace, tmp_path, capsys, monkeypatch):
    def no_weights(*args, **kwargs):
        raise AssertionError("weights are read")

    monkeypatch.setattr(train, "load_target", no_weights)
    options = {"plan": True, "draft_vocab_size": 20, "features_dir": tmp_path / "features", "save_steps": 2}
    output = tmp_path / "new" / "drafter"
    assert train.main(arguments(workplace, output, gradient_accumulation_steps=2, **options)) == 0
    rows = {line.split()[0]: line for line in capsys.readouterr().out.splitlines()}
    assert os.listdir(tmp_path) == []

    target, data = tiny_target(), TokenFile.load(workplace / "tokens.safetensors")
    drafter = FalconDraftModel(FalconDraftConfig.from_target(target, num_hidden_layers=1, draft_vocab_size=20))
    sizes = [sum(p.numel() for p in model.parameters()) for model in (target, drafter)]
    assert f"llama, {sizes[0]:,} parameters, float32, on cpu" in rows["target"]
    assert f" {sizes[1]:,} parameters: block size 2, 2 LSTM layers, 1 decoder layers, 20 tokens" in rows["drafter"]
    tokens = int(data.offsets[27])
    expected = f"27 samples of {tokens:,} tokens, {tokens - 27 * 4} of them of responses; 3 samples held out"
    assert expected in rows["data"]
    assert "3 of 8 samples (1 processes x 4 x 2 accumulated), 0.75 epochs" in rows["steps"]
    assert f"{round(0.75 * tokens):,} tokens" in rows["presented"]
    assert "2 checkpoints of " in rows["disk"] and "of features in" in rows["disk"]
    assert "estimated" in rows["memory"]


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"block_size": 0}, "`block_size` is 0"),
        ({"max_length": 4}, "raise it"),
        ({"metric_for_best_model": "estimated_tau"}, "`metric_for_best_model` is 'estimated_tau': choose one of"),
    ],
)
def test_a_plan_finds_mistakes(workplace, tmp_path, changes, message):
    with pytest.raises(ValueError, match=message):
        train.main(arguments(workplace, tmp_path, plan=True, **changes))


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"gradient_accumulation_steps": 3},
        {"dataloader_drop_last": True},
        {"dataloader_drop_last": True, "gradient_accumulation_steps": 2},
        {"save_strategy": "epoch"},
        {"max_steps": 5},
    ]
    + [{"save_steps": 0.3}, {"save_total_limit": 2}, {"save_total_limit": -1}],
)
def test_a_plan_counts_as_trainer_does(target, tmp_path, options):
    run = trainer(target, tmp_path, **{"max_steps": -1, "num_train_epochs": 1.5, "save_steps": 2, **options})
    per_epoch, steps = plan.training_steps(7, run.args)
    run.train()
    assert run.state.global_step == steps and run.state.epoch == pytest.approx(steps / per_epoch, abs=0.26)
    assert len(list(tmp_path.glob("checkpoint-*"))) == plan.checkpoints(steps, per_epoch, run.args)


@pytest.mark.parametrize("lstm_layers, layers, passes", [(0, 1, 1), (0, 2, 1), (2, 1, 1), (0, 1, 2)])
def test_planned_activations(lstm_layers, layers, passes):
    target = new_target(hidden_size=128, intermediate_size=340, num_attention_heads=4)
    changes = {"intermediate_size": 340, "num_lstm_layers": lstm_layers, "num_hidden_layers": layers}
    drafter = new_drafter(target, **changes).train()
    own = {p.untyped_storage()._cdata for model in (target, drafter) for p in model.parameters()}
    kept = {}

    def keep(tensor):
        storage = tensor.untyped_storage()
        if storage._cdata not in own:
            kept[storage._cdata] = storage.nbytes(), tensor
        return tensor

    lengths = (64, 64, 64)
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        batch = draft_batch(target, lengths, prompts=(1, 1, 1))
        result = draft_loss(drafter, TrainingHeads.of(drafter, target), batch, seeded(), WEIGHTS, passes=passes)
    planned = plan.activation_bytes(drafter.config, len(lengths), lengths[0], passes)
    assert result.loss.requires_grad and planned == pytest.approx(sum(size for size, _ in kept.values()), rel=0.15)


@pytest.mark.parametrize("block_size, passes", [(1, 1), (1, 3), (2, 1)])
def test_planned_work(workplace, tmp_path, capsys, block_size, passes):
    target = new_target(vocab_size=1024, hidden_size=128, intermediate_size=340, num_attention_heads=4)
    target.save_pretrained(tmp_path / "target")
    token_file(samples=4, lengths=(24, 25), prompt=8).save(tmp_path / "tokens.safetensors")
    options = {"block_size": block_size, "unroll_passes": passes, "num_lstm_layers": 0, "max_steps": 1, "plan": True}
    paths = {"data": tmp_path / "tokens.safetensors", "target": tmp_path / "target"}
    assert train.main(arguments(workplace, tmp_path, **paths, **options)) == 0
    row = next(line for line in capsys.readouterr().out.splitlines() if line.startswith("work"))
    work, share, hours = re.search(
        r"(\S+) floating-point operations, (\d+)% of .*: (\S+) hours at 100 TFLOP/s", row
    ).groups()
    assert float(hours) == pytest.approx(float(work) / 1e14 / 3600, rel=0.01)

    changes = {"block_size": block_size, "num_lstm_layers": 0, "num_hidden_layers": 1, "intermediate_size": 340}
    drafter = new_drafter(target, **changes).train()
    with FlopCounterMode(display=False) as counter:
        batch = draft_batch(target, lengths=(24,) * 4, prompts=(8,) * 4)
        read = counter.get_total_flops()
        head = TrainingHeads.of(drafter, target)
        draft_loss(drafter, head, batch, seeded(), WEIGHTS, glancing_ratio=0.4, passes=passes).loss.backward()
    assert float(work) == pytest.approx(counter.get_total_flops(), rel=0.1)
    assert int(share) == pytest.approx(100 * read / counter.get_total_flops(), rel=0.1)


def test_a_plan_reads_stored_features_once(workplace, tmp_path, capsys):
    shares = []
    data = tmp_path / "tokens.safetensors"
    shutil.copy(workplace / "tokens.safetensors", data)
    kept_folder(data).mkdir()
    record_features(kept_folder(data), {})
    for options in ({}, {"features_dir": tmp_path / "features"}, {"data": data}):
        train.main(arguments(workplace, tmp_path, plan=True, max_steps=100, **options))
        shares.append(int(re.search(r"(\d+)% of them the target's", capsys.readouterr().out)[1]))
    assert shares[1] < shares[0] / 5 and shares[2] == 0
