"""Sizes and shares as people read them, and numbers as they pass them."""

from __future__ import annotations

import operator
from typing import Any

UNITS = ("bytes", "KiB", "MiB", "GiB", "TiB")


def in_bytes(size: int | None) -> str:
    """Return a size in the units that torch uses, empty where there is none.

    Example:
        >>> in_bytes(512), in_bytes(3 << 20), in_bytes(-(5 << 30)), in_bytes(None)
        ('512 bytes', '3.0 MiB', '-5.0 GiB', '')
    """
    if size is None:
        return ""
    amount, unit = float(size), 0
    while abs(amount) >= 1024 and unit < len(UNITS) - 1:  # noqa: PLR2004 - what the units are
        amount, unit = amount / 1024, unit + 1
    return f"{amount:.1f} {UNITS[unit]}" if unit else f"{size} bytes"


def counted(number: int, noun: str, nouns: str | None = None) -> str:
    """Return a number with its noun; the plural is given where it does not end in a plain s.

    Example:
        >>> counted(1, "tensor"), counted(1200, "tensor"), counted(2, "entity", "entities")
        ('1 tensor', '1,200 tensors', '2 entities')
    """
    return f"{number:,} {noun if number == 1 else nouns or f'{noun}s'}"


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
