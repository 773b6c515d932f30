"""A cluster over SSH: check the hosts, copy certificates to each, and start Dask's SSHCluster there."""

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
from typing import TYPE_CHECKING, Any

from .._utils.text import describe_error, describe_value
from .._utils.validation import check_optional_integer, invalid_value
from ..errors import ClusterUnavailableError, ConfigurationError, WorkerMismatchError
from . import tethered
from .members import SAME_VERSION, WorkerSpec, installed_versions, plan_hosts, visible_gpu_ids

if TYPE_CHECKING:
    from asyncssh import SSHClientConnection
    from distributed import Security, SpecCluster


ALLOWED_FAILURES = 2  # How many workers a text may end; with the next one, the third, Dask gives it up.

START_TIMEOUT = 120.0  # Seconds that a start may take.

START_SETTINGS: dict[str, Any] = {
    # Dask would set the threads of every process to one, this one included; WorkerSpec sets them for each worker.
    "distributed.nanny.pre-spawn-environ": {},
    # No pages are served. Dask opens a port for them all the same, which DASHBOARD_DISABLED binds to the computer itself.
    "distributed.scheduler.http.routes": [],
    "distributed.worker.http.routes": [],
    # Without pages nobody sees the findings of the profiler, which looks at a worker's stack every 10 ms.
    "distributed.worker.profile.enabled": False,
}

DASHBOARD_DISABLED = {"dashboard": False, "dashboard_address": "127.0.0.1:0"}

START_LOCK = threading.Lock()  # Held by the start that has changed Dask's settings, of which a process has one set.
LOCK_POLL_INTERVAL = 0.02  # Seconds between two tries of a start to take that lock.

CONNECT_TIMEOUT = 15.0  # Seconds that a host may take to answer.

# Seconds that the Python of a host may take to answer; it may have to load torch from a slow disk.
PROBE_TIMEOUT = 90.0

# Seconds of silence after which SSH asks a host whether it is there; without traffic, a router may forget the connection,
# and its end ends the processes. After three questions without an answer, the connection has ended.
KEEP_ALIVE = 30.0

# Seconds to wait for the end of a process on a host; if the host does not answer, it ends later, with its connection.
EXIT_TIMEOUT = 8.0

NETWORK_REMEDY = "Check that the hosts and this computer reach each other's ports."

HOST_PATTERN = re.compile(r"[\w:][\w.:%-]*")  # A name or an address; connecting shows whether there is such a computer.

HOST_SYNTAX_REMEDIES = {
    "@": "Name the user in user=, and hosts without it.",
    r":\d+$": "Name the port in port=, and hosts without it.",
}


def validate_hosts(hosts: Any) -> tuple[str, ...]:
    """Return the names of hosts; raise ``ConfigurationError`` for anything but a series of names."""
    names = tuple(hosts) if isinstance(hosts, Iterable) and not isinstance(hosts, str) else ()
    wrong = [name for name in names if not is_host(name)]
    if names and not wrong:
        return names
    texts = [name for name in wrong if isinstance(name, str)]
    remedies = (
        remedy for pattern, remedy in HOST_SYNTAX_REMEDIES.items() if any(re.search(pattern, one) for one in texts)
    )
    raise invalid_value("hosts", hosts, next(remedies, "Pass names of hosts in a list, such as ['mac1', 'mac2']."))


def is_host(name: Any) -> bool:
    """Tell whether something can be the name of a host; a label of it has 63 characters at most (RFC 1035, 2.3.4)."""
    if not isinstance(name, str) or not HOST_PATTERN.fullmatch(name) or name.count(":") == 1:
        return False
    try:
        name.encode("idna")
    except UnicodeError:
        return False
    return True


@dataclass(frozen=True)
class SshLogin:
    """How to log in to hosts; ``None`` leaves a value to the settings of SSH."""

    user: str | None = None
    key: str | None = None  # The file of a private key.
    port: int | None = None
    known_hosts: str | None = None  # The file of the keys of known hosts; the check cannot be switched off.
    python: str = sys.executable  # The Python there that has openmed_nb.

    @classmethod
    def from_arguments(cls, user: Any, key: Any, port: Any, known_hosts: Any, python: Any) -> SshLogin:
        """Return a login from a person's arguments; raise ``ConfigurationError`` for what SSH cannot use."""
        user = validate_text("user", user)
        remedy = "Name the file of a private key, without .pub."
        key = validate_file("key", key, remedy)
        if key is not None and key.endswith(".pub"):
            raise ConfigurationError(f"key={describe_value(key)} is a public key.", remedy)
        port = check_optional_integer("port", port, 1, 65535, ", or leave it out")
        known_hosts = validate_file("known_hosts", known_hosts, "Name the file of the keys of known hosts.")
        return cls(user, key, port, known_hosts, validate_text("remote_python", python) or sys.executable)

    @property
    def options(self) -> dict[str, Any]:
        keys = None if self.key is None else [self.key]
        named = {"username": self.user, "client_keys": keys, "port": self.port, "known_hosts": self.known_hosts}
        times = {"connect_timeout": CONNECT_TIMEOUT, "keepalive_interval": KEEP_ALIVE}
        return {**times, **{name: value for name, value in named.items() if value is not None}}

    def command(self, host: str) -> str:
        """Return the command with which a person logs in to a host likewise."""
        known_hosts = self.known_hosts and f"UserKnownHostsFile={self.known_hosts}"
        given = {"-i": self.key, "-p": self.port, "-o": known_hosts}
        flags = [word for flag, value in given.items() if value is not None for word in (flag, str(value))]
        return shlex.join(("ssh", *flags, host if self.user is None else f"{self.user}@{host}"))


def validate_text(name: str, value: Any) -> str | None:
    """Return a text or a path as text; raise ``ConfigurationError`` for anything else, and for control characters."""
    text = os.fspath(value) if isinstance(value, os.PathLike) else value
    if text is None or (isinstance(text, str) and text.strip() and text.isprintable()):
        return text
    raise invalid_value(name, value, "Pass a string, or leave it out.")


def validate_file(name: str, value: Any, remedy: str) -> str | None:
    """Return the path of a file on this computer as text, with the home of a user for ``~``."""
    text = validate_text(name, value)
    path = None if text is None else os.path.expanduser(text)  # noqa: PTH111 - pathlib's fails for an unknown user
    if path is None or os.path.isfile(path):  # noqa: PTH113 - as above
        return path
    raise ConfigurationError(f"{name}={describe_value(path)} is not a file on this computer.", remedy)


@contextlib.asynccontextmanager
async def connect(host: str, login: SshLogin) -> AsyncIterator[SSHClientConnection]:
    import asyncssh

    with connection_error(host, login):
        connection = await asyncssh.connect(host, **login.options)
    try:
        yield connection
    finally:
        connection.abort()
        await connection.wait_closed()


@contextlib.contextmanager
def connection_error(host: str, login: SshLogin) -> Iterator[None]:
    import asyncssh

    try:
        yield
    except asyncssh.HostKeyNotVerifiable as error:
        what = f"The key of host {host} is not among the known hosts, or not the one that is known: {describe_error(error)}."
        remedy = f"Run {login.command(host)} once, and compare the key with what the host itself shows."
        raise ClusterUnavailableError(what, remedy) from error
    except asyncssh.PermissionDenied as error:
        raise ClusterUnavailableError(
            f"{host} does not let you in: {describe_error(error)}.", "Name user and key."
        ) from error
    except asyncssh.KeyImportError as error:
        what = f"The key for {host} cannot be used: {describe_error(error)}."
        raise ClusterUnavailableError(
            what, "Where it has a passphrase, run ssh-add with it, and leave key= out."
        ) from error
    except (asyncssh.Error, OSError, ValueError) as error:  # A file that is no key is a ValueError.
        raise ClusterUnavailableError(
            f"{host} cannot be used over SSH: {describe_error(error)}.", "Check its name and port."
        ) from error


# What the Python of a host runs to describe itself; with an argument, it also counts the GPUs of CUDA.
HOST_PROBE_SCRIPT = (
    "import distributed, json, openmed_nb, os, sys; "
    "gpus = __import__('torch').cuda.device_count() if sys.argv[1:] else 0; "
    "connection, visible = map(os.environ.get, ('SSH_CONNECTION', 'CUDA_VISIBLE_DEVICES')); "
    "print(json.dumps({'version': openmed_nb.__version__, 'gpus': gpus, 'visible': visible, 'connection': connection}))"
)


@dataclass(frozen=True)
class HostInfo:
    address: str = ""  # The one that SSH reached, as the host itself sees it; empty if unknown.
    gpus: tuple[str, ...] = ()  # Its names for CUDA_VISIBLE_DEVICES; empty if they were not counted.


async def probe_host(host: str, connection: SSHClientConnection, login: SshLogin, count_gpus: bool) -> HostInfo:
    """Ask a host for its version, address and perhaps its GPUs, for which it has to load torch."""
    words = (login.python, "-c", HOST_PROBE_SCRIPT, *(["gpus"] if count_gpus else []))
    with connection_error(host, login):
        done = await connection.run(shlex.join(words), timeout=PROBE_TIMEOUT)
    return parse_probe_output(
        host, login.python, installed_versions()["openmed_nb"], str(done.stdout), str(done.stderr)
    )


def parse_probe_output(host: str, python: str, version: str, output: str, errors: str) -> HostInfo:
    """Return the answer of a host's Python; raise if it is none, or if openmed_nb has another version there."""
    try:  # The last line counts, because some shells greet.
        answer = json.loads((output.strip().splitlines() or [""])[-1])
    except ValueError:
        answer = None
    if not isinstance(answer, dict):
        last = ([*filter(str.strip, f"{output}\n{errors}".splitlines())] or ["it says nothing"])[-1]
        what = f"{python!r} on {host} cannot be used: {describe_error(RuntimeError(last))}."
        raise ClusterUnavailableError(what, "Install openmed-nb[cluster] there, or name its Python in remote_python.")
    if answer["version"] != version:
        what = f"{host} has openmed_nb {answer['version']}, and this process has {version}."
        raise WorkerMismatchError(what, SAME_VERSION)
    words = (answer["connection"] or "").split()  # Address and port of this computer, then those of the host: ssh(1).
    return HostInfo(words[2] if len(words) > 2 else "", visible_gpu_ids(answer["gpus"], answer["visible"]))  # noqa: PLR2004


def hosts_that_share_gpus(hosts: Sequence[str], device: str | None) -> set[str]:
    """Return the hosts with several workers that may use CUDA, each on its own GPU."""
    return {host for host, count in Counter(hosts).items() if count > 1 and device in (None, "cuda")}


def listen_addresses(hosts: Mapping[str, HostInfo]) -> dict[str, str]:
    """Return the address for the processes of each host to listen on, as Dask writes it; Dask chooses for hosts left out.

    It is the address that SSH reached, unless it means nothing to other computers: a loopback address (except where all
    hosts are this computer) or a link-local one.
    """
    known = {name: ipaddress.ip_address(host.address) for name, host in hosts.items() if host.address}
    alone = len(known) == len(hosts) and all(address.is_loopback for address in known.values())
    return {
        name: str(address) if address.version == 4 else f"[{address}]"  # noqa: PLR2004
        for name, address in known.items()
        if not address.is_link_local and (alone or not address.is_loopback)
    }


TLS_FIELDS = {
    "tls_ca_file": "ca-file",
    "tls_scheduler_cert": "scheduler.cert",
    "tls_scheduler_key": "scheduler.key",
    "tls_worker_cert": "worker.cert",
    "tls_worker_key": "worker.key",
}  # The fields of ``distributed.Security`` that a host needs, and their names in Dask's settings.


def certificate_files(security: Security) -> tuple[str, dict[str, str], dict[str, Any]]:
    """Return the folder for certificates on hosts, their texts by the names of their files, and Dask's settings for them.

    They have to be files, because Dask puts settings into a command line, which everybody on a host can read. A person's
    own certificates are on the hosts already.
    """
    folder = f"/tmp/openmed_nb-{uuid.uuid4().hex}"  # noqa: S108 - nobody can predict it, and it is made with mode 700
    files: dict[str, str] = {}
    config: dict[str, Any] = {"distributed.comm.require-encryption": True}
    for field, setting in TLS_FIELDS.items():
        place = getattr(security, field)
        if place and "\n" in place:  # It is a text and not a path.
            files[f"{field}.pem"], place = place, f"{folder}/{field}.pem"
        config[f"distributed.comm.tls.{setting}"] = place
    return folder, files, config


@contextlib.asynccontextmanager
async def temporary_remote_files(
    host: str, connection: SSHClientConnection, login: SshLogin, folder: str, files: Mapping[str, str]
) -> AsyncIterator[None]:
    """Keep files on a host as long as it is connected (see :mod:`.tethered`): not after this process is killed."""
    with connection_error(host, login):
        process = await connection.create_process(shlex.join((login.python, "-m", tethered.__name__)))
        process.stdin.write(json.dumps([folder, files]) + "\n")
        if not await process.stdout.readline():
            last = str(await process.stderr.read()).strip().splitlines()[-1:]
            what = f"No certificates can be written on {host}: {describe_error(RuntimeError(*last))}."
            raise ClusterUnavailableError(what, "Look whether its /tmp can be written to.")
    try:
        yield
    finally:
        process.stdin.write_eof()
        await asyncio.wait([asyncio.ensure_future(process.wait_closed())], timeout=EXIT_TIMEOUT)


@contextlib.asynccontextmanager
async def ssh_cluster(
    hosts: Sequence[str], login: SshLogin, device: str | None, threads: int | None, security: Security
) -> AsyncIterator[SpecCluster]:
    """Run a cluster on hosts: the scheduler on the first, and a worker for each name."""
    folder, files, config = certificate_files(security)
    async with contextlib.AsyncExitStack() as stack:
        connections = {host: await stack.enter_async_context(connect(host, login)) for host in dict.fromkeys(hosts)}
        count_gpus = hosts_that_share_gpus(hosts, device)
        asking = (probe_host(host, connection, login, host in count_gpus) for host, connection in connections.items())
        answers = dict(zip(connections, await asyncio.gather(*asking), strict=True))
        plans = plan_hosts(hosts, {host: answer.gpus for host, answer in answers.items()}, device, threads)
        for host, connection in connections.items():
            await stack.enter_async_context(temporary_remote_files(host, connection, login, folder, files))
        cluster = build_cluster(hosts, plans, answers, login, security)
        yield await stack.enter_async_context(run_cluster(cluster, config))


def build_cluster(
    hosts: Sequence[str],
    plans: Sequence[WorkerSpec],
    answers: Mapping[str, HostInfo],
    login: SshLogin,
    security: Security,
) -> SpecCluster:
    """Return a cluster that is not started, with the planned worker for each name of a host.

    Each process accepts certificates only, and listens on one address of its host if that is known; the workers of a host
    share its memory.
    """
    from distributed import SSHCluster

    shares, addresses = Counter(hosts), listen_addresses(answers)

    def server_options(host: str) -> dict[str, Any]:
        return {**DASHBOARD_DISABLED, "protocol": "tls://", **({"host": addresses[host]} if host in addresses else {})}

    scheduler = {**server_options(hosts[0]), "port": 0}
    cluster = SSHCluster(
        [hosts[0], *hosts],
        connect_options=login.options,
        # Without work it ends itself, because hosts may never notice that their connections are gone.
        scheduler_options={**scheduler, "allowed_failures": ALLOWED_FAILURES, "idle_timeout": "8 hours"},
        remote_python=f"{shlex.quote(login.python)} -m {tethered.__name__}",
        security=security,
        asynchronous=True,
        shutdown_scheduler=False,  # It ends with its connection; Dask would wait for it even if it is gone.
    )
    for number, (host, plan) in enumerate(zip(hosts, plans, strict=True)):  # SSHCluster gives all the same options.
        options = {**server_options(host), "memory_limit": 1 / shares[host], **plan.options}
        cluster.worker_spec[number]["options"]["kwargs"] = options
    return cluster


@contextlib.asynccontextmanager
async def run_cluster(cluster: SpecCluster, config: Mapping[str, Any]) -> AsyncIterator[SpecCluster]:
    """Run the processes of a cluster on their hosts; all end, even if only some of them started."""
    import asyncssh

    processes: list[Any] = []  # The scheduler first, each as soon as it is about to start.
    for spec in (cluster.scheduler_spec, *cluster.worker_spec.values()):
        spec["cls"] = tracked_process_class(spec["cls"], processes)
    try:
        async with startup_settings(config):
            await start_cluster(cluster, processes)
        for process in processes:  # A process whose output nobody reads stops when the pipe is full.
            await process.proc.redirect(stdout=asyncssh.DEVNULL, stderr=asyncssh.DEVNULL)
        yield cluster
    finally:
        await stop_cluster(cluster, processes)


def tracked_process_class(kind: Any, processes: list[Any]) -> type:
    """Return a kind of Dask's process over SSH that adds itself to a list, and names its host if it does not start."""

    class Process(kind):  # type: ignore[misc]
        def __init__(self, *arguments: Any, **options: Any) -> None:
            super().__init__(*arguments, **options)
            processes.append(self)

        async def start(self) -> None:
            host = self.address  # A scheduler replaces it with an address of Dask.
            try:
                await super().start()
            except Exception as error:  # noqa: BLE001 - Dask raises bare ones
                what = f"The cluster does not start on {host}: {describe_error(error)}."
                remedy = "Look whether it has memory, free ports, and the files of its certificates."
                raise ClusterUnavailableError(what, remedy) from None

    return Process


async def start_cluster(cluster: SpecCluster, processes: Sequence[Any]) -> None:
    """Start a cluster; if that fails or is cancelled, end all of it."""
    before = asyncio.all_tasks()
    starting = asyncio.ensure_future(cluster)
    try:
        await wait_with_timeout(starting, START_TIMEOUT)
    except BaseException:
        starting.cancel()
        await asyncio.wait([starting])
        begun = asyncio.all_tasks() - before
        await stop_cluster(cluster, processes)
        for task in begun:  # Dask goes on to start its other workers.
            task.cancel()
        await asyncio.gather(*begun, return_exceptions=True)
        raise


async def stop_cluster(cluster: SpecCluster, processes: Sequence[Any]) -> None:
    """End a cluster, whole or in part: the scheduler last, because workers sign off there."""
    for some in (processes[1:], processes[:1]):
        started = [process.proc for process in some if process.proc]
        for proc in started:
            proc.stdin.write_eof()  # See :mod:`.tethered`.
        if started:
            await asyncio.wait([asyncio.ensure_future(proc.wait_closed()) for proc in started], timeout=EXIT_TIMEOUT)
        for process in some:
            await process.close()
            if process.connection:  # Its host may not answer any more.
                process.connection.abort()
                await process.connection.wait_closed()
    await cluster.close()


@contextlib.asynccontextmanager
async def startup_settings(settings: Mapping[str, Any]) -> AsyncIterator[None]:
    """Change Dask's settings while one cluster starts; another start waits here, and can be cancelled."""
    import dask.config

    while not START_LOCK.acquire(blocking=False):  # noqa: ASYNC110 - starts have loops of their own
        await asyncio.sleep(LOCK_POLL_INTERVAL)
    try:
        with dask.config.set({**START_SETTINGS, **settings}):
            yield
    finally:
        START_LOCK.release()


async def wait_with_timeout(start: asyncio.Future[Any], timeout: float) -> None:
    """Wait for a start and raise its error; after the timeout, and when this is cancelled, the start itself goes on."""
    done, _ = await asyncio.wait([start], timeout=timeout)
    if not done:
        raise TimeoutError(f"it takes longer than {timeout:g} s")
    start.result()
