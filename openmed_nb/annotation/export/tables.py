"""Tables with one row per entity: Parquet and CSV. They do not contain the texts of the notes."""

from __future__ import annotations

import contextlib
import csv
import io
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ...errors import ConfigurationError
from ..gold import TABLE_REMEDY, GoldTexts, gold_from_columns
from ..inputs import NOTE_COLUMN
from .notes import INVALID_UNICODE_REMEDY, InvalidNoteError, Saveable, import_library, read_utf8

if TYPE_CHECKING:
    import pandas as pd
    import pyarrow as pa

MAX_CELL_CHARACTERS = 2**31 - 1  # Maximum that every platform supports.


def save_csv(path: Path, found: Saveable) -> None:
    """Write the entities to a CSV file."""
    # The csv module quotes the characters of the line terminator only, and words may contain both.
    found.to_frame_with_ids().to_csv(path, index=False, lineterminator="\r\n", encoding="utf-8")


def read_csv(path: Path) -> GoldTexts:
    """Return the entities of a CSV file. Keys are strings, so that leading zeros remain."""
    # The limit of 131,072 characters is one of the process. The file is in memory already.
    csv.field_size_limit(MAX_CELL_CHARACTERS)
    reader = csv.DictReader(io.StringIO(read_utf8(path), newline=""))
    rows = list(reader)
    names = reader.fieldnames or ()
    if len({*names}) < len(names):
        raise InvalidNoteError("has several columns of the same name")
    for index, row in enumerate(rows):
        if len(row) != len(names) or None in row.values():  # DictReader adds a key for further cells.
            raise ConfigurationError(f"Row {index} of the table has too few or too many cells.", TABLE_REMEDY)
    columns: dict[str, list[Any]] = {name: [row[name] for row in rows] for name in names}
    for name in {NOTE_COLUMN, "start", "end"} & columns.keys():
        columns[name] = [int(value) if str(value).isdecimal() else None for value in columns[name]]
    return _create_gold(columns)


def to_arrow(frame: pd.DataFrame) -> pa.Table:
    """Return a DataFrame as an Arrow table. Ids of various types, which are in the second column, become strings."""
    name = frame.columns[1]
    with contextlib.suppress(UnicodeEncodeError):
        if frame[name].dtype == object:
            frame = frame.assign(**{name: frame[name].map(str)})
        return import_library("pyarrow").Table.from_pandas(frame, preserve_index=False)
    raise ConfigurationError("An id or a label is not valid Unicode.", INVALID_UNICODE_REMEDY)


def save_parquet(path: Path, found: Saveable) -> None:
    """Write the entities to a Parquet file."""
    import_library("pyarrow.parquet").write_table(found.to_arrow(), path)


def read_parquet(path: Path) -> GoldTexts:
    """Return the entities of a Parquet file."""
    return _create_gold(import_library("pyarrow.parquet").read_table(path).to_pydict())


def _create_gold(columns: Mapping[str, list[Any]]) -> GoldTexts:
    """Return the entities of a table. Those with scores are predictions of a model."""
    gold = gold_from_columns(columns)
    return replace(gold, num_predicted=len(gold)) if "score" in columns else gold
