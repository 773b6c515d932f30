"""Data on its way to the device: moving batches, setting up a ``DataLoader``, and measuring whether it keeps up."""

from __future__ import annotations

import contextlib
import functools
import gc
import itertools
import multiprocessing
import os
import pickle
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import mean, median
from typing import TYPE_CHECKING, Any, TypeVar

from .._events.activity import ProgressEvent
from .._render.display import SIMULATED_SUFFIX, Displayable, JsonMixin, Report, Table, format_bytes, format_milliseconds
from .._utils.clock import current_time
from .._utils.text import describe_error, short_type_name
from .._utils.validation import check_choice, check_integer, check_optional_integer, invalid_type, invalid_value
from ..devices import moving
from ..devices.machine import MachineInfo, import_psutil
from ..devices.registry import parse_device_argument
from ..errors import ConfigurationError
from ..session import SESSION

if TYPE_CHECKING:
    import torch

__all__ = ["benchmark_workers", "check", "settings"]

Thing = TypeVar("Thing")


def to_device(thing: Thing, device: Any = None) -> Thing:
    """Return tensors on a device, the session's where none is named; on MPS float64 becomes float32 before.

    Args:
        thing: A tensor, a module, or a batch or a state dict in any depth. NumPy arrays of numbers become tensors; anything
            else stays as it is.
        device: A name, a ``torch.device``, an ``Accelerator``; ``None`` is the session's device.

    Returns:
        A module itself, moved in place; for anything else a new value of the same type.

    Raises:
        DtypeOverflowError: For a float64 number that would become infinite in float32; nothing was moved then.
        ConfigurationError: For an optimizer, a module inside of something else, and a value that holds itself.

    Example:
        >>> import torch
        >>> to_device({"input_ids": torch.ones(1, 3)}, "cpu")["input_ids"].device
        device(type='cpu')
    """
    return moving.to_device(thing, SESSION.device(device).device)


# The chips of Macs have four fast cores at least, and each worker is a process of its own: 315 MiB resident for one that
# tokenizes with the bundled model, begun by fork, in a measurement with nb.training.loader.benchmark_workers. More are worth a measurement.
MAX_WORKERS = 4
# The start methods whose processes begin empty, and import the class of what is sent to them.
IMPORTING = ("spawn", "forkserver")
# So many items of a list are looked at: those of one list are mostly of one kind.
MIN_ITEMS_FOR_WORKERS = 10

CELL_REMEDY = "write the class into a .py file and import it"


@dataclass(frozen=True)
class LoaderArgument:
    """One argument of ``DataLoader``, and why it has this value."""

    name: str
    value: Any
    reason: str


@dataclass(frozen=True, repr=False)
class LoaderSettings(Displayable):
    """The arguments for a ``DataLoader`` on a device.

    Attributes:
        device: The device.
        settings: Each argument with its reason.
    """

    device: str
    settings: tuple[LoaderArgument, ...]

    JSON_EXCLUDE = ("settings",)
    JSON_PROPERTIES = ("arguments", "reasons")

    @property
    def arguments(self) -> dict[str, Any]:
        """The arguments: ``DataLoader(dataset, batch_size=8, **settings.arguments)``."""
        return {setting.name: setting.value for setting in self.settings}

    @property
    def reasons(self) -> dict[str, str]:
        """The reason of each argument."""
        return {setting.name: setting.reason for setting in self.settings}

    def to_report(self) -> Report:
        """Return a table of the arguments with their reasons."""
        rows = tuple((setting.name, str(setting.value), setting.reason) for setting in self.settings)
        note = "Move batches with nb.training.to_device, which waits: non_blocking=True corrupts them (pytorch#189690)."
        table = Table("Arguments", ("argument", "value", "why"), rows)
        return Report(
            f"DataLoader for {self.device}",
            (note,) if parse_device_argument(self.device).corrupts_unwaited_copies else (),
            (table,),
        )


def settings(dataset: Any, device: Any = None) -> LoaderSettings:
    """Return the arguments for a ``DataLoader`` on a device, each with its reason.

    Args:
        dataset: The dataset; it is looked at and not read.
        device: As for :func:`to_device`.

    Returns:
        The settings: ``DataLoader(dataset, batch_size=8, **settings.arguments)``.

    Raises:
        DeviceError: For a device that cannot be used.
        ConfigurationError: For a value that has no device.

    Example:
        >>> settings([1, 2], "cpu").arguments["pin_memory"]
        False
    """
    return settings_for(SESSION.device(device).device, dataset, SESSION.device_manager.machine)


def settings_for(
    device: str, dataset: Any, machine: MachineInfo, *, in_notebook: bool | None = None, start_method: str | None = None
) -> LoaderSettings:
    known = parse_device_argument(device)
    method = start_method or default_start_method(machine.system)
    workers = worker_count(dataset, machine, method, is_interactive_main() if in_notebook is None else in_notebook)
    settings = [LoaderArgument("pin_memory", known.pins_memory, known.pin_reason), workers]
    if workers.value:
        why = "workers stay for the next epoch; starting one takes seconds"
        settings.append(LoaderArgument("persistent_workers", True, why))
    if workers.value and machine.system == "Darwin":
        why = "a forked process hangs or crashes where it touches Metal, and macOS does not fork by default"
        settings.append(LoaderArgument("multiprocessing_context", "spawn", why))
    return LoaderSettings(device, tuple(settings))


def worker_count(dataset: Any, machine: MachineInfo, start_method: str, in_notebook: bool) -> LoaderArgument:
    """Return how many worker processes read a dataset, and why."""
    count = 0
    cells = sorted(set(find_main_definitions(dataset)))
    if any(kind.__name__ == "IterableDataset" for kind in type(dataset).__mro__):
        why = "each worker would deliver the whole stream, unless the dataset divides it"
    elif type(dataset) in (list, tuple) or type(dataset).__name__ == "TensorDataset":
        why = "the items are in memory already; a worker would only copy them"
    elif cells and in_notebook and start_method in IMPORTING:
        named = ", ".join(cells)
        why = f"workers begin empty here ({start_method}) and cannot import {named} from a cell; {CELL_REMEDY}"
    else:
        cores = machine.cores or os.cpu_count() or 1
        count = min(MAX_WORKERS, cores // 2)
        why = f"half of {cores} cores, {MAX_WORKERS} at most; measure with nb.training.loader.benchmark_workers"
    return LoaderArgument("num_workers", count, why)


def find_main_definitions(thing: Any, depth: int = 4) -> Iterator[str]:
    """Yield the names of classes and functions in a dataset, its items left out, that the notebook or script defines."""
    for one in (type(thing), thing):
        name = getattr(one, "__qualname__", None)
        if isinstance(name, str) and getattr(one, "__module__", None) == "__main__":
            yield name
    if not depth:
        return
    if isinstance(thing, functools.partial):
        held: Iterable[Any] = (thing.func, *thing.args, *thing.keywords.values())
    elif type(thing) in {list, tuple}:
        held = thing[:MIN_ITEMS_FOR_WORKERS]
    elif type(thing) is dict:
        held = itertools.islice(thing.values(), MIN_ITEMS_FOR_WORKERS)
    else:
        held = getattr(thing, "__dict__", {}).values()
    for one in held:
        yield from find_main_definitions(one, depth - 1)


def default_start_method(system: str = "") -> str:
    """Return how worker processes begin where nobody says; on a Mac never by ``fork``, in whose children MPS hangs or crashes."""
    if system == "Darwin":
        return "spawn"
    # Without allow_none the question would fix the method.
    return multiprocessing.get_start_method(allow_none=True) or multiprocessing.get_all_start_methods()[0]


def is_interactive_main() -> bool:
    """Tell whether no other process could import the main module, as in a notebook or at a prompt."""
    main = sys.modules.get("__main__")
    file = getattr(main, "__file__", None)
    return getattr(main, "__spec__", None) is None and (file is None or not Path(file).is_file())


# Times that differ by less count as the same: five readings of one loader in a row took 0.63 to 0.68 ms per batch, 8 %
# apart, and far more once the computer was busy with something else.
SIMILAR_RATIO = 1.1
# A loop that waits for less than this share of its time has nothing to gain from its loader: without any waiting it would
# be 1 / (1 - 0.1) = 1.11 times as fast, which is hardly more than CLOSE.
MIN_WAIT_FRACTION = 0.1
# So many batches and steps are left out first: workers start, caches fill, graphs are compiled.
WARM_UP = 2


@dataclass(frozen=True, repr=False)
class LoaderCheck(Displayable):
    """How long a loader takes for a batch, and a model for a step.

    Attributes:
        device: The device that was measured.
        data_seconds: The mean time for a batch of the loader alone.
        step_seconds: The median time for a step alone, the copy to the device included.
        workers: How many processes read ahead; with none, loading and computing take turns.
        batches: How many of each were measured.
        simulated: Whether the device was a simulated one, whose times say nothing of a real one.
    """

    device: str
    data_seconds: float
    step_seconds: float
    workers: int
    batches: int
    simulated: bool = False

    JSON_PROPERTIES = ("bottleneck", "wait_fraction")

    @property
    def bottleneck(self) -> str:
        """What takes longer: ``"loader"``, ``"model"``, or ``"neither"`` where both are close."""
        if self.data_seconds > SIMILAR_RATIO * self.step_seconds:
            return "loader"
        return "model" if self.step_seconds > SIMILAR_RATIO * self.data_seconds else "neither"

    @property
    def wait_fraction(self) -> float:
        """The share of its time, 0 to 1, that a loop waits for batches; workers read while the model computes."""
        waited = max(0.0, self.data_seconds - self.step_seconds) if self.workers else self.data_seconds
        whole = max(self.data_seconds, self.step_seconds) if self.workers else self.data_seconds + self.step_seconds
        return waited / whole if whole else 0.0

    @property
    def advice(self) -> str:
        """One thing to do."""
        if self.wait_fraction <= MIN_WAIT_FRACTION:
            return "Nothing to gain from the loader."
        if self.workers:
            return "Do the work on the texts once, before training, or try more workers with nb.training.loader.benchmark_workers."
        if self.bottleneck == "loader":
            return "Do the work on the texts once, before training, or let workers read ahead: see nb.training.loader.benchmark_workers."
        return "Loading and computing take turns: let workers read ahead while the model computes, see nb.training.loader.benchmark_workers."

    def to_report(self) -> Report:
        """Return what takes longer, both times, the share of waiting, and one thing to do."""
        titles = {
            "loader": "the loader takes longer than the model",
            "model": "the model takes longer than the loader",
            "neither": "loader and model take the same time",
        }
        rows = (("loader", format_milliseconds(self.data_seconds)), ("step", format_milliseconds(self.step_seconds)))
        share = f"Training waits {100 * self.wait_fraction:.0f} % of its time for batches ({self.workers} workers)."
        title = f"{self.device}{SIMULATED_SUFFIX if self.simulated else ''}: {titles[self.bottleneck]}"
        table = Table(f"Over {self.batches} batches", ("alone", "per batch"), rows)
        return Report(title, (share, self.advice), (table,))


@dataclass(frozen=True)
class WorkerTiming(JsonMixin):
    """A number of worker processes, and what it costs.

    Attributes:
        workers: How many.
        seconds: Time per batch, once all of them run.
        start_seconds: Time until the first batch.
        worker_bytes: Resident memory of each worker; forked ones share a part of it with this process.
    """

    workers: int
    seconds: float
    start_seconds: float
    worker_bytes: tuple[int, ...] = ()


@dataclass(frozen=True, repr=False)
class WorkerBenchmark(Displayable):
    """How fast a dataset is read with several numbers of worker processes, and what memory they take.

    Attributes:
        rungs: What was measured, in the order of the numbers of workers.
        batch_size: How many items a batch has.
    """

    timings: tuple[WorkerTiming, ...]
    batch_size: int

    JSON_PROPERTIES = ("workers",)

    @property
    def workers(self) -> int:
        """The smallest number of workers that no larger one beats by more than a tenth."""
        best = self.timings[0]
        for rung in self.timings[1:]:
            if best.seconds > SIMILAR_RATIO * rung.seconds:
                best = rung
        return best.workers

    def to_report(self) -> Report:
        """Return the choice and a table of the figures."""
        rows = []
        for rung in self.timings:
            memory = format_bytes(round(mean(rung.worker_bytes))) if rung.worker_bytes else ""
            rows.append(
                (str(rung.workers), format_milliseconds(rung.seconds), format_milliseconds(rung.start_seconds), memory)
            )
        sentences = []
        if any(rung.workers and not rung.worker_bytes for rung in self.timings):
            sentences.append("The memory of some workers could not be read.")
        columns = ("workers", "per batch", "first batch", "memory of each")
        table = Table(f"Batches of {self.batch_size}", columns, tuple(rows))
        return Report(f"{self.workers} workers", tuple(sentences), (table,))


def check(
    loader: Iterable[Any],
    step: Callable[..., Any],
    device: Any = None,
    batches: int = 20,
    *,
    progress: bool = True,
) -> LoaderCheck:
    """Measure a loader without the model, then the model without the loader, and say which one training waits for.

    Args:
        loader: A ``DataLoader``, or anything that can be gone through again and again.
        step: A module, which runs forward only, in evaluation mode and without gradients, and is left as it was; or a
            function that takes a batch on the device and does a step, whatever that changes.
        device: As for :func:`to_device`.
        batches: How many of each are measured, at most; a few more come before, as warm-up.
        progress: Whether to show what is under way, where it takes longer than half a second.

    Returns:
        The times in seconds; ``bottleneck`` names the longer one, ``waiting`` the share of time that training waits. The
        random numbers of the CPU go on as if nothing had been read.

    Raises:
        DeviceError: For a device that cannot be used.
        ConfigurationError: For a loader that gives nothing, or would be used up, and for no number of batches.

    Example:
        >>> import torch
        >>> loader = torch.utils.data.DataLoader(torch.ones(12, 2), batch_size=2)
        >>> check(loader, torch.nn.Linear(2, 1), "cpu", batches=3).batches
        3
    """
    import torch

    name = SESSION.device(device).device
    if not any(hasattr(type(loader), name) for name in ("__iter__", "__getitem__")):
        raise invalid_type("The loader", loader, "Pass a torch.utils.data.DataLoader.")
    if isinstance(loader, Iterator):
        what = f"A {short_type_name(loader)} can be gone through once, and would be used up."
        raise ConfigurationError(what, "Pass the loader itself.")
    if not callable(step):
        raise invalid_type("The step", step, "Pass the model, or a function of a batch.")
    check_integer("batches", batches, maximum=sys.maxsize)
    with SESSION.operation(progress), torch.random.fork_rng(devices=[]):
        SESSION.notify(ProgressEvent("Timing", "the loader", 0, 2, "part"))
        rung, count, kept = time_batches(loader, batches)
        SESSION.notify(ProgressEvent("Timing", "the step", 1, 2, "part"))
        step_seconds = median(_time_steps(step, kept, torch.device(name), count))
        SESSION.notify(ProgressEvent("Timing", "the loader and the step", 2, 2, "part"))
    simulated = parse_device_argument(name).is_simulated
    return LoaderCheck(name, rung.seconds, step_seconds, rung.workers, count, simulated)


def benchmark_workers(  # noqa: PLR0913 - each is one thing that a person may want to set
    dataset: Any,
    batch_size: int,
    workers: Sequence[int] = (0, 1, 2),
    batches: int = 20,
    start_method: str | None = None,
    *,
    progress: bool = True,
    **arguments: Any,
) -> WorkerBenchmark:
    """Measure how fast a dataset is read with several numbers of worker processes, and the memory that they take.

    Args:
        dataset: The dataset.
        batch_size: How many items a batch has.
        workers: The numbers of workers to try.
        batches: How many batches are measured for each.
        start_method: How workers begin, such as ``"spawn"``; ``None`` is Python's own way.
        progress: Whether to show what is under way, where it takes longer than half a second.
        arguments: More for ``DataLoader``, such as ``collate_fn``.

    Returns:
        Time per batch, time until the first batch and memory of each worker, for each number of workers; ``workers`` is
        the number to take.

    Raises:
        ConfigurationError: For numbers of workers or of batches below their least, for arguments that are set here, for a
            dataset that cannot be sent to another process, before one is started, and for one that gives nothing.

    Example:
        >>> benchmark_workers([1.0] * 12, batch_size=2, workers=(0,), batches=3).workers
        0
    """
    import torch

    method = default_start_method() if start_method is None else start_method
    check_choice("start_method", method, multiprocessing.get_all_start_methods())
    counts = [check_integer("workers", count, 0) for count in workers] if isinstance(workers, Iterable) else []
    if not counts:
        raise invalid_value("workers", workers, "Pass numbers from 0 up, such as workers=(0, 1, 2).")
    check_integer("batches", batches, maximum=sys.maxsize)
    for name, other in (("num_workers", "workers"), ("multiprocessing_context", "start_method")):
        if name in arguments:
            raise ConfigurationError(f"The ladder sets {name} itself.", f"Pass {other}= instead.")
    check_optional_integer("batch_size", batch_size, most=sys.maxsize)
    streams = isinstance(dataset, torch.utils.data.IterableDataset) or {"sampler", "batch_sampler"} & set(arguments)
    sequence = hasattr(type(dataset), "__len__") and hasattr(type(dataset), "__getitem__")
    if not streams and (not sequence or isinstance(dataset, Mapping)):
        what = f"The dataset is of type {short_type_name(dataset)}, which has no length or no items by number."
        raise ConfigurationError(what, "Pass a list, a Dataset with a length, or an IterableDataset.")
    settings = {"dataset": dataset, "batch_size": batch_size, **arguments}
    if max(counts) and method in IMPORTING:
        check_picklable(settings)
    with SESSION.operation(progress), torch.random.fork_rng(devices=[]):
        tried = SESSION.track("Timing", "the loader", sorted(set(counts)), "rung")
        rungs = tuple(_time_workers(settings, count, batches, method) for count in tried)
    return WorkerBenchmark(rungs, batch_size)


def check_picklable(settings: Mapping[str, Any]) -> None:
    """Refuse arguments of a ``DataLoader`` that cannot reach a worker process which begins empty."""
    for name, value in settings.items():
        cells = sorted(set(find_main_definitions(value)))
        if cells and is_interactive_main():
            what = f"{name} cannot be imported by a worker process: {', '.join(cells)} is defined in a cell."
            raise ConfigurationError(what, f"{CELL_REMEDY.capitalize()}, or use workers=(0,).")
        try:
            multiprocessing.reduction.ForkingPickler.dumps(value)
        except (pickle.PicklingError, TypeError, AttributeError) as error:  # What pickle raises for what it cannot do.
            what = f"{name} cannot be sent to a worker process: {describe_error(error)}."
            remedy = "Use functions and classes of a module instead of lambdas and open files, or workers=(0,)."
            raise ConfigurationError(what, remedy) from None


def _time_workers(settings: Mapping[str, Any], workers: int, batches: int, method: str) -> WorkerTiming:
    """Measure one number of workers."""
    import torch

    context = {"multiprocessing_context": method} if workers else {}
    refused = ""
    try:
        loader = torch.utils.data.DataLoader(**settings, **context, num_workers=workers)
    except (TypeError, ValueError) as error:
        refused = f"torch.utils.data.DataLoader refuses its arguments: {describe_error(error)}."
    if refused:  # Outside of the handler: torch's error quotes the arguments, and would be the context of this one.
        raise ConfigurationError(refused, "Pass what help(torch.utils.data.DataLoader) names.")
    return time_batches(loader, batches)[0]


def time_batches(loader: Iterable[Any], batches: int) -> tuple[WorkerTiming, int, tuple[Any, Any]]:
    """Read a loader and nothing else; return the times, how many batches were timed, and the first and last of them.

    Workers deliver in bursts, so the mean counts. What they read ahead while they start comes at once and says nothing of
    their speed, so it is left out. They are gone at the end.
    """
    psutil = import_psutil()
    workers = int(getattr(loader, "num_workers", 0))
    ahead = max(WARM_UP, workers * int(getattr(loader, "prefetch_factor", None) or 0))
    others = {process.pid for process in multiprocessing.active_children()}
    first = last = None
    total = 0
    sizes = []
    begin = current_time()
    iterator = iter(loader)
    try:
        for last in itertools.islice(iterator, ahead + batches):
            total += 1
            if total == 1:
                first = last
                start_seconds = current_time() - begin
            if total == ahead:
                begin = current_time()
        seconds = current_time() - begin
        for process in multiprocessing.active_children() if workers else ():
            if process.pid is not None and process.pid not in others:
                with contextlib.suppress(psutil.NoSuchProcess, psutil.AccessDenied):
                    sizes.append(int(psutil.Process(process.pid).memory_info().rss))
    finally:  # torch shuts workers down when the iterator is collected; an error's frames would hold it.
        shut_down = getattr(iterator, "_shutdown_workers", None)
        if shut_down and not getattr(loader, "persistent_workers", False):
            shut_down()
        del iterator
        gc.collect(0)
    count = total - ahead
    if count <= 0:
        what = f"The loader has {total} batches, and {ahead} are left out as warm-up."
        raise ConfigurationError(what, "Pass more items or smaller batches.")
    return WorkerTiming(workers, seconds / count, start_seconds, tuple(sizes)), count, (first, last)


def _time_steps(step: Callable[..., Any], kept: Sequence[Any], device: torch.device, count: int) -> list[float]:
    """Return the time for each step over batches that are in memory, each waited for.

    A module runs without gradients and dropout, and is afterwards in its former mode.
    """
    import torch

    def run(batch: Any) -> None:
        if not isinstance(step, torch.nn.Module):
            step(batch)
        elif isinstance(batch, Mapping):
            step(**batch)
        else:
            step(batch[0] if isinstance(batch, (list, tuple)) else batch)  # Inputs and labels, or inputs.

    times = []
    modes = {}
    if isinstance(step, torch.nn.Module):
        modes = {part: part.training for part in step.modules()}
        step.eval()
    try:
        with torch.no_grad() if modes else contextlib.nullcontext():
            for batch in itertools.islice(itertools.cycle(kept), WARM_UP + count):
                parse_device_argument(device).finish()
                begin = current_time()
                run(moving.to_device(batch, device))
                parse_device_argument(device).finish()
                times.append(current_time() - begin)
    finally:
        for part, training in modes.items():
            part.training = training
    return times[WARM_UP:]
