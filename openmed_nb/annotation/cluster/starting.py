"""A cluster of Dask that was started here, wherever its workers are: its beginning, and its end with every process of it."""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import multiprocessing
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from ...errors import ClusterUnusable, OpenMedError, cause
from ...interface.display import Report, Shown
from .lifetime import Lifetime
from .members import Members
from .settings import WHILE_CLUSTERS_LIVE

if TYPE_CHECKING:
    from distributed import Client, Security, SpecCluster

START_TIMEOUT = 120.0
"""How long a start may take, in seconds."""

ARRIVAL_TIMEOUT = 10.0
"""How long workers that have started may take to be known to the scheduler, in seconds."""

MAIN_GUARD = "In a script, call it under if __name__ == '__main__': workers import the script."


class Cluster(Shown):
    """A cluster that was started here; it ends with :meth:`close`, or with its ``with`` block.

    Attributes:
        client: The ``dask.distributed.Client``, for ``annotate(client=...)`` and for whatever else Dask does.
        members: Who takes part, as each worker said when it started.
        closed: Whether it was closed.
    """

    def __init__(self, client: Client, members: Members, end: Callable[[], None]) -> None:
        self.client, self.members, self.closed, self._end = client, members, False, end

    def __enter__(self) -> Cluster:  # noqa: PYI034 - Self came with Python 3.11
        return self

    def __exit__(self, *_error: object) -> None:
        self.close()

    def close(self) -> None:
        """End every process of the cluster, and wait for that; where it was interrupted, a second time waits for the rest."""
        self.closed = True
        self._end()

    def to_dict(self) -> dict[str, Any]:
        """Return who takes part, as plain mappings, lists and strings."""
        return self.members.to_dict()

    def report(self) -> Report:
        """Return who takes part, or took part."""
        report = self.members.report()
        return replace(report, title=f"Closed: {report.title}") if self.closed else report


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
    remedy: str,
) -> Cluster:
    """Start a cluster and return it once its workers said who they are; where that fails, nothing of it is left.

    Args:
        cluster: Starts a cluster of Dask, and ends it.
        security: The certificates that processes know each other by.
        count: How many workers it has.
        introduce: Asks the workers who they are.
        remedy: What to do where it does not start and nobody knows why.

    Raises:
        ClusterUnusable: Where it does not start.
    """
    life = Lifetime(with_client(cluster, security))
    try:
        client = started(life, count, remedy)
        return Cluster(client, introduce(client), life.end)
    except BaseException:
        life.end()
        raise


def started(life: Lifetime[Client], count: int, remedy: str) -> Client:
    """Return the client of a cluster once all workers are there."""
    try:
        client = life.begin()
        client.wait_for_workers(count, timeout=ARRIVAL_TIMEOUT)
    except Exception as error:  # noqa: BLE001 - Dask raises bare Exceptions where a process does not start
        for known in (error, error.__cause__):  # Dask wraps what a scheduler does not start for.
            if isinstance(known, (OpenMedError, ImportError)):
                raise known from None
        raise ClusterUnusable(f"The cluster does not start: {cause(error)}.", remedy) from None
    return client


async def in_time(start: asyncio.Future[Any], timeout: float) -> None:
    """Wait for a start, which goes on where it takes longer, or where nobody waits for it any more.

    Raises:
        TimeoutError: Where it takes longer than so many seconds.
        Exception: What it fails with.
    """
    done, _ = await asyncio.wait([start], timeout=timeout)
    if not done:
        raise TimeoutError(f"it takes longer than {timeout:g} s")
    start.result()


@contextlib.asynccontextmanager
async def with_client(cluster: AbstractAsyncContextManager[SpecCluster], security: Security) -> AsyncIterator[Client]:
    """Have a cluster and a client of it, which has a loop of its own for those that use it."""
    from distributed import Client

    with WHILE_CLUSTERS_LIVE:
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
