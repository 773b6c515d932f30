"""The thread that runs the cells: where a click's work is done, and when; in plain Python and in an event loop."""

import asyncio
import os
import signal
import threading

import pytest

from helpers.threads import run_in_thread
from openmed_nb.notebook.panel.model import MainThreadRunner


def test_interrupt_without_a_loop_reaches_the_caller():
    """An interrupt of a function that runs immediately interrupts the caller."""
    with pytest.raises(KeyboardInterrupt):
        MainThreadRunner().run(lambda: os.kill(os.getpid(), signal.SIGINT) or threading.Event().wait(60))


@pytest.fixture
def deaf():
    """This process without interrupts, as a kernel is between two messages."""
    former = signal.signal(signal.SIGINT, signal.SIG_IGN)
    yield
    signal.signal(signal.SIGINT, former)


def interrupt():
    """Interrupt this process, and wait for that."""
    os.kill(os.getpid(), signal.SIGINT)
    threading.Event().wait(60)


def test_loop_runs_functions_in_order():
    """What several threads ask for is done in the order of asking."""

    async def cell():
        cells, log = MainThreadRunner(), []
        for number in range(20):
            run_in_thread(lambda number=number: cells.run(lambda: log.append(number)))
        assert log == []
        await asyncio.sleep(0)
        return log

    assert asyncio.run(cell()) == list(range(20))


@pytest.mark.usefixtures("deaf")
def test_interrupt_ends_one_function_of_the_loop():
    """An interrupt ends what was handed over, and neither the loop nor what comes next; the handler is as before."""

    async def cell():
        cells, log = MainThreadRunner(), []
        run_in_thread(lambda: cells.run(lambda: interrupt() or log.append("not interrupted")))
        run_in_thread(lambda: cells.run(lambda: log.append("next")))
        await asyncio.sleep(0)
        os.kill(os.getpid(), signal.SIGINT)
        return log

    assert asyncio.run(cell()) == ["next"]
    assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN


@pytest.mark.usefixtures("deaf")
def test_loop_continues_after_an_error():
    """The event loop reports the error and continues; the signal handler is restored."""

    async def cell():
        errors = []
        asyncio.get_running_loop().set_exception_handler(lambda _loop, context: errors.append(context["exception"]))
        cells = MainThreadRunner()
        run_in_thread(lambda: cells.run(lambda: 1 / 0))
        await asyncio.sleep(0)
        return errors

    assert [type(error) for error in asyncio.run(cell())] == [ZeroDivisionError]
    assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN
