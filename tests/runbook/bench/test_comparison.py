"""Findings and texts of a comparison for given measurements, and the sampling of the utilization."""

import itertools
import json
import math
import threading
import time
from dataclasses import replace

import pytest

from openmed_nb._render.display import OK, WARNING
from openmed_nb._utils.clock import use_clock
from openmed_nb.errors import ConfigurationError
from openmed_nb.runbook.bench.comparison import (
    BreakEven,
    Comparison,
    DeviceMetrics,
    _device_metrics,
    _samples_during,
)
from openmed_nb.runbook.bench.timing import Interval, PhaseTimes
from openmed_nb.runbook.bench.workloads import Workload

EVEN = PhaseTimes({"data": 0.001, "transfer": 0.001, "forward": 0.001, "decode": 0.001})


def make_comparison(low=2.0, high=3.0, phase_times=EVEN, **fields):
    """Return a comparison of a GPU with the CPU."""
    cpu = DeviceMetrics("cpu", 0.0123, (0.012, 0.013), 32, EVEN)
    speedup = Interval(low, (low + high) / 2, high, 0.9586)
    gpu = DeviceMetrics("cuda:0", 0.00456, (0.004, 0.005), 32, phase_times, speedup, 0.6)
    return Comparison("bundled", "annotation", (cpu, gpu), 20, **fields)


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
    comparison = make_comparison(low, high)

    assert (comparison.findings[0].status, bool(comparison.findings[0].remedy)) == (status, status == WARNING)
    assert comparison.findings[0].evidence.startswith(evidence)
    assert f"times as fast as the CPU ({low:.2f} to {high:.2f})" in str(comparison)


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
    comparison = make_comparison(phase_times=PhaseTimes(seconds))

    assert comparison.for_device("cuda").phase_times.dominant_phase == dominant_phase
    assert (comparison.findings[2].name, comparison.findings[2].status) == ("time on cuda:0", status)
    assert comparison.findings[2].evidence.startswith(dominant_phase or "no phase")


@pytest.mark.parametrize(
    ("gain", "fractions", "model_speedup"),
    [
        (0.22, {}, None),
        (0.22, {"forward": 1.0}, 1.22),
        (1.0, {"data": 0.2, "decode": 0.1, "forward": 0.7}, 3.5),
        (1.0, {"transfer": 0.2, "forward": 0.8}, 2.0),
        (1.0, {"data": 0.5, "forward": 0.5}, math.inf),
        (0.22, {"data": 0.9, "forward": 0.1}, math.inf),
    ],
)
def test_model_speedup_follows_from_the_gate(gain, fractions, model_speedup):
    """Only the model can be faster on a GPU; tokenizing and decoding stay on the CPU (Amdahl's law)."""
    even = BreakEven("annotation", 10.0, fractions, gain)

    assert even.model_speedup == (None if model_speedup is None else pytest.approx(model_speedup))
    assert even.gpu_rows_per_hour == pytest.approx(36_000 * (1 + gain))
    assert ("no GPU can reach that" in even.sentences[1]) == (model_speedup == math.inf)


def test_break_even_is_for_the_cpu_alone():
    comparison = make_comparison()
    cpu = replace(comparison, devices=comparison.devices[:1])

    assert comparison.break_even is None
    assert cpu.break_even.rows_per_second == cpu.devices[0].rows_per_second
    assert all(sentence in str(cpu) for sentence in cpu.break_even.sentences)
    assert json.loads(json.dumps(cpu.to_dict()))["break_even"]["gain"] == 0.22


def test_phase_fractions_average_over_all_steps():
    """A loader delays only some steps, so the mean counts. Outliers of texts in memory are caused by other programs."""
    steps = [{"data": 0.1, "forward": 1.0}] * 9 + [{"data": 9.1, "forward": 1.0}]
    for task, fraction in (("annotation", 1 / 11), ("forward pass", 0.5)):
        assert measure_phases(task, "cpu", *steps).fractions["data"] == pytest.approx(fraction)


# Measured on an H100 with the bundled model, in tenths of a second.
GPU = {"data": 0.441, "transfer": 0.015, "forward": 0.404, "decode": 0.140}
LONG_TEXTS = {"data": 9.0, "forward": 3.0, "decode": 2.0}

# Task, device, measured phases, and fraction of a step that waits for its data.
DATA_FRACTIONS = [
    ("annotation", "cuda:0", GPU, 0.037 / 0.596),
    ("annotation", "cuda:0", {"data": 3.0, "forward": 4.0}, 0.0),
    ("annotation", "cuda:0", LONG_TEXTS, 6 / 11),
    ("annotation", "cuda:0", {"data": 1.0}, 1.0),
    ("annotation", "cpu", GPU, 0.441),
    ("training step", "cuda:0", LONG_TEXTS, 9 / 14),
    ("own step", "mps", LONG_TEXTS, 9 / 14),
]


class PrecomputedWorkload(Workload):
    """Workload whose batches contain the seconds of their phases."""

    def time_phases(self, batches):
        """Return the next batch."""
        return next(batches)


def measure_phases(task, device, *steps):
    """Return the phase times of steps with the given seconds."""
    workload = PrecomputedWorkload("m", task, device, 8, None, lambda: iter(()), ())
    return workload.measure_phase_times(itertools.cycle(steps), max(5, len(steps)))


@pytest.mark.parametrize(("task", "device", "seconds", "fraction"), DATA_FRACTIONS)
def test_data_phase_overlaps_annotation_on_a_gpu(task, device, seconds, fraction):
    """Only the time by which tokenization exceeds the forward pass is a wait."""
    phase_times = measure_phases(task, device, seconds)

    assert phase_times.fractions["data"] == pytest.approx(fraction)
    assert sum(phase_times.fractions.values()) == pytest.approx(1)
    assert phase_times.seconds == pytest.approx(seconds)


def test_data_remedy_for_annotation_names_no_loader():
    for task, command in (("annotation", "nb.cluster"), ("forward pass", "nb.runbook.profile(step, loader)")):
        (finding,) = Comparison(
            "m",
            task,
            (replace(make_comparison().for_device("cpu"), phase_times=PhaseTimes({"data": 9, "forward": 1})),),
            20,
        ).findings

        assert finding.evidence == "data dominates"
        assert command in finding.remedy
        assert ("loader" in finding.remedy) is (task != "annotation")


def test_speedup_is_median_of_ratios_per_round():
    trials = {"cpu": [1.0, 2.0, 3.0, 4.0, 5.0, 60.0], "mps": [0.5, 1.0, 1.0, 2.0, 2.5, 30.0]}
    workload = Workload("m", "annotation", "mps", 8, None, lambda: iter(()), ())

    metrics = _device_metrics(workload, "mps", trials, EVEN)

    assert (metrics.speedup.low, metrics.speedup.median, metrics.speedup.high) == (2.0, 2.0, 3.0)
    assert (metrics.seconds, metrics.quartiles) == (1.5, (1.0, 2.375))
    assert metrics.rows_per_second == pytest.approx(8 / 1.5)


def test_report_has_speedup_utilization_and_phases():
    html = make_comparison()._repr_html_()

    assert all(text in html for text in ("2.50 (2.00 to 3.00, 95.9% CI)", ">60%<", "1.00 ms (25%)"))


def test_to_dict_is_json_compatible():
    comparison = make_comparison(dtype="float32")
    row = comparison.for_device("cuda")
    data = json.loads(json.dumps(comparison.to_dict()))

    assert (row.speedup.median, row.phase_fractions["data"], row.utilization) == (2.5, 0.25, pytest.approx(0.6))
    assert data["schema"] == "openmed_nb/comparison/1"
    assert data["devices"][1]["speedup"]["low"] == 2.0
    assert data["devices"][0]["speedup"] is None
    assert data["devices"][0]["utilization"] is None


def test_for_device_rejects_other_devices():
    with pytest.raises(ConfigurationError, match=r"'mps' was not compared\. Use one of cpu, cuda:0"):
        make_comparison().for_device("mps")


def test_small_workload_on_cpu_has_no_transfer_warning():
    """Without another device, there is no speed finding."""
    metrics = DeviceMetrics("cpu", 0.01, (0.01, 0.01), 2, PhaseTimes({"transfer": 6, "forward": 4}))
    comparison = Comparison("bundled", "annotation", (metrics,), 20)

    assert [(finding.name, finding.status) for finding in comparison.findings] == [("time on cpu", OK)]


def find_sampling_threads():
    """Return the sampling threads that are alive."""
    return [thread for thread in threading.enumerate() if thread.name == "openmed_nb utilization"]


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


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt])
def test_samples_during_stops_thread_if_work_raises(error):
    def fail():
        assert len(find_sampling_threads()) == 1
        raise error

    with pytest.raises(error):
        _samples_during(fail, lambda: 0.5, 1, interval=0.001)
    assert find_sampling_threads() == []
