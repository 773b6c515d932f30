"""What an annotation returns: the entities of one text or of many, held small, shown and summed up."""

from __future__ import annotations

import copy
import json
import math
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
from .._utils.validation import check_integer, invalid_value, suggest
from .._utils.validation import check_number as in_range
from .._utils.warning import warn
from ..errors import ConfigurationError, InvalidTextError, OpenMedError
from .masking import (
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
    replaced,
    strip_bio_prefix,
    validate_policy,
)
from .references import MISSING, FileReference, TextReference, iter_texts, read_text, text_fingerprint

if TYPE_CHECKING:
    import numpy as np
    import pandas as pd


HIDDEN_TEXT_NOTICE = "(the text is hidden)"

# Stands for a label without a name, which would mark nothing.
UNNAMED_LABEL = "no label"

# How many rows a table shows, and how many characters of a text.
MAX_TABLE_ROWS = 10
MAX_TEXT_CHARACTERS = 2000

# What the columns of answers hold of an entity, tokens that are not joined an index too.
_COLUMNS = ("label", "score", "index", "word", "start", "end")

# As transformers gives it: a mapping with label, score, word, start and end.
Entity = dict[str, Any]


class DroppedSpan(NamedTuple):
    """Characters that a model labeled, but that are in no entity: an aggregation strategy labels whole words.

    Attributes:
        label: The label, without a prefix such as ``B-``.
        score: The highest score of its tokens, from 0 to 1.
        start: The first character.
        end: The end, one past the last character.
    """

    label: str
    score: float
    start: int
    end: int


class FingerprintedResult(NamedTuple):
    """What is stored of a text."""

    fingerprint: int
    answer: list[Entity] | str  # its entities, or why it has none
    dropped: tuple[DroppedSpan, ...] = ()


def entity_span(entity: Mapping[str, Any]) -> tuple[int, int, str]:
    """Return where an entity begins and ends, in characters, and its label; also of a token that was not joined to one.

    Example:
        >>> entity_span({"entity_group": "DRUG", "start": 3, "end": 9}), entity_span({"entity": "B-DRUG", "start": 0, "end": 2})
        ((3, 9, 'DRUG'), (0, 2, 'B-DRUG'))
    """
    label = entity["entity_group"] if "entity_group" in entity else entity["entity"]
    return int(entity["start"]), int(entity["end"]), str(label)


def masked_span(entity: Mapping[str, Any]) -> LabeledSpan:
    """Return what masking replaces for an entity, or for a token that was not merged into one."""
    start, end, label = entity_span(entity)
    if "entity_group" in entity:
        return LabeledSpan(start, end, label)
    return LabeledSpan(start, end, strip_bio_prefix(label), continues=continues_entity(label))


def masked_spans(entities: Iterable[Mapping[str, Any]], dropped: Iterable[DroppedSpan]) -> list[LabeledSpan]:
    """Return what masking replaces in a text: its entities, and what else its model labeled."""
    spans = [masked_span(entity) for entity in entities]
    return spans + [LabeledSpan(span.start, span.end, span.label, continues=True) for span in dropped]


def dropped_span(entity: Mapping[str, Any]) -> DroppedSpan:
    """Return the span of an entity."""
    span = masked_span(entity)
    return DroppedSpan(span.label, float(entity["score"]), span.start, span.end)


def uncovered(spans: Iterable[DroppedSpan], entities: Sequence[Mapping[str, Any]]) -> tuple[DroppedSpan, ...]:
    """Return the spans that are not wholly inside one of the entities, in order, each once."""
    inside = [masked_span(entity)[:3] for entity in entities]
    left = {
        span
        for span in spans
        if not any(start <= span.start and span.end <= end and span.label == label for start, end, label in inside)
    }
    return tuple(sorted(left, key=lambda span: (span.start, span.end)))


def is_entity(value: Any) -> bool:
    """Tell whether something that was read from a file is an entity: a label and a word, a score, and whole places."""
    if not isinstance(value, dict):
        return False
    texts = value.get("word"), value.get("entity", value.get("entity_group"))
    places = value.get("start"), value.get("end"), value.get("index", 0)
    score = value.get("score")
    return (
        all(isinstance(one, str) for one in texts)
        and all(type(one) is int for one in places)
        and isinstance(score, float)
        and math.isfinite(score)
    )


# The entities of a text, or why it has no answer.
TextResult = list[Entity] | OpenMedError


class ResultStore(Sequence[list[Entity]]):
    """The entities of texts in the order of the texts, in columns; each list is made when it is asked for.

    Of a text itself only a fingerprint is kept, to tell on resuming whether it is the same one.

    Attributes:
        errors: Why texts have no answer, by their number: an error in a chunk of answers, its message in the results of a run.
            Such a text has no entities.
        dropped: The spans that were labeled and are in no entity, by the number of the text.
        fingerprints: Those of the texts; a chunk has none.
    """

    def __init__(self, key: str = "entity_group") -> None:
        self.errors: dict[int, Any] = {}
        self.dropped: dict[int, tuple[DroppedSpan, ...]] = {}
        self.fingerprints = array("Q")
        self.key = key  # Of the label in an entity: "entity" for tokens that are not joined.
        self._bounds = array("q", [0])  # Where the entities of each text begin; the last is their number.
        self._texts: list[str] = []  # Each label and word is held once.
        self._numbers: dict[str, int] = {}  # of those texts
        self._columns = {name: array("d" if name == "score" else "H") for name in _COLUMNS}

    @classmethod
    def of(cls, answers: Sequence[TextResult], key: str = "entity_group") -> ResultStore:
        """Return a chunk of answers."""
        chunk = cls(key)
        for number, answer in enumerate(answers):
            if isinstance(answer, OpenMedError):
                chunk.errors[number] = answer
            chunk._add_rows([] if isinstance(answer, OpenMedError) else answer)
        return chunk

    @classmethod
    def of_columns(  # noqa: PLR0913, PLR0917 - a column each
        cls,
        key: str,
        names: Sequence[str],
        bounds: np.ndarray,
        labels: np.ndarray,
        words: Sequence[str],
        numbers: Mapping[str, np.ndarray],
        dropped: Mapping[int, tuple[DroppedSpan, ...]],
    ) -> ResultStore:
        """Return a chunk of answers from columns with a value for each of ``E`` entities of ``S`` texts.

        Args:
            key: ``entity_group``, or ``entity`` for tokens that are not joined.
            names: Those of the labels, ``C`` of them.
            bounds: int64 of ``(S + 1,)``, where the entities of each text begin.
            labels: int64 of ``(E,)``, places in the names.
            words: The words, ``E`` of them.
            numbers: ``score``, float64 of ``(E,)``; ``start`` and ``end``, in characters, and for tokens ``index``, int64.
            dropped: As in the class.
        """
        import numpy as np

        chunk = cls(key)
        chunk._bounds = array("q", bounds.tobytes())
        chunk.dropped = dict(dropped)
        chunk._texts = [*dict.fromkeys((*names, *words))]
        chunk._numbers = places = {text: place for place, text in enumerate(chunk._texts)}
        columns = chunk._columns
        columns["label"] = array("q", np.array([places[name] for name in names], np.int64)[labels].tobytes())
        columns["word"] = array("q", [places[word] for word in words])
        for name, column in numbers.items():
            columns[name] = array("d" if name == "score" else "q", column.tobytes())
        return chunk

    def add(self, fingerprint: int, answer: Sequence[Entity] | str, dropped: tuple[DroppedSpan, ...] = ()) -> None:
        """Add the answer to the next text: its entities, or why it has none."""
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
        self._extend_column("label", [self._number(entity[self.key]) for entity in entities])
        self._extend_column("word", [self._number(entity["word"]) for entity in entities])
        for name in ("score", "start", "end"):
            self._extend_column(name, [entity[name] for entity in entities])
        self._extend_column("index", [entity["index"] for entity in entities if "index" in entity])
        # Only from here on the answer counts: adding an entity may fail.
        self._bounds.append(self._bounds[-1] + len(entities))

    def extend(self, fingerprints: Sequence[int], chunk: ResultStore) -> None:
        """Add the first answers of a chunk, one for each fingerprint."""
        count = len(fingerprints)
        first = len(self)
        rows = chunk._bounds[count]
        self.key = chunk.key
        numbers = [self._number(text) for text in chunk._texts]
        for name, column in chunk._columns.items():
            values = column[:rows]
            self._extend_column(name, [numbers[value] for value in values] if name in {"label", "word"} else values)
        # Only from here on the answers count: adding them may be interrupted.
        self.fingerprints.extend(fingerprints)
        self.errors.update({first + place: str(error) for place, error in chunk.errors.items() if place < count})
        self.dropped.update({first + place: spans for place, spans in chunk.dropped.items() if place < count})
        before = self._bounds[-1]
        self._bounds.extend([before + bound for bound in chunk._bounds[1 : count + 1]])

    def _number(self, text: str) -> int:
        """Return the number of a label or a word."""
        number = self._numbers.setdefault(text, len(self._texts))
        if number == len(self._texts):
            self._texts.append(text)
        return number

    def _extend_column(self, name: str, values: Sequence[Any]) -> None:
        """Add values to a column; numbers take two bytes each, or four or eight from the first that fewer do not hold."""
        column = self._columns[name]
        try:
            column.extend(array(column.typecode, values))
        except OverflowError:
            wider = {"H": "I", "I": "q"}.get(column.typecode)
            if wider is None:
                raise
            self._columns[name] = array(wider, column)
            self._extend_column(name, values)

    def outcomes(self) -> Iterator[TextResult]:
        """Yield the entities of each text of a chunk, or the error in their place."""
        entities = self._entities(0, self._bounds[-1])
        for place, (first, last) in enumerate(pairwise(self._bounds)):
            yield self.errors.get(place) or entities[first:last]

    def items(self, fingerprints: Sequence[int] | None = None) -> Iterator[FingerprintedResult]:
        """Yield what is stored of each text, in the form that :meth:`add` takes; of a chunk, as many as there are fingerprints."""
        for number, fingerprint in enumerate(self.fingerprints if fingerprints is None else fingerprints):
            if number >= len(self):
                return
            error = self.errors.get(number)
            answer = self[number] if error is None else str(error)
            yield FingerprintedResult(fingerprint, answer, self.dropped.get(number, ()))

    def of_texts(self, bounds: Sequence[int], owners: np.ndarray) -> ResultStore:
        """Return a chunk whose texts have several sequences each; ``owners`` are the texts of the sequences, in order."""
        dropped: dict[int, tuple[DroppedSpan, ...]] = {}
        for sequence, spans in self.dropped.items():
            text = int(owners[sequence])
            dropped[text] = dropped.get(text, ()) + spans
        return self._with(dropped=dropped, _bounds=array("q", [self._bounds[bound] for bound in bounds]))

    def _with(self, **values: Any) -> ResultStore:
        """Return the same answers with other values of some attributes."""
        answers = copy.copy(self)
        vars(answers).update(values)
        return answers

    def replaced(self, others: Mapping[int, FingerprintedResult]) -> ResultStore:
        """Return the same answers with others in the place of some, by their numbers."""
        if not others:
            return self
        found = ResultStore(self.key)
        for number, answered in enumerate(self.items()):
            found.add(*others.get(number, answered))
        return found

    def without_words(self) -> ResultStore:
        """Return the same answers with an empty word for each entity."""
        found = ResultStore(self.key)
        for fingerprint, answer, dropped in self.items():
            hidden = answer if isinstance(answer, str) else [{**entity, "word": ""} for entity in answer]
            found.add(fingerprint, hidden, dropped)
        return found

    def is_missing(self, number: int) -> bool:
        """Tell whether a missing value was in the place of a text."""
        return self.fingerprints[number] == MISSING and number not in self.errors

    @property
    def missing(self) -> tuple[int, ...]:
        """The numbers of the texts that are missing."""
        import numpy as np

        found = np.flatnonzero(np.array(self.fingerprints[: len(self)]) == np.uint64(MISSING)).tolist()
        return tuple(number for number in found if number not in self.errors)

    def __len__(self) -> int:
        return len(self._bounds) - 1

    def __getitem__(self, number: Any) -> Any:
        if isinstance(number, slice):
            return [self[place] for place in range(len(self))[number]]
        place = range(len(self))[number]
        return self._entities(self._bounds[place], self._bounds[place + 1])

    def _entities(self, first: int, last: int) -> list[Entity]:
        """Return entities as mappings, with their keys in the order of transformers."""
        columns: dict[str, Sequence[Any]] = {name: column[first:last] for name, column in self._columns.items()}
        texts = self._texts
        key = self.key
        labels = [texts[number] for number in columns["label"]]
        words = [texts[number] for number in columns["word"]]
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

    def only(self, labels: Collection[str], score: float) -> ResultStore:
        """Return the same answers with those entities alone that have one of the labels, in any case, and at least a score."""
        import numpy as np

        count = self._bounds[-1]
        kept = np.array(self._columns["score"][:count]) >= score
        if labels:
            numbers = [number for number, text in enumerate(self._texts) if text.casefold() in labels]
            kept &= np.isin(self._columns["label"][:count], numbers)
        dropped: dict[int, tuple[DroppedSpan, ...]] = {}
        for text, spans in self.dropped.items():
            chosen = [span for span in spans if span.score >= score and (not labels or span.label.casefold() in labels)]
            if chosen:
                dropped[text] = tuple(chosen)
        rows = np.flatnonzero(kept).tolist()
        columns = {
            name: array(column.typecode, [column[row] for row in rows] if column else ())
            for name, column in self._columns.items()
        }
        bounds = array("q", np.append(0, np.cumsum(kept))[np.array(self._bounds)].tobytes())
        return self._with(dropped=dropped, _columns=columns, _bounds=bounds)

    def counts(self) -> Iterator[int]:
        return (last - first for first, last in pairwise(self._bounds))

    @property
    def labels(self) -> Sequence[str]:
        """The label of every entity, text after text."""
        return [self._texts[number] for number in self._columns["label"][: self._bounds[-1]]]

    @property
    def masked_labels(self) -> set[str]:
        """The labels of all that masking replaces, without the prefixes of tokens."""
        labels = {*self.labels}
        if self.key == "entity":
            labels = {*map(strip_bio_prefix, labels)}
        return labels | {span.label for spans in self.dropped.values() for span in spans}

    @property
    def words(self) -> Sequence[str]:
        """The word of every entity, text after text."""
        return [self._texts[number] for number in self._columns["word"][: self._bounds[-1]]]

    def columns(self) -> dict[str, Any]:
        """Return a table of all entities: the number of the note, then what an entity has, as a column each."""
        import numpy as np

        numbers = np.repeat(np.arange(len(self)), np.diff(np.array(self._bounds)))
        columns: dict[str, Any] = {
            "note": numbers,
            self.key: np.array(self.labels, dtype=object),
            "score": np.array(self._columns["score"]),
            "index": np.array(self._columns["index"], np.int64),
            "word": np.array(self.words, dtype=object),
            "start": np.array(self._columns["start"], np.int64),
            "end": np.array(self._columns["end"], np.int64),
        }
        if not self._columns["index"]:
            del columns["index"]
        return {name: column[: len(numbers)] for name, column in columns.items()}


class _CopiedWhole:
    """A dataclass whose pickle leaves something out; its copies, which stay in this process, have everything."""

    def __copy__(self) -> Any:
        return replace(self)  # type: ignore[type-var]

    def __deepcopy__(self, _memo: object) -> Any:
        return replace(self)  # type: ignore[type-var]


@dataclass(frozen=True, repr=False)
class AnnotatedText(_CopiedWhole, Displayable, Sequence[Mapping[str, Any]]):
    """The entities of one text: a sequence of dictionaries as transformers' pipeline gives them.

    Attributes:
        text: The text that was read.
        entities: A mapping for each: ``entity_group`` (or ``entity``), ``score``, ``word``, ``start`` and ``end``.
        model: The name of the model.
        device: The device that it ran on.
        show_text: Whether the text, and the words in it, are part of what is shown; if not, they are not pickled either.
        missing: Whether there was a missing value in its place.
        dropped: What the model labeled too, but no entity has; see :attr:`Annotations.dropped`.
        known_labels: The labels of the entities that the model can find; ``None`` where that is not known.
        filters: What :meth:`Annotations.filter` kept, as sentences.
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
        """Return text, entities, model and device as plain mappings, lists, strings and numbers."""
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
        """Return what there is to show: the text with its entities marked, or a table of them where the text is hidden."""
        title = f"{pluralize(len(self), 'entity', 'entities')} found by {self.model} on {self.device}"
        if self.missing:
            return Report(title, (IS_MISSING,))
        if not self.show_text:
            return Report(title, (HIDDEN_TEXT_NOTICE,), tables=(self._table(),))
        text = self.text[:MAX_SHOWN_TEXT_CHARACTERS]
        pieces = list(highlight_entities(text, [entity for entity in self.entities if entity["end"] <= len(text)]))
        if len(text) < len(self.text):
            pieces.append(TextSegment("…"))
        return Report(title, long_text_sentence(self.text), segments=tuple(pieces))

    def __str__(self) -> str:
        return to_text(replace(self.final_report(), tables=(self._table(),)))  # Its marks have no scores.

    def mask(self, replacement: Policy = REPLACEMENT) -> MaskedText:
        """Return the text with its entities replaced; see :meth:`Annotations.mask`.

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
            _warn_of_absent(policy, labels, self.known_labels)
        spans = masked_spans(self.entities, self.dropped)
        return mask_text(self.text, spans, policy, self.show_text, labels=self.known_labels, filters=self.filters)

    def _table(self) -> Table:
        rows = []
        for entity in self.entities:
            start, end, label = entity_span(entity)
            word = " ".join(self.text[start:end].split()) if self.show_text else "…"
            rows.append((display_label(label), f"{float(entity['score']):.2f}", f"{start}-{end}", word))
        return Table("Entities", ("label", "score", "characters", "text"), tuple(rows))


def highlight_entities(text: str, entities: Iterable[Mapping[str, Any]]) -> Iterator[TextSegment]:
    """Yield a text in pieces, the entities marked; one that overlaps an earlier one is left out."""
    position = 0
    for entity in sorted(entities, key=lambda one: (one["start"], one["end"])):
        start, end, label = entity_span(entity)
        if start >= position < end:
            yield TextSegment(text[position:start])
            yield TextSegment(
                text[start:end], display_label(label), f"{float(entity['score']):.3f}", f"characters {start} to {end}"
            )
            position = end
    yield TextSegment(text[position:])


def _warn_of_absent(labels: Iterable[str], present: Iterable[str], known: Iterable[str] | None) -> None:
    """Warn of labels that no entity has and that the model does not know; without an entity, nothing is known of them."""
    there = {_kind_of(label) for label in present}
    if not there:
        return
    there |= {_kind_of(label) for label in known or ()}
    for label in labels:
        if _kind_of(label) not in there:
            warn(f"No entity has the label {describe_value(label)}. {suggest(label.casefold(), sorted(there))}")


def _kind_of(label: str) -> str:
    """Return what is compared of a label: ``b-Name`` is the label of a token of ``NAME``."""
    return strip_bio_prefix(label.upper()).casefold()


def display_label(name: str) -> str:
    return name if name.strip() else UNNAMED_LABEL


@dataclass(frozen=True, repr=False)
class Summary(Displayable):
    """Counts of what a model found in many texts.

    Attributes:
        model: The name of the model.
        device: The device that it ran on.
        texts: How many texts were read.
        empty: How many of them have no entity; not counted are those that are missing or have an error.
        errors: The number of each text that has no answer, and why.
        labels: Each label, and how many entities have it.
        words: Each word or phrase in lower case, and how often it was found, the most frequent first.
        shapes: As in :class:`Annotations`.
        only: What entities were left out, as sentences; see :meth:`Annotations.filter`.
        missing: How many of the texts are missing values.
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
        """Return the counts as plain mappings, lists, strings and numbers."""
        pairs = {"errors": dict(self.errors), "labels": dict(self.labels), "words": dict(self.words)}
        return {**super().to_dict(), **pairs}

    def to_report(self) -> Report:
        """Return the counts as sentences and tables."""
        entities = pluralize(sum(count for _label, count in self.labels), "entity", "entities")
        labels = ", ".join(f"{display_label(label)} {count:,}" for label, count in self.labels)
        by_label = f"By label: {labels}." if labels else ""
        rest = (
            f"Texts without any: {self.texts_without_entities:,}." if self.texts_without_entities else "",
            f"{pluralize(self.missing, 'text is', 'texts are')} missing." if self.missing else "",
            f"Texts that could not be read or run: {len(self.errors):,}." if self.errors else "",
            f"Batches had {pluralize(self.batch_shapes, 'shape')}; the device compiles once for each."
            if self.batch_shapes
            else "",
        )
        errors = tuple((str(number), error) for number, error in self.errors[:MAX_TABLE_ROWS])
        words = tuple((word, str(count)) for word, count in self.words[:MAX_TABLE_ROWS])
        title = f"{entities} found in {pluralize(self.texts, 'text')} by {self.model} on {self.device}"
        named = sorted(((display_label(label), count) for label, count in self.labels), key=lambda one: -one[1])
        picture = bar_chart("Entities by label", named, "{:,}".format)
        return Report(
            title,
            tuple(filter(None, (*self.filters, by_label, *rest))),
            tables=(
                Table("Texts without an answer", ("text", "why"), errors),
                Table("Found most often", ("words", "times"), words),
            ),
            html_sentences=(title, *self.filters, *filter(None, rest)),
            charts=(picture,),
        )


def _are_files(texts: Any) -> bool:
    return isinstance(texts, tuple) and len(texts) > 0 and all(isinstance(text, FileReference) for text in texts)


@dataclass(frozen=True, repr=False, eq=False)
class Annotations(_CopiedWhole, Displayable, Sequence[list[Entity]]):
    """The entities of many texts: a sequence with a list for each text, in the order of the texts.

    ``found[17]`` are the entities of a text, :meth:`show` is that text with them marked, and :meth:`filter` keeps the
    entities of some labels or scores.

    Attributes:
        answers: The entities of all texts.
        first_texts: The first texts, to be shown.
        model: The name of the model.
        device: The device that it ran on.
        show_text: Whether texts, and the words in them, are part of what is shown.
        settings: What tells its run from another: the model and everything that changes its answers.
        shapes: How many shapes its batches had, on MPS, which compiles for each; ``None`` elsewhere, and on a cluster.
        texts: What the texts can be read from again, as it was passed, no copy; ``None`` for a stream of them.
        row_index: The index of the Series or column that the texts came in, no copy; ``None`` where they had none. It tells rows
            apart, so it is pickled with ``show_text=False`` too.
        unfinished: Whether they are part of an error. Then nothing of them is pickled; nor are texts and words with
            ``show_text=False``.
        known_labels: The labels of the entities that the model can find, and that were not left out; ``None`` where that is not
            known.
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
        """Return what is pickled: an error goes to logs and to other processes, and must not bring texts there."""
        state = {one.name: getattr(self, one.name) for one in fields(self)}  # Without what is cached, such as sources.
        if self.unfinished:
            return {**state, "results": ResultStore(), "preview_texts": (), "texts": None, "row_index": None}
        if self.show_text:
            return state
        settings = {**self.settings, "words": "left out"}  # No run goes on from them.
        answers = self.results.without_words()
        return {**state, "results": answers, "preview_texts": (), "texts": None, "settings": settings}

    def __len__(self) -> int:
        return len(self.results)

    def __getitem__(self, number: Any) -> Any:
        return self.results[number]

    @property
    def errors(self) -> Mapping[int, str]:
        """Why texts have no answer, by their number."""
        return dict(self.results.errors)

    @property
    def dropped(self) -> Mapping[int, tuple[DroppedSpan, ...]]:
        """What the model labeled but no entity has, by the number of the text; :meth:`mask` replaces it too.

        ``first``, ``average`` and ``max`` give each word one label, so the label of another token of that word is in no
        entity. Labels in ``ignore_labels`` are not counted.

        Example:
            >>> from openmed_nb import annotate
            >>> annotate(["She has asthma."], "bundled_small", device="cpu").dropped
            {}
        """
        return dict(self.results.dropped)

    @property
    def missing(self) -> tuple[int, ...]:
        """The numbers of the texts in whose place was a missing value, such as ``None`` or NaN; they have no entities."""
        return self.results.missing

    @cached_property
    def sources(self) -> tuple[str | None, ...]:
        """The path of the file of each text, by its number, ``None`` for a text that is not a file.

        Paths are in results alone: no error, report or log has one, because a name of a file can be that of a patient.
        """
        texts = self.texts if _are_files(self.texts) else ()
        paths = [text.path for text in islice(texts, len(self))]
        return (*paths, *[None] * (len(self) - len(paths)))

    def to_dict(self) -> dict[str, Any]:
        """Return model, device, and for each text its entities, its error, or that it is missing, as plain mappings and lists.

        A text that is a file also has its ``source``; see :attr:`sources`.
        """
        texts: list[dict[str, Any]] = [{"entities": entities} for entities in self]
        for number, spans in self.results.dropped.items():
            texts[number]["dropped"] = [span._asdict() for span in spans]
        for number in self.missing:
            texts[number] = {"missing": True}
        for number, error in self.results.errors.items():
            texts[number] = {"error": error}
        if _are_files(self.texts):
            texts = [{"source": source, **text} for source, text in zip(self.sources, texts, strict=True)]
        return {"model": self.model, "device": self.device, "texts": texts}

    def to_json(self) -> Json:
        """Return :meth:`to_dict` as JSON."""
        return Json(json.dumps(self.to_dict(), ensure_ascii=False))

    def to_frame(self) -> pd.DataFrame:
        """Return a table with a row for each entity: ``note`` (its number), label, ``score``, ``word``, ``start``, ``end``.

        Returns:
            The table. Its index is that of the notes, if they came in a Series: ``found.to_frame().join(table["patient"])``
            gives each entity the patient of its note. A name of the index that a column has too gets ``_index`` at its end.
            Otherwise, rows are numbered.

        Where the texts are files, the column ``source`` has the path of each; see :attr:`sources`.

        Raises:
            ConfigurationError: If pandas is not installed.
        """
        try:
            import pandas as pd
        except ImportError as error:
            raise ConfigurationError("to_frame() needs pandas.", "Install it: python -m pip install pandas.") from error
        columns = self.results.columns()
        if _are_files(self.texts):
            columns["source"] = [self.sources[number] for number in columns["note"]]
        frame = pd.DataFrame(columns)
        if self.row_index is None:
            return frame
        index = self.row_index.take(frame["note"])
        names = [f"{name}_index" if name in columns else name for name in index.names]
        return frame.set_axis(index.set_names(names))

    def show(self, number: int) -> AnnotatedText:
        """Return one of the texts with its entities marked.

        Args:
            number: Its number, from 0.

        Returns:
            The text as ``annotate`` returns it for a single one; files, and texts that were not kept, are read again.

        Raises:
            ConfigurationError: For a number that no text has, and for a text that has changed since, or that came from
                a generator, of which only the first are kept.
            InvalidTextError: For a text without an answer, and for one that cannot be read again.

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
            raise ConfigurationError("There are no texts to show.", "Annotate some.")
        which = check_integer("number", number, 0, len(self) - 1)
        if why := self.results.errors.get(which):
            raise InvalidTextError(why, "Read another text; .errors has those without an answer.")
        if self.results.is_missing(which):
            return AnnotatedText("", (), self.model, self.device, self.show_text, missing=True)
        shown = self.preview_texts[which] if which < len(self.preview_texts) else self._text(which)
        dropped = self.results.dropped.get(which, ())
        entities = tuple(self[which])
        return AnnotatedText(
            shown,
            entities,
            self.model,
            self.device,
            self.show_text,
            dropped=dropped,
            known_labels=self.known_labels,
            filters=self.settings.get("only", ()),
        )

    def mask(self, replacement: Policy = REPLACEMENT) -> MaskedTexts:
        """Return the texts with their entities replaced, such as the personal data that a privacy filter finds.

        Args:
            replacement: What stands for an entity, with ``{label}`` for its label; or a mapping with such a text for some labels,
                in capitals or not, and ``None`` for those that stay. Labels that it does not name become ``"[{label}]"``.

        Returns:
            A list that shows the first texts: for each text its ``text`` with replacements, ``spans`` with places in both
            texts, and ``original_offset(position)``. A span takes whole words. A text without an answer has an ``error``, and
            nothing of it is returned; ``missing`` tells of a missing value.

        Raises:
            ConfigurationError: For a replacement that cannot be used, and for texts that have changed since, or that came from a
                generator, of which only the first are kept.
            InvalidTextError: For a text that cannot be read again.

        It is no guarantee: what the model does not find stays. Measure its recall on texts like yours before you rely on it.

        Example:
            >>> from openmed_nb import annotate
            >>> found = annotate(["She has asthma.", "No complaints."], "bundled_small", device="cpu")
            >>> [one.text for one in found.mask({"DISEASE": "***"})]
            ['She has ***.', 'No complaints.']
        """
        policy = validate_policy(replacement)
        if isinstance(policy, Mapping):
            _warn_of_absent(policy, self.results.masked_labels, self.known_labels)
        again = iter(()) if self.texts is None else iter_texts(self.texts)
        masked = MaskedTexts()
        masked.known_labels = replaced(self.known_labels, policy)
        masked.filters = self.settings.get("only", ())
        for which, entities in enumerate(self):
            given = next(again, None)
            if why := self.results.errors.get(which):
                masked.append(MaskedText("", error=why))
                continue
            if self.results.is_missing(which):
                masked.append(MaskedText("", show_text=self.show_text, missing=True))
                continue
            text = self.preview_texts[which] if which < len(self.preview_texts) else self._checked(which, given)
            spans = masked_spans(entities, self.results.dropped.get(which, ()))
            masked.append(
                mask_text(text, spans, policy, self.show_text, labels=self.known_labels, filters=masked.filters)
            )
        return masked

    def _text(self, which: int) -> str:
        """Read a text again, if it still is the one that was annotated."""
        again = () if self.texts is None else islice(iter_texts(self.texts), which, None)
        return self._checked(which, next(iter(again), None))

    def _checked(self, which: int, found: Any) -> str:
        """Return what a text says, if it still is the one that was annotated."""
        remedy = "Annotate it again to see it."
        if self.texts is None:
            what = f"Text {which} came from a generator, and only the first {len(self.preview_texts)} were kept."
            if "words" in self.settings:
                what = f"Text {which} was not kept when this result was pickled."
            raise ConfigurationError(what, remedy)
        found = found.refresh() if isinstance(found, TextReference) else found
        if text_fingerprint(found) != self.results.fingerprints[which]:
            raise ConfigurationError(f"Text {which} has changed since it was annotated.", remedy)
        found = read_text(found, which)
        if isinstance(found, OpenMedError):
            raise found
        return (self.settings.get("delimiter") or "").join([found] if isinstance(found, str) else found)

    def filter(self, *labels: str, min_score: float = 0.0) -> Annotations:
        """Return the same texts with some of their entities alone.

        Args:
            labels: The labels to keep, in capitals or not; all where none is named.
            score: The least score to keep, from 0 to 1.

        Returns:
            Annotations of the same texts: a text whose entities are all left out has an empty list. Nothing goes on from
            them: ``resume`` refuses them.

        Raises:
            ConfigurationError: For a label that is not a text, and a score that is none.

        Example:
            >>> from openmed_nb import annotate
            >>> found = annotate(["She has asthma.", "No complaints."], "bundled_small", device="cpu")
            >>> [[one["word"] for one in entities] for entities in found.filter("disease", min_score=0.9)]
            [['asthma'], []]
        """
        least = in_range("score", min_score, 1.0, example="0.9")
        if not (labels or least):
            return self
        for label in labels:
            if not isinstance(label, str):
                raise invalid_value("A label", label, "Pass one as it stands in the results, such as 'disease'.")
        _warn_of_absent(labels, self.results.labels, self.known_labels)
        named = " or ".join(map(shorten, labels))
        sentence = f"Only {named or 'entities'}" + (f" with a score from {least:g}." if least else ".")
        settings = {**self.settings, "only": (*self.settings.get("only", ()), sentence)}
        kept = self.results.only({label.casefold() for label in labels}, least)
        known = self.known_labels
        if known is not None and labels:
            wanted = {*map(_kind_of, labels)}
            known = tuple(label for label in known if _kind_of(label) in wanted)
        return replace(self, results=kept, settings=settings, known_labels=known)

    def summary(self) -> Summary:
        """Return counts: of texts, of entities by label, and of the words that were found most often."""
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
        """Return what there is to show: counts, and the first texts with their entities marked."""
        summary = self.summary().to_report()
        if not self.show_text:
            return Report(summary.title, (*summary.sentences, HIDDEN_TEXT_NOTICE), tables=summary.tables[:1])
        first, count = len(self.preview_texts), len(self)
        shown = (f"Shown: the first {first} texts.",) if 0 < first < count else ()
        rest = [f"The first {first} of {count:,} texts."] if shown else []
        if first < count and self.texts is not None:
            rest += [f"found.show({first}) shows {'another' if first else 'one'}, where found is this result."]
        spoken = (summary.title, *summary.sentences, " ".join(rest)) if rest else ()
        said = (*summary.sentences, *shown)
        return Report(summary.title, said, summary.tables[:1], tuple(self._pieces()), html_sentences=spoken)

    def _pieces(self) -> Iterator[TextSegment]:
        for number, (text, entities) in enumerate(zip(self.preview_texts, self, strict=False)):
            yield TextSegment(f"{number}: ", starts_text=True)
            if number in self.results.errors:  # It may be one that nothing can show, such as half of a surrogate pair.
                yield TextSegment("(no answer)\n")
                continue
            if self.results.is_missing(number):
                yield TextSegment("(missing)\n")
                continue
            shown = text[:MAX_TEXT_CHARACTERS]
            yield from highlight_entities(shown, [entity for entity in entities if entity["end"] <= len(shown)])
            yield TextSegment("…\n" if len(shown) < len(text) else "\n")
