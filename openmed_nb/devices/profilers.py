"""Profilers of torch and of MPS, and the mode stacks of torch."""

from __future__ import annotations

import contextlib
import os
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any, TypeAlias

from .._events.activity import defer_interrupts
from .._utils.text import describe_value
from ..errors import ConfigurationError
from .backend import import_torch
from .machine import is_mps_simulated
from .registry import get_device

if TYPE_CHECKING:
    from torch.autograd.profiler_util import FunctionEvent
    from torch.overrides import TorchFunctionMode
    from torch.profiler import profile
    from torch.utils._python_dispatch import TorchDispatchMode


Mode: TypeAlias = "TorchDispatchMode | TorchFunctionMode"

# A function or an operator of torch that a mode intercepts, its arguments, and its result.
TorchFunction: TypeAlias = Callable[..., Any]
Arguments: TypeAlias = tuple[Any, ...]
Keywords: TypeAlias = dict[str, Any]
Result: TypeAlias = Any  # A tensor, a tuple of tensors, or another value.


@contextmanager
def push_modes(*modes: Mode) -> Iterator[None]:
    """Enter modes in this thread, and remove exactly these modes at the end of the block.

    torch removes a mode from its stack while the mode runs, and the exit of a mode removes the top of the stack. After an
    interrupt between the two, the mode would remain active, or another mode would be removed
    (``torch.utils._python_dispatch._pop_mode_temporarily``).
    """
    with ExitStack() as stack:
        for mode in modes:
            stack.enter_context(mode)
            stack.callback(_move_to_top, mode)
        yield


def _move_to_top(mode: Mode) -> None:
    """Move a mode to the top of its stack, where its exit removes it."""
    from torch import overrides
    from torch.utils import _python_dispatch

    module: ModuleType = overrides
    active: list[Mode] = [*overrides._get_current_function_mode_stack()]  # noqa: SLF001 - torch has no public functions
    if isinstance(mode, _python_dispatch.TorchDispatchMode):
        module = _python_dispatch
        active = [*_python_dispatch._get_current_dispatch_mode_stack()]  # noqa: SLF001
    reordered = [*(other for other in active if other is not mode), mode]
    if [*map(id, active)] == [*map(id, reordered)]:
        return
    for _ in active:
        module._pop_mode()  # noqa: SLF001
    for other in reordered:
        module._push_mode(other)  # noqa: SLF001


STDERR_FD = 2

# Lines that torch 2.13's profiler prints regardless of KINETO_LOG_LEVEL: at each start and end; once for a CUDA build on a machine
# without a driver, which only kineto treats as an error (its DeviceProperties.cpp); and once if another thread has imported torch,
# as in the background of a kernel, which concerns only profiles that another process requests (its init.cpp).
KINETO_NOISE = (b"USDT:", b"gpuGetDeviceCount failed", b"External init callback must run in same thread")

CAPTURE_SUFFIX = ".gputrace"  # Suffix of a Metal capture, which torch adds to every name (MPSProfiler.mm).
MEMORY_EVENT = "[memory]"  # Name of an allocation or deallocation in torch's profiler (torch/autograd/profiler.py).


@contextlib.contextmanager
def profile_device(device: str, *, profile_memory: bool = False) -> Iterator[profile]:
    """Profile a block on a device with torch's profiler.

    The profiler records names and durations, and optionally memory, but no shapes and no source code.
    """
    import torch
    from torch.profiler import ProfilerActivity

    activities = [ProfilerActivity.CPU]
    profiled = get_device(device)
    if profiled.profiler_times_kernels:
        activities.append(getattr(ProfilerActivity, profiled.type.upper()))
    # Without acc_events, torch 2.11 warns that later cycles clear events.
    profiler = torch.profiler.profile(activities=activities, profile_memory=profile_memory, acc_events=True)
    try:
        with defer_interrupts(), suppress_kineto_output():
            profiler.__enter__()
        yield profiler
    finally:
        with defer_interrupts(), suppress_kineto_output():
            if is_profiler_active():  # An interrupt can occur before the profiler starts.
                profiler.__exit__(None, None, None)


def iter_memory_changes(profiler: Any) -> list[int]:
    """Return the allocations (positive) and deallocations (negative) of host memory in a profile, in bytes and in order.

    ``profiler.events()`` contains sums only. The individual changes are in the results from which it computes them.
    """
    events = [event for event in profiler.profiler.kineto_results.events() if event.name() == MEMORY_EVENT]
    return [
        event.nbytes()
        for event in sorted(events, key=lambda event: event.start_ns())
        if str(event.device_type()).endswith("CPU")
    ]


def is_host_event(event: FunctionEvent) -> bool:
    """Return whether a profiler event occurred on the host."""
    return str(event.device_type).endswith("CPU")


@contextlib.contextmanager
def suppress_kineto_output() -> Iterator[None]:
    """Remove the lines of torch's profiler from the standard error of a block.

    All other output appears after the block.
    """
    try:
        original_fd = os.dup(STDERR_FD)
    except OSError:  # The process does not have a standard error.
        yield
        return
    with tempfile.TemporaryFile() as captured, contextlib.closing(os.fdopen(original_fd, "wb", buffering=0)) as stream:
        sys.stderr.flush()
        os.dup2(captured.fileno(), STDERR_FD)
        try:
            yield
        finally:
            sys.stderr.flush()
            os.dup2(original_fd, STDERR_FD)
            captured.seek(0)
            stream.write(b"".join(line for line in captured if not any(noise in line for noise in KINETO_NOISE)))


def is_profiler_active() -> bool:
    """Return whether a torch profiler is running. A second one would raise an error."""
    return bool(import_torch().autograd._profiler_enabled())  # noqa: SLF001 - torch does not have a public function for it


def capture_name(name: object) -> str:
    """Validate and normalize the name of a Metal capture.

    torch writes the capture to ``0000-NAME.gputrace`` in the current directory, with an increasing number.

    Example:
        >>> capture_name("step"), capture_name("step.gputrace")
        ('step', 'step')
    """
    stem = name.removesuffix(CAPTURE_SUFFIX) if isinstance(name, str) else ""
    if not stem or Path(stem).name != stem:
        raise ConfigurationError(
            f"{describe_value(name)} is not a valid name for a Metal capture.",
            "Pass a name without a directory, such as 'step'.",
        )
    return stem


def check_profiling(device: str, signposts: bool, metal_capture: str | None) -> None:
    """Raise an error if another profiler is running, or if torch cannot write signposts or a Metal capture for a device."""
    if is_profiler_active():
        raise ConfigurationError("Another torch profiler is already running.", "Exit its with block first.")
    requests = (
        (signposts, "Signposts", "Remove signposts=True."),
        (metal_capture is not None, "Metal captures", "Remove metal_capture."),
    )
    for is_requested, feature, remedy in requests:
        # Both are functions of torch/mps/profiler.py.
        if is_requested and get_device(device).type != "mps":
            raise ConfigurationError(f"{feature} are supported on MPS only, not on {device}.", remedy)
        if is_requested and is_mps_simulated():
            raise ConfigurationError(f"{feature} are not supported on a simulated MPS device.", remedy)
    if metal_capture is None:
        return
    torch = import_torch()
    if not hasattr(torch.mps.profiler, "metal_capture"):
        raise ConfigurationError(
            f"torch {torch.__version__} does not have torch.mps.profiler.metal_capture.", "Install torch 2.7 or newer."
        )
    if not torch.mps.profiler.is_metal_capture_enabled():
        raise ConfigurationError(
            "Metal captures are disabled in this process.",
            "Set MTL_CAPTURE_ENABLED=1 in the environment before Python starts.",
        )


def signposts() -> contextlib.AbstractContextManager[None]:
    """Return a context manager whose MPS operators write signposts for Instruments (``torch.mps.profiler.profile``)."""
    import torch

    return torch.mps.profiler.profile(mode="interval")


def metal_capture(name: str) -> contextlib.AbstractContextManager[None]:
    """Return a context manager that captures Metal calls for Xcode (``torch.mps.profiler.metal_capture``)."""
    import torch

    return torch.mps.profiler.metal_capture(name)
