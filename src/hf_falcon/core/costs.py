# Copyright 2026 The hf_falcon authors. Licensed under the Apache License, Version 2.0.
"""
What a round costs on this machine: the target's time for n nodes, and the time of a draft pass (Sequoia; DDTree).

Costs are learnt from the rounds themselves, which are timed anyway. They begin from a prior: a plain guess, or what
`hf-falcon tune` measured. Later calls under the same [`CostKey`] continue from what was learnt.
"""

from __future__ import annotations

import itertools
import math
import statistics
import time
from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from transformers import PreTrainedModel

from .hook import attention_implementation
from .interfaces import part

# Timings that a cost is estimated from, and that the prior counts for; rounds that a timing is kept: the load changes.
_RECENT, _PRIOR, _ROUNDS_KEPT = 5, 1.0, 256
# What a plain round counts for there: probes, while drafting is paused, are to know what earlier ones cost.
_PLAIN_ROUND = 1 / 8
# The factor between the costs that decisions are made with. In bfloat16 the size of a tree decides how its logits are
# rounded: costs that change with every timing would flip near-ties from run to run.
_STEP = 1.15
# What a draft pass, a commit, and reading a prompt cost before they were timed, in plain steps.
_UNMEASURED_PASS, _UNMEASURED_PROMPT = 0.1, 1.0
# A coarse clock may say 0.
_LEAST = 1e-4
# Rounds between two plain steps where everything is drafted: at first, and at most, doubling. They give the unit.
_SHORTEST_INTERVAL, _LONGEST_INTERVAL = 32, 64


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


class _Cost:
    """
    A cost in plain steps: a low quantile of the recent timings, blended with a prior, in steps of a factor. An
    interruption only makes a timing longer. A median of few timings would keep it: a size that looks dear is not run
    again, and so not timed again.
    """

    def __init__(self, prior: float):
        self.value = self._prior = prior
        # Replaced as a whole: threads share it.
        self._recent: tuple[tuple[float, float], ...] = ()

    @property
    def is_known(self) -> bool:
        """Whether the cost is estimated from as many timings as it ever is."""
        return len(self._recent) == _RECENT

    def observe(self, cost: float, now: float) -> bool:
        """Takes a timing of round `now`. Returns whether the cost has changed."""
        self._recent = (*self._recent[1 - _RECENT :], (now, max(cost, _LEAST)))
        return self.forget(now)

    def forget(self, now: float) -> bool:
        """Forgets what is too old at round `now`. Returns whether the cost has changed."""
        self._recent = recent = tuple(each for each in self._recent if each[0] >= now - _ROUNDS_KEPT)
        before, count = self.value, len(recent)
        # The second shortest of five, the shortest of up to three.
        timed = sorted(cost for _, cost in recent)[(count - 1) // 3] if count else self._prior
        # A mean of logarithms: half and twice the prior are equally far from it.
        known = self._prior * (timed / self._prior) ** (count / (count + _PRIOR))
        while known > self.value * _STEP:
            self.value *= _STEP
        while known < self.value / _STEP:
            self.value /= _STEP
        return self.value != before


class Costs:
    """
    Costs of rounds of one target with one drafter, in plain steps: the unit is the target's time for a single token.

    Args:
        prior (`dict[int, float]`): the target's time for the root and some number of draft nodes, in any unit; with 0
            among them.
        sizes (sequence of `int`, *optional*): tokens of a tree, the root among them, that smaller trees are padded to,
            in ascending order; larger ones run as they are.

    Attributes:
        prompt (`float`): what the drafter's reading of a prompt costs.
        steps_due (`int`): plain steps that are to be timed.
    """

    def __init__(self, prior: Mapping[int, float], sizes: Sequence[int] = ()):
        self._tokens = [size + 1 for size in sorted(prior)]
        self._prior = _ascending([prior[tokens - 1] / prior[0] for tokens in self._tokens])
        self._sizes = tuple(sizes)
        # What forwards of about some number of tokens cost, as a multiple of the prior.
        self._forwards: dict[int, _Cost] = {}
        self._commit, self._pass = _Cost(_UNMEASURED_PASS), _Cost(_UNMEASURED_PASS)
        self.prompt = _UNMEASURED_PROMPT
        # Seconds of the latest plain steps; plain steps that are due; rounds until the next is, now and at first.
        self._plain: deque[float] = deque(maxlen=3)
        self.steps_due, self._left, self._interval = 1, _SHORTEST_INTERVAL, _SHORTEST_INTERVAL
        # Rounds so far, plain ones for less; and drafted ones.
        self._now, self._drafted = 0.0, 0
        # Tokens of the largest forward so far, and how often the costs of forwards have changed.
        self.largest, self.version = 1, 0

    @property
    def commit(self) -> float:
        """What a commit costs."""
        return self._commit.value

    @property
    def draft_pass(self) -> float:
        """What a draft pass costs."""
        return self._pass.value

    def target(self, max_nodes: int) -> list[float]:
        """The target's time for the root and 0, 1, ..., `max_nodes` draft nodes."""
        sizes = sorted(self._forwards)
        factors = [self._forwards[size].value for size in sizes]
        logs = [math.log2(size) for size in sizes]
        found = [1.0]
        for tokens in map(self._padded, range(2, max_nodes + 2)):
            factor = _interpolate(min(max(math.log2(tokens), logs[0]), logs[-1]), logs, factors) if sizes else 1.0
            found.append(factor * self._prior_of(tokens))
        return _ascending(found)

    def observe_target(self, nodes: int, seconds: float) -> None:
        """Takes the seconds of a round's forward over `nodes` tokens, the root among them."""
        # Also where no tree runs: a size that looked dear once would never be timed again.
        self._now += 1.0 if nodes > 1 else _PLAIN_ROUND
        self.version += sum([cost.forget(self._now) for cost in list(self._forwards.values())])
        if nodes == 1:
            self._plain.append(seconds)
            self.steps_due, self._left = max(0, self.steps_due - 1), self._interval
            return
        if not self._plain:
            return
        self._left, self.largest = self._left - 1, max(self.largest, nodes)
        if self._left <= 0:
            self.steps_due, self._interval = max(1, self.steps_due), min(2 * self._interval, _LONGEST_INTERVAL)
        tokens = self._padded(nodes)
        near = tokens if tokens in self._sizes else 2 ** round(math.log2(tokens))
        cost = self._forwards.setdefault(near, _Cost(1.0))
        was_known = cost.is_known
        if cost.observe(seconds / self._plain_seconds / self._prior_of(tokens), self._now):
            self.version += 1
            if was_known:
                # Is the tree slower, or the whole machine? Two plain steps make the median a new one.
                self.steps_due, self._interval = 2, _SHORTEST_INTERVAL

    def observe_drafting(self, commit_seconds: float | None, pass_seconds: float, passes: int) -> None:
        """Takes the seconds of a round's drafting: of its commit, where known, and of all its `passes` after it."""
        self._drafted += 1
        if self._plain and commit_seconds is not None:
            self._commit.observe(commit_seconds / self._plain_seconds, self._drafted)
        if self._plain and passes:
            self._pass.observe(pass_seconds / passes / self._plain_seconds, self._drafted)

    def observe_prompt(self, seconds: float) -> None:
        """Takes the seconds in which the drafter read a prompt. A mean of logarithms: an interruption counts less."""
        self.prompt = math.sqrt(self.prompt * (self.plain_steps(seconds) or self.prompt))

    def plain_steps(self, seconds: float) -> float:
        """How many plain steps take so long; 0 before any was timed."""
        return seconds / self._plain_seconds if self._plain else 0.0

    @property
    def _plain_seconds(self) -> float:
        return statistics.median(self._plain)

    def _padded(self, tokens: int) -> int:
        return next((size for size in self._sizes if size >= tokens), tokens)

    def _prior_of(self, tokens: int) -> float:
        return _interpolate(tokens, self._tokens, self._prior)


def _ascending(costs: Sequence[float]) -> list[float]:
    """More tokens never take less time, and none less than a plain step."""
    return [max(1.0, each) for each in itertools.accumulate(reversed(costs), min)][::-1]


def _interpolate(place: float, places: Sequence[float], values: Sequence[float]) -> float:
    """The straight line between neighbours; beyond the last one, on along the line of the last two."""
    upper = next((i for i, each in enumerate(places) if each >= place), len(places) - 1)
    if places[upper] == place or len(places) == 1:
        return values[upper]
    lower = upper - 1
    slope = (values[upper] - values[lower]) / (places[upper] - places[lower])
    return values[lower] + slope * (place - places[lower])


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


def costs_of(target: PreTrainedModel, key: CostKey, known: dict[CostKey, Costs]) -> Costs:
    """
    The costs for a key, which the rounds change.

    Args:
        target ([`PreTrainedModel`]): the target.
        key ([`CostKey`]): what its times depend on.
        known (`dict[CostKey, Costs]`): costs that this process knows; new ones are added.
    """
    if key not in known:
        read = part("prior")
        measured = None if read is None else read(target, key)
        known[key] = Costs(default_prior(key) if measured is None else measured, key.compiled)
    return known[key]


def default_prior(key: CostKey) -> dict[int, float]:
    """
    The target's time for 0, 1, ... draft nodes before anything is known, in plain steps. Few tokens wait for the
    weights; from some number of tokens in all rows on, time grows with them.
    """
    most, rows = max(key.max_nodes, 1), key.rows
    if key.device != "cpu":
        free, slope, first = 64, 1 / 256, 0.0
    else:
        # In float32 the products of two rows are much slower than those of one.
        free, slope, first = 4, 1 / 32, 0.3 if key.dtype == "torch.float32" and rows == 1 else 0.0
    return {nodes: 1.0 + first * (nodes > 0) + slope * max(0, rows * (nodes + 1) - free) for nodes in range(most + 1)}
