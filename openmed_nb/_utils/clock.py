"""The clock for all measurements, which tests can replace."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from contextvars import ContextVar

# Function that returns seconds since an arbitrary start. The context variable allows a different clock per thread.
CLOCK: ContextVar[Callable[[], float]] = ContextVar("clock", default=time.perf_counter)


def current_time() -> float:
    """Return the time of the clock in seconds."""
    return CLOCK.get()()


def time_call(function: Callable[[], object]) -> float:
    """Return the duration of a call in seconds."""
    start = current_time()
    function()
    return current_time() - start


@contextlib.contextmanager
def use_clock(clock: Callable[[], float]) -> Iterator[None]:
    """Use another clock in a block.

    Example:
        >>> with use_clock(iter([2.0, 5.0]).__next__):
        ...     time_call(str)
        3.0
    """
    token = CLOCK.set(clock)
    try:
        yield
    finally:
        CLOCK.reset(token)
