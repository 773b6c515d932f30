"""The signals as values, and the numbers in the output of commands: one in its range, or nothing."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from typing import Any

from ...display import MARK, NOT_APPLICABLE, NOTE, OK, WARNING, Finding, Report, Shown, Table, in_bytes

NUMBER = re.compile(r"\s*(\d{1,15}(?:[.,]\d{1,9})?)\s*", re.ASCII)

LARGEST_SIZE = 1 << 50
"""A petabyte; a size beyond it was not read rightly."""


def number_in(text: str | None, least: float = 0, most: float = LARGEST_SIZE) -> float | None:
    """Return the number that a text is, ``None`` where it is none, or one that cannot be.

    A comma may stand for the point, as some locales have it.

    Example:
        >>> number_in("16", most=100), number_in("6119,06"), number_in("134", most=100), number_in("[N/A]")
        (16.0, 6119.06, None, None)
    """
    match = NUMBER.fullmatch(text or "")
    number = float(match[1].replace(",", ".")) if match else None
    return number if number is not None and least <= number <= most else None


def whole_number_in(text: str | None, least: int = 0, most: int = LARGEST_SIZE) -> int | None:
    """Return the whole number that a text is, ``None`` as in :func:`number_in`.

    Example:
        >>> whole_number_in("16"), whole_number_in("0", least=1), whole_number_in("1.5")
        (16, None, None)
    """
    number = number_in(text, least, most)
    return int(number) if number is not None and number.is_integer() else None


NOT_KNOWN = "not known"
NOTHING_REPORTED = "nothing reported"

SLOWED_BY_HEAT = {True: "limited", False: "nominal", None: None}


@dataclass(frozen=True)
class Gpu:
    """What a GPU says of itself; ``None`` where it cannot be read, never a guess.

    Attributes:
        name: Its name, such as ``"Apple M4"``.
        cores: How many cores it has; Apple's GPUs say it.
        utilisation: How much of the last moment it was busy, in percent, for all processes together.
        memory_used: The memory that it uses, in bytes, for all processes together.
        memory_total: The memory that it has for itself, in bytes; Apple's GPUs share that of the computer.
        temperature: In degrees Celsius.
        power: In watts.
        slowed_by_heat: Whether it runs slower than it could because of heat.
        uuid: What NVIDIA names this one GPU by.
    """

    name: str | None = None
    cores: int | None = None
    utilisation: int | None = None
    memory_used: int | None = None
    memory_total: int | None = None
    temperature: int | None = None
    power: float | None = None
    slowed_by_heat: bool | None = None
    uuid: str | None = None


@dataclass(frozen=True, repr=False)
class Signals(Shown):
    """What the computer says at one moment; ``None`` where it cannot be read, never a guess.

    Attributes:
        gpu: What the GPU says.
        memory_pressure: ``"normal"``, ``"warning"`` or ``"critical"``; only macOS says.
        memory_free: The share of memory that is free, in percent, as macOS counts it.
        memory_available: The memory that programs can still have, in bytes.
        swap_used: What is in the swap, in bytes; macOS leaves it there after use, so only its growth says something.
        power_source: ``"adapter"``, ``"battery"`` or ``"UPS"``.
        battery: The charge of the battery, in percent.
        power_mode: ``"automatic"``, ``"low"`` or ``"high"``; Low Power Mode is ``"low"``.
        heat: ``"limited"`` where the system slows its processor down, ``"nominal"`` where it says that it does not, and
            ``"nothing reported"`` where macOS has recorded nothing, as it usually is on Apple Silicon.
        speed_limit: How fast the processor may run, in percent.
        chip: The processor's name.
        performance_cores: How many fast cores it has.
        efficiency_cores: How many slow cores it has.
        simulated: Whether the computer is a simulated Mac, of which nothing can be read.

    Example:
        >>> print(Signals(memory_pressure="normal", power_source="battery"))
        Signals
          signal           state
          memory pressure  normal
          power            battery
          power mode       not known
          heat             not known
    """

    gpu: Gpu = field(default_factory=Gpu)
    memory_pressure: str | None = None
    memory_free: int | None = None
    memory_available: int | None = None
    swap_used: int | None = None
    power_source: str | None = None
    battery: int | None = None
    power_mode: str | None = None
    heat: str | None = None
    speed_limit: int | None = None
    chip: str | None = None
    performance_cores: int | None = None
    efficiency_cores: int | None = None
    simulated: bool = False

    def findings(self) -> tuple[Finding, ...]:
        """Return what of it makes a computer slow, in words without figures."""
        return tuple(condition.finding(self) for condition in CONDITIONS)

    def to_dict(self) -> dict[str, Any]:
        """Return everything as plain mappings, numbers and strings, ready for JSON; sizes in bytes."""
        return asdict(self)

    def report(self) -> Report:
        """Return what there is to show: the states in words, the hardware, and the figures."""
        states = tuple((one.name, one.reads(self) or NOT_KNOWN) for one in CONDITIONS)
        hardware = tuple((name, say(self)) for name, say in HARDWARE.items() if say(self))
        figures = tuple((name, say(self) or NOT_KNOWN) for name, say in FIGURES.items())
        return Report(
            f"Signals{MARK if self.simulated else ''}",
            (NOTE,) if self.simulated else (),
            (Table("", ("signal", "state"), states), Table("Hardware", ("part", "what it is"), hardware)),
            figures=(Table("Figures of this moment", ("signal", "figure"), figures),),
        )


@dataclass(frozen=True)
class Condition:
    """One state that can make a computer slow.

    Attributes:
        name: What it is.
        reads: Returns the state in one word, ``None`` where it is not known.
        slow: What to know of each state that is slow.
        remedy: One thing to do then.
    """

    name: str
    reads: Callable[[Signals], str | None]
    slow: dict[str, str]
    remedy: str

    def finding(self, signals: Signals) -> Finding:
        """Return the finding."""
        state = self.reads(signals)
        if state in {None, NOTHING_REPORTED}:
            return Finding(self.name, NOT_APPLICABLE, state or NOT_KNOWN)
        if state in self.slow:
            return Finding(self.name, WARNING, f"{state}: {self.slow[state]}", self.remedy)
        return Finding(self.name, OK, state)


def _heat(signals: Signals) -> str | None:
    said = {signals.heat, SLOWED_BY_HEAT[signals.gpu.slowed_by_heat]}
    return next((state for state in ("limited", "nominal", NOTHING_REPORTED) if state in said), None)


CONDITIONS = (
    Condition(
        "memory pressure",
        lambda signals: signals.memory_pressure,
        {
            "warning": "macOS compresses memory, which makes everything slower",
            "critical": "macOS moves memory to the disk, which makes everything much slower",
        },
        "Close other programs, or use a smaller batch.",
    ),
    Condition(
        "power",
        lambda signals: signals.power_source,
        {
            "battery": "the processor may run slower than on the power adapter",
            "UPS": "the mains have failed, and the computer may shut down",
        },
        "Connect it to mains power before times are measured.",
    ),
    Condition(
        "power mode",
        lambda signals: signals.power_mode,
        {"low": "Low Power Mode slows processor and GPU down"},
        "Switch Low Power Mode off: System Settings, Battery.",
    ),
    Condition(
        "heat",
        _heat,
        {"limited": "the system slows itself down because it is hot"},
        "Let the computer cool down, and give it air.",
    ),
)
"""The states that make a computer slow."""

HARDWARE: dict[str, Callable[[Signals], str]] = {
    "processor": lambda signals: signals.chip or "",
    "performance cores": lambda signals: _count(signals.performance_cores),
    "efficiency cores": lambda signals: _count(signals.efficiency_cores),
    "GPU": lambda signals: signals.gpu.name or "",
    "GPU cores": lambda signals: _count(signals.gpu.cores),
    "GPU memory": lambda signals: in_bytes(signals.gpu.memory_total),
}

FIGURES: dict[str, Callable[[Signals], str]] = {
    "GPU utilisation": lambda signals: _percent(signals.gpu.utilisation),
    "GPU memory in use": lambda signals: in_bytes(signals.gpu.memory_used),
    "GPU temperature": lambda signals: "" if signals.gpu.temperature is None else f"{signals.gpu.temperature} °C",
    "GPU power": lambda signals: "" if signals.gpu.power is None else f"{signals.gpu.power:.0f} W",
    "free memory": lambda signals: _percent(signals.memory_free),
    "available memory": lambda signals: in_bytes(signals.memory_available),
    "swap in use": lambda signals: in_bytes(signals.swap_used),
    "battery": lambda signals: _percent(signals.battery),
    "processor speed limit": lambda signals: _percent(signals.speed_limit),
}


def _count(number: int | None) -> str:
    return "" if number is None else str(number)


def _percent(number: int | None) -> str:
    return "" if number is None else f"{number} %"
