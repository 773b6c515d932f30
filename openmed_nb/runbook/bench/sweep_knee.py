"""The knee of a sweep: the rule that picks a batch size, and the search for the sizes that are worth measuring.

The search doubles while that pays and fits, then bisects. It measures nothing itself and knows no device: one function measures
a size, another one says why a size must not be measured; so tests search made curves.
"""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace

from ..._render.display import Plain

# A larger batch pays if it gives more than this share more throughput. That leaves room for noise inside of five percent, which
# is what a choice by hand is about as good as.
KNEE_GAIN = 0.03

# Sizes within this share of the best are measured once more, in turn, before one of them is the knee.
CLOSE = 0.10


@dataclass(frozen=True)
class Point(Plain):
    """A batch size, and what was measured with it.

    Attributes:
        rows: How many rows a batch has.
        throughput: Rows a second, by the median of the steps; ``None`` if the batch does not fit.
        spread: The same by the quartiles of the steps, the slower one first; ``None`` with fewer than three steps.
        memory: The most memory that a step took, in bytes; ``None`` if it is not known.
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
        """The throughput as a number: 0 if the batch does not fit."""
        return self.throughput or 0.0

    def timed(self, seconds: Sequence[float]) -> Point:
        """Return this point with the throughput of steps that took these times, at least one."""
        spread = None
        if len(seconds) > 2:  # noqa: PLR2004 - two times have no quartiles between them
            low, _middle, high = statistics.quantiles(seconds, n=4, method="inclusive")
            spread = (self.rows / high, self.rows / low)
        return replace(self, throughput=self.rows / statistics.median(seconds), spread=spread, steps=len(seconds))


def fitting(points: Iterable[Point]) -> list[Point]:
    """Return the points that fit, the smallest first."""
    return sorted((point for point in points if point.fits), key=lambda point: point.rows)


def best_of(points: Iterable[Point]) -> Point | None:
    """Return the point with the highest throughput, the smallest of equals; ``None`` if none fits."""
    return max(fitting(points), key=lambda point: point.speed, default=None)


def knee_of(points: Iterable[Point], gain: float = KNEE_GAIN) -> Point | None:
    """Return the smallest point from which no larger one gains more than a share; ``None`` if none fits.

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
    """Return the points that are near the best, the smallest first."""
    there = fitting(points)
    best = best_of(there)
    return [point for point in there if best and point.speed * (1 + CLOSE) >= best.speed]


# Why a search ends: larger batches no longer pay, would come near the limit, do not fit, were not asked for, take too long.
THROUGHPUT, MEMORY, OUT_OF_MEMORY, LARGEST, TIME = "throughput", "memory", "out of memory", "largest", "time"

# The same in a sentence, from the largest size that fits and the limit.
ENDS = {
    THROUGHPUT: "The last batches up to {rows} gained too little, so none beyond was tried.",
    MEMORY: "A batch of more than {rows} is expected to come too near the limit of {limit}.",
    OUT_OF_MEMORY: "Batches up to {rows} fit, and a larger one ran out of memory.",
    LARGEST: "No batch of more than {rows} was asked for.",
    TIME: "A batch of more than {rows} would have taken too long: pass more seconds.",
}

# Why nothing larger was measured than the size at which throughput still rises, in words without figures.
RISING = {
    MEMORY: "nothing larger was tried, because of the memory",
    OUT_OF_MEMORY: "nothing larger fits into the memory",
    LARGEST: "nothing larger was asked for",
    TIME: "nothing larger was tried, because of the time",
}

# After so many doublings in a row that do not pay, the search ends; one can be an unlucky size of a kernel.
PATIENCE = 2

# Around the knee and the best, sizes are bisected until they are about this part of themselves apart.
FINEST = 4

# The largest size that fits is found to this share if throughput still rises there: a share less of rows is one less of speed.
EDGE = 0.01


@dataclass
class Search:
    """A search under way."""

    measure: Callable[[int], Point]  # Measures a number of rows; what does not fit is a point too.
    # Says why a number of rows must not be measured after these points: one of the reasons above, or nothing.
    hindrance: Callable[[int, Sequence[Point]], str] = lambda _rows, _points: ""
    # Measures points once more, in turn, before they end the search.
    again: Callable[[Sequence[Point]], Sequence[Point]] = lambda points: points
    gain: float = KNEE_GAIN  # A larger batch pays if it gives more than this share more throughput.
    largest: int | None = None  # The most rows; ``None`` for any.
    smallest: int = 1  # The rows that are measured first.
    points: dict[int, Point] = field(default_factory=dict)  # What was measured, by rows.
    stopped: str = ""  # Why the doubling ended.
    bound: int | None = None  # The smallest size that is known not to fit, or not to be measured for want of memory.

    @property
    def found(self) -> tuple[Point, ...]:
        """The points, the smallest first."""
        return tuple(self.points[rows] for rows in sorted(self.points))

    def run(self) -> tuple[Point, ...]:
        """Double, bisect, and return the points, the smallest first."""
        self.double()
        self.approach_bound()
        while sizes := [rows for rows in self.between() if not self.hindrance(rows, self.found)]:
            for rows in sizes:
                self.take(rows)
        return self.found

    def double(self) -> None:
        """Measure the smallest, twice as many and so on rows, until there is a reason to end."""
        rows = self.smallest
        while not self.stopped:
            following = rows * 2 if self.largest is None else min(rows * 2, self.largest)
            if not self.take(rows).fits:
                self.stopped = OUT_OF_MEMORY
            elif following == rows:
                self.stopped = LARGEST
            elif not (self.still_pays() or self.pays_after_all()):
                self.stopped = THROUGHPUT
            else:
                self.stopped = self.hindrance(following, self.found)
            if self.stopped == MEMORY:
                self.bound = following
            rows = following

    def still_pays(self) -> bool:
        """Tell whether one of the last doublings gained enough over all before them."""
        best = best_of(self.found[:-PATIENCE])
        return best is None or pays(self.found[-PATIENCE:], best, self.gain)

    def pays_after_all(self) -> bool:
        """Measure the last doublings and the best before them in turn: another program may have slowed the last ones."""
        best = best_of(self.found[:-PATIENCE])
        for point in self.again([*([best] if best else []), *self.found[-PATIENCE:]]):
            self.points[point.rows] = point
        return self.still_pays()

    def approach_bound(self) -> None:
        """If throughput still rises at the largest that fits, bisect between it and what does not fit."""
        there = fitting(self.found)
        if self.bound is None or not there or knee_of(there, self.gain) != there[-1]:
            return
        low = there[-1].rows
        while self.bound - low > max(1, low * EDGE):
            rows = (low + self.bound) // 2
            hindered = self.hindrance(rows, self.found)
            if hindered not in {"", MEMORY}:
                return
            if hindered or not self.take(rows).fits:
                self.bound = rows
            else:
                low = rows

    def between(self) -> list[int]:
        """Return the sizes in the middle between the knee, the best and their neighbours that are not yet fine enough."""
        most = max((point.rows for point in fitting(self.found)), default=0)
        sizes = [point.rows for point in self.found if point.rows <= most]  # One that failed once is not tried again.
        centres = {point.rows for point in (knee_of(self.found, self.gain), best_of(self.found)) if point}
        return [
            (low + high) // 2
            for low, high in itertools.pairwise(sizes)
            if centres & {low, high} and high - low > max(1, low // FINEST)
        ]

    def take(self, rows: int) -> Point:
        """Measure a size and keep it; what does not fit bounds the rest."""
        point = self.points[rows] = self.measure(rows)
        if not point.fits:
            self.bound = rows if self.bound is None else min(rows, self.bound)
        return point
