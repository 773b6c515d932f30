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
from ..checks.operators.fallbacks import FallbackLog
from ..checks.operators.forecast import Forecast
from ..checks.precision.report import KINDS, ParityReport
from ..checks.precision.trajectory import LossParity
from ..checks.precision.validation import PrecisionVerdict
from ..records.logbook.privacy import sanitize_path
from ..records.logbook.sections import ReportMetrics, Run, finite_numbers

REPORTS_REMEDY = "Pass what nb.sweep(), nb.compare(), nb.runbook.profile(), nb.runbook.parity(), nb.training.last_curve() or the like returned."


@singledispatch
def extract_metrics(report: Any) -> ReportMetrics:
    """Return what a logbook keeps of a report: numbers, and never a text.

    Reports of rooms above this one say it themselves, in ``logbook_figures``.

    Raises:
        ConfigurationError: For anything that is not a report for a logbook.

    Example:
        >>> extract_metrics(LoaderCheck("cpu", 0.03, 0.01, 2, 20)).run.workers
        2
    """
    if not hasattr(type(report), "logbook_figures"):
        raise ConfigurationError(f"{short_type_name(report)} is not a report for a logbook.", REPORTS_REMEDY)
    kept: ReportMetrics = report.logbook_figures()
    return kept


def _run(report: Comparison | Profile | SweepReport, batch_size: int | None = None, **others: Any) -> Run:
    facts: dict[str, Any] = {name: getattr(report, name) for name in ("task", "workers", "dtype", "row_shape")}
    return Run(batch_size=batch_size, **facts, **others)


@extract_metrics.register
def _comparison_figures(report: Comparison) -> ReportMetrics:
    values: dict[str, Any] = {}
    for device in report.devices:
        gain = device.speedup
        figures = {
            "seconds": device.seconds,
            "rows_per_second": device.rows_per_second,
            "utilization": device.utilization,
            "speedup": gain and gain.median,
            "speedup_low": gain and gain.low,
            "speedup_high": gain and gain.high,
            **_phases(device.phase_fractions),
        }
        values.update({f"{device.device}_{name}": value for name, value in figures.items()})
    alone = report.devices[0].device if len(report.devices) == 1 else None
    run = _run(report, report.devices[0].rows)
    return ReportMetrics(
        "comparison", sanitize_path(report.name), alone, None, report.simulated, finite_numbers(values), run
    )


def _phases(shares: dict[str, float]) -> dict[str, float]:
    return {f"{phase}_fraction": share for phase, share in shares.items()}


@extract_metrics.register
def _profile_figures(report: Profile) -> ReportMetrics:
    values = {
        "seconds": report.seconds,
        "data_only_seconds": report.data_only,
        "compute_only_seconds": report.compute_only,
        "device_seconds": report.device_seconds,
        "operators_per_step": report.operators_per_step,
        "synchronizations_per_step": sum(one.count for one in report.synchronizations),
        "fallbacks_per_step": report.fallbacks_per_step,
        **_phases(report.shares),
    }
    name = sanitize_path(report.name)
    run = _run(report, report.rows)
    return ReportMetrics("profile", name, report.device, None, report.simulated, finite_numbers(values), run)


@extract_metrics.register
def _ledger_figures(report: FallbackLog) -> ReportMetrics:
    values = {"calls": report.count, "operators": len(report.operators)}
    device = "mps" if report.operators_on_mps else None
    return ReportMetrics("fallbacks", "operators", device, None, report.simulated, finite_numbers(values))


@extract_metrics.register
def _forecast_figures(report: Forecast) -> ReportMetrics:
    values = {
        "operators": len(report.operators),
        "cpu_operators": len(report.cpu_operators),
        "unsupported": len(report.unsupported),
    }
    return ReportMetrics("forecast", sanitize_path(report.model), None, None, report.simulated, finite_numbers(values))


@extract_metrics.register
def _parity_figures(report: ParityReport) -> ReportMetrics:
    values = {
        **{kind: getattr(report.spans, kind) for kind in KINDS},
        "entity_agreement": report.spans.agreement,
        "texts": report.texts,
        "tokens": report.tokens,
        "label_mismatches": report.label_mismatches,
        "non_finite_tokens": report.non_finite_tokens,
        "logits_maximum": report.logits.maximum,
        "logits_median": report.logits.median,
    }
    subject = f"{sanitize_path(report.model)} in {report.dtype}"
    return ReportMetrics("parity", subject, report.device, report.status, report.simulated, finite_numbers(values))


@extract_metrics.register
def _loss_figures(report: LossParity) -> ReportMetrics:
    values = {
        "steps": report.steps,
        "divergence_step": report.divergence_step,
        "drift": max(report.drift),
        "tolerance": report.tolerance[report.steps - 1],
        "first_loss": report.candidate[0],
        "last_loss": report.candidate[-1],
    }
    subject = f"{sanitize_path(report.model)} in {report.dtype}"
    run = Run(TRAINING_STEP)
    return ReportMetrics("losses", subject, report.device, report.status, report.simulated, finite_numbers(values), run)


@extract_metrics.register
def _precision_figures(report: PrecisionVerdict) -> ReportMetrics:
    parity = _parity_figures(report.parity)
    gain = report.certificate and report.certificate.evidence.speedup
    values = finite_numbers({**parity.values, "speedup": gain, "refusals": len(report.refusals)})
    return replace(parity, report="precision", values=values, verdict="accepted" if report.accepted else "refused")


@extract_metrics.register
def _curve_figures(report: MemoryCurve) -> ReportMetrics:
    trend = report.trend
    values = {
        "epochs": len(report.epoch_samples),
        "growth_over_ten_epochs": trend.growth,
        "growth_in_all": trend.total,
        "first_bytes": trend.baseline,
        "last_bytes": trend.last,
    }
    peaks = [size for one in report.samples for size in (one.peak, one.allocated) if size is not None]
    run = Run(peak_memory_bytes=max(peaks, default=None))
    return ReportMetrics(
        "memory", report.deciding_metric, report.device, report.verdict, report.simulated, finite_numbers(values), run
    )


@extract_metrics.register
def _doctor_figures(report: DoctorReport) -> ReportMetrics:
    values = {status: sum(one.status == status for one in report.findings) for status in (OK, WARNING, FAILED)}
    return ReportMetrics("doctor", "computer", None, report.status, report.simulated, finite_numbers(values))


@extract_metrics.register
def _loader_figures(report: LoaderCheck) -> ReportMetrics:
    values = {name: getattr(report, name) for name in ("data_seconds", "step_seconds", "wait_fraction", "batches")}
    run = Run(workers=report.workers)
    return ReportMetrics(
        "loader", "batches", report.device, report.bottleneck, report.simulated, finite_numbers(values), run
    )


@extract_metrics.register
def _sweep_figures(report: SweepReport) -> ReportMetrics:
    knee = report.knee_point
    best = report.best
    values = {
        "knee_rows": report.knee,
        "rows_per_second": knee and knee.throughput,
        "memory_bytes": knee and knee.memory,
        "first_step_seconds": knee and knee.first_step_seconds,
        "best_rows": best and best.rows,
        "best_rows_per_second": best and best.throughput,
        "limit_bytes": report.limit,
        "points": len(report.points),
        "out_of_memory_points": sum(not one.fits for one in report.points),
    }
    run = _run(report, length=report.length, peak_memory_bytes=knee.memory if knee else None)
    name = sanitize_path(report.name)
    return ReportMetrics("sweep", name, report.device, None, report.simulated, finite_numbers(values), run)
