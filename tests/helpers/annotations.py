"""Annotations of given entities, as a model would have found them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import openmed_nb as nb
from openmed_nb.annotation.masking import MAX_DISPLAYED_TEXTS
from openmed_nb.annotation.references import text_fingerprint
from openmed_nb.annotation.results import AnnotatedText, Annotations, ResultStore


def annotate(texts: Any, **options: Any) -> Any:
    """Annotate texts with the small bundled model on the CPU."""
    return nb.annotate(texts, "bundled_small", device="cpu", progress=False, **options)


def words(found: Iterable[Iterable[Mapping[str, Any]]]) -> list[list[Any]]:
    """Return the words of the entities in each text."""
    return [[entity["word"] for entity in entities] for entities in found]


def make_entity(text: str, word: str, label: str = "DISEASE", score: float = 0.875) -> dict[str, Any]:
    """Return the entity of a word in a text."""
    start = text.index(word)
    return {"entity_group": label, "score": score, "word": word.lower(), "start": start, "end": start + len(word)}


def make_annotations(
    results: Iterable[Sequence[Mapping[str, Any]] | str], texts: Sequence[Any] = (), **options: Any
) -> Annotations:
    """Return annotations of texts that can be read again, from the entities or the error of each text."""
    store = ResultStore()
    for index, result in enumerate(results):
        entities = result if isinstance(result, str) else [{"word": "", **entity} for entity in result]
        store.add(text_fingerprint(texts[index]) if index < len(texts) else index, entities)
    previews = tuple(texts[:MAX_DISPLAYED_TEXTS])
    defaults = {"preview_texts": previews, "model": "bundled", "device": "cpu", "texts": texts}
    return Annotations(store, **{**defaults, **options})


def make_text(text: str, *entities: Mapping[str, Any], **options: Any) -> AnnotatedText:
    """Return one annotated text."""
    return make_annotations([entities], [text], **options).at(0)
