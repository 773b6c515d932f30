"""A cluster over SSH: each host is checked first, certificates of the cluster's own go there, and Dask's SSHCluster starts it."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import shlex
import sys
import uuid
from collections import Counter
from collections.abc import Awaitable, Callable, Coroutine, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ...errors import ClusterUnusable, ConfigurationError, WorkersDiffer, cause
from .members import versions_here
from .starting import ALLOWED_FAILURES, PAGES, WorkerPlan

if TYPE_CHECKING:
    from asyncssh import SSHClientConnection, SSHClientProcess, SSHReader
    from distributed import Security

CONNECT_TIMEOUT = 15.0
"""How long a host may take to answer, in seconds."""

END_TIMEOUT = 30.0
"""How long the processes of a cluster may take to end, in seconds; those of a host that went away take longer."""

LIMITS = {"allowed_failures": ALLOWED_FAILURES, "idle_timeout": "8 hours"}
"""How many workers a text may end, and after which time without work a cluster ends by itself, where the process that began
it was killed."""

STREAMS = 2
"""How many streams a process writes to; those of the scheduler come first."""

CHECK = "import distributed, openmed_nb; print(openmed_nb.__version__)"
"""What the Python of a host is asked."""

TLS_FIELDS = {
    "tls_ca_file": "ca-file",
    "tls_scheduler_cert": "scheduler.cert",
    "tls_scheduler_key": "scheduler.key",
    "tls_worker_cert": "worker.cert",
    "tls_worker_key": "worker.key",
}
"""What a host needs of ``distributed.Security``, and what Dask's settings call it."""


@dataclass(frozen=True)
class Login:
    """How to log in to hosts; what is ``None`` is as in the settings of SSH.

    Attributes:
        user: The name there.
        key: The file of a private key.
        port: The port of SSH.
        known_hosts: The file of the keys of known hosts; there is no way around the check.
        python: The Python there that has openmed_nb.
    """

    user: str | None = None
    key: str | None = None
    port: int | None = None
    known_hosts: str | None = None
    python: str = sys.executable

    @property
    def options(self) -> dict[str, Any]:
        """The arguments of ``asyncssh.connect``."""
        keys = None if self.key is None else [self.key]
        named = {"username": self.user, "client_keys": keys, "port": self.port, "known_hosts": self.known_hosts}
        return {name: value for name, value in named.items() if value is not None}


def checked_hosts(hosts: Any) -> tuple[str, ...]:
    """Return the names of hosts.

    Raises:
        ConfigurationError: For anything but strings in a list.

    Example:
        >>> checked_hosts(["mac1", "mac2"])
        ('mac1', 'mac2')
    """
    names = () if isinstance(hosts, str) else tuple(hosts)
    if names and all(isinstance(name, str) and name and not name.startswith("-") for name in names):
        return names
    raise ConfigurationError(f"hosts cannot be {hosts!r}.", "Pass names of hosts in a list, such as ['mac1', 'mac2'].")


def import_asyncssh() -> None:
    """Check that asyncssh is installed.

    Raises:
        ConfigurationError: Where it is not.
    """
    try:
        import asyncssh  # noqa: F401
    except ImportError as error:
        what = f"A cluster over SSH needs asyncssh: {cause(error)}."
        raise ConfigurationError(what, "Install it: python -m pip install 'openmed-nb[cluster]'.") from error


def check_hosts(hosts: Sequence[str], login: Login) -> None:
    """Check that every host lets us in and has the openmed_nb of this process.

    Raises:
        ClusterUnusable: For the first that does not; it names the host.
        WorkersDiffer: For one with another version.
    """
    import_asyncssh()

    async def check(host: str, connection: SSHClientConnection) -> None:
        done = await connection.run(f"{shlex.quote(login.python)} -c {shlex.quote(CHECK)}")
        check_answer(host, login.python, versions_here()["openmed_nb"], str(done.stdout).strip(), str(done.stderr))

    on_hosts(hosts, login, check)


def check_answer(host: str, python: str, version: str, there: str, said: str) -> None:
    """Check what the Python of a host answers.

    Args:
        host: The host.
        python: Its Python.
        version: The version of openmed_nb here.
        there: The version there, empty where there is none.
        said: What it wrote on standard error.

    Raises:
        ClusterUnusable: Where it cannot be used.
        WorkersDiffer: Where it has another version.

    Example:
        >>> check_answer("mac1", "python3", "0.1.0", "", "ModuleNotFoundError: No module named 'openmed_nb'")
        Traceback (most recent call last):
        ...
        openmed_nb.errors.ClusterUnusable: 'python3' on mac1 cannot be used: ModuleNotFoundError: No module named 'openmed_nb'. Install openmed-nb[cluster] there, or name its Python in remote_python.
    """
    if not there:
        last = (said.strip().splitlines() or ["it says nothing"])[-1]
        what = f"{python!r} on {host} cannot be used: {cause(RuntimeError(last))}."
        raise ClusterUnusable(what, "Install openmed-nb[cluster] there, or name its Python in remote_python.")
    if there != version:
        what = f"{host} has openmed_nb {there}, and this process has {version}."
        raise WorkersDiffer(what, "Install the same version on every computer.")


def on_hosts(hosts: Sequence[str], login: Login, call: Callable[[str, SSHClientConnection], Awaitable[None]]) -> None:
    """Call something with a connection to each host, each once; in a thread of its own, because a notebook has a loop.

    Raises:
        ClusterUnusable: Where one cannot be reached.
    """

    async def all_of_them() -> None:
        await asyncio.gather(*(one(host) for host in dict.fromkeys(hosts)))

    async def one(host: str) -> None:
        with unreachable(host):
            import asyncssh

            async with asyncssh.connect(host, connect_timeout=CONNECT_TIMEOUT, **login.options) as connection:
                await call(host, connection)

    in_thread(all_of_them())


def in_thread(work: Coroutine[Any, Any, None]) -> None:
    """Run a coroutine to its end in a thread of its own."""
    with ThreadPoolExecutor(1) as threads:
        threads.submit(asyncio.run, work).result()


@contextlib.contextmanager
def unreachable(host: str) -> Iterator[None]:
    """Turn what SSH fails with into an error that names the host.

    Raises:
        ClusterUnusable: Where it cannot be reached, is not the one that is known, or lets nobody in.
    """
    import asyncssh

    try:
        yield
    except asyncssh.HostKeyNotVerifiable as error:
        what = f"The key of host {host} is not among the known hosts, or not the one that is known: {cause(error)}."
        raise ClusterUnusable(
            what, f"Run ssh {host} once, and compare the key with what the host itself shows."
        ) from error
    except asyncssh.PermissionDenied as error:
        raise ClusterUnusable(f"{host} does not let you in: {cause(error)}.", "Name user and key.") from error
    except (asyncssh.Error, OSError) as error:
        raise ClusterUnusable(f"{host} cannot be used over SSH: {cause(error)}.", "Check its name and port.") from error


@dataclass(frozen=True)
class Certificates:
    """The certificates of a cluster on its hosts.

    Attributes:
        folder: Where those that are made for this cluster go.
        files: The content of each, by the name of its file.
        config: What Dask's settings say of them.
    """

    folder: str
    files: Mapping[str, str]
    config: Mapping[str, Any]

    @classmethod
    def of(cls, security: Security) -> Certificates:
        """Return what hosts need to know each other by: text of a certificate goes there, a path is there already."""
        folder = f"/tmp/openmed_nb-{uuid.uuid4().hex}"  # noqa: S108 - nobody can foretell it, and it is made with mode 700
        fields = {field: getattr(security, field) for field in TLS_FIELDS}
        files = {f"{field}.pem": text for field, text in fields.items() if text and "\n" in text}
        places = {field: f"{folder}/{field}.pem" if f"{field}.pem" in files else text for field, text in fields.items()}
        config = {f"distributed.comm.tls.{TLS_FIELDS[field]}": place for field, place in places.items()}
        return cls(folder, files, {**config, "distributed.comm.require-encryption": True})

    async def write(self, _host: str, connection: SSHClientConnection) -> None:
        """Write the files on a host, for nobody else to read; two names can be one computer."""
        await connection.run(f"mkdir -p -m 700 {self.folder}", check=True)
        for name, text in self.files.items():
            await connection.run(f"umask 077 && cat > {self.folder}/{name}", input=text, check=True)

    async def remove(self, _host: str, connection: SSHClientConnection) -> None:
        """Remove the files from a host."""
        await connection.run(f"rm -rf {self.folder}")


@contextlib.contextmanager
def on_every_host(certificates: Certificates, hosts: Sequence[str], login: Login) -> Iterator[None]:
    """Have the certificates of a cluster on its hosts while it runs; a host that went away keeps what opens nothing more."""
    try:
        on_hosts(hosts, login, certificates.write)
        yield
    finally:
        with contextlib.suppress(ClusterUnusable):
            on_hosts(hosts, login, certificates.remove)


@contextlib.contextmanager
def ssh_cluster(
    hosts: Sequence[str], login: Login, device: str | None, threads: int | None, security: Security
) -> Iterator[Any]:
    """Have a cluster on hosts: the scheduler on the first, and a worker on each.

    Args:
        hosts: The hosts; one that is named twice gets two workers.
        login: How to log in.
        device: The device for every worker; ``None`` is the best of each host.
        threads: On how many threads a worker computes on the CPU; ``None`` is torch's choice.
        security: The certificates that processes know each other by.
    """
    import dask.config
    from distributed import SSHCluster

    certificates = Certificates.of(security)
    tls = {**PAGES, "protocol": "tls://"}
    with on_every_host(certificates, hosts, login):
        with dask.config.set(certificates.config):
            cluster = SSHCluster(
                [hosts[0], *hosts],
                connect_options={**login.options, "connect_timeout": CONNECT_TIMEOUT},
                worker_options={**tls, **worker_options(hosts, device, threads)},
                scheduler_options={**tls, "port": 0, **LIMITS},
                remote_python=login.python,
                security=security,
                silence_logs=logging.ERROR,
            )
        with cluster, output_read(cluster):
            yield cluster


@contextlib.contextmanager
def output_read(cluster: Any) -> Iterator[None]:
    """Read what the workers of a cluster write, which would stop them where nobody did, and wait for their end.

    sshd passes no signal on to processes of root (its ``session_signal_req``), so they are asked to end, not killed; what
    they write ends when the last of them has ended. The scheduler ends with the cluster.
    """
    reading = cluster.sync(start_reading, [one.proc for one in (cluster.scheduler, *cluster.workers.values())])
    try:
        yield
    finally:
        cluster.sync(end, cluster, reading)


async def start_reading(processes: Sequence[SSHClientProcess[str]]) -> list[asyncio.Task[None]]:
    """Begin to read all that processes write."""
    streams = [stream for process in processes for stream in (process.stdout, process.stderr)]  # STREAMS of each
    return [asyncio.create_task(read_to_end(stream)) for stream in streams]


async def read_to_end(stream: SSHReader[str]) -> None:
    """Read a stream to its end, or to that of its connection."""
    import asyncssh

    with contextlib.suppress(asyncssh.Error, OSError):
        while await stream.read(1 << 16):
            pass


async def end(cluster: Any, reading: Sequence[asyncio.Task[None]]) -> None:
    """Ask all workers to end, and wait until nothing of them is left to read."""
    with contextlib.suppress(OSError):  # The scheduler may be gone, and every worker with it.
        await cluster.scheduler_comm.retire_workers(workers=None, close_workers=True)
    await asyncio.wait(reading[STREAMS:], timeout=END_TIMEOUT)


def worker_options(hosts: Sequence[str], device: str | None, threads: int | None) -> dict[str, Any]:
    """Return what the workers on hosts are told; those of one host share its memory.

    Example:
        >>> worker_options(["mac1", "mac2"], "mps", None)
        {'nthreads': 2, 'memory_limit': 1.0, 'env': {'OPENMED_TORCH_DEVICE': 'mps'}}
    """
    plan = WorkerPlan(device, threads=threads)
    share = 1 / max(Counter(hosts).values())
    return {"nthreads": plan.tasks, "memory_limit": share, "env": plan.environment}
