"""Tests of the utilization sampling in a background thread."""

import sys
import threading
import time
import traceback

import pytest

from openmed_nb._utils.clock import use_clock
from openmed_nb.runbook.bench.comparison import Utilization, _samples_during, _utilization_during


def find_sampling_threads():
    """Return the sampling threads that are alive."""
    return [thread for thread in threading.enumerate() if thread.name == "openmed_nb utilization"]


@pytest.mark.parametrize(
    ("idle", "busy", "net"), [(0.125, 0.625, 0.5), (0.5, 0.25, 0.0), (None, 0.6, None), (0.1, None, None)]
)
def test_utilization_net_is_busy_minus_idle(idle, busy, net):
    """The net utilization is at least 0, and unknown if either mean is unknown."""
    assert Utilization(idle, busy, 5).to_dict() == {"idle": idle, "busy": busy, "samples": 5, "net": net}


def test_utilization_during_separates_idle_and_busy():
    test_thread = threading.current_thread()
    steps = []
    phase_starts = []
    readings = 0

    def read():
        nonlocal readings
        if threading.current_thread() is test_thread:  # Each phase starts with a reading that does not count.
            phase_starts.append(len(steps))
        readings += 1
        return (0.25, 0.75)[len(phase_starts) - 1]

    with use_clock(lambda: readings):
        utilization = _utilization_during(read, 6, lambda: steps.append(1), interval=0.001)

    assert phase_starts == [0, 0]
    assert steps
    assert (utilization.idle, utilization.net) == (0.25, 0.5)
    assert utilization.samples >= 5
    assert find_sampling_threads() == []


def test_utilization_during_without_reader_does_not_run_work():
    assert _utilization_during(None, 1.0, pytest.fail) == Utilization()


@pytest.mark.parametrize(("reading", "num_steps"), [(0.5, 6), (None, 12)])
def test_samples_during_waits_for_slow_readings(reading, num_steps):
    """Sampling takes at most twice as long. Failed readings are ignored."""
    steps = []
    readings = []

    def read():
        readings.append(1)
        return reading

    def step():
        while len(readings) < 8:  # All readings before the last are complete.
            time.sleep(0.001)
        steps.append(1)

    with use_clock(lambda: len(steps)):
        samples = _samples_during(step, read, 6, interval=0.001)

    assert len(steps) == num_steps
    assert set(samples) == ({reading} - {None})


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt])
def test_samples_during_stops_thread_if_work_raises(error):
    def fail():
        assert len(find_sampling_threads()) == 1
        raise error

    with pytest.raises(error):
        _samples_during(fail, lambda: 0.5, 1, interval=0.001)
    assert find_sampling_threads() == []


def test_samples_during_ignores_reading_after_the_work():
    test_thread = threading.current_thread()
    reading_started = threading.Event()

    def is_joining():
        stack = traceback.walk_stack(sys._current_frames()[test_thread.ident])
        return any(frame.f_code.co_name == "join" for frame, _line in stack)

    def read():
        if threading.current_thread() is not test_thread:
            reading_started.set()
            while not is_joining():
                time.sleep(0.001)
        return 1.0

    assert _samples_during(lambda: reading_started.wait(60), read, 0.001, interval=0.001) == []
