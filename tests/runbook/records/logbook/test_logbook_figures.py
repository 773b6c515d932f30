"""Privacy of the metrics that a logbook extracts from reports. Their values are in the snapshot of the verdict's tests."""

import pytest

import openmed_nb as nb
from openmed_nb.errors import ConfigurationError
from openmed_nb.runbook.bench.profile import Profile
from openmed_nb.runbook.bench.sweep import SweepReport
from openmed_nb.runbook.bench.timing import PhaseTimes
from openmed_nb.runbook.records.logbook.logbook import report_device
from openmed_nb.runbook.verdict.metrics import extract_metrics
from openmed_nb.training.curve import MemoryCurve, MemorySample


def test_extract_metrics_contains_no_texts():
    parity = nb.runbook.parity("bundled_small", ["Smith has asthma."], device="cpu", dtype="bfloat16")
    verdict = nb.verdict(parity)
    parity_metrics = extract_metrics(parity)
    verdict_metrics = extract_metrics(verdict)

    assert parity_metrics.values["texts"] == 1
    assert (verdict_metrics.report, verdict_metrics.verdict) == ("verdict", verdict.recommendation)
    assert "Smith" not in repr(parity_metrics) + repr(verdict_metrics)


def test_extract_metrics_marks_simulated_measurements():
    samples = tuple(MemorySample(n, n, 1.0, allocated=n << 20, simulated=True) for n in range(1, 8))

    assert extract_metrics(MemoryCurve("mps", samples)).simulated


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
    profile = Profile(name, "own step", "cpu", 2, 50, 0.04, phase_times, 0.03, 0.01, (), 100.0)

    assert extract_metrics(profile).subject == subject


def test_report_device_is_normalized_and_unique():
    first, second = (extract_metrics(SweepReport("mine", "annotation", device, ())) for device in ("cuda", "cpu"))

    assert (report_device([first]), report_device([second, second]), report_device([])) == ("cuda:0", "cpu", None)
    with pytest.raises(ConfigurationError, match="cover several devices: cpu, cuda:0"):
        report_device([first, second])


def test_extract_metrics_rejects_other_types():
    """A class of another package with the name of a report is not a report."""
    foreign_report = type("SweepReport", (), {"__module__": "elsewhere"})

    for value in ("a note", 3, foreign_report(), None):
        with pytest.raises(ConfigurationError):
            extract_metrics(value)
