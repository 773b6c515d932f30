"""What figures and thresholds count, and how people read them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

SHARE, DIFFERENCE, HOURS, TIMES, COUNT, WORDS = "share", "difference", "hours", "times", "count", "words"
"""The units."""

SPELLED: dict[str, Callable[[Any], str]] = {
    SHARE: lambda value: f"{100 * value:.3g} %",
    DIFFERENCE: lambda value: f"{value:.3g}",
    HOURS: lambda value: f"{value:.3g} hours",
    TIMES: lambda value: f"{value:.3g} times",
    COUNT: lambda value: f"{value:,}",
    WORDS: str,
}


def in_unit(unit: str, value: object) -> str:
    """Return a value as people read it.

    Example:
        >>> in_unit(SHARE, 0.22), in_unit(DIFFERENCE, 1e-4), in_unit(TIMES, 3.456), in_unit(COUNT, 1200)
        ('22 %', '0.0001', '3.46 times', '1,200')
    """
    return SPELLED[unit](value)
