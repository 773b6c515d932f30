"""End-to-end tests of nb.sweep, including out-of-memory errors."""

import gc
import json
import re

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
        assert report.knee_point.throughput == pytest.approx(8, rel=0.05)
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


def test_sweep_training_starts_with_two_rows():
    """BatchNorm cannot be trained on one row."""
    model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.BatchNorm1d(8))

    report = nb.sweep(model, torch.ones(4, 8), training=True, device="cpu", max_batch_size=2)
    assert [point.rows for point in report.points] == [2]


def test_sweep_rejects_batches_with_fewer_rows():
    rows = torch.ones(5, 2)

    with pytest.raises(ConfigurationError, match=r"5 rows instead of 8.*max_batch_size=5"):
        nb.sweep(lambda batch: batch.sum(), lambda count: rows[:count], device="cpu", max_batch_size=16, seconds=600)
