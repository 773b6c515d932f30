"""Two lists of entities of one text: which are the same, which moved, which have another label, are missing or extra."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ...errors import ConfigurationError

Span = tuple[int, int, str]
"""Where an entity begins and ends, in characters, and its label."""

SHOWN_CHANGES = 20
"""So many changes are kept with their places; all are counted."""

GOLD_REMEDY = (
    "For each text give a list of (start, end, label), or of mappings with start, end, and label or entity_group."
)


@dataclass(frozen=True)
class Change:
    """An entity that is not the same in both; never a word of it.

    Attributes:
        text: The number of the text.
        kind: ``"moved"``, ``"relabelled"``, ``"missing"`` or ``"extra"``.
        reference: Its place and label in the reference; ``None`` where it is extra.
        candidate: Its place and label in the candidate; ``None`` where it is missing.
    """

    text: int
    kind: str
    reference: Span | None
    candidate: Span | None

    def to_dict(self) -> dict[str, Any]:
        """Return the change as a mapping, ready for JSON."""
        spans = {"reference": self.reference, "candidate": self.candidate}
        return {"text": self.text, "kind": self.kind, **{name: span and list(span) for name, span in spans.items()}}


@dataclass(frozen=True)
class Spans:
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

    @property
    def reference(self) -> int:
        """How many entities the reference found."""
        return self.exact + self.moved + self.relabelled + self.missing

    @property
    def all(self) -> int:
        """How many entities either found, those that both found counted once."""
        return self.reference + self.extra

    @property
    def agreement(self) -> float:
        """The share of all entities that are exact; 1 where there is none."""
        return self.exact / self.all if self.all else 1.0

    def __add__(self, other: Spans) -> Spans:
        return Spans(
            self.exact + other.exact,
            self.moved + other.moved,
            self.relabelled + other.relabelled,
            self.missing + other.missing,
            self.extra + other.extra,
            (self.changes + other.changes)[:SHOWN_CHANGES],
        )

    def to_dict(self) -> dict[str, Any]:
        """Return the counts and the first changes, ready for JSON."""
        counts = {name: value for name, value in vars(self).items() if name != "changes"}
        changes = [change.to_dict() for change in self.changes]
        return {**counts, "reference": self.reference, "agreement": self.agreement, "changes": changes}


def compare_spans(reference: Iterable[Span], candidate: Iterable[Span], text: int = 0) -> Spans:
    """Return what became of the entities of one text.

    As many as can be are paired: first those that are equal, then those with equal borders, then those with equal labels
    that overlap. What is left over is missing or extra, so that the two sides may change places.

    Args:
        reference: The entities of the reference.
        candidate: The entities of the candidate.
        text: The number of the text.

    Example:
        >>> found = compare_spans([(0, 6, "DISEASE"), (9, 20, "DISEASE")], [(0, 6, "DISEASE"), (9, 15, "DISEASE")], 3)
        >>> found.exact, found.changes
        (1, (Change(text=3, kind='moved', reference=(9, 20, 'DISEASE'), candidate=(9, 15, 'DISEASE')),))
    """
    ours, theirs = Counter(reference), Counter(candidate)
    exact = sum((ours & theirs).values())
    left, right = sorted((ours - theirs).elements()), sorted((theirs - ours).elements())
    relabelled = paired(left, right, lambda one, other: one[:2] == other[:2])
    left, right = without(left, [one for one, _ in relabelled]), without(right, [other for _, other in relabelled])
    moved = paired(left, right, lambda one, other: one[2] == other[2] and overlap(one, other))
    missing, extra = without(left, [one for one, _ in moved]), without(right, [other for _, other in moved])
    changes = (
        *(Change(text, "moved", one, other) for one, other in moved),
        *(Change(text, "relabelled", one, other) for one, other in relabelled),
        *(Change(text, "missing", one, None) for one in missing),
        *(Change(text, "extra", None, other) for other in extra),
    )
    return Spans(exact, len(moved), len(relabelled), len(missing), len(extra), changes[:SHOWN_CHANGES])


def overlap(one: Span, other: Span) -> bool:
    """Tell whether two entities share a character."""
    return max(one[0], other[0]) < min(one[1], other[1])


def without(spans: Sequence[Span], gone: Sequence[Span]) -> list[Span]:
    """Return what is left of spans, each counted as often as it is there."""
    return sorted((Counter(spans) - Counter(gone)).elements())


def paired(left: Sequence[Span], right: Sequence[Span], fits: Callable[[Span, Span], bool]) -> list[tuple[Span, Span]]:
    """Return as many pairs as there can be of spans that fit, each span in one (Kuhn's algorithm)."""
    partner: dict[int, int] = {}

    def finds_one(place: int, seen: set[int]) -> bool:
        """Give a span of the left a partner, for which others may change theirs."""
        for number, other in enumerate(right):
            if number not in seen and fits(left[place], other):
                seen.add(number)
                if number not in partner or finds_one(partner[number], seen):
                    partner[number] = place
                    return True
        return False

    for place in range(len(left)):
        finds_one(place, set())
    return [(left[place], right[number]) for number, place in sorted(partner.items())]


@dataclass(frozen=True)
class Score:
    """How many gold entities were found, each with both borders and its label right.

    Attributes:
        gold: How many there are.
        found: How many the model found.
        right: How many of those are gold.
    """

    gold: int = 0
    found: int = 0
    right: int = 0

    @property
    def recall(self) -> float:
        """The share of the gold entities that were found; 1 where there are none."""
        return self.right / self.gold if self.gold else 1.0

    @property
    def precision(self) -> float:
        """The share of the entities found that are gold; 1 where there are none."""
        return self.right / self.found if self.found else 1.0

    @property
    def f1(self) -> float:
        """The harmonic mean of both."""
        return 2 * self.right / (self.gold + self.found) if self.gold + self.found else 1.0

    def __add__(self, other: Score) -> Score:
        return Score(self.gold + other.gold, self.found + other.found, self.right + other.right)

    def to_dict(self) -> dict[str, float]:
        """Return counts and shares, ready for JSON."""
        return {**vars(self), "recall": self.recall, "precision": self.precision, "f1": self.f1}


def score(gold: Iterable[Span], found: Iterable[Span]) -> Score:
    """Return the score of the entities found in one text.

    Example:
        >>> score([(0, 6, "DISEASE"), (9, 20, "DISEASE")], [(0, 6, "DISEASE")]).recall
        0.5
    """
    wanted, there = Counter(gold), Counter(found)
    return Score(wanted.total(), there.total(), (wanted & there).total())


def gold_spans(gold: Any) -> tuple[tuple[Span, ...], ...]:
    """Return the gold entities of each text.

    Args:
        gold: For each text a list of ``(start, end, label)``, or of mappings with ``start``, ``end``, and ``label``,
            ``entity_group`` or ``entity``.

    Raises:
        ConfigurationError: For anything else, with the number of the text.

    Example:
        >>> gold_spans([[(0, 6, "DISEASE")], [{"start": 4, "end": 9, "entity_group": "DISEASE"}]])
        (((0, 6, 'DISEASE'),), ((4, 9, 'DISEASE'),))
        >>> gold_spans([[], [(0, "6", "DISEASE")]])
        Traceback (most recent call last):
        ...
        openmed_nb.errors.ConfigurationError: The gold of text 1 has no entity at its place 0. For each text give a list \
of (start, end, label), or of mappings with start, end, and label or entity_group.
    """
    if not is_list(gold):
        raise ConfigurationError(f"The gold cannot be {type(gold).__name__}.", GOLD_REMEDY)
    return tuple(spans_of(entities, number) for number, entities in enumerate(gold))


def spans_of(entities: Any, number: int) -> tuple[Span, ...]:
    """Return the gold entities of one text."""
    if not is_list(entities):
        raise ConfigurationError(f"The gold of text {number} cannot be {type(entities).__name__}.", GOLD_REMEDY)
    spans = [span_of(entity) for entity in entities]
    if None in spans:
        what = f"The gold of text {number} has no entity at its place {spans.index(None)}."
        raise ConfigurationError(what, GOLD_REMEDY)
    return tuple(span for span in spans if span)


def span_of(entity: Any) -> Span | None:
    """Return an entity as a span, ``None`` where it is none."""
    if isinstance(entity, Mapping):
        label = next((entity[key] for key in ("entity_group", "entity", "label") if key in entity), None)
        entity = (entity.get("start"), entity.get("end"), label)
    if not (isinstance(entity, (tuple, list)) and len(entity) == 3):  # noqa: PLR2004 - start, end, label
        return None
    start, end, label = entity
    whole = all(hasattr(one, "__index__") and not isinstance(one, bool) for one in (start, end))
    if not whole or not isinstance(label, str):
        return None
    first, last = int(start), int(end)
    return (first, last, label) if 0 <= first < last else None


def is_list(thing: Any) -> bool:
    """Tell whether something is a series of things, and no text and no mapping."""
    return hasattr(thing, "__iter__") and not isinstance(thing, (str, bytes, Mapping))
