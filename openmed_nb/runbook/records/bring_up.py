"""``nb.runbook.ladder``: five stages that bring work up on a device; each has an exit criterion, and the first that is not met stops it."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from ..._render.display import FAILED, NOT_APPLICABLE, OK, WARNING, Report, Table, pluralize, to_html, to_plain_data
from ..._render.drawing import Chart, StatusIndicator
from ..._utils.plain import to_json, utc_timestamp
from ..._utils.validation import check_bool, check_number, check_path
from ...devices.environment import CONFLICT, TOO_LATE
from ...devices.machine import is_mps_simulated
from ...errors import DeviceError
from ...models.registry import is_model_name
from ...session import SESSION
from ...training.epochs import function_name
from ..bench.workloads import ANNOTATION, Workload
from ..checks.doctor.report import DoctorReport, doctor
from ..verdict.metrics import REPORTS, TRAINING, Area
from ..verdict.rules import KEEP_DEVICE
from ..verdict.verdict import Verdict, evaluate
from .logbook.gathering import logbook
from .logbook.privacy import sanitize_path
from .logbook.sections import ReportMetrics, UtcTimestamp
from .runner import Staged, Subject, current_subject, evidence_from, read_reports, resume, run_stages

FOLDER = "openmed_bring_up"
SCHEMA: Literal["openmed_nb/ladder/1"] = "openmed_nb/ladder/1"
SECONDS = 30.0

STEPS_PER_EPOCH = 4  # Of each epoch of the memory curve.


@dataclass(frozen=True)
class BringUpOptions:
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
        from ..bench.workloads import SYNTHETIC_BATCH_SIZE, open_benchmark

        asked: dict[str, Any] = {"training": self.training, "device": self.device, "arguments": self.arguments}
        with open_benchmark(self.model, self.data, **asked) as bench:
            yield bench.data_workload(self.knee or SYNTHETIC_BATCH_SIZE)


def _freeze(asked: BringUpOptions) -> Iterator[tuple[str, Any]]:
    yield "doctor", doctor(asked.model)
    yield "logbook", logbook(model=asked.model, dataset=asked.texts)


def _gates(asked: BringUpOptions) -> Iterator[tuple[str, Any]]:
    from ..bench.workloads import TEXTS
    from ..checks.precision.parity import parity

    yield "device", SESSION.device(asked.device)
    texts = TEXTS if asked.texts is None else asked.texts
    # A pipeline is compared where it is.
    place: dict[str, Any] = {"device": asked.device} if is_model_name(asked.model) else {}
    yield "parity", parity(asked.model, texts, gradients=asked.training, **place, **asked.arguments)


def _throughput(asked: BringUpOptions) -> Iterator[tuple[str, Any]]:
    from ..bench.comparison import compare
    from ..bench.sweep import sweep

    work: dict[str, Any] = {"training": asked.training, "seconds": asked.seconds, **asked.arguments}
    swept = sweep(asked.model, device=asked.device, **work)
    yield "sweep", swept
    yield "comparison", compare(asked.model, asked.data, devices=[asked.device], batch_size=swept.knee, **work)


def _memory(asked: BringUpOptions) -> Iterator[tuple[str, Any]]:
    from ..bench.workloads import measure_epoch_memory

    with asked.workload() as workload:
        yield "memory", measure_epoch_memory(workload, STEPS_PER_EPOCH, asked.device)


def _split(asked: BringUpOptions) -> Iterator[tuple[str, Any]]:
    from ..checks.operators.fallbacks import fallbacks
    from ..checks.operators.forecast import forecast

    yield "forecast", forecast(asked.model, training=asked.training)
    with asked.workload() as workload, fallbacks() as ledger, workload.open_batches() as batches:
        workload.run(next(batches))
    yield "fallbacks", ledger


@dataclass(frozen=True)
class Stage:
    """A row of the ladder."""

    name: str
    about: str
    criterion: str  # Its exit criterion in words; names of gates in braces stand for their values.
    measure: Callable[
        [BringUpOptions], Iterator[tuple[str, Any]]
    ]  # Yields the names of files, and what stands in them.
    areas: frozenset[Area]  # A reason of these ranks in the verdict on all figures so far stops the ladder.
    roll_back: str


STAGES: tuple[Stage, ...] = (
    Stage(
        "freeze",
        "interpreter, packages, variables",
        "The doctor finds nothing that failed, and every MPS variable was set in time.",
        _freeze,
        frozenset(),
        "Go back to the packages in the logbook of the last run that was right; Logbook.diff() names what changed.",
    ),
    Stage(
        "gates",
        "built, available, usable, right",
        "The device computes, at least {entity_agreement} of the entities are those of the CPU, and logits differ by at most {logits}.",
        _gates,
        frozenset({Area.NUMBERS}),
        "Compute on the CPU until then: nb.use('cpu').",
    ),
    Stage(
        "throughput",
        "batch sweep, and waiting for data",
        "The sweep finds a batch that fits, and at most {data_fraction} of a step waits for data.",
        _throughput,
        frozenset({Area.DATA, Area.BATCH}),
        "Keep the batch and the loader that you had.",
    ),
    Stage(
        "memory",
        "ten epochs",
        "Memory grows by at most {memory_growth} over ten epochs, and at least {headroom} of the limit stays free.",
        _memory,
        frozenset({Area.MEMORY}),
        "Run shorter trainings, each in a process of its own, and go on from their checkpoints.",
    ),
    Stage(
        "split",
        "what falls back, and whether it is worth it",
        "At most {fallback_time} of the time falls back, a GPU is {speedup} faster than the CPU, and nothing else is open.",
        _split,
        frozenset(Area),
        "Leave this work where it runs today.",
    ),
)

# What is said of a stage by its status.
SLOW_CONDITIONS = {OK: "passed", FAILED: "stopped here", NOT_APPLICABLE: "not reached"}

# What must lie on the table before work moves, each with its file.
REQUIRED_EVIDENCE = {
    "architecture of the interpreter": "doctor.json",
    "device": "device.json",
    "batch sweep": "sweep.json",
    "memory curve": "memory.json",
    "parity": "parity.json",
}


@dataclass(frozen=True)
class StageResult:
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
    message: str
    remedy: str
    files: tuple[str, ...]
    written: UtcTimestamp
    figures: tuple[ReportMetrics, ...]
    evidence: dict[str, Any]


@dataclass(frozen=True, repr=False)
class BringUpReport(Staged):
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

    WHAT = "The ladder"
    DOING = "Climbing"
    NAME = "ladder"
    STAGE = "stage"
    AGAIN = "call the same ladder again"
    FILE = "bring_up.json"
    CONTENT = "a ladder of nb.runbook.ladder()"
    REMEDY = "Name another folder."

    schema: Literal["openmed_nb/ladder/1"]
    model: str
    texts: int
    device: str
    subject: Subject
    results: tuple[StageResult, ...] = ()
    note: str = ""

    @property
    def passed(self) -> tuple[str, ...]:
        """The stages whose criteria are met."""
        return tuple(rung.stage for rung in self.results if rung.status == OK)

    finished = passed

    @property
    def complete(self) -> bool:
        """Whether the criteria of all stages are met."""
        return len(self.passed) == len(STAGES)

    @property
    def _stopped(self) -> StageResult | None:
        """The stage whose criterion is not met, ``None`` if there is none."""
        return next((rung for rung in self.results if rung.status == FAILED), None)

    @property
    def exit_code(self) -> int:
        """What a command ends with: 0 where all criteria are met, else 1."""
        return int(not self.complete)

    @property
    def verdict(self) -> Verdict:
        """What all figures so far come to."""
        task = TRAINING if self.subject.training else ANNOTATION
        known = {name: value for rung in self.results for name, value in rung.evidence.items()}
        return evaluate(evidence_from(known, device=self.device, task=task, simulated=self.simulated))

    @property
    def conclusion(self) -> str:
        """The last gate in one line: yes with the files that prove it, or no with what is missing."""
        if self.complete:
            proofs = ", ".join(f"{what} ({file})" for what, file in REQUIRED_EVIDENCE.items())
            return f"Yes, {self.verdict.recommendation}: {proofs}."
        stopped = self._stopped
        return f"No, stopped at {stopped.stage}: {stopped.message}" if stopped else "No, no stage has run yet."

    @property
    def indicators(self) -> tuple[StatusIndicator, ...]:
        """Each stage with its status, and its state in words."""
        statuses: dict[str, str] = {rung.stage: rung.status for rung in self.results}
        lamps = []
        for stage in STAGES:
            status = statuses.get(stage.name, NOT_APPLICABLE)
            lamps.append(StatusIndicator(stage.name, status, SLOW_CONDITIONS[status]))
        return tuple(lamps)

    def to_report(self) -> Report:
        """Return the final gate, and the stages with their criteria and what to do."""
        limits = self.verdict.gates.shown()
        written = {rung.stage: ", ".join(rung.files) for rung in self.results}
        lamps = self.indicators
        sentences = [self.conclusion]
        stopped = self._stopped
        if stopped:
            back = next(stage.roll_back for stage in STAGES if stage.name == stopped.stage)
            sentences += [f"What to do: {stopped.remedy}", f"To roll back: {back}"]
        if self.note:
            sentences.append(self.note)
        rows = tuple(
            (stage.name, lamp.detail, stage.criterion.format(**limits))
            for stage, lamp in zip(STAGES, lamps, strict=True)
        )
        files = tuple((stage.name, stage.about, written.get(stage.name, "")) for stage in STAGES)
        unfinished = FAILED if stopped else WARNING
        return Report(
            f"Ladder on {self.device}: {len(self.passed)} of {pluralize(len(STAGES), 'stage')}",
            tuple(sentences),
            (Table("Stages", ("stage", "state", "criterion"), rows, collapsed=True),),
            metrics=(Table("Files", ("stage", "what is measured", "files"), files, collapsed=True),),
            status=OK if self.complete else unfinished,
            charts=(Chart("How far", indicators=lamps),),
        )

    def logbook_figures(self) -> ReportMetrics:
        """Return what a logbook keeps of it: how many stages are passed."""
        values = {"stages": float(len(STAGES)), "stages_passed": float(len(self.passed))}
        return ReportMetrics(
            "ladder", self.model, self.device, "yes" if self.complete else "no", self.simulated, values
        )

    @property
    def identity(self) -> dict[str, Any]:
        """What a former ladder must have in common with this one to be continued."""
        return {"model": self.model, "texts": self.texts, "device": self.device, **to_plain_data(self.subject)}

    def files(self) -> dict[str, str]:
        """Return the JSON and the page."""
        page = f"<!doctype html>\n<meta charset=utf-8>\n<title>Ladder</title>\n{to_html(self.final_report())}\n"
        return {self.FILE: to_json(self), "bring_up.html": page}


@dataclass(frozen=True)
class Obstacle:
    """What speaks against a stage, and what to do."""

    what: str
    remedy: str


def unmet_criterion(judged: Verdict, stage: Stage, seconds: float) -> Obstacle | None:
    """Return what speaks against a stage in the verdict on all figures so far, ``None`` if nothing does.

    That something was not measured stops only the stage that measures it, and the last one.
    """
    last = stage is STAGES[-1]
    for reason in judged.reasons:
        if reason.rank in stage.areas and reason.recommendation != KEEP_DEVICE and (reason.figures or last):
            figures = "; ".join(figure.words for figure in reason.figures)
            return Obstacle(
                f"{'; '.join(reason.conditions)}{f' ({figures})' if figures else ''}.", " ".join(reason.actions)
            )
    for unknown in () if last else judged.missing_requirements:
        if unknown.needed and unknown.rank in stage.areas and unknown.is_blocking:
            more = f"seconds={2 * seconds:g} (in a shell, --seconds {2 * seconds:g})"
            remedy = f"Call the same ladder with {more}, or run {unknown.first_command}."
            return Obstacle(f"not known: {unknown.name}.", remedy)
    return None


# What the doctor calls the devices: whether they compute is asked by the stage after freezing.
DEVICE_FINDINGS = frozenset({"MPS", "CUDA"})


def _environment_problems(doctored: DoctorReport, failures: Iterable[str], device: str) -> Obstacle | None:
    """Return what the doctor found that is not as it must be, ``None`` if all is."""
    settings = SESSION.device_manager.mps_environment(device).settings
    names = {setting.name for setting in settings if setting.effect in {TOO_LATE, CONFLICT}}
    names |= {*failures} - DEVICE_FINDINGS
    wrong = [finding for finding in doctored.findings if finding.name in names]
    return (
        Obstacle(" ".join(f"{finding.name}: {finding.evidence}." for finding in wrong), wrong[0].remedy)
        if wrong
        else None
    )


def bring_up(  # noqa: PLR0913 - each is one thing that a person may want to say
    model: Any = None,
    texts: Iterable[Any] | None = None,
    *,
    folder: str | os.PathLike[str] = FOLDER,
    device: str | None = None,
    training: bool = False,
    seconds: float = SECONDS,
    progress: bool = True,
    **arguments: Any,
) -> BringUpReport:
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
        InvalidTextError: For a text that cannot be read, by its number.
        Interrupted: For an interrupt; the same call goes on.

    A device that fails in a stage stops it there; what a stage measures is judged by :func:`gates`, as :func:`openmed_nb.verdict` does.

    Example:
        >>> bring_up(training="yes")
        Traceback (most recent call last):
        ...
        openmed_nb.errors.ConfigurationError: training cannot be 'yes'. Pass True or False.
    """
    from ...annotation.references import iter_texts

    check_bool("training", training)
    seconds = check_number("seconds", seconds, above=0, example=f"{SECONDS:g}")
    place = check_path(folder, "the folder of a ladder")
    with SESSION.operation(progress):
        given = None if texts is None else list(iter_texts(texts))
        asked = BringUpOptions(model, given, SESSION.device(device).device, training, seconds, arguments)
        name = sanitize_path(str(model or "bundled")) if is_model_name(model) else function_name(model)
        subject = replace(current_subject(training, simulated=is_mps_simulated()), request=None)
        begun, note = resume(BringUpReport(SCHEMA, name, len(given or ()), asked.device, subject), place)
        return run_stages(
            replace(begun, note=note), STAGES, lambda stage, found: _run_stage(stage, asked, found), place, stops=True
        )


def _run_stage(stage: Stage, asked: BringUpOptions, found: BringUpReport) -> tuple[BringUpReport, dict[str, str]]:
    """Return the ladder after a stage, and the reports that it made as files; what a failed stage had found is measured again."""
    passed = tuple(rung for rung in found.results if rung.status == OK)
    knee = next((rung.evidence.get("knee") for rung in passed if rung.stage == "throughput"), None)
    known = replace(found, results=passed).verdict.evidence
    reports: dict[str, Any] = {}
    obstacle = None
    try:
        reports.update(stage.measure(replace(asked, knee=knee)))
    except DeviceError as error:
        obstacle = Obstacle(error.message, error.remedy)
    read = read_reports([report for report in reports.values() if isinstance(report, REPORTS)], known)
    if obstacle is None and "doctor" in reports:
        obstacle = _environment_problems(reports["doctor"], read.added.get("doctor_failures", ()), asked.device)
    obstacle = obstacle or unmet_criterion(evaluate(read.evidence), stage, asked.seconds)
    rung = StageResult(
        stage.name,
        "failed" if obstacle else "ok",
        obstacle.what if obstacle else "",
        obstacle.remedy if obstacle else "",
        tuple(f"{name}.json" for name in reports),
        utc_timestamp(),
        read.figures,
        to_plain_data(read.added),
    )
    return replace(found, results=(*passed, rung)), {
        f"{name}.json": to_json(report) for name, report in reports.items()
    }
