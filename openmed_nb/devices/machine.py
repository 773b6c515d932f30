"""Facts of the computer, the names of its devices, whether its MPS device is simulated, and the clock of all that is measured."""

from __future__ import annotations

import math
import os
import platform
import re
import struct
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .._render.display import SIMULATED_SUFFIX
from .._utils.text import describe_value
from .._utils.validation import check_not_shadowed
from ..errors import ConfigurationError
from .request import normalize_device

if TYPE_CHECKING:
    from importlib.metadata import Distribution

# What is asked of macOS. -i leaves out what a system does not know, such as Rosetta's flag on an old Mac.
SYSCTL_KEYS = (
    "sysctl.proc_translated",
    "hw.optional.arm64",
    "machdep.cpu.brand_string",
    "kern.osproductversion",
    "hw.memsize",
    "hw.physicalcpu",
)

# What Linux says of an Apple chip, also in a container, where Docker hid it in 2022 (docker/for-mac#6512); and what Rosetta
# says there to an x86_64 Python.
CPUINFO = Path("/proc/cpuinfo")
APPLE_CPU = re.compile(r"^CPU implementer\s*:\s*0x61$|\bVirtualApple\b", re.MULTILINE)

# Files that exist on Linux where a driver of NVIDIA (bare metal, WSL 2) or AMD is loaded.
GPU_DRIVER_FILES = ("/proc/driver/nvidia/version", "/dev/nvidiactl", "/dev/dxg", "/dev/kfd")


def import_psutil() -> Any:
    """Import psutil, which knows memory and processes on every system."""
    import psutil

    check_not_shadowed(psutil, "virtual_memory")
    return psutil


def distribution_of(package: str) -> Distribution | None:
    """Return an installed package as its files describe it; ``None`` if it is not installed."""
    from importlib.metadata import PackageNotFoundError, distribution

    try:
        return distribution(package)
    except PackageNotFoundError:
        return None


@dataclass(frozen=True)
class MachineInfo:
    """What this computer is; ``None`` means that it could not be read, never a guess."""

    system: str  # ``"Darwin"``, ``"Linux"`` or ``"Windows"``, as ``platform.system()`` says.
    architecture: str  # What this Python was built for: ``"arm64"``, ``"x86_64"`` ...
    # Whether the processor is Apple's, also when Python runs under Rosetta, or in a Linux container on a Mac.
    apple_silicon: bool = False
    under_rosetta: bool = False  # Whether this Python runs under Rosetta.
    chip: str | None = None  # The processor's name, such as ``"Apple M2 Pro"``.
    macos: tuple[int, ...] | None = None  # The version of macOS, such as ``(14, 5)``.
    memory_bytes: int | None = None  # Installed memory in bytes.
    cores: int | None = None  # Physical cores.
    gpu_driver: bool | None = None  # Whether a driver for a CUDA or ROCm GPU is loaded.
    # Whether this computer is simulated: nothing measured on it is a figure of such a computer.
    simulated: bool = False

    @property
    def native_apple_silicon(self) -> bool:
        """Whether this is an Apple chip and a Python built for it: what torch's MPS backend needs."""
        return self.apple_silicon and not self.under_rosetta and self.architecture == "arm64"

    @property
    def gpu(self) -> str:
        """The kind of GPU that torch uses on this system: only macOS has MPS, and it has no CUDA."""
        return "mps" if self.system == "Darwin" else "cuda"


def read_machine(
    system: str = platform.system(),
    architecture: str = platform.machine(),
    run: Callable[[list[str]], str | None] | None = None,
    exists: Callable[[str], bool] = os.path.exists,
    cpuinfo: Path = CPUINFO,
) -> MachineInfo:
    """Read the facts of this computer; what cannot be read is ``None``."""
    if system == "Windows":
        driver = exists(str(Path(os.environ.get("SYSTEMROOT", r"C:\Windows")) / "System32" / "nvcuda.dll"))
        return MachineInfo(system, architecture, gpu_driver=driver)
    if system != "Darwin":
        apple = APPLE_CPU.search(read_cpuinfo(cpuinfo)) is not None
        return MachineInfo(system, architecture, apple, gpu_driver=any(exists(path) for path in GPU_DRIVER_FILES))
    facts = parse_sysctl((run or run_command)(["/usr/sbin/sysctl", "-i", *SYSCTL_KEYS]))
    memory = facts.get("hw.memsize", "")
    cores = facts.get("hw.physicalcpu", "")
    match = re.match(r"\d+(\.\d+)*", facts.get("kern.osproductversion", ""))
    macos = tuple(int(part) for part in match.group().split(".")) if match else None
    return MachineInfo(
        system="Darwin",
        architecture=architecture,
        apple_silicon=architecture == "arm64" or facts.get("hw.optional.arm64") == "1",
        under_rosetta=facts.get("sysctl.proc_translated") == "1",
        chip=facts.get("machdep.cpu.brand_string"),
        # Macs tell old programs "10.16" for every macOS from 11 on, so that answer tells nothing.
        macos=None if macos and macos[:2] == (10, 16) else macos,
        memory_bytes=int(memory) if memory.isdecimal() else None,
        cores=int(cores) if cores.isdecimal() else None,
        gpu_driver=False,
    )


def apple_chip_generation(machine: MachineInfo) -> int | None:
    """Return which generation of Apple's chips this is: 1 for every M1, 2 for every M2; ``None`` where it is not known."""
    if machine.chip == "Apple A18 Pro":  # Of the MacBook Neo; its GPU is of the M4's family (Apple9).
        return 4
    match = re.match(r"Apple M(\d+)\b", machine.chip or "", re.ASCII)
    return int(match[1]) if match else None


def parse_sysctl(output: str | None) -> dict[str, str]:
    """Return the ``name: value`` lines of ``sysctl`` as a mapping; other lines are left out."""
    pairs = (line.partition(":") for line in (output or "").splitlines())
    return {name.strip(): value.strip() for name, colon, value in pairs if colon and value.strip()}


def run_command(command: list[str], environ: Mapping[str, str] | None = None) -> str | None:
    """Return what a command prints within two seconds, ``None`` where it cannot be run; odd bytes become U+FFFD.

    Its environment variables are those of this process if no others are given.
    """
    import subprocess

    environment = {**(os.environ if environ is None else environ), "LC_ALL": "C"}
    try:
        done = subprocess.run(  # noqa: S603 - the commands are ours
            command, capture_output=True, timeout=2, env=environment, check=False, encoding="utf-8", errors="replace"
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout


@dataclass(frozen=True)
class Footprint:
    """The memory by which macOS and Activity Monitor judge a process, in bytes; compressed pages and memory of Metal count."""

    current: int
    peak: int  # The largest in the life of the process.


# Struct rusage_info_v4 of xnu's bsd/sys/resource.h, in every macOS since 10.13: a UUID and 35 numbers, of which
# ri_phys_footprint is the eighth and ri_lifetime_max_phys_footprint the 29th. Every later form begins in the same way.
USAGE = struct.Struct("<16x35Q")
USAGE_FORM = 4
PHYS_FOOTPRINT_INDEX = 7
MAX_FOOTPRINT_INDEX = 28


def read_footprint(library: Any = None) -> Footprint | None:
    """Return the footprint of this process, from macOS's C library; ``None`` on other systems, and where it is not known."""
    if library is None and sys.platform != "darwin":
        return None
    import ctypes

    library = library or ctypes.CDLL("/usr/lib/libSystem.B.dylib")
    usage = ctypes.create_string_buffer(USAGE.size)
    refused = library.proc_pid_rusage(os.getpid(), USAGE_FORM, usage)
    numbers = USAGE.unpack(usage.raw)
    # No process has a footprint of no bytes.
    return (
        None
        if refused or not numbers[PHYS_FOOTPRINT_INDEX]
        else Footprint(numbers[PHYS_FOOTPRINT_INDEX], numbers[MAX_FOOTPRINT_INDEX])
    )


def read_cpuinfo(file: Path = CPUINFO) -> str:
    """Return what Linux says of the first processors, which is quick where there are hundreds; nothing on other systems."""
    try:
        with file.open(encoding="utf-8", errors="replace") as opened:
            return opened.read(4096)
    except OSError:
        return ""


def processor_name(file: Path = CPUINFO) -> str:
    """Return the name of the first processor, or where it has none that can be read (as on most ARM), its architecture."""
    match = re.search(r"^model name\s*:[ \t]*(.+)$", read_cpuinfo(file), re.MULTILINE)
    return (" ".join(match[1].split()) if match else "") or platform.processor() or platform.machine()


DEFAULT_SIMULATED_MEMORY = "8 GiB"  # The RAM of a simulated Mac unless a person asks for another.
MEMORY = re.compile(r"\s*(\d+(?:\.\d+)?)\s*([KMGT])i?B\s*", re.ASCII | re.IGNORECASE)
SMALLEST = 1 << 20  # A Mac has more memory than that; a smaller number is one without its unit.


def parse_memory(memory: str | int) -> int:
    """Return an amount of memory in bytes; a Mac that is sold with "8 GB" has 8 GiB, so both mean that."""
    match = MEMORY.fullmatch(memory) if isinstance(memory, str) else None
    number = float(match[1]) * 1024 ** (1 + "KMGT".index(match[2].upper())) if match else memory
    if isinstance(number, (int, float)) and not isinstance(number, bool) and SMALLEST <= number < math.inf:
        return int(number)
    raise ConfigurationError(f"{describe_value(memory)} is not an amount of memory.", "Use one such as '8 GiB'.")


# The simulation that is on, if any; there is one for the process, and its tensors belong to the thread that began it.
ACTIVE_SIMULATIONS: list[object] = []


def is_mps_simulated() -> bool:
    """Tell whether a simulated MPS device is on in this process; torch is not imported for it."""
    return bool(ACTIVE_SIMULATIONS)


def format_device(device: str) -> str:
    """Return the name of a device as it is shown with a result: one that is simulated says so."""
    name = normalize_device(device)
    return f"{name}{SIMULATED_SUFFIX}" if name == "mps" and is_mps_simulated() else name


def is_marked_simulated(shown: str) -> bool:
    """Tell whether the name of a device, as it is shown with a result, says that it is simulated."""
    return shown.endswith(SIMULATED_SUFFIX)
