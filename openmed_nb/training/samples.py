"""One look at the memory: what the device holds, what the process holds, and the pressure on the system."""

from __future__ import annotations

import re
import sys
from dataclasses import dataclass
from typing import Any

from ..devices.allocators import allocator
from ..devices.machine import import_psutil, run_command
from ..devices.simulation import NOTE, active
from ..interface.display import Report, Shown, Table
from ..quantities import in_bytes

PRESSURE = {"1": "normal", "2": "warning", "4": "critical"}
"""The levels of macOS (``kern.memorystatus_vm_pressure_level``); 3 does not exist."""


@dataclass(frozen=True, repr=False)
class MemorySample(Shown):
    """The memory at one moment of a training, in bytes; ``None`` where there is no such figure here.

    Attributes:
        epoch: How many epochs are done, counted from 1 at the first boundary; inside an epoch, those before it.
        step: How many steps were counted until now.
        seconds: Seconds since the training began.
        boundary: Whether an epoch ended here, so that caches were emptied before the look.
        allocated: What living tensors use; on the CPU, the tensors that Python objects reach.
        reserved: What the process holds of the device, cached blocks included; none on the CPU.
        recommended: What the device should not go beyond: on MPS what Metal recommends, on CUDA the memory of the GPU, on
            the CPU that of the computer.
        peak: The most that tensors used since the sample before, where torch counts it.
        resident: The process's own memory: on macOS its unique memory, elsewhere the resident set.
        swap: What the system has put into its swap.
        pressure: The memory pressure: ``"normal"``, ``"warning"`` or ``"critical"``; only macOS says.
        simulated: Whether the device is the simulated MPS, whose figures are no figures of MPS.
    """

    epoch: int
    step: int
    seconds: float
    boundary: bool = True
    allocated: int | None = None
    reserved: int | None = None
    recommended: int | None = None
    peak: int | None = None
    resident: int | None = None
    swap: int | None = None
    pressure: str | None = None
    simulated: bool = False

    def to_dict(self) -> dict[str, Any]:
        """Return the sample as plain numbers and strings."""
        return dict(vars(self))

    def report(self) -> Report:
        """Return the figures as a table."""
        names = ("allocated", "reserved", "recommended", "peak", "resident", "swap")
        rows = tuple((name, in_bytes(getattr(self, name))) for name in names if getattr(self, name) is not None)
        where = "after epoch" if self.boundary else "in training, epochs done:"
        sentences = [f"Step {self.step}, {self.seconds:.1f} s."]
        sentences += [f"Memory pressure: {self.pressure}."] if self.pressure else []
        sentences += [NOTE] if self.simulated else []
        return Report(f"Memory {where} {self.epoch}", tuple(sentences), tables=(Table("", ("memory", "size"), rows),))


def take_sample(device: str, epoch: int, step: int, seconds: float, boundary: bool = True) -> MemorySample:
    """Return a look at the memory, and let the peak begin again.

    Args:
        device: Where the training runs: ``"cpu"``, ``"mps"``, ``"cuda"`` or ``"cuda:N"``.
        epoch: How many epochs are done.
        step: How many steps were counted.
        seconds: Seconds since the training began.
        boundary: Whether an epoch ended here.

    Example:
        >>> take_sample("cpu", 1, 100, 2.5).resident > 0
        True
    """
    memory = allocator(device).memory()
    allocator(device).reset_peak()
    return MemorySample(
        epoch,
        step,
        seconds,
        boundary,
        allocated=living_bytes() if memory.allocated is None else memory.allocated,
        reserved=memory.reserved,
        recommended=installed_bytes() if memory.recommended is None else memory.recommended,
        peak=memory.peak,
        resident=resident_bytes(),
        swap=swap_bytes(),
        pressure=parse_pressure(_ask_pressure()) if sys.platform == "darwin" else None,
        simulated=active(),
    )


def living_bytes() -> int:
    """Return the bytes of all tensors that Python objects or their autograd graphs reach."""
    from .tensors import living_tensors, storage_sizes

    return sum(storage_sizes(living_tensors()).values())


def resident_bytes() -> int:
    """Return the memory of this process in bytes.

    On macOS that is its unique memory, near the footprint that the system judges it by; the resident set leaves out some
    memory of Metal there.
    """
    psutil = import_psutil()
    process = psutil.Process()
    return int(process.memory_full_info().uss if sys.platform == "darwin" else process.memory_info().rss)


def installed_bytes() -> int:
    """Return the memory of this computer in bytes."""
    psutil = import_psutil()
    return int(psutil.virtual_memory().total)


def swap_bytes() -> int:
    """Return what is in the swap, in bytes; macOS leaves it there after use, so only its growth says something."""
    psutil = import_psutil()
    return int(psutil.swap_memory().used)


def parse_pressure(output: str | None) -> str | None:
    r"""Return the memory pressure that ``sysctl`` told, ``None`` where it told none.

    Example:
        >>> parse_pressure("2\n"), parse_pressure("3"), parse_pressure(None)
        ('warning', None, None)
    """
    match = re.fullmatch(r"\s*(\d+)\s*", output or "")
    return PRESSURE.get(match.group(1)) if match else None


def _ask_pressure() -> str | None:
    return run_command(["/usr/sbin/sysctl", "-n", "kern.memorystatus_vm_pressure_level"])
