"""Metrics of a device: their labels and units, their gates, and how they are read from reports.

``metrics.json`` declares each metric and its gate once. :class:`Evidence` maps their names to values, and each field of
:class:`Thresholds` is the threshold of the metric with that name. ``read_report`` reads the values of a report for a verdict
and for a logbook.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from enum import IntEnum
from functools import singledispatch
from pathlib import Path
from typing import Any, Literal, NamedTuple

from ..._render.display import (
    FAILED,
    NOT_APPLICABLE,
    OK,
    SIMULATED_SUFFIX,
    WARNING,
    Finding,
    format_percent,
)
from ..._utils.plain import Count, Size
from ..._utils.text import short_type_name
from ..._utils.validation import check_number, is_finite_number
from ...devices.registry import get_device
from ...devices.request import normalize_device, sanitize_path
from ...devices.system_status import CONDITIONS, LOAD, SystemStatus
from ...errors import ConfigurationError
from ...training.curve import ADVICE, GROWTH_EPOCHS, GROWTH_THRESHOLD, MIN_STEADY_EPOCHS, MemoryCurve
from ..bench.comparison import MIN_SPEEDUP_GAIN, SECONDS_PER_HOUR, Comparison, DeviceMetrics
from ..bench.fallbacks import FELL_BACK, RAISED_ERROR, Fallback, FallbackLog
from ..bench.profile import SYNCHRONIZATION, TINY_BATCH, Profile
from ..bench.sweep import (
    HEADROOM_FRACTION,
    MIN_KNEE_GAIN,
    Point,
    SweepReport,
    select_fitting,
)
from ..bench.timing import BUSY, MAX_DATA_FRACTION
from ..bench.workloads import ANNOTATION, TRAINING_STEP
from ..checks.doctor import DoctorReport
from ..checks.doctor_checks import COMPUTATION, GPU_CHECKS, REQUIRED_DTYPES, SILENT_ERRORS
from ..checks.forecast import Forecast
from ..checks.loss_parity import LossParity
from ..checks.parity_report import MAX_RECALL_LOSS, MIN_SPAN_AGREEMENT, TOLERANCES, ParityReport
from ..checks.validation import PrecisionVerdict

INFERENCE = "inference"
TRAINING = "training"
GENERATION = "generation"
# Supported uses of a model: finding entities, forward passes of a custom module, training, and generating text.
TASKS = (ANNOTATION, INFERENCE, TRAINING, GENERATION)

# Values of metrics by name. A logbook stores only those that are numbers.
Values = dict[str, Any]

Unit = Literal["fraction", "difference", "hours", "ratio", "rate", "count", "text", "names", "phases", "boolean"]
SUFFIXES: Mapping[Unit, str] = {"ratio": "x", "rate": " per second", "hours": " hours"}


@dataclass(frozen=True)
class Run:
    """Workload of a run, as specified by the user or reported by a report.

    Attributes:
        task: Task of a step, such as ``annotation``.
        batch_size: Number of rows per batch.
        length: Number of tokens per row.
        workers: Number of loader processes.
        peak_memory_bytes: Largest peak memory in a report, in bytes.
        dtype: Data type of the model.
        row_shape: Shape of a row that is not a text, such as ``3x224x224``.
        checkpointed: Names of the modules with activation checkpointing.
        accumulation: Number of batches per optimizer step.
        autocast: Autocast dtype of a training.
        batch_tokens: Maximum number of tokens per batch of an annotation, whose batches have no fixed number of rows.
    """

    task: str | None = None
    batch_size: Size | None = None
    length: Size | None = None
    workers: Count | None = None
    peak_memory_bytes: Count | None = None
    dtype: str | None = None
    row_shape: str | None = None
    checkpointed: str | None = None
    accumulation: Size | None = None
    autocast: str | None = None
    batch_tokens: Size | None = None


@dataclass(frozen=True)
class ReportMetrics:
    """Metrics of a report. The texts of the report are not stored.

    Attributes:
        report: Kind of the report.
        subject: Name of the measured model or function.
        device: Device of the measurement.
        simulated: Whether the device was simulated. Such metrics do not represent real hardware.
        values: Metrics by name. Each name contains the unit.
        run: Workload of the report. Metrics of different workloads are not compared.
    """

    report: str
    subject: str
    device: str | None
    simulated: bool
    values: dict[str, float]
    run: Run = field(default_factory=Run)

    @property
    def key(self) -> tuple[str, str, str | None]:
        """Report, subject and device, which identify the metrics."""
        return self.report, self.subject, self.device

    @property
    def canonical_device(self) -> str | None:
        """Normalized device name, without the suffix of simulated devices."""
        return normalize_device(self.device.removesuffix(SIMULATED_SUFFIX)) if self.device else None


def finite_numbers(values: Mapping[str, object]) -> dict[str, float]:
    """Return the values that are finite numbers. A bool is not a number.

    Example:
        >>> finite_numbers({"rows": 8, "reason": "a text", "gain": float("nan"), "exact": True})
        {'rows': 8}
    """
    return {name: value for name, value in values.items() if is_finite_number(value)}


class Area(IntEnum):
    """Area of a recommendation, in order of precedence: incorrect results come before all other areas."""

    CORRECTNESS, MEMORY, DATA, BATCH, FALLBACKS, SPEED = range(6)


@dataclass(frozen=True)
class Gate:
    """Description of a threshold.

    Attributes:
        description: What the threshold limits.
        reason: Reason for the default threshold, which is a choice of this toolkit unless the reason names another source.
        maximum: Largest threshold that can be set.
        is_minimum: Whether the metric must reach the threshold. If false, the metric must not exceed it.
    """

    description: str
    reason: str
    maximum: float = 1.0
    is_minimum: bool = False


class Metric(NamedTuple):
    """Label and unit of a metric, a note about its value, and the arguments of its :class:`Gate`, if it has one."""

    label: str
    unit: Unit
    note: str = ""
    gate: Mapping[str, Any] = {}


_DECLARATIONS = (
    Path(__file__)
    .with_name("metrics.json")
    .read_text("utf-8")
    .replace("{GROWTH_EPOCHS}", str(GROWTH_EPOCHS))
    .replace("{MIN_KNEE_GAIN}", format_percent(MIN_KNEE_GAIN))
)
METRICS = {name: Metric(**values) for name, values in json.loads(_DECLARATIONS).items()}


def format_value(unit: Unit, value: Any) -> str:
    """Return a value as text, with three significant digits: ``22%``, ``3.46x``, ``1,200``, ``none``."""
    text = str(value)
    if unit == "boolean":
        text = "yes" if value else "no"
    elif unit == "names":
        text = ", ".join(value) or "none"
    elif unit == "phases":
        text = ", ".join(f"{name} {format_value('fraction', fraction)}" for name, fraction in value.items())
    elif unit == "count":
        text = f"{value:,}" if value else "none"
    elif unit == "difference":
        text = f"{value:.3g}"
    elif unit == "fraction":
        text = format_percent(_round(value), ",g")
    elif unit == "hours" and value == 1:
        text = "1 hour"
    elif unit == "hours" and value < 1:
        text = f"{_round(60 * value):,g} minutes" if 60 * value >= 1 else f"{_round(3600 * value):,g} seconds"
    elif unit in SUFFIXES:
        text = f"{_round(value):,g}{SUFFIXES[unit]}"
    return text


def _round(value: float) -> float:
    """Return a number with three significant digits."""
    return float(f"{value:.3g}")


class Evidence(Values):
    """Values of metrics by name; ``None`` for a metric that was not measured, which is never guessed.

    The names are those of ``METRICS``. Fractions are in [0, 1].

    Example:
        >>> evidence = Evidence(device="mps", task="annotation", texts_per_second=50.0, num_texts=360_000)
        >>> evidence["hours"], evidence["speedup"]
        (2.0, None)
    """

    def __init__(self, **values: Any) -> None:
        super().__init__((name, value) for name, value in values.items() if value is not None)

    def __missing__(self, name: str) -> Any:
        """Return a metric that is derived from others, or ``None`` if it was not measured."""
        fractions = self.get("phase_fractions", {})
        derived = {
            **dict.fromkeys(METRICS),
            "data_fraction": fractions.get("data"),
            "transfer_fraction": fractions.get("transfer"),
        }
        if self.get("texts_per_second") and "num_texts" in self:
            derived["hours"] = self["num_texts"] / self["texts_per_second"] / SECONDS_PER_HOUR
        return derived[name]

    @property
    def device_type(self) -> str | None:
        """Type of the device: ``"mps"``, ``"cuda"`` or ``"cpu"``."""
        return get_device(self["device"]).type if self["device"] else None


@dataclass(frozen=True)
class Thresholds:
    """Thresholds of a verdict; fractions are in [0, 1]: 0.22 is 22%.

    Raises:
        ConfigurationError: If a threshold is out of range.
    """

    speedup: float = MIN_SPEEDUP_GAIN
    utilization: float = 0.18
    entity_agreement: float = MIN_SPAN_AGREEMENT
    recall_loss: float = MAX_RECALL_LOSS
    logits: float = TOLERANCES["float32"].logits or 0.0
    gradients: float = TOLERANCES["float32"].gradients or 0.0
    memory_growth: float = GROWTH_THRESHOLD
    headroom: float = HEADROOM_FRACTION
    data_fraction: float = MAX_DATA_FRACTION
    transfer_fraction: float = 0.25
    knee_gain: float = 0.1
    fallback_time: float = 0.05
    fallback_calls: float = 0.01
    hours: float = 24.0

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            check_number(name, value, GATES[name].maximum, example=f"{getattr(Thresholds, name):g}")

    def format_values(self) -> dict[str, str]:
        """Return the formatted thresholds by name; that of a speedup is the additional fraction of speed."""
        return {
            name: format_value("fraction" if name == "speedup" else METRICS[name].unit, value)
            for name, value in vars(self).items()
        }

    @property
    def changes(self) -> tuple[str, ...]:
        """One sentence for each threshold that differs from its default."""
        defaults = Thresholds().format_values()
        values = self.format_values()
        return tuple(
            f"Gate changed: {name} from {defaults[name]} to {values[name]}."
            for name, value in vars(self).items()
            if value != getattr(Thresholds, name)
        )


GATES: dict[str, Gate] = {gate.name: Gate(**METRICS[gate.name].gate) for gate in fields(Thresholds)}


@dataclass(frozen=True)
class Case:
    """Evidence, such as the metrics that are known before a report is read, and the gates of its verdict."""

    evidence: Evidence = field(default_factory=Evidence)
    gates: Thresholds = field(default_factory=Thresholds)


def extract_metrics(report: Any) -> ReportMetrics:
    """Return the metrics that a logbook stores for a report; texts are never stored.

    Raises:
        ConfigurationError: If the object is not a report for a logbook.

    Example:
        >>> extract_metrics(SweepReport("mine", "annotation", "cpu", (), workers=2)).run.workers
        2
    """
    metrics = read_report(report, Case())
    return replace(metrics, values=_select_numbers(metrics.values))


def _select_numbers(values: Mapping[str, Any]) -> dict[str, float]:
    """Return the numbers among values, the fraction of each phase, and the number of names, which may be private."""
    phases = (values.get("phase_fractions") or {}).items()
    fractions = {f"{phase}_fraction": fraction for phase, fraction in phases}
    counts = {name: len(value) for name, value in values.items() if isinstance(value, tuple)}
    return finite_numbers({**values, **fractions, **counts})


@singledispatch
def read_report(report: Any, _case: Case) -> ReportMetrics:
    """Return the values of a report: metrics of a verdict, and other numbers for a logbook.

    Reports of the layers above provide them in a method ``logbook_metrics``.
    """
    if not hasattr(type(report), "logbook_metrics"):
        raise ConfigurationError(
            f"{short_type_name(report)} is not a report for a logbook.",
            "Pass a report of nb.sweep(), nb.compare(), nb.runbook.profile(), nb.runbook.parity(), "
            "nb.training.last_curve() or a similar function.",
        )
    metrics: ReportMetrics = report.logbook_metrics()
    return metrics


# Metrics of a benchmark that a busy or hot computer does not change.
TIMELESS_METRICS = frozenset(
    {
        "batch",
        "batch_tokens",
        "out_of_memory_at",
        "headroom",
        "synchronizations",
        "fallback_operators",
        "refused_operators",
        "fallback_calls",
    }
)


def _read_benchmark(
    report: Comparison | Profile | SweepReport,
    kind: str,
    device: str | None,
    batch_size: int | None,
    values: Values,
) -> ReportMetrics:
    """Return the values of a benchmark with its run settings; without its times if they are not reliable."""
    if report.disturbance:
        values = {name: value for name, value in values.items() if name in TIMELESS_METRICS}
        values |= {"slow_conditions": (report.disturbance.reason,), "disturbed_measurements": (report.COMMAND,)}
    tokens = batch_size and report.batch_tokens
    run = Run(
        report.task,
        None if tokens else batch_size,
        workers=report.workers,
        dtype=report.dtype,
        row_shape=report.row_shape,
        batch_tokens=tokens,
    )
    return ReportMetrics(kind, sanitize_path(report.name), device, report.simulated, values, run)


@read_report.register
def _read_comparison(report: Comparison, case: Case) -> ReportMetrics:
    # A logbook stores the values of every device, and a verdict reads those of its device.
    values: Values = {
        f"{device.device}_{name}": value
        for device in report.devices
        for name, value in _select_numbers(_device_values(device)).items()
    }
    only_device = report.devices[0].device if len(report.devices) == 1 else None
    if case.evidence["device"]:
        device = report.for_device(case.evidence["device"])
        # Annotation batches by tokens instead of rows.
        batch = None if report.task == ANNOTATION else device.rows
        values |= {**_device_values(device), "batch_tokens": report.batch_tokens, "batch": batch}
    return _read_benchmark(report, "comparison", only_device, report.devices[0].rows, values)


def _device_values(device: DeviceMetrics) -> Values:
    speedup = device.speedup
    throughput = device.throughput
    return {
        "seconds": device.seconds,
        "texts_per_second": device.rows_per_second,
        "texts_per_second_low": throughput and throughput.low,
        "texts_per_second_high": throughput and throughput.high,
        "utilization": device.utilization,
        "speedup_low": speedup and speedup.low,
        "speedup": speedup and speedup.median,
        "speedup_high": speedup and speedup.high,
        "phase_fractions": device.phase_fractions,
    }


@read_report.register
def _read_profile(report: Profile, case: Case) -> ReportMetrics:
    statuses = {finding.name: finding.status for finding in report.findings}
    waits = report.synchronizations if statuses[SYNCHRONIZATION] == WARNING else ()
    values = {
        "seconds": report.seconds,
        "phase_fractions": report.phase_fractions,
        "synchronizations": tuple(map(str, waits)),
        "tiny_batch": None if statuses[TINY_BATCH] == NOT_APPLICABLE else statuses[TINY_BATCH] == WARNING,
        "batch_tokens": report.batch_tokens,
        "batch": None if report.task == ANNOTATION else report.rows,
    }
    if get_device(report.device).has_fallbacks:
        values |= _fallback_values(report.fallbacks)
        values["fallback_calls"] = report.fallback_fraction
        # torch's profiler attributes the copies to other operators, so only a large fraction is conclusive.
        names = {entry.operator.split(".")[0] for entry in report.fallbacks if entry.outcome == FELL_BACK}
        fallback_seconds = sum(operator.seconds for operator in report.operators if operator.operator in names)
        total = sum(operator.seconds for operator in report.operators)
        if total and not report.simulated and fallback_seconds / total > case.gates.fallback_time:
            values["fallback_time"] = fallback_seconds / total
    return _read_benchmark(report, "profile", report.device, report.rows, values)


def _fallback_values(entries: Sequence[Fallback]) -> Values:
    """Return the operators that ran on the CPU instead of MPS, and those that failed."""
    return {
        name: tuple(sorted({entry.operator for entry in entries if entry.outcome == outcome}))
        for name, outcome in (("fallback_operators", FELL_BACK), ("refused_operators", RAISED_ERROR))
    }


@read_report.register
def _read_sweep(report: SweepReport, case: Case) -> ReportMetrics:
    knee = report.knee_point
    batch = case.evidence["batch"]
    tokens = case.evidence["batch_tokens"]
    if batch is None and tokens and report.length:
        batch = max(1, tokens // report.length)
    # Headroom of the smallest measured batch from the batch size in use, or the knee, on.
    rows = batch or report.knee
    fitting = select_fitting(report.points)
    sizes = [point.memory for point in fitting if rows and point.rows >= rows and point.memory is not None]
    current = batch and _throughput_at(fitting, batch)
    best_throughput = knee and knee.throughput
    peak = knee.memory if knee else None
    gain = best_throughput / current - 1 if best_throughput and current else None
    # The sweep ended while throughput still increased, and not for lack of memory: larger batches may be faster.
    ended_early = report.still_increasing and report.stop_code in {"largest", "time"}
    values = {
        "batch": batch,
        "knee": report.knee,
        "knee_gain": None if ended_early and (gain or 0) <= case.gates.knee_gain else gain,
        "out_of_memory_at": min((point.rows for point in report.points if not point.fits), default=0),
        "headroom": _free_fraction(sizes[0], report.limit) if sizes and report.limit else None,
        "rows_per_second": best_throughput,
        "memory_bytes": peak,
    }
    metrics = _read_benchmark(report, "sweep", report.device, None, values)
    return replace(metrics, run=replace(metrics.run, length=report.length, peak_memory_bytes=peak))


def _throughput_at(points: Sequence[Point], rows: int) -> float | None:
    """Return the linearly interpolated throughput of a batch size, or ``None`` outside the measured range."""
    import numpy as np

    speeds = {point.rows: point.speed for point in points if point.throughput}
    if not speeds or not min(speeds) <= rows <= max(speeds):
        return None
    return float(np.interp(rows, [*speeds], [*speeds.values()]))


def _free_fraction(used: int, limit: float) -> float:
    """Return the free fraction of a memory limit, rounded to the accuracy of memory measurements.

    Example:
        >>> _free_fraction(90, 100), _free_fraction(903, 1000)
        (0.1, 0.1)
    """
    return round(1 - used / limit, 2)


# The memory of a curve with too few epochs after the warm-up, as opposed to one that rose in its last epochs only.
TOO_FEW_EPOCHS = "too few epochs"


@read_report.register
def _read_curve(report: MemoryCurve, case: Case) -> ReportMetrics:
    curve = replace(report, growth_threshold=case.gates.memory_growth)
    free = [
        _free_fraction(sample.peak, sample.recommended * (report.limit or 1.0))
        for sample in report.samples
        if sample.peak and sample.recommended
    ]
    peaks = [size for sample in report.samples for size in (sample.peak, sample.allocated) if size is not None]
    values: Values = {
        "memory_growth": None if curve.verdict == "insufficient data" else curve.trend.growth,
        "memory_verdict": curve.verdict if len(curve.steady_samples) >= MIN_STEADY_EPOCHS else TOO_FEW_EPOCHS,
        "memory_advice": None if curve.advice == ADVICE["flat"] else curve.advice,
        "headroom": min(free, default=None),
    }
    run = Run(peak_memory_bytes=max(peaks, default=None))
    return ReportMetrics("memory", curve.deciding_metric, report.device, report.simulated, values, run)


@read_report.register
def _read_parity(report: ParityReport, _case: Case) -> ReportMetrics:
    values: Values = {
        "entity_agreement": report.spans.agreement if report.spans.all else None,
        "entity_bound": report.spans.upper_bound,
        "logits": report.logit_difference,
        "non_finite_tokens": report.non_finite_tokens,
        "recall_loss": max(0.0, report.gold.recall_loss) if report.gold else None,
        "gradients": report.gradients and report.gradients.largest,
    }
    if report.is_baseline:  # A comparison of the CPU with itself is no evidence.
        values = {}
    return ReportMetrics(
        "parity", f"{sanitize_path(report.model)} in {report.dtype}", report.device, report.simulated, values
    )


@read_report.register
def _read_precision(report: PrecisionVerdict, case: Case) -> ReportMetrics:
    """Return the values of a reduced dtype. One that changes the entities is evidence against the dtype alone."""
    parity = report.parity
    spans = parity.spans
    values: Values = {"dtype_agreement": spans.agreement}
    loses_entities = spans.agreement < case.gates.entity_agreement or parity.non_finite_tokens
    if report.is_refuted or (spans.all and loses_entities):
        values["refused_dtype"] = parity.dtype
    elif not loses_entities:
        values |= {"entity_agreement": spans.agreement if spans.all else None, "entity_bound": spans.upper_bound}
    return ReportMetrics(
        "precision", f"{sanitize_path(parity.model)} in {parity.dtype}", parity.device, parity.simulated, values
    )


@read_report.register
def _read_losses(report: LossParity, _case: Case) -> ReportMetrics:
    source = (f"from step {report.divergence_step}",) if report.divergence_step else ()
    values: Values = {"divergence_source": source, "drift": max(report.drift)}
    return ReportMetrics(
        "losses",
        f"{sanitize_path(report.model)} in {report.dtype}",
        report.device,
        report.simulated,
        values,
        Run(TRAINING_STEP),
    )


@read_report.register
def _read_fallbacks(report: FallbackLog, _case: Case) -> ReportMetrics:
    calls = report.num_mps_operators
    values: Values = {}
    if calls:
        values = {**_fallback_values(report.entries), "fallback_calls": min(1.0, report.count / calls)}
    return ReportMetrics("fallbacks", "operators", "mps" if calls else None, report.simulated, values)


@read_report.register
def _read_forecast(report: Forecast, case: Case) -> ReportMetrics:
    # A forecast covers a forward pass, so it cannot show that no operator of a training falls back.
    nothing = None if case.evidence["task"] == TRAINING else ()
    values: Values = {"fallback_operators": report.cpu_operators or nothing}
    # A forecast runs on the CPU and does not depend on a simulation.
    return ReportMetrics("forecast", sanitize_path(report.model), None, False, values)


@read_report.register
def _read_status(report: SystemStatus, _case: Case) -> ReportMetrics:
    values: Values = {"slow_conditions": _slow_conditions(report.findings)}
    return ReportMetrics("system status", "computer", None, report.simulated, values)


@read_report.register
def _read_doctor(report: DoctorReport, _case: Case) -> ReportMetrics:
    findings = report.findings
    statuses = {finding.name: finding.status for finding in findings}
    computation = {COMPUTATION, *REQUIRED_DTYPES}
    detected = tuple(
        finding.name for finding in findings if finding.details
    )  # Only a detected silent error has details.
    failed = [finding.name for finding in findings if finding.status == FAILED and finding.name not in detected]
    was_checked = statuses.get(SILENT_ERRORS) in {OK, FAILED, WARNING}
    gpu_statuses = [statuses.get(name) for name in GPU_CHECKS]
    values: Values = {
        "device_faults": tuple(name for name in failed if name in computation),
        "silent_errors": detected if detected or was_checked else None,
        "doctor_failures": tuple(name for name in failed if name not in computation),
        "slow_conditions": _slow_conditions(findings),
        # No check of a GPU applies; unknown if the checks did not run.
        "no_gpu": None if None in gpu_statuses else set(gpu_statuses) == {NOT_APPLICABLE},
    }
    return ReportMetrics("doctor", "computer", None, report.simulated, values)


def _slow_conditions(findings: Sequence[Finding]) -> tuple[str, ...]:
    names = {LOAD, *(condition.name for condition in CONDITIONS)}
    slow = [finding for finding in findings if finding.status == WARNING and finding.name in names]
    return tuple(BUSY if finding.name == LOAD else str(finding) for finding in slow)


# Types of the reports of a verdict, in the order of the readers above. If several contain a metric, the first has precedence.
# The batch size that is in use comes from a comparison or a profile, and a sweep is read for it.
REPORTS = tuple(kind for kind in read_report.registry if kind is not object)
