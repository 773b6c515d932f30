"""Calls of a Dask client: begun on its loop, waited for here, and told as lost where its cluster is gone."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from concurrent import futures as threads
from typing import TYPE_CHECKING, Any, TypeVar

from ...errors import ClusterUnusable, OpenMedError

if TYPE_CHECKING:
    from distributed import Client, Future

Result = TypeVar("Result")

PATIENCE = 60.0
"""How many seconds a cluster may be without a worker that works before a run ends; a restart takes some of them."""

LOOK = 5.0
"""How often that is looked at while nothing comes, in seconds."""

UNREACHABLE = "The scheduler of the cluster cannot be reached."

AGAIN = "Start the cluster again, and go on with the same call and its resume file."


def lost(client: Client) -> ClusterUnusable:
    """Return the error of a client that has lost its cluster."""
    if client.status == "connecting":
        return ClusterUnusable(UNREACHABLE, AGAIN)
    return ClusterUnusable(f"The client is {client.status}.", AGAIN)


@contextlib.contextmanager
def told_as_lost(client: Client) -> Iterator[None]:
    """Tell what Dask fails with where a client has lost its cluster, whatever that is, in one way.

    Raises:
        ClusterUnusable: Where the client was closed, or the scheduler went away, or called off what it was asked.
    """
    from distributed.comm import CommClosedError

    try:
        yield
    except (threads.CancelledError, asyncio.CancelledError):
        if client.status == "running":
            what = "What the cluster had to do was called off: it was closed or started again."
            raise ClusterUnusable(what, AGAIN) from None
        raise lost(client) from None
    except OpenMedError:
        raise
    except Exception as error:
        if client.status == "running" and not isinstance(error, CommClosedError):
            raise
        raise lost(client) from None


def on_loop(client: Client, call: Callable[[], Awaitable[Result]]) -> threads.Future[Result]:
    """Begin a call of Dask on the loop of its client, where it runs to its end, whatever ends those who wait for it.

    Where this process is interrupted, Dask's own way to wait (``distributed.utils.sync``) cancels the call. A call that is
    cancelled just when it begins to gather results leaves what every later one waits for: with distributed 2026.8, none
    of that client's results can be had any more (``UnboundLocalError``).
    """

    async def called() -> Result:
        return await call()

    beginning = called()
    try:
        return asyncio.run_coroutine_threadsafe(beginning, client.loop.asyncio_loop)
    except RuntimeError:  # Its loop is closed.
        beginning.close()
        raise lost(client) from None


def asked(client: Client, call: Callable[[], Awaitable[Result]]) -> Result:
    """Return what the scheduler says.

    Args:
        client: The client.
        call: Calls a method of it, which is a coroutine on its loop.

    Raises:
        ClusterUnusable: Where there is no scheduler to ask.
    """
    with told_as_lost(client):
        pending = on_loop(client, call)
        while not threads.wait([pending], timeout=LOOK).done:
            if client.status != "running":
                raise lost(client)
        try:
            return pending.result()
        except OSError as error:
            raise ClusterUnusable(UNREACHABLE, AGAIN) from error


def patiently(client: Client, call: Callable[[], Awaitable[Result]], patience: float = PATIENCE) -> Result:
    """Return what workers say.

    Args:
        client: The client.
        call: Calls a method of it, or of a task, which is a coroutine on its loop.
        patience: How many seconds the cluster may be without a worker that works.

    Raises:
        ClusterUnusable: Where no worker is left, or the scheduler.
        KilledWorker: Where a task ended the workers that ran it.
        Exception: What a task failed with.
    """
    look, left = min(LOOK, patience), patience
    with told_as_lost(client):
        pending = on_loop(client, call)
        while not threads.wait([pending], timeout=look).done:
            left = patience if has_workers(client) else left - look
            if left <= 0:
                raise ClusterUnusable(f"No worker of the cluster has worked for {patience:g} s.", AGAIN)
        return pending.result()


def submitted(client: Client, function: Callable[..., Any], *arguments: Any, **options: Any) -> Future:
    """Send a task out.

    Raises:
        ClusterUnusable: Where the client is closed, or has lost its scheduler: Dask would take it and wait.
    """
    if client.status != "running":
        raise lost(client)
    with told_as_lost(client):
        return client.submit(function, *arguments, pure=False, **options)


def computed(client: Client, future: Future, patience: float = PATIENCE) -> Any:
    """Wait for a task and return its result; nothing of it is left.

    Raises:
        Exception: As for :func:`patiently`.
    """
    try:
        return patiently(client, future.result, patience)
    finally:
        call_off(client, [future])


def let_go(client: Client, future: Future) -> None:
    """Let go of a task whose result is here.

    It is not left to ``Future.__del__``, which Dask has for that: Python drops an interrupt that comes in a ``__del__``.

    Raises:
        ClusterUnusable: Where the client is closed.
    """
    with told_as_lost(client):
        future.release()


def call_off(client: Client, futures: Sequence[Future]) -> None:
    """Let nothing be left of some tasks, also where they are under way; with a cluster that is closed, they are gone."""
    if futures and client.status == "running":
        with contextlib.suppress(ClusterUnusable):
            asked(client, lambda: client.cancel(futures))


def wait_for(client: Client, futures: Sequence[Future], patience: float = PATIENCE) -> None:
    """Wait until all of some tasks have come to an end, whatever it is.

    Raises:
        ClusterUnusable: Where no worker is left, or the scheduler.
    """

    async def ended() -> None:
        for future in futures:
            await future.exception()

    patiently(client, ended, patience)


def has_workers(client: Client) -> bool:
    """Tell whether there is a worker that works: one that is short of memory takes no task (Dask calls it paused).

    Raises:
        ClusterUnusable: Where there is no scheduler to ask.
    """
    workers = asked(client, lambda: client.scheduler.identity(n_workers=-1))["workers"].values()
    return any(one["status"] == "running" or executing(one) for one in workers)


def executing(worker: Mapping[str, Any]) -> bool:
    """Tell whether a worker computes something, from what the scheduler knows of it."""
    counts = worker.get("metrics", {}).get("task_counts", {})
    return bool(counts.get("executing", 0))
