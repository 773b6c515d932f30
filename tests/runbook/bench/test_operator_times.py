"""Operators are summed by the phase in which they were called."""

from types import SimpleNamespace

import pytest

from openmed_nb.runbook.bench.profile_watch import operator_times, sum_operators


def event(name, span, host=0, device=0, where="CPU"):
    """Return an event as torch's profiler has them, in microseconds."""
    times = SimpleNamespace(start=span[0], end=span[1])
    return SimpleNamespace(
        name=name,
        time_range=times,
        self_cpu_time_total=host,
        self_device_time_total=device,
        device_type=f"DeviceType.{where}",
    )


EVENTS = [
    event("openmed_nb: data", (0, 10)),
    event("openmed_nb: forward", (10, 100)),
    event("aten::addmm", (20, 40), 15, 300),
    event("cudaLaunchKernel", (25, 27), 2),
    event("aten::addmm", (50, 70), 15, 100),
    event("aten::t", (45, 46), 1),
    event("openmed_nb: backward", (100, 200)),
    event("autograd::engine::evaluate_function: AddmmBackward0", (110, 160), 9),
    event("aten::addmm", (120, 150), 20, 600),
    event("openmed_nb: forward", (12, 90), where="CUDA"),
    event("ampere_sgemm", (30, 400), 0, 300, "CUDA"),
    event("aten::zeros", (205, 206), 4),
]


@pytest.mark.parametrize("sees_device", [True, False])
def test_operators_are_summed_by_phase(sees_device):
    """Each operator has its own time in each phase and in one step; marks, kernels and the driver are not operators."""
    times = operator_times(EVENTS, 2, sees_device)
    found = {(one.operator, one.phase): (one.count, one.seconds, one.device_seconds) for one in times}

    assert found == {
        ("aten::addmm", "forward"): (1.0, pytest.approx(15e-6), pytest.approx(200e-6) if sees_device else None),
        ("aten::addmm", "backward"): (0.5, pytest.approx(10e-6), pytest.approx(300e-6) if sees_device else None),
        ("aten::t", "forward"): (0.5, pytest.approx(5e-7), 0 if sees_device else None),
        ("aten::zeros", ""): (0.5, pytest.approx(2e-6), 0 if sees_device else None),
    }
    assert times[0].phase == ("backward" if sees_device else "forward")


def steps_of(*seconds, empty=None):
    """Return the events of steps that call one operator for so many microseconds each, and one with nothing to compute."""
    events, moment = [], 0.0
    for step in seconds:
        calls = [("data", "aten::stack", 1000.0), *(("forward", "aten::addmm", one) for one in step)]
        if empty is not None:
            calls += [("empty operators", "aten::linear", empty / 3), ("empty operators", "aten::addmm", empty)]
        for phase, name, host in calls:
            events += [event(f"openmed_nb: {phase}", (moment, moment + 2)), event(name, (moment + 1, moment + 2), host)]
            moment += 3
    return events


def test_a_call_takes_what_it_takes_in_the_median_of_the_steps():
    """Steps in which the system stopped the process, at whichever call, change nothing."""
    quiet = operator_times(steps_of([4, 20], [4, 20], [4, 20]), 3, sees_device=False)
    stopped = operator_times(steps_of([4000, 20], [4, 9000], [4, 20]), 3, sees_device=False)

    assert [(one.operator, one.count) for one in quiet] == [("aten::stack", 1.0), ("aten::addmm", 2.0)]
    assert quiet[1].seconds == pytest.approx(24e-6)
    assert stopped == quiet


def test_steps_with_more_calls_than_others():
    """A call that only some steps have counts for its share of the steps."""
    (_data, addmm) = operator_times(steps_of([6], [6, 30], [6], [6, 50]), 4, sees_device=False)

    assert (addmm.count, addmm.seconds) == (1.5, pytest.approx((4 * 6 + 2 * 40) / 4 * 1e-6))


def test_starting_is_as_long_as_an_operator_with_nothing_to_compute():
    """Of each call as much goes into starting as the longest empty operator takes in the median, and no more than the call."""
    made = steps_of([4, 20], [4, 20], [4, 20], empty=6.0)
    made[-1].self_cpu_time_total = 5000
    times = operator_times(made, 3, sees_device=False)

    assert {one.phase for one in times} == {"data", "forward"}
    assert (times[1].seconds, times[1].launch_seconds) == (pytest.approx(24e-6), pytest.approx(10e-6))
    assert (sum_operators(times, "seconds"), sum_operators(times, "launch_seconds")) == (
        pytest.approx(24e-6),
        pytest.approx(10e-6),
    )


def test_starting_is_not_known_without_empty_operators():
    """Where no operator with nothing to compute was run, nothing is said of starting."""
    times = operator_times(steps_of([4, 20]), 1, sees_device=False)

    assert [one.launch_seconds for one in times] == [None, None]
    assert sum_operators(times, "launch_seconds") is None
