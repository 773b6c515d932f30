"""Starting a cluster with the device of the session: on this computer, or on hosts."""

from __future__ import annotations

import os
from functools import partial
from typing import TYPE_CHECKING

from ..annotation.cluster.certificates import checked_security
from ..annotation.cluster.extra import import_extra
from ..annotation.cluster.local import local_cluster, remedy
from ..annotation.cluster.login import Login
from ..annotation.cluster.plans import plan_workers, visible_gpus
from ..annotation.cluster.ssh import REMEDY, ssh_cluster
from ..annotation.cluster.starting import Cluster, begin
from ..devices.request import DeviceRequest
from ..devices.simulation import active
from ..errors import ConfigurationError
from . import SESSION
from .cluster import members_of

if TYPE_CHECKING:
    from distributed import Security


def start_here(n: int | None, device: str | None, threads: int | None, security: Security | None) -> Cluster:
    """Start workers on this computer; the arguments are those of :func:`openmed_nb.cluster`."""
    from dask.system import CPU_COUNT

    if active():
        raise ConfigurationError("A SIMULATED Mac has no cluster.", "End the simulation first.")
    choice = SESSION.device(device)
    gpus = visible_gpus(len(SESSION.computer.torch.cuda_names or ()), os.environ)
    plans = plan_workers(choice.device, n, gpus, CPU_COUNT, threads)
    known = checked_security(security)
    introduce = partial(members_of, reason=choice.reason)
    return begin(local_cluster(plans, known), known, len(plans), introduce, remedy())


def start_on_hosts(
    hosts: tuple[str, ...], login: Login, device: str | None, threads: int | None, security: Security | None
) -> Cluster:
    """Start workers on other computers, each of which is asked first whether it can be used."""
    wish = None if device is None else DeviceRequest.parse(device, "argument").value
    import_extra("asyncssh", "A cluster over SSH needs asyncssh")
    known = checked_security(security, ("client",))
    introduce = partial(members_of, reason=wish and f"{wish!r} was asked for by argument.")
    return begin(ssh_cluster(hosts, login, wish, threads, known), known, len(hosts), introduce, REMEDY)
