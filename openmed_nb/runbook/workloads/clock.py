"""The clock by which steps are timed, and by which a measurement ends; another one can be set, which a test moves itself."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from contextvars import ContextVar

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
