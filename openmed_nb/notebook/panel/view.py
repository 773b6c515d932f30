"""The panel as widgets: a view of a PanelModel that changes by trait updates only, made of core widgets.

Importing this file imports ipywidgets; so it is imported only when a panel is opened where a kernel can show it. Outputs
that are cleared or updated cannot be followed by nbval, so there is no Output widget, and nothing is displayed twice.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

from ipywidgets import HTML, Box, Button, Checkbox, HBox, Layout, Textarea, VBox, Widget
from traitlets import Unicode

from ..._render.display import Report, StaticForm
from . import rendering
from .model import PROMPT_SECONDS, REFRESH_SECONDS, PanelModel
from .state import PanelState

if TYPE_CHECKING:
    from ...annotation.results import AnnotatedText
    from ...devices.choice import DeviceChoice


# A synthetic sentence to try.
SENTENCE = "The patient has type 2 diabetes mellitus and hypertension, and no asthma."

# Stands in a saved notebook, below what the panel showed.
AGAIN = "This is how it was: run this cell again for a panel to click."

# Gets the region and the control of each click, before its verb is called.
Clicked = Callable[["Region", Widget], None]

# Makes the HTML of a region.
Shown = Callable[[PanelState], str]


class Kit:
    """Makes the widgets of a panel: they share a layout, and a style for each kind, because a page waits for each widget."""

    def __init__(self) -> None:
        self.layout = Layout()
        self.styles: dict[Callable[..., Any], Widget] = {}

    def make(self, kind: Callable[..., Any], *arguments: Any, name: str = "", **options: Any) -> Any:
        """Return a widget, perhaps with a name that the style sheet knows."""
        classes = (f"openmed-{name}",) if name else ()
        style = {"style": self.styles[kind]} if kind in self.styles else {}
        made = kind(*arguments, layout=self.layout, _dom_classes=classes, **style, **options)
        if hasattr(made, "style"):
            self.styles.setdefault(kind, made.style)
        return made

    def close(self) -> None:
        for one in (self.layout, *self.styles.values()):
            one.close()


class Region(VBox):
    """A part of the panel: its name, what it shows, its controls, and what came of the last click on one of them."""

    def __init__(  # noqa: PLR0913 - each is one part of a region
        self,
        kit: Kit,
        name: str,
        show: Shown,
        clicked: Clicked,
        *,
        controls: Iterable[Widget] = (),
        above: Iterable[Widget] = (),
        below: Iterable[Widget] = (),
    ) -> None:
        self.name, self.show, self.clicked = name, show, clicked
        self.top, self.activity, self.message = kit.make(HTML), kit.make(HTML), kit.make(HTML)
        self.controls = kit.make(HBox, [*controls, self.activity], name="controls")
        classes = "openmed-region", f"openmed-{name.lower().replace(' ', '-')}"
        children = [self.top, *above, self.controls, self.message, *below]
        super().__init__(children, layout=kit.layout, _dom_classes=classes)

    @property
    def varying(self) -> tuple[Widget, ...]:
        """The controls that come and go."""
        boxes = (control for control in self.controls.children if isinstance(control, NamedControls))
        return tuple(control for box in boxes for control in box.children)

    @property
    def neighbour(self) -> Widget | None:
        """Where the keyboard's focus goes when the control that has it vanishes or is disabled; ``None`` where to is not here."""
        return self.controls.children[0]

    def paint(self, state: PanelState) -> None:
        self.top.value = rendering.heading(self.name) + self.show(state)

    def tell(self, state: PanelState | None) -> None:
        """Show what is under way and what came of the last click, or nothing of both."""
        self.activity.value = rendering.activity(state) if state else ""
        self.message.value = rendering.message(state) if state else ""

    def ask(self, control: Widget, verb: Callable[[], None]) -> None:
        self.clicked(self, control)
        verb()

    def button(self, kit: Kit, description: str, hover: str, verb: Callable[[], None]) -> Button:
        made = kit.make(Button, description=description, tooltip=hover)
        made.on_click(lambda control: self.ask(control, verb))
        return made


class NamedControls(HBox):
    """Controls that come and go by name; one whose name stays is not made again."""

    def __init__(self, kit: Kit, make: Callable[[str], Widget]) -> None:
        self.make = make
        self.named: dict[str, Widget] = {}
        super().__init__(layout=kit.layout, _dom_classes=("openmed-named",))

    def keep(self, names: tuple[str, ...]) -> None:
        if tuple(self.named) == names:
            return
        gone = [control for name, control in self.named.items() if name not in names]
        self.named = {name: self.named.get(name) or self.make(name) for name in names}
        self.children = tuple(self.named.values())
        for control in gone:
            close_tree(control)


class DeviceRegion(Region):
    """Which device is in force and why, a button for each, and what each lacks."""

    def __init__(self, kit: Kit, model: PanelModel, clicked: Clicked) -> None:
        self.model = model
        self.table = kit.make(HTML)
        # They look pressed by the class that a ToggleButton has. A real one sends its new value, which is not a change,
        # and so not a click, if it was painted meanwhile.
        self.device_buttons = NamedControls(
            kit, lambda device: self.button(kit, device, "", lambda: model.choose(device))
        )
        reset = self.button(kit, "Reset", "Back to what the shell said, or to the best device.", model.reset)
        controls = self.device_buttons, reset
        super().__init__(kit, "Device", rendering.status, clicked, controls=controls, below=[self.table])

    @property
    def neighbour(self) -> Widget | None:
        in_force = [one.device for one in self.model.state.buttons if one.in_force]
        return self.device_buttons.named[in_force[0] if in_force else "auto"]

    def paint(self, state: PanelState) -> None:
        super().paint(state)
        self.table.value = rendering.devices(state)
        self.device_buttons.keep(tuple(one.device for one in state.buttons))
        for one in state.buttons:
            button = self.device_buttons.named[one.device]
            button.description, button.tooltip, button.disabled = one.label, one.hover, not one.enabled
            (button.add_class if one.pressed else button.remove_class)("mod-active")


class MemoryRegion(Region):
    def __init__(self, kit: Kit, model: PanelModel, clicked: Clicked) -> None:
        self.model = model
        hover = "Forget models, outputs and the last error, as the magic does."
        refresh = self.button(kit, "Refresh", "Look at everything again.", model.refresh)
        release = self.button(kit, "Release memory", hover, model.release)
        words = f"Refresh every {REFRESH_SECONDS:g} seconds"
        self.automatic = kit.make(Checkbox, description=words, indent=False, disabled=not model.cells.has_loop)
        self.automatic.observe(self._switched, "value")
        super().__init__(kit, "Memory", rendering.memory, clicked, controls=(refresh, release, self.automatic))

    def paint(self, state: PanelState) -> None:
        """Show the memory, and whether it is looked at by itself; while a click waits the box stays as it was clicked."""
        super().paint(state)
        if not state.waiting:
            self.automatic.value = state.refreshes

    def _switched(self, change: Any) -> None:
        if change["new"] != self.model.state.refreshes:
            self.ask(self.automatic, lambda: self.model.refresh_automatically(change["new"]))


class TextBox(Textarea):
    """A box for a text, whose value is not sent back: half of an emoji, as a cut leaves it, could not be, and would be lost."""

    value = Unicode().tag(sync=True, echo_update=False)


class TryRegion(Region):
    """A text, and what a model finds in it."""

    def __init__(self, kit: Kit, model: PanelModel, clicked: Clicked) -> None:
        self.model = model
        self.text = kit.make(TextBox, SENTENCE, description="Text to annotate", rows=2, continuous_update=False)
        self.answer = kit.make(HTML)
        self._shown: tuple[AnnotatedText | None, bool, DeviceChoice | None] = (None, False, None)
        hover = "Find entities in the text, which stays in this kernel."
        verb = partial(model.annotate_soon, lambda: self.text.value)
        annotate = self.button(kit, "Annotate", hover, verb)
        parts = {"controls": (annotate,), "above": (self.text,), "below": (self.answer,)}
        super().__init__(kit, "Try it", lambda _state: "", clicked, **parts)
        self.text.observe(self._edited, "value")

    def paint(self, state: PanelState) -> None:
        """Show what was found; a long answer is made into HTML once."""
        super().paint(state)
        shown = state.answer, state.answer_is_old, state.choice if state.answer_is_old else None
        if state.answer is not self._shown[0] or shown[1:] != self._shown[1:]:
            self._shown = shown
            self._show(state, self.text.value)

    def _edited(self, change: Any) -> None:
        self._show(self.model.state, change["new"])

    def _show(self, state: PanelState, text: str) -> None:
        """Show the answer, unless it is one to another text than the one above it."""
        answer = self._shown[0]
        self.answer.value = rendering.answer(state) if answer and answer.text == text else ""


class ModelsRegion(Region):
    """What is loaded, with a button for each name to unload it."""

    def __init__(self, kit: Kit, model: PanelModel, clicked: Clicked) -> None:
        hover = "Forget it, and hand its memory back."
        self.unloads = NamedControls(
            kit, lambda name: self.button(kit, f"Unload {name}", hover, lambda: model.unload(name))
        )
        super().__init__(kit, "Models", rendering.models, clicked, controls=(self.unloads,))

    @property
    def neighbour(self) -> Widget | None:
        return next(iter(self.unloads.children), None)

    def paint(self, state: PanelState) -> None:
        super().paint(state)
        self.unloads.keep(state.models.names)


class PanelView(StaticForm, VBox):
    """The panel: device, memory, a text to try, models, environment; every click calls one verb of its model.

    Where there is no widget, as in a saved notebook, it shows the state of the moment in which it was displayed, with
    what to type; never the text that was annotated.
    """

    def __init__(self, model: PanelModel) -> None:
        self.model, self.kit = model, Kit()
        kit, heard = self.kit, self._heard
        self.attempt = TryRegion(kit, model, heard)
        self.regions: tuple[Region, ...] = (
            DeviceRegion(kit, model, heard),
            MemoryRegion(kit, model, heard),
            self.attempt,
            ModelsRegion(kit, model, heard),
            Region(kit, "Environment", rendering.environment, heard),
        )
        self._region = self.regions[0]
        self._clicked: Widget | None = None
        self._heard_at = 0.0
        first = kit.make(HTML, rendering.STYLES + rendering.GONE, name="gone")
        super().__init__([first, *self.regions], layout=kit.layout, _dom_classes=("openmed-panel",))
        self._paint(model.state)
        model.observe(self._paint)

    def __repr__(self) -> str:
        return "The openmed_nb panel; %openmed_device does the same by typing"

    def report(self) -> Report:
        return replace(self.model.state, note=AGAIN).marked()

    def close(self) -> None:
        """End the panel: it follows the session no longer, and no widget, layout or style of it is left."""
        self.model.close()
        close_tree(self)
        self.kit.close()

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
            focus(self._region.neighbour or self.attempt.neighbour)
        elif shown_again:
            focus(control)


def focus(control: Any) -> None:
    """Give a control the keyboard's focus; ipywidgets 7 has no message for that."""
    if hasattr(control, "focus"):
        control.focus()


def tree(widget: Widget) -> Iterator[Widget]:
    """Yield a widget and all that is in it; layouts and styles are shared."""
    for child in widget.children if isinstance(widget, Box) else ():
        yield from tree(child)
    yield widget


def close_tree(widget: Widget) -> None:
    """Close a widget and all that is in it; ipywidgets itself closes no children."""
    for one in tuple(tree(widget)):
        Widget.close(one)
        vars(one).pop("_repr_mimebundle_", None)  # ipywidgets 8 puts None there, and the static form would be gone.
