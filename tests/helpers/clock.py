"""Another clock than that of the system, for measurements in tests."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator

from openmed_nb._utils.clock import CLOCK


@contextlib.contextmanager
def use_clock(clock: Callable[[], float]) -> Iterator[None]:
    """Use another clock in a block."""
    token = CLOCK.set(clock)
    try:
        yield
    finally:
        CLOCK.reset(token)
