"""Curves of throughput and memory that are made, for a search that knows no device."""

from __future__ import annotations

import random
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field, replace

from openmed_nb.runbook.bench.sweep import KneeSearch, Point, close_points, knee_of


@dataclass
class Made:
    """A device with a curve.

    Attributes:
        speed: The throughput for a number of rows.
        capacity: The most rows that fit.
        noise: The standard deviation of one look at a speed, as a share.
        full: Other sizes that do not fit.
        slow: The sizes that another program slows when they are measured first.
        asked: What was measured, in order.
    """

    speed: Callable[[int], float]
    capacity: int = 1 << 40
    noise: float = 0.0
    seed: int = 0
    full: Collection[int] = ()
    slow: Collection[int] = ()
    asked: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.random = random.Random(self.seed)

    def measure(self, rows: int) -> Point:
        """Return a point, as a measurement would."""
        self.asked.append(rows)
        if rows > self.capacity or rows in self.full:
            return Point(rows, fits=False)
        return Point(rows, self.seen(rows) / (9 if rows in self.slow else 1))

    def seen(self, rows: int) -> float:
        """Return a speed with its noise."""
        return self.speed(rows) * max(0.5, self.random.gauss(1, self.noise))

    def again(self, points: Sequence[Point]) -> list[Point]:
        """Return points of which each is the middle of nine looks."""
        return [
            replace(one, throughput=sorted(self.seen(one.rows) for _ in range(9))[4])
            for one in points
            if one.fits
        ]

    def search(
        self, hindrance: Callable[[int, Sequence[Point]], str] = lambda *_: "", **limits: int | None
    ) -> KneeSearch:
        """Return a search that has ended."""
        search = KneeSearch(hindrance, self.again, **limits)
        for rows in search.sizes():
            search.points[rows] = self.measure(rows)
        return search

    def knee(self, largest: int | None = None) -> int | None:
        """Return the knee as a sweep finds it."""
        close = close_points(self.search(largest=largest).measured_points)
        found = knee_of(self.again(close) if self.noise else close)
        return found.rows if found else None

    def share(self, knee: int, upto: int) -> float:
        """Return the throughput at a knee as a share of the best of all sizes that fit."""
        return self.speed(knee) / max(map(self.speed, range(1, min(upto, self.capacity) + 1)))
