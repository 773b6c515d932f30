"""The clock that everything is timed by."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from contextvars import ContextVar

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
