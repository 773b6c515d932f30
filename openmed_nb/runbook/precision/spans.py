"""Two lists of entities of one text: which are the same, which moved, which have another label, are missing or extra.

And the gold entities that a person gives for texts, and how many of them a model finds.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ...display import Plain
from ...errors import ConfigurationError, whole_number
from ...models.certificates import EntityCounts

Span = tuple[int, int, str]  # Where an entity begins and ends, in characters, and its label.

SHOWN_CHANGES = 20  # This many changes are kept with their places; all are counted.


@dataclass(frozen=True)
class Change(Plain):
    """An entity that is not the same in both; never a word of it.

    Attributes:
        text: The number of the text.
        kind: ``"moved"``, ``"relabelled"``, ``"missing"`` or ``"extra"``.
        reference: Its place and label in the reference; ``None`` if it is extra.
        candidate: Its place and label in the candidate; ``None`` if it is missing.
    """

    text: int
    kind: str
    reference: Span | None
    candidate: Span | None


@dataclass(frozen=True)
class Spans(EntityCounts, Plain):
    """What became of all entities; each of the reference is one of the first four.

    Attributes:
        exact: At the same place, with the same label.
        moved: With the same label and other borders, but overlapping.
        relabelled: At the same place, with another label.
        missing: Not found by the candidate.
        extra: Found by the candidate alone.
        changes: The first of those that are not exact.
    """

    exact: int = 0
    moved: int = 0
    relabelled: int = 0
    missing: int = 0
    extra: int = 0
    changes: tuple[Change, ...] = ()

    ALSO = ("reference", "agreement")

    def __add__(self, other: Spans) -> Spans:
        return Spans(
            self.exact + other.exact,
            self.moved + other.moved,
            self.relabelled + other.relabelled,
            self.missing + other.missing,
            self.extra + other.extra,
            (self.changes + other.changes)[:SHOWN_CHANGES],
        )


def compare_spans(reference: Iterable[Span], candidate: Iterable[Span], text: int = 0) -> Spans:
    """Return what became of the entities of one text.

    As many as can be are paired: first those that are equal, then those with equal borders, then those with equal labels
    that overlap. What is left over is missing or extra, so that the two sides may change places.

    Args:
        reference: The entities of the reference.
        candidate: The entities of the candidate.
        text: The number of the text.
    """
    ours, theirs = Counter(reference), Counter(candidate)
    exact = sum((ours & theirs).values())
    left, right = sorted((ours - theirs).elements()), sorted((theirs - ours).elements())
    relabelled = _same_borders(left, right)
    left, right = _without(left, [one for one, _ in relabelled]), _without(right, [other for _, other in relabelled])
    moved = _overlapping(left, right)
    missing, extra = _without(left, [one for one, _ in moved]), _without(right, [other for _, other in moved])
    changes = (
        *(Change(text, "moved", one, other) for one, other in moved),
        *(Change(text, "relabelled", one, other) for one, other in relabelled),
        *(Change(text, "missing", one, None) for one in missing),
        *(Change(text, "extra", None, other) for other in extra),
    )
    return Spans(exact, len(moved), len(relabelled), len(missing), len(extra), changes[:SHOWN_CHANGES])


def _same_borders(left: Sequence[Span], right: Sequence[Span]) -> list[tuple[Span, Span]]:
    """Pair spans with equal borders; each is in one pair at most."""
    free: dict[tuple[int, int], list[Span]] = {}
    for other in right:
        free.setdefault(other[:2], []).append(other)
    return [(one, free[one[:2]].pop(0)) for one in left if free.get(one[:2])]


def _overlapping(left: Sequence[Span], right: Sequence[Span]) -> list[tuple[Span, Span]]:
    """Pair spans of one label that share a character, as many as can be; each is in one pair at most.

    The span that ends first, of either side, takes the one of the other side that ends first among those that begin before
    it ends. All that overlap it reach over its end, so the one that ends first has the fewest others to pair with, and no
    other choice leaves more pairs: greedy pairing finds as many as there can be.
    """
    pairs = []
    for label in dict.fromkeys(label for _, _, label in left):
        ours, theirs = (
            sorted((one for one in side if one[2] == label), key=lambda one: (one[1], one[0])) for side in (left, right)
        )
        while ours and theirs:
            turned = theirs[0][1] < ours[0][1]
            ahead, others = (theirs, ours) if turned else (ours, theirs)
            one = ahead.pop(0)
            other = next((each for each in others if each[0] < one[1]), None)
            if other is not None:
                others.remove(other)
                pairs.append((other, one) if turned else (one, other))
    return sorted(pairs, key=lambda pair: pair[1])


def _without(spans: Sequence[Span], gone: Sequence[Span]) -> list[Span]:
    return sorted((Counter(spans) - Counter(gone)).elements())


@dataclass(frozen=True)
class Score(Plain):
    """How many gold entities were found, each with both borders and its label right.

    Attributes:
        gold: How many there are.
        found: How many the model found.
        right: How many of those are gold.
    """

    gold: int = 0
    found: int = 0
    right: int = 0

    ALSO = ("recall", "precision", "f1")

    @property
    def recall(self) -> float:
        """The share of the gold entities that were found; 1 if there are none."""
        return self.right / self.gold if self.gold else 1.0

    @property
    def precision(self) -> float:
        """The share of the entities found that are gold; 1 if there are none."""
        return self.right / self.found if self.found else 1.0

    @property
    def f1(self) -> float:
        """The harmonic mean of both."""
        return 2 * self.right / (self.gold + self.found) if self.gold + self.found else 1.0

    def __add__(self, other: Score) -> Score:
        return Score(self.gold + other.gold, self.found + other.found, self.right + other.right)


def score(gold: Iterable[Span], found: Iterable[Span]) -> Score:
    """Return the score of the entities found in one text."""
    wanted, there = Counter(gold), Counter(found)
    return Score(wanted.total(), there.total(), (wanted & there).total())


GOLD_REMEDY = (
    "For each text give a list of (start, end, label), or of mappings with start, end, and label or entity_group."
)


def gold_spans(gold: Any) -> tuple[tuple[Span, ...], ...]:
    """Return the gold entities of each text.

    Args:
        gold: For each text a list of ``(start, end, label)``, or of mappings with ``start``, ``end``, and ``label``,
            ``entity_group`` or ``entity``.
    """
    if not _is_series(gold):
        raise ConfigurationError(f"The gold cannot be {type(gold).__name__}.", GOLD_REMEDY)
    texts = []
    for number, entities in enumerate(gold):
        if not _is_series(entities):
            raise ConfigurationError(f"The gold of text {number} cannot be {type(entities).__name__}.", GOLD_REMEDY)
        spans = [_gold_span(entity) for entity in entities]
        if None in spans:
            what = f"The gold of text {number} has no entity at its place {spans.index(None)}."
            raise ConfigurationError(what, GOLD_REMEDY)
        texts.append(tuple(span for span in spans if span))
    return tuple(texts)


def _gold_span(entity: Any) -> Span | None:
    """Return what a person gives as an entity as a span; ``None`` for anything else."""
    if isinstance(entity, Mapping):
        label = next((entity[key] for key in ("entity_group", "label", "entity") if key in entity), None)
        entity = (entity.get("start"), entity.get("end"), label)
    if not (isinstance(entity, (tuple, list)) and len(entity) == 3):  # noqa: PLR2004 - start, end, label
        return None
    first, last, label = whole_number(entity[0]), whole_number(entity[1]), entity[2]
    if first is None or last is None or not isinstance(label, str):
        return None
    return (first, last, label) if 0 <= first < last else None


def _is_series(thing: Any) -> bool:
    return hasattr(thing, "__iter__") and not isinstance(thing, (str, bytes, Mapping))
