"""Columns of ``dask.dataframe``: their rows are read on the workers, a partition at a time."""

from __future__ import annotations

import functools
import hashlib
import socket
import sys
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import TYPE_CHECKING, Any

from ..annotation.fingerprints import fingerprint_of
from ..annotation.references import Reference, located, reason, unless_failed
from ..errors import ConfigurationError
from .client import call_off, killed, patiently, told_as_lost

if TYPE_CHECKING:
    from distributed import Client


KEPT = 2
"""How many partitions a worker keeps: that of its last chunk, and that of the one beside it."""

IN_TASKS = {"dataframe.shuffle.method": "tasks"}
"""How rows are sorted and joined in a partition that is computed alone: by what its own tasks hand on, through no files and
no exchange between workers."""


@dataclass(frozen=True, repr=False)
class Row(Reference):
    """A text in a column.

    Attributes:
        partition: The partition of the column that it is in, as something to be computed.
        row: Its place there.
        characters: How many characters the rows of the partition have, on average.
        digest: What tells the texts of the partition from those of others.
    """

    kind = "row"
    partition: Partition
    row: int
    characters: int
    digest: str

    @property
    def identity(self) -> str:
        """The texts of its partition, and its place there; a column that is made again in another process has the same."""
        return f"{self.digest}\0{self.row}"

    def text(self) -> Any:
        """Return the text, ``None`` where the row is empty."""
        return texts_of(self.partition)[self.row]


@dataclass(frozen=True, repr=False)
class Partition:
    """A part of a column.

    Attributes:
        name: What tells it from all others of a run, and of other runs.
        key: What Dask calls its rows in the graph.
        graph: What computes them, and nothing of other partitions.
    """

    name: str
    key: Any = field(compare=False)
    graph: Mapping[Any, Any] = field(compare=False)


@functools.lru_cache(maxsize=KEPT)
def texts_of(partition: Partition) -> list[Any]:
    """Return the rows of a partition, read in this process; what is missing is ``None``."""
    import dask

    found = dask.get(partition.graph, partition.key)
    return [None if missing else text for text, missing in zip(found.tolist(), found.isna().tolist(), strict=True)]


@dataclass(frozen=True)
class Size:
    """How much a partition has.

    Attributes:
        rows: How many rows.
        characters: How many characters a row has on average.
        digest: What tells its texts from those of others.
    """

    rows: int
    characters: int
    digest: str


@dataclass(frozen=True, repr=False)
class Rows(Sequence[Row]):
    """All rows of a column.

    Attributes:
        partitions: Its partitions.
        sizes: How much each has.
    """

    partitions: tuple[Partition, ...]
    sizes: tuple[Size, ...]

    def __len__(self) -> int:
        return sum(size.rows for size in self.sizes)

    def __iter__(self) -> Iterator[Row]:
        for which, size in enumerate(self.sizes):
            yield from (self.row(which, place) for place in range(size.rows))

    def __getitem__(self, number: Any) -> Any:
        place = range(len(self))[number]
        lasts = accumulate(size.rows for size in self.sizes)
        which, last = next((which, last) for which, last in enumerate(lasts) if place < last)
        return self.row(which, place - last + self.sizes[which].rows)

    def row(self, which: int, place: int) -> Row:
        """Return the row at a place of a partition."""
        size = self.sizes[which]
        return Row(self.partitions[which], place, size.characters, size.digest)


def is_column(texts: Any) -> bool:
    """Tell whether something is a column of ``dask.dataframe``.

    Example:
        >>> is_column(["asthma"])
        False
    """
    return type(texts).__module__.startswith("dask.") and hasattr(type(texts), "to_frame") and texts.ndim == 1


def referred(
    texts: Any,
    count: Callable[[Sequence[Partition]], Iterable[Size | ConfigurationError]],
    ask: Callable[..., Any],
) -> Any:
    """Return references to the texts of a column, or of the files of a path or a list of them; anything else as it is.

    Args:
        texts: What was passed as texts.
        count: Calls :func:`size_of` with each partition of a column, where they are read.
        ask: Calls a function where files are.

    Raises:
        ConfigurationError: Where a column cannot be read, or a path stands for no file.
    """
    return rows_of(texts, count) if is_column(texts) else located(texts, ask)


def rows_of(column: Any, count: Callable[[Sequence[Partition]], Iterable[Size | ConfigurationError]]) -> Rows:
    """Return the rows of a column, which are counted first, so that the number of a text is known.

    Args:
        column: The column.
        count: Calls :func:`size_of` with each partition, where they are read.

    Raises:
        ConfigurationError: Where the column cannot be read, or is in the memory of a cluster.
    """
    partitions = unless_failed(partitions_of(column))
    return Rows(partitions, tuple(unless_failed(size) for size in count(partitions)))


def partitions_of(column: Any) -> tuple[Partition, ...] | ConfigurationError:
    """Return the partitions of a column, each with what it needs itself, or why there are none.

    Dask leaves out columns that are not needed, but does not join partitions, as its ``optimize()`` would: rows that are
    added at the end in a file of their own leave those before as they are.
    """
    import dask
    from dask.optimization import cull

    try:
        with dask.config.set(IN_TASKS):
            plan = column.simplify()
            graph, keys = dict(plan.__dask_graph__()), plan.__dask_keys__()
    except Exception as error:  # noqa: BLE001 - whatever a reader of files raises
        return unreadable(error)
    if has_futures(graph):
        return ConfigurationError("The column is in the memory of a cluster.", "Pass it as it was before persist().")
    return tuple(Partition(uuid.uuid4().hex, key, cull(graph, [key])[0]) for key in keys)


def has_futures(graph: Mapping[Any, Any]) -> bool:
    """Tell whether some of a graph was computed by a cluster and is held there; only who has a client can have that."""
    if "distributed" not in sys.modules:
        return False
    from distributed import futures_of

    return bool(futures_of(graph))


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
    """Return the size of a partition, or why it cannot be read."""
    try:
        texts = texts_of(partition)
    except Exception as error:  # noqa: BLE001 - whatever a reader of files raises
        return unreadable(error)
    characters = sum(len(text) for text in texts if isinstance(text, str))
    return Size(len(texts), characters // max(1, len(texts)), digest_of(texts))


def digest_of(texts: Sequence[Any]) -> str:
    """Return a short text that tells a series of texts from others.

    Example:
        >>> digest_of(["no", "asthma"]) == digest_of(["no asthma"])
        False
    """
    digest = hashlib.blake2b(digest_size=16)
    for text in texts:
        digest.update(fingerprint_of(text).to_bytes(8, "big"))
    return digest.hexdigest()


def unreadable(error: Exception) -> ConfigurationError:
    """Return why a column cannot be read: of what its reader raises only the kind, and no word."""
    what = f"The column cannot be read on {socket.gethostname()}: {reason(error)}."
    return ConfigurationError(what, "Check that its files are there on every computer, and what was done to it.")
