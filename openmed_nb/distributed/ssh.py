"""A cluster over SSH: certificates of its own go to every host, and Dask's SSHCluster starts it there."""

from __future__ import annotations

import asyncio
import contextlib
import shlex
from collections import Counter
from collections.abc import AsyncIterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from ..errors import ClusterUnusable, cause
from . import tethered
from .certificates import Certificates
from .hosts import LEAVE_TIMEOUT, Host, Login, addresses_to_listen_on, ask, connection_to
from .starting import ALLOWED_FAILURES, PAGES, START_TIMEOUT, WorkerPlan, for_a_start, in_time, plan_hosts

if TYPE_CHECKING:
    from asyncssh import SSHReader
    from distributed import Security, SpecCluster


REMEDY = "Check that the hosts and this computer reach each other's ports."

LIMITS = {"allowed_failures": ALLOWED_FAILURES, "idle_timeout": "8 hours"}
"""How many workers a text may end, and after which time without work a cluster ends by itself, where its hosts were never
told that its connections are gone."""


@contextlib.asynccontextmanager
async def ssh_cluster(
    hosts: Sequence[str], login: Login, device: str | None, threads: int | None, security: Security
) -> AsyncIterator[SpecCluster]:
    """Have a cluster on hosts: the scheduler on the first, and a worker on each.

    Args:
        hosts: The hosts; one that is named twice gets two workers.
        login: How to log in.
        device: The device for every worker; ``None`` is the best of each host.
        threads: On how many threads a worker computes on the CPU; ``None`` is torch's choice.
        security: The certificates that processes know each other by.

    Raises:
        ClusterUnusable: Where a host cannot be used; it names the host.
        WorkersDiffer: For a host with another version of openmed_nb.
    """
    certificates = Certificates.of(security)
    async with contextlib.AsyncExitStack() as stack:
        connections = {
            host: await stack.enter_async_context(connection_to(host, login)) for host in dict.fromkeys(hosts)
        }
        answers = await ask(connections, login, those_that_share_gpus(hosts, device))
        plans = plan_hosts(hosts, {host: answer.gpus for host, answer in answers.items()}, device, threads)
        for host, connection in connections.items():
            await stack.enter_async_context(certificates.on(host, connection, login))
        cluster = not_started(hosts, plans, answers, login, security)
        yield await stack.enter_async_context(running(cluster, certificates.config))


def those_that_share_gpus(hosts: Sequence[str], device: str | None) -> set[str]:
    """Return the hosts on which several workers may run on CUDA, each on a GPU of its own.

    Example:
        >>> those_that_share_gpus(["gpu1", "gpu1", "mac1"], None), those_that_share_gpus(["gpu1", "gpu1"], "cpu")
        ({'gpu1'}, set())
    """
    return {host for host, count in Counter(hosts).items() if count > 1 and device in (None, "cuda")}


def not_started(
    hosts: Sequence[str], plans: Sequence[WorkerPlan], answers: Mapping[str, Host], login: Login, security: Security
) -> SpecCluster:
    """Return a cluster that has yet to be started.

    Args:
        hosts: The hosts; the first also has the scheduler.
        plans: The worker for each.
        answers: What each host says of itself.
        login: How to log in.
        security: The certificates that processes know each other by.
    """
    from distributed import SSHCluster

    addresses = addresses_to_listen_on(answers)
    cluster = SSHCluster(
        [hosts[0], *hosts],
        connect_options=login.options,
        scheduler_options={**server_options(addresses.get(hosts[0])), "port": 0, **LIMITS},
        remote_python=f"{shlex.quote(login.python)} -m {tethered.__name__}",
        security=security,
        asynchronous=True,
        shutdown_scheduler=False,  # It ends with its connection; Dask would wait for one that is gone.
    )
    for number, options in enumerate(worker_options(hosts, plans, addresses)):
        cluster.worker_spec[number]["options"]["kwargs"] = options  # SSHCluster has the same for all.
    return cluster


def server_options(address: str | None) -> dict[str, Any]:
    """Return how a process of Dask listens: for certificates only, on one address of its host where that is known."""
    return {**PAGES, "protocol": "tls://", **({} if address is None else {"host": address})}


def worker_options(
    hosts: Sequence[str], plans: Sequence[WorkerPlan], addresses: Mapping[str, str]
) -> list[dict[str, Any]]:
    """Return what the worker on each host is told; those of one host share its memory.

    Example:
        >>> options = worker_options(["mac1"], [WorkerPlan("mps")], {"mac1": "10.0.0.2"})[0]
        >>> options["host"], options["nthreads"], options["memory_limit"], options["env"]
        ('10.0.0.2', 2, 1.0, {'OPENMED_TORCH_DEVICE': 'mps'})
    """
    shares = Counter(hosts)
    return [
        {
            **server_options(addresses.get(host)),
            "nthreads": plan.tasks,
            "memory_limit": 1 / shares[host],
            "env": plan.environment,
        }
        for host, plan in zip(hosts, plans, strict=True)
    ]


@contextlib.asynccontextmanager
async def running(cluster: SpecCluster, config: Mapping[str, Any]) -> AsyncIterator[SpecCluster]:
    """Have the processes of a cluster on their hosts; they end also where only some of them started.

    Args:
        cluster: A cluster that has yet to be started.
        config: Dask's settings for the processes.
    """
    processes = remembered(cluster)
    try:
        async with for_a_start(config):
            await start(cluster, processes)
        reading = [asyncio.create_task(read_to_end(stream)) for stream in streams_of(processes)]
        yield cluster
        for task in reading:
            task.cancel()
    finally:
        await end(cluster, processes)


def remembered(cluster: SpecCluster) -> list[Any]:
    """Return a list that gets every process of a cluster as soon as it is about to start, the scheduler first."""
    processes: list[Any] = []
    for spec in (cluster.scheduler_spec, *cluster.worker_spec.values()):
        spec["cls"] = that_names_its_host(spec["cls"], processes)
    return processes


def that_names_its_host(kind: Any, processes: list[Any]) -> type:
    """Return a kind of process over SSH that names its host where it does not start, and puts itself into a list."""

    class Process(kind):  # type: ignore[misc]
        def __init__(self, *arguments: Any, **options: Any) -> None:
            super().__init__(*arguments, **options)
            processes.append(self)

        async def start(self) -> None:
            """Start it, and name its host where that fails."""
            host = self.address  # That of a scheduler becomes one of Dask.
            try:
                await super().start()
            except Exception as error:  # noqa: BLE001 - Dask raises bare ones
                what = f"The cluster does not start on {host}: {cause(error)}."
                remedy = "Look whether it has memory, free ports, and the files of its certificates."
                raise ClusterUnusable(what, remedy) from None

    return Process


async def start(cluster: SpecCluster, processes: Sequence[Any]) -> None:
    """Start a cluster; where that fails or is no longer wanted, nothing of it goes on.

    Args:
        cluster: A cluster that has yet to be started.
        processes: Its processes, which come to be meanwhile.
    """
    before = asyncio.all_tasks()
    starting = asyncio.ensure_future(cluster)
    try:
        await in_time(starting, START_TIMEOUT)
    except BaseException:
        starting.cancel()
        await asyncio.wait([starting])
        begun = asyncio.all_tasks() - before
        await end(cluster, processes)
        for task in begun:  # Dask goes on to start its other workers.
            task.cancel()
        await asyncio.gather(*begun, return_exceptions=True)
        raise


def streams_of(processes: Sequence[Any]) -> list[SSHReader[str]]:
    """Return what processes write to."""
    return [stream for process in processes for stream in (process.proc.stdout, process.proc.stderr)]


async def read_to_end(stream: SSHReader[str]) -> None:
    """Read what a process writes, which would stop it where nobody did, to its end or to that of its connection."""
    import asyncssh

    with contextlib.suppress(asyncssh.Error, OSError):
        while await stream.read(1 << 16):
            pass


async def end(cluster: SpecCluster, processes: Sequence[Any]) -> None:
    """End a cluster, however much of it there is: the scheduler last, which workers take leave of."""
    await end_processes(processes[1:])
    await end_processes(processes[:1])
    await cluster.close()


async def end_processes(processes: Sequence[Any]) -> None:
    """End processes on hosts with their input (see :mod:`.tethered`), and their connections; a host may be gone."""
    started = [process.proc for process in processes if process.proc]
    for proc in started:
        proc.stdin.write_eof()
    if started:
        await asyncio.wait([asyncio.ensure_future(proc.wait_closed()) for proc in started], timeout=LEAVE_TIMEOUT)
    for process in processes:
        await process.close()
        if process.connection:
            process.connection.abort()
            await process.connection.wait_closed()
