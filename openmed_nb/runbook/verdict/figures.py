"""Metrics and run settings that a logbook stores for each type of report."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import singledispatch
from typing import Any, Protocol

from ..._render.display import FAILED, OK, WARNING
from ..._utils.text import short_type_name
from ...errors import ConfigurationError
from ...training.curve import MemoryCurve
from ..bench.comparison import Comparison
from ..bench.profile import Profile
from ..bench.sweep import SweepReport
from ..bench.workloads import ANNOTATION, TRAINING_STEP
from ..checks.doctor.report import DoctorReport
from ..checks.operators.fallbacks import FallbackLog
from ..checks.operators.forecast import Forecast
from ..checks.precision.report import KINDS, ParityReport
from ..checks.precision.trajectory import LossParity
from ..checks.precision.validation import PrecisionVerdict
from ..records.logbook.privacy import sanitize_path
from ..records.logbook.sections import ReportMetrics, Run, finite_numbers
from .metrics import METRICS, EvidenceContext, Thresholds

REPORTS_REMEDY = (
    "Pass a report of nb.sweep(), nb.compare(), nb.runbook.profile(), nb.runbook.parity(), nb.training.last_curve() or a "
    "similar function."
)


@singledispatch
def extract_metrics(report: Any) -> ReportMetrics:
    """Return the metrics that a logbook stores for a report; texts are never stored.

    Reports of the layers above provide them in a method ``logbook_metrics``.

    Raises:
        ConfigurationError: If the object is not a report for a logbook.

    Example:
        >>> extract_metrics(SweepReport("mine", "annotation", "cpu", (), workers=2)).run.workers
        2
    """
    if not hasattr(type(report), "logbook_metrics"):
        raise ConfigurationError(f"{short_type_name(report)} is not a report for a logbook.", REPORTS_REMEDY)
    metrics: ReportMetrics = report.logbook_metrics()
    return metrics


class _Report(Protocol):
    """A report of measurements on a computer that may be simulated."""

    @property
    def simulated(self) -> bool: ...


def _collect(  # noqa: PLR0913, PLR0917 - the fields of the metrics
    report: _Report,
    kind: str,
    subject: str,
    values: Mapping[str, object],
    device: str | None = None,
    verdict: str | None = None,
    run: Run | None = None,
) -> ReportMetrics:
    """Return the metrics of a report, without values that are not finite numbers."""
    return ReportMetrics(kind, subject, device, verdict, report.simulated, finite_numbers(values), run or Run())


def _run(report: Comparison | Profile | SweepReport, batch_size: int | None = None) -> Run:
    """Return the run settings of a benchmark."""
    return Run(report.task, batch_size, workers=report.workers, dtype=report.dtype, row_shape=report.row_shape)


@extract_metrics.register
def _comparison_metrics(report: Comparison) -> ReportMetrics:
    values = {}
    for device in report.devices:
        gain = device.speedup
        device_values = {
            "seconds": device.seconds,
            "rows_per_second": device.rows_per_second,
            "utilization": device.utilization,
            "speedup": gain and gain.median,
            "speedup_low": gain and gain.low,
            "speedup_high": gain and gain.high,
            **_name_phases(device.phase_fractions),
        }
        values.update({f"{device.device}_{name}": value for name, value in device_values.items()})
    only_device = report.devices[0].device if len(report.devices) == 1 else None
    run = _run(report, report.devices[0].rows)
    return _collect(report, "comparison", sanitize_path(report.name), values, only_device, run=run)


def _name_phases(fractions: dict[str, float]) -> dict[str, float]:
    return {f"{phase}_fraction": fraction for phase, fraction in fractions.items()}


@extract_metrics.register
def _profile_metrics(report: Profile) -> ReportMetrics:
    values = {
        "seconds": report.seconds,
        "data_only_seconds": report.data_only,
        "compute_only_seconds": report.compute_only,
        "device_seconds": report.device_seconds,
        "operators_per_step": report.operators_per_step,
        "synchronizations_per_step": sum(synchronization.count for synchronization in report.synchronizations),
        "fallbacks_per_step": report.fallbacks_per_step,
        **_name_phases(report.phase_fractions),
    }
    run = _run(report, report.rows)
    return _collect(report, "profile", sanitize_path(report.name), values, report.device, run=run)


@extract_metrics.register
def _fallback_log_metrics(report: FallbackLog) -> ReportMetrics:
    values = {"calls": report.count, "operators": len(report.operators)}
    device = "mps" if report.num_mps_operators else None
    return _collect(report, "fallbacks", "operators", values, device)


@extract_metrics.register
def _forecast_metrics(report: Forecast) -> ReportMetrics:
    values = {
        "operators": len(report.operators),
        "cpu_operators": len(report.cpu_operators),
        "unsupported": len(report.unsupported),
    }
    return _collect(report, "forecast", sanitize_path(report.model), values)


@extract_metrics.register
def _parity_metrics(report: ParityReport) -> ReportMetrics:
    context = EvidenceContext(report.device, ANNOTATION, Thresholds(), {})
    values = {
        **{kind: getattr(report.spans, kind) for kind in KINDS},
        "texts": report.texts,
        "tokens": report.tokens,
        "label_mismatches": report.label_mismatches,
        "logits_median": report.logits.median,
        **{name: metric.read([report], context) for name, metric in METRICS.items() if ParityReport in metric.readers},
    }
    subject = f"{sanitize_path(report.model)} in {report.dtype}"
    return _collect(report, "parity", subject, values, report.device, report.status)


@extract_metrics.register
def _loss_metrics(report: LossParity) -> ReportMetrics:
    values = {
        "steps": report.steps,
        "divergence_step": report.divergence_step,
        "drift": max(report.drift),
        "tolerance": report.tolerance[report.steps - 1],
        "first_loss": report.candidate[0],
        "last_loss": report.candidate[-1],
    }
    subject = f"{sanitize_path(report.model)} in {report.dtype}"
    return _collect(report, "losses", subject, values, report.device, report.status, Run(TRAINING_STEP))


@extract_metrics.register
def _precision_metrics(report: PrecisionVerdict) -> ReportMetrics:
    parity = _parity_metrics(report.parity)
    gain = report.record and report.record.evidence.speedup
    values = {**parity.values, "speedup": gain, "refusals": len(report.reasons)}
    verdict = "accepted" if report.accepted else "refused"
    return _collect(report.parity, "precision", parity.subject, values, parity.device, verdict)


@extract_metrics.register
def _curve_metrics(report: MemoryCurve) -> ReportMetrics:
    trend = report.trend
    values = {
        "epochs": len(report.epoch_samples),
        "growth_over_ten_epochs": trend.growth,
        "growth_in_all": trend.total,
        "first_bytes": trend.baseline,
        "last_bytes": trend.last,
    }
    peaks = [size for sample in report.samples for size in (sample.peak, sample.allocated) if size is not None]
    run = Run(peak_memory_bytes=max(peaks, default=None))
    return _collect(report, "memory", report.deciding_metric, values, report.device, report.verdict, run)


@extract_metrics.register
def _doctor_metrics(report: DoctorReport) -> ReportMetrics:
    values = {
        status: len([finding for finding in report.findings if finding.status == status])
        for status in (OK, WARNING, FAILED)
    }
    return _collect(report, "doctor", "computer", values, verdict=report.status)


@extract_metrics.register
def _sweep_metrics(report: SweepReport) -> ReportMetrics:
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
        "out_of_memory_points": len([point for point in report.points if not point.fits]),
    }
    run = replace(_run(report), length=report.length, peak_memory_bytes=knee.memory if knee else None)
    return _collect(report, "sweep", sanitize_path(report.name), values, report.device, run=run)
