"""Opening a panel: widgets in a kernel, text elsewhere; the panels of a cell end when it is run again, all with the magics."""

import pytest

import openmed_nb as nb
from helpers.processes import run_python
from openmed_nb.notebook.panel import NO_KERNEL_NOTICE, NO_WIDGETS_NOTICE

SETUP = """
import openmed_nb as nb
from openmed_nb.notebook.panel import OPEN_PANELS
from openmed_nb.session import SESSION

panels = []

def open_panel():
    panels.append(nb.panel("bundled_small"))
"""
THREADS = """
import threading

log, loop = set(), get_ipython().kernel.io_loop.asyncio_loop

def note(change):
    if change.new.activity:
        log.add((str(change.new.activity), threading.current_thread() is threading.main_thread()))

def elsewhere(function):
    thread = threading.Thread(target=function)
    thread.start()
    thread.join()
"""
IS_OPEN = "[panel.comm is not None for panel in panels]"
LEFT = "(len(OPEN_PANELS), len(SESSION._listeners), sum(map(len, get_ipython().events.callbacks.values())))"


@pytest.mark.real_computer  # It is about shells and processes of their own.
class TestElsewhere:
    """Where there is no kernel."""

    def test_panel_is_a_state_without_a_kernel(self, shell):
        """In an IPython without a kernel it is the state too, of the session that the magics change."""
        shell.run_line_magic("openmed_device", "cpu")
        shown = nb.panel()

        assert shown.notice == NO_KERNEL_NOTICE
        assert (shown.choice.requested, shown.choice.requested_by) == ("cpu", "%openmed_device")

    def test_panel_is_text_in_a_script(self):
        """In a script the panel is text; neither torch nor ipywidgets nor IPython is imported for it."""
        code = "import sys\nimport openmed_nb as nb\nprint(nb.panel())\nprint({'torch', 'ipywidgets', 'IPython'} & set(sys.modules))"
        lines = run_python("-c", code).stdout.splitlines()

        assert lines[0].startswith("Device: cpu ")
        assert lines[-1] == "set()"


@pytest.fixture
def cells(kernel):
    """A real kernel, its cells named by the front end, without panels before and after."""
    assert kernel.run(SETUP).status == "ok"
    before = kernel.value(LEFT)
    assert before[:2] == (0, 0)
    yield kernel
    kernel.run("%openmed_panel --close")
    assert kernel.value(LEFT) == before


@pytest.mark.real_computer  # The kernel is a process of its own.
class TestInKernel:
    """In a real kernel, with the names that JupyterLab gives its cells."""

    def test_cell_that_runs_again_closes_its_panel(self, cells):
        """Running a cell again closes the panel that it had opened, and no other."""
        assert cells.run_cell("first", "open_panel()") == "ok"
        assert cells.run_cell("second", "open_panel()") == "ok"
        assert cells.value(IS_OPEN) == [True, True]
        cells.run_cell("first", "open_panel()")
        assert cells.value(IS_OPEN) == [False, True, True]
        cells.run_cell("second", "open_panel()")
        cells.run_cell("first", "open_panel()")
        assert cells.value(IS_OPEN) == [False, False, False, True, True]
        assert cells.value("(len(OPEN_PANELS), len(SESSION._listeners))") == (2, 2)

    def test_closed_panel_does_not_affect_its_cell(self, cells):
        """A closed panel does not affect the next run of its cell or closing all panels."""
        cells.run_cell("first", "open_panel()\npanels[-1].close()")
        assert cells.run_cell("first", "open_panel()\npanels[-1].close()") == "ok"
        assert cells.run("%openmed_panel --close").status == "ok"
        assert cells.value(f"({IS_OPEN}, len(SESSION._listeners))") == ([False, False], 0)

    @pytest.mark.parametrize("line", ["%openmed_panel --close", "%unload_ext openmed_nb", "%reload_ext openmed_nb"])
    def test_magics_close_all_panels(self, cells, line):
        """The magic closes all panels, and so do unloading and reloading the extension."""
        for cell in ("first", "second", "third"):
            cells.run_cell(cell, "open_panel()")

        assert cells.run(line).is_empty
        assert cells.value(f"({IS_OPEN}, len(OPEN_PANELS), len(SESSION._listeners))") == ([False] * 3, 0, 0)
        cells.run("%reload_ext openmed_nb")

    @pytest.mark.parametrize("how", ["elsewhere(open_panel)", "loop.call_later(0, open_panel)"])
    def test_panel_works_when_opened_outside_a_cell(self, cells, how):
        """A panel that a thread or a timer opens works in the main thread."""
        cells.run(THREADS)
        cells.run(how)
        cells.run("model = panels[0].model\nmodel.observe(note, 'state')")
        cells.run("elsewhere(lambda: model.use_device('auto'))\nasked = model.state.choice.requested_by")

        assert cells.value("asked") == "OPENMED_DEVICE"
        assert cells.value("(model.state.choice.requested, model.state.choice.requested_by)") == ("auto", "the panel")
        assert cells.value("log") == {("Changing the device: auto", True)}
        assert cells.value("model.cells.loop is not None")

    def test_panel_without_ipywidgets_names_the_installation(self, cells):
        """Where ipywidgets is not installed, the state is shown with the command that installs it."""
        cells.run("import sys\nkept, sys.modules['ipywidgets'] = sys.modules.get('ipywidgets'), None")
        reply = cells.run("nb.panel()")
        cells.run("sys.modules.pop('ipywidgets')\nif kept: sys.modules['ipywidgets'] = kept")

        assert reply.status == "ok"
        assert NO_WIDGETS_NOTICE in reply.text
        assert NO_WIDGETS_NOTICE in reply.html
        assert "%openmed_device --reset" in reply.text
        assert cells.value("len(OPEN_PANELS)") == 0
