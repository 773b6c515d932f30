"""The line that shows what is under way: what it says, when it is drawn, for whom, and that nothing of it is left."""

import gc
import io
import os
import pty
import sys
import threading
from contextlib import nullcontext

import pytest

import openmed_nb as nb
from openmed_nb._events.activity import IMPORTING, LOADING, RELEASING, EventDispatcher, ProgressEvent
from openmed_nb._events.progress import (
    ProgressBar,
    ProgressHistory,
    ProgressLine,
    TerminalOutput,
    detect_output,
    is_interactive,
)
from openmed_nb.session import SESSION


def of_texts(done, total=300):
    """Return that so many texts of a run are done."""
    return ProgressEvent("Annotating", "bundled on cpu", done, total, "text")


@pytest.mark.parametrize(
    ("line", "said"),
    [
        (ProgressLine(ProgressEvent(LOADING, "bundled"), 0.44), "Loading: bundled, 0.4 s"),
        (ProgressLine(ProgressEvent(LOADING, "bundled"), 12.9, "stopped"), "Loading: bundled, stopped after 12 s"),
        (ProgressLine(of_texts(0), 3.21), "Annotating: bundled on cpu ░░░░░░░░░░ text 1 of 300, 3.2 s"),
        (
            ProgressLine(of_texts(99), 83, eta_seconds=41.8, rate=2.3456),
            "Annotating: bundled on cpu ███░░░░░░░ text 100 of 300, 1:23, about 41 s left, 2.35 texts/s",
        ),
        (
            ProgressLine(of_texts(60, 61), 83, eta_seconds=0.4),
            "Annotating: bundled on cpu █████████░ text 61 of 61, 1:23",
        ),
        (
            ProgressLine(of_texts(300), 4000, "finished", eta_seconds=0.0, rate=25, loading_seconds=12),
            "Annotating: bundled on cpu ██████████ 300 texts, finished after 1:06:40 (loading took 12 s), 25 texts/s",
        ),
        (ProgressLine(of_texts(120, None), 61), "Annotating: bundled on cpu, 120 texts, 1:01"),
        (
            ProgressLine(ProgressEvent("Moving to mps", "bundled", 1, 2), 0.5, "finished"),
            "Moving to mps: bundled ██████████ 2 of 2, finished after 0.5 s",
        ),
        (
            ProgressLine(ProgressEvent("Comparing", "bundled", 5, 20, "turn"), 12, "finished"),
            "Comparing: bundled ██░░░░░░░░ turn 6 of 20, finished after 12 s",
        ),
    ],
)
def test_what_a_line_says(line, said):
    """A line says what is done, how far it is, for how long, and what is left; a finished one that it is finished."""
    assert str(line) == repr(line) == said


def test_html_is_the_text_with_a_bar_of_the_browser():
    """In a notebook the bar is that of the browser, with its name for a screen reader; names are escaped."""
    shown = ProgressLine(ProgressEvent("Comparing", "<b>", 5, 20, "turn"), 12, "stopped")._repr_html_()

    bar = '<progress max="1" value="0.250" aria-label="Comparing: &lt;b&gt;"></progress>'
    assert shown == f"<div>Comparing: &lt;b&gt; {bar} turn 6 of 20, stopped after 12 s</div>"


def test_a_dot_pulses_until_the_end():
    """While the verb goes on, a dot pulses before the line, on and on where it is drawn again; at the end it is gone."""
    activity = ProgressEvent(LOADING, "bundled")
    first, next_one = (ProgressLine(activity, seconds)._repr_html_() for seconds in (12.1, 12.5))

    assert 'aria-hidden="true" style="animation-delay:-0.10s">●</span> Loading: bundled, 12 s</div>' in first
    assert "animation-delay:-0.50s" in next_one
    assert "prefers-reduced-motion" in first
    assert ProgressLine(activity, 12.5, "finished")._repr_html_() == "<div>Loading: bundled, finished after 12 s</div>"


def lines_of(told, total=300):
    """Return the lines at the moments at which so many texts are done."""
    course, lines = ProgressHistory(0.0), []
    for time, done in told:
        course.record(of_texts(done, total), time)
        lines.append(course.snapshot(time))
    return course, lines


def test_the_first_batch_is_no_measure_of_what_is_left():
    """Nothing is said of what is left until two batches came after the first, which warms up; then it is theirs that counts."""
    course, lines = lines_of([(0, 0), (60, 1), (61, 21), (63, 61), (65, 101)])

    assert [one.eta_seconds for one in lines] == [None, None, None, pytest.approx(239 * 3 / 60), pytest.approx(199 * 5 / 100)]
    assert course.snapshot(68.0).eta_seconds == pytest.approx(199 * 5 / 100 - 3)
    assert course.snapshot(1000.0).eta_seconds == 0


def test_what_an_earlier_run_did_is_no_part_of_the_speed():
    """The speed counts what is done in this run, from its first text on, and not the time to load."""
    _course, lines = lines_of([(5, 200), (15, 250)])

    assert lines[-1].rate == 5
    assert lines_of([(0, 0), (10, 50)], total=60)[1][-1].rate is None  # Of so few nobody wants to know.
    assert lines_of([(0, 0), (10, 50)], total=None)[1][-1].rate == 5


def test_the_time_to_load_is_said():
    """The seconds count from the first model that is loaded, and how many of them went into loading is said."""
    course = ProgressHistory(10.0)
    course.record(ProgressEvent(IMPORTING, "torch"), 10.0)
    course.record(ProgressEvent(LOADING, "bundled"), 12.0)
    assert (
        str(course.snapshot(14.0, "stopped")) == "Loading: bundled, stopped after 4.0 s"
    )  # It says what took the time.
    course.record(of_texts(0), 14.0)
    course.record(of_texts(300), 20.0)
    line = course.snapshot(20.0, "finished")

    assert (line.loading_seconds, line.seconds) == (4, 10)
    assert "finished after 10 s (loading took 4.0 s)" in str(line)


def test_finished_line_names_the_work_and_not_a_load_after_it():
    """What is read or loaded behind the work, such as files whose fingerprint is kept, is no work that finishes."""
    course = ProgressHistory(0.0)
    course.record(ProgressEvent(LOADING, "bundled"), 0.0)
    course.record(ProgressEvent("Sweeping", "bundled, 4 rows", 1, 3, "round"), 5.0)
    course.record(ProgressEvent(LOADING, "bundled"), 58.0)
    course.record(ProgressEvent(IMPORTING, "torch"), 59.0)

    assert str(course.snapshot(60.0)).startswith("Importing: torch")
    assert str(course.snapshot(60.0, "finished")).startswith("Sweeping: bundled, 4 rows")
    assert "finished after 1:00 (loading took 6.0 s)" in str(course.snapshot(60.0, "finished"))
    assert str(course.snapshot(60.0, "stopped")).startswith("Importing: torch")  # What was under way when it stopped.


def test_time_left_counts_the_size_of_texts():
    """Where it is known how long the texts are, a short text is little work and a long one is much."""
    course = ProgressHistory(0.0)
    for time, done, size in ((0, 0, 0), (1, 10, 100), (2, 20, 200), (3, 30, 300)):
        course.record(ProgressEvent("Annotating", "bundled", done, 40, "text", size, 1300), time)

    assert course.snapshot(3.0).eta_seconds == pytest.approx(10.0)  # By texts it would be a second.
    assert course.snapshot(3.0).fraction == pytest.approx(300 / 1300)
    assert "text 31 of 40" in str(course.snapshot(3.0))


def test_annotate_tells_how_much_of_all_characters_is_done():
    """Of texts at hand the characters are counted, also while a long text is under way; a stream has no total."""
    told, notes = [], ["She has asthma. " * 40] * 6 + ["No complaints."] * 40 + ["Known migraine. " * 9000]
    stop = SESSION.subscribe(lambda one: told.append(one) if one and one.operation == "Annotating" else None)
    try:
        nb.annotate(notes, "bundled_small", device="cpu")
        of_list = told.copy()
        told.clear()
        nb.annotate(iter(notes), "bundled_small", device="cpu")
    finally:
        stop()

    assert (of_list[0].size_done, of_list[-1].size_done) == (0, of_list[-1].size)
    assert of_list[-1].size == sum(len(note) + 1 for note in notes)
    assert [one.size_done for one in of_list] == sorted(one.size_done for one in of_list)
    last = max(one.completed for one in of_list if one.completed < len(notes))
    assert len({one.size_done for one in of_list if one.completed == last}) > 3  # The long text is seen to go on.
    assert {one.size for one in told} == {None}


def test_a_line_can_be_asked_for_at_any_moment():
    """A line can be asked for while something is heard, before each of its statements, as the thread that draws does."""
    course, lines = ProgressHistory(0.0), []

    def between(_frame, _event, _argument):
        lines.append(course.snapshot(9.0))
        return between

    for done in range(4):
        course.record(of_texts(done), float(done))
    before = sys.gettrace()
    sys.settrace(lambda frame, *_event: between if frame.f_code is ProgressHistory.record.__code__ else None)
    try:
        course.record(ProgressEvent("Comparing", "bundled", 0, 20, "turn"), 4.0)
    finally:
        sys.settrace(before)

    assert {one.activity.operation for one in lines} == {"Annotating", "Comparing"}
    assert all((one.eta_seconds is None) == (one.activity.operation == "Comparing") for one in lines)


class Page:
    """A surface that keeps what is drawn, and tells that something was."""

    def __init__(self):
        self.lines = []
        self.drawn = threading.Event()

    def draw(self, line):
        """Keep a line."""
        self.lines.append(line)
        self.drawn.set()


def threads():
    """Return the threads that draw."""
    return [one for one in threading.enumerate() if one.name == "openmed_nb progress"]


def watched(patience=0.001):
    """Return listeners with a page on which what is under way is drawn."""
    page = Page()
    return EventDispatcher(ProgressBar({}, lambda _environ: page, patience)), page


@pytest.mark.parametrize(
    ("error", "end"), [(None, "finished"), (ValueError, "stopped"), (KeyboardInterrupt, "stopped")]
)
def test_a_line_is_drawn_while_a_step_takes_long(error, end):
    """A line is drawn while a step goes on without telling, says at the end how it ended, and no thread is left."""
    listeners, page = watched()
    with pytest.raises(error) if error else nullcontext(), listeners.operation(), listeners.operation():
        listeners.notify(ProgressEvent(LOADING, "bundled"))
        assert page.drawn.wait(60)
        if error:
            raise error

    assert page.lines[0].outcome == ""
    assert [line.outcome for line in page.lines if line.outcome] == [end]
    assert page.lines[-1].activity == ProgressEvent(LOADING, "bundled")
    assert threads() == []


def test_what_is_quick_is_not_drawn():
    """Of a verb that is done before anybody waits nothing is drawn, and no thread is left."""
    listeners, page = watched(patience=3600)
    with listeners.operation():
        listeners.notify(of_texts(300))

    assert (page.lines, threads()) == ([], [])


def test_the_line_says_what_was_told_last():
    """The line is of the last step that was told; each verb begins a new line."""
    listeners, page = watched()
    for model in ("one", "two"):
        page.drawn.clear()
        with listeners.operation():
            for _ in listeners.track("Comparing", model, range(3), "turn"):
                page.drawn.wait(60)
        assert page.lines[-1].activity == ProgressEvent("Comparing", model, 3, 3, "turn")
        assert page.lines[-1].outcome == "finished"


@pytest.mark.parametrize("activity", [ProgressEvent(IMPORTING, "torch"), ProgressEvent(RELEASING, "memory")])
def test_what_keeps_the_interpreter_is_drawn_before_it_begins(activity):
    """An import and a collection of garbage are drawn before, because nothing can be drawn while they go on."""
    listeners, page = watched(patience=3600)
    with listeners.operation():
        listeners.notify(ProgressEvent(LOADING, "bundled"))
        assert page.lines == []
        listeners.notify(activity)
        assert page.lines[0].activity == activity

    assert [line.outcome for line in page.lines] == ["", "finished"]


def test_a_collection_is_drawn_before_it_begins():
    """Before garbage is collected everywhere the line is drawn, whatever is under way; nothing of that is left at the end."""
    listeners, page = watched(patience=3600)
    callbacks, drawn_before = gc.callbacks.copy(), []
    with listeners.operation():
        listeners.notify(of_texts(1))
        gc.collect(1)
        assert page.lines == []
        gc.callbacks.append(lambda *_phase: drawn_before.append(page.drawn.is_set()))
        gc.collect()
        gc.callbacks.pop()

    assert drawn_before[0]
    assert [line.outcome for line in page.lines] == ["", "finished"]
    assert gc.callbacks == callbacks


class Interrupted(Page):
    """A surface whose last line is interrupted."""

    def draw(self, line):
        """Keep a line; raise what Ctrl-C raises at the end."""
        super().draw(line)
        if line.outcome:
            raise KeyboardInterrupt


def test_an_interrupt_of_the_last_line_leaves_nothing_behind():
    """Where the last line is interrupted, listeners look again all the same, and the next verb has a line of its own."""
    pages, heard = [Interrupted(), Page()], []
    left = iter(pages)
    listeners = EventDispatcher(ProgressBar({}, lambda _environ: next(left), 0.001))
    listeners.subscribe(heard.append)
    for page, error in zip(pages, (KeyboardInterrupt, None), strict=True):
        with pytest.raises(error) if error else nullcontext(), listeners.operation():
            listeners.notify(of_texts(1))
            assert page.drawn.wait(60)

    assert heard == [of_texts(1), None] * 2
    assert pages[1].lines[-1].outcome == "finished"
    assert threads() == []


def in_thread(listeners):
    """Tell what a verb in another thread does."""
    thread = threading.Thread(target=verb, args=[listeners])
    thread.start()
    thread.join()


def verb(listeners, **options):
    """Tell what a verb does."""
    with listeners.operation(**options):
        listeners.notify(ProgressEvent(LOADING, "bundled"))


@pytest.mark.parametrize(
    "quiet",
    [
        in_thread,
        lambda listeners: verb(listeners, progress=False),
        lambda listeners: listeners.notify(ProgressEvent(LOADING, "bundled")),
    ],
    ids=["another thread", "progress=False", "no verb"],
)
def test_what_shows_nothing(quiet):
    """Nothing is drawn for another thread, without progress, and of what belongs to no verb; a listener hears it all the same."""
    listeners, page = watched()
    heard = []
    listeners.subscribe(heard.append)
    quiet(listeners)

    assert threads() == []
    assert page.lines == []
    assert heard[0] == ProgressEvent(LOADING, "bundled")


def test_a_verb_without_progress_within_another():
    """A verb without progress shows nothing of itself in the line of the verb that called it, which goes on."""
    listeners, page = watched()
    with listeners.operation():
        listeners.notify(of_texts(0))
        verb(listeners, progress=False)
        page.drawn.wait(60)

    assert page.lines[-1].activity == of_texts(0)


@pytest.mark.parametrize(
    ("parent", "asked"),
    [
        ({"header": {"msg_type": "execute_request"}, "content": {"allow_stdin": True}}, True),
        ({"header": {"msg_type": "execute_request"}, "content": {"allow_stdin": False}}, False),
        ({"header": {"msg_type": "comm_msg"}, "content": {"data": {}}}, False),
        ({}, False),
    ],
    ids=["a person", "nbval and nbconvert", "a click", "nothing yet"],
)
def test_who_sees_a_line(parent, asked):
    """A line is for a person who runs a cell: not for what runs notebooks by itself, nor for a click, which the panel shows."""
    assert is_interactive(parent) is asked


class Terminals:
    """A stream that is a terminal, or is not."""

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
def test_a_script_shows_lines_in_a_terminal(environ, terminal, shown, monkeypatch):
    """A script shows lines in a terminal, not in a file; a variable switches them off."""
    monkeypatch.setattr(sys, "stderr", Terminals(terminal))

    assert isinstance(detect_output(environ), TerminalOutput) is shown


def closed():
    """Return a stream that is closed."""
    stream = io.StringIO()
    stream.close()
    return stream


def hung_up():
    """Return the stream of a terminal whose window is closed."""
    window, terminal = pty.openpty()
    os.close(window)
    return os.fdopen(terminal, "w")


@pytest.mark.parametrize("stream", [closed, hung_up])
def test_a_terminal_that_is_gone_ends_no_verb(stream):
    """Where the terminal is closed during a long verb, nothing is drawn any more, and the verb goes on."""
    terminal = TerminalOutput(stream())
    terminal.draw(ProgressLine(of_texts(1), 1.0))
    terminal.draw(ProgressLine(of_texts(1), 1.0, "stopped"))


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


def test_in_a_terminal():
    """In a terminal one line is drawn over and over, cut to the width, and ends as a line of its own that says so."""
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
    ends = [line for line in lines if "finished after" in line]
    assert len(ends) == 1
    assert ends[0].startswith("Annotating: bundled_small on cpu, 40 texts, finished after")
    assert max(map(len, lines)) < 80
