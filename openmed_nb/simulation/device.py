"""Begin and end a simulated MPS device."""

from __future__ import annotations

import contextlib
import math
import os
import re
from collections import Counter
from collections.abc import Iterable, Iterator, MutableMapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from ..devices import backend
from ..devices.computer import Computer
from ..devices.environment import FALLBACK
from ..devices.machine import Machine
from ..devices.profilers import modes_on
from ..devices.simulated import _ACTIVE, DEFAULT_MEMORY
from ..display import Report, Shown, Table
from ..errors import ConfigurationError, DeviceUnavailable, check_flag, shorten
from .defects import Defect, checked_defects
from .memory import MacMemory, SimulatedAllocator
from .operators import Fallbacks, size
from .patches import CHIP, MACOS

if TYPE_CHECKING:
    import torch

    from .modes import Copy, Storages


MEMORY = re.compile(r"\s*(\d+(?:\.\d+)?)\s*([KMGT])i?B\s*", re.ASCII | re.IGNORECASE)
SMALLEST = 1 << 20  # A Mac has more memory than that; a smaller number is one without its unit.

POWERS = {"K": 10, "M": 20, "G": 30, "T": 40}

END_IT = "End it first: %openmed_device --simulate off, or leave its with block."


@dataclass(frozen=True, repr=False)
class SimulatedMps(Shown):
    """A simulated MPS device that computes on the CPU; nothing that is measured under it is a figure of MPS.

    It does not reproduce the numbers of MPS, its speed, its random numbers (they are the CPU's), the 16-bit types of
    ``torch.autocast("mps")``, what it caches for the shapes of graphs, or ``torch.mps.event`` and ``torch.mps.profiler``.

    Attributes:
        allocator: Its memory: ``allocated``, ``driver``, ``peak``, ``emptied``, ``memory.recommended`` ... in bytes.
        defects: The silent errors that it was given.
    """

    allocator: SimulatedAllocator
    _fallbacks: Fallbacks
    _storages: Storages
    _copies: list[Copy] = field(default_factory=list)
    _called: Counter[str] = field(default_factory=Counter)
    defects: tuple[Defect, ...] = ()

    @property
    def copies(self) -> list[Copy]:
        """The copies between the devices, with the two devices and whether the program was to go on meanwhile."""
        return self._copies

    @property
    def called(self) -> Counter[str]:
        """How often each function of torch was called with a tensor of the device."""
        return self._called

    @property
    def emptied(self) -> int:
        """How often the cache was emptied by request."""
        return self.allocator.emptied

    @property
    def fallbacks(self) -> Counter[str]:
        """How often each operator that MPS does not have fell back to the CPU."""
        return self._fallbacks.counts

    @property
    def simulated(self) -> bool:
        """True: what is shown of this device says so."""
        return True

    def holds(self, tensor: torch.Tensor) -> bool:
        """Tell whether a tensor is on the device."""
        return self._storages.holds(tensor)

    def to_dict(self) -> dict[str, Any]:
        """Return the state of the device as a mapping, ready for JSON; memory in bytes."""
        memory = {name: getattr(self.allocator, name) for name in ("allocated", "driver", "peak", "allowed")}
        installed = {"installed": self.allocator.memory.installed, "recommended": self.allocator.memory.recommended}
        seen = {"fallbacks": dict(self.fallbacks), "emptied": self.emptied}
        return {"simulated": True, **installed, **memory, **seen, "defects": [one.issue for one in self.defects]}

    def report(self) -> Report:
        """Return what there is to show: the memory, and the operators that fell back."""
        figures = self.to_dict()
        names = ("installed", "recommended", "allowed", "allocated", "driver", "peak")
        rows = tuple((name, "no limit" if figures[name] is None else size(figures[name])) for name in names)
        counts = tuple((name, str(count)) for name, count in self.fallbacks.most_common())
        errors = tuple((defect.issue, defect.what) for defect in self.defects)
        tables = (
            Table("Memory", ("what", "size"), rows),
            Table("Fell back to the CPU", ("operator", "times"), counts),
            Table("Silent errors that it was given", ("issue", "what goes wrong"), errors),
        )
        return Report("MPS device (SIMULATED)", tables=tables)


@contextlib.contextmanager
def simulated_device(
    memory: str | int = DEFAULT_MEMORY,
    fallback: bool | None = None,
    environ: MutableMapping[str, str] | None = None,
    defects: str | Iterable[str] = (),
) -> Iterator[SimulatedMps]:
    """Let torch have a simulated MPS device in this thread.

    Tensors on it are CPU tensors that say ``mps:0``, and afterwards plain CPU tensors. What ``torch.mps`` answers is
    replaced for the whole process; tensors of other threads stay on the CPU.
    """
    environ = os.environ if environ is None else environ
    installed, planted = parse_memory(memory), checked_defects(defects)
    if _ACTIVE:
        raise DeviceUnavailable("A simulated MPS device is on already, and there can be only one.", END_IT)
    from .modes import Device, FunctionMode, OperatorMode, Storages
    from .patches import patched

    allocator = SimulatedAllocator(MacMemory(installed), environ)
    # torch 2.13 reads anything but exactly 0 as on.
    fallbacks = Fallbacks(environ.get(FALLBACK, "0") != "0" if fallback is None else fallback)
    wrong = {operator: defect.compute for defect in planted for operator in defect.operators}
    device = Device(allocator, fallbacks, Storages(allocator), wrong=wrong)
    functions = FunctionMode(device)
    shown = SimulatedMps(allocator, fallbacks, device.storages, device.copies, device.called, planted)
    _ACTIVE.append(shown)
    try:
        with (
            kept(FALLBACK, os.environ),
            default_device_given_back(),
            patched(allocator, device.storages, functions.seeing),
            modes_on(OperatorMode(device), functions),
        ):
            yield shown
    finally:
        _ACTIVE.clear()


@contextlib.contextmanager
def kept(name: str, environ: MutableMapping[str, str]) -> Iterator[None]:
    """Give a variable its value back at the end; Accelerate switches the fallback on wherever it finds MPS."""
    before = environ.get(name)
    try:
        yield
    finally:
        environ.pop(name, None)
        environ.update({} if before is None else {name: before})


@contextlib.contextmanager
def default_device_given_back() -> Iterator[None]:
    """Take a default device of torch back at the end where it is one of MPS, which is gone then."""
    import torch
    from torch.utils import _device as default_device

    yield
    if getattr(default_device.CURRENT_DEVICE, "type", "") == "mps":  # torch's own question makes a tensor on it.
        torch.set_default_device(None)


def parse_memory(memory: str | int) -> int:
    """Return an amount of memory in bytes; a Mac that is sold with "8 GB" has 8 GiB, so both mean that."""
    match = MEMORY.fullmatch(memory) if isinstance(memory, str) else None
    number = float(match[1]) * 2 ** POWERS[match[2].upper()] if match else memory
    if isinstance(number, (int, float)) and not isinstance(number, bool) and SMALLEST <= number < math.inf:
        return int(number)
    raise ConfigurationError(f"{shorten(repr(memory))} is not an amount of memory.", "Use one such as '8 GiB'.")


class SimulatedTorch:
    """Answers for torch on the simulated Mac; it counts as loaded from the moment in which its device begins."""

    def __init__(self) -> None:
        self.device: SimulatedMps | None = None

    installed_torch = staticmethod(backend.installed_torch)
    loaded_torch = staticmethod(backend.loaded_torch)
    probe = staticmethod(backend.probe)

    def torch_is_loaded(self) -> bool:
        return self.device is not None

    def mps_allocator_started(self) -> bool | None:
        return self.device is not None and self.device.allocator.started


@contextlib.contextmanager
def simulated_computer(
    memory: str | int,
    fallback: bool | None,
    environ: MutableMapping[str, str],
    defects: str | Iterable[str] = (),
) -> Iterator[tuple[Computer, SimulatedMps]]:
    """Begin a simulated Mac with its device, and end it.

    The MPS variables are applied before the device begins, as in a kernel whose first line is ``%load_ext openmed_nb``,
    and are taken back at the end.
    """
    if fallback is not None:
        check_flag("fallback", fallback)
    torch, installed = SimulatedTorch(), parse_memory(memory)
    machine = Machine(
        "Darwin",
        "arm64",
        apple_silicon=True,
        chip=CHIP,
        macos=MACOS,
        memory_bytes=installed,
        cores=os.cpu_count(),
        gpu_driver=False,
        simulated=True,
    )
    computer = Computer(environ, lambda: machine, torch)
    with kept(FALLBACK, environ):
        if fallback is not None:
            environ[FALLBACK] = str(int(fallback))
        try:
            computer.enter_mps()
            with simulated_device(installed, None, environ, defects) as torch.device:
                yield computer, torch.device
        finally:
            computer.unpublish()
            computer.leave_mps()
