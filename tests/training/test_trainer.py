# Copyright 2026 The hf_falcon authors. Licensed under the Apache License, Version 2.0.
"""The trainer: a run that stops and resumes as if it had not, its checkpoints, its evaluation."""

import hashlib
import json
import logging
import math
import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest
import torch
from quick import quick
from safetensors import safe_open
from safetensors.torch import load_file
from tiny_models import new_target, random_tokens, tiny_target
from training_runs import logged, token_file, trainer
from transformers import TrainerCallback, TrainerState, modeling_utils
from transformers.trainer_utils import get_last_checkpoint

from hf_falcon import FalconDraftModel
from hf_falcon.checkpoint_files import weights_fingerprint
from hf_falcon.training.csgd import (
    draft_loss,
)
from hf_falcon.training.features import target_features
from hf_falcon.training.provenance import git_revision, refuse_other_run
from hf_falcon.training.trainer import FalconTrainingArguments, _DraftProgress, collate


class Interrupt(TrainerCallback):
    """A user's Ctrl-C, right after a checkpoint was written."""

    def __init__(self, step):
        self.step = step

    def on_save(self, args, state, control, **kwargs):
        if state.global_step == self.step:
            raise KeyboardInterrupt


@pytest.fixture(scope="module")
def unbroken(target, tmp_path_factory):
    folder = tmp_path_factory.mktemp("unbroken")
    run = trainer(target, folder)
    run.train()
    return folder, run


# Of 4 steps an epoch: within one, and between two.
@pytest.mark.parametrize("stop", quick([3, 8], [3, 4, 6, 8]))
def test_a_resumed_run_is_as_if_it_had_not_stopped(target, unbroken, tmp_path, stop):
    first = trainer(target, tmp_path, Interrupt(stop))
    with pytest.raises(KeyboardInterrupt):
        first.train()
    second = trainer(target, tmp_path)
    torch.manual_seed(99)
    second.train(resume_from_checkpoint=str(tmp_path / f"checkpoint-{stop}"))
    assert second.state.global_step == 10 and len(logged(second)) == 10
    for found, expected in zip(logged(second), logged(unbroken[1])):
        assert found == pytest.approx(expected, abs=1e-6)
    for name, tensor in unbroken[1]._drafter.state_dict().items():
        torch.testing.assert_close(second._drafter.state_dict()[name], tensor, rtol=0, atol=1e-6, msg=name)


@pytest.mark.parametrize("muon", [False, True])
def test_a_resumed_run_has_its_own_learning_rate(target, tmp_path, muon):
    options = {"muon": muon, "max_steps": 4, "save_steps": 2}
    with pytest.raises(KeyboardInterrupt):
        trainer(target, tmp_path, Interrupt(2), **options).train()
    found = []

    class Looks(TrainerCallback):
        def on_step_begin(self, args, state, control, optimizer, **kwargs):
            found.extend((state.global_step, group["lr"]) for group in optimizer.param_groups)

    run = trainer(target, tmp_path, Looks(), learning_rate=1e-4, **options)
    run.train(resume_from_checkpoint=True)
    assert {step for step, _ in found} == {2, 3}
    for step, rate in found:
        assert rate == pytest.approx(1e-4 * (1 + math.cos(math.pi * (step - 2) / 2)) / 2)


def test_a_run_whose_learning_rate_goes_by_the_loss_resumes(target, tmp_path):
    options = {"lr_scheduler_type": "reduce_lr_on_plateau", "metric_for_best_model": "loss"}
    options |= {"eval_strategy": "steps", "eval_steps": 1, "max_steps": 2}
    with pytest.raises(KeyboardInterrupt):
        trainer(target, tmp_path, Interrupt(1), **options).train()
    run = trainer(target, tmp_path, **options)
    run.train(resume_from_checkpoint=True)
    assert run.state.global_step == 2


def test_a_run_with_gradient_accumulation_resumes(target, tmp_path):
    options = {"gradient_accumulation_steps": 3, "max_steps": 4}
    whole_run = trainer(target, tmp_path / "whole", **options)
    whole_run.train()
    with pytest.raises(KeyboardInterrupt):
        trainer(target, tmp_path, Interrupt(2), **options).train()
    second = trainer(target, tmp_path, **options)
    second.train(resume_from_checkpoint=True)
    assert logged(second) == logged(whole_run)
    for name, tensor in whole_run._drafter.state_dict().items():
        torch.testing.assert_close(second._drafter.state_dict()[name], tensor, rtol=0, atol=1e-6, msg=name)


def test_what_a_run_logs(unbroken):
    _, run = unbroken
    losses = [row["loss"] for row in logged(run)]
    assert len(losses) == 10 and sum(losses[-3:]) < 0.9 * sum(losses[:3])
    weights = run.args
    for row in logged(run):
        parts = weights.regression_weight * row["regression"] + weights.distillation_weight * row["distillation"]
        assert row["loss"] == pytest.approx(parts, abs=2e-4)
        for depth in (1, 2):
            assert 0 <= row[f"top1_depth{depth}"] <= row[f"top3_depth{depth}"] <= row[f"top8_depth{depth}"] <= 1


def test_norms_do_not_decay(target, tmp_path):
    run = trainer(target, tmp_path, changes={"feature_layers": [0, 1]}, weight_decay=0.1)
    decayed, others = (group["params"] for group in run.create_optimizer().param_groups)
    assert len(decayed) + len(others) == len(list(run._drafter.parameters()))
    assert {each.ndim for each in decayed} == {2} and {each.ndim for each in others} == {1}


def test_glancing_falls_to_zero(target, tmp_path, monkeypatch):
    ratios = []

    def recorded(*args, glancing_ratio, **kwargs):
        ratios.append(glancing_ratio)
        return draft_loss(*args, glancing_ratio=glancing_ratio, **kwargs)

    monkeypatch.setattr("hf_falcon.training.trainer.draft_loss", recorded)
    run = trainer(target, tmp_path, max_steps=4, save_strategy="no", glancing_ratio=0.8)
    run.train()
    assert ratios == pytest.approx([0.8, 0.6, 0.4, 0.2])
    run.evaluate()
    assert ratios[4:] == [0.0]


def test_a_checkpoint_is_a_drafter(unbroken, target):
    folder, run = unbroken
    checkpoint = folder / "checkpoint-10"
    loaded = FalconDraftModel.from_pretrained(checkpoint)
    for name, tensor in run._drafter.state_dict().items():
        assert torch.equal(loaded.state_dict()[name], tensor)
    assert not {"training_args.bin", "pytorch_model.bin"} & set(os.listdir(checkpoint))
    with safe_open(checkpoint / "model.safetensors", framework="pt") as file:
        assert set(file.keys()) == set(loaded.state_dict())
    prompt = random_tokens(1, 6)
    options = {"max_new_tokens": 8, "do_sample": False}
    assert torch.equal(target.generate(prompt, assistant_model=loaded, **options), target.generate(prompt, **options))


def test_training_leaves_the_target_alone(target, unbroken):
    for name, tensor in tiny_target().state_dict().items():
        assert torch.equal(target.state_dict()[name], tensor)


def test_the_time_limit_saves_and_stops(target, tmp_path):
    run = trainer(target, tmp_path, max_minutes=0.0, save_steps=100)
    run.train()
    assert run.state.global_step == 1
    assert os.listdir(tmp_path) == ["checkpoint-1"]


def break_weights(run, at):
    class Break(TrainerCallback):
        def on_step_end(self, args, state, control, **kwargs):
            if state.global_step == at:
                with torch.no_grad():
                    run._drafter.norm.weight.fill_(float("nan"))

    run.add_callback(Break())


def test_a_loss_that_is_no_number(target, tmp_path):
    run = trainer(target, tmp_path, save_strategy="no")
    break_weights(run, at=2)
    kept = tmp_path / "nan_batch_step_2.safetensors"
    message = f"The loss is nan at step 2: lower `learning_rate` .0.01. .*{re.escape(str(kept))}"
    with pytest.raises(FloatingPointError, match=message):
        run.train()
    # The batch of the third step, as far as it can be told from the data.
    batch = load_file(kept)
    order = list(run._get_train_sampler())[4:6]
    expected = collate([run.train_dataset[index] for index in order])
    assert set(batch) == {"features", "token_ids", "valid", "response", "sample"}
    for name, tensor in expected.items():
        assert torch.equal(batch[name], tensor), name
    features = target_features(target, expected["token_ids"], expected["valid"])
    torch.testing.assert_close(batch["features"], features)


def test_broken_weights_are_not_saved(target, tmp_path):
    run = trainer(target, tmp_path)
    break_weights(run, at=3)
    with pytest.raises(FloatingPointError, match="weights that are not finite at step 3.*resume from the last check"):
        run.train()
    assert sorted(os.listdir(tmp_path)) == ["checkpoint-1", "checkpoint-2", "nan_batch_step_3.safetensors"]


class Died(BaseException):
    """Stands for `kill -9`: nothing runs after it."""


def die_at(monkeypatch, event):
    """Dies in the middle of the n-th of all the calls that change something on the disk."""
    events = []

    def dying(call, half):
        def wrapped(*args, **kwargs):
            events.append(call)
            if len(events) == event:
                half(*args, **kwargs)
                raise Died
            return call(*args, **kwargs)

        return wrapped

    def half_save(content, path, *args, **kwargs):
        Path(path).write_bytes(b"half")

    def half_removed(folder, *args, **kwargs):
        for file in sorted(Path(folder).rglob("*.*"))[::2]:
            file.unlink()

    def nothing(*args, **kwargs):
        pass

    monkeypatch.setattr(torch, "save", dying(torch.save, half_save))
    monkeypatch.setattr(modeling_utils, "safe_save_file", dying(modeling_utils.safe_save_file, half_save))
    monkeypatch.setattr(TrainerState, "save_to_json", dying(TrainerState.save_to_json, half_save))
    monkeypatch.setattr(shutil, "rmtree", dying(shutil.rmtree, half_removed))
    for name in ("rename", "replace"):
        monkeypatch.setattr(os, name, dying(getattr(os, name), nothing))
    return events


@pytest.mark.parametrize("stride", [20, pytest.param(1, marks=pytest.mark.slow)])
def test_a_run_that_dies_while_it_saves(target, unbroken, tmp_path, monkeypatch, stride):
    complete = sorted(os.listdir(unbroken[0] / "checkpoint-10"))
    deaths, last = 0, 0
    while True:
        run = trainer(target, tmp_path, save_total_limit=2)
        last_checkpoint = get_last_checkpoint(tmp_path)
        with monkeypatch.context() as patched:
            # Each time a little later in the save of a checkpoint, in the end in one after it.
            die_at(patched, stride * deaths + 1)
            try:
                run.train(resume_from_checkpoint=last_checkpoint)
                break
            except Died:
                deaths += 1
        found = sorted(int(path.name.split("-")[1]) for path in tmp_path.glob("checkpoint-*"))
        # What is there is complete, and what was there before is not lost.
        assert max(found, default=0) >= last and len(found) >= min(last, 2)
        last = max(found, default=0)
        for step in found:
            folder = tmp_path / f"checkpoint-{step}"
            assert sorted(os.listdir(folder)) == complete
            assert json.loads((folder / "trainer_state.json").read_text())["global_step"] == step
            FalconDraftModel.from_pretrained(folder)
    assert deaths > 5 and sorted(os.listdir(tmp_path)) == ["checkpoint-10", "checkpoint-9"]
    assert logged(run) == logged(unbroken[1])
    for name, tensor in unbroken[1]._drafter.state_dict().items():
        torch.testing.assert_close(run._drafter.state_dict()[name], tensor, rtol=0, atol=1e-6, msg=name)


def test_the_best_checkpoint_is_kept_and_loaded(target, tmp_path):
    options = {"eval_strategy": "steps", "eval_steps": 1, "load_best_model_at_end": True, "save_total_limit": 1}
    options |= {"metric_for_best_model": "regression", "greater_is_better": False}
    run = trainer(target, tmp_path, max_steps=4, **options)
    # The first is the best, whatever is learnt.
    values = iter([0.0, 1.0, 1.0, 1.0])
    take = run.evaluate
    run.evaluate = lambda *args, **kwargs: {**take(*args, **kwargs), "eval_regression": next(values)}
    run.train()
    assert sorted(os.listdir(tmp_path)) == ["checkpoint-1", "checkpoint-4"]
    state = json.loads((tmp_path / "checkpoint-4" / "trainer_state.json").read_text())
    assert state["best_model_checkpoint"] == run.state.best_model_checkpoint == str(tmp_path / "checkpoint-1")
    best = FalconDraftModel.from_pretrained(tmp_path / "checkpoint-1")
    for name, tensor in best.state_dict().items():
        assert torch.equal(run._drafter.state_dict()[name], tensor)


@pytest.mark.parametrize("way", ["moved", "named otherwise"])
def test_the_best_checkpoint_of_a_folder_that_has_moved(target, tmp_path, monkeypatch, way):
    options = {"eval_strategy": "steps", "eval_steps": 1, "load_best_model_at_end": True, "save_total_limit": 1}
    options |= {"metric_for_best_model": "regression", "greater_is_better": False, "max_steps": 4}
    monkeypatch.chdir(tmp_path)
    values = iter([0.0, 1.0, 1.0, 1.0])

    def run_in(folder, *callback):
        run = trainer(target, folder, *callback, **options)
        take = run.evaluate
        run.evaluate = lambda *args, **kwargs: {**take(*args, **kwargs), "eval_regression": next(values)}
        return run

    with pytest.raises(KeyboardInterrupt):
        run_in("one", Interrupt(2)).train()
    second = tmp_path / "one"
    if way == "moved":
        second = (tmp_path / "one").rename(tmp_path / "two")
    run = run_in(second)
    run.train(resume_from_checkpoint=str(second / "checkpoint-2"))
    assert sorted(os.listdir(second)) == ["checkpoint-1", "checkpoint-4"]
    best = FalconDraftModel.from_pretrained(second / "checkpoint-1")
    for name, tensor in best.state_dict().items():
        assert torch.equal(run._drafter.state_dict()[name], tensor)


def test_a_finished_run_of_whole_epochs_that_has_moved(target, tmp_path):
    options = {"eval_strategy": "steps", "eval_steps": 1, "load_best_model_at_end": True}
    options |= {"metric_for_best_model": "regression", "greater_is_better": False}
    options |= {"max_steps": -1, "num_train_epochs": 1}
    first = trainer(target, tmp_path / "one", **options)
    values, take = iter([0.0, 1.0, 1.0, 1.0]), first.evaluate
    first.evaluate = lambda *args, **kwargs: {**take(*args, **kwargs), "eval_regression": next(values)}
    first.train()
    folder = (tmp_path / "one").rename(tmp_path / "two")
    second = trainer(target, folder, **options)
    second.train(resume_from_checkpoint=str(folder / "checkpoint-4"))
    best = FalconDraftModel.from_pretrained(folder / "checkpoint-1")
    for run in (first, second):
        assert run.state.global_step == 4
        for name, tensor in best.state_dict().items():
            assert torch.equal(run._drafter.state_dict()[name], tensor)


def test_a_run_is_not_continued_with_other_data_or_for_another_target(target, tmp_path):
    trainer(target, tmp_path, max_steps=2).train()
    other = new_target("llama", initializer_range=0.1)
    for name, run in (
        ("data", trainer(target, tmp_path, max_steps=3, train_file=token_file(seed=6))),
        ("target", trainer(other, tmp_path, max_steps=2)),
    ):
        with pytest.raises(ValueError, match=f"`{name}` is not what the run of .* has: repeat its first command"):
            run.train(resume_from_checkpoint=True)
    # Other arguments are the user's affair.
    run = trainer(target, tmp_path, max_steps=3, learning_rate=1e-3)
    run.train(resume_from_checkpoint=True)
    assert run.state.global_step == 3


@pytest.mark.parametrize(
    "name, before, now",
    [
        ("muon", True, False),
        ("muon", False, True),
        ("optim", "adamw_torch", "sgd"),
        ("weight_decay", 0.0, 0.1),
        ("lr_scheduler_type", "reduce_lr_on_plateau", "linear"),
        ("lr_scheduler_type", "linear", "reduce_lr_on_plateau"),
    ],
)
def test_a_run_is_not_continued_with_another_optimizer(target, tmp_path, name, before, now):
    options = {"eval_strategy": "steps", "eval_steps": 5, "max_steps": 2, "max_minutes": 0.0}
    trainer(target, tmp_path, **options, **{name: before}).train()
    checkpoint = str(tmp_path / "checkpoint-1")
    message = f"`{name}` is {now!r}, and was {before!r} in the run of {checkpoint!r}: give that to continue it"
    with pytest.raises(ValueError, match=re.escape(message)):
        trainer(target, tmp_path, **options, **{name: now}).train(resume_from_checkpoint=True)


def test_a_run_is_continued_with_as_many_samples_a_step(target, tmp_path):
    trainer(target, tmp_path, max_steps=3, max_minutes=0.0).train()
    message = (
        "A step has 4 samples (of a batch, times `gradient_accumulation_steps`, times processes), and had 2 in the "
        f"run of {str(tmp_path / 'checkpoint-1')!r}: give as many to continue it, or start another run"
    )
    for name, value in {"per_device_train_batch_size": 4, "gradient_accumulation_steps": 2}.items():
        with pytest.raises(ValueError, match=re.escape(message)):
            trainer(target, tmp_path, max_steps=3, **{name: value}).train(resume_from_checkpoint=True)
    options = {"per_device_train_batch_size": 1, "gradient_accumulation_steps": 2, "max_minutes": 0.0}
    run = trainer(target, tmp_path, max_steps=3, **options)
    run.train(resume_from_checkpoint=True)
    assert run.state.global_step == 2
    # Earlier versions did not note it.
    record = tmp_path / "checkpoint-2" / "provenance.json"
    noted = json.loads(record.read_text())
    assert noted.pop("samples_per_step") == 2
    record.write_text(json.dumps(noted))
    run = trainer(target, tmp_path, max_steps=3, per_device_train_batch_size=4)
    run.train(resume_from_checkpoint=True)
    assert run.state.global_step == 3


def test_a_run_without_its_optimizer_is_not_continued(target, tmp_path):
    options = {"save_only_model": True, "max_steps": 2}
    trainer(target, tmp_path, max_minutes=0.0, **options).train()
    message = f"{str(tmp_path / 'checkpoint-1')!r} has no optimizer and no schedule, as `save_only_model` leaves them"
    with pytest.raises(ValueError, match=re.escape(message)):
        trainer(target, tmp_path, **options).train(resume_from_checkpoint=True)
    shutil.rmtree(tmp_path / "checkpoint-1")
    trainer(target, tmp_path, **options).train()
    # What is finished needs none.
    run = trainer(target, tmp_path, **options)
    run.train(resume_from_checkpoint=True)
    assert run.state.global_step == 2


def test_a_run_is_continued_with_another_schedule_by_the_step(target, tmp_path):
    trainer(target, tmp_path, max_steps=2, lr_scheduler_type="constant", max_minutes=0.0).train()
    run = trainer(target, tmp_path, max_steps=2, lr_scheduler_type="linear")
    run.train(resume_from_checkpoint=True)
    assert run.state.global_step == 2


@pytest.mark.parametrize("name, share", [("model.safetensors", 0.5), ("trainer_state.json", 0.0)])
def test_a_damaged_checkpoint_is_named(target, unbroken, tmp_path, name, share):
    shutil.copytree(unbroken[0] / "checkpoint-4", tmp_path / "checkpoint-4")
    file = tmp_path / "checkpoint-4" / name
    content = file.read_bytes()
    file.write_bytes(content[: int(share * len(content))])
    with pytest.raises(ValueError, match=f"`{re.escape(str(file))}` cannot be read .*: delete this checkpoint"):
        trainer(target, tmp_path).train(resume_from_checkpoint=True)


@pytest.mark.parametrize("content, remedy", [("", "write it again"), ("[]", "holds a list, not an object: delete it")])
def test_a_damaged_record_of_a_run_is_named(tmp_path, content, remedy):
    (tmp_path / "provenance.json").write_text(content)
    with pytest.raises(ValueError, match=f"provenance.json.*{remedy}"):
        refuse_other_run(tmp_path, {})


def test_a_trainer_uses_one_gpu(target, tmp_path):
    """Several are for several processes: transformers would split our batches, which it cannot."""
    args = trainer(target, tmp_path).args
    args._n_gpu = 2
    assert args.n_gpu == 1


def test_the_seed_of_the_data(target, tmp_path):
    def order(**seeds):
        return list(trainer(target, tmp_path, **seeds)._get_train_sampler())

    assert order(seed=1) == order(seed=2, data_seed=1) != order(seed=2)


def test_a_state_that_is_not_written_whole(target, tmp_path, monkeypatch):
    run = trainer(target, tmp_path)
    run.save_state()
    before = (tmp_path / "trainer_state.json").read_text()
    monkeypatch.setattr(os, "replace", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
    run.state.global_step = 7
    with pytest.raises(KeyboardInterrupt):
        run.save_state()
    assert (tmp_path / "trainer_state.json").read_text() == before


@pytest.mark.parametrize(
    "name, value",
    [
        ("feature_noise", -0.1),
        ("soft_label_share", 2.0),
        ("glancing_ratio", 1.5),
        ("regression_weight", float("nan")),
        ("distillation_weight", float("inf")),
        ("max_minutes", -1.0),
        ("max_minutes", float("nan")),
        ("learning_rate", float("nan")),
        ("gradient_accumulation_steps", 0),
        ("per_device_train_batch_size", 0),
        ("per_device_eval_batch_size", 0),
        ("unroll_passes", 0),
        ("eval_passes", 0),
    ],
)
def test_numbers_out_of_range(tmp_path, name, value):
    with pytest.raises(ValueError, match=f"`{name}` is {value}: give "):
        FalconTrainingArguments(output_dir=str(tmp_path), use_cpu=True, **{name: value})


@pytest.mark.parametrize(
    "name, value, part",
    [
        ("push_to_hub", True, "hf-falcon push"),
        ("label_smoothing_factor", 0.1, "no such term"),
        ("neftune_noise_alpha", 5.0, "no such term"),
    ],
)
def test_what_trainer_could_not_do(tmp_path, name, value, part):
    with pytest.raises(ValueError, match=f"`{name}` is {value}.*{part}"):
        FalconTrainingArguments(output_dir=str(tmp_path), use_cpu=True, **{name: value})


def test_held_out_samples_are_never_dropped(target, tmp_path):
    run = trainer(target, tmp_path, dataloader_drop_last=True, per_device_eval_batch_size=16)
    found = run.evaluate()
    assert found["eval_loss"] > 0 and len(run.get_eval_dataloader()) == 1


def test_sums_of_a_run_that_logs_nothing(target, tmp_path):
    """They hold no graph, and do not grow."""
    run = trainer(target, tmp_path, max_steps=4, logging_strategy="no", save_strategy="no")
    run.train()
    assert len(run._sums._sums) == 3 and not any(each.requires_grad for each in run._sums._sums)


def test_the_time_limit_saves_also_where_only_the_best_is_saved(target, tmp_path):
    options = {"eval_strategy": "steps", "eval_steps": 1, "save_strategy": "best", "metric_for_best_model": "loss"}
    run = trainer(target, tmp_path, max_minutes=0.0, **options)
    # No evaluation is the best.
    take = run.evaluate
    run.evaluate = lambda *args, **kwargs: {**take(*args, **kwargs), "eval_loss": math.inf}
    run.train()
    assert get_last_checkpoint(tmp_path) is not None


def test_evaluation(target, tmp_path):
    run = trainer(target, tmp_path, save_strategy="no")
    first, second = run.evaluate(), run.evaluate()
    clock = "eval_tokens_per_second"
    assert {n: v for n, v in first.items() if n != clock} == {n: v for n, v in second.items() if n != clock}
    assert {"eval_regression", "eval_distillation", "eval_top1_depth1", "eval_top8_depth2"} <= set(first)
    run.train()
    last = run.evaluate()
    assert last["eval_loss"] < 0.8 * first["eval_loss"]
    # Two depths: the second counts only after the first.
    top1 = last["eval_top1_depth1"], last["eval_top1_depth2"]
    assert last["eval_estimated_tau_chain"] == pytest.approx(top1[0] + top1[0] * top1[1], abs=1e-4)
    assert last["eval_estimated_tau_chain"] <= last["eval_estimated_tau_tree"] <= 2


@pytest.mark.parametrize("name", ["regression", "eval_distillation"])
def test_the_best_checkpoint_has_the_least_loss(tmp_path, name):
    options = {"output_dir": str(tmp_path), "use_cpu": True}
    assert FalconTrainingArguments(metric_for_best_model=name, **options).greater_is_better is False
    assert FalconTrainingArguments(metric_for_best_model=name, greater_is_better=True, **options).greater_is_better
    assert FalconTrainingArguments(metric_for_best_model="estimated_tau_tree", **options).greater_is_better


def test_a_metric_that_no_evaluation_has(target, tmp_path):
    """The error names all that one has."""
    measured = set(trainer(target, tmp_path).evaluate()) - {"epoch"}
    with pytest.raises(ValueError, match="^`metric_for_best_model` is 'eval_estimated_tau': choose one of ") as error:
        trainer(target, tmp_path, metric_for_best_model="eval_estimated_tau")
    named = str(error.value).partition("choose one of ")[2].removesuffix(".").split(", ")
    assert {f"eval_{name}" for name in named} == measured
    for name in measured:
        trainer(target, tmp_path, metric_for_best_model=name)


def test_evaluation_of_more_passes_than_are_trained(target, tmp_path):
    run = trainer(
        target,
        tmp_path,
        changes={"num_lstm_layers": 0},
        save_strategy="no",
        max_steps=2,
        unroll_passes=2,
        eval_passes=3,
    )
    run.train()
    assert "top8_depth4" in logged(run)[0] and "top1_depth5" not in logged(run)[0]
    metrics = run.evaluate()
    assert "eval_top8_depth6" in metrics and "eval_top1_depth7" not in metrics
    with pytest.raises(ValueError, match="`eval_passes` is 2 and `num_lstm_layers` 1.*Set `eval_passes=1`"):
        trainer(target, tmp_path, eval_passes=2)


def test_evaluation_does_not_disturb_training(target, unbroken, tmp_path):
    run = trainer(target, tmp_path, save_strategy="no", eval_strategy="steps", eval_steps=2)
    run.train()
    assert logged(run) == logged(unbroken[1])
    assert sum("eval_loss" in logs for logs in run.state.log_history) == 5


@pytest.mark.parametrize("lstm_layers", [0, 1])
def test_mixed_precision(target, tmp_path, lstm_layers):
    if lstm_layers and not torch.ops.mkldnn._is_mkldnn_bf16_supported():
        pytest.skip("torch has no LSTM in bfloat16 autocast on this processor")
    runs = [
        trainer(target, tmp_path, save_strategy="no", bf16=bf16, changes={"num_lstm_layers": lstm_layers})
        for bf16 in (True, False)
    ]
    for run in runs:
        run.train()
        assert run._drafter.dtype == torch.float32
    losses, expected = ([logs["loss"] for logs in logged(run)] for run in runs)
    assert losses == pytest.approx(expected, rel=0.1) and losses != expected


@pytest.mark.parametrize("quiet", [True, False])
def test_the_progress_bar_can_be_turned_off(target, tmp_path, capfd, quiet):
    trainer(target, tmp_path, max_steps=2, save_strategy="no", disable_tqdm=quiet).train()
    captured = capfd.readouterr()
    assert ("d1=" in captured.err) == (not quiet) and ("regression" in captured.out) == quiet


def test_the_progress_bar_of_a_resumed_run_begins_where_it_stopped(target, unbroken, tmp_path):
    shutil.copytree(unbroken[0] / "checkpoint-4", tmp_path / "checkpoint-4")
    run = trainer(target, tmp_path, max_steps=6, save_strategy="no", disable_tqdm=False)
    [progress] = [each for each in run.callback_handler.callbacks if isinstance(each, _DraftProgress)]
    seen = []

    class Looks(TrainerCallback):
        def on_step_begin(self, args, state, control, **kwargs):
            bar = progress.training_bar
            seen.append((bar.initial, bar.n, bar.last_print_n))

    run.add_callback(Looks())
    run.train(resume_from_checkpoint=True)
    # What tqdm has shown last depends on the clock after the first step.
    assert seen[0] == (4, 4, 4) and [shown[:2] for shown in seen] == [(4, 4), (4, 5)]


def test_provenance(target, unbroken, tmp_path):
    folder, run = unbroken
    found = json.loads((folder / "checkpoint-10" / "provenance.json").read_text())
    assert set(found["versions"]) == {"python", "torch", "transformers", "hf_falcon"}
    assert found["target"] == {"name_or_path": target.name_or_path, "fingerprint": weights_fingerprint(target)}
    data = token_file()
    digest = hashlib.sha256(data.tokens.numpy().tobytes()).hexdigest()
    assert found["data"] == {"tokens_sha256": digest, "tokens": len(data.tokens), "samples": 7, "sources": []}
    assert found["arguments"]["learning_rate"] == 1e-2 and found["arguments"]["output_dir"] == str(folder)
    assert (found["seed"], found["steps"]) == (42, 10)
    # Two and a half epochs of seven samples, in batches of two: the tokens of the third epoch's first two batches.
    lengths = run.train_dataset.lengths
    sampler = run._get_train_sampler()
    sampler.set_epoch(2)
    assert found["tokens_seen"] == 2 * sum(lengths) + sum(lengths[i] for i in list(sampler)[:4])

    # A resumed run counts on; held-out samples do not count.
    shutil.copytree(folder / "checkpoint-4", tmp_path / "checkpoint-4")
    again = trainer(target, tmp_path, eval_strategy="steps", eval_steps=3)
    again.train(resume_from_checkpoint=True)
    again.save_model()
    assert json.loads((tmp_path / "provenance.json").read_text())["tokens_seen"] == found["tokens_seen"]


@pytest.mark.skipif(shutil.which("git") is None, reason="needs git")
def test_git_revision(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path.parent))
    assert git_revision() is None
    identity = ["-c", "user.name=nobody", "-c", "user.email=nobody@localhost"]
    for words in (["init", "-q"], [*identity, "commit", "-q", "--allow-empty", "-m", "first"]):
        subprocess.run(["git", *words], check=True)
    assert re.fullmatch("[0-9a-f]{40}", git_revision())
    (tmp_path / "file").touch()
    subprocess.run(["git", "add", "file"], check=True)
    assert re.fullmatch("[0-9a-f]{40}-dirty", git_revision())
    monkeypatch.setenv("PATH", "")
    assert git_revision() is None


def test_a_finished_run_is_left_as_it_is(target, tmp_path):
    options = {"eval_strategy": "steps", "eval_steps": 1, "load_best_model_at_end": True}
    options |= {"metric_for_best_model": "regression", "greater_is_better": False}
    runs = [trainer(target, tmp_path, max_steps=3, **options) for _ in range(2)]
    values, take = iter([0.0, 1.0, 1.0]), runs[0].evaluate
    runs[0].evaluate = lambda *args, **kwargs: {**take(*args, **kwargs), "eval_regression": next(values)}
    runs[0].train()
    # The first checkpoint is the best.
    runs[1].train(resume_from_checkpoint=str(tmp_path / "checkpoint-3"))
    best = FalconDraftModel.from_pretrained(tmp_path / "checkpoint-1")
    for run in runs:
        for name, tensor in best.state_dict().items():
            assert torch.equal(run._drafter.state_dict()[name], tensor)


def test_a_finished_run_that_is_repeated_keeps_its_arguments(target, tmp_path, caplog):
    trainer(target, tmp_path, max_steps=2).train()
    again = trainer(target, tmp_path, max_steps=2, learning_rate=1e-4)
    with caplog.at_level(logging.WARNING, logger="hf_falcon"):
        again.train(resume_from_checkpoint=True)
    assert "The run is complete since step 2: nothing is trained." in caplog.messages
    again.save_model()
    assert json.loads((tmp_path / "provenance.json").read_text())["arguments"]["learning_rate"] == 1e-2


def test_a_run_of_part_of_an_epoch_ends(target, tmp_path):
    options = {"max_steps": -1, "num_train_epochs": 1.5}
    run = trainer(target, tmp_path, **options)
    run.train()
    again = trainer(target, tmp_path, **options)
    again.train(resume_from_checkpoint=True)
    assert again.state.global_step == run.state.global_step == 6
