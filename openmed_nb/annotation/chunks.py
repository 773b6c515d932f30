"""A stream of texts -> lists of texts, long enough to be sorted by length and short enough to be held."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from .references import Reference

FIRST_PART = 8
"""The first chunk has one in so many of the characters of a full one, the next twice as many: answers come soon."""


@dataclass(frozen=True, repr=False)
class Chunk:
    """Consecutive texts of a stream; it is not shown, because a worker's log would show what failed.

    Attributes:
        first: The number of the first text in the stream.
        texts: The texts, each a string or a list of words, or whatever else the stream gave.
        error: What the stream itself failed with after all texts; such a chunk has none.
    """

    first: int
    texts: list[Any]
    error: Exception | None = None


def in_chunks(texts: Iterable[Any], characters: int, first: int = 0, least: int = 1) -> Iterator[Chunk]:
    """Yield the texts of a stream in order, in chunks of about so many characters; the first text has the number ``first``.

    A text counts ``least`` characters at least, because a short one takes memory too. A failure of the stream comes as a
    value, in a last chunk without texts, so that the texts before it are not lost.

    Example:
        >>> [chunk.texts for chunk in in_chunks(["aaaa", "b", "c", "d"], characters=8)]
        [['aaaa'], ['b'], ['c', 'd']]
    """
    stream, size, error = iter(texts), max(1, characters // FIRST_PART), None
    while error is None:
        chunk, error = next_chunk(stream, size, least)
        if chunk:
            yield Chunk(first, chunk)
        elif error is None:
            return
        first += len(chunk)
        size = min(2 * size, characters)
    yield Chunk(first, [], error)


def next_chunk(stream: Iterator[Any], characters: int, least: int = 1) -> tuple[list[Any], Exception | None]:
    """Return the next texts of a stream, none where it is at its end, and what it failed with after them."""
    texts: list[Any] = []
    left = characters
    try:
        while left > 0:
            texts.append(next(stream))
            left -= max(weight(texts[-1]), least)
    except StopIteration:
        pass
    except Exception as error:  # noqa: BLE001 - of the stream's own code, and raised after the texts before it
        return texts, error
    return texts, None


def weight(text: Any) -> int:
    """Return about how many characters a text has; every text counts, also an empty one."""
    if isinstance(text, str):
        return len(text) + 1
    if isinstance(text, Reference):
        return text.characters + 1
    return 1 + sum(map(weight, text)) if isinstance(text, list) else 1
