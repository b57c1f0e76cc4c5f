# Copyright 2026 The hf_falcon authors. Licensed under the Apache License, Version 2.0.
"""`--learn` of the commands, and the folder of a learner in `hf-falcon doctor`."""

import json
import signal

import pytest
import torch
from example_scripts import TEMPLATE
from learners import SIZES, learner, pair, serve
from serving import chat_tokenizer, needs_the_extra, running
from tiny_models import new_drafter, new_target, tiny_target, tiny_tokenizer

import hf_falcon
from hf_falcon.commands import chat, doctor
from hf_falcon.commands import main as entry
from hf_falcon.commands.chat import ChatArguments
from hf_falcon.commands.serve import ServeArguments
from hf_falcon.learning.learner import Learner, learner_of


def test_serve_learns_from_requests(tmp_path, capsys):
    needs_the_extra()
    from openai import OpenAI

    from hf_falcon.commands.serving import TargetServer

    target, drafter = pair()
    arguments = ServeArguments(learn=str(tmp_path / "learnt"), keep_samples=True)
    hf_falcon.attach(target, drafter)
    server = TargetServer(target, chat_tokenizer(), "user/tiny")
    with arguments.learning(target, drafter), running(server) as address:
        with OpenAI(base_url=f"{address}/v1", api_key="none", max_retries=0, timeout=60) as client:
            for text in ("abcdef", "fedcba", "xyzxyz"):
                client.completions.create(model="user/tiny", prompt=text, max_tokens=16)
        statistics = learner_of(drafter).statistics
    assert statistics.calls == 3 and statistics.texts + statistics.held_out_texts == 3
    printed = capsys.readouterr().err
    assert "[learning: 48 tokens in 3 calls" in printed
    written = json.loads((tmp_path / "learnt" / "learning.json").read_text())
    assert written["tokens_seen"] == 48 and (tmp_path / "learnt" / "samples.safetensors").is_file()
    # The weights that it began with: nothing was compared yet.
    kept = hf_falcon.FalconDraftModel.from_pretrained(tmp_path / "learnt" / "drafter")
    assert all(map(torch.equal, kept.parameters(), drafter.parameters()))
    hf_falcon.detach(target)


def test_chat_learns_from_replies(tmp_path, monkeypatch, capsys):
    target, drafter = pair()
    typed = iter(["abc", "defg", ""])
    monkeypatch.setattr("builtins.input", lambda prompt: next(typed))
    monkeypatch.setattr(ChatArguments, "load", lambda self: (target, chat_tokenizer(), drafter))
    assert entry.main(["chat", "--learn", str(tmp_path / "learnt"), "--max_new_tokens", "12"]) == 0
    assert "in 2 calls" in capsys.readouterr().err
    assert json.loads((tmp_path / "learnt" / "learning.json").read_text())["calls"] == 2
    assert chat.ChatArguments().learn is None


@pytest.mark.parametrize("is_late", [False, True])
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_a_chat_that_a_signal_ends_saves(tmp_path, monkeypatch, number, is_late):
    """While a line is typed, or a reply is written; a second signal does not interrupt the saving."""
    target, drafter = pair()
    typed = iter(["abc", *(["defg"] if is_late else [])])

    def read(prompt):
        if (text := next(typed, None)) is None:
            signal.raise_signal(number)
        if text == "defg":
            target.register_forward_pre_hook(lambda *_: signal.raise_signal(number))
        return text

    def save_slowly(learner):
        signal.raise_signal(number)
        save(learner)

    def by_default(*_):
        raise AssertionError

    save = Learner.save
    monkeypatch.setattr("builtins.input", read)
    monkeypatch.setattr(Learner, "save", save_slowly)
    monkeypatch.setattr(ChatArguments, "load", lambda self: (target, chat_tokenizer(), drafter))
    before = signal.signal(number, by_default)
    try:
        with pytest.raises(SystemExit):
            entry.main(["chat", "--learn", str(tmp_path / "learnt"), "--max_new_tokens", "12"])
        assert signal.getsignal(number) is by_default
    finally:
        signal.signal(number, before)
    assert json.loads((tmp_path / "learnt" / "learning.json").read_text())["calls"] == 1


@pytest.mark.parametrize(
    "words, part", [(["--learn", "x", "--plain"], "`plain`"), (["--keep_samples"], "`learn` folder")]
)
def test_what_does_not_go_together(words, part, capsys):
    assert entry.main(["chat", *words]) == 1
    assert part in capsys.readouterr().err


def test_doctor_reads_the_folder_of_a_learner(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(doctor, "PROMPTS", {"chat": ["xyz.xyz"]})
    target, folder = tiny_target(), tmp_path / "learnt"
    target.save_pretrained(tmp_path / "target")
    tiny_tokenizer().save_pretrained(tmp_path / "target")
    (tmp_path / "target" / "chat_template.jinja").write_text(TEMPLATE)
    words = ["doctor", "--target", str(tmp_path / "target"), "--drafter", str(folder), "--dtype", "float32"]
    words += ["--device", "cpu", "--max_new_tokens", "8"]
    model = new_target("llama")
    drafter = new_drafter(model, **SIZES)
    with learner(drafter, model, folder=folder) as found:
        serve(model, drafter, range(3))
        found.save()
        assert entry.main(words) == 0
        assert "not compared yet" in capsys.readouterr().out
        serve(model, drafter, range(3, 36))
        found.learn(24)
        assert found.statistics.replacements > 0
    assert entry.main(words) == 0
    printed = capsys.readouterr().out
    assert printed.count("Learnt while serving: ") == 1 and "24 steps" in " ".join(printed.split())
    assert entry.main([*words, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["learning"]["steps"] == 24
    (folder / "drafter" / "config.json").unlink()
    assert entry.main(words) == 1
    assert "has not been saved yet" in capsys.readouterr().err
    (folder / "learning.json").write_text("[]")
    assert entry.main(words) == 1
    assert "is not the report of a learner" in capsys.readouterr().err


def test_a_folder_that_cannot_be_written(tmp_path, capsys):
    (tmp_path / "file").write_text("")
    for folder in (tmp_path / "file", tmp_path / "file" / "learnt"):
        assert entry.main(["chat", "--learn", str(folder)]) == 1
        assert f"`learn` is '{folder}', but nothing can be written in {tmp_path / 'file'}" in capsys.readouterr().err
        with pytest.raises(ValueError, match="`folder` is"):
            hf_falcon.LearningOptions(folder=folder)
