"""What each report of the runbook tells a verdict: the one file that knows their attributes."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
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
from ..operators.fallbacks import FELL_BACK, REFUSED, FallbackLedger
from ..operators.forecast import Forecast
from ..precision.gate import PrecisionVerdict
from ..precision.parity import ParityReport
from ..signals.values import CONDITIONS, Signals
from ..slices.judgement import SYNCHRONISATION, TINY_BATCH
from ..slices.profile import Profile
from ..sweep.report import SweepReport
from .sweeps import figures_at
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
        "batch": here.rows,
        "texts_per_second": here.rows_per_second,
    }


def of_profile(report: Profile, _context: Context) -> dict[str, Any]:
    """Return what a profile tells of the steps, and of what holds them up."""
    status = {one.name: one.status for one in report.findings}
    waits = tuple(str(one) for one in report.synchronisations if one.place.is_own)
    tiny = status[TINY_BATCH]
    return {
        "shares": report.shares,
        "batch": report.rows,
        "texts_per_second": report.rows / report.seconds if report.seconds else None,
        "synchronisations": waits if status[SYNCHRONISATION] == WARNING else (),
        "tiny_batch": None if tiny == NOT_APPLICABLE else tiny == WARNING,
        **(of_fallbacks(report) if kind_of(report.device) == "mps" else {}),
    }


def of_fallbacks(report: Profile) -> dict[str, Any]:
    """Return what fell back in the steps that were watched, with its share of a step where seconds are those of MPS."""
    seconds = [one.seconds for one in report.fallbacks if one.seconds is not None]
    timed = len(seconds) == len(report.fallbacks) and report.seconds and not report.simulated
    return {
        "fallback_operators": names_of(report.fallbacks),
        "fallback_calls": report.fallback_share,
        "fallback_time": min(1.0, sum(seconds) / report.watched / report.seconds) if timed else None,
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
    return {"memory_verdict": curve.verdict, "memory_growth": finite(growth_of(curve)), "headroom": free_share(curve)}


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


def free_share(curve: MemoryCurve) -> float | None:
    """Return how much of the limit stayed free at the peak of a training, ``None`` where nobody counted."""
    limits = [(one.peak, one.recommended) for one in curve.samples if one.peak and one.recommended]
    return min((1 - peak / (most * (curve.limit or 1.0)) for peak, most in limits), default=None)


def of_ledger(report: FallbackLedger, _context: Context) -> dict[str, Any]:
    """Return what really fell back, where anything was computed on MPS."""
    called = report.to_dict()["operators_on_mps"]
    if not called:
        return {}
    by_outcome = {
        outcome: [one for one in report.entries if one.outcome == outcome] for outcome in (FELL_BACK, REFUSED)
    }
    return {
        "fallback_operators": names_of(by_outcome[FELL_BACK]),
        "refused_operators": names_of(by_outcome[REFUSED]),
        "fallback_calls": min(1.0, report.count / called),
    }


def names_of(entries: Iterable[Any]) -> tuple[str, ...]:
    """Return the different operators of some entries, in alphabetical order."""
    return tuple(sorted({one.operator for one in entries}))


def of_forecast(report: Forecast, _context: Context) -> dict[str, Any]:
    """Return what is foretold to leave MPS, and what MPS refuses."""
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
    """Return what a sweep tells of the batch in use; of the knee, where nobody says which that is."""
    return figures_at(report.points, report.knee, report.limit, context.known.get("batch"))


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
