"""What a pipeline found in one text: the entities, marked in the text."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ..errors import UnreadableText
from ..interface.display import Piece, Report, Shown, Table

HIDDEN = "(the text is hidden)"


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
        return Report(title, pieces=tuple(self._pieces()), tables=tables)

    def _table(self) -> Table:
        rows = tuple(
            (label(entity), f"{float(entity['score']):.2f}", f"{entity['start']}-{entity['end']}", self._word(entity))
            for entity in self.entities
        )
        return Table("Entities", ("label", "score", "characters", "text"), rows)

    def _word(self, entity: Mapping[str, Any]) -> str:
        return " ".join(self.text[entity["start"] : entity["end"]].split()) if self.show_text else "…"

    def _pieces(self) -> Iterator[Piece]:
        """Yield the text in pieces, the entities marked; one that overlaps an earlier one is left to the table."""
        position = 0
        for entity in sorted(self.entities, key=lambda one: (one["start"], one["end"])):
            start, end = entity["start"], entity["end"]
            if start >= position < end:
                yield Piece(self.text[position:start])
                details = f"{float(entity['score']):.3f}, characters {start} to {end}"
                yield Piece(self.text[start:end], label(entity), details)
                position = end
        yield Piece(self.text[position:])


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
