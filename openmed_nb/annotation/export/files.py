"""Files of all results (JSON lines, CSV, Parquet and HTML), and documents of spaCy."""

from __future__ import annotations

import contextlib
import json
import re
import sys
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..._render.display import Report, escape, to_html
from ..._utils.validation import invalid_type
from ..._utils.warning import warn
from ...errors import ConfigurationError
from .notes import (
    INVALID_UNICODE_REMEDY,
    Export,
    ExportedNote,
    InvalidNoteError,
    RawNote,
    Saveable,
    Version,
    create_entities,
    import_library,
    open_utf8,
    read_key,
    read_records,
    read_utf8,
)
from .tools import parse_doccano, parse_task

if TYPE_CHECKING:
    import pandas as pd
    import pyarrow as pa
    from spacy import Language
    from spacy.tokens import Doc


# Only predictions have a score. In a string, the quotation mark would follow a backslash.
SCORE_PATTERN = re.compile(r'(?<!\\)"score"\s*:')

MISALIGNED = "entities that do not start and end at the boundaries of spaCy's tokens, which were omitted"
UNLABELED = "entities without a label, which were omitted"

MAX_INTEGER_BITS = 64

# Span group with the entities that overlap an entity in ``doc.ents``.
SPAN_GROUP = "openmed"

# Notes outside of the window are not drawn. All colors are system colors, for light and dark color schemes.
PAGE_START = """<!doctype html>
<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">
<title>{title}</title><style>
:root {{color-scheme: light dark;}}
body {{background: Canvas; color: CanvasText; font: 16px/1.5 system-ui, sans-serif; max-width: 50rem; margin: 0 auto; padding: 1rem; overflow-wrap: break-word;}}
h1 {{font-size: 1.4rem;}} h2 {{font-size: 1rem; margin: 0 0 0.3rem;}}
article {{border-top: 1px solid #8886; padding: 0.8rem 0; content-visibility: auto; contain-intrinsic-size: auto 8rem;}}
</style></head>
<body><main><h1>{title}</h1>{sentences}
"""
PAGE_END = "</main></body></html>\n"


def save_jsonl(path: Path, found: Saveable) -> None:
    """Write one JSON object per note with its key, text and entities, and its error or ``missing``."""
    with open_utf8(path) as file:
        for record in found.iter_records():
            file.write(f"{json.dumps(record, ensure_ascii=False)}\n")


def read_jsonl(path: Path) -> Iterator[RawNote]:
    """Read one JSON object per note with its key, text and entities, also of doccano or Label Studio."""
    is_predicted = SCORE_PATTERN.search(read_utf8(path)) is not None
    return (_parse_record(record, is_predicted) for record in read_records(path))


def _parse_record(record: Mapping[str, Any], is_predicted: bool) -> RawNote:
    """Return a note of the tool whose keys the record has."""
    if "data" in record:
        return parse_task(record)
    entities = record.get("entities") or []
    if "label" in record or (entities and "start_offset" in entities[0]):
        return parse_doccano(record)
    if "error" in record or record.get("missing"):
        return RawNote(None, [], **read_key(record, "id"))
    if "entities" in record:
        version = Version(create_entities(entities), is_prediction=is_predicted)
        return RawNote(record.get("text"), [version], **read_key(record, "id"))
    message = "has none of the keys 'entities', 'label' and 'data'"
    raise InvalidNoteError(message, "Pass the format, or a file that one of the supported tools exported.")


def save_csv(path: Path, found: Saveable) -> None:
    """Write one row per entity, without the texts of the notes."""
    # The csv module quotes the characters of the line terminator only, and words may contain both.
    found.to_frame_with_ids().to_csv(path, index=False, lineterminator="\r\n", encoding="utf-8")


def to_arrow(frame: pd.DataFrame) -> pa.Table:
    """Return a DataFrame as an Arrow table. Ids of various types, which are in the second column, become strings."""
    name = frame.columns[1]
    with contextlib.suppress(UnicodeEncodeError):
        if frame[name].dtype == object:
            frame = frame.assign(**{name: frame[name].map(str)})
        return import_library("pyarrow").Table.from_pandas(frame, preserve_index=False)
    raise ConfigurationError("An id or a label is not valid Unicode.", INVALID_UNICODE_REMEDY)


def save_parquet(path: Path, found: Saveable) -> None:
    """Write one row per entity, without the texts of the notes."""
    import_library("pyarrow.parquet").write_table(to_arrow(found.to_frame_with_ids()), path)


def save_html(path: Path, found: Saveable) -> None:
    """Write a page with all notes and their marked entities, without scripts and network access."""
    summary = found.summary().to_report()
    sentences = "".join(f"<p>{escape(sentence)}</p>" for sentence in summary.sentences)
    with open_utf8(path) as file:
        file.write(PAGE_START.format(title=escape(summary.title), sentences=sentences))
        for name, segments in found.iter_named_segments(0, len(found), None):
            note = to_html(Report("", segments=tuple(segments)))
            file.write(f"<article><h2>Note {escape(name)}</h2>{note}</article>\n")
        file.write(PAGE_END)


def make_docs(nlp: Language, export: Export) -> Iterator[Doc]:
    """Yield a document for each note. ``doc.user_data`` has its ``id``, or its position as ``note_index``."""
    filter_spans = import_library("spacy.util").filter_spans
    for note in export:
        doc = nlp.make_doc(note.text)
        labeled = [span for span in note.spans if span.label]
        export.losses[UNLABELED] += len(note.spans) - len(labeled)
        aligned = [doc.char_span(span.start, span.end, span.label) for span in labeled]
        spans = [span for span in aligned if span is not None]
        export.losses[MISALIGNED] += len(aligned) - len(spans)
        entities = filter_spans(spans)
        doc.set_ents(entities)
        in_entities = {*entities}
        overlapping = [span for span in spans if span not in in_entities]
        if overlapping:
            doc.spans[SPAN_GROUP] = overlapping
        # A file of spaCy contains integers of at most 64 bits.
        is_large = isinstance(note.id, int) and note.id.bit_length() >= MAX_INTEGER_BITS
        doc.user_data.update({"id": str(note.id)} if is_large else note.key("id"))
        yield doc


def iter_docs(nlp: Language, notes: Iterable[ExportedNote | None]) -> Iterator[Doc]:
    """Yield a document for each note with a text, then warn about entities that they do not contain."""
    if not hasattr(nlp, "make_doc"):
        raise invalid_type("nlp", nlp, "Pass a spaCy pipeline, such as spacy.blank('en').")
    export = Export(notes, "")
    yield from make_docs(nlp, export)
    for loss in (MISALIGNED, UNLABELED):
        if count := export.losses[loss]:
            warn(f"{count:,} {loss}.")


def write_spacy(path: Path, export: Export) -> None:
    """Write spaCy's binary format (https://spacy.io/api/docbin), with its tokenizer for multiple languages."""
    language = import_library("spacy").blank("xx")
    language.max_length = sys.maxsize  # The limit is for parsers.
    import_library("spacy.tokens").DocBin(store_user_data=True, docs=make_docs(language, export)).to_disk(path)
