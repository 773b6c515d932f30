"""Numbers in the output of commands: a number in its range, or nothing."""

from __future__ import annotations

import re

NUMBER = re.compile(r"\s*(\d{1,15}(?:[.,]\d{1,9})?)\s*", re.ASCII)

LARGEST_SIZE = 1 << 50
"""A petabyte; a size beyond it was not read rightly."""


def number_in(text: str | None, least: float = 0, most: float = LARGEST_SIZE) -> float | None:
    """Return the number that a text is, ``None`` where it is none, or one that cannot be.

    A comma may stand for the point, as some locales have it.

    Example:
        >>> number_in("16", most=100), number_in("6119,06"), number_in("134", most=100), number_in("[N/A]")
        (16.0, 6119.06, None, None)
    """
    match = NUMBER.fullmatch(text or "")
    number = float(match[1].replace(",", ".")) if match else None
    return number if number is not None and least <= number <= most else None


def whole_number_in(text: str | None, least: int = 0, most: int = LARGEST_SIZE) -> int | None:
    """Return the whole number that a text is, ``None`` as in :func:`number_in`.

    Example:
        >>> whole_number_in("16"), whole_number_in("0", least=1), whole_number_in("1.5")
        (16, None, None)
    """
    number = number_in(text, least, most)
    return int(number) if number is not None and number.is_integer() else None
