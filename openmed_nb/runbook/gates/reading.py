"""What each report of the runbook tells a verdict: the one file that knows their attributes."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

from ...devices.request import kind_of
from ...training.curve import MemoryCurve
from ...training.verdict import (
    GATE_EPOCHS,
    GROWING,
    MOST_SIZES,
    SMALLEST_BASELINE,
    TOLERANCE,
    late_rise,
    lower_envelope,
    slope,
)
from ..comparison.comparison import Comparison
from ..doctor.checks import NECESSARY
from ..doctor.report import DoctorReport, sentence_of
from ..doctor.silent_bugs import BUGS
from ..findings import FAILED, NOT_APPLICABLE, WARNING, Finding
from ..operators.fallbacks import FELL_BACK, REFUSED, Fallback, FallbackLedger
from ..operators.forecast import Forecast
from ..precision.gate import PrecisionVerdict
from ..precision.parity import ParityReport
from ..signals.values import CONDITIONS, Signals
from ..slices.judgement import SYNCHRONISATION, TINY_BATCH
from ..slices.profile import Profile
from ..sweep.points import Point, best_of, fitting
from ..sweep.report import SweepReport
from ..sweep.search import LARGEST, TIME
from ..workloads.workload import ANNOTATION
from .thresholds import Gates

COMPUTED = frozenset({"computation", *NECESSARY})
"""The doctor's findings that tell whether a device computes rightly at all."""

BUG_NAMES = frozenset(bug.name for bug in BUGS)
NO_BUG = "known silent errors"
STATES = frozenset(condition.name for condition in CONDITIONS)


@dataclass(frozen=True)
class Context:
    """What a report is read for.

    Attributes:
        device: The device of the verdict.
        gates: The thresholds.
        known: What other reports told already.
    """

    device: str | None
    gates: Gates
    known: Mapping[str, Any]


def of_comparison(report: Comparison, context: Context) -> dict[str, Any]:
    """Return what a comparison tells of a device."""
    here = report.of(context.device or "cpu")
    ends = {"speed_up_low": "low", "speed_up": "middle", "speed_up_high": "high"}
    return {
        **{name: here.speed_up and finite(getattr(here.speed_up, end)) for name, end in ends.items()},
        "utilisation": here.utilisation,
        "shares": here.shares,
        **batch_of(report, here.rows),
        "texts_per_second": here.rows_per_second,
    }


def of_profile(report: Profile, context: Context) -> dict[str, Any]:
    """Return what a profile tells of the steps, and of what holds them up."""
    status = {one.name: one.status for one in report.findings}
    waits = tuple(str(one) for one in report.synchronisations if one.place.is_own)
    tiny = status[TINY_BATCH]
    return {
        "shares": report.shares,
        **batch_of(report, report.rows),
        "texts_per_second": report.rows / report.seconds if report.seconds else None,
        "synchronisations": waits if status[SYNCHRONISATION] == WARNING else (),
        "tiny_batch": None if tiny == NOT_APPLICABLE else tiny == WARNING,
        **(of_fallbacks(report, context) if kind_of(report.device) == "mps" else {}),
    }


def batch_of(report: Comparison | Profile, rows: int) -> dict[str, Any]:
    """Return the batch in use: annotation cuts its texts by tokens, so that its rows are no rows of the device."""
    return {"batch": None if report.task == ANNOTATION else rows, "batch_tokens": report.batch_tokens}


def of_fallbacks(report: Profile, context: Context) -> dict[str, Any]:
    """Return what fell back in the steps that were watched; times only where they are beyond their gate.

    They are those of torch's profiler, which counts the copies elsewhere: a small share would prove nothing.
    """
    fell = by_outcome(report.fallbacks)[FELL_BACK]
    names = {name.split(".")[0] for name in fell}
    total = sum(one.seconds for one in report.operators)
    share = sum(one.seconds for one in report.operators if one.operator in names) / total if total else 0.0
    much = share > context.gates.fallback_time and not report.simulated
    return {
        "fallback_operators": fell,
        "refused_operators": by_outcome(report.fallbacks)[REFUSED],
        "fallback_calls": report.fallback_share,
        "fallback_time": share if much else None,
    }


def of_parity(report: ParityReport, context: Context) -> dict[str, Any]:
    """Return what a comparison with the CPU in float32 tells; a reduced type that fails speaks against the type alone."""
    agreement = report.spans.agreement if report.spans.all else None
    if report.dtype != "float32":
        agrees = agreement is not None and agreement >= context.gates.entity_agreement and not report.not_numbers
        return (
            {"entity_agreement": agreement}
            if agrees
            else {"refused_dtype": report.dtype if agreement is not None else None}
        )
    gold = report.gold
    return {
        "entity_agreement": agreement,
        "logits": finite(report.logits.maximum),
        "not_numbers": report.not_numbers,
        "recall_loss": gold and max(0.0, gold[0].recall - gold[1].recall),
        "gradients": report.gradients and finite(report.gradients.largest),
    }


def of_precision(report: PrecisionVerdict, context: Context) -> dict[str, Any]:
    """Return what the precision gate tells: a type that was accepted is right on the device too."""
    if any(one.against for one in report.refusals):
        return {"refused_dtype": report.parity.dtype}
    return of_parity(report.parity, context)


def of_curve(report: MemoryCurve, context: Context) -> dict[str, Any]:
    """Return what a memory curve tells, judged by the growth that is suspect here."""
    curve = replace(report, gate=context.gates.memory_growth)
    return {
        "memory_verdict": curve.verdict,
        "memory_growth": finite(growth_of(curve)),
        "headroom": free_of_curve(curve),
    }


def growth_of(curve: MemoryCurve) -> float:
    """Return the growth over ten epochs as a share: of a curve that grows, the pace that shows it.

    It may show in all sizes, in the smaller of each two, or in those at the end alone (``training.verdict.judge``).
    """
    if curve.verdict != GROWING:
        return curve.trend.growth
    sizes = [getattr(sample, curve.measure) for sample in curve.steady]
    every = -(-len(sizes) // MOST_SIZES)
    shares = [size / max(sizes[0], SMALLEST_BASELINE) for size in sizes]
    late = late_rise(shares, TOLERANCE)
    lately = (shares[-1] - shares[-1 - late]) / late if late else 0.0
    below = slope(lower_envelope(shares[::-every][::-1])) / every
    return max(curve.trend.growth, GATE_EPOCHS * below, GATE_EPOCHS * lately)


def free_of_curve(curve: MemoryCurve) -> float | None:
    """Return how much of the limit stayed free at the peak of a training, ``None`` where nobody counted."""
    limits = [(one.peak, one.recommended) for one in curve.samples if one.peak and one.recommended]
    return min((free_share(peak, most * (curve.limit or 1.0)) for peak, most in limits), default=None)


def of_ledger(report: FallbackLedger, _context: Context) -> dict[str, Any]:
    """Return what really fell back, where anything was computed on MPS."""
    called = report.to_dict()["operators_on_mps"]
    if not called:
        return {}
    names = by_outcome(report.entries)
    return {
        "fallback_operators": names[FELL_BACK],
        "refused_operators": names[REFUSED],
        "fallback_calls": min(1.0, report.count / called),
    }


def by_outcome(entries: Iterable[Fallback]) -> dict[str, tuple[str, ...]]:
    """Return the different operators that fell back, and those that were refused, in alphabetical order."""
    there = list(entries)
    return {
        outcome: tuple(sorted({one.operator for one in there if one.outcome == outcome}))
        for outcome in (FELL_BACK, REFUSED)
    }


def of_forecast(report: Forecast, _context: Context) -> dict[str, Any]:
    """Return what is expected to leave MPS, and what MPS refuses."""
    return {"fallback_operators": report.leaving, "refused_operators": report.refused}


def of_doctor(report: DoctorReport, _context: Context) -> dict[str, Any]:
    """Return what the doctor found of the device, of known errors, of states, and of anything else that failed."""
    wrong = [one for one in report.findings if one.status in {FAILED, WARNING}]
    failed = [one.name for one in wrong if one.status == FAILED]
    bugs = tuple(one.name for one in wrong if one.name in BUG_NAMES)
    looked = bugs or any(one.name == NO_BUG and one.status != NOT_APPLICABLE for one in report.findings)
    return {
        "device_faults": tuple(name for name in failed if name in COMPUTED),
        "silent_errors": bugs if looked else None,
        "doctor_failures": tuple(name for name in failed if name not in COMPUTED | BUG_NAMES),
        "states": states_of(one for one in report.findings if one.name in STATES),
    }


def of_signals(report: Signals, _context: Context) -> dict[str, Any]:
    """Return the states that spoil times."""
    return {"states": states_of(report.findings())}


def states_of(findings: Iterable[Finding]) -> tuple[str, ...]:
    """Return the states that make a computer slow, as lines that can be read alone."""
    return tuple(sentence_of(one) for one in findings if one.status == WARNING)


def of_sweep(report: SweepReport, context: Context) -> dict[str, Any]:
    """Return what a sweep tells of the batch in use; its memory is that of the knee where nobody says which that is."""
    batch, best = batch_in_use(report, context.known), best_of(report.points)
    gain = gain_at(report.points, report.knee, batch)
    return {
        "batch": batch,
        "knee": report.knee,
        "best_batch": best.rows if best else None,
        "out_of_memory_at": min((point.rows for point in report.points if not point.fits), default=0),
        "knee_gain": None if was_cut_off(report) and (gain or 0) <= context.gates.knee_gain else gain,
        "headroom": headroom_at(report.points, report.limit, batch or report.knee),
    }


def was_cut_off(report: SweepReport) -> bool:
    """Tell whether a sweep ended while throughput still rose, for another reason than memory: larger batches may be faster."""
    return report.still_rising and report.stopped in {LARGEST, TIME}


def batch_in_use(report: SweepReport, known: Mapping[str, Any]) -> int | None:
    """Return the batch in use in rows like those of a sweep; ``None`` where nobody says."""
    tokens: int | None = known.get("batch_tokens")
    rows: int | None = known.get("batch")
    return max(1, tokens // report.length) if rows is None and tokens and report.length else rows


def gain_at(points: Sequence[Point], knee: int | None, batch: int | None) -> float | None:
    """Return how much more throughput there is at the knee than at a batch; ``None`` where that cannot be told.

    Example:
        >>> points = [Point(8, 50.0), Point(16, 100.0), Point(32, 110.0)]
        >>> gain_at(points, 16, 8), gain_at(points, 16, 12), gain_at(points, 16, 64)
        (1.0, 0.33333333333333326, None)
    """
    there = None if batch is None else throughput_at(points, batch)
    best = None if knee is None else throughput_at(points, knee)
    return best / there - 1 if best and there else None


def throughput_at(points: Sequence[Point], rows: int) -> float | None:
    """Return the throughput at a number of rows, on a line between those measured; ``None`` beyond them."""
    there = [(point.rows, point.speed) for point in fitting(points) if point.throughput]
    exact = dict(there).get(rows)
    between = (
        slow + (fast - slow) * (rows - few) / (many - few)
        for (few, slow), (many, fast) in pairwise(there)
        if few < rows < many
    )
    return next(between, None) if exact is None else exact


def headroom_at(points: Sequence[Point], limit: int | None, rows: int | None) -> float | None:
    """Return how much of the limit the smallest measured batch leaves free that is no smaller than this one.

    Example:
        >>> headroom_at([Point(8, 50.0, memory=40), Point(16, 90.0, memory=80)], 100, 12)
        0.2
    """
    sizes = [
        point.memory
        for point in fitting(points)
        if rows is not None and point.rows >= rows and point.memory is not None
    ]
    return free_share(sizes[0], limit) if sizes and limit else None


def free_share(taken: int, limit: float) -> float:
    """Return how much of a limit stays free, in whole percent: no memory is known better, and no batch misses a gate by less.

    Example:
        >>> free_share(90, 100), free_share(903, 1000)
        (0.1, 0.1)
    """
    return round(1 - taken / limit, 2)


READERS: tuple[tuple[type, Callable[[Any, Context], dict[str, Any]]], ...] = (
    (Comparison, of_comparison),
    (Profile, of_profile),
    (ParityReport, of_parity),
    (PrecisionVerdict, of_precision),
    (SweepReport, of_sweep),
    (MemoryCurve, of_curve),
    (FallbackLedger, of_ledger),
    (Forecast, of_forecast),
    (Signals, of_signals),
    (DoctorReport, of_doctor),
)
"""The reports in the order in which they count: where two tell the same figure, the first does."""


def finite(value: float) -> float | None:
    """Return a number, ``None`` for NaN and infinity."""
    return value if math.isfinite(value) else None
