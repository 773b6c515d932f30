"""Startup and shutdown of a cluster on this machine or over SSH."""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import logging
import multiprocessing
import os
import re
import shlex
import signal
import sys
import threading
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import AbstractAsyncContextManager
from dataclasses import replace
from typing import TYPE_CHECKING, Generic, TypeVar

from .._events.activity import ProgressEvent
from .._render.display import Displayable, Report
from .._utils.text import describe_error
from .._utils.validation import check_optional_integer, invalid_value
from .._utils.warning import warn
from ..devices.environment import preserve_variables
from ..devices.machine import import_psutil, is_mps_simulated
from ..devices.request import DeviceRequest, source_name
from ..errors import ClusterUnavailableError, ConfigurationError, OpenMedError
from ..session import SESSION
from .client import call_on_workers, require_extra
from .members import WorkerList, WorkerSpec, plan_workers, visible_gpu_ids

if TYPE_CHECKING:
    from distributed import Client, Nanny, Security, SpecCluster


Value = TypeVar("Value")

ALLOWED_FAILURES = 2  # Number of workers that a text may crash. Dask gives up the text after one more crash.

START_TIMEOUT = 120.0  # Seconds from the start of a worker until the scheduler responds to it.
CONNECT_TIMEOUT = 15.0  # Seconds to wait for a connection over SSH.

START_SETTINGS: dict[str, object] = {
    # By default, Dask sets the number of threads of every process to 1, including this one. WorkerSpec sets it per worker.
    "distributed.nanny.pre-spawn-environ": {},
    # The dashboard is disabled. Dask still opens its port, which DASHBOARD_DISABLED binds to the loopback interface.
    "distributed.scheduler.http.routes": [],
    "distributed.worker.http.routes": [],
    # The results of the profiler, which samples the stack of a worker every 10 ms, are only visible in the dashboard.
    "distributed.worker.profile.enabled": False,
    # Dask stores the last messages of each connection for debugging (``BatchedSend.recent_message_log``), which can
    # contain thousands of notes.
    "distributed.admin.low-level-log-length": 0,
}

DASHBOARD_DISABLED = {"dashboard": False, "dashboard_address": "127.0.0.1:0"}

START_LOCK = threading.Lock()  # Held while a start changes the settings of Dask, which are global in a process.
LOCK_POLL_INTERVAL = 0.02  # Seconds between two attempts to acquire START_LOCK.

REGISTRATION_TIMEOUT = 10.0  # Seconds from the start of the workers until the scheduler knows them.
SHUTDOWN_TIMEOUT = 30.0  # Seconds to wait for a shutdown, which continues in its thread after the timeout.
CANCEL_POLL_INTERVAL = 0.1  # Seconds between two checks of a cancelled start.

HOST_PATTERN = re.compile(r"[\w:][\w.:%-]*")  # Host name or address. Whether the host exists is checked on connection.
SSH_SETTINGS = "Set user names, ports and keys in ~/.ssh/config"

MAIN_GUARD = "In a script, call it under if __name__ == '__main__', because workers import the script."


def cluster(
    n: int | None = None, hosts: Iterable[str] | None = None, *, device: str | None = None, threads: int | None = None
) -> Cluster:
    """Start workers for :func:`openmed_nb.annotate` on this machine, or on several hosts over SSH.

    Each worker is a process that loads the model once. Its device is selected by the same rules as in a notebook. A worker
    that crashes is restarted, and its texts are processed again. An interrupt (Ctrl-C) stops the current operation of this
    process, but not the workers. ``client`` becomes the default client of Dask.

    The connections on this machine are encrypted and need a certificate of this cluster. On hosts, Dask's ``SSHCluster``
    starts the processes. They exchange the texts without encryption, and accept code from every machine that reaches their
    ports, so use it in a trusted network only. A cluster on hosts shuts down after 8 hours without work.

    Args:
        n: Number of workers on this machine. If ``None``, start one worker for each CUDA GPU, or one for MPS or the CPU.
            More than one worker needs as many CUDA GPUs, or ``device="cpu"`` and as many cores. Two workers are always
            allowed on the CPU.
        hosts: Names of hosts to which ``ssh`` connects without a prompt. Each gets one worker, and the first also runs the
            scheduler of Dask. Each host needs the same openmed_nb with its ``cluster`` extra in a Python at the same path
            as this one, and ports that the other hosts and this machine can reach. User names, ports and keys are read from
            ``~/.ssh/config``.
        device: Device of all workers. If ``None``, use the device of the session, or the best device of each host.
        threads: Number of CPU threads per worker. If ``None``, the workers share the cores of this machine, and hosts use
            the default of torch.

    Returns:
        A context manager. Pass its ``client`` to ``annotate``. Its ``workers`` list the host, the device and the reason
        for the device of each worker. Without a ``with`` block, call ``close()``.

    Raises:
        ConfigurationError: If Dask is not installed, or an argument is not valid.
        ClusterError: If the cluster fails to start. The message names the hosts.
        DeviceError: If the device is not available.

    Example::

        with nb.cluster() as cluster:
            annotations = nb.annotate(notes, client=cluster.client)
        with nb.cluster(hosts=["mac1", "mac2"]) as cluster:
            annotations = nb.annotate(notes, "disease_detection_tiny", client=cluster.client)
    """
    if getattr(multiprocessing.current_process(), "_inheriting", False):
        # A worker imports the script. multiprocessing would also raise an error for new processes here.
        raise SystemExit(f"A worker tried to start another cluster. {MAIN_GUARD}")
    with SESSION.operation():
        SESSION.notify(ProgressEvent("Starting", "workers"))
        require_extra("distributed", "A cluster needs Dask")
        check_optional_integer("n", n, otherwise=", or pass host names as hosts=[...]")
        check_optional_integer("threads", threads)
        if hosts is None:
            if is_mps_simulated():
                raise ConfigurationError("A SIMULATED Mac does not support clusters.", "End the simulation first.")
            from dask.system import CPU_COUNT

            choice = SESSION.device(device)
            gpus = visible_gpu_ids(
                len(SESSION.device_manager.torch.cuda_names or ()), os.environ.get("CUDA_VISIBLE_DEVICES")
            )
            plans = plan_workers(choice.device, n, gpus, CPU_COUNT, threads)
            tls = create_certificates()
            main = sys.modules["__main__"]
            if not hasattr(main, "__spec__"):  # The magic %reset deletes it, and multiprocessing.spawn reads it.
                main.__spec__ = None
            remedy = "Check that there is enough memory for the workers, or use fewer workers: n=1."
            if getattr(main, "__spec__", None) or hasattr(main, "__file__"):  # See multiprocessing.spawn.
                remedy = MAIN_GUARD
            return start_cluster(local_cluster(plans, tls), tls, len(plans), choice.reason, remedy)
        if n is not None:
            remedy = "Remove n. A host that is named twice gets two workers."
            raise ConfigurationError("n can only be used without hosts.", remedy)
        host_names = _validate_hosts(hosts)
        requested = None if device is None else DeviceRequest.parse(device, "argument").value
        require_extra("asyncssh", "A cluster over SSH needs asyncssh")
        reason = requested and f"{requested!r} was requested by {source_name('argument')}."
        remedy = f"Check that this machine and {', '.join(host_names)} can reach each other's ports."
        options = WorkerSpec(requested, threads=threads).options
        return _start(lambda: _ssh_cluster(host_names, options), len(host_names), reason, remedy)


def _validate_hosts(hosts: object) -> tuple[str, ...]:
    """Validate host names and return them as a tuple.

    Raises:
        ConfigurationError: If the argument is not an iterable of valid host names.
    """
    names = tuple(hosts) if isinstance(hosts, Iterable) and not isinstance(hosts, str) else ()
    if names and all(isinstance(name, str) and HOST_PATTERN.fullmatch(name) for name in names):
        return names
    raise invalid_value("hosts", hosts, f"Pass a list of host names, such as ['mac1', 'mac2']. {SSH_SETTINGS}.")


def _ssh_cluster(hosts: Sequence[str], worker_options: Mapping[str, object]) -> SpecCluster:
    """Start a cluster on hosts: the scheduler on the first host, and one worker for each host name.

    Raises:
        ClusterUnavailableError: If a host is not reachable, or cannot run Dask.
    """
    import asyncssh
    from distributed import SSHCluster

    workers = {
        **DASHBOARD_DISABLED,
        # The memory of a host is divided among its workers.
        "memory_limit": 1 / max(Counter(hosts).values()),
        # If the start fails on another host, the scheduler exits, and a worker waits for it without a limit.
        "death_timeout": START_TIMEOUT,
        **worker_options,
    }
    # An idle scheduler exits, because it does not notice that this process was killed.
    scheduler = {**DASHBOARD_DISABLED, "allowed_failures": ALLOWED_FAILURES, "idle_timeout": "8 hours"}
    try:
        cluster = SSHCluster(
            [hosts[0], *hosts],
            connect_options={"connect_timeout": CONNECT_TIMEOUT},
            worker_options=workers,
            scheduler_options=scheduler,
            remote_python=shlex.quote(sys.executable),
            silence_logs=LOG_LEVEL,
        )
    except Exception as error:  # Dask raises bare exceptions if a process does not start.
        cause = error.__cause__ or error  # Dask wraps the error of a scheduler.
        remedy = f"Install openmed-nb[cluster] in {sys.executable} on each host."
        if isinstance(cause, (asyncssh.Error, OSError)):
            remedy = f"Check that ssh connects to each host without a prompt. {SSH_SETTINGS}."
        message = f"The cluster failed to start on {', '.join(hosts)}: {describe_error(cause)}."
        raise ClusterUnavailableError(message, remedy) from error

    async def discard_output() -> None:
        for process in (cluster.scheduler, *cluster.workers.values()):
            await process.proc.redirect(stdout=asyncssh.DEVNULL, stderr=asyncssh.DEVNULL)

    cluster.sync(discard_output)  # A process blocks when the pipe of its output is full.
    return cluster


def _start(create: Callable[[], SpecCluster], count: int, reason: str | None, remedy: str) -> Cluster:
    """Start a cluster, and return it after its workers have registered. If the start fails, stop all its processes.

    Args:
        create: Function that starts the processes.
        count: Number of workers.
        reason: Reason for the device of the workers, if this process selected it.
        remedy: Suggested action if Dask fails to start.

    Raises:
        ClusterUnavailableError: If the cluster fails to start.
    """
    import dask.config
    from distributed import Client

    from .worker import describe_worker  # This module imports numpy, which is imported only on demand.

    def start() -> Cluster:
        with START_LOCK, dask.config.set(START_SETTINGS):
            dask_cluster = create()
        with contextlib.ExitStack() as stack:
            stack.callback(dask_cluster.close)
            client = stack.enter_context(Client(dask_cluster))
            client.wait_for_workers(count, timeout=REGISTRATION_TIMEOUT)
            infos = call_on_workers(client, describe_worker)
            stack.pop_all()
        if reason is not None:
            infos = [replace(info, reason=reason) for info in infos]

        def stop() -> None:
            # Failures become warnings, because the caller may already handle another error.
            for close in (client.close, dask_cluster.close):
                try:
                    close()
                except Exception as error:  # noqa: BLE001, PERF203 - Dask raises many types, and both calls must run
                    message = f"The cluster did not shut down cleanly: {describe_error(error)}."
                    warn(f"{message} Check for remaining processes of the cluster.")

        return Cluster(client, WorkerList(tuple(infos)), stop)

    with ThreadPoolExecutor(1, "openmed_nb cluster") as executor:
        starting = executor.submit(start)
        try:
            return starting.result()
        except KeyboardInterrupt:
            if starting.exception() is None:
                starting.result().close()
            raise
        except (OpenMedError, ImportError):
            raise
        except Exception as error:  # noqa: BLE001 - Dask raises bare exceptions
            raise ClusterUnavailableError(f"The cluster failed to start: {describe_error(error)}.", remedy) from None


class Cluster(Displayable):
    """Running cluster, which ends with its ``with`` block or with :meth:`close`.

    Attributes:
        client: ``dask.distributed.Client`` for ``annotate(client=...)`` and other operations of Dask.
        workers: Descriptions of the workers at their start.
        closed: Whether the cluster was closed.
    """

    def __init__(self, client: Client, workers: WorkerList, stop: Callable[[], None]) -> None:
        self.client = client
        self.workers = workers
        self.closed = False
        self._stop = stop

    def __enter__(self) -> Cluster:  # noqa: PYI034 - typing.Self needs Python 3.11
        return self

    def __exit__(self, *_error: object) -> None:
        self.close()

    def close(self) -> None:
        """Stop all processes of the cluster. After an interrupt, call it again to continue waiting."""
        self.closed = True
        self._stop()

    def to_dict(self) -> dict[str, object]:
        """Return the workers as JSON-compatible mappings, lists and strings."""
        return self.workers.to_dict()

    def to_report(self) -> Report:
        """Return the report of the workers."""
        report = self.workers.to_report()
        title = f"Closed: {report.title}"
        return replace(report, title=title, html_sentences=(title,)) if self.closed else report


def create_certificates() -> Security:
    """Return TLS certificates for the connections of a cluster on this machine."""
    from distributed import Security

    require_extra("cryptography", "TLS certificates need cryptography")
    return Security.temporary()


def start_cluster(
    cluster: AbstractAsyncContextManager[SpecCluster], security: Security, count: int, reason: str | None, remedy: str
) -> Cluster:
    """Start a cluster, and return it after its workers have registered. If the start fails, stop all its processes.

    Args:
        cluster: Context manager that runs the cluster.
        security: TLS certificates.
        count: Number of workers.
        reason: Reason for the device of the workers, if this process selected it.
        remedy: Suggested action if Dask fails to start.

    Raises:
        ClusterUnavailableError: If the cluster fails to start.
    """
    from .worker import describe_worker  # This module imports numpy, which is imported only on demand.

    background_cluster = BackgroundContext(_cluster_with_client(cluster, security))
    try:
        try:
            client = background_cluster.start()
            client.wait_for_workers(count, timeout=REGISTRATION_TIMEOUT)
        except Exception as error:  # noqa: BLE001 - Dask raises bare exceptions if a process does not start
            for original in (error, error.__cause__):  # Dask wraps the error of a scheduler.
                if isinstance(original, (OpenMedError, ImportError)):
                    raise original from None
            raise ClusterUnavailableError(f"The cluster failed to start: {describe_error(error)}.", remedy) from None
        infos = call_on_workers(client, describe_worker)
        if reason is not None:
            infos = [replace(info, reason=reason) for info in infos]
        return Cluster(client, WorkerList(tuple(infos)), background_cluster.stop)
    except BaseException:
        background_cluster.stop()
        raise


@contextlib.asynccontextmanager
async def _cluster_with_client(
    cluster: AbstractAsyncContextManager[SpecCluster], security: Security
) -> AsyncIterator[Client]:
    """Context manager that runs a cluster with a client. The client has a separate event loop and works in any thread."""
    from distributed import Client

    with QUIET_DASK:
        async with cluster as running:
            address = running.scheduler_address
            connecting = asyncio.ensure_future(asyncio.to_thread(Client, address, security=security))
            try:
                client = await asyncio.shield(connecting)
                atexit.register(client.close)  # During the exit of Python, no new thread can close the client.
                yield client
            finally:
                client = await connecting
                atexit.unregister(client.close)
                if client.status != "closed":  # At exit, the client is already closed.
                    await asyncio.to_thread(client.close)


@contextlib.asynccontextmanager
async def local_cluster(
    plans: Sequence[WorkerSpec], security: Security, timeout: float = START_TIMEOUT
) -> AsyncIterator[SpecCluster]:
    """Context manager that runs a cluster on this machine, on the loopback interface only."""
    from distributed import Nanny, Scheduler, SpecCluster

    nannies: list[Nanny] = []

    def create_nanny(*arguments: object, **options: object) -> Nanny:
        nannies.append(Nanny(*arguments, **options))
        return nannies[-1]

    shared = {"host": "127.0.0.1", "protocol": "tls://", "security": security, **DASHBOARD_DISABLED}
    worker_options = {"silence_logs": LOG_LEVEL, "memory_limit": 1 / len(plans)}
    workers = {
        number: {"cls": create_nanny, "options": {**shared, **worker_options, **plan.options}}
        for number, plan in enumerate(plans)
    }
    scheduler = {"cls": Scheduler, "options": {**shared, "port": 0, "allowed_failures": ALLOWED_FAILURES}}
    cluster = SpecCluster(workers, scheduler, security=security, asynchronous=True)
    try:
        async with startup_settings():
            start = asyncio.ensure_future(cluster)
            try:
                await wait_with_timeout(start, timeout)
            finally:
                psutil = import_psutil()
                while not start.done():  # Dask waits until its processes have started, so they must be killed.
                    for nanny in nannies:
                        with contextlib.suppress(psutil.NoSuchProcess):
                            if nanny.pid is not None:
                                psutil.Process(nanny.pid).kill()
                    await asyncio.wait([start], timeout=CANCEL_POLL_INTERVAL)
                # asyncio logs errors that are never retrieved. This error was already raised, or the start was cancelled.
                start.exception()
        yield cluster
    finally:
        await cluster.close()


@contextlib.asynccontextmanager
async def startup_settings() -> AsyncIterator[None]:
    """Context manager that changes the settings of Dask during the start of one cluster.

    The start of another cluster waits here and can be cancelled.
    """
    import dask.config

    while not START_LOCK.acquire(blocking=False):  # noqa: ASYNC110 - each start has a separate event loop
        await asyncio.sleep(LOCK_POLL_INTERVAL)
    try:
        with dask.config.set(START_SETTINGS):
            yield
    finally:
        START_LOCK.release()


async def wait_with_timeout(start: asyncio.Future[SpecCluster], timeout: float) -> None:
    """Wait for a start and raise its error. The start continues after the timeout and after a cancellation."""
    done, _ = await asyncio.wait([start], timeout=timeout)
    if not done:
        raise TimeoutError(f"not started within {timeout:g} s")
    start.result()


class BackgroundContext(Generic[Value]):
    """Asynchronous context in a background thread, which exits the context on :meth:`stop` or at the exit of Python."""

    def __init__(self, context: AbstractAsyncContextManager[Value]) -> None:
        self._context = context
        self._thread = threading.Thread(target=self._run, name="openmed_nb cluster", daemon=True)
        self._stop_requested = False
        self._stop: Callable[[], None] | None = None
        self._started: Future[Value] = Future()
        self._finished: Future[None] = Future()
        self._failure: BaseException | None = None

    def start(self) -> Value:
        """Enter the context and return its value. If this raises an error, the context has already exited."""
        atexit.register(self.stop)
        self._thread.start()
        return self._started.result()

    def stop(self) -> None:
        """Exit the context and wait for it. After an interrupt, call it again to continue waiting.

        Failures become warnings, because the caller may already handle another error.
        """
        self._stop_requested = True
        if self._stop is not None:
            self._stop()
        if self._thread.is_alive():
            # In Python 3.11, a thread counts as finished after an interrupted join(), so this waits for a future.
            if not wait([self._finished], SHUTDOWN_TIMEOUT).done:
                message = f"The cluster is still running after {SHUTDOWN_TIMEOUT:g} s."
                warn(f"{message} Call close() to continue waiting.")
                return
            self._thread.join()
        atexit.unregister(self.stop)
        if self._failure is not None:
            message = f"The cluster did not shut down cleanly: {describe_error(self._failure)}."
            self._failure = None
            warn(f"{message} Check for remaining processes of the cluster.")

    def _run(self) -> None:
        """Run the context in a separate event loop, which cancels all its remaining tasks at the end."""
        try:
            # Block Ctrl-C in this thread, and in all threads and processes that it starts. Terminals and Jupyter send the
            # signal to the whole process group, and it stops a worker permanently. The resource tracker of multiprocessing
            # is started first, because up to Python 3.12 its start unblocks the signal.
            if hasattr(signal, "pthread_sigmask"):
                from multiprocessing import resource_tracker

                resource_tracker.ensure_running()
                signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGINT])
            asyncio.run(self._serve())
        except BaseException as error:  # noqa: BLE001 - the waiting thread raises it
            if self._started.done():
                self._failure = error
            else:
                self._started.set_exception(error)
        self._finished.set_result(None)

    async def _serve(self) -> None:
        """Enter the context, and exit it on request, even while it is being entered."""
        loop = asyncio.get_running_loop()
        stop_event = asyncio.Event()
        task = asyncio.current_task()

        def stop() -> None:
            if task is not None and not (stop_event.is_set() or self._started.done()):
                task.cancel()
            stop_event.set()

        def stop_threadsafe() -> None:
            with contextlib.suppress(RuntimeError):  # The event loop is already closed.
                loop.call_soon_threadsafe(stop)

        self._stop = stop_threadsafe
        if self._stop_requested:
            return
        async with self._context as value:
            self._started.set_result(value)
            await stop_event.wait()


# Dask logs only critical messages, because its messages can quote a note. Its errors become errors of this package.
LOG_LEVEL = logging.CRITICAL

# Environment variables that Dask sets in this process for its child processes (``Nanny`` and ``distributed.proctitle``).
DASK_VARIABLES = ("PYTHONHASHSEED", "__DASK_PARENT_PID")


class QuietDask:
    """Context manager that prevents Dask from storing and logging texts, and restores the settings that Dask changed.

    All clusters share it, from the first start to the last shutdown.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._num_users = 0
        self._exit_stack = contextlib.ExitStack()

    def __enter__(self) -> None:
        import dask.config
        from distributed.utils import silence_logging_cmgr

        settings = {
            # Dask does not restore this setting correctly if two clients are closed in the order of their creation.
            "scheduler": dask.config.get("scheduler", None),
        }
        with self._lock:
            if not self._num_users:
                self._exit_stack.enter_context(preserve_variables(DASK_VARIABLES, os.environ))
                self._exit_stack.enter_context(silence_logging_cmgr(LOG_LEVEL))
                self._exit_stack.enter_context(dask.config.set(settings))
            self._num_users += 1

    def __exit__(self, *_error: object) -> None:
        with self._lock:
            self._num_users -= 1
            if not self._num_users:
                self._exit_stack.close()


# Each cluster enters this context before its start and exits it after its shutdown, in its background thread.
QUIET_DASK = QuietDask()
