"""``nb.sweep``: throughput and memory over batch sizes, and the size from which larger ones no longer pay.

The search doubles while that pays and fits, then bisects. It measures nothing itself and knows no device: it yields the
sizes, and :class:`Measurement` measures them; so tests search made curves.
"""

from __future__ import annotations

import gc
import itertools
import math
import statistics
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

from ..._events.activity import ProgressEvent
from ..._render.display import UNITS, JsonMixin, Report, Table, format_bytes, pluralize, to_plain_data
from ..._render.drawing import Axes, AxisMarker, Chart, Series
from ..._utils.clock import current_time
from ..._utils.text import describe_value, shorten
from ..._utils.validation import check_number, check_optional_integer
from ...devices.machine import import_psutil, is_mps_simulated
from ...devices.memory import empty_cache, is_out_of_memory
from ...devices.profilers import is_profiler_active, iter_memory_changes, profile_device
from ...devices.registry import parse_device_argument
from ...devices.request import normalize_device
from ...errors import ConfigurationError
from ...models.registry import is_model_name
from ...session import SESSION
from ...training.curve import NEAR, memory_exponent, require_plotting
from .timing import Measured, format_rate, interleave, repeat_measurement
from .workloads import (
    ANNOTATION,
    Benchmark,
    BenchmarkTarget,
    StepReport,
    Workload,
    build_benchmarks,
    is_token_classifier,
    make_target,
)

SECONDS = 30.0  # About how long a sweep takes.
MAX_TICK_LABELS = 9  # More sizes on an axis are named in part.
SMALLEST_TRAINING = 2  # ``torch.nn.functional.batch_norm`` refuses a single value for each channel.

# A larger batch pays if it gives more than this share more throughput. That leaves room for noise inside of five percent, which
# is what a choice by hand is about as good as.
MIN_KNEE_GAIN = 0.03

# Sizes within this share of the best are measured once more, in turn, before one of them is the knee.
NEAR_BEST_FRACTION = 0.10

# Why a search ends: larger batches no longer pay, would come near the limit, do not fit, were not asked for, take too long.
THROUGHPUT = "throughput"
MEMORY = "memory"
OUT_OF_MEMORY = "out of memory"
LARGEST = "largest"
TIME = "time"

# The same in a sentence, from the largest size that fits and the limit.
STOP_MESSAGES = {
    THROUGHPUT: "The last batches up to {rows} gained too little, so none beyond was tried.",
    MEMORY: "A batch of more than {rows} is expected to come too near the limit of {limit}.",
    OUT_OF_MEMORY: "Batches up to {rows} fit, and a larger one ran out of memory.",
    LARGEST: "No batch of more than {rows} was asked for.",
    TIME: "A batch of more than {rows} would have taken too long: pass more seconds.",
}

# Why nothing larger was measured than the size at which throughput still rises, in words without figures.
STILL_INCREASING_MESSAGES = {
    MEMORY: "nothing larger was tried, because of the memory",
    OUT_OF_MEMORY: "nothing larger fits into the memory",
    LARGEST: "nothing larger was asked for",
    TIME: "nothing larger was tried, because of the time",
}

# After so many doublings in a row that do not pay, the search ends; one can be an unlucky size of a kernel.
PATIENCE = 2

# Around the knee and the best, sizes are bisected until they are about this part of themselves apart.
MIN_RELATIVE_GAP = 4

# The largest size that fits is found to this share if throughput still rises there: a share less of rows is one less of speed.
EDGE = 0.01


@dataclass(frozen=True)
class Point(JsonMixin):
    """A batch size, and what was measured with it.

    Attributes:
        rows: How many rows a batch has.
        throughput: Rows a second, by the median of the steps; ``None`` if the batch does not fit.
        spread: The same by the quartiles of the steps, the slower one first; ``None`` with fewer than three steps.
        memory: The most memory that a step took, in bytes; ``None`` if it is not known.
        first_step_seconds: How long the first pass of this shape took, in which MPS and CUDA compile or choose kernels.
        steps: How many steps were timed.
        fits: Whether the batch fits into the memory.
    """

    rows: int
    throughput: float | None = None
    spread: tuple[float, float] | None = None
    memory: int | None = None
    first_step_seconds: float | None = None
    steps: int = 0
    fits: bool = True

    @property
    def speed(self) -> float:
        """The throughput as a number: 0 if the batch does not fit."""
        return self.throughput or 0.0

    def with_timings(self, seconds: Sequence[float]) -> Point:
        """Return this point with the throughput of steps that took these times, at least one."""
        spread = None
        if len(seconds) > 2:  # noqa: PLR2004 - two times have no quartiles between them
            low, _middle, high = statistics.quantiles(seconds, n=4, method="inclusive")
            spread = (self.rows / high, self.rows / low)
        return replace(self, throughput=self.rows / statistics.median(seconds), spread=spread, steps=len(seconds))


def fitting(points: Iterable[Point]) -> list[Point]:
    """Return the points that fit, the smallest first."""
    return sorted((point for point in points if point.fits), key=lambda point: point.rows)


def best_of(points: Iterable[Point]) -> Point | None:
    """Return the point with the highest throughput, the smallest of equals; ``None`` if none fits."""
    return max(fitting(points), key=lambda point: point.speed, default=None)


def knee_of(points: Iterable[Point], gain: float = MIN_KNEE_GAIN) -> Point | None:
    """Return the smallest point from which no larger one gains more than a share; ``None`` if none fits.

    Its throughput is that of the best, or at most that share away from it: the best itself would be taken otherwise.

    Example:
        >>> knee_of([Point(8, 50.0), Point(16, 99.0), Point(32, 101.0), Point(64, fits=False)]).rows
        16
    """
    there = fitting(points)
    return next((point for at, point in enumerate(there) if not any_pays(there[at + 1 :], point, gain)), None)


def any_pays(others: Iterable[Point], point: Point, gain: float) -> bool:
    """Return whether any of other points gains more than a share over a point."""
    return any(other.speed > point.speed * (1 + gain) for other in others)


def close_points(points: Iterable[Point]) -> list[Point]:
    """Return the points that are near the best, the smallest first."""
    best = best_of(points)
    return [point for point in fitting(points) if best and point.speed * (1 + NEAR_BEST_FRACTION) >= best.speed]


@dataclass(frozen=True, repr=False)
class SweepReport(StepReport):
    """Throughput and memory over batch sizes, and the knee.

    Beside ``name``, ``task``, ``dtype``, ``workers``, ``row_shape`` and ``simulated`` it has:

    Attributes:
        device: Where it was measured.
        points: Every size that was measured, the smallest first, also those that ran out of memory.
        compared: The sizes near the best, as they were measured again in turn; the knee is one of them.
        knee: The rows from which nothing larger gains more than ``gain``; ``None`` if not even one row fits, and if a
            single size was measured although larger ones may fit.
        stopped: Why no larger batch was measured: ``"throughput"`` (it does not pay), ``"memory"`` (it is expected to come
            near the limit), ``"out of memory"``, ``"largest"`` (it was not asked for) or ``"time"``.
        limit: The memory that a step may take, in bytes; ``None`` if it is not known.
        method: How the memory of a step was measured.
        gain: The share of throughput that pays.
        length: How many tokens a row has; ``None`` if rows are not tokens.
        seconds: About how long it was to take.
    """

    device: str
    points: tuple[Point, ...]
    remeasured_points: tuple[Point, ...] = ()
    knee: int | None = None
    stop_code: str = ""
    limit: int | None = None
    method: str = ""
    min_gain: float = MIN_KNEE_GAIN
    length: int | None = None
    seconds: float = SECONDS

    SCHEMA = "openmed_nb/sweep/1"
    JSON_EXCLUDE = ("seconds",)
    JSON_PROPERTIES = ("batch_tokens", "knee_reason", "stop_reason", "still_increasing")

    @property
    def knee_point(self) -> Point | None:
        """The point of the knee."""
        return next((point for point in self.points if point.rows == self.knee), None)

    @property
    def batch_tokens(self) -> int | None:
        """The knee in tokens, for ``nb.annotate(notes, batch_tokens=sweep.batch_tokens)``; ``None`` for other tasks."""
        return self.knee * self.length if self.task == ANNOTATION and self.knee and self.length else None

    @property
    def best(self) -> Point | None:
        """The point with the highest throughput, whatever it takes; ``None`` if nothing fits."""
        return best_of(self.remeasured_points) or best_of(self.points)

    @property
    def still_increasing(self) -> bool:
        """Whether throughput still rises at the largest size that was measured and fits."""
        there = fitting(self.points)
        return bool(there) and there[-1].rows == self.knee

    @property
    def knee_reason(self) -> str:
        """Why this size, with figures: what the best of the larger sizes would give."""
        knee = self.knee_point
        if knee is None:
            return self._not_found
        size = pluralize(knee.rows, "row")
        larger = [
            best_of(point for point in points if point.rows > knee.rows)
            for points in (self.remeasured_points, self.points)
        ]
        other = larger[0] or larger[1]  # One that was measured beside it tells more.
        if other is None:
            return f"{size}: {self._rising}."
        change = round(100 * (other.speed / knee.speed - 1))
        pace = f"{abs(change)} % {'slower' if change < 0 else 'faster'}" if change else "as fast"
        memory = f" and take {other.memory / knee.memory:.1f} times the memory" if knee.memory and other.memory else ""
        return f"{size}: {other.rows:,} would be {pace}{memory}."

    @property
    def stop_reason(self) -> str:
        """Why no larger batch was measured, with figures."""
        there = fitting(self.points)
        if not there:
            return self._not_found
        return STOP_MESSAGES[self.stop_code].format(
            rows=pluralize(there[-1].rows, "row"), limit=format_bytes(self.limit)
        )

    @property
    def _rising(self) -> str:
        return f"still rising: {STILL_INCREASING_MESSAGES.get(self.stop_code, 'nothing larger was measured that fits')}"

    @property
    def _not_found(self) -> str:
        rows = min((point.rows for point in self.points), default=1)
        if fitting(self.points):
            were = "was" if rows == 1 else "were"
            return f"Only {pluralize(rows, 'row')} {were} measured, and a single size has no knee."
        return f"Not even {pluralize(rows, 'row')} {'fits' if rows == 1 else 'fit'} into the memory."

    def tokens(self, point: Point) -> float | None:
        """Return the throughput of a point in tokens a second; ``None`` if rows are not tokens."""
        return None if self.length is None or point.throughput is None else point.throughput * self.length

    def to_dict(self) -> dict[str, Any]:
        """Return everything as mappings, lists, numbers and strings, ready for JSON; ``best`` and ``compared`` are rows."""
        return {
            **super().to_dict(),
            "points": [{**to_plain_data(point), "tokens": self.tokens(point)} for point in self.points],
            "remeasured_points": [point.rows for point in self.remeasured_points],
            "best": self.best.rows if self.best else None,
        }

    @property
    def heading(self) -> str:
        """The device and the knee in words."""
        if self.knee:
            found = pluralize(self.knee, "row")
        elif not fitting(self.points):
            found = "nothing fits"
        elif self.stop_code == LARGEST:
            found = f"best batch not found; only {pluralize(self.points[0].rows, 'row')} tried"
        else:
            longer = max(60.0, 2 * self.seconds)
            found = f"best batch not found in {self.seconds:g} s; try seconds={longer:g}"
        return f"on {self.shown(self.device)}: {found}"

    def to_report(self) -> Report:
        """Return the knee and how it was measured in words; the figures stand in the HTML alone."""
        rows = f", rows of {pluralize(self.length, 'token')}" if self.length else ""
        loader = f"; {pluralize(self.workers, 'worker')} in the loader" if self.workers else ""
        sentences = [f"{self.name}, {self.task}{rows}{loader}."]
        if not self.knee:
            sentences.append(self.knee_reason)
        elif self.still_increasing:
            sentences.append(f"The largest batch that was tried; {self._rising}.")
        else:
            share = f"{100 * self.min_gain:g} %"
            sentences.append(f"The smallest batch from which no larger one that was tried is more than {share} faster.")
        if self.batch_tokens:
            sentences.append(f"To annotate in such batches: nb.annotate(notes, batch_tokens={self.batch_tokens}).")
        if self.method:
            sentences.append(f"Memory: {self.method}.")
        least = "at least " if self.still_increasing and self.stop_code in {LARGEST, TIME} else ""
        best = f"The best batch on {self.shown(self.device)} has {least}{pluralize(self.knee or 0, 'row')}"
        why = (("the knee", self.knee_reason), ("the end", self.stop_reason))
        columns = ("rows", "rows/s", "quartiles", "tokens/s", "memory", "first pass", "timed steps", "")
        table = Table("Batch sizes", columns, tuple(map(self._row, self.points)), collapsed=True)
        return Report(
            f"Batch sweep {self.heading}",
            tuple(sentences),
            html_sentences=(best, *sentences) if self.knee else (),
            metrics=(Table("Why", ("of what", "reason"), why if self.knee else ()), table),
            # A single size would be a picture of a dot.
            charts=self.pictures if len(fitting(self.points)) > 1 else (),
        )

    def _row(self, point: Point) -> tuple[str, ...]:
        notes = {"did not fit": not point.fits, "knee": point.rows == self.knee, "best": point == self.best}
        return (
            f"{point.rows:,}",
            format_rate(point.throughput),
            " to ".join(map(format_rate, point.spread or ())),
            format_rate(self.tokens(point)),
            format_bytes(point.memory),
            "" if point.first_step_seconds is None else f"{point.first_step_seconds:.3f} s",
            str(point.steps or ""),
            ", ".join(note for note, holds in notes.items() if holds),
        )

    @property
    def pictures(self) -> tuple[Chart, ...]:
        """Throughput and memory over the sizes, which stand at their binary logarithms."""
        points = fitting(self.points)
        places = tuple(math.log2(point.rows) for point in points)
        labels = [pluralize(point.rows, "row") for point in points]
        sizes = [1 << power for power in range(self.points[-1].rows.bit_length())]
        ticks = tuple(AxisMarker(math.log2(size), f"{size:,}") for size in sizes[:: 1 + len(sizes) // MAX_TICK_LABELS])
        marks = [AxisMarker(math.log2(self.knee), f"knee: {pluralize(self.knee, 'row')}")] if self.knee else []
        marks += [AxisMarker(math.log2(point.rows), OUT_OF_MEMORY) for point in self.points if not point.fits]
        speed = Series(
            "speed",
            places,
            tuple(point.speed for point in points),
            tuple(f"{label}: {format_rate(point.speed)} rows/s" for label, point in zip(labels, points, strict=True)),
            tuple(point.spread or (point.speed, point.speed) for point in points),
        )
        caption = f"Throughput on {self.shown(self.device)}, with the quartiles of the steps"
        axes = Axes("rows/s", "rows in a batch", ticks, vertical_markers=tuple(marks))
        sizes = [point.memory for point in points if point.memory is not None]
        most = max(sizes, default=0)
        unit = 1024 ** memory_exponent(most)
        memory = Series(
            "memory",
            places,
            tuple(size / unit for size in sizes),
            tuple(f"{label}: {format_bytes(size)}" for label, size in zip(labels, sizes, strict=False)),
        )
        limits = (AxisMarker(self.limit / unit, "limit"),) if self.limit and self.limit <= NEAR * most else ()
        below = replace(
            axes, y_unit=UNITS[memory_exponent(most)], reference_lines=limits, vertical_markers=(), height=6
        )
        pictures = (
            Chart(caption, lines=(speed,), axes=axes),
            Chart("Memory of a step", lines=(memory,), axes=below),
        )
        return pictures if len(sizes) == len(points) else pictures[:1]

    def plot(self) -> Any:
        """Return a matplotlib figure of throughput and memory over the sizes; a notebook shows it.

        Raises:
            ConfigurationError: If matplotlib is not installed.
        """
        caption = f"{shorten(self.name, 30)}, {self.task} {self.heading}"
        return require_plotting(".plot").draw(caption, self.pictures)


def sweep(  # noqa: PLR0913 - each is one thing that a person may want to say
    model: Any = None,
    data: Any = None,
    *,
    training: bool = False,
    device: str | None = None,
    length: int | None = None,
    max_batch_size: int | None = None,
    seconds: float = SECONDS,
    min_gain: float = MIN_KNEE_GAIN,
    min_batch_size: int | None = None,
    progress: bool = True,
    **arguments: Any,
) -> SweepReport:
    """Find the batch size from which larger batches no longer pay, on a device, and what each size takes of its memory.

    Rows are doubled until two doublings in a row gain too little, until the memory is expected to come near its limit, or
    until a batch does not fit; then sizes around the best are bisected, and those near the best are measured again in turn.
    Every size has one shape. Its first pass and the warm-up are not among the times.

    Args:
        model: The name of a model, ``None`` for the bundled one; a pipeline of :func:`load_pipeline`; a torch module; or a
            function that does a step of your own with a batch.
        data: For a module, example inputs or a ``DataLoader``, whose first batch is repeated or cut to each size: every tensor
            of it whose first size is the number of its rows, so that a mask of 4 times 4 wants an example of another number
            of rows; for a function, another one that makes a batch of a number of rows: ``nb.sweep(step, make_batch).knee``.
        training: Whether training steps are measured: forward, backward and AdamW, on a copy of the model.
        device: The device; ``None`` is the session's.
        length: How many tokens a row has, for a name or a pipeline; 128, or as many as the model reads.
        largest: The most rows that are tried.
        seconds: About how long it may take; 30 where nobody says.
        gain: A larger batch pays that gives more than this share more throughput; 0.03 where nobody says.
        smallest: The rows that are tried first; ``None`` for 1, or for 2 in training, because BatchNorm does not learn from a
            single row.
        progress: Whether to show what is under way, where it takes longer than half a second.
        arguments: For a name, those of :func:`openmed_nb.load_model`, such as ``revision``.

    Returns:
        The report: ``knee``, a number of rows, ``None`` where not even one row fits or a single size was measured;
        ``batch_tokens``, the same in tokens where texts are annotated, for ``nb.annotate(notes, batch_tokens=sweep.batch_tokens)``; ``why``, in a sentence; ``points``, with
        ``rows``, ``throughput`` in rows a second, its quartiles ``spread``, ``memory`` in bytes, ``first_step_seconds`` and
        ``fits``; ``limit`` in bytes; and ``plot()``. Its text form has the knee and no other figure.

    Raises:
        ConfigurationError: For what cannot be measured, for data that are none, and for numbers out of their range.
        ModelError: Where the model cannot be loaded.
        DeviceError: Where the device cannot be used.

    Out of memory is a point with ``fits=False``, and the caches of the device are emptied after it. What a step raises beside
    that passes through. Models are loaded for the sweep and let go after it; the session, a model of yours and random
    numbers stay as they are; hooks of a model of yours run in its copy. A function of your own changes what it changes.

    Example:
        >>> import torch
        >>> report = sweep(torch.nn.Linear(8, 8), torch.ones(2, 8), device="cpu", max_batch_size=4)
        >>> [point.rows for point in report.points], report.knee in (1, 2, 3, 4)
        ([1, 2, 3, 4], True)
    """
    begin = current_time()
    seconds = check_number("seconds", seconds, above=0, example="30")
    if check_number("min_gain", min_gain, 1, above=0, example="0.03") == 1:
        raise ConfigurationError(f"min_gain must be a fraction, got {describe_value(min_gain)}.", "Pass one such as 0.03.")
    max_batch_size = check_optional_integer("max_batch_size", max_batch_size)
    min_batch_size = check_optional_integer("min_batch_size", min_batch_size)
    if max_batch_size and min_batch_size and min_batch_size > max_batch_size:
        what = f"min_batch_size={min_batch_size} is more than max_batch_size={max_batch_size}."
        raise ConfigurationError(what, "Pass a smaller one, or leave it out.")
    with SESSION.operation(progress):
        if is_token_classifier(model) and not training and data is not None:
            remedy = "Leave them out, and pass length=... if they are not about 128 tokens long."
            raise ConfigurationError("A sweep reads no texts: all its rows have one length.", remedy)
        subject, place = make_target(model, data, training=training, length=length, device=device, arguments=arguments)
        first = min_batch_size or min(SMALLEST_TRAINING if training else 1, max_batch_size or SMALLEST_TRAINING)
        with build_benchmarks(subject, [place]) as benches:
            report = run_sweep(subject, benches[place], seconds, begin, min_gain, max_batch_size, first)
        if report.batch_tokens and not report.still_increasing:
            given = {**arguments, "device": place}
            spec = SESSION.load_spec(model, given)[0] if is_model_name(model) else SESSION.models.spec_of(model.model)
            if spec:
                SESSION.save_batch_size(spec, place, report.batch_tokens, "nb.sweep()")
        return report


def run_sweep(  # noqa: PLR0913, PLR0917 - what a person asked for
    subject: BenchmarkTarget,
    bench: Benchmark,
    seconds: float,
    begin: float,
    gain: float,
    largest: int | None,
    smallest: int,
) -> SweepReport:
    """Return what a sweep of a subject finds, so that nothing holds the model when the device's memory is handed back."""
    device = normalize_device(bench.device)
    release_memory(device)
    limit = memory_limit(device, SESSION.device_manager.memory_fraction(device))
    measurement = Measurement(bench, seconds, limit, begin)
    search = KneeSearch(measurement.stop_reason, measurement.remeasure, gain, largest, smallest)
    for rows in search.sizes():
        search.points[rows] = measurement.point(rows)
    # The search measured each size at another moment; those near the best are measured again side by side, so that heat and
    # other programs touch all of them alike, and only these are compared.
    compared = close_points(search.measured_points)
    if len(compared) > 1:
        compared = measurement.rounds(compared, ROUNDS)
    SESSION.notify(ProgressEvent("Sweeping", subject.name))
    search.points.update((point.rows, point) for point in compared)
    knee = knee_of(compared, gain)
    if len(search.points) == 1 and search.stopped in {LARGEST, TIME}:
        knee = None
    last = measurement.last
    nothing = {"name": subject.name, "task": subject.task, "simulated": is_mps_simulated()}
    return SweepReport(
        **(last.facts if last else nothing),
        device=device,
        points=search.measured_points,
        remeasured_points=tuple(compared),
        knee=knee.rows if knee else None,
        stop_code=search.stopped,
        limit=limit,
        method=measurement.method,
        min_gain=gain,
        length=last.length if last else None,
        seconds=seconds,
    )


@dataclass
class KneeSearch:
    """A search for the sizes that are worth measuring."""

    # Says why a number of rows must not be measured after these points: one of the reasons above, or nothing.
    stop_check: Callable[[int, Sequence[Point]], str]
    # Measures points once more, in turn, before they end the search.
    remeasure: Callable[[Sequence[Point]], Sequence[Point]]
    gain: float = MIN_KNEE_GAIN  # A larger batch pays if it gives more than this share more throughput.
    largest: int | None = None  # The most rows; ``None`` for any.
    smallest: int = 1  # The rows that are measured first.
    points: dict[int, Point] = field(default_factory=dict)  # What was measured, by rows.
    stopped: str = ""  # Why the doubling ended.

    @property
    def measured_points(self) -> tuple[Point, ...]:
        """The points, the smallest first."""
        return tuple(self.points[rows] for rows in sorted(self.points))

    def sizes(self) -> Iterator[int]:  # noqa: C901 - the search, from top to bottom
        """Yield the numbers of rows to measure; before the next one, the caller puts the point among ``points``."""
        # Double until there is a reason to end.
        rows = self.smallest
        bound = None  # The smallest size that is known not to fit, or not to be measured for want of memory.
        while not self.stopped:
            yield rows
            following = rows * 2 if self.largest is None else min(rows * 2, self.largest)
            if not self.points[rows].fits:
                self.stopped = OUT_OF_MEMORY
                bound = rows
            elif following == rows:
                self.stopped = LARGEST
            elif not self._last_pay():
                self.stopped = THROUGHPUT
            else:
                self.stopped = self.stop_check(following, self.measured_points)
                bound = following if self.stopped == MEMORY else None
            rows = following

        # If throughput still rises at the largest that fits, bisect between it and what does not fit.
        there = fitting(self.measured_points)
        if bound is not None and there and knee_of(there, self.gain) == there[-1]:
            low = there[-1].rows
            while bound - low > max(1, low * EDGE):
                rows = (low + bound) // 2
                hindered = self.stop_check(rows, self.measured_points)
                if hindered not in {"", MEMORY}:
                    break
                if not hindered:
                    yield rows
                if hindered or not self.points[rows].fits:
                    bound = rows
                else:
                    low = rows

        # Bisect around the knee and the best until sizes there are close to each other.
        while between := [rows for rows in self._between() if not self.stop_check(rows, self.measured_points)]:
            yield from between

    def _last_pay(self) -> bool:
        """Return whether one of the last doublings gained enough over all before them."""
        best = best_of(self.measured_points[:-PATIENCE])
        last = self.measured_points[-PATIENCE:]
        if best is None or any_pays(last, best, self.gain):
            return True
        # Another program may have slowed the last ones: measure them and the best once more, in turn.
        self.points.update((point.rows, point) for point in self.remeasure([best, *last]))
        best = best_of(self.measured_points[:-PATIENCE])
        return best is None or any_pays(self.measured_points[-PATIENCE:], best, self.gain)

    def _between(self) -> list[int]:
        """Return the sizes in the middle between the knee, the best and their neighbours that are not yet fine enough."""
        most = max((point.rows for point in fitting(self.measured_points)), default=0)
        sizes = [
            point.rows for point in self.measured_points if point.rows <= most
        ]  # One that failed once is not tried again.
        centres = {
            point.rows for point in (knee_of(self.measured_points, self.gain), best_of(self.measured_points)) if point
        }
        return [
            (low + high) // 2
            for low, high in itertools.pairwise(sizes)
            if centres & {low, high} and high - low > max(1, low // MIN_RELATIVE_GAP)
        ]


WARM_UP = 0.05  # Seconds of steps after the first pass that make a shape warm; one step that takes longer is enough.
STEPS = 5  # The fewest timed steps of a point.
SECONDS_OF_A_POINT = 0.3  # For how many seconds a point is timed.
LONG = 0.5  # If a step takes more than so many seconds, FEWEST steps are enough.
FEWEST = 3  # The fewest timed steps of a long step, and the fewest rounds.
UNTIMED_STEPS = 3.5  # The steps of a point that are not timed: a first, longer one, one to warm up, one for its memory.
ROUNDS = 9  # In so many rounds the sizes near the best are measured in turn, or in as many as there is time for.
SECONDS_PER_VISIT = 0.05  # How many seconds a size is measured in a round, at least one step.
SHARE = 0.6  # The share of the time that the search may take; the rest is for the rounds.


@dataclass
class Measurement:
    """A bench under measurement."""

    bench: Benchmark  # What is measured.
    time_budget: float  # About how long the sweep may take.
    limit: int | None = None  # The memory that a step may take, ``None`` if it is not known.
    begin: float = field(default_factory=current_time)  # When it began.
    method: str = ""  # How memory was measured, in words.
    last: Workload | None = None  # The last workload, which tells of length, workers and types.

    @property
    def elapsed(self) -> float:
        """The seconds since the beginning."""
        return current_time() - self.begin

    def point(self, rows: int) -> Point:
        """Measure a number of rows."""
        SESSION.notify(ProgressEvent("Sweeping", f"{self.bench.name}, batches of {pluralize(rows, 'row')}"))
        return self._if_it_fits(partial(self._measured, rows)) or Point(rows, fits=False)

    def _measured(self, rows: int) -> Point:
        workload = self.last = self.bench.fixed_shape_workload(rows)
        batch = next(workload.batches())
        first = workload.seconds(batch)
        step = partial(workload.seconds, batch)
        repeat_measurement(step, fewest=1, seconds=WARM_UP)
        memory, self.method = measure_step_memory(self.bench.device, lambda: workload.run(batch))
        timed = step()
        fewest = FEWEST if timed > LONG else STEPS
        times = [timed, *repeat_measurement(step, fewest=fewest - 1, seconds=SECONDS_OF_A_POINT - timed)]
        return Point(rows, memory=memory, first_step_seconds=first).with_timings(times)

    def stop_reason(self, rows: int, points: Sequence[Point]) -> str:
        """Return why a number of rows must not be measured: the memory that it is expected to take, or the time."""
        memory = expected_memory(points, rows)
        headroom = parse_device_argument(self.bench.device).headroom
        if self.limit is not None and memory is not None and memory > self.limit * headroom:
            return MEMORY
        seconds = rows / fitting(points)[-1].speed
        steps = FEWEST if seconds > LONG else STEPS
        after = self.elapsed + max(seconds * steps, SECONDS_OF_A_POINT) + seconds * UNTIMED_STEPS
        return TIME if after > self.time_budget * SHARE else ""

    def remeasure(self, points: Sequence[Point]) -> Sequence[Point]:
        """Return points measured once more in turn, if there is time for it, or else as they are."""
        seconds = sum(2 * point.rows / point.speed for point in points) * FEWEST
        return self.rounds(points, FEWEST) if self.elapsed + seconds < self.time_budget * SHARE else points

    def rounds(self, points: Sequence[Point], most: int) -> list[Point]:
        """Return points measured in turn, in rounds; after a few of them, time may end it."""
        name = f"{self.bench.name}, sizes near the best in turn"
        turns = SESSION.track("Sweeping", name, range(most), "round")
        rounds = itertools.takewhile(lambda turn: turn < FEWEST or self.elapsed <= self.time_budget, turns)
        visits = {point: partial(self._if_it_fits, partial(self._visited, point.rows)) for point in points}
        # A size that does not fit this time is left out, which the points know already.
        seconds = {
            point: list(itertools.chain(*filter(None, times))) for point, times in interleave(visits, rounds).items()
        }
        return [point.with_timings(times) if times else point for point, times in seconds.items()]

    def _visited(self, rows: int) -> list[float]:
        """Return the times of a few steps."""
        workload = self.bench.fixed_shape_workload(rows)
        batch = next(workload.batches())
        step = partial(workload.seconds, batch)
        first = step()  # It also warms this shape up; a long one was warm soon enough.
        return repeat_measurement(step, fewest=1, seconds=SECONDS_PER_VISIT) if first < SECONDS_PER_VISIT else [first]

    def _if_it_fits(self, measure: Callable[[], Measured]) -> Measured | None:
        """Return what is measured; ``None`` if the device runs out of memory, of which the caches are then emptied."""
        try:
            return measure()
        except (RuntimeError, MemoryError) as error:
            if not is_out_of_memory(error):
                raise
        release_memory(self.bench.device)  # Here the error is gone, with the tensors of its frames.
        return None


def release_memory(device: str) -> None:
    """Let go what a batch held, also in a cycle with an error, and hand cached blocks back."""
    gc.collect()
    empty_cache(device)


# The share of the memory of a GPU that must stay free: the allocator splits blocks, and other batches are larger.
HEADROOM_FRACTION = 0.1

# Ways to measure the memory of a step.
ALLOCATOR = "the most that tensors took during a step, with the model, as torch's allocator counts it"
DRIVER = "what the device gave the process for a step that began with an empty cache: this torch counts no peak on MPS"
PROFILER = "the most that the tensors made during a step took at once, beside the model, as torch's profiler saw it"
NOT_KNOWN = "not known: another profiler was on"

# What the processes of a container may hold on Linux, and what they hold (the kernel's admin-guide/cgroup-v2).
GROUP_FILES = (Path("/sys/fs/cgroup/memory.max"), Path("/sys/fs/cgroup/memory.current"))


def measure_step_memory(device: str, step: Callable[[], object]) -> tuple[int | None, str]:
    """Run a step to its end on a device and return the most memory that it took, in bytes, and how that was measured."""
    asked = parse_device_argument(device)
    if not asked.has_allocator:
        return profile_peak_memory(step)
    if asked.memory().peak is None:
        asked.empty_cache()
        step()
        return asked.memory().reserved, DRIVER
    asked.reset_peak()
    step()
    return asked.memory().peak, ALLOCATOR


def profile_peak_memory(step: Callable[[], object]) -> tuple[int | None, str]:
    """Run a step on the CPU under torch's profiler and return the most that its tensors took at once."""
    if is_profiler_active():
        step()
        return None, NOT_KNOWN
    with profile_device("cpu", profile_memory=True) as profiler:
        step()
    # What tensors take (positive) and give back (negative), in order.
    return max(itertools.accumulate(iter_memory_changes(profiler), initial=0)), PROFILER


def memory_limit(device: str, fraction: float | None) -> int | None:
    """Return how much a step may take on a device with its model, in bytes, counted as :func:`measure_step_memory` counts.

    torch refuses more than a ``fraction`` of the device's memory; on MPS more than 1 counts as 1: torch would allow it (the
    high watermark is 1.7 by itself), but the Mac would swap. ``None`` if nothing is known.
    """
    known = parse_device_argument(device)
    if not known.has_allocator:
        return available_memory()
    recommended = known.memory().recommended
    return None if recommended is None else int(recommended * min(1.0, fraction or 1.0))


def available_memory() -> int:
    """Return how much memory this process can still get: of the computer, of its container, and of its own limit."""
    psutil = import_psutil()
    rest = [int(psutil.virtual_memory().available)]
    container = container_memory(*GROUP_FILES)
    if container is not None:
        rest.append(container)
    process = psutil.Process()
    if hasattr(process, "rlimit"):  # macOS does not keep to a limit of addresses (``ulimit -v``), and Windows has none.
        limit = process.rlimit(psutil.RLIMIT_AS)[0]
        if limit != psutil.RLIM_INFINITY:
            rest.append(limit - int(process.memory_info().vms))
    return max(0, min(rest))


def container_memory(most: Path, held: Path) -> int | None:
    """Return what the processes of a container may still take, ``None`` if they have no limit, or if it is not known."""
    try:
        return int(most.read_text("ascii")) - int(held.read_text("ascii"))
    except (OSError, ValueError):
        return None


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
