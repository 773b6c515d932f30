"""What the reports of the runbook found, as numbers for a logbook: their counts, shares, sizes and times, and never a text."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from statistics import median
from typing import Any

from ...devices.request import canonical
from ...devices.simulated import shows_simulated
from ...display import MARK
from ...errors import ConfigurationError
from .sections import Figures, Run
from .variables import short_path

Numbers = Mapping[str, Any]

REPORTS = "Pass what nb.sweep(), nb.compare(), nb.profile(), nb.parity(), nb.memory_curve() or the like returned."

ONE_DEVICE = "Write a logbook for each device, such as nb.logbook(report)."


def told_by(reports: Iterable[Any]) -> tuple[Figures, ...]:
    """Return what reports tell.

    Raises:
        ConfigurationError: For what is no report.

    Example:
        >>> from openmed_nb.training.loaders import LoaderCheck
        >>> told_by([LoaderCheck("cpu", 0.03, 0.01, 2, 20)])[0].run.workers
        2
    """
    return tuple(map(_told, reports))


def reported_device(told: Iterable[Figures]) -> str | None:
    """Return the device that reports are of, ``None`` where they name none.

    Raises:
        ConfigurationError: Where they name several: a logbook tells of one.

    Example:
        >>> reported_device([Figures("loader", "batches", "cuda", None, False, {})])
        'cuda:0'
    """
    named = sorted({canonical(one.device.removesuffix(MARK)) for one in told if one.device})
    if len(named) > 1:
        raise ConfigurationError(f"The reports are of several devices: {', '.join(named)}.", ONE_DEVICE)
    return named[0] if named else None


def check_device(told: Iterable[Figures], device: str) -> None:
    """Refuse reports of another device than that of a logbook.

    Raises:
        ConfigurationError: For them.
    """
    named = reported_device(told)
    if named not in {None, canonical(device)}:
        raise ConfigurationError(f"A report is of {named}, and the logbook of {device}.", ONE_DEVICE)


def joined(told: Iterable[Figures], said: Run) -> Run:
    """Return what is known of a run: what the last report says, and else what the person said; the largest peak counts.

    Example:
        >>> measured = Figures("sweep", "mine", "cpu", None, False, {}, Run(batch_size=8))
        >>> joined([measured], Run(batch_size=32, length=128))
        Run(task=None, batch_size=8, length=128, workers=None, peak_memory_bytes=None, dtype=None, row_shape=None)
    """
    all_runs = (said, *(one.run for one in told))[::-1]
    last: dict[str, Any] = {
        name: next((one for one in (vars(run)[name] for run in all_runs) if one is not None), None)
        for name in vars(said)
    }
    peaks = [run.peak_memory_bytes for run in all_runs if run.peak_memory_bytes is not None]
    return Run(**{**last, "peak_memory_bytes": max(peaks, default=None)})


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


def _told(report: Any) -> Figures:
    reader = READERS.get(type(report).__name__)
    if reader is None or not type(report).__module__.startswith(__name__.partition(".")[0]):
        raise ConfigurationError(f"{type(report).__name__} is no report for a logbook.", REPORTS)
    return reader(report)


def _figures(  # noqa: PLR0913, PLR0917 - the fields of Figures
    report: str,
    subject: str,
    device: str | None,
    simulated: bool,
    values: Numbers,
    verdict: str | None = None,
    run: Run | None = None,
) -> Figures:
    return Figures(report, subject, device, verdict, simulated, numbers(values), run or Run())


def _sweep(report: Any) -> Figures:
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
    run = Run(report.task, None, report.length, report.workers, peak, report.dtype, report.row_shape)
    return _figures("sweep", short_path(report.name), report.device, report.simulated, values, run=run)


def _comparison(report: Any) -> Figures:
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
    run = Run(report.task, report.devices[0].rows, None, report.workers, None, report.dtype, report.row_shape)
    return _figures("comparison", short_path(report.name), alone, report.simulated, values, run=run)


def _profile(report: Any) -> Figures:
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
    run = Run(report.task, report.rows, None, report.workers, None, report.dtype, report.row_shape)
    return _figures("profile", short_path(report.name), report.device, report.simulated, values, run=run)


def _verdict(report: Any) -> Figures:
    evidence = report.evidence
    values = {**evidence.measured, "reasons": len(report.reasons), "not_known": len(report.unknown)}
    subject = evidence.task or "computer"
    return _figures("verdict", subject, evidence.device, evidence.simulated, values, report.recommendation)


def _memory_curve(report: Any) -> Figures:
    trend, samples = report.trend, report.samples
    values = {
        "epochs": len(report.boundaries),
        "growth_over_ten_epochs": trend.growth,
        "growth_in_all": trend.total,
        "first_bytes": trend.baseline,
        "last_bytes": trend.last,
    }
    peaks = [size for one in samples for size in (one.peak, one.allocated) if size is not None]
    run = Run(peak_memory_bytes=max(peaks, default=None))
    return _figures("memory", report.measure, report.device, report.simulated, values, report.verdict, run)


def _parity(report: Any) -> Figures:
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
    subject = f"{short_path(report.model)} in {report.dtype}"
    return _figures("parity", subject, report.device, simulated, values, report.status)


def _precision(report: Any) -> Figures:
    told = _parity(report.parity)
    gain = report.certificate and report.certificate.evidence.speed_up
    values = {**told.values, "speed_up": gain, "refusals": len(report.refusals)}
    verdict = "accepted" if report.accepted else "refused"
    return replace(told, report="precision", values=numbers(values), verdict=verdict)


def _loader_check(report: Any) -> Figures:
    values = {name: getattr(report, name) for name in ("data_seconds", "step_seconds", "waiting", "batches")}
    run = Run(workers=report.workers)
    return _figures("loader", "batches", report.device, report.simulated, values, report.bottleneck, run)


def _fallbacks(report: Any) -> Figures:
    values = {"calls": report.count, "operators": len({one.operator for one in report.entries})}
    return _figures("fallbacks", "operators", "mps", report.simulated, values)


def _forecast(report: Any) -> Figures:
    values = {"operators": len(report.operators), "leaving": len(report.leaving), "refused": len(report.refused)}
    return _figures("forecast", short_path(report.model), None, report.simulated, values)  # Nothing ran on MPS.


def _doctor(report: Any) -> Figures:
    counted = {status: sum(one.status == status for one in report.findings) for status in ("ok", "warning", "failed")}
    return _figures("doctor", "computer", None, report.simulated, counted, report.status)


def _trial(report: Any) -> Figures:
    memory, rates = _memory_curve(report.curve), report.texts_per_second
    values = {"texts_per_second": report.fastest, "texts_per_second_median": median(rates), **memory.values}
    run = Run("annotation", report.batch_size, None, 0, memory.run.peak_memory_bytes)
    return _figures("trial", "golden texts", report.device, report.simulated, values, report.curve.verdict, run)


READERS: dict[str, Callable[[Any], Figures]] = {
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
