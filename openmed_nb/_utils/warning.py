"""Warnings that point at the user's line."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Iterable

from ..errors import OpenMedWarning


def warn(message: str) -> None:
    """Warn at the line of a person's code that led here: Python shows a warning once for each line."""
    warnings.warn(message, OpenMedWarning, stacklevel=stacklevel_outside(SKIPPED_PACKAGES))


# No person's line is in these: ours, and those that call ours.
SKIPPED_PACKAGES = (
    "openmed_nb",
    "IPython",
    "contextlib",
    *("torch", "transformers", "accelerate", "lightning", "pytorch_lightning"),
)


def stacklevel_outside(packages: Iterable[str]) -> int:
    """Return the ``stacklevel``, for the caller, of the first frame from there up that is of none of these packages."""
    inside = tuple(f"{package}." for package in packages)
    level, frame = 1, sys._getframe(1)  # noqa: SLF001 - the only way to walk the stack without reading files
    while frame.f_back is not None and f"{frame.f_globals.get('__name__')}.".startswith(inside):
        level, frame = level + 1, frame.f_back
    return level
