"""What an annotation returns: entities by text, shown and summed up."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

from ..display import Json, Piece, Report, Shown, Table
from ..errors import ConfigurationError
from .decoding import Entity
from .stream import Answers

if TYPE_CHECKING:
    import pandas as pd


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


SHOWN_TEXTS = 5
"""How many texts are shown with their entities marked; only these are kept."""

SHOWN_CHARACTERS = 2000
"""How much of each is shown."""


@dataclass(frozen=True, repr=False, eq=False)
class Annotations(Shown, Sequence[list[Entity]]):
    """The entities of many texts: a sequence with a list for each text, in the order of the texts.

    Attributes:
        answers: The entities of all texts.
        first_texts: The first texts, to be shown.
        model: The name of the model.
        device: The device that it ran on.
        show_text: Whether texts, and the words in them, are part of what is shown.
        settings: What tells its run from another: the model and everything that changes its answers.
    """

    answers: Answers
    first_texts: tuple[str, ...]
    model: str
    device: str
    show_text: bool = True
    settings: Mapping[str, Any] = field(default_factory=dict)

    def __len__(self) -> int:
        return len(self.answers)

    def __getitem__(self, number: Any) -> Any:
        return self.answers[number]

    def __iter__(self) -> Iterator[list[Entity]]:
        return iter(self.answers)

    @property
    def errors(self) -> Mapping[int, str]:
        """Why texts have no answer, by their number."""
        return dict(self.answers.errors)

    def to_dict(self) -> dict[str, Any]:
        """Return model, device, and for each text its entities or its error, as plain mappings and lists."""
        errors = self.answers.errors
        texts = [
            {"error": errors[number]} if number in errors else {"entities": entities}
            for number, entities in enumerate(self)
        ]
        return {"model": self.model, "device": self.device, "texts": texts}

    def to_json(self) -> Json:
        """Return :meth:`to_dict` as JSON."""
        return Json(json.dumps(self.to_dict(), ensure_ascii=False))

    def to_frame(self) -> pd.DataFrame:
        """Return a table with a row for each entity: ``text`` (its number), label, ``score``, ``word``, ``start``, ``end``.

        Raises:
            ConfigurationError: Where pandas is not installed.
        """
        try:
            import pandas as pd
        except ImportError as error:
            raise ConfigurationError("to_frame() needs pandas.", "Install it: python -m pip install pandas.") from error
        return pd.DataFrame(self.answers.columns())

    def summary(self) -> Summary:
        """Return counts: of texts, of entities by label, and of the words that were found most often."""
        words = Counter(word.lower() for word in self.answers.words)
        return Summary(
            model=self.model,
            device=self.device,
            texts=len(self),
            empty=sum(1 for count in self.answers.counts() if not count) - len(self.answers.errors),
            errors=tuple(sorted(self.answers.errors.items())),
            labels=tuple(sorted(Counter(self.answers.labels).items())),
            words=tuple(sorted(words.items(), key=lambda word: (-word[1], word[0]))) if self.show_text else (),
        )

    def report(self) -> Report:
        """Return what there is to show: counts, and the first texts with their entities marked."""
        summary = self.summary()
        if not self.show_text:
            return Report(summary.title, (*summary.sentences, HIDDEN), tables=summary.tables[:1])
        shown = f"Shown: the first {len(self.first_texts)} texts." if 0 < len(self.first_texts) < len(self) else ""
        sentences = (*summary.sentences, *([shown] if shown else []))
        return Report(summary.title, sentences, tables=summary.tables[:1], pieces=tuple(self._pieces()))

    def _pieces(self) -> Iterator[Piece]:
        for number, (text, entities) in enumerate(zip(self.first_texts, self, strict=False)):
            yield Piece(f"{number}: ")
            if number in self.answers.errors:  # It may be one that nothing can show, such as half of a surrogate pair.
                yield Piece("(no answer)\n")
                continue
            shown = text[:SHOWN_CHARACTERS]
            yield from marked(shown, [entity for entity in entities if entity["end"] <= len(shown)])
            yield Piece("…\n" if len(shown) < len(text) else "\n")
