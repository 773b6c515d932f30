"""What a logbook keeps of each kind of report: of its run, and in numbers."""

from __future__ import annotations

from dataclasses import replace
from functools import singledispatch
from typing import Any

from ..._render.display import FAILED, OK, WARNING
from ..._utils.text import short_type_name
from ...errors import ConfigurationError
from ...training.curve import MemoryCurve
from ...training.loader import LoaderCheck
from ..bench.comparison import Comparison
from ..bench.profile import Profile
from ..bench.sweep import SweepReport
from ..bench.workloads import TRAINING_STEP
from ..checks.doctor.report import DoctorReport
from ..checks.operators.fallbacks import FallbackLedger
from ..checks.operators.forecast import Forecast
from ..checks.precision.report import KINDS, ParityReport
from ..checks.precision.trajectory import LossParity
from ..checks.precision.validation import PrecisionVerdict
from ..records.logbook.privacy import short_path
from ..records.logbook.sections import ReportFigures, Run, numbers

REPORTS = "Pass what nb.sweep(), nb.compare(), nb.runbook.profile(), nb.runbook.parity(), nb.training.last_curve() or the like returned."


@singledispatch
def figures_of(report: Any) -> ReportFigures:
    """Return what a logbook keeps of a report: numbers, and never a text.

    Reports of rooms above this one say it themselves, in ``logbook_figures``.

    Raises:
        ConfigurationError: For anything that is not a report for a logbook.

    Example:
        >>> figures_of(LoaderCheck("cpu", 0.03, 0.01, 2, 20)).run.workers
        2
    """
    if not hasattr(type(report), "logbook_figures"):
        raise ConfigurationError(f"{short_type_name(report)} is not a report for a logbook.", REPORTS)
    kept: ReportFigures = report.logbook_figures()
    return kept


def _run(report: Comparison | Profile | SweepReport, batch_size: int | None = None, **others: Any) -> Run:
    facts: dict[str, Any] = {name: getattr(report, name) for name in ("task", "workers", "dtype", "row_shape")}
    return Run(batch_size=batch_size, **facts, **others)


@figures_of.register
def _comparison_figures(report: Comparison) -> ReportFigures:
    values: dict[str, Any] = {}
    for device in report.devices:
        gain = device.speed_up
        figures = {
            "seconds": device.seconds,
            "rows_per_second": device.rows_per_second,
            "utilisation": device.utilisation,
            "speed_up": gain and gain.middle,
            "speed_up_low": gain and gain.low,
            "speed_up_high": gain and gain.high,
            **_phases(device.shares),
        }
        values.update({f"{device.device}_{name}": value for name, value in figures.items()})
    alone = report.devices[0].device if len(report.devices) == 1 else None
    run = _run(report, report.devices[0].rows)
    return ReportFigures("comparison", short_path(report.name), alone, None, report.simulated, numbers(values), run)


def _phases(shares: dict[str, float]) -> dict[str, float]:
    return {f"{phase}_share": share for phase, share in shares.items()}


@figures_of.register
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
    name = short_path(report.name)
    run = _run(report, report.rows)
    return ReportFigures("profile", name, report.device, None, report.simulated, numbers(values), run)


@figures_of.register
def _ledger_figures(report: FallbackLedger) -> ReportFigures:
    values = {"calls": report.count, "operators": len(report.operators)}
    device = "mps" if report.operators_on_mps else None
    return ReportFigures("fallbacks", "operators", device, None, report.simulated, numbers(values))


@figures_of.register
def _forecast_figures(report: Forecast) -> ReportFigures:
    values = {"operators": len(report.operators), "leaving": len(report.leaving), "refused": len(report.refused)}
    return ReportFigures("forecast", short_path(report.model), None, None, report.simulated, numbers(values))


@figures_of.register
def _parity_figures(report: ParityReport) -> ReportFigures:
    values = {
        **{kind: getattr(report.spans, kind) for kind in KINDS},
        "entity_agreement": report.spans.agreement,
        "texts": report.texts,
        "tokens": report.tokens,
        "other_labels": report.other_labels,
        "not_numbers": report.not_numbers,
        "logits_maximum": report.logits.maximum,
        "logits_median": report.logits.median,
    }
    subject = f"{short_path(report.model)} in {report.dtype}"
    return ReportFigures("parity", subject, report.device, report.status, report.simulated, numbers(values))


@figures_of.register
def _loss_figures(report: LossParity) -> ReportFigures:
    values = {
        "steps": report.steps,
        "parted": report.parted,
        "drift": max(report.drift),
        "tolerance": report.tolerance[report.steps - 1],
        "first_loss": report.candidate[0],
        "last_loss": report.candidate[-1],
    }
    subject = f"{short_path(report.model)} in {report.dtype}"
    run = Run(TRAINING_STEP)
    return ReportFigures("losses", subject, report.device, report.status, report.simulated, numbers(values), run)


@figures_of.register
def _precision_figures(report: PrecisionVerdict) -> ReportFigures:
    parity = _parity_figures(report.parity)
    gain = report.certificate and report.certificate.evidence.speed_up
    values = numbers({**parity.values, "speed_up": gain, "refusals": len(report.refusals)})
    return replace(parity, report="precision", values=values, verdict="accepted" if report.accepted else "refused")


@figures_of.register
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
    run = Run(peak_memory_bytes=max(peaks, default=None))
    return ReportFigures(
        "memory", report.measure, report.device, report.verdict, report.simulated, numbers(values), run
    )


@figures_of.register
def _doctor_figures(report: DoctorReport) -> ReportFigures:
    values = {status: sum(one.status == status for one in report.findings) for status in (OK, WARNING, FAILED)}
    return ReportFigures("doctor", "computer", None, report.status, report.simulated, numbers(values))


@figures_of.register
def _loader_figures(report: LoaderCheck) -> ReportFigures:
    values = {name: getattr(report, name) for name in ("data_seconds", "step_seconds", "waiting", "batches")}
    run = Run(workers=report.workers)
    return ReportFigures("loader", "batches", report.device, report.bottleneck, report.simulated, numbers(values), run)


@figures_of.register
def _sweep_figures(report: SweepReport) -> ReportFigures:
    knee = report.at_knee
    best = report.best
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
