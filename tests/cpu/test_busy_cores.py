# Copyright 2026 The hf_falcon authors. Licensed under the Apache License, Version 2.0.
"""Beside other processes, further threads let waiting threads sleep; they end with the competition or the call."""

import gc
import os
import sys
import threading
import time
import warnings
from pathlib import Path

import pytest
import torch
from tiny_models import prompt, tiny_drafter, tiny_target

from hf_falcon.bench.busy import busy_processes
from hf_falcon.cpu import busy_cores as module
from hf_falcon.cpu.busy_cores import BusyCores, busy_cores, groups, waiting_times

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="only Linux says how long threads wait for a core")


class Call:
    """Lasts as long as somebody holds it."""


@pytest.fixture
def two_cores(monkeypatch):
    """Two threads for two cores, whatever the machine has, and looks that follow each other quickly."""
    for name in module._SETTINGS:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1})
    monkeypatch.setattr(module, "_INTERVAL", 0.01)
    # Calls of earlier tests.
    gc.collect()
    until(lambda: ours() == 0)
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def competition(monkeypatch):
    """A share of the time that a thread waits for its core, which a test can change."""
    share = [0.5]
    monkeypatch.setattr(module, "waiting_times", lambda: {"1": share[0] * time.monotonic(), "2": 0.0})
    return share


def ours() -> int:
    return sum(thread.name == "hf_falcon-busy-cores" for thread in threading.enumerate())


def until(condition, seconds=20):
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.005)


@pytest.mark.parametrize(
    "threads, cores, expected",
    [(1, 2, 0), (2, 2, 1), (4, 4, 1), (3, 4, 1), (4, 8, 2), (32, 64, 2), (2, 64, 0)],
)
def test_the_groups_make_more_threads_than_cores(two_cores, monkeypatch, threads, cores, expected):
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(cores)))
    assert groups() == expected
    if expected:
        assert 1 + (threads - 1) * (1 + expected) > cores >= 1 + (threads - 1) * expected


@pytest.mark.parametrize("name", module._SETTINGS)
def test_a_users_setting_is_left_alone(two_cores, competition, monkeypatch, name):
    monkeypatch.setenv(name, "active")
    call = Call()
    BusyCores().begin(call)
    assert groups() == 0 and ours() == 0


def test_other_systems_are_left_alone(two_cores, monkeypatch):
    monkeypatch.setattr(sys, "platform", "darwin")
    assert groups() == 0


def test_threads_come_and_go_with_the_competition(two_cores, competition):
    """A watcher while the call lasts; a thread more, with a group of torch's, while others use the cores."""
    cores, call = BusyCores(), Call()
    all_threads = len(list(Path("/proc/self/task").iterdir()))
    competition[0] = 0.0
    cores.begin(call)
    time.sleep(0.1)
    assert ours() == 1
    competition[0] = 0.5
    # The watcher, the further thread, and the second thread of its group.
    until(lambda: ours() == 2 and len(list(Path("/proc/self/task").iterdir())) >= all_threads + 3)
    competition[0] = 0.05
    until(lambda: ours() == 1)
    competition[0] = 0.5
    until(lambda: ours() == 2)
    del call
    until(lambda: ours() == 0 and len(list(Path("/proc/self/task").iterdir())) <= all_threads)


def test_the_next_call_begins_with_what_the_last_one_saw(two_cores, competition, monkeypatch):
    cores, call = BusyCores(), Call()
    cores.begin(call)
    until(lambda: ours() == 2)
    del call
    until(lambda: ours() == 0)
    # No look of its own is as early.
    monkeypatch.setattr(module, "_INTERVAL", 0.5)
    call = Call()
    cores.begin(call)
    assert ours() == 2
    del call
    until(lambda: ours() == 0)


def test_waiting_for_a_core_is_seen():
    """With as many other processes as cores, a thread that computes waits for a part of the time."""
    if not waiting_times():
        pytest.skip("this kernel does not count")
    assert str(threading.get_native_id()) in waiting_times()
    with busy_processes(len(os.sched_getaffinity(0))):
        start, before = time.monotonic(), waiting_times()
        while time.monotonic() < start + 1:
            sum(range(1000))
        waited = {name: seconds - before[name] for name, seconds in waiting_times().items() if name in before}
    assert max(waited.values()) > module._BUSY * (time.monotonic() - start)


def test_a_call_beside_others_gives_the_same_tokens(two_cores, competition):
    target = tiny_target("llama")
    inputs = prompt(9)
    plain = target.generate(inputs, max_new_tokens=32, do_sample=False, pad_token_id=0)
    seen = []

    def slowly(*_):
        time.sleep(0.02)
        seen.append(ours())

    hook = target.register_forward_hook(slowly)
    drafter = tiny_drafter(target)
    output = target.generate(inputs, assistant_model=drafter, max_new_tokens=32, do_sample=False, pad_token_id=0)
    hook.remove()
    assert torch.equal(output, plain)
    assert max(seen) == 2
    until(lambda: ours() == 0)


def test_a_fork_starts_anew():
    """Whatever the lock was at that moment."""
    with busy_cores._lock, warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        child = os.fork()
        if child == 0:
            busy_cores.begin(Call())
            os._exit(0)
    until(lambda: os.waitpid(child, os.WNOHANG)[0] == child)


def test_a_process_that_can_start_no_thread_calls_all_the_same(two_cores, competition, monkeypatch):
    """As at the end of the interpreter, or where a container limits threads; later calls try again."""

    def fails(self):
        raise RuntimeError("can't start new thread")

    cores, call = BusyCores(), Call()
    with monkeypatch.context() as limited:
        limited.setattr(threading.Thread, "start", fails)
        cores.begin(call)
        assert ours() == 0
    cores.begin(call)
    until(lambda: ours() > 1)
    del call
    until(lambda: ours() == 0)
