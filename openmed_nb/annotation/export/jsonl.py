"""JSON lines: one object per note with its key, text and entities, and its error or ``missing``."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from . import doccano, label_studio, prodigy, spacy
from .notes import (
    InvalidNoteError,
    RawNote,
    Saveable,
    Version,
    create_entities,
    open_utf8,
    read_key,
    read_records,
    read_utf8,
)

# Only predictions have a score. In a string, the quotation mark would follow a backslash.
SCORE_PATTERN = re.compile(r'(?<!\\)"score"\s*:')

DOCCANO_KEYS = {"label", "labels", "relations"}


def save_jsonl(path: Path, found: Saveable) -> None:
    """Write all notes to a file."""
    with open_utf8(path) as file:
        for record in found.iter_records():
            file.write(f"{json.dumps(record, ensure_ascii=False)}\n")


def read_jsonl(path: Path) -> Iterator[RawNote]:
    """Yield the notes of a file, which may be one of another tool with JSON."""
    is_predicted = SCORE_PATTERN.search(read_utf8(path)) is not None
    return (_parse_record(record, is_predicted) for record in read_records(path))


def _parse_record(record: Any, is_predicted: bool) -> RawNote:
    """Return a note of the tool whose keys the record has."""
    if isinstance(record, list) or "ents" in record:
        return spacy.parse_json(record)
    if label_studio.is_task(record):
        return label_studio.parse_task(record)
    if not prodigy.PRODIGY_KEYS.isdisjoint(record):
        return prodigy.parse_prodigy(record)
    entities = record.get("entities") or []
    if not DOCCANO_KEYS.isdisjoint(record) or (entities and "start_offset" in entities[0]):
        return doccano.parse_doccano(record)
    if "error" in record or record.get("missing"):
        return RawNote(None, [], **read_key(record, "id"))
    if "entities" in record:
        version = Version(create_entities(entities), is_prediction=is_predicted)
        return RawNote(record.get("text"), [version], **read_key(record, "id"))
    if not {"documents", "passages"}.isdisjoint(record):
        raise InvalidNoteError("is BioC JSON, which is not supported", "Export the file in the format PubTator.")
    if "paragraphs" in record:
        remedy = "Convert the file: python -m spacy convert file.json folder."
        raise InvalidNoteError("is the training format of spaCy 2, which is not supported", remedy)
    message = "has none of the keys 'entities', 'label', 'labels', 'spans', 'ents' and 'data'"
    raise InvalidNoteError(message, "Pass the format, or a file that one of the supported tools exported.")
