# Copyright 2026 The hf_falcon authors. Licensed under the Apache License, Version 2.0.
"""`make fuzz`: no file or request of a stranger ends in a raw error, takes long, or takes much memory."""

import inspect
import json
import os
import subprocess
import sys
import time
from pathlib import Path

import fuzz
import pytest
from serving import needs_the_extra

INPUTS = 10_000
# Each class takes some seconds.
QUICK = {**dict.fromkeys(fuzz.CLASSES, 16), "cost-caches": 6, "requests": 8}


def tried(folder: Path) -> dict[str, dict]:
    return json.loads((folder / "state.json").read_text())


def no_rule_is_broken(folder: Path, broken: int) -> None:
    assert not broken, "\n\n".join(file.read_text() for file in folder.glob("found/*/error.txt"))


SOME = """
import json, os, sys
sys.path.insert(0, {support!r})
import fuzz
for name, count in {counts!r}.items():
    print(json.dumps({{"name": name, **fuzz.try_inputs(name, 0, count, fuzz.Path({folder!r}))}}), flush=True)
os._exit(0)
"""


def test_some_inputs_of_each_class(tmp_path):
    """In one process, where `make fuzz` has one for each batch."""
    needs_the_extra()
    script = SOME.format(support=str(Path(fuzz.__file__).parent), counts=QUICK, folder=str(tmp_path))
    environment = {**os.environ, "HF_FALCON_CACHE": str(tmp_path / "costs"), "HF_HUB_OFFLINE": "1"}
    words = [sys.executable, "-c", script]
    result = subprocess.run(words, env=environment, capture_output=True, text=True, timeout=300)
    reports = [json.loads(line) for line in result.stdout.splitlines()]
    assert [report["name"] for report in reports] == list(fuzz.CLASSES), result.stderr[-4000:]
    for report in reports:
        assert report["broken"] is None, report["broken"]
        assert sum(report["outcomes"].values()) >= QUICK[report["name"]] // 2, report


@pytest.mark.slow
def test_many_inputs(tmp_path):
    needs_the_extra()
    broken = fuzz.search(tmp_path, list(fuzz.CLASSES), INPUTS, None)
    no_rule_is_broken(tmp_path, broken)
    states = tried(tmp_path)
    assert sum(state["tried"] for state in states.values()) >= INPUTS
    for name, state in states.items():
        # The changes reach both ends.
        assert state["outcomes"]["works"] >= 20, name
        if name != "cost-caches":
            assert sum(state["outcomes"].values()) - state["outcomes"]["works"] >= 20, name
        assert state["memory"] < fuzz.MEMORY and state["slowest"] < fuzz.SECONDS


# What breaks a rule is found, in a process of its own and with the input that breaks it.


def wrong_type(folder):
    raise KeyError("a")


def without_words(folder):
    raise ValueError


def without_name(folder):
    raise ValueError("something is wrong")


def slow(folder):
    time.sleep(60)


def memory(folder):
    b"a" * (fuzz.MEMORY + (1 << 26))


def deaf(folder):
    # A library that is written in another language does not hear an alarm.
    fuzz.signal.pthread_sigmask(fuzz.signal.SIG_BLOCK, [fuzz.signal.SIGALRM])
    time.sleep(60)


def stopped(folder):
    os.kill(os.getpid(), fuzz.signal.SIGSTOP)


def killed(folder):
    os.kill(os.getpid(), 9)


RULES = {
    wrong_type: "KeyError: 'a'",
    without_words: "No words",
    without_name: "Names no file",
    slow: "It took more than",
    memory: "MiB more than before|MemoryError",
    deaf: "in deaf",
    stopped: "no sign of life",
    killed: "ended by itself",
}
CHILD = """
import os, sys, time
sys.path.insert(0, {support!r})
import fuzz
from hypothesis import strategies as st
{source}
inputs = st.binary(min_size=1, max_size=4).map(lambda data: {{"a.bin": data}})
fuzz.SECONDS = {seconds}
fuzz.CLASSES["broken"] = lambda: fuzz.Kind(inputs, {rule.__name__})
fuzz.child("broken", 0, 5, fuzz.Path({folder!r}))
"""


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.__name__)
def test_what_breaks_a_rule_is_found(tmp_path, monkeypatch, rule):
    script, support = tmp_path / "child.py", str(Path(fuzz.__file__).parent)
    source, seconds = inspect.getsource(rule), 1 if rule in (slow, deaf) else 60
    script.write_text(CHILD.format(support=support, source=source, rule=rule, folder=str(tmp_path), seconds=seconds))
    monkeypatch.setattr(fuzz, "__file__", str(script))
    monkeypatch.setattr(fuzz, "_PATIENCE", 5 if rule is stopped else 60)
    monkeypatch.setattr(fuzz, "CLASSES", {"broken": None})
    assert fuzz.search(tmp_path, ["broken"], 5, None) == 1
    (found,) = tmp_path.glob("found/*")
    assert (found / "a.bin").read_bytes()
    assert fuzz.re.search(RULES[rule], (found / "error.txt").read_text())
    assert tried(tmp_path)["broken"]["tried"] == 0


def test_a_run_goes_on(tmp_path, monkeypatch, capsys):
    batches = []

    def run_batch(name, seed, count, folder):
        batches.append((name, seed, count))
        return {"outcomes": {"works": count}, "slowest": 0.5, "memory": seed << 20, "broken": None}

    monkeypatch.setattr(fuzz, "run_batch", run_batch)
    assert fuzz.search(tmp_path, ["dialogues", "requests"], 20, None, batch=8) == 0
    assert batches == [("dialogues", 0, 8), ("requests", 0, 8), ("dialogues", 1, 2), ("requests", 1, 2)]
    batches.clear()
    assert fuzz.search(tmp_path, ["dialogues", "requests"], 24, None, batch=8) == 0
    assert batches == [("dialogues", 2, 2), ("requests", 2, 2)]
    last = capsys.readouterr().out.splitlines()[-1]
    assert last == "requests: 12 inputs (12 works), +2 MiB at most, the slowest 0.5 s"
    # Time is over.
    assert fuzz.search(tmp_path, ["dialogues"], None, 0) == 0 and len(batches) == 2


def test_the_command(tmp_path, monkeypatch):
    searches = []
    monkeypatch.setattr(fuzz, "search", lambda *arguments: searches.append(arguments) or len(searches) - 1)
    for words, status in (([], 0), (["--inputs", "5", "--classes", "dialogues", "--folder", str(tmp_path)], 1)):
        monkeypatch.setattr(sys, "argv", ["fuzz.py", *words])
        with pytest.raises(SystemExit) as end:
            fuzz.main()
        assert end.value.code == status
    assert searches == [
        (Path("runs/fuzz"), list(fuzz.CLASSES), None, 10.0),
        (tmp_path, ["dialogues"], 5, None),
    ]
