"""Some steps under torch's profiler, with the phases marked, and the trace that it writes."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from ...devices.backend import TENSOR_LOCK, finish
from ...devices.request import kind_of
from ...devices.torch_profiler import profiling
from ...errors import ConfigurationError
from ..workloads.workload import DATA, Workload
from .operator_times import PREFIX, OperatorTime, operator_times


def slice_of(
    workload: Workload, batches: Iterator[Any], steps: int, trace: Path | None, beside: Workload | None = None
) -> tuple[OperatorTime, ...]:
    """Run some steps under torch's profiler and return its operators, those that take longest first.

    Args:
        workload: The steps.
        batches: Their batches.
        steps: How many.
        trace: Where the trace is written, in the format of Chrome; ``None`` for nowhere.
        beside: Operators with nothing to compute, which follow each step; ``None`` for none.
    """
    with profiling(workload.device):  # The first profile of a process takes long to start.
        marked_step(workload, batches)
    with profiling(workload.device) as profiler:
        for _ in range(steps):
            marked_step(workload, batches)
            if beside is not None:
                marked_phases(beside, None)
    if trace is not None:
        profiler.export_chrome_trace(str(trace))
    return operator_times(profiler.events(), steps, kind_of(workload.device) == "cuda")


def marked_step(workload: Workload, batches: Iterator[Any]) -> None:
    """Do a step at full speed, with marks where its phases begin and end."""
    from torch.profiler import record_function

    with record_function(f"{PREFIX}{DATA}"):
        batch = next(batches)
    marked_phases(workload, batch)


def marked_phases(workload: Workload, value: Any) -> None:
    """Do the phases of a step that take its batch, marked in the same way."""
    from torch.profiler import record_function

    with TENSOR_LOCK:
        for phase in workload.phases:
            with record_function(f"{PREFIX}{phase.name}"):
                value = phase.run(value)
        finish(workload.torch_device)


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
    if file.is_dir() or (file.exists() and not os.access(file, os.W_OK)) or not takes_files(file.parent):
        raise ConfigurationError(f"{file.name!r} cannot be written there.", "Make the folder, or use another one.")
    return file


def takes_files(folder: Path) -> bool:
    """Tell whether a file can be written into a folder: torch's profiler writes none without a word where it cannot."""
    try:
        with tempfile.TemporaryFile(dir=folder):
            return True
    except OSError:
        return False
