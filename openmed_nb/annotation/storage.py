"""Storage of results: the entities of texts in columns."""

from __future__ import annotations

import copy
import hashlib
import sys
from array import array
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import pairwise
from typing import TYPE_CHECKING, Any, NamedTuple

from ..errors import OpenMedError
from .inputs import NOTE_COLUMN
from .masking import PARTIAL, LabeledSpan, normalize_label, strip_bio_prefix
from .references import MISSING_FINGERPRINT

if TYPE_CHECKING:
    import numpy as np


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
