from __future__ import annotations

from collections.abc import Iterator

import pytest

from openmed_nb._utils.clock import use_clock


class FakeClock:
    """Clock that advances by a tick per reading and by the time that a step requests.

    Attributes:
        tick: Seconds between two readings.
    """

    def __init__(self) -> None:
        self.tick = 0.01
        self._seconds = 0.0

    def __call__(self) -> float:
        """Return the current seconds and advance by a tick."""
        self._seconds += self.tick
        return self._seconds

    def advance(self, seconds: float) -> None:
        """Advance the clock by some seconds."""
        self._seconds += seconds


@pytest.fixture
def clock() -> Iterator[FakeClock]:
    """Clock of all measurements in a test."""
    fake_clock = FakeClock()
    with use_clock(fake_clock):
        yield fake_clock
