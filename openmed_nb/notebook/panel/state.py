"""Everything that the panel shows, as one value, with bars of memory; looking at it starts no allocator."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from ..._events.activity import ProgressEvent
from ..._render.display import Displayable, Report, Table, format_bytes
from ...devices.choice import DeviceChoice, DeviceList, Explanation
from ...devices.machine import format_device, is_mps_simulated
from ...devices.registry import parse_device_argument
from ...devices.request import normalize_device
from ...errors import OpenMedError
from ...models.store import LoadedModels
from ...training.curve import installed_bytes, resident_bytes

if TYPE_CHECKING:
    from ...annotation.results import AnnotatedText
    from ...session import Session


@dataclass(frozen=True)
class MemoryPart:
    name: str
    size: int

    def __str__(self) -> str:
        return f"{self.name} {format_bytes(self.size)}".lstrip()


@dataclass(frozen=True)
class MemoryBar:
    """How much is used of something, now and at the last looks."""

    name: str
    parts: tuple[MemoryPart, ...]
    limit: int
    limit_name: str
    history: tuple[int, ...] = ()

    @property
    def used(self) -> int:
        return sum(part.size for part in self.parts)

    @property
    def row(self) -> tuple[str, str, str]:
        used = ", ".join(str(part) for part in self.parts)
        return self.name, used, f"{format_bytes(self.limit)}, {self.limit_name}"


MEMORY_COLUMNS = ("memory", "used", "limit")


def memory_bars(choice: DeviceChoice | None, fraction: float | None = None) -> tuple[MemoryBar, ...]:
    """Return the bars for a device and for this process."""
    process = MemoryBar("process", (MemoryPart("", resident_bytes()),), installed_bytes(), "of this computer")
    if choice is None or not choice.confirmed or not parse_device_argument(choice.device).has_allocator:
        return (process,)
    device = parse_device_argument(choice.device)
    memory = device.memory()
    name = device.capacity
    allocated = memory.allocated or 0
    cached = max(0, (memory.reserved or 0) - allocated)
    parts = (MemoryPart("allocated", allocated), MemoryPart("cached", cached))
    limited = f"the limit: {fraction:g} of {name}" if fraction not in (None, 1.0) else name
    limit = int((fraction or 1.0) * (memory.recommended or 0))
    return (MemoryBar(format_device(choice.device), parts, limit, limited), process)


NO_DEVICE = "No device is in force."

# What to type where nothing can be clicked.
COMMANDS = (
    ("%openmed_device", "the device in force, and why"),
    ("%openmed_device cpu", "another device; auto, mps and cuda likewise"),
    ("%openmed_device --reset", "back to what the shell said"),
    ("%openmed_release", "hand memory back"),
    ("%%openmed_ner", "find entities in the text of a cell"),
)


@dataclass(frozen=True)
class DeviceButton:
    """One device that can be asked for."""

    device: str
    pressed: bool = False
    active: bool = False
    enabled: bool = True
    reason: str = ""
    remedy: str = ""

    @property
    def label(self) -> str:
        """What stands on the button; what is asked for has a sign that is not a color.

        Example:
            >>> DeviceButton("cpu", pressed=True).label, DeviceButton("mps").label
            ('cpu ✓', 'mps')
        """
        return f"{self.device} ✓" if self.pressed else self.device

    @property
    def tooltip(self) -> str:
        words = " ".join(f"{part.rstrip('.')}." for part in (self.reason, self.remedy) if part)
        return words or f"Use {self.device}."


@dataclass(frozen=True, repr=False)
class PanelState(Displayable):
    """What there is to see of a session at one moment.

    Attributes:
        devices: Every device, with why it cannot be used.
        explanation: Who asks, the choice or the error, the environment.
        memory: How full the memory is.
        models: What is loaded.
        simulated: Whether the computer is a simulated one.
        cell_running: Whether a cell of the notebook runs, so that a click has to wait.
        waiting: How many clicks wait for the running cell.
        refreshes: Whether the memory is looked at every few seconds.
        activity: What is under way.
        error: What went wrong last, where the last thing asked for went wrong.
        said: What the last thing asked for has to say.
        answer: The last annotated text; no static form shows it, because those are saved in the notebook.
        seconds: How long annotating it took, without loading the model.
        note: Why this is shown instead of the panel, empty for the panel itself.
    """

    devices: DeviceList
    explanation: Explanation
    memory: tuple[MemoryBar, ...]
    models: LoadedModels
    simulated: bool = False
    cell_running: bool = False
    pending_clicks: int = 0
    auto_refresh: bool = False
    activity: ProgressEvent | None = None
    error: OpenMedError | None = None
    result: Report | None = None
    annotation: AnnotatedText | None = None
    seconds: float | None = None
    notice: str = ""

    @property
    def choice(self) -> DeviceChoice | None:
        return self.devices.choice

    @property
    def answer_is_old(self) -> bool:
        """Whether the last annotated text was read on another device than the one that is in force now."""
        here = "" if self.choice is None else normalize_device(format_device(self.choice.device))
        return self.annotation is not None and normalize_device(self.annotation.device) != here

    @property
    def buttons(self) -> tuple[DeviceButton, ...]:
        in_force = normalize_device(self.choice.device) if self.choice else ""
        is_auto = self.choice is not None and self.choice.requested == "auto"
        buttons = [DeviceButton("auto", pressed=is_auto, reason="The best device of this computer")]
        for one in self.devices.devices:
            is_here = normalize_device(one.device) == in_force
            pressed = is_here and not is_auto
            buttons.append(DeviceButton(one.device, pressed, is_here, one.usable is not False, one.reason, one.remedy))
        return tuple(buttons)

    @property
    def status(self) -> tuple[str, ...]:
        """The device in force and why, or why none is and what to do."""
        choice = self.explanation.choice
        if isinstance(choice, OpenMedError):
            return NO_DEVICE, choice.message, choice.remedy
        return (f"{choice.headline}.", *(() if choice.confirmed else (f"It is {choice.status}.",)))

    @property
    def environment_tables(self) -> tuple[Table, ...]:
        others = Table("Other variables", ("variable", "value"), tuple(self.explanation.variables.items()))
        return (self.explanation.environment.table(), others)

    def to_dict(self) -> dict[str, Any]:
        return {
            "devices": self.devices.to_dict(),
            "explanation": self.explanation.to_dict(),
            "memory": [bar.row for bar in self.memory],
            "models": self.models.to_dict(),
            "simulated": self.simulated,
        }

    def to_report(self) -> Report:
        devices = replace(self.devices.to_report().tables[0], caption="Devices")
        models = replace(self.models.table(), caption="Models")
        environment = (replace(table, collapsed=True) for table in self.environment_tables)
        memory = Table("Memory", MEMORY_COLUMNS, tuple(bar.row for bar in self.memory))
        commands = Table("The same by typing", ("type", "for"), COMMANDS)
        sentences = (*self.status, *filter(None, (self.notice,)))
        tables = (devices, *environment, memory, models, commands)
        title = "openmed_nb: device, environment, memory and models"
        return Report(title, sentences, tables=tables, html_sentences=sentences)


def read_state(session: Session) -> dict[str, Any]:
    """Return what there is to see of a session, as the fields of a PanelState; nothing is loaded, and nothing changes."""
    devices = session.list_devices(confirm=False)
    return {
        "devices": devices,
        "explanation": session.explain(confirm=False),
        "memory": read_memory(session, devices.choice),
        "models": session.inventory(),
        "simulated": is_mps_simulated(),
    }


def read_memory(session: Session, choice: DeviceChoice | None) -> tuple[MemoryBar, ...]:
    return memory_bars(
        choice, session.device_manager.memory_fraction(choice.device) if choice and choice.confirmed else None
    )
