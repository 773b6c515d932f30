"""Warnings that point to the line of the user."""

from __future__ import annotations

import linecache
import sys
import warnings
from collections.abc import Iterable

from ..errors import OpenMedWarning


def warn(message: str) -> None:
    """Issue a warning at the line of the user's code. Python displays a warning once per line.

    Python displays the line too. That of a magic is omitted, because it contains the note.
    """
    level = stacklevel_outside(SKIPPED_PACKAGES)
    frame = sys._getframe(level - 1)  # noqa: SLF001 - traceback and inspect would read source files
    if "get_ipython().run_" not in linecache.getline(frame.f_code.co_filename, frame.f_lineno):
        warnings.warn(message, OpenMedWarning, stacklevel=level)
        return
    registry = frame.f_globals.setdefault("__warningregistry__", {})
    warnings.warn_explicit(message, OpenMedWarning, "<cell>", frame.f_lineno, registry=registry)


# Packages without code of the user: this package and packages that call it.
SKIPPED_PACKAGES = (
    "openmed_nb",
    "IPython",
    "contextlib",
    "torch",
    "transformers",
    "accelerate",
    "lightning",
    "pytorch_lightning",
)


def stacklevel_outside(packages: Iterable[str]) -> int:
    """Return the ``stacklevel`` for the caller of the innermost frame outside the packages."""
    prefixes = tuple(f"{package}." for package in packages)
    level = 1
    frame = sys._getframe(1)  # noqa: SLF001 - traceback and inspect would read source files
    while frame.f_back is not None and f"{frame.f_globals.get('__name__')}.".startswith(prefixes):
        level += 1
        frame = frame.f_back
    return level
