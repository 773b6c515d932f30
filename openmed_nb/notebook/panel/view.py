"""The panel as core widgets: a view of a :class:`PanelModel` that changes through trait updates only.

This module imports ipywidgets, so it is imported only when a kernel opens a panel. nbval does not support outputs that are
cleared or updated, so there is no Output widget and nothing is displayed twice.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from functools import partial
from typing import Any, TypeVar

from anywidget import AnyWidget
from ipywidgets import HTML, Box, Button, Checkbox, HBox, Textarea, VBox, Widget
from traitlets import Unicode, dlink

from ..._render.display import Report, StaticReprMixin
from ...annotation.results import AnnotatedText
from . import rendering
from .model import IMMEDIATE_SECONDS, REFRESH_SECONDS, PanelModel

WidgetT = TypeVar("WidgetT")

# A synthetic example.
EXAMPLE_TEXT = "The patient has type 2 diabetes mellitus and hypertension, but no asthma."

# CSS class of the button that Ctrl+Enter clicks.
ANNOTATE_CLASS = "openmed-annotate"

# Displayed with the static form in a saved notebook.
RERUN_NOTICE = "Saved output. Run this cell to get an interactive panel."


class TextBox(Textarea):
    """A text box whose value is not echoed to the front end.

    A truncated emoji is an unpaired surrogate, which cannot be sent back and would be lost.
    """

    value = Unicode().tag(sync=True, echo_update=False)


class Shortcut(AnyWidget):
    """An invisible widget: Ctrl+Enter or Cmd+Enter in the text box of its panel clicks the button of a CSS class.

    The listener is on the window, because JupyterLab handles Ctrl+Enter on the document, where it runs the cell. It has to be
    removed with the view.
    """

    _esm = """
    function render({ el, model }) {
      function onKeyDown(event) {
        const panel = el.closest(".openmed-panel");
        const isShortcut = event.key === "Enter" && (event.ctrlKey || event.metaKey) && !event.isComposing;
        if (!isShortcut || !panel?.contains(event.target) || !event.target.matches("textarea")) return;
        event.preventDefault();
        event.stopImmediatePropagation();
        event.target.dispatchEvent(new Event("change", { bubbles: true }));
        panel.querySelector(`.${model.get("button")}`)?.click();
      }
      window.addEventListener("keydown", onKeyDown, true);
      return () => window.removeEventListener("keydown", onKeyDown, true);
    }
    export default { render };
    """

    button = Unicode().tag(sync=True)


class Region(VBox):
    """A region of the panel: heading and content, controls, progress, and the result of the last click on a control."""

    def __init__(
        self,
        name: str,
        make: Callable[..., Any],
        controls: Iterable[Widget] = (),
        before: Iterable[Widget] = (),
        after: Iterable[Widget] = (),
    ) -> None:
        self.name = name
        self.top = make(HTML)
        self.activity = make(HTML)
        self.message = make(HTML)
        self.controls = make(HBox, [*controls, self.activity], name="controls")
        children = [self.top, *before, self.controls, self.message, *after]
        classes = ("openmed-region", f"openmed-{name.lower().replace(' ', '-')}")
        super().__init__(children, layout=self.top.layout, _dom_classes=classes)


class NamedButtons(HBox):
    """A row of buttons by name; a button is reused as long as its name is displayed."""

    def __init__(self, make: Callable[[str], Button], **options: object) -> None:
        self.make = make
        self.named: dict[str, Button] = {}
        super().__init__(**options)

    def sync(self, names: tuple[str, ...]) -> bool:
        """Display a button for each name, and return whether any was added or removed."""
        if tuple(self.named) == names:
            return False
        previous = self.named
        self.named = {name: previous.pop(name, None) or self.make(name) for name in names}
        self.children = tuple(self.named.values())
        for button in previous.values():
            _close_tree(button)
        return True


class PanelView(StaticReprMixin, VBox):
    """The panel: device, memory, an example text, models and environment. Each click calls one operation of its model.

    Without widgets, for example in a saved notebook, it shows the state at the time of display and the equivalent
    commands, but never the annotated text.
    """

    model: PanelModel

    def __init__(self, model: PanelModel) -> None:
        self.model = model
        self.styles: dict[Callable[..., object], Widget] = {}
        self._clicked: Widget | None = None
        self._clicked_at = 0.0
        self._displayed: AnnotatedText | None = None
        super().__init__(_dom_classes=("openmed-panel",))
        self.devices = self._make(NamedButtons, self._device_button, name="named")
        self.table = self._make(HTML)
        reset = self._button("Reset", "Undo your choice of device.", model.reset)
        refresh = self._button("Refresh", "Refresh the panel.", model.refresh)
        tooltip = "Release memory held by models, outputs and the last error."
        release = self._button("Release memory", tooltip, model.release)
        self.automatic = self._make(
            Checkbox,
            description=f"Refresh every {REFRESH_SECONDS:g} seconds",
            indent=False,
            disabled=model.cells.loop is None,
        )
        self.text = self._make(TextBox, EXAMPLE_TEXT, description="Text to annotate (Ctrl+Enter)", rows=2)
        tooltip = (
            "Find the entities in the text (Ctrl+Enter or Cmd+Enter in the text box). "
            "Only the computer that runs this notebook receives the text."
        )
        self.annotate = self._button("Annotate", tooltip, partial(model.annotate_deferred, lambda: self.text.value))
        self.annotate.add_class(ANNOTATE_CLASS)
        # Hidden in a box, because a front end without anywidget displays an error in place of the shortcut.
        shortcut = self._make(HBox, [self._make(Shortcut, button=ANNOTATE_CLASS)], name="shortcut")
        self.annotation = self._make(HTML)
        self.models = self._make(NamedButtons, self._unload_button, name="named")
        self.regions = (
            Region("Device", self._make, [self.devices, reset], after=[self.table]),
            Region("Memory", self._make, [refresh, release, self.automatic]),
            Region("Try it", self._make, [self.annotate], before=[self.text, shortcut], after=[self.annotation]),
            Region("Models", self._make, [self.models]),
            Region("Environment", self._make),
        )
        self._region = self.regions[0]
        for region in self.regions:
            dlink((model, "state"), (region.top, "value"), partial(rendering.top, region.name))
        dlink((model, "state"), (self.table, "value"), rendering.devices)
        self.children = (self._make(HTML, rendering.STYLES + rendering.STALE_PANEL_HTML, name="gone"), *self.regions)
        self._show_state()
        model.observe(self._show_state, "state")
        self.text.observe(self._show_annotation, "value")
        self.automatic.observe(self._on_auto_refresh, "value")

    def __repr__(self) -> str:
        return "openmed_nb panel. To see the device as text, run %openmed_device."

    def report(self) -> Report:
        """Return the static form with a notice that it is saved output."""
        return replace(self.model.state, notice=RERUN_NOTICE).final_report()

    def close(self) -> None:
        """Close the panel with all widgets, layouts and styles, and disconnect it from the session."""
        self.model.close()
        _close_tree(self)
        for shared in (self.layout, *self.styles.values()):
            shared.close()

    def _make(self, kind: Callable[..., WidgetT], *arguments: object, name: str = "", **options: object) -> WidgetT:
        """Return a new widget, with the CSS class of a name.

        All widgets share one layout, and those of one kind share a style, because every widget delays the page.
        """
        if kind in self.styles:
            options["style"] = self.styles[kind]
        classes = (f"openmed-{name}",) if name else ()
        widget = kind(*arguments, layout=self.layout, _dom_classes=classes, **options)
        if hasattr(widget, "style"):
            self.styles[kind] = widget.style
        return widget

    def _button(self, description: str, tooltip: str, operation: Callable[[], None]) -> Button:
        button = self._make(Button, description=description, tooltip=tooltip)
        button.on_click(partial(self._run_click, operation))
        return button

    def _run_click(self, operation: Callable[[], None], control: Widget) -> None:
        """Run the operation of a control, and record the region of the control, which displays the result."""
        self._region = next(region for region in self.regions if control in iter_widgets(region))
        self._clicked = control if self.model.responds_immediately else None
        self._clicked_at = self.model.clock()
        operation()

    def _on_auto_refresh(self, change: Mapping[str, bool]) -> None:
        if change["new"] != self.model.state.auto_refresh:
            self._run_click(partial(self.model.set_auto_refresh, change["new"]), self.automatic)

    def _show_state(self, _change: object = None) -> None:
        """Update the controls to the state of the model, and show the result of the last click in its region."""
        state = self.model.state
        redrawn = {
            self.regions[0]: self.devices.sync(tuple(button.device for button in state.buttons)),
            self.regions[3]: self.models.sync(state.models.names),
        }
        for device_button in state.buttons:
            button = self.devices.named[device_button.device]
            button.description = device_button.label
            button.tooltip = device_button.tooltip
            button.disabled = not device_button.enabled
            # The class of a ToggleButton makes it look pressed. A real ToggleButton sends its new value, which is not a
            # change, and therefore not a click, if the panel was updated in the meantime.
            if device_button.pressed:
                button.add_class("mod-active")
            else:
                button.remove_class("mod-active")
        if not state.pending_clicks:  # A pending click must not reset the checkbox.
            self.automatic.value = state.auto_refresh
        self._show_annotation()
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
        return self._button(
            f"Unload {name}", "Unload the model and release its memory.", partial(self.model.unload, name)
        )

    def _show_annotation(self, _change: object = None) -> None:
        """Show the annotation of the text in the box, or nothing if it is of another text; render it only if it changed."""
        state = self.model.state
        is_current = state.annotation is not None and state.annotation.text == self.text.value
        displayed = state.annotation if is_current else None
        if displayed is not self._displayed:
            self._displayed = displayed
            self.annotation.value = rendering.annotation(state) if is_current else ""

    def _restore_focus(self, redrawn: bool) -> None:
        """Move the keyboard focus to the clicked control, or to its neighbor, if the browser lost the focus.

        The focus moves immediately or never. If the user types in a cell by then, the keys would act as notebook commands
        that delete the cell.
        """
        control = self._clicked
        if control is None or self.model.clock() - self._clicked_at > IMMEDIATE_SECONDS:
            self._clicked = None
        elif control.comm is None or control.disabled:
            self._clicked = None
            if self._region is self.regions[0]:
                active_devices = (button.device for button in self.model.state.buttons if button.active)
                _focus(self.devices.named[next(active_devices, "auto")])
            else:
                _focus(next(iter(self.models.children), self.annotate))
        elif redrawn:
            _focus(control)


def _focus(control: Widget) -> None:
    """Move the keyboard focus to a control, which ipywidgets 7 does not support."""
    if hasattr(control, "focus"):
        control.focus()


def iter_widgets(widget: Widget) -> Iterator[Widget]:
    """Yield the descendants of a widget and the widget itself, without the shared layouts and styles."""
    for child in widget.children if isinstance(widget, Box) else ():
        yield from iter_widgets(child)
    yield widget


def _close_tree(widget: Widget) -> None:
    """Close a widget and its descendants, which ipywidgets does not close."""
    for descendant in tuple(iter_widgets(widget)):
        Widget.close(descendant)
        vars(descendant).pop("_repr_mimebundle_", None)  # ipywidgets 8 sets it to None, which hides the static form.
