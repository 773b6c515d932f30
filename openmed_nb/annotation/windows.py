"""Long sequences of tokens -> overlapping windows that a model can take; nothing is cut off.

Each token is owned by one window, in which it has context on both sides; what other windows say of it is not used.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

CONTEXT = 16
"""How many tokens a window reads on either side of those that it owns: as few as cost no accuracy that could be seen on
long texts, because each is read twice."""


@dataclass(frozen=True)
class Windows:
    """Stretches of flat token positions; ``W`` windows.

    Attributes:
        firsts: ``(W,)`` int64, the first token that a window reads.
        lasts: ``(W,)`` int64, one past the last.
        owned_firsts: ``(W,)`` int64, the first token that it owns.
        owned_lasts: ``(W,)`` int64, one past the last.
    """

    firsts: np.ndarray
    lasts: np.ndarray
    owned_firsts: np.ndarray
    owned_lasts: np.ndarray

    @property
    def lengths(self) -> np.ndarray:
        """How many tokens each window reads."""
        lengths: np.ndarray = self.lasts - self.firsts
        return lengths


def plan_windows(bounds: np.ndarray, word_starts: np.ndarray, limit: int) -> Windows:
    """Return windows over sequences: one for a short one, several that overlap for a long one.

    Args:
        bounds: ``(S + 1,)`` where each sequence begins.
        word_starts: Sorted positions of tokens that begin a word; a word is owned by one window if it fits in it.
        limit: How many tokens a window may read.

    Example:
        >>> windows = plan_windows(np.array([0, 3, 103]), np.arange(103), limit=80)
        >>> windows.firsts, windows.lasts, windows.owned_firsts, windows.owned_lasts
        (array([ 0,  3, 51]), array([  3,  83, 103]), array([ 0,  3, 67]), array([  3,  67, 103]))
    """
    lengths = np.diff(bounds)
    short = (lengths > 0) & (lengths <= limit)
    firsts, lasts = bounds[:-1][short], bounds[1:][short]
    plain = np.stack([firsts, lasts, firsts, lasts], axis=1)
    long = [
        window
        for number in np.flatnonzero(lengths > limit).tolist()
        for window in cut(bounds, number, word_starts, limit)
    ]
    table = np.concatenate([plain, np.array(long, np.int64).reshape(-1, 4)])
    return Windows(*table.T)


def cut(bounds: np.ndarray, number: int, word_starts: np.ndarray, limit: int) -> list[tuple[int, int, int, int]]:
    """Return the windows over one long sequence, as first, last, first owned and last owned."""
    begin, end = int(bounds[number]), int(bounds[number + 1])
    context = min(CONTEXT, limit // 4)
    windows: list[tuple[int, int, int, int]] = []
    owned = begin
    while owned < end:
        first = max(begin, owned - context)
        last = min(end, first + limit)
        owned_last = end if last == end else last_word_start(word_starts, owned, last - context)
        windows.append((first, last, owned, owned_last))
        owned = owned_last
    return windows


def last_word_start(word_starts: np.ndarray, after: int, until: int) -> int:
    """Return the last word start in ``(after, until]``, or ``until`` where a single word fills it all."""
    place = int(np.searchsorted(word_starts, until, side="right")) - 1
    return int(word_starts[place]) if place >= 0 and word_starts[place] > after else until
