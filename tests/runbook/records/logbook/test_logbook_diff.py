"""Comparison of two logbooks."""

from dataclasses import replace

import pytest

from openmed_nb.errors import ConfigurationError
from openmed_nb.runbook.bench.profile import Profile
from openmed_nb.runbook.bench.sweep import Point, SweepReport
from openmed_nb.runbook.bench.timing import PhaseTimes
from openmed_nb.runbook.records.logbook.logbook import UNKNOWN_IN_BOTH
from openmed_nb.runbook.verdict.metrics import Run

# Paths and values that prevent a comparison.
INCOMPARABLE = {
    "simulated": True,
    "hardware.device": "cuda:1",
    "hardware.name": "other",
    "hardware.chip": "other",
    "hardware.threads": 4,
    "software.torch": "other",
    "software.transformers": "other",
    "model.source": "memory",
    "model.weights": "other",
    "model.settings": "other",
    "model.tokenizer": "other",
    "model.dtype": "float16",
    "dataset.checksum": "other",
    "run.task": "training",
    "run.batch_size": 4,
    "run.length": 64,
    "run.workers": 2,
    "run.dtype": "float16",
    "run.row_shape": "3x224x224",
    "run.checkpointed": None,
    "run.accumulation": 1,
    "run.autocast": "float16",
    "conditions.power_source": "battery",
    "conditions.power_mode": "low",
    "randomness.deterministic_algorithms": True,
    "randomness.cudnn_benchmark": True,
    "randomness.matmul_precision": "medium",
    # A value that is known in only one logbook.
    "model": None,
    "dataset": None,
}


@pytest.mark.parametrize("path", INCOMPARABLE)
def test_diff_has_no_metrics_for_different_workloads(logbooks, path):
    """A difference prevents the comparison in both directions."""
    other = logbooks.change_value(path, INCOMPARABLE[path])

    for diff in (logbooks.COMPLETE.diff(other), other.diff(logbooks.COMPLETE)):
        assert [reason.name for reason in diff.reasons] == [path]
        assert diff.reasons[0].reason
        assert not diff.comparable
        assert diff.metrics == ()
        assert str(diff).startswith("Not comparable: ")
        assert path in str(diff)


@pytest.mark.parametrize("change", [{"thermal_state": "limited"}, {"memory_pressure": "critical"}])
def test_diff_compares_conditions_that_reduce_the_speed(logbooks, change):
    other = logbooks.change_section("conditions", **change)

    assert [reason.name for reason in logbooks.COMPLETE.diff(other).reasons] == ["conditions.slowdown"]
    assert other.diff(other).comparable


RUNS = [
    ({"batch_size": 4}, {"batch_size": 64}, ["run.batch_size"]),
    ({"length": 64}, {"length": 128}, ["run.length"]),
    ({"task": "annotation"}, {"task": "training"}, ["run.task"]),
    ({"peak_memory_bytes": 1}, {"peak_memory_bytes": 2}, []),
    ({"batch_size": 4}, {"batch_size": 4}, []),
]


@pytest.mark.parametrize(("first", "second", "reasons"), RUNS)
def test_diff_compares_the_run_of_each_report(logbooks, first, second, reasons):
    """The run of a report takes precedence over the settings of the user."""
    (sweep,) = logbooks.COMPLETE.metrics
    same = replace(sweep, report="comparison", run=Run(batch_size=32))
    first_book, second_book = (
        logbooks.change_section("", metrics=(replace(sweep, report="profile", run=Run(**run)), same))
        for run in (first, second)
    )

    assert [reason.name for reason in first_book.diff(second_book).reasons] == reasons
    assert bool(first_book.diff(second_book).metrics) is not bool(reasons)


def test_diff_ignores_reports_of_only_one_logbook(logbooks):
    (sweep,) = logbooks.COMPLETE.metrics
    larger = logbooks.change_section("", metrics=(sweep, replace(sweep, report="profile", run=Run(batch_size=64))))

    assert logbooks.COMPLETE.diff(larger).comparable
    assert larger.diff(logbooks.COMPLETE).metrics


PROFILE = Profile("mine", "own step", "mps", 2, 50, 0.04, PhaseTimes({"forward": 0.01}), 0.03, 0.01, (), 100.0)


def test_report_takes_precedence_over_user_settings(logbooks):
    book = logbooks.change_section("", metrics=())
    first_book, second_book = (book.with_reports(replace(PROFILE, rows=rows)) for rows in (64, 4))

    (reason,) = first_book.diff(second_book).reasons
    assert (reason.name, reason.first, reason.second) == ("run.batch_size", "64", "4")


def test_diff_compares_the_knee_as_a_metric(logbooks):
    sweep = SweepReport("mine", "annotation", "mps", (Point(64, 10.0),), knee=64)
    other = replace(sweep, points=(Point(32, 9.0),), knee=32)
    books = [logbooks.change_section("", metrics=()).with_reports(report) for report in (sweep, other)]
    metrics = books[0].diff(books[1]).metrics

    assert ("knee", 64, 32) in [(metric.name, metric.first, metric.second) for metric in metrics]


@pytest.mark.parametrize("name", ["model", "dataset"])
def test_diff_requires_model_and_dataset_for_metrics(logbooks, name):
    incomplete = logbooks.change_section("", **{name: None})
    without_metrics = replace(incomplete, metrics=())

    assert [reason.name for reason in incomplete.diff(incomplete).reasons] == [name]
    assert UNKNOWN_IN_BOTH in str(incomplete.diff(incomplete))
    assert without_metrics.diff(without_metrics).comparable


@pytest.mark.parametrize("other", ["run.json", None, 3])
def test_diff_rejects_other_types(logbooks, other):
    with pytest.raises(ConfigurationError):
        logbooks.COMPLETE.diff(other)


# Paths and values that are reported. Changed sections have one different value.
REPORTED = {
    "software.openmed_nb": "other",
    "software.python": "other",
    "model.validation": "other",
    "code.commit": "ab" * 20,
    "code.changed": 0,
    "hardware.memory_limit": 0.5,
    "storage.model": None,
    "phase": "after",
    "randomness.seeds.torch": 2,
    "software.packages.numpy": "2.0.0",
    "environment.OMP_NUM_THREADS": None,
}


@pytest.mark.parametrize("path", REPORTED)
def test_reported_difference_does_not_prevent_a_comparison(logbooks, path):
    sections = {
        "storage.model": (
            "storage",
            {**logbooks.COMPLETE.storage, "model": logbooks.COMPLETE.storage["Hugging Face cache"]},
        ),
        "randomness.seeds.torch": ("randomness.seeds", {"torch": 2}),
        "software.packages.numpy": ("software.packages", {"numpy": "2.0.0"}),
        "environment.OMP_NUM_THREADS": ("environment", {}),
    }
    diff = logbooks.COMPLETE.diff(logbooks.change_value(*sections.get(path, (path, REPORTED[path]))))

    assert diff.comparable
    assert [difference.name for difference in diff.differences] == [path]
    assert path in str(diff)
    assert diff.metrics


def test_diff_reports_absent_variable_as_not_set(logbooks):
    (difference,) = logbooks.COMPLETE.diff(logbooks.change_section("", environment={})).differences

    assert (difference.first, difference.second, difference.reason) == ("8", "not set", "")


def test_diff_of_equal_logbooks_is_empty(logbooks):
    diff = logbooks.COMPLETE.diff(logbooks.COMPLETE)

    assert (diff.comparable, diff.reasons, diff.differences, diff.unknown_fields) == (True, (), (), ())
    assert str(diff).startswith("Comparable\nMetrics (this run)\n")


def test_diff_metrics_have_a_ratio(logbooks):
    metrics = logbooks.COMPLETE.metrics[0]
    faster = replace(metrics, values={"rows_per_second": 150.0, "other": 1.0})
    other_subject = replace(metrics, subject="mine")
    diff = logbooks.COMPLETE.diff(logbooks.change_section("", metrics=(other_subject, faster)))

    (metric,) = diff.metrics
    assert (metric.name, metric.first, metric.second, metric.ratio) == ("rows_per_second", 100.0, 150.0, 1.5)
    assert "1.500" in str(diff)
    assert diff.to_dict()["metrics"][0]["ratio"] == 1.5


def test_diff_lists_values_that_are_unknown_in_both(logbooks):
    incomplete = logbooks.change_section("run", length=None)
    diff = incomplete.diff(incomplete)

    assert (diff.comparable, diff.unknown_fields) == (True, ("run.length",))
    assert "Unknown in both: run.length." in str(diff)


def test_diff_with_another_load_is_comparable(logbooks):
    diff = logbooks.COMPLETE.diff(logbooks.change_section("background", cpu_fraction=0.9))

    assert diff.comparable
    assert "0.9" in str(diff)
