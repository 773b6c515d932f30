"""``nb.sweep``: throughput and memory over batch sizes, and the size from which larger ones no longer pay."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

from ..._events.activity import Activity
from ..._render.display import UNITS, Report, Table, counted, in_bytes, plain
from ..._render.drawing import LIMIT, Axes, Line, Mark, Picture
from ..._utils.clock import now
from ..._utils.text import describe_value, shorten
from ..._utils.validation import number, whole_or_none
from ...devices.machine import mps_is_simulated
from ...devices.request import canonical
from ...errors import ConfigurationError
from ...models.registry import is_named
from ...session import SESSION
from ...training.curve import NEAR, memory_exponent, needing
from .sweep_knee import ENDS, KNEE_GAIN, LARGEST, OUT_OF_MEMORY, RISING, TIME, Point, Search, best_of, fitting, knee_of
from .sweep_measurement import Measurement, clean, limit_of
from .workloads import ANNOTATION, Bench, StepReport, Subject, put_on_devices

SECONDS = 30.0  # About how long a sweep takes.
MOST_SIZES = 9  # More sizes on an axis are named in part.
SMALLEST_TRAINING = 2  # ``torch.nn.functional.batch_norm`` refuses a single value for each channel.


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
    compared: tuple[Point, ...] = ()
    knee: int | None = None
    stopped: str = ""
    limit: int | None = None
    method: str = ""
    gain: float = KNEE_GAIN
    length: int | None = None
    seconds: float = SECONDS

    SCHEMA, HIDDEN = "openmed_nb/sweep/1", ("seconds",)
    ALSO = ("batch_tokens", "why", "end", "still_rising")

    @property
    def at_knee(self) -> Point | None:
        """The point of the knee."""
        return next((point for point in self.points if point.rows == self.knee), None)

    @property
    def batch_tokens(self) -> int | None:
        """The knee in tokens, for ``nb.annotate(notes, batch_tokens=sweep.batch_tokens)``; ``None`` for other tasks."""
        return self.knee * self.length if self.task == ANNOTATION and self.knee and self.length else None

    @property
    def best(self) -> Point | None:
        """The point with the highest throughput, whatever it takes; ``None`` if nothing fits."""
        return best_of(self.compared) or best_of(self.points)

    @property
    def still_rising(self) -> bool:
        """Whether throughput still rises at the largest size that was measured and fits."""
        there = fitting(self.points)
        return bool(there) and there[-1].rows == self.knee

    @property
    def why(self) -> str:
        """Why this size, with figures: what the best of the larger sizes would give."""
        knee = self.at_knee
        if knee is None:
            return self._not_found
        size = counted(knee.rows, "row")
        larger = [[one for one in points if one.rows > knee.rows] for points in (self.compared, self.points)]
        other = best_of(larger[0]) or best_of(larger[1])  # One that was measured beside it tells more.
        if other is None:
            return f"{size}: {self._rising}."
        change = round(100 * (other.speed / knee.speed - 1))
        pace = f"{abs(change)} % {'slower' if change < 0 else 'faster'}" if change else "as fast"
        memory = f" and take {other.memory / knee.memory:.1f} times the memory" if knee.memory and other.memory else ""
        return f"{size}: {other.rows:,} would be {pace}{memory}."

    @property
    def end(self) -> str:
        """Why no larger batch was measured, with figures."""
        there = fitting(self.points)
        if not there:
            return self._not_found
        return ENDS[self.stopped].format(rows=counted(there[-1].rows, "row"), limit=in_bytes(self.limit))

    @property
    def _rising(self) -> str:
        return f"still rising: {RISING.get(self.stopped, 'nothing larger was measured that fits')}"

    @property
    def _not_found(self) -> str:
        rows = min((point.rows for point in self.points), default=1)
        if fitting(self.points):
            were = "was" if rows == 1 else "were"
            return f"Only {counted(rows, 'row')} {were} measured, and a single size has no knee."
        return f"Not even {counted(rows, 'row')} {'fits' if rows == 1 else 'fit'} into the memory."

    def tokens(self, point: Point) -> float | None:
        """Return the throughput of a point in tokens a second; ``None`` if rows are not tokens."""
        return None if self.length is None or point.throughput is None else point.throughput * self.length

    def to_dict(self) -> dict[str, Any]:
        """Return everything as mappings, lists, numbers and strings, ready for JSON; ``best`` and ``compared`` are rows."""
        points = [{**plain(point), "tokens": self.tokens(point)} for point in self.points]
        compared, best = [point.rows for point in self.compared], self.best.rows if self.best else None
        return {**super().to_dict(), "points": points, "compared": compared, "best": best}

    def plot(self) -> Any:
        """Return a matplotlib figure of throughput and memory over the sizes; a notebook shows it.

        Raises:
            ConfigurationError: If matplotlib is not installed.
        """
        return drawn(self)

    @property
    def heading(self) -> str:
        """The device and the knee in words."""
        found = counted(self.knee, "row") if self.knee else "nothing fits"
        if not self.knee and fitting(self.points):
            how = f" in {self.seconds:g} s; try seconds={max(60.0, 2 * self.seconds):g}"
            if self.stopped == LARGEST:
                how = f"; only {counted(self.points[0].rows, 'row')} tried"
            found = f"best batch not found{how}"
        return f"on {self.shown(self.device)}: {found}"

    def report(self) -> Report:
        """Return the knee and how it was measured in words; the figures stand in the HTML alone."""
        rows = f", rows of {counted(self.length, 'token')}" if self.length else ""
        loader = f"; {counted(self.workers, 'worker')} in the loader" if self.workers else ""
        share = f"{100 * self.gain:g} %"
        choice = f"The smallest batch from which no larger one that was tried is more than {share} faster."
        if not self.knee:
            choice = self.why
        elif self.still_rising:
            choice = f"The largest batch that was tried; {self._rising}."
        annotate = f"To annotate in such batches: nb.annotate(notes, batch_tokens={self.batch_tokens})."
        model, method = f"{self.name}, {self.task}{rows}{loader}.", f"Memory: {self.method}." if self.method else ""
        sentences = tuple(filter(None, (model, choice, annotate if self.batch_tokens else "", method)))
        why = (("the knee", self.why), ("the end", self.end)) if self.knee else ()
        least = "at least " if self.still_rising and self.stopped in {LARGEST, TIME} else ""
        best = f"The best batch on {self.shown(self.device)} has {least}{counted(self.knee or 0, 'row')}"
        columns = ("rows", "rows/s", "quartiles", "tokens/s", "memory", "first pass", "timed steps", "")
        table = Table("Batch sizes", columns, tuple(self._row(point) for point in self.points), folded=True)
        return Report(
            f"Batch sweep {self.heading}",
            sentences,
            spoken=(best, *sentences) if self.knee else (),
            figures=(Table("Why", ("of what", "reason"), why), table),
            pictures=self._pictures(),
        )

    def _row(self, point: Point) -> tuple[str, ...]:
        notes = {"did not fit": not point.fits, "knee": point.rows == self.knee, "best": point == self.best}
        return (
            f"{point.rows:,}",
            rate(point.throughput),
            " to ".join(map(rate, point.spread or ())),
            rate(self.tokens(point)),
            in_bytes(point.memory),
            "" if point.first_seconds is None else f"{point.first_seconds:.3f} s",
            str(point.steps or ""),
            ", ".join(note for note, holds in notes.items() if holds),
        )

    def _pictures(self) -> tuple[Picture, ...]:
        """Return throughput and memory over the sizes; a single size would be a picture of a dot."""
        points = fitting(self.points)
        if len(points) < 2:  # noqa: PLR2004 - what a line needs
            return ()
        rows = tuple(math.log2(one.rows) for one in points)
        sizes = [1 << power for power in range(self.points[-1].rows.bit_length())]
        named = tuple(Mark(math.log2(size), f"{size:,}") for size in sizes[:: 1 + len(sizes) // MOST_SIZES])
        marks = [Mark(math.log2(self.knee), f"knee: {counted(self.knee, 'row')}")] if self.knee else []
        marks += [Mark(math.log2(one.rows), OUT_OF_MEMORY) for one in self.points if not one.fits]
        said = [(counted(one.rows, "row"), f"{rate(one.throughput)} rows/s", in_bytes(one.memory)) for one in points]
        speed = Line(
            *("speed", rows, tuple(one.speed for one in points), tuple(": ".join(one[:2]) for one in said)),
            tuple(one.spread or (one.speed, one.speed) for one in points),
        )
        across = Axes("rows/s", "rows in a batch", named, (), tuple(marks))
        caption = f"Throughput on {self.shown(self.device)}, with the quartiles of the steps"
        pictures = [Picture(caption, lines=(speed,), axes=across)]
        most = max((one.memory or 0 for one in points), default=0)
        exponent = memory_exponent(most)
        if all(one.memory is not None for one in points):
            taken = tuple((one.memory or 0) / 1024**exponent for one in points)
            memory = Line("memory", rows, taken, tuple(f"{one[0]}: {one[2]}" for one in said))
            limits = [Mark(self.limit / 1024**exponent, "limit")] if self.limit and self.limit <= NEAR * most else []
            below = replace(across, unit=UNITS[exponent], limits=tuple(limits), marks=(), height=6)
            pictures.append(Picture("Memory of a step", lines=(memory,), axes=below))
        return tuple(pictures)


def rate(number: float | None) -> str:
    """Return a rate with three digits or more, empty if there is none.

    Example:
        >>> rate(1234.5), rate(12.345), rate(0.01234), rate(None)
        ('1,234', '12.3', '0.0123', '')
    """
    if number is None:
        return ""
    return f"{number:,.0f}" if number >= 100 else f"{number:.3g}"  # noqa: PLR2004 - three digits


def sweep(  # noqa: PLR0913 - each is one thing that a person may want to say
    model: Any = None,
    data: Any = None,
    *,
    training: bool = False,
    device: str | None = None,
    length: int | None = None,
    largest: int | None = None,
    seconds: float = SECONDS,
    gain: float = KNEE_GAIN,
    smallest: int | None = None,
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
        ``rows``, ``throughput`` in rows a second, its quartiles ``spread``, ``memory`` in bytes, ``first_seconds`` and
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
        >>> report = sweep(torch.nn.Linear(8, 8), torch.ones(2, 8), device="cpu", largest=4)
        >>> [point.rows for point in report.points], report.knee in (1, 2, 3, 4)
        ([1, 2, 3, 4], True)
    """
    from .benches import annotates, subject_of  # It imports numpy.

    begin, seconds = now(), number("seconds", seconds, above=0, such_as="30")
    if number("gain", gain, 1, above=0, such_as="0.03") == 1:
        raise ConfigurationError(f"gain must be a fraction, got {describe_value(gain)}.", "Pass one such as 0.03.")
    largest, smallest = whole_or_none("largest", largest), whole_or_none("smallest", smallest)
    if largest and smallest and smallest > largest:
        what = f"smallest={smallest} is more than largest={largest}."
        raise ConfigurationError(what, "Pass a smaller one, or leave it out.")
    with SESSION.told_after(progress):
        if annotates(model) and not training and data is not None:
            remedy = "Leave them out, and pass length=... if they are not about 128 tokens long."
            raise ConfigurationError("A sweep reads no texts: all its rows have one length.", remedy)
        subject, place = subject_of(model, data, training=training, length=length, device=device, arguments=arguments)
        with put_on_devices(subject, [place]) as benches:
            first = smallest or min(SMALLEST_TRAINING if training else 1, largest or SMALLEST_TRAINING)
            found = swept(subject, benches[place], seconds, begin, gain, largest, first)
        if found.batch_tokens and not found.still_rising:
            given = {**arguments, "device": place}
            if spec := SESSION.files(model, given)[0] if is_named(model) else SESSION.models.spec_of(model.model):
                SESSION.learn(spec, place, found.batch_tokens, "nb.sweep()")
        return found


def swept(  # noqa: PLR0913, PLR0917 - what a person asked for
    subject: Subject, bench: Bench, seconds: float, begin: float, gain: float, largest: int | None, smallest: int
) -> SweepReport:
    """Return what a sweep of a subject finds, so that nothing holds the model when the device's memory is handed back."""

    def tell(what: str, done: int = 0, total: int = 1) -> None:
        SESSION.tell(Activity("Sweeping", f"{subject.name}, {what}", done, total, "round"))

    device = canonical(bench.device)
    clean(device)
    limit = limit_of(device, SESSION.computer.limit(device))
    measurement = Measurement(bench, seconds, limit, begin, tell=tell)
    search = Search(measurement.point, measurement.hindrance, measurement.again, gain, largest, smallest)
    points = search.run()
    compared = measurement.in_turn(points)
    SESSION.tell(Activity("Sweeping", subject.name))
    knee, last, again = knee_of(compared, gain), measurement.last, {point.rows: point for point in compared}
    if len(points) == 1 and search.stopped in {LARGEST, TIME}:
        knee = None
    nothing = {"name": subject.name, "task": subject.task, "simulated": mps_is_simulated()}
    return SweepReport(
        **(last.facts if last else nothing),
        device=device,
        points=tuple(again.get(point.rows, point) for point in points),
        compared=compared,
        knee=knee.rows if knee else None,
        stopped=search.stopped,
        limit=measurement.limit,
        method=measurement.method,
        gain=gain,
        length=last.length if last else None,
        seconds=seconds,
    )


def drawn(report: SweepReport) -> Any:
    """Return a matplotlib figure of a sweep: throughput above, memory below, over the batch sizes."""
    plots = needing(".plot")
    with plots.themed():
        return _drawn(report, plots)


def _drawn(report: SweepReport, plots: Any) -> Any:
    from matplotlib.ticker import FixedLocator, FuncFormatter, NullLocator

    figure, points = plots.CurveFigure(figsize=(7.0, 4.5), layout="constrained"), fitting(report.points)
    above, below = figure.subplots(2, sharex=True, height_ratios=(3, 2))
    ends = [[abs(end - one.speed) for end in one.spread or (one.speed, one.speed)] for one in points]
    if points:
        rows, speeds = zip(*((one.rows, one.speed) for one in points), strict=True)
        above.errorbar(
            rows, speeds, yerr=list(zip(*ends, strict=True)), fmt="-o", capsize=3, label="median and quartiles"
        )
    sizes = [(one.rows, one.memory) for one in points if one.memory is not None]
    most = max((memory for _, memory in sizes), default=0)
    exponent = memory_exponent(most)
    if sizes:
        known, taken = zip(*((one, memory / 1024**exponent) for one, memory in sizes), strict=True)
        below.plot(known, taken, "--s", label="memory of a step")
    if report.limit is not None and report.limit <= NEAR * most:
        below.axhline(report.limit / 1024**exponent, linestyle=":", color=LIMIT, linewidth=1.5, label="limit")
    for axes, unit in ((above, "rows/s"), (below, UNITS[exponent])):
        axes.set_ylabel(unit)
        mark_sizes(axes, report, named=axes is above)
        plots.with_legend(axes)
    largest = max(point.rows for point in report.points)
    below.set_xlim(0.8, largest * 1.25)
    below.xaxis.set_major_locator(FixedLocator([1 << power for power in range(largest.bit_length() + 1)]))
    below.xaxis.set_minor_locator(NullLocator())
    below.xaxis.set_major_formatter(FuncFormatter(lambda rows, _place: f"{rows:,.0f}"))
    below.set_xlabel("rows in a batch")
    caption = f"{shorten(report.name, 30)}, {report.task} {report.heading}"
    figure.suptitle(caption, fontsize="large", fontweight="bold")
    return figure


def mark_sizes(axes: Any, report: SweepReport, named: bool) -> None:
    """Mark the knee, and the sizes that ran out of memory, both named beside one of the two curves; begin at zero."""
    knee, failed = report.knee, [point.rows for point in report.points if not point.fits]
    if knee:
        label = f"knee: {counted(knee, 'row')}" if named else None
        axes.axvline(knee, color="seagreen", linewidth=6, alpha=0.25, label=label)
    if failed:
        label, place = OUT_OF_MEMORY if named else None, axes.get_xaxis_transform()
        heights = [0.03] * len(failed)  # A share of the height, near the axis.
        axes.plot(failed, heights, "x", color=LIMIT, transform=place, label=label, clip_on=False)
    axes.set_xscale("log", base=2)
    highest = axes.dataLim.ymax if axes.lines else 0.0
    axes.set_ylim(0, highest * 1.15 if 0 < highest < math.inf else 1)
