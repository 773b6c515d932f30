"""What a sweep found."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from ...devices.request import canonical
from ...devices.simulation import MARK, NOTE
from ...errors import ConfigurationError
from ...interface.display import Report, Shown, Table, to_html
from ...quantities import counted, in_bytes
from ...training.pictures import plotting
from ..workloads.workload import ANNOTATION
from .explanation import ended, explained, still_rising
from .points import KNEE_GAIN, Point, best_of, fitting

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
        return plotting(__package__).draw(self)

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
            return str(plotting(__package__).to_svg(self))
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
