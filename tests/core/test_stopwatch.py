# Copyright 2026 The hf_falcon authors. Licensed under the Apache License, Version 2.0.
"""Device time: events mark it, and the host does not wait for them unless it is told to."""

import pytest
import torch

from hf_falcon.core.costs import Stopwatch


class Device:
    """A device that works off its queue when it is told to; work of a millisecond takes one on it."""

    def __init__(self):
        self.queue, self.time, self.waits = [], 0.0, 0

    def run(self, milliseconds: float) -> None:
        self.queue.append(milliseconds)

    def work(self) -> None:
        for each in self.queue:
            if isinstance(each, Event):
                each.time = self.time
            else:
                self.time += each
        self.queue.clear()


class Event:
    device: Device

    def __init__(self, enable_timing=False):
        assert enable_timing
        self.time = None

    def record(self, stream):
        self.device.queue.append(self)

    def query(self):
        return self.time is not None

    def synchronize(self):
        self.device.waits += 1
        self.device.work()

    def elapsed_time(self, other):
        return other.time - self.time


@pytest.fixture
def device(monkeypatch):
    Event.device = Device()
    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: None)
    return Event.device


def two_laps(device) -> Stopwatch:
    watch = Stopwatch(torch.device("cuda"))
    device.run(30.0)
    watch.lap()
    device.run(5.0)
    watch.lap()
    return watch


def test_it_does_not_wait_for_the_device(device):
    watch = two_laps(device)
    assert watch.seconds() is None and device.waits == 0
    device.work()
    assert watch.seconds() == pytest.approx([0.030, 0.005]) and device.waits == 0


def test_it_waits_where_it_is_told_to(device):
    assert two_laps(device).seconds(wait=True) == pytest.approx([0.030, 0.005])
    assert device.waits == 1


def test_a_host_is_timed_by_its_clock(monkeypatch):
    times = iter((1.0, 1.5, 4.0))
    monkeypatch.setattr("hf_falcon.core.costs.time.perf_counter", lambda: next(times))
    watch = Stopwatch(torch.device("cpu"))
    watch.lap(), watch.lap()
    assert watch.seconds() == [0.5, 2.5]
