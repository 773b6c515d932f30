"""A browser of notes without its widget: the listed notes, the filters, and the displayed note."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal, NamedTuple

import numpy as np

from .._render.display import Report, label_color, pluralize, to_html
from .._utils.validation import check_number
from ..errors import OpenMedError
from .presentation import displayable, entities_headline, note_name, origin_details

# Number of notes in the list. A browser displays further notes when it gets there.
NUM_LISTED = 100

TEXTS_NOT_SEARCHED = "Only the entities were searched in notes whose text is not stored: {:,}."


class EntityColumns(NamedTuple):
    """All entities as columns.

    Attributes:
        notes: Index of the note of each of ``E`` entities, an int64 array of shape ``(E,)``.
        labels: Index of its label in ``strings``.
        words: Index of its word in ``strings``.
        scores: Its score.
        strings: Distinct labels and words.
    """

    notes: np.ndarray
    labels: np.ndarray
    words: np.ndarray
    scores: np.ndarray
    strings: Sequence[str]

    def count_by(self, name: Literal["labels", "words"]) -> dict[str, int]:
        """Return the number of entities of each label or word."""
        counts = np.bincount(getattr(self, name)).tolist()
        return {string: count for string, count in zip(self.strings, counts, strict=False) if count}


class NoteListing:
    """The notes that a browser lists, and the displayed note.

    Attributes:
        found: The :class:`Annotations`, which import this module.
        query: Searched text, or an empty string.
        hidden_labels: Labels that are not displayed.
        min_score: Minimum score of a displayed entity.
        matches: Indices of the notes in the list.
        position: Position of the displayed note in the list.
        alert: Error of the last action, or an empty string.
    """

    def __init__(self, found: Any) -> None:
        self.found = found
        self.query = ""
        self.hidden_labels: frozenset[str] = frozenset()
        self.min_score = 0.0
        self.position = 0
        self.matches = np.arange(0)
        self.alert = ""
        self._columns = found.results.entity_columns()
        self._hits: np.ndarray | None = None
        self._num_unsearched = 0
        self._unavailable = {**dict.fromkeys(found.errors, "error"), **dict.fromkeys(found.missing, "missing")}
        self._labels = self._columns.count_by("labels")
        self.update()

    @property
    def note(self) -> int | None:
        """Index of the displayed note, or ``None`` if the list is empty."""
        return int(self.matches[self.position]) if len(self.matches) else None

    def update(self) -> None:
        """Apply the search and the filters. The same note stays displayed if it is still in the list."""
        columns = self._columns
        displayed = -1 if self.note is None else self.note
        is_hidden = np.array([string in self.hidden_labels for string in columns.strings], bool)
        kept = (columns.scores >= self.min_score) & ~is_hidden[columns.labels]
        self._counts = np.bincount(columns.notes[kept], minlength=len(self.found))
        listed = np.ones(len(self.found), bool) if self._hits is None else self._hits.copy()
        if self.hidden_labels or self.min_score:
            listed &= self._counts > 0
        self.matches = np.flatnonzero(listed)
        self.position = int(np.argmax(self.matches == displayed)) if len(self.matches) else 0

    def search(self, query: str) -> None:
        """List only the notes whose text or entities contain a query, in upper or lower case.

        Texts are read from where they are, such as files. Texts of a generator are not stored.
        """
        num_unsearched = 0
        hits = None
        folded = query.casefold()
        if folded:
            columns = self._columns
            has_query = np.array([folded in string.casefold() for string in columns.strings], bool)
            hits = np.zeros(len(self.found), bool)
            hits[columns.notes[has_query[columns.words]]] = True
            for index, text in enumerate(self.found.iter_note_texts(verify=False)):
                if text is not None:
                    hits[index] |= folded in text.casefold()
                elif index not in self._unavailable:
                    num_unsearched += 1
        # Assigned only now, because reading the texts may fail or be interrupted.
        self.query = query
        self._hits = hits
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
            names = (displayable(note_name(index, self.found.ids)) for index in self.matches.tolist())
            positions = (position for position, name in enumerate(names) if name == event["name"])
            self.position = next(positions, self.position)
        elif action == "search" and self.found.show_text:
            self.search(str(event["query"]).encode("utf-8", "replace").decode())
        elif action == "filter":
            min_score = check_number("min_score", event["min_score"], 1)
            self.hidden_labels = frozenset(event["hidden"]) & self._labels.keys()
            self.min_score = min_score
            self.update()

    def state(self) -> dict[str, Any]:
        """Return the content of the widget as JSON-compatible data."""
        count = len(self.matches)
        start = max(0, min(self.position - NUM_LISTED // 2, count - NUM_LISTED))
        rows = [self.row(int(index)) for index in self.matches[start : start + NUM_LISTED]]
        details = [origin_details(self.found.model, self.found.device), *self.found.settings.get("only", ())]
        state: dict[str, Any] = {
            "title": entities_headline(self._labels, self.found.known_labels, len(self.found)),
            "details": details,
            "count": count,
            "total": len(self.found),
            "position": self.position,
            "note": self.note,
            "name": "" if self.note is None else displayable(note_name(self.note, self.found.ids)),
            "first": start,
            "rows": rows,
            "html": "",
            "status": f"{count:,} of {pluralize(len(self.found), 'note')}.",
            "alert": self.alert,
            "query": self.query if self.found.show_text else None,
            "min_score": self.min_score,
            "labels": [
                {"name": label, "count": total, "color": label_color(label), "shown": label not in self.hidden_labels}
                for label, total in self._labels.items()
            ],
            "review": None,
        }
        if self._num_unsearched:
            state["status"] += " " + TEXTS_NOT_SEARCHED.format(self._num_unsearched)
        if self.note is None:
            return state
        name, detail = rows[self.position - start]
        state["status"] = f"Note {name}: {detail}. {state['status']}"
        text = next(self.found.iter_note_texts(self.note), None)
        segments = self.found.note_segments(self.note, text, self.displayed_entities(self.note), None)
        html = to_html(Report("", segments=tuple(segments)))
        # The parser of HTML would change these characters, and with them the offsets of a selection.
        state["html"] = html.replace("\r", "&#13;").replace("\0", "\N{REPLACEMENT CHARACTER}")
        return state

    def displayed_entities(self, index: int) -> list[Mapping[str, Any]]:
        """Return the entities of a note that are displayed."""
        return [
            entity
            for entity in self.found.results[index]
            if entity["score"] >= self.min_score and _label(entity) not in self.hidden_labels
        ]

    def row(self, index: int) -> tuple[str, str]:
        """Return name and details of a note in the list."""
        detail = self._unavailable.get(index) or pluralize(int(self._counts[index]), "entity", "entities")
        return displayable(note_name(index, self.found.ids)), detail


def _label(entity: Mapping[str, Any]) -> str:
    return str(entity["entity_group"] if "entity_group" in entity else entity["entity"])
