# Copyright 2026 The hf_falcon authors. Licensed under the Apache License, Version 2.0.
"""The shell scripts that train and measure, on a tiny target."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from example_scripts import EXAMPLES, run_recorded

import hf_falcon
from hf_falcon.commands import main as entry


def test_benchmark(workplace, tmp_path, monkeypatch, capsys):
    names = [str(workplace / name) for name in ("prompts.jsonl", "target", "drafter")]
    commands, _ = run_recorded("benchmark.sh", names, tmp_path, OPTIONS="--max_new_tokens 8")
    monkeypatch.chdir(tmp_path)
    for command in commands:
        assert entry.main(command) == 0
    rows = re.findall(r"^(plain|prompt_lookup|falcon_static|falcon) ", capsys.readouterr().out, re.M)
    assert rows == ["plain", "prompt_lookup", "falcon_static", "falcon"]
    assert (tmp_path / "runs" / "benchmark" / "report.md").is_file() and len(commands) == 1


SMALL = ["--draft_vocab_size", "40", "--eval_samples", "2", "--bf16", "false", "--use_cpu", "--final_tau_prompts", "0"]
SMALL += ["--target_dtype", "float32", "--per_device_train_batch_size", "2"]


def test_train_a_drafter(workplace, tmp_path, monkeypatch, capsys):
    commands, _ = run_recorded("train_a_drafter.sh", ["out", str(workplace / "target")], tmp_path)
    assert [command[0] for command in commands] == ["prepare", "train", "evaluate"]
    commands[0][commands[0].index("sharegpt")] = str(workplace / "dialogues.jsonl")
    commands[0] += ["--max_new_tokens", "12", "--max_prompt_tokens", "64"]
    commands[1] += [*SMALL, "--max_steps", "3"]
    commands[2] += ["--max_new_tokens", "8", "--dtype", "float32"]
    monkeypatch.chdir(tmp_path)
    for command in commands:
        assert entry.main(command) == 0
    # Both outputs are plain decoding's.
    assert "2/2" in capsys.readouterr().out


@pytest.mark.slow
def test_train_on_gpu(workplace, tmp_path, monkeypatch):
    words = ["out", str(workplace / "tokens.safetensors")]
    options = " ".join([*SMALL, "--target", str(workplace / "target")])
    monkeypatch.chdir(tmp_path)
    for stage in ("first", "second"):
        commands, printed = run_recorded(
            "train_on_gpu.sh", words, tmp_path, FIRST_STEPS="2", SECOND_STEPS="2", OPTIONS=options, ONE_PIECE="1"
        )
        assert printed == f"A piece of out/{stage} is done: run the same command again.\n"
        (command,) = commands
        assert entry.main(command) == 0
    commands, printed = run_recorded("train_on_gpu.sh", words, tmp_path, FIRST_STEPS="2", SECOND_STEPS="2")
    assert commands == [] and printed == "The drafter is done: out/second\n"


@pytest.mark.slow
def test_train_peers(workplace, tmp_path, monkeypatch):
    words = ["out", str(workplace / "tokens.safetensors")]
    options = " ".join([*SMALL, "--target", str(workplace / "target"), "--max_steps", "2"])
    commands, _ = run_recorded("train_peers.sh", words, tmp_path, OPTIONS=options)
    monkeypatch.chdir(tmp_path)
    for command in commands:
        assert entry.main(command) == 0
    assert all((tmp_path / "out" / name / "model.safetensors").is_file() for name in ("eagle_like", "medusa_like"))


def test_train_on_many_gpus_in_one_process(workplace, tmp_path, monkeypatch):
    words = [str(tmp_path / "out"), str(workplace / "target"), str(workplace / "dialogues.jsonl")]
    commands, _ = run_recorded("train_on_many_gpus.sh", words, tmp_path, LAUNCH="hf-falcon")
    assert [command[:3] for command in commands] == [["-m", "hf_falcon", "prepare"], ["-m", "hf_falcon", "train"]]
    assert entry.main([*commands[0][2:], "--max_new_tokens", "12", "--max_prompt_tokens", "64"]) == 0
    assert entry.main([*commands[1][2:], *SMALL, "--max_steps", "2"]) == 0
    assert (tmp_path / "out" / "drafter" / "model.safetensors").is_file()


def test_accelerate_reads_the_configuration():
    from accelerate.commands.config.config_args import load_config_from_file

    found = load_config_from_file(str(EXAMPLES / "accelerate_8_gpus.yaml"))
    assert found.distributed_type == "MULTI_GPU" and found.num_processes == 8 and found.mixed_precision == "bf16"


@pytest.mark.slow
def test_train_on_many_gpus_in_two_processes(workplace, tmp_path):
    words = [str(tmp_path / "out"), str(workplace / "target"), str(workplace / "dialogues.jsonl")]
    path = os.pathsep.join((str(Path(sys.executable).parent), os.environ["PATH"]))
    environment = {"PATH": path, "PYTHONPATH": str(Path(hf_falcon.__file__).parents[1])}
    environment |= {
        "LAUNCH": "torchrun --standalone --nproc_per_node 2",
        "PREPARE_OPTIONS": "--max_new_tokens 12 --max_prompt_tokens 64",
    }
    environment["TRAIN_OPTIONS"] = " ".join([*SMALL, "--max_steps", "2"])
    subprocess.run(
        ["bash", EXAMPLES / "train_on_many_gpus.sh", *words],
        env={**os.environ, **environment},
        check=True,
        timeout=600,
    )
    state = json.loads((tmp_path / "out" / "drafter" / "trainer_state.json").read_text())
    assert state["global_step"] == 2
    hf_falcon.FalconDraftModel.from_pretrained(tmp_path / "out" / "drafter")
