# Copyright 2026 The hf_falcon authors. Licensed under the Apache License, Version 2.0.
"""A drafter as a repository: saved with its code, pushed, and loaded with and without `hf_falcon`."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from hub_server import TOKEN, USER, running_hub
from tiny_models import prompt, tiny_drafter, tiny_target, tiny_tokenizer

import hf_falcon
from hf_falcon.core.checkpoint_files import core_files

SOURCE = Path(hf_falcon.__file__).parent / "core"
PACKAGES = str(SOURCE.parents[1])
NAME = f"{USER}/falcon-draft-tiny"

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
    assert code == {path.name for path in core_files(SOURCE / "drafter.py")}
    assert {"modeling_falcon_draft.py", "configuration_falcon_draft.py", "decoding.py", "tree.py"} <= code
    for name in code:
        assert (folder / name).read_bytes() == (SOURCE / name).read_bytes()
    generate = folder / "custom_generate" / "generate.py"
    assert generate.read_bytes() == (SOURCE / "custom_generate.py").read_bytes()
    assert sorted(path.suffix for path in folder.iterdir() if path.is_file() and path.suffix != ".py") == [
        ".json",
        ".json",
        ".safetensors",
    ]


def test_core_imports_nothing_that_does_not_travel():
    for file in core_files(SOURCE / "drafter.py"):
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

drafter.save_pretrained("again")
check(assistant_model=AutoModel.from_pretrained("again", trust_remote_code=True))
"""


def test_folder_loads_without_the_package(saved, fresh, tmp_path):
    fresh(LOADS_FROM_FOLDER.replace("DRAFTER", repr(str(saved / "drafter"))))
    # What was loaded as custom code is saved with its code, too.
    first, again = saved / "drafter", tmp_path / "again"
    names = {str(path.relative_to(first)) for path in first.rglob("*") if path.is_file()}
    assert names == {str(path.relative_to(again)) for path in again.rglob("*") if path.is_file()}
    assert all((first / name).read_bytes() == (again / name).read_bytes() for name in names)


LOADS_WITH_PACKAGE = """
for kwargs in ({}, {"trust_remote_code": True}):
    drafter = AutoModel.from_pretrained(DRAFTER, **kwargs)
    assert type(drafter) is hf_falcon.FalconDraftModel
    assert type(check(assistant_model=drafter)) is hf_falcon.FalconGenerateOutput
assert type(check(custom_generate=DRAFTER, trust_remote_code=True)) is hf_falcon.FalconGenerateOutput
assert not any("modeling_falcon_draft" in name for name in sys.modules if name.startswith("transformers_modules"))

# A repository of a newer format is refused by older code, whatever it may run.
import json, pathlib, shutil
shutil.copytree(DRAFTER, "newer")
config = pathlib.Path("newer/config.json")
config.write_text(json.dumps({**json.loads(config.read_text()), "draft_format": 99}))
refused(ValueError, "`draft_format` is 99", AutoModel.from_pretrained, "newer", trust_remote_code=True)
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
broken = "`model.safetensors` of `tester/falcon-draft-tiny` could not be downloaded"
refused(OSError, broken, load, NAME, revision=FIRST, trust_remote_code=True)
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
