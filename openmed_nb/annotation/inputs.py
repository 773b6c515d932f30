"""Texts and ids that a caller passes: a mapping, the columns of a table, or texts with separate ids."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence, Sized
from dataclasses import dataclass
from pathlib import PurePath
from typing import Any

from .._utils.text import describe_value, short_type_name
from .._utils.validation import invalid_type, is_hashable, suggest
from ..errors import ConfigurationError
from .matching import match_rows
from .references import FileReference, get_row_index, package_of

# Columns of tables of entities: the position of the note, and the ids that have no name. A table of notes has neither, unless it
# contains the same ids.
NOTE_COLUMN = "note_index"
ID_COLUMN = "note_id"

# Values of ``ids`` that take the ids from the paths of files.
FILE_NAME = "name"
FILE_PATH = "path"

_IDS_REMEDY = "Pass a list with one id per text, such as ids=notes['note_id']."
_SURROGATE_PATTERN = re.compile(r"[\ud800-\udfff]")
_FILES_REMEDY = "Pass paths of files, such as Path('notes') / '*.txt'."


@dataclass(frozen=True, repr=False, eq=False)  # No repr, because texts and ids can identify patients.
class NoteInputs:
    """Texts and their ids.

    Attributes:
        texts: The texts, or paths of files.
        ids: One id per text, ``"name"`` or ``"path"`` for those of files, or ``None`` to use the index of a Series.
        id_name: Name of the ids as a column.
        id_index: Index of the rows of the ids, or ``None``.
        text_name: Name of the column of the texts, or ``None``.
    """

    texts: Any
    ids: Any = None
    id_name: str = ID_COLUMN
    id_index: Any = None
    text_name: str | None = None

    def resolve_ids(self, references: Any) -> Any:
        """Return the ids of the texts, or ``None`` if they have none.

        Args:
            references: The texts after paths were resolved to files.

        Raises:
            ConfigurationError: If the ids are not those of the texts, or if ``"name"`` or ``"path"`` was specified for texts that
                are not files.
        """
        row_index = get_row_index(references)
        if self.ids is None:
            return row_index
        if isinstance(self.ids, str):
            is_files = isinstance(references, tuple) and all(isinstance(text, FileReference) for text in references)
            if not is_files:
                raise ConfigurationError(f"ids={self.ids!r} requires files.", _FILES_REMEDY)
            if self.ids == FILE_PATH:
                return [reference.path for reference in references]
            return [PurePath(reference.path).name for reference in references]
        count = len(references) if isinstance(references, Sized) else len(self.ids)
        if len(self.ids) != count:
            raise ConfigurationError(f"There are {len(self.ids):,} ids for {count:,} texts.", _IDS_REMEDY)
        if self.id_index is None or row_index is None:
            return self.ids
        return [self.ids[row] for row in match_rows(row_index, self.id_index, "rows of the texts", _IDS_REMEDY)]


def make_id_column(ids: Sequence[Any]) -> Any:
    """Return ids as a column of a DataFrame.

    Ids of several types keep their values: integers next to ``None`` stay integers. A column without ids has no numeric type, so
    that it can be merged with strings. Names of files that are not valid Unicode cannot be in a column of strings.
    """
    import pandas as pd

    has_one_type = len({type(note_id) for note_id in ids}) == 1
    is_unicode = not any(
        _SURROGATE_PATTERN.search(note_id)
        for note_id in ids
        if isinstance(note_id, str) and not note_id.isascii()  # faster than the search
    )
    return ids if has_one_type and is_unicode else pd.Index(list(ids), dtype=object, tupleize_cols=False)


def read_inputs(
    texts: Any, ids: Any = None, text_column: str | None = None, id_column: str | None = None
) -> NoteInputs:
    """Return the texts and ids of the arguments of ``annotate``. Texts are not copied.

    Raises:
        ConfigurationError: If the arguments do not fit together, if a column does not exist, or if an id is not hashable.

    Example:
        >>> read_inputs({"a7": "She has asthma."}).ids
        ['a7']
    """
    if id_column is not None and text_column is None:
        raise ConfigurationError("id_column requires text_column.", "Pass the names of both columns.")
    if ids is not None and id_column is not None:
        raise ConfigurationError("ids and id_column are both specified.", "Pass only one of them.")
    id_name = id_column or ID_COLUMN
    if text_column is not None and isinstance(texts, Iterator):
        if ids is not None:
            raise ConfigurationError("A table that is read in chunks has no separate ids.", "Pass id_column.")
        chunk_ids: list[Any] | None = None if id_column is None else []
        chunks = _iter_chunks(texts, text_column, id_column, chunk_ids)
        return NoteInputs(chunks, chunk_ids, id_name, text_name=text_column)
    if id_column is not None:
        ids = _select_column(texts, "id_column", id_column, text_column)
    elif isinstance(getattr(ids, "name", None), str):
        id_name = ids.name
    values = _validate_ids(ids)
    if text_column is not None:
        column = _select_column(texts, "text_column", text_column, id_column)
        return NoteInputs(column, values, id_name, get_row_index(ids), text_column)
    if isinstance(texts, Mapping) and ids is None:
        notes = list(texts.values())
        # A mapping such as {"text": [...]} contains columns of a table, not texts.
        has_columns = any(isinstance(value, Sized) and not isinstance(value, (str, bytes)) for value in notes)
        return NoteInputs(texts) if has_columns else NoteInputs(notes, list(texts))
    if isinstance(texts, str) and ids is not None:
        raise ConfigurationError(
            "A single text has no ids.", "Pass a mapping of the id to the text, such as {1: text}."
        )
    text_name = getattr(texts, "name", None)
    return NoteInputs(texts, values, id_name, get_row_index(ids), text_name if isinstance(text_name, str) else None)


def _iter_chunks(
    tables: Iterator[Any], text_column: str, id_column: str | None, ids: list[Any] | None
) -> Iterator[Any]:
    """Yield the texts of tables that are read one by one, after their ids were appended to a list."""
    for table in tables:
        column = _select_column(table, "text_column", text_column, id_column)
        if ids is not None:
            ids.extend(_validate_ids(_select_column(table, "id_column", id_column, text_column)))
        yield from column


def _select_column(table: Any, argument: str, name: Any, other_name: Any) -> Any:
    """Return a column of a table. An error does not suggest the column of the other argument."""
    if not isinstance(name, str):
        raise invalid_type(argument, name, "Pass the name of a column.")
    # Arrow tables and datasets have column_names.
    columns = getattr(table, "column_names", getattr(table, "columns", None))
    if columns is None:
        raise ConfigurationError(
            f"{argument} requires a table, not {short_type_name(table)}.",
            "Pass a DataFrame, an Arrow table or a datasets.Dataset.",
        )
    if name not in columns:
        message = f"The table does not have the column {describe_value(name)} of {argument}."
        names = [str(column) for column in columns if column != other_name]
        has_semicolons = len(names) == 1 and ";" in names[0]
        remedy = "Read the file with pd.read_csv(..., sep=';')." if has_semicolons else suggest(name, names, "Columns")
        raise ConfigurationError(message, remedy)
    is_repeated = list(columns).count(name) > 1
    column: Any = None if is_repeated else table[name]
    if is_repeated or getattr(column, "ndim", 1) != 1:
        raise ConfigurationError(f"The table has several columns with the name of {argument}.", "Rename one of them.")
    return column.to_pylist() if package_of(column) == "pyarrow" else column


def _validate_ids(ids: Any) -> Any:
    if ids is None:
        return None
    if isinstance(ids, str):
        if ids not in {FILE_NAME, FILE_PATH}:
            raise ConfigurationError("ids must not be a single string.", f"{_IDS_REMEDY[:-1]}, or 'name' for files.")
        return ids
    is_ordered = isinstance(ids, Sized) and not isinstance(ids, (Mapping, set, frozenset, bytes, bytearray))
    if not is_ordered or getattr(ids, "ndim", 1) != 1:
        raise invalid_type("ids", ids, _IDS_REMEDY)
    if package_of(ids) == "dask":
        raise ConfigurationError(
            "The column of ids is not in memory.", "Make the ids the index of the table, with set_index."
        )
    if package_of(ids) == "pyarrow":
        ids = ids.to_pylist()
    elif hasattr(ids, "tolist"):  # NumPy scalars become Python scalars.
        ids = ids.tolist()
    values = list(ids)
    for position, value in enumerate(values):
        if not is_hashable(value):
            raise ConfigurationError(
                f"The id at index {position} is {short_type_name(value)}, which cannot be looked up.",
                "Pass strings or integers as ids.",
            )
    return values
