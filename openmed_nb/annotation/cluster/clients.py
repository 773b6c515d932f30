"""Asking a Dask client: all its workers at once, or one of them."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from ...errors import ClusterError, ClusterUnusable, ConfigurationError, OpenMedError, cause
from .calls import PATIENCE, asked, call_off, computed, lost, submitted
from .extra import import_extra

if TYPE_CHECKING:
    from distributed import Client


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
    """Return what a function of ``openmed_nb.session.worker`` says on every worker, in the order of their addresses.

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
