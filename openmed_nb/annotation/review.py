"""A review of annotations: a random sample of notes in which a user marks right, wrong and missed entities."""

from __future__ import annotations

import operator
import os
import re
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from .._render.display import Report, label_color, pluralize
from .._utils.text import describe_value
from .._utils.validation import check_bool, check_integer, check_optional_integer, check_path, is_hashable
from ..errors import ConfigurationError
from .boundaries import whole_words
from .browsing import NoteListing
from .gold import GoldSpan, GoldText, GoldTexts, parse_span
from .inputs import NOTE_COLUMN
from .json_lines import LineFile
from .matching import find_positions
from .presentation import LiveNotes

if TYPE_CHECKING:
    import pandas as pd

    from .scores import Scores

FORMAT = "openmed_nb review, 1"

# Label of a missed entity if the labels of the model are not known.
DEFAULT_LABEL = "ENTITY"

SAMPLE_NOTICE = "The notes are a random sample. Add the missed entities, too: recall cannot be measured from the found entities alone."
NOT_SAVED_NOTICE = 'The review is not saved. To save it, pass a file name: found.review("review.jsonl").'


class NoteMarks(NamedTuple):
    """The marks of a note.

    Attributes:
        spans: Whether each marked span is a true entity.
        finished: Whether the user marked the note as reviewed.
    """

    spans: Mapping[GoldSpan, bool]
    finished: bool


class _ReviewFile(LineFile):
    """The file of a review."""

    kind = "review"

    def other_header_error(self, values: Mapping[str, Any]) -> ConfigurationError:
        """Return the error of the file of another review."""
        if values.get("notes") != self.header["notes"]:
            return self.error("is a review of other notes", "Annotate the same notes, or use a different file.")
        seed = describe_value(values.get("seed"))
        return self.error(f"has a sample with seed {seed}", f"Pass seed={seed}, or use a different file.")


class Review(LiveNotes):
    """A review of annotations, as :meth:`Annotations.review` returns it.

    In a notebook, it is displayed as a browser of the notes of the sample. Only notes that are marked as reviewed count.

    Attributes:
        found: The reviewed :class:`Annotations`, which import this module.
        path: File of the review, or ``None`` if it is not saved.
        notes: Ids of the notes of the sample, or their positions if there are no unique ids, in random order. The first notes are
            a random sample, too.
        seed: Seed of the sample.
        entities: Entities of the model in each of these notes.
    """

    JSON_PROPERTIES = ("num_notes", "num_reviewed")

    def __init__(self, found: Any, path: str | os.PathLike[str] | None, sample: int | None, seed: int) -> None:
        sample = check_optional_integer("sample", sample)
        self.found = found
        self.seed = check_integer("seed", seed, 0)
        self.path = None if path is None else check_path(path, "path")
        if not found.show_text:
            raise ConfigurationError("The texts are hidden.", "Annotate with show_text=True to review the notes.")
        readable = np.ones(len(found), bool)
        readable[[*found.errors, *found.missing]] = False
        if found.texts is None and len(found.preview_texts) < len(found):
            message = f"The texts came from a generator; only the first {len(found.preview_texts)} were stored."
            raise ConfigurationError(message, "Annotate a list of the texts to review them.")
        candidates = np.flatnonzero(readable)
        order = np.random.default_rng(self.seed).permutation(candidates)
        positions = order[:sample].tolist()
        if not positions:
            raise ConfigurationError("There are no notes to review.", "Annotate at least one note.")
        ids = range(len(found)) if found.ids is None else found.ids
        self._names = ids if len(find_positions(ids)) == len(found) else range(len(found))
        self._positions = {self._names[position]: position for position in positions}
        self.notes: tuple[Any, ...] = tuple(self._positions)
        self.entities = {note: found.note_spans(position) for note, position in self._positions.items()}
        self._marks: dict[int, NoteMarks] = {}
        header = {"format": FORMAT, "notes": found.results.text_fingerprint(), "seed": self.seed}
        self._file = None if path is None else _ReviewFile(path, "path", header)
        self._read_file()

    def __len__(self) -> int:
        return len(self.found)

    @property
    def positions(self) -> tuple[int, ...]:
        """Positions of the notes of the sample in the annotations, in the order of :attr:`notes`."""
        return tuple(self._positions.values())

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
        texts = [
            GoldText(
                None if self.found.ids is None else self.found.ids[position],
                None,
                tuple(sorted(span for span, is_right in self.marked_spans(note).items() if is_right)),
                position,
            )
            for note, position in self._reviewed_notes()
        ]
        return GoldTexts(tuple(texts))

    def to_frame(self) -> pd.DataFrame:
        """Return a DataFrame with one row per entity of the reviewed notes.

        The columns are ``note_index`` (position of the text), the ids if ids were passed, ``entity_group``, ``span_text`` (the characters of the
        note), ``start``, ``end`` and ``mark``: ``"right"``, ``"wrong"``, or ``"missed"`` for an entity that the model missed. Paths of
        files and the index of a Series are those of :meth:`Annotations.to_frame`.

        Raises:
            ConfigurationError: If pandas is not installed.

        Example:
            >>> from openmed_nb import annotate
            >>> found = annotate({"a7": "Has asthma."}, "bundled_small", device="cpu")
            >>> review = found.review()
            >>> review.mark("a7", 4, 10, "DISEASE", right=True)
            >>> review.finish("a7")
            >>> review.to_frame()[["note_id", "span_text", "mark"]].values.tolist()
            [['a7', 'asthma', 'right']]
        """
        notes: list[int] = []
        spans: list[GoldSpan] = []
        words: list[str] = []
        marks: list[str] = []
        for note, position in self._reviewed_notes():
            text = next(self.found.iter_note_texts(position), None) or ""
            entities = {*self.entities[note]}
            for span, is_right in sorted(self.marked_spans(note).items()):
                is_found = span in entities
                if not is_found and not is_right:  # Neither the model nor the user claims this entity.
                    continue
                mark = "right" if is_right else "wrong"
                notes.append(position)
                spans.append(span)
                words.append(text[span.start : span.end])
                marks.append(mark if is_found else "missed")
        columns = {
            NOTE_COLUMN: np.array(notes, np.int64),
            "entity_group": np.array([span.label for span in spans], object),
            "span_text": np.array(words, object),
            "start": np.array([span.start for span in spans], np.int64),
            "end": np.array([span.end for span in spans], np.int64),
            "mark": np.array(marks, object),
        }
        return self.found.to_keyed_frame(columns)

    def score(self, *, seed: int = 0) -> Scores:
        """Return the scores of the entities in the reviewed notes; see :meth:`Annotations.score`.

        The intervals describe all notes only if the reviewed notes are a random sample, so review them in the order of the list.

        Args:
            seed: Seed of the resampling for the intervals.

        Raises:
            ConfigurationError: If no note was reviewed.
        """
        scores: Scores = self.found.score(self, seed=seed)
        return scores

    def gold_of(self, found: Any) -> GoldTexts:
        """Return the true entities if results belong to the same notes, of which at least one is reviewed."""
        if found.results.text_fingerprint() != self.found.results.text_fingerprint():
            message = "The review belongs to other notes."
            raise ConfigurationError(message, "Pass a review of the same notes, in the same order.")
        if not self.num_reviewed:
            raise ConfigurationError("No note is reviewed.", "Mark at least one note as reviewed.")
        return GoldTexts(
            tuple(text._replace(id=None) for text in self.gold)
        )  # The notes are the same, in the same order.

    def mark(self, note: Any, start: int, end: int, label: str, right: bool | None = True) -> None:
        """Mark a span of a note.

        Args:
            note: Id or position of the note, one of :attr:`notes`.
            start: Start of the span in characters.
            end: End of the span in characters, exclusive.
            label: Label of the span.
            right: ``True`` for a true entity, also for one that the model missed. ``False`` for an entity of the model that is
                wrong. ``None`` removes the mark.

        Raises:
            ConfigurationError: If the note is not in the sample, the span is not in its text, or the file cannot be written.
        """
        if right is not None:
            check_bool("right", right)
        position = self._check_note(note)
        span = parse_span((start, end, label))
        text = next(self.found.iter_note_texts(position), None)
        if span is None or (text is not None and span.end > len(text)):
            message = "The mark is not a span of the note."
            raise ConfigurationError(message, "Pass its start and its end, exclusive, in characters of the text.")
        if span.label != span.label.encode("utf-8", "replace").decode():
            raise ConfigurationError(
                "The label contains an unpaired surrogate.", "Pass a label of printable characters."
            )
        self._change_marks(note, {span: right})

    def mark_all(self, note: Any) -> None:
        """Mark the entities of a note that have no mark as right.

        Args:
            note: Id or position of the note, one of :attr:`notes`.

        Raises:
            ConfigurationError: If the note is not in the sample, or the file cannot be written.
        """
        marks = self.marked_spans(note)
        self._change_marks(note, {span: True for span in self.entities[note] if span not in marks})

    def _change_marks(self, note: Any, changes: Mapping[GoldSpan, bool | None]) -> None:
        """Change the marks of spans of a note. ``None`` removes a mark."""
        self._read_file()
        spans = {**self.marked_spans(note), **changes}
        marks = {span: is_right for span, is_right in spans.items() if is_right is not None}
        position = self._check_note(note)
        finished = position in self._marks and self._marks[position].finished
        self._save(position, NoteMarks(marks, finished and all(entity in marks for entity in self.entities[note])))

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
        position = self._check_note(note)
        self._read_file()
        if finished and (count := self.num_unmarked(note)):
            message = f"{pluralize(count, 'entity is', 'entities are')} not marked."
            raise ConfigurationError(message, "Mark each of them as right or wrong.")
        self._save(position, NoteMarks(self.marked_spans(note), finished))

    def is_reviewed(self, note: Any) -> bool:
        """Return whether a note is reviewed and all of its entities are marked."""
        position = self._check_note(note)
        return position in self._marks and self._marks[position].finished and not self.num_unmarked(note)

    def to_report(self) -> Report:
        """Return the progress of the review."""
        return Report(self.progress(), self.notices())

    def _create_view(self) -> Any:
        """Return a browser of the notes of the sample."""
        from .browser_view import BrowserView

        return BrowserView(ReviewListing(self))

    def marked_spans(self, note: Any) -> Mapping[GoldSpan, bool]:
        """Return whether each marked span of a note is a true entity."""
        position = self._check_note(note)
        return self._marks[position].spans if position in self._marks else {}

    def num_unmarked(self, note: Any) -> int:
        """Return the number of entities of a note without a mark."""
        marks = self.marked_spans(note)
        return len({*self.entities[note]} - marks.keys())

    def note_at(self, position: int) -> Any:
        """Return the id in :attr:`notes` of the note at a position of the annotations."""
        return self._names[position]

    def _reviewed_notes(self) -> list[tuple[Any, int]]:
        """Return the reviewed notes and their positions, by position."""
        notes = [(note, position) for note, position in self._positions.items() if self.is_reviewed(note)]
        return sorted(notes, key=operator.itemgetter(1))

    def notices(self) -> tuple[str, ...]:
        """Return the sentences below the notes."""
        return (SAMPLE_NOTICE,) if self.path is not None else (SAMPLE_NOTICE, NOT_SAVED_NOTICE)

    def progress(self) -> str:
        """Return the number of reviewed notes as a sentence."""
        return f"{self.num_reviewed:,} of {pluralize(self.num_notes, 'note')} reviewed."

    def _check_note(self, note: object) -> int:
        """Return the position of a note, or raise an error if the note is not in the sample."""
        position: int | None = None
        if is_hashable(note) and not isinstance(note, bool):
            position = self._positions.get(note)
        if position is None:
            raise ConfigurationError("The note is not in the sample.", "Use one of review.notes.")
        return position

    def _save(self, note: int, marks: NoteMarks) -> None:
        """Append the marks of a note to the file, and store them."""
        if self._file is not None:
            self._file.append([_marks_line(note, marks)])
        self._marks[note] = marks

    def _read_file(self) -> None:
        """Read the marks in the file, which another kernel may have changed. Write them if the file was deleted."""
        if self._file is None:
            return
        lines = list(self._file.read())
        if not lines and self._marks:
            self._file.append([_marks_line(note, marks) for note, marks in self._marks.items()])
        for line in lines:
            spans = {GoldSpan(*span): name == "right" for name in ("right", "wrong") for span in line[name]}
            self._marks[line["note"]] = NoteMarks(spans, line["finished"])


def _marks_line(note: int, marks: NoteMarks) -> dict[str, Any]:
    """Return the marks of a note as a line of the file."""
    return {
        "note": note,
        "right": [span for span, is_right in marks.spans.items() if is_right],
        "wrong": [span for span, is_right in marks.spans.items() if not is_right],
        "finished": marks.finished,
    }


class ReviewListing(NoteListing):
    """The notes of a review in a browser. It has no filters, because every entity of a note is marked.

    A review that continues displays its first note that is not reviewed.

    Attributes:
        review: The review.
    """

    def __init__(self, review: Review) -> None:
        super().__init__(review.found)
        self.review = review
        self.matches = np.array([*review.positions], np.int64)
        is_reviewed = [review.is_reviewed(note) for note in review.notes]
        self.position = 0 if all(is_reviewed) else is_reviewed.index(False)

    def apply(self, event: Mapping[str, Any]) -> None:
        """Apply what a user did, or raise an error."""
        action = event["action"]
        if action in {"move", "find"}:
            super().apply(event)
            return
        # The note that was displayed. The kernel may have handled a move since.
        note = self.review.note_at(event["note"])
        if action == "mark":
            span = GoldSpan(event["start"], event["end"], event["label"])
            if span in self._spans(note):
                self.review.mark(note, *span, event["right"])
        elif action == "all right":
            self.review.mark_all(note)
        elif action == "add":
            self._add_missed(note, event)
        elif action == "finish":
            self.review.finish(note, event["finished"])

    def _add_missed(self, note: Any, event: Mapping[str, Any]) -> None:
        """Add a selected span, or the first whole words that equal a typed text and are not an entity yet."""
        text = self._read_text(event["note"])
        words = event["text"].strip()
        start = event["start"]
        if start is None:
            taken = {span.start for span in self._spans(note)}
            places = (match.span() for match in re.finditer(re.escape(words), text))
            new_words = (place for place in places if place[0] not in taken and whole_words(text, *place) == place)
            start, end = next(new_words, (-1, -1))
        else:  # A selection often includes the space after a word.
            selected = text[start : event["end"]]
            end = start + len(selected.rstrip())
            start += len(selected) - len(selected.lstrip())
        label = event["label"]
        if not words or not 0 <= start < end or label not in self._labels_of(note):
            message = "The note does not contain this text as whole words that are not an entity yet."
            raise ConfigurationError(message, "Select the text in the note.")
        self.review.mark(note, start, end, label)

    def displayed_entities(self, index: int) -> list[Mapping[str, Any]]:
        """Return the entities of the model and the missed entities of a note."""
        note = self.review.note_at(index)
        entities = {*self.review.entities[note]}
        missed = [
            {"entity_group": span.label, "score": 1.0, "start": span.start, "end": span.end}
            for span in self._spans(note)
            if span not in entities
        ]
        return [*self.found.results[index], *missed]

    def row(self, index: int) -> tuple[str, str]:
        """Return name and details of a note in the list."""
        name, detail = super().row(index)
        return name, f"{detail}, reviewed" if self.review.is_reviewed(self.review.note_at(index)) else detail

    def state(self) -> dict[str, Any]:
        """Return the content of the widget as JSON-compatible data."""
        review = self.review
        note = review.notes[self.position]
        index = int(self.matches[self.position])
        text = self._read_text(index)
        name, detail = self.row(index)
        marks = review.marked_spans(note)
        entities = {*review.entities[note]}
        rows = [
            {
                **span._asdict(),
                "text": text[span.start : span.end],
                "color": label_color(span.label),
                "right": marks.get(span),
                "missed": span not in entities,
            }
            for span in self._spans(note)
        ]
        return {
            **super().state(),
            "title": "",
            "details": [],
            "status": f"Note {name}: {detail}. {review.progress()}",
            "review": {
                "notice": " ".join(review.notices()),
                "labels": self._labels_of(note),
                "entities": rows,
                "finished": review.is_reviewed(note),
                "unmarked": review.num_unmarked(note),
            },
        }

    def _read_text(self, index: int) -> str:
        """Return the text of a note, or an empty string if it has changed."""
        return next(self.found.iter_note_texts(index), None) or ""

    def _spans(self, note: Any) -> list[GoldSpan]:
        """Return the entities of the model and the missed entities of a note."""
        missed = [span for span, is_right in self.review.marked_spans(note).items() if is_right]
        return sorted({*self.review.entities[note], *missed})

    def _labels_of(self, note: Any) -> list[str]:
        """Return the labels of missed entities that a user can select."""
        labels = {*(self.found.known_labels or ()), *(span.label for span in self._spans(note))}
        return sorted(labels) or [DEFAULT_LABEL]
