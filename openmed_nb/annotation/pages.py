"""Notes in a notebook: a live view if a user runs the cell, elsewhere a page of text."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from .._events.progress import is_interactive
from .._render.display import WIDGET_MIME_TYPE, Displayable, Report, TextSegment, to_html, to_text
from .._utils.validation import check_integer

if TYPE_CHECKING:
    from ipywidgets import DOMWidget

    from .export.notes import Saveable

NOTES_PER_PAGE = 5


class LiveNotes(Displayable):
    """Mixin for values with a live view of notes, in addition to text and HTML for saved notebooks."""

    def __len__(self) -> int:
        raise NotImplementedError

    def create_view(self) -> DOMWidget:
        """Return a widget with the notes."""
        raise NotImplementedError

    def _repr_mimebundle_(self, **_options: Any) -> dict[str, Any]:
        report = self.final_report()
        static = {"text/plain": to_text(report), "text/html": to_html(report)}
        ipython = sys.modules.get("IPython")
        shell: Any = None if ipython is None else ipython.get_ipython()
        if len(self) <= 1 or shell is None or not shell.has_trait("kernel"):
            return static
        parent = shell.get_parent()
        # Voila runs the cells itself, and displays widgets.
        is_voila = os.environ.get("SERVER_SOFTWARE", "").startswith("voila/")
        if not (is_voila or is_interactive(parent)):
            return static
        from .browser_view import replace_views

        view = self.create_view()
        replace_views(parent, view)
        return {WIDGET_MIME_TYPE: {"version_major": 2, "version_minor": 0, "model_id": view.model_id}, **static}


@dataclass(frozen=True, repr=False, eq=False)
class NotePages(LiveNotes):
    """Pages of notes with highlighted entities. In a notebook, they are displayed as a browser of notes.

    Attributes:
        annotations: The annotations.
        notes_per_page: Number of notes on a page.
    """

    annotations: Saveable
    notes_per_page: int = NOTES_PER_PAGE

    def __len__(self) -> int:
        """Return the number of pages, at least 1."""
        return max(1, -(-len(self.annotations) // self.notes_per_page))

    def to_dict(self) -> dict[str, Any]:
        """Return the annotations as JSON-compatible data."""
        return self.annotations.to_dict()

    def to_report(self) -> Report:
        """Return the first page."""
        return self.page(0)

    def page(self, number: int) -> Report:
        """Return a page, from 0."""
        number = check_integer("number", number, 0, len(self) - 1)
        count = len(self.annotations)
        start = number * self.notes_per_page
        stop = min(start + self.notes_per_page, count)
        notes = f"Notes {start} to {stop - 1} of {count:,}, counted from 0." if count else "No notes."
        segments = tuple(self._segments(start, stop))
        return Report(self.annotations.summary().to_report().title, (notes,), segments=segments)

    def _segments(self, start: int, stop: int) -> Iterator[TextSegment]:
        for name, segments in self.annotations.iter_named_segments(start, stop):
            # A message to the front end cannot contain an unpaired surrogate.
            displayed_name = name.encode("utf-8", "replace").decode()
            yield TextSegment(f"{displayed_name}: ", starts_text=True)
            yield from segments
            yield TextSegment("\n")

    def create_view(self) -> DOMWidget:
        """Return a browser of the notes."""
        return self.annotations.create_view()
