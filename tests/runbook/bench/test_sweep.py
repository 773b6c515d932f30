"""Tests of nb.sweep, of its search on synthetic curves, of its report, and of the memory prediction and measurement."""

import gc
import itertools
import json
import math
import random
import re
import statistics
from collections import Counter
from collections.abc import Callable, Collection
from dataclasses import dataclass, field, replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import openmed_nb as nb
from helpers.sample_reports import MEBIBYTE, SWEEP
from openmed_nb.devices.registry import get_device
from openmed_nb.errors import ConfigurationError
from openmed_nb.runbook.bench.sweep import (
    HEADROOM_FRACTION,
    MAX_ROUNDS,
    MIN_KNEE_GAIN,
    Point,
    _available_memory,
    _expected_memory,
    _find_knee,
    _measure_step_memory,
    memory_limit,
    search_sizes,
    select_fitting,
)
from openmed_nb.runbook.bench.timing import Quartiles

QUICK = {"max_batch_size": 2, "seconds": 600}
LAYERS = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Dropout(0.5), torch.nn.Linear(8, 2))


@pytest.mark.usefixtures("clock")
class TestSweep:
    """Sweeps of models and steps."""

    @pytest.mark.parametrize(
        ("options", "task", "length"),
        [
            ({"model": "bundled_small", "length": 16}, "annotation", 16),
            ({"model": "bundled_small", "length": 16, "training": True}, "training step", 16),
            ({"model": LAYERS, "data": torch.ones(1, 8)}, "forward pass", None),
            ({"model": LAYERS, "data": torch.ones(3, 8), "training": True}, "training step", None),
            ({"model": lambda batch: batch + 1, "data": lambda rows: torch.ones(rows, 8)}, "own step", None),
        ],
        ids=lambda value: value if isinstance(value, str) else "",
    )
    def test_each_task_is_measured(self, home, options, task, length):
        """BatchNorm cannot be trained on one row, so training starts with two."""
        report = nb.sweep(**options, **QUICK)

        assert (report.task, report.length, report.device) == (task, length, home)
        assert [point.rows for point in report.points] == ([2] if "training" in options else [1, 2])
        assert report.simulated == (home == "mps")
        for point in report.points:
            assert point.throughput > 0
            assert point.memory >= 0
        assert json.dumps(report.to_dict())

    @pytest.mark.parametrize(
        ("options", "value"),
        [
            ({"max_batch_size": 0}, 0),
            ({"seconds": 0}, 0),
            ({"seconds": float("nan")}, "nan"),
            ({"seconds": "30"}, "30"),
            ({"model": len, "data": [torch.ones(3)]}, "no batch with 1 rows"),
            ({"model": "bundled_small", "data": ["She has asthma."]}, "does not accept texts"),
            ({"model": len, "data": lambda rows: torch.ones(5, 2)[:rows]}, "5 rows instead of 8"),
        ],
    )
    def test_invalid_arguments_are_rejected(self, options, value):
        """The error names the value and has a remedy."""
        with pytest.raises(ConfigurationError, match=re.escape(str(value))) as error_info:
            nb.sweep(**{"device": "cpu", **options})

        assert error_info.value.remedy

    def test_all_fitting_points_are_remeasured(self, clock):
        """Each of the interleaved rounds measures every size."""
        sizes = []

        def step(batch):
            sizes.append(len(batch))
            clock.advance(0.1)

        report = nb.sweep(step, torch.ones, max_batch_size=4, seconds=600, device="cpu")
        visits = [rows for rows, _steps in itertools.groupby(sizes)][-MAX_ROUNDS * len(report.points) :]

        assert Counter(visits) == {point.rows: MAX_ROUNDS for point in report.points}

    def test_time_budget_ends_the_search(self, clock):
        report = nb.sweep(lambda batch: clock.advance(len(batch) ** 0.5), torch.ones, seconds=200, device="cpu")

        assert report.stop_code == "time"
        assert max(point.rows for point in report.points) < 1000


@pytest.mark.real_computer
@pytest.mark.usefixtures("clock")
class TestSmallDevice:
    """Sweeps on a simulated Mac with little memory."""

    def test_knee_is_found_despite_out_of_memory(self, clock):
        """Four rows are computed at a time, and eight rows do not fit."""

        def step(batch):
            tensor = torch.empty(len(batch) * 15 * MEBIBYTE, dtype=torch.uint8, device="mps")
            clock.advance(-(-len(batch) // 4))
            if len(batch) > 6:
                tensor = torch.cat([tensor, tensor])

        with nb.simulated_mps(memory="256 MiB"):
            report = nb.sweep(step, lambda rows: torch.ones(rows, device="mps"), seconds=600)
            gc.collect()
            memory = get_device("mps").memory_stats()

        assert (report.knee, report.stop_code, report.simulated) == (4, "out of memory", True)
        assert report.knee_point.throughput == pytest.approx(4, rel=0.05)
        assert {point.fits for point in report.points if point.rows >= 8} == {False}
        assert memory.allocated < MEBIBYTE
        assert memory.reserved < MEBIBYTE

    def test_search_stops_below_memory_limit(self):
        """No batch runs out of memory if memory grows with the rows."""

        def step(batch):
            del [torch.empty(100 * MEBIBYTE, dtype=torch.uint8, device="mps") for _ in batch][:]

        with nb.simulated_mps(memory="2 GiB"):
            report = nb.sweep(step, lambda rows: torch.ones(rows, device="mps"), seconds=600, max_batch_size=64)

        max_rows = max(point.rows for point in report.points if point.fits)
        assert all(point.fits for point in report.points)
        assert report.stop_code == "memory"
        assert 8 <= max_rows <= report.limit / (100 * MEBIBYTE)

    def test_sweep_without_fitting_size_has_no_knee(self):
        with nb.simulated_mps(memory="2 GiB"):
            report = nb.sweep(lambda _batch: torch.empty(1 << 30, device="mps"), torch.ones)

        assert (report.knee, [point.fits for point in report.points]) == (None, [False])

    def test_model_is_released(self):
        with nb.simulated_mps("96 MiB") as device:
            nb.sweep(LAYERS, torch.ones(1, 8), device="mps", **QUICK)
            gc.collect()

            assert device.allocator.allocated == 0


@pytest.mark.parametrize(
    ("task", "knee", "tokens"), [("annotation", 16, 2048), ("annotation", None, None), ("training step", 16, None)]
)
def test_batch_tokens_are_given_for_annotation(task, knee, tokens):
    report = replace(SWEEP, task=task, knee=knee)

    assert report.batch_tokens == report.to_dict()["batch_tokens"] == tokens
    assert (f"nb.annotate(notes, batch_tokens={tokens})" in str(report)) == bool(tokens)


@pytest.mark.parametrize(
    ("knee", "stop_code", "title", "reason"),
    [
        (16, "out of memory", "16 rows", "more than 3% faster"),
        (32, "throughput", "32 rows", "too little improvement"),
        (32, "memory", "32 rows", "because of the memory limit"),
        (32, "out of memory", "32 rows", "do not fit in memory"),
        (32, "largest", "at least 32 rows", "were not requested"),
        (32, "time", "at least 32 rows", "because of the time budget"),
    ],
)
def test_reason_explains_the_knee(knee, stop_code, title, reason):
    """The title says at least if larger sizes may be better."""
    report = replace(SWEEP, knee=knee, stop_code=stop_code, workers=2)

    assert report.still_increasing == (knee == 32)
    assert reason in report.reason in str(report)
    assert str(report).splitlines()[:2] == [
        f"Best batch size on mps: {title}",
        "  Model: bundled, task: annotation. Each row has 128 tokens. The loader has 2 workers.",
    ]


def test_similar_sizes_have_overlapping_quartiles():
    spreads = {8: (100, 199), 16: (200, 300), 32: (300, 400), 64: (301, 400)}
    points = tuple(Point(rows, 200.0, spread=Quartiles(*spread)) for rows, spread in spreads.items())
    report = replace(SWEEP, points=points)

    assert report.similar_sizes == (32,)
    assert "quartiles of 32 rows overlap" in report.reason


@pytest.mark.parametrize(
    ("point", "stop_code", "reason"),
    [
        (Point(1, 2.0), "time", "Increase max_batch_size, or seconds to 33."),
        (Point(2, fits=False), "out of memory", "Not even 2 rows fit in memory."),
    ],
)
def test_sweep_without_knee_recommends_no_size(point, stop_code, reason):
    report = replace(SWEEP, points=(point,), knee=None, stop_code=stop_code)

    assert report.reason.endswith(reason)
    assert report.reason in str(report)
    assert not str(report).endswith("best")
    assert (report.batch_tokens, report.knee_point, report.still_increasing) == (None, None, False)
    assert report.to_report().charts == ()
    assert json.dumps(report.to_dict())


def test_charts_label_knee_and_out_of_memory():
    throughput, memory = SWEEP.charts

    assert [line.name for chart in (throughput, memory) for line in chart.lines] == ["throughput", "memory"]
    assert [(marker.position, marker.name) for marker in throughput.axes.vertical_markers] == [
        (4.0, "knee: 16 rows"),
        (6.0, "out of memory"),
    ]
    assert [tick.name for tick in memory.axes.ticks] == ["1", "2", "4", "8", "16", "32", "64"]
    assert (throughput.axes.y_unit, memory.axes.y_unit, memory.axes.x_label) == ("rows/s", "MiB", "rows per batch")


MIN_FRACTION_OF_BEST = 0.95


@dataclass
class SyntheticDevice:
    """Device with a synthetic throughput curve, which takes the place of a measurement.

    Attributes:
        speed: Function that returns the throughput for a number of rows.
        capacity: Maximum number of rows that fit.
        noise: Standard deviation of one measurement as a fraction of the throughput.
        seed: Seed of the noise.
        full: Other sizes that do not fit.
        measured: Measured sizes in order.
    """

    speed: Callable
    capacity: int = 1 << 40
    noise: float = 0.0
    seed: int = 0
    full: Collection = ()
    measured: list = field(default_factory=list)

    def __post_init__(self):
        self.random = random.Random(self.seed)

    def stop_reason(self, _rows, _points):
        """Allow all sizes."""
        return ""

    def measure_size(self, rows):
        """Return a point, like a real measurement."""
        self.measured.append(rows)
        if rows > self.capacity or rows in self.full:
            return Point(rows, fits=False)
        return Point(rows, self.observe_speed(rows))

    def observe_speed(self, rows):
        """Return the throughput with noise."""
        return self.speed(rows) * max(0.5, self.random.gauss(1, self.noise))

    def measure_interleaved(self, points):
        """Return points with the median of several measurements each."""
        return [
            replace(point, throughput=statistics.median(self.observe_speed(point.rows) for _ in range(MAX_ROUNDS)))
            for point in points
        ]

    def find_knee(self):
        """Return the knee that a sweep would find."""
        points, _stop_code = search_sizes(self)
        return _find_knee(self.measure_interleaved(select_fitting(points))).rows

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
    ("speeds", "knee"),
    [
        ({1: 1.0}, 1),
        ({1: 1.0, 2: 1.02}, 1),
        ({1: 1.0, 2: 1.04}, 2),
        ({8: 100.0, 16: 90.0, 32: 101.0}, 8),
        ({8: 50.0, 16: 100.0, 32: 60.0}, 16),
        ({}, None),
    ],
)
def test_find_knee_returns_smallest_without_larger_gain(speeds, knee):
    points = [Point(rows, speed) for rows, speed in speeds.items()]
    result = _find_knee([Point(64, fits=False), *points[::-1]])

    assert (result.rows if result else None) == knee


@pytest.mark.parametrize(("speed", "width", "knee"), [(108, 5, 4), (108, 1, 6), (115, 10, 6)])
def test_smaller_size_is_the_knee_if_noise_explains_the_gain(speed, width, knee):
    speeds = {4: 100, 6: speed}
    points = [Point(rows, mean, spread=Quartiles(mean - width, mean + width)) for rows, mean in speeds.items()]

    assert _find_knee(points).rows == knee


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

    assert search_sizes(device)[1] == "throughput"
    assert device.measured[:6] == [1, 2, 4, 8, 16, 32]
    assert max(device.measured) == 32


@pytest.mark.parametrize(("min_rows", "max_rows"), [(1, 1), (1, 3), (1, 100), (3, 12)])
def test_search_respects_requested_sizes(min_rows, max_rows):
    device = SyntheticDevice(float)

    assert search_sizes(device, min_rows=min_rows, max_rows=max_rows)[1] == "largest"
    assert (min(device.measured), max(device.measured)) == (min_rows, max_rows)


@given(half=st.floats(0.01, 500), peak=st.integers(1, 3000), capacity=st.integers(1, 5000))
def test_knee_of_any_smooth_curve(half, peak, capacity):
    increase = make_saturating(half)
    device = SyntheticDevice(lambda rows: increase(rows) / (1 + (rows / peak) ** 2), capacity)

    # The largest size that fits is only approached.
    min_fraction = MIN_FRACTION_OF_BEST if capacity > 4 * peak else 0.8
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
    weight = torch.ones(MEBIBYTE // 4, device="cpu", requires_grad=True)

    def step():
        for _ in range(3):
            (weight * 2).square().sum().backward()
            weight.grad = None

    assert 2 * MEBIBYTE <= _measure_step_memory("cpu", step) < 5 * MEBIBYTE
    assert capfd.readouterr() == ("", "")


def test_peak_memory_is_unknown_with_active_profiler():
    with torch.autograd.profiler.profile():
        assert _measure_step_memory("cpu", lambda: torch.ones(1)) is None


def test_memory_limit_of_devices():
    """On the CPU, the limit is the available memory of the system. On all GPUs, the same fraction stays free."""
    assert 0 < memory_limit("cpu", 0.5) == pytest.approx(_available_memory(), rel=0.3)
    assert get_device("mps").headroom_fraction == get_device("cuda").headroom_fraction == 1 - HEADROOM_FRACTION == 0.9


@pytest.mark.parametrize(
    ("limit", "usage", "is_limited"), [("1000\n", "300\n", True), ("max\n", "300\n", False), ("9", "", False)]
)
def test_available_memory_respects_container(tmp_path, monkeypatch, limit, usage, is_limited):
    files = tmp_path / "memory.max", tmp_path / "memory.current"
    monkeypatch.setattr("openmed_nb.runbook.bench.sweep.CGROUP_FILES", files)
    for file, text in zip(files, (limit, usage), strict=True):
        file.write_text(text)

    assert (_available_memory() == 700) is is_limited
