"""spaCy: documents with entities, and their binary format (https://spacy.io/api/docbin)."""

from __future__ import annotations

import gc
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from ..._utils.validation import invalid_type
from ..._utils.warning import warn
from ..gold import GoldText
from .notes import Export, ExportedNote, create_gold_text, import_library

if TYPE_CHECKING:
    from spacy import Language
    from spacy.tokens import Doc

MISALIGNED = "entities that do not start and end at the boundaries of spaCy's tokens, which were omitted"

UNLABELED = "entities without a label, which were omitted"

MAX_INTEGER_BITS = 64

# Span group with the entities that overlap an entity in ``doc.ents``.
SPAN_GROUP = "openmed"


def make_docs(nlp: Language, export: Export) -> Iterator[Doc]:
    """Yield a document for each note. Its key is in ``doc.user_data["id"]``."""
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
        doc.user_data["id"] = str(note.id) if is_large else note.id
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


def read_spacy(path: Path) -> Iterator[GoldText]:
    """Yield the notes of a file: the entities of each document and those in the span group."""
    vocabulary = import_library("spacy").blank("xx").vocab
    docs = import_library("spacy.tokens").DocBin()
    is_enabled = gc.isenabled()
    try:
        docs.from_disk(path)
    finally:
        if is_enabled:  # spaCy disables garbage collection while it reads, and leaves it disabled after an error.
            gc.enable()
    for doc in docs.get_docs(vocabulary):
        spans = (*doc.ents, *doc.spans.get(SPAN_GROUP, default=()))
        entities = [(span.start_char, span.end_char, span.label_) for span in spans]
        yield create_gold_text(doc.user_data.get("id"), doc.text, entities)
