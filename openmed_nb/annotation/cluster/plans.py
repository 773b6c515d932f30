"""Which workers a cluster has: on this computer one for each device, on hosts one for each time that a host is named."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ...errors import ConfigurationError, shorten

ALWAYS = 2
"""How many workers a CPU may always have; with many more than cores, a computer does nothing but start them."""


@dataclass(frozen=True)
class WorkerPlan:
    """A worker process.

    Attributes:
        device: Its device, as it sees it; ``None`` is the best of its computer.
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
        ConfigurationError: For more workers than devices or cores, or no worker.

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
        check_count(n, max(ALWAYS, cores), f"{cores} core{'s' * (cores != 1)} of the CPU", "")
        shared = None if count == 1 else max(1, cores // count)
        return (WorkerPlan("cpu", threads=threads or shared),) * count
    if device == "mps":
        check_count(n, 1, "one MPS device, which several processes would only share")
        return (WorkerPlan("mps", threads=threads),)
    index = device.partition(":")[2]
    chosen = gpus if not index else gpus[int(index) : int(index) + 1]
    check_count(n, len(chosen), f"{len(chosen)} GPU{'s' * (len(chosen) != 1)} for {device!r}")
    return tuple(WorkerPlan("cuda", gpu, threads) for gpu in chosen[:n])


def check_whole(name: str, number: Any, otherwise: str = "") -> None:
    """Check how many workers or threads there shall be; ``None`` leaves it to us.

    Raises:
        ConfigurationError: For anything but a whole number from 1.
    """
    if number is not None and (isinstance(number, bool) or not isinstance(number, int) or number < 1):
        raise ConfigurationError(f"{name} cannot be {shorten(repr(number))}.", f"Use a whole number from 1{otherwise}.")


def check_count(n: int | None, most: int, there: str, otherwise: str = ", or device='cpu'") -> None:
    """Check that there is a device for each worker, or a core.

    Raises:
        ConfigurationError: Where there is not.
    """
    if n is not None and n > most:
        raise ConfigurationError(f"n cannot be {n} with {there}.", f"Use n={most}{otherwise}.")


def visible_gpus(count: int, environ: Mapping[str, str]) -> tuple[str, ...]:
    """Return what ``CUDA_VISIBLE_DEVICES`` calls each GPU that this process sees.

    Example:
        >>> visible_gpus(2, {}), visible_gpus(2, {"CUDA_VISIBLE_DEVICES": "2,GPU-5a, 7"})
        (('0', '1'), ('2', 'GPU-5a'))
    """
    named = [name.strip() for name in environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if name.strip()]
    return tuple(named or map(str, range(count)))[:count]


def plan_hosts(
    hosts: Sequence[str], gpus: Mapping[str, Sequence[str]], device: str | None, threads: int | None
) -> tuple[WorkerPlan, ...]:
    """Return the workers on hosts: one for each name, with a GPU of CUDA of its own where the host has some.

    Args:
        hosts: The hosts.
        gpus: What ``CUDA_VISIBLE_DEVICES`` calls the GPUs of a host; one that is not there leaves the choice to its worker.
        device: The device of every worker; ``None`` is the best of each host.
        threads: On how many threads each computes on the CPU; ``None`` is torch's choice.

    Raises:
        ConfigurationError: For a host that is named more often than it has GPUs.

    Example:
        >>> [plan.visible for plan in plan_hosts(["gpu1", "mac1", "gpu1"], {"gpu1": ("0", "1")}, None, None)]
        ['0', None, '1']
    """
    for host, count in Counter(hosts).items():
        there = len(gpus.get(host, ())) or count
        if count > there:
            what = f"{host} is named {count} times, and has {there} GPU{'s' * (there != 1)}."
            raise ConfigurationError(what, f"Name it {there} times at most, or use device='cpu'.")
    free = {host: iter(names) for host, names in gpus.items()}
    return tuple(WorkerPlan(device, next(free.get(host, iter(())), None), threads) for host in hosts)
