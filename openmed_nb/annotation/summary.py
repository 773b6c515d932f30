"""Counts of what a model found in many texts."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from ..interface.display import Report, Shown, Table
from .annotated import shown_label

SHOWN_ROWS = 10
"""How many rows a table shows; the value has them all."""


@dataclass(frozen=True, repr=False)
class Summary(Shown):
    """Counts of what a model found in many texts.

    Attributes:
        model: The name of the model.
        device: The device that it ran on.
        texts: How many texts were read.
        empty: How many of them have no entity.
        errors: The number of each text that has no answer, and why.
        labels: Each label, and how many entities have it.
        words: Each word or phrase in lower case, and how often it was found, the most frequent first.
    """

    model: str
    device: str
    texts: int
    empty: int
    errors: tuple[tuple[int, str], ...]
    labels: tuple[tuple[str, int], ...]
    words: tuple[tuple[str, int], ...]

    def to_dict(self) -> dict[str, Any]:
        """Return the counts as plain mappings, lists, strings and numbers."""
        pairs = {"errors": dict(self.errors), "labels": dict(self.labels), "words": dict(self.words)}
        return {**asdict(self), **pairs}

    @property
    def title(self) -> str:
        """One line: how many entities in how many texts."""
        entities = counted(sum(count for _label, count in self.labels), "entity", "entities")
        return f"{entities} found in {counted(self.texts, 'text', 'texts')} by {self.model} on {self.device}"

    @property
    def sentences(self) -> tuple[str, ...]:
        """What else there is to say."""
        labels = ", ".join(f"{shown_label(label)} {count:,}" for label, count in self.labels)
        said = [f"By label: {labels}." if labels else "", f"Texts without any: {self.empty:,}." if self.empty else ""]
        failed = f"Texts that could not be read or run: {len(self.errors):,}." if self.errors else ""
        return tuple(sentence for sentence in (*said, failed) if sentence)

    @property
    def tables(self) -> tuple[Table, ...]:
        """The texts that have no answer, and the words that were found most often."""
        errors = tuple((str(number), error) for number, error in self.errors[:SHOWN_ROWS])
        words = tuple((word, str(count)) for word, count in self.words[:SHOWN_ROWS])
        return (
            Table("Texts without an answer", ("text", "why"), errors),
            Table("Found most often", ("words", "times"), words),
        )

    def report(self) -> Report:
        """Return the counts as sentences and tables."""
        return Report(self.title, self.sentences, tables=self.tables)


def counted(count: int, one: str, several: str) -> str:
    """Return a number with its noun.

    Example:
        >>> counted(1, "text", "texts"), counted(1200, "text", "texts")
        ('1 text', '1,200 texts')
    """
    return f"{count:,} {one if count == 1 else several}"
