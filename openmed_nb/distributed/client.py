"""Workers of a cluster: their options, their descriptions, the check that they match, and calls with the errors of this package."""

from __future__ import annotations

import asyncio
import contextlib
import importlib
import importlib.metadata
import sys
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from concurrent import futures as threads
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar
from urllib.parse import urlsplit

from .._render.display import Displayable, Report, Table, pluralize
from .._utils.text import describe_error, short_type_name
from ..annotation.resume import changed_settings
from ..devices.registry import get_device
from ..errors import (
    ClusterError,
    ClusterUnavailableError,
    ConfigurationError,
    OpenMedError,
    WorkerKilledError,
    WorkerMismatchError,
)

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
        raise ConfigurationError(
            f"{requirement}: {describe_error(error)}.",
            "Install it: python -m pip install 'dask[distributed]' asyncssh.",
        ) from error


def validate_client(client: object) -> Client:
    """Return the argument if it is a synchronous, connected Dask client.

    Raises:
        ConfigurationError: If the argument is not a Dask client or is asynchronous.
        ClusterUnavailableError: If the client is not connected.
    """
    require_extra("distributed", "A cluster needs Dask")
    from distributed import Client

    if not isinstance(client, Client):
        raise ConfigurationError(
            f"client must be a Dask client, not {short_type_name(client)}.",
            "Pass a dask.distributed.Client, such as nb.cluster().client.",
        )
    if client.asynchronous:
        raise ConfigurationError(
            "The client is asynchronous.", "Pass a client that was created without asynchronous=True."
        )
    check_connected(client)
    return client


def check_connected(client: Client) -> None:
    """Raise an error if a client is not connected to its scheduler."""
    if client.status != "running":
        raise client_closed_error(client)


def client_closed_error(client: Client) -> ClusterUnavailableError:
    return ClusterUnavailableError(
        UNREACHABLE if client.status == "connecting" else f"The client is {client.status}.", RESTART_REMEDY
    )


@contextlib.contextmanager
def translate_dask_errors(client: Client) -> Iterator[None]:
    """Convert the errors of Dask for a closed client, a lost scheduler or cancelled tasks to ``ClusterUnavailableError``."""
    from distributed.comm import CommClosedError

    try:
        yield
    except (threads.CancelledError, asyncio.CancelledError):
        if client.status == "running":
            raise ClusterUnavailableError(
                "The task was cancelled because the cluster was closed or restarted.", RESTART_REMEDY
            ) from None
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
            check_connected(client)
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
                raise ClusterUnavailableError(
                    f"The cluster had no running worker for {WORKER_TIMEOUT:g} s.", RESTART_REMEDY
                )
        return pending.result()


def _running_workers(client: Client) -> Mapping[str, WorkerIdentity]:
    return dict(call_scheduler(client, lambda: client.scheduler.identity(n_workers=-1))["workers"])


def is_running(worker: WorkerIdentity) -> bool:
    """Return whether a worker is running. A worker that Dask paused for lack of memory is running if it executes a task."""
    return worker["status"] == "running" or bool(worker.get("metrics", {}).get("task_counts", {}).get("executing", 0))


def submit(client: Client, function: Callable[..., object], *arguments: object, **options: object) -> Future:
    """Submit a task.

    Raises:
        ClusterUnavailableError: If the client is not running. Dask itself would accept the task and wait.
    """
    check_connected(client)
    with translate_dask_errors(client):
        return client.submit(function, *arguments, pure=False, **options)


@contextlib.contextmanager
def translate_killed_worker() -> Iterator[None]:
    """Replace the error of Dask for a task that crashed its workers while they read notes."""
    from distributed import KilledWorker

    try:
        yield
    except KilledWorker as error:
        raise WorkerKilledError("Reading the notes crashed the workers.", LOGS_REMEDY) from error


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
        return ClusterError(
            f"The worker at {host} does not have {error.name}.", "Install openmed-nb in the Python of the worker."
        )
    return ClusterError(f"The worker at {host} failed: {describe_error(error)}.", "Check the log of the worker.")


def parse_host(address: str) -> str:
    """Return the host of a Dask address such as ``"tls://10.0.0.2:38211"``."""
    return urlsplit(address).hostname or address


# Number of workers that are allowed on any CPU. With many more workers than cores, a machine spends its
# time on their startup.
MIN_CPU_WORKERS = 2


def worker_options(device: str | None, threads: int | None = None) -> dict[str, object]:
    """Return the options of Dask's ``Nanny`` for a worker.

    Args:
        device: Device name in the worker. If ``None``, use the best device of its machine.
        threads: Number of CPU threads. If ``None``, use the default of torch.
    """
    variables = {"OPENMED_TORCH_DEVICE": device, "OMP_NUM_THREADS": threads and str(threads)}
    # With more than one thread, the worker tokenizes a chunk while it computes another one.
    tasks = 1 if threads == 1 else 2
    return {"nthreads": tasks, "env": {name: value for name, value in variables.items() if value is not None}}


def plan_workers(device: str, n: int | None, cores: int) -> list[dict[str, object]]:
    """Return the options of the workers on this machine: one for a GPU, at least one for the CPU.

    Args:
        device: Name of the device.
        n: Number of workers. If ``None``, start one.
        cores: Number of CPU cores, which several workers share.

    Raises:
        ConfigurationError: If ``n`` workers are too many for the device.
    """
    count = n or 1
    is_accelerator = get_device(device).is_accelerator
    max_workers = 1 if is_accelerator else max(MIN_CPU_WORKERS, cores)
    if count > max_workers:
        resources = f"one {device} device" if is_accelerator else pluralize(cores, "core")
        alternative = ", or device='cpu'" if is_accelerator else ""
        raise ConfigurationError(f"n={n} is not possible with {resources}.", f"Use n={max_workers}{alternative}.")
    return [worker_options(device, None if count == 1 else max(1, cores // count))] * count


# Packages whose version can affect the results.
PACKAGES = ("openmed_nb", "torch", "transformers", "tokenizers")


@dataclass(frozen=True)
class WorkerInfo:
    """Description of a worker.

    Attributes:
        host: Name of the host.
        device: Device of the models.
        reason: Reason for the device.
        versions: Version of each of ``PACKAGES``, without build suffixes.
    """

    host: str
    device: str
    reason: str
    versions: Mapping[str, str]


@dataclass(frozen=True, repr=False)
class WorkerList(Displayable):
    """Workers of a cluster.

    Attributes:
        workers: Descriptions of the workers, sorted by address.
    """

    workers: tuple[WorkerInfo, ...]

    def __len__(self) -> int:
        return len(self.workers)

    @property
    def label(self) -> str:
        """Number of workers and types of their devices, such as ``"2 workers (mps)"``."""
        kinds = sorted({get_device(worker.device).type for worker in self.workers})
        return f"{pluralize(len(self.workers), 'worker')} ({', '.join(kinds)})"

    def to_report(self) -> Report:
        """Return the number of workers, and their hosts and devices."""
        hosts = pluralize(len({worker.host for worker in self.workers}), "host")
        rows = tuple((worker.host, worker.device, worker.reason) for worker in self.workers)
        return Report(f"{self.label} on {hosts}", metrics=(Table("Workers", ("host", "device", "reason"), rows),))


@dataclass(frozen=True)
class ReadyWorker:
    """Worker that has loaded the model of a run.

    Attributes:
        info: Description of the worker.
        settings: Model and settings that affect its results. They must be the same on every worker.
        chunk_characters: Approximate number of characters per chunk.
        warnings: Warnings that were issued while the model was loaded.
        known_labels: Entity labels of the model.
    """

    info: WorkerInfo
    settings: Mapping[str, object]
    chunk_characters: int
    warnings: tuple[str, ...] = ()
    known_labels: tuple[str, ...] = ()

    @property
    def compatibility_key(self) -> dict[str, object]:
        """Values that must be the same on every worker."""
        return {**self.info.versions, **self.settings}


def installed_versions() -> dict[str, str]:
    """Return the versions of ``PACKAGES`` in this process, without build suffixes such as ``+cpu``."""
    this_package, *dependencies = PACKAGES
    # This module is in a lower layer than the package itself and cannot import it.
    version = str(vars(sys.modules[this_package])["__version__"])
    return {
        this_package: version,
        **{name: importlib.metadata.version(name).partition("+")[0] for name in dependencies},
    }


def check_workers_match(ready: Sequence[ReadyWorker]) -> Mapping[str, object]:
    """Return the compatibility key that every worker of a run must have.

    Raises:
        WorkerMismatchError: If a worker has a different openmed_nb than this process, or differs from the first worker.
    """
    package = PACKAGES[0]
    expected = {**ready[0].compatibility_key, package: installed_versions()[package]}
    for worker in ready:
        check_worker_matches(worker, expected)
    return expected


def check_worker_matches(worker: ReadyWorker, expected: Mapping[str, object]) -> None:
    """Raise ``WorkerMismatchError`` if the versions, the model or the settings of a worker differ from the expected ones."""
    key = worker.compatibility_key
    for name in PACKAGES:
        if key[name] != expected[name]:
            raise WorkerMismatchError(
                f"The worker on {worker.info.host} has {name} {key[name]}, but {expected[name]} is required.",
                "Install the same version on every host.",
            )
    if changed := changed_settings(expected, key):
        raise WorkerMismatchError(
            f"The worker on {worker.info.host} has a different model or different settings ({changed}).",
            "Copy the same files to every host.",
        )
