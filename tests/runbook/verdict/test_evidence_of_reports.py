"""What reports tell a verdict: the figures of each kind, of one device and one task, in whatever order they come."""

import itertools
import re
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

import openmed_nb as nb
from openmed_nb._render.display import FAILED, NOT_APPLICABLE, OK, WARNING, Finding
from openmed_nb.errors import ConfigurationError
from openmed_nb.models.certificates import Gate, GateRefusal
from openmed_nb.models.registry import BUNDLED
from openmed_nb.runbook.bench.comparison import Comparison, DeviceFigures, Interval, Utilisation
from openmed_nb.runbook.bench.profile_watch import CodePlace, OperatorTime, Synchronisation
from openmed_nb.runbook.bench.profiling import Profile
from openmed_nb.runbook.bench.sweep import SweepReport
from openmed_nb.runbook.bench.sweep_knee import Point
from openmed_nb.runbook.bench.workloads import Split
from openmed_nb.runbook.checks.doctor.report import DoctorReport
from openmed_nb.runbook.checks.operators.fallbacks import FELL_BACK, Fallback
from openmed_nb.runbook.checks.operators.fallbacks import REFUSED as MET_AN_ERROR
from openmed_nb.runbook.checks.operators.forecast import Forecast, OperatorForecast
from openmed_nb.runbook.checks.operators.table import FALLS_BACK, ModulePlace
from openmed_nb.runbook.checks.precision.report import Differences, GradientDifference, ParityReport, Score, Spans
from openmed_nb.runbook.checks.precision.trajectory import LossParity
from openmed_nb.runbook.checks.precision.validation import PrecisionVerdict
from openmed_nb.runbook.records.signals import Signals
from openmed_nb.runbook.verdict.gates import gates
from openmed_nb.runbook.verdict.metrics import Evidence
from openmed_nb.runbook.verdict.verdict import evidence_of
from openmed_nb.training.curve import MemoryCurve, MemorySample
from openmed_nb.training.nonfinite import Origin

MIB = 1 << 20
SPLIT = Split({"data": 0.002, "transfer": 0.001, "forward": 0.006, "decode": 0.001})
CPU = DeviceFigures("cpu", 0.04, (0.039, 0.042), 16, Split({"data": 0.002, "forward": 0.038}))
MPS = DeviceFigures("mps", 0.01, (0.009, 0.011), 16, SPLIT, Interval(3.8, 4.0, 4.3, 0.96), Utilisation(0.05, 0.75, 6))
COMPARISON = Comparison("bundled", "annotation", (CPU, MPS), 15, batch_tokens=16 * 128)
POINTS = (
    Point(8, 900.0, memory=80 * MIB),
    Point(16, 1500.0, memory=160 * MIB),
    Point(32, 1650.0, memory=320 * MIB),
    Point(64, fits=False),
)
SWEEP = SweepReport(
    "bundled", "annotation", "mps", POINTS, knee=32, stopped="out of memory", limit=400 * MIB, length=128
)
PARITY = ParityReport(
    model="bundled",
    device="mps",
    dtype="float32",
    texts=20,
    texts_fingerprint="09b4",
    tokens=1000,
    windows=22,
    logits=Differences(3e-6),
    other_labels=0,
    not_numbers=0,
    spans=Spans(exact=198, moved=2),
    gold=(Score(100, 100, 90), Score(100, 100, 89)),
    gradients=GradientDifference(1e-5, "a.weight", 20),
)
HALF = replace(PARITY, dtype="bfloat16", gold=None, gradients=None)
REFUSED = PrecisionVerdict(
    replace(HALF, spans=Spans(exact=80, missing=20)), Gate(), (GateRefusal("Only 80.", "Stay."),)
)
FORECAST = Forecast(
    "Bert", "2.13.0", "its list", (OperatorForecast("aten::mode", FALLS_BACK, "inference", ModulePlace(), 1),)
)
SIGNALS = Signals(power_source="battery", power_mode="automatic", heat="nominal")
DOCTOR = DoctorReport(
    (
        Finding("torch", OK, "2.13.0"),
        Finding("computation", OK, "right"),
        Finding("long matrix product", FAILED, "mps is wrong", "Upgrade torch."),
        Finding("packages", FAILED, "two do not fit", "Upgrade them."),
        Finding("memory pressure", WARNING, "warning", "Close programs."),
    )
)
WATCHED = {
    "steps": 50,
    "warm_up": 5,
    "data_only": 0.001,
    "compute_only": 0.008,
    "operators": (),
    "operators_per_step": 200.0,
    "starting_seconds": 0.006,
}
OWN_LINE = Synchronisation(".item()", CodePlace("train.py", 41, "step"), 1.0)
IN_LIBRARY = Synchronisation(".cpu()", CodePlace(library="transformers.pipelines"), 1.0)
OF_BATCH = Synchronisation(".to('mps')", CodePlace("train.py", 40, "step"), 1.0, "batch")
FELL = Fallback("aten::mode", FELL_BACK, "forward", ModulePlace(), 4, 0.004)
PROFILE = Profile(
    "bundled",
    "annotation",
    "mps",
    16,
    seconds=0.01,
    split=SPLIT,
    batch_tokens=32 * 128,
    synchronisations=(OWN_LINE, IN_LIBRARY, OF_BATCH),
    watched=2,
    **WATCHED,
)


def curve(sizes, **changes):
    """Return a memory curve of sizes in MiB, on MPS."""
    samples = [MemorySample(n, n, 1.0 * n, allocated=size * MIB) for n, size in enumerate([sizes[0], *sizes], 1)]
    return replace(MemoryCurve("mps", tuple(samples)), **changes)


def test_comparison():
    """A comparison tells of the fastest device that is not the CPU, or of the one that other reports are of."""
    evidence = evidence_of(COMPARISON)
    alone = evidence_of(replace(COMPARISON, devices=(CPU,)))
    both = replace(
        COMPARISON, devices=(CPU, MPS, replace(MPS, device="cuda:1", speed_up=Interval(20.0, 21.0, 22.0, 0.96)))
    )

    assert (evidence.device, evidence.task) == ("mps", "annotation")
    assert (evidence.speed_up_low, evidence.speed_up, evidence.speed_up_high) == (3.8, 4.0, 4.3)
    assert evidence.utilisation == pytest.approx(0.7)
    assert (evidence.data_share, evidence.transfer_share) == (pytest.approx(0.2), pytest.approx(0.1))
    assert (evidence.batch, evidence.batch_tokens, evidence.texts_per_second) == (None, 2048, 1600.0)
    assert (alone.device, alone.speed_up, alone.batch_tokens) == ("cpu", None, 2048)
    assert evidence_of(both).device == "cuda:1"
    assert evidence_of(both, SWEEP).speed_up == 4.0
    assert evidence_of(both, replace(SWEEP, device="cpu")).speed_up is None


@pytest.mark.parametrize(
    ("reports", "told"),
    [
        (
            (SWEEP, COMPARISON),
            {"knee_gain": 0.1, "headroom": 0.6, "knee": 32, "best_batch": 32, "out_of_memory_at": 64},
        ),
        ((SWEEP,), {"knee_gain": None, "batch": None, "headroom": 0.2}),
        ((SWEEP, Evidence(batch=48)), {"knee_gain": None, "headroom": None}),
        (
            (replace(SWEEP, points=(Point(1, fits=False),), knee=None),),
            {"out_of_memory_at": 1, "knee": None, "headroom": None},
        ),
        ((replace(SWEEP, points=(POINTS[0], Point(16, 1500.0, memory=360 * MIB)), knee=16),), {"headroom": 0.1}),
    ],
)
def test_sweep(reports, told):
    """A sweep tells what the batch in use, or else the knee, leaves free, and how much the knee gains; beyond it, nothing."""
    evidence = evidence_of(*reports)

    assert {name: getattr(evidence, name) for name in told} == {
        name: value if value is None else pytest.approx(value) for name, value in told.items()
    }


@pytest.mark.parametrize(
    ("tokens", "length", "batch", "gain"),
    [
        (2048, 128, 16, 0.1),
        (2048, 64, 32, 0.0),
        (3072, 128, 24, 1650 / 1575 - 1),  # Between those that were measured, on the line from one to the other.
        (100, 128, 1, None),
        (None, 128, None, None),
        (2048, None, None, None),
    ],
)
def test_tokens_and_rows(tokens, length, batch, gain):
    """The texts that a step annotates are no rows of a sweep: tokens tell how many such rows a batch has, or nothing does."""
    evidence = evidence_of(replace(COMPARISON, batch_tokens=tokens), replace(SWEEP, length=length))
    trained = replace(COMPARISON, task="training step", batch_tokens=tokens), replace(SWEEP, task="training step")

    assert (evidence.batch, evidence.knee_gain) == (batch, gain if gain is None else pytest.approx(gain))
    assert evidence_of(*trained).knee_gain == pytest.approx(0.1)


@pytest.mark.parametrize(
    ("stopped", "knee", "batch", "gain"),
    [
        ("time", 32, 32, None),
        ("largest", 32, 32, None),
        ("out of memory", 32, 32, 0.0),
        ("time", 16, 32, -0.09),
        ("time", 32, 8, 0.83),
    ],
)
def test_sweep_that_was_cut_off(stopped, knee, batch, gain):
    """If a sweep ended while throughput still rose, and memory is not why, it tells no more than that a batch is too small."""
    found = evidence_of(Evidence(batch=batch), replace(SWEEP, points=POINTS[:-1], stopped=stopped, knee=knee))

    assert found.knee_gain == (gain if gain is None else pytest.approx(gain, abs=0.01))


def test_knee_of_the_sweep_keeps_its_headroom():
    """A knee that takes a hair more than the nine tenths of the limit that a sweep may take has headroom enough."""
    at_knee = replace(SWEEP, points=(POINTS[0], Point(16, 1500.0, memory=361 * MIB)), knee=16)

    assert "headroom" not in str(nb.verdict(COMPARISON, at_knee, PARITY).to_dict()["reasons"])


@pytest.mark.parametrize(
    ("reports", "agreement", "refused"),
    [
        ((PARITY,), 0.99, None),
        ((HALF,), 0.99, None),
        ((replace(HALF, spans=Spans(exact=80, missing=20)),), None, "bfloat16"),
        ((replace(HALF, spans=Spans()),), None, None),
        ((replace(PARITY, spans=Spans()),), None, None),
        ((REFUSED,), None, "bfloat16"),
        ((REFUSED, PARITY), 0.99, "bfloat16"),
        ((PrecisionVerdict(HALF, Gate()),), 0.99, None),
        ((PrecisionVerdict(HALF, Gate(), (GateRefusal("Too few.", "More texts.", against=False),)),), 0.99, None),
    ],
)
def test_parity_and_reduced_types(reports, agreement, refused):
    """A reduced type that keeps the entities shows that the device does; one that loses them speaks against the type alone."""
    evidence = evidence_of(*reports)

    assert (evidence.entity_agreement, evidence.refused_dtype) == (agreement, refused)
    if reports == (PARITY,):
        assert (evidence.recall_loss, evidence.gradients) == (pytest.approx(0.01), 1e-5)
        assert (evidence.logits, evidence.not_numbers) == (3e-6, 0)


@pytest.mark.parametrize(
    ("candidate", "origin", "parts", "recommendation"),
    [
        ((1.0, 1.0), None, (), "measure first"),
        ((1.0, 2.0), None, ("from step 2",), "compute on the CPU"),
        ((1.0, 2.0), Origin("output", "fc"), ("it first appears in what fc computes",), "compute on the CPU"),
    ],
)
def test_losses_that_part(candidate, origin, parts, recommendation):
    """A training whose losses part from the CPU's by more than rounding speaks for the CPU, and says where they part."""
    found = LossParity("bundled", "mps", "float32", (1.0, 1.0), (1.0, 1.0), candidate, origin)
    evidence = evidence_of(found)

    assert (evidence.task, evidence.device, evidence.training_parts) == ("training", "mps", parts)
    assert nb.verdict(found).recommendation == recommendation
    assert ("parity" in [one.name for one in nb.verdict(found).unknown]) == bool(parts)


@pytest.mark.parametrize(
    ("sizes", "verdict", "beyond"),
    [
        ([100] * 8, "flat", False),
        ([100 + 5 * n for n in range(8)], "growing", True),
        ([1000 + 50 * n + 900 * (n % 2) for n in range(12)], "growing", True),
        ([100] * 20 + [130, 160, 190], "growing", True),  # At the end alone.
        ([160, 104, 110, 229, 116, 175, 166], "growing", True),  # In the smaller of each two alone.
        ([100 + 4 * n for n in range(250)], "growing", True),
        ([100, 180] * 4, "sawtooth", None),
        ([100], "too short to tell", None),
    ],
)
def test_memory_curve(sizes, verdict, beyond):
    """A curve tells its verdict, and of one that grows the pace that shows it, which is beyond the gate."""
    evidence = evidence_of(curve(sizes))

    assert (evidence.memory_verdict, evidence.task, evidence.device) == (verdict, "training", "mps")
    assert beyond is None or (evidence.memory_growth > 0.26) == beyond


@given(st.lists(st.integers(1, 300), min_size=1, max_size=14), st.floats(0.01, 0.6))
def test_growth_is_always_beyond_its_gate(sizes, gate):
    """Whatever a curve is like, if it grows by some gate then the growth that is told is beyond that gate."""
    evidence = evidence_of(curve(sizes), gates=gates(memory_growth=gate))

    assert evidence.memory_verdict != "growing" or evidence.memory_growth > gate


def test_memory_curve_under_another_gate():
    """A curve is judged by the gate of the verdict, whichever it was drawn with."""
    slow = curve([100 + n for n in range(9)])

    assert evidence_of(slow).memory_verdict == "flat"
    assert evidence_of(slow, gates=gates(memory_growth=0.05)).memory_verdict == "growing"
    assert nb.verdict(slow).recommendation == "measure first"
    assert nb.verdict(slow, gates=nb.runbook.gates(memory_growth=0.05)).recommendation == "move to a remote pool"


def test_memory_curve_with_peaks():
    """A curve that knows its peaks tells what stayed free of the limit."""
    samples = tuple(MemorySample(n, n, 1.0, allocated=MIB, peak=85 * MIB, recommended=100 * MIB) for n in range(1, 6))

    assert evidence_of(MemoryCurve("mps", samples, limit=0.9)).headroom == 0.06
    assert evidence_of(MemoryCurve("mps", samples)).headroom == 0.15


def test_profile():
    """A profile tells which lines of the person wait for a GPU, what fell back or met an error, and speed and phases."""
    evidence, refused = evidence_of(PROFILE), replace(FELL, operator="aten::eig", outcome=MET_AN_ERROR)
    fallen, cpu = evidence_of(replace(PROFILE, fallbacks=(FELL, refused))), evidence_of(replace(PROFILE, device="cpu"))

    assert evidence.synchronisations == (".item() at train.py:41 in step",)
    assert (evidence.tiny_batch, evidence.batch_tokens, evidence.texts_per_second) == (True, 4096, 1600.0)
    assert (evidence.fallback_operators, evidence_of(PROFILE, COMPARISON).batch_tokens) == ((), 2048)
    assert (fallen.fallback_operators, fallen.refused_operators) == (("aten::mode",), ("aten::eig",))
    assert (cpu.synchronisations, cpu.fallback_operators) == ((), None)


@pytest.mark.parametrize(
    ("seconds", "share"),
    [
        ({"aten::mode": 0.002, "aten::addmm": 0.006}, 0.25),
        ({"aten::mode": 0.0001, "aten::addmm": 0.006}, None),
        ({}, None),
    ],
)
def test_profile_with_fallbacks(seconds, share):
    """A profile tells what fell back, and its share of the profiled time where that is much: a small one has no copies in it."""
    operators = tuple(OperatorTime(name, "forward", 1.0, time) for name, time in seconds.items())
    fell = replace(FELL, operator="aten::mode.values")
    evidence = evidence_of(replace(PROFILE, fallbacks=(fell,), operators=operators))
    simulated = evidence_of(replace(PROFILE, fallbacks=(fell,), operators=operators, simulated=True))

    assert (evidence.fallback_operators, evidence.fallback_calls) == (("aten::mode.values",), 0.01)
    assert (evidence.fallback_time, simulated.fallback_time, simulated.tiny_batch) == (share, None, None)


def test_forecast():
    """A forecast tells what would leave MPS, and that nothing does."""
    assert evidence_of(FORECAST).fallback_operators == ("aten::mode",)
    assert evidence_of(replace(FORECAST, rows=())).fallback_operators == ()
    assert evidence_of(replace(FORECAST, simulated=True)).simulated is False


def test_forecast_without_a_training_step():
    """Of a training, only a forecast that looked at a training step shows that nothing leaves MPS."""
    (row,) = FORECAST.rows
    inference = replace(FORECAST, rows=(replace(row, phase="inference", verdict="native"),))
    trained = replace(FORECAST, rows=(*inference.rows, replace(row, phase="backward", verdict="native")))

    assert evidence_of(inference, task="annotation").fallback_operators == ()
    assert evidence_of(trained, task="training").fallback_operators == ()
    assert evidence_of(inference, task="training").fallback_operators is None
    assert evidence_of(FORECAST, task="training").fallback_operators == ("aten::mode",)


@pytest.mark.real_computer
def test_ledger():
    """A ledger tells what really fell back and how often, which counts more than a forecast; its device is MPS."""
    import torch

    with nb.simulated_mps(fallback=True), nb.runbook.fallbacks() as ledger:
        torch.ones(3, device="mps").mode()
        for _ in range(3):
            torch.ones(3, device="mps").add(1)
    with nb.runbook.fallbacks() as unused:
        torch.ones(3)
    evidence = evidence_of(ledger, replace(FORECAST, rows=()))

    assert (evidence.device, evidence.simulated, evidence.fallback_operators) == ("mps", True, ("aten::mode",))
    assert 0 < evidence.fallback_calls < 0.5
    assert evidence_of(unused) == Evidence()


def test_signals_and_doctor():
    """Signals tell the states that spoil times, which count more than the doctor's; the doctor tells what failed."""
    evidence = evidence_of(DOCTOR)
    nothing = Finding("known silent errors", NOT_APPLICABLE, "no device is in force")
    unprobed = evidence_of(DoctorReport((Finding("computation", FAILED, "mps fails"), nothing)))

    assert [state.split(",")[0] for state in evidence.states] == ["memory pressure"]
    assert (evidence.device_faults, evidence.silent_errors) == ((), ("long matrix product",))
    assert evidence.doctor_failures == ("packages",)
    assert [state.split(",")[0] for state in evidence_of(DOCTOR, SIGNALS).states] == ["power"]
    assert (unprobed.silent_errors, unprobed.device_faults) == (None, ("computation",))


def test_what_counts_most():
    """A person's own figures count most, then those of the comparison, then the profile's."""
    slower = replace(COMPARISON, devices=(CPU, replace(MPS, seconds=0.02)))
    own = evidence_of(COMPARISON, Evidence(batch=4, texts_to_do=100, texts_per_second=7.0), texts_to_do=500)

    assert (own.batch, own.texts_to_do, own.texts_per_second, own.speed_up) == (4, 500, 7.0, 4.0)
    assert evidence_of(PROFILE, slower).texts_per_second == 800.0
    assert evidence_of(replace(PROFILE, seconds=0.04), COMPARISON).texts_per_second == 1600.0
    assert evidence_of(replace(PROFILE, seconds=0.04)).texts_per_second == 400.0
    assert evidence_of(replace(PROFILE, seconds=0.0)).texts_per_second is None


def test_order_makes_no_difference():
    """Whatever the order of the reports is, the verdict is the same."""
    reports = (COMPARISON, SWEEP, PARITY, REFUSED, SIGNALS, DOCTOR, FORECAST, PROFILE)
    turned = [reports[n:] + reports[:n] for n in range(len(reports))]
    found = [evidence_of(*some) for some in (*turned, *itertools.permutations(reports[:4]))]

    assert all(evidence == found[0] for evidence in found[: len(turned)])
    assert all(evidence == found[-1] for evidence in found[len(turned) :])
    assert str(nb.verdict(*reports)) == str(nb.verdict(*reversed(reports)))


ONE_MODEL = "Pass reports of one model, by one name."


@pytest.mark.parametrize(
    ("reports", "words", "remedy"),
    [
        ((3,), "int is not a report", "Pass what nb.compare, nb.sweep, nb.runbook.parity and the others return."),
        (([COMPARISON],), "list is not a report", "the others return."),
        (
            (COMPARISON, COMPARISON),
            "two reports of one kind: Comparison",
            "Pass one of each, of the same model on the same device.",
        ),
        ((SWEEP, replace(PARITY, device="cuda:0")), "several devices: cuda:0, mps", "Pass reports of one device."),
        ((COMPARISON, replace(SWEEP, device="cuda")), "was not compared", "Use one of cpu, mps."),
        (
            (COMPARISON, replace(SWEEP, task="training step")),
            "several tasks: annotation, training",
            "Pass reports of one task, or say which with task=.",
        ),
        (
            (replace(COMPARISON, dtype="float16"), replace(SWEEP, dtype="float32")),
            "several types: float16, float32",
            "Pass reports of one type.",
        ),
        ((COMPARISON, replace(PARITY, model="bundled_small")), "models: 'bundled' and 'bundled_small'", ONE_MODEL),
        (
            (COMPARISON, replace(REFUSED, parity=replace(HALF, model="some/model"))),
            "'bundled' and 'some/model'",
            ONE_MODEL,
        ),
        ((replace(PROFILE, name="Net", task="forward pass"), FORECAST), "models: 'Bert' and 'Net'", ONE_MODEL),
    ],
)
def test_reports_that_do_not_go_together(reports, words, remedy):
    """What is no report, comes twice, or is of another device, model, type or task gets a clear error with one thing to do."""
    with pytest.raises(ConfigurationError, match=re.escape(words) + ".*" + re.escape(remedy) + "$"):
        nb.verdict(*reports)


@pytest.mark.parametrize(
    ("reports", "models"),
    [
        ((COMPARISON, SWEEP, PARITY, SIGNALS, DOCTOR), ("bundled",)),
        ((COMPARISON, FORECAST), ("Bert", "bundled")),
        (
            (replace(PROFILE, name="train_step", task="own step"), FORECAST, COMPARISON),
            ("Bert", "bundled", "train_step"),
        ),
        (
            (replace(PROFILE, name="DistributedDataParallel", task="forward pass"), FORECAST),
            ("Bert", "DistributedDataParallel"),
        ),
        ((SWEEP, replace(PARITY, model=str(BUNDLED["bundled"]))), (str(BUNDLED["bundled"]), "bundled")),
        ((SIGNALS,), None),
    ],
)
def test_names_of_one_model(reports, models):
    """Names that may be of one model, such as a name and a class, go together, with a caution that names them."""
    verdict = nb.verdict(*reports)

    assert verdict.evidence.models == models
    assert any("make sure that it is one" in one for one in verdict.cautions) == (len(models or ()) > 1)


def test_task():
    """What a person says of the task counts most; of a person's own step nobody knows it."""
    assert evidence_of(COMPARISON, replace(SWEEP, task="training step"), task="training").task == "training"
    assert evidence_of(replace(PROFILE, task="own step")).task is None
    assert evidence_of(replace(SWEEP, task="forward pass")).task == "inference"
    with pytest.raises(ConfigurationError, match="task cannot be 'dance'"):
        nb.verdict(task="dance")


def test_real_reports_of_the_cpu():
    """What the functions of the toolkit return can be read as it is."""
    verdict = nb.verdict(nb.signals(), nb.runbook.forecast("bundled_small", training=False))

    assert verdict.evidence.fallback_operators == ()
    assert verdict.evidence.states is not None


def test_one_simulated_report_is_enough():
    """A report of a simulated device, of whichever kind, makes the evidence simulated; its device is the same."""
    sample = MemorySample(1, 1, 1.0)
    for real, simulated in (
        (COMPARISON, replace(COMPARISON, simulated=True)),
        (PROFILE, replace(PROFILE, simulated=True)),
        (SWEEP, replace(SWEEP, simulated=True)),
        (PARITY, replace(PARITY, device="mps (SIMULATED)")),
        (PrecisionVerdict(HALF, Gate()), PrecisionVerdict(replace(HALF, device="mps (SIMULATED)"), Gate())),
        (Evidence(device="mps"), Evidence(device="mps", simulated=True)),
        (MemoryCurve("mps", (sample,)), MemoryCurve("mps", (replace(sample, simulated=True),))),
    ):
        told = [evidence_of(report, SIGNALS) for report in (real, simulated)]
        assert [(one.simulated, one.device) for one in told] == [(False, "mps"), (True, "mps")], type(real)
    verdict = nb.verdict(replace(PARITY, device="mps (SIMULATED)"), replace(SWEEP, simulated=True))
    assert verdict.title.startswith("Verdict on mps (SIMULATED): ")
    assert not verdict.sure
