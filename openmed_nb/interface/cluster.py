"""The Python face of clusters: on this computer, or over SSH on several."""

from __future__ import annotations

import os
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from ..devices.request import DeviceRequest
from ..devices.simulation import active
from ..errors import ConfigurationError
from ..session import SESSION

if TYPE_CHECKING:
    from distributed import Security

    from ..annotation.cluster.login import Login
    from ..annotation.cluster.starting import Cluster


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
    it. A worker that dies is started again, and what it had is read again.

    Args:
        n: How many workers on this computer; ``None`` is one for each device: each GPU of CUDA, MPS, or the CPU.
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

        with nb.cluster(n=2) as cluster:
            found = nb.annotate(notes, client=cluster.client)
        with nb.cluster(hosts=["mac1", "mac2"], user="me") as cluster:
            found = nb.annotate(notes, "disease_detection_tiny", client=cluster.client)
    """
    from ..annotation.cluster.clients import import_distributed
    from ..annotation.cluster.login import Login, checked_hosts
    from ..annotation.cluster.plans import check_whole
    from ..annotation.cluster.starting import end_import_of_script

    end_import_of_script()
    import_distributed()
    check_whole("threads", threads)
    ssh = {"user": user, "key": key, "port": port, "known_hosts": known_hosts, "remote_python": remote_python}
    if hosts is None:
        refuse({name: value for name, value in ssh.items() if value is not None}, "hosts")
        return on_this_computer(n, device, threads, security)
    refuse({} if n is None else {"n": n}, "this computer alone")
    return on_hosts(
        checked_hosts(hosts), Login.of(user, key, port, known_hosts, remote_python), device, threads, security
    )


def on_this_computer(n: int | None, device: str | None, threads: int | None, security: Security | None) -> Cluster:
    """Start workers on this computer."""
    from dask.system import CPU_COUNT

    from ..annotation.cluster.plans import plan_workers, visible_gpus
    from ..annotation.cluster.starting import begin, checked_security, local_cluster
    from ..session.cluster import members_of

    if active():
        raise ConfigurationError("A SIMULATED Mac has no cluster.", "End the simulation first.")
    chosen = SESSION.device(device).device
    gpus = visible_gpus(len(SESSION.computer.torch.cuda_names or ()), os.environ)
    plans = plan_workers(chosen, n, gpus, CPU_COUNT, threads)
    known = checked_security(security)
    return begin(local_cluster(plans, known), known, len(plans), members_of)


def on_hosts(
    hosts: tuple[str, ...], login: Login, device: str | None, threads: int | None, security: Security | None
) -> Cluster:
    """Start workers on other computers, each of which is asked first whether it can be used."""
    from ..annotation.cluster.hosts import import_asyncssh
    from ..annotation.cluster.ssh import ssh_cluster
    from ..annotation.cluster.starting import begin, checked_security
    from ..session.cluster import members_of

    wish = None if device is None else DeviceRequest.parse(device, "argument").value
    import_asyncssh()
    known = checked_security(security)
    return begin(ssh_cluster(hosts, login, wish, threads, known), known, len(hosts), members_of)


def refuse(given: dict[str, Any], meant_for: str) -> None:
    """Refuse arguments that mean nothing here.

    Raises:
        ConfigurationError: Where there are some.
    """
    if given:
        raise ConfigurationError(f"{', '.join(given)} is for {meant_for}.", "Leave it out, or say where.")
