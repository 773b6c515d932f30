"""Whole numbers that a person passes."""

from __future__ import annotations

from typing import Any

from ...errors import ConfigurationError, shorten
from ...quantities import whole_number


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
