# Copyright 2026 The hf_falcon authors. Licensed under the Apache License, Version 2.0.
"""What the command line imports before it runs a command, and how it reports errors."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from eagle3_models import REFERENCES
from hub_server import TOKEN, USER, running_hub

import hf_falcon
from hf_falcon.commands import main as entry

SOURCE = str(Path(hf_falcon.__file__).parents[1])

# At the end of the process, the heavy packages that it imported.
WATCH = """
import atexit, os, sys
atexit.register(lambda: print("imported:", *sorted({"torch", "transformers"} & sys.modules.keys()), file=sys.stderr))
"""


def run(tmp_path, *words, **environment):
    (tmp_path / "sitecustomize.py").write_text(WATCH)
    variables = {**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path), SOURCE]), **environment}
    return subprocess.run([sys.executable, *words], env=variables, capture_output=True, text=True, timeout=120)


@pytest.fixture(params=["module", "script"])
def program(request, tmp_path):
    """`python -m hf_falcon`, and the script that pip installs."""
    if request.param == "module":
        return ["-m", "hf_falcon"]
    script = tmp_path / "hf-falcon"
    script.write_text("import sys\nfrom hf_falcon.commands.main import main\nsys.exit(main())\n")
    return [str(script)]


@pytest.mark.parametrize(
    "words, status, text",
    [(["--help"], 0, "commands:"), ([], 2, "commands:"), (["--version"], 0, "hf-falcon "), (["tran"], 2, "`train`?")],
)
def test_nothing_heavy_is_imported_before_a_command_runs(tmp_path, program, words, status, text):
    result = run(tmp_path, *program, *words)
    assert result.returncode == status and text in result.stdout + result.stderr
    assert result.stderr.splitlines()[-1] == "imported:"


@pytest.mark.parametrize("name", sorted(entry.COMMANDS))
def test_the_help_of_a_command_imports_nothing_heavy(tmp_path, name):
    """Except that of `train`, which lists the arguments of transformers' Trainer."""
    result = run(tmp_path, "-m", "hf_falcon", name, "--help")
    assert result.returncode == 0 and f"usage: hf-falcon {name}" in result.stdout
    heavy = ["torch", "transformers"] if name == "train" else []
    assert result.stderr.splitlines()[-1].split()[1:] == heavy


# A drafter of each method and layout.
DESCRIBED = [Path(SOURCE).parent / "hub_cards" / "falcon-draft-smollm2-135m-instruct"]
DESCRIBED += [REFERENCES / name for name in ("eagle3_llama", "eagle3_original", "dflash", "dflash_original", "dspark")]


@pytest.mark.parametrize("folder", DESCRIBED, ids=lambda folder: folder.name)
def test_a_drafter_is_described_without_heavy_imports(tmp_path, folder):
    result = run(tmp_path, "-m", "hf_falcon", "info", str(folder))
    assert result.returncode == 0 and "method " in result.stdout, result.stderr
    assert result.stderr.splitlines()[-1] == "imported:"


UPLOAD = """
import sys
from huggingface_hub import HfApi
HfApi().create_repo(sys.argv[1])
print(HfApi().upload_folder(repo_id=sys.argv[1], folder_path=sys.argv[2]).oid)
"""


def test_a_repository_is_described_without_heavy_imports(tmp_path):
    """Of one commit, and of the weights only the header is read."""
    with running_hub() as hub:
        environment = {"HF_ENDPOINT": hub.endpoint, "HF_TOKEN": TOKEN, "HF_HOME": str(tmp_path / "home")}
        environment |= {"HF_HUB_DISABLE_XET": "1"}
        uploaded = run(tmp_path, "-c", UPLOAD, f"{USER}/described", str(REFERENCES / "eagle3_llama"), **environment)
        hub.requests.clear()
        result = run(tmp_path, "-m", "hf_falcon", "info", f"{USER}/described", "--revision", "main", **environment)
    assert result.returncode == 0 and "EAGLE-3" in result.stdout, result.stderr
    assert result.stderr.splitlines()[-1] == "imported:"
    files = [path for _, path in hub.requests if "/resolve/" in path]
    assert files and all(f"/resolve/{uploaded.stdout.strip()}/" in path for path in files)


def test_a_command_finds_the_drafters_installed(tmp_path, program):
    """As after `import hf_falcon` elsewhere; the public names are there too."""
    command = "import hf_falcon\nfrom transformers import GenerationMixin\n\ndef main(argv):\n"
    command += "    assert GenerationMixin._assisted_decoding._is_falcon_hook\n"
    command += "    assert hf_falcon.FalconDraftModel.__module__ == 'hf_falcon.core.drafter'\n"
    command += "    assert 'FalconDraftModel' in dir(hf_falcon) and 'enable' in hf_falcon.__all__\n"
    command += "    print('ran', *argv)\n    return 3\n"
    (tmp_path / "stand_in.py").write_text(command)
    alias = "import sys, importlib.abc, importlib.util\n"
    alias += "class Finder(importlib.abc.MetaPathFinder):\n    def find_spec(self, name, path, target=None):\n"
    alias += "        if name == 'hf_falcon.commands.demo':\n"
    alias += f"            return importlib.util.spec_from_file_location(name, {str(tmp_path / 'stand_in.py')!r})\n"
    alias += "sys.meta_path.insert(0, Finder())\n"
    (tmp_path / "sitecustomize.py").write_text(alias)
    variables = {**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path), SOURCE])}
    words = [sys.executable, *program, "demo", "a", "b"]
    result = subprocess.run(words, env=variables, capture_output=True, text=True, timeout=300)
    assert (result.returncode, result.stdout) == (3, "ran a b\n"), result.stderr


IMPORTED = """
import importlib.util, pathlib, sys
import hf_falcon
import transformers
assert hasattr(transformers.GenerationMixin._assisted_decoding, "_is_falcon_hook")
# The methods are imported when they are asked for.
found = {name.rpartition(".")[2] for name in sys.modules if "hf_falcon.drafters" in name}
assert found == {
    "drafters", "auto", "checkpoints", "falcon_files", "files", "lookup_drafter", "target_sizes", "language_model",
    "language_model_runs", "methods", "mtp", "stored_tensors", "vocabularies",
}, found
assert not any(name.startswith("transformers.models.llama.modeling") for name in sys.modules)
# Pipelines are waited for, not imported.
assert "transformers.pipelines" not in sys.modules
name, path = "transformers.pipelines.base", [str(pathlib.Path(transformers.__file__).parent / "pipelines")]
# A search does not use the hook up: one that imports no parent package, and one that does.
assert any([each.find_spec(name, path) for each in list(sys.meta_path)]) and name not in sys.modules
assert importlib.util.find_spec(name) is not None
from transformers.pipelines import base
assert hasattr(base.load_assistant_model, "_is_falcon_hook")
assert not any(type(each).__module__ == "hf_falcon.pipelines" for each in sys.meta_path)
print("as expected")
"""


def test_elsewhere_an_import_installs_the_drafters(tmp_path):
    # Words of another program that look like the command line's.
    result = run(tmp_path, "-c", IMPORTED, "-m", "hf_falcon")
    assert result.returncode == 0 and result.stdout == "as expected\n", result.stderr
    with pytest.raises(AttributeError, match="no attribute 'Falcon'"):
        hf_falcon.Falcon  # noqa: B018


@pytest.fixture
def failing(monkeypatch):
    """Lets `hf-falcon demo` raise an error."""

    def install(error):
        module = type(sys)("hf_falcon.commands.demo")

        def run(argv):
            raise error

        module.main = run
        monkeypatch.setitem(sys.modules, "hf_falcon.commands.demo", module)

    monkeypatch.delenv("HF_FALCON_DEBUG", raising=False)
    return install


@pytest.mark.parametrize(
    "error, line",
    [
        (RuntimeError("`torch.compile` could not compile"), "`torch.compile` could not compile"),
        (ImportError("No module named 'rich'"), "No module named 'rich'"),
        (OSError("We couldn't connect.\n\n  Check it."), "We couldn't connect. Check it."),
        (ValueError(), "ValueError"),
    ],
)
def test_expected_errors_are_one_line(failing, capsys, monkeypatch, error, line):
    failing(error)
    assert entry.main(["demo"]) == 1
    assert capsys.readouterr().err == f"hf-falcon demo: error: {line}\n"
    monkeypatch.setenv("HF_FALCON_DEBUG", "1")
    with pytest.raises(type(error)):
        entry.main(["demo"])


def test_a_reader_that_ends_is_no_error(tmp_path):
    """As in `hf-falcon --help | head -1`."""
    reader, writer = os.pipe()
    os.close(reader)
    result = subprocess.run(
        [sys.executable, "-m", "hf_falcon", "--help"], stdout=writer, stderr=subprocess.PIPE, cwd=tmp_path, timeout=60
    )
    os.close(writer)
    assert result.returncode == 1 and result.stderr == b""


def shell(command, tmp_path, **environment):
    """Runs a line of the shell with `falcon` for `hf-falcon`: which streams are closed is the shell's to say."""
    line = command.replace("falcon", f"{sys.executable} -m hf_falcon", 1)
    return subprocess.run(
        ["sh", "-c", line], env={**os.environ, **environment}, capture_output=True, text=True, cwd=tmp_path, timeout=60
    )


@pytest.mark.parametrize(
    "command, status, text",
    [
        ("falcon generate <&-", 1, "`prompt` is empty: give `--prompt TEXT`"),
        ("falcon --version >&-", 0, ""),
        ("falcon tran 2>&-", 2, ""),
        ("falcon --help >/dev/full", 1, "hf-falcon --help: error: "),
        ("falcon --version >/dev/full", 1, "hf-falcon"),
    ],
)
def test_streams_that_are_closed_or_full(command, status, text, tmp_path):
    if "/dev/full" in command and not os.path.exists("/dev/full"):
        pytest.skip("no /dev/full here")
    result = shell(command, tmp_path)
    assert result.returncode == status and text in result.stderr and "Traceback" not in result.stderr


def test_a_character_that_stdout_cannot_encode_is_replaced(command_that_prints, tmp_path):
    result = shell("falcon demo", tmp_path, PYTHONIOENCODING="ascii", PYTHONPATH=command_that_prints)
    assert (result.returncode, result.stdout) == (0, "Fran?ois\n")


@pytest.fixture
def command_that_prints(tmp_path):
    """A search path with which `hf-falcon demo` prints a text."""
    (tmp_path / "sitecustomize.py").write_text(
        "import sys, types\n"
        "sys.modules['hf_falcon.commands.demo'] = types.SimpleNamespace(main=lambda argv: print('François') or 0)\n"
    )
    return os.pathsep.join([str(tmp_path), SOURCE])
