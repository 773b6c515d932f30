"""Synthetic throughput curves for tests of the search for batch sizes."""

from __future__ import annotations

import random
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, field, replace

from openmed_nb.runbook.bench.sweep import Point, _find_knee, _remeasure_near_best, search_sizes


@dataclass
class SyntheticDevice:
    """Device with a synthetic throughput curve.

    Attributes:
        speed: Function that returns the throughput for a number of rows.
        capacity: Maximum number of rows that fit.
        noise: Standard deviation of one measurement as a fraction of the throughput.
        seed: Seed of the noise.
        full: Other sizes that do not fit.
        slow: Sizes that another program slows down when they are first measured.
        stop_reason: Function that returns a stop code for a number of rows and the points so far.
        measured: Measured sizes in order.
    """

    speed: Callable[[int], float]
    capacity: int = 1 << 40
    noise: float = 0.0
    seed: int = 0
    full: Collection[int] = ()
    slow: Collection[int] = ()
    stop_reason: Callable[[int, Sequence[Point]], str] = lambda *_: ""
    measured: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.random = random.Random(self.seed)

    def measure_size(self, rows: int) -> Point:
        """Return a point, like a real measurement."""
        self.measured.append(rows)
        if rows > self.capacity or rows in self.full:
            return Point(rows, fits=False)
        return Point(rows, self.observe_speed(rows) / (9 if rows in self.slow else 1))

    def observe_speed(self, rows: int) -> float:
        """Return the throughput with noise."""
        return self.speed(rows) * max(0.5, self.random.gauss(1, self.noise))

    def remeasure(self, points: Iterable[Point]) -> list[Point]:
        """Return points with the median of nine measurements each."""
        return [
            replace(point, throughput=sorted(self.observe_speed(point.rows) for _ in range(9))[4])
            for point in points
            if point.fits
        ]

    def measure_interleaved(self, points: Iterable[Point], _max_rounds: int) -> list[Point]:
        """Return points as after interleaved rounds."""
        return self.remeasure(points)

    def find_knee(self, max_rows: int | None = None) -> int | None:
        """Return the knee that a sweep would find."""
        knee = _find_knee(_remeasure_near_best(self, search_sizes(self, max_rows=max_rows)[0]))
        return knee.rows if knee else None

    def fraction_of_best(self, knee: int, max_rows: int) -> float:
        """Return the throughput at a knee as a fraction of the best of all sizes that fit."""
        return self.speed(knee) / max(map(self.speed, range(1, min(max_rows, self.capacity) + 1)))
