"""What a series of memory figures means: flat, growing, a sawtooth, or too short to tell. Pure functions of numbers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, combinations, pairwise, takewhile
from statistics import median
from typing import Any

FLAT, GROWING, SAWTOOTH, TOO_SHORT = "flat", "growing", "sawtooth", "too short to tell"

GROWTH_GATE = 0.26
"""The runbook's gate: more growth than this over ten epochs, with caches emptied at their boundaries, is suspect."""

GATE_EPOCHS = 10
"""Over how many epochs the gate looks; shorter and longer trainings are scaled to it."""

MINIMUM_STEADY = 3
"""With fewer epochs after the warm-up, a trend and a fluctuation look the same."""

TREND = 0.6
"""The least rank correlation with time (Kendall's tau) of a growth."""

MOST_SIZES = 100
"""A longer series is thinned evenly before all its pairs are compared."""

LONG = 6
"""From so many sizes on there is a second half to look at, and a fluctuation from one epoch to the next to leave out."""

TOLERANCE = 0.01
"""Differences below this share of the baseline count as none."""

SMALLEST_BASELINE = 1 << 20
"""Bytes; growth is told as a share of at least this much, so that a few kilobytes alarm nobody."""


@dataclass(frozen=True)
class Trend:
    """What became of one memory figure over the epochs after the warm-up.

    Attributes:
        kind: ``"flat"``, ``"growing"``, ``"sawtooth"`` or ``"too short to tell"``.
        baseline: Bytes at the first boundary after the warm-up.
        last: Bytes at the last boundary.
        growth: Growth over ten epochs as a share of the baseline, from the median slope.
        spread: The largest less the smallest figure, as a share of the baseline.
        total: The last less the first figure, as a share of the baseline.
    """

    kind: str
    baseline: int
    last: int
    growth: float
    spread: float
    total: float = 0.0

    def to_dict(self) -> dict[str, Any]:
        """Return the trend as plain numbers and strings."""
        return dict(vars(self))


def judge(sizes: Sequence[int], gate: float = GROWTH_GATE) -> Trend:
    """Return what a series of sizes at epoch boundaries means.

    The slope is the median of the slopes between all pairs (Theil 1950, Sen 1968), so that one odd epoch does not
    decide; a growth also has to rise again and again (Kendall 1938), and still to show, at half of the gate, without its
    largest rise.

    Args:
        sizes: Bytes at each boundary after the warm-up, in order.
        gate: The share of growth over ten epochs that is suspect.

    Returns:
        The trend. More than the gate, rising again and again, is growing, and so are three rises at the end; as much
        up and down is a sawtooth; one jump to a level that is kept is flat, but too short to tell where it came last.

    Example:
        >>> judge([100 << 20] * 9).kind, judge([(100 + 5 * epoch) << 20 for epoch in range(9)]).kind
        ('flat', 'growing')
        >>> judge([100 << 20, 180 << 20, 100 << 20, 180 << 20, 100 << 20]).kind, judge([100 << 20]).kind
        ('sawtooth', 'too short to tell')
    """
    if not sizes:
        return Trend(TOO_SHORT, 0, 0, 0.0, 0.0)
    every = -(-len(sizes) // MOST_SIZES)
    scale = max(sizes[0], SMALLEST_BASELINE)
    shares = [size / scale for size in sizes]
    thinned, pace = shares[::-every][::-1], gate * every / GATE_EPOCHS
    rises = grows(thinned, pace) or (len(thinned) >= LONG and grows(lower_envelope(thinned), pace))
    late = late_rise(shares, TOLERANCE)
    suspect = late if shares[-1] - shares[-1 - late] > max(gate / 2, gate * late / GATE_EPOCHS) else 0
    spread = max(shares) - min(shares)
    kind = _kind(shares, rises, spread > gate, suspect)
    return Trend(kind, sizes[0], sizes[-1], slope(thinned) * GATE_EPOCHS / every, spread, shares[-1] - shares[0])


def grows(shares: Sequence[float], pace: float) -> bool:
    """Tell whether a series rises by more than a pace for each size, again and again, and still does in its second half.

    Args:
        shares: Sizes as shares of the baseline.
        pace: The growth from one size to the next that is too much.

    Example:
        >>> grows([1.0, 1.1, 1.2, 1.3], 0.026), grows([1.0, 1.2, 1.4, 1.4, 1.4, 1.4, 1.4, 1.4], 0.026)
        (True, False)
    """
    again, lately = slope(without_largest_rise(shares)), slope(shares[len(shares) // 2 :])
    steady = again > pace / 2 and (len(shares) < LONG or lately > pace / 2)
    return slope(shares) > pace and steady and rank_correlation(shares, TOLERANCE) >= TREND


def lower_envelope(sizes: Sequence[float]) -> list[float]:
    """Return the smaller of each two sizes in a row, so that what every second epoch takes and gives back is left out.

    Example:
        >>> lower_envelope([1, 9, 2, 9, 3])
        [1, 2, 2, 3]
    """
    return [min(pair) for pair in pairwise(sizes)]


def slope(sizes: Sequence[float]) -> float:
    """Return the median slope between all pairs of a series, in bytes for each epoch.

    Example:
        >>> slope([10, 20, 30, 1000, 50]), slope([7])
        (10.0, 0.0)
    """
    slopes = [(later - sooner) / (end - start) for (start, sooner), (end, later) in combinations(enumerate(sizes), 2)]
    return float(median(slopes)) if slopes else 0.0


def without_largest_rise(sizes: Sequence[float]) -> list[float]:
    """Return a series as it would be without its largest rise from one size to the next.

    Example:
        >>> without_largest_rise([100, 101, 180, 182])
        [100, 101, 101, 103]
    """
    rises = [later - sooner for sooner, later in pairwise(sizes)]
    largest = max(rises, default=0)
    start = rises.index(largest) + 1 if largest > 0 else len(sizes)
    return [*sizes[:start], *(size - largest for size in sizes[start:])]


def late_rise(sizes: Sequence[float], tolerance: float = 0.0) -> int:
    """Return how often a series has risen at its end, one size after the other.

    Example:
        >>> late_rise([5, 5, 5, 6, 7, 8]), late_rise([5, 6, 6])
        (3, 0)
    """
    backwards = (later > sooner + tolerance for later, sooner in pairwise(reversed(sizes)))
    return sum(1 for _ in takewhile(bool, backwards))


def rank_correlation(sizes: Sequence[float], tolerance: float = 0.0) -> float:
    """Return how steadily a series rises: 1 where each size is above those before it, -1 where it is below.

    Args:
        sizes: The series.
        tolerance: Differences up to this count as none.

    Example:
        >>> rank_correlation([1, 2, 3]), rank_correlation([3, 2, 1]), round(rank_correlation([1, 1, 2, 2]), 2)
        (1.0, -1.0, 0.67)
    """
    signs = [(later > sooner + tolerance) - (later < sooner - tolerance) for sooner, later in combinations(sizes, 2)]
    return sum(signs) / len(signs) if signs else 0.0


def _kind(sizes: Sequence[float], rises: bool, varies: bool, late: int) -> str:
    if len(sizes) < MINIMUM_STEADY:
        return TOO_SHORT
    if rises:
        return GROWING
    if varies and _falls_back(sizes):
        return SAWTOOTH
    return GROWING if late >= MINIMUM_STEADY else TOO_SHORT if late else FLAT


def _falls_back(sizes: Sequence[float]) -> bool:
    """Tell whether a series both rises and falls by a quarter of its spread; one that moves to a new level does not."""
    least = (max(sizes) - min(sizes)) / 4
    rises = any(size - lowest > least for size, lowest in zip(sizes, accumulate(sizes, min), strict=True))
    falls = any(highest - size > least for size, highest in zip(sizes, accumulate(sizes, max), strict=True))
    return rises and falls
