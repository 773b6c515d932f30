"""Data loading: moving batches to the device, and configuring a ``DataLoader``."""

from __future__ import annotations

import multiprocessing
import os
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, TypeAlias, TypeVar

from .._render.display import (
    Displayable,
    Report,
    Table,
)
from ..devices import moving
from ..devices.machine import MachineInfo
from ..devices.registry import get_device
from ..session import SESSION

if TYPE_CHECKING:
    import torch
    from accelerate import Accelerator

    DeviceArgument: TypeAlias = str | torch.device | Accelerator | None

__all__ = ["settings"]

Thing = TypeVar("Thing")


def to_device(thing: Thing, device: DeviceArgument = None) -> Thing:
    """Move tensors to a device; on MPS, float64 is converted to float32 first.

    Args:
        thing: Tensor, module, or nested batch or state dict. NumPy arrays of numbers are converted to tensors; other
            values are returned unchanged.
        device: Name, ``torch.device`` or ``Accelerator``. If ``None``, use the session device.

    Returns:
        The same module, moved in place; for other values, a new value of the same type.

    Raises:
        DtypeOverflowError: If a float64 number would become infinite in float32. Nothing is moved.
        ConfigurationError: If the value is an optimizer, contains a module, or contains itself.

    Example:
        >>> import torch
        >>> to_device({"input_ids": torch.ones(1, 3)}, "cpu")["input_ids"].device
        device(type='cpu')
    """
    return moving.to_device(thing, SESSION.device(device).device)


# Mac chips have at least four performance cores, and each worker is a process. A forked worker that tokenizes with the
# bundled model has 315 MiB of resident memory (measured with psutil). More workers should be measured.
MAX_WORKERS = 4


@dataclass(frozen=True, repr=False)
class LoaderSettings(Displayable):
    """Arguments for a ``DataLoader`` on a device.

    Attributes:
        device: Device.
        arguments: Arguments by name: ``DataLoader(dataset, batch_size=8, **settings.arguments)``.
        reasons: Reason for each argument.
    """

    device: str
    arguments: dict[str, bool | int | str]
    reasons: dict[str, str]

    def to_report(self) -> Report:
        """Return a table of the arguments with their reasons."""
        rows = tuple((name, str(value), self.reasons[name]) for name, value in self.arguments.items())
        table = Table("Arguments", ("argument", "value", "reason"), rows)
        return Report(f"DataLoader for {self.device}", tables=(table,))


def settings(dataset: object, device: DeviceArgument = None) -> LoaderSettings:
    """Return the arguments for a ``DataLoader`` on a device, each with its reason.

    Args:
        dataset: Dataset; it is inspected, but not read.
        device: Device, as in :func:`to_device`.

    Returns:
        The settings: ``DataLoader(dataset, batch_size=8, **settings.arguments)``.

    Raises:
        DeviceError: If the device cannot be used.
        ConfigurationError: If the value of ``device`` has no device.

    Example:
        >>> settings([1, 2], "cpu").arguments["pin_memory"]
        False
    """
    machine = SESSION.device_manager.machine
    name = SESSION.device(device).device
    return make_settings(name, dataset, machine, default_start_method(machine.system), is_interactive_main())


def make_settings(
    device: str, dataset: object, machine: MachineInfo, start_method: str, is_interactive: bool
) -> LoaderSettings:
    source = getattr(dataset, "dataset", dataset)  # torch.utils.data.Subset refers to its dataset.
    # A transform of the dataset can be from a cell too.
    names_from_cells = [
        getattr(part, "__qualname__", type(part).__name__)
        for part in (source, *getattr(source, "__dict__", {}).values())
        if is_interactive and "__main__" in (getattr(part, "__module__", ""), type(part).__module__)
    ]
    workers = 0
    if any(base.__name__ == "IterableDataset" for base in type(dataset).__mro__):
        reason = "each worker would return the full stream unless the dataset shards it"
    elif type(dataset) in (list, tuple) or type(dataset).__name__ == "TensorDataset":
        reason = "the items are already in memory; workers would only copy them"
    elif names_from_cells and start_method != "fork":
        name = names_from_cells[0]
        reason = f"workers start empty ({start_method}) and cannot import {name} from a cell; write the class into a .py file and import it"
    else:
        cores = machine.cores or os.cpu_count() or 1
        workers = min(MAX_WORKERS, cores // 2)
        reason = f"half of {cores} cores, at most {MAX_WORKERS}; measure with nb.runbook.profile(step, loader)"
    backend = get_device(device)
    arguments: dict[str, bool | int | str] = {"pin_memory": backend.pins_memory, "num_workers": workers}
    reasons = {"pin_memory": backend.pin_reason, "num_workers": reason}
    if workers:
        arguments["persistent_workers"] = True
        reasons["persistent_workers"] = "workers are reused for the next epoch; starting one takes seconds"
    if workers and machine.system == "Darwin":
        arguments["multiprocessing_context"] = "spawn"  # pytorch#178037
        reasons["multiprocessing_context"] = (
            "a forked process that uses Metal hangs or crashes, and macOS does not fork by default"
        )
    return LoaderSettings(device, arguments, reasons)


def default_start_method(system: str) -> str:
    """Return the default start method of worker processes.

    On a Mac it is never ``fork``, because MPS hangs or crashes in forked processes.
    """
    if system == "Darwin":
        return "spawn"
    # Without allow_none, this call would set the start method.
    return multiprocessing.get_start_method(allow_none=True) or multiprocessing.get_all_start_methods()[0]


def is_interactive_main() -> bool:
    """Return whether other processes cannot import the main module, as in a notebook or at a prompt."""
    main = sys.modules.get("__main__")
    file = getattr(main, "__file__", None)
    return getattr(main, "__spec__", None) is None and (file is None or not Path(file).is_file())
