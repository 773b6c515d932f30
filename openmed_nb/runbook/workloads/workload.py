"""A step of work, in phases, over batches, on a device: what a sweep, a comparison and a profile measure.

A step takes a batch from an iterator, which is the phase "data", and hands it from phase to phase. Run at full speed, nothing is waited
for before its end; run in phases, the device is waited for after each, so that times say where they belong.
"""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

from ...devices.backend import TENSOR_LOCK, finish
from .clock import now

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
