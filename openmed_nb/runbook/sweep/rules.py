"""What a person may change about a sweep."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from ...errors import ConfigurationError, shorten
from .points import KNEE_GAIN

SECONDS = 30.0
"""About how long a sweep takes."""


@dataclass(frozen=True)
class SweepRules:
    """How a sweep searches.

    Attributes:
        gain: A larger batch pays that gives more than this share more throughput, below 1.
        largest: The most rows that are tried, ``None`` for as many as pay and fit.
        seconds: About how long it may take; steps that were begun are ended, so that long ones can make it more.

    Raises:
        ConfigurationError: For a value out of its range.

    Example:
        >>> SweepRules(largest=0)
        Traceback (most recent call last):
        ...
        openmed_nb.errors.ConfigurationError: largest=0 is no number of rows. Pass a whole number from 1.
    """

    gain: float = KNEE_GAIN
    largest: int | None = None
    seconds: float = SECONDS

    def __post_init__(self) -> None:
        if not (is_number(self.gain) and 0 < self.gain < 1):
            raise ConfigurationError(f"gain={shorten(repr(self.gain))} is no share.", "Pass one such as 0.03.")
        if self.largest is not None and not (is_number(self.largest, int) and self.largest >= 1):
            what = f"largest={shorten(repr(self.largest))} is no number of rows."
            raise ConfigurationError(what, "Pass a whole number from 1.")
        if not (is_number(self.seconds) and 0 < self.seconds < float("inf")):
            what = f"seconds={shorten(repr(self.seconds))} is no length of time."
            raise ConfigurationError(what, "Pass one such as 30.")


def is_number(value: Any, kind: type | tuple[type, ...] = (int, float)) -> bool:
    """Tell whether a value is a number; what is true or false is none."""
    return isinstance(value, kind) and not isinstance(value, bool)
