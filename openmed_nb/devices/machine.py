"""Facts of the machine, names of devices in results, and the state of the MPS simulation."""

from __future__ import annotations

import importlib
import math
import os
import platform
import re
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias

from .._render.values import SIMULATED_SUFFIX
from .._utils.text import describe_value
from .._utils.validation import check_not_shadowed
from ..errors import ConfigurationError
from .request import normalize_device

if TYPE_CHECKING:
    import ctypes
    from importlib.metadata import Distribution

Version: TypeAlias = tuple[int, ...]  # Numbers of a version or release, such as (2, 13, 0).

# Keys of sysctl on macOS. The option -i ignores unknown keys, such as the Rosetta flag on an old Mac.
SYSCTL_KEYS = (
    "sysctl.proc_translated",
    "hw.optional.arm64",
    "machdep.cpu.brand_string",
    "kern.osproductversion",
    "hw.memsize",
    "hw.physicalcpu",
)

# Line of /proc/cpuinfo that identifies an Apple chip: that of Linux, also in a container (Docker hid it in 2022,
# docker/for-mac#6512), or that of Rosetta for an x86_64 Python.
CPUINFO = Path("/proc/cpuinfo")
APPLE_CPU = re.compile(r"^CPU implementer\s*:\s*0x61$|\bVirtualApple\b", re.MULTILINE)

# Files that exist on Linux if a driver of NVIDIA (bare metal, WSL 2) or AMD is loaded.
GPU_DRIVER_FILES = ("/proc/driver/nvidia/version", "/dev/nvidiactl", "/dev/dxg", "/dev/kfd")


def import_psutil() -> ModuleType:
    """Import psutil, which provides memory and process information on every operating system."""
    psutil = importlib.import_module("psutil")
    check_not_shadowed(psutil, "virtual_memory")
    return psutil


def distribution_of(package: str) -> Distribution | None:
    """Return the metadata of an installed package, or ``None`` if it is not installed."""
    from importlib.metadata import PackageNotFoundError, distribution

    try:
        return distribution(package)
    except PackageNotFoundError:
        return None


@dataclass(frozen=True)
class MachineInfo:
    """Facts of a machine. ``None`` means that a value could not be read; values are never estimated.

    Attributes:
        system: Operating system as in ``platform.system()``: ``"Darwin"``, ``"Linux"`` or ``"Windows"``.
        architecture: Architecture of this Python build, such as ``"arm64"`` or ``"x86_64"``.
        apple_silicon: Whether the processor is an Apple chip, also under Rosetta or in a Linux container on a Mac.
        under_rosetta: Whether this Python runs under Rosetta.
        chip: Name of the processor, such as ``"Apple M2 Pro"``.
        macos_version: Version of macOS, such as ``(14, 5)``.
        memory_bytes: Installed memory in bytes.
        cores: Number of physical cores.
        gpu_driver: Whether a driver for a CUDA or ROCm GPU is loaded.
        simulated: Whether the machine is simulated. If so, measurements do not represent a real machine.
    """

    system: str
    architecture: str
    apple_silicon: bool = False
    under_rosetta: bool = False
    chip: str | None = None
    macos_version: Version | None = None
    memory_bytes: int | None = None
    cores: int | None = None
    gpu_driver: bool | None = None
    simulated: bool = False

    @property
    def native_apple_silicon(self) -> bool:
        """Whether the processor is an Apple chip and Python is built for it, as torch's MPS backend requires."""
        return self.apple_silicon and not self.under_rosetta and self.architecture == "arm64"


def read_machine(
    system: str = platform.system(),
    architecture: str = platform.machine(),
    run: Callable[[list[str]], str | None] | None = None,
    exists: Callable[[str], bool] = os.path.exists,
    cpuinfo: Path = CPUINFO,
) -> MachineInfo:
    """Read the facts of this machine; facts that cannot be read are ``None``."""
    if system == "Windows":
        driver = exists(str(Path(os.environ.get("SYSTEMROOT", r"C:\Windows")) / "System32" / "nvcuda.dll"))
        return MachineInfo(system, architecture, gpu_driver=driver)
    if system != "Darwin":
        apple = APPLE_CPU.search(_read_cpuinfo(cpuinfo)) is not None
        return MachineInfo(system, architecture, apple, gpu_driver=any(map(exists, GPU_DRIVER_FILES)))
    output = (run or run_command)(["/usr/sbin/sysctl", "-i", *SYSCTL_KEYS]) or ""
    lines = (line.partition(":") for line in output.splitlines())
    facts = {name.strip(): value.strip() for name, _colon, value in lines}
    memory = facts.get("hw.memsize", "")
    cores = facts.get("hw.physicalcpu", "")
    match = re.match(r"\d+(\.\d+)*", facts.get("kern.osproductversion", ""))
    macos = tuple(map(int, match.group().split("."))) if match else None
    return MachineInfo(
        system="Darwin",
        architecture=architecture,
        apple_silicon=architecture == "arm64" or facts.get("hw.optional.arm64") == "1",
        under_rosetta=facts.get("sysctl.proc_translated") == "1",
        chip=facts.get("machdep.cpu.brand_string") or None,
        # macOS reports "10.16" to old programs for every version from 11 on, so the actual version is unknown.
        macos_version=None if macos and macos[:2] == (10, 16) else macos,
        memory_bytes=int(memory) if memory.isdecimal() else None,
        cores=int(cores) if cores.isdecimal() else None,
        gpu_driver=False,
    )


def apple_chip_generation(machine: MachineInfo) -> int | None:
    """Return the generation of an Apple chip (1 for every M1, 2 for every M2), or ``None`` if it is unknown."""
    if machine.chip == "Apple A18 Pro":  # Chip of the MacBook Neo, whose GPU belongs to the family of the M4 (Apple9).
        return 4
    match = re.match(r"Apple M(\d+)\b", machine.chip or "", re.ASCII)
    return int(match[1]) if match else None


COMMAND_SECONDS = 2.0  # Time limit of a command.


class RunCommand(Protocol):
    """Function that runs a command and returns its output, or ``None`` if it cannot run or exceeds its time limit."""

    def __call__(self, command: list[str], *, seconds: float = COMMAND_SECONDS) -> str | None: ...


def run_command(command: list[str], *, seconds: float = COMMAND_SECONDS) -> str | None:
    """Return the standard output of a command, or ``None`` if it cannot run or exceeds its time limit.

    Args:
        command: Command and arguments.
        seconds: Time limit. After it, the command and the processes that it started are killed.

    Returns:
        The output as text, in which undecodable bytes are replaced by U+FFFD.
    """
    import subprocess

    try:
        process = subprocess.Popen(  # noqa: S603 - the commands are constants of this package
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env={**os.environ, "LC_ALL": "C"},
            encoding="utf-8",
            errors="replace",
            start_new_session=True,  # The signal at the end then reaches all processes of the command.
        )
    except OSError:
        return None
    with process:
        try:
            return process.communicate(timeout=seconds)[0]
        except BaseException as error:  # Including an interrupt, which the new session does not receive.
            # A child of the command that keeps its output open would block ``subprocess.run``.
            from .._utils.child import kill_group

            kill_group(process)
            if isinstance(error, subprocess.TimeoutExpired):
                return None
            raise


@dataclass(frozen=True)
class Footprint:
    """Memory footprint of a process in macOS and Activity Monitor, including compressed pages and Metal memory.

    Attributes:
        current: Current footprint in bytes.
        peak: Maximum footprint during the life of the process, in bytes.
    """

    current: int
    peak: int


# Version and size of rusage_info_v4 of xnu's bsd/sys/resource.h, in every macOS since 10.13: 37 numbers of 64 bits, a UUID in
# the first two. Every later version starts with the same fields.
RUSAGE_VERSION = 4
RUSAGE_NUMBERS = 37
PHYS_FOOTPRINT_INDEX = 9  # ri_phys_footprint
MAX_FOOTPRINT_INDEX = 30  # ri_lifetime_max_phys_footprint


def read_footprint(library: ctypes.CDLL | None = None) -> Footprint | None:
    """Return the footprint of this process from the C library of macOS, or ``None`` if it is unavailable."""
    if library is None and sys.platform != "darwin":
        return None
    import ctypes

    library = library or ctypes.CDLL("/usr/lib/libSystem.B.dylib")
    usage = (ctypes.c_uint64 * RUSAGE_NUMBERS)()
    error_code = library.proc_pid_rusage(os.getpid(), RUSAGE_VERSION, usage)
    current = usage[PHYS_FOOTPRINT_INDEX]
    if error_code or not current:  # A process always has a footprint, so 0 means that it is unknown.
        return None
    return Footprint(current, usage[MAX_FOOTPRINT_INDEX])


def _read_cpuinfo(file: Path) -> str:
    """Return the start of Linux's ``/proc/cpuinfo``, or an empty string on other operating systems.

    The limit of 4,096 characters makes this fast on machines with hundreds of processors.
    """
    try:
        with file.open(encoding="utf-8", errors="replace") as stream:
            return stream.read(4096)
    except OSError:
        return ""


def processor_name(file: Path = CPUINFO) -> str:
    """Return the name of the first processor, or its architecture if the name is unknown, as on most ARM machines."""
    match = re.search(r"^model name\s*:[ \t]*(.+)$", _read_cpuinfo(file), re.MULTILINE)
    return (" ".join(match[1].split()) if match else "") or platform.processor() or platform.machine()


DEFAULT_SIMULATED_MEMORY = "8 GiB"  # Default RAM of a simulated Mac.
MEMORY_SIZE_PATTERN = re.compile(r"\s*(\d+(?:\.\d+)?)\s*([KMGT])i?B\s*", re.ASCII | re.IGNORECASE)
MIN_MEMORY_BYTES = 1 << 20  # Every Mac has more memory. A smaller number probably lacks its unit.


def parse_memory(memory: str | int) -> int:
    """Return a memory size in bytes. "GB" and "GiB" mean the same, because a Mac that is sold with "8 GB" has 8 GiB."""
    match = MEMORY_SIZE_PATTERN.fullmatch(memory) if isinstance(memory, str) else None
    number = float(match[1]) * 1024 ** (1 + "KMGT".index(match[2].upper())) if match else memory
    if isinstance(number, (int, float)) and not isinstance(number, bool) and MIN_MEMORY_BYTES <= number < math.inf:
        return int(number)
    raise ConfigurationError(f"{describe_value(memory)} is not a valid memory size.", "Use a size such as '8 GiB'.")


# The active simulation, if any. There is at most one per process, and its tensors belong to the thread that started it.
ACTIVE_SIMULATIONS: list[Any] = []


def is_mps_simulated() -> bool:
    """Return whether a simulated MPS device is active, without importing torch."""
    return bool(ACTIVE_SIMULATIONS)


def read_simulation() -> dict[str, Any] | None:
    """Return the state of the simulated MPS device as JSON-compatible values, or ``None`` if none is active."""
    return ACTIVE_SIMULATIONS[0].to_dict() if ACTIVE_SIMULATIONS else None


def format_device(device: str) -> str:
    """Return the name of a device for a result, with a suffix if the device is simulated."""
    name = normalize_device(device)
    return f"{name}{SIMULATED_SUFFIX}" if name == "mps" and is_mps_simulated() else name


def is_marked_simulated(device_name: str) -> bool:
    """Return whether a device name from a result has the suffix of a simulated device."""
    return device_name.endswith(SIMULATED_SUFFIX)
