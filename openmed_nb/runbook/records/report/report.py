"""``nb.report``: everything that the runbook measures on this computer, whatever its device does meanwhile.

Each step runs in a process of its own: an assertion inside MPSGraph aborts its process, and a wedged GPU hangs. After each
step the page, the JSON and the text for an issue are written whole, so that a second run goes on.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from ...._render.display import FAILED, WARNING, Report, Table, format_bytes, pluralize, to_plain_data
from ...._utils.plain import read_json_file, to_json, utc_timestamp
from ...._utils.validation import check_bool, check_path
from ....devices.machine import ACTIVE_SIMULATIONS
from ....session import SESSION
from ...bench.workloads import ANNOTATION
from ...verdict.metrics import TRAINING
from ...verdict.verdict import Verdict, evaluate
from ..runner import RESTARTED_PREFIX, Staged, Subject, current_subject, evidence_from, resume, run_stages
from .page import render_issue, render_page
from .record import DONE, SCHEMA, ReportData, StepOutcome
from .running import run_step
from .steps import STEPS, Step

FOLDER = "openmed_report"
JSON = "report.json"

# What is said where a report was asked for.
REVIEW_NOTICE = "Look at report.html in {folder} before you send anything: nothing was sent."

# Reports of other people's computers, as they sent them; CONTRIBUTING.md says how.
SHIPPED_REPORTS_FOLDER = Path(__file__).parents[1] / "reports"

# How much of the time of a report a quick one takes, before any of its steps has run.
QUICK_FRACTION = 0.35

# The step that says where the others measure.
DEVICE = "device"

# A figure is like another one within this factor: computers of one kind differ by heat, power and other programs.
SIMILARITY_FACTOR = 1.5


@dataclass(frozen=True, repr=False)
class DeviceReport(ReportData, Staged):
    """What all steps of a report found on a computer; its fields are those of :class:`.record.Record`.

    ``nb.report()`` has written it into a folder, as a page, a JSON and a text for an issue.
    """

    WHAT = "The report"
    DOING = "Reporting"
    NAME = "this computer"
    STAGE = "step"
    AGAIN = "run the same report again"
    FILE = JSON
    CONTENT = "a report of nb.report()"
    REMEDY = f"Pass the {JSON} that nb.report() has written."

    @property
    def finished(self) -> tuple[str, ...]:
        """The names of the steps that have an answer."""
        return tuple(outcome.step for outcome in self.steps if outcome.outcome == DONE)

    @property
    def missing_steps(self) -> tuple[str, ...]:
        """The names of the steps that have no answer."""
        return tuple(name for name in self.planned_steps if name not in self.finished)

    @property
    def exit_code(self) -> int:
        """What a command ends with: 1 if a step has no answer, else 0; what the steps found changes nothing of it."""
        return int(bool(self.missing_steps))

    def to_report(self) -> Report:
        """Return the verdict and a line for each step; the figures stand on the page."""
        rows = tuple((step.step, step.outcome, step.status or "", step.message, step.remedy) for step in self.steps)
        like, compared = compare_speeds(self, find_shipped_report(self.subject))
        sentences = (self.verdict, *self.notes, *self.warnings, *self.not_measured, like)
        return Report(
            f"Report on {self.device or 'no device yet'}",
            tuple(filter(None, sentences)),
            (Table("Steps", ("step", "outcome", "found", "what", "what to do"), rows),),
            metrics=(Table("Of what", ("what", "value"), tuple(_facts_of(self))), compared),
        )

    @classmethod
    def read(cls, file: str | os.PathLike[str]) -> DeviceReport:
        """Return the report of a ``.json`` file.

        Raises:
            ConfigurationError: For a file that cannot be read, and for one that is not such a report.

        Example:
            >>> from openmed_nb.errors import ConfigurationError
            >>> try:
            ...     DeviceReport.read("nowhere.json")
            ... except ConfigurationError as error:
            ...     print(error.remedy)
            Pass the report.json that nb.report() has written.
        """
        path = check_path(file, "the file of a report")
        stored: DeviceReport = read_json_file(cls, path, cls.CONTENT, cls.REMEDY)
        return stored

    @property
    def known(self) -> dict[str, Any]:
        """The figures for a verdict that its steps found."""
        values = {name: value for step in self.steps for name, value in (step.evidence or {}).items()}
        task = TRAINING if self.subject.training else ANNOTATION
        return {**values, "device": self.device or "cpu", "task": task}

    def with_outcome(self, outcome: StepOutcome) -> DeviceReport:
        """Return the report with what became of a step, and what it all comes to then; another device begins anew."""
        others = [step for step in self.steps if step.step != outcome.step]
        device = self.device
        notes = self.notes
        if outcome.step == DEVICE:
            device = outcome.report_json["device"] if outcome.outcome == DONE else "cpu"
            if device != self.device and others:
                others = []
                notes = (f"{RESTARTED_PREFIX}the device was {self.device} and is {device}.",)
        steps = sorted((*others, outcome), key=lambda step: self.planned_steps.index(step.step))
        report = replace(self, written=utc_timestamp(), device=device, steps=tuple(steps), notes=notes)
        judged = evaluate(evidence_from(report.known, simulated=self.simulated))
        return replace(
            report, verdict=_verdict_of(report, judged), not_measured=judged.not_known, warnings=judged.warnings
        )

    @property
    def identity(self) -> dict[str, Any]:
        """What a former report must have in common with this one to be continued."""
        return {**to_plain_data(self.subject), "planned_steps": self.planned_steps}

    def files(self) -> dict[str, str]:
        """Return the JSON, the page and the text for an issue."""
        shown = self.final_report()
        return {JSON: to_json(self), "report.html": render_page(self, shown), "issue.md": render_issue(self, shown)}


def _verdict_of(record: DeviceReport, judged: Verdict) -> str:
    """Return what a report comes to in two sentences: what to do and why, and how much of it has an answer."""
    tried = record.outcome_for(DEVICE)
    if tried is not None and tried.outcome != DONE:
        first = f"The device cannot be used ({tried.message.rstrip('.')}), and the rest was measured on the CPU."
    else:
        first = f"On {record.device or 'a device that is not known'}: {judged.recommendation}, because {judged.reason.conditions[0].rstrip('.')}."
    missing = f": not {', '.join(record.missing_steps)}" if record.missing_steps else ""
    second = f"{len(record.finished)} of {pluralize(len(record.planned_steps), 'step')} ran{missing}."
    bad = [step.step for step in record.steps if step.outcome == DONE and step.status in {WARNING, FAILED}]
    return f"{first} {second}" + (f" To be looked at: {', '.join(bad)}." if bad else "")


def _facts_of(record: ReportData) -> Iterator[tuple[str, str]]:
    """Yield what a report is of, as people read it."""
    subject = record.subject
    versions = subject.software
    yield "processor", subject.chip
    signals = record.outcome_for("signals")
    tables = signals.report.tables if signals and signals.report else ()
    yield from (("GPU", " ".join(row[1:])) for table in tables for row in table.rows if row[:1] == ("GPU",))
    yield "memory", format_bytes(subject.memory_bytes)
    yield "system", f"{versions.system}, {versions.architecture}"
    yield "torch", versions.torch or "not installed"
    yield "transformers", versions.transformers or "not installed"
    yield "Python", versions.python
    yield "openmed_nb", versions.openmed_nb
    yield "measured", f"{'training' if subject.training else 'annotation'}{', quick' if subject.quick else ''}"
    yield "took", f"{sum(step.seconds for step in record.steps):.0f} s"
    yield "written", record.written


def find_shipped_report(subject: Subject, folder: Path = SHIPPED_REPORTS_FOLDER) -> DeviceReport | None:
    """Return a shipped report of a chip, torch and system as here, of the same work; ``None`` if there is none."""
    reports = map(DeviceReport.read, sorted(folder.glob("*.json")))
    wanted = (subject.kind, subject.training)
    return next((report for report in reports if (report.subject.kind, report.subject.training) == wanted), None)


def compare_speeds(record: DeviceReport, other: DeviceReport | None) -> tuple[str, Table]:
    """Return how the speeds of a report are to those of another one, in a sentence and as a table."""
    ours = _speed_metrics(record)
    theirs = {} if other is None else _speed_metrics(other)
    both = {name: (value, theirs[name]) for name, value in ours.items() if value > 0 and theirs.get(name, 0) > 0}
    rows = tuple((name, f"{here:.4g}", f"{there:.4g}", f"{here / there:.2f}") for name, (here, there) in both.items())
    table = Table("Compared with a shipped report", ("figure", "here", "there", "times"), rows)
    if record.simulated:
        return "", table
    if not both:
        what = "No report of this processor with this torch and system is shipped yet"
        return f"{what}: CONTRIBUTING.md says how to send this one.", table
    alike = sum(1 / SIMILARITY_FACTOR <= here / there <= SIMILARITY_FACTOR for here, there in both.values())
    return f"As in the shipped report of such a computer: {alike} of {pluralize(len(both), 'figure')}.", table


def _speed_metrics(record: ReportData) -> dict[str, float]:
    """Return the figures of a report that are times or rates, by report, device and name."""
    return {
        f"{figures.report}, {figures.device}: {name.replace('_', ' ')}": value
        for step in record.steps
        for figures in step.figures
        for name, value in figures.values.items()
        if name.endswith(("seconds", "per_second"))
    }


def report(
    folder: str | os.PathLike[str] = FOLDER, *, quick: bool = False, training: bool = False, progress: bool = True
) -> DeviceReport:
    """Measure this computer from end to end, and write what was found as one page, one JSON and one text for an issue.

    The steps: which device and why; the doctor with its probes; power, heat and memory; parity with gradients; seconds for
    each new shape; a calibration from 256 to 65,536 tokens; one row against 32; a sweep; a comparison with the CPU; a
    profile; memory over ten epochs; fallbacks against the forecast; and a logbook. They take the bundled model and synthetic
    texts. Each runs in a process of its own with a time limit, so that one that is aborted, hangs, runs out of memory or
    fills the disk is a line of the report, and the others go on.

    Args:
        folder: Where ``report.html``, ``report.json`` and ``issue.md`` are written, after each step; it is made if it is not
            there. Nothing is sent or written anywhere else. A second run in the same folder keeps the steps that have an
            answer, and runs the others, as long as computer, torch and arguments are the same; else it starts anew and says why.
        quick: Whether fewer and shorter measurements will do: about one minute instead of five.
        training: Whether training steps are swept, compared and profiled instead of annotation.
        progress: Whether to show what is under way, where it takes longer than half a second.

    Returns:
        The report: ``verdict``, in two sentences; ``not_measured``; ``steps``, each with ``outcome`` (``"done"``, ``"failed"``,
        ``"died"`` or ``"hung"``), what it found, and ``data``, its own JSON; ``missing``, the steps without an answer; and
        ``exit_code``, 1 if there are any.

    Raises:
        ConfigurationError: For a folder that cannot be written, and for one whose ``report.json`` is something else.
        Interrupted: For an interrupt: the running step is ended, and the same call goes on later.

    No text of a note, no name of a person or a computer, and no home is in it. The form of the JSON is published in
    ``runbook/records/report/report.schema.json``.

    Example:
        >>> report("my-mac", quick="yes")
        Traceback (most recent call last):
        ...
        openmed_nb.errors.ConfigurationError: quick cannot be 'yes'. Pass True or False.
    """
    check_bool("quick", quick)
    check_bool("training", training)
    with SESSION.operation(progress):
        return run_report(check_path(folder, "the folder of a report"), quick, training)


def run_report(folder: Path, quick: bool, training: bool, steps: Sequence[Step] = STEPS) -> DeviceReport:
    """Return the report of some steps, run in order, in a folder; see :func:`report`."""
    simulated: dict[str, Any] = ACTIVE_SIMULATIONS[0].to_dict() if ACTIVE_SIMULATIONS else {}  # type: ignore[attr-defined]
    subject = current_subject(training, quick, bool(simulated), simulated.get("defects", ()))
    planned = tuple(step.name for step in steps)

    def measure(step: Step, found: DeviceReport) -> tuple[DeviceReport, dict[str, str]]:
        outcome = run_step(step, _task_for(found, simulated), SESSION.device_manager.user_environ)
        return found.with_outcome(outcome), {}

    def progress(step: Step, found: DeviceReport) -> str:
        """Return the name of a step, and about how long all that are left will take at the pace of those that have run."""
        usual = {step.name: step.seconds for step in steps}
        pace = QUICK_FRACTION if quick else 1.0
        if found.steps:
            pace = sum(ran.seconds for ran in found.steps) / sum(usual[ran.step] for ran in found.steps)
        return f"{step.name}, {_format_eta(pace * sum(usual[name] for name in found.missing_steps))}"

    found, note = resume(DeviceReport(SCHEMA, utc_timestamp(), subject, None, planned), folder)
    return run_stages(replace(found, notes=(note,) if note else ()), steps, measure, folder, progress)


def _format_eta(seconds: float) -> str:
    """Return about how long something still takes.

    Example:
        >>> _format_eta(7), _format_eta(50), _format_eta(200)
        ('about 10 s left', 'about 50 s left', 'about 4 min left')
    """
    tens = 10 * math.ceil(seconds / 10)
    return f"about {tens} s left" if tens < 60 else f"about {math.ceil(seconds / 60)} min left"  # noqa: PLR2004 - a minute


def _task_for(found: DeviceReport, simulated: Mapping[str, Any]) -> dict[str, Any]:
    """Return what the process of a step needs to know; steps that need no device do not ask for it."""
    subject = found.subject
    return {
        "quick": subject.quick,
        "training": subject.training,
        # Once the device is known, no other one is measured.
        "request": found.device or subject.request,
        "simulated": {"memory": simulated["installed"], "defects": simulated["defects"]} if simulated else {},
        "device": found.device or "cpu",
        "figures": to_plain_data([figures for step in found.steps for figures in step.figures]),
        "evidence": to_plain_data(found.known),
    }
