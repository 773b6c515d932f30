"""The metrics of a verdict, each declared once: its label, its unit, its gate, and how it is read from reports.

A field of :class:`Evidence` is a metric; those that are computed from others stand in ``COMPUTED``. The gates, the evidence of
reports, the tables, the JSON and the lanes of a verdict follow from them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from enum import IntEnum
from itertools import pairwise
from typing import Any, Literal

from ..._render.display import FAILED, NOT_APPLICABLE, WARNING, Displayable, Finding, Report, Table
from ..._utils.text import describe_value
from ..._utils.validation import check_number
from ...devices.registry import parse_device_argument
from ...errors import ConfigurationError
from ...training.curve import GROWING, GROWTH_EPOCHS, GROWTH_THRESHOLD, MemoryCurve
from ..bench.comparison import Comparison, DeviceMetrics
from ..bench.profile import SYNCHRONIZATION, TINY_BATCH, Profile
from ..bench.sweep import HEADROOM_FRACTION, LARGEST, MIN_KNEE_GAIN, TIME, Point, SweepReport, best_of, fitting
from ..bench.timing import DATA, MAX_DATA_FRACTION, TRANSFER
from ..bench.workloads import ANNOTATION
from ..checks.doctor.checks import COMPUTATION, REQUIRED_DTYPES, SILENT_ERRORS
from ..checks.doctor.report import DoctorReport
from ..checks.operators.fallbacks import FELL_BACK, REFUSED, FallbackLog
from ..checks.operators.forecast import Forecast
from ..checks.precision.policy import MAX_RECALL_LOSS, MIN_SPAN_AGREEMENT, TOLERANCES
from ..checks.precision.report import ParityReport
from ..checks.precision.trajectory import LossParity
from ..checks.precision.validation import PrecisionVerdict
from ..records.signals import CONDITIONS, SystemStatus

INFERENCE = "inference"
TRAINING = "training"
GENERATION = "generation"
# What a model is used for: finding entities, forward passes of a module of one's own, training, or writing text.
TASKS = (ANNOTATION, INFERENCE, TRAINING, GENERATION)

SECONDS_OF_AN_HOUR = 3600
MOST = 1 << 63

# What metrics count.
Unit = Literal["share", "difference", "hours", "times", "rate", "count", "words", "names", "phases", "yes or no"]
SHARE: Unit = "share"
DIFFERENCE: Unit = "difference"
HOURS: Unit = "hours"
TIMES: Unit = "times"
RATE: Unit = "rate"
COUNT: Unit = "count"
WORDS: Unit = "words"
NAMES: Unit = "names"
PHASES: Unit = "phases"
YES_NO: Unit = "yes or no"


def _format_significant(value: float) -> str:
    """Return a number with three digits that count."""
    return f"{float(f'{value:.3g}'):,g}"


# How values of a unit are read: by how much a number is multiplied, and what stands behind it.
_SCALES: Mapping[Unit, tuple[int, str]] = {SHARE: (100, " %"), TIMES: (1, " times"), RATE: (1, " a second")}


def format_with_unit(unit: Unit, value: Any) -> str:
    """Return a value as people read it, with three digits that count: ``22 %``, ``3.46 times``, ``1,200``, ``none``."""
    if unit in _SCALES:
        factor, behind = _SCALES[unit]
        return f"{_format_significant(factor * value)}{behind}"
    text = str(value)
    if unit == DIFFERENCE:
        text = f"{value:.3g}"
    elif unit == HOURS:
        hours = "1 hour" if value == 1 else f"{_format_significant(value)} hours"
        text = f"{_format_significant(60 * value)} minutes" if abs(value) < 1 else hours
    elif unit == COUNT:
        text = f"{value:,}" if value else "none"
    elif unit == NAMES:
        text = ", ".join(value) or "none"
    elif unit == PHASES:
        text = ", ".join(f"{name} {format_with_unit(SHARE, share)}" for name, share in value.items())
    elif unit == YES_NO:
        text = "yes" if value else "no"
    return text


def _fits(unit: Unit, value: Any) -> bool:
    """Return whether something is a value of a unit."""
    if unit == WORDS:
        return isinstance(value, str)
    if unit == YES_NO:
        return isinstance(value, bool)
    if unit == NAMES:
        return isinstance(value, tuple) and all(isinstance(name, str) for name in value)
    if unit == PHASES:
        return (
            isinstance(value, Mapping)
            and _fits(NAMES, tuple(value))
            and all(_fits(SHARE, share) for share in value.values())
        )
    if unit == COUNT:
        return type(value) is int and 0 <= value < MOST
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)


# What a value of a unit must be, in words; of all other units a finite number.
_EXPECTED: Mapping[Unit, str] = {
    COUNT: "a whole number from 0",
    WORDS: "a string",
    NAMES: "a tuple of strings",
    PHASES: "a mapping of names to finite numbers",
    YES_NO: "True or False",
}


class Area(IntEnum):
    """What a metric is about, in the order of precedence: wrong numbers beat everything."""

    NUMBERS, MEMORY, DATA, BATCH, FALLBACKS, SPEED = range(6)


# Who says so.
OWN = "a choice of this toolkit"
RUNBOOK = "the runbook"
PARITY = "as nb.runbook.parity judges it"
SEEN = "several times the largest difference that was seen where nothing was wrong"


@dataclass(frozen=True)
class Gate:
    """The threshold of a metric.

    Attributes:
        default: The threshold.
        says: What reaching it means.
        reason: Why it stands there.
        source: Who says so.
        largest: The largest value that it may be changed to.
        area: The area whose lamp shows the metric; ``None`` if it only explains another one.
        at_least: Whether the metric must reach the threshold; otherwise it must not go beyond it.
        beyond: That the metric is beyond it, in words, of those that show wrong numbers; ``{}`` stands for the threshold.
    """

    default: float
    says: str
    reason: str
    source: str = OWN
    largest: float = 1.0
    area: Area | None = None
    at_least: bool = False
    beyond: str = ""


@dataclass(frozen=True)
class Metric:
    """A metric.

    Attributes:
        label: What it is called.
        unit: What it counts.
        reads: How it is read from each kind of report: an attribute, or a function of the report and the context. If several
            reports show the metric, the first of these counts.
        gate: Its threshold.
    """

    label: str
    unit: Unit
    reads: Mapping[type, Reader] = field(default_factory=dict)
    gate: Gate | None = None

    @property
    def gate_unit(self) -> Unit:
        """What the threshold counts: that of a speed-up is the share by which the device is faster."""
        return SHARE if self.unit == TIMES else self.unit

    def read(self, reports: Iterable[Any], context: EvidenceContext) -> Any:
        """Return the value that the first of some reports shows; ``None`` if none does."""
        for kind, reader in self.reads.items():
            for report in reports:
                if isinstance(report, kind):
                    value = _attribute(report, reader) if isinstance(reader, str) else reader(report, context)
                    if value is not None and (not isinstance(value, float) or math.isfinite(value)):
                        return value
        return None


def _attribute(report: Any, path: str) -> Any:
    """Return an attribute, such as ``"gradients.largest"``; ``None`` if a part of the path is."""
    for name in path.split("."):
        report = report and getattr(report, name)
    return report


@dataclass(frozen=True)
class EvidenceContext:
    """What a verdict reads reports for: a device and a task, by some gates, with the metrics that are already known."""

    device: str | None
    task: str | None
    gates: Thresholds
    known: dict[str, Any]


Reader = str | Callable[[Any, EvidenceContext], Any]


def _batch_compared(report: Comparison, context: EvidenceContext) -> int | None:
    """Return the batch in use: annotation cuts its texts by tokens, so that its rows are no rows of the device."""
    return None if report.task == ANNOTATION else report.for_device(context.device or "cpu").rows


def _batch_profiled(report: Profile, _context: EvidenceContext) -> int | None:
    return None if report.task == ANNOTATION else report.rows


def _batch_of_tokens(report: SweepReport, context: EvidenceContext) -> int | None:
    """Return how many rows like those of a sweep the tokens of a batch in use are."""
    tokens = context.known.get("batch_tokens")
    return max(1, tokens // report.length) if tokens and report.length else None


def _rate_profiled(report: Profile, _context: EvidenceContext) -> float | None:
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
    best = best_of(report.points)
    return best.rows if best else None


def _knee_gain(report: SweepReport, context: EvidenceContext) -> float | None:
    """Return how much the knee gains over the batch in use."""
    batch = context.known.get("batch")
    here = None if batch is None else _throughput_at(report.points, batch)
    best = None if report.knee is None else _throughput_at(report.points, report.knee)
    gain = best / here - 1 if best and here else None
    # Throughput still rose at the end, and memory is not why: larger batches may be faster.
    cut_off = report.still_increasing and report.stop_code in {LARGEST, TIME}
    return None if cut_off and (gain or 0) <= context.gates.knee_gain else gain


def _throughput_at(points: Sequence[Point], rows: int) -> float | None:
    """Return the throughput at a number of rows, on a line between those measured; ``None`` beyond them."""
    measured = [(point.rows, point.speed) for point in fitting(points) if point.throughput]
    for (few, slow), (many, fast) in pairwise(measured):
        if few < rows < many:
            return slow + (fast - slow) * (rows - few) / (many - few)
    return dict(measured).get(rows)


def _out_of_memory_at(report: SweepReport, _context: EvidenceContext) -> int:
    return min((point.rows for point in report.points if not point.fits), default=0)


def _free_fraction(taken: int, limit: float) -> float:
    """Return how much of a limit stays free, in whole percent: memory is not known better, and no batch misses a gate by less.

    Example:
        >>> _free_fraction(90, 100), _free_fraction(903, 1000)
        (0.1, 0.1)
    """
    return round(1 - taken / limit, 2)


def _headroom_swept(report: SweepReport, context: EvidenceContext) -> float | None:
    """Return what the smallest measured batch of at least the rows in use, or else of the knee, leaves free."""
    rows = context.known.get("batch") or report.knee
    larger = [] if rows is None else [point for point in fitting(report.points) if point.rows >= rows]
    sizes = [point.memory for point in larger if point.memory is not None]
    return _free_fraction(sizes[0], report.limit) if sizes and report.limit else None


def _headroom_of_epochs(report: MemoryCurve, _context: EvidenceContext) -> float | None:
    limits = [(sample.peak, sample.recommended) for sample in report.samples if sample.peak and sample.recommended]
    return min((_free_fraction(peak, most * (report.limit or 1.0)) for peak, most in limits), default=None)


def _memory_verdict(report: MemoryCurve, context: EvidenceContext) -> str:
    return replace(report, growth_threshold=context.gates.memory_growth).verdict


def _memory_growth(report: MemoryCurve, context: EvidenceContext) -> float | None:
    """Return the growth; a curve that grows has the pace that shows it."""
    trend = report.trend
    return trend.steepest if _memory_verdict(report, context) == GROWING else trend.growth


def _agreement(report: ParityReport, _context: EvidenceContext) -> float | None:
    return report.spans.agreement if report.spans.all else None


def _recall_loss(report: ParityReport, _context: EvidenceContext) -> float | None:
    return max(0.0, report.gold[0].recall - report.gold[1].recall) if report.gold else None


def _keeps_entities(report: PrecisionVerdict, context: EvidenceContext) -> bool:
    against = any(refusal.conclusive for refusal in report.refusals)
    same = report.parity.spans.agreement >= context.gates.entity_agreement
    return same and not report.parity.non_finite_tokens and not against


def _agreement_reduced(report: PrecisionVerdict, context: EvidenceContext) -> float | None:
    """Return the agreement in a reduced type that keeps the entities: then the device does; another one tells of the type alone."""
    return _agreement(report.parity, context) if _keeps_entities(report, context) else None


def _refused_dtype(report: PrecisionVerdict, context: EvidenceContext) -> str | None:
    compared = report.parity.spans.all or report.refuted
    return report.parity.dtype if compared and not _keeps_entities(report, context) else None


def _divergence_source(report: LossParity, _context: EvidenceContext) -> tuple[str, ...]:
    return (f"from step {report.divergence_step}",) if report.divergence_step else ()


def _fallen(outcome: str) -> Reader:
    """Return the reader of the operators that had an outcome on MPS; ``None`` if nothing was computed there."""

    def read(report: Profile | FallbackLog, _context: EvidenceContext) -> tuple[str, ...] | None:
        if not _is_of_mps(report):
            return None
        entries = report.fallbacks if isinstance(report, Profile) else report.entries
        return tuple(sorted({entry.operator for entry in entries if entry.outcome == outcome}))

    return read


def _is_of_mps(report: Profile | FallbackLog) -> bool:
    return (
        parse_device_argument(report.device).has_fallbacks
        if isinstance(report, Profile)
        else bool(report.operators_on_mps)
    )


def _calls_that_fell(report: Profile | FallbackLog, _context: EvidenceContext) -> float | None:
    if not _is_of_mps(report):
        return None
    return report.fallback_fraction if isinstance(report, Profile) else min(1.0, report.count / report.operators_on_mps)


def _time_that_fell(report: Profile, context: EvidenceContext) -> float | None:
    """Return the share of the time, only if it is beyond its gate.

    Times are those of torch's profiler, which counts the copies elsewhere: a small share would prove nothing.
    """
    total = sum(operator.seconds for operator in report.operators)
    if not total or report.simulated or not _is_of_mps(report):
        return None
    names = {entry.operator.split(".")[0] for entry in report.fallbacks if entry.outcome == FELL_BACK}
    share = sum(operator.seconds for operator in report.operators if operator.operator in names) / total
    return share if share > context.gates.fallback_time else None


def _foretold(name: str) -> Reader:
    """Return the reader of what a forecast says of operators; of a training, only one with a training step shows none."""

    def read(report: Forecast, context: EvidenceContext) -> tuple[str, ...] | None:
        not_trained = context.task == TRAINING and all(row.phase == INFERENCE for row in report.rows)
        operators: tuple[str, ...] = getattr(report, name)
        return operators or (None if not_trained else ())

    return read


# The doctor's findings on whether a device computes at all, and on states that spoil times.
_COMPUTES = frozenset({COMPUTATION, *REQUIRED_DTYPES})
_STATES = frozenset(condition.name for condition in CONDITIONS)


def _bug_names(report: DoctorReport) -> frozenset[str]:
    """Return the names of the known errors; none if nothing was computed, because their file imports torch."""
    if any(finding.name == COMPUTATION and finding.status == NOT_APPLICABLE for finding in report.findings):
        return frozenset()
    from ..checks.doctor.silent_errors import KNOWN_BUGS

    return frozenset(bug.name for bug in KNOWN_BUGS)


def _device_faults(report: DoctorReport, _context: EvidenceContext) -> tuple[str, ...]:
    return tuple(finding.name for finding in report.findings if finding.status == FAILED and finding.name in _COMPUTES)


def _doctor_failures(report: DoctorReport, _context: EvidenceContext) -> tuple[str, ...]:
    others = _COMPUTES | _bug_names(report)
    return tuple(finding.name for finding in report.findings if finding.status == FAILED and finding.name not in others)


def _silent_errors(report: DoctorReport, _context: EvidenceContext) -> tuple[str, ...] | None:
    names = _bug_names(report)
    bugs = tuple(
        finding.name for finding in report.findings if finding.status in {FAILED, WARNING} and finding.name in names
    )
    looked = any(finding.name == SILENT_ERRORS and finding.status != NOT_APPLICABLE for finding in report.findings)
    return bugs if bugs or looked else None


def _states_of_doctor(report: DoctorReport, _context: EvidenceContext) -> tuple[str, ...]:
    return _slow_states(finding for finding in report.findings if finding.name in _STATES)


def _states_of_signals(report: SystemStatus, _context: EvidenceContext) -> tuple[str, ...]:
    return _slow_states(report.findings())


def _slow_states(findings: Iterable[Finding]) -> tuple[str, ...]:
    return tuple(str(finding) for finding in findings if finding.status == WARNING)


def _metric(
    label: str, unit: Unit, reads: Mapping[type, Reader] | None = None, gate: Gate | None = None, default: Any = None
) -> Any:
    """Return a field that is a metric."""
    return field(default=default, metadata={"metric": Metric(label, unit, reads or {}, gate)})


@dataclass(frozen=True, repr=False)
class Evidence(Displayable):
    """Metrics of a device at work; ``None`` if something was not measured, never a guess. Shares are fractions.

    Attributes:
        models: By which names the reports call the model.
        device: Where the work was done, as torch spells it.
        task: ``"annotation"``, ``"inference"``, ``"training"`` or ``"generation"``.
        speedup_low: How many times as fast as the CPU it is, the lower end of the interval.
        speedup: The middle.
        speedup_high: The upper end.
        utilization: How busy the device was, its utilization when idle taken off.
        shares: How much of a step each phase takes, such as ``{"data": 0.2, "forward": 0.8}``.
        synchronizations: Where a step waits for the device, as places of code.
        tiny_batch: Whether starting operators takes most of the device's time.
        batch_tokens: How many tokens a batch in use may have, if texts are annotated.
        batch: How many rows a batch has that is in use; of annotation, rows like those of the sweep.
        knee: How many it should have.
        best_batch: How many it has where the throughput is largest.
        knee_gain: How much more throughput there is at the knee than at the batch in use; 0.1 is a tenth.
        out_of_memory_at: The smallest number of rows that did not fit; 0 if all fitted that were tried.
        headroom: How much of the memory limit stays free at the batch in use.
        memory_growth: The growth over ten epochs.
        memory_verdict: What the memory curve says: ``"flat"``, ``"growing"``, ``"sawtooth"`` or ``"too short to tell"``.
        entity_agreement: How many of the entities are the same as on the CPU in float32.
        logits: The largest difference of a logit from the CPU, in float32.
        non_finite_tokens: How many tokens became NaN or infinity.
        recall_loss: How much of the recall of gold entities is lost.
        gradients: The largest relative difference of a gradient from the CPU, in float32.
        divergence_source: Where training parts from the CPU's by more than rounding explains; empty if it does not.
        refused_dtype: A reduced type in which the model does not keep its entities.
        refused_operators: What does not run on MPS at all.
        fallback_operators: The operators that fall back to the CPU.
        fallback_time: How much of the time they take.
        fallback_calls: How many of the operators called with tensors of MPS they are.
        device_faults: What the doctor saw the device compute wrongly, or not at all.
        silent_errors: The known silent errors that the doctor saw on this device.
        doctor_failures: What else the doctor found that failed.
        states: States of the computer that spoil times, such as ``"power, warning: battery"``.
        texts_per_second: How many texts, or rows, are done in a second.
        num_texts: How many there are to do.
        simulated: Whether any of it is from a simulated device.

    Raises:
        ConfigurationError: For a value that its metric cannot have.

    Example:
        >>> Evidence(device="mps", task="annotation", texts_per_second=50.0, num_texts=360_000).hours
        2.0
    """

    models: tuple[str, ...] | None = _metric("names of the model", NAMES)
    device: str | None = _metric("device", WORDS)
    task: str | None = _metric("task", WORDS)
    speedup_low: float | None = _metric("speed-up over the CPU, at least", TIMES, {DeviceMetrics: "speedup.low"})
    speedup: float | None = _metric(
        "speed-up over the CPU",
        TIMES,
        {DeviceMetrics: "speedup.median"},
        Gate(
            0.22,
            "how much faster than the CPU a device must be",
            "a smaller gain is not worth a second device; if that also waits, look at data and batch first",
            RUNBOOK,
            largest=10.0,
            area=Area.SPEED,
            at_least=True,
        ),
    )
    speedup_high: float | None = _metric("speed-up over the CPU, at most", TIMES, {DeviceMetrics: "speedup.high"})
    utilization: float | None = _metric(
        "utilization",
        SHARE,
        {DeviceMetrics: "utilization"},
        Gate(
            0.18,
            "a device that is busy for less than this waits; what it shows when idle is subtracted",
            "a device that waits is not slow: its data or its batch are",
            RUNBOOK,
            at_least=True,
        ),
    )
    phase_fractions: Mapping[str, float] | None = _metric(
        "phases of a step", PHASES, {DeviceMetrics: "phase_fractions", Profile: "shares"}
    )
    synchronizations: tuple[str, ...] | None = _metric(
        "places where a step waits for the device", NAMES, {Profile: _synchronizations}
    )
    tiny_batch: bool | None = _metric(
        "batch so small that starting operators takes most of the time", YES_NO, {Profile: _is_tiny_batch}
    )
    batch_tokens: int | None = _metric(
        "tokens that a batch may have", COUNT, {Comparison: "batch_tokens", Profile: "batch_tokens"}
    )
    batch: int | None = _metric(
        "rows in use",
        COUNT,
        {Comparison: _batch_compared, Profile: _batch_profiled, SweepReport: _batch_of_tokens},
    )
    knee: int | None = _metric("rows at the knee", COUNT, {SweepReport: "knee"})
    best_batch: int | None = _metric("rows at the highest throughput", COUNT, {SweepReport: _best_batch})
    knee_gain: float | None = _metric(
        "more throughput at the knee",
        SHARE,
        {SweepReport: _knee_gain},
        Gate(
            0.1,
            "how much faster the best batch of a sweep may be than the batch in use",
            f"a sweep itself leaves {100 * MIN_KNEE_GAIN:.0f} %, and a gain near that is hardly worth another batch",
            largest=10.0,
            area=Area.BATCH,
        ),
    )
    out_of_memory_at: int | None = _metric("out of memory at rows", COUNT, {SweepReport: _out_of_memory_at})
    headroom: float | None = _metric(
        "memory limit that stays free",
        SHARE,
        {SweepReport: _headroom_swept, MemoryCurve: _headroom_of_epochs},
        Gate(
            HEADROOM_FRACTION,
            "how much of the memory limit must stay free at the batch in use",
            "a longer text or a new shape then still fits",
            area=Area.MEMORY,
            at_least=True,
        ),
    )
    memory_growth: float | None = _metric(
        "growth over ten epochs",
        SHARE,
        {MemoryCurve: _memory_growth},
        Gate(
            GROWTH_THRESHOLD,
            f"memory that grows by more than this over {GROWTH_EPOCHS} epochs is retained",
            "caches are emptied after each epoch, so something holds what still grows",
            RUNBOOK,
            largest=10.0,
            area=Area.MEMORY,
        ),
    )
    memory_verdict: str | None = _metric("memory curve", WORDS, {MemoryCurve: _memory_verdict})
    entity_agreement: float | None = _metric(
        "entities that are the same",
        SHARE,
        {ParityReport: _agreement, PrecisionVerdict: _agreement_reduced},
        Gate(
            MIN_SPAN_AGREEMENT,
            "how many of the entities must be the same as on the CPU",
            "near ties do not explain that fewer are the same",
            PARITY,
            area=Area.NUMBERS,
            at_least=True,
            beyond="fewer than {} of the entities are the same as on the CPU",
        ),
    )
    logits: float | None = _metric(
        "largest difference of a logit",
        DIFFERENCE,
        {ParityReport: "logits.maximum"},
        Gate(
            TOLERANCES["float32"].logits or 0.0,
            "how far logits in float32 may be from those on the CPU; further if all entities are the same",
            SEEN,
            PARITY,
            largest=1e6,
            area=Area.NUMBERS,
            beyond="logits differ by more than {}",
        ),
    )
    non_finite_tokens: int | None = _metric("tokens with NaN or infinity", COUNT, {ParityReport: "non_finite_tokens"})
    recall_loss: float | None = _metric(
        "recall lost",
        SHARE,
        {ParityReport: _recall_loss},
        Gate(
            MAX_RECALL_LOSS,
            "how much recall of the gold entities may be lost",
            "a model that finds less is another model",
            PARITY,
            area=Area.NUMBERS,
            beyond="more than {} of the recall is lost",
        ),
    )
    gradients: float | None = _metric(
        "largest relative difference of a gradient",
        DIFFERENCE,
        {ParityReport: "gradients.largest"},
        Gate(
            TOLERANCES["float32"].gradients or 0.0,
            "how far gradients in float32 may be from those on the CPU, relatively",
            SEEN,
            PARITY,
            largest=1e6,
            area=Area.NUMBERS,
            beyond="gradients by more than {}",
        ),
    )
    divergence_source: tuple[str, ...] | None = _metric(
        "training parts from the CPU's", NAMES, {LossParity: _divergence_source}
    )
    refused_dtype: str | None = _metric(
        "type in which the entities are not kept",
        WORDS,
        {PrecisionVerdict: _refused_dtype},
    )
    refused_operators: tuple[str, ...] | None = _metric(
        "operators that MPS refuses",
        NAMES,
        {Profile: _fallen(REFUSED), FallbackLog: _fallen(REFUSED), Forecast: _foretold("unsupported")},
    )
    fallback_operators: tuple[str, ...] | None = _metric(
        "operators that fell back",
        NAMES,
        {Profile: _fallen(FELL_BACK), FallbackLog: _fallen(FELL_BACK), Forecast: _foretold("cpu_operators")},
    )
    fallback_time: float | None = _metric(
        "time spent in what fell back",
        SHARE,
        {Profile: _time_that_fell},
        Gate(
            0.05,
            "how much of the time operators that fall back to the CPU may take",
            "if they take less, computing them elsewhere gains little",
            area=Area.FALLBACKS,
        ),
    )
    fallback_calls: float | None = _metric(
        "calls that fell back",
        SHARE,
        {Profile: _calls_that_fell, FallbackLog: _calls_that_fell},
        Gate(
            0.01,
            "how many of the calls on MPS may fall back, if their times are not known",
            "each waits for the GPU and copies there and back, and starting an operator alone takes 25 to 110 microseconds",
            "pytorch#82707, and a choice of this toolkit",
            area=Area.FALLBACKS,
        ),
    )
    device_faults: tuple[str, ...] | None = _metric("computed wrongly", NAMES, {DoctorReport: _device_faults})
    silent_errors: tuple[str, ...] | None = _metric(
        "known silent errors that were seen", NAMES, {DoctorReport: _silent_errors}
    )
    doctor_failures: tuple[str, ...] | None = _metric("failed in nb.doctor()", NAMES, {DoctorReport: _doctor_failures})
    slow_conditions: tuple[str, ...] | None = _metric(
        "states that spoil times", NAMES, {SystemStatus: _states_of_signals, DoctorReport: _states_of_doctor}
    )
    texts_per_second: float | None = _metric(
        "texts, or rows", RATE, {DeviceMetrics: "rows_per_second", Profile: _rate_profiled}
    )
    num_texts: int | None = _metric("texts to do", COUNT)
    simulated: bool = _metric("simulated", YES_NO, default=False)

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            unit = METRICS[name].unit
            if value is not None and not _fits(unit, value):
                remedy = f"Pass {_EXPECTED.get(unit, 'a finite number')}, or None if it was not measured."
                raise ConfigurationError(f"{name} cannot be {describe_value(value)}.", remedy)
        if self.task not in {None, *TASKS}:
            what = f"task cannot be {describe_value(self.task)}."
            raise ConfigurationError(what, f"Use one of {', '.join(TASKS)}.")

    @property
    def kind(self) -> str | None:
        """What kind of device it is: ``"mps"``, ``"cuda"`` or ``"cpu"``."""
        return parse_device_argument(self.device).type if self.device else None

    @property
    def data_fraction(self) -> float | None:
        """How much of a step is spent on waiting for data."""
        return None if self.phase_fractions is None else self.phase_fractions.get(DATA)

    @property
    def transfer_fraction(self) -> float | None:
        """How much of a step is spent on copies to the device."""
        return None if self.phase_fractions is None else self.phase_fractions.get(TRANSFER)

    @property
    def hours(self) -> float | None:
        """How many hours the texts that are to do take."""
        if not self.texts_per_second or self.num_texts is None:
            return None
        return self.num_texts / self.texts_per_second / SECONDS_OF_AN_HOUR

    @property
    def measured(self) -> dict[str, Any]:
        """The metrics that are known, by their names."""
        return {name: value for name, value in vars(self).items() if value is not None and name != "simulated"}

    def to_report(self) -> Report:
        """Return which metrics are known; they themselves are among the figures."""
        names = ", ".join(self.measured) or "nothing"
        return Report("Evidence", (f"Measured: {names}.",), metrics=(Table("", ("figure", "value"), self.rows()),))

    def rows(self) -> tuple[tuple[str, str], ...]:
        """Return the metrics that are known as people read them, one in a row; phases are rows of their own."""
        rows = [
            (metric.label, format_with_unit(metric.unit, value))
            for name, metric in METRICS.items()
            if name not in {"phase_fractions", "simulated"} and (value := getattr(self, name)) is not None
        ]
        rows += [
            (f"step spent on {phase}", format_with_unit(SHARE, share))
            for phase, share in (self.phase_fractions or {}).items()
            if phase not in {DATA, TRANSFER}
        ]
        return tuple(rows)


# The metrics that are computed from another one, behind which they are shown.
COMPUTED = {
    "phase_fractions": {
        "data_fraction": Metric(
            "step spent on waiting for data",
            SHARE,
            gate=Gate(
                MAX_DATA_FRACTION,
                "how much of a step may be spent on waiting for data",
                "without the wait, a third more steps are done",
                area=Area.DATA,
            ),
        ),
        "transfer_fraction": Metric(
            "step spent on copies to the device",
            SHARE,
            gate=Gate(
                0.25,
                "how much of a step may be spent on copies to the device",
                "without them, a third more steps are done",
                area=Area.DATA,
            ),
        ),
    },
    "num_texts": {
        "hours": Metric(
            "time for all texts",
            HOURS,
            gate=Gate(
                24.0,
                "how long a run on one computer may take",
                "one computer can be spared for a day",
                largest=1e5,
                area=Area.SPEED,
            ),
        ),
    },
}

METRICS: dict[str, Metric] = {}
for _field in fields(Evidence):
    METRICS[_field.name] = _field.metadata["metric"]
    METRICS |= COMPUTED.get(_field.name, {})

GATES: dict[str, Gate] = {name: metric.gate for name, metric in METRICS.items() if metric.gate}

# The reports that a verdict reads.
REPORTS: tuple[type, ...] = tuple({kind for metric in METRICS.values() for kind in metric.reads} - {DeviceMetrics})


@dataclass(frozen=True, repr=False)
class Thresholds:
    """A value for each gate, in the order in which they are shown."""

    speedup: float = GATES["speedup"].default
    utilization: float = GATES["utilization"].default
    entity_agreement: float = GATES["entity_agreement"].default
    recall_loss: float = GATES["recall_loss"].default
    logits: float = GATES["logits"].default
    gradients: float = GATES["gradients"].default
    memory_growth: float = GATES["memory_growth"].default
    headroom: float = GATES["headroom"].default
    data_fraction: float = GATES["data_fraction"].default
    transfer_fraction: float = GATES["transfer_fraction"].default
    knee_gain: float = GATES["knee_gain"].default
    fallback_time: float = GATES["fallback_time"].default
    fallback_calls: float = GATES["fallback_calls"].default
    hours: float = GATES["hours"].default

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            check_number(name, value, GATES[name].largest, example=f"{GATES[name].default:g}")

    def shown(self) -> dict[str, str]:
        """Return each threshold as people read it, by its name."""
        return {name: format_with_unit(METRICS[name].gate_unit, value) for name, value in vars(self).items()}
