"""The Python face of clusters: on this computer, or over SSH on several."""

from __future__ import annotations

import os
from collections.abc import Iterable
from typing import TYPE_CHECKING

from ..errors import ConfigurationError, whole_or_none

if TYPE_CHECKING:
    from distributed import Security

    from ..distributed.starting import Cluster


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
) -> Cluster:
    """Start workers for :func:`openmed_nb.annotate`, on this computer or over SSH on several; they end with the block.

    Each worker is a process that loads the model once, on a device that the same rules choose. All connections are
    encrypted, and only processes of this cluster can make them: certificates are made for it, and gone with
    it. A worker that dies is started again, and what it had is read again. An interrupt (Ctrl-C) stops what this process
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
    from ..distributed.asking import start_here, start_on_hosts
    from ..distributed.hosts import Login, checked_hosts
    from ..distributed.starting import end_import_of_script, import_extra

    end_import_of_script()
    import_extra("distributed", "A cluster needs Dask")
    whole_or_none("n", n, otherwise=", or name computers in hosts=[...]")
    whole_or_none("threads", threads)
    ssh = {"user": user, "key": key, "port": port, "known_hosts": known_hosts, "remote_python": remote_python}
    if hosts is None:
        refuse([name for name, value in ssh.items() if value is not None], "hosts", "Name them in hosts=[...].")
        return start_here(n, device, threads, security)
    again = "Leave it out; a host that is named twice gets two workers."
    refuse([] if n is None else ["n"], "this computer alone", again)
    names, login = checked_hosts(hosts), Login.of(user, key, port, known_hosts, remote_python)
    return start_on_hosts(names, login, device, threads, security)


def refuse(given: list[str], meant_for: str, remedy: str) -> None:
    """Refuse arguments that mean nothing here.

    Raises:
        ConfigurationError: Where there are some.
    """
    if given:
        verb = "is" if len(given) == 1 else "are"
        raise ConfigurationError(f"{', '.join(given)} {verb} for {meant_for}.", remedy)
