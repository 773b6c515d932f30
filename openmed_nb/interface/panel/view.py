"""The panel as widgets: a view of a PanelModel that changes by trait updates only, made of core widgets.

Importing this file imports ipywidgets; so it is imported only when a panel is opened where a kernel can show it. Outputs
that are cleared or updated cannot be followed by nbval, so there is no Output widget, and nothing is displayed twice.
"""

from __future__ import annotations

from typing import Any

from ipywidgets import HTML, VBox, Widget

from ..display import Report
from ..widgets import StaticForm, close_tree
from . import rendering
from .model import PROMPT_SECONDS, PanelModel
from .regions import REGIONS, Region
from .state import PanelState


class PanelView(StaticForm, VBox):
    """The panel: device, environment, memory, models, and a text to try; every click calls one verb of its model.

    Where there is no widget, as in a saved notebook, it shows the state of the moment in which it was displayed, with
    what to type; never the text that was annotated.

    Args:
        model: What is shown and asked.
    """

    def __init__(self, model: PanelModel) -> None:
        self.model = model
        self.regions: tuple[Region, ...] = tuple(make(model, self._heard) for make in REGIONS)
        self._region = self.regions[0]
        self._clicked: Widget | None = None
        self._heard_at = 0.0
        style = HTML(rendering.STYLES)
        style.add_class("openmed-style")
        super().__init__([style, *self.regions])
        self.add_class("openmed-panel")
        self._paint(model.state)
        model.observe(self._paint)

    def __repr__(self) -> str:
        return "The openmed_nb panel; %openmed_device does the same by typing"

    def report(self) -> Report:
        """Return the static form."""
        return self.model.state.report()

    def close(self) -> None:
        """End the panel: it follows the session no longer, and no widget, layout or style of it is left."""
        self.model.close()
        close_tree(self)

    def _heard(self, region: Region, control: Widget) -> None:
        """Remember where somebody clicked: what comes of it is shown there, not far away."""
        self._region = region
        self._clicked = control if self.model.answers_promptly else None
        self._heard_at = self.model.clock()

    def _paint(self, state: PanelState) -> None:
        before = self._region.varying
        for region in self.regions:
            region.paint(state)
            region.tell(state if region is self._region else None)
        self._keep_focus(shown_again=self._region.varying != before)
        if state.activity is None and not state.waiting:
            self._clicked = None

    def _keep_focus(self, shown_again: bool) -> None:
        """Give the keyboard's focus to what was clicked, or to its neighbour, where the browser drops it.

        Never later than promptly: somebody who types in a cell meanwhile would type commands that delete it.
        """
        control = self._clicked
        if control is None or self.model.clock() - self._heard_at > PROMPT_SECONDS:
            self._clicked = None
            return
        if control.comm is None or control.disabled:
            self._clicked = None
            focus(self._region.neighbour or self.regions[-1].neighbour)
        elif shown_again:
            focus(control)


def focus(control: Any) -> None:
    """Give a control the keyboard's focus; ipywidgets 7 has no message for that."""
    if hasattr(control, "focus"):
        control.focus()
