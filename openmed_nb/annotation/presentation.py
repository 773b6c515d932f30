"""Display of results: headlines, such as "6 mentions of diseases found in 3 notes", and a live view if a user runs the cell."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from .._events.progress import current_shell, is_interactive
from .._render.display import WIDGET_MIME_TYPE, Displayable, format_duration, pluralize, to_html, to_text
from .references import is_missing

# Labels that are English words for what they count. Entities with other labels, such as "PER" or "ANATOMY", are counted as
# entities.
_NOUNS = {
    "chemical",
    "date",
    "disease",
    "disorder",
    "drug",
    "gene",
    "medication",
    "name",
    "person",
    "procedure",
    "protein",
    "species",
    "symptom",
    "treatment",
}

# Labels of context that are not adjectives, as in "1 of them in the family".
_CONTEXT_PHRASES = {"family": "in the family", "other person": "in another person"}


def label_noun(labels: Iterable[str]) -> str:
    """Return the English word that all labels are, or an empty string if they differ or are not a word."""
    words = {label.casefold() for label in labels}
    return words.pop() if len(words) == 1 and words <= _NOUNS else ""


def entities_headline(
    counts: Mapping[str, int],
    known_labels: Sequence[str] | None,
    num_notes: int | None = None,
    context: Mapping[tuple[str, ...], int] | None = None,
) -> str:
    """Return a headline with the number of entities, named by their label if all of them have one that is a word.

    Args:
        counts: Number of entities by label.
        known_labels: Labels that the model can predict, or ``None`` if unknown. They name what was not found.
        num_notes: Number of notes, or ``None`` for a single text.
        context: Number of entities by their labels of context, if any.

    Example:
        >>> entities_headline({"DISEASE": 1}, None), entities_headline({"DISEASE": 1205}, ("DISEASE",), 3000)
        ('1 mention of a disease found', '1,205 mentions of diseases found in 3,000 notes')
        >>> entities_headline({}, ("DISEASE",)), entities_headline({}, ("DISEASE", "DRUG"), 1)
        ('No diseases found', 'No entities found in 1 note')
        >>> entities_headline({"DISEASE": 3}, None, context={("negated",): 2, ("uncertain", "family"): 1})
        '3 mentions of diseases found, 2 of them negated, 1 uncertain and in the family'
    """
    noun = label_noun(counts or known_labels or ())
    plural = noun if noun == "species" else f"{noun}s"
    total = sum(counts.values())
    if not total:
        found = f"No {plural}" if noun else "No entities"
    elif noun:
        found = pluralize(total, f"mention of a {noun}", f"mentions of {plural}")
    else:
        found = pluralize(total, "entity", "entities")
    headline = f"{found} found" if num_notes is None else f"{found} found in {pluralize(num_notes, 'note')}"
    of_them = " of them" if total > 1 else ""
    for labels, count in (context or {}).items():
        headline += f", {count:,}{of_them} {' and '.join(_CONTEXT_PHRASES.get(label, label) for label in labels)}"
        of_them = ""
    return headline


def note_name(index: int, ids: Sequence[Any] | None) -> str:
    """Return the id of a note, or its index, with a mark if other notes have ids.

    Example:
        >>> note_name(17, ["A"] * 20), note_name(0, [None]), note_name(3, None)
        ('A', '#0', '3')
    """
    if ids is None:
        return str(index)
    return f"#{index}" if is_missing(ids[index]) else str(ids[index])


def displayable(name: str) -> str:
    """Return a name for a message to the front end, which cannot contain an unpaired surrogate."""
    return name.encode("utf-8", "replace").decode()


def origin_details(model: str, device: str, seconds: float | None = None, num_resumed: int = 0) -> str:
    """Return model, device, duration and number of resumed notes of a result for the details of its report."""
    duration = "" if seconds is None else f", {format_duration(seconds)}"
    resumed = f", {pluralize(num_resumed, 'note')} from an earlier run" if num_resumed else ""
    return f"Model: {model}, device: {device}{duration}{resumed}"


class LiveNotes(Displayable):
    """Mixin for values with a live view of notes, in addition to text and HTML for saved notebooks."""

    def __len__(self) -> int:
        raise NotImplementedError

    def _create_view(self) -> Any:
        """Return a ``BrowserView`` of the notes."""
        raise NotImplementedError

    def _repr_mimebundle_(self, **_options: Any) -> dict[str, Any]:
        report = self.final_report()
        static = {"text/plain": to_text(report), "text/html": to_html(report)}
        shell = current_shell()
        if len(self) <= 1 or shell is None or not shell.has_trait("kernel"):
            return static
        parent = shell.get_parent()
        # Voila runs the cells itself, and displays widgets.
        is_voila = os.environ.get("SERVER_SOFTWARE", "").startswith("voila/")
        if not (is_voila or is_interactive(parent)):
            return static
        view = self._create_view()
        view.replace_earlier(parent)
        return {WIDGET_MIME_TYPE: {"version_major": 2, "version_minor": 0, "model_id": view.model_id}, **static}
