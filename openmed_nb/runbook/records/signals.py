"""``nb.system_status``: snapshot of the GPU, memory, power and thermal state of this machine, and device utilization.

The values come from commands of macOS and of the NVIDIA driver. Each command has a pure parser, and no command needs
administrator rights. The commands of macOS have full paths, because a kernel that was started from the Dock has a short
``PATH``. Values that are unreadable or out of range are ``None``. The parsers follow recorded outputs in
``tests/recorded/signals``.
"""

from __future__ import annotations

import os
import re
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Literal, TypeAlias

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
from .macmon import MAX_CELSIUS, MAX_WATTS, NOT_INSTALLED, REMEDIES, MacmonState, find_macmon, read_macmon

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
        temperature: Temperature in degrees Celsius. Apple GPUs report it through ``macmon``.
        power: Power draw in watts. Apple GPUs report it through ``macmon``.
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
        cpu_power: Power draw of the processor in watts. This and the next four values need ``macmon`` on a Mac.
        neural_engine_power: Power draw of the Neural Engine in watts.
        system_power: Power draw of the whole Mac in watts.
        cpu_temperature: Mean temperature of the processor in degrees Celsius.
        macmon: ``"read"`` if ``macmon`` returned values, otherwise why not: ``"not installed"``, ``"no valid output"`` or
            ``"no sensors"``. ``None`` if it was not needed.
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
    cpu_power: float | None = None
    neural_engine_power: float | None = None
    system_power: float | None = None
    cpu_temperature: int | None = None
    macmon: MacmonState | None = None
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
        readings: tuple[tuple[str, str], ...] = (
            ("GPU utilization", _format_reading(gpu.utilization, "%")),
            ("GPU memory in use", format_bytes(gpu.memory_used)),
            ("GPU temperature", _format_reading(gpu.temperature, " °C")),
            ("GPU power", format_watts(gpu.power)),
            ("free memory", _format_reading(self.memory_free, "%")),
            ("available memory", format_bytes(self.memory_available)),
            ("swap in use", format_bytes(self.swap_used)),
            ("battery", _format_reading(self.battery, "%")),
            ("processor speed limit", _format_reading(self.cpu_speed_limit, "%")),
        )
        if self.macmon is not None:
            readings += (
                ("processor temperature", _format_reading(self.cpu_temperature, " °C")),
                ("processor power", format_watts(self.cpu_power)),
                ("Neural Engine power", format_watts(self.neural_engine_power)),
                ("power of the whole Mac", format_watts(self.system_power)),
            )
        findings = self.findings()
        warnings = tuple(
            f"{finding.name.capitalize()}: {finding.evidence.partition(': ')[2]}. {finding.remedy}"
            for finding in findings
            if finding.status == WARNING
        )
        summary = "performance may be reduced" if warnings else "no known cause of reduced performance"
        # Only macOS reports memory pressure.
        hints = [] if self.memory_pressure else ["On a Mac, nb.system_status() reads the missing values."]
        if self.macmon is not None and self.macmon in REMEDIES:
            hints.append(REMEDIES[self.macmon])
        return Report(
            "System status",
            html_sentences=(f"System status: {summary}", *warnings, *hints),
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


def format_watts(watts: float | None) -> str:
    """Return a power draw with its unit, or an empty string for ``None``."""
    return "" if watts is None else f"{watts:.1f} W"


def system_status() -> SystemStatus:
    """Read the GPU, memory, swap, power and thermal state of this machine, without administrator rights.

    The values come from system commands on macOS (``ioreg``, ``sysctl``, ``memory_pressure``, ``pmset``), from
    ``nvidia-smi`` on CUDA, and from psutil. Each command may take up to two seconds, and torch is not imported. GPU
    values cover all processes. On a simulated MPS device, no value is read.

    On a Mac with Apple silicon, power and temperature come from ``macmon``, if it is installed (``brew install macmon``).
    They are means over one second, and reading them takes one to six seconds.

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
        status = read_system_status(manager.machine, device, manager.run, manager.environ, uuid)
        return read_power(status, manager.machine, manager.run, manager.environ)


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


def read_power(status: SystemStatus, machine: MachineInfo, run: RunCommand, environ: Mapping[str, str]) -> SystemStatus:
    """Return a status with the power and the temperature of a Mac with Apple silicon, which takes seconds."""
    if machine.simulated or machine.system != "Darwin" or not machine.apple_silicon:
        return status
    reading = read_macmon(run, find_macmon(environ))
    temperature = _round_if_known(reading.gpu_temperature)
    return replace(
        status,
        gpu=replace(status.gpu, power=reading.gpu_power, temperature=temperature),
        cpu_power=reading.cpu_power,
        neural_engine_power=reading.neural_engine_power,
        system_power=reading.system_power,
        cpu_temperature=_round_if_known(reading.cpu_temperature),
        macmon=reading.state,
    )


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
    return _round_if_known(_parse_number(text, max_number))


def _round_if_known(number: float | None) -> int | None:
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

# What a power draw includes.
PowerScope: TypeAlias = Literal["CPU, GPU and Neural Engine", "the whole Mac", "GPU"]

NVIDIA_POWER_INTERVAL = 0.5  # Seconds between two readings of ``nvidia-smi``.
NO_NVIDIA_POWER = "nvidia-smi reports no power for this GPU."
NO_MAC_POWER = "macmon reports no power for this Mac."
NO_CPU_POWER = "Only an administrator can read the power of this processor."


@dataclass(frozen=True)
class PowerReading:
    """Mean power draw over an interval.

    Attributes:
        watts: Mean power draw in watts, or ``None`` if it is unknown.
        scope: What the power draw includes, or ``None`` if it is unknown.
        remedy: Why the power draw is unknown, or how to read it; otherwise empty.
    """

    watts: float | None = None
    scope: PowerScope | None = None
    remedy: str = ""


# Measures the mean power draw during the next seconds.
PowerMeter = Callable[[float], PowerReading]


def make_power_meter(
    device: str,
    machine: MachineInfo,
    run: RunCommand = run_command,
    environ: Mapping[str, str] = os.environ,
    uuid: str | None = None,
) -> PowerMeter | PowerReading | None:
    """Return a meter of the power draw of a device, a reading with the reason why there is none, or ``None`` under simulation.

    On a Mac, it measures the whole chip for every device. On other machines, only the power of NVIDIA GPUs is readable.
    """
    if machine.simulated or is_mps_simulated():
        return None

    def measure_nvidia(seconds: float) -> PowerReading:
        readings = []
        for _ in range(max(1, round(seconds / NVIDIA_POWER_INTERVAL))):
            time.sleep(NVIDIA_POWER_INTERVAL)
            watts = _read_nvidia(device, run, environ, uuid).power
            if watts is not None:
                readings.append(watts)
        return PowerReading(statistics.fmean(readings), "GPU") if readings else PowerReading(remedy=NO_NVIDIA_POWER)

    if machine.system == "Darwin" and machine.apple_silicon:
        macmon = find_macmon(environ)
        if macmon is None:
            return PowerReading(remedy=REMEDIES[NOT_INSTALLED])
        return partial(_measure_mac_power, run, macmon)
    if get_device(device).sensor != "nvidia-smi":
        return PowerReading(remedy=NO_CPU_POWER)
    if _read_nvidia(device, run, environ, uuid).power is None:
        return PowerReading(remedy=NO_NVIDIA_POWER)
    return measure_nvidia


def _measure_mac_power(run: RunCommand, macmon: str, seconds: float) -> PowerReading:
    """Return the mean power draw of the chip of a Mac; if that of the processor is unknown, of the whole Mac."""
    reading = read_macmon(run, macmon, max(1, round(seconds)))
    if reading.cpu_power is not None and reading.gpu_power is not None:
        watts = reading.cpu_power + reading.gpu_power + (reading.neural_engine_power or 0.0)
        return PowerReading(watts, "CPU, GPU and Neural Engine")
    if reading.system_power is not None:
        return PowerReading(reading.system_power, "the whole Mac")
    return PowerReading(remedy=REMEDIES.get(reading.state, NO_MAC_POWER))


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
