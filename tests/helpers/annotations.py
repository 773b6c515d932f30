"""Annotations of given entities, as a model would have found them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import pytest

import openmed_nb as nb
from openmed_nb.annotation.masking import MAX_DISPLAYED_TEXTS
from openmed_nb.annotation.references import text_fingerprint
from openmed_nb.annotation.results import AnnotatedText, Annotations
from openmed_nb.annotation.storage import ResultStore

NOTE = "the patient has diabetes mellitus and hypertension . no asthma ."


def annotate(texts: Any, **options: Any) -> Any:
    """Annotate texts with the small bundled model on the CPU."""
    return nb.annotate(texts, "bundled_small", device="cpu", progress=False, **options)


def annotated(pipe: Any, texts: Any, **options: Any) -> Any:
    """Annotate texts with a pipeline, without a progress bar."""
    return nb.annotate(texts, pipe, progress=False, **options)


def words_of(pipe: Any, text: str = NOTE) -> list[str]:
    """Return the entity texts that a pipeline predicts."""
    return [text[entity["start"] : entity["end"]] for entity in pipe(text)]


def on_forward(model: Any, watch: Callable[[Any], None]) -> None:
    """Call a function with the input of each forward pass of a model, before it; the function may raise."""
    model.register_forward_pre_hook(lambda _model, _args, kwargs: watch(kwargs["input_ids"]), with_kwargs=True)


def rounded(answers: Any) -> list[Any]:
    """Return answers with comparable scores, because batches of different shapes differ in the last digits."""
    return [
        [{**entity, "score": pytest.approx(float(entity["score"]), abs=1e-5)} for entity in answer]
        for answer in answers
    ]


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
