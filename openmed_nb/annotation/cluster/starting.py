"""Starting a cluster of Dask: on this computer, or over SSH on several; and ending it with every process of it."""

from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ...errors import ClusterUnusable, ConfigurationError, OpenMedError, cause
from ...interface.display import Report, Shown
from .members import Members

if TYPE_CHECKING:
    from distributed import Client, Security

ALLOWED_FAILURES = 2
"""How many workers a text may end before it is given up with the next: three in all."""

START_TIMEOUT = 120.0
"""How long workers may take to come, in seconds."""

MAIN_GUARD = "In a script, call it under if __name__ == '__main__': workers import the script."

START: dict[str, Any] = {
    "distributed.nanny.pre-spawn-environ": {},
    "distributed.scheduler.http.routes": [],
    "distributed.worker.http.routes": [],
}
"""Dask would set the threads of every process to one, this one included; here they are set for each worker. No page is
served: Dask opens a port for them all the same, which is kept to the computer itself."""

FORGETFUL = {"distributed.admin.low-level-log-length": 0}
"""Dask keeps the last messages of each connection for those who look for its errors (``BatchedSend.recent_message_log``):
here these would be thousands of notes."""

PAGES = {"dashboard": False, "dashboard_address": "127.0.0.1:0"}


@dataclass(frozen=True)
class WorkerPlan:
    """A worker process on this computer.

    Attributes:
        device: Its device, as it sees it; ``None`` leaves it to its computer.
        visible: The value of ``CUDA_VISIBLE_DEVICES`` that gives it one GPU; ``None`` where it is no GPU of CUDA.
        threads: On how many threads it computes on the CPU; ``None`` is torch's choice.
    """

    device: str | None
    visible: str | None = None
    threads: int | None = None

    @property
    def environment(self) -> dict[str, str]:
        """The variables that it gets."""
        threads = None if self.threads is None else str(self.threads)
        named = {
            "OPENMED_TORCH_DEVICE": self.device,
            "CUDA_VISIBLE_DEVICES": self.visible,
            "OMP_NUM_THREADS": threads,
        }
        return {name: value for name, value in named.items() if value is not None}

    @property
    def tasks(self) -> int:
        """How many chunks it holds at once: one is tokenised while another computes, where there is a thread for it."""
        return 1 if self.threads == 1 else 2


def plan_workers(
    device: str, n: int | None, gpus: Sequence[str], cores: int, threads: int | None = None
) -> tuple[WorkerPlan, ...]:
    """Return the workers for a device of this computer: one for each GPU of CUDA, one for MPS, one or more for the CPU.

    Args:
        device: The device in force.
        n: How many; ``None`` is one for each device.
        gpus: What ``CUDA_VISIBLE_DEVICES`` calls the GPUs that this process sees.
        cores: How many cores the CPU has.
        threads: On how many threads each computes on the CPU; ``None`` shares the cores out.

    Raises:
        ConfigurationError: For more workers than devices, or no worker.

    Example:
        >>> [plan.environment["CUDA_VISIBLE_DEVICES"] for plan in plan_workers("cuda", None, ("0", "1"), 8)]
        ['0', '1']
        >>> plan_workers("cpu", 2, (), 8)[0].environment
        {'OPENMED_TORCH_DEVICE': 'cpu', 'OMP_NUM_THREADS': '4'}
    """
    check_whole("n", n)
    check_whole("threads", threads)
    if device == "cpu":
        count = n or 1
        shared = None if count == 1 else max(1, cores // count)
        return (WorkerPlan("cpu", threads=threads or shared),) * count
    if device == "mps":
        check_count(n, 1, "one MPS device, which several processes would only share")
        return (WorkerPlan("mps", threads=threads),)
    index = device.partition(":")[2]
    chosen = gpus if not index else gpus[int(index) : int(index) + 1]
    check_count(n, len(chosen), f"{len(chosen)} GPU{'s' * (len(chosen) != 1)} for {device!r}")
    return tuple(WorkerPlan("cuda", gpu, threads) for gpu in chosen[:n])


def check_whole(name: str, number: Any) -> None:
    """Check how many workers or threads there shall be; ``None`` leaves it to us.

    Raises:
        ConfigurationError: For anything but a whole number from 1.
    """
    if number is not None and (isinstance(number, bool) or not isinstance(number, int) or number < 1):
        raise ConfigurationError(f"{name} cannot be {number!r}.", "Use a whole number from 1.")


def check_count(n: int | None, devices: int, there: str) -> None:
    """Check that there is a device for each worker.

    Raises:
        ConfigurationError: Where there is not.
    """
    if n is not None and n > devices:
        what = f"{n} workers were asked for, and there is {there}."
        raise ConfigurationError(what, f"Use n={devices}, or device='cpu'.")


class Cluster(Shown):
    """A cluster that was started here; it ends with :meth:`close`, or with its ``with`` block.

    Attributes:
        client: The ``dask.distributed.Client``, for ``annotate(client=...)`` and for whatever else Dask does.
        members: Who takes part, as each worker said when it started.
    """

    def __init__(self, client: Client, members: Members, end: Callable[[], None]) -> None:
        self.client, self.members, self._end = client, members, end

    def __enter__(self) -> Cluster:  # noqa: PYI034 - Self came with Python 3.11
        return self

    def __exit__(self, *_error: object) -> None:
        self.close()

    def close(self) -> None:
        """End every process of the cluster; a second time does nothing."""
        self._end()

    def to_dict(self) -> dict[str, Any]:
        """Return who takes part, as plain mappings, lists and strings."""
        return self.members.to_dict()

    def report(self) -> Report:
        """Return who takes part."""
        return self.members.report()


def checked_security(security: Any) -> Security:
    """Return certificates that processes know each other by: those of a person, or some that are made now.

    Raises:
        ConfigurationError: For anything else, and where none can be made.
    """
    from distributed import Security

    if isinstance(security, Security):
        return security
    if security is not None:
        what = f"security cannot be {type(security).__name__}."
        raise ConfigurationError(what, "Pass a distributed.Security, or leave it out.")
    try:
        return Security.temporary()
    except ImportError as error:
        what = f"No certificates can be made: {cause(error)}."
        raise ConfigurationError(what, "Install them: python -m pip install 'openmed-nb[cluster]'.") from error


def begin(start: Callable[[], Any], count: int, introduce: Callable[[Client], Members]) -> Cluster:
    """Start a cluster and return it once its workers said who they are; where that fails, nothing of it is left.

    Args:
        start: Starts a cluster of Dask, and returns it as a context manager that ends it.
        count: How many workers it has.
        introduce: Asks the workers who they are.

    Raises:
        ClusterUnusable: Where it does not start.
    """
    import dask.config

    with contextlib.ExitStack() as stack:
        stack.enter_context(same_environment())
        stack.enter_context(dask.config.set(FORGETFUL))
        client = connected(stack, start, count)
        members = introduce(client)
        return Cluster(client, members, stack.pop_all().close)


def connected(stack: contextlib.ExitStack, start: Callable[[], Any], count: int) -> Client:
    """Start a cluster, and return a client of it once all workers are there."""
    import dask.config
    from distributed import Client

    try:
        with dask.config.set(START):
            client = stack.enter_context(Client(stack.enter_context(start())))
        client.wait_for_workers(count, timeout=START_TIMEOUT)
    except (OpenMedError, ImportError):
        raise
    except Exception as error:  # Dask raises bare Exceptions where a process does not start.
        raise ClusterUnusable(f"The cluster does not start: {cause(error)}.", MAIN_GUARD) from error
    return client


@contextlib.contextmanager
def same_environment() -> Iterator[None]:
    """Give the variables back that Dask sets in this process for those that it starts (its nanny's pre-spawn-environ)."""
    names = ("PYTHONHASHSEED",)
    before = {name: os.environ.get(name) for name in names}
    try:
        yield
    finally:
        for name, value in before.items():
            os.environ.pop(name, None)
            if value is not None:
                os.environ[name] = value


def local_cluster(plans: Sequence[WorkerPlan], security: Security) -> Any:
    """Start a cluster on this computer that nothing outside of it can reach.

    Args:
        plans: Its workers.
        security: The certificates that processes know each other by.
    """
    from distributed import Nanny, Scheduler, SpecCluster

    shared = {"host": "127.0.0.1", "protocol": "tls://", "security": security, **PAGES}
    quiet = {"silence_logs": logging.ERROR, "memory_limit": 1 / len(plans)}
    workers = {
        number: {
            "cls": Nanny,
            "options": {**shared, **quiet, "nthreads": plan.tasks, "env": plan.environment},
        }
        for number, plan in enumerate(plans)
    }
    scheduler = {
        "cls": Scheduler,
        "options": {**shared, "port": 0, "allowed_failures": ALLOWED_FAILURES},
    }
    return SpecCluster(workers=workers, scheduler=scheduler, security=security, silence_logs=logging.ERROR)


def visible_gpus(count: int, environ: Mapping[str, str]) -> tuple[str, ...]:
    """Return what ``CUDA_VISIBLE_DEVICES`` calls each GPU that this process sees.

    Example:
        >>> visible_gpus(2, {}), visible_gpus(2, {"CUDA_VISIBLE_DEVICES": "2,GPU-5a, 7"})
        (('0', '1'), ('2', 'GPU-5a'))
    """
    named = [name.strip() for name in environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if name.strip()]
    return tuple(named or map(str, range(count)))[:count]
