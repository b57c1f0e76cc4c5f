# Copyright 2026 The hf_falcon authors. Licensed under the Apache License, Version 2.0.
"""Code that is built in the background: the builder stands still during calls, and ends with whoever started it."""

import gc
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
import torch
from counting_compiler import drafter_of, generate
from quick import quick
from tiny_models import new_target, prompt

import hf_falcon
from hf_falcon.call_observers import observe_calls
from hf_falcon.commands.serve_arguments import ServeArguments
from hf_falcon.core import interfaces
from hf_falcon.cpu import background_builds, kept_rounds
from hf_falcon.cpu.background_builds import background_build, build_in_background
from hf_falcon.cpu.compiled_rounds import compiled
from hf_falcon.cpu.kept_programs import shelf_of

pytestmark = pytest.mark.skipif(not hasattr(os, "killpg"), reason="no groups of processes on this system")
needs_compiler = pytest.mark.skipif(shutil.which("g++") is None, reason="needs a C++ compiler")

# In place of the builder: says that it runs, and goes on until it is ended.
ENDLESS = "import os, sys, time\nopen(sys.argv[1], 'w').write(str(os.getpid()))\nwhile True: time.sleep(0.01)"


def until(condition, seconds=60):
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "it did not happen"
        time.sleep(0.01)


def status_of(pid):
    try:
        return psutil.Process(pid).status()
    except psutil.NoSuchProcess:
        return None


def has_ended(pid):
    return status_of(pid) in (None, psutil.STATUS_ZOMBIE)


@pytest.fixture
def models(tmp_path, monkeypatch):
    """A target and a drafter that were loaded from folders."""
    monkeypatch.setenv("HF_FALCON_CACHE", str(tmp_path / "cache"))
    target = new_target("llama")
    target.save_pretrained(tmp_path / "target")
    drafter_of(target, 3).save_pretrained(tmp_path / "drafter")
    target = type(target).from_pretrained(tmp_path / "target").eval()
    yield target, hf_falcon.FalconDraftModel.from_pretrained(tmp_path / "drafter").eval()
    hf_falcon.detach(target)


@pytest.fixture
def builder(tmp_path, monkeypatch):
    """Replaces the builder by a program; returns a function that waits for it and gives its number."""
    started = []

    def use(code=ENDLESS):
        place = tmp_path / "builder"

        def command(request):
            started.append(request)
            return [sys.executable, "-S", "-c", code, str(place)]

        def pid():
            until(lambda: place.is_file() and place.read_text())
            return int(place.read_text())

        monkeypatch.setattr(background_builds, "_command", command)
        return pid

    use.started = started
    return use


@pytest.fixture
def warnings(monkeypatch):
    found = []
    monkeypatch.setattr(background_builds.logger, "warning", found.append)
    return found


def test_it_stands_still_during_calls(models, builder):
    target, drafter = models
    pid, seen = builder(), []
    hf_falcon.attach(target, drafter, compile=True)
    builder_pid = pid()

    class Look:
        def __call__(self, input_ids, scores, **kwargs):
            seen.append(status_of(builder_pid))
            return torch.zeros(input_ids.shape[0], dtype=torch.bool)

    plain = generate(target, prompt(9))
    tokens = {"input_ids": prompt(9), "max_new_tokens": 8, "do_sample": False}
    until(lambda: status_of(builder_pid) != psutil.STATUS_STOPPED)
    target.generate(**tokens, stopping_criteria=[Look()])
    assert seen and set(seen) == {psutil.STATUS_STOPPED}
    until(lambda: status_of(builder_pid) != psutil.STATUS_STOPPED)
    # It has the lowest priority.
    assert psutil.Process(builder_pid).nice() == 19
    assert generate(target, prompt(9), drafter) == plain


def test_it_goes_on_after_the_last_of_several_calls(models, builder):
    target, drafter = models
    pid = builder()
    assert build_in_background(target, drafter)
    builder_pid, around = pid(), background_builds._paused_builds
    with around(drafter, target):
        with around(drafter, target):
            until(lambda: status_of(builder_pid) == psutil.STATUS_STOPPED)
        assert status_of(builder_pid) == psutil.STATUS_STOPPED
        with pytest.raises(KeyError), around(drafter, target):
            raise KeyError
        assert status_of(builder_pid) == psutil.STATUS_STOPPED
    until(lambda: status_of(builder_pid) != psutil.STATUS_STOPPED)


def test_a_build_that_starts_during_a_call_waits(models, builder):
    target, drafter = models
    pid = builder()
    with background_builds._paused_builds(drafter, target):
        build_in_background(target, drafter)
        until(lambda: background_build(target)._group is not None)
        group = background_build(target)._group
        until(lambda: status_of(group) == psutil.STATUS_STOPPED)
    assert pid() == group


def test_detach_ends_it_also_while_it_stands_still(models, builder, warnings):
    target, drafter = models
    pid = builder()
    hf_falcon.attach(target, drafter, compile=True)
    build, builder_pid = background_build(target), pid()
    with background_builds._paused_builds(drafter, target):
        until(lambda: status_of(builder_pid) == psutil.STATUS_STOPPED)
        hf_falcon.detach(target)
        until(lambda: has_ended(builder_pid))
    build.thread.join(60)
    assert not build.thread.is_alive() and background_build(target) is None and not warnings


# A process that starts a build, and ends in one of several ways.
STARTER = """
import os, signal, sys, time
import hf_falcon
from hf_falcon.cpu import background_builds
from tiny_models import new_target
folder, place, way, code = sys.argv[1:]
background_builds._command = lambda request: [sys.executable, "-S", "-c", code, place]
target = type(new_target("llama")).from_pretrained(folder).eval()
background_builds.build_in_background(target)
while not (os.path.isfile(place) and open(place).read()):
    time.sleep(0.01)
if way == "exit":
    sys.exit()
if way == "killed in a call":
    background_builds._paused_builds(None, target).__enter__()
os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.mark.parametrize("way", quick(["killed in a call"], ["exit", "killed", "killed in a call"]))
def test_it_ends_with_the_process(models, tmp_path, way):
    here = Path(__file__).parents[1]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(here / "support"), str(here.parent / "src")])}
    words = [sys.executable, "-c", STARTER, str(tmp_path / "target"), str(tmp_path / "place"), way, ENDLESS]
    subprocess.run(words, env=environment, timeout=300)
    pid = int((tmp_path / "place").read_text())
    until(lambda: has_ended(pid))


def test_one_build_runs_at_a_time(models, builder):
    target, drafter = models
    pid = builder()
    for _ in range(2):
        hf_falcon.attach(target, drafter, compile=True)
    assert pid() and len(builder.started) == 1
    (request,) = builder.started
    assert request["state"] == shelf_of(target).name and request["drafter"]["name"] == drafter.name_or_path


def test_files_of_the_current_folder_are_not_run(models, tmp_path, monkeypatch, warnings):
    target, drafter = models
    folder, place = tmp_path / "current", tmp_path / "was_run"
    folder.mkdir()
    for name in ("json", "signal", "subprocess", "torch", "transformers", "hf_falcon"):
        (folder / f"{name}.py").write_text(f"open({str(place)!r}, 'w')\n")
    monkeypatch.chdir(folder)
    monkeypatch.setattr(background_builds, "_request", lambda *_: {"target": {"class": ["transformers", "None"]}})
    hf_falcon.attach(target, drafter, compile=True)
    background_build(target).thread.join(120)
    # The builder came as far as it could.
    assert len(warnings) == 1 and "AttributeError" in warnings[0]
    assert not place.exists()


def test_a_build_that_fails_is_one_warning(models, builder, warnings):
    target, drafter = models
    builder("import sys\nprint('progress\\nOSError: no compiler', file=sys.stderr)\nsys.exit(1)")
    hf_falcon.attach(target, drafter, compile=True)
    background_build(target).thread.join(60)
    assert len(warnings) == 1 and warnings[0].endswith("OSError: no compiler")
    assert generate(target, prompt(9), drafter) == generate(target, prompt(9)) and target not in compiled
    # It may be tried again.
    hf_falcon.attach(target, drafter, compile=True)
    background_build(target).thread.join(60)
    assert len(builder.started) == 2


def test_a_builder_that_leaves_nothing_is_one_warning(models, builder, warnings):
    target, drafter = models
    builder("")
    build_in_background(target, drafter)
    background_build(target).thread.join(60)
    assert len(warnings) == 1 and "not for the target as it is now" in warnings[0]


def test_what_was_built_is_loaded_between_calls(models, builder, monkeypatch, warnings):
    target, drafter = models
    builder("")
    loaded = []
    monkeypatch.setattr(background_builds, "load_rounds", lambda target: loaded.append("rounds"))
    monkeypatch.setattr(background_builds, "passes_for", lambda drafter, target: loaded.append("passes"))
    with background_builds._paused_builds(drafter, target):
        build_in_background(target, drafter)
        # The builder cannot end while a call runs: it stands still.
        until(lambda: background_build(target)._group is not None)
        os.killpg(background_build(target)._group, 18)
        until(lambda: background_build(target)._group is None)
        assert not loaded and background_build(target).is_running
    background_build(target).thread.join(60)
    assert loaded == ["rounds", "passes"] and not warnings


def test_what_is_kept_is_not_built_again(models, builder, monkeypatch):
    target, drafter = models
    builder()
    monkeypatch.setattr(background_builds, "rounds_for", lambda target: object())
    hf_falcon.attach(target, drafter, compile=True)
    assert not builder.started and background_build(target) is None


def test_calls_do_not_look_for_code_that_is_being_built(models, builder, monkeypatch):
    target, drafter = models
    pid = builder()
    build_in_background(target, drafter)
    pid()
    kept_rounds.offer_rounds(target)
    monkeypatch.setattr(kept_rounds, "_load_rounds", pytest.fail)
    assert generate(target, prompt(9), drafter) == generate(target, prompt(9))


@pytest.mark.parametrize("case", ["device", "row_invariant", "memory", "class"])
def test_what_cannot_be_built_in_the_background_is_refused(models, case):
    target, drafter = models
    words = {"device": "on meta", "row_invariant": "own code", "memory": "not loaded from", "class": "not one of"}
    if case == "device":
        target = target.to("meta")
    elif case == "memory":
        target = new_target("llama")
    elif case == "class":
        target.__class__ = type("Own", (type(target),), {"__module__": "elsewhere"})
    with pytest.raises(ValueError, match=f"{words[case]}.*compile_rounds"):
        if case == "row_invariant":
            with hf_falcon.row_invariant(target.bfloat16()):
                build_in_background(target, drafter)
        else:
            build_in_background(target)


def test_the_server_does_not_wait_on_a_cpu():
    arguments = ServeArguments(compile=True)
    assert not arguments.compiles_first(new_target("llama"))
    assert arguments.compiles_first(new_target("llama").to("meta"))
    assert not ServeArguments().compiles_first(new_target("llama").to("meta"))


def test_several_observers_see_a_call(monkeypatch):
    monkeypatch.setattr("hf_falcon.call_observers._around", [])
    seen, observers = [], [None, "first", "second"]

    def around(name):
        class Around:
            def __enter__(self):
                seen.append(name)
                return name

            def __exit__(self, *exception):
                seen.append(name)

        return lambda drafter, target: Around()

    before = interfaces.part("learning")
    try:
        for name in observers:
            observe_calls(around(name))
        with interfaces.part("learning")(None, None) as observer:
            assert observer == "first" and seen == observers
        assert seen == observers + observers[::-1]
    finally:
        interfaces.register_part("learning", before)


@pytest.mark.slow
@needs_compiler
@pytest.mark.parametrize("packed", [False, True])
def test_the_code_runs_once_it_is_built(models, packed, warnings):
    target, drafter = models
    expected = generate(target, prompt(9))
    if packed:
        hf_falcon.pack_weights(target)
        hf_falcon.pack_weights(drafter)
    hf_falcon.attach(target, drafter, compile=True)
    thread = background_build(target).thread
    calls = 0
    while thread.is_alive():
        assert generate(target, prompt(9), drafter) == expected
        calls += 1
        thread.join(2)
    assert not warnings and calls and compiled[target].is_kept and compiled[target].is_faster
    assert shelf_of(target).is_offered and shelf_of(target, drafter).exists()
    assert generate(target, prompt(9), drafter) == expected
    # Another target of this state has it at once.
    other = type(target).from_pretrained(target.name_or_path).eval()
    if packed:
        hf_falcon.pack_weights(other)
    assert not build_in_background(other, drafter) and compiled[other].is_kept


def test_a_fork_leaves_the_build_to_its_parent(models, builder):
    target, drafter = models
    pid = builder()
    build_in_background(target, drafter)
    builder_pid = pid()
    answer, question = os.pipe()
    with background_builds._paused_builds(drafter, target):
        until(lambda: status_of(builder_pid) == psutil.STATUS_STOPPED)
        fork = os.fork()
        if fork == 0:
            try:
                # The first call of this process, and its end.
                is_first = background_builds._calls == 0
                with background_builds._paused_builds(drafter, target):
                    is_first = is_first and background_build(target) is None
                os.write(question, b"yes" if is_first else b"no")
                time.sleep(600)
            finally:
                os._exit(0)
        # If the fork dies, nothing can be read.
        os.close(question)
        try:
            assert os.read(answer, 3) == b"yes"
            assert status_of(builder_pid) == psutil.STATUS_STOPPED
            # The fork does not keep it.
            hf_falcon.detach(target)
            until(lambda: has_ended(builder_pid))
        finally:
            os.kill(fork, signal.SIGKILL)
            os.waitpid(fork, 0)
            os.close(answer)


def test_a_fork_keeps_what_was_switched_off(models):
    target = models[0]
    kept_rounds.expect_rounds(target)
    kept_rounds.stop_expecting(target)
    assert not kept_rounds._tried[target]
    kept_rounds.decline(target)
    kept_rounds.expect_rounds(target)
    kept_rounds.stop_expecting(target)
    assert kept_rounds._tried[target] == {None}
    kept_rounds.undo_decline(target)


def test_a_build_ends_with_its_target(models, builder, tmp_path):
    pid, target = builder(), type(models[0]).from_pretrained(tmp_path / "target").eval()
    build_in_background(target)
    builder_pid = pid()
    del target
    gc.collect()
    until(lambda: has_ended(builder_pid))
