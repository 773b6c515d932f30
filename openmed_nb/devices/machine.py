"""Facts of the computer, and the names of its devices."""

from __future__ import annotations

import os
import platform
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..errors import check_is_real
from .backend import TorchFacts
from .request import kind_of

MACOS_KEYS = (
    "sysctl.proc_translated",
    "hw.optional.arm64",
    "machdep.cpu.brand_string",
    "kern.osproductversion",
    "hw.memsize",
    "hw.physicalcpu",
)
"""What is asked of macOS. ``-i`` leaves out what a system does not know, such as Rosetta's flag on an old Mac."""

GPU_DRIVER_FILES = ("/proc/driver/nvidia/version", "/dev/nvidiactl", "/dev/dxg", "/dev/kfd")
"""Files that exist on Linux where a driver of NVIDIA (bare metal, WSL 2) or AMD is loaded."""


def import_psutil() -> Any:
    """Import psutil, which knows memory and processes on every system.

    Raises:
        ConfigurationError: Where a file of the person's own has its name.
    """
    import psutil

    check_is_real(psutil, "virtual_memory")
    return psutil


@dataclass(frozen=True)
class Machine:
    """What this computer is; ``None`` means that it could not be read, never a guess.

    Attributes:
        system: ``"Darwin"``, ``"Linux"`` or ``"Windows"``, as ``platform.system()`` says.
        architecture: What this Python was built for: ``"arm64"``, ``"x86_64"`` ...
        apple_silicon: Whether the processor is Apple's, also when Python runs under Rosetta.
        translated: Whether this Python runs under Rosetta.
        chip: The processor's name, such as ``"Apple M2 Pro"``.
        macos: The version of macOS, such as ``(14, 5)``.
        memory_bytes: Installed memory in bytes.
        cores: Physical cores.
        gpu_driver: Whether a driver for a CUDA or ROCm GPU is loaded.
        simulated: Whether this computer is not there: what is measured on it is no figure of such a computer.
    """

    system: str
    architecture: str
    apple_silicon: bool = False
    translated: bool = False
    chip: str | None = None
    macos: tuple[int, ...] | None = None
    memory_bytes: int | None = None
    cores: int | None = None
    gpu_driver: bool | None = None
    simulated: bool = False

    @property
    def native_apple_silicon(self) -> bool:
        """Whether this is an Apple chip and a Python built for it: what torch's MPS backend needs."""
        return self.apple_silicon and not self.translated and self.architecture == "arm64"

    @property
    def gpu(self) -> str:
        """The kind of GPU that torch uses on this system: only macOS has MPS, and it has no CUDA."""
        return "mps" if self.system == "Darwin" else "cuda"


def read_machine(
    system: str = platform.system(),
    architecture: str = platform.machine(),
    run: Callable[[list[str]], str | None] | None = None,
    exists: Callable[[str], bool] = os.path.exists,
) -> Machine:
    """Read the facts of this computer.

    Args:
        system: The operating system, as ``platform.system()`` says.
        architecture: The architecture of this Python, as ``platform.machine()`` says.
        run: Runs a command and returns its output, or ``None`` where it cannot.
        exists: Tells whether a file exists.

    Returns:
        The facts; what cannot be read is ``None``.

    Example:
        >>> read_machine("Linux", "x86_64", exists=lambda path: False).gpu_driver
        False
    """
    if system == "Darwin":
        return macos_machine(architecture, parse_sysctl((run or run_command)(["/usr/sbin/sysctl", "-i", *MACOS_KEYS])))
    if system == "Windows":
        driver = exists(str(Path(os.environ.get("SYSTEMROOT", r"C:\Windows")) / "System32" / "nvcuda.dll"))
        return Machine(system, architecture, gpu_driver=driver)
    return Machine(system, architecture, gpu_driver=any(exists(path) for path in GPU_DRIVER_FILES))


def macos_machine(architecture: str, facts: Mapping[str, str]) -> Machine:
    """Return the facts of a Mac from what ``sysctl`` said.

    Example:
        >>> mac = macos_machine("x86_64", {"sysctl.proc_translated": "1", "hw.optional.arm64": "1"})
        >>> mac.apple_silicon, mac.translated
        (True, True)
    """
    return Machine(
        system="Darwin",
        architecture=architecture,
        apple_silicon=architecture == "arm64" or facts.get("hw.optional.arm64") == "1",
        translated=facts.get("sysctl.proc_translated") == "1",
        chip=facts.get("machdep.cpu.brand_string"),
        macos=parse_version(facts.get("kern.osproductversion")),
        memory_bytes=parse_whole_number(facts.get("hw.memsize")),
        cores=parse_whole_number(facts.get("hw.physicalcpu")),
        gpu_driver=False,
    )


def apple_generation(machine: Machine) -> int | None:
    """Return which generation of Apple's chips this is: 1 for every M1, 2 for every M2; ``None`` where it is not known.

    Example:
        >>> apple_generation(Machine("Darwin", "arm64", apple_silicon=True, chip="Apple M2 Pro"))
        2
        >>> apple_generation(Machine("Darwin", "x86_64", chip="VirtualApple @ 2.50GHz processor"))
    """
    match = re.match(r"Apple M(\d+)\b", machine.chip or "", re.ASCII)
    return int(match[1]) if match else None


def parse_sysctl(output: str | None) -> dict[str, str]:
    """Return the ``name: value`` lines of ``sysctl`` as a mapping; other lines are left out.

    Example:
        >>> parse_sysctl("machdep.cpu.brand_string: Apple M4 Max")
        {'machdep.cpu.brand_string': 'Apple M4 Max'}
    """
    pairs = (line.partition(":") for line in (output or "").splitlines())
    return {name.strip(): value.strip() for name, colon, value in pairs if colon and value.strip()}


def parse_version(text: str | None) -> tuple[int, ...] | None:
    """Return a dotted version as numbers, ``None`` where there is none.

    Macs tell old programs "10.16" for every macOS from 11 on, so that answer is no answer.

    Example:
        >>> parse_version("26.6.2"), parse_version("10.16"), parse_version("")
        ((26, 6, 2), None, None)
    """
    match = re.match(r"\d+(\.\d+)*", text or "")
    version = tuple(int(part) for part in match.group().split(".")) if match else None
    return None if version and version[:2] == (10, 16) else version


def parse_whole_number(text: str | None) -> int | None:
    """Return the text as a whole number, ``None`` where it is none.

    Example:
        >>> parse_whole_number("8589934592"), parse_whole_number("many")
        (8589934592, None)
    """
    return int(text) if text and text.isdecimal() else None


def run_command(command: list[str]) -> str | None:
    """Return what a command prints within two seconds, ``None`` where it cannot be run; odd bytes become U+FFFD."""
    import subprocess

    environment = {**os.environ, "LC_ALL": "C"}
    try:
        done = subprocess.run(  # noqa: S603 - the commands are ours
            command, capture_output=True, timeout=2, env=environment, check=False, encoding="utf-8", errors="replace"
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout


CPU_FILE = Path("/proc/cpuinfo")


def own_name(device: str, machine: Machine, torch: TorchFacts) -> str:
    """Return the name of a device, such as ``"NVIDIA A100"`` or ``"Apple M2 Pro"``.

    Args:
        device: ``"mps"``, ``"cuda"``, ``"cuda:N"`` or ``"cpu"``.
        machine: The facts of this computer.
        torch: What torch says; it knows the names of GPUs.

    Example:
        >>> own_name("cuda:1", Machine("Linux", "x86_64"), TorchFacts("2.13.0", cuda_names=("NVIDIA A100", "NVIDIA T4")))
        'NVIDIA T4'
        >>> own_name("mps", Machine("Darwin", "arm64", chip="Apple M2 Pro"), TorchFacts("2.13.0"))
        'Apple M2 Pro'
    """
    if kind_of(device) == "cuda":
        index, names = int(device.partition(":")[2] or 0), torch.cuda_names or ()
        return names[index] if index < len(names) else f"GPU {index}"
    on_the_chip = machine.chip is not None and not (machine.simulated and device == "cpu")
    return str(machine.chip) if on_the_chip else processor_name()


def processor_name(file: Path = CPU_FILE) -> str:
    """Return the name of the processor, or where it has none that can be read, its architecture."""
    try:
        told = file.read_text("utf-8", "replace")
    except OSError:
        told = ""
    return parse_cpuinfo(told) or platform.processor() or platform.machine()


def parse_cpuinfo(text: str) -> str:
    r"""Return the name of the first processor in Linux' ``/proc/cpuinfo``, empty where it has none (as on most ARM).

    Example:
        >>> parse_cpuinfo("processor\t: 0\nmodel name\t: AMD EPYC 9655\n")
        'AMD EPYC 9655'
    """
    match = re.search(r"^model name\s*:[ \t]*(.+)$", text, re.MULTILINE)
    return " ".join(match[1].split()) if match else ""
