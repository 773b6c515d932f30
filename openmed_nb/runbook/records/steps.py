"""Steps of a report and of a bring-up: a table, and the functions that run in the processes of its rows."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

from ..._render.display import WARNING, Displayable, format_milliseconds, pluralize
from ...session import SESSION
from ...training.curve import GROWTH_EPOCHS
from ...training.epochs import epochs
from ..bench.comparison import compare
from ..bench.fallbacks import fallbacks
from ..bench.profile import profile
from ..bench.sweep import sweep
from ..bench.workloads import SYNTHETIC_TEXTS, Benchmark, build_benchmarks, make_target
from ..checks.doctor import doctor
from ..checks.forecast import forecast
from ..checks.parity import parity
from ..checks.parity_report import CPU_ONLY
from ..verdict.metrics import Area, ReportMetrics
from .gathering import logbook

DEFAULT_SECONDS = 30.0


@dataclass(frozen=True)
class StepOptions:
    """Options of a step.

    Attributes:
        model: Name of the model; ``None`` for the bundled model.
        texts: Texts to measure with; ``None`` for synthetic texts.
        training: Whether to measure training instead of annotation.
        backward: Whether to check the gradients and the operators of a training step.
        quick: Whether to run fewer and shorter measurements.
        seconds: Approximate duration of the sweep and of the comparison, in seconds.
        arguments: Arguments for loading the model.
        device: Device to measure.
        batch_size: Rows of a training step, after the sweep. An annotation uses the batch size in tokens that the sweep stores.
        metrics: Metrics of the previous steps, for the logbook.
        folder: Name of the directory of the report, for the command that reads the logbook.
    """

    model: str | None = None
    texts: Sequence[str] | None = None
    training: bool = False
    backward: bool = True
    quick: bool = False
    seconds: float = DEFAULT_SECONDS
    arguments: Mapping[str, Any] = field(default_factory=dict)
    device: str = "cpu"
    batch_size: int | None = None
    metrics: tuple[ReportMetrics, ...] = ()
    folder: str = "."

    @property
    def workload_arguments(self) -> dict[str, Any]:
        """Arguments of the functions that measure steps of the workload."""
        return {"training": self.training, **self.arguments}


@dataclass(frozen=True)
class StepResult:
    """Result of a step.

    Attributes:
        displayed: Object to display.
        reports: Reports that a logbook and a verdict read.
        summary: Result in one sentence with values; empty if the displayed object has one.
        status: Status, or an empty string for the worst status of the findings.
        batch: Batch size in use in the next steps.
    """

    displayed: Displayable
    reports: tuple[Displayable, ...] = ()
    summary: str = ""
    status: str = ""
    batch: int | None = None


@dataclass(frozen=True)
class Stage:
    """Stage of a bring-up: consecutive steps with one exit criterion.

    Attributes:
        name: Name of the stage.
        criterion: Exit criterion as text. Names of gates in braces are replaced with their thresholds.
        areas: Areas of the verdict in which a reason stops the bring-up.
        rollback: Action that restores the state before the stage.
    """

    name: str
    criterion: str
    areas: frozenset[Area]
    rollback: str


FREEZE = Stage(
    "freeze",
    "The doctor finds no failures, and every MPS variable was set before torch was imported.",
    frozenset(),
    "Restore the packages in the logbook of the last correct run; Logbook.diff() lists the changes.",
)
GATES = Stage(
    "gates",
    "The device computes, at least {entity_agreement} of the entities are the same as on the CPU, and logits differ by at most {logits}.",
    frozenset({Area.CORRECTNESS}),
    "Compute on the CPU until the stage passes: nb.use('cpu').",
)
THROUGHPUT = Stage(
    "throughput",
    "The sweep finds a batch size that fits, and at most {data_fraction} of a step is spent waiting for data.",
    frozenset({Area.DATA, Area.BATCH}),
    "Keep the previous batch size and data loader.",
)
MEMORY = Stage(
    "memory",
    "Memory grows by at most {memory_growth} over ten epochs, and at least {headroom} of the limit stays free.",
    frozenset({Area.MEMORY}),
    "Run shorter trainings in separate processes, and resume from their checkpoints.",
)
SPLIT = Stage(
    "split",
    "At most {fallback_time} of the time is spent in fallbacks, an accelerator is {speedup} faster than the CPU, and no other problem is open.",
    frozenset(Area),
    "Keep this work on its current device.",
)
STAGES = (FREEZE, GATES, THROUGHPUT, MEMORY, SPLIT)


@dataclass(frozen=True)
class Step:
    """Row of the table of steps.

    Attributes:
        name: Name of the step.
        title: Heading of its section.
        run: Function of the step, in a module that its process can import.
        stage: Stage of a bring-up, or ``None`` for a step of the report only.
        timeout_seconds: Time after which the process is killed.
    """

    name: str
    title: str
    run: Callable[[StepOptions], StepResult]
    stage: Stage | None = None
    timeout_seconds: float = 150.0


def _device(_options: StepOptions) -> StepResult:
    SESSION.device_manager.load_torch()  # Without torch, the device is only planned and not verified.
    return StepResult(SESSION.device())


def _doctor(options: StepOptions) -> StepResult:

    report = doctor(options.model)
    return StepResult(report, (report,))


def _parity(options: StepOptions) -> StepResult:

    texts = list(options.texts or SYNTHETIC_TEXTS)
    if options.texts is None and not options.quick:
        texts += [" ".join(SYNTHETIC_TEXTS), " ".join(SYNTHETIC_TEXTS * 12)]  # The last text needs several windows.
    report = parity(options.model, texts, device=options.device, gradients=options.backward, **options.arguments)
    logits = f"Logits differ by at most {report.logit_difference:.2g}"
    gradients = f", gradients by {report.gradients.largest:.2g} of their norm" if report.gradients else ""
    entities = f"{report.spans.exact} of {report.spans.all} entities are the same"
    summary = f"{CPU_ONLY} " if report.is_baseline else ""
    return StepResult(report, (report,), f"{summary}{logits}{gradients}; {entities}.", status=report.status)


def _sweep(options: StepOptions) -> StepResult:

    report = sweep(
        options.model,
        device=options.device,
        max_batch_size=32 if options.quick else None,
        seconds=options.seconds,
        **options.workload_arguments,
    )
    if report.knee is None:
        summary = f"Best batch size not measured: {report.reason} Run nb.sweep(seconds={5 * options.seconds:g})."
        return StepResult(report, (report,), summary, status=WARNING)
    return StepResult(report, (report,), f"Knee: {pluralize(report.knee, 'row')}. {report.reason}", batch=report.knee)


def _profile(options: StepOptions) -> StepResult:

    report = profile(
        options.model,
        None if options.training else options.texts,
        steps=5 if options.quick else 20,
        device=options.device,
        batch_size=options.batch_size,
        **options.workload_arguments,
    )
    dominant_phase = report.phase_times.dominant_phase or "no phase"
    summary = f"A step takes {format_milliseconds(report.seconds)}; {dominant_phase} takes most of it."
    return StepResult(report, (report,), summary)


@contextmanager
def _open_benchmark(options: StepOptions, training: bool) -> Iterator[Benchmark]:
    """Context manager that builds the benchmark of the model on the device, for annotation or training."""
    data = None if training else options.texts
    target, device = make_target(
        options.model, data, training=training, device=options.device, arguments=options.arguments
    )
    with build_benchmarks(target, [device]) as benchmarks:
        yield benchmarks[device]


def _memory(options: StepOptions) -> StepResult:

    with _open_benchmark(options, options.training) as benchmark:
        workload = benchmark.data_workload(options.batch_size)
        loop = epochs(GROWTH_EPOCHS, options.device, release_when=None)
        with workload.open_batches() as batches:
            for _epoch in loop:
                for _step in range(1 if options.quick else 4):
                    workload.run(next(batches))
                    loop.step()
    return StepResult(loop.curve, (loop.curve,))


def _compare(options: StepOptions) -> StepResult:

    comparison = compare(
        options.model,
        None if options.training else options.texts,
        devices=[options.device],
        batch_size=options.batch_size,
        seconds=options.seconds,
        **options.workload_arguments,
    )
    # Only the CPU has no speedup: the first sentence of the report is its speed.
    speeds = comparison.findings[: len(comparison.devices) - 1]
    return StepResult(comparison, (comparison,), " ".join(f"{speed.name}: {speed.evidence}." for speed in speeds))


def _fallbacks(options: StepOptions) -> StepResult:

    prediction = forecast(options.model)
    with _open_benchmark(options, options.backward) as benchmark:
        workload = benchmark.data_workload(2)
        with fallbacks() as log, workload.open_batches() as batches:
            workload.run(next(batches))
    predicted = {operator.split(".")[0] for operator in prediction.cpu_operators}
    unexpected = [operator for operator in log.operators if operator.split(".")[0] not in predicted]
    summary = f"Forecast: {prediction.verdict} Measured: {log.verdict}"
    if not unexpected:
        return StepResult(log, (prediction, log), summary)
    problem = f"The forecast does not predict the fallback of {', '.join(unexpected)}: send this report."
    return StepResult(log, (prediction, log), f"{summary} {problem}", status=WARNING)


def _logbook(options: StepOptions) -> StepResult:

    texts = None if options.training else options.texts or SYNTHETIC_TEXTS
    book = replace(logbook(model=options.model or "bundled", dataset=texts), metrics=options.metrics)
    command = f"nb.runbook.Logbook.read('{options.folder}/logbook.json')"
    return StepResult(book, summary=f"To read it: {command}; its diff() compares it with another logbook.")


STEPS: tuple[Step, ...] = (
    Step("device", "Device selection", _device, FREEZE),
    Step("doctor", "Checks of the environment and the device", _doctor, FREEZE),
    Step("parity", "Parity of results with the CPU", _parity, GATES),
    Step("sweep", "Batch-size sweep", _sweep, THROUGHPUT, timeout_seconds=240.0),
    Step("compare", "Speedup over the CPU", _compare, THROUGHPUT, timeout_seconds=240.0),
    Step("profile", "Time per phase and operator", _profile, timeout_seconds=240.0),
    Step("memory", "Memory over ten epochs", _memory, MEMORY),
    Step("fallbacks", "CPU fallbacks compared with the forecast", _fallbacks, SPLIT),
    Step("logbook", "Logbook of the measurements", _logbook, SPLIT),
)
