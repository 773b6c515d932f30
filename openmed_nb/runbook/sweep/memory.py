"""How much memory a step takes, how much there is, and how much the next size will take."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from pathlib import Path

from ...devices.allocators import allocator
from ...devices.machine import import_psutil
from ...devices.request import kind_of
from ...devices.torch_profiler import memory_changes, profiler_is_on, profiling
from .points import Point, fitting

HEADROOM_SHARE = 0.1
"""The share of the memory of a GPU that is to stay free: the allocator splits blocks, and other batches are larger."""

HEADROOM = {"cpu": 0.7, "mps": 1 - HEADROOM_SHARE, "cuda": 1 - HEADROOM_SHARE}
"""The share of the limit that a batch may be expected to take: on the CPU and on MPS, going beyond it makes the system swap."""

ALLOCATOR = "the most that tensors took during a step, with the model, as torch's allocator counts it"
DRIVER = "what the device gave the process for a step that began with an empty cache: this torch counts no peak on MPS"
PROFILER = "the most that the tensors made during a step took at once, beside the model, as torch's profiler saw it"
NOT_KNOWN = "not known: another profiler was on"
"""Ways to measure the memory of a step."""

GROUP_FILES = ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory.current")
"""What the processes of a container may hold on Linux, and what they hold (the kernel's admin-guide/cgroup-v2)."""


def memory_of(device: str, step: Callable[[], object]) -> tuple[int | None, str]:
    """Run a step and return the most memory that it took, in bytes, and how that was measured.

    Args:
        device: Where the step computes.
        step: Runs to its end on the device.
    """
    if kind_of(device) not in {"mps", "cuda"}:
        return peak_seen(step)
    asked = allocator(device)
    counts = asked.memory().peak is not None
    asked.reset_peak() if counts else asked.empty_cache()
    step()
    memory = asked.memory()
    return (memory.peak, ALLOCATOR) if counts else (memory.reserved, DRIVER)


def peak_seen(step: Callable[[], object]) -> tuple[int | None, str]:
    """Run a step on the CPU under torch's profiler and return the most that its tensors took at once.

    Example:
        >>> import torch
        >>> peak_seen(lambda: torch.ones(1000) + torch.ones(1000))[0]
        12000
    """
    if profiler_is_on():
        step()
        return None, NOT_KNOWN
    with profiling("cpu", profile_memory=True) as profiler:
        step()
    return highest(memory_changes(profiler)), PROFILER


def highest(changes: Sequence[int]) -> int:
    """Return the most that was held at once, from what was taken (positive) and given back (negative) in order.

    Example:
        >>> highest([10, 5, -10, 4])
        15
    """
    held = most = 0
    for change in changes:
        held += change
        most = max(most, held)
    return most


def limit_of(device: str, fraction: float | None) -> int | None:
    """Return how much a step may take, in bytes, counted as :func:`memory_of` counts; ``None`` where nothing is known.

    Args:
        device: The device, with the model on it.
        fraction: The share of its memory at which torch refuses more, where that is known. On MPS more than 1 counts as 1:
            torch would allow it (the high watermark is 1.7 by itself), but the Mac would swap.
    """
    if kind_of(device) not in {"mps", "cuda"}:
        return given_by_system()
    recommended = allocator(device).memory().recommended
    return None if recommended is None else int(recommended * min(1.0, fraction or 1.0))


def given_by_system() -> int:
    """Return how much memory this process can still get: of the computer, of its container, and of its own limit.

    Example:
        >>> given_by_system() > 0
        True
    """
    psutil = import_psutil()
    rest = [int(psutil.virtual_memory().available), in_container(*map(Path, GROUP_FILES)), under_own_limit()]
    return max(0, min(size for size in rest if size is not None))


def in_container(most: Path, held: Path) -> int | None:
    """Return what the processes of a container may still take, ``None`` where they have no limit, or where none is told."""
    if not (most.is_file() and held.is_file()):
        return None
    sizes = [file.read_text("ascii").strip() for file in (most, held)]
    return int(sizes[0]) - int(sizes[1]) if all(size.isdecimal() for size in sizes) else None


def under_own_limit() -> int | None:
    """Return what this process may still take of addresses (``ulimit -v``), ``None`` where it has no limit."""
    psutil = import_psutil()
    try:
        import resource
    except ModuleNotFoundError:  # Windows has no such limit.
        return None
    limit = resource.getrlimit(resource.RLIMIT_AS)[0]
    return None if limit == resource.RLIM_INFINITY else limit - int(psutil.Process().memory_info().vms)


def expected_memory(points: Sequence[Point], rows: int) -> int | None:
    """Return how much memory more rows will take, from the sizes so far; ``None`` where nothing is known.

    One point is taken to grow with the rows, two to lie on a line; where the last three bend upwards, as with a matrix of
    all rows, the line bends on, at most as a square does.

    Example:
        >>> expected_memory([Point(1, memory=30), Point(2, memory=40)], 4)
        60
        >>> expected_memory([Point(1, memory=10), Point(2, memory=40), Point(4, memory=160)], 8)
        640
    """
    there = [(point.rows, point.memory) for point in fitting(points) if point.memory is not None]
    if not there:
        return None
    last, size = there[-1]
    if len(there) == 1:
        return math.ceil(size * max(1.0, rows / last))
    slopes = [max(0.0, (above[1] - below[1]) / (above[0] - below[0])) for below, above in itertools.pairwise(there)]
    bend = slopes[-1] / slopes[-2] if len(slopes) > 1 and slopes[-2] else 1.0
    return math.ceil(size + slopes[-1] * min(2.0, max(1.0, bend)) * (rows - last))
