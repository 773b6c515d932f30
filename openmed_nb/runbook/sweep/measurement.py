"""Measures a batch size: the first pass, the steps after it, and the memory of one of them; out of memory is a point too."""

from __future__ import annotations

import gc
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from ...devices.allocators import empty_cache
from ...devices.memory import is_out_of_memory
from ...devices.request import kind_of
from ..workloads.clock import now
from ..workloads.workload import Bench, Workload
from .memory import HEADROOM, expected_memory, memory_of
from .points import Point, close_points, fitting, rates
from .rules import SweepRules
from .search import MEMORY, TIME

WARM_UP = 0.05
"""A shape is warm after so many seconds of steps behind the first pass, or after one step that takes longer."""

STEPS, SECONDS = 5, 0.3
"""A point has at least so many timed steps, and so many seconds of them."""

FEWEST = 3
"""Where a step takes long, so many timed steps, or rounds, are enough."""

LONG = 0.5
"""A step takes long from so many seconds on."""

UNTIMED = 3.5
"""How many steps a point costs beside the timed ones: the first, which takes longer, one to warm up, one for its memory."""

ROUNDS = 9
"""In so many rounds the sizes near the best are measured in turn, or in as many as there is time for."""

VISIT = 0.05
"""How many seconds a size is measured in a round, at least one step."""

SHARE = 0.6
"""The share of the time that the search may take; the rest is for the rounds."""


@dataclass
class Measurement:
    """A bench under measurement.

    Attributes:
        bench: What is measured.
        rules: How.
        limit: The memory that a step may take, ``None`` where nobody knows.
        begin: When it began.
        method: How memory was measured, in words.
        last: The last workload, which tells of length, workers and types.
    """

    bench: Bench
    rules: SweepRules
    limit: int | None
    begin: float = field(default_factory=now)
    method: str = ""
    last: Workload | None = None

    def point(self, rows: int) -> Point:
        """Measure a number of rows; where they do not fit, the caches of the device are emptied.

        Raises:
            Exception: Whatever a step raises that is no lack of memory.
        """
        point = self._tried(rows)
        if point is None:
            self.clean()
        return point or Point(rows, fits=False)

    def hindrance(self, rows: int, points: Sequence[Point]) -> str:
        """Return why a number of rows is not to be measured: the memory that it is expected to take, or the time."""
        memory = expected_memory(points, rows)
        if self.limit is not None and memory is not None and memory > self.limit * self._headroom:
            return MEMORY
        last = fitting(points)[-1]
        seconds = rows / last.speed
        steps = FEWEST if seconds > LONG else STEPS
        after = self.elapsed + max(seconds * steps, SECONDS) + seconds * UNTIMED
        return TIME if after > self.rules.seconds * SHARE else ""

    def in_turn(self, points: Sequence[Point]) -> tuple[Point, ...]:
        """Return the sizes near the best, measured in turn, so that heat and other programs touch all of them alike.

        The search measured each at another moment; what is compared in the end was measured side by side.
        """
        close = close_points(points)
        return self.rounds(close, ROUNDS) if len(close) > 1 else tuple(close)

    def again(self, points: Sequence[Point]) -> tuple[Point, ...]:
        """Return points that were measured once more in turn, where there is time for it; the others as they are."""
        seconds = sum(2 * point.rows / point.speed for point in points) * FEWEST
        return self.rounds(points, FEWEST) if self.elapsed + seconds < self.rules.seconds * SHARE else tuple(points)

    def rounds(self, points: Sequence[Point], most: int) -> tuple[Point, ...]:
        """Return points measured in turn, in rounds that begin at either end; after some of them, time may end it."""
        seconds: dict[int, list[float]] = {point.rows: [] for point in points}
        for number in range(most):
            if number >= FEWEST and self.elapsed > self.rules.seconds:
                break
            for point in points if number % 2 else points[::-1]:
                seconds[point.rows] += self._visited(point.rows)
        return tuple(replace(one, **rates(one.rows, times)) if (times := seconds[one.rows]) else one for one in points)

    @property
    def elapsed(self) -> float:
        """The seconds since the beginning."""
        return now() - self.begin

    def clean(self) -> None:
        """Let go what a batch held, also in a cycle with an error, and hand cached blocks back."""
        gc.collect()
        empty_cache(self.bench.device)

    @property
    def _headroom(self) -> float:
        return HEADROOM.get(kind_of(self.bench.device), HEADROOM["cpu"])

    def _tried(self, rows: int) -> Point | None:
        """Return a point, ``None`` where it runs out of memory; the error is let go here, with the tensors of its frames."""
        try:
            return self._measured(rows)
        except (RuntimeError, MemoryError) as error:
            if not is_out_of_memory(error):
                raise
            return None

    def _measured(self, rows: int) -> Point:
        workload = self.last = self.bench.bucket(rows)
        batch = next(workload.batches())
        first = workload.seconds(batch)
        warm(workload, batch)
        memory, self.method = memory_of(self.bench.device, lambda: workload.run(batch))
        return Point(rows, memory=memory, first_seconds=first, **rates(rows, timed_steps(workload, batch)))

    def _visited(self, rows: int) -> list[float]:
        """Return the times of some steps; none where they do not fit this time, which the points know already."""
        try:
            workload = self.bench.bucket(rows)
            batch = next(workload.batches())
            first = workload.seconds(batch)  # It also warms this shape up; a long one was warm soon enough.
            return steps_for(workload, batch, VISIT, 1) if first < VISIT else [first]
        except (RuntimeError, MemoryError) as error:
            if not is_out_of_memory(error):
                raise
            return []


def warm(workload: Workload, batch: Any) -> None:
    """Do steps until the device has done this shape for a moment."""
    steps_for(workload, batch, WARM_UP, 1)


def timed_steps(workload: Workload, batch: Any) -> list[float]:
    """Return how long steps take, in seconds: at least some of them, for at least some tenths of a second."""
    first = workload.seconds(batch)
    return [first, *steps_for(workload, batch, SECONDS - first, (FEWEST if first > LONG else STEPS) - 1)]


def steps_for(workload: Workload, batch: Any, seconds: float, fewest: int) -> list[float]:
    """Return how long each of some steps took, in seconds: so many at least, and as many as fit into some seconds."""
    times: list[float] = []
    begin = now()
    while len(times) < fewest or now() - begin < seconds:
        times.append(workload.seconds(batch))
    return times
