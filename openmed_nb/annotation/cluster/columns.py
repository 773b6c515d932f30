"""Columns of ``dask.dataframe``: their rows are read on the workers, a partition at a time."""

from __future__ import annotations

import functools
import socket
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import TYPE_CHECKING, Any

from ...errors import ConfigurationError
from ..references import Reference, reason, unless_failed
from .calls import call_off, patiently, told_as_lost
from .clients import killed

if TYPE_CHECKING:
    from distributed import Client

KEPT = 2
"""How many partitions a worker keeps: that of its last chunk, and that of the one beside it."""


@dataclass(frozen=True, repr=False)
class Row(Reference):
    """A text in a column.

    Attributes:
        partition: The partition of the column that it is in, as something to be computed.
        row: Its place there.
        characters: How many characters the rows of the partition have, on average.
    """

    kind = "row"
    partition: Partition
    row: int
    characters: int

    @property
    def identity(self) -> str:  # type: ignore[override]
        """The name that Dask gives the partition, which changes with its file and its operations, and the row."""
        return f"{self.partition.name}\0{self.row}"

    def text(self) -> Any:
        """Return the text, ``None`` where the row is empty."""
        return texts_of(self.partition)[self.row]


@dataclass(frozen=True, repr=False)
class Partition:
    """A part of a column.

    Attributes:
        name: What tells it from others.
        column: The column of one partition.
    """

    name: str
    column: Any

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Partition) and other.name == self.name

    def __hash__(self) -> int:
        return hash(self.name)


@functools.lru_cache(maxsize=KEPT)
def texts_of(partition: Partition) -> list[Any]:
    """Return the rows of a partition, read in this process; what is missing is ``None``."""
    found = partition.column.compute(scheduler="synchronous")
    return [None if missing else text for text, missing in zip(found.tolist(), found.isna().tolist(), strict=True)]


@dataclass(frozen=True, repr=False)
class Rows(Sequence[Row]):
    """All rows of a column.

    Attributes:
        partitions: Its partitions.
        counts: How many rows each has.
        characters: How many characters a row of each has, on average.
    """

    partitions: tuple[Partition, ...]
    counts: tuple[int, ...]
    characters: tuple[int, ...]

    def __len__(self) -> int:
        return sum(self.counts)

    def __iter__(self) -> Iterator[Row]:
        for partition, count, characters in zip(self.partitions, self.counts, self.characters, strict=True):
            yield from (Row(partition, row, characters) for row in range(count))

    def __getitem__(self, number: Any) -> Any:
        place = range(len(self))[number]
        lasts = accumulate(self.counts)
        which, last = next((which, last) for which, last in enumerate(lasts) if place < last)
        return Row(self.partitions[which], place - last + self.counts[which], self.characters[which])


@dataclass(frozen=True)
class Size:
    """How much a partition has.

    Attributes:
        rows: How many rows.
        characters: How many characters a row has on average.
    """

    rows: int
    characters: int


def is_column(texts: Any) -> bool:
    """Tell whether something is a column of ``dask.dataframe``.

    Example:
        >>> is_column(["asthma"])
        False
    """
    return type(texts).__module__.startswith("dask.") and hasattr(type(texts), "to_frame") and texts.ndim == 1


def rows_of(column: Any, count: Callable[[Sequence[Partition]], Iterable[Size | ConfigurationError]]) -> Rows:
    """Return the rows of a column, which are counted first, so that the number of a text is known.

    Args:
        column: The column.
        count: Calls :func:`size_of` with each partition, where they are read.

    Raises:
        ConfigurationError: Where the column cannot be read.
    """
    parts = (column.partitions[number] for number in range(column.npartitions))
    partitions = tuple(Partition(part._name, part) for part in parts)  # noqa: SLF001 - the one name that Dask has for it
    sizes = [unless_failed(size) for size in count(partitions)]
    return Rows(partitions, tuple(size.rows for size in sizes), tuple(size.characters for size in sizes))


def counted_here(partitions: Sequence[Partition]) -> Iterator[Size | ConfigurationError]:
    """Yield the sizes of partitions that are read in this process, one after the other."""
    return map(size_of, partitions)


def counted_by(client: Client, partitions: Sequence[Partition]) -> list[Size | ConfigurationError]:
    """Return the sizes of partitions that the workers of a cluster read.

    Raises:
        ClusterError: Where one ends the workers that read it, and where there is none.
    """
    from distributed import KilledWorker

    with told_as_lost(client):
        futures = client.map(size_of, partitions, pure=False)
    try:
        sizes: list[Size | ConfigurationError] = patiently(client, lambda: client.gather(futures))
    except KilledWorker as error:
        raise killed(error) from None
    finally:
        call_off(client, futures)
    return sizes


def size_of(partition: Partition) -> Size | ConfigurationError:
    """Return the size of a partition, or why it cannot be read: of what its reader raises only the kind, and no word."""
    try:
        texts = texts_of(partition)
    except Exception as error:  # noqa: BLE001 - whatever a reader of files raises
        what = f"The column cannot be read on {socket.gethostname()}: {reason(error)}."
        return ConfigurationError(what, "Check that its files are there on every computer, and what was done to it.")
    characters = sum(len(text) for text in texts if isinstance(text, str))
    return Size(len(texts), characters // max(1, len(texts)))
