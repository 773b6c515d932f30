"""Prodigy: one JSON object with ``text``, ``spans`` and ``answer`` per line (https://prodi.gy/docs/api-interfaces#ner)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from .notes import RawNote, create_entities, create_note, read_records

PRODIGY_KEYS = {"spans", "answer", "_input_hash"}


def read_prodigy(path: Path) -> Iterator[RawNote]:
    """Yield the notes of a file that ``prodigy db-out`` wrote."""
    return map(parse_prodigy, read_records(path))


def parse_prodigy(record: Mapping[str, Any]) -> RawNote:
    """Return a note, which is skipped if its answer is "reject" or "ignore"."""
    spans = record.get("spans") or []
    entities = create_entities(spans, [span.get("text") for span in spans])
    is_accepted = record.get("answer", "accept") == "accept"
    return create_note(record, entities if is_accepted else None, ("_annotator_id", "_session_id"))
