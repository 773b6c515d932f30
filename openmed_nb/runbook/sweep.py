"""The sweep: what it found, why this size and none beyond, and how it is run."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from ..devices.request import canonical
from ..devices.simulated import active
from ..display import MARK, NOTE, Report, Shown, Table, counted, in_bytes, to_html
from ..errors import ConfigurationError
from ..training.curve import plotting
from .measure.workloads import ANNOTATION, TRAINING_STEP, Bench, Subject, put_on_devices, same_random_numbers
from .sweep_search import (
    KNEE_GAIN,
    LARGEST,
    MEMORY,
    OUT_OF_MEMORY,
    THROUGHPUT,
    TIME,
    Measurement,
    Point,
    Search,
    SweepRules,
    best_of,
    fitting,
    knee_of,
    limit_of,
)

RISING = {
    MEMORY: "nothing larger was tried, because of the memory",
    OUT_OF_MEMORY: "nothing larger fits into the memory",
    LARGEST: "nothing larger was asked for",
    TIME: "nothing larger was tried, because of the time",
}
"""Why nothing larger was measured than the size at which throughput still rises, in words without figures."""


def none_fits(points: Sequence[Point]) -> str:
    """Return that not even the smallest size fits.

    Example:
        >>> none_fits([Point(2, fits=False)])
        'Not even 2 rows fit into the memory.'
    """
    rows = min((point.rows for point in points), default=1)
    return f"Not even {counted(rows, 'row')} {'fits' if rows == 1 else 'fit'} into the memory."


def still_rising(stopped: str) -> str:
    """Return that throughput rises up to the largest size that was measured, and why none was beyond.

    Example:
        >>> still_rising("time")
        'still rising: nothing larger was tried, because of the time'
    """
    return f"still rising: {RISING.get(stopped, 'nothing larger was measured that fits')}"


def explained(
    knee: Point | None, compared: Sequence[Point], points: Sequence[Point] = (), stopped: str = THROUGHPUT
) -> str:
    """Return why a size is the knee.

    Args:
        knee: The point; ``None`` where none fits.
        compared: Those that were measured beside it, itself included.
        points: All points; they are named where nothing larger was near enough to be measured beside it.
        stopped: Why nothing larger was measured.

    Example:
        >>> near = [Point(32, 100.0, memory=10 << 20), Point(64, 102.0, memory=19 << 20)]
        >>> explained(near[0], near)
        '32 rows: 64 would be 2 % faster and take 1.9 times the memory.'
    """
    if knee is None:
        return none_fits(points)
    larger = [[point for point in some if point.rows > knee.rows] for some in (compared, points)]
    other, size = best_of(larger[0]) or best_of(larger[1]), counted(knee.rows, "row")
    if other is None:
        return f"{size}: {still_rising(stopped)}."
    change = round(100 * (other.speed / knee.speed - 1))
    pace = f"{abs(change)} % {'slower' if change < 0 else 'faster'}" if change else "as fast"
    return f"{size}: {other.rows:,} would be {pace}{_memory(knee, other)}."


def _memory(knee: Point, other: Point) -> str:
    if not (knee.memory and other.memory):
        return ""
    return f" and take {other.memory / knee.memory:.1f} times the memory"


ENDS: dict[str, Callable[[str, str], str]] = {
    THROUGHPUT: lambda rows, _limit: f"The last batches up to {rows} gained too little, so none beyond was tried.",
    MEMORY: lambda rows, limit: f"A batch of more than {rows} is expected to come too near the limit of {limit}.",
    OUT_OF_MEMORY: lambda rows, _limit: f"Batches up to {rows} fit, and a larger one ran out of memory.",
    LARGEST: lambda rows, _limit: f"No batch of more than {rows} was asked for.",
    TIME: lambda rows, _limit: f"A batch of more than {rows} would have taken too long: pass more seconds.",
}
"""A sentence for each end, from the largest size that fits and the limit."""


def ended(stopped: str, points: Sequence[Point], limit: int | None) -> str:
    """Return why nothing larger was measured.

    Example:
        >>> ended("largest", [Point(1, 5.0), Point(2, 9.0)], None)
        'No batch of more than 2 rows was asked for.'
    """
    there = fitting(points)
    if not there:
        return none_fits(points)
    return ENDS[stopped](counted(there[-1].rows, "row"), in_bytes(limit))


SCHEMA = "openmed_nb/sweep/1"


@dataclass(frozen=True, repr=False)
class SweepReport(Shown):
    """Throughput and memory over batch sizes, and the knee.

    Attributes:
        name: What was measured.
        task: ``"annotation"``, ``"forward pass"``, ``"training step"`` or ``"own step"``.
        device: Where.
        points: Every size that was measured, the smallest first; what ran out of memory is among them.
        compared: The sizes near the best, as they were measured again in turn; the knee is one of them.
        knee: The rows from which nothing larger gains more than ``gain``; ``None`` where not even one row fits.
        stopped: Why no larger batch was measured: ``"throughput"`` (it does not pay), ``"memory"`` (it is expected to come
            near the limit), ``"out of memory"``, ``"largest"`` (it was not asked for) or ``"time"``.
        limit: The memory that a step may take, in bytes; ``None`` where nobody knows.
        method: How the memory of a step was measured.
        gain: The share of throughput that pays.
        length: How many tokens a row has; ``None`` where rows are no tokens.
        workers: How many processes read ahead in the loader that was passed.
        dtype: The type of the model's numbers, where that is known.
        row_shape: The shape of a row, such as ``"3x224x224"``; ``None`` where that is not known, and where texts are read.
        simulated: Whether this was the simulated MPS, whose figures are no figures of MPS.
    """

    name: str
    task: str
    device: str
    points: tuple[Point, ...]
    compared: tuple[Point, ...] = ()
    knee: int | None = None
    stopped: str = ""
    limit: int | None = None
    method: str = ""
    gain: float = KNEE_GAIN
    length: int | None = None
    workers: int = 0
    dtype: str | None = None
    row_shape: str | None = None
    simulated: bool = False

    @property
    def at_knee(self) -> Point | None:
        """The point of the knee."""
        return next((point for point in self.points if point.rows == self.knee), None)

    @property
    def batch_tokens(self) -> int | None:
        """The knee in tokens, for ``nb.annotate(notes, batch_tokens=sweep.batch_tokens)``; ``None`` for other tasks."""
        known = self.task == ANNOTATION and self.knee is not None and self.length is not None
        return (self.knee or 0) * (self.length or 0) if known else None

    @property
    def best(self) -> Point | None:
        """The point with the highest throughput, whatever it takes; ``None`` where nothing fits."""
        return best_of(self.compared) or best_of(self.points)

    @property
    def still_rising(self) -> bool:
        """Whether throughput still rises at the largest size that was measured and fits."""
        there = fitting(self.points)
        return bool(there) and there[-1].rows == self.knee

    @property
    def why(self) -> str:
        """Why this size, with figures."""
        return explained(self.at_knee, self.compared, self.points, self.stopped)

    @property
    def end(self) -> str:
        """Why no larger batch was measured, with figures."""
        return ended(self.stopped, self.points, self.limit)

    def tokens(self, point: Point) -> float | None:
        """Return the throughput of a point in tokens a second; ``None`` where rows are no tokens."""
        return None if self.length is None or point.throughput is None else point.throughput * self.length

    def to_dict(self) -> dict[str, Any]:
        """Return everything as plain mappings, lists, numbers and strings."""
        plain = {name: value for name, value in vars(self).items() if name not in {"points", "compared"}}
        return {
            "schema": SCHEMA,
            **plain,
            "batch_tokens": self.batch_tokens,
            "why": self.why,
            "end": self.end,
            "best": self.best.rows if self.best else None,
            "still_rising": self.still_rising,
            "points": [{**point.to_dict(), "tokens": self.tokens(point)} for point in self.points],
            "compared": [point.rows for point in self.compared],
        }

    def plot(self) -> Any:
        """Return a matplotlib figure of throughput and memory over the sizes; a notebook shows it.

        Raises:
            ConfigurationError: Where matplotlib is not installed.
        """
        return plotting("runbook.sweep_plot").draw(self)

    def report(self) -> Report:
        """Return the knee and how it was measured in words; the figures stand in the HTML alone."""
        loader = f"; {counted(self.workers, 'worker')} in the loader" if self.workers else ""
        sentences = [
            f"{self.name}, {self.task}{self._rows}{loader}.",
            self._choice,
            f"To annotate in such batches: nb.annotate(notes, batch_tokens={self.batch_tokens})."
            if self.batch_tokens
            else "",
            f"Memory: {self.method}." if self.method else "",
            NOTE if self.simulated else "",
        ]
        reasons = Table("Why", ("of what", "reason"), (("the knee", self.why), ("the end", self.end)))
        columns = ("rows", "rows/s", "quartiles", "tokens/s", "memory", "first pass", "timed steps", "")
        table = Table("Batch sizes", columns, tuple(self._row(point) for point in self.points))
        title = f"Batch sweep on {self.shown_device}: {counted(self.knee, 'row') if self.knee else 'nothing fits'}"
        return Report(title, tuple(filter(None, sentences)), figures=(reasons, table))

    @property
    def shown_device(self) -> str:
        """The device, which says where it is simulated."""
        return f"{self.device}{MARK if self.simulated and canonical(self.device) == 'mps' else ''}"

    @property
    def _choice(self) -> str:
        """How the knee was chosen, without figures."""
        if not self.knee:
            return self.why
        if self.still_rising:
            return f"The largest batch that was tried; {still_rising(self.stopped)}."
        return f"The smallest batch from which no larger one that was tried is more than {100 * self.gain:g} % faster."

    @property
    def _rows(self) -> str:
        return f", rows of {counted(self.length, 'token')}" if self.length else ""

    def _row(self, point: Point) -> tuple[str, ...]:
        notes = {"did not fit": not point.fits, "knee": point.rows == self.knee, "best": point == self.best}
        tokens, low_high = self.tokens(point), point.spread or ()
        return (
            f"{point.rows:,}",
            figure(point.throughput),
            " to ".join(map(figure, low_high)),
            figure(tokens),
            in_bytes(point.memory),
            "" if point.first_seconds is None else f"{point.first_seconds:.3f} s",
            str(point.steps or ""),
            ", ".join(note for note, said in notes.items() if said),
        )

    def _repr_html_(self) -> str:
        return to_html(self.report()) + self._picture()

    def _picture(self) -> str:
        """Return the picture as SVG, empty where matplotlib is not installed: the tables say the same."""
        try:
            return str(plotting("runbook.sweep_plot").to_svg(self))
        except ConfigurationError:
            return ""


def figure(number: float | None) -> str:
    """Return a rate with three digits or more, empty where there is none.

    Example:
        >>> figure(1234.5), figure(12.345), figure(0.01234), figure(None)
        ('1,234', '12.3', '0.0123', '')
    """
    if number is None:
        return ""
    return f"{number:,.0f}" if number >= 100 else f"{number:.3g}"  # noqa: PLR2004 - three digits


def sweep_of(subject: Subject, device: str, rules: SweepRules, fraction: float | None = None) -> SweepReport:
    """Return throughput and memory of a subject over batch sizes, with the knee.

    Args:
        subject: What is measured; it is put on the device beside what is there, and let go afterwards.
        device: Where.
        rules: How.
        fraction: The share of the device's memory at which torch refuses more; ``None`` where that is not known.

    Random numbers go on as if nothing had been.

    Raises:
        DeviceUnavailable: Where the subject itself does not fit in the memory of the device.
    """
    with same_random_numbers(device), put_on_devices(subject, [device]) as benches:
        return swept(subject, benches[device], rules, fraction)


def swept(subject: Subject, bench: Bench, rules: SweepRules, fraction: float | None) -> SweepReport:
    """Return what a sweep of a bench finds; the caches of its device are emptied before and after it."""
    measurement = Measurement(bench, rules, None)
    measurement.clean()
    measurement.limit = limit_of(bench.device, fraction)
    try:
        search = Search(measurement.point, measurement.hindrance, measurement.again, rules.gain, rules.largest)
        search.smallest = rules.first_rows(subject.task == TRAINING_STEP)
        points = search.run()
        compared = measurement.in_turn(points)
    finally:
        measurement.clean()
    knee, last = knee_of(compared, rules.gain), measurement.last
    return SweepReport(
        subject.name,
        subject.task,
        canonical(bench.device),
        points=merged(points, compared),
        compared=compared,
        knee=knee.rows if knee else None,
        stopped=search.stopped,
        limit=measurement.limit,
        method=measurement.method,
        gain=rules.gain,
        length=last.length if last else None,
        workers=last.workers if last else 0,
        dtype=last.dtype if last else None,
        row_shape=last.row_shape if last else None,
        simulated=active(),
    )


def merged(points: tuple[Point, ...], newer: tuple[Point, ...]) -> tuple[Point, ...]:
    """Return points, some of them replaced by newer ones of the same rows."""
    by_rows = {point.rows: point for point in newer}
    return tuple(by_rows.get(point.rows, point) for point in points)
