"""Pages of annotated notes: in a notebook with buttons and a slider, elsewhere the first page."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from .._render.display import WIDGET_MIME_TYPE, Displayable, Report, TextSegment, to_html
from .._utils.validation import check_integer

if TYPE_CHECKING:
    from ipywidgets import VBox

    from .export.notes import Saveable

NOTES_PER_PAGE = 5


@dataclass(frozen=True, repr=False, eq=False)
class NotePages(Displayable):
    """Pages of notes with highlighted entities.

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
            yield TextSegment(f"{name}: ", starts_text=True)
            yield from segments
            yield TextSegment("\n")

    def _repr_mimebundle_(self, **_options: Any) -> dict[str, Any]:
        static = {"text/plain": str(self), "text/html": self._repr_html_()}
        ipython = sys.modules.get("IPython")
        shell: Any = None if ipython is None else ipython.get_ipython()
        if len(self) == 1 or shell is None or not shell.has_trait("kernel"):
            return static
        view = self.create_view()
        widget = {"version_major": 2, "version_minor": 0, "model_id": view.model_id}
        return {WIDGET_MIME_TYPE: widget, **static}

    def create_view(self) -> VBox:
        """Return a widget with the current page. Its controls work by mouse and by keyboard."""
        from ipywidgets import HTML, Button, HBox, IntSlider, VBox

        content = HTML(to_html(self.page(0)))
        slider = IntSlider(1, 1, len(self), description="Page", continuous_update=False)
        previous = Button(description="Previous page", disabled=True)
        following = Button(description="Next page", disabled=len(self) == 1)

        def show_page(change: Any) -> None:
            content.value = to_html(self.page(change["new"] - 1))
            previous.disabled = change["new"] == slider.min
            following.disabled = change["new"] == slider.max

        def show_previous(_button: Button) -> None:
            slider.value -= 1

        def show_next(_button: Button) -> None:
            slider.value += 1

        slider.observe(show_page, "value")
        previous.on_click(show_previous)
        following.on_click(show_next)
        return VBox([HBox([previous, following, slider]), content])
