"""How each batch size of a sweep is measured: the time of its steps, the memory that they take, and how much there is."""

from __future__ import annotations

import gc
import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ..._render.display import counted
from ..._utils.clock import now
from ...devices.machine import import_psutil
from ...devices.memory import empty_cache, is_out_of_memory
from ...devices.profilers import memory_changes, profiler_is_on, profiling
from ...devices.registry import device_of
from .sweep_knee import MEMORY, TIME, Point, close_points, fitting
from .workloads import Bench, Workload

# The share of the memory of a GPU that must stay free: the allocator splits blocks, and other batches are larger.
HEADROOM_SHARE = 0.1

# Ways to measure the memory of a step.
ALLOCATOR = "the most that tensors took during a step, with the model, as torch's allocator counts it"
DRIVER = "what the device gave the process for a step that began with an empty cache: this torch counts no peak on MPS"
PROFILER = "the most that the tensors made during a step took at once, beside the model, as torch's profiler saw it"
NOT_KNOWN = "not known: another profiler was on"

# What the processes of a container may hold on Linux, and what they hold (the kernel's admin-guide/cgroup-v2).
GROUP_FILES = (Path("/sys/fs/cgroup/memory.max"), Path("/sys/fs/cgroup/memory.current"))


def memory_of(device: str, step: Callable[[], object]) -> tuple[int | None, str]:
    """Run a step to its end on a device and return the most memory that it took, in bytes, and how that was measured."""
    asked = device_of(device)
    if not asked.has_allocator:
        return peak_seen(step)
    counts = asked.memory().peak is not None
    asked.reset_peak() if counts else asked.empty_cache()
    step()
    memory = asked.memory()
    return (memory.peak, ALLOCATOR) if counts else (memory.reserved, DRIVER)


def peak_seen(step: Callable[[], object]) -> tuple[int | None, str]:
    """Run a step on the CPU under torch's profiler and return the most that its tensors took at once."""
    if profiler_is_on():
        step()
        return None, NOT_KNOWN
    with profiling("cpu", profile_memory=True) as profiler:
        step()
    # What tensors take (positive) and give back (negative), in order.
    return max(itertools.accumulate(memory_changes(profiler), initial=0)), PROFILER


def limit_of(device: str, fraction: float | None) -> int | None:
    """Return how much a step may take on a device with its model, in bytes, counted as :func:`memory_of` counts.

    torch refuses more than a ``fraction`` of the device's memory; on MPS more than 1 counts as 1: torch would allow it (the
    high watermark is 1.7 by itself), but the Mac would swap. ``None`` if nothing is known.
    """
    known = device_of(device)
    if not known.has_allocator:
        return given_by_system()
    recommended = known.memory().recommended
    return None if recommended is None else int(recommended * min(1.0, fraction or 1.0))


def given_by_system() -> int:
    """Return how much memory this process can still get: of the computer, of its container, and of its own limit."""
    psutil = import_psutil()
    rest = [int(psutil.virtual_memory().available), in_container(*GROUP_FILES)]
    try:
        import resource
    except ModuleNotFoundError:  # Windows has no limit of addresses (``ulimit -v``).
        pass
    else:
        limit = resource.getrlimit(resource.RLIMIT_AS)[0]
        rest += [] if limit == resource.RLIM_INFINITY else [limit - int(psutil.Process().memory_info().vms)]
    return max(0, min(size for size in rest if size is not None))


def in_container(most: Path, held: Path) -> int | None:
    """Return what the processes of a container may still take, ``None`` if they have no limit, or if it is not known."""
    if not (most.is_file() and held.is_file()):
        return None
    sizes = [file.read_text("ascii").strip() for file in (most, held)]
    return int(sizes[0]) - int(sizes[1]) if all(size.isdecimal() for size in sizes) else None


def expected_memory(points: Sequence[Point], rows: int) -> int | None:
    """Return how much memory more rows will take, from the sizes so far; ``None`` if nothing is known.

    One point is taken to grow with the rows, two to lie on a line; if the last three bend upwards, as with a matrix of
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


WARM_UP = 0.05  # Seconds of steps after the first pass that make a shape warm; one step that takes longer is enough.
STEPS, SECONDS_OF_A_POINT = 5, 0.3  # The fewest timed steps of a point, and for how many seconds it is timed.
LONG, FEWEST = 0.5, 3  # If a step takes so many seconds, or more, so few timed steps, or rounds, are enough.
UNTIMED = 3.5  # The steps of a point that are not timed: a first, longer one, one to warm up, one for its memory.
ROUNDS = 9  # In so many rounds the sizes near the best are measured in turn, or in as many as there is time for.
VISIT = 0.05  # How many seconds a size is measured in a round, at least one step.
SHARE = 0.6  # The share of the time that the search may take; the rest is for the rounds.


@dataclass
class Measurement:
    """A bench under measurement."""

    bench: Bench  # What is measured.
    seconds_given: float  # About how long the sweep may take.
    limit: int | None = None  # The memory that a step may take, ``None`` if it is not known.
    begin: float = field(default_factory=now)  # When it began.
    method: str = ""  # How memory was measured, in words.
    # Gets what is measured, in words, the number of a round, and how many there are.
    tell: Callable[..., None] = lambda *_news: None
    last: Workload | None = None  # The last workload, which tells of length, workers and types.

    @property
    def elapsed(self) -> float:
        """The seconds since the beginning."""
        return now() - self.begin

    def point(self, rows: int) -> Point:
        """Measure a number of rows; if they do not fit, empty the caches of the device."""
        self.tell(f"batches of {counted(rows, 'row')}")
        try:
            return self._measured(rows)
        except (RuntimeError, MemoryError) as error:
            if not is_out_of_memory(error):
                raise
        clean(self.bench.device)  # Here the error is gone, with the tensors of its frames.
        return Point(rows, fits=False)

    def _measured(self, rows: int) -> Point:
        workload = self.last = self.bench.bucket(rows)
        batch = next(workload.batches())
        first = workload.seconds(batch)
        steps_for(workload, batch, WARM_UP, 1)
        memory, self.method = memory_of(self.bench.device, lambda: workload.run(batch))
        timed = workload.seconds(batch)
        fewest = (FEWEST if timed > LONG else STEPS) - 1
        times = [timed, *steps_for(workload, batch, SECONDS_OF_A_POINT - timed, fewest)]
        return Point(rows, memory=memory, first_seconds=first).timed(times)

    def hindrance(self, rows: int, points: Sequence[Point]) -> str:
        """Return why a number of rows must not be measured: the memory that it is expected to take, or the time."""
        memory = expected_memory(points, rows)
        headroom = device_of(self.bench.device).headroom
        if self.limit is not None and memory is not None and memory > self.limit * headroom:
            return MEMORY
        seconds = rows / fitting(points)[-1].speed
        steps = FEWEST if seconds > LONG else STEPS
        after = self.elapsed + max(seconds * steps, SECONDS_OF_A_POINT) + seconds * UNTIMED
        return TIME if after > self.seconds_given * SHARE else ""

    def again(self, points: Sequence[Point]) -> tuple[Point, ...]:
        """Return points measured once more in turn, if there is time for it, or else as they are."""
        seconds = sum(2 * point.rows / point.speed for point in points) * FEWEST
        return self.rounds(points, FEWEST) if self.elapsed + seconds < self.seconds_given * SHARE else tuple(points)

    def in_turn(self, points: Sequence[Point]) -> tuple[Point, ...]:
        """Return the sizes near the best, measured in turn, so that heat and other programs touch all of them alike.

        The search measured each at another moment; what is compared in the end was measured side by side.
        """
        close = close_points(points)
        return self.rounds(close, ROUNDS) if len(close) > 1 else tuple(close)

    def rounds(self, points: Sequence[Point], most: int) -> tuple[Point, ...]:
        """Return points measured in turn, in rounds that begin at either end; after a few of them, time may end it."""
        seconds: dict[int, list[float]] = {point.rows: [] for point in points}
        for turn in range(most):
            if turn >= FEWEST and self.elapsed > self.seconds_given:
                break
            self.tell("sizes near the best in turn", turn, most)
            for point in points if turn % 2 else points[::-1]:
                seconds[point.rows] += self._visited(point.rows)
        return tuple(one.timed(times) if (times := seconds[one.rows]) else one for one in points)

    def _visited(self, rows: int) -> list[float]:
        """Return the times of a few steps; none if they do not fit this time, which the points know already."""
        try:
            workload = self.bench.bucket(rows)
            batch = next(workload.batches())
            first = workload.seconds(batch)  # It also warms this shape up; a long one was warm soon enough.
            return steps_for(workload, batch, VISIT, 1) if first < VISIT else [first]
        except (RuntimeError, MemoryError) as error:
            if not is_out_of_memory(error):
                raise
            return []


def clean(device: str) -> None:
    """Let go what a batch held, also in a cycle with an error, and hand cached blocks back."""
    gc.collect()
    empty_cache(device)


def steps_for(workload: Workload, batch: Any, seconds: float, fewest: int) -> list[float]:
    """Return how long each of several steps took, in seconds: ``fewest`` of them, or as many as fit into some seconds."""
    times: list[float] = []
    begin = now()
    while len(times) < fewest or now() - begin < seconds:
        times.append(workload.seconds(batch))
    return times
