"""Metrics of a verdict, each declared once with its label, unit and readers, and their gates.

Each field of :class:`Evidence` is a metric; metrics derived from other metrics are declared in ``DERIVED_METRICS``. Each field
of :class:`Thresholds` is the gate of the metric with that name. The gates,
the evidence, the tables, the JSON and the lanes of a verdict are built from these declarations.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from enum import IntEnum
from itertools import pairwise
from typing import Any, Literal, TypeAlias

from ..._render.display import FAILED, NOT_APPLICABLE, OK, WARNING, Displayable, Report, Table, format_percent
from ..._utils.validation import check_number, invalid_value, is_finite_number
from ...devices.registry import get_device
from ...training.curve import GROWING, GROWTH_EPOCHS, GROWTH_THRESHOLD, MemoryCurve
from ..bench.comparison import MIN_SPEEDUP_GAIN, SECONDS_PER_HOUR, Comparison, DeviceMetrics
from ..bench.profile import SYNCHRONIZATION, TINY_BATCH, Profile
from ..bench.sweep import (
    BATCH_SIZE_LIMIT,
    HEADROOM_FRACTION,
    MIN_KNEE_GAIN,
    TIME,
    Point,
    SweepReport,
    find_best,
    select_fitting,
)
from ..bench.timing import DATA, MAX_DATA_FRACTION, TRANSFER
from ..bench.workloads import ANNOTATION
from ..checks.doctor.checks import COMPUTATION, GPU_CHECKS, REQUIRED_DTYPES, SILENT_ERRORS
from ..checks.doctor.report import DoctorReport
from ..checks.operators.fallbacks import FELL_BACK, RAISED_ERROR, FallbackLog
from ..checks.operators.forecast import Forecast
from ..checks.precision.policy import MAX_RECALL_LOSS, MIN_SPAN_AGREEMENT, TOLERANCES
from ..checks.precision.report import ParityReport
from ..checks.precision.trajectory import LossParity
from ..checks.precision.validation import PrecisionVerdict
from ..records.signals import CONDITIONS, SystemStatus

INFERENCE = "inference"
TRAINING = "training"
GENERATION = "generation"
# Supported uses of a model: finding entities, forward passes of a custom module, training, and generating text.
TASKS = (ANNOTATION, INFERENCE, TRAINING, GENERATION)

MAX_COUNT = 1 << 63  # Exclusive.

Unit = Literal["fraction", "difference", "hours", "ratio", "rate", "count", "text", "names", "phases", "boolean"]
FRACTION: Unit = "fraction"
DIFFERENCE: Unit = "difference"
HOURS: Unit = "hours"
RATIO: Unit = "ratio"
RATE: Unit = "rate"
COUNT: Unit = "count"
TEXT: Unit = "text"
NAMES: Unit = "names"
PHASES: Unit = "phases"
BOOLEAN: Unit = "boolean"


# Values of metrics by name; the unit of a metric determines the type.
Values: TypeAlias = dict[str, Any]


def _format_significant(value: float) -> str:
    """Return a number with three significant digits."""
    return f"{float(f'{value:.3g}'):,g}"


# Suffixes of the numeric units.
_SUFFIXES: Mapping[Unit, str] = {RATIO: "x", RATE: " per second"}


def format_with_unit(unit: Unit, value: Any) -> str:
    """Return a value as text, with three significant digits: ``22%``, ``3.46x``, ``1,200``, ``none``."""
    if unit in _SUFFIXES:
        return f"{_format_significant(value)}{_SUFFIXES[unit]}"
    if unit == FRACTION:
        return format_percent(float(f"{value:.3g}"), ",g")
    text = str(value)
    if unit == DIFFERENCE:
        text = f"{value:.3g}"
    elif unit == HOURS and abs(value) < 1:
        text = f"{_format_significant(60 * value)} minutes"
    elif unit == HOURS:
        text = "1 hour" if value == 1 else f"{_format_significant(value)} hours"
    elif unit == COUNT:
        text = f"{value:,}" if value else "none"
    elif unit == NAMES:
        text = ", ".join(value) or "none"
    elif unit == PHASES:
        text = ", ".join(f"{name} {format_with_unit(FRACTION, fraction)}" for name, fraction in value.items())
    elif unit == BOOLEAN:
        text = "yes" if value else "no"
    return text


def _is_valid(unit: Unit, value: object) -> bool:
    """Return whether a value is valid for a unit."""
    if unit == TEXT:
        return isinstance(value, str)
    if unit == BOOLEAN:
        return isinstance(value, bool)
    if unit == NAMES:
        return isinstance(value, tuple) and all(isinstance(name, str) for name in value)
    if unit == PHASES:
        return (
            isinstance(value, Mapping)
            and _is_valid(NAMES, tuple(value))
            and all(_is_valid(FRACTION, fraction) for fraction in value.values())
        )
    if unit == COUNT:
        return type(value) is int and 0 <= value < MAX_COUNT
    return is_finite_number(value)


# Descriptions of the valid values for error messages; all other units take a finite number.
_EXPECTED: Mapping[Unit, str] = {
    COUNT: "an integer of at least 0",
    TEXT: "a string",
    NAMES: "a tuple of strings",
    PHASES: "a mapping of names to finite numbers",
    BOOLEAN: "True or False",
}


class Area(IntEnum):
    """Area of a metric, in order of precedence: incorrect results come before all other areas."""

    CORRECTNESS, MEMORY, DATA, BATCH, FALLBACKS, SPEED = range(6)


# Sources of the thresholds.
TOOLKIT_CHOICE = "a choice of this toolkit"
RUNBOOK = "the runbook"
PARITY_THRESHOLD = "same threshold as nb.runbook.parity()"
OBSERVED_DIFFERENCES = "several times the largest difference observed in correct runs"


@dataclass(frozen=True)
class Gate:
    """Threshold of a metric.

    Attributes:
        default: Default threshold.
        description: What the threshold limits.
        reason: Reason for the default threshold.
        source: Source of the default threshold.
        maximum: Largest threshold that can be set.
        area: Area whose status indicator shows the metric; ``None`` if the metric only explains another metric.
        is_minimum: Whether the metric must reach the threshold. If false, the metric must not exceed it.
        violation: Phrase for a metric beyond its threshold, for metrics of correctness. ``{}`` is the threshold.
    """

    default: float
    description: str
    reason: str
    source: str = TOOLKIT_CHOICE
    maximum: float = 1.0
    area: Area | None = None
    is_minimum: bool = False
    violation: str = ""


@dataclass(frozen=True)
class Metric:
    """Declaration of a metric.

    Attributes:
        label: Display name.
        unit: Unit of the values.
        readers: For each type of report, the path of an attribute, such as ``"gradients.largest"``, or a function of the
            report and the context. If several reports contain the metric, the first type has precedence.
    """

    label: str
    unit: Unit
    readers: Mapping[type, Reader] = field(default_factory=dict)

    @property
    def gate_unit(self) -> Unit:
        """Unit of the threshold; the threshold of a speedup is the additional fraction of speed."""
        return FRACTION if self.unit == RATIO else self.unit

    def read(self, reports: Iterable[object], context: EvidenceContext) -> object:
        """Return the first value that the reports contain, or ``None`` if no report contains the metric."""
        for report_type, reader in self.readers.items():
            for report in reports:
                if isinstance(report, report_type):
                    if isinstance(reader, str):
                        value = report
                        for name in reader.split("."):
                            value = value and getattr(value, name)
                    else:
                        value = reader(report, context)
                    if value is not None and (not isinstance(value, float) or math.isfinite(value)):
                        return value
        return None


@dataclass(frozen=True)
class EvidenceContext:
    """Context in which reports are read.

    Attributes:
        device: Device of the verdict, if it is known.
        task: Task of the verdict, if it is known.
        gates: Thresholds of the verdict.
        values: Metrics that were read before, by name.
    """

    device: str | None
    task: str | None
    gates: Thresholds
    values: Values


Reader = str | Callable[[Any, EvidenceContext], object]


def _batch_in_use(report: Comparison | Profile, context: EvidenceContext) -> int | None:
    """Return the batch size in use, or ``None`` for annotation, which batches by tokens instead of rows."""
    if report.task == ANNOTATION:
        return None
    return report.rows if isinstance(report, Profile) else report.for_device(context.device or "cpu").rows


def _batch_from_tokens(report: SweepReport, context: EvidenceContext) -> int | None:
    """Return the number of rows of the sweep's length that a batch of the tokens in use holds."""
    tokens = context.values.get("batch_tokens")
    return max(1, tokens // report.length) if tokens and report.length else None


def _profile_throughput(report: Profile, _context: EvidenceContext) -> float | None:
    return report.rows / report.seconds if report.seconds else None


def _status(report: Profile, name: str) -> str:
    return next(finding.status for finding in report.findings if finding.name == name)


def _synchronizations(report: Profile, _context: EvidenceContext) -> tuple[str, ...]:
    if _status(report, SYNCHRONIZATION) != WARNING:
        return ()
    return tuple(str(wait) for wait in report.synchronizations if wait.place.is_user_code and wait.reason != "batch")


def _is_tiny_batch(report: Profile, _context: EvidenceContext) -> bool | None:
    status = _status(report, TINY_BATCH)
    return None if status == NOT_APPLICABLE else status == WARNING


def _best_batch(report: SweepReport, _context: EvidenceContext) -> int | None:
    best = find_best(report.points)
    return best.rows if best else None


def _knee_gain(report: SweepReport, context: EvidenceContext) -> float | None:
    """Return the throughput gain at the knee over the batch size in use."""
    batch = context.values.get("batch")
    current = None if batch is None else _throughput_at(report.points, batch)
    best = None if report.knee is None else _throughput_at(report.points, report.knee)
    gain = best / current - 1 if best and current else None
    # The sweep ended while throughput still increased, and not for lack of memory: larger batches may be faster.
    ended_early = report.still_increasing and report.stop_code in {BATCH_SIZE_LIMIT, TIME}
    return None if ended_early and (gain or 0) <= context.gates.knee_gain else gain


def _throughput_at(points: Sequence[Point], rows: int) -> float | None:
    """Return the linearly interpolated throughput of a batch size, or ``None`` outside the measured range."""
    measured = [(point.rows, point.speed) for point in select_fitting(points) if point.throughput]
    for (smaller, smaller_speed), (larger, larger_speed) in pairwise(measured):
        if smaller < rows < larger:
            return smaller_speed + (larger_speed - smaller_speed) * (rows - smaller) / (larger - smaller)
    return dict(measured).get(rows)


def _min_out_of_memory_rows(report: SweepReport, _context: EvidenceContext) -> int:
    return min((point.rows for point in report.points if not point.fits), default=0)


def _free_fraction(used: int, limit: float) -> float:
    """Return the free fraction of a memory limit, rounded to the accuracy of memory measurements.

    Example:
        >>> _free_fraction(90, 100), _free_fraction(903, 1000)
        (0.1, 0.1)
    """
    return round(1 - used / limit, 2)


def _headroom_from_sweep(report: SweepReport, context: EvidenceContext) -> float | None:
    """Return the headroom of the smallest measured batch from the batch size in use, or the knee, on."""
    rows = context.values.get("batch") or report.knee
    larger = [] if rows is None else [point for point in select_fitting(report.points) if point.rows >= rows]
    sizes = [point.memory for point in larger if point.memory is not None]
    return _free_fraction(sizes[0], report.limit) if sizes and report.limit else None


def _headroom_from_epochs(report: MemoryCurve, _context: EvidenceContext) -> float | None:
    limits = [(sample.peak, sample.recommended) for sample in report.samples if sample.peak and sample.recommended]
    fraction = report.limit or 1.0
    return min((_free_fraction(peak, recommended * fraction) for peak, recommended in limits), default=None)


def _memory_verdict(report: MemoryCurve, context: EvidenceContext) -> str:
    return replace(report, growth_threshold=context.gates.memory_growth).verdict


def _memory_growth(report: MemoryCurve, context: EvidenceContext) -> float | None:
    """Return the memory growth; of a growing curve, the steepest growth rate, which is above the gate."""
    trend = report.trend
    return trend.steepest if _memory_verdict(report, context) == GROWING else trend.growth


def _agreement(report: ParityReport, _context: EvidenceContext) -> float | None:
    return report.spans.agreement if report.spans.all else None


def _recall_loss(report: ParityReport, _context: EvidenceContext) -> float | None:
    return max(0.0, report.gold[0].recall - report.gold[1].recall) if report.gold else None


def _keeps_entities(report: PrecisionVerdict, context: EvidenceContext) -> bool:
    is_rejected = any(refusal.conclusive for refusal in report.reasons)
    is_same = report.parity.spans.agreement >= context.gates.entity_agreement
    return is_same and not report.parity.non_finite_tokens and not is_rejected


def _reduced_dtype_agreement(report: PrecisionVerdict, context: EvidenceContext) -> float | None:
    """Return the agreement in a reduced dtype if it keeps the entities.

    A dtype that changes the entities is evidence against the dtype, not against the device.
    """
    return _agreement(report.parity, context) if _keeps_entities(report, context) else None


def _refused_dtype(report: PrecisionVerdict, context: EvidenceContext) -> str | None:
    compared = report.parity.spans.all or report.is_refuted
    return report.parity.dtype if compared and not _keeps_entities(report, context) else None


def _divergence_source(report: LossParity, _context: EvidenceContext) -> tuple[str, ...]:
    return (f"from step {report.divergence_step}",) if report.divergence_step else ()


def _operators_with_outcome(outcome: str) -> Reader:
    """Return a reader of the operators with an outcome on MPS, which returns ``None`` if MPS was not used."""

    def read(report: Profile | FallbackLog, _context: EvidenceContext) -> tuple[str, ...] | None:
        if not _ran_on_mps(report):
            return None
        entries = report.fallbacks if isinstance(report, Profile) else report.entries
        return tuple(sorted({entry.operator for entry in entries if entry.outcome == outcome}))

    return read


def _ran_on_mps(report: Profile | FallbackLog) -> bool:
    if isinstance(report, Profile):
        return get_device(report.device).has_fallbacks
    return bool(report.num_mps_operators)


def _fallback_call_fraction(report: Profile | FallbackLog, _context: EvidenceContext) -> float | None:
    if not _ran_on_mps(report):
        return None
    return (
        report.fallback_fraction if isinstance(report, Profile) else min(1.0, report.count / report.num_mps_operators)
    )


def _fallback_time_fraction(report: Profile, context: EvidenceContext) -> float | None:
    """Return the fraction of the time in fallback operators if it exceeds its gate, else ``None``.

    The torch profiler attributes the copies to other operators, so a small fraction would not be conclusive.
    """
    total = sum(operator.seconds for operator in report.operators)
    if not total or report.simulated or not _ran_on_mps(report):
        return None
    names = {entry.operator.split(".")[0] for entry in report.fallbacks if entry.outcome == FELL_BACK}
    fraction = sum(operator.seconds for operator in report.operators if operator.operator in names) / total
    return fraction if fraction > context.gates.fallback_time else None


def _forecast_operators(name: str) -> Reader:
    """Return a reader of the operators in an attribute of a forecast.

    For training, only a forecast that includes a training step can show that no operator is affected.
    """

    def read(report: Forecast, context: EvidenceContext) -> tuple[str, ...] | None:
        lacks_training = context.task == TRAINING and all(row.phase == INFERENCE for row in report.rows)
        operators: tuple[str, ...] = getattr(report, name)
        return operators or (None if lacks_training else ())

    return read


# Findings of the doctor that show whether a device computes, and conditions that affect timings.
_COMPUTATION_CHECKS = frozenset({COMPUTATION, *REQUIRED_DTYPES})
_CONDITION_NAMES = frozenset(condition.name for condition in CONDITIONS)


def _known_bug_names(report: DoctorReport) -> frozenset[str]:
    """Return the names of the known bugs, or none if the doctor computed nothing.

    The module of the known bugs imports torch.
    """
    if COMPUTATION in _names_with_status(report, NOT_APPLICABLE):
        return frozenset()
    from ..checks.doctor.silent_errors import KNOWN_BUGS

    return frozenset(bug.name for bug in KNOWN_BUGS)


def _names_with_status(report: DoctorReport, *statuses: str) -> list[str]:
    return [finding.name for finding in report.findings if finding.status in statuses]


def _device_faults(report: DoctorReport, _context: EvidenceContext) -> tuple[str, ...]:
    return tuple(name for name in _names_with_status(report, FAILED) if name in _COMPUTATION_CHECKS)


def _doctor_failures(report: DoctorReport, _context: EvidenceContext) -> tuple[str, ...]:
    read_elsewhere = _COMPUTATION_CHECKS | _known_bug_names(report)
    return tuple(name for name in _names_with_status(report, FAILED) if name not in read_elsewhere)


def _silent_errors(report: DoctorReport, _context: EvidenceContext) -> tuple[str, ...] | None:
    bug_names = _known_bug_names(report)
    bugs = tuple(name for name in _names_with_status(report, FAILED, WARNING) if name in bug_names)
    was_checked = SILENT_ERRORS in _names_with_status(report, OK, FAILED, WARNING)
    return bugs if bugs or was_checked else None


def _gpu_checks_do_not_apply(report: DoctorReport, _context: EvidenceContext) -> bool | None:
    """Return whether no check of a GPU applies, or ``None`` if the checks did not run."""
    names = {finding.name for finding in report.findings}
    return set(GPU_CHECKS) <= set(_names_with_status(report, NOT_APPLICABLE)) if names.issuperset(GPU_CHECKS) else None


def _slow_conditions(report: DoctorReport | SystemStatus, _context: EvidenceContext) -> tuple[str, ...]:
    findings = report.findings if isinstance(report, DoctorReport) else report.findings()
    return tuple(str(finding) for finding in findings if finding.status == WARNING and finding.name in _CONDITION_NAMES)


def _metric_field(
    label: str,
    unit: Unit,
    readers: Mapping[type, Reader] | None = None,
    default: object = None,
) -> Any:
    """Return a dataclass field that declares a metric."""
    return field(default=default, metadata={"metric": Metric(label, unit, readers or {})})


@dataclass(frozen=True, repr=False)
class Evidence(Displayable):
    """Metrics of a device under a workload.

    ``None`` means that a metric was not measured; values are never guessed. Fractions are in [0, 1].

    Attributes:
        models: Names of the model in the reports.
        device: Device of the work, as spelled by torch.
        task: ``"annotation"``, ``"inference"``, ``"training"`` or ``"generation"``.
        speedup_low: Lower end of the confidence interval of the speedup over the CPU.
        speedup: Median speedup over the CPU.
        speedup_high: Upper end of the confidence interval of the speedup.
        utilization: Utilization of the device, after subtracting its idle utilization.
        phase_fractions: Fraction of a step per phase, such as ``{"data": 0.2, "forward": 0.8}``.
        synchronizations: Code locations where a step waits for the device.
        tiny_batch: Whether kernel launches take most of the device time.
        batch_tokens: Maximum number of tokens per batch in use, for annotation.
        batch: Batch size in use; for annotation, the number of rows of the sweep's length.
        knee: Batch size at the knee.
        best_batch: Batch size with the highest throughput.
        knee_gain: Throughput gain at the knee over the batch size in use; 0.1 is 10% more.
        out_of_memory_at: Smallest batch size that ran out of memory; 0 if none did.
        headroom: Free fraction of the memory limit at the batch size in use.
        memory_growth: Memory growth over ten epochs.
        memory_verdict: Verdict of the memory curve: ``"flat"``, ``"growing"``, ``"sawtooth"`` or ``"insufficient data"``.
        entity_agreement: Fraction of the entities that are the same as on the CPU in float32.
        logits: Largest difference of a float32 logit from the CPU.
        non_finite_tokens: Number of tokens with NaN or infinity.
        recall_loss: Loss of recall on gold entities.
        gradients: Largest relative difference of a float32 gradient from the CPU.
        divergence_source: Step from which training losses differ from the CPU by more than rounding; empty if none do.
        refused_dtype: Reduced dtype in which the entities of the model change.
        refused_operators: Operators that do not run on MPS at all.
        fallback_operators: Operators that fall back to the CPU.
        fallback_time: Fraction of the time in these operators.
        fallback_calls: Fraction of the operator calls on MPS tensors that fall back.
        device_faults: Checks of the doctor in which the device computed incorrectly or not at all.
        silent_errors: Known silent errors that the doctor detected on this device.
        doctor_failures: Other failed checks of the doctor.
        slow_conditions: Conditions that affect timings, such as ``"power, warning: battery"``.
        texts_per_second: Throughput in texts or rows per second.
        num_texts: Number of texts to process.
        no_gpu: Whether the CPU is the only device of the computer.
        simulated: Whether any metric comes from a simulated device.

    Raises:
        ConfigurationError: If a value is not valid for its metric.

    Example:
        >>> Evidence(device="mps", task="annotation", texts_per_second=50.0, num_texts=360_000).hours
        2.0
    """

    models: tuple[str, ...] | None = _metric_field("model names", NAMES)
    device: str | None = _metric_field("device", TEXT)
    task: str | None = _metric_field("task", TEXT)
    speedup_low: float | None = _metric_field(
        "speedup over the CPU, lower bound", RATIO, {DeviceMetrics: "speedup.low"}
    )
    speedup: float | None = _metric_field(
        "speedup over the CPU",
        RATIO,
        {DeviceMetrics: "speedup.median"},
    )
    speedup_high: float | None = _metric_field(
        "speedup over the CPU, upper bound", RATIO, {DeviceMetrics: "speedup.high"}
    )
    utilization: float | None = _metric_field(
        "utilization",
        FRACTION,
        {DeviceMetrics: "utilization"},
    )
    phase_fractions: Mapping[str, float] | None = _metric_field(
        "time per phase", PHASES, {DeviceMetrics: "phase_fractions", Profile: "phase_fractions"}
    )
    synchronizations: tuple[str, ...] | None = _metric_field(
        "synchronization points", NAMES, {Profile: _synchronizations}
    )
    tiny_batch: bool | None = _metric_field("dominated by kernel launches", BOOLEAN, {Profile: _is_tiny_batch})
    batch_tokens: int | None = _metric_field(
        "maximum tokens per batch", COUNT, {Comparison: "batch_tokens", Profile: "batch_tokens"}
    )
    batch: int | None = _metric_field(
        "batch size in use",
        COUNT,
        {Comparison: _batch_in_use, Profile: _batch_in_use, SweepReport: _batch_from_tokens},
    )
    knee: int | None = _metric_field("batch size at the knee", COUNT, {SweepReport: "knee"})
    best_batch: int | None = _metric_field("fastest batch size", COUNT, {SweepReport: _best_batch})
    knee_gain: float | None = _metric_field(
        "throughput gain at the knee",
        FRACTION,
        {SweepReport: _knee_gain},
    )
    out_of_memory_at: int | None = _metric_field(
        "smallest batch size out of memory", COUNT, {SweepReport: _min_out_of_memory_rows}
    )
    headroom: float | None = _metric_field(
        "free memory below the limit",
        FRACTION,
        {SweepReport: _headroom_from_sweep, MemoryCurve: _headroom_from_epochs},
    )
    memory_growth: float | None = _metric_field(
        "memory growth over ten epochs",
        FRACTION,
        {MemoryCurve: _memory_growth},
    )
    memory_verdict: str | None = _metric_field("memory curve", TEXT, {MemoryCurve: _memory_verdict})
    entity_agreement: float | None = _metric_field(
        "entity agreement",
        FRACTION,
        {ParityReport: _agreement, PrecisionVerdict: _reduced_dtype_agreement},
    )
    logits: float | None = _metric_field(
        "largest logit difference",
        DIFFERENCE,
        {ParityReport: "logits.maximum"},
    )
    non_finite_tokens: int | None = _metric_field(
        "tokens with NaN or infinity", COUNT, {ParityReport: "non_finite_tokens"}
    )
    recall_loss: float | None = _metric_field(
        "recall loss",
        FRACTION,
        {ParityReport: _recall_loss},
    )
    gradients: float | None = _metric_field(
        "largest relative gradient difference",
        DIFFERENCE,
        {ParityReport: "gradients.largest"},
    )
    divergence_source: tuple[str, ...] | None = _metric_field(
        "training diverges from the CPU", NAMES, {LossParity: _divergence_source}
    )
    refused_dtype: str | None = _metric_field(
        "dtype that changes the entities", TEXT, {PrecisionVerdict: _refused_dtype}
    )
    refused_operators: tuple[str, ...] | None = _metric_field(
        "operators not supported on MPS",
        NAMES,
        {
            Profile: _operators_with_outcome(RAISED_ERROR),
            FallbackLog: _operators_with_outcome(RAISED_ERROR),
            Forecast: _forecast_operators("unsupported"),
        },
    )
    fallback_operators: tuple[str, ...] | None = _metric_field(
        "operators that fall back to the CPU",
        NAMES,
        {
            Profile: _operators_with_outcome(FELL_BACK),
            FallbackLog: _operators_with_outcome(FELL_BACK),
            Forecast: _forecast_operators("cpu_operators"),
        },
    )
    fallback_time: float | None = _metric_field(
        "time in fallbacks",
        FRACTION,
        {Profile: _fallback_time_fraction},
    )
    fallback_calls: float | None = _metric_field(
        "calls that fall back",
        FRACTION,
        {Profile: _fallback_call_fraction, FallbackLog: _fallback_call_fraction},
    )
    device_faults: tuple[str, ...] | None = _metric_field("failed device checks", NAMES, {DoctorReport: _device_faults})
    silent_errors: tuple[str, ...] | None = _metric_field(
        "known silent errors detected", NAMES, {DoctorReport: _silent_errors}
    )
    doctor_failures: tuple[str, ...] | None = _metric_field(
        "failed checks of nb.doctor()", NAMES, {DoctorReport: _doctor_failures}
    )
    slow_conditions: tuple[str, ...] | None = _metric_field(
        "conditions that affect timings",
        NAMES,
        {SystemStatus: _slow_conditions, DoctorReport: _slow_conditions},
    )
    texts_per_second: float | None = _metric_field(
        "throughput (texts or rows)", RATE, {DeviceMetrics: "rows_per_second", Profile: _profile_throughput}
    )
    num_texts: int | None = _metric_field("number of texts", COUNT)
    no_gpu: bool | None = _metric_field("no GPU on this computer", BOOLEAN, {DoctorReport: _gpu_checks_do_not_apply})
    simulated: bool = _metric_field("simulated", BOOLEAN, default=False)

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            unit = METRICS[name].unit
            if value is not None and not _is_valid(unit, value):
                expected = _EXPECTED.get(unit, "a finite number")
                raise invalid_value(name, value, f"Pass {expected}, or None if it was not measured.")
        if self.task not in {None, *TASKS}:
            raise invalid_value("task", self.task, f"Use one of {', '.join(TASKS)}.")

    @property
    def device_type(self) -> str | None:
        """Type of the device: ``"mps"``, ``"cuda"`` or ``"cpu"``."""
        return get_device(self.device).type if self.device else None

    @property
    def data_fraction(self) -> float | None:
        """Fraction of a step spent waiting for data."""
        return None if self.phase_fractions is None else self.phase_fractions.get(DATA)

    @property
    def transfer_fraction(self) -> float | None:
        """Fraction of a step spent on copies to the device."""
        return None if self.phase_fractions is None else self.phase_fractions.get(TRANSFER)

    @property
    def hours(self) -> float | None:
        """Time to process all texts, in hours."""
        if not self.texts_per_second or self.num_texts is None:
            return None
        return self.num_texts / self.texts_per_second / SECONDS_PER_HOUR

    @property
    def measured(self) -> Values:
        """Measured metrics by name."""
        return {name: value for name, value in vars(self).items() if value is not None and name != "simulated"}

    def to_report(self) -> Report:
        """Return a report that lists the measured metrics, with their values in a table of metrics."""
        names = ", ".join(self.measured) or "nothing"
        return Report("Evidence", (f"Measured: {names}.",), metrics=(Table("", ("metric", "value"), self.rows()),))

    def rows(self) -> tuple[tuple[str, str], ...]:
        """Return the labels and formatted values of the measured metrics, with a separate row for each phase."""
        rows = [
            (metric.label, format_with_unit(metric.unit, value))
            for name, metric in METRICS.items()
            if name not in {"phase_fractions", "simulated"} and (value := getattr(self, name)) is not None
        ]
        rows += [
            (f"step time in {phase}", format_with_unit(FRACTION, fraction))
            for phase, fraction in (self.phase_fractions or {}).items()
            if phase not in {DATA, TRANSFER}
        ]
        return tuple(rows)


# Metrics that are derived from the metric of the key and displayed after it.
DERIVED_METRICS = {
    "phase_fractions": {
        "data_fraction": Metric(
            "step time waiting for data",
            FRACTION,
        ),
        "transfer_fraction": Metric(
            "step time in copies to the device",
            FRACTION,
        ),
    },
    "num_texts": {
        "hours": Metric(
            "time for all texts",
            HOURS,
        ),
    },
}

METRICS: dict[str, Metric] = {}
for _field in fields(Evidence):
    METRICS[_field.name] = _field.metadata["metric"]
    METRICS |= DERIVED_METRICS.get(_field.name, {})

# Report types that a verdict reads.
REPORTS: tuple[type, ...] = tuple(
    {report_type for metric in METRICS.values() for report_type in metric.readers} - {DeviceMetrics}
)


def _threshold(gate: Gate) -> Any:
    """Return a dataclass field that declares a gate."""
    return field(default=gate.default, metadata={"gate": gate})


@dataclass(frozen=True, repr=False)
class Thresholds:
    """Threshold of each gate, in display order."""

    speedup: float = _threshold(
        Gate(
            MIN_SPEEDUP_GAIN,
            "minimum gain in speed over the CPU",
            "a smaller gain does not justify a second device; if the device also waits, check data and batch size first",
            RUNBOOK,
            maximum=10.0,
            area=Area.SPEED,
            is_minimum=True,
        )
    )
    utilization: float = _threshold(
        Gate(
            0.18,
            "minimum utilization of the device, after subtracting its idle utilization",
            "a device that waits is not slow: its data or its batch size limits it",
            RUNBOOK,
            is_minimum=True,
        )
    )
    entity_agreement: float = _threshold(
        Gate(
            MIN_SPAN_AGREEMENT,
            "minimum fraction of the entities that are the same as on the CPU",
            "near ties do not explain a lower agreement",
            PARITY_THRESHOLD,
            area=Area.CORRECTNESS,
            is_minimum=True,
            violation="fewer than {} of the entities are the same as on the CPU",
        )
    )
    recall_loss: float = _threshold(
        Gate(
            MAX_RECALL_LOSS,
            "maximum loss of recall on gold entities",
            "a model with a lower recall is a different model",
            PARITY_THRESHOLD,
            area=Area.CORRECTNESS,
            violation="more than {} of the recall is lost",
        )
    )
    logits: float = _threshold(
        Gate(
            TOLERANCES["float32"].logits or 0.0,
            "maximum difference of a float32 logit from the CPU; a larger difference is accepted if all entities are the same",
            OBSERVED_DIFFERENCES,
            PARITY_THRESHOLD,
            maximum=1e6,
            area=Area.CORRECTNESS,
            violation="logits differ by more than {}",
        )
    )
    gradients: float = _threshold(
        Gate(
            TOLERANCES["float32"].gradients or 0.0,
            "maximum relative difference of a float32 gradient from the CPU",
            OBSERVED_DIFFERENCES,
            PARITY_THRESHOLD,
            maximum=1e6,
            area=Area.CORRECTNESS,
            violation="gradients differ by more than {}",
        )
    )
    memory_growth: float = _threshold(
        Gate(
            GROWTH_THRESHOLD,
            f"maximum memory growth over {GROWTH_EPOCHS} epochs; larger growth means that memory is retained",
            "caches are emptied after each epoch, so memory that still grows is referenced",
            RUNBOOK,
            maximum=10.0,
            area=Area.MEMORY,
        )
    )
    headroom: float = _threshold(
        Gate(
            HEADROOM_FRACTION,
            "minimum free fraction of the memory limit at the batch size in use",
            "a longer text or a new shape then still fits",
            area=Area.MEMORY,
            is_minimum=True,
        )
    )
    data_fraction: float = _threshold(
        Gate(
            MAX_DATA_FRACTION,
            "maximum fraction of a step spent waiting for data",
            "without the wait, a third more steps run in the same time",
            area=Area.DATA,
        )
    )
    transfer_fraction: float = _threshold(
        Gate(
            0.25,
            "maximum fraction of a step spent on copies to the device",
            "without the copies, a third more steps run in the same time",
            area=Area.DATA,
        )
    )
    knee_gain: float = _threshold(
        Gate(
            0.1,
            "maximum throughput gain at the knee over the batch size in use",
            f"a sweep itself ignores gains up to {format_percent(MIN_KNEE_GAIN)}; a gain near that hardly justifies a change",
            maximum=10.0,
            area=Area.BATCH,
        )
    )
    fallback_time: float = _threshold(
        Gate(
            0.05,
            "maximum fraction of the time in operators that fall back to the CPU",
            "below it, avoiding the fallbacks gains little",
            area=Area.FALLBACKS,
        )
    )
    fallback_calls: float = _threshold(
        Gate(
            0.01,
            "maximum fraction of the calls on MPS that fall back, if their time is not known",
            "each one waits for the GPU and copies twice, and an operator launch alone takes 25 to 110 microseconds",
            f"pytorch#82707, and {TOOLKIT_CHOICE}",
            area=Area.FALLBACKS,
        )
    )
    hours: float = _threshold(
        Gate(
            24.0,
            "maximum duration of a run on one computer",
            "one computer can be reserved for a day",
            maximum=1e5,
            area=Area.SPEED,
        )
    )

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            check_number(name, value, GATES[name].maximum, example=f"{GATES[name].default:g}")

    def format_values(self) -> dict[str, str]:
        """Return the formatted thresholds by name."""
        return {name: format_with_unit(METRICS[name].gate_unit, value) for name, value in vars(self).items()}


GATES: dict[str, Gate] = {gate.name: gate.metadata["gate"] for gate in fields(Thresholds)}
