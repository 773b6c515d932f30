"""Snapshot of the GPU, memory, power and thermal state of this machine, and device utilization.

The values come from commands of macOS and of the NVIDIA driver. No command needs administrator rights. The commands of macOS
have full paths, because a kernel that was started from the Dock has a short ``PATH``. Values that are unreadable or out of
range are ``None``. The parsers follow recorded outputs in ``tests/recorded/signals``.
"""

from __future__ import annotations

import contextlib
import os
import re
import time
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from .._render.display import (
    NOT_APPLICABLE,
    OK,
    UNKNOWN,
    WARNING,
    Displayable,
    Finding,
    Report,
    Table,
    format_bytes,
    worst_status,
)
from .machine import MachineInfo, RunCommand, import_psutil, is_mps_simulated, run_command
from .registry import get_device

# Memory pressure levels of macOS (kern.memorystatus_vm_pressure_level); level 3 does not exist.
PRESSURE_LEVELS = {"1": "normal", "2": "warning", "4": "critical"}
POWER_SOURCES: Mapping[bool, Literal["adapter", "battery"]] = {True: "adapter", False: "battery"}


@dataclass(frozen=True)
class GpuStatus:
    """Status of one GPU. A value that cannot be read is ``None``, never a guess.

    Attributes:
        name: Name of the GPU, such as ``"Apple M4"``.
        utilization: Recent utilization by all processes, in percent.
        memory_used: Memory used by all processes, in bytes.
    """

    name: str | None = None
    utilization: int | None = None
    memory_used: int | None = None


@dataclass(frozen=True, repr=False)
class SystemStatus(Displayable):
    """Snapshot of the status of this machine. A value that cannot be read is ``None``, never a guess.

    Attributes:
        gpu: Status of the GPU.
        memory_pressure: ``"normal"``, ``"warning"`` or ``"critical"``. Only macOS reports it.
        memory_available: Memory that is available to processes, in bytes.
        swap_used: Used swap space in bytes. macOS does not clear it after use, so only its growth is meaningful.
        power_source: ``"adapter"``, ``"battery"`` or ``"UPS"``.
        power_mode: ``"automatic"``, ``"low"`` (Low Power Mode) or ``"high"``.
        thermal_state: ``"nominal"``, ``"moderate"``, or ``"limited"`` for heavy thermal pressure. Only macOS reports it.
        chip: Name of the processor.
        simulated: Whether the machine is a simulated Mac, whose values cannot be read.
        background_load: Load of other programs as a clause if times cannot be measured because of it. Empty if it is lower,
            and ``None`` if it was not checked.

    Example:
        >>> SystemStatus(power_source="battery").to_report().title
        'System status: performance may be reduced'
    """

    gpu: GpuStatus = field(default_factory=GpuStatus)
    memory_pressure: Literal["normal", "warning", "critical"] | None = None
    memory_available: int | None = None
    swap_used: int | None = None
    power_source: Literal["adapter", "battery", "UPS"] | None = None
    power_mode: Literal["automatic", "low", "high"] | None = None
    thermal_state: Literal["nominal", "moderate", "limited"] | None = None
    chip: str | None = None
    simulated: bool = False
    background_load: str | None = None

    @property
    def findings(self) -> tuple[Finding, ...]:
        """One finding for each condition that can reduce performance, and one for the load of other programs if it was checked."""
        findings = [condition.finding(self) for condition in CONDITIONS]
        if self.background_load:
            findings.append(
                Finding(LOAD, WARNING, f"busy: {self.background_load}", "Close them before you measure times.")
            )
        elif self.background_load is not None:
            findings.append(Finding(LOAD, OK, "low"))
        return tuple(findings)

    def to_report(self) -> Report:
        """Return the states, the hardware and the current readings."""
        findings = self.findings
        states = tuple((finding.name, finding.evidence.partition(": ")[0]) for finding in findings)
        gpu = self.gpu
        hardware = (
            ("processor", self.chip or ""),
            ("GPU", gpu.name or ""),
        )
        readings = (
            ("GPU utilization", "" if gpu.utilization is None else f"{gpu.utilization}%"),
            ("GPU memory in use", format_bytes(gpu.memory_used)),
            ("available memory", format_bytes(self.memory_available)),
            ("swap in use", format_bytes(self.swap_used)),
        )
        warnings = tuple(
            f"{finding.name.capitalize()}: {finding.evidence.partition(': ')[2]}. {finding.remedy}"
            for finding in findings
            if finding.status == WARNING
        )
        summary = "performance may be reduced" if warnings else "no known cause of reduced performance"
        # Only macOS reports memory pressure.
        hint = () if self.memory_pressure else ("On a Mac, nb.system_status() reads the missing values.",)
        return Report(
            f"System status: {summary}",
            (*warnings, *hint),
            status=worst_status(findings),
            tables=(
                Table("", ("condition", "state"), states),
                Table("Hardware", ("component", "value"), tuple(row for row in hardware if row[1])),
            ),
            metrics=(
                Table(
                    "Current readings",
                    ("reading", "value"),
                    tuple((name, value or UNKNOWN) for name, value in readings),
                ),
            ),
        )


@dataclass(frozen=True)
class Condition:
    """Condition of the machine that can reduce performance.

    Attributes:
        name: Name of the condition.
        field: Field of :class:`SystemStatus` that contains its state.
        messages: Effect of each state that reduces performance.
        remedy: Suggested action for these states.
    """

    name: str
    field: str
    messages: dict[str, str]
    remedy: str

    def finding(self, status: SystemStatus) -> Finding:
        """Return the state with its effect."""
        state: str | None = getattr(status, self.field)
        if state is None:
            return Finding(self.name, NOT_APPLICABLE, UNKNOWN)
        if state in self.messages:
            return Finding(self.name, WARNING, f"{state}: {self.messages[state]}", self.remedy)
        return Finding(self.name, OK, state)


LOAD = "processor load"  # Name of the finding on the load of other programs.
CONDITIONS = (
    Condition(
        "memory pressure",
        "memory_pressure",
        {
            "warning": "macOS compresses memory, which slows down all processes",
            "critical": "macOS swaps memory to the disk, which slows down all processes severely",
        },
        "Close other applications, or use a smaller batch.",
    ),
    Condition(
        "power",
        "power_source",
        {
            "battery": "the processor may run slower than on the power adapter",
            "UPS": "mains power failed, and the machine may shut down",
        },
        "Connect the machine to mains power before you measure times.",
    ),
    Condition(
        "power mode",
        "power_mode",
        {"low": "Low Power Mode reduces the speed of the processor and the GPU"},
        "Disable Low Power Mode in System Settings, Battery.",
    ),
    Condition(
        "thermal state",
        "thermal_state",
        {
            "moderate": "the machine is warm, and the system may reduce its speed",
            "limited": "the system reduces its speed because the machine is hot",
        },
        "Let the machine cool down, and check its airflow.",
    ),
)


def read_system_status(machine: MachineInfo, device: str, run: RunCommand = run_command) -> SystemStatus:
    """Read the status of a machine and of the GPU of a device. The values of a simulated machine are ``None``."""
    if machine.simulated:
        return SystemStatus(simulated=True)
    psutil = import_psutil()

    def query(function: str, value: str) -> Any:
        """Return a value of psutil, or ``None`` if it is unknown."""
        try:
            return getattr(getattr(psutil, function)(), value, None)
        except (OSError, RuntimeError, AttributeError, psutil.Error):  # Containers hide files, some have no battery.
            return None

    status = SystemStatus(
        memory_available=query("virtual_memory", "available"),
        swap_used=query("swap_memory", "used"),
        power_source=POWER_SOURCES.get(query("sensors_battery", "power_plugged")),
        chip=machine.chip,
    )
    if machine.system == "Darwin":
        outputs = {name: run(command) for name, command in MAC_COMMANDS.items()}
        values: dict[str, Any] = {"gpu": _parse_ioreg(outputs["ioreg"])}
        for name, command, pattern, states in MAC_READINGS:
            if state := states.get(_first_group(pattern, outputs[command]) or ""):
                values[name] = state
        status = replace(status, **values)
    if get_device(device).sensor == "nvidia-smi":
        status = replace(status, gpu=_read_nvidia(device, run))
    return status


# Commands of macOS. Each runs once per snapshot.
MAC_COMMANDS = {
    "ioreg": ["/usr/sbin/ioreg", "-r", "-d", "1", "-w", "0", "-c", "IOAccelerator"],
    "memory": ["/usr/sbin/sysctl", "-i", "kern.memorystatus_vm_pressure_level"],
    "battery": ["/usr/bin/pmset", "-g", "batt"],
    "power": ["/usr/bin/pmset", "-g"],
    "thermal state": ["/usr/bin/notifyutil", "-g", "com.apple.system.thermalpressurelevel"],
}

MAX_BYTES = 1 << 50  # 1 PiB. A larger size is a parse error.
SOURCES = {
    "AC Power": "adapter",
    "Battery Power": "battery",
    "UPS Power": "UPS",
    "No batteries available": "adapter",
}
POWER_MODES = {"0": "automatic", "1": "low", "2": "high"}

# Levels of thermal pressure: nominal, moderate, heavy, trapping and sleeping (``OSThermalNotification.h``). One report
# describes a fanless Mac that throttles at the nominal level (angristan/MacThrottle#19).
THERMAL_STATES = {"0": "nominal", "1": "moderate", **dict.fromkeys("234", "limited")}


# Field of :class:`SystemStatus`, command, pattern and states. The only group of the pattern matches a key of the states. If
# several patterns of a field match, the last state is used.
MAC_READINGS = (
    ("memory_pressure", "memory", r"^kern\.memorystatus_vm_pressure_level: (\d+)$", PRESSURE_LEVELS),
    ("power_source", "battery", rf"^(?:Now drawing from ')?({'|'.join(SOURCES)})", SOURCES),
    # macOS renamed the setting from lowpowermode to powermode. Only powermode has a third value.
    ("power_mode", "power", r"^\s*lowpowermode\s+(\d+)\s*$", POWER_MODES),
    ("power_mode", "power", r"^\s*powermode\s+(\d+)\s*$", POWER_MODES),
    (
        "thermal_state",
        "thermal state",
        r"^com\.apple\.system\.thermalpressurelevel[ \t]+(\d+)[ \t]*$",
        THERMAL_STATES,
    ),
)


def _first_group(pattern: str, text: str | None) -> str | None:
    """Return the text of the only group of a pattern at its first match in any line, or ``None`` without a match."""
    match = re.search(pattern, text or "", re.ASCII | re.MULTILINE)
    return match[1] if match else None


def _parse_integer(text: str | None, max_number: int) -> int | None:
    """Return the number in a text, or ``None`` if the text is not a number or the number is too large."""
    if text is None or not re.fullmatch(r"\d{1,15}", text, re.ASCII):
        return None
    return int(text) if int(text) <= max_number else None


def _parse_ioreg(output: str | None) -> GpuStatus:
    """Return the status of the Apple GPU for all processes, from the output of ``ioreg``. Ignore other accelerators."""
    entries = re.split(r"^(?=\+-o )", output or "", flags=re.MULTILINE)
    entry = next((entry for entry in entries if entry.startswith("+-o AGX")), "")
    statistics = _first_group(r'"PerformanceStatistics"\s*=\s*\{([^}]*)\}', entry)
    utilization = _first_group(r'"Device Utilization %"=(\d+)', statistics) or _first_group(
        r'"Renderer Utilization %"=(\d+)', statistics
    )
    return GpuStatus(
        name=_first_group(r'"model"\s*=\s*"([^"\n]+)"', entry),
        utilization=_parse_integer(utilization, 100),
        memory_used=_parse_integer(_first_group(r'"In use system memory"=(\d+)', statistics), MAX_BYTES),
    )


def _read_nvidia(device: str, run: RunCommand) -> GpuStatus:
    """Return the status of a CUDA GPU. Its number in ``nvidia-smi`` can differ from that in torch, its UUID cannot."""
    uuid = get_device(device).uuid()
    if uuid is None:
        return GpuStatus()
    query = ["--query-gpu=utilization.gpu,memory.used,name", "--format=csv,noheader,nounits"]
    output = run(["nvidia-smi", f"--id=GPU-{uuid.removeprefix('GPU-')}", *query])
    cells = [cell.strip() for cell in (output or "").split(",", 2)]
    mebibytes = _parse_integer(cells[1], MAX_BYTES >> 20) if len(cells) == 3 else None  # noqa: PLR2004 - of the query
    if mebibytes is None:
        return GpuStatus()
    return GpuStatus(cells[2], _parse_integer(cells[0], 100), mebibytes << 20)


# Returns the utilization of a device in [0, 1], at present or since the previous call, or ``None`` if it is unreadable.
UtilizationReader = Callable[[], "float | None"]

IDLE_STATES = ("idle", "iowait")
# Linux includes these times in ``user`` and ``nice`` (proc(5)).
GUESTS = ("guest", "guest_nice")


def make_utilization_reader(
    device: str, machine: MachineInfo, run: RunCommand = run_command
) -> UtilizationReader | None:
    """Return a reader of the utilization of a device, or ``None`` under simulation or if the utilization is unreadable.

    Args:
        device: Name of the device in torch.
        machine: Machine of the device.
        run: Runs a command.
    """
    if machine.simulated or is_mps_simulated():
        return None
    target = get_device(device)
    if not target.is_accelerator:
        return _CpuReader() if _cpu_times() else None

    def read() -> float | None:
        gpu = GpuStatus()
        if target.sensor == "ioreg":
            gpu = _parse_ioreg(run(MAC_COMMANDS["ioreg"]))
        elif target.sensor == "nvidia-smi":
            gpu = _read_nvidia(device, run)
        return None if gpu.utilization is None else gpu.utilization / 100

    return None if read() is None else read


class _CpuReader:
    """Reader of the mean utilization of all processor cores since its previous call, in any thread.

    ``psutil.cpu_percent`` and ``psutil.cpu_times_percent`` are not used. They keep the counters of the previous call for each
    thread, and return 0 if the counters did not change between two calls.
    """

    def __init__(self) -> None:
        self._before = _cpu_times()

    def __call__(self) -> float | None:
        before = self._before
        self._before = _cpu_times()
        return busy_fraction(before, self._before)


class BackgroundLoadReader:
    """Reader of the fraction of all processor cores that other processes have used since its creation, in any thread.

    Processes that this process starts later are not other processes, nor are those with the ids in ``own``. A pool that an
    earlier cell has left running is one.
    """

    def __init__(self, own: Collection[int] = ()) -> None:
        self._before = _cpu_times()
        self._own_seconds, children = _started_cpu_seconds()
        self._earlier = {process: seconds for process, seconds in children.items() if process.pid not in own}

    def __call__(self) -> float | None:
        """Return the fraction in [0, 1], or ``None`` if it is unknown."""
        own_seconds, children = _started_cpu_seconds()
        # An earlier process that has ended is ignored: its time since then cannot be read.
        own_seconds -= sum(children[process] - self._earlier[process] for process in self._earlier.keys() & children)
        return busy_fraction(self._before, _cpu_times(), own_seconds - self._own_seconds)


LOAD_SECONDS = 0.4  # Duration of a sample of the load.


def sample_background_load(own: Collection[int] = ()) -> float | None:
    """Return the fraction of all processor cores that other processes use now, in [0, 1], or ``None`` if it is unknown."""
    read_load = BackgroundLoadReader(own)
    time.sleep(LOAD_SECONDS)
    return read_load()


def _started_cpu_seconds() -> tuple[float, dict[Any, float]]:
    """Return the processor time of this process and all that it has started, and that of each without its ended children.

    A fork server runs before the measurement, and its workers end during it.
    """
    psutil = import_psutil()
    total = sum(os.times()[:4])
    children = {}
    for process in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.Error):
            times = process.cpu_times()
            total += sum(times[:4])
            children[process] = sum(times[:2])
    return total, children


def _cpu_times() -> dict[str, float]:
    """Return the seconds that all cores spent in each state, or an empty mapping if they are unreadable."""
    psutil = import_psutil()
    try:
        return dict(psutil.cpu_times()._asdict())
    except (OSError, RuntimeError, psutil.Error):  # A container can hide the file.
        return {}


def busy_fraction(before: Mapping[str, float], after: Mapping[str, float], own_seconds: float = 0.0) -> float | None:
    """Return the busy fraction of the processor time between two readings, or ``None`` if no time passed.

    The processor time of this process in between, ``own_seconds``, is not counted.
    """
    spent = {name: max(0.0, after[name] - before.get(name, 0.0)) for name in after if name not in GUESTS}
    total = sum(spent.values())
    idle_seconds = sum(spent.get(name, 0.0) for name in IDLE_STATES)
    return max(0.0, 1 - (idle_seconds + own_seconds) / total) if total and before else None
