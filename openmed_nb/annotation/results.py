"""Results of annotation: the entities of one or many texts, with compact storage, display and summaries."""

from __future__ import annotations

import contextlib
import copy
import json
import math
import operator
import os
from array import array
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import cached_property
from itertools import islice, pairwise
from typing import TYPE_CHECKING, Any, NamedTuple

from .._render.display import Displayable, Json, Report, Table, TextSegment, pluralize, to_text
from .._render.drawing import bar_chart
from .._utils.text import describe_value, shorten
from .._utils.validation import check_integer, check_number, invalid_value, suggest
from .._utils.warning import warn
from ..errors import ConfigurationError, InvalidTextError, OpenMedError
from .masking import (
    HIDDEN_TEXT_NOTICE,
    IS_MISSING,
    MAX_SHOWN_TEXT_CHARACTERS,
    REPLACEMENT,
    LabeledSpan,
    MaskedText,
    MaskedTexts,
    Policy,
    continues_entity,
    long_text_sentence,
    mask_text,
    select_masked_labels,
    strip_bio_prefix,
    validate_policy,
)
from .references import MISSING, FileReference, TextReference, iter_texts, read_text, text_fingerprint

if TYPE_CHECKING:
    import numpy as np
    import pandas as pd
    import pyarrow as pa
    from spacy import Language
    from spacy.tokens import Doc

    from .export.notes import ExportedNote
    from .export.registry import ExportReport
    from .gold import GoldSpan
    from .scores import ScoredSpan, Scores


# Displayed for a label with an empty name.
UNNAMED_LABEL = "no label"

# Maximum number of displayed table rows and characters of a text.
MAX_TABLE_ROWS = 10
MAX_TEXT_CHARACTERS = 2000

# Columns of a ResultStore. Only tokens that are not aggregated have an index.
_COLUMNS = ("label", "score", "index", "word", "start", "end")

# An entity as in transformers: a mapping with label, score, word, start and end.
Entity = dict[str, Any]


class DroppedSpan(NamedTuple):
    """A span that the model labeled but that is not in an entity, because an aggregation strategy labels whole words.

    Attributes:
        label: Label without a prefix such as ``B-``.
        score: Highest score of the tokens, in [0, 1].
        start: Start in characters.
        end: End in characters.
    """

    label: str
    score: float
    start: int
    end: int


class FingerprintedResult(NamedTuple):
    """Stored result of a text.

    Attributes:
        fingerprint: Fingerprint of the text.
        answer: Entities of the text, or an error message.
        dropped: Labeled spans that are not in an entity.
    """

    fingerprint: int
    answer: list[Entity] | str
    dropped: tuple[DroppedSpan, ...] = ()


def entity_span(entity: Mapping[str, Any]) -> tuple[int, int, str]:
    """Return start, end and label of an entity, or of a token that was not aggregated.

    Example:
        >>> entity_span({"entity_group": "DRUG", "start": 3, "end": 9}), entity_span({"entity": "B-DRUG", "start": 0, "end": 2})
        ((3, 9, 'DRUG'), (0, 2, 'B-DRUG'))
    """
    label = entity["entity_group"] if "entity_group" in entity else entity["entity"]
    return int(entity["start"]), int(entity["end"]), str(label)


def _masked_span(entity: Mapping[str, Any]) -> LabeledSpan:
    """Return the span that masking replaces for an entity, or for a token that was not aggregated."""
    start, end, label = entity_span(entity)
    if "entity_group" in entity:
        return LabeledSpan(start, end, label)
    return LabeledSpan(start, end, strip_bio_prefix(label), continues=continues_entity(label))


def masked_spans(entities: Iterable[Mapping[str, Any]], dropped: Iterable[DroppedSpan]) -> list[LabeledSpan]:
    """Return the spans that masking replaces: the entities and the dropped spans."""
    spans = [_masked_span(entity) for entity in entities]
    return spans + [LabeledSpan(span.start, span.end, span.label, continues=True) for span in dropped]


def dropped_span(entity: Mapping[str, Any]) -> DroppedSpan:
    """Return an entity as a dropped span."""
    span = _masked_span(entity)
    return DroppedSpan(span.label, float(entity["score"]), span.start, span.end)


def find_uncovered(spans: Iterable[DroppedSpan], entities: Sequence[Mapping[str, Any]]) -> tuple[DroppedSpan, ...]:
    """Return the distinct spans that are not inside an entity with the same label, in order."""
    entity_spans = [_masked_span(entity)[:3] for entity in entities]
    uncovered = {
        span
        for span in spans
        if not any(
            start <= span.start and span.end <= end and span.label == label for start, end, label in entity_spans
        )
    }
    return tuple(sorted(uncovered, key=lambda span: (span.start, span.end)))


def is_entity(value: Any) -> bool:
    """Return whether a value from a file is an entity with valid label, word, score and offsets."""
    if not isinstance(value, dict):
        return False
    strings = value.get("word"), value.get("entity", value.get("entity_group"))
    integers = value.get("start"), value.get("end"), value.get("index", 0)
    score = value.get("score")
    return (
        all(isinstance(string, str) for string in strings)
        and all(type(integer) is int for integer in integers)
        and isinstance(score, float)
        and math.isfinite(score)
    )


# The entities of a text, or an error.
TextResult = list[Entity] | OpenMedError


class ResultStore(Sequence[list[Entity]]):
    """Column-based store of the entities of texts, in the order of the texts. Lists of entities are created on access.

    Of each text, only a fingerprint is stored, which identifies the text when a run is resumed.

    Attributes:
        errors: Errors by text index: exceptions in the results of a chunk, messages in the results of a run. A text with an error
            has no entities.
        dropped: Labeled spans that are not in an entity, by text index.
        fingerprints: Fingerprints of the texts. The results of a chunk have none.
        key: Key of the label in an entity: ``entity_group``, or ``entity`` for tokens that are not aggregated.
    """

    def __init__(self, key: str = "entity_group") -> None:
        self.errors: dict[int, Any] = {}
        self.dropped: dict[int, tuple[DroppedSpan, ...]] = {}
        self.fingerprints = array("Q")
        self.key = key
        self._text_offsets = array("q", [0])  # Index of the first entity of each text, and total.
        self._strings: list[str] = []  # Distinct labels and words.
        self._string_ids: dict[str, int] = {}
        self._columns = {name: array("d" if name == "score" else "H") for name in _COLUMNS}

    @classmethod
    def from_results(cls, results: Sequence[TextResult], key: str = "entity_group") -> ResultStore:
        """Return the results of a chunk."""
        chunk = cls(key)
        for index, result in enumerate(results):
            if isinstance(result, OpenMedError):
                chunk.errors[index] = result
            chunk._add_rows([] if isinstance(result, OpenMedError) else result)
        return chunk

    @classmethod
    def of_columns(  # noqa: PLR0913, PLR0917 - one parameter per column
        cls,
        key: str,
        names: Sequence[str],
        text_offsets: np.ndarray,
        labels: np.ndarray,
        words: Sequence[str],
        columns: Mapping[str, np.ndarray],
        dropped: Mapping[int, tuple[DroppedSpan, ...]],
    ) -> ResultStore:
        """Return the results of a chunk from columns with one value for each of ``E`` entities of ``S`` texts.

        Args:
            key: ``entity_group``, or ``entity`` for tokens that are not aggregated.
            names: Names of the ``C`` labels.
            text_offsets: Index of the first entity of each text, followed by ``E``, int64 array of shape ``(S + 1,)``.
            labels: Label id of each entity, int64 array of shape ``(E,)``.
            words: Word of each entity.
            columns: ``score`` (float64), ``start`` and ``end`` in characters (int64), and ``index`` (int64) for tokens.
            dropped: Dropped spans, see the class.
        """
        import numpy as np

        chunk = cls(key)
        chunk._text_offsets = array("q", text_offsets.tobytes())
        chunk.dropped = dict(dropped)
        chunk._strings = [*dict.fromkeys((*names, *words))]
        string_ids = {string: index for index, string in enumerate(chunk._strings)}
        chunk._string_ids = string_ids
        label_ids = np.array([string_ids[name] for name in names], np.int64)
        chunk._columns["label"] = array("q", label_ids[labels].tobytes())
        chunk._columns["word"] = array("q", [string_ids[word] for word in words])
        for name, column in columns.items():
            chunk._columns[name] = array("d" if name == "score" else "q", column.tobytes())
        return chunk

    def add(self, fingerprint: int, answer: Sequence[Entity] | str, dropped: tuple[DroppedSpan, ...] = ()) -> None:
        """Add the result of the next text: its entities, or an error message."""
        if dropped:
            self.dropped[len(self)] = dropped
        if isinstance(answer, str):
            self.errors[len(self)] = answer
            answer = ()
        if answer:
            self.key = "entity" if "entity" in answer[0] else "entity_group"
        self._add_rows(answer)
        self.fingerprints.append(fingerprint)

    def _add_rows(self, entities: Sequence[Entity]) -> None:
        self._extend_column("label", [self._string_id(entity[self.key]) for entity in entities])
        self._extend_column("word", [self._string_id(entity["word"]) for entity in entities])
        for name in ("score", "start", "end"):
            self._extend_column(name, [entity[name] for entity in entities])
        self._extend_column("index", [entity["index"] for entity in entities if "index" in entity])
        # The result is complete only now, because adding an entity may fail.
        self._text_offsets.append(self._text_offsets[-1] + len(entities))

    def extend(self, fingerprints: Sequence[int], chunk: ResultStore) -> None:
        """Add the first results of a chunk, one per fingerprint."""
        count = len(fingerprints)
        first = len(self)
        rows = chunk._text_offsets[count]
        self.key = chunk.key
        string_ids = [self._string_id(string) for string in chunk._strings]
        for name, column in chunk._columns.items():
            values = column[:rows]
            self._extend_column(name, [string_ids[value] for value in values] if name in {"label", "word"} else values)
        # The results are complete only now, because adding them may be interrupted.
        self.fingerprints.extend(fingerprints)
        self.errors.update({first + index: str(error) for index, error in chunk.errors.items() if index < count})
        self.dropped.update({first + index: spans for index, spans in chunk.dropped.items() if index < count})
        total = self._text_offsets[-1]
        self._text_offsets.extend([total + offset for offset in chunk._text_offsets[1 : count + 1]])

    def _string_id(self, string: str) -> int:
        """Return the id of a label or a word, and add it if it is new."""
        string_id = self._string_ids.setdefault(string, len(self._strings))
        if string_id == len(self._strings):
            self._strings.append(string)
        return string_id

    def _extend_column(self, name: str, values: Sequence[Any]) -> None:
        """Append values to a column. Integers take two bytes each; the column is widened to four or eight bytes if needed."""
        column = self._columns[name]
        try:
            column.extend(array(column.typecode, values))
        except OverflowError:
            wider_type = {"H": "I", "I": "q"}.get(column.typecode)
            if wider_type is None:
                raise
            self._columns[name] = array(wider_type, column)
            self._extend_column(name, values)

    def outcomes(self) -> Iterator[TextResult]:
        """Yield the entities or the error of each text of a chunk."""
        entities = self._entities(0, self._text_offsets[-1])
        for index, (start, stop) in enumerate(pairwise(self._text_offsets)):
            yield self.errors.get(index) or entities[start:stop]

    def items(self, fingerprints: Sequence[int] | None = None) -> Iterator[FingerprintedResult]:
        """Yield the stored result of each text. For a chunk, the fingerprints determine the number of results."""
        for index, fingerprint in enumerate(self.fingerprints if fingerprints is None else fingerprints):
            if index >= len(self):
                return
            error = self.errors.get(index)
            answer = self[index] if error is None else str(error)
            yield FingerprintedResult(fingerprint, answer, self.dropped.get(index, ()))

    def group_by_text(self, sequence_offsets: Sequence[int], text_ids: np.ndarray) -> ResultStore:
        """Return the results of texts from the results of their sequences.

        Args:
            sequence_offsets: Index of the first sequence of each text, followed by the number of sequences.
            text_ids: Index of the text of each sequence, in ascending order.
        """
        dropped: dict[int, tuple[DroppedSpan, ...]] = {}
        for sequence, spans in self.dropped.items():
            text_id = int(text_ids[sequence])
            dropped[text_id] = dropped.get(text_id, ()) + spans
        text_offsets = array("q", [self._text_offsets[offset] for offset in sequence_offsets])
        return self._replace_attributes(dropped=dropped, _text_offsets=text_offsets)

    def _replace_attributes(self, **values: Any) -> ResultStore:
        store = copy.copy(self)
        vars(store).update(values)
        return store

    def replace_results(self, new_results: Mapping[int, FingerprintedResult]) -> ResultStore:
        """Return a copy in which the results of some texts are replaced, by text index."""
        if not new_results:
            return self
        store = ResultStore(self.key)
        for index, result in enumerate(self.items()):
            store.add(*new_results.get(index, result))
        return store

    def without_words(self) -> ResultStore:
        """Return a copy with an empty word for each entity."""
        store = ResultStore(self.key)
        for fingerprint, answer, dropped in self.items():
            hidden = answer if isinstance(answer, str) else [{**entity, "word": ""} for entity in answer]
            store.add(fingerprint, hidden, dropped)
        return store

    def is_missing(self, index: int) -> bool:
        """Return whether a text is a missing value."""
        return self.fingerprints[index] == MISSING and index not in self.errors

    @property
    def missing(self) -> tuple[int, ...]:
        """The indices of missing texts."""
        import numpy as np

        indices = np.flatnonzero(np.array(self.fingerprints[: len(self)]) == np.uint64(MISSING)).tolist()
        return tuple(index for index in indices if index not in self.errors)

    def __len__(self) -> int:
        return len(self._text_offsets) - 1

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, slice):
            return [self[text_id] for text_id in range(len(self))[index]]
        text_id = range(len(self))[index]
        return self._entities(self._text_offsets[text_id], self._text_offsets[text_id + 1])

    def _entities(self, start: int, stop: int) -> list[Entity]:
        """Return entities as mappings with their keys in the order of transformers."""
        columns: dict[str, Sequence[Any]] = {name: column[start:stop] for name, column in self._columns.items()}
        strings = self._strings
        key = self.key
        labels = [strings[string_id] for string_id in columns["label"]]
        words = [strings[string_id] for string_id in columns["word"]]
        values = zip(labels, columns["score"], words, columns["start"], columns["end"], strict=True)
        if not columns["index"]:
            return [
                {key: label, "score": score, "word": word, "start": start, "end": end}
                for label, score, word, start, end in values
            ]
        return [
            {key: label, "score": score, "index": index, "word": word, "start": start, "end": end}
            for (label, score, word, start, end), index in zip(values, columns["index"], strict=True)
        ]

    def filter(self, labels: Collection[str], min_score: float) -> ResultStore:
        """Return a copy with the entities that have one of the labels and at least a score.

        The labels must be casefolded. If there are no labels, only the score is used.
        """
        import numpy as np

        count = self._text_offsets[-1]
        kept = np.array(self._columns["score"][:count]) >= min_score
        if labels:
            label_ids = [index for index, string in enumerate(self._strings) if string.casefold() in labels]
            kept &= np.isin(self._columns["label"][:count], label_ids)
        dropped: dict[int, tuple[DroppedSpan, ...]] = {}
        for text_id, spans in self.dropped.items():
            selected = tuple(
                span for span in spans if span.score >= min_score and (not labels or span.label.casefold() in labels)
            )
            if selected:
                dropped[text_id] = selected
        rows = np.flatnonzero(kept).tolist()
        columns = {
            name: array(column.typecode, [column[row] for row in rows] if column else ())
            for name, column in self._columns.items()
        }
        text_offsets = array("q", np.append(0, np.cumsum(kept))[np.array(self._text_offsets)].tobytes())
        return self._replace_attributes(dropped=dropped, _columns=columns, _text_offsets=text_offsets)

    def counts(self) -> Iterator[int]:
        """Yield the number of entities of each text."""
        return (stop - start for start, stop in pairwise(self._text_offsets))

    @property
    def labels(self) -> Sequence[str]:
        """The labels of all entities, in the order of the texts."""
        return [self._strings[string_id] for string_id in self._columns["label"][: self._text_offsets[-1]]]

    @property
    def masked_labels(self) -> set[str]:
        """The labels of all spans that masking replaces, without the prefixes of token labels."""
        labels = {*self.labels}
        if self.key == "entity":
            labels = {*map(strip_bio_prefix, labels)}
        return labels | {span.label for spans in self.dropped.values() for span in spans}

    @property
    def words(self) -> Sequence[str]:
        """The words of all entities, in the order of the texts."""
        return [self._strings[string_id] for string_id in self._columns["word"][: self._text_offsets[-1]]]

    def columns(self) -> dict[str, Any]:
        """Return all entities as columns: the index of the note, and the values of each entity."""
        import numpy as np

        text_ids = np.repeat(np.arange(len(self)), np.diff(np.array(self._text_offsets)))
        columns: dict[str, Any] = {
            "note": text_ids,
            self.key: np.array(self.labels, dtype=object),
            "score": np.array(self._columns["score"]),
            "index": np.array(self._columns["index"], np.int64),
            "word": np.array(self.words, dtype=object),
            "start": np.array(self._columns["start"], np.int64),
            "end": np.array(self._columns["end"], np.int64),
        }
        if not self._columns["index"]:
            del columns["index"]
        return {name: column[: len(text_ids)] for name, column in columns.items()}


class _CompleteCopyMixin:
    """Mixin for a dataclass whose pickle omits some values. Copies within a process are complete."""

    def __copy__(self) -> Any:
        return replace(self)  # type: ignore[type-var]

    def __deepcopy__(self, _memo: object) -> Any:
        return replace(self)  # type: ignore[type-var]


@dataclass(frozen=True, repr=False)
class AnnotatedText(_CompleteCopyMixin, Displayable, Sequence[Mapping[str, Any]]):
    """The entities of one text: a sequence of dictionaries as in the pipeline of transformers.

    Attributes:
        text: The annotated text.
        entities: Mappings with ``entity_group`` (or ``entity``), ``score``, ``word``, ``start`` and ``end``.
        model: Name of the model.
        device: Device of the model.
        show_text: Whether to display the text and its words. If ``False``, they are not pickled either.
        missing: Whether the input was a missing value.
        dropped: Labeled spans that are not in an entity; see :attr:`Annotations.dropped`.
        known_labels: Labels of the entities that the model can predict, or ``None`` if unknown.
        filters: Filters applied with :meth:`Annotations.filter`, as sentences.
    """

    text: str
    entities: tuple[Mapping[str, Any], ...]
    model: str
    device: str
    show_text: bool = True
    missing: bool = False
    dropped: tuple[DroppedSpan, ...] = ()
    known_labels: tuple[str, ...] | None = None
    filters: tuple[str, ...] = ()

    def __getstate__(self) -> dict[str, Any]:
        if self.show_text:
            return vars(self)
        return {**vars(self), "text": "", "entities": tuple({**entity, "word": ""} for entity in self.entities)}

    def __len__(self) -> int:
        return len(self.entities)

    def __getitem__(self, index: Any) -> Any:
        return self.entities[index]

    def to_dict(self) -> dict[str, Any]:
        """Return text, entities, model and device as JSON-compatible data."""
        entities = [{**entity, "score": float(entity["score"])} for entity in self.entities]
        dropped = {"dropped": [span._asdict() for span in self.dropped]} if self.dropped else {}
        missing = {"missing": True} if self.missing else {}
        return {
            "text": self.text,
            "entities": entities,
            **dropped,
            **missing,
            "model": self.model,
            "device": self.device,
        }

    def to_report(self) -> Report:
        """Return the text with highlighted entities, or a table of the entities if the text is hidden."""
        title = f"{pluralize(len(self), 'entity', 'entities')} found by {self.model} on {self.device}"
        if self.missing:
            return Report(title, (IS_MISSING,))
        if not self.show_text:
            return Report(title, (HIDDEN_TEXT_NOTICE,), tables=(self._table(),))
        text = self.text[:MAX_SHOWN_TEXT_CHARACTERS]
        segments = list(_highlight_entities(text, [entity for entity in self.entities if entity["end"] <= len(text)]))
        if len(text) < len(self.text):
            segments.append(TextSegment("…"))
        return Report(title, long_text_sentence(self.text), segments=tuple(segments))

    def __str__(self) -> str:
        # The table contains the scores, which highlighted text does not show.
        return to_text(replace(self.final_report(), tables=(self._table(),)))

    def mask(self, replacement: Policy = REPLACEMENT) -> MaskedText:
        """Replace the entities of the text; see :meth:`Annotations.mask`.

        Example:
            >>> from openmed_nb import annotate
            >>> annotate("She has asthma.", "bundled_small", device="cpu").mask("[{label}]").text
            'She has [DISEASE].'
        """
        if self.missing:
            return MaskedText("", show_text=self.show_text, missing=True)
        policy = validate_policy(replacement)
        if isinstance(policy, Mapping):
            labels = {entity_span(entity)[2] for entity in self.entities} | {span.label for span in self.dropped}
            _warn_unknown_labels(policy, labels, self.known_labels)
        spans = masked_spans(self.entities, self.dropped)
        return mask_text(self.text, spans, policy, self.show_text, labels=self.known_labels, filters=self.filters)

    def _table(self) -> Table:
        rows = []
        for entity in self.entities:
            start, end, label = entity_span(entity)
            word = " ".join(self.text[start:end].split()) if self.show_text else "…"
            rows.append((_display_label(label), f"{float(entity['score']):.2f}", f"{start}-{end}", word))
        return Table("Entities", ("label", "score", "characters", "text"), tuple(rows))


def _highlight_entities(text: str, entities: Iterable[Mapping[str, Any]]) -> Iterator[TextSegment]:
    """Yield the segments of a text with highlighted entities. An entity that overlaps an earlier entity is ignored."""
    position = 0
    for entity in sorted(entities, key=operator.itemgetter("start", "end")):
        start, end, label = entity_span(entity)
        if start >= position < end:
            yield TextSegment(text[position:start])
            yield TextSegment(
                text[start:end], _display_label(label), f"{float(entity['score']):.3f}", f"characters {start} to {end}"
            )
            position = end
    yield TextSegment(text[position:])


def _warn_unknown_labels(labels: Iterable[str], present: Iterable[str], known: Iterable[str] | None) -> None:
    """Warn about labels that no entity has and the model does not predict. Without entities, there is no warning."""
    available = {_normalize_label(label) for label in present}
    if not available:
        return
    available |= {_normalize_label(label) for label in known or ()}
    for label in labels:
        if _normalize_label(label) not in available:
            suggestion = suggest(label.casefold(), sorted(available))
            warn(f"No entity has the label {describe_value(label)}. {suggestion}")


def _normalize_label(label: str) -> str:
    """Return a label without its token prefix and casefolded, such as ``name`` for ``b-Name``."""
    return strip_bio_prefix(label.upper()).casefold()


def _display_label(name: str) -> str:
    """Return a label for display, or a placeholder if it is empty."""
    return name if name.strip() else UNNAMED_LABEL


@dataclass(frozen=True, repr=False)
class Summary(Displayable):
    """Counts of the entities in many texts.

    Attributes:
        model: Name of the model.
        device: Device of the model.
        texts: Number of texts.
        texts_without_entities: Number of texts without entities, excluding missing texts and texts with errors.
        errors: Pairs of text index and error message.
        labels: Pairs of label and number of entities.
        words: Pairs of lower-case word or phrase and number of occurrences, most frequent first.
        batch_shapes: Number of batch shapes; see :class:`Annotations`.
        filters: Filters applied with :meth:`Annotations.filter`, as sentences.
        missing: Number of missing values.
    """

    model: str
    device: str
    texts: int
    texts_without_entities: int
    errors: tuple[tuple[int, str], ...]
    labels: tuple[tuple[str, int], ...]
    words: tuple[tuple[str, int], ...]
    batch_shapes: int | None = None
    filters: tuple[str, ...] = ()
    missing: int = 0

    def to_dict(self) -> dict[str, Any]:
        """Return the counts as JSON-compatible data."""
        pairs = {"errors": dict(self.errors), "labels": dict(self.labels), "words": dict(self.words)}
        return {**super().to_dict(), **pairs}

    def to_report(self) -> Report:
        """Return the counts as sentences, tables and a chart."""
        entities = pluralize(sum(count for _label, count in self.labels), "entity", "entities")
        labels = ", ".join(f"{_display_label(label)} {count:,}" for label, count in self.labels)
        by_label = f"By label: {labels}." if labels else ""
        rest = (
            f"Texts without entities: {self.texts_without_entities:,}." if self.texts_without_entities else "",
            f"{pluralize(self.missing, 'text is', 'texts are')} missing." if self.missing else "",
            f"Texts with errors: {len(self.errors):,}." if self.errors else "",
            f"Batches had {pluralize(self.batch_shapes, 'shape')}; the device compiles one graph per shape."
            if self.batch_shapes
            else "",
        )
        errors = tuple((str(number), error) for number, error in self.errors[:MAX_TABLE_ROWS])
        words = tuple((word, str(count)) for word, count in self.words[:MAX_TABLE_ROWS])
        title = f"{entities} found in {pluralize(self.texts, 'text')} by {self.model} on {self.device}"
        bars = [(_display_label(label), count) for label, count in sorted(self.labels, key=lambda pair: -pair[1])]
        chart = bar_chart("Entities by label", bars, "{:,}".format)
        return Report(
            title,
            tuple(filter(None, (*self.filters, by_label, *rest))),
            tables=(
                Table("Failed texts", ("text", "error"), errors),
                Table("Most frequent entities", ("text", "count"), words),
            ),
            html_sentences=(title, *self.filters, *filter(None, rest)),
            charts=(chart,),
        )


def _are_files(texts: Any) -> bool:
    return isinstance(texts, tuple) and len(texts) > 0 and all(isinstance(text, FileReference) for text in texts)


@dataclass(frozen=True, repr=False, eq=False)
class Annotations(_CompleteCopyMixin, Displayable, Sequence[list[Entity]]):
    """The entities of many texts: a sequence with one list per text, in the order of the texts.

    ``found[17]`` contains the entities of one text, :meth:`show` displays this text with highlighted entities, and :meth:`filter`
    selects entities by label or score.

    Attributes:
        results: Entities of all texts.
        preview_texts: The first texts, for display.
        model: Name of the model.
        device: Device of the model.
        show_text: Whether to display texts and their words. If ``False``, they are not pickled either.
        settings: Model and settings that affect the results; they identify the run.
        shapes: Number of batch shapes on MPS, which compiles one graph per shape. ``None`` on other devices and on a cluster.
        texts: The texts as passed, not copied, or ``None`` if they came from an iterator.
        row_index: Index of the Series or column of the texts, not copied, or ``None``. It identifies rows, so it is pickled even
            with ``show_text=False``.
        unfinished: Whether the results are attached to an error. Results and texts are not pickled then.
        known_labels: Labels that the model can predict and that are not ignored, or ``None`` if unknown.
    """

    results: ResultStore
    preview_texts: tuple[str, ...]
    model: str
    device: str
    show_text: bool = True
    settings: Mapping[str, Any] = field(default_factory=dict)
    shapes: int | None = None
    texts: Any = None
    row_index: Any = None
    unfinished: bool = False
    known_labels: tuple[str, ...] | None = None

    def __getstate__(self) -> dict[str, Any]:
        """Return the state for pickling.

        Errors are sent to logs and to other processes, so the results that are attached to them must not contain texts.
        """
        # Cached properties such as ``sources`` are excluded.
        state = {field.name: getattr(self, field.name) for field in fields(self)}
        if self.unfinished:
            return {**state, "results": ResultStore(), "preview_texts": (), "texts": None, "row_index": None}
        if self.show_text:
            return state
        settings = {**self.settings, "words": "omitted"}  # No run can resume from these results.
        results = self.results.without_words()
        return {**state, "results": results, "preview_texts": (), "texts": None, "settings": settings}

    def __len__(self) -> int:
        return len(self.results)

    def __getitem__(self, index: Any) -> Any:
        return self.results[index]

    @property
    def errors(self) -> Mapping[int, str]:
        """Error messages of failed texts, by text index."""
        return dict(self.results.errors)

    @property
    def dropped(self) -> Mapping[int, tuple[DroppedSpan, ...]]:
        """Labeled spans that are not in an entity, by text index. :meth:`mask` replaces them too.

        ``first``, ``average`` and ``max`` assign one label to each word, so other labels of its tokens are not in an entity.
        Labels in ``ignore_labels`` are excluded.

        Example:
            >>> from openmed_nb import annotate
            >>> annotate(["She has asthma."], "bundled_small", device="cpu").dropped
            {}
        """
        return dict(self.results.dropped)

    @property
    def missing(self) -> tuple[int, ...]:
        """The indices of missing values such as ``None`` or NaN. They have no entities."""
        return self.results.missing

    @cached_property
    def sources(self) -> tuple[str | None, ...]:
        """The file path of each text, or ``None`` for a text that is not a file.

        Only results contain paths. Errors, reports and logs do not, because a file name can contain the name of a patient.
        """
        texts = self.texts if _are_files(self.texts) else ()
        paths: list[str | None] = [text.path for text in islice(texts, len(self))]
        paths.extend([None] * (len(self) - len(paths)))
        return tuple(paths)

    def to_dict(self) -> dict[str, Any]:
        """Return model, device and texts as JSON-compatible data.

        Each text has ``entities``, an ``error`` or ``missing``. A text from a file also has a ``source``; see :attr:`sources`.
        """
        texts: list[dict[str, Any]] = [{"entities": entities} for entities in self]
        for index, spans in self.results.dropped.items():
            texts[index]["dropped"] = [span._asdict() for span in spans]
        for index in self.missing:
            texts[index] = {"missing": True}
        for index, error in self.results.errors.items():
            texts[index] = {"error": error}
        if _are_files(self.texts):
            texts = [{"source": source, **text} for source, text in zip(self.sources, texts, strict=True)]
        return {"model": self.model, "device": self.device, "texts": texts}

    def to_json(self) -> Json:
        """Return :meth:`to_dict` as JSON."""
        return Json(json.dumps(self.to_dict(), ensure_ascii=False))

    def to_frame(self) -> pd.DataFrame:
        """Return a DataFrame with one row per entity.

        The columns are ``note`` (index of the text), the label, ``score``, ``word``, ``start`` and ``end``. If the texts are files,
        the column ``source`` contains their paths; see :attr:`sources`.

        Returns:
            The DataFrame. If the texts came from a Series, it has the index of the Series, so that
            ``found.to_frame().join(table["patient"])`` adds the patient of each note. The suffix ``_index`` is added to an index
            name that is also a column name. Otherwise, the rows are numbered.

        Raises:
            ConfigurationError: If pandas is not installed.
        """
        try:
            import pandas as pd
        except ImportError as error:
            raise ConfigurationError("to_frame() needs pandas.", "Install it: python -m pip install pandas.") from error
        columns = self.results.columns()
        if _are_files(self.texts):
            columns["source"] = [self.sources[index] for index in columns["note"]]
        frame = pd.DataFrame(columns)
        if self.row_index is None:
            return frame
        index = self.row_index.take(frame["note"])
        names = [f"{name}_index" if name in columns else name for name in index.names]
        return frame.set_axis(index.set_names(names))

    def show(self, number: int) -> AnnotatedText:
        """Return one of the texts with highlighted entities.

        Args:
            number: Index of the text, from 0.

        Returns:
            The annotated text, as ``annotate`` returns it for a single text. Files and texts that are not stored are read again.

        Raises:
            ConfigurationError: If the index is out of range, if the text has changed since it was annotated, or if it came from a
                generator and is not one of the stored first texts.
            InvalidTextError: If the text has an error or cannot be read again.

        Example:
            >>> from openmed_nb import annotate
            >>> print(annotate(["No pain.", "She has asthma."], "bundled_small", device="cpu").show(1))
            1 entity found by bundled_small on cpu
            She has [asthma](DISEASE).
            Labels: DISEASE 1
            Entities
              label    score  characters  text
              DISEASE  1.00   8-14        asthma
        """
        if not len(self):
            raise ConfigurationError("There are no texts to display.", "Annotate at least one text.")
        index = check_integer("number", number, 0, len(self) - 1)
        if message := self.results.errors.get(index):
            raise InvalidTextError(message, "Select a different text; .errors contains the failed texts.")
        if self.results.is_missing(index):
            return AnnotatedText("", (), self.model, self.device, self.show_text, missing=True)
        text = self.preview_texts[index] if index < len(self.preview_texts) else self._read_text(index)
        return AnnotatedText(
            text,
            tuple(self[index]),
            self.model,
            self.device,
            self.show_text,
            dropped=self.results.dropped.get(index, ()),
            known_labels=self.known_labels,
            filters=self.settings.get("only", ()),
        )

    def mask(self, replacement: Policy = REPLACEMENT) -> MaskedTexts:
        """Replace the entities of the texts, such as the personal data that a privacy filter detects.

        Masking is not guaranteed to be complete, because entities that the model misses remain. Measure the recall of the model on
        similar texts before you rely on it.

        Args:
            replacement: Replacement of an entity, with ``{label}`` as placeholder of its label. Alternatively, a mapping of labels
                to replacements, where ``None`` keeps the entities of a label. Labels are not case-sensitive. Labels that are not
                in the mapping are replaced by ``"[{label}]"``.

        Returns:
            A list that displays the first texts. Each item has the masked ``text``, ``spans`` with offsets in both texts, and
            ``original_offset(position)``. Spans are extended to whole words. A failed text has an ``error`` and no text. A missing
            value is ``missing``.

        Raises:
            ConfigurationError: If the replacement is not valid, if a text has changed since it was annotated, or if it came from a
                generator and is not one of the stored first texts.
            InvalidTextError: If a text cannot be read again.

        Example:
            >>> from openmed_nb import annotate
            >>> found = annotate(["She has asthma.", "No complaints."], "bundled_small", device="cpu")
            >>> [masked.text for masked in found.mask({"DISEASE": "***"})]
            ['She has ***.', 'No complaints.']
        """
        policy = validate_policy(replacement)
        if isinstance(policy, Mapping):
            _warn_unknown_labels(policy, self.results.masked_labels, self.known_labels)
        current_texts = iter(()) if self.texts is None else iter_texts(self.texts)
        masked = MaskedTexts()
        masked.known_labels = select_masked_labels(self.known_labels, policy)
        masked.filters = self.settings.get("only", ())
        for index, entities in enumerate(self):
            current_text = next(current_texts, None)
            if message := self.results.errors.get(index):
                masked.append(MaskedText("", error=message))
                continue
            if self.results.is_missing(index):
                masked.append(MaskedText("", show_text=self.show_text, missing=True))
                continue
            if index < len(self.preview_texts):
                text = self.preview_texts[index]
            else:
                text = self._check_unchanged(index, current_text)
            spans = masked_spans(entities, self.results.dropped.get(index, ()))
            masked.append(
                mask_text(text, spans, policy, self.show_text, labels=self.known_labels, filters=masked.filters)
            )
        return masked

    def _read_text(self, index: int) -> str:
        """Read a text again, or raise an error if it has changed."""
        remaining = () if self.texts is None else islice(iter_texts(self.texts), index, None)
        return self._check_unchanged(index, next(iter(remaining), None))

    def _check_unchanged(self, index: int, text: Any) -> str:
        """Return the contents of a text, or raise an error if it has changed since it was annotated."""
        remedy = "Annotate the text again to display it."
        if self.texts is None:
            message = f"Text {index} came from a generator; only the first {len(self.preview_texts)} were stored."
            if "words" in self.settings:
                message = f"Text {index} was not stored when this result was pickled."
            raise ConfigurationError(message, remedy)
        text = text.refresh() if isinstance(text, TextReference) else text
        if text_fingerprint(text) != self.results.fingerprints[index]:
            raise ConfigurationError(f"Text {index} has changed since it was annotated.", remedy)
        text = read_text(text, index)
        if isinstance(text, OpenMedError):
            raise text
        return (self.settings.get("delimiter") or "").join([text] if isinstance(text, str) else text)

    def filter(self, *labels: str, min_score: float = 0.0) -> Annotations:
        """Return the annotations with only the entities that have one of the labels and at least a score.

        Args:
            labels: Labels to keep, not case-sensitive. Without labels, the entities of all labels are kept.
            min_score: Minimum score, in [0, 1].

        Returns:
            Annotations of the same texts. A text without remaining entities has an empty list. A run cannot be resumed from
            filtered annotations.

        Raises:
            ConfigurationError: If a label is not a string, or if the score is not valid.

        Example:
            >>> from openmed_nb import annotate
            >>> found = annotate(["She has asthma.", "No complaints."], "bundled_small", device="cpu")
            >>> [[entity["word"] for entity in entities] for entities in found.filter("disease", min_score=0.9)]
            [['asthma'], []]
        """
        min_score = check_number("min_score", min_score, 1.0, example="0.9")
        if not (labels or min_score):
            return self
        for label in labels:
            if not isinstance(label, str):
                raise invalid_value("a label", label, "Pass a label as in the results, such as 'disease'.")
        _warn_unknown_labels(labels, self.results.labels, self.known_labels)
        names = " or ".join(map(shorten, labels)) or "entities"
        sentence = (
            f"Filtered to {names} with a score of at least {min_score:g}." if min_score else f"Filtered to {names}."
        )
        settings = {**self.settings, "only": (*self.settings.get("only", ()), sentence)}
        results = self.results.filter({label.casefold() for label in labels}, min_score)
        known_labels = self.known_labels
        if known_labels is not None and labels:
            selected = {*map(_normalize_label, labels)}
            known_labels = tuple(label for label in known_labels if _normalize_label(label) in selected)
        return replace(self, results=results, settings=settings, known_labels=known_labels)

    def summary(self) -> Summary:
        """Return the number of texts, the number of entities by label, and the most frequent words."""
        words = Counter(word.lower() for word in self.results.words)
        return Summary(
            model=self.model,
            device=self.device,
            texts=len(self),
            texts_without_entities=sum(1 for count in self.results.counts() if not count)
            - len(self.results.errors)
            - len(self.missing),
            errors=tuple(sorted(self.results.errors.items())),
            labels=tuple(sorted(Counter(self.results.labels).items())),
            words=tuple(sorted(words.items(), key=lambda word: (-word[1], word[0]))) if self.show_text else (),
            batch_shapes=self.shapes,
            filters=self.settings.get("only", ()),
            missing=len(self.missing),
        )

    def to_report(self) -> Report:
        """Return the counts, and the first texts with highlighted entities."""
        summary = self.summary().to_report()
        if not self.show_text:
            return Report(summary.title, (*summary.sentences, HIDDEN_TEXT_NOTICE), tables=summary.tables[:1])
        num_shown = len(self.preview_texts)
        sentences = summary.sentences
        hints: list[str] = []
        if 0 < num_shown < len(self):
            sentences = (*sentences, f"Displayed: the first {num_shown} texts.")
            hints.append(f"The first {num_shown} of {len(self):,} texts.")
        if num_shown < len(self) and self.texts is not None:
            target = "another text" if num_shown else "a text"
            hints.append(f"found.show({num_shown}) displays {target}, where found is this result.")
        html_sentences = (summary.title, *summary.sentences, " ".join(hints)) if hints else ()
        segments = tuple(self._segments())
        return Report(summary.title, sentences, summary.tables[:1], segments, html_sentences=html_sentences)

    def _segments(self) -> Iterator[TextSegment]:
        for index, (text, entities) in enumerate(zip(self.preview_texts, self, strict=False)):
            yield TextSegment(f"{index}: ", starts_text=True)
            if index in self.results.errors:  # The text may not be displayable, such as an unpaired surrogate.
                yield TextSegment("(error)\n")
                continue
            if self.results.is_missing(index):
                yield TextSegment("(missing)\n")
                continue
            preview = text[:MAX_TEXT_CHARACTERS]
            yield from _highlight_entities(preview, [entity for entity in entities if entity["end"] <= len(preview)])
            yield TextSegment("…\n" if len(preview) < len(text) else "\n")

    @property
    def _keys(self) -> Sequence[Any]:
        """The ids of the texts, or their positions if there are no ids."""
        ids: Sequence[Any] | None = getattr(self, "ids", None)
        return range(len(self)) if ids is None else ids

    def iter_note_texts(self) -> Iterator[str | None]:
        """Yield the text of each note, or ``None`` if it is missing, failed, has changed or came from a generator."""
        current_texts = iter(()) if self.texts is None else iter_texts(self.texts)
        for index in range(len(self)):
            current_text = next(current_texts, None)
            text = None
            if index not in self.results.errors and not self.results.is_missing(index):
                if index < len(self.preview_texts):
                    text = self.preview_texts[index]
                else:
                    with contextlib.suppress(OpenMedError):
                        text = self._check_unchanged(index, current_text)
            yield text

    def _spans(self, index: int) -> list[GoldSpan]:
        """Return the entities of a text as spans, or raise an error if they are tokens."""
        from .gold import GoldSpan

        if self.results.key == "entity":
            message = "The results contain tokens that are not aggregated to entities."
            raise ConfigurationError(message, "Annotate with aggregation_strategy='simple' or another strategy.")
        return [GoldSpan(*entity_span(entity)) for entity in self[index]]

    def score(self, gold: Any, *, seed: int = 0) -> Scores:
        """Return the scores of the entities against gold entities of the same texts.

        Args:
            gold: Result of :func:`read_annotations`. Alternatively, a list with the true entities of each text, as
                ``(start, end, label)`` or as mappings with ``start``, ``end`` and ``label`` or ``entity_group``. Or a DataFrame
                with one row per entity and the columns ``start``, ``end``, ``label``, and ``id`` or ``note``.
            seed: Seed of the resampling for the intervals.

        Returns:
            The scores by label and in total: strict (boundaries and label), partial (boundaries, and an overlap counts as half)
            and type (label, with an overlap), as in SemEval 2013 and nervaluate. Also the number of gold characters outside of
            all entities, and the missed and added entities, each with ``show()``. If texts and gold both have ids, only texts
            with gold are scored.

        Raises:
            ConfigurationError: If ``gold`` is not valid or belongs to other texts, or if the results are not entities.

        Example:
            >>> from openmed_nb import annotate
            >>> found = annotate(["She has asthma.", "No complaints."], "bundled_small", device="cpu")
            >>> scores = found.score([[(8, 14, "DISEASE")], [(3, 13, "DISEASE")]])
            >>> scores.total.strict.recall, [(span.text, span.start) for span in scores.missed]
            (0.5, [(1, 3)])
        """
        from .gold import align_gold, read_gold
        from .scores import score_spans

        seed = check_integer("seed", seed, 0)
        aligned = align_gold(read_gold(gold), self._keys)
        for index, text in enumerate(self.iter_note_texts()):
            expected = aligned.get(index)
            if text is None or expected is None:
                continue
            if expected.text not in {None, text}:
                message = f"The gold of text {index} belongs to a different text."
                raise ConfigurationError(message, "Pass the gold of the same texts.")
            if any(span.end > len(text) for span in expected.spans):
                message = f"The gold of text {index} has an entity that ends after the end of the text."
                raise ConfigurationError(message, "Pass offsets in characters of the text.")
        return score_spans(
            self.model,
            {index: None if index in self.results.errors else self._spans(index) for index in aligned},
            {index: text.spans for index, text in aligned.items()},
            self._show_span,
            seed,
        )

    def _show_span(self, span: ScoredSpan) -> AnnotatedText:
        """Return a text in which only one span is highlighted."""
        shown = self.show(span.text)
        word = shown.text[span.start : span.end]
        entity = {"entity_group": span.label, "score": 1.0, "word": word, "start": span.start, "end": span.end}
        title = f"Text {span.text}, characters {span.start} to {span.end}"
        return _ScoredText(**{**vars(shown), "entities": (entity,), "dropped": ()}, title=title)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Save the results to a file.

        A ``.jsonl`` file contains one object per note with ``id``, ``text`` and ``entities``, also for missing and failed notes.
        A ``.parquet`` or ``.csv`` file contains the rows of :meth:`to_frame`, without the texts of the notes. An existing file is
        replaced. Texts are written even with ``show_text=False``.

        Args:
            path: File whose suffix selects the format. It is readable by its owner only.

        Raises:
            ConfigurationError: If the suffix is unknown, or if the file cannot be written.

        Example:
            >>> import pathlib, tempfile
            >>> from openmed_nb import annotate
            >>> found = annotate(["She has asthma."], "bundled_small", device="cpu")
            >>> with tempfile.TemporaryDirectory() as folder:
            ...     found.save(f"{folder}/notes.csv")
            ...     print(pathlib.Path(folder, "notes.csv").read_text().splitlines()[0])
            note,entity_group,score,word,start,end
        """
        from .export.registry import save_annotations

        save_annotations(path, self)

    def export(self, format: str, path: str | os.PathLike[str]) -> ExportReport:  # noqa: A002 - public name
        """Write notes and entities in the format of an annotation tool or another library.

        Notes without a text are omitted and counted: missing and failed notes, notes that have changed, and those from a
        generator. :func:`read_annotations` reads the files.

        Args:
            format: ``"brat"``, ``"conll"``, ``"doccano"``, ``"label-studio"`` or ``"spacy"``.
            path: File, or a new folder for brat. Files are readable by their owner only.

        Returns:
            The number of notes and entities, and ``losses``: counts of what the format cannot contain.

        Raises:
            ConfigurationError: If the format is unknown, the results are not entities, or the file cannot be written.

        Example:
            >>> import tempfile
            >>> from openmed_nb import annotate
            >>> found = annotate(["She has asthma."], "bundled_small", device="cpu")
            >>> with tempfile.TemporaryDirectory() as folder:
            ...     print(found.export("conll", f"{folder}/notes.conll"))
            Exported 1 note with 1 entity to conll
              The file contains all of them.
        """
        from .export.notes import Export
        from .export.registry import export_notes

        return export_notes(format, path, Export(self._iter_exported_notes(), self.model))

    def to_arrow(self) -> pa.Table:
        """Return an Arrow table with one row per entity and the columns of :meth:`to_frame`, for polars, DuckDB and Parquet.

        Raises:
            ConfigurationError: If pandas or pyarrow is not installed.

        Example:
            >>> from openmed_nb import annotate
            >>> annotate(["She has asthma."], "bundled_small", device="cpu").to_arrow().column_names
            ['note', 'entity_group', 'score', 'word', 'start', 'end']
        """
        from .export.tables import to_arrow

        return to_arrow(self.to_frame())

    def to_spacy(self, nlp: Language) -> Iterator[Doc]:
        """Yield a spaCy document for each note that has a text.

        ``doc.ents`` contains the entities, and ``doc.spans["openmed"]`` those that overlap them. ``doc.user_data["id"]`` is the
        id of the note, or its position. At the end, a warning contains the number of entities that do not start and end at the
        boundaries of tokens.

        Args:
            nlp: Pipeline whose tokenizer is used.

        Raises:
            ConfigurationError: If ``nlp`` is not a spaCy pipeline, or if the results are not entities.

        Example:
            >>> import spacy
            >>> from openmed_nb import annotate
            >>> found = annotate(["She has asthma."], "bundled_small", device="cpu")
            >>> [doc.ents for doc in found.to_spacy(spacy.blank("en"))]
            [(asthma,)]
        """
        from .export.spacy import iter_docs

        return iter_docs(nlp, self._iter_exported_notes())

    def iter_records(self) -> Iterator[dict[str, Any]]:
        """Yield a JSON-compatible object for each note: its id, text, and entities or error."""
        records = self.to_dict()["texts"]
        for key, text, record in zip(self._keys, self.iter_note_texts(), records, strict=True):
            yield {"id": key if isinstance(key, int) else str(key), "text": text, **record}

    def _iter_exported_notes(self) -> Iterator[ExportedNote | None]:
        """Yield the notes to export, or ``None`` for a note without a text."""
        from .export.notes import ExportedNote

        for index, (key, text) in enumerate(zip(self._keys, self.iter_note_texts(), strict=True)):
            if text is None:
                yield None
                continue
            scores = tuple(float(entity["score"]) for entity in self[index])
            yield ExportedNote(key if isinstance(key, int) else str(key), text, tuple(self._spans(index)), scores)


@dataclass(frozen=True, repr=False)
class _ScoredText(AnnotatedText):
    """A text with an entity that was missed or added."""

    title: str = ""

    def to_report(self) -> Report:
        return replace(super().to_report(), title=self.title)
