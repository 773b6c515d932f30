"""Data loading: moving batches to the device, configuring a ``DataLoader``, and measuring its speed."""

from __future__ import annotations

import contextlib
import functools
import gc
import itertools
import multiprocessing
import os
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, TypeAlias, TypeVar

from .._events.activity import ProgressEvent
from .._render.display import (
    SIMULATED_SUFFIX,
    Displayable,
    Report,
    Table,
    format_milliseconds,
    format_percent,
)
from .._utils.clock import current_time
from .._utils.text import short_type_name
from .._utils.validation import check_integer, invalid_type
from ..devices import moving
from ..devices.machine import MachineInfo
from ..devices.registry import get_device
from ..errors import ConfigurationError
from ..session import SESSION

if TYPE_CHECKING:
    import torch
    from accelerate import Accelerator

    DeviceArgument: TypeAlias = str | torch.device | Accelerator | None

__all__ = ["check", "settings"]

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
# Start methods whose processes start empty, and import the class of each object that they receive.
IMPORTING_START_METHODS = ("spawn", "forkserver")
# Number of items of a list that are inspected; items of one list usually have the same type.
MIN_ITEMS_FOR_WORKERS = 10

CELL_REMEDY = "write the class into a .py file and import it"


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
        note = "Move batches with nb.training.to_device, which synchronizes; non_blocking=True corrupts them (pytorch#189690)."
        return Report(
            f"DataLoader for {self.device}",
            (note,) if get_device(self.device).corrupts_non_blocking_copies else (),
            (Table("Arguments", ("argument", "value", "reason"), rows),),
        )


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
    return make_settings(SESSION.device(device).device, dataset, SESSION.device_manager.machine)


def make_settings(
    device: str,
    dataset: object,
    machine: MachineInfo,
    *,
    in_notebook: bool | None = None,
    start_method: str | None = None,
) -> LoaderSettings:
    method = start_method or default_start_method(machine.system)
    names = sorted(set(find_main_definitions(dataset)))
    workers = 0
    if any(base.__name__ == "IterableDataset" for base in type(dataset).__mro__):
        reason = "each worker would return the full stream unless the dataset shards it"
    elif type(dataset) in (list, tuple) or type(dataset).__name__ == "TensorDataset":
        reason = "the items are already in memory; workers would only copy them"
    elif (
        names and method in IMPORTING_START_METHODS and (is_interactive_main() if in_notebook is None else in_notebook)
    ):
        reason = f"workers start empty ({method}) and cannot import {', '.join(names)} from a cell; {CELL_REMEDY}"
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


def find_main_definitions(value: Any, depth: int = 4) -> Iterator[str]:
    """Yield the names of classes and functions of a dataset that the notebook or script defines, without its items."""
    for definition in (type(value), value):
        name = getattr(definition, "__qualname__", None)
        if isinstance(name, str) and getattr(definition, "__module__", None) == "__main__":
            yield name
    if not depth:
        return
    if isinstance(value, functools.partial):
        children: Iterable[object] = (value.func, *value.args, *value.keywords.values())
    elif type(value) in {list, tuple}:
        children = value[:MIN_ITEMS_FOR_WORKERS]
    elif type(value) is dict:
        children = itertools.islice(value.values(), MIN_ITEMS_FOR_WORKERS)
    else:
        children = getattr(value, "__dict__", {}).values()
    for child in children:
        yield from find_main_definitions(child, depth - 1)


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


# Times that differ by less are considered equal: five consecutive measurements of one loader took 0.63 to 0.68 ms per
# batch, a difference of 8%, and far more with background load.
SIMILAR_RATIO = 1.1
# A loop that waits for less than this fraction of its time cannot benefit from a faster loader. Without any waiting it
# would be 1 / (1 - 0.1) = 1.11 times as fast, hardly more than SIMILAR_RATIO.
MIN_WAIT_FRACTION = 0.1
# Number of warm-up batches and steps, which are not measured: workers start, caches fill, graphs are compiled.
NUM_WARM_UP_BATCHES = 2


@dataclass(frozen=True, repr=False)
class LoaderCheck(Displayable):
    """Time per batch of a loader, and per step of a model.

    Attributes:
        device: Measured device.
        data_seconds: Mean time per batch of the loader alone.
        step_seconds: Median time per step alone, including the copy to the device.
        workers: Number of processes that read ahead. Without workers, loading and computing alternate.
        batches: Number of measured batches and steps.
        simulated: Whether the device is simulated; its times do not represent a real device.
    """

    device: str
    data_seconds: float
    step_seconds: float
    workers: int
    batches: int
    simulated: bool = False

    JSON_PROPERTIES = ("bottleneck", "wait_fraction")

    @property
    def bottleneck(self) -> Literal["loader", "model", "neither"]:
        """Slower part: ``"loader"``, ``"model"``, or ``"neither"`` if both times are similar."""
        if self.data_seconds > SIMILAR_RATIO * self.step_seconds:
            return "loader"
        return "model" if self.step_seconds > SIMILAR_RATIO * self.data_seconds else "neither"

    @property
    def wait_fraction(self) -> float:
        """Fraction of its time, in [0, 1], that a loop waits for batches; workers read while the model computes."""
        waited = max(0.0, self.data_seconds - self.step_seconds) if self.workers else self.data_seconds
        total = max(self.data_seconds, self.step_seconds) if self.workers else self.data_seconds + self.step_seconds
        return waited / total if total else 0.0

    @property
    def advice(self) -> str:
        """Suggested action."""
        if self.wait_fraction <= MIN_WAIT_FRACTION:
            return "A faster loader would not help."
        if self.workers:
            return "Preprocess the texts once before training, or profile the loader with more workers: nb.runbook.profile(step, loader)."
        if self.bottleneck == "loader":
            return "Preprocess the texts once before training, or use workers; profile the loader with each number: nb.runbook.profile(step, loader)."
        return "Loading and computing alternate. Use workers; profile the loader with each number: nb.runbook.profile(step, loader)."

    def to_report(self) -> Report:
        """Return the bottleneck, both times, the fraction of waiting, and the suggested action."""
        titles = {
            "loader": "the loader is slower than the model",
            "model": "the model is slower than the loader",
            "neither": "loader and model take similar time",
        }
        rows = (("loader", format_milliseconds(self.data_seconds)), ("step", format_milliseconds(self.step_seconds)))
        waiting = (
            f"Training waits {format_percent(self.wait_fraction)} of its time for batches ({self.workers} workers)."
        )
        title = f"{self.device}{SIMULATED_SUFFIX if self.simulated else ''}: {titles[self.bottleneck]}"
        table = Table(f"Over {self.batches} batches", ("measured alone", "per batch"), rows)
        return Report(title, (waiting, self.advice), (table,))


def check(
    loader: Iterable[object],
    step: Callable[..., object],
    device: DeviceArgument = None,
    batches: int = 20,
    *,
    progress: bool = True,
) -> LoaderCheck:
    """Measure the loader without the model, then the model without the loader, and report the bottleneck.

    Args:
        loader: ``DataLoader``, or other iterable that can be iterated repeatedly.
        step: Module, which runs forward in evaluation mode without gradients and is not changed; or function that takes
            a batch on the device and runs a step, including its side effects.
        device: Device, as in :func:`to_device`.
        batches: Maximum number of measured batches and steps; a few more run before, as warm-up.
        progress: Whether to display progress if it takes longer than half a second.

    Returns:
        The times in seconds. ``bottleneck`` names the slower part, and ``wait_fraction`` is the fraction of time that
        training waits. The random number state of the CPU is not changed.

    Raises:
        DeviceError: If the device cannot be used.
        ConfigurationError: If the loader is empty or is an iterator, or if ``batches`` is not valid.

    Example:
        >>> import torch
        >>> loader = torch.utils.data.DataLoader(torch.ones(12, 2), batch_size=2)
        >>> check(loader, torch.nn.Linear(2, 1), "cpu", batches=3).batches
        3
    """
    import torch

    name = SESSION.device(device).device
    if not any(hasattr(type(loader), name) for name in ("__iter__", "__getitem__")):
        raise invalid_type("the loader", loader, "Pass a torch.utils.data.DataLoader.")
    if isinstance(loader, Iterator):
        message = f"A {short_type_name(loader)} can be iterated only once and would be exhausted."
        raise ConfigurationError(message, "Pass the loader itself.")
    if not callable(step):
        raise invalid_type("the step", step, "Pass the model, or a function of a batch.")
    check_integer("batches", batches, maximum=sys.maxsize)
    with SESSION.operation(progress), torch.random.fork_rng(devices=[]):
        SESSION.notify(ProgressEvent("Timing", "the loader", 0, 2, "part"))
        timing = _time_batches(loader, batches)
        SESSION.notify(ProgressEvent("Timing", "the step", 1, 2, "part"))
        step_seconds = median(_time_steps(step, timing.samples, torch.device(name), timing.batches))
        SESSION.notify(ProgressEvent("Timing", "the loader and the step", 2, 2, "part"))
    simulated = get_device(name).is_simulated
    return LoaderCheck(name, timing.seconds, step_seconds, timing.workers, timing.batches, simulated)


class _LoaderTiming(NamedTuple):
    """Time per batch of a loader alone, its number of workers, the number of measured batches, and the first and last batch."""

    seconds: float
    workers: int
    batches: int
    samples: tuple[object, object]


def _time_batches(loader: Iterable[object], batches: int) -> _LoaderTiming:
    """Measure the time per batch of a loader alone.

    Workers deliver batches in bursts, so the mean is used. The batches that they prefetch while starting arrive at once
    and are not measured. All workers are stopped at the end.
    """
    workers = int(getattr(loader, "num_workers", 0))
    num_skipped = max(NUM_WARM_UP_BATCHES, workers * int(getattr(loader, "prefetch_factor", None) or 0))
    first = last = None
    total = 0
    start = current_time()
    iterator = iter(loader)
    try:
        for last in itertools.islice(iterator, num_skipped + batches):
            total += 1
            if total == 1:
                first = last
            if total == num_skipped:
                start = current_time()
        seconds = current_time() - start
    # torch shuts workers down when the iterator is collected, but the frames of an error would keep it alive.
    finally:
        shut_down = getattr(iterator, "_shutdown_workers", None)
        if shut_down and not getattr(loader, "persistent_workers", False):
            shut_down()
        del iterator
        gc.collect(0)
    count = total - num_skipped
    if count <= 0:
        message = f"The loader has {total} batches, and {num_skipped} are used as warm-up."
        raise ConfigurationError(message, "Pass more items or smaller batches.")
    return _LoaderTiming(seconds / count, workers, count, (first, last))


def _time_steps(
    step: Callable[..., object], samples: Sequence[object], device: torch.device, count: int
) -> list[float]:
    """Return the time of each step over batches in memory, waiting for the device after each.

    A module runs without gradients and dropout, and its mode is restored afterwards.
    """
    import torch

    def run(batch: object) -> None:
        if not isinstance(step, torch.nn.Module):
            step(batch)
        elif isinstance(batch, Mapping):
            step(**batch)
        else:
            # A pair of inputs and labels, or inputs alone.
            step(batch[0] if isinstance(batch, (list, tuple)) else batch)

    times = []
    modes = {}
    if isinstance(step, torch.nn.Module):
        modes = {module: module.training for module in step.modules()}
        step.eval()
    try:
        with torch.no_grad() if modes else contextlib.nullcontext():
            for batch in itertools.islice(itertools.cycle(samples), NUM_WARM_UP_BATCHES + count):
                get_device(device).synchronize()
                start = current_time()
                run(moving.to_device(batch, device))
                get_device(device).synchronize()
                times.append(current_time() - start)
    finally:
        for module, training in modes.items():
            module.training = training
    return times[NUM_WARM_UP_BATCHES:]
