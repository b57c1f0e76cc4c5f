# Copyright 2026 The hf_falcon authors. Licensed under the Apache License, Version 2.0.
"""What a user gets: the wheel, the source distribution, and a package that is quiet and light to import."""

import os
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

import hf_falcon
from hf_falcon.commands.main import COMMANDS

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "src" / "hf_falcon"


def run(*words: str, path: Path, cwd: Path) -> str:
    """Runs Python in a fresh process that finds `hf_falcon` in `path`, and gives what it prints."""
    environment = {"PATH": os.environ["PATH"], "PYTHONPATH": str(path), "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    environment |= {"HF_HOME": str(cwd / "home"), "HF_FALCON_CACHE": str(cwd / "costs")}
    result = subprocess.run(
        [sys.executable, *words], env=environment, cwd=cwd, capture_output=True, text=True, timeout=300
    )
    assert result.returncode == 0, result.stderr[-4000:]
    return result.stdout


IMPORT = """
import sys
from transformers import AutoConfig, AutoModel, LlamaConfig, LlamaForCausalLM
before = set(sys.modules)
import hf_falcon
print(*sorted(set(sys.modules) - before))
"""

GENERATE = """
import torch
torch.manual_seed(0)
sizes = dict(vocab_size=64, hidden_size=32, intermediate_size=48, num_attention_heads=4, num_hidden_layers=2)
special = dict(bos_token_id=None, eos_token_id=None, pad_token_id=0)
target = LlamaForCausalLM(LlamaConfig(**sizes, **special, initializer_range=0.3)).eval()
drafter = hf_falcon.FalconDraftModel(hf_falcon.FalconDraftConfig.from_target(target, intermediate_size=48)).eval()
drafter.save_pretrained("drafter")
drafter = AutoModel.from_pretrained("drafter")
drafter.generation_config.num_assistant_tokens_schedule = "constant"
options = dict(inputs=torch.randint(1, 64, (1, 12)), max_new_tokens=24, return_dict_in_generate=True)
for do_sample in (False, True):
    torch.manual_seed(0)
    plain = target.generate(**options, do_sample=do_sample)
    torch.manual_seed(0)
    assisted = target.generate(**options, do_sample=do_sample, assistant_model=drafter)
    assert assisted.sequences.tolist() == plain.sequences.tolist()
    assert assisted.draft_statistics.drafted_tokens > 0
"""


def test_an_import_brings_no_trainer_and_nothing_warns(tmp_path):
    """What takes time is transformers' own; and no warning on import, on loading and in `generate`."""
    brought = set(run("-W", "error", "-c", IMPORT + GENERATE, path=PACKAGE.parent, cwd=tmp_path).split())
    assert {"hf_falcon", "hf_falcon.core.hook"} <= brought
    # They are small.
    small = ("generation.streamers", "tokenization_utils_tokenizers", "trainer_utils")
    assert {name for name in brought if not name.startswith("hf_falcon")} <= {f"transformers.{name}" for name in small}
    heavy = ("bench", "commands", "training.trainer", "training.prepare")
    assert not [name for name in brought if name.startswith(tuple(f"hf_falcon.{each}" for each in heavy))]


@pytest.mark.parametrize("name", COMMANDS)
def test_help_is_readable(name, capsys, monkeypatch):
    from hf_falcon.commands import main as entry

    monkeypatch.setenv("COLUMNS", "80")
    with pytest.raises(SystemExit) as exit:
        entry.main([name, "--help"])
    assert exit.value.code == 0
    usage, description, arguments = capsys.readouterr().out.split("\n\n", 2)
    assert usage.startswith(f"usage: hf-falcon {name} ") and len(usage.splitlines()) <= 15
    assert description.startswith(f"`hf-falcon {name}")
    # Each argument of ours has a line that explains it.
    lines = [line for line in arguments.splitlines() if line.startswith("  -")]
    assert len(lines) > 2 and "--help" in lines[0]


def test_versions_agree():
    citation = (ROOT / "CITATION.cff").read_text()
    project = (ROOT / "pyproject.toml").read_text()
    version = hf_falcon.__version__
    assert f"\nversion: {version}\n" in citation and f'\nversion = "{version}"\n' in project


# As where no extra is installed.
WITHOUT_EXTRAS = """
import sys
for name in ("datasets", "fastapi", "gguf", "matplotlib", "openai", "tensorboard", "uvicorn"):
    sys.modules[name] = None
"""

HELP_OF_ALL = """
from hf_falcon.commands import main as entry
for name in entry.COMMANDS:
    try:
        entry.main([name, "--help"])
    except SystemExit as exit:
        assert exit.code == 0, name
"""

CARD = """
from hf_falcon.commands.card import write_card
assert write_card(drafter.config, "drafter")
print(hf_falcon.__file__)
"""


def build(source: Path, place: Path) -> tuple[Path, Path]:
    """The wheel and the source distribution that are built from a folder."""
    command = [sys.executable, "-m", "hatchling", "build", "-d", str(place)]
    subprocess.run(command, cwd=source, check=True, capture_output=True, timeout=300)
    return next(place.glob("*.whl")), next(place.glob("*.tar.gz"))


@pytest.mark.slow
def test_wheel_and_source_distribution(tmp_path):
    pytest.importorskip("hatchling", reason="comes with the extra `dev`")
    wheel, source = build(ROOT, tmp_path / "first")

    # The package's files, the card's template, and what is about them; no weights, tests or caches.
    files = {f"hf_falcon/{file.relative_to(PACKAGE).as_posix()}" for file in PACKAGE.rglob("*.py")}
    files |= {"hf_falcon/py.typed", "hf_falcon/hub_cards/model_card.md.jinja"}
    about = f"hf_falcon-{hf_falcon.__version__}.dist-info"
    names = ("METADATA", "RECORD", "WHEEL", "entry_points.txt", "licenses/LICENSE")
    with zipfile.ZipFile(wheel) as opened:
        assert set(opened.namelist()) == files | {f"{about}/{name}" for name in names}

    # The source distribution has tests and examples too, and no weights; the same wheel comes of it.
    with tarfile.open(source) as opened:
        opened.extractall(tmp_path, filter="data")
    unpacked = tmp_path / f"hf_falcon-{hf_falcon.__version__}"
    found = {file.relative_to(unpacked).as_posix() for file in unpacked.rglob("*") if file.is_file()}
    assert {"README.md", "CHANGELOG.md", "LICENSE", "Makefile", "constraints.txt", "CITATION.cff"} <= found
    for folder in ("examples", "tests"):
        assert {file.relative_to(ROOT).as_posix() for file in (ROOT / folder).rglob("*.py")} <= found
    # The documents' and the workflows' tests read these.
    cards = [file for file in (ROOT / "hub_cards").rglob("*") if file.suffix in (".md", ".json", ".jinja")]
    assert {name for name in found if name.startswith("hub_cards")} == {str(each.relative_to(ROOT)) for each in cards}
    assert {".ci/run", ".github/workflows/ci.yml", ".github/SECURITY.md", ".pre-commit-config.yaml"} <= found
    assert not any(name.endswith((".safetensors", ".pyc")) for name in found)
    again, _ = build(unpacked, tmp_path / "again")
    assert again.read_bytes() == wheel.read_bytes()

    # Installed without the index, it works by itself, extras or not.
    place = tmp_path / "installed"
    install = ["-m", "pip", "install", "--no-index", "--no-deps", "--no-compile", "--quiet", "--target", str(place)]
    subprocess.run([sys.executable, *install, str(wheel)], check=True, capture_output=True, timeout=300)
    work = tmp_path / "work"
    work.mkdir()
    printed = run("-W", "error", "-c", WITHOUT_EXTRAS + IMPORT + GENERATE + CARD, path=place, cwd=work)
    assert Path(printed.split()[-1]).is_relative_to(place)
    assert "A drafter for" in (work / "drafter" / "README.md").read_text()
    printed = run("-c", WITHOUT_EXTRAS + HELP_OF_ALL, path=place, cwd=work)
    assert all(f"usage: hf-falcon {name} " in printed for name in COMMANDS)
    assert run("-m", "hf_falcon", "--version", path=place, cwd=work) == f"hf-falcon {hf_falcon.__version__}\n"
