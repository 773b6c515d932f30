"""A review of annotations: a random sample of notes in which a user marks right, wrong and missed entities."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from .._render.display import Report, label_color, pluralize
from .._utils.text import describe_error, describe_value
from .._utils.validation import check_bool, check_integer, check_optional_integer, check_path
from ..errors import ConfigurationError, OpenMedError
from .browsing import AnnotatedNotes, NoteListing
from .gold import GoldSpan, GoldText, GoldTexts, parse_span
from .json_lines import append_checksum, parse_checked_line, to_json_line
from .pages import LiveNotes
from .tables import parse_json_line

if TYPE_CHECKING:
    from ipywidgets import DOMWidget

    from .scores import Scores

FORMAT = "openmed_nb review, 1"

# Label of a missed entity if the labels of the model are not known.
DEFAULT_LABEL = "ENTITY"

SAMPLE_NOTICE = "The notes are a random sample. Also mark missed entities: ticks alone do not measure recall."
NOT_REVIEWED_REMEDY = "Mark each of them as right or wrong."
OTHER_FILE_REMEDY = "Use a different file."


class NoteMarks(NamedTuple):
    """The marks of a note.

    Attributes:
        spans: Whether each marked span is a true entity.
        finished: Whether the user marked the note as reviewed.
    """

    spans: Mapping[GoldSpan, bool]
    finished: bool


class Review(LiveNotes):
    """A review of annotations, as :meth:`Annotations.review` returns it.

    In a notebook, it is displayed as a browser of the notes of the sample. Only notes that are marked as reviewed count.

    Attributes:
        found: The reviewed annotations.
        path: File of the review, or ``None`` if it is not saved.
        notes: Indices of the notes of the sample, in random order. The first notes are a random sample, too.
        seed: Seed of the sample.
        entities: Entities of the model in each of these notes.
    """

    JSON_PROPERTIES = ("num_notes", "num_reviewed")

    def __init__(
        self, found: AnnotatedNotes, path: str | os.PathLike[str] | None, sample: int | None, seed: int
    ) -> None:
        sample = check_optional_integer("sample", sample)
        self.found = found
        self.seed = check_integer("seed", seed, 0)
        self.path = None if path is None else check_path(path, "path")
        if not found.show_text:
            raise ConfigurationError("The texts are hidden.", "Annotate with show_text=True to review the notes.")
        readable = np.ones(len(found), bool)
        readable[[*found.errors, *found.missing]] = False
        if found.num_stored < len(found):
            message = f"The texts came from a generator; only the first {found.num_stored} were stored."
            raise ConfigurationError(message, "Annotate a list of the texts to review them.")
        candidates = np.flatnonzero(readable)
        order = np.random.default_rng(self.seed).permutation(candidates)
        self.notes: tuple[int, ...] = tuple(order[:sample].tolist())
        if not self.notes:
            raise ConfigurationError("There are no notes to review.", "Annotate at least one note.")
        self.entities = {note: found.note_spans(note) for note in self.notes}
        self._marks: dict[int, NoteMarks] = {}
        if self.path is not None:
            self._open_file(self.path)

    def __len__(self) -> int:
        return len(self.found)

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
                str(note), None, tuple(sorted(span for span, is_right in self.marked_spans(note).items() if is_right))
            )
            for note in sorted(self.notes)
            if self.is_reviewed(note)
        ]
        return GoldTexts(tuple(texts), is_numbered=True)

    def score(self, *, seed: int = 0) -> Scores:
        """Return the scores of the entities in the reviewed notes; see :meth:`Annotations.score`.

        The intervals describe all notes only if the reviewed notes are a random sample, so review them in the order of the list.

        Args:
            seed: Seed of the resampling for the intervals.

        Raises:
            ConfigurationError: If no note was reviewed.
        """
        return self.found.score(self, seed=seed)

    def gold_of(self, found: AnnotatedNotes) -> GoldTexts:
        """Return the true entities if results belong to the same notes, of which at least one is reviewed."""
        if found.fingerprint() != self.found.fingerprint():
            message = "The review belongs to other notes."
            raise ConfigurationError(message, "Pass a review of the same notes, in the same order.")
        if not self.num_reviewed:
            raise ConfigurationError("No note is reviewed.", "Mark at least one note as reviewed.")
        return self.gold

    def mark(self, note: int, start: int, end: int, label: str, right: bool | None = True) -> None:
        """Mark a span of a note.

        Args:
            note: Index of the note, one of :attr:`notes`.
            start: Start of the span in characters.
            end: End of the span in characters, exclusive.
            label: Label of the span.
            right: ``True`` for a true entity, also for one that the model missed. ``False`` for an entity of the model that is
                wrong. ``None`` removes the mark.

        Raises:
            ConfigurationError: If the note is not in the sample, the span is not valid, or the file cannot be written.
        """
        if right is not None:
            check_bool("right", right)
        span = parse_span((start, end, label))
        if note not in self.entities or span is None:
            raise ConfigurationError("The mark is not a span of a note in the sample.", "Use an index in review.notes.")
        spans = {key: value for key, value in self.marked_spans(note).items() if key != span}
        if right is not None:
            spans[span] = right
        finished = note in self._marks and self._marks[note].finished
        self._save(note, NoteMarks(spans, finished and all(entity in spans for entity in self.entities[note])))

    def finish(self, note: int, finished: bool = True) -> None:
        """Mark a note as reviewed.

        Args:
            note: Index of the note, one of :attr:`notes`.
            finished: Whether the note is reviewed.

        Raises:
            ConfigurationError: If the note is not in the sample, if an entity of the model is not marked, or if the file cannot be
                written.
        """
        if note not in self.entities:
            raise ConfigurationError("The note is not in the sample.", "Use an index in review.notes.")
        if finished and (count := self.num_unmarked(note)):
            message = f"{pluralize(count, 'entity is', 'entities are')} not marked."
            raise ConfigurationError(message, NOT_REVIEWED_REMEDY)
        self._save(note, NoteMarks(self.marked_spans(note), finished))

    def is_reviewed(self, note: int) -> bool:
        """Return whether a note is reviewed and all of its entities are marked."""
        return note in self._marks and self._marks[note].finished and not self.num_unmarked(note)

    def to_report(self) -> Report:
        """Return the progress of the review."""
        return Report(self.progress(), (SAMPLE_NOTICE,))

    def create_view(self) -> DOMWidget:
        """Return a browser of the notes of the sample."""
        from .browser_view import create_view

        return create_view(ReviewListing(self))

    def marked_spans(self, note: int) -> Mapping[GoldSpan, bool]:
        """Return whether each marked span of a note is a true entity."""
        return self._marks[note].spans if note in self._marks else {}

    def num_unmarked(self, note: int) -> int:
        """Return the number of entities of a note without a mark."""
        return len({*self.entities[note]} - self.marked_spans(note).keys())

    def progress(self) -> str:
        """Return the number of reviewed notes as a sentence."""
        return f"{self.num_reviewed:,} of {pluralize(self.num_notes, 'note')} reviewed."

    def _save(self, note: int, marks: NoteMarks) -> None:
        """Store the marks of a note, and append them to the file."""
        if self.path is not None:
            value = {
                "note": note,
                "right": [span for span, is_right in marks.spans.items() if is_right],
                "wrong": [span for span, is_right in marks.spans.items() if not is_right],
                "finished": marks.finished,
            }
            self._append(self.path, append_checksum(to_json_line(value)))
        self._marks[note] = marks

    def _append(self, path: Path, line: bytes) -> None:
        """Write a line to disk, so that it is not lost if the kernel is killed."""
        problem = ""
        try:
            path.touch(mode=0o600)  # Readable by its owner only.
            with path.open("ab") as file:
                file.write(line)
                file.flush()
                os.fsync(file.fileno())
        except OSError as error:
            problem = f"cannot be written: {describe_error(error)}"
        if problem:
            raise self._file_error(problem, OTHER_FILE_REMEDY)

    def _open_file(self, path: Path) -> None:
        """Read the marks of a file, or write the header of a new file."""
        header = to_json_line({"format": FORMAT, "notes": self.found.fingerprint(), "seed": self.seed})
        problem = ""
        data = b""
        try:
            data = path.read_bytes() if path.exists() else b""
        except OSError as error:
            problem = f"cannot be read: {describe_error(error)}"
        if problem:
            raise self._file_error(problem, OTHER_FILE_REMEDY)
        lines = data.splitlines(keepends=True)
        if not lines or (len(lines) == 1 and header.startswith(data) and data != header):
            self._append(path, header[len(data) :])  # The process may have been killed while it wrote the header.
            return
        self._check_header(lines[0], header)
        for number, line in enumerate(lines[1:], 2):
            if not line.endswith(b"\n"):  # The process was killed while it wrote this line.
                os.truncate(path, len(data) - len(line))
                return
            self._read_marks(parse_checked_line(line), number)

    def _check_header(self, line: bytes, expected: bytes) -> None:
        """Raise an error if the file belongs to another review."""
        if line == expected:
            return
        values = parse_json_line(line)
        if not isinstance(values, dict) or values.get("format") != FORMAT:
            raise self._file_error("is not a review", OTHER_FILE_REMEDY)
        if values.get("notes") != self.found.fingerprint():
            raise self._file_error("is a review of other notes", "Annotate the same notes, or use a different file.")
        seed = describe_value(values.get("seed"))
        raise self._file_error(f"has a sample with seed {seed}", f"Pass seed={seed}, or use a different file.")

    def _read_marks(self, value: Mapping[str, Any], number: int) -> None:
        """Read the marks of a note from a line."""
        if not value:  # The checksum shows that :meth:`_save` did not write the line.
            raise self._file_error(f"is corrupt at line {number}", "Delete that line and everything after it.")
        spans = {GoldSpan(*span): True for span in value["right"]}
        spans.update({GoldSpan(*span): False for span in value["wrong"]})
        self._marks[value["note"]] = NoteMarks(spans, value["finished"])

    def _file_error(self, problem: str, remedy: str) -> ConfigurationError:
        return ConfigurationError(f"The file {describe_value(self.path)} {problem}.", remedy)


class ReviewListing(NoteListing):
    """The notes of a review in a browser. It has no filters, because every entity of a note is marked.

    Attributes:
        review: The review.
    """

    def __init__(self, review: Review) -> None:
        super().__init__(review.found)
        self.review = review
        self.matches = np.array(review.notes, np.int64)
        self._error = ""

    def handle(self, event: Mapping[str, Any]) -> None:
        """Apply what a user did in the widget. An error is displayed."""
        self._error = ""
        note = self.review.notes[self.position]
        action = event["action"]
        try:
            if action == "mark":
                self.review.mark(note, event["start"], event["end"], event["label"], event["right"])
            elif action == "all right":
                for span in self.review.entities[note]:
                    if span not in self.review.marked_spans(note):
                        self.review.mark(note, *span)
            elif action == "add":
                self._add_missed(note, event)
            elif action == "finish":
                self.review.finish(note, event["finished"])
            else:
                super().handle(event)
        except OpenMedError as error:
            self._error = str(error)

    def _add_missed(self, note: int, event: Mapping[str, Any]) -> None:
        """Add a selected span, or the first occurrence of a typed text that is not an entity yet."""
        text = next(self.found.iter_note_texts(note), None) or ""
        words = event["text"].strip()
        start = event["start"]
        if start is None:
            taken = {span.start for span in (*self.review.entities[note], *self.review.marked_spans(note))}
            start = text.find(words)
            while start in taken:
                start = text.find(words, start + 1)
            end = start + len(words)
        else:  # A selection often includes the space after a word.
            selected = text[start : event["end"]]
            end = start + len(selected.rstrip())
            start += len(selected) - len(selected.lstrip())
        if not words or not 0 <= start < end:
            raise ConfigurationError("The note does not contain this text.", "Select the text in the note.")
        self.review.mark(note, start, end, event["label"])

    def displayed_entities(self, index: int) -> list[Mapping[str, Any]]:
        """Return the entities of the model and the missed entities of a note."""
        missed = [
            {"entity_group": span.label, "score": 1.0, "start": span.start, "end": span.end}
            for span in self._missed(index)
        ]
        return [*self.found[index], *missed]

    def row(self, index: int) -> tuple[str, str]:
        """Return name and details of a note in the list."""
        name, detail = super().row(index)
        return name, f"{detail}, reviewed" if self.review.is_reviewed(index) else detail

    def state(self) -> dict[str, Any]:
        """Return the content of the widget as JSON-compatible data."""
        review = self.review
        note = review.notes[self.position]
        text = next(self.found.iter_note_texts(note), None) or ""
        entities = review.entities[note]
        spans = sorted({*entities, *self._missed(note)})
        labels = {*(self.found.known_labels or ()), *(span.label for span in spans)}
        name, detail = self.row(note)
        marks = review.marked_spans(note)
        rows = [
            {
                **span._asdict(),
                "text": text[span.start : span.end],
                "color": label_color(span.label),
                "right": marks.get(span),
                "missed": span not in entities,
            }
            for span in spans
        ]
        return {
            **super().state(),
            "title": "",
            "details": [],
            "status": f"Note {name}: {detail}. {review.progress()}",
            "alert": self._error,
            "review": {
                "notice": SAMPLE_NOTICE,
                "labels": sorted(labels) or [DEFAULT_LABEL],
                "entities": rows,
                "finished": review.is_reviewed(note),
                "unmarked": review.num_unmarked(note),
            },
        }

    def _missed(self, note: int) -> list[GoldSpan]:
        """Return the marked entities of a note that the model did not find."""
        marks = self.review.marked_spans(note)
        return [span for span, is_right in marks.items() if is_right and span not in self.review.entities[note]]
