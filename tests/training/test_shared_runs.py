# Copyright 2026 The hf_falcon authors. Licensed under the Apache License, Version 2.0.
"""A training step in one and in several processes."""

import json
import subprocess
import sys

import pytest
import torch
import transformers
from training_runs import arguments, token_file

from hf_falcon import FalconDraftModel
from hf_falcon.commands import train

# How a step's eight samples are shared: processes, samples of a batch, accumulated batches.
SHARES = [(1, 8, 1), (1, 2, 4), (2, 4, 1), (2, 2, 2)]
LOSSES = {
    "glancing": {"block_size": 2, "glancing_ratio": 0.8},
    "unrolled": {"block_size": 1, "num_lstm_layers": 0, "unroll_passes": 2},
}
# transformers 5.17 loads the optimiser to a device "cpu:0", which torch knows nothing of.
CANNOT_RESUME = transformers.__version__.startswith("5.17.")
# Accelerate shards on accelerators only: with one more argument, the CPUs pass for some.
RUN_ALL = """
import json, sys
from accelerate.state import AcceleratorState, PartialState
from accelerate.utils import DistributedType
from hf_falcon.commands import train

plain = AcceleratorState.__init__

def pretend(self, *args, **kwargs):
    if not AcceleratorState._shared_state:
        PartialState(cpu=True)
        PartialState._shared_state["distributed_type"] = DistributedType.MULTI_GPU
    plain(self, *args, **kwargs)

if len(sys.argv) > 2:
    AcceleratorState.__init__ = pretend
for command in json.loads(sys.argv[1]):
    assert train.main(command) == 0
    assert (AcceleratorState().distributed_type == DistributedType.FSDP) == (len(sys.argv) > 2)
"""


@pytest.fixture(scope="module")
def shared_runs(workplace, tmp_path_factory):
    """The folder of the runs that learn the same from the same samples, in one and in two processes."""
    folder = tmp_path_factory.mktemp("shared")
    # Of 27 samples, three are left for the fourth step, and three more are held out: fewer than a process takes.
    token_file(samples=30, lengths=(6, 60)).save(folder / "tokens.safetensors")
    options = {"data": folder / "tokens.safetensors", "max_steps": 6, "logging_steps": 1, "feature_noise": 0.5}
    options |= {"eval_strategy": "steps", "eval_steps": 2, "learning_rate": 1e-2, "eval_samples": 3}
    options |= {"per_device_eval_batch_size": 2}
    commands = {1: [], 2: [], "fsdp": []}
    for name, changes in LOSSES.items():
        for processes, batch, accumulated in SHARES:
            sizes = {"per_device_train_batch_size": batch, "gradient_accumulation_steps": accumulated}
            output = folder / f"{name}-{processes}-{batch}-{accumulated}"
            commands[processes].append(arguments(workplace, output, **options, **changes, **sizes))
    for processes, batch in ((1, 8), (2, 4)):
        # The first process computes the features, and the others find them.
        sizes = {"per_device_train_batch_size": batch, "features_dir": folder / f"features-{processes}"}
        output = folder / f"stored-{processes}"
        commands[processes].append(arguments(workplace, output, **options, **LOSSES["unrolled"], **sizes))
    sizes = {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 2}
    output = folder / "unrolled-fsdp"
    commands["fsdp"].append([*arguments(workplace, output, **options, **LOSSES["unrolled"], **sizes), "--fsdp"])
    # They stop after each step, and go on.
    options |= {"max_minutes": 0, **LOSSES["glancing"], **sizes}
    if not CANNOT_RESUME:
        commands[2] += 6 * [arguments(workplace, folder / "pieces", **options)]
    commands["fsdp"] += 6 * [[*arguments(workplace, folder / "pieces-fsdp", **options), "--fsdp"]]
    for command in commands[1]:
        assert train.main(command) == 0
    script = folder / "run_all.py"
    script.write_text(RUN_ALL)
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2", script]
    for arguments_of_script in ([json.dumps(commands[2])], [json.dumps(commands["fsdp"]), "fsdp"]):
        subprocess.run([*launch, *arguments_of_script], check=True, timeout=600)
    return folder


@pytest.mark.slow
@pytest.mark.parametrize(
    "run",
    [f"{name}-{p}-{b}-{a}" for name in LOSSES for p, b, a in SHARES[1:]]
    + ["unrolled-fsdp", "stored-2", "pieces", "pieces-fsdp"],
)
def test_a_step_is_the_same_however_it_is_shared(shared_runs, run):
    if run == "pieces" and CANNOT_RESUME:
        pytest.skip("transformers cannot resume several processes on CPUs")
    alone = {"unrolled": "unrolled-1-8-1", "stored": "stored-1"}
    names = (alone.get(run.partition("-")[0], "glancing-1-8-1"), run)
    histories = []
    for name in names:
        state = json.loads((shared_runs / name / "trainer_state.json").read_text())
        rows = [row for row in state["log_history"] if "loss" in row or "eval_loss" in row]
        # Not the place in the epoch: a short step has fewer batches.
        clocks = ("epoch", "tokens_per_second", "eval_tokens_per_second")
        histories.append([{name: value for name, value in row.items() if name not in clocks} for row in rows])
    assert len(histories[0]) == len(histories[1]) == 6 + 3
    for expected, found in zip(*histories):
        assert found == pytest.approx(expected, abs=1e-4)
    provenance = [json.loads((shared_runs / name / "provenance.json").read_text()) for name in names]
    assert provenance[0]["tokens_seen"] == provenance[1]["tokens_seen"]
    expected, found = (FalconDraftModel.from_pretrained(shared_runs / name).state_dict() for name in names)
    for name, tensor in expected.items():
        torch.testing.assert_close(found[name], tensor, rtol=0, atol=1e-3, msg=name)
