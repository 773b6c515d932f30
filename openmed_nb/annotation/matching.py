"""What belongs together: ids match ids in any order. Positions match positions only if neither side has ids."""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from .._render.display import pluralize
from .._utils.text import describe_names
from .._utils.validation import as_integer, invalid_type, is_hashable
from .._utils.warning import warn
from ..errors import UnmatchedIdsError
from .references import is_missing, text_fingerprint

if TYPE_CHECKING:
    import pandas as pd

TABLE_REMEDY = "Pass the table of these notes, with the index or the ids that it had."

# Number of ids, or of their positions, that an error contains.
MAX_NAMED_IDS = 3

# What a CSV file adds to an integer next to an empty cell, the suffix of a file of text, which brat omits, and midnight, which a
# table of days omits.
_ID_SUFFIX = re.compile(r"(?<=\d)\.0+$|\.txt$| 00:00:00$", re.IGNORECASE)


def id_value(note_id: Any) -> str:
    """Return the value of an id, which is the same for its forms in different files.

    Example:
        >>> id_value(10), id_value(10.0), id_value("10.0"), id_value("010"), id_value("n1.txt")
        ('10', '10', '10', '010', 'n1')
    """
    return unicodedata.normalize("NFC", _ID_SUFFIX.sub("", str(note_id)))


def are_positions(ids: Sequence[Any]) -> bool:
    """Return whether ids are the positions of the notes, as in a table without an index."""
    return all(as_integer(note_id) == position for position, note_id in enumerate(ids))


def find_positions(ids: Iterable[Any]) -> dict[Hashable, list[int]]:
    """Return the positions of each id. A missing id identifies nothing."""
    positions: dict[Hashable, list[int]] = {}
    for position, note_id in enumerate(ids):
        if is_hashable(note_id) and not is_missing(note_id):
            positions.setdefault(note_id, []).append(position)
    return positions


def list_positions(positions: Sequence[int]) -> str:
    """Return the first positions for a sentence, such as ``"0, 4, 7, ..."``."""
    names = ", ".join(map(str, positions[:MAX_NAMED_IDS]))
    return names if len(positions) <= MAX_NAMED_IDS else f"{names}, ..."


def warn_if_not_unique(ids: Any, name: str) -> None:
    """Warn if ids are missing or occur more than once.

    Args:
        ids: List of ids, or the index of a Series.
        name: Name of a list of ids as a column.
    """
    counts = [*map(len, find_positions(ids).values())]
    num_repeated = len([count for count in counts if count > 1])
    num_missing = len(ids) - sum(counts)
    problems = [pluralize(num_repeated, "id occurs more than once", "ids occur more than once")] if num_repeated else []
    problems += [pluralize(num_missing, "note has no id", "notes have no id")] if num_missing else []
    if problems:
        keys = f"notes[{describe_names([name])!r}]" if type(ids) is list else "notes.index"
        rows = f"notes[{keys}.isna() | {keys}.duplicated(keep=False)]"
        warn(
            f"{', and '.join(problems)}. Each of these notes counts. List them with {rows}, and do not join tables by these ids."
        )


def match_ids(wanted: Sequence[Any], available: Sequence[Any], subject: str, remedy: str) -> list[int]:
    """Return the position of each wanted id among the available ids.

    An id matches an equal id. If there is none, it matches the only id with an equal value, such as ``"10"`` for 10.

    Args:
        wanted: Ids that must have a partner.
        available: Unique ids, or ids of which no repeated one is wanted.
        subject: What is matched, for the error, such as ``"ids of the gold"``.
        remedy: Remedy of the error.

    Raises:
        UnmatchedIdsError: If an id has no partner or several, or if two ids have the same partner.

    Example:
        >>> match_ids(["b", 7.0], ["a", "b", "7"], "ids of the gold", "Pass the gold of these notes.")
        [1, 2]
    """
    exact = find_positions(available)
    by_value = find_positions(None if is_missing(note_id) else id_value(note_id) for note_id in available)
    partners: list[int] = []
    taken: set[int] = set()
    failures: list[int] = []
    for index, note_id in enumerate(wanted):
        candidates: Sequence[int] = ()
        if not is_missing(note_id):
            candidates = exact.get(note_id, ()) if is_hashable(note_id) else ()
            candidates = candidates or by_value.get(id_value(note_id), ())
        if len(candidates) == 1 and candidates[0] not in taken:
            partners.append(candidates[0])
            taken.add(candidates[0])
        else:
            failures.append(index)
    if failures:
        raise UnmatchedIdsError(
            f"Not exactly one partner: {len(failures):,} of the {len(wanted):,} {subject}, at {list_positions(failures)}.",
            remedy,
            [wanted[index] for index in failures[:MAX_NAMED_IDS]],
        )
    return partners


def match_rows(index: Any, available: Any, subject: str, remedy: str, in_order: bool = False) -> list[int]:
    """Return the position of each row of an index in another one.

    Args:
        index: Index of pandas.
        available: Index of pandas.
        subject: As in :func:`match_ids`.
        remedy: As in :func:`match_ids`.
        in_order: Whether equal indexes match in order, even with repeated ids, because the caller compares the texts.
    """
    is_equal = in_order and index.dtype == available.dtype and index.equals(available)
    if index.is_(available) or is_equal:  # Columns of one table share its index.
        return [*range(len(index))]
    return match_ids(index.tolist(), available.tolist(), subject, remedy)


@dataclass(frozen=True, repr=False, eq=False)  # No repr, because ids can identify patients.
class NoteKeys:
    """Ids, index and fingerprints of the notes of a run.

    Attributes:
        ids: Ids that were passed, or ``None``.
        id_name: Name of the ids as a column.
        row_index: Index of the column of the texts, or ``None``.
        text_name: Name of the column of the texts, or ``None``.
        fingerprints: Fingerprint of each text.
    """

    ids: Sequence[Any] | None
    id_name: str
    row_index: Any
    text_name: str | None
    fingerprints: Sequence[int]

    def find_notes(self, table: pd.DataFrame) -> list[int]:
        """Return the position of the note of each row of a table.

        Raises:
            UnmatchedIdsError: If a row is not one of the notes.
        """
        rows, notes = self._select_indexes(table)
        positions = match_rows(rows, notes, "rows of the table", self._remedy(), self._has_texts(table))
        self._check_texts(table, range(len(table)), positions)
        return positions

    def find_rows(self, table: pd.DataFrame) -> list[int]:
        """Return the position of the row of each note in a table.

        Raises:
            UnmatchedIdsError: If a note is not in the table.
        """
        rows, notes = self._select_indexes(table)
        positions = match_rows(notes, rows, "annotated notes", self._remedy(), self._has_texts(table))
        self._check_texts(table, positions, range(len(positions)))
        return positions

    def _remedy(self) -> str:
        """Return the remedy for a table whose rows do not match."""
        ids = self.ids or ()
        unique = [positions for positions in find_positions(ids).values() if len(positions) == 1]
        count = len(ids) - len(unique)
        if not count:
            return TABLE_REMEDY
        return (
            "Pass the whole table in the order in which it was annotated, such as notes.sort_index(), or annotate it without "
            f"id_column: {pluralize(count, 'note has', 'notes have')} a repeated or missing id."
        )

    def _select_indexes(self, table: pd.DataFrame) -> tuple[pd.Index, pd.Index]:
        """Return the ids, index or positions of the rows of a table, and those of the notes."""
        import pandas as pd

        if not isinstance(table, pd.DataFrame):
            raise invalid_type("table", table, "Pass a DataFrame of pandas.")
        count = len(self.fingerprints)
        if self.ids is not None and list(table.columns).count(self.id_name) == 1:
            rows, notes = (
                pd.Index(ids, dtype=object, tupleize_cols=False) for ids in (table[self.id_name].tolist(), self.ids)
            )
            return rows, notes
        notes = pd.RangeIndex(count)
        if self.row_index is None:
            # Positions alone do not show that the rows are those of the notes.
            has_all_texts = any(
                [*map(text_fingerprint, column.tolist())] == [*self.fingerprints] for _, column in table.items()
            )
            is_certain = self.ids is None and are_positions(table.index) and has_all_texts
        else:
            notes = self.row_index if len(self.row_index) == count else self.row_index[:count]
            # An index that numbers the rows says nothing after the table was sorted.
            is_certain = not are_positions(notes) or self._has_texts(table) or table.index.is_(notes)
        if not is_certain:
            raise UnmatchedIdsError(
                f"The {len(table):,} rows of the table cannot be matched with the {count:,} notes.",
                "Pass the table of these notes, in their order, with the column of the texts or of the ids.",
            )
        return table.index, notes

    def _has_texts(self, table: pd.DataFrame) -> bool:
        return list(table.columns).count(self.text_name) == 1

    def _check_texts(self, table: pd.DataFrame, rows: Iterable[int], notes: Iterable[int]) -> None:
        """Raise an error if the table has the column of the texts, and a text differs from that of its note."""
        if not self._has_texts(table):
            return
        texts = table[self.text_name].tolist()
        different = [
            row
            for row, note in zip(rows, notes, strict=True)
            if text_fingerprint(texts[row]) != self.fingerprints[note]
        ]
        if different:
            raise UnmatchedIdsError(
                f"Of the {len(texts):,} rows of the table, {len(different):,} have another text than the note with the same id or index, at {list_positions(different)}.",
                TABLE_REMEDY,
            )
