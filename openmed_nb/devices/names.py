"""What a device calls itself: the name of its GPU or of its processor."""

from __future__ import annotations

import platform
import re
from pathlib import Path

from .backend import TorchFacts
from .machine import Machine
from .request import kind_of

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
