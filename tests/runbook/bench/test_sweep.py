"""End-to-end tests of nb.sweep, including out-of-memory errors."""

import gc
import json
import re
import subprocess
import sys

import pytest
import torch

import openmed_nb as nb
from openmed_nb.devices.registry import get_device
from openmed_nb.errors import ConfigurationError
from openmed_nb.runbook.bench.sweep import MEMORY, OUT_OF_MEMORY, TIME

pytestmark = pytest.mark.usefixtures("clock", "quick_collection")

QUICK = {"max_batch_size": 2, "seconds": 600}
LAYERS = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Dropout(0.5), torch.nn.Linear(8, 2))


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
def test_sweep_measures_each_task(home, options, task, length):
    report = nb.sweep(**options, **QUICK)

    assert (report.task, report.length, report.device) == (task, length, home)
    assert [point.rows for point in report.points] == ([2] if "training" in options else [1, 2])
    assert report.simulated == (home == "mps")
    for point in report.points:
        low, high = point.spread
        assert 0 < low <= point.throughput <= high
        assert point.first_step_seconds > 0
        assert point.memory >= 0
        assert point.steps >= 3
    assert json.dumps(report.to_dict())


def test_sweep_reports_out_of_memory_as_point():
    """The sizes below it are still measured."""

    def step(batch):
        if len(batch) > 3:
            raise torch.OutOfMemoryError("CUDA out of memory.")

    report = nb.sweep(step, torch.ones, seconds=600)

    assert {point.rows: point.fits for point in report.points} == {1: True, 2: True, 3: True, 4: False}
    assert report.stop_code == OUT_OF_MEMORY
    assert report.knee in (1, 2, 3)


@pytest.mark.parametrize(
    ("options", "value"),
    [
        ({"min_gain": 0}, 0),
        ({"min_gain": 1}, 1),
        ({"min_gain": 2}, 2),
        ({"max_batch_size": 0}, 0),
        ({"min_batch_size": 0}, 0),
        ({"min_batch_size": 4, "max_batch_size": 2}, "min_batch_size=4"),
        ({"seconds": 0}, 0),
        ({"seconds": float("nan")}, "nan"),
        ({"seconds": False}, False),
        ({"seconds": "30"}, "30"),
        ({"model": len, "data": [torch.ones(3)]}, "no batch with 1 rows"),
        ({"model": LAYERS, "data": torch.ones(4, 0)}, "no rows"),
        ({"model": "bundled_small", "data": ["She has asthma."]}, "does not accept texts"),
        ({"model": "bundled_small", "length": 5000}, "length=5000"),
    ],
    ids=str,
)
def test_sweep_rejects_invalid_arguments(options, value):
    """The error names the value and has a remedy."""
    with pytest.raises(ConfigurationError, match=re.escape(str(value))) as error_info:
        nb.sweep(**{"device": "cpu", **options})

    assert error_info.value.remedy


MEBIBYTE = 1 << 20


@pytest.mark.real_computer
class TestSmallDevice:
    """Sweeps on a simulated Mac with 2 GiB."""

    def test_sweep_finds_knee_despite_out_of_memory(self, clock):
        """Eight rows are computed at a time, and sixteen rows do not fit."""

        def step(batch):
            tensor = torch.empty(len(batch) * 60 * MEBIBYTE, dtype=torch.uint8, device="mps")
            clock.advance(-(-len(batch) // 8))
            if len(batch) > 12:
                tensor = torch.cat([tensor, tensor])

        with nb.simulated_mps(memory="2 GiB"):
            report = nb.sweep(step, lambda rows: torch.ones(rows, device="mps"), seconds=600)
            gc.collect()
            memory = get_device("mps").memory_stats()

        assert report.knee == 8
        assert report.remeasured_points[-1].throughput == pytest.approx(8, rel=0.05)
        assert report.simulated
        assert {point.fits for point in report.points if point.rows >= 16} == {False}
        assert "(SIMULATED)" in str(report)
        assert memory.allocated < MEBIBYTE
        assert memory.reserved < MEBIBYTE

    def test_sweep_stops_below_memory_limit(self):
        """No batch runs out of memory if memory grows with the rows."""

        def step(batch):
            del [torch.empty(100 * MEBIBYTE, dtype=torch.uint8, device="mps") for _ in batch][:]

        with nb.simulated_mps(memory="2 GiB"):
            report = nb.sweep(step, lambda rows: torch.ones(rows, device="mps"), seconds=600, max_batch_size=64)

        max_rows = max(point.rows for point in report.points if point.fits)
        assert all(point.fits for point in report.points)
        assert report.stop_code == MEMORY
        assert 8 <= max_rows <= report.limit / (100 * MEBIBYTE)

    def test_sweep_respects_time_budget(self, clock):
        report = nb.sweep(lambda batch: clock.advance(len(batch) ** 0.5), torch.ones, seconds=200, device="cpu")

        assert report.stop_code == TIME
        assert max(point.rows for point in report.points) < 1000

    def test_sweep_without_fitting_size_has_no_knee(self):
        with nb.simulated_mps(memory="2 GiB"):
            report = nb.sweep(lambda _batch: torch.empty(1 << 30, device="mps"), torch.ones)

        assert (report.knee, [point.fits for point in report.points]) == (None, [False])

    def test_sweep_releases_model(self):
        with nb.simulated_mps("96 MiB") as device:
            nb.sweep(LAYERS, torch.ones(1, 8), training=True, device="mps", **QUICK)
            gc.collect()

            assert device.allocator.allocated == 0


LIMITED_PROGRAM = """
import itertools, json, resource
import psutil, torch
import openmed_nb as nb
from openmed_nb._utils.clock import use_clock

MEBIBYTE = 1 << 20

def allocate_tensor(rows):
    return torch.empty(rows * 64 * MEBIBYTE, dtype=torch.uint8)

def allocate_suddenly(rows):
    return torch.empty((1 if rows < 6 else 4096) * MEBIBYTE, dtype=torch.uint8)

def allocate_bytes(rows):
    return bytes(rows * 100 * MEBIBYTE)

with use_clock(itertools.count(step=0.05).__next__):
    nb.sweep(lambda rows: torch.ones(rows) @ torch.ones(rows), lambda rows: rows, max_batch_size=1, device="cpu")
    limit = psutil.Process().memory_info().vms + 1024 * MEBIBYTE
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    for step in (allocate_tensor, allocate_suddenly, allocate_bytes):
        report = nb.sweep(step, lambda rows: rows, seconds=600, device="cpu")
        print(json.dumps(report.to_dict()))
"""


@pytest.mark.real_computer
@pytest.mark.skipif(sys.platform != "linux", reason="macOS does not enforce RLIMIT_AS, and Windows does not have it")
def test_sweep_on_cpu_with_process_memory_limit():
    """Growth that the profiler records stops the sweep below the limit. Other growth runs out of memory."""
    process = subprocess.run(
        [sys.executable, "-c", LIMITED_PROGRAM], capture_output=True, text=True, timeout=280, check=False
    )
    assert process.returncode == 0, process.stderr
    recorded, sudden, unrecorded = map(json.loads, process.stdout.splitlines())

    assert all(report["limit"] < 5 << 28 for report in (recorded, sudden, unrecorded))
    assert all(point["fits"] for point in recorded["points"])
    assert 4 <= max(point["rows"] for point in recorded["points"]) <= 16
    assert {point["rows"] for point in sudden["points"] if not point["fits"]} >= {8}
    assert (sudden["stop_code"], unrecorded["stop_code"]) == (OUT_OF_MEMORY, OUT_OF_MEMORY)
    assert unrecorded["knee"] <= 10


def test_sweep_training_starts_with_two_rows():
    """BatchNorm cannot be trained on one row. With min_batch_size=1, its error is raised."""
    model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.BatchNorm1d(8))

    report = nb.sweep(model, torch.ones(4, 8), training=True, device="cpu", max_batch_size=2)
    assert [point.rows for point in report.points] == [2]
    with pytest.raises(ValueError, match="more than 1 value per channel"):
        nb.sweep(model, torch.ones(4, 8), training=True, device="cpu", max_batch_size=2, min_batch_size=1)


def test_sweep_rejects_batches_with_fewer_rows():
    rows = torch.ones(5, 2)

    with pytest.raises(ConfigurationError, match=r"5 rows instead of 8.*max_batch_size=5"):
        nb.sweep(lambda batch: batch.sum(), lambda count: rows[:count], device="cpu", max_batch_size=16, seconds=600)
