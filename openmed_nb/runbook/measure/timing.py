"""The clock of everything that the runbook measures, and the confidence interval of a median."""

from __future__ import annotations

import contextlib
import math
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextvars import ContextVar
from dataclasses import dataclass

from ...display import Plain

# Returns seconds from any beginning; each thread may have its own.
CLOCK: ContextVar[Callable[[], float]] = ContextVar("clock", default=time.perf_counter)


def now() -> float:
    return CLOCK.get()()


def seconds_of(function: Callable[[], object]) -> float:
    """Return how long a call takes, in seconds."""
    begin = now()
    function()
    return now() - begin


@contextlib.contextmanager
def timed_by(clock: Callable[[], float]) -> Iterator[None]:
    """Time everything in a block by another clock.

    Example:
        >>> with timed_by(iter([2.0, 5.0]).__next__):
        ...     seconds_of(str)
        3.0
    """
    before = CLOCK.set(clock)
    try:
        yield
    finally:
        CLOCK.reset(before)


LEVEL = 0.95


@dataclass(frozen=True)
class Interval(Plain):
    """A median and its confidence interval.

    Attributes:
        low: The lower end.
        middle: The median.
        high: The upper end.
        level: How probable it is that such an interval holds the true median, at least.
    """

    low: float
    middle: float
    high: float
    level: float

    def holds(self, value: float) -> bool:
        """Tell whether a value is in the interval, its ends included."""
        return self.low <= value <= self.high


def median_interval(values: Sequence[float]) -> Interval:
    """Return the median of at least :data:`FEWEST_VALUES` values with its narrowest interval of at least 95 percent.

    Of n values in order, the k-th from below and the k-th from above enclose the median of what they were drawn from with a
    probability of 1 - 2 B(k - 1; n, 1/2), where B is the binomial distribution; no distribution of the values is assumed
    (Thompson 1936; Conover, Practical Nonparametric Statistics, 3.2).

    Example:
        >>> median_interval([3.0, 1.0, 2.0, 6.0, 5.0, 4.0, 8.0, 7.0, 10.0, 9.0])
        Interval(low=2.0, middle=5.5, high=9.0, level=0.978515625)
    """
    ordered, rank = sorted(values), rank_of(len(values))
    if rank == 0:
        message = f"{len(ordered)} values have no interval of level {LEVEL}: at least {FEWEST_VALUES} are needed"
        raise ValueError(message)
    return Interval(ordered[rank - 1], statistics.median(ordered), ordered[-rank], coverage(len(ordered), rank))


def coverage(count: int, rank: int) -> float:
    """Return how probable it is that the values of this rank, from below and from above, enclose the median."""
    return 1 - 2 * sum(math.comb(count, below) for below in range(rank)) / 2.0**count


def rank_of(count: int) -> int:
    """Return the largest rank whose interval has the level, 0 if none has."""
    return max((rank for rank in range(1, count // 2 + 1) if coverage(count, rank) >= LEVEL), default=0)


FEWEST_VALUES = next(count for count in range(2, 64) if rank_of(count))
