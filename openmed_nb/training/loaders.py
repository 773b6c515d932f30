"""How a ``DataLoader`` is set up for a device, with the reason for each setting."""

from __future__ import annotations

import functools
import itertools
import multiprocessing
import os
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..devices.machine import Machine
from ..devices.request import kind_of
from ..display import Report, Shown, Table

MOST_WORKERS = 4
"""The chips of Macs have four fast cores at least, and each worker is a process of its own: 315 MiB resident for one that
tokenizes with the bundled model, begun by fork, in a measurement with ``worker_ladder``. More are worth a measurement."""

IMPORTING = ("spawn", "forkserver")
"""The start methods whose processes begin empty, and import the class of what is sent to them."""

PIN_REASONS = {
    "mps": "MPS does not use pinned memory; the loader would warn and go on without (torch/utils/data/dataloader.py)",
    "cuda": "copies from pinned memory to the GPU are faster, and can go on while it computes",
    "cpu": "nothing is copied to a GPU; on a Mac the loader would still pin for MPS, and warn",
}

FEW = 10
"""So many items of a list are looked at: those of one list are mostly of one kind."""

CELL_REMEDY = "write the class into a .py file and import it"


@dataclass(frozen=True)
class Setting:
    """One argument of ``DataLoader``, and why it has this value."""

    name: str
    value: Any
    reason: str


@dataclass(frozen=True, repr=False)
class LoaderSettings(Shown):
    """The arguments for a ``DataLoader`` on a device.

    Attributes:
        device: The device.
        settings: Each argument with its reason.
    """

    device: str
    settings: tuple[Setting, ...]

    @property
    def arguments(self) -> dict[str, Any]:
        """The arguments: ``DataLoader(dataset, batch_size=8, **settings.arguments)``."""
        return {setting.name: setting.value for setting in self.settings}

    def to_dict(self) -> dict[str, Any]:
        """Return the device, the arguments and the reasons."""
        reasons = {setting.name: setting.reason for setting in self.settings}
        return {"device": self.device, "arguments": self.arguments, "reasons": reasons}

    def report(self) -> Report:
        """Return a table of the arguments with their reasons."""
        rows = tuple((setting.name, str(setting.value), setting.reason) for setting in self.settings)
        notes = ("Move batches with to_device, which waits: non_blocking=True corrupts them (pytorch#189690).",)
        table = Table("Arguments", ("argument", "value", "why"), rows)
        return Report(f"DataLoader for {self.device}", notes if self.device == "mps" else (), (table,))


def loader_settings(
    device: str, dataset: Any, machine: Machine, *, in_notebook: bool | None = None, start_method: str | None = None
) -> LoaderSettings:
    """Return the arguments for a ``DataLoader``.

    Args:
        device: ``"mps"``, ``"cuda"``, ``"cuda:N"`` or ``"cpu"``.
        dataset: The dataset; it is looked at and not read.
        machine: The facts of this computer.
        in_notebook: Whether this is a notebook, whose classes other processes cannot import; ``None`` looks.
        start_method: How worker processes begin: ``"fork"``, ``"spawn"`` or ``"forkserver"``; ``None`` is what this
            computer does.

    Returns:
        The arguments, each with its reason.

    Example:
        >>> mac = Machine("Darwin", "arm64", apple_silicon=True, chip="Apple M4", cores=10)
        >>> settings = loader_settings("mps", range(9), mac, in_notebook=True, start_method="spawn")
        >>> settings.arguments
        {'pin_memory': False, 'num_workers': 4, 'persistent_workers': True, 'multiprocessing_context': 'spawn'}
    """
    kind = kind_of(device)
    method = start_method or usual_start_method(machine)
    notebook = in_a_notebook() if in_notebook is None else in_notebook
    workers = worker_count(dataset, machine, method, in_notebook=notebook)
    settings = [Setting("pin_memory", kind == "cuda", PIN_REASONS[kind]), workers]
    if workers.value:
        settings.append(
            Setting("persistent_workers", True, "workers stay for the next epoch; starting one takes seconds")
        )
    if workers.value and machine.system == "Darwin":
        settings.append(Setting("multiprocessing_context", method, _darwin_reason(method)))
    return LoaderSettings(device, tuple(settings))


def worker_count(dataset: Any, machine: Machine, start_method: str, *, in_notebook: bool) -> Setting:
    """Return how many worker processes read a dataset, and why.

    Example:
        >>> worker_count(range(2), Machine("Linux", "x86_64", cores=4), "fork", in_notebook=True).value
        2
    """
    if is_stream(dataset):
        return Setting("num_workers", 0, "each worker would deliver the whole stream, unless the dataset divides it")
    if is_in_memory(dataset):
        return Setting("num_workers", 0, "the items are in memory already; a worker would only copy them")
    cells = sorted(set(defined_in_main(dataset)))
    if cells and in_notebook and start_method in IMPORTING:
        named = ", ".join(cells)
        reason = f"workers begin empty here ({start_method}) and cannot import {named} from a cell; {CELL_REMEDY}"
        return Setting("num_workers", 0, reason)
    cores = machine.cores or os.cpu_count() or 1
    count = min(MOST_WORKERS, cores // 2)
    return Setting("num_workers", count, f"half of {cores} cores, {MOST_WORKERS} at most; measure with worker_ladder")


def is_stream(dataset: Any) -> bool:
    """Tell whether a dataset is a stream without numbered items, in which workers cannot be sent to a place."""
    return any(kind.__name__ == "IterableDataset" for kind in type(dataset).__mro__)


def is_in_memory(dataset: Any) -> bool:
    """Tell whether reading an item takes no work: a list or a tuple, or torch's dataset of tensors.

    Example:
        >>> is_in_memory([1, 2]), is_in_memory(range(2))
        (True, False)
    """
    return type(dataset) in (list, tuple) or type(dataset).__name__ == "TensorDataset"


def defined_in_main(dataset: Any, depth: int = 4) -> Iterator[str]:
    """Yield the names of classes and functions in a dataset that were written into the notebook or script itself.

    Its class, its attributes and what it wraps (``dataset``, ``datasets``, a transform) are looked at, not its items.
    """
    for one in (type(dataset), dataset):
        name = getattr(one, "__qualname__", None)
        if isinstance(name, str) and getattr(one, "__module__", None) == "__main__":
            yield name
    for one in _held(dataset) if depth else ():
        yield from defined_in_main(one, depth - 1)


def _held(thing: Any) -> Iterator[Any]:
    """Yield what a value is made of: its attributes, the parts of a partial function, some items of a plain container."""
    if isinstance(thing, functools.partial):
        yield from (thing.func, *thing.args, *thing.keywords.values())
    elif type(thing) in {list, tuple}:
        yield from thing[:FEW]
    elif type(thing) is dict:
        yield from itertools.islice(thing.values(), FEW)
    else:
        yield from getattr(thing, "__dict__", {}).values()


def usual_start_method(machine: Machine) -> str:
    """Return how worker processes begin here; on a Mac never by ``fork``, in whose children MPS hangs or crashes."""
    if machine.system == "Darwin":
        return "spawn"
    chosen = multiprocessing.get_start_method(allow_none=True)  # Without allow_none the question would fix the method.
    return chosen or multiprocessing.get_all_start_methods()[0]


def in_a_notebook() -> bool:
    """Tell whether the main module is no file that another process could import, as in a notebook or at a prompt."""
    main = sys.modules.get("__main__")
    file = getattr(main, "__file__", None)
    return getattr(main, "__spec__", None) is None and (file is None or not Path(file).is_file())


def _darwin_reason(method: str) -> str:
    if method == "spawn":
        return "a forked process hangs or crashes where it touches Metal, and macOS does not fork by default"
    return "it was asked for; on a Mac spawn is safer"
