"""spaCy: documents with entities, and their binary format (https://spacy.io/api/docbin)."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..._utils.validation import invalid_type
from ..._utils.warning import warn
from ..gold import GoldText
from .notes import Export, ExportedNote, make_gold, missing_library

if TYPE_CHECKING:
    from spacy import Language
    from spacy.tokens import Doc

MISALIGNED = "entities that do not start and end at the boundaries of spaCy's tokens, which were omitted"

# Span group with the entities that overlap an entity in ``doc.ents``.
SPAN_GROUP = "openmed"


def make_docs(nlp: Language, export: Export) -> Iterator[Doc]:
    """Yield a document for each note. Its key is in ``doc.user_data["id"]``."""
    from spacy.util import filter_spans

    for note in export:
        doc = nlp.make_doc(note.text)
        aligned = [doc.char_span(span.start, span.end, span.label) for span in note.spans]
        spans = [span for span in aligned if span is not None]
        export.losses[MISALIGNED] += len(aligned) - len(spans)
        entities = filter_spans(spans)
        doc.set_ents(entities)
        overlapping = [span for span in spans if span not in entities]
        if overlapping:
            doc.spans[SPAN_GROUP] = overlapping
        doc.user_data["id"] = note.id
        yield doc


def iter_docs(nlp: Language, notes: Iterable[ExportedNote | None]) -> Iterator[Doc]:
    """Yield a document for each note with a text, then warn about entities that they do not contain."""
    if not hasattr(nlp, "make_doc"):
        raise invalid_type("nlp", nlp, "Pass a spaCy pipeline, such as spacy.blank('en').")
    export = Export(notes, "")
    yield from make_docs(nlp, export)
    if count := export.losses[MISALIGNED]:
        warn(f"{count:,} {MISALIGNED}.")


def _blank_language() -> Any:
    """Return the tokenizer for multiple languages."""
    try:
        import spacy
    except ImportError as error:
        raise missing_library("spaCy", "The format spacy") from error
    language = spacy.blank("xx")
    language.max_length = sys.maxsize  # The limit is for parsers.
    return language


def write(path: Path, export: Export) -> None:
    """Write notes to a file."""
    language = _blank_language()
    from spacy.tokens import DocBin

    DocBin(store_user_data=True, docs=make_docs(language, export)).to_disk(path)


def read(path: Path) -> Iterator[GoldText]:
    """Yield the notes of a file: the entities of each document and those in the span group."""
    language = _blank_language()
    from spacy.tokens import DocBin

    for doc in DocBin().from_disk(path).get_docs(language.vocab):
        spans = (*doc.ents, *doc.spans.get(SPAN_GROUP, default=()))
        entities = [(span.start_char, span.end_char, span.label_) for span in spans]
        yield make_gold(doc.user_data.get("id"), doc.text, entities)
