"""Reports with given measurements, so that tests of findings and verdicts run no benchmark."""

from __future__ import annotations

from openmed_nb.models.records import ModelIdentity, ValidationMetrics, ValidationRecord
from openmed_nb.runbook.bench.comparison import Comparison, DeviceMetrics
from openmed_nb.runbook.bench.profile import Profile
from openmed_nb.runbook.bench.sweep import Point, SweepReport
from openmed_nb.runbook.bench.timing import MedianInterval, OperatorTime, PhaseTimes
from openmed_nb.runbook.checks.parity_report import EntityAgreement, ParityReport

MEBIBYTE = 1 << 20

COMPARISON = Comparison(
    name="bundled",
    task="annotation",
    devices=(
        DeviceMetrics("cpu", 0.04, 16, PhaseTimes({"data": 0.002, "forward": 0.038})),
        DeviceMetrics(
            "mps",
            0.01,
            16,
            PhaseTimes({"data": 0.0025, "transfer": 0.0025, "forward": 0.0025, "decode": 0.0025}),
            MedianInterval(3.8, 4.0, 4.3, 0.96),
            0.7,
        ),
    ),
    rounds=15,
    batch_tokens=16 * 128,
)

SWEEP = SweepReport(
    name="bundled",
    task="annotation",
    device="mps",
    points=(
        Point(8, 900.0, 80 * MEBIBYTE),
        Point(16, 1500.0, 160 * MEBIBYTE),
        Point(32, 1650.0, 320 * MEBIBYTE),
        Point(64, fits=False),
    ),
    knee=16,
    stop_code="out of memory",
    limit=400 * MEBIBYTE,
    length=128,
)

PROFILE = Profile(
    name="bundled",
    task="training step",
    device="mps",
    rows=32,
    steps=50,
    seconds=0.125,
    phase_times=PhaseTimes({"data": 0.005, "forward": 0.12}),
    data_only=0.004,
    compute_only=0.1,
    operators=tuple(
        OperatorTime(f"aten::{name}", "forward", 4.0, seconds)
        for name, seconds in (("addmm", 0.04), ("softmax", 0.03), ("gelu", 0.01), ("add", 0.001))
    ),
    operators_per_step=100.0,
    launch_seconds=0.01,
    created_at="2026-11-01T12:00:00Z",
)

VALIDATION_RECORD = ValidationRecord(
    ModelIdentity("mine", "w1", "s1", "t1", "bfloat16", "mps", "Apple M2 Pro", "2.13.0", "5.17.0", simulated=False),
    ValidationMetrics(50, "09b4", 900, 0, 60, 0, 0, 0, 0, None, 0.85, 1.4),
    "2026-03-01",
    {"span_agreement": 0.99},
)

PARITY = ParityReport(
    model="bundled",
    device="mps",
    dtype="float32",
    texts=60,
    texts_fingerprint="09b4",
    tokens=1000,
    windows=62,
    logit_difference=3e-6,
    label_mismatches=0,
    non_finite_tokens=0,
    spans=EntityAgreement(exact=200),
)
