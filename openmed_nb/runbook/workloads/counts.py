"""Whole numbers that a person passes."""

from __future__ import annotations

import operator
from typing import Any

from ...errors import ConfigurationError, shorten


def whole_number(value: Any) -> int | None:
    """Return a whole number as Python's own, such as one of numpy; ``None`` for anything else, also for what is true or false.

    Example:
        >>> whole_number(3), whole_number(3.0), whole_number(True)
        (3, None, None)
    """
    try:
        return None if isinstance(value, bool) else operator.index(value)
    except TypeError:
        return None


def checked_count(name: str, value: Any, least: int = 1) -> int:
    """Return a number of something.

    Raises:
        ConfigurationError: For anything but a whole number from the least.

    Example:
        >>> checked_count("steps", 0)
        Traceback (most recent call last):
        ...
        openmed_nb.errors.ConfigurationError: steps cannot be 0. Pass a whole number from 1.
    """
    number = whole_number(value)
    if number is None or number < least:
        raise ConfigurationError(f"{name} cannot be {shorten(repr(value))}.", f"Pass a whole number from {least}.")
    return number
