"""torch's profiler, which is quiet here, and of which there can be one at a time."""

from __future__ import annotations

import contextlib
import os
import sys
import tempfile
from collections.abc import Iterator
from typing import Any

from ..errors import ConfigurationError
from .backend import import_torch
from .request import kind_of

STANDARD_ERROR = 2

NOTE_OF_KINETO = b"USDT:"
"""How the notes begin that torch 2.13's profiler writes at each start and end, whatever ``KINETO_LOG_LEVEL`` says."""

MEMORY = "[memory]"
"""How torch's profiler names what an allocator gave or took back (``torch/autograd/profiler.py``)."""


@contextlib.contextmanager
def profiling(device: str, *, profile_memory: bool = False) -> Iterator[Any]:
    """Let torch's profiler see a block: names and times, no shapes and no code.

    Args:
        device: Where the block computes.
        profile_memory: Whether it sees memory, too.
    """
    from torch.profiler import ProfilerActivity, profile

    kinds = [ProfilerActivity.CPU] + ([ProfilerActivity.CUDA] if kind_of(device) == "cuda" else [])
    # Without acc_events, torch 2.11 warns that later cycles clear events.
    profiler = profile(activities=kinds, profile_memory=profile_memory, acc_events=True)
    with without_notes():
        profiler.__enter__()
    try:
        yield profiler
    finally:
        with without_notes():
            profiler.__exit__(None, None, None)


def memory_changes(profiler: Any) -> list[int]:
    """Return what the host's allocator gave (positive) and took back (negative) while a profiler was on, in bytes, in order.

    ``profiler.events()`` has sums alone; the single changes stand in the results that it makes them of.
    """
    events = [event for event in profiler.profiler.kineto_results.events() if event.name() == MEMORY]
    return [event.nbytes() for event in sorted(events, key=lambda one: one.start_ns()) if is_of_host(event)]


def is_of_host(event: Any) -> bool:
    """Tell whether an event of a profiler is one of the host."""
    device = event.device_type
    return str(device() if callable(device) else device).endswith("CPU")


@contextlib.contextmanager
def without_notes() -> Iterator[None]:
    """Leave the notes of torch's profiler out of what a block writes on standard error; the rest comes after the block."""
    try:
        before = os.dup(STANDARD_ERROR)
    except OSError:  # A process without a standard error has no notes either.
        yield
        return
    with tempfile.TemporaryFile() as written, contextlib.closing(os.fdopen(before, "wb", buffering=0)) as stream:
        sys.stderr.flush()
        os.dup2(written.fileno(), STANDARD_ERROR)
        try:
            yield
        finally:
            sys.stderr.flush()
            os.dup2(before, STANDARD_ERROR)
            written.seek(0)
            stream.write(b"".join(line for line in written if not line.startswith(NOTE_OF_KINETO)))


def profiler_is_on() -> bool:
    """Tell whether a profiler of torch is on: a second one would be an error."""
    enabled: bool = import_torch().autograd._profiler_enabled()  # noqa: SLF001 - torch has no other name for it
    return enabled


def check_no_profiler() -> None:
    """Check that no other profiler of torch is on.

    Raises:
        ConfigurationError: Where one is.
    """
    if profiler_is_on():
        raise ConfigurationError("Another profiler of torch is on.", "Leave its with block first.")
