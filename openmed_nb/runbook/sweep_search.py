"""The batch sizes of a sweep: which are worth measuring, and how each is measured.

``Search`` doubles while that pays and fits, then bisects. It measures nothing itself and knows no device: one function measures
a size, another one says why a size must not be measured; so tests search made curves. ``Measurement`` measures a bench for it.
"""

from __future__ import annotations

import gc
import itertools
import math
import statistics
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from ..devices.machine import import_psutil, now
from ..devices.memory import allocator, empty_cache, is_out_of_memory
from ..devices.profilers import memory_changes, profiler_is_on, profiling
from ..devices.request import kind_of
from ..display import Plain
from .measure.workloads import Bench, Workload

# A larger batch pays if it gives more than this share more throughput. That leaves room for noise inside of five percent, which
# is what a choice by hand is about as good as.
KNEE_GAIN = 0.03

# Sizes within this share of the best are measured once more, in turn, before one of them is the knee.
CLOSE = 0.10


@dataclass(frozen=True)
class Point(Plain):
    """A batch size, and what was measured with it.

    Attributes:
        rows: How many rows a batch has.
        throughput: Rows a second, by the median of the steps; ``None`` if the batch does not fit.
        spread: The same by the quartiles of the steps, the slower one first; ``None`` with fewer than three steps.
        memory: The most memory that a step took, in bytes; ``None`` if it is not known.
        first_seconds: How long the first pass of this shape took, in which MPS and CUDA compile or choose kernels.
        steps: How many steps were timed.
        fits: Whether the batch fits into the memory.
    """

    rows: int
    throughput: float | None = None
    spread: tuple[float, float] | None = None
    memory: int | None = None
    first_seconds: float | None = None
    steps: int = 0
    fits: bool = True

    @property
    def speed(self) -> float:
        """The throughput as a number: 0 if the batch does not fit."""
        return self.throughput or 0.0


def rates(rows: int, seconds: Sequence[float]) -> dict[str, Any]:
    """Return throughput, spread and steps of a point from the times of its steps, at least one."""
    spread = None
    if len(seconds) > 2:  # noqa: PLR2004 - two times have no quartiles between them
        low, _middle, high = statistics.quantiles(seconds, n=4, method="inclusive")
        spread = (rows / high, rows / low)
    return {"throughput": rows / statistics.median(seconds), "spread": spread, "steps": len(seconds)}


def fitting(points: Iterable[Point]) -> list[Point]:
    """Return the points that fit, the smallest first."""
    return sorted((point for point in points if point.fits), key=lambda point: point.rows)


def best_of(points: Iterable[Point]) -> Point | None:
    """Return the point with the highest throughput, the smallest of equals; ``None`` if none fits."""
    return max(fitting(points), key=lambda point: point.speed, default=None)


def knee_of(points: Iterable[Point], gain: float = KNEE_GAIN) -> Point | None:
    """Return the smallest point from which no larger one gains more than a share; ``None`` if none fits.

    Its throughput is that of the best, or at most that share away from it: the best itself would be taken otherwise.

    Example:
        >>> knee_of([Point(8, 50.0), Point(16, 99.0), Point(32, 101.0), Point(64, fits=False)]).rows
        16
    """
    there = fitting(points)
    return next((point for at, point in enumerate(there) if not pays(there[at + 1 :], point, gain)), None)


def pays(others: Iterable[Point], point: Point, gain: float) -> bool:
    """Tell whether any of other points gains more than a share over a point."""
    return any(other.speed > point.speed * (1 + gain) for other in others)


def close_points(points: Iterable[Point]) -> list[Point]:
    """Return the points that are near the best, the smallest first."""
    there = fitting(points)
    best = best_of(there)
    return [point for point in there if best and point.speed * (1 + CLOSE) >= best.speed]


# Why a search ends: larger batches no longer pay, would come near the limit, do not fit, were not asked for, take too long.
THROUGHPUT, MEMORY, OUT_OF_MEMORY, LARGEST, TIME = "throughput", "memory", "out of memory", "largest", "time"

# After so many doublings in a row that do not pay, the search ends; one can be an unlucky size of a kernel.
PATIENCE = 2

# Around the knee and the best, sizes are bisected until they are about this part of themselves apart.
FINEST = 4

# The largest size that fits is found to this share if throughput still rises there: a share less of rows is one less of speed.
EDGE = 0.01


@dataclass
class Search:
    """A search under way."""

    measure: Callable[[int], Point]  # Measures a number of rows; what does not fit is a point too.
    # Says why a number of rows must not be measured after these points: one of the reasons above, or nothing.
    hindrance: Callable[[int, Sequence[Point]], str] = lambda _rows, _points: ""
    # Measures points once more, in turn, before they end the search.
    again: Callable[[Sequence[Point]], Sequence[Point]] = lambda points: points
    gain: float = KNEE_GAIN  # A larger batch pays if it gives more than this share more throughput.
    largest: int | None = None  # The most rows; ``None`` for any.
    smallest: int = 1  # The rows that are measured first.
    points: dict[int, Point] = field(default_factory=dict)  # What was measured, by rows.
    stopped: str = ""  # Why the doubling ended.
    bound: int | None = None  # The smallest size that is known not to fit, or not to be measured for want of memory.

    @property
    def found(self) -> tuple[Point, ...]:
        """The points, the smallest first."""
        return tuple(self.points[rows] for rows in sorted(self.points))

    def run(self) -> tuple[Point, ...]:
        """Double, bisect, and return the points, the smallest first."""
        self.double()
        self.approach_bound()
        while sizes := [rows for rows in self.between() if not self.hindrance(rows, self.found)]:
            for rows in sizes:
                self.take(rows)
        return self.found

    def double(self) -> None:
        """Measure the smallest, twice as many and so on rows, until one of the reasons says to end."""
        rows = self.smallest
        while not self.stopped:
            self.take(rows)
            following = rows * 2 if self.largest is None else min(rows * 2, self.largest)
            self.stopped = self.reason(rows, following)
            rows = following

    def reason(self, rows: int, following: int) -> str:
        """Return why the doubling ends after a size, empty if it goes on with the following one."""
        if not self.points[rows].fits:
            return OUT_OF_MEMORY
        if following == rows:
            return LARGEST
        if not (self.still_pays() or self.pays_after_all()):
            return THROUGHPUT
        hindered = self.hindrance(following, self.found)
        if hindered == MEMORY:
            self.bound = following
        return hindered

    def still_pays(self) -> bool:
        """Tell whether one of the last doublings gained enough over all before them."""
        best = best_of(self.found[:-PATIENCE])
        return best is None or pays(self.found[-PATIENCE:], best, self.gain)

    def pays_after_all(self) -> bool:
        """Measure the last doublings and the best before them in turn: another program may have slowed the last ones."""
        best = best_of(self.found[:-PATIENCE])
        for point in self.again([*([best] if best else []), *self.found[-PATIENCE:]]):
            self.points[point.rows] = point
        return self.still_pays()

    def approach_bound(self) -> None:
        """If throughput still rises at the largest that fits, bisect between it and what does not fit."""
        there = fitting(self.found)
        if self.bound is None or not there or knee_of(there, self.gain) != there[-1]:
            return
        low = there[-1].rows
        while self.bound - low > max(1, low * EDGE):
            rows = (low + self.bound) // 2
            hindered = self.hindrance(rows, self.found)
            if hindered not in {"", MEMORY}:
                return
            if hindered or not self.take(rows).fits:
                self.bound = rows
            else:
                low = rows

    def between(self) -> list[int]:
        """Return the sizes in the middle between the knee, the best and their neighbours that are not yet fine enough."""
        most = max((point.rows for point in fitting(self.found)), default=0)
        sizes = [point.rows for point in self.found if point.rows <= most]  # One that failed once is not tried again.
        centres = {point.rows for point in (knee_of(self.found, self.gain), best_of(self.found)) if point}
        return [
            (low + high) // 2
            for low, high in itertools.pairwise(sizes)
            if centres & {low, high} and high - low > max(1, low // FINEST)
        ]

    def take(self, rows: int) -> Point:
        """Measure a size and keep it; what does not fit bounds the rest."""
        point = self.points[rows] = self.measure(rows)
        if not point.fits:
            self.bound = rows if self.bound is None else min(rows, self.bound)
        return point


# The share of the memory of a GPU that must stay free: the allocator splits blocks, and other batches are larger.
HEADROOM_SHARE = 0.1

# The share of the limit that a batch may be expected to take: on the CPU and on MPS, going beyond it makes the system swap.
HEADROOM = {"cpu": 0.7, "mps": 1 - HEADROOM_SHARE, "cuda": 1 - HEADROOM_SHARE}

# Ways to measure the memory of a step.
ALLOCATOR = "the most that tensors took during a step, with the model, as torch's allocator counts it"
DRIVER = "what the device gave the process for a step that began with an empty cache: this torch counts no peak on MPS"
PROFILER = "the most that the tensors made during a step took at once, beside the model, as torch's profiler saw it"
NOT_KNOWN = "not known: another profiler was on"

# What the processes of a container may hold on Linux, and what they hold (the kernel's admin-guide/cgroup-v2).
GROUP_FILES = ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory.current")


def memory_of(device: str, step: Callable[[], object]) -> tuple[int | None, str]:
    """Run a step to its end on a device and return the most memory that it took, in bytes, and how that was measured."""
    if kind_of(device) not in {"mps", "cuda"}:
        return peak_seen(step)
    asked = allocator(device)
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
    if kind_of(device) not in {"mps", "cuda"}:
        return given_by_system()
    recommended = allocator(device).memory().recommended
    return None if recommended is None else int(recommended * min(1.0, fraction or 1.0))


def given_by_system() -> int:
    """Return how much memory this process can still get: of the computer, of its container, and of its own limit."""
    available = int(import_psutil().virtual_memory().available)
    rest = [available, in_container(*map(Path, GROUP_FILES)), under_own_limit()]
    return max(0, min(size for size in rest if size is not None))


def in_container(most: Path, held: Path) -> int | None:
    """Return what the processes of a container may still take, ``None`` if they have no limit, or if it is not known."""
    if not (most.is_file() and held.is_file()):
        return None
    sizes = [file.read_text("ascii").strip() for file in (most, held)]
    return int(sizes[0]) - int(sizes[1]) if all(size.isdecimal() for size in sizes) else None


def under_own_limit() -> int | None:
    """Return what this process may still take of addresses (``ulimit -v``), ``None`` if it has no limit."""
    try:
        import resource
    except ModuleNotFoundError:  # Windows has no such limit.
        return None
    limit = resource.getrlimit(resource.RLIMIT_AS)[0]
    return None if limit == resource.RLIM_INFINITY else limit - int(import_psutil().Process().memory_info().vms)


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
UNTIMED = (
    3.5  # How many steps a point costs beside the timed ones: a first, longer one, one to warm up, one for its memory.
)
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
    last: Workload | None = None  # The last workload, which tells of length, workers and types.

    def point(self, rows: int) -> Point:
        """Measure a number of rows; if they do not fit, empty the caches of the device."""
        point = self._tried(rows)
        if point is None:
            self.clean()
        return point or Point(rows, fits=False)

    def hindrance(self, rows: int, points: Sequence[Point]) -> str:
        """Return why a number of rows must not be measured: the memory that it is expected to take, or the time."""
        memory = expected_memory(points, rows)
        headroom = HEADROOM.get(kind_of(self.bench.device), HEADROOM["cpu"])
        if self.limit is not None and memory is not None and memory > self.limit * headroom:
            return MEMORY
        seconds = rows / fitting(points)[-1].speed
        steps = FEWEST if seconds > LONG else STEPS
        after = self.elapsed + max(seconds * steps, SECONDS_OF_A_POINT) + seconds * UNTIMED
        return TIME if after > self.seconds_given * SHARE else ""

    def in_turn(self, points: Sequence[Point]) -> tuple[Point, ...]:
        """Return the sizes near the best, measured in turn, so that heat and other programs touch all of them alike.

        The search measured each at another moment; what is compared in the end was measured side by side.
        """
        close = close_points(points)
        return self.rounds(close, ROUNDS) if len(close) > 1 else tuple(close)

    def again(self, points: Sequence[Point]) -> tuple[Point, ...]:
        """Return points measured once more in turn, if there is time for it, or else as they are."""
        seconds = sum(2 * point.rows / point.speed for point in points) * FEWEST
        return self.rounds(points, FEWEST) if self.elapsed + seconds < self.seconds_given * SHARE else tuple(points)

    def rounds(self, points: Sequence[Point], most: int) -> tuple[Point, ...]:
        """Return points measured in turn, in rounds that begin at either end; after a few of them, time may end it."""
        seconds: dict[int, list[float]] = {point.rows: [] for point in points}
        for turn in range(most):
            if turn >= FEWEST and self.elapsed > self.seconds_given:
                break
            for point in points if turn % 2 else points[::-1]:
                seconds[point.rows] += self._visited(point.rows)
        return tuple(replace(one, **rates(one.rows, times)) if (times := seconds[one.rows]) else one for one in points)

    @property
    def elapsed(self) -> float:
        """The seconds since the beginning."""
        return now() - self.begin

    def clean(self) -> None:
        """Let go what a batch held, also in a cycle with an error, and hand cached blocks back."""
        gc.collect()
        empty_cache(self.bench.device)

    def _tried(self, rows: int) -> Point | None:
        """Return a point, ``None`` if it runs out of memory; the error is let go here, with the tensors of its frames."""
        try:
            workload = self.last = self.bench.bucket(rows)
            batch = next(workload.batches())
            first = workload.seconds(batch)
            steps_for(workload, batch, WARM_UP, 1)
            memory, self.method = memory_of(self.bench.device, lambda: workload.run(batch))
            timed = workload.seconds(batch)
            fewest = (FEWEST if timed > LONG else STEPS) - 1
            times = [timed, *steps_for(workload, batch, SECONDS_OF_A_POINT - timed, fewest)]
            return Point(rows, memory=memory, first_seconds=first, **rates(rows, times))
        except (RuntimeError, MemoryError) as error:
            if not is_out_of_memory(error):
                raise
            return None

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


def steps_for(workload: Workload, batch: Any, seconds: float, fewest: int) -> list[float]:
    """Return how long each of several steps took, in seconds: ``fewest`` of them, or as many as fit into some seconds."""
    times: list[float] = []
    begin = now()
    while len(times) < fewest or now() - begin < seconds:
        times.append(workload.seconds(batch))
    return times
