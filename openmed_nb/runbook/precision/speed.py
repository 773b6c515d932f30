"""How much faster a model is one way than another, on the same device."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from ...annotation.chunks import in_chunks

if TYPE_CHECKING:
    from ...annotation.stream import Annotator

PASSES = 5
"""How often texts are read each way, to be timed; the fastest counts."""

TIMED_CHARACTERS = 32768
"""About how many characters of the texts are read to be timed."""


def speed_up(plain: Annotator, reduced: Annotator, texts: Sequence[Any]) -> float:
    """Return how many times faster one way is than another on the same device, measured in turn."""
    some = first_texts(texts, TIMED_CHARACTERS)
    seconds = [(timed(lambda: plain.entities(some)), timed(lambda: reduced.entities(some))) for _ in range(PASSES + 1)]
    slow, fast = zip(*seconds[1:], strict=True)  # The first pass is for warming up.
    return float(min(slow) / min(fast))


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
