"""What reports tell a logbook: numbers, and never a text."""

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


def test_figures_are_numbers():
    """Each report tells numbers, where it was measured, and what it says of the run."""
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
    assert all(isinstance(one, (int, float)) for told in (sweep, memory, loader) for one in told.values.values())


def test_reports_of_the_runbook_tell_figures():
    """What the functions of the package return is read, and no word of a text comes along."""
    split = PhaseTimes({"data": 0.03, "forward": 0.01})
    cpu = DeviceMetrics("cpu", 0.04, (0.03, 0.05), 2, split)
    gpu = DeviceMetrics("cuda:0", 0.02, (0.01, 0.03), 2, split, Interval(1.5, 2.0, 2.5, 0.95))
    comparison = Comparison("mine", "annotation", (cpu, gpu), 6, dtype="float32")
    profile = Profile("mine", "annotation", "cpu", 2, 50, 5, 0.04, split, 0.03, 0.01, (), 100.0)
    parity = nb.runbook.parity("bundled_small", ["Smith has asthma."], device="cpu", dtype="bfloat16")
    told = list(map(extract_metrics, [parity, comparison, profile, nb.verdict(parity, comparison)]))
    values = [one.values for one in told]

    assert [one.report for one in told] == ["parity", "comparison", "profile", "verdict"]
    assert values[0]["texts"] == 1
    assert (values[1]["cuda:0_speedup"], values[1]["cpu_data_fraction"], told[1].run.batch_size) == (2.0, 0.75, 2)
    assert (values[2]["data_only_seconds"], values[2]["operators_per_step"]) == (0.03, 100.0)
    assert told[3].verdict == nb.verdict(parity, comparison).recommendation
    assert "Smith" not in repr(told)


@pytest.mark.parametrize(
    ("name", "kept"),
    [
        ("The patient John Smith has asthma", "***"),
        ("make.<locals>.step", "make.<locals>.step"),
        ("OpenMed/NER-Disease", "OpenMed/NER-Disease"),
        ("/data/John Smith/model", "/data/***/model"),
    ],
)
def test_names_of_what_was_measured(name, kept):
    """A name is kept where it is one, such as that of a function or a model; a sentence becomes three stars."""
    split = PhaseTimes({"forward": 0.01})
    profile = Profile(name, "own step", "cpu", 2, 50, 5, 0.04, split, 0.03, 0.01, (), 100.0)

    assert extract_metrics(profile).subject == kept


def test_reports_are_of_one_device():
    """The device of reports is the one that all name, in one spelling; several, and another than the logbook's, are refused."""
    first, second = (extract_metrics(LoaderCheck(device, 0.03, 0.01, 2, 20)) for device in ("cuda", "cpu"))

    assert (report_device([first]), report_device([second, second]), report_device([])) == ("cuda:0", "cpu", None)
    with pytest.raises(ConfigurationError, match="of several devices: cpu, cuda:0"):
        report_device([first, second])


def test_what_is_no_report_is_refused():
    """Anything else, also a class of another package with such a name, is refused."""
    other = type("SweepReport", (), {"__module__": "elsewhere"})

    for bad in ("a note", 3, other(), None):
        with pytest.raises(ConfigurationError, match="is not a report for a logbook"):
            extract_metrics(bad)
