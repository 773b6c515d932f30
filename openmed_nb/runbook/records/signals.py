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
from typing import Any

from ..._render.display import NOT_APPLICABLE, NOT_KNOWN, OK, WARNING, Finding, Report, Shown, Table, in_bytes, worst
from ...devices import backend
from ...devices.machine import Machine, import_psutil, mps_is_simulated, parse_sysctl, run_command
from ...devices.request import kind_of
from ...errors import OpenMedError
from ...session import SESSION
from ...training.curve import parse_pressure

NOTHING_REPORTED = "nothing reported"
SLOWED_BY_HEAT = {True: "limited", False: "nominal", None: None}
PLUGGED = {True: "adapter", False: "battery", None: None}


@dataclass(frozen=True)
class Gpu:
    """What a GPU says of itself; ``None`` if it cannot be read, never a guess.

    Attributes:
        name: Its name, such as ``"Apple M4"``.
        cores: How many cores it has; only Apple's GPUs say it.
        utilisation: How much of the last moment it was busy, in percent, for all processes together.
        memory_used: The memory that it uses, in bytes, for all processes together.
        memory_total: The memory that it has for itself, in bytes; Apple's GPUs share that of the computer.
        temperature: In degrees Celsius.
        power: In watts.
        slowed_by_heat: Whether it runs slower than it could because of heat.
        uuid: The UUID by which NVIDIA names this one GPU.
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
        hardware = {
            "processor": self.chip or "",
            "performance cores": with_unit(self.performance_cores),
            "efficiency cores": with_unit(self.efficiency_cores),
            "GPU": self.gpu.name or "",
            "GPU cores": with_unit(self.gpu.cores),
            "GPU memory": in_bytes(self.gpu.memory_total),
        }
        figures = {
            "GPU utilisation": with_unit(self.gpu.utilisation, " %"),
            "GPU memory in use": in_bytes(self.gpu.memory_used),
            "GPU temperature": with_unit(self.gpu.temperature, " °C"),
            "GPU power": with_unit(self.gpu.power, " W"),
            "free memory": with_unit(self.memory_free, " %"),
            "available memory": in_bytes(self.memory_available),
            "swap in use": in_bytes(self.swap_used),
            "battery": with_unit(self.battery, " %"),
            "processor speed limit": with_unit(self.speed_limit, " %"),
        }
        parts = tuple((name, words) for name, words in hardware.items() if words)
        shown = tuple((name, words or NOT_KNOWN) for name, words in figures.items())
        findings = self.findings()
        slow = tuple(
            f"{one.name.capitalize()}: {one.evidence.partition(': ')[2]}. {one.remedy}"
            for one in findings
            if one.status == WARNING
        )
        said = "this computer may be slow now" if slow else "nothing is known to slow this computer down"
        # Where macOS does not say it, nothing does.
        elsewhere = () if self.memory_pressure else ("On a Mac, nb.signals() reads what is not known here.",)
        return Report(
            "Signals",
            spoken=(f"Signals: {said}", *slow, *elsewhere),
            status=worst(findings),
            tables=(Table("", ("signal", "state"), states), Table("Hardware", ("part", "what it is"), parts)),
            figures=(Table("Figures of this moment", ("signal", "figure"), shown),),
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
    return worst_heat(signals.heat, SLOWED_BY_HEAT[signals.gpu.slowed_by_heat])


def worst_heat(*states: str | None) -> str | None:
    return next((state for state in ("limited", "moderate", "nominal", NOTHING_REPORTED) if state in states), None)


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
        {
            "moderate": "the computer is warm, and the system may slow itself down",
            "limited": "the system slows itself down because it is hot",
        },
        "Let the computer cool down, and give it air.",
    ),
)


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
    # Containers hide files, some have no battery.
    unreadable = (OSError, RuntimeError, psutil.Error)

    def asked(question: str) -> Any:
        try:
            return getattr(psutil, question, lambda: None)()
        except unreadable:
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
    facts = parse_sysctl(run(SYSCTL))
    battery, heat = run(BATTERY), run(HEAT)
    return {
        "gpu": parse_ioreg(run(IOREG)),
        "memory_pressure": parse_pressure(facts.get(PRESSURE_LEVEL)),
        "memory_free": parse_free_memory(run(MEMORY_PRESSURE)),
        "swap_used": parse_swap(facts.get(SWAP)),
        "power_source": parse_power_source(battery),
        "battery": parse_battery(battery),
        "power_mode": parse_power_mode(run(POWER_SETTINGS)),
        "heat": worst_heat(parse_heat(heat), parse_thermal_pressure(run(THERMAL_PRESSURE))),
        "speed_limit": parse_speed_limit(heat),
        "performance_cores": parse_cores(facts, PERFORMANCE_CORES),
        "efficiency_cores": parse_cores(facts, EFFICIENCY_CORES),
    }


def read_nvidia(device: str, run: Run, environ: Mapping[str, str], uuid: str | None = None) -> Gpu:
    """Return what the GPU says that torch calls by this name."""
    answers = (parse_nvidia_smi(run([path, *QUERY])) for path in NVIDIA_SMI)
    gpus = next((gpus for gpus in answers if gpus), ())
    return chosen_gpu(gpus, device, environ, uuid) or Gpu()


# Returns how busy a device is just now, as a share from 0 to 1, or since it was last asked; ``None`` if it cannot be read.
Busy = Callable[[], "float | None"]

NOT_BUSY = ("idle", "iowait")
# Linux counts these in ``user`` and ``nice`` too (proc(5)); so does not psutil's percentage.
GUESTS = ("guest", "guest_nice")


def busy_reader(
    device: str,
    machine: Machine,
    run: Run = run_command,
    environ: Mapping[str, str] = os.environ,
    uuid: str | None = None,
) -> Busy | None:
    """Return what reads how busy a device is; ``None`` under a simulation, and if this cannot be read.

    ``environ`` says what CUDA calls its devices, and ``uuid`` how torch names the CUDA GPU.
    """
    if machine.simulated or mps_is_simulated():
        return None
    kind = kind_of(device)
    if kind == "cpu":
        return CpuReader() if cpu_times() else None

    def read() -> float | None:
        if kind not in {"mps", "cuda"}:
            return None
        gpu = parse_ioreg(run(IOREG)) if kind == "mps" else read_nvidia(device, run, environ, uuid)
        return None if gpu.utilisation is None else gpu.utilisation / 100

    return None if read() is None else read


class CpuReader:
    """Reads how busy the processor was since it was last asked, of all cores together."""

    def __init__(self) -> None:
        self._before = cpu_times()

    def __call__(self) -> float | None:
        before, self._before = self._before, cpu_times()
        return busy_share(before, self._before)


def cpu_times() -> dict[str, float]:
    """Return the seconds that the processor has spent in each state, of all cores together; empty if they cannot be read."""
    psutil = import_psutil()
    try:
        return dict(psutil.cpu_times()._asdict())
    except (OSError, RuntimeError, psutil.Error):  # A container can hide the file.
        return {}


def busy_share(before: Mapping[str, float], after: Mapping[str, float]) -> float | None:
    """Return which share of the time between two readings of the processor was work, ``None`` if none has passed."""
    spent = {name: max(0.0, after[name] - before.get(name, 0.0)) for name in after if name not in GUESTS}
    total = sum(spent.values())
    return 1 - sum(spent.get(name, 0.0) for name in NOT_BUSY) / total if total and before else None


NUMBER = re.compile(r"\s*(\d{1,15}(?:[.,]\d{1,9})?)\s*", re.ASCII)
LARGEST_SIZE = 1 << 50  # A petabyte; a larger size was misread.


def number_in(text: str | None, least: float = 0, most: float = LARGEST_SIZE) -> float | None:
    """Return the number that a text is, ``None`` for anything else, and for one out of its range.

    A comma may stand for the point, as in some locales.

    Example:
        >>> number_in("16", most=100), number_in("6119,06"), number_in("134", most=100), number_in("[N/A]")
        (16.0, 6119.06, None, None)
    """
    match = NUMBER.fullmatch(text or "")
    number = float(match[1].replace(",", ".")) if match else None
    return number if number is not None and least <= number <= most else None


def whole_number_in(text: str | None, least: int = 0, most: int = LARGEST_SIZE) -> int | None:
    """Return the whole number that a text is, ``None`` as in :func:`number_in`."""
    number = number_in(text, least, most)
    return int(number) if number is not None and number.is_integer() else None


IOREG = ["/usr/sbin/ioreg", "-r", "-d", "1", "-w", "0", "-c", "IOAccelerator"]
MEMORY_PRESSURE = ["/usr/bin/memory_pressure", "-Q"]
BATTERY = ["/usr/bin/pmset", "-g", "batt"]
POWER_SETTINGS = ["/usr/bin/pmset", "-g"]
HEAT = ["/usr/bin/pmset", "-g", "therm"]
THERMAL_PRESSURE = ["/usr/bin/notifyutil", "-g", "com.apple.system.thermalpressurelevel"]

PRESSURE_LEVEL, SWAP = "kern.memorystatus_vm_pressure_level", "vm.swapusage"
PERFORMANCE_CORES, EFFICIENCY_CORES = "hw.perflevel0.physicalcpu", "hw.perflevel1.physicalcpu"
SYSCTL = ["/usr/sbin/sysctl", "-i", PRESSURE_LEVEL, SWAP, PERFORMANCE_CORES, EFFICIENCY_CORES]

MOST_CORES = 4096
SOURCES = {"AC Power": "adapter", "Battery Power": "battery", "UPS Power": "UPS"}
POWERS = {"K": 10, "M": 20, "G": 30, "T": 40}

POWER_MODES = {"0": "automatic", "1": "low", "2": "high"}

# What the levels of thermal pressure mean: nominal, moderate, heavy, trapping and sleeping (``OSThermalNotification.h``). A Mac
# without a fan was seen to slow down at the nominal one (angristan/MacThrottle#19).
PRESSURES = {"0": "nominal", "1": "moderate", **dict.fromkeys("234", "limited")}

NO_REPORTS = ("No thermal warning level has been recorded", "No performance warning level has been recorded")


def found(pattern: str, text: str | None) -> str | None:
    """Return what the one group of a pattern matches in a text, in any of its lines."""
    match = re.search(pattern, text or "", re.ASCII | re.MULTILINE)
    return match[1] if match else None


def parse_ioreg(output: str | None) -> Gpu:
    """Return what the Apple GPU says of itself, of the whole system and of one moment; other accelerators are left out."""
    entries = re.split(r"^(?=\+-o )", output or "", flags=re.MULTILINE)
    entry = next((one for one in entries if one.startswith("+-o AGX")), "")
    statistics = dict(re.findall(r'"([^"]+)"=(\d+)', found(r'"PerformanceStatistics"\s*=\s*\{([^}]*)\}', entry) or ""))
    busy = statistics.get("Device Utilization %", statistics.get("Renderer Utilization %"))
    return Gpu(
        name=found(r'"model"\s*=\s*"([^"\n]+)"', entry),
        cores=whole_number_in(found(r'"gpu-core-count"\s*=\s*(\d+)', entry), least=1, most=MOST_CORES),
        utilisation=whole_number_in(busy, most=100),
        memory_used=whole_number_in(statistics.get("In use system memory")),
    )


def parse_free_memory(output: str | None) -> int | None:
    """Return the free share of memory in percent, from ``memory_pressure -Q``."""
    return whole_number_in(found(r"free percentage:\s*(\d+)%", output), most=100)


def parse_swap(output: str | None) -> int | None:
    """Return the bytes in the swap, from ``sysctl vm.swapusage``."""
    match = re.search(r"\bused\s*=\s*([\d.,]+)([KMGT])\b", output or "", re.ASCII)
    amount = number_in(match[1]) if match else None
    size = None if match is None or amount is None else amount * 2 ** POWERS[match[2]]
    return round(size) if size is not None and size <= LARGEST_SIZE else None


def parse_power_source(output: str | None) -> str | None:
    """Return where the power comes from, from ``pmset -g batt``; a Mac without a battery is on its adapter."""
    source = found(r"^Now drawing from '([^'\n]+)'", output)
    if source is None and (output or "").startswith("No batteries available"):
        return "adapter"
    return SOURCES.get(source or "")


def parse_battery(output: str | None) -> int | None:
    """Return the charge of the built-in battery in percent, from ``pmset -g batt``."""
    return whole_number_in(found(r"-InternalBattery-\d+[^\n]*?\s(\d+)%;", output), most=100)


def parse_power_mode(output: str | None) -> str | None:
    """Return the power mode in use, from ``pmset -g``; ``None`` for Macs that have none."""
    # macOS has renamed the setting; only the new name, the first, has a third value.
    values = (found(rf"^\s*{name}\s+(\d+)\s*$", output) for name in ("powermode", "lowpowermode"))
    return next((POWER_MODES[value] for value in values if value in POWER_MODES), None)


def parse_speed_limit(output: str | None) -> int | None:
    """Return how fast the processor may run in percent, from ``pmset -g therm``; ``None`` without a limit."""
    return whole_number_in(found(r"\bCPU_Speed_Limit\s*=\s*(\d+)", output), most=100)


def parse_heat(output: str | None) -> str | None:
    """Return whether the system slows the processor down, from ``pmset -g therm``.

    Apple Silicon reports no limit although it slows down (exelban/stats#749, macmade/Hot#80), so that no report says nothing.
    """
    limit = parse_speed_limit(output)
    if limit is not None:
        return "limited" if limit < 100 else "nominal"  # noqa: PLR2004 - percent
    return NOTHING_REPORTED if all(note in (output or "") for note in NO_REPORTS) else None


def parse_thermal_pressure(output: str | None) -> str | None:
    """Return what heat does to the computer, from ``notifyutil -g com.apple.system.thermalpressurelevel``."""
    return PRESSURES.get(found(rf"^{re.escape(THERMAL_PRESSURE[-1])}[ \t]+(\d+)[ \t]*$", output) or "")


def parse_cores(facts: Mapping[str, str], name: str) -> int | None:
    """Return how many cores of a kind there are, from the ``name: value`` lines of ``sysctl``."""
    return whole_number_in(facts.get(name), least=1, most=MOST_CORES)


# Where the driver puts ``nvidia-smi``: on Linux, in containers, under WSL 2 and on Windows.
NVIDIA_SMI = (
    "/usr/bin/nvidia-smi",
    "/usr/local/nvidia/bin/nvidia-smi",
    "/usr/lib/wsl/lib/nvidia-smi",
    r"C:\Windows\System32\nvidia-smi.exe",
)

# What it is asked; newer drivers call the last two ``clocks_event_reasons`` and still know them by these names.
FIELDS = (
    *("uuid", "name", "utilization.gpu", "memory.used", "memory.total", "temperature.gpu", "power.draw"),
    *("clocks_throttle_reasons.sw_thermal_slowdown", "clocks_throttle_reasons.hw_thermal_slowdown"),
)
QUERY = [f"--query-gpu={','.join(FIELDS)}", "--format=csv,noheader,nounits"]

MOST_MEMORY, HOTTEST, MOST_POWER = 1 << 24, 150, 10_000  # In mebibytes, degrees Celsius and watts.


def parse_nvidia_smi(output: str | None) -> tuple[Gpu, ...]:
    """Return what each GPU says, in the order of ``nvidia-smi``; what it does not support is ``None``."""
    rows = ([cell.strip() for cell in line.split(",")] for line in (output or "").splitlines())
    return tuple(_nvidia_gpu(*row) for row in rows if len(row) == len(FIELDS))


def _nvidia_gpu(uuid: str, name: str, busy: str, *cells: str) -> Gpu:
    used, total = (whole_number_in(cell, most=MOST_MEMORY) for cell in cells[:2])
    heat = {"Active", "Not Active"}.intersection(cells[4:])
    return Gpu(
        name=None if not name or name.startswith("[") else name,
        utilisation=whole_number_in(busy, most=100),
        memory_used=None if used is None else used << 20,
        memory_total=total << 20 if total else None,
        temperature=whole_number_in(cells[2], most=HOTTEST),
        power=number_in(cells[3], most=MOST_POWER),
        slowed_by_heat="Active" in heat if heat else None,
        uuid=None if not uuid or uuid.startswith("[") else uuid,
    )


def chosen_gpu(gpus: Sequence[Gpu], device: str, environ: Mapping[str, str], uuid: str | None = None) -> Gpu | None:
    """Return the GPU of ``nvidia-smi`` that torch calls ``"cuda"`` or ``"cuda:N"``, ``None`` if that is not certain.

    torch numbers the GPUs that ``CUDA_VISIBLE_DEVICES`` leaves, the fastest first unless ``CUDA_DEVICE_ORDER`` is
    ``PCI_BUS_ID``, and ``nvidia-smi`` all of them by their place on the bus (CUDA C++ programming guide, "CUDA
    environment variables"). If the two can differ, only the UUID that torch names tells.
    """
    name = uuid or visible_name(device, environ)
    if name is None:
        return None
    if not name.isdecimal():
        named = [gpu for gpu in gpus if (gpu.uuid or "").removeprefix("GPU-").startswith(name.removeprefix("GPU-"))]
        return named[0] if len(named) == 1 else None
    place = whole_number_in(name)
    same_order = environ.get("CUDA_DEVICE_ORDER") == "PCI_BUS_ID" or len({gpu.name for gpu in gpus}) == 1
    return gpus[place] if same_order and place is not None and place < len(gpus) else None


def visible_name(device: str, environ: Mapping[str, str]) -> str | None:
    """Return the number or the UUID by which ``CUDA_VISIBLE_DEVICES`` names a device; its own number if it is unset."""
    number = device.partition(":")[2] or "0"
    visible = environ.get("CUDA_VISIBLE_DEVICES")
    if visible is None:
        return number
    names = [name.strip() for name in visible.split(",")]
    valid = all(re.fullmatch(r"\d+|GPU-[0-9a-fA-F-]+", name, re.ASCII) for name in names)
    place = whole_number_in(number)
    return names[place] if valid and place is not None and place < len(names) else None
