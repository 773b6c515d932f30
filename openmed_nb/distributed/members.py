"""Workers of a cluster: their start options, their descriptions, and the check that they give the same results."""

from __future__ import annotations

import importlib.metadata
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from .._render.display import Displayable, Report, Table, pluralize, to_plain_data
from ..annotation.resume import changed_settings
from ..devices.registry import get_device
from ..errors import ConfigurationError, WorkerMismatchError

# Number of workers that are allowed on any CPU. With many more workers than cores, a machine spends its
# time on their startup.
MIN_CPU_WORKERS = 2


def worker_options(device: str | None, threads: int | None = None, gpu: str | None = None) -> dict[str, object]:
    """Return the options of Dask's ``Nanny`` for a worker.

    Args:
        device: Device name in the worker. If ``None``, use the best device of its machine.
        threads: Number of CPU threads. If ``None``, use the default of torch.
        gpu: Name of a GPU for ``CUDA_VISIBLE_DEVICES``. If ``None``, all GPUs are visible.
    """
    variables = {
        "OPENMED_TORCH_DEVICE": device,
        "CUDA_VISIBLE_DEVICES": gpu,
        "OMP_NUM_THREADS": threads and str(threads),
    }
    # With more than one thread, the worker tokenizes a chunk while it computes another one.
    tasks = 1 if threads == 1 else 2
    return {"nthreads": tasks, "env": {name: value for name, value in variables.items() if value is not None}}


def plan_workers(device: str, n: int | None, gpus: Sequence[str], cores: int) -> list[dict[str, object]]:
    """Return the options of the workers on this machine: one for each CUDA GPU, one for MPS, at least one for the CPU.

    Args:
        device: Name of the device.
        n: Number of workers. If ``None``, use the default of the device.
        gpus: Names of the GPUs for ``CUDA_VISIBLE_DEVICES``.
        cores: Number of CPU cores, which several workers share.

    Raises:
        ConfigurationError: If there are not enough devices or cores for ``n`` workers.
    """
    target = get_device(device)
    if not target.is_accelerator:
        count = n or 1
        _check_worker_count(n, max(MIN_CPU_WORKERS, cores), f"{pluralize(cores, 'core')} of the CPU", "")
        threads = None if count == 1 else max(1, cores // count)
        return [worker_options(target.type, threads)] * count
    if not target.supports_index:
        _check_worker_count(n, 1, f"one {target.type.upper()} device, which several processes would only share")
        return [worker_options(target.type)]
    index = device.partition(":")[2]
    selected = gpus if not index else gpus[int(index) : int(index) + 1]
    _check_worker_count(n, len(selected), f"{pluralize(len(selected), 'GPU')} for {device!r}")
    return [worker_options(target.type, gpu=gpu) for gpu in selected[:n]]


def _check_worker_count(
    n: int | None, max_workers: int, resources: str, alternative: str = ", or device='cpu'"
) -> None:
    """Raise ``ConfigurationError`` if ``n`` is larger than ``max_workers``."""
    if n is not None and n > max_workers:
        raise ConfigurationError(f"n={n} is not possible with {resources}.", f"Use n={max_workers}{alternative}.")


def visible_gpu_ids(count: int, visible_devices: str | None) -> tuple[str, ...]:
    """Return the names of the visible GPUs for ``CUDA_VISIBLE_DEVICES``.

    Args:
        count: Number of visible GPUs.
        visible_devices: Value of ``CUDA_VISIBLE_DEVICES``, or ``None`` if it is not set.
    """
    names = [name.strip() for name in (visible_devices or "").split(",") if name.strip()]
    return tuple(names or map(str, range(count)))[:count]


# Packages whose version can affect the results.
PACKAGES = ("openmed_nb", "torch", "transformers", "tokenizers")


@dataclass(frozen=True)
class WorkerInfo:
    """Description of a worker.

    Attributes:
        host: Name of the host.
        system: Operating system and architecture, such as ``"Darwin arm64"``.
        device: Device of the models.
        reason: Reason for the device.
        versions: Version of each of ``PACKAGES``, without build suffixes.
    """

    host: str
    system: str
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

    def to_dict(self) -> dict[str, object]:
        """Return the descriptions of the workers as JSON-compatible mappings, lists and strings."""
        return {"workers": to_plain_data(self.workers)}

    def to_report(self) -> Report:
        """Return the number of workers, and their hosts, devices and versions."""
        hosts = pluralize(len({worker.host for worker in self.workers}), "host")
        rows = tuple((worker.host, worker.device, worker.reason, worker.system) for worker in self.workers)
        versions = tuple((worker.host, *worker.versions.values()) for worker in self.workers)
        workers_table = Table("Workers", ("host", "device", "reason", "system"), rows)
        versions_table = Table("Versions", ("host", *PACKAGES), versions, collapsed=True)
        return Report(f"{self.label} on {hosts}", metrics=(workers_table, versions_table))


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


SAME_VERSION_REMEDY = "Install the same version on every host."


def check_workers_match(ready: Sequence[ReadyWorker]) -> Mapping[str, object]:
    """Return the compatibility key of the workers.

    Raises:
        WorkerMismatchError: If a worker has a different openmed_nb than this process, or differs from the other workers.
    """
    package = PACKAGES[0]
    local_version = installed_versions()[package]
    for worker in ready:
        version = worker.info.versions[package]
        if version != local_version:
            message = f"The worker on {worker.info.host} has {package} {version}, but this process has {local_version}."
            raise WorkerMismatchError(message, SAME_VERSION_REMEDY)
    keys = [worker.compatibility_key for worker in ready]
    expected = max(keys, key=keys.count)
    for worker in ready:
        check_worker_matches(worker, expected)
    return expected


def check_worker_matches(worker: ReadyWorker, expected: Mapping[str, object]) -> None:
    """Raise ``WorkerMismatchError`` if the versions, the model or the settings of a worker differ from the other workers."""
    key = worker.compatibility_key
    for name in PACKAGES:
        if key[name] != expected[name]:
            message = f"The worker on {worker.info.host} has {name} {key[name]}, but others have {expected[name]}."
            raise WorkerMismatchError(message, SAME_VERSION_REMEDY)
    if changed := changed_settings(expected, key):
        message = f"The worker on {worker.info.host} has a different model or different settings ({changed})."
        raise WorkerMismatchError(message, "Copy the same files to every host.")
