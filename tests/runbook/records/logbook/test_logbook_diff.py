"""Whether two logbooks may be compared, and what they say otherwise."""

from dataclasses import replace

import pytest

from openmed_nb.errors import ConfigurationError
from openmed_nb.runbook.bench.profile import Profile
from openmed_nb.runbook.bench.sweep import Point, SweepReport
from openmed_nb.runbook.bench.timing import PhaseTimes
from openmed_nb.runbook.records.logbook.logbook import DECIDING, LISTED
from openmed_nb.runbook.records.logbook.sections import Run

OTHERS = [
    ("simulation", "simulated", True),
    ("device", "hardware.device", "cpu"),
    ("name of the device", "hardware.name", "Apple M1"),
    ("chip", "hardware.chip", "Apple M1"),
    ("threads", "hardware.threads", 1),
    ("torch", "software.torch", "2.12.0"),
    ("transformers", "software.transformers", "5.0.0"),
    ("model", "model.weights", "00" * 16),
    ("model", "model.tokenizer", "00" * 16),
    ("model", "model.source", "memory"),
    ("type of the weights", "run.dtype", "float16"),
    ("dataset", "dataset.checksum", "00" * 32),
    ("task", "run.task", "training step"),
    ("batch", "run.batch_size", 8),
    ("length", "run.length", 64),
    ("shape of a row", "run.row_shape", "3x16x16"),
    ("workers", "run.workers", 4),
    ("activation checkpointing", "run.checkpointed", None),
    ("accumulation", "run.accumulation", 8),
    ("autocast", "run.autocast", "float32"),
    ("loader workers", "loader.workers", 0),
    ("batch of the loader", "loader.batch_size", 8),
    ("power source", "conditions.power_source", "battery"),
    ("power mode", "conditions.power_mode", "low"),
    ("heat", "conditions.heat", "limited"),
    ("memory pressure", "conditions.memory_pressure", "critical"),
    ("deterministic algorithms", "randomness.deterministic_algorithms", True),
    ("precision of products", "randomness.matmul_precision", "high"),
    ("dataset", "dataset", None),
    ("power source", "conditions.power_source", None),
    ("torch", "software.torch", None),
]


@pytest.mark.parametrize(("name", "place", "value"), OTHERS)
def test_other_work_is_not_compared(logbooks, name, place, value):
    """Where one of these differs, or only one logbook knows it, no figures stand beside each other, in either order."""
    other = logbooks.changed(place, value)

    for diff in (logbooks.WHOLE.diff(other), other.diff(logbooks.WHOLE)):
        assert name in [reason.name for reason in diff.reasons]
        assert all(reason.why for reason in diff.reasons)
        assert not diff.comparable
        assert diff.figures == ()
        assert str(diff).startswith("Must not be compared: ")
        assert name in str(diff)


def test_every_reason_is_tried():
    """The tables of tests have every reason; no two things that are compared have one name."""
    reasons = [name for places in DECIDING.values() for name in places]

    assert {*reasons} == {name for name, _, _ in OTHERS} | {"cuDNN benchmark"}
    assert len({*reasons, *LISTED}) == len(reasons) + len(LISTED)


@pytest.mark.parametrize(("device", "reasons"), [("cuda:0", ["cuDNN benchmark"]), ("mps", []), ("cpu", [])])
def test_cudnn_benchmark_decides_on_cuda_alone(logbooks, device, reasons):
    book = logbooks.but("hardware", device=device)
    other = replace(book, randomness=replace(book.randomness, cudnn_benchmark=True))

    assert [reason.name for reason in book.diff(other).reasons] == reasons


RUNS = [
    ({"batch_size": 4}, {"batch_size": 64}, ["batch"]),
    ({"length": 64}, {"length": 128}, ["length"]),
    ({"task": "annotation"}, {"task": "training"}, ["task"]),
    ({"dtype": "float32"}, {"dtype": "float16"}, ["type of the weights"]),
    ({"workers": 0}, {"workers": 2}, ["workers"]),
    ({"peak_memory_bytes": 1}, {"peak_memory_bytes": 2}, []),
    ({"batch_size": 4}, {"batch_size": 4}, []),
]


@pytest.mark.parametrize(("first", "second", "reasons"), RUNS)
def test_every_report_has_a_run_of_its_own(logbooks, first, second, reasons):
    """What one of several reports was measured with counts for it, whatever another report, or the person, says."""
    (sweep,) = logbooks.WHOLE.figures
    same = replace(sweep, report="comparison", run=Run(batch_size=32))
    former, latter = (
        logbooks.but("", figures=(same, replace(sweep, report="profile", run=Run(**run)))) for run in (first, second)
    )

    assert [reason.name for reason in former.diff(latter).reasons] == reasons
    assert bool(former.diff(latter).figures) is not bool(reasons)


def test_a_report_more_refuses_nothing(logbooks):
    """A report that one logbook alone has is not compared, and does not keep the others from it."""
    (sweep,) = logbooks.WHOLE.figures
    more = logbooks.but("", figures=(sweep, replace(sweep, report="profile", run=Run(batch_size=64))))

    assert logbooks.WHOLE.diff(more).comparable
    assert more.diff(logbooks.WHOLE).figures


PROFILE = Profile("mine", "own step", "mps", 2, 50, 5, 0.04, PhaseTimes({"forward": 0.01}), 0.03, 0.01, (), 100.0)


@pytest.mark.parametrize(
    ("name", "field", "first", "second"),
    [("batch", "rows", 64, 4), ("shape of a row", "row_shape", "3x16x16", "3x256x256")],
)
def test_report_counts_more_than_the_person(logbooks, name, field, first, second):
    """A report is of its own batch and rows, whatever the person said; other rows, such as larger pictures, are other work."""
    book = logbooks.but("", figures=())
    former, latter = (book.with_reports(replace(PROFILE, **{field: value})) for value in (first, second))

    (reason,) = former.diff(latter).reasons
    assert (reason.name, reason.first, reason.second) == (name, str(first), str(second))


def test_knee_is_a_figure_and_no_other_work(logbooks):
    sweep = SweepReport("mine", "annotation", "mps", (Point(64, 10.0),), knee=64)
    other = replace(sweep, points=(Point(32, 9.0),), knee=32)
    books = [logbooks.but("", figures=()).with_reports(one) for one in (sweep, other)]

    assert ("knee_rows", 64, 32) in [(one.name, one.first, one.second) for one in books[0].diff(books[1]).figures]


@pytest.mark.parametrize("name", ["model", "dataset"])
def test_unknown_work_is_not_compared(logbooks, name):
    """If neither logbook says model or dataset, figures cannot be compared; without any, the logbooks may."""
    silent = logbooks.but("", **{name: None})
    bare = replace(silent, figures=())

    assert [reason.name for reason in silent.diff(silent).reasons] == [name]
    assert "cannot be told" in str(silent.diff(silent))
    assert bare.diff(bare).comparable


@pytest.mark.parametrize("other", ["run.json", None, 3])
def test_other_value_is_not_compared(logbooks, other):
    with pytest.raises(ConfigurationError):
        logbooks.WHOLE.diff(other)


MERELY_LISTED = [
    ("openmed_nb", "software.openmed_nb", "0.2.0"),
    ("Python", "software.python", "3.12.0"),
    ("system", "software.system", "macOS 15.0"),
    ("precision certificate", "model.certificate", "there is no certificate"),
    ("commit", "code.commit", "00" * 20),
    ("changed since the commit", "code.changed", 0),
    ("seeds", "randomness.seeds", {"torch": 2}),
    ("package numpy", "software.packages", {"numpy": "2.0.0"}),
    ("variable OMP_NUM_THREADS", "environment", {}),
    ("MPS variable PYTORCH_ENABLE_MPS_FALLBACK", "mps_variables", ()),
    ("memory limit", "hardware.memory_limit", 0.8),
    ("heat as reported", "conditions.heat", "nothing reported"),
    ("seeding of workers", "loader.worker_seeding", "torch"),
    ("batches read ahead", "loader.prefetch_factor", 8),
    ("workers that live on", "loader.persistent_workers", False),
    ("start of workers", "loader.start_method", "spawn"),
    ("speed limit in percent", "conditions.speed_limit", 40),
]


@pytest.mark.parametrize(("name", "place", "value"), MERELY_LISTED)
def test_listed_difference_refuses_nothing(logbooks, name, place, value):
    diff = logbooks.WHOLE.diff(logbooks.changed(place, value))

    assert diff.comparable
    assert [difference.name for difference in diff.differences] == [name]
    assert name in str(diff)
    assert diff.figures


def test_absent_variable_is_not_set(logbooks):
    (difference,) = logbooks.WHOLE.diff(logbooks.but("", environment={})).differences

    assert (difference.first, difference.second, difference.why) == ("8", "not set", "")


def test_same_logbook_has_no_difference(logbooks):
    diff = logbooks.WHOLE.diff(logbooks.WHOLE)

    assert (diff.comparable, diff.reasons, diff.differences, diff.unknown) == (True, (), (), ())
    assert str(diff) == "May be compared"


def test_figures_of_the_same_report_have_a_ratio(logbooks):
    figures = logbooks.WHOLE.figures[0]
    faster = replace(figures, values={"rows_per_second": 150.0, "other": 1.0})
    elsewhere = replace(figures, subject="mine")
    diff = logbooks.WHOLE.diff(logbooks.but("", figures=(elsewhere, faster)))

    (figure,) = diff.figures
    assert (figure.name, figure.first, figure.second, figure.ratio) == ("rows_per_second", 100.0, 150.0, 1.5)
    assert "1.500" in diff._repr_html_()
    assert "1.500" not in str(diff)
    assert diff.to_dict()["figures"][0]["ratio"] == 1.5


def test_unknown_to_both_is_named(logbooks):
    silent = logbooks.but("run", length=None)
    diff = silent.diff(silent)

    assert (diff.comparable, diff.unknown) == (True, ("length",))
    assert "Neither says: length." in str(diff)


def test_moment_stands_in_the_html_alone(logbooks):
    diff = logbooks.WHOLE.diff(logbooks.but("background", share=0.9))

    assert diff.comparable
    assert "0.9" in diff._repr_html_()
    assert "0.9" not in str(diff)
