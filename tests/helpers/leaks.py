"""Values that are part of a note, and the places that quote them."""

from __future__ import annotations

import traceback
from collections.abc import Callable, Iterable

import pytest

from openmed_nb.errors import ConfigurationError

MARKER = "Zyxwv"
SENTENCE = f"Mr {MARKER} has HIV"
LONG_WORD = MARKER * 9


def find_leaks(call: str, places: Iterable[tuple[str, str]]) -> list[str]:
    """Return a line for each place of a call that quotes a planted value; a place has a name and a text."""
    return [
        f"{call}: {place}: {' '.join(text.split())[:300]!r}" for place, text in places if MARKER.lower() in text.lower()
    ]


def catch_rejection(call: Callable[[], object]) -> ConfigurationError:
    """Return the error of a call, which contains neither the marker nor another error with it."""
    with pytest.raises(ConfigurationError) as caught:
        call()
    assert MARKER not in "".join(traceback.format_exception(caught.value, limit=0))
    assert caught.value.__context__ is None
    return caught.value
