"""``nb.runbook.ladder``: five stages that bring work up on a device; each has an exit criterion, and the first that is not met stops it."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from ..._events.activity import Activity
from ..._render.display import FAILED, NOT_APPLICABLE, OK, WARNING, Report, Shown, Table, counted, plain, to_html
from ..._render.drawing import Lamp, Picture
from ..._utils.plain import read_as, save_in, to_json, utc
from ..._utils.validation import check_flag, given_path, number
from ...devices.environment import CONFLICT, TOO_LATE
from ...devices.machine import mps_is_simulated
from ...errors import DeviceError, Interrupted
from ...models.registry import is_named
from ...session import SESSION
from ...training.epochs import named
from ..bench.workloads import ANNOTATION, Workload
from ..checks.doctor.report import DoctorReport, doctor
from ..verdict.evidence import TRAINING, Area, Case
from ..verdict.gates import STAY
from ..verdict.verdict import Verdict, evidence_of, judge
from .logbook.gathering import logbook
from .logbook.privacy import short_path
from .logbook.sections import Day, ReportFigures
from .report.record import Subject, evidence_from
from .report.report import subject_here

FOLDER, FILE = "openmed_ladder", "ladder.json"
SCHEMA: Literal["openmed_nb/ladder/1"] = "openmed_nb/ladder/1"
SECONDS = 30.0

STEPS = 4  # Of each epoch of the memory curve.


@dataclass(frozen=True)
class Asked:
    """What is brought up, and where."""

    model: Any
    texts: Sequence[Any] | None
    device: str
    training: bool
    seconds: float
    arguments: Mapping[str, Any]
    knee: int | None = None  # The rows that the sweep found.

    @property
    def data(self) -> Sequence[Any] | None:
        return None if self.training else self.texts

    @contextlib.contextmanager
    def workload(self) -> Iterator[Workload]:
        """Put the model on the device for a block, ready for steps with the batch that the sweep found."""
        from ..bench.benches import EXAMPLE_ROWS, benched

        asked: dict[str, Any] = {"training": self.training, "device": self.device, "arguments": self.arguments}
        with benched(self.model, self.data, **asked) as bench:
            yield bench.stream(self.knee or EXAMPLE_ROWS)


def freeze(asked: Asked) -> Iterator[tuple[str, Any]]:
    yield "doctor", doctor(asked.model)
    yield "logbook", logbook(model=asked.model, dataset=asked.texts)


def gates(asked: Asked) -> Iterator[tuple[str, Any]]:
    from ..bench.benches import TEXTS
    from ..checks.precision.parity import parity

    yield "device", SESSION.device(asked.device)
    texts = TEXTS if asked.texts is None else asked.texts
    # A pipeline is compared where it is.
    place: dict[str, Any] = {"device": asked.device} if is_named(asked.model) else {}
    yield "parity", parity(asked.model, texts, gradients=asked.training, **place, **asked.arguments)


def throughput(asked: Asked) -> Iterator[tuple[str, Any]]:
    from ..bench.comparison import compare
    from ..bench.sweep import sweep

    work: dict[str, Any] = {"training": asked.training, "seconds": asked.seconds, **asked.arguments}
    swept = sweep(asked.model, device=asked.device, **work)
    yield "sweep", swept
    yield "comparison", compare(asked.model, asked.data, devices=[asked.device], batch_size=swept.knee, **work)


def memory(asked: Asked) -> Iterator[tuple[str, Any]]:
    from ..bench.benches import memory_of_epochs

    with asked.workload() as workload:
        yield "memory", memory_of_epochs(workload, STEPS, asked.device)


def split(asked: Asked) -> Iterator[tuple[str, Any]]:
    from ..checks.operators.fallbacks import fallbacks
    from ..checks.operators.forecast import forecast

    yield "forecast", forecast(asked.model, training=asked.training)
    with asked.workload() as workload, fallbacks() as ledger, workload.begun() as batches:
        workload.run(next(batches))
    yield "fallbacks", ledger


@dataclass(frozen=True)
class Stage:
    """A row of the ladder."""

    name: str
    about: str
    criterion: str  # Its exit criterion in words; names of gates in braces stand for their values.
    measure: Callable[[Asked], Iterator[tuple[str, Any]]]  # Yields the names of files, and what stands in them.
    ranks: frozenset[Area]  # A reason of these ranks in the verdict on all figures so far stops the ladder.
    roll_back: str


STAGES: tuple[Stage, ...] = (
    Stage(
        "freeze",
        "interpreter, packages, variables",
        "The doctor finds nothing that failed, and every MPS variable was set in time.",
        freeze,
        frozenset(),
        "Go back to the packages in the logbook of the last run that was right; Logbook.diff() names what changed.",
    ),
    Stage(
        "gates",
        "built, available, usable, right",
        "The device computes, at least {entity_agreement} of the entities are those of the CPU, and logits differ by at most {logits}.",
        gates,
        frozenset({Area.NUMBERS}),
        "Compute on the CPU until then: nb.use('cpu').",
    ),
    Stage(
        "throughput",
        "batch sweep, and waiting for data",
        "The sweep finds a batch that fits, and at most {data_share} of a step waits for data.",
        throughput,
        frozenset({Area.DATA, Area.BATCH}),
        "Keep the batch and the loader that you had.",
    ),
    Stage(
        "memory",
        "ten epochs",
        "Memory grows by at most {memory_growth} over ten epochs, and at least {headroom} of the limit stays free.",
        memory,
        frozenset({Area.MEMORY}),
        "Run shorter trainings, each in a process of its own, and go on from their checkpoints.",
    ),
    Stage(
        "split",
        "what falls back, and whether it is worth it",
        "At most {fallback_time} of the time falls back, a GPU is {speed_up} faster than the CPU, and nothing else is open.",
        split,
        frozenset(Area),
        "Leave this work where it runs today.",
    ),
)

# What must lie on the table before work moves, each with its file.
PROOFS = {
    "architecture of the interpreter": "doctor.json",
    "device": "device.json",
    "batch sweep": "sweep.json",
    "memory curve": "memory.json",
    "parity": "parity.json",
}


@dataclass(frozen=True)
class Rung:
    """What became of a stage.

    Attributes:
        stage: Its name.
        status: Whether its criterion is met.
        what: What was found, in a sentence.
        remedy: What to do where it is not met.
        files: What it has written.
        written: When it ended, in UTC.
        figures: The same in numbers, for a logbook.
        evidence: What it adds to the verdict.
    """

    stage: str
    status: Literal["ok", "failed"]
    what: str
    remedy: str
    files: tuple[str, ...]
    written: Day
    figures: tuple[ReportFigures, ...]
    evidence: dict[str, Any]


@dataclass(frozen=True, repr=False)
class Ladder(Shown):
    """How far the work has come.

    Attributes:
        schema: The name and the number of this form.
        model: The model, as it was passed.
        texts: How many texts were passed; 0 for synthetic ones.
        device: Where the work is brought up.
        subject: The computer, its software, and whether the work is a training.
        rungs: The stages that were run, in order.
        note: Why it began anew, where it did.
    """

    schema: Literal["openmed_nb/ladder/1"]
    model: str
    texts: int
    device: str
    subject: Subject
    rungs: tuple[Rung, ...] = ()
    note: str = ""

    @property
    def simulated(self) -> bool:
        """Whether the MPS device is a simulated one."""
        return self.subject.simulated

    @property
    def passed(self) -> tuple[str, ...]:
        """The stages whose criteria are met."""
        return tuple(one.stage for one in self.rungs if one.status == OK)

    @property
    def complete(self) -> bool:
        """Whether the criteria of all stages are met."""
        return len(self.passed) == len(STAGES)

    @property
    def _stopped(self) -> Rung | None:
        """The stage whose criterion is not met, ``None`` if there is none."""
        return next((one for one in self.rungs if one.status == FAILED), None)

    @property
    def exit_code(self) -> int:
        """What a command ends with: 0 where all criteria are met, else 1."""
        return int(not self.complete)

    @property
    def verdict(self) -> Verdict:
        """What all figures so far come to."""
        task = TRAINING if self.subject.training else ANNOTATION
        found = {name: value for one in self.rungs for name, value in one.evidence.items()}
        return judge(evidence_from({**found, "device": self.device, "task": task}, simulated=self.simulated))

    @property
    def final(self) -> str:
        """The last gate in one line: yes with the files that prove it, or no with what is missing."""
        if self.complete:
            proofs = ", ".join(f"{what} ({file})" for what, file in PROOFS.items())
            return f"Yes, {self.verdict.recommendation}: {proofs}."
        stopped = self._stopped
        reason = f"stopped at {stopped.stage}: {stopped.what}" if stopped else "no stage has run yet."
        return f"No, {reason}"

    @property
    def lamps(self) -> tuple[Lamp, ...]:
        """Each stage with its status, and its state in words."""
        statuses = {one.stage: one.status for one in self.rungs}
        words = {OK: "passed", FAILED: "stopped here", NOT_APPLICABLE: "not reached"}
        found = ((one.name, statuses.get(one.name, NOT_APPLICABLE)) for one in STAGES)
        return tuple(Lamp(name, status, words[status]) for name, status in found)

    def report(self) -> Report:
        """Return the final gate, and the stages with their criteria and what to do."""
        limits, written = self.verdict.gates.shown(), {one.stage: ", ".join(one.files) for one in self.rungs}
        stages = zip(STAGES, self.lamps, strict=True)
        rows = tuple((one.name, lamp.words, one.criterion.format(**limits)) for one, lamp in stages)
        files = tuple((one.name, one.about, written.get(one.name, "")) for one in STAGES)
        stopped, back = self._stopped, {one.name: one.roll_back for one in STAGES}
        to_do = (f"What to do: {stopped.remedy}", f"To roll back: {back[stopped.stage]}") if stopped else ()
        title = f"Ladder on {self.device}: {len(self.passed)} of {counted(len(STAGES), 'stage')}"
        return Report(
            title,
            (self.final, *to_do, *filter(None, (self.note,))),
            (Table("Stages", ("stage", "state", "criterion"), rows, folded=True),),
            figures=(Table("Files", ("stage", "what is measured", "files"), files, folded=True),),
            status=FAILED if stopped else OK if self.complete else WARNING,
            pictures=(Picture("How far", lamps=self.lamps),),
        )

    def logbook_figures(self) -> ReportFigures:
        """Return what a logbook keeps of it: how many stages are passed."""
        values = {"stages": float(len(STAGES)), "stages_passed": float(len(self.passed))}
        word = "yes" if self.complete else "no"
        return ReportFigures("ladder", self.model, self.device, word, self.simulated, values)


def not_met(judged: Verdict, stage: Stage, seconds: float) -> tuple[str, str]:
    """Return what speaks against a stage in the verdict on all figures so far, and what to do; two empty texts if nothing does.

    That something was not measured stops only the stage that measures it, and the last one.
    """
    last = stage is STAGES[-1]
    for reason in judged.reasons:
        if reason.rank in stage.ranks and reason.recommendation != STAY and (reason.figures or last):
            figures = "; ".join(figure.words for figure in reason.figures)
            return f"{'; '.join(reason.when)}{f' ({figures})' if figures else ''}.", " ".join(reason.do)
    case = Case(judged.evidence, vars(judged.gates))
    for one in () if last else judged.unknown:
        if one.needed and one.rank in stage.ranks and one.blocks(case):
            more = f"seconds={2 * seconds:g} (in a shell, --seconds {2 * seconds:g})"
            remedy = f"Call the same ladder with {more}, or run {one.first_command}."
            return f"not known: {one.name}.", remedy
    return "", ""


# What the doctor calls the devices: whether they compute is asked by the stage after freezing.
OF_DEVICES = frozenset({"MPS", "CUDA"})


def not_frozen(doctored: DoctorReport, failures: Iterable[str], device: str) -> tuple[str, str]:
    """Return what the doctor found that is not as it must be, and what to do; two empty texts where all is."""
    late = {one.name for one in SESSION.computer.environment(device).settings if one.effect in {TOO_LATE, CONFLICT}}
    wrong = [one for one in doctored.findings if one.name in {*late, *failures} - OF_DEVICES]
    return "".join(f"{one.name}: {one.evidence}. " for one in wrong).strip(), next((one.remedy for one in wrong), "")


def ladder(  # noqa: PLR0913 - each is one thing that a person may want to say
    model: Any = None,
    texts: Iterable[Any] | None = None,
    *,
    folder: str | os.PathLike[str] = FOLDER,
    device: str | None = None,
    training: bool = False,
    seconds: float = SECONDS,
    progress: bool = True,
    **arguments: Any,
) -> Ladder:
    """Bring a model up on a device in five stages, each with an exit criterion; the first that is not met stops the ladder.

    The stages: ``freeze`` (interpreter, packages, variables), ``gates`` (the device is built, available and usable, and its
    numbers are right), ``throughput`` (batch sweep, waiting for data), ``memory`` (ten epochs) and ``split`` (what falls back,
    and whether the device is worth it). What a stage found is written into the folder when it ends, and the same call goes on at
    the first stage that is not passed.

    Args:
        model: The name of a model, ``None`` for the bundled one, or a pipeline of :func:`openmed_nb.load_pipeline`.
        texts: Texts to measure with; synthetic ones where nobody passes any. None of them is written down.
        folder: Where the reports are written as JSON, with ``ladder.json`` and ``ladder.html``. A folder of another model,
            computer or torch begins anew, and says why.
        device: The device; ``None`` is the session's.
        training: Whether the model is trained, on synthetic rows, instead of annotating the texts.
        seconds: About how long the sweep, and the comparison, may each take.
        progress: Whether to show what is under way, where it takes longer than half a second.
        arguments: For a name, those of :func:`openmed_nb.load_model`, such as ``revision``.

    Returns:
        The ladder: ``final``, yes or no in one line; ``complete``; ``rungs``, each with what was found, what to do, and the names
        of its files; ``verdict``, on all figures so far; and ``exit_code``, 0 where it is complete.

    Raises:
        ConfigurationError: For arguments that cannot be used, and for a folder that cannot be written or holds something else.
        ModelError: Where the model cannot be loaded.
        UnreadableText: For a text that cannot be read, by its number.
        Interrupted: For an interrupt; the same call goes on.

    A device that fails in a stage stops it there; what a stage measures is judged by :func:`gates`, as :func:`openmed_nb.verdict` does.

    Example:
        >>> ladder(training="yes")
        Traceback (most recent call last):
        ...
        openmed_nb.errors.ConfigurationError: training cannot be 'yes'. Pass True or False.
    """
    from ...annotation.references import stream_of

    check_flag("training", training)
    seconds = number("seconds", seconds, above=0, such_as=f"{SECONDS:g}")
    place = given_path(folder, "the folder of a ladder")
    with SESSION.told_after(progress):
        given = None if texts is None else list(stream_of(texts))
        asked = Asked(model, given, SESSION.device(device).device, training, seconds, arguments)
        return climbed(asked, place)


def climbed(asked: Asked, folder: Path) -> Ladder:
    """Return the ladder after the stages that are left, up to the first whose criterion is not met."""
    found = continued(asked, folder)
    write(found, folder, {})  # A folder that cannot be written shows before anything is measured.
    for at, stage in enumerate(STAGES):
        if stage.name in found.passed:
            continue
        SESSION.tell(Activity("Climbing", stage.name, at, len(STAGES), "stage"))
        # What the stage that failed had found is measured again.
        found = replace(found, rungs=tuple(one for one in found.rungs if one.status == OK))
        knee = next((one.evidence.get("knee") for one in found.rungs if one.stage == "throughput"), None)
        try:
            rung, reports = run_stage(stage, replace(asked, knee=knee), found)
        except KeyboardInterrupt:
            raise Interrupted(at, found, str(folder), "stage", "call the same ladder again") from None
        found = replace(found, rungs=(*found.rungs, rung))
        write(found, folder, reports)
        if rung.status != OK:
            break
    SESSION.tell(Activity("Climbing", "ladder", len(found.passed), len(STAGES), "stage"))
    return found


def run_stage(stage: Stage, asked: Asked, found: Ladder) -> tuple[Rung, dict[str, Any]]:
    """Return what became of a stage, and the reports that it made."""
    from ..verdict.figures import READERS, figures_of

    reports: dict[str, Any] = {}
    known = found.verdict.evidence
    what = remedy = ""
    try:
        reports.update(stage.measure(asked))
    except DeviceError as error:
        what, remedy = error.what, error.remedy
    read = [one for one in reports.values() if isinstance(one, tuple(kind for kind, *_ in READERS))]
    joined = evidence_of(known, *read, task=known.task)
    added = {name: value for name, value in joined.measured.items() if name not in known.measured}
    if not what and isinstance(doctored := reports.get("doctor"), DoctorReport):
        what, remedy = not_frozen(doctored, added.get("doctor_failures", ()), asked.device)
    if not what:
        what, remedy = not_met(judge(joined), stage, asked.seconds)
    files = tuple(f"{name}.json" for name in reports)
    status: Literal["ok", "failed"] = "failed" if what else "ok"
    rung = Rung(stage.name, status, what, remedy, files, utc(), tuple(map(figures_of, read)), plain(added))
    return rung, reports


def continued(asked: Asked, folder: Path) -> Ladder:
    """Return the ladder that a folder holds, if it is of the same work and computer; else one without a stage.

    Raises:
        ConfigurationError: For a file of that name which is something else.
    """
    name = short_path(str(asked.model or "bundled")) if is_named(asked.model) else named(asked.model)
    subject = subject_here({"simulated": True} if mps_is_simulated() else {}, False, asked.training)
    begun = Ladder(SCHEMA, name, len(asked.texts or ()), asked.device, replace(subject, request=None))
    file = folder / FILE
    if not file.exists():
        return begun
    former: Ladder = read_as(Ladder, file, "a ladder of nb.runbook.ladder()", "Name another folder.")
    pairs = ((one, getattr(former, one), getattr(begun, one)) for one in ("model", "texts", "device"))
    others = [f"{name} was {was} and is {now}" for name, was, now in pairs if was != now]
    if others := [*others, *begun.subject.differences(former.subject)]:
        return replace(begun, note=f"Started anew: {'; '.join(others)}.")
    kept = f"Kept from an earlier run: {counted(len(former.passed), 'stage')}." if former.passed else ""
    return replace(former, note=kept)


def write(found: Ladder, folder: Path, reports: Mapping[str, Any]) -> None:
    """Write the reports of a stage and the ladder."""
    page = f"<!doctype html>\n<meta charset=utf-8>\n<title>Ladder</title>\n{to_html(found.marked())}\n"
    texts = {f"{name}.json": to_json(report) for name, report in reports.items()}
    save_in(folder, {**texts, FILE: to_json(found), "ladder.html": page}, "The ladder")
