"""What a sweep says of a batch that is in use, also of one that it did not measure. Pure functions of its points."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

from ..sweep.points import Point, best_of, fitting


def figures_at(points: Sequence[Point], knee: int | None, limit: int | None, batch: int | None) -> dict[str, Any]:
    """Return the figures of a sweep for a verdict.

    Args:
        points: What was measured.
        knee: The rows at the knee, ``None`` where nothing fits.
        limit: The memory that a step may take, in bytes.
        batch: The rows of the batch in use; ``None`` where nobody says, and then memory is that of the knee.
    """
    best = best_of(points)
    return {
        "knee": knee,
        "best_batch": best.rows if best else None,
        "out_of_memory_at": min((point.rows for point in points if not point.fits), default=0),
        "knee_gain": gain_at(points, knee, batch),
        "headroom": headroom_at(points, limit, batch or knee),
    }


def gain_at(points: Sequence[Point], knee: int | None, batch: int | None) -> float | None:
    """Return how much more throughput there is at the knee than at a batch; ``None`` where that cannot be told.

    Example:
        >>> points = [Point(8, 50.0), Point(16, 100.0), Point(32, 110.0)]
        >>> gain_at(points, 16, 8), gain_at(points, 16, 12), gain_at(points, 16, 64)
        (1.0, 0.33333333333333326, None)
    """
    there = None if batch is None else throughput_at(points, batch)
    best = None if knee is None else throughput_at(points, knee)
    return best / there - 1 if best and there else None


def throughput_at(points: Sequence[Point], rows: int) -> float | None:
    """Return the throughput at a number of rows, on a line between those measured; ``None`` beyond them."""
    there = [(point.rows, point.speed) for point in fitting(points) if point.throughput]
    exact = dict(there).get(rows)
    between = (
        slow + (fast - slow) * (rows - few) / (many - few)
        for (few, slow), (many, fast) in pairwise(there)
        if few < rows < many
    )
    return next(between, None) if exact is None else exact


def headroom_at(points: Sequence[Point], limit: int | None, rows: int | None) -> float | None:
    """Return how much of the limit the smallest measured batch leaves free that is no smaller than this one.

    Example:
        >>> headroom_at([Point(8, 50.0, memory=40), Point(16, 90.0, memory=80)], 100, 12)
        0.19999999999999996
    """
    sizes = [
        point.memory
        for point in fitting(points)
        if rows is not None and point.rows >= rows and point.memory is not None
    ]
    return 1 - sizes[0] / limit if sizes and limit else None
