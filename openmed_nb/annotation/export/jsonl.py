"""JSON lines: one object per note with its key, text and entities, and its error or ``missing``."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

from ..gold import GoldText
from . import doccano
from .notes import Saveable, create_gold_text, open_utf8, read_utf8

# Files of doccano have the same suffix.
DOCCANO_KEYS = {"label", "labels", "relations"}


def save_jsonl(path: Path, found: Saveable) -> None:
    """Write all notes to a file."""
    with open_utf8(path) as file:
        for record in found.iter_records():
            file.write(f"{json.dumps(record, ensure_ascii=False)}\n")


def read_jsonl(path: Path) -> Iterator[GoldText]:
    """Yield the notes of a file, which may be one of doccano."""
    for line in read_utf8(path).split("\n"):
        if line.strip():
            record = json.loads(line)
            if DOCCANO_KEYS & {*record}:
                yield doccano.parse_record(record)
                continue
            has_entities = "error" not in record and not record.get("missing")
            entities = record["entities"] if has_entities else ()
            yield create_gold_text(record.get("id"), record.get("text"), entities)
