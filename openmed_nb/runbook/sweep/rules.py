"""What a person may change about a sweep."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from ...errors import ConfigurationError, shorten
from ...quantities import whole_number
from .points import KNEE_GAIN

SECONDS = 30.0
"""About how long a sweep takes."""

SMALLEST_TRAINING = 2
"""With so many rows training begins: ``torch.nn.functional.batch_norm`` refuses a single value for each channel."""


@dataclass(frozen=True)
class SweepRules:
    """How a sweep searches.

    Attributes:
        gain: A larger batch pays that gives more than this share more throughput, below 1.
        largest: The most rows that are tried, ``None`` for as many as pay and fit.
        seconds: About how long it may take; steps that were begun are ended, so that long ones can make it more.
        smallest: The rows that are tried first; ``None`` for 1, or 2 where steps train: BatchNorm learns from no single row.

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
    smallest: int | None = None

    def __post_init__(self) -> None:
        if not (is_number(self.gain) and 0 < self.gain < 1):
            raise ConfigurationError(f"gain={shorten(repr(self.gain))} is no share.", "Pass one such as 0.03.")
        for name in ("largest", "smallest"):
            self._check_rows(name)
        if self.largest and self.smallest and self.smallest > self.largest:
            what = f"smallest={self.smallest} is more than largest={self.largest}."
            raise ConfigurationError(what, "Pass a smaller one, or leave it out.")
        if not (is_number(self.seconds) and 0 < self.seconds < float("inf")):
            what = f"seconds={shorten(repr(self.seconds))} is no length of time."
            raise ConfigurationError(what, "Pass one such as 30.")

    def first_rows(self, training: bool) -> int:
        """Return how many rows are tried first.

        Args:
            training: Whether steps train.

        Example:
            >>> SweepRules().first_rows(True), SweepRules(largest=1).first_rows(True), SweepRules().first_rows(False)
            (2, 1, 1)
        """
        if self.smallest is not None:
            return self.smallest
        return min(SMALLEST_TRAINING if training else 1, self.largest or SMALLEST_TRAINING)

    def _check_rows(self, name: str) -> None:
        value = getattr(self, name)
        rows = None if value is None else whole_number(value)
        if value is not None and (rows is None or rows < 1):
            what = f"{name}={shorten(repr(value))} is no number of rows."
            raise ConfigurationError(what, "Pass a whole number from 1.")
        object.__setattr__(self, name, rows)


def is_number(value: Any, kind: type | tuple[type, ...] = (int, float)) -> bool:
    """Tell whether a value is a number; what is true or false is none."""
    return isinstance(value, kind) and not isinstance(value, bool)
