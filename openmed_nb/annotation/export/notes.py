"""Notes as they are written to and read from files. Offsets of written notes are in characters (code points)."""

from __future__ import annotations

import importlib
import json
import re
from collections import Counter
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, TextIO

from ..._render.display import Displayable, TextSegment
from ...errors import ConfigurationError
from ..gold import GoldSpan, parse_span
from ..inputs import NOTE_COLUMN

if TYPE_CHECKING:
    import pandas as pd
    import pyarrow as pa
    from ipywidgets import DOMWidget

# Descriptions of the information that several formats lose, as the end of a sentence.
WITHOUT_TEXT = "notes without a text (missing, failed, changed, or from a generator), which were omitted"
CHANGED_LABELS = "labels with spaces, which were replaced by underscores"
INVALID_UNICODE_REMEDY = "Pass other ids, or rename files whose names are not UTF-8."
TRIMMED = "entities with white space at their ends, which was removed"


class ExportedNote(NamedTuple):
    """A note with its entities.

    Attributes:
        id: Id of the note, or ``None`` if the results have no ids.
        position: Position of the note in the results.
        text: Text of the note.
        spans: Entities.
        scores: Score of each entity.
    """

    id: Any
    position: int
    text: str
    spans: tuple[GoldSpan, ...]
    scores: tuple[float, ...]

    def key(self, id_key: str = "note_id") -> dict[str, Any]:
        """Return the id of the note or its position, as an item of a JSON object; :func:`read_key` reads it."""
        return {NOTE_COLUMN: self.position} if self.id is None else {id_key: self.id}


@dataclass
class Export:
    """Notes to write. Iteration yields those with a text, and counts them.

    Attributes:
        notes: The notes, or ``None`` for a note without a text.
        model: Name of the model.
        losses: Number of items that the format cannot contain, by description.
        notices: Sentences about the use of the file.
        num_notes: Number of notes that were written.
        num_entities: Number of entities of these notes.
        labels: Labels of these entities.
    """

    notes: Iterable[ExportedNote | None]
    model: str
    losses: Counter[str] = field(default_factory=Counter)
    notices: list[str] = field(default_factory=list)
    num_notes: int = 0
    num_entities: int = 0
    labels: set[str] = field(default_factory=set)

    def __iter__(self) -> Iterator[ExportedNote]:
        for note in self.notes:
            if note is None:
                self.losses[WITHOUT_TEXT] += 1
                continue
            self.num_notes += 1
            self.num_entities += len(note.spans)
            self.labels.update(span.label for span in note.spans)
            yield note

    def sanitize_label(self, label: str) -> str:
        """Return a label without white space, for formats in which white space separates columns."""
        tag = re.sub(r"\s+", "_", label) or "_"
        if tag != label:
            self.losses[CHANGED_LABELS] += 1
        return tag


class Saveable(Protocol):
    """Results that can be saved, and displayed in pages."""

    def to_dict(self) -> dict[str, Any]:
        """Return model, device and texts as JSON-compatible data."""
        ...

    def to_frame_with_ids(self) -> pd.DataFrame:
        """Return one row per entity, with the ids of the notes as a column."""
        ...

    def to_arrow(self) -> pa.Table:
        """Return one row per entity."""
        ...

    def iter_records(self) -> Iterator[dict[str, Any]]:
        """Yield a JSON-compatible object per note."""
        ...

    def summary(self) -> Displayable:
        """Return a summary of the results."""
        ...

    def iter_named_segments(
        self, start: int, stop: int, max_characters: int | None = ...
    ) -> Iterator[tuple[str, list[TextSegment]]]:
        """Yield index and id of each note, and its segments."""
        ...

    def create_view(self) -> DOMWidget:
        """Return a browser of the notes."""
        ...

    def __len__(self) -> int: ...


class Unit(NamedTuple):
    """A unit in which tools count offsets.

    Attributes:
        is_utf16: Whether a character above U+FFFF counts as two.
        joins_line_ends: Whether CR and LF count as one character, as in the text of a web page.
        omits_mark: Whether a byte order mark at the start does not count.
    """

    is_utf16: bool = False
    joins_line_ends: bool = False
    omits_mark: bool = False


CHARACTERS = Unit()
UTF16_UNITS = Unit(is_utf16=True)


class RawEntity(NamedTuple):
    """An entity of a file.

    Attributes:
        fragments: Start and end of each part, in the unit of the tool.
        label: Label.
        surface: Recorded text, or ``None``. Parts are separated by a space.
    """

    fragments: Sequence[tuple[int, int]]
    label: str
    surface: Any = None


class Version(NamedTuple):
    """The entities of a note according to one annotator or model.

    Attributes:
        entities: The entities.
        annotators: Names of the annotator or model.
        is_ground_truth: Whether the tool marks this version as the true one.
        is_prediction: Whether it is from a model.
    """

    entities: Sequence[RawEntity]
    annotators: tuple[Any, ...] = ()
    is_ground_truth: bool = False
    is_prediction: bool = False


class RawNote(NamedTuple):
    """A note of a file, before an annotator is selected and the offsets are converted.

    Attributes:
        text: Text, or ``None`` if the file does not contain it.
        versions: Versions of the entities. There is none if the note was skipped.
        id: Id, or ``None``.
        position: Position in the exported results, or ``None``.
        key: Key that versions of the same note share, or ``None`` if the note occurs once.
        units: Possible units of the offsets. The first one is documented.
    """

    text: str | None
    versions: Sequence[Version]
    id: Any = None
    position: int | None = None
    key: Hashable = None
    units: Sequence[Unit] = (CHARACTERS,)


class InvalidNoteError(Exception):
    """A note in a file is not valid. Neither the problem nor the remedy has any contents of the file."""

    def __init__(self, problem: str, remedy: str = "Correct the note in the tool, and export the file again.") -> None:
        super().__init__(problem)
        self.remedy = remedy


def open_utf8(path: Path) -> TextIO:
    """Open a file to write. Line endings are not converted."""
    return path.open("w", encoding="utf-8", newline="")


def read_utf8(path: Path) -> str:
    """Return the contents of a file. Line endings are not converted."""
    return read_regular_file(path).decode("utf-8-sig")


def read_regular_file(path: Path) -> bytes:
    """Return the contents of a file. Reading from a pipe could block forever."""
    if not path.is_file():
        raise InvalidNoteError("has a file that is missing or not a regular file")
    return path.read_bytes()


def read_records(path: Path) -> Iterator[Any]:
    """Yield the records of a file: the items of a JSON list, one JSON object, or one JSON value per line."""
    text = read_utf8(path)
    lines = [line for line in text.split("\n") if line.strip()]
    if len(lines) > 1 and lines[0].rstrip().endswith(("}", "]")):
        yield from map(json.loads, lines)
    elif lines:
        contents = json.loads(text)
        yield from contents if isinstance(contents, list) else [contents]


def read_key(record: Mapping[str, Any], id_key: str = "note_id") -> dict[str, Any]:
    """Return the id and the position that a file states, as arguments of :class:`RawNote`."""
    note_id = record.get(id_key)
    position = record.get(NOTE_COLUMN)
    if not isinstance(note_id, (str, int, float, type(None))) or not isinstance(position, (int, type(None))):
        raise InvalidNoteError(f"has an invalid value for {id_key!r} or {NOTE_COLUMN!r}")
    return {"id": note_id, "position": position}


def create_note(
    record: Mapping[str, Any],
    entities: Sequence[RawEntity] | None,
    annotator_keys: Sequence[str] = (),
    units: Sequence[Unit] = (CHARACTERS,),
) -> RawNote:
    """Return the note of a record, of which each annotator may have one.

    Args:
        record: Record with ``text``.
        entities: Entities, or ``None`` if the note was skipped.
        annotator_keys: Keys of the names of the annotator.
        units: Possible units of the offsets.
    """
    names = tuple(record[key] for key in annotator_keys if record.get(key) is not None)
    stated = read_key(record)
    key = (*stated.values(), record["text"])
    versions = [] if entities is None else [Version(entities, names)]
    return RawNote(record["text"], versions, **stated, key=key, units=units)


def create_entities(entities: Iterable[Any], surfaces: Sequence[Any] = ()) -> list[RawEntity]:
    """Return entities from a file.

    Args:
        entities: Entities as for :func:`parse_gold`.
        surfaces: Recorded texts of the entities.
    """
    created = []
    for index, entity in enumerate(entities):
        span = parse_span(entity)
        if span is None:
            raise InvalidNoteError(f"has an invalid entity at index {index}")
        created.append(RawEntity([span[:2]], span.label, surfaces[index] if surfaces else None))
    return created


def import_library(name: str) -> Any:
    """Import an optional library, or raise an error with the command that installs it."""
    try:
        return importlib.import_module(name)
    except ImportError as error:
        package = name.partition(".")[0]
        message = f"This format needs {package}."
        raise ConfigurationError(message, f"Install it: python -m pip install {package}.") from error
