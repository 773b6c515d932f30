"""A panel in a notebook: clicks from another thread wait for the running cell, looks come between cells, a close ends both."""

import threading
from dataclasses import replace
from operator import attrgetter

import pytest

from helpers.panels import in_notebook, next_cell
from helpers.threads import run_in_thread
from openmed_nb.devices.request import DEFAULT_SOURCE
from openmed_nb.notebook.panel.model import PENDING_INPUT_SECONDS, REFRESH_SECONDS
from openmed_nb.session import SESSION

asked = attrgetter("choice.requested", "choice.requested_by")
"""What a state says is asked for, and by whom."""

pytestmark = pytest.mark.usefixtures("quick_collection")

SMALL = "bundled_small"


@pytest.fixture
def open_in_cell(here, watch):
    """Function that opens a panel, without a GPU, in a cell that keeps running or has ended."""

    def open_in_cell(ended=False):
        panel = watch(here.session, SMALL)
        panel.on_cell_start()
        if ended:
            panel.on_cell_end()
            panel.states.clear()
        return panel

    return open_in_cell


@in_notebook
async def test_click_waits_for_the_cell_and_says_so(here, open_in_cell):
    """A click while a cell runs says that it waits, changes nothing yet, and is done after the cell."""
    panel = open_in_cell()
    threads = []
    panel.watch(lambda state: threads.append((state.pending_clicks, threading.get_ident())))
    run_in_thread(lambda: panel.use_device("cpu"))
    assert panel.state.pending_clicks == 1
    assert panel.state.choice.requested_by == DEFAULT_SOURCE
    assert here.environ == {}
    panel.on_cell_end()
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
async def test_click_waits_for_a_cell_that_awaits(here, open_in_cell):
    """While a cell awaits something the loop goes round, and a click waits all the same, until the cell ends."""
    panel = open_in_cell()
    run_in_thread(lambda: panel.use_device("cpu"))
    run_in_thread(lambda: panel.annotate_deferred(lambda: "She has asthma."))
    await next_cell(PENDING_INPUT_SECONDS)
    assert here.environ == {}
    assert panel.state.pending_clicks == 2
    panel.on_cell_end()
    await next_cell()

    assert panel.state.pending_clicks == 0
    assert panel.activities[0] == "Changing the device: cpu"
    assert panel.state.choice.requested_by == "the panel"
    assert len(panel.state.annotation) == 1


@in_notebook
async def test_late_text_is_annotated(open_in_cell):
    """A text that comes shortly after the click on Annotate is the one that is annotated, in the thread of the cells."""
    panel = open_in_cell(ended=True)
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
async def test_change_of_another_thread_is_shown_after_the_cell(here, open_in_cell):
    """What another thread does to the session while a cell runs is looked at after the cell, in the thread of the cells."""
    panel = open_in_cell()
    threads = []
    panel.watch(lambda _state: threads.append(threading.get_ident()))
    run_in_thread(lambda: here.session.use("cpu"))
    assert asked(panel.state) == ("auto", DEFAULT_SOURCE)
    await next_cell()

    assert asked(panel.state) == ("cpu", "use()")
    assert set(threads) == {threading.get_ident()}


@in_notebook
async def test_cell_of_another_thread_is_read_in_the_main_thread(here, open_in_cell):
    """After a cell of a subshell, which runs in another thread, the look is in the thread of the cells."""
    panel = open_in_cell()
    threads = []
    here.environ["OPENMED_DEVICE"] = "cpu"
    panel.watch(lambda state: threads.append((asked(state), threading.get_ident())))
    ident = run_in_thread(panel.on_cell_end)
    await next_cell()

    assert threads == [(("auto", DEFAULT_SOURCE), ident), (("cpu", "OPENMED_DEVICE"), threading.get_ident())]


@in_notebook
async def test_refresh_ticks_between_cells(open_in_cell):
    """Switched on, the panel looks again after some seconds, and again, in the thread of the cells."""
    panel = open_in_cell(ended=True)
    threads = []
    run_in_thread(lambda: panel.set_auto_refresh(wanted=True))
    assert not panel.state.auto_refresh
    await next_cell(REFRESH_SECONDS / 2)
    assert [state.auto_refresh for state in panel.states] == [True]
    panel.watch(lambda _state: threads.append(threading.get_ident()))
    for count in (2, 3, 4):
        await next_cell(REFRESH_SECONDS)
        assert len(panel.states) == count

    assert set(threads) == {threading.get_ident()}
    assert panel.activities == []


@in_notebook
async def test_refresh_reads_the_memory_only(here, open_in_cell):
    """A tick brings a new look at the memory, and leaves everything else, and the session, alone."""
    panel = open_in_cell(ended=True)
    panel.use_device("mpss")
    panel.set_auto_refresh(wanted=True)
    before = panel.state
    here.environ["OPENMED_DEVICE"] = "cpu"
    await next_cell(REFRESH_SECONDS)

    assert panel.state.memory is not before.memory
    assert replace(panel.state, memory=before.memory) == before


@pytest.mark.parametrize("end", ["off", "close", "close elsewhere", "close by an observer"])
@in_notebook
async def test_refresh_ends_when_switched_off_or_closed(open_in_cell, end):
    """Switched off, or with the panel closed by anybody, nothing looks any more."""
    panel = open_in_cell(ended=True)
    ends = {
        "off": lambda: panel.set_auto_refresh(wanted=False),
        "close": panel.close,
        "close elsewhere": lambda: run_in_thread(panel.close),
        "close by an observer": lambda: panel.watch(lambda _state: panel.close()),
    }
    panel.set_auto_refresh(wanted=True)
    panel.states.clear()
    await next_cell(REFRESH_SECONDS)
    assert len(panel.states) == 1
    ends[end]()
    assert len(panel.states) == (2 if end == "off" else 1)
    for _ in range(3):
        await next_cell(REFRESH_SECONDS)

    assert not panel.state.auto_refresh
    assert len(panel.states) == (2 if end in ("off", "close by an observer") else 1)


def test_refresh_needs_an_event_loop(panel):
    """In plain Python nothing can tick, and the panel does not claim that it does."""
    panel.set_auto_refresh(wanted=True)

    assert not panel.state.auto_refresh


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

    @pytest.mark.parametrize("cell", ["x = 1", "1 / 0", "this is no Python", "raise KeyboardInterrupt"])
    def test_panel_follows_a_cell(self, followed, cell, capsys):
        """While a cell runs the panel knows it, and when it has ended in any way the panel has looked again."""
        panel, shell = followed
        shell.run_cell(cell)

        assert panel.states[0].cell_running
        assert not panel.state.cell_running
        assert not panel.states[-1].cell_running
        assert "Error in callback" not in capsys.readouterr().out

    def test_environment_change_of_cell_is_shown(self, followed, monkeypatch):
        """A variable that a cell sets is shown after the cell."""
        panel, shell = followed
        monkeypatch.setenv("OPENMED_TORCH_DEVICE", "auto")
        shell.run_cell("import os; os.environ['OPENMED_DEVICE'] = 'cpu'")
        assert asked(panel.state) == ("cpu", "OPENMED_DEVICE")
        shell.run_cell("del os.environ['OPENMED_DEVICE']")
        assert asked(panel.state) == ("auto", DEFAULT_SOURCE)

    def test_panel_does_not_know_the_cell_that_opens_it(self, shell, watch):
        """A panel does not know of the cell in which it is opened, and shows after it that none runs; the next it knows."""
        shell.user_ns["open_panel"] = lambda: watch(SESSION, SMALL, events=shell.events)
        shell.run_cell("panel = open_panel(); ran = panel.state.cell_running")

        panel = shell.user_ns["panel"]
        assert shell.user_ns["ran"] is False
        assert [state.cell_running for state in panel.states] == [False] * len(panel.states)
        shell.run_cell("ran = panel.state.cell_running")
        assert shell.user_ns["ran"] is True
        assert panel.state.cell_running is False

    def test_nested_cell_keeps_the_outer_one_running(self, followed):
        """The outer cell is still running when a nested cell ends, even if the nested cell fails."""
        panel, shell = followed
        shell.user_ns.update(panel=panel, inner=shell.run_cell)
        shell.run_cell(
            "ran = [panel.state.cell_running]\nfor one in ('x = 1', '1 / 0'):\n    inner(one)\n    ran.append(panel.state.cell_running)"
        )

        assert shell.user_ns["ran"] == [True, True, True]
        assert panel.state.cell_running is False

    def test_cell_ends_while_a_model_loads(self, followed, loads, monkeypatch):
        """A cell ends while another thread loads a model; what it changed is shown when that is done."""
        panel, shell = followed
        monkeypatch.setenv("OPENMED_TORCH_DEVICE", "auto")
        panel.refresh()
        loads.start(SESSION)
        shell.run_cell("import os; os.environ['OPENMED_DEVICE'] = 'cpu'")
        assert loads.inside
        assert asked(panel.state) == ("auto", DEFAULT_SOURCE)
        assert not panel.state.cell_running
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

QUOTING = """
import io, sys
import openmed_nb as nb
from tokenizers.pre_tokenizers import PreTokenizer

class Quoting:
    def pre_tokenize(self, _pieces):
        raise LookupError("cannot split " + text)

text = "Mrs Miller has leprosy."
nb.load_pipeline("bundled_small").tokenizer.backend_tokenizer.pre_tokenizer = PreTokenizer.custom(Quoting())
standard_error, sys.stderr = sys.stderr, io.StringIO()
elsewhere(lambda: panel.annotate(text))
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

    def test_unexpected_error_does_not_quote_note(self, cells):
        """What an unexpected error quotes of a note is neither in the panel nor in what the kernel writes into the notebook."""
        assert cells.run(QUOTING).status == "ok"
        cells.run("written, sys.stderr = sys.stderr.getvalue(), standard_error")

        assert cells.value("panel.state.error.message") == "Annotating failed with Exception."
        assert cells.value("'OpenMedError: Annotating failed with Exception.' in written")
        assert cells.value("'leprosy' in written + str(panel.state)") is False

    def test_interrupt_ends_a_waiting_click(self, cells):
        """An interrupt of the kernel ends a click that waited, which is shown; kernel, session and handler are as before."""
        begun = cells.run(STAYING)
        said = begun.streams.get("stdout", "")
        while "inside" not in said:
            message = cells.client.get_iopub_msg(timeout=60)
            said += message["content"].get("text", "")
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
