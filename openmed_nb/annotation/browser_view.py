"""The widget of the browser of notes: it displays the state of a :class:`NoteListing`, and passes on what a user does."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import anywidget
from traitlets import Dict

from .._utils.text import short_type_name
from .browsing import NoteListing

FOLDER = Path(__file__).parent

# The views of each cell, with the execution that displayed them. ipywidgets keeps a widget, and with it the notes, until it is closed.
OPEN_VIEWS: dict[str, tuple[str, list[BrowserView]]] = {}


class BrowserView(anywidget.AnyWidget):
    """A browser of notes."""

    _esm = (FOLDER / "browser.js").read_text("utf-8")
    _css = (FOLDER / "browser.css").read_text("utf-8")
    state = Dict().tag(sync=True)

    def __init__(self, listing: NoteListing) -> None:
        self.listing = listing
        super().__init__(state=listing.state(), _dom_classes=("openmed-notes",))
        self.on_msg(self._handle)

    def __repr__(self) -> str:
        return "openmed_nb browser of notes"

    def _handle(self, _view: BrowserView, event: Mapping[str, Any], _buffers: object) -> None:
        try:
            self.listing.handle(event)
            self.state = self.listing.state()
        except Exception as error:  # noqa: BLE001 - nobody else would report it, and its message may quote a note
            self.state = {**self.state, "alert": f"The action failed ({short_type_name(error)}). Run this cell again."}
        finally:
            self.send({"handled": True})  # The state may be the same as before.

    def replace_earlier(self, parent: Mapping[str, Any]) -> None:
        """Close the views of earlier executions of the cell that displays this view. The front end removes their output.

        Args:
            parent: Parent message of the kernel.
        """
        cell = parent.get("metadata", {}).get("cellId")
        if cell is None:
            return
        execution = parent["header"]["msg_id"]
        earlier, views = OPEN_VIEWS.get(cell, (execution, []))
        if earlier != execution:
            for outdated in views:
                outdated.close()
            views = []
        OPEN_VIEWS[cell] = (execution, [*views, self])
