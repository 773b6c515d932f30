"""Values that are part of a note, and the places that quote them."""

from __future__ import annotations

from collections.abc import Iterable

MARKER = "Zyxwv"
SENTENCE = f"Mr {MARKER} has HIV"
LONG_WORD = MARKER * 9


def find_leaks(call: str, places: Iterable[tuple[str, str]]) -> list[str]:
    """Return a line for each place of a call that quotes a planted value; a place has a name and a text."""
    return [
        f"{call}: {place}: {' '.join(text.split())[:300]!r}" for place, text in places if MARKER.lower() in text.lower()
    ]
