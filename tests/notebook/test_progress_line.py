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
        yield f"She has asthma. {number}"

def drawn():
    return SESSION._listeners._indicator._drawing._is_drawn
"""
"""Notes that keep coming until something is so, such as that a line was drawn."""

RUN = "found = nb.annotate(notes({until}), 'bundled_small')"


@pytest.fixture
def slow(kernel):
    """A kernel with slow notes."""
    kernel.run(SLOW)
    return kernel


def text_of(message):
    """Return the text form of an output."""
    return message["content"]["data"]["text/plain"]


def test_interactive_run_updates_one_output(slow):
    """A person sees one output, which changes in place while the cell runs, and says at the end that it is finished."""
    reply = slow.run(RUN.format(until="drawn"), interactive=True)
    first, *updates = reply.outputs

    assert reply.status == "ok"
    assert first["msg_type"] == "display_data"
    assert {message["msg_type"] for message in updates} == {"update_display_data"}
    assert len({message["content"]["transient"]["display_id"] for message in reply.outputs}) == 1
    assert text_of(updates[-1]).startswith("Done in ")
    assert ">Done in " in updates[-1]["content"]["data"]["text/html"]


NEVER = "lambda: SESSION._listeners._indicator._drawing is None"
SILENT_CELLS = {
    "a runner": RUN,
    "capture": f"%%capture kept\n{RUN}",
    "progress=False": RUN.replace("'bundled_small'", "'bundled_small', progress=False"),
    "environ": f"import os\nos.environ['OPENMED_NB_PROGRESS'] = '0'\n{RUN}\ndel os.environ['OPENMED_NB_PROGRESS']",
}


@pytest.mark.parametrize("name", SILENT_CELLS)
def test_progress_line_is_not_shown(slow, name):
    """Batch runs, such as nbval and nbconvert, captured cells, an argument and a variable have no progress line."""
    reply = slow.run(SILENT_CELLS[name].format(until=NEVER), interactive=name != "a runner")

    assert (reply.outputs, reply.status) == ([], "ok")


def test_interrupt_stops_the_line(slow):
    """An interrupt ends the work and the line, which says that it stopped; no thread of it is left."""

    def interrupt(message):
        if message["msg_type"] == "display_data":
            slow.interrupt()

    reply = slow.run(RUN.format(until="lambda: False"), interactive=True, on_message=interrupt)
    updates = [message for message in reply.outputs if message["msg_type"] == "update_display_data"]

    assert reply.status == "error"
    assert "stopped after " in text_of(updates[-1])
    assert "openmed_nb progress" not in slow.value("[one.name for one in __import__('threading').enumerate()]")
