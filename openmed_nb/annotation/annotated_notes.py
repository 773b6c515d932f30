"""Notes with their entities: their texts, tables, counts and display."""

from __future__ import annotations

import operator
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import cached_property
from itertools import chain, islice, repeat
from numbers import Number
from typing import TYPE_CHECKING, Any

from .._render.display import Displayable, OverlappingSpan, Report, Table, TextSegment, pluralize
from .._utils.text import describe_value, straighten_apostrophes
from .._utils.validation import is_finite_number, is_hashable
from ..errors import ConfigurationError, OpenMedError, PositionError
from ..models.registry import BUNDLED
from .boundaries import MISREAD, is_other_language
from .context import context_mark
from .inputs import ID_COLUMN, NOTE_COLUMN, make_id_column
from .masking import HIDDEN_TEXT_NOTICE
from .matching import NoteKeys, are_positions, find_positions, list_positions
from .presentation import LiveNotes, displayable, entities_headline, label_noun, note_name, origin_details
from .references import FileReference, TextReference, get_row_index, iter_texts, read_text, text_fingerprint
from .storage import Entity, ResultStore, entity_span

if TYPE_CHECKING:
    import pandas as pd

    from .export.notes import ExportedNote
    from .gold import GoldSpan
    from .scores import Scores

# Maximum number of displayed table rows and characters of a text.
MAX_TABLE_ROWS = 10
MAX_TEXT_CHARACTERS = 2000

# Number of notes whose language is checked.
NUM_CHECKED_NOTES = 20


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


@dataclass(frozen=True, repr=False, eq=False)
class AnnotatedNotes(LiveNotes, Sequence[list[Entity]]):
    """Notes with their entities, as a browser, a review and an export read them.

    Its subclass :class:`~openmed_nb.annotation.results.Annotations` documents the attributes, and has the public operations.
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

    def score(self, gold: Any, *, seed: int = 0) -> Scores:
        """Return the scores of the entities; see :meth:`Annotations.score`."""
        raise NotImplementedError

    def show(self, number: Any = None) -> Displayable:
        """Return one of the texts for display; see :meth:`Annotations.show`."""
        raise NotImplementedError

    def __getstate__(self) -> dict[str, Any]:
        """Return the state for pickling.

        Errors are sent to logs and to other processes, so the results that are attached to them must not contain texts.
        """
        # Cached properties such as ``sources`` are excluded.
        state = {field.name: getattr(self, field.name) for field in fields(self)}
        if self.unfinished:
            state |= {"results": ResultStore(), "preview_texts": (), "texts": None, "ids": None}
        return state

    def __len__(self) -> int:
        return len(self.results)

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, slice):
            return self.results[index]
        position = self.locate(index)
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
        indices = self.indices_by_id.get(note_id, ()) if is_hashable(note_id) else ()
        if len(indices) != 1:
            message = "No text has this id."
            if indices:
                message = f"{len(indices)} texts have this id, at positions {list_positions(indices)}."
            remedy = "Pass one of found.ids, which are from ids= or id_column=, or a position, from 0, to found.at()."
            raise ConfigurationError(message, remedy)
        return indices[0]

    def locate(self, key: Any) -> Any:
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
    def indices_by_id(self) -> Mapping[Any, Sequence[int]]:
        """The positions of the texts with each id."""
        return find_positions(() if self.ids is None else self.ids)

    @property
    def row_index(self) -> Any:
        """Index of the Series or column of the texts, or ``None``."""
        return get_row_index(self.texts)

    @property
    def own_ids(self) -> list[Any] | None:
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
        texts = self.texts
        if isinstance(texts, tuple) and all(isinstance(text, FileReference) for text in texts):
            return tuple(text.path for text in texts[: len(self)])
        return (None,) * len(self)

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

    def to_frame_with_ids(self) -> pd.DataFrame:
        """Return :meth:`to_frame` for a file, which has no index: the ids of a Series are in a column."""
        return self.to_keyed_frame(self.entity_columns(), has_index=False)

    def entity_columns(self) -> dict[str, Any]:
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
    def note_keys(self) -> NoteKeys:
        """Ids, index and fingerprints of the notes."""
        return NoteKeys(self.own_ids, self.id_name, self.row_index, self.text_name, self.results.fingerprints)

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
        ids = self.own_ids
        id_name = self.id_name
        row_index = self.row_index
        if ids is None and not (has_index or row_index is None or are_positions(row_index)):
            ids = row_index
            id_name = row_index.name if isinstance(row_index.name, str) else ID_COLUMN
        if any(self.sources):
            frame["source"] = make_id_column([self.sources[index] for index in notes])
        if ids is not None:
            frame.insert(1, ID_COLUMN if id_name in frame else id_name, make_id_column([ids[index] for index in notes]))
        if row_index is None or not has_index:
            return frame
        index = row_index.take(notes)
        names = [f"{name}_index" if name in frame else name for name in index.names]
        return frame.set_axis(index.set_names(names))

    def add_columns(self, frame: pd.DataFrame, table: pd.DataFrame | None) -> pd.DataFrame:
        """Return a frame with the column ``note_index`` and the other columns of a table of the notes, if there is one."""
        if table is None:
            return frame
        import pandas as pd

        rows = self.note_keys.find_rows(table)
        others = table.drop(columns=[self.id_name, self.text_name], errors="ignore")
        repeated = [name for name in others.columns if name in frame.columns]
        if repeated:
            message = f"The table has a column {describe_value(repeated[0])}, as the table of entities."
            raise ConfigurationError(message, "Rename the column.")
        others = others.take([rows[note] for note in frame[NOTE_COLUMN]]).set_axis(frame.index)
        return pd.concat([frame, others], axis=1)

    def iter_note_texts(self, start: int = 0, *, verify: bool = True) -> Iterator[str | None]:
        """Yield the original texts. Files are read again.

        Args:
            start: Index of the first text.
            verify: Whether to compare each text with its fingerprint, which takes most of the time.

        Yields:
            The text, or ``None`` if it is missing, has an error, has changed since it was annotated, or came from a generator and is
            not one of the stored first texts.
        """
        for text in self.read_texts(start, verify):
            yield None if isinstance(text, OpenMedError) else text

    def read_texts(self, start: int = 0, verify: bool = True) -> Iterator[str | OpenMedError | None]:
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
        remedy = "Annotate a list or a table of the texts again for this."
        if self.texts is None:
            message = f"Text {index} came from a generator; only the first {len(self.preview_texts)} were stored."
            return ConfigurationError(message, remedy)
        text = text.refresh() if isinstance(text, TextReference) else text
        if verify and text_fingerprint(text) != self.results.fingerprints[index]:
            return ConfigurationError(f"Text {index} has changed since it was annotated.", remedy)
        contents: str | OpenMedError = read_text(text, index)
        return contents

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
    def text_notices(self) -> tuple[str, ...]:
        """Sentences about the first notes: how many have a wrong encoding, or another language than that of the model."""
        texts = [text[:MAX_TEXT_CHARACTERS] for text in islice(self.iter_note_texts(), NUM_CHECKED_NOTES) if text]
        sample = f" (of the first {NUM_CHECKED_NOTES})" if len(self) > NUM_CHECKED_NOTES else ""
        notices = []
        if num_misread := len([text for text in texts if MISREAD.search(text)]):
            notes = pluralize(num_misread, "note seems", "notes seem")
            notices.append(f"{notes} to be read in a wrong encoding{sample}. Read the file with encoding='utf-8'.")
        num_other = len([text for text in texts if is_other_language(text)])
        if num_other and self.model in BUNDLED:
            notes = pluralize(num_other, "note is", "notes are")
            notices.append(f"{notes} mostly not in English{sample}. The model {self.model} reads English only.")
        return tuple(notices)

    def head_report(self) -> Report:
        """Return the counts, which are displayed above the notes."""
        # The words of the entities are not displayed, so they are not counted.
        report = replace(self, show_text=False).summary().to_report()
        return replace(
            report,
            sentences=(*self.text_notices, *report.sentences),
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

        self.check_aggregated()
        return [GoldSpan(*entity_span(entity)) for entity in self.results[index]]

    def check_aggregated(self) -> None:
        if self.results.key == "entity":
            message = "The results contain tokens that are not aggregated to entities."
            raise ConfigurationError(message, "Annotate with aggregation_strategy='simple' or another strategy.")

    def iter_records(self) -> Iterator[dict[str, Any]]:
        """Yield a JSON-compatible object for each note: its id or position, text, and entities or error."""
        for index, (text, record) in enumerate(zip(self.iter_note_texts(), self._records(), strict=True)):
            key = {} if "id" in record else {NOTE_COLUMN: index}
            yield {**key, "text": text, **record}

    def iter_exported_notes(self) -> Iterator[ExportedNote | None]:
        """Yield the notes to export, or ``None`` for a note without a text."""
        from .export.notes import ExportedNote

        for index, text in enumerate(self.iter_note_texts()):
            if text is None:
                yield None
                continue
            scores = tuple(entity["score"] for entity in self.results[index])
            yield ExportedNote(self._json_id(index), index, text, tuple(self.note_spans(index)), scores)


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
