"""The browser of notes: a widget that displays the state of a :class:`NoteListing`, and passes on what a user does."""

from __future__ import annotations

import itertools
import re
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import anywidget
import numpy as np
from traitlets import Dict

from .._render.display import Report, label_color, pluralize, to_html
from .._utils.text import short_type_name, straighten_apostrophes
from .._utils.validation import check_number
from ..errors import ConfigurationError, OpenMedError
from .boundaries import strip_span, whole_words
from .context import CONTEXT_LABELS, CUE_SUFFIX, context_mark
from .gold import GoldSpan
from .inputs import NOTE_COLUMN
from .presentation import displayable, note_name

if TYPE_CHECKING:
    from .annotated_notes import AnnotatedNotes

FOLDER = Path(__file__).parent

# The views of each cell, with the execution that displayed them. ipywidgets keeps a widget, and with it the notes, until it is closed.
OPEN_VIEWS: dict[str, tuple[str, list[BrowserView]]] = {}

# Number of notes in the list. A browser displays further notes when it gets there.
NUM_LISTED = 100

# Selects the entities without a context label.
NO_CONTEXT = "no context"


def _fold(text: str) -> str:
    return straighten_apostrophes(text).casefold()


class NoteListing:
    """The notes that a browser lists, and the displayed note.

    Attributes:
        found: The :class:`Annotations`.
        query: Searched text, or an empty string.
        hidden_labels: Labels that are not displayed.
        min_score: Minimum score of a displayed entity.
        context: Context label of the displayed entities, ``NO_CONTEXT``, or an empty string for all entities.
        matches: Indices of the notes in the list. If there is a filter, one of their displayed entities contains the query.
        position: Position of the displayed note in the list.
        alert: Error of the last action, or an empty string.
    """

    def __init__(self, found: AnnotatedNotes) -> None:
        self.found = found
        self.query = ""
        self.hidden_labels: frozenset[str] = frozenset()
        self.min_score = 0.0
        self.context = ""
        self.position = 0
        self.matches = np.arange(0)
        self.alert = ""
        columns = found.results.columns()
        self._notes = columns[NOTE_COLUMN]
        self._labels = columns[found.results.key]
        self._scores = columns["score"]
        self._label_counts = Counter(self._labels)
        self._contexts = {
            label: columns[name] == value for label, (name, value) in CONTEXT_LABELS.items() if name in columns
        }
        if self._contexts:
            self._contexts[NO_CONTEXT] = ~np.logical_or.reduce([*self._contexts.values()])
        self._entity_hits = np.ones(len(self._notes), bool)
        self._note_hits = np.ones(len(found), bool)
        self._num_unsearched = 0
        self._head = found.head_report()
        self._unavailable = {**dict.fromkeys(found.errors, "error"), **dict.fromkeys(found.missing, "missing")}
        self.update()

    @property
    def note(self) -> int | None:
        """Index of the displayed note, or ``None`` if the list is empty."""
        return int(self.matches[self.position]) if len(self.matches) else None

    def update(self) -> None:
        """Apply the search and the filters. The same note stays displayed if it is still in the list."""
        displayed = self.note
        self._is_shown = (self._scores >= self.min_score) & ~np.isin(self._labels, [*self.hidden_labels])
        if self.context:
            self._is_shown &= self._contexts[self.context]
        self._counts = np.bincount(self._notes[self._is_shown], minlength=len(self.found))
        self.matches = np.flatnonzero(self._note_hits)
        self._is_filtered = bool(self.found.filters or self.hidden_labels or self.min_score or self.context)
        if self._is_filtered:
            self.matches = np.unique(self._notes[self._is_shown & self._entity_hits])
        self.position = int(np.argmax(self.matches == displayed)) if len(self.matches) else 0

    def search(self, query: str) -> None:
        """List only the notes whose text or entities contain a query, or whose id equals it.

        Upper and lower case are equal, and so are all apostrophes. With a filter, a displayed entity must contain the query. Texts
        are read from where they are, such as files. Texts of a generator are not stored.
        """
        num_unsearched = 0
        entity_hits: list[bool] = []
        note_hits: list[bool] = []
        folded = _fold(query)
        texts = self.found.iter_note_texts(verify=False) if folded else [""] * len(self.found)
        for index, (text, entities) in enumerate(zip(texts, self.found, strict=True)):
            is_named = folded == _fold(self._name(index))
            # The word of the model, and the characters of the note.
            contents = text or ""
            hits = [
                is_named or folded in _fold(f"{entity['word']}\n{contents[entity['start'] : entity['end']]}")
                for entity in entities
            ]
            entity_hits += hits
            note_hits.append(is_named or any(hits) or folded in _fold(contents))
            if text is None and index not in self._unavailable:
                num_unsearched += 1
        # Assigned only now, because reading the texts may fail or be interrupted.
        self.query = query
        self._entity_hits = np.array(entity_hits, bool)
        self._note_hits = np.array(note_hits, bool)
        self._num_unsearched = num_unsearched
        self.update()

    def handle(self, event: Mapping[str, Any]) -> None:
        """Apply what a user did in the widget. An error is displayed."""
        self.alert = ""
        try:
            self.apply(event)
        except OpenMedError as error:
            self.alert = str(error)

    def apply(self, event: Mapping[str, Any]) -> None:
        """Apply what a user did, or raise an error."""
        action = event["action"]
        if action == "move":
            self.position = min(max(int(event["position"]), 0), max(len(self.matches) - 1, 0))
        elif action == "find":
            names = [self._name(index) for index in self.matches.tolist()]
            if event["name"] not in names:
                raise ConfigurationError("No note of the list has this id.", "Enter an id of the list.")
            self.position = names.index(event["name"])
        elif action == "search" and self.found.show_text:
            self.search(displayable(str(event["query"])))
        elif action == "filter":
            self.min_score = check_number("min_score", event["min_score"], 1)
            self.hidden_labels = frozenset(event["hidden"]) & self._label_counts.keys()
            self.context = event["context"] if event["context"] in self._contexts else ""
            self.update()

    def state(self) -> dict[str, Any]:
        """Return the content of the widget as JSON-compatible data."""
        count = len(self.matches)
        start = max(0, min(self.position - NUM_LISTED // 2, count - NUM_LISTED))
        status = f"{count:,} of {pluralize(len(self.found), 'note')}."
        if self._num_unsearched:
            status += f" Only the entities were searched in notes whose text is not stored: {self._num_unsearched:,}."
        if not count:
            if self._is_filtered:
                status += " A filter is on."
            if " " in self.query:
                status += " Several words are searched as one phrase."
        state: dict[str, Any] = {
            "title": self._head.title,
            "details": [self._head.details, *self._head.sentences],
            "count": count,
            "total": len(self.found),
            "position": self.position,
            "note": self.note,
            "name": "",
            "first": start,
            "rows": [
                (self._name(index), self.detail(index)) for index in self.matches[start : start + NUM_LISTED].tolist()
            ],
            "html": "",
            "status": status,
            "alert": self.alert,
            "query": self.query if self.found.show_text else None,
            "min_score": self.min_score,
            "labels": [
                {"name": label, "count": total, "color": label_color(label), "shown": label not in self.hidden_labels}
                for label, total in self._label_counts.items()
            ],
            "context": self.context,
            "contexts": {label: int(has_label.sum()) for label, has_label in self._contexts.items()},
            "review": None,
        }
        if self.note is None:
            return state
        state["name"] = self._name(self.note)
        state["status"] = f"Note {state['name']}: {self.detail(self.note)}. {status}"
        text = next(self.found.iter_note_texts(self.note))
        segments = self.found.note_segments(self.note, text, self.displayed_entities(self.note), None)
        html = to_html(Report("", segments=tuple(segments)))
        # The parser of HTML would change these characters, and with them the offsets of a selection.
        state["html"] = html.replace("\r", "&#13;").replace("\0", "\N{REPLACEMENT CHARACTER}")
        return state

    def displayed_entities(self, index: int) -> list[Mapping[str, Any]]:
        """Return the entities of a note that are displayed."""
        first = int(np.searchsorted(self._notes, index))
        return [*itertools.compress(self.found.results[index], self._is_shown[first:])]

    def detail(self, index: int) -> str:
        """Return the number of displayed entities of a note, or why it has none."""
        return self._unavailable.get(index) or pluralize(int(self._counts[index]), "entity", "entities")

    def _name(self, index: int) -> str:
        return displayable(note_name(index, self.found.ids))


class ReviewListing(NoteListing):
    """The notes of a review in a browser. It has no filters, because every entity of a note is marked.

    A review that continues displays its first note that is not reviewed.

    Attributes:
        review: The :class:`Review`, which imports this module.
    """

    def __init__(self, review: Any) -> None:
        super().__init__(review.found)
        self.review = review
        self.matches = np.array([*map(review.position_of, review.notes)], np.int64)
        self._show_next(0)

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
                self.review.mark(note, *span, event["right"], **event["context"])
        elif action == "accept":
            self.review.accept(note)
        elif action == "add":
            self._add_missed(note, event)
        elif action == "finish":
            self.review.finish(note, event["finished"])
        elif action == "undo":
            self.position = self.review.notes.index(self.review.undo())
        if action in {"accept", "next"}:
            self._show_next(self.review.notes.index(note) + 1)

    def _show_next(self, start: int) -> None:
        """Display the first note from a position on that is not reviewed, or the note at this position if all are reviewed."""
        is_left = [not self.review.is_reviewed(note) for note in self.review.notes]
        self.position = (start + int(np.argmax(np.roll(is_left, -start)))) % len(is_left)

    def _add_missed(self, note: Any, event: Mapping[str, Any]) -> None:
        """Add a selected span, or the first whole words that equal a typed text and where no unmarked or right entity starts.

        Upper and lower case count only if the note contains the text as it is typed.
        """
        text = next(self.found.iter_note_texts(event["note"])) or ""  # Empty if the note has changed.
        words = straighten_apostrophes(event["text"]).split()
        start = event["start"]
        end = event["end"]
        if not words:
            raise ConfigurationError("No text was entered.", "Type the entity, or select it in the note.")
        if start is None:
            marks = self.review.marked_spans(note)
            taken = {span.start for span in self._spans(note) if marks.get(span, True)}
            folded = straighten_apostrophes(text)
            pattern = r"\s+".join(map(re.escape, words))
            matches = [*re.finditer(pattern, folded)] or [*re.finditer(pattern, folded, re.IGNORECASE)]
            whole = [match.span() for match in matches if whole_words(text, *match.span()) == match.span()]
            free = [span for span in whole if span[0] not in taken]
            if not matches:
                raise ConfigurationError(
                    "The note does not contain this text.", "Type it as in the note, or select it there."
                )
            if not whole:
                raise ConfigurationError(
                    "The note contains this text only in longer words.",
                    "Type whole words, or select the part in the note.",
                )
            if not free:
                raise ConfigurationError(
                    "An entity starts at each place of this text.", "Mark it as wrong first if it has the wrong end."
                )
            start, end = free[0]
        else:  # A selection often includes the space after a word.
            start, end = strip_span(text, start, end)
        self.review.mark(note, start, end, event["label"])

    def displayed_entities(self, index: int) -> list[Mapping[str, Any]]:
        """Return the entities of the model and the missed entities of a note, without wrong ones whose boundaries were corrected."""
        note = self.review.note_at(index)
        entities = dict(zip(self.review.entities[note], self.found.results[index], strict=True))
        contexts = self.review.contexts(note)
        marks = self.review.marked_spans(note)
        shown: list[Mapping[str, Any]] = []
        for span in self._spans(note):
            if not marks.get(span, True) and any(map(span.overlaps, self.review.note_marks(note).right)):
                continue
            entity = entities.get(span, {})
            context = contexts[span]
            # The cue is not that of a corrected value.
            cues = {name + CUE_SUFFIX: "" for name, value in context.items() if entity.get(name) != value}
            shown.append({"entity_group": span.label, "score": 1.0, **span._asdict(), **entity, **context, **cues})
        return shown

    def _name(self, index: int) -> str:
        return displayable(str(self.review.note_at(index)))

    def detail(self, index: int) -> str:
        """Return the number of entities of a note, or that it is reviewed."""
        return "✓ reviewed" if self.review.is_reviewed(self.review.note_at(index)) else super().detail(index)

    def state(self) -> dict[str, Any]:
        """Return the content of the widget as JSON-compatible data."""
        review = self.review
        note = review.notes[self.position]
        index = review.position_of(note)
        text = next(self.found.iter_note_texts(index)) or ""
        marks = review.marked_spans(note)
        contexts = review.contexts(note)
        return {
            **super().state(),
            "title": "",
            "details": [],
            "status": f"Note {self._name(index)}: {self.detail(index)}. {review.progress()}",
            "review": {
                "notice": " ".join(review.notices()),
                "labels": review.labels,
                "entities": [
                    {
                        **span._asdict(),
                        "text": text[span.start : span.end],
                        "color": label_color(span.label),
                        "right": marks.get(span),
                        "missed": span not in review.entities[note],
                        "context": contexts[span],
                        "context_mark": context_mark(contexts[span]),
                    }
                    for span in self._spans(note)
                ],
                "context_values": review.context_values,
                "finished": review.is_reviewed(note),
                "unmarked": len(review.unmarked_spans(note)),
            },
        }

    def _spans(self, note: Any) -> list[GoldSpan]:
        """Return the entities of the model and the missed entities of a note."""
        return sorted({*self.review.entities[note], *self.review.note_marks(note).right})


class BrowserView(anywidget.AnyWidget):
    """A browser of notes."""

    _esm = (FOLDER / "browser.js").read_text("utf-8")
    _css = (FOLDER / "browser.css").read_text("utf-8")
    state = Dict().tag(sync=True)

    def __init__(self, listing: NoteListing) -> None:
        self.listing = listing
        super().__init__(state=listing.state(), _dom_classes=("openmed-notes",))
        self.on_msg(self._handle)

    def __repr__(self) -> str:
        return "openmed_nb browser of notes"  # That of a widget contains its state, and with it a note.

    def _handle(self, _view: BrowserView, event: Mapping[str, Any], _buffers: object) -> None:
        try:
            self.listing.handle(event)
            self.state = self.listing.state()
        except Exception as error:  # noqa: BLE001 - nobody else would report it, and its message may quote a note
            self.state = {**self.state, "alert": f"The action failed ({short_type_name(error)}). Run this cell again."}
        finally:
            self.send({"handled": True})  # The state may be the same as before.

    def replace_earlier(self, parent: Mapping[str, Any]) -> None:
        """Close the views of earlier executions of the cell that displays this view. The front end removes their output.

        Args:
            parent: Parent message of the kernel.
        """
        cell = parent.get("metadata", {}).get("cellId")
        if cell is None:
            return
        execution = parent["header"]["msg_id"]
        earlier, views = OPEN_VIEWS.get(cell, (execution, []))
        if earlier != execution:
            for outdated in views:
                outdated.close()
            views = []
        OPEN_VIEWS[cell] = (execution, [*views, self])
