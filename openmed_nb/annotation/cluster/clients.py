"""Asking a Dask client: all its workers at once, one of them, and whether there are any that work."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from ...errors import ClusterError, ClusterUnusable, ConfigurationError, OpenMedError, cause

if TYPE_CHECKING:
    from distributed import Client, Future

PATIENCE = 60.0
"""How many seconds a cluster may be without a worker that works before a run ends; a restart takes some of them."""

LOOK = 5.0
"""How often that is looked at while nothing comes, in seconds."""

AGAIN = "Start the cluster again, and go on with the same call and its resume file."


def import_distributed() -> None:
    """Check that Dask is installed.

    Raises:
        ConfigurationError: Where it is not.
    """
    try:
        import distributed  # noqa: F401
    except ImportError as error:
        what = f"A cluster needs Dask: {cause(error)}."
        raise ConfigurationError(what, "Install it: python -m pip install 'openmed-nb[cluster]'.") from error


def checked_client(client: Any) -> Client:
    """Return a client of Dask that can be waited for.

    Raises:
        ConfigurationError: For anything else.
    """
    import_distributed()
    from distributed import Client

    if not isinstance(client, Client):
        what = f"{type(client).__name__} is no client of a cluster."
        raise ConfigurationError(what, "Pass a dask.distributed.Client, such as nb.cluster(n=2).client.")
    if client.asynchronous:
        raise ConfigurationError("The client is asynchronous.", "Pass one that was made without asynchronous=True.")
    if client.status != "running":
        raise ClusterUnusable(f"The client is {client.status}.", "Start the cluster again.")
    return client


def ask_all(client: Client, function: Callable[..., Any], *arguments: Any, patience: float = PATIENCE) -> list[Any]:
    """Return what a function of ``openmed_nb.session.worker`` says on every worker, in the order of their addresses.

    Args:
        client: The client.
        function: A coroutine function that can be imported on a worker.
        arguments: Its arguments.
        patience: How many seconds to wait for a first worker.

    Raises:
        OpenMedError: What the first worker failed with.
        ClusterUnusable: Where there is no worker.
    """
    from distributed import TimeoutError as NoWorker

    try:
        client.wait_for_workers(1, timeout=patience)
    except NoWorker:
        raise ClusterUnusable("The cluster has no worker.", "Start one, or use nb.cluster().") from None
    said: Mapping[str, Any] = client.run(function, *arguments, on_error="return")
    for address in sorted(said):
        if isinstance(said[address], BaseException):
            raise failure_of(host_of(address), said[address])
    return [said[address] for address in sorted(said)]


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
        OpenMedError: What it failed with.
        ClusterUnusable: Where no worker is left.
    """
    return result_of(client, client.submit(function, *arguments, pure=False))


def result_of(client: Client, future: Future, patience: float = PATIENCE) -> Any:
    """Wait for a task and return its result.

    Args:
        client: The client that it belongs to.
        future: The task.
        patience: How many seconds the cluster may be without a worker that works.

    Raises:
        ClusterUnusable: Where no worker is left, or the scheduler.
        KilledWorker: Where the task ended the workers that ran it.
        Exception: What the task failed with.
    """
    wait_for(client, [future], patience)
    return future.result()


def wait_for(client: Client, futures: Sequence[Future], patience: float = PATIENCE) -> None:
    """Wait until all of some tasks have come to an end, whatever it is.

    Raises:
        ClusterUnusable: Where no worker is left, or the scheduler.
    """
    from distributed import CancelledError, wait
    from distributed import TimeoutError as NotYet

    look, left = min(LOOK, patience), patience
    while left > 0:
        try:
            wait(list(futures), timeout=look)
        except NotYet:  # noqa: PERF203 - a look every few seconds
            left = patience if has_workers(client) else left - look
        except CancelledError as error:
            raise ClusterUnusable("The cluster was closed.", AGAIN) from error
        else:
            return
    raise ClusterUnusable(f"No worker of the cluster has worked for {patience:g} s.", AGAIN)


def has_workers(client: Client) -> bool:
    """Tell whether there is a worker that works: one that is short of memory takes no task (Dask calls it paused).

    Raises:
        ClusterUnusable: Where there is no scheduler to ask.
    """
    try:
        workers = client.scheduler_info(n_workers=-1)["workers"].values()
    except (OSError, RuntimeError, AttributeError) as error:  # What Dask raises where the connection is lost.
        raise ClusterUnusable("The scheduler of the cluster cannot be reached.", AGAIN) from error
    return any(one["status"] == "running" or executing(one) for one in workers)


def executing(worker: Mapping[str, Any]) -> bool:
    """Tell whether a worker computes something, from what the scheduler knows of it."""
    counts = worker.get("metrics", {}).get("task_counts", {})
    return bool(counts.get("executing", 0))


def host_of(address: str) -> str:
    """Return the computer of an address of Dask.

    Example:
        >>> host_of("tls://10.0.0.2:38211"), host_of("inproc://10.0.0.2/1/1")
        ('10.0.0.2', '10.0.0.2')
    """
    return urlsplit(address).hostname or address
