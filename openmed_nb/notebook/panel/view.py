"""The panel as widgets: a view of a PanelModel that changes by trait updates only, made of core widgets.

Importing this file imports ipywidgets; so it is imported only when a panel is opened where a kernel can show it. Outputs
that are cleared or updated cannot be followed by nbval, so there is no Output widget, and nothing is displayed twice.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any

from ipywidgets import HTML, Box, Button, Checkbox, HBox, Textarea, VBox, Widget
from traitlets import Unicode, dlink

from ..._render.display import Report, StaticReprMixin
from . import rendering
from .model import IMMEDIATE_SECONDS, REFRESH_SECONDS, PanelModel

# A synthetic sentence to try.
EXAMPLE_TEXT = "The patient has type 2 diabetes mellitus and hypertension, and no asthma."

# Stands in a saved notebook, below what the panel showed.
RERUN_NOTICE = "This is how it was: run this cell again for a panel to click."


class TextBox(Textarea):
    """A box for a text, whose value is not sent back: half of an emoji, as a cut leaves it, could not be, and would be lost."""

    value = Unicode().tag(sync=True, echo_update=False)


class Region(VBox):
    """A part of the panel: its name, what it shows, its controls, and what came of the last click on one of them."""

    def __init__(
        self,
        name: str,
        make: Callable[..., Any],
        controls: Iterable[Widget] = (),
        above: Iterable[Widget] = (),
        below: Iterable[Widget] = (),
    ) -> None:
        self.name = name
        self.top = make(HTML)
        self.activity = make(HTML)
        self.message = make(HTML)
        self.controls = make(HBox, [*controls, self.activity], name="controls")
        children = [self.top, *above, self.controls, self.message, *below]
        classes = ("openmed-region", f"openmed-{name.lower().replace(' ', '-')}")
        super().__init__(children, layout=self.top.layout, _dom_classes=classes)


class NamedButtons(HBox):
    """Buttons that come and go by name; one whose name stays is not made again."""

    def __init__(self, make: Callable[[str], Button], **options: Any) -> None:
        self.make = make
        self.named: dict[str, Button] = {}
        super().__init__(**options)

    def keep(self, names: tuple[str, ...]) -> bool:
        """Show a button for each name; return whether any came or went."""
        if tuple(self.named) == names:
            return False
        former = self.named
        self.named = {name: former.pop(name, None) or self.make(name) for name in names}
        self.children = tuple(self.named.values())
        for button in former.values():
            close_tree(button)
        return True


class PanelView(StaticReprMixin, VBox):
    """The panel: device, memory, a text to try, models, environment; every click calls one verb of its model.

    Where there is no widget, as in a saved notebook, it shows the state of the moment in which it was displayed, with
    what to type; never the text that was annotated.
    """

    model: PanelModel

    def __init__(self, model: PanelModel) -> None:
        self.model = model
        self.styles: dict[Callable[..., Any], Widget] = {}
        self._clicked: Widget | None = None
        self._clicked_at = 0.0
        self._answered: tuple[Any, ...] = ()
        super().__init__(_dom_classes=("openmed-panel",))
        self.devices = self._make(NamedButtons, self._device_button, name="named")
        self.table = self._make(HTML)
        reset = self._button("Reset", "Back to what the shell said, or to the best device.", model.reset)
        refresh = self._button("Refresh", "Look at everything again.", model.refresh)
        hover = "Forget models, outputs and the last error, as the magic does."
        release = self._button("Release memory", hover, model.release)
        self.automatic = self._make(
            Checkbox,
            description=f"Refresh every {REFRESH_SECONDS:g} seconds",
            indent=False,
            disabled=model.cells.loop is None,
        )
        self.text = self._make(TextBox, EXAMPLE_TEXT, description="Text to annotate", rows=2, continuous_update=False)
        hover = "Find entities in the text, which stays in this kernel."
        self.annotate = self._button("Annotate", hover, partial(model.annotate_deferred, lambda: self.text.value))
        self.answer = self._make(HTML)
        self.models = self._make(NamedButtons, self._unload_button, name="named")
        self.regions = (
            Region("Device", self._make, [self.devices, reset], below=[self.table]),
            Region("Memory", self._make, [refresh, release, self.automatic]),
            Region("Try it", self._make, [self.annotate], above=[self.text], below=[self.answer]),
            Region("Models", self._make, [self.models]),
            Region("Environment", self._make),
        )
        self._region = self.regions[0]
        for region in self.regions:
            dlink((model, "state"), (region.top, "value"), partial(rendering.top, region.name))
        dlink((model, "state"), (self.table, "value"), rendering.devices)
        self.children = (self._make(HTML, rendering.STYLES + rendering.STALE_PANEL_HTML, name="gone"), *self.regions)
        self._follow()
        model.observe(self._follow, "state")
        self.text.observe(self._show_answer, "value")
        self.automatic.observe(self._switched, "value")

    def __repr__(self) -> str:
        return "The openmed_nb panel; %openmed_device does the same by typing"

    def report(self) -> Report:
        return replace(self.model.state, notice=RERUN_NOTICE).final_report()

    def close(self) -> None:
        """End the panel: it follows the session no longer, and no widget, layout or style of it is left."""
        self.model.close()
        close_tree(self)
        for shared in (self.layout, *self.styles.values()):
            shared.close()

    def _make(self, kind: Callable[..., Any], *arguments: Any, name: str = "", **options: Any) -> Any:
        """Return a widget, perhaps with a name that the style sheet knows.

        All share a layout, and a style for each kind, because a page waits for each widget.
        """
        if kind in self.styles:
            options["style"] = self.styles[kind]
        classes = (f"openmed-{name}",) if name else ()
        widget = kind(*arguments, layout=self.layout, _dom_classes=classes, **options)
        if hasattr(widget, "style"):
            self.styles[kind] = widget.style
        return widget

    def _button(self, description: str, hover: str, verb: Callable[[], None]) -> Button:
        button = self._make(Button, description=description, tooltip=hover)
        button.on_click(partial(self._ask, verb))
        return button

    def _ask(self, verb: Callable[[], None], control: Widget) -> None:
        """Call a verb, and remember where somebody clicked: what comes of it is shown there, not far away."""
        self._region = next(region for region in self.regions if control in iter_widgets(region))
        self._clicked = control if self.model.responds_immediately else None
        self._clicked_at = self.model.clock()
        verb()

    def _switched(self, change: Any) -> None:
        if change["new"] != self.model.state.auto_refresh:
            self._ask(partial(self.model.set_auto_refresh, change["new"]), self.automatic)

    def _follow(self, _change: Any = None) -> None:
        """Show a new state in the controls, and what came of the last click in its region."""
        state = self.model.state
        redrawn = {
            self.regions[0]: self.devices.keep(tuple(button.device for button in state.buttons)),
            self.regions[3]: self.models.keep(state.models.names),
        }
        for shown in state.buttons:
            button = self.devices.named[shown.device]
            button.description = shown.label
            button.tooltip = shown.tooltip
            button.disabled = not shown.enabled
            # It looks pressed by the class that a ToggleButton has. A real one sends its new value, which is not a change,
            # and so not a click, if it was painted meanwhile.
            if shown.pressed:
                button.add_class("mod-active")
            else:
                button.remove_class("mod-active")
        if not state.pending_clicks:  # While a click waits the box stays as it was clicked.
            self.automatic.value = state.auto_refresh
        self._show_answer()
        for region in self.regions:
            clicked = region is self._region
            region.activity.value = rendering.activity(state) if clicked else ""
            region.message.value = rendering.message(state) if clicked else ""
        self._restore_focus(redrawn.get(self._region, False))
        if state.activity is None and not state.pending_clicks:
            self._clicked = None

    def _device_button(self, device: str) -> Button:
        return self._button(device, "", partial(self.model.use_device, device))

    def _unload_button(self, name: str) -> Button:
        return self._button(f"Unload {name}", "Forget it, and hand its memory back.", partial(self.model.unload, name))

    def _show_answer(self, _change: Any = None) -> None:
        """Show the answer, unless it is one to another text than the one above it; a long one is made into HTML once."""
        state = self.model.state
        fits = state.annotation is not None and state.annotation.text == self.text.value
        shown = (state.annotation, state.seconds, state.choice if state.answer_is_old else None) if fits else ()
        if shown != self._answered:
            self._answered = shown
            self.answer.value = rendering.annotation(state) if fits else ""

    def _restore_focus(self, redrawn: bool) -> None:
        """Give the keyboard's focus to what was clicked, or to its neighbour, where the browser drops it.

        Never later than promptly: somebody who types in a cell meanwhile would type commands that delete it.
        """
        control = self._clicked
        if control is None or self.model.clock() - self._clicked_at > IMMEDIATE_SECONDS:
            self._clicked = None
        elif control.comm is None or control.disabled:
            self._clicked = None
            if self._region is self.regions[0]:
                in_force = (button.device for button in self.model.state.buttons if button.active)
                _focus(self.devices.named[next(in_force, "auto")])
            else:
                _focus(next(iter(self.models.children), self.annotate))
        elif redrawn:
            _focus(control)


def _focus(control: Any) -> None:
    """Give a control the keyboard's focus; ipywidgets 7 has no message for that."""
    if hasattr(control, "focus"):
        control.focus()


def iter_widgets(widget: Widget) -> Iterator[Widget]:
    """Yield a widget and all that is in it; layouts and styles are shared."""
    for child in widget.children if isinstance(widget, Box) else ():
        yield from iter_widgets(child)
    yield widget


def close_tree(widget: Widget) -> None:
    """Close a widget and all that is in it; ipywidgets itself closes no children."""
    for part in tuple(iter_widgets(widget)):
        Widget.close(part)
        vars(part).pop("_repr_mimebundle_", None)  # ipywidgets 8 puts None there, and the static form would be gone.
