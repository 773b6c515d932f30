"""spaCy: documents with entities, and their binary format (https://spacy.io/api/docbin)."""

from __future__ import annotations

import gc
import sys
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..._utils.validation import invalid_type
from ..._utils.warning import warn
from .notes import (
    Export,
    ExportedNote,
    RawNote,
    Version,
    create_entities,
    import_library,
    read_key,
    read_records,
    read_regular_file,
)

if TYPE_CHECKING:
    from spacy import Language
    from spacy.tokens import Doc

MISALIGNED = "entities that do not start and end at the boundaries of spaCy's tokens, which were omitted"

UNLABELED = "entities without a label, which were omitted"

MAX_INTEGER_BITS = 64

# Span group with the entities that overlap an entity in ``doc.ents``.
SPAN_GROUP = "openmed"


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
    """Write notes to a file, with spaCy's tokenizer for multiple languages."""
    language = import_library("spacy").blank("xx")
    language.max_length = sys.maxsize  # The limit is for parsers.
    import_library("spacy.tokens").DocBin(store_user_data=True, docs=make_docs(language, export)).to_disk(path)


def parse_json(record: Any) -> RawNote:
    """Return a note of ``doc.to_json()``, or of the training data of spaCy 2, which are pairs of a text and its entities."""
    text, values = (record["text"], record) if isinstance(record, Mapping) else record
    groups = values.get("spans", {})
    entities = [*values["ents" if "ents" in values else "entities"], *groups.get(SPAN_GROUP, ())]
    return RawNote(text, [Version(create_entities(entities))])


def read_spacy(path: Path) -> Iterator[RawNote]:
    """Yield the notes of a file, also of JSON: the entities of each document and those in the span group."""
    contents = read_regular_file(path)
    if contents.lstrip()[:1] in {b"[", b"{"}:
        yield from map(parse_json, read_records(path))
        return
    vocabulary = import_library("spacy").blank("xx").vocab
    docs = import_library("spacy.tokens").DocBin()
    is_enabled = gc.isenabled()
    try:
        docs.from_bytes(contents)
    finally:
        if is_enabled:  # spaCy disables garbage collection while it reads, and leaves it disabled after an error.
            gc.enable()
    for doc in docs.get_docs(vocabulary):
        spans = (*doc.ents, *doc.spans.get(SPAN_GROUP, default=()))
        entities = create_entities((span.start_char, span.end_char, span.label_) for span in spans)
        yield RawNote(doc.text, [Version(entities)], **read_key(doc.user_data, "id"))
