# Copyright 2026 The hf_falcon authors. Licensed under the Apache License, Version 2.0.
"""`hf-falcon adapt`: it continues the training of any drafter on another target's own responses, and resumes."""

import hashlib
import json
import shutil
from functools import partial
from pathlib import Path

import pytest
import torch
from tiny_models import new_target, tiny_drafter, tiny_target, tiny_tokenizer
from transformers import TrainerCallback
from transformers.trainer_utils import get_last_checkpoint

from hf_falcon import AutoDrafter
from hf_falcon.checkpoint_files import weights_fingerprint
from hf_falcon.commands import adapt as command
from hf_falcon.commands import main as entry
from hf_falcon.drafters.eagle3 import Eagle3DraftModel
from hf_falcon.drafters.eagle3_config import Eagle3DraftConfig
from hf_falcon.training.token_file import TokenFile


def eagle3():
    torch.manual_seed(0)
    return Eagle3DraftModel(Eagle3DraftConfig.from_target(tiny_target()))


DRAFTERS = {
    "falcon": lambda: tiny_drafter(tiny_target(), block_size=1),
    "paper": lambda: tiny_drafter(tiny_target(), block_size=2, num_lstm_layers=1),
    "eagle3": eagle3,
}


@pytest.fixture(scope="module")
def workplace(tmp_path_factory):
    """A fine-tune of the drafters' target, and dialogues."""
    folder = tmp_path_factory.mktemp("adapt")
    target = new_target("llama")
    with torch.no_grad():
        for parameter in target.parameters():
            parameter.mul_(1.05)
    target.save_pretrained(folder / "finetune")
    tiny_tokenizer().save_pretrained(folder / "finetune")
    dialogues = [{"messages": [{"role": "user", "content": f"abc{i}def"}]} for i in range(20)]
    (folder / "dialogues.jsonl").write_text("".join(json.dumps(each) + "\n" for each in dialogues))
    return folder


def words(workplace, drafter, output, **more):
    given = {"drafter": drafter, "target": workplace / "finetune", "data": workplace / "dialogues.jsonl"}
    given |= {"output_dir": output, "max_new_tokens": 12, "eval_prompts": 3, "batch_size": 4, "device": "cpu", **more}
    return ["adapt", *(word for name, value in given.items() for word in (f"--{name}", str(value)))]


@pytest.mark.parametrize(
    "method", [*sorted(DRAFTERS.keys() - {"paper"}), pytest.param("paper", marks=pytest.mark.slow)]
)
def test_a_drafter_is_adapted(workplace, tmp_path, capsys, method):
    DRAFTERS[method]().save_pretrained(tmp_path / "old")
    output = tmp_path / "new"
    assert entry.main(words(workplace, tmp_path / "old", output, num_train_epochs=1)) == 0
    text = capsys.readouterr().out
    assert "3 held-out prompts" in text and str(output) in text
    report = json.loads((output / "adapt.json").read_text())
    assert report.keys() == {"before", "after", "prompts", "drafter", "tokens_sha256"}
    assert report["after"]["final_tau"] >= 0
    if method == "falcon":
        assert f"{1 + report['after']['final_tau']:.2f}" in (output / "README.md").read_text()

    old, new = AutoDrafter.from_pretrained(tmp_path / "old"), AutoDrafter.from_pretrained(output)
    assert any(not torch.equal(a, b) for a, b in zip(old.parameters(), new.parameters()))
    target = new_target("llama").from_pretrained(workplace / "finetune")
    assert new.config.target_fingerprint == weights_fingerprint(target) != old.config.target_fingerprint
    assert new.config.target_name_or_path == str(workplace / "finetune")
    inputs = torch.randint(3, 60, (1, 9))
    expected = target.generate(inputs, do_sample=False, max_new_tokens=20)
    found = target.generate(inputs, do_sample=False, max_new_tokens=20, assistant_model=new)
    assert torch.equal(found, expected)


@pytest.fixture(scope="module")
def finished(workplace, tmp_path_factory):
    """The folder of a drafter, `old`, and what became of it in one epoch, `new`."""
    folder = tmp_path_factory.mktemp("finished")
    DRAFTERS["falcon"]().save_pretrained(folder / "old")
    assert entry.main(words(workplace, folder / "old", folder / "new", num_train_epochs=1)) == 0
    return folder


class Interrupts(TrainerCallback):
    def on_step_end(self, args, state, control, **kwargs):
        control.should_save = True
        if state.global_step == 2:
            raise KeyboardInterrupt


class CountsSteps(TrainerCallback):
    def __init__(self):
        self.steps = 0

    def on_step_end(self, args, state, control, **kwargs):
        self.steps += 1


def test_an_interrupted_run_resumes(workplace, finished, tmp_path, monkeypatch):
    old, whole, pieces = finished / "old", finished / "new", tmp_path / "pieces"
    make, measured, counts = command._trainer, [], CountsSteps()
    tau = command.decoded_tau

    def with_callback(*args, callback):
        trainer = make(*args)
        trainer.add_callback(callback)
        trainer.args.save_steps = 1
        return trainer

    monkeypatch.setattr(command, "_trainer", partial(with_callback, callback=Interrupts()))
    monkeypatch.setattr(command, "decoded_tau", lambda *args: measured.append(None) or tau(*args))
    assert entry.main(words(workplace, old, pieces, num_train_epochs=1)) == 130
    assert Path(get_last_checkpoint(pieces)).name == "checkpoint-1"
    monkeypatch.setattr(command, "_trainer", partial(with_callback, callback=counts))
    assert entry.main(words(workplace, old, pieces, num_train_epochs=1)) == 0
    total = json.loads((whole / "trainer_state.json").read_text())["global_step"]
    assert counts.steps == total - 1
    # Before the training once, although there were two runs; and after it.
    assert len(measured) == 2
    found, expected = (AutoDrafter.from_pretrained(each).state_dict() for each in (pieces, whole))
    for name, tensor in expected.items():
        torch.testing.assert_close(found[name], tensor, msg=name)


def test_refusals(workplace, tmp_path, capsys, monkeypatch):
    DRAFTERS["falcon"]().save_pretrained(tmp_path / "old")
    assert entry.main(words(workplace, tmp_path / "old", tmp_path / "old")) == 1
    assert "the folder of the drafter itself" in capsys.readouterr().err
    assert entry.main(words(workplace, tmp_path / "old", tmp_path / "new", limit=3)) == 1
    assert "`limit` is 3" in capsys.readouterr().err
    assert entry.main(words(workplace, tmp_path / "old", tmp_path / "new", data=tmp_path / "missing.jsonl")) == 1
    assert "missing.jsonl" in capsys.readouterr().err
    for name, value in (("learning_rate", "nan"), ("num_train_epochs", "0"), ("max_minutes", "-1")):
        assert entry.main(words(workplace, tmp_path / "old", tmp_path / "new", **{name: value})) == 1
        assert f"`{name}` is {float(value)}: give a number above 0" in capsys.readouterr().err
    assert entry.main(words(workplace, tmp_path / "old", tmp_path / "new", max_new_tokens=10**6)) == 1
    assert "`max_new_tokens` is 1000000, and the target's context has" in capsys.readouterr().err
    monkeypatch.setattr(command, "load_target", lambda *args, **kwargs: pytest.fail("loaded"))
    assert entry.main(words(workplace, tmp_path / "old", workplace / "finetune")) == 1
    assert "the folder of the target itself" in capsys.readouterr().err
    (tmp_path / "file").touch()
    assert entry.main(words(workplace, tmp_path / "old", tmp_path / "file" / "new")) == 1
    assert f"nothing can be written in {tmp_path / 'file'}" in capsys.readouterr().err


def test_what_continues_a_run(workplace, finished, tmp_path, capsys, monkeypatch):
    """Not another drafter or batch size; and more epochs than before are not complete at once, but fewer are."""
    shutil.copytree(finished, tmp_path, dirs_exist_ok=True)
    other = DRAFTERS["falcon"]()
    torch.nn.init.ones_(next(each for each in other.parameters() if each.dim() == 2))
    other.save_pretrained(tmp_path / "other")
    assert entry.main(words(workplace, tmp_path / "other", tmp_path / "new", num_train_epochs=1)) == 1
    assert "where another drafter is adapted" in capsys.readouterr().err
    report = (tmp_path / "new" / "adapt.json").read_text()
    assert entry.main(words(workplace, tmp_path / "old", tmp_path / "new", num_train_epochs=9, batch_size=2)) == 1
    assert "A step has 2 samples" in capsys.readouterr().err
    assert (tmp_path / "new" / "adapt.json").read_text() == report
    more = {"num_train_epochs": 9, "max_minutes": 1e-9}
    assert entry.main(words(workplace, tmp_path / "old", tmp_path / "new", **more)) == 0
    assert "The training is not complete" in capsys.readouterr().out
    assert "after" not in json.loads((tmp_path / "new" / "adapt.json").read_text())
    found = {"final_tau": 2.0, "final_alpha": 0.5}
    monkeypatch.setattr(command, "decoded_tau", lambda *args: found)
    assert entry.main(words(workplace, tmp_path / "old", tmp_path / "new", num_train_epochs=1)) == 0
    assert json.loads((tmp_path / "new" / "adapt.json").read_text())["after"] == found


def test_a_report_of_other_data_is_refused(workplace, finished, tmp_path, capsys):
    """The report's numbers are of the first prompts, also where no checkpoint tells of them."""
    shutil.copytree(finished, tmp_path, dirs_exist_ok=True)
    output = tmp_path / "new"
    digest = hashlib.sha256(TokenFile.load(output / "tokens.safetensors").tokens.numpy().tobytes()).hexdigest()
    assert json.loads((output / "adapt.json").read_text())["tokens_sha256"] == digest
    (output / "tokens.safetensors").unlink()
    for checkpoint in output.glob("checkpoint-*"):
        shutil.rmtree(checkpoint)
    (tmp_path / "other.jsonl").write_text((workplace / "dialogues.jsonl").read_text().replace("abc", "cba"))
    other = {"data": tmp_path / "other.jsonl", "num_train_epochs": 1}
    assert entry.main(words(workplace, tmp_path / "old", output, **other)) == 1
    assert "or with other data" in capsys.readouterr().err
