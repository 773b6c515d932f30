"""The state that the panel displays, including memory bars, as one value. Reading it does not start an allocator."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, TypeAlias

from ..._events.activity import ProgressEvent
from ..._render.display import Displayable, JsonObject, Report, Table, format_bytes
from ...devices.choice import DeviceChoice, DeviceList, Explanation, gpu_reasons_table
from ...devices.machine import format_device, is_mps_simulated
from ...devices.registry import get_device
from ...devices.request import normalize_device
from ...errors import OpenMedError
from ...models.store import LoadedModels
from ...training.curve import resident_bytes, total_memory_bytes

if TYPE_CHECKING:
    from ...annotation.results import AnnotatedText
    from ...session import Session


@dataclass(frozen=True)
class MemoryPart:
    """One kind of memory in use, such as allocated memory, with its size in bytes."""

    name: str
    size: int

    def __str__(self) -> str:
        return f"{self.name} {format_bytes(self.size)}".lstrip()


@dataclass(frozen=True)
class MemoryBar:
    """Memory in use and its limit.

    Attributes:
        name: Owner of the memory: a device or the process.
        parts: Memory in use, by kind.
        limit: Limit in bytes, or 0 if unknown.
        limit_name: Description of the limit.
    """

    name: str
    parts: tuple[MemoryPart, ...]
    limit: int
    limit_name: str

    @property
    def row(self) -> tuple[str, str, str]:
        """Name, memory in use and limit, for a table with :data:`MEMORY_COLUMNS`."""
        return self.name, ", ".join(map(str, self.parts)), f"{format_bytes(self.limit)} ({self.limit_name})"


# Fields of a PanelState with their new values.
StateChanges: TypeAlias = dict[str, Any]

MEMORY_COLUMNS = ("memory of", "used", "limit")


def memory_bars(choice: DeviceChoice | None, fraction: float | None = None) -> tuple[MemoryBar, ...]:
    """Return the memory bars of a confirmed device with an allocator and of this process.

    Args:
        choice: Active device.
        fraction: Fraction of the recommended memory that the allocator may use. If ``None``, it has no such limit.
    """
    process = MemoryBar(
        "Python session", (MemoryPart("", resident_bytes()),), total_memory_bytes(), "memory of this computer"
    )
    if choice is None or not choice.confirmed or not get_device(choice.device).has_allocator:
        return (process,)
    device = get_device(choice.device)
    memory = device.memory_stats()
    name = device.memory_limit_base
    allocated = memory.allocated or 0
    cached = max(0, (memory.reserved or 0) - allocated)
    parts = (MemoryPart("allocated", allocated), MemoryPart("cached", cached))
    limit_name = f"{fraction * 100:g}% of {name}" if fraction not in (None, 1.0) else name
    limit = int((fraction or 1.0) * (memory.recommended or 0))
    return (MemoryBar(format_device(choice.device), parts, limit, limit_name), process)


# The commands that replace the controls of the panel in its static form.
COMMANDS = (
    ("%openmed_device", "show the active device and the reason"),
    ("%openmed_device cpu", "use this device from now on (cpu, auto, mps or cuda)"),
    ("%openmed_device --reset", "undo your choice of device"),
    ("%openmed_release", "release memory"),
    ("%%openmed_ner", "find the entities in the text below the command"),
)


@dataclass(frozen=True)
class DeviceButton:
    """Button of a device.

    Attributes:
        device: Name of the device, or ``"auto"``.
        tooltip: Reason why the device is unavailable and remedy as sentences, or what the button does.
        pressed: Whether this device is requested.
        active: Whether this device is active.
        enabled: Whether the device can be requested.
    """

    device: str
    tooltip: str = ""
    pressed: bool = False
    active: bool = False
    enabled: bool = True

    @property
    def label(self) -> str:
        """Text on the button; the requested device has a check mark, because color alone is not accessible.

        Example:
            >>> DeviceButton("cpu", pressed=True).label, DeviceButton("mps").label
            ('cpu ✓', 'mps')
        """
        return f"{self.device} ✓" if self.pressed else self.device


@dataclass(frozen=True, repr=False)
class PanelState(Displayable):
    """Snapshot of a session and of the panel that displays it.

    Attributes:
        devices: All devices, with the reasons why some are unavailable.
        explanation: Resolution order, choice or error, and environment variables.
        memory: Memory bars.
        models: Loaded models.
        simulated: Whether the computer is simulated.
        pending_clicks: Number of clicks that wait for the running cell.
        activity: Operation in progress.
        error: Error of the last click, if it failed.
        result: Result of the last click.
        annotation: Last annotated text. Static forms do not show it, because they are saved in the notebook.
        notice: Reason why the static form is shown; empty for the panel itself.
    """

    devices: DeviceList
    explanation: Explanation
    memory: tuple[MemoryBar, ...]
    models: LoadedModels
    simulated: bool = False
    pending_clicks: int = 0
    activity: ProgressEvent | None = None
    error: OpenMedError | None = None
    result: Report | None = None
    annotation: AnnotatedText | None = None
    notice: str = ""

    @property
    def choice(self) -> DeviceChoice | None:
        """Active device with its reason, or ``None``."""
        return self.devices.choice

    @property
    def is_annotation_outdated(self) -> bool:
        """Whether the last text was annotated on a device that is no longer active."""
        device = "" if self.choice is None else format_device(self.choice.device)
        return self.annotation is not None and normalize_device(self.annotation.device) != device

    @property
    def buttons(self) -> tuple[DeviceButton, ...]:
        """The button of ``auto`` and of each device that this computer may have."""
        active_device = normalize_device(self.choice.device) if self.choice else ""
        is_auto = self.choice is not None and self.choice.requested == "auto"
        buttons = [DeviceButton("auto", "The best available device.", pressed=is_auto)]
        for status in self.devices.devices:
            is_active = normalize_device(status.device) == active_device
            if status.is_absent and not is_active:
                continue
            sentences = [f"{clause.rstrip('.')}." for clause in (status.reason, status.remedy) if clause]
            tooltip = " ".join(sentences) or f"Use {status.device}."
            if status.usable is None:
                tooltip = f"Not tested yet. Click to test and use {status.device}."
            buttons.append(
                DeviceButton(
                    status.device,
                    tooltip,
                    pressed=is_active and not is_auto,
                    active=is_active,
                    enabled=status.usable is not False,
                )
            )
        return tuple(buttons)

    @property
    def status(self) -> tuple[str, ...]:
        """Active device and reason as sentences, or the error with its remedy."""
        choice = self.explanation.choice
        if isinstance(choice, OpenMedError):
            return "No active device.", choice.message, choice.remedy
        return f"{choice.headline}.", *choice.notices

    @property
    def environment_tables(self) -> tuple[Table, ...]:
        """Tables of the MPS variables and of other variables."""
        others = Table("Other variables", ("variable", "value"), tuple(self.explanation.variables.items()))
        return (self.explanation.environment.table(), others)

    def to_dict(self) -> JsonObject:
        """Return the snapshot of the session as JSON-compatible values."""
        return {
            "devices": self.devices.to_dict(),
            "explanation": self.explanation.to_dict(),
            "memory": [bar.row for bar in self.memory],
            "models": self.models.to_dict(),
            "simulated": self.simulated,
        }

    def to_report(self) -> Report:
        """Return the static form, with the commands that replace the controls."""
        present = tuple(status for status in self.devices.devices if not status.is_absent)
        devices = replace(DeviceList(present, self.choice).to_report().tables[0], caption="Devices")
        models = replace(self.models.table(), caption="Models")
        environment = [replace(table, collapsed=True) for table in self.environment_tables if self.devices.has_mps]
        memory = Table("Memory", MEMORY_COLUMNS, tuple(bar.row for bar in self.memory))
        commands = Table("Equivalent commands", ("command", "description"), COMMANDS)
        sentences = [*self.status[1:]]
        if self.notice:
            sentences.append(self.notice)
        reasons = gpu_reasons_table(self.devices.unavailable)
        return Report(self.status[0], tuple(sentences), (devices, *environment, memory, models, commands, reasons))


def read_state(session: Session) -> StateChanges:
    """Return the state of a session as fields of a :class:`PanelState`, without loading or changing anything."""
    devices = session.list_devices(confirm=False)
    choice = devices.choice
    fraction = session.device_manager.memory_fraction(choice.device) if choice and choice.confirmed else None
    return {
        "devices": devices,
        "explanation": session.explain(confirm=False),
        "memory": memory_bars(devices.choice, fraction),
        "models": session.inventory(),
        "simulated": is_mps_simulated(),
    }
