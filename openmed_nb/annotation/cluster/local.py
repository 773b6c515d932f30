"""A cluster on this computer: a nanny of Dask for each worker, which nothing outside of the computer can reach."""

from __future__ import annotations

import asyncio
import contextlib
import sys
from collections.abc import AsyncIterator, Sequence
from typing import TYPE_CHECKING, Any

from ...devices.machine import import_psutil
from .plans import WorkerPlan
from .settings import ALLOWED_FAILURES, PAGES, SILENT, for_a_start
from .starting import MAIN_GUARD, START_TIMEOUT, in_time

if TYPE_CHECKING:
    from distributed import Nanny, Security, SpecCluster

LOOK = 0.1
"""How often a start that is given up is looked at, in seconds."""


def remedy() -> str:
    """Return what to do where workers do not start: those of a script import it (``multiprocessing.spawn``)."""
    main = sys.modules["__main__"]
    if getattr(main, "__spec__", None) or hasattr(main, "__file__"):
        return MAIN_GUARD
    return "Look whether there is memory for them, or use fewer: n=1."


@contextlib.asynccontextmanager
async def local_cluster(
    plans: Sequence[WorkerPlan],
    security: Security,
    timeout: float = START_TIMEOUT,
) -> AsyncIterator[SpecCluster]:
    """Have a cluster on this computer that nothing outside of it can reach.

    Args:
        plans: Its workers.
        security: The certificates that processes know each other by.
        timeout: How long the start may take, in seconds.
    """
    from distributed import Nanny, Scheduler, SpecCluster

    nannies: list[Nanny] = []

    def nanny(*arguments: Any, **options: Any) -> Nanny:
        nannies.append(Nanny(*arguments, **options))
        return nannies[-1]

    shared = {"host": "127.0.0.1", "protocol": "tls://", "security": security, **PAGES}
    quiet = {"silence_logs": SILENT, "memory_limit": 1 / len(plans)}
    workers = {
        number: {"cls": nanny, "options": {**shared, **quiet, "nthreads": plan.tasks, "env": plan.environment}}
        for number, plan in enumerate(plans)
    }
    scheduler = {"cls": Scheduler, "options": {**shared, "port": 0, "allowed_failures": ALLOWED_FAILURES}}
    cluster = SpecCluster(workers, scheduler, security=security, asynchronous=True)
    try:
        async with for_a_start({}):
            start = asyncio.ensure_future(cluster)
            try:
                await in_time(start, timeout)
            finally:
                await give_up(start, nannies)
        yield cluster
    finally:
        await cluster.close()


async def give_up(start: asyncio.Future[Any], nannies: Sequence[Nanny]) -> None:
    """End a start that is under way, with its processes: Dask itself waits until they are there."""
    while not start.done():
        for nanny in nannies:
            kill(nanny.pid)
        await asyncio.wait([start], timeout=LOOK)
    start.exception()  # Told already, or of no interest any more.


def kill(pid: int | None) -> None:
    """End a process at once, where there is one."""
    psutil = import_psutil()
    with contextlib.suppress(psutil.NoSuchProcess):
        if pid is not None:
            psutil.Process(pid).kill()
