"""Batches of a person's data, again and again, with nothing of the person's changed by it."""

from __future__ import annotations

import contextlib
import copy
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from ...errors import ConfigurationError
from ...training.nested import named_tensors, with_tensors
from .clock import now

if TYPE_CHECKING:
    import torch


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
