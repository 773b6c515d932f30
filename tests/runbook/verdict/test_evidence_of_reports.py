"""What reports tell a verdict: the figures of each kind, of one device and one task, in whatever order they come."""

from __future__ import annotations

import itertools
import re
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

import openmed_nb as nb
from openmed_nb.display import FAILED, NOT_APPLICABLE, OK, WARNING, Finding
from openmed_nb.errors import ConfigurationError
from openmed_nb.models.certificates import Gate, GateRefusal
from openmed_nb.models.registry import BUNDLED
from openmed_nb.runbook.comparison import Comparison, DeviceFigures, Utilisation
from openmed_nb.runbook.doctor.report import DoctorReport
from openmed_nb.runbook.measure.timing import Interval
from openmed_nb.runbook.measure.workloads import Split
from openmed_nb.runbook.operators.calls import ModulePlace
from openmed_nb.runbook.operators.fallbacks import FELL_BACK, Fallback
from openmed_nb.runbook.operators.fallbacks import REFUSED as MET_AN_ERROR
from openmed_nb.runbook.operators.forecast import Forecast, OperatorForecast
from openmed_nb.runbook.operators.table import FALLS_BACK
from openmed_nb.runbook.precision.gate import PrecisionVerdict
from openmed_nb.runbook.precision.parity import Differences, GradientDifference, ParityReport
from openmed_nb.runbook.precision.spans import Score, Spans
from openmed_nb.runbook.profile import OperatorTime, Profile
from openmed_nb.runbook.profile_watch import CodePlace, Synchronisation
from openmed_nb.runbook.signals.values import Signals
from openmed_nb.runbook.sweep import SweepReport
from openmed_nb.runbook.sweep_search import Point
from openmed_nb.runbook.verdict.evidence import Evidence, evidence_of
from openmed_nb.runbook.verdict.reference import gates
from openmed_nb.training.curve import MemoryCurve, MemorySample

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
FELL = Fallback("aten::mode", FELL_BACK, "forward", ModulePlace(), 4, 0.004)
PROFILE = Profile(
    "bundled",
    "annotation",
    "mps",
    16,
    seconds=0.01,
    split=SPLIT,
    batch_tokens=32 * 128,
    synchronisations=(OWN_LINE, IN_LIBRARY),
    watched=2,
    **WATCHED,
)


def curve(sizes, **changes):
    """Return a memory curve of sizes in MiB, on MPS."""
    samples = [MemorySample(n, n, 1.0 * n, allocated=size * MIB) for n, size in enumerate([sizes[0], *sizes], 1)]
    return replace(MemoryCurve("mps", tuple(samples)), **changes)


def test_comparison():
    """A comparison tells of the fastest device that is not the CPU: speed-up, utilisation, shares, batch and speed."""
    evidence = evidence_of(COMPARISON)

    assert (evidence.device, evidence.task) == ("mps", "annotation")
    assert (evidence.speed_up_low, evidence.speed_up, evidence.speed_up_high) == (3.8, 4.0, 4.3)
    assert evidence.utilisation == pytest.approx(0.7)
    assert (evidence.data_share, evidence.transfer_share) == (pytest.approx(0.2), pytest.approx(0.1))
    assert (evidence.batch, evidence.batch_tokens, evidence.texts_per_second) == (None, 2048, 1600.0)


def test_comparison_of_the_cpu_alone():
    """A comparison with nothing to compare with tells where the time goes, and no speed-up."""
    evidence = evidence_of(replace(COMPARISON, devices=(CPU,)))

    assert (evidence.device, evidence.speed_up, evidence.batch_tokens) == ("cpu", None, 2048)


def test_comparison_of_several_devices():
    """Of several devices that one counts which the other reports are of."""
    cuda = replace(MPS, device="cuda:1", speed_up=Interval(20.0, 21.0, 22.0, 0.96))
    both = replace(COMPARISON, devices=(CPU, MPS, cuda))

    assert evidence_of(both).device == "cuda:1"
    assert evidence_of(both, SWEEP).speed_up == 4.0
    assert evidence_of(both, replace(SWEEP, device="cpu")).speed_up is None


def test_sweep_at_the_batch_in_use():
    """A sweep tells how much is gained at the knee over the batch that a comparison used, and what that leaves free."""
    evidence = evidence_of(COMPARISON, SWEEP)

    assert evidence.knee_gain == pytest.approx(0.1)
    assert evidence.headroom == pytest.approx(0.6)
    assert (evidence.knee, evidence.best_batch, evidence.out_of_memory_at) == (32, 32, 64)


@pytest.mark.parametrize(
    ("tokens", "length", "batch", "gain"),
    [(2048, 128, 16, 0.1), (2048, 64, 32, 0.0), (100, 128, 1, None), (None, 128, None, None), (2048, None, None, None)],
)
def test_tokens_and_rows(tokens: int | None, length: int | None, batch: int | None, gain: float | None):
    """The texts that a step annotates are no rows of a sweep: tokens tell how many such rows a batch has, or nothing does."""
    evidence = evidence_of(replace(COMPARISON, batch_tokens=tokens), replace(SWEEP, length=length))

    assert (evidence.batch, evidence.knee_gain) == (batch, gain if gain is None else pytest.approx(gain))


def test_rows_of_other_tasks():
    """The rows of a training step are those of a sweep."""
    training = replace(COMPARISON, task="training step", batch_tokens=None)

    assert evidence_of(training, replace(SWEEP, task="training step")).knee_gain == pytest.approx(0.1)


def test_knee_of_the_sweep_keeps_its_headroom():
    """A knee that takes a hair more than the nine tenths of the limit that a sweep may take has headroom enough."""
    points = (Point(8, 900.0, memory=80 * MIB), Point(16, 1500.0, memory=361 * MIB))
    at_knee = replace(SWEEP, points=points, knee=16)

    assert evidence_of(replace(at_knee, points=(points[0], replace(points[1], memory=360 * MIB)))).headroom == 0.1
    assert "headroom" not in str(nb.verdict(COMPARISON, at_knee, PARITY).to_dict()["reasons"])


def test_sweep_alone():
    """A sweep alone tells the memory at its knee, and not what another batch would gain."""
    evidence = evidence_of(SWEEP)

    assert (evidence.knee_gain, evidence.batch) == (None, None)
    assert evidence.headroom == pytest.approx(0.2)


@pytest.mark.parametrize(
    ("stopped", "knee", "gain"),
    [("time", 32, None), ("largest", 32, None), ("out of memory", 32, 0.0), ("time", 16, -0.09)],
)
def test_sweep_that_was_cut_off(stopped: str, knee: int, gain: float | None):
    """Where a sweep ended for want of time while throughput still rose, larger batches may be faster, and nobody knows."""
    found = evidence_of(Evidence(batch=32), replace(SWEEP, points=POINTS[:-1], stopped=stopped, knee=knee))

    assert found.knee_gain == (gain if gain is None else pytest.approx(gain, abs=0.01))


def test_cut_off_sweep_that_tells_enough():
    """A sweep that was cut off still tells that the batch in use is too small."""
    found = evidence_of(Evidence(batch=8), replace(SWEEP, points=POINTS[:-1], stopped="time"))

    assert found.knee_gain > 0.1


def test_sweep_that_did_not_come_so_far():
    """Of a batch beyond what a sweep measured nothing is told."""
    evidence = evidence_of(SWEEP, Evidence(batch=48))

    assert (evidence.knee_gain, evidence.headroom) == (None, None)


def test_sweep_in_which_nothing_fits():
    """A sweep in which not one row fits tells just that."""
    evidence = evidence_of(replace(SWEEP, points=(Point(1, fits=False),), knee=None))

    assert (evidence.out_of_memory_at, evidence.knee, evidence.headroom) == (1, None, None)


def test_parity():
    """Parity in float32 tells entities, logits, recall and gradients."""
    evidence = evidence_of(PARITY)

    assert (evidence.entity_agreement, evidence.logits, evidence.not_numbers) == (0.99, 3e-6, 0)
    assert (evidence.recall_loss, evidence.gradients) == (pytest.approx(0.01), 1e-5)


@pytest.mark.parametrize(
    ("report", "agreement", "refused"),
    [
        (HALF, 0.99, None),
        (replace(HALF, spans=Spans(exact=80, missing=20)), None, "bfloat16"),
        (replace(HALF, spans=Spans()), None, None),
        (replace(PARITY, spans=Spans()), None, None),
        (REFUSED, None, "bfloat16"),
        (PrecisionVerdict(HALF, Gate()), 0.99, None),
        (PrecisionVerdict(HALF, Gate(), (GateRefusal("Too few.", "More texts.", against=False),)), 0.99, None),
    ],
)
def test_reduced_types(report: object, agreement: float | None, refused: str | None):
    """A reduced type that keeps the entities shows that the device does; one that loses them speaks against the type alone."""
    evidence = evidence_of(report)

    assert (evidence.entity_agreement, evidence.refused_dtype) == (agreement, refused)


def test_parity_beside_the_precision_gate():
    """Where both are passed, entities are those of float32, and the refused type is named."""
    evidence = evidence_of(REFUSED, PARITY)

    assert (evidence.entity_agreement, evidence.refused_dtype) == (0.99, "bfloat16")


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
def test_memory_curve(sizes: list[int], verdict: str, beyond: bool | None):
    """A curve tells its verdict, and of one that grows the pace that shows it, which is beyond the gate."""
    evidence = evidence_of(curve(sizes))

    assert (evidence.memory_verdict, evidence.task, evidence.device) == (verdict, "training", "mps")
    assert beyond is None or (evidence.memory_growth > 0.26) == beyond


@given(st.lists(st.integers(1, 300), min_size=1, max_size=14), st.floats(0.01, 0.6))
def test_growth_is_always_beyond_its_gate(sizes: list[int], gate: float):
    """Whatever a curve is like, if it grows by some gate then the growth that is told is beyond that gate."""
    evidence = evidence_of(curve(sizes), gates=gates(memory_growth=gate))

    assert evidence.memory_verdict != "growing" or evidence.memory_growth > gate


def test_memory_curve_under_another_gate():
    """A curve is judged by the gate of the verdict, whichever it was drawn with."""
    slow = curve([100 + n for n in range(9)])

    assert evidence_of(slow).memory_verdict == "flat"
    assert evidence_of(slow, gates=gates(memory_growth=0.05)).memory_verdict == "growing"
    assert nb.verdict(slow).recommendation == "measure first"
    assert nb.verdict(slow, gates=nb.gates(memory_growth=0.05)).recommendation == "move to a remote pool"


def test_memory_curve_with_peaks():
    """A curve that knows its peaks tells what stayed free of the limit."""
    samples = tuple(MemorySample(n, n, 1.0, allocated=MIB, peak=85 * MIB, recommended=100 * MIB) for n in range(1, 6))

    assert evidence_of(MemoryCurve("mps", samples, limit=0.9)).headroom == 0.06
    assert evidence_of(MemoryCurve("mps", samples)).headroom == 0.15


def test_profile():
    """A profile tells which lines of the person wait for the device, and its phases where no comparison does."""
    evidence = evidence_of(PROFILE)

    assert evidence.synchronisations == (".item() at train.py:41 in step",)
    assert (evidence.tiny_batch, evidence.batch_tokens, evidence.texts_per_second) == (True, 4096, 1600.0)
    assert evidence.fallback_operators == ()
    assert evidence_of(PROFILE, COMPARISON).batch_tokens == 2048


@pytest.mark.parametrize(
    ("seconds", "share"),
    [
        ({"aten::mode": 0.002, "aten::addmm": 0.006}, 0.25),
        ({"aten::mode": 0.0001, "aten::addmm": 0.006}, None),
        ({}, None),
    ],
)
def test_profile_with_fallbacks(seconds: dict, share: float | None):
    """A profile tells what fell back, and its share of the profiled time where that is much: a small one has no copies in it."""
    operators = tuple(OperatorTime(name, "forward", 1.0, time) for name, time in seconds.items())
    fell = replace(FELL, operator="aten::mode.values")
    evidence = evidence_of(replace(PROFILE, fallbacks=(fell,), operators=operators))
    simulated = evidence_of(replace(PROFILE, fallbacks=(fell,), operators=operators, simulated=True))

    assert (evidence.fallback_operators, evidence.fallback_calls) == (("aten::mode.values",), 0.01)
    assert (evidence.fallback_time, simulated.fallback_time, simulated.tiny_batch) == (share, None, None)


def test_profile_with_refused_operators():
    """What met an error did not fall back."""
    evidence = evidence_of(
        replace(PROFILE, fallbacks=(FELL, replace(FELL, operator="aten::eig", outcome=MET_AN_ERROR)))
    )

    assert (evidence.fallback_operators, evidence.refused_operators) == (("aten::mode",), ("aten::eig",))


def test_profile_on_the_cpu():
    """On the CPU nothing waits and nothing falls back."""
    evidence = evidence_of(replace(PROFILE, device="cpu"))

    assert (evidence.synchronisations, evidence.fallback_operators) == ((), None)


def test_forecast():
    """A forecast tells what would leave MPS, and that nothing does."""
    assert evidence_of(FORECAST).fallback_operators == ("aten::mode",)
    assert evidence_of(replace(FORECAST, rows=())).fallback_operators == ()
    assert evidence_of(replace(FORECAST, simulated=True)).simulated is False


@pytest.mark.real_computer
def test_ledger():
    """A ledger tells what really fell back and how often, which counts more than a forecast; its device is MPS."""
    import torch

    with nb.simulated_mps(fallback=True), nb.fallbacks() as ledger:
        torch.ones(3, device="mps").mode()
        for _ in range(3):
            torch.ones(3, device="mps").add(1)
    with nb.fallbacks() as unused:
        torch.ones(3)
    evidence = evidence_of(ledger, replace(FORECAST, rows=()))

    assert (evidence.device, evidence.simulated, evidence.fallback_operators) == ("mps", True, ("aten::mode",))
    assert 0 < evidence.fallback_calls < 0.5
    assert evidence_of(unused) == Evidence()


def test_signals_and_doctor():
    """Signals tell the states that spoil times, which count more than the doctor's; the doctor tells what failed."""
    evidence = evidence_of(DOCTOR)

    assert [state.split(",")[0] for state in evidence.states] == ["memory pressure"]
    assert (evidence.device_faults, evidence.silent_errors) == ((), ("long matrix product",))
    assert evidence.doctor_failures == ("packages",)
    assert [state.split(",")[0] for state in evidence_of(DOCTOR, SIGNALS).states] == ["power"]


def test_doctor_who_probed_nothing():
    """Without probes it is not known whether there are silent errors; a failed computation is a fault of the device."""
    nothing = Finding("known silent errors", NOT_APPLICABLE, "no device is in force")
    evidence = evidence_of(DoctorReport((Finding("computation", FAILED, "mps fails"), nothing)))

    assert (evidence.silent_errors, evidence.device_faults) == (None, ("computation",))


def test_own_figures_count_most():
    """Figures that a person passes beside reports replace theirs."""
    evidence = evidence_of(COMPARISON, Evidence(batch=4, texts_to_do=100), texts=500)

    assert (evidence.batch, evidence.texts_to_do, evidence.speed_up) == (4, 500, 4.0)


def test_order_makes_no_difference():
    """Whatever the order of the reports is, the verdict is the same."""
    reports = (COMPARISON, SWEEP, PARITY, REFUSED, SIGNALS, DOCTOR, FORECAST, PROFILE)
    turned = [reports[n:] + reports[:n] for n in range(len(reports))]
    found = [evidence_of(*some) for some in (*turned, *itertools.permutations(reports[:4]))]

    assert all(evidence == found[0] for evidence in found[: len(turned)])
    assert all(evidence == found[-1] for evidence in found[len(turned) :])
    assert str(nb.verdict(*reports)) == str(nb.verdict(*reversed(reports)))


@pytest.mark.parametrize(
    ("reports", "words"),
    [
        ((3,), "int is no report"),
        (([COMPARISON],), "list is no report"),
        ((COMPARISON, COMPARISON), "two reports of one kind: Comparison"),
        ((SWEEP, replace(PARITY, device="cuda:0")), "several devices: cuda:0, mps"),
        ((COMPARISON, replace(SWEEP, device="cuda")), "was not compared"),
        ((COMPARISON, replace(SWEEP, task="training step")), "several tasks: annotation, training"),
        ((replace(COMPARISON, dtype="float16"), replace(SWEEP, dtype="float32")), "several types: float16, float32"),
        ((COMPARISON, replace(PARITY, model="bundled_small")), "different models: 'bundled' and 'bundled_small'"),
        ((COMPARISON, replace(REFUSED, parity=replace(HALF, model="some/model"))), "'bundled' and 'some/model'"),
        ((replace(PROFILE, name="Net", task="forward pass"), FORECAST), "different models: 'Bert' and 'Net'"),
    ],
)
def test_reports_that_do_not_go_together(reports: tuple, words: str):
    """What is no report, comes twice, or is of another device or task gets a clear error."""
    with pytest.raises(ConfigurationError, match=words):
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
def test_names_of_one_model(reports: tuple, models: tuple | None):
    """Names that may be of one model, such as a name and a class, go together, with a caution that names them."""
    verdict = nb.verdict(*reports)

    assert verdict.evidence.models == models
    assert any("make sure that it is one" in one for one in verdict.cautions) == (len(models or ()) > 1)


def test_task():
    """What a person says of the task counts most; of a person's own step nobody knows it."""
    assert evidence_of(COMPARISON, replace(SWEEP, task="training step"), task="training").task == "training"
    assert evidence_of(replace(PROFILE, task="own step")).task is None
    assert evidence_of(replace(SWEEP, task="forward pass")).task == "inference"
    with pytest.raises(ConfigurationError, match="'dance' is nothing"):
        nb.verdict(task="dance")


def test_simulated_reports():
    """One report of the simulated device makes the verdict one of the logic alone; its mark is no part of the device."""
    verdict = nb.verdict(replace(PARITY, device="mps (SIMULATED)"), replace(SWEEP, simulated=True))

    assert verdict.title.startswith("Verdict on mps (SIMULATED): ")
    assert not verdict.sure


def test_real_reports_of_the_cpu():
    """What the functions of the toolkit return can be read as it is."""
    verdict = nb.verdict(nb.signals(), nb.forecast("bundled_small", training=False))

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


def test_speed_of_the_first_report_that_tells_it():
    """Of what several reports tell, that of the comparison counts before the profile's, and figures of one's own before both."""
    slower = replace(COMPARISON, devices=(CPU, replace(MPS, seconds=0.02)))

    assert evidence_of(PROFILE, slower).texts_per_second == 800.0
    assert evidence_of(replace(PROFILE, seconds=0.04), COMPARISON).texts_per_second == 1600.0
    assert evidence_of(replace(PROFILE, seconds=0.04)).texts_per_second == 400.0
    assert evidence_of(replace(PROFILE, seconds=0.0)).texts_per_second is None
    assert evidence_of(COMPARISON, Evidence(texts_per_second=7.0)).texts_per_second == 7.0


def test_words_of_each_report():
    """Other remedies stand in errors: which reports there are, that of one kind one is passed, and of one model, device, type and task."""
    for reports, remedy in (
        ((3,), "Pass what nb.compare, nb.sweep, nb.parity and the others return."),
        ((SWEEP, SWEEP), "Pass one of each, of the same model on the same device."),
        ((SWEEP, replace(PARITY, device="cuda:0")), "Pass reports of one device."),
        ((COMPARISON, replace(PARITY, model="bundled_small")), "Pass reports of one model, by one name."),
        ((replace(COMPARISON, dtype="float16"), replace(SWEEP, dtype="float32")), "Pass reports of one type."),
        ((COMPARISON, replace(SWEEP, task="training step")), "Pass reports of one task, or say which with task=."),
    ):
        with pytest.raises(ConfigurationError, match=re.escape(remedy) + "$"):
            nb.verdict(*reports)
