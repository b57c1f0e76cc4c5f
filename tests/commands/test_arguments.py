# Copyright 2026 The hf_falcon authors. Licensed under the Apache License, Version 2.0.
"""Arguments of the commands: flags, numbers, dtypes, defaults, and models that are not there."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from eagle3_models import new_eagle3, write_original
from tiny_models import tiny_drafter, tiny_target, tiny_tokenizer

import hf_falcon
from hf_falcon.commands import generate, models, train
from hf_falcon.commands import main as entry
from hf_falcon.commands.run_arguments import CommandParser, check_names, parse_run
from hf_falcon.core.target_parts import CACHE_NAME
from hf_falcon.training.trainer import FalconTrainingArguments

SOURCE = str(Path(hf_falcon.__file__).parents[1])


@pytest.fixture(autouse=True)
def no_debugging(monkeypatch):
    monkeypatch.delenv("HF_FALCON_DEBUG", raising=False)


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """Folders of tiny targets with tokenizers, of a drafter for one of them, and a file of prompts."""
    folder = tmp_path_factory.mktemp("saved")
    for name in ("llama", "openai-gpt"):
        target = tiny_target(name)
        target.save_pretrained(folder / name)
        tiny_tokenizer().save_pretrained(folder / name)
        tiny_drafter(target).save_pretrained(folder / f"{name}-drafter")
    (folder / "prompts.jsonl").write_text('{"turns": ["abc"]}\n')
    return folder


def words_for(saved, name):
    return ["--target", str(saved / name), "--drafter", str(saved / f"{name}-drafter"), "--dtype", "float32"]


def error_of(capsys, words):
    """The one line that a command with a mistake prints."""
    assert entry.main(words) == 1
    captured = capsys.readouterr()
    line = captured.err.splitlines()[-1]
    assert line.startswith(f"hf-falcon {words[0]}: error: ") and "Traceback" not in captured.err
    return line


def test_evaluate_of_a_target_that_is_decoded_plainly(saved, capsys):
    words = [
        "evaluate",
        "--data",
        str(saved / "prompts.jsonl"),
        "--max_new_tokens",
        "2",
        *words_for(saved, "openai-gpt"),
    ]
    line = error_of(capsys, words)
    assert "decoded plainly" in line and f"no `{CACHE_NAME}`" in line


def test_tokens_per_round_are_tau_and_one(saved, capsys):
    words = ["evaluate", "--data", str(saved / "prompts.jsonl"), "--max_new_tokens", "8", *words_for(saved, "llama")]
    assert entry.main([*words, "--check", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)["data"]["prompts"]
    assert found["tokens_per_round"] == 1 + found["tau"] and found["divergences"] == []
    assert entry.main(words) == 0
    assert "tokens/round: tau + 1, the acceptance length" in capsys.readouterr().out


def test_evaluate_with_row_invariant(saved, capsys):
    words = ["evaluate", "--data", str(saved / "prompts.jsonl"), "--max_new_tokens", "12", *words_for(saved, "llama")]
    assert entry.main([*words, "--dtype", "bfloat16", "--check", "--row_invariant", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["dtype"] == "bfloat16" and found["data"]["prompts"]["identical"] == 1


def test_evaluate_with_other_bonuses(saved, capsys):
    words = ["evaluate", "--data", str(saved / "prompts.jsonl"), "--max_new_tokens", "8", *words_for(saved, "llama")]
    given = {("0.5", "2"): [0.5, 2.0], ("0",): []}
    for values, bonuses in given.items():
        assert entry.main([*words, "--context_bonuses", *values, "--json"]) == 0
        assert json.loads(capsys.readouterr().out)["options"]["context_bonuses"] == bonuses
    assert "`context_bonuses` is [60.0]" in error_of(capsys, [*words, "--context_bonuses", "60"])


def test_evaluate_takes_drafters_of_other_methods(saved, tmp_path, capsys):
    target = tiny_target("llama")
    drafter = new_eagle3(target)
    drafter.save_pretrained(tmp_path / "speculators")
    write_original(drafter, tmp_path / "original")
    words = ["evaluate", "--data", str(saved / "prompts.jsonl"), "--max_new_tokens", "12", *words_for(saved, "llama")]
    for name in ("speculators", "original"):
        assert entry.main([*words, "--drafter", str(tmp_path / name), "--check", "--json"]) == 0
        found = json.loads(capsys.readouterr().out)["data"]["prompts"]
        assert found["divergences"] == [] and found["drafted_tokens"] > 0 and found["identical"] == 1


@pytest.mark.parametrize(
    "words, message",
    [
        (["evaluate", "--data", "x", "--limit", "-2"], "`limit` is -2; give 1 or more."),
        (["evaluate", "--data", "x", "--max_new_tokens", "0"], "`max_new_tokens` is 0; give 1 or more."),
        (["demo", "--repeats", "many"], "`repeats` is 'many': give an integer."),
        (["generate", "--temperature", "-1"], "`temperature` is -1.0; give 0"),
        (["generate", "--temperature", "1e-40"], "`temperature` is 1e-40; give 0 (the most probable token), or 1e-06"),
        (["bench", "--data", "a", "--temperature", "1e-40"], "`temperature` is 1e-40; give 0"),
        (["doctor", "--temperature", "1e-40"], "`temperature` is 1e-40; give 0"),
        (["tune", "--seconds", "inf"], "`seconds` is inf; give a number above 0."),
        (["bench", "--data", "a", "--drafters", "dtype=b"], "`drafters` has 'dtype=b'; write NAME=FOLDER"),
        (["prepare", "--data", "a", "--output", "b", "--temperatures", "1e-40"], "`temperatures` is [1e-40]: give"),
        (["generate", "--top_p", "1.5"], "`top_p` is 1.5; give a number above 0 and at most 1."),
        (["generate", "--temperature", "0", "--do_sample"], "`temperature` is 0"),
        (["generate", "--dtype", "int8", "--prompt", "a"], "`dtype` is 'int8'; choose one of auto, float32"),
        (["generate", "--prompt", "a\udcffb"], r"`prompt` is 'a\udcffb', which is no UTF-8: give a text in UTF-8."),
        (["demo", "--prompt", "a", "\udcff"], r"`prompt` is '\udcff', which is no UTF-8"),
        (["chat", "--system", "\udcff"], r"`system` is '\udcff', which is no UTF-8"),
        (["serve", "--learn", ""], "`learn` is '': give a path or a name, or leave the argument out."),
        (["generate", "--drafter", ""], "`drafter` is '': give a path or a name"),
        (["train", "--data", "a", "--output_dir", ""], "`output_dir` is '': give a path or a name"),
        (["instant", "--output", ""], "`output` is '': give a path or a name"),
        (["evaluate", "--data", "a", ""], "`data` is '': give a path or a name"),
        (["generate", "--prompt", "a", "--seed", "-1"], "`seed` is -1; give an integer from 0 to 4294967295."),
        (["instant", "--output", "a", "--seed", "99999999999999999999999"], "`seed` is 99999999999999999999999; give"),
        (["info"], "arguments are required: repository"),
        (["push", "a", "b", "c"], "unrecognized arguments: c"),
        (["prepare", "--responses", "mine", "--data", "a", "--output", "b"], "`responses` is 'mine': choose one of"),
    ],
)
def test_wrong_arguments_are_one_line(capsys, words, message):
    assert message in error_of(capsys, words)


@pytest.mark.parametrize("data", [None, b'{"turns": ["\xff"]}'], ids=["missing", "not UTF-8"])
def test_files_to_exclude_are_read_before_the_target(tmp_path, capsys, monkeypatch, data):
    monkeypatch.setattr("hf_falcon.commands.prepare.load_target", lambda *_: pytest.fail("The target was loaded."))
    file = tmp_path / "prompts"
    words = ["prepare", "--data", "user/set", "--output", str(tmp_path / "out"), "--exclude", str(file)]
    if data is not None:
        file.write_bytes(data)
    line = error_of(capsys, words)
    assert f"`exclude` is '{file}', which cannot be read (" in line and "in UTF-8" in line


@pytest.mark.parametrize("words", [["--temperature", "0.7"], ["--top_p", "0.9"], ["--do_sample"]])
def test_what_is_for_sampling_samples(words):
    options = generate.GenerateArguments(**vars(CommandParser(generate.GenerateArguments).parse_args(words))).options()
    assert options["do_sample"] is True
    assert options["temperature"] == (0.7 if "--temperature" in words else 1.0)
    assert options["top_p"] == (0.9 if "--top_p" in words else 1.0)


def test_without_sampling_no_temperature_is_given():
    for arguments in (generate.GenerateArguments(), generate.GenerateArguments(temperature=0.0)):
        assert arguments.options() == {"max_new_tokens": 512, "do_sample": False}


@pytest.mark.parametrize(
    "name, dtype",
    [("fp16", "float16"), ("half", "float16"), ("bf16", "bfloat16"), ("fp32", "float32"), ("torch.bfloat16",) * 2],
)
def test_short_names_of_dtypes(name, dtype):
    assert models.resolve_dtype(name, "cpu") == getattr(torch, dtype.removeprefix("torch."))


def test_flags_take_no_value(saved, capsys):
    """A flag before a positional argument does not take it."""
    assert entry.main(["info", "--json", str(saved / "llama-drafter")]) == 0
    assert json.loads(capsys.readouterr().out)["target_model_type"] == "llama"
    assert "ignored explicit argument" in error_of(capsys, ["info", "--json=yes", str(saved / "llama-drafter")])


@pytest.mark.parametrize("text, expected", [("plan: true", True), ("plan: no", False)])
def test_flags_of_a_file(tmp_path, text, expected):
    (tmp_path / "run.yaml").write_text(f"data: [a]\n{text}\n")
    types = (train.DrafterArguments, FalconTrainingArguments)
    options, _ = parse_run(["--config", str(tmp_path / "run.yaml")], types, "train", None)
    assert options.plan is expected
    (tmp_path / "run.yaml").write_text("data: [a]\nplan: perhaps\n")
    with pytest.raises(ValueError, match="`plan` is 'perhaps': give true or false."):
        parse_run(["--config", str(tmp_path / "run.yaml")], types, "train", None)


def help_of(capsys, name):
    with pytest.raises(SystemExit):
        entry.main([name, "--help"])
    return capsys.readouterr().out


@pytest.mark.parametrize("name", ["demo", "generate", "evaluate", "doctor", "tune", "bench", "prepare", "train"])
def test_help_shows_a_default_once_and_only_where_there_is_one(capsys, name):
    text = " ".join(help_of(capsys, name).partition("arguments of transformers'")[0].split())
    assert not any(f"(default: {none})" in text for none in (None, False, [], ""))
    for argument in text.split(" --"):
        assert argument.lower().count("default") <= 1, argument
    # Either spelling is accepted, and one is shown.
    assert "-new-tokens" not in text and "(default: " in text


def test_the_arguments_of_train_come_before_those_of_trainer(capsys):
    ours, _, theirs = help_of(capsys, "train").partition("arguments of transformers' Trainer")
    for name in ("--data ", "--block_size ", "--unroll_passes ", "--learning_rate ", "--output_dir ", "--config "):
        assert name in ours and f"\n  {name}" not in theirs
    assert "--lr_scheduler_type " in theirs and "--lr_scheduler_type " not in ours and "--warmup_steps " in theirs


@pytest.mark.parametrize("source", ["./nowhere", "a/b/c", "/nowhere/at/all"])
def test_a_target_that_is_not_there(capsys, source):
    line = error_of(capsys, ["generate", "--prompt", "a", "--target", source])
    assert f"`target` is {source!r}, and there is no such folder: give a model's folder, or a name on the Hub" in line


def test_a_target_that_the_hub_does_not_give(capsys, monkeypatch):
    def fail(*args, **kwargs):
        raise OSError("We couldn't connect to the Hub.\nCheck it.") from ConnectionError()

    # The configuration is read first.
    monkeypatch.setattr(models.AutoConfig, "from_pretrained", fail)
    line = error_of(capsys, ["generate", "--prompt", "a", "--target", "user/none"])
    assert "`target` is 'user/none', and there is no such folder. On the Hub: We couldn't connect to the Hub." in line


def test_a_folder_that_is_no_model(capsys, tmp_path):
    line = error_of(capsys, ["generate", "--prompt", "a", "--target", str(tmp_path)])
    assert f"`target` is {str(tmp_path)!r}, a folder without `config.json`" in line


@pytest.mark.slow
def test_compiling_without_a_compiler(saved, tmp_path):
    """One line, which says that `torch.compile` failed."""
    variables = {**os.environ, "PYTHONPATH": SOURCE, "PATH": str(tmp_path), "CXX": "no-such-compiler"}
    variables |= {"TORCHINDUCTOR_CACHE_DIR": str(tmp_path / "cache"), "HF_FALCON_CACHE": str(tmp_path / "costs")}
    words = ["generate", "--prompt", "abc", "--compile", "--max_new_tokens", "2", *words_for(saved, "llama")]
    command = [sys.executable, "-m", "hf_falcon", *words]
    result = subprocess.run(command, env=variables, capture_output=True, text=True, timeout=500)
    assert result.returncode == 1 and "Traceback" not in result.stderr
    line = result.stderr.splitlines()[-1]
    assert line.startswith("hf-falcon generate: error: `torch.compile` could not compile"), result.stderr


def test_the_demo_needs_no_module_of_unix():
    # psutil, which transformers imports, has no use for it on Windows.
    code = "import sys, psutil, transformers.generation\nsys.modules['resource'] = None\n"
    code += "import hf_falcon.commands.demo, hf_falcon.commands.bench"
    variables = {**os.environ, "PYTHONPATH": SOURCE}
    subprocess.run([sys.executable, "-c", code], env=variables, check=True, timeout=300)


def test_interrupted_generation_ends_its_line(saved, capsys, monkeypatch):
    put, puts = generate._Writer.put, []

    def put_or_stop(self, value):
        puts.append(value)
        if len(puts) == 4:
            raise KeyboardInterrupt
        put(self, value)

    monkeypatch.setattr(generate._Writer, "put", put_or_stop)
    words = ["generate", "--prompt", "abc", "--max_new_tokens", "12", *words_for(saved, "llama")]
    assert entry.main(words) == 130
    captured = capsys.readouterr()
    assert captured.out.endswith("\n") and captured.out.strip()
    assert captured.err.splitlines()[-1].startswith("[stopped: 2 tokens, ")


def test_a_target_whose_weights_are_damaged(capsys, tmp_path):
    tiny_target().save_pretrained(tmp_path)
    tiny_tokenizer().save_pretrained(tmp_path)
    file = tmp_path / "model.safetensors"
    file.write_bytes(file.read_bytes()[:5000])
    capsys.readouterr()
    words = ["--target", str(tmp_path), "--drafter", "lookup", "--prompt", "a", "--dtype", "float32"]
    assert entry.main(["generate", *words]) == 1
    error = capsys.readouterr().err
    assert f"`target` is '{tmp_path}', with a damaged file of weights" in error and error.count("\n") == 1


def test_a_template_that_refuses_a_message(capsys, tmp_path):
    tiny_target().save_pretrained(tmp_path)
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = "{{ raise_exception('System role not supported') }}"
    tokenizer.save_pretrained(tmp_path)
    words = ["--target", str(tmp_path), "--drafter", "lookup", "--prompt", "a", "--dtype", "float32"]
    assert entry.main(["generate", *words]) == 1
    assert "chat template refuses the messages: System role not supported" in capsys.readouterr().err
    # Any error: variables may be of another type than the template's author had in mind.
    tokenizer.chat_template = "{{ 'on ' + day }}"
    tokenizer.save_pretrained(tmp_path)
    for day in (26, "null"):
        assert entry.main(["generate", *words, "--chat_template_kwargs", f'{{"day": {day}}}']) == 1
        assert "The chat template refuses the messages: can only concatenate str" in capsys.readouterr().err


@pytest.mark.parametrize("command", ["evaluate", "doctor"])
def test_files_of_the_same_name(capsys, command):
    assert entry.main([command, "--data", "one/test.jsonl", "other/test.jsonl"]) == 1
    assert "two files have the same name" in capsys.readouterr().err


def test_a_file_with_the_name_of_all_results():
    with pytest.raises(ValueError, match="results of all files go by the name 'all'; rename that file"):
        check_names(["one/test.jsonl", "one/all.jsonl"])
    check_names(["one/all.jsonl"])
