"""A panel without widgets that keeps every state that it has shown, for the tests of this folder."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from openmed_nb.notebook.panel.model import PanelModel
from openmed_nb.notebook.panel.state import PanelState, read_state


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
