# Copyright 2026 The hf_falcon authors. Licensed under the Apache License, Version 2.0.
"""`hf-falcon instant`, and what `info`, `doctor` and `bench` say of a target without a drafter."""

import json

import pytest
import torch
from tiny_models import new_drafter, new_target, prompt, tiny_target, tiny_tokenizer
from training_runs import arguments

from hf_falcon.commands import at_hand, bench, train
from hf_falcon.commands import main as entry
from hf_falcon.commands.models import load_drafter
from hf_falcon.training import instant

TEXTS = [f"{letter}bcdefgh.{letter}" for letter in "ABCDEFGHIJKL"]


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """Folders of a target that has an instant drafter and of one that has none, and a file of prompts."""
    folder = tmp_path_factory.mktemp("saved")
    for kind in ("llama", "phi3"):
        new_target(kind, num_hidden_layers=4).save_pretrained(folder / kind)
        tiny_tokenizer().save_pretrained(folder / kind)
    (folder / "prompts.jsonl").write_text("".join(json.dumps({"turns": [text]}) + "\n" for text in TEXTS))
    return folder


@pytest.fixture(autouse=True)
def few_prompts(monkeypatch):
    monkeypatch.setattr(instant, "PROMPTS", tuple(TEXTS))


def words(saved, kind, output, *more):
    given = ["--target", str(saved / kind), "--output", str(output), "--dtype", "float32", "--device", "cpu"]
    return ["instant", *given, "--data", str(saved / "prompts.jsonl"), "--max_new_tokens", "12", *more]


def test_the_command_writes_a_drafter(saved, tmp_path, capsys):
    output = tmp_path / "drafter"
    assert entry.main(words(saved, "llama", output, "--num_draft_layers", "1", "--feature_layers", "-1")) == 0
    assert f"hf-falcon chat --target {saved / 'llama'} --drafter {output}" in capsys.readouterr().out
    drafter = load_drafter(str(output), torch.float32, "cpu")
    assert drafter.config.num_hidden_layers == 1 and drafter.config.feature_layers == []
    target = new_target("llama", num_hidden_layers=4)
    plain = target.generate(prompt(9), do_sample=False, max_new_tokens=12)
    assert target.generate(prompt(9), do_sample=False, max_new_tokens=12, assistant_model=drafter).equal(plain)
    assert (output / "README.md").is_file()
    # The same command again writes over its own drafter.
    assert entry.main(words(saved, "llama", output, "--limit", "8")) == 0


def test_training_continues_an_instant_drafter(workplace, tmp_path):
    target, name = tiny_target(), str(tmp_path / "instant")
    drafter = instant.instant_drafter(target, tiny_tokenizer(), TEXTS, max_new_tokens=12, progress=False)
    drafter.save_pretrained(name)
    options = {"init_from": name, "block_size": 1, "num_lstm_layers": 0, "max_steps": 2, "learning_rate": 1e-3}
    assert train.main(arguments(workplace, tmp_path / "trained", **options)) == 0
    trained = load_drafter(str(tmp_path / "trained"), torch.float32, "cpu")
    assert trained.config.feature_layers == drafter.config.feature_layers
    assert trained.generation_config.context_bonuses == drafter.generation_config.context_bonuses
    change = (trained.fusion.linear.weight - drafter.fusion.linear.weight).abs().max()
    assert 0 < change < 0.02
    plain = target.generate(prompt(9), do_sample=False, max_new_tokens=12)
    assert target.generate(prompt(9), do_sample=False, max_new_tokens=12, assistant_model=trained).equal(plain)


def test_errors_of_the_command(saved, tmp_path, capsys):
    assert entry.main(words(saved, "phi3", tmp_path / "none")) == 1
    error = capsys.readouterr().err
    assert "Phi3ForCausalLM: its last layers cannot be copied" in error and 'assistant_model="lookup"' in error
    assert not (tmp_path / "none").exists()
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "notes.txt").write_text("mine")
    assert entry.main(words(saved, "llama", tmp_path / "full")) == 1
    assert "or other files: give a new folder" in capsys.readouterr().err
    # What a training has written would describe a drafter that is gone.
    drafter = new_drafter(new_target("llama", num_hidden_layers=4))
    drafter.save_pretrained(tmp_path / "trained")
    (tmp_path / "trained" / "provenance.json").write_text("{}")
    assert entry.main(words(saved, "llama", tmp_path / "trained")) == 1
    assert "holds a trained drafter" in capsys.readouterr().err
    assert entry.main(words(saved, "llama", tmp_path / "none", "--limit", "2")) == 1
    assert "`limit` is 2; give 8 or more" in capsys.readouterr().err


def test_an_output_below_a_file_is_refused_before_models_are_loaded(saved, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr("hf_falcon.commands.instant.load_target", lambda *_: pytest.fail("loads a target"))
    (tmp_path / "file").touch()
    assert entry.main(words(saved, "llama", tmp_path / "file" / "out")) == 1
    expected = (
        f"`output` is '{tmp_path}/file/out', but nothing can be written in {tmp_path}/file: give another folder."
    )
    assert expected in capsys.readouterr().err


def test_what_info_and_doctor_say_of_a_target(saved, capsys):
    llama, phi3 = str(saved / "llama"), str(saved / "phi3")
    assert entry.main(["info", llama]) == 0
    printed = capsys.readouterr().out
    assert f"hf-falcon instant --target {llama}" in printed and 'assistant_model="lookup"' in printed
    assert entry.main(["info", phi3, "--json"]) == 0
    ways = json.loads(capsys.readouterr().out)["at_hand"]
    assert ways["instant"].startswith("no: its last layers cannot be copied") and ways["own heads"] == "none"
    assert entry.main(["doctor", "--target", llama, "--json"]) == 0
    assert set(json.loads(capsys.readouterr().out)["at_hand"]) == set(ways)
    assert entry.main(["doctor", "--target", llama]) == 0
    assert "No `drafter` is given" in capsys.readouterr().out


def test_smaller_models_of_the_same_tokenizer(saved, tmp_path, monkeypatch):
    small = tmp_path / "small"
    new_target("llama", num_hidden_layers=1).save_pretrained(small)
    tiny_tokenizer().save_pretrained(small)
    other = tmp_path / "other"
    new_target("llama", num_hidden_layers=1).save_pretrained(other)
    fields = json.loads((small / "tokenizer.json").read_text())
    fields["model"]["vocab"] = {token: 63 - place for token, place in fields["model"]["vocab"].items()}
    (other / "tokenizer.json").write_text(json.dumps(fields))
    broken = tmp_path / "broken"
    broken.mkdir()
    (broken / "tokenizer.json").write_text("[")
    cached = {"a/small": small, "a/other": other, "a/broken": broken, "a/same": saved / "llama"}
    monkeypatch.setattr(at_hand, "_cached", lambda: iter(cached.items()))
    found = at_hand.smaller_models(str(saved / "llama"))
    assert list(found) == ["a/small"]
    assert found["a/small"] == (small / "model.safetensors").stat().st_size
    # By its name in the cache, too.
    assert list(at_hand.smaller_models("a/same")) == ["a/small"]
    assert at_hand.smaller_models("a/small") == {}


def test_the_benchmark_makes_an_instant_drafter(saved, tmp_path, capsys):
    given = ["--dtype", "float32", "--device", "cpu", "--max_new_tokens", "12", "--limit", "1"]
    given += ["--data", str(saved / "prompts.jsonl"), "--methods", "falcon,instant"]
    assert bench.main([*given, "--target", str(saved / "llama"), "--output", str(tmp_path / "a")]) == 0
    assert "`falcon` is left out: no drafter is given as `drafter`" in capsys.readouterr().out
    rows = {row["method"]: row for row in json.loads((tmp_path / "a" / "report.json").read_text())["runs"]}
    assert set(rows) == {"plain", "instant"}
    assert rows["instant"]["identical_prompts"] == 1 and rows["instant"]["drafter_memory_mb"] > 0
    assert bench.main([*given, "--target", str(saved / "phi3"), "--output", str(tmp_path / "b")]) == 0
    assert "`instant` is left out: `target` is a Phi3ForCausalLM" in capsys.readouterr().out
