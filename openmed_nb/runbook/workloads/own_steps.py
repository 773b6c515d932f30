"""A function of a person's own that does a step with a batch, as something that is measured."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from ...errors import ConfigurationError
from ...training.epochs import named
from .batches import Repeated, check_rows, first_of, fresh, generators_kept, rows_in
from .modules import example_of, row_shape_of
from .workload import OWN_STEP, STEP, Phase, Subject, Workload, read_ahead

BatchesOfSize = Callable[[int], Any]
"""Makes a batch of so many rows."""


@dataclass(frozen=True)
class OwnBench:
    """A function and its batches.

    Attributes:
        name: The name of the function.
        step: Does a step with a batch as the loader gives it.
        data: A loader, or a function that makes a batch of a size.
        device: Where the function computes; it alone decides that, so this is what is said of it.
    """

    name: str
    step: Callable[[Any], Any]
    data: Iterable[Any] | BatchesOfSize
    device: str

    def bucket(self, rows: int) -> Workload:
        """Return steps over one batch that lies ready.

        Raises:
            ConfigurationError: Where nothing makes a batch of a size, or one with fewer rows.
        """
        if not callable(self.data):
            what = f"No batch of {rows} rows can be made for {self.name}."
            raise ConfigurationError(what, "Pass a function that takes a number of rows and returns a batch.")
        batch = self.data(rows)
        check_rows(batch, rows, named(self.data))
        return self._workload(rows, Repeated([batch]), batch)

    def stream(self, rows: int | None = None) -> Workload:
        """Return steps over the batches of the loader."""
        if callable(self.data):
            return self.bucket(rows or 1)
        with generators_kept(self.data):
            first = first_of(self.data)
        return self._workload(rows_in(first), Repeated(self.data), first)

    def _workload(self, rows: int, batches: Repeated, first: Any) -> Workload:
        workers, ahead = read_ahead(self.data)
        return Workload(
            self.name,
            OWN_STEP,
            self.device,
            rows,
            None,
            lambda: iter(batches),
            (Phase(STEP, lambda batch: self.step(fresh(batch))),),
            workers,
            ahead=ahead,
            sizes=Counter() if callable(self.data) else batches.sizes,
            row_shape=row_shape_of(example_of(first)),
        )


def subject_of_step(step: Callable[[Any], Any], data: Any) -> Subject:
    """Return a function that does a step, with its batches; it is measured as it is, and changes what it changes.

    Raises:
        ConfigurationError: Without batches, and for such as would be used up.
    """
    import torch

    name = named(step)
    if isinstance(data, (torch.Tensor, Mapping, str)):
        raise ConfigurationError(
            f"{type(data).__name__} is one batch for {name}, and no series of them.", "Pass [batch]."
        )
    if isinstance(data, Iterator) or not (callable(data) or isinstance(data, Iterable)):
        what = f"{type(data).__name__} gives {name} no batches again and again."
        raise ConfigurationError(
            what, "Pass a DataLoader, a list of batches, or a function that makes a batch of a size."
        )
    return Subject(name, OWN_STEP, lambda device: OwnBench(name, step, data, device), data)
