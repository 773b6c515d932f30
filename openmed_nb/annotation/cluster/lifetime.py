"""The life of a cluster in a thread of its own: an interrupt reaches those that wait for it, and never what starts or ends it."""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import signal
import warnings
from collections.abc import Callable
from concurrent.futures import Future, wait
from contextlib import AbstractAsyncContextManager
from threading import Thread
from typing import Generic, TypeVar

from ...errors import OpenMedWarning, cause

Value = TypeVar("Value")

END_TIMEOUT = 30.0
"""How long the end of a cluster is waited for, in seconds; what takes longer goes on in its thread."""


def keep_interrupts_out() -> None:
    """Keep Ctrl-C from this thread, and from every thread and process that starts here: they inherit what it blocks.

    A terminal and Jupyter send it to the whole group of processes, and a worker that gets it leaves for good. Python's
    watcher of shared memory, which multiprocessing starts when it first needs it, is there before: until Python 3.12, its
    start unblocks interrupts.
    """
    if hasattr(signal, "pthread_sigmask"):
        from multiprocessing import resource_tracker

        resource_tracker.ensure_running()
        signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGINT])


class Lifetime(Generic[Value]):
    """An asynchronous context that a thread enters, and leaves when it is told to, or where this process ends.

    Args:
        context: The context; it is left however far it was entered.

    Example:
        >>> @contextlib.asynccontextmanager
        ... async def room():
        ...     yield "open"
        ...     print("closed")
        >>> life = Lifetime(room())
        >>> life.begin()
        'open'
        >>> life.end()
        closed
        >>> life.end()
    """

    def __init__(self, context: AbstractAsyncContextManager[Value]) -> None:
        self._context = context
        self._thread = Thread(target=self._live, name="openmed_nb cluster", daemon=True)
        self._asked = False
        self._stop: Callable[[], None] | None = None
        self._begun: Future[Value] = Future()
        self._over: Future[None] = Future()
        self._failure: BaseException | None = None

    def begin(self) -> Value:
        """Enter the context.

        Returns:
            What it gives.

        Raises:
            Exception: What it cannot be entered for; it has been left then.
        """
        atexit.register(self.end)
        self._thread.start()
        return self._begun.result()

    def end(self) -> None:
        """Leave the context, and wait until it is left; an interrupted wait can be taken up again.

        Nothing is raised, because this stands where another error may be under way: what goes wrong is warned of.
        """
        self._asked = True
        if self._stop is not None:
            self._stop()
        if self._thread.is_alive():
            # An interrupted Thread.join() takes its thread for ended (Python 3.11), so something else is waited for.
            if not wait([self._over], END_TIMEOUT).done:
                what = f"The cluster has not ended after {END_TIMEOUT:g} s."
                warnings.warn(OpenMedWarning(f"{what} Call close() to wait again."), stacklevel=2)
                return
            self._thread.join()
        atexit.unregister(self.end)
        if self._failure is not None:
            failure, self._failure = self._failure, None
            what = f"The cluster did not end as it should: {cause(failure)}."
            warnings.warn(OpenMedWarning(f"{what} Look whether processes of it are left."), stacklevel=2)

    def _live(self) -> None:
        """Run the context in a loop of its own; all that it began there ends with the loop."""
        try:
            keep_interrupts_out()
            asyncio.run(self._serve())
        except BaseException as error:  # noqa: BLE001 - it belongs to the thread that waits
            if self._begun.done():
                self._failure = error
            else:
                self._begun.set_exception(error)
        self._over.set_result(None)

    async def _serve(self) -> None:
        """Enter the context, and leave it once that is asked for, also on the way in."""
        loop, asked = asyncio.get_running_loop(), asyncio.Event()
        entering = asyncio.current_task()

        def stop() -> None:
            if entering is not None and not (asked.is_set() or self._begun.done()):
                entering.cancel()
            asked.set()

        def stop_from_outside() -> None:
            with contextlib.suppress(RuntimeError):  # The loop has ended already.
                loop.call_soon_threadsafe(stop)

        self._stop = stop_from_outside
        if self._asked:
            return
        async with self._context as value:
            self._begun.set_result(value)
            await asked.wait()
