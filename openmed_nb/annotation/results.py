"""Results of annotation: the entities of one or many texts, with compact storage, display and summaries."""

from __future__ import annotations

import copy
import hashlib
import json
import operator
import os
import sys
from array import array
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import cached_property, wraps
from itertools import chain, islice, pairwise, repeat
from numbers import Number
from pathlib import PurePath
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

from .._render.display import Displayable, Json, OverlappingSpan, Report, Table, TextSegment, pluralize, to_text
from .._utils.text import describe_names, describe_value, shorten, straighten_apostrophes
from .._utils.validation import (
    check_integer,
    check_names,
    check_number,
    invalid_type,
    invalid_value,
    is_finite_number,
    is_hashable,
    suggest,
)
from .._utils.warning import warn
from ..errors import ConfigurationError, InvalidTextError, OpenMedError, PositionError, UnmatchedIdsError
from ..models.registry import BUNDLED
from ..session import SESSION, check_options
from .boundaries import is_other_language
from .context import (
    ALL,
    CONTEXT_COLUMNS,
    CUE_SUFFIX,
    check_context_values,
    context_labels,
    context_mark,
    create_context_finder,
)
from .inputs import ID_COLUMN, NOTE_COLUMN, make_id_column
from .masking import (
    HIDDEN_TEXT_NOTICE,
    IS_MISSING,
    MAX_SHOWN_TEXT_CHARACTERS,
    PARTIAL,
    REPLACEMENT,
    LabeledSpan,
    MaskedText,
    MaskedTexts,
    Policy,
    are_identifying,
    compile_rules,
    describe_limits,
    find_rule_spans,
    long_text_sentence,
    mask_text,
    normalize_label,
    strip_bio_prefix,
    validate_policy,
)
from .matching import NoteKeys, are_positions, find_positions, list_positions
from .presentation import LiveNotes, displayable, entities_headline, label_noun, note_name, origin_details
from .references import (
    MISSING_FINGERPRINT,
    FileReference,
    TextReference,
    get_row_index,
    iter_texts,
    raise_if_error,
    read_text,
    text_fingerprint,
)

if TYPE_CHECKING:
    import numpy as np
    import pandas as pd
    import pyarrow as pa
    from spacy import Language
    from spacy.tokens import Doc

    from .export.notes import ExportedNote
    from .export.registry import ExportReport
    from .gold import GoldSpan
    from .review import Review
    from .scores import SchemeScores, ScoredSpan, Scores


# Maximum number of displayed table rows and characters of a text.
MAX_TABLE_ROWS = 10
MAX_TEXT_CHARACTERS = 2000

# Number of notes whose language is checked.
NUM_CHECKED_NOTES = 20

# Columns of numbers of a ResultStore. Only tokens that are not aggregated have an index.
_NUMBERS = ("score", "index", "start", "end")

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
    bare_label = strip_bio_prefix(label)
    starts_entity = bare_label != label and label[0] in "BSU"  # "B-", "S-" and "U-" start an entity.
    return LabeledSpan(start, end, bare_label, continues=not starts_entity)


def masked_spans(entities: Iterable[Mapping[str, Any]], dropped: Iterable[DroppedSpan]) -> list[LabeledSpan]:
    """Return the spans that masking replaces: the entities and the dropped spans."""
    spans = [_masked_span(entity) for entity in entities]
    return spans + [LabeledSpan(span.start, span.end, span.label, continues=True, source=PARTIAL) for span in dropped]


# The entities of a text, or an error.
TextResult = list[Entity] | OpenMedError


class ResultStore(Sequence[list[Entity]]):
    """Column-based store of the entities of texts, in the order of the texts. Lists of entities are created on access.

    Of each text, only a fingerprint is stored, which identifies the text when a run is resumed.

    Attributes:
        errors: Errors by text index: exceptions in the results of a chunk, messages in the results of a run. A text with an error
            has no entities.
        dropped: Labeled spans that are not in an entity, by text index. Masking replaces them too.
        fingerprints: Fingerprints of the texts. The results of a chunk have none.
        key: Key of the label in an entity: ``entity_group``, or ``entity`` for tokens that are not aggregated.
        labels: Labels of all entities, in the order of the texts. Each distinct string is stored once.
        words: Words of all entities.
        context: Further columns with one value for each entity; see :meth:`Annotations.with_context`.
    """

    def __init__(self, key: str = "entity_group") -> None:
        self.errors: dict[int, Any] = {}
        self.dropped: dict[int, tuple[DroppedSpan, ...]] = {}
        self.fingerprints = array("Q")
        self.key = key
        self.labels: list[str] = []
        self.words: list[str] = []
        self.context: dict[str, list[Any]] = {}
        self._text_offsets = array("q", [0])  # Index of the first entity of each text, and total.
        self._numbers = {name: array("d" if name == "score" else "I") for name in _NUMBERS}

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
        words: list[str],
        columns: Mapping[str, np.ndarray],
        dropped: dict[int, tuple[DroppedSpan, ...]],
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
        chunk = cls(key)
        chunk._text_offsets = array("q", text_offsets.tobytes())
        chunk.dropped = dropped
        chunk.labels = [names[label] for label in labels.tolist()]
        chunk.words = words
        for name, column in columns.items():
            chunk._numbers[name].extend(column.tolist())
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
        self.labels.extend([sys.intern(str(entity[self.key])) for entity in entities])
        self.words.extend([sys.intern(str(entity["word"])) for entity in entities])
        for name, numbers in self._numbers.items():
            numbers.extend([entity[name] for entity in entities if name != "index" or name in entity])
        # The result is complete only now, because adding an entity may fail.
        self._text_offsets.append(self._text_offsets[-1] + len(entities))

    def extend(self, fingerprints: Sequence[int], chunk: ResultStore) -> None:
        """Add the first results of a chunk, one per fingerprint."""
        count = len(fingerprints)
        first = len(self)
        rows = chunk._text_offsets[count]
        self.key = chunk.key
        self.labels.extend(map(sys.intern, chunk.labels[:rows]))
        self.words.extend(map(sys.intern, chunk.words[:rows]))
        for name, numbers in chunk._numbers.items():
            self._numbers[name].extend(numbers[:rows])
        # The results are complete only now, because adding them may be interrupted.
        self.fingerprints.extend(fingerprints)
        self.errors.update({first + index: str(error) for index, error in chunk.errors.items() if index < count})
        self.dropped.update({first + index: spans for index, spans in chunk.dropped.items() if index < count})
        total = self._text_offsets[-1]
        self._text_offsets.extend([total + offset for offset in chunk._text_offsets[1 : count + 1]])

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

    def _replace_attributes(self, **values: Any) -> ResultStore:
        store = copy.copy(self)
        vars(store).update(values)
        return store

    def take(self, rows: Sequence[int]) -> ResultStore:
        """Return the results of texts at the given indices, in this order."""
        entities: list[int] = []
        for row in rows:
            entities.extend(range(self._text_offsets[row], self._text_offsets[row + 1]))
        return self._select_entities(
            entities,
            self._counts()[rows],
            errors={index: self.errors[row] for index, row in enumerate(rows) if row in self.errors},
            dropped={index: self.dropped[row] for index, row in enumerate(rows) if row in self.dropped},
            fingerprints=array("Q", [self.fingerprints[row] for row in rows]),
        )

    def _select_entities(self, entities: Sequence[int], counts: np.ndarray, **values: Any) -> ResultStore:
        """Return a copy with the entities at the given indices, the number of entities of each text, and other attributes."""
        import numpy as np

        return self._replace_attributes(
            labels=[self.labels[entity] for entity in entities],
            words=[self.words[entity] for entity in entities],
            context={name: [column[entity] for entity in entities] for name, column in self.context.items()},
            _text_offsets=array("q", np.append(0, np.cumsum(counts)).astype(np.int64).tobytes()),
            _numbers={
                name: array(numbers.typecode, [numbers[entity] for entity in entities if numbers])
                for name, numbers in self._numbers.items()
            },
            **values,
        )

    def with_columns(self, context: Mapping[str, list[Any]]) -> ResultStore:
        """Return a copy with further columns."""
        return self._replace_attributes(context={**self.context, **context})

    def is_missing(self, index: int) -> bool:
        """Return whether a text is a missing value."""
        return self.fingerprints[index] == MISSING_FINGERPRINT and index not in self.errors

    @property
    def missing(self) -> tuple[int, ...]:
        """The indices of missing texts."""
        return tuple(filter(self.is_missing, range(len(self))))

    def __len__(self) -> int:
        return len(self._text_offsets) - 1

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, slice):
            return [self[text_id] for text_id in range(len(self))[index]]
        text_id = range(len(self))[index]
        return self._entities(self._text_offsets[text_id], self._text_offsets[text_id + 1])

    def _entities(self, start_row: int, stop_row: int) -> list[Entity]:
        """Return entities as mappings with their keys in the order of transformers."""
        values = self._values(start_row, stop_row)
        return [dict(zip(values, row, strict=True)) for row in zip(*values.values(), strict=True)]

    def _values(self, start_row: int, stop_row: int) -> dict[str, Sequence[Any]]:
        """Return the values of entities by key."""
        numbers = {name: values[start_row:stop_row] for name, values in self._numbers.items()}
        index = {"index": numbers["index"]} if numbers["index"] else {}
        return {
            self.key: self.labels[start_row:stop_row],
            "score": numbers["score"],
            **index,
            "word": self.words[start_row:stop_row],
            "start": numbers["start"],
            "end": numbers["end"],
            **{name: context[start_row:stop_row] for name, context in self.context.items()},
        }

    def filter(self, labels: set[str], min_score: float, context: Mapping[str, Any]) -> ResultStore:
        """Return a copy with the entities that have one of the labels, at least a score, and a context.

        Args:
            labels: Casefolded labels, with or without the prefix of a token; empty for all labels.
            min_score: Minimum score.
            context: Required value of columns of :attr:`context`, or a list of such values.
        """
        import numpy as np

        def is_selected(label: str, score: float) -> bool:
            return score >= min_score and (not labels or label.casefold() in labels or normalize_label(label) in labels)

        columns = self.columns()
        kept = np.array(list(map(is_selected, columns[self.key], columns["score"])), bool)
        for name, value in context.items():
            kept &= np.isin(columns[name], value)
        dropped: dict[int, tuple[DroppedSpan, ...]] = {}
        for text_id, spans in self.dropped.items():
            if selected := tuple(span for span in spans if is_selected(span.label, span.score)):
                dropped[text_id] = selected
        counts = np.bincount(columns[NOTE_COLUMN][kept], minlength=len(self))
        return self._select_entities(np.flatnonzero(kept).tolist(), counts, dropped=dropped)

    def _counts(self) -> np.ndarray:
        """Return the number of entities of each text."""
        import numpy as np

        return np.diff(np.array(self._text_offsets))

    def text_fingerprint(self) -> str:
        """Return a fingerprint of all texts and their order."""
        return hashlib.blake2b(self.fingerprints.tobytes(), digest_size=8).hexdigest()

    def columns(self) -> dict[str, np.ndarray]:
        """Return all entities as columns: the index of the note, and the values of each entity."""
        import numpy as np

        columns = {NOTE_COLUMN: np.repeat(np.arange(len(self)), self._counts())}
        for name, values in self._values(0, self._text_offsets[-1]).items():
            dtype: type = object
            if name in _NUMBERS:
                dtype = float if name == "score" else np.int64
            elif name in self.context and values:
                dtype = type(values[0])
            columns[name] = np.array(values, dtype)
        return columns


MethodT = TypeVar("MethodT", bound=Callable[..., Any])


def _with_checked_options(method: MethodT) -> MethodT:
    """Return a public method whose error about an unknown option lists its options.

    It is in this module, because doctest omits the examples of functions with the globals of another module.
    """

    @wraps(method)
    def call(*arguments: Any, **options: Any) -> Any:
        check_options(method, options, ())
        return method(*arguments, **options)

    return call  # type: ignore[return-value]  # wraps() keeps the signature.


@dataclass(frozen=True, repr=False, eq=False)
class AnnotatedText(Displayable, Sequence[Entity]):
    """The entities of one text: a sequence of dictionaries as in the pipeline of transformers.

    Its display marks the context of entities, such as "negated", by the English rules. The entities have it only after
    :meth:`with_context`. ``%config OpenMedMagics.context = False`` removes these marks.

    Attributes:
        found: Annotations of this text alone.
        title: Headline, or an empty string for the number of entities.
    """

    found: Annotations
    title: str = ""

    if not TYPE_CHECKING:  # A type checker knows the attributes.

        def __getattr__(self, name: str) -> Any:
            if name in _DOCUMENTED_NAMES:
                raise AttributeError(f"A single text has no attribute {name!r}. Use its annotations: .found.{name}.")
            return super().__getattr__(name)

    def __len__(self) -> int:
        return len(self.entities)

    def __getitem__(self, index: Any) -> Any:
        return self.entities[index]

    @property
    def text(self) -> str:
        """The annotated text."""
        return self.found.preview_texts[0]

    @cached_property
    def entities(self) -> tuple[Entity, ...]:
        """Mappings with ``entity_group`` (or ``entity``), ``score``, ``word``, ``start`` and ``end``."""
        return tuple(self.found.results[0])

    @property
    def model(self) -> str:
        """Name of the model."""
        return self.found.model

    @property
    def device(self) -> str:
        """Device of the model."""
        return self.found.device

    @property
    def missing(self) -> bool:
        """Whether the input was a missing value."""
        return self.found.results.is_missing(0)

    def to_dict(self) -> dict[str, Any]:
        """Return text, entities, model and device as JSON-compatible data."""
        (record,) = self.found.to_dict()["texts"]
        return {"text": self.text, **record, "model": self.model, "device": self.device}

    def to_report(self) -> Report:
        """Return the text with highlighted entities, or a table of the entities if the text is hidden."""
        found = self.found
        # The model did not find a missed entity.
        details = "" if self.title else origin_details(self.model, self.device, found.seconds)
        if self.missing:
            return Report(entities_headline({}, None), (IS_MISSING,), details=details)
        entities = self._displayed_entities()
        counts = Counter(entity_span(entity)[2] for entity in entities)
        context = Counter(tuple(labels) for labels in map(context_labels, entities) if labels)
        title = self.title or entities_headline(counts, found.known_labels, context=context)
        notices = (*found.language_notice, *found.filters)
        if not found.show_text:
            return Report(title, (*notices, HIDDEN_TEXT_NOTICE), (self._table(),), details=details)
        sentences = (*notices, *long_text_sentence(self.text))
        segments = found.note_segments(0, self.text, entities, MAX_SHOWN_TEXT_CHARACTERS)
        return Report(title, sentences, segments=tuple(segments), details=details)

    def __str__(self) -> str:
        # The table contains the scores, which highlighted text does not show.
        return to_text(replace(self.final_report(), tables=(self._table(),)))

    def _displayed_entities(self) -> Sequence[Entity]:
        """Return the entities with the context to display, which is not determined again."""
        found = self.found
        is_marked = SESSION.should_mark_context and found.show_text and not found.results.context
        # Names and dates have no context. A model whose labels are unknown may find them.
        if not is_marked or are_identifying(found.known_labels or ()):
            return self.entities
        return self.with_context(ALL, *(name + CUE_SUFFIX for name in CONTEXT_COLUMNS)).entities

    def _table(self) -> Table:
        rows = []
        for entity in self._displayed_entities():
            start, end, label = entity_span(entity)
            word = " ".join(self.text[start:end].split()) if self.found.show_text else ""
            rows.append((label, f"{entity['score']:.2f}", f"{start}-{end}", word, context_mark(entity, with_cues=True)))
        return Table("Entities", ("label", "score", "characters", "text", "context"), tuple(rows))

    def with_context(
        self, *columns: str, language: str = "en", cues: Mapping[str, Mapping[str, Sequence[str]]] | None = None
    ) -> AnnotatedText:
        """Return the annotated text with the context of each entity; see :meth:`Annotations.with_context`.

        Example:
            >>> from openmed_nb import annotate
            >>> annotate("No asthma.", "bundled_small", device="cpu").with_context()[0]["negated"]
            True
        """
        return AnnotatedText(self.found.with_context(*columns, language=language, cues=cues))

    def mask(self, replacement: Policy = REPLACEMENT, *, rules: Mapping[str, str] | None = None) -> MaskedText:
        """Replace the entities of the text; see :meth:`Annotations.mask`.

        Example:
            >>> from openmed_nb import annotate
            >>> annotate("She has asthma.", "bundled_small", device="cpu").mask("[{label}]").text
            'She has [DISEASE].'
        """
        return self.found.mask(replacement, rules=rules).texts[0]

    def filter(self, *labels: str, min_score: float = 0.0, **context: bool | str | Sequence[str]) -> AnnotatedText:
        """Return the text with only the entities that have one of the labels, a score and a context; see :meth:`Annotations.filter`.

        Example:
            >>> from openmed_nb import annotate
            >>> len(annotate("She has asthma.", "bundled_small", device="cpu").filter(min_score=1.0))
            0
        """
        return AnnotatedText(self.found.filter(*labels, min_score=min_score, **context))


def _highlight_entities(text: str, entities: Iterable[Mapping[str, Any]]) -> Iterator[TextSegment]:
    """Yield the segments of a text with highlighted entities. Entities that overlap are in one segment."""
    position = 0
    for group in _group_overlapping(entities):
        start = group[0]["start"]
        yield TextSegment(text[position:start])
        position = max(entity["end"] for entity in group)
        spans = []
        for entity in group:
            entity_start, entity_end, label = entity_span(entity)
            details = f"characters {entity_start} to {entity_end}, {context_mark(entity, with_cues=True)}".rstrip(", ")
            score = f"{entity['score']:.3f}"
            spans.append(
                OverlappingSpan(entity_start - start, entity_end - start, label, score, details, context_mark(entity))
            )
        if len(spans) > 1:
            yield TextSegment(text[start:position], spans=tuple(spans))
        else:
            (span,) = spans
            yield TextSegment(text[start:position], span.label, span.score, span.details, context=span.context)
    yield TextSegment(text[position:])


def _group_overlapping(entities: Iterable[Mapping[str, Any]]) -> list[list[Mapping[str, Any]]]:
    """Return the entities of each region of a text in which entities overlap. Empty entities are ignored."""
    groups: list[list[Mapping[str, Any]]] = []
    region_end = 0
    for entity in sorted(entities, key=operator.itemgetter("start", "end")):
        if entity["end"] <= entity["start"]:
            continue
        if entity["start"] >= region_end:
            groups.append([])
        groups[-1].append(entity)
        region_end = max(region_end, entity["end"])
    return groups


def _warn_unknown_labels(labels: Iterable[str], present: Iterable[str], known: Iterable[str] | None) -> None:
    """Warn about labels that no entity has and the model does not predict. Without entities, there is no warning."""
    available = {normalize_label(label) for label in present}
    if not available:
        return
    available |= {normalize_label(label) for label in known or ()}
    for label in labels:
        if normalize_label(label) not in available:
            warn(f"No entity has the label {describe_value(label)}. {suggest(label.casefold(), sorted(available))}")


@dataclass(frozen=True, repr=False)
class Summary(Displayable):
    """Counts of the entities in many texts.

    Attributes:
        model: Name of the model.
        device: Device of the model.
        texts: Number of texts.
        texts_without_entities: Number of texts without entities, excluding missing texts and texts with errors.
        errors: Error messages by text index.
        labels: Number of entities by label.
        words: Number of occurrences by text in lower case and with typewriter apostrophes, most frequent first. It is that of the
            note if the notes are in memory, and otherwise the word of the model.
        filters: Filters applied with :meth:`Annotations.filter`, as sentences.
        missing: Number of missing values.
        known_labels: Labels that the model can predict and that are not ignored, or ``None`` if unknown.
        seconds: Duration of the run without loading the model, or ``None`` if unknown.
    """

    model: str
    device: str
    texts: int
    texts_without_entities: int
    errors: Mapping[int, str]
    labels: Mapping[str, int]
    words: Mapping[str, int]
    filters: tuple[str, ...] = ()
    missing: int = 0
    known_labels: tuple[str, ...] | None = None
    seconds: float | None = field(default=None, compare=False)

    JSON_EXCLUDE = ("known_labels", "seconds")

    def to_report(self) -> Report:
        """Return the counts as sentences and tables."""
        sentences = [*self.filters]
        if self.texts_without_entities:
            count = pluralize(self.texts_without_entities, "note has", "notes have")
            sentences.append(f"{count} text but no entities.")
        if self.missing:
            sentences.append(f"{pluralize(self.missing, 'note has', 'notes have')} no text.")
        if self.errors:
            sentences.append(f"{pluralize(len(self.errors), 'note')} could not be read.")
        # The title names a single label that is a word.
        labels = {} if label_noun(self.labels) else self.labels
        tables = (
            Table("Notes with errors", ("note", "error"), _rows(self.errors, MAX_TABLE_ROWS)),
            Table("Entities by label", ("label", "count"), _rows(labels)),
            Table("Most frequent entities", ("text", "count"), _rows(self.words, MAX_TABLE_ROWS)),
        )
        return Report(
            entities_headline(self.labels, self.known_labels, self.texts),
            tuple(sentences),
            tables,
            details=origin_details(self.model, self.device, self.seconds),
        )


def _rows(values: Mapping[Any, Any], limit: int | None = None) -> tuple[tuple[str, ...], ...]:
    return tuple((str(name), str(value)) for name, value in islice(values.items(), limit))


# Names of annotations that completion lists. The others belong to the package.
_DOCUMENTED_NAMES = (
    "at",
    "by_patient",
    "device",
    "errors",
    "export",
    "filter",
    "mask",
    "missing",
    "model",
    "position",
    "review",
    "save",
    "score",
    "show",
    "sources",
    "summary",
    "to_arrow",
    "to_dict",
    "to_frame",
    "to_json",
    "to_spacy",
    "with_context",
)


def _are_files(texts: Any) -> bool:
    return isinstance(texts, tuple) and len(texts) > 0 and all(isinstance(text, FileReference) for text in texts)


@dataclass(frozen=True, repr=False, eq=False)
class Annotations(LiveNotes, Sequence[list[Entity]]):
    """The entities of many texts: a sequence with one list per text, in the order of the texts.

    ``found[17]`` contains the entities of one text, :meth:`show` displays this text with highlighted entities, and :meth:`filter`
    selects entities by label or score.

    Attributes:
        results: Entities of all texts.
        preview_texts: The first texts, for display.
        model: Name of the model.
        device: Device of the model.
        show_text: Whether to display texts and their words.
        texts: The texts as passed, not copied, or ``None`` if they came from an iterator.
        ids: One id per text: those that were passed, the keys of a mapping, or the index of a Series; otherwise ``None``.
            ``found["a7"]`` and ``found.show("a7")`` select a text by its id. An integer is a position, and an error if the ids
            are numbers, unless they are the positions; :meth:`at` always takes a position. Loops and slices go by position.
        unfinished: Whether the results are attached to an error. Results and texts are not pickled then.
        known_labels: Labels that the model can predict and that are not ignored, or ``None`` if unknown.
        seconds: Duration of the run without loading the model, or ``None`` if it was resumed.
        id_name: Name of the ids as a column of :meth:`to_frame`.
        text_name: Name of the column of the texts, or ``None``.
        filters: Filters applied with :meth:`filter`, as sentences.
        num_resumed: Number of notes with results of an earlier run; see ``resume`` of :func:`annotate`.
    """

    results: ResultStore
    preview_texts: tuple[str, ...]
    model: str
    device: str
    show_text: bool = True
    texts: Any = None
    ids: Any = None
    unfinished: bool = False
    known_labels: tuple[str, ...] | None = None
    seconds: float | None = None
    id_name: str = ID_COLUMN
    text_name: str | None = None
    filters: tuple[str, ...] = ()
    num_resumed: int = 0

    def __getstate__(self) -> dict[str, Any]:
        """Return the state for pickling.

        Errors are sent to logs and to other processes, so the results that are attached to them must not contain texts.
        """
        # Cached properties such as ``sources`` are excluded.
        state = {field.name: getattr(self, field.name) for field in fields(self)}
        if self.unfinished:
            state |= {"results": ResultStore(), "preview_texts": (), "texts": None, "ids": None}
        return state

    def __dir__(self) -> list[str]:
        """Return the names that completion lists: those of the documentation."""
        return [*_DOCUMENTED_NAMES, *(name for name in super().__dir__() if name.startswith("_"))]

    def __len__(self) -> int:
        return len(self.results)

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, slice):
            return self.results[index]
        position = self._locate(index)
        try:
            return self.results[position]
        except (IndexError, TypeError):
            message = f"{describe_value(position)} is not the position of one of the {pluralize(len(self), 'note')}."
            raise PositionError(message, f"Pass a position below {len(self):,}; the first is 0.") from None

    def __iter__(self) -> Iterator[list[Entity]]:
        return iter(self.results)

    def __reversed__(self) -> Iterator[list[Entity]]:
        return reversed(self.results)

    def position(self, note_id: Any) -> int:
        """Return the index of the text with an id.

        Args:
            note_id: An id as in :attr:`ids`.

        Raises:
            ConfigurationError: If no text or several texts have the id.

        Example:
            >>> from openmed_nb import annotate
            >>> found = annotate({"a7": "No pain.", "b2": "She has asthma."}, "bundled_small", device="cpu")
            >>> found.position("b2"), [entity["word"] for entity in found["b2"]]
            (1, ['asthma'])
        """
        indices = self._indices_by_id.get(note_id, ()) if is_hashable(note_id) else ()
        if len(indices) != 1:
            message = "No text has this id."
            if indices:
                message = f"{len(indices)} texts have this id, at positions {list_positions(indices)}."
            remedy = "Pass one of found.ids, which are from ids= or id_column=, or a position, from 0, to found.at()."
            raise ConfigurationError(message, remedy)
        return indices[0]

    def at(self, position: int) -> AnnotatedText:
        """Return the text at a position with its entities.

        Args:
            position: Position of the text, from 0. It is not an id.

        Raises:
            ConfigurationError: As in :meth:`show`.
            InvalidTextError: As in :meth:`show`.

        Example:
            >>> from openmed_nb import annotate
            >>> found = annotate({1: "No pain.", 2: "She has asthma."}, "bundled_small", device="cpu")
            >>> [entity["word"] for entity in found.at(1)], found.position(2)
            (['asthma'], 1)
        """
        otherwise = "" if self._own_ids is None else ", or one of found.ids to found.show()"
        index = check_integer("position", position, 0, len(self) - 1, otherwise)
        if message := self.results.errors.get(index):
            raise InvalidTextError(message, "Select a different text; .errors contains the failed texts.")
        text = raise_if_error(next(self._read_texts(index))) or ""
        return AnnotatedText(
            replace(
                self,
                results=self.results.take([index]),
                preview_texts=(text,),
                texts=(text,),
                ids=None if self.ids is None else [self.ids[index]],
                seconds=self.seconds if len(self) == 1 else None,
            )
        )

    def _locate(self, key: Any) -> Any:
        """Return the position of the text with an id that is a string. An integer is a position, if it can be nothing else."""
        if not isinstance(key, Number):
            return self.position(key)
        if self._has_numbers_as_ids:
            message = f"{describe_value(key)} can be the id of a note or its position."
            remedy = (
                "Pass the position to found.at(), as in found.at(1), or in found.at(found.position(1)) for the id 1."
            )
            raise ConfigurationError(message, remedy)
        return key

    @cached_property
    def _has_numbers_as_ids(self) -> bool:
        """Whether ids are numbers, but not the positions."""
        has_numbers = self.ids is not None and any(isinstance(note_id, Number) for note_id in self.ids)
        return has_numbers and not are_positions(self.ids)

    @cached_property
    def _indices_by_id(self) -> Mapping[Any, Sequence[int]]:
        return find_positions(() if self.ids is None else self.ids)

    @property
    def row_index(self) -> Any:
        """Index of the Series or column of the texts, or ``None``."""
        return get_row_index(self.texts)

    @property
    def _own_ids(self) -> list[Any] | None:
        """The ids of the texts in addition to the index of a Series, or ``None``."""
        return self.ids if type(self.ids) is list else None

    @property
    def errors(self) -> Mapping[int, str]:
        """Error messages of failed texts, by text index."""
        return dict(self.results.errors)

    @property
    def missing(self) -> tuple[int, ...]:
        """The indices of missing values such as ``None`` or NaN. They have no entities."""
        return self.results.missing

    @cached_property
    def sources(self) -> tuple[str | None, ...]:
        """The file path of each text, or ``None`` for a text that is not a file.

        Only results contain paths. Errors, reports and logs do not, because a file name can contain the name of a patient.
        """
        return tuple(text.path for text in self.texts[: len(self)]) if _are_files(self.texts) else (None,) * len(self)

    def to_dict(self) -> dict[str, Any]:
        """Return model, device and texts as JSON-compatible data.

        Each text has ``entities``, an ``error`` or ``missing``, and an ``id`` if the texts have :attr:`ids`. A text from a file also
        has a ``source``; see :attr:`sources`.
        """
        return {"model": self.model, "device": self.device, "texts": [*self._records()]}

    def _records(self) -> Iterator[dict[str, Any]]:
        """Yield id, source, and entities or error of each note as JSON-compatible data."""
        for index, entities in enumerate(self):
            record: dict[str, Any] = {} if self.ids is None else {"id": self._json_id(index)}
            if self.sources[index] is not None:
                record["source"] = self.sources[index]
            if index in self.results.errors:
                record["error"] = self.results.errors[index]
            elif self.results.is_missing(index):
                record["missing"] = True
            else:
                record["entities"] = entities
            yield record

    def _json_id(self, index: int) -> Any:
        """Return the id of a note. JSON has neither NaN nor infinity."""
        note_id = None if self.ids is None else self.ids[index]
        return note_id if note_id is None or is_finite_number(note_id) else str(note_id)

    def to_json(self) -> Json:
        """Return :meth:`to_dict` as JSON."""
        return Json(json.dumps(self.to_dict(), ensure_ascii=False))

    @_with_checked_options
    def to_frame(self, table: pd.DataFrame | None = None) -> pd.DataFrame:
        """Return a DataFrame with one row per entity.

        The columns are ``note_index`` (position of the text), the ids under their name (``note_id`` if they have none), the label,
        ``score``, ``word`` (as the tokenizer decodes it), ``span_text`` (the characters of the note, to count), ``start`` and
        ``end``, and the columns of :meth:`with_context`. If the texts are files, the column ``source`` contains their paths; see
        :attr:`sources`. ``span_text`` is missing for a note that cannot be read again, such as one of a generator.

        Args:
            table: Table of the notes, whose other columns are added to the entities of each note. Its rows are matched by the
                column of the ids if there is one, otherwise by the index, and their texts are compared.

        Returns:
            The DataFrame. If the texts came from a Series, it has the index of the Series. The suffix ``_index`` is added to an
            index name that is also a column name. Otherwise, the rows are numbered.

        Raises:
            ConfigurationError: If pandas is not installed, or if the table has columns of the same names.
            UnmatchedIdsError: If a note does not have exactly one row in the table.

        Example:
            >>> import pandas as pd
            >>> from openmed_nb import annotate
            >>> notes = pd.DataFrame({"note": ["Has asthma.", "Well."], "patient": ["p1", "p2"]})
            >>> found = annotate(notes, "bundled_small", device="cpu", text_column="note")
            >>> found.to_frame(notes)[["patient", "span_text"]].to_numpy().tolist()
            [['p1', 'asthma']]
        """
        frame = self.to_keyed_frame(self._entity_columns())
        if table is None:
            return frame
        import pandas as pd

        rows = self._note_keys.find_rows(table)
        others = table.drop(columns=[self.id_name, self.text_name], errors="ignore")
        repeated = [name for name in others.columns if name in frame.columns]
        if repeated:
            message = f"The table has a column {describe_value(repeated[0])}, as the table of entities."
            raise ConfigurationError(message, "Rename the column.")
        others = others.take([rows[note] for note in frame[NOTE_COLUMN]]).set_axis(frame.index)
        return pd.concat([frame, others], axis=1)

    @_with_checked_options
    def by_patient(self, groups: pd.Series | Sequence[Any]) -> pd.DataFrame:
        """Return a DataFrame with one row per patient and disease, for counts of patients instead of mentions.

        Entities that are negated, hypothetical, or of another person are not counted. Possible and historical ones are. If the
        entities have no context, the English rules determine it; see :meth:`with_context`. Use :meth:`filter` first to select
        labels, or to leave out possible entities, as in ``found.filter(uncertain=False)``. The entities are those of
        the model, without the corrections of a :meth:`review`.

        Args:
            groups: The patient of each note, such as the column of the table that you annotated, or another group such as the ward.
                Its rows are matched by the ids in an index with their name, or by the index of the annotated table. A column has
                no texts to compare, so an index that only numbers the rows must not be sorted. A list of notes needs
                a list of groups, in the same order.

        Returns:
            A DataFrame with the group under the name of the column (``group`` if it has none), ``span_text`` in lower case and
            with typewriter apostrophes, and the numbers of ``mentions`` and ``notes``. Each note counts, also if its id occurs
            twice. Notes without a group do not count, with a warning.

        Raises:
            ConfigurationError: If ``groups`` is neither a column nor a list, if the entities have only a part of the context, or as for
                :meth:`with_context`.
            UnmatchedIdsError: If a note does not have exactly one group.

        Example:
            >>> import pandas as pd
            >>> from openmed_nb import annotate
            >>> notes = pd.DataFrame({"note": ["Has asthma.", "Asthma is stable.", "No asthma."], "patient": ["p1", "p1", "p2"]})
            >>> found = annotate(notes, "bundled_small", device="cpu", text_column="note")
            >>> found.by_patient(notes["patient"]).to_dict("records")
            [{'patient': 'p1', 'span_text': 'asthma', 'mentions': 2, 'notes': 2}]
        """
        import pandas as pd

        self._check_aggregated()
        if not isinstance(groups, (pd.Series, list, tuple)):
            raise invalid_type("groups", groups, "Pass a column of the table of the notes, such as notes['patient'].")
        column = pd.Series(groups)
        if not all(map(is_hashable, column)):
            raise ConfigurationError(
                "The groups contain lists or other values without a hash.", "Pass strings or numbers."
            )
        if isinstance(groups, pd.Series):
            table = pd.DataFrame(index=column.index)
            if self._own_ids and column.index.name == self.id_name:
                table = table.reset_index()
            try:
                column = column.take(self._note_keys.find_rows(table))
            except UnmatchedIdsError as error:
                raise UnmatchedIdsError(error.message, self._groups_remedy(column.name), error.unmatched) from None
        elif self.row_index is not None or len(groups) != len(self):
            message = f"A list of {len(groups):,} groups cannot be matched with the {len(self):,} notes."
            raise UnmatchedIdsError(message, self._groups_remedy(None))
        if num_missing := int(column.isna().sum()):
            warn(f"{pluralize(num_missing, 'note has', 'notes have')} no group. Their entities are not counted.")
        found = self if self.results.context else self.with_context("all")
        found = found.filter(negated=False, experiencer="patient", temporality=["recent", "historical"])
        rows: list[tuple[Any, str, int]] = []
        words = found.iter_counted_words(map(raise_if_error, self._read_texts()))
        for note, (group, note_words) in enumerate(zip(column.tolist(), words, strict=True)):
            rows += [(group, word, note) for word in note_words]
        frame = pd.DataFrame(rows, columns=["group", "span_text", "note"])
        counts = frame.groupby(["group", "span_text"])["note"].agg(mentions="size", notes="nunique").reset_index()
        is_free = column.name is not None and column.name not in counts.columns
        return counts.rename(columns={"group": column.name}) if is_free else counts

    def _groups_remedy(self, name: Any) -> str:
        """Return the remedy for groups of :meth:`by_patient`, such as a column with a name, that do not match the notes."""
        column = f"[{describe_names([str(name or 'patient')])!r}]"
        if self._own_ids and len(self._indices_by_id) == len(self):
            ids = f"set_index({describe_names([self.id_name])!r})"
            return f"Pass the column with the ids of all notes as its index, as in notes.{ids}{column}."
        if self.row_index is None:
            return f"Pass a list with one group per note, in the order of the notes, such as notes{column}.tolist()."
        return f"Undo a sort with notes.sort_index(), or annotate the table again. Pass its whole column notes{column}."

    def to_frame_with_ids(self) -> pd.DataFrame:
        """Return :meth:`to_frame` for a file, which has no index: the ids of a Series are in a column."""
        return self.to_keyed_frame(self._entity_columns(), has_index=False)

    def _entity_columns(self) -> dict[str, Any]:
        """Return the columns of all entities, with the characters of each one in its note, or ``None`` if it cannot be read again."""
        surface_forms: list[str | None] = []
        for text, entities in zip(self.iter_note_texts(), self, strict=True):
            surface_forms += [None if text is None else text[entity["start"] : entity["end"]] for entity in entities]
        columns: dict[str, Any] = {}
        for name, values in self.results.columns().items():
            columns[name] = values
            if name == "word":
                columns["span_text"] = surface_forms
        return columns

    @property
    def _note_keys(self) -> NoteKeys:
        """Ids, index and fingerprints of the notes."""
        return NoteKeys(self._own_ids, self.id_name, self.row_index, self.text_name, self.results.fingerprints)

    def to_keyed_frame(self, columns: Mapping[str, Any], has_index: bool = True) -> pd.DataFrame:
        """Return columns as a DataFrame with the ids, paths and index of the notes that the column ``note_index`` contains.

        Args:
            columns: The columns.
            has_index: Whether the frame has the index of a Series. Otherwise, ids in this index are in a column.
        """
        try:
            import pandas as pd
        except ImportError as error:
            raise ConfigurationError("to_frame() needs pandas.", "Install it: python -m pip install pandas.") from error
        notes = columns[NOTE_COLUMN]
        frame = pd.DataFrame(columns)
        ids = self._own_ids
        id_name = self.id_name
        row_index = self.row_index
        if ids is None and not (has_index or row_index is None or are_positions(row_index)):
            ids = row_index
            id_name = row_index.name if isinstance(row_index.name, str) else ID_COLUMN
        if ids is not None:
            frame.insert(1, ID_COLUMN if id_name in frame else id_name, make_id_column([ids[index] for index in notes]))
        if _are_files(self.texts):
            frame["source"] = make_id_column([self.sources[index] for index in notes])
        if row_index is None or not has_index:
            return frame
        index = row_index.take(notes)
        names = [f"{name}_index" if name in frame else name for name in index.names]
        return frame.set_axis(index.set_names(names))

    def iter_note_texts(self, start: int = 0, *, verify: bool = True) -> Iterator[str | None]:
        """Yield the original texts. Files are read again.

        Args:
            start: Index of the first text.
            verify: Whether to compare each text with its fingerprint, which takes most of the time.

        Yields:
            The text, or ``None`` if it is missing, has an error, has changed since it was annotated, or came from a generator and is
            not one of the stored first texts.
        """
        for text in self._read_texts(start, verify):
            yield None if isinstance(text, OpenMedError) else text

    def _read_texts(self, start: int = 0, verify: bool = True) -> Iterator[str | OpenMedError | None]:
        """Yield the text of each note, the error that prevents reading it again, or ``None`` for a missing or failed note."""
        texts = () if self.texts is None else self.texts
        if isinstance(texts, (list, tuple)):  # A text at the end is read as quickly as the first.
            current_texts: Iterator[Any] = map(texts.__getitem__, range(start, len(texts)))
        else:
            current_texts = islice(iter_texts(texts), start, None)
        for index in range(start, len(self)):
            current_text = next(current_texts, None)
            if index in self.results.errors or self.results.is_missing(index):
                yield None
            elif index < len(self.preview_texts):
                yield self.preview_texts[index]
            else:
                yield self._read_again(index, current_text, verify)

    def _read_again(self, index: int, text: Any, verify: bool) -> str | OpenMedError:
        """Return the contents of a text, or an error if it has changed since it was annotated."""
        remedy = "Annotate the text again to display it."
        if self.texts is None:
            message = f"Text {index} came from a generator; only the first {len(self.preview_texts)} were stored."
            return ConfigurationError(message, remedy)
        text = text.refresh() if isinstance(text, TextReference) else text
        if verify and text_fingerprint(text) != self.results.fingerprints[index]:
            return ConfigurationError(f"Text {index} has changed since it was annotated.", remedy)
        contents: str | OpenMedError = read_text(text, index)
        return contents

    def _create_view(self) -> Any:
        """Return a browser of the notes, with a search box and filters."""
        from .browsing import BrowserView, NoteListing

        return BrowserView(NoteListing(self))

    @_with_checked_options
    def show(self, number: int | str | None = None) -> AnnotatedText | Annotations:
        """Return one of the texts with highlighted entities, or the annotations, whose display is a browser of the notes.

        Args:
            number: Position of the text, from 0, or its id if that is a string; see :attr:`ids` for ids that are numbers. If
                ``None``, all texts.

        Returns:
            The annotated text, as ``annotate`` returns it for a single text. Files and texts that are not stored are read again.

        Raises:
            ConfigurationError: If the index is out of range, if the text has changed since it was annotated, or if it came from a
                generator and is not one of the stored first texts.
            InvalidTextError: If the text has an error or cannot be read again.

        Example:
            >>> from openmed_nb import annotate
            >>> print(annotate(["No pain.", "She has asthma."], "bundled_small", device="cpu").show(1))
            1 mention of a disease found
              Model: bundled_small, device: cpu
            She has [asthma](DISEASE).
            Labels: DISEASE (1 entity)
            Entities
              label    score  characters  text
              DISEASE  1.00   8-14        asthma
        """
        return self if number is None else self.at(self._locate(number))

    @_with_checked_options
    def mask(self, replacement: Policy = REPLACEMENT, *, rules: Mapping[str, str] | None = None) -> MaskedTexts:
        r"""Replace the entities of the texts, such as the personal data that a privacy filter detects.

        Masking is not guaranteed to be complete, because entities that the model misses remain. Measure the recall of the model on
        similar texts before you rely on it.

        Args:
            replacement: Replacement of an entity, with ``{label}`` as placeholder of its label. Alternatively, a mapping of labels to
                replacements. Labels are not case-sensitive. Labels that are not in the mapping are replaced by ``"[{label}]"``;
                :meth:`filter` selects the labels to mask.
            rules: Regular expressions of the package ``regex`` by label, such as ``{"MRN": r"\bMRN[:# ]*\d{6,}\b"}``. Their matches
                are replaced too. A text for which a rule takes more than a second has an error.

        Returns:
            A sequence that displays the first texts, with ``to_frame(table)`` and ``counts`` by label and source. Each item has the masked
            ``text``, and ``spans`` with offsets in both texts. Spans are extended to whole words. A failed text has an ``error`` and
            no text. A missing value is ``missing``.

        Raises:
            ConfigurationError: If the replacement or a rule is not valid, if a text has changed since it was annotated, or if it came from a
                generator and is not one of the stored first texts.
            InvalidTextError: If a text cannot be read again.

        Example:
            >>> from openmed_nb import annotate
            >>> found = annotate(["She has asthma.", "No complaints."], "bundled_small", device="cpu")
            >>> [masked.text for masked in found.mask({"DISEASE": "***"})]
            ['She has ***.', 'No complaints.']
        """
        policy = validate_policy(replacement)
        compiled_rules = compile_rules(rules)
        results = self.results
        if isinstance(policy, Mapping):
            labels = {*results.labels, *(rule.label for rule in compiled_rules)}
            labels |= {span.label for spans in results.dropped.values() for span in spans}
            _warn_unknown_labels(policy, labels, self.known_labels)
        limits = describe_limits(self.known_labels, self.filters, len(compiled_rules))
        masked: list[MaskedText] = []
        for index, text in enumerate(map(raise_if_error, self._read_texts())):
            error = results.errors.get(index, "")
            if text is None:
                masked.append(MaskedText("", error=error, show_text=self.show_text, missing=not error))
                continue
            spans = masked_spans(results[index], results.dropped.get(index, ()))
            try:
                spans += find_rule_spans(text, compiled_rules)
            except ConfigurationError as rule_error:
                masked.append(MaskedText("", error=str(rule_error)))
                continue
            masked.append(mask_text(text, spans, policy, self.show_text, limits))
        return MaskedTexts(tuple(masked), self._note_keys, limits)

    @_with_checked_options
    def with_context(
        self,
        *columns: str,
        language: str = "en",
        cues: Mapping[str, Mapping[str, Sequence[str]]] | None = None,
    ) -> Annotations:
        """Return the annotations with the context of each entity.

        Rules look for cues such as "denies" or "mother" in the sentence of the entity, and for headings such as "Family history:"
        above it. They have errors in both directions: see docs/how_to/find_negated_entities.md for measured values. No entity is
        removed; use :meth:`filter`.

        Args:
            columns: Columns to add: ``"negated"``, the default, ``"all"`` for the first four, or any of:

                - ``"negated"``: ``True`` in "denies pain".
                - ``"uncertain"``: ``True`` in "possible pneumonia".
                - ``"temporality"``: ``"recent"``, ``"historical"`` as in "history of asthma", or ``"hypothetical"`` as in "if fever
                  develops".
                - ``"experiencer"``: ``"patient"``, ``"family"`` as in "mother had diabetes", or ``"other"``.
                - ``"negated_by"``, ``"uncertain_by"``, ``"temporality_by"`` and ``"experiencer_by"``: the cue that decided, such as
                  ``"denies"``, or an empty string for the usual value.
            language: Language of the notes: ``"en"``, or ``"de"``, ``"es"``, ``"fr"``, ``"hi"``, ``"ja"``, ``"pt"`` or ``"zh"``,
                which use the rules of OpenMed, take about 10 ms per entity, and have no columns of cues.
            cues: Additional cues in English by value and position, such as ``{"negated": {"after": ["not detected"]}}``; see
                docs/how_to/find_negated_entities.md. They precede the cues of the package of the same length.

        Returns:
            Annotations of the same texts, whose entities and :meth:`to_frame` have the columns. They mark negated entities with
            "negated", for example, as a single displayed text always does.

        Raises:
            ConfigurationError: If a column, the language or a cue is invalid, if openmed is needed and not installed, or if a text
                with entities has changed since it was annotated or came from a generator and is not one of the stored first texts.
            InvalidTextError: If a text cannot be read again.

        Example:
            >>> from openmed_nb import annotate
            >>> found = annotate(["She has asthma, but no pneumonia."], "bundled_small", device="cpu").with_context()
            >>> [(entity["word"], entity["negated"]) for entity in found[0]]
            [('asthma', False), ('pneumonia', True)]
            >>> [entity["word"] for entity in found.filter(negated=False)[0]]
            ['asthma']
        """
        find_context = create_context_finder(columns, language, cues)
        context = find_context("", ())  # The columns, also without entities.
        for text, entities in zip(self._read_texts(), self, strict=True):
            for name, values in find_context(raise_if_error(text) or "", entities).items() if entities else ():
                context[name].extend(values)
        return replace(self, results=self.results.with_columns(context))

    def filter(self, *labels: str, min_score: float = 0.0, **context: bool | str | Sequence[str]) -> Annotations:
        """Return the annotations with only the entities that have one of the labels, at least a score, and a context.

        Args:
            labels: Labels to keep, not case-sensitive. Without labels, the entities of all labels are kept.
            min_score: Minimum score, in [0, 1].
            context: Values of columns of :meth:`with_context`, such as ``negated=False``, ``experiencer="patient"``, or several values
                as ``temporality=["recent", "historical"]``.

        Returns:
            Annotations of the same texts. A text without remaining entities has an empty list.

        Raises:
            ConfigurationError: If a label is not one of the model, if a score is not valid, or if the entities have no such context.

        Example:
            >>> from openmed_nb import annotate
            >>> found = annotate(["She has asthma.", "No complaints."], "bundled_small", device="cpu")
            >>> [[entity["word"] for entity in entities] for entities in found.filter("disease", min_score=0.9)]
            [['asthma'], []]
        """
        min_score = check_number("min_score", min_score, 1.0, example="0.9")
        for label in labels:
            if not isinstance(label, str):
                raise invalid_value("a label", label, "Pass a label as in the results, such as 'disease'.")
        check_names("an argument of filter()", context, ("min_score", *CONTEXT_COLUMNS), "Arguments")
        for name, value in context.items():
            for choice in value if isinstance(value, (list, tuple)) else [value]:
                check_context_values(self.results.context, {name: choice})
        if not (labels or context or min_score):
            return self
        known_labels = self.known_labels
        if known_labels is None:
            _warn_unknown_labels(labels, self.results.labels, None)
        elif labels:
            selected = [*map(normalize_label, labels)]
            available = map(normalize_label, {*known_labels, *self.results.labels})
            check_names("a label of the model", selected, sorted(available), "Labels")
            known_labels = tuple(label for label in known_labels if normalize_label(label) in selected)
        conditions = [f"label {' or '.join(map(shorten, labels))}"] if labels else []
        conditions += [f"{name}={value!r}" for name, value in context.items()]
        conditions += [f"score of at least {min_score:g}"] if min_score else []
        sentence = f"{'Filters' if len(conditions) > 1 else 'Filter'}: {', '.join(conditions)}."
        # An entity of several tokens has no prefix, although the labels of its model do.
        select_by = str.casefold if self.results.key == "entity" else normalize_label
        results = self.results.filter({*map(select_by, labels)}, min_score, context)
        return replace(self, results=results, known_labels=known_labels, filters=(*self.filters, sentence))

    def summary(self) -> Summary:
        """Return the number of texts, the number of entities by label, and the most frequent words."""
        columns = self.results.columns()
        words: Counter[str] = Counter()
        if self.show_text:
            texts: Iterable[str | None] = repeat(None, len(self))
            if self.texts is not None and not isinstance(next(iter_texts(self.texts), None), TextReference):
                texts = self.iter_note_texts()
            words.update(chain.from_iterable(self.iter_counted_words(texts)))
        num_missing = len(self.missing)
        return Summary(
            model=self.model,
            device=self.device,
            texts=len(self),
            texts_without_entities=len(self) - len({*columns[NOTE_COLUMN].tolist()}) - len(self.errors) - num_missing,
            errors=dict(sorted(self.errors.items())),
            labels=dict(sorted(Counter(columns[self.results.key]).items())),
            words=dict(sorted(words.items(), key=lambda word: (-word[1], word[0]))),
            filters=self.filters,
            missing=num_missing,
            known_labels=self.known_labels,
            seconds=self.seconds,
        )

    def iter_counted_words(self, texts: Iterable[str | None]) -> Iterator[list[str]]:
        """Yield the entities of each note as they are counted: as in its text, or as the model's words if it is ``None``."""
        for text, entities in zip(texts, self, strict=True):
            words = [entity["word"] if text is None else text[entity["start"] : entity["end"]] for entity in entities]
            yield [" ".join(straighten_apostrophes(word).lower().split()) for word in words]

    @cached_property
    def language_notice(self) -> tuple[str, ...]:
        """The number of notes that are not in English, as a sentence, if the model reads English only."""
        if self.model not in BUNDLED:
            return ()
        texts = islice(self.iter_note_texts(), NUM_CHECKED_NOTES)
        count = len([text for text in texts if text and is_other_language(text[:MAX_TEXT_CHARACTERS])])
        notes = pluralize(count, "note is", "notes are")
        sample = f" (of the first {NUM_CHECKED_NOTES})" if len(self) > NUM_CHECKED_NOTES else ""
        sentence = f"{notes} mostly not in English{sample}. The model {self.model} reads English only."
        return (sentence,) if count else ()

    def head_report(self) -> Report:
        """Return the counts, which are displayed above the notes."""
        # The words of the entities are not displayed, so they are not counted.
        report = replace(self, show_text=False).summary().to_report()
        return replace(
            report,
            sentences=(*self.language_notice, *report.sentences),
            tables=report.tables[:2],
            details=origin_details(self.model, self.device, self.seconds, self.num_resumed),
        )

    def to_report(self) -> Report:
        """Return the counts, and the first texts with highlighted entities, after a filter only those with entities."""
        report = self.head_report()
        if not self.show_text:
            return replace(report, sentences=(*report.sentences, HIDDEN_TEXT_NOTICE))
        sentences = [*report.sentences]
        notes: Sequence[int] = range(len(self))
        if self.filters:
            notes = sorted({*self.results.columns()[NOTE_COLUMN].tolist()})
        num_stored = len(self.preview_texts)
        shown = [note for note in notes[:num_stored] if self.texts is not None or note < num_stored]
        if len(shown) < len(notes):
            hint = "" if self.texts is None else f" Use found.at({notes[len(shown)]}) to see another one."
            scope = " with entities" if self.filters else ""
            sentences.append(f"Showing {len(shown)} of {len(notes):,} notes{scope}.{hint}")
        segments: list[TextSegment] = []
        for note in shown:
            text = next(self.iter_note_texts(note))
            name = displayable(note_name(note, self.ids))
            note_segments = self.note_segments(note, text, self.results[note], MAX_TEXT_CHARACTERS)
            segments += [TextSegment(f"{name}: ", starts_text=True), *note_segments, TextSegment("\n")]
        return replace(report, sentences=tuple(sentences), segments=tuple(segments))

    def note_segments(
        self, index: int, text: str | None, entities: Sequence[Mapping[str, Any]], max_characters: int | None
    ) -> list[TextSegment]:
        """Return the start of a text with highlighted entities; all of it if ``max_characters`` is ``None``."""
        if not self.show_text:
            return [TextSegment(HIDDEN_TEXT_NOTICE)]
        if index in self.results.errors:  # The text may not be displayable, such as an unpaired surrogate.
            return [TextSegment("(error)")]
        if self.results.is_missing(index):
            return [TextSegment("(missing)")]
        if text is None:
            return [TextSegment("(changed or not stored)")]
        preview = text[:max_characters]
        segments = list(_highlight_entities(preview, [entity for entity in entities if entity["end"] <= len(preview)]))
        if len(preview) < len(text):
            segments.append(TextSegment("…"))
        return segments

    def note_spans(self, index: int) -> list[GoldSpan]:
        """Return the entities of a text as spans, or raise an error if they are tokens."""
        from .gold import GoldSpan

        self._check_aggregated()
        return [GoldSpan(*entity_span(entity)) for entity in self.results[index]]

    def _check_aggregated(self) -> None:
        if self.results.key == "entity":
            message = "The results contain tokens that are not aggregated to entities."
            raise ConfigurationError(message, "Annotate with aggregation_strategy='simple' or another strategy.")

    @_with_checked_options
    def score(self, gold: Any, *, labels: Mapping[str, str] | None = None, seed: int = 0) -> Scores:
        """Return the scores of the entities against gold entities of the same texts.

        Args:
            gold: A :meth:`review`, of which the reviewed notes are scored, or the result of :func:`read_annotations`. Alternatively,
                the true entities of each text, as ``(start, end, label)`` or as mappings with ``start``, ``end`` and ``label`` or
                ``entity_group``: a mapping by id, or a list for texts without ids. Or a DataFrame with one row per entity and the
                columns ``start``, ``end``, ``label``, and the ids or ``note_index``.
            labels: New names for labels of the gold, such as ``{"Disease": "DISEASE"}``.
            seed: Seed of the resampling for the intervals.

        Returns:
            The scores by label and in total: strict (boundaries and label), partial (boundaries, and an overlap counts as half)
            and type (label, with an overlap), as in SemEval 2013 and nervaluate. Also the number of gold characters outside of
            all entities, and the missed and added entities, each with ``show()``. Only texts with gold are scored, except that a
            table contains all notes. Against a review, also the scores of the context, such as ``scores.context["negated"]``, of
            the entities with the boundaries of a true entity.

        Raises:
            ConfigurationError: If ``gold`` is not valid or belongs to other texts, or if the results are not entities.
            UnmatchedIdsError: If ids of the gold are not ids of the texts, or if only one side has ids.

        Example:
            >>> from openmed_nb import annotate
            >>> found = annotate(["She has asthma.", "No complaints."], "bundled_small", device="cpu")
            >>> scores = found.score([[(8, 14, "DISEASE")], [(3, 13, "DISEASE")]])
            >>> scores.total.strict.recall, [(span.text, span.start) for span in scores.missed]
            (0.5, [(1, 3)])
        """
        from .gold import align_gold, read_gold
        from .review import Review
        from .scores import score_spans

        seed = check_integer("seed", seed, 0)
        ids = self.ids
        if ids is None and _are_files(self.texts):
            ids = [PurePath(source or "").name for source in self.sources]
        context: dict[str, SchemeScores] = {}
        if isinstance(gold, Review):
            review = gold
            gold = review.gold_of(self)
            context = review.score_context(self, seed)
            ids = None
        elif self._is_own_frame(gold):
            ids = None
        texts = read_gold(gold, labels, self.id_name)
        aligned = align_gold(texts, ids, self.iter_note_texts(), len(self))
        for index, text in enumerate(self.iter_note_texts()):
            expected = aligned.get(index)
            if text is None or expected is None:
                continue
            has_same_words = all(text[start:end] == words for start, end, words in expected.span_texts)
            if expected.text not in {None, text} or not has_same_words:
                message = f"The gold of text {index} belongs to a different text."
                raise ConfigurationError(message, "Pass the gold of the same texts.")
            if any(span.end > len(text) for span in expected.spans):
                message = f"The gold of text {index} has an entity that ends after the end of the text."
                raise ConfigurationError(message, "Pass offsets in characters of the text.")
        predicted = {index: None if index in self.results.errors else self.note_spans(index) for index in aligned}
        gold_labels = {span.label for text in texts for span in text.spans}
        own_labels = {*self.results.labels, *(self.known_labels or ())}
        if gold_labels and own_labels and gold_labels.isdisjoint(own_labels):  # No entity can be right.
            names = f"{{{describe_value(min(gold_labels))}: {describe_value(min(own_labels))}}}"
            warn(f"The gold and the results have different labels. Rename those of the gold, as in labels={names}.")
        expected_spans = {index: text.spans for index, text in aligned.items()}
        return replace(score_spans(self.model, predicted, expected_spans, self._show_span, seed), context=context)

    def _is_own_frame(self, gold: Any) -> bool:
        """Return whether a DataFrame has the index of :meth:`to_frame`, so that its positions are those of the same notes.

        Raises:
            UnmatchedIdsError: If it has another index, but no ids.
        """
        columns = getattr(gold, "columns", ())
        if self.row_index is None or self._own_ids or NOTE_COLUMN not in columns or ID_COLUMN in columns:
            return False
        positions = gold[NOTE_COLUMN]
        is_own = bool(positions.isin(range(len(self))).all() and gold.index.equals(self.row_index.take(positions)))
        if not is_own and not are_positions(gold.index):
            message = "The index of the gold is not that of the notes at these positions."
            raise UnmatchedIdsError(message, "Pass the gold of these notes, or their ids as a column.")
        return is_own

    @_with_checked_options
    def review(self, path: str | os.PathLike[str] | None = None, *, sample: int | None = 20, seed: int = 0) -> Review:
        """Return a review of a random sample of the notes, in which you mark right, wrong and missed entities.

        In a notebook, it is displayed as a browser of these notes. Mark each entity, add the entities that the model missed, and
        then mark the note as reviewed. Only reviewed notes count. Ticks of the entities alone measure precision, but no recall. The
        sample is uniform and without replacement, over the notes that have no error and are not missing.

        Args:
            path: ``.jsonl`` file in which the review is saved after each change, and from which it continues. It contains offsets,
                labels, marks and fingerprints, but no text. If ``None``, the review is not saved.
            sample: Number of notes, at least 1. A larger sample contains the smaller ones with the same seed. If ``None``, all notes are
                listed, in random order.
            seed: Seed of the sample.

        Returns:
            The review, with ``gold`` and ``score()``. Other results of the same notes can be scored with ``other.score(review)``.

        Raises:
            ConfigurationError: If the file is a review of other notes or has another seed, if the texts are hidden or not stored, or
                if the results are not entities.

        Example:
            >>> from openmed_nb import annotate
            >>> found = annotate(["She has asthma.", "Unwell."], "bundled_small", device="cpu")
            >>> review = found.review(sample=2)
            >>> review.mark(0, 8, 14, "DISEASE", right=True)
            >>> review.mark(1, 0, 6, "DISEASE")  # a missed entity
            >>> review.finish(0), review.finish(1)
            (None, None)
            >>> review.score().total.strict.recall
            0.5
        """
        from .review import Review

        return Review(self, path, sample, seed)

    def _show_span(self, span: ScoredSpan) -> AnnotatedText:
        """Return a text in which only one span is highlighted."""
        text = self.at(span.text)
        word = text.text[span.start : span.end]
        entity = {"entity_group": span.label, "score": 1.0, "word": word, "start": span.start, "end": span.end}
        results = ResultStore()
        results.add(self.results.fingerprints[span.text], [entity])
        title = f"Note {note_name(span.text, self.ids)}, characters {span.start} to {span.end}"
        return AnnotatedText(replace(text.found, results=results), title)

    @_with_checked_options
    def save(self, path: str | os.PathLike[str]) -> None:
        """Save the results to a file.

        A ``.jsonl`` file contains one object per note with ``id``, or its position as ``note_index``, ``text`` and ``entities``, also
        for missing and failed notes.
        A ``.parquet`` or ``.csv`` (UTF-8) file contains the rows of :meth:`to_arrow`, without the texts of the notes. Except for an
        ``.html`` page with the marked notes, which hides them then, texts are written even with ``show_text=False``. An existing
        file is replaced.

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
            note_index,entity_group,score,word,span_text,start,end
        """
        from .export.registry import save_annotations

        save_annotations(path, self)

    @_with_checked_options
    def export(self, format: str, path: str | os.PathLike[str] | None = None) -> ExportReport:  # noqa: A002 - public name
        """Write notes and entities in the format of an annotation tool.

        Notes without a text are omitted and counted: missing and failed notes, notes that have changed, and those from a
        generator. :func:`read_annotations` reads the files.

        Args:
            format: ``"brat"``, ``"conll"``, ``"doccano"`` or ``"label-studio"``.
            path: File, or a new folder for brat. It is required. Files are readable by their owner only.

        Returns:
            The number of notes and entities, and ``losses``: counts of what the format cannot contain.

        Raises:
            ConfigurationError: If the format is unknown, there is no path, its suffix is not one of the format, the results are not
                entities, or the file cannot be written.

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

        The index of a Series is in a column, because an Arrow table has no index.

        Raises:
            ConfigurationError: If pandas or pyarrow is not installed.

        Example:
            >>> from openmed_nb import annotate
            >>> annotate(["She has asthma."], "bundled_small", device="cpu").to_arrow().column_names
            ['note_index', 'entity_group', 'score', 'word', 'span_text', 'start', 'end']
        """
        from .export.formats import to_arrow

        return to_arrow(self.to_frame_with_ids())

    def to_spacy(self, nlp: Language) -> Iterator[Doc]:
        """Yield a spaCy document for each note that has a text.

        ``doc.ents`` contains the entities, and ``doc.spans["openmed"]`` those that overlap them. ``doc.user_data["id"]`` is the
        id of the note. If the notes have no ids, ``doc.user_data["note_index"]`` is its position. At the end, a warning contains the
        number of entities that do not start and end at the boundaries of tokens.

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
        from .export.formats import iter_docs

        return iter_docs(nlp, self._iter_exported_notes())

    def iter_records(self) -> Iterator[dict[str, Any]]:
        """Yield a JSON-compatible object for each note: its id or position, text, and entities or error."""
        for index, (text, record) in enumerate(zip(self.iter_note_texts(), self._records(), strict=True)):
            key = {} if "id" in record else {NOTE_COLUMN: index}
            yield {**key, "text": text, **record}

    def _iter_exported_notes(self) -> Iterator[ExportedNote | None]:
        """Yield the notes to export, or ``None`` for a note without a text."""
        from .export.notes import ExportedNote

        for index, text in enumerate(self.iter_note_texts()):
            if text is None:
                yield None
                continue
            scores = tuple(entity["score"] for entity in self.results[index])
            yield ExportedNote(self._json_id(index), index, text, tuple(self.note_spans(index)), scores)
