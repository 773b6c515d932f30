"""How much faster a model is one way than another, on the same device."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from ...annotation.chunks import in_chunks

if TYPE_CHECKING:
    from ...annotation.stream import Annotator

PAIRS = 9
"""How many times both ways read the texts, in turn, to be timed."""

WORTH = 1.05
"""A way is faster that is more than so many times as fast."""

TIMED_CHARACTERS = 16384
"""About how many characters of the texts are read to be timed."""


def speed_up(plain: Annotator, reduced: Annotator, texts: Sequence[Any]) -> float:
    """Return how many times faster one way is than another on the same device, 1 where that is not certain."""
    some = first_texts(texts, TIMED_CHARACTERS)
    return gain_of(seconds_in_turn(lambda: plain.entities(some), lambda: reduced.entities(some), PAIRS))


def gain_of(seconds: Sequence[tuple[float, float]]) -> float:
    """Return how many times faster the second way is: the middle of all pairs, 1 where two of them do not say so.

    On a busy computer a pair can say anything: one way read against itself gave ratios from 0.66 to 2.16.

    Args:
        seconds: How long each way took, in pairs, at least two.

    Example:
        >>> gain_of([(2.0, 1.0)] * 8 + [(1.0, 3.0)]), gain_of([(2.0, 1.0), (1.0, 1.0), (1.0, 2.0)])
        (2.0, 1.0)
    """
    ratios = sorted(plain / reduced for plain, reduced in seconds)
    return statistics.median(ratios) if ratios[1] > WORTH else 1.0


def seconds_in_turn(first: Callable[[], object], second: Callable[[], object], pairs: int) -> list[tuple[float, float]]:
    """Return how long two functions take, in pairs that begin with either in turn, after a pair for warming up."""
    seconds = []
    for number in range(pairs + 1):
        if number % 2:
            one = timed(first)
            seconds.append((one, timed(second)))
        else:
            other = timed(second)
            seconds.append((timed(first), other))
    return seconds[1:]


def first_texts(texts: Sequence[Any], characters: int) -> list[Any]:
    """Return the first texts, of about so many characters together.

    Example:
        >>> first_texts(["aaaa", "bbbb", "cccc"], 6)
        ['aaaa', 'bbbb']
    """
    return next((chunk.texts for chunk in in_chunks(texts, 8 * characters)), [])


def timed(function: Callable[[], object]) -> float:
    """Return how long a function takes, in seconds."""
    begin = time.perf_counter()
    function()
    return time.perf_counter() - begin
