"""Sizes that were measured, and which of them is the knee: the smallest from which nothing larger gains much."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

KNEE_GAIN = 0.03
"""A larger batch pays that gives more than this share more throughput.

It leaves room for noise inside of five percent, which is what a choice by hand is about as good as.
"""

CLOSE = 0.10
"""Sizes within this share of the best are measured once more, in turn, before one of them is the knee."""

FEWEST_FOR_QUARTILES = 3
"""Two times have no quartiles between them."""


@dataclass(frozen=True)
class Point:
    """A batch size, and what was measured with it.

    Attributes:
        rows: How many rows a batch has.
        throughput: How many rows a second, by the median of the steps; ``None`` where the batch does not fit.
        spread: The same by the quartiles of the steps, the slower one first; ``None`` with fewer than three steps.
        memory: The most memory that a step took, in bytes; ``None`` where nothing tells.
        first_seconds: How long the first pass of this shape took, in which MPS and CUDA compile or choose kernels.
        steps: How many steps were timed.
        fits: Whether the batch fits into the memory.
    """

    rows: int
    throughput: float | None = None
    spread: tuple[float, float] | None = None
    memory: int | None = None
    first_seconds: float | None = None
    steps: int = 0
    fits: bool = True

    @property
    def speed(self) -> float:
        """The throughput as a number: 0 where the batch does not fit."""
        return self.throughput or 0.0

    def to_dict(self) -> dict[str, Any]:
        """Return the attributes as plain numbers and lists."""
        return {**vars(self), "spread": None if self.spread is None else list(self.spread)}


def rates(rows: int, seconds: Sequence[float]) -> dict[str, Any]:
    """Return throughput, spread and steps of a point from the times of its steps, at least one.

    Example:
        >>> rates(8, [1.0, 2.0, 4.0])
        {'throughput': 4.0, 'spread': (2.6666666666666665, 5.333333333333333), 'steps': 3}
    """
    spread = None
    if len(seconds) >= FEWEST_FOR_QUARTILES:
        low, _middle, high = statistics.quantiles(seconds, n=4, method="inclusive")
        spread = (rows / high, rows / low)
    return {"throughput": rows / statistics.median(seconds), "spread": spread, "steps": len(seconds)}


def fitting(points: Iterable[Point]) -> list[Point]:
    """Return the points that fit, the smallest first."""
    return sorted((point for point in points if point.fits), key=lambda point: point.rows)


def best_of(points: Iterable[Point]) -> Point | None:
    """Return the point with the highest throughput, the smallest of equals; ``None`` where none fits."""
    return max(fitting(points), key=lambda point: point.speed, default=None)


def knee_of(points: Iterable[Point], gain: float = KNEE_GAIN) -> Point | None:
    """Return the smallest point from which no larger one gains more than a share; ``None`` where none fits.

    Its throughput is that of the best, or at most that share away from it: the best itself would be taken otherwise.

    Example:
        >>> knee_of([Point(8, 50.0), Point(16, 99.0), Point(32, 101.0), Point(64, fits=False)]).rows
        16
    """
    there = fitting(points)
    return next((point for at, point in enumerate(there) if not pays(there[at + 1 :], point, gain)), None)


def pays(others: Iterable[Point], point: Point, gain: float) -> bool:
    """Tell whether any of other points gains more than a share over a point."""
    return any(other.speed > point.speed * (1 + gain) for other in others)


def close_points(points: Iterable[Point]) -> list[Point]:
    """Return the points that are near the best, the smallest first.

    Example:
        >>> [point.rows for point in close_points([Point(8, 50.0), Point(16, 95.0), Point(32, 100.0)])]
        [16, 32]
    """
    there = fitting(points)
    best = best_of(there)
    return [point for point in there if best and point.speed * (1 + CLOSE) >= best.speed]
