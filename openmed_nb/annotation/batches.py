"""Windows -> batches: sorted by length, each within a budget of tokens.

On a device that compiles for every new shape, lengths and numbers of rows come from a small fixed set.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np

SHORTEST, LENGTHS = 32, 8
"""Where shapes are few, rows are filled up to one of so many lengths, the shortest of which is this."""

FEW = 8
"""Up to one in so many of the rows of a full batch, left-over windows run one by one instead of filling one up."""


@dataclass(frozen=True)
class Batch:
    """Windows that run together.

    Attributes:
        rows: The numbers of the windows.
        length: How many tokens each row is filled up to, special tokens included.
        height: How many rows the batch is filled up to.
    """

    rows: np.ndarray
    length: int
    height: int

    def halves(self, lengths: np.ndarray) -> list[Batch]:
        """Return the batch in two, for a device on which the whole does not fit; nothing for a window that is alone.

        Each half is as long as the longest of its windows, so that none fails for the length of another.
        """
        if self.height == 1 and self.length == lengths[self.rows[0]]:
            return []
        middle, height = (len(self.rows) + 1) // 2, (self.height + 1) // 2
        halves = self.rows[:middle], self.rows[middle:]
        return [Batch(rows, int(lengths[rows].max()), height) for rows in halves if len(rows)]


@dataclass(frozen=True)
class Budget:
    """How much runs at once.

    Attributes:
        tokens: How many tokens a batch may have, filling included.
        waste: How many of them may be filling: about as many as run in the time that starting another batch takes.
        rows: How many rows it may have; ``None`` for no limit but the tokens.
        few_shapes: Whether shapes come from a small fixed set.
        padding: Whether a row may be filled up at all; a model that does not hide the filling would read it.
    """

    tokens: int
    waste: int = 256
    rows: int | None = None
    few_shapes: bool = False
    padding: bool = True

    def within(self, tokens: int) -> Budget:
        """Return the budget with at most so many tokens, for a device that runs out of memory with more."""
        return replace(self, tokens=max(1, min(self.tokens, tokens)))

    def height(self, length: int) -> int:
        """Return how many rows of a length fit; at least one."""
        fitting = max(1, self.tokens // length)
        return fitting if self.rows is None else min(fitting, self.rows)


def plan_batches(lengths: np.ndarray, budget: Budget, longest: int) -> list[Batch]:
    """Return batches in which every window is once.

    Args:
        lengths: ``(W,)`` how many tokens each window has, special tokens included.
        budget: How much runs at once.
        longest: The most tokens that the model takes.

    Example:
        >>> [(batch.rows.tolist(), batch.length) for batch in plan_batches(np.array([3, 9, 4]), Budget(10), 64)]
        [([1], 9), ([2, 0], 4)]
    """
    order = np.argsort(-lengths, kind="stable")
    if not budget.padding:
        same = np.flatnonzero(np.diff(lengths[order])) + 1
        return [batch for rows in np.split(order, same) for batch in descending(rows, lengths, budget)]
    if budget.few_shapes:
        return list(few_shapes(order[::-1], lengths, budget, longest))
    return list(descending(order, lengths, budget))


def descending(order: np.ndarray, lengths: np.ndarray, budget: Budget) -> Iterator[Batch]:
    """Yield batches from the longest window to the shortest: if one does not fit in memory, it is the first.

    A batch ends where another row would make more filling than starting a new one costs.
    """
    place = 0
    while place < len(order):
        length = int(lengths[order[place]])
        rows = order[place : place + budget.height(length)]
        filling = np.cumsum(length - lengths[rows])
        rows = rows[: np.searchsorted(filling, budget.waste, side="right")]
        yield Batch(rows, length, len(rows))
        place += len(rows)


def few_shapes(order: np.ndarray, lengths: np.ndarray, budget: Budget, longest: int) -> Iterator[Batch]:
    """Yield batches of few shapes, from the shortest window up; left-overs join those of the next length."""
    buckets = allowed_lengths(longest)
    places = np.searchsorted(buckets, lengths[order])
    left, height = order[:0], 0
    for place in np.unique(places):
        length = buckets[place]
        left = np.concatenate([left, order[places == place]])
        height = budget.height(length)
        while len(left) >= height:
            yield Batch(left[:height], length, height)
            left = left[height:]
    if len(left) > height // FEW:
        yield Batch(left, length, height)
    else:
        own = np.searchsorted(buckets, lengths[left])
        yield from (Batch(left[[row]], buckets[place], 1) for row, place in enumerate(own))


def allowed_lengths(longest: int) -> list[int]:
    """Return the lengths that rows are filled up to for a model that takes so many tokens, in steps of one factor.

    Example:
        >>> allowed_lengths(512)
        [32, 48, 72, 112, 160, 232, 352, 512]
    """
    steps = np.geomspace(min(SHORTEST, longest), longest, LENGTHS)
    rounded = np.minimum(np.ceil(steps.round(6) / 8).astype(int) * 8, longest)
    return [int(length) for length in np.unique(rounded)]
