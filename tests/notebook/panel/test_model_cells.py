"""A panel in a notebook: clicks from another thread wait for the running cell, and the panel shows the changes of each cell."""

import threading
from operator import attrgetter

import pytest

from helpers.panels import in_notebook, next_cell
from helpers.threads import run_in_thread
from openmed_nb.devices.request import DEFAULT_SOURCE
from openmed_nb.notebook.panel.model import PENDING_INPUT_SECONDS
from openmed_nb.session import SESSION

asked = attrgetter("choice.requested", "choice.requested_by")
"""What a state says is asked for, and by whom."""

SMALL = "bundled_small"


@in_notebook
async def test_click_waits_for_the_cell_and_says_so(here, watch):
    """A click while a cell runs says that it waits, changes nothing yet, and is done after the cell."""
    panel = watch(here.session, SMALL)
    threads = []
    panel.watch(lambda state: threads.append((state.pending_clicks, threading.get_ident())))
    run_in_thread(lambda: panel.use_device("cpu"))
    assert panel.state.pending_clicks == 1
    assert panel.state.choice.requested_by == DEFAULT_SOURCE
    assert here.environ == {}
    await next_cell()

    assert panel.activities == ["Changing the device: cpu"]
    assert panel.state.choice.requested_by == "the panel"
    assert panel.state.pending_clicks == 0
    assert panel.agrees
    (waiting, ident), *others = threads
    assert waiting == 1
    assert ident != threading.get_ident()
    assert {ident for _, ident in others} == {threading.get_ident()}


@in_notebook
async def test_late_text_is_annotated(here, watch):
    """A text that comes shortly after the click on Annotate is the one that is annotated, in the thread of the cells."""
    panel = watch(here.session, SMALL)
    texts, threads = [], []

    def read():
        threads.append(threading.get_ident())
        return texts[-1]

    run_in_thread(lambda: panel.annotate_deferred(read))
    assert (panel.state.pending_clicks, threads) == (1, [])
    await next_cell()
    assert threads == []
    texts.append("She has asthma.")
    await next_cell(PENDING_INPUT_SECONDS)

    assert threads == [threading.get_ident()]
    assert [entity["word"] for entity in panel.state.annotation] == ["asthma"]
    assert panel.state.pending_clicks == 0
    assert panel.agrees


@in_notebook
async def test_change_of_another_thread_is_shown_after_the_cell(here, watch):
    """What another thread does to the session while a cell runs is looked at after the cell, in the thread of the cells."""
    panel = watch(here.session, SMALL)
    threads = []
    panel.watch(lambda _state: threads.append(threading.get_ident()))
    run_in_thread(lambda: here.session.use("cpu"))
    assert asked(panel.state) == ("auto", DEFAULT_SOURCE)
    await next_cell()

    assert asked(panel.state) == ("cpu", "use()")
    assert set(threads) == {threading.get_ident()}


@pytest.mark.real_computer  # The extension is loaded afresh, which ends a simulation.
class TestCells:
    """What follows the cells of a notebook."""

    @pytest.fixture
    def followed(self, shell, watch):
        """A panel that observes the cells of a shell, and the shell."""
        before = {name: list(callbacks) for name, callbacks in shell.events.callbacks.items()}
        panel = watch(SESSION, SMALL, events=shell.events)
        yield panel, shell
        panel.close()
        assert {name: list(callbacks) for name, callbacks in shell.events.callbacks.items()} == before

    def test_environment_change_of_cell_is_shown(self, followed, monkeypatch):
        """A variable that a cell sets is shown after the cell, even if the cell failed."""
        panel, shell = followed
        monkeypatch.setenv("OPENMED_TORCH_DEVICE", "auto")
        shell.run_cell("import os; os.environ['OPENMED_DEVICE'] = 'cpu'; 1 / 0")
        assert asked(panel.state) == ("cpu", "OPENMED_DEVICE")
        shell.run_cell("del os.environ['OPENMED_DEVICE']")
        assert asked(panel.state) == ("auto", DEFAULT_SOURCE)

    def test_cell_ends_while_a_model_loads(self, followed, loads, monkeypatch):
        """A cell ends while another thread loads a model; what it changed is shown when that is done."""
        panel, shell = followed
        monkeypatch.setenv("OPENMED_TORCH_DEVICE", "auto")
        panel.refresh()
        loads.start(SESSION)
        shell.run_cell("import os; os.environ['OPENMED_DEVICE'] = 'cpu'")
        assert loads.inside
        assert asked(panel.state) == ("auto", DEFAULT_SOURCE)
        loads.stop()

        assert asked(panel.state) == ("cpu", "OPENMED_DEVICE")
        assert panel.state.models.names == (SMALL,)
        shell.run_cell("del os.environ['OPENMED_DEVICE']")


IN_KERNEL = """
import threading
from openmed_nb.notebook.panel.model import MainThreadRunner, kernel_loop
from openmed_nb.notebook.panel.model import PanelModel
from openmed_nb.session import SESSION

def note(change):
    state = change.new
    shown = "waiting" if state.pending_clicks else str(state.activity or "")
    log.append((shown, threading.current_thread() is threading.main_thread()))

def elsewhere(function):
    thread = threading.Thread(target=function)
    thread.start()
    thread.join()

cells = MainThreadRunner(kernel_loop(get_ipython()))
panel, log = PanelModel(SESSION, "bundled_small", cells=cells, events=get_ipython().events), []
panel.observe(note, 'state')
"""


STAYING = """
import signal, sys

handlers, log[:] = [], []
look = lambda: handlers.append(signal.getsignal(signal.SIGINT))

def stay(activity):
    if activity is not None and activity.operation == "Loading":
        print("inside", flush=True)
        threading.Event().wait(60)

remove = SESSION.subscribe(stay)
cells.loop.call_later(0, look)
elsewhere(lambda: panel.annotate("Mrs Miller has leprosy."))
"""


@pytest.fixture
def cells(kernel):
    """A real kernel with a panel without widgets, which is closed afterwards."""
    assert kernel.run(IN_KERNEL).status == "ok"
    yield kernel
    assert kernel.run("panel.close()\nSESSION.unload()").status == "ok"


@pytest.mark.real_computer  # The kernel is a process of its own.
class TestInKernel:
    """In a real kernel, where a click comes from another thread."""

    def test_click_reaches_the_simulated_mac(self, cells):
        """A click reaches the simulated MPS, which computes only in the thread that began it."""
        cells.run("%openmed_device --simulate mps")
        cells.run("elsewhere(lambda: panel.annotate('She has asthma.'))")
        assert cells.value("(panel.state.annotation.device, len(panel.state.annotation))") == ("mps (SIMULATED)", 1)
        assert cells.value("panel.state.simulated") is True
        cells.run("elsewhere(lambda: panel.use_device('cpu'))")
        assert cells.value("{one.device for one in panel.state.models}") == {"cpu"}
        cells.run("%openmed_device --simulate off")
        assert cells.value("panel.state.simulated") is False

    def test_interrupt_ends_a_waiting_click(self, cells):
        """An interrupt of the kernel ends a click that waited, which is shown; kernel, session and handler are as before."""
        said = cells.run(STAYING).streams.get("stdout", "")
        while "inside" not in said:
            said += cells.client.get_iopub_msg(timeout=60)["content"].get("text", "")
        cells.interrupt()
        cells.run("remove()\ncells.loop.call_later(0, look)")

        assert cells.value("panel.state.error.message") == "Annotating was interrupted."
        assert cells.value("(panel.state.activity, panel.state.pending_clicks, panel.state.annotation)") == (
            None,
            0,
            None,
        )
        assert cells.value("(SESSION.is_idle(), SESSION.inventory().names)") == (True, ())
        assert cells.value("[one is signal.SIG_IGN for one in handlers]") == [True, True]
        cells.run("elsewhere(lambda: panel.annotate('She has asthma.'))")
        assert cells.value("(panel.state.error, len(panel.state.annotation))") == (None, 1)
