"""Steps of a report: a table, and the functions that run in the processes of its rows."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, NamedTuple, cast

from ...._render.display import (
    FAILED,
    NOT_APPLICABLE,
    OK,
    UNKNOWN,
    WARNING,
    Displayable,
    Finding,
    Report,
    Table,
    findings_table,
    format_milliseconds,
)
from ...._render.drawing import Chart, bar_chart
from ....devices.machine import format_device, is_mps_simulated
from ....devices.request import MASK
from ....session import SESSION
from ..logbook.sections import ReportMetrics
from ..runner import NamedStage

if TYPE_CHECKING:
    from ...bench.workloads import AnnotationBenchmark

MODEL = "bundled"


@dataclass(frozen=True)
class StepOptions:
    """Options of a step.

    Attributes:
        quick: Whether to run fewer and shorter measurements.
        training: Whether to measure training instead of annotation.
        device: Device to measure.
        metrics: Metrics of the previous steps, for the logbook.
    """

    quick: bool
    training: bool
    device: str
    metrics: tuple[ReportMetrics, ...] = ()


@dataclass(frozen=True)
class StepResult:
    """Result of a step.

    Attributes:
        displayed: Object to display.
        reports: Reports that a logbook and a verdict read.
        metrics: Metrics of measurements without such a report.
        summary: Result in one sentence with values; empty if the displayed object has one.
        status: Status, if the displayed object has no findings.
    """

    displayed: Displayable
    reports: tuple[Displayable, ...] = ()
    metrics: tuple[ReportMetrics, ...] = ()
    summary: str = ""
    status: str = OK


@dataclass(frozen=True)
class Step(NamedStage):
    """Row of the table of steps.

    Attributes:
        title: Heading of its section.
        run: Function of the step. Its process finds it by module and name.
        expected_seconds: Expected duration in seconds, for the remaining time.
        timeout_seconds: Time after which the process is killed.
    """

    title: str
    run: Callable[[StepOptions], StepResult]
    expected_seconds: float
    timeout_seconds: float = 150.0


def _device(_options: StepOptions) -> StepResult:
    SESSION.device_manager.load_torch()  # Without torch, the device is only planned and not verified.
    return StepResult(SESSION.device())


def _doctor(_options: StepOptions) -> StepResult:
    from ...checks.doctor.report import doctor

    report = doctor()
    return StepResult(report, reports=(report,))


def _signals(_options: StepOptions) -> StepResult:
    from ..signals import system_status

    status = system_status()
    findings = status.findings()
    parts = [f"{finding.name} {finding.evidence}" for finding in findings if finding.evidence != UNKNOWN]
    unknown = ", ".join(finding.name for finding in findings if finding.evidence == UNKNOWN)
    if unknown:
        parts.append(f"unknown: {unknown}")
    sentence = "; ".join(parts)
    return StepResult(status, summary=f"{sentence[:1].upper()}{sentence[1:]}.")


def _parity(options: StepOptions) -> StepResult:
    from ...bench.workloads import SYNTHETIC_TEXTS
    from ...checks.precision.parity import parity

    long_texts = (
        () if options.quick else (" ".join(SYNTHETIC_TEXTS), " ".join(SYNTHETIC_TEXTS * 12))
    )  # The last text needs several windows.
    report = parity(MODEL, [*SYNTHETIC_TEXTS, *long_texts], device=options.device, gradients=True)
    logits = f"Logits differ by at most {report.logits.maximum:.2g}"
    gradients = f", gradients by {report.gradients.largest:.2g} of their norm" if report.gradients else ""
    entities = f"{report.spans.exact} of {report.spans.all} entities are the same"
    return StepResult(report, reports=(report,), summary=f"{logits}{gradients}; {entities}.")


@dataclass(frozen=True, repr=False)
class Measurement(Displayable):
    """Measurement of a step that has no other report.

    Attributes:
        title: Title of the measurement.
        device: Measured device, labeled if it is simulated.
        sentences: Sentences without measured values.
        findings: Findings of the measurement.
        values: Measured values by name, which includes the unit.
        simulated: Whether the device is simulated.
        charts: Charts of the values.
    """

    title: str
    device: str
    sentences: tuple[str, ...] = ()
    findings: tuple[Finding, ...] = ()
    values: Mapping[str, float] = field(default_factory=dict)
    simulated: bool = field(default_factory=is_mps_simulated)
    charts: tuple[Chart, ...] = ()

    JSON_EXCLUDE = ("charts",)

    def to_report(self) -> Report:
        """Return a report of the findings; values are in a table of metrics."""
        rows = tuple((name.replace("_", " "), f"{value:.4g}") for name, value in self.values.items())
        return Report(
            f"{self.title} on {self.device}",
            self.sentences,
            (findings_table("", self.findings),),
            metrics=(Table("Metrics", ("metric", "value"), rows),),
            charts=self.charts,
        )

    def to_metrics(self, report: str) -> ReportMetrics:
        """Return the values as metrics for a logbook."""
        return ReportMetrics(report, MODEL, self.device, None, self.simulated, dict(self.values))


def _open_benchmark(options: StepOptions, training: bool = False) -> AbstractContextManager[AnnotationBenchmark]:
    """Return a context manager with a benchmark of the model on the device, for annotation or training."""
    from ...bench.workloads import open_benchmark

    benchmark = open_benchmark(MODEL, training=training, device=options.device, arguments={})
    return cast("AbstractContextManager[AnnotationBenchmark]", benchmark)  # a model by name


SHAPES = ((1, 16), (1, 64), (1, 128), (1, 256), (8, 32), (8, 128), (32, 64), (32, 128), (16, 256))
QUICK_SHAPES = ((1, 32), (8, 32), (1, 128), (8, 128))
BATCH_ROWS = 32
LENGTH = 128


class ShapeTimes(NamedTuple):
    """Times of forward passes of a shape, in seconds.

    Attributes:
        first: Time of the first pass, which includes the compilation on MPS.
        later: Median time of later passes.
    """

    first: float
    later: float


def _measure_shape(benchmark: AnnotationBenchmark, rows: int, length: int) -> ShapeTimes:
    """Return the times of the first and later passes of a shape."""
    workload = replace(benchmark, length=length).fixed_shape_workload(rows)
    with workload.open_batches() as batches:
        batch = next(batches)
        first = workload.time_step(batch)
        return ShapeTimes(first, statistics.median(workload.time_step(batch) for _ in range(3)))


def _shapes(options: StepOptions) -> StepResult:
    shapes = QUICK_SHAPES if options.quick else SHAPES
    with _open_benchmark(options) as benchmark:
        times = {f"{rows} x {length}": _measure_shape(benchmark, rows, length) for rows, length in shapes}
    bars = []
    values = {}
    for shape, shape_times in times.items():
        bars += [(f"{shape}, first", shape_times.first), (f"{shape}, later", shape_times.later)]
        name = shape.replace(" ", "_")
        values[f"{name}_first_seconds"] = shape_times.first
        values[f"{name}_later_seconds"] = shape_times.later
    measurement = Measurement(
        "Passes of new shapes",
        format_device(options.device),
        sentences=(f"Rows x tokens: {', '.join(times)}.",),
        values=values,
        charts=(bar_chart("Time of a pass, by rows x tokens", bars, format_milliseconds),),
    )
    first = sum(shape_times.first for shape_times in times.values())
    later = sum(shape_times.later for shape_times in times.values())
    summary = f"The first passes of {len(times)} shapes took {first:.2f} s in total, later passes {later:.2f} s."
    return StepResult(measurement, metrics=(measurement.to_metrics("shapes"),), summary=summary)


def _rows(options: StepOptions) -> StepResult:
    with _open_benchmark(options) as benchmark:
        single_row = _measure_shape(benchmark, 1, LENGTH).later
        batched_row = _measure_shape(benchmark, BATCH_ROWS, LENGTH).later / BATCH_ROWS
        difference = _max_batch_difference(benchmark, BATCH_ROWS, LENGTH)
    bars = [(f"1 x {LENGTH}", single_row), (f"{BATCH_ROWS} x {LENGTH}", batched_row)]
    measurement = Measurement(
        "Single and batched rows",
        format_device(options.device),
        findings=(_check_difference(difference),),
        values={
            "seconds_a_row_alone": single_row,
            "seconds_a_row_together": batched_row,
            "largest_difference": difference,
        },
        charts=(bar_chart("Time per row, by rows x tokens", bars, format_milliseconds),),
    )
    times = f"A row takes {format_milliseconds(single_row)} alone and {format_milliseconds(batched_row)} in a batch of {BATCH_ROWS}"
    return StepResult(
        measurement,
        metrics=(measurement.to_metrics("rows"),),
        summary=f"{times}; logits differ by at most {difference:.2g}.",
    )


def _max_batch_difference(benchmark: AnnotationBenchmark, rows: int, length: int, num_single: int = 4) -> float:
    """Return the largest difference between the logits of single rows and of the same rows in a batch."""
    import numpy as np
    import torch

    network = benchmark.annotator.network
    ids = np.random.default_rng(0).integers(0, int(network.model.config.vocab_size), (rows, length))
    with torch.no_grad():
        batched = network.logits(network.build_inputs(ids, np.ones_like(ids)))[:num_single].cpu()
        single = [
            network.logits(network.build_inputs(row[None], np.ones_like(row[None]))).cpu() for row in ids[:num_single]
        ]
    return float((torch.cat(single) - batched).abs().max())


def _check_difference(difference: float) -> Finding:
    """Check whether a single row has the same logits as in a batch. NaN counts as a difference.

    Example:
        >>> _check_difference(1e-6).status, _check_difference(0.5).status, _check_difference(float("nan")).status
        ('ok', 'failed', 'failed')
    """
    from ...checks.precision.policy import TOLERANCES

    tolerance = TOLERANCES["float32"].logits or 0.0
    name = "single and batched rows"
    if difference <= tolerance:
        return Finding(name, OK, f"all logits are the same within {tolerance:g}")
    problem = f"a logit differs by more than {tolerance:g} (pytorch#170837)"
    return Finding(name, FAILED, problem, "Annotate on the CPU, or with batch_size=1 after checking parity with it.")


def _compare(options: StepOptions) -> StepResult:
    from ...bench.comparison import compare
    from ...bench.timing import format_rate

    comparison = compare(
        MODEL,
        devices=[options.device],
        training=options.training,
        rounds=6 if options.quick else 12,
        utilization_seconds=0 if options.quick else 6,
        seconds=60,
    )
    parts = [
        f"{comparison.device_label(device.device)}: {format_rate(device.rows_per_second)} rows per second"
        for device in comparison.devices
    ]
    parts += [
        f"{comparison.device_label(device.device)} is {device.speedup} times as fast as the CPU"
        for device in comparison.devices
        if device.speedup
    ]
    return StepResult(comparison, (comparison,), summary=f"{'; '.join(parts)}.")


def _sweep(options: StepOptions) -> StepResult:
    from ...bench.sweep import sweep

    max_batch_size = 32 if options.quick else None
    # Less time measures a single size on a slow CPU, and a single size has no knee.
    seconds = 12.0 if options.quick else 30.0
    report = sweep(
        MODEL, training=options.training, device=options.device, max_batch_size=max_batch_size, seconds=seconds
    )
    if report.knee is None:
        summary = f"Best batch size not measured: {report.knee_reason} Run nb.sweep(seconds={5 * seconds:g})."
        return StepResult(report, (report,), summary=summary, status=WARNING)
    return StepResult(report, (report,), summary=f"Knee: {report.knee_reason} {report.stop_reason}")


def _profile(options: StepOptions) -> StepResult:
    from ...bench.profile import profile

    steps = 5 if options.quick else 20
    warm_up = 2 if options.quick else 5
    report = profile(MODEL, steps=steps, warm_up=warm_up, training=options.training, device=options.device)
    longest = max(report.phase_fractions, key=report.phase_fractions.__getitem__)
    summary = f"A step takes {format_milliseconds(report.seconds)}; {longest} takes most of it."
    return StepResult(report, (report,), summary=summary)


def _memory(options: StepOptions) -> StepResult:
    from ...bench.workloads import measure_epoch_memory

    with _open_benchmark(options, training=True) as benchmark:
        workload = benchmark.fixed_shape_workload(4)
        curve = measure_epoch_memory(workload, 1 if options.quick else 4, benchmark.device)
    return StepResult(curve, (curve,))


def _fallbacks(options: StepOptions) -> StepResult:
    from ....annotation.loading import load_pipeline
    from ...bench.workloads import SYNTHETIC_TEXTS
    from ...checks.operators.fallbacks import fallbacks
    from ...checks.operators.forecast import forecast

    pipe = load_pipeline(MODEL, device=options.device)
    prediction = forecast(pipe, training=True)
    with _open_benchmark(options, training=True) as benchmark, fallbacks() as log:
        pipe(list(SYNTHETIC_TEXTS))
        workload = benchmark.fixed_shape_workload(2)
        with workload.open_batches() as batches:
            workload.run(next(batches))
    finding = _check_fallbacks(prediction.cpu_operators, log.operators, log.num_mps_operators)
    measurement = Measurement(
        "Fallbacks compared with the forecast",
        format_device(options.device),
        sentences=(prediction.verdict, log.verdict),
        findings=(finding,),
    )
    summary = f"Forecast: {prediction.verdict} Measured: {log.verdict}"
    return StepResult(measurement, (prediction, log), summary=summary)


def _check_fallbacks(predicted: Iterable[str], fallbacks: Iterable[str], num_mps_operators: int) -> Finding:
    """Check whether all fallbacks among the operators called on MPS were predicted.

    Example:
        >>> _check_fallbacks(["aten::_linalg_eigh"], ["aten::_linalg_eigh.eigenvalues"], 9).status
        'ok'
        >>> _check_fallbacks([], ["aten::mode"], 9).evidence
        'the forecast does not predict the fallback of aten::mode'
    """
    name = "forecast"
    if not num_mps_operators:
        return Finding(name, NOT_APPLICABLE, "no operator ran on MPS, so none could fall back")
    predicted_names = {operator.split(".")[0] for operator in predicted}
    unexpected = [operator for operator in fallbacks if operator.split(".")[0] not in predicted_names]
    if unexpected:
        problem = f"the forecast does not predict the fallback of {', '.join(unexpected)}"
        return Finding(name, WARNING, problem, "Send this report: the operator table of the forecast is incomplete.")
    return Finding(name, OK, "all fallbacks were predicted")


def _logbook(options: StepOptions) -> StepResult:
    from ..logbook.gathering import logbook
    from ..logbook.logbook import merge_run
    from ..logbook.privacy import SHARED_VARIABLES

    book = logbook(model=MODEL)
    # Paths of directories are private to this computer.
    environment = {name: value for name, value in book.environment.items() if name in SHARED_VARIABLES}
    storage = tuple(replace(volume, path=MASK) for volume in book.storage)
    book = replace(
        book,
        environment=environment,
        storage=storage,
        run=merge_run(options.metrics, book.run),
        metrics=options.metrics,
    )
    return StepResult(book, summary="Save it to read it with Logbook.read() and to compare it with another logbook.")


STEPS: tuple[Step, ...] = (
    Step("device", "Device selection", _device, 5),
    Step("doctor", "Checks of the environment and the device", _doctor, 20),
    Step("signals", "Power, thermal state and memory before the measurements", _signals, 2),
    Step("parity", "Parity of results and gradients with the CPU", _parity, 15),
    Step("shapes", "Seconds for each new shape", _shapes, 20),
    Step("rows", "Single rows compared with batches of 32", _rows, 8),
    Step("compare", "Speedup over the CPU", _compare, 50, timeout_seconds=240.0),
    Step("sweep", "Batch-size sweep", _sweep, 40, timeout_seconds=240.0),
    Step("profile", "Time per phase and operator", _profile, 30, timeout_seconds=240.0),
    Step("memory", "Memory over ten epochs", _memory, 25),
    Step("fallbacks", "CPU fallbacks compared with the forecast", _fallbacks, 15),
    Step("logbook", "Logbook of the measurements", _logbook, 6),
)
