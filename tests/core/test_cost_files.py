# Copyright 2026 The hf_falcon authors. Licensed under the Apache License, Version 2.0.
"""Files of kept costs: whatever is in one, the call goes on as if it were not there."""

import json
import os
import shutil
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from tiny_models import prompt, tiny_drafter, tiny_target
from utilities import peak_memory, start_peak

from hf_falcon import cost_files
from hf_falcon.core import costs
from hf_falcon.core.costs import CostKey

LENGTH, NODES = 5, 6


@pytest.fixture
def key(tmp_path, monkeypatch):
    monkeypatch.setenv("HF_FALCON_CACHE", str(tmp_path / "cache"))
    return CostKey.of(tiny_target("llama"), LENGTH, NODES)


@pytest.fixture
def file(key):
    """The file of a call's costs, and the one file in its folder."""
    cost_files.save(tiny_target("llama"), key, {0: 1.0, NODES: 1.5})
    [file] = (cost_files.cache_folder() / "costs").iterdir()
    return file


def generates(new_tokens: int = 12) -> None:
    target = tiny_target("llama")
    drafter = tiny_drafter(target, num_assistant_tokens_schedule="heuristic", num_assistant_tokens=NODES)
    options = {"max_new_tokens": new_tokens, "do_sample": False}
    expected = target.generate(prompt(LENGTH), **options)
    assert target.generate(prompt(LENGTH), assistant_model=drafter, **options).tolist() == expected.tolist()


def kept(**seconds) -> bytes:
    return json.dumps({"seconds": seconds}).encode()


@pytest.mark.parametrize(
    "content",
    [
        b"[" * 100_000,
        b'{"seconds": ' * 1000,
        b'{"seconds": {"0": 1.0, "6": ' + b"9" * 5000 + b"}}",
        b'{"seconds": {"0": 1.0, "' + b"9" * 5000 + b'": 1.0}}',
        b'{"seconds": {"0": 1.0, "6": NaN}}',
        b'{"seconds": {"0": 1.0, "6": 1e999}}',
        b'{"seconds": {"0": 1.0}, "more": "' + b"x" * 2**20 + b'"}',
        b"\xff\xfe",
        b'{"seconds": {"0": 1.0, "6": "\\ud800"}}',
        kept(**{"0": 1.0, "100000": 1.0}),
        kept(**{"0": 1.0, "1000000000": 1.0}),
        kept(**{"0": 1.0, "7": 1.0}),
        kept(**{"0": 1.0, "-1": 1.0}),
        kept(**{"0": 1e-300, "6": 1e300}),
        kept(**{"0": [1.0]}),
        b'{"seconds": 5}',
        b'{"seconds": [[0, 1.0]]}',
        b"null",
    ],
)
def test_whatever_is_in_it(key, file, content):
    file.write_bytes(content)
    assert cost_files.load(tiny_target("llama"), key) is None
    before = start_peak()
    generates()
    assert peak_memory() - before < 2**28


NUMBERS = st.integers() | st.floats() | st.sampled_from([10**9, 10**5, 10**400, 0, NODES, "0", "1e9", None, True])
SIZES = (
    st.integers(-2, NODES + 2).map(str) | st.sampled_from(["0", "1_0", "٣", " 4 ", "1e2", "1000000000"]) | st.text()
)


KEPT = st.dictionaries(SIZES, NUMBERS | st.lists(NUMBERS), max_size=8) | st.dictionaries(
    st.integers(0, NODES).map(str), st.floats(1e-9, 3600.0), min_size=NODES
)


@given(KEPT, st.just(b"") | st.binary(max_size=3), st.integers(0, 40))
@example({"0": 1e-9, "6": 3600.0}, b"", 0)
@example({"0": 3600.0, "6": 1e-9}, b"", 0)
@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_mutations(key, file, nothing_learnt, seconds, noise, place):
    whole = json.dumps({"seconds": seconds}).encode()
    file.write_bytes(whole[:place] + noise + whole[place:])
    found = cost_files.load(tiny_target("llama"), key)
    if found is not None:
        assert all(0 <= size <= NODES for size in found)
        assert costs.Costs(found).target(NODES)
        generates(new_tokens=4)


def test_what_is_no_file(key, file):
    """A folder, links, a device, a pipe: nothing waits, and no link is written through."""
    elsewhere = file.parent.parent / "elsewhere"
    for make in (
        lambda: file.mkdir(),
        lambda: file.symlink_to(elsewhere),
        lambda: file.symlink_to(file),
        lambda: file.symlink_to("/dev/zero"),
        lambda: os.mkfifo(file),
    ):
        file.unlink() if file.is_symlink() or not file.is_dir() else file.rmdir()
        make()
        is_folder = file.is_dir()
        assert cost_files.load(tiny_target("llama"), key) is None
        cost_files.save(tiny_target("llama"), key, {0: 1.0})
        assert cost_files.load(tiny_target("llama"), key) == (None if is_folder else {0: 1.0})
        assert not elsewhere.exists() and os.listdir(file.parent) == [file.name]


@pytest.mark.parametrize("error", [PermissionError(13, "Permission denied"), OSError(28, "No space left on device")])
def test_nothing_can_be_written(key, monkeypatch, error):
    """A folder without the right to write, and a full disk; nothing stays behind."""

    def fail(*args, **kwargs):
        raise error

    for owner, name in ((cost_files.tempfile, "mkdtemp"), (Path, "write_text"), (os, "replace")):
        with monkeypatch.context() as patch:
            patch.setattr(owner, name, fail)
            cost_files.save(tiny_target("llama"), key, {0: 1.0})
        folder = cost_files.cache_folder() / "costs"
        assert cost_files.load(tiny_target("llama"), key) is None and os.listdir(folder) == []
    shutil.rmtree(cost_files.cache_folder())
    generates()


def test_times_of_another_processor_are_not_used(key, file, monkeypatch):
    """A home folder may be shared by machines. Of a GPU the name is in the key."""
    target, on_gpu = tiny_target("llama"), key._replace(device="cuda NVIDIA H200")
    cost_files.save(target, on_gpu, {0: 2.0})
    assert cost_files.load(target, key) == {0: 1.0, NODES: 1.5}
    monkeypatch.setattr(cost_files, "processor_digest", lambda: "another", raising=False)
    assert cost_files.load(target, key) is None and cost_files.load(target, on_gpu) == {0: 2.0}
    assert cost_files._file(target, on_gpu)[1]["processor"] is None


def test_two_processes_write_at_once(key):
    """Each reader sees one of the two, whole."""
    target, curves = tiny_target("llama"), [{0: 1.0, NODES: 1.5}, {0: 2.0, 3: 2.5, NODES: 4.0}]
    cost_files.save(target, key, curves[0])
    with ThreadPoolExecutor(4) as threads:
        writers = [threads.submit(cost_files.save, target, key, curves[n % 2]) for n in range(60)]
        found = [cost_files.load(target, key) for _ in range(60)]
        for each in writers:
            each.result()
    assert all(each in curves for each in found)
    assert len(os.listdir(cost_files.cache_folder() / "costs")) == 1
