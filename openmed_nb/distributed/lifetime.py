"""The thread in which a cluster lives, and what clusters change of the process and of Dask's settings meanwhile."""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import logging
import os
import signal
import threading
import warnings
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from concurrent.futures import Future, wait
from contextlib import AbstractAsyncContextManager, AbstractContextManager
from typing import Any, Generic, TypeVar

from ..errors import OpenMedWarning, cause

Value = TypeVar("Value")

END_TIMEOUT = 30.0  # Seconds that the end of a cluster is waited for; what takes longer goes on in its thread.


class Lifetime(Generic[Value]):
    """An asynchronous context that a thread enters, and leaves, however far it was entered, when asked to or at exit."""

    def __init__(self, context: AbstractAsyncContextManager[Value]) -> None:
        self._context = context
        self._thread = threading.Thread(target=self._live, name="openmed_nb cluster", daemon=True)
        self._asked = False
        self._stop: Callable[[], None] | None = None
        self._begun: Future[Value] = Future()
        self._over: Future[None] = Future()
        self._failure: BaseException | None = None

    def begin(self) -> Value:
        """Enter the context, and return what it gives; where it cannot be entered, it has been left when this raises."""
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


class Shared:
    """A context that several share at once: the first enters it, and the last leaves it, whichever that is."""

    def __init__(self, make: Callable[[], AbstractContextManager[object]]) -> None:
        self._make = make
        self._lock = threading.Lock()
        self._users = 0
        self._entered = contextlib.ExitStack()

    def __enter__(self) -> None:
        with self._lock:
            if not self._users:
                self._entered.enter_context(self._make())
            self._users += 1

    def __exit__(self, *_error: object) -> None:
        with self._lock:
            self._users -= 1
            if not self._users:
                self._entered.close()


SILENT = logging.CRITICAL
# From which level on Dask logs: its errors become errors of this package, and in its own words they can hold those of a note.

SET_BY_DASK = ("PYTHONHASHSEED", "__DASK_PARENT_PID")
# The variables that Dask sets in this process for those that it starts (its nanny, and ``distributed.proctitle``).


@contextlib.contextmanager
def discreet() -> Iterator[None]:
    """Have a process in which Dask keeps and logs no text, and restore afterwards what it changes by itself."""
    import dask.config
    from distributed.utils import silence_logging_cmgr

    settings = {
        # Dask keeps the last messages of each connection for those who look for its errors
        # (``BatchedSend.recent_message_log``): here these would be thousands of notes.
        "distributed.admin.low-level-log-length": 0,
        # Of two clients that are closed in the order in which they were made, the second leaves this as the first set it.
        "scheduler": dask.config.get("scheduler", None),
    }
    before = {name: os.environ.get(name) for name in SET_BY_DASK}
    try:
        with silence_logging_cmgr(SILENT), dask.config.set(settings):
            yield
    finally:
        for name, value in before.items():
            os.environ.pop(name, None)
            if value is not None:
                os.environ[name] = value


WHILE_CLUSTERS_LIVE = Shared(discreet)
# Every cluster is in it from before its start until after its end, in the thread of its own.


ALLOWED_FAILURES = 2  # How many workers a text may end before it is given up with the next: three in all.

START_TIMEOUT = 120.0  # Seconds that a start may take.

START_SETTINGS: dict[str, Any] = {
    # Dask would set the threads of every process to one, this one included; here they are set for each worker.
    "distributed.nanny.pre-spawn-environ": {},
    # No page is served: Dask opens a port for them all the same, which is kept to the computer itself.
    "distributed.scheduler.http.routes": [],
    "distributed.worker.http.routes": [],
    # So nobody sees what its profiler finds, which looks at a worker's stack every 10 ms.
    "distributed.worker.profile.enabled": False,
}

NO_PAGES = {"dashboard": False, "dashboard_address": "127.0.0.1:0"}

STARTING = threading.Lock()  # Held by the start whose settings are in Dask's, of which a process has one set.
CHECK_TURN = 0.02  # Seconds between two looks of a start whether its turn has come.


@contextlib.asynccontextmanager
async def settings_of_start(settings: Mapping[str, Any]) -> AsyncIterator[None]:
    """Have Dask's settings for the start of one cluster; that of another waits meanwhile, and can be called off."""
    import dask.config

    while not STARTING.acquire(blocking=False):  # noqa: ASYNC110 - starts have loops of their own
        await asyncio.sleep(CHECK_TURN)
    try:
        with dask.config.set({**START_SETTINGS, **settings}):
            yield
    finally:
        STARTING.release()


async def in_time(start: asyncio.Future[Any], timeout: float) -> None:
    """Wait for a start, which goes on where it takes longer, or where nobody waits for it any more."""
    done, _ = await asyncio.wait([start], timeout=timeout)
    if not done:
        raise TimeoutError(f"it takes longer than {timeout:g} s")
    start.result()
