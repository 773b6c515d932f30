"""The search for the sizes that are worth measuring: doubles while that pays and fits, then bisects.

It measures nothing itself, and knows no device: a function measures a size, and another one says why a size is not to be
measured. So it is the same for any curve, and is tested with made ones.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from .points import KNEE_GAIN, Point, best_of, fitting, knee_of, pays

THROUGHPUT, MEMORY, OUT_OF_MEMORY, LARGEST, TIME = "throughput", "memory", "out of memory", "largest", "time"
"""Why a search ends: larger batches no longer pay, would come near the limit, do not fit, were not asked for, take too long."""

PATIENCE = 2
"""After so many doublings in a row that do not pay, the search ends; one can be an unlucky size of a kernel."""

FINEST = 4
"""Around the knee and the best, sizes are bisected until they are about this part of themselves apart."""

EDGE = 0.01
"""Where throughput still rises at the largest that fits, it is found to this share: a share less of rows is one less of speed."""

Measure = Callable[[int], Point]
"""Measures a number of rows; what does not fit is a point too."""

Again = Callable[[Sequence[Point]], Sequence[Point]]
"""Measures points once more, in turn."""

Hindrance = Callable[[int, Sequence[Point]], str]
"""Says why a number of rows is not to be measured after these points: one of the reasons above; empty where it may be."""


@dataclass
class Search:
    """A search under way.

    Attributes:
        measure: Measures a size.
        hindrance: Says why a size is not to be measured.
        again: Measures points once more, in turn, before they end the search.
        gain: A larger batch pays that gives more than this share more throughput.
        largest: The most rows; ``None`` where nobody says.
        smallest: The rows that are measured first.
        points: What was measured, by rows.
        stopped: Why the doubling ended.
        bound: The smallest size that is known not to fit, or not to be measured for want of memory.
    """

    measure: Measure
    hindrance: Hindrance = lambda _rows, _points: ""
    again: Again = lambda points: points
    gain: float = KNEE_GAIN
    largest: int | None = None
    smallest: int = 1
    points: dict[int, Point] = field(default_factory=dict)
    stopped: str = ""
    bound: int | None = None

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
        """Measure the smallest, twice as many and so on rows, until one of the reasons says to end."""
        rows = self.smallest
        while not self.stopped:
            self.take(rows)
            following = rows * 2 if self.largest is None else min(rows * 2, self.largest)
            self.stopped = self.reason(rows, following)
            rows = following

    def reason(self, rows: int, following: int) -> str:
        """Return why the doubling ends after a size, empty where it goes on with the following one."""
        if not self.points[rows].fits:
            return OUT_OF_MEMORY
        if following == rows:
            return LARGEST
        if not (self.still_pays() or self.pays_after_all()):
            return THROUGHPUT
        hindered = self.hindrance(following, self.found)
        if hindered == MEMORY:
            self.bound = following
        return hindered

    def still_pays(self) -> bool:
        """Tell whether one of the last doublings gained enough over all that was there before them."""
        before, last = self.found[:-PATIENCE], self.found[-PATIENCE:]
        best = best_of(before)
        return best is None or pays(last, best, self.gain)

    def pays_after_all(self) -> bool:
        """Measure the last doublings and the best before them in turn: another program may have slowed the last ones."""
        best = best_of(self.found[:-PATIENCE])
        for point in self.again([*([best] if best else []), *self.found[-PATIENCE:]]):
            self.points[point.rows] = point
        return self.still_pays()

    def approach_bound(self) -> None:
        """Where throughput still rises at the largest that fits, bisect between it and what does not fit."""
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
