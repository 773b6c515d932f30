"""Start a cluster, keep it while it is used, and end all its processes."""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import importlib
import logging
import multiprocessing
import os
import signal
import sys
import threading
import warnings
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, wait
from contextlib import AbstractAsyncContextManager, AbstractContextManager
from dataclasses import dataclass, replace
from threading import Thread
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from ..devices.machine import import_psutil
from ..display import Report, Shown
from ..errors import ClusterUnusable, ConfigurationError, OpenMedError, OpenMedWarning, cause, whole_or_none
from .members import Members

if TYPE_CHECKING:
    from distributed import Client, Nanny, Security, SpecCluster


def import_extra(name: str, what: str) -> None:
    """Check that a package of the ``cluster`` extra is installed.

    Args:
        name: The package.
        what: What cannot be had without it, in words.

    Raises:
        ConfigurationError: Where it is not installed.

    Example:
        >>> import_extra("no_such_package", "A cluster needs it")
        Traceback (most recent call last):
        ...
        openmed_nb.errors.ConfigurationError: A cluster needs it: No module named 'no_such_package'. Install it: python -m pip install 'openmed-nb[cluster]'.
    """
    try:
        importlib.import_module(name)
    except ImportError as error:
        remedy = "Install it: python -m pip install 'openmed-nb[cluster]'."
        raise ConfigurationError(f"{what}: {cause(error)}.", remedy) from error


ALWAYS = 2
"""How many workers a CPU may always have; with many more than cores, a computer does nothing but start them."""


@dataclass(frozen=True)
class WorkerPlan:
    """A worker process.

    Attributes:
        device: Its device, as it sees it; ``None`` is the best of its computer.
        visible: The value of ``CUDA_VISIBLE_DEVICES`` that gives it one GPU; ``None`` where it is no GPU of CUDA.
        threads: On how many threads it computes on the CPU; ``None`` is torch's choice.
    """

    device: str | None
    visible: str | None = None
    threads: int | None = None

    @property
    def environment(self) -> dict[str, str]:
        """The variables that it gets."""
        threads = None if self.threads is None else str(self.threads)
        named = {
            "OPENMED_TORCH_DEVICE": self.device,
            "CUDA_VISIBLE_DEVICES": self.visible,
            "OMP_NUM_THREADS": threads,
        }
        return {name: value for name, value in named.items() if value is not None}

    @property
    def tasks(self) -> int:
        """How many chunks it holds at once: one is tokenised while another computes, where there is a thread for it."""
        return 1 if self.threads == 1 else 2


def plan_workers(
    device: str, n: int | None, gpus: Sequence[str], cores: int, threads: int | None = None
) -> tuple[WorkerPlan, ...]:
    """Return the workers for a device of this computer: one for each GPU of CUDA, one for MPS, one or more for the CPU.

    Args:
        device: The device in force.
        n: How many; ``None`` is one for each device.
        gpus: What ``CUDA_VISIBLE_DEVICES`` calls the GPUs that this process sees.
        cores: How many cores the CPU has.
        threads: On how many threads each computes on the CPU; ``None`` shares the cores out.

    Raises:
        ConfigurationError: For more workers than devices or cores, or no worker.

    Example:
        >>> [plan.environment["CUDA_VISIBLE_DEVICES"] for plan in plan_workers("cuda", None, ("0", "1"), 8)]
        ['0', '1']
        >>> plan_workers("cpu", 2, (), 8)[0].environment
        {'OPENMED_TORCH_DEVICE': 'cpu', 'OMP_NUM_THREADS': '4'}
    """
    whole_or_none("n", n)
    whole_or_none("threads", threads)
    if device == "cpu":
        count = n or 1
        check_count(n, max(ALWAYS, cores), f"{cores} core{'s' * (cores != 1)} of the CPU", "")
        shared = None if count == 1 else max(1, cores // count)
        return (WorkerPlan("cpu", threads=threads or shared),) * count
    if device == "mps":
        check_count(n, 1, "one MPS device, which several processes would only share")
        return (WorkerPlan("mps", threads=threads),)
    index = device.partition(":")[2]
    chosen = gpus if not index else gpus[int(index) : int(index) + 1]
    check_count(n, len(chosen), f"{len(chosen)} GPU{'s' * (len(chosen) != 1)} for {device!r}")
    return tuple(WorkerPlan("cuda", gpu, threads) for gpu in chosen[:n])


def check_count(n: int | None, most: int, there: str, otherwise: str = ", or device='cpu'") -> None:
    """Check that there is a device for each worker, or a core.

    Raises:
        ConfigurationError: Where there is not.
    """
    if n is not None and n > most:
        raise ConfigurationError(f"n cannot be {n} with {there}.", f"Use n={most}{otherwise}.")


def visible_gpus(count: int, environ: Mapping[str, str]) -> tuple[str, ...]:
    """Return what ``CUDA_VISIBLE_DEVICES`` calls each GPU that this process sees.

    Example:
        >>> visible_gpus(2, {}), visible_gpus(2, {"CUDA_VISIBLE_DEVICES": "2,GPU-5a, 7"})
        (('0', '1'), ('2', 'GPU-5a'))
    """
    named = [name.strip() for name in environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if name.strip()]
    return tuple(named or map(str, range(count)))[:count]


def plan_hosts(
    hosts: Sequence[str], gpus: Mapping[str, Sequence[str]], device: str | None, threads: int | None
) -> tuple[WorkerPlan, ...]:
    """Return the workers on hosts: one for each name, with a GPU of CUDA of its own where the host has some.

    Args:
        hosts: The hosts.
        gpus: What ``CUDA_VISIBLE_DEVICES`` calls the GPUs of a host; one that is not there leaves the choice to its worker.
        device: The device of every worker; ``None`` is the best of each host.
        threads: On how many threads each computes on the CPU; ``None`` is torch's choice.

    Raises:
        ConfigurationError: For a host that is named more often than it has GPUs.

    Example:
        >>> [plan.visible for plan in plan_hosts(["gpu1", "mac1", "gpu1"], {"gpu1": ("0", "1")}, None, None)]
        ['0', None, '1']
    """
    for host, count in Counter(hosts).items():
        there = len(gpus.get(host, ())) or count
        if count > there:
            what = f"{host} is named {count} times, and has {there} GPU{'s' * (there != 1)}."
            raise ConfigurationError(what, f"Name it {there} times at most, or use device='cpu'.")
    free = {host: iter(names) for host, names in gpus.items()}
    return tuple(WorkerPlan(device, next(free.get(host, iter(())), None), threads) for host in hosts)


ALLOWED_FAILURES = 2
"""How many workers a text may end before it is given up with the next: three in all."""

START: dict[str, Any] = {
    "distributed.nanny.pre-spawn-environ": {},
    "distributed.scheduler.http.routes": [],
    "distributed.worker.http.routes": [],
    "distributed.worker.profile.enabled": False,
}
"""Dask would set the threads of every process to one, this one included; here they are set for each worker. No page is
served: Dask opens a port for them all the same, which is kept to the computer itself. So nobody sees what its profiler finds,
which looks at a worker's stack every 10 ms."""

FORGETFUL = {"distributed.admin.low-level-log-length": 0}
"""Dask keeps the last messages of each connection for those who look for its errors (``BatchedSend.recent_message_log``):
here these would be thousands of notes."""

PAGES = {"dashboard": False, "dashboard_address": "127.0.0.1:0"}

SILENT = logging.CRITICAL
"""What Dask logs: its errors are told as ours, and in its own words they can hold those of a note."""

SET_BY_DASK = ("PYTHONHASHSEED", "__DASK_PARENT_PID")
"""The variables that Dask sets in this process for those that it starts (its nanny, and ``distributed.proctitle``)."""

LOOK_AT_OTHERS = 0.02
"""How often a start looks whether its turn has come, in seconds."""


class Shared:
    """A context that several share at once: the first enters it, and the last leaves it, whichever that is.

    Args:
        make: Makes the context.

    Example:
        >>> @contextlib.contextmanager
        ... def room():
        ...     print("light")
        ...     yield
        ...     print("dark")
        >>> shared = Shared(room)
        >>> first, second = contextlib.ExitStack(), contextlib.ExitStack()
        >>> first.enter_context(shared)
        light
        >>> second.enter_context(shared)
        >>> first.close()
        >>> second.close()
        dark
    """

    def __init__(self, make: Callable[[], AbstractContextManager[object]]) -> None:
        self._make = make
        self._lock = threading.Lock()
        self._users = 0
        self._entered = contextlib.ExitStack()

    def __enter__(self) -> None:
        with self._lock:
            if not self._users:
                self._entered.enter_context(self._make())
            self._users += 1

    def __exit__(self, *_error: object) -> None:
        with self._lock:
            self._users -= 1
            if not self._users:
                self._entered.close()


@contextlib.contextmanager
def discreet() -> Iterator[None]:
    """Have a process in which Dask keeps and logs no text, and give back afterwards what it changes by itself.

    Its clients are no help with that: of two that are closed in the order in which they were made, the second leaves
    ``scheduler`` as the first had set it.
    """
    import dask.config
    from distributed.utils import silence_logging_cmgr

    settings = {**FORGETFUL, "scheduler": dask.config.get("scheduler", None)}
    with same_environment(), silence_logging_cmgr(SILENT), dask.config.set(settings):
        yield


@contextlib.contextmanager
def same_environment() -> Iterator[None]:
    """Give the variables back that Dask sets in this process."""
    before = {name: os.environ.get(name) for name in SET_BY_DASK}
    try:
        yield
    finally:
        for name, value in before.items():
            os.environ.pop(name, None)
            if value is not None:
                os.environ[name] = value


WHILE_CLUSTERS_LIVE = Shared(discreet)
"""Every cluster is in it from before its start until after its end, in the thread of its own."""

TURN = threading.Lock()
"""Which start has its settings in Dask's, of which a process has one set."""


@contextlib.asynccontextmanager
async def for_a_start(settings: Mapping[str, Any]) -> AsyncIterator[None]:
    """Have Dask's settings for the start of one cluster; that of another waits meanwhile, and can be called off."""
    import dask.config

    while not TURN.acquire(blocking=False):  # noqa: ASYNC110 - starts have loops of their own
        await asyncio.sleep(LOOK_AT_OTHERS)
    try:
        with dask.config.set({**START, **settings}):
            yield
    finally:
        TURN.release()


Value = TypeVar("Value")

END_TIMEOUT = 30.0
"""How long the end of a cluster is waited for, in seconds; what takes longer goes on in its thread."""


def keep_interrupts_out() -> None:
    """Keep Ctrl-C from this thread, and from every thread and process that starts here: they inherit what it blocks.

    A terminal and Jupyter send it to the whole group of processes, and a worker that gets it leaves for good. Python's
    watcher of shared memory, which multiprocessing starts when it first needs it, is there before: until Python 3.12, its
    start unblocks interrupts.
    """
    if hasattr(signal, "pthread_sigmask"):
        from multiprocessing import resource_tracker

        resource_tracker.ensure_running()
        signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGINT])


class Lifetime(Generic[Value]):
    """An asynchronous context that a thread enters, and leaves when it is told to, or where this process ends.

    Args:
        context: The context; it is left however far it was entered.

    Example:
        >>> @contextlib.asynccontextmanager
        ... async def room():
        ...     yield "open"
        ...     print("closed")
        >>> life = Lifetime(room())
        >>> life.begin()
        'open'
        >>> life.end()
        closed
        >>> life.end()
    """

    def __init__(self, context: AbstractAsyncContextManager[Value]) -> None:
        self._context = context
        self._thread = Thread(target=self._live, name="openmed_nb cluster", daemon=True)
        self._asked = False
        self._stop: Callable[[], None] | None = None
        self._begun: Future[Value] = Future()
        self._over: Future[None] = Future()
        self._failure: BaseException | None = None

    def begin(self) -> Value:
        """Enter the context.

        Returns:
            What it gives.

        Raises:
            Exception: What it cannot be entered for; it has been left then.
        """
        atexit.register(self.end)
        self._thread.start()
        return self._begun.result()

    def end(self) -> None:
        """Leave the context, and wait until it is left; an interrupted wait can be taken up again.

        Nothing is raised, because this stands where another error may be under way: what goes wrong is warned of.
        """
        self._asked = True
        if self._stop is not None:
            self._stop()
        if self._thread.is_alive():
            # An interrupted Thread.join() takes its thread for ended (Python 3.11), so something else is waited for.
            if not wait([self._over], END_TIMEOUT).done:
                what = f"The cluster has not ended after {END_TIMEOUT:g} s."
                warnings.warn(OpenMedWarning(f"{what} Call close() to wait again."), stacklevel=2)
                return
            self._thread.join()
        atexit.unregister(self.end)
        if self._failure is not None:
            failure, self._failure = self._failure, None
            what = f"The cluster did not end as it should: {cause(failure)}."
            warnings.warn(OpenMedWarning(f"{what} Look whether processes of it are left."), stacklevel=2)

    def _live(self) -> None:
        """Run the context in a loop of its own; all that it began there ends with the loop."""
        try:
            keep_interrupts_out()
            asyncio.run(self._serve())
        except BaseException as error:  # noqa: BLE001 - it belongs to the thread that waits
            if self._begun.done():
                self._failure = error
            else:
                self._begun.set_exception(error)
        self._over.set_result(None)

    async def _serve(self) -> None:
        """Enter the context, and leave it once that is asked for, also on the way in."""
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


START_TIMEOUT = 120.0
"""How long a start may take, in seconds."""

ARRIVAL_TIMEOUT = 10.0
"""How long workers that have started may take to be known to the scheduler, in seconds."""

MAIN_GUARD = "In a script, call it under if __name__ == '__main__': workers import the script."


class Cluster(Shown):
    """A cluster that was started here; it ends with :meth:`close`, or with its ``with`` block.

    Attributes:
        client: The ``dask.distributed.Client``, for ``annotate(client=...)`` and for whatever else Dask does.
        members: Who takes part, as each worker said when it started.
        closed: Whether it was closed.
    """

    def __init__(self, client: Client, members: Members, end: Callable[[], None]) -> None:
        self.client, self.members, self.closed, self._end = client, members, False, end

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
        return self.members.to_dict()

    def report(self) -> Report:
        """Return who takes part, or took part."""
        report = self.members.report()
        return replace(report, title=f"Closed: {report.title}") if self.closed else report


def end_import_of_script() -> None:
    """End a worker that comes to start a cluster while it imports the script that started it, in one line.

    Raises:
        SystemExit: There; multiprocessing would refuse to start a process too (its ``_check_not_importing_main``).
    """
    if getattr(multiprocessing.current_process(), "_inheriting", False):
        raise SystemExit(f"A worker came to start a cluster of its own. {MAIN_GUARD}")


def begin(
    cluster: AbstractAsyncContextManager[SpecCluster],
    security: Security,
    count: int,
    introduce: Callable[[Client], Members],
    remedy: str,
) -> Cluster:
    """Start a cluster and return it once its workers said who they are; where that fails, nothing of it is left.

    Args:
        cluster: Starts a cluster of Dask, and ends it.
        security: The certificates that processes know each other by.
        count: How many workers it has.
        introduce: Asks the workers who they are.
        remedy: What to do where it does not start and nobody knows why.

    Raises:
        ClusterUnusable: Where it does not start.
    """
    life = Lifetime(with_client(cluster, security))
    try:
        client = started(life, count, remedy)
        return Cluster(client, introduce(client), life.end)
    except BaseException:
        life.end()
        raise


def started(life: Lifetime[Client], count: int, remedy: str) -> Client:
    """Return the client of a cluster once all workers are there."""
    try:
        client = life.begin()
        client.wait_for_workers(count, timeout=ARRIVAL_TIMEOUT)
    except Exception as error:  # noqa: BLE001 - Dask raises bare Exceptions where a process does not start
        for known in (error, error.__cause__):  # Dask wraps what a scheduler does not start for.
            if isinstance(known, (OpenMedError, ImportError)):
                raise known from None
        raise ClusterUnusable(f"The cluster does not start: {cause(error)}.", remedy) from None
    return client


async def in_time(start: asyncio.Future[Any], timeout: float) -> None:
    """Wait for a start, which goes on where it takes longer, or where nobody waits for it any more.

    Raises:
        TimeoutError: Where it takes longer than so many seconds.
        Exception: What it fails with.
    """
    done, _ = await asyncio.wait([start], timeout=timeout)
    if not done:
        raise TimeoutError(f"it takes longer than {timeout:g} s")
    start.result()


@contextlib.asynccontextmanager
async def with_client(cluster: AbstractAsyncContextManager[SpecCluster], security: Security) -> AsyncIterator[Client]:
    """Have a cluster and a client of it, which has a loop of its own for those that use it."""
    from distributed import Client

    with WHILE_CLUSTERS_LIVE:
        async with cluster as running:
            address = running.scheduler_address
            connecting = asyncio.ensure_future(asyncio.to_thread(Client, address, security=security))
            try:
                client = await asyncio.shield(connecting)
                atexit.register(client.close)  # Where this process ends, no thread can begin for that any more.
                yield client
            finally:
                await close(await connecting)


async def close(client: Client) -> None:
    """Close a client; where this process ends, it is closed already."""
    atexit.unregister(client.close)
    if client.status != "closed":
        await asyncio.to_thread(client.close)


LOOK_AT_START = 0.1
"""How often a start that is given up is looked at, in seconds."""


def remedy() -> str:
    """Return what to do where workers do not start: those of a script import it (``multiprocessing.spawn``)."""
    main = sys.modules["__main__"]
    if getattr(main, "__spec__", None) or hasattr(main, "__file__"):
        return MAIN_GUARD
    return "Look whether there is memory for them, or use fewer: n=1."


@contextlib.asynccontextmanager
async def local_cluster(
    plans: Sequence[WorkerPlan],
    security: Security,
    timeout: float = START_TIMEOUT,
) -> AsyncIterator[SpecCluster]:
    """Have a cluster on this computer that nothing outside of it can reach.

    Args:
        plans: Its workers.
        security: The certificates that processes know each other by.
        timeout: How long the start may take, in seconds.
    """
    from distributed import Nanny, Scheduler, SpecCluster

    nannies: list[Nanny] = []

    def nanny(*arguments: Any, **options: Any) -> Nanny:
        nannies.append(Nanny(*arguments, **options))
        return nannies[-1]

    shared = {"host": "127.0.0.1", "protocol": "tls://", "security": security, **PAGES}
    quiet = {"silence_logs": SILENT, "memory_limit": 1 / len(plans)}
    workers = {
        number: {"cls": nanny, "options": {**shared, **quiet, "nthreads": plan.tasks, "env": plan.environment}}
        for number, plan in enumerate(plans)
    }
    scheduler = {"cls": Scheduler, "options": {**shared, "port": 0, "allowed_failures": ALLOWED_FAILURES}}
    cluster = SpecCluster(workers, scheduler, security=security, asynchronous=True)
    try:
        async with for_a_start({}):
            start = asyncio.ensure_future(cluster)
            try:
                await in_time(start, timeout)
            finally:
                await give_up(start, nannies)
        yield cluster
    finally:
        await cluster.close()


async def give_up(start: asyncio.Future[Any], nannies: Sequence[Nanny]) -> None:
    """End a start that is under way, with its processes: Dask itself waits until they are there."""
    while not start.done():
        for nanny in nannies:
            kill(nanny.pid)
        await asyncio.wait([start], timeout=LOOK_AT_START)
    start.exception()  # Told already, or of no interest any more.


def kill(pid: int | None) -> None:
    """End a process at once, where there is one."""
    psutil = import_psutil()
    with contextlib.suppress(psutil.NoSuchProcess):
        if pid is not None:
            psutil.Process(pid).kill()
