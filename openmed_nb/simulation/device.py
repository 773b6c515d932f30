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
from operator import attrgetter
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
from ..devices.environment import FALLBACK_VARIABLE, preserve_variable
from ..devices.machine import ACTIVE_SIMULATIONS, DEFAULT_SIMULATED_MEMORY, MachineInfo, parse_memory
from ..devices.profilers import push_modes
from ..errors import DeviceUnavailableError
from .memory import MacMemory, SimulatedAllocator, format_size
from .modes import CPU, MPS, FunctionMode, OperatorMode, SimulatedDevice, storage_key
from .operators import FallbackPolicy, validate_defects

Value = TypeVar("Value")

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

# Functions of torch._C with a constant result: there is a single synchronous device.
CONSTANT_RESULTS = {
    "_mps_is_available": True,
    "_mps_get_name": CHIP,
    "_mps_get_core_count": 8,
    "_mps_get_default_generator": torch.default_generator,
    "_mps_deviceSynchronize": None,
    "_mps_profilerStartTrace": None,
    "_mps_profilerStopTrace": None,
    "_mps_isCaptureEnabled": False,
    "_mps_isCapturing": False,
    "_mps_stopCapture": None,
    "_get_accelerator": torch.device("mps"),
    "_accelerator_getAccelerator": torch.device("mps"),
    "_accelerator_getDeviceIndex": 0,
    "_accelerator_exchangeDevice": 0,
    "_accelerator_maybeExchangeDevice": 0,
    "_accelerator_setDeviceIndex": None,
    "_accelerator_synchronizeDevice": None,
    "_accelerator_emptyHostCache": None,
    "_accelerator_isAllocatorInitialized": True,
}


class SimulatedMps(SimulatedDevice, Displayable):
    """Simulated MPS device that computes on the CPU; its measurements do not represent real MPS hardware.

    It does not reproduce the numerical results of MPS, its speed, its random numbers (they are those of the CPU), the
    16-bit types of ``torch.autocast("mps")``, its caches for graph shapes, or ``torch.mps.event``.
    ``torch.mps.profiler`` records nothing.
    """

    simulated: ClassVar[bool] = True  # Reports of this device are labeled.

    @property
    def fallbacks(self) -> Counter[str]:
        """Number of times that each unsupported operator fell back to the CPU."""
        return self.fallback_policy.counts

    @property
    def cache_clears(self) -> int:
        """Number of times that the cache was emptied by request."""
        return self.allocator.emptied

    def to_dict(self) -> dict[str, Any]:
        """Return the state of the device as JSON-compatible values; memory in bytes."""
        allocator = self.allocator
        return {
            "simulated": True,
            "installed": allocator.memory.installed,
            "recommended": allocator.memory.recommended,
            "allocated": allocator.allocated,
            "driver_allocated": allocator.driver_allocated,
            "peak": allocator.peak,
            "limit": allocator.limit,
            "fallbacks": dict(self.fallbacks),
            "cache_clears": self.cache_clears,
            "defects": [defect.issue for defect in self.defects],
        }

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
        return Report(f"MPS device (SIMULATED): {summary}", tables=tables)


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
    allocator = SimulatedAllocator(MacMemory(parse_memory(memory)), environ)
    active_defects = validate_defects(defects)
    if ACTIVE_SIMULATIONS:
        raise DeviceUnavailableError(
            "A simulated MPS device is already active; only one is supported.",
            "Stop it first: run %openmed_device --simulate off, or leave its with block.",
        )
    if fallback is None:
        fallback = (
            environ.get(FALLBACK_VARIABLE, "0") != "0"
        )  # torch 2.13 treats any value except exactly 0 as enabled.
    device = SimulatedMps(allocator, FallbackPolicy(fallback), active_defects)
    functions = FunctionMode(device)
    run_backward = functions.wrap_backward(vars(torch.autograd)["_engine_run_backward"])
    replacements: list[tuple[object, str, object]] = [
        *((torch._C, name, replacement) for name, replacement in _make_library_functions(allocator).items()),  # noqa: SLF001
        *((torch.Tensor, name, replacement) for name, replacement in _make_tensor_properties(device).items()),
        *((torch.UntypedStorage, name, method) for name, method in _make_storage_methods(device).items()),
        (torch, "Generator", SimulatedGeneratorFactory),
        (torch.mps, "_default_mps_generator", torch.default_generator),
        (torch.autograd, "_engine_run_backward", run_backward),
        (FakeTensor, "_normalize_fake_device", staticmethod(_normalize_fake_device)),
        (torch.cuda, "is_available", _make_constant_function(False)),
        (torch.cuda, "device_count", _make_constant_function(0)),
    ]
    with contextlib.ExitStack() as stack:
        ACTIVE_SIMULATIONS.append(device)
        stack.callback(ACTIVE_SIMULATIONS.clear)
        # Accelerate sets the variable whenever it finds MPS.
        stack.enter_context(preserve_variable(FALLBACK_VARIABLE, os.environ))
        stack.callback(_restore_default_device)
        stack.callback(_clear_cached_availability)
        for owner, name, replacement in replacements:
            stack.enter_context(mock.patch.object(owner, name, replacement, create=True))
        _clear_cached_availability()
        # Existing Accelerators continue to work afterwards. The simulation may also have imported Accelerate.
        for state in _get_shared_states():
            stack.enter_context(mock.patch.dict(state, clear=True))
        stack.callback(_clear_shared_states)
        stack.enter_context(push_modes(OperatorMode(device), functions))
        yield device


def _restore_default_device() -> None:
    """Reset the default device of torch if it is the simulated MPS device."""
    # torch.get_default_device() would create a tensor on it.
    if getattr(default_device.CURRENT_DEVICE, "type", "") == "mps":
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
    installed: int, fallback: bool | None, environ: MutableMapping[str, str], defects: str | Iterable[str]
) -> Iterator[tuple[DeviceManager, SimulatedMps]]:
    """Start a simulated Mac with its device, and stop it.

    The MPS variables are applied before the device starts, as in a kernel whose first line is ``%load_ext openmed_nb``.
    They are restored at the end.
    """
    if fallback is not None:
        check_bool("fallback", fallback)
    torch = SimulatedTorch()
    machine = MachineInfo(
        "Darwin",
        "arm64",
        apple_silicon=True,
        chip=CHIP,
        macos_version=MACOS,
        memory_bytes=installed,
        cores=os.cpu_count(),
        gpu_driver=False,
        simulated=True,
    )
    computer = DeviceManager(environ, lambda: machine, torch)
    with preserve_variable(FALLBACK_VARIABLE, environ):
        if fallback is not None:
            environ[FALLBACK_VARIABLE] = str(int(fallback))
        try:
            computer.apply_mps_variables()
            with simulated_device(installed, None, environ, defects) as torch.device:
                yield computer, torch.device
        finally:
            computer.restore_device_variable()
            computer.restore_mps_variables()


def _make_library_functions(allocator: SimulatedAllocator) -> dict[str, object]:
    """Return the replacements for the functions of ``torch._C``."""
    captures = itertools.count()

    def query(name: str) -> Callable[..., object]:
        """Return a function that returns an attribute of the allocator, after initializing it as every query does."""

        def initialize_and_get(_index: int | None = None) -> object:
            allocator.initialize()
            return attrgetter(name)(allocator)

        return initialize_and_get

    def reset_peak_stats(_index: int | None = None) -> None:
        allocator.initialize()
        allocator.reset_peak()

    def reset_accumulated_stats(_index: int | None = None) -> None:
        allocator.initialize()

    def is_on_macos_or_newer(major: int, minor: int) -> bool:
        return (major, minor) <= MACOS

    def start_capture(name: str) -> None:  # As on a Mac without MTL_CAPTURE_ENABLED (MPSProfiler.mm).
        raise RuntimeError(f"Failed to start capture of {next(captures):04d}-{name}.gputrace error {CAPTURE_ERROR}")

    def get_stream(_index: int | None = None) -> torch.Stream:
        return torch.Stream(device="cpu")

    return {
        "_has_mps": True,
        **{name: _make_constant_function(result) for name, result in CONSTANT_RESULTS.items()},
        "_mps_is_on_macos_or_newer": is_on_macos_or_newer,
        "_mps_emptyCache": allocator.empty_cache,
        "_mps_setMemoryFraction": allocator.set_fraction,
        "_mps_currentAllocatedMemory": query("allocated"),
        "_mps_driverAllocatedMemory": query("driver_allocated"),
        "_mps_recommendedMaxMemory": query("memory.recommended"),
        "_mps_maxBufferLength": query("memory.largest_buffer"),
        "_mps_startCapture": start_capture,
        "_accelerator_getStream": get_stream,
        "_accelerator_emptyCache": allocator.empty_cache,
        "_accelerator_getDeviceStats": query("stats"),
        "_accelerator_getMemoryInfo": query("free_and_total"),
        "_accelerator_resetPeakStats": reset_peak_stats,
        "_accelerator_resetAccumulatedStats": reset_accumulated_stats,
    }


def _make_constant_function(value: Value) -> Callable[..., Value]:
    """Return a function that ignores its arguments and returns a value."""

    def get_value(*_args: object) -> Value:
        return value

    return get_value


class SimulatedGenerator(CpuGenerator):
    """Generator that reports the device MPS; its random numbers are those of the CPU."""

    device = MPS


class _GeneratorType(type):
    """Metaclass in place of the type of ``torch.Generator``: it creates and recognizes generators of both devices."""

    def __call__(cls, device: str | torch.device = "cpu") -> torch.Generator:
        return SimulatedGenerator() if torch.device(device).type == "mps" else CpuGenerator(device)

    def __instancecheck__(cls, instance: object) -> bool:
        return isinstance(instance, CpuGenerator)


class SimulatedGeneratorFactory(metaclass=_GeneratorType):
    """Replacement for ``torch.Generator`` in a simulation."""


def _make_tensor_properties(device: SimulatedDevice) -> dict[str, property]:
    """Return the replacements for the device properties of a tensor, which apply to this thread."""
    thread = threading.get_ident()

    def make_property(name: str, value_on_mps: object) -> property:
        original = getattr(torch.Tensor, name)

        def get(tensor: torch.Tensor) -> object:
            if threading.get_ident() == thread and device.contains(tensor):
                return value_on_mps
            with torch._C.DisableTorchFunction():  # noqa: SLF001 - a mode would call this function again
                return original.__get__(tensor)

        return property(get)

    return {name: make_property(name, value) for name, value in (("device", MPS), ("is_mps", True), ("is_cpu", False))}


def _make_storage_methods(device: SimulatedDevice) -> dict[str, object]:
    """Return the replacements for the storage methods that saving and loading use to find the device."""
    original_device = torch.UntypedStorage.device

    def get_device(storage: torch.UntypedStorage) -> torch.device:
        return MPS if storage_key(storage) in device.blocks else original_device.__get__(storage)

    def copy_storage(storage: torch.UntypedStorage, to_device: bool) -> torch.UntypedStorage:
        copy = torch.UntypedStorage(storage.nbytes()).copy_(storage, False)
        if to_device:
            device.add(torch.empty(0, dtype=torch.uint8, device="cpu").set_(copy))
        return copy

    def to_mps(storage: torch.UntypedStorage) -> torch.UntypedStorage:
        return storage if storage_key(storage) in device.blocks else copy_storage(storage, to_device=True)

    def clone(storage: torch.UntypedStorage) -> torch.UntypedStorage:
        return copy_storage(storage, to_device=storage_key(storage) in device.blocks)

    return {"device": property(get_device), "clone": clone, "mps": to_mps}


ORIGINAL_NORMALIZE_FAKE_DEVICE = FakeTensor._normalize_fake_device  # noqa: SLF001 - torch has no public name for it


def _normalize_fake_device(device: torch.device) -> torch.device:
    """Return the device of a FakeTensor, with the CPU in place of MPS.

    The autograd engine looks up the streams of the device of a tensor, and aborts the process if torch was built
    without it.
    """
    return CPU if device.type == "mps" else ORIGINAL_NORMALIZE_FAKE_DEVICE(device)


def _clear_cached_availability() -> None:
    """Clear the caches of the functions that check for an MPS device."""
    for module, name in CACHED_AVAILABILITY:
        clear = getattr(getattr(sys.modules.get(module), name, None), "cache_clear", None)
        if clear is not None:
            clear()


def _clear_shared_states() -> None:
    """Clear the shared states of Accelerate."""
    for state in _get_shared_states():
        state.clear()


def _get_shared_states() -> list[dict[str, object]]:
    """Return the states that the objects of a class of Accelerate share, if it is imported."""
    module = sys.modules.get("accelerate.state")
    return [getattr(module, name)._shared_state for name in SHARED_STATES] if module else []  # noqa: SLF001
