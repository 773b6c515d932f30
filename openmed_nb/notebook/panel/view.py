"""The panel as widgets: a view of a PanelModel that changes by trait updates only, made of core widgets.

Importing this file imports ipywidgets; so it is imported only when a panel is opened where a kernel can show it. Outputs
that are cleared or updated cannot be followed by nbval, so there is no Output widget, and nothing is displayed twice.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING, Any

from ipywidgets import HTML, Box, Button, Checkbox, HBox, Textarea, VBox, Widget
from traitlets import Unicode

from ...display import Report, StaticForm
from . import rendering
from .model import PROMPT_SECONDS, REFRESH_SECONDS, PanelModel
from .state import PanelState

if TYPE_CHECKING:
    from ...annotation.results import AnnotatedText


# A synthetic sentence to try.
SENTENCE = "The patient has type 2 diabetes mellitus and hypertension, and no asthma."

# Gets the region and the control of each click, before its verb is called.
Clicked = Callable[["Region", Widget], None]


class Region(VBox):
    """A part of the panel: a heading, what it shows, its controls, and what came of the last click on one of them."""

    def __init__(  # noqa: PLR0913 - each is one part of a region
        self,
        name: str,
        clicked: Clicked,
        *,
        above: Iterable[Widget] = (),
        controls: Iterable[Widget] = (),
        below: Iterable[Widget] = (),
        wide: bool = True,
    ) -> None:
        self.clicked = clicked
        self.activity, self.message = HTML(), HTML()
        self.controls = HBox([*controls, self.activity])
        self.controls.add_class("openmed-controls")
        super().__init__([HTML(rendering.heading(name)), *above, self.controls, self.message, *below])
        self.add_class("openmed-region")
        if wide:
            self.add_class("openmed-wide")

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
        raise NotImplementedError

    def tell(self, state: PanelState | None) -> None:
        """Show what is under way and what came of the last click, or nothing of both."""
        self.activity.value = rendering.activity(state) if state else ""
        self.message.value = rendering.message(state) if state else ""

    def ask(self, control: Widget, verb: Callable[[], None]) -> None:
        self.clicked(self, control)
        verb()

    def button(self, description: str, hover: str, verb: Callable[[], None]) -> Button:
        made = Button(description=description, tooltip=hover)
        made.on_click(lambda control: self.ask(control, verb))
        return made


class NamedControls(HBox):
    """Controls that come and go by name; one whose name stays is not made again."""

    def __init__(self, make: Callable[[str], Widget]) -> None:
        self.make = make
        self.named: dict[str, Widget] = {}
        super().__init__()
        self.add_class("openmed-controls")

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

    def __init__(self, model: PanelModel, clicked: Clicked) -> None:
        self.model = model
        self.status, self.table = HTML(), HTML()
        self.device_buttons = NamedControls(self._device_button)
        reset = self.button("Reset", "Back to what the shell said.", model.reset)
        super().__init__(
            "Device", clicked, above=[self.status], controls=[self.device_buttons, reset], below=[self.table]
        )

    @property
    def neighbour(self) -> Widget | None:
        in_force = [one.device for one in self.model.state.buttons if one.in_force]
        return self.device_buttons.named[in_force[0] if in_force else "auto"]

    def paint(self, state: PanelState) -> None:
        self.status.value = rendering.status(state)
        self.table.value = rendering.devices(state)
        self.device_buttons.keep(tuple(one.device for one in state.buttons))
        for one in state.buttons:
            button = self.device_buttons.named[one.device]
            button.description, button.tooltip, button.disabled = one.label, one.hover, not one.enabled
            (button.add_class if one.in_force else button.remove_class)("openmed-in-force")
            (button.add_class if one.pressed else button.remove_class)("mod-active")

    def _device_button(self, device: str) -> Button:
        """Return the button of a device; it looks pressed by the class that a ToggleButton has.

        A real ToggleButton sends its new value, which is not a change, and so not a click, if it was painted meanwhile.
        """
        return self.button(device, "", lambda: self.model.choose(device))


class EnvironmentRegion(Region):
    """The variables, who set them, and whether they are in force."""

    def __init__(self, _model: PanelModel, clicked: Clicked) -> None:
        self.table = HTML()
        super().__init__("Environment", clicked, below=[self.table])

    def paint(self, state: PanelState) -> None:
        self.table.value = rendering.environment(state)


class MemoryRegion(Region):
    def __init__(self, model: PanelModel, clicked: Clicked) -> None:
        self.model = model
        self.bars = HTML()
        refresh = self.button("Refresh", "Look at everything again.", model.refresh)
        release = self.button(
            "Release memory", "Forget models, outputs and the last error, as the magic does.", model.release
        )
        self.automatic = Checkbox(
            description=f"Refresh every {REFRESH_SECONDS:g} seconds", indent=False, disabled=not model.cells.has_loop
        )
        self.automatic.observe(self._switched, "value")
        super().__init__("Memory", clicked, above=[self.bars], controls=[refresh, release, self.automatic], wide=False)

    def paint(self, state: PanelState) -> None:
        """Show the memory, and whether it is looked at by itself; while a click waits the box stays as it was clicked."""
        self.bars.value = rendering.memory(state)
        if not state.waiting:
            self.automatic.value = state.refreshes

    def _switched(self, change: Any) -> None:
        if change["new"] != self.model.state.refreshes:
            self.ask(self.automatic, lambda: self.model.refresh_automatically(change["new"]))


class ModelsRegion(Region):
    """What is loaded, with a button for each name to unload it."""

    def __init__(self, model: PanelModel, clicked: Clicked) -> None:
        self.table = HTML()
        self.unloads = NamedControls(
            lambda name: self.button(
                f"Unload {name}", "Forget it, and hand its memory back.", lambda: model.unload(name)
            )
        )
        super().__init__("Models", clicked, above=[self.table], controls=[self.unloads], wide=False)

    @property
    def neighbour(self) -> Widget | None:
        return next(iter(self.unloads.children), None)

    def paint(self, state: PanelState) -> None:
        self.table.value = rendering.models(state)
        self.unloads.keep(state.models.names)


class TextBox(Textarea):
    """A box for a text, whose value is not sent back: half of an emoji, as a cut leaves it, could not be, and would be lost."""

    value = Unicode().tag(sync=True, echo_update=False)


class TryRegion(Region):
    """A text, and what a model finds in it."""

    def __init__(self, model: PanelModel, clicked: Clicked) -> None:
        self.text = TextBox(SENTENCE, description="Text to annotate", rows=3, continuous_update=False)
        self.answer = HTML()
        self._shown: AnnotatedText | None = None
        annotate = self.button(
            "Annotate",
            "Find entities in the text, which stays in this kernel.",
            lambda: model.annotate_soon(lambda: self.text.value),
        )
        super().__init__("Try it", clicked, above=[self.text], controls=[annotate], below=[self.answer])

    def paint(self, state: PanelState) -> None:
        """Show what was found; a long answer is made into HTML once."""
        if state.answer is not self._shown:
            self._shown = state.answer
            self.answer.value = rendering.answer(state)


# The regions, from the top.
REGIONS = (DeviceRegion, EnvironmentRegion, MemoryRegion, ModelsRegion, TryRegion)


class PanelView(StaticForm, VBox):
    """The panel: device, environment, memory, models, and a text to try; every click calls one verb of its model.

    Where there is no widget, as in a saved notebook, it shows the state of the moment in which it was displayed, with
    what to type; never the text that was annotated.
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
        return self.model.state.marked()

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


def tree(widget: Widget) -> Iterator[Widget]:
    if isinstance(widget, Box):
        for child in widget.children:
            yield from tree(child)
    yield from (getattr(widget, name) for name in ("layout", "style") if hasattr(widget, name))
    yield widget


def close_tree(widget: Widget) -> None:
    """Close a widget and all that is in it; ipywidgets itself closes neither children nor layouts nor styles."""
    for one in tuple(tree(widget)):
        Widget.close(one)
        vars(one).pop("_repr_mimebundle_", None)  # ipywidgets 8 puts None there, and the static form would be gone.
