"""Tests of nb.compare on the CPU and on a simulated Mac, of its findings for given measurements, and of the utilization."""

import gc
import itertools
import json
import multiprocessing
import random
import re
import threading
import time
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

import openmed_nb as nb
from helpers.annotations import NOTE
from helpers.clock import use_clock
from helpers.sample_reports import COMPARISON
from openmed_nb._render.display import NOT_APPLICABLE, OK, WARNING
from openmed_nb.errors import ConfigurationError, DeviceError, DeviceUnavailableError, InvalidTextError, ModelError
from openmed_nb.runbook.bench import comparison
from openmed_nb.runbook.bench.comparison import MIN_STEP_TOKENS, _device_metrics, _samples_during
from openmed_nb.runbook.bench.timing import MedianInterval, PhaseTimes
from openmed_nb.runbook.bench.workloads import Workload

QUICK = {"seconds": 1e-6}  # The minimum number of rounds, and no utilization.
LAYER = nn.Linear(4, 4)
ROWS = torch.ones(2, 4)


def run_compare(*args, **options):
    """Run a quick comparison."""
    return nb.compare(*args, **{**QUICK, **options})


@pytest.mark.real_computer
@pytest.mark.usefixtures("clock")
class TestCompare:
    """Measurements of the CPU and of simulated MPS."""

    def test_compare_annotation_on_cpu_only(self, keyword_model):
        """The report contains no text content."""
        comparison = run_compare(str(keyword_model), [NOTE] * 3, devices="cpu", batch_size=2)
        row = comparison.for_device("cpu")

        assert list(row.phase_fractions) == ["data", "transfer", "forward", "decode"]
        assert sum(row.phase_fractions.values()) == pytest.approx(1)
        assert (row.rows, row.speedup, row.utilization) == (2, None, None)
        assert comparison.batch_tokens == comparison.to_dict()["batch_tokens"] == 2 * 64
        assert "diabetes" not in str(comparison) + json.dumps(comparison.to_dict()) + comparison._repr_html_()

    def test_compare_plans_batches_from_many_texts(self, keyword_model):
        comparison = run_compare(str(keyword_model), ["seen . " * 9], devices="cpu")

        assert comparison.for_device("cpu").rows == MIN_STEP_TOKENS * 4 / 64

    def test_compare_uses_all_usable_devices_by_default(self):
        """A simulated device has no speedup."""
        with nb.simulated_mps():
            comparison = run_compare(LAYER, ROWS)
            duplicates = run_compare(LAYER, ROWS, devices=["mps", "cpu", "mps:0"])

        for each in (comparison, duplicates):
            assert [metrics.device for metrics in each.devices] == ["cpu", "mps"]
        assert comparison.for_device("mps").speedup is None
        assert comparison.findings[0].status == NOT_APPLICABLE

    def test_compare_uses_same_batches_on_all_devices(self, monkeypatch, keyword_model):
        shapes = {"cpu": set(), "mps": set()}
        forward = torch.nn.Embedding.forward

        def record_shape(module, ids):
            shapes[ids.device.type].add(tuple(ids.shape))
            return forward(module, ids)

        texts = [" ".join([NOTE] * (1 + number % 3)) for number in range(4)]
        with nb.simulated_mps(), monkeypatch.context() as patch:
            patch.setattr(torch.nn.Embedding, "forward", record_shape)
            comparison = run_compare(str(keyword_model), texts, devices="mps", batch_size=4)

        assert shapes["cpu"] == shapes["mps"] != set()
        assert comparison.batch_tokens == 4 * 64

    def test_compare_training_has_training_phases(self):
        """Devices may be torch devices or an iterable of them."""
        comparison = run_compare(LAYER, ROWS, training=True, devices=[torch.device("cpu")])

        phases = list(comparison.for_device("cpu").phase_fractions)
        assert phases == ["data", "transfer", "forward", "backward", "optimizer"]
        assert (comparison.task, comparison.rounds) == ("training step", 6)

    def test_compare_moves_batches_of_step_function(self):
        """The copy is a separate phase, and the batch of the caller is unchanged."""
        devices = set()
        batch = torch.ones(4, 2)

        def step(batch):
            devices.add(batch["x"].device.type)
            return batch["x"].sum()

        with nb.simulated_mps():
            comparison = run_compare(step, [{"x": batch}], devices=["mps"])

        assert devices == {"cpu", "mps"}
        assert (comparison.name, comparison.task, batch.device.type) == ("step", "own step", "cpu")
        assert [list(metrics.phase_fractions) for metrics in comparison.devices] == [["data", "transfer", "step"]] * 2

    def test_compare_stops_loader_workers(self):
        others = multiprocessing.active_children()  # Such as the workers of a cluster of another test.
        comparison = run_compare(
            LAYER, DataLoader([torch.ones(4)] * 8, batch_size=2, num_workers=1), devices=torch.device("cpu")
        )

        assert comparison.workers == 1
        assert {*multiprocessing.active_children()} <= {*others}

    def test_compare_keeps_random_state_and_releases_copies(self):
        class UniqueLinear(nn.Linear):
            """Class without instances in other tests."""

        def read_random_states():
            return torch.get_rng_state().tolist(), random.getstate(), np.random.get_state()[1].tolist()  # noqa: NPY002

        layer = UniqueLinear(4, 4)
        states = read_random_states()
        run_compare(nn.Sequential(layer, nn.Dropout()).train(), ROWS, training=True, devices="cpu")

        assert read_random_states() == states
        assert [instance for instance in gc.get_objects() if type(instance) is UniqueLinear] == [layer]

    def test_compare_measures_utilization_if_there_is_time(self, monkeypatch):
        """The utilization without the work is subtracted. Four readings are too few."""
        readings = iter([[0.25] * 5, [0.75] * 5, [0.25] * 5, [0.75] * 4])
        monkeypatch.setattr("openmed_nb.runbook.bench.comparison._samples_during", lambda *_: next(readings))
        utilizations = [nb.compare(LAYER, ROWS, devices="cpu").for_device("cpu").utilization for _ in range(2)]

        assert utilizations == [0.5, None]

    @pytest.mark.parametrize(
        ("size", "message"), [(1_000_000, "^A batch of 16 rows .*batch_size"), (20_000_000, "^Linear does not fit")]
    )
    def test_compare_out_of_memory_raises_error_with_remedy(self, size, message):
        """The memory is released after an error for a batch or a model."""
        with nb.simulated_mps("96 MiB") as device:
            with pytest.raises(DeviceUnavailableError, match=message):
                run_compare(nn.Linear(1, size), torch.ones(16, 1), devices="mps")
            gc.collect()
            assert device.allocator.allocated == 0

    @pytest.mark.parametrize(
        ("options", "error", "value"),
        [
            (
                {"device": "cuda"},
                ConfigurationError,
                "device='cuda'. Pass devices=, a list with names of usable devices: cpu",
            ),
            ({"seconds": 0}, ConfigurationError, 0),
            ({"devices": ["mps"]}, DeviceError, "'mps'"),
            ({"devices": 0.5}, ConfigurationError, "float"),
            ({"model": "no_such_folder/model"}, ModelError, "no_such_folder"),
            ({"data": [None, ["asthma"]], "devices": "cpu"}, InvalidTextError, "Text 1 must be a string, not list"),
        ],
    )
    def test_compare_rejects_invalid_arguments(self, options, error, value):
        with pytest.raises(error, match=re.escape(str(value))):
            nb.compare(**{**QUICK, **options})


def change_mps(**changes):
    """Return the comparison with changed measurements of MPS."""
    cpu, mps = COMPARISON.devices
    return replace(COMPARISON, devices=(cpu, replace(mps, **changes)))


@pytest.mark.parametrize(
    ("low", "high", "status", "evidence"),
    [
        (1.01, 3.0, OK, ""),
        (0.2, 0.99, WARNING, ""),
        *((low, high, WARNING, "no significant difference") for low, high in ((0.99, 1.5), (1.0, 1.5), (0.5, 1.0))),
    ],
)
def test_speed_finding_follows_the_interval(low, high, status, evidence):
    """An interval that contains 1 shows no significant difference, whatever its median is."""
    finding = change_mps(speedup=MedianInterval(low, (low + high) / 2, high, 0.96)).findings[0]

    assert (finding.status, bool(finding.remedy)) == (status, status == WARNING)
    assert finding.evidence.startswith(evidence)
    assert f"({low:.2f} to {high:.2f}){comparison.GPU_BATCHES}" in finding.evidence


@pytest.mark.parametrize(
    ("seconds", "dominant_phase", "status"),
    [
        *(({name: 6, "forward": 4}, name, WARNING) for name in ("data", "transfer", "decode")),
        ({"data": 4, "forward": 6}, "forward", OK),
        ({"data": 5, "forward": 5}, None, OK),
        ({"data": 0, "forward": 0}, None, OK),
    ],
)
def test_dominant_phase_is_a_finding(seconds, dominant_phase, status):
    """Only the forward pass may take more than half of a step without a warning."""
    comparison = change_mps(phase_times=PhaseTimes(seconds))

    assert comparison.for_device("mps").phase_times.dominant_phase == dominant_phase
    assert (comparison.findings[2].name, comparison.findings[2].status) == ("time on mps", status)
    assert comparison.findings[2].evidence.startswith(dominant_phase or "no phase")


@pytest.mark.parametrize(("task", "command"), [("annotation", "nb.cluster"), ("forward pass", "loader workers")])
def test_data_remedy_depends_on_task(task, command):
    comparison = replace(change_mps(phase_times=PhaseTimes({"data": 9, "forward": 1})), task=task)

    assert command in comparison.findings[2].remedy


def test_small_workload_on_cpu_has_no_transfer_warning():
    """Without another device, there is no speed finding, but the speed of the CPU."""
    phase_times = PhaseTimes({"transfer": 6, "forward": 4})
    cpu = replace(COMPARISON.devices[0], phase_times=phase_times, throughput=MedianInterval(390, 400, 410, 0.96))
    comparison = replace(COMPARISON, devices=(cpu,))

    assert [(finding.name, finding.status) for finding in comparison.findings] == [("time on cpu", OK)]
    assert "about 1,440,000 notes" in str(comparison)
    assert "about" not in str(COMPARISON)


class PrecomputedWorkload(Workload):
    """Workload whose batches contain the seconds of their phases."""

    def time_phases(self, batches):
        """Return the next batch."""
        return next(batches)


def measure_phases(task, device, *steps):
    """Return the phase times of steps with the given seconds."""
    workload = PrecomputedWorkload("m", task, device, 8, None, lambda: iter(()), ())
    return workload.measure_phase_times(itertools.cycle(steps), max(5, len(steps)))


def test_phase_fractions_average_over_all_steps():
    """A loader delays only some steps, so the mean counts. Outliers of texts in memory are caused by other programs."""
    steps = [{"data": 0.1, "forward": 1.0}] * 9 + [{"data": 9.1, "forward": 1.0}]
    for task, fraction in (("annotation", 1 / 11), ("forward pass", 0.5)):
        assert measure_phases(task, "cpu", *steps).fractions["data"] == pytest.approx(fraction)


# Measured on an H100 with the bundled model, in tenths of a second.
GPU = {"data": 0.441, "transfer": 0.015, "forward": 0.404, "decode": 0.140}
LONG_TEXTS = {"data": 9.0, "forward": 3.0, "decode": 2.0}


@pytest.mark.parametrize(
    ("task", "device", "seconds", "fraction"),
    [
        ("annotation", "cuda:0", GPU, 0.037 / 0.596),
        ("annotation", "cuda:0", {"data": 3.0, "forward": 4.0}, 0.0),
        ("annotation", "cuda:0", LONG_TEXTS, 6 / 11),
        ("annotation", "cuda:0", {"data": 1.0}, 1.0),
        ("annotation", "cpu", GPU, 0.441),
        ("training step", "cuda:0", LONG_TEXTS, 9 / 14),
    ],
)
def test_data_phase_overlaps_annotation_on_a_gpu(task, device, seconds, fraction):
    """Only the time by which tokenization exceeds the forward pass is a wait."""
    phase_times = measure_phases(task, device, seconds)

    assert phase_times.fractions["data"] == pytest.approx(fraction)
    assert sum(phase_times.fractions.values()) == pytest.approx(1)
    assert phase_times.seconds == pytest.approx(seconds)


def test_speedup_is_median_of_ratios_per_round():
    trials = {"cpu": [1.0, 2.0, 3.0, 4.0, 5.0, 60.0], "mps": [0.5, 1.0, 1.0, 2.0, 2.5, 30.0]}
    workload = Workload("m", "annotation", "mps", 8, None, lambda: iter(()), ())

    metrics = _device_metrics(workload, "mps", trials, PhaseTimes({}))

    assert (metrics.speedup.low, metrics.speedup.median, metrics.speedup.high) == (2.0, 2.0, 3.0)
    assert (metrics.seconds, metrics.rows_per_second) == (1.5, pytest.approx(8 / 1.5))
    assert (metrics.throughput.low, metrics.throughput.high) == (pytest.approx(8 / 30), 16)


@pytest.mark.parametrize(("factor", "is_hidden"), [(0.8, True), (1.0, False), (0.1, False)])
def test_winner_below_the_variation_is_not_measured(monkeypatch, factor, is_hidden):
    """The check of the load is off in the tests."""
    times = {"cpu": [1.0, 2.0] * 3, "cuda:0": [factor, factor * 2] * 3}
    monkeypatch.setattr(comparison, "_time_interleaved", lambda *_: times)
    steps = itertools.repeat({"forward": 1.0})
    workloads = dict.fromkeys(times, PrecomputedWorkload("m", "annotation", "cpu", 8, None, lambda: steps, ()))

    assert bool(comparison._run_comparison(workloads, 6, 0.0).disturbance) == is_hidden


def test_report_and_json_have_speedup_and_utilization():
    html = COMPARISON._repr_html_()
    cpu, mps = json.loads(json.dumps(COMPARISON.to_dict()))["devices"]

    assert all(text in html for text in ("4.00 (3.80 to 4.30, 96.0% CI)", ">70%<", "2.50 ms (25%)"))
    assert comparison.GPU_BATCHES not in str(replace(COMPARISON, batch_tokens=None))
    assert (cpu["speedup"], mps["speedup"]["low"], mps["utilization"]) == (None, 3.8, 0.7)
    with pytest.raises(ConfigurationError, match=r"'cuda' was not compared\. Use one of cpu, mps"):
        COMPARISON.for_device("cuda")


@pytest.mark.parametrize("reading", [0.5, None])
def test_samples_during_ignores_failed_readings(reading):
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

    assert len(steps) == 6
    assert set(samples) == ({reading} - {None})


def test_samples_during_stops_thread_if_work_raises():
    threads = threading.active_count()

    def fail():
        assert threading.active_count() == threads + 1
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        _samples_during(fail, lambda: 0.5, 1, interval=0.001)
    assert threading.active_count() == threads
