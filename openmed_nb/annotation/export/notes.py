"""Notes as they are written to and read from files. Offsets of written notes are in characters (code points)."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, NamedTuple, TextIO

from ..boundaries import is_inside_word
from ..gold import GoldSpan, GoldText, parse_span
from ..inputs import NOTE_COLUMN

# Descriptions of the information that several formats lose, as the end of a sentence.
WITHOUT_TEXT = "notes without a text (missing, failed, changed, or from a generator), which were omitted"
CHANGED_LABELS = "labels with spaces, which were replaced by underscores"
TRIMMED = "entities with white space at their ends, which was removed"
OVERLAPPING = "entities that were omitted because they overlap another entity"

# Description of what is doubtful in a file, as the end of a sentence.
CUT_WORDS = "starts or ends of entities are inside a word, where the tool may have shifted them"

# Unit in which a tool counts offsets. In joined line ends, CR and LF count as one character, as in the text of a web page.
OffsetUnit = Literal["characters", "UTF-16 code units", "characters with joined line ends"]


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
        num_notes: Number of notes that were written.
        num_entities: Number of entities of these notes.
        labels: Labels of these entities.
    """

    notes: Iterable[ExportedNote | None]
    model: str
    losses: Counter[str] = field(default_factory=Counter)
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


class RawEntity(NamedTuple):
    """An entity of a file.

    Attributes:
        start: Start in the unit of the tool.
        end: End in the unit of the tool.
        label: Label.
        surface: Recorded text, or ``None``.
    """

    start: int
    end: int
    label: str
    surface: Any = None


class Version(NamedTuple):
    """The entities of a note according to one annotator or model.

    Attributes:
        entities: The entities.
        annotators: Names of the annotator.
        is_prediction: Whether it is from a model.
    """

    entities: Sequence[RawEntity]
    annotators: tuple[Any, ...] = ()
    is_prediction: bool = False


class RawNote(NamedTuple):
    """A note of a file, before an annotator is selected and the offsets are converted.

    Attributes:
        text: Text, or ``None`` if the file does not contain it.
        versions: Versions of the entities. There is none if the note was skipped.
        id: Id, or ``None``.
        position: Position in the exported results, or ``None``.
        units: Possible units of the offsets. The first one in which the entities agree with their recorded texts is used.
    """

    text: str | None
    versions: Sequence[Version]
    id: Any = None
    position: int | None = None
    units: Sequence[OffsetUnit] = ("characters",)


class InvalidNoteError(Exception):
    """A note in a file is not valid. Neither the problem nor the remedy has any contents of the file."""

    def __init__(self, problem: str, remedy: str = "Correct the note in the tool, and export the file again.") -> None:
        super().__init__(problem)
        self.remedy = remedy


def open_utf8(path: Path) -> TextIO:
    """Open a file to write. Line endings are not converted."""
    return path.open("w", encoding="utf-8", newline="")


def read_utf8(path: Path, encoding: str = "utf-8-sig") -> str:
    """Return the contents of a file. Line endings are not converted."""
    if not path.is_file():  # Reading from a pipe could block forever.
        raise InvalidNoteError("has a file that is missing or not a regular file")
    return path.read_bytes().decode(encoding)


def read_records(text: str) -> Iterator[Any]:
    """Yield the records of a file: the items of a JSON list, one JSON object, or one JSON value per line."""
    lines = [line for line in text.split("\n") if line.strip()]
    if len(lines) > 1 and lines[0].rstrip().endswith("}"):
        yield from map(json.loads, lines)
    elif lines:
        contents = json.loads(text)
        yield from contents if isinstance(contents, list) else [contents]


def read_key(record: Mapping[str, Any], id_key: str = "note_id") -> dict[str, Any]:
    """Return the id and the position that a file states, as arguments of :class:`RawNote`."""
    return {"id": record.get(id_key), "position": record.get(NOTE_COLUMN)}


def create_entities(entities: Iterable[Any], surfaces: Sequence[Any] = ()) -> list[RawEntity]:
    """Return entities from a file.

    Args:
        entities: Entities as for :func:`parse_span`.
        surfaces: Recorded texts of the entities.
    """
    created = []
    for index, entity in enumerate(entities):
        span = parse_span(entity)
        if span is None:
            raise InvalidNoteError(f"has an invalid entity at index {index}")
        created.append(RawEntity(*span, surfaces[index] if surfaces else None))
    return created


def select_version(versions: Sequence[Version], annotator: str | int | None, predictions: bool) -> Version | None:
    """Return the version of a note that is gold, or ``None`` if there is none."""
    candidates = [version for version in versions if predictions or not version.is_prediction]
    if annotator is not None:
        candidates = [version for version in candidates if str(annotator) in map(str, version.annotators)]
    if len(candidates) > 1:
        raise InvalidNoteError(
            "has several annotations", "Select an annotator with annotator=, or keep one annotation of each note."
        )
    return candidates[0] if candidates else None


def create_gold_text(note: RawNote, version: Version, counts: Counter[str]) -> GoldText:
    """Return a note with its entities in characters.

    Args:
        note: The note.
        version: The selected version.
        counts: Counts for warnings by description, to which those of the note are added.
    """
    text = note.text
    if text is None:
        spans = [GoldSpan(*entity[:3]) for entity in version.entities]
        return GoldText(note.id, None, tuple(spans), note.position)
    if not isinstance(text, str):
        raise InvalidNoteError("does not have a text")
    problem = ""
    for unit in note.units:
        converted = _convert(text, version.entities, unit)
        if not isinstance(converted, str):
            break
        problem = problem or converted
    else:
        raise InvalidNoteError(
            f"{problem} in all units of the tool", "Export the entities again with the texts that were annotated."
        )
    if note.units != ("characters",):
        for span, entity in zip(converted, version.entities, strict=True):
            if entity.surface is None:
                counts[CUT_WORDS] += sum(0 < end < len(text) and is_inside_word(text, end) for end in span[:2])
    return GoldText(note.id, text, tuple(converted), note.position)


def _convert(text: str, entities: Sequence[RawEntity], unit: OffsetUnit) -> list[GoldSpan] | str:
    """Return spans in characters, or the problem of entities that do not agree with the text."""
    indices = _index_characters(text, unit)
    spans = []
    for number, entity in enumerate(entities):
        start, end = (indices[offset] if offset < len(indices) else None for offset in entity[:2])
        if start is None or end is None or start >= end:
            return f"has an invalid entity at index {number}"
        if entity.surface is not None and not is_surface(entity.surface, text[start:end]):
            return f"has a different text at the offsets of entity {number}"
        spans.append(GoldSpan(start, end, entity.label))
    return spans


def is_surface(surface: str, words: str) -> bool:
    r"""Return whether a recorded text is that of an entity. Label Studio records a line break as ``\n``, brat as a space."""
    return surface.replace("\\n", " ").split() == words.replace("\\n", " ").split()


def _index_characters(text: str, unit: OffsetUnit) -> Sequence[int | None]:
    """Return the index of the character at each offset, or ``None`` inside of a character."""
    if unit == "characters":
        return range(len(text) + 1)
    indices: list[int | None] = []
    for index, character in enumerate(text):
        is_joined = unit == "characters with joined line ends" and text[max(index - 1, 0) : index + 1] == "\r\n"
        if not is_joined:
            indices.append(index)
        if unit == "UTF-16 code units" and character > "\uffff":
            indices.append(None)
    return [*indices, len(text)]
