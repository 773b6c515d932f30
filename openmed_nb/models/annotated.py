"""What a pipeline found in one text: the entities, marked in the text."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ..errors import UnreadableText
from ..interface.display import Report, Shown, Table, escape

COLOURS = 6
HIDDEN = "(the text is not shown: OpenMedMagics.show_text is False)"


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

    @property
    def labels(self) -> tuple[str, ...]:
        """The labels that were found, in alphabetical order."""
        return tuple(sorted({label(entity) for entity in self.entities}))

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
            return Report(title, (HIDDEN,), tables)
        return Report(title, (), tables, figure=self._html() + self._legend_html(), figure_text=self._text())

    def _count(self, name: str) -> int:
        return sum(label(entity) == name for entity in self.entities)

    def _table(self) -> Table:
        rows = tuple(
            (label(entity), f"{float(entity['score']):.2f}", f"{entity['start']}-{entity['end']}", self._word(entity))
            for entity in self.entities
        )
        return Table("Entities", ("label", "score", "characters", "text"), rows)

    def _word(self, entity: Mapping[str, Any]) -> str:
        return " ".join(self.text[entity["start"] : entity["end"]].split()) if self.show_text else "…"

    def _html(self) -> str:
        pieces = (escape(piece) if entity is None else self._mark(piece, entity) for piece, entity in self._pieces())
        return f'<div dir="auto" style="white-space: pre-wrap">{"".join(pieces)}</div>'

    def _mark(self, piece: str, entity: Mapping[str, Any]) -> str:
        name = escape(label(entity))
        hover = f"{name} {float(entity['score']):.3f}, characters {entity['start']} to {entity['end']}"
        content = f"{escape(piece)} <small>{name}</small>"
        return f'<mark class="{self._colour(label(entity))}" title="{hover}">{content}</mark>'

    def _legend_html(self) -> str:
        marks = (
            f'<mark class="{self._colour(name)}">{escape(name)}</mark> {self._count(name)}' for name in self.labels
        )
        return f"<p>Labels: {', '.join(marks)}</p>" if self.labels else ""

    def _colour(self, name: str) -> str:
        return f"openmed-colour-{self.labels.index(name) % COLOURS}"

    def _text(self) -> str:
        pieces = (piece if entity is None else f"[{piece}]({label(entity)})" for piece, entity in self._pieces())
        legend = ", ".join(f"{name} {self._count(name)}" for name in self.labels)
        return "".join(pieces).rstrip() + (f"\nLabels: {legend}" if legend else "")

    def _pieces(self) -> Iterator[tuple[str, Mapping[str, Any] | None]]:
        """Yield the text in pieces, each with its entity; one that overlaps an earlier one is left to the table."""
        position = 0
        for entity in sorted(self.entities, key=lambda one: (one["start"], one["end"])):
            if entity["start"] >= position < entity["end"]:
                yield self.text[position : entity["start"]], None
                yield self.text[entity["start"] : entity["end"]], entity
                position = entity["end"]
        yield self.text[position:], None


def check_text(text: object) -> None:
    r"""Check that a text can be read.

    Raises:
        UnreadableText: For anything but a text, and for half of a surrogate pair, which no encoding can write.

    Example:
        >>> check_text("\ud800")
        Traceback (most recent call last):
        ...
        openmed_nb.errors.UnreadableText: The text has half of a surrogate pair at character 0. Remove it, or read the file it comes from with its right encoding.
    """
    if not isinstance(text, str):
        raise UnreadableText(f"A text is expected, not {type(text).__name__}.", "Pass a string.")
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise UnreadableText(
            f"The text has half of a surrogate pair at character {error.start}.",
            "Remove it, or read the file it comes from with its right encoding.",
        ) from None


def label(entity: Mapping[str, Any]) -> str:
    """Return the label of an entity, or of a token where tokens were not joined to entities.

    Example:
        >>> label({"entity_group": "DISEASE"}), label({"entity": "B-DISEASE"})
        ('DISEASE', 'B-DISEASE')
    """
    return str(entity.get("entity_group", entity.get("entity", "")))
