"""Everything that the panel shows, as one value, with bars of memory; looking at it starts no allocator."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from ...activity import Activity
from ...devices.choice import Candidate, DeviceChoice, DeviceList, Explanation
from ...devices.machine import mps_is_simulated, shown_device
from ...devices.memory import allocator
from ...devices.request import VARIABLES, Wish, canonical, kind_of, masked, winner
from ...display import Report, Shown, Table, in_bytes
from ...errors import OpenMedError, shorten
from ...models.store import Inventory
from ...training.curve import installed_bytes, resident_bytes

if TYPE_CHECKING:
    from ...annotation.results import AnnotatedText
    from ...session import Session


@dataclass(frozen=True)
class MemoryPart:
    name: str
    size: int

    def __str__(self) -> str:
        return f"{self.name} {in_bytes(self.size)}"


@dataclass(frozen=True)
class MemoryBar:
    """How much is used of something."""

    name: str
    parts: tuple[MemoryPart, ...]
    limit: int
    limit_name: str

    @property
    def used(self) -> int:
        return sum(part.size for part in self.parts)

    def percentage(self, size: int) -> float:
        """Return a size as a percentage of the limit, at most 100."""
        return min(100.0, 100 * size / self.limit) if self.limit else 0.0

    @property
    def row(self) -> tuple[str, str, str]:
        used = ", ".join(str(part) for part in self.parts)
        return self.name, used, f"{in_bytes(self.limit)}, {self.limit_name}"


LIMIT_NAMES = {"mps": "what Metal recommends", "cuda": "the memory of the GPU"}


def memory_bars(choice: DeviceChoice | None, fraction: float | None = None) -> tuple[MemoryBar, ...]:
    """Return the bars for a device and for this process."""
    process = MemoryBar("process", (MemoryPart("used", resident_bytes()),), installed_bytes(), "of this computer")
    if choice is None or not choice.certain or kind_of(choice.device) == "cpu":
        return (process,)
    memory, name = allocator(choice.device).memory(), LIMIT_NAMES[kind_of(choice.device)]
    allocated = memory.allocated or 0
    cached = max(0, (memory.reserved or 0) - allocated)
    parts = (MemoryPart("allocated", allocated), MemoryPart("cached", cached))
    limited = f"the limit: {fraction:g} of {name}" if fraction not in (None, 1.0) else name
    limit = int((fraction or 1.0) * (memory.recommended or 0))
    return MemoryBar(shown_device(choice.device), parts, limit, limited), process


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
    in_force: bool = False
    enabled: bool = True
    reason: str = ""
    remedy: str = ""

    @property
    def label(self) -> str:
        """What stands on the button.

        Example:
            >>> DeviceButton("cpu", in_force=True).label
            'cpu (in force)'
        """
        return f"{self.device} (in force)" if self.in_force else self.device

    @property
    def hover(self) -> str:
        words = " ".join(f"{part.rstrip('.')}." for part in (self.reason, self.remedy) if part)
        return words or f"Use {self.device}."


@dataclass(frozen=True, repr=False)
class PanelState(Shown):
    """What there is to see of a session at one moment.

    Attributes:
        devices: Every device, with why it cannot be used.
        explanation: Who asks, the choice or the error, the environment.
        memory: How full the memory is.
        models: What is loaded.
        simulated: Whether the computer is a simulated one.
        cell_runs: Whether a cell of the notebook runs, so that a click has to wait.
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
    models: Inventory
    simulated: bool = False
    cell_runs: bool = False
    waiting: int = 0
    refreshes: bool = False
    activity: Activity | None = None
    error: OpenMedError | None = None
    said: Report | None = None
    answer: AnnotatedText | None = None
    seconds: float | None = None
    note: str = ""

    @property
    def choice(self) -> DeviceChoice | None:
        return self.devices.choice

    @property
    def buttons(self) -> tuple[DeviceButton, ...]:
        requested = self.choice.requested if self.choice else ""
        auto = DeviceButton("auto", pressed=requested == "auto", reason="The best device of this computer")
        return (auto, *(self._button(one) for one in self.devices.candidates))

    @property
    def asked(self) -> str:
        """What is asked for, and who asks.

        Such as ``"auto (nobody asked)"`` or ``"OPENMED_TORCH_DEVICE=cpu from your shell"``.
        """
        return said_of_wish(winner(self.explanation.chain))

    @property
    def why(self) -> tuple[str, ...]:
        """Why this device is in force, or why none is and what to do."""
        choice = self.explanation.choice
        return (choice.what, choice.remedy) if isinstance(choice, OpenMedError) else (choice.reason,)

    @property
    def status(self) -> tuple[str, ...]:
        choice = self.choice
        in_force = f"In force: {choice.device} ({choice.grade})." if choice else NO_DEVICE
        return (f"Asked for: {self.asked}. {in_force}", *self.why)

    @property
    def memory_table(self) -> Table:
        return Table("Memory", ("memory", "used", "of"), tuple(bar.row for bar in self.memory))

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

    def report(self) -> Report:
        devices = replace(self.devices.report().tables[0], caption="Devices")
        models = replace(self.models.table(), caption="Models")
        commands = Table("The same by typing", ("type", "for"), COMMANDS)
        tables = (devices, *self.environment_tables, self.memory_table, models, commands)
        sentences = (*self.status, *filter(None, (self.note,)))
        return Report("openmed_nb: device, environment, memory and models", sentences, tables=tables)

    def _button(self, one: Candidate) -> DeviceButton:
        choice = self.choice
        in_force = choice is not None and canonical(choice.device) == canonical(one.device)
        asked = choice is not None and choice.requested != "auto"
        return DeviceButton(one.device, in_force and asked, in_force, one.usable is not False, one.reason, one.remedy)


def said_of_wish(wish: Wish | None) -> str:
    """Return what a wish says and whose it is."""
    if wish is None:
        return "auto (nobody asked)"
    spelling = shorten(masked(wish.source, str(wish.spelling)))
    return f"{wish.source}={spelling} from your shell" if wish.source in VARIABLES else f"{spelling} by {wish.source}"


def look(session: Session) -> dict[str, Any]:
    """Return what there is to see of a session, as the fields of a PanelState; nothing is loaded, and nothing changes."""
    devices = session.devices(confirm=False)
    return {
        "devices": devices,
        "explanation": session.explain(confirm=False),
        "memory": memory_now(session, devices.choice),
        "models": session.inventory(),
        "simulated": mps_is_simulated(),
    }


def memory_now(session: Session, choice: DeviceChoice | None) -> tuple[MemoryBar, ...]:
    return memory_bars(choice, session.computer.limit(choice.device) if choice and choice.certain else None)
