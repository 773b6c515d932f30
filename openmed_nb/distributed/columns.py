"""Columns of ``dask.dataframe``: workers read their rows, a partition at a time."""

from __future__ import annotations

import socket
import sys
import uuid
from array import array
from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import accumulate
from typing import TYPE_CHECKING, Any

from ..annotation.references import (
    TextReference,
    describe_read_error,
    expand_globs,
    raise_if_error,
    resolve_paths,
    text_fingerprint,
)
from ..errors import ConfigurationError
from .client import cancel, fetch_result, submit, translate_dask_errors, translate_killed_worker, wait_for_workers

if TYPE_CHECKING:
    from distributed import Client


# A partition is computed alone, so its rows are sorted and joined by its own tasks, without files or other workers.
IN_TASKS = {"dataframe.shuffle.method": "tasks"}


@dataclass(frozen=True, repr=False)
class Partition:
    name: str  # Its identifier; partitions with the same one are equal.
    key: Any = field(compare=False)  # The name of its rows in the graph.
    graph: Mapping[Any, Any] = field(compare=False)  # The tasks that compute them, and no others.


class RowChanged(Exception):
    """A row has another text than when the rows were counted."""


@dataclass(frozen=True, repr=False, eq=False)  # A label can be the name of a patient.
class PartitionSize:
    """How many characters a row of a partition has on average, and of each row the fingerprint and the label of its index."""

    characters: int
    fingerprints: array[int]
    index: Any  # A pandas Index.

    @property
    def rows(self) -> int:
        return len(self.fingerprints)


@dataclass(frozen=True, repr=False)
class ColumnText(TextReference):
    """A text in a column: its partition and its row there, with the average length of that partition."""

    kind = "row"
    partition: Partition
    row: int
    characters: int
    of_text: int  # the fingerprint of the text itself, so that a changed row changes no other

    @property
    def identity(self) -> str:
        """The fingerprint of its text, which is the same for the same column in another process."""
        return f"{self.of_text:016x}"

    def fingerprint(self) -> int:
        """Return the fingerprint of its text, as for a text at hand."""
        return self.of_text

    def read(self) -> Any:
        """Return the text, ``None`` where the row is empty."""
        text = rows_of(self.partition)[0][self.row]
        if text_fingerprint(text) != self.of_text:
            raise RowChanged
        return text


@dataclass(frozen=True, repr=False)
class ColumnTexts(Sequence[ColumnText]):
    """References to all texts of a column; no text is held."""

    partitions: tuple[Partition, ...]
    sizes: tuple[PartitionSize, ...]

    def __len__(self) -> int:
        return sum(size.rows for size in self.sizes)

    def __iter__(self) -> Iterator[ColumnText]:
        for which, size in enumerate(self.sizes):
            yield from (self.at(which, row) for row in range(size.rows))

    def __getitem__(self, number: Any) -> Any:
        place = range(len(self))[number]
        ends = list(accumulate(size.rows for size in self.sizes))
        which = bisect_right(ends, place)
        return self.at(which, place - ends[which] + self.sizes[which].rows)

    def at(self, which: int, row: int) -> ColumnText:
        size = self.sizes[which]
        return ColumnText(self.partitions[which], row, size.characters, size.fingerprints[row])

    @property
    def row_index(self) -> Any:
        """The index of all rows, as pandas has it; it is made from those of the partitions where it is asked for."""
        first, *others = (size.index for size in self.sizes)
        return first.append(others)


@lru_cache(maxsize=2)  # A worker keeps the partition of its last chunk, and the one next to it.
def rows_of(partition: Partition) -> tuple[list[Any], Any]:
    """Read the rows of a partition in this process, and return their texts, missing ones as ``None``, and their index."""
    import dask

    found = dask.get(partition.graph, partition.key)
    texts = zip(found.tolist(), found.isna().tolist(), strict=True)
    return [None if missing else text for text, missing in texts], found.index


def is_column(texts: Any) -> bool:
    return type(texts).__module__.startswith("dask.") and hasattr(type(texts), "to_frame") and texts.ndim == 1


def to_references(texts: Any, client: Client | None = None) -> Any:
    """Return references to the texts of a column, or to files for a path or a list of paths; anything else as it is.

    Rows are counted and files searched here, or by the workers of a client.
    """
    if is_column(texts):
        return column_references(texts, client)
    if client is None:
        return resolve_paths(texts, expand_globs)
    with translate_killed_worker():
        return resolve_paths(texts, lambda paths: fetch_result(client, submit(client, expand_globs, paths)))


def column_references(column: Any, client: Client | None = None) -> ColumnTexts:
    """Return the texts of a column; their rows are counted first, so that texts have numbers."""
    partitions = raise_if_error(get_partitions(column))
    sizes = map(partition_size, partitions) if client is None else measure_partitions(client, partitions)
    return ColumnTexts(partitions, tuple(raise_if_error(size) for size in sizes))


def get_partitions(column: Any) -> tuple[Partition, ...] | ConfigurationError:
    """Return the partitions of a column, each with its own tasks, or why the column cannot be read."""
    import dask
    from dask.optimization import cull

    try:
        with dask.config.set(IN_TASKS):
            # This leaves out columns that are not needed; ``optimize()`` would also join partitions, and a new file at the
            # end would then change the ones before.
            plan = column.simplify()
            graph, keys = dict(plan.__dask_graph__()), plan.__dask_keys__()
    except Exception as error:  # noqa: BLE001 - whatever a reader of files raises
        return column_error(error)
    if "distributed" in sys.modules:  # Without it, no cluster can hold results.
        from distributed import futures_of

        if futures_of(graph):
            what = "The column is in the memory of a cluster."
            return ConfigurationError(what, "Pass it as it was before persist().")
    return tuple(Partition(uuid.uuid4().hex, key, cull(graph, [key])[0]) for key in keys)


def measure_partitions(client: Client, partitions: Sequence[Partition]) -> list[PartitionSize | ConfigurationError]:
    """Let the workers of a cluster read partitions, and return their sizes."""
    with translate_dask_errors(client):
        futures = client.map(partition_size, partitions, pure=False)
    try:
        with translate_killed_worker():
            return list(wait_for_workers(client, lambda: client.gather(futures)))
    finally:
        cancel(client, futures)


def partition_size(partition: Partition) -> PartitionSize | ConfigurationError:
    try:
        texts, index = rows_of(partition)
    except Exception as error:  # noqa: BLE001 - whatever a reader of files raises
        return column_error(error)
    characters = sum(len(text) for text in texts if isinstance(text, str))
    return PartitionSize(characters // max(1, len(texts)), array("Q", map(text_fingerprint, texts)), index)


def column_error(error: Exception) -> ConfigurationError:
    """Return why a column cannot be read: the kind of its reader's error, without its message."""
    what = f"The column cannot be read on {socket.gethostname()}: {describe_read_error(error)}."
    return ConfigurationError(what, "Check that its files are there on every computer, and what was done to it.")
