"""An open panel with what a test looks at in it, and the front end's side of its widgets."""

from __future__ import annotations

from typing import Any

from ipywidgets import HTML, Button, Checkbox, Widget

from openmed_nb.notebook.panel import rendering
from openmed_nb.notebook.panel.view import PanelView, Region, iter_widgets


class OpenPanel(PanelView):
    """A panel, and short ways to what is in it."""

    def region(self, name: str) -> Region:
        """Return a region by the name in its heading."""
        return next(region for region in self.regions if region.name == name)

    @property
    def device_buttons(self) -> dict[str, Widget]:
        """The buttons of the devices, by device."""
        return self.devices.named

    @property
    def pressed(self) -> list[str]:
        """The devices whose button looks pressed."""
        return [device for device, toggle in self.device_buttons.items() if "mod-active" in toggle._dom_classes]

    @property
    def messages(self) -> dict[str, str]:
        """Results and errors of the last click, by region."""
        said = {
            name: self.region(name).message.value for name in ("Device", "Environment", "Memory", "Models", "Try it")
        }
        return {name: html for name, html in said.items() if html}

    @property
    def shown(self) -> str:
        """All HTML in it, without the style sheets."""
        htmls = [widget.value for widget in iter_widgets(self) if isinstance(widget, HTML)]
        return "".join(html for html in htmls if not html.startswith(rendering.STYLES))

    def click(self, name: str) -> None:
        """Click the button with a description."""
        (button,) = (
            widget for widget in iter_widgets(self) if isinstance(widget, Button) and widget.description == name
        )
        button.click()


class FrontEnd:
    """Records the messages to some widgets, as a front end receives them.

    Attributes:
        state: Displayed state of each widget, from messages and clicks.
        focused: What was on the controls that got the focus.
    """

    def __init__(self) -> None:
        self.state: dict[Widget, dict[str, Any]] = {}
        self.focused: list[str] = []

    def record(self, one: Widget, message: dict[str, Any]) -> None:
        """Record a message to a widget."""
        data = message.get("data") or {}
        if data.get("method") == "update":
            self.state.setdefault(one, {}).update(data["state"])
        elif data.get("content") == {"do": "focus"}:
            self.focused.append(one.description)

    def click(self, control: Button | Checkbox) -> None:
        """Click as a front end does: a checkbox shows its new value before it sends it."""
        if isinstance(control, Button):
            control.click()
        else:
            value = not control.value
            self.state.setdefault(control, {})["value"] = value
            control.set_state({"value": value})
