"""``nb.signals``: load, memory, power and heat of the computer at one moment, and which of it makes a computer slow."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from ..devices import backend
from ..devices.machine import Machine, import_psutil, parse_sysctl, run_command
from ..devices.request import kind_of
from ..display import NOT_APPLICABLE, OK, WARNING, Finding, Report, Shown, Table, in_bytes
from ..errors import OpenMedError
from ..session import SESSION
from ..training.curve import parse_pressure
from . import signal_parsers as parsers
from .signal_parsers import NOTHING_REPORTED, Gpu

NOT_KNOWN = "not known"
SLOWED_BY_HEAT = {True: "limited", False: "nominal", None: None}
PLUGGED = {True: "adapter", False: "battery", None: None}


@dataclass(frozen=True, repr=False)
class Signals(Shown):
    """What the computer says at one moment; ``None`` if it cannot be read, never a guess.

    Attributes:
        gpu: What the GPU says.
        memory_pressure: ``"normal"``, ``"warning"`` or ``"critical"``; only macOS says.
        memory_free: The share of memory that is free, in percent, as macOS counts it.
        memory_available: The memory that programs can still have, in bytes.
        swap_used: What is in the swap, in bytes; macOS leaves it there after use, so only its growth says something.
        power_source: ``"adapter"``, ``"battery"`` or ``"UPS"``.
        battery: The charge of the battery, in percent.
        power_mode: ``"automatic"``, ``"low"`` or ``"high"``; Low Power Mode is ``"low"``.
        heat: ``"limited"`` if the system slows its processor down, ``"nominal"`` if it says that it does not, and
            ``"nothing reported"`` if macOS has recorded nothing, as is usual on Apple Silicon.
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

    def report(self) -> Report:
        """Return the states in words and the hardware; the figures stand in the HTML."""
        states = tuple((one.name, one.reads(self) or NOT_KNOWN) for one in CONDITIONS)
        hardware = tuple((name, say(self)) for name, say in HARDWARE.items() if say(self))
        figures = tuple((name, say(self) or NOT_KNOWN) for name, say in FIGURES.items())
        return Report(
            "Signals",
            (),
            (Table("", ("signal", "state"), states), Table("Hardware", ("part", "what it is"), hardware)),
            figures=(Table("Figures of this moment", ("signal", "figure"), figures),),
        )


@dataclass(frozen=True)
class Condition:
    """One state that can make a computer slow."""

    name: str  # What it is.
    reads: Callable[[Signals], str | None]  # Returns the state in one word, ``None`` if it is not known.
    slow: dict[str, str]  # What to know of each state that is slow.
    remedy: str  # One thing to do then.

    def finding(self, signals: Signals) -> Finding:
        state = self.reads(signals)
        if state in {None, NOTHING_REPORTED}:
            return Finding(self.name, NOT_APPLICABLE, state or NOT_KNOWN)
        if state in self.slow:
            return Finding(self.name, WARNING, f"{state}: {self.slow[state]}", self.remedy)
        return Finding(self.name, OK, state)


def heat_of(signals: Signals) -> str | None:
    """Return the worst that the system and its GPU say of heat."""
    states = {signals.heat, SLOWED_BY_HEAT[signals.gpu.slowed_by_heat]}
    return next((state for state in ("limited", "nominal", NOTHING_REPORTED) if state in states), None)


# The states that make a computer slow.
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
        heat_of,
        {"limited": "the system slows itself down because it is hot"},
        "Let the computer cool down, and give it air.",
    ),
)

HARDWARE: dict[str, Callable[[Signals], str]] = {
    "processor": lambda signals: signals.chip or "",
    "performance cores": lambda signals: with_unit(signals.performance_cores),
    "efficiency cores": lambda signals: with_unit(signals.efficiency_cores),
    "GPU": lambda signals: signals.gpu.name or "",
    "GPU cores": lambda signals: with_unit(signals.gpu.cores),
    "GPU memory": lambda signals: in_bytes(signals.gpu.memory_total),
}

FIGURES: dict[str, Callable[[Signals], str]] = {
    "GPU utilisation": lambda signals: with_unit(signals.gpu.utilisation, " %"),
    "GPU memory in use": lambda signals: in_bytes(signals.gpu.memory_used),
    "GPU temperature": lambda signals: with_unit(signals.gpu.temperature, " °C"),
    "GPU power": lambda signals: with_unit(signals.gpu.power, " W"),
    "free memory": lambda signals: with_unit(signals.memory_free, " %"),
    "available memory": lambda signals: in_bytes(signals.memory_available),
    "swap in use": lambda signals: in_bytes(signals.swap_used),
    "battery": lambda signals: with_unit(signals.battery, " %"),
    "processor speed limit": lambda signals: with_unit(signals.speed_limit, " %"),
}


def with_unit(number: float | None, unit: str = "") -> str:
    return "" if number is None else f"{number:.0f}{unit}"


# Runs a command and returns what it prints, ``None`` if it cannot be run.
Run = Callable[[list[str]], "str | None"]


def signals() -> Signals:
    """Read load, memory pressure, swap, power source, Low Power Mode and heat of this computer, without administrator rights.

    Returns:
        The signals of this moment; what cannot be read is ``None`` and shown as "not known", never a guess. ``gpu`` is
        the GPU of the device in force. Its text form has the states in words only; the figures stand in the HTML.

    On macOS the system's own commands are asked (``ioreg``, ``sysctl``, ``memory_pressure``, ``pmset``), on CUDA
    ``nvidia-smi``, elsewhere psutil; each may take up to two seconds, and torch is not loaded. Figures of a GPU are those
    of all processes together. Under a simulated MPS device nothing is read.

    Example:
        >>> signals().memory_available > 0
        True
    """
    with SESSION.lock:
        choice = SESSION.choice_or_error(confirm=False)
        device = "cpu" if isinstance(choice, OpenMedError) else choice.device
        return read_signals(SESSION.computer.machine, device, uuid=backend.gpu_uuid(device))


def read_signals(
    machine: Machine,
    device: str,
    run: Run = run_command,
    environ: Mapping[str, str] = os.environ,
    uuid: str | None = None,
) -> Signals:
    """Read the signals of a computer, with the GPU of a device; what cannot be read is ``None``, as all of a simulated one."""
    if machine.simulated:
        return Signals(simulated=True)
    read = read_system()
    if machine.system == "Darwin":
        read |= {name: value for name, value in read_mac(run).items() if value is not None}
    if kind_of(device) == "cuda":
        read["gpu"] = read_nvidia(device, run, environ, uuid)
    return Signals(chip=machine.chip, **read)


def read_system() -> dict[str, Any]:
    """Return what psutil says on every system, by the names of the fields of ``Signals``."""
    psutil = import_psutil()

    def asked(question: str) -> Any:
        try:
            return getattr(psutil, question, lambda: None)()
        except (
            OSError,
            RuntimeError,
            NotImplementedError,
            psutil.Error,
        ):  # Containers hide files, some have no battery.
            return None

    battery = asked("sensors_battery")
    charge = getattr(battery, "percent", None)
    return {
        "memory_available": getattr(asked("virtual_memory"), "available", None),
        "swap_used": getattr(asked("swap_memory"), "used", None),
        "power_source": PLUGGED[getattr(battery, "power_plugged", None)],
        "battery": round(charge) if charge is not None and 0 <= charge <= 100 else None,  # noqa: PLR2004 - percent
    }


def read_mac(run: Run) -> dict[str, Any]:
    """Return what macOS says, by the names of the fields of ``Signals``."""
    facts = parse_sysctl(run(parsers.SYSCTL))
    battery, heat = run(parsers.BATTERY), run(parsers.HEAT)
    return {
        "gpu": parsers.parse_ioreg(run(parsers.IOREG)),
        "memory_pressure": parse_pressure(facts.get(parsers.PRESSURE_LEVEL)),
        "memory_free": parsers.parse_free_memory(run(parsers.MEMORY_PRESSURE)),
        "swap_used": parsers.parse_swap(facts.get(parsers.SWAP)),
        "power_source": parsers.parse_power_source(battery),
        "battery": parsers.parse_battery(battery),
        "power_mode": parsers.parse_power_mode(run(parsers.POWER_SETTINGS)),
        "heat": parsers.parse_heat(heat),
        "speed_limit": parsers.parse_speed_limit(heat),
        "performance_cores": parsers.parse_cores(facts, parsers.PERFORMANCE_CORES),
        "efficiency_cores": parsers.parse_cores(facts, parsers.EFFICIENCY_CORES),
    }


def read_nvidia(device: str, run: Run, environ: Mapping[str, str], uuid: str | None = None) -> Gpu:
    """Return what the GPU says that torch calls by this name."""
    answers = (parsers.parse_nvidia_smi(run([path, *parsers.QUERY])) for path in parsers.NVIDIA_SMI)
    gpus = next((gpus for gpus in answers if gpus), ())
    return parsers.chosen_gpu(gpus, device, environ, uuid) or Gpu()
