"""Whether two logbooks may be compared, and what they say otherwise."""

from dataclasses import replace

import pytest

from openmed_nb.errors import ConfigurationError
from openmed_nb.runbook.bench.profiling import Profile
from openmed_nb.runbook.bench.sweep import SweepReport
from openmed_nb.runbook.bench.sweep_knee import Point
from openmed_nb.runbook.bench.workloads import Split
from openmed_nb.runbook.records.logbook.logbook import CANNOT_BE_TOLD, deciding, listed
from openmed_nb.runbook.records.logbook.sections import Run

OTHERS = [
    ("simulation", "", {"simulated": True}),
    ("device", "hardware", {"device": "cpu"}),
    ("name of the device", "hardware", {"name": "Apple M1"}),
    ("chip", "hardware", {"chip": "Apple M1"}),
    ("threads", "hardware", {"threads": 1}),
    ("torch", "software", {"torch": "2.12.0"}),
    ("transformers", "software", {"transformers": "5.0.0"}),
    ("model", "model", {"weights": "00" * 16}),
    ("model", "model", {"tokenizer": "00" * 16}),
    ("model", "model", {"source": "memory"}),
    ("type of the weights", "run", {"dtype": "float16"}),
    ("dataset", "dataset", {"checksum": "00" * 32}),
    ("task", "run", {"task": "training step"}),
    ("batch", "run", {"batch_size": 8}),
    ("length", "run", {"length": 64}),
    ("shape of a row", "run", {"row_shape": "3x16x16"}),
    ("workers", "run", {"workers": 4}),
    ("activation checkpointing", "run", {"checkpointed": None}),
    ("accumulation", "run", {"accumulation": 8}),
    ("autocast", "run", {"autocast": "float32"}),
    ("loader workers", "loader", {"workers": 0}),
    ("batch of the loader", "loader", {"batch_size": 8}),
    ("power source", "conditions", {"power_source": "battery"}),
    ("power mode", "conditions", {"power_mode": "low"}),
    ("heat", "conditions", {"heat": "limited"}),
    ("memory pressure", "conditions", {"memory_pressure": "critical"}),
    ("deterministic algorithms", "randomness", {"deterministic_algorithms": True}),
    ("precision of products", "randomness", {"matmul_precision": "high"}),
    ("dataset", "", {"dataset": None}),
    ("power source", "conditions", {"power_source": None}),
    ("torch", "software", {"torch": None}),
]


@pytest.mark.parametrize(("name", "section", "changes"), OTHERS)
def test_what_makes_figures_incomparable(logbooks, name, section, changes):
    """Where one of these differs, or only one logbook knows it, both ways are refused, and no figures stand beside each other."""
    other = logbooks.but(section, **changes)

    for diff in (logbooks.WHOLE.diff(other), other.diff(logbooks.WHOLE)):
        assert name in [one.name for one in diff.reasons]
        assert all(one.why for one in diff.reasons)
        assert not diff.comparable
        assert diff.figures == ()
        assert str(diff).startswith("Must not be compared: ")
        assert name in str(diff)


def test_every_reason_is_tried(logbooks):
    """The table above, and the test below, have every reason; no two things that are compared have one name."""
    reasons, others = deciding(logbooks.WHOLE).keys(), listed(logbooks.WHOLE).keys()

    assert reasons == {name for name, _, _ in OTHERS} | {"cuDNN benchmark"}
    assert not reasons & others


@pytest.mark.parametrize(("device", "reasons"), [("cuda:0", ["cuDNN benchmark"]), ("mps", []), ("cpu", [])])
def test_cudnn_is_of_cuda(logbooks, device, reasons):
    """Whether cuDNN tries algorithms matters on CUDA alone."""
    book = logbooks.but("hardware", device=device)
    other = replace(book, randomness=replace(book.randomness, cudnn_benchmark=True))

    assert [one.name for one in book.diff(other).reasons] == reasons


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

    assert [one.name for one in former.diff(latter).reasons] == reasons
    assert bool(former.diff(latter).figures) is not bool(reasons)


def test_a_report_more_refuses_nothing(logbooks):
    """A report that one logbook alone has is not compared, and does not keep the others from it."""
    (sweep,) = logbooks.WHOLE.figures
    more = logbooks.but("", figures=(sweep, replace(sweep, report="profile", run=Run(batch_size=64))))

    assert logbooks.WHOLE.diff(more).comparable
    assert more.diff(logbooks.WHOLE).figures


PROFILE = Profile("mine", "own step", "mps", 2, 50, 5, 0.04, Split({"forward": 0.01}), 0.03, 0.01, (), 100.0)


@pytest.mark.parametrize(
    ("name", "first", "second"),
    [("batch", {"rows": 64}, {"rows": 4}), ("shape of a row", {"row_shape": "3x16x16"}, {"row_shape": "3x256x256"})],
)
def test_what_reports_say_counts_most(logbooks, name, first, second):
    """A report is of its own batch and rows, whatever the person said; other rows, such as larger pictures, are other work."""
    book = logbooks.but("", figures=())
    former, latter = (book.with_reports(replace(PROFILE, **run)) for run in (first, second))
    shown = [str(value) for run in (first, second) for value in run.values()]

    assert [(one.name, one.first, one.second) for one in former.diff(latter).reasons] == [(name, *shown)]
    assert former.run.batch_size == first.get("rows", 2)


def test_two_sweeps_may_be_compared(logbooks):
    """The knee of a sweep is what it found, so that another knee is a figure and no other work."""
    sweep = SweepReport("mine", "annotation", "mps", (Point(64, 10.0),), knee=64)
    other = replace(sweep, points=(Point(32, 9.0),), knee=32)
    books = [logbooks.but("", figures=()).with_reports(one) for one in (sweep, other)]

    assert ("knee_rows", 64, 32) in [(one.name, one.first, one.second) for one in books[0].diff(books[1]).figures]


@pytest.mark.parametrize("name", ["model", "dataset"])
def test_what_must_be_known(logbooks, name):
    """If neither logbook says model or dataset, it cannot be told whether their figures may be compared; without any, they may."""
    silent = logbooks.but("", **{name: None})
    diff, bare = silent.diff(silent), replace(silent, figures=())

    assert [(one.name, one.first, one.why) for one in diff.reasons] == [(name, "not known", CANNOT_BE_TOLD)]
    assert "cannot be told" in str(diff)
    assert bare.diff(bare).comparable


@pytest.mark.parametrize("other", ["run.json", None, 3])
def test_what_is_no_logbook_is_not_compared(logbooks, other):
    """Anything but a logbook is one clear error."""
    with pytest.raises(ConfigurationError, match="cannot be compared with"):
        logbooks.WHOLE.diff(other)


MERELY_LISTED = [
    ("openmed_nb", "software", {"openmed_nb": "0.2.0"}),
    ("Python", "software", {"python": "3.12.0"}),
    ("system", "software", {"system": "macOS 15.0"}),
    ("precision certificate", "model", {"certificate": "there is no certificate"}),
    ("commit", "code", {"commit": "00" * 20}),
    ("changed since the commit", "code", {"changed": 0}),
    ("seeds", "randomness", {"seeds": {"torch": 2}}),
    ("package numpy", "software", {"packages": {"numpy": "2.0.0"}}),
    ("variable OMP_NUM_THREADS", "", {"environment": {}}),
    ("MPS variable PYTORCH_ENABLE_MPS_FALLBACK", "", {"mps_variables": ()}),
    ("memory limit", "hardware", {"memory_limit": 0.8}),
    ("heat as reported", "conditions", {"heat": "nothing reported"}),
    ("seeding of workers", "loader", {"worker_seeding": "torch"}),
    ("batches read ahead", "loader", {"prefetch_factor": 8}),
    ("workers that live on", "loader", {"persistent_workers": False}),
    ("start of workers", "loader", {"start_method": "spawn"}),
    ("speed limit in percent", "conditions", {"speed_limit": 40}),
]


@pytest.mark.parametrize(("name", "section", "changes"), MERELY_LISTED)
def test_what_is_said_and_refuses_nothing(logbooks, name, section, changes):
    """Where one of these differs, it is said, and figures stand beside each other all the same."""
    diff = logbooks.WHOLE.diff(logbooks.but(section, **changes))

    assert diff.comparable
    assert name in [one.name for one in diff.differences]
    assert name in str(diff)
    assert diff.figures


def test_the_same_logbook_has_no_difference(logbooks):
    """A logbook may be compared with itself, and nothing differs."""
    diff = logbooks.WHOLE.diff(logbooks.WHOLE)

    assert (diff.comparable, diff.reasons, diff.differences, diff.unknown) == (True, (), (), ())
    assert str(diff) == "May be compared"


def test_figures_stand_beside_each_other(logbooks):
    """Figures of the same report of the same thing stand beside each other with their ratio; others are left out."""
    figures = logbooks.WHOLE.figures[0]
    faster = replace(figures, values={"rows_per_second": 150.0, "other": 1.0})
    elsewhere = replace(figures, subject="mine")
    diff = logbooks.WHOLE.diff(logbooks.but("", figures=(elsewhere, faster)))

    assert [(one.name, one.first, one.second, one.ratio) for one in diff.figures] == [
        ("rows_per_second", 100.0, 150.0, 1.5)
    ]
    assert "1.500" in diff._repr_html_()
    assert "1.500" not in str(diff)
    assert diff.to_dict()["figures"][0]["ratio"] == 1.5


def test_what_is_said_beside_the_differences(logbooks):
    """What neither says though it would change figures is named; what differs from moment to moment stands in the HTML alone."""
    silent = logbooks.but("run", length=None)
    moment = logbooks.WHOLE.diff(logbooks.but("background", share=0.9))

    assert (silent.diff(silent).comparable, silent.diff(silent).unknown) == (True, ("length",))
    assert "Neither says: length." in str(silent.diff(silent))
    assert "0.9" in moment._repr_html_()
    assert "0.9" not in str(moment)
