"""Tests of interrupts of long operations in a real kernel: the operation stops and leaves nothing behind."""

import pytest

pytestmark = [pytest.mark.slow, pytest.mark.real_computer]

SETUP = """
import os, tempfile, threading
import psutil
import openmed_nb as nb
from openmed_nb.session import SESSION

NOTES = ["Patient has type 2 diabetes mellitus and hypertension. " * 20] * 4000

def there():
    names = {one.name for one in threading.enumerate() if not one.name.startswith("ThreadPoolExecutor")}
    return names, psutil.Process().children(), os.listdir(tempfile.gettempdir()), os.listdir()
"""
"""Texts that take minutes, and what there is of threads, processes and files; transformers keeps threads that wait."""

EAGER = "SESSION._listeners._indicator._draw_interval = 0.01"
"""From now on, lines are drawn at once."""

WORKS = "nb.load_pipeline('bundled_small')('She has asthma.')[0]['word']"

OPERATIONS = {
    "load": "SESSION.unload(); nb.load_pipeline('bundled')",
    "annotate": "nb.annotate(NOTES, 'bundled_small')",
    "sweep": "nb.sweep('bundled_small', seconds=600)",
    "compare": "nb.compare('bundled_small', seconds=600)",
    "parity": "nb.runbook.parity('bundled_small', NOTES, dtype='bfloat16')",
    "validate_precision": "nb.runbook.validate_precision('bundled_small', NOTES)",
    "profile": "nb.runbook.profile('bundled_small', steps=100000)",
    "forecast": "nb.runbook.forecast('bundled_small')",
    "doctor": "nb.doctor('bundled')",
    "logbook": "nb.logbook()",
    "handoff": "nb.handoff('bundle', 'bundled_small')",
    "report": "nb.report('reported', quick=True)",
    "release": "nb.release()",
}


@pytest.fixture(scope="module")
def fresh(running_kernel, tmp_path_factory):
    """A kernel of its own, which has not imported torch yet, with a folder of its own for what is temporary."""
    folder = tmp_path_factory.mktemp("temporary")
    with running_kernel(TMPDIR=str(folder), OPENMED_NB_DATA=str(folder)) as kernel:
        kernel.run(SETUP)
        yield kernel


def interrupted(kernel, code):
    """Run a cell, interrupt it when its progress line appears, and return the reply and the last line."""

    def interrupt(message):
        if message["msg_type"] == "display_data":
            kernel.interrupt()

    reply = kernel.run(code, interactive=True, on_message=interrupt)
    lines = [message for message in reply.outputs if message["msg_type"] in ("display_data", "update_display_data")]
    return reply, lines[-1]["content"]["data"]["text/plain"]


def check(kernel, code, left=()):
    """Interrupt a cell, and hold that its line and its error say so, that nothing else is left, and that a text can be read."""
    kernel.run("before = there()")
    reply, line = interrupted(kernel, code)

    assert reply.error[0] in {"KeyboardInterrupt", "RunInterrupted"}
    assert len(reply.error[2]) == 1
    assert "stopped after " in line
    assert kernel.value(WORKS) == "asthma"
    new = kernel.value("[sorted(map(str, set(now) - set(one))) for one, now in zip(before, there())]")
    assert new == [[], [], [], [*left]]


def test_interrupt_while_libraries_are_imported(fresh):
    """The first load stops after the imports of torch and transformers, and the next load works."""
    reply, line = interrupted(fresh, OPERATIONS["load"])

    assert (reply.error[0], reply.error[2]) == ("KeyboardInterrupt", ["KeyboardInterrupt: interrupted."])
    assert line.startswith("Importing: torch, stopped after ")
    assert fresh.value(WORKS) == "asthma"


@pytest.mark.parametrize("operation", OPERATIONS)
def test_interrupt_of_long_operation(fresh, operation):
    """Each ends before it is done, says that it stopped, and leaves a session that works, and no thread, process or file.

    A report keeps its finished steps, so that it can resume.
    """
    fresh.run(f"{WORKS}\n{EAGER}")  # What is loaded once is there.

    check(fresh, OPERATIONS[operation], left=["reported"] if operation == "report" else ())
