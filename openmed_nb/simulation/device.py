"""Begin and end a simulated MPS device; everything of torch that asks for a real one is put back at the end.

torch's Python functions (``torch.mps``, ``torch.backends.mps``, ``torch.accelerator``) stay as they are: the functions
of the C++ library below them are replaced, so that their checks and their errors are the real ones.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import sys
import threading
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, MutableMapping
from dataclasses import dataclass
from typing import Any, ClassVar
from unittest import mock

import torch
from torch import Generator as CpuGenerator  # A simulation replaces the name in torch.
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils import _device as default_device

from .._render.display import Displayable, Report, Table, pluralize
from .._utils.validation import check_bool
from ..devices import backend
from ..devices.computer import DeviceManager
from ..devices.environment import FALLBACK_VARIABLE, preserve_variables
from ..devices.machine import ACTIVE_SIMULATIONS, DEFAULT_SIMULATED_MEMORY, MachineInfo, parse_memory
from ..devices.profilers import push_modes
from ..errors import DeviceUnavailableError
from .memory import MacMemory, SimulatedAllocator, format_size
from .modes import DeviceCopy, DeviceStorages, FunctionMode, OperatorMode, SimulatedDevice, storage_key
from .operators import Defect, FallbackPolicy, OperatorCall, validate_defects

CHIP = "Apple Silicon (SIMULATED)"
MACOS = (15, 5)

CAPTURE_ERROR = 'Error Domain=MTLCaptureError Code=1 "Capture layer is not inserted."'  # Metal's own words.

# Functions that remember whether there is an MPS device.
CACHED_AVAILABILITY = (
    ("torch.backends.mps", "is_available"),
    ("transformers.utils.import_utils", "is_torch_mps_available"),
    ("accelerate.utils.imports", "is_mps_available"),
)

# Accelerate's classes that keep one state for the process, with its device.
SHARED_STATES = ("PartialState", "AcceleratorState", "GradientState")

# Functions of torch._C that have nothing to do where there is one device, which computes at once, or that give its number.
NOOP_FUNCTIONS = (
    *("_mps_deviceSynchronize", "_accelerator_synchronizeDevice"),
    *("_accelerator_setDeviceIndex", "_accelerator_emptyHostCache"),
)
FIRST_DEVICE = ("_accelerator_getDeviceIndex", "_accelerator_exchangeDevice", "_accelerator_maybeExchangeDevice")


@dataclass(frozen=True, repr=False)
class SimulatedMps(Displayable):
    """A simulated MPS device that computes on the CPU; nothing that is measured under it is a figure of MPS.

    It does not reproduce the numbers of MPS, its speed, its random numbers (they are the CPU's), the 16-bit types of
    ``torch.autocast("mps")``, what it caches for the shapes of graphs, or ``torch.mps.event``; ``torch.mps.profiler`` records nothing.

    Attributes:
        allocator: Its memory: ``allocated``, ``driver``, ``peak``, ``emptied``, ``memory.recommended`` ... in bytes.
        defects: The silent errors that it was given.
    """

    allocator: SimulatedAllocator
    _device: SimulatedDevice
    defects: tuple[Defect, ...] = ()

    simulated: ClassVar[bool] = True  # What is shown of this device says so.

    @property
    def copies(self) -> list[DeviceCopy]:
        """The copies between the devices, with the two devices and whether the program was to go on meanwhile."""
        return self._device.copies

    @property
    def call_counts(self) -> Counter[str]:
        """How often each function of torch was called with a tensor of the device."""
        return self._device.call_counts

    @property
    def fallbacks(self) -> Counter[str]:
        """How often each operator that MPS does not have fell back to the CPU."""
        return self._device.fallbacks.counts

    @property
    def cache_clears(self) -> int:
        """How often the cache was emptied by request."""
        return self.allocator.emptied

    def contains(self, tensor: torch.Tensor) -> bool:
        """Tell whether a tensor is on the device."""
        return self._device.storages.contains(tensor)

    def to_dict(self) -> dict[str, Any]:
        """Return the state of the device as a mapping, ready for JSON; memory in bytes."""
        memory = {name: getattr(self.allocator, name) for name in ("allocated", "driver_allocated", "peak", "limit")}
        installed = {"installed": self.allocator.memory.installed, "recommended": self.allocator.memory.recommended}
        seen = {"fallbacks": dict(self.fallbacks), "emptied": self.cache_clears}
        return {"simulated": True, **installed, **memory, **seen, "defects": [one.issue for one in self.defects]}

    def to_report(self) -> Report:
        """Return what there is to show: the memory, and the operators that fell back."""
        figures = self.to_dict()
        names = ("installed", "recommended", "limit", "allocated", "driver_allocated", "peak")
        rows = tuple((name, "no limit" if figures[name] is None else format_size(figures[name])) for name in names)
        counts = tuple((name, str(count)) for name, count in self.fallbacks.most_common())
        errors = tuple((defect.issue, defect.description) for defect in self.defects)
        tables = (
            Table("Memory", ("what", "size"), rows),
            Table("Fell back to the CPU", ("operator", "times"), counts),
            Table("Silent errors that it was given", ("issue", "what goes wrong"), errors),
        )
        fell = pluralize(sum(self.fallbacks.values()), "call")
        held = f"{format_size(figures['allocated'])} of {format_size(figures['recommended'])} in use, {fell} fell back to the CPU"
        return Report("MPS device (SIMULATED)", tables=tables, html_sentences=(f"MPS device (SIMULATED): {held}",))


@contextlib.contextmanager
def simulated_device(
    memory: str | int = DEFAULT_SIMULATED_MEMORY,
    fallback: bool | None = None,
    environ: MutableMapping[str, str] | None = None,
    defects: str | Iterable[str] = (),
) -> Iterator[SimulatedMps]:
    """Let torch have a simulated MPS device in this thread.

    Tensors on it are CPU tensors that say ``mps:0``, and afterwards plain CPU tensors. What ``torch.mps`` answers is
    replaced for the whole process; tensors of other threads stay on the CPU.
    """
    environ = os.environ if environ is None else environ
    mac, planted = MacMemory(parse_memory(memory)), validate_defects(defects)
    if ACTIVE_SIMULATIONS:
        what = "A simulated MPS device is on already, and there can be only one."
        raise DeviceUnavailableError(what, "End it first: %openmed_device --simulate off, or leave its with block.")
    allocator = SimulatedAllocator(mac, environ)
    # torch 2.13 reads anything but exactly 0 as on.
    fallbacks = FallbackPolicy(environ.get(FALLBACK_VARIABLE, "0") != "0" if fallback is None else fallback)
    wrong: dict[str, list[Callable[[OperatorCall], Any]]] = {}
    for defect in planted:
        for operator in defect.operators:
            wrong.setdefault(operator, []).append(defect.compute)
    device = SimulatedDevice(allocator, fallbacks, DeviceStorages(allocator), active_defects=wrong)
    functions = FunctionMode(device)
    shown = SimulatedMps(allocator, device, planted)
    ACTIVE_SIMULATIONS.append(shown)
    try:
        with (
            preserve_variables([FALLBACK_VARIABLE], os.environ),  # Accelerate switches it on wherever it finds MPS.
            restore_default_device(),
            patch_libraries(allocator, device.storages, functions.seeing),
            push_modes(OperatorMode(device), functions),
        ):
            yield shown
    finally:
        ACTIVE_SIMULATIONS.clear()


@contextlib.contextmanager
def restore_default_device() -> Iterator[None]:
    """Take a default device of torch back at the end where it is one of MPS, which is gone then."""
    yield
    if getattr(default_device.CURRENT_DEVICE, "type", "") == "mps":  # torch's own question makes a tensor on it.
        torch.set_default_device(None)


class SimulatedTorch:
    """Answers for torch on the simulated Mac; it counts as loaded from the moment in which its device begins."""

    device: SimulatedMps | None = None
    inspect_installed_torch = staticmethod(backend.inspect_installed_torch)
    inspect_imported_torch = staticmethod(backend.inspect_imported_torch)
    probe_device = staticmethod(backend.probe_device)

    def is_torch_imported(self) -> bool:
        return self.device is not None

    def is_mps_allocator_initialized(self) -> bool | None:
        return self.device is not None and self.device.allocator.initialized


@contextlib.contextmanager
def simulated_computer(
    memory: str | int, fallback: bool | None, environ: MutableMapping[str, str], defects: str | Iterable[str] = ()
) -> Iterator[tuple[DeviceManager, SimulatedMps]]:
    """Begin a simulated Mac with its device, and end it.

    The MPS variables are applied before the device begins, as in a kernel whose first line is ``%load_ext openmed_nb``,
    and are taken back at the end.
    """
    if fallback is not None:
        check_bool("fallback", fallback)
    torch, installed = SimulatedTorch(), parse_memory(memory)
    machine = MachineInfo(
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
    computer = DeviceManager(environ, lambda: machine, torch)
    with preserve_variables([FALLBACK_VARIABLE], environ):
        if fallback is not None:
            environ[FALLBACK_VARIABLE] = str(int(fallback))
        try:
            computer.apply_mps_variables()
            with simulated_device(installed, None, environ, defects) as torch.device:
                yield computer, torch.device
        finally:
            computer.restore_device_variable()
            computer.restore_mps_variables()


def mps_library_functions(allocator: SimulatedAllocator) -> dict[str, Any]:
    """Return what answers for the functions of ``torch._C``."""
    mps, profiler = torch.device("mps"), MpsProfiler()
    memory = allocator.memory
    return {
        "_has_mps": True,
        "_mps_is_available": lambda: True,
        "_mps_is_on_macos_or_newer": lambda major, minor: (major, minor) <= MACOS,
        "_mps_get_name": lambda: CHIP,
        "_mps_get_core_count": lambda: 8,
        "_mps_get_default_generator": lambda: torch.default_generator,
        "_mps_emptyCache": allocator.empty_cache,
        "_mps_setMemoryFraction": allocator.set_fraction,
        "_mps_currentAllocatedMemory": initializing(allocator, lambda: allocator.allocated),
        "_mps_driverAllocatedMemory": initializing(allocator, lambda: allocator.driver_allocated),
        "_mps_recommendedMaxMemory": initializing(allocator, lambda: memory.recommended),
        "_mps_maxBufferLength": initializing(allocator, lambda: memory.largest_buffer),
        "_mps_profilerStartTrace": profiler.start_trace,
        "_mps_profilerStopTrace": profiler.stop_trace,
        "_mps_isCaptureEnabled": lambda: False,
        "_mps_isCapturing": lambda: False,
        "_mps_startCapture": profiler.start_capture,
        "_mps_stopCapture": lambda: None,
        "_accelerator_getAccelerator": lambda: mps,
        "_get_accelerator": lambda _check=None: mps,
        **dict.fromkeys(NOOP_FUNCTIONS, lambda *_index: None),
        **dict.fromkeys(FIRST_DEVICE, lambda *_index: 0),
        "_accelerator_getStream": lambda _index=None: torch.Stream(device="cpu"),
        "_accelerator_isAllocatorInitialized": lambda: True,
        "_accelerator_emptyCache": allocator.empty_cache,
        "_accelerator_getDeviceStats": initializing(allocator, lambda _index=None: statistics(allocator)),
        "_accelerator_resetPeakStats": initializing(allocator, lambda _index=None: allocator.reset_peak()),
        "_accelerator_resetAccumulatedStats": initializing(allocator, lambda _index=None: None),
        "_accelerator_getMemoryInfo": initializing(
            allocator, lambda _index=None: (max(0, memory.recommended - allocator.driver_allocated), memory.recommended)
        ),
    }


class SimulatedGenerator(CpuGenerator):
    """A generator that says that it is one of MPS; its random numbers are those of the CPU."""

    @property
    def device(self) -> torch.device:
        return torch.device("mps", 0)


class _GeneratorType(type):
    """The type of ``torch.Generator`` in a simulation: it makes generators of the real types, and knows them as its own."""

    def __call__(cls, device: Any = "cpu") -> torch.Generator:
        return SimulatedGenerator() if torch.device(device).type == "mps" else CpuGenerator(device)

    def __instancecheck__(cls, thing: Any) -> bool:
        return isinstance(thing, CpuGenerator)


class GeneratorOfAnyDevice(metaclass=_GeneratorType):
    """What answers for ``torch.Generator`` in a simulation."""


class MpsProfiler:
    """Takes and refuses what ``torch.mps.profiler`` asks for, as a Mac without ``MTL_CAPTURE_ENABLED`` does (MPSProfiler.mm)."""

    def __init__(self) -> None:
        self._tracing, self._captures = False, itertools.count()

    def start_trace(self, mode: str, _wait: bool) -> None:
        if self._tracing:
            raise RuntimeError("Tracing Signposts is already enabled ")
        for word in filter(None, mode.split(",")):
            if word not in {"interval", "event"}:
                raise RuntimeError(f"Invalid Signpost trace mode: {word}")
            self._tracing = True

    def stop_trace(self) -> None:
        self._tracing = False

    def start_capture(self, name: str) -> None:
        file = f"{next(self._captures):04d}-{name}.gputrace"
        raise RuntimeError(f"Failed to start capture of {file} error {CAPTURE_ERROR}")


def initializing(allocator: SimulatedAllocator, answer: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function that reads the watermarks before it answers: asking for memory is a first touch."""

    def touched(*args: Any) -> Any:
        allocator.initialize()
        return answer(*args)

    return touched


def statistics(allocator: SimulatedAllocator) -> dict[str, Any]:
    """Return the figures of ``torch.accelerator.memory_stats``, which MPS has since torch 2.13."""
    allocated = {"current": allocator.allocated, "peak": allocator.peak}
    reserved = {"current": allocator.driver_allocated, "peak": allocator.driver_peak}
    return {"allocated_bytes": {"all": allocated}, "reserved_bytes": {"all": reserved}}


def tensor_properties(storages: DeviceStorages) -> dict[str, Any]:
    """Return what answers for the properties of a tensor, in this thread."""
    mps, home = torch.device("mps", 0), threading.get_ident()

    def answering(name: str, here: Any) -> property:
        real = getattr(torch.Tensor, name)

        def answer(tensor: torch.Tensor) -> Any:
            if threading.get_ident() == home and storages.contains(tensor):
                return here
            with torch._C.DisableTorchFunction():  # noqa: SLF001 - a mode would ask this very function
                return real.__get__(tensor)

        return property(answer)

    return {name: answering(name, here) for name, here in (("device", mps), ("is_mps", True), ("is_cpu", False))}


def storage_methods(storages: DeviceStorages) -> dict[str, Any]:
    """Return what answers for the methods of a storage, which saving and loading ask for the device."""
    mps, real = torch.device("mps", 0), torch.UntypedStorage.device

    def copied(storage: torch.UntypedStorage) -> torch.UntypedStorage:
        return torch.UntypedStorage(storage.nbytes()).copy_(storage, False)

    def to_mps(storage: torch.UntypedStorage) -> torch.UntypedStorage:
        if storage_key(storage) in storages:
            return storage
        copy = copied(storage)
        storages.add(torch.empty(0, dtype=torch.uint8, device="cpu").set_(copy))
        return copy

    return {
        "device": property(lambda storage: mps if storage_key(storage) in storages else real.__get__(storage)),
        "clone": lambda storage: to_mps(copied(storage)) if storage_key(storage) in storages else copied(storage),
        "mps": to_mps,
    }


normalized = FakeTensor._normalize_fake_device  # noqa: SLF001 - torch has no public name for it


def device_of_fake(device: torch.device) -> torch.device:
    """Return the device of a FakeTensor, which is the CPU for one of MPS.

    The engine of autograd looks for the streams of a tensor's device, and ends the process where torch was built without it.
    """
    return torch.device("cpu") if device.type == "mps" else normalized(device)


@contextlib.contextmanager
def patch_libraries(
    allocator: SimulatedAllocator, storages: DeviceStorages, seeing: Callable[[Callable[..., Any]], Callable[..., Any]]
) -> Iterator[None]:
    """Let torch, transformers and Accelerate find an MPS device."""
    rows = [
        *((torch._C, name, answer) for name, answer in mps_library_functions(allocator).items()),  # noqa: SLF001
        *((torch.Tensor, name, answer) for name, answer in tensor_properties(storages).items()),
        *((torch.UntypedStorage, name, method) for name, method in storage_methods(storages).items()),
        (torch, "Generator", GeneratorOfAnyDevice),
        (torch.mps, "_default_mps_generator", torch.default_generator),
        (torch.autograd, "_engine_run_backward", seeing(torch.autograd._engine_run_backward)),  # noqa: SLF001
        (FakeTensor, "_normalize_fake_device", staticmethod(device_of_fake)),
        (torch.cuda, "is_available", lambda: False),
        (torch.cuda, "device_count", lambda: 0),
    ]
    with contextlib.ExitStack() as undo:
        undo.callback(clear_cached_availability)
        for owner, name, answer in rows:
            undo.enter_context(mock.patch.object(owner, name, answer, create=True))
        clear_cached_availability()
        undo.enter_context(preserve_accelerate_state())
        yield


def clear_cached_availability() -> None:
    """Let the functions that remember whether there is an MPS device look again."""
    for module, name in CACHED_AVAILABILITY:
        forget = getattr(getattr(sys.modules.get(module), name, None), "cache_clear", None)
        if forget is not None:
            forget()


@contextlib.contextmanager
def preserve_accelerate_state() -> Iterator[None]:
    """Put Accelerate's states of the process aside, and give them back, so that an Accelerator of before works on."""
    before = [(state, dict(state)) for state in _shared_states()]
    for state, _content in before:
        state.clear()
    try:
        yield
    finally:
        kept = {id(state): content for state, content in before}
        for state in _shared_states():
            state.clear()
            state.update(kept.get(id(state), {}))


def _shared_states() -> list[dict[str, Any]]:
    module = sys.modules.get("accelerate.state")
    return [getattr(module, name)._shared_state for name in SHARED_STATES] if module else []  # noqa: SLF001
