"""Cluster over SSH: check the hosts, copy TLS certificates to them, and start Dask's ``SSHCluster``."""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import json
import os
import re
import shlex
import sys
import threading
import uuid
from collections import Counter
from collections.abc import AsyncIterator, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from .._utils.text import describe_error, describe_value
from .._utils.validation import check_optional_integer, invalid_value
from ..errors import ClusterUnavailableError, ConfigurationError, WorkerMismatchError
from . import tethered
from .members import SAME_VERSION_REMEDY, WorkerSpec, installed_versions, plan_hosts, visible_gpu_ids

if TYPE_CHECKING:
    from asyncssh import SSHClientConnection
    from distributed import Security, SpecCluster
    from distributed.deploy.ssh import Process


ALLOWED_FAILURES = 2  # Number of workers that a text may crash. Dask gives up the text after one more crash.

START_TIMEOUT = 120.0  # Seconds.

START_SETTINGS: dict[str, object] = {
    # By default, Dask sets the number of threads of every process to 1, including this one. WorkerSpec sets it per worker.
    "distributed.nanny.pre-spawn-environ": {},
    # The dashboard is disabled. Dask still opens its port, which DASHBOARD_DISABLED binds to the loopback interface.
    "distributed.scheduler.http.routes": [],
    "distributed.worker.http.routes": [],
    # The results of the profiler, which samples the stack of a worker every 10 ms, are only visible in the dashboard.
    "distributed.worker.profile.enabled": False,
}

DASHBOARD_DISABLED = {"dashboard": False, "dashboard_address": "127.0.0.1:0"}

START_LOCK = threading.Lock()  # Held while a start changes the settings of Dask, which are global in a process.
LOCK_POLL_INTERVAL = 0.02  # Seconds between two attempts to acquire START_LOCK.

CONNECT_TIMEOUT = 15.0  # Seconds.

# Timeout of the Python process on a host, in seconds. It may have to import torch from a slow disk.
PROBE_TIMEOUT = 90.0

# Seconds without traffic after which SSH sends a keepalive message. Without traffic, a router may drop the connection, which
# would terminate the processes. SSH closes the connection after three unanswered messages.
KEEPALIVE_SECONDS = 30.0

# Seconds to wait for the exit of a process on a host. If the host does not respond, the process exits with its connection.
EXIT_TIMEOUT = 8.0

NETWORK_REMEDY = "Check that the hosts and this machine can reach each other's ports."

HOST_PATTERN = re.compile(r"[\w:][\w.:%-]*")  # Host name or address. Whether the host exists is checked on connection.


def validate_hosts(hosts: object) -> tuple[str, ...]:
    """Validate host names and return them as a tuple.

    Raises:
        ConfigurationError: If the argument is not an iterable of valid host names.
    """
    names = tuple(hosts) if isinstance(hosts, Iterable) and not isinstance(hosts, str) else ()
    remedy = "" if names else "Pass a list of host names, such as ['mac1', 'mac2']."
    for name in names:
        try:
            is_valid = HOST_PATTERN.fullmatch(name) is not None and name.count(":") != 1
            name.encode("idna")  # Each label has at most 63 characters (RFC 1035, 2.3.4).
        except (AttributeError, TypeError, UnicodeError):  # The name is not a string, or a label is not valid.
            is_valid = False
        if is_valid:
            continue
        remedy = "Pass a list of host names, such as ['mac1', 'mac2']."
        if "@" in str(name):
            remedy = "Pass the user name as user=, and the hosts without it."
        elif re.search(r":\d+$", str(name)):
            remedy = "Pass the port as port=, and the hosts without it."
    if remedy:
        raise invalid_value("hosts", hosts, remedy)
    return names


@dataclass(frozen=True)
class SshLogin:
    """SSH login for all hosts. ``None`` uses the SSH configuration of the user.

    Attributes:
        user: User name on the hosts.
        key: Path of the private key.
        port: SSH port.
        known_hosts: Path of the known-hosts file. The check of host keys cannot be disabled.
        python: Python executable on the hosts that has openmed_nb installed.
    """

    user: str | None = None
    key: str | None = None
    port: int | None = None
    known_hosts: str | None = None
    python: str = sys.executable

    @classmethod
    def from_arguments(cls, user: object, key: object, port: object, known_hosts: object, python: object) -> SshLogin:
        """Validate the arguments of the user and return the login.

        Raises:
            ConfigurationError: If an argument is not valid.
        """
        remedy = "Pass the path of a private key, without .pub."
        key_path = _validate_file("key", key, remedy)
        if key_path is not None and key_path.endswith(".pub"):
            raise ConfigurationError(f"key={describe_value(key_path)} is a public key.", remedy)
        return cls(
            _validate_text("user", user),
            key_path,
            check_optional_integer("port", port, 1, 65535, ", or None"),
            _validate_file("known_hosts", known_hosts, "Pass the path of a known-hosts file."),
            _validate_text("remote_python", python) or sys.executable,
        )

    @property
    def options(self) -> dict[str, object]:
        """Options for ``asyncssh.connect``."""
        options = {
            "connect_timeout": CONNECT_TIMEOUT,
            "keepalive_interval": KEEPALIVE_SECONDS,
            "username": self.user,
            "client_keys": None if self.key is None else [self.key],
            "port": self.port,
            "known_hosts": self.known_hosts,
        }
        return {name: value for name, value in options.items() if value is not None}

    def command(self, host: str) -> str:
        """Return the equivalent ``ssh`` command."""
        known_hosts = self.known_hosts and f"UserKnownHostsFile={self.known_hosts}"
        values = {"-i": self.key, "-p": self.port, "-o": known_hosts}
        flags = [word for flag, value in values.items() if value is not None for word in (flag, str(value))]
        return shlex.join(("ssh", *flags, host if self.user is None else f"{self.user}@{host}"))


def _validate_text(name: str, value: object) -> str | None:
    """Return a string or a path as a string.

    Raises:
        ConfigurationError: If the value has another type, is empty, or contains control characters.
    """
    text = os.fspath(value) if isinstance(value, os.PathLike) else value
    if text is None or (isinstance(text, str) and text.strip() and text.isprintable()):
        return text
    raise invalid_value(name, value, "Pass a string or None.")


def _validate_file(name: str, value: object, remedy: str) -> str | None:
    """Return the path of a file on this machine as a string, with ``~`` expanded.

    Raises:
        ConfigurationError: If the file does not exist.
    """
    text = _validate_text(name, value)
    path = None if text is None else os.path.expanduser(text)  # noqa: PTH111 - Path.expanduser raises for an unknown user
    if path is None or os.path.isfile(path):  # noqa: PTH113 - Path raises for some names
        return path
    raise ConfigurationError(f"{name}={describe_value(path)} is not a file on this machine.", remedy)


@contextlib.asynccontextmanager
async def connect(host: str, login: SshLogin) -> AsyncIterator[SSHClientConnection]:
    import asyncssh

    with _connection_error(host, login):
        connection = await asyncssh.connect(host, **login.options)
    try:
        yield connection
    finally:
        connection.abort()
        await connection.wait_closed()


@contextlib.contextmanager
def _connection_error(host: str, login: SshLogin) -> Iterator[None]:
    import asyncssh

    try:
        yield
    except (asyncssh.Error, OSError, ValueError) as error:  # asyncssh raises ValueError for a file that is not a key.
        message = f"{host} is not reachable over SSH"
        remedy = "Check its name and port."
        if isinstance(error, asyncssh.HostKeyNotVerifiable):
            message = f"The host key of {host} is unknown or differs from the known key"
            remedy = f"Run {login.command(host)} once, and compare the key with the key on the host."
        elif isinstance(error, asyncssh.PermissionDenied):
            message = f"{host} rejected the login"
            remedy = "Check user= and key=."
        elif isinstance(error, asyncssh.KeyImportError):
            message = f"The key for {host} is not usable"
            remedy = "If it has a passphrase, add it with ssh-add, and remove key=."
        raise ClusterUnavailableError(f"{message}: {describe_error(error)}.", remedy) from error


# Program that describes a host. With an argument, it also counts the CUDA GPUs, for which it imports torch.
HOST_PROBE_SCRIPT = (
    "import distributed, json, openmed_nb, os, sys; "
    "gpus = __import__('torch').cuda.device_count() if sys.argv[1:] else 0; "
    "connection, visible = map(os.environ.get, ('SSH_CONNECTION', 'CUDA_VISIBLE_DEVICES')); "
    "print(json.dumps({'version': openmed_nb.__version__, 'gpus': gpus, 'visible': visible, 'connection': connection}))"
)


@dataclass(frozen=True)
class HostInfo:
    """Description of a host.

    Attributes:
        address: Address of the SSH server according to the host. Empty if it is unknown.
        gpus: Names of the GPUs for ``CUDA_VISIBLE_DEVICES``. Empty if they were not counted.
    """

    address: str = ""
    gpus: tuple[str, ...] = ()


async def _probe_host(host: str, connection: SSHClientConnection, login: SshLogin, count_gpus: bool) -> HostInfo:
    """Return the description of a host. Counting the GPUs imports torch on the host."""
    command = (login.python, "-c", HOST_PROBE_SCRIPT, *(["gpus"] if count_gpus else []))
    with _connection_error(host, login):
        process = await connection.run(shlex.join(command), timeout=PROBE_TIMEOUT)
    return parse_probe_output(
        host, login.python, installed_versions()["openmed_nb"], str(process.stdout), str(process.stderr)
    )


def parse_probe_output(host: str, python: str, version: str, output: str, errors: str) -> HostInfo:
    """Return the description of a host from the output of ``HOST_PROBE_SCRIPT``.

    Raises:
        ClusterUnavailableError: If the output is not a description.
        WorkerMismatchError: If the host has a different version of openmed_nb.
    """
    try:  # Only the last line is parsed, because some shells print a greeting.
        facts = json.loads((output.strip().splitlines() or [""])[-1])
    except ValueError:
        facts = None
    if not isinstance(facts, dict):
        lines = list(filter(str.strip, f"{output}\n{errors}".splitlines()))
        reason = describe_error(RuntimeError(lines[-1])) if lines else "no output"
        message = f"{python!r} on {host} is not usable: {reason}."
        raise ClusterUnavailableError(
            message, "Install openmed-nb[cluster] there, or pass its Python as remote_python."
        )
    if facts["version"] != version:
        message = f"{host} has openmed_nb {facts['version']}, but this process has {version}."
        raise WorkerMismatchError(message, SAME_VERSION_REMEDY)
    # SSH_CONNECTION contains the address and the port of the client, then those of the server: ssh(1).
    connection = (facts["connection"] or "").split()
    address = connection[2] if len(connection) > 2 else ""  # noqa: PLR2004
    return HostInfo(address, visible_gpu_ids(facts["gpus"], facts["visible"]))


def hosts_with_several_gpu_workers(hosts: Sequence[str], device: str | None) -> set[str]:
    """Return the hosts with several workers that may use CUDA, each on a separate GPU."""
    return {host for host, count in Counter(hosts).items() if count > 1 and device in (None, "cuda")}


def listen_addresses(hosts: Mapping[str, HostInfo]) -> dict[str, str]:
    """Return the listen address for the processes of each host in the format of Dask. Dask selects missing addresses.

    The address is that of the SSH server, unless other machines cannot reach it: a link-local address, or a loopback
    address if not all hosts are this machine.
    """
    addresses = {name: ipaddress.ip_address(host.address) for name, host in hosts.items() if host.address}
    is_local = len(addresses) == len(hosts) and all(address.is_loopback for address in addresses.values())
    return {
        name: str(address) if address.version == 4 else f"[{address}]"  # noqa: PLR2004
        for name, address in addresses.items()
        if not address.is_link_local and (is_local or not address.is_loopback)
    }


# Fields of ``distributed.Security`` that a host needs, and their names in the settings of Dask.
TLS_FIELDS = {
    "tls_ca_file": "ca-file",
    "tls_scheduler_cert": "scheduler.cert",
    "tls_scheduler_key": "scheduler.key",
    "tls_worker_cert": "worker.cert",
    "tls_worker_key": "worker.key",
}


def certificate_files(security: Security) -> tuple[str, dict[str, str], dict[str, object]]:
    """Return the directory of the TLS certificates on hosts, their contents by file name, and the settings of Dask.

    The certificates must be files, because Dask passes settings on the command line, which all users of a host can read.
    Certificates of the user already exist on the hosts.
    """
    folder = f"/tmp/openmed_nb-{uuid.uuid4().hex}"  # noqa: S108 - the name is unpredictable, and the mode is 700
    files: dict[str, str] = {}
    config: dict[str, object] = {"distributed.comm.require-encryption": True}
    for field, setting in TLS_FIELDS.items():
        value = getattr(security, field)
        if value and "\n" in value:  # The value is a certificate, not a path.
            files[f"{field}.pem"] = value
            value = f"{folder}/{field}.pem"
        config[f"distributed.comm.tls.{setting}"] = value
    return folder, files, config


@contextlib.asynccontextmanager
async def _temporary_remote_files(
    host: str, connection: SSHClientConnection, login: SshLogin, folder: str, files: Mapping[str, str]
) -> AsyncIterator[None]:
    """Store files on a host until its connection closes, even if this process is killed (see :mod:`.tethered`)."""
    with _connection_error(host, login):
        process = await connection.create_process(shlex.join((login.python, "-m", tethered.__name__)))
        process.stdin.write(json.dumps([folder, files]) + "\n")
        if not await process.stdout.readline():
            last_line = str(await process.stderr.read()).strip().splitlines()[-1:]
            message = f"The TLS certificates cannot be written on {host}: {describe_error(RuntimeError(*last_line))}."
            raise ClusterUnavailableError(message, "Check that /tmp is writable on the host.")
    try:
        yield
    finally:
        process.stdin.write_eof()
        await asyncio.wait([asyncio.ensure_future(process.wait_closed())], timeout=EXIT_TIMEOUT)


@contextlib.asynccontextmanager
async def ssh_cluster(
    hosts: Sequence[str], login: SshLogin, device: str | None, threads: int | None, security: Security
) -> AsyncIterator[SpecCluster]:
    """Context manager that runs a cluster: the scheduler on the first host, and one worker for each host name."""
    folder, files, config = certificate_files(security)
    async with contextlib.AsyncExitStack() as stack:
        connections = {host: await stack.enter_async_context(connect(host, login)) for host in dict.fromkeys(hosts)}
        count_gpus = hosts_with_several_gpu_workers(hosts, device)
        probes = (_probe_host(host, connection, login, host in count_gpus) for host, connection in connections.items())
        host_infos = dict(zip(connections, await asyncio.gather(*probes), strict=True))
        plans = plan_hosts(hosts, {host: info.gpus for host, info in host_infos.items()}, device, threads)
        for host, connection in connections.items():
            await stack.enter_async_context(_temporary_remote_files(host, connection, login, folder, files))
        cluster = build_cluster(hosts, plans, host_infos, login, security)
        yield await stack.enter_async_context(_run_cluster(cluster, config))


def build_cluster(
    hosts: Sequence[str],
    plans: Sequence[WorkerSpec],
    host_infos: Mapping[str, HostInfo],
    login: SshLogin,
    security: Security,
) -> SpecCluster:
    """Return a cluster that is not started, with the planned worker for each host name.

    Each process requires TLS certificates, and listens on the address of its host if it is known. The memory of a host is
    divided among its workers.
    """
    from distributed import SSHCluster

    worker_counts = Counter(hosts)
    addresses = listen_addresses(host_infos)

    def server_options(host: str) -> dict[str, object]:
        return {**DASHBOARD_DISABLED, "protocol": "tls://", **({"host": addresses[host]} if host in addresses else {})}

    scheduler = {**server_options(hosts[0]), "port": 0}
    cluster = SSHCluster(
        [hosts[0], *hosts],
        connect_options=login.options,
        # An idle scheduler exits, because hosts may not notice a lost connection.
        scheduler_options={**scheduler, "allowed_failures": ALLOWED_FAILURES, "idle_timeout": "8 hours"},
        remote_python=f"{shlex.quote(login.python)} -m {tethered.__name__}",
        security=security,
        asynchronous=True,
        shutdown_scheduler=False,  # The scheduler exits with its connection. Dask would wait even for a lost scheduler.
    )
    # SSHCluster passes the same options to all workers, so the options are set per worker here.
    for number, (host, plan) in enumerate(zip(hosts, plans, strict=True)):
        options = {**server_options(host), "memory_limit": 1 / worker_counts[host], **plan.options}
        cluster.worker_spec[number]["options"]["kwargs"] = options
    return cluster


@contextlib.asynccontextmanager
async def _run_cluster(cluster: SpecCluster, config: Mapping[str, object]) -> AsyncIterator[SpecCluster]:
    """Context manager that runs the processes of a cluster. On exit, it stops all processes that were started."""
    import asyncssh

    processes: list[Process] = []  # Starts with the scheduler. Each process is added before its start.
    for spec in (cluster.scheduler_spec, *cluster.worker_spec.values()):
        spec["cls"] = _tethered_process_class(spec["cls"], processes)
    before = asyncio.all_tasks()
    is_started = False
    try:
        async with startup_settings(config):
            starting = asyncio.ensure_future(cluster)
            try:
                await wait_with_timeout(starting, START_TIMEOUT)
                is_started = True
            finally:
                starting.cancel()
                await asyncio.wait([starting])
        for process in processes:  # A process blocks when the pipe of its output is full.
            await process.proc.redirect(stdout=asyncssh.DEVNULL, stderr=asyncssh.DEVNULL)
        yield cluster
    finally:
        unfinished = set() if is_started else asyncio.all_tasks() - before
        # The scheduler is last, because workers unregister there.
        await asyncio.gather(*(process.close() for process in processes[1:]))
        for process in processes[:1]:
            await process.close()
        await cluster.close()
        for task in unfinished:  # After a failed start, Dask continues to start the remaining workers.
            task.cancel()
        await asyncio.gather(*unfinished, return_exceptions=True)


def _tethered_process_class(kind: type[Process], processes: list[Process]) -> type[Process]:
    """Return a subclass of an SSH process of Dask that adds itself to a list, and names its host in start errors."""

    class TetheredProcess(kind):  # type: ignore[misc]
        def __init__(self, *arguments: object, **options: object) -> None:
            super().__init__(*arguments, **options)
            processes.append(self)

        async def start(self) -> None:
            host = self.address  # The start of a scheduler replaces this with a Dask address.
            try:
                await super().start()
            except Exception as error:  # noqa: BLE001 - Dask raises bare exceptions
                message = f"The cluster failed to start on {host}: {describe_error(error)}."
                remedy = "Check that the host has enough memory, free ports and the files of its TLS certificates."
                raise ClusterUnavailableError(message, remedy) from None

        async def close(self) -> None:
            if self.status.name == "closed":  # Dask closes each worker again.
                return
            if self.proc:  # See :mod:`.tethered`.
                self.proc.stdin.write_eof()
                await asyncio.wait([asyncio.ensure_future(self.proc.wait_closed())], timeout=EXIT_TIMEOUT)
            await super().close()
            if self.connection:  # The host may no longer respond.
                self.connection.abort()
                await self.connection.wait_closed()

    return TetheredProcess


@contextlib.asynccontextmanager
async def startup_settings(settings: Mapping[str, object]) -> AsyncIterator[None]:
    """Context manager that changes the settings of Dask during the start of one cluster.

    The start of another cluster waits here and can be cancelled.
    """
    import dask.config

    while not START_LOCK.acquire(blocking=False):  # noqa: ASYNC110 - each start has a separate event loop
        await asyncio.sleep(LOCK_POLL_INTERVAL)
    try:
        with dask.config.set({**START_SETTINGS, **settings}):
            yield
    finally:
        START_LOCK.release()


async def wait_with_timeout(start: asyncio.Future[SpecCluster], timeout: float) -> None:
    """Wait for a start and raise its error. The start continues after the timeout and after a cancellation."""
    done, _ = await asyncio.wait([start], timeout=timeout)
    if not done:
        raise TimeoutError(f"not started within {timeout:g} s")
    start.result()
