"""Ask the scheduler and the workers of a Dask client, patiently, and raise this package's errors where they cannot answer."""

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

WORKER_TIMEOUT = (
    60.0  # Seconds without a working worker after which a run ends; the restart of a worker takes some of them.
)
POLL_INTERVAL = 5.0  # Seconds between two looks at the cluster while nothing comes.
MAX_ATTEMPTS = 4  # How often to ask workers that all end while they are asked; Dask gives up a task after as many.

UNREACHABLE = "The scheduler of the cluster cannot be reached."
RESTART_REMEDY = "Start the cluster again, and go on with the same call and its resume file."
LOGS_REMEDY = "Look at their logs; they may need more memory."


def require_extra(name: str, what: str) -> None:
    """Check that a package of the ``cluster`` extra is installed; ``what`` says what needs it."""
    try:
        importlib.import_module(name)
    except ImportError as error:
        remedy = "Install it: python -m pip install 'dask[distributed]' asyncssh."
        raise ConfigurationError(f"{what}: {describe_error(error)}.", remedy) from error


def validate_client(client: Any) -> Client:
    """Return a synchronous, connected client of Dask; raise ``ConfigurationError`` for anything else."""
    require_extra("distributed", "A cluster needs Dask")
    from distributed import Client
    from distributed.deploy.cluster import Cluster

    if not isinstance(client, Client):
        remedy = "Pass a dask.distributed.Client, such as nb.cluster().client."
        if isinstance(getattr(client, "client", None), Client):
            remedy = "Pass its client: client=cluster.client."
        elif isinstance(client, Cluster):
            remedy = "Pass a client of it: client=dask.distributed.Client(cluster)."
        raise ConfigurationError(f"client must be a client of Dask, not {short_type_name(client)}.", remedy)
    if client.asynchronous:
        raise ConfigurationError("The client is asynchronous.", "Pass one that was made without asynchronous=True.")
    if client.status != "running":
        raise client_closed_error(client)
    return client


def client_closed_error(client: Client) -> ClusterUnavailableError:
    what = UNREACHABLE if client.status == "connecting" else f"The client is {client.status}."
    return ClusterUnavailableError(what, RESTART_REMEDY)


@contextlib.contextmanager
def translate_dask_errors(client: Client) -> Iterator[None]:
    """Raise ``ClusterUnavailableError`` for what Dask raises when the client is closed, or the scheduler is gone or cancels."""
    from distributed.comm import CommClosedError

    try:
        yield
    except (threads.CancelledError, asyncio.CancelledError):
        if client.status == "running":
            what = "What the cluster had to do was called off: it was closed or started again."
            raise ClusterUnavailableError(what, RESTART_REMEDY) from None
        raise client_closed_error(client) from None
    except OpenMedError:
        raise
    except Exception as error:
        if client.status == "running" and not isinstance(error, CommClosedError):
            raise
        raise client_closed_error(client) from None


def run_on_client_loop(client: Client, call: Callable[[], Awaitable[Result]]) -> threads.Future[Result]:
    """Begin a call of Dask on the loop of its client; it runs to its end, even if nobody waits for it any more.

    On an interrupt, Dask's own way to wait (``distributed.utils.sync``) cancels the call. In distributed 2026.8, a call that
    is cancelled just when it begins to gather results blocks the client: every later one fails (``UnboundLocalError``).
    """

    async def called() -> Result:
        return await call()

    beginning = called()
    try:
        return asyncio.run_coroutine_threadsafe(beginning, client.loop.asyncio_loop)
    except RuntimeError:  # Its loop is closed.
        beginning.close()
        raise client_closed_error(client) from None


def call_scheduler(client: Client, call: Callable[[], Awaitable[Result]]) -> Result:
    """Return the result of a call to a client's method; raise ``ClusterUnavailableError`` if no scheduler answers."""
    with translate_dask_errors(client):
        pending = run_on_client_loop(client, call)
        while not threads.wait([pending], timeout=POLL_INTERVAL).done:
            if client.status != "running":
                raise client_closed_error(client)
        try:
            return pending.result()
        except OSError as error:
            raise ClusterUnavailableError(UNREACHABLE, RESTART_REMEDY) from error


def wait_for_workers(client: Client, call: Callable[[], Awaitable[Result]], timeout: float = WORKER_TIMEOUT) -> Result:
    """Return the result of a call to a client's or a task's method that needs workers.

    Raises ``ClusterUnavailableError`` after ``patience`` seconds without a working worker, and Dask's ``KilledWorker`` for a task
    that ended the workers that ran it.
    """
    interval, left = min(POLL_INTERVAL, timeout), timeout
    with translate_dask_errors(client):
        pending = run_on_client_loop(client, call)
        while not threads.wait([pending], timeout=interval).done:
            left = timeout if any(map(is_running, running_workers(client).values())) else left - interval
            if left <= 0:
                raise ClusterUnavailableError(f"No worker of the cluster has worked for {timeout:g} s.", RESTART_REMEDY)
        return pending.result()


def running_workers(client: Client) -> Mapping[str, Mapping[str, Any]]:
    identity = call_scheduler(client, lambda: client.scheduler.identity(n_workers=-1))
    return dict(identity["workers"])


def is_running(worker: Mapping[str, Any]) -> bool:
    """Tell whether a worker works; one that is short of memory (Dask calls it paused) takes no task, but may compute one."""
    counts = worker.get("metrics", {}).get("task_counts", {})
    return worker["status"] == "running" or bool(counts.get("executing", 0))


def submit(client: Client, function: Callable[..., Any], *arguments: Any, **options: Any) -> Future:
    """Send a task out; raise ``ClusterUnavailableError`` if the client is not running, where Dask would take it and wait."""
    if client.status != "running":
        raise client_closed_error(client)
    with translate_dask_errors(client):
        return client.submit(function, *arguments, pure=False, **options)


def fetch_result(client: Client, future: Future, patience: float = WORKER_TIMEOUT) -> Any:
    """Return the result of a task as :func:`wait_for_workers` does, and forget the task."""
    try:
        return wait_for_workers(client, future.result, patience)
    finally:
        cancel(client, [future])


def cancel(client: Client, futures: Sequence[Future]) -> None:
    """Cancel tasks and forget their results; the tasks of a closed cluster are gone already."""
    if futures and client.status == "running":
        with contextlib.suppress(ClusterUnavailableError):
            call_scheduler(client, lambda: client.cancel(futures))


def check_picklable(arguments: Mapping[str, Any]) -> None:
    """Raise ``ConfigurationError`` for the first argument that cannot go to another process."""
    import cloudpickle  # type: ignore[import-untyped] # What Dask sends with.

    for name, value in arguments.items():
        try:
            cloudpickle.dumps(value)
        except Exception:  # noqa: BLE001, PERF203 - of the value's own code too
            what = f"{name} cannot go to workers as {short_type_name(value)}."
            raise ConfigurationError(what, "Pass numbers, words and names, which can.") from None


def call_on_workers(
    client: Client, function: Callable[..., Any], *arguments: Any, patience: float = WORKER_TIMEOUT
) -> list[Any]:
    """Call a function of ``openmed_nb.distributed.worker`` on every worker; return the results in the order of addresses.

    A worker that ends meanwhile is left out as long as another one answers; its replacement is checked with its first
    texts. Raises the first error of a worker, and ``ClusterUnavailableError`` if no worker comes.
    """
    from distributed import TimeoutError as NoWorker
    from distributed.comm import CommClosedError

    async def a_worker_comes() -> bool:
        try:
            await client.wait_for_workers(1, timeout=patience)
        except NoWorker:
            return False
        return True

    # A cluster that adapts to its work (Dask's ``adapt(minimum=0)``) starts workers only for tasks, and ends one without a
    # task even while it loads a model for ``client.run``. So an empty cluster gets the same function as a task, too.
    tasks = [] if call_scheduler(client, client.nthreads) else [submit(client, function, *arguments)]
    try:
        for _ in range(MAX_ATTEMPTS):
            if not call_scheduler(client, a_worker_comes):
                raise ClusterUnavailableError("The cluster has no worker.", "Start one, or use nb.cluster().")
            answers = call_scheduler(client, lambda: client.run(function, *arguments, on_error="return"))
            left = running_workers(client)
            for address, answer in sorted(answers.items()):
                gone = isinstance(answer, OSError) and address not in left
                if gone or isinstance(answer, CommClosedError):
                    del answers[address]
                elif isinstance(answer, BaseException):
                    raise worker_error(parse_host(address), answer)
            if answers:
                return [answers[address] for address in sorted(answers)]
    finally:
        cancel(client, tasks)
    raise ClusterUnavailableError(f"All workers ended while they got ready, {MAX_ATTEMPTS} times.", LOGS_REMEDY)


def worker_error(host: str, error: BaseException) -> OpenMedError:
    if isinstance(error, OpenMedError):
        return error
    if isinstance(error, ModuleNotFoundError) and (error.name or "").partition(".")[0] == "openmed_nb":
        what = f"The worker at {host} has no {error.name}."
        return ClusterError(what, "Install openmed-nb in the Python that runs it.")
    return ClusterError(f"The worker at {host} failed: {describe_error(error)}.", "Look at its log.")


@contextlib.contextmanager
def translate_killed_worker() -> Iterator[None]:
    """Raise ``ClusterError`` if the search for texts ends the workers that do it."""
    from distributed import KilledWorker

    try:
        yield
    except KilledWorker as error:
        what = f"{error.allowed_failures + 1} workers in a row ended while they looked for the texts."
        raise ClusterError(what, LOGS_REMEDY) from None


def parse_host(address: str) -> str:
    """Return the host of a Dask address such as ``"tls://10.0.0.2:38211"``."""
    return urlsplit(address).hostname or address
