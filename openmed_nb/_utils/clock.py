"""The clock for all measurements, which tests can replace."""

from __future__ import annotations

import time
from collections.abc import Callable
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
