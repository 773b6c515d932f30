"""Comparison of two logbooks."""

from dataclasses import replace

import pytest

from helpers.logbooks import COMPLETE, change, change_value
from openmed_nb.errors import ConfigurationError
from openmed_nb.runbook.bench.sweep import Point, SweepReport
from openmed_nb.runbook.verdict.metrics import Run

(SWEEP,) = COMPLETE.metrics

# Paths and values that prevent a comparison, of which the last two are known in only one logbook.
INCOMPARABLE = {
    "simulated": True,
    "hardware.device": "cuda:1",
    "hardware.name": "other",
    "hardware.chip": "other",
    "hardware.threads": 4,
    "software.torch": "other",
    "software.transformers": "other",
    "model.weights": "other",
    "model.dtype": "float16",
    "dataset.checksum": "other",
    "run.task": "training",
    "run.batch_size": 4,
    "run.workers": 2,
    "run.checkpointed": None,
    "run.autocast": "float16",
    "conditions.power_source": "battery",
    "conditions.power_mode": "low",
    "conditions.thermal_state": "limited",
    "conditions.memory_pressure": "critical",
    "randomness.deterministic_algorithms": True,
    "randomness.cudnn_benchmark": True,
    "randomness.matmul_precision": "medium",
    "model": None,
    "dataset": None,
}


@pytest.mark.parametrize("path", INCOMPARABLE)
def test_diff_has_no_metrics_for_different_workloads(path):
    """A difference prevents the comparison in both directions."""
    other = change_value(path, INCOMPARABLE[path])

    for diff in (COMPLETE.diff(other), other.diff(COMPLETE)):
        assert [reason.name for reason in diff.reasons] == [path]
        assert diff.reasons[0].reason
        assert (diff.comparable, diff.metrics) == (False, ())
        assert str(diff).startswith("Not comparable: ")
        assert path in str(diff)


RUNS = [
    ({"batch_size": 4}, {"batch_size": 64}, ["run.batch_size"]),
    ({"task": "annotation"}, {"task": "training"}, ["run.task"]),
    ({"peak_memory_bytes": 1}, {"peak_memory_bytes": 2}, []),
    ({"batch_size": 4}, {"batch_size": 4}, []),
]


@pytest.mark.parametrize(("first", "second", "reasons"), RUNS)
def test_diff_compares_the_run_of_each_report(first, second, reasons):
    """The run of a report takes precedence over the settings of the user."""
    same = replace(SWEEP, report="comparison", run=Run(batch_size=32))
    first_book, second_book = (
        change("", metrics=(replace(SWEEP, report="profile", run=Run(**run)), same)) for run in (first, second)
    )

    assert [reason.name for reason in first_book.diff(second_book).reasons] == reasons
    assert bool(first_book.diff(second_book).metrics) is not bool(reasons)


def test_diff_ignores_reports_of_only_one_logbook():
    larger = change("", metrics=(SWEEP, replace(SWEEP, report="profile", run=Run(batch_size=64))))

    assert COMPLETE.diff(larger).comparable
    assert larger.diff(COMPLETE).metrics


def test_diff_compares_the_knee_as_a_metric():
    sweep = SweepReport("mine", "annotation", "mps", (Point(64, 10.0),), knee=64)
    other = replace(sweep, points=(Point(32, 9.0),), knee=32)
    books = [change("", metrics=()).with_reports(report) for report in (sweep, other)]

    assert ("knee", 64, 32) in [
        (metric.name, metric.first, metric.second) for metric in books[0].diff(books[1]).metrics
    ]


@pytest.mark.parametrize("name", ["model", "dataset"])
def test_diff_requires_model_and_dataset_for_metrics(name):
    incomplete = change("", **{name: None})
    without_metrics = replace(incomplete, metrics=())

    assert [reason.name for reason in incomplete.diff(incomplete).reasons] == [name]
    assert without_metrics.diff(without_metrics).comparable


def test_diff_rejects_other_types():
    with pytest.raises(ConfigurationError):
        COMPLETE.diff("run.json")


# Paths, the section with another value, and its changes. These differences are only reported.
REPORTED = {
    "software.python": ("software", {"python": "other"}),
    "code.changed": ("code", {"changed": 0}),
    "hardware.memory_limit": ("hardware", {"memory_limit": 0.5}),
    "storage.model": ("", {"storage": {**COMPLETE.storage, "model": COMPLETE.storage["Hugging Face cache"]}}),
    "randomness.seeds.torch": ("randomness", {"seeds": {"torch": 2}}),
    "software.packages.numpy": ("software", {"packages": {"numpy": "2.0.0"}}),
    "environment.OMP_NUM_THREADS": ("", {"environment": {}}),
}


@pytest.mark.parametrize("path", REPORTED)
def test_reported_difference_does_not_prevent_a_comparison(path):
    section, changes = REPORTED[path]
    diff = COMPLETE.diff(change(section, **changes))

    assert diff.comparable
    assert [difference.name for difference in diff.differences] == [path]
    assert path in str(diff)
    assert diff.metrics


def test_diff_reports_absent_variable_as_not_set():
    (difference,) = COMPLETE.diff(change("", environment={})).differences

    assert (difference.first, difference.second, difference.reason) == ("8", "not set", "")


def test_diff_metrics_have_a_ratio():
    faster = replace(SWEEP, values={"rows_per_second": 150.0, "other": 1.0})
    diff = COMPLETE.diff(change("", metrics=(replace(SWEEP, subject="mine"), faster)))

    (metric,) = diff.metrics
    assert (metric.name, metric.first, metric.second, metric.ratio) == ("rows_per_second", 100.0, 150.0, 1.5)
    assert "1.500" in str(diff)
    assert diff.to_dict()["metrics"][0]["ratio"] == 1.5


def test_diff_lists_values_that_are_unknown_in_both():
    incomplete = change("run", length=None)
    diff = incomplete.diff(incomplete)

    assert (diff.comparable, diff.unknown_fields, diff.differences) == (True, ("run.length",), ())
    assert "Unknown in both: run.length." in str(diff)


def test_unknown_values_are_in_no_report():
    unknown = replace(COMPLETE, run=Run(), metrics=())
    measured = replace(unknown, metrics=(replace(SWEEP, run=COMPLETE.run),))

    assert unknown.diff(measured).unknown_fields == ()


def test_diff_displays_transient_values_apart():
    diff = COMPLETE.diff(change("background", cpu_fraction=0.9))

    assert (diff.comparable, diff.differences) == (True, ())
    assert "0.9" in str(diff)
