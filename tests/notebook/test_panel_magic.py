"""``%openmed_panel``: a panel in a notebook, text in a terminal, and one clear line for every mistake."""

import pytest

from openmed_nb.notebook.panel import NO_KERNEL_NOTICE
from openmed_nb.notebook.panel.state import COMMANDS

pytestmark = pytest.mark.real_computer  # The kernel and the terminal are processes of their own.

VIEW = "application/vnd.jupyter.widget-view+json"


COPY = """
import shutil
from openmed_nb.models.registry import BUNDLED
shutil.copytree(BUNDLED['bundled_small'], 'my models/mine')
"""


@pytest.fixture
def notebook(kernel):
    """A real kernel in which no panel is open before and after."""
    kernel.run("from openmed_nb.notebook.panel import OPEN_PANELS\nfrom openmed_nb.session import SESSION")
    assert kernel.value("(len(OPEN_PANELS), len(SESSION._listeners))") == (0, 0)
    yield kernel
    kernel.run("%reload_ext openmed_nb")
    assert kernel.value("(len(OPEN_PANELS), len(SESSION._listeners))") == (0, 0)


def test_magic_displays_panel(notebook):
    """The magic opens a panel: one output with a widget, an HTML form and a text form, and nothing is printed."""
    reply = notebook.run("%openmed_panel")

    assert reply.status == "ok"
    (output,) = reply.shown
    assert set(output) == {VIEW, "text/html", "text/plain"}
    assert output["text/plain"] == "openmed_nb panel. To see the device as text, run %openmed_device."
    assert reply.streams == {}
    assert "OPENMED_DEVICE" in reply.html


def test_magic_returns_panel(notebook):
    """The panel can be kept in a variable, shown later, driven by code and closed."""
    assert notebook.run("panel = %openmed_panel").shown == []
    assert notebook.value("list(OPEN_PANELS) == [panel]")
    assert VIEW in notebook.run("panel").shown[-1]
    notebook.run("panel.model.use_device('cpu')")
    assert "the panel" in notebook.run("%openmed_device").text
    notebook.run("panel.close()")
    assert notebook.value("len(SESSION._listeners)") == 0


def test_semicolon_suppresses_display(notebook):
    """With a semicolon behind it the panel is opened, and nothing is shown."""
    assert notebook.run("%openmed_panel ;").is_empty
    assert notebook.value("len(OPEN_PANELS)") == 1


@pytest.mark.parametrize(
    ("settings", "line", "expected"),
    [
        ("", "", ("bundled", True)),
        ("", "--model bundled_small", ("bundled_small", True)),
        (COPY, "--model 'my models/mine'", ("my models/mine", True)),
        ("%config OpenMedMagics.default_model = 'bundled_small'", "", ("bundled_small", True)),
        ("%config OpenMedMagics.default_model = 'x'", "--model bundled_small", ("bundled_small", True)),
        ("%config OpenMedMagics.show_text = False", "", ("bundled", False)),
    ],
)
def test_model_and_settings(notebook, settings, line, expected):
    """The model is that of the line, else that of the settings; the settings also say whether texts are shown."""
    notebook.run(settings)
    notebook.run(f"panel = %openmed_panel {line}")

    assert notebook.value("(panel.model._name, panel.model._show_text)") == expected


def test_text_with_the_commands(run_ipython):
    """In terminal IPython the state is shown as text, with why and the commands to type; neither ipywidgets nor torch is imported for it."""
    code = """
%load_ext openmed_nb
import sys
state = %openmed_panel --model bundled_small
%openmed_panel --close
%openmed_panel ;
pressed = [one.device for one in state.buttons if one.pressed]
print(type(state).__name__, pressed, {"ipywidgets", "torch", "transformers"} & set(sys.modules))
%openmed_panel
"""

    process = run_ipython(code, OPENMED_DEVICE="cpu")
    assert (process.returncode, process.stderr) == (0, "")
    lines = process.stdout.splitlines()

    assert lines[0] == "PanelState ['cpu'] set()"
    assert any("OPENMED_DEVICE" in line for line in lines)
    assert f"  {NO_KERNEL_NOTICE}" in lines
    assert all(any(line.strip().startswith(command) for line in lines) for command, _ in COMMANDS)
