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

from .notes import (
    CHARACTERS,
    UTF16_UNITS,
    Export,
    RawNote,
    create_entities,
    create_note,
    open_utf8,
    read_records,
)


def _count_units(text: str) -> list[int]:
    """Return the offset in UTF-16 code units of each character and of the end of a text."""
    return [0, *accumulate(2 if character > "\uffff" else 1 for character in text)]


def write_doccano(path: Path, export: Export) -> None:
    """Write notes to a file."""
    num_returns = 0
    with open_utf8(path) as file:
        for note in export:
            units = _count_units(note.text)
            labels = [[units[span.start], units[span.end], span.label] for span in note.spans]
            record = {"text": note.text, "label": labels, **note.key()}
            file.write(f"{json.dumps(record, ensure_ascii=False)}\n")
            num_returns += "\r" in note.text
    if num_returns:
        export.notices.append(f"{num_returns:,} notes have CR line ends, after which doccano may shift new entities.")


def read_doccano(path: Path) -> Iterator[RawNote]:
    """Yield the notes of a file."""
    return map(parse_doccano, read_records(path))


def parse_doccano(record: Mapping[str, Any]) -> RawNote:
    """Return a note, also of a project with relations."""
    labels = record.get("label", record.get("labels"))
    if labels is None:
        labels = [(entity["start_offset"], entity["end_offset"], entity["label"]) for entity in record["entities"]]
    note = create_note(record, create_entities(labels), ("username", "annotator"), (UTF16_UNITS, CHARACTERS))
    # Only files that were not exported from here may have another unit.
    return note if note.id is note.position is None else note._replace(units=(UTF16_UNITS,))
