"""What is said of numbers that were converted on their way to a device: once for each name, and no content."""

from __future__ import annotations

import re
import sys
import warnings
from collections.abc import Mapping
from typing import Any

from ..errors import OpenMedWarning

REPORTED: set[tuple[str, str]] = set()
"""Names with types whose conversion was reported in this process: a training loop moves thousands of batches."""

PACKAGE = __name__.partition(".")[0]

SHOWN = 3
"""So many names stand in a report."""

WORD = r"([a-z]+([0-9]{1,2}[a-z]*)?|[0-9]{1,3})"

FIELD_NAME = re.compile(rf"(?=.{{1,60}}\Z){WORD}([._]{WORD})*")
"""What is shown of a key: small letters and short numbers, such as ``"input_ids"`` or ``"layer.11.weight"``.

Anything else could be a text, a person or the number of a record.
"""


def report(converted: Mapping[str, tuple[str, str]], device: str) -> None:
    """Warn of conversions that were not reported before in this process.

    Args:
        converted: Names, empty for a value without one, with the types before and after.
        device: The kind of device, such as ``"mps"``.
    """
    new = {name: types for name, types in converted.items() if (name, types[0]) not in REPORTED}
    if new:
        REPORTED.update((name, types[0]) for name, types in new.items())
        warnings.warn(said_of(new, device), OpenMedWarning, stacklevel=level_of_caller())


def said_of(converted: Mapping[str, tuple[str, str]], device: str) -> str:
    """Return a sentence about conversions.

    Example:
        >>> said_of({"weights": ("float64", "float32")}, "mps")
        'Converted float64 to float32, because MPS has no float64: weights.'
    """
    kinds = sorted(set(converted.values()))
    changes = " and ".join(f"{before} to {after}" for before, after in kinds)
    missing = " and no ".join(before for before, _ in kinds)
    names = [name for name in converted if name]
    more = f" and {len(names) - SHOWN} more" if len(names) > SHOWN else ""
    where = f": {', '.join(names[:SHOWN])}{more}" if names else ""
    return f"Converted {changes}, because {device.upper()} has no {missing}{where}."


def shown_key(key: Any, place: int) -> str:
    """Return what is shown of a key: a plain name of a field, otherwise its place.

    Example:
        >>> shown_key("token_type_ids", 2), shown_key("MRN-00123_Jane-Doe", 0), shown_key(7, 1)
        ('token_type_ids', '[0]', '[1]')
    """
    return key if isinstance(key, str) and FIELD_NAME.fullmatch(key) else f"[{place}]"


def level_of_caller() -> int:
    """Return how many frames up from the caller the first one is that is not of this package: the person's line."""
    level, frame = 1, sys._getframe(1)  # noqa: SLF001
    while frame.f_back is not None and frame.f_globals["__name__"].partition(".")[0] == PACKAGE:
        level, frame = level + 1, frame.f_back
    return level
