"""A review of annotations: a random sample of notes in which a user marks right, wrong and missed entities."""

from __future__ import annotations

import operator
import os
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from .._render.display import Report, pluralize
from .._utils.validation import check_bool, check_choice, check_integer, check_optional_integer, is_hashable
from ..errors import ConfigurationError
from .context import CONTEXT_LABELS, CONTEXT_VALUES, check_context_values
from .gold import GoldSpan, GoldText, GoldTexts, parse_span
from .inputs import NOTE_COLUMN
from .json_lines import LineFile
from .matching import find_positions
from .presentation import LiveNotes

if TYPE_CHECKING:
    import pandas as pd

    from .annotated_notes import AnnotatedNotes
    from .scores import SchemeScores, Scores

FORMAT = "openmed_nb review, 1"

# Columns of the marked entities, and their types.
_COLUMNS: Mapping[str, type] = {
    NOTE_COLUMN: np.int64,
    "entity_group": object,
    "span_text": object,
    "start": np.int64,
    "end": np.int64,
    "mark": object,
}

SAMPLE_NOTICE = "The notes are in random order. Add the missed entities, too: recall cannot be measured from the found entities alone."
NOT_SAVED_NOTICE = (
    "The review is not saved, and is lost when the kernel stops. "
    'To save each mark at once, pass a file name: found.review("review.jsonl").'
)


# Values of an entity by column of context.
Context = Mapping[str, bool | str]


class NoteMarks(NamedTuple):
    """The marks of a note.

    Attributes:
        spans: Values of the columns of context of each true entity, or ``None`` for an entity that is wrong.
        finished: Whether the user marked the note as reviewed.
    """

    spans: Mapping[GoldSpan, Context | None]
    finished: bool

    @property
    def right(self) -> list[GoldSpan]:
        """The true entities."""
        return [span for span, values in self.spans.items() if values is not None]


_NO_MARKS = NoteMarks({}, False)


class Review(LiveNotes):
    """A review of annotations, as :meth:`Annotations.review` returns it.

    In a notebook, it is displayed as a browser of the notes of the sample. Only notes that are marked as reviewed count.

    Attributes:
        found: The reviewed :class:`Annotations`.
        path: File of the review, or ``None`` if it is not saved.
        notes: Ids of the notes of the sample, or their positions if there are no ids, in random order. A note whose id is missing
            or occurs more than once has its position as ``"#3"``. The first notes are a random sample, too.
        seed: Seed of the sample.
        labels: Labels of the model, which :meth:`mark` accepts.
        entities: Entities of the model in each of these notes.
        context_values: Values of each column of context of the reviewed annotations, which the user can correct.
    """

    JSON_PROPERTIES = ("num_notes", "num_reviewed")

    def __init__(
        self, found: AnnotatedNotes, path: str | os.PathLike[str] | None, sample: int | None, seed: int
    ) -> None:
        sample = check_optional_integer("sample", sample)
        self.found = found
        self.seed = check_integer("seed", seed, 0)
        if not found.show_text:
            raise ConfigurationError("The texts are hidden.", "Annotate with show_text=True to review the notes.")
        if found.texts is None and len(found.preview_texts) < len(found):
            raise ConfigurationError(
                f"The texts came from a generator; only the first {len(found.preview_texts)} were stored.",
                "Annotate a list of the texts to review them.",
            )
        candidates = np.delete(np.arange(len(found)), [*found.errors, *found.missing])
        positions: list[int] = np.random.default_rng(self.seed).permutation(candidates)[:sample].tolist()
        if not positions:
            raise ConfigurationError("There are no notes to review.", "Annotate at least one note.")
        self._positions_by_id = find_positions(range(len(found)) if found.ids is None else found.ids)
        unique = {positions[0]: note_id for note_id, positions in self._positions_by_id.items() if len(positions) == 1}
        mark = "#"
        while any(str(note_id).startswith(mark) for note_id in unique.values()):  # A name must not be an id.
            mark += "#"
        self._names = [unique.get(position, f"{mark}{position}") for position in range(len(found))]
        self._positions = {self._names[position]: position for position in positions}
        self.notes: tuple[Any, ...] = tuple(self._positions)
        self.labels = sorted({*(found.known_labels or ()), *found.results.labels})
        self.entities = {note: found.note_spans(position) for note, position in self._positions.items()}
        self.context_values = {name: values for name, values in CONTEXT_VALUES.items() if name in found.results.context}
        self._marks: dict[int, NoteMarks] = {}
        self._history: list[tuple[int, NoteMarks, NoteMarks]] = []  # Marks of a note before and after each change.
        header = {"format": FORMAT, "notes": found.results.text_fingerprint(), "seed": self.seed}
        self._file = None if path is None else LineFile(path, "path", "review", header)
        self._read_file()

    def __len__(self) -> int:
        return len(self.found)

    def position_of(self, note: object) -> int:
        """Return the position of a note in the annotations, or raise an error if the note is not in the sample."""
        message = "The note is not in the sample."
        if is_hashable(note) and not isinstance(note, bool):
            if note in self._positions:
                return self._positions[note]
            if len(self._positions_by_id.get(note, ())) > 1:
                message = "Several notes have this id."
        raise ConfigurationError(message, "Use one of review.notes.")

    @property
    def num_notes(self) -> int:
        """Number of notes in the sample."""
        return len(self.notes)

    @property
    def num_reviewed(self) -> int:
        """Number of reviewed notes."""
        return sum(map(self.is_reviewed, self.notes))

    @property
    def gold(self) -> GoldTexts:
        """The true entities of the reviewed notes: those marked as right, and the missed ones."""
        texts = []
        for note, position in self._reviewed_notes():
            spans = tuple(sorted(self.note_marks(note).right))
            texts.append(GoldText(None if self.found.ids is None else self.found.ids[position], None, spans, position))
        return GoldTexts(tuple(texts))

    def to_frame(self, table: pd.DataFrame | None = None) -> pd.DataFrame:
        """Return a DataFrame with one row per entity of the reviewed notes.

        The columns are ``note_index`` (position of the text), the ids if ids were passed, ``entity_group``, ``span_text`` (the characters of the
        note), ``start``, ``end`` and ``mark``: ``"right"``, ``"wrong"``, or ``"missed"`` for an entity that the model missed. Paths of
        files and the index of a Series are those of :meth:`Annotations.to_frame`. If the annotations have context, its corrected
        values follow; they are ``None`` for a wrong entity.

        Args:
            table: Table of the notes, whose other columns are added; see :meth:`Annotations.to_frame`.

        Raises:
            ConfigurationError: If pandas is not installed, or if the table has columns of the same names.
            UnmatchedIdsError: If a note does not have exactly one row in the table.

        Example:
            >>> from openmed_nb import annotate
            >>> found = annotate({"a7": "Has asthma."}, "bundled_small", device="cpu")
            >>> review = found.review()
            >>> review.accept("a7")
            >>> review.to_frame()[["note_id", "span_text", "mark"]].values.tolist()
            [['a7', 'asthma', 'right']]
        """
        rows = []
        for note, position in self._reviewed_notes():
            text = next(self.found.iter_note_texts(position)) or ""
            for span, values in sorted(self.note_marks(note).spans.items()):
                mark = "wrong" if values is None else "right"
                if span not in self.entities[note]:
                    if values is None:  # Neither the model nor the user claims this entity.
                        continue
                    mark = "missed"
                context = [(values or {}).get(name) for name in self.context_values]
                rows.append((position, span.label, text[span.start : span.end], span.start, span.end, mark, *context))
        columns: dict[str, np.ndarray] = {}
        for index, name in enumerate([*_COLUMNS, *self.context_values]):
            columns[name] = np.array([row[index] for row in rows], _COLUMNS.get(name, object))
        return self.found.add_columns(self.found.to_keyed_frame(columns), table)

    def score(self, *, seed: int = 0) -> Scores:
        """Return the scores of the entities in the reviewed notes, and of their context; see :meth:`Annotations.score`.

        The intervals describe all notes only if the reviewed notes are a random sample, so review them in the order of the list.

        Args:
            seed: Seed of the resampling for the intervals.

        Raises:
            ConfigurationError: If no note was reviewed.
        """
        return self.found.score(self, seed=seed)

    def score_context(self, found: AnnotatedNotes, seed: int) -> dict[str, SchemeScores]:
        """Return the scores of each context label over the entities of results that have the boundaries of a true entity."""
        from .scores import score_spans

        predicted: dict[int, list[GoldSpan]] = {}
        expected: dict[int, list[GoldSpan]] = {}
        for note, position in self._reviewed_notes():
            predicted[position] = []
            expected[position] = []
            contexts = {span: values for span, values in self.note_marks(note).spans.items() if values}
            of_boundaries = {span[:2]: values for span, values in contexts.items()}
            for span, entity in zip(found.note_spans(position), found.results[position], strict=True):
                values = contexts.get(span) or of_boundaries.get(span[:2], {})
                for label, (name, value) in CONTEXT_LABELS.items():
                    if name not in values or name not in entity:  # Only one side has this column.
                        continue
                    if entity[name] == value:
                        predicted[position].append(span._replace(label=label))
                    if values[name] == value:
                        expected[position].append(span._replace(label=label))
        scores = score_spans(found.model, predicted, expected, found.show, seed)
        return {label: of_label.strict for label, of_label in scores.labels.items()}

    def gold_of(self, found: AnnotatedNotes) -> GoldTexts:
        """Return the true entities if results belong to the same notes, of which at least one is reviewed."""
        if found.results.text_fingerprint() != self.found.results.text_fingerprint():
            raise ConfigurationError(
                "The review belongs to other notes.", "Pass a review of the same notes, in the same order."
            )
        if not self.num_reviewed:
            raise ConfigurationError("No note is reviewed.", "Mark at least one note as reviewed.")
        # The notes are the same, in the same order.
        return GoldTexts(tuple(text._replace(id=None) for text in self.gold))

    def mark(
        self, note: Any, start: int, end: int, label: str, right: bool | None = True, **context: bool | str
    ) -> None:
        """Mark a span of a note.

        Args:
            note: Id or position of the note, one of :attr:`notes`.
            start: Start of the span in characters.
            end: End of the span in characters, exclusive.
            label: Label of the span, one of :attr:`labels`.
            right: ``True`` for a true entity, also for one that the model missed. ``False`` for an entity of the model that is
                wrong. ``None`` removes the mark. The first mark of a true entity marks those of the model with the same label that
                overlap it as wrong.
            context: Correct values of columns of the reviewed annotations, such as ``negated=True``. The others remain unchanged. A
                missed entity has those of the entity that it overlaps, or else not negated, not uncertain, recent and patient.

        Raises:
            ConfigurationError: If the note is not in the sample, the span is not in its text, the model does not have the label, the
                annotations do not have this context, a wrong span is not an entity of the model, or the file cannot be written.

        Example:
            >>> from openmed_nb import annotate
            >>> found = annotate(["Asked about asthma, never had it.", "No flu."], "bundled_small", device="cpu").with_context()
            >>> review = found.review()
            >>> review.mark(0, 12, 18, "DISEASE", negated=True)
            >>> review.accept(0), review.accept(1)
            (None, None)
            >>> review.score().context["negated"].recall
            0.5
        """
        position = self.position_of(note)
        span = parse_span((start, end, label))
        text = next(self.found.iter_note_texts(position))
        if span is None or (text is not None and span.end > len(text)):
            raise ConfigurationError(
                "The mark is not a span of the note.",
                "Pass its start and its end, exclusive, in characters of the text.",
            )
        if right is not None:
            check_bool("right", right)
            check_choice("label", span.label, self.labels)
        check_context_values(self.context_values, context)
        if context and not right:
            raise ConfigurationError("Only a right entity has a context.", "Remove the context, or pass right=True.")
        self._read_file()
        marks = {**self.note_marks(note).spans}
        if right is False and span not in {*self.entities[note], *marks}:
            raise ConfigurationError(
                "The model found no entity with these boundaries and this label.", "Pass one of review.entities[note]."
            )
        if right is None:
            marks.pop(span, None)
        else:
            if right and span not in marks:
                # The boundaries of the found entities that overlap it are wrong.
                found = [entity for entity in self.entities[note] if entity.label == span.label]
                marks.update(dict.fromkeys(filter(span.overlaps, found)))
            marks[span] = {**self._start_context(note, span, self.contexts(note)), **context} if right else None
        finished = self.is_reviewed(note) and (right is not None or span not in self.entities[note])
        self._change(note, NoteMarks(marks, finished))

    def accept(self, note: object) -> None:
        """Mark the entities of a note that have no mark as right, and the note as reviewed.

        Args:
            note: Id or position of the note, one of :attr:`notes`.

        Raises:
            ConfigurationError: If the note is not in the sample, or if the file cannot be written.
        """
        self._read_file()
        marks = self.note_marks(note).spans
        right = {span: values for span, values in self.contexts(note).items() if marks.get(span, values) is not None}
        self._change(note, NoteMarks({**marks, **right}, True))

    def undo(self) -> object:
        """Restore the marks before the last change of this review, and return the note.

        Raises:
            ConfigurationError: If nothing was changed, if the note was changed elsewhere since, or if the file cannot be written.
        """
        if not self._history:
            raise ConfigurationError(
                "There is no mark to undo since the review was opened.", "Change a mark in its row."
            )
        self._read_file()
        position, previous, changed = self._history[-1]
        note = self.note_at(position)
        if self.note_marks(note) != changed:
            raise ConfigurationError(
                f"The note at position {position} was changed elsewhere since.",
                "Undo the change there, or correct the marks of the note.",
            )
        self._save(position, previous)
        self._history.pop()
        return note

    def finish(self, note: Any, finished: bool = True) -> None:
        """Mark a note as reviewed.

        Args:
            note: Id or position of the note, one of :attr:`notes`.
            finished: Whether the note is reviewed.

        Raises:
            ConfigurationError: If the note is not in the sample, if an entity of the model is not marked, or if the file cannot be
                written.
        """
        check_bool("finished", finished)
        self._read_file()
        if finished and (unmarked := self.unmarked_spans(note)):
            raise ConfigurationError(
                f"{pluralize(len(unmarked), 'entity is', 'entities are')} not marked.",
                "Mark each of them as right or wrong.",
            )
        self._change(note, self.note_marks(note)._replace(finished=finished))

    def is_reviewed(self, note: object) -> bool:
        """Return whether a note is reviewed and all of its entities are marked."""
        return self.note_marks(note).finished and not self.unmarked_spans(note)

    def to_report(self) -> Report:
        """Return the progress of the review."""
        return Report(self.progress(), self.notices())

    def _create_view(self) -> Any:
        """Return a browser of the notes of the sample."""
        from .browsing import BrowserView, ReviewListing

        return BrowserView(ReviewListing(self))

    def note_marks(self, note: object) -> NoteMarks:
        """Return the marks of a note."""
        return self._marks.get(self.position_of(note), _NO_MARKS)

    def marked_spans(self, note: object) -> Mapping[GoldSpan, bool]:
        """Return whether each marked span of a note is a true entity."""
        return {span: values is not None for span, values in self.note_marks(note).spans.items()}

    def contexts(self, note: object) -> Mapping[GoldSpan, Context]:
        """Return the context of each entity: the marked values, or else those of the results or of an overlapping entity."""
        position = self.position_of(note)
        entities = zip(self.entities[note], self.found.results[position], strict=True)
        contexts = {span: {name: entity[name] for name in self.context_values} for span, entity in entities}
        for span, values in self.note_marks(note).spans.items():
            contexts[span] = {**self._start_context(note, span, contexts), **(values or {})}
        return contexts

    def _start_context(self, note: object, span: GoldSpan, contexts: Mapping[GoldSpan, Context]) -> Context:
        """Return the context of an entity before it is corrected.

        A missed entity often corrects the boundaries of an entity of the model, so it has the context of the closest of those that
        it overlaps.
        """
        if span in contexts:
            return contexts[span]
        overlapping = [entity for entity in self.entities[note] if span.overlaps(entity)]
        if not overlapping:
            return {name: values[0] for name, values in self.context_values.items()}
        return contexts[
            min(overlapping, key=lambda entity: abs(entity.start - span.start) + abs(entity.end - span.end))
        ]

    def unmarked_spans(self, note: object) -> list[GoldSpan]:
        """Return the entities of a note without a mark."""
        marks = self.marked_spans(note)
        return [span for span in self.entities[note] if span not in marks]

    def note_at(self, position: int) -> Any:
        """Return the id in :attr:`notes` of the note at a position of the annotations."""
        return self._names[position]

    def _reviewed_notes(self) -> list[tuple[Any, int]]:
        """Return the reviewed notes and their positions, by position."""
        notes = [(note, position) for note, position in self._positions.items() if self.is_reviewed(note)]
        return sorted(notes, key=operator.itemgetter(1))

    def notices(self) -> tuple[str, ...]:
        """Return the sentences below the notes."""
        return (SAMPLE_NOTICE,) if self._file is not None else (SAMPLE_NOTICE, NOT_SAVED_NOTICE)

    def progress(self) -> str:
        """Return the number of reviewed notes as a sentence, and after the last one the next step."""
        count = self.num_reviewed
        sentence = f"{count:,} of {pluralize(self.num_notes, 'note')} reviewed."
        return f"{sentence} Compute the scores with review.score()." if count == self.num_notes else sentence

    def _change(self, note: object, marks: NoteMarks) -> None:
        """Save the marks of a note, so that the change can be undone."""
        previous = self.note_marks(note)
        if marks != previous:
            position = self.position_of(note)
            self._save(position, marks)
            self._history.append((position, previous, marks))

    def _save(self, position: int, marks: NoteMarks) -> None:
        """Append the marks of a note to the file, and store them."""
        if self._file is not None:
            context = [marks.spans[span] for span in marks.right]
            wrong = [span for span, values in marks.spans.items() if values is None]
            line = {
                "note": position,
                "right": marks.right,
                "context": context,
                "wrong": wrong,
                "finished": marks.finished,
            }
            self._file.append([line])
        self._marks[position] = marks

    def _read_file(self) -> None:
        """Read the marks in the file, which another kernel may have changed."""
        if self._file is None:
            return
        lines = list(self._file.read())
        if not lines:  # The file is new, or somebody has removed it.
            for position, marks in self._marks.items():
                self._save(position, marks)
        for line in lines:
            # The lines of an older file have no context.
            contexts = line.get("context", [{}] * len(line["right"]))
            spans: dict[GoldSpan, Context | None] = dict.fromkeys(GoldSpan(*span) for span in line["wrong"])
            spans.update((GoldSpan(*span), values) for span, values in zip(line["right"], contexts, strict=True))
            self._marks[line["note"]] = NoteMarks(spans, line["finished"])
