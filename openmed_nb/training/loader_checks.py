"""Measure whether a data loader keeps the device waiting.

Is it the loader or the model that training waits for, and how many worker processes are worth their memory?
"""

from __future__ import annotations

import contextlib
import gc
import itertools
import multiprocessing
import pickle
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from statistics import mean, median
from typing import TYPE_CHECKING, Any

from ..devices.backend import finish
from ..devices.machine import import_psutil
from ..devices.moving import to_device
from ..devices.simulated import active
from ..display import Report, Shown, Table, in_bytes
from ..errors import ConfigurationError, cause, shorten, whole, whole_or_none
from .loaders import CELL_REMEDY, IMPORTING, defined_in_main, in_a_notebook

if TYPE_CHECKING:
    import torch


CLOSE = 1.1
"""Times that differ by less count as the same: five readings of one loader in a row took 0.63 to 0.68 ms
per batch, 8 % apart, and far more once the computer was busy with something else."""

WORTH_WAITING = 0.1
"""A loop that waits for less than this share of its time has nothing to gain from its loader: without any waiting it would
be 1 / (1 - 0.1) = 1.11 times as fast, which is hardly more than ``CLOSE``."""


@dataclass(frozen=True, repr=False)
class LoaderCheck(Shown):
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

    @property
    def bottleneck(self) -> str:
        """What takes longer: ``"loader"``, ``"model"``, or ``"neither"`` where both are close.

        Example:
            >>> LoaderCheck("cpu", 0.030, 0.010, 0, 20).bottleneck
            'loader'
        """
        if self.data_seconds > CLOSE * self.step_seconds:
            return "loader"
        return "model" if self.step_seconds > CLOSE * self.data_seconds else "neither"

    @property
    def waiting(self) -> float:
        """The share of its time, 0 to 1, that a loop waits for batches; workers read while the model computes.

        Example:
            >>> LoaderCheck("cpu", 0.030, 0.010, 0, 20).waiting, LoaderCheck("cpu", 0.005, 0.010, 2, 20).waiting
            (0.75, 0.0)
        """
        waited = max(0.0, self.data_seconds - self.step_seconds) if self.workers else self.data_seconds
        whole = max(self.data_seconds, self.step_seconds) if self.workers else self.data_seconds + self.step_seconds
        return waited / whole if whole else 0.0

    @property
    def advice(self) -> str:
        """One thing to do."""
        if self.waiting <= WORTH_WAITING:
            return "Nothing to gain from the loader."
        if self.workers:
            return "Do the work on the texts once, before training, or try more workers with worker_ladder."
        if self.bottleneck == "loader":
            return "Do the work on the texts once, before training, or let workers read ahead: see worker_ladder."
        return "Loading and computing take turns: let workers read ahead while the model computes, see worker_ladder."

    def to_dict(self) -> dict[str, Any]:
        """Return the figures and what follows from them."""
        return {**vars(self), "bottleneck": self.bottleneck, "waiting": self.waiting}

    def report(self) -> Report:
        """Return what takes longer, both times, the share of waiting, and one thing to do."""
        titles = {
            "loader": "the loader takes longer than the model",
            "model": "the model takes longer than the loader",
            "neither": "loader and model take the same time",
        }
        rows = (("loader", milliseconds(self.data_seconds)), ("step", milliseconds(self.step_seconds)))
        share = f"Training waits {self.waiting:.0%} of its time for batches ({self.workers} workers)."
        title = f"{'SIMULATED ' if self.simulated else ''}{self.device}: {titles[self.bottleneck]}"
        table = Table(f"Over {self.batches} batches", ("alone", "per batch"), rows)
        return Report(title, (share, self.advice), (table,))


@dataclass(frozen=True)
class Rung:
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
class WorkerLadder(Shown):
    """How fast a dataset is read with several numbers of worker processes, and what memory they take.

    Attributes:
        rungs: What was measured, in the order of the numbers of workers.
        batch_size: How many items a batch has.
    """

    rungs: tuple[Rung, ...]
    batch_size: int

    @property
    def workers(self) -> int:
        """The smallest number of workers that no larger one beats by more than a tenth.

        Example:
            >>> WorkerLadder((Rung(0, 0.040, 0.04), Rung(1, 0.020, 0.3), Rung(2, 0.019, 0.4)), 8).workers
            1
        """
        best = self.rungs[0]
        for rung in self.rungs[1:]:
            best = rung if best.seconds > CLOSE * rung.seconds else best
        return best.workers

    def to_dict(self) -> dict[str, Any]:
        """Return the choice and all figures."""
        return {
            "workers": self.workers,
            "batch_size": self.batch_size,
            "rungs": [dict(vars(one)) for one in self.rungs],
        }

    def report(self) -> Report:
        """Return the choice and a table of the figures."""
        rows = tuple(
            (
                str(rung.workers),
                milliseconds(rung.seconds),
                milliseconds(rung.start_seconds),
                in_bytes(round(mean(rung.worker_bytes))) if rung.worker_bytes else "",
            )
            for rung in self.rungs
        )
        columns = ("workers", "per batch", "first batch", "memory of each")
        unread = any(rung.workers and not rung.worker_bytes for rung in self.rungs)
        sentences = ("The memory of some workers could not be read.",) if unread else ()
        return Report(f"{self.workers} workers", sentences, (Table(f"Batches of {self.batch_size}", columns, rows),))


def milliseconds(seconds: float) -> str:
    """Return a time in milliseconds.

    Example:
        >>> milliseconds(0.00125), milliseconds(2.5)
        ('1.25 ms', '2,500 ms')
    """
    value = seconds * 1000
    return f"{value:,.2f} ms" if value < 100 else f"{value:,.0f} ms"  # noqa: PLR2004


WARM_UP = 2
"""So many batches and steps are left out first: workers start, caches fill, graphs are compiled."""


def check_loader(
    loader: Iterable[Any],
    step: Callable[..., Any],
    device: str | torch.device,
    batches: int = 20,
) -> LoaderCheck:
    """Measure a loader without the model, then the model without the loader.

    Args:
        loader: A ``DataLoader``, or anything that can be gone through again and again.
        step: A module, which runs forward only, in evaluation mode and without gradients, and is left as it was; or a
            function that takes a batch on the device and does a step, whatever that changes.
        device: Where to.
        batches: How many of each are measured, at most; a few more come before, as warm-up.

    Returns:
        The times. The random numbers of the CPU go on as if nothing had been read.

    Raises:
        ConfigurationError: For a loader that gives nothing, or would be used up.

    Example:
        >>> import torch
        >>> loader = torch.utils.data.DataLoader(torch.ones(12, 2), batch_size=2)
        >>> check_loader(loader, torch.nn.Linear(2, 1), "cpu", batches=3).batches
        3
    """
    import torch

    place = torch.device(device)
    _check_again(loader)
    if not callable(step):
        raise ConfigurationError(f"{type(step).__name__} is no step.", "Pass the model, or a function of a batch.")
    whole("batches", batches, most=sys.maxsize)
    with torch.random.fork_rng(devices=[]):
        reading = read(loader, batches)
        step_seconds = median(_time_steps(step, reading.kept, place, reading.count))
    workers = int(getattr(loader, "num_workers", 0))
    return LoaderCheck(str(device), reading.seconds, step_seconds, workers, reading.count, _simulated(place))


def worker_ladder(
    dataset: Any,
    batch_size: int,
    workers: Sequence[int] = (0, 1, 2),
    batches: int = 20,
    start_method: str | None = None,
    **arguments: Any,
) -> WorkerLadder:
    """Measure how fast a dataset is read with several numbers of worker processes, and the memory that they take.

    Args:
        dataset: The dataset.
        batch_size: How many items a batch has.
        workers: The numbers of workers to try.
        batches: How many batches are measured for each.
        start_method: How workers begin, such as ``"spawn"``; ``None`` is Python's own way.
        arguments: More for ``DataLoader``, such as ``collate_fn``.

    Returns:
        Time per batch, time until the first batch and memory of each worker, for each number of workers; ``workers`` is
        the number to take.

    Raises:
        ConfigurationError: For numbers of workers or of batches that are none, for arguments that are set here, for a
            dataset that cannot be sent to another process, before one is started, and for one that gives nothing.

    Example:
        >>> worker_ladder([1.0] * 12, batch_size=2, workers=(0,), batches=3).workers
        0
    """
    import torch

    method = checked_start_method(start_method)
    counts = worker_counts(workers)
    whole("batches", batches, most=sys.maxsize)
    check_free(arguments)
    whole_or_none("batch_size", batch_size, most=sys.maxsize)
    streams = isinstance(dataset, torch.utils.data.IterableDataset) or {"sampler", "batch_sampler"} & set(arguments)
    if not streams and not (hasattr(type(dataset), "__len__") and hasattr(type(dataset), "__getitem__")):
        what = f"{type(dataset).__name__} is no dataset."
        raise ConfigurationError(what, "Pass a list, a Dataset with a length, or an IterableDataset.")
    settings = {"dataset": dataset, "batch_size": batch_size, **arguments}
    if counts[-1] and method in IMPORTING:
        check_sendable(settings)
    with torch.random.fork_rng(devices=[]):
        rungs = tuple(_rung(settings, count, batches, method) for count in counts)
    return WorkerLadder(rungs, batch_size)


def checked_start_method(method: Any) -> str:
    """Return how worker processes begin; ``None`` is Python's own way.

    Raises:
        ConfigurationError: For a way that this computer does not have.
    """
    known = multiprocessing.get_all_start_methods()
    if method is None:
        return multiprocessing.get_start_method(allow_none=True) or known[0]
    if not isinstance(method, str) or method not in known:
        raise ConfigurationError(f"No worker starts by {shorten(repr(method))}.", f"Use one of {', '.join(known)}.")
    return method


def worker_counts(workers: Any) -> list[int]:
    """Return numbers of workers in order, each once.

    Raises:
        ConfigurationError: For anything else than some whole numbers from 0 up.

    Example:
        >>> worker_counts((2, 0, 2))
        [0, 2]
    """
    counts = list(workers) if isinstance(workers, Iterable) else []
    if not counts or any(isinstance(one, bool) or not isinstance(one, int) or one < 0 for one in counts):
        raise ConfigurationError(
            f"{shorten(repr(workers))} workers cannot be tried.", "Pass numbers from 0 up, such as workers=(0, 1, 2)."
        )
    return sorted(set(counts))


def check_free(arguments: Mapping[str, Any]) -> None:
    """Refuse arguments of a ``DataLoader`` that the ladder sets itself."""
    for name, other in (("num_workers", "workers"), ("multiprocessing_context", "start_method")):
        if name in arguments:
            raise ConfigurationError(f"worker_ladder sets {name} itself.", f"Pass {other}= instead.")


def check_sendable(settings: Mapping[str, Any]) -> None:
    """Refuse arguments of a ``DataLoader`` that cannot reach a worker process which begins empty.

    Raises:
        ConfigurationError: It names the argument and what is in the way.

    Example:
        >>> check_sendable({"dataset": (number for number in range(3))})
        Traceback (most recent call last):
        ...
        openmed_nb.errors.ConfigurationError: dataset cannot be sent to a worker process: cannot pickle 'generator' \
object. Use functions and classes of a module instead of lambdas and open files, or workers=(0,).
    """
    for name, value in settings.items():
        cells = sorted(set(defined_in_main(value)))
        if cells and in_a_notebook():
            what = f"{name} cannot be imported by a worker process: {', '.join(cells)} is defined in a cell."
            raise ConfigurationError(what, f"{CELL_REMEDY.capitalize()}, or use workers=(0,).")
        try:
            multiprocessing.reduction.ForkingPickler.dumps(value)
        except (pickle.PicklingError, TypeError, AttributeError) as error:  # What pickle raises for what it cannot do.
            what = f"{name} cannot be sent to a worker process: {cause(error)}."
            remedy = "Use functions and classes of a module instead of lambdas and open files, or workers=(0,)."
            raise ConfigurationError(what, remedy) from error


@dataclass(frozen=True)
class Reading:
    """What reading a loader took.

    Attributes:
        seconds: Mean time per batch; workers deliver in bursts, so a single time says little.
        count: How many batches that is over.
        start_seconds: Time until the first batch.
        worker_bytes: Resident memory of each worker.
        kept: The first and the last batch.
    """

    seconds: float
    count: int
    start_seconds: float
    worker_bytes: tuple[int, ...]
    kept: tuple[Any, Any]


def read(loader: Iterable[Any], batches: int) -> Reading:
    """Read a loader and nothing else; its workers are gone when this returns.

    What is read ahead while workers start comes at once and says nothing of their speed, so it is left out.

    Raises:
        ConfigurationError: For a loader with too few batches.
    """
    workers = int(getattr(loader, "num_workers", 0))
    ahead = max(WARM_UP, workers * int(getattr(loader, "prefetch_factor", None) or 0))
    others = {process.pid for process in multiprocessing.active_children()}
    begin = time.perf_counter()
    with _iterating(loader) as iterator:
        first = last = next(iterator, None)
        start_seconds = time.perf_counter() - begin
        skipped = sum(1 for _ in itertools.islice(iterator, ahead - 1))
        begin, count = time.perf_counter(), 0
        for batch in itertools.islice(iterator, batches):
            last, count = batch, count + 1
        seconds = time.perf_counter() - begin
        own = [one.pid for one in multiprocessing.active_children() if one.pid is not None and one.pid not in others]
        sizes = memory_of_each(own) if workers else ()
    if not count:
        had = 0 if first is None else 1 + skipped
        what = f"The loader has {had} batches, and {ahead} are left out as warm-up."
        raise ConfigurationError(what, "Pass more items or smaller batches.")
    return Reading(seconds / count, count, start_seconds, sizes, (first, last))


def _rung(settings: Mapping[str, Any], workers: int, batches: int, method: str) -> Rung:
    """Measure one number of workers."""
    import torch

    context = {"multiprocessing_context": method} if workers else {}
    try:
        loader = torch.utils.data.DataLoader(**settings, **context, num_workers=workers)
    except (TypeError, ValueError) as error:
        what = f"torch.utils.data.DataLoader refuses its arguments: {cause(error)}."
        raise ConfigurationError(what, "Pass what help(torch.utils.data.DataLoader) names.") from error
    reading = read(loader, batches)
    return Rung(workers, reading.seconds, reading.start_seconds, reading.worker_bytes)


def memory_of_each(processes: Iterable[int]) -> tuple[int, ...]:
    """Return the resident memory of processes; those that ended meanwhile, or may not be asked, are left out."""
    psutil = import_psutil()
    sizes = []
    for process in processes:
        with contextlib.suppress(psutil.NoSuchProcess, psutil.AccessDenied):
            sizes.append(int(psutil.Process(process).memory_info().rss))
    return tuple(sizes)


@contextlib.contextmanager
def _iterating(loader: Iterable[Any]) -> Iterator[Iterator[Any]]:
    """Go through a loader for a while; its workers are shut down at the end, also after an error.

    torch shuts them down when the iterator is collected. An error's frames would hold it, hence the call.
    """
    iterator = iter(loader)
    try:
        yield iterator
    finally:
        shut_down = getattr(iterator, "_shutdown_workers", None)
        if shut_down and not getattr(loader, "persistent_workers", False):
            shut_down()
        del iterator
        gc.collect(0)


def _time_steps(step: Callable[..., Any], kept: Sequence[Any], device: torch.device, count: int) -> list[float]:
    """Return the time for each step over batches that are in memory, each waited for."""
    times = []
    with _forward_only(step) as run:
        for batch in itertools.islice(itertools.cycle(kept), WARM_UP + count):
            finish(device)
            begin = time.perf_counter()
            run(to_device(batch, device))
            finish(device)
            times.append(time.perf_counter() - begin)
    return times[WARM_UP:]


@contextlib.contextmanager
def _forward_only(step: Callable[..., Any]) -> Iterator[Callable[[Any], Any]]:
    """Yield what runs a batch; a module runs without gradients and dropout, and is afterwards in its former mode."""
    import torch

    if not isinstance(step, torch.nn.Module):
        yield step
        return
    modes = [(module, module.training) for module in step.modules()]
    step.eval()
    try:
        with torch.no_grad():
            yield lambda batch: step(**batch) if isinstance(batch, Mapping) else step(_inputs(batch))
    finally:
        for module, training in modes:
            module.training = training


def _inputs(batch: Any) -> Any:
    """Return what a model takes of a batch of inputs and labels."""
    return batch[0] if isinstance(batch, (list, tuple)) else batch


def _check_again(loader: Any) -> None:
    if not isinstance(loader, Iterable) and not hasattr(loader, "__getitem__"):
        raise ConfigurationError(f"{type(loader).__name__} is no loader.", "Pass a torch.utils.data.DataLoader.")
    if isinstance(loader, Iterator):
        what = f"A {type(loader).__name__} can be gone through once, and would be used up."
        raise ConfigurationError(what, "Pass the loader itself.")


def _simulated(device: torch.device) -> bool:
    return device.type == "mps" and active()
