# Copyright 2026 The hf_falcon authors. Licensed under the Apache License, Version 2.0.
"""The time that learning may take between calls, and its steps a minute."""

from __future__ import annotations

from collections import deque

# Seconds that may be saved up: a long call is not followed by a long pause.
_MOST_CREDIT = 2.0
# Weight of a new unit in the mean of their seconds.
_NEW = 0.2


class Budget:
    """
    Counts seconds. It reads no clock.

    Args:
        share (`float`): seconds of learning between calls, as a share of the seconds of calls.
        steps_a_minute (`float`, *optional*): steps in a minute, at most.
    """

    def __init__(self, share: float, steps_a_minute: float | None):
        self._share, self._steps_a_minute = share, steps_a_minute
        self._credit = 0.0
        # Times of the latest steps, as many as one span may have: 2.5 steps a minute are 2 steps in 48 seconds.
        self._steps: deque[float] = deque(maxlen=max(1, int(steps_a_minute or 1)))
        # Mean seconds of a unit of learning, which is not interrupted; 0 before the first.
        self.unit = 0.0

    def earn(self, seconds: float) -> None:
        """Takes the time of calls."""
        self._credit = min(max(_MOST_CREDIT, self.unit), self._credit + self._share * seconds)

    @property
    def is_enough(self) -> bool:
        """Whether a unit of learning may run between calls."""
        return self._credit > 0 and self._credit >= self.unit

    def spend(self, seconds: float, between_calls: bool) -> None:
        """Takes the time of a unit."""
        self.unit = seconds if self.unit == 0 else self.unit + _NEW * (seconds - self.unit)
        if between_calls:
            self._credit -= seconds

    def add_step(self, now: float) -> None:
        """Takes the time of a step of the optimizer."""
        self._steps.append(now)

    def seconds_to_step(self, now: float) -> float:
        """Seconds until the next step may begin."""
        most = self._steps.maxlen
        if self._steps_a_minute is None or most is None or len(self._steps) < most:
            return 0.0
        return max(0.0, self._steps[0] + 60 * most / self._steps_a_minute - now)
