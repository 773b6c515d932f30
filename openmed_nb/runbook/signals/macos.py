"""What macOS says of itself: one pure parser for each command, and ``None`` for what cannot be read.

The commands need no administrator rights, and are asked by their full paths, because a kernel that was started from the
Dock has a short ``PATH``. The keys are those of real outputs; ``tests/recorded/signals`` holds some.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

from .values import LARGEST_SIZE, NOTHING_REPORTED, Gpu, number_in, whole_number_in

IOREG = ["/usr/sbin/ioreg", "-r", "-d", "1", "-w", "0", "-c", "IOAccelerator"]
MEMORY_PRESSURE = ["/usr/bin/memory_pressure", "-Q"]
BATTERY = ["/usr/bin/pmset", "-g", "batt"]
POWER_SETTINGS = ["/usr/bin/pmset", "-g"]
HEAT = ["/usr/bin/pmset", "-g", "therm"]

PRESSURE_LEVEL = "kern.memorystatus_vm_pressure_level"
SWAP = "vm.swapusage"
PERFORMANCE_CORES = "hw.perflevel0.physicalcpu"
EFFICIENCY_CORES = "hw.perflevel1.physicalcpu"
SYSCTL = ["/usr/sbin/sysctl", "-i", PRESSURE_LEVEL, SWAP, PERFORMANCE_CORES, EFFICIENCY_CORES]

MOST_CORES = 4096

SOURCES = {"AC Power": "adapter", "Battery Power": "battery", "UPS Power": "UPS"}
NO_BATTERY = "No batteries available"

POWER_MODES = {
    ("powermode", "0"): "automatic",
    ("powermode", "1"): "low",
    ("powermode", "2"): "high",
    ("lowpowermode", "0"): "automatic",
    ("lowpowermode", "1"): "low",
}
"""macOS has renamed the setting; the new name has three values."""

POWERS = {"K": 10, "M": 20, "G": 30, "T": 40}

NO_REPORTS = ("No thermal warning level has been recorded", "No performance warning level has been recorded")


def parse_ioreg(output: str | None) -> Gpu:
    r"""Return what the Apple GPU says of itself; the accelerators of Intel Macs are left out.

    The figures are of the whole system, and of one moment.

    Example:
        >>> statistics = '{"In use system memory (driver)"=0,"Device Utilization %"=30,"In use system memory"=356089856}'
        >>> gpu = parse_ioreg('+-o AGXAcceleratorG16G  <class>\n  "PerformanceStatistics" = ' + statistics)
        >>> gpu.utilisation, gpu.memory_used, gpu.cores
        (30, 356089856, None)
    """
    entries = re.split(r"^(?=\+-o )", output or "", flags=re.MULTILINE)
    entry = next((one for one in entries if one.startswith("+-o AGX")), "")
    statistics = dict(re.findall(r'"([^"]+)"=(\d+)', _found(r'"PerformanceStatistics"\s*=\s*\{([^}]*)\}', entry) or ""))
    busy = statistics.get("Device Utilization %", statistics.get("Renderer Utilization %"))
    return Gpu(
        name=_found(r'"model"\s*=\s*"([^"\n]+)"', entry),
        cores=whole_number_in(_found(r'"gpu-core-count"\s*=\s*(\d+)', entry), least=1, most=MOST_CORES),
        utilisation=whole_number_in(busy, most=100),
        memory_used=whole_number_in(statistics.get("In use system memory")),
    )


def parse_free_memory(output: str | None) -> int | None:
    """Return the free share of memory in percent, from what ``memory_pressure -Q`` says.

    Example:
        >>> parse_free_memory("System-wide memory free percentage: 70%"), parse_free_memory("not found")
        (70, None)
    """
    return whole_number_in(_found(r"free percentage:\s*(\d+)%", output), most=100)


def parse_swap(output: str | None) -> int | None:
    """Return the bytes in the swap, from what ``sysctl vm.swapusage`` says.

    Example:
        >>> parse_swap("total = 7168.00M  used = 6119,50M  free = 1048.50M  (encrypted)") == 6119.5 * 2**20
        True
    """
    match = re.search(r"\bused\s*=\s*([\d.,]+)([KMGT])\b", output or "", re.ASCII)
    amount = number_in(match[1]) if match else None
    size = None if match is None or amount is None else amount * 2 ** POWERS[match[2]]
    return round(size) if size is not None and size <= LARGEST_SIZE else None


def parse_power_source(output: str | None) -> str | None:
    """Return where the power comes from, from what ``pmset -g batt`` says; a Mac without a battery is on its adapter.

    Example:
        >>> parse_power_source("Now drawing from 'AC Power'"), parse_power_source("No batteries available.")
        ('adapter', 'adapter')
    """
    source = _found(r"^Now drawing from '([^'\n]+)'", output)
    if source is None and (output or "").startswith(NO_BATTERY):
        return "adapter"
    return SOURCES.get(source or "")


def parse_battery(output: str | None) -> int | None:
    r"""Return the charge of the built-in battery in percent, from what ``pmset -g batt`` says.

    Example:
        >>> parse_battery(" -InternalBattery-0 (id=22806627)\t78%; discharging; 5:05 remaining present: true")
        78
    """
    return whole_number_in(_found(r"-InternalBattery-\d+[^\n]*?\s(\d+)%;", output), most=100)


def parse_power_mode(output: str | None) -> str | None:
    """Return the power mode in use, from what ``pmset -g`` says; ``None`` on Macs that have none.

    Example:
        >>> parse_power_mode(" powermode            2"), parse_power_mode(" lowpowermode         1"), parse_power_mode("")
        ('high', 'low', None)
    """
    found = dict(re.findall(r"^\s*((?:low)?powermode)\s+(\d+)\s*$", output or "", re.ASCII | re.MULTILINE))
    modes = (POWER_MODES.get((name, found.get(name, ""))) for name in ("powermode", "lowpowermode"))
    return next((mode for mode in modes if mode), None)


def parse_speed_limit(output: str | None) -> int | None:
    r"""Return how fast the processor may run in percent, from what ``pmset -g therm`` says; ``None`` without a limit.

    Example:
        >>> parse_speed_limit("CPU_Speed_Limit \t= 62"), parse_speed_limit("CPU_Speed_Limit \t= 620")
        (62, None)
    """
    return whole_number_in(_found(r"\bCPU_Speed_Limit\s*=\s*(\d+)", output), most=100)


def parse_heat(output: str | None) -> str | None:
    r"""Return whether the system slows the processor down, from what ``pmset -g therm`` says.

    Apple Silicon usually reports no limit although it slows down (exelban/stats#749, macmade/Hot#80), so that
    no report says nothing.

    Example:
        >>> parse_heat("CPU_Speed_Limit \t= 62"), parse_heat("CPU_Speed_Limit \t= 100"), parse_heat("Error")
        ('limited', 'nominal', None)
    """
    limit = parse_speed_limit(output)
    if limit is not None:
        return "limited" if limit < 100 else "nominal"  # noqa: PLR2004 - percent
    return NOTHING_REPORTED if all(note in (output or "") for note in NO_REPORTS) else None


def parse_cores(facts: Mapping[str, str], name: str) -> int | None:
    """Return how many cores of a kind there are, from the ``name: value`` lines of ``sysctl``.

    Example:
        >>> parse_cores({"hw.perflevel0.physicalcpu": "12"}, PERFORMANCE_CORES), parse_cores({}, EFFICIENCY_CORES)
        (12, None)
    """
    return whole_number_in(facts.get(name), least=1, most=MOST_CORES)


def _found(pattern: str, text: str | None) -> str | None:
    match = re.search(pattern, text or "", re.ASCII | re.MULTILINE)
    return match[1] if match else None
