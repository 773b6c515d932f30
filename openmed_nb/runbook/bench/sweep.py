"""``nb.sweep``: throughput and memory over batch sizes, and the knee of the throughput curve.

:func:`search_sizes` doubles the batch size while throughput improves and the batch fits, then bisects. It does not depend on a
device, so that tests can search synthetic curves. :class:`SweepMeasurement` measures the sizes.
"""

from __future__ import annotations

import contextlib
import gc
import itertools
import math
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from operator import attrgetter
from pathlib import Path
from typing import Literal

from ..._events.activity import ProgressEvent
from ..._render.display import UNITS, Report, Table, format_bytes, format_percent, pluralize
from ..._render.drawing import Axes, AxisMarker, Chart, Series
from ..._utils.clock import current_time
from ..._utils.validation import check_number, check_optional_integer
from ...devices.machine import import_psutil
from ...devices.profilers import is_profiler_active, iter_memory_changes, profile_device
from ...devices.registry import empty_cache, get_device, is_out_of_memory
from ...devices.request import normalize_device
from ...devices.system_status import BackgroundLoadReader
from ...errors import ConfigurationError
from ...session import SESSION, check_options
from ...training.curve import memory_exponent
from .timing import (
    MAX_RATIO,
    Measured,
    Quartiles,
    find_disturbance,
    format_rate,
    interleave,
    quartiles,
    repeat_measurement,
)
from .workloads import (
    ANNOTATION,
    Benchmark,
    StepReport,
    build_benchmarks,
    is_token_classifier,
    make_target,
)

DEFAULT_SECONDS = 30.0  # Approximate duration of a sweep.
MAX_TICK_LABELS = 9  # If there are more sizes on an axis, only some of them are labeled.
# ``torch.nn.functional.batch_norm`` raises an error in training if there is a single value per channel.
MIN_TRAINING_ROWS = 2

# Minimum relative gain in throughput that justifies a larger batch. The rest of the 5% by which a manual choice may be worse
# is left for noise.
MIN_KNEE_GAIN = 0.03
# The same if noise can explain the gain. The smaller of two such batches pads short texts less and takes less memory. A gain
# above 10% also changes a verdict.
MIN_UNCLEAR_GAIN = 0.1

# Stop codes: larger batches do not improve throughput, would come near the memory limit, do not fit, exceed the requested
# maximum, or take too long. An empty string means that the search may continue.
StopCode = Literal["", "throughput", "memory", "out of memory", "largest", "time"]

STOP_REASONS: Mapping[StopCode, str] = {
    "": "no larger size that fits was measured",
    "throughput": "larger batches were not tried because of too little improvement",
    "memory": "larger batches were not tried because of the memory limit",
    "out of memory": "larger batches do not fit in memory",
    "largest": "larger batches were not requested",
    "time": "batches of more than {rows} rows were not tried because of the time budget",
}

# The search ends after this many doublings in a row without improvement. A single one can be an unfavorable size of a kernel.
PATIENCE = 2

# Sizes around the knee and the best are bisected until neighbors differ by less than 1/MIN_RELATIVE_GAP of their size.
MIN_RELATIVE_GAP = 4


@dataclass(frozen=True)
class Point:
    """Measurement of one batch size.

    Attributes:
        rows: Batch size.
        throughput: Rows per second for the median step, or ``None`` if the batch does not fit in memory.
        memory: Peak memory of a step in bytes, or ``None`` if unknown.
        fits: Whether the batch fits in memory.
        spread: First and third quartile of the throughput, or ``None`` if the batch does not fit in memory.
    """

    rows: int
    throughput: float | None = None
    memory: int | None = None
    fits: bool = True
    spread: Quartiles | None = None

    @property
    def speed(self) -> float:
        """Throughput in rows per second, or 0 if the batch does not fit in memory."""
        return self.throughput or 0.0

    def overlaps(self, other: Point) -> bool:
        """Return whether the quartiles of two sizes overlap, so that it is not clear which of them is faster."""
        if not (self.spread and other.spread):
            return False
        return self.spread.low <= other.spread.high and other.spread.low <= self.spread.high

    def with_timings(self, seconds: Sequence[float]) -> Point:
        """Return this point with the throughput of at least one timed step."""
        speeds = [self.rows / step_seconds for step_seconds in seconds]
        return replace(self, throughput=statistics.median(speeds), spread=quartiles(speeds))


def select_fitting(points: Iterable[Point]) -> list[Point]:
    """Return the points that fit in memory, sorted by size."""
    return sorted((point for point in points if point.fits), key=attrgetter("rows"))


def find_best(points: Iterable[Point]) -> Point | None:
    """Return the point with the highest throughput, the smallest one in a tie, or ``None`` if none fits in memory."""
    return max(select_fitting(points), key=attrgetter("speed"), default=None)


def _find_knee(points: Iterable[Point]) -> Point | None:
    """Return the smallest point over which no larger point gains enough, or ``None`` if none fits.

    ``MIN_KNEE_GAIN`` is enough, but ``MIN_UNCLEAR_GAIN`` if their quartiles overlap.

    Example:
        >>> _find_knee([Point(8, 50.0), Point(16, 99.0), Point(32, 101.0), Point(64, fits=False)]).rows
        16
    """
    candidates = select_fitting(points)
    for index, point in enumerate(candidates):
        limits = (
            (larger, MIN_UNCLEAR_GAIN if larger.overlaps(point) else MIN_KNEE_GAIN) for larger in candidates[index:]
        )
        if all(larger.speed <= point.speed * (1 + limit) for larger, limit in limits):
            return point
    return None


@dataclass(frozen=True, repr=False)
class SweepReport(StepReport):
    """Result of a batch-size sweep: throughput and memory over batch sizes, and the knee.

    It also has the attributes ``name``, ``task``, ``dtype``, ``workers``, ``row_shape`` and ``simulated``.

    Attributes:
        device: Name of the device.
        points: All measured sizes, sorted, including those that ran out of memory. Empty if the computer was busy at the start.
        knee: Batch size over which no larger size clearly gains more than 3%. ``None`` if not even one row fits, if only one
            size was measured although larger sizes may fit, or if the times are not reliable.
        stop_code: Why no larger batch was measured: ``"throughput"`` (no improvement), ``"memory"`` (expected to come near the
            limit), ``"out of memory"``, ``"largest"`` (not requested) or ``"time"``.
        limit: Memory that a step may use in bytes, or ``None`` if unknown.
        length: Number of tokens per row, or ``None`` if rows are not tokens.
        is_saved: Whether ``annotate`` uses the knee from now on.
    """

    device: str
    points: tuple[Point, ...]
    knee: int | None = None
    stop_code: StopCode = ""
    limit: int | None = None
    length: int | None = None
    is_saved: bool = False

    COMMAND = "nb.sweep(model)"
    SCHEMA = "openmed_nb/sweep/1"
    JSON_EXCLUDE = ("is_saved",)
    JSON_PROPERTIES = ("batch_tokens", "best", "reason", "similar_sizes", "still_increasing")

    @property
    def knee_point(self) -> Point | None:
        """Measurement at the knee, or ``None`` if there is no knee."""
        return next((point for point in self.points if point.rows == self.knee), None)

    @property
    def batch_tokens(self) -> int | None:
        """Knee in tokens for ``nb.annotate(notes, batch_tokens=sweep.batch_tokens)``, or ``None`` for other tasks."""
        return self.knee * self.length if self.task == ANNOTATION and self.knee and self.length else None

    @property
    def best(self) -> Point | None:
        """Measurement with the highest throughput, or ``None`` if no size fits in memory."""
        return find_best(self.points)

    @property
    def similar_sizes(self) -> tuple[int, ...]:
        """Other batch sizes whose quartiles of the throughput overlap those of the knee."""
        knee = self.knee_point
        return tuple(point.rows for point in self.points if knee and point != knee and point.overlaps(knee))

    @property
    def still_increasing(self) -> bool:
        """Whether throughput still increases at the largest measured size that fits in memory."""
        fitting_points = select_fitting(self.points)
        return bool(fitting_points) and fitting_points[-1].rows == self.knee

    @property
    def reason(self) -> str:
        """Sentence that explains the knee, or why there is none."""
        if self.disturbance:
            return self.not_measured
        if not select_fitting(self.points):
            return f"Not even {pluralize(self.points[0].rows, 'row')} fit in memory."
        stop_reason = STOP_REASONS[self.stop_code].format(rows=f"{self.points[-1].rows:,}")
        if not self.knee:
            # This size and its double, and as much again, because times vary on a busy computer.
            num_steps = 2 * 3 * (MIN_STEPS + UNTIMED_STEPS) / SEARCH_TIME_FRACTION
            seconds = max(DEFAULT_SECONDS, math.ceil(num_steps * self.points[0].rows / self.points[0].speed))
            return f"Two sizes are needed to find the best; {stop_reason}. Increase max_batch_size, or seconds to {seconds:g}."
        if self.still_increasing:
            return f"The largest batch size tested; throughput is still increasing; {stop_reason}."
        reason = f"No larger batch size in this sweep is clearly more than {format_percent(MIN_KNEE_GAIN)} faster; {stop_reason}."
        sizes = ", ".join(map(str, self.similar_sizes))
        similar = f" Another sweep can recommend another size: the quartiles of {sizes} rows overlap those of the knee."
        return reason + (similar if sizes else "")

    def to_report(self) -> Report:
        """Return a report with the knee and the measurements."""
        device = self.device_label(self.device)
        title = f"Batch sweep on {device}: {'not measured' if self.disturbance else 'no best batch size found'}"
        if self.knee:
            may_be_larger = self.still_increasing and self.stop_code in {"largest", "time"}
            title = f"Best batch size on {device}: {'at least ' if may_be_larger else ''}{pluralize(self.knee, 'row')}"
        sentences = [f"Model: {self.name}, task: {self.task}.", self.reason]
        if self.length:
            sentences[0] += f" Each row has {pluralize(self.length, 'token')}."
        if self.workers:
            sentences[0] += f" The loader has {pluralize(self.workers, 'worker')}."
        if self.is_saved:
            sentences[-1] += " nb.annotate uses this batch size for this model from now on."
        elif self.batch_tokens and self.stop_code == "time":
            sentences[-1] += " It is not stored for nb.annotate. To store one, repeat the sweep with more seconds."
        if self.batch_tokens:
            tokens = f"{pluralize(self.knee or 0, 'row')} of {pluralize(self.length or 0, 'token')}"
            sentences.append(
                f"To set this batch size ({tokens}) yourself: nb.annotate(notes, batch_tokens={self.batch_tokens})."
            )
        rows = []
        for point in self.points:
            notes = {
                "out of memory": not point.fits,
                "knee": point.rows == self.knee,
                "best": bool(self.knee) and point == self.best,
            }
            rows.append(
                (
                    f"{point.rows:,}",
                    *self.select_reliable(
                        format_rate(point.throughput), " to ".join(map(format_rate, point.spread or ()))
                    ),
                    format_bytes(point.memory),
                    ", ".join(note for note, applies in notes.items() if applies),
                )
            )
        columns = ("rows", *self.select_reliable("rows/s", "quartiles"), "memory", "")
        table = Table("Batch sizes", columns, tuple(rows), collapsed=True)
        # A chart of a single size is a dot.
        charts = self.charts if len(select_fitting(self.points)) > 1 else ()
        return Report(title, tuple(sentences), metrics=(table,), charts=charts, status=self.reliability_status)

    @property
    def charts(self) -> tuple[Chart, ...]:
        """Charts of throughput and memory over the binary logarithm of the batch size."""
        points = select_fitting(self.points)
        powers = [1 << exponent for exponent in range(self.points[-1].rows.bit_length())]
        ticks = tuple(
            AxisMarker(math.log2(rows), f"{rows:,}") for rows in powers[:: 1 + len(powers) // MAX_TICK_LABELS]
        )
        markers = [AxisMarker(math.log2(self.knee), f"knee: {pluralize(self.knee, 'row')}")] if self.knee else []
        markers += [AxisMarker(math.log2(point.rows), "out of memory") for point in self.points if not point.fits]
        throughput = Series(
            "throughput",
            tuple(math.log2(point.rows) for point in points),
            tuple(point.speed for point in points),
            tuple(f"{pluralize(point.rows, 'row')}: {format_rate(point.speed)} rows/s" for point in points),
        )
        caption = f"Throughput on {self.device_label(self.device)}"
        axes = Axes("rows/s", "rows per batch", ticks, vertical_markers=tuple(markers))
        throughput_charts = self.select_reliable(Chart(caption, lines=(throughput,), axes=axes))
        if any(point.memory is None for point in points):
            return throughput_charts
        sizes = [point.memory or 0 for point in points]
        exponent = memory_exponent(max(sizes, default=0))
        unit = 1024**exponent
        memory = Series(
            "memory",
            throughput.x,
            tuple(size / unit for size in sizes),
            tuple(f"{pluralize(point.rows, 'row')}: {format_bytes(point.memory)}" for point in points),
        )
        memory_axes = replace(axes, y_unit=UNITS[exponent], vertical_markers=(), height=6)
        return *throughput_charts, Chart("Memory of a step", lines=(memory,), axes=memory_axes)


def sweep(  # noqa: PLR0913 - each parameter is an independent option of the public function
    model: object = None,
    data: object = None,
    *,
    training: bool = False,
    device: str | None = None,
    length: int | None = None,
    max_batch_size: int | None = None,
    seconds: float = DEFAULT_SECONDS,
    **arguments: object,
) -> SweepReport:
    """Find the batch size at the knee of the throughput curve on a device, and measure the memory of each size.

    At the knee, no larger batch is more than 3% faster, or 10% if the quartiles of the two overlap. The batch size is doubled
    until two doublings in a row improve throughput too little. Doubling also ends if memory is
    expected to come near its limit, or if a batch does not fit. Then sizes around the best are bisected. All sizes that
    fit are measured again in interleaved rounds. Each size has a fixed shape. Its first step and the warm-up are not
    timed. The first size is 1, or 2 in training, because BatchNorm cannot be trained on a single row.

    Args:
        model: Name of a model, a pipeline from :func:`load_pipeline`, a torch module, or a custom function that runs a step
            with a batch. If ``None``, use the bundled model.
        data: For a module, example inputs or a ``DataLoader``. Its first batch is repeated or truncated to each size. This
            applies to each tensor whose first dimension is the number of rows. If a 4x4 mask is among the inputs, pass an
            example with another number of rows. For a function, a function that builds a batch with a given number of rows:
            ``nb.sweep(step, make_batch).knee``.
        training: Whether to measure training steps (forward, backward and AdamW) on a copy of the model.
        device: Device to measure. If ``None``, use the active device.
        length: Number of tokens per row for a name or a pipeline. If ``None``, use 128 tokens, or the maximum of the model.
        max_batch_size: Maximum batch size to try. If ``None``, there is no limit.
        seconds: Approximate duration of the sweep in seconds after the model is loaded, 30 by default.
        arguments: Arguments of :func:`openmed_nb.load_model` for a model name, such as ``revision``.

    Returns:
        The report. Its ``knee`` is a number of rows, or ``None`` if not even one row fits, a single size was measured, or
        the times are not reliable: other programs use more than a quarter of the processor cores, the computer is hot, or
        repeated times differ by half or more. ``disturbance`` is the reason, and nothing is stored.
        ``batch_tokens`` is the knee in tokens for annotation: ``nb.annotate(notes, batch_tokens=sweep.batch_tokens)``.
        ``reason`` explains the knee in a sentence. ``points`` have ``rows``, ``throughput`` in rows per second,
        ``memory`` in bytes and ``fits``. ``limit`` is the memory limit in bytes.

    Raises:
        ConfigurationError: If the model or the data cannot be measured, or if a number is out of range.
        ModelError: If the model cannot be loaded.
        DeviceError: If the device is unavailable.

    A batch that runs out of memory is a point with ``fits=False``, and the caches of the device are emptied after it. All other
    errors of a step are raised. Models are loaded for the sweep and released afterwards. The session, your model and the random
    number generators are not changed. Hooks of your model run in its copy. Side effects of a custom function are not undone.

    Example:
        >>> import torch
        >>> report = sweep(torch.nn.Linear(8, 8), torch.ones(2, 8), device="cpu", max_batch_size=4)
        >>> [point.rows for point in report.points], report.knee in (1, 2, 3, 4)
        ([1, 2, 3, 4], True)
    """
    check_options(sweep, arguments)
    seconds = check_number("seconds", seconds, above=0, example="30")
    max_batch_size = check_optional_integer("max_batch_size", max_batch_size)
    with SESSION.operation():
        if is_token_classifier(model) and not training and data is not None:
            raise ConfigurationError(
                "A sweep does not accept texts, because all of its rows have one length.",
                "Remove data, and pass length=... if your texts are not about 128 tokens long.",
            )
        target, device_name = make_target(
            model, data, training=training, length=length, device=device, arguments=arguments
        )
        min_rows = min(MIN_TRAINING_ROWS if training else 1, max_batch_size or MIN_TRAINING_ROWS)
        with build_benchmarks(target, [device_name]) as benchmarks:
            report = run_sweep(benchmarks[device_name], seconds, max_batch_size, min_rows)
        # Without the larger sizes, the knee is not known.
        if target.spec and report.batch_tokens and not report.still_increasing and report.stop_code != "time":
            SESSION.save_batch_size(target.spec, device_name, report.batch_tokens)
            report = replace(report, is_saved=True)
        return report


def run_sweep(benchmark: Benchmark, seconds: float, max_rows: int | None, min_rows: int) -> SweepReport:
    """Run a sweep.

    This is a separate function, so that no local variable references the model when its memory is released.
    """
    device = normalize_device(benchmark.device)
    release_memory(device)
    limit = memory_limit(device, SESSION.device_manager.memory_fraction(device))
    workload = benchmark.fixed_shape_workload(min_rows)
    report = SweepReport(
        **workload.report_fields,
        device=device,
        points=(),
        limit=limit,
        length=workload.length,
        disturbance=find_disturbance(),
    )
    if report.disturbance:
        return report
    measurement = SweepMeasurement(benchmark, seconds, limit)
    read_load = BackgroundLoadReader()
    points, stop_code = search_sizes(measurement, max_rows, min_rows)
    # The search measured each size at a different time. In interleaved rounds, thermal throttling and other programs affect
    # all sizes alike, so only these measurements are compared.
    fitting = select_fitting(points)
    remeasured = measurement.measure_interleaved(fitting) if len(fitting) > 1 else fitting
    SESSION.notify(ProgressEvent("Sweeping", benchmark.name))
    pairs = list(zip(fitting, remeasured, strict=True))
    # Sizes that are less than half as fast as the best cannot be the knee. The speed of small sizes varied by a factor of 1.7 on
    # an H200, which waits for the CPU in them, and by 1.8 on 16 processor cores, both without other load.
    pairs = [pair for pair in pairs if 2 * pair[1].speed >= max(point.speed for point in remeasured)]
    ratios = [after.speed / before.speed for before, after in pairs]
    # The ratio of the size whose speed changed most since the search.
    largest_change = max(ratios, key=lambda ratio: max(ratio, 1 / ratio), default=1.0)
    varies = any(point.spread and point.spread.high > MAX_RATIO * point.spread.low for _, point in pairs)
    disturbance = find_disturbance(read_load(), largest_change, varies)
    knee = _find_knee(remeasured)
    if disturbance or (len(points) == 1 and stop_code in {"largest", "time"}):
        knee = None
    return replace(
        report,
        points=_replace_points(points, remeasured),
        knee=knee.rows if knee else None,
        stop_code=stop_code,
        disturbance=disturbance,
    )


def search_sizes(
    measurement: SweepMeasurement, max_rows: int | None = None, min_rows: int = 1
) -> tuple[tuple[Point, ...], StopCode]:
    """Measure batch sizes until the knee is known, and return their points, sorted by size, and why the doubling ended.

    Args:
        measurement: Measurement of one benchmark.
        max_rows: Maximum number of rows, or ``None`` for no limit.
        min_rows: First number of rows to measure.
    """
    # Double the size until there is a reason to stop.
    points: tuple[Point, ...] = ()
    stop_code: StopCode = ""
    rows = min_rows
    while not stop_code:
        points = (*points, measurement.measure_size(rows))
        best = find_best(points[:-PATIENCE])
        next_rows = rows * 2 if max_rows is None else min(rows * 2, max_rows)
        if not points[-1].fits:
            stop_code = "out of memory"
        elif next_rows == rows:
            stop_code = "largest"
        elif best and not any(point.speed > best.speed * (1 + MIN_KNEE_GAIN) for point in points[-PATIENCE:]):
            stop_code = "throughput"
        else:
            stop_code = measurement.stop_reason(next_rows, points)
        rows = next_rows

    # Bisect around the knee and the best until neighboring sizes are close to each other.
    while True:
        centers = {point.rows for point in (_find_knee(points), find_best(points)) if point}
        sizes = [
            (low + high) // 2
            for low, high in itertools.pairwise(point.rows for point in points)
            if centers & {low, high} and high - low > max(1, low // MIN_RELATIVE_GAP)
        ]
        allowed = [rows for rows in sizes if not measurement.stop_reason(rows, points)]
        if not allowed:
            return points, stop_code
        points = _replace_points(points, map(measurement.measure_size, allowed))


def _replace_points(points: Iterable[Point], measured: Iterable[Point]) -> tuple[Point, ...]:
    """Return points with new measurements, which are added or replace those of the same size, sorted by size."""
    by_rows = {point.rows: point for point in itertools.chain(points, measured)}
    return tuple(by_rows[rows] for rows in sorted(by_rows))


# Seconds of steps that warm up a shape after its first step. A single longer step is also enough.
WARM_UP_SECONDS = 0.05
MIN_STEPS = 3  # Timed steps per point.
SECONDS_PER_POINT = 0.3
MIN_ROUNDS = 3
MAX_ROUNDS = 25  # Interleaved rounds of all sizes, if time allows.
# Untimed steps of a point: a first step, which is longer, a warm-up step, and a step that measures memory.
UNTIMED_STEPS = 3.5
SECONDS_PER_VISIT = 0.05  # Duration of a size in a round; it runs at least one step.
SEARCH_TIME_FRACTION = 0.6  # Fraction of the time budget for the search. The rest is for the interleaved rounds.


@dataclass
class SweepMeasurement:
    """Measurement of the batch sizes of one benchmark.

    Attributes:
        benchmark: Benchmark to measure.
        time_budget: Approximate duration of the sweep in seconds.
        limit: Memory that a step may use in bytes, or ``None`` if unknown.
        start: Start of the sweep, as a time of the clock.
    """

    benchmark: Benchmark
    time_budget: float
    limit: int | None = None
    start: float = field(default_factory=current_time)

    def measure_size(self, rows: int) -> Point:
        """Measure a batch size."""
        SESSION.notify(ProgressEvent("Sweeping", f"{self.benchmark.name}, batches of {pluralize(rows, 'row')}"))
        return self._measure_if_fits(partial(self._measure_point, rows)) or Point(rows, fits=False)

    def _measure_point(self, rows: int) -> Point:
        time_step = self._create_step_timer(rows)
        repeat_measurement(time_step, min_repeats=1, max_seconds=WARM_UP_SECONDS)
        memory = _measure_step_memory(self.benchmark.device, time_step)
        seconds = repeat_measurement(time_step, min_repeats=MIN_STEPS, max_seconds=SECONDS_PER_POINT)
        return Point(rows, memory=memory).with_timings(seconds)

    def stop_reason(self, rows: int, points: Sequence[Point]) -> StopCode:
        """Return the stop code for a number of rows, or an empty string if it may be measured.

        The reasons are the memory that the batch is expected to use, and the time that its measurement is expected to take.
        """
        memory = _expected_memory(points, rows)
        headroom = get_device(self.benchmark.device).headroom_fraction
        if self.limit is not None and memory is not None and memory > self.limit * headroom:
            return "memory"
        step_seconds = rows / select_fitting(points)[-1].speed
        timed_seconds = max(step_seconds * MIN_STEPS, SECONDS_PER_POINT)
        expected_end = current_time() - self.start + timed_seconds + step_seconds * UNTIMED_STEPS
        return "time" if expected_end > self.time_budget * SEARCH_TIME_FRACTION else ""

    def measure_interleaved(self, points: Sequence[Point]) -> list[Point]:
        """Measure points in interleaved rounds; after MIN_ROUNDS, the time budget may end them."""
        name = f"{self.benchmark.name}, interleaved rounds of all sizes"
        rounds = SESSION.track("Sweeping", name, range(MAX_ROUNDS), "round")
        visits = {point: partial(self._measure_if_fits, partial(self._visit_size, point.rows)) for point in points}
        # A visit that runs out of memory is ignored. The point keeps its earlier measurement.
        end = self.start + self.time_budget
        measured = interleave(visits, rounds, lambda number: number >= MIN_ROUNDS and current_time() > end)
        seconds = {point: list(itertools.chain(*filter(None, times))) for point, times in measured.items()}
        return [point.with_timings(times) if times else point for point, times in seconds.items()]

    def _visit_size(self, rows: int) -> list[float]:
        """Return the seconds of a few steps."""
        return repeat_measurement(self._create_step_timer(rows), min_repeats=1, max_seconds=SECONDS_PER_VISIT)

    def _create_step_timer(self, rows: int) -> Callable[[], float]:
        """Return the function that times a step, after a first step, in which MPS and CUDA compile or select kernels."""
        workload = self.benchmark.fixed_shape_workload(rows)
        time_step = partial(workload.time_step, next(workload.batches()))
        time_step()
        return time_step

    def _measure_if_fits(self, measure: Callable[[], Measured]) -> Measured | None:
        """Return the result of a measurement, or ``None`` if the device runs out of memory; its caches are then emptied."""
        try:
            return measure()
        except (RuntimeError, MemoryError) as error:
            if not is_out_of_memory(error):
                raise
        # Outside of the handler, the error no longer references the tensors of its frames.
        release_memory(self.benchmark.device)
        return None


def release_memory(device: str) -> None:
    """Release the memory of a batch, including reference cycles with an error, and the cached blocks of the device."""
    gc.collect()
    empty_cache(device)


# Fraction of the GPU memory that must stay free: the allocator splits blocks, and other batches are larger.
HEADROOM_FRACTION = 0.1

# Memory limit and current memory of the processes in a container on Linux (the kernel's admin-guide/cgroup-v2).
CGROUP_FILES = (Path("/sys/fs/cgroup/memory.max"), Path("/sys/fs/cgroup/memory.current"))


def _measure_step_memory(device: str, step: Callable[[], object]) -> int | None:
    """Run a step on a device and return its memory in bytes, or ``None`` if another profiler is active.

    The memory is the peak of the allocator, or what the driver keeps after the step if the allocator records no peak. Both
    include the model. On the CPU, it is the peak of the tensors that the step allocates.
    """
    parsed_device = get_device(device)
    if not parsed_device.has_allocator:
        if is_profiler_active():
            return None
        with profile_device("cpu", profile_memory=True) as profiler:
            step()
        # Allocations are positive and releases are negative, in order of time.
        return max(itertools.accumulate(iter_memory_changes(profiler), initial=0))
    if parsed_device.memory_stats().peak is None:
        parsed_device.empty_cache()
        step()
        return parsed_device.memory_stats().reserved
    parsed_device.reset_peak_memory_stats()
    step()
    return parsed_device.memory_stats().peak


def memory_limit(device: str, fraction: float | None) -> int | None:
    """Return the memory in bytes that a step may use on a device, as :func:`_measure_step_memory` counts it.

    torch does not allocate more than ``fraction`` of the device memory. On MPS, a fraction above 1 counts as 1: torch would
    allow it (its default high watermark is 1.7), but the Mac would swap.

    Returns:
        The limit, or ``None`` if it is unknown.
    """
    parsed_device = get_device(device)
    if not parsed_device.has_allocator:
        return _available_memory()
    recommended = parsed_device.memory_stats().recommended
    return None if recommended is None else int(recommended * min(1.0, fraction or 1.0))


def _available_memory() -> int:
    """Return the memory in bytes that this process can still allocate, given the machine and its container."""
    available = int(import_psutil().virtual_memory().available)
    with contextlib.suppress(OSError, ValueError):  # A container without a limit has "max".
        container_limit, used = (int(file.read_text("ascii")) for file in CGROUP_FILES)
        available = min(available, container_limit - used)
    return max(0, available)


def _expected_memory(points: Sequence[Point], rows: int) -> int | None:
    """Predict the memory in bytes for a larger number of rows from the measured points, or return ``None`` without points.

    With one point, memory is assumed to be proportional to the rows. Otherwise, the last two points are extrapolated linearly.

    Example:
        >>> _expected_memory([Point(1, memory=30)], 4), _expected_memory([Point(1, memory=30), Point(2, memory=40)], 4)
        (120, 60)
    """
    measured = [(point.rows, point.memory) for point in select_fitting(points) if point.memory is not None]
    if not measured:
        return None
    (previous_rows, previous_memory), (last_rows, last_memory) = [(0, 0), *measured][-2:]
    slope = max(0.0, (last_memory - previous_memory) / (last_rows - previous_rows))
    return math.ceil(last_memory + slope * max(0, rows - last_rows))
