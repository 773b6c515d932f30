"""Tests of the operator times from the events of torch's profiler."""

from types import SimpleNamespace

import pytest

from openmed_nb.runbook.bench.profile_watch import _aggregate_operator_times


def make_event(name, time_range, self_cpu_time=0, self_device_time=0, device_type="CPU"):
    """Return an event with the fields of torch's profiler, in microseconds."""
    times = SimpleNamespace(start=time_range[0], end=time_range[1])
    return SimpleNamespace(
        name=name,
        time_range=times,
        self_cpu_time_total=self_cpu_time,
        self_device_time_total=self_device_time,
        device_type=f"DeviceType.{device_type}",
    )


EVENTS = [
    make_event("openmed_nb: data", (0, 10)),
    make_event("openmed_nb: forward", (10, 100)),
    make_event("aten::addmm", (20, 40), 15, 300),
    make_event("cudaLaunchKernel", (25, 27), 2),
    make_event("aten::addmm", (50, 70), 15, 100),
    make_event("aten::t", (45, 46), 1),
    make_event("openmed_nb: backward", (100, 200)),
    make_event("autograd::engine::evaluate_function: AddmmBackward0", (110, 160), 9),
    make_event("aten::addmm", (120, 150), 20, 600),
    make_event("openmed_nb: forward", (12, 90), device_type="CUDA"),
    make_event("ampere_sgemm", (30, 400), 0, 300, "CUDA"),
    make_event("aten::zeros", (205, 206), 4),
]


@pytest.mark.parametrize("records_device", [True, False])
def test_operator_times_sum_by_phase(records_device):
    """Phase ranges, kernels and driver calls are not operators."""
    times = _aggregate_operator_times(EVENTS, 2, records_device)
    by_phase = {(time.operator, time.phase): (time.count, time.seconds, time.device_seconds) for time in times}

    assert by_phase == {
        ("aten::addmm", "forward"): (1.0, pytest.approx(15e-6), pytest.approx(200e-6) if records_device else None),
        ("aten::addmm", "backward"): (0.5, pytest.approx(10e-6), pytest.approx(300e-6) if records_device else None),
        ("aten::t", "forward"): (0.5, pytest.approx(5e-7), 0 if records_device else None),
        ("aten::zeros", ""): (0.5, pytest.approx(2e-6), 0 if records_device else None),
    }
    assert times[0].phase == ("backward" if records_device else "forward")


def make_step_events(*steps):
    """Return the events of steps, which call one operator with the given times in microseconds."""
    events = []
    start = 0.0
    for step in steps:
        calls = [("data", "aten::stack", 1000.0), *(("forward", "aten::addmm", microseconds) for microseconds in step)]
        for phase, name, host in calls:
            events.append(make_event(f"openmed_nb: {phase}", (start, start + 2)))
            events.append(make_event(name, (start + 1, start + 2), host))
            start += 3
    return events


def test_operator_times_use_median_of_steps():
    """Steps in which the system suspended the process do not affect the times."""
    quiet = _aggregate_operator_times(make_step_events([4, 20], [4, 20], [4, 20]), 3, records_device=False)
    suspended = _aggregate_operator_times(make_step_events([4000, 20], [4, 20], [4, 20]), 3, records_device=False)

    assert [(time.operator, time.count) for time in quiet] == [("aten::stack", 1.0), ("aten::addmm", 2.0)]
    assert quiet[1].seconds == pytest.approx(24e-6)
    assert suspended == quiet
