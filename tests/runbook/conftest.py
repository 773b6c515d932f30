from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from helpers.clock import use_clock
from openmed_nb.devices import system_status
from openmed_nb.devices.system_status import BackgroundLoadReader, SystemStatus
from openmed_nb.runbook.bench import timing


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


@pytest.fixture
def set_conditions(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Function that sets the load and the thermal state that measurements read."""
    monkeypatch.setenv(timing.CHECK_VARIABLE, "1")
    monkeypatch.setattr(system_status, "LOAD_SECONDS", 0)

    def set_conditions(load: float | None = 0.1, thermal_state: str = "nominal") -> None:
        monkeypatch.setattr(BackgroundLoadReader, "__call__", lambda _reader: load)
        monkeypatch.setattr(timing, "read_system_status", lambda *_: SystemStatus(thermal_state=thermal_state))

    set_conditions()
    return set_conditions
