"""The hosts of a cluster: whether each lets us in and can be used, and by which address others reach it."""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import json
import shlex
from collections.abc import AsyncIterator, Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ...errors import ClusterUnusable, WorkersDiffer, cause
from .login import Login
from .members import versions_here
from .plans import visible_gpus

if TYPE_CHECKING:
    from asyncssh import SSHClientConnection

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
