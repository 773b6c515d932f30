"""Start a cluster on this computer or over SSH, keep it while it is used, and end all its processes."""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import logging
import multiprocessing
import os
import signal
import sys
import threading
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, wait
from contextlib import AbstractAsyncContextManager
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from .._events.activity import ProgressEvent
from .._render.display import Displayable, Report
from .._utils.text import describe_error, short_type_name
from .._utils.validation import check_optional_integer
from .._utils.warning import warn
from ..devices.environment import preserve_variables
from ..devices.machine import import_psutil, is_mps_simulated
from ..devices.request import DeviceRequest
from ..errors import ClusterUnavailableError, ConfigurationError, OpenMedError
from ..session import SESSION
from .client import require_extra
from .members import WorkerList, WorkerSpec, plan_workers, visible_gpu_ids
from .ssh import (
    ALLOWED_FAILURES,
    DASHBOARD_DISABLED,
    NETWORK_REMEDY,
    START_TIMEOUT,
    SshLogin,
    ssh_cluster,
    startup_settings,
    validate_hosts,
    wait_with_timeout,
)

if TYPE_CHECKING:
    from distributed import Client, Nanny, Security, SpecCluster


Value = TypeVar("Value")

REGISTRATION_TIMEOUT = 10.0  # Seconds that workers may take from their start until the scheduler knows them.
SHUTDOWN_TIMEOUT = 30.0  # Seconds to wait for the end of a cluster, which otherwise goes on in its thread.
CANCEL_POLL_INTERVAL = 0.1  # Seconds between two looks at a start that was given up.

MAIN_GUARD = "In a script, call it under if __name__ == '__main__': workers import the script."


def cluster(  # noqa: PLR0913 - each is one thing that a person may want to say
    n: int | None = None,
    hosts: Iterable[str] | None = None,
    *,
    device: str | None = None,
    threads: int | None = None,
    user: str | None = None,
    key: str | os.PathLike[str] | None = None,
    port: int | None = None,
    known_hosts: str | os.PathLike[str] | None = None,
    remote_python: str | os.PathLike[str] | None = None,
    security: Security | None = None,
    progress: bool = True,
) -> Cluster:
    """Start workers for :func:`openmed_nb.annotate`, on this computer or over SSH on several; they end with the block.

    Each worker is a process that loads the model once, on a device that the same rules choose. All connections are
    encrypted, and only processes of this cluster can make them: certificates are made for it, and gone with
    it. A worker that dies is started again, and its texts are read again. An interrupt (Ctrl-C) stops what this process
    waits for, and no worker on this computer. On hosts, a cluster that has had no work for 8 hours ends itself. ``client``
    becomes Dask's default client, as any does.

    Args:
        n: How many workers on this computer; ``None`` is one for each device: each GPU of CUDA, MPS, or the CPU. More than
            one need as many GPUs of CUDA, or ``device="cpu"`` with as many cores; two are always allowed there.
        hosts: Names of computers that SSH reaches, for a worker on each; the first also has Dask's scheduler. Each needs
            the same openmed_nb with its ``cluster`` extra, and ports that the others and this computer can reach. Its
            key must be among the known hosts. A host that is named twice gets two workers, each with a GPU of CUDA of its own
            where it has some.
        device: The device of every worker; ``None`` is the session's, and on hosts the best of each.
        threads: On how many threads a worker computes on the CPU; ``None`` shares out the cores of this computer, and leaves
            it to torch on hosts.
        user: The name on the hosts; ``None`` is as in the settings of SSH, like the next three.
        key: The file of a private key.
        port: The port of SSH.
        known_hosts: The file of the keys of known hosts.
        remote_python: The Python on the hosts; ``None`` is the path of this one.
        security: Certificates of yours, as files that are on every host; ``None`` makes some for this cluster.
        progress: Whether to show what is under way, where it takes longer than half a second.

    Returns:
        A context manager with ``client``, to be passed to ``annotate``, and ``members``: which worker is where, on which
        device, and why. Without a ``with`` block, ``close()`` ends it.

    Raises:
        ConfigurationError: Where Dask is not installed, and for an argument that cannot be used.
        ClusterError: Where it does not start; the message names the host.
        DeviceError: Where the device cannot be used.

    Example::

        with nb.cluster() as cluster:
            found = nb.annotate(notes, client=cluster.client)
        with nb.cluster(hosts=["mac1", "mac2"], user="me") as cluster:
            found = nb.annotate(notes, "disease_detection_tiny", client=cluster.client)
    """
    if getattr(multiprocessing.current_process(), "_inheriting", False):
        # A worker that imports the script; multiprocessing would refuse to start processes there, too.
        raise SystemExit(f"A worker came to start a cluster of its own. {MAIN_GUARD}")
    with SESSION.operation(progress):
        SESSION.notify(ProgressEvent("Starting", "workers"))
        require_extra("distributed", "A cluster needs Dask")
        check_optional_integer("n", n, otherwise=", or name computers in hosts=[...]")
        check_optional_integer("threads", threads)
        if hosts is None:
            named = {"user": user, "key": key, "port": port, "known_hosts": known_hosts, "remote_python": remote_python}
            if given := [name for name, value in named.items() if value is not None]:
                what = f"{', '.join(given)} {'is' if len(given) == 1 else 'are'} for hosts."
                raise ConfigurationError(what, "Name them in hosts=[...].")
            if is_mps_simulated():
                raise ConfigurationError("A SIMULATED Mac has no cluster.", "End the simulation first.")
            from dask.system import CPU_COUNT

            choice = SESSION.device(device)
            gpus = visible_gpu_ids(
                len(SESSION.device_manager.torch.cuda_names or ()), os.environ.get("CUDA_VISIBLE_DEVICES")
            )
            plans = plan_workers(choice.device, n, gpus, CPU_COUNT, threads)
            own = validate_security(security)
            return start_cluster(local_cluster(plans, own), own, len(plans), choice.reason, local_start_remedy())
        if n is not None:
            again = "Leave it out; a host that is named twice gets two workers."
            raise ConfigurationError("n is for this computer alone.", again)
        names, login = validate_hosts(hosts), SshLogin.from_arguments(user, key, port, known_hosts, remote_python)
        wish = None if device is None else DeviceRequest.parse(device, "argument").value
        require_extra("asyncssh", "A cluster over SSH needs asyncssh")
        own = validate_security(security, ("client",))
        reason = wish and f"{wish!r} was asked for by argument."
        return start_cluster(ssh_cluster(names, login, wish, threads, own), own, len(names), reason, NETWORK_REMEDY)


class Cluster(Displayable):
    """A cluster that was started here; it ends with :meth:`close`, or with its ``with`` block.

    Attributes:
        client: The ``dask.distributed.Client``, for ``annotate(client=...)`` and for whatever else Dask does.
        members: Who takes part, as each worker said when it started.
        closed: Whether it was closed.
    """

    def __init__(self, client: Client, members: WorkerList, end: Callable[[], None]) -> None:
        self.client, self.workers, self.closed, self._end = client, members, False, end

    def __enter__(self) -> Cluster:  # noqa: PYI034 - Self came with Python 3.11
        return self

    def __exit__(self, *_error: object) -> None:
        self.close()

    def close(self) -> None:
        """End every process of the cluster, and wait for that; where it was interrupted, a second time waits for the rest."""
        self.closed = True
        self._end()

    def to_dict(self) -> dict[str, Any]:
        """Return who takes part, as plain mappings, lists and strings."""
        return self.workers.to_dict()

    def to_report(self) -> Report:
        """Return who takes part, or took part."""
        report = self.workers.to_report()
        title = f"Closed: {report.title}"
        return replace(report, title=title, html_sentences=(title,)) if self.closed else report


ROLES = ("client", "scheduler", "worker")  # Dask's kinds of processes; each has a certificate.


def validate_security(security: Any, roles: Iterable[str] = ROLES) -> Security:
    """Return certificates for the connections: a person's own, or new ones.

    The files for ``roles``, which processes of this computer will have, are checked here.
    """
    from distributed import Security

    if security is None:
        require_extra("cryptography", "No certificates can be made")
        return Security.temporary()
    if not isinstance(security, Security):
        what = f"security cannot be {short_type_name(security)}."
        raise ConfigurationError(what, "Pass a distributed.Security, or leave it out.")
    fields = ("tls_ca_file", *(f"tls_{role}_cert" for role in ROLES))
    if missing := [field for field in fields if not getattr(security, field)]:
        remedy = "Name a file for each, or leave security out."
        raise ConfigurationError(f"security has no {', '.join(missing)}.", remedy)
    for role in roles:
        try:
            security.get_connection_args(role)
        except OSError as error:  # noqa: PERF203 - three at most; ssl's errors are of this class, too
            what = f"The certificate of security for the {role} cannot be used: {describe_error(error)}."
            raise ConfigurationError(what, "Name files of PEM that are there, or leave security out.") from error
    return security


def start_cluster(
    cluster: AbstractAsyncContextManager[SpecCluster], security: Security, count: int, reason: str | None, remedy: str
) -> Cluster:
    """Start a cluster and return it once its workers have introduced themselves; if that fails, end all of it.

    ``reason`` says why the workers have their device, and ``remedy`` what to do if Dask itself cannot start.
    """
    from .stream import get_workers  # It imports numpy, which no public name does before it is called.

    life = BackgroundContext(cluster_with_client(cluster, security))
    try:
        try:
            client = life.start()
            client.wait_for_workers(count, timeout=REGISTRATION_TIMEOUT)
        except Exception as error:  # noqa: BLE001 - Dask raises bare Exceptions where a process does not start
            for known in (error, error.__cause__):  # Dask wraps the error of a scheduler.
                if isinstance(known, (OpenMedError, ImportError)):
                    raise known from None
            raise ClusterUnavailableError(f"The cluster does not start: {describe_error(error)}.", remedy) from None
        return Cluster(client, get_workers(client, reason), life.stop)
    except BaseException:
        life.stop()
        raise


@contextlib.asynccontextmanager
async def cluster_with_client(
    cluster: AbstractAsyncContextManager[SpecCluster], security: Security
) -> AsyncIterator[Client]:
    """Run a cluster with a client, which has a loop of its own, so that any thread can use it."""
    from distributed import Client

    with QUIET_DASK:
        async with cluster as running:
            address = running.scheduler_address
            connecting = asyncio.ensure_future(asyncio.to_thread(Client, address, security=security))
            try:
                client = await asyncio.shield(connecting)
                atexit.register(client.close)  # When Python exits, no new thread can do that any more.
                yield client
            finally:
                client = await connecting
                atexit.unregister(client.close)
                if client.status != "closed":  # As it is at exit.
                    await asyncio.to_thread(client.close)


def local_start_remedy() -> str:
    """Return what to do if workers do not start; those of a script import it (``multiprocessing.spawn``)."""
    main = sys.modules["__main__"]
    if getattr(main, "__spec__", None) or hasattr(main, "__file__"):
        return MAIN_GUARD
    return "Look whether there is memory for them, or use fewer: n=1."


@contextlib.asynccontextmanager
async def local_cluster(
    plans: Sequence[WorkerSpec], security: Security, timeout: float = START_TIMEOUT
) -> AsyncIterator[SpecCluster]:
    """Run a cluster on this computer that no other computer can reach."""
    from distributed import Nanny, Scheduler, SpecCluster

    nannies: list[Nanny] = []

    def nanny(*arguments: Any, **options: Any) -> Nanny:
        nannies.append(Nanny(*arguments, **options))
        return nannies[-1]

    shared = {"host": "127.0.0.1", "protocol": "tls://", "security": security, **DASHBOARD_DISABLED}
    quiet = {"silence_logs": SILENT, "memory_limit": 1 / len(plans)}
    workers = {
        number: {"cls": nanny, "options": {**shared, **quiet, **plan.options}} for number, plan in enumerate(plans)
    }
    scheduler = {"cls": Scheduler, "options": {**shared, "port": 0, "allowed_failures": ALLOWED_FAILURES}}
    cluster = SpecCluster(workers, scheduler, security=security, asynchronous=True)
    try:
        async with startup_settings({}):
            start = asyncio.ensure_future(cluster)
            try:
                await wait_with_timeout(start, timeout)
            finally:
                psutil = import_psutil()
                while not start.done():  # Dask waits until its processes are there, so they have to be killed.
                    for one in nannies:
                        with contextlib.suppress(psutil.NoSuchProcess):
                            if one.pid is not None:
                                psutil.Process(one.pid).kill()
                    await asyncio.wait([start], timeout=CANCEL_POLL_INTERVAL)
                start.exception()  # Raised already, or not of interest any more; asyncio would log it.
        yield cluster
    finally:
        await cluster.close()


class BackgroundContext(Generic[Value]):
    """An asynchronous context in a thread of its own, which enters it and leaves it at :meth:`end` or at exit."""

    def __init__(self, context: AbstractAsyncContextManager[Value]) -> None:
        self._context = context
        self._thread = threading.Thread(target=self._run, name="openmed_nb cluster", daemon=True)
        self._asked = False
        self._stop: Callable[[], None] | None = None
        self._begun: Future[Value] = Future()
        self._over: Future[None] = Future()
        self._failure: BaseException | None = None

    def start(self) -> Value:
        """Enter the context and return its value; if that fails, the context has been left again when this raises."""
        atexit.register(self.stop)
        self._thread.start()
        return self._begun.result()

    def stop(self) -> None:
        """Leave the context, entered or not, and wait for that; after an interrupt, call it again to wait again.

        Failures become warnings, because another error may be under way here.
        """
        self._asked = True
        if self._stop is not None:
            self._stop()
        if self._thread.is_alive():
            # Python 3.11 takes a thread for ended after an interrupted join(), so this waits for a future.
            if not wait([self._over], SHUTDOWN_TIMEOUT).done:
                what = f"The cluster has not ended after {SHUTDOWN_TIMEOUT:g} s."
                warn(f"{what} Call close() to wait again.")
                return
            self._thread.join()
        atexit.unregister(self.stop)
        if self._failure is not None:
            failure, self._failure = self._failure, None
            what = f"The cluster did not end as it should: {describe_error(failure)}."
            warn(f"{what} Look whether processes of it are left.")

    def _run(self) -> None:
        """Run the context in a loop of its own, which ends all that the context began."""
        try:
            block_sigint()
            asyncio.run(self._serve())
        except BaseException as error:  # noqa: BLE001 - the thread that waits raises it
            if self._begun.done():
                self._failure = error
            else:
                self._begun.set_exception(error)
        self._over.set_result(None)

    async def _serve(self) -> None:
        """Enter the context, and leave it when asked to, even while it is being entered."""
        loop, asked = asyncio.get_running_loop(), asyncio.Event()
        entering = asyncio.current_task()

        def stop() -> None:
            if entering is not None and not (asked.is_set() or self._begun.done()):
                entering.cancel()
            asked.set()

        def stop_from_outside() -> None:
            with contextlib.suppress(RuntimeError):  # The loop has ended already.
                loop.call_soon_threadsafe(stop)

        self._stop = stop_from_outside
        if self._asked:
            return
        async with self._context as value:
            self._begun.set_result(value)
            await asked.wait()


def block_sigint() -> None:
    """Block Ctrl-C in this thread, and in every thread and process that it starts, which inherit that.

    A terminal and Jupyter send it to the whole group of processes, and a worker that gets it ends for good. The resource
    tracker of multiprocessing starts first, because until Python 3.12 its start unblocks interrupts.
    """
    if hasattr(signal, "pthread_sigmask"):
        from multiprocessing import resource_tracker

        resource_tracker.ensure_running()
        signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGINT])


class SharedQuietDask:
    """:func:`discreet` for all clusters at once: the first one enters it, and the last one leaves it."""

    def __init__(self) -> None:
        self._lock, self._users, self._entered = threading.Lock(), 0, contextlib.ExitStack()

    def __enter__(self) -> None:
        with self._lock:
            if not self._users:
                self._entered.enter_context(quiet_dask())
            self._users += 1

    def __exit__(self, *_error: object) -> None:
        with self._lock:
            self._users -= 1
            if not self._users:
                self._entered.close()


# Dask logs only what is critical: its messages can quote a note, and its errors become errors of this package.
SILENT = logging.CRITICAL

# The variables that Dask sets in this process for those that it starts (its nanny, and ``distributed.proctitle``).
DASK_VARIABLES = ("PYTHONHASHSEED", "__DASK_PARENT_PID")


@contextlib.contextmanager
def quiet_dask() -> Iterator[None]:
    """Keep Dask from keeping and logging texts in this process, and restore afterwards what Dask itself changed."""
    import dask.config
    from distributed.utils import silence_logging_cmgr

    settings = {
        # Dask keeps the last messages of each connection for debugging (``BatchedSend.recent_message_log``): here, these
        # would be thousands of notes.
        "distributed.admin.low-level-log-length": 0,
        # Dask restores this wrongly when two clients are closed in the order in which they were made.
        "scheduler": dask.config.get("scheduler", None),
    }
    with preserve_variables(DASK_VARIABLES, os.environ), silence_logging_cmgr(SILENT), dask.config.set(settings):
        yield


# Every cluster enters it before its start and leaves it after its end, in its own thread.
QUIET_DASK = SharedQuietDask()
