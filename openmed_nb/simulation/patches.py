"""Everything of torch that asks for a real MPS device, and what answers instead; all of it is put back at the end.

torch's Python functions (``torch.mps``, ``torch.backends.mps``, ``torch.accelerator``) stay as they are: the functions
of the C++ library below them are replaced, so that their checks and their errors are the real ones.
"""

from __future__ import annotations

import contextlib
import sys
import threading
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

from .memory import SimulatedAllocator
from .modes import Storages, name_of

if TYPE_CHECKING:
    import torch


CHIP = "SIMULATED Apple chip"
MACOS = (15, 5)

# Functions that remember whether there is an MPS device.
CACHED_ANSWERS = (
    ("torch.backends.mps", "is_available"),
    ("transformers.utils.import_utils", "is_torch_mps_available"),
    ("accelerate.utils.imports", "is_mps_available"),
)

# Accelerate's classes that keep one state for the process, with its device.
SHARED_STATES = ("PartialState", "AcceleratorState", "GradientState")

MISSING = object()


def library(allocator: SimulatedAllocator) -> dict[str, Any]:
    """Return what answers for the functions of ``torch._C``."""
    import torch

    mps = torch.device("mps")
    memory = allocator.memory
    return {
        "_has_mps": True,
        "_mps_is_available": lambda: True,
        "_mps_is_on_macos_or_newer": lambda major, minor: (major, minor) <= MACOS,
        "_mps_get_name": lambda: CHIP,
        "_mps_get_core_count": lambda: 8,
        "_mps_get_default_generator": lambda: torch.default_generator,
        "_mps_deviceSynchronize": lambda: None,
        "_mps_emptyCache": allocator.empty_cache,
        "_mps_setMemoryFraction": allocator.set_fraction,
        "_mps_currentAllocatedMemory": touching(allocator, lambda: allocator.allocated),
        "_mps_driverAllocatedMemory": touching(allocator, lambda: allocator.driver),
        "_mps_recommendedMaxMemory": touching(allocator, lambda: memory.recommended),
        "_mps_maxBufferLength": touching(allocator, lambda: memory.largest_buffer),
        "_accelerator_getAccelerator": lambda: mps,
        "_get_accelerator": lambda _check=None: mps,
        "_accelerator_getDeviceIndex": lambda: 0,
        "_accelerator_setDeviceIndex": lambda _index: None,
        "_accelerator_exchangeDevice": lambda _index: 0,
        "_accelerator_maybeExchangeDevice": lambda _index: 0,
        "_accelerator_synchronizeDevice": lambda _index=None: None,
        "_accelerator_isAllocatorInitialized": lambda: True,
        "_accelerator_emptyCache": allocator.empty_cache,
        "_accelerator_emptyHostCache": lambda: None,
        "_accelerator_getDeviceStats": touching(allocator, lambda _index=None: statistics(allocator)),
        "_accelerator_resetPeakStats": touching(allocator, lambda _index=None: allocator.reset_peak()),
        "_accelerator_resetAccumulatedStats": touching(allocator, lambda _index=None: None),
        "_accelerator_getMemoryInfo": touching(
            allocator, lambda _index=None: (max(0, memory.recommended - allocator.driver), memory.recommended)
        ),
    }


def touching(allocator: SimulatedAllocator, answer: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function that reads the watermarks before it answers: asking for memory is a first touch."""

    def touched(*args: Any) -> Any:
        allocator.touch()
        return answer(*args)

    return touched


def statistics(allocator: SimulatedAllocator) -> dict[str, Any]:
    """Return the figures of ``torch.accelerator.memory_stats``, which MPS has since torch 2.13."""
    allocated = {"current": allocator.allocated, "peak": allocator.peak}
    reserved = {"current": allocator.driver, "peak": allocator.driver_peak}
    return {"allocated_bytes": {"all": allocated}, "reserved_bytes": {"all": reserved}}


def tensor_properties(storages: Storages) -> dict[str, Any]:
    """Return what answers for the properties of a tensor, in this thread."""
    import torch

    mps, home = torch.device("mps", 0), threading.get_ident()

    def answering(name: str, here: Any) -> property:
        real = getattr(torch.Tensor, name)

        def answer(tensor: torch.Tensor) -> Any:
            if threading.get_ident() == home and storages.holds(tensor):
                return here
            with torch._C.DisableTorchFunction():  # noqa: SLF001 - a mode would ask this very function
                return real.__get__(tensor)

        return property(answer)

    return {name: answering(name, here) for name, here in (("device", mps), ("is_mps", True), ("is_cpu", False))}


def storage_methods(storages: Storages) -> dict[str, Any]:
    """Return what answers for the methods of a storage, which saving and loading ask for the device."""
    import torch

    mps, real = torch.device("mps", 0), torch.UntypedStorage.device

    def copied(storage: torch.UntypedStorage) -> torch.UntypedStorage:
        return torch.UntypedStorage(storage.nbytes()).copy_(storage, False)

    def to_mps(storage: torch.UntypedStorage) -> torch.UntypedStorage:
        if name_of(storage) in storages:
            return storage
        copy = copied(storage)
        storages.take(torch.empty(0, dtype=torch.uint8, device="cpu").set_(copy))
        return copy

    return {
        "device": property(lambda storage: mps if name_of(storage) in storages else real.__get__(storage)),
        "clone": lambda storage: to_mps(copied(storage)) if name_of(storage) in storages else copied(storage),
        "mps": to_mps,
    }


@contextlib.contextmanager
def patched(
    allocator: SimulatedAllocator, storages: Storages, seeing: Callable[[Callable[..., Any]], Callable[..., Any]]
) -> Iterator[None]:
    """Let torch, transformers and Accelerate find an MPS device."""
    import torch

    rows = [
        *((torch._C, name, answer) for name, answer in library(allocator).items()),  # noqa: SLF001
        *((torch.Tensor, name, answer) for name, answer in tensor_properties(storages).items()),
        *((torch.UntypedStorage, name, method) for name, method in storage_methods(storages).items()),
        (torch.mps, "_default_mps_generator", torch.default_generator),
        (torch.autograd, "_engine_run_backward", seeing(torch.autograd._engine_run_backward)),  # noqa: SLF001
        (torch.cuda, "is_available", lambda: False),
        (torch.cuda, "device_count", lambda: 0),
    ]
    with contextlib.ExitStack() as undo:
        undo.callback(forget_answers)
        for owner, name, answer in rows:
            undo.enter_context(replaced(owner, name, answer))
        forget_answers()
        undo.enter_context(other_shared_states())
        yield


@contextlib.contextmanager
def replaced(owner: Any, name: str, value: Any) -> Iterator[None]:
    """Give a module or a class another attribute, and its own one back."""
    before = vars(owner).get(name, MISSING)
    setattr(owner, name, value)
    try:
        yield
    finally:
        if before is MISSING:
            delattr(owner, name)
        else:
            setattr(owner, name, before)


def forget_answers() -> None:
    """Let the functions that remember whether there is an MPS device look again."""
    for module, name in CACHED_ANSWERS:
        forget = getattr(getattr(sys.modules.get(module), name, None), "cache_clear", None)
        if forget is not None:
            forget()


@contextlib.contextmanager
def other_shared_states() -> Iterator[None]:
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
