# Copyright 2026 The hf_falcon authors. Licensed under the Apache License, Version 2.0.
"""Arguments of a run from a YAML file and the command line."""

from pathlib import Path

import pytest

from hf_falcon.commands import main as entry
from hf_falcon.commands import prepare_arguments
from hf_falcon.commands.run_arguments import parse_run
from hf_falcon.commands.train import DrafterArguments
from hf_falcon.training.trainer import FalconTrainingArguments

FILE = """
data: [a.safetensors, b.safetensors]
block_size: 3
learning_rate: 1e-3     # a text for YAML 1.1
bf16: no
use_cpu: true
max_steps: 7
max_minutes:            # left at its default
output_dir: 2026
lr_scheduler_type: cosine_with_min_lr
lr_scheduler_kwargs: {min_lr: 0.1}
"""


def parse(*words):
    return parse_run(list(words), (DrafterArguments, FalconTrainingArguments), prog="train", description=None)


@pytest.fixture
def file(tmp_path):
    def write(text):
        path = tmp_path / "run.yaml"
        path.write_text(text)
        return str(path)

    return write


def test_a_file(file):
    options, args = parse("--config", file(FILE))
    assert options == DrafterArguments(data=["a.safetensors", "b.safetensors"], block_size=3)
    assert (args.learning_rate, args.bf16, args.max_steps, args.max_minutes) == (1e-3, False, 7, None)
    assert args.output_dir == "2026" and args.lr_scheduler_kwargs == {"min_lr": 0.1}
    # What neither gives keeps its default.
    assert args.adam_beta2 == 0.95 and args.num_train_epochs == 3.0


EXAMPLES = Path(__file__).parents[2] / "examples"


def test_the_papers_recipe():
    options, args = parse("--config", str(EXAMPLES / "paper.yaml"), "--data", "a", "--output_dir", "b")
    assert (options.block_size, options.num_lstm_layers, args.distillation_weight) == (2, 2, 0.1)


def test_the_example():
    options, args = parse("--config", str(EXAMPLES / "train_llama_8b.yaml"), "--unroll_passes", "3")
    assert (options.block_size, options.num_lstm_layers, options.data) == (1, 0, ["runs/llama/tokens.safetensors"])
    assert (args.unroll_passes, args.eval_passes, args.num_train_epochs, args.learning_rate) == (3, 3, 4, 1e-4)


@pytest.mark.parametrize(
    "text, complaint",
    [
        ("[" * 5000, "is nested too deeply"),
        ("data: [&a [x, x], *a]", r"`\*a` is an alias: write the value itself"),
        (f"seed: {'9' * 5000}", "is not YAML: Exceeds the limit"),
        ("seed: 2026-99-99", "is not YAML: month must be"),
        ("a: \x1b", "is not YAML: unacceptable character"),
        ("lr_scheduler_kwargs: {a: 2026-01-01}", "`lr_scheduler_kwargs` is .*: give texts and numbers"),
        ("seed: [" + "x, " * 10_000 + "]", r"`seed` is \['x', 'x', 'x', 'x', ...\]: give a single value"),
        ("#" * (1 << 16) + "\n", "has 65537 bytes, more than 65536"),
    ],
    ids=lambda value: value[:20],
)
def test_hostile_files(file, text, complaint):
    with pytest.raises(ValueError, match=f"run.yaml.*{complaint}") as error:
        parse("--config", file(text))
    assert len(str(error.value)) < 1000


def test_the_command_line_wins(file):
    path = file(FILE)
    for words in (("--config", path, "--data", "c"), ("--data", "c", f"--config={path}")):
        options, args = parse(*words, "--block_size", "1", "--max-steps", "-1", "--bf16")
        assert (options.data, options.block_size, args.max_steps, args.bf16) == (["c"], 1, -1, True)
        assert args.learning_rate == 1e-3


def test_a_flag_that_is_repeated_adds_up():
    words = "--data a --output b --exclude a --exclude b c --temperatures 0.5 --temperatures 0 1"
    found = prepare_arguments.parser().parse_args(words.split())
    assert found.exclude == ["a", "b", "c"] and parse("--data", "a", "--data", "b")[0].data == ["a", "b"]
    # A list that is not empty by default is replaced.
    assert found.temperatures == [0.0, 1.0]


@pytest.mark.parametrize("data", ["[a, b]", "a"])
def test_a_list_of_the_command_line_replaces_that_of_the_file(file, data):
    path = file(f"data: {data}\nfeature_layers: [1]")
    options, _ = parse("--config", path, "--data", "c", "--data=d", "--feature-layers", "2")
    assert (options.data, options.feature_layers) == (["c", "d"], [2])


def test_an_empty_list_of_the_file(file):
    assert parse("--config", file("data: [a]\nfeature_layers: []"))[0].feature_layers == []
    with pytest.raises(ValueError, match="--data: expected at least one argument"):
        parse("--config", file("data: []"))


def test_without_a_file():
    options, args = parse("--data", "a", "b", "--use_cpu")
    assert options == DrafterArguments(data=["a", "b"]) and args.learning_rate == 3e-5


@pytest.mark.parametrize(
    "text, message",
    [
        ("blocksize: 3", "unknown key `blocksize`: did you mean `block_size`?"),
        ("learning-rate: 3", "unknown key `learning-rate`: did you mean `learning_rate`?"),
        ("zzzzzz: 3", "unknown key `zzzzzz`: `--help` lists all of them."),
        ("config: other.yaml", "unknown key `config`"),
        ("max_steps: 2.5", "`max_steps` is '2.5': give an integer."),
        ("max_steps: true", "`max_steps` is 'True': give an integer."),
        ("learning_rate: fast", "`learning_rate` is 'fast': give a number."),
        ("bf16: perhaps", "`bf16` is 'perhaps': give true or false."),
        ("max_steps: [1, 2]", "`max_steps` is [1, 2]: give a single value."),
        ("learning_rate:", "`learning_rate` has no value: give one, or leave the line out."),
        ("save_strategy: sometimes", "`save_strategy` is 'sometimes': choose one of no, steps, epoch"),
        ("data: [a", "is not YAML: "),
        ("- data", "holds a list: it must hold lines of `name: value`."),
        ("block_size: 2", "the following arguments are required: --data"),
    ],
)
def test_wrong_files(file, capsys, monkeypatch, text, message):
    monkeypatch.delenv("HF_FALCON_DEBUG", raising=False)
    assert entry.main(["train", "--config", file(text)]) == 1
    error = capsys.readouterr().err
    assert error.startswith("hf-falcon train: error: ") and message in error


@pytest.mark.parametrize(
    "words, message",
    [
        (["--block-sise", "3"], "Unknown argument `--block-sise`: did you mean `--block_size`?"),
        (["--max_step", "3"], "Unknown argument `--max_step`: did you mean `--max_steps`?"),
        (["--max_step=3"], "Unknown argument `--max_step`: did you mean `--max_steps`?"),
        (["--max_steps", "many"], "`max_steps` is 'many': give an integer."),
        (["--max_steps"], "expected one argument (`train --help` describes every argument)."),
        (["--max_steps", "3", "4"], "Unexpected word '4'"),
        (["--config", "nowhere.yaml"], "`config` is 'nowhere.yaml', which is not a file"),
        (["--config"], "expected one argument"),
    ],
)
def test_wrong_command_lines(words, message):
    with pytest.raises((ValueError, FileNotFoundError)) as error:
        parse("--data", "a", *words)
    assert message in str(error.value)


def test_no_word_is_lost_in_a_list_of_the_file(file):
    with pytest.raises(ValueError, match="Unexpected word 'stray'"):
        parse("stray", "--config", file("data: [a]"))


def test_help(capsys):
    with pytest.raises(SystemExit) as stopped:
        parse("--help")
    text = capsys.readouterr().out
    assert stopped.value.code == 0 and "--config" in text and "--unroll_passes" in text
