# Copyright 2026 The hf_falcon authors. Licensed under the Apache License, Version 2.0.
"""`hf-falcon tune`: what a round costs and what trees of each size would gain."""

import json

import pytest
import torch
from eagle3_models import REFERENCES, new_eagle3, reference_target, write_original
from tiny_models import new_drafter, new_target, prompt, tiny_drafter, tiny_target, tiny_tokenizer
from transformers import AutoModelForCausalLM, GenerationConfig

from hf_falcon import AutoDrafter, CausalLMDrafter, cost_files
from hf_falcon.bench import tuning
from hf_falcon.commands import tune
from hf_falcon.core.costs import CostKey
from hf_falcon.core.draft_options import DraftOptions
from hf_falcon.cpu.kept_programs import shelf_of
from hf_falcon.cpu.packing import is_packed


def test_predicted_speedup():
    gains = tuning.speedups(torch.tensor([[0.0, 0.5, 0.7], [0.0, 0.5, 0.9]]), [1.0, 1.1, 1.2], 0.1, 0.3)
    expected = [[1 / 1.1, 1.5 / 1.2, 1.7 / 1.3], [1 / 1.4, 1.5 / 1.5, 1.9 / 1.6]]
    assert gains.tolist() == [pytest.approx(row) for row in expected]


@pytest.mark.parametrize("block_size", [1, 2])
def test_expected_tokens(block_size):
    """More nodes and more passes have more tokens right, and never more than there are levels."""
    target = tiny_target("llama")
    drafter = tiny_drafter(target, block_size)
    options = DraftOptions(num_assistant_tokens=6, num_draft_passes=3, assistant_confidence_threshold=0.0)
    expected, commit, draft_pass = tuning.drafting(drafter, target, [(prompt(12), 4), (prompt(9, seed=1), 1)], options)
    assert expected.shape == (3, 7) and commit > 0 and draft_pass > 0
    assert (expected[:, 0] == 0).all() and (expected.diff(dim=1) > 0).all() and (expected.diff(dim=0) >= 0).all()
    assert all(float(row.max()) <= block_size * (index + 1) for index, row in enumerate(expected))


def test_tune_command(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("HF_FALCON_CACHE", str(tmp_path / "cache"))
    target = tiny_target("llama")
    target.save_pretrained(tmp_path / "target")
    tiny_tokenizer().save_pretrained(tmp_path / "target")
    tiny_drafter(target, num_assistant_tokens=5, num_draft_passes=2).save_pretrained(tmp_path / "drafter")
    (tmp_path / "prompts.jsonl").write_text('{"turns": ["abc"]}\n{"turns": ["defg"]}\n')
    words = f"--target {tmp_path}/target --drafter {tmp_path}/drafter --data {tmp_path}/prompts.jsonl --context 20"
    words += " --max_new_tokens 8 --seconds 0.2 --dtype float32 --device cpu"
    threads = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        assert tune.main(words.split()) == 0
    finally:
        torch.set_num_threads(threads)
    printed = capsys.readouterr().out
    assert "predicted:" in printed and "nodes" in printed
    found = json.loads((tmp_path / "drafter" / "tune.json").read_text())
    assert list(found["seconds"]) == ["0", "1", "3", "5"] and len(found["speedup"]) == 2
    assert found["speedup"][found["passes"] - 1][found["nodes"]] == max(map(max, found["speedup"]))
    assert (tmp_path / "drafter" / "tune.png").read_bytes()[:4] == b"\x89PNG"
    # What became of the drafts is kept with the drafter, beside the options that it had.
    kept = GenerationConfig.from_pretrained(tmp_path / "drafter")
    assert kept.num_assistant_tokens == 5 and kept.draft_calibration == found["draft_calibration"]
    assert list(found["seconds_by_threads"]) == ["2", "1"] and " threads: " in printed
    assert found["draft_calibration"] and DraftOptions.from_generation_config(kept).draft_calibration
    # The next call of `generate` reads these times.
    key = CostKey.of(target, 20, 5)._replace(threads=2)
    assert cost_files.load(target, key) == {int(n): s for n, s in found["seconds"].items()}


def test_tune_of_an_eagle3_drafter(tmp_path, monkeypatch):
    """The calibration goes into the folder as it was published."""
    monkeypatch.setenv("HF_FALCON_CACHE", str(tmp_path / "cache"))
    target = tiny_target("llama")
    target.save_pretrained(tmp_path / "target")
    tiny_tokenizer().save_pretrained(tmp_path / "target")
    folder = write_original(new_eagle3(target), tmp_path / "drafter")
    GenerationConfig(num_assistant_tokens=5, num_draft_passes=2).save_pretrained(folder)
    words = f"--target {tmp_path}/target --drafter {folder} --context 20 --max_new_tokens 8 --seconds 0.2 --pack"
    assert tune.main([*words.split(), "--dtype", "float32", "--device", "cpu"]) == 0
    found, kept = json.loads((folder / "tune.json").read_text()), AutoDrafter.from_pretrained(folder).generation_config
    assert len(found["speedup"]) == 2 and found["draft_pass"] > 0
    assert kept.draft_calibration == found["draft_calibration"] and kept.num_assistant_tokens == 5


def test_a_drafter_that_does_not_know_its_layers_yet():
    """They follow from the target, before anything else is asked."""
    drafter, target = AutoDrafter.from_pretrained(REFERENCES / "eagle3_original"), reference_target("eagle3_original")
    for name, value in {"num_assistant_tokens": 3, "num_draft_passes": 2}.items():
        setattr(drafter.generation_config, name, value)
    found = tuning.tune(target, drafter, [{"input_ids": prompt(9) % 48}], 20, 6, 0.1)
    assert found.speedups.shape == (2, 4) and drafter.config.feature_layers == [1, 3, 4]


def test_times_of_packed_weights(tmp_path, monkeypatch):
    """With `--compile` the packed models are compiled before, and the code is offered to later processes."""
    monkeypatch.setenv("HF_FALCON_CACHE", str(tmp_path / "cache"))
    target = tiny_target("llama")
    target.save_pretrained(tmp_path / "target")
    tiny_tokenizer().save_pretrained(tmp_path / "target")
    tiny_drafter(target, num_assistant_tokens=5, num_draft_passes=2).save_pretrained(tmp_path / "drafter")
    events = []
    monkeypatch.setattr(
        tune, "compile_rounds", lambda target, drafter: events.append((is_packed(target), is_packed(drafter)))
    )
    monkeypatch.setattr(tune, "tune", lambda *args: events.append("timed") or tuning.tune(*args))
    words = f"--target {tmp_path}/target --drafter {tmp_path}/drafter --context 20 --max_new_tokens 8 --seconds 0.2"
    words += " --pack --dtype float32 --device cpu"
    assert tune.main(words.split()) == 0
    assert json.loads((tmp_path / "drafter" / "tune.json").read_text())["packed"] is True
    shelf = shelf_of(AutoModelForCausalLM.from_pretrained(tmp_path / "target"), packed=True)
    assert events == ["timed"] and not shelf.is_offered
    assert tune.main([*words.split(), "--compile"]) == 0
    assert events[1:] == [(True, True), "timed"] and shelf.is_offered


@pytest.mark.parametrize("most, expected", [(6, [6, 3, 1]), (2, [2, 1]), (1, [])])
def test_seconds_by_threads(most, expected, monkeypatch):
    """And as many as before in the end, whatever happens."""
    now, used = [most], []
    monkeypatch.setattr(torch, "get_num_threads", lambda: now[-1])
    monkeypatch.setattr(torch, "set_num_threads", now.append)
    monkeypatch.setattr(tuning, "target_seconds", lambda *arguments: used.append(now[-1]) or {0: 1.0, 4: 2.0})
    found = tuning.seconds_by_threads(tiny_target("llama"), 20, 4, 0.1)
    assert found == dict.fromkeys(expected, (1.0, 2.0)) and used == expected and now[-1] == most
    if most > 1:
        monkeypatch.setattr(tuning, "target_seconds", None)
        with pytest.raises(TypeError):
            tuning.seconds_by_threads(tiny_target("llama"), 20, 4, 0.1)
        assert now[-1] == most


@pytest.mark.parametrize("tree, expected", [(1.9, 4), (1.8, 2)])
def test_fewer_threads_must_be_clearly_faster(tree, expected):
    assert tuning.fastest_count({4: (1.0, 2.0), 2: (0.5, tree), 1: (2.0, 3.0)}) == expected


@pytest.mark.parametrize("option", ["limit", "max_new_tokens", "context", "seconds"])
def test_wrong_numbers(option):
    with pytest.raises(ValueError, match=f"`{option}` is 0"):
        tune.TuneArguments(**{option: 0})


def test_an_output_below_a_file_is_refused_before_models_are_loaded(tmp_path, monkeypatch):
    monkeypatch.setattr(tune, "load_target", lambda *_: pytest.fail("loads a target"))
    (tmp_path / "file").touch()
    with pytest.raises(ValueError, match="`output` is .*file/out', but nothing can be written in .*/file: give"):
        tune.main(["--output", str(tmp_path / "file" / "out")])


def test_a_generation_config_that_holds_a_list_is_named(tmp_path):
    (tmp_path / "generation_config.json").write_text("[1]")
    with pytest.raises(ValueError, match=r"generation_config\.json holds a list, not an object"):
        tune.keep_calibration(tmp_path, [0.5], None)
    assert (tmp_path / "generation_config.json").read_text() == "[1]"


def test_expected_tokens_of_a_language_model():
    """Of a copy of the target: what it expects of an answer is what the target expects, behind its first token."""
    target = tiny_target("llama")
    drafter = CausalLMDrafter(new_target("llama"))
    options = DraftOptions(num_assistant_tokens=4, num_draft_passes=1, assistant_confidence_threshold=0.0)
    text = prompt(9)
    expected = tuning.drafting(drafter, target, [(text, 4)], options)[0][0]
    with torch.no_grad():
        probs = target(text).logits.softmax(dim=-1)[0, 4:]
    best = probs.topk(4).values.cumsum(dim=-1).mean(dim=0)
    torch.testing.assert_close(expected, torch.cat((torch.zeros(1), best)), rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("name", ["gpt2", "gpt-neo"])
def test_timing_stays_within_a_table_of_positions(name):
    """However long it takes: the context does not grow with every forward."""
    table = {"max_position_embeddings": 64, **({"n_positions": 64} if name == "gpt2" else {})}
    for context in (20, 50):
        found = tuning.target_seconds(new_target(name, **table), context, 8, 0.5)
        assert list(found) == [0, 1, 3, 5, 7, 8]


def test_rounds_are_timed_as_the_drafter_lets_them_run(monkeypatch):
    """Compiled ones do not give the layers that some drafters read."""
    layers = []

    class Run(tuning.TargetRun):
        def __init__(self, *args):
            super().__init__(*args)
            layers.append(args[4])

    monkeypatch.setattr(tuning, "TargetRun", Run)
    target = tiny_target("llama")
    tuning.tune(target, new_drafter(target, feature_layers=[1]), [{"input_ids": prompt(9)}], 12, 4, 0.01)
    assert set(map(tuple, layers)) == {(1,)}


def test_a_language_model_keeps_what_it_had_in_its_configuration(tmp_path):
    """transformers reads the fields of a text's end there only where there is no file of them."""
    model = new_target("llama", eos_token_id=7)
    tune.keep_calibration(tmp_path, [0.5], CausalLMDrafter(model))
    kept = GenerationConfig.from_pretrained(tmp_path)
    assert kept.eos_token_id == 7 and kept.draft_calibration == [0.5]
    tune.keep_calibration(tmp_path, [0.6], CausalLMDrafter(model))
    kept = GenerationConfig.from_pretrained(tmp_path)
    assert kept.eos_token_id == 7 and kept.draft_calibration == [0.6]
