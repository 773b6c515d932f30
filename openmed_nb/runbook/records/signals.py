"""``nb.signals``: load, memory, power and heat of the computer at one moment, which of it makes a computer slow, how busy it is.

Commands of macOS and of NVIDIA's driver are asked, each with a pure parser of its own; none needs administrator rights. macOS is
asked by full paths, because a kernel that was started from the Dock has a short ``PATH``. What cannot be read, or cannot be, is
``None``. The keys are those of real outputs; ``tests/recorded/signals`` holds some.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from operator import attrgetter
from typing import Any

from ..._render.display import (
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
from ...devices.machine import MachineInfo, import_psutil, is_mps_simulated, run_command
from ...devices.registry import parse_device_argument
from ...errors import OpenMedError
from ...session import SESSION
from ...training.curve import PRESSURE_LEVELS

NOTHING_REPORTED = "nothing reported"
THROTTLING_STATES = {True: "limited", False: "nominal", None: None}
POWER_SOURCES = {True: "adapter", False: "battery", None: None}


@dataclass(frozen=True)
class GpuStatus:
    """What a GPU says of itself; ``None`` if it cannot be read, never a guess.

    Attributes:
        name: Its name, such as ``"Apple M4"``.
        cores: How many cores it has; only Apple's GPUs say it.
        utilization: How much of the last moment it was busy, in percent, for all processes together.
        memory_used: The memory that it uses, in bytes, for all processes together.
        memory_total: The memory that it has for itself, in bytes; Apple's GPUs share that of the computer.
        temperature: In degrees Celsius.
        power: In watts.
        thermal_throttling: Whether it runs slower than it could because of heat.
        uuid: The UUID by which NVIDIA names this one GPU.
    """

    name: str | None = None
    cores: int | None = None
    utilization: int | None = None
    memory_used: int | None = None
    memory_total: int | None = None
    temperature: int | None = None
    power: float | None = None
    thermal_throttling: bool | None = None
    uuid: str | None = None


@dataclass(frozen=True, repr=False)
class SystemStatus(Displayable):
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
        heat: ``"limited"`` if the system slows its processor down or reports a heavy thermal pressure, ``"moderate"`` for a
            moderate one, ``"nominal"`` if it says that there is none, and ``"nothing reported"`` if it says nothing.
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

    gpu: GpuStatus = field(default_factory=GpuStatus)
    memory_pressure: str | None = None
    memory_free: int | None = None
    memory_available: int | None = None
    swap_used: int | None = None
    power_source: str | None = None
    battery: int | None = None
    power_mode: str | None = None
    thermal_state: str | None = None
    cpu_speed_limit: int | None = None
    chip: str | None = None
    performance_cores: int | None = None
    efficiency_cores: int | None = None
    simulated: bool = False

    def findings(self) -> tuple[Finding, ...]:
        """Return what of it makes a computer slow, in words without figures."""
        return tuple(condition.finding(self) for condition in CONDITIONS)

    def to_report(self) -> Report:
        """Return the states in words and the hardware; the figures stand in the HTML."""
        states = tuple((condition.name, condition.state_of(self) or UNKNOWN) for condition in CONDITIONS)
        parts = tuple((row.name, shown) for row in HARDWARE if (shown := row.shown(self)))
        figures = tuple((row.name, row.shown(self) or UNKNOWN) for row in METRICS)
        findings = self.findings()
        slow = tuple(
            f"{finding.name.capitalize()}: {finding.evidence.partition(': ')[2]}. {finding.remedy}"
            for finding in findings
            if finding.status == WARNING
        )
        said = "this computer may be slow now" if slow else "nothing is known to slow this computer down"
        # Where macOS does not say it, nothing does.
        elsewhere = () if self.memory_pressure else ("On a Mac, nb.signals() reads what is not known here.",)
        return Report(
            "Signals",
            html_sentences=(f"Signals: {said}", *slow, *elsewhere),
            status=worst_status(findings),
            tables=(Table("", ("signal", "state"), states), Table("Hardware", ("part", "what it is"), parts)),
            metrics=(Table("Figures of this moment", ("signal", "figure"), figures),),
        )


@dataclass(frozen=True)
class Condition:
    """One state that can make a computer slow."""

    name: str  # What it is.
    field: str  # The field of ``Signals`` that has it.
    messages: dict[str, str]  # What to know of each state that is slow.
    remedy: str  # One thing to do then.

    def state_of(self, signals: SystemStatus) -> str | None:
        """Return the state in one word, ``None`` if it is not known; of heat the worst that the system and its GPU report."""
        state: str | None = getattr(signals, self.field)
        return _worst_heat(state, THROTTLING_STATES[signals.gpu.thermal_throttling]) if self.field == "heat" else state

    def finding(self, signals: SystemStatus) -> Finding:
        state = self.state_of(signals)
        if state in {None, NOTHING_REPORTED}:
            return Finding(self.name, NOT_APPLICABLE, state or UNKNOWN)
        if state in self.messages:
            return Finding(self.name, WARNING, f"{state}: {self.messages[state]}", self.remedy)
        return Finding(self.name, OK, state)


def _worst_heat(*states: str | None) -> str | None:
    return next((state for state in ("limited", "moderate", "nominal", NOTHING_REPORTED) if state in states), None)


# The states that make a computer slow.
CONDITIONS = (
    Condition(
        "memory pressure",
        "memory_pressure",
        {
            "warning": "macOS compresses memory, which makes everything slower",
            "critical": "macOS moves memory to the disk, which makes everything much slower",
        },
        "Close other programs, or use a smaller batch.",
    ),
    Condition(
        "power",
        "power_source",
        {
            "battery": "the processor may run slower than on the power adapter",
            "UPS": "the mains have failed, and the computer may shut down",
        },
        "Connect it to mains power before times are measured.",
    ),
    Condition(
        "power mode",
        "power_mode",
        {"low": "Low Power Mode slows processor and GPU down"},
        "Switch Low Power Mode off: System Settings, Battery.",
    ),
    Condition(
        "heat",
        "heat",
        {
            "moderate": "the computer is warm, and the system may slow itself down",
            "limited": "the system slows itself down because it is hot",
        },
        "Let the computer cool down, and give it air.",
    ),
)


@dataclass(frozen=True)
class _Row:
    """A row of the report: a field, or one of its GPU, with its unit."""

    name: str
    field: str
    unit: str = ""

    def shown(self, signals: SystemStatus) -> str:
        value = attrgetter(self.field)(signals)
        if self.unit == BYTES:
            return format_bytes(value)
        if isinstance(value, str):
            return value
        return "" if value is None else f"{value:.0f}{self.unit}"


BYTES = "bytes"

HARDWARE = (
    _Row("processor", "chip"),
    _Row("performance cores", "performance_cores"),
    _Row("efficiency cores", "efficiency_cores"),
    _Row("GPU", "gpu.name"),
    _Row("GPU cores", "gpu.cores"),
    _Row("GPU memory", "gpu.memory_total", BYTES),
)
METRICS = (
    _Row("GPU utilization", "gpu.utilization", " %"),
    _Row("GPU memory in use", "gpu.memory_used", BYTES),
    _Row("GPU temperature", "gpu.temperature", " °C"),
    _Row("GPU power", "gpu.power", " W"),
    _Row("free memory", "memory_free", " %"),
    _Row("available memory", "memory_available", BYTES),
    _Row("swap in use", "swap_used", BYTES),
    _Row("battery", "battery", " %"),
    _Row("processor speed limit", "speed_limit", " %"),
)


# Runs a command and returns what it prints, ``None`` if it cannot be run.
Run = Callable[[list[str]], "str | None"]


def system_status() -> SystemStatus:
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
        return read_signals(SESSION.device_manager.machine, device, uuid=parse_device_argument(device).uuid())


def read_signals(
    machine: MachineInfo,
    device: str,
    run: Run = run_command,
    environ: Mapping[str, str] = os.environ,
    uuid: str | None = None,
) -> SystemStatus:
    """Read the signals of a computer, with the GPU of a device; what cannot be read is ``None``, as all of a simulated one."""
    if machine.simulated:
        return SystemStatus(simulated=True)
    read = _read_system()
    if machine.system == "Darwin":
        read |= {name: value for name, value in _read_mac(run).items() if value is not None}
    if parse_device_argument(device).sensor == "nvidia-smi":
        read["gpu"] = _read_nvidia(device, run, environ, uuid)
    return SystemStatus(chip=machine.chip, **read)


def _read_system() -> dict[str, Any]:
    """Return what psutil says on every system, by the names of the fields of ``Signals``."""
    psutil = import_psutil()

    def answer_to(question: str) -> Any:
        try:
            return getattr(psutil, question)()
        except (OSError, RuntimeError, AttributeError, psutil.Error):  # Containers hide files, some have no battery.
            return None

    battery = answer_to("sensors_battery")
    charge = getattr(battery, "percent", None)
    return {
        "memory_available": getattr(answer_to("virtual_memory"), "available", None),
        "swap_used": getattr(answer_to("swap_memory"), "used", None),
        "power_source": POWER_SOURCES[getattr(battery, "power_plugged", None)],
        "battery": round(charge) if charge is not None and 0 <= charge <= 100 else None,  # noqa: PLR2004 - percent
    }


# What macOS is asked; each is run once.
MAC_COMMANDS = {
    "ioreg": ["/usr/sbin/ioreg", "-r", "-d", "1", "-w", "0", "-c", "IOAccelerator"],
    "sysctl": [
        "/usr/sbin/sysctl",
        "-i",
        "kern.memorystatus_vm_pressure_level",
        "hw.perflevel0.physicalcpu",
        "hw.perflevel1.physicalcpu",
    ],
    "memory": ["/usr/bin/memory_pressure", "-Q"],
    "battery": ["/usr/bin/pmset", "-g", "batt"],
    "power": ["/usr/bin/pmset", "-g"],
    "heat": ["/usr/bin/pmset", "-g", "therm"],
    "thermal pressure": ["/usr/bin/notifyutil", "-g", "com.apple.system.thermalpressurelevel"],
}

MAX_CORES = 4096
MAX_BYTES = 1 << 50  # A petabyte; a larger size was misread.
SOURCES = {
    "AC Power": "adapter",
    "Battery Power": "battery",
    "UPS Power": "UPS",
    "No batteries available": "adapter",
}
POWER_MODES = {"0": "automatic", "1": "low", "2": "high"}

# What the levels of thermal pressure mean: nominal, moderate, heavy, trapping and sleeping (``OSThermalNotification.h``). A Mac
# without a fan was seen to slow down at the nominal one (angristan/MacThrottle#19).
PRESSURES = {"0": "nominal", "1": "moderate", **dict.fromkeys("234", "limited")}


@dataclass(frozen=True)
class _Reading:
    """A field of ``Signals`` in what a command of macOS prints: the one group of a pattern, as a number or as its word."""

    field: str
    command: str
    pattern: str
    max_number: int = 100
    words: Mapping[str, str] | None = None

    def value_in(self, outputs: Mapping[str, str | None]) -> Any:
        text = _group_in(self.pattern, outputs[self.command])
        return _number(text, self.max_number) if self.words is None else self.words.get(text or "")


# Of two readings of one field, the later one that is known counts.
MAC_READINGS = (
    _Reading("memory_pressure", "sysctl", r"^kern\.memorystatus_vm_pressure_level: (\d+)$", words=PRESSURE_LEVELS),
    _Reading("performance_cores", "sysctl", r"^hw\.perflevel0\.physicalcpu: ([1-9]\d*)$", MAX_CORES),
    _Reading("efficiency_cores", "sysctl", r"^hw\.perflevel1\.physicalcpu: ([1-9]\d*)$", MAX_CORES),
    _Reading("memory_free", "memory", r"free percentage:\s*(\d+)%"),
    _Reading("power_source", "battery", rf"^(?:Now drawing from ')?({'|'.join(SOURCES)})", words=SOURCES),
    _Reading("battery", "battery", r"-InternalBattery-\d+[^\n]*?\s(\d+)%;"),
    # macOS has renamed the setting; only the new name, the second, has a third value.
    _Reading("power_mode", "power", r"^\s*lowpowermode\s+(\d+)\s*$", words=POWER_MODES),
    _Reading("power_mode", "power", r"^\s*powermode\s+(\d+)\s*$", words=POWER_MODES),
    _Reading("speed_limit", "heat", r"\bCPU_Speed_Limit\s*=\s*(\d+)"),
    _Reading(
        "heat", "thermal pressure", r"^com\.apple\.system\.thermalpressurelevel[ \t]+(\d+)[ \t]*$", words=PRESSURES
    ),
)

NO_REPORTS = ("No thermal warning level has been recorded", "No performance warning level has been recorded")


def _group_in(pattern: str, text: str | None) -> str | None:
    """Return what the one group of a pattern matches in a text, in any of its lines."""
    match = re.search(pattern, text or "", re.ASCII | re.MULTILINE)
    return match[1] if match else None


def _number(text: str | None, max_number: int) -> Any:
    """Return the number that a text is, ``None`` for anything else, and for one that is too large."""
    if text is None or not re.fullmatch(r"\d{1,15}(\.\d{1,9})?", text, re.ASCII):
        return None
    number = float(text) if "." in text else int(text)
    return number if number <= max_number else None


def _read_mac(run: Run) -> dict[str, Any]:
    """Return what macOS says, by the names of the fields of ``Signals``."""
    outputs = {name: run(command) for name, command in MAC_COMMANDS.items()}
    read: dict[str, Any] = {}
    for reading in MAC_READINGS:
        value = reading.value_in(outputs)
        if value is not None:
            read[reading.field] = value
    read["heat"] = _worst_heat(read.get("heat"), _heat_of_limit(read.get("speed_limit"), outputs["heat"] or ""))
    read["gpu"] = _apple_gpu(outputs["ioreg"])
    return read


def _heat_of_limit(limit: int | None, output: str) -> str | None:
    """Return whether the system slows the processor down, from ``pmset -g therm``.

    Apple Silicon reports no limit although it slows down (exelban/stats#749, macmade/Hot#80), so that no report says nothing.
    """
    if limit is not None:
        return "limited" if limit < 100 else "nominal"  # noqa: PLR2004 - percent
    return NOTHING_REPORTED if all(note in output for note in NO_REPORTS) else None


def _apple_gpu(output: str | None) -> GpuStatus:
    """Return what the Apple GPU says of itself, of the whole system and of one moment; other accelerators are left out."""
    entries = re.split(r"^(?=\+-o )", output or "", flags=re.MULTILINE)
    entry = next((entry for entry in entries if entry.startswith("+-o AGX")), "")
    statistics = _group_in(r'"PerformanceStatistics"\s*=\s*\{([^}]*)\}', entry)
    busy = _group_in(r'"Device Utilization %"=(\d+)', statistics) or _group_in(
        r'"Renderer Utilization %"=(\d+)', statistics
    )
    return GpuStatus(
        name=_group_in(r'"model"\s*=\s*"([^"\n]+)"', entry),
        cores=_number(_group_in(r'"gpu-core-count"\s*=\s*([1-9]\d*)', entry), MAX_CORES),
        utilization=_number(busy, 100),
        memory_used=_number(_group_in(r'"In use system memory"=(\d+)', statistics), MAX_BYTES),
    )


# Where the driver puts ``nvidia-smi``: on Linux, in containers, under WSL 2 and on Windows.
NVIDIA_SMI = (
    "/usr/bin/nvidia-smi",
    "/usr/local/nvidia/bin/nvidia-smi",
    "/usr/lib/wsl/lib/nvidia-smi",
    r"C:\Windows\System32\nvidia-smi.exe",
)

# What it is asked; newer drivers call the last two ``clocks_event_reasons`` and still know them by these names.
NVIDIA_FIELDS = (
    "uuid",
    "name",
    "utilization.gpu",
    "memory.used",
    "memory.total",
    "temperature.gpu",
    "power.draw",
    "clocks_throttle_reasons.sw_thermal_slowdown",
    "clocks_throttle_reasons.hw_thermal_slowdown",
)
QUERY = [f"--query-gpu={','.join(NVIDIA_FIELDS)}", "--format=csv,noheader,nounits"]

MAX_MEBIBYTES = 1 << 24
MAX_CELSIUS = 150
MAX_WATTS = 10_000


def _read_nvidia(device: str, run: Run, environ: Mapping[str, str], uuid: str | None = None) -> GpuStatus:
    """Return what the GPU says that torch calls by this name."""
    answers = (_nvidia_gpus(run([path, *QUERY])) for path in NVIDIA_SMI)
    gpus = next((gpus for gpus in answers if gpus), [])
    return _select_gpu(gpus, device, environ, uuid) or GpuStatus()


def _nvidia_gpus(output: str | None) -> list[GpuStatus]:
    """Return what each GPU says, in the order of ``nvidia-smi``; what it does not support is ``None``."""
    gpus = []
    for line in (output or "").splitlines():
        cells = [cell.strip() for cell in line.split(",")]
        if len(cells) != len(NVIDIA_FIELDS):
            continue
        uuid, name, busy, used, total, temperature, power, *slowed = cells
        used_mebibytes = _number(used, MAX_MEBIBYTES)
        total_mebibytes = _number(total, MAX_MEBIBYTES)
        gpu = GpuStatus(
            name=None if name.startswith("[") else name or None,
            utilization=_number(busy, 100),
            memory_used=None if used_mebibytes is None else round(used_mebibytes) << 20,
            memory_total=round(total_mebibytes or 0) << 20 or None,
            temperature=_number(temperature, MAX_CELSIUS),
            power=_number(power, MAX_WATTS),
            thermal_throttling="Active" in slowed if {"Active", "Not Active"}.intersection(slowed) else None,
            uuid=None if uuid.startswith("[") else uuid or None,
        )
        gpus.append(gpu)
    return gpus


def _select_gpu(
    gpus: Sequence[GpuStatus], device: str, environ: Mapping[str, str], uuid: str | None
) -> GpuStatus | None:
    """Return the GPU of ``nvidia-smi`` that torch calls ``"cuda"`` or ``"cuda:N"``, ``None`` if that is not certain.

    torch numbers the GPUs that ``CUDA_VISIBLE_DEVICES`` leaves, the fastest first unless ``CUDA_DEVICE_ORDER`` is
    ``PCI_BUS_ID``, and ``nvidia-smi`` all of them by their place on the bus (CUDA C++ programming guide, "CUDA
    environment variables"). If the two can differ, only the UUID that torch names tells.
    """
    name = uuid or device.partition(":")[2] or "0"
    if uuid is None and "CUDA_VISIBLE_DEVICES" in environ:
        visible = [visible.strip() for visible in environ["CUDA_VISIBLE_DEVICES"].split(",")]
        valid = all(re.fullmatch(r"\d+|GPU-[0-9a-fA-F-]+", name, re.ASCII) for name in visible)
        if not valid or int(name) >= len(visible):
            return None
        name = visible[int(name)]
    if not name.isdecimal():
        start = name.removeprefix("GPU-")
        named = [gpu for gpu in gpus if (gpu.uuid or "").removeprefix("GPU-").startswith(start)]
        return named[0] if len(named) == 1 else None
    same_order = environ.get("CUDA_DEVICE_ORDER") == "PCI_BUS_ID" or len({gpu.name for gpu in gpus}) == 1
    return gpus[int(name)] if same_order and int(name) < len(gpus) else None


# Returns how busy a device is just now, as a share from 0 to 1, or since it was last asked; ``None`` if it cannot be read.
UtilizationReader = Callable[[], "float | None"]

IDLE_STATES = ("idle", "iowait")
# Linux counts these in ``user`` and ``nice`` too (proc(5)).
GUESTS = ("guest", "guest_nice")


def make_utilization_reader(
    device: str,
    machine: MachineInfo,
    run: Run = run_command,
    environ: Mapping[str, str] = os.environ,
    uuid: str | None = None,
) -> UtilizationReader | None:
    """Return what reads how busy a device is; ``None`` under a simulation, and if this cannot be read.

    ``environ`` says what CUDA calls its devices, and ``uuid`` how torch names the CUDA GPU.
    """
    if machine.simulated or is_mps_simulated():
        return None
    known = parse_device_argument(device)
    if not known.is_accelerator:
        return _CpuReader() if _cpu_times() else None

    def read() -> float | None:
        gpu = GpuStatus()
        if known.sensor == "ioreg":
            gpu = _apple_gpu(run(MAC_COMMANDS["ioreg"]))
        elif known.sensor == "nvidia-smi":
            gpu = _read_nvidia(device, run, environ, uuid)
        return None if gpu.utilization is None else gpu.utilization / 100

    return None if read() is None else read


class _CpuReader:
    """Reads how busy the processor was since it was last asked, of all cores together.

    ``psutil.cpu_percent`` does the same, but cannot tell an idle processor from a time in which no counter has moved.
    """

    def __init__(self) -> None:
        self._before = _cpu_times()

    def __call__(self) -> float | None:
        before = self._before
        self._before = _cpu_times()
        return busy_fraction(before, self._before)


def _cpu_times() -> dict[str, float]:
    """Return the seconds that the processor has spent in each state, of all cores together; empty if they cannot be read."""
    psutil = import_psutil()
    try:
        return dict(psutil.cpu_times()._asdict())
    except (OSError, RuntimeError, psutil.Error):  # A container can hide the file.
        return {}


def busy_fraction(before: Mapping[str, float], after: Mapping[str, float]) -> float | None:
    """Return which share of the time between two readings of the processor was work, ``None`` if none has passed."""
    spent = {name: max(0.0, after[name] - before.get(name, 0.0)) for name in after if name not in GUESTS}
    total = sum(spent.values())
    return 1 - sum(spent.get(name, 0.0) for name in IDLE_STATES) / total if total and before else None
