"""Texts in columns of ``dask.dataframe``, which workers read one partition at a time."""

from __future__ import annotations

import socket
import sys
import uuid
from array import array
from bisect import bisect_right
from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import accumulate
from typing import TYPE_CHECKING, Any

from ..annotation.references import (
    TextReference,
    check_iterable,
    describe_read_error,
    expand_globs,
    raise_if_error,
    resolve_paths,
    text_fingerprint,
)
from ..errors import ConfigurationError
from .client import cancel, fetch_result, submit, translate_dask_errors, translate_killed_worker, wait_for_workers

if TYPE_CHECKING:
    import pandas as pd
    from dask.dataframe import Series
    from distributed import Client


# Each partition is computed separately. Its tasks must therefore sort and join rows without files and other workers.
TASK_SHUFFLE = {"dataframe.shuffle.method": "tasks"}


@dataclass(frozen=True, repr=False)
class Partition:
    """Partition of a column with the tasks that compute it.

    Attributes:
        name: Unique identifier. Partitions with the same name are equal.
        key: Key of the rows in the graph.
        graph: Tasks that compute the rows.
    """

    name: str
    key: Hashable = field(compare=False)
    graph: Mapping[Hashable, object] = field(compare=False)


class RowChangedError(Exception):
    """The text of a row changed after the rows were counted."""


@dataclass(frozen=True, repr=False, eq=False)  # An index label can be the name of a patient.
class PartitionSize:
    """Size of a partition.

    Attributes:
        approximate_length: Mean number of characters per row.
        fingerprints: Fingerprint of each text.
        index: Index of the rows.
    """

    approximate_length: int
    fingerprints: array[int]
    index: pd.Index

    @property
    def rows(self) -> int:
        return len(self.fingerprints)


@dataclass(frozen=True, repr=False)
class ColumnText(TextReference):
    """Reference to a text in a column.

    Attributes:
        partition: Partition of the text.
        row: Index of the row in the partition.
        approximate_length: Mean number of characters per row of the partition.
        text_fingerprint: Fingerprint of the text, which does not depend on other rows.
    """

    kind = "row"
    partition: Partition
    row: int
    approximate_length: int
    text_fingerprint: int

    @property
    def identity(self) -> str:
        """Fingerprint of the text as a string, which is the same in every process."""
        return f"{self.text_fingerprint:016x}"

    def fingerprint(self) -> int:
        """Return the fingerprint of the text, which equals that of the text in memory."""
        return self.text_fingerprint

    def read(self) -> Any:
        """Return the text, or ``None`` if the row is empty."""
        text = _read_partition(self.partition)[0][self.row]
        if text_fingerprint(text) != self.text_fingerprint:
            raise RowChangedError
        return text


@dataclass(frozen=True, repr=False)
class ColumnTexts(Sequence[ColumnText]):
    """References to all texts of a column. The texts are not stored."""

    partitions: tuple[Partition, ...]
    sizes: tuple[PartitionSize, ...]

    def __len__(self) -> int:
        return sum(size.rows for size in self.sizes)

    def __iter__(self) -> Iterator[ColumnText]:
        for partition_index, size in enumerate(self.sizes):
            yield from (self._reference(partition_index, row) for row in range(size.rows))

    def __getitem__(self, index: Any) -> Any:
        position = range(len(self))[index]
        ends = list(accumulate(size.rows for size in self.sizes))
        partition_index = bisect_right(ends, position)
        start = ends[partition_index] - self.sizes[partition_index].rows
        return self._reference(partition_index, position - start)

    def _reference(self, partition_index: int, row: int) -> ColumnText:
        size = self.sizes[partition_index]
        return ColumnText(self.partitions[partition_index], row, size.approximate_length, size.fingerprints[row])

    @property
    def row_index(self) -> pd.Index:
        """Index of all rows, concatenated from the partitions on each access."""
        first, *others = (size.index for size in self.sizes)
        return first.append(others)


@lru_cache(maxsize=2)  # A chunk can extend over two adjacent partitions.
def _read_partition(partition: Partition) -> tuple[list[str | None], pd.Index]:
    """Compute a partition in this process, and return its texts and its index. Missing texts are ``None``."""
    import dask

    series = dask.get(partition.graph, partition.key)
    texts = zip(series.tolist(), series.isna().tolist(), strict=True)
    return [None if missing else text for text, missing in texts], series.index


def to_references(texts: Any, client: Client | None = None) -> Any:
    """Return references to the texts of a column, or to files for a path or a list of paths. Return other texts unchanged.

    Raises an error if they are not an iterable of texts.

    Args:
        texts: Texts to annotate.
        client: Client whose workers count rows and search files. If ``None``, this process does.
    """
    is_dask = type(texts).__module__.startswith("dask.")
    if is_dask and hasattr(type(texts), "to_frame") and texts.ndim == 1:
        return column_references(texts, client)
    if client is None:
        references = resolve_paths(texts, expand_globs)
    else:
        with translate_killed_worker():
            references = resolve_paths(texts, lambda paths: fetch_result(client, submit(client, expand_globs, paths)))
    check_iterable(references)
    return references


def column_references(column: Series, client: Client | None = None) -> ColumnTexts:
    """Return references to the texts of a column. The rows are counted to number the texts."""
    partitions = raise_if_error(get_partitions(column))
    if client is None:
        sizes = [_partition_size(partition) for partition in partitions]
    else:
        with translate_dask_errors(client):
            futures = client.map(_partition_size, partitions, pure=False)
        try:
            with translate_killed_worker():
                sizes = wait_for_workers(client, lambda: client.gather(futures))
        finally:
            cancel(client, futures)
    return ColumnTexts(partitions, tuple(raise_if_error(size) for size in sizes))


def get_partitions(column: Series) -> tuple[Partition, ...] | ConfigurationError:
    """Return the partitions of a column with their tasks, or the error if the column cannot be read."""
    import dask
    from dask.optimization import cull

    try:
        with dask.config.set(TASK_SHUFFLE):
            # ``simplify()`` removes unused columns. ``optimize()`` would also merge partitions, so that a new file at the end
            # could change the previous partitions.
            plan = column.simplify()
            graph = dict(plan.__dask_graph__())
            keys = plan.__dask_keys__()
    except Exception as error:  # noqa: BLE001 - file readers can raise any exception
        return _column_error(error)
    if "distributed" in sys.modules:  # Without this module, a column cannot be in the memory of a cluster.
        from distributed import futures_of

        if futures_of(graph):
            return ConfigurationError("The column is in the memory of a cluster.", "Pass the column without persist().")
    return tuple(Partition(uuid.uuid4().hex, key, cull(graph, [key])[0]) for key in keys)


def _partition_size(partition: Partition) -> PartitionSize | ConfigurationError:
    try:
        texts, index = _read_partition(partition)
    except Exception as error:  # noqa: BLE001 - file readers can raise any exception
        return _column_error(error)
    approximate_length = sum(len(text) for text in texts if isinstance(text, str))
    return PartitionSize(approximate_length // max(1, len(texts)), array("Q", map(text_fingerprint, texts)), index)


def _column_error(error: Exception) -> ConfigurationError:
    """Return the error for an unreadable column. It contains the type of the reader's error but not the message."""
    return ConfigurationError(
        f"The column cannot be read on {socket.gethostname()}: {describe_read_error(error)}.",
        "Check that its files exist on every machine, and check the operations on it.",
    )
