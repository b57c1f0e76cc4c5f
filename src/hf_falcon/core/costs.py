# Copyright 2026 The hf_falcon authors. Licensed under the Apache License, Version 2.0.
"""
What a round costs on this machine: the target's time for n nodes, and the time of a draft pass (Sequoia; DDTree).

The target's curve is measured once, in a second at most, and kept on disk. The machine's speed at the moment, and the
cost of drafting, are measured by the rounds themselves.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import math
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from huggingface_hub import constants
from transformers import PreTrainedModel
from transformers import __version__ as transformers_version
from transformers.utils import logging

from .checkpoint_files import read_json, weights_fingerprint
from .hook import attention_implementation

logger = logging.get_logger(__name__)

# Draft nodes at which the target is timed; between them its time is interpolated.
_SIZES = (0, 1, 3, 5, 7, 11, 15, 23, 31, 47, 63, 95, 127)
# The size that is timed after a single token. Where the largest tree takes many times as long as small ones, a line
# from one end of the curve to the other would make all trees seem too expensive.
_FIRST_SIZE = 7
_MEASURING_SECONDS = 1.0
_REPEATS = 4
# A call of fewer tokens ends sooner than a measurement, or a check of kept times.
_FEWEST_TOKENS = 10
# Of a file with kept times: its bytes, and the times of a forward that can have been measured.
_LARGEST_FILE, _SECONDS = 2**16, (1e-9, 3600.0)
# Weight of a new round in a running mean.
_NEW = 0.1
# Kept times are compared at about these numbers of draft nodes, and measured anew where one differs by more than a
# factor. Two, because a change of the target's code may change one size alone.
_CHECKED_SIZES, _TOLERANCE = (3, 7), 1.25
# What a draft pass and a commit cost before they were timed, in plain steps, and the factor between the costs that
# decisions are made with. They stand still while the measured mean stays near: in bfloat16 the size of a tree decides
# how its logits are rounded, so costs that change with every timing would flip near-ties from run to run.
_UNMEASURED_PASS, _STEP = 0.1, 1.5


class Stopwatch:
    """
    Times laps on a device. On CUDA, events mark the times on the device itself, and nothing waits for it.

    Args:
        device (`torch.device`): the device.
    """

    def __init__(self, device: torch.device):
        self._device = device
        self._marks: list[Any] = []
        self.lap()

    def lap(self) -> None:
        """Ends a lap. The first one began when the stopwatch was made."""
        if self._device.type == "cuda":
            event = torch.cuda.Event(enable_timing=True)
            event.record(torch.cuda.current_stream(self._device))
            self._marks.append(event)
        else:
            self._marks.append(time.perf_counter())

    def seconds(self, wait: bool = False) -> list[float] | None:
        """
        The seconds of each lap. `None` if the device is still in the last lap; with `wait`, the host waits for its
        end.
        """
        pairs = list(itertools.pairwise(self._marks))
        if self._device.type != "cuda":
            return [end - begin for begin, end in pairs]
        if wait:
            self._marks[-1].synchronize()
        elif not self._marks[-1].query():
            return None
        return [begin.elapsed_time(end) / 1000 for begin, end in pairs]


class Costs:
    """
    Costs of rounds of one target with one drafter, in plain steps: the unit is the target's time for a single token.

    Args:
        seconds (`dict[int, float]`): seconds of the target's forward for the root and some number of draft nodes; with
            0 among them.
    """

    def __init__(self, seconds: dict[int, float]):
        self.seconds = seconds
        self.draft_pass = _UNMEASURED_PASS
        self.commit = _UNMEASURED_PASS
        self._mean_pass = self._mean_commit = _UNMEASURED_PASS
        # Seconds of a plain step at the moment: at another context length or load all forwards slow down alike.
        self._plain_seconds = seconds[0]

    def target(self, max_nodes: int) -> list[float]:
        """The target's time for the root and 0, 1, ..., `max_nodes` draft nodes."""
        sizes = sorted(self.seconds)
        # More tokens never take less time; where they seem to, the machine was busy with something else meanwhile.
        least = list(itertools.accumulate((self.seconds[size] for size in reversed(sizes)), min))[::-1]
        known = [max(1.0, each / self.seconds[0]) for each in least]
        return [_interpolate(nodes, sizes, known) for nodes in range(max_nodes + 1)]

    def of_fewer_rows(self, rows: int, fewer: int) -> Costs:
        """
        The costs of `fewer` rows, where these are of `rows`: the target's time is that of the same number of tokens in
        all, and each row drafts for itself.
        """
        sizes = sorted(self.seconds)
        tokens, known = [rows * (size + 1) for size in sizes], [self.seconds[size] for size in sizes]
        found = Costs({size: _interpolate(max(fewer * (size + 1), rows), tokens, known) for size in sizes})
        slower = self.seconds[0] / found.seconds[0] * fewer / rows
        found.draft_pass = found._mean_pass = self.draft_pass * slower
        found.commit = found._mean_commit = self.commit * slower
        return found

    def observe_target(self, cost: float, seconds: float) -> None:
        """Takes the seconds of a forward that was expected to cost `cost`."""
        # One round that something else interrupted says little.
        found = min(max(seconds / cost, 0.5 * self._plain_seconds), 2.0 * self._plain_seconds)
        self._plain_seconds += _NEW * (found - self._plain_seconds)

    def observe_drafting(self, commit_seconds: float | None, pass_seconds: float, passes: int) -> None:
        """Takes the seconds of a round's drafting: of its commit, where known, and of all its `passes` after it."""
        if commit_seconds is not None:
            self._mean_commit += _NEW * (min(commit_seconds / self._plain_seconds, 1.0) - self._mean_commit)
            self.commit = _steady(self.commit, self._mean_commit)
        if passes:
            found = pass_seconds / passes / self._plain_seconds
            self._mean_pass += _NEW * (min(found, 1.0) - self._mean_pass)
            self.draft_pass = _steady(self.draft_pass, self._mean_pass)


def _steady(cost: float, mean: float) -> float:
    """`cost`, moved by whole steps until it is within one step of `mean`."""
    while mean > cost * _STEP:
        cost *= _STEP
    while mean < cost / _STEP:
        cost /= _STEP
    return cost


def _interpolate(nodes: int, sizes: Sequence[int], known: Sequence[float]) -> float:
    """The straight line between neighbours; beyond the last one, on along the line of the last two."""
    upper = next((i for i, size in enumerate(sizes) if size >= nodes), len(sizes) - 1)
    if sizes[upper] == nodes or len(sizes) == 1:
        return known[upper]
    lower = upper - 1
    slope = (known[upper] - known[lower]) / (sizes[upper] - sizes[lower])
    return known[lower] + slope * (nodes - sizes[lower])


def measure(
    forward: Callable[[int], object],
    max_nodes: int,
    device: torch.device,
    seconds: float = _MEASURING_SECONDS,
    repeats: int = _REPEATS,
    tokens: float = math.inf,
) -> dict[int, float]:
    """
    Times the target's forward, for several numbers of nodes.

    Args:
        forward (`Callable[[int], None]`): runs the target over the root and that many draft nodes.
        max_nodes (`int`): draft nodes, at most.
        device (`torch.device`): where the target runs.
        seconds (`float`, *optional*, defaults to 1): no further forward begins after this.
        repeats (`int`, *optional*, defaults to 4): times that a size is timed again, at most.
        tokens (`float`, *optional*): no further forward begins after the time of so many plain steps, either.

    Returns:
        `dict[int, float]`: the median of each, in seconds; of two times the shorter. The shortest of many would be
        from a moment when nothing else ran, which some sizes meet and others do not.
    """
    # The first sizes are those that decide most: where a forward takes long, there is time for no more. After that
    # each size gets the same time, so that small trees, which choices are mostly between, are timed most often.
    sizes = list(dict.fromkeys((0, min(_FIRST_SIZE, max_nodes), max_nodes, *_SIZES)))
    sizes = [size for size in sizes if size <= max_nodes]
    times: dict[int, list[float]] = {size: [] for size in sizes}
    start = time.perf_counter()
    while left := [size for size in sizes if len(times[size]) < 1 + repeats]:
        is_late = time.perf_counter() - start > min(seconds, tokens * min(times[0], default=math.inf))
        if is_late and all(times[size] for size in sizes[:2]):
            break
        size = min(left, key=lambda size: sum(times[size]))
        begin = time.perf_counter()
        forward(size)
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        times[size].append(time.perf_counter() - begin)
    return {size: statistics.median_low(found) for size, found in sorted(times.items()) if found}


def in_steps(seconds: dict[int, float], sizes: Sequence[int]) -> dict[int, float]:
    """
    Times of a target whose trees are padded to one of a few sizes: all trees that are padded to one size take as long.

    Args:
        seconds (`dict[int, float]`): see [`Costs`].
        sizes (sequence of `int`): tokens of a tree, the root among them, in ascending order; larger ones run as they
            are.
    """
    found = dict(seconds)
    # A single token is not padded.
    for first, end in itertools.pairwise((0 if 1 in sizes else 1, *sizes)):
        measured = [value for nodes, value in seconds.items() if first <= nodes < end]
        if measured:
            found.update(dict.fromkeys(range(first, end), min(measured)))
    return found


def cache_folder() -> Path:
    """Where measured costs are kept: `HF_FALCON_CACHE`, or a folder in the Hub's own."""
    given = os.environ.get("HF_FALCON_CACHE")
    return Path(given) if given else Path(constants.HF_HOME) / "hf_falcon"


def still_valid(
    seconds: dict[int, float], forward: Callable[[int], object], device: torch.device, repeats: int = 1
) -> bool:
    """
    Whether times that were kept still hold on this machine: they may come from a moment when it was busy.

    Args:
        seconds (`dict[int, float]`): see [`Costs`].
        forward, device, repeats: see [`measure`]; three sizes are timed.
    """
    drafted = [size for size in seconds if size > 0]
    sizes = {min(drafted, key=lambda size: abs(size - near)) for near in _CHECKED_SIZES if drafted}
    found = dict.fromkeys((0, *sizes), math.inf)
    for _ in range(1 + repeats):
        for each in found:
            begin = time.perf_counter()
            forward(each)
            if device.type == "cuda":
                torch.cuda.synchronize(device)
            found[each] = min(found[each], time.perf_counter() - begin)
    changes = [(found[size] / found[0]) / (seconds[size] / seconds[0]) for size in sizes]
    return all(1 / _TOLERANCE < change < _TOLERANCE for change in changes)


class CostKey(NamedTuple):
    """
    What the times of a target depend on, beside the target itself. Contexts of like length share their times: up to
    2,048 tokens, up to 8,192, and so on.
    """

    rows: int
    max_nodes: int
    context: int
    attention: str | None
    dtype: str
    device: str
    threads: int
    packed: bool
    compiled: tuple[int, ...]

    @classmethod
    def of(
        cls,
        target: PreTrainedModel,
        context: int,
        max_nodes: int,
        rows: int = 1,
        packed: bool = False,
        compiled: tuple[int, ...] = (),
    ) -> CostKey:
        """
        The key of a target now, with `context` tokens before it in each of `rows` rows, and rounds of `compiled`
        tokens compiled.
        """
        device = target.device
        return cls(
            rows=rows,
            max_nodes=max_nodes,
            context=next(length for length in (2048 * 4**step for step in itertools.count()) if context <= length),
            attention=attention_implementation(target.config.get_text_config(decoder=True)),
            dtype=str(target.dtype),
            device=torch.cuda.get_device_name(device) if device.type == "cuda" else device.type,
            threads=torch.get_num_threads(),
            packed=packed,
            compiled=compiled,
        )


def costs_of(
    target: PreTrainedModel,
    key: CostKey,
    known: dict[CostKey, Costs],
    forward: Callable[[int], object],
    tokens: int,
) -> Costs | None:
    """
    The costs for a key: known to this process, or kept on disk, or derived from the costs of more rows, or measured
    now.

    Args:
        target ([`PreTrainedModel`]): the target.
        key ([`CostKey`]): what its times depend on.
        known (`dict[CostKey, Costs]`): costs that this process knows; what is found is added.
        forward (`Callable[[int], None]`): see [`measure`].
        tokens (`int`): tokens that the call may still generate. It is not made to wait longer than these would take.

    Returns:
        [`Costs`], or `None` where they are unknown and the call is too short to measure them.
    """
    if key in known:
        return known[key]
    is_short = tokens < _FEWEST_TOKENS
    seconds = load(target, key)
    more_rows = [each for each in list(known) if each.rows > key.rows and each[1:] == key[1:]]
    if seconds is not None and (is_short or still_valid(seconds, forward, target.device)):
        known[key] = Costs(in_steps(seconds, key.compiled))
    elif more_rows:
        nearest = min(more_rows)
        known[key] = known[nearest].of_fewer_rows(nearest.rows, key.rows)
    elif is_short:
        return None
    else:
        logger.warning_once(
            "Falcon measures what the target's forward costs on this machine: once, for a second at most."
        )
        # Where kept times did not hold, their check has taken a part of the time.
        share = 2 if seconds is None else 3
        seconds = measure(forward, key.max_nodes, target.device, tokens=tokens / share)
        save(target, key, seconds)
        known[key] = Costs(in_steps(seconds, key.compiled))
    return known[key]


def load(target: PreTrainedModel, cost_key: CostKey) -> dict[int, float] | None:
    """The times that are kept for a target, or `None`: also if the file holds anything that `save` does not write."""
    try:
        kept = read_json(_file(target, cost_key)[0], max_bytes=_LARGEST_FILE, max_depth=2)
        seconds = {int(size): float(value) for size, value in kept["seconds"].items()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None
    # The target will run with these sizes, and is asked for no larger ones.
    are_sizes = 0 in seconds and all(0 <= size <= cost_key.max_nodes for size in seconds)
    shortest, longest = _SECONDS
    return seconds if are_sizes and all(shortest <= value <= longest for value in seconds.values()) else None


def save(target: PreTrainedModel, cost_key: CostKey, seconds: dict[int, float]) -> None:
    """Keeps times for a target. Where nothing can be written they are measured again next time."""
    file, key = _file(target, cost_key)
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        # Written in a folder of its own and renamed: no process reads half of it, and nothing is left of a failure.
        with tempfile.TemporaryDirectory(dir=file.parent) as folder:
            part = Path(folder, file.name)
            part.write_text(json.dumps({**key, "seconds": seconds}, indent=2), encoding="utf-8")
            os.replace(part, file)
    except OSError as error:
        logger.debug(f"Costs are not kept: {error}")


def _file(target: PreTrainedModel, cost_key: CostKey) -> tuple[Path, dict[str, Any]]:
    """The file of a target's times, and the key that it holds."""
    key = {
        **cost_key._asdict(),
        "target": weights_fingerprint(target) or type(target).__name__,
        "torch": str(torch.__version__),
        "transformers": transformers_version,
    }
    digest = hashlib.sha256(json.dumps(key, sort_keys=True).encode()).hexdigest()[:16]
    return cache_folder() / "costs" / f"{digest}.json", key
