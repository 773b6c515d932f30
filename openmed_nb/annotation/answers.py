"""The answers to many texts, in some 40 bytes for each entity, so that a hundred thousand notes fit beside the model."""

from __future__ import annotations

import math
from array import array
from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import Any

import numpy as np

from .decoding import Entity

Answered = tuple[int, list[Entity] | str]
"""The fingerprint of a text, and its entities or why it has none."""


def is_entity(value: Any) -> bool:
    """Tell whether something that was read from a file is an entity: a label and a word, a score, and whole places.

    Example:
        >>> is_entity({"entity": "B-X", "score": 0.5, "word": "flu", "start": 0, "end": 3}), is_entity({"word": None})
        (True, False)
    """
    if not isinstance(value, dict):
        return False
    texts = value.get("word"), value.get("entity", value.get("entity_group"))
    places = value.get("start"), value.get("end"), value.get("index", 0)
    score = value.get("score")
    return (
        all(isinstance(one, str) for one in texts)
        and all(type(one) is int for one in places)
        and isinstance(score, float)
        and math.isfinite(score)
    )


class Answers(Sequence[list[Entity]]):
    """The entities of texts in the order of the texts; each list is made when it is asked for.

    Texts that have no answer have an empty list, and their reason in ``errors``. Of a text itself only a fingerprint is
    kept, to tell on resuming whether it is the same one.

    Args:
        key: What the label of an entity is called where there is no entity yet to tell it.
    """

    def __init__(self, key: str = "entity_group") -> None:
        self.errors: dict[int, str] = {}
        self.fingerprints = array("Q")
        self._bounds = array("q", [0])
        self._starts, self._ends, self._indices = array("q"), array("q"), array("q")
        self._scores = array("d")
        self._labels: list[str] = []
        self._words: list[str] = []
        self._key = key
        self._known: dict[str, str] = {}

    def add(self, fingerprint: int, answer: Sequence[Entity] | str) -> None:
        """Add the answer to the next text: its entities, or why it has none."""
        if isinstance(answer, str):
            self.errors[len(self)] = answer
            answer = ()
        for entity in answer:
            self._add_entity(entity)
        self._bounds.append(len(self._scores))
        self.fingerprints.append(fingerprint)

    def _add_entity(self, entity: Entity) -> None:
        self._key = "entity" if "entity" in entity else "entity_group"
        self._labels.append(self._same(entity[self._key]))
        self._words.append(self._same(entity["word"]))
        self._scores.append(entity["score"])
        self._starts.append(entity["start"])
        self._ends.append(entity["end"])
        if "index" in entity:
            self._indices.append(entity["index"])

    def _same(self, word: str) -> str:
        """Return a string equal to this one that is already held, where there is one."""
        return self._known.setdefault(word, word)

    def items(self) -> Iterator[Answered]:
        """Yield the fingerprint and the answer of each text, in the form that :meth:`add` takes."""
        for number, fingerprint in enumerate(self.fingerprints):
            yield fingerprint, self.errors.get(number, self[number])

    def __len__(self) -> int:
        return len(self._bounds) - 1

    def __getitem__(self, number: Any) -> Any:
        if isinstance(number, slice):
            return [self[one] for one in range(len(self))[number]]
        place = range(len(self))[number]
        return [self._entity(row) for row in range(self._bounds[place], self._bounds[place + 1])]

    def _entity(self, row: int) -> Entity:
        entity: Entity = {self._key: self._labels[row], "score": self._scores[row]}
        if self._indices:
            entity["index"] = self._indices[row]
        return {**entity, "word": self._words[row], "start": self._starts[row], "end": self._ends[row]}

    def counts(self) -> Iterator[int]:
        """Yield how many entities each text has."""
        return (last - first for first, last in pairwise(self._bounds))

    @property
    def labels(self) -> Sequence[str]:
        """The label of every entity, text after text."""
        return self._labels[: self._bounds[-1]]

    @property
    def words(self) -> Sequence[str]:
        """The word of every entity, text after text."""
        return self._words[: self._bounds[-1]]

    def columns(self) -> dict[str, Any]:
        """Return a table of all entities: the number of the text, then what an entity has, as a column each."""
        numbers = np.repeat(np.arange(len(self)), np.diff(np.array(self._bounds)))
        columns: dict[str, Any] = {
            "text": numbers,
            self._key: np.array(self.labels, dtype=object),
            "score": np.array(self._scores),
            "index": np.array(self._indices),
            "word": np.array(self.words, dtype=object),
            "start": np.array(self._starts),
            "end": np.array(self._ends),
        }
        return {name: column[: len(numbers)] for name, column in columns.items() if name != "index" or self._indices}
