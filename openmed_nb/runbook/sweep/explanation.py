"""Why this size, in one sentence, and why none beyond."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from ...quantities import counted, in_bytes
from .points import Point, best_of, fitting
from .search import LARGEST, MEMORY, OUT_OF_MEMORY, THROUGHPUT, TIME

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
