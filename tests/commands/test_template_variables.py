# Copyright 2026 The hf_falcon authors. Licensed under the Apache License, Version 2.0.
"""`chat_template_kwargs`: the commands' prompts have them, and they are compared with a drafter's training."""

import builtins
import json
from pathlib import Path

import pytest
import torch
from tiny_models import tiny_drafter, tiny_target, tiny_tokenizer
from transformers import AutoConfig, PreTrainedTokenizerFast

from hf_falcon.commands import doctor, train
from hf_falcon.commands import main as entry
from hf_falcon.commands.models import encode
from hf_falcon.training.chat_templates import chat_inputs
from hf_falcon.training.token_file import TokenFile

TEMPLATE = (
    "{% for m in messages %}b{{ m.content }}c{% endfor %}{% if thinks is defined and not thinks %}xyz{% endif %}"
)
GIVEN = '{"thinks": false}'


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """A target with a thinking switch, drafters that were trained with and without thoughts, and prompts."""
    folder = tmp_path_factory.mktemp("saved")
    target = tiny_target()
    target.save_pretrained(folder / "target")
    tiny_tokenizer().save_pretrained(folder / "target")
    (folder / "target" / "chat_template.jinja").write_text(TEMPLATE)
    for name, variables in (("unknown", None), ("thinks", {}), ("drafter", {"thinks": False})):
        drafter = tiny_drafter(target, num_assistant_tokens=3, num_draft_passes=2)
        if variables is not None:
            drafter.config.chat_template_kwargs = variables
        drafter.save_pretrained(folder / name)
    (folder / "prompts.jsonl").write_text('{"turns": ["abcdefgh"]}\n{"messages": [{"role": "user", "content": "hg"}]}')
    return folder


@pytest.fixture(autouse=True)
def place(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_FALCON_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(doctor, "PROMPTS", {"chat": ["xyz.xyz"]})


COMMANDS = {
    "generate": ["--prompt", "abc"],
    "chat": [],
    "evaluate": ["--data", "{}/prompts.jsonl"],
    "bench": ["--data", "{}/prompts.jsonl"],
    "tune": ["--data", "{}/prompts.jsonl", "--seconds", "0.2", "--context", "20"],
    "doctor": ["--data", "{}/prompts.jsonl"],
}


def run(saved, name, drafter, *more):
    words = [name, "--target", f"{saved}/target", "--drafter", str(saved / drafter), "--max_new_tokens", "4"]
    # A folder of measurements is of one drafter.
    words += ["--output", f"{name}-{Path(drafter).name}"] if name in ("bench", "tune") else []
    words += ["--dtype", "float32", "--device", "cpu", *(word.format(saved) for word in COMMANDS[name]), *more]
    return entry.main(words)


def test_messages_are_joined_by_empty_lines_where_there_is_no_template():
    tokenizer, messages = tiny_tokenizer(), [{"role": role, "content": f"{role}."} for role in ("user", "assistant")]
    found = chat_inputs(tokenizer, messages, torch.device("cpu"), {"thinks": False})
    assert found["input_ids"].tolist() == [tokenizer("user.\n\nassistant.")["input_ids"]]
    # One message is its text.
    assert encode(tokenizer, "abc", torch.device("cpu"))["input_ids"].tolist() == [tokenizer("abc")["input_ids"]]


@pytest.mark.parametrize("name", COMMANDS)
def test_prompts_have_them(saved, monkeypatch, capsys, name):
    apply, rendered = PreTrainedTokenizerFast.apply_chat_template, []

    def spy(tokenizer, *arguments, **options):
        found = apply(tokenizer, *arguments, **options)
        rendered.append(tokenizer.decode(found["input_ids"].flatten()))
        return found

    monkeypatch.setattr(PreTrainedTokenizerFast, "apply_chat_template", spy)
    lines = iter(["abc", "exit", "abc", "exit", "abc", "exit"])
    monkeypatch.setattr(builtins, "input", lambda prompt: next(lines))
    for drafter, is_other in (("drafter", False), ("unknown", False), ("thinks", True)):
        # Only what a drafter was trained with is tried besides.
        rendered.clear()
        assert run(saved, name, drafter, "--chat_template_kwargs", GIVEN) == 0
        assert rendered and (name == "doctor" or all(text.endswith("xyz") for text in rendered)), rendered
        captured = capsys.readouterr()
        said = " ".join((captured.out if name == "doctor" else captured.err).split())
        assert ("was trained with `chat_template_kwargs` {}, and this call has" in said) == is_other


def test_doctor_tries_those_of_the_training(saved, monkeypatch):
    """As it tries other templates: prompts with what the drafter's configuration records."""
    tried = []
    original = doctor.diagnose
    monkeypatch.setattr(doctor, "diagnose", lambda *given: tried.append(given[2]) or original(*given))
    for drafter, count in (("drafter", 1), ("thinks", 0), ("unknown", 0)):
        assert run(saved, "doctor", drafter) == 0
        found = [each for each in tried.pop() if "chat_template_kwargs" in each.name]
        assert len(found) == count
        if count:
            tokenizer = tiny_tokenizer()
            assert [tokenizer.decode(each["input_ids"][0])[-3:] for each in found[0].prompts] == ["xyz"] * 2


@pytest.mark.parametrize("value", [5, "{% x %}", {"tools": []}, {"messages": []}, {"a": "x" * 1000}, [[[]]]])
def test_a_stranger_s_configuration(saved, tmp_path, capsys, value):
    drafter = tiny_drafter(tiny_target(), num_assistant_tokens=3, num_draft_passes=2)
    drafter.config.chat_template_kwargs = value
    drafter.save_pretrained(tmp_path / "drafter")
    assert run(saved, "doctor", tmp_path / "drafter") == 0
    assert run(saved, "generate", tmp_path / "drafter") == 0
    captured = capsys.readouterr()
    assert ("was trained with" in captured.err) == isinstance(value, dict) and len(captured.err) < 2000


@pytest.mark.parametrize("name", [*COMMANDS, "prepare", "adapt"])
def test_what_they_cannot_be(saved, capsys, name):
    more = {"prepare": ["--output", "x"], "adapt": ["--drafter", "x", "--output_dir", "y"]}.get(name, [])
    words = [name, *(word.format(saved) for word in COMMANDS.get(name, ["--data", "{}/prompts.jsonl"])), *more]
    assert entry.main([*words, "--target", str(saved / "target"), "--chat_template_kwargs", '{"tools": 1}']) == 1
    assert "`chat_template_kwargs` is {'tools': 1}: give a JSON object" in capsys.readouterr().err


@pytest.mark.slow
def test_from_the_data_to_the_drafter(saved, tmp_path):
    """`prepare` writes them into the token file, `train` and `adapt` from there into the drafter's configuration."""
    records = [{"prompt": f"abc{number}def"} for number in range(20)]
    (tmp_path / "data.jsonl").write_text("\n".join(map(json.dumps, records)))
    target = ["--target", f"{saved}/target"]
    prepared = [
        "--data",
        "data.jsonl",
        "--max_new_tokens",
        "6",
        "--max_prompt_tokens",
        "60",
        "--chat_template_kwargs",
        GIVEN,
    ]
    assert entry.main(["prepare", *target, *prepared, "--output", "tokens", "--dtype", "float32"]) == 0
    assert TokenFile.load("tokens").metadata["chat_template_kwargs"] == {"thinks": False}
    for name, architecture in (("falcon", []), ("eagle3", ["--architecture", "eagle3", "--draft_vocab_size", "40"])):
        words = [*target, "--data", "tokens", "--output_dir", name, "--max_steps", "1", "--use_cpu", "true"]
        assert train.main([*words, "--report_to", "none", *architecture]) == 0
        assert json.loads((tmp_path / name / "config.json").read_text())["chat_template_kwargs"] == {"thinks": False}
    assert json.loads((tmp_path / "falcon" / "provenance.json").read_text())["data"]["chat_template_kwargs"] == {
        "thinks": False
    }
    words = [
        *target,
        "--data",
        "data.jsonl",
        "--max_new_tokens",
        "6",
        "--drafter",
        "falcon",
        "--output_dir",
        "adapted",
    ]
    words += ["--chat_template_kwargs", '{"other": 1}']
    assert entry.main(["adapt", *words, "--limit", "12", "--num_train_epochs", "1", "--device", "cpu"]) == 0
    assert AutoConfig.from_pretrained(tmp_path / "adapted").chat_template_kwargs == {"other": 1}
