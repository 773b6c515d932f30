"""Comparison of two logbooks."""

from dataclasses import replace

import pytest

from openmed_nb.errors import ConfigurationError
from openmed_nb.runbook.bench.profile import Profile
from openmed_nb.runbook.bench.sweep import Point, SweepReport
from openmed_nb.runbook.bench.timing import PhaseTimes
from openmed_nb.runbook.records.logbook.logbook import OTHER_GROUPS, UNKNOWN_IN_BOTH, compared_values
from openmed_nb.runbook.records.logbook.sections import Run

# Name of the difference for each path whose value prevents a comparison if it differs.
COMPARED_PATHS = {
    "hardware.device": "device",
    "hardware.name": "device name",
    "hardware.chip": "chip",
    "hardware.threads": "threads",
    "software.torch": "torch",
    "software.transformers": "transformers",
    "model.weights": "model",
    "model.tokenizer": "model",
    "model.source": "model",
    "run.dtype": "dtype",
    "dataset.checksum": "dataset",
    "run.task": "task",
    "run.batch_size": "batch size",
    "run.length": "length",
    "run.row_shape": "row shape",
    "run.workers": "workers",
    "run.accumulation": "accumulation",
    "run.autocast": "autocast",
    "loader.workers": "loader workers",
    "loader.batch_size": "loader batch size",
    "conditions.power_source": "power source",
    "conditions.power_mode": "power mode",
    "randomness.deterministic_algorithms": "deterministic algorithms",
    "randomness.matmul_precision": "matmul precision",
}
# Name of the difference, path and value.
INCOMPARABLE = [
    *((name, path, "other") for path, name in COMPARED_PATHS.items()),
    ("simulation", "simulated", True),
    ("activation checkpointing", "run.checkpointed", None),
    ("thermal state", "conditions.thermal_state", "limited"),
    ("memory pressure", "conditions.memory_pressure", "critical"),
    # A value that is known in only one logbook.
    ("dataset", "dataset", None),
    ("power source", "conditions.power_source", None),
    ("torch", "software.torch", None),
]


@pytest.mark.parametrize(("name", "path", "value"), INCOMPARABLE)
def test_diff_has_no_metrics_for_different_workloads(logbooks, name, path, value):
    """A difference prevents the comparison in both directions."""
    other = logbooks.change_value(path, value)

    for diff in (logbooks.COMPLETE.diff(other), other.diff(logbooks.COMPLETE)):
        assert name in [reason.name for reason in diff.reasons]
        assert all(reason.reason for reason in diff.reasons)
        assert not diff.comparable
        assert diff.metrics == ()
        assert str(diff).startswith("Not comparable: ")
        assert name in str(diff)


def test_comparability_keys_are_unique_and_tested(logbooks):
    groups = compared_values(logbooks.COMPLETE, ())
    names = [name for group, values in groups.items() if group not in OTHER_GROUPS for name in values]

    assert {*names} == {name for name, _, _ in INCOMPARABLE} | {"cuDNN benchmark"}
    assert len({*names, *groups["reported"]}) == len(names) + len(groups["reported"])


@pytest.mark.parametrize(("device", "reasons"), [("cuda:0", ["cuDNN benchmark"]), ("mps", []), ("cpu", [])])
def test_diff_considers_cudnn_benchmark_only_on_cuda(logbooks, device, reasons):
    book = logbooks.change_section("hardware", device=device)
    other = replace(book, randomness=replace(book.randomness, cudnn_benchmark=True))

    assert [reason.name for reason in book.diff(other).reasons] == reasons


RUNS = [
    ({"batch_size": 4}, {"batch_size": 64}, ["batch size"]),
    ({"length": 64}, {"length": 128}, ["length"]),
    ({"task": "annotation"}, {"task": "training"}, ["task"]),
    ({"dtype": "float32"}, {"dtype": "float16"}, ["dtype"]),
    ({"workers": 0}, {"workers": 2}, ["workers"]),
    ({"peak_memory_bytes": 1}, {"peak_memory_bytes": 2}, []),
    ({"batch_size": 4}, {"batch_size": 4}, []),
]


@pytest.mark.parametrize(("first", "second", "reasons"), RUNS)
def test_diff_compares_the_run_of_each_report(logbooks, first, second, reasons):
    """The run of a report takes precedence over the runs of other reports and of the user."""
    (sweep,) = logbooks.COMPLETE.metrics
    same = replace(sweep, report="comparison", run=Run(batch_size=32))
    first_book, second_book = (
        logbooks.change_section("", metrics=(same, replace(sweep, report="profile", run=Run(**run))))
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


@pytest.mark.parametrize(
    ("name", "field", "first", "second"),
    [("batch size", "rows", 64, 4), ("row shape", "row_shape", "3x16x16", "3x256x256")],
)
def test_report_takes_precedence_over_user_settings(logbooks, name, field, first, second):
    book = logbooks.change_section("", metrics=())
    first_book, second_book = (book.with_reports(replace(PROFILE, **{field: value})) for value in (first, second))

    (reason,) = first_book.diff(second_book).reasons
    assert (reason.name, reason.first, reason.second) == (name, str(first), str(second))


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


# Name of the difference for each path whose value is reported if it differs.
REPORTED_PATHS = {
    "software.openmed_nb": "openmed_nb",
    "software.python": "Python",
    "software.system": "system",
    "model.validation": "dtype validation",
    "code.commit": "commit",
    "hardware.memory_limit": "memory limit",
    "conditions.thermal_state": "reported thermal state",
    "conditions.cpu_speed_limit": "speed limit in percent",
    "loader.worker_seeding": "worker seeding",
    "loader.prefetch_factor": "prefetched batches",
    "loader.persistent_workers": "persistent workers",
    "loader.start_method": "worker start method",
}
REPORTED = [
    *((name, path, "other") for path, name in REPORTED_PATHS.items()),
    ("uncommitted changes", "code.changed", 0),
    ("seeds", "randomness.seeds", {"torch": 2}),
    ("package numpy", "software.packages", {"numpy": "2.0.0"}),
    ("variable OMP_NUM_THREADS", "environment", {}),
    ("MPS variable PYTORCH_ENABLE_MPS_FALLBACK", "mps_variables", ()),
]


@pytest.mark.parametrize(("name", "path", "value"), REPORTED)
def test_reported_difference_does_not_prevent_a_comparison(logbooks, name, path, value):
    diff = logbooks.COMPLETE.diff(logbooks.change_value(path, value))

    assert diff.comparable
    assert [difference.name for difference in diff.differences] == [name]
    assert name in str(diff)
    assert diff.metrics


def test_diff_reports_absent_variable_as_not_set(logbooks):
    (difference,) = logbooks.COMPLETE.diff(logbooks.change_section("", environment={})).differences

    assert (difference.first, difference.second, difference.reason) == ("8", "not set", "")


def test_diff_of_equal_logbooks_is_empty(logbooks):
    diff = logbooks.COMPLETE.diff(logbooks.COMPLETE)

    assert (diff.comparable, diff.reasons, diff.differences, diff.unknown_fields) == (True, (), (), ())
    assert str(diff) == "Comparable"


def test_diff_metrics_have_a_ratio(logbooks):
    metrics = logbooks.COMPLETE.metrics[0]
    faster = replace(metrics, values={"rows_per_second": 150.0, "other": 1.0})
    other_subject = replace(metrics, subject="mine")
    diff = logbooks.COMPLETE.diff(logbooks.change_section("", metrics=(other_subject, faster)))

    (metric,) = diff.metrics
    assert (metric.name, metric.first, metric.second, metric.ratio) == ("rows_per_second", 100.0, 150.0, 1.5)
    assert "1.500" in diff._repr_html_()
    assert "1.500" not in str(diff)
    assert diff.to_dict()["metrics"][0]["ratio"] == 1.5


def test_diff_lists_values_that_are_unknown_in_both(logbooks):
    incomplete = logbooks.change_section("run", length=None)
    diff = incomplete.diff(incomplete)

    assert (diff.comparable, diff.unknown_fields) == (True, ("length",))
    assert "Unknown in both: length." in str(diff)


def test_diff_displays_transient_values_only_in_html(logbooks):
    diff = logbooks.COMPLETE.diff(logbooks.change_section("background", cpu_fraction=0.9))

    assert diff.comparable
    assert "0.9" in diff._repr_html_()
    assert "0.9" not in str(diff)
