from __future__ import annotations

from collections.abc import Iterator

import pytest

from openmed_nb._utils.clock import use_clock


class MadeClock:
    """A clock that moves by a tick whenever it is read, and by what a step says it takes.

    Attributes:
        tick: Seconds from one reading to the next.
    """

    def __init__(self) -> None:
        self.tick = 0.01
        self._seconds = 0.0

    def __call__(self) -> float:
        """Return the seconds, a tick later than before."""
        self._seconds += self.tick
        return self._seconds

    def advance(self, seconds: float) -> None:
        """Let some seconds pass."""
        self._seconds += seconds


@pytest.fixture
def clock() -> Iterator[MadeClock]:
    """The clock by which everything that is measured in a test is timed."""
    made = MadeClock()
    with use_clock(made):
        yield made
