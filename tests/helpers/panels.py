"""Panels that record what they show: without widgets, with widgets, and the front end's side of the widgets."""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Callable, Coroutine
from typing import Any

from ipywidgets import HTML, Button

from openmed_nb.notebook.panel.model import PanelModel
from openmed_nb.notebook.panel.state import PanelState, read_state
from openmed_nb.notebook.panel.view import STYLES, PanelView, Region, iter_widgets


class OpenPanel(PanelView):
    """A panel, and short ways to what is in it."""

    def region(self, name: str) -> Region:
        """Return a region by the name in its heading."""
        return next(region for region in self.regions if region.name == name)

    @property
    def pressed(self) -> list[str]:
        """The devices whose button looks pressed."""
        return [device for device, toggle in self.device_buttons.items() if "mod-active" in toggle._dom_classes]

    @property
    def messages(self) -> dict[str, str]:
        """Results and errors of the last click, by region."""
        return {region.name: region.message.value for region in self.regions if region.message.value}

    @property
    def shown(self) -> str:
        """All HTML in it, without the style sheets."""
        htmls = [widget.value for widget in iter_widgets(self) if isinstance(widget, HTML)]
        return "".join(html for html in htmls if not html.startswith(STYLES))

    def click(self, name: str) -> None:
        """Click the button with a description."""
        (button,) = (
            widget for widget in iter_widgets(self) if isinstance(widget, Button) and widget.description == name
        )
        button.click()


class Watched(PanelModel):
    """A panel without widgets.

    Attributes:
        states: All observed states.
    """

    def __init__(self, *arguments: Any, **named: Any) -> None:
        super().__init__(*arguments, **named)
        self.states: list[PanelState] = []
        self.watch(self.states.append)

    def watch(self, function: Callable[[PanelState], object]) -> None:
        """Call a function with each state that is shown from now on."""
        self.observe(lambda change: function(change["new"]), "state")

    @property
    def activities(self) -> list[str]:
        """Displayed activities in order, without repetitions."""
        shown = [str(state.activity or "") for state in self.states]
        return [activity for activity, before in zip(shown, ["", *shown], strict=False) if activity not in ("", before)]

    @property
    def agrees(self) -> bool:
        """Whether it shows the current state of the session and no activity."""
        return self.state.activity is None and seen(self.state) == seen(PanelState(**read_state(self.session)))


def seen(state: PanelState) -> tuple[Any, ...]:
    """Return the parts of a state that depend on the session only; the memory changes at any time."""
    return state.devices, state.explanation.to_dict(), state.status, state.buttons, state.models, state.simulated


class ClockLoop(asyncio.SelectorEventLoop):
    """An event loop whose clock stands still until it is moved."""

    now = 0.0

    def time(self) -> float:
        """Return the time of the clock."""
        return self.now


def in_notebook(scenario: Callable[..., Coroutine[Any, Any, None]]) -> Callable[..., None]:
    """Return a test that runs a coroutine as a kernel runs cells, in an event loop whose clock stands still."""

    @functools.wraps(scenario)
    def test(**fixtures: Any) -> None:
        loop = ClockLoop()
        try:
            loop.run_until_complete(scenario(**fixtures))
        finally:
            loop.close()

    return test


async def next_cell(seconds: float = 0.0) -> None:
    """Let the loop take what was handed over to it, advance the clock by some seconds, and let the loop do what is due."""
    await asyncio.sleep(0)
    asyncio.get_running_loop().now += seconds  # type: ignore[attr-defined]
    for _ in range(3):
        await asyncio.sleep(0)
