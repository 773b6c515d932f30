"""The certificates by which the processes of a cluster know each other, and how they come to be on its hosts."""

from __future__ import annotations

import asyncio
import contextlib
import json
import shlex
import uuid
from collections.abc import AsyncIterator, Collection, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ..errors import ClusterUnusable, ConfigurationError, cause
from . import keeper
from .hosts import LEAVE_TIMEOUT, unreachable
from .starting import import_extra

if TYPE_CHECKING:
    from asyncssh import SSHClientConnection
    from distributed import Security

    from .hosts import Login


ROLES = ("client", "scheduler", "worker")
"""What a process can be for Dask; each has a certificate."""

TLS_FIELDS = {
    "tls_ca_file": "ca-file",
    "tls_scheduler_cert": "scheduler.cert",
    "tls_scheduler_key": "scheduler.key",
    "tls_worker_cert": "worker.cert",
    "tls_worker_key": "worker.key",
}
"""What a host needs of ``distributed.Security``, and what Dask's settings call it."""


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

    @contextlib.asynccontextmanager
    async def on(self, host: str, connection: SSHClientConnection, login: Login) -> AsyncIterator[None]:
        """Have the files on a host while it is connected (see :mod:`.keeper`), so also not where this process is killed.

        Args:
            host: The host.
            connection: The connection to it.
            login: How it was logged in to, and its Python.

        Raises:
            ClusterUnusable: Where they cannot be written.
        """
        with unreachable(host, login):
            process = await connection.create_process(shlex.join((login.python, "-m", keeper.__name__)))
            process.stdin.write(json.dumps([self.folder, dict(self.files)]) + "\n")
            if not await process.stdout.readline():
                last = str(await process.stderr.read()).strip().splitlines()[-1:]
                what = f"No certificates can be written on {host}: {cause(RuntimeError(*last))}."
                raise ClusterUnusable(what, "Look whether its /tmp can be written to.")
        try:
            yield
        finally:
            process.stdin.write_eof()
            await asyncio.wait([asyncio.ensure_future(process.wait_closed())], timeout=LEAVE_TIMEOUT)


def checked_security(security: Any, roles: Collection[str] = ROLES) -> Security:
    """Return certificates that processes know each other by: those of a person, or some that are made now.

    Args:
        security: What a person gave.
        roles: What processes of this computer will be, whose files are read here.

    Raises:
        ConfigurationError: For anything else, for what lacks a certificate or has one that cannot be read, and where none
            can be made.
    """
    from distributed import Security

    if security is None:
        import_extra("cryptography", "No certificates can be made")
        return Security.temporary()
    if not isinstance(security, Security):
        what = f"security cannot be {type(security).__name__}."
        raise ConfigurationError(what, "Pass a distributed.Security, or leave it out.")
    missing = [
        field for field in ("tls_ca_file", *(f"tls_{role}_cert" for role in ROLES)) if not getattr(security, field)
    ]
    if missing:
        what = f"security has no {', '.join(missing)}."
        raise ConfigurationError(what, "Name a file for each, or leave security out.")
    for role in roles:
        check_readable(security, role)
    return security


def check_readable(security: Security, role: str) -> None:
    """Check that the certificate of a role can be used here.

    Raises:
        ConfigurationError: Where a file of it is not there, or is none.
    """
    try:
        security.get_connection_args(role)
    except OSError as error:  # ssl's own errors are some too.
        what = f"The certificate of security for the {role} cannot be used: {cause(error)}."
        raise ConfigurationError(what, "Name files of PEM that are there, or leave security out.") from error
