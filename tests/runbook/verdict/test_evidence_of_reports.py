"""Metrics that a verdict and a logbook read from reports. Run pytest with ``--record`` to update ``evidence.json`` and ``figures.json``."""

import contextlib
import itertools
from dataclasses import asdict, replace
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import openmed_nb as nb
from helpers import sample_reports
from openmed_nb._render.display import FAILED, NOT_APPLICABLE, OK, WARNING, Finding
from openmed_nb.devices.system_status import SystemStatus
from openmed_nb.errors import ConfigurationError
from openmed_nb.runbook.bench.fallbacks import FELL_BACK, Fallback
from openmed_nb.runbook.bench.fallbacks import RAISED_ERROR as UNSUPPORTED
from openmed_nb.runbook.bench.timing import MedianInterval, OperatorTime, PhaseTimes, Synchronization
from openmed_nb.runbook.checks.doctor import DoctorReport
from openmed_nb.runbook.checks.forecast import FALLS_BACK, Forecast, OperatorForecast
from openmed_nb.runbook.checks.loss_parity import LossParity
from openmed_nb.runbook.checks.parity_report import (
    EntityAgreement,
    GoldScore,
    GradientDifference,
    RejectionReason,
)
from openmed_nb.runbook.checks.validation import PrecisionVerdict
from openmed_nb.runbook.verdict.metrics import Evidence, extract_metrics
from openmed_nb.runbook.verdict.rules import gates
from openmed_nb.runbook.verdict.verdict import collect_evidence
from openmed_nb.training.curve import MemoryCurve, MemorySample
from openmed_nb.training.holders import TensorReferrer

LOGBOOK_SNAPSHOT = Path(__file__).with_name("figures.json")
EVIDENCE_SNAPSHOT = Path(__file__).with_name("evidence.json")
MIB = 1 << 20
PHASE_TIMES = PhaseTimes({"data": 0.002, "transfer": 0.001, "forward": 0.006, "decode": 0.001})
CPU = sample_reports.COMPARISON.devices[0]
MPS = replace(sample_reports.COMPARISON.devices[1], phase_times=PHASE_TIMES)
COMPARISON = replace(sample_reports.COMPARISON, devices=(CPU, MPS))
SWEEP = replace(sample_reports.SWEEP, knee=32)
POINTS = SWEEP.points
PARITY = replace(
    sample_reports.PARITY,
    texts=20,
    windows=22,
    spans=EntityAgreement(exact=198, moved=2),
    gold=GoldScore(100, 90, 89),
    gradients=GradientDifference(1e-5, "a.weight", 20),
)
HALF = replace(PARITY, dtype="bfloat16", gold=None, gradients=None)
REJECTED_DTYPE = PrecisionVerdict(
    replace(HALF, spans=EntityAgreement(exact=80, missing=20)),
    (RejectionReason("Only 80.", "Stay."),),
)
FORECAST = Forecast("Bert", "2.13.0", "its list", (OperatorForecast("aten::mode", FALLS_BACK, "", 1),))
SYSTEM_STATUS = SystemStatus(power_source="battery", power_mode="automatic", thermal_state="nominal")
DOCTOR = DoctorReport(
    (
        Finding("torch", OK, "2.13.0"),
        Finding("computation", OK, "right"),
        Finding("long matrix product", FAILED, "mps is wrong", "Upgrade torch.", "pytorch#177116"),
        Finding("packages", FAILED, "two do not fit", "Upgrade them."),
        Finding("memory pressure", WARNING, "warning", "Close programs."),
    )
)
FALLBACK = Fallback("aten::mode", FELL_BACK, 4)
PROFILE = replace(
    sample_reports.PROFILE,
    task="annotation",
    rows=16,
    seconds=0.01,
    phase_times=PHASE_TIMES,
    batch_tokens=32 * 128,
    synchronizations=(Synchronization(".item()", "train.py", 41, "step", "read", 1.0),),
    data_only=0.001,
    compute_only=0.008,
    operators=(),
    operators_per_step=200.0,
    launch_seconds=0.006,
)


def make_profile(**changes):
    return replace(PROFILE, **changes)


def make_sweep(*points, **changes):
    """Return the sweep with changes, and with other points if there are any."""
    return replace(SWEEP, points=points or POINTS, **changes)


def make_token_batches(tokens, length=128):
    """Return a comparison of batches with a number of tokens, and a sweep of rows of a length."""
    return replace(COMPARISON, batch_tokens=tokens), make_sweep(length=length)


def make_curve(*sizes, **changes):
    """Return a memory curve on MPS from sizes in MiB."""
    samples = [MemorySample(n, n, 1.0 * n, allocated=size * MIB) for n, size in enumerate([sizes[0], *sizes], 1)]
    return replace(MemoryCurve("mps", tuple(samples)), **changes)


def make_peak_curve(limit=None):
    samples = tuple(MemorySample(n, n, 1.0, allocated=MIB, peak=85 * MIB, recommended=100 * MIB) for n in range(1, 6))
    return MemoryCurve("mps", samples, limit=limit)


def make_losses(candidate):
    return LossParity("bundled", "mps", "float32", (1.0, 1.0), (1.0, 1.0), candidate)


def make_fallback_profile(**seconds):
    """Return a profile with a fallback and the times of operators."""
    operators = tuple(OperatorTime(f"aten::{name}", "forward", 1.0, time) for name, time in seconds.items())
    fallback = replace(FALLBACK, operator="aten::mode.values")
    return make_profile(fallbacks=(fallback,), fallbacks_per_step=2.0, operators=operators)


def make_doctor_report(*findings):
    return DoctorReport(tuple(Finding(name, status, "because", "Do it.") for name, status in findings))


FASTER = replace(MPS, device="cuda:1", speedup=MedianInterval(20.0, 21.0, 22.0, 0.96))
THREE_DEVICES = replace(COMPARISON, devices=(CPU, MPS, FASTER))
FEWER_ENTITIES = replace(HALF, spans=EntityAgreement(exact=80, missing=20))
FITTING_POINTS = POINTS[:-1]
REJECTED_REASON = RejectionReason("Too few.", "More texts.", conclusive=False)

CASES = {
    "a comparison is read for the fastest device other than the CPU": [COMPARISON],
    "training steps batch by rows": [replace(COMPARISON, task="training step")],
    "the fastest of three devices": [THREE_DEVICES],
    "without a speedup, a device other than the CPU": [
        replace(COMPARISON, devices=tuple(replace(metrics, speedup=None) for metrics in COMPARISON.devices))
    ],
    "a sweep is read for the batch size in use": [SWEEP, COMPARISON],
    "without a batch size, a sweep is read for the knee": [SWEEP],
    "a batch size between the knee and a size that does not fit": [SWEEP, Evidence(batch=48)],
    "tokens are converted to shorter rows": make_token_batches(2048, 64),
    "throughput between two sizes is interpolated": make_token_batches(3072),
    "the length of a row is not known": make_token_batches(2048, None),
    # A sweep that ended while throughput still increased can only show that a batch is too small.
    "out of time at the batch size in use": [Evidence(batch=32), make_sweep(*FITTING_POINTS, stop_code="time")],
    "out of time above a batch that is too small": [
        Evidence(batch=8),
        make_sweep(*FITTING_POINTS, stop_code="time"),
    ],
    "parity in float32": [PARITY],
    "parity of the CPU with itself is no evidence": [replace(PARITY, device="cpu")],
    "no entity differs": [replace(PARITY, spans=EntityAgreement(exact=165))],
    "parity without entities": [replace(PARITY, spans=EntityAgreement())],
    # Parity in a reduced dtype that loses entities is evidence against the dtype alone.
    "a dtype that loses entities": [FEWER_ENTITIES],
    "a dtype with NaN": [replace(HALF, non_finite_tokens=1)],
    "a rejected dtype beside parity": [REJECTED_DTYPE, PARITY],
    "an accepted dtype": [PrecisionVerdict(HALF)],
    "parity precedes a precision verdict": [
        PrecisionVerdict(replace(HALF, spans=EntityAgreement(exact=1))),
        HALF,
    ],
    "losses diverge": [make_losses((1.0, 2.0))],
    "a flat memory curve": [make_curve(*[100] * 8)],
    "the cause of a leak": [
        make_curve(*range(100, 150, 9), referrers=(TensorReferrer("losses", "list", 40, 12 * MIB, 40),))
    ],
    "peak memory below a memory limit": [make_peak_curve(0.9)],
    "a profile contains the synchronization points in user code": [PROFILE],
    "a profile with operators that fall back and fail": [
        make_profile(
            fallbacks=(FALLBACK, replace(FALLBACK, operator="aten::eig", outcome=UNSUPPORTED)), fallbacks_per_step=4.0
        )
    ],
    # Fallback times are read only if they are large, because a small fraction does not include the copies.
    "large fallback times": [make_fallback_profile(mode=0.002, addmm=0.006)],
    "simulated fallback times": [replace(make_fallback_profile(mode=0.002), simulated=True)],
    "a forecast of a fallback": [FORECAST],
    "a forecast of a training without a fallback": [replace(FORECAST, rows=()), Evidence(task="training")],
    "the doctor": [DOCTOR],
    "a device that does not compute": [
        make_doctor_report(("computation", FAILED), ("known silent errors", NOT_APPLICABLE))
    ],
    "no GPU": [make_doctor_report(("MPS", NOT_APPLICABLE), ("CUDA", NOT_APPLICABLE))],
    "the system status and the doctor": [DOCTOR, SYSTEM_STATUS],
    "evidence of the user precedes reports": [COMPARISON, Evidence(batch=4, texts_per_second=7.0)],
    "a comparison precedes a profile": [make_profile(seconds=0.04), COMPARISON],
    "the task of a custom step is not known": [make_profile(task="own step")],
    "a custom step can belong to any task": [make_profile(task="own step"), Evidence(task="training")],
    "forward passes are inference": [make_sweep(task="forward pass")],
    "forward passes can be those of a model that writes text": [
        make_sweep(task="forward pass"),
        Evidence(task="generation"),
    ],
}


def test_evidence_has_the_metrics_of_reports(as_recorded):
    evidence = {name: collect_evidence(*reports) for name, reports in CASES.items()}

    as_recorded(EVIDENCE_SNAPSHOT, evidence)


def test_logbook_metrics_match_the_snapshot(as_recorded):
    training_reports = (make_losses((1.0, 2.0)), make_curve(100, 110, 120), make_peak_curve(0.9))
    reports = (COMPARISON, SWEEP, PARITY, REJECTED_DTYPE, FORECAST, DOCTOR, PROFILE, *training_reports)
    metrics = [asdict(extract_metrics(report)) for report in reports]

    as_recorded(LOGBOOK_SNAPSHOT, metrics)


@given(st.lists(st.integers(1, 300), min_size=1, max_size=14), st.floats(0.01, 0.6))
def test_growth_of_a_growing_curve_exceeds_any_gate(sizes, gate):
    curve = replace(make_curve(*sizes), growth_threshold=gate)
    evidence = collect_evidence(curve, gates=gates(memory_growth=gate))

    if evidence["memory_verdict"] == "growing":
        assert evidence["memory_growth"] == curve.trend.growth > gate


def test_curve_uses_the_gate_of_the_verdict():
    slow = make_curve(*(100 + n for n in range(9)))

    assert collect_evidence(slow)["memory_verdict"] == "growing below the limit"
    assert nb.verdict(slow).recommendation == "measure first"
    assert nb.verdict(slow, gates=gates(memory_growth=0.05)).recommendation == "fix the leak"


@pytest.mark.real_computer
@pytest.mark.parametrize("simulate", [False, True])
def test_verdict_without_reports_knows_the_computer(simulate):
    with nb.simulated_mps() if simulate else contextlib.nullcontext():
        verdict = nb.verdict()

    only_cpu = not (simulate or torch.cuda.is_available() or torch.backends.mps.is_available())
    assert (verdict.evidence["no_gpu"] is True) == only_cpu
    assert verdict.recommendation == ("keep this device" if only_cpu else "measure first")
    assert "nb.compare(model, texts)" in verdict.reason.actions[0]


@pytest.mark.real_computer
def test_fallback_log_precedes_a_forecast():
    with nb.simulated_mps(fallback=True), nb.runbook.fallbacks() as log:
        torch.ones(3, device="mps").mode()
        for _ in range(3):
            torch.ones(3, device="mps").add(1)
    with nb.runbook.fallbacks() as unused:
        torch.ones(3)
    evidence = collect_evidence(log, replace(FORECAST, rows=()))

    assert (evidence["device"], evidence["simulated"], evidence["fallback_operators"]) == ("mps", True, ("aten::mode",))
    assert 0 < evidence["fallback_calls"] < 0.5
    assert collect_evidence(unused) == Evidence()


def test_order_of_reports_makes_no_difference():
    reports = (COMPARISON, SWEEP, PARITY, REJECTED_DTYPE, SYSTEM_STATUS, DOCTOR, FORECAST, PROFILE)
    rotated = [collect_evidence(*reports[n:], *reports[:n]) for n in range(len(reports))]
    permuted = [collect_evidence(*order) for order in itertools.permutations(reports[:4])]

    assert all(evidence == rotated[0] for evidence in rotated)
    assert all(evidence == permuted[0] for evidence in permuted)
    assert str(nb.verdict(*reports)) == str(nb.verdict(*reversed(reports)))


@pytest.mark.parametrize(
    ("reports", "fragment"),
    [
        ((3,), "int is not a report"),
        ((COMPARISON, COMPARISON), "Comparison"),
        ((SWEEP, replace(PARITY, device="cuda:0")), "cuda:0, mps"),
        ((COMPARISON, make_sweep(task="training step")), "annotation, training"),
        ((COMPARISON, Evidence(task="training")), "annotation, and not the task 'training'"),
        ((replace(COMPARISON, dtype="float16"), make_sweep(dtype="float32")), "float16, float32"),
        ((COMPARISON, replace(PARITY, model="bundled_small")), "'bundled', 'bundled_small'"),
        ((make_profile(name="Net", task="forward pass"), FORECAST), "'Bert', 'Net'"),
    ],
)
def test_inconsistent_reports_raise(reports, fragment):
    with pytest.raises(ConfigurationError, match=fragment) as error:
        nb.verdict(*reports)
    assert error.value.remedy


@pytest.mark.parametrize(
    "reports",
    [
        (COMPARISON, SWEEP, PARITY, SYSTEM_STATUS, DOCTOR),
        (make_profile(name="DistributedDataParallel", task="forward pass"), FORECAST),
    ],
)
def test_names_of_possibly_the_same_model_are_accepted(reports):
    assert collect_evidence(*reports)["device"] == "mps"


def test_arguments_precede_reports():
    evidence = collect_evidence(
        COMPARISON, make_sweep(task="training step"), Evidence(num_texts=100), task="training", num_texts=500
    )

    assert (evidence["task"], evidence["num_texts"]) == ("training", 500)
    with pytest.raises(ConfigurationError, match="annotation, and not the task 'inference'"):
        nb.verdict(COMPARISON, task="inference")


SIMULATED_PARITY = replace(PARITY, device="mps (SIMULATED)")


@pytest.mark.parametrize(
    "report",
    [
        make_profile(simulated=True),
        SIMULATED_PARITY,
        PrecisionVerdict(replace(HALF, device="mps (SIMULATED)")),
        Evidence(device="mps", simulated=True),
        MemoryCurve("mps", (MemorySample(1, 1, 1.0, simulated=True),)),
    ],
    ids=lambda report: type(report).__name__,
)
def test_one_simulated_report_makes_evidence_simulated(report):
    evidence = collect_evidence(report, SYSTEM_STATUS)

    assert (evidence["simulated"], evidence["device"]) == (True, "mps")
