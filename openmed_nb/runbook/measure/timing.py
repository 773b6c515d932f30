"""Every clock of the package, and the interval of a median."""

from __future__ import annotations

import contextlib
import math
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextvars import ContextVar
from dataclasses import dataclass

Clock = Callable[[], float]
"""Returns seconds from any beginning."""

CLOCK: ContextVar[Clock] = ContextVar("clock", default=time.perf_counter)
"""The clock in force in this thread."""


def now() -> float:
    """Return the seconds on the clock in force."""
    return CLOCK.get()()


@contextlib.contextmanager
def timed_by(clock: Clock) -> Iterator[None]:
    """Time everything in a block by another clock.

    Example:
        >>> with timed_by(iter([2.0, 5.0]).__next__):
        ...     -now() + now()
        3.0
    """
    before = CLOCK.set(clock)
    try:
        yield
    finally:
        CLOCK.reset(before)


LEVEL = 0.95
"""How sure an interval is, at least."""


@dataclass(frozen=True)
class Interval:
    """A median and its confidence interval.

    Attributes:
        low: Its lower end.
        middle: The median.
        high: Its upper end.
        level: How probable it is that such an interval holds the true median, at least.
    """

    low: float
    middle: float
    high: float
    level: float

    def holds(self, value: float) -> bool:
        """Tell whether a value is in the interval, its ends included."""
        return self.low <= value <= self.high

    def to_dict(self) -> dict[str, float]:
        """Return the interval as plain numbers."""
        return dict(vars(self))


def median_interval(values: Sequence[float], level: float = LEVEL) -> Interval:
    """Return the median of values with the narrowest interval between two of them that has at least this level.

    Of n values in order, the k-th from below and the k-th from above enclose the median of what they were drawn from with a
    probability of 1 - 2 B(k - 1; n, 1/2), where B is the binomial distribution; nothing is assumed of how they are
    distributed (Thompson 1936; Conover, Practical Nonparametric Statistics, 3.2).

    Args:
        values: At least :func:`fewest_values` of them.
        level: How sure the interval is to be, below 1.

    Raises:
        ValueError: For too few values.

    Example:
        >>> median_interval([3.0, 1.0, 2.0, 6.0, 5.0, 4.0, 8.0, 7.0, 10.0, 9.0])
        Interval(low=2.0, middle=5.5, high=9.0, level=0.978515625)
    """
    ordered, rank = sorted(values), rank_of(len(values), level)
    if rank == 0:
        message = f"{len(ordered)} values have no interval of level {level}: at least {fewest_values(level)} are needed"
        raise ValueError(message)
    return Interval(ordered[rank - 1], statistics.median(ordered), ordered[-rank], coverage(len(ordered), rank))


def coverage(count: int, rank: int) -> float:
    """Return how probable it is that the values of this rank, from below and from above, enclose the median.

    Example:
        >>> coverage(10, 2), coverage(5, 1)
        (0.978515625, 0.9375)
    """
    return 1 - 2 * sum(math.comb(count, below) for below in range(rank)) / 2.0**count


def rank_of(count: int, level: float = LEVEL) -> int:
    """Return the largest rank whose interval has at least this level, 0 where there is none.

    Example:
        >>> rank_of(25), rank_of(6), rank_of(5)
        (8, 1, 0)
    """
    ranks = range(1, count // 2 + 1)
    return max((rank for rank in ranks if coverage(count, rank) >= level), default=0)


def fewest_values(level: float = LEVEL) -> int:
    """Return how many values an interval of this level needs.

    Example:
        >>> fewest_values(0.95), fewest_values(0.99)
        (6, 8)
    """
    return next(count for count in range(2, 64) if rank_of(count, level))
