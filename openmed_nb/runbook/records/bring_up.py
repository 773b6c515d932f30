"""``nb.runbook.bring_up``: bring a model up on a device in five stages, each with an exit criterion.

The first stage whose criterion is not met stops the bring-up.
"""

from __future__ import annotations

import contextlib
import functools
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Literal

from ..._render.display import (
    FAILED,
    NOT_APPLICABLE,
    OK,
    WARNING,
    Displayable,
    Report,
    Table,
    pluralize,
    to_html,
    to_plain_data,
)
from ..._render.drawing import Chart, StatusIndicator
from ..._utils.plain import to_json, utc_timestamp
from ..._utils.validation import check_bool, check_number, check_path
from ...devices.environment import CONFLICT, TOO_LATE
from ...errors import DeviceError
from ...models.registry import is_model_name
from ...session import SESSION
from ...training.epochs import function_name
from ..bench.workloads import Workload
from ..checks.doctor.report import DoctorReport, doctor
from ..verdict.metrics import REPORTS, Area
from ..verdict.rules import KEEP_DEVICE
from ..verdict.verdict import Verdict, evaluate
from .logbook.gathering import logbook
from .logbook.privacy import sanitize_path
from .logbook.sections import ReportMetrics, UtcTimestamp
from .runner import (
    NamedStage,
    ReportSubject,
    StagedReport,
    current_subject,
    load_previous,
    merge_evidence,
    read_reports,
    run_stages,
)

if TYPE_CHECKING:
    from .logbook.gathering import ModelArgument

DEFAULT_FOLDER = "openmed_bring_up"
SCHEMA: Literal["openmed_nb/ladder/1"] = "openmed_nb/ladder/1"
DEFAULT_SECONDS = 30.0

STEPS_PER_EPOCH = 4  # Of the memory curve.


@dataclass(frozen=True)
class BringUpOptions:
    """Options of a bring-up.

    Attributes:
        model: Model to bring up.
        texts: Texts to measure with; ``None`` for synthetic texts.
        device: Device to bring the model up on.
        training: Whether the model is trained instead of annotating.
        seconds: Approximate duration of the sweep and of the comparison, in seconds.
        arguments: Arguments for loading the model.
        knee: Batch size at the knee, after the sweep.
    """

    model: ModelArgument
    texts: Sequence[object] | None
    device: str
    training: bool
    seconds: float
    arguments: Mapping[str, Any]
    knee: int | None = None

    @property
    def data(self) -> Sequence[object] | None:
        return None if self.training else self.texts

    @contextlib.contextmanager
    def open_workload(self) -> Iterator[Workload]:
        """Context manager that places the model on the device, with a workload of the batch size of the sweep."""
        from ..bench.workloads import SYNTHETIC_BATCH_SIZE, open_benchmark

        with open_benchmark(
            self.model, self.data, training=self.training, device=self.device, arguments=self.arguments
        ) as benchmark:
            yield benchmark.data_workload(self.knee or SYNTHETIC_BATCH_SIZE)


NamedReports = Iterator[tuple[str, Displayable]]


def _measure_environment(options: BringUpOptions) -> NamedReports:
    yield "doctor", doctor(options.model)
    yield "logbook", logbook(model=options.model, dataset=options.texts)


def _measure_correctness(options: BringUpOptions) -> NamedReports:
    from ..bench.workloads import SYNTHETIC_TEXTS
    from ..checks.precision.parity import parity

    yield "device", SESSION.device(options.device)
    texts = SYNTHETIC_TEXTS if options.texts is None else options.texts
    arguments = options.arguments
    if is_model_name(options.model):  # A pipeline stays on its device.
        arguments = {"device": options.device, **arguments}
    yield "parity", parity(options.model, texts, gradients=options.training, **arguments)


def _measure_throughput(options: BringUpOptions) -> NamedReports:
    from ..bench.comparison import compare
    from ..bench.sweep import sweep

    settings = {"training": options.training, "seconds": options.seconds, **options.arguments}
    sweep_report = sweep(options.model, device=options.device, **settings)
    yield "sweep", sweep_report
    devices = [options.device]
    batch_size = sweep_report.knee
    yield "comparison", compare(options.model, options.data, devices=devices, batch_size=batch_size, **settings)


def _measure_memory(options: BringUpOptions) -> NamedReports:
    from ..bench.workloads import measure_epoch_memory

    with options.open_workload() as workload:
        yield "memory", measure_epoch_memory(workload, STEPS_PER_EPOCH, options.device)


def _measure_fallbacks(options: BringUpOptions) -> NamedReports:
    from ..checks.operators.fallbacks import fallbacks
    from ..checks.operators.forecast import forecast

    yield "forecast", forecast(options.model, training=options.training)
    with options.open_workload() as workload, fallbacks() as log, workload.open_batches() as batches:
        workload.run(next(batches))
    yield "fallbacks", log


@dataclass(frozen=True)
class Stage(NamedStage):
    """A stage of a bring-up.

    Attributes:
        description: Description of the measurements.
        criterion: Exit criterion as text. Names of gates in braces are replaced with their thresholds.
        measure: Function that yields the reports of the stage, with the names of their files.
        areas: Areas of the verdict in which a reason stops the bring-up.
        rollback: Action that restores the state before the stage.
    """

    description: str
    criterion: str
    measure: Callable[[BringUpOptions], NamedReports]
    areas: frozenset[Area]
    rollback: str


STAGES: tuple[Stage, ...] = (
    Stage(
        "freeze",
        "interpreter, packages, environment variables",
        "The doctor finds no failures, and every MPS variable was set before torch was imported.",
        _measure_environment,
        frozenset(),
        "Restore the packages in the logbook of the last correct run; Logbook.diff() lists the changes.",
    ),
    Stage(
        "gates",
        "built, available, usable, correct",
        "The device computes, at least {entity_agreement} of the entities are the same as on the CPU, and logits differ by at most {logits}.",
        _measure_correctness,
        frozenset({Area.CORRECTNESS}),
        "Compute on the CPU until the stage passes: nb.use('cpu').",
    ),
    Stage(
        "throughput",
        "batch sweep, and time waiting for data",
        "The sweep finds a batch size that fits, and at most {data_fraction} of a step is spent waiting for data.",
        _measure_throughput,
        frozenset({Area.DATA, Area.BATCH}),
        "Keep the previous batch size and data loader.",
    ),
    Stage(
        "memory",
        "ten epochs",
        "Memory grows by at most {memory_growth} over ten epochs, and at least {headroom} of the limit stays free.",
        _measure_memory,
        frozenset({Area.MEMORY}),
        "Run shorter trainings in separate processes, and resume from their checkpoints.",
    ),
    Stage(
        "split",
        "CPU fallbacks, and speedup over the CPU",
        "At most {fallback_time} of the time is spent in fallbacks, an accelerator is {speedup} faster than the CPU, and no other problem is open.",
        _measure_fallbacks,
        frozenset(Area),
        "Keep this work on its current device.",
    ),
)

STATUS_TEXTS = {OK: "passed", FAILED: "stopped here", NOT_APPLICABLE: "not reached"}

# Evidence that is required before work moves to the device, with its file.
REQUIRED_EVIDENCE = {
    "architecture of the interpreter": "doctor.json",
    "device": "device.json",
    "batch sweep": "sweep.json",
    "memory curve": "memory.json",
    "parity": "parity.json",
}


@dataclass(frozen=True)
class StageResult:
    """Result of a stage.

    Attributes:
        stage: Name of the stage.
        status: Whether its criterion is met.
        message: Problem in one sentence; empty if the criterion is met.
        remedy: Suggested action; empty if the criterion is met.
        files: Names of its report files.
        created_at: Time of completion, in UTC.
        metrics: Metrics for a logbook.
        evidence: Metrics that it adds to the verdict.
    """

    stage: str
    status: Literal["ok", "failed"]
    message: str
    remedy: str
    files: tuple[str, ...]
    created_at: UtcTimestamp
    metrics: tuple[ReportMetrics, ...]
    evidence: dict[str, Any]


@dataclass(frozen=True, repr=False)
class BringUpReport(StagedReport):
    """Progress of a bring-up.

    Attributes:
        schema: Name and version of the JSON format.
        model: Name of the model.
        texts: Number of texts; 0 for synthetic texts.
        device: Device of the bring-up.
        subject: Machine, software and workload.
        results: Results of the stages that ran, in order.
        note: Reason for a restart, or the number of stages from a previous run.
    """

    DESCRIPTION = "The bring-up report"
    OPERATION = "Bringing up"
    TARGET = "model"
    STAGE = "stage"
    RESUME_HINT = "Run nb.runbook.bring_up() with the same arguments to continue."
    FILE = "bring_up.json"
    CONTENT = "a report of nb.runbook.bring_up()"
    REMEDY = "Pass another directory."

    schema: Literal["openmed_nb/ladder/1"]
    model: str
    texts: int
    device: str
    subject: ReportSubject
    results: tuple[StageResult, ...] = ()
    note: str = ""

    @property
    def passed(self) -> tuple[str, ...]:
        """Names of the stages whose criteria are met."""
        return tuple(result.stage for result in self.results if result.status == OK)

    finished_stages = passed

    @property
    def complete(self) -> bool:
        """Whether the criteria of all stages are met."""
        return len(self.passed) == len(STAGES)

    @property
    def _failed_result(self) -> StageResult | None:
        """Result of the stage whose criterion is not met, or ``None`` if there is none."""
        return next((result for result in self.results if result.status == FAILED), None)

    @property
    def exit_code(self) -> int:
        """Exit status of a command: 0 if all criteria are met, else 1."""
        return 0 if self.complete else 1

    @property
    def verdict(self) -> Verdict:
        """Verdict on all measurements so far."""
        return evaluate(merge_evidence(self.subject, self.device, [result.evidence for result in self.results]))

    @property
    def conclusion(self) -> str:
        """Conclusion in one line: yes with the files of the evidence, or no with the reason."""
        if self.complete:
            evidence = ", ".join(f"{description} ({file})" for description, file in REQUIRED_EVIDENCE.items())
            return f"Yes, {self.verdict.recommendation}: {evidence}."
        failed = self._failed_result
        return f"No, stopped at {failed.stage}: {failed.message}" if failed else "No, no stage has run yet."

    def to_report(self) -> Report:
        """Return a report of the conclusion and the stages with their criteria."""
        limits = self.verdict.gates.format_values()
        files = {result.stage: ", ".join(result.files) for result in self.results}
        statuses: dict[str, str] = {result.stage: result.status for result in self.results}
        indicators = []
        stage_rows = []
        for stage in STAGES:
            status = statuses.get(stage.name, NOT_APPLICABLE)
            indicators.append(StatusIndicator(stage.name, status, STATUS_TEXTS[status]))
            stage_rows.append((stage.name, STATUS_TEXTS[status], stage.criterion.format(**limits)))
        sentences = [self.conclusion]
        failed = self._failed_result
        if failed:
            rollback = next(stage.rollback for stage in STAGES if stage.name == failed.stage)
            sentences += [f"Suggested action: {failed.remedy}", f"Rollback: {rollback}"]
        if self.note:
            sentences.append(self.note)
        file_rows = tuple((stage.name, stage.description, files.get(stage.name, "")) for stage in STAGES)
        incomplete_status = FAILED if failed else WARNING
        return Report(
            f"Bring-up on {self.device}: {len(self.passed)} of {pluralize(len(STAGES), 'stage')} passed",
            tuple(sentences),
            (Table("Stages", ("stage", "status", "criterion"), tuple(stage_rows), collapsed=True),),
            metrics=(Table("Files", ("stage", "measurements", "files"), file_rows, collapsed=True),),
            status=OK if self.complete else incomplete_status,
            charts=(Chart("Progress", indicators=tuple(indicators)),),
        )

    def logbook_metrics(self) -> ReportMetrics:
        """Return the numbers of stages for a logbook."""
        values = {"stages": float(len(STAGES)), "stages_passed": float(len(self.passed))}
        return ReportMetrics(
            "bring_up", self.model, self.device, "yes" if self.complete else "no", self.simulated, values
        )

    @property
    def identity(self) -> dict[str, object]:
        """JSON-compatible values that a saved report must share with this report to be resumed."""
        return {"model": self.model, "texts": self.texts, "device": self.device, **to_plain_data(self.subject)}

    def files(self) -> dict[str, str]:
        """Return the JSON and the HTML page by file name."""
        page = f"<!doctype html>\n<meta charset=utf-8>\n<title>Bring-up</title>\n{to_html(self.final_report())}\n"
        return {self.FILE: to_json(self), "bring_up.html": page}


@dataclass(frozen=True)
class Obstacle:
    """Reason why the criterion of a stage is not met, with a remedy."""

    message: str
    remedy: str


def unmet_criterion(verdict: Verdict, stage: Stage, seconds: float) -> Obstacle | None:
    """Return the obstacle of a stage in a verdict, or ``None`` if its criterion is met.

    A missing measurement stops only the stage that measures it, and the last stage.
    """
    is_last = stage is STAGES[-1]
    for reason in verdict.reasons:
        if reason.precedence in stage.areas and reason.recommendation != KEEP_DEVICE and (reason.metrics or is_last):
            metrics = verdict.describe_metrics(reason)
            details = f" ({metrics})" if metrics else ""
            return Obstacle(f"{'; '.join(reason.conditions)}{details}.", " ".join(reason.actions))
    if is_last:
        return None
    for requirement in verdict.missing_requirements:
        if requirement.is_needed and requirement.precedence in stage.areas and requirement.is_blocking:
            longer = f"seconds={2 * seconds:g} (--seconds {2 * seconds:g} on the command line)"
            remedy = f"Repeat the bring-up with {longer}, or run {requirement.command}."
            return Obstacle(f"missing measurement: {requirement.name}.", remedy)
    return None


# Findings of the doctor on devices. The stage after "freeze" checks whether they compute.
DEVICE_FINDINGS = frozenset({"MPS", "CUDA"})


def _find_environment_problem(report: DoctorReport, failures: Iterable[str], device: str) -> Obstacle | None:
    """Return the environment problems that the doctor found as an obstacle, or ``None`` if there are none."""
    settings = SESSION.device_manager.mps_environment(device).settings
    names = {setting.name for setting in settings if setting.effect in {TOO_LATE, CONFLICT}}
    names |= {*failures} - DEVICE_FINDINGS
    problems = [finding for finding in report.findings if finding.name in names]
    if not problems:
        return None
    return Obstacle(" ".join(f"{finding.name}: {finding.evidence}." for finding in problems), problems[0].remedy)


def bring_up(  # noqa: PLR0913 - the arguments are independent user options
    model: ModelArgument = None,
    texts: Iterable[Any] | None = None,
    *,
    folder: str | os.PathLike[str] = DEFAULT_FOLDER,
    device: str | None = None,
    training: bool = False,
    seconds: float = DEFAULT_SECONDS,
    progress: bool = True,
    **arguments: Any,
) -> BringUpReport:
    """Bring a model up on a device in five stages, and stop at the first unmet exit criterion.

    The stages are ``freeze`` (interpreter, packages, variables), ``gates`` (the device is built, available, usable and
    correct), ``throughput`` (batch sweep, time waiting for data), ``memory`` (ten epochs) and ``split`` (CPU fallbacks, and
    speedup over the CPU). The results of each stage are saved when it finishes. The same call resumes at the first stage that
    has not passed.

    Args:
        model: Name of a model, or a pipeline of :func:`openmed_nb.load_pipeline`. If ``None``, use the bundled model.
        texts: Texts to measure with, which are never saved. If ``None``, use synthetic texts.
        folder: Directory of the JSON reports, ``bring_up.json`` and ``bring_up.html``. If it belongs to another model,
            machine or torch version, all stages run again, and the result states the reason.
        device: Device. If ``None``, use the device of the session.
        training: Whether to train the model on synthetic rows instead of annotating texts.
        seconds: Approximate duration of the sweep and of the comparison, in seconds each.
        progress: Whether to display progress after half a second.
        arguments: Arguments of :func:`openmed_nb.load_model` for a model name, such as ``revision``.

    Returns:
        The report: ``conclusion``, yes or no in one line; ``complete``; ``results``, with the message, remedy and files of each
        stage; ``verdict`` on all measurements so far; and ``exit_code``, 0 if the bring-up is complete.

    Raises:
        ConfigurationError: If an argument is invalid, or the directory is not writable or contains other files of these names.
        ModelError: If the model cannot be loaded.
        InvalidTextError: If a text is invalid; the error has its index.
        RunInterrupted: If the run is interrupted. The same call resumes it.

    A device error stops the bring-up at its stage. Measurements are compared with :func:`gates`, as in
    :func:`openmed_nb.verdict`.

    Example:
        >>> from openmed_nb.errors import ConfigurationError
        >>> try:
        ...     bring_up(training="yes")
        ... except ConfigurationError as error:
        ...     print(error.remedy)
        Pass True or False.
    """
    from ...annotation.references import iter_texts

    check_bool("training", training)
    seconds = check_number("seconds", seconds, above=0, example=f"{DEFAULT_SECONDS:g}")
    directory = check_path(folder, "the folder of a bring-up")
    with SESSION.operation(progress):
        text_list = None if texts is None else list(iter_texts(texts))
        options = BringUpOptions(model, text_list, SESSION.device(device).device, training, seconds, arguments)
        name = function_name(model) if callable(model) else sanitize_path("bundled" if model is None else str(model))
        subject = replace(current_subject(training), request=None)
        initial = BringUpReport(SCHEMA, name, len(text_list or ()), options.device, subject)
        previous, note = load_previous(initial, directory)
        measure = functools.partial(_run_stage, options)
        return run_stages(replace(previous, note=note), STAGES, measure, directory, stop_on_failure=True)


def _run_stage(options: BringUpOptions, stage: Stage, previous: BringUpReport) -> tuple[BringUpReport, dict[str, str]]:
    """Run a stage, and return the report with its result and the contents of its files by name.

    Results of a failed stage are discarded, so that it is measured again.
    """
    passed = tuple(result for result in previous.results if result.status == OK)
    knee = next((result.evidence.get("knee") for result in passed if result.stage == "throughput"), None)
    known = merge_evidence(previous.subject, previous.device, [result.evidence for result in passed])
    reports: dict[str, Displayable] = {}
    obstacle = None
    try:
        reports.update(stage.measure(replace(options, knee=knee)))
    except DeviceError as error:
        obstacle = Obstacle(error.message, error.remedy)
    readings = read_reports([report for report in reports.values() if isinstance(report, REPORTS)], known)
    report = reports.get("doctor")
    if obstacle is None and isinstance(report, DoctorReport):
        failures = readings.new_evidence.get("doctor_failures", ())
        obstacle = _find_environment_problem(report, failures, options.device)
    obstacle = obstacle or unmet_criterion(evaluate(readings.evidence), stage, options.seconds)
    result = StageResult(
        stage=stage.name,
        status="failed" if obstacle else "ok",
        message=obstacle.message if obstacle else "",
        remedy=obstacle.remedy if obstacle else "",
        files=tuple(f"{name}.json" for name in reports),
        created_at=utc_timestamp(),
        metrics=readings.metrics,
        evidence=to_plain_data(readings.new_evidence),
    )
    files = {f"{name}.json": to_json(report) for name, report in reports.items()}
    return replace(previous, results=(*passed, result)), files
