"""The panel as core widgets: a view of a :class:`PanelModel` that changes through trait updates only.

This module imports ipywidgets, so it is imported only when a kernel opens a panel. nbval does not support outputs that are
cleared or updated, so there is no Output widget and nothing is displayed twice.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from anywidget import AnyWidget
from ipywidgets import HTML, Box, Button, HBox, Textarea, VBox, Widget
from traitlets import Int, Unicode, dlink

from ..._render.display import (
    SIMULATED_SUFFIX,
    SIMULATION_NOTICE,
    Report,
    StaticReprMixin,
    Table,
    escape,
    escape_quantities,
    pluralize,
    to_html,
)
from ...annotation.results import AnnotatedText
from ...devices.choice import GPU_QUESTION
from ...devices.machine import is_marked_simulated
from .model import PanelModel
from .state import MEMORY_COLUMNS, PanelState

WidgetT = TypeVar("WidgetT")

# A synthetic example.
EXAMPLE_TEXT = "The patient has type 2 diabetes mellitus and hypertension, but no asthma."

# CSS class of the button that Ctrl+Enter clicks.
ANNOTATE_CLASS = "openmed-annotate"

# Displayed with the static form in a saved notebook.
RERUN_NOTICE = "Saved output. Run this cell to get an interactive panel."


# The following functions render each region as HTML: pure functions of a PanelState that escape all external text.

STYLE_SHEET = Path(__file__).with_name("panel.css").read_text("utf-8").partition("*/\n")[2]
# The style sheet, which the panel contains once.
STYLES = f"<style>\n{STYLE_SHEET}</style>"

CLICK_PENDING_NOTICE = "Waiting for the running cell to finish."

# Every panel contains this text. The style sheet shows only it when the front end marks the kernel as disconnected.
STALE_PANEL_HTML = '<p role="alert">The kernel was restarted; this panel is no longer connected. <strong>Run this cell again.</strong></p>'


def render_status(state: PanelState) -> str:
    """Render the active device, emphasized, and the reason; a screen reader announces a change."""
    headline, *details = state.status
    first = escape(headline)
    if state.choice is not None:
        device = f"{state.choice.device}{SIMULATED_SUFFIX if state.choice.simulated else ''}"
        reason = headline.removeprefix("Device: ").removeprefix(device)
        first = f"<strong>{escape(device)}</strong>{escape(reason)}"
    notices = (SIMULATION_NOTICE,) if state.simulated else ()
    content = _block(f'<p class="openmed-first">{first}</p>', _paragraphs((*details, *notices)))
    return f'<div role="status">{content}</div>'


def render_devices(state: PanelState) -> str:
    """Render a collapsed table of the devices; without MPS hardware, its variables are there too."""
    table = replace(state.devices.to_report().tables[0], caption="Devices")
    environment_tables = () if state.devices.has_mps else state.environment_tables
    return _details(GPU_QUESTION if state.devices.unavailable else "All devices", table, *environment_tables)


def render_environment(state: PanelState) -> str:
    """Render the tables of the variables, collapsed unless a variable has a suggested action; nothing without MPS."""
    if not state.devices.has_mps:
        return ""
    settings = state.explanation.environment.settings
    counts = Counter(setting.effect for setting in settings)
    effects = ", ".join(f"{count} {effect}" for effect, count in counts.items())
    has_remedy = any(setting.remedy for setting in settings)
    return _details(f"MPS variables: {effects}", *state.environment_tables, opened=has_remedy)


def render_memory(state: PanelState) -> str:
    """Render the memory in use, and the limit with a bar.

    Each kind of memory has the same pattern in the legend and in the bar. Screen readers skip the bar, because the text
    has the same values.
    """
    head = "".join(f'<th scope="col">{escape(column)}</th>' for column in MEMORY_COLUMNS)
    rows = ""
    for bar in state.memory:
        legend = []
        stripes = ""
        for index, part in enumerate(bar.parts):
            swatch = f'<span class="openmed-swatch openmed-part-{index}" aria-hidden="true"></span>'
            legend.append(f'<span class="openmed-used">{swatch}{escape_quantities(str(part))}</span>')
            fraction = min(1, part.size / bar.limit) if bar.limit else 0
            stripes += f'<div class="openmed-part-{index}" style="width:{fraction:.2%}"></div>'
        used = " ".join(legend)
        limit = f'{escape_quantities(bar.row[2])}<div class="openmed-bar" aria-hidden="true">{stripes}</div>'
        rows += f'<tr><th scope="row">{escape(bar.name)}</th><td>{used}</td><td>{limit}</td></tr>'
    title = '<caption class="openmed-unseen">Memory in use</caption>'
    table = f"<table>{title}<thead><tr>{head}</tr></thead><tbody>{rows}</tbody></table>"
    return _block(f'<div class="openmed-memories">{table}</div>')


def render_models(state: PanelState) -> str:
    """Render a collapsed table of the loaded models."""
    if not state.models:
        return _block(_paragraphs(['No models are loaded. Click "Annotate" to load one.']))
    summary = f"{pluralize(len(state.models), 'model')} loaded: {', '.join(state.models.names)}"
    return _details(summary, replace(state.models.table(), caption="Loaded models"))


def render_activity(state: PanelState) -> str:
    """Render the operation in progress with a spinner, or a click that waits; empty if there is neither."""
    if state.pending_clicks:
        return f'<div role="status" class="openmed-activity openmed-late">{CLICK_PENDING_NOTICE}</div>'
    if state.activity is None:
        return ""
    spinner = '<span class="openmed-spinner" aria-hidden="true"></span>'
    return f'<div role="status" class="openmed-activity">{spinner}<span>{escape(state.activity)}</span></div>'


def render_message(state: PanelState) -> str:
    """Render the error of the last click with its remedy, or its result; empty if it has neither."""
    if state.error is not None:
        problem = f"<p><strong>Error:</strong> {escape(state.error.message)}</p>"
        remedy = f"<p><strong>Suggested action:</strong> {escape(state.error.remedy)}</p>"
        return f'<div role="alert" class="openmed-error">{_block(problem, remedy)}</div>'
    if state.result is None:
        return ""
    return f'<div role="status" class="openmed-result">{to_html(state.result)}</div>'


def render_annotation(state: PanelState) -> str:
    """Render the last annotated text in a box that the keyboard can scroll; empty if no text was annotated."""
    if state.annotation is None:
        return ""
    report = state.annotation.to_report()
    if is_marked_simulated(state.annotation.device):
        report = replace(report, sentences=(SIMULATION_NOTICE, *report.sentences))
    box = '<div class="openmed-answer" role="region" aria-label="Annotated text" tabindex="0">'
    return f'<div role="status">{box}{to_html(report)}</div></div>'


def _details(summary: str, *tables: Table, opened: bool = False) -> str:
    content = to_html(Report("", tables=tables))
    return _block(f"<details{' open' if opened else ''}><summary>{escape(summary)}</summary>{content}</details>")


def _block(*parts: str) -> str:
    return f'<div class="openmed-nb tex2jax_ignore">{"".join(parts)}</div>'


def _paragraphs(sentences: Iterable[str]) -> str:
    return "".join(f"<p>{escape(sentence)}</p>" for sentence in sentences)


# The renderer of the content below the heading of a region.
CONTENT_RENDERERS = {
    "Device": render_status,
    "Memory": render_memory,
    "Models": render_models,
    "Environment": render_environment,
}


def render_top(name: str, state: PanelState) -> str:
    """Render the heading of a region and its content."""
    render = CONTENT_RENDERERS.get(name)
    content = render(state) if render else ""
    return f'<h2 class="openmed-heading">{escape(name)}</h2>{content}' if content or not render else ""


class TextBox(Textarea):
    """A text box whose value is not echoed to the front end.

    A truncated emoji is an unpaired surrogate, which cannot be sent back and would be lost.
    """

    value = Unicode().tag(sync=True, echo_update=False)


class Shortcut(AnyWidget):
    """An invisible widget: Ctrl+Enter or Cmd+Enter in the text box of its panel clicks the button of a CSS class.

    It also shows a notice next to a button whose click the kernel has not received, which a running cell can delay until its end.
    The listeners are on the window, because JupyterLab handles Ctrl+Enter on the document, where it runs the cell. They have to be
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
      const notice = document.createElement("span");
      notice.className = "openmed-activity";
      notice.role = "status";
      let timer;
      function onClick({ target }) {
        const controls = target.closest(".jupyter-button")?.closest(".openmed-controls");
        if (!controls || !el.closest(".openmed-panel")?.contains(controls)) return;
        clearTimeout(timer);
        notice.textContent = "";
        controls.append(notice);
        timer = setTimeout(() => { notice.textContent = model.get("notice"); }, 400);
      }
      model.on("change:num_clicks", () => {
        clearTimeout(timer);
        notice.remove();
      });
      window.addEventListener("keydown", onKeyDown, true);
      window.addEventListener("click", onClick, true);
      return () => {
        clearTimeout(timer);
        window.removeEventListener("keydown", onKeyDown, true);
        window.removeEventListener("click", onClick, true);
      };
    }
    export default { render };
    """

    button = Unicode().tag(sync=True)
    notice = Unicode(CLICK_PENDING_NOTICE).tag(sync=True)
    num_clicks = Int().tag(sync=True)


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


class PanelView(StaticReprMixin, VBox):
    """The panel: device, memory, an example text, models and environment. Each click calls one operation of its model.

    Without widgets, for example in a saved notebook, it shows the state at the time of display and the equivalent
    commands, but never the annotated text.
    """

    model: PanelModel

    def __init__(self, model: PanelModel) -> None:
        self.model = model
        self.styles: dict[Callable[..., object], Widget] = {}
        self._displayed: AnnotatedText | None = None
        super().__init__(_dom_classes=("openmed-panel",))
        self.device_buttons: dict[str, Button] = {}
        self.devices = self._make(HBox, name="named")
        self.table = self._make(HTML)
        reset = self._button("Reset", "Undo your choice of device.", model.reset)
        refresh = self._button("Refresh", "Refresh the panel.", model.refresh)
        tooltip = "Release memory held by models, outputs and the last error."
        release = self._button("Release memory", tooltip, model.release)
        self.text = self._make(TextBox, EXAMPLE_TEXT, description="Text to annotate (Ctrl+Enter)", rows=2)
        tooltip = (
            "Find the entities in the text (Ctrl+Enter or Cmd+Enter in the text box). "
            "Only the computer that runs this notebook receives the text."
        )
        self.annotate = self._button("Annotate", tooltip, partial(model.annotate_deferred, lambda: self.text.value))
        self.annotate.add_class(ANNOTATE_CLASS)
        # Hidden in a box, because a front end without anywidget displays an error in place of the shortcut.
        self._shortcut = self._make(Shortcut, button=ANNOTATE_CLASS)
        shortcut = self._make(HBox, [self._shortcut], name="shortcut")
        self.annotation = self._make(HTML)
        self.regions = (
            Region("Device", self._make, [self.devices, reset], after=[self.table]),
            Region("Memory", self._make, [refresh, release]),
            Region("Try it", self._make, [self.annotate], before=[self.text, shortcut], after=[self.annotation]),
            Region("Models", self._make),
            Region("Environment", self._make),
        )
        self._region = self.regions[0]
        for region in self.regions:
            dlink((model, "state"), (region.top, "value"), partial(render_top, region.name))
        dlink((model, "state"), (self.table, "value"), render_devices)
        self.children = (self._make(HTML, STYLES + STALE_PANEL_HTML, name="gone"), *self.regions)
        self._show_state()
        model.observe(self._show_state, "state")
        self.text.observe(self._show_annotation, "value")

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
        self._shortcut.num_clicks += 1
        self._region = next(region for region in self.regions if control in iter_widgets(region))
        operation()

    def _show_state(self, _change: object = None) -> None:
        """Update the controls to the state of the model, and show the result of the last click in its region."""
        state = self.model.state
        names = [button.device for button in state.buttons]
        if names != list(self.device_buttons):  # torch has counted the GPUs.
            previous = self.device_buttons
            self.device_buttons = {
                name: previous.pop(name, None) or self._button(name, "", partial(self.model.use_device, name))
                for name in names
            }
            self.devices.children = tuple(self.device_buttons.values())
            for button in previous.values():
                _close_tree(button)
        for device_button in state.buttons:
            button = self.device_buttons[device_button.device]
            button.description = device_button.label
            button.tooltip = device_button.tooltip
            button.disabled = not device_button.enabled
            # The class of a ToggleButton makes it look pressed. A real ToggleButton sends its new value, which is not a
            # change, and therefore not a click, if the panel was updated in the meantime.
            if device_button.pressed:
                button.add_class("mod-active")
            else:
                button.remove_class("mod-active")
        self._show_annotation()
        for region in self.regions:
            clicked = region is self._region
            region.activity.value = render_activity(state) if clicked else ""
            region.message.value = render_message(state) if clicked else ""

    def _show_annotation(self, _change: object = None) -> None:
        """Show the annotation of the text in the box, or nothing if it is of another text; render it only if it changed."""
        state = self.model.state
        is_current = state.annotation is not None and state.annotation.text == self.text.value
        displayed = state.annotation if is_current else None
        if displayed is not self._displayed:
            self._displayed = displayed
            self.annotation.value = render_annotation(state) if is_current else ""


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
