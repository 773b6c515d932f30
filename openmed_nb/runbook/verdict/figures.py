"""What reports say: of their run and in numbers, for a logbook, and as evidence, for a verdict. Each kind is read here alone."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

from ..._render.display import FAILED, NOT_APPLICABLE, OK, WARNING, Finding
from ..._utils.text import short_type_name
from ...devices.machine import shows_simulated
from ...devices.request import kind_of
from ...errors import ConfigurationError
from ...training.curve import GROWING, MemoryCurve
from ...training.loader import LoaderCheck
from ..bench.comparison import Comparison, DeviceFigures
from ..bench.profile_report import SYNCHRONISATION, TINY_BATCH, Profile
from ..bench.sweep import SweepReport
from ..bench.sweep_knee import LARGEST, TIME, Point, best_of, fitting
from ..bench.workloads import ANNOTATION, TRAINING_STEP
from ..checks.doctor.checks import COMPUTATION, NECESSARY, SILENT_ERRORS
from ..checks.doctor.report import DoctorReport
from ..checks.operators.fallbacks import FELL_BACK, REFUSED, Fallback, FallbackLedger
from ..checks.operators.forecast import Forecast
from ..checks.precision.report import ParityReport
from ..checks.precision.trajectory import LossParity
from ..checks.precision.validation import PrecisionVerdict
from ..records.logbook.privacy import short_path
from ..records.logbook.sections import ReportFigures, Run, numbers
from ..records.signals import CONDITIONS, Signals
from .evidence import INFERENCE, TRAINING
from .gates import Gates

REPORTS = "Pass what nb.sweep(), nb.compare(), nb.runbook.profile(), nb.runbook.parity(), nb.training.last_curve() or the like returned."

# The doctor's findings on whether a device computes at all, on known errors, and on states that spoil times.
COMPUTES = frozenset({COMPUTATION, *NECESSARY})
STATES = frozenset(condition.name for condition in CONDITIONS)


@dataclass(frozen=True)
class Context:
    """What a verdict reads a report for: a device and a task, by some gates, after other reports."""

    device: str | None
    task: str | None
    gates: Gates
    known: Mapping[str, Any]


def figures_of(report: Any) -> ReportFigures:
    """Return what a logbook keeps of a report: numbers, and never a text.

    Reports of rooms above this one say it themselves, in ``logbook_figures``.

    Raises:
        ConfigurationError: For anything that is not a report for a logbook.

    Example:
        >>> figures_of(LoaderCheck("cpu", 0.03, 0.01, 2, 20)).run.workers
        2
    """
    found = next((figures for kind, figures, _ in READERS if isinstance(report, kind)), None)
    read: FiguresReader | None = found or getattr(type(report), "logbook_figures", None)
    if read is None:
        raise ConfigurationError(f"{short_type_name(report)} is not a report for a logbook.", REPORTS)
    return read(report)


def _run(report: Comparison | Profile | SweepReport, batch_size: int | None = None, **others: Any) -> Run:
    facts: dict[str, Any] = {name: getattr(report, name) for name in ("task", "workers", "dtype", "row_shape")}
    return Run(batch_size=batch_size, **facts, **others)


def _batch(report: Comparison | Profile, rows: int) -> dict[str, Any]:
    """Return the batch in use: annotation cuts its texts by tokens, so that its rows are no rows of the device."""
    return {"batch": None if report.task == ANNOTATION else rows, "batch_tokens": report.batch_tokens}


def _comparison_figures(report: Comparison) -> ReportFigures:
    values = {
        f"{one.device}_{name}": value
        for one in report.devices
        for name, value in {**_of_device(one), **_phases(one.shares)}.items()
    }
    alone = report.devices[0].device if len(report.devices) == 1 else None
    run = _run(report, report.devices[0].rows)
    return ReportFigures("comparison", short_path(report.name), alone, None, report.simulated, numbers(values), run)


def _of_device(one: DeviceFigures) -> dict[str, Any]:
    ends = {"speed_up": "middle", "speed_up_low": "low", "speed_up_high": "high"}
    return {
        "seconds": one.seconds,
        "rows_per_second": one.rows_per_second,
        "utilisation": one.utilisation,
        **{name: one.speed_up and getattr(one.speed_up, end) for name, end in ends.items()},
    }


def _phases(shares: Mapping[str, float]) -> dict[str, float]:
    return {f"{phase}_share": share for phase, share in shares.items()}


def _comparison_evidence(report: Comparison, context: Context) -> dict[str, Any]:
    here = report.of(context.device or "cpu")
    measured = numbers(_of_device(here))
    named = ("speed_up_low", "speed_up", "speed_up_high", "utilisation")
    return {
        **{name: measured.get(name) for name in named},
        "shares": here.shares,
        **_batch(report, here.rows),
        "texts_per_second": measured.get("rows_per_second"),
    }


def _profile_figures(report: Profile) -> ReportFigures:
    values = {
        "seconds": report.seconds,
        "data_only_seconds": report.data_only,
        "compute_only_seconds": report.compute_only,
        "device_seconds": report.device_seconds,
        "operators_per_step": report.operators_per_step,
        "synchronisations_per_step": sum(one.count for one in report.synchronisations),
        "fallbacks_per_step": report.fallbacks_per_step,
        **_phases(report.shares),
    }
    run, name = _run(report, report.rows), short_path(report.name)
    return ReportFigures("profile", name, report.device, None, report.simulated, numbers(values), run)


def _profile_evidence(report: Profile, context: Context) -> dict[str, Any]:
    status = {one.name: one.status for one in report.findings}
    waits = tuple(str(one) for one in report.synchronisations if one.place.is_own and one.reason != "batch")
    tiny = status[TINY_BATCH]
    return {
        "shares": report.shares,
        **_batch(report, report.rows),
        "texts_per_second": report.rows / report.seconds if report.seconds else None,
        "synchronisations": waits if status[SYNCHRONISATION] == WARNING else (),
        "tiny_batch": None if tiny == NOT_APPLICABLE else tiny == WARNING,
        **(_fallbacks_of_profile(report, context.gates) if kind_of(report.device) == "mps" else {}),
    }


def _fallbacks_of_profile(report: Profile, gates: Gates) -> dict[str, Any]:
    """Return what fell back in the steps that were watched; times only where they are beyond their gate.

    They are those of torch's profiler, which counts the copies elsewhere: a small share would prove nothing.
    """
    fallen = _fallen(report.fallbacks)
    names = {name.split(".")[0] for name in fallen["fallback_operators"]}
    total = sum(one.seconds for one in report.operators)
    share = sum(one.seconds for one in report.operators if one.operator in names) / total if total else 0.0
    much = share > gates.fallback_time and not report.simulated
    return {**fallen, "fallback_calls": report.fallback_share, "fallback_time": share if much else None}


def _fallen(entries: Sequence[Fallback]) -> dict[str, tuple[str, ...]]:
    outcomes = {"fallback_operators": FELL_BACK, "refused_operators": REFUSED}
    return {
        name: tuple(sorted({one.operator for one in entries if one.outcome == outcome}))
        for name, outcome in outcomes.items()
    }


def _ledger_figures(report: FallbackLedger) -> ReportFigures:
    values = {"calls": report.count, "operators": len(report.operators)}
    device = "mps" if report.operators_on_mps else None
    return ReportFigures("fallbacks", "operators", device, None, report.simulated, numbers(values))


def _ledger_evidence(report: FallbackLedger, _context: Context) -> dict[str, Any]:
    called = report.operators_on_mps
    return {**_fallen(report.entries), "fallback_calls": min(1.0, report.count / called)} if called else {}


def _forecast_figures(report: Forecast) -> ReportFigures:
    values = {"operators": len(report.operators), "leaving": len(report.leaving), "refused": len(report.refused)}
    return ReportFigures("forecast", short_path(report.model), None, None, report.simulated, numbers(values))


def _forecast_evidence(report: Forecast, context: Context) -> dict[str, Any]:
    """Return what leaves MPS; that nothing does is not known of a training without a look at a training step."""
    not_trained = context.task == TRAINING and all(row.phase == INFERENCE for row in report.rows)
    nothing = None if not_trained else ()
    return {"fallback_operators": report.leaving or nothing, "refused_operators": report.refused or nothing}


def _parity_figures(report: ParityReport) -> ReportFigures:
    spans, logits = report.spans, report.logits
    values = {
        **{name: getattr(spans, name) for name in ("exact", "moved", "relabelled", "missing", "extra")},
        "entity_agreement": spans.agreement,
        "texts": report.texts,
        "tokens": report.tokens,
        "other_labels": report.other_labels,
        "not_numbers": report.not_numbers,
        "logits_maximum": logits.maximum,
        "logits_median": logits.median,
    }
    subject, simulated = f"{short_path(report.model)} in {report.dtype}", shows_simulated(report.device)
    return ReportFigures("parity", subject, report.device, report.status, simulated, numbers(values))


def _parity_evidence(report: ParityReport, context: Context) -> dict[str, Any]:
    """Return what a comparison with the CPU in float32 shows; a reduced type that fails speaks against the type alone."""
    agreement = report.spans.agreement if report.spans.all else None
    if report.dtype != "float32":
        agrees = agreement is not None and agreement >= context.gates.entity_agreement and not report.not_numbers
        refused = None if agrees or agreement is None else report.dtype
        return {"entity_agreement": agreement if agrees else None, "refused_dtype": refused}
    gold, gradients = report.gold, report.gradients
    differences = numbers({"logits": report.logits.maximum, "gradients": gradients and gradients.largest})
    return {
        "entity_agreement": agreement,
        "not_numbers": report.not_numbers,
        "recall_loss": gold and max(0.0, gold[0].recall - gold[1].recall),
        **differences,
    }


def _loss_figures(report: LossParity) -> ReportFigures:
    values = {
        "steps": report.steps,
        "parted": report.parted,
        "drift": max(report.drift),
        "tolerance": report.tolerance[report.steps - 1],
        "first_loss": report.candidate[0],
        "last_loss": report.candidate[-1],
    }
    subject, run = f"{short_path(report.model)} in {report.dtype}", Run(TRAINING_STEP)
    return ReportFigures("losses", subject, report.device, report.status, report.simulated, numbers(values), run)


def _loss_evidence(report: LossParity, _context: Context) -> dict[str, Any]:
    where = (str(report.origin),) if report.origin else (f"from step {report.parted}",)
    return {"training_parts": where if report.parted else ()}


def _precision_figures(report: PrecisionVerdict) -> ReportFigures:
    parity = _parity_figures(report.parity)
    gain = report.certificate and report.certificate.evidence.speed_up
    values = numbers({**parity.values, "speed_up": gain, "refusals": len(report.refusals)})
    return replace(parity, report="precision", values=values, verdict="accepted" if report.accepted else "refused")


def _precision_evidence(report: PrecisionVerdict, context: Context) -> dict[str, Any]:
    if any(one.against for one in report.refusals):
        return {"refused_dtype": report.parity.dtype}
    return _parity_evidence(report.parity, context)


def _curve_figures(report: MemoryCurve) -> ReportFigures:
    trend = report.trend
    values = {
        "epochs": len(report.boundaries),
        "growth_over_ten_epochs": trend.growth,
        "growth_in_all": trend.total,
        "first_bytes": trend.baseline,
        "last_bytes": trend.last,
    }
    peaks = [size for one in report.samples for size in (one.peak, one.allocated) if size is not None]
    where, run = (report.measure, report.device, report.verdict), Run(peak_memory_bytes=max(peaks, default=None))
    return ReportFigures("memory", *where, report.simulated, numbers(values), run)


def _curve_evidence(report: MemoryCurve, context: Context) -> dict[str, Any]:
    curve = replace(report, gate=context.gates.memory_growth)
    limits = [(one.peak, one.recommended) for one in curve.samples if one.peak and one.recommended]
    free = (free_share(peak, most * (curve.limit or 1.0)) for peak, most in limits)
    # A curve that grows has the pace that shows it.
    growth = numbers({"memory_growth": curve.trend.steepest if curve.verdict == GROWING else curve.trend.growth})
    return {"memory_verdict": curve.verdict, **growth, "headroom": min(free, default=None)}


def free_share(taken: int, limit: float) -> float:
    """Return how much of a limit stays free, in whole percent: memory is not known better, and no batch misses a gate by less.

    Example:
        >>> free_share(90, 100), free_share(903, 1000)
        (0.1, 0.1)
    """
    return round(1 - taken / limit, 2)


def _doctor_figures(report: DoctorReport) -> ReportFigures:
    values = {status: sum(one.status == status for one in report.findings) for status in (OK, WARNING, FAILED)}
    return ReportFigures("doctor", "computer", None, report.status, report.simulated, numbers(values))


def _bug_names(report: DoctorReport) -> frozenset[str]:
    """Return the names of the known errors; none if nothing was computed, because their file imports torch."""
    if any(one.name == COMPUTATION and one.status == NOT_APPLICABLE for one in report.findings):
        return frozenset()
    from ..checks.doctor.silent_errors import BUGS

    return frozenset(bug.name for bug in BUGS)


def _doctor_evidence(report: DoctorReport, _context: Context) -> dict[str, Any]:
    wrong = [one for one in report.findings if one.status in {FAILED, WARNING}]
    failed = [one.name for one in wrong if one.status == FAILED]
    names = _bug_names(report)
    bugs = tuple(one.name for one in wrong if one.name in names)
    looked = bugs or any(one.name == SILENT_ERRORS and one.status != NOT_APPLICABLE for one in report.findings)
    return {
        "device_faults": tuple(name for name in failed if name in COMPUTES),
        "silent_errors": bugs if looked else None,
        "doctor_failures": tuple(name for name in failed if name not in COMPUTES | names),
        "states": _slow_states(one for one in report.findings if one.name in STATES),
    }


def _signals_evidence(report: Signals, _context: Context) -> dict[str, Any]:
    return {"states": _slow_states(report.findings())}


def _slow_states(findings: Iterable[Finding]) -> tuple[str, ...]:
    return tuple(str(one) for one in findings if one.status == WARNING)


def _loader_figures(report: LoaderCheck) -> ReportFigures:
    values = {name: getattr(report, name) for name in ("data_seconds", "step_seconds", "waiting", "batches")}
    run = Run(workers=report.workers)
    return ReportFigures("loader", "batches", report.device, report.bottleneck, report.simulated, numbers(values), run)


def _sweep_figures(report: SweepReport) -> ReportFigures:
    knee, best = report.at_knee, report.best
    values = {
        "knee_rows": report.knee,
        "rows_per_second": knee and knee.throughput,
        "memory_bytes": knee and knee.memory,
        "first_seconds": knee and knee.first_seconds,
        "best_rows": best and best.rows,
        "best_rows_per_second": best and best.throughput,
        "limit_bytes": report.limit,
        "points": len(report.points),
        "out_of_memory_points": sum(not one.fits for one in report.points),
    }
    run = _run(report, length=report.length, peak_memory_bytes=knee.memory if knee else None)
    name = short_path(report.name)
    return ReportFigures("sweep", name, report.device, None, report.simulated, numbers(values), run)


def _sweep_evidence(report: SweepReport, context: Context) -> dict[str, Any]:
    """Return what a sweep shows of the batch in use; its memory is that of the knee if that batch is not known."""
    batch, tokens = context.known.get("batch"), context.known.get("batch_tokens")
    if batch is None and tokens and report.length:
        batch = max(1, tokens // report.length)
    best, gain = best_of(report.points), _gain_at(report.points, report.knee, batch)
    # Throughput still rose at the end, and memory is not why: larger batches may be faster.
    cut_off = report.still_rising and report.stopped in {LARGEST, TIME}
    return {
        "batch": batch,
        "knee": report.knee,
        "best_batch": best.rows if best else None,
        "out_of_memory_at": min((point.rows for point in report.points if not point.fits), default=0),
        "knee_gain": None if cut_off and (gain or 0) <= context.gates.knee_gain else gain,
        "headroom": _headroom_at(report.points, report.limit, batch or report.knee),
    }


def _gain_at(points: Sequence[Point], knee: int | None, batch: int | None) -> float | None:
    here = None if batch is None else _throughput_at(points, batch)
    best = None if knee is None else _throughput_at(points, knee)
    return best / here - 1 if best and here else None


def _throughput_at(points: Sequence[Point], rows: int) -> float | None:
    """Return the throughput at a number of rows, on a line between those measured; ``None`` beyond them."""
    there = [(point.rows, point.speed) for point in fitting(points) if point.throughput]
    exact = dict(there).get(rows)
    between = (
        slow + (fast - slow) * (rows - few) / (many - few)
        for (few, slow), (many, fast) in pairwise(there)
        if few < rows < many
    )
    return next(between, None) if exact is None else exact


def _headroom_at(points: Sequence[Point], limit: int | None, rows: int | None) -> float | None:
    """Return how much of the limit the smallest measured batch of at least these rows leaves free."""
    larger = [] if rows is None else [point for point in fitting(points) if point.rows >= rows]
    sizes = [point.memory for point in larger if point.memory is not None]
    return free_share(sizes[0], limit) if sizes and limit else None


FiguresReader = Callable[[Any], ReportFigures]
EvidenceReader = Callable[[Any, Context], dict[str, Any]]

# In the order in which they count for a verdict: if two show the same figure, the first one does.
READERS: tuple[tuple[type, FiguresReader | None, EvidenceReader | None], ...] = (
    (Comparison, _comparison_figures, _comparison_evidence),
    (Profile, _profile_figures, _profile_evidence),
    (ParityReport, _parity_figures, _parity_evidence),
    (LossParity, _loss_figures, _loss_evidence),
    (PrecisionVerdict, _precision_figures, _precision_evidence),
    (SweepReport, _sweep_figures, _sweep_evidence),
    (MemoryCurve, _curve_figures, _curve_evidence),
    (FallbackLedger, _ledger_figures, _ledger_evidence),
    (Forecast, _forecast_figures, _forecast_evidence),
    (Signals, None, _signals_evidence),
    (DoctorReport, _doctor_figures, _doctor_evidence),
    (LoaderCheck, _loader_figures, None),
)
