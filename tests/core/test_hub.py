# Copyright 2026 The hf_falcon authors. Licensed under the Apache License, Version 2.0.
"""A drafter as a repository: saved with its code, pushed, and loaded with and without `hf_falcon`."""

import ast
import json
import os
import subprocess
import sys
from pathlib import Path
from unittest.mock import Mock

import pytest
from hub_server import TOKEN, USER, running_hub
from tiny_models import prompt, tiny_drafter, tiny_target, tiny_tokenizer

import hf_falcon
from hf_falcon.drafters import files
from hf_falcon.drafters.falcon_files import core_files, travelling_code

SOURCE = Path(hf_falcon.__file__).parent / "core"
PACKAGES = str(SOURCE.parents[1])
NAME = f"{USER}/falcon-draft-tiny"
# What a repository has to carry, and a user to read before `trust_remote_code=True`.
LINES_AT_MOST, FILES_AT_MOST = 5000, 20

# What every fresh process starts with.
BOTH = """
import sys, time, torch
sleep = time.sleep
time.sleep = lambda seconds: sleep(min(seconds, 0.05))  # huggingface_hub waits for seconds before it tries again
from transformers import AutoModel, AutoModelForCausalLM, GenerationMixin
target = AutoModelForCausalLM.from_pretrained(TARGET)
ids = torch.tensor([IDS])
options = dict(do_sample=False, max_new_tokens=24, pad_token_id=0, return_dict_in_generate=True)
plain = target.generate(ids, **options)

def check(**kwargs):
    output = target.generate(ids, **options, **kwargs)
    assert output.sequences.tolist() == plain.sequences.tolist()
    assert output.draft_statistics.rounds > 0
    return output

def refused(error, part, call, *args, **kwargs):
    try:
        call(*args, **kwargs)
    except error as found:
        assert part in str(found), found
    else:
        raise AssertionError("not refused")
"""
WITH_PACKAGE = f"import hf_falcon\n{BOTH}"
# An import fails as where it is not installed.
WITHOUT_PACKAGE = f"import sys\nsys.modules['hf_falcon'] = None\n{BOTH}"


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """Folders of a tiny target and of its drafter."""
    folder = tmp_path_factory.mktemp("saved")
    target = tiny_target("llama")
    target.save_pretrained(folder / "target")
    tiny_tokenizer().save_pretrained(folder / "target")
    tiny_drafter(target, num_assistant_tokens=9).save_pretrained(folder / "drafter")
    return folder


@pytest.fixture
def hub():
    with running_hub() as server:
        yield server


@pytest.fixture
def fresh(saved, tmp_path):
    """Runs code in a fresh process, with a cache of its own, and gives what it prints."""

    def run(code: str, start: str = WITHOUT_PACKAGE, path: str = "", **environment: str) -> str:
        start = start.replace("TARGET", repr(str(saved / "target"))).replace("IDS", repr(prompt(12)[0].tolist()))
        own = {"HF_HOME": str(tmp_path / "home"), "PYTHONPATH": path, "PATH": os.environ["PATH"]}
        own |= {
            "OMP_NUM_THREADS": "1",
            "HF_HUB_DISABLE_XET": "1",
            "HF_HUB_OFFLINE": "0",
            "HF_ENDPOINT": "http://127.0.0.1:9",
        }
        result = subprocess.run(
            [sys.executable, "-c", f"{start}\n{code}"],
            env={**own, **environment},
            # Nobody answers questions, and no folder of the project is on the path.
            cwd=tmp_path,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=300,
        )
        assert result.returncode == 0, result.stderr[-9000:]
        return result.stdout

    return run


def test_saved_folder_is_self_contained(saved):
    folder = saved / "drafter"
    code = {path.name for path in folder.glob("*.py")}
    # Computed by following imports; the loop is imported inside a function.
    assert code == {path.name for path in core_files()}
    assert {"modeling_falcon_draft.py", "configuration_falcon_draft.py", "decoding.py", "tree.py"} <= code
    assert sorted(path.suffix for path in folder.iterdir() if path.is_file() and path.suffix != ".py") == [
        ".json",
        ".json",
        ".safetensors",
    ]


def test_what_travels_is_short_and_is_the_core_without_most_docstrings(saved):
    written = {path.name: path.read_text() for path in (saved / "drafter").rglob("*.py")}
    written["custom_generate.py"] = written.pop("generate.py")
    assert len(written) <= FILES_AT_MOST and sum(len(text.splitlines()) for text in written.values()) <= LINES_AT_MOST
    for name, text in written.items():
        source = (SOURCE / name).read_text()
        first, second, *_ = text.splitlines()
        assert first == source.splitlines()[0] and f"Written by hf_falcon {hf_falcon.__version__}" in second
        assert without_docstrings(text) == without_docstrings(source), name
        # Comments and blank lines are left as they are.
        comments = [[line for line in each.splitlines() if line.lstrip().startswith("#")] for each in (text, source)]
        assert comments[0] == [first, second, *comments[1][1:]], name


def without_docstrings(source: str) -> str:
    tree = ast.parse(source)
    for node in ast.walk(tree):
        if isinstance(node, (ast.ClassDef, ast.FunctionDef)) and ast.get_docstring(node) is not None:
            node.body[0] = ast.Pass()
            # What is only a docstring stays a body.
            node.body = node.body[1:] or node.body
    return ast.unparse(tree)


MODULE = '''# The licence.
"""The module, whole. All of it."""


class Public:
    """
    What it is: over two
    lines of text. And more.

    Args:
        value: more.
    """

    x = """no docstring"""

    def method(self):
        """See [`Other`]."""

        def inner():
            """Inside."""
            return """
            text"""

        return inner  # a comment

    def empty(self):
        """See [`Other`]."""

    def _own(self):
        """A private method."""
        # Why.
        return 1


class _Private:
    """One."""

    def method(self):
        """Two."""
        return 2
'''

SHORT = '''"""The module, whole. All of it."""


class Public:
    """What it is: over two lines of text."""

    x = """no docstring"""

    def method(self):
        def inner():
            return """
            text"""

        return inner  # a comment

    def empty(self):
        """See [`Other`]."""

    def _own(self):
        # Why.
        return 1


class _Private:
    def method(self):
        return 2
'''


def test_docstrings_that_travel():
    first, second, rest = travelling_code(MODULE).split("\n", 2)
    assert first == "# The licence." and second.startswith("# Written by hf_falcon ")
    assert rest == SHORT


def test_core_imports_nothing_that_does_not_travel():
    for file in core_files():
        text = file.read_text()
        assert "from . import" not in text and "from .." not in text, file.name
        assert file.parent == SOURCE


LOADS_FROM_FOLDER = """
# Nothing runs, and nobody is asked, without trust_remote_code.
before = set(sys.modules)
refused(ValueError, "trust_remote_code=True", AutoModel.from_pretrained, DRAFTER)
refused(ValueError, "trust_remote_code=True", target.generate, ids, custom_generate=DRAFTER, **options)
assert not any("falcon_draft" in name for name in set(sys.modules) - before)
assert not hasattr(GenerationMixin._assisted_decoding, "_is_falcon_hook")

check(custom_generate=DRAFTER, trust_remote_code=True)
stock = GenerationMixin._assisted_decoding.__wrapped__
drafter = AutoModel.from_pretrained(DRAFTER, trust_remote_code=True)
assert type(drafter).__module__.startswith("transformers_modules.")
check(assistant_model=drafter)
check(custom_generate=DRAFTER, trust_remote_code=True, assistant_model=drafter)
refused(TypeError, "target.generate", drafter.generate, ids)
# Several copies of the code (the file of custom generation loads one of its own) wrap once.
assert GenerationMixin._assisted_decoding.__wrapped__ is stock and not hasattr(stock, "__wrapped__")

# A target that takes no tree: chains are the package's.
from transformers import BloomConfig, BloomForCausalLM
bloom = BloomForCausalLM(BloomConfig(vocab_size=64, hidden_size=32, n_layer=2, n_head=4)).eval()
greedy = dict(do_sample=False, max_new_tokens=8, pad_token_id=0)
assert bloom.generate(ids, assistant_model=drafter, **greedy).tolist() == bloom.generate(ids, **greedy).tolist()
static = dict(assistant_model=drafter, draft_tree="static")
refused(ValueError, "`draft_tree` is 'static'", target.generate, ids, **static, **greedy)

drafter.save_pretrained("again")
check(assistant_model=AutoModel.from_pretrained("again", trust_remote_code=True))
"""


def test_folder_loads_without_the_package(saved, fresh, tmp_path):
    fresh(LOADS_FROM_FOLDER.replace("DRAFTER", repr(str(saved / "drafter"))))
    # What was loaded as custom code is saved with its code, by transformers, which knows nothing of custom generation.
    first, again = saved / "drafter", tmp_path / "again"
    names = {str(path.relative_to(first)) for path in first.rglob("*") if path.is_file()}
    names -= {"custom_generate/generate.py", "custom_generate/requirements.txt"}
    assert names == {str(path.relative_to(again)) for path in again.rglob("*") if path.is_file()}
    assert all((first / name).read_bytes() == (again / name).read_bytes() for name in names - {"config.json"})
    expected, found = (json.loads((folder / "config.json").read_text()) for folder in (first, again))
    # The digests of other files would be wrong.
    assert found == {**expected, "weights_sha256": {}}
    assert type(hf_falcon.FalconDraftModel.from_pretrained(again)) is hf_falcon.FalconDraftModel


LOADS_WITH_PACKAGE = """
for kwargs in ({}, {"trust_remote_code": True}):
    drafter = AutoModel.from_pretrained(DRAFTER, **kwargs)
    assert type(drafter) is hf_falcon.FalconDraftModel
    assert type(check(assistant_model=drafter)) is hf_falcon.FalconGenerateOutput
assert type(check(custom_generate=DRAFTER, trust_remote_code=True)) is hf_falcon.FalconGenerateOutput
assert not any("modeling_falcon_draft" in name for name in sys.modules if name.startswith("transformers_modules"))
"""


def test_package_wins_where_it_is_imported(saved, fresh):
    code = LOADS_WITH_PACKAGE.replace("DRAFTER", repr(str(saved / "drafter")))
    fresh(code, start=WITH_PACKAGE, path=PACKAGES)


PUSHES = """
import json, os, urllib.request
from huggingface_hub import HfApi
from hf_falcon import FalconDraftModel

def faults(**wanted):
    data = json.dumps({name.replace("_", " "): count for name, count in wanted.items()}).encode()
    urllib.request.urlopen(os.environ["HF_ENDPOINT"] + "/faults", data=data).read()

drafter = FalconDraftModel.from_pretrained(DRAFTER)
NAME = "tester/falcon-draft-tiny"
refused(Exception, "401", drafter.push_to_hub, NAME, token="hf_of_somebody_else")
drafter.push_to_hub(NAME, card="# the card")
first = HfApi().model_info(NAME).sha

# An upload that is cut, or a commit that is refused, changes nothing.
drafter.norm.weight.data += 1.0
faults(cut_upload=100)
refused(Exception, "", drafter.push_to_hub, NAME)
faults(refuse_commit=100)
refused(Exception, "refused", drafter.push_to_hub, NAME)
faults()
assert HfApi().model_info(NAME).sha == first

drafter.save_pretrained("local", push_to_hub=True, repo_id=NAME, commit_message="second")
drafter.push_to_hub(NAME, revision="experiment", commit_message="on a branch")
drafter.push_to_hub("tester/private", private=True)

# Pipelines take drafters by name, private ones with the token of the environment.
from transformers import AutoTokenizer, pipeline
texts = []
for name in (None, NAME, "tester/private"):
    tokenizer = AutoTokenizer.from_pretrained(target.name_or_path)
    write = pipeline("text-generation", model=target, tokenizer=tokenizer, assistant_model=name)
    torch.manual_seed(0)
    texts.append(write("abcabc", max_new_tokens=24))
    assert name is None or type(write.assistant_model) is hf_falcon.FalconDraftModel
assert texts[0] == texts[1] == texts[2]
print(first)
"""

LOADS_FROM_HUB = """
import json, os, urllib.request
from huggingface_hub import constants

def faults(**wanted):
    data = json.dumps({name.replace("_", " "): count for name, count in wanted.items()}).encode()
    urllib.request.urlopen(os.environ["HF_ENDPOINT"] + "/faults", data=data).read()

NAME, load = "tester/falcon-draft-tiny", AutoModel.from_pretrained
refused(ValueError, "trust_remote_code=True", load, NAME)
refused(OSError, "tester/none", load, "tester/none", trust_remote_code=True)
refused(OSError, "tester/private", load, "tester/private", trust_remote_code=True)
refused(OSError, "no-such-revision", load, NAME, revision="no-such-revision", trust_remote_code=True)

# The connection breaks again and again: an error, and no half of a file that a later load would take.
faults(cut_download=1000)
refused(Exception, "", load, NAME, revision=FIRST, trust_remote_code=True)
# It breaks once, and is slow: the download still ends well.
faults(cut_download=1, slow=2)
drafter = load(NAME, revision=FIRST, trust_remote_code=True)
faults()
check(assistant_model=drafter)
newest = load(NAME, trust_remote_code=True)
assert (newest.norm.weight - drafter.norm.weight == 1.0).all()
branch = load(NAME, revision="experiment", trust_remote_code=True)
assert torch.equal(branch.norm.weight, newest.norm.weight)
check(assistant_model=load("tester/private", token=TOKEN, trust_remote_code=True))
check(custom_generate=NAME, trust_remote_code=True)
check(custom_generate=NAME, revision=FIRST, trust_remote_code=True)
"""

OFFLINE = """
check(assistant_model=AutoModel.from_pretrained("tester/falcon-draft-tiny", trust_remote_code=True))
check(custom_generate="tester/falcon-draft-tiny", trust_remote_code=True)
refused(OSError, "cached files", AutoModel.from_pretrained, "tester/none", trust_remote_code=True)
"""


def test_a_push_to_a_pull_request_makes_no_branch(monkeypatch):
    api = Mock()
    monkeypatch.setattr(files, "HfApi", lambda token: api)
    files.upload(lambda folder: None, NAME, revision="refs/pr/3")
    assert not api.create_branch.called and api.upload_folder.call_args.kwargs["revision"] == "refs/pr/3"


def test_push_and_load(saved, fresh, hub):
    at_hub = {"HF_ENDPOINT": hub.endpoint}
    code = PUSHES.replace("DRAFTER", repr(str(saved / "drafter")))
    first = fresh(code, start=WITH_PACKAGE, path=PACKAGES, HF_TOKEN=TOKEN, **at_hub).split()[-1]
    pushed = hub.repositories[NAME].commits[first]
    assert pushed.pop("README.md") == b"# the card"
    assert pushed == {
        str(path.relative_to(saved / "drafter")): path.read_bytes()
        for path in (saved / "drafter").rglob("*")
        if path.is_file()
    }
    assert hub.repositories["tester/private"].private
    # The card stays where a later push brings none.
    assert hub.repositories[NAME].files()["README.md"] == b"# the card"

    fresh(LOADS_FROM_HUB.replace("FIRST", repr(first)).replace("TOKEN", repr(TOKEN)), **at_hub)
    fresh(OFFLINE, HF_HUB_OFFLINE="1")
