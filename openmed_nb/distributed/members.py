"""Workers of a cluster: their start options, their descriptions, and the check that they give the same results."""

from __future__ import annotations

import importlib.metadata
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from .._render.display import Displayable, Report, Table, pluralize
from ..annotation.resume import changed_settings
from ..devices.registry import get_device
from ..errors import ConfigurationError, WorkerMismatchError

# Number of workers that are allowed on any CPU. With many more workers than cores, a machine spends its
# time on their startup.
MIN_CPU_WORKERS = 2


def worker_options(device: str | None, threads: int | None = None) -> dict[str, object]:
    """Return the options of Dask's ``Nanny`` for a worker.

    Args:
        device: Device name in the worker. If ``None``, use the best device of its machine.
        threads: Number of CPU threads. If ``None``, use the default of torch.
    """
    variables = {"OPENMED_TORCH_DEVICE": device, "OMP_NUM_THREADS": threads and str(threads)}
    # With more than one thread, the worker tokenizes a chunk while it computes another one.
    tasks = 1 if threads == 1 else 2
    return {"nthreads": tasks, "env": {name: value for name, value in variables.items() if value is not None}}


def plan_workers(device: str, n: int | None, cores: int) -> list[dict[str, object]]:
    """Return the options of the workers on this machine: one for a GPU, at least one for the CPU.

    Args:
        device: Name of the device.
        n: Number of workers. If ``None``, start one.
        cores: Number of CPU cores, which several workers share.

    Raises:
        ConfigurationError: If ``n`` workers are too many for the device.
    """
    count = n or 1
    is_accelerator = get_device(device).is_accelerator
    max_workers = 1 if is_accelerator else max(MIN_CPU_WORKERS, cores)
    if count > max_workers:
        resources = f"one {device} device" if is_accelerator else pluralize(cores, "core")
        alternative = ", or device='cpu'" if is_accelerator else ""
        raise ConfigurationError(f"n={n} is not possible with {resources}.", f"Use n={max_workers}{alternative}.")
    threads = None if count == 1 else max(1, cores // count)
    return [worker_options(device, threads)] * count


# Packages whose version can affect the results.
PACKAGES = ("openmed_nb", "torch", "transformers", "tokenizers")


@dataclass(frozen=True)
class WorkerInfo:
    """Description of a worker.

    Attributes:
        host: Name of the host.
        device: Device of the models.
        reason: Reason for the device.
        versions: Version of each of ``PACKAGES``, without build suffixes.
    """

    host: str
    device: str
    reason: str
    versions: Mapping[str, str]


@dataclass(frozen=True, repr=False)
class WorkerList(Displayable):
    """Workers of a cluster.

    Attributes:
        workers: Descriptions of the workers, sorted by address.
    """

    workers: tuple[WorkerInfo, ...]

    def __len__(self) -> int:
        return len(self.workers)

    @property
    def label(self) -> str:
        """Number of workers and types of their devices, such as ``"2 workers (mps)"``."""
        kinds = sorted({get_device(worker.device).type for worker in self.workers})
        return f"{pluralize(len(self.workers), 'worker')} ({', '.join(kinds)})"

    def to_report(self) -> Report:
        """Return the number of workers, and their hosts and devices."""
        hosts = pluralize(len({worker.host for worker in self.workers}), "host")
        rows = tuple((worker.host, worker.device, worker.reason) for worker in self.workers)
        return Report(f"{self.label} on {hosts}", metrics=(Table("Workers", ("host", "device", "reason"), rows),))


@dataclass(frozen=True)
class ReadyWorker:
    """Worker that has loaded the model of a run.

    Attributes:
        info: Description of the worker.
        settings: Model and settings that affect its results. They must be the same on every worker.
        chunk_characters: Approximate number of characters per chunk.
        warnings: Warnings that were issued while the model was loaded.
        known_labels: Entity labels of the model.
    """

    info: WorkerInfo
    settings: Mapping[str, object]
    chunk_characters: int
    warnings: tuple[str, ...] = ()
    known_labels: tuple[str, ...] = ()

    @property
    def compatibility_key(self) -> dict[str, object]:
        """Values that must be the same on every worker."""
        return {**self.info.versions, **self.settings}


def installed_versions() -> dict[str, str]:
    """Return the versions of ``PACKAGES`` in this process, without build suffixes such as ``+cpu``."""
    this_package, *dependencies = PACKAGES
    # This module is in a lower layer than the package itself and cannot import it.
    version = str(vars(sys.modules[this_package])["__version__"])
    return {
        this_package: version,
        **{name: importlib.metadata.version(name).partition("+")[0] for name in dependencies},
    }


def check_workers_match(ready: Sequence[ReadyWorker]) -> Mapping[str, object]:
    """Return the compatibility key that every worker of a run must have.

    Raises:
        WorkerMismatchError: If a worker has a different openmed_nb than this process, or differs from the first worker.
    """
    package = PACKAGES[0]
    expected = {**ready[0].compatibility_key, package: installed_versions()[package]}
    for worker in ready:
        check_worker_matches(worker, expected)
    return expected


def check_worker_matches(worker: ReadyWorker, expected: Mapping[str, object]) -> None:
    """Raise ``WorkerMismatchError`` if the versions, the model or the settings of a worker differ from the expected ones."""
    key = worker.compatibility_key
    for name in PACKAGES:
        if key[name] != expected[name]:
            message = f"The worker on {worker.info.host} has {name} {key[name]}, but {expected[name]} is required."
            raise WorkerMismatchError(message, "Install the same version on every host.")
    if changed := changed_settings(expected, key):
        message = f"The worker on {worker.info.host} has a different model or different settings ({changed})."
        raise WorkerMismatchError(message, "Copy the same files to every host.")
