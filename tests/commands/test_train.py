# Copyright 2026 The hf_falcon authors. Licensed under the Apache License, Version 2.0.
"""`hf-falcon train`: what it writes, resumes and refuses."""

import json
import os
import random
import re
import subprocess
import sys
import time
from dataclasses import asdict

import pytest
import torch
from huggingface_hub import ModelCard
from quick import quick
from safetensors.torch import load_file
from tiny_models import VOCAB, new_drafter, new_target, tiny_target, tiny_tokenizer
from training_runs import arguments

from hf_falcon import AutoDrafter, FalconDraftModel
from hf_falcon.checkpoint_files import name_target, weights_fingerprint
from hf_falcon.commands import main as entry
from hf_falcon.commands import train
from hf_falcon.commands.run_arguments import parse_run
from hf_falcon.commands.train import frequent_tokens
from hf_falcon.commands.train_arguments import DrafterArguments
from hf_falcon.training import features, trainer
from hf_falcon.training.features import feature_statistics
from hf_falcon.training.plot import draw
from hf_falcon.training.provenance import refuse_other_run
from hf_falcon.training.token_file import TokenFile
from hf_falcon.training.trainer import FalconTrainingArguments


def test_held_out_samples_that_are_too_long(workplace, tmp_path, capsys):
    samples = [torch.arange(3 + number, 12 + number) for number in range(19)] + [torch.arange(3, 40)]
    path = tmp_path / "tokens.safetensors"
    TokenFile.from_samples(samples, [4] * 19 + [30], [0.0] * 20, VOCAB).save(path)
    options = {"data": path, "max_length": 20, "plan": True}
    with pytest.raises(
        ValueError, match="^Held out, .*: None of 1 samples .* raise it. Or change `eval_samples` .1.:"
    ):
        train.main(arguments(workplace, tmp_path, eval_samples=1, **options))
    assert train.main(arguments(workplace, tmp_path, eval_samples=0, **options)) == 0
    assert train.main(arguments(workplace, tmp_path, eval_samples=2, **options)) == 0
    assert "1 samples held out" in capsys.readouterr().out


def test_a_new_drafter_starts_without_the_held_out_samples(workplace, tmp_path, monkeypatch):
    data = TokenFile.load(workplace / "tokens.safetensors")
    seen = []
    start = train.start_falcon
    monkeypatch.setattr(train, "start_falcon", lambda *args: seen.append(args[2]) or start(*args))
    options = {"final_tau_prompts": 0, "eval_samples": 2, "max_steps": 1, "num_lstm_layers": 0, "block_size": 1}
    assert train.main(arguments(workplace, tmp_path, **options)) == 0
    held_out = min(2, len(data) // 10)
    assert held_out > 0 and len(seen[0]) == len(data) - held_out
    assert all(seen[0].sample(index)[0].equal(data.sample(index)[0]) for index in range(len(seen[0])))


def test_training_from_kept_features(workplace, tmp_path, monkeypatch):
    """The same losses, nearly, and no forward of the target."""
    data = TokenFile.load(workplace / "tokens.safetensors")
    path = tmp_path / "tokens.safetensors"
    data.save(path)
    options = {"data": path, "final_tau_prompts": 0, "eval_samples": 2, "logging_steps": 1, "max_steps": 4}
    options |= {
        "num_lstm_layers": 0,
        "num_draft_layers": 1,
        "block_size": 1,
        "intermediate_size": 24,
        "max_length": 99,
    }
    kinds = {"computed": tmp_path / "computed", "kept": tmp_path / "kept"}
    assert train.main(arguments(workplace, kinds["computed"], **options)) == 0
    target = tiny_target()
    layer = target.config.num_hidden_layers - 2
    kept = features.StoredFeatures(features.kept_folder(path), target, data, [layer])
    rows = {index: kept.sample(index, [layer]).clone() for index in range(len(data))}
    for each in rows.values():
        # The target never reads the last token that it writes.
        each[-1] = 0
    for file in features.kept_folder(path).glob("*.safetensors"):
        file.unlink()
    features.save_features(features.kept_file(path, 0), rows)
    with monkeypatch.context() as patch:
        patch.setattr(features, "target_features", None)
        patch.setattr(trainer, "target_features", None)
        assert train.main(arguments(workplace, kinds["kept"], **options)) == 0
    states = {kind: json.loads((folder / "trainer_state.json").read_text()) for kind, folder in kinds.items()}
    losses = {
        kind: [row.get("loss", row.get("eval_loss")) for row in state["log_history"] if {"loss", "eval_loss"} & {*row}]
        for kind, state in states.items()
    }
    assert len(losses["kept"]) > 4 and losses["kept"] == pytest.approx(losses["computed"], rel=0.02)


def test_more_text_for_the_draft_vocabulary(workplace, tmp_path):
    text = tmp_path / "text.safetensors"
    token = 7
    TokenFile.from_samples([torch.full((500,), token)], [1], [-1.0], VOCAB).save(text)
    options = {"vocabulary_data": text, "draft_vocab_size": 3, "max_steps": 1, "final_tau_prompts": 0}
    assert train.main(arguments(workplace, tmp_path / "drafter", **options)) == 0
    assert token in FalconDraftModel.from_pretrained(tmp_path / "drafter").draft_vocab_ids.tolist()


def test_train_command(workplace, tmp_path):
    output = tmp_path / "new" / "drafter"
    options = {"draft_vocab_size": 20, "features_dir": tmp_path / "features", "block_size": 3, "eval_samples": 2}
    options |= {"feature_layers": 0, "final_tau_prompts": 1, "intermediate_size": 40, "num_key_value_heads": 1}
    assert train.main(arguments(workplace, output, **options)) == 0
    files = {"config.json", "model.safetensors", "trainer_state.json", "provenance.json", "README.md"}
    assert files <= set(os.listdir(output))
    card = ModelCard.load(output / "README.md")
    assert "speculative-decoding" in card.data.tags and "steps," in card.text
    assert "training_args.bin" not in os.listdir(output)
    config = json.loads((output / "config.json").read_text())
    assert (config["block_size"], config["num_lstm_layers"], config["num_hidden_layers"]) == (3, 2, 1)
    assert (config["intermediate_size"], config["num_key_value_heads"]) == (40, 1)
    assert config["target_model_type"] == "llama" and config["target_fingerprint"] and config["feature_layers"] == [0]

    drafter = FalconDraftModel.from_pretrained(output)
    # Without the held-out samples.
    data = TokenFile.load(workplace / "tokens.safetensors").first(28)
    assert torch.equal(drafter.draft_vocab_ids, frequent_tokens(data, VOCAB, 20)[0])
    mean, std = feature_statistics(tiny_target(), data)
    # Of stored features, in bfloat16.
    torch.testing.assert_close(drafter.feature_mean, mean, rtol=2e-2, atol=2e-3)
    torch.testing.assert_close(drafter.feature_std, std, rtol=2e-2, atol=2e-3)

    # A drafter to start from.
    assert (
        train.main(arguments(workplace, tmp_path / "next", init_from=output, max_steps=1, gradient_checkpointing=True))
        == 0
    )
    assert FalconDraftModel.from_pretrained(tmp_path / "next").config.block_size == 3


def test_a_drafter_of_blocks_from_one_of_one_token(workplace, tmp_path, capsys):
    options = {"max_steps": 1, "eval_samples": 0, "num_lstm_layers": 0}
    assert train.main(arguments(workplace, tmp_path / "one", block_size=1, **options)) == 0
    options |= {"init_from": tmp_path / "one", "block_size": 2, "conditioning_size": 8}
    assert train.main(arguments(workplace, tmp_path / "two", plan=True, **options)) == 0
    assert train.main(arguments(workplace, tmp_path / "two", **options)) == 0
    config = FalconDraftModel.from_pretrained(tmp_path / "two").config
    assert (config.block_size, config.conditioning_size) == (2, 8)


@pytest.mark.parametrize("prompts", quick([2], [0, 2]))
def test_what_a_run_leaves_to_look_at(workplace, tmp_path, capsys, monkeypatch, prompts):
    monkeypatch.setattr("hf_falcon.training.plot.draw", draw)
    options = {"eval_strategy": "steps", "eval_steps": 2, "logging_steps": 1, "final_tau_prompts": prompts}
    # A piece that is not the last decodes nothing.
    assert train.main(arguments(workplace, tmp_path, max_minutes=0, **options)) == 0
    assert "decoded" not in capsys.readouterr().out
    assert train.main(arguments(workplace, tmp_path, **options)) == 0
    history = json.loads((tmp_path / "trainer_state.json").read_text())["log_history"]
    assert [row["step"] for row in history if "eval_top8_depth2" in row] == [2, 3]
    assert all(0 <= row["eval_estimated_tau_tree"] <= 2 for row in history if "eval_loss" in row)
    final = [row for row in history if "final_tau" in row]
    assert len(final) == (prompts > 0) == ("2 held-out prompts decoded: " in (printed := capsys.readouterr().out))
    assert (" tokens a round (tau " in printed) == (prompts > 0)
    assert all(0 <= row["final_alpha"] <= 1 for row in final)
    image = (tmp_path / "training.png").read_bytes()
    assert image.startswith(b"\x89PNG") and len(image) > 10_000


def test_held_out_texts_are_decoded_from_their_first_halves(workplace, tmp_path, monkeypatch):
    """The first token of a plain text counts as its prompt."""
    samples = [torch.arange(3 + number, 12 + number) for number in range(20)]
    path, decoded = tmp_path / "tokens.safetensors", []
    TokenFile.from_samples(samples, [1] * 19 + [4], [0.0] * 20, VOCAB).save(path)
    monkeypatch.setattr(train, "decoded_tau", lambda target, drafter, prompts: decoded.extend(prompts) or {})
    options = {"data": path, "eval_samples": 2, "final_tau_prompts": 2, "max_steps": 1}
    assert train.main(arguments(workplace, tmp_path / "drafter", **options)) == 0
    assert [each.tolist() for each in decoded] == [samples[18][:4].tolist(), samples[19][:4].tolist()]


def test_the_same_command_goes_on(workplace, tmp_path):
    command = arguments(workplace, tmp_path, max_minutes=0)
    for step in (1, 2, 3, 3):
        assert train.main(command) == 0
        state = json.loads((tmp_path / "trainer_state.json").read_text())
        assert state["global_step"] == step
    whole_run = tmp_path / "whole"
    assert train.main(arguments(workplace, whole_run)) == 0
    pieces, expected = (FalconDraftModel.from_pretrained(folder) for folder in (tmp_path, whole_run))
    for name, tensor in expected.state_dict().items():
        torch.testing.assert_close(pieces.state_dict()[name], tensor, rtol=0, atol=1e-6, msg=name)


@pytest.mark.slow
def test_kill_9(workplace, tmp_path):
    """Real processes and a real SIGKILL, at random moments of a run that saves after every step."""
    options = {"max_steps": 60, "save_steps": 1, "save_total_limit": 3, "logging_steps": 1, "eval_samples": 2}
    options |= {"eval_strategy": "steps", "eval_steps": 5}
    assert train.main(arguments(workplace, tmp_path / "whole", **options)) == 0
    command = [sys.executable, "-m", "hf_falcon", "train", *arguments(workplace, tmp_path / "killed", **options)]
    chance = random.Random(0)
    for kill in range(1, 5):
        process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        try:
            while get_last_step(tmp_path / "killed") < 8 * kill and process.poll() is None:
                time.sleep(0.005)
            time.sleep(0.1 * chance.random())
            assert process.poll() is None
        finally:
            process.kill()
            process.wait()
    assert get_last_step(tmp_path / "killed") < 60
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)

    histories = []
    for name in ("whole", "killed"):
        history = json.loads((tmp_path / name / "trainer_state.json").read_text())["log_history"]
        for row in history:
            for clock in [name for name in row if "per_second" in name or "runtime" in name]:
                del row[clock]
        histories.append([row for row in history if "train_loss" not in row])
    assert len(histories[0]) >= 60 and histories[0] == histories[1]
    whole, killed = (load_file(tmp_path / name / "model.safetensors") for name in ("whole", "killed"))
    assert all(torch.equal(whole[name], killed[name]) for name in whole)


def get_last_step(folder) -> int:
    return max((int(path.name.split("-")[1]) for path in folder.glob("checkpoint-*")), default=0)


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"block_size": 0}, "`block_size` is 0"),
        ({"architecture": "medusa"}, "`architecture` is 'medusa': choose one of falcon, eagle3, medusa_like"),
        ({"draft_vocab_size": 65}, "`draft_vocab_size` is 65: set it between 1 and `vocab_size` (64)"),
        ({"max_length": 4}, "`max_length` (4) tokens: raise it"),
        ({"eval_samples": -1}, "`eval_samples` is -1: give 0 (none) or more."),
        ({"glancing_ratio": 2}, "`glancing_ratio` is 2.0: give a number from 0 to 1."),
        ({"unroll_passes": 2}, "Set `unroll_passes=1` or `num_lstm_layers=0`"),
        ({"data": "nowhere.safetensors"}, "There is no token file nowhere.safetensors"),
        ({"vocabulary_data": "more"}, "`vocabulary_data` is ['more'], which is counted for a new drafter's"),
        ({"vocabulary_data": "more", "draft_vocab_size": 3, "init_from": "old"}, "give that without `init_from`, or"),
        ({"vocabulary_data": "more", "draft_vocab_size": 3, "plan": True}, "There is no token file more"),
        ({"target_dtype": "int8"}, "`dtype` is 'int8'; choose one of"),
        ({"blocksize": 3}, "Unknown argument `--blocksize`: did you mean `--block_size`?"),
        ({"data": "large"}, f"has token {VOCAB}, but the target's `vocab_size` is {VOCAB}: give token files"),
        (
            {"learning_rate": 1e30, "max_grad_norm": 0, "max_steps": 9},
            "The loss is nan at step 1: lower `learning_rate`",
        ),
    ],
)
def test_wrong_arguments(workplace, tmp_path, capsys, monkeypatch, changes, message):
    monkeypatch.delenv("HF_FALCON_DEBUG", raising=False)
    if changes.get("data") == "large":
        changes = {"data": tmp_path / "large.safetensors"}
        TokenFile.from_samples([torch.tensor([1, 2, VOCAB])], [1], [0.0], VOCAB + 1).save(changes["data"])
    assert entry.main(["train", *arguments(workplace, tmp_path, **changes)]) == 1
    # A progress bar may stand around it.
    error = capsys.readouterr().err
    assert "hf-falcon train: error: " in error and message in error and "Traceback" not in error


def test_vocabulary_data_are_read_before_the_features(workplace, tmp_path):
    options = {"vocabulary_data": "nowhere", "draft_vocab_size": 3, "features_dir": tmp_path / "features"}
    with pytest.raises(FileNotFoundError, match="There is no token file nowhere"):
        train.main(arguments(workplace, tmp_path / "drafter", **options))
    assert not list(tmp_path.glob("features/*"))


def test_folders_that_no_run_writes_to(workplace, tmp_path, monkeypatch):
    """They are refused before a file is read."""
    monkeypatch.setattr(train.TokenFile, "load", lambda path: pytest.fail("loaded"))
    (tmp_path / "file").touch()
    (tmp_path / "old").mkdir()
    for output, message in (
        (tmp_path / "file" / "new", f"but nothing can be written in {tmp_path / 'file'}: give another folder"),
        (workplace / "target", "the folder of the target itself: give another one"),
        (f"{tmp_path}/new/../old", "the folder of the drafter itself: give another one"),
    ):
        with pytest.raises(ValueError) as error:
            train.main(arguments(workplace, output, init_from=tmp_path / "old"))
        assert f"`output_dir` is {str(output)!r}, {message}" in str(error.value)


def test_a_run_is_not_continued_as_another_drafter(workplace, tmp_path):
    checkpoint, before = tmp_path / "checkpoint-1", asdict(DrafterArguments(data=["a"]))
    checkpoint.mkdir()
    (checkpoint / "provenance.json").write_text(json.dumps({"arguments": before}))
    changes = {"feature_layers": [0], "eval_samples": 3, "block_size": 2, "draft_vocab_size": 20, "init_from": "b"}
    for name, value in changes.items():
        message = f"`{name}` is {value!r}, and was {before[name]!r} in the run of {str(checkpoint)!r}: give that to "
        with pytest.raises(ValueError, match=re.escape(message)):
            refuse_other_run(checkpoint, {"arguments": {**before, name: value}})
    # What a checkpoint does not depend on.
    refuse_other_run(checkpoint, {"arguments": {**before, "final_tau_prompts": 1, "features_dir": "features"}})
    with pytest.raises(ValueError, match="`block_size` is 2, and was 1"):
        train.main(arguments(workplace, tmp_path))


def test_a_drafter_for_another_target_takes_its_name(workplace, tmp_path, caplog):
    """As `adapt` does; and responses of the first target are not the second's own."""
    drafter = new_drafter(tiny_target(), num_lstm_layers=0, block_size=1)
    name_target(drafter, tiny_target())
    drafter.save_pretrained(tmp_path / "old")
    other = new_target("llama", initializer_range=0.1)
    other.save_pretrained(tmp_path / "other")
    tiny_tokenizer().save_pretrained(tmp_path / "other")
    data = TokenFile.load(workplace / "tokens.safetensors")
    data.metadata["target_fingerprint"] = weights_fingerprint(tiny_target())
    data.save(tmp_path / "tokens.safetensors")
    options = {"data": tmp_path / "tokens.safetensors", "target": tmp_path / "other", "init_from": tmp_path / "old"}
    options |= {"num_lstm_layers": 0, "block_size": 1, "max_steps": 1}
    with caplog.at_level("WARNING", logger="hf_falcon"):
        assert train.main(arguments(workplace, tmp_path / "new", **options)) == 0
    config = FalconDraftModel.from_pretrained(tmp_path / "new").config
    assert config.target_fingerprint == weights_fingerprint(other) and config.target_name_or_path.endswith("other")
    assert "responses of another target" in caplog.text


def test_a_start_for_a_larger_target_names_its_own(workplace, tmp_path):
    drafter = new_drafter(new_target("llama", vocab_size=2 * VOCAB), num_lstm_layers=0, block_size=1)
    drafter.config.target_name_or_path = "the-larger-one"
    drafter.save_pretrained(tmp_path / "old")
    options = {"init_from": tmp_path / "old", "num_lstm_layers": 0, "block_size": 1, "max_steps": 1}
    with pytest.raises(ValueError, match="this drafter was made for the-larger-one"):
        train.main(arguments(workplace, tmp_path / "new", **options))


EAGLE3 = {"architecture": "eagle3", "block_size": 1, "num_lstm_layers": 0, "draft_vocab_size": 20, "eval_samples": 2}


def test_train_eagle3(workplace, tmp_path, capsys):
    """In one run, and in pieces of one step."""
    whole, pieces = tmp_path / "whole", tmp_path / "pieces"
    assert train.main(arguments(workplace, whole, final_tau_prompts=1, **EAGLE3)) == 0
    assert "tokens a round" in capsys.readouterr().out
    for _ in range(3):
        assert train.main(arguments(workplace, pieces, max_minutes=1e-6, **EAGLE3)) == 0
    config = json.loads((whole / "config.json").read_text())
    assert config["speculators_model_type"] == "eagle3"
    assert config["transformer_layer_config"]["num_hidden_layers"] == 1
    assert config["eagle_aux_hidden_state_layer_ids"] and config["target_fingerprint"]
    drafter, other = AutoDrafter.from_pretrained(whole), AutoDrafter.from_pretrained(pieces)
    # Without the held-out samples.
    data = TokenFile.load(workplace / "tokens.safetensors").first(28)
    assert torch.equal(drafter.draft_vocab_ids, frequent_tokens(data, VOCAB, 20)[0])
    for name, tensor in drafter.state_dict().items():
        torch.testing.assert_close(other.state_dict()[name], tensor, msg=name)
    # The head is its own: it starts from the target's, and learns.
    rows = tiny_target().get_output_embeddings().weight[drafter.draft_vocab_ids]
    assert not torch.equal(drafter.lm_head.weight, rows)

    more = tmp_path / "more"
    options = {**EAGLE3, "init_from": whole, "feature_layers": 1}
    assert train.main(arguments(workplace, more, **options)) == 0
    assert AutoDrafter.from_pretrained(more).config.feature_layers == drafter.config.feature_layers


def test_a_resumed_run_learns_the_tokens_of_its_checkpoint(workplace, tmp_path):
    """The same losses, whatever is counted for the draft vocabulary of a new drafter."""
    text = tmp_path / "text.safetensors"
    TokenFile.from_samples([torch.arange(VOCAB - 20, VOCAB).repeat(30)], [1], [-1.0], VOCAB).save(text)
    histories = []
    for changes in ({}, {"vocabulary_data": text}):
        output = tmp_path / f"drafter-{len(histories)}"
        options = {**EAGLE3, "logging_steps": 1}
        assert train.main(arguments(workplace, output, max_minutes=0, **options)) == 0
        assert train.main(arguments(workplace, output, **options, **changes)) == 0
        rows = json.loads((output / "trainer_state.json").read_text())["log_history"]
        histories.append([row.get("loss", row.get("eval_loss")) for row in rows if {"loss", "eval_loss"} & {*row}])
    assert len(histories[0]) == 4 and histories[0] == histories[1]


@pytest.mark.parametrize("name, value", [("regression_weight", 1.0), ("feature_noise", 0.1), ("block_size", 2)])
def test_what_eagle3_does_not_have(workplace, tmp_path, name, value):
    with pytest.raises(ValueError, match=f"`{name}` is {value}.* leave it out"):
        train.main(arguments(workplace, tmp_path / "drafter", **{**EAGLE3, name: value}))


def test_prompts_that_are_held_out_are_not_trained_on(workplace, tmp_path, caplog):
    """Two files may have two responses to each prompt, as `hf-falcon prepare` writes with `--responses` twice."""
    path, samples = tmp_path / "tokens.safetensors", []
    for first in (40, 50):
        samples += [torch.cat((torch.arange(3 + n, 8 + n), torch.arange(first, first + 9))) for n in range(20)]
    # And plain texts, whose prompts are their first tokens.
    samples += [torch.cat((torch.tensor([3]), torch.arange(20 + n, 30 + n))) for n in range(10)]
    data = TokenFile.from_samples(samples, [5] * 40 + [1] * 10, [0.0] * 50, VOCAB)
    data.first(40).save(path)
    words, types = (
        arguments(workplace, tmp_path, data=path, eval_samples=3),
        (DrafterArguments, FalconTrainingArguments),
    )
    options, _ = parse_run(words, types, prog="train", description=None)
    trained, held_out = train._split(options, data.first(40))
    assert len(held_out) == 3 and len(trained) == 40 - 2 * 3
    assert "3 samples are left out" in caplog.text
    trained, held_out = train._split(options, data)
    assert len(held_out) == 3 and len(trained) == 47
    one = TokenFile.from_samples(samples[:1] * 10, [5] * 10, [0.0] * 10, VOCAB)
    with pytest.raises(ValueError, match="All prompts are among those .*: change `eval_samples` .3."):
        train._split(options, one)
