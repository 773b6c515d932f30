"""Columns of ``dask.dataframe``: their rows are read on the workers, a partition at a time."""

from __future__ import annotations

import hashlib
import socket
import sys
import uuid
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import accumulate
from typing import TYPE_CHECKING, Any

from ..annotation.references import Reference, files_matching, located, reason, unless_failed
from ..annotation.resume import fingerprint_of
from ..errors import ConfigurationError
from .client import ask_workers, cancel, compute, killed_as_cluster_error, lost_as_unusable, submit

if TYPE_CHECKING:
    from distributed import Client


IN_TASKS = {"dataframe.shuffle.method": "tasks"}
# How rows are sorted and joined in a partition that is computed alone: by what its own tasks hand on, through no files and
# no exchange between workers.


@dataclass(frozen=True, repr=False)
class Partition:
    name: str  # Tells it from all others of a run, and of other runs.
    key: Any = field(compare=False)  # What Dask calls its rows in the graph.
    graph: Mapping[Any, Any] = field(compare=False)  # What computes them, and nothing of other partitions.


@dataclass(frozen=True)
class PartitionSize:
    """How many rows a partition has, how many characters a row has on average, and what tells its texts from others."""

    rows: int
    characters: int
    digest: str


@dataclass(frozen=True, repr=False)
class ColumnText(Reference):
    """A text in a column: its partition, its place there, and what is known of the texts of that partition."""

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
class ColumnTexts(Sequence[ColumnText]):
    """All texts of a column, without holding any of them."""

    partitions: tuple[Partition, ...]
    sizes: tuple[PartitionSize, ...]

    def __len__(self) -> int:
        return sum(size.rows for size in self.sizes)

    def __iter__(self) -> Iterator[ColumnText]:
        for which, size in enumerate(self.sizes):
            yield from (self.at(which, row) for row in range(size.rows))

    def __getitem__(self, number: Any) -> Any:
        place = range(len(self))[number]
        ends = accumulate(size.rows for size in self.sizes)
        which, end = next((which, end) for which, end in enumerate(ends) if place < end)
        return self.at(which, place - end + self.sizes[which].rows)

    def at(self, which: int, row: int) -> ColumnText:
        size = self.sizes[which]
        return ColumnText(self.partitions[which], row, size.characters, size.digest)


@lru_cache(maxsize=2)  # A worker keeps the partition of its last chunk, and the one next to it.
def texts_of(partition: Partition) -> list[Any]:
    """Return the rows of a partition, read in this process; what is missing is ``None``."""
    import dask

    found = dask.get(partition.graph, partition.key)
    return [None if missing else text for text, missing in zip(found.tolist(), found.isna().tolist(), strict=True)]


def is_column(texts: Any) -> bool:
    return type(texts).__module__.startswith("dask.") and hasattr(type(texts), "to_frame") and texts.ndim == 1


def referred(texts: Any, client: Client | None = None) -> Any:
    """Return references to the texts of a column, or of the files of a path or a list of them; anything else as it is.

    They are counted and looked for here, or by the workers of a client.
    """
    if is_column(texts):
        return texts_of_column(texts, client)
    if client is None:
        return located(texts, files_matching)
    with killed_as_cluster_error():
        return located(texts, lambda paths: compute(client, submit(client, files_matching, paths)))


def texts_of_column(column: Any, client: Client | None = None) -> ColumnTexts:
    """Return the texts of a column, which are counted first, so that the number of a text is known."""
    partitions = unless_failed(partitions_of(column))
    sizes = map(size_of, partitions) if client is None else counted_by(client, partitions)
    return ColumnTexts(partitions, tuple(unless_failed(size) for size in sizes))


def partitions_of(column: Any) -> tuple[Partition, ...] | ConfigurationError:
    """Return the partitions of a column, each with what it needs itself, or why it cannot be read."""
    import dask
    from dask.optimization import cull

    try:
        with dask.config.set(IN_TASKS):
            # Columns that are not needed are left out, but partitions are not joined, as ``optimize()`` would: rows that
            # are added at the end in a file of their own leave those before as they are.
            plan = column.simplify()
            graph, keys = dict(plan.__dask_graph__()), plan.__dask_keys__()
    except Exception as error:  # noqa: BLE001 - whatever a reader of files raises
        return unreadable(error)
    if "distributed" in sys.modules:  # Without it there is no client, and nothing that a cluster computed and holds.
        from distributed import futures_of

        if futures_of(graph):
            what = "The column is in the memory of a cluster."
            return ConfigurationError(what, "Pass it as it was before persist().")
    return tuple(Partition(uuid.uuid4().hex, key, cull(graph, [key])[0]) for key in keys)


def counted_by(client: Client, partitions: Sequence[Partition]) -> list[PartitionSize | ConfigurationError]:
    """Return the sizes of partitions that the workers of a cluster read."""
    with lost_as_unusable(client):
        futures = client.map(size_of, partitions, pure=False)
    try:
        with killed_as_cluster_error():
            return list(ask_workers(client, lambda: client.gather(futures)))
    finally:
        cancel(client, futures)


def size_of(partition: Partition) -> PartitionSize | ConfigurationError:
    try:
        texts = texts_of(partition)
    except Exception as error:  # noqa: BLE001 - whatever a reader of files raises
        return unreadable(error)
    characters = sum(len(text) for text in texts if isinstance(text, str))
    return PartitionSize(len(texts), characters // max(1, len(texts)), digest_of(texts))


def digest_of(texts: Sequence[Any]) -> str:
    digest = hashlib.blake2b(digest_size=16)
    for text in texts:
        digest.update(fingerprint_of(text).to_bytes(8, "big"))
    return digest.hexdigest()


def unreadable(error: Exception) -> ConfigurationError:
    """Return why a column cannot be read: of what its reader raises only the kind, and no word."""
    what = f"The column cannot be read on {socket.gethostname()}: {reason(error)}."
    return ConfigurationError(what, "Check that its files are there on every computer, and what was done to it.")
