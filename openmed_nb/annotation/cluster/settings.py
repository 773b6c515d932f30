"""What clusters change of the whole process: some while any of them lives, some for the time of one start."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import threading
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from typing import Any

ALLOWED_FAILURES = 2
"""How many workers a text may end before it is given up with the next: three in all."""

START: dict[str, Any] = {
    "distributed.nanny.pre-spawn-environ": {},
    "distributed.scheduler.http.routes": [],
    "distributed.worker.http.routes": [],
    "distributed.worker.profile.enabled": False,
}
"""Dask would set the threads of every process to one, this one included; here they are set for each worker. No page is
served: Dask opens a port for them all the same, which is kept to the computer itself. So nobody sees what its profiler finds,
which looks at a worker's stack every 10 ms."""

FORGETFUL = {"distributed.admin.low-level-log-length": 0}
"""Dask keeps the last messages of each connection for those who look for its errors (``BatchedSend.recent_message_log``):
here these would be thousands of notes."""

PAGES = {"dashboard": False, "dashboard_address": "127.0.0.1:0"}

SILENT = logging.CRITICAL
"""What Dask logs: its errors are told as ours, and in its own words they can hold those of a note."""

SET_BY_DASK = ("PYTHONHASHSEED", "__DASK_PARENT_PID")
"""The variables that Dask sets in this process for those that it starts (its nanny, and ``distributed.proctitle``)."""

LOOK = 0.02
"""How often a start looks whether its turn has come, in seconds."""


class Shared:
    """A context that several share at once: the first enters it, and the last leaves it, whichever that is.

    Args:
        make: Makes the context.

    Example:
        >>> @contextlib.contextmanager
        ... def room():
        ...     print("light")
        ...     yield
        ...     print("dark")
        >>> shared = Shared(room)
        >>> first, second = contextlib.ExitStack(), contextlib.ExitStack()
        >>> first.enter_context(shared)
        light
        >>> second.enter_context(shared)
        >>> first.close()
        >>> second.close()
        dark
    """

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


@contextlib.contextmanager
def discreet() -> Iterator[None]:
    """Have a process in which Dask keeps and logs no text, and give back afterwards what it changes by itself.

    Its clients are no help with that: of two that are closed in the order in which they were made, the second leaves
    ``scheduler`` as the first had set it.
    """
    import dask.config
    from distributed.utils import silence_logging_cmgr

    settings = {**FORGETFUL, "scheduler": dask.config.get("scheduler", None)}
    with same_environment(), silence_logging_cmgr(SILENT), dask.config.set(settings):
        yield


@contextlib.contextmanager
def same_environment() -> Iterator[None]:
    """Give the variables back that Dask sets in this process."""
    before = {name: os.environ.get(name) for name in SET_BY_DASK}
    try:
        yield
    finally:
        for name, value in before.items():
            os.environ.pop(name, None)
            if value is not None:
                os.environ[name] = value


WHILE_CLUSTERS_LIVE = Shared(discreet)
"""Every cluster is in it from before its start until after its end, in the thread of its own."""

TURN = threading.Lock()
"""Which start has its settings in Dask's, of which a process has one set."""


@contextlib.asynccontextmanager
async def for_a_start(settings: Mapping[str, Any]) -> AsyncIterator[None]:
    """Have Dask's settings for the start of one cluster; that of another waits meanwhile, and can be called off."""
    import dask.config

    while not TURN.acquire(blocking=False):  # noqa: ASYNC110 - starts have loops of their own
        await asyncio.sleep(LOOK)
    try:
        with dask.config.set({**START, **settings}):
            yield
    finally:
        TURN.release()
