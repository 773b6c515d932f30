"""Runner for measurements in stages, used by the report of a computer and by the bring-up of a model.

Stages are rows of a table. The result of each stage is added to a state, which is saved before the next stage starts. The same
call therefore resumes after an interruption. If the machine, torch or the workload changed, all stages run again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar, TypeVar

from ..._events.activity import ProgressEvent
from ..._render.display import Displayable, JsonMixin, pluralize
from ..._utils.plain import find_changes, read_json_file, save_files
from ...devices.machine import ACTIVE_SIMULATIONS, is_mps_simulated, processor_name
from ...errors import ConfigurationError, RunInterrupted
from ...session import SESSION
from ...training.curve import total_memory_bytes
from ..bench.workloads import ANNOTATION
from ..verdict.metrics import TRAINING, Evidence
from .logbook.gathering import package_version, read_software
from .logbook.sections import Count, ReportMetrics, Software

RESTARTED_PREFIX = "Restarted: "


@dataclass(frozen=True)
class ReportSubject:
    """Subject of a report: machine, software and workload. A report is resumed only for the same subject.

    Attributes:
        simulated: Whether MPS is simulated, so that measurements do not represent real MPS hardware.
        defects: Silent errors of the simulated device.
        request: Requested device; null for automatic selection.
        quick: Whether fewer and shorter measurements were requested.
        training: Whether training steps are measured instead of annotation.
        chip: Name of the processor.
        memory_bytes: Installed memory in bytes.
        software: Versions of the software.
    """

    simulated: bool
    defects: tuple[str, ...]
    request: str | None
    quick: bool
    training: bool
    chip: str
    memory_bytes: Count
    software: Software


def current_subject(training: bool, quick: bool = False) -> ReportSubject:
    """Return the subject of a run that starts now, without importing torch."""
    device_manager = SESSION.device_manager
    override = SESSION.override
    machine = device_manager.machine
    defects: list[str] = []
    for simulation in ACTIVE_SIMULATIONS:
        if isinstance(simulation, JsonMixin):
            defects += simulation.to_dict()["defects"]
    return ReportSubject(
        simulated=is_mps_simulated(),
        defects=tuple(defects),
        request=override.value if override else None,
        quick=quick,
        training=training,
        chip=machine.chip or processor_name(),
        memory_bytes=machine.memory_bytes or total_memory_bytes(),
        software=replace(read_software(device_manager), torch=package_version("torch")),
    )


class StagedReport(Displayable):
    """Base of a dataclass with the results of stages, whose JSON is the saved state.

    Attributes:
        DESCRIPTION: Name of the saved files in errors, such as "The report".
        OPERATION: Operation in progress events, such as "Reporting".
        TARGET: Target in the final progress event.
        STAGE: Noun for a stage.
        RESUME_HINT: Sentence that describes how to resume an interrupted run.
        FILE: Name of the file with the state.
        CONTENT: Required content of that file.
        REMEDY: Remedy if the file has other content.
    """

    DESCRIPTION: ClassVar[str]
    OPERATION: ClassVar[str]
    TARGET: ClassVar[str]
    STAGE: ClassVar[str]
    RESUME_HINT: ClassVar[str]
    FILE: ClassVar[str]
    CONTENT: ClassVar[str]
    REMEDY: ClassVar[str]
    subject: ReportSubject

    @property
    def simulated(self) -> bool:
        """Whether MPS is simulated."""
        return self.subject.simulated

    @property
    def finished_stages(self) -> tuple[str, ...]:
        """Names of the stages that need not run again."""
        raise NotImplementedError

    @property
    def identity(self) -> dict[str, object]:
        """JSON-compatible values that a saved state must share with this state to be resumed."""
        raise NotImplementedError

    def files(self) -> dict[str, str]:
        """Return the contents of the saved files by name."""
        raise NotImplementedError


@dataclass(frozen=True)
class NamedStage:
    """Base of a row in a table of stages.

    Attributes:
        name: Name of the stage.
    """

    name: str


StageT = TypeVar("StageT", bound=NamedStage)
State = TypeVar("State", bound=StagedReport)


def load_previous(initial: State, folder: Path) -> tuple[State, str]:
    """Return the saved state of a directory, and a note for the user.

    If there is no saved state, or it has another identity, the initial state is returned.

    Raises:
        ConfigurationError: If the file of the state has other content.
    """
    file = folder / initial.FILE
    if not file.exists():
        return initial, ""
    previous: State = read_json_file(type(initial), file, initial.CONTENT, initial.REMEDY)
    changes = "; ".join(describe_changes(previous.identity, initial.identity))
    if changes:
        return initial, f"{RESTARTED_PREFIX}{changes}."
    count = len(previous.finished_stages)
    return previous, f"Kept from a previous run: {pluralize(count, initial.STAGE)}." if count else ""


def describe_changes(before: Mapping[str, object], after: Mapping[str, object]) -> list[str]:
    """Return the changes between two identities as text, without versions of other packages.

    Example:
        >>> describe_changes({"quick": True, "packages": {"numpy": "2"}}, {"quick": False, "packages": {}})
        ['quick was True and is False']
    """
    return [
        f"{change.path[-1].replace('_', ' ')} was {change.before} and is {change.after}"
        for change in find_changes(before, after)
        if "packages" not in change.path
    ]


def run_stages(  # noqa: PLR0913, PLR0917 - the arguments are independent
    state: State,
    stages: Sequence[StageT],
    measure: Callable[[StageT, State], tuple[State, Mapping[str, str]]],
    folder: Path,
    progress: Callable[[StageT, State], str] | None = None,
    stop_on_failure: bool = False,
) -> State:
    """Run the unfinished stages in order and save the state after each stage.

    Args:
        state: State to start from.
        stages: All stages, in order.
        measure: Function that runs a stage, and returns the state with its result and the contents of additional files by
            name.
        folder: Directory of the saved files.
        progress: Function that returns the target of the progress event of a stage. If ``None``, it is the name of the stage.
        stop_on_failure: Whether to stop at the first stage that is not finished after it ran.

    Returns:
        The state with the results of the stages.

    Raises:
        ConfigurationError: If the directory is not writable, before the first measurement or after the last stage.
        RunInterrupted: If the run is interrupted.
    """
    save_files(folder, state.files(), state.DESCRIPTION)
    save_error = None
    completed = len(stages)
    for number, stage in enumerate(stages):
        if stage.name in state.finished_stages:
            continue
        target = progress(stage, state) if progress else stage.name
        SESSION.notify(ProgressEvent(state.OPERATION, target, number, len(stages), state.STAGE))
        try:
            state, files = measure(stage, state)
        except KeyboardInterrupt:
            count = len(state.finished_stages)
            raise RunInterrupted(count, state, str(folder), state.STAGE, state.RESUME_HINT) from None
        save_error = None
        try:
            save_files(folder, {**files, **state.files()}, state.DESCRIPTION)
        except ConfigurationError as error:  # A stage may fill the disk, and saving may succeed after the next stage.
            save_error = error
        if stop_on_failure and stage.name not in state.finished_stages:
            completed = number
            break
    SESSION.notify(ProgressEvent(state.OPERATION, state.TARGET, completed, len(stages), state.STAGE))
    if save_error:
        raise save_error
    return state


def merge_evidence(subject: ReportSubject, device: str | None, stored: Iterable[Mapping[str, Any] | None]) -> Evidence:
    """Return the evidence of a subject on a device from the JSON values of its stages, in which tuples are lists."""
    values: dict[str, Any] = {}
    for stage_values in stored:
        for name, value in (stage_values or {}).items():
            values[name] = tuple(value) if isinstance(value, list) else value
    values["device"] = device or "cpu"
    values["task"] = TRAINING if subject.training else ANNOTATION
    values["simulated"] = subject.simulated or None
    return Evidence(**values)


@dataclass(frozen=True)
class StageReadings:
    """Metrics that a logbook and a verdict read from the reports of a stage.

    Attributes:
        metrics: Metrics for a logbook.
        new_evidence: Metrics of the verdict that were not known before.
        evidence: All metrics of the verdict.
    """

    metrics: tuple[ReportMetrics, ...]
    new_evidence: dict[str, Any]
    evidence: Evidence


def read_reports(reports: Sequence[Displayable], known: Evidence) -> StageReadings:
    """Return the metrics of reports, given the evidence of previous stages."""
    from ..verdict.metrics import extract_metrics
    from ..verdict.verdict import collect_evidence

    evidence = collect_evidence(known, *reports, task=known["task"])
    new_evidence = {name: value for name, value in evidence.items() if name not in known}
    return StageReadings(tuple(map(extract_metrics, reports)), new_evidence, evidence)
