"""Some steps under torch's profiler, with the phases marked, and the trace that it writes."""

from __future__ import annotations

import contextlib
import os
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from ...devices.backend import TENSOR_LOCK, finish
from ...devices.request import kind_of
from ...errors import ConfigurationError
from ..workloads.workload import DATA, Workload
from .operator_times import PREFIX, OperatorTime, operator_times

STANDARD_ERROR = 2

NOTE_OF_KINETO = b"USDT:"
"""How the notes begin that torch 2.13's profiler writes at each start and end, whatever ``KINETO_LOG_LEVEL`` says."""


def slice_of(workload: Workload, batches: Iterator[Any], steps: int, trace: Path | None) -> tuple[OperatorTime, ...]:
    """Run some steps under torch's profiler and return its operators, those that take longest first.

    Args:
        workload: The steps.
        batches: Their batches.
        steps: How many.
        trace: Where the trace is written, in the format of Chrome; ``None`` for nowhere.
    """
    with profiling(workload):  # The first profile of a process takes long to start.
        marked_step(workload, batches)
    with profiling(workload) as profiler:
        for _ in range(steps):
            marked_step(workload, batches)
    if trace is not None:
        profiler.export_chrome_trace(str(trace))
    return operator_times(profiler.events(), steps, kind_of(workload.device) == "cuda")


def marked_step(workload: Workload, batches: Iterator[Any]) -> None:
    """Do a step at full speed, with marks where its phases begin and end."""
    from torch.profiler import record_function

    with record_function(f"{PREFIX}{DATA}"):
        value = next(batches)
    with TENSOR_LOCK:
        for phase in workload.phases:
            with record_function(f"{PREFIX}{phase.name}"):
                value = phase.run(value)
        finish(workload.torch_device)


@contextlib.contextmanager
def profiling(workload: Workload) -> Iterator[Any]:
    """Let torch's profiler see a block: names and times, no shapes and no code."""
    from torch.profiler import ProfilerActivity, profile

    kinds = [ProfilerActivity.CPU] + ([ProfilerActivity.CUDA] if kind_of(workload.device) == "cuda" else [])
    profiler = profile(activities=kinds, acc_events=True)  # Otherwise torch 2.11 warns that later cycles clear events.
    with without_notes():
        profiler.__enter__()
    try:
        yield profiler
    finally:
        with without_notes():
            profiler.__exit__(None, None, None)


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


def check_no_profiler() -> None:
    """Check that no other profiler of torch is on: there can be one.

    Raises:
        ConfigurationError: Where one is.
    """
    import torch

    if torch.autograd._profiler_enabled():  # noqa: SLF001 - torch has no other name for it
        raise ConfigurationError("Another profiler of torch is on.", "Leave its with block first.")


def checked_trace(trace: Any) -> Path | None:
    """Return where a trace is to be written.

    Raises:
        ConfigurationError: For what is no file of JSON in a folder that is there.

    Example:
        >>> checked_trace("trace.txt")
        Traceback (most recent call last):
        ...
        openmed_nb.errors.ConfigurationError: 'trace.txt' is no file for a trace. Use a name that ends in .json or .json.gz.
    """
    if trace is None:
        return None
    name = os.fspath(trace) if isinstance(trace, (str, os.PathLike)) else ""
    if not str(name).endswith((".json", ".json.gz")):
        shown = repr(Path(name).name) if name else type(trace).__name__
        raise ConfigurationError(f"{shown} is no file for a trace.", "Use a name that ends in .json or .json.gz.")
    file = Path(name)
    if file.is_dir() or not (file.parent.is_dir() and os.access(file.parent, os.W_OK)):
        raise ConfigurationError(f"{file.name!r} cannot be written there.", "Make the folder, or use another one.")
    return file
