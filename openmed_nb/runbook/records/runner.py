"""One runner for what is measured in stages: the report of a computer, and the ladder that brings work up.

Stages are rows of a table. What each has found is added to a state, which is on disk before the next begins, so that the same
call goes on where it stopped; a state of another computer, torch or work begins anew.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar, TypeVar

from ..._events.activity import ProgressEvent
from ..._render.display import Displayable, pluralize
from ..._utils.plain import find_changes, read_json_file, save_files
from ...devices.machine import processor_name
from ...errors import ConfigurationError, RunInterrupted
from ...session import SESSION
from ...training.curve import installed_bytes
from ..verdict.metrics import Evidence
from .logbook.gathering import software, version_of
from .logbook.sections import Count, ReportMetrics, Software

RESTARTED_PREFIX = "Started anew: "


@dataclass(frozen=True)
class Subject:
    """What a report is of; a report of another subject is never continued.

    Attributes:
        simulated: Whether the MPS device is a simulated one, whose figures are none of a real one.
        defects: The silent errors that the simulated device was given.
        request: The device that was asked for; null where the computer decides.
        quick: Whether fewer and shorter measurements were asked for.
        training: Whether training steps are measured instead of annotation.
        chip: The processor.
        memory_bytes: The memory of the computer.
        software: What runs.
    """

    simulated: bool
    defects: tuple[str, ...]
    request: str | None
    quick: bool
    training: bool
    chip: str
    memory_bytes: Count
    software: Software

    @property
    def kind(self) -> tuple[str, ...]:
        """Chip, release of torch and major version of the system: what reports that are compared share."""
        release = (self.software.torch or "").partition("+")[0]
        return self.chip, release, self.software.system.partition(".")[0]


def current_subject(
    training: bool, quick: bool = False, simulated: bool = False, defects: Sequence[str] = ()
) -> Subject:
    """Return what a run that begins now is of; torch is not loaded for that."""
    computer = SESSION.device_manager
    override = SESSION.override
    machine = computer.machine
    return Subject(
        simulated,
        tuple(defects),
        override.value if override else None,
        quick,
        training,
        machine.chip or processor_name(),
        machine.memory_bytes or installed_bytes(),
        replace(software(computer), torch=version_of("torch")),
    )


class Staged(Displayable):
    """What stages have found so far: the base of a dataclass, whose JSON is the state on disk.

    Attributes:
        WHAT: What is written, such as "The report".
        DOING: What its stages do, such as "Reporting".
        NAME: What is done when all have run.
        STAGE: What one of them is called.
        AGAIN: How to go on after an interrupt.
        FILE: The name of the file with the state.
        CONTENT: What that file must be.
        REMEDY: What to do where it is something else.
    """

    WHAT: ClassVar[str]
    DOING: ClassVar[str]
    NAME: ClassVar[str]
    STAGE: ClassVar[str]
    AGAIN: ClassVar[str]
    FILE: ClassVar[str]
    CONTENT: ClassVar[str]
    REMEDY: ClassVar[str]
    subject: Subject

    @property
    def simulated(self) -> bool:
        """Whether the MPS device is a simulated one."""
        return self.subject.simulated

    @property
    def finished(self) -> tuple[str, ...]:
        """The names of the stages that need not run again."""
        raise NotImplementedError

    @property
    def identity(self) -> dict[str, Any]:
        """What a former state must have in common with this one to be continued, as plain values."""
        raise NotImplementedError

    def files(self) -> dict[str, str]:
        """Return what is written of the state, by the names of the files."""
        raise NotImplementedError


State = TypeVar("State", bound=Staged)

# Runs a stage; returns the state with what it found, and the texts of further files by their names.
Measure = Callable[[Any, State], "tuple[State, Mapping[str, str]]"]


def resume(begun: State, folder: Path) -> tuple[State, str]:
    """Return the state that a folder holds, if it is of the same work and computer, else the one that begins; and what to know.

    Raises:
        ConfigurationError: For a file of that name which is something else.
    """
    file = folder / begun.FILE
    if not file.exists():
        return begun, ""
    former: State = read_json_file(type(begun), file, begun.CONTENT, begun.REMEDY)
    differences = "; ".join(differences_between(former.identity, begun.identity))
    if differences:
        return begun, f"{RESTARTED_PREFIX}{differences}."
    count = len(former.finished)
    return former, f"Kept from an earlier run: {pluralize(count, begun.STAGE)}." if count else ""


def differences_between(former: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """Return in words what has changed; versions of other packages make no difference.

    Example:
        >>> differences_between({"quick": True, "packages": {"numpy": "2"}}, {"quick": False, "packages": {}})
        ['quick was True and is False']
    """
    return [
        f"{change.path[-1].replace('_', ' ')} was {change.before} and is {change.after}"
        for change in find_changes(former, now)
        if "packages" not in change.path
    ]


def run_stages(  # noqa: PLR0913, PLR0917 - each is another thing
    state: State,
    stages: Sequence[Any],
    measure: Measure[State],
    folder: Path,
    progress: Callable[[Any, State], str] = lambda stage, _state: stage.name,
    stops: bool = False,
) -> State:
    """Run the stages that are not finished, in order, and return the state; ``stops`` ends it at the first that is not passed.

    Raises:
        ConfigurationError: For a folder that cannot be written, before anything is measured, or when all have run.
        Interrupted: For an interrupt.
    """
    save_files(folder, state.files(), state.WHAT)
    failure = None
    done = len(stages)
    for number, stage in enumerate(stages):
        if stage.name in state.finished:
            continue
        SESSION.notify(ProgressEvent(state.DOING, progress(stage, state), number, len(stages), state.STAGE))
        try:
            state, files = measure(stage, state)
        except KeyboardInterrupt:
            count = len(state.finished)
            raise RunInterrupted(count, state, str(folder), state.STAGE, state.AGAIN) from None
        failure = None
        try:
            save_files(folder, {**files, **state.files()}, state.WHAT)
        except ConfigurationError as error:  # A stage may have filled the disk, and the next one may find room again.
            failure = error
        if stops and stage.name not in state.finished:
            done = number
            break
    SESSION.notify(ProgressEvent(state.DOING, state.NAME, done, len(stages), state.STAGE))
    if failure:
        raise failure
    return state


def evidence_from(known: Mapping[str, Any], **more: Any) -> Evidence:
    """Return figures for a verdict from what JSON has made of them."""
    figures = {name: tuple(value) if isinstance(value, list) else value for name, value in known.items()}
    return Evidence(**{**figures, **more})


@dataclass(frozen=True)
class Reading:
    """What a logbook and a verdict read in the reports of a stage."""

    figures: tuple[ReportMetrics, ...]
    added: dict[str, Any]  # The figures for a verdict that were not known before.
    evidence: Evidence  # All of them.


def read_reports(reports: Sequence[Any], known: Evidence) -> Reading:
    """Return what is read in reports after other ones."""
    from ..verdict.figures import extract_metrics
    from ..verdict.verdict import collect_evidence

    evidence = collect_evidence(known, *reports, task=known.task)
    added = {name: value for name, value in evidence.measured.items() if name not in known.measured}
    return Reading(tuple(map(extract_metrics, reports)), added, evidence)
