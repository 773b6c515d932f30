"""Calls to the scheduler and the workers of a Dask client, with timeouts and the errors of this package."""

from __future__ import annotations

import asyncio
import contextlib
import importlib
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from concurrent import futures as threads
from typing import TYPE_CHECKING, Any, TypeVar
from urllib.parse import urlsplit

from .._utils.text import describe_error, short_type_name
from ..errors import ClusterError, ClusterUnavailableError, ConfigurationError, OpenMedError

if TYPE_CHECKING:
    from distributed import Client, Future


Result = TypeVar("Result")

# Description of a worker by the scheduler of Dask.
WorkerIdentity = Mapping[str, Any]

# Seconds without a running worker after which a run ends. The timeout includes the restart of a worker.
WORKER_TIMEOUT = 60.0
POLL_INTERVAL = 5.0  # Seconds between two checks of the cluster.
# Maximum number of calls if all workers exit during each call. Dask also gives up a task after this number.
MAX_ATTEMPTS = 4

UNREACHABLE = "The scheduler of the cluster cannot be reached."
RESTART_REMEDY = "Restart the cluster, then repeat the call with the same resume file."
LOGS_REMEDY = "Check the logs of the workers. They may need more memory."


def require_extra(name: str, requirement: str) -> None:
    """Raise ``ConfigurationError`` if a package of the ``cluster`` extra is not installed.

    Args:
        name: Name of the package.
        requirement: Start of the error message, which states the feature that needs the package.
    """
    try:
        importlib.import_module(name)
    except ImportError as error:
        remedy = "Install it: python -m pip install 'dask[distributed]' asyncssh."
        raise ConfigurationError(f"{requirement}: {describe_error(error)}.", remedy) from error


def validate_client(client: object) -> Client:
    """Return the argument if it is a synchronous, connected Dask client.

    Raises:
        ConfigurationError: If the argument is not a Dask client or is asynchronous.
        ClusterUnavailableError: If the client is not connected.
    """
    require_extra("distributed", "A cluster needs Dask")
    from distributed import Client

    if not isinstance(client, Client):
        remedy = "Pass a dask.distributed.Client, such as nb.cluster().client."
        raise ConfigurationError(f"client must be a Dask client, not {short_type_name(client)}.", remedy)
    if client.asynchronous:
        raise ConfigurationError(
            "The client is asynchronous.", "Pass a client that was created without asynchronous=True."
        )
    if client.status != "running":
        raise client_closed_error(client)
    return client


def client_closed_error(client: Client) -> ClusterUnavailableError:
    message = UNREACHABLE if client.status == "connecting" else f"The client is {client.status}."
    return ClusterUnavailableError(message, RESTART_REMEDY)


@contextlib.contextmanager
def translate_dask_errors(client: Client) -> Iterator[None]:
    """Convert the errors of Dask for a closed client, a lost scheduler or cancelled tasks to ``ClusterUnavailableError``."""
    from distributed.comm import CommClosedError

    try:
        yield
    except (threads.CancelledError, asyncio.CancelledError):
        if client.status == "running":
            message = "The task was cancelled because the cluster was closed or restarted."
            raise ClusterUnavailableError(message, RESTART_REMEDY) from None
        raise client_closed_error(client) from None
    except OpenMedError:
        raise
    except Exception as error:
        if client.status == "running" and not isinstance(error, CommClosedError):
            raise
        raise client_closed_error(client) from None


def _run_on_client_loop(client: Client, call: Callable[[], Awaitable[Result]]) -> threads.Future[Result]:
    """Start a call of Dask on the event loop of its client. The call finishes even if no caller waits for it.

    ``distributed.utils.sync`` is not used, because it cancels the call on an interrupt. In distributed 2026.8, a call that
    is cancelled when it starts to gather results blocks the client: all later calls fail (``UnboundLocalError``).
    """

    async def run() -> Result:
        return await call()

    coroutine = run()
    try:
        return asyncio.run_coroutine_threadsafe(coroutine, client.loop.asyncio_loop)
    except RuntimeError:  # The event loop is closed.
        coroutine.close()
        raise client_closed_error(client) from None


def call_scheduler(client: Client, call: Callable[[], Awaitable[Result]]) -> Result:
    """Return the result of a call to a client method.

    Raises:
        ClusterUnavailableError: If the scheduler does not respond.
    """
    with translate_dask_errors(client):
        pending = _run_on_client_loop(client, call)
        while not threads.wait([pending], timeout=POLL_INTERVAL).done:
            if client.status != "running":
                raise client_closed_error(client)
        try:
            return pending.result()
        except OSError as error:
            raise ClusterUnavailableError(UNREACHABLE, RESTART_REMEDY) from error


def wait_for_workers(client: Client, call: Callable[[], Awaitable[Result]]) -> Result:
    """Return the result of a method of a client or a task that needs workers.

    Raises:
        ClusterUnavailableError: If there is no running worker for ``WORKER_TIMEOUT`` seconds.
        KilledWorker: If a task crashed the workers that ran it (an exception of Dask).
    """
    interval = min(POLL_INTERVAL, WORKER_TIMEOUT)
    remaining = WORKER_TIMEOUT
    with translate_dask_errors(client):
        pending = _run_on_client_loop(client, call)
        while not threads.wait([pending], timeout=interval).done:
            is_any_running = any(map(is_running, _running_workers(client).values()))
            remaining = WORKER_TIMEOUT if is_any_running else remaining - interval
            if remaining <= 0:
                message = f"The cluster had no running worker for {WORKER_TIMEOUT:g} s."
                raise ClusterUnavailableError(message, RESTART_REMEDY)
        return pending.result()


def _running_workers(client: Client) -> Mapping[str, WorkerIdentity]:
    identity = call_scheduler(client, lambda: client.scheduler.identity(n_workers=-1))
    return dict(identity["workers"])


def is_running(worker: WorkerIdentity) -> bool:
    """Return whether a worker is running. A worker that Dask paused for lack of memory is running if it executes a task."""
    counts = worker.get("metrics", {}).get("task_counts", {})
    return worker["status"] == "running" or bool(counts.get("executing", 0))


def submit(client: Client, function: Callable[..., object], *arguments: object, **options: object) -> Future:
    """Submit a task.

    Raises:
        ClusterUnavailableError: If the client is not running. Dask itself would accept the task and wait.
    """
    if client.status != "running":
        raise client_closed_error(client)
    with translate_dask_errors(client):
        return client.submit(function, *arguments, pure=False, **options)


def fetch_result(client: Client, future: Future) -> Any:
    """Return the result of a task as :func:`wait_for_workers` does, and release the task."""
    try:
        return wait_for_workers(client, future.result)
    finally:
        cancel(client, [future])


def cancel(client: Client, futures: Sequence[Future]) -> None:
    """Cancel tasks and release their results. A closed cluster has already discarded its tasks."""
    if futures and client.status == "running":
        with contextlib.suppress(ClusterUnavailableError):
            call_scheduler(client, lambda: client.cancel(futures))


def call_on_workers(client: Client, function: Callable[..., Awaitable[Result]], *arguments: object) -> list[Result]:
    """Call a function of ``openmed_nb.distributed.worker`` on every worker, and return the results sorted by address.

    A worker that exits during the call is ignored if another worker responds. Its replacement is checked with its first
    texts. The first error of a worker is raised.

    Raises:
        ClusterUnavailableError: If no worker registers within ``WORKER_TIMEOUT`` seconds, or all workers exit repeatedly.
    """
    from distributed import TimeoutError as DaskTimeoutError
    from distributed.comm import CommClosedError

    async def has_worker() -> bool:
        try:
            await client.wait_for_workers(1, timeout=WORKER_TIMEOUT)
        except DaskTimeoutError:
            return False
        return True

    # An adaptive cluster (Dask's ``adapt(minimum=0)``) starts workers only for tasks, and stops a worker without a task even
    # while it loads a model for ``client.run``. The function is therefore also submitted as a task to an empty cluster.
    tasks = [] if call_scheduler(client, client.nthreads) else [submit(client, function, *arguments)]
    try:
        for _ in range(MAX_ATTEMPTS):
            if not call_scheduler(client, has_worker):
                raise ClusterUnavailableError(
                    "The cluster does not have a worker.", "Start a worker, or use nb.cluster()."
                )
            results = call_scheduler(client, lambda: client.run(function, *arguments, on_error="return"))
            remaining = _running_workers(client)
            for address, result in sorted(results.items()):
                has_exited = isinstance(result, OSError) and address not in remaining
                if has_exited or isinstance(result, CommClosedError):
                    del results[address]
                elif isinstance(result, BaseException):
                    raise _worker_error(parse_host(address), result)
            if results:
                return [results[address] for address in sorted(results)]
    finally:
        cancel(client, tasks)
    raise ClusterUnavailableError(f"All workers exited during startup, {MAX_ATTEMPTS} times.", LOGS_REMEDY)


def _worker_error(host: str, error: BaseException) -> OpenMedError:
    if isinstance(error, OpenMedError):
        return type(error)(f"On {host}: {error.message}", error.remedy)
    if isinstance(error, ModuleNotFoundError) and (error.name or "").partition(".")[0] == "openmed_nb":
        message = f"The worker at {host} does not have {error.name}."
        return ClusterError(message, "Install openmed-nb in the Python of the worker.")
    return ClusterError(f"The worker at {host} failed: {describe_error(error)}.", "Check the log of the worker.")


def parse_host(address: str) -> str:
    """Return the host of a Dask address such as ``"tls://10.0.0.2:38211"``."""
    return urlsplit(address).hostname or address
