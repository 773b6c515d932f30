"""``nb.report`` and ``nb.runbook.bring_up``: runbook measurements of this computer, robust against failures of the device.

Each step runs in a separate process, because an assertion in MPSGraph aborts its process, and a GPU that hangs never returns. The
page and the JSON are written in full after each step, so that a second run resumes.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, NamedTuple

from ..._events.activity import ProgressEvent
from ..._render.display import (
    FAILED,
    NOT_APPLICABLE,
    OK,
    WARNING,
    Displayable,
    Report,
    Table,
    escape,
    format_bytes,
    pluralize,
    to_html,
    to_plain_data,
)
from ..._render.drawing import render_charts, status_badge
from ..._utils.plain import find_changes, read_json_file, save_files, to_json, utc_timestamp
from ..._utils.text import describe_file, describe_value
from ..._utils.validation import check_bool, check_number, check_path
from ..._utils.warning import warn
from ...devices.environment import CONFLICT, TOO_LATE
from ...devices.machine import processor_name, read_simulation
from ...devices.request import DeviceRequest, parse_device_argument, sanitize_path
from ...errors import ConfigurationError, RunInterrupted
from ...models.registry import find_model, is_model_name
from ...session import SESSION, check_options
from ...training.curve import total_memory_bytes
from ..bench.timing import find_disturbance
from ..bench.workloads import ANNOTATION, BUILT_IN, validate_texts
from ..verdict.metrics import TRAINING, Evidence
from ..verdict.verdict import Verdict, evaluate
from .gathering import check_output_folder, package_version, read_software
from .logbook import UtcTimestamp
from .running import DONE, NOT_MET, ReportSubject, StepOutcome, run_step
from .steps import DEFAULT_SECONDS, FREEZE, STAGES, STEPS, Stage, Step, StepOptions

SCHEMA: Literal["openmed_nb/report/1"] = "openmed_nb/report/1"

# Written by scripts/write_schemas.py.
SCHEMA_FILE = Path(__file__).with_name("report.schema.json")

DEFAULT_FOLDER = "openmed_report"
BRING_UP_FOLDER = "openmed_bring_up"
JSON_FILE_NAME = "report.json"

# Notice for users who requested a report.
REVIEW_NOTICE = "Review report.html in {folder} before you share it. No data was sent."

# Duration of the sweep and of the comparison of a quick report, in seconds each. Less time measures a single size on a slow
# CPU, and a single size has no knee.
QUICK_SECONDS = 12.0

# Step that selects the device of the other steps, and step that records their metrics.
DEVICE_STEP = "device"
LOGBOOK_STEP = "logbook"

# Findings of the doctor on devices. The stage after "freeze" checks whether they compute.
DEVICE_FINDINGS = frozenset({"MPS", "CUDA"})


def current_subject(options: StepOptions, request: str | None = None, bring_up: bool = False) -> ReportSubject:
    """Return the subject of a run that starts now, without importing torch."""
    device_manager = SESSION.device_manager
    override = SESSION.override
    machine = device_manager.machine
    simulation = read_simulation()
    return ReportSubject(
        simulated=simulation is not None,
        defects=tuple(simulation["defects"]) if simulation else (),
        request=request or (override.value if override else None),
        model=sanitize_path(options.model or "bundled"),
        texts=len(options.texts or ()),
        quick=options.quick,
        training=options.training,
        bring_up=bring_up,
        chip=machine.chip or processor_name(),
        memory_bytes=machine.memory_bytes or total_memory_bytes(),
        software=replace(read_software(device_manager), torch=package_version("torch")),
    )


@dataclass(frozen=True, repr=False)
class DeviceReport(Displayable):
    """Measurements of one computer, without note texts, user names, host names and home directories.

    ``nb.report()`` and ``nb.runbook.bring_up()`` write it to a directory as an HTML page and a JSON file.

    Attributes:
        schema: Name and version of the JSON format.
        created_at: Time of the last update, in UTC.
        subject: Machine, software and workload.
        device: Measured device; null until it is known.
        planned_steps: Names of all steps, in order.
        steps: Outcomes of the steps that ran, in order.
        verdict: Conclusion in a few sentences.
        not_measured: Missing measurements, as sentences.
        warnings: Warnings about the measurements, as sentences.
        notes: Notes on this run, as sentences.
    """

    schema: Literal["openmed_nb/report/1"]
    created_at: UtcTimestamp
    subject: ReportSubject
    device: str | None
    planned_steps: tuple[str, ...]
    steps: tuple[StepOutcome, ...] = ()
    verdict: str = ""
    not_measured: tuple[str, ...] = ()
    warnings: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()

    @property
    def simulated(self) -> bool:
        """Whether MPS is simulated."""
        return self.subject.simulated

    @property
    def finished_steps(self) -> tuple[str, ...]:
        """Names of the steps with a result that meets its criterion."""
        return tuple(outcome.step for outcome in self.steps if outcome.outcome == DONE)

    @property
    def missing_steps(self) -> tuple[str, ...]:
        """Names of the other steps."""
        return tuple(name for name in self.planned_steps if name not in self.finished_steps)

    @property
    def repeated_steps(self) -> tuple[str, ...]:
        """Names of the steps that the same call runs again: those without a measurement, and those that describe the others."""
        repeated = {outcome.step for outcome in self.steps if (outcome.report_json or {}).get("disturbance")}
        if repeated:
            repeated.add("doctor")
        repeated.update(self.missing_steps)
        return tuple(name for name in self.planned_steps if name in repeated or (repeated and name == LOGBOOK_STEP))

    @property
    def exit_code(self) -> int:
        """Exit status of a command: 1 if a step is missing, else 0. Findings of the steps do not affect it."""
        return 1 if self.missing_steps else 0

    def outcome_for(self, step: str) -> StepOutcome | None:
        """Return the outcome of a step, or ``None`` if it has not run."""
        return next((outcome for outcome in self.steps if outcome.step == step), None)

    def evidence(self, without: str = "") -> Evidence:
        """Return the evidence of all steps, or of all steps except one. Tuples are lists in JSON."""
        values: dict[str, Any] = {}
        for outcome in self.steps:
            for name, value in (outcome.evidence or {}).items():
                if outcome.step != without:
                    values[name] = tuple(value) if isinstance(value, list) else value
        values["device"] = self.device or "cpu"
        values["task"] = TRAINING if self.subject.training else ANNOTATION
        values["simulated"] = self.subject.simulated or None
        return Evidence(**values)

    def to_report(self) -> Report:
        """Return a report of the verdict with a row for each step."""
        rows = tuple(
            (outcome.step, outcome.outcome, outcome.status or "", outcome.message, outcome.remedy)
            for outcome in self.steps
        )
        criteria: tuple[tuple[str, str], ...] = ()
        if self.subject.bring_up:
            limits = evaluate(self.evidence()).gates.format_values()
            criteria = tuple((stage.name, stage.criterion.format(**limits)) for stage in STAGES)
        return Report(
            f"{'Bring-up' if self.subject.bring_up else 'Report'} on {self.device or 'an unknown device'}",
            tuple(filter(None, (self.verdict, *self.notes, *self.warnings))),
            (
                Table("Steps", ("step", "outcome", "status", "message", "suggested action"), rows),
                Table("Stages", ("stage", "criterion"), criteria, collapsed=True),
            ),
            metrics=(Table("System", ("property", "value"), tuple(_describe_subject(self))),),
        )

    @classmethod
    def read(cls, file: str | os.PathLike[str]) -> DeviceReport:
        """Return the report in a ``.json`` file.

        Raises:
            ConfigurationError: If the file cannot be read or is not a report.

        Example:
            >>> from openmed_nb.errors import ConfigurationError
            >>> try:
            ...     DeviceReport.read("nowhere.json")
            ... except ConfigurationError as error:
            ...     print(error.remedy)
            Pass a report.json file of nb.report().
        """
        path = check_path(file, "the file of a report")
        remedy = f"Pass a {JSON_FILE_NAME} file of nb.report()."
        return read_json_file(cls, path, "a report of nb.report()", remedy)

    def with_outcome(self, outcome: StepOutcome) -> DeviceReport:
        """Return the report with the outcome of a step and an updated verdict.

        If the device changed, the outcomes of the other steps are discarded.
        """
        other_outcomes = [other for other in self.steps if other.step != outcome.step]
        device = self.device
        notes = self.notes
        if outcome.step == DEVICE_STEP:
            device = outcome.report_json["device"] if outcome.report_json else "cpu"
            if device != self.device and other_outcomes:
                other_outcomes = []
                notes = (f"Restarted: the device was {self.device} and is {device}.",)
        outcomes = sorted((*other_outcomes, outcome), key=lambda item: self.planned_steps.index(item.step))
        report = replace(self, created_at=utc_timestamp(), device=device, steps=tuple(outcomes), notes=notes)
        verdict = evaluate(report.evidence())
        return replace(
            report,
            verdict=_summarize_verdict(report, verdict),
            not_measured=verdict.not_known,
            warnings=verdict.warnings,
        )

    def files(self) -> dict[str, str]:
        """Return the JSON, the page and the logbook by file name."""
        files = {JSON_FILE_NAME: to_json(self), "report.html": render_page(self)}
        logbook = self.outcome_for(LOGBOOK_STEP)
        if logbook and logbook.report_json:
            files["logbook.json"] = to_json(logbook.report_json)
        return files


def _summarize_verdict(report: DeviceReport, verdict: Verdict) -> str:
    """Return the recommendation with its reason, and the number of finished steps, as sentences."""
    stopped = next((outcome for outcome in report.steps if outcome.outcome != DONE), None)
    device_outcome = report.outcome_for(DEVICE_STEP)
    if report.subject.bring_up and stopped is not None:
        recommendation = f"No, stopped at {stopped.step}: {stopped.message}"
    elif device_outcome is not None and device_outcome.outcome != DONE:
        recommendation = (
            f"The device is unavailable ({device_outcome.message.rstrip('.')}), and the other steps measured the CPU."
        )
    else:
        device = report.device or "an unknown device"
        passed = "Yes. " if report.subject.bring_up and not report.missing_steps else ""
        recommendation = (
            f"{passed}On {device}: {verdict.recommendation}, because {verdict.reason.conditions[0].rstrip('.')}."
        )
    missing = f"; missing: {', '.join(report.missing_steps)}" if report.missing_steps else ""
    finished = f"{len(report.finished_steps)} of {pluralize(len(report.planned_steps), 'step')} finished{missing}."
    problems = [
        outcome.step for outcome in report.steps if outcome.outcome == DONE and outcome.status in {WARNING, FAILED}
    ]
    review = f"Steps to review: {', '.join(problems)}." if problems else ""
    built_in = not (report.subject.texts or report.subject.training)
    texts = f"The notes are {BUILT_IN}." if verdict.answer and built_in else ""
    repeat = ""
    if report.repeated_steps and not report.subject.bring_up:
        repeat = f"Run the same command again: it repeats only {', '.join(report.repeated_steps)}."
    sentences = (recommendation, *verdict.answer, texts, verdict.missing_summary, finished, review, repeat)
    return " ".join(filter(None, sentences))


def _describe_subject(report: DeviceReport) -> Iterator[tuple[str, str]]:
    """Yield the properties of the machine, software and workload as text."""
    subject = report.subject
    versions = subject.software
    yield "processor", subject.chip
    yield "memory", format_bytes(subject.memory_bytes)
    yield "system", f"{versions.system}, {versions.architecture}"
    yield "torch", versions.torch or "not installed"
    yield "transformers", versions.transformers or "not installed"
    yield "Python", versions.python
    yield "openmed_nb", versions.openmed_nb
    yield "model", subject.model
    yield "workload", f"{'training' if subject.training else 'annotation'}{', quick' if subject.quick else ''}"
    yield "duration", f"{sum(outcome.seconds for outcome in report.steps):.0f} s"
    yield "created at", report.created_at


# The page supports light and dark color schemes: all colors are system colors or translucent.
PAGE_STYLE = """<style>
:root {color-scheme: light dark;}
body {background: Canvas; color: CanvasText; font: 16px/1.5 system-ui, sans-serif; max-width: 60rem; margin: 0 auto; padding: 1rem; overflow-wrap: break-word;}
section {border-top: 1px solid #8886; margin-top: 2rem;}
h1 {font-size: 1.6rem; line-height: 1.25;} h1 + p {font-size: 1.1rem;} h2 {font-size: 1.2rem;}
.wide {overflow-x: auto;} .wide th, .wide td {overflow-wrap: anywhere; min-width: 5.5rem;} .wide tbody th {min-width: 7rem;}
.state {font-size: 0.85rem; font-weight: 600; white-space: nowrap;}
pre {overflow-x: auto; font-size: 0.8rem; border-left: 3px solid #c92a2a; padding-left: 0.7rem;}
.openmed-picture th {overflow-wrap: anywhere !important; min-width: 6em;}
@media (max-width: 40rem) { /* The evidence and the suggested action of a check are below its name and status. */
.wide th, .wide td {min-width: 3rem;}
.wide table:has(td:nth-child(2) > span) thead {display: none;}
.wide tr:has(td:nth-child(2) > span) {display: grid; grid-template-columns: 1fr auto;}
.wide tr:has(td:nth-child(2) > span) > :nth-child(n+3) {grid-column: 1 / -1;}
.wide details {overflow-x: auto;} .wide details :is(th, td) {min-width: 0; padding-right: 0.5em !important; white-space: normal !important;}
.wide details table {font-size: 0.85em !important;} .wide details td, .wide details thead th {overflow-wrap: break-word;}
}
</style>"""


def render_page(report: DeviceReport) -> str:
    """Return a report as an HTML page with its conclusion and a section for each step that ran."""
    displayed = report.final_report()
    title = escape(displayed.title)
    paragraphs = "".join(f"<p>{escape(sentence)}</p>" for sentence in displayed.sentences)
    missing = "".join(f"<li>{escape(sentence)}</li>" for sentence in report.not_measured) or "<li>None.</li>"
    titles = {step.name: step.title for step in STEPS}
    parts = [
        f"<h1>{title}</h1>{paragraphs}<details><summary>Missing measurements</summary><ul>{missing}</ul></details>",
        # Without the table of the steps, which have separate sections.
        _scrollable_html(Report("", metrics=displayed.metrics), "System"),
    ]
    for outcome in report.steps:
        label = (outcome.status or "") if outcome.outcome == DONE else outcome.outcome
        badge = status_badge(label if label in {OK, WARNING, NOT_APPLICABLE} else FAILED)
        state = f'<span class="state">{badge} {escape(label)}</span>'
        heading = f"{escape(titles.get(outcome.step, outcome.step))} {state}"
        parts.append(f'<section id="{escape(outcome.step)}"><h2>{heading}</h2>{_render_outcome(outcome)}</section>')
    viewport = '<meta name="viewport" content="width=device-width, initial-scale=1">'
    head = f'<meta charset="utf-8">{viewport}<title>{title}</title>{PAGE_STYLE}'
    return f'<!doctype html>\n<html lang="en"><head>{head}</head>\n<body><main>{"".join(parts)}</main></body></html>\n'


def _scrollable_html(report: Report, label: str) -> str:
    """Return a report as HTML that scrolls horizontally on narrow pages, with keyboard support."""
    return f'<div class="wide" role="group" aria-label="{escape(label)}" tabindex="0">{to_html(report)}</div>'


def _render_outcome(outcome: StepOutcome) -> str:
    """Return the message, charts and full report of a step as HTML."""
    parts = [f"<p>{escape(sentence)}</p>" for sentence in (outcome.message, outcome.remedy) if sentence]
    if outcome.output:
        lines = escape("\n".join(outcome.output))
        parts.append(f'<pre tabindex="0" aria-label="Last lines of the output">{lines}</pre>')
    if outcome.report:
        parts.append(render_charts(*outcome.report.charts))
        is_open = "" if outcome.status in {OK, NOT_APPLICABLE} else " open"
        full_report = _scrollable_html(replace(outcome.report, charts=()), outcome.report.title)
        summary = f"<summary>Full report ({outcome.seconds:.0f} s)</summary>"
        parts.append(f"<details{is_open}>{summary}{full_report}</details>")
    return "".join(parts)


class Obstacle(NamedTuple):
    """Reason why the criterion of a stage is not met, with a remedy."""

    message: str
    remedy: str


def find_obstacle(stage: Stage, report: DeviceReport, seconds: float) -> Obstacle | None:
    """Return the reason why the criterion of a stage is not met, or ``None`` if it is met."""
    evidence = report.evidence()
    doctor = report.outcome_for("doctor")
    if stage is FREEZE and doctor is not None:
        failures = {*(evidence["doctor_failures"] or ())} - DEVICE_FINDINGS
        for finding in doctor.report_json["findings"]:
            if finding["name"] in failures:
                return Obstacle(f"{finding['name']}: {finding['evidence']}.", finding["remedy"])
        for setting in SESSION.device_manager.mps_environment(report.device or "cpu").settings:
            if setting.effect in {TOO_LATE, CONFLICT}:
                return Obstacle(f"{setting.name}: {setting.effect}.", setting.remedy)
    return unmet_criterion(evaluate(evidence), stage, seconds)


def unmet_criterion(verdict: Verdict, stage: Stage, seconds: float) -> Obstacle | None:
    """Return the obstacle of a stage in a verdict, or ``None`` if its criterion is met.

    A missing measurement stops only the stage that measures it, and the last stage.
    """
    is_last = stage is STAGES[-1]
    for reason in verdict.reasons:
        if (
            reason.precedence in stage.areas
            and reason.recommendation != "keep this device"
            and (reason.metrics or is_last)
        ):
            metrics = verdict.describe_metrics(reason)
            details = f" ({metrics})" if metrics else ""
            return Obstacle(f"{'; '.join(reason.conditions)}{details}.", " ".join(reason.actions))
    if is_last:
        return None
    for requirement in verdict.missing_requirements:
        if requirement.is_needed and requirement.precedence in stage.areas and requirement.is_blocking:
            remedy = f"Repeat the bring-up with seconds={2 * seconds:g}, or run {requirement.command}."
            return Obstacle(f"missing measurement: {requirement.name}.", remedy)
    return None


def report(
    folder: str | os.PathLike[str] = DEFAULT_FOLDER,
    *,
    model: str | os.PathLike[str] | None = None,
    quick: bool = False,
    training: bool = False,
) -> DeviceReport:
    """Benchmark and check this computer, and write a page and a JSON file.

    The steps are: device selection; the doctor with its probes; parity with gradients; a sweep; a comparison with the CPU; a
    profile; memory over ten epochs; fallbacks compared with the forecast; and a logbook. They use synthetic texts. Each step
    runs in a separate process with a time limit. A step that is aborted, hangs or runs out of memory is therefore a row of
    the report, and the other steps continue.

    Args:
        folder: Directory of ``report.html``, ``report.json`` and ``logbook.json``, which are updated after each step. It is created
            if it does not exist. No data is sent. Only the best batch size is written elsewhere, for :func:`annotate`. A second run with the same directory keeps the steps
            with a measurement and runs the others. If the computer, torch or an argument changed, all steps run again, and the
            report states the reason.
        model: Name or directory of a model. If ``None``, use the bundled model.
        quick: Whether to run fewer and shorter measurements: one to two minutes instead of five.
        training: Whether to measure training steps instead of annotation.

    Returns:
        The report: ``verdict``, in a few sentences; ``not_measured``; ``steps``, each with ``outcome`` (``"done"``,
        ``"failed"``, ``"crashed"`` or ``"timed out"``), ``message``, and ``report_json``, its own JSON; ``missing_steps``, the
        steps without a result; and ``exit_code``, 1 if there are any.

    Raises:
        ConfigurationError: If the directory is not writable, or its ``report.json`` is not a report.
        UnknownModelError: If there is no such model.
        RunInterrupted: If the run is interrupted. The running step is killed, and the same call resumes.

    The report contains no note texts, user names, host names or home directories. The JSON Schema is in
    ``runbook/records/report.schema.json``.

    Example:
        >>> from openmed_nb.errors import ConfigurationError
        >>> try:
        ...     report("my-mac", quick="yes")
        ... except ConfigurationError as error:
        ...     print(error.remedy)
        Pass True or False.
    """
    check_bool("quick", quick)
    check_bool("training", training)
    options = StepOptions(
        model=_check_model(model),
        training=training,
        quick=quick,
        seconds=QUICK_SECONDS if quick else DEFAULT_SECONDS,
    )
    return run_report(check_output_folder(folder), options)


def bring_up(  # noqa: PLR0913 - the arguments are independent user options
    model: str | os.PathLike[str] | None = None,
    texts: Iterable[Any] | None = None,
    *,
    folder: str | os.PathLike[str] = BRING_UP_FOLDER,
    device: str | None = None,
    training: bool = False,
    seconds: float = DEFAULT_SECONDS,
    **arguments: Any,
) -> DeviceReport:
    """Bring a model up on a device in five stages, and stop at the first unmet exit criterion.

    The stages are ``freeze`` (interpreter, packages, variables), ``gates`` (the device computes, and its results are
    correct), ``throughput`` (batch sweep, time waiting for data), ``memory`` (ten epochs) and ``split`` (CPU fallbacks, and
    speedup over the CPU). Their steps are those of :func:`openmed_nb.report`, each in a separate process. The same call resumes
    at the first stage that has not passed.

    Args:
        model: Name or directory of a model. If ``None``, use the bundled model.
        texts: Texts to measure with, which are never saved. If ``None``, use synthetic texts.
        folder: Directory of ``report.json`` and ``report.html``. If it belongs to another model, machine or torch version, all
            stages run again, and the result states the reason.
        device: Device. If ``None``, use the device of the session.
        training: Whether to train the model on synthetic rows instead of annotating texts.
        seconds: Approximate duration of the sweep and of the comparison, in seconds each.
        arguments: Arguments of :func:`openmed_nb.load_model`, such as ``revision``.

    Returns:
        The report: ``verdict``, yes or no with the reason; ``steps``, with the message and remedy of each; ``missing_steps``;
        and ``exit_code``, 0 if all criteria are met. A step whose result does not meet the criterion of its stage has the
        outcome ``"not met"``.

    Raises:
        ConfigurationError: If an argument is invalid, or the directory is not writable or contains another ``report.json``.
        UnknownModelError: If there is no such model.
        RunInterrupted: If the run is interrupted. The same call resumes it.

    Measurements are compared with :func:`gates`, as in :func:`openmed_nb.verdict`.

    Example:
        >>> from openmed_nb.errors import ConfigurationError
        >>> try:
        ...     bring_up(training="yes")
        ... except ConfigurationError as error:
        ...     print(error.remedy)
        Pass True or False.
    """
    check_options(bring_up, arguments)
    check_bool("training", training)
    if not is_model_name(model) or isinstance(texts, str):
        remedy = "Pass nb.runbook.bring_up(model, texts, folder='my_folder'): the name of a model, and a list of texts."
        raise ConfigurationError(f"Invalid types: {describe_value(model)}, {describe_value(texts)}.", remedy)
    options = StepOptions(
        model=_check_model(model),
        texts=validate_texts(texts),
        training=training,
        backward=training,
        seconds=check_number("seconds", seconds, above=0, example=f"{DEFAULT_SECONDS:g}"),
        arguments=arguments,
    )
    if not all(isinstance(value, (str, int, float, type(None))) for value in arguments.values()):
        raise ConfigurationError(
            "An argument for loading the model cannot be sent to another process.",
            "Pass texts, numbers, True, False or None.",
        )
    request = None
    if device is not None:
        request = parse_device_argument(device)
        DeviceRequest.parse(request, "nb.runbook.bring_up()")
    directory = check_output_folder(folder)
    return run_report(directory, options, [step for step in STEPS if step.stage], request, bring_up=True)


def _check_model(model: Any) -> str | None:
    """Return the name of a model.

    Raises:
        ConfigurationError: If it is not a name.
        UnknownModelError: If there is no such model.
    """
    return None if model is None else find_model(model).name


def load_previous(initial: DeviceReport, folder: Path) -> DeviceReport:
    """Return the saved report of a directory with a note for the user. If it has another subject, return the initial report.

    Raises:
        ConfigurationError: If the file of the report has other content.
    """
    file = folder / JSON_FILE_NAME
    if not file.exists():
        return initial
    remedy = f"Pass a new folder, or delete that file in {describe_file(folder)}."
    previous = read_json_file(DeviceReport, file, "a report of this version", remedy)
    changes = find_changes(to_plain_data(previous.subject), to_plain_data(initial.subject))
    if changes or previous.planned_steps != initial.planned_steps:
        names = ", ".join(".".join(change.path) for change in changes) or "list of steps"
        note = f"Restarted: the earlier report in this folder had another {names}. To keep a report, use a new folder."
        return replace(initial, notes=(note,))
    # What a busy computer has measured is measured again.
    kept = [outcome for outcome in previous.steps if outcome.step not in previous.repeated_steps]
    if previous.subject.bring_up:  # All steps of an unfinished stage run again.
        stages = {step.name: step.stage for step in STEPS}
        unfinished = [stages.get(name) for name in previous.missing_steps]
        kept = [outcome for outcome in kept if stages.get(outcome.step) not in unfinished]
    previous = replace(previous, steps=tuple(kept))
    count = len(previous.finished_steps)
    return replace(previous, notes=(f"Kept from a previous run: {pluralize(count, 'step')}.",) if count else ())


def run_report(
    folder: Path,
    options: StepOptions,
    steps: Sequence[Step] = STEPS,
    request: str | None = None,
    bring_up: bool = False,
) -> DeviceReport:
    """Run the unfinished steps in order, save the report after each step, and return it.

    Args:
        folder: Directory of the saved files.
        options: Options of the steps.
        steps: All steps, in order.
        request: Requested device, or ``None`` for the device of the session.
        bring_up: Whether to stop at the first step without a result, and at the first criterion that is not met.

    Raises:
        ConfigurationError: If the directory is not writable, before the first step or after a step.
        RunInterrupted: If the run is interrupted.
    """
    operation = "Bringing up" if bring_up else "Reporting"
    subject = current_subject(options, request, bring_up)
    planned_steps = tuple(step.name for step in steps)
    report = load_previous(DeviceReport(SCHEMA, utc_timestamp(), subject, None, planned_steps), folder)
    save_files(folder, report.files(), "The report")
    completed = len(steps)
    if disturbance := find_disturbance():
        warn(f"No times can be measured now: {disturbance}. {disturbance.remedy}")
    with SESSION.operation():
        for number, step in enumerate(steps):
            if step.name in report.finished_steps:
                continue
            SESSION.notify(ProgressEvent(operation, step.name, number, len(steps), "step"))
            known = report.evidence(without=step.name)
            metrics = tuple(metrics for outcome in report.steps for metrics in outcome.metrics)
            batch_size = known["knee"] if options.training else None
            step_options = replace(
                options,
                device=report.device or "cpu",
                batch_size=batch_size,
                metrics=metrics,
                folder=sanitize_path(folder),
            )
            try:
                # Once the device is known, all other steps measure it.
                step_subject = replace(subject, request=report.device or subject.request)
                outcome = run_step(step, step_options, step_subject, known)
            except KeyboardInterrupt:
                hint = f"Run the same {'bring-up' if bring_up else 'report'} again to continue."
                raise RunInterrupted(len(report.finished_steps), report, str(folder), "step", hint) from None
            report = report.with_outcome(outcome)
            is_stage_end = all(later.stage is not step.stage for later in steps[number + 1 :])
            if bring_up and step.stage and is_stage_end and outcome.outcome == DONE:
                obstacle = find_obstacle(step.stage, report, options.seconds)
                if obstacle is not None:
                    message = f"The criterion of the stage {step.stage.name} is not met: {obstacle.message}"
                    remedy = f"{obstacle.remedy} Rollback: {step.stage.rollback}"
                    unmet = replace(outcome, outcome=NOT_MET, status="failed", message=message, remedy=remedy)
                    report = report.with_outcome(unmet)
            save_files(folder, report.files(), "The report")
            if bring_up and step.name in report.missing_steps:
                completed = number
                break
        target = "model" if bring_up else "this computer"
        SESSION.notify(ProgressEvent(operation, target, completed, len(steps), "step"))
    return report
