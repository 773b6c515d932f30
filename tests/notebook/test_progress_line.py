"""Tests of the progress line that a front end receives from a real kernel."""

import pytest

SLOW = """
import time
import openmed_nb as nb
from openmed_nb.session import SESSION

def notes(until):
    for number in range(40):
        while number == 30 and not until():
            time.sleep(0.01)
        yield "She has asthma." * 200

def drawn():
    return SESSION._listeners._indicator._drawing._drawn.is_set()
"""
"""Notes that keep coming until something is so, such as that a line was drawn."""

RUN = "found = nb.annotate(notes({until}), 'bundled_small')"


@pytest.fixture
def seen(kernel):
    """Return a function that runs a cell, by default as an interactive front end, and returns the messages and the reply."""
    kernel.run(SLOW)

    def seen(code, at=lambda _message: None, person=True):
        messages = []

        def record(message):
            messages.append(message)
            at(message)

        client = kernel.client
        reply = client.execute_interactive(
            code, allow_stdin=person, output_hook=record, stop_on_error=False, timeout=240
        )
        shown = [
            message
            for message in messages
            if message["msg_type"] in ("display_data", "update_display_data", "stream", "error")
        ]
        return shown, reply["content"]

    return seen


def text_of(message):
    """Return the text form of an output."""
    return message["content"]["data"]["text/plain"]


def test_interactive_run_updates_one_output(seen):
    """A person sees one output, which changes in place while the cell runs, and says at the end that it is finished."""
    shown, reply = seen(RUN.format(until="drawn"))

    assert reply["status"] == "ok"
    assert [message["msg_type"] for message in shown] == ["display_data", *["update_display_data"] * (len(shown) - 1)]
    assert len({message["content"]["transient"]["display_id"] for message in shown}) == 1
    assert text_of(shown[-1]).startswith("Annotating: bundled_small on cpu, 40 texts, finished after ")
    assert "<div>Annotating: bundled_small on cpu, 40 texts" in shown[-1]["content"]["data"]["text/html"]


NEVER = "lambda: SESSION._listeners._indicator._drawing is None"


@pytest.mark.parametrize("code", [RUN, "%%capture kept\n" + RUN], ids=["a runner", "capture"])
def test_non_interactive_run_shows_no_progress_line(seen, code):
    """Batch runs, such as nbval and nbconvert, and captured cells have no progress line."""
    shown, reply = seen(code.format(until=NEVER), person="%%capture" in code)

    assert (shown, reply["status"]) == ([], "ok")


@pytest.mark.parametrize("off", ["progress=False", "environ"])
def test_progress_line_can_be_disabled(seen, off):
    """progress=False and OPENMED_NB_PROGRESS=0 show nothing."""
    code = RUN.format(until=NEVER)
    if off == "environ":
        code = f"import os\nos.environ['OPENMED_NB_PROGRESS'] = '0'\n{code}\ndel os.environ['OPENMED_NB_PROGRESS']"
    else:
        code = code.replace("'bundled_small'", "'bundled_small', progress=False")
    shown, reply = seen(code)

    assert (shown, reply["status"]) == ([], "ok")


def test_an_interrupt_stops_it(seen, kernel):
    """An interrupt ends the work and the line, which says that it stopped; no thread of it is left."""
    interrupted = []

    def interrupt(message):
        if message["msg_type"] == "display_data" and not interrupted:
            interrupted.append(kernel.interrupt())

    shown, reply = seen(RUN.format(until="lambda: False"), at=interrupt)

    assert reply["status"] == "error"
    assert "stopped after " in text_of(
        [message for message in shown if message["msg_type"] == "update_display_data"][-1]
    )
    names = "[one.name for one in __import__('threading').enumerate()]"
    assert "openmed_nb progress" not in kernel.value(names)
