"""What reports show a verdict and a logbook: ``python`` with this file writes ``figures.json`` again."""

import itertools
import json
from dataclasses import asdict, replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

import openmed_nb as nb
from openmed_nb._render.display import FAILED, NOT_APPLICABLE, OK, WARNING, Finding
from openmed_nb.errors import ConfigurationError
from openmed_nb.models.registry import BUNDLED
from openmed_nb.runbook.bench.comparison import Comparison, DeviceMetrics, Utilization
from openmed_nb.runbook.bench.profile import Profile
from openmed_nb.runbook.bench.sweep import Point, SweepReport
from openmed_nb.runbook.bench.timing import CodeLocation, Interval, OperatorTime, PhaseTimes, Synchronization
from openmed_nb.runbook.checks.doctor.report import DoctorReport
from openmed_nb.runbook.checks.operators.fallbacks import FELL_BACK, Fallback
from openmed_nb.runbook.checks.operators.fallbacks import REFUSED as MET_AN_ERROR
from openmed_nb.runbook.checks.operators.forecast import Forecast, OperatorForecast
from openmed_nb.runbook.checks.operators.table import FALLS_BACK, ModuleLocation
from openmed_nb.runbook.checks.precision.policy import AcceptanceCriteria, RejectionReason
from openmed_nb.runbook.checks.precision.report import (
    EntityAgreement,
    EntityScore,
    GradientDifference,
    LogitDifferences,
    ParityReport,
)
from openmed_nb.runbook.checks.precision.trajectory import LossParity
from openmed_nb.runbook.checks.precision.validation import PrecisionVerdict
from openmed_nb.runbook.records.signals import SystemStatus
from openmed_nb.runbook.verdict.figures import extract_metrics
from openmed_nb.runbook.verdict.gates import gates
from openmed_nb.runbook.verdict.metrics import Evidence
from openmed_nb.runbook.verdict.verdict import collect_evidence
from openmed_nb.training.curve import MemoryCurve, MemorySample
from openmed_nb.training.loader import LoaderCheck

FIGURES = Path(__file__).with_name("figures.json")
MIB = 1 << 20
SPLIT = PhaseTimes({"data": 0.002, "transfer": 0.001, "forward": 0.006, "decode": 0.001})
CPU = DeviceMetrics("cpu", 0.04, (0.039, 0.042), 16, PhaseTimes({"data": 0.002, "forward": 0.038}))
MPS = DeviceMetrics("mps", 0.01, (0.009, 0.011), 16, SPLIT, Interval(3.8, 4.0, 4.3, 0.96), Utilization(0.05, 0.75, 6))
COMPARISON = Comparison("bundled", "annotation", (CPU, MPS), 15, batch_tokens=16 * 128)
POINTS = (
    Point(8, 900.0, memory=80 * MIB),
    Point(16, 1500.0, memory=160 * MIB),
    Point(32, 1650.0, memory=320 * MIB),
    Point(64, fits=False),
)
SWEEP = SweepReport(
    "bundled", "annotation", "mps", POINTS, knee=32, stop_code="out of memory", limit=400 * MIB, length=128
)
PARITY = ParityReport(
    model="bundled",
    device="mps",
    dtype="float32",
    texts=20,
    texts_fingerprint="09b4",
    tokens=1000,
    windows=22,
    logits=LogitDifferences(3e-6),
    label_mismatches=0,
    non_finite_tokens=0,
    spans=EntityAgreement(exact=198, moved=2),
    gold=(EntityScore(100, 100, 90), EntityScore(100, 100, 89)),
    gradients=GradientDifference(1e-5, "a.weight", 20),
)
HALF = replace(PARITY, dtype="bfloat16", gold=None, gradients=None)
REFUSED = PrecisionVerdict(
    replace(HALF, spans=EntityAgreement(exact=80, missing=20)),
    AcceptanceCriteria(),
    (RejectionReason("Only 80.", "Stay."),),
)
FORECAST = Forecast(
    "Bert", "2.13.0", "its list", (OperatorForecast("aten::mode", FALLS_BACK, "inference", ModuleLocation(), 1),)
)
SIGNALS = SystemStatus(power_source="battery", power_mode="automatic", thermal_state="nominal")
DOCTOR = DoctorReport(
    (
        Finding("torch", OK, "2.13.0"),
        Finding("computation", OK, "right"),
        Finding("long matrix product", FAILED, "mps is wrong", "Upgrade torch."),
        Finding("packages", FAILED, "two do not fit", "Upgrade them."),
        Finding("memory pressure", WARNING, "warning", "Close programs."),
    )
)
FELL = Fallback("aten::mode", FELL_BACK, "forward", ModuleLocation(), 4, 0.004)
PROFILE = Profile(
    "bundled",
    "annotation",
    "mps",
    16,
    seconds=0.01,
    phase_times=SPLIT,
    batch_tokens=32 * 128,
    synchronizations=(
        Synchronization(".item()", CodeLocation("train.py", 41, "step"), 1.0),
        Synchronization(".cpu()", CodeLocation(library="transformers.pipelines"), 1.0),
        Synchronization(".to('mps')", CodeLocation("train.py", 40, "step"), 1.0, "batch"),
    ),
    traced_steps=2,
    steps=50,
    warm_up=5,
    data_only=0.001,
    compute_only=0.008,
    operators=(),
    operators_per_step=200.0,
    launch_seconds=0.006,
)


def with_profile(**changes):
    return replace(PROFILE, **changes)


def with_sweep(*points, **changes):
    """Return the sweep, with other points if there are any."""
    return replace(SWEEP, points=points or POINTS, **changes)


def in_tokens(tokens, length=128):
    """Return a comparison of texts cut by tokens, and a sweep of rows of a length."""
    return replace(COMPARISON, batch_tokens=tokens), with_sweep(length=length)


def curve(*sizes, **changes):
    """Return a memory curve of sizes in MiB, on MPS."""
    samples = [MemorySample(n, n, 1.0 * n, allocated=size * MIB) for n, size in enumerate([sizes[0], *sizes], 1)]
    return replace(MemoryCurve("mps", tuple(samples)), **changes)


def peaks(limit=None):
    samples = tuple(MemorySample(n, n, 1.0, allocated=MIB, peak=85 * MIB, recommended=100 * MIB) for n in range(1, 6))
    return MemoryCurve("mps", samples, limit=limit)


def losses(candidate):
    return LossParity("bundled", "mps", "float32", (1.0, 1.0), (1.0, 1.0), candidate)


def fallen(**seconds):
    """Return a profile with a fallback, and how long some operators took."""
    operators = tuple(OperatorTime(f"aten::{name}", "forward", 1.0, time) for name, time in seconds.items())
    return with_profile(fallbacks=(replace(FELL, operator="aten::mode.values"),), operators=operators)


def foretold(*phases, verdict="native"):
    """Return a forecast of an operator in some phases."""
    return replace(FORECAST, rows=tuple(replace(FORECAST.rows[0], phase=phase, verdict=verdict) for phase in phases))


def doctored(*findings):
    return DoctorReport(tuple(Finding(name, status, "because", "Do it.") for name, status in findings))


FASTER = replace(MPS, device="cuda:1", speedup=Interval(20.0, 21.0, 22.0, 0.96))
THREE = replace(COMPARISON, devices=(CPU, MPS, FASTER))
LOST = replace(HALF, spans=EntityAgreement(exact=80, missing=20))
STILL_RISING = POINTS[:-1]
MODE = ("aten::mode",)


@pytest.mark.parametrize(
    ("reports", "metrics"),
    [
        # A comparison: of the fastest device that is not the CPU, or of the one that other reports are of.
        (
            [COMPARISON],
            {
                "device": "mps",
                "task": "annotation",
                "speedup_low": 3.8,
                "speedup": 4.0,
                "speedup_high": 4.3,
                "utilization": 0.7,
                "data_fraction": 0.2,
                "transfer_fraction": 0.1,
                "batch": None,
                "batch_tokens": 2048,
                "texts_per_second": 1600.0,
            },
        ),
        ([replace(COMPARISON, devices=(CPU,))], {"device": "cpu", "speedup": None, "batch_tokens": 2048}),
        ([replace(COMPARISON, task="training step")], {"task": "training", "batch": 16}),
        ([THREE], {"device": "cuda:1", "speedup": 21.0}),
        ([THREE, SWEEP], {"device": "mps", "speedup": 4.0}),
        ([THREE, with_sweep(device="cpu")], {"device": "cpu", "speedup": None}),
        # A sweep: of the batch in use, or else of the knee.
        (
            [SWEEP, COMPARISON],
            {"knee_gain": 0.1, "headroom": 0.6, "knee": 32, "best_batch": 32, "out_of_memory_at": 64},
        ),
        ([SWEEP], {"knee_gain": None, "batch": None, "headroom": 0.2}),
        ([SWEEP, Evidence(batch=48)], {"knee_gain": None, "headroom": None}),
        ([with_sweep(Point(1, fits=False), knee=None)], {"out_of_memory_at": 1, "knee": None, "headroom": None}),
        ([with_sweep(POINTS[0], Point(16, 1500.0, memory=360 * MIB), knee=16)], {"headroom": 0.1}),
        # A knee that takes a hair more than nine tenths of the limit has headroom enough.
        ([with_sweep(POINTS[0], Point(16, 1500.0, memory=361 * MIB), knee=16)], {"headroom": 0.1}),
        # The tokens of annotation are so many rows of a sweep; between measured rows, on the line from one to the other.
        (in_tokens(2048), {"batch": 16, "knee_gain": 0.1}),
        (in_tokens(2048, 64), {"batch": 32, "knee_gain": 0.0}),
        (in_tokens(3072), {"batch": 24, "knee_gain": 1650 / 1575 - 1}),
        (in_tokens(100), {"batch": 1, "knee_gain": None}),
        (in_tokens(None), {"batch": None, "knee_gain": None}),
        (in_tokens(2048, None), {"batch": None, "knee_gain": None}),
        # A sweep that was cut off while throughput still rose shows no more than that a batch is too small.
        ([Evidence(batch=32), with_sweep(*STILL_RISING, stop_code="time")], {"knee_gain": None}),
        ([Evidence(batch=32), with_sweep(*STILL_RISING, stop_code="largest")], {"knee_gain": None}),
        ([Evidence(batch=32), with_sweep(*STILL_RISING)], {"knee_gain": 0.0}),
        ([Evidence(batch=32), with_sweep(*STILL_RISING, stop_code="time", knee=16)], {"knee_gain": 1500 / 1650 - 1}),
        ([Evidence(batch=8), with_sweep(*STILL_RISING, stop_code="time")], {"knee_gain": 1650 / 900 - 1}),
        # Parity: a reduced type that loses entities speaks against the type alone.
        (
            [PARITY],
            {
                "entity_agreement": 0.99,
                "refused_dtype": None,
                "recall_loss": 0.01,
                "gradients": 1e-5,
                "logits": 3e-6,
                "non_finite_tokens": 0,
            },
        ),
        ([HALF], {"entity_agreement": 0.99, "refused_dtype": None, "logits": None, "non_finite_tokens": None}),
        ([LOST], {"entity_agreement": None, "refused_dtype": "bfloat16"}),
        ([replace(HALF, non_finite_tokens=1)], {"entity_agreement": None, "refused_dtype": "bfloat16"}),
        ([replace(HALF, spans=EntityAgreement())], {"entity_agreement": None, "refused_dtype": None}),
        ([replace(PARITY, spans=EntityAgreement())], {"entity_agreement": None, "refused_dtype": None}),
        ([REFUSED], {"entity_agreement": None, "refused_dtype": "bfloat16"}),
        ([REFUSED, PARITY], {"entity_agreement": 0.99, "refused_dtype": "bfloat16"}),
        ([PrecisionVerdict(HALF, AcceptanceCriteria())], {"entity_agreement": 0.99, "refused_dtype": None}),
        (
            [
                PrecisionVerdict(
                    HALF, AcceptanceCriteria(), (RejectionReason("Too few.", "More texts.", conclusive=False),)
                )
            ],
            {"entity_agreement": 0.99, "refused_dtype": None},
        ),
        # Parity counts more than a verdict on a precision.
        (
            [PrecisionVerdict(replace(HALF, spans=EntityAgreement(exact=1)), AcceptanceCriteria()), HALF],
            {"entity_agreement": 0.99},
        ),
        # Losses that part.
        ([losses((1.0, 1.0))], {"task": "training", "device": "mps", "divergence_source": ()}),
        ([losses((1.0, 2.0))], {"divergence_source": ("from step 2",)}),
        # A memory curve.
        ([curve(*[100] * 8)], {"memory_verdict": "flat", "task": "training", "device": "mps", "memory_growth": 0.0}),
        ([curve(*[100, 180] * 4)], {"memory_verdict": "sawtooth"}),
        ([curve(100)], {"memory_verdict": "too short to tell"}),
        ([peaks()], {"headroom": 0.15}),
        ([peaks(0.9)], {"headroom": 0.06}),
        # A profile: the lines of the person that wait for a GPU, and what fell back.
        (
            [PROFILE],
            {
                "synchronizations": (".item() at train.py:41 in step",),
                "tiny_batch": True,
                "batch_tokens": 4096,
                "texts_per_second": 1600.0,
                "fallback_operators": (),
            },
        ),
        ([with_profile(device="cpu")], {"synchronizations": (), "fallback_operators": None, "fallback_calls": None}),
        ([with_profile(simulated=True)], {"tiny_batch": None}),
        ([with_profile(seconds=0.0)], {"texts_per_second": None}),
        (
            [with_profile(fallbacks=(FELL, replace(FELL, operator="aten::eig", outcome=MET_AN_ERROR)))],
            {"fallback_operators": MODE, "refused_operators": ("aten::eig",)},
        ),
        # Its times count only if they are much: a small share has no copies in it.
        (
            [fallen(mode=0.002, addmm=0.006)],
            {"fallback_operators": ("aten::mode.values",), "fallback_calls": 0.01, "fallback_time": 0.25},
        ),
        ([fallen(mode=0.0001, addmm=0.006)], {"fallback_calls": 0.01, "fallback_time": None}),
        ([fallen()], {"fallback_calls": 0.01, "fallback_time": None}),
        ([replace(fallen(mode=0.002), simulated=True)], {"fallback_time": None}),
        # A forecast: of a training, only one with a training step shows that nothing leaves MPS.
        ([FORECAST], {"fallback_operators": MODE}),
        ([replace(FORECAST, rows=())], {"fallback_operators": ()}),
        ([replace(FORECAST, simulated=True)], {"simulated": False}),
        ([foretold("inference"), Evidence(task="annotation")], {"fallback_operators": (), "refused_operators": ()}),
        ([foretold("inference"), Evidence(task="training")], {"fallback_operators": None, "refused_operators": None}),
        ([foretold("inference", "backward"), Evidence(task="training")], {"fallback_operators": ()}),
        ([FORECAST, Evidence(task="training")], {"fallback_operators": MODE}),
        # The doctor.
        (
            [DOCTOR],
            {
                "device_faults": (),
                "silent_errors": ("long matrix product",),
                "doctor_failures": ("packages",),
                "slow_conditions": (str(DOCTOR.findings[-1]),),
            },
        ),
        (
            [doctored(("computation", FAILED), ("known silent errors", NOT_APPLICABLE))],
            {"silent_errors": None, "device_faults": ("computation",)},
        ),
        ([doctored(("known silent errors", OK))], {"silent_errors": (), "doctor_failures": ()}),
        # Of two reports that show the same: one's own, the comparison, signals and ledgers count most.
        (
            [DOCTOR, SIGNALS],
            {"slow_conditions": tuple(str(one) for one in SIGNALS.findings() if one.status == WARNING)},
        ),
        ([COMPARISON, Evidence(batch=4, texts_per_second=7.0)], {"batch": 4, "texts_per_second": 7.0, "speedup": 4.0}),
        ([with_profile(seconds=0.04), COMPARISON], {"texts_per_second": 1600.0, "batch_tokens": 2048}),
        ([with_profile(seconds=0.04)], {"texts_per_second": 400.0}),
        # Nobody knows the task of a person's own step.
        ([with_profile(task="own step")], {"task": None}),
        ([with_sweep(task="forward pass")], {"task": "inference"}),
    ],
)
def test_metrics_of_reports(reports, metrics):
    evidence = collect_evidence(*reports)

    for name, value in metrics.items():
        exact = value is None or isinstance(value, (str, tuple, bool))
        assert getattr(evidence, name) == (value if exact else pytest.approx(value)), name


def kept():
    """Return what a logbook keeps of each report."""
    reports = (COMPARISON, SWEEP, PARITY, REFUSED, FORECAST, DOCTOR, PROFILE)
    trained = (losses((1.0, 2.0)), curve(100, 110, 120), peaks(0.9), LoaderCheck("cpu", 0.03, 0.01, 2, 20))
    return [asdict(extract_metrics(report)) for report in (*reports, *trained)]


def test_logbook_keeps_the_figures_of_the_snapshot():
    assert kept() == json.loads(FIGURES.read_text("utf-8"))


@pytest.mark.parametrize(
    "sizes",
    [
        [100 + 5 * n for n in range(8)],
        [1000 + 50 * n + 900 * (n % 2) for n in range(12)],
        [100] * 20 + [130, 160, 190],  # At the end alone.
        [160, 104, 110, 229, 116, 175, 166],  # In the smaller of each two alone.
        [100 + 4 * n for n in range(250)],
    ],
)
def test_growing_curve_has_the_pace_that_shows_it(sizes):
    evidence = collect_evidence(curve(*sizes))

    assert evidence.memory_verdict == "growing"
    assert evidence.memory_growth > 0.26


@given(st.lists(st.integers(1, 300), min_size=1, max_size=14), st.floats(0.01, 0.6))
def test_growth_is_always_beyond_its_gate(sizes, gate):
    evidence = collect_evidence(curve(*sizes), gates=gates(memory_growth=gate))

    assert evidence.memory_verdict != "growing" or evidence.memory_growth > gate


def test_curve_is_judged_by_the_gate_of_the_verdict():
    slow = curve(*(100 + n for n in range(9)))

    assert collect_evidence(slow).memory_verdict == "flat"
    assert nb.verdict(slow).recommendation == "measure first"
    assert nb.verdict(slow, gates=gates(memory_growth=0.05)).recommendation == "move to a remote pool"


def test_losses_that_part_speak_for_the_cpu():
    assert nb.verdict(losses((1.0, 1.0))).recommendation == "measure first"
    assert nb.verdict(losses((1.0, 2.0))).recommendation == "compute on the CPU"


@pytest.mark.real_computer
def test_ledger_counts_more_than_a_forecast():
    import torch

    with nb.simulated_mps(fallback=True), nb.runbook.fallbacks() as ledger:
        torch.ones(3, device="mps").mode()
        for _ in range(3):
            torch.ones(3, device="mps").add(1)
    with nb.runbook.fallbacks() as unused:
        torch.ones(3)
    evidence = collect_evidence(ledger, replace(FORECAST, rows=()))

    assert (evidence.device, evidence.simulated, evidence.fallback_operators) == ("mps", True, MODE)
    assert 0 < evidence.fallback_calls < 0.5
    assert collect_evidence(unused) == Evidence()


def test_order_of_reports_makes_no_difference():
    reports = (COMPARISON, SWEEP, PARITY, REFUSED, SIGNALS, DOCTOR, FORECAST, PROFILE)
    turned = [collect_evidence(*reports[n:], *reports[:n]) for n in range(len(reports))]
    permuted = [collect_evidence(*some) for some in itertools.permutations(reports[:4])]

    assert all(evidence == turned[0] for evidence in turned)
    assert all(evidence == permuted[0] for evidence in permuted)
    assert str(nb.verdict(*reports)) == str(nb.verdict(*reversed(reports)))


@pytest.mark.parametrize(
    ("reports", "words"),
    [
        ((3,), "int is not a report"),
        (([COMPARISON],), "list is not a report"),
        ((COMPARISON, COMPARISON), "Comparison"),
        ((SWEEP, replace(PARITY, device="cuda:0")), "cuda:0, mps"),
        ((COMPARISON, with_sweep(device="cuda")), "cpu, mps"),
        ((COMPARISON, with_sweep(task="training step")), "annotation, training"),
        ((replace(COMPARISON, dtype="float16"), with_sweep(dtype="float32")), "float16, float32"),
        ((COMPARISON, replace(PARITY, model="bundled_small")), "'bundled' and 'bundled_small'"),
        ((COMPARISON, replace(REFUSED, parity=replace(HALF, model="some/model"))), "'bundled' and 'some/model'"),
        ((with_profile(name="Net", task="forward pass"), FORECAST), "'Bert' and 'Net'"),
    ],
)
def test_reports_that_do_not_go_together(reports, words):
    with pytest.raises(ConfigurationError, match=words) as error:
        nb.verdict(*reports)
    assert error.value.remedy


@pytest.mark.parametrize(
    ("reports", "models"),
    [
        ((COMPARISON, SWEEP, PARITY, SIGNALS, DOCTOR), ("bundled",)),
        ((COMPARISON, FORECAST), ("Bert", "bundled")),
        ((with_profile(name="train_step", task="own step"), FORECAST, COMPARISON), ("Bert", "bundled", "train_step")),
        (
            (with_profile(name="DistributedDataParallel", task="forward pass"), FORECAST),
            ("Bert", "DistributedDataParallel"),
        ),
        ((SWEEP, replace(PARITY, model=str(BUNDLED["bundled"]))), (str(BUNDLED["bundled"]), "bundled")),
        ((SIGNALS,), None),
    ],
)
def test_names_that_may_be_of_one_model_go_together(reports, models):
    assert collect_evidence(*reports).models == models


def test_arguments_count_more_than_reports():
    evidence = collect_evidence(
        COMPARISON, with_sweep(task="training step"), Evidence(num_texts=100), task="training", num_texts=500
    )

    assert (evidence.task, evidence.num_texts) == ("training", 500)
    with pytest.raises(ConfigurationError, match="dance"):
        nb.verdict(task="dance")


def test_reports_of_this_computer_are_read():
    verdict = nb.verdict(nb.system_status(), nb.runbook.forecast("bundled_small", training=False))

    assert verdict.evidence.fallback_operators == ()
    assert verdict.evidence.slow_conditions is not None


SIMULATED_PARITY = replace(PARITY, device="mps (SIMULATED)")


@pytest.mark.parametrize(
    "report",
    [
        replace(COMPARISON, simulated=True),
        with_profile(simulated=True),
        with_sweep(simulated=True),
        SIMULATED_PARITY,
        PrecisionVerdict(replace(HALF, device="mps (SIMULATED)"), AcceptanceCriteria()),
        Evidence(device="mps", simulated=True),
        MemoryCurve("mps", (MemorySample(1, 1, 1.0, simulated=True),)),
    ],
    ids=lambda report: type(report).__name__,
)
def test_one_simulated_report_is_enough(report):
    evidence = collect_evidence(report, SIGNALS)

    assert (evidence.simulated, evidence.device) == (True, "mps")


def test_reports_of_the_simulation_are_of_one_device():
    verdict = nb.verdict(SIMULATED_PARITY, with_sweep(simulated=True))

    assert verdict.title.startswith("Verdict on mps (SIMULATED): ")


if __name__ == "__main__":
    FIGURES.write_text(json.dumps(kept(), indent=1) + "\n", "utf-8")
