"""Starting a cluster of Dask, on this computer or on others, and ending it with every process of it."""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import logging
import multiprocessing
import os
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import AbstractAsyncContextManager
from typing import TYPE_CHECKING, Any

from ...errors import ClusterUnusable, ConfigurationError, OpenMedError, cause
from ...interface.display import Report, Shown
from .lifetime import Lifetime
from .members import Members
from .plans import WorkerPlan

if TYPE_CHECKING:
    from distributed import Client, Security, SpecCluster

ALLOWED_FAILURES = 2
"""How many workers a text may end before it is given up with the next: three in all."""

START_TIMEOUT = 120.0
"""How long workers may take to come, in seconds."""

MAIN_GUARD = "In a script, call it under if __name__ == '__main__': workers import the script."

START: dict[str, Any] = {
    "distributed.nanny.pre-spawn-environ": {},
    "distributed.scheduler.http.routes": [],
    "distributed.worker.http.routes": [],
}
"""Dask would set the threads of every process to one, this one included; here they are set for each worker. No page is
served: Dask opens a port for them all the same, which is kept to the computer itself."""

FORGETFUL = {"distributed.admin.low-level-log-length": 0}
"""Dask keeps the last messages of each connection for those who look for its errors (``BatchedSend.recent_message_log``):
here these would be thousands of notes."""

PAGES = {"dashboard": False, "dashboard_address": "127.0.0.1:0"}

SILENT = logging.CRITICAL
"""What Dask logs: its errors are told as ours, and in its own words they can hold those of a note."""

SET_BY_DASK = ("PYTHONHASHSEED", "__DASK_PARENT_PID")
"""The variables that Dask sets in this process for those that it starts (its nanny, and ``distributed.proctitle``)."""


class Cluster(Shown):
    """A cluster that was started here; it ends with :meth:`close`, or with its ``with`` block.

    Attributes:
        client: The ``dask.distributed.Client``, for ``annotate(client=...)`` and for whatever else Dask does.
        members: Who takes part, as each worker said when it started.
    """

    def __init__(self, client: Client, members: Members, end: Callable[[], None]) -> None:
        self.client, self.members, self._end = client, members, end

    def __enter__(self) -> Cluster:  # noqa: PYI034 - Self came with Python 3.11
        return self

    def __exit__(self, *_error: object) -> None:
        self.close()

    def close(self) -> None:
        """End every process of the cluster, and wait for that; where it was interrupted, a second time waits for the rest."""
        self._end()

    def to_dict(self) -> dict[str, Any]:
        """Return who takes part, as plain mappings, lists and strings."""
        return self.members.to_dict()

    def report(self) -> Report:
        """Return who takes part."""
        return self.members.report()


def checked_security(security: Any) -> Security:
    """Return certificates that processes know each other by: those of a person, or some that are made now.

    Raises:
        ConfigurationError: For anything else, and where none can be made.
    """
    from distributed import Security

    if isinstance(security, Security):
        return security
    if security is not None:
        what = f"security cannot be {type(security).__name__}."
        raise ConfigurationError(what, "Pass a distributed.Security, or leave it out.")
    try:
        return Security.temporary()
    except ImportError as error:
        what = f"No certificates can be made: {cause(error)}."
        raise ConfigurationError(what, "Install them: python -m pip install 'openmed-nb[cluster]'.") from error


def end_import_of_script() -> None:
    """End a worker that comes to start a cluster while it imports the script that started it, in one line.

    Raises:
        SystemExit: There; multiprocessing would refuse to start a process too (its ``_check_not_importing_main``).
    """
    if getattr(multiprocessing.current_process(), "_inheriting", False):
        raise SystemExit(f"A worker came to start a cluster of its own. {MAIN_GUARD}")


def begin(
    cluster: AbstractAsyncContextManager[SpecCluster],
    security: Security,
    count: int,
    introduce: Callable[[Client], Members],
) -> Cluster:
    """Start a cluster and return it once its workers said who they are; where that fails, nothing of it is left.

    Args:
        cluster: Starts a cluster of Dask, and ends it.
        security: The certificates that processes know each other by.
        count: How many workers it has.
        introduce: Asks the workers who they are.

    Raises:
        ClusterUnusable: Where it does not start.
    """
    life = Lifetime(connected(cluster, security))
    try:
        client = started(life, count)
        return Cluster(client, introduce(client), life.end)
    except BaseException:
        life.end()
        raise


def started(life: Lifetime[Client], count: int) -> Client:
    """Return the client of a cluster once all workers are there."""
    try:
        client = life.begin()
        client.wait_for_workers(count, timeout=START_TIMEOUT)
    except (OpenMedError, ImportError):
        raise
    except Exception as error:  # noqa: BLE001 - Dask raises bare Exceptions where a process does not start
        raise ClusterUnusable(f"The cluster does not start: {cause(error)}.", MAIN_GUARD) from None
    return client


@contextlib.asynccontextmanager
async def connected(cluster: AbstractAsyncContextManager[SpecCluster], security: Security) -> AsyncIterator[Client]:
    """Have a cluster and a client of it, which has a loop of its own for those that use it."""
    import dask.config
    from distributed import Client

    with same_environment(), dask.config.set(FORGETFUL):
        async with cluster as running:
            address = running.scheduler_address
            connecting = asyncio.ensure_future(asyncio.to_thread(Client, address, security=security))
            try:
                client = await asyncio.shield(connecting)
                atexit.register(client.close)  # Where this process ends, no thread can begin for that any more.
                yield client
            finally:
                await close(await connecting)


async def close(client: Client) -> None:
    """Close a client; where this process ends, it is closed already."""
    atexit.unregister(client.close)
    if client.status != "closed":
        await asyncio.to_thread(client.close)


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


@contextlib.asynccontextmanager
async def local_cluster(plans: Sequence[WorkerPlan], security: Security) -> AsyncIterator[SpecCluster]:
    """Have a cluster on this computer that nothing outside of it can reach.

    Args:
        plans: Its workers.
        security: The certificates that processes know each other by.
    """
    import dask.config
    from distributed import Nanny, Scheduler, SpecCluster

    shared = {"host": "127.0.0.1", "protocol": "tls://", "security": security, **PAGES}
    quiet = {"silence_logs": SILENT, "memory_limit": 1 / len(plans)}
    workers = {
        number: {"cls": Nanny, "options": {**shared, **quiet, "nthreads": plan.tasks, "env": plan.environment}}
        for number, plan in enumerate(plans)
    }
    options = {**shared, "port": 0, "allowed_failures": ALLOWED_FAILURES}
    scheduler = {"cls": Scheduler, "options": options}
    cluster = SpecCluster(workers, scheduler, security=security, silence_logs=SILENT, asynchronous=True)
    start = asyncio.ensure_future(cluster)
    try:
        with dask.config.set(START):
            await asyncio.wait_for(asyncio.shield(start), START_TIMEOUT)
        yield cluster
    finally:
        await asyncio.wait([start], timeout=START_TIMEOUT)  # What is half way in cannot be ended.
        await cluster.close()
