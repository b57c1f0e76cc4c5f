# Copyright 2026 The hf_falcon authors. Licensed under the Apache License, Version 2.0.
"""`--drafter lookup` of the commands, and `--lookup_text`."""

import json

import pytest
import torch
from tiny_models import tiny_target, tiny_tokenizer

from hf_falcon.commands import main as entry

PROMPT = "abcabcabcabc"


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """A folder of a tiny target with its tokenizer, and a file of prompts."""
    folder = tmp_path_factory.mktemp("saved")
    tiny_target().save_pretrained(folder / "target")
    tiny_tokenizer().save_pretrained(folder / "target")
    (folder / "prompts.jsonl").write_text("".join(json.dumps({"turns": [PROMPT]}) + "\n" for _ in range(2)))
    return folder


@pytest.fixture
def run(saved, monkeypatch, capsys):
    """Runs a command for the tiny target. Returns its status and what it prints."""
    monkeypatch.delenv("HF_FALCON_DEBUG", raising=False)

    def command(name, *words, drafter="lookup"):
        models = ["--target", str(saved / "target"), *(["--drafter", drafter] if drafter else [])]
        status = entry.main([name, *models, "--device", "cpu", "--dtype", "float32", *words])
        return status, capsys.readouterr()

    return command


def text(*words) -> list[str]:
    return ["--prompt", PROMPT, "--max_new_tokens", "24", *words]


def test_generate(run):
    _, plain = run("generate", *text("--plain"), drafter=None)
    for words in ([], ["--pack"]):
        status, found = run("generate", *text(*words))
        assert status == 0 and found.out == plain.out and "tokens a round" in found.err


def test_texts_are_looked_up(run, tmp_path):
    """A file that has the answer."""
    _, plain = run("generate", *text("--plain"), drafter=None)
    (tmp_path / "notes.md").write_text(PROMPT + plain.out.strip())
    (tmp_path / "empty.md").write_text("")
    status, found = run("generate", *text("--lookup_text", str(tmp_path / "empty.md"), str(tmp_path / "notes.md")))
    assert status == 0 and found.out == plain.out
    status, missing = run("generate", *text("--lookup_text", str(tmp_path / "missing.md")))
    assert status == 1 and "missing.md" in missing.err
    status, refused = run("generate", *text("--lookup_text", "notes.md", "--plain"), drafter=None)
    assert status == 1 and "`lookup_text` is for drafts, and with `plain` there are none" in refused.err


def test_texts_become_the_drafters_memory(run, tmp_path, monkeypatch):
    (tmp_path / "one.md").write_text("abcdef")
    (tmp_path / "two.md").write_text("ghi")
    seen, generate = [], type(tiny_target()).generate

    def recorded(self, *args, assistant_model=None, **kwargs):
        seen.append(len(assistant_model.lookup_memory))
        return generate(self, *args, assistant_model=assistant_model, **kwargs)

    monkeypatch.setattr(type(tiny_target()), "generate", recorded)
    assert run("generate", *text("--lookup_text", str(tmp_path / "one.md"), str(tmp_path / "two.md")))[0] == 0
    assert seen == [9]


def test_evaluate_looks_up_by_default(run, saved):
    data = ["--data", str(saved / "prompts.jsonl"), "--max_new_tokens", "20", "--json"]
    options = [
        json.loads(run("evaluate", *data, *more)[1].out)["options"] for more in ([], ["--num_draft_passes", "3"])
    ]
    assert options[0]["prompt_lookup_num_tokens"] == 32 and options[0]["num_draft_passes"] == 0
    found = json.loads(run("evaluate", *data, "--check")[1].out)["data"]["prompts"]
    assert found["tau"] > 0 and found["identical"] == found["prompts"] == 2
    off = json.loads(run("evaluate", *data, "--prompt_lookup_num_tokens", "0")[1].out)["data"]["prompts"]
    assert off["tau"] == 0


def test_bench(run, saved, tmp_path):
    words = ["--data", str(saved / "prompts.jsonl"), "--max_new_tokens", "8", "--output", str(tmp_path)]
    methods = ["plain", "prompt_lookup", "lookup", "lookup@4", "falcon", "falcon_packed"]
    if not torch.backends.mkldnn.is_available():
        methods.pop()
    status, _ = run("bench", *words, "--methods", ",".join(methods))
    runs = json.loads((tmp_path / "report.json").read_text())["runs"]
    assert status == 0 and {each["method"] for each in runs} == set(methods)
    assert all(each["identical_prompts"] == each["num_prompts"] for each in runs)
    assert all(each["drafter_memory_mb"] == 0 for each in runs if each["method"].startswith("lookup"))


@pytest.mark.parametrize("name", ["tune", "doctor"])
def test_no_network_to_measure(run, name):
    status, found = run(name)
    assert status == 1 and "`drafter` is 'lookup', which has no network to measure or to train" in found.err


def test_no_network_to_train(saved, tmp_path, capsys):
    (tmp_path / "dialogues.json").write_text("[]")
    words = ["--data", str(tmp_path / "dialogues.json"), "--output_dir", str(tmp_path / "out"), "--drafter", "lookup"]
    assert entry.main(["adapt", "--target", str(saved / "target"), *words]) == 1
    assert "`drafter` is 'lookup', which has no network to measure or to train" in capsys.readouterr().err


def test_no_files_to_describe(capsys):
    assert entry.main(["info", "lookup"]) == 1
    assert '"lookup" is prompt lookup alone: it has no files' in capsys.readouterr().err
