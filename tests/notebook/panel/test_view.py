"""Tests of the widgets of the panel: structure, static forms and closing."""

import json
from dataclasses import replace

import ipywidgets
import pytest

from helpers import simulated_computers as computers
from helpers.processes import run_python
from openmed_nb._render.display import WIDGET_MIME_TYPE, to_html
from openmed_nb.notebook.panel.view import RERUN_NOTICE, Shortcut, iter_widgets, render_top

NAMES = ("Device", "Memory", "Try it", "Models", "Environment")
REPR = "openmed_nb panel. To see the device as text, run %openmed_device."
CORE = {"@jupyter-widgets/base", "@jupyter-widgets/controls"}


def test_panel_has_regions_and_one_style_sheet(open_panel):
    view = open_panel()
    assert [region.name for region in view.regions] == list(NAMES)
    assert all(region.top.value == render_top(region.name, view.model.state) for region in view.regions)
    assert sum("<style>" in widget.value for widget in iter_widgets(view) if isinstance(widget, ipywidgets.HTML)) == 1


def test_panel_has_only_core_widgets_with_shared_layout_and_styles(open_panel):
    """Every front end supports the core widgets; nbval does not support an Output."""
    view = open_panel()
    widgets = [*iter_widgets(view), view.layout, *view.styles.values()]
    assert all(widget.layout is view.layout for widget in iter_widgets(view))
    assert all(widget.style is view.styles[type(widget)] for widget in iter_widgets(view) if hasattr(widget, "style"))
    widgets = [widget for widget in widgets if not isinstance(widget, Shortcut)]  # A widget of anywidget.
    assert {widget._model_module for widget in widgets} == CORE
    assert {widget._model_name.removesuffix("Model") for widget in widgets} <= set(dir(ipywidgets)) | {
        "HTMLStyle",
        "TextStyle",
        "ButtonStyle",
        "DescriptionStyle",
    }
    assert not [widget for widget in widgets if isinstance(widget, ipywidgets.Output)]


def test_controls_have_descriptions_and_tooltips(open_panel):
    widgets = list(iter_widgets(open_panel(computers.plain().session)))
    controls = [widget for widget in widgets if hasattr(widget, "disabled")]
    assert [control.description for control in controls] == [
        "auto ✓",
        "cpu",
        "Reset",
        "Refresh",
        "Release memory",
        "Text to annotate (Ctrl+Enter)",
        "Annotate",
    ]
    buttons = [control for control in controls if isinstance(control, ipywidgets.Button)]
    assert all(button.tooltip.endswith(".") for button in buttons)


def test_equal_state_changes_only_memory_trait(open_panel):
    view = open_panel(computers.plain().session)
    changes = []
    bars = view.region("Memory").top
    for widget in iter_widgets(view):
        widget.observe(lambda change: changes.append(change["owner"]), ["value", "children", "description", "disabled"])
    view.model.on_cell_end()
    assert {id(owner) for owner in changes} <= {id(bars)}


def test_panel_has_live_html_and_text_forms(open_panel):
    """The HTML form is a snapshot, and the text form is constant."""
    view = open_panel(computers.plain().session)
    first = view._repr_mimebundle_(include=None, exclude=None)
    view.device_buttons["cpu"].click()
    second = view._repr_mimebundle_()

    assert list(first) == [WIDGET_MIME_TYPE, "text/html", "text/plain"]
    assert (
        first[WIDGET_MIME_TYPE]
        == second[WIDGET_MIME_TYPE]
        == {"version_major": 2, "version_minor": 0, "model_id": view.model_id}
    )
    assert first["text/plain"] == second["text/plain"] == repr(view) == str(view) == REPR
    assert "Device: cpu" in first["text/html"]
    assert "the panel" in second["text/html"] == to_html(replace(view.model.state, notice=RERUN_NOTICE).final_report())
    assert "Run this cell" in first["text/html"]
    assert "%openmed_device --reset" in first["text/html"]
    assert view._ipython_display_ is None


def test_closed_panel_has_only_static_forms(open_panel):
    view = open_panel()
    view.close()
    assert list(view._repr_mimebundle_()) == ["text/html", "text/plain"]


@pytest.mark.usefixtures("clean")
def test_saved_forms_contain_no_typed_or_annotated_text(open_panel):
    view = open_panel(model="bundled_small")
    view.text.value = "Mrs Miller has leprosy."
    view.click("Annotate")
    assert "leprosy" in view.annotation.value
    bundle = json.dumps(view._repr_mimebundle_())

    assert "leprosy" not in bundle
    assert "Miller" not in bundle
    assert "asthma" not in bundle


KERNEL_COUNTS = (
    "(lambda w, c, s, o: (len(w), len(c), len(s), len(o), [len(v) for v in get_ipython().events.callbacks.values()]))("
    "__import__('ipywidgets').widgets.widget._instances, __import__('comm').get_comm_manager().comms,"
    "__import__('openmed_nb.session', fromlist=['']).SESSION._listeners,"
    "__import__('openmed_nb.notebook.panel', fromlist=['']).OPEN_PANELS)"
)
"""An expression for everything that panels could leak: widgets, comms, listeners, open panels and IPython callbacks."""

OPENING = """
import sys
from openmed_nb.notebook.panel.model import PanelModel
from openmed_nb.notebook.panel.view import PanelView
from openmed_nb.session import SESSION
view = PanelView(PanelModel(SESSION))
view._repr_mimebundle_()
view.close()
print([name for name in ("torch", "transformers") if name in sys.modules])
"""


@pytest.mark.timeout(1200)
@pytest.mark.parametrize("count", [10, pytest.param(200, marks=pytest.mark.slow)])
def test_closed_panels_leak_nothing_in_kernel(kernel, count):
    kernel.run("import gc\nimport openmed_nb as nb\nnb.panel().close()\ngc.collect()")
    before = kernel.value(KERNEL_COUNTS)
    # One panel per cell, because a kernel drops messages that are more than 1,000 ahead of the reader. A panel sends 250.
    for _number in range(count):
        assert kernel.run("nb.panel().close()").status == "ok"
    kernel.run("gc.collect()")
    assert kernel.value(KERNEL_COUNTS) == before


@pytest.mark.real_computer  # It starts a process of its own.
def test_opening_panel_does_not_import_torch():
    assert run_python("-c", OPENING).stdout == "[]\n"


def test_unpaired_surrogate_arrives_and_is_rejected(kernel):
    """The text box cannot echo such a text to the front end."""
    kernel.run("import openmed_nb as nb\npanel = nb.panel('bundled_small')\nbox = panel.text")
    reply = kernel.run(r"box.set_state({'value': 'Tom has diabetes \ud83d'}); panel.model.annotate(box.value)")
    assert reply.status == "ok"
    assert kernel.value("type(panel.model.state.error).__name__") == "InvalidTextError"
    assert kernel.value("panel.model.state.annotation") is None
    kernel.run("panel.close()")
