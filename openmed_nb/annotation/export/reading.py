"""Gold from the notes of a file: one version of the entities of each note, with offsets in characters."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from ..boundaries import is_inside_word
from ..gold import GoldSpan, GoldText
from .notes import CHARACTERS, InvalidNoteError, RawEntity, RawNote, Unit, Version

# Descriptions of counts, as the end of a sentence.
DISCONTINUOUS = "discontinuous entities were read as one entity per part"
CUT_WORDS = "starts or ends of entities are inside a word, where the tool may have shifted them"


def merge_versions(notes: Iterable[RawNote]) -> list[RawNote]:
    """Return the notes of a file, in which each annotator may have a record of the same note."""
    merged: dict[object, RawNote] = {}
    for index, note in enumerate(notes):
        key = (index,) if note.key is None else note.key
        versions = [*(merged[key].versions if key in merged else ()), *note.versions]
        merged[key] = note._replace(versions=versions)
    return [*merged.values()]


def select_version(versions: Sequence[Version], annotator: str | int | None, predictions: bool) -> Version | None:
    """Return the version of a note that is gold, or ``None`` if there is none."""
    candidates = [version for version in versions if not version.is_prediction] or [*versions]
    if annotator is not None:
        candidates = [version for version in candidates if str(annotator) in map(str, version.annotators)]
    ground_truth = [version for version in candidates if version.is_ground_truth]
    if len(ground_truth) == 1:
        candidates = ground_truth
    if not candidates or (candidates[0].is_prediction and not predictions):
        return None
    if len(candidates) > 1:
        remedy = "Select an annotator with annotator=, or keep one annotation of each note."
        raise InvalidNoteError("has several annotations", remedy)
    return candidates[0]


class Reading(NamedTuple):
    """A note with its entities in characters, by the unit in which the file may count.

    Attributes:
        note: The note.
        entities: Entities by unit. All of them agree with their recorded texts.
    """

    note: RawNote
    entities: Mapping[Unit, Sequence[RawEntity]]


def convert_units(note: RawNote, version: Version, penalties: Counter[Unit]) -> Reading:
    """Return the entities of a version in characters.

    Args:
        note: The note.
        version: The selected version.
        penalties: Number of entities of the file that speak against each unit, to which those of the note are added.
    """
    text = note.text
    if not isinstance(text, (str, type(None))):
        raise InvalidNoteError("does not have a text")
    has_one_unit = text is None or (text.isascii() and "\r\n" not in text)
    results = {
        unit: _convert(text, version.entities, unit) for unit in (note.units[:1] if has_one_unit else note.units)
    }
    entities = {unit: result for unit, result in results.items() if not isinstance(result, str)}
    if not entities:
        remedy = "Export the entities again with the texts that were annotated."
        raise InvalidNoteError(f"{results[note.units[0]]} in all units of the tool", remedy)
    for unit in () if has_one_unit else results:
        penalties[unit] += _count_cut_words(note, entities[unit]) if unit in entities else len(version.entities)
    return Reading(note, entities)


def create_gold_text(reading: Reading, penalties: Counter[Unit], counts: Counter[str]) -> GoldText:
    """Return a note with the entities in the unit against which the fewest entities of the file speak.

    Args:
        reading: The note.
        penalties: Number of these entities by unit.
        counts: Counts for warnings by description, to which those of the note are added.
    """
    note = reading.note
    unit = min(reading.entities, key=penalties.__getitem__)
    entities = reading.entities[unit]
    joined = [_join(note.text, entity) for entity in entities]
    counts[CUT_WORDS] += _count_cut_words(note, entities)
    counts[DISCONTINUOUS] += sum(len(parts) > 1 for parts in joined)
    return GoldText(note.id, note.text, tuple(span for parts in joined for span in parts), note.position)


def _convert(text: str | None, entities: Sequence[RawEntity], unit: Unit) -> Sequence[RawEntity] | str:
    """Return entities with offsets in characters, or the problem if they do not agree with the text."""
    if text is None:
        return entities
    indices = _index_characters(text, unit)
    converted = []
    for number, entity in enumerate(entities):
        fragments = []
        for fragment in entity.fragments:
            start, end = (indices[offset] if offset < len(indices) else None for offset in fragment)
            if start is None or end is None or start >= end:
                return f"has an invalid entity at index {number}"
            fragments.append((start, end))
        # Label Studio records a line break as a backslash and "n", brat as a space.
        words = " ".join(text[start:end] for start, end in fragments).replace("\\n", " ").split()
        if entity.surface is not None and entity.surface.replace("\\n", " ").split() != words:
            return f"has a different text at the offsets of entity {number}"
        converted.append(entity._replace(fragments=fragments))
    return converted


def _index_characters(text: str, unit: Unit) -> Sequence[int | None]:
    """Return the index of the character at each offset, or ``None`` inside of a character."""
    if unit == CHARACTERS:
        return range(len(text) + 1)
    indices: list[int | None] = []
    for index, character in enumerate(text):
        is_joined = unit.joins_line_ends and text[max(index - 1, 0) : index + 1] == "\r\n"
        is_mark = unit.omits_mark and index == 0 and character == "\ufeff"
        if not (is_joined or is_mark):
            indices.append(index)
        if unit.is_utf16 and character > "\uffff":
            indices.append(None)
    return [*indices, len(text)]


def _count_cut_words(note: RawNote, entities: Iterable[RawEntity]) -> int:
    """Return the number of starts and ends inside a word, of entities whose unit and text are not certain."""
    text = note.text or ""
    if note.units == (CHARACTERS,):
        return 0
    offsets = [offset for entity in entities if entity.surface is None for part in entity.fragments for offset in part]
    return sum(0 < offset < len(text) and is_inside_word(text, offset) for offset in offsets)


def _join(text: str | None, entity: RawEntity) -> list[GoldSpan]:
    """Return the spans of an entity. Parts with only white space between them are one span."""
    spans: list[GoldSpan] = []
    for start, end in entity.fragments:
        if spans and text and text[spans[-1].end : start].isspace():
            spans[-1] = spans[-1]._replace(end=end)
        else:
            spans.append(GoldSpan(start, end, entity.label))
    return spans
