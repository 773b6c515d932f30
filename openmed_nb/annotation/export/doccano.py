"""doccano: one JSON object with ``text`` and ``label`` per line.

doccano counts offsets in UTF-16 code units (https://github.com/doccano/doccano/issues/2290), unless a project counts grapheme
clusters, which this module does not support. The key of a note is in ``note_id``, because doccano exports its own ``id``.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from itertools import accumulate
from pathlib import Path
from typing import Any

from ..gold import GoldText
from .notes import Export, create_gold_text, open_utf8, read_utf8


def _count_units(text: str) -> list[int]:
    """Return the offset in UTF-16 code units of each character and of the end of a text."""
    return [0, *accumulate(2 if character > "\uffff" else 1 for character in text)]


def write_doccano(path: Path, export: Export) -> None:
    """Write notes to a file."""
    with open_utf8(path) as file:
        for note in export:
            units = _count_units(note.text)
            labels = [[units[span.start], units[span.end], span.label] for span in note.spans]
            record = {"text": note.text, "label": labels, "note_id": note.id}
            file.write(f"{json.dumps(record, ensure_ascii=False)}\n")


def read_doccano(path: Path) -> Iterator[GoldText]:
    """Yield the notes of a file."""
    for line in read_utf8(path).split("\n"):
        if line.strip():
            yield parse_record(json.loads(line))


def parse_record(record: Mapping[str, Any]) -> GoldText:
    """Return a note, also of a project with relations."""
    labels = record.get("label", record.get("labels"))
    if labels is None:
        labels = [(entity["start_offset"], entity["end_offset"], entity["label"]) for entity in record["entities"]]
    positions = {unit: position for position, unit in enumerate(_count_units(record["text"]))}
    entities = [(positions.get(start), positions.get(end), label) for start, end, label in labels]
    return create_gold_text(record.get("note_id"), record["text"], entities)
