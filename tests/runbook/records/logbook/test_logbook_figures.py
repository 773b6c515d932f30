"""Metrics that a logbook extracts from reports."""

import pytest

import openmed_nb as nb
from openmed_nb.errors import ConfigurationError
from openmed_nb.runbook.bench.comparison import Comparison, DeviceMetrics
from openmed_nb.runbook.bench.profile import Profile
from openmed_nb.runbook.bench.sweep import Point, SweepReport
from openmed_nb.runbook.bench.timing import Interval, PhaseTimes
from openmed_nb.runbook.records.logbook.logbook import report_device
from openmed_nb.runbook.verdict.figures import extract_metrics
from openmed_nb.training.curve import MemoryCurve, MemorySample
from openmed_nb.training.loader import LoaderCheck

SAMPLES = tuple(MemorySample(n, n, 1.0, allocated=n << 20, resident=n << 21, simulated=True) for n in range(1, 8))

REPORTS = [
    SweepReport(
        "mine", "annotation", "cpu", (Point(4, 10.0, (9.0, 11.0), 1 << 20, 0.1),), knee=4, length=128, dtype="float32"
    ),
    MemoryCurve("mps", SAMPLES),
    LoaderCheck("cpu", 0.03, 0.01, 2, 20),
]


def test_extract_metrics_returns_numbers_and_run():
    sweep, memory, loader = map(extract_metrics, REPORTS)

    assert sweep.values["knee_rows"] == 4
    assert (sweep.run.batch_size, sweep.run.length, sweep.run.peak_memory_bytes, sweep.run.dtype) == (
        None,
        128,
        1 << 20,
        "float32",
    )
    assert (memory.verdict, memory.simulated) == ("growing", True)
    assert (loader.run.workers, loader.verdict) == (2, "loader")
    for metrics in (sweep, memory, loader):
        assert all(isinstance(value, (int, float)) for value in metrics.values.values())


def test_extract_metrics_supports_all_reports_without_texts():
    phase_times = PhaseTimes({"data": 0.03, "forward": 0.01})
    cpu = DeviceMetrics("cpu", 0.04, (0.03, 0.05), 2, phase_times)
    gpu = DeviceMetrics("cuda:0", 0.02, (0.01, 0.03), 2, phase_times, Interval(1.5, 2.0, 2.5, 0.95))
    comparison = Comparison("mine", "annotation", (cpu, gpu), 6, dtype="float32")
    profile = Profile("mine", "annotation", "cpu", 2, 50, 5, 0.04, phase_times, 0.03, 0.01, (), 100.0)
    parity = nb.runbook.parity("bundled_small", ["Smith has asthma."], device="cpu", dtype="bfloat16")
    metrics = list(map(extract_metrics, [parity, comparison, profile, nb.verdict(parity, comparison)]))
    values = [report.values for report in metrics]

    assert [report.report for report in metrics] == ["parity", "comparison", "profile", "verdict"]
    assert values[0]["texts"] == 1
    assert (values[1]["cuda:0_speedup"], values[1]["cpu_data_fraction"], metrics[1].run.batch_size) == (2.0, 0.75, 2)
    assert (values[2]["data_only_seconds"], values[2]["operators_per_step"]) == (0.03, 100.0)
    assert metrics[3].verdict == nb.verdict(parity, comparison).recommendation
    assert "Smith" not in repr(metrics)


@pytest.mark.parametrize(
    ("name", "subject"),
    [
        ("The patient John Smith has asthma", "***"),
        ("make.<locals>.step", "make.<locals>.step"),
        ("OpenMed/NER-Disease", "OpenMed/NER-Disease"),
        ("/data/John Smith/model", "/data/***/model"),
    ],
)
def test_extract_metrics_masks_names_that_are_sentences(name, subject):
    phase_times = PhaseTimes({"forward": 0.01})
    profile = Profile(name, "own step", "cpu", 2, 50, 5, 0.04, phase_times, 0.03, 0.01, (), 100.0)

    assert extract_metrics(profile).subject == subject


def test_report_device_is_normalized_and_unique():
    first, second = (extract_metrics(LoaderCheck(device, 0.03, 0.01, 2, 20)) for device in ("cuda", "cpu"))

    assert (report_device([first]), report_device([second, second]), report_device([])) == ("cuda:0", "cpu", None)
    with pytest.raises(ConfigurationError, match="of several devices: cpu, cuda:0"):
        report_device([first, second])


def test_extract_metrics_rejects_other_types():
    """A class of another package with the name of a report is not a report."""
    foreign_report = type("SweepReport", (), {"__module__": "elsewhere"})

    for value in ("a note", 3, foreign_report(), None):
        with pytest.raises(ConfigurationError):
            extract_metrics(value)
