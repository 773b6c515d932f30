"""The workers of a cluster: what each gets when it starts, what it says of itself, and whether all give the same answers."""

from __future__ import annotations

import importlib.metadata
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from .._render.display import Displayable, Report, Table, pluralize, to_plain_data
from .._utils.validation import check_optional_integer
from ..annotation.resume import changed_settings
from ..devices.registry import parse_device_argument
from ..errors import ConfigurationError, WorkerMismatchError

MIN_CPU_WORKERS = (
    2  # Any CPU may have so many workers; with many more than cores, a computer does nothing but start them.
)


@dataclass(frozen=True)
class WorkerSpec:
    device: str | None  # By the name that the worker knows it by; None for the best of its computer.
    visible_devices: str | None = None  # The value of CUDA_VISIBLE_DEVICES that gives it one GPU; None for no such GPU.
    threads: int | None = None  # How many threads it computes on, on the CPU; None leaves that to torch.

    @property
    def options(self) -> dict[str, Any]:
        """The options of Dask's nanny."""
        named = {
            "OPENMED_TORCH_DEVICE": self.device,
            "CUDA_VISIBLE_DEVICES": self.visible_devices,
            "OMP_NUM_THREADS": self.threads and str(self.threads),
        }
        # Two chunks at once: one is tokenized while another computes, where there is a thread for it.
        tasks = 1 if self.threads == 1 else 2
        return {"nthreads": tasks, "env": {name: value for name, value in named.items() if value is not None}}


def plan_workers(
    device: str, n: int | None, gpus: Sequence[str], cores: int, threads: int | None = None
) -> tuple[WorkerSpec, ...]:
    """Return the workers for a device of this computer: one for each GPU of CUDA, one for MPS, one or more for the CPU.

    ``gpus`` are names for ``CUDA_VISIBLE_DEVICES``; without ``threads``, several workers share the cores of the CPU.
    """
    check_optional_integer("n", n)
    check_optional_integer("threads", threads)
    known = parse_device_argument(device)
    if not known.is_accelerator:
        count = n or 1
        check_worker_count(n, max(MIN_CPU_WORKERS, cores), f"{pluralize(cores, 'core')} of the CPU", "")
        return (WorkerSpec("cpu", threads=threads or (None if count == 1 else max(1, cores // count))),) * count
    if not known.is_numbered:
        check_worker_count(n, 1, "one MPS device, which several processes would only share")
        return (WorkerSpec("mps", threads=threads),)
    index = device.partition(":")[2]
    chosen = gpus if not index else gpus[int(index) : int(index) + 1]
    check_worker_count(n, len(chosen), f"{pluralize(len(chosen), 'GPU')} for {device!r}")
    return tuple(WorkerSpec("cuda", gpu, threads) for gpu in chosen[:n])


def check_worker_count(n: int | None, max_workers: int, resources: str, otherwise: str = ", or device='cpu'") -> None:
    if n is not None and n > max_workers:
        raise ConfigurationError(f"n cannot be {n} with {resources}.", f"Use n={max_workers}{otherwise}.")


def plan_hosts(
    hosts: Sequence[str], gpus: Mapping[str, Sequence[str]], device: str | None, threads: int | None
) -> tuple[WorkerSpec, ...]:
    """Return the workers on hosts: one for each name, with a CUDA GPU of its own if the host has several.

    ``gpus`` are a host's names for ``CUDA_VISIBLE_DEVICES``; where they were not counted, the worker chooses.
    """
    for host, count in Counter(hosts).items():
        there = len(gpus.get(host, ())) or count
        if count > there:
            what = f"{host} is named {count} times, and has {pluralize(there, 'GPU')}."
            raise ConfigurationError(what, f"Name it {there} times at most, or use device='cpu'.")
    free = {host: iter(names) for host, names in gpus.items()}
    return tuple(WorkerSpec(device, next(free.get(host, iter(())), None), threads) for host in hosts)


def visible_gpu_ids(count: int, variable: str | None) -> tuple[str, ...]:
    """Return the names for ``CUDA_VISIBLE_DEVICES`` of the GPUs that a process with this value of the variable sees."""
    named = [name.strip() for name in (variable or "").split(",") if name.strip()]
    return tuple(named or map(str, range(count)))[:count]


PACKAGES = ("openmed_nb", "torch", "transformers", "tokenizers")  # Other versions of these give other answers.


@dataclass(frozen=True)
class WorkerInfo:
    """A worker, as it says of itself.

    Attributes:
        host: The name of its computer.
        system: Its operating system and architecture, such as ``"Darwin arm64"``.
        device: The device that models run on there.
        reason: Why that device.
        versions: The version of each of ``PACKAGES`` there, those of torch's builds for one device or another left out.
    """

    host: str
    system: str
    device: str
    reason: str
    versions: Mapping[str, str]


@dataclass(frozen=True, repr=False)
class WorkerList(Displayable):
    """The workers that take part.

    Attributes:
        members: What each says of itself, in the order of their addresses.
    """

    workers: tuple[WorkerInfo, ...]

    def __len__(self) -> int:
        return len(self.workers)

    @property
    def label(self) -> str:
        """How many workers on which kinds of devices, such as ``"2 workers (mps)"``."""
        kinds = sorted({parse_device_argument(member.device).type for member in self.workers})
        return f"{pluralize(len(self.workers), 'worker')} ({', '.join(kinds)})"

    def to_dict(self) -> dict[str, Any]:
        """Return what all workers say of themselves, as plain mappings, lists and strings."""
        return {"workers": to_plain_data(self.workers)}

    def to_report(self) -> Report:
        """Return how many they are and why they use their devices; their names and versions are figures."""
        hosts = pluralize(len({member.host for member in self.workers}), "computer")
        reasons = sorted({f"{member.device}: {member.reason}" for member in self.workers})
        rows = tuple((one.host, one.device, one.reason, one.system) for one in self.workers)
        versions = tuple((one.host, *one.versions.values()) for one in self.workers)
        workers = Table("", ("computer", "device", "why", "system"), rows)
        folded = Table("Versions", ("computer", *PACKAGES), versions, collapsed=True)
        title = f"{self.label} on {hosts}"
        return Report(title, tuple(reasons), metrics=(workers, folded), html_sentences=(title,))


@dataclass(frozen=True)
class ReadyWorker:
    """A worker that has loaded the model of a run."""

    member: WorkerInfo
    settings: Mapping[str, Any]  # The model, by a fingerprint, and all that changes its answers.
    characters: int  # About how many it reads at a time.
    warnings: tuple[str, ...] = ()  # Those of loading the model.
    known_labels: tuple[str, ...] = ()  # Of the entities that the model can find.

    @property
    def compatibility_key(self) -> dict[str, Any]:
        """What must be the same on every worker."""
        return {**self.member.versions, **self.settings}


def installed_versions() -> dict[str, str]:
    """Return the versions of ``PACKAGES`` in this process, without ``+cpu`` and the like, which name builds of one version."""
    this, *others = PACKAGES
    # The package's face stands on the top floor, so this file cannot import it.
    own = str(vars(sys.modules[this])["__version__"])
    return {this: own, **{name: importlib.metadata.version(name).partition("+")[0] for name in others}}


SAME_VERSION = "Install the same version on every computer."


def check_workers_match(ready: Sequence[ReadyWorker]) -> Mapping[str, Any]:
    """Return what all workers have in common.

    Raises ``WorkerMismatchError`` for the first one that has another openmed_nb than this process, or would answer otherwise.
    """
    this = PACKAGES[0]
    here = installed_versions()[this]
    for member in (one.member for one in ready):
        if member.versions[this] != here:
            what = f"The worker on {member.host} has {this} {member.versions[this]}, and this process has {here}."
            raise WorkerMismatchError(what, SAME_VERSION)
    terms = [one.compatibility_key for one in ready]
    usual = max(terms, key=terms.count)
    for one in ready:
        check_worker_matches(one, usual)
    return usual


def check_worker_matches(one: ReadyWorker, usual: Mapping[str, Any]) -> None:
    """Raise ``WorkerMismatchError`` if a worker has another version, model or setting than the others."""
    host, terms = one.member.host, one.compatibility_key
    for name in PACKAGES:
        if terms[name] != usual[name]:
            what = f"The worker on {host} has {name} {terms[name]}, and others have {usual[name]}."
            raise WorkerMismatchError(what, SAME_VERSION)
    if other := changed_settings(usual, terms):
        what = f"The worker on {host} has another model by that name, or settings of its own ({other})."
        raise WorkerMismatchError(what, "Copy the same files to every computer.")
