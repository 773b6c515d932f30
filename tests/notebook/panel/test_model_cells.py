"""A panel in a notebook: clicks from another thread wait for the running cell, looks come between cells, a close ends both."""

import asyncio
import threading
from dataclasses import replace
from operator import attrgetter

import pytest

from helpers.threads import run_in_thread
from openmed_nb.devices.request import DEFAULT_SOURCE
from openmed_nb.notebook.panel.model import PENDING_INPUT_SECONDS, REFRESH_SECONDS
from openmed_nb.session import SESSION

asked = attrgetter("choice.requested", "choice.requested_by")
"""What a state says is asked for, and by whom."""

pytestmark = pytest.mark.usefixtures("quick_collection")

SMALL = "bundled_small"


class ClockLoop(asyncio.SelectorEventLoop):
    """An event loop whose clock stands still until it is moved."""

    now = 0.0

    def time(self):
        """Return the time of the clock."""
        return self.now


def in_cells(*cells):
    """Run functions one after the other as a kernel runs cells: each in the event loop, which then does what is due.

    A function that returns a number advances the clock by that many seconds.
    """
    loop = ClockLoop()

    async def run(cell):
        return cell()

    try:
        for cell in cells:
            loop.now += loop.run_until_complete(run(cell)) or 0.0
            for _ in range(3):
                loop.run_until_complete(asyncio.sleep(0))
    finally:
        loop.close()


class Notebook:
    """A notebook in which a panel is opened.

    Args:
        open_panel: Opens it.
    """

    def __init__(self, open_panel):
        self.open_panel = open_panel

    def open(self):
        """Open the panel in a cell, which keeps running."""
        self.panel = self.open_panel()
        self.panel.on_cell_start()

    def end(self, clear=True):
        """End the cell, and clear the recorded states."""
        self.panel.on_cell_end()
        if clear:
            self.panel.states.clear()


@pytest.fixture
def notebook(here, watch):
    """A notebook over the session of a computer without a GPU."""
    return Notebook(lambda: watch(here.session, SMALL))


def test_waiting_a_click_waits_and_says_so(here, notebook):
    """A click while a cell runs says that it waits, changes nothing yet, and is done after the cell."""
    threads = []

    def cell():
        notebook.panel.watch(lambda state: threads.append((state.pending_clicks, threading.get_ident())))
        run_in_thread(lambda: notebook.panel.use_device("cpu"))
        assert notebook.panel.state.pending_clicks == 1
        assert notebook.panel.state.choice.requested_by == DEFAULT_SOURCE
        assert here.environ == {}
        notebook.panel.on_cell_end()

    def after():
        assert notebook.panel.activities == ["Changing the device: cpu"]
        assert notebook.panel.state.choice.requested_by == "the panel"
        assert notebook.panel.state.pending_clicks == 0
        assert notebook.panel.agrees

    in_cells(notebook.open, cell, after)
    (waiting, ident), *others = threads
    assert waiting == 1
    assert ident != threading.get_ident()
    assert {ident for _, ident in others} == {threading.get_ident()}


def test_waiting_a_cell_that_awaits_something(here, notebook):
    """While a cell awaits something the loop goes round, and a click waits all the same, until the cell ends."""

    def awaiting():
        run_in_thread(lambda: notebook.panel.use_device("cpu"))
        run_in_thread(lambda: notebook.panel.annotate_deferred(lambda: "She has asthma."))
        return PENDING_INPUT_SECONDS

    def still_awaiting():
        assert here.environ == {}
        assert notebook.panel.state.pending_clicks == 2
        notebook.panel.on_cell_end()

    def after():
        assert notebook.panel.state.pending_clicks == 0
        assert notebook.panel.activities[0] == "Changing the device: cpu"

    in_cells(notebook.open, awaiting, lambda: None, still_awaiting, lambda: None, after)
    assert notebook.panel.state.choice.requested_by == "the panel"
    assert len(notebook.panel.state.annotation) == 1


def test_waiting_a_text_on_its_way(notebook):
    """A text that comes shortly after the click on Annotate is the one that is annotated, in the thread of the cells."""
    texts, threads = [], []

    def read():
        threads.append(threading.get_ident())
        return texts[-1]

    def click():
        run_in_thread(lambda: notebook.panel.annotate_deferred(read))
        assert (notebook.panel.state.pending_clicks, threads) == (1, [])

    def typed():
        assert threads == []
        texts.append("She has asthma.")
        return PENDING_INPUT_SECONDS

    in_cells(notebook.open, notebook.end, click, typed, lambda: None)
    assert threads == [threading.get_ident()]
    assert [entity["word"] for entity in notebook.panel.state.annotation] == ["asthma"]
    assert notebook.panel.state.pending_clicks == 0
    assert notebook.panel.agrees


def test_waiting_a_thread_that_changes_the_session(here, notebook):
    """What another thread does to the session while a cell runs is looked at after the cell, in the thread of the cells."""
    threads = []

    def cell():
        notebook.panel.watch(lambda _state: threads.append(threading.get_ident()))
        run_in_thread(lambda: here.session.use("cpu"))
        assert asked(notebook.panel.state) == ("auto", DEFAULT_SOURCE)

    in_cells(notebook.open, cell, lambda: None)
    assert asked(notebook.panel.state) == ("cpu", "use()")
    assert set(threads) == {threading.get_ident()}


def test_waiting_a_cell_of_another_thread(here, notebook):
    """After a cell of a subshell, which runs in another thread, the look is in the thread of the cells."""
    threads = []

    def cell():
        here.environ["OPENMED_DEVICE"] = "cpu"
        notebook.panel.watch(lambda state: threads.append((asked(state), threading.get_ident())))
        idents.append(run_in_thread(notebook.panel.on_cell_end))

    idents = []
    in_cells(notebook.open, cell, lambda: None)
    before, after = ("auto", DEFAULT_SOURCE), ("cpu", "OPENMED_DEVICE")
    assert threads == [(before, idents[0]), (after, threading.get_ident())]


def test_refreshing_it_ticks_between_cells(notebook):
    """Switched on, the panel looks again after some seconds, and again, in the thread of the cells."""
    seen, threads = [], []

    def switch_on():
        run_in_thread(lambda: notebook.panel.set_auto_refresh(wanted=True))
        assert not notebook.panel.state.auto_refresh
        return REFRESH_SECONDS / 2

    def nothing_yet():
        assert [state.auto_refresh for state in notebook.panel.states] == [True]
        notebook.panel.watch(lambda _state: threads.append(threading.get_ident()))
        return REFRESH_SECONDS

    def count():
        seen.append(len(notebook.panel.states))
        return REFRESH_SECONDS

    in_cells(notebook.open, notebook.end, switch_on, nothing_yet, count, count, count)
    assert seen == [2, 3, 4]
    assert set(threads) == {threading.get_ident()}
    assert notebook.panel.activities == []


def test_refreshing_a_tick_looks_at_the_memory_only(here, notebook):
    """A tick brings a new look at the memory, and leaves everything else, and the session, alone."""
    before = []

    def switch_on():
        notebook.panel.use_device("mpss")
        notebook.panel.set_auto_refresh(wanted=True)
        before.append(notebook.panel.state)
        here.environ["OPENMED_DEVICE"] = "cpu"
        return REFRESH_SECONDS

    in_cells(notebook.open, notebook.end, switch_on, lambda: None)
    assert notebook.panel.state.memory is not before[0].memory
    assert replace(notebook.panel.state, memory=before[0].memory) == before[0]


@pytest.mark.parametrize("end", ["off", "close", "close elsewhere", "close by an observer"])
def test_refreshing_it_ends(notebook, end):
    """Switched off, or with the panel closed by anybody, nothing looks any more."""
    ends = {
        "off": lambda panel: panel.set_auto_refresh(wanted=False),
        "close": lambda panel: panel.close(),
        "close elsewhere": lambda panel: run_in_thread(panel.close),
        "close by an observer": lambda panel: panel.watch(lambda _state: panel.close()),
    }

    def switch_on():
        notebook.panel.set_auto_refresh(wanted=True)
        notebook.panel.states.clear()
        return REFRESH_SECONDS

    def stop():
        assert len(notebook.panel.states) == 1
        ends[end](notebook.panel)
        ended.append(len(notebook.panel.states))
        return REFRESH_SECONDS

    def nothing():
        return REFRESH_SECONDS

    ended = []
    in_cells(notebook.open, notebook.end, switch_on, stop, nothing, nothing)
    assert not notebook.panel.state.auto_refresh
    assert ended == [2 if end == "off" else 1]
    assert len(notebook.panel.states) == ended[0] + (end == "close by an observer")


def test_refreshing_without_a_loop_there_is_none(panel):
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
    def test_a_cell_is_followed(self, followed, cell, capsys):
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

    def test_the_cell_that_opens_it(self, shell, watch):
        """A panel does not know of the cell in which it is opened, and shows after it that none runs; the next it knows."""
        shell.user_ns["open_panel"] = lambda: watch(SESSION, SMALL, events=shell.events)
        shell.run_cell("panel = open_panel(); ran = panel.state.cell_running")

        panel = shell.user_ns["panel"]
        assert shell.user_ns["ran"] is False
        assert [state.cell_running for state in panel.states] == [False] * len(panel.states)
        shell.run_cell("ran = panel.state.cell_running")
        assert shell.user_ns["ran"] is True
        assert panel.state.cell_running is False

    def test_a_cell_in_a_cell(self, followed):
        """The outer cell is still running when a nested cell ends, even if the nested cell fails."""
        panel, shell = followed
        shell.user_ns.update(panel=panel, inner=shell.run_cell)
        shell.run_cell(
            "ran = [panel.state.cell_running]\nfor one in ('x = 1', '1 / 0'):\n    inner(one)\n    ran.append(panel.state.cell_running)"
        )

        assert shell.user_ns["ran"] == [True, True, True]
        assert panel.state.cell_running is False

    def test_the_end_of_a_cell_waits_for_nobody(self, followed, loads, monkeypatch):
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

    def test_a_click_on_a_simulated_mac(self, cells):
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

    def test_an_interrupt(self, cells):
        """An interrupt of the kernel ends a click that waited, which is shown; kernel, session and handler are as before."""
        begun = cells.run(STAYING)
        said = begun.streams.get("stdout", "")
        while "inside" not in said:
            message = cells.client.get_iopub_msg(timeout=60)
            said += message["content"].get("text", "")
        cells.interrupt()
        cells.run("remove()\ncells.loop.call_later(0, look)")

        assert cells.value("panel.state.error.message") == "Annotating: bundled_small was interrupted."
        assert cells.value("(panel.state.activity, panel.state.pending_clicks, panel.state.annotation)") == (
            None,
            0,
            None,
        )
        assert cells.value("(SESSION.is_idle(), SESSION.inventory().names)") == (True, ())
        assert cells.value("[one is signal.SIG_IGN for one in handlers]") == [True, True]
        cells.run("elsewhere(lambda: panel.annotate('She has asthma.'))")
        assert cells.value("(panel.state.error, len(panel.state.annotation))") == (None, 1)
