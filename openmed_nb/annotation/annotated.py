"""What a pipeline found in one text: the entities, marked in the text."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ..interface.display import Piece, Report, Shown, Table

HIDDEN = "(the text is hidden)"

UNNAMED = "no label"
"""What is shown of a label without a name, which would mark nothing."""


@dataclass(frozen=True, repr=False)
class AnnotatedText(Shown, Sequence[Mapping[str, Any]]):
    """The entities of one text: a sequence of dictionaries as transformers' pipeline gives them.

    Attributes:
        text: The text that was read.
        entities: A mapping for each: ``entity_group`` (or ``entity``), ``score``, ``word``, ``start`` and ``end``.
        model: The name of the model.
        device: The device that it ran on.
        show_text: Whether the text, and the words in it, are part of what is shown.
    """

    text: str
    entities: tuple[Mapping[str, Any], ...]
    model: str
    device: str
    show_text: bool = True

    def __len__(self) -> int:
        return len(self.entities)

    def __getitem__(self, index: Any) -> Any:
        return self.entities[index]

    def __iter__(self) -> Iterator[Mapping[str, Any]]:
        return iter(self.entities)

    def to_dict(self) -> dict[str, Any]:
        """Return text, entities, model and device as plain mappings, lists, strings and numbers."""
        entities = [{**entity, "score": float(entity["score"])} for entity in self.entities]
        return {"text": self.text, "entities": entities, "model": self.model, "device": self.device}

    def report(self) -> Report:
        """Return what there is to show: the text with its entities marked, and a table of them."""
        count = len(self.entities)
        title = f"{count} {'entity' if count == 1 else 'entities'} found by {self.model} on {self.device}"
        tables = (self._table(),) if count else ()
        if not self.show_text:
            return Report(title, (HIDDEN,), tables=tables)
        return Report(title, pieces=tuple(marked(self.text, self.entities)), tables=tables)

    def _table(self) -> Table:
        rows = tuple(
            (
                shown_label(label(entity)),
                f"{float(entity['score']):.2f}",
                f"{entity['start']}-{entity['end']}",
                self._word(entity),
            )
            for entity in self.entities
        )
        return Table("Entities", ("label", "score", "characters", "text"), rows)

    def _word(self, entity: Mapping[str, Any]) -> str:
        return " ".join(self.text[entity["start"] : entity["end"]].split()) if self.show_text else "…"


def marked(text: str, entities: Iterable[Mapping[str, Any]]) -> Iterator[Piece]:
    """Yield a text in pieces, the entities marked; one that overlaps an earlier one is left out."""
    position = 0
    for entity in sorted(entities, key=lambda one: (one["start"], one["end"])):
        start, end = entity["start"], entity["end"]
        if start >= position < end:
            yield Piece(text[position:start])
            details = f"{float(entity['score']):.3f}, characters {start} to {end}"
            yield Piece(text[start:end], shown_label(label(entity)), details)
            position = end
    yield Piece(text[position:])


def label(entity: Mapping[str, Any]) -> str:
    """Return the label of an entity, or of a token where tokens were not joined to entities.

    Example:
        >>> label({"entity_group": "DISEASE"}), label({"entity": "B-DISEASE"})
        ('DISEASE', 'B-DISEASE')
    """
    return str(entity.get("entity_group", entity.get("entity", "")))


def shown_label(name: str) -> str:
    """Return a label as it is shown.

    Example:
        >>> shown_label("DISEASE"), shown_label("")
        ('DISEASE', 'no label')
    """
    return name if name.strip() else UNNAMED
