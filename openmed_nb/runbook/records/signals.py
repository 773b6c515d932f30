"""``nb.system_status``: snapshot of the GPU, memory, power and thermal state of this machine, and device utilization.

The values come from commands of macOS and of the NVIDIA driver. Each command has a pure parser, and no command needs
administrator rights. The commands of macOS have full paths, because a kernel that was started from the Dock has a short
``PATH``. Values that are unreadable or out of range are ``None``. The parsers follow recorded outputs in
``tests/recorded/signals``.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

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
from ...devices.machine import MachineInfo, RunCommand, import_psutil, is_mps_simulated, run_command
from ...devices.registry import get_device
from ...errors import OpenMedError
from ...session import SESSION
from ...training.curve import PRESSURE_LEVELS

NOTHING_REPORTED = "nothing reported"
THROTTLING_STATES = {True: "limited", False: "nominal", None: None}
POWER_SOURCES: Mapping[bool | None, Literal["adapter", "battery"] | None] = {
    True: "adapter",
    False: "battery",
    None: None,
}


@dataclass(frozen=True)
class GpuStatus:
    """Status of one GPU. A value that cannot be read is ``None``, never a guess.

    Attributes:
        name: Name of the GPU, such as ``"Apple M4"``.
        cores: Number of cores. Only Apple GPUs report it.
        utilization: Recent utilization by all processes, in percent.
        memory_used: Memory used by all processes, in bytes.
        memory_total: Dedicated memory in bytes. Apple GPUs share the memory of the machine and have none.
        temperature: Temperature in degrees Celsius. Only NVIDIA GPUs report it.
        power: Power draw in watts. Only NVIDIA GPUs report it.
        thermal_throttling: Whether the GPU reduces its clock rate because of its temperature.
        uuid: UUID of the GPU, as reported by the NVIDIA driver.
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
    """Snapshot of the status of this machine. A value that cannot be read is ``None``, never a guess.

    Attributes:
        gpu: Status of the GPU.
        memory_pressure: ``"normal"``, ``"warning"`` or ``"critical"``. Only macOS reports it.
        memory_free: Free memory in percent, as counted by macOS.
        memory_available: Memory that is available to processes, in bytes.
        swap_used: Used swap space in bytes. macOS does not clear it after use, so only its growth is meaningful.
        power_source: ``"adapter"``, ``"battery"`` or ``"UPS"``.
        battery: Charge of the battery in percent.
        power_mode: ``"automatic"``, ``"low"`` (Low Power Mode) or ``"high"``.
        thermal_state: ``"limited"`` for a limited processor speed or heavy thermal pressure. ``"moderate"`` for moderate
            thermal pressure. ``"nominal"`` if the system reports no thermal pressure. ``"nothing reported"`` if the
            system has no record of it.
        cpu_speed_limit: Limit of the processor speed in percent.
        chip: Name of the processor.
        performance_cores: Number of performance cores.
        efficiency_cores: Number of efficiency cores.
        simulated: Whether the machine is a simulated Mac, whose values cannot be read.

    Example:
        >>> print(SystemStatus(memory_pressure="normal", power_source="battery"))
        System status
          condition        state
          memory pressure  normal
          power            battery
          power mode       not known
          thermal state    not known
    """

    gpu: GpuStatus = field(default_factory=GpuStatus)
    memory_pressure: Literal["normal", "warning", "critical"] | None = None
    memory_free: int | None = None
    memory_available: int | None = None
    swap_used: int | None = None
    power_source: Literal["adapter", "battery", "UPS"] | None = None
    battery: int | None = None
    power_mode: Literal["automatic", "low", "high"] | None = None
    thermal_state: Literal["limited", "moderate", "nominal", "nothing reported"] | None = None
    cpu_speed_limit: int | None = None
    chip: str | None = None
    performance_cores: int | None = None
    efficiency_cores: int | None = None
    simulated: bool = False

    def findings(self) -> tuple[Finding, ...]:
        """Return one finding for each condition that can reduce performance, without measurements."""
        return tuple(condition.finding(self) for condition in CONDITIONS)

    def to_report(self) -> Report:
        """Return the states and the hardware. Only the HTML form contains the measurements."""
        states = tuple((condition.name, condition.get_state(self) or UNKNOWN) for condition in CONDITIONS)
        gpu = self.gpu
        hardware = (
            ("processor", self.chip or ""),
            ("performance cores", _format_reading(self.performance_cores)),
            ("efficiency cores", _format_reading(self.efficiency_cores)),
            ("GPU", gpu.name or ""),
            ("GPU cores", _format_reading(gpu.cores)),
            ("GPU memory", format_bytes(gpu.memory_total)),
        )
        readings = (
            ("GPU utilization", _format_reading(gpu.utilization, "%")),
            ("GPU memory in use", format_bytes(gpu.memory_used)),
            ("GPU temperature", _format_reading(gpu.temperature, " °C")),
            ("GPU power", "" if gpu.power is None else f"{gpu.power:.1f} W"),
            ("free memory", _format_reading(self.memory_free, "%")),
            ("available memory", format_bytes(self.memory_available)),
            ("swap in use", format_bytes(self.swap_used)),
            ("battery", _format_reading(self.battery, "%")),
            ("processor speed limit", _format_reading(self.cpu_speed_limit, "%")),
        )
        findings = self.findings()
        warnings = tuple(
            f"{finding.name.capitalize()}: {finding.evidence.partition(': ')[2]}. {finding.remedy}"
            for finding in findings
            if finding.status == WARNING
        )
        summary = "performance may be reduced" if warnings else "no known cause of reduced performance"
        # Only macOS reports memory pressure.
        hint = () if self.memory_pressure else ("On a Mac, nb.system_status() reads the missing values.",)
        return Report(
            "System status",
            html_sentences=(f"System status: {summary}", *warnings, *hint),
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

    def get_state(self, status: SystemStatus) -> str | None:
        """Return the state, or ``None`` if it is unknown. The thermal state is the worse one of system and GPU."""
        state: str | None = getattr(status, self.field)
        if self.field == "thermal_state":
            return _worst_thermal_state(state, THROTTLING_STATES[status.gpu.thermal_throttling])
        return state

    def finding(self, status: SystemStatus) -> Finding:
        state = self.get_state(status)
        if state in {None, NOTHING_REPORTED}:
            return Finding(self.name, NOT_APPLICABLE, state or UNKNOWN)
        if state in self.messages:
            return Finding(self.name, WARNING, f"{state}: {self.messages[state]}", self.remedy)
        return Finding(self.name, OK, state)


def _worst_thermal_state(*states: str | None) -> str | None:
    return next((state for state in ("limited", "moderate", "nominal", NOTHING_REPORTED) if state in states), None)


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


def _format_reading(value: float | None, unit: str = "") -> str:
    """Return a number with its unit, or an empty string for ``None``."""
    return "" if value is None else f"{value:.0f}{unit}"


def system_status() -> SystemStatus:
    """Read the GPU, memory, swap, power and thermal state of this machine, without administrator rights.

    The values come from system commands on macOS (``ioreg``, ``sysctl``, ``memory_pressure``, ``pmset``), from
    ``nvidia-smi`` on CUDA, and from psutil. Each command may take up to two seconds, and torch is not imported. GPU
    values cover all processes. On a simulated MPS device, no value is read.

    Returns:
        The current status. A value that cannot be read is ``None`` and displayed as "not known", never a guess. ``gpu``
        is the GPU of the active device. The text form contains the states only; the HTML form also contains the
        measurements.

    Example:
        >>> system_status().memory_available > 0
        True
    """
    with SESSION.lock:
        choice = SESSION.choice_or_error(confirm=False)
        device = "cpu" if isinstance(choice, OpenMedError) else choice.device
        manager = SESSION.device_manager
        uuid = get_device(device).uuid()
        return read_system_status(manager.machine, device, manager.run, manager.environ, uuid)


def read_system_status(
    machine: MachineInfo,
    device: str,
    run: RunCommand = run_command,
    environ: Mapping[str, str] = os.environ,
    uuid: str | None = None,
) -> SystemStatus:
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

    charge = query("sensors_battery", "percent")
    status = SystemStatus(
        memory_available=query("virtual_memory", "available"),
        swap_used=query("swap_memory", "used"),
        power_source=POWER_SOURCES[query("sensors_battery", "power_plugged")],
        battery=round(charge) if charge is not None and 0 <= charge <= 100 else None,  # noqa: PLR2004 - percent
        chip=machine.chip,
    )
    if machine.system == "Darwin":
        status = replace(status, **_read_mac(run))
    if get_device(device).sensor == "nvidia-smi":
        status = replace(status, gpu=_read_nvidia(device, run, environ, uuid))
    return status


# Commands of macOS. Each runs once per snapshot.
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
    "thermal state": ["/usr/bin/pmset", "-g", "therm"],
    "thermal pressure": ["/usr/bin/notifyutil", "-g", "com.apple.system.thermalpressurelevel"],
}

MAX_CORES = 4096
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


@dataclass(frozen=True)
class _Reading:
    """Value in the output of a command of macOS.

    Attributes:
        field: Field of :class:`SystemStatus` that the value belongs to.
        command: Key of the command in ``MAC_COMMANDS``.
        pattern: Regular expression whose only group matches the value.
        max_number: Largest valid number.
        words: State for each matched text. If ``None``, the value is a number.
    """

    field: str
    command: str
    pattern: str
    max_number: int = 100
    words: Mapping[str, str] | None = None


# If several readings of one field have a value, the last value is used.
MAC_READINGS = (
    _Reading("memory_pressure", "sysctl", r"^kern\.memorystatus_vm_pressure_level: (\d+)$", words=PRESSURE_LEVELS),
    _Reading("performance_cores", "sysctl", r"^hw\.perflevel0\.physicalcpu: ([1-9]\d*)$", MAX_CORES),
    _Reading("efficiency_cores", "sysctl", r"^hw\.perflevel1\.physicalcpu: ([1-9]\d*)$", MAX_CORES),
    _Reading("memory_free", "memory", r"free percentage:\s*(\d+)%"),
    _Reading("power_source", "battery", rf"^(?:Now drawing from ')?({'|'.join(SOURCES)})", words=SOURCES),
    _Reading("battery", "battery", r"-InternalBattery-\d+[^\n]*?\s(\d+)%;"),
    # macOS renamed the setting from lowpowermode to powermode. Only powermode has a third value.
    _Reading("power_mode", "power", r"^\s*lowpowermode\s+(\d+)\s*$", words=POWER_MODES),
    _Reading("power_mode", "power", r"^\s*powermode\s+(\d+)\s*$", words=POWER_MODES),
    _Reading("cpu_speed_limit", "thermal state", r"\bCPU_Speed_Limit\s*=\s*(\d+)"),
    _Reading(
        "thermal_state",
        "thermal pressure",
        r"^com\.apple\.system\.thermalpressurelevel[ \t]+(\d+)[ \t]*$",
        words=THERMAL_STATES,
    ),
)

NO_REPORTS = ("No thermal warning level has been recorded", "No performance warning level has been recorded")


def _first_group(pattern: str, text: str | None) -> str | None:
    """Return the text of the only group of a pattern at its first match in any line, or ``None`` without a match."""
    match = re.search(pattern, text or "", re.ASCII | re.MULTILINE)
    return match[1] if match else None


def _parse_number(text: str | None, max_number: int) -> float | None:
    """Return the number in a text, or ``None`` if the text is not a number or the number is too large."""
    if text is None or not re.fullmatch(r"\d{1,15}(\.\d{1,9})?", text, re.ASCII):
        return None
    number = float(text)
    return number if number <= max_number else None


def _parse_integer(text: str | None, max_number: int) -> int | None:
    """Return the number in a text, rounded, or ``None`` as in :func:`_parse_number`."""
    number = _parse_number(text, max_number)
    return None if number is None else round(number)


def _read_mac(run: RunCommand) -> dict[str, Any]:
    """Return the known values of the commands of macOS by field of :class:`SystemStatus`."""
    outputs = {name: run(command) for name, command in MAC_COMMANDS.items()}
    values: dict[str, Any] = {}
    for reading in MAC_READINGS:
        text = _first_group(reading.pattern, outputs[reading.command])
        value = _parse_integer(text, reading.max_number) if reading.words is None else reading.words.get(text or "")
        if value is not None:
            values[reading.field] = value
    # Apple Silicon reports no speed limit even while it throttles (exelban/stats#749, macmade/Hot#80). A missing limit is
    # therefore "nothing reported", not "nominal".
    limit = values.get("cpu_speed_limit")
    limit_state = None
    if limit is not None:
        limit_state = "limited" if limit < 100 else "nominal"  # noqa: PLR2004 - percent
    elif all(note in (outputs["thermal state"] or "") for note in NO_REPORTS):
        limit_state = NOTHING_REPORTED
    values["thermal_state"] = _worst_thermal_state(values.get("thermal_state"), limit_state)
    values["gpu"] = _parse_ioreg(outputs["ioreg"])
    return values


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
        cores=_parse_integer(_first_group(r'"gpu-core-count"\s*=\s*([1-9]\d*)', entry), MAX_CORES),
        utilization=_parse_integer(utilization, 100),
        memory_used=_parse_integer(_first_group(r'"In use system memory"=(\d+)', statistics), MAX_BYTES),
    )


# Paths of ``nvidia-smi`` on Linux, in containers, under WSL 2 and on Windows.
NVIDIA_SMI = (
    "/usr/bin/nvidia-smi",
    "/usr/local/nvidia/bin/nvidia-smi",
    "/usr/lib/wsl/lib/nvidia-smi",
    r"C:\Windows\System32\nvidia-smi.exe",
)

# Newer drivers name the last two fields ``clocks_event_reasons`` but still accept these names.
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


def _read_nvidia(device: str, run: RunCommand, environ: Mapping[str, str], uuid: str | None = None) -> GpuStatus:
    """Return the status of the GPU with the given name in torch."""
    listings = (_parse_nvidia_smi(run([path, *QUERY])) for path in NVIDIA_SMI)
    gpus = next((gpus for gpus in listings if gpus), [])
    return _select_gpu(gpus, device, environ, uuid) or GpuStatus()


def _parse_nvidia_smi(output: str | None) -> list[GpuStatus]:
    """Return the status of each GPU in the order of ``nvidia-smi``. Unsupported values are ``None``."""
    gpus = []
    for line in (output or "").splitlines():
        cells = [cell.strip() for cell in line.split(",")]
        if len(cells) != len(NVIDIA_FIELDS):
            continue
        uuid, name, utilization, used, total, temperature, power, *throttling = cells
        used_mebibytes = _parse_integer(used, MAX_MEBIBYTES)
        total_mebibytes = _parse_integer(total, MAX_MEBIBYTES)
        gpu = GpuStatus(
            name=None if name.startswith("[") else name or None,
            utilization=_parse_integer(utilization, 100),
            memory_used=None if used_mebibytes is None else used_mebibytes << 20,
            memory_total=total_mebibytes << 20 if total_mebibytes else None,
            temperature=_parse_integer(temperature, MAX_CELSIUS),
            power=_parse_number(power, MAX_WATTS),
            thermal_throttling="Active" in throttling if {"Active", "Not Active"}.intersection(throttling) else None,
            uuid=None if uuid.startswith("[") else uuid or None,
        )
        gpus.append(gpu)
    return gpus


def _select_gpu(
    gpus: Sequence[GpuStatus], device: str, environ: Mapping[str, str], uuid: str | None
) -> GpuStatus | None:
    """Return the GPU of ``nvidia-smi`` that torch names ``"cuda"`` or ``"cuda:N"``, or ``None`` if the match is ambiguous.

    torch numbers only the GPUs in ``CUDA_VISIBLE_DEVICES``, with the fastest first unless ``CUDA_DEVICE_ORDER`` is
    ``PCI_BUS_ID``. ``nvidia-smi`` numbers all GPUs by their position on the bus (CUDA C++ programming guide, "CUDA
    environment variables"). If the two orders can differ, only the UUID identifies the GPU.
    """
    name = uuid or device.partition(":")[2] or "0"
    if uuid is None and "CUDA_VISIBLE_DEVICES" in environ:
        visible = [entry.strip() for entry in environ["CUDA_VISIBLE_DEVICES"].split(",")]
        valid = all(re.fullmatch(r"\d+|GPU-[0-9a-fA-F-]+", entry, re.ASCII) for entry in visible)
        if not valid or int(name) >= len(visible):
            return None
        name = visible[int(name)]
    if not name.isdecimal():
        prefix = name.removeprefix("GPU-")
        matches = [gpu for gpu in gpus if (gpu.uuid or "").removeprefix("GPU-").startswith(prefix)]
        return matches[0] if len(matches) == 1 else None
    same_order = environ.get("CUDA_DEVICE_ORDER") == "PCI_BUS_ID" or len({gpu.name for gpu in gpus}) == 1
    return gpus[int(name)] if same_order and int(name) < len(gpus) else None


# Returns the utilization of a device in [0, 1], at present or since the previous call, or ``None`` if it is unreadable.
UtilizationReader = Callable[[], "float | None"]

IDLE_STATES = ("idle", "iowait")
# Linux includes these times in ``user`` and ``nice`` (proc(5)).
GUESTS = ("guest", "guest_nice")


def make_utilization_reader(
    device: str,
    machine: MachineInfo,
    run: RunCommand = run_command,
    environ: Mapping[str, str] = os.environ,
    uuid: str | None = None,
) -> UtilizationReader | None:
    """Return a reader of the utilization of a device, or ``None`` under simulation or if the utilization is unreadable.

    Args:
        device: Name of the device in torch.
        machine: Machine of the device.
        run: Runs a command.
        environ: Environment variables, which can renumber CUDA devices.
        uuid: UUID of the CUDA GPU, as reported by torch.
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
            gpu = _read_nvidia(device, run, environ, uuid)
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


def _cpu_times() -> dict[str, float]:
    """Return the seconds that all cores spent in each state, or an empty mapping if they are unreadable."""
    psutil = import_psutil()
    try:
        return dict(psutil.cpu_times()._asdict())
    except (OSError, RuntimeError, psutil.Error):  # A container can hide the file.
        return {}


def busy_fraction(before: Mapping[str, float], after: Mapping[str, float]) -> float | None:
    """Return the busy fraction of the processor time between two readings, or ``None`` if no time passed."""
    spent = {name: max(0.0, after[name] - before.get(name, 0.0)) for name in after if name not in GUESTS}
    total = sum(spent.values())
    return 1 - sum(spent.get(name, 0.0) for name in IDLE_STATES) / total if total and before else None
