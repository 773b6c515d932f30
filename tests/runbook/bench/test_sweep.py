"""A sweep from end to end: what is measured, what stays as it was, and how out of memory is survived."""

import gc
import json
import re
import subprocess
import sys

import pytest
import torch

import openmed_nb as nb
from openmed_nb.devices.registry import parse_device_argument
from openmed_nb.errors import ConfigurationError
from openmed_nb.runbook.bench.sweep import MEMORY, OUT_OF_MEMORY, TIME

pytestmark = pytest.mark.usefixtures("clock", "quick_collection")

QUICK = {"max_batch_size": 2, "seconds": 600}
LAYERS = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Dropout(0.5), torch.nn.Linear(8, 2))


@pytest.mark.parametrize(
    ("asked", "task", "length"),
    [
        ({"model": "bundled_small", "length": 16}, "annotation", 16),
        ({"model": "bundled_small", "length": 16, "training": True}, "training step", 16),
        ({"model": LAYERS, "data": torch.ones(1, 8)}, "forward pass", None),
        ({"model": LAYERS, "data": torch.ones(3, 8), "training": True}, "training step", None),
        ({"model": lambda batch: batch + 1, "data": lambda rows: torch.ones(rows, 8)}, "own step", None),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_every_task_is_swept(home, asked, task, length):
    """Annotating, forward passes, training steps and own steps all give points with throughput, spread and first pass."""
    report = nb.sweep(**asked, **QUICK)

    assert (report.task, report.length, report.device) == (task, length, home)
    assert [point.rows for point in report.points] == ([2] if "training" in asked else [1, 2])
    assert report.simulated == (home == "mps")
    for point in report.points:
        low, high = point.spread
        assert 0 < low <= point.throughput <= high
        assert point.first_step_seconds > 0
        assert point.memory >= 0
        assert point.steps >= 3
    assert json.dumps(report.to_dict())


def test_a_failing_size_is_a_point():
    """A batch that does not fit is a point, and the sizes below it are still found."""

    def step(batch):
        if len(batch) > 3:
            raise torch.OutOfMemoryError("CUDA out of memory.")

    report = nb.sweep(step, torch.ones, seconds=600)

    assert {point.rows: point.fits for point in report.points} == {1: True, 2: True, 3: True, 4: False}
    assert report.stop_code == OUT_OF_MEMORY
    assert report.knee in (1, 2, 3)


@pytest.mark.parametrize(
    ("given", "value"),
    [
        *(({"min_gain": gain}, gain) for gain in (0, 1, 2, -0.1, True, "much", float("nan"))),
        *(({"max_batch_size": rows}, rows) for rows in (0, 1.5, True, "8")),
        *(({"min_batch_size": rows}, rows) for rows in (0, 1.5, True)),
        ({"min_batch_size": 4, "max_batch_size": 2}, "min_batch_size=4"),
        *(({"seconds": seconds}, seconds) for seconds in (0, float("inf"), float("nan"), False, "30")),
        ({"model": len, "data": [torch.ones(3)]}, "No batch of 1 rows"),
        *(({"model": LAYERS, "data": data}, "no rows") for data in ([], torch.ones(4, 0))),
        ({"model": "bundled_small", "data": ["She has asthma."]}, "no texts"),
        ({"model": "bundled_small", "length": 5000}, "length=5000"),
    ],
    ids=str,
)
def test_bad_arguments_are_refused(given, value):
    """Bad numbers, unusable data, and rows longer than the model reads are errors that name the value, with a remedy."""
    with pytest.raises(ConfigurationError, match=re.escape(str(value))) as caught:
        nb.sweep(**{"device": "cpu", **given})

    assert caught.value.remedy


MEBIBYTE = 1 << 20


@pytest.mark.real_computer
class TestSmallDevice:
    """A simulated Mac with 2 GiB."""

    def test_the_knee_and_out_of_memory(self, clock):
        """Where eight rows are computed at a time and sixteen do not fit, the knee is at eight, and nothing is raised."""

        def step(batch):
            held = torch.empty(len(batch) * 60 * MEBIBYTE, dtype=torch.uint8, device="mps")
            clock.advance(-(-len(batch) // 8))
            if len(batch) > 12:
                held = torch.cat([held, held])

        with nb.simulated_mps(memory="2 GiB"):
            report = nb.sweep(step, lambda rows: torch.ones(rows, device="mps"), seconds=600)
            gc.collect()
            left = parse_device_argument("mps").memory()

        assert report.knee == 8
        assert report.remeasured_points[-1].throughput == pytest.approx(8, rel=0.05)
        assert report.simulated
        assert {point.fits for point in report.points if point.rows >= 16} == {False}
        assert "(SIMULATED)" in str(report)
        assert left.allocated < MEBIBYTE
        assert left.reserved < MEBIBYTE

    def test_memory_is_expected(self):
        """Where memory grows with the rows, the sweep stops below the limit, and no batch runs out of memory."""

        def step(batch):
            del [torch.empty(100 * MEBIBYTE, dtype=torch.uint8, device="mps") for _ in batch][:]

        with nb.simulated_mps(memory="2 GiB"):
            report = nb.sweep(step, lambda rows: torch.ones(rows, device="mps"), seconds=600, max_batch_size=64)

        most = max(point.rows for point in report.points if point.fits)
        assert all(point.fits for point in report.points)
        assert report.stop_code == MEMORY
        assert 8 <= most <= report.limit / (100 * MEBIBYTE)

    def test_time_is_kept_to(self, clock):
        """Where the time that a person gives is nearly used up, nothing larger is tried."""
        report = nb.sweep(lambda batch: clock.advance(len(batch) ** 0.5), torch.ones, seconds=200, device="cpu")

        assert report.stop_code == TIME
        assert max(point.rows for point in report.points) < 1000

    def test_not_even_one_row(self):
        """Where the first row does not fit, the report says so."""
        with nb.simulated_mps(memory="2 GiB"):
            report = nb.sweep(lambda _batch: torch.empty(1 << 30, device="mps"), torch.ones)

        assert (report.knee, [point.fits for point in report.points]) == (None, [False])

    def test_memory_of_models(self):
        """A model is let go after its sweep."""
        with nb.simulated_mps("96 MiB") as device:
            nb.sweep(LAYERS, torch.ones(1, 8), training=True, device="mps", **QUICK)
            gc.collect()

            assert device.allocator.allocated == 0


LIMITED = """
import itertools, json, resource
import psutil, torch
import openmed_nb as nb
from openmed_nb._utils.clock import use_clock

MEBIBYTE = 1 << 20

def seen(rows):
    return torch.empty(rows * 64 * MEBIBYTE, dtype=torch.uint8)

def suddenly(rows):
    return torch.empty((1 if rows < 6 else 4096) * MEBIBYTE, dtype=torch.uint8)

def unseen(rows):
    return bytes(rows * 100 * MEBIBYTE)

with use_clock(itertools.count(step=0.05).__next__):
    nb.sweep(lambda rows: torch.ones(rows) @ torch.ones(rows), lambda rows: rows, max_batch_size=1, device="cpu")
    limit = psutil.Process().memory_info().vms + 1024 * MEBIBYTE
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    for step in (seen, suddenly, unseen):
        report = nb.sweep(step, lambda rows: rows, seconds=600, device="cpu")
        print(json.dumps(report.to_dict()))
"""


@pytest.mark.real_computer
@pytest.mark.skipif(sys.platform != "linux", reason="macOS does not keep to a limit of addresses, and Windows has none")
def test_the_cpu_under_a_memory_limit():
    """Under a limit of 1 GiB on the process, what is seen to grow stops before it, and what is not is survived."""
    done = subprocess.run([sys.executable, "-c", LIMITED], capture_output=True, text=True, timeout=280, check=False)
    assert done.returncode == 0, done.stderr
    seen, suddenly, unseen = map(json.loads, done.stdout.splitlines())

    assert all(report["limit"] < 5 << 28 for report in (seen, suddenly, unseen))
    assert all(point["fits"] for point in seen["points"])
    assert 4 <= max(point["rows"] for point in seen["points"]) <= 16
    assert {point["rows"] for point in suddenly["points"] if not point["fits"]} >= {8}
    assert (suddenly["stop_code"], unseen["stop_code"]) == (OUT_OF_MEMORY, OUT_OF_MEMORY)
    assert unseen["knee"] <= 10


def test_training_begins_where_batchnorm_learns():
    """A model with BatchNorm is swept in training from 2 rows, and from 1 its own error passes through."""
    model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.BatchNorm1d(8))

    report = nb.sweep(model, torch.ones(4, 8), training=True, device="cpu", max_batch_size=2)
    assert [point.rows for point in report.points] == [2]
    with pytest.raises(ValueError, match="more than 1 value per channel"):
        nb.sweep(model, torch.ones(4, 8), training=True, device="cpu", max_batch_size=2, min_batch_size=1)


def test_batches_with_fewer_rows_than_asked():
    """A function that runs out of rows is an error with both numbers, and no throughput is made up."""
    rows = torch.ones(5, 2)

    with pytest.raises(ConfigurationError, match=r"5 rows where 8 were asked for.*max_batch_size=5"):
        nb.sweep(lambda batch: batch.sum(), lambda count: rows[:count], device="cpu", max_batch_size=16, seconds=600)
