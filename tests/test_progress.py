"""Progress display: text, estimates, output and threads."""

import io
import itertools
import os
import pty
import signal
import sys
import threading
from contextlib import contextmanager, nullcontext

import pytest

import openmed_nb as nb
from helpers.clock import use_clock
from helpers.threads import run_in_thread
from openmed_nb._events.activity import IMPORTING, LOADING, RELEASING, EventDispatcher, ProgressEvent
from openmed_nb._events.progress import (
    ProgressBar,
    ProgressHistory,
    ProgressLine,
    TerminalOutput,
    detect_output,
    is_interactive,
)
from openmed_nb.errors import RunInterrupted
from openmed_nb.session import SESSION

LOAD_EVENT = ProgressEvent(LOADING, "bundled")


def text_event(done, total=300):
    """Return an event of an annotation run."""
    return ProgressEvent("Annotating", "bundled on cpu", done, total, "text")


@pytest.mark.parametrize(
    ("line", "said"),
    [
        (ProgressLine(LOAD_EVENT, 12.9, "stopped"), "Loading: bundled, stopped after 12 s"),
        (
            ProgressLine(text_event(99), 83, eta_seconds=41.8),
            "Annotating: bundled on cpu ███░░░░░░░ 99 of 300 texts, 1:23, about 41 s left",
        ),
        (
            ProgressLine(text_event(60, 61), 83, eta_seconds=0.4),
            "Annotating: bundled on cpu █████████░ 60 of 61 texts, 1:23",
        ),
        (ProgressLine(text_event(300), 4000, "finished"), "Done in 1:06:40"),
        (ProgressLine(text_event(120, None), 61), "Annotating: bundled on cpu, 120 texts, 1:01"),
    ],
)
def test_line_text(line, said):
    assert str(line) == repr(line) == said


def test_line_html_has_progress_element():
    shown = ProgressLine(ProgressEvent("Comparing", "<b>", 5, 20, "turn"), 12, "stopped")._repr_html_()

    bar = '<progress max="1" value="0.250" aria-label="Comparing: &lt;b&gt;"></progress>'
    assert shown == f"<div>Comparing: &lt;b&gt; {bar} 5 of 20 turns, stopped after 12 s</div>"


def make_history(*events):
    """Return the history of events, each with its time."""
    history = ProgressHistory(events[0][0])
    for time, event in events:
        history.record(event, time)
    return history


def test_eta_ignores_first_step():
    history = ProgressHistory(0.0)
    etas = []
    for time, done in ((0, 0), (60, 1), (61, 21), (63, 61), (65, 101)):
        history.record(text_event(done), time)
        etas.append(history.snapshot(time).eta_seconds)

    assert etas == [None, None, None, pytest.approx(239 * 3 / 60), pytest.approx(199 * 5 / 100)]
    assert history.snapshot(68.0).eta_seconds == pytest.approx(199 * 5 / 100 - 3)
    assert history.snapshot(1000.0).eta_seconds == 0


def test_eta_uses_size_of_items():
    events = (
        (2 * step, ProgressEvent("Annotating", "bundled", 10 * step, 40, "text", 100 * step, 1300)) for step in range(4)
    )
    line = make_history(*events).snapshot(6.0)

    assert line.eta_seconds == pytest.approx(20.0)  # By texts it would be two seconds.
    assert "██░░░░░░░░ 30 of 40 texts" in str(line)


@pytest.mark.parametrize(("seconds", "total"), [(1.6, 40), (9, 1100)])
def test_eta_is_unknown_before_five_seconds_and_three_percent(seconds, total):
    """Early estimates were wrong by a factor of ten."""
    events = ((seconds * step, text_event(10 * step, total)) for step in range(4))
    assert make_history(*events).snapshot(3 * seconds).eta_seconds is None


@contextmanager
def record_annotating():
    """Record the events of annotation runs."""
    events = []
    stop = SESSION.subscribe(lambda event: events.append(event) if event and event.operation == "Annotating" else None)
    try:
        yield events
    finally:
        stop()


def test_annotate_reports_completed_characters():
    notes = ["She has asthma. " * 40] * 6 + ["No complaints."] * 40 + ["Known migraine. " * 900]
    with record_annotating() as events:
        with use_clock(itertools.count().__next__):  # A second passes between two events.
            nb.annotate(notes, "bundled_small", device="cpu")
        of_list = events.copy()
        events.clear()
        nb.annotate(iter(notes), "bundled_small", device="cpu")

    assert (of_list[0].size_done, of_list[-1].size_done) == (0, of_list[-1].size)
    assert of_list[-1].size == sum(len(note) + 1 for note in notes)
    assert [event.size_done for event in of_list] == sorted(event.size_done for event in of_list)
    # Each batch sends an event in which the size has moved. The counter has the texts that an interrupt keeps.
    assert len({event.size_done for event in of_list}) > 10
    assert [event.completed for event in of_list] == sorted(event.completed for event in of_list)
    assert {event.size for event in events} == {None}


def test_interrupt_names_the_displayed_count():
    def interrupted_notes():
        yield from ["She has asthma. " * 40] * 100
        raise KeyboardInterrupt

    with (
        record_annotating() as events,
        use_clock(itertools.count().__next__),
        pytest.raises(RunInterrupted) as caught,
    ):
        nb.annotate(interrupted_notes(), "bundled_small", device="cpu")
    assert events[-1].completed == caught.value.done > 0


def test_annotate_limits_events_of_batches():
    """Batches send no events if no time passes, only chunks of texts do."""
    notes = ["She has asthma. " * 40] * 6 + ["No complaints."] * 40
    with record_annotating() as events, use_clock(lambda: 1.0):
        nb.annotate(notes, "bundled_small", device="cpu", batch_tokens=64)

    assert [event.completed for event in events] == [0, len(notes)]


class Page:
    """Output that stores the drawn lines."""

    def __init__(self):
        self.lines = []
        self.drawn = threading.Event()

    def draw(self, line):
        """Store a line."""
        self.lines.append(line)
        self.drawn.set()


def threads():
    """Return the drawing threads."""
    return [thread for thread in threading.enumerate() if thread.name == "openmed_nb progress"]


def make_dispatcher(draw_interval=0.001):
    """Return a dispatcher and the page on which it draws."""
    page = Page()
    return EventDispatcher(ProgressBar({}, lambda _environ: page, draw_interval)), page


@pytest.mark.parametrize(
    ("error", "end"), [(None, "finished"), (ValueError, "stopped"), (KeyboardInterrupt, "stopped")]
)
def test_line_is_drawn_during_long_step(error, end):
    dispatcher, page = make_dispatcher()
    with pytest.raises(error) if error else nullcontext(), dispatcher.operation(), dispatcher.operation():
        dispatcher.notify(LOAD_EVENT)
        assert page.drawn.wait(60)
        if error:
            raise error

    assert page.lines[0].outcome == ""
    assert [line.outcome for line in page.lines if line.outcome] == [end]
    assert page.lines[-1].event == LOAD_EVENT
    assert threads() == []


def test_short_operation_is_not_drawn():
    dispatcher, page = make_dispatcher(draw_interval=3600)
    with dispatcher.operation():
        dispatcher.notify(text_event(300))

    assert (page.lines, threads()) == ([], [])


def test_line_describes_last_event():
    dispatcher, page = make_dispatcher()
    for model in ("one", "two"):
        page.drawn.clear()
        with dispatcher.operation():
            for _ in dispatcher.track("Comparing", model, range(3), "turn"):
                page.drawn.wait(60)
        assert page.lines[-1].event == ProgressEvent("Comparing", model, 3, 3, "turn")
        assert page.lines[-1].outcome == "finished"


@pytest.mark.parametrize("event", [ProgressEvent(IMPORTING, "torch"), ProgressEvent(RELEASING, "memory")])
def test_blocking_operation_is_drawn_before_start(event):
    dispatcher, page = make_dispatcher(draw_interval=3600)
    with dispatcher.operation():
        dispatcher.notify(LOAD_EVENT)
        assert page.lines == []
        dispatcher.notify(event)
        assert page.lines[0].event == event

    assert [line.outcome for line in page.lines] == ["", "finished"]


class Interrupted(Page):
    """Output whose last line is interrupted."""

    def draw(self, line):
        """Store a line, and raise KeyboardInterrupt for the last one."""
        super().draw(line)
        if line.outcome:
            raise KeyboardInterrupt


def test_interrupt_of_last_line_cleans_up():
    pages, events = [Interrupted(), Page()], []
    left = iter(pages)
    dispatcher = EventDispatcher(ProgressBar({}, lambda _environ: next(left), 0.001))
    dispatcher.subscribe(events.append)
    for page, error in zip(pages, (KeyboardInterrupt, None), strict=True):
        with pytest.raises(error) if error else nullcontext(), dispatcher.operation():
            dispatcher.notify(text_event(1))
            assert page.drawn.wait(60)

    assert events == [text_event(1), None] * 2
    assert pages[1].lines[-1].outcome == "finished"
    assert threads() == []


class Slow(Page):
    """Output whose first line waits for an event."""

    def __init__(self):
        super().__init__()
        self.may_draw = threading.Event()

    def draw(self, line):
        """Store a line."""
        super().draw(line)
        if len(self.lines) == 1:
            self.may_draw.wait(60)


def test_forked_child_does_not_wait_for_drawing_thread():
    """The thread holds its lock during the fork."""
    page = Slow()
    dispatcher = EventDispatcher(ProgressBar({}, lambda _environ: page, 0.001))
    with dispatcher.operation():
        dispatcher.notify(text_event(1))
        assert page.drawn.wait(60)
        child = os.fork()
        if child == 0:
            signal.alarm(10)
            dispatcher.notify(ProgressEvent(IMPORTING, "torch"))
            os._exit(0)
        page.may_draw.set()

    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


def run_operation(dispatcher, **options):
    """Run an operation with one event."""
    with dispatcher.operation(**options):
        dispatcher.notify(LOAD_EVENT)


@pytest.mark.parametrize(
    "quiet",
    [
        lambda dispatcher: run_in_thread(run_operation, dispatcher),
        lambda dispatcher: run_operation(dispatcher, progress=False),
        lambda dispatcher: dispatcher.notify(LOAD_EVENT),
    ],
    ids=["another thread", "progress=False", "no run_operation"],
)
def test_silent_events_are_not_drawn(quiet):
    dispatcher, page = make_dispatcher()
    events = []
    dispatcher.subscribe(events.append)
    quiet(dispatcher)

    assert threads() == []
    assert page.lines == []
    assert events[0] == LOAD_EVENT


@pytest.mark.parametrize(
    ("parent", "asked"),
    [
        ({"header": {"msg_type": "execute_request"}, "content": {"allow_stdin": True}}, True),
        ({"header": {"msg_type": "execute_request"}, "content": {"allow_stdin": False}}, False),
        ({"header": {"msg_type": "comm_msg"}, "content": {"data": {}}}, False),
        ({}, False),
    ],
    ids=["user", "nbval and nbconvert", "click", "no message"],
)
def test_is_interactive(parent, asked):
    assert is_interactive(parent) is asked


class Terminals:
    """Stream that is a terminal or not."""

    def __init__(self, real):
        self.isatty = lambda: real


@pytest.mark.parametrize(
    ("environ", "terminal", "shown"),
    [
        ({}, True, True),
        ({}, False, False),
        ({"OPENMED_NB_PROGRESS": "0"}, True, False),
        ({"OPENMED_NB_PROGRESS": " Off"}, True, False),
        ({"OPENMED_NB_PROGRESS": "1"}, True, True),
    ],
)
def test_detect_output_in_script(environ, terminal, shown, monkeypatch):
    monkeypatch.setattr(sys, "stderr", Terminals(terminal))

    assert isinstance(detect_output(environ), TerminalOutput) is shown


def closed():
    """Return a closed stream."""
    stream = io.StringIO()
    stream.close()
    return stream


def hung_up():
    """Return the stream of a closed terminal window."""
    window, terminal = pty.openpty()
    os.close(window)
    return os.fdopen(terminal, "w")


@pytest.mark.parametrize("stream", [closed, hung_up])
def test_closed_terminal_does_not_raise(stream):
    terminal = TerminalOutput(stream())
    terminal.draw(ProgressLine(text_event(1), 1.0))
    terminal.draw(ProgressLine(text_event(1), 1.0, "stopped"))


SCRIPT = """
import sys
import openmed_nb as nb

def notes():
    for number in range(40):
        if number == 30:
            sys.stdin.readline()  # Until the line was seen.
        yield "She has asthma." * 200

nb.annotate(notes(), "bundled_small", device="cpu")
print("done")
"""


def test_terminal_line_is_truncated_and_finished():
    child, terminal = pty.fork()
    if child == 0:
        os.execv(sys.executable, [sys.executable, "-c", SCRIPT])  # noqa: S606 - pty.fork has no other
    shown = b""
    while b"Annotating: bundled_small on cpu" not in shown:
        shown += os.read(terminal, 4096)
    os.write(terminal, b"\n")
    while b"done" not in shown:
        shown += os.read(terminal, 4096)
    os.close(terminal)
    os.waitpid(child, 0)
    lines = shown.decode().replace("\x1b[K", "").replace("\r", "\n").split("\n")

    assert any(line.startswith("Loading: bundled_small, ") for line in lines)
    assert len([line for line in lines if line.startswith("Done in ")]) == 1
    assert max(map(len, lines)) < 80
