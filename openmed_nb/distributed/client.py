"""Ask a Dask client, patiently, and give its errors in words of this package."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from concurrent import futures as threads
from typing import TYPE_CHECKING, Any, TypeVar
from urllib.parse import urlsplit

from ..errors import ClusterError, ClusterUnusable, ConfigurationError, OpenMedError, cause
from .starting import import_extra

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


def checked_client(client: Any) -> Client:
    """Return a client of Dask that can be waited for.

    Raises:
        ConfigurationError: For anything else.
    """
    import_extra("distributed", "A cluster needs Dask")
    from distributed import Client

    if not isinstance(client, Client):
        raise ConfigurationError(f"{type(client).__name__} is no client of a cluster.", remedy_for(client))
    if client.asynchronous:
        raise ConfigurationError("The client is asynchronous.", "Pass one that was made without asynchronous=True.")
    if client.status != "running":
        raise lost(client)
    return client


def remedy_for(cluster: Any) -> str:
    """Return what to pass in the place of something that is no client: that of a cluster, where it is one."""
    from distributed.deploy.cluster import Cluster as DaskCluster

    from .starting import Cluster

    if isinstance(cluster, Cluster):
        return "Pass its client: client=cluster.client."
    if isinstance(cluster, DaskCluster):
        return "Pass a client of it: client=dask.distributed.Client(cluster)."
    return "Pass a dask.distributed.Client, such as nb.cluster().client."


def check_sendable(arguments: Mapping[str, Any]) -> None:
    """Check that arguments can go to another process.

    Raises:
        ConfigurationError: For the first that cannot.

    Example:
        >>> check_sendable({"stride": iter([])})
        >>> check_sendable({"stride": (number for number in [])})
        Traceback (most recent call last):
        ...
        openmed_nb.errors.ConfigurationError: stride cannot go to workers as generator. Pass numbers, words and names, which can.
    """
    for name, value in arguments.items():
        if not travels(value):
            what = f"{name} cannot go to workers as {type(value).__name__}."
            raise ConfigurationError(what, "Pass numbers, words and names, which can.")


def travels(value: Any) -> bool:
    """Tell whether something can go to another process."""
    import cloudpickle  # type: ignore[import-untyped] # What Dask sends with.

    try:
        cloudpickle.dumps(value)
    except Exception:  # noqa: BLE001 - whatever it raises itself
        return False
    return True


TRIES = 4
"""How often workers that all end while they are asked are asked again; Dask gives up a task after as many."""


def ask_all(client: Client, function: Callable[..., Any], *arguments: Any, patience: float = PATIENCE) -> list[Any]:
    """Return what a function of ``openmed_nb.distributed.worker`` says on every worker, in the order of their addresses.

    A worker that ends while it is asked is left out as long as another one answers: what comes in its place is asked when
    it gets its first texts.

    Args:
        client: The client.
        function: A coroutine function that can be imported on a worker.
        arguments: Its arguments.
        patience: How many seconds to wait for a first worker.

    Raises:
        OpenMedError: What the first worker failed with.
        ClusterUnusable: Where there is no worker, or all end while they are asked, again and again.
    """
    with one_wanted(client, function, *arguments):
        for _ in range(TRIES):
            if not asked(client, lambda: a_worker_comes(client, patience)):
                raise ClusterUnusable("The cluster has no worker.", "Start one, or use nb.cluster().")
            said = answers_of_workers(client, function, *arguments)
            for address in sorted(said):
                if isinstance(said[address], BaseException):
                    raise failure_of(host_of(address), said[address])
            if said:
                return [said[address] for address in sorted(said)]
    what = f"All workers ended while they got ready, {TRIES} times."
    raise ClusterUnusable(what, "Look at their logs; they may need more memory.")


def answers_of_workers(client: Client, function: Callable[..., Any], *arguments: Any) -> dict[str, Any]:
    """Return what a function says or fails with on every worker that is still there afterwards, by their addresses."""
    from distributed.comm import CommClosedError

    said: Mapping[str, Any] = asked(client, lambda: client.run(function, *arguments, on_error="return"))
    left = asked(client, lambda: client.scheduler.identity(n_workers=-1))["workers"]
    ended = {address for address, answer in said.items() if isinstance(answer, OSError) and address not in left}
    ended |= {address for address, answer in said.items() if isinstance(answer, CommClosedError)}
    return {address: answer for address, answer in said.items() if address not in ended}


@contextlib.contextmanager
def one_wanted(client: Client, function: Callable[..., Any], *arguments: Any) -> Iterator[None]:
    """Give a cluster that has no worker a task for the time of a block: just what its workers are asked there.

    One that adapts to its work (Dask's ``adapt(minimum=0)``) starts a worker for a task alone, and soon ends one that has
    none, also while it loads a model because it was asked to.

    Raises:
        ClusterUnusable: Where there is no scheduler to ask.
    """
    tasks = [] if asked(client, client.nthreads) else [submitted(client, function, *arguments)]
    try:
        yield
    finally:
        call_off(client, tasks)


async def a_worker_comes(client: Client, patience: float) -> bool:
    """Tell whether there is a worker within so many seconds."""
    from distributed import TimeoutError as NoWorker

    try:
        await client.wait_for_workers(1, timeout=patience)
    except NoWorker:
        return False
    return True


def failure_of(host: str, error: BaseException) -> OpenMedError:
    """Return an error of a worker as one of ours.

    Example:
        >>> print(failure_of("10.0.0.2", ModuleNotFoundError("No module named 'openmed_nb'", name="openmed_nb")))
        The worker at 10.0.0.2 has no openmed_nb. Install openmed-nb in the Python that runs it.
    """
    if isinstance(error, OpenMedError):
        return error
    if isinstance(error, ModuleNotFoundError) and (error.name or "").partition(".")[0] == "openmed_nb":
        what = f"The worker at {host} has no {error.name}."
        return ClusterError(what, "Install openmed-nb in the Python that runs it.")
    return ClusterError(f"The worker at {host} failed: {cause(error)}.", "Look at its log.")


def ask_one(client: Client, function: Callable[..., Any], *arguments: Any) -> Any:
    """Return what a function that can be imported says on one worker, whichever is free.

    Raises:
        Exception: What it failed with.
        ClusterError: Where it ends the workers that run it.
        ClusterUnusable: Where no worker is left.
    """
    from distributed import KilledWorker

    try:
        return computed(client, submitted(client, function, *arguments))
    except KilledWorker as error:
        raise killed(error) from None


def killed(error: Any) -> ClusterError:
    """Return a ``KilledWorker`` of Dask as an error of ours."""
    what = f"{error.allowed_failures + 1} workers in a row ended while they looked for the texts."
    return ClusterError(what, "Look at their logs; they may need more memory.")


def host_of(address: str) -> str:
    """Return the computer of an address of Dask.

    Example:
        >>> host_of("tls://10.0.0.2:38211"), host_of("inproc://10.0.0.2/1/1")
        ('10.0.0.2', '10.0.0.2')
    """
    return urlsplit(address).hostname or address
