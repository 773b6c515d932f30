"""Startup and shutdown of a cluster on this machine or over SSH."""

from __future__ import annotations

import contextlib
import logging
import multiprocessing
import re
import shlex
import signal
import sys
import threading
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import TYPE_CHECKING

from .._events.activity import ProgressEvent, defer_interrupts
from .._render.display import Displayable, Report
from .._utils.text import describe_error
from .._utils.validation import check_optional_integer, invalid_value
from .._utils.warning import warn
from ..devices.machine import is_mps_simulated
from ..devices.request import DeviceRequest, source_name
from ..errors import ClusterUnavailableError, ConfigurationError, OpenMedError
from ..session import SESSION
from .client import WorkerList, call_on_workers, plan_workers, require_extra, worker_options

if TYPE_CHECKING:
    from distributed import Client, SpecCluster


# Dask logs only critical messages, because its messages can quote a note. Its errors become errors of this package.
LOG_LEVEL = logging.CRITICAL

ALLOWED_FAILURES = 2  # Number of workers that a text may crash. Dask gives up the text after one more crash.

START_TIMEOUT = 120.0  # Seconds from the start of a worker until the scheduler responds to it.
CONNECT_TIMEOUT = 15.0  # Seconds to wait for a connection over SSH.
CLOSE_TIMEOUT = 60.0  # Seconds to wait until each part of a cluster has ended.

START_SETTINGS: dict[str, object] = {
    # By default, Dask sets the number of threads of every process to 1, including this one. worker_options sets it per worker.
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

REGISTRATION_TIMEOUT = 10.0  # Seconds from the start of the workers until the scheduler knows them.

HOST_PATTERN = re.compile(r"[\w:][\w.:%-]*")  # Host name or address. Whether the host exists is checked on connection.
SSH_SETTINGS = "Set user names, ports and keys in ~/.ssh/config"

MAIN_GUARD = "In a script, call it under if __name__ == '__main__', because workers import the script."


def cluster(n: int | None = None, hosts: Iterable[str] | None = None, *, device: str | None = None) -> Cluster:
    """Start workers for :func:`openmed_nb.annotate` on this machine, or on several hosts over SSH.

    Each worker is a process that loads the model once. Its device is selected by the same rules as in a notebook. A worker
    that crashes is restarted, and its texts are processed again. An interrupt (Ctrl-C) stops the current operation of this
    process, but not the workers. ``client`` becomes the default client of Dask.

    The connections on this machine are encrypted and need a certificate of this cluster. On hosts, Dask's ``SSHCluster``
    starts the processes. They exchange the texts without encryption, and accept code from every machine that reaches their
    ports, so use it in a trusted network only. A cluster on hosts shuts down after 8 hours without work.

    Args:
        n: Number of workers on this machine (default: 1). More than one worker needs ``device="cpu"`` and as many cores.
            Two workers are always allowed on the CPU. Several workers share its cores. For several CUDA GPUs, pass the
            client of a ``dask_cuda.LocalCUDACluster`` to ``annotate``.
        hosts: Names of hosts to which ``ssh`` connects without a prompt. Each gets one worker, and the first also runs the
            scheduler of Dask. Each host needs the same openmed_nb with its ``cluster`` extra in a Python at the same path
            as this one, and ports that the other hosts and this machine can reach. User names, ports and keys are read from
            ``~/.ssh/config``.
        device: Device of all workers. If ``None``, use the device of the session, or the best device of each host.

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
        if hosts is None:
            return _start_on_this_machine(n, device)
        if n is not None:
            raise ConfigurationError(
                "n can only be used without hosts.", "Remove n. A host that is named twice gets two workers."
            )
        names = _validate_hosts(hosts)
        requested = None if device is None else DeviceRequest.parse(device, "argument").value
        require_extra("asyncssh", "A cluster over SSH needs asyncssh")
        reason = requested and f"{requested!r} was requested by {source_name('argument')}."
        remedy = f"Check that this machine and {', '.join(names)} can reach each other's ports."
        return _start(lambda: _create_ssh_cluster(names, worker_options(requested)), len(names), reason, remedy)


def _start_on_this_machine(n: int | None, device: str | None) -> Cluster:
    """Start a cluster on this machine, on the loopback interface only."""
    if is_mps_simulated():
        raise ConfigurationError("A SIMULATED Mac does not support clusters.", "End the simulation first.")
    from dask.system import CPU_COUNT
    from distributed import Nanny, Scheduler, Security, SpecCluster

    choice = SESSION.device(device)
    plans = plan_workers(choice.device, n, CPU_COUNT)
    require_extra("cryptography", "TLS certificates need cryptography")
    security = Security.temporary()
    main = sys.modules["__main__"]
    if not hasattr(main, "__spec__"):  # The magic %reset deletes it, and multiprocessing.spawn reads it.
        main.__spec__ = None
    remedy = f"{MAIN_GUARD} Check that there is enough memory for the workers."

    def create() -> SpecCluster:
        shared = {"host": "127.0.0.1", "protocol": "tls://", "security": security, **DASHBOARD_DISABLED}
        scheduler = {"cls": Scheduler, "options": {**shared, "port": 0, "allowed_failures": ALLOWED_FAILURES}}
        nanny_options = {**shared, "silence_logs": LOG_LEVEL, "memory_limit": 1 / len(plans)}
        workers = {number: {"cls": Nanny, "options": {**nanny_options, **plan}} for number, plan in enumerate(plans)}
        return SpecCluster(workers, scheduler, security=security, silence_logs=LOG_LEVEL)

    return _start(create, len(plans), choice.reason, remedy)


def _validate_hosts(hosts: object) -> tuple[str, ...]:
    """Validate host names and return them as a tuple.

    Raises:
        ConfigurationError: If the argument is not an iterable of valid host names.
    """
    names = tuple(hosts) if isinstance(hosts, Iterable) and not isinstance(hosts, str) else ()
    if names and all(isinstance(name, str) and HOST_PATTERN.fullmatch(name) for name in names):
        return names
    raise invalid_value("hosts", hosts, f"Pass a list of host names, such as ['mac1', 'mac2']. {SSH_SETTINGS}.")


def _create_ssh_cluster(hosts: Sequence[str], options: Mapping[str, object]) -> SpecCluster:
    """Start a cluster over SSH: the scheduler on the first host, and one worker for each host name.

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
        **options,
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
        raise ClusterUnavailableError(
            f"The cluster failed to start on {', '.join(hosts)}: {describe_error(cause)}.", remedy
        ) from error

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
        # Block Ctrl-C in this thread, and in all threads and processes that it starts. Terminals and Jupyter send the
        # signal to the whole process group, and it stops a worker permanently. The resource tracker of multiprocessing
        # is started first, because up to Python 3.12 its start unblocks the signal.
        if hasattr(signal, "pthread_sigmask"):
            from multiprocessing import resource_tracker

            resource_tracker.ensure_running()
            signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGINT])
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
        return Cluster(client, WorkerList(tuple(infos)))

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

    def __init__(self, client: Client, workers: WorkerList) -> None:
        self.client = client
        self.workers = workers
        self.closed = False
        self._lock = threading.Lock()  # Held while Dask closes, which fails if a second thread closes concurrently.

    def __enter__(self) -> Cluster:  # noqa: PYI034 - typing.Self needs Python 3.11
        return self

    def __exit__(self, *_error: object) -> None:
        self.close()

    def close(self) -> None:
        """Stop all processes of the cluster. An interrupt is raised when they have ended.

        Failures become warnings, because the caller may already handle another error.
        """
        self.closed = True
        with self._lock:
            for closeable in (self.client, self.client.cluster):
                try:
                    with defer_interrupts():  # After an interrupted close, the next one of Dask would wait forever.
                        closeable.close(timeout=CLOSE_TIMEOUT)
                except Exception as error:  # noqa: BLE001, PERF203 - Dask raises many types, and both calls must run
                    message = f"The cluster did not shut down cleanly: {describe_error(error)}."
                    warn(f"{message} Check for remaining processes of the cluster.")

    def to_dict(self) -> dict[str, object]:
        """Return the workers as JSON-compatible mappings, lists and strings."""
        return self.workers.to_dict()

    def to_report(self) -> Report:
        """Return the report of the workers."""
        report = self.workers.to_report()
        return replace(report, title=f"Closed: {report.title}") if self.closed else report
