"""A panel without widgets that keeps every state that it has shown, for the tests of this folder."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from openmed_nb.notebook.panel.model import PanelModel
from openmed_nb.notebook.panel.state import PanelState, read_state


class Watched(PanelModel):
    """A panel without widgets.

    Attributes:
        states: Every state that its observers were told of.
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
        """What was shown to be under way, in order; what is shown on and on counts once."""
        shown = [str(state.activity or "") for state in self.states]
        return [activity for activity, before in zip(shown, ["", *shown], strict=False) if activity not in ("", before)]

    @property
    def agrees(self) -> bool:
        """Whether it shows what its session is, and nothing under way."""
        return self.state.activity is None and seen(self.state) == seen(PanelState(**read_state(self.session)))


def seen(state: PanelState) -> tuple[Any, ...]:
    """Return what a state shows of a session, without the memory, which changes by itself."""
    return state.devices, state.explanation.to_dict(), state.status, state.buttons, state.models, state.simulated
