"""The profilers of torch and of MPS, and torch's modes."""

from __future__ import annotations

import contextlib
import os
import sys
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from .._events.activity import defer_interrupts
from .._utils.text import describe_value
from ..errors import ConfigurationError
from .backend import import_torch
from .machine import is_mps_simulated
from .registry import parse_device_argument


@contextmanager
def push_modes(*modes: Any) -> Iterator[None]:
    """Put modes on for this thread, and take these very ones off at the end.

    torch takes a mode off its stack while the mode computes, and whoever ends takes off what is on top. Where an interrupt
    falls between the two, the mode would stay behind, and see all that is computed later, or another would be lost
    (``torch.utils._python_dispatch._pop_mode_temporarily``).
    """
    with ExitStack() as stack:
        for mode in modes:
            stack.enter_context(mode)
            stack.callback(_bring_to_top, mode)
        yield


def active_modes(mode: Any) -> list[Any]:
    """Return the modes of the same kind that this thread has on, the outermost first."""
    module, kind = _mode_stack(mode)
    return list(getattr(module, f"_get_current_{kind}_mode_stack")())


def _bring_to_top(mode: Any) -> None:
    """Let a mode be on its stack once, and on top, where its own end takes it off."""
    module, _kind = _mode_stack(mode)
    now = active_modes(mode)
    wanted = [*(one for one in now if one is not mode), mode]
    if [*map(id, now)] == [*map(id, wanted)]:
        return
    for _ in now:
        module._pop_mode()  # noqa: SLF001 - torch has no other name for it
    for one in wanted:
        module._push_mode(one)  # noqa: SLF001


def _mode_stack(mode: Any) -> tuple[Any, str]:
    """Return the module of torch that keeps the stack of such modes, and what they see."""
    import_torch()
    from torch import overrides
    from torch.utils import _python_dispatch

    if isinstance(mode, _python_dispatch.TorchDispatchMode):
        return _python_dispatch, "dispatch"
    return overrides, "function"


STDERR_FD = 2

# What torch 2.13's profiler writes at each start and end, whatever KINETO_LOG_LEVEL says, and once where torch is built for
# CUDA and the computer has no driver, which is an error to nobody but kineto (its DeviceProperties.cpp).
KINETO_NOISE = (b"USDT:", b"gpuGetDeviceCount failed")

CAPTURE_SUFFIX = ".gputrace"  # How the name of a Metal capture ends; torch adds it to every name (MPSProfiler.mm).

MEMORY_EVENT = (
    "[memory]"  # How torch's profiler names what an allocator gave or took back (torch/autograd/profiler.py).
)


@contextlib.contextmanager
def profile_device(device: str, *, profile_memory: bool = False) -> Iterator[Any]:
    """Let torch's profiler see what a block computes on a device: names and times, perhaps memory, no shapes and no code."""
    from torch.profiler import ProfilerActivity, profile

    activities = [ProfilerActivity.CPU]
    known = parse_device_argument(device)
    if known.profiler_times_kernels:
        activities.append(getattr(ProfilerActivity, known.type.upper()))
    # Without acc_events, torch 2.11 warns that later cycles clear events.
    profiler = profile(activities=activities, profile_memory=profile_memory, acc_events=True)
    try:
        with defer_interrupts(), suppress_kineto_output():
            profiler.__enter__()
        yield profiler
    finally:
        with defer_interrupts(), suppress_kineto_output():
            if is_profiler_active():  # An interrupt may have come before it was.
                profiler.__exit__(None, None, None)


def iter_memory_changes(profiler: Any) -> list[int]:
    """Return what the host's allocator gave (positive) and took back (negative) while a profiler was on, in bytes, in order.

    ``profiler.events()`` has sums alone; the single changes stand in the results that it makes them of.
    """
    events = [event for event in profiler.profiler.kineto_results.events() if event.name() == MEMORY_EVENT]
    return [event.nbytes() for event in sorted(events, key=lambda one: one.start_ns()) if is_host_event(event)]


def is_host_event(event: Any) -> bool:
    """Tell whether an event of a profiler is one of the host."""
    device = event.device_type
    return str(device() if callable(device) else device).endswith("CPU")


@contextlib.contextmanager
def suppress_kineto_output() -> Iterator[None]:
    """Leave the notes of torch's profiler out of what a block writes on standard error; the rest comes after the block."""
    try:
        before = os.dup(STDERR_FD)
    except OSError:  # A process without a standard error has no notes either.
        yield
        return
    with tempfile.TemporaryFile() as written, contextlib.closing(os.fdopen(before, "wb", buffering=0)) as stream:
        sys.stderr.flush()
        os.dup2(written.fileno(), STDERR_FD)
        try:
            yield
        finally:
            sys.stderr.flush()
            os.dup2(before, STDERR_FD)
            written.seek(0)
            stream.write(b"".join(line for line in written if not any(note in line for note in KINETO_NOISE)))


def is_profiler_active() -> bool:
    """Tell whether a profiler of torch is on: a second one would be an error."""
    return bool(import_torch().autograd._profiler_enabled())  # noqa: SLF001 - torch has no other name for it


def check_no_profiler() -> None:
    """Check that no other profiler of torch is on."""
    if is_profiler_active():
        raise ConfigurationError("Another profiler of torch is on.", "Leave its with block first.")


def check_signposts(device: str) -> None:
    """Check that torch can write signposts of what runs on a device."""
    _check_mps("signposts", device, "Leave signposts=True out.")


def capture_name(name: Any) -> str:
    """Return the name of a Metal capture; torch writes it to ``0000-NAME.gputrace`` in the current folder, and counts up.

    Example:
        >>> capture_name("step"), capture_name("step.gputrace")
        ('step', 'step')
    """
    given = name.removesuffix(CAPTURE_SUFFIX) if isinstance(name, str) else ""
    if not given or Path(given).name != given:
        what = f"A Metal capture cannot be called {describe_value(name)}."
        raise ConfigurationError(what, "Pass a name without a folder, such as 'step'.")
    return given


def check_metal_capture(device: str) -> None:
    """Check that torch can capture the Metal calls of a device."""
    _check_mps("Metal captures", device, "Leave metal_capture out.")
    torch = import_torch()
    if not hasattr(torch.mps.profiler, "metal_capture"):
        what = f"torch {torch.__version__} has no torch.mps.profiler.metal_capture."
        raise ConfigurationError(what, "Install torch 2.7 or newer.")
    if not torch.mps.profiler.is_metal_capture_enabled():
        what = "Metal captures are off in this process."
        raise ConfigurationError(what, "Set MTL_CAPTURE_ENABLED=1 in the environment before Python starts.")


def _check_mps(what: str, device: str, remedy: str) -> None:
    if parse_device_argument(device).type != "mps":
        raise ConfigurationError(f"There are no {what} of {device}: torch writes them for MPS alone.", remedy)
    if is_mps_simulated():
        raise ConfigurationError(f"There are no {what} of a simulated MPS device.", remedy)


def signposts() -> Any:
    """Return a block whose operators on MPS leave signposts, which Instruments records (``torch.mps.profiler.profile``)."""
    return import_torch().mps.profiler.profile(mode="interval")


def metal_capture(name: str) -> Any:
    """Return a block whose Metal calls are captured under a name (``torch.mps.profiler.metal_capture``), for Xcode."""
    return import_torch().mps.profiler.metal_capture(name)
