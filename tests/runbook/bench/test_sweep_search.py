"""Tests of the search for batch sizes on synthetic curves, and of the memory prediction and measurement."""

import math
import random
import statistics
from collections.abc import Callable, Collection
from dataclasses import dataclass, field, replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from openmed_nb.devices.machine import is_mps_simulated
from openmed_nb.devices.registry import get_device
from openmed_nb.runbook.bench.sweep import (
    BATCH_SIZE_LIMIT,
    HEADROOM_FRACTION,
    MEMORY,
    MIN_KNEE_GAIN,
    THROUGHPUT,
    Point,
    _available_memory,
    _expected_memory,
    _find_knee,
    _measure_step_memory,
    _remeasure_near_best,
    find_best,
    memory_limit,
    search_sizes,
    select_fitting,
)

MIN_FRACTION_OF_BEST = 0.95
MEGABYTE = 1 << 20


@dataclass
class SyntheticDevice:
    """Device with a synthetic throughput curve, which takes the place of a measurement.

    Attributes:
        speed: Function that returns the throughput for a number of rows.
        capacity: Maximum number of rows that fit.
        noise: Standard deviation of one measurement as a fraction of the throughput.
        seed: Seed of the noise.
        full: Other sizes that do not fit.
        stop_reason: Function that returns a stop code for a number of rows and the points so far.
        measured: Measured sizes in order.
    """

    speed: Callable
    capacity: int = 1 << 40
    noise: float = 0.0
    seed: int = 0
    full: Collection = ()
    stop_reason: Callable = lambda *_: ""
    measured: list = field(default_factory=list)

    def __post_init__(self):
        self.random = random.Random(self.seed)

    def measure_size(self, rows):
        """Return a point, like a real measurement."""
        self.measured.append(rows)
        if rows > self.capacity or rows in self.full:
            return Point(rows, fits=False)
        return Point(rows, self.observe_speed(rows))

    def observe_speed(self, rows):
        """Return the throughput with noise."""
        return self.speed(rows) * max(0.5, self.random.gauss(1, self.noise))

    def measure_interleaved(self, points, max_rounds=9):
        """Return points with the median of several measurements each."""
        return [
            replace(point, throughput=statistics.median(self.observe_speed(point.rows) for _ in range(max_rounds)))
            for point in points
        ]

    def find_knee(self, max_rows=None, min_gain=MIN_KNEE_GAIN):
        """Return the knee that a sweep would find."""
        points, _stop_code = search_sizes(self, min_gain, max_rows)
        knee = _find_knee(_remeasure_near_best(self, points, min_gain), min_gain)
        return knee.rows if knee else None

    def fraction_of_best(self, knee, max_rows):
        """Return the throughput at a knee as a fraction of the best of all sizes that fit."""
        return self.speed(knee) / max(map(self.speed, range(1, min(max_rows, self.capacity) + 1)))


def make_saturating(half):
    """Return a throughput that reaches half of its maximum at a number of rows."""
    return lambda rows: 1000 * rows / (rows + half)


def make_peaked(peak):
    """Return a throughput with its maximum at a number of rows."""
    return lambda rows: 1000 * 2 / (rows / peak + peak / rows)


def make_plateau(max_rows):
    """Return a throughput that increases up to a number of rows."""
    return lambda rows: 10.0 * min(rows, max_rows)


@pytest.mark.parametrize(
    ("speeds", "gain", "knee"),
    [
        ({1: 1.0}, 0.03, 1),
        ({1: 1.0, 2: 1.02}, 0.03, 1),
        ({1: 1.0, 2: 1.04}, 0.03, 2),
        ({1: 1.0, 2: 1.04}, 0.05, 1),
        ({8: 100.0, 16: 90.0, 32: 101.0}, 0.03, 8),
        ({8: 50.0, 16: 100.0, 32: 60.0}, 0.03, 16),
        ({}, 0.03, None),
    ],
)
def test_find_knee_returns_smallest_without_larger_gain(speeds, gain, knee):
    points = [Point(rows, speed) for rows, speed in speeds.items()]
    result = _find_knee([Point(64, fits=False), *points[::-1]], gain)

    assert (result.rows if result else None) == knee


def test_remeasured_points_are_within_a_tenth():
    points = [Point(8, 50.0), Point(16, 95.0), Point(32, 100.0), Point(64, fits=False)]
    device = SyntheticDevice(float)

    assert find_best(points).rows == 32
    assert _remeasure_near_best(device, points, MIN_KNEE_GAIN) == [Point(16, 16.0), Point(32, 32.0)]
    assert _remeasure_near_best(device, points[:1], MIN_KNEE_GAIN) == points[:1]
    assert (find_best(points[3:]), _remeasure_near_best(device, points[3:], MIN_KNEE_GAIN)) == (None, [])


CURVES = {
    "saturates at once": (make_saturating(0.01), 1),
    "saturates": (make_saturating(10), 300),
    "saturates late": (make_saturating(200), 6700),
    "plateau from 32 rows": (make_plateau(32), 32),
    "plateau from 40 rows": (make_plateau(40), 40),
    "decreases": (lambda rows: 1000 / rows, 1),
    "peak at a power of two": (make_peaked(64), 64),
    "peak between powers of two": (make_peaked(48), 48),
    "peak below a power of two": (make_peaked(23), 23),
    "tiles of 8": (lambda rows: 1000 * rows / (8 * math.ceil(rows / 8)), 8),
    "slower beyond 64": (lambda rows: 10.0 * rows if rows <= 64 else 5.0 * min(rows, 90), 64),
}


@pytest.mark.parametrize(("min_gain", "knee"), [(0.03, 8), (0.2, 4), (0.5, 2), (0.9, 1)])
def test_knee_follows_a_large_min_gain(min_gain, knee):
    device = SyntheticDevice(
        lambda rows: {1: 110.0, 2: 140.0, 3: 160.0, 4: 180.0}.get(rows, 200.0 if rows >= 8 else 185.0)
    )

    assert device.find_knee(max_rows=16, min_gain=min_gain) == knee


@pytest.mark.parametrize(("curve", "max_knee"), CURVES.values(), ids=CURVES)
def test_knee_is_near_best_throughput(curve, max_knee):
    """The knee has at least 95% of the best throughput, even with noise, and is not larger than necessary."""
    devices = [SyntheticDevice(curve, noise=0.02, seed=seed) for seed in range(5)]
    assert SyntheticDevice(curve).find_knee() <= max_knee
    for device in (SyntheticDevice(curve), *devices):
        assert device.fraction_of_best(device.find_knee(), 4096) >= MIN_FRACTION_OF_BEST


@pytest.mark.parametrize("capacity", [1, 2, 3, 5, 15, 16, 17, 33, 63, 127, 1000])
def test_search_approaches_largest_fitting_size(capacity):
    device = SyntheticDevice(float, capacity)

    assert capacity * 0.8 <= device.find_knee() <= capacity
    assert len(device.measured) <= 2 * math.log2(capacity) + 5


def test_doubling_ends_after_two_sizes_without_gain():
    device = SyntheticDevice(lambda rows: {1: 1.0, 2: 2.0, 4: 1.9}.get(rows, 8.0))

    assert search_sizes(device)[1] == THROUGHPUT
    assert device.measured[:6] == [1, 2, 4, 8, 16, 32]
    assert max(device.measured) == 32


@pytest.mark.parametrize(("min_rows", "max_rows"), [(1, 1), (1, 3), (1, 100), (3, 12)])
def test_search_respects_requested_sizes(min_rows, max_rows):
    device = SyntheticDevice(float)

    assert search_sizes(device, min_rows=min_rows, max_rows=max_rows)[1] == BATCH_SIZE_LIMIT
    assert (min(device.measured), max(device.measured)) == (min_rows, max_rows)


def test_search_approaches_memory_limit():
    device = SyntheticDevice(float, stop_reason=lambda rows, _points: MEMORY if rows > 700 else "")

    assert search_sizes(device)[1] == MEMORY
    assert 560 <= max(device.measured) <= 700


def test_search_skips_single_size_that_does_not_fit():
    device = SyntheticDevice(make_plateau(64), full={48, 56})

    assert device.find_knee() == 64
    assert device.measured.count(48) == 1


@given(half=st.floats(0.01, 500), peak=st.integers(1, 3000), capacity=st.integers(1, 5000))
def test_knee_of_any_smooth_curve(half, peak, capacity):
    increase = make_saturating(half)
    device = SyntheticDevice(lambda rows: increase(rows) / (1 + (rows / peak) ** 2), capacity)

    min_fraction = (
        MIN_FRACTION_OF_BEST if capacity > 4 * peak else 0.8
    )  # The largest size that fits is only approached.
    assert device.fraction_of_best(device.find_knee(), 8192) >= min_fraction


@given(
    speeds=st.lists(st.floats(0.1, 1000), min_size=1, max_size=300),
    full=st.sets(st.integers(1, 300)),
    max_rows=st.integers(1, 300) | st.none(),
)
def test_search_of_any_curve_terminates(speeds, full, max_rows):
    """The search measures no size twice, and no larger point gains more than the knee allows."""
    device = SyntheticDevice(lambda rows: speeds[rows % len(speeds)], 4096, full=full)
    points, _stop_code = search_sizes(device, max_rows=max_rows)
    knee = _find_knee(points)

    assert len(device.measured) == len(set(device.measured)) == len(points)
    assert all(1 <= rows <= (max_rows or rows) for rows in device.measured)
    assert (knee is None) == (not select_fitting(points))
    assert all(point.speed <= knee.speed * (1 + MIN_KNEE_GAIN) for point in select_fitting(points))


@pytest.mark.parametrize(
    ("sizes", "rows", "expected"),
    [({}, 8, None), ({4: 40}, 8, 80), ({4: 40}, 2, 40), ({1: 110, 2: 120, 4: 140}, 8, 180), ({4: 100, 8: 90}, 16, 90)],
)
def test_expected_memory(sizes, rows, expected):
    points = [Point(size, 1.0, memory=memory) for size, memory in sizes.items()]

    assert _expected_memory([*points, Point(64, fits=False), Point(3, 1.0)], rows) == expected


def test_peak_memory_on_cpu_counts_live_tensors(monkeypatch, capfd):
    """The peak includes backward passes, prints nothing, and does not use torch's legacy profiler."""
    for name in ("_enable_profiler_legacy", "_disable_profiler_legacy"):
        monkeypatch.delattr(torch.autograd, name, raising=False)
    weight = torch.ones(MEGABYTE // 4, device="cpu", requires_grad=True)

    def step():
        for _ in range(3):
            (weight * 2).square().sum().backward()
            weight.grad = None

    assert 2 * MEGABYTE <= _measure_step_memory("cpu", step) < 5 * MEGABYTE
    assert capfd.readouterr() == ("", "")


def test_peak_memory_is_unknown_with_active_profiler():
    with torch.autograd.profiler.profile():
        assert _measure_step_memory("cpu", lambda: torch.ones(1)) is None
    assert _measure_step_memory("cpu", lambda: torch.ones(1000) + torch.ones(1000)) == 12000


@pytest.mark.skipif("not config.getoption('simulated_mps')", reason="torch's MPS allocator, on the simulated Mac")
def test_peak_memory_on_mps_is_from_allocator():
    assert is_mps_simulated()
    assert _measure_step_memory("mps", lambda: torch.ones(MEGABYTE, device="mps")) >= 4 * MEGABYTE


def test_memory_limit_of_devices():
    """On the CPU, the limit is the available memory of the system. On all GPUs, the same fraction stays free."""
    assert 0 < memory_limit("cpu", 0.5) == pytest.approx(_available_memory(), rel=0.3)
    assert get_device("mps").headroom_fraction == get_device("cuda").headroom_fraction == 1 - HEADROOM_FRACTION == 0.9


@pytest.mark.parametrize(
    ("limit", "usage", "is_limited"),
    [("1000\n", "300\n", True), ("max\n", "300\n", False), (None, None, False), ("9", "", False)],
)
def test_available_memory_respects_container(tmp_path, monkeypatch, limit, usage, is_limited):
    files = tmp_path / "memory.max", tmp_path / "memory.current"
    monkeypatch.setattr("openmed_nb.runbook.bench.sweep.CGROUP_FILES", files)
    for file, text in zip(files, (limit, usage), strict=True):
        if text is not None:
            file.write_text(text)

    assert (_available_memory() == 700) is is_limited
