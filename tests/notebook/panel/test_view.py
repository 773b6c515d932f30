"""The panel's widgets: what it is made of, its forms without widgets, and its end, which leaves nothing."""

import json
import subprocess
import sys
from dataclasses import replace

import ipywidgets
import pytest

from openmed_nb._render.display import VIEW, to_html
from openmed_nb.notebook.panel import rendering
from openmed_nb.notebook.panel.view import RERUN_NOTICE, iter_widgets

NAMES = ("Device", "Memory", "Try it", "Models", "Environment")
REPR = "The openmed_nb panel; %openmed_device does the same by typing"
CORE = {"@jupyter-widgets/base", "@jupyter-widgets/controls"}


def test_widgets_regions(open_panel):
    """Five regions stand below one another, each with its heading, and the style sheets stand there once."""
    view = open_panel()
    assert [one.name for one in view.regions] == list(NAMES)
    assert all(one.top.value == (rendering.top(one.name, view.model.state)) for one in view.regions)
    assert sum("<style>" in one.value for one in iter_widgets(view) if isinstance(one, ipywidgets.HTML)) == 1


def test_widgets_core_widgets_only(open_panel):
    """Every widget is one of the core, which every front end has; none is an Output. They share a layout and styles."""
    view = open_panel()
    widgets = [*iter_widgets(view), view.layout, *view.styles.values()]
    assert all(one.layout is view.layout for one in iter_widgets(view))
    assert all(one.style is view.styles[type(one)] for one in iter_widgets(view) if hasattr(one, "style"))
    assert {one._model_module for one in widgets} == CORE
    assert {one._model_name.removesuffix("Model") for one in widgets} <= set(dir(ipywidgets)) | {
        *("HTMLStyle", "ToggleButtonStyle", "CheckboxStyle", "TextStyle", "ButtonStyle", "DescriptionStyle")
    }
    assert not [one for one in widgets if isinstance(one, ipywidgets.Output)]


def test_widgets_controls_have_names(open_panel, computers):
    """Every control has a name that is read aloud, and every button says more to the mouse."""
    widgets = list(iter_widgets(open_panel(computers.plain().session)))
    controls = [one for one in widgets if hasattr(one, "disabled")]
    assert [one.description for one in controls] == [
        *("auto ✓", "mps", "cuda", "cpu", "Reset"),
        *("Refresh", "Release memory", "Refresh every 2 seconds", "Text to annotate", "Annotate"),
    ]
    buttons = [one for one in controls if isinstance(one, (ipywidgets.Button, ipywidgets.ToggleButton))]
    assert all(one.tooltip.endswith(".") for one in buttons)


def test_widgets_nothing_is_sent_for_what_stays(open_panel, computers):
    """A state that is like the one before changes no trait but the memory's figures."""
    view = open_panel(computers.plain().session)
    changes = []
    bars = view.region("Memory").top
    for one in iter_widgets(view):
        one.observe(lambda change: changes.append(change["owner"]), ["value", "children", "description", "disabled"])
    view.model.on_cell_end()
    assert {id(one) for one in changes} <= {id(bars)}


def test_forms_three_forms(open_panel, computers):
    """A panel has a live form, an HTML form of the moment in which it is shown, and a text form that stays."""
    view = open_panel(computers.plain().session)
    first = view._repr_mimebundle_(include=None, exclude=None)
    view.device_buttons["cpu"].click()
    second = view._repr_mimebundle_()

    assert list(first) == [VIEW, "text/html", "text/plain"]
    assert first[VIEW] == second[VIEW] == {"version_major": 2, "version_minor": 0, "model_id": view.model_id}
    assert first["text/plain"] == second["text/plain"] == repr(view) == str(view) == REPR
    assert "Device: cpu, chosen automatically: this computer has no GPU" in first["text/html"]
    shown = replace(view.model.state, notice=RERUN_NOTICE).final_report()
    assert "Device: cpu, asked for by the panel" in second["text/html"] == to_html(shown)
    assert "run this cell again" in first["text/html"]
    assert "%openmed_device --reset" in first["text/html"]
    assert view._ipython_display_ is None


def test_forms_a_closed_panel(open_panel):
    """A panel that is closed shows its static form, and no widget that is gone."""
    view = open_panel()
    view.close()
    assert list(view._repr_mimebundle_()) == ["text/html", "text/plain"]


@pytest.mark.usefixtures("clean")
def test_forms_no_text_of_a_person(open_panel):
    """Nothing that was typed or annotated is in the forms that are saved with the notebook."""
    view = open_panel(model="bundled_small")
    view.text.value = "Mrs Miller has leprosy."
    view.click("Annotate")
    assert "leprosy" in view.answer.value
    bundle = json.dumps(view._repr_mimebundle_())

    assert "leprosy" not in bundle
    assert "Miller" not in bundle
    assert "asthma" not in bundle


def test_refresh_without_a_loop(open_panel):
    """Where there is no event loop, as here, it cannot be switched on."""
    box = open_panel().automatic
    assert (box.disabled, box.value) == (True, False)


def test_refresh_in_a_kernel(kernel):
    """Where it is switched on, the panel is painted again and again, in the thread of the cells, until it is off."""
    kernel.run(
        "import asyncio, threading\nimport openmed_nb as nb\npanel, seen = nb.panel(), []\n"
        "where = lambda _: seen.append(threading.current_thread().name)\n"
    )
    assert kernel.value("(panel.automatic.disabled, panel.model.state.auto_refresh)") == (False, False)
    kernel.run("panel.automatic.value = True")
    assert kernel.value("panel.model.state.auto_refresh") is True
    reply = kernel.run("panel.model.observe(where, 'state')\nwhile not seen:\n    await asyncio.sleep(0.02)\n")
    assert reply.status == "ok"
    assert set(kernel.value("seen")) == {"MainThread"}
    kernel.run("panel.automatic.value = False")
    assert kernel.value("panel.model.state.auto_refresh") is False
    kernel.run("panel.automatic.value = True\npanel.close()")
    assert kernel.value("panel.model.state.auto_refresh") is False


KERNEL_COUNTS = (
    "(lambda w, c, s, o: (len(w), len(c), len(s), len(o), [len(v) for v in get_ipython().events.callbacks.values()]))("
    "__import__('ipywidgets').widgets.widget._instances, __import__('comm').get_comm_manager().comms,"
    "__import__('openmed_nb.session', fromlist=['']).SESSION._listeners,"
    "__import__('openmed_nb.notebook.panel', fromlist=['']).OPEN_PANELS)"
)
"""An expression for what panels could leave: widgets, comms, listeners, open panels, callbacks of IPython."""

OPENING = """
import sys
from openmed_nb.notebook.panel.model import PanelModel
from openmed_nb.notebook.panel.view import PanelView
from openmed_nb.session import SESSION
view = PanelView(PanelModel(SESSION))
view._repr_mimebundle_()
view.close()
print([name for name in ("torch", "transformers", "matplotlib") if name in sys.modules])
"""


@pytest.mark.timeout(1200)
@pytest.mark.parametrize("count", [10, pytest.param(200, marks=pytest.mark.slow)])
def test_closing_many_panels_in_a_kernel(kernel, count):
    """In a kernel, too, they leave no widget, comm, listener or callback."""
    kernel.run("import gc\nimport openmed_nb as nb\nnb.panel().close()\ngc.collect()")
    before = kernel.value(KERNEL_COUNTS)
    # One in a cell: a kernel drops what is more than a thousand messages ahead of its reader, and a panel sends 250.
    for _number in range(count):
        assert kernel.run("nb.panel().close()").status == "ok"
    kernel.run("gc.collect()")
    assert kernel.value(KERNEL_COUNTS) == before


@pytest.mark.real_computer  # It starts a process of its own.
def test_closing_opening_loads_no_torch():
    """Opening a panel imports neither torch nor transformers."""
    process = subprocess.run([sys.executable, "-c", OPENING], capture_output=True, text=True, check=True, timeout=60)
    assert process.stdout == "[]\n"


def test_half_an_emoji_arrives(kernel):
    """A text that cannot be sent back, such as half of an emoji, arrives, and is refused with a reason."""
    kernel.run("import openmed_nb as nb\npanel = nb.panel('bundled_small')\nbox = panel.text")
    reply = kernel.run(r"box.set_state({'value': 'Tom has diabetes \ud83d'}); panel.model.annotate(box.value)")
    assert reply.status == "ok"
    assert kernel.value("type(panel.model.state.error).__name__") == "InvalidTextError"
    assert kernel.value("panel.model.state.annotation") is None
    kernel.run("panel.close()")
