"""How a person asks for a cluster."""

from __future__ import annotations

import os
from functools import partial
from typing import TYPE_CHECKING

from ..devices.request import DeviceRequest
from ..devices.simulated import active
from ..errors import ConfigurationError
from ..session import SESSION
from .certificates import checked_security
from .hosts import Login
from .ssh import REMEDY, ssh_cluster
from .starting import Cluster, begin, import_extra, local_cluster, plan_workers, remedy, visible_gpus
from .stream import members_of

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
