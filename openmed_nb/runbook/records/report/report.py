"""``nb.report``: all runbook measurements of this computer, robust against failures of the device.

Each step runs in a separate process, because an assertion in MPSGraph aborts its process, and a GPU that hangs never returns. The
page, the JSON and the text for an issue are written in full after each step, so that a second run resumes.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from ...._render.display import FAILED, WARNING, Report, Table, format_bytes, pluralize, to_plain_data
from ...._utils.plain import read_json_file, to_json, utc_timestamp
from ...._utils.validation import check_bool, check_path
from ....session import SESSION
from ...verdict.verdict import Verdict, evaluate
from ..runner import (
    RESTARTED_PREFIX,
    StagedReport,
    current_subject,
    load_previous,
    merge_evidence,
    run_stages,
)
from .page import render_issue, render_page
from .record import DONE, SCHEMA, ReportData, StepOutcome
from .running import run_step
from .steps import STEPS, Step

DEFAULT_FOLDER = "openmed_report"
JSON_FILE_NAME = "report.json"

# Notice for users who requested a report.
REVIEW_NOTICE = "Review report.html in {folder} before you share it. No data was sent."

# Suffix of the title of a report on a virtual GPU.
VIRTUAL_SUFFIX = " (paravirtual: correctness, no speed)"

# Name of the Metal device in a virtual machine, as on the macOS runners of GitHub (VeloxQuant-MLX#395, 2026-09-16).
VIRTUAL_METAL_DEVICE = "Apple Paravirtual device"

# Duration of a quick report as a fraction of a full report, before any step has run.
QUICK_FRACTION = 0.35

# Step that selects the device of the other steps.
DEVICE_STEP = "device"


@dataclass(frozen=True, repr=False)
class DeviceReport(ReportData, StagedReport):
    """Results of all steps of a report on a computer, with the fields of :class:`.record.ReportData`.

    ``nb.report()`` writes it to a directory as an HTML page, a JSON file and a text for an issue.
    """

    DESCRIPTION = "The report"
    OPERATION = "Reporting"
    TARGET = "this computer"
    STAGE = "step"
    RESUME_HINT = "Run the same report again to continue."
    FILE = JSON_FILE_NAME
    CONTENT = "a report of nb.report()"
    REMEDY = f"Pass a {JSON_FILE_NAME} file of nb.report()."

    @property
    def finished_stages(self) -> tuple[str, ...]:
        """Names of the steps with a result."""
        return tuple(outcome.step for outcome in self.steps if outcome.outcome == DONE)

    @property
    def missing_steps(self) -> tuple[str, ...]:
        """Names of the steps without a result."""
        return tuple(name for name in self.planned_steps if name not in self.finished_stages)

    @property
    def exit_code(self) -> int:
        """Exit status of a command: 1 if a step has no result, else 0. Findings of the steps do not affect it."""
        return 1 if self.missing_steps else 0

    def to_report(self) -> Report:
        """Return a report of the verdict with a row for each step; measured values are on the page."""
        rows = tuple(
            (outcome.step, outcome.outcome, outcome.status or "", outcome.message, outcome.remedy)
            for outcome in self.steps
        )
        title = f"Report on {self.device or 'an unknown device'}"
        virtual = ""
        if gpu := _find_virtual_gpu(self):
            title += VIRTUAL_SUFFIX
            virtual = f"The GPU is virtual: {gpu}. The report shows whether results are correct; its times do not represent a Mac."
        sentences = (virtual, self.verdict, *self.notes, *self.warnings)
        return Report(
            title,
            tuple(filter(None, sentences)),
            (Table("Steps", ("step", "outcome", "status", "message", "suggested action"), rows),),
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
        report: DeviceReport = read_json_file(cls, path, cls.CONTENT, cls.REMEDY)
        return report

    def with_outcome(self, outcome: StepOutcome) -> DeviceReport:
        """Return the report with the outcome of a step and an updated verdict.

        If the device changed, the outcomes of the other steps are discarded.
        """
        other_outcomes = [other for other in self.steps if other.step != outcome.step]
        device = self.device
        notes = self.notes
        if outcome.step == DEVICE_STEP:
            device = outcome.report_json["device"] if outcome.outcome == DONE else "cpu"
            if device != self.device and other_outcomes:
                other_outcomes = []
                notes = (f"{RESTARTED_PREFIX}the device was {self.device} and is {device}.",)
        outcomes = sorted((*other_outcomes, outcome), key=lambda item: self.planned_steps.index(item.step))
        report = replace(self, created_at=utc_timestamp(), device=device, steps=tuple(outcomes), notes=notes)
        verdict = evaluate(merge_evidence(report.subject, report.device, [item.evidence for item in report.steps]))
        return replace(
            report,
            verdict=_summarize_verdict(report, verdict),
            not_measured=verdict.not_known,
            warnings=verdict.warnings,
        )

    @property
    def identity(self) -> dict[str, object]:
        """JSON-compatible values that a saved report must share with this report to be resumed."""
        return {**to_plain_data(self.subject), "planned_steps": self.planned_steps}

    def files(self) -> dict[str, str]:
        """Return the JSON, the page and the text for an issue by file name."""
        displayed = self.final_report()
        return {
            JSON_FILE_NAME: to_json(self),
            "report.html": render_page(self, displayed),
            "issue.md": render_issue(self, displayed),
        }


def _summarize_verdict(report: DeviceReport, verdict: Verdict) -> str:
    """Return the recommendation with its reason, and the number of finished steps, as sentences."""
    device_outcome = report.outcome_for(DEVICE_STEP)
    if device_outcome is not None and device_outcome.outcome != DONE:
        problem = device_outcome.message.rstrip(".")
        recommendation = f"The device is unavailable ({problem}), and the other steps measured the CPU."
    else:
        device = report.device or "an unknown device"
        reason = verdict.reason.conditions[0].rstrip(".")
        recommendation = f"On {device}: {verdict.recommendation}, because {reason}."
    missing = f"; missing: {', '.join(report.missing_steps)}" if report.missing_steps else ""
    finished = f"{len(report.finished_stages)} of {pluralize(len(report.planned_steps), 'step')} finished{missing}."
    problems = [
        outcome.step for outcome in report.steps if outcome.outcome == DONE and outcome.status in {WARNING, FAILED}
    ]
    review = f"Steps to review: {', '.join(problems)}." if problems else ""
    sentences = (recommendation, *verdict.answer, verdict.missing_summary, finished, review)
    return " ".join(filter(None, sentences))


def _find_virtual_gpu(report: ReportData) -> str:
    """Return the name of the GPU of a report, or of its chip, if it is virtual, otherwise an empty string."""
    outcome = report.outcome_for("doctor")
    if outcome is not None and VIRTUAL_METAL_DEVICE in json.dumps(outcome.report_json):
        return VIRTUAL_METAL_DEVICE
    chip = report.subject.chip
    return chip if chip.endswith("(Virtual)") else ""


def _describe_subject(report: ReportData) -> Iterator[tuple[str, str]]:
    """Yield the properties of the machine, software and workload as text."""
    subject = report.subject
    versions = subject.software
    yield "processor", subject.chip
    system_status = report.outcome_for("signals")
    tables = system_status.report.tables if system_status and system_status.report else ()
    yield from (("GPU", " ".join(row[1:])) for table in tables for row in table.rows if row[:1] == ("GPU",))
    if virtual_gpu := _find_virtual_gpu(report):
        yield "virtual GPU", virtual_gpu
    yield "memory", format_bytes(subject.memory_bytes)
    yield "system", f"{versions.system}, {versions.architecture}"
    yield "torch", versions.torch or "not installed"
    yield "transformers", versions.transformers or "not installed"
    yield "Python", versions.python
    yield "openmed_nb", versions.openmed_nb
    yield "workload", f"{'training' if subject.training else 'annotation'}{', quick' if subject.quick else ''}"
    yield "duration", f"{sum(outcome.seconds for outcome in report.steps):.0f} s"
    yield "created at", report.created_at


def report(
    folder: str | os.PathLike[str] = DEFAULT_FOLDER,
    *,
    quick: bool = False,
    training: bool = False,
    progress: bool = True,
) -> DeviceReport:
    """Benchmark and check this computer, and write a page, a JSON file and a text for an issue.

    The steps are: device selection; the doctor with its probes; power, thermal state and memory; parity with gradients;
    the compile time of each new shape; batches of one row compared with 32 rows; a sweep; a comparison with the CPU; a
    profile; memory over ten epochs; fallbacks compared with the forecast; and a logbook.
    They use the bundled model and synthetic texts. Each step runs in a separate process with a time limit. A step that is
    aborted, hangs, runs out of memory or fills the disk is therefore a row of the report, and the other steps continue.

    Args:
        folder: Directory of ``report.html``, ``report.json`` and ``issue.md``, which are updated after each step. It is created
            if it does not exist. No data is sent or written elsewhere. A second run with the same directory keeps the steps
            with a result and runs the others. If the computer, torch or an argument changed, all steps run again, and the
            report states the reason.
        quick: Whether to run fewer and shorter measurements: about one minute instead of five.
        training: Whether to sweep, compare and profile training steps instead of annotation.
        progress: Whether to display progress after half a second.

    Returns:
        The report: ``verdict``, in a few sentences; ``not_measured``; ``steps``, each with ``outcome`` (``"done"``,
        ``"failed"``, ``"crashed"`` or ``"timed out"``), ``message``, and ``report_json``, its own JSON; ``missing_steps``, the
        steps without a result; and ``exit_code``, 1 if there are any.

    Raises:
        ConfigurationError: If the directory is not writable, or its ``report.json`` is not a report.
        RunInterrupted: If the run is interrupted. The running step is killed, and the same call resumes.

    The report contains no note texts, user names, host names or home directories. The JSON Schema is in
    ``runbook/records/report/report.schema.json``.

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
    with SESSION.operation(progress):
        return run_report(check_path(folder, "the folder of a report"), quick, training)


def run_report(folder: Path, quick: bool, training: bool, steps: Sequence[Step] = STEPS) -> DeviceReport:
    """Run steps in order and return their report; see :func:`report`."""
    subject = current_subject(training, quick)
    planned_steps = tuple(step.name for step in steps)

    expected = {step.name: step.expected_seconds for step in steps}

    def measure(step: Step, previous: DeviceReport) -> tuple[DeviceReport, dict[str, str]]:
        return previous.with_outcome(run_step(step, previous, SESSION.device_manager.user_environ)), {}

    def describe_progress(step: Step, previous: DeviceReport) -> str:
        """Return the name of a step with the estimated remaining time, at the pace of the steps that have run."""
        pace = QUICK_FRACTION if quick else 1.0
        if previous.steps:
            pace = sum(outcome.seconds for outcome in previous.steps) / sum(
                expected[outcome.step] for outcome in previous.steps
            )
        remaining = pace * sum(expected[name] for name in previous.missing_steps)
        rounded = 10 * math.ceil(remaining / 10)
        eta = f"{rounded} s" if rounded < 60 else f"{math.ceil(remaining / 60)} min"  # noqa: PLR2004 - a minute
        return f"{step.name}, about {eta} left"

    initial, note = load_previous(DeviceReport(SCHEMA, utc_timestamp(), subject, None, planned_steps), folder)
    notes = (note,) if note else ()
    return run_stages(replace(initial, notes=notes), steps, measure, folder, describe_progress)
