"""Operators are summed by the phase in which they were called."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from openmed_nb.runbook.slices.operator_times import operator_times


def event(name: str, span: tuple[float, float], host: float = 0, device: float = 0, where: str = "CPU"):
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
def test_operators_are_summed_by_phase(sees_device: bool):
    """Each operator has its own time in each phase and in one step; marks, kernels and the driver are none."""
    times = operator_times(EVENTS, 2, sees_device)
    found = {(one.operator, one.phase): (one.count, one.seconds, one.device_seconds) for one in times}

    assert found == {
        ("aten::addmm", "forward"): (1.0, pytest.approx(15e-6), pytest.approx(200e-6) if sees_device else None),
        ("aten::addmm", "backward"): (0.5, pytest.approx(10e-6), pytest.approx(300e-6) if sees_device else None),
        ("aten::t", "forward"): (0.5, pytest.approx(5e-7), 0 if sees_device else None),
        ("aten::zeros", ""): (0.5, pytest.approx(2e-6), 0 if sees_device else None),
    }
    assert times[0].phase == ("backward" if sees_device else "forward")
