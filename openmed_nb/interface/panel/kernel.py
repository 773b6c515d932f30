"""The thread that runs the cells: all that a click asks for happens there, after the cell that runs.

JupyterLab from 4.4 on sends what a widget says over a subshell of the kernel, whose handlers run in a thread of their
own (its setting ``commsOverSubshells``). Tensor work in two threads can crash the process on MPS (pytorch#197805), and
torch's modes, which the simulated MPS uses, count in one thread. So a click is handed to the event loop of the main thread,
and a timer on that loop, not a thread, looks at the memory now and then.
"""

from __future__ import annotations

import asyncio
import signal
import threading
from collections.abc import Callable
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any

ON_ITS_WAY_SECONDS = 0.1
"""How long what was typed before a click may be under way in another thread of the kernel."""


LONGEST_WAIT = timedelta(hours=1)
"""Two clicks that are further apart did not overtake each other: the clock of the page was set."""


class CellThread:
    """The main thread, which runs the cells, and its event loop.

    Args:
        loop: The loop of the kernel; ``None`` is the one that runs, if any does. Without a loop everything is done at once.

    Example:
        >>> done = []
        >>> CellThread().run(lambda: done.append("at once"))
        >>> done
        ['at once']
    """

    def __init__(self, loop: asyncio.AbstractEventLoop | None = None) -> None:
        self._loop = loop or running_loop()

    @property
    def has_loop(self) -> bool:
        """Whether there is an event loop, so that something can be done later."""
        return self._loop is not None

    @property
    def is_here(self) -> bool:
        """Whether the caller may do its work at once: this is the main thread, or there is none to hand it to."""
        return self._loop is None or threading.current_thread() is threading.main_thread()

    def run(self, function: Callable[[], None]) -> None:
        """Run a function in the main thread: at once where this is it, otherwise as soon as no cell runs."""
        if self._loop is None or self.is_here:
            function()
        else:
            self.hand_over(function)

    def hand_over(self, function: Callable[[], None]) -> None:
        """Let the loop of the main thread run a function, as soon as it comes to it; at once where there is no loop."""
        if self._loop is None:
            function()
        else:
            self._loop.call_soon_threadsafe(interruptible, function)

    def soon(self, function: Callable[[], None]) -> None:
        """Run a function in the main thread when all that the page has sent by now is here, and no cell runs."""
        if self._loop is None:
            function()
        else:
            self._loop.call_soon_threadsafe(self._loop.call_later, ON_ITS_WAY_SECONDS, interruptible, function)

    def later(self, seconds: float, function: Callable[[], None]) -> Callable[[], None]:
        """Run a function in the main thread after some seconds, when no cell runs; return what calls it off."""
        if self._loop is None:
            return _nothing
        return self._loop.call_later(seconds, function).cancel


@dataclass(frozen=True)
class Click:
    """When something was clicked, by the clock of the page.

    Clicks on one page come to the main thread by two ways, so that a later one may be there first.

    Attributes:
        page: Which page of a front end; times of two pages do not compare.
        time: When; ``None`` where nobody can tell.
    """

    page: str = ""
    time: datetime | None = None

    def is_before(self, other: Click) -> bool:
        """Tell whether this click is known to be the earlier one.

        Example:
            >>> one, two = Click("page", datetime(2026, 1, 1, 12, 0)), Click("page", datetime(2026, 1, 1, 12, 1))
            >>> one.is_before(two), two.is_before(one), Click().is_before(two)
            (True, False, False)
        """
        if self.page != other.page or self.time is None or other.time is None:
            return False
        return timedelta(0) < other.time - self.time < LONGEST_WAIT


def click_of(shell: Any) -> Click:
    """Return the click that is being answered: what the front end said in the message that a kernel works on.

    What code asks for is none: a cell may have been sent long before it runs, and a thread may outlive its cell.
    """
    header = shell.get_parent().get("header", {})
    if header.get("msg_type") != "comm_msg":
        return Click()
    date = header.get("date")
    return Click(str(header.get("session", "")), date if isinstance(date, datetime) else None)


def kernel_loop(shell: Any) -> asyncio.AbstractEventLoop | None:
    """Return the event loop of the kernel, which runs in its main thread, ``None`` where it has no such loop."""
    loop = getattr(getattr(shell.kernel, "io_loop", None), "asyncio_loop", None)
    return loop if isinstance(loop, asyncio.AbstractEventLoop) else None


def running_loop() -> asyncio.AbstractEventLoop | None:
    """Return the event loop that runs in this thread, ``None`` where none does, as in a script."""
    try:
        return asyncio.get_running_loop()
    except RuntimeError:  # The only way to learn that there is none.
        return None


def interruptible(function: Callable[[], None]) -> None:
    """Run a function so that an interrupt of the kernel can end it.

    While no message is worked on, a kernel ignores interrupts (ipykernel's ``init_signal``).
    """
    if threading.current_thread() is not threading.main_thread():
        function()  # A kernel in another thread gets no interrupts, and Python allows no handlers there.
        return
    former = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        function()
    except KeyboardInterrupt:
        pass  # It came when the work was done: there is nothing to stop, and asyncio would end the kernel's loop.
    finally:
        signal.signal(signal.SIGINT, former)


def _nothing() -> None:
    """Call nothing off."""
