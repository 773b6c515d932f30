"""Start and stop a simulated MPS device; all replaced functions of torch are restored at the end.

The Python functions of torch (``torch.mps``, ``torch.backends.mps``, ``torch.accelerator``) are unchanged. Only the
functions of the C++ library below them are replaced, so that their checks and errors are the real ones.
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
from functools import partial
from typing import Any, ClassVar, TypeVar
from unittest import mock

import torch
from torch import Generator as CpuGenerator  # A simulation replaces this name in torch.
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

Value = TypeVar("Value")
# Memory statistics by name, pool and kind.
MemoryStats = dict[str, dict[str, dict[str, int]]]

CHIP = "Apple Silicon (SIMULATED)"
MACOS = (15, 5)

CAPTURE_ERROR = 'Error Domain=MTLCaptureError Code=1 "Capture layer is not inserted."'  # Original text of Metal.

# Functions that cache whether an MPS device is available.
CACHED_AVAILABILITY = (
    ("torch.backends.mps", "is_available"),
    ("transformers.utils.import_utils", "is_torch_mps_available"),
    ("accelerate.utils.imports", "is_mps_available"),
)

# Classes of Accelerate that share one state per process, including its device.
SHARED_STATES = ("PartialState", "AcceleratorState", "GradientState")

# Functions of torch._C that have no effect with a single synchronous device, or that return its index.
NOOP_FUNCTIONS = (
    "_mps_deviceSynchronize",
    "_accelerator_synchronizeDevice",
    "_accelerator_setDeviceIndex",
    "_accelerator_emptyHostCache",
)
FIRST_DEVICE = ("_accelerator_getDeviceIndex", "_accelerator_exchangeDevice", "_accelerator_maybeExchangeDevice")


@dataclass(frozen=True, repr=False)
class SimulatedMps(Displayable):
    """Simulated MPS device that computes on the CPU; its measurements do not represent real MPS hardware.

    It does not reproduce the numerical results of MPS, its speed, its random numbers (they are those of the CPU), the
    16-bit types of ``torch.autocast("mps")``, its caches for graph shapes, or ``torch.mps.event``.
    ``torch.mps.profiler`` records nothing.

    Attributes:
        allocator: Its memory in bytes, such as ``allocated``, ``driver_allocated``, ``peak`` and
            ``memory.recommended``.
        defects: Its simulated silent errors.
    """

    allocator: SimulatedAllocator
    _device: SimulatedDevice
    defects: tuple[Defect, ...] = ()

    simulated: ClassVar[bool] = True  # Reports of this device are labeled.

    @property
    def copies(self) -> list[DeviceCopy]:
        """Copies between the devices, with both devices and whether they were non-blocking."""
        return self._device.copies

    @property
    def call_counts(self) -> Counter[str]:
        """Number of calls of each torch function with a tensor of the device."""
        return self._device.call_counts

    @property
    def fallbacks(self) -> Counter[str]:
        """Number of times that each unsupported operator fell back to the CPU."""
        return self._device.fallbacks.counts

    @property
    def cache_clears(self) -> int:
        """Number of times that the cache was emptied by request."""
        return self.allocator.emptied

    def contains(self, tensor: torch.Tensor) -> bool:
        """Return whether a tensor is on the device."""
        return self._device.storages.contains(tensor)

    def to_dict(self) -> dict[str, Any]:
        """Return the state of the device as JSON-compatible values; memory in bytes."""
        memory = {name: getattr(self.allocator, name) for name in ("allocated", "driver_allocated", "peak", "limit")}
        installed = {"installed": self.allocator.memory.installed, "recommended": self.allocator.memory.recommended}
        counters = {"fallbacks": dict(self.fallbacks), "cache_clears": self.cache_clears}
        defects = [defect.issue for defect in self.defects]
        return {"simulated": True, **installed, **memory, **counters, "defects": defects}

    def to_report(self) -> Report:
        """Return the memory, and the operators that fell back to the CPU."""
        metrics = self.to_dict()
        names = ("installed", "recommended", "limit", "allocated", "driver_allocated", "peak")
        rows = tuple((name, "no limit" if metrics[name] is None else format_size(metrics[name])) for name in names)
        counts = tuple((name, str(count)) for name, count in self.fallbacks.most_common())
        errors = tuple((defect.issue, defect.description) for defect in self.defects)
        tables = (
            Table("Memory", ("memory", "size"), rows),
            Table("Fell back to the CPU", ("operator", "count"), counts),
            Table("Simulated silent errors", ("issue", "description"), errors),
        )
        calls = pluralize(sum(self.fallbacks.values()), "call")
        summary = f"{format_size(metrics['allocated'])} of {format_size(metrics['recommended'])} in use, {calls} fell back to the CPU"
        return Report("MPS device (SIMULATED)", tables=tables, html_sentences=(f"MPS device (SIMULATED): {summary}",))


@contextlib.contextmanager
def simulated_device(
    memory: str | int = DEFAULT_SIMULATED_MEMORY,
    fallback: bool | None = None,
    environ: MutableMapping[str, str] | None = None,
    defects: str | Iterable[str] = (),
) -> Iterator[SimulatedMps]:
    """Provide torch with a simulated MPS device in this thread.

    Tensors on it are CPU tensors that report ``mps:0``; afterwards they are ordinary CPU tensors. The functions below
    ``torch.mps`` are replaced for the whole process, but tensors of other threads stay on the CPU.
    """
    environ = os.environ if environ is None else environ
    mac = MacMemory(parse_memory(memory))
    active = validate_defects(defects)
    if ACTIVE_SIMULATIONS:
        message = "A simulated MPS device is already active; only one is supported."
        raise DeviceUnavailableError(
            message, "Stop it first: run %openmed_device --simulate off, or leave its with block."
        )
    allocator = SimulatedAllocator(mac, environ)
    # torch 2.13 treats any value except exactly 0 as enabled.
    fallbacks = FallbackPolicy(environ.get(FALLBACK_VARIABLE, "0") != "0" if fallback is None else fallback)
    active_defects: dict[str, list[Callable[[OperatorCall], Any]]] = {}
    for defect in active:
        for operator in defect.operators:
            active_defects.setdefault(operator, []).append(defect.compute)
    device = SimulatedDevice(allocator, fallbacks, DeviceStorages(allocator), active_defects=active_defects)
    functions = FunctionMode(device)
    simulated = SimulatedMps(allocator, device, active)
    ACTIVE_SIMULATIONS.append(simulated)
    try:
        with (
            preserve_variables([FALLBACK_VARIABLE], os.environ),  # Accelerate sets it whenever it finds MPS.
            _restore_default_device(),
            _patch_libraries(allocator, device.storages, functions.wrap_backward),
            push_modes(OperatorMode(device), functions),
        ):
            yield simulated
    finally:
        ACTIVE_SIMULATIONS.clear()


@contextlib.contextmanager
def _restore_default_device() -> Iterator[None]:
    """Reset the default device of torch at the end if it is the simulated MPS device."""
    yield
    if (
        getattr(default_device.CURRENT_DEVICE, "type", "") == "mps"
    ):  # torch.get_default_device() would create a tensor on it.
        torch.set_default_device(None)


class SimulatedTorch:
    """Torch adapter of the simulated Mac; torch counts as imported from the start of its device."""

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
    """Start a simulated Mac with its device, and stop it.

    The MPS variables are applied before the device starts, as in a kernel whose first line is ``%load_ext openmed_nb``.
    They are restored at the end.
    """
    if fallback is not None:
        check_bool("fallback", fallback)
    torch = SimulatedTorch()
    installed = parse_memory(memory)
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


def _make_library_functions(allocator: SimulatedAllocator) -> dict[str, Any]:
    """Return the replacements for the functions of ``torch._C``."""
    memory = allocator.memory
    profiler = MpsProfiler()

    def is_on_macos_or_newer(major: int, minor: int) -> bool:
        return (major, minor) <= MACOS

    def get_stream(_index: int | None = None) -> torch.Stream:
        return torch.Stream(device="cpu")

    def get_memory_info(_index: int | None = None) -> tuple[int, int]:
        return max(0, memory.recommended - allocator.driver_allocated), memory.recommended

    def get_memory_stats(_index: int | None = None) -> MemoryStats:
        return _make_memory_stats(allocator)

    def reset_peak_stats(_index: int | None = None) -> None:
        allocator.reset_peak()

    get_mps = _make_constant_function(torch.device("mps"))
    return {
        "_has_mps": True,
        "_mps_is_available": _make_constant_function(True),
        "_mps_is_on_macos_or_newer": is_on_macos_or_newer,
        "_mps_get_name": _make_constant_function(CHIP),
        "_mps_get_core_count": _make_constant_function(8),
        "_mps_get_default_generator": _make_constant_function(torch.default_generator),
        "_mps_emptyCache": allocator.empty_cache,
        "_mps_setMemoryFraction": allocator.set_fraction,
        "_mps_currentAllocatedMemory": _initialize_before(allocator, partial(getattr, allocator, "allocated")),
        "_mps_driverAllocatedMemory": _initialize_before(allocator, partial(getattr, allocator, "driver_allocated")),
        "_mps_recommendedMaxMemory": _initialize_before(allocator, partial(getattr, memory, "recommended")),
        "_mps_maxBufferLength": _initialize_before(allocator, partial(getattr, memory, "largest_buffer")),
        "_mps_profilerStartTrace": profiler.start_trace,
        "_mps_profilerStopTrace": profiler.stop_trace,
        "_mps_isCaptureEnabled": _make_constant_function(False),
        "_mps_isCapturing": _make_constant_function(False),
        "_mps_startCapture": profiler.start_capture,
        "_mps_stopCapture": _make_constant_function(None),
        "_accelerator_getAccelerator": get_mps,
        "_get_accelerator": get_mps,
        **dict.fromkeys(NOOP_FUNCTIONS, _make_constant_function(None)),
        **dict.fromkeys(FIRST_DEVICE, _make_constant_function(0)),
        "_accelerator_getStream": get_stream,
        "_accelerator_isAllocatorInitialized": _make_constant_function(True),
        "_accelerator_emptyCache": allocator.empty_cache,
        "_accelerator_getDeviceStats": _initialize_before(allocator, get_memory_stats),
        "_accelerator_resetPeakStats": _initialize_before(allocator, reset_peak_stats),
        "_accelerator_resetAccumulatedStats": _initialize_before(allocator, _make_constant_function(None)),
        "_accelerator_getMemoryInfo": _initialize_before(allocator, get_memory_info),
    }


def _make_constant_function(value: Value) -> Callable[..., Value]:
    """Return a function that ignores its arguments and returns a value."""

    def get_value(*_args: object) -> Value:
        return value

    return get_value


class SimulatedGenerator(CpuGenerator):
    """Generator that reports the device MPS; its random numbers are those of the CPU."""

    @property
    def device(self) -> torch.device:
        return torch.device("mps", 0)


class _GeneratorType(type):
    """Metaclass in place of the type of ``torch.Generator``: it creates and recognizes generators of both devices."""

    def __call__(cls, device: Any = "cpu") -> torch.Generator:
        return SimulatedGenerator() if torch.device(device).type == "mps" else CpuGenerator(device)

    def __instancecheck__(cls, instance: Any) -> bool:
        return isinstance(instance, CpuGenerator)


class SimulatedGeneratorFactory(metaclass=_GeneratorType):
    """Replacement for ``torch.Generator`` in a simulation."""


class MpsProfiler:
    """Replacement for ``torch.mps.profiler`` of a Mac without ``MTL_CAPTURE_ENABLED`` (MPSProfiler.mm)."""

    def __init__(self) -> None:
        self._tracing = False
        self._captures = itertools.count()

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


def _initialize_before(allocator: SimulatedAllocator, replacement: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function that reads the watermarks first, because a query of the memory initializes the allocator."""

    def initialize_and_call(*args: Any) -> Any:
        allocator.initialize()
        return replacement(*args)

    return initialize_and_call


def _make_memory_stats(allocator: SimulatedAllocator) -> MemoryStats:
    """Return the values of ``torch.accelerator.memory_stats``, which MPS supports since torch 2.13."""
    allocated = {"current": allocator.allocated, "peak": allocator.peak}
    reserved = {"current": allocator.driver_allocated, "peak": allocator.driver_peak}
    return {"allocated_bytes": {"all": allocated}, "reserved_bytes": {"all": reserved}}


def _make_tensor_properties(storages: DeviceStorages) -> dict[str, Any]:
    """Return the replacements for the device properties of a tensor, which apply to this thread."""
    mps = torch.device("mps", 0)
    thread = threading.get_ident()

    def make_property(name: str, value_on_mps: Any) -> property:
        original = getattr(torch.Tensor, name)

        def get(tensor: torch.Tensor) -> Any:
            if threading.get_ident() == thread and storages.contains(tensor):
                return value_on_mps
            with torch._C.DisableTorchFunction():  # noqa: SLF001 - a mode would call this function again
                return original.__get__(tensor)

        return property(get)

    return {name: make_property(name, value) for name, value in (("device", mps), ("is_mps", True), ("is_cpu", False))}


def _make_storage_methods(storages: DeviceStorages) -> dict[str, Any]:
    """Return the replacements for the storage methods that saving and loading use to find the device."""
    mps = torch.device("mps", 0)
    original_device = torch.UntypedStorage.device

    def copy_storage(storage: torch.UntypedStorage) -> torch.UntypedStorage:
        return torch.UntypedStorage(storage.nbytes()).copy_(storage, False)

    def to_mps(storage: torch.UntypedStorage) -> torch.UntypedStorage:
        if storage_key(storage) in storages:
            return storage
        copy = copy_storage(storage)
        storages.add(torch.empty(0, dtype=torch.uint8, device="cpu").set_(copy))
        return copy

    def get_device(storage: torch.UntypedStorage) -> torch.device:
        return mps if storage_key(storage) in storages else original_device.__get__(storage)

    def clone(storage: torch.UntypedStorage) -> torch.UntypedStorage:
        copy = copy_storage(storage)
        return to_mps(copy) if storage_key(storage) in storages else copy

    return {"device": property(get_device), "clone": clone, "mps": to_mps}


ORIGINAL_NORMALIZE_FAKE_DEVICE = FakeTensor._normalize_fake_device  # noqa: SLF001 - torch has no public name for it


def _normalize_fake_device(device: torch.device) -> torch.device:
    """Return the device of a FakeTensor, with the CPU in place of MPS.

    The autograd engine looks up the streams of the device of a tensor, and aborts the process if torch was built
    without it.
    """
    return torch.device("cpu") if device.type == "mps" else ORIGINAL_NORMALIZE_FAKE_DEVICE(device)


@contextlib.contextmanager
def _patch_libraries(
    allocator: SimulatedAllocator,
    storages: DeviceStorages,
    wrap_backward: Callable[[Callable[..., Any]], Callable[..., Any]],
) -> Iterator[None]:
    """Make an MPS device available to torch, transformers and Accelerate."""
    rows = [
        *((torch._C, name, replacement) for name, replacement in _make_library_functions(allocator).items()),  # noqa: SLF001
        *((torch.Tensor, name, replacement) for name, replacement in _make_tensor_properties(storages).items()),
        *((torch.UntypedStorage, name, method) for name, method in _make_storage_methods(storages).items()),
        (torch, "Generator", SimulatedGeneratorFactory),
        (torch.mps, "_default_mps_generator", torch.default_generator),
        (torch.autograd, "_engine_run_backward", wrap_backward(torch.autograd._engine_run_backward)),  # noqa: SLF001
        (FakeTensor, "_normalize_fake_device", staticmethod(_normalize_fake_device)),
        (torch.cuda, "is_available", _make_constant_function(False)),
        (torch.cuda, "device_count", _make_constant_function(0)),
    ]
    with contextlib.ExitStack() as undo:
        undo.callback(_clear_cached_availability)
        for owner, name, replacement in rows:
            undo.enter_context(mock.patch.object(owner, name, replacement, create=True))
        _clear_cached_availability()
        undo.enter_context(_preserve_accelerate_state())
        yield


def _clear_cached_availability() -> None:
    """Clear the caches of the functions that check for an MPS device."""
    for module, name in CACHED_AVAILABILITY:
        clear = getattr(getattr(sys.modules.get(module), name, None), "cache_clear", None)
        if clear is not None:
            clear()


@contextlib.contextmanager
def _preserve_accelerate_state() -> Iterator[None]:
    """Clear the shared states of Accelerate and restore them, so that existing Accelerators continue to work."""
    before = [(state, dict(state)) for state in _get_shared_states()]
    for state, _content in before:
        state.clear()
    try:
        yield
    finally:
        saved = {id(state): content for state, content in before}
        for state in _get_shared_states():
            state.clear()
            state.update(saved.get(id(state), {}))


def _get_shared_states() -> list[dict[str, Any]]:
    module = sys.modules.get("accelerate.state")
    return [getattr(module, name)._shared_state for name in SHARED_STATES] if module else []  # noqa: SLF001
