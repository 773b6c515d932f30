"""What is measured: a subject, the workload that it gives, how its time splits.

A step of work, in phases, over batches, on a device: what a sweep, a comparison and a profile measure.

A step takes a batch from an iterator, which is the phase "data", and hands it from phase to phase. Run at full speed, nothing is waited
for before its end; run in phases, the device is waited for after each, so that times say where they belong.
"""

from __future__ import annotations

import contextlib
import copy
import gc
import re
import statistics
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import fmean
from typing import TYPE_CHECKING, Any, Protocol

from ...devices.backend import TENSOR_LOCK, finish, random_numbers_from, random_states
from ...devices.memory import empty_cache, is_out_of_memory
from ...devices.moving import named_tensors, with_tensors
from ...display import OK, WARNING, Finding
from ...errors import ConfigurationError, DeviceUnavailable, cause
from ..operators.copies import random_numbers_kept
from .timing import now

if TYPE_CHECKING:
    import torch


ANNOTATION, FORWARD_PASS, TRAINING_STEP, OWN_STEP = "annotation", "forward pass", "training step", "own step"
"""The tasks."""

DATA, TRANSFER, FORWARD, DECODE = "data", "transfer", "forward", "decode"
BACKWARD, OPTIMIZER, STEP = "backward", "optimizer", "step"
"""The names of phases."""


@dataclass(frozen=True)
class Phase:
    """A part of a step.

    Attributes:
        name: One of the names above.
        run: Takes what the phase before gave, the first one a batch, and returns what the next one takes.
    """

    name: str
    run: Callable[[Any], Any]


@dataclass(frozen=True)
class Workload:
    """Steps that can be measured.

    Attributes:
        name: What a person calls the model, or the function.
        task: One of the tasks.
        device: Where it runs, as torch spells it.
        rows: How many texts, or rows, a batch has.
        length: How many tokens a row has; ``None`` where that differs, or where rows are no tokens.
        batches: Begins the batches, again and again; they need not end.
        phases: What is done with a batch, in order.
        workers: How many processes read ahead.
        dtype: The type of the model's numbers, where that is known.
        ahead: How many batches the processes that read ahead hold ready, all together.
        batch_tokens: How many tokens a batch may have on the device, where texts are annotated; ``None`` for other tasks.
        sizes: How many batches of each number of rows a loader gave so far; empty where all have ``rows``.
        row_shape: The shape of a row, such as ``"3x224x224"``; ``None`` where that is not known, and where texts are read.
    """

    name: str
    task: str
    device: str
    rows: int
    length: int | None
    batches: Callable[[], Iterator[Any]]
    phases: tuple[Phase, ...]
    workers: int = 0
    dtype: str | None = None
    ahead: int = 0
    batch_tokens: int | None = None
    sizes: Counter[int] = field(default_factory=Counter)
    row_shape: str | None = None

    def run(self, batch: Any) -> Any:
        """Do a step with a batch, to its end on the device, and return what the last phase gave."""
        with TENSOR_LOCK:
            for phase in self.phases:
                batch = phase.run(batch)
            finish(self.torch_device)
        return batch

    def seconds(self, batch: Any) -> float:
        """Return how long a step at full speed takes, in seconds; the device has nothing else to do before."""
        with TENSOR_LOCK:
            finish(self.torch_device)
            begin = now()
            self.run(batch)
            return now() - begin

    def seconds_of_phases(self, batches: Iterator[Any]) -> dict[str, float]:
        """Take the next batch and return how long each phase of its step takes, in seconds, each waited for.

        Raises:
            StopIteration: Where no batch is left.
        """
        begin = now()
        value = next(batches)
        seconds = {DATA: now() - begin - starting(batches)}
        with TENSOR_LOCK:
            finish(self.torch_device)
            for phase in self.phases:
                begin = now()
                value = phase.run(value)
                finish(self.torch_device)
                seconds[phase.name] = now() - begin
        return seconds

    @property
    def typical(self) -> Callable[[list[float]], float]:
        """What is taken of the seconds of some steps.

        Texts lie in memory, and what one batch of them takes longer than another was another program: the median. A loader
        keeps only some steps waiting: the mean.
        """
        return statistics.median if self.task == ANNOTATION else statistics.fmean

    @property
    def usual_rows(self) -> int:
        """How many rows a batch usually has: the median, where a loader gives several sizes."""
        return statistics.median_low(self.sizes.elements()) if self.sizes else self.rows

    @property
    def mean_rows(self) -> float:
        """How many rows a batch has in the mean."""
        return statistics.fmean(self.sizes.elements()) if self.sizes else self.rows

    @property
    def torch_device(self) -> torch.device:
        """The device as torch's own value."""
        import torch

        return torch.device(self.device)


def starting(batches: Iterator[Any]) -> float:
    """Return how many seconds of the last batch went into starting a loader's processes, which belong to no step."""
    return float(getattr(batches, "starting", 0.0))


def read_ahead(loader: Any) -> tuple[int, int]:
    """Return how many processes of a loader read ahead, and how many batches they hold ready.

    It is ``prefetch_factor`` for each of ``num_workers`` (``_MultiProcessingDataLoaderIter`` in ``torch/utils/data/dataloader.py``).

    Example:
        >>> from torch.utils.data import DataLoader
        >>> read_ahead(DataLoader([1.0], num_workers=2, prefetch_factor=5)), read_ahead([1.0])
        ((2, 10), (0, 0))
    """
    workers = int(getattr(loader, "num_workers", 0))
    return workers, workers * int(getattr(loader, "prefetch_factor", None) or 1)


class Bench(Protocol):
    """A model, or a function, on a device, ready to be measured with batches of any size."""

    @property
    def device(self) -> str:
        """Where it is, as torch spells it."""

    def bucket(self, rows: int) -> Workload:
        """Return steps over batches of one shape that lie ready on the host."""

    def stream(self, rows: int | None = None) -> Workload:
        """Return steps over batches as they come: texts that are read and tokenised, or what a loader gives."""


@dataclass(frozen=True)
class Subject:
    """What a person wants measured, before a device is chosen.

    Attributes:
        name: What the person calls it.
        task: One of the tasks.
        on: Puts it on a device, beside what the session holds, and leaves what the person passed as it is.
        data: What the person passed as data, where it is no text.
    """

    name: str
    task: str
    on: Callable[[str], Bench]
    data: Any = None


DOMINATES = 0.5
"""A phase dominates that takes more than this share of a step: whatever else is made faster, it stays the larger part."""

DATA_SHARE = 0.25
"""A loader is slow that keeps a step waiting for more than this share of it: without the wait, a third more steps are done."""

REMEDIES: Mapping[str, str] = {
    DATA: "Read ahead with workers, prepare the data once and keep it, or see nb.check_loader().",
    TRANSFER: "Copy less often and more at once: a larger batch, and smaller types for labels and masks.",
    DECODE: "Bring less to the host: labels and scores, not all logits.",
}
"""What to do about each phase that should not dominate."""

MORE_WORKERS = (
    "Read ahead with more workers, kept with persistent_workers=True, prepare the data once and keep it, "
    "or see nb.check_loader()."
)
"""What to do about the data where processes read ahead already."""


@dataclass(frozen=True)
class Split:
    """The phases of a step, each waited for.

    Attributes:
        seconds: How long each phase takes, in seconds, in their order.
    """

    seconds: Mapping[str, float]

    @property
    def total(self) -> float:
        """How long a step takes in which each phase is waited for, in seconds."""
        return sum(self.seconds.values())

    @property
    def shares(self) -> dict[str, float]:
        """Which part of a step each phase is, from 0 to 1."""
        return {name: seconds / self.total if self.total else 0.0 for name, seconds in self.seconds.items()}

    @property
    def dominating(self) -> str | None:
        """The phase that takes more than half of a step, ``None`` where none does.

        Example:
            >>> Split({"data": 3.0, "forward": 1.0}).dominating, Split({"data": 1.0, "forward": 1.0}).dominating
            ('data', None)
        """
        return next((name for name, share in self.shares.items() if share > DOMINATES), None)

    @property
    def words(self) -> str:
        """Where the time goes, in words.

        Example:
            >>> Split({"data": 3.0, "forward": 1.0}).words
            'data dominates'
        """
        return f"{self.dominating} dominates" if self.dominating else "no phase takes more than half of a step"

    def finding(self, name: str, workers: int = 0) -> Finding:
        """Return what to think of it.

        Args:
            name: What the finding is called.
            workers: How many processes read ahead.
        """
        remedy = data_remedy(workers) if self.dominating == DATA else REMEDIES.get(self.dominating or "", "")
        return Finding(name, WARNING if remedy else OK, self.words, remedy)

    def to_dict(self) -> dict[str, Any]:
        """Return it as plain mappings, numbers and strings."""
        return {"seconds": dict(self.seconds), "shares": self.shares, "dominating": self.dominating}


def data_remedy(workers: int) -> str:
    """Return what to do about a loader that keeps steps waiting.

    Args:
        workers: How many processes read ahead already.

    Example:
        >>> data_remedy(0) == REMEDIES["data"], data_remedy(2)[:26]
        (True, 'Read ahead with more worke')
    """
    return REMEDIES[DATA] if not workers else MORE_WORKERS


def split_of(steps: Iterable[Mapping[str, float]], typical: Callable[[list[float]], float] = fmean) -> Split:
    """Return how many seconds each phase takes.

    Args:
        steps: The seconds of each phase of some steps, as ``Workload.seconds_of_phases`` returns them.
        typical: What is taken of all steps, as :attr:`.Workload.typical` says.

    Example:
        >>> split_of([{"data": 1.0, "forward": 3.0}, {"data": 3.0, "forward": 3.0}]).seconds
        {'data': 2.0, 'forward': 3.0}
    """
    measured = list(steps)
    names = dict.fromkeys(name for step in measured for name in step)
    return Split({name: typical([step[name] for step in measured]) for name in names})


@dataclass(frozen=True)
class Repeated:
    """The batches of a loader, without an end.

    Attributes:
        loader: Gives the batches.
        form: Makes of a batch what a step takes.
        sizes: How many batches of each number of rows were given so far.

    Raises:
        ConfigurationError: Where the loader gives none, such as one whose batches can be read only once.
    """

    loader: Iterable[Any]
    form: Callable[[Any], Any] = lambda batch: batch
    sizes: Counter[int] = field(default_factory=Counter)

    def __iter__(self) -> Again:
        return Again(self)


class Again(Iterator[Any]):
    """Batches under way.

    Attributes:
        starting: How many seconds of the last batch went into starting the processes of a loader that begins anew. A loader
            with ``persistent_workers`` starts none; and where each pass over the data has one batch, it is a part of the data.
    """

    def __init__(self, repeated: Repeated) -> None:
        self.starting = 0.0
        self._repeated = repeated
        self._batches: Iterator[Any] = iter(())
        self._given = 0
        loader = repeated.loader
        self._starts = getattr(loader, "num_workers", 0) > 0 and not getattr(loader, "persistent_workers", False)

    def __next__(self) -> Any:
        begin, ended = now(), object()
        batch = next(self._batches, ended)
        self.starting = 0.0
        if batch is ended:
            several, self._given = self._given > 1, 0
            self._batches = iter(self._repeated.loader)
            batch = first_of(self._batches)
            self.starting = now() - begin if several and self._starts else 0.0
        self._given += 1
        self._repeated.sizes[rows_in(batch)] += 1
        return self._repeated.form(batch)

    def close(self) -> None:
        """Let the loader go, with its processes."""
        self._batches = iter(())


def first_of(loader: Iterable[Any]) -> Any:
    """Return the first batch of a loader.

    Raises:
        ConfigurationError: Where it gives none.
    """
    for batch in loader:
        return batch
    raise ConfigurationError("The loader gives no batch.", "Pass one with items, which can be read again and again.")


def rows_in(batch: Any) -> int:
    """Return how many rows a batch has: the first size of its first tensor that has one.

    Example:
        >>> import torch
        >>> rows_in({"rate": torch.tensor(0.5), "x": torch.ones(4, 2)}), rows_in("no tensor")
        (4, 1)
    """
    return next((int(tensor.shape[0]) for _, tensor in named_tensors(batch) if tensor.dim()), 1)


def check_rows(batch: Any, rows: int, name: str) -> None:
    """Check that a batch has as many rows as it was asked for; one with more, or with none that can be counted, passes.

    Args:
        batch: What a person's function made.
        rows: How many rows it was asked for.
        name: What the function is called.

    Raises:
        ConfigurationError: Where it has fewer: its throughput would be made up. Rows may be the second size too, as in
            models that take the sequence first.
    """
    sizes = [tensor.shape[:2] for _, tensor in named_tensors(batch) if tensor.dim()]
    if sizes and rows_in(batch) < rows and not any(rows in size for size in sizes):
        there = rows_in(batch)
        what = f"{name} made a batch of {there} rows where {rows} were asked for."
        raise ConfigurationError(what, f"Make them of any size, or ask for no more: largest={there}.")


def fresh(batch: Any) -> Any:
    """Return a batch out of which a step may take things: its mappings and lists are copies, its tensors are not.

    Example:
        >>> batch = {"labels": [1]}
        >>> fresh(batch).pop("labels"), batch
        ([1], {'labels': [1]})
    """
    copied = with_tensors(batch, lambda tensor: tensor)
    return copy.copy(copied) if copied is batch and isinstance(batch, (dict, list)) else copied


@contextlib.contextmanager
def generators_kept(data: Any) -> Iterator[None]:
    """Let the random generators of a loader and of its samplers go on after a block from where they were.

    Example:
        >>> import torch
        >>> own = torch.Generator()
        >>> loader = torch.utils.data.DataLoader(torch.ones(3), shuffle=True, generator=own)
        >>> before = own.get_state()
        >>> with generators_kept(loader):
        ...     batches = list(loader)
        >>> torch.equal(own.get_state(), before)
        True
    """
    states = [(generator, generator.get_state()) for generator in generators_of(data)]
    try:
        yield
    finally:
        for generator, state in states:
            generator.set_state(state)


def generators_of(data: Any) -> list[torch.Generator]:
    """Return the random generators from which a loader and its samplers draw; none for anything else."""
    import torch

    if not isinstance(data, torch.utils.data.DataLoader):
        return []
    samplers = [getattr(data, "sampler", None), getattr(data, "batch_sampler", None)]
    holders = [data, *samplers, getattr(samplers[1], "sampler", None)]
    found = [getattr(holder, "generator", None) for holder in holders]
    return [one for one in {id(one): one for one in found}.values() if isinstance(one, torch.Generator)]


LONGEST, FEWEST = 3.0, 5
"""A series of steps ends after so many seconds, where it has so many steps, though more are asked for."""

TORCH_SAYS = re.compile(
    r"(CUDA|HIP|MPS backend) out of memory|Invalid buffer size|\[enforce fail at |could not (create|execute) a (primitive|memory)"
    r"|CUDA error: CUBLAS_STATUS|cuDNN error: CUDNN_STATUS"
)
"""How torch's own messages about a lack of memory begin; ``devices.memory`` names their sources."""


@contextlib.contextmanager
def put_on_devices(
    subject: Subject, devices: Sequence[str], tell: Callable[[str], None] = lambda _device: None
) -> Iterator[dict[str, Bench]]:
    """Put a subject on devices for a block, and hand the memory back after it.

    Args:
        subject: What is measured.
        devices: Where.
        tell: Is told which device is made ready.

    Raises:
        DeviceUnavailable: Where the subject itself does not fit in the memory of a device.
    """
    benches: dict[str, Bench] = {}
    kept = contextlib.ExitStack()
    kept.enter_context(generators_kept(subject.data))
    try:
        for device in devices:
            tell(device)
            with out_of_memory_explained(subject.name, device, "Pass a smaller model, or other devices."):
                benches[device] = subject.on(device)
        yield benches
    finally:
        kept.close()
        benches.clear()
        gc.collect()
        for device in devices:
            empty_cache(device)


@contextlib.contextmanager
def begun(workload: Workload) -> Iterator[Iterator[Any]]:
    """Begin the batches of a workload, and end them after a block, with the processes that read them ahead.

    Raises:
        DeviceUnavailable: Where a batch does not fit in the memory of the device.
    """
    batches, what = workload.batches(), f"A batch of {workload.rows} rows"
    try:
        with out_of_memory_explained(
            what, workload.device, "Pass a smaller batch_size; nb.sweep() finds one that fits."
        ):
            yield batches
    finally:
        getattr(batches, "close", lambda: None)()


@contextlib.contextmanager
def out_of_memory_explained(what: str, device: str, remedy: str) -> Iterator[None]:
    """Say what does not fit in the memory of a device, and what can be done.

    Example:
        >>> with out_of_memory_explained("A batch of 9 rows", "mps", "Pass a smaller batch_size."):
        ...     raise RuntimeError("MPS backend out of memory")
        Traceback (most recent call last):
        ...
        openmed_nb.errors.DeviceUnavailable: A batch of 9 rows does not fit in the memory of mps: \
MPS backend out of memory. Pass a smaller batch_size.
    """
    try:
        yield
    except (RuntimeError, MemoryError) as error:
        if isinstance(error, DeviceUnavailable) or not is_out_of_memory(error):  # Of two devices, one has said it.
            raise
        raise DeviceUnavailable(f"{what} does not fit in the memory of {device}: {said(error)}.", remedy) from error


def said(error: BaseException) -> str:
    """Return what torch says about a lack of memory; of an error of someone else the type, because its text may be anything.

    Example:
        >>> said(RuntimeError("CUDA out of memory. Tried to allocate 2.00 GiB.")), said(MemoryError("a note"))
        ('CUDA out of memory. Tried to allocate 2.00 GiB', 'MemoryError')
    """
    return cause(error) if isinstance(error, RuntimeError) and TORCH_SAYS.match(str(error)) else type(error).__name__


@contextlib.contextmanager
def same_random_numbers(device: str) -> Iterator[None]:
    """Let the random numbers of the host and of a device go on afterwards as if nothing had been computed."""
    with random_numbers_kept(), random_numbers_from(random_states(device)):
        yield


def drop_ready(workload: Workload, batches: Iterator[Any]) -> None:
    """Take what a loader that reads ahead holds ready."""
    for _ in range(workload.ahead):
        next(batches)


def settle(workload: Workload, batches: Iterator[Any]) -> None:
    """Bring a loader that reads ahead to where it is in a long run, after a pause in which it has filled up.

    What it holds ready is taken and not computed: after as many steps, a loader that is a little slower than the device
    would still hold some, and the steps that follow would not wait as they do in a long run. Then each worker gives a batch.
    """
    drop_ready(workload, batches)
    for _ in range(workload.workers):
        workload.run(next(batches))


def whole_rounds(steps: int, workers: int) -> int:
    """Return a number of steps, or some more, in which each worker of a loader gives as many batches as the others.

    Example:
        >>> whole_rounds(10, 4), whole_rounds(10, 0), whole_rounds(1, 2)
        (12, 10, 2)
    """
    return steps + -steps % max(1, workers)


def seconds_of_step(workload: Workload, batches: Iterator[Any], steps: int = 1) -> float:
    """Return how long a step takes at full speed, its data included, in seconds: the mean of some in a row."""
    finish(workload.torch_device)
    begin, apart = now(), 0.0
    for _ in range(steps):
        batch = next(batches)
        apart += starting(batches)
        workload.run(batch)
    return (now() - begin - apart) / steps


def series(measure: Callable[[], Any], steps: int, fewest: int = FEWEST) -> list[Any]:
    """Return what some steps measure; slow ones are cut short after some seconds, and so many are there in any case."""
    begin, measured = now(), []
    for number in range(steps):
        if number >= fewest and now() - begin > LONGEST:
            break
        measured.append(measure())
    return measured


def split_of_steps(workload: Workload, batches: Iterator[Any], steps: int, fewest: int = 0) -> Split:
    """Return where the time of some steps goes."""
    measured = series(lambda: workload.seconds_of_phases(batches), steps, max(FEWEST, fewest))
    return split_of(measured, workload.typical)
