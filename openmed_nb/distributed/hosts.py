"""The hosts of a cluster: how one logs in, and what ends where a host cannot be reached."""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import json
import os
import re
import shlex
import sys
from collections.abc import AsyncIterator, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ..errors import ClusterUnusable, ConfigurationError, WorkersDiffer, cause, shorten, whole_or_none
from .members import versions_here
from .starting import visible_gpus

if TYPE_CHECKING:
    from asyncssh import SSHClientConnection


CONNECT_TIMEOUT = 15.0
"""How long a host may take to answer, in seconds."""

KEEP_ALIVE = 30.0
"""After how many silent seconds a host is asked whether it is there: a connection that somebody on the way forgot would end
the processes that it started. Three times in vain, and it has ended."""

HIGHEST_PORT = 65535

HOST = re.compile(r"[\w:][\w.:%-]*")
"""What can be the name of a computer or its address; whether there is one is seen when it is connected to."""

REMEDIES = {
    "@": "Name the user in user=, and hosts without it.",
    r":\d+$": "Name the port in port=, and hosts without it.",
}
"""What to do where a name has more than a host."""


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

    @classmethod
    def of(
        cls, user: Any = None, key: Any = None, port: Any = None, known_hosts: Any = None, python: Any = None
    ) -> Login:
        """Return a login with what a person gave.

        Raises:
            ConfigurationError: For what is no text, no file that is here, or no port.

        Example:
            >>> Login.of(user="me", port=2222).options["port"]
            2222
        """
        return cls(
            checked_text("user", user),
            checked_key(key),
            whole_or_none("port", port, 1, HIGHEST_PORT, ", or leave it out"),
            checked_file("known_hosts", known_hosts, "Name the file of the keys of known hosts."),
            checked_text("remote_python", python) or sys.executable,
        )

    @property
    def options(self) -> dict[str, Any]:
        """The arguments of ``asyncssh.connect``."""
        keys = None if self.key is None else [self.key]
        named = {"username": self.user, "client_keys": keys, "port": self.port, "known_hosts": self.known_hosts}
        times = {"connect_timeout": CONNECT_TIMEOUT, "keepalive_interval": KEEP_ALIVE}
        return {**times, **{name: value for name, value in named.items() if value is not None}}

    def command(self, host: str) -> str:
        """Return the command with which a person logs in to a host in the same way.

        Example:
            >>> Login(user="me", port=2222).command("mac1")
            'ssh -p 2222 me@mac1'
        """
        key = () if self.key is None else ("-i", self.key)
        port = () if self.port is None else ("-p", str(self.port))
        known = () if self.known_hosts is None else ("-o", f"UserKnownHostsFile={self.known_hosts}")
        return shlex.join(("ssh", *key, *port, *known, host if self.user is None else f"{self.user}@{host}"))


def checked_text(name: str, value: Any) -> str | None:
    """Return a text or a path as text.

    Raises:
        ConfigurationError: For anything else, and for characters that nothing is named with.
    """
    text = os.fspath(value) if isinstance(value, os.PathLike) else value
    if text is None or (isinstance(text, str) and text.strip() and text.isprintable()):
        return text
    raise ConfigurationError(f"{name} cannot be {shorten(repr(value))}.", "Pass a string, or leave it out.")


def checked_file(name: str, value: Any, remedy: str) -> str | None:
    """Return the path of a file on this computer as text; ``~`` is the home of a user.

    Raises:
        ConfigurationError: Where there is no such file.
    """
    text = checked_text(name, value)
    path = None if text is None else os.path.expanduser(text)  # noqa: PTH111 - pathlib's fails for an unknown user
    if path is None or os.path.isfile(path):  # noqa: PTH113 - as above
        return path
    raise ConfigurationError(f"{name}={shorten(repr(path))} is no file on this computer.", remedy)


def checked_key(value: Any) -> str | None:
    """Return the path of a private key.

    Raises:
        ConfigurationError: Where there is no such file, and for a public key, which opens nothing.
    """
    remedy = "Name the file of a private key, without .pub."
    path = checked_file("key", value, remedy)
    if path is None or not path.endswith(".pub"):
        return path
    raise ConfigurationError(f"key={shorten(repr(path))} is a public key.", remedy)


def checked_hosts(hosts: Any) -> tuple[str, ...]:
    """Return the names of hosts.

    Raises:
        ConfigurationError: For anything but names in a list.

    Example:
        >>> checked_hosts(["mac1", "mac2"])
        ('mac1', 'mac2')
    """
    names = tuple(hosts) if isinstance(hosts, Iterable) and not isinstance(hosts, str) else ()
    wrong = [name for name in names if not is_host(name)]
    if names and not wrong:
        return names
    what = f"hosts cannot be {shorten(repr(hosts))}."
    for pattern, remedy in REMEDIES.items():
        if any(isinstance(name, str) and re.search(pattern, name) for name in wrong):
            raise ConfigurationError(what, remedy)
    raise ConfigurationError(what, "Pass names of hosts in a list, such as ['mac1', 'mac2'].")


def is_host(name: Any) -> bool:
    """Tell whether something can be the name of a host; a label of it has 63 characters at most (RFC 1035, 2.3.4).

    Example:
        >>> is_host("mac1.local"), is_host("fe80::1%en0"), is_host("me@mac1"), is_host("mac1:22"), is_host("a" * 64)
        (True, True, False, False, False)
    """
    if not isinstance(name, str) or not HOST.fullmatch(name) or name.count(":") == 1:
        return False
    try:
        name.encode("idna")
    except UnicodeError:
        return False
    return True


CHECK_TIMEOUT = 90.0
"""How long the Python of a host may take to say what it has, in seconds; it may have to load torch from a slow disk."""

LEAVE_TIMEOUT = 8.0
"""How long a process on a host may take to end, in seconds. Where its host does not answer, it ends when the connection is
gone, but nobody sees that."""

CHECK = (
    "import distributed, json, openmed_nb, os, sys; "
    "gpus = __import__('torch').cuda.device_count() if sys.argv[1:] else 0; "
    "connection, visible = map(os.environ.get, ('SSH_CONNECTION', 'CUDA_VISIBLE_DEVICES')); "
    "print(json.dumps({'version': openmed_nb.__version__, 'gpus': gpus, 'visible': visible, 'connection': connection}))"
)
"""What the Python of a host is asked; with an argument, it also counts the GPUs of CUDA."""


@dataclass(frozen=True)
class Host:
    """What a host says of itself.

    Attributes:
        address: The address by which it was reached, as the host itself sees it, empty where that is not known.
        gpus: What ``CUDA_VISIBLE_DEVICES`` calls its GPUs there; empty where they were not counted.
    """

    address: str = ""
    gpus: tuple[str, ...] = ()


async def ask(
    connections: Mapping[str, SSHClientConnection], login: Login, count_gpus: Collection[str]
) -> dict[str, Host]:
    """Ask every host what it has.

    Args:
        connections: A connection to each host, by its name.
        login: How to log in.
        count_gpus: The hosts that count their GPUs.

    Raises:
        ClusterUnusable: For the first that has no Python with openmed_nb; it names the host.
        WorkersDiffer: For one with another version.
    """

    async def one(host: str, connection: SSHClientConnection) -> Host:
        words = (login.python, "-c", CHECK, *(["gpus"] if host in count_gpus else []))
        with unreachable(host, login):
            done = await connection.run(shlex.join(words), timeout=CHECK_TIMEOUT)
        return checked_answer(host, login.python, versions_here()["openmed_nb"], str(done.stdout), str(done.stderr))

    answers = await asyncio.gather(*(one(host, connection) for host, connection in connections.items()))
    return dict(zip(connections, answers, strict=True))


def checked_answer(host: str, python: str, version: str, said: str, complaint: str) -> Host:
    """Return what the Python of a host answers.

    Args:
        host: The host.
        python: Its Python.
        version: The version of openmed_nb here.
        said: What it wrote on standard output; the last line counts, for there are shells that greet.
        complaint: What it wrote on standard error.

    Raises:
        ClusterUnusable: Where it cannot be used.
        WorkersDiffer: Where it has another version.

    Example:
        >>> checked_answer("mac1", "python3", "0.1.0", "", "ModuleNotFoundError: No module named 'openmed_nb'")
        Traceback (most recent call last):
        ...
        openmed_nb.errors.ClusterUnusable: 'python3' on mac1 cannot be used: ModuleNotFoundError: No module named 'openmed_nb'. Install openmed-nb[cluster] there, or name its Python in remote_python.
    """
    answer = last_object(said)
    if answer is None:
        last = ([*filter(str.strip, f"{said}\n{complaint}".splitlines())] or ["it says nothing"])[-1]
        what = f"{python!r} on {host} cannot be used: {cause(RuntimeError(last))}."
        raise ClusterUnusable(what, "Install openmed-nb[cluster] there, or name its Python in remote_python.")
    if answer["version"] != version:
        what = f"{host} has openmed_nb {answer['version']}, and this process has {version}."
        raise WorkersDiffer(what, "Install the same version on every computer.")
    words = (answer["connection"] or "").split()  # Address and port of this computer, then those of the host: ssh(1).
    names = visible_gpus(answer["gpus"], {"CUDA_VISIBLE_DEVICES": answer["visible"] or ""})
    return Host(words[2] if len(words) > 2 else "", names)  # noqa: PLR2004


def last_object(said: str) -> dict[str, Any] | None:
    r"""Return the object of JSON in the last line of what was written, or ``None`` where there is none.

    Example:
        >>> last_object('Welcome!\n{"version": "0.1.0"}\n'), last_object("-c import json")
        ({'version': '0.1.0'}, None)
    """
    try:
        found = json.loads((said.strip().splitlines() or [""])[-1])
    except ValueError:
        return None
    return found if isinstance(found, dict) else None


def addresses_to_listen_on(hosts: Mapping[str, Host]) -> dict[str, str]:
    """Return the one address on which the processes of each host listen, as Dask writes it; others leave it to Dask.

    It is the one that this computer reached by SSH. One that means another computer elsewhere is of no use to the rest: that
    of a computer to itself, unless all are that one computer, and that of a cable (link-local).

    Example:
        >>> addresses_to_listen_on({"localhost": Host("127.0.0.1")})
        {'localhost': '127.0.0.1'}
        >>> addresses_to_listen_on({"localhost": Host("127.0.0.1"), "mac1": Host("10.0.0.2"), "mac2": Host("fe80::2%en0")})
        {'mac1': '10.0.0.2'}
    """
    known = {name: ipaddress.ip_address(host.address) for name, host in hosts.items() if host.address}
    alone = len(known) == len(hosts) and all(address.is_loopback for address in known.values())
    usable = {
        name: address
        for name, address in known.items()
        if not address.is_link_local and (alone or not address.is_loopback)
    }
    return {name: str(address) if address.version == 4 else f"[{address}]" for name, address in usable.items()}  # noqa: PLR2004


@contextlib.asynccontextmanager
async def connection_to(host: str, login: Login) -> AsyncIterator[SSHClientConnection]:
    """Have a connection to a host.

    Raises:
        ClusterUnusable: Where it cannot be reached, is not the one that is known, or lets nobody in.
    """
    import asyncssh

    with unreachable(host, login):
        connection = await asyncssh.connect(host, **login.options)
    try:
        yield connection
    finally:
        connection.abort()
        await connection.wait_closed()


@contextlib.contextmanager
def unreachable(host: str, login: Login) -> Iterator[None]:
    """Turn what SSH fails with into an error that names the host, and how to log in by hand where that tells more.

    Raises:
        ClusterUnusable: Where it cannot be reached, is not the one that is known, or lets nobody in.
    """
    import asyncssh

    try:
        yield
    except asyncssh.HostKeyNotVerifiable as error:
        what = f"The key of host {host} is not among the known hosts, or not the one that is known: {cause(error)}."
        remedy = f"Run {login.command(host)} once, and compare the key with what the host itself shows."
        raise ClusterUnusable(what, remedy) from error
    except asyncssh.PermissionDenied as error:
        raise ClusterUnusable(f"{host} does not let you in: {cause(error)}.", "Name user and key.") from error
    except asyncssh.KeyImportError as error:
        what = f"The key for {host} cannot be used: {cause(error)}."
        raise ClusterUnusable(what, "Where it has a passphrase, run ssh-add with it, and leave key= out.") from error
    except (asyncssh.Error, OSError, ValueError) as error:  # A file that is no key is a ValueError.
        raise ClusterUnusable(f"{host} cannot be used over SSH: {cause(error)}.", "Check its name and port.") from error
