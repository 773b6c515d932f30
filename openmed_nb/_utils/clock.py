"""The clock that everything is timed by."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from contextvars import ContextVar

# Returns seconds from any beginning; each thread may have its own.
CLOCK: ContextVar[Callable[[], float]] = ContextVar("clock", default=time.perf_counter)


def current_time() -> float:
    return CLOCK.get()()


def time_call(function: Callable[[], object]) -> float:
    """Return how long a call takes, in seconds."""
    begin = current_time()
    function()
    return current_time() - begin


@contextlib.contextmanager
def use_clock(clock: Callable[[], float]) -> Iterator[None]:
    """Time everything in a block by another clock.

    Example:
        >>> with use_clock(iter([2.0, 5.0]).__next__):
        ...     time_call(str)
        3.0
    """
    before = CLOCK.set(clock)
    try:
        yield
    finally:
        CLOCK.reset(before)
