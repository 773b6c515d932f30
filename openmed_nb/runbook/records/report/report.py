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

from ...._events.activity import Activity
from ...._render.display import FAILED, WARNING, Report, Shown, Table, counted, in_bytes, plain
from ...._utils.clock import now
from ...._utils.plain import read_as, save_in, to_json, utc
from ...._utils.validation import check_flag, given_path
from ....devices.machine import SIMULATION_ON, processor_name
from ....errors import ConfigurationError, Interrupted
from ....session import SESSION
from ....training.curve import installed_bytes
from ...bench.workloads import ANNOTATION
from ...verdict.evidence import TRAINING
from ...verdict.verdict import Verdict, judge
from ..logbook.gathering import software, version_of
from .page import issue_of, page_of
from .record import DONE, SCHEMA, Outcome, Record, Subject, evidence_from
from .running import run_step
from .steps import STEPS, Step

FOLDER = "openmed_report"
JSON, PAGE, ISSUE = "report.json", "report.html", "issue.md"

# What is said where a report was asked for.
LOOK_FIRST = "Look at report.html in {folder} before you send anything: nothing was sent."

# Reports of other people's computers, as they sent them; CONTRIBUTING.md says how.
SHIPPED = Path(__file__).parents[1] / "reports"

SECONDS_OF_A_MINUTE = 60

# The step that says where the others measure.
DEVICE = "device"

# A figure is like another one within this factor: computers of one kind differ by heat, power and other programs.
ALIKE = 1.5


@dataclass(frozen=True, repr=False)
class DeviceReport(Record, Shown):
    """What all steps of a report found on a computer; its fields are those of :class:`.record.Record`.

    ``nb.report()`` has written it into a folder, as a page, a JSON and a text for an issue.
    """

    @property
    def simulated(self) -> bool:
        """Whether the MPS device is a simulated one."""
        return self.subject.simulated

    @property
    def missing(self) -> tuple[str, ...]:
        """The names of the steps that have no answer."""
        return tuple(name for name in self.planned if (one := self.of(name)) is None or one.outcome != DONE)

    @property
    def exit_code(self) -> int:
        """What a command ends with: 1 if a step has no answer, else 0; what the steps found changes nothing of it."""
        return int(bool(self.missing))

    def report(self) -> Report:
        """Return the verdict and a line for each step; the figures stand on the page."""
        rows = tuple((one.step, one.outcome, one.status or "", one.what, one.remedy) for one in self.steps)
        steps = Table("Steps", ("step", "outcome", "found", "what", "what to do"), rows)
        like, compared = compared_with(self, shipped_like(self.subject))
        sentences = (self.verdict, *self.notes, *self.cautions, *self.not_measured, *filter(None, (like,)))
        figures = (Table("Of what", ("what", "value"), tuple(facts_of(self))), compared)
        return Report(f"Report on {self.device or 'no device yet'}", sentences, (steps,), figures=figures)

    @classmethod
    def read(cls, file: str | os.PathLike[str]) -> DeviceReport:
        """Return the report of a ``.json`` file.

        Raises:
            ConfigurationError: For a file that cannot be read, and for one that is not such a report.

        Example:
            >>> try:
            ...     DeviceReport.read("nowhere.json")
            ... except ConfigurationError as error:
            ...     print(error.remedy)
            Pass the report.json that nb.report() has written.
        """
        path = given_path(file, "the file of a report")
        remedy = f"Pass the {JSON} that nb.report() has written."
        found: DeviceReport = read_as(cls, path, "a report of nb.report()", remedy)
        return found

    @property
    def known(self) -> dict[str, Any]:
        """The figures for a verdict that its steps found."""
        found = {name: value for one in self.steps for name, value in (one.evidence or {}).items()}
        task = TRAINING if self.subject.training else ANNOTATION
        return {**found, "device": self.device or "cpu", "task": task}

    def with_outcome(self, outcome: Outcome) -> DeviceReport:
        """Return the report with what became of a step, and what it all comes to then; another device begins anew."""
        others, device, notes = [one for one in self.steps if one.step != outcome.step], self.device, self.notes
        if outcome.step == DEVICE:
            device = outcome.data["device"] if outcome.outcome == DONE else "cpu"
            if device != self.device and others:
                others, notes = [], (f"{ANEW}the device was {self.device} and is {device}.",)
        steps = tuple(sorted((*others, outcome), key=lambda one: self.planned.index(one.step)))
        found = replace(self, written=utc(), device=device, steps=steps)
        judged = judge(evidence_from(found.known, simulated=self.simulated))
        verdict = " ".join(verdict_of(found, judged))
        return replace(found, verdict=verdict, not_measured=judged.not_known, cautions=judged.cautions, notes=notes)


ANEW = "Started anew: "


def verdict_of(record: DeviceReport, judged: Verdict) -> tuple[str, str]:
    """Return what a report comes to in two sentences: what to do and why, and how much of it has an answer."""
    tried = record.of(DEVICE)
    if tried is not None and tried.outcome != DONE:
        first = f"The device cannot be used ({tried.what.rstrip('.')}), and the rest was measured on the CPU."
    else:
        first = f"On {record.device or 'a device that is not known'}: {judged.recommendation}, because {judged.reason.when[0].rstrip('.')}."
    done = len(record.planned) - len(record.missing)
    second = f"{done} of {counted(len(record.planned), 'step')} ran"
    second += f": not {', '.join(record.missing)}." if record.missing else "."
    bad = [one.step for one in record.steps if one.outcome == DONE and one.status in {WARNING, FAILED}]
    return first, f"{second} To be looked at: {', '.join(bad)}." if bad else second


def facts_of(record: Record) -> Iterator[tuple[str, str]]:
    """Yield what a report is of, as people read it."""
    subject, versions = record.subject, record.subject.software
    yield "processor", subject.chip
    signals = record.of("signals")
    tables = signals.report.tables if signals and signals.report else ()
    yield from (("GPU", " ".join(row[1:])) for table in tables for row in table.rows if row[:1] == ("GPU",))
    yield "memory", in_bytes(subject.memory_bytes)
    yield "system", f"{versions.system}, {versions.architecture}"
    yield "torch", versions.torch or "not installed"
    yield "transformers", versions.transformers or "not installed"
    yield "Python", versions.python
    yield "openmed_nb", versions.openmed_nb
    yield "measured", f"{'training' if subject.training else 'annotation'}{', quick' if subject.quick else ''}"
    yield "took", f"{sum(one.seconds for one in record.steps):.0f} s"
    yield "written", record.written


def shipped_like(subject: Subject, folder: Path = SHIPPED) -> DeviceReport | None:
    """Return a shipped report of a chip, torch and system as here, of the same work; ``None`` if there is none."""
    reports = map(DeviceReport.read, sorted(folder.glob("*.json")))
    wanted = (subject.kind, subject.training)
    return next((one for one in reports if (one.subject.kind, one.subject.training) == wanted), None)


def compared_with(record: DeviceReport, other: DeviceReport | None) -> tuple[str, Table]:
    """Return how the speeds of a report are to those of another one, in a sentence and as a table."""
    ours, theirs = speeds_of(record), {} if other is None else speeds_of(other)
    both = {name: (value, theirs[name]) for name, value in ours.items() if value > 0 and theirs.get(name, 0) > 0}
    rows = tuple((name, f"{here:.4g}", f"{there:.4g}", f"{here / there:.2f}") for name, (here, there) in both.items())
    table = Table("Compared with a shipped report", ("figure", "here", "there", "times"), rows)
    if record.simulated:
        return "", table
    if not both:
        what = "No report of this processor with this torch and system is shipped yet"
        return f"{what}: CONTRIBUTING.md says how to send this one.", table
    alike = sum(1 / ALIKE <= here / there <= ALIKE for here, there in both.values())
    return f"As in the shipped report of such a computer: {alike} of {counted(len(both), 'figure')}.", table


def speeds_of(record: Record) -> dict[str, float]:
    """Return the figures of a report that are times or rates, by report, device and name."""
    return {
        f"{one.report}, {one.device}: {name.replace('_', ' ')}": value
        for step in record.steps
        for one in step.figures
        for name, value in one.values.items()
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
    ``runbook/report/report.schema.json``.

    Example:
        >>> report("my-mac", quick="yes")
        Traceback (most recent call last):
        ...
        openmed_nb.errors.ConfigurationError: quick cannot be 'yes'. Pass True or False.
    """
    check_flag("quick", quick)
    check_flag("training", training)
    with SESSION.told_after(progress):
        return reported(given_path(folder, "the folder of a report"), quick, training)


def reported(folder: Path, quick: bool, training: bool, steps: Sequence[Step] = STEPS) -> DeviceReport:
    """Return the report of some steps, run in order, in a folder; see :func:`report`."""
    simulated: Any = SIMULATION_ON[0].to_dict() if SIMULATION_ON else {}  # type: ignore[attr-defined]
    found = continued(folder, subject_here(simulated, quick, training), tuple(one.name for one in steps))
    if failure := write(found, folder):  # A folder that cannot be written shows before anything is measured.
        raise failure
    begin, spent = now(), 0.0
    for number, step in enumerate(steps):
        if step.name not in found.missing:
            continue
        to_do = sum(one.usual(quick) for one in steps[number:] if one.name in found.missing)
        pace = (now() - begin) / spent if spent else 1.0
        SESSION.tell(Activity("Reporting", f"{step.name}, {time_left(pace * to_do)}", number, len(steps)))
        try:
            outcome = run_step(step, task_for(found, simulated), SESSION.computer.shell)
        except KeyboardInterrupt:
            done = len(steps) - len(found.missing)
            raise Interrupted(done, found, str(folder), "step", "run the same report again") from None
        spent += step.usual(quick)
        found = found.with_outcome(outcome)
        failure = write(found, folder)
    if spent:
        SESSION.tell(Activity("Reporting", "this computer", len(steps), len(steps), "step"))
    if failure:  # A step may have filled the disk, and the next one may have found room again.
        raise failure
    return found


def time_left(seconds: float) -> str:
    """Return about how long something still takes.

    Example:
        >>> time_left(7), time_left(50), time_left(200)
        ('about 10 s left', 'about 50 s left', 'about 4 min left')
    """
    tens = 10 * math.ceil(seconds / 10)
    return (
        f"about {tens} s left"
        if tens < SECONDS_OF_A_MINUTE
        else f"about {math.ceil(seconds / SECONDS_OF_A_MINUTE)} min left"
    )


def subject_here(simulated: Mapping[str, Any], quick: bool, training: bool) -> Subject:
    """Return what a report that begins now is of; torch is not loaded for that."""
    computer, override = SESSION.computer, SESSION.override
    machine = computer.machine
    return Subject(
        bool(simulated),
        tuple(simulated.get("defects", ())),
        override.value if override else None,
        quick,
        training,
        machine.chip or processor_name(),
        machine.memory_bytes or installed_bytes(),
        replace(software(computer), torch=version_of("torch")),
    )


def continued(folder: Path, subject: Subject, planned: tuple[str, ...]) -> DeviceReport:
    """Return the report that a folder holds, if it is of the same subject and steps; else one without a step that ran.

    Raises:
        ConfigurationError: For a file of that name which is something else.
    """
    begun = DeviceReport(SCHEMA, utc(), subject, None, planned)
    if not (folder / JSON).exists():
        return begun
    former = DeviceReport.read(folder / JSON)
    others = [*subject.differences(former.subject), *(["its steps are others"] if former.planned != planned else [])]
    if others:
        return replace(begun, notes=(f"{ANEW}{'; '.join(others)}.",))
    kept = len(planned) - len(former.missing)
    return replace(former, notes=(f"Kept from an earlier run: {counted(kept, 'step')}.",) if kept else ())


def task_for(found: DeviceReport, simulated: Mapping[str, Any]) -> dict[str, Any]:
    """Return what the process of a step needs to know; steps that need no device do not ask for it."""
    subject = found.subject
    return {
        "quick": subject.quick,
        "training": subject.training,
        # Once the device is known, no other one is measured.
        "request": found.device or subject.request,
        "simulated": {"memory": simulated["installed"], "defects": simulated["defects"]} if simulated else {},
        "device": found.device or "cpu",
        "figures": plain([figure for one in found.steps for figure in one.figures]),
        "evidence": plain(found.known),
    }


def write(found: DeviceReport, folder: Path) -> ConfigurationError | None:
    """Write the three forms of a report, each whole, and return why that is not possible, ``None`` if it is."""
    shown = found.marked()
    try:
        texts = {JSON: to_json(found), PAGE: page_of(found, shown), ISSUE: issue_of(found, shown)}
        save_in(folder, texts, "The report")
    except ConfigurationError as error:
        return error
    return None
