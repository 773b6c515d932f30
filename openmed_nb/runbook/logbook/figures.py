"""What the reports of the runbook found, as numbers for a logbook: their counts, shares, sizes and times, and never a text."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from statistics import median
from typing import Any

from ...devices.simulation import shows_simulated
from ...errors import ConfigurationError
from .sections import Figures, Run
from .variables import short_path

Numbers = Mapping[str, Any]

REPORTS = "Pass what nb.sweep(), nb.compare(), nb.profile(), nb.parity(), nb.memory_curve() or the like returned."


@dataclass(frozen=True)
class Told:
    """What a report tells a logbook.

    Attributes:
        figures: Its numbers.
        run: What it says of the run.
    """

    figures: Figures
    run: Run = field(default_factory=Run)


def told_by(reports: Iterable[Any]) -> tuple[Told, ...]:
    """Return what reports tell.

    Raises:
        ConfigurationError: For what is no report.

    Example:
        >>> from openmed_nb.training.loader_figures import LoaderCheck
        >>> told_by([LoaderCheck("cpu", 0.03, 0.01, 2, 20)])[0].run.workers
        2
    """
    return tuple(map(_told, reports))


def joined(runs: Iterable[Run], said: Run) -> Run:
    """Return what is known of a run: what the person said, and else what the first report says; the largest peak counts.

    Example:
        >>> joined([Run(batch_size=8, length=128)], Run(batch_size=32))
        Run(task=None, batch_size=32, length=128, workers=None, peak_memory_bytes=None, dtype=None)
    """
    all_runs = (said, *runs)
    first: dict[str, Any] = {
        name: next((one for one in (vars(run)[name] for run in all_runs) if one is not None), None)
        for name in vars(said)
    }
    peaks = [run.peak_memory_bytes for run in all_runs if run.peak_memory_bytes is not None]
    return Run(**{**first, "peak_memory_bytes": max(peaks, default=None)})


def numbers(values: Numbers) -> dict[str, float]:
    """Return those values that are finite numbers.

    Example:
        >>> numbers({"rows": 8, "why": "a text", "gain": float("nan"), "exact": True})
        {'rows': 8}
    """
    kept = {
        name: value for name, value in values.items() if isinstance(value, (int, float)) and not isinstance(value, bool)
    }
    return {name: value for name, value in kept.items() if math.isfinite(value)}


def _told(report: Any) -> Told:
    reader = READERS.get(type(report).__name__)
    if reader is None or not type(report).__module__.startswith(__name__.partition(".")[0]):
        raise ConfigurationError(f"{type(report).__name__} is no report for a logbook.", REPORTS)
    return reader(report)


def _figures(  # noqa: PLR0913, PLR0917 - the fields of Figures
    report: str, subject: str, device: str | None, simulated: bool, values: Numbers, verdict: str | None = None
) -> Figures:
    return Figures(report, short_path(subject), device, verdict, simulated, numbers(values))


def _sweep(report: Any) -> Told:
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
    peak = knee.memory if knee else None
    run = Run(report.task, report.knee, report.length, report.workers, peak, report.dtype)
    return Told(_figures("sweep", report.name, report.device, report.simulated, values), run)


def _comparison(report: Any) -> Told:
    values: dict[str, Any] = {}
    for one in report.devices:
        speed_up = one.speed_up
        told = {
            "seconds": one.seconds,
            "rows_per_second": one.rows_per_second,
            "utilisation": one.utilisation,
            "speed_up": speed_up and speed_up.middle,
            "speed_up_low": speed_up and speed_up.low,
            "speed_up_high": speed_up and speed_up.high,
            **{f"{phase}_share": share for phase, share in one.shares.items()},
        }
        values.update({f"{one.device}_{name}": value for name, value in told.items()})
    alone = report.devices[0].device if len(report.devices) == 1 else None
    run = Run(report.task, report.devices[0].rows, None, report.workers, None, report.dtype)
    return Told(_figures("comparison", report.name, alone, report.simulated, values), run)


def _profile(report: Any) -> Told:
    values = {
        "seconds": report.seconds,
        "data_only_seconds": report.data_only,
        "compute_only_seconds": report.compute_only,
        "device_seconds": report.device_seconds,
        "operators_per_step": report.operators_per_step,
        "synchronisations_per_step": sum(one.count for one in report.synchronisations),
        "fallbacks_per_step": report.fallbacks_per_step,
        **{f"{phase}_share": share for phase, share in report.shares.items()},
    }
    run = Run(report.task, report.rows, None, report.workers, None, report.dtype)
    return Told(_figures("profile", report.name, report.device, report.simulated, values), run)


def _verdict(report: Any) -> Told:
    evidence = report.evidence
    values = {**evidence.measured, "reasons": len(report.reasons), "not_known": len(report.unknown)}
    subject = evidence.task or "computer"
    return Told(_figures("verdict", subject, evidence.device, evidence.simulated, values, report.recommendation))


def _memory_curve(report: Any) -> Told:
    trend, samples = report.trend, report.samples
    values = {
        "epochs": len(report.boundaries),
        "growth_over_ten_epochs": trend.growth,
        "growth_in_all": trend.total,
        "first_bytes": trend.baseline,
        "last_bytes": trend.last,
    }
    peaks = [size for one in samples for size in (one.peak, one.allocated) if size is not None]
    figures = _figures("memory", report.measure, report.device, report.simulated, values, report.verdict)
    return Told(figures, Run(peak_memory_bytes=max(peaks, default=None)))


def _parity(report: Any) -> Told:
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
    simulated = shows_simulated(report.device)
    return Told(
        _figures("parity", f"{report.model} in {report.dtype}", report.device, simulated, values, report.status)
    )


def _precision(report: Any) -> Told:
    told = _parity(report.parity).figures
    gain = report.certificate and report.certificate.evidence.speed_up
    values = {**told.values, "speed_up": gain, "refusals": len(report.refusals)}
    verdict = "accepted" if report.accepted else "refused"
    return Told(_figures("precision", told.subject, told.device, told.simulated, values, verdict))


def _loader_check(report: Any) -> Told:
    values = {name: getattr(report, name) for name in ("data_seconds", "step_seconds", "waiting", "batches")}
    figures = _figures("loader", "batches", report.device, report.simulated, values, report.bottleneck)
    return Told(figures, Run(workers=report.workers))


def _fallbacks(report: Any) -> Told:
    values = {"calls": report.count, "operators": len({one.operator for one in report.entries})}
    return Told(_figures("fallbacks", "operators", "mps", report.simulated, values))


def _forecast(report: Any) -> Told:
    values = {"operators": len(report.operators), "leaving": len(report.leaving), "refused": len(report.refused)}
    return Told(_figures("forecast", report.model, "mps", report.simulated, values))


def _doctor(report: Any) -> Told:
    counted = {status: sum(one.status == status for one in report.findings) for status in ("ok", "warning", "failed")}
    return Told(_figures("doctor", "computer", None, report.simulated, counted, report.status))


def _trial(report: Any) -> Told:
    memory, rates = _memory_curve(report.curve), report.texts_per_second
    values = {"texts_per_second": report.fastest, "texts_per_second_median": median(rates), **memory.figures.values}
    figures = _figures("trial", "golden texts", report.device, report.simulated, values, report.curve.verdict)
    return Told(figures, Run("annotation", report.batch_size, None, 0, memory.run.peak_memory_bytes))


READERS: dict[str, Callable[[Any], Told]] = {
    "Comparison": _comparison,
    "DoctorReport": _doctor,
    "FallbackLedger": _fallbacks,
    "Forecast": _forecast,
    "LoaderCheck": _loader_check,
    "MemoryCurve": _memory_curve,
    "ParityReport": _parity,
    "PrecisionVerdict": _precision,
    "Profile": _profile,
    "SweepReport": _sweep,
    "Trial": _trial,
    "Verdict": _verdict,
}
"""What reads a report, by the name of its class."""
